//! Taking the checksums of a layer.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use lh_block::BLOCK;

use super::super::checksum::{
    Crc64, FoldedChecksums, NEW_CHECKSUM, Recorded, Sums, SumsWriter, file_name, page_end, sweep,
};
use super::super::disk::read_small;
use super::super::fs::Fs;
use super::super::load::blocks;
use super::super::meta::{META_MAX, now, snapshot_file};
use super::super::pace::Pace;
use super::layer::SnapshotLayer;
use super::walk::{Found, checksums};
use super::{ScrubError, failed};

/// What hashing a layer gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hashed {
    /// crc64 of the whole file, holes as zeroes, as Longhorn counts it.
    pub checksum: u64,
    /// The file is not what it was when it was hashed last, though nobody changed it. The old checksums were kept: they
    /// tell [`SnapshotLayer::scrub`] which blocks are rotten.
    pub silently_corrupted: bool,
    /// Blocks whose crc32c is now on record; `None`: the layer came with an import and has no id of ours to bind them to
    /// ([`super::super::Directory::make_zero_map`] gives it one).
    pub blocks: Option<u64>,
}

/// What is on record of a layer as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedChecksum {
    /// As in [`Hashed`].
    pub checksum: u64,
    /// Found when it was hashed last: then the checksum is the one from before the rot.
    pub silently_corrupted: bool,
}

/// The first block of a range that has a checksum on record, and the checksum; as [`Sums::next`].
type NextSum<'a> = &'a mut dyn FnMut(Range<u64>) -> io::Result<Option<(u64, u32)>>;

/// The checksums on record, walked along with what the layer holds. Where they are damaged nothing is known.
struct OnRecord<'a> {
    next: NextSum<'a>,
    /// The first block that was not compared yet.
    from: u64,
    /// Some block is not what is on record.
    differs: bool,
}

impl OnRecord<'_> {
    /// A block that the layer holds. Gives back what it should be.
    fn met(&mut self, block: u64, found: u32, lost: Push<'_>) -> io::Result<Option<u32>> {
        self.passed(block, lost)?;
        self.from = block + 1;
        let Ok(stored) = (self.next)(block..block + 1) else { return Ok(Some(found)) };
        let stored = stored.map(|(_, stored)| stored);
        self.differs |= stored != Some(found);
        Ok(stored)
    }

    /// Before `block` the layer holds nothing more: what it should hold there is lost.
    fn passed(&mut self, block: u64, lost: Push<'_>) -> io::Result<()> {
        while self.from < block {
            let end = block.min(page_end(self.from));
            match (self.next)(self.from..end) {
                Ok(Some((block, stored))) => {
                    self.differs = true;
                    self.from = block + 1;
                    lost(block, stored)?;
                }
                _ => self.from = end,
            }
        }
        Ok(())
    }
}

/// Notes the checksum of a block.
type Push<'a> = &'a mut dyn FnMut(u64, u32) -> io::Result<()>;

impl SnapshotLayer {
    /// What Longhorn's checksum file says of the layer's file as it is now; reads nothing else. `None`: it is to be
    /// hashed (again).
    ///
    /// # Errors
    /// The disk's.
    pub fn recorded_checksum(&self) -> Result<Option<RecordedChecksum>, ScrubError> {
        let recorded = self.recorded().map_err(failed("reading the checksum in", &self.directory))?;
        Ok(recorded.and_then(|recorded| {
            let (checksum, silently_corrupted) =
                (recorded.of(self.version.ctime)?, recorded.silently_corrupted);
            Some(RecordedChecksum { checksum, silently_corrupted })
        }))
    }

    /// Reads the whole layer and writes `volume-snap-NAME.img.checksum` and `engine/sums-ID`. `progress`: bytes read so
    /// far. One task of this kind in a directory at a time.
    ///
    /// # Errors
    /// [`ScrubError`]; then both files are what they were before.
    pub fn hash(&self, pace: &Pace, progress: &mut dyn FnMut(u64)) -> Result<Hashed, ScrubError> {
        let Some(mut stored) = self.sums() else { return self.hash_beside(pace, progress, None, false) };
        // What became zero since has no checksum any more.
        let zero = self.zeroes(blocks(self.whole()));
        self.hash_beside(pace, progress, Some(&mut |range| stored.next_outside(range, &zero)), false)
    }

