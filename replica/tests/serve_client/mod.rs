//! A server in a thread (or a process of its own), and a blocking client that speaks the data protocol.

#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lh_block::{Extent, Generation, Instance, Run};
use lh_wire::handshake::{Asked, CHALLENGE_LEN, Hello, NotLetIn, Role, Verdict, WELCOME_LEN};
use lh_wire::{Control, HEADER_LEN, Header, OpCode, ReplicaState, Status, flags, padding};
use replica::serve::{Address, Options, ServeError, Status as Handle, run};

pub(crate) const KEY: [u8; 32] = [7; 32];
pub(crate) const MAP_KEY: [u8; 32] = [8; 32];
pub(crate) const VOLUME: &str = "demo";
pub(crate) const REPLICA: &str = "demo-r-0a1b2c3d";
pub(crate) const SIZE: u64 = 64 << 20;
pub(crate) const MIB: u32 = 1 << 20;

/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The file systems that layers lie on in these tests: with O_DIRECT, and (tmpfs) perhaps without.
pub(crate) fn places() -> Vec<tempfile::TempDir> {
    let mut places = vec![tempfile::tempdir().unwrap()];
    if Path::new("/dev/shm").is_dir() {
        places.push(tempfile::tempdir_in("/dev/shm").unwrap());
    }
    places
}

pub(crate) fn generation(n: u32) -> Generation {
    Generation { attachment: n, restart: 0 }
}

pub(crate) fn options(place: &Path) -> Options {
    Options {
        directory: place.join("replica"),
        size: Some(SIZE),
        lock_wait: Duration::from_secs(10),
        volume: VOLUME.into(),
        replica: REPLICA.into(),
        key: KEY,
        map_key: MAP_KEY,
        listen: Address::Unix(place.join("socket")),
        status: Handle::default(),
    }
}

