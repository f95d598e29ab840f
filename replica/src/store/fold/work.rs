//! What a fold does that takes long: looking for extents and copying. Runs on a thread of its own; knows two files and
//! nothing of the chain.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lh_block::Extent;
use lh_ring::sys;

use super::super::disk::{self, Kind, Look};
use super::super::load::{blocks, bytes};
use super::super::ranges::RangeSet;
use super::Direction;

/// Bytes of one read and one write: large enough that a disk is busy with the bytes and not with the calls.
const PIECE: usize = 1 << 20;
/// Alignment of memory that suits O_DIRECT everywhere.
const ALIGNMENT: usize = 4096;

/// Extents that one look finds: as many as one FIEMAP call tells.
const RUNS: usize = 256;

/// The two layers.
#[derive(Clone, Debug)]
pub(in super::super) struct Pair {
    pub(in super::super) parent: Arc<File>,
    pub(in super::super) child: Arc<File>,
    /// Lengths in bytes.
    pub(in super::super) parent_length: u64,
    pub(in super::super) child_length: u64,
    pub(in super::super) look: Look,
}

/// What is to be done, and what has come of it.
#[derive(Debug)]
enum Job {
    /// How many bytes there are to move, into the parent and into the child.
    Survey {
        found: (u64, u64),
    },
    /// What is to be moved in a range.
    Look {
        direction: Direction,
        range: Extent,
        /// Ranges that the parent's zero map makes zero.
        zero: Vec<Extent>,
        found: Found,
    },
    Copy {
        direction: Direction,
        runs: Vec<Extent>,
        holes: Vec<Extent>,
        share: bool,
        moved: Moved,
    },
    /// Lets go of a file: the last descriptor of a removed file gives its space back, which may take long.
    Drop(Option<Arc<File>>),
}

/// What a look has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Found {
    /// Ranges of the source's file to be moved, as far as files alone tell.
    pub(in super::super) runs: Vec<Extent>,
    /// The parts of `zero` that the child's file says nothing of.
    pub(in super::super) zero: Vec<Extent>,
    /// Everything before was looked at.
    pub(in super::super) until: u64,
}

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Moved {
    /// Bytes read and written.
    pub(in super::super) copied: u64,
    /// Bytes that share their space with the source.
    pub(in super::super) shared: u64,
    /// The file system shares no space: do not try again.
    pub(in super::super) cannot_share: bool,
}

/// A piece of work: run it, then hand it to [`super::Fold::worked`].
#[derive(Debug)]
#[must_use]
pub struct Work {
    pair: Option<Pair>,
    job: Job,
    error: Option<io::Error>,
    /// What was half copied could not be taken back.
    spoilt: bool,
    cancel: Arc<AtomicBool>,
}

/// What a piece of work has come to.
#[derive(Debug)]
pub(in super::super) enum Result {
    Survey {
        into_parent: u64,
        into_child: u64,
    },
    Look(Found),
    Copy(Vec<Extent>, Moved),
    /// Cancelled, and nothing is half done.
    Stopped,
    /// `spoilt`: the target may hold half of something.
    Failed {
        error: io::Error,
        spoilt: bool,
    },
}

impl Work {
    fn new(pair: Pair, job: Job, cancel: &Arc<AtomicBool>) -> Self {
        Self { pair: Some(pair), job, error: None, spoilt: false, cancel: Arc::clone(cancel) }
    }

    pub(in super::super) fn survey(pair: Pair, cancel: &Arc<AtomicBool>) -> Self {
        Self::new(pair, Job::Survey { found: (0, 0) }, cancel)
    }

    pub(in super::super) fn look(
        pair: Pair,
        direction: Direction,
        range: Extent,
        zero: Vec<Extent>,
        cancel: &Arc<AtomicBool>,
    ) -> Self {
        Self::new(pair, Job::Look { direction, range, zero, found: Found::default() }, cancel)
    }

