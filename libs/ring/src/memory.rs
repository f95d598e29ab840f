//! A disk in memory: a [`Device`] without an engine, for tests, benchmarks and examples of frontends.
//!
//! - A request takes effect when it is submitted; its answer comes with the next `poll_done`, in order, unless
//!   [`MemoryDisk::set_answers`] says otherwise.
//! - Space that was never written, unmapped or zeroed as a whole takes no memory and is reported as a hole.
//! - Queues of one disk ([`MemoryDisk::another`]) may live on several threads.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lh_block::{ALLOCATION_MAX, BLOCK, Device, Done, Extent, Geometry, IoError, Op, Request, Runs};

use crate::{Payload, Pool};

/// Bytes that are allocated at once.
const PAGE: usize = 64 << 10;

type Page = Box<[u8; PAGE]>;

/// The bytes of a disk, shared by its queues.
#[derive(Clone, Debug)]
pub struct MemoryStore(Arc<Mutex<Vec<Option<Page>>>>);

/// When and in which order a [`MemoryDisk`] answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Answers {
    /// At once, in the order of the requests.
    #[default]
    AtOnce,
    /// At once, last first.
    Reversed,
    /// Not before this is changed.
    Held,
    /// So many at once, in order; the others not before this is changed.
    Next(u32),
}

/// One queue of a disk in memory.
#[derive(Debug)]
pub struct MemoryDisk {
    geometry: Geometry,
    store: MemoryStore,
    pool: Pool,
    /// Answers, and whether with one a change counts as done that is not on stable storage.
    done: VecDeque<(Done<Payload>, bool)>,
    /// Reads that the pool had no memory for.
    waiting: VecDeque<(u64, Extent)>,
    answers: Answers,
    fails: Option<IoError>,
    submitted: u64,
    abandoned: u64,
    volatile: u64,
}

impl MemoryDisk {
    /// A disk of zeroes.
    pub fn new(pool: &Pool, geometry: Geometry) -> Self {
        let pages = usize::try_from(geometry.size).unwrap_or(usize::MAX).div_ceil(PAGE);
        let store = MemoryStore(Arc::new(Mutex::new((0..pages).map(|_| None).collect())));
        Self::another(&store, pool, geometry)
    }

    /// Another queue of the disk whose bytes these are.
    pub fn another(store: &MemoryStore, pool: &Pool, geometry: Geometry) -> Self {
        let depth = geometry.depth as usize;
        Self {
            geometry,
            store: store.clone(),
            pool: pool.clone(),
            done: VecDeque::with_capacity(depth),
            waiting: VecDeque::with_capacity(depth),
            answers: Answers::AtOnce,
            fails: None,
            submitted: 0,
            abandoned: 0,
            volatile: 0,
        }
    }

    /// The bytes, for [`MemoryDisk::another`] and for looking at them.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// How requests are answered from now on.
    pub fn set_answers(&mut self, answers: Answers) {
        self.answers = answers;
    }

    /// Every request from now on fails so, or none.
    pub fn set_failure(&mut self, fails: Option<IoError>) {
        self.fails = fails;
    }

    /// Requests submitted so far.
    pub fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Requests abandoned so far. They take effect all the same, since they did when they were submitted.
    pub fn abandoned(&self) -> u64 {
        self.abandoned
    }

    /// Changes that this queue has answered and that power would take back: without FUA, and no flush was submitted since their
    /// answer.
    pub fn volatile(&self) -> u64 {
        self.volatile
    }

    /// Requests without an answer.
    pub fn in_flight(&self) -> usize {
        self.done.len() + self.waiting.len()
    }

    fn perform(&mut self, request: &Request<Payload>) -> Result<Option<Payload>, IoError> {
        if let Some(reason) = self.fails {
            return Err(reason);
        }
        let range = request.range;
        if range.end() > self.geometry.size {
            return Err(IoError::OutOfRange);
        }
        let longest = u64::from(self.geometry.max_transfer);
        let moves_data = matches!(request.op, Op::Read | Op::Write { .. });
        if !range.is_aligned(u64::from(self.geometry.logical_block)) || (moves_data && range.len > longest) {
            return Err(IoError::Invalid);
        }
        match request.op {
            Op::Read => {
                let len = u32::try_from(range.len).map_err(|_| IoError::Invalid)?;
                let mut data = self.pool.alloc(len, 512).ok_or(IoError::NoSpace)?;
                self.store.read(range, &mut data);
                return Ok(Some(data));
            }
            Op::Write { .. } => {
                let data = request.data.as_ref().ok_or(IoError::Invalid)?;
                if data.len() as u64 != range.len {
                    return Err(IoError::Invalid);
                }
                self.store.write(range.offset, data);
            }
            Op::WriteZeroes { .. } | Op::Unmap => self.store.zero(range),
            Op::Flush => {}
            Op::Allocation => {
                let runs = self.store.allocation(range);
                let len = u32::try_from(runs.as_bytes().len()).unwrap_or(0);
                // Without memory for it nothing is known.
                let mut data = self.pool.alloc(len, 1);
                data.iter_mut().for_each(|data| data.write_at(0, runs.as_bytes()));
                return Ok(data);
            }
        }
        Ok(None)
    }

