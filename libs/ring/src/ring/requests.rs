//! The operations a ring knows. Each is queued here and submitted by the next turn.

use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Duration;

use io_uring::types::{self, FsyncFlags};
use io_uring::{opcode, squeue};

use crate::op::{Args, HEAD, Hold};
use crate::payload::IOVECS;
use crate::{Bell, Fd, Payload, Ring, Rx, Token, Tx};

/// Offset that means the descriptor's own position: for devices and sockets, which have none.
const NO_OFFSET: u64 = u64::MAX;

/// `IORING_RECVSEND_POLL_FIRST` (include/uapi/linux/io_uring.h).
const RECVSEND_POLL_FIRST: u16 = 1;

/// What [`Ring::fallocate`] does to the range (fallocate(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Falloc {
    /// Takes space for it; the file grows if it ends behind its end.
    Allocate,
    /// Takes space for it; the file keeps its size.
    AllocateKeepSize,
    /// Gives its space back: the range reads as zero. The file keeps its size.
    PunchHole,
    /// Makes it read as zero, in unwritten extents where the file system has them. The file keeps its size.
    ZeroRange,
}

impl Falloc {
    /// The mode bits of fallocate(2).
    pub const fn mode(self) -> i32 {
        match self {
            Self::Allocate => 0,
            Self::AllocateKeepSize => libc::FALLOC_FL_KEEP_SIZE,
            Self::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            Self::ZeroRange => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
        }
    }
}

impl Ring {
    /// Receives from a socket into the free space of `rx`: room for `want` bytes at least, one byte may come. When its
    /// completion is taken, the bytes are available. False, and nothing queued, if a receive is in flight on `rx` or
    /// the pool has no memory now.
    #[must_use]
    pub fn recv(&mut self, token: Token, fd: &Fd, rx: &mut Rx, want: u32) -> bool {
        // A socket that the last receive left empty is empty still, most likely: the kernel waits for it at once.
        let wait_first = self.poll_first && !rx.0.expects_more();
        let priority = if wait_first { RECVSEND_POLL_FIRST } else { 0 };
        self.fill(token, fd, rx, want, |fd, args, count| {
            if count == 1 {
                let iovec = args.iovecs[0];
                let len = u32::try_from(iovec.iov_len).unwrap_or(u32::MAX);
                return opcode::Recv::new(fd, iovec.iov_base.cast(), len).ioprio(priority).build();
            }
            args.message.msg_iov = args.iovecs.as_mut_ptr();
            args.message.msg_iovlen = count;
            opcode::RecvMsg::new(fd, &raw mut args.message).ioprio(priority).build()
        })
    }

    /// The same from a device such as /dev/fuse, one message per read. The descriptor is non-blocking; the read waits in
    /// the kernel all the same, without a thread, until there is a message. [`Rx::read_now`] does not wait.
    #[must_use]
    pub fn read_rx(&mut self, token: Token, fd: &Fd, rx: &mut Rx, want: u32) -> bool {
        self.fill(token, fd, rx, want, |fd, args, count| {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            opcode::Readv::new(fd, args.iovecs.as_ptr(), count).offset(NO_OFFSET).build()
        })
    }

    fn fill(
        &mut self,
        token: Token,
        fd: &Fd,
        rx: &mut Rx,
        want: u32,
        entry: impl FnOnce(types::Fd, &mut Args, usize) -> squeue::Entry,
    ) -> bool {
        let (user_data, args) = self.table.take(token, Some(fd.clone()));
        // SAFETY: the arguments of an entry just taken: the kernel does not know them yet, and nobody else has them.
        let args = unsafe { &mut *args };
        let Some(count) = rx.0.start(want, &mut args.iovecs) else {
            self.table.give_back(user_data);
            return false;
        };
        let entry = entry(types::Fd(fd.raw()), args, count);
        self.submit(user_data, Hold::Receive(Rc::clone(&rx.0)), entry);
        true
    }

