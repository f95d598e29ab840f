//! The transmission phase as pure functions: a request's header in, a decision out; an outcome in, a reply's bytes
//! out. Payloads never come here.
//!
//! Whatever a client asks, exactly one of these happens: the device is asked, an answer is given at once, or the
//! connection ends. A request that is refused takes its payload with it ([`Call::payload`] bytes are to be dropped),
//! so that the stream stays readable.

use lh_block::{Extent, Geometry, IoError, Op};
use zerocopy::byteorder::big_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

use crate::export::{Agreed, Framing};
use crate::proto::{
    EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, ErrorChunk, ExtendedReply, ExtendedRequest,
    REPLY_FLAG_DONE, REQUEST_MAGIC, Request, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, SimpleReply,
    StructuredReply, chunk, command, command_flag, error,
};

/// Longest payload of a refused request that is read and dropped; a longer one ends the connection. Clients of
/// libnbd send up to 64 MiB, and deserve an error rather than a hang-up.
pub const DROP_MAX: u64 = 64 << 20;

/// Longest read or write of a client that has not asked for the block sizes: what the protocol tells such clients to keep to
/// ("Block size constraints"). Linux' nbd-client does not ask, and has the kernel send more than 1 MiB.
pub const LONGEST: u32 = 32 << 20;

/// Longest payload of a block status request that is looked at: its length field and 32 contexts.
pub const FILTER_MAX: usize = 8 + 4 * 32;

/// Longest header of a request.
pub const REQUEST_MAX: usize = size_of::<ExtendedRequest>();

/// What this connection agreed on, as far as requests and replies depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// The outcome of the handshake.
    pub agreed: Agreed,
    /// Writes are refused.
    pub read_only: bool,
}

/// A request's header, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Bits of [`command_flag`].
    pub flags: u16,
    /// One of [`command`].
    pub kind: u16,
    /// The client's mark.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes in the range.
    pub length: u64,
    /// Bytes that follow the header in the stream.
    pub payload: u64,
}

/// What to do about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Ask the device, in pieces if a read or write is longer than it takes. A write's payload is exactly the range's bytes.
    Device {
        /// The operation.
        op: Op,
        /// Where.
        range: Extent,
    },
    /// Answer with what is known of the range's allocation.
    Status(Extent),
    /// Read the payload, at most [`FILTER_MAX`] bytes, and ask [`Session::filter`].
    Filter,
    /// Drop the payload and answer.
    Answer(Result<(), Refusal>),
    /// `NBD_CMD_DISC`: read nothing more, finish what is in flight, close.
    Disconnect,
}

/// Why a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Not the begin of a request.
    #[error("no NBD request (magic {0:#010x})")]
    Magic(u32),
    /// More bytes than anybody should have to read and drop.
    #[error("request with a payload of {0} bytes")]
    Payload(u64),
}

/// An error as a client is told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// One of [`error`].
    pub error: u32,
    /// For people. At most [`TEXT_MAX`] bytes.
    pub text: &'static str,
    /// The first byte that could not be served, where that is certain; lies inside the request.
    pub at: Option<u64>,
}

/// Longest text of a [`Refusal`].
pub const TEXT_MAX: usize = 80;

const fn refuse(error: u32, text: &'static str) -> Refusal {
    assert!(text.len() <= TEXT_MAX, "refusal text too long");
    Refusal { error, text, at: None }
}

const UNKNOWN_COMMAND: Refusal = refuse(error::EINVAL, "unknown command");
const UNKNOWN_FLAG: Refusal = refuse(error::EINVAL, "flag unknown, or not valid for this command");
const UNALIGNED: Refusal = refuse(error::EINVAL, "offset or length is no multiple of the minimum block size");
const OVERSIZE: Refusal = refuse(error::EINVAL, "longer than the maximum block size");
const IN_PIECES: Refusal = refuse(error::EOVERFLOW, "too long for a single chunk");
const BEYOND: Refusal = refuse(error::EINVAL, "beyond the end of the export");
const BEYOND_WRITE: Refusal = refuse(error::ENOSPC, "beyond the end of the export");
const READ_ONLY: Refusal = refuse(error::EPERM, "the export is read-only");
const RESERVED: Refusal = refuse(error::EINVAL, "offset and length of a flush must be zero");
const NO_CONTEXT: Refusal = refuse(error::EINVAL, "no metadata context was negotiated");
const BAD_FILTER: Refusal = refuse(error::EINVAL, "malformed payload of a block status request");

