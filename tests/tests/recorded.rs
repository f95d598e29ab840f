//! Real material for the fuzz targets: what an engine and a replica say to each other, and what Longhorn left in the
//! directories of `tests/fixtures`. `LH_RECORD=1 cargo test -p tests --test recorded` writes it to `fuzz/corpus`; the
//! usual run checks that what lies there is still of the present formats.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use datapath::conductor::{Command, Limits, Quorum, Stored};
use datapath::engine::{self, Address, Authority, Event, Options, ReplicaAddress};
use datapath::link::EngineQueue;
use lh_block::{Device, Done, Epoch, Extent, Generation, Op, Request};
use lh_ring::{NoFrontend, Overseer, Payload, Pool, QueueDevice, Ring, run_queue};
use lh_wire::handshake::{CHALLENGE_LEN, HELLO_LEN, WELCOME_LEN};
use lh_wire::{HEADER_LEN, Header, OpCode};
use replica::serve;

/// Longest input: what `scripts/fuzz` lets the target `wire` grow to.
const LENGTH_MAX: usize = 16384;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

fn recording() -> bool {
    std::env::var_os("LH_RECORD").is_some()
}

/// The operations of the messages in one side's stream, behind its handshake.
fn operations(mut rest: &[u8]) -> Vec<OpCode> {
    let mut found = Vec::new();
    while let Some(bytes) = rest.first_chunk::<HEADER_LEN>() {
        let header = Header::decode(bytes).expect("a header of this version");
        found.push(header.op);
        let whole = HEADER_LEN + usize::from(header.pad) + header.payload as usize;
        rest = rest.get(whole..).unwrap_or_default();
    }
    found
}

#[test]
fn recorded_sessions_are_of_this_version() {
    if recording() {
        return;
    }
    let mut controls = 0;
    for entry in fs::read_dir(corpus("wire")).expect("fuzz/corpus/wire") {
        let path = entry.unwrap().path();
        let input = fs::read(&path).unwrap();
        assert!(input.len() <= LENGTH_MAX, "{} is too long", path.display());
        let handshake = if input[0] & 1 == 0 { HELLO_LEN } else { CHALLENGE_LEN + WELCOME_LEN };
        let seen = operations(&input[1 + handshake..]);
        controls += usize::from(seen.contains(&OpCode::Control));
    }
    assert!(controls >= 2, "{controls} recordings with control messages: both sides' are needed");
}

#[test]
fn recorded_directories_are_there() {
    if recording() {
        return;
    }
    for target in ["meta", "chain"] {
        assert!(fs::read_dir(corpus(target)).expect(target).count() >= 5, "fuzz/corpus/{target} is poor");
    }
}

/// Where a fixture's data lies is described as the target `chain` wants it: `fuzz/src/chain.rs`.
fn image(path: &Path) -> Vec<u8> {
    let file = fs::File::open(path).unwrap();
    let length = file.metadata().unwrap().len() / 2048;
    let mut described = u16::try_from(length).expect("fixtures are small").to_le_bytes().to_vec();
    for block in 0..=u8::MAX - 3 {
        let mut bytes = [0; 4096];
        let read = file.read_at(&mut bytes, u64::from(block) * 4096).unwrap();
        if bytes[..read].iter().any(|b| *b != 0) {
            described.push(block);
        }
    }
    described
}

