//! Loads a block device with overlapping writes, zeroes and reads, past the page cache, from threads on every processor that have a
//! descriptor each, and checks every block as a register (`tests::register`). Its server may die and come back meanwhile:
//! requests only wait.
//!
//! ```text
//! register-device DEVICE BLOCKS THREADS SECONDS SEED
//! ```
//!
//! A line of JSON at the end; exit status 1 after a violation or an error.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use tests::dice::Dice;
use tests::register::{History, Stamp, Violation, read_stamp, stamp_block};

const BLOCK: usize = 4096;
/// All clients here are of one session: nothing here loses its power.
const SESSION: u64 = 0;
/// Blocks of the longest write.
const LONGEST: u8 = 8;
/// Of a thousand requests, so many are reads.
const READS: u64 = 300;
/// Of a thousand requests that are no reads, so many are zeroes.
const ZEROES: u64 = 100;
/// How often each block is read at the end: replicas are chosen anew for each.
const READS_PER_BLOCK: u32 = 5;

/// Memory for the longest write that begins a page, as O_DIRECT wants it.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Self {
        let bytes = vec![0; BLOCK * (usize::from(LONGEST) + 1)];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, start }
    }

    fn blocks(&mut self, count: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + count * BLOCK]
    }
}

/// What all threads share.
struct Load {
    device: String,
    blocks: u64,
    history: Mutex<History>,
    violated: AtomicBool,
    next_stamp: AtomicU64,
    reads: AtomicU64,
    longest_us: AtomicU64,
}

impl Load {
    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> io::Result<File> {
        File::options().read(true).write(true).custom_flags(OFlag::O_DIRECT.bits()).open(&self.device)
    }

    fn violated(&self, what: impl std::fmt::Display) {
        eprintln!("VIOLATION {what}");
        self.violated.store(true, Ordering::Relaxed);
    }

    /// One request after the other, on a processor and through a descriptor of its own.
    fn worker(&self, number: usize, seed: u64, until: Instant) -> io::Result<()> {
        let mut processor = CpuSet::new();
        processor.set(number % thread::available_parallelism()?.get())?;
        sched_setaffinity(Pid::from_raw(0), &processor)?;
        let device = self.open()?;
        let (mut dice, mut buffer) = (Dice::new(seed ^ (number as u64) << 32), Buffer::new());
        while Instant::now() < until && !self.violated.load(Ordering::Relaxed) {
            let began = Instant::now();
            if dice.chance(READS) {
                self.read(&device, dice.below(self.blocks), &mut buffer)?;
            } else {
                let count = 1 + dice.below(u64::from(LONGEST));
                let first = dice.below(self.blocks - count + 1);
                if dice.chance(ZEROES) {
                    self.zero(&device, first, count, dice.chance(500))?;
                } else {
                    self.write(&device, first, count, &mut buffer)?;
                }
            }
            let took = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.longest_us.fetch_max(took, Ordering::Relaxed);
        }
        Ok(())
    }

    fn read(&self, device: &File, block: u64, buffer: &mut Buffer) -> io::Result<()> {
        let began = self.history().read_begins();
        let bytes = buffer.blocks(1);
        device.read_exact_at(bytes, block * BLOCK as u64)?;
        self.judge(bytes, block, |history, stamp| {
            let verdict = history.read_returned(block, began, stamp);
            history.read_ends(began);
            verdict
        });
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn write(&self, device: &File, first: u64, count: u64, buffer: &mut Buffer) -> io::Result<()> {
        let bytes = buffer.blocks(usize::try_from(count).map_err(io::Error::other)?);
        let mut writes = Vec::new();
        for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(BLOCK)) {
            let stamp = Stamp(self.next_stamp.fetch_add(1, Ordering::Relaxed));
            stamp_block(bytes, block, stamp);
            writes.push((block, self.history().write_begins(block, stamp, SESSION)));
        }
        device.write_all_at(bytes, first * BLOCK as u64)?;
        let mut history = self.history();
        for (block, write) in writes {
            // No power goes here: what is answered stays.
            history.write_acked(block, write, true);
        }
        Ok(())
    }

    /// Zeroes, `hole`: that give their space back. Drivers are asked for them by `fallocate`.
    fn zero(&self, device: &File, first: u64, count: u64, hole: bool) -> io::Result<()> {
        let writes: Vec<_> = (first..first + count)
            .map(|block| (block, self.history().write_begins(block, Stamp(0), SESSION)))
            .collect();
        let how =
            if hole { FallocateFlags::FALLOC_FL_PUNCH_HOLE } else { FallocateFlags::FALLOC_FL_ZERO_RANGE };
        let [at, length] = [first, count].map(|blocks| i64::try_from(blocks * BLOCK as u64));
        fallocate(
            device,
            how | FallocateFlags::FALLOC_FL_KEEP_SIZE,
            at.map_err(io::Error::other)?,
            length.map_err(io::Error::other)?,
        )?;
        let mut history = self.history();
        for (block, write) in writes {
            history.write_acked(block, write, true);
        }
        Ok(())
    }

    /// Reads every block again and again while nothing is in flight: one answer each, and a possible one.
    fn settle(&self) -> io::Result<()> {
        let (device, mut buffer) = (self.open()?, Buffer::new());
        for block in (0..READS_PER_BLOCK).flat_map(|_| 0..self.blocks) {
            let bytes = buffer.blocks(1);
            device.read_exact_at(bytes, block * BLOCK as u64)?;
            self.judge(bytes, block, |history, stamp| history.settled(block, stamp));
        }
        Ok(())
    }

    fn judge(
        &self,
        bytes: &[u8],
        block: u64,
        rule: impl FnOnce(&mut History, Stamp) -> Result<(), Violation>,
    ) {
        match read_stamp(bytes, block) {
            Err(what) => self.violated(what),
            Ok(stamp) => {
                rule(&mut self.history(), stamp).unwrap_or_else(|violation| self.violated(violation));
            }
        }
    }
}

/// False after a violation.
fn run() -> Result<bool, Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [device, blocks, threads, seconds, seed] = words.as_slice() else {
        return Err("usage: register-device DEVICE BLOCKS THREADS SECONDS SEED".into());
    };
    let (blocks, threads, seed): (u64, usize, u64) = (blocks.parse()?, threads.parse()?, seed.parse()?);
    if blocks < u64::from(LONGEST) {
        return Err(format!("BLOCKS is {LONGEST} or more").into());
    }
    let until = Instant::now() + Duration::from_secs_f64(seconds.parse()?);
    let load = Arc::new(Load {
        device: device.clone(),
        blocks,
        history: Mutex::new(History::new(usize::try_from(blocks)?)),
        violated: AtomicBool::new(false),
        next_stamp: AtomicU64::new(1),
        reads: AtomicU64::new(0),
        longest_us: AtomicU64::new(0),
    });
    let workers: Vec<_> = (0..threads)
        .map(|number| {
            let load = Arc::clone(&load);
            thread::spawn(move || load.worker(number, seed, until))
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_| "a thread has panicked")??;
    }
    load.settle()?;
    println!(
        "{{\"blocks_written\":{},\"reads\":{},\"longest_ms\":{}}}",
        load.next_stamp.load(Ordering::Relaxed) - 1,
        load.reads.load(Ordering::Relaxed),
        load.longest_us.load(Ordering::Relaxed) / 1000
    );
    Ok(!load.violated.load(Ordering::Relaxed))
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("register-device: {e}");
            ExitCode::FAILURE
        }
    }
}