    fn retry_waiting(&mut self) {
        while let Some(&(tag, range)) = self.waiting.front() {
            match self.perform(&Request { tag, op: Op::Read, range, data: None }) {
                Err(IoError::NoSpace) => return,
                result => self.finish(tag, Op::Read, result),
            }
            self.waiting.pop_front();
        }
    }

    fn finish(&mut self, tag: u64, op: Op, result: Result<Option<Payload>, IoError>) {
        let (result, data) = match result {
            Ok(data) => (Ok(()), data),
            Err(reason) => (Err(reason), None),
        };
        let is_durable = match op {
            Op::Write { fua } | Op::WriteZeroes { fua, .. } => fua,
            Op::Unmap => false,
            Op::Read | Op::Flush | Op::Allocation => true,
        };
        let is_volatile = result.is_ok() && !is_durable;
        self.done.push_back((Done { tag, result, data }, is_volatile));
    }

    fn give(&mut self, (done, is_volatile): (Done<Payload>, bool)) -> Done<Payload> {
        self.volatile += u64::from(is_volatile);
        done
    }
}

impl Device<Payload> for MemoryDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn room(&self) -> u32 {
        let used = u32::try_from(self.in_flight()).unwrap_or(u32::MAX);
        self.geometry.depth.saturating_sub(used)
    }

    fn submit(&mut self, request: Request<Payload>) {
        assert!(self.room() > 0, "no room");
        self.submitted += 1;
        match self.perform(&request) {
            Err(IoError::NoSpace) if request.op == Op::Read && self.fails.is_none() => {
                self.waiting.push_back((request.tag, request.range));
            }
            result => {
                if request.op == Op::Flush && result.is_ok() {
                    self.volatile = 0;
                }
                self.finish(request.tag, request.op, result);
            }
        }
    }

    fn abandon(&mut self, _: u64) {
        self.abandoned += 1;
    }

    fn poll_done(&mut self) -> Option<Done<Payload>> {
        self.retry_waiting();
        let done = match self.answers {
            Answers::AtOnce => self.done.pop_front(),
            Answers::Reversed => self.done.pop_back(),
            Answers::Held | Answers::Next(0) => None,
            Answers::Next(left) => {
                let done = self.done.pop_front()?;
                self.answers = Answers::Next(left - 1);
                Some(done)
            }
        };
        done.map(|done| self.give(done))
    }
}

/// The parts of a range that lie in one page each: page, first byte in it, bytes.
fn pieces(range: Extent) -> impl Iterator<Item = (usize, usize, usize)> {
    let page = PAGE as u64;
    let mut at = range.offset;
    std::iter::from_fn(move || {
        let len = range.end().saturating_sub(at).min(page - at % page);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "pages of a disk in memory, and offsets inside a page"
        )]
        let piece = ((at / page) as usize, (at % page) as usize, len as usize);
        at += len;
        (len > 0).then_some(piece)
    })
}

impl MemoryStore {
    fn pages(&self) -> MutexGuard<'_, Vec<Option<Page>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes of a range, for comparisons in tests.
    pub fn bytes(&self, range: Extent) -> Vec<u8> {
        let pages = self.pages();
        let mut bytes = Vec::new();
        for (page, from, len) in pieces(range) {
            match &pages[page] {
                Some(page) => bytes.extend_from_slice(&page[from..from + len]),
                None => bytes.resize(bytes.len() + len, 0),
            }
        }
        bytes
    }

    fn read(&self, range: Extent, into: &mut Payload) {
        let pages = self.pages();
        let mut at = 0;
        for (page, from, len) in pieces(range) {
            match &pages[page] {
                Some(page) => into.write_at(at, &page[from..from + len]),
                None => into.fill_zero(at..at + len),
            }
            at += len;
        }
    }

    fn write(&self, offset: u64, data: &Payload) {
        let mut pages = self.pages();
        let mut at = offset;
        for mut segment in data.segments() {
            for (page, from, len) in pieces(Extent::new(at, segment.len() as u64)) {
                let (now, later) = segment.split_at(len);
                let page = pages[page].get_or_insert_with(|| {
                    // Made in the heap: a page is too large for the stack of a small thread.
                    vec![0; PAGE].into_boxed_slice().try_into().unwrap_or_else(|_| unreachable!("PAGE bytes"))
                });
                page[from..from + len].copy_from_slice(now);
                at += len as u64;
                segment = later;
            }
        }
    }

    fn zero(&self, range: Extent) {
        let mut pages = self.pages();
        for (page, from, len) in pieces(range) {
            if len == PAGE {
                pages[page] = None;
            } else if let Some(page) = &mut pages[page] {
                page[from..from + len].fill(0);
            }
        }
    }