/// The answer of a server that is being stopped.
pub const STOPPING: Refusal = refuse(error::ESHUTDOWN, "the volume is being stopped");

impl Refusal {
    /// The device's error in the protocol's terms ("Error values").
    pub const fn of_device(reason: IoError, write: bool) -> Self {
        match reason {
            IoError::OutOfRange if write => BEYOND_WRITE,
            IoError::OutOfRange => BEYOND,
            IoError::Invalid => refuse(error::EINVAL, "invalid request"),
            IoError::NoSpace => refuse(error::ENOSPC, "no space left on any replica"),
            IoError::NotSupported => refuse(error::ENOTSUP, "cannot be done fast"),
            IoError::ReadOnly => READ_ONLY,
            IoError::TimedOut => refuse(error::EIO, "no replica came back in time"),
            IoError::Io => refuse(error::EIO, "input/output error"),
            IoError::ShuttingDown => STOPPING,
        }
    }
}

impl Session {
    /// Bytes in the header of this connection's requests.
    pub const fn request_len(&self) -> usize {
        match self.agreed.framing {
            Framing::Simple | Framing::Structured => size_of::<Request>(),
            Framing::Extended => size_of::<ExtendedRequest>(),
        }
    }

    /// Reads a request's header of [`Self::request_len`] bytes.
    ///
    /// # Errors
    /// [`Broken`]: the connection cannot be used any more.
    pub fn decode(&self, bytes: &[u8]) -> Result<Call, Broken> {
        let call = match self.agreed.framing {
            Framing::Simple | Framing::Structured => decode_compact(bytes)?,
            Framing::Extended => decode_extended(bytes)?,
        };
        if call.payload > DROP_MAX { Err(Broken::Payload(call.payload)) } else { Ok(call) }
    }

    /// What to do about a request.
    pub fn decide(&self, call: &Call, geometry: &Geometry) -> Decision {
        if call.kind == command::DISC {
            return Decision::Disconnect;
        }
        match self.check(call, geometry) {
            Ok(decision) => decision,
            Err(refusal) => Decision::Answer(Err(refusal)),
        }
    }

    fn check(&self, call: &Call, geometry: &Geometry) -> Result<Decision, Refusal> {
        let known = self.known_flags(call.kind).ok_or(UNKNOWN_COMMAND)?;
        if call.flags & !known != 0 {
            return Err(UNKNOWN_FLAG);
        }
        let fua = call.flags & command_flag::FUA != 0;
        if call.kind == command::FLUSH {
            return match (call.offset, call.length) {
                (0, 0) => Ok(Decision::Device { op: Op::Flush, range: Extent::default() }),
                _ => Err(RESERVED),
            };
        }
        if call.kind == command::BLOCK_STATUS && !self.agreed.allocation {
            return Err(NO_CONTEXT);
        }
        if call.kind == command::BLOCK_STATUS && call.flags & command_flag::PAYLOAD_LEN != 0 {
            return if call.payload <= FILTER_MAX as u64 { Ok(Decision::Filter) } else { Err(BAD_FILTER) };
        }
        let range = self.check_range(call, geometry)?;
        if range.is_empty() {
            // The protocol leaves the outcome open; nothing was asked for, and it was done.
            return Ok(Decision::Answer(Ok(())));
        }
        let op = match call.kind {
            command::READ => Op::Read,
            command::WRITE => Op::Write { fua },
            // A trim that is to be durable needs the operation that can promise it; what it leaves is the same.
            command::TRIM if fua => Op::WriteZeroes { fua, may_unmap: true, fast: false },
            command::TRIM => Op::Unmap,
            command::WRITE_ZEROES => Op::WriteZeroes {
                fua,
                may_unmap: call.flags & command_flag::NO_HOLE == 0,
                fast: call.flags & command_flag::FAST_ZERO != 0,
            },
            command::BLOCK_STATUS => return Ok(Decision::Status(range)),
            // Nothing is gained by reading ahead what the client will ask for from the same memory.
            _ => return Ok(Decision::Answer(Ok(()))),
        };
        Ok(Decision::Device { op, range })
    }