#[test]
fn fixtures_become_inputs() {
    if !recording() {
        return;
    }
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    for target in ["meta", "chain"] {
        fs::create_dir_all(corpus(target)).unwrap();
    }
    for entry in fs::read_dir(fixtures).unwrap() {
        let fixture = entry.unwrap().path();
        let name = fixture.file_name().unwrap().to_str().unwrap().to_owned();
        let place = tempfile::tempdir().unwrap();
        let archive = fixture.join(format!("{name}.tar.xz"));
        let unpacked =
            process::Command::new("tar").arg("xJf").arg(&archive).arg("-C").arg(place.path()).status();
        assert!(unpacked.unwrap().success(), "{}", archive.display());
        let mut files: Vec<PathBuf> =
            fs::read_dir(place.path().join("replica")).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        let mut directory = Vec::new();
        for path in files {
            let file = path.file_name().unwrap().to_str().unwrap();
            let content = if file.ends_with(".img") { image(&path) } else { fs::read(&path).unwrap() };
            if file.ends_with(".meta") {
                let kind = u8::from(file != "volume.meta");
                fs::write(corpus("meta").join(format!("{name}-{file}")), [&[kind], &content[..]].concat())
                    .unwrap();
            }
            // A backing file, and what is only looked at beside a snapshot, would make the input long.
            if file.ends_with(".img") || file.ends_with(".meta") {
                directory.extend([file.as_bytes(), &[0xfe], &content, &[0xff]].concat());
            }
        }
        fs::write(corpus("chain").join(name), directory).unwrap();
    }
}

/// Passes connections on to a replica and keeps what both sides said.
struct Tap {
    heard: Arc<Mutex<Vec<[Vec<u8>; 2]>>>,
}

impl Tap {
    fn new(socket: &Path, target: PathBuf) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let heard: Arc<Mutex<Vec<[Vec<u8>; 2]>>> = Arc::default();
        let all = heard.clone();
        thread::spawn(move || {
            for engine in listener.incoming() {
                let (Ok(engine), Ok(replica)) = (engine, UnixStream::connect(&target)) else { return };
                let place = {
                    let mut all = all.lock().unwrap();
                    all.push(Default::default());
                    all.len() - 1
                };
                let (back, forth) = (replica.try_clone().unwrap(), engine.try_clone().unwrap());
                let heard = all.clone();
                thread::spawn(move || {
                    pass_on(back, forth, |bytes| heard.lock().unwrap()[place][1].extend(bytes))
                });
                let heard = all.clone();
                thread::spawn(move || {
                    pass_on(engine, replica, |bytes| heard.lock().unwrap()[place][0].extend(bytes));
                });
            }
        });
        Self { heard }
    }
}

fn pass_on(mut from: UnixStream, mut to: UnixStream, mut heard: impl FnMut(&[u8])) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        heard(&buffer[..n]);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn start_replica(directory: PathBuf, socket: PathBuf) -> (serve::Status, JoinHandle<()>) {
    let status = serve::Status::default();
    let options = serve::Options {
        directory,
        size: Some(64 << 20),
        lock_wait: Duration::from_secs(10),
        volume: "v".into(),
        replica: "v-r-1".into(),
        key: [7; 32],
        map_key: [0; 32],
        listen: serve::Address::Unix(socket),
        status: status.clone(),
    };
    let thread = thread::spawn(move || serve::run(options).expect("the replica serves"));
    let until = Instant::now() + Duration::from_secs(20);
    while status.address().is_none() {
        assert!(Instant::now() < until, "the replica does not listen");
        thread::sleep(Duration::from_millis(2));
    }
    (status, thread)
}

/// An authority that believes whatever it is told.
struct Believing(Option<Epoch>);

impl Authority for Believing {
    fn load(&mut self) -> Result<Option<Epoch>, String> {
        Ok(self.0.clone())
    }
    fn store(&mut self, _: Option<(Generation, u64)>, epoch: &Epoch) -> Stored {
        self.0 = Some(epoch.clone());
        Stored::Stored
    }
}

/// Asks for one thing after the other, once the engine serves.
struct Client {
    requests: Vec<Request<Payload>>,
    left: usize,
    done: mpsc::Sender<()>,
}

impl Overseer<EngineQueue, NoFrontend> for Client {
    fn oversee(&mut self, _: &mut Ring, engine: &mut EngineQueue, _: &mut NoFrontend) -> bool {
        while let Some(Done { result, .. }) = engine.poll_done() {
            assert_eq!(result, Ok(()));
            self.left -= 1;
            if self.left == 0 {
                self.done.send(()).unwrap();
            }
        }
        while let Some(request) = self.requests.pop() {
            engine.submit(request);
        }
        !engine.is_ending()
    }
}

