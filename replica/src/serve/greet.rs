//! Who comes in: accepting, the handshake, and the last word to who is sent away.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};

use lh_block::Generation;
use lh_ring::sys::{random, receive_with_fds_now};
use lh_ring::{Completion, Fd, Lent, Token, tune_served};
use lh_wire::handshake::{
    CHALLENGE_LEN, Challenge, HELLO_LEN, Hello, Verdict, encode_welcome, is_grantee, is_reader,
};

use super::Address;
use super::core::{ConnId, Input, SessionHello};
use super::door::Proven;
use super::peer::{HELLO_PATIENCE_NS, HELLOS_MAX, Peer, Phase, missing};
use super::reader::READERS_MAX;
use super::server::Server;
use super::token::{OWNER, kind};

/// How long nothing is accepted after the system refused to: it is out of descriptors or memory.
const ACCEPT_PAUSE_NS: u64 = 1_000_000_000;

/// Maps the memory that comes with a hello which says so. The verdict is for one that says so and has none, or does not and
/// has some, and for what is no memory that can be borrowed; the engine then comes again and sends all bytes.
fn borrow(hello: &Hello, brought: Vec<OwnedFd>) -> Result<Option<Lent>, Verdict> {
    let mut brought = brought.into_iter();
    match (hello.lends, brought.next(), brought.next()) {
        (false, None, None) => Ok(None),
        (true, Some(memory), None) => {
            let lent = Lent::open(memory).inspect_err(|e| tracing::warn!("lent memory is not taken: {e}"));
            lent.map(Some).map_err(|_| Verdict::Invalid)
        }
        _ => Err(Verdict::Invalid),
    }
}

impl Server {
    /// Accepts the next connection if that is not going on, and there is room for its handshake.
    pub(super) fn pump_door(&mut self, now: u64) {
        let door = &mut self.door;
        if door.retry_at.is_some_and(|at| at <= now) {
            door.retry_at = None;
        }
        if door.accepting || door.retry_at.is_some() {
            return;
        }
        if let Some(listener) = &door.listener {
            door.accepting = true;
            self.ring.accept(Token::new(OWNER, kind::ACCEPT, 0, 0), listener);
        }
    }

    pub(super) fn accepted(&mut self, c: Completion) {
        self.door.accepting = false;
        let now = self.now();
        match (c.result, c.accepted) {
            (Ok(_), Some(fd)) if self.door.listener.is_some() => self.greet(fd, now),
            (Ok(_), _) => {}
            (Err(e), _) if self.door.listener.is_some() => {
                tracing::warn!("no connection accepted: {e}");
                self.door.retry_at = Some(now + ACCEPT_PAUSE_NS);
            }
            (Err(_), _) => {}
        }
    }

    fn greet(&mut self, fd: Fd, now: u64) {
        if self.peers.iter().filter(|p| p.is_stranger()).count() >= HELLOS_MAX {
            self.part_with_the_oldest_stranger(now);
        }
        // Whether an engine lives is asked of who it is connected to.
        tune_served(&fd);
        let mut nonce = [0; 32];
        if let Err(e) = random(&mut nonce) {
            tracing::warn!("a connection is turned away: {e}");
            return;
        }
        let is_unix = matches!(self.door.address(), Address::Unix(_));
        let challenge = if is_unix { Challenge::of_neighbour(nonce) } else { Challenge::of_distant(nonce) };
        let bytes: [u8; CHALLENGE_LEN] = *challenge.as_bytes();
        let conn = self.peers.add(&self.pool, fd, challenge, is_unix, now + HELLO_PATIENCE_NS);
        if let Some(peer) = self.peers.get(conn) {
            peer.tx.push_header(&bytes);
            peer.wants = missing(HELLO_LEN, 0);
        }
    }

    /// Makes room for who comes: whoever reaches the port can connect as often as he likes, say nothing, and would keep the engine
    /// out.
    fn part_with_the_oldest_stranger(&mut self, now: u64) {
        // They are numbered in the order in which they came.
        let oldest = self.peers.iter().filter(|p| p.is_stranger()).map(|p| p.conn).min_by_key(|conn| conn.0);
        if let Some(conn) = oldest {
            if self.door.strangers.may_tell(now) {
                tracing::warn!(
                    "connection {} is closed: {HELLOS_MAX} are in their handshake, and more come",
                    conn.0
                );
            }
            self.lose(conn);
        }
    }

