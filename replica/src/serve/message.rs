//! Messages: cut out of the stream where they lie, and answers queued behind each other.

use lh_ring::{Completion, Payload};
use lh_wire::{Control, HEADER_LEN, Header, MAX_PAYLOAD, OpCode, Pieces, Status as Answer, flags};

use super::core::{Body, ConnId, Input, RequestId};
use super::peer::{Peer, Phase, SEND_PATIENCE_NS, missing};
use super::request::Part;
use super::server::Server;
use super::status::count;
use super::token::kind;

/// Zeroes, for checksums over what is sent as zeroes.
static ZEROES: [u8; 4096] = [0; 4096];

/// What can be done with the bytes received.
enum Next {
    /// A whole message.
    Message(Header),
    /// More is to be received first.
    Receive,
    /// Answers are to be taken first.
    Clogged,
    /// No message of this protocol.
    Broken(lh_wire::DecodeError),
}

fn next(peer: &mut Peer) -> Next {
    peer.wants = 0;
    if peer.is_clogged() {
        return Next::Clogged;
    }
    let available = peer.rx.available();
    let Some(bytes) = peer.rx.peek::<HEADER_LEN>() else {
        peer.wants = missing(HEADER_LEN, available);
        return Next::Receive;
    };
    match Header::decode(&bytes) {
        Err(e) => Next::Broken(e),
        Ok(header) => {
            let whole = HEADER_LEN + usize::from(header.pad) + header.payload as usize;
            if available < whole {
                peer.wants = missing(whole, available);
                return Next::Receive;
            }
            Next::Message(header)
        }
    }
}

impl Server {
    pub(super) fn received(&mut self, c: Completion) {
        let Some(peer) = self.peers.of(c.token) else { return };
        let conn = peer.conn;
        match (&peer.phase, c.result) {
            (_, Ok(0) | Err(_)) => self.lose(conn),
            (Phase::Hello(_), Ok(_)) => self.read_hello(conn),
            (Phase::Open, Ok(_)) => self.read_messages(conn),
            (Phase::Waiting(_) | Phase::Leaving, Ok(_)) => {}
        }
    }

    /// Takes every whole message that has arrived.
    pub(super) fn read_messages(&mut self, conn: ConnId) {
        loop {
            let Some(peer) = self.peers.get(conn) else { return };
            match next(peer) {
                Next::Message(header) => self.take_message(conn, header),
                Next::Receive | Next::Clogged => return,
                Next::Broken(e) => {
                    tracing::warn!("connection {} is closed: {e}", conn.0);
                    return self.lose(conn);
                }
            }
        }
    }

    fn take_message(&mut self, conn: ConnId, header: Header) {
        let Some(peer) = self.peers.get(conn) else { return };
        peer.rx.skip(HEADER_LEN + usize::from(header.pad));
        let (header, payload) = if header.has(flags::LENT) {
            let Some(payload) = take_lent(peer, &header) else {
                tracing::warn!("connection {} is closed: a write of bytes that nobody lent", conn.0);
                return self.lose(conn);
            };
            (header.with_bytes_at_hand(), payload)
        } else {
            (header, peer.rx.take(header.payload as usize))
        };
        if header.has(flags::CRC) && payload.crc32c() != header.payload_crc {
            tracing::warn!("connection {}: checksum mismatch in {:?} {}", conn.0, header.op, header.tag);
            peer.tx.push_header(&header.response(Answer::Corrupt).encode());
            return;
        }
        let control = match header.op {
            OpCode::Control => serde_json::from_slice::<Control>(&payload.to_vec()).ok().map(Box::new),
            _ => None,
        };
        let request = self.requests.add(conn, header, payload);
        self.inputs.push_back(Input::Message { conn, request, header, control });
    }

    /// Connections that had too much queued go on reading when it has been taken.
    pub(super) fn resume_stalled(&mut self) {
        let stalled = |p: &Peer| {
            matches!(p.phase, Phase::Open) && p.wants == 0 && !p.rx.is_outstanding() && !p.is_clogged()
        };
        while let Some(conn) = self.peers.find(stalled) {
            self.read_messages(conn);
        }
    }

