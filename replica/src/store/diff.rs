//! What changed between two snapshots, by who holds each block: no byte is compared.
//!
//! A block that both read from the same file is the same. One that they read from different files counts as changed,
//! also where the same bytes were written again. So every difference is told, and sometimes more. The work grows with
//! the number of extents.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use lh_block::{BLOCK, Extent};

use super::load::bytes;
use super::offline::SnapshotView;

/// What a changed range holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// Data, which may be zeroes, too.
    Data,
    /// Nothing: it reads as zero.
    Zero,
}

/// A range that changed, in whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Where.
    pub extent: Extent,
    /// What it is now.
    pub kind: ChangeKind,
}

/// No layer of this chain: more layers than this there cannot be.
const ELSEWHERE: u8 = u8::MAX;

impl SnapshotView {
    /// The ranges in which this snapshot differs from another one of the same directory, ascending; neighbours differ in
    /// kind or do not touch. `None`: from a volume of zeroes. The other one may be older, newer or on another branch.
    /// Nothing before the block of the byte `start`.
    ///
    /// # Errors
    /// The disk's.
    pub fn diff<'a>(
        &'a self,
        from: Option<&'a Self>,
        start: u64,
    ) -> io::Result<impl Iterator<Item = Change> + 'a> {
        let same = match from {
            Some(from) => self.same_files(from)?,
            None => vec![0],
        };
        let blocks = start / BLOCK..self.size().div_ceil(BLOCK);
        let mut now = self.index.runs(blocks.clone());
        let mut then = from.map(|from| from.index.runs(blocks.clone()));
        let (mut run, mut before) = (now.next(), None);
        let mut pieces = std::iter::from_fn(move || {
            loop {
                let (held, value) = run.clone()?;
                let at = held.start;
                if before.as_ref().is_none_or(|(range, _): &(std::ops::Range<u64>, u8)| range.end <= at) {
                    // Behind the end of the other index there is nothing.
                    before = then.as_mut().and_then(Iterator::next).or(Some((at..blocks.end, 0)));
                }
                let (other, was) = before.clone()?;
                let end = held.end.min(other.end);
                run = if end < held.end { Some((end..held.end, value)) } else { now.next() };
                let was = same.get(usize::from(was)).copied().unwrap_or(ELSEWHERE);
                if was != value {
                    let kind = if value == 0 { ChangeKind::Zero } else { ChangeKind::Data };
                    return Some(Change { extent: bytes(at..end), kind });
                }
            }
        });
        let mut next: Option<Change> = pieces.next();
        Ok(std::iter::from_fn(move || {
            let mut change = next.take()?;
            for more in pieces.by_ref() {
                if more.kind != change.kind || more.extent.offset != change.extent.end() {
                    next = Some(more);
                    break;
                }
                change.extent.len += more.extent.len;
            }
            Some(change)
        }))
    }

    /// For each place in the other's chain, counted from 1, the place of the same file in this chain.
    fn same_files(&self, from: &Self) -> io::Result<Vec<u8>> {
        let mine = self.files()?;
        let mut same = vec![0];
        for file in from.files()? {
            let place = mine.iter().position(|held| *held == file);
            same.push(place.and_then(|place| u8::try_from(place + 1).ok()).unwrap_or(ELSEWHERE));
        }
        Ok(same)
    }

    /// Device and inode of each layer of the chain, base first.
    fn files(&self) -> io::Result<Vec<(u64, u64)>> {
        let identity = |file: &File| file.metadata().map(|stat| (stat.dev(), stat.ino()));
        self.chain.iter().map(|at| identity(&self.layers[*at].file)).collect()
    }
}
