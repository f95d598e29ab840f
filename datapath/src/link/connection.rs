//! One connection to a replica: messages out in one send per turn, messages in where they lie.

use std::os::fd::{AsFd, OwnedFd};

use lh_block::Generation;
use lh_ring::{Completion, Fd, OWNER_DEVICE, Payload, Pool, Ring, Rx, Token, Tx};
use lh_wire::{HEADER_LEN, Header, OpCode, Pieces, flags, padding};

use super::data::Body;
use super::loan::Loans;
use crate::queue::Transmit;

/// [`Token::kind`] of a receive.
const RECEIVE: u8 = 0;
/// [`Token::kind`] of a send.
const SEND: u8 = 1;

/// Bytes that a socket may hold in either direction: a burst at full depth goes out in one call.
const SOCKET_BUFFER: usize = 1 << 20;

/// Bytes of the shortest write that is lent. Those of 4 KiB take 0.87 of the processor time of sent ones in RAM, and 0.93 on disk
/// (`docs/performance.md`); shorter ones are nearly all header.
const LENT_MIN: usize = 4 << 10;

/// [`HEADER_LEN`] as receives count.
#[expect(clippy::cast_possible_truncation, reason = "64")]
const HEADER: u32 = HEADER_LEN as u32;

/// What was agreed in the handshake.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Payloads carry checksums.
    pub(super) checksums: bool,
    /// The replica has the pool's memory mapped.
    pub(super) lends: bool,
    /// The replica tells which blocks hold data.
    pub(super) tells: bool,
}

/// What has come.
pub(super) enum Received {
    /// Not a whole message yet.
    Nothing,
    /// Something that no correct replica sends: the connection is of no use any more.
    Broken,
    /// An answer and its payload.
    Message(Header, Payload),
}

