//! The walk over what a layer's file holds: extent by extent, 1 MiB at a time, read from the disk itself.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use lh_block::{BLOCK, Extent};

use super::super::disk::{self, Kind, Look};
use super::super::load::blocks;
use super::super::pace::Pace;
use super::super::ranges::RangeSet;
use super::ScrubError;
use super::layer::SnapshotLayer;

/// Bytes read at a time: large enough for a disk, small enough for a stop that is heard soon.
const STEP: u64 = 1 << 20;
/// What O_DIRECT asks for at most: a block.
const ALIGNMENT: usize = 4096;

/// What the walk finds, in order of offset. What lies between two calls is a hole.
#[derive(Debug)]
pub(super) enum Found<'a> {
    /// Whole blocks.
    Bytes {
        offset: u64,
        bytes: &'a [u8],
        /// The blocks in it that count: the layer's zero map says nothing of them.
        own: &'a RangeSet,
    },
    /// One block, which the disk does not give.
    Unreadable { offset: u64, error: io::Error },
}

/// Memory that O_DIRECT reads into.
struct Aligned {
    room: Vec<u8>,
    from: usize,
}

impl Aligned {
    fn new() -> Self {
        let step = usize::try_from(STEP).unwrap_or(0);
        let room = vec![0; step + ALIGNMENT];
        let from = room.as_ptr().align_offset(ALIGNMENT);
        Self { room, from }
    }

    fn part(&mut self, len: u64) -> &mut [u8] {
        let len = usize::try_from(len).unwrap_or(0);
        &mut self.room[self.from..self.from + len]
    }
}

impl SnapshotLayer {
    /// Reads every extent of the range (whole blocks). `progress`: bytes read so far.
    pub(super) fn walk(
        &self,
        range: Extent,
        pace: &Pace,
        progress: &mut dyn FnMut(u64),
        each: &mut dyn FnMut(Found<'_>) -> Result<(), ScrubError>,
    ) -> Result<(), ScrubError> {
        let failed = |source| super::failed("reading", &self.directory)(source);
        let mut memory = Aligned::new();
        let mut done = 0;
        for found in disk::extents(&self.parts.file, range, Look::Synced) {
            let (extent, kind) = found.map_err(failed)?;
            if kind == Kind::Unwritten && self.ours {
                continue;
            }
            let mut rest = extent;
            while !rest.is_empty() {
                let begun = Instant::now();
                let len = rest.len.min(STEP);
                self.read(rest.offset, memory.part(len), each)?;
                done += len;
                rest = Extent::new(rest.offset + len, rest.len - len);
                pace.step(len, begun)?;
                progress(done);
            }
        }
        Ok(())
    }

    fn read(
        &self,
        offset: u64,
        bytes: &mut [u8],
        each: &mut dyn FnMut(Found<'_>) -> Result<(), ScrubError>,
    ) -> Result<(), ScrubError> {
        if read_exact(&self.disk, offset, bytes).is_ok() {
            return each(Found::Bytes { offset, bytes, own: &self.own(offset, bytes.len()) });
        }
        // One bad sector spoils a read of many: block by block it is found.
        let block = usize::try_from(BLOCK).unwrap_or(0);
        for (offset, bytes) in (offset..).step_by(block).zip(bytes.chunks_mut(block)) {
            match read_exact(&self.disk, offset, bytes) {
                Ok(()) => each(Found::Bytes { offset, bytes, own: &self.own(offset, bytes.len()) })?,
                Err(error) => each(Found::Unreadable { offset, error })?,
            }
        }
        Ok(())
    }

    /// The blocks of a range in an extent that are not zero by the zero map.
    fn own(&self, offset: u64, len: usize) -> RangeSet {
        let range = blocks(Extent::new(offset, len as u64));
        let mut own = RangeSet::default();
        own.insert(range.clone());
        own.subtract(&self.zeroes(range));
        own
    }

    /// The blocks of the range that are zero by the zero map.
    pub(super) fn zeroes(&self, range: Range<u64>) -> RangeSet {
        self.parts.zero.as_ref().map(|map| map.zeroes(range)).unwrap_or_default()
    }
}

/// The blocks that count, with the crc32c of each.
pub(super) fn checksums<'a>(
    offset: u64,
    bytes: &'a [u8],
    own: &'a RangeSet,
) -> impl Iterator<Item = (u64, u32)> + 'a {
    own.iter().flatten().filter_map(move |block| {
        let at = usize::try_from(block * BLOCK - offset).ok()?;
        Some((block, crc32c::crc32c(bytes.get(at..at + usize::try_from(BLOCK).ok()?)?)))
    })
}

/// Fails at the end of the file, too: a layer's file is as long as its extents.
fn read_exact(file: &File, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    #[cfg(test)]
    tests_fault::check(offset, bytes.len())?;
    file.read_exact_at(bytes, offset)
}

/// Bad sectors for tests.
#[cfg(test)]
pub(in super::super) mod tests_fault {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        /// Offset of a block that cannot be read.
        pub(in crate::store) static BAD: Cell<Option<u64>> = const { Cell::new(None) };
    }

    pub(super) fn check(offset: u64, len: usize) -> io::Result<()> {
        match BAD.get() {
            Some(bad) if (offset..offset + len as u64).contains(&bad) => {
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            _ => Ok(()),
        }
    }
}
