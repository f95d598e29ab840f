//! What servers really answer, as the seeds of the fuzz target `client`: a tap between our client and a server keeps the
//! server's bytes. `LH_RECORD=1 cargo test -p nbd-frontend --test answered` writes them to `fuzz/corpus/client`; the usual
//! run checks that the present servers lead through the whole session, and that what is recorded still does.

mod support;

#[path = "../../fuzz/src/client/script.rs"]
#[expect(unreachable_pub, reason = "a module of the fuzz targets")]
mod script;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lh_block::{Device, Done, Geometry, IoError};
use lh_ring::{Answers, Pool, QueueDevice};
use nbd_frontend::Ending;
use nbd_frontend::client::requests::{Answer, Broken, REPLY_LEN, Requests};
use nbd_frontend::client::{HandshakeError, handshake};
use script::GEOMETRY;
use support::queue::Queue;
use support::{Running, Setup};

/// Longest input: what `scripts/fuzz` lets one grow to.
const LENGTH_MAX: usize = 8192;

const PATIENCE: Duration = Duration::from_secs(20);

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/client")
}

/// The client's end of a connection to a server whose bytes are kept; they come when the connection has ended.
fn tapped(server: UnixStream) -> (UnixStream, JoinHandle<Vec<u8>>) {
    let (ours, tap) = UnixStream::pair().unwrap();
    let (mut from, mut to) = (tap.try_clone().unwrap(), server.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let (mut from, mut to) = (server, tap);
    let kept = thread::spawn(move || {
        let (mut kept, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            kept.extend_from_slice(&buffer[..n]);
            // The client may have gone.
            let _ = to.write_all(&buffer[..n]);
        }
        let _ = to.shutdown(Shutdown::Both);
        kept
    });
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    (ours, kept)
}

/// A client's queue that asks for what is in the script.
struct Session {
    queue: Queue,
    done: BTreeMap<u64, Result<(), IoError>>,
}

impl Session {
    fn new(socket: UnixStream) -> Self {
        let queue = Queue::new(GEOMETRY);
        queue.link(socket);
        Self { queue, done: BTreeMap::new() }
    }

    /// Asks for a batch and turns until it is answered, or the connection is given up: false.
    fn batch(&mut self, number: usize, mut meanwhile: impl FnMut()) -> bool {
        let requests = script::batch(number, self.queue.device.pool());
        let mut left = requests.len();
        requests.into_iter().for_each(|request| self.queue.device.submit(request));
        let deadline = Instant::now() + PATIENCE;
        while left > 0 {
            assert!(Instant::now() < deadline, "{left} requests of batch {number} are not answered");
            self.queue.turn(Duration::from_millis(5));
            for Done { tag, result, .. } in self.queue.answers.drain(..) {
                assert!(self.done.insert(tag, result).is_none(), "request {tag} is answered twice");
                left -= 1;
            }
            if self.queue.has_wished() {
                return false;
            }
            meanwhile();
        }
        true
    }
}

/// A session in which nothing is wrong: the server's bytes. `None` for a server that cannot do what a device does, as older
/// versions of other people's cannot.
fn whole(server: UnixStream, name: &str) -> Option<Vec<u8>> {
    let (mut socket, kept) = tapped(server);
    if let Err(unfit) = handshake(&mut socket, "demo").unwrap().check(&GEOMETRY) {
        println!("{name} is not recorded: {unfit}");
        return None;
    }
    let mut session = Session::new(socket);
    assert!((0..3).all(|number| session.batch(number, || ())), "{name} ends the connection");
    assert!(session.done.values().all(Result::is_ok), "{name}: {:?}", session.done);
    assert_eq!(session.done.len() as u64, script::COUNT);
    Some(end(session, kept))
}

fn end(session: Session, kept: JoinHandle<Vec<u8>>) -> Vec<u8> {
    drop(session);
    kept.join().unwrap()
}

fn ours() -> Running {
    Setup { geometry: GEOMETRY, ..Setup::default() }.start()
}

/// Every batch fails for a reason of its own.
fn failing(server: &Running) -> Vec<u8> {
    let (mut socket, kept) = tapped(server.connect());
    handshake(&mut socket, "demo").unwrap();
    let mut session = Session::new(socket);
    for (number, reason) in [IoError::Io, IoError::NoSpace, IoError::Invalid].into_iter().enumerate() {
        server.inside(move |inside| inside.disk.set_failure(Some(reason)));
        assert!(session.batch(number, || ()));
        let told = session.done.values().filter(|result| **result == Err(reason)).count();
        assert!(told >= 4, "batch {number}: {:?}", session.done);
    }
    server.inside(|inside| inside.disk.set_failure(None));
    end(session, kept)
}

/// The server is stopped while two requests are at work: these are answered, those behind them are refused.
fn stopped() -> Vec<u8> {
    let server = Setup { geometry: Geometry { depth: 2, ..GEOMETRY }, ..Setup::default() }.start();
    let (mut socket, kept) = tapped(server.connect());
    handshake(&mut socket, "demo").unwrap();
    let mut session = Session::new(socket);
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut told = false;
    let stop = || {
        if !told && server.load().requests == 2 {
            told = true;
            server.inside(|inside| {
                inside.server.stop(inside.ring, Ending::Refuse);
                inside.disk.set_answers(Answers::AtOnce);
            });
        }
    };
    assert!(!session.batch(0, stop), "requests of a server that is being stopped are answered");
    end(session, kept)
}

/// The server does not give out what is asked for.
fn refused(server: &Running) -> Vec<u8> {
    let (mut socket, kept) = tapped(server.connect());
    assert!(matches!(handshake(&mut socket, "another"), Err(HandshakeError::Refused { .. })));
    drop(socket);
    kept.join().unwrap()
}

/// A session's first batch, and an answer to it once more: to the last but one, in whose place a request of the next batch
/// waits that has not been sent, because it is behind one that goes in pieces.
fn repeated(session: &[u8]) -> Vec<u8> {
    let mut words = Words(session);
    handshake(&mut words, "demo").unwrap();
    let answers = 6 * REPLY_LEN + 2048 + 512;
    let (batch, _) = session.split_at(session.len() - words.0.len() + answers);
    let before = batch.len() - 512 - 2 * REPLY_LEN;
    [batch, &batch[before..before + REPLY_LEN]].concat()
}

/// A server of other people; ended with the test.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server of other people on a socket, if it is here.
fn other(program: &str, arguments: &[&str], socket: &Path) -> Option<(Other, UnixStream)> {
    let mut command = Command::new(program);
    let child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = Other(child.spawn().ok()?);
    let deadline = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Some((child, stream)),
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            Err(e) => panic!("{program}: {e}"),
        }
    }
}