    /// Sends what `tx` has queued, as much as fits one call; its completion takes the bytes sent out of the queue.
    /// A peer that is gone is `EPIPE`, no signal. False, and nothing queued, if there is nothing to send or a send is
    /// in flight on `tx`.
    pub fn send(&mut self, token: Token, fd: &Fd, tx: &mut Tx) -> bool {
        let Some((send, count)) = tx.0.start() else { return false };
        // The kernel goes on by itself after a partial send: one completion instead of several.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        // SAFETY: `start` gave these arguments to this send alone; the kernel does not know them yet.
        let send = unsafe { &mut *send };
        let entry = if count == 1 {
            let iovec = send.iovecs[0];
            let len = u32::try_from(iovec.iov_len).unwrap_or(u32::MAX);
            opcode::Send::new(types::Fd(fd.raw()), iovec.iov_base.cast(), len).flags(flags).build()
        } else {
            send.message.msg_iov = send.iovecs.as_mut_ptr();
            send.message.msg_iovlen = count;
            let flags = flags.cast_unsigned();
            opcode::SendMsg::new(types::Fd(fd.raw()), &raw const send.message).flags(flags).build()
        };
        let (user_data, _) = self.table.take(token, Some(fd.clone()));
        self.submit(user_data, Hold::Send(Rc::clone(&tx.0)), entry);
        true
    }

    /// Reads from a file into `into`, as many bytes as it has; fewer are read only at the end of the file. The
    /// completion gives the payload back.
    ///
    /// # Panics
    /// If the payload is shared: the kernel writes only what nobody else can see.
    pub fn readv(&mut self, token: Token, fd: &Fd, offset: u64, into: Payload) {
        assert!(into.is_exclusive() || into.is_empty(), "reading into shared bytes");
        let (user_data, args) = self.table.take(token, Some(fd.clone()));
        // SAFETY: as in `fill`.
        let args = unsafe { &mut *args };
        let count = point(&mut args.iovecs, 0, &into);
        let fd = types::Fd(fd.raw());
        let entry = if count == 1 {
            let iovec = args.iovecs[0];
            opcode::Read::new(fd, iovec.iov_base.cast(), length(iovec)).offset(offset).build()
        } else {
            opcode::Readv::new(fd, args.iovecs.as_ptr(), count).offset(offset).build()
        };
        self.submit(user_data, Hold::GiveBack(into), entry);
    }

    /// Writes the payload to a file.
    pub fn writev(&mut self, token: Token, fd: &Fd, offset: u64, from: &Payload) {
        self.write(token, fd, offset, &[], from);
    }

    /// Writes a head and a payload in one call to a device such as /dev/fuse. The head is copied.
    ///
    /// # Panics
    /// If the head is longer than 64 bytes.
    pub fn writev_head(&mut self, token: Token, fd: &Fd, head: &[u8], payload: &Payload) {
        self.write(token, fd, NO_OFFSET, head, payload);
    }

    fn write(&mut self, token: Token, fd: &Fd, offset: u64, head: &[u8], payload: &Payload) {
        assert!(head.len() <= HEAD, "head of {} bytes", head.len());
        let (user_data, args) = self.table.take(token, Some(fd.clone()));
        // SAFETY: as in `fill`.
        let args = unsafe { &mut *args };
        let mut from = 0;
        if !head.is_empty() {
            args.head[..head.len()].copy_from_slice(head);
            args.iovecs[0] = libc::iovec { iov_base: (&raw mut args.head).cast(), iov_len: head.len() };
            from = 1;
        }
        let count = point(&mut args.iovecs, from, payload);
        let fd = types::Fd(fd.raw());
        let entry = if count == 1 {
            let iovec = args.iovecs[0];
            opcode::Write::new(fd, iovec.iov_base.cast(), length(iovec)).offset(offset).build()
        } else {
            opcode::Writev::new(fd, args.iovecs.as_ptr(), count).offset(offset).build()
        };
        self.submit(user_data, Hold::Keep(payload.clone()), entry);
    }

    /// Makes the file's data, and what is needed to find it, durable.
    pub fn fdatasync(&mut self, token: Token, fd: &Fd) {
        let entry = opcode::Fsync::new(types::Fd(fd.raw())).flags(FsyncFlags::DATASYNC).build();
        self.plain(token, fd, entry);
    }

    /// Allocates, zeroes or punches a range of a file.
    pub fn fallocate(&mut self, token: Token, fd: &Fd, mode: Falloc, offset: u64, len: u64) {
        let entry = opcode::Fallocate::new(types::Fd(fd.raw()), len).offset(offset).mode(mode.mode()).build();
        self.plain(token, fd, entry);
    }

    /// Takes one connection from a listening socket; the completion carries it, closed on exec.
    pub fn accept(&mut self, token: Token, fd: &Fd) {
        let nobody = std::ptr::null_mut();
        let entry = opcode::Accept::new(types::Fd(fd.raw()), nobody, std::ptr::null_mut())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        self.queue(token, Some(fd.clone()), Hold::Accept, entry);
    }

