//! Loads an NBD export with overlapping writes and reads over several connections, and checks every block as a register
//! (`tests::register`). When the server dies it connects again, first reads every block that was being written 20 times,
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

const BLOCK: u32 = 4096;
/// All clients here are of one session: nothing here loses its power.
const SESSION: u64 = 0;
/// How often each block is read after a recovery: replicas are chosen anew for each.
const READS_PER_BLOCK: u32 = 20;
/// How often it is looked where the socket is.
const FOLLOW: Duration = Duration::from_millis(50);

struct Options {
    socket: PathBuf,
    export: String,
    blocks: u64,
    connections: u32,
    depth: u32,
    seconds: f64,
    writes: u64,
    max_blocks: u64,
    read_percent: u64,
    progress: f64,
    seed: u64,
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
        let sent = Instant::now();
        if dice.below(100) < self.options.read_percent {
            let block = dice.below(self.options.blocks);
            let began = lock(&self.history).read_begins();
            c.request(nbd::READ, cookie, block * u64::from(BLOCK), BLOCK, &[])?;
            return Ok(Pending::Read { block, began, sent });
        }
        let count = 1 + dice.below(self.options.max_blocks);
        let first = dice.below(self.options.blocks - count + 1);
        let mut data = vec![0; usize::try_from(count).map_err(io::Error::other)? * BLOCK as usize];
        let mut writes = Vec::new();
        {
            let mut history = lock(&self.history);
            for (block, bytes) in (first..).zip(data.chunks_exact_mut(BLOCK as usize)) {
                let stamp = Stamp(self.next_stamp.fetch_add(1, Ordering::Relaxed));
                stamp_block(bytes, block, stamp);
                writes.push(history.write_begins(block, stamp, SESSION));
            }
        }
        let length = u32::try_from(data.len()).map_err(io::Error::other)?;
        c.request(nbd::WRITE, cookie, first * u64::from(BLOCK), length, &data)?;
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
                    let mut bytes = vec![0; BLOCK as usize];
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
        let mut bytes = vec![0; BLOCK as usize];
        for _ in 0..READS_PER_BLOCK {
            for block in 0..self.options.blocks {
                c.request(nbd::READ, 0, block * u64::from(BLOCK), BLOCK, &[])?;
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
        c.request(nbd::FLUSH, 1, 0, 0, &[])?;
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
        blocks: 256,
        connections: 4,
        depth: 8,
        seconds: 10.0,
        writes: 0,
        max_blocks: 8,
        read_percent: 30,
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
            "--blocks" => o.blocks = number()?,
            "--connections" => o.connections = small()?,
            "--depth" => o.depth = small()?,
            "--seconds" => o.seconds = value.parse().map_err(|e| format!("{name}: {e}"))?,
            "--writes" => o.writes = number()?,
            "--max-blocks" => o.max_blocks = number()?.clamp(1, o.blocks),
            "--read-percent" => o.read_percent = number()?,
            "--progress" => o.progress = value.parse().map_err(|e| format!("{name}: {e}"))?,
            "--seed" => o.seed = number()?,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    if o.socket.as_os_str().is_empty() {
        return Err("--socket PATH is needed".into());
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