    /// `holes` are punched in the file that stays.
    pub(in super::super) fn copy(
        pair: Pair,
        direction: Direction,
        runs: Vec<Extent>,
        holes: Vec<Extent>,
        share: bool,
        cancel: &Arc<AtomicBool>,
    ) -> Self {
        Self::new(pair, Job::Copy { direction, runs, holes, share, moved: Moved::default() }, cancel)
    }

    /// Closes a file that may have been its last name's: on a thread that may wait.
    pub fn closing(file: Arc<File>) -> Self {
        let cancel = Arc::new(AtomicBool::new(false));
        Self { pair: None, job: Job::Drop(Some(file)), error: None, spoilt: false, cancel }
    }

    /// It only closes a file.
    pub const fn is_closing(&self) -> bool {
        matches!(self.job, Job::Drop(_))
    }

    /// Does it. Blocks.
    pub fn run(mut self) -> Self {
        let done = match (&mut self.job, &self.pair) {
            (Job::Drop(file), _) => {
                *file = None;
                Ok(())
            }
            (Job::Survey { found }, Some(pair)) => survey(pair, &self.cancel).map(|sums| *found = sums),
            (Job::Look { direction, range, zero, found }, Some(pair)) => {
                look(pair, *direction, *range, zero).map(|seen| *found = seen)
            }
            (Job::Copy { direction, runs, holes, share, moved }, Some(pair)) => {
                let copy = Copy { pair, direction: *direction, share: *share, cancel: &self.cancel };
                copy.run(runs, holes, moved, &mut self.spoilt)
            }
            (_, None) => Ok(()),
        };
        self.error = done.err();
        self
    }

    pub(in super::super) fn result(self) -> Result {
        if let Some(error) = self.error {
            if error.kind() == io::ErrorKind::Interrupted && !self.spoilt {
                return Result::Stopped;
            }
            return Result::Failed { error, spoilt: self.spoilt };
        }
        match self.job {
            Job::Survey { found: (into_parent, into_child) } => Result::Survey { into_parent, into_child },
            Job::Look { found, .. } => Result::Look(found),
            Job::Copy { runs, moved, .. } => Result::Copy(runs, moved),
            Job::Drop(_) => Result::Stopped,
        }
    }
}

/// The written extents of a file.
fn written(file: &File, range: Extent, look: Look) -> impl Iterator<Item = io::Result<Extent>> {
    disk::extents(file, range, look).filter_map(|found| match found {
        Ok((extent, Kind::Written)) => Some(Ok(extent)),
        Ok(_) => None,
        Err(e) => Some(Err(e)),
    })
}

fn interrupted(cancel: &AtomicBool) -> io::Result<()> {
    if cancel.load(Ordering::Relaxed) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
}

/// Goes through both files' extents side by side: memory for none of them.
fn survey(pair: &Pair, cancel: &AtomicBool) -> io::Result<(u64, u64)> {
    let mut parent = written(&pair.parent, Extent::new(0, pair.parent_length), pair.look);
    let mut child = written(&pair.child, Extent::new(0, pair.child_length), pair.look);
    let (mut below, mut above) = (parent.next().transpose()?, child.next().transpose()?);
    let (mut into_parent, mut into_child) = (0, 0);
    loop {
        interrupted(cancel)?;
        match (below, above) {
            (None, None) => return Ok((into_parent, into_child)),
            (Some(p), None) => {
                into_child += p.len;
                below = parent.next().transpose()?;
            }
            // The child's extent lies before the parent's, or ends first.
            (p, Some(c)) if p.is_none_or(|p| c.end() <= p.end()) => {
                into_parent += c.len;
                below = p.and_then(|p| {
                    into_child += c.offset.min(p.end()).saturating_sub(p.offset);
                    let from = p.offset.max(c.end());
                    (from < p.end()).then(|| Extent::new(from, p.end() - from))
                });
                if p.is_some() && below.is_none() {
                    below = parent.next().transpose()?;
                }
                above = child.next().transpose()?;
            }
            (Some(p), Some(c)) => {
                into_child += c.offset.saturating_sub(p.offset).min(p.len);
                below = parent.next().transpose()?;
            }
            (None, Some(_)) => unreachable!("an extent alone ends first"),
        }
    }
}

