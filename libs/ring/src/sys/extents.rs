//! Where a file holds data: FIEMAP, and SEEK_DATA and SEEK_HOLE where that is missing.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// _IOWR('f', 11, struct fiemap) (include/uapi/linux/fs.h).
const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
const FIEMAP_FLAG_SYNC: u32 = 1;

/// Extents that one call asks for.
const BATCH: u32 = 256;

/// An extent as the file system tells it (struct fiemap_extent).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileExtent {
    /// First byte in the file. May lie before the range that was asked for.
    pub logical: u64,
    /// Bytes; may go beyond the range that was asked for.
    pub length: u64,
    /// `FIEMAP_EXTENT_*`.
    pub flags: u32,
}

impl FileExtent {
    /// The last extent of the file.
    pub const LAST: u32 = 0x1;
    /// Not on disk yet: only in the page cache.
    pub const DELALLOC: u32 = 0x4;
    /// It takes space and was never written, or the write was not made durable: reads as zero.
    pub const UNWRITTEN: u32 = 0x800;
    /// Its space is shared with another file.
    pub const SHARED: u32 = 0x2000;

    /// True if it takes space and reads as zero.
    pub const fn is_unwritten(&self) -> bool {
        self.flags & Self::UNWRITTEN != 0
    }
}

/// struct fiemap_extent (include/uapi/linux/fiemap.h).
#[repr(C)]
#[derive(Clone, Copy)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// struct fiemap with room for a batch.
#[repr(C)]
struct RawMap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH as usize],
}

const _: () = assert!(size_of::<RawExtent>() == 56 && size_of::<RawMap>() == 32 + 56 * BATCH as usize);

/// Appends the file's extents that touch the range to `found`, ascending, at most 256 of them. True if there are no
/// more in the range; else the caller goes on behind the last one. With `sync`, what lies in the page cache is written
/// first: without it, buffered writes may be missing.
///
/// # Errors
/// The system's: `EOPNOTSUPP` or `ENOTTY` where the file system has no extents to tell (tmpfs, FUSE).
pub fn fiemap(
    file: impl AsFd,
    start: u64,
    length: u64,
    sync: bool,
    found: &mut Vec<FileExtent>,
) -> io::Result<bool> {
    const NOTHING: RawExtent =
        RawExtent { logical: 0, physical: 0, length: 0, reserved64: [0; 2], flags: 0, reserved: [0; 3] };
    let flags = if sync { FIEMAP_FLAG_SYNC } else { 0 };
    let mut map = RawMap {
        start,
        length,
        flags,
        mapped: 0,
        count: BATCH,
        reserved: 0,
        extents: [NOTHING; BATCH as usize],
    };
    super::retry(|| {
        // SAFETY: the command reads the head of `map` and writes at most `count` extents behind it, all inside `map`,
        // which lives until the call returns. The layout is the kernel's (asserted above).
        unsafe { libc::ioctl(file.as_fd().as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) }
    })?;
    let mapped = &map.extents[..BATCH.min(map.mapped) as usize];
    found.extend(mapped.iter().map(|e| FileExtent { logical: e.logical, length: e.length, flags: e.flags }));
    Ok(mapped.len() < BATCH as usize || mapped.last().is_none_or(|e| e.flags & FileExtent::LAST != 0))
}

/// The first byte at or behind `from` that lies in data; `None` if there is none up to the end of the file. Unwritten
/// extents count as holes unless their pages are dirty.
///
/// # Errors
/// The system's.
pub fn seek_data(file: impl AsFd, from: u64) -> io::Result<Option<u64>> {
    match seek(file, from, libc::SEEK_DATA) {
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        other => other.map(Some),
    }
}

/// The first byte at or behind `from` that lies in a hole; there is one at the end of every file.
///
/// # Errors
/// The system's: `ENXIO` if `from` is behind the end.
pub fn seek_hole(file: impl AsFd, from: u64) -> io::Result<u64> {
    seek(file, from, libc::SEEK_HOLE)
}

fn seek(file: impl AsFd, from: u64, whence: libc::c_int) -> io::Result<u64> {
    let from = i64::try_from(from).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: lseek takes numbers only.
    let found = unsafe { libc::lseek64(file.as_fd().as_raw_fd(), from, whence) };
    u64::try_from(found).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::Falloc;
    use crate::sys::{fallocate, punch_hole};

    /// A file on the file system of the build, which has extents.
    fn file() -> std::fs::File {
        tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap()
    }

    #[test]
    fn written_unwritten_and_holes_are_told_apart() {
        let file = file();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[1; 8192], 0).unwrap();
        fallocate(&file, Falloc::AllocateKeepSize, 65536, 16384).unwrap();
        file.write_all_at(&[1; 4096], 262_144).unwrap();
        let mut found = Vec::new();
        assert!(fiemap(&file, 0, u64::MAX, true, &mut found).unwrap());
        let told: Vec<_> = found.iter().map(|e| (e.logical, e.length, e.is_unwritten())).collect();
        assert_eq!(told, [(0, 8192, false), (65536, 16384, true), (262_144, 4096, false)]);
        assert!(found[2].flags & FileExtent::LAST != 0);
        assert_eq!(seek_data(&file, 8192).unwrap(), Some(262_144));
        assert_eq!(seek_hole(&file, 0).unwrap(), 8192);
        assert_eq!(seek_data(&file, 262_144 + 4096).unwrap(), None);
        punch_hole(&file, 4096, 4096).unwrap();
        found.clear();
        assert!(fiemap(&file, 0, 65536, true, &mut found).unwrap());
        assert_eq!(found.iter().map(|e| (e.logical, e.length)).collect::<Vec<_>>(), [(0, 4096)]);
    }

    #[test]
    fn more_extents_than_a_batch_are_told_in_turns() {
        let file = file();
        for i in 0..600 {
            file.write_all_at(&[1; 4096], i * 8192).unwrap();
        }
        let mut found = Vec::new();
        let mut at = 0;
        let mut calls = 0;
        while !fiemap(&file, at, u64::MAX - at, true, &mut found).unwrap() {
            let last = found.last().unwrap();
            at = last.logical + last.length;
            calls += 1;
        }
        assert!(calls >= 2);
        assert_eq!(found.len(), 600);
        assert!(found.iter().zip(0..).all(|(e, i)| (e.logical, e.length) == (i * 8192, 4096)));
    }

    /// The `fiemap` crate asks for eight extents at a time, of whole files alone.
    #[test]
    fn another_reader_of_extents_sees_the_same() {
        let file = file();
        file.set_len(64 << 20).unwrap();
        for i in 0..300 {
            file.write_all_at(&[1; 4096], i * 24576).unwrap();
            fallocate(&file, Falloc::AllocateKeepSize, i * 24576 + 12288, 4096).unwrap();
        }
        let (mut found, mut at) = (Vec::new(), 0);
        while !fiemap(&file, at, u64::MAX - at, true, &mut found).unwrap() {
            let last = found.last().unwrap();
            at = last.logical + last.length;
        }
        let seen: Vec<_> = fiemap::Fiemap::new(&file)
            .map(|e| e.unwrap())
            .map(|e| FileExtent { logical: e.fe_logical, length: e.fe_length, flags: e.fe_flags.bits() })
            .collect();
        assert_eq!(found, seen);
        assert_eq!(found.len(), 600);
    }
}
