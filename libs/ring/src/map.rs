//! One anonymous mapping: the memory below a pool.
//!
//! The mapping stays where it is until it is dropped. Its pages are zero before their first use and take no memory
//! until then.

use std::io;
use std::ptr::NonNull;

/// A private anonymous mapping, readable and writable.
#[derive(Debug)]
pub(crate) struct Map {
    base: NonNull<u8>,
    len: usize,
}

impl Map {
    /// Maps `len` bytes (not 0, a multiple of the page).
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        // SAFETY: asks for a new mapping at an address of the kernel's choice, so nothing existing is replaced.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = Self { base, len };
        // A huge page would make 2 MiB resident for the first byte. A child of fork() must not share the pages:
        // O_DIRECT in flight would go to whichever copy the kernel picked (open(2), NOTES). Both are best effort.
        let _ = map.advise(0, len, libc::MADV_NOHUGEPAGE);
        let _ = map.advise(0, len, libc::MADV_DONTFORK);
        Ok(map)
    }

    /// Address of the byte at `at`.
    pub(crate) fn ptr(&self, at: usize) -> *mut u8 {
        assert!(at <= self.len, "{at} is beyond the mapping of {}", self.len);
        // SAFETY: `at` is inside the mapping or one behind it (checked), and the mapping lives as long as `self`.
        unsafe { self.base.as_ptr().add(at) }
    }

    fn advise(&self, at: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is inside the mapping (checked by `ptr`); the callers below pass advice that either
        // keeps the contents or is documented to drop them.
        match unsafe { libc::madvise(self.range(at, len).cast(), len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Checked start of a range.
    fn range(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "range is beyond the mapping");
        self.ptr(at)
    }

    /// Gives the pages of a range back to the system; they read as zero afterwards. The caller knows that no one
    /// reads or writes there. False if the kernel refused, and then nothing changed.
    pub(crate) fn discard(&self, at: usize, len: usize) -> bool {
        // Plain MADV_DONTNEED refuses locked pages; the other one exists since Linux 5.18.
        const MADV_DONTNEED_LOCKED: libc::c_int = 24;
        self.advise(at, len, MADV_DONTNEED_LOCKED).is_ok()
            || self.advise(at, len, libc::MADV_DONTNEED).is_ok()
    }

    /// Makes the pages of a range resident and writable, so that no later access waits for memory.
    pub(crate) fn populate(&self, at: usize, len: usize) -> io::Result<()> {
        // Since Linux 5.14.
        const MADV_POPULATE_WRITE: libc::c_int = 23;
        self.advise(at, len, MADV_POPULATE_WRITE)
    }

    /// Keeps every page resident once it has been touched.
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: locking changes neither contents nor addresses of the mapping, which `self` keeps alive.
        match unsafe { libc::mlock2(self.base.as_ptr().cast(), self.len, libc::MLOCK_ONFAULT) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, made in `new`; whoever holds an address in it holds the pool too.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
