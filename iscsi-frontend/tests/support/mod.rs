//! A server over a disk in memory in a thread of its own, and a blocking initiator that can misbehave.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]

pub mod client;
pub mod pace;

use std::net::{SocketAddr, TcpStream};
use std::ops::Deref;
use std::time::Duration;

use iscsi_frontend::{Limits, Listener, Load, Server, Target};
use lh_block::Geometry;
use lh_rig::Served;
use lh_ring::ConnectionCount;

pub const OWNER: u8 = 2;
pub const SIZE: u64 = 64 << 20;
pub const GEOMETRY: Geometry =
    Geometry { size: SIZE, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };

/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How a server is set up.
pub struct Setup {
    pub geometry: Geometry,
    pub pool_bytes: usize,
    /// Changes the limits that follow from the pool.
    pub limits: fn(&mut Limits),
    pub target: Target,
}

impl Default for Setup {
    fn default() -> Self {
        Self { geometry: GEOMETRY, pool_bytes: 64 << 20, limits: |_| {}, target: Target::of_volume("demo") }
    }
}

/// A running server; stopped when dropped.
pub struct Running {
    pub address: SocketAddr,
    pub name: String,
    pub target: Target,
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
    /// Starts a server for the volume "demo".
    pub fn start(self) -> Running {
        let target = self.target.clone();
        let connections = ConnectionCount::default();
        let shared = connections.clone();
        let (served, address) = Served::start(OWNER, self.geometry, self.pool_bytes, move |ring, pool| {
            let mut limits = Limits::of_pool(pool);
            (self.limits)(&mut limits);
            let mut server = Server::new(self.target, limits, OWNER, pool).unwrap();
            server.count_with(shared);
            let listener = Listener::tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            let address = listener.address().unwrap();
            server.listen(ring, listener);
            (server, address)
        });
        Running { address, name: target.name.clone(), target, connections, served }
    }
}

impl Running {
    pub fn start() -> Self {
        Setup::default().start()
    }

    pub fn load(&self) -> Load {
        self.inside(|inside| inside.server.load())
    }

    /// The disk's address for other people's initiators.
    pub fn url(&self) -> String {
        self.target.uri(self.address)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Waits until the load is as wanted.
    pub fn until(&self, what: &str, wanted: impl FnMut(&Load) -> bool) {
        self.served.until(what, Server::load, wanted);
    }
}