/// Sessions with the servers of other people that are installed here.
fn others(directory: &Path) -> Vec<(&'static str, Vec<u8>)> {
    let (disk, mut sessions) = (directory.join("disk"), Vec::new());
    fs::File::create(&disk).unwrap().set_len(GEOMETRY.size).unwrap();
    let (first, second) = (directory.join("nbdkit.sock"), directory.join("qemu-nbd.sock"));
    let size = GEOMETRY.size.to_string();
    if let Some((_server, stream)) =
        other("nbdkit", &["-f", "-U", first.to_str().unwrap(), "memory", &size], &first)
    {
        sessions.extend(whole(stream, "nbdkit").map(|bytes| ("nbdkit", bytes)));
    }
    let arguments = ["-t", "-e", "4", "-x", "demo", "-f", "raw", "--discard=unmap", "-k"];
    let arguments = [&arguments[..], &[second.to_str().unwrap(), disk.to_str().unwrap()]].concat();
    if let Some((_server, stream)) = other("qemu-nbd", &arguments, &second) {
        sessions.extend(whole(stream, "qemu-nbd").map(|bytes| ("qemu-nbd", bytes)));
    }
    sessions
}

/// A server whose words are these.
struct Words<'a>(&'a [u8]);

impl Read for Words<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Words<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a client may make of a reply.
const KINDS: [&str; 7] = ["refused", "data", "done", "piece", "error", "stopping", "unasked"];

