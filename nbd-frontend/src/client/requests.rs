//! The requests of a client, from their submission to their answer, over as many connections as that takes.
//!
//! - A request is kept, with its bytes, until it is answered. When its connection is lost it is sent again on the next one:
//!   everything unanswered, in the order in which it was submitted. The server takes the requests of one connection in
//!   order, so overlapping writes take effect in that order.
//! - So a write may be done twice, but never over a later one that was answered: of two overlapping writes the volume
//!   answers the first one first, and answers come in order on a connection. That the first copy is not still on its way
//!   is for the server to see to ([`crate::Lane`]).
//! - What its client has given up ([`Requests::abandon`]) is not sent any more, by no connection: the client may have sent it again
//!   elsewhere, and something newer since.
//! - A flush is sent again, too, and may then be served by another engine than the writes that were answered before it. It
//!   covers them all the same: what an engine has acknowledged is on every member, and the flush of any engine reaches
//!   every layer that was written since the last one, whoever wrote (`docs/invariants.md`, 1 and 5).

use std::collections::VecDeque;

use lh_block::{Done, Extent, IoError, Op, Request};
use lh_ring::Payload;
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::proto::{self, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, SimpleReply, command, command_flag, error};

/// Bytes of a reply's head.
pub const REPLY_LEN: usize = size_of::<SimpleReply>();

/// Bytes of a request's head.
pub const CALL_LEN: usize = size_of::<proto::Request>();

/// Longest piece of zeroes or an unmap: the protocol's lengths have 32 bits. What is longer goes piece by piece, and what
/// was submitted later waits for its last one.
const PIECE_MAX: u64 = 1 << 30;

/// Why a connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Broken {
    /// What came is no simple reply.
    #[error("its answer is none of the NBD protocol ({0:#x})")]
    Magic(u32),
    /// A reply to nothing that was asked on this connection.
    #[error("it answers what it was not asked (cookie {0:#x})")]
    Cookie(u64),
    /// The server is being stopped (`NBD_ESHUTDOWN`).
    #[error("it is being stopped")]
    Stopping,
}

/// What is to be sent.
#[derive(Debug)]
pub struct Call {
    /// The request's head.
    pub head: [u8; CALL_LEN],
    /// The bytes that follow.
    pub data: Option<Payload>,
}

/// What a reply's head means.
#[derive(Debug)]
pub enum Answer {
    /// So many bytes follow, for [`Requests::data`].
    Data(Place, u32),
    /// The end of a request.
    Done(Done<Payload>),
    /// The end of a piece; there are more.
    Piece,
}

/// Where a request is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(u32);

/// A request that is not answered.
#[derive(Debug)]
struct Kept {
    /// Counts submissions.
    number: u64,
    tag: u64,
    op: Op,
    range: Extent,
    data: Option<Payload>,
    /// Bytes of the range whose pieces have been answered.
    done: u64,
    /// Bytes of the piece that was sent on this connection.
    sent: Option<u64>,
    /// Nobody waits for it any more.
    abandoned: bool,
}

/// The requests that are not answered: as many as the queue is deep.
#[derive(Debug)]
pub struct Requests {
    /// Each with a count of what was sent from there, so that no cookie comes twice in four billion.
    places: Vec<(u32, Option<Kept>)>,
    free: Vec<u32>,
    submitted: u64,
    /// What this connection has not been sent, or not to its end, in order of submission.
    unsent: VecDeque<u32>,
}

impl Requests {
    /// Room for so many.
    pub fn new(depth: u32) -> Self {
        Self {
            places: (0..depth).map(|_| (0, None)).collect(),
            free: (0..depth).rev().collect(),
            submitted: 0,
            unsent: VecDeque::with_capacity(depth as usize),
        }
    }

    /// Free places.
    pub const fn room(&self) -> usize {
        self.free.len()
    }

    /// True if everything is answered.
    pub const fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Takes a request, whose range is inside the volume.
    ///
    /// # Panics
    /// Without room.
    pub fn submit(&mut self, request: Request<Payload>) {
        let Request { tag, op, range, data } = request;
        let place = self.free.pop().expect("the frontend asks for room first");
        self.submitted += 1;
        let range = if op == Op::Flush { Extent::default() } else { range };
        let kept =
            Kept { number: self.submitted, tag, op, range, data, done: 0, sent: None, abandoned: false };
        self.places[place as usize].1 = Some(kept);
        self.unsent.push_back(place);
    }

    /// What is to be sent next on this connection.
    pub fn next_call(&mut self) -> Option<Call> {
        let place = *self.unsent.front()?;
        let (uses, kept) = self.places.get_mut(place as usize)?;
        // In pieces: the next one goes when this one is answered.
        let kept = kept.as_mut().filter(|kept| kept.sent.is_none())?;
        let piece = Extent::new(kept.range.offset + kept.done, (kept.range.len - kept.done).min(PIECE_MAX));
        kept.sent = Some(piece.len);
        if kept.done + piece.len == kept.range.len {
            self.unsent.pop_front();
        }
        *uses = uses.wrapping_add(1);
        let (kind, flags) = command_of(kept.op);
        let head = proto::Request {
            magic: REQUEST_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: (u64::from(*uses) << 32 | u64::from(place)).into(),
            offset: piece.offset.into(),
            length: u32::try_from(piece.len).unwrap_or(u32::MAX).into(),
        };
        let mut bytes = [0; CALL_LEN];
        bytes.copy_from_slice(head.as_bytes());
        Some(Call { head: bytes, data: kept.data.clone() })
    }

