//! The server: an NBD export on a queue thread's ring.
//!
//! - Everything is bounded: connections, those in transmission, bytes of payloads in flight, answers that wait. Beyond a
//!   bound clients are refused or not read from; nobody is served worse than the others for long.
//! - A turn takes what came, submits it, and sends what is ready: one receive and one send per connection and turn, all
//!   in the loop's one system call.
//! - Time is counted in ticks of a second, and only while somebody is waited for: an idle server does nothing.

mod clock;
mod lanes;
mod look;
mod turn;

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use lh_block::Device;
use lh_ring::{
    CHUNK, Completion, ConnectionCount, Doors, Fd, Frontend, Payload, Place, Places, Pool, Ring, Token,
    tune_served,
};
use tracing::{debug, warn};

use crate::budget::{Budget, Claimant};
use crate::connection::{Connection, Served, Why, served_geometry};
use crate::export::{Agreed, Export};
use crate::handshake::{Handshake, Outcome};
use crate::listen::{Listener, PathGuard};
use crate::negotiate::{Admission, Offer};
use crate::requests::Requests;
use crate::transmit::Session;

use clock::Clock;
use lanes::Lanes;

pub use lanes::Lane;

/// Kinds of [`Token`].
mod kind {
    pub(super) const ACCEPT: u8 = 0;
    pub(super) const POLL: u8 = 1;
    pub(super) const RECV: u8 = 2;
    pub(super) const SEND: u8 = 3;
    pub(super) const TICK: u8 = 4;
}

/// Bounds of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections, in whatever phase. For a further one the oldest handshake that goes on is given up, which the protocol allows where
    /// clients seem to deny others the service ("Termination of the session during option haggling"); where there is none it is closed as
    /// soon as it is accepted.
    pub connections: usize,
    /// Connections in transmission, which hold memory of the pool. Further ones are refused in the handshake.
    pub transmissions: usize,
    /// Bytes of payloads in flight, of all connections together.
    pub payload_bytes: usize,
    /// The same of one connection.
    pub connection_bytes: usize,
    /// Receives that need memory wait while the pool has fewer free chunks: the rest is for what brings memory back.
    pub spare_chunks: usize,
    /// Seconds that a client may take for its handshake, for the bytes of a write, or for 1 MiB of its answers, or be silent in
    /// the middle of another request: long enough for a network to recover, short enough that what it holds comes back (`docs/invariants.md`, 3).
    pub patience_s: u32,
}

impl Limits {
    /// Bounds for a server that shares this pool with its device: half of it for payloads, a quarter for the buffers
    /// of the connections (each holds a chunk to receive and one for its answers), an eighth kept free.
    pub fn of_pool(pool: &Pool) -> Self {
        let hard = pool.hard_bytes();
        Self {
            connections: 1024,
            transmissions: (hard / CHUNK / 8).clamp(1, 64),
            payload_bytes: hard / 2,
            connection_bytes: hard / 8,
            spare_chunks: hard / CHUNK / 8,
            patience_s: 30,
        }
    }
}

/// What becomes of the requests that come while a server is being stopped. Those already submitted are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// They get `NBD_ESHUTDOWN`: the volume goes away.
    Refuse,
    /// They get no answer: another server takes over, and the client sends them again.
    Leave,
}

/// How much a server has to do at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Connections in whatever phase.
    pub connections: usize,
    /// Those in transmission.
    pub transmissions: usize,
    /// Those that wait for what an answer of the device may free.
    pub blocked: usize,
    /// Requests that the device has.
    pub requests: usize,
    /// Bytes of payloads in flight.
    pub payload_bytes: usize,
}

/// A callback that may move an accepted connection to another thread; what it gives back stays here.
pub type Spread = Box<dyn FnMut(OwnedFd) -> Option<OwnedFd>>;

/// An NBD server for one queue of a volume.
pub struct Server {
    export: Export,
    limits: Limits,
    owner: u8,
    pool: Pool,
    /// Each removes a unix socket's path in the end.
    doors: Doors<PathGuard>,
    spread: Option<Spread>,
    count: ConnectionCount,
    places: Places<Handshake, Box<Connection>>,
    /// Where the next round over the connections begins.
    cursor: usize,
    lanes: Lanes,
    requests: Requests,
    budget: Budget,
    clock: Clock,
    ending: Option<Ending>,
    /// Connections that were closed while the device had requests of theirs, which does not know it yet.
    gone: Vec<Claimant>,
    scratch: Vec<u8>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("export", &self.export)
            .field("load", &self.load())
            .finish_non_exhaustive()
    }
}