fn look(pair: &Pair, direction: Direction, range: Extent, zero: &[Extent]) -> io::Result<Found> {
    let (source, length) = match direction {
        Direction::IntoParent => (&pair.child, pair.child_length),
        Direction::IntoChild => (&pair.parent, pair.parent_length),
    };
    let mut runs = RangeSet::default();
    let mut until = range.end();
    let inside = range.intersection(Extent::new(0, length));
    let extents = inside.into_iter().flat_map(|inside| written(source, inside, pair.look));
    for (n, extent) in extents.enumerate() {
        let extent = extent?;
        if n == RUNS {
            until = extent.offset;
            break;
        }
        runs.insert(blocks(extent));
    }
    let mut marks = RangeSet::default();
    for extent in zero {
        let seen = extent.intersection(Extent::new(range.offset, until - range.offset));
        seen.into_iter().for_each(|e| marks.insert(blocks(e)));
    }
    let seen = Extent::new(range.offset, until - range.offset);
    if let (Direction::IntoChild, Some(inside)) =
        (direction, seen.intersection(Extent::new(0, pair.child_length)))
    {
        for extent in written(&pair.child, inside, pair.look) {
            let held = blocks(extent?);
            runs.remove(held.clone());
            marks.remove(held);
        }
    }
    let list = |set: &RangeSet| set.iter().map(bytes).collect();
    Ok(Found { runs: list(&runs), zero: list(&marks), until })
}

struct Copy<'a> {
    pair: &'a Pair,
    direction: Direction,
    share: bool,
    cancel: &'a AtomicBool,
}

impl Copy<'_> {
    fn run(&self, runs: &[Extent], holes: &[Extent], moved: &mut Moved, spoilt: &mut bool) -> io::Result<()> {
        let (from, to) = match self.direction {
            Direction::IntoParent => (&self.pair.child, &self.pair.parent),
            Direction::IntoChild => (&self.pair.parent, &self.pair.child),
        };
        for hole in holes {
            disk::punch(to, *hole)?;
        }
        let mut buffer = Buffer::default();
        for run in runs {
            interrupted(self.cancel)?;
            if self.share && !moved.cannot_share {
                match sys::clone_range(to, run.offset, from, run.offset, run.len) {
                    Ok(()) => {
                        moved.shared += run.len;
                        continue;
                    }
                    Err(e) if shares_nothing(&e) => moved.cannot_share = true,
                    Err(e) => return self.take_back(to, *run, spoilt, e),
                }
            }
            let copied = buffer.copy(from, to, *run, self.cancel);
            if let Err((done, e)) = copied {
                let rest = Extent::new(run.offset + done, run.len - done);
                return self.take_back(to, rest, spoilt, e);
            }
            moved.copied += run.len;
        }
        Ok(())
    }

    /// What was half written becomes a hole again where it would be seen: it was one before.
    fn take_back(&self, to: &File, rest: Extent, spoilt: &mut bool, error: io::Error) -> io::Result<()> {
        if self.direction == Direction::IntoChild && !rest.is_empty() {
            *spoilt = disk::punch(to, rest).is_err();
        }
        Err(error)
    }
}

