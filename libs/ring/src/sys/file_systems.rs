//! What a file's file system asks for and has left.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Alignment of memory and of offset and length that O_DIRECT on the file asks for, in bytes (statx(2),
/// STATX_DIOALIGN). `None` if the kernel (before Linux 6.1) or the file system does not tell; then 4096 is right for
/// both wherever O_DIRECT works at all. An offset alignment of 0 never comes: a file without O_DIRECT is
/// `Unsupported`.
///
/// # Errors
/// The system's; `Unsupported` if O_DIRECT does not work on the file.
pub fn dio_align(file: impl AsFd) -> io::Result<Option<(u32, u32)>> {
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: statx reads the (empty) terminated path and writes one structure, which lives here.
    let result = unsafe {
        libc::statx(
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            found.as_mut_ptr(),
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, and then filled by the successful call; it is a plain C structure of integers.
    let found = unsafe { found.assume_init() };
    if found.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(None);
    }
    if found.stx_dio_offset_align == 0 || found.stx_dio_mem_align == 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(Some((found.stx_dio_mem_align, found.stx_dio_offset_align)))
}

/// A file system's kind and space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Its magic number (include/uapi/linux/magic.h): 0xef53 for ext4, 0x58465342 for XFS.
    pub magic: u64,
    /// Bytes in a block.
    pub block: u64,
    /// Bytes in all.
    pub total: u64,
    /// Bytes that an ordinary user may still take.
    pub available: u64,
}

/// tmpfs (include/uapi/linux/magic.h), which memory with a descriptor is of, too, unless its pages are huge.
const TMPFS: u64 = 0x0102_1994;

impl FileSystem {
    /// Its files are pages of memory, and nothing else.
    pub const fn is_memory(&self) -> bool {
        self.magic == TMPFS
    }
}

/// The file system of an open file.
///
/// # Errors
/// The system's.
pub fn file_system(file: impl AsFd) -> io::Result<FileSystem> {
    let found = nix::sys::statfs::fstatfs(&file)?;
    let block = u64::try_from(found.block_size()).unwrap_or(0);
    // The C library's type for it differs between machines, and is signed on some.
    let magic = u64::from(u32::try_from(found.filesystem_type().0 & 0xffff_ffff).unwrap_or(0));
    let bytes = |blocks: u64| blocks.saturating_mul(block);
    Ok(FileSystem { magic, block, total: bytes(found.blocks()), available: bytes(found.blocks_available()) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn alignment_is_a_power_of_two_where_it_is_told() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        if let Some((memory, offset)) = dio_align(&file).unwrap() {
            assert!(memory.is_power_of_two() && offset.is_power_of_two() && offset <= 65536);
        }
        assert!(dio_align(File::open("/proc/self/status").unwrap()).is_ok_and(|found| found.is_none()));
    }

    #[test]
    fn numbers_are_plausible() {
        let here = file_system(File::open(env!("CARGO_MANIFEST_DIR")).unwrap()).unwrap();
        assert!(here.block.is_power_of_two() && here.available <= here.total && here.total > 1 << 20);
        let proc = file_system(File::open("/proc/self/status").unwrap()).unwrap();
        assert_eq!(proc.magic, 0x9fa0);
    }
}
