//! `engine/sums-ID`: a crc32c of each block of a snapshot's layer that holds data, bound to the layer as its zero map is.
//!
//! Pages of 4096 bytes, little-endian; a page of zeroes is one without checksums, so the file is sparse. Page 0: magic, id
//! of the layer, length and ctime of its file, number of pages. Page n: the blocks from (n - 1) * 992 on: a bit each, from the low end of
//! each byte, 1: it holds data; then 992 checksums. Every page ends with the crc32c of id, page number and page.
//! The file is made whole and then takes its name: there is never a part of one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::super::disk;
use super::super::fs::{Fs, NEW};
use super::super::id::Id;
use super::super::ranges::RangeSet;

const MAGIC: &[u8; 8] = b"LHsums1\n";
const PAGE: usize = 4096;
/// Where a page's own checksum stands.
const SEAL: usize = PAGE - 4;
/// Blocks in a page.
const BLOCKS: usize = 992;
const BLOCKS_U64: u64 = BLOCKS as u64;
const BITS: usize = BLOCKS / 8;
const _: () = assert!(BITS + 4 * BLOCKS == SEAL);

const PREFIX: &str = "sums-";

/// Where one of Longhorn's checksum files is made, with the inode of the snapshot's file behind it.
pub(in super::super) const NEW_CHECKSUM: &str = "new-checksum-";

/// What a layer's file was when its checksums were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Version {
    pub(in super::super) length: u64,
    /// Seconds and nanoseconds.
    pub(in super::super) ctime: (i64, i64),
}

impl Version {
    pub(in super::super) fn of(file: &File) -> io::Result<Self> {
        let stat = file.metadata()?;
        Ok(Self { length: stat.len(), ctime: (stat.ctime(), stat.ctime_nsec()) })
    }
}

fn path(engine: &Path, id: Id) -> PathBuf {
    engine.join(format!("{PREFIX}{id}"))
}

/// Removes the files of layers that are gone, and what was broken off. `live`: ids of all layers.
pub(in super::super) fn sweep(fs: &Fs, engine: &Path, live: &[Id]) -> io::Result<()> {
    for entry in std::fs::read_dir(engine)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let gone = match name.strip_prefix(PREFIX) {
            Some(rest) => !Id::parse(rest.as_bytes()).is_some_and(|id| live.contains(&id)),
            None => name.starts_with(NEW_CHECKSUM),
        };
        if gone {
            fs.remove(&entry.path())?;
        }
    }
    Ok(())
}

fn seal(page: &mut [u8; PAGE], id: Id, number: u64) {
    let crc = checksum(page, id, number);
    page[SEAL..].copy_from_slice(&crc.to_le_bytes());
}

fn checksum(page: &[u8; PAGE], id: Id, number: u64) -> u32 {
    let seed = crc32c::crc32c_append(crc32c::crc32c(&id.bytes()), &number.to_le_bytes());
    crc32c::crc32c_append(seed, &page[..SEAL])
}

fn header(id: Id, version: Version, pages: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    page[..8].copy_from_slice(MAGIC);
    page[8..24].copy_from_slice(&id.bytes());
    page[24..32].copy_from_slice(&version.length.to_le_bytes());
    page[32..40].copy_from_slice(&version.ctime.0.to_le_bytes());
    page[40..48].copy_from_slice(&version.ctime.1.to_le_bytes());
    page[48..56].copy_from_slice(&pages.to_le_bytes());
    seal(&mut page, id, 0);
    page
}

/// Makes the file, in ascending order of blocks.
#[derive(Debug)]
pub(in super::super) struct SumsWriter {
    id: Id,
    path: PathBuf,
    file: File,
    number: u64,
    page: Box<[u8; PAGE]>,
}

impl SumsWriter {
    pub(in super::super) fn begin(fs: &Fs, engine: &Path, id: Id) -> io::Result<Self> {
        let path = path(engine, id);
        let new = engine.join(format!("{PREFIX}{id}{NEW}"));
        fs.write(&new, &[], None)?;
        let file = disk::open_layer(&new, true, false)?;
        Ok(Self { id, path, file, number: 0, page: Box::new([0; PAGE]) })
    }

