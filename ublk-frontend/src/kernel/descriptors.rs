//! The requests of a queue, in memory that the kernel writes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use crate::abi::{DEPTH_MAX, Descriptor};

/// The descriptors of one queue.
#[derive(Debug)]
pub(crate) struct Descriptors {
    base: NonNull<Descriptor>,
    depth: u16,
    bytes: usize,
}

impl Descriptors {
    /// Those of a queue of the device whose `/dev/ublkcN` this is.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn map(fd: BorrowedFd<'_>, queue: u16, depth: u16) -> io::Result<Self> {
        let (at, bytes) = place(queue, depth, page_size());
        let at = i64::try_from(at).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address of the kernel's choice, read-only.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd.as_raw_fd(),
                at,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, depth, bytes })
    }

    /// The request with this tag, whose command has just completed.
    ///
    /// # Panics
    /// For a tag beyond the depth.
    pub(crate) fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        // SAFETY: the entry is inside the mapping, which has `depth` of them and lives as long as `self`; a mapping is
        // aligned to a page. Every pattern of bytes is a Descriptor. The kernel wrote it before it completed the
        // command and writes it again only after the next commit of this tag, so nobody writes it now; the read is
        // volatile since the compiler cannot know of the kernel's writes.
        unsafe { self.base.as_ptr().add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, made in `map`, and no reference into it is ever given out.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Where in `/dev/ublkcN` a queue's descriptors are, and how many bytes: the kernel takes no others (ublk_ch_mmap).
fn place(queue: u16, depth: u16, page: usize) -> (usize, usize) {
    let of = |depth: u16| (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(page);
    (usize::from(queue) * of(DEPTH_MAX), of(depth))
}

fn page_size() -> usize {
    // SAFETY: the call only returns a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_begin_at_whole_pages_however_large_those_are() {
        assert_eq!(place(0, 128, 4096), (0, 4096));
        assert_eq!(place(3, 4096, 4096), (3 * 98_304, 98_304));
        // As arm64 may have them, of which 98,304 bytes are one and a half.
        assert_eq!(place(0, 128, 65_536), (0, 65_536));
        assert_eq!(place(3, 4096, 65_536), (3 * 131_072, 131_072));
    }
}