    /// As an answer to [`Op::Allocation`].
    fn allocation(&self, range: Extent) -> Runs {
        let pages = self.pages();
        let mut runs = Runs::default();
        let mut whole = range.widen(BLOCK);
        whole.len = whole.len.min(ALLOCATION_MAX);
        for (page, _, len) in pieces(whole) {
            let blocks = u32::try_from(len as u64 / BLOCK).unwrap_or(0);
            if !runs.push(blocks, pages[page].is_some()) {
                break;
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> (Pool, MemoryDisk) {
        let pool = Pool::new(1 << 20, 4 << 20).unwrap();
        let geometry = Geometry {
            size: 1 << 20,
            logical_block: 512,
            physical_block: 4096,
            max_transfer: 1 << 20,
            depth: 4,
        };
        let disk = MemoryDisk::new(&pool, geometry);
        (pool, disk)
    }

    fn request(tag: u64, op: Op, range: Extent, data: Option<Payload>) -> Request<Payload> {
        Request { tag, op, range, data }
    }

    /// The runs of all of it: KiB, and whether they hold data.
    fn allocation(disk: &mut MemoryDisk) -> Vec<(u64, bool)> {
        let range = Extent::new(0, 1 << 20);
        disk.submit(request(4, Op::Allocation, range, None));
        let told = disk.poll_done().unwrap().data.unwrap().to_vec();
        lh_block::runs(&told, range).map(|run| (run.range.len >> 10, run.data)).collect()
    }

    #[test]
    fn what_was_written_is_read_and_zeroes_make_holes() {
        let (pool, mut disk) = disk();
        let mut data = pool.alloc(200 << 10, 512).unwrap();
        data.fill_zero(0..200 << 10);
        data.write_at(0, b"first");
        data.write_at((200 << 10) - 4, b"last");
        let range = Extent::new(4096, 200 << 10);
        disk.submit(request(1, Op::Write { fua: false }, range, Some(data)));
        disk.submit(request(2, Op::Read, range, None));
        assert_eq!(disk.poll_done().unwrap().tag, 1);
        let read = disk.poll_done().unwrap().data.unwrap().to_vec();
        assert_eq!((&read[..5], &read[read.len() - 4..]), (&b"first"[..], &b"last"[..]));
        assert_eq!(allocation(&mut disk), [(256, true), (768, false)]);

        disk.submit(request(3, Op::Unmap, Extent::new(0, 128 << 10), None));
        assert_eq!(disk.poll_done().unwrap().result, Ok(()));
        assert_eq!(allocation(&mut disk), [(128, false), (128, true), (768, false)]);
        let bytes = disk.store().bytes(Extent::new(0, 256 << 10));
        assert!(bytes[..200 << 10].iter().all(|b| *b == 0));
        assert_eq!(&bytes[4096 + (200 << 10) - 4..4096 + (200 << 10)], b"last");
    }

    #[test]
    fn bad_requests_are_answered_with_the_matching_error() {
        let (_pool, mut disk) = disk();
        let mut answer = |range| {
            disk.submit(request(9, Op::Read, range, None));
            disk.poll_done().unwrap().result
        };
        assert_eq!(answer(Extent::new(1 << 20, 512)), Err(IoError::OutOfRange));
        assert_eq!(answer(Extent::new(100, 512)), Err(IoError::Invalid));
        assert_eq!(answer(Extent::new(0, 512)), Ok(()));
        disk.set_failure(Some(IoError::Io));
        disk.submit(request(9, Op::Flush, Extent::default(), None));
        assert_eq!(disk.poll_done().unwrap().result, Err(IoError::Io));
    }

    #[test]
    fn answers_come_as_they_are_told_to() {
        let (_pool, mut disk) = disk();
        disk.set_answers(Answers::Held);
        for tag in 0..4 {
            disk.submit(request(tag, Op::Flush, Extent::default(), None));
        }
        assert_eq!((disk.room(), disk.in_flight()), (0, 4));
        assert!(disk.poll_done().is_none());
        disk.set_answers(Answers::Reversed);
        assert_eq!(disk.poll_done().unwrap().tag, 3);
        disk.set_answers(Answers::Next(1));
        assert_eq!(disk.poll_done().unwrap().tag, 0);
        assert!(disk.poll_done().is_none());
        disk.set_answers(Answers::AtOnce);
        assert_eq!(disk.poll_done().unwrap().tag, 1);
    }

    #[test]
    fn a_read_waits_for_memory() {
        let pool = Pool::new(0, 128 << 10).unwrap();
        let (_, template) = self::disk();
        let mut disk = MemoryDisk::new(&pool, template.geometry());
        let all = pool.alloc(128 << 10, 1).unwrap();
        disk.submit(request(1, Op::Read, Extent::new(0, 4096), None));
        assert!(disk.poll_done().is_none());
        drop(all);
        assert_eq!(disk.poll_done().unwrap().result, Ok(()));
    }
}