    /// Something of a hello has come over a unix socket, perhaps with a descriptor. No more than the hello is taken: who
    /// has been let in is read by the ring, and sends no descriptors.
    pub(super) fn knocked(&mut self, c: &Completion) {
        let Some(peer) = self.peers.of(c.token) else { return };
        let conn = peer.conn;
        peer.awaited = false;
        if !matches!(peer.phase, Phase::Hello(_)) {
            return;
        }
        let mut bytes = [0; HELLO_LEN];
        let room = &mut bytes[..HELLO_LEN.saturating_sub(peer.rx.available())];
        match receive_with_fds_now(peer.fd.as_fd(), room) {
            Ok((n, descriptors)) if n > 0 && peer.rx.feed(&bytes[..n]) => {
                peer.brought.extend(descriptors);
                // One too many says all that there is to say.
                peer.brought.truncate(2);
                self.read_hello(conn);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Ok(_) | Err(_) => self.lose(conn),
        }
    }

    /// The hello, once it is there.
    pub(super) fn read_hello(&mut self, conn: ConnId) {
        let Some(peer) = self.peers.get(conn) else { return };
        let Some(bytes) = peer.rx.peek::<HELLO_LEN>() else {
            peer.wants = missing(HELLO_LEN, peer.rx.available());
            return;
        };
        peer.rx.skip(HELLO_LEN);
        peer.wants = 0;
        peer.deadline = None;
        let Phase::Hello(challenge) = std::mem::replace(&mut peer.phase, Phase::Leaving) else { return };
        let examined = self.door.examine(&bytes, &challenge);
        peer.phase = Phase::Waiting(Box::new(((*challenge).clone(), bytes)));
        let brought = std::mem::take(&mut peer.brought);
        let examined = examined.and_then(|(hello, proven)| {
            peer.lent = borrow(&hello, brought)?;
            Ok((hello, proven))
        });
        match examined {
            Ok((hello, proven)) if is_reader(&bytes) => {
                self.admit_reader(conn, &challenge, &bytes, hello.checksums, proven);
            }
            Ok((hello, _)) => {
                peer.checksums = hello.checksums;
                let hello = SessionHello {
                    generation: hello.generation,
                    instance: hello.instance,
                    session: hello.session,
                    queue: hello.queue,
                    queues: hello.queues,
                };
                if is_grantee(&bytes) {
                    self.admit_grantee(conn, &challenge, &bytes, hello);
                } else {
                    self.inputs.push_back(Input::Hello { conn, hello });
                }
            }
            Err(verdict) => {
                let generation = self.core.generation();
                self.refuse(conn, verdict, generation);
            }
        }
    }

    /// Queues the replica's last word of the handshake.
    fn answer_hello(&mut self, conn: ConnId, verdict: Verdict, generation: Generation) -> Option<&mut Peer> {
        let peer = self.peers.get(conn)?;
        let Phase::Waiting(waiting) = &peer.phase else { return None };
        let (challenge, hello) = &**waiting;
        let bytes = encode_welcome(verdict, generation, challenge, hello, self.door.key(Proven::Key));
        peer.tx.push_header(&bytes);
        Some(peer)
    }

    pub(super) fn welcome(&mut self, conn: ConnId, generation: Generation) {
        tracing::info!("connection {} let in with generation {generation}", conn.0);
        let Some(peer) = self.answer_hello(conn, Verdict::Welcome, generation) else { return };
        peer.phase = Phase::Open;
        // What the engine sent behind its hello is at the beginning of the stream of messages.
        if peer.rx.set_position(0) {
            self.read_messages(conn);
        } else {
            self.lose(conn);
        }
    }

    pub(super) fn refuse(&mut self, conn: ConnId, verdict: Verdict, generation: Generation) {
        let now = self.now();
        if self.door.strangers.may_tell(now) {
            tracing::info!("connection {} refused: {verdict}", conn.0);
        }
        let deadline = now + HELLO_PATIENCE_NS;
        if let Some(peer) = self.answer_hello(conn, verdict, generation) {
            peer.phase = Phase::Leaving;
            peer.deadline = Some(deadline);
        }
    }

    /// Hands a connection that has proved a key to a thread of its own.
    pub(super) fn admit_reader(
        &mut self,
        conn: ConnId,
        challenge: &Challenge,
        hello: &[u8; HELLO_LEN],
        checksums: bool,
        proven: Proven,
    ) {
        let (generation, deadline) = (self.core.generation(), self.now() + HELLO_PATIENCE_NS);
        let word = |verdict| encode_welcome(verdict, generation, challenge, hello, self.door.key(proven));
        let Some(place) = self.readers.place() else {
            tracing::warn!("a reader is turned away: {READERS_MAX} others read already");
            let refusal = word(Verdict::Unusable);
            if let Some(peer) = self.peers.get(conn) {
                peer.tx.push_header(&refusal);
                (peer.phase, peer.deadline) = (Phase::Leaving, Some(deadline));
            }
            return;
        };
        let welcome = word(Verdict::Welcome);
        let Some(peer) = self.peers.remove(conn) else { return };
        let is_unix = matches!(self.door.address(), Address::Unix(_));
        let may_read = proven == Proven::Key;
        let fd = peer.fd.as_fd().try_clone_to_owned();
        let started = fd.and_then(|fd| self.readers.start(place, fd, is_unix, checksums, may_read, welcome));
        match started {
            Ok(()) => tracing::info!("connection {} reads snapshots", conn.0),
            Err(e) => tracing::warn!("a reader is turned away: {e}"),
        }
    }

    /// Nobody comes in any more, and nobody stays.
    pub(super) fn close_door(&mut self) {
        if let Some(listener) = self.door.listener.take() {
            self.ring.cancel(Token::new(OWNER, kind::ACCEPT, 0, 0));
            drop(listener);
        }
        self.door.retry_at = None;
        let all: Vec<ConnId> = self.peers.iter().map(|p| p.conn).collect();
        all.into_iter().for_each(|conn| self.lose(conn));
    }
}
