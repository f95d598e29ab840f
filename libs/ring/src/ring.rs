//! The loop: one `io_uring_enter` per turn submits everything queued and takes what has ended.
//!
//! - Queueing never fails and never waits for completions. What the submission queue cannot take waits in a backlog,
//!   in order.
//! - Completions come in the order in which the kernel posted them; none is lost, also when its queue overflows.
//! - An operation's descriptor, memory and arguments are kept until its terminal completion (`op.rs`). Dropping the
//!   ring cancels what is in flight and waits for it; what does not end within [`DROP_PATIENCE`] is leaked.

mod requests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};

use crate::op::{Hold, Table};
use crate::{Completion, Fd, Token};

pub use requests::Falloc;

/// User data of requests whose completion tells nothing (cancellations). No entry of the table has this one: its
/// lower half would be an index beyond all memory.
const UNNOTICED: u64 = u64::MAX;

/// How long a dropped ring waits for its operations. Sockets and timers end at once when cancelled; a disk that does
/// not answer for this long may take for ever.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// How long a turn lasts at least for which the kernel has no memory.
const NO_MEMORY_NAP: Duration = Duration::from_millis(1);

/// How often in a row a bell's counter may not be read. What the kernel has no memory for at one moment it has at the next; nobody is
/// told of that, since a loop that waits for nothing else would not hear the bell any more.
const BELL_FAILURES: u32 = 64;

/// A ring, its operations in flight, and the thread that made it: it never leaves that thread.
pub struct Ring {
    uring: IoUring,
    table: Table,
    /// Entries that the submission queue had no place for.
    backlog: VecDeque<squeue::Entry>,
    turns: u64,
    /// Receives may be told to wait before they look (`IORING_RECVSEND_POLL_FIRST`, Linux 5.19).
    poll_first: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.table.live()).finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring whose submission queue has `entries` places (rounded up to a power of two); its completion queue has
    /// four times as many.
    ///
    /// # Errors
    /// The system's: `ENOSYS` or `EPERM` where io_uring is switched off, as in many containers; `Unsupported` before
    /// Linux 5.11.
    pub fn new(entries: u32) -> io::Result<Self> {
        let (uring, poll_first) = build(entries.clamp(1, 32768))?;
        let params = uring.params();
        if !params.is_feature_nodrop() || !params.is_feature_ext_arg() || !params.is_feature_submit_stable() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring of Linux 5.11 or later is needed",
            ));
        }
        Ok(Self { uring, table: Table::new(), backlog: VecDeque::new(), turns: 0, poll_first })
    }

    /// Submits everything queued and waits for at least one completion, or for the timeout (`None`: for ever; zero:
    /// does not wait). One system call, unless more was queued than the submission queue holds. Signals and timeouts
    /// are no errors: there may be nothing to take afterwards.
    ///
    /// # Errors
    /// The system's, when the ring cannot be used any more.
    pub fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.turns += 1;
        while self.refill() {
            self.enter(Some(Duration::ZERO))?;
            if self.uring.submission().is_full() {
                // The kernel takes nothing before completions are taken.
                return Ok(());
            }
        }
        self.enter(timeout)
    }

    /// The next completion that a turn has brought.
    #[expect(
        clippy::should_implement_trait,
        reason = "a ring is no iterator: it is used between two completions"
    )]
    pub fn next(&mut self) -> Option<Completion> {
        loop {
            let entry = self.uring.completion().next()?;
            if let Some(completion) = self.finish(&entry) {
                return Some(completion);
            }
        }
    }

    /// Operations whose terminal completion has not been taken.
    pub fn in_flight(&self) -> usize {
        self.table.live()
    }

    /// Turns so far: for tests and statistics of batching.
    pub fn turns(&self) -> u64 {
        self.turns
    }

    /// One system call.
    fn enter(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let queued = self.uring.submission().len();
        let queued = u32::try_from(queued).unwrap_or(u32::MAX);
        let wait = timeout != Some(Duration::ZERO);
        let time = Timespec::from(timeout.unwrap_or_default());
        let mut args = SubmitArgs::new();
        if wait && timeout.is_some() {
            args = args.timespec(&time);
        }
        let flags = (EnterFlags::GETEVENTS | EnterFlags::EXT_ARG).bits();
        // SAFETY: `queued` entries are in the submission queue, each pushed by `push` with memory that the table
        // keeps; `args` and the time it points to live until the call returns.
        let result = unsafe { self.uring.submitter().enter(queued, u32::from(wait), flags, Some(&args)) };
        match result {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                // The timeout; a signal; no place for completions until those that are there are taken: entries stay queued.
                Some(libc::ETIME | libc::EINTR | libc::EBUSY) => Ok(()),
                // No memory just now. A thread in real time that asked again and again would keep from the processor who frees some.
                Some(libc::EAGAIN) => {
                    std::thread::sleep(NO_MEMORY_NAP);
                    Ok(())
                }
                _ => Err(e),
            },
        }
    }

    /// Moves the backlog into the submission queue; true if some of it has found no place.
    fn refill(&mut self) -> bool {
        let mut queue = self.uring.submission();
        while let Some(entry) = self.backlog.front() {
            // SAFETY: as in `push`.
            if unsafe { queue.push(entry) }.is_err() {
                return true;
            }
            self.backlog.pop_front();
        }
        false
    }

    /// Queues an entry, behind all earlier ones.
    fn push(&mut self, entry: squeue::Entry) {
        if !self.backlog.is_empty() || self.uring.submission().is_full() {
            self.backlog.push_back(entry);
            // Errors come again with the next turn, which can tell them.
            let _ = self.enter(Some(Duration::ZERO));
            self.refill();
            return;
        }
        // SAFETY: every pointer in the entry is to arguments in the table, to memory held there by the operation's
        // `Hold`, or to a Tx's or Rx's shared part held likewise; the table lets go of them only at the terminal
        // completion of this very operation, or leaks them. The same for the descriptor.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        debug_assert!(pushed.is_ok());
    }

    /// Turns what the kernel says into what the caller gets; `None` if it is of no interest.
    fn finish(&mut self, entry: &cqueue::Entry) -> Option<Completion> {
        let user_data = entry.user_data();
        if user_data == UNNOTICED {
            return None;
        }
        let raw = entry.result();
        let op = self.table.get(user_data)?;
        let (token, cancelled) = (op.token, op.cancelled);
        if let Hold::Bell(bell, failures) = &mut op.hold
            && !cancelled
        {
            let heard = raw >= 0;
            *failures = if heard { 0 } else { *failures + 1 };
            if heard {
                bell.heard();
            }
            if *failures < BELL_FAILURES {
                let fd = bell.raw();
                self.push_bell_read(user_data, fd);
                let rung = Completion { token, result: Ok(0), more: true, payload: None, accepted: None };
                return heard.then_some(rung);
            }
        }
        let result = u32::try_from(raw).map_err(|_| io::Error::from_raw_os_error(-raw));
        if cqueue::more(entry.flags()) {
            return Some(Completion { token, result, more: true, payload: None, accepted: None });
        }
        let (_fd, hold) = self.table.give_back(user_data);
        if let Hold::Receive(rx) = &hold {
            rx.more_to_come(cqueue::sock_nonempty(entry.flags()));
        }
        Some(complete(token, result, hold))
    }
}