    /// The flags that a command may carry here; `None` for an unknown command.
    const fn known_flags(&self, kind: u16) -> Option<u16> {
        let extended = matches!(self.agreed.framing, Framing::Extended);
        let payload = if extended { command_flag::PAYLOAD_LEN } else { 0 };
        let own = match kind {
            command::READ if matches!(self.agreed.framing, Framing::Simple) => 0,
            command::READ => command_flag::DF,
            command::WRITE => payload,
            command::FLUSH | command::TRIM | command::CACHE => 0,
            command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
            command::BLOCK_STATUS => command_flag::REQ_ONE | payload,
            _ => return None,
        };
        // "This flag is valid for all commands" ("Command flags").
        Some(own | command_flag::FUA)
    }

    /// The longest read or write that this client may ask for.
    pub fn longest(&self, geometry: &Geometry) -> u64 {
        let most = geometry.max_transfer;
        u64::from(if self.agreed.block_sizes { most } else { most.max(LONGEST) })
    }

    fn check_range(&self, call: &Call, geometry: &Geometry) -> Result<Extent, Refusal> {
        let writes = matches!(call.kind, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if self.read_only && writes {
            return Err(READ_ONLY);
        }
        let range = Extent::new(call.offset, call.length);
        let moves_data = matches!(call.kind, command::READ | command::WRITE);
        if moves_data && call.length > self.longest(geometry) {
            return Err(OVERSIZE);
        }
        let in_pieces = call.length > u64::from(geometry.max_transfer);
        if call.kind == command::READ && call.flags & command_flag::DF != 0 && in_pieces {
            return Err(IN_PIECES);
        }
        if !range.is_aligned(u64::from(geometry.logical_block)) {
            return Err(UNALIGNED);
        }
        // `end` saturates, and no volume ends at the end of the number space.
        if range.end() > geometry.size {
            let at = (range.offset < geometry.size).then_some(geometry.size);
            let grows = matches!(call.kind, command::WRITE | command::WRITE_ZEROES);
            return Err(Refusal { at, ..if grows { BEYOND_WRITE } else { BEYOND } });
        }
        Ok(range)
    }

    /// What to do about a block status request whose payload, the contexts of interest, has come: the decision and
    /// the call with its real length, and without the payload, which has been read.
    pub fn filter(&self, call: &Call, payload: &[u8], geometry: &Geometry) -> (Decision, Call) {
        let refused = (Decision::Answer(Err(BAD_FILTER)), Call { payload: 0, ..*call });
        let Some((length, ids)) = payload.split_first_chunk::<8>() else { return refused };
        let (ids, []) = ids.as_chunks::<4>() else { return refused };
        // There is one context: asked for at most once, and nothing else.
        let ours = [crate::proto::BASE_ALLOCATION_ID.to_be_bytes()];
        if !ids.is_empty() && ids != ours {
            return refused;
        }
        let real = Call {
            flags: call.flags & !command_flag::PAYLOAD_LEN,
            length: u64::from_be_bytes(*length),
            payload: 0,
            ..*call
        };
        match self.decide(&real, geometry) {
            // No context asked for: no chunk to send but the last.
            Decision::Status(_) if ids.is_empty() => (Decision::Answer(Ok(())), real),
            decision => (decision, real),
        }
    }
}

fn decode_compact(bytes: &[u8]) -> Result<Call, Broken> {
    let raw = Request::read_from_bytes(bytes).map_err(|_| Broken::Magic(0))?;
    if raw.magic.get() != REQUEST_MAGIC {
        return Err(Broken::Magic(raw.magic.get()));
    }
    let length = u64::from(raw.length.get());
    let payload = if raw.kind.get() == command::WRITE { length } else { 0 };
    Ok(Call {
        flags: raw.flags.get(),
        kind: raw.kind.get(),
        cookie: raw.cookie.get(),
        offset: raw.offset.get(),
        length,
        payload,
    })
}

fn decode_extended(bytes: &[u8]) -> Result<Call, Broken> {
    let raw = ExtendedRequest::read_from_bytes(bytes).map_err(|_| Broken::Magic(0))?;
    if raw.magic.get() != EXTENDED_REQUEST_MAGIC {
        return Err(Broken::Magic(raw.magic.get()));
    }
    let length = raw.length.get();
    // A write is to carry the flag ("Command flags"). QEMU 8.2 to 10 leaves it out; the bytes follow all the same.
    let follows = raw.flags.get() & command_flag::PAYLOAD_LEN != 0 || raw.kind.get() == command::WRITE;
    let payload = if follows { length } else { 0 };
    Ok(Call {
        flags: raw.flags.get(),
        kind: raw.kind.get(),
        cookie: raw.cookie.get(),
        offset: raw.offset.get(),
        length,
        payload,
    })
}

/// Longest [`Head`]: an extended error chunk with text and offset.
const HEAD_MAX: usize = size_of::<ExtendedReply>() + size_of::<ErrorChunk>() + TEXT_MAX + 8;

/// The begin of a reply, or all of it where no data follows.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    bytes: [u8; HEAD_MAX],
    len: usize,
}