impl Server {
    /// A server without a listener. `owner` marks its tokens; `depth` is the device's.
    pub fn new(export: Export, limits: Limits, owner: u8, pool: &Pool, depth: u32) -> Self {
        Self {
            export,
            limits,
            owner,
            pool: pool.clone(),
            doors: Doors::new(owner, kind::ACCEPT),
            spread: None,
            count: ConnectionCount::default(),
            places: Places::default(),
            cursor: 0,
            lanes: Lanes::default(),
            requests: Requests::with_capacity(depth),
            budget: Budget::new(limits.payload_bytes),
            clock: Clock::default(),
            ending: None,
            gone: Vec::new(),
            scratch: Vec::with_capacity(16 << 10),
        }
    }

    /// Accepts connections from this socket, too.
    pub fn listen(&mut self, ring: &mut Ring, listener: Listener) {
        let (fd, guard) = listener.split();
        self.doors.open(ring, fd, guard);
    }

    /// Lets `spread` decide which accepted connections stay here.
    pub fn set_spread(&mut self, spread: Spread) {
        self.spread = Some(spread);
    }

    /// Counts its connections with those of the volume's other servers, of iSCSI too. To be said of every server of a volume that
    /// has more than one, before it serves anybody.
    pub fn count_with(&mut self, count: ConnectionCount) {
        self.count = count;
    }

    /// Serves a connection that was accepted elsewhere, from its handshake on: its slot and serial number, unless it was
    /// refused.
    pub fn adopt(&mut self, ring: &mut Ring, connection: OwnedFd) -> Option<(u16, u32)> {
        if !self.make_room() {
            return None;
        }
        tune_served(&connection);
        let fd = Fd::from(connection);
        let handshake = Handshake::begin(fd.clone(), self.count.add(), self.clock.now(), &mut self.scratch)?;
        let (slot, serial) = self.places.insert(handshake);
        ring.poll_in(self.token(kind::POLL, slot, serial), &fd);
        Some((slot, serial))
    }

    /// Serves a connection from its first request on, for a client that agreed on simple replies with an earlier server of this
    /// export, or with this one on another connection. To be followed by a turn.
    pub fn adopt_agreed(&mut self, connection: OwnedFd) {
        if !self.make_room() {
            return;
        }
        tune_served(&connection);
        let (fd, session) = (Fd::from(connection), self.session(Agreed::default()));
        let counted = self.count.add();
        self.places.insert_served(|slot, serial| {
            debug!(slot, "transmission begins, as agreed before");
            Box::new(Connection::new((fd, counted), session, (slot, serial), &self.pool))
        });
    }

    const fn session(&self, agreed: Agreed) -> Session {
        Session { agreed, read_only: self.export.read_only }
    }

    /// Makes room for one more connection, if there is none; false if it cannot be let in. Whoever reaches the port may connect as often as
    /// he likes and say nothing, and would keep everybody else out.
    fn make_room(&mut self) -> bool {
        if self.ending.is_some() {
            return false;
        }
        if self.places.len() < self.limits.connections {
            return true;
        }
        if let Some(count) = self.doors.turns_away(Instant::now()) {
            let most = self.limits.connections;
            warn!(
                "{count} connections closed for want of a place, handshakes that go on first: there are {most}, as many as may be"
            );
        }
        let Some(oldest) = self.places.oldest_handshake(|_| true) else { return false };
        self.close(oldest, Why::GivenUp);
        true
    }

    /// Begins to stop: listens no more and finishes. To be followed by turns until [`Server::is_done`].
    pub fn stop(&mut self, ring: &mut Ring, ending: Ending) {
        self.doors.close(ring);
        self.ending = Some(ending);
        self.clock.begin_ending();
        for index in 0..self.places.served().len() {
            let slot = self.places.served()[index];
            if let Some(connection) = self.places.connection(slot) {
                connection.stop(ending == Ending::Refuse, &mut self.budget);
            }
        }
    }

    /// True when a stopped server has nothing more to do: every submitted request has been answered, every
    /// connection is closed.
    pub fn is_done(&self) -> bool {
        self.ending.is_some() && self.places.is_empty() && self.requests.len() == 0
    }

    /// How much there is to do at the moment.
    pub fn load(&self) -> Load {
        Load {
            connections: self.places.len(),
            transmissions: self.places.served().len(),
            blocked: self.blocked(),
            requests: self.requests.len(),
            payload_bytes: self.budget.used(),
        }
    }

