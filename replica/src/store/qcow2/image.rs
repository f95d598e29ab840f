//! An open image: where its bytes are, and the bytes of what is compressed.
//!
//! Which blocks hold data is found out once, when the image is opened, and kept in memory as the index of a volume is
//! (1 MiB per TiB). Where a cluster lies is looked up in the file's own tables, through a bounded cache: plain clusters
//! are then read from the file by whoever asked, compressed ones are decoded here, through another bounded cache.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flate2::{Decompress, FlushDecompress};
use lh_block::{BLOCK, Extent};

use super::super::disk::{read_up_to, read_whole};
use super::super::index::Index;
use super::format::{Cluster, HEADER_MAX, Header, Qcow2Fault};

/// Bytes of a table that are read and kept together, as in QEMU: 512 clusters, 32 MiB of a disk of 64 KiB clusters.
const SLICE: u64 = 4096;
/// Slices kept: 4 MiB, which covers 32 GiB of a disk with clusters of 64 KiB.
const SLICES: usize = 1024;
/// Bytes of decoded clusters that are kept; two clusters at least, since a read often ends in the next one.
const DECODED_BYTES: usize = 4 << 20;
/// Bytes of a table that the walk at the start reads at a time.
const WALK: usize = 256 << 10;
/// Bytes copied at a time from plain clusters.
const COPY: usize = 64 << 10;

/// Why an image was not opened.
#[derive(Debug)]
pub(in super::super) enum ImageError {
    /// Not what it should be.
    Fault(Qcow2Fault),
    /// The disk in it has so many bytes, which is more than may be.
    TooLarge(u64),
    /// Not readable.
    Io(io::Error),
}

impl From<io::Error> for ImageError {
    fn from(err: io::Error) -> Self {
        Self::Io(err)
    }
}

impl From<Qcow2Fault> for ImageError {
    fn from(fault: Qcow2Fault) -> Self {
        Self::Fault(fault)
    }
}

/// Where a part of the image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Place {
    /// Nowhere: it reads as zero.
    Zero,
    /// In the file, from this offset on.
    At(u64),
    /// To be had from [`Image::decode`].
    Packed,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in super::super) struct Image {
    file: Arc<File>,
    /// Of the file.
    length: u64,
    header: Header,
    /// As in the file, checked.
    l1: Box<[u64]>,
    /// Value 1: the block holds data, compressed or not, in any of its clusters.
    held: Index,
    cache: Mutex<Cache>,
}

impl Image {
    /// Reads the header and walks all tables. `largest`: what the disk in it may have, in bytes; memory is taken for that
    /// much at most.
    pub(in super::super) fn open(file: Arc<File>, largest: u64) -> Result<Self, ImageError> {
        let length = file.metadata()?.len();
        let mut bytes = [0; HEADER_MAX];
        let got = read_up_to(&file, 0, &mut bytes)?;
        let header = Header::parse(&bytes[..got])?;
        if header.size > largest {
            return Err(ImageError::TooLarge(header.size));
        }
        let table = header.l1_entries * 8;
        if header.l1_offset.checked_add(table).is_none_or(|end| end > length) {
            return Err(Qcow2Fault::CutOff("L1 table").into());
        }
        // At most 32 MiB, and no more than the file has.
        let mut l1 = vec![0; usize::try_from(table).unwrap_or(0)];
        file.read_exact_at(&mut l1, header.l1_offset)?;
        let l1: Box<[u64]> = entries(&l1).collect();
        check_tables(&header, &l1)?;
        let held = Index::new(header.size.div_ceil(BLOCK));
        let mut image = Self { file, length, header, l1, held, cache: Mutex::new(Cache::new(&header)) };
        image.walk()?;
        Ok(image)
    }

    /// Bytes of the virtual disk.
    pub(in super::super) const fn size(&self) -> u64 {
        self.header.size
    }

    /// Bytes of the file, when it was opened.
    pub(in super::super) const fn file_length(&self) -> u64 {
        self.length
    }

    /// Looks at every entry of every table.
    fn walk(&mut self) -> Result<(), ImageError> {
        let cluster = self.header.cluster();
        let per_table = cluster / 8;
        let mut buffer = vec![0; WALK.min(usize::try_from(cluster).unwrap_or(WALK))];
        for (number, entry) in self.l1.iter().enumerate() {
            let Some(table) = self.header.l1(*entry)? else { continue };
            if table + cluster > self.length {
                return Err(Qcow2Fault::CutOff("L2 tables").into());
            }
            let mut at = 0;
            while at < cluster {
                self.file.read_exact_at(&mut buffer, table + at)?;
                let first = number as u64 * per_table + at / 8;
                let mut found = Vec::new();
                for (n, entry) in entries(&buffer).enumerate() {
                    if self.holds_data(entry)? {
                        let offset = (first + n as u64) * cluster;
                        let end = (offset + cluster).min(self.header.size);
                        push(&mut found, offset / BLOCK..end.div_ceil(BLOCK));
                    }
                }
                self.held.set_all(found.into_iter(), 1);
                at += buffer.len() as u64;
            }
        }
        Ok(())
    }