/// The life of a volume of one replica: every operation of clients, a snapshot, a clean end.
fn live(socket: &Path) {
    let options = Options {
        volume: "v".into(),
        replicas: vec![ReplicaAddress {
            name: "v-r-1".into(),
            address: Address::Unix(socket.to_owned()),
            learner: false,
        }],
        key: [7; 32],
        generation: Generation::from(1 << 32),
        size: 64 << 20,
        logical_block: 512,
        queues: 1,
        depth: 64,
        io_timeout: Duration::from_secs(300),
        checksum_full: false,
        local_reads: true,
        quorum: Quorum::Any,
        known_dead: true,
        loss_note: None,
        authority: Box::new(Believing(None)),
        limits: Limits::default(),
    };
    let (handle, mut parts, events) = engine::start(options).expect("the engine starts");
    let part = parts.pop().expect("one queue");
    let (done, all_done) = mpsc::channel();
    let queue = thread::spawn(move || {
        let pool = Pool::new(8 << 20, 64 << 20).unwrap();
        let requests = requests(&pool);
        let mut client = Client { left: requests.len(), requests, done };
        let mut queue = EngineQueue::new(part, &pool);
        run_queue(&mut Ring::new(256).unwrap(), &mut queue, &mut NoFrontend, &mut client).unwrap();
    });
    assert!(matches!(events.recv_timeout(Duration::from_secs(30)), Ok(Event::Open { .. })));
    all_done.recv_timeout(Duration::from_secs(30)).expect("every request is answered");
    let snapshot = engine_command("one");
    handle.command(snapshot).recv_timeout(Duration::from_secs(30)).expect("an end").expect("done");
    let end = handle.command(Command::Shutdown);
    assert!(matches!(events.recv_timeout(Duration::from_secs(30)), Ok(Event::Stopped(_))));
    drop(end);
    handle.end_queues();
    queue.join().unwrap();
}

fn engine_command(name: &str) -> Command {
    Command::Snapshot {
        name: name.into(),
        user_created: true,
        created: "2026-01-01T00:00:00Z".into(),
        labels: [("purpose".to_owned(), "record".to_owned())].into(),
    }
}

fn requests(pool: &Pool) -> Vec<Request<Payload>> {
    let request = |tag, op, offset, len| {
        let data =
            matches!(op, Op::Write { .. }).then(|| pool.alloc(u32::try_from(len).unwrap(), 1).unwrap());
        Request { tag, op, range: Extent::new(offset, len), data }
    };
    vec![
        request(1, Op::Flush, 0, 0),
        request(2, Op::WriteZeroes { fua: true, may_unmap: true, fast: false }, 1 << 20, 65536),
        request(3, Op::Unmap, 2 << 20, 4096),
        request(4, Op::Read, 0, 4096),
        request(5, Op::Write { fua: false }, 0, 4096),
        request(6, Op::Write { fua: true }, 8192, 512),
    ]
}

#[test]
fn a_session_becomes_an_input() {
    if !recording() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (hidden, socket) = (place.path().join("hidden.sock"), place.path().join("replica.sock"));
    let (status, thread) = start_replica(place.path().join("replica"), hidden.clone());
    let tap = Tap::new(&socket, hidden);
    live(&socket);
    status.stop();
    thread.join().unwrap();
    fs::create_dir_all(corpus("wire")).unwrap();
    for (i, sides) in tap.heard.lock().unwrap().iter().enumerate() {
        for (side, (name, stream)) in [(0_u8, ("engine", &sides[0])), (1, ("replica", &sides[1]))] {
            let input = [&[side][..], &stream[..stream.len().min(LENGTH_MAX - 1)]].concat();
            fs::write(corpus("wire").join(format!("{name}-{i}")), input).unwrap();
        }
    }
}
