//! A server over a disk in memory in a thread of its own, and a blocking client that can misbehave.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]

pub mod client;

use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lh_block::Geometry;
use lh_ring::{Bell, Frontend, MemoryDisk, MemoryStore, Pool, Ring, Token};
use nbd_frontend::{Export, Limits, Listener, Load, Server};
use tempfile::TempDir;

pub const OWNER: u8 = 2;
pub const SIZE: u64 = 64 << 20;
pub const GEOMETRY: Geometry =
    Geometry { size: SIZE, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };

/// What a test may touch in the server's thread.
pub struct Inside<'a> {
    pub ring: &'a mut Ring,
    pub server: &'a mut Server,
    pub disk: &'a mut MemoryDisk,
    pub pool: &'a Pool,
}

type Job = Box<dyn FnOnce(&mut Inside<'_>) -> bool + Send>;

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
    pub store: MemoryStore,
    pub address: SocketAddr,
    jobs: Sender<Job>,
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl Setup {
    /// Starts a server for the export "demo".
    pub fn start(self) -> Running {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("nbd.sock");
        let bell = Bell::new().unwrap();
        let (jobs, inbox) = channel();
        let (ready, started) = channel();
        let thread = {
            let (socket, bell) = (socket.clone(), bell.clone());
            std::thread::spawn(move || self.run(&socket, &bell, &inbox, &ready))
        };
        let (store, address) = started.recv().unwrap();
        Running { dir, socket, store, address, jobs, bell, thread: Some(thread) }
    }

    fn run(
        self,
        socket: &Path,
        bell: &Bell,
        inbox: &Receiver<Job>,
        ready: &Sender<(MemoryStore, SocketAddr)>,
    ) {
        let pool = Pool::new(8 << 20, self.pool_bytes).unwrap();
        let mut disk = MemoryDisk::new(&pool, self.geometry);
        let mut ring = Ring::new(256).unwrap();
        let mut limits = Limits::of_pool(&pool);
        (self.limits)(&mut limits);
        let export =
            Export { name: "demo".into(), description: "a disk in memory".into(), read_only: self.read_only };
        let mut server = Server::new(export, limits, OWNER, &pool, self.geometry.depth);
        server.listen(&mut ring, Listener::unix(socket).unwrap());
        let tcp = Listener::tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = tcp.tcp_address().unwrap();
        server.listen(&mut ring, tcp);
        ring.wake_on(Token::new(0, 0, 0, 0), bell);
        ready.send((disk.store().clone(), address)).unwrap();
        loop {
            server.turn(&mut ring, &mut disk);
            ring.turn(None).unwrap();
            while let Some(completion) = ring.next() {
                if completion.token.owner == OWNER {
                    server.completion(&mut ring, &mut disk, completion);
                }
            }
            while let Ok(job) = inbox.try_recv() {
                let mut inside =
                    Inside { ring: &mut ring, server: &mut server, disk: &mut disk, pool: &pool };
                if job(&mut inside) {
                    return;
                }
            }
        }
    }
}

impl Running {
    pub fn start() -> Self {
        Setup::default().start()
    }

    /// Does something in the server's thread and returns its result.
    pub fn inside<R: Send + 'static>(&self, f: impl FnOnce(&mut Inside<'_>) -> R + Send + 'static) -> R {
        let (result, answer) = channel();
        let job: Job = Box::new(move |inside| {
            // Nobody waits any more: the test has failed already.
            let _ = result.send(f(inside));
            false
        });
        self.jobs.send(job).unwrap();
        self.bell.ring();
        answer.recv().expect("the server's thread lives")
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

    /// Waits until the load is as wanted.
    pub fn until(&self, what: &str, mut wanted: impl FnMut(&Load) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let load = self.load();
            if wanted(&load) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {load:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The thread may have panicked; its message is on stderr.
        let _ = self.jobs.send(Box::new(|_| true));
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