/// The file system, or this pair of files, cannot share space.
fn shares_nothing(error: &io::Error) -> bool {
    let codes = [libc::EOPNOTSUPP, libc::ENOTTY, libc::EXDEV, libc::EINVAL, libc::ENOSYS, libc::EPERM];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Memory for copying, made with its first use.
#[derive(Default)]
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    /// Copies a range; on an error, how much of it was copied.
    pub(super) fn copy(
        &mut self,
        from: &File,
        to: &File,
        run: Extent,
        cancel: &AtomicBool,
    ) -> std::result::Result<(), (u64, io::Error)> {
        self.0.resize(PIECE + ALIGNMENT, 0);
        let skip = self.0.as_ptr().align_offset(ALIGNMENT);
        let memory = &mut self.0[skip..skip + PIECE];
        let mut done = 0;
        while done < run.len {
            interrupted(cancel).map_err(|e| (done, e))?;
            let len = usize::try_from(run.len - done).unwrap_or(PIECE).min(PIECE);
            let piece = &mut memory[..len];
            from.read_exact_at(piece, run.offset + done)
                .and_then(|()| to.write_all_at(piece, run.offset + done))
                .map_err(|e| (done, e))?;
            done += len as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(parent: &[u64], child: &[u64]) -> Pair {
        let file = |held: &[u64]| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(64 << 12).unwrap();
            held.iter().for_each(|b| file.write_all_at(&[7; 4096], b << 12).unwrap());
            Arc::new(file)
        };
        let (parent, child) = (file(parent), file(child));
        Pair { parent, child, parent_length: 64 << 12, child_length: 64 << 12, look: Look::Synced }
    }

    #[test]
    fn a_survey_counts_what_each_direction_moves() {
        let cancel = AtomicBool::new(false);
        for (parent, child, expected) in [
            (&[][..], &[][..], (0, 0)),
            (&[1, 2, 3], &[], (0, 3)),
            (&[], &[5, 9], (2, 0)),
            (&[1, 2, 3, 4], &[2], (1, 3)),
            (&[1, 2, 3, 4], &[0, 1, 2, 3, 4, 5], (6, 0)),
            (&[3, 4, 10], &[1, 4, 5, 11], (4, 2)),
            (&[10, 11, 12], &[1, 11, 20], (3, 2)),
        ] {
            let found = survey(&pair(parent, child), &cancel).unwrap();
            assert_eq!(found, (expected.0 << 12, expected.1 << 12), "{parent:?} below {child:?}");
        }
    }

    #[test]
    fn a_look_finds_what_the_other_has_not() {
        let pair = pair(&[1, 2, 3, 4, 20], &[2, 3, 30]);
        let block = |n: u64, len: u64| Extent::new(n << 12, len << 12);
        let zero = vec![block(3, 3), block(40, 1)];
        let found = look(&pair, Direction::IntoChild, block(0, 35), &zero).unwrap();
        assert_eq!(found.runs, [block(1, 1), block(4, 1), block(20, 1)]);
        assert_eq!(found.zero, [block(4, 2)]);
        assert_eq!(found.until, 35 << 12);
        let found = look(&pair, Direction::IntoParent, block(3, 61), &[]).unwrap();
        assert_eq!(found.runs, [block(3, 1), block(30, 1)]);
    }

    /// A file system may have been given a part of a block only: what is not whole is a hole again, as it was, and what lies below is read.
    #[test]
    fn what_a_full_disk_took_in_part_is_taken_back_where_it_would_be_read() {
        let Ok(small) = lh_ring::sys::mounts::detached("tmpfs", &[("size", "64k".into())]) else {
            println!(
                "SKIP what_a_full_disk_took_in_part_is_taken_back_where_it_would_be_read: mounting needs root"
            );
            return;
        };
        let place =
            std::path::PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&small)));
        for direction in [Direction::IntoChild, Direction::IntoParent] {
            let held: Vec<u64> = (0..64).collect();
            let mut pair = pair(&held, &held);
            let path = place.join(format!("{direction:?}"));
            let to = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            to.set_len(64 << 12).unwrap();
            let to = Arc::new(to);
            match direction {
                Direction::IntoChild => pair.child = Arc::clone(&to),
                Direction::IntoParent => pair.parent = Arc::clone(&to),
            }
            let cancel = AtomicBool::new(false);
            let copy = Copy { pair: &pair, direction, share: false, cancel: &cancel };
            let (mut moved, mut spoilt) = (Moved::default(), false);
            let whole = Extent::new(0, 64 << 12);
            let refused = copy.run(&[whole], &[], &mut moved, &mut spoilt).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
            let left = disk::extents(&to, whole, Look::Seek).count();
            // In the parent nobody reads it: the child has those blocks itself.
            assert_eq!((left > 0, spoilt), (direction == Direction::IntoParent, false), "{direction:?}");
            std::fs::remove_file(path).unwrap();
        }
    }
}