    /// As [`SnapshotLayer::hash`], of a layer that another was folded into: what does not fit the checksums of `before`, or is missing
    /// by them, or has none among them, is rot that the fold has carried along. Then those are put on record: they tell
    /// [`SnapshotLayer::scrub`] which blocks that are. Nothing else may have been put into the layer since they were opened.
    ///
    /// # Errors
    /// [`ScrubError`].
    pub fn hash_folded(
        &self,
        before: &mut FoldedChecksums,
        pace: &Pace,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Hashed, ScrubError> {
        // Another snapshot may have the name by now.
        if !before.are_of(self.id) {
            return Err(ScrubError::Changed(self.snapshot.clone()));
        }
        self.hash_beside(pace, progress, Some(&mut |range| before.next(range)), true)
    }

    /// `before`: the checksums on record, if there are any. `moved`: they are in no file that counts, and are to be.
    fn hash_beside(
        &self,
        pace: &Pace,
        progress: &mut dyn FnMut(u64),
        before: Option<NextSum<'_>>,
        moved: bool,
    ) -> Result<Hashed, ScrubError> {
        let fs = Fs::default();
        let here = |source| failed("hashing in", &self.directory)(source);
        if self.id.is_some() {
            sweep(&fs, &self.engine(), &self.live).map_err(here)?;
        }
        let recorded = self.recorded().map_err(here)?;
        let known = recorded.as_ref().and_then(|recorded| recorded.of(self.version.ctime));
        let (mut crc, mut at, mut count) = (Crc64::new(), 0, 0);
        let mut record = before.map(|next| OnRecord { next, from: 0, differs: false });
        let writer = self.id.map(|id| SumsWriter::begin(&fs, &self.engine(), id));
        let mut writer = writer.transpose().map_err(here)?;
        let mut push = |block, sum| {
            count += 1;
            writer.as_mut().map_or(Ok(()), |writer| writer.push(block, sum))
        };
        self.walk(self.whole(), pace, progress, &mut |found| {
            let (offset, bytes, own) = match found {
                Found::Bytes { offset, bytes, own } => (offset, bytes, own),
                Found::Unreadable { offset, error: source } => {
                    let snapshot = self.snapshot.clone();
                    return Err(ScrubError::Unreadable { snapshot, offset, source });
                }
            };
            crc.skip_zeroes(offset - at);
            crc.update(bytes);
            at = offset + bytes.len() as u64;
            for (block, found) in checksums(offset, bytes, own) {
                let expected = match &mut record {
                    Some(record) => record.met(block, found, &mut push).map_err(here)?,
                    None => Some(found),
                };
                expected.map_or(Ok(()), |sum| push(block, sum)).map_err(here)?;
            }
            Ok(())
        })?;
        if let Some(record) = &mut record {
            record.passed(self.version.length.div_ceil(BLOCK), &mut push).map_err(here)?;
        }
        crc.skip_zeroes(self.version.length - at);
        self.check_unchanged()?;
        let checksum = crc.finish();
        let rotten = record.is_some_and(|record| record.differs);
        let silently_corrupted = rotten || known.is_some_and(|known| known != checksum);
        let mut record = Recorded::new(checksum, self.version.ctime, now());
        if silently_corrupted {
            // As Longhorn does: what was recorded stays, with the word beside it.
            record = recorded.filter(|_| known.is_some()).unwrap_or(record);
            record.silently_corrupted = true;
        }
        if let Some(writer) = writer.filter(|_| moved || !silently_corrupted) {
            writer.finish(&fs, self.version).map_err(here)?;
        }
        self.write_record(&fs, &record).map_err(here)?;
        Ok(Hashed { checksum, silently_corrupted, blocks: self.id.map(|_| count) })
    }

    /// Each block's checksum is on record, of the file as it is now; or the layer has no id to bind one to.
    pub fn has_block_checksums(&self) -> bool {
        self.id.is_none() || self.sums().is_some()
    }

    /// Our checksums, if they are of this very file and readable.
    pub(super) fn sums(&self) -> Option<Sums> {
        let sums = Sums::open(&self.engine(), self.id?).ok().flatten();
        sums.filter(|sums| sums.version == self.version)
    }

    /// Longhorn's file, whatever it is of.
    pub(super) fn recorded(&self) -> io::Result<Option<Recorded>> {
        match read_small(&self.directory.join(file_name(&self.snapshot)), META_MAX) {
            Ok(bytes) => Ok(Recorded::parse(&bytes)),
            Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(err) => Err(err),
        }
    }

    /// Ends with no file if the snapshot was folded away meanwhile.
    pub(in super::super) fn write_record(&self, fs: &Fs, record: &Recorded) -> io::Result<()> {
        let name = file_name(&self.snapshot);
        let inode = self.disk.metadata()?.ino();
        let engine = self.engine();
        // A directory of Longhorn's has no engine/.
        let new = if engine.is_dir() {
            engine.join(format!("{NEW_CHECKSUM}{inode}"))
        } else {
            self.directory.join(format!("{name}.tmp"))
        };
        fs.write(&new, &record.encode(), None)?;
        fs.rename(&new, &self.directory.join(&name))?;
        // Meanwhile the snapshot may have been folded away: then there is nothing that the checksum is of.
        let image = self.directory.join(snapshot_file(&self.snapshot));
        if image.symlink_metadata().map(|found| found.ino()).ok() != Some(inode) {
            fs.remove(&self.directory.join(&name))?;
        }
        File::open(&self.directory)?.sync_all()
    }
}
