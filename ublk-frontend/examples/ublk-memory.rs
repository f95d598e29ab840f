//! A disk in memory, in a file, or one that keeps nothing, as a block device: the smallest engine there is.
//!
//! ```text
//! ublk-memory serve NAME --size BYTES [--file PATH [--direct yes] | --null yes] [--queues N] [--threads N] [--depth N]
//!     [--block-size 512|4096]
//! ublk-memory cycle NAME --size BYTES [...]
//! ublk-memory remove NAME
//! ublk-memory missing
//! ```
//!
//! `serve` says `ready /dev/ublkbN MAJOR:MINOR` and serves until standard input says `stop`. With `--file` the bytes live
//! on after the process, so that it can be killed and started again while the device is in use. Also understood: `resize
//! BYTES`, and `allocations`, which says how often a queue's thread has asked the system for memory since it was last
//! asked. `cycle` makes, reads and removes a device so often as standard input says (`cycle N`) and says how many descriptors
//! it has open then. `remove` takes away a device that was left behind, and says `removed MAJOR:MINOR` or `removed nothing`;
//! `missing` says what the kernel lacks.

use std::fs::File;
use std::io::{BufRead, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use lh_block::{Device, Done, Geometry, IoError, Op, Request};
use lh_rig::allocations::{self, Counting, count_this_thread};
use lh_ring::{Frontend, Payload, Pool, Ring};
use ublk_frontend::{Attach, Attached, Channel, DeviceError, Server, attach, missing, remove_left_behind};

type Failure = Box<dyn std::error::Error>;

/// Bytes of a queue's memory.
const POOL: usize = 16 << 20;

/// Longest read or write.
const TRANSFER: u32 = 1 << 20;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let result = Settings::parse().and_then(|settings| match settings.verb.as_str() {
        "serve" => serve(&settings),
        "cycle" => cycle(&settings),
        "remove" => {
            match remove_left_behind(OWNER, &settings.name)? {
                Some((major, minor)) => say(&format!("removed {major}:{minor}")),
                None => say("removed nothing"),
            }
            Ok(())
        }
        "missing" => {
            say(&missing().unwrap_or_default());
            Ok(())
        }
        other => Err(format!("unknown verb {other:?}: serve, cycle, remove or missing").into()),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ublk-memory: {e}");
            ExitCode::FAILURE
        }
    }
}

const OWNER: &str = "memory";

/// How long a device may take to go.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
struct Settings {
    verb: String,
    name: String,
    size: u64,
    file: Option<PathBuf>,
    /// The file is used past the page cache.
    direct: bool,
    null: bool,
    queues: u16,
    threads: usize,
    depth: u16,
    block_size: u32,
}

