//! One connection to a replica: messages out in one send per turn, messages in where they lie.

use std::os::fd::{AsFd, OwnedFd};

use lh_block::Generation;
use lh_ring::{Completion, Fd, OWNER_DEVICE, Payload, Pool, Ring, Rx, Token, Tx};
use lh_wire::{HEADER_LEN, Header, flags, padding};

use super::data::Body;
use crate::queue::Transmit;

/// [`Token::kind`] of a receive.
const RECEIVE: u8 = 0;
/// [`Token::kind`] of a send.
const SEND: u8 = 1;

/// Bytes that a socket may hold in either direction: a burst at full depth goes out in one call.
const SOCKET_BUFFER: usize = 1 << 20;

/// [`HEADER_LEN`] as receives count.
#[expect(clippy::cast_possible_truncation, reason = "64")]
const HEADER: u32 = HEADER_LEN as u32;

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
    checksums: bool,
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
    pub(super) fn new(socket: OwnedFd, number: u32, checksums: bool, pool: &Pool) -> Self {
        if let Err(e) = lh_ring::sys::set_socket_buffers(socket.as_fd(), SOCKET_BUFFER) {
            tracing::debug!("socket buffers of a replica's connection stay as they are: {e}");
        }
        Self {
            fd: Fd::new(socket),
            number,
            checksums,
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
        self.checksums
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
            Body::Bytes(bytes) => (bytes.len(), self.checksums.then(|| crc32c::crc32c(bytes))),
        };
        if len > 0 {
            header.payload = u32::try_from(len).unwrap_or(u32::MAX);
            header.pad = padding(self.position);
        }
        if let Some(crc) = crc {
            header.flags |= flags::CRC;
            header.payload_crc = crc;
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

    /// Ends the connection: both directions at once, so that what is in flight on the ring ends, too.
    pub(super) fn close(self) {
        let _ = nix::sys::socket::shutdown(self.fd.raw(), nix::sys::socket::Shutdown::Both);
    }
}

fn missing(needed: usize, available: usize) -> u32 {
    u32::try_from(needed.saturating_sub(available)).unwrap_or(u32::MAX).max(1)
}
