//! Loads an NBD export with overlapping writes, zeroes, trims and reads over several connections, and checks every block as a
//! register (`tests::register`). With `--register` smaller than the server's blocks, writes of neighbours meet in one of them.
//! When the server dies it connects again, first reads every block that was being written 20 times,
//! which must give one possible answer, and goes on. Where the socket is a symbolic link that comes to point elsewhere, as when
//! a volume goes to another node, the connections to the old server are given up, whether it answers or not.
//!
//! Prints a line of JSON at every recovery, every `--progress` seconds, and at the end; exit status 1 after a violation.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use tests::dice::Dice;
use tests::nbd::{self, Connection};
use tests::register::{History, ReadBegan, Stamp, Violation, WriteId, read_stamp, stamp_block};

/// All clients here are of one session: nothing here loses its power.
const SESSION: u64 = 0;
/// How often each block is read after a recovery: replicas are chosen anew for each.
const READS_PER_BLOCK: u32 = 20;
/// Of a hundred requests of the writing kinds, so many ask for stable storage.
const FUA_PERCENT: u64 = 5;
/// Of a hundred zeroes and trims, so many have any length; the others are as long as writes are.
const LONG_PERCENT: u64 = 3;
/// How often it is looked where the socket is.
const FOLLOW: Duration = Duration::from_millis(50);

struct Options {
    socket: PathBuf,
    export: String,
    /// Bytes of a block that is one register.
    register: u32,
    /// Where the first one lies, in bytes.
    first: u64,
    blocks: u64,
    connections: u32,
    depth: u32,
    seconds: f64,
    writes: u64,
    max_blocks: u64,
    read_percent: u64,
    /// Of a hundred requests that are no reads, so many are zeroes or trims.
    zero_percent: u64,
    progress: f64,
    seed: u64,
}

impl Options {
    /// Where a block lies, in bytes.
    fn offset(&self, block: u64) -> u64 {
        self.first + block * u64::from(self.register)
    }
}

struct Run {
    options: Options,
    history: Mutex<History>,
    violations: Mutex<Vec<String>>,
    stop: AtomicBool,
    next_stamp: AtomicU64,
    writes: AtomicU64,
    reads: AtomicU64,
    errors: AtomicU64,
    longest_us: AtomicU64,
    /// Connections, and where their server's socket was.
    open: Mutex<Vec<(PathBuf, UnixStream)>>,
}