    /// Completes once when the descriptor is readable, or has failed.
    pub fn poll_in(&mut self, token: Token, fd: &Fd) {
        let events = u32::from(libc::POLLIN.cast_unsigned());
        let entry = opcode::PollAdd::new(types::Fd(fd.raw()), events).build();
        self.plain(token, fd, entry);
    }

    /// Completes once `after` has passed.
    pub fn timeout(&mut self, token: Token, after: Duration) {
        let (user_data, args) = self.table.take(token, None);
        // SAFETY: as in `fill`.
        let args = unsafe { &mut *args };
        args.time = after.into();
        let entry = opcode::Timeout::new(&raw const args.time).build();
        self.submit(user_data, Hold::Timer, entry);
    }

    /// Completes each time the bell has been rung (`more` is set), until it is cancelled. A bell that was rung before
    /// counts. With an error it completes only if the bell cannot be heard, however often that is tried.
    pub fn wake_on(&mut self, token: Token, bell: &Bell) {
        let (user_data, _) = self.table.take(token, None);
        self.table.hold(user_data, Hold::Bell(bell.clone(), 0));
        self.push_bell_read(user_data, bell.raw());
    }

    /// Queues the read of a bell's counter under the entry that holds the bell.
    pub(super) fn push_bell_read(&mut self, user_data: u64, bell: RawFd) {
        let args = self.table.args(user_data);
        // SAFETY: takes an address within the arguments, which the table keeps; nobody reads the counter.
        let count = unsafe { (&raw mut (*args).count).cast() };
        let entry = opcode::Read::new(types::Fd(bell), count, 8).offset(NO_OFFSET).build();
        self.push(entry.user_data(user_data));
    }

    /// Asks for an early end of every operation with this token. Each still completes: with `ECANCELED`, or with what
    /// it had come to; what a disk is doing already is not taken back.
    pub fn cancel(&mut self, target: Token) {
        self.cancel_matching(Some(target));
    }

    /// Ends both directions of a connection: its receives end with 0 bytes, its sends with `EPIPE`.
    pub fn shutdown(&mut self, token: Token, fd: &Fd) {
        let entry = opcode::Shutdown::new(types::Fd(fd.raw()), libc::SHUT_RDWR).build();
        self.plain(token, fd, entry);
    }

    /// Queues a driver's own command with 16 bytes of argument (`IORING_OP_URING_CMD`), as ublk uses. `keep` is held
    /// until the command completes, and given back.
    ///
    /// # Safety
    /// Every address that the driver takes from `command` or `addr` is valid for what the driver does with it until the
    /// command has completed; memory of `keep` is, if `keep` is exclusive.
    pub unsafe fn command(
        &mut self,
        token: Token,
        fd: &Fd,
        op: u32,
        command: [u8; 16],
        addr: u64,
        keep: Payload,
    ) {
        let entry = opcode::UringCmd16::new(types::Fd(fd.raw()), op).cmd(command).addr(Some(addr)).build();
        self.queue(token, Some(fd.clone()), Hold::GiveBack(keep), entry);
    }

    fn plain(&mut self, token: Token, fd: &Fd, entry: squeue::Entry) {
        self.queue(token, Some(fd.clone()), Hold::Nothing, entry);
    }

    fn queue(&mut self, token: Token, fd: Option<Fd>, hold: Hold, entry: squeue::Entry) {
        let (user_data, _) = self.table.take(token, fd);
        self.submit(user_data, hold, entry);
    }

    /// Queues an entry whose arguments are in place, with what it needs alive.
    fn submit(&mut self, user_data: u64, hold: Hold, entry: squeue::Entry) {
        self.table.hold(user_data, hold);
        self.push(entry.user_data(user_data));
    }
}

fn length(iovec: libc::iovec) -> u32 {
    u32::try_from(iovec.iov_len).unwrap_or(u32::MAX)
}

/// Describes the payload's memory from `iovecs[from]` on: how many iovecs there are then.
fn point(iovecs: &mut [libc::iovec; IOVECS], from: usize, payload: &Payload) -> u32 {
    let mut count = from;
    if let Some(pool) = payload.pool() {
        for seg in payload.segs() {
            iovecs[count] =
                libc::iovec { iov_base: pool.ptr(seg.at as usize).cast(), iov_len: seg.len as usize };
            count += 1;
        }
    }
    u32::try_from(count).unwrap_or(0)
}
