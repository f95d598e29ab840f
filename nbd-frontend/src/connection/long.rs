//! Reads and writes that are longer than the device takes at once, of clients that were not told, or did not ask, how long they
//! may be ([`crate::transmit::LONGEST`]). They go in pieces, and a connection has one read and one write of that kind at a time.
//!
//! - The pieces of a write go as their bytes come. It is answered when all of them have been: with the first error, if there was one.
//! - The pieces of a read go one after the other, so that their bytes are sent in order. A simple reply says before its first byte that the
//!   read went well: no other reply may come between its pieces, and one that fails then ends the connection.

use lh_block::{Extent, Op};

use super::{Connection, Expect, Held, Phase, Served, Why, Work, as_len, served_geometry};
use crate::export::Framing;
use crate::requests::{InFlight, Part};
use crate::transmit::{Call, Head, Refusal};

/// A write, some pieces of which have come.
#[derive(Debug)]
pub(super) struct LongWrite {
    call: Call,
    /// Pieces that have no answer: with the device, or held.
    open: u32,
    /// Its last byte has come.
    is_whole: bool,
    failed: Option<Refusal>,
}

/// A read, some pieces of which have not been asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct LongRead {
    call: Call,
    rest: Extent,
    /// The device has a piece.
    is_asked: bool,
}

impl Connection {
    /// Takes the header, of `len` bytes, of a long read or write.
    pub(super) fn begin_long(
        &mut self,
        call: Call,
        op: Op,
        range: Extent,
        len: usize,
    ) -> Result<Option<Served>, Why> {
        let waits = match op {
            // Nothing that is in flight may be answered in the middle of a simple reply.
            Op::Read => self.session.agreed.framing == Framing::Simple && self.in_flight > 0,
            _ => self.long_write.is_some(),
        };
        if waits {
            // What is held is answered when the stream has ended, and this is in its way.
            let never = self.phase == Phase::Shut && op.is_write();
            return if never { Err(Why::TooMuchHeld) } else { Ok(Some(Served::Blocked)) };
        }
        self.rx.skip(len);
        if op == Op::Read {
            self.long_read = Some(LongRead { call, rest: range, is_asked: false });
        } else {
            self.long_write = Some(LongWrite { call, open: 0, is_whole: false, failed: None });
            self.expect = Expect::Piece { call, op, rest: range };
        }
        Ok(None)
    }

    /// Takes memory for the next piece of a write.
    pub(super) fn next_piece(
        &mut self,
        work: &mut Work<'_>,
        call: Call,
        op: Op,
        rest: Extent,
    ) -> Result<Option<Served>, Why> {
        let (range, behind) = cut(rest, work);
        let bytes = as_len(range.len);
        if let Some(wait) = self.admit(work, bytes)? {
            self.expect = Expect::Piece { call, op, rest };
            return Ok(Some(wait));
        }
        self.kept += bytes;
        self.total += bytes;
        self.expect = Expect::Data { call, op, range, rest: Some(behind), asked: false };
        Ok(None)
    }

    /// The bytes of a write, or of a piece of one, have come: what they are. `rest` is what follows a piece.
    pub(super) fn piece_has_come(&mut self, call: Call, op: Op, rest: Option<Extent>) -> Part {
        let (Some(rest), Some(write)) = (rest, &mut self.long_write) else { return Part::Whole };
        write.open += 1;
        write.is_whole = rest.is_empty();
        if !write.is_whole {
            self.expect = Expect::Piece { call, op, rest };
        }
        Part::OfWrite
    }

    /// A piece of a write has been answered.
    pub(super) fn piece_is_written(&mut self, answer: Result<(), Refusal>) {
        let Some(write) = &mut self.long_write else { return };
        write.open -= 1;
        if let Err(refusal) = answer {
            write.failed.get_or_insert(refusal);
        }
        if write.open == 0 && write.is_whole {
            let (call, answer) = (write.call, write.failed.map_or(Ok(()), Err));
            self.long_write = None;
            self.answer(&call, answer);
        }
    }

    /// Asks for the next piece of a read, when the one before has been answered.
    pub(super) fn read_on(&mut self, work: &mut Work<'_>, read: LongRead) -> Result<Option<Served>, Why> {
        if read.is_asked {
            return Ok(Some(Served::Blocked));
        }
        let (range, rest) = cut(read.rest, work);
        let bytes = as_len(range.len);
        if let Some(wait) = self.admit(work, bytes)? {
            return Ok(Some(wait));
        }
        self.total += bytes;
        self.long_read = Some(LongRead { rest, is_asked: true, ..read });
        let part = Part::OfRead(range);
        self.submit(work, Held { call: read.call, op: Op::Read, range, data: None, part }, bytes);
        Ok(None)
    }

    /// What goes before the bytes that the device has given for a read.
    pub(super) fn head_of(&mut self, request: &InFlight) -> Head {
        let Part::OfRead(piece) = request.part else { return self.session.data(&request.call) };
        self.long_read = self.long_read.filter(|read| !read.rest.is_empty());
        if let Some(read) = &mut self.long_read {
            read.is_asked = false;
        }
        self.session.piece(&request.call, piece)
    }

    /// A piece of a read has failed, and with it the read.
    pub(super) fn piece_is_unread(&mut self, call: &Call, piece: Extent, answer: Result<(), Refusal>) {
        self.long_read = None;
        let has_begun = self.session.agreed.framing == Framing::Simple && piece.offset > call.offset;
        if has_begun && !self.is_unheard {
            self.is_cut_off = true;
        } else {
            self.answer(call, answer);
        }
    }
}

/// The begin of a range, as long as the device takes at once, and what follows it.
fn cut(range: Extent, work: &Work<'_>) -> (Extent, Extent) {
    let len = range.len.min(served_geometry(work.device).max_transfer.into());
    (Extent::new(range.offset, len), Extent::new(range.offset + len, range.len - len))
}
