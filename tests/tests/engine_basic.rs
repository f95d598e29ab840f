//! Engine and replicas over real sockets and files, in one process: a thread per replica, a thread for the queue.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use datapath::conductor::{Command, CommandError, Limits, Mode, Quorum, Stored, Why};
use datapath::engine::{self, Address, Authority, EngineHandle, Event, Options, ReplicaAddress};
use datapath::link::EngineQueue;
use lh_block::{Device, Done, Epoch, Extent, Generation, Op, Request};
use lh_ring::{NoFrontend, Overseer, Payload, Pool, QueueDevice, Ring, run_queue};
use replica::serve;

#[path = "engine_basic/local_reads.rs"]
mod local_reads;
#[path = "engine_basic/resent.rs"]
mod resent;

const SIZE: u64 = 64 << 20;

/// An authority that lasts as long as its test.
#[derive(Clone, Default)]
struct Remembered(std::sync::Arc<std::sync::Mutex<Option<Epoch>>>);

impl Authority for Remembered {
    fn load(&mut self) -> Result<Option<Epoch>, String> {
        Ok(self.0.lock().unwrap().clone())
    }
    fn store(&mut self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Stored {
        let mut held = self.0.lock().unwrap();
        if held.as_ref().map(Epoch::order) != expected {
            return Stored::Conflict { current: held.clone() };
        }
        *held = Some(epoch.clone());
        Stored::Stored
    }
}

struct Replica {
    name: String,
    directory: PathBuf,
    socket: PathBuf,
    status: serve::Status,
    thread: Option<JoinHandle<()>>,
}

impl Replica {
    fn start(top: &Path, name: &str) -> Self {
        let mut r = Self {
            name: name.into(),
            directory: top.join(name),
            socket: top.join(format!("{name}.sock")),
            status: serve::Status::default(),
            thread: None,
        };
        r.run();
        r
    }

    fn run(&mut self) {
        self.status = serve::Status::default();
        let options = serve::Options {
            directory: self.directory.clone(),
            size: Some(SIZE),
            lock_wait: Duration::from_secs(10),
            volume: "v".into(),
            replica: self.name.clone(),
            key: [7; 32],
            map_key: [0; 32],
            listen: serve::Address::Unix(self.socket.clone()),
            status: self.status.clone(),
        };
        self.thread = Some(thread::spawn(move || serve::run(options).expect("the replica serves")));
        let until = Instant::now() + Duration::from_secs(10);
        while self.status.address().is_none() {
            assert!(Instant::now() < until, "the replica does not listen");
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn stop(&mut self) {
        self.status.stop();
        self.thread.take().expect("runs").join().expect("ends well");
    }
}

type Work = Box<dyn FnOnce(&mut EngineQueue) + Send>;

/// Lets the test's closures run on the queue's thread.
struct Puppeteer {
    work: mpsc::Receiver<Work>,
    answers: mpsc::Sender<(u64, Result<(), lh_block::IoError>, Vec<u8>)>,
}

impl Overseer<EngineQueue, NoFrontend> for Puppeteer {
    fn oversee(&mut self, _: &mut Ring, engine: &mut EngineQueue, _: &mut NoFrontend) -> bool {
        while let Ok(work) = self.work.try_recv() {
            work(engine);
        }
        while let Some(Done { tag, result, data }) = engine.poll_done() {
            let _ = self.answers.send((tag, result, data.map(|d| d.to_vec()).unwrap_or_default()));
        }
        !engine.is_ending()
    }
}

/// An engine of these replicas.
fn options(replicas: &[Replica], generation: u64, authority: &Remembered, queues: u8) -> Options {
    Options {
        volume: "v".into(),
        replicas: replicas
            .iter()
            .map(|r| ReplicaAddress {
                name: r.name.clone(),
                address: Address::Unix(r.socket.clone()),
                learner: false,
            })
            .collect(),
        key: [7; 32],
        generation: Generation::from(generation),
        size: SIZE,
        logical_block: 512,
        queues,
        depth: 64,
        io_timeout: Duration::from_secs(300),
        checksum_full: false,
        local_reads: true,
        quorum: Quorum::Any,
        known_dead: true,
        loss_note: None,
        authority: Box::new(authority.clone()),
        limits: Limits::default(),
    }
}

struct Engine {
    handle: EngineHandle,
    events: crossbeam_channel::Receiver<Event>,
    work: mpsc::Sender<Work>,
    answers: mpsc::Receiver<(u64, Result<(), lh_block::IoError>, Vec<u8>)>,
    thread: JoinHandle<()>,
    tag: u64,
}

impl Engine {
    fn start(replicas: &[Replica], generation: u64, authority: &Remembered) -> Self {
        let options = options(replicas, generation, authority, 1);
        let (handle, mut parts, events) = engine::start(options).expect("the engine starts");
        let part = parts.pop().expect("one queue");
        let (work, taken) = mpsc::channel();
        let (told, answers) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut ring = Ring::new(256).unwrap();
            let pool = Pool::lendable(8 << 20, 64 << 20).unwrap();
            let mut queue = EngineQueue::new(part, &pool);
            let mut overseer = Puppeteer { work: taken, answers: told };
            run_queue(&mut ring, &mut queue, &mut NoFrontend, &mut overseer).unwrap();
        });
        let mut e = Self { handle, events, work, answers, thread, tag: 0 };
        e.wait_open();
        e
    }

