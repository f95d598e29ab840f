//! A server over a disk in memory in a thread of its own, and a blocking client that can misbehave.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]

pub mod client;
pub mod queue;

use std::net::{SocketAddr, TcpStream};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use lh_block::Geometry;
use lh_rig::Served;
use lh_ring::{Completion, ConnectionCount, Frontend, Token};
use nbd_frontend::{Export, Limits, Listener, Load, Server};
use tempfile::TempDir;

pub const OWNER: u8 = 2;
/// Kinds of a server's tokens: of its sends, and of its timer of a second.
pub const SEND: u8 = 3;
const TICK: u8 = 4;
pub const SIZE: u64 = 64 << 20;
pub const GEOMETRY: Geometry =
    Geometry { size: SIZE, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };

/// How a server is set up.
pub struct Setup {
    pub geometry: Geometry,
    pub pool_bytes: usize,
    pub read_only: bool,
    /// Changes the limits that follow from the pool.
    pub limits: fn(&mut Limits),
}

impl Default for Setup {
    fn default() -> Self {
        Self { geometry: GEOMETRY, pool_bytes: 64 << 20, read_only: false, limits: |_| {} }
    }
}

/// A running server; stopped when dropped.
pub struct Running {
    pub dir: TempDir,
    pub socket: PathBuf,
    pub address: SocketAddr,
    /// One more of it is a connection of another server of the volume.
    pub connections: ConnectionCount,
    served: Served<Server>,
}

impl Deref for Running {
    type Target = Served<Server>;

    fn deref(&self) -> &Served<Server> {
        &self.served
    }
}

impl Setup {
    /// Starts a server for the export "demo".
    pub fn start(self) -> Running {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("nbd.sock");
        let path = socket.clone();
        let connections = ConnectionCount::default();
        let shared = connections.clone();
        let (served, address) = Served::start(OWNER, self.geometry, self.pool_bytes, move |ring, pool| {
            let mut limits = Limits::of_pool(pool);
            (self.limits)(&mut limits);
            let export = Export {
                name: "demo".into(),
                description: "a disk in memory".into(),
                read_only: self.read_only,
            };
            let mut server = Server::new(export, limits, OWNER, pool, self.geometry.depth);
            server.count_with(shared);
            server.listen(ring, Listener::unix(&path).unwrap());
            let tcp = Listener::tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            let address = tcp.tcp_address().unwrap();
            server.listen(ring, tcp);
            (server, address)
        });
        Running { dir, socket, address, connections, served }
    }
}

impl Running {
    pub fn start() -> Self {
        Setup::default().start()
    }

    pub fn load(&self) -> Load {
        self.inside(|inside| inside.server.load())
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///demo?socket={}", self.socket.display())
    }

    pub fn tcp_uri(&self) -> String {
        format!("nbd://{}/demo", self.address)
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// A connection over TCP. The type is the other family's; it is a stream socket all the same.
    pub fn connect_tcp(&self) -> UnixStream {
        let stream = UnixStream::from(OwnedFd::from(TcpStream::connect(self.address).unwrap()));
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Waits until what has been sent until now has been received, served and, if there is an answer, answered.
    pub fn turn(&self) {
        self.turns(3);
    }

    /// Waits until the server has turned so often. Looks from outside may come several to a turn.
    pub fn turns(&self, count: u64) {
        let turns = || self.inside(|inside| inside.ring.turns());
        let before = turns();
        while turns() < before + count {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// So many of the server's seconds pass, at once: what it says of time is seen without the time that a busy host takes. Each call
    /// starts one more timer, so with a patience of 1000 nobody notices the seconds that pass besides.
    pub fn pass(&self, seconds: u32) {
        self.turn();
        self.inside(move |inside| {
            for _ in 0..seconds {
                let token = Token::new(OWNER, TICK, 0, 0);
                let tick = Completion { token, result: Ok(0), more: false, payload: None, accepted: None };
                inside.server.completion(inside.ring, inside.disk, tick);
            }
        });
    }

    /// Waits until the load is as wanted.
    pub fn until(&self, what: &str, wanted: impl FnMut(&Load) -> bool) {
        self.served.until(what, Server::load, wanted);
    }
}
