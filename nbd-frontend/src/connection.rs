//! One connection in the transmission phase.
//!
//! - Requests are taken from the stream one after the other, while the device has room, the budget has memory and the
//!   client takes its answers. Otherwise nothing is read, and the client feels it.
//! - A write is submitted only if its client was still there after the bytes had come: clients that give up on a
//!   connection send the write again on another one, and the old copy must not come after what they write next
//!   (`docs/invariants.md`, 3). While a volume has had no other connection, nothing can have been sent again. Where the client
//!   has shut its side behind `NBD_CMD_DISC` it meant them. Where that is not to be seen its writes are held until the stream ends, and
//!   dropped without it.
//! - A submitted request runs to its end, unless the device has not begun it when the client is gone: it is abandoned then. Without
//!   its client, its answer is dropped.

mod goodbye;
mod long;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use lh_block::{Device, Done, Extent, Geometry, Op, Request};
use lh_ring::{Census, Counted, Fd, Payload, Pool, Rx, Tx};

use crate::budget::{Budget, Claimant};
use crate::proto::error;
use crate::requests::{InFlight, Part, Requests};
use crate::transmit::{Broken, Call, Decision, FILTER_MAX, REQUEST_MAX, Refusal, STOPPING, Session};

use long::{LongRead, LongWrite};

/// Requests taken from one connection before the next one has its turn.
const QUANTUM: usize = 16;

/// Bytes of answers without data (errors, block status) that may wait for a client to take them. Data is bounded by
/// the budget.
const ANSWERS_MAX: usize = 64 << 10;

/// Bytes asked for at once where a payload is only dropped.
const DROP_PIECE: u64 = 64 << 10;

/// Bytes after which it counts that a client takes its answers, however slowly; and after which a send ends, for that to be seen.
const SEND_MAX: usize = 1 << 20;

/// Requests that may be held for a client that has shut its side: more than any client keeps in flight at its end.
const HELD_MAX: usize = 256;

/// Longest read or write whatever the device says. A payload holds a little more.
const TRANSFER_MAX: u32 = 1 << 20;

const _: () = assert!(TRANSFER_MAX as usize <= Payload::MAX);

/// What is needed to serve a connection, borrowed from the server for a while.
pub(crate) struct Work<'a> {
    pub(crate) device: &'a mut dyn Device<Payload>,
    pub(crate) requests: &'a mut Requests,
    pub(crate) budget: &'a mut Budget,
    /// Bytes of the budget that one connection may have.
    pub(crate) share: usize,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Why {
    #[error("done")]
    Done,
    #[error("the client left without NBD_CMD_DISC")]
    Left,
    #[error(transparent)]
    Broken(#[from] Broken),
    #[error("the client shut its side and left more than is held for it")]
    TooMuchHeld,
    #[error("a read failed after its reply had begun")]
    CutOff,
    #[error("another connection has come in its place, or the volume is shown to nobody")]
    Replaced,
    #[error("no answer taken, or no byte of a request sent, for too long")]
    Stalled,
    #[error("its handshake was given up for a newer connection")]
    GivenUp,
    #[error("{0}")]
    Socket(nix::errno::Errno),
}

/// A receive or a send has failed.
impl From<&io::Error> for Why {
    fn from(e: &io::Error) -> Self {
        Self::Socket(nix::errno::Errno::from_raw(e.raw_os_error().unwrap_or(0)))
    }
}

/// What a connection waits for after it has been served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// Nothing: there may be more to do after the others have had their turn.
    More,
    /// Room in the device, memory, or a client that takes its answers.
    Blocked,
    /// So many bytes more from the client.
    Bytes(u32),
    /// To know whether its client is still there ([`Connection::seen`]).
    Look,
    /// It is over.
    Close(Why),
}