    fn wait_open(&mut self) {
        match self.events.recv_timeout(Duration::from_secs(20)) {
            Ok(Event::Open { size }) => assert_eq!(size, SIZE),
            other => panic!("{other:?}, {:?}", self.handle.status()),
        }
    }

    fn submit(&mut self, op: Op, range: Extent, data: Option<Vec<u8>>) -> u64 {
        self.tag += 1;
        let tag = self.tag;
        self.work
            .send(Box::new(move |engine| {
                let data = data.map(|d| {
                    let mut p = engine.pool().alloc(u32::try_from(d.len()).unwrap(), 1).unwrap();
                    p.write_at(0, &d);
                    p
                });
                engine.submit(Request::<Payload> { tag, op, range, data });
            }))
            .unwrap();
        self.handle.wake_queues();
        tag
    }

    fn io(&mut self, op: Op, range: Extent, data: Option<Vec<u8>>) -> Vec<u8> {
        let tag = self.submit(op, range, data);
        let (answered, result, bytes) = self
            .answers
            .recv_timeout(Duration::from_secs(30))
            .unwrap_or_else(|_| panic!("no answer: {:#?}", self.handle.status()));
        assert_eq!(answered, tag);
        assert_eq!(result, Ok(()), "{op:?} {range}");
        bytes
    }

    fn write(&mut self, at: u64, byte: u8, len: usize) {
        self.io(Op::Write { fua: false }, Extent::new(at, len as u64), Some(vec![byte; len]));
    }

    fn read(&mut self, at: u64, len: u64) -> Vec<u8> {
        self.io(Op::Read, Extent::new(at, len), None)
    }