    pub(super) fn reply(&mut self, conn: ConnId, request: RequestId, mut header: Header, body: Body) {
        self.count_answer(&header);
        if let Some(peer) = self.peers.get(conn) {
            match body {
                Body::None => peer.tx.push_header(&header.encode()),
                Body::Data => {
                    let slot = self.requests.get(request);
                    if peer.checksums {
                        header.flags |= flags::CRC;
                        header.payload_crc = checksum(&slot.parts);
                    }
                    peer.tx.push_header(&header.encode());
                    for part in slot.parts.drain(..) {
                        match part {
                            Part::Zero(n) => peer.tx.push_padding(n),
                            Part::Bytes { payload, .. } | Part::Ready(payload) => {
                                peer.tx.push_payload(payload);
                            }
                        }
                    }
                }
                Body::Text(text) => push_bytes(peer, header, text.as_bytes()),
                Body::Map(page) => match serde_json::to_vec(&page) {
                    Ok(json) if json.len() <= MAX_PAYLOAD as usize => push_bytes(peer, header, &json),
                    _ => {
                        header.status = Answer::Refused;
                        push_bytes(peer, header, b"the map does not fit a message");
                    }
                },
                Body::State(state) => match serde_json::to_vec(&state) {
                    Ok(json) if json.len() <= MAX_PAYLOAD as usize => push_bytes(peer, header, &json),
                    _ => {
                        header.status = Answer::Refused;
                        push_bytes(peer, header, b"the replica's state does not fit a message");
                    }
                },
            }
        }
        self.requests.remove(request);
    }

    fn count_answer(&self, header: &Header) {
        let counts = self.status.counts();
        match header.op {
            _ if header.status != Answer::Ok => {}
            OpCode::Read => {
                count(&counts.reads, 1);
                count(&counts.read_bytes, header.length.into());
            }
            OpCode::Write => {
                count(&counts.writes, 1);
                count(&counts.written_bytes, header.length.into());
            }
            OpCode::WriteZeroes | OpCode::Unmap => count(&counts.zeroes, 1),
            OpCode::Flush => count(&counts.flushes, 1),
            _ => {}
        }
    }

    pub(super) fn sent(&mut self, c: &Completion) {
        let now = self.now();
        let Some(peer) = self.peers.of(c.token) else { return };
        let conn = peer.conn;
        if c.result.is_err() {
            return self.lose(conn);
        }
        match peer.phase {
            Phase::Leaving if peer.tx.is_empty() => self.hang_up(conn),
            // Some of it was taken: patience begins anew.
            Phase::Open => peer.deadline = (!peer.tx.is_empty()).then_some(now + SEND_PATIENCE_NS),
            _ => {}
        }
    }

    /// The connection is broken: the machine hears of it.
    pub(super) fn lose(&mut self, conn: ConnId) {
        self.hang_up(conn);
        self.inputs.push_back(Input::Closed { conn });
    }

    /// Ends the connection and forgets it. What was not read or not sent of it is gone.
    pub(super) fn hang_up(&mut self, conn: ConnId) {
        if let Some(peer) = self.peers.remove(conn) {
            self.ring.shutdown(conn.token(kind::SHUTDOWN), &peer.fd);
        }
    }

    /// Ends handshakes that take too long, and connections that take no answers.
    pub(super) fn part_with_the_late(&mut self, now: u64) {
        let late = |p: &Peer| p.deadline.is_some_and(|at| at <= now);
        while let Some(conn) = self.peers.find(late) {
            let is_stranger = self.peers.get(conn).is_some_and(|peer| peer.is_stranger());
            if !is_stranger || self.door.strangers.may_tell(now) {
                tracing::warn!("connection {} is closed: it takes too long", conn.0);
            }
            self.lose(conn);
        }
    }
}

/// The bytes of a write, where they lie in the engine's memory. `None` if they are not all there.
fn take_lent(peer: &mut Peer, header: &Header) -> Option<Payload> {
    let mut list = [0; Pieces::LEN_MAX];
    let list = list.get_mut(..header.payload as usize)?;
    if !peer.rx.peek_at(0, list) {
        return None;
    }
    peer.rx.skip(list.len());
    let pieces = Pieces::decode(list, header.length).ok()?;
    peer.lent.as_ref()?.payload(pieces.iter())
}

/// crc32c of what a read answers.
fn checksum(parts: &[Part]) -> u32 {
    parts.iter().fold(0, |crc, part| match part {
        Part::Bytes { payload, .. } | Part::Ready(payload) => {
            payload.segments().fold(crc, crc32c::crc32c_append)
        }
        Part::Zero(n) => {
            let whole = (0..n / ZEROES.len()).fold(crc, |crc, _| crc32c::crc32c_append(crc, &ZEROES));
            crc32c::crc32c_append(whole, &ZEROES[..n % ZEROES.len()])
        }
    })
}

/// Queues an answer whose payload is copied.
fn push_bytes(peer: &mut Peer, mut header: Header, bytes: &[u8]) {
    header.payload = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    if peer.checksums {
        header.flags |= flags::CRC;
        header.payload_crc = crc32c::crc32c(bytes);
    }
    peer.tx.push_header(&header.encode());
    bytes.chunks(lh_ring::Tx::HEADER_MAX).for_each(|part| peer.tx.push_header(part));
}