/// What the next bytes of the stream are.
#[derive(Debug)]
enum Expect {
    Header,
    /// The bytes of a write, or of a piece of a long one, counted in the budget.
    Data {
        call: Call,
        op: Op,
        range: Extent,
        /// Of a piece: what of the write follows it.
        rest: Option<Extent>,
        /// The client has been listened to for them.
        asked: bool,
    },
    /// The next piece of a long write, for which there is no memory yet.
    Piece {
        call: Call,
        op: Op,
        rest: Extent,
    },
    /// The contexts of a block status request.
    Filter {
        call: Call,
    },
    /// `left` bytes of a payload nobody wants; then the answer.
    Drop {
        call: Call,
        answer: Result<(), Refusal>,
        left: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// Every request is refused: the server is being stopped.
    Refusing,
    /// The client has shut its side: writes are held until the stream ends.
    Shut,
    /// Nothing is read any more; what is in flight is answered.
    Finishing,
}

/// A write of a client that has shut its side.
#[derive(Debug)]
struct Held {
    call: Call,
    op: Op,
    range: Extent,
    data: Option<Payload>,
    part: Part,
}

/// One client in the transmission phase.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) fd: Fd,
    pub(crate) rx: Rx,
    pub(crate) tx: Tx,
    session: Session,
    claimant: Claimant,
    expect: Expect,
    phase: Phase,
    in_flight: u32,
    held: VecDeque<Held>,
    long_write: Option<LongWrite>,
    long_read: Option<LongRead>,
    /// The rest of a reply that has begun cannot be sent.
    is_cut_off: bool,
    /// Bytes of the budget for data being received or held.
    kept: usize,
    /// Bytes of the budget for read data that waits to be sent.
    owed: usize,
    /// All bytes of the budget, those of requests in flight included.
    total: usize,
    /// The peer was looked at in this turn, or need not be.
    looked: bool,
    counted: Counted,
    /// `NBD_CMD_DISC` has come, read or not.
    has_said_goodbye: bool,
    /// Nobody takes answers any more: none is kept.
    is_unheard: bool,
    /// What the last serving has come to.
    pub(crate) wants: Served,
    /// The server's tick from which on the client has to send more: of the last byte received, but for a write's, which have memory,
    /// of the first time that it was listened to for them.
    pub(crate) received_at: u32,
    /// While answers wait for the client to take them: since when it has not taken a MiB, and how much of that it has.
    untaken: Option<(u32, usize)>,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Connection {
    pub(crate) fn new(
        (fd, counted): (Fd, Counted),
        session: Session,
        claimant: Claimant,
        pool: &Pool,
    ) -> Self {
        Self {
            fd,
            // Payloads go out through sockets again: their place in memory does not matter.
            rx: Rx::new(pool, 1),
            tx: Tx::in_parts(pool, SEND_MAX),
            session,
            claimant,
            expect: Expect::Header,
            phase: Phase::Open,
            in_flight: 0,
            held: VecDeque::new(),
            long_write: None,
            long_read: None,
            is_cut_off: false,
            kept: 0,
            owed: 0,
            total: 0,
            looked: false,
            counted,
            has_said_goodbye: false,
            is_unheard: false,
            wants: Served::More,
            received_at: 0,
            untaken: None,
        }
    }

    /// A new turn of the loop begins: what was seen of the client is old.
    pub(crate) const fn begin_turn(&mut self, census: Census) {
        self.looked = self.counted.is_alone(census);
    }

    /// True if its client may have sent again elsewhere what the device has of it.
    pub(crate) const fn may_have_left(&self, census: Census) -> bool {
        let means_it = self.is_finishing() || self.has_said_goodbye;
        self.has_in_flight() && !means_it && !self.counted.is_alone(census)
    }

    fn must_look(&self) -> bool {
        self.phase == Phase::Open && !self.looked
    }

    /// What was seen of the client in this turn, after that count.
    pub(crate) fn seen(&mut self, has_shut: bool, census: Census) {
        self.looked = true;
        if !has_shut {
            self.counted.seen(census);
        } else if self.phase == Phase::Open && !self.says_goodbye() {
            self.phase = Phase::Shut;
        }
    }

    /// True in the middle of a request, of which more bytes have to come. Where nothing is read any more nothing has to.
    pub(crate) fn is_mid_request(&self) -> bool {
        let is_begun = !matches!(self.expect, Expect::Header) || self.rx.available() > 0;
        is_begun && !self.is_finishing()
    }

    /// True while memory for what comes next is counted already.
    pub(crate) fn has_memory(&self) -> bool {
        matches!(self.expect, Expect::Data { .. })
    }

    /// From now on the client is listened to.
    pub(crate) fn listened(&mut self, now: u32) {
        if let Expect::Data { asked, .. } = &mut self.expect
            && std::mem::replace(asked, true)
        {
            return;
        }
        self.received_at = now;
    }

    /// Bytes have come.
    pub(crate) fn received(&mut self, now: u32) {
        if !self.has_memory() {
            self.received_at = now;
        }
    }

    /// Takes up to [`QUANTUM`] requests from the stream.
    pub(crate) fn serve(&mut self, work: &mut Work<'_>) -> Served {
        for _ in 0..QUANTUM {
            match self.step(work) {
                Ok(None) => {}
                Ok(Some(wait)) => return wait,
                Err(why) => return Served::Close(why),
            }
        }
        Served::More
    }

    /// One step through the stream; what has to be waited for if it cannot be made.
    fn step(&mut self, work: &mut Work<'_>) -> Result<Option<Served>, Why> {
        if self.is_cut_off {
            return Err(Why::CutOff);
        }
        if self.phase == Phase::Finishing {
            return Ok(Some(self.finish_held(work)));
        }
        if self.tx.queued_bytes() > self.owed + ANSWERS_MAX {
            // Memory that comes free is not kept for who does not take it.
            work.budget.forget(self.claimant);
            return Ok(Some(Served::Blocked));
        }
        if work.device.room() == 0 {
            return Ok(Some(Served::Blocked));
        }
        match std::mem::replace(&mut self.expect, Expect::Header) {
            Expect::Header => match self.long_read {
                Some(read) => self.read_on(work, read),
                None => self.header(work),
            },
            Expect::Data { call, op, range, rest, asked } => {
                let missing = self.missing(range.len);
                if missing > 0 || self.must_look() {
                    self.expect = Expect::Data { call, op, range, rest, asked };
                    return Ok(Some(if missing > 0 { Served::Bytes(missing) } else { Served::Look }));
                }
                let data = self.rx.take(as_len(range.len));
                self.kept -= data.len();
                let part = self.piece_has_come(call, op, rest);
                self.write(work, Held { call, op, range, data: Some(data), part })
            }
            Expect::Piece { call, op, rest } => self.next_piece(work, call, op, rest),
            Expect::Filter { call } => {
                let missing = self.missing(call.payload);
                if missing > 0 {
                    self.expect = Expect::Filter { call };
                    return Ok(Some(Served::Bytes(missing)));
                }
                let mut payload = [0; FILTER_MAX];
                let payload = &mut payload[..as_len(call.payload)];
                self.rx.peek_at(0, payload);
                self.rx.skip(payload.len());
                let (decision, call) = self.session.filter(&call, payload, &served_geometry(work.device));
                self.act(work, call, decision)
            }
            Expect::Drop { call, answer, left } => Ok(self.drop_payload(call, answer, left)),
        }
    }

    /// Bytes that are missing until `len` are there.
    fn missing(&self, len: u64) -> u32 {
        u32::try_from(len.saturating_sub(self.rx.available() as u64)).unwrap_or(u32::MAX)
    }

    fn header(&mut self, work: &mut Work<'_>) -> Result<Option<Served>, Why> {
        let len = self.session.request_len();
        let mut bytes = [0; REQUEST_MAX];
        if !self.rx.peek_at(0, &mut bytes[..len]) {
            return Ok(Some(Served::Bytes(self.missing(len as u64))));
        }
        let call = self.session.decode(&bytes[..len])?;
        let mut decision = self.session.decide(&call, &served_geometry(work.device));
        if self.phase == Phase::Refusing && decision != Decision::Disconnect {
            decision = Decision::Answer(Err(STOPPING));
        }
        if matches!(decision, Decision::Device { op, .. } if op.is_write()) && self.must_look() {
            return Ok(Some(Served::Look));
        }
        if let Decision::Device { op: op @ (Op::Read | Op::Write { .. }), range } = decision {
            if range.len > u64::from(served_geometry(work.device).max_transfer) {
                return self.begin_long(call, op, range, len);
            }
            let bytes = as_len(range.len);
            if let Some(wait) = self.admit(work, bytes)? {
                return Ok(Some(wait));
            }
            self.kept += bytes;
            self.total += bytes;
        }
        self.rx.skip(len);
        self.act(work, call, decision)
    }

    /// Takes memory for a request's data from the budget.
    fn admit(&self, work: &mut Work<'_>, bytes: usize) -> Result<Option<Served>, Why> {
        let too_much = self.total > 0 && self.total + bytes > work.share;
        if !too_much && work.budget.take(self.claimant, bytes) {
            return Ok(None);
        }
        // Connections that hold memory until their stream ends must not wait for each other.
        if self.phase == Phase::Shut && self.kept > 0 {
            Err(Why::TooMuchHeld)
        } else {
            Ok(Some(Served::Blocked))
        }
    }

    /// Does what was decided about a request whose header has been taken from the stream.
    fn act(&mut self, work: &mut Work<'_>, call: Call, decision: Decision) -> Result<Option<Served>, Why> {
        match decision {
            Decision::Device { op: op @ Op::Write { .. }, range } => {
                self.expect = Expect::Data { call, op, range, rest: None, asked: false };
            }
            Decision::Device { op, range } if op.is_write() => {
                return self.write(work, Held { call, op, range, data: None, part: Part::Whole });
            }
            Decision::Device { op, range } => {
                let bytes = if op == Op::Read { as_len(range.len) } else { 0 };
                self.kept -= bytes;
                self.submit(work, Held { call, op, range, data: None, part: Part::Whole }, bytes);
            }
            Decision::Status(range) => {
                let part = Part::Status(range);
                self.submit(work, Held { call, op: Op::Allocation, range, data: None, part }, 0);
            }
            Decision::Filter => self.expect = Expect::Filter { call },
            Decision::Answer(answer) => {
                self.expect = Expect::Drop { call, answer, left: call.payload };
            }
            Decision::Disconnect => {
                self.has_said_goodbye = true;
                self.phase = Phase::Finishing;
            }
        }
        Ok(None)
    }

    fn drop_payload(&mut self, call: Call, answer: Result<(), Refusal>, left: u64) -> Option<Served> {
        let now = left.min(self.rx.available() as u64);
        self.rx.skip(as_len(now));
        let left = left - now;
        if left > 0 {
            self.expect = Expect::Drop { call, answer, left };
            let want = u32::try_from(left.min(DROP_PIECE)).unwrap_or(u32::MAX);
            return Some(Served::Bytes(want));
        }
        self.answer(&call, answer);
        None
    }

    fn answer(&mut self, call: &Call, answer: Result<(), Refusal>) {
        let head = match answer {
            Ok(()) => self.session.done(call),
            Err(refusal) => self.session.error(call, &refusal),
        };
        self.say(head.as_bytes());
    }

    /// Submits what changes data, unless its client is gone.
    fn write(&mut self, work: &mut Work<'_>, write: Held) -> Result<Option<Served>, Why> {
        let bytes = write.data.as_ref().map_or(0, Payload::len);
        if self.phase == Phase::Shut {
            if self.held.len() >= HELD_MAX {
                self.kept += bytes;
                return Err(Why::TooMuchHeld);
            }
            self.kept += bytes;
            self.held.push_back(write);
        } else {
            self.submit(work, write, bytes);
        }
        Ok(None)
    }

    fn submit(&mut self, work: &mut Work<'_>, request: Held, bytes: usize) {
        let Held { call, op, range, data, part } = request;
        let write = op.is_write();
        let tag = work.requests.insert(InFlight { owner: self.claimant, call, part, write, bytes });
        self.in_flight += 1;
        work.device.submit(Request { tag, op, range, data });
    }

    /// After the last request: submits what was held, and ends when everything has been answered.
    fn finish_held(&mut self, work: &mut Work<'_>) -> Served {
        while work.device.room() > 0
            && let Some(write) = self.held.pop_front()
        {
            let bytes = write.data.as_ref().map_or(0, Payload::len);
            self.kept -= bytes;
            self.submit(work, write, bytes);
        }
        let over = self.held.is_empty() && self.in_flight == 0 && self.tx.is_empty();
        if over { Served::Close(Why::Done) } else { Served::Blocked }
    }

    /// A request of this connection has been answered by the device.
    pub(crate) fn finish(&mut self, request: &InFlight, done: Done<Payload>, budget: &mut Budget) {
        self.in_flight -= 1;
        if let (Part::Status(range), Ok(())) = (request.part, done.result) {
            let told = done.data.map_or_else(Vec::new, |told| told.to_vec());
            let mut reply = Vec::new();
            self.session.status(&request.call, range, &told, &mut reply);
            return self.say(&reply);
        }
        let reads = matches!(request.part, Part::OfRead(_)) || (request.bytes > 0 && !request.write);
        let answer = match (done.result, done.data) {
            (Err(reason), _) => Err(Refusal::of_device(reason, request.write)),
            _ if self.is_unheard => Ok(()),
            (Ok(()), Some(data)) if reads && data.len() == request.bytes => {
                // Not counted as done yet: the memory is taken until the client has it.
                self.owed += data.len();
                let head = self.head_of(request);
                self.tx.push_header(head.as_bytes());
                self.tx.push_payload(self.tx.packed(data));
                return;
            }
            (Ok(()), None) if !reads => Ok(()),
            // A read without its bytes: a device that breaks its promise.
            (Ok(()), _) => Err(Refusal { error: error::EIO, text: "the device returned no data", at: None }),
        };
        self.total -= request.bytes;
        budget.give_back(request.bytes);
        match request.part {
            Part::Whole | Part::Status(_) => self.answer(&request.call, answer),
            Part::OfWrite => self.piece_is_written(answer),
            Part::OfRead(piece) => self.piece_is_unread(&request.call, piece, answer),
        }
    }

    /// The device has requests of this client.
    pub(crate) const fn has_in_flight(&self) -> bool {
        self.in_flight > 0
    }

    /// A send has ended: what has left the queue is no longer counted.
    pub(crate) fn sent(&mut self, budget: &mut Budget) {
        let queued = self.tx.queued_bytes();
        if queued < self.owed {
            budget.give_back(self.owed - queued);
            self.total -= self.owed - queued;
            self.owed = queued;
        }
    }

    /// Answers are on their way to the client.
    pub(crate) fn sends(&mut self, now: u32) {
        self.untaken.get_or_insert((now, 0));
    }

    /// The client has taken so many bytes: all, or some of what waits. A send may cover few, where the answers are short.
    pub(crate) fn taken(&mut self, bytes: usize, now: u32) {
        self.untaken = match self.untaken {
            _ if self.tx.is_empty() => None,
            Some((since, taken)) if taken + bytes < SEND_MAX => Some((since, taken + bytes)),
            _ => Some((now, 0)),
        };
    }

    /// Since when the client has answers to take and has not taken a MiB of them.
    pub(crate) fn untaken_since(&self) -> Option<u32> {
        self.untaken.map(|(since, _)| since)
    }

    /// True after `NBD_CMD_DISC`, or when the server wants no more: the end of the stream is expected.
    pub(crate) const fn is_finishing(&self) -> bool {
        matches!(self.phase, Phase::Finishing)
    }

    /// The server is being stopped: requests already submitted are answered, others refused or left to be sent
    /// again elsewhere.
    pub(crate) fn stop(&mut self, refuse: bool, budget: &mut Budget) {
        match self.phase {
            Phase::Finishing => {}
            // It expects nothing of the next server: what it has sent is done here.
            Phase::Open if self.has_said_goodbye => {}
            Phase::Open | Phase::Refusing if refuse => self.phase = Phase::Refusing,
            _ => self.stop_reading(budget),
        }
    }

    /// True if a stopping server need not wait for it any longer.
    pub(crate) fn is_idle(&self) -> bool {
        let has_read_all = !self.has_said_goodbye || self.is_finishing();
        self.in_flight == 0 && self.tx.is_empty() && self.held.is_empty() && has_read_all
    }

    fn stop_reading(&mut self, budget: &mut Budget) {
        self.phase = Phase::Finishing;
        self.held.clear();
        budget.give_back(self.kept);
        self.total -= self.kept;
        self.kept = 0;
        budget.forget(self.claimant);
    }

    /// Gives back what is counted for this connection alone. Requests in flight stay counted until the device is done
    /// with them.
    pub(crate) fn close(mut self, budget: &mut Budget) {
        self.stop_reading(budget);
        budget.give_back(self.owed);
    }
}

/// The device's sizes, with transfers no longer than a payload can be.
pub(crate) fn served_geometry(device: &dyn Device<Payload>) -> Geometry {
    let geometry = device.geometry();
    Geometry { max_transfer: geometry.max_transfer.min(TRANSFER_MAX), ..geometry }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a transfer, a filter or received bytes: all far below 4 GiB"
)]
const fn as_len(len: u64) -> usize {
    len as usize
}

#[cfg(test)]
mod tests;
