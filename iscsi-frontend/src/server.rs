//! The server: an iSCSI target on a queue thread's ring.
//!
//! - One server has all sessions of its target, and so its reservations, unit attentions and the order of commands that
//!   need a range for themselves: a volume is shown over iSCSI through one of its queues.
//! - Everything is bounded: connections, sessions, commands, bytes of payloads, answers that wait. No session ever waits
//!   in the middle of its stream for memory: what it may send unasked has a place of its own, for what it is asked for
//!   room is made before it is asked.
//! - A turn takes what came, submits it, and sends what is ready: one receive and one send per connection and turn, all
//!   in the loop's one system call.

mod clock;
mod commands;
mod functions;
mod look;
mod ports;
mod text;
mod turn;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use lh_block::Device;
use lh_ring::{
    Census, Completion, ConnectionCount, Doors, Fd, Frontend, Payload, Place, Places, Pool, Ring, Token,
    tune_served,
};
use tracing::{debug, info, warn};

use crate::budget::Budget;
use crate::connection::{Connection, Why};
use crate::handshake::{Handshake, Outcome};
use crate::login::{Existing, Kind, Offer, SEED};
use crate::pdu::login_status;
use crate::scsi::keep::{FileStore, NoStore, Store};
use crate::scsi::{LogicalUnit, NexusId, OpenError};
use crate::session::{Phase, Session};
use crate::target::{Limits, Listener, Target};
use crate::task::Tasks;

use clock::Clock;
use functions::Function;
use ports::{Port, Ports};

/// Kinds of [`Token`].
mod kind {
    pub(super) const ACCEPT: u8 = 0;
    pub(super) const POLL: u8 = 1;
    pub(super) const RECV: u8 = 2;
    pub(super) const SEND: u8 = 3;
    pub(super) const TICK: u8 = 4;
}

/// What becomes of the commands that come while a server is being stopped. Those already submitted are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// They get NOT READY, and initiators are asked to log out: the volume goes away.
    Refuse,
    /// They get no answer: another server takes over, and the initiator logs in there and sends them again.
    Leave,
}

/// How much a server has to do at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Connections, those that log in included.
    pub connections: usize,
    /// Sessions with commands, not those for discovery.
    pub sessions: usize,
    /// Commands on their way.
    pub commands: usize,
    /// Logouts, resets and aborts whose answer waits for commands to end.
    pub settling: usize,
    /// Bytes of payloads that are counted: reads, and writes that were asked for.
    pub payload_bytes: usize,
}

/// An iSCSI target with one disk.
pub struct Server {
    target: Target,
    unit: LogicalUnit,
    limits: Limits,
    owner: u8,
    pool: Pool,
    doors: Doors<()>,
    places: Places<Box<Handshake>, Box<Connection>>,
    ports: Ports,
    /// Where the next round over the connections begins.
    cursor: usize,
    tasks: Tasks,
    /// Commands that wait for memory, for a place in the device, or for others to leave their range.
    waiting: VecDeque<u64>,
    functions: Vec<Function>,
    count: ConnectionCount,
    /// The count by which sessions were alone that have ended, and left in the device what was not given up.
    left_alone: Option<Census>,
    /// Commands whose initiator is gone, which the device has and has not been told so.
    gone: Vec<u64>,
    budget: Budget,
    clock: Clock,
    ending: Option<Ending>,
    /// For what commands report.
    reply: Vec<u8>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("target", &self.target)
            .field("load", &self.load())
            .finish_non_exhaustive()
    }
}

impl Server {
    /// A server without a listener. `owner` marks its tokens.
    ///
    /// # Errors
    /// [`OpenError`]: the reservations cannot be read, so nobody may be let in.
    pub fn new(target: Target, limits: Limits, owner: u8, pool: &Pool) -> Result<Self, OpenError> {
        let store: Box<dyn Store> = match &target.reservations {
            Some(path) => Box::new(FileStore::new(path.clone())),
            None => Box::new(NoStore),
        };
        let unit = LogicalUnit::open(target.identity.clone(), target.read_only, target.write_cache, store)?;
        let commands = limits.sessions * limits.window as usize;
        Ok(Self {
            target,
            unit,
            limits,
            owner,
            pool: pool.clone(),
            doors: Doors::new(owner, kind::ACCEPT),
            places: Places::default(),
            ports: Ports::default(),
            cursor: 0,
            tasks: Tasks::with_capacity(commands.min(256)),
            waiting: VecDeque::with_capacity(commands.min(256)),
            functions: Vec::new(),
            count: ConnectionCount::default(),
            left_alone: None,
            gone: Vec::new(),
            budget: Budget::new(limits.payload_bytes),
            clock: Clock::default(),
            ending: None,
            reply: Vec::with_capacity(4096),
        })
    }

