//! Connections: what is received from each and what waits to be sent to it.

use std::os::fd::OwnedFd;

use lh_ring::{Fd, Lent, Pool, Rx, Token, Tx};
use lh_wire::PAYLOAD_ALIGN;
use lh_wire::handshake::{Challenge, HELLO_LEN};

use super::core::ConnId;
use super::token::OWNER;

/// How long a handshake may take from the connection on.
pub(super) const HELLO_PATIENCE_NS: u64 = 5_000_000_000;

/// How long a connection that takes no answers is kept (`docs/invariants.md`, 3).
pub(super) const SEND_PATIENCE_NS: u64 = 30_000_000_000;

/// Connections in their handshake: a peer without the key costs no more than these. When one more comes the oldest goes.
pub(super) const HELLOS_MAX: usize = 32;

/// Answers queued for one connection before nothing more is read from it: as much as the kernel's buffers hold.
pub(super) const QUEUED_MAX: usize = 8 << 20;

/// How far a connection has come.
pub(super) enum Phase {
    /// The challenge is sent, the hello has not arrived.
    Hello(Box<Challenge>),
    /// The machine decides.
    Waiting(Box<(Challenge, [u8; HELLO_LEN])>),
    /// Let in.
    Open,
    /// Sent away: closed when the last word has left.
    Leaving,
}

/// A connection.
pub(super) struct Peer {
    pub(super) conn: ConnId,
    pub(super) fd: Fd,
    pub(super) rx: Rx,
    pub(super) tx: Tx,
    pub(super) phase: Phase,
    /// Payloads in both directions carry checksums.
    pub(super) checksums: bool,
    /// It is on this host: a descriptor may come with the hello.
    pub(super) may_lend: bool,
    /// What came with the hello so far: one too many at most.
    pub(super) brought: Vec<OwnedFd>,
    /// The engine's memory, where the bytes of writes may be.
    pub(super) lent: Option<Lent>,
    /// The ring says when there is something to be read of the hello.
    pub(super) awaited: bool,
    /// When it is closed unless something happens: the end of a handshake, or of the patience with what is not taken.
    pub(super) deadline: Option<u64>,
    /// Bytes that the next message needs beyond those received; 0: nothing is to be received now.
    pub(super) wants: u32,
}

impl Peer {
    /// True for who has not been let in, and does not wait for it by right.
    pub(super) fn is_stranger(&self) -> bool {
        matches!(self.phase, Phase::Hello(_) | Phase::Leaving)
    }

    /// True if so much waits to be sent that nothing more is to be read.
    pub(super) fn is_clogged(&self) -> bool {
        self.tx.queued_bytes() > QUEUED_MAX
    }
}

/// All connections, by place. A place is used again, a [`ConnId`] never: it carries a count beside the place.
#[derive(Default)]
pub(super) struct Peers {
    places: Vec<Option<Peer>>,
    count: u32,
}

impl ConnId {
    #[expect(clippy::cast_possible_truncation, reason = "the lower 16 bits are the place")]
    const fn place(self) -> u16 {
        self.0 as u16
    }

    #[expect(clippy::cast_possible_truncation, reason = "48 bits of count, of which completions compare 32")]
    const fn count(self) -> u32 {
        (self.0 >> 16) as u32
    }

    /// A token for an operation on the connection.
    pub(super) const fn token(self, kind: u8) -> Token {
        Token::new(OWNER, kind, self.place(), self.count())
    }
}

impl Peers {
    pub(super) fn add(
        &mut self,
        pool: &Pool,
        fd: Fd,
        challenge: Challenge,
        may_lend: bool,
        deadline: u64,
    ) -> ConnId {
        let place = self.places.iter().position(Option::is_none).unwrap_or(self.places.len());
        if place == self.places.len() {
            self.places.push(None);
        }
        self.count = self.count.wrapping_add(1);
        let conn = ConnId(u64::from(self.count) << 16 | place as u64);
        #[expect(clippy::cast_possible_truncation, reason = "512")]
        let congruent = PAYLOAD_ALIGN as u32;
        self.places[place] = Some(Peer {
            conn,
            fd,
            rx: Rx::new(pool, congruent),
            tx: Tx::new(pool),
            phase: Phase::Hello(Box::new(challenge)),
            checksums: false,
            may_lend,
            brought: Vec::new(),
            lent: None,
            awaited: false,
            deadline: Some(deadline),
            wants: 0,
        });
        conn
    }

    pub(super) fn get(&mut self, conn: ConnId) -> Option<&mut Peer> {
        self.places.get_mut(usize::from(conn.place()))?.as_mut().filter(|p| p.conn == conn)
    }

    /// The connection of a completion, unless it is gone.
    pub(super) fn of(&mut self, token: Token) -> Option<&mut Peer> {
        let peer = self.places.get_mut(usize::from(token.slot))?.as_mut()?;
        (peer.conn.count() == token.data).then_some(peer)
    }

    /// Takes a connection out; operations in flight keep their memory by themselves.
    pub(super) fn remove(&mut self, conn: ConnId) -> Option<Peer> {
        self.get(conn)?;
        self.places.get_mut(usize::from(conn.place()))?.take()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.places.iter_mut().flatten()
    }

    pub(super) fn find(&self, wanted: impl Fn(&Peer) -> bool) -> Option<ConnId> {
        self.iter().find(|p| wanted(p)).map(|p| p.conn)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.places.iter().flatten()
    }
}

/// How many bytes are missing.
pub(super) fn missing(needed: usize, available: usize) -> u32 {
    u32::try_from(needed.saturating_sub(available)).unwrap_or(u32::MAX)
}
