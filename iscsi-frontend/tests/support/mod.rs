//! A server over a disk in memory in a thread of its own, and a blocking initiator that can misbehave.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]

pub mod client;

use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use iscsi_frontend::{Limits, Listener, Load, Server, Target};
use lh_block::Geometry;
use lh_ring::{Bell, Frontend, MemoryDisk, MemoryStore, Pool, Ring, Token};

pub const OWNER: u8 = 2;
pub const SIZE: u64 = 64 << 20;
pub const GEOMETRY: Geometry =
    Geometry { size: SIZE, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };

/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(20);

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
    pub store: MemoryStore,
    pub address: SocketAddr,
    pub name: String,
    pub target: Target,
    jobs: Sender<Job>,
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl Setup {
    /// Starts a server for the volume "demo".
    pub fn start(self) -> Running {
        let bell = Bell::new().unwrap();
        let (jobs, inbox) = channel();
        let (ready, started) = channel();
        let target = self.target.clone();
        let thread = {
            let bell = bell.clone();
            std::thread::spawn(move || self.run(&bell, &inbox, &ready))
        };
        let (store, address) = started.recv().unwrap();
        Running { store, address, name: target.name.clone(), target, jobs, bell, thread: Some(thread) }
    }

    fn run(self, bell: &Bell, inbox: &Receiver<Job>, ready: &Sender<(MemoryStore, SocketAddr)>) {
        let pool = Pool::new(8 << 20, self.pool_bytes).unwrap();
        let mut disk = MemoryDisk::new(&pool, self.geometry);
        let mut ring = Ring::new(256).unwrap();
        let mut limits = Limits::of_pool(&pool);
        (self.limits)(&mut limits);
        let mut server = Server::new(self.target, limits, OWNER, &pool).unwrap();
        let listener = Listener::tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.address().unwrap();
        server.listen(&mut ring, listener);
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
    pub fn until(&self, what: &str, mut wanted: impl FnMut(&Load) -> bool) {
        let deadline = Instant::now() + PATIENCE;
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