impl Settings {
    fn parse() -> Result<Self, Failure> {
        let mut arguments = std::env::args().skip(1);
        let verb = arguments.next().ok_or("usage: ublk-memory serve NAME --size BYTES")?;
        let mut settings = Self {
            verb,
            name: arguments.next().unwrap_or_default(),
            size: 0,
            file: None,
            direct: false,
            null: false,
            queues: 1,
            threads: 0,
            depth: 64,
            block_size: 512,
        };
        while let Some(option) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{option} needs a value"))?;
            match option.as_str() {
                "--size" => settings.size = value.parse()?,
                "--file" => settings.file = Some(value.into()),
                "--direct" => settings.direct = value == "yes",
                "--null" => settings.null = value == "yes",
                "--queues" => settings.queues = value.parse()?,
                "--threads" => settings.threads = value.parse()?,
                "--depth" => settings.depth = value.parse()?,
                "--block-size" => settings.block_size = value.parse()?,
                other => return Err(format!("unknown option {other}").into()),
            }
        }
        Ok(settings)
    }

    const fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            logical_block: self.block_size,
            physical_block: 4096,
            max_transfer: TRANSFER,
            depth: self.depth as u32,
        }
    }

    fn attach(&self) -> Attach {
        Attach {
            owner: OWNER.into(),
            volume: self.name.clone(),
            queues: self.queues,
            depth: self.depth,
            geometry: self.geometry(),
        }
    }

    /// The file that a disk's bytes are in.
    fn open(&self, shared: Option<&File>) -> std::io::Result<File> {
        let flags = if self.direct { libc::O_DIRECT } else { 0 };
        match (&self.file, shared) {
            (Some(path), _) => File::options()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .custom_flags(flags)
                .open(path),
            (None, Some(file)) => file.try_clone(),
            (None, None) => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    /// A queue's disk.
    fn disk(&self, size: &Arc<AtomicU64>, shared: Option<&File>, pool: &Pool) -> std::io::Result<Disk> {
        let store = if self.null { Store::Null } else { Store::File(self.open(shared)?) };
        Ok(Disk {
            store,
            size: Arc::clone(size),
            geometry: self.geometry(),
            pool: pool.clone(),
            done: Vec::with_capacity(self.depth.into()),
        })
    }
}

fn serve(settings: &Settings) -> Result<(), Failure> {
    prepare();
    let size = Arc::new(AtomicU64::new(settings.size));
    let (attached, queues) = show(settings, &size)?;
    let (major, minor) = attached.numbers()?;
    say(&format!("ready {} {major}:{minor}", attached.device().display()));
    obey(attached, &size, queues)
}

/// What a process that serves a block device does before its first thread starts, since threads inherit it.
fn prepare() {
    if let Err(e) = lh_ring::sys::set_io_flusher() {
        tracing::warn!("the kernel may wait for this device when it needs memory: {e}");
    }
    if let Err(e) = lh_ring::sys::lock_memory_on_fault() {
        tracing::warn!("memory is not locked: {e}");
    }
}

/// Makes the device or takes it over, and starts its queues.
fn show(settings: &Settings, size: &Arc<AtomicU64>) -> Result<(Attached, Vec<JoinHandle<()>>), Failure> {
    let mut attached = attach(&settings.attach())?;
    let threads = if settings.threads == 0 { attached.queues().into() } else { settings.threads };
    let memory = if settings.file.is_none() && !settings.null { Some(memory_file()?) } else { None };
    let mut queues = Vec::new();
    for channels in attached.channels(threads)? {
        queues.push(start(settings, channels, size, memory.as_ref())?);
    }
    attached.start()?;
    Ok((attached, queues))
}

/// Ends what `show` began.
fn end(attached: Attached, queues: Vec<JoinHandle<()>>) -> Result<(), Failure> {
    for queue in queues {
        queue.join().map_err(|_| "a queue has panicked")?;
    }
    Ok(attached.remove(PATIENCE)?)
}

fn cycle(settings: &Settings) -> Result<(), Failure> {
    prepare();
    let size = Arc::new(AtomicU64::new(settings.size));
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let Some(count) = line.strip_prefix("cycle ") else { break };
        for _ in 0..count.parse()? {
            let (mut attached, queues) = show(settings, &size)?;
            std::io::Read::read_exact(&mut File::open(attached.device())?, &mut [0; 4096])?;
            attached.stop(PATIENCE)?;
            end(attached, queues)?;
        }
        say(&format!("fds {}", std::fs::read_dir("/proc/self/fd")?.count()));
    }
    Ok(())
}

/// A file without a name, in memory.
fn memory_file() -> std::io::Result<File> {
    let path = format!("/dev/shm/ublk-memory.{}", std::process::id());
    let file = File::options().create_new(true).read(true).write(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn obey(mut attached: Attached, size: &AtomicU64, queues: Vec<JoinHandle<()>>) -> Result<(), Failure> {
    let mut told = allocations::so_far();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("resize", bytes) => {
                let bytes = bytes.parse()?;
                size.store(bytes, Ordering::Relaxed);
                match attached.resize(bytes) {
                    Ok(()) => say("resized"),
                    Err(e) => say(&format!("refused {e}")),
                }
            }
            ("allocations", _) => {
                let before = std::mem::replace(&mut told, allocations::so_far());
                say(&format!("allocations {}", told - before));
            }
            ("stop", _) => match attached.stop(PATIENCE) {
                Ok(()) => {
                    end(attached, queues)?;
                    say("stopped");
                    return Ok(());
                }
                Err(e @ DeviceError::InUse(_)) => say(&format!("refused {e}")),
                Err(e) => return Err(e.into()),
            },
            (other, _) => say(&format!("unknown {other}")),
        }
    }
    // Whoever gave the orders is gone: serve on.
    for queue in queues {
        let _ = queue.join();
    }
    Ok(())
}