    /// The checksum of a block behind all before.
    pub(in super::super) fn push(&mut self, block: u64, crc: u32) -> io::Result<()> {
        let number = block / BLOCKS_U64 + 1;
        if number != self.number {
            self.write_page()?;
            self.number = number;
        }
        let at = usize::try_from(block % BLOCKS_U64).unwrap_or(0);
        self.page[at / 8] |= 1 << (at % 8);
        self.page[BITS + 4 * at..][..4].copy_from_slice(&crc.to_le_bytes());
        Ok(())
    }

    fn write_page(&mut self) -> io::Result<()> {
        if self.number > 0 {
            seal(&mut self.page, self.id, self.number);
            self.file.write_all_at(&*self.page, self.number * PAGE as u64)?;
            self.page.fill(0);
        }
        Ok(())
    }

    /// The file takes its name, durably.
    pub(in super::super) fn finish(mut self, fs: &Fs, version: Version) -> io::Result<()> {
        self.write_page()?;
        self.file.write_all_at(&header(self.id, version, self.number + 1), 0)?;
        let new = self.path.with_file_name(format!("{PREFIX}{}{NEW}", self.id));
        fs.sync_file(&self.file, &new)?;
        fs.rename(&new, &self.path)?;
        self.path.parent().map_or(Ok(()), |engine| fs.sync_directory(engine))
    }
}

/// The checksums of one layer.
#[derive(Debug)]
pub(in super::super) struct Sums {
    /// The layer that they are of.
    pub(in super::super) id: Id,
    file: File,
    pages: u64,
    pub(in super::super) version: Version,
    /// The page that was read last.
    number: u64,
    page: Box<[u8; PAGE]>,
}

impl Sums {
    /// `Ok(None)`: there is no file. `InvalidData`: it is damaged.
    pub(in super::super) fn open(engine: &Path, id: Id) -> io::Result<Option<Self>> {
        let file = match disk::open_layer(&path(engine, id), true, false) {
            Ok(file) => file,
            Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(err) => return Err(err),
        };
        let pages = file.metadata()?.len() / PAGE as u64;
        let version = Version { length: 0, ctime: (0, 0) };
        let mut sums = Self { id, file, pages, version, number: 1, page: Box::new([0; PAGE]) };
        sums.read_page(0)?;
        let u64_at = |at: usize| sums.page[at..].first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
        let i64_at = |at: usize| sums.page[at..].first_chunk::<8>().map_or(0, |b| i64::from_le_bytes(*b));
        sums.version = Version { length: u64_at(24), ctime: (i64_at(32), i64_at(40)) };
        if *sums.page != header(id, sums.version, sums.pages) {
            return Err(sums.damaged(0));
        }
        Ok(Some(sums))
    }

    fn damaged(&self, number: u64) -> io::Error {
        let text = format!("page {number} of engine/{PREFIX}{} is damaged", self.id);
        io::Error::new(io::ErrorKind::InvalidData, text)
    }

    /// Puts a page in place; one behind the end is empty.
    fn read_page(&mut self, number: u64) -> io::Result<()> {
        if self.number == number {
            return Ok(());
        }
        self.number = number;
        self.page.fill(0);
        if number >= self.pages && number > 0 {
            return Ok(());
        }
        let read = self.file.read_exact_at(&mut *self.page, number * PAGE as u64);
        let crc = u32::from_le_bytes(*self.page.last_chunk::<4>().unwrap_or(&[0; 4]));
        let empty = number > 0 && self.page.iter().all(|byte| *byte == 0);
        if read.is_err() || !(empty || crc == checksum(&self.page, self.id, number)) {
            // What is not believed is not looked at again.
            self.number = u64::MAX;
            return Err(self.damaged(number));
        }
        Ok(())
    }

    /// They are of another state of the file from now on. A write that is broken off half-way leaves a damaged header:
    /// then there are none.
    pub(in super::super) fn rebind(&mut self, version: Version) -> io::Result<()> {
        self.file.write_all_at(&header(self.id, version, self.pages), 0)?;
        self.version = version;
        Ok(())
    }

    /// The first block of the range that has a checksum, and the checksum.
    pub(in super::super) fn next(&mut self, range: Range<u64>) -> io::Result<Option<(u64, u32)>> {
        let mut block = range.start;
        let end = range.end.min(self.pages.saturating_sub(1) * BLOCKS_U64);
        while block < end {
            self.read_page(block / BLOCKS_U64 + 1)?;
            let page_end = end.min(page_end(block));
            for block in block..page_end {
                let at = usize::try_from(block % BLOCKS_U64).unwrap_or(0);
                if self.page[at / 8] >> (at % 8) & 1 == 1 {
                    let crc = self.page[BITS + 4 * at..].first_chunk::<4>().copied().unwrap_or_default();
                    return Ok(Some((block, u32::from_le_bytes(crc))));
                }
            }
            block = page_end;
        }
        Ok(None)
    }

