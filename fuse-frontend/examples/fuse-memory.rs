//! A disk in memory, or in a file, as a block device: the smallest engine there is.
//!
//! ```text
//! fuse-memory serve NAME --size BYTES [--file PATH] [--record PATH] [--queues N] [--block-size 512|4096]
//!     [--socket PATH] [--node PATH]
//! ```
//!
//! serves `/dev/longhorn/NAME` until standard input says `stop`. With `--file` the bytes live on after the process, so
//! that it can be killed and started again while the device is in use. Also understood: `resize BYTES`, and `keep`,
//! which starts a new keeper if the old one has died.
//!
//! With `--record`, too, every change is written to a second file, in order: what a disk holds after its power was cut is
//! made from that. An entry is four numbers of eight bytes, little-endian: nanoseconds since 1970, what (1 write, 2 write
//! with FUA, 3 zeroes, 4 flush), offset, length; behind a write follow its bytes.

use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::SystemTime;

use fuse_frontend::{Attach, Attached, Server, attach, init::Agreement, keeper};
use lh_block::{Device, Done, Geometry, IoError, Op, Request};
use lh_ring::{Fd, Frontend, MemoryDisk, Payload, Pool, Ring};

type Failure = Box<dyn std::error::Error>;

/// Requests at a time.
const DEPTH: u32 = 128;

/// Bytes of a queue's memory: 3 MiB to read requests, and large requests in flight.
const POOL: usize = 16 << 20;

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let result = Settings::parse().and_then(|settings| match settings.verb.as_str() {
        "serve" => serve(&settings),
        "keeper" => keeper::run(settings.keeper()).map_err(Failure::from),
        other => Err(format!("unknown verb {other:?}: serve or keeper").into()),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("fuse-memory: {e}");
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug)]
struct Settings {
    verb: String,
    name: String,
    size: u64,
    file: Option<PathBuf>,
    record: Option<PathBuf>,
    block_size: u32,
    queues: u32,
    socket: PathBuf,
    node: PathBuf,
}

impl Settings {
    fn parse() -> Result<Self, Failure> {
        let mut arguments = std::env::args().skip(1);
        let (verb, name) =
            arguments.next().zip(arguments.next()).ok_or("usage: fuse-memory serve NAME --size BYTES")?;
        let mut settings = Self {
            socket: format!("/run/longhorn/{name}.fuse.sock").into(),
            node: format!("/dev/longhorn/{name}").into(),
            verb,
            name,
            size: 0,
            file: None,
            record: None,
            block_size: 512,
            queues: 1,
        };
        while let Some(option) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{option} needs a value"))?;
            match option.as_str() {
                "--size" => settings.size = value.parse()?,
                "--file" => settings.file = Some(value.into()),
                "--record" => settings.record = Some(value.into()),
                "--block-size" => settings.block_size = value.parse()?,
                "--queues" => settings.queues = value.parse()?,
                "--socket" => settings.socket = value.into(),
                "--node" => settings.node = value.into(),
                other => return Err(format!("unknown option {other}").into()),
            }
        }
        if settings.queues > 1 && settings.file.is_none() {
            return Err("several queues share a disk only in a file: --file".into());
        }
        if settings.record.is_some() && (settings.file.is_none() || settings.queues > 1) {
            return Err("one queue over a file is recorded: --file".into());
        }
        Ok(settings)
    }

    fn keeper(&self) -> keeper::Options {
        keeper::Options {
            volume: self.name.clone(),
            socket: self.socket.clone(),
            owner: "memory".into(),
            node: self.node.clone(),
        }
    }

    fn attach(&self) -> Result<Attach, Failure> {
        let command = vec![
            std::env::current_exe()?.into(),
            "keeper".into(),
            self.name.clone().into(),
            "--socket".into(),
            self.socket.clone().into(),
            "--node".into(),
            self.node.clone().into(),
        ];
        Ok(Attach { socket: self.socket.clone(), owner: "memory".into(), command, log: None })
    }
}

fn serve(settings: &Settings) -> Result<(), Failure> {
    if let Err(e) = lh_ring::sys::lock_memory_on_fault() {
        tracing::warn!("memory is not locked: {e}");
    }
    let options = settings.attach()?;
    let mut attached = attach(&options)?;
    if attached.may_have_lost {
        tracing::warn!("this kernel does not hand out again what the server before had read");
    }
    let size = Arc::new(AtomicU64::new(settings.size));
    let mut queues = Vec::new();
    for _ in 0..settings.queues {
        queues.push(Queue::start(settings, &attached, &size)?);
    }
    let info = attached.serve(settings.block_size, settings.size)?;
    say(&format!("ready {} {}", info.node.display(), info.device().unwrap_or_default().display()));

    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("resize", bytes) => {
                let bytes = bytes.parse()?;
                size.store(bytes, Ordering::Relaxed);
                attached.resize(bytes)?;
                say("resized");
            }
            ("look", _) => say(&format!("bound {}", attached.replace_lost_device(settings.block_size)?)),
            ("keep", _) => say(&format!("kept {}", attached.replace_dead_keeper(&options)?)),
            ("stop", _) => match attached.stop() {
                Ok(()) => {
                    for queue in queues {
                        queue.thread.join().map_err(|_| "a queue has panicked")?;
                    }
                    say("stopped");
                    return Ok(());
                }
                Err(e) => say(&format!("refused {e}")),
            },
            (other, _) => say(&format!("unknown {other}")),
        }
    }
    // Whoever gave the orders is gone: serve on.
    for queue in queues {
        let _ = queue.thread.join();
    }
    Ok(())
}