fn say(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

/// Starts a thread with one ring, one frontend and one disk.
fn start(
    settings: &Settings,
    channels: Vec<Channel>,
    size: &Arc<AtomicU64>,
    memory: Option<&File>,
) -> Result<JoinHandle<()>, Failure> {
    let settings = settings.clone();
    let size = Arc::clone(size);
    let memory = memory.map(File::try_clone).transpose()?;
    let run = move || -> Result<(), Failure> {
        let pool = Pool::new(POOL, POOL)?;
        if let Err(e) = pool.lock().and_then(|()| pool.populate()) {
            tracing::warn!("memory is not locked: {e}");
        }
        let disk = settings.disk(&size, memory.as_ref(), &pool)?;
        run_queue(channels, disk, &pool, settings.depth.into())
    };
    Ok(std::thread::spawn(move || {
        if let Err(e) = run() {
            eprintln!("ublk-memory: {e}");
            std::process::exit(1);
        }
    }))
}

/// Serves until the device has gone.
fn run_queue(channels: Vec<Channel>, mut disk: Disk, pool: &Pool, depth: u32) -> Result<(), Failure> {
    const FRONTEND: u8 = 2;
    let mut ring = Ring::new(depth * 2)?;
    let mut server = Server::new(channels, FRONTEND, pool)?;
    server.turn(&mut ring, &mut disk);
    count_this_thread(true);
    while !server.is_gone() {
        ring.turn(None)?;
        while let Some(completion) = ring.next() {
            server.completion(&mut ring, &mut disk, completion);
        }
        server.turn(&mut ring, &mut disk);
    }
    count_this_thread(false);
    Ok(())
}

/// Where a disk's bytes are.
enum Store {
    File(File),
    /// Nowhere: whatever was in memory is read.
    Null,
}

/// A disk whose requests are done when they are submitted.
struct Disk {
    store: Store,
    size: Arc<AtomicU64>,
    geometry: Geometry,
    pool: Pool,
    done: Vec<Done<Payload>>,
}

impl Disk {
    fn perform(&mut self, request: &Request<Payload>) -> std::io::Result<Option<Payload>> {
        let range = request.range;
        if request.op == Op::Read {
            let len = u32::try_from(range.len).map_err(std::io::Error::other)?;
            let mut data = self.pool.alloc(len, 4096).ok_or(std::io::ErrorKind::OutOfMemory)?;
            if let Store::File(file) = &self.store {
                let read = data.read_from(file, range.offset)?;
                data.fill_zero(read..len as usize);
            }
            return Ok(Some(data));
        }
        let Store::File(file) = &self.store else { return Ok(None) };
        match request.op {
            Op::Write { fua } => {
                if let Some(data) = &request.data {
                    data.write_to(file, range.offset)?;
                }
                if fua {
                    file.sync_data()?;
                }
            }
            Op::WriteZeroes { .. } | Op::Unmap => {
                lh_ring::sys::punch_hole(file, range.offset, range.len)?;
            }
            Op::Flush => file.sync_data()?,
            Op::Read | Op::Allocation => {}
        }
        Ok(None)
    }
}

impl Device<Payload> for Disk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::Relaxed), ..self.geometry }
    }

    fn room(&self) -> u32 {
        self.geometry.depth - u32::try_from(self.done.len()).unwrap_or(u32::MAX)
    }

    fn submit(&mut self, request: Request<Payload>) {
        let (result, data) = match self.perform(&request) {
            Ok(data) => (Ok(()), data),
            Err(e) => {
                eprintln!("ublk-memory: {:?} of {:?}: {e}", request.op, request.range);
                (Err(IoError::Io), None)
            }
        };
        self.done.push(Done { tag: request.tag, result, data });
    }

    fn poll_done(&mut self) -> Option<Done<Payload>> {
        self.done.pop()
    }
}