    fn healthy(&self, count: usize) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.handle.status().replicas.iter().filter(|r| r.mode == Mode::Rw).count() != count {
            assert!(Instant::now() < until, "{:#?}", self.handle.status());
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn add(&self, replica: &Replica) -> Result<(), CommandError> {
        let address = ReplicaAddress {
            name: replica.name.clone(),
            address: Address::Unix(replica.socket.clone()),
            learner: false,
        };
        let (told, heard) = mpsc::channel();
        self.handle.add_replica(address, Box::new(move |added| told.send(added).expect("a listener")));
        heard.recv_timeout(Duration::from_secs(60)).expect("an end")
    }

    fn command(&self, command: Command) {
        self.handle.command(command).recv_timeout(Duration::from_secs(60)).expect("an end").expect("done");
    }

    fn shut_down(self) {
        let done = self.handle.command(Command::Shutdown);
        assert_eq!(self.events.recv_timeout(Duration::from_secs(60)), Ok(Event::Stopped(Why::Clean)));
        drop(done);
        self.handle.end_queues();
        self.thread.join().unwrap();
    }
}

fn snapshot(name: &str) -> Command {
    Command::Snapshot {
        name: name.into(),
        user_created: true,
        created: "2026-01-01T00:00:00Z".into(),
        labels: std::collections::BTreeMap::new(),
    }
}

#[test]
fn a_volume_lives_through_what_happens_to_it() {
    let top = tempfile::tempdir().unwrap();
    let mut replicas: Vec<_> = ["v-r-1", "v-r-2", "v-r-3"].map(|n| Replica::start(top.path(), n)).into();
    let authority = Remembered::default();
    let mut e = Engine::start(&replicas, 1 << 32, &authority);
    e.healthy(3);

    e.write(0, 1, 4096);
    e.write(1 << 20, 2, 1 << 20);
    assert_eq!(e.read(0, 4096), vec![1; 4096]);
    assert_eq!(e.read(1 << 20, 1 << 20), vec![2; 1 << 20]);
    e.write(512, 3, 512);
    let mixed = e.read(0, 1536);
    assert_eq!((mixed[0], mixed[512], mixed[1024]), (1, 3, 1));
    e.io(Op::Flush, Extent::default(), None);

    e.command(snapshot("one"));
    e.io(Op::Unmap, Extent::new(1 << 20, 4096), None);
    assert_eq!(e.read(1 << 20, 8192), [vec![0; 4096], vec![2; 4096]].concat());

    replicas[1].stop();
    e.write(8192, 4, 4096);
    e.healthy(2);
    assert_eq!(e.read(8192, 4096), vec![4; 4096]);
    replicas[1].run();
    e.healthy(3);

    // The others away, the rebuilt one alone holds everything.
    replicas[0].stop();
    e.write(12288, 5, 4096);
    e.healthy(2);
    replicas[2].stop();
    e.write(16384, 6, 4096);
    e.healthy(1);
    assert_eq!(e.read(8192, 4096), vec![4; 4096]);
    assert_eq!(e.read(1 << 20, 8192), [vec![0; 4096], vec![2; 4096]].concat());
    replicas[0].run();
    replicas[2].run();
    e.healthy(3);
    e.shut_down();

    let mut again = Engine::start(&replicas, 2 << 32, &authority);
    again.healthy(3);
    assert_eq!(again.read(12288, 8192), [vec![5; 4096], vec![6; 4096]].concat());
    again.shut_down();
    replicas.iter_mut().for_each(Replica::stop);
}

#[test]
fn a_replica_is_added_and_another_taken_out_while_the_volume_runs() {
    let top = tempfile::tempdir().unwrap();
    let mut replicas: Vec<_> = ["v-r-1"].map(|n| Replica::start(top.path(), n)).into();
    let authority = Remembered::default();
    let mut e = Engine::start(&replicas, 1 << 32, &authority);
    e.write(0, 1, 1 << 20);
    e.command(snapshot("one"));
    e.write(4096, 2, 4096);

    replicas.push(Replica::start(top.path(), "v-r-2"));
    assert_eq!(e.add(&replicas[1]), Ok(()));
    let twice = e.add(&replicas[1]);
    assert!(matches!(twice, Err(CommandError::Exists(_))), "{twice:?}");
    e.healthy(2);

    e.command(Command::RemoveReplica { name: "v-r-1".into() });
    assert_eq!(e.handle.status().replicas.len(), 1);
    replicas[0].stop();
    assert_eq!(e.read(0, 8192), [vec![1; 4096], vec![2; 4096]].concat());
    e.shut_down();
    replicas[1].stop();
}

/// It keeps its place, and what it has.
#[test]
fn a_replica_that_comes_back_elsewhere_is_looked_for_there() {
    let top = tempfile::tempdir().unwrap();
    let mut replicas = ["v-r-1", "v-r-2"].map(|n| Replica::start(top.path(), n));
    let authority = Remembered::default();
    let mut e = Engine::start(&replicas, 1 << 32, &authority);
    e.write(0, 1, 1 << 20);
    replicas[1].stop();
    e.write(0, 2, 4096);
    replicas[1].socket = top.path().join("elsewhere.sock");
    replicas[1].run();
    assert_eq!(e.add(&replicas[1]), Ok(()));
    e.healthy(2);
    replicas[0].stop();
    assert_eq!(e.read(0, 8192), [vec![2; 4096], vec![1; 4096]].concat());
    e.shut_down();
    replicas[1].stop();
}
