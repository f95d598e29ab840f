//! From files to an index: what each layer holds, laid over each other from the base to the head.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use lh_block::{BLOCK, Extent};

use super::disk::{self, Alignment, Kind, Look};
use super::index::Index;
use super::intent::Intent;
use super::qcow2::Image;
use super::ranges::RangeSet;
use super::zero::ZeroMap;

/// A layer's open file.
#[derive(Debug)]
pub(super) struct LayerParts {
    /// Snapshot name; empty for the head; `None` for the backing file.
    pub(super) name: Option<String>,
    pub(super) file: Arc<File>,
    pub(super) length: u64,
    pub(super) zero: Option<ZeroMap>,
    /// The file is a qcow2 image; its length is that of the disk in it. Only a backing file can be one.
    pub(super) image: Option<Arc<Image>>,
}

impl LayerParts {
    /// Fills the buffer; what lies behind the layer's end is zero.
    pub(super) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        if let Some(image) = &self.image {
            return image.read_at(offset, buffer);
        }
        let done = disk::read_whole(&self.file, self.length, offset, buffer)?;
        buffer[done..].fill(0);
        Ok(())
    }
}

/// What the layers say together.
#[derive(Debug)]
pub(super) struct Layers {
    pub(super) layers: Vec<LayerParts>,
    /// Positions in `layers` of the head's chain, base (or backing file) first. The index's values are places in this
    /// list, counted from 1; 0 is zeroes.
    pub(super) chain: Vec<usize>,
    pub(super) index: Index,
}

/// Everything a [`super::Store`] is made of, on its way to the ring thread.
#[derive(Debug)]
pub struct Parts {
    pub(super) size: u64,
    /// The directory's `engine/`.
    pub(super) engine: PathBuf,
    pub(super) layers: Layers,
    pub(super) direct: Option<Alignment>,
    pub(super) intent: Intent,
    pub(super) rebuilding: bool,
    /// volume.meta says that there are zero marks.
    pub(super) marked: bool,
}

/// The blocks of a byte range.
pub(super) fn blocks(extent: Extent) -> std::ops::Range<u64> {
    extent.offset / BLOCK..extent.end().div_ceil(BLOCK)
}

/// The bytes of a range of blocks.
pub(super) fn bytes(range: std::ops::Range<u64>) -> Extent {
    Extent::new(range.start * BLOCK, (range.end - range.start) * BLOCK)
}

/// How extents that were never written are read.
#[derive(Debug)]
pub(super) enum Unwritten {
    /// In a directory of ours they are holes: what a power cut left of writes that were never flushed. Those that are
    /// found are listed, each with its layer's place.
    Hole(Vec<(usize, Extent)>),
    /// As Longhorn reads them: zeroes that hide what lies below.
    Data,
}

/// Lays the chain's layers over each other.
pub(super) fn index(
    size: u64,
    layers: &mut [LayerParts],
    chain: &[usize],
    unwritten: &mut Unwritten,
) -> io::Result<Index> {
    let mut index = Index::new(size.div_ceil(BLOCK));
    for (place, at) in chain.iter().enumerate() {
        let value = u8::try_from(place + 1).map_err(|_| io::Error::other("more than 255 layers"))?;
        let mut never = |extent| match &mut *unwritten {
            Unwritten::Hole(found) => {
                found.push((*at, extent));
                false
            }
            Unwritten::Data => true,
        };
        lay_over(&mut index, &mut layers[*at], value, &mut never)?;
    }
    Ok(index)
}

/// `never` is told of extents that were never written, and says whether they count.
fn lay_over(
    index: &mut Index,
    layer: &mut LayerParts,
    value: u8,
    never: &mut dyn FnMut(Extent) -> bool,
) -> io::Result<()> {
    let whole = Extent::new(0, layer.length);
    if let Some(image) = &layer.image {
        index.set_all(image.data(blocks(whole)), value);
        return Ok(());
    }
    let armed: Vec<_> = layer.zero.iter().flat_map(|zero| zero.armed(blocks(whole))).collect();
    index.set_all(armed.iter().cloned(), 0);
    let mut failed = None;
    let written = disk::extents(&layer.file, whole, Look::Synced)
        .map_while(|found| found.map_err(|err| failed = Some(err)).ok())
        .filter(|(extent, kind)| *kind == Kind::Written || never(*extent))
        .map(|(extent, _)| blocks(extent));
    index.set_all(written, value);
    if let Some(err) = failed {
        return Err(err);
    }
    if let Some(zero) = &mut layer.zero {
        let strong: Vec<_> = zero.strong(blocks(whole)).collect();
        index.set_all(strong.into_iter(), 0);
        for range in armed {
            for (part, _) in index.runs(range).filter(|(_, held)| *held == value) {
                zero.found(part);
            }
        }
    }
    Ok(())
}

/// For a layer outside the head's chain: which armed marks the file has overruled.
pub(super) fn look_through(layer: &mut LayerParts) -> io::Result<()> {
    let Some(zero) = &mut layer.zero else { return Ok(()) };
    look_below_armed(&layer.file, zero, blocks(Extent::new(0, layer.length)), Look::Synced)
}

/// Which armed marks of a range the file has overruled.
pub(super) fn look_below_armed(
    file: &File,
    zero: &mut ZeroMap,
    range: std::ops::Range<u64>,
    look: Look,
) -> io::Result<()> {
    let armed: Vec<_> = zero.armed(range).collect();
    for range in armed {
        for found in disk::extents(file, bytes(range), look) {
            let (extent, kind) = found?;
            if kind == Kind::Written {
                zero.found(blocks(extent));
            }
        }
    }
    Ok(())
}

/// The extents of a file that take space and were never written.
pub(super) fn unwritten(file: &File, length: u64) -> io::Result<Vec<Extent>> {
    disk::extents(file, Extent::new(0, length), Look::Synced)
        .filter(|found| !matches!(found, Ok((_, Kind::Written))))
        .map(|found| found.map(|(extent, _)| extent))
        .collect()
}

/// What one layer says of a range of blocks.
pub(super) struct Own {
    /// Its own bytes.
    pub(super) data: RangeSet,
    /// Zeroes, whatever lies below.
    pub(super) zero: RangeSet,
}

/// Asks a layer's file and zero map.
pub(super) fn own(
    file: &File,
    length: u64,
    zero: Option<&ZeroMap>,
    range: std::ops::Range<u64>,
    look: Look,
) -> io::Result<Own> {
    let mut data = RangeSet::default();
    let zero = zero.map(|map| map.zeroes(range.clone())).unwrap_or_default();
    if let Some(inside) = bytes(range).intersection(Extent::new(0, length.next_multiple_of(BLOCK))) {
        for found in disk::extents(file, inside, look) {
            let (extent, kind) = found?;
            if kind == Kind::Written {
                data.insert(blocks(extent));
            }
        }
    }
    data.subtract(&zero);
    Ok(Own { data, zero })
}
