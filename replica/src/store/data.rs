//! The ring thread's half: which layer holds a block, and what a request does to the files.
//!
//! The store plans and keeps account; the driver reads, writes, punches and syncs, then reports. What it relies on:
//!
//! - Two requests whose ranges overlap, one of which changes something, are never between plan and report at the same
//!   time.
//! - After an error of a method that takes `&mut self` (other than a full disk from a plan) the replica has failed.
//! - The index says what files and zero maps say, at any time between two calls.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use lh_block::{BLOCK, Extent, Runs};

use super::disk::{Alignment, Look};
use super::index::Index;
use super::intent::{self, Intent, IntentWrite};
use super::layer::{Layer, LayerNo};
use super::load::{self, Layers, Own, Parts, blocks, bytes};
use super::places::Places;
use super::qcow2::Place;
use super::ranges::RangeSet;
use super::zero::ZeroMap;
use super::zeroed::Recorded;

/// Runs of the index that are looked at to say which blocks hold data: those of a layer each are alike in that.
const LOOKUPS_MAX: usize = 4096;

/// Blocks that are looked at in all layers at once when a rebuild ends.
const LOOKED_AT: u64 = (4 << 20) / BLOCK;

/// Where bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nowhere: the range reads as zero.
    Zero,
    /// From the same offset of that layer's file. What lies behind the end of the file is zero (a backing file may end
    /// within a block).
    Layer(LayerNo),
    /// From this offset of that layer's file: a cluster of a qcow2 backing file. Zero behind the end, too.
    Cluster(LayerNo, u64),
    /// From [`Store::decode`]: a part of a qcow2 backing file that no read of the file alone gives.
    Packed(LayerNo),
}

/// A part of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Range of the volume.
    pub extent: Extent,
    /// Who holds it.
    pub source: Source,
}

/// What [`Store::close`] hands over for [`super::Directory::close_clean`].
#[derive(Debug)]
pub struct Closing {
    pub(super) has_marks: bool,
    pub(super) intent: Arc<File>,
    pub(super) pages: Vec<(u64, Vec<u8>)>,
}

/// When a change may be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Answer {
    /// At once.
    Now,
    /// Only after a flush that begins later (as if it had been FUA).
    AfterFlush,
}

/// The ring thread's handle of a replica directory.
#[derive(Debug)]
pub struct Store {
    pub(super) size: u64,
    /// The directory's `engine/`, where there is room for marks on a full disk.
    pub(super) engine: PathBuf,
    pub(super) layers: Vec<Layer>,
    /// Where the blocks are, and the layers of the head's chain.
    pub(super) places: Places,
    direct: Option<Alignment>,
    pub(super) intent: Intent,
    /// Lower layers may still get data: a hole is no zero.
    pub(super) rebuilding: bool,
    pub(super) marked: bool,
    pub(super) touched: bool,
    pub(super) flushing: bool,
    /// Numbers of layers that are gone.
    pub(super) free: Vec<LayerNo>,
    /// A snapshot that is being folded away, and its zero marks with it: no hole may rely on them any more.
    pub(super) folding: Option<LayerNo>,
    /// Parts of the index that were made anew from the files while that snapshot lay below the head.
    pub(super) resolved: RangeSet,
    /// While the head is folded into the layer below: blocks (1) that were changed and not copied since. Zeroes of the head
    /// are marks meanwhile.
    pub(super) undrained: Option<Index>,
}