fn say(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

/// A thread with one ring, one frontend and one device.
struct Queue {
    thread: JoinHandle<()>,
}

impl Queue {
    fn start(settings: &Settings, attached: &Attached, size: &Arc<AtomicU64>) -> Result<Self, Failure> {
        let fuse = attached.fuse.try_clone()?;
        let agreement = attached.agreement;
        let geometry = Geometry {
            size: settings.size,
            logical_block: settings.block_size,
            physical_block: 4096,
            max_transfer: fuse_frontend::init::MAX_READ,
            depth: DEPTH,
        };
        let store = match &settings.file {
            Some(path) => {
                let file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
                let record = settings.record.as_ref().map(File::create).transpose()?;
                Some(FileStore { file, record, size: Arc::clone(size) })
            }
            None => None,
        };
        let thread = std::thread::spawn(move || {
            if let Err(e) = run_queue(fuse, &agreement, store, geometry) {
                eprintln!("fuse-memory: {e}");
                std::process::exit(1);
            }
        });
        Ok(Self { thread })
    }
}

/// Serves until the connection ends.
fn run_queue(
    fuse: OwnedFd,
    agreement: &Agreement,
    store: Option<FileStore>,
    geometry: Geometry,
) -> Result<(), Failure> {
    const FRONTEND: u8 = 2;
    let pool = Pool::new(POOL, POOL)?;
    if let Err(e) = pool.lock().and_then(|()| pool.populate()) {
        tracing::warn!("memory is not locked: {e}");
    }
    let mut device: Box<dyn Device<Payload>> = match store {
        Some(store) => Box::new(FileDisk { store, geometry, pool: pool.clone(), done: Vec::new() }),
        None => Box::new(MemoryDisk::new(&pool, geometry)),
    };
    let mut ring = Ring::new(DEPTH)?;
    let mut server = Server::new(Fd::new(fuse), agreement, FRONTEND, &pool, DEPTH)?;
    server.turn(&mut ring, &mut *device);
    while !server.is_gone() {
        ring.turn(None)?;
        while let Some(completion) = ring.next() {
            server.completion(&mut ring, &mut *device, completion);
        }
        server.turn(&mut ring, &mut *device);
    }
    Ok(())
}

/// The bytes of a disk in a file, and how many of them are shown.
struct FileStore {
    file: File,
    record: Option<File>,
    size: Arc<AtomicU64>,
}

/// A disk in a file. Requests are done when they are submitted.
struct FileDisk {
    store: FileStore,
    geometry: Geometry,
    pool: Pool,
    done: Vec<Done<Payload>>,
}

impl FileStore {
    /// Appends an entry of the record.
    fn note(&mut self, request: &Request<Payload>) -> std::io::Result<()> {
        let Some(record) = &mut self.record else { return Ok(()) };
        let what: u64 = match request.op {
            Op::Read | Op::Allocation => return Ok(()),
            Op::Write { fua: false } => 1,
            Op::Write { fua: true } => 2,
            Op::WriteZeroes { .. } | Op::Unmap => 3,
            Op::Flush => 4,
        };
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let head = [now, what, request.range.offset, request.range.len].map(u64::to_le_bytes).concat();
        record.write_all(&head)?;
        if what < 3 {
            request.data.iter().flat_map(Payload::segments).try_for_each(|part| record.write_all(part))?;
        }
        Ok(())
    }
}

impl FileDisk {
    fn perform(&mut self, request: &Request<Payload>) -> std::io::Result<Option<Payload>> {
        let file = &self.store.file;
        let range = request.range;
        match request.op {
            Op::Read => {
                let len = u32::try_from(range.len).map_err(std::io::Error::other)?;
                let mut bytes = vec![0; len as usize];
                let mut done = 0;
                while done < bytes.len() {
                    match file.read_at(&mut bytes[done..], range.offset + done as u64)? {
                        0 => break,
                        n => done += n,
                    }
                }
                let mut data = self.pool.alloc(len, 512).ok_or(std::io::ErrorKind::OutOfMemory)?;
                data.write_at(0, &bytes);
                return Ok(Some(data));
            }
            Op::Write { .. } => {
                let mut at = range.offset;
                for segment in request.data.iter().flat_map(Payload::segments) {
                    file.write_all_at(segment, at)?;
                    at += segment.len() as u64;
                }
            }
            Op::WriteZeroes { .. } | Op::Unmap => {
                let mode = nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE
                    | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
                let (offset, len) = (i64::try_from(range.offset), i64::try_from(range.len));
                let (offset, len) = (offset.unwrap_or(i64::MAX), len.unwrap_or(i64::MAX));
                nix::fcntl::fallocate(file, mode, offset, len)?;
            }
            Op::Flush | Op::Allocation => {}
        }
        Ok(None)
    }
}

impl Device<Payload> for FileDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.store.size.load(Ordering::Relaxed), ..self.geometry }
    }

    fn room(&self) -> u32 {
        self.geometry.depth - u32::try_from(self.done.len()).unwrap_or(u32::MAX)
    }

    fn submit(&mut self, request: Request<Payload>) {
        let performed = self.perform(&request);
        let (result, data) = match performed.and_then(|data| self.store.note(&request).map(|()| data)) {
            Ok(data) => (Ok(()), data),
            Err(e) => {
                eprintln!("fuse-memory: {:?} of {}: {e}", request.op, request.range);
                (Err(IoError::Io), None)
            }
        };
        self.done.push(Done { tag: request.tag, result, data });
    }

    fn poll_done(&mut self) -> Option<Done<Payload>> {
        self.done.pop()
    }
}