    fn holds_data(&self, entry: u64) -> Result<bool, Qcow2Fault> {
        let begin = match self.header.l2(entry)? {
            Cluster::Zero => return Ok(false),
            Cluster::At(offset) | Cluster::Packed { offset, .. } => offset,
        };
        // The last cluster of a file may end within it; one that begins behind the end was lost.
        if begin >= self.length { Err(Qcow2Fault::CutOff("data")) } else { Ok(true) }
    }

    /// The blocks of the range that hold data, ascending.
    pub(in super::super) fn data(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.held.runs(range).filter(|(_, held)| *held == 1).map(|(range, _)| range)
    }

    /// Where the bytes of a range are, in order and without gaps. Allocates nothing once the caches are warm. What
    /// cannot be looked up counts as packed: [`Image::decode`] then says why.
    pub(in super::super) fn places(&self, extent: Extent, mut each: impl FnMut(Extent, Place)) {
        let mut run: Option<(Extent, Place)> = None;
        let mut cache = self.lock();
        let mut rest = extent;
        while !rest.is_empty() {
            let (len, place) = self.place(&mut cache, rest);
            match &mut run {
                Some((held, before)) if joins(*held, *before, place) => held.len += len,
                _ => {
                    if let Some((extent, place)) = run.replace((Extent::new(rest.offset, len), place)) {
                        each(extent, place);
                    }
                }
            }
            rest = Extent::new(rest.offset + len, rest.len - len);
        }
        if let Some((extent, place)) = run {
            each(extent, place);
        }
    }

    /// The place of the beginning of a range, and how much of the range is there.
    fn place(&self, cache: &mut Cache, rest: Extent) -> (u64, Place) {
        if rest.offset >= self.header.size {
            return (rest.len, Place::Zero);
        }
        let cluster = self.header.cluster();
        let inside = rest.offset % cluster;
        let len = rest.len.min(cluster - inside).min(self.header.size - rest.offset);
        if cluster < BLOCK {
            // A read of one block would fall into several: not worth a read each.
            return (len, Place::Packed);
        }
        match self.lookup(cache, rest.offset) {
            Ok(Cluster::Zero) => (len, Place::Zero),
            Ok(Cluster::At(offset)) => (len, Place::At(offset + inside)),
            Ok(Cluster::Packed { .. }) | Err(_) => (len, Place::Packed),
        }
    }

    /// Gives out the bytes of a range, in order: each call has the next ones.
    ///
    /// # Errors
    /// The disk's; `InvalidData` for what does not decode, or has changed since the image was opened.
    pub(in super::super) fn decode(&self, extent: Extent, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let mut cache = self.lock();
        let mut rest = extent;
        while !rest.is_empty() {
            let cluster = self.header.cluster();
            let inside = rest.offset % cluster;
            let within = self.header.size.saturating_sub(rest.offset);
            let len = rest.len.min(cluster - inside).min(if within == 0 { rest.len } else { within });
            let found = if within == 0 { Cluster::Zero } else { self.lookup(&mut cache, rest.offset)? };
            self.give(&mut cache, found, Extent::new(inside, len), &mut each)?;
            rest = Extent::new(rest.offset + len, rest.len - len);
        }
        Ok(())
    }

    /// Gives out a part of one cluster.
    fn give(
        &self,
        cache: &mut Cache,
        found: Cluster,
        part: Extent,
        each: &mut impl FnMut(&[u8]),
    ) -> io::Result<()> {
        if let Cluster::Packed { offset, len } = found {
            let bytes = cache.unpacked(&self.file, offset, len)?;
            each(&bytes[place_in(part.offset)..place_in(part.end())]);
            return Ok(());
        }
        cache.copy.resize(COPY, 0);
        let mut at = part.offset;
        while at < part.end() {
            let now = place_in((part.end() - at).min(COPY as u64));
            let bytes = &mut cache.copy[..now];
            let got = match found {
                Cluster::At(offset) => read_whole(&self.file, self.length, offset + at, bytes)?,
                _ => 0,
            };
            // Behind the end of the file: as in a hole.
            bytes[got..].fill(0);
            each(bytes);
            at += now as u64;
        }
        Ok(())
    }

    /// Fills the buffer.
    ///
    /// # Errors
    /// As of [`Image::decode`].
    pub(in super::super) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        self.decode(Extent::new(offset, buffer.len() as u64), |bytes| {
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        })
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        // What a panic left is as good as any: entries are put in whole.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cluster of an offset within the disk.
    fn lookup(&self, cache: &mut Cache, offset: u64) -> io::Result<Cluster> {
        let number = offset >> self.header.cluster_bits;
        let per_table = self.header.cluster() / 8;
        let l1 = usize::try_from(number / per_table).ok().and_then(|at| self.l1.get(at)).copied();
        let Some(table) = l1.map_or(Ok(None), |entry| self.header.l1(entry)).map_err(changed)? else {
            return Ok(Cluster::Zero);
        };
        let entry = cache.entry(&self.file, table + number % per_table * 8)?;
        self.header.l2(entry).map_err(changed)
    }
}