    /// Counts its sessions with the connections of the volume's other servers, whatever they speak. To be said before it serves anybody
    /// if the volume has others.
    pub fn count_with(&mut self, count: ConnectionCount) {
        self.count = count;
    }

    /// Accepts connections from this socket, too.
    pub fn listen(&mut self, ring: &mut Ring, listener: Listener) {
        self.doors.open(ring, listener.into_fd(), ());
    }

    /// Serves a connection that was accepted elsewhere, from its login on.
    pub fn adopt(&mut self, ring: &mut Ring, connection: OwnedFd) {
        if self.ending.is_some() || !self.make_room() {
            return;
        }
        tune_served(&connection);
        let mut seed = [0; SEED];
        if let Err(e) = lh_ring::sys::random(&mut seed) {
            // A guessable challenge would let anybody in.
            warn!("no random numbers: connection refused: {e}");
            return;
        }
        // There may have been nobody for whom time was counted.
        self.clock.read();
        let fd = Fd::from(connection);
        let (slot, serial) = self.places.insert(Box::new(Handshake::new(fd.clone(), self.clock.now(), seed)));
        ring.poll_in(self.token(kind::POLL, slot, serial), &fd);
    }

    /// Makes room for one more connection, if there is none, by the oldest login that has not come to its end; false if there is no such
    /// login. Whoever reaches the port may connect as often as he likes and say nothing, and would keep those out who know the secret.
    fn make_room(&mut self) -> bool {
        if self.places.len() < self.limits.connections {
            return true;
        }
        if let Some(count) = self.doors.turns_away(Instant::now()) {
            let most = self.limits.connections;
            warn!(
                "{count} connections closed for want of a place, logins that go on first: there are {most}, as many as may be"
            );
        }
        let Some(oldest) = self.places.oldest_handshake(|handshake| handshake.finished.is_none()) else {
            return false;
        };
        debug!(slot = oldest, "login given up for another connection");
        self.places.end(oldest).is_some()
    }

    /// Begins to stop: listens no more and finishes. To be followed by turns until [`Server::is_done`].
    pub fn stop(&mut self, ring: &mut Ring, ending: Ending) {
        /// Seconds that initiators are given for their logout.
        const SECONDS: u16 = 2;
        self.doors.close(ring);
        self.ending = Some(ending);
        self.clock.begin_ending();
        match ending {
            Ending::Refuse => self.unit.stop(),
            // What has not reached the device is sent again elsewhere.
            Ending::Leave => self.leave_waiting(),
        }
        for index in 0..self.places.served().len() {
            let slot = self.places.served()[index];
            let Some(connection) = self.places.connection(slot) else { continue };
            match ending {
                Ending::Refuse => connection.ask_for_logout(SECONDS),
                Ending::Leave => connection.finishing = Some(Why::Stopped),
            }
        }
    }

    /// True when a stopped server has nothing more to do: every submitted request has been answered, every
    /// connection is closed.
    pub fn is_done(&self) -> bool {
        self.ending.is_some() && self.places.is_empty() && self.tasks.len() == 0
    }

    /// How much there is to do at the moment.
    pub fn load(&self) -> Load {
        Load {
            connections: self.places.len(),
            sessions: self.ports.sessions(),
            commands: self.tasks.len(),
            settling: self.functions.len(),
            payload_bytes: self.budget.used(),
        }
    }

    fn token(&self, kind: u8, slot: u16, serial: u32) -> Token {
        Token::new(self.owner, kind, slot, serial)
    }

    fn accepted(&mut self, ring: &mut Ring, completion: Completion) {
        match self.doors.accepted(ring, completion) {
            Ok(Some(connection)) => self.adopt(ring, connection),
            Ok(None) => {}
            // Out of descriptors or memory: once more with the next tick.
            Err(e) => warn!("cannot accept a connection: {e}"),
        }
    }

    /// The status with which logins are refused at the moment.
    fn closed(&self) -> u16 {
        if self.ending.is_some() {
            login_status::UNAVAILABLE
        } else if self.places.served().len() >= self.limits.sessions {
            login_status::OUT_OF_RESOURCES
        } else {
            login_status::SUCCESS
        }
    }

