//! Loads a block device with overlapping writes and reads from threads on every processor, past the page cache, and checks
//! every block as a register (`tests::register`). Its server may die and come back meanwhile: requests only wait.
//!
//! ```text
//! register-device DEVICE BLOCKS THREADS SECONDS SEED
//! ```
//!
//! A line of JSON at the end; exit status 1 after a violation or an error.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use tests::dice::Dice;
use tests::register::{History, Stamp, read_stamp, stamp_block};

const BLOCK: usize = 4096;
/// Blocks of the longest write.
const LONGEST: u64 = 8;
/// Of a hundred requests, so many are reads.
const READS: u64 = 30;
/// How often each block is read at the end: replicas are chosen anew for each.
const READS_PER_BLOCK: u32 = 5;

/// Memory that begins a page, as O_DIRECT wants it.
struct Page {
    bytes: Vec<u8>,
    start: usize,
}

impl Page {
    fn new() -> Self {
        let bytes = vec![0; BLOCK * (LONGEST as usize + 1)];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, start }
    }

    fn first(&mut self, blocks: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + blocks * BLOCK]
    }
}

struct Load {
    device: File,
    blocks: u64,
    history: Mutex<History>,
    failed: AtomicBool,
    stamps: AtomicU64,
    reads: AtomicU64,
    longest_us: AtomicU64,
}

impl Load {
    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, what: impl std::fmt::Display) {
        eprintln!("VIOLATION {what}");
        self.failed.store(true, Ordering::Relaxed);
    }

    fn worker(&self, number: usize, seed: u64, until: Instant) -> io::Result<()> {
        let processors = thread::available_parallelism()?.get();
        let mut set = CpuSet::new();
        set.set(number % processors)?;
        sched_setaffinity(Pid::from_raw(0), &set)?;
        let (mut dice, mut page) = (Dice(seed ^ (number as u64) << 32), Page::new());
        while Instant::now() < until && !self.failed.load(Ordering::Relaxed) {
            let began = Instant::now();
            if dice.roll(100) < READS {
                self.read(dice.roll(self.blocks), &mut page)?;
            } else {
                let count = 1 + dice.roll(LONGEST);
                self.write(dice.roll(self.blocks - count + 1), count, &mut page)?;
            }
            let took = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.longest_us.fetch_max(took, Ordering::Relaxed);
        }
        Ok(())
    }

    fn read(&self, block: u64, page: &mut Page) -> io::Result<()> {
        let began = self.history().read_begins();
        let bytes = page.first(1);
        self.device.read_exact_at(bytes, block * BLOCK as u64)?;
        match read_stamp(bytes, block) {
            Err(what) => self.fail(what),
            Ok(stamp) => {
                let mut history = self.history();
                let verdict = history.read_returned(block, began, stamp);
                history.read_ends(began);
                drop(history);
                verdict.unwrap_or_else(|violation| self.fail(violation));
            }
        }
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn write(&self, first: u64, count: u64, page: &mut Page) -> io::Result<()> {
        let bytes = page.first(usize::try_from(count).map_err(io::Error::other)?);
        let mut writes = Vec::new();
        for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(BLOCK)) {
            let stamp = Stamp(self.stamps.fetch_add(1, Ordering::Relaxed));
            stamp_block(bytes, block, stamp);
            writes.push((block, self.history().write_begins(block, stamp)));
        }
        self.device.write_all_at(bytes, first * BLOCK as u64)?;
        let mut history = self.history();
        for (block, write) in writes {
            history.write_acked(block, write, false);
        }
        Ok(())
    }

    /// Reads every block again and again while nothing is in flight: one answer each, and a possible one.
    fn settle(&self) -> io::Result<()> {
        let mut page = Page::new();
        for _ in 0..READS_PER_BLOCK {
            for block in 0..self.blocks {
                let bytes = page.first(1);
                self.device.read_exact_at(bytes, block * BLOCK as u64)?;
                match read_stamp(bytes, block) {
                    Err(what) => self.fail(what),
                    Ok(stamp) => {
                        let verdict = self.history().settled(block, stamp);
                        verdict.unwrap_or_else(|violation| self.fail(violation));
                    }
                }
            }
        }
        Ok(())
    }
}

fn run() -> Result<bool, Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [device, blocks, threads, seconds, seed] = words.as_slice() else {
        return Err("usage: register-device DEVICE BLOCKS THREADS SECONDS SEED".into());
    };
    let (blocks, threads, seed): (u64, usize, u64) = (blocks.parse()?, threads.parse()?, seed.parse()?);
    let until = Instant::now() + Duration::from_secs_f64(seconds.parse()?);
    let load = Arc::new(Load {
        device: File::options().read(true).write(true).custom_flags(OFlag::O_DIRECT.bits()).open(device)?,
        blocks,
        history: Mutex::new(History::new(usize::try_from(blocks)?)),
        failed: AtomicBool::new(false),
        stamps: AtomicU64::new(1),
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
        load.stamps.load(Ordering::Relaxed) - 1,
        load.reads.load(Ordering::Relaxed),
        load.longest_us.load(Ordering::Relaxed) / 1000
    );
    Ok(!load.failed.load(Ordering::Relaxed))
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