/// How often a recording leads to each kind of reply.
fn replay(stream: &[u8]) -> BTreeMap<&'static str, usize> {
    let mut kinds = BTreeMap::new();
    let mut saw = |kind| *kinds.entry(kind).or_default() += 1;
    let mut words = Words(stream);
    match handshake(&mut words, "demo") {
        Ok(served) => served.check(&GEOMETRY).unwrap(),
        Err(HandshakeError::Refused { .. }) => {
            saw("refused");
            return kinds;
        }
        Err(e) => panic!("{e}"),
    }
    let pool = Pool::new(1 << 20, 16 << 20).unwrap();
    let (mut requests, mut batch, mut rest) = (Requests::new(GEOMETRY.depth), 0, words.0);
    while let Some((head, mut later)) = rest.split_first_chunk() {
        if requests.is_empty() {
            script::batch(batch, &pool).into_iter().for_each(|request| requests.submit(request));
            batch += 1;
        }
        while requests.next_call().is_some() {}
        match requests.reply(head) {
            Ok(Answer::Data(place, len)) => {
                let Some(behind) = later.get(len as usize..) else { break };
                later = behind;
                requests.data(place, pool.alloc(len, 512).unwrap()).unwrap();
                saw("data");
            }
            Ok(Answer::Done(done)) => saw(if done.result.is_ok() { "done" } else { "error" }),
            Ok(Answer::Piece) => saw("piece"),
            Err(Broken::Stopping) => {
                saw("stopping");
                break;
            }
            Err(Broken::Cookie(_)) => {
                saw("unasked");
                break;
            }
            Err(broken) => panic!("{broken}"),
        }
        rest = later;
    }
    kinds
}

#[test]
fn sessions_are_recorded() {
    let server = ours();
    let own = whole(server.connect(), "own").expect("ours can");
    let mut sessions = vec![
        ("own-repeated", repeated(&own)),
        ("own", own),
        ("own-failing", failing(&server)),
        ("own-refused", refused(&server)),
        ("own-stopped", stopped()),
    ];
    sessions.extend(others(server.dir.path()));
    for (name, stream) in &sessions {
        // As they were asked for: every answer is in it.
        println!("{name}: {} bytes, {:?}", stream.len(), replay(stream));
        assert!(stream.len() < LENGTH_MAX, "{name}: {} bytes", stream.len());
    }
    if std::env::var_os("LH_RECORD").is_none() {
        return;
    }
    fs::create_dir_all(corpus()).unwrap();
    for (name, stream) in sessions {
        // The first byte is the target's: nothing unusual, or the last byte of each reply by itself.
        fs::write(corpus().join(name), [&[0][..], &stream].concat()).unwrap();
        if name == "own" {
            fs::write(corpus().join("own-split"), [&[3][..], &stream].concat()).unwrap();
        }
    }
}

#[test]
fn what_was_recorded_still_reaches_every_kind_of_reply() {
    if std::env::var_os("LH_RECORD").is_some() {
        return;
    }
    let mut reached: BTreeMap<&str, usize> = BTreeMap::new();
    for entry in fs::read_dir(corpus()).expect("fuzz/corpus/client") {
        let path = entry.unwrap().path();
        let input = fs::read(&path).unwrap();
        assert!(input.len() <= LENGTH_MAX, "{} is too long", path.display());
        for (kind, count) in replay(&input[1..]) {
            *reached.entry(kind).or_default() += count;
        }
    }
    println!("SHOWN replies in recordings: {reached:?}");
    for kind in KINDS {
        assert!(reached.contains_key(kind), "no recording leads to {kind}: {reached:?}");
    }
    assert_eq!(reached["unasked"], 1, "of the session that was made so: {reached:?}");
}
