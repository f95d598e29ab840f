//! One mapping: the memory below a pool.
//!
//! The mapping stays where it is until it is dropped. Its pages are zero before their first use and take no memory
//! until then.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// What memory has that is lent: it stays as large as it is, so that no access to a mapping of it can fail.
pub(crate) const LENT_SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// A private anonymous mapping, readable and writable; or one of memory that other processes may map, too.
#[derive(Debug)]
pub(crate) struct Map {
    base: NonNull<u8>,
    len: usize,
    /// What is mapped, if it is ours and not anonymous.
    memory: Option<OwnedFd>,
}

impl Map {
    /// Maps `len` bytes (not 0, a multiple of the page).
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::of(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    /// The same of memory that has a descriptor, for others to map.
    ///
    /// # Errors
    /// The system's, where there are no such descriptors, or none is left.
    pub(crate) fn lendable(len: usize) -> io::Result<Self> {
        let memory = unnamed(len)?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let mut map = Self::of(len, libc::PROT_READ | libc::PROT_WRITE, flags, memory.as_raw_fd())?;
        map.memory = Some(memory);
        Ok(map)
    }

    /// Maps memory of another process, which only that process writes: `len` bytes, all that there is. The caller has
    /// seen that it has [`LENT_SEALS`]. The descriptor is not needed any more.
    pub(crate) fn lent(memory: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Self::of(len, libc::PROT_READ, libc::MAP_SHARED, memory.as_raw_fd())
    }

    fn of(len: usize, protection: libc::c_int, flags: libc::c_int, fd: RawFd) -> io::Result<Self> {
        // SAFETY: asks for a new mapping at an address of the kernel's choice, so nothing existing is replaced.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = Self { base, len, memory: None };
        // A huge page would make 2 MiB resident for the first byte. A child of fork() must not share the pages:
        // O_DIRECT in flight would go to whichever copy the kernel picked (open(2), NOTES). Both are best effort.
        let _ = map.advise(0, len, libc::MADV_NOHUGEPAGE);
        let _ = map.advise(0, len, libc::MADV_DONTFORK);
        Ok(map)
    }

    /// A descriptor of the memory for another process, which cannot write through it.
    ///
    /// # Errors
    /// `Unsupported` for anonymous memory; the system's, where /proc is not mounted.
    pub(crate) fn lend(&self) -> io::Result<OwnedFd> {
        let memory = self.memory.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        Ok(File::open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?.into())
    }

    /// Number of bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
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
        match &self.memory {
            None => {
                self.advise(at, len, MADV_DONTNEED_LOCKED).is_ok()
                    || self.advise(at, len, libc::MADV_DONTNEED).is_ok()
            }
            // Pages with a descriptor are not the mapping's. MADV_REMOVE would refuse locked ones.
            Some(memory) => {
                let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                let (Ok(at), Ok(len)) = (i64::try_from(at), i64::try_from(len)) else { return false };
                fallocate(memory, hole, at, len).is_ok()
            }
        }
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

/// Memory of `len` bytes with a descriptor, which nobody can make shorter or longer, or execute.
fn unnamed(len: usize) -> io::Result<OwnedFd> {
    // Since Linux 6.3; those before do not know it.
    const MFD_NOEXEC_SEAL: MFdFlags = MFdFlags::from_bits_retain(8);
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let name = c"longhorn-buffers";
    let memory = memfd_create(name, flags | MFD_NOEXEC_SEAL).or_else(|_| memfd_create(name, flags))?;
    nix::unistd::ftruncate(memory.as_fd(), i64::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?)?;
    fcntl(&memory, FcntlArg::F_ADD_SEALS(LENT_SEALS | SealFlag::F_SEAL_SEAL))?;
    Ok(memory)
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, made in `of`; whoever holds an address in it holds the pool too.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
