//! One connection in the full feature phase: PDUs out of its stream, and into it.
//!
//! - A PDU is taken as a whole, header and data; its data stays where it was received.
//! - What is sent is queued at once and leaves with the turn; an initiator that takes no answers is not read from.
//! - A digest that does not match ends the connection: at error recovery level 0 there is nothing else to do
//!   (RFC 7143, 7.3, 7.8). Of data it is told with a Reject first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use lh_ring::{Census, Counted, Fd, Payload, Pool, Rx, Tx};
use zerocopy::IntoBytes;

use crate::login::Agreed;
use crate::pdu::{
    AHS_MAX, Answer, Async, Basic, DIGEST, DataIn, FINAL, HEADER, NO_TAG, R2t, Raw, ScsiResponse,
    TextResponse, flag, length24, opcode, padding, reject, status,
};
use crate::scsi::sense::{SENSE_LEN, Sense};
use crate::session::{Broken, Session};
use crate::task::{Claimant, Task};

/// Bytes of answers without payload that may wait for an initiator to take them. Payload is bounded by the budget.
const ANSWERS_MAX: usize = 64 << 10;

/// Bytes after which it counts that an initiator takes its answers, however slowly; and after which a send ends, for that to be seen.
const SEND_MAX: usize = 1 << 20;

/// Bytes after which it counts that an initiator sends the data that it was asked for, however slowly: as with its answers.
const OWED_STEP: usize = 1 << 20;

/// The event of an Asynchronous Message that asks for a logout (RFC 7143, 11.9.1).
const EVENT_LOGOUT: u8 = 1;

/// The target transfer tag of text that goes on: any but all ones, since there is one such text at a time.
pub(crate) const TEXT_TAG: u32 = 2;

/// Whether an answer ends what was asked, or the initiator is to go on: a final answer to a request that is not is a protocol
/// error (RFC 7143, 11.11.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Text {
    Ends,
    GoesOn,
}