enum Pending {
    Write { first: u64, writes: Vec<WriteId>, sent: Instant },
    Read { block: u64, began: ReadBegan, sent: Instant },
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run {
    fn violated(&self, what: String) {
        eprintln!("VIOLATION {what}");
        lock(&self.violations).push(what);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn finished(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
            || (self.options.writes > 0 && self.writes.load(Ordering::Relaxed) >= self.options.writes)
    }

    fn connect(&self) -> io::Result<Connection> {
        let place = self.options.socket.canonicalize()?;
        let connection = Connection::open(&place, &self.options.export)?;
        lock(&self.open).push((place, connection.handle()?));
        Ok(connection)
    }

    /// Gives up connections to a server that is not the volume's any more, for ever.
    fn follow(&self) {
        loop {
            thread::sleep(FOLLOW);
            let Ok(place) = self.options.socket.canonicalize() else { continue };
            lock(&self.open).retain(|(server, stream)| {
                let stays = *server == place;
                if !stays {
                    // One that has ended by itself cannot be shut down.
                    let _ = stream.shutdown(Shutdown::Both);
                }
                stays
            });
        }
    }

    /// Tells how far it is, for ever.
    fn tell_progress(&self) {
        loop {
            thread::sleep(Duration::from_secs_f64(self.options.progress));
            let (writes, reads) = (self.writes.load(Ordering::Relaxed), self.reads.load(Ordering::Relaxed));
            println!("{{\"event\":\"progress\",\"writes\":{writes},\"reads\":{reads}}}");
        }
    }

    /// One connection: keeps `depth` requests in flight until the run ends or the connection breaks.
    fn worker(&self, number: u32, round: u64, until: Instant) -> io::Result<()> {
        let mut c = self.connect()?;
        let mut dice = Dice::new(self.options.seed ^ u64::from(number) << 32 ^ round << 8);
        let mut pending: Vec<Option<Pending>> = (0..self.options.depth).map(|_| None).collect();
        let mut in_flight = 0;
        loop {
            let going_on = Instant::now() < until && !self.finished();
            if going_on {
                for (cookie, slot) in pending.iter_mut().enumerate().filter(|(_, s)| s.is_none()) {
                    let p = self.begin(&mut dice, &mut c, cookie as u64)?;
                    *slot = Some(p);
                    in_flight += 1;
                }
            } else if in_flight == 0 {
                return Ok(());
            }
            let reply = c.reply()?;
            let slot = usize::try_from(reply.cookie).ok().and_then(|i| pending.get_mut(i));
            let Some(p) = slot.and_then(Option::take) else {
                self.violated(format!("an answer to no request (cookie {})", reply.cookie));
                return Ok(());
            };
            in_flight -= 1;
            self.end(p, reply.error, &mut c)?;
        }
    }

    fn begin(&self, dice: &mut Dice, c: &mut Connection, cookie: u64) -> io::Result<Pending> {
        let o = &self.options;
        let sent = Instant::now();
        if dice.below(100) < o.read_percent {
            let block = dice.below(o.blocks);
            let began = lock(&self.history).read_begins();
            c.request((nbd::READ, 0), cookie, o.offset(block), o.register, &[])?;
            return Ok(Pending::Read { block, began, sent });
        }
        let zeroes = dice.below(100) < o.zero_percent;
        let long = zeroes && dice.below(100) < LONG_PERCENT;
        let count = 1 + dice.below(if long { o.blocks } else { o.max_blocks });
        let first = dice.below(o.blocks - count + 1);
        let fua = if dice.below(100) < FUA_PERCENT { nbd::FUA } else { 0 };
        let length = u32::try_from(count * u64::from(o.register)).map_err(io::Error::other)?;
        if zeroes {
            let writes = (first..first + count)
                .map(|b| lock(&self.history).write_begins(b, Stamp(0), SESSION))
                .collect();
            let (command, flags) = match dice.below(3) {
                0 => (nbd::TRIM, 0),
                1 => (nbd::WRITE_ZEROES, 0),
                _ => (nbd::WRITE_ZEROES, nbd::NO_HOLE),
            };
            c.request((command, flags | fua), cookie, o.offset(first), length, &[])?;
            return Ok(Pending::Write { first, writes, sent });
        }
        let mut data = vec![0; length as usize];
        let mut writes = Vec::new();
        for (block, bytes) in (first..).zip(data.chunks_exact_mut(o.register as usize)) {
            let stamp = Stamp(self.next_stamp.fetch_add(1, Ordering::Relaxed));
            stamp_block(bytes, block, stamp);
            writes.push(lock(&self.history).write_begins(block, stamp, SESSION));
        }
        c.request((nbd::WRITE, fua), cookie, o.offset(first), length, &data)?;
        Ok(Pending::Write { first, writes, sent })
    }

    fn end(&self, p: Pending, error: u32, c: &mut Connection) -> io::Result<()> {
        let sent = match p {
            Pending::Write { first, writes, sent } => {
                if error == 0 {
                    let mut history = lock(&self.history);
                    for (block, write) in (first..).zip(writes) {
                        history.write_acked(block, write, true);
                    }
                    self.writes.fetch_add(1, Ordering::Relaxed);
                }
                sent
            }
            Pending::Read { block, began, sent } => {
                if error == 0 {
                    let mut bytes = vec![0; self.options.register as usize];
                    c.read_data(&mut bytes)?;
                    match read_stamp(&bytes, block) {
                        Err(what) => self.violated(what),
                        Ok(stamp) => {
                            let mut history = lock(&self.history);
                            let verdict = history.read_returned(block, began, stamp);
                            history.read_ends(began);
                            drop(history);
                            self.check(verdict);
                        }
                    }
                    self.reads.fetch_add(1, Ordering::Relaxed);
                }
                sent
            }
        };
        if error != 0 {
            self.errors.fetch_add(1, Ordering::Relaxed);
            self.violated(format!("a request was answered with error {error}"));
        }
        let took = u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.longest_us.fetch_max(took, Ordering::Relaxed);
        Ok(())
    }

    fn check(&self, verdict: Result<(), Violation>) {
        if let Err(v) = verdict {
            self.violated(v.to_string());
        }
    }

    /// Reads every block again and again while nothing is in flight: one answer each, and a possible one.
    fn settle(&self, first_answer: &mut Option<Instant>) -> io::Result<()> {
        let mut c = self.connect()?;
        let mut bytes = vec![0; self.options.register as usize];
        for _ in 0..READS_PER_BLOCK {
            for block in 0..self.options.blocks {
                c.request((nbd::READ, 0), 0, self.options.offset(block), self.options.register, &[])?;
                let reply = c.reply()?;
                if reply.error != 0 {
                    self.violated(format!("block {block}: error {} after the recovery", reply.error));
                    return Ok(());
                }
                c.read_data(&mut bytes)?;
                first_answer.get_or_insert_with(Instant::now);
                match read_stamp(&bytes, block) {
                    Err(what) => self.violated(what),
                    Ok(stamp) => {
                        let verdict = lock(&self.history).settled(block, stamp);
                        self.check(verdict);
                    }
                }
            }
        }
        c.request((nbd::FLUSH, 0), 1, 0, 0, &[])?;
        c.reply().map(drop)
    }
}

fn run(options: Options) -> io::Result<bool> {
    let until = Instant::now() + Duration::from_secs_f64(options.seconds);
    let blocks = usize::try_from(options.blocks).map_err(io::Error::other)?;
    let run = Arc::new(Run {
        history: Mutex::new(History::new(blocks)),
        violations: Mutex::default(),
        stop: AtomicBool::new(false),
        next_stamp: AtomicU64::new(1),
        writes: AtomicU64::new(0),
        reads: AtomicU64::new(0),
        errors: AtomicU64::new(0),
        longest_us: AtomicU64::new(0),
        open: Mutex::default(),
        options,
    });
    // Both end with the program.
    let follower = run.clone();
    thread::spawn(move || follower.follow());
    if run.options.progress > 0.0 {
        let teller = run.clone();
        thread::spawn(move || teller.tell_progress());
    }
    let mut recoveries = 0;
    for round in 0.. {
        lock(&run.open).clear();
        let workers: Vec<_> = (0..run.options.connections)
            .map(|n| {
                let run = run.clone();
                thread::spawn(move || run.worker(n, round, until))
            })
            .collect();
        let broken =
            workers.into_iter().map(thread::JoinHandle::join).filter(|r| !matches!(r, Ok(Ok(())))).count();
        let lost = Instant::now();
        // The server may die again while blocks are read: then the reading begins anew.
        let mut first_answer = None;
        loop {
            match run.settle(&mut first_answer) {
                Ok(()) => break,
                Err(e) if lost.elapsed() > Duration::from_secs(120) => return Err(e),
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
        if broken > 0 {
            recoveries += 1;
            let pause = first_answer.map_or_else(|| lost.elapsed(), |at| at.duration_since(lost));
            println!("{{\"event\":\"recovered\",\"number\":{recoveries},\"ms\":{}}}", pause.as_millis());
        }
        if Instant::now() >= until || run.finished() {
            break;
        }
    }
    let violations = lock(&run.violations).len();
    println!(
        "{{\"event\":\"end\",\"writes\":{},\"reads\":{},\"errors\":{},\"recoveries\":{recoveries},\"longest_ms\":{},\"violations\":{violations}}}",
        run.writes.load(Ordering::Relaxed),
        run.reads.load(Ordering::Relaxed),
        run.errors.load(Ordering::Relaxed),
        run.longest_us.load(Ordering::Relaxed) / 1000,
    );
    Ok(violations == 0)
}

fn options() -> Result<Options, String> {
    let mut o = Options {
        socket: PathBuf::new(),
        export: String::new(),
        register: 4096,
        first: 0,
        blocks: 256,
        connections: 4,
        depth: 8,
        seconds: 10.0,
        writes: 0,
        max_blocks: 8,
        read_percent: 30,
        zero_percent: 10,
        progress: 0.0,
        seed: 1,
    };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|e| format!("{name} {value}: {e}"));
        let small = || number().and_then(|n| u32::try_from(n).map_err(|e| format!("{name}: {e}")));
        match name.as_str() {
            "--socket" => o.socket = value.into(),
            "--export" => o.export = value,
            "--register" => o.register = small()?,
            "--first" => o.first = number()?,
            "--blocks" => o.blocks = number()?,
            "--connections" => o.connections = small()?,
            "--depth" => o.depth = small()?,
            "--seconds" => o.seconds = value.parse().map_err(|e| format!("{name}: {e}"))?,
            "--writes" => o.writes = number()?,
            "--max-blocks" => o.max_blocks = number()?.clamp(1, o.blocks),
            "--read-percent" => o.read_percent = number()?,
            "--zero-percent" => o.zero_percent = number()?,
            "--progress" => o.progress = value.parse().map_err(|e| format!("{name}: {e}"))?,
            "--seed" => o.seed = number()?,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    if o.socket.as_os_str().is_empty() {
        return Err("--socket PATH is needed".into());
    }
    if o.register == 0 || !o.register.is_multiple_of(512) {
        return Err(format!("--register {}: a multiple of 512 is needed", o.register));
    }
    Ok(o)
}

fn main() -> ExitCode {
    match options().map(run) {
        Ok(Ok(true)) => ExitCode::SUCCESS,
        Ok(Ok(false)) => ExitCode::from(1),
        Ok(Err(e)) => {
            eprintln!("register-load: {e}");
            ExitCode::from(1)
        }
        Err(e) => {
            eprintln!("register-load: {e}");
            ExitCode::from(2)
        }
    }
}