/// A running server; stopped when dropped.
pub(crate) struct Server {
    pub(crate) status: Handle,
    pub(crate) socket: PathBuf,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl Server {
    pub(crate) fn start(place: &Path) -> Self {
        Self::with(options(place))
    }

    pub(crate) fn with(options: Options) -> Self {
        let status = options.status.clone();
        let socket = match &options.listen {
            Address::Unix(path) => path.clone(),
            Address::Tcp(_) => PathBuf::new(),
        };
        let thread = std::thread::spawn(move || run(options));
        let began = Instant::now();
        while status.address().is_none() {
            assert!(!thread.is_finished(), "{:?}", thread.join());
            assert!(began.elapsed() < PATIENCE, "the server does not begin");
            std::thread::sleep(Duration::from_millis(2));
        }
        Self { status, socket, thread: Some(thread) }
    }

    pub(crate) fn stop(mut self) {
        self.end().unwrap();
    }

    /// Waits until it ends by itself.
    pub(crate) fn ended(mut self) -> Result<(), ServeError> {
        self.thread.take().map_or(Ok(()), |t| t.join().unwrap())
    }

    fn end(&mut self) -> Result<(), ServeError> {
        self.status.stop();
        self.thread.take().map_or(Ok(()), |t| t.join().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            eprintln!("{e}");
        }
    }
}

/// A server that can be killed: this test program again, running one test that serves.
pub(crate) struct Killable {
    child: Child,
    pub(crate) socket: PathBuf,
}

/// Names the place that a child serves.
pub(crate) const PLACE: &str = "REPLICA_TEST_PLACE";

impl Killable {
    /// `test` is the name of the test that calls [`serve_if_child`].
    pub(crate) fn start(place: &Path, test: &str) -> Self {
        let socket = place.join("socket");
        let _ = std::fs::remove_file(&socket);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(PLACE, place)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(began.elapsed() < PATIENCE, "the child does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { child, socket }
    }

    /// Lets it have so many files open besides those that it has.
    pub(crate) fn may_open(&self, more: usize) {
        let pid = self.child.id();
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let limit = format!("--nofile={}:", open + more);
        let set = Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status();
        assert!(set.unwrap().success());
    }

    /// SIGKILL.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Killable {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a child: serves until it is killed.
pub(crate) fn serve_if_child() {
    if let Some(place) = std::env::var_os(PLACE) {
        run(options(Path::new(&place))).unwrap();
    }
}

/// Who connects.
#[derive(Clone)]
pub(crate) struct Who {
    pub(crate) reader: bool,
    pub(crate) hello: Hello,
    pub(crate) key: [u8; 32],
}

pub(crate) fn who(n: u32, session: u128) -> Who {
    let hello = Hello {
        volume: VOLUME.into(),
        replica: REPLICA.into(),
        generation: generation(n),
        instance: Instance(n.into()),
        session: Instance(session),
        queue: 0,
        queues: 1,
        checksums: false,
        lends: false,
    };
    Who { reader: false, hello, key: KEY }
}

/// One connection.
pub(crate) struct Client<S> {
    pub(crate) stream: S,
    pub(crate) generation: Generation,
    position: u64,
    tag: u64,
    checksums: bool,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl Answer {
    pub(crate) fn status(&self) -> Status {
        self.header.status
    }
}

pub(crate) fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The handshake; a refusal is an error.
pub(crate) fn knock(socket: &Path, who: &Who) -> Result<Client<UnixStream>, Verdict> {
    shake(connect(socket), who)
}

pub(crate) fn shake<S: Read + Write>(stream: S, who: &Who) -> Result<Client<S>, Verdict> {
    shake_with(stream, who, |stream, hello| stream.write_all(hello))
}

/// The handshake of an engine that passes these descriptors with its hello.
pub(crate) fn knock_with_fds(
    socket: &Path,
    who: &Who,
    fds: &[BorrowedFd<'_>],
) -> Result<Client<UnixStream>, Verdict> {
    shake_with(connect(socket), who, |stream, hello| {
        assert_eq!(lh_ring::sys::send_with_fds(stream.as_fd(), hello, fds)?, hello.len());
        Ok(())
    })
}

fn shake_with<S: Read + Write>(
    mut stream: S,
    who: &Who,
    send: impl FnOnce(&mut S, &[u8]) -> io::Result<()>,
) -> Result<Client<S>, Verdict> {
    let mut challenge = [0; CHALLENGE_LEN];
    stream.read_exact(&mut challenge).unwrap();
    let role = if who.reader { Role::Reader } else { Role::Engine };
    let asked = Asked::answer(&challenge, (&who.hello, role), &who.key, [9; 32]).unwrap();
    send(&mut stream, asked.hello()).unwrap();
    let mut welcome = [0; WELCOME_LEN];
    stream.read_exact(&mut welcome).unwrap();
    match asked.heard(&welcome) {
        Ok(generation) => {
            assert_eq!(generation, who.hello.generation);
            Ok(Client { stream, generation, position: 0, tag: 0, checksums: who.hello.checksums })
        }
        Err(NotLetIn::Refused(verdict, _)) => Err(verdict),
        Err(foreign) => panic!("{foreign}"),
    }
}

/// A session of one connection.
pub(crate) fn session(socket: &Path, n: u32, number: u128) -> Client<UnixStream> {
    knock(socket, &who(n, number)).unwrap()
}

impl<S: Read + Write> Client<S> {
    pub(crate) fn header(&mut self, op: OpCode, offset: u64, length: u32) -> Header {
        self.tag += 1;
        Header::request(op, self.tag, offset, length, self.generation)
    }

    /// The bytes of a message, aligned as an engine aligns them.
    pub(crate) fn encode(&mut self, mut header: Header, payload: &[u8]) -> Vec<u8> {
        header.payload = u32::try_from(payload.len()).unwrap();
        if !payload.is_empty() {
            header.pad = padding(self.position);
            if self.checksums && !header.has(flags::CRC) {
                header.flags |= flags::CRC;
                header.payload_crc = crc32c::crc32c(payload);
            }
        }
        let mut bytes = header.encode().to_vec();
        bytes.resize(HEADER_LEN + usize::from(header.pad), 0);
        bytes.extend_from_slice(payload);
        self.position += bytes.len() as u64;
        bytes
    }

    /// The bytes of a write whose bytes are in these pieces of memory that was lent.
    pub(crate) fn encode_lent(&mut self, mut header: Header, pieces: &[u8]) -> Vec<u8> {
        header.flags |= flags::LENT;
        self.encode_unaligned(header, pieces)
    }

    /// The same without any padding: the replica has to copy.
    pub(crate) fn encode_unaligned(&mut self, mut header: Header, payload: &[u8]) -> Vec<u8> {
        header.payload = u32::try_from(payload.len()).unwrap();
        let mut bytes = header.encode().to_vec();
        bytes.extend_from_slice(payload);
        self.position += bytes.len() as u64;
        bytes
    }

    pub(crate) fn send(&mut self, header: Header, payload: &[u8]) {
        let bytes = self.encode(header, payload);
        self.stream.write_all(&bytes).unwrap();
    }

    pub(crate) fn try_receive(&mut self) -> io::Result<Answer> {
        let mut bytes = [0; HEADER_LEN];
        self.stream.read_exact(&mut bytes)?;
        let header = Header::decode(&bytes).map_err(io::Error::other)?;
        assert!(header.has(flags::RESPONSE));
        let mut payload = vec![0; usize::from(header.pad) + header.payload as usize];
        self.stream.read_exact(&mut payload)?;
        payload.drain(..usize::from(header.pad));
        assert_eq!(header.has(flags::CRC), self.checksums && !payload.is_empty());
        if header.has(flags::CRC) {
            assert_eq!(header.payload_crc, crc32c::crc32c(&payload));
        }
        Ok(Answer { header, payload })
    }

    pub(crate) fn receive(&mut self) -> Answer {
        self.try_receive().unwrap()
    }

    /// True if the replica closes the connection; answers before that do not count.
    pub(crate) fn is_closed(&mut self) -> bool {
        loop {
            match self.try_receive() {
                Ok(_) => {}
                Err(e) => return e.kind() != io::ErrorKind::WouldBlock,
            }
        }
    }

    pub(crate) fn ask(&mut self, header: Header, payload: &[u8]) -> Answer {
        self.send(header, payload);
        let answer = self.receive();
        assert_eq!(answer.header.tag, header.tag);
        answer
    }

    pub(crate) fn op(&mut self, op: OpCode, offset: u64, length: u32) -> Answer {
        let header = self.header(op, offset, length);
        self.ask(header, &[])
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Status {
        let header = self.header(OpCode::Write, offset, u32::try_from(data.len()).unwrap());
        self.ask(header, data).status()
    }

    pub(crate) fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        let answer = self.op(OpCode::Read, offset, length);
        assert_eq!(answer.status(), Status::Ok);
        assert_eq!(answer.payload.len(), length as usize);
        answer.payload
    }

    /// Which blocks of a range hold data, in as many answers as it takes.
    pub(crate) fn allocation(&mut self, mut range: Extent) -> Vec<Run> {
        let mut all: Vec<Run> = Vec::new();
        while !range.is_empty() {
            let answer = self.op(OpCode::Allocation, range.offset, range.len.try_into().unwrap());
            assert_eq!(answer.status(), Status::Ok);
            assert!(lh_block::are_runs(&answer.payload, range));
            all.extend(lh_block::runs(&answer.payload, range));
            let end = all.last().unwrap().range.end();
            range = Extent::new(end, range.end() - end);
        }
        all
    }

    pub(crate) fn control(&mut self, control: &Control) -> Answer {
        let header = self.header(OpCode::Control, 0, 0);
        self.ask(header, &serde_json::to_vec(control).unwrap())
    }

    pub(crate) fn state(&mut self) -> ReplicaState {
        let answer = self.control(&Control::State);
        assert_eq!(answer.status(), Status::Ok, "{}", String::from_utf8_lossy(&answer.payload));
        serde_json::from_slice(&answer.payload).unwrap()
    }
}

/// Bytes that tell their place.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut n = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        n ^= n << 13;
        n ^= n >> 7;
        n ^= n << 17;
        bytes.extend_from_slice(&n.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
