//! A file's space: allocated, punched, shared with another file; and what the page cache has of it.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::Falloc;

/// Allocates, zeroes or punches a range of a file, as [`crate::Ring::fallocate`] does.
///
/// # Errors
/// The system's: `EOPNOTSUPP` where the file system cannot, `ENOSPC`.
pub fn fallocate(file: impl AsFd, mode: Falloc, offset: u64, len: u64) -> io::Result<()> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let len = i64::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    super::retry(|| {
        // SAFETY: fallocate takes numbers only.
        unsafe { libc::fallocate64(file.as_fd().as_raw_fd(), mode.mode(), offset, len) }
    })
}

/// Gives a range's space back: it reads as zero, the file keeps its size.
///
/// # Errors
/// As for [`fallocate`].
pub fn punch_hole(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    fallocate(file, Falloc::PunchHole, offset, len)
}

/// Makes a range of `to` share the space of one of `from` (FICLONERANGE): the same bytes, no copy. Unwritten ranges of
/// `from` become holes. All numbers are multiples of the file system's block, except where the range ends at the end
/// of `from`.
///
/// # Errors
/// The system's: `EOPNOTSUPP` where the file system cannot (ext4), `EXDEV` between two file systems, `EINVAL` for
/// ranges that do not fit.
pub fn clone_range(
    to: impl AsFd,
    to_offset: u64,
    from: impl AsFd,
    from_offset: u64,
    len: u64,
) -> io::Result<()> {
    /// struct file_clone_range (include/uapi/linux/fs.h).
    #[repr(C)]
    struct CloneRange {
        from: i64,
        from_offset: u64,
        len: u64,
        to_offset: u64,
    }
    /// _IOW(0x94, 13, struct file_clone_range).
    const FICLONERANGE: libc::Ioctl = 0x4020_940d_u32 as libc::Ioctl;
    if len == 0 {
        // The kernel takes 0 for "to the end".
        return Ok(());
    }
    let from = i64::from(from.as_fd().as_raw_fd());
    let range = CloneRange { from, from_offset, len, to_offset };
    super::retry(|| {
        // SAFETY: the command reads one file_clone_range, which lives until the call returns.
        unsafe { libc::ioctl(to.as_fd().as_raw_fd(), FICLONERANGE, &raw const range) }
    })
}

/// Lets go of what the page cache has of a file and need not write: what is read next is what the disk has.
///
/// # Errors
/// The system's.
pub fn forget_cached(file: impl AsFd) -> io::Result<()> {
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    Ok(nix::fcntl::posix_fadvise(file, 0, 0, advice)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_clone_has_the_same_bytes_or_is_refused_where_space_is_not_shared() {
        let directory = env!("CARGO_MANIFEST_DIR");
        let (from, to) =
            (tempfile::tempfile_in(directory).unwrap(), tempfile::tempfile_in(directory).unwrap());
        from.write_all_at(&[7; 16384], 0).unwrap();
        match clone_range(&to, 8192, &from, 4096, 8192) {
            Ok(()) => {
                let mut bytes = [0; 8192];
                to.read_exact_at(&mut bytes, 8192).unwrap();
                assert!(bytes == [7; 8192]);
            }
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EOPNOTSUPP)),
        }
        clone_range(&to, 0, &from, 0, 0).unwrap();
    }

    #[test]
    fn what_the_cache_forgets_is_on_the_disk() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all_at(&[7; 8192], 0).unwrap();
        file.sync_all().unwrap();
        forget_cached(&file).unwrap();
        let mut bytes = [0; 8192];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == [7; 8192]);
    }

    #[test]
    fn a_punched_range_reads_as_zero() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 12288], 0).unwrap();
        punch_hole(&file, 4096, 4096).unwrap();
        let mut bytes = [1; 12288];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes[4096..8192] == [0; 4096] && bytes[..4096] == [7; 4096] && bytes[8192..] == [7; 4096]);
        assert!(fallocate(&file, Falloc::Allocate, u64::MAX, 1).is_err());
    }
}