    fn greet(&mut self, ring: &mut Ring, slot: u16, serial: u32) {
        let (closed, tsih) = (self.closed(), self.ports.free_tsih());
        let ports = &self.ports;
        let offer = Offer {
            target: &self.target.name,
            chap: self.target.chap.as_ref(),
            first_burst: self.limits.first_burst,
            window: self.limits.window,
            tsih,
            session_of: &|name| {
                let port = ports.find(name).filter(|port| port.session.is_some())?;
                Some(Existing { tsih: port.tsih, cid: port.cid, agreed: port.agreed })
            },
            closed,
        };
        let Some(handshake) = self.places.handshake(slot) else { return };
        match handshake.advance(&offer) {
            Outcome::Wait => {
                let fd = handshake.fd.clone();
                ring.poll_in(self.token(kind::POLL, slot, serial), &fd);
            }
            Outcome::Finished => {
                self.give_up_older(slot);
                self.try_begin(slot, serial);
            }
            Outcome::Close(status) => {
                if let Some(status) = status {
                    info!(slot, "login refused with status {status:#06x}");
                }
                self.places.remove(slot);
            }
        }
    }

    /// An initiator port that has logged in again while its last login waits for old commands has given that one up. While
    /// the volume pauses it does so every few seconds, and all of them would have a place.
    fn give_up_older(&mut self, slot: u16) {
        let Some(port) = self.waiting_port(slot) else { return };
        for other in self.places.slots().filter(|other| *other != slot) {
            if self.waiting_port(other).as_ref() == Some(&port) {
                debug!(slot = other, "login given up for a newer one");
                self.places.end(other);
            }
        }
    }

    /// The initiator port of a login that has come to its end, and waits for its session.
    fn waiting_port(&mut self, slot: u16) -> Option<String> {
        let (established, _) = self.places.handshake(slot)?.finished.as_ref()?;
        (established.kind == Kind::Normal).then(|| established.port())
    }

    /// Begins the session of a login, unless old commands of the same port are still on their way.
    fn try_begin(&mut self, slot: u16, serial: u32) {
        let Some(handshake) = self.places.handshake(slot) else { return };
        let Some((established, _)) = &handshake.finished else { return };
        let (kind, name, goes_on) = (established.kind, established.port(), established.tsih != 0);
        if kind == Kind::Normal {
            if let Some((old, _)) = self.ports.session_of(&name) {
                self.close(old, if goes_on { Why::Replaced } else { Why::Reinstated });
            }
            if self.ports.find(&name).is_some_and(|port| port.tasks > 0) {
                // Asked again when a command has ended.
                return;
            }
        }
        if self.ending.is_some() || self.places.served().len() >= self.limits.sessions {
            // Meanwhile it has begun to stop, or others were faster.
            self.places.end(slot);
            if let Some(nexus) = self.ports.take_kept(&name) {
                self.unit.detach(nexus);
            }
            return;
        }
        let Some(handshake) = self.places.handshake(slot) else { return };
        let Some((established, mut response)) = handshake.finished.take() else { return };
        let fd = handshake.fd.clone();
        let window = established.agreed.window(self.limits.first_burst, self.limits.window);
        let session = Session::new(&established, window);
        let mut connection = Connection::new(fd, session, established.agreed, (slot, serial), &self.pool);
        if kind == Kind::Normal {
            let tsih = if established.tsih == 0 { self.ports.free_tsih() } else { established.tsih };
            // Since the response was written, others may have logged in.
            response[14..16].copy_from_slice(&tsih.to_be_bytes());
            let nexus = self.nexus_of(&name, goes_on);
            let session = Some(((slot, serial), nexus));
            info!(slot, initiator = name, goes_on, "session begins");
            let (cid, agreed) = (established.cid, established.agreed);
            let port = Port { name, session, tsih, cid, agreed, kept: None, tasks: 0 };
            connection.port = Some(self.ports.insert(port));
            connection.counted = Some(self.count.add());
            // What it brings may be the same, and newer.
            self.give_up_left();
        }
        response.chunks(lh_ring::Tx::HEADER_MAX).for_each(|part| connection.tx.push_header(part));
        connection.received_at = self.clock.now();
        self.places.promote(slot, Box::new(connection));
    }

    /// What the SCSI layer calls a port whose session begins, or `goes_on` with another connection.
    fn nexus_of(&mut self, name: &str, goes_on: bool) -> NexusId {
        match self.ports.take_kept(name) {
            Some(nexus) if goes_on => return nexus,
            // It was to go on, and its initiator has thought better of it.
            Some(nexus) => self.unit.detach(nexus),
            None => {}
        }
        self.unit.attach(name)
    }

