//! What an NBD client gives up and sends again on another connection, to another queue.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use lh_ring::ConnectionCount;
use nbd_frontend::{Export, Limits as ServerLimits, Server};

use super::*;

type Work = Box<dyn FnOnce(&mut Server) + Send>;

/// Lets the test's closures run on a queue's thread.
struct Within(mpsc::Receiver<Work>);

impl Overseer<EngineQueue, Server> for Within {
    fn oversee(&mut self, ring: &mut Ring, engine: &mut EngineQueue, server: &mut Server) -> bool {
        while let Ok(work) = self.0.try_recv() {
            work(server);
            lh_ring::Frontend::turn(server, ring, engine);
        }
        !engine.is_ending()
    }
}

/// A volume shown by an NBD server on each of two queues.
struct Shown {
    handle: EngineHandle,
    events: crossbeam_channel::Receiver<Event>,
    queues: Vec<mpsc::Sender<Work>>,
}

impl Shown {
    fn new(replicas: &[Replica]) -> Self {
        let options = options(replicas, 1 << 32, &Remembered::default(), 2);
        let (handle, parts, events) = engine::start(options).expect("the engine starts");
        let count = ConnectionCount::default();
        let queues = parts.into_iter().map(|part| {
            let ((work, taken), count) = (mpsc::channel::<Work>(), count.clone());
            thread::spawn(move || {
                let mut ring = Ring::new(256).unwrap();
                let pool = Pool::lendable(8 << 20, 64 << 20).unwrap();
                let mut queue = EngineQueue::new(part, &pool);
                let export = Export { name: "v".into(), description: String::new(), read_only: false };
                let limits = ServerLimits::of_pool(&pool);
                let mut server = Server::new(export, limits, lh_ring::OWNER_FRONTEND, &pool, 64);
                server.count_with(count);
                run_queue(&mut ring, &mut queue, &mut server, &mut Within(taken)).unwrap();
            });
            work
        });
        let shown = Self { handle, events, queues: queues.collect() };
        let open = shown.events.recv_timeout(Duration::from_secs(20));
        assert!(matches!(open, Ok(Event::Open { .. })), "{open:?}");
        shown
    }

    /// Does something on the queue's thread.
    fn within<R: Send + 'static>(
        &self,
        queue: usize,
        f: impl FnOnce(&mut Server) -> R + Send + 'static,
    ) -> R {
        let (told, answer) = mpsc::channel();
        self.queues[queue].send(Box::new(move |server| drop(told.send(f(server))))).unwrap();
        self.handle.wake_queues();
        answer.recv_timeout(Duration::from_secs(20)).unwrap()
    }

    fn connect(&self, queue: usize) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.within(queue, move |server| server.adopt_agreed(theirs.into()));
        ours.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client(ours)
    }

    fn until(&self, queue: usize, what: &str, is_so: impl Fn(nbd_frontend::Load) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_so(self.within(queue, |server| server.load())) {
            assert!(Instant::now() < deadline, "{what}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A connection that speaks simple replies, about one block.
struct Client(UnixStream);

impl Client {
    fn send(&mut self, kind: u16, byte: u8) {
        // NBD protocol, "Request message".
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend(0_u16.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend(0_u64.to_be_bytes());
        bytes.extend(4096_u32.to_be_bytes());
        if kind == nbd_frontend::proto::command::WRITE {
            bytes.extend([byte; 4096]);
        }
        self.0.write_all(&bytes).unwrap();
    }

    fn answered(&mut self) {
        let mut head = [0; 16];
        self.0.read_exact(&mut head).unwrap();
        assert_eq!(head[4..8], [0; 4], "an error");
    }

    fn write(&mut self, byte: u8) {
        self.send(nbd_frontend::proto::command::WRITE, byte);
    }

    fn read(&mut self) -> u8 {
        self.send(nbd_frontend::proto::command::READ, 0);
        self.answered();
        let mut bytes = [0; 4096];
        self.0.read_exact(&mut bytes).unwrap();
        bytes[0]
    }
}

/// All replicas are away when a client gives up on a write; the thread that has it comes to itself last when they are back. Nothing was
/// written before: nothing is to be repaired, for which the first queue would be needed.
#[test]
fn what_waited_for_replicas_does_not_undo_what_was_sent_in_its_place() {
    for is_noticed in [true, false] {
        let top = tempfile::tempdir().unwrap();
        let mut replicas: Vec<_> = ["v-r-1", "v-r-2"].map(|n| Replica::start(top.path(), n)).into();
        let shown = Shown::new(&replicas);
        let (mut first, mut second) = (shown.connect(1), shown.connect(0));
        replicas.iter_mut().for_each(Replica::stop);
        let deadline = Instant::now() + Duration::from_secs(20);
        while shown.handle.status().replicas.iter().any(|r| r.mode == Mode::Rw) {
            assert!(Instant::now() < deadline, "the engine does not notice");
            thread::sleep(Duration::from_millis(5));
        }

        first.write(1);
        shown.until(1, "the engine has it", |load| load.requests == 1);
        let (stops, go_on) = mpsc::channel::<()>();
        let hold = |go_on: mpsc::Receiver<()>| {
            let waits: Work = Box::new(move |_| assert!(go_on.recv().is_err()));
            shown.queues[1].send(waits).unwrap();
            shown.handle.wake_queues();
        };
        if is_noticed {
            drop(first);
            shown.until(1, "it has left", |load| load.transmissions == 0);
            hold(go_on);
        } else {
            hold(go_on);
            drop(first);
        }
        second.write(1);
        replicas.iter_mut().for_each(Replica::run);
        second.answered();
        second.write(2);
        second.answered();
        assert_eq!(second.read(), 2);
        drop(stops);
        shown.until(1, "nothing is left of it", |load| load.requests == 0);
        assert_eq!(second.read(), 2, "noticed before: {is_noticed}");
        drop(shown.handle.command(Command::Shutdown));
        let ended = shown.events.recv_timeout(Duration::from_secs(60));
        assert_eq!(ended, Ok(Event::Stopped(Why::Clean)));
        shown.handle.end_queues();
        replicas.iter_mut().for_each(Replica::stop);
    }
}