    /// The same, of the blocks that are not in `hidden`.
    pub(in super::super) fn next_outside(
        &mut self,
        mut range: Range<u64>,
        hidden: &RangeSet,
    ) -> io::Result<Option<(u64, u32)>> {
        while let Some((block, crc)) = self.next(range.clone())? {
            if !hidden.overlaps(block..block + 1) {
                return Ok(Some((block, crc)));
            }
            range.start = block + 1;
        }
        Ok(None)
    }
}

/// The end of the page that a block's checksum is in: what is damaged is damaged up to there.
pub(in super::super) const fn page_end(block: u64) -> u64 {
    (block / BLOCKS_U64 + 1) * BLOCKS_U64
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: Version = Version { length: 1 << 40, ctime: (7, 8) };

    fn id() -> Id {
        Id::parse(&[b'c'; 32]).unwrap()
    }

    fn write(engine: &Path, blocks: &[(u64, u32)]) {
        let mut writer = SumsWriter::begin(&Fs::default(), engine, id()).unwrap();
        for (block, crc) in blocks {
            writer.push(*block, *crc).unwrap();
        }
        writer.finish(&Fs::default(), VERSION).unwrap();
    }

    fn all(sums: &mut Sums) -> io::Result<Vec<(u64, u32)>> {
        let (mut found, mut at) = (Vec::new(), 0);
        while let Some((block, crc)) = sums.next(at..u64::MAX)? {
            found.push((block, crc));
            at = block + 1;
        }
        Ok(found)
    }

    #[test]
    fn what_was_written_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Sums::open(dir.path(), id()).unwrap().is_none());
        // A checksum of 0 is one, too; pages in between are holes.
        let blocks = [(0, 0), (1, 5), (991, 6), (992, 7), (5000, u32::MAX), (1 << 27, 9)];
        write(dir.path(), &blocks);
        let mut sums = Sums::open(dir.path(), id()).unwrap().unwrap();
        assert_eq!(sums.version, VERSION);
        assert_eq!(all(&mut sums).unwrap(), blocks);
        assert_eq!(sums.next(2..991).unwrap(), None);
        assert_eq!(sums.next(2..992).unwrap(), Some((991, 6)));
        write(dir.path(), &[]);
        assert_eq!(all(&mut Sums::open(dir.path(), id()).unwrap().unwrap()).unwrap(), []);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left over");
    }

    #[test]
    fn damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[(0, 1), (992, 7)]);
        let path = path(dir.path(), id());
        let good = std::fs::read(&path).unwrap();
        for at in [0, 9, 30, 4000, PAGE, PAGE + BITS, 2 * PAGE - 1, 2 * PAGE + 3, 3 * PAGE - 1] {
            let mut bad = good.clone();
            bad[at] ^= 4;
            std::fs::write(&path, bad).unwrap();
            let found = Sums::open(dir.path(), id()).and_then(|sums| all(&mut sums.unwrap()));
            assert_eq!(found.unwrap_err().kind(), io::ErrorKind::InvalidData, "byte {at}");
        }
        std::fs::write(&path, b"").unwrap();
        assert!(Sums::open(dir.path(), id()).is_err());
        std::fs::write(&path, &good[..2 * PAGE]).unwrap();
        assert!(Sums::open(dir.path(), id()).is_err(), "a page is missing");
    }

    #[test]
    fn files_without_their_layer_go() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[(0, 1)]);
        std::fs::write(dir.path().join("sums-00000000000000000000000000000001"), b"").unwrap();
        std::fs::write(dir.path().join(format!("sums-{}.new", id())), b"").unwrap();
        std::fs::write(dir.path().join("new-checksum-17"), b"").unwrap();
        std::fs::write(dir.path().join("zero-00000000000000000000000000000001"), b"").unwrap();
        sweep(&Fs::default(), dir.path(), &[id()]).unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names.len(), 2);
        assert!(path(dir.path(), id()).exists());
    }
}