    /// Logins that wait for old commands to end.
    fn try_waiting_logins(&mut self) {
        if self.places.handshakes() == 0 {
            return;
        }
        for slot in self.places.slots() {
            if self.places.handshake(slot).is_some_and(|handshake| handshake.finished.is_some()) {
                let serial = self.places.serial(slot);
                self.try_begin(slot, serial);
            }
        }
    }

    fn received(&mut self, slot: u16, result: &io::Result<u32>) {
        let now = self.clock.now();
        let Some(connection) = self.places.connection(slot) else { return };
        match result {
            // After its logout an initiator may close at once.
            Ok(0) if connection.session.phase() == Phase::LoggedOut => {
                connection.wants = crate::connection::Served::Blocked;
            }
            Ok(0) => self.close(slot, Why::Left),
            Ok(_) => connection.received(now),
            Err(e) => self.close(slot, Why::from(e)),
        }
    }

    fn sent(&mut self, slot: u16, result: &io::Result<u32>) {
        let now = self.clock.now();
        let Some(connection) = self.places.connection(slot) else { return };
        self.budget.give_back(connection.sent());
        match result {
            Ok(bytes) => connection.taken(*bytes as usize, now),
            Err(e) => self.close(slot, Why::from(e)),
        }
    }

    /// Ends a connection, and with it its session, unless that is to go on with another one. Its commands end without an answer: those that the device has when it
    /// is done with them, or has been told that they are not to be begun, the others now.
    fn close(&mut self, slot: u16, why: Why) {
        let census = self.count.census();
        let Some(Place::Connection(connection)) = self.places.end(slot) else { return };
        if why == Why::Replaced {
            info!(slot, "connection ended: {why}");
        } else if connection.port.is_some() {
            info!(slot, "session ended: {why}");
        } else {
            debug!(slot, "discovery ended: {why}");
        }
        self.budget.give_back(connection.owed);
        for (_, tag) in &connection.tasks {
            self.abort(*tag, connection.claimant);
        }
        if !connection.is_alone(census) {
            self.give_up_left();
        } else if connection.counted.is_some() {
            self.left_alone = Some(census);
        }
        let claimant = connection.claimant;
        self.functions.retain(|function| function.owner != claimant);
        let Some(port) = connection.port else { return };
        if why != Why::Replaced {
            if let Some(nexus) = self.ports.leave(port) {
                self.unit.detach(nexus);
            }
        } else if let Some(nexus) = self.ports.keep(port)
            && !connection.tasks.is_empty()
        {
            self.unit.cleared(nexus);
        }
    }
}

impl Frontend for Server {
    fn completion(&mut self, ring: &mut Ring, _device: &mut dyn Device<Payload>, completion: Completion) {
        let Token { kind, slot, data: serial, .. } = completion.token;
        match kind {
            kind::ACCEPT => return self.accepted(ring, completion),
            kind::TICK => return self.tick(ring, serial),
            _ => {}
        }
        if !self.places.is_current(slot, serial) {
            // Of a connection that has been closed.
            return;
        }
        match kind {
            kind::POLL => self.greet(ring, slot, serial),
            kind::RECV => self.received(slot, &completion.result),
            _ => self.sent(slot, &completion.result),
        }
    }

    fn turn(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        self.clock.read();
        self.unit.watch_size(device.geometry().size);
        self.end_who_left();
        self.abandon(device);
        self.serve_all(device);
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use lh_block::Geometry;
    use lh_ring::MemoryDisk;

    use super::*;

    #[test]
    fn who_comes_after_a_long_quiet_has_all_its_time_for_the_login() {
        let pool = Pool::new(1 << 20, 64 << 20).unwrap();
        let (size, max_transfer) = (1 << 20, 1 << 20);
        let geometry = Geometry { size, logical_block: 512, physical_block: 4096, max_transfer, depth: 8 };
        let mut disk = MemoryDisk::new(&pool, geometry);
        let mut ring = Ring::new(64).unwrap();
        let limits = Limits::of_pool(&pool);
        let mut server = Server::new(Target::of_volume("demo"), limits, 2, &pool).unwrap();
        server.turn(&mut ring, &mut disk);
        server.clock.pass(1000);
        let (comes, _initiator) = UnixStream::pair().unwrap();
        server.adopt(&mut ring, comes.into());
        for (passes, is_there) in [(1, true), (u64::from(limits.patience_s), false)] {
            server.turn(&mut ring, &mut disk);
            (0..passes).for_each(|_| {
                server.clock.pass(1);
                server.clock.read();
            });
            server.tick(&mut ring, u32::try_from(passes.min(2)).unwrap());
            assert_eq!(server.load().connections == 1, is_there, "after {passes} s");
        }
    }
}