    fn blocked(&self) -> usize {
        let wants = self.places.served().iter().filter_map(|slot| self.places.peer(*slot)).map(|c| c.wants);
        wants.filter(|wants| *wants == Served::Blocked).count()
    }

    fn token(&self, kind: u8, slot: u16, serial: u32) -> Token {
        Token::new(self.owner, kind, slot, serial)
    }

    fn accepted(&mut self, ring: &mut Ring, completion: Completion) {
        let connection = match self.doors.accepted(ring, completion) {
            Ok(Some(connection)) => connection,
            Ok(None) => return,
            // Out of descriptors or memory: once more with the next tick.
            Err(e) => return warn!("cannot accept a connection: {e}"),
        };
        let stays = match &mut self.spread {
            Some(spread) => spread(connection),
            None => Some(connection),
        };
        if let Some(connection) = stays {
            self.adopt(ring, connection);
        }
    }

    fn admission(&self) -> Admission {
        if self.ending.is_some() {
            Admission::Stopping
        } else if self.places.served().len() >= self.limits.transmissions {
            Admission::Full
        } else {
            Admission::Open
        }
    }

    fn greet(&mut self, ring: &mut Ring, device: &dyn Device<Payload>, slot: u16, serial: u32) {
        let admission = self.admission();
        let offer = Offer { export: &self.export, geometry: served_geometry(device), admission };
        let Some(handshake) = self.places.handshake(slot) else { return };
        match handshake.advance(&offer, &mut self.scratch) {
            Outcome::Wait => {
                let fd = handshake.fd.clone();
                ring.poll_in(self.token(kind::POLL, slot, serial), &fd);
            }
            Outcome::Ready(agreed) => self.begin_transmission(slot, serial, agreed),
            Outcome::Close(reason) => {
                if let Some(reason) = reason {
                    debug!(slot, "handshake ended: {reason}");
                }
                self.places.remove(slot);
            }
        }
    }

    fn begin_transmission(&mut self, slot: u16, serial: u32, agreed: Agreed) {
        debug!(slot, ?agreed, "transmission begins");
        let session = self.session(agreed);
        let Some(fd) = self.places.handshake(slot).map(|handshake| handshake.fd.clone()) else { return };
        let connection = Connection::new((fd, self.count.add()), session, (slot, serial), &self.pool);
        self.places.promote(slot, Box::new(connection));
    }

    fn received(&mut self, slot: u16, result: &io::Result<u32>) {
        let now = self.clock.now();
        let Some(connection) = self.places.connection(slot) else { return };
        match result {
            // A client that only lost its way would wait for its answers; one that is gone must not hold a place
            // for as long as the volume may pause.
            Ok(0) if connection.is_finishing() => {}
            Ok(0) => self.close(slot, Why::Left),
            Ok(_) => connection.received(now),
            Err(e) => self.close(slot, Why::from(e)),
        }
    }

    fn sent(&mut self, slot: u16, result: &io::Result<u32>) {
        let now = self.clock.now();
        let Some(connection) = self.places.connection(slot) else { return };
        connection.sent(&mut self.budget);
        match result {
            Ok(bytes) => connection.taken(*bytes as usize, now),
            Err(_) if connection.goes_on_unheard(&self.pool, &mut self.budget) => {}
            Err(e) => self.close(slot, Why::from(e)),
        }
    }

    fn close(&mut self, slot: u16, why: Why) {
        debug!(slot, "connection closed: {why}");
        let claimant = (slot, self.places.serial(slot));
        if let Some(Place::Connection(connection)) = self.places.end(slot) {
            if connection.has_in_flight() {
                self.gone.push(claimant);
            }
            connection.close(&mut self.budget);
        }
    }
}

impl Frontend for Server {
    fn completion(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>, completion: Completion) {
        let Token { kind, slot, data: serial, .. } = completion.token;
        match kind {
            kind::ACCEPT => return self.accepted(ring, completion),
            kind::TICK => return self.tick(ring),
            _ => {}
        }
        if !self.places.is_current(slot, serial) {
            // Of a connection that has been closed.
            return;
        }
        match kind {
            kind::POLL => self.greet(ring, device, slot, serial),
            kind::RECV => self.received(slot, &completion.result),
            _ => self.sent(slot, &completion.result),
        }
    }

    fn turn(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        self.serve_all(device);
        self.let_lanes_in(ring);
        self.arm(ring);
        self.abandon(device);
    }

    fn looks(&self) -> bool {
        true
    }

    fn look(&mut self, device: &mut dyn Device<Payload>) {
        self.end_who_left();
        self.abandon(device);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.places.shut_all();
    }
}