impl Store {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { size, engine, layers, direct, intent, rebuilding, marked } = parts;
        let Layers { layers, chain, index } = layers;
        let number = |at: usize| LayerNo(u16::try_from(at).unwrap_or(u16::MAX));
        let rank = |at| {
            let place = chain.iter().position(|n| *n == at).map_or(0, |place| place + 1);
            u8::try_from(place).unwrap_or(0)
        };
        let layers = layers.into_iter().enumerate().map(|(at, l)| Layer {
            // A backing file is read through the page cache, which others may have filled.
            look: if direct.is_some() && l.name.is_some() { Look::Direct } else { Look::Synced },
            name: l.name,
            file: l.file,
            length: l.length,
            zero: l.zero,
            image: l.image,
            rank: rank(at),
            // A process before this one may have answered writes that it never synced: the next flush covers them.
            dirty: true,
            lost: RangeSet::default(),
        });
        Self {
            size,
            engine,
            layers: layers.collect(),
            places: Places::new(index, chain.iter().map(|at| number(*at)).collect()),
            direct,
            intent,
            rebuilding,
            marked,
            touched: false,
            flushing: false,
            free: Vec::new(),
            folding: None,
            resolved: RangeSet::default(),
            undrained: None,
        }
    }

    /// Replaces everything by what [`super::Directory::begin_rebuild`] made. Nothing is in flight. The files of the layers that were
    /// there before: the last descriptor of one whose name is gone gives its space back, which takes long. Close them where blocking is
    /// allowed.
    pub fn replace(&mut self, parts: Parts) -> Vec<Arc<File>> {
        let before = std::mem::replace(self, Self::new(parts));
        self.touched = true;
        before.layers.into_iter().map(|layer| layer.file).collect()
    }

    /// Volume size in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// What O_DIRECT asks for; `None` if the files are opened without.
    pub const fn direct(&self) -> Option<Alignment> {
        self.direct
    }

    /// The alignment of the memory that a write of a range to the head should have: with less it works, too, but slowly.
    /// `None` if the files are opened without O_DIRECT.
    pub fn write_alignment(&self, extent: Extent) -> Option<(u32, u32)> {
        let direct = self.direct?;
        let head = self.at(self.head()).rank;
        let filling = || self.places.runs(blocks(extent)).any(|(_, rank)| rank != head);
        let memory = if direct.filling > direct.memory && filling() { direct.filling } else { direct.memory };
        Some((memory, direct.offset))
    }

    /// Numbers of the layers of the head's chain, base first.
    pub(super) fn chain(&self) -> &[LayerNo] {
        self.places.chain()
    }

    /// The head.
    pub fn head(&self) -> LayerNo {
        self.chain()[self.chain().len() - 1]
    }

    /// The layer of a snapshot's name; the empty name is the head.
    pub fn layer(&self, name: &str) -> Option<LayerNo> {
        let at = self.layers.iter().position(|l| l.name.as_deref() == Some(name))?;
        u16::try_from(at).ok().map(LayerNo)
    }

    /// How many layers there are, the backing file included; numbers count from 0. Grows with each snapshot.
    pub fn layers(&self) -> u16 {
        u16::try_from(self.layers.len()).unwrap_or(u16::MAX)
    }

    /// The layer's file: all I/O on the layer goes through this descriptor (a duplicate is the same to its lock).
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer_file(&self, layer: LayerNo) -> &Arc<File> {
        &self.at(layer).file
    }

    /// The layer's length in bytes: nothing is written behind it.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer_length(&self, layer: LayerNo) -> u64 {
        self.at(layer).length
    }

    /// How many bytes the layer's file has: a read that ends before that found a file that was cut off. Behind it is nothing, as in a
    /// hole.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn file_length(&self, layer: LayerNo) -> u64 {
        let layer = self.at(layer);
        layer.image.as_ref().map_or(layer.length, |image| image.file_length())
    }

    /// A layer of this directory: no backing file, and not folded away.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn is_own(&self, layer: LayerNo) -> bool {
        self.at(layer).name.is_some()
    }

    pub(super) fn at(&self, layer: LayerNo) -> &Layer {
        &self.layers[usize::from(layer.0)]
    }

    pub(super) fn at_mut(&mut self, layer: LayerNo) -> &mut Layer {
        &mut self.layers[usize::from(layer.0)]
    }

    /// Who holds the range, in order and without gaps, behind what `pieces` has. The range is inside the volume.
    /// Over a qcow2 backing file it may read 4 KiB of that file's tables, which are then kept.
    pub fn plan_read(&self, extent: Extent, pieces: &mut Vec<Piece>) {
        for (range, held) in self.places.runs(blocks(extent)) {
            let Some(extent) = bytes(range).intersection(extent) else { continue };
            match self.holder(held) {
                Some(layer) => self.plan_read_of(layer, extent, pieces),
                None => pieces.push(Piece { extent, source: Source::Zero }),
            }
        }
    }

    /// Where the bytes are of a range that this layer holds, as [`Store::plan_read`] says it.
    pub fn plan_read_of(&self, layer: LayerNo, extent: Extent, pieces: &mut Vec<Piece>) {
        let Some(image) = self.at(layer).image.as_deref() else {
            return pieces.push(Piece { extent, source: Source::Layer(layer) });
        };
        image.places(extent, |extent, place| {
            let source = match place {
                Place::Zero => Source::Zero,
                Place::At(offset) => Source::Cluster(layer, offset),
                Place::Packed => Source::Packed(layer),
            };
            pieces.push(Piece { extent, source });
        });
    }

    /// Which blocks of a range hold data, from its begin on: as far as one answer says it, and no more than so many runs of the index
    /// say, which bounds the time that it takes.
    pub fn allocation(&self, extent: Extent) -> Runs {
        let mut told = Runs::default();
        for (part, value) in self.places.runs(blocks(extent)).take(LOOKUPS_MAX) {
            let count = u32::try_from(part.end - part.start).unwrap_or(0);
            if !told.push(count, value != 0) {
                break;
            }
        }
        told
    }

    /// Gives out the bytes of a [`Source::Packed`], in order: each call has the next ones. Reads from the disk and
    /// decodes, both of which take their time: clusters of a compressed backing file that were read lately are kept.
    ///
    /// # Errors
    /// The disk's; `InvalidData` for an image that is damaged.
    pub fn decode(&self, layer: LayerNo, extent: Extent, each: impl FnMut(&[u8])) -> io::Result<()> {
        let Some(image) = &self.at(layer).image else {
            return Err(io::Error::other("a layer that is not packed was to be decoded"));
        };
        image.decode(extent, each)
    }

    /// A write of the range (whole blocks) to the head, or a put to `layer`, is about to be submitted: no hole will be
    /// punched there any more. `false`: a punch of [`Store::take_punch`] is in flight there; ask again after it.
    #[must_use]
    pub fn begin_write(&mut self, layer: LayerNo, extent: Extent) -> bool {
        if layer != self.head() {
            self.places.changed(blocks(extent));
        }
        self.at_mut(layer).zero.as_mut().is_none_or(|zero| zero.begin_write(blocks(extent)))
    }

    /// A write of the range (whole blocks) to the head has completed.
    pub fn wrote(&mut self, extent: Extent) -> Answer {
        let head = self.head();
        self.touched = true;
        let layer = self.at_mut(head);
        layer.dirty = true;
        let rank = layer.rank;
        let wait = layer.zero.as_mut().is_some_and(|zero| zero.wrote(blocks(extent)));
        self.places.set(blocks(extent), rank);
        self.changed_head(extent);
        if wait { Answer::AfterFlush } else { Answer::Now }
    }

    /// The head itself holds data in the range.
    pub fn head_holds_any(&self, extent: Extent) -> bool {
        let head = self.at(self.head()).rank;
        self.places.runs(blocks(extent)).any(|(_, rank)| rank == head)
    }

    /// What the head itself holds from the beginning of the range (whole blocks) on, up to the first hole.
    ///
    /// After a write that found no space (and [`Store::refresh`]) nothing behind that hole was changed, by this attempt or by one of
    /// before: file systems give blocks in the order of the file, with direct I/O and without, and a hole that was passed is none
    /// any more. `None`: there are marks in the range, below which a write goes on although the block counts as a hole.
    pub fn head_holds_first(&self, extent: Extent) -> Option<Extent> {
        let head = self.at(self.head());
        if head.zero.as_ref().is_some_and(|zero| zero.touched(blocks(extent)).next().is_some()) {
            return None;
        }
        let gap = self.places.runs(blocks(extent)).find(|(_, rank)| *rank != head.rank);
        let len = gap.map_or(extent.len, |(run, _)| (run.start - blocks(extent).start) * BLOCK);
        Some(Extent::new(extent.offset, len))
    }

    /// A write, punch or put of the range failed half-way: reads from the files what they now hold.
    ///
    /// # Errors
    /// The disk's.
    pub fn refresh(&mut self, layer: LayerNo, extent: Extent) -> io::Result<()> {
        self.touched = true;
        let layer = self.at_mut(layer);
        layer.dirty = true;
        if let Some(zero) = &mut layer.zero {
            zero.write_failed(blocks(extent));
            // What was written over an armed mark counts, as it will for whoever opens the directory next.
            load::look_below_armed(&layer.file, zero, blocks(extent), layer.look)?;
        }
        if layer.rank != 0 {
            let head = self.at(self.head()).rank;
            self.resolve(blocks(extent), head)?;
            self.changed_head(extent);
        }
        Ok(())
    }

    pub(super) fn own(&self, layer: LayerNo, range: Range<u64>) -> io::Result<Own> {
        let layer = self.at(layer);
        if let Some(image) = &layer.image {
            let mut own = Own { data: RangeSet::default(), zero: RangeSet::default() };
            image.data(range).for_each(|part| own.data.insert(part));
            return Ok(own);
        }
        load::own(&layer.file, layer.length, layer.zero.as_ref(), range, layer.look)
    }

    /// All blocks that are zero by a layer's zero map.
    pub(super) fn zeroes(&self, layer: LayerNo) -> RangeSet {
        let layer = self.at(layer);
        layer.zero.as_ref().map(|zero| zero.zeroes(0..layer.length.div_ceil(BLOCK))).unwrap_or_default()
    }

    /// The blocks of the range that read as data through the chain below a rank, or will when a fold has ended.
    pub(super) fn held_below(&self, range: Range<u64>, rank: u8) -> io::Result<RangeSet> {
        let (mut rest, mut held) = (RangeSet::default(), RangeSet::default());
        rest.insert(range);
        for (_, layer) in self.up_to(rank - 1).rev() {
            for part in rest.clone().iter() {
                let own = self.own(layer, part)?;
                held.append(&own.data);
                rest.subtract(&own.data);
                if self.folding != Some(layer) {
                    rest.subtract(&own.zero);
                }
            }
            if rest.is_empty() {
                break;
            }
        }
        Ok(held)
    }

    /// Makes the index of a range anew from the layers up to a rank, those above being known to say nothing.
    pub(super) fn resolve(&mut self, range: Range<u64>, rank: u8) -> io::Result<()> {
        let mut rest = RangeSet::default();
        rest.insert(range.clone());
        if self.folding.is_some() && self.folding == self.below_head() {
            self.resolved.insert(range);
        }
        let layers: Vec<_> = self.up_to(rank).collect();
        for (value, layer) in layers.into_iter().rev() {
            for part in rest.clone().iter() {
                let own = self.own(layer, part)?;
                for (set, value) in [(&own.data, value), (&own.zero, 0)] {
                    self.places.set_all(set.iter(), value);
                    rest.subtract(set);
                }
            }
        }
        self.places.set_all(rest.iter(), 0);
        Ok(())
    }

    /// Bytes in a chunk of the intent bitmap.
    pub const fn intent_chunk(&self) -> u64 {
        self.intent.chunk()
    }

    /// The marked ranges of the intent bitmap, whole chunks, the last cut at the volume's end.
    pub fn intent(&self) -> Vec<Extent> {
        self.intent.ranges()
    }

    /// The chunk of the intent bitmap that this byte lies in was marked when the directory was opened, and is since: what the disk has
    /// there may not be what was written.
    pub fn was_found_marked(&self, at: u64) -> bool {
        self.intent.was_found_marked(at / self.intent.chunk())
    }

    /// The chunks that the range touches are marked with the next [`Store::intent_begin`].
    pub fn intent_mark(&mut self, extent: Extent) {
        self.touched = true;
        self.intent.mark(extent);
    }

    /// The chunks wholly inside the range are marked no more, from the next [`Store::intent_begin`] on.
    pub fn intent_clear(&mut self, extent: Extent) {
        self.intent.clear(extent);
    }

    /// What is to be written, then synced (`fdatasync`), into [`Store::intent_file`]. `None`: the file has it all, or a
    /// write is on its way.
    pub fn intent_begin(&mut self) -> Option<IntentWrite> {
        self.intent.begin()
    }

    /// The pages are stable.
    pub fn intent_done(&mut self, write: IntentWrite) {
        self.intent.done(write);
    }

    /// There was no space for the pages: nothing was synced, and they are written with the next that [`Store::intent_begin`] gives out.
    pub fn intent_put_off(&mut self, write: &IntentWrite) {
        self.intent.put_off(write);
    }

    /// The intent bitmap's file.
    pub const fn intent_file(&self) -> &Arc<File> {
        self.intent.file()
    }

    /// Writes and syncs what [`Store::intent_begin`] would give out.
    ///
    /// # Errors
    /// The disk's.
    pub fn save_intent(&mut self) -> io::Result<()> {
        let Some(write) = self.intent.begin() else { return Ok(()) };
        intent::write(self.intent.file(), write.pages())?;
        self.intent.done(write);
        Ok(())
    }

    /// True if anything was written since the store was opened or closed cleanly.
    pub const fn touched(&self) -> bool {
        self.touched
    }

    /// True if there are zero marks: the files alone are not the volume.
    pub fn has_zero_marks(&self) -> bool {
        self.layers.iter().filter_map(|l| l.zero.as_ref()).any(ZeroMap::has_marks)
    }

    /// The rebuild is complete: lower layers get nothing any more but what they have lost (`recorded`: as for [`Store::plan_zero`]), so
    /// other marks over nothing are taken away, from this block on until all are done or `is_over` says so, which is asked after each
    /// 4 MiB: for those the files of all layers are looked at. Gives back the block to go on at, `None` at the end: then a flush
    /// follows, and [`super::Directory::end_rebuild`]. Writes in between are served as ever.
    ///
    /// # Errors
    /// The disk's.
    pub fn end_rebuild(
        &mut self,
        from: u64,
        recorded: Recorded<'_>,
        is_over: impl Fn() -> bool,
    ) -> io::Result<Option<u64>> {
        self.rebuilding = false;
        let end = self.size / BLOCK;
        let head = self.head();
        let marks = self.at(head).zero.as_ref().map(|zero| zero.zeroes(from..end)).unwrap_or_default();
        let mut at = from;
        while let Some(first) = marks.within(at..end).next() {
            let window = first.start..end.min(first.start + LOOKED_AT);
            at = window.end;
            self.drop_useless_marks(head, &marks, window, recorded)?;
            if is_over() && marks.overlaps(at..end) {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// Takes those of the head's marks in a window away that hide nothing. There may be as many as a file system has holes, so each layer
    /// is looked at once for all of them.
    fn drop_useless_marks(
        &mut self,
        head: LayerNo,
        marks: &RangeSet,
        window: Range<u64>,
        recorded: Recorded<'_>,
    ) -> io::Result<()> {
        let (mut useless, mut held) = (RangeSet::default(), RangeSet::default());
        marks.within(window.clone()).for_each(|mark| useless.insert(mark));
        for (_, layer) in self.up_to(self.at(head).rank - 1) {
            let own = self.own(layer, window.clone())?;
            // As in `held_below`.
            if self.folding != Some(layer) {
                held.subtract(&own.zero);
            }
            held.append(&own.data);
        }
        useless.subtract(&held);
        // Old data below a mark that waits for its punch.
        let layer = self.at(head);
        useless.subtract(&load::own(&layer.file, layer.length, None, window, layer.look)?.data);
        if let Some(hull) = useless.hull() {
            useless.subtract(&self.expected_below(hull, self.at(head).rank, recorded));
        }
        let layer = self.at_mut(head);
        layer.dirty |= !useless.is_empty();
        for part in useless.iter() {
            if let Some(zero) = &mut layer.zero
                && zero.begin_write(part.clone())
            {
                zero.wrote(part);
            }
        }
        Ok(())
    }

    /// All is flushed and nothing in flight: what [`super::Directory::close_clean`] needs.
    pub fn close(&mut self) -> Closing {
        self.touched = false;
        // Without marks the close takes the word in volume.meta back: the next mark has to say it again.
        self.marked = self.has_zero_marks();
        Closing {
            has_marks: self.marked,
            intent: Arc::clone(self.intent.file()),
            pages: self.intent.clear_all(),
        }
    }
}