/// Each L2 table serves one place: so the walk reads no more than the file has.
fn check_tables(header: &Header, l1: &[u64]) -> Result<(), Qcow2Fault> {
    let mut seen: Vec<u64> = Vec::new();
    for entry in l1 {
        seen.extend(header.l1(*entry)?);
    }
    seen.sort_unstable();
    match seen.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Qcow2Fault::Entry { level: 1, entry: pair[0] }),
        None => Ok(()),
    }
}

fn changed(fault: Qcow2Fault) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a qcow2 backing file changed under us: it {fault}"))
}

/// True if the second place goes on where the first ends.
fn joins(held: Extent, before: Place, next: Place) -> bool {
    match (before, next) {
        (Place::Zero, Place::Zero) | (Place::Packed, Place::Packed) => true,
        (Place::At(a), Place::At(b)) => a.checked_add(held.len) == Some(b),
        _ => false,
    }
}

fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        // Clusters smaller than a block share one.
        Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
        _ => ranges.push(range),
    }
}

/// A place within a cluster.
fn place_in(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

fn entries(table: &[u8]) -> impl Iterator<Item = u64> + '_ {
    table.chunks_exact(8).map(|bytes| bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
}

/// What is kept of the file.
#[derive(Debug)]
struct Cache {
    cluster: usize,
    /// By place of the slice in the file: one at each place, the last that was asked for.
    slices: Vec<Option<(u64, Box<[u8]>)>>,
    /// Compressed clusters by their offset, the last used last.
    decoded: Vec<(u64, Box<[u8]>)>,
    decoded_max: usize,
    inflate: Decompress,
    /// Room for what is compressed, and for what is copied.
    packed: Vec<u8>,
    copy: Vec<u8>,
}

impl Cache {
    fn new(header: &Header) -> Self {
        let cluster = place_in(header.cluster());
        Self {
            cluster,
            slices: Vec::new(),
            decoded: Vec::new(),
            decoded_max: (DECODED_BYTES / cluster).clamp(2, 64),
            inflate: Decompress::new(false),
            packed: Vec::new(),
            copy: Vec::new(),
        }
    }

    /// The entry of a table at an offset of the file.
    fn entry(&mut self, file: &File, at: u64) -> io::Result<u64> {
        let slice = SLICE.min(self.cluster as u64);
        let begin = at - at % slice;
        if self.slices.is_empty() {
            self.slices.resize_with(SLICES, || None);
        }
        let slot = &mut self.slices[place_in(begin / slice) % SLICES];
        if !matches!(slot, Some((held, _)) if *held == begin) {
            let mut bytes = match slot.take() {
                Some((_, bytes)) => bytes,
                None => vec![0; place_in(slice)].into_boxed_slice(),
            };
            file.read_exact_at(&mut bytes, begin)?;
            *slot = Some((begin, bytes));
        }
        let from = place_in(at - begin);
        let entry = slot.as_ref().and_then(|(_, bytes)| entries(&bytes[from..]).next());
        Ok(entry.unwrap_or(0))
    }

    /// The bytes of a compressed cluster.
    fn unpacked(&mut self, file: &File, offset: u64, len: usize) -> io::Result<&[u8]> {
        if let Some(at) = self.decoded.iter().position(|(held, _)| *held == offset) {
            self.decoded[at..].rotate_left(1);
        } else {
            let mut room = if self.decoded.len() < self.decoded_max {
                vec![0; self.cluster].into_boxed_slice()
            } else {
                self.decoded.remove(0).1
            };
            self.packed.resize(len, 0);
            let got = read_up_to(file, offset, &mut self.packed)?;
            inflate(&mut self.inflate, &self.packed[..got], &mut room).ok_or_else(|| {
                let text = format!("the compressed cluster at {offset} of a qcow2 backing file is damaged");
                io::Error::new(io::ErrorKind::InvalidData, text)
            })?;
            self.decoded.push((offset, room));
        }
        Ok(self.decoded.last().map_or(&[], |(_, bytes)| bytes))
    }
}

/// Decodes raw deflate (RFC 1951) until the cluster is full; `None` if it does not become full.
fn inflate(decoder: &mut Decompress, from: &[u8], to: &mut [u8]) -> Option<()> {
    decoder.reset(false);
    // What follows the stream in its last sector belongs to others.
    decoder.decompress(from, to, FlushDecompress::Finish).ok()?;
    (decoder.total_out() == to.len() as u64).then_some(())
}
