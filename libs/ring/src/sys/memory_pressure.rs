//! What keeps a process that serves a block device from waiting for memory that is waiting for that device.

use std::io;

/// Tells the kernel that the calling thread, and the threads and processes it starts from now on, write out a block
/// device's data (PR_SET_IO_FLUSHER): their allocations start no write-back that would wait for them. Linux 5.6.
///
/// # Errors
/// `EPERM` without CAP_SYS_RESOURCE, as in containers; the process works all the same.
pub fn set_io_flusher() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: this option takes numbers only and changes one flag of the calling thread.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) })
}

/// Keeps every page of the process resident once it has been touched, now and for mappings to come (mlockall(2),
/// MCL_ONFAULT).
///
/// # Errors
/// `EPERM` or `ENOMEM` without CAP_IPC_LOCK and with a small RLIMIT_MEMLOCK.
pub fn lock_memory_on_fault() -> io::Result<()> {
    // SAFETY: locking changes neither contents nor addresses of any mapping.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) })
}

/// Says how readily the kernel kills this process when memory is short: -1000 (never) to 1000.
///
/// # Errors
/// `EACCES` for a lower score without CAP_SYS_RESOURCE.
pub fn set_oom_score(score: i16) -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", score.to_string())
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_work_or_are_refused_for_want_of_a_privilege() {
        for result in [set_io_flusher(), lock_memory_on_fault()] {
            if let Err(e) = result {
                assert!(matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOMEM)), "{e}");
            }
        }
        let score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
        set_oom_score(score.trim().parse().unwrap()).unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(status.contains("VmLck:"));
        nix::sys::mman::munlockall().unwrap();
    }
}
