//! What keeps a process that serves a block device from waiting for memory that is waiting for that device.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

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

/// Class in which the kernel schedules a thread (sched(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// As everybody.
    Usual,
    /// Real time, at the lowest priority. What counts here is not the processor: when memory is short, such a thread may go
    /// below the zone's minimum watermark (WMARK_MIN), at which everybody else waits for pages to be written out: by half of
    /// it (ALLOC_MIN_RESERVE, `gfp_to_alloc_flags` in mm/page_alloc.c).
    Realtime,
}

/// Puts a thread of this process, by its number (0: the calling one), into a class. Threads that it starts later are in the
/// same, those that io_uring starts for it included.
///
/// # Errors
/// `EPERM` without CAP_SYS_NICE; `ESRCH` if the thread has ended.
pub fn set_class(thread: libc::pid_t, class: Class) -> io::Result<()> {
    let (policy, priority) = match class {
        Class::Usual => (libc::SCHED_OTHER, 0),
        Class::Realtime => (libc::SCHED_RR, 1),
    };
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the parameters are read during the call only.
    check(unsafe { libc::sched_setscheduler(thread, policy, &raw const parameters) })
}

/// The class of the calling thread. Every policy but that of [`Class::Realtime`] is usual.
pub fn class() -> Class {
    // SAFETY: takes a number and returns one.
    match unsafe { libc::sched_getscheduler(0) } {
        libc::SCHED_RR => Class::Realtime,
        _ => Class::Usual,
    }
}

/// Tells when the machine's tasks wait for memory (Documentation/accounting/psi.rst). Linux 5.2, unless it was built or
/// started without.
#[derive(Debug)]
pub struct PressureTrigger(File);

impl PressureTrigger {
    /// So much waiting within [`Self::WINDOW`] is pressure: long before nobody gets any memory.
    const STALLED: Duration = Duration::from_millis(10);
    /// The shortest that the kernel allows.
    const WINDOW: Duration = Duration::from_millis(500);

    /// One that goes off when some task has waited for memory for 10 ms within 500 ms.
    ///
    /// # Errors
    /// `NotFound` or `EOPNOTSUPP` where the kernel does not count that; `EINVAL` without CAP_SYS_RESOURCE.
    pub fn new() -> io::Result<Self> {
        Self::of(Self::STALLED, Self::WINDOW)
    }

    fn of(stalled: Duration, window: Duration) -> io::Result<Self> {
        let path = "/proc/pressure/memory";
        let mut file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let wanted = format!("some {} {}\0", stalled.as_micros(), window.as_micros());
        file.write_all(wanted.as_bytes())?;
        Ok(Self(file))
    }

    /// Waits until it goes off, at most once a window: true. False: not within `timeout` (`None`: for ever).
    ///
    /// # Errors
    /// The system's; the trigger is of no use any more.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let most = timeout.map_or(PollTimeout::NONE, |t| t.try_into().unwrap_or(PollTimeout::MAX));
        let mut polled = [PollFd::new(self.0.as_fd(), PollFlags::POLLPRI)];
        match poll(&mut polled, most) {
            Ok(0) => Ok(false),
            // Perhaps a while too long.
            Err(nix::Error::EINTR) => self.wait(timeout),
            Ok(_) if polled[0].revents().is_some_and(|r| r.contains(PollFlags::POLLERR)) => {
                Err(io::Error::other("the kernel counts no memory pressure any more"))
            }
            Ok(_) => Ok(true),
            Err(e) => Err(e.into()),
        }
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a thread of its own: a class is a thread's.
    #[test]
    fn a_thread_and_those_it_starts_are_real_time_unless_that_is_refused() {
        let outcome = std::thread::spawn(|| {
            set_class(0, Class::Realtime)?;
            let (own, child) = (class(), std::thread::spawn(class).join().unwrap());
            set_class(0, Class::Usual)?;
            io::Result::Ok((own, child, class()))
        });
        match outcome.join().unwrap() {
            Ok(classes) => assert_eq!(classes, (Class::Realtime, Class::Realtime, Class::Usual)),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EPERM)),
        }
        assert_eq!(class(), Class::Usual, "another thread's");
        let ended = set_class(libc::pid_t::MAX, Class::Usual).unwrap_err();
        assert_eq!(ended.raw_os_error(), Some(libc::ESRCH));
    }

    /// 10 s of stall within 10 s: not while these tests run.
    #[test]
    fn a_trigger_that_is_not_reached_does_not_go_off() {
        let ten = Duration::from_secs(10);
        match PressureTrigger::of(ten, ten) {
            Ok(trigger) => {
                assert!(!trigger.wait(Some(Duration::from_millis(20))).unwrap());
                assert!(PressureTrigger::of(2 * ten, ten).is_err(), "longer than its window");
            }
            // A kernel without, or a container that may not.
            Err(e) => assert!(
                matches!(
                    e.raw_os_error(),
                    Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EACCES | libc::EPERM)
                ),
                "{e}"
            ),
        }
    }

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