/// A connection whose handshake is done.
pub(super) struct Connection {
    fd: Fd,
    number: u32,
    terms: Terms,
    loans: Loans<Payload>,
    pool: Pool,
    rx: Rx,
    tx: Tx,
    /// Bytes given to `tx` since the handshake.
    position: u64,
    /// A header whose payload has not wholly arrived.
    header: Option<Header>,
    /// Bytes missing for the next step.
    want: u32,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, number: u32, terms: Terms, pool: &Pool) -> Self {
        if let Err(e) = lh_ring::sys::set_socket_buffers(socket.as_fd(), SOCKET_BUFFER) {
            tracing::debug!("socket buffers of a replica's connection stay as they are: {e}");
        }
        Self {
            fd: Fd::new(socket),
            number,
            terms,
            loans: Loans::default(),
            pool: pool.clone(),
            rx: Rx::new(pool, 1),
            tx: Tx::new(pool),
            position: 0,
            header: None,
            want: HEADER,
        }
    }

    pub(super) const fn number(&self) -> u32 {
        self.number
    }

    /// Payloads carry checksums.
    pub(super) const fn checksums(&self) -> bool {
        self.terms.checksums
    }

    /// The replica tells which blocks hold data.
    pub(super) const fn tells(&self) -> bool {
        self.terms.tells
    }

    /// Queues a request.
    pub(super) fn push(&mut self, transmit: &Transmit, generation: Generation, body: Body<'_>) {
        let length = u32::try_from(transmit.range.len).unwrap_or(u32::MAX);
        let mut header =
            Header::request(transmit.op, transmit.tag, transmit.range.offset, length, generation);
        header.flush = transmit.flush;
        header.aux = transmit.aux;
        if transmit.fua {
            header.flags |= flags::FUA;
        }
        if transmit.verify {
            header.flags |= flags::VERIFY;
        }
        let (len, crc) = match &body {
            Body::None => (0, None),
            Body::Payload(payload, crc) => (payload.len(), *crc),
            Body::Bytes(bytes) => (bytes.len(), self.terms.checksums.then(|| crc32c::crc32c(bytes))),
        };
        if let Some(crc) = crc {
            header.flags |= flags::CRC;
            header.payload_crc = crc;
        }
        let body = match body {
            Body::Payload(payload, _)
                if self.terms.lends && transmit.op == OpCode::Write && len >= LENT_MIN =>
            {
                return self.push_lent(header, payload);
            }
            body => body,
        };
        if len > 0 {
            header.payload = u32::try_from(len).unwrap_or(u32::MAX);
            header.pad = padding(self.position);
        }
        self.position += HEADER_LEN as u64 + u64::from(header.pad) + u64::from(header.payload);
        self.tx.push_header(&header.encode());
        self.tx.push_padding(header.pad.into());
        match body {
            Body::None => {}
            Body::Payload(payload, _) => self.tx.push_payload(payload),
            Body::Bytes(bytes) => bytes.chunks(Tx::HEADER_MAX).for_each(|part| self.tx.push_header(part)),
        }
    }

    /// Queues a write that says where its bytes are.
    fn push_lent(&mut self, mut header: Header, payload: Payload) {
        assert!(payload.is_of(&self.pool), "a payload of another pool is lent");
        let Some(pieces) = Pieces::new(payload.pieces()) else {
            unreachable!("a payload is in no more pieces than a message has")
        };
        let (list, len) = pieces.encode();
        header.flags |= flags::LENT;
        header.payload = u32::try_from(len).unwrap_or(u32::MAX);
        self.position += (HEADER_LEN + len) as u64;
        self.tx.push_header(&header.encode());
        self.tx.push_header(&list[..len]);
        self.loans.lend(header.tag, payload);
    }

    /// Starts what can be started; false if there was no memory for a receive.
    pub(super) fn start(&mut self, ring: &mut Ring, member: u16) -> bool {
        if !self.tx.is_empty() && !self.tx.is_outstanding() {
            ring.send(Token::new(OWNER_DEVICE, SEND, member, self.number), &self.fd, &mut self.tx);
        }
        self.rx.is_outstanding()
            || ring.recv(
                Token::new(OWNER_DEVICE, RECEIVE, member, self.number),
                &self.fd,
                &mut self.rx,
                self.want,
            )
    }

    /// A completion of this connection; false if it is broken.
    pub(super) fn completed(&self, completion: &Completion) -> bool {
        match (&completion.result, completion.token.kind) {
            (Ok(0), RECEIVE) | (Err(_), _) => false,
            (Ok(_), _) => true,
        }
    }

    /// The next whole message of what was received.
    pub(super) fn next_message(&mut self, generation: Generation) -> Received {
        let header = match self.header.take() {
            Some(header) => header,
            None => {
                let Some(bytes) = self.rx.peek::<HEADER_LEN>() else {
                    self.want = missing(HEADER_LEN, self.rx.available());
                    return Received::Nothing;
                };
                match Header::decode(&bytes) {
                    Ok(h) if h.has(flags::RESPONSE) && h.generation == generation => {
                        self.rx.skip(HEADER_LEN);
                        if h.op == OpCode::Write {
                            self.loans.end(h.tag);
                        }
                        h
                    }
                    Ok(_) => return Received::Broken,
                    Err(e) => {
                        tracing::warn!("a replica's answer is unreadable: {e}");
                        return Received::Broken;
                    }
                }
            }
        };
        let pad = usize::from(header.pad);
        let needed = pad + header.payload as usize;
        if self.rx.available() < needed {
            self.want = missing(needed, self.rx.available());
            self.header = Some(header);
            return Received::Nothing;
        }
        self.want = HEADER;
        if pad > 0 {
            self.rx.skip(pad);
        }
        let payload = match header.payload as usize {
            0 => Payload::default(),
            n => self.rx.take(n),
        };
        if header.has(flags::CRC) && payload.crc32c() != header.payload_crc {
            tracing::warn!("a replica's answer has a wrong checksum");
            return Received::Broken;
        }
        Received::Message(header, payload)
    }

    /// Ends the connection: both directions at once, so that what is in flight on the ring ends, too. Returns what the replica
    /// has not answered, and may still read: what is not sent included, which is less than what is not known to be.
    #[must_use]
    pub(super) fn close(self) -> Loans<Payload> {
        let _ = nix::sys::socket::shutdown(self.fd.raw(), nix::sys::socket::Shutdown::Both);
        self.loans
    }
}

fn missing(needed: usize, available: usize) -> u32 {
    u32::try_from(needed.saturating_sub(available)).unwrap_or(u32::MAX).max(1)
}
