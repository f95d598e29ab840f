//! A frontend's server in a thread of its own, with a ring, over a disk in memory.

use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lh_block::Geometry;
use lh_ring::{Frontend, Inbox, Mailbox, MemoryDisk, MemoryStore, OWNER_LOOP, Pool, Ring, Token};

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a test may touch in the server's thread.
#[derive(Debug)]
pub struct Inside<'a, S> {
    /// The thread's.
    pub ring: &'a mut Ring,
    /// What is tested.
    pub server: &'a mut S,
    /// What it serves.
    pub disk: &'a mut MemoryDisk,
    /// The memory of both.
    pub pool: &'a Pool,
}

/// Something to be done in the server's thread; true: it was the last.
type Job<S> = Box<dyn FnOnce(&mut Inside<'_, S>) -> bool + Send>;

/// A server that runs; stopped when dropped.
pub struct Served<S> {
    /// The bytes of the disk.
    pub store: MemoryStore,
    jobs: Mailbox<Job<S>>,
    thread: Option<JoinHandle<()>>,
}

impl<S: Frontend + 'static> Served<S> {
    /// Runs what `make` makes; completions of `owner` are the server's. Also gives what `make` gives beside it. Whatever
    /// cannot be had is a panic.
    pub fn start<T: Send + 'static>(
        owner: u8,
        geometry: Geometry,
        pool_bytes: usize,
        make: impl FnOnce(&mut Ring, &Pool) -> (S, T) + Send + 'static,
    ) -> (Self, T) {
        let (jobs, mut inbox) = Mailbox::new().expect("an eventfd");
        let (ready, started) = channel();
        let thread = std::thread::spawn(move || {
            let pool = Pool::new(8 << 20, pool_bytes).expect("memory");
            let mut disk = MemoryDisk::new(&pool, geometry);
            let mut ring = Ring::new(256).expect("a ring");
            let (mut server, made) = make(&mut ring, &pool);
            ring.wake_on(Token::new(OWNER_LOOP, 0, 0, 0), inbox.bell());
            ready.send((disk.store().clone(), made)).expect("the test waits");
            run(
                owner,
                &mut Inside { ring: &mut ring, server: &mut server, disk: &mut disk, pool: &pool },
                &mut inbox,
            );
        });
        let (store, made) = started.recv().expect("the server starts");
        (Self { store, jobs, thread: Some(thread) }, made)
    }

    /// Does something in the server's thread and returns its result.
    pub fn inside<R: Send + 'static>(&self, f: impl FnOnce(&mut Inside<'_, S>) -> R + Send + 'static) -> R {
        let (result, answer) = channel();
        let job: Job<S> = Box::new(move |inside| {
            // Nobody waits any more: the test has failed already.
            let _ = result.send(f(inside));
            false
        });
        self.jobs.put(job);
        answer.recv().expect("the server's thread lives")
    }

    /// Waits until what `look` sees in the server's thread is as wanted; panics after 20 s.
    pub fn until<L: std::fmt::Debug + Send + 'static>(
        &self,
        what: &str,
        look: fn(&S) -> L,
        mut wanted: impl FnMut(&L) -> bool,
    ) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = self.inside(move |inside| look(inside.server));
            if wanted(&seen) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {seen:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn run<S: Frontend>(owner: u8, inside: &mut Inside<'_, S>, inbox: &mut Inbox<Job<S>>) {
    loop {
        inside.server.turn(inside.ring, inside.disk);
        inside.ring.turn(None).expect("the ring turns");
        while let Some(completion) = inside.ring.next() {
            if completion.token.owner == owner {
                inside.server.completion(inside.ring, inside.disk, completion);
            }
        }
        let mut next = inbox.take();
        if next.is_some() {
            // What a completion began is ended in the turn after it, and a test sees nothing between the two.
            inside.server.turn(inside.ring, inside.disk);
        }
        while let Some(job) = next {
            if job(inside) {
                return;
            }
            next = inbox.take();
        }
    }
}

impl<S> Drop for Served<S> {
    fn drop(&mut self) {
        // The thread may have panicked; its message is on stderr.
        self.jobs.put(Box::new(|_| true));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
