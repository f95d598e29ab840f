//! The kernel's NBD client from the command line, and a small server for it to be a client of.
//!
//! ```text
//! nbd-kernel missing
//! nbd-kernel serve SOCKET FILE BYTES            an export "disk" whose bytes are in a file
//! nbd-kernel connect NAME SOCKET [--connections N] [--timeout S] [--dead-timeout S]
//! nbd-kernel keep NAME SOCKET [...]             connects, and hands over new connections whenever some have died
//! nbd-kernel reconnect NAME SOCKET [--connections N]
//! nbd-kernel resize NAME BYTES
//! nbd-kernel disconnect NAME
//! nbd-kernel status
//! ```
//!
//! NAME is what the device is found again by. `serve` takes `resize BYTES` on its standard input.

use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lh_block::{Device, Done, Geometry, IoError, Op, Request};
use lh_ring::{Frontend, Payload, Pool, Ring};
use nbd_frontend::client::{Served, handshake};
use nbd_frontend::kernel::{self, Adopted, Settings, Slow};
use nbd_frontend::{Export, Limits, Listener, Server};

type Failure = Box<dyn std::error::Error>;

const EXPORT: &str = "disk";

/// How long requests in flight may take to be answered, before it is looked whether their server lives.
const ANSWERED: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("nbd-kernel: {e}");
            ExitCode::FAILURE
        }
    }
}

struct Arguments {
    words: Vec<String>,
    connections: usize,
    timeout: u64,
    dead_timeout: u64,
}

impl Arguments {
    fn parse() -> Result<Self, Failure> {
        let mut found = Self { words: Vec::new(), connections: 1, timeout: 1, dead_timeout: 60 };
        let mut arguments = std::env::args().skip(1);
        while let Some(word) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--connections" => found.connections = value()?.parse()?,
                "--timeout" => found.timeout = value()?.parse()?,
                "--dead-timeout" => found.dead_timeout = value()?.parse()?,
                _ => found.words.push(word),
            }
        }
        Ok(found)
    }

    fn word(&self, at: usize) -> Result<&str, Failure> {
        self.words.get(at).map(String::as_str).ok_or_else(|| "too few arguments".into())
    }
}

fn run() -> Result<(), Failure> {
    let arguments = Arguments::parse()?;
    match arguments.word(0)? {
        "missing" => say(kernel::missing().unwrap_or_default()),
        "serve" => serve(arguments.word(1)?, arguments.word(2)?, arguments.word(3)?.parse()?)?,
        "connect" => drop(connect(&arguments)?),
        "keep" => keep(&arguments)?,
        "reconnect" => {
            let mut device = found(arguments.word(1)?)?;
            let (served, sockets) = sockets(Path::new(arguments.word(2)?), arguments.connections)?;
            device.reconnect(sockets)?;
            while device.adopt(&served, Duration::from_secs(arguments.timeout), ANSWERED)?
                != Adopted::AsServed
            {}
            say("reconnected");
        }
        "resize" => {
            found(arguments.word(1)?)?.resize(arguments.word(2)?.parse()?)?;
            say("resized");
        }
        "disconnect" => {
            found(arguments.word(1)?)?.disconnect()?;
            say("disconnected");
        }
        "status" => {
            for (index, connected) in kernel::status()? {
                say(&format!("nbd{index} {connected}"));
            }
        }
        other => return Err(format!("unknown verb {other:?}").into()),
    }
    Ok(())
}