/// Text that has begun.
#[derive(Debug)]
pub(crate) struct Begun {
    /// The tag of its request.
    pub(crate) itt: u32,
    /// What has come of a pair that is not whole yet.
    pub(crate) rest: Vec<u8>,
    /// What holds once it has ended.
    pub(crate) agreed: Agreed,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Why {
    #[error("logged out")]
    LoggedOut,
    #[error("the initiator left without a logout")]
    Left,
    #[error(transparent)]
    Broken(#[from] Broken),
    #[error("no answer taken, or no byte of a request sent, for too long")]
    Stalled,
    #[error("no answer to a ping")]
    Silent,
    #[error("the same initiator port has logged in again")]
    Reinstated,
    #[error("its session goes on with another connection")]
    Replaced,
    #[error("the target was reset")]
    Reset,
    #[error("the target is being stopped")]
    Stopped,
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
    /// An initiator that takes its answers.
    Blocked,
    /// So many bytes more.
    Bytes(u32),
    /// It is over.
    Close(Why),
}

/// What the stream has.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A PDU and its data.
    Pdu(Raw, Payload),
    /// So many bytes are missing.
    Need(u32),
    /// Nothing more: the connection ends.
    Broken(Broken),
}

/// How a command ends.
#[derive(Debug)]
pub(crate) enum Ending<'a> {
    /// Status GOOD, with the data of a read.
    Data(Payload),
    /// Status GOOD, with what the command reports.
    Reply(&'a [u8]),
    /// Status GOOD, with nothing. So many bytes would have been transferred, had the initiator said it has them.
    Done(u32),
    /// CHECK CONDITION, with the bytes that its CDB asks for.
    Check(Sense, u32),
    /// Another status.
    Status(u8),
}

/// One initiator.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) fd: Fd,
    pub(crate) rx: Rx,
    pub(crate) tx: Tx,
    pub(crate) session: Session,
    pub(crate) agreed: Agreed,
    pub(crate) claimant: Claimant,
    /// Its initiator port, in a normal session.
    pub(crate) port: Option<u16>,
    /// Counted with all that the volume has, in a normal session.
    pub(crate) counted: Option<Counted>,
    /// Tags of its commands, by initiator task tag.
    pub(crate) tasks: Vec<(u32, u64)>,
    /// Text that goes on in the next PDU.
    pub(crate) text: Option<Begun>,
    /// Bytes of the budget for read data that waits to be sent.
    pub(crate) owed: usize,
    /// All bytes of the budget, those of its commands included.
    pub(crate) total: usize,
    /// What the last serving has come to.
    pub(crate) wants: Served,
    /// Second of the last byte received.
    pub(crate) received_at: u32,
    /// While answers wait for the initiator to take them: since when it has not taken a MiB, and how much of that it has.
    untaken: Option<(u32, usize)>,
    /// While data that was asked for is owed: the second since which it is, or the last MiB has come; and bytes that have come
    /// since then.
    owing: Option<(u32, usize)>,
    /// Since when a ping is unanswered.
    pub(crate) pinged_at: Option<u32>,
    /// It ends as soon as everything is sent.
    pub(crate) finishing: Option<Why>,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Connection {
    pub(crate) fn new(fd: Fd, session: Session, agreed: Agreed, claimant: Claimant, pool: &Pool) -> Self {
        Self {
            fd,
            // Payloads go out through sockets again: their place in memory does not matter.
            rx: Rx::new(pool, 1),
            tx: Tx::in_parts(pool, SEND_MAX),
            session,
            agreed,
            claimant,
            port: None,
            counted: None,
            tasks: Vec::with_capacity(64),
            text: None,
            owed: 0,
            total: 0,
            wants: Served::More,
            received_at: 0,
            untaken: None,
            owing: None,
            pinged_at: None,
            finishing: None,
        }
    }

    /// True if its initiator can have sent nothing again elsewhere, by a count that was taken after its commands had come. Nor can one
    /// that has only asked what there is.
    pub(crate) fn is_alone(&self, census: Census) -> bool {
        self.counted.as_ref().is_none_or(|counted| counted.is_alone(census))
    }

    /// Its initiator was there after that count was taken.
    pub(crate) fn seen(&mut self, census: Census) {
        if let Some(counted) = &mut self.counted {
            counted.seen(census);
        }
    }

    /// Bytes have come.
    pub(crate) fn received(&mut self, now: u32) {
        self.received_at = now;
        self.pinged_at = None;
    }

    /// Answers are on their way to the initiator.
    pub(crate) fn sends(&mut self, now: u32) {
        self.untaken.get_or_insert((now, 0));
    }

    /// The initiator has taken so many bytes: all, or some of what waits. A send may cover few, where the segments are short.
    pub(crate) fn taken(&mut self, bytes: usize, now: u32) {
        self.untaken = match self.untaken {
            _ if self.tx.is_empty() => None,
            Some((since, taken)) if taken + bytes < SEND_MAX => Some((since, taken + bytes)),
            _ => Some((now, 0)),
        };
    }

    /// Since when the initiator has answers to take and has not taken a MiB of them.
    pub(crate) fn untaken_since(&self) -> Option<u32> {
        self.untaken.map(|(since, _)| since)
    }

    /// So many bytes of what the initiator owes have come. Nothing else that it sends counts: it would keep the memory for what it owes.
    pub(crate) fn paid(&mut self, bytes: usize, now: u32) {
        if let Some((since, sent)) = &mut self.owing {
            *sent += bytes;
            if *sent >= OWED_STEP {
                (*since, *sent) = (now, 0);
            }
        }
    }

    /// Since when the initiator owes data and has not sent a MiB. To be asked every second; `owes`: it owes some now, and is
    /// listened to.
    pub(crate) fn owing_since(&mut self, owes: bool, now: u32) -> Option<u32> {
        self.owing = if owes { self.owing.or(Some((now, 0))) } else { None };
        self.owing.map(|(since, _)| since)
    }

    /// True in the middle of a PDU, of which more bytes have to come.
    pub(crate) fn is_mid_pdu(&self) -> bool {
        self.rx.available() > 0
    }

    /// True if the initiator leaves too many answers untaken.
    pub(crate) fn is_full(&self) -> bool {
        self.tx.queued_bytes() > self.owed + ANSWERS_MAX
    }

    /// The next PDU of the stream.
    pub(crate) fn next_pdu(&mut self) -> Incoming {
        let missing = |rx: &Rx, len: usize| u32::try_from(len - rx.available()).unwrap_or(u32::MAX);
        let Some(raw) = self.rx.peek::<HEADER>() else { return Incoming::Need(missing(&self.rx, HEADER)) };
        let header = Basic::of(&raw);
        // First of all, so that nobody waits for bytes that will not be taken.
        if let Err(broken) = self.session.check(&header) {
            return Incoming::Broken(broken);
        }
        let before_digest = HEADER + header.ahs_len();
        let head = before_digest + if self.agreed.header_digest { DIGEST } else { 0 };
        if self.rx.available() < head {
            return Incoming::Need(missing(&self.rx, head));
        }
        if self.agreed.header_digest && !self.header_is_whole(before_digest) {
            return Incoming::Broken(Broken::Digest);
        }
        let len = header.data_len();
        let tail = padding(len) + if self.agreed.data_digest && len > 0 { DIGEST } else { 0 };
        if self.rx.available() < head + len + tail {
            return Incoming::Need(missing(&self.rx, head + len + tail));
        }
        self.rx.skip(head);
        let data = if len > 0 { self.rx.take(len) } else { Payload::default() };
        let mut rest = [0; 3 + DIGEST];
        let rest = &mut rest[..tail];
        self.rx.peek_at(0, rest);
        self.rx.skip(tail);
        if self.agreed.data_digest && len > 0 {
            let (pad, digest) = rest.split_at(padding(len));
            let sum = crc32c::crc32c_append(data.crc32c(), pad);
            if sum.to_le_bytes() != digest {
                self.reject(&raw, reject::DATA_DIGEST);
                return Incoming::Broken(Broken::Digest);
            }
        }
        Incoming::Pdu(raw, data)
    }

    fn header_is_whole(&self, len: usize) -> bool {
        let mut bytes = [0; HEADER + AHS_MAX + DIGEST];
        let bytes = &mut bytes[..len + DIGEST];
        self.rx.peek_at(0, bytes);
        let (header, digest) = bytes.split_at(len);
        // The digest goes over the wire least significant byte first (RFC 7143, 13.1).
        crc32c::crc32c(header).to_le_bytes() == digest
    }

    /// Queues a PDU without data.
    fn push_header(&mut self, header: &[u8]) {
        self.tx.push_header(header);
        if self.agreed.header_digest {
            self.tx.push_header(&crc32c::crc32c(header).to_le_bytes());
        }
    }

    /// Queues the end of a data segment whose bytes have this checksum.
    fn push_tail(&mut self, len: usize, sum: impl FnOnce() -> u32) {
        let pad = &[0; 3][..padding(len)];
        self.tx.push_header(pad);
        if self.agreed.data_digest && len > 0 {
            self.tx.push_header(&crc32c::crc32c_append(sum(), pad).to_le_bytes());
        }
    }

    /// Queues a PDU whose data is copied.
    fn push_copied(&mut self, header: &[u8], data: &[u8]) {
        self.push_header(header);
        data.chunks(Tx::HEADER_MAX).for_each(|part| self.tx.push_header(part));
        self.push_tail(data.len(), || crc32c::crc32c(data));
    }

    /// Answers a command.
    pub(crate) fn respond(&mut self, task: &Task, ending: Ending<'_>) {
        match ending {
            Ending::Data(data) => {
                let asked = data.len();
                let sent = asked.min(task.read_expected() as usize);
                self.owed += sent;
                let data = self.tx.packed(data);
                self.data_in(task, asked, sent, |connection, header, range| {
                    connection.push_header(header);
                    let part = if range.len() == asked {
                        data.clone()
                    } else {
                        data.slice(range.start, range.len())
                    };
                    let sum = connection.agreed.data_digest.then(|| part.crc32c());
                    let len = part.len();
                    connection.tx.push_payload(part);
                    connection.push_tail(len, || sum.unwrap_or(0));
                });
            }
            Ending::Reply(reply) if !reply.is_empty() => {
                let sent = reply.len().min(task.read_expected() as usize);
                self.data_in(task, reply.len(), sent, |connection, header, range| {
                    connection.push_copied(header, &reply[range]);
                });
            }
            Ending::Reply(_) => self.scsi_response(task, status::GOOD, None, 0),
            Ending::Done(asked) => self.scsi_response(task, status::GOOD, None, asked),
            Ending::Check(sense, asked) => {
                self.scsi_response(task, status::CHECK_CONDITION, Some(sense), asked)
            }
            Ending::Status(status) => self.scsi_response(task, status, None, 0),
        }
    }

    /// Data-In PDUs, the last of them with the status. `asked` bytes are what the command has, `sent` what the initiator
    /// has room for.
    fn data_in(
        &mut self,
        task: &Task,
        asked: usize,
        sent: usize,
        mut push: impl FnMut(&mut Self, &[u8], std::ops::Range<usize>),
    ) {
        if sent == 0 {
            self.scsi_response(task, status::GOOD, None, u32::try_from(asked).unwrap_or(u32::MAX));
            return;
        }
        let (segment, burst) = (self.agreed.send_segment as usize, self.agreed.max_burst as usize);
        let (mut at, mut data_sn) = (0, 0);
        while at < sent {
            let to_burst = burst - at % burst;
            let len = segment.min(sent - at).min(to_burst);
            let last = at + len == sent;
            let mut header = DataIn {
                opcode: opcode::DATA_IN,
                flags: if last || len == to_burst { FINAL } else { 0 },
                data: length24(len),
                itt: task.command.itt,
                ttt: NO_TAG.into(),
                data_sn: u32::into(data_sn),
                offset: u32::try_from(at).unwrap_or(u32::MAX).into(),
                ..DataIn::default()
            };
            if last {
                let (flags, residual) = residual(asked, task.read_expected());
                header.flags |= flag::STATUS | flags;
                header.residual = residual.into();
                header.stat_sn = self.session.next_stat_sn().into();
                self.session.answered(task.is_immediate());
            }
            let numbers = self.session.numbers();
            header.exp_cmd_sn = numbers.exp_cmd_sn.into();
            header.max_cmd_sn = numbers.max_cmd_sn.into();
            push(self, header.as_bytes(), at..at + len);
            at += len;
            data_sn += 1;
        }
    }

    fn scsi_response(&mut self, task: &Task, status: u8, sense: Option<Sense>, asked: u32) {
        let (flags, residual) = residual(asked as usize, task.command.expected.get());
        self.session.answered(task.is_immediate());
        let numbers = self.session.numbers();
        // Sense data goes with its length before it (RFC 7143, 11.4.7).
        let mut data = [0; 2 + SENSE_LEN];
        let data = match sense {
            Some(sense) => {
                data[1] = u8::try_from(SENSE_LEN).unwrap_or(0);
                data[2..].copy_from_slice(&sense.encode());
                &data[..]
            }
            None => &[],
        };
        let response = ScsiResponse {
            opcode: opcode::SCSI_RESPONSE,
            flags: FINAL | flags,
            status,
            data: length24(data.len()),
            itt: task.command.itt,
            stat_sn: self.session.next_stat_sn().into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            exp_data_sn: task.r2t_sn.into(),
            residual: residual.into(),
            ..ScsiResponse::default()
        };
        self.push_copied(response.as_bytes(), data);
    }

    /// Asks for data of a command.
    pub(crate) fn ready_to_transfer(&mut self, task: &Task, ttt: u32, offset: u32, length: u32) {
        let numbers = self.session.numbers();
        let r2t = R2t {
            opcode: opcode::R2T,
            flags: FINAL,
            lun: task.command.lun,
            itt: task.command.itt,
            ttt: ttt.into(),
            stat_sn: self.session.stat_sn().into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            r2t_sn: task.r2t_sn.into(),
            offset: offset.into(),
            length: length.into(),
            ..R2t::default()
        };
        self.push_header(r2t.as_bytes());
    }

    /// Answers task management.
    pub(crate) fn function_done(&mut self, itt: u32, immediate: bool, response: u8) {
        self.session.function_answered(immediate);
        self.answer(opcode::TASK_RESPONSE, itt, response);
    }

    /// Answers a logout; the connection ends when the answer has left.
    pub(crate) fn logged_out(&mut self, itt: u32, immediate: bool) {
        self.session.answered(immediate);
        self.answer(opcode::LOGOUT_RESPONSE, itt, 0);
        self.finishing = Some(Why::LoggedOut);
    }

    /// Refuses a logout; the session goes on as if it had not come.
    pub(crate) fn logout_refused(&mut self, itt: u32, immediate: bool, response: u8) {
        self.session.answered(immediate);
        self.answer(opcode::LOGOUT_RESPONSE, itt, response);
    }

    fn answer(&mut self, opcode: u8, itt: u32, response: u8) {
        let numbers = self.session.numbers();
        let answer = Answer {
            opcode,
            flags: FINAL,
            response,
            itt: itt.into(),
            stat_sn: self.session.next_stat_sn().into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..Answer::default()
        };
        self.push_header(answer.as_bytes());
    }

    /// Rejects a PDU, whose header goes back with the reason (RFC 7143, 11.17).
    pub(crate) fn reject(&mut self, raw: &Raw, reason: u8) {
        let numbers = self.session.numbers();
        let answer = Answer {
            opcode: opcode::REJECT,
            flags: FINAL,
            response: reason,
            data: length24(raw.len()),
            itt: NO_TAG.into(),
            stat_sn: self.session.next_stat_sn().into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..Answer::default()
        };
        self.push_copied(answer.as_bytes(), raw);
    }

    /// Answers text or a ping, with what belongs to it.
    pub(crate) fn text_response(&mut self, opcode: u8, itt: u32, immediate: bool, end: Text, data: &[u8]) {
        self.session.answered(immediate);
        let numbers = self.session.numbers();
        let (flags, ttt) = match end {
            Text::Ends => (FINAL, NO_TAG),
            Text::GoesOn => (0, TEXT_TAG),
        };
        let response = TextResponse {
            opcode,
            flags,
            data: length24(data.len()),
            itt: itt.into(),
            ttt: ttt.into(),
            stat_sn: self.session.next_stat_sn().into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..TextResponse::default()
        };
        self.push_copied(response.as_bytes(), data);
    }

    /// Asks the initiator whether it is there (a NOP-In that wants an answer: RFC 7143, 11.19).
    pub(crate) fn ping(&mut self) {
        let numbers = self.session.numbers();
        let ping = TextResponse {
            opcode: opcode::NOP_IN,
            flags: FINAL,
            itt: NO_TAG.into(),
            // Any but all ones: there is one ping at a time.
            ttt: 1.into(),
            stat_sn: self.session.stat_sn().into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..TextResponse::default()
        };
        self.push_header(ping.as_bytes());
    }

    /// Asks the initiator to log out within so many seconds.
    pub(crate) fn ask_for_logout(&mut self, seconds: u16) {
        if !self.session.ask_for_logout() {
            return;
        }
        let numbers = self.session.numbers();
        let message = Async {
            opcode: opcode::ASYNC,
            flags: FINAL,
            itt: NO_TAG.into(),
            stat_sn: self.session.next_stat_sn().into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            event: EVENT_LOGOUT,
            parameter3: seconds.into(),
            ..Async::default()
        };
        self.push_header(message.as_bytes());
    }

    /// A send has ended: how many bytes of the budget have left the queue with it.
    pub(crate) fn sent(&mut self) -> usize {
        let left = self.owed.saturating_sub(self.tx.queued_bytes());
        self.owed -= left;
        self.total -= left;
        left
    }

    /// A command has ended.
    pub(crate) fn forget(&mut self, tag: u64) {
        if let Some(at) = self.tasks.iter().position(|(_, other)| *other == tag) {
            self.tasks.swap_remove(at);
        }
    }
}

/// Flag and number of the bytes by which what a command has and what the initiator expects differ (RFC 7143, 11.4.5).
fn residual(asked: usize, expected: u32) -> (u8, u32) {
    let asked = u32::try_from(asked).unwrap_or(u32::MAX);
    match asked.cmp(&expected) {
        std::cmp::Ordering::Greater => (flag::OVERFLOW, asked - expected),
        std::cmp::Ordering::Less => (flag::UNDERFLOW, expected - asked),
        std::cmp::Ordering::Equal => (0, 0),
    }
}