impl Head {
    fn push(&mut self, part: &[u8]) {
        self.bytes[self.len..self.len + part.len()].copy_from_slice(part);
        self.len += part.len();
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Session {
    /// The reply to a request that was done and has no data.
    pub fn done(&self, call: &Call) -> Head {
        let mut head = empty_head();
        match self.agreed.framing {
            // With structured replies, too, the short form is allowed for all but reads.
            Framing::Structured if call.kind != command::READ => push_simple(&mut head, call, 0),
            Framing::Simple => push_simple(&mut head, call, 0),
            Framing::Structured | Framing::Extended => self.push_chunk(&mut head, call, chunk::NONE, 0),
        }
        head
    }

    /// What goes before the `call.length` bytes of a read.
    pub fn data(&self, call: &Call) -> Head {
        self.piece(call, Extent::new(call.offset, call.length))
    }

    /// What goes before a piece of a read. Pieces come in order; before those behind the first nothing may go that says how the
    /// read ended, where replies are simple.
    pub fn piece(&self, call: &Call, piece: Extent) -> Head {
        let mut head = empty_head();
        if self.agreed.framing != Framing::Simple {
            let is_last = piece.end() == call.offset.saturating_add(call.length);
            let flags = if is_last { REPLY_FLAG_DONE } else { 0 };
            self.push_chunk_of(&mut head, call, (chunk::OFFSET_DATA, flags), 8 + piece.len);
            head.push(&piece.offset.to_be_bytes());
        } else if piece.offset == call.offset {
            push_simple(&mut head, call, 0);
        }
        head
    }

    /// The reply to a request that failed.
    pub fn error(&self, call: &Call, refusal: &Refusal) -> Head {
        let mut head = empty_head();
        if self.agreed.framing == Framing::Simple {
            push_simple(&mut head, call, refusal.error);
            return head;
        }
        let body = ErrorChunk { error: refusal.error.into(), message_length: text_len(refusal.text).into() };
        let length = (body.as_bytes().len() + refusal.text.len()) as u64;
        match refusal.at {
            Some(_) => self.push_chunk(&mut head, call, chunk::ERROR_OFFSET, length + 8),
            None => self.push_chunk(&mut head, call, chunk::ERROR, length),
        }
        head.push(body.as_bytes());
        head.push(refusal.text.as_bytes());
        if let Some(at) = refusal.at {
            head.push(&at.to_be_bytes());
        }
        head
    }

    /// The head of a chunk of `length` bytes that is the only one of its reply.
    pub(crate) fn push_chunk(&self, head: &mut Head, call: &Call, kind: u16, length: u64) {
        self.push_chunk_of(head, call, (kind, REPLY_FLAG_DONE), length);
    }

    fn push_chunk_of(&self, head: &mut Head, call: &Call, (kind, flags): (u16, u16), length: u64) {
        let cookie = U64::from(call.cookie);
        if self.agreed.framing == Framing::Extended {
            let raw = ExtendedReply {
                magic: EXTENDED_REPLY_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie,
                offset: call.offset.into(),
                length: length.into(),
            };
            head.push(raw.as_bytes());
        } else {
            let raw = StructuredReply {
                magic: STRUCTURED_REPLY_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie,
                length: chunk_len(length).into(),
            };
            head.push(raw.as_bytes());
        }
    }
}

pub(crate) const fn empty_head() -> Head {
    Head { bytes: [0; HEAD_MAX], len: 0 }
}

fn push_simple(head: &mut Head, call: &Call, error: u32) {
    let raw =
        SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: call.cookie.into() };
    head.push(raw.as_bytes());
}

#[expect(clippy::cast_possible_truncation, reason = "at most TEXT_MAX")]
const fn text_len(text: &str) -> u16 {
    text.len() as u16
}

#[expect(clippy::cast_possible_truncation, reason = "a piece is at most max_transfer, a 32-bit number")]
const fn chunk_len(length: u64) -> u32 {
    length as u32
}

#[cfg(test)]
mod tests;