fn say(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

fn found(identifier: &str) -> Result<kernel::Device, Failure> {
    kernel::find(identifier)?.ok_or_else(|| format!("no device of {identifier}").into())
}

/// Connections on which the handshake is done.
fn sockets(path: &Path, count: usize) -> Result<(Served, Vec<OwnedFd>), Failure> {
    let mut sockets = Vec::new();
    let mut served = None;
    for _ in 0..count {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        served = Some(handshake(&mut stream, EXPORT)?);
        stream.set_read_timeout(None)?;
        sockets.push(stream.into());
    }
    Ok((served.ok_or("no connection")?, sockets))
}

fn connect(arguments: &Arguments) -> Result<kernel::Device, Failure> {
    let (served, sockets) = sockets(Path::new(arguments.word(2)?), arguments.connections)?;
    let settings = Settings {
        index: None,
        identifier: arguments.word(1)?.to_owned(),
        served,
        timeout: Duration::from_secs(arguments.timeout),
        slow: Slow::IsDead,
        dead_timeout: Duration::from_secs(arguments.dead_timeout),
    };
    let device = kernel::connect(&settings, sockets)?;
    say(&format!("connected {}", device.path().display()));
    Ok(device)
}

/// Looks after a device, as an instance manager does.
fn keep(arguments: &Arguments) -> Result<(), Failure> {
    const LOOK: Duration = Duration::from_millis(10);
    let path = Path::new(arguments.word(2)?);
    let mut device = match kernel::find(arguments.word(1)?)? {
        Some(device) => device,
        None => connect(arguments)?,
    };
    while device.is_connected() {
        if !device.has_lost_connection(Duration::from_secs(1))? {
            continue;
        }
        let again = sockets(path, arguments.connections).and_then(|(served, sockets)| {
            device.reconnect(sockets)?;
            let timeout = Duration::from_secs(arguments.timeout);
            while device.adopt(&served, timeout, ANSWERED)? != Adopted::AsServed {
                if device.has_lost_connection(Duration::ZERO)? {
                    return Err("the server has died again".into());
                }
            }
            Ok(())
        });
        match again {
            Ok(()) => say("reconnected"),
            // Nobody listens yet.
            Err(_) => std::thread::sleep(LOOK),
        }
    }
    Ok(())
}

/// Serves a file until it is killed.
fn serve(socket: &str, file: &str, bytes: u64) -> Result<(), Failure> {
    let pool = Pool::new(8 << 20, 64 << 20)?;
    let size = Arc::new(AtomicU64::new(bytes));
    let mut disk = Disk {
        file: File::options().create(true).truncate(false).read(true).write(true).open(file)?,
        size: Arc::clone(&size),
        pool: pool.clone(),
        done: Vec::new(),
    };
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if let Some(Ok(bytes)) = line.strip_prefix("resize ").map(str::parse) {
                size.store(bytes, Ordering::Relaxed);
                say("resized");
            }
        }
    });
    let mut ring = Ring::new(256)?;
    let export = Export { name: EXPORT.into(), description: "a file".into(), read_only: false };
    let mut server = Server::new(export, Limits::of_pool(&pool), 2, &pool, disk.geometry().depth);
    server.listen(&mut ring, listen(Path::new(socket))?);
    say("serving");
    loop {
        server.turn(&mut ring, &mut disk);
        ring.turn(None)?;
        while let Some(completion) = ring.next() {
            server.completion(&mut ring, &mut disk, completion);
        }
    }
}

/// Listens, once the kernel has let go of the socket of a server that was killed: the ring that accepted on it is taken
/// apart after the process has been reaped.
fn listen(path: &Path) -> std::io::Result<Listener> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        match Listener::unix(path) {
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse && std::time::Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

/// A disk in a file, whose requests are done when they are submitted.
struct Disk {
    file: File,
    size: Arc<AtomicU64>,
    pool: Pool,
    done: Vec<Done<Payload>>,
}

impl Disk {
    fn perform(&mut self, request: &Request<Payload>) -> std::io::Result<Option<Payload>> {
        let range = request.range;
        match request.op {
            Op::Read => {
                let len = u32::try_from(range.len).map_err(std::io::Error::other)?;
                let mut data = self.pool.alloc(len, 4096).ok_or(std::io::ErrorKind::OutOfMemory)?;
                let read = data.read_from(&self.file, range.offset)?;
                data.fill_zero(read..len as usize);
                return Ok(Some(data));
            }
            Op::Write { fua } => {
                if let Some(data) = &request.data {
                    data.write_to(&self.file, range.offset)?;
                }
                if fua {
                    self.file.sync_data()?;
                }
            }
            Op::WriteZeroes { .. } | Op::Unmap => {
                lh_ring::sys::punch_hole(&self.file, range.offset, range.len)?;
            }
            Op::Flush => self.file.sync_data()?,
            // Nothing is known.
            Op::Allocation => {}
        }
        Ok(None)
    }
}

impl Device<Payload> for Disk {
    fn geometry(&self) -> Geometry {
        let size = self.size.load(Ordering::Relaxed);
        Geometry { size, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 }
    }

    fn room(&self) -> u32 {
        128 - u32::try_from(self.done.len()).unwrap_or(u32::MAX)
    }

    fn submit(&mut self, request: Request<Payload>) {
        let (result, data) = match self.perform(&request) {
            Ok(data) => (Ok(()), data),
            Err(e) => {
                eprintln!("nbd-kernel: {:?} of {:?}: {e}", request.op, request.range);
                (Err(IoError::Io), None)
            }
        };
        self.done.push(Done { tag: request.tag, result, data });
    }

    fn poll_done(&mut self) -> Option<Done<Payload>> {
        self.done.pop()
    }
}