/// What a terminal completion means for what the operation held.
fn complete(token: Token, result: io::Result<u32>, hold: Hold) -> Completion {
    let done = *result.as_ref().unwrap_or(&0);
    let mut completion = Completion { token, result, more: false, payload: None, accepted: None };
    match hold {
        Hold::Nothing | Hold::Keep(_) => {}
        Hold::Bell(..) => completion.result = completion.result.map(|_| 0),
        Hold::Timer => {
            if completion.result.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::ETIME)) {
                completion.result = Ok(0);
            }
        }
        Hold::GiveBack(payload) => completion.payload = Some(payload),
        Hold::Receive(rx) => rx.complete(done as usize),
        Hold::Send(tx) => tx.complete(done as usize),
        Hold::Accept => {
            if let Ok(number) = completion.result {
                let number = i32::try_from(number).unwrap_or(-1);
                // SAFETY: a successful accept made this descriptor for us, and nobody else has seen its number.
                completion.accepted = Some(Fd::new(unsafe { OwnedFd::from_raw_fd(number) }));
                completion.result = Ok(0);
            }
        }
    }
    completion
}

/// The best ring that this kernel makes: task work run by our own waiting (Linux 6.1), or without interrupts
/// (5.19), or plain; and whether it is one of the first two.
fn build(entries: u32) -> io::Result<(IoUring, bool)> {
    let attempts: [fn(&mut io_uring::Builder); 3] = [
        |b| {
            b.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
        },
        |b| {
            b.setup_coop_taskrun().setup_submit_all();
        },
        |_| {},
    ];
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for (i, attempt) in attempts.iter().enumerate() {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(entries.next_power_of_two() * 4);
        attempt(&mut builder);
        match builder.build(entries) {
            Ok(uring) => return Ok((uring, i < 2)),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.table.live() == 0 {
            return;
        }
        self.cancel_matching(None);
        let deadline = Instant::now() + DROP_PATIENCE;
        while self.table.live() > 0 && Instant::now() < deadline {
            if self.turn(Some(Duration::from_millis(50))).is_err() {
                break;
            }
            while self.next().is_some() {}
        }
        if self.table.live() > 0 {
            // The kernel may still write: nobody may ever get this memory again.
            std::mem::forget(std::mem::replace(&mut self.table, Table::new()));
        }
    }
}

impl Ring {
    fn cancel_matching(&mut self, target: Option<Token>) {
        let mut found = Vec::new();
        for (user_data, op) in self.table.find(target) {
            op.cancelled = true;
            found.push(user_data);
        }
        for user_data in found {
            self.push(opcode::AsyncCancel::new(user_data).build().user_data(UNNOTICED));
        }
    }
}