    /// The connection is lost: everything unanswered is to be sent on the next one.
    pub fn lost(&mut self) {
        self.unsent.clear();
        let kept = (0..).zip(&mut self.places).filter_map(|(place, (_, kept))| Some((place, kept.as_mut()?)));
        let mut order: Vec<(u64, u32)> = kept
            .map(|(place, kept)| {
                kept.sent = None;
                (kept.number, place)
            })
            .collect();
        order.sort_unstable();
        self.unsent.extend(order.into_iter().map(|(_, place)| place));
    }

    /// Takes the head of a reply.
    ///
    /// # Errors
    /// [`Broken`]: the connection is of no use any more, and nothing has changed.
    pub fn reply(&mut self, head: &[u8; REPLY_LEN]) -> Result<Answer, Broken> {
        let reply = SimpleReply::read_from_bytes(head).map_err(|_| Broken::Magic(0))?;
        if reply.magic.get() != SIMPLE_REPLY_MAGIC {
            return Err(Broken::Magic(reply.magic.get()));
        }
        let cookie = reply.cookie.get();
        let unknown = Broken::Cookie(cookie);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half is the place")]
        let place = cookie as u32;
        let (uses, kept) = self.places.get_mut(place as usize).ok_or(unknown)?;
        let kept = kept.as_mut().filter(|_| u64::from(*uses) == cookie >> 32).ok_or(unknown)?;
        let piece = kept.sent.ok_or(unknown)?;
        match reply.error.get() {
            0 if kept.op == Op::Read => {
                Ok(Answer::Data(Place(place), u32::try_from(piece).unwrap_or(u32::MAX)))
            }
            0 => {
                kept.done += piece;
                kept.sent = None;
                if kept.done < kept.range.len {
                    return Ok(Answer::Piece);
                }
                self.finish(place, Ok(()), None).map(Answer::Done).ok_or(unknown)
            }
            error::ESHUTDOWN => Err(Broken::Stopping),
            number => self.finish(place, Err(reason(number)), None).map(Answer::Done).ok_or(unknown),
        }
    }

    /// The bytes of a read have come.
    pub fn data(&mut self, place: Place, data: Payload) -> Option<Done<Payload>> {
        self.finish(place.0, Ok(()), Some(data))
    }

    /// The client of a request has given it up. True: the server has it, and may not have begun what it changes: only the end of the
    /// connection calls that back. Otherwise it ends with what was sent of it ([`Requests::abandoned`]).
    pub fn abandon(&mut self, tag: u64) -> bool {
        let mut kept = self.places.iter_mut().filter_map(|(_, kept)| kept.as_mut());
        let Some(kept) = kept.find(|kept| kept.tag == tag && !kept.abandoned) else { return false };
        kept.abandoned = true;
        kept.sent.is_some() && !matches!(kept.op, Op::Read | Op::Flush)
    }

    /// Ends one of those that were given up and that no connection has been sent.
    pub fn abandoned(&mut self) -> Option<Done<Payload>> {
        let is_it = |kept: &Kept| kept.abandoned && kept.sent.is_none();
        let place = self.places.iter().position(|(_, kept)| kept.as_ref().is_some_and(is_it))?;
        self.finish(u32::try_from(place).ok()?, Err(IoError::ShuttingDown), None)
    }

    /// Ends one of the requests that are left, the oldest first. For a device that is given up.
    pub fn give_up(&mut self, reason: IoError) -> Option<Done<Payload>> {
        let oldest =
            (0..).zip(&self.places).filter_map(|(place, (_, kept))| Some((kept.as_ref()?.number, place)));
        let (_, place) = oldest.min()?;
        self.finish(place, Err(reason), None)
    }

    fn finish(
        &mut self,
        place: u32,
        result: Result<(), IoError>,
        data: Option<Payload>,
    ) -> Option<Done<Payload>> {
        let kept = self.places.get_mut(place as usize)?.1.take()?;
        self.free.push(place);
        // Only one that has not been sent, or not to its end, is still there.
        self.unsent.retain(|other| *other != place);
        Some(Done { tag: kept.tag, result, data })
    }
}

/// Command and flags. The other side is a volume: what it trims reads as zero, as an unmap promises.
const fn command_of(op: Op) -> (u16, u16) {
    const fn flag(set: bool, flag: u16) -> u16 {
        if set { flag } else { 0 }
    }
    match op {
        Op::Read => (command::READ, 0),
        Op::Write { fua } => (command::WRITE, flag(fua, command_flag::FUA)),
        Op::WriteZeroes { fua, may_unmap, fast } => (
            command::WRITE_ZEROES,
            flag(fua, command_flag::FUA)
                | flag(!may_unmap, command_flag::NO_HOLE)
                | flag(fast, command_flag::FAST_ZERO),
        ),
        Op::Unmap => (command::TRIM, 0),
        // A question which blocks hold data is answered without the server.
        Op::Flush | Op::Allocation => (command::FLUSH, 0),
    }
}

/// The volume's error in the device's terms ("Error values"). What is unknown is an input/output error.
const fn reason(number: u32) -> IoError {
    match number {
        error::EPERM => IoError::ReadOnly,
        error::EINVAL => IoError::Invalid,
        error::ENOSPC => IoError::NoSpace,
        error::ENOTSUP => IoError::NotSupported,
        _ => IoError::Io,
    }
}

#[cfg(test)]
mod tests;
