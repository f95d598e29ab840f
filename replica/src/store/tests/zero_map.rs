//! The zero map under power cuts and kills, against a model of one layer's file, page cache and disk.
//!
//! The model keeps what each block may be after a power cut: everything it has been since the last flush began that has
//! been completed. A power cut keeps of each block of the file any state since the last sync that covers it, and of each
//! page of the map any content since its last sync. A kill keeps everything that was handed to the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::id::Id;
use super::super::zero::{ZeroMap, header};

/// Blocks of the volume; the map has three pages of marks.
const BLOCKS: u64 = 6000;
/// Blocks that the test uses: on both sides of the pages' edges.
const USED: [u64; 8] = [0, 1, 2, 3, 2031, 2032, 4063, 4064];
const PAGE: usize = 512;
const PAGES: usize = 4;

/// What a block reads as. Below the layer everything holds data, so a hole is no zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Value {
    Lower,
    Zero,
    Data(u32),
}

#[derive(Clone, Debug)]
enum Op {
    Write(usize),
    Zero(usize, usize),
    BeginFlush,
    DataSynced,
    EndFlush,
    Punch(u64),
    Power(u64),
    Kill,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..USED.len()).prop_map(Op::Write),
        5 => (0..USED.len(), 1_usize..4).prop_map(|(a, n)| Op::Zero(a, n)),
        4 => Just(Op::BeginFlush),
        4 => Just(Op::DataSynced),
        4 => Just(Op::EndFlush),
        4 => (1_u64..3).prop_map(Op::Punch),
        1 => any::<u64>().prop_map(Op::Power),
        1 => Just(Op::Kill),
    ]
}

/// A flush on its way.
#[derive(Debug)]
struct Flush {
    /// What each block was when it began.
    values: BTreeMap<u64, usize>,
    /// Versions of the file's blocks that it covers.
    file: BTreeMap<u64, usize>,
    /// Versions of the map that it covers, once the data is synced.
    map: Option<usize>,
    /// Writes that wait for it.
    waiting: Vec<(u64, usize)>,
}

struct World {
    id: Id,
    file: Arc<File>,
    map: ZeroMap,
    /// All states of a block of the layer's file; a power cut keeps any from `file_synced` on.
    blocks: BTreeMap<u64, Vec<Option<u32>>>,
    file_synced: BTreeMap<u64, usize>,
    /// All contents of the map's file, and from which on a power cut keeps any, page by page.
    maps: Vec<Vec<u8>>,
    map_synced: usize,
    /// All values of a block, from which on a power cut may leave any, and the last one that was answered.
    values: BTreeMap<u64, Vec<Value>>,
    flushed: BTreeMap<u64, usize>,
    answered: BTreeMap<u64, usize>,
    flush: Option<Flush>,
    /// Writes that wait for a flush that is yet to begin.
    waiting: Vec<(u64, usize)>,
    stamp: u32,
}

impl World {
    fn new() -> Self {
        let id = Id::parse(&[b'7'; 32]).unwrap();
        let file = Arc::new(tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap());
        file.write_all_at(&header(id), 0).unwrap();
        let zero = || USED.iter().map(|b| (*b, 0)).collect::<BTreeMap<_, _>>();
        let mut world = Self {
            id,
            map: ZeroMap::empty(id, Arc::clone(&file), BLOCKS),
            file,
            blocks: USED.iter().map(|b| (*b, vec![None])).collect(),
            file_synced: zero(),
            maps: Vec::new(),
            map_synced: 0,
            values: USED.iter().map(|b| (*b, vec![Value::Lower])).collect(),
            flushed: zero(),
            answered: zero(),
            flush: None,
            waiting: Vec::new(),
            stamp: 0,
        };
        world.note_map();
        world
    }

    /// The map's file may have been written.
    fn note_map(&mut self) {
        let mut content = vec![0; PAGES * PAGE];
        let length = usize::try_from(self.file.metadata().unwrap().len()).unwrap().min(content.len());
        self.file.read_exact_at(&mut content[..length], 0).unwrap();
        if self.maps.last() != Some(&content) {
            self.maps.push(content);
        }
    }

    fn become_value(&mut self, block: u64, value: Value) -> usize {
        let values = self.values.get_mut(&block).unwrap();
        values.push(value);
        values.len() - 1
    }

    /// What the block reads as, by the map in memory and the file.
    fn read(&self, block: u64) -> Value {
        if self.map.zeroes(block..block + 1).overlaps(block..block + 1) {
            return Value::Zero;
        }
        self.blocks[&block].last().unwrap().map_or(Value::Lower, Value::Data)
    }

    fn write(&mut self, block: u64) {
        if !self.map.begin_write(block..block + 1) {
            return;
        }
        self.stamp += 1;
        self.blocks.get_mut(&block).unwrap().push(Some(self.stamp));
        let version = self.become_value(block, Value::Data(self.stamp));
        if self.map.wrote(block..block + 1) {
            self.waiting.push((block, version));
        } else {
            self.answered.insert(block, version);
        }
    }

    fn zero(&mut self, blocks: &[u64]) {
        for &block in blocks {
            self.map.reserve(block..block + 1).unwrap();
            self.map.set(block..block + 1).unwrap();
            self.note_map();
            let version = self.become_value(block, Value::Zero);
            self.answered.insert(block, version);
        }
    }

    fn last_versions<T>(of: &BTreeMap<u64, Vec<T>>) -> BTreeMap<u64, usize> {
        of.iter().map(|(b, v)| (*b, v.len() - 1)).collect()
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Write(at) => self.write(USED[*at]),
            Op::Zero(at, n) => self.zero(&USED[*at..(at + n).min(USED.len())]),
            Op::BeginFlush if self.flush.is_none() => {
                self.map.begin_sync();
                self.flush = Some(Flush {
                    values: Self::last_versions(&self.values),
                    file: Self::last_versions(&self.blocks),
                    map: None,
                    waiting: std::mem::take(&mut self.waiting),
                });
            }
            Op::DataSynced => {
                if let Some(flush) = self.flush.as_mut().filter(|f| f.map.is_none()) {
                    self.file_synced = flush.file.clone();
                    let synced = self.map.data_synced().unwrap().is_some();
                    self.note_map();
                    // A map that is not given out is not synced.
                    let covered = if synced { self.maps.len() - 1 } else { self.map_synced };
                    self.flush.as_mut().unwrap().map = Some(covered);
                }
            }
            Op::EndFlush => {
                if let Some(flush) = self.flush.take_if(|f| f.map.is_some()) {
                    self.map_synced = flush.map.unwrap();
                    self.map.synced();
                    self.flushed = flush.values;
                    for (block, version) in flush.waiting {
                        let answered = self.answered.get_mut(&block).unwrap();
                        *answered = version.max(*answered);
                    }
                }
            }
            Op::Punch(max) => {
                if let Some(hole) = self.map.take_punch(*max) {
                    for block in USED.into_iter().filter(|b| hole.contains(b)) {
                        self.blocks.get_mut(&block).unwrap().push(None);
                    }
                    self.map.punch_ended(hole, true);
                }
            }
            Op::BeginFlush => {}
            Op::Power(seed) => self.power_cut(*seed),
            Op::Kill => self.kill(),
        }
    }

    /// Loads the map from a content of its file.
    fn reload(&mut self, content: &[u8]) {
        self.file.write_all_at(content, 0).unwrap();
        self.map = ZeroMap::load(self.id, Arc::clone(&self.file), BLOCKS).unwrap();
        for (block, states) in &self.blocks {
            if states.last().unwrap().is_some() {
                self.map.found(*block..block + 1);
            }
        }
        self.flush = None;
        self.waiting.clear();
    }

    fn kill(&mut self) {
        let content = self.maps.last().unwrap().clone();
        self.reload(&content);
        for block in USED {
            let read = self.read(block);
            let values = self.values.get_mut(&block).unwrap();
            let allowed = &values[self.answered[&block]..];
            assert!(allowed.contains(&read), "killed: block {block} reads {read:?}, answered {allowed:?}");
            // From now on it is what it reads as; a later power cut may still bring back older values.
            values.push(read);
            self.answered.insert(block, values.len() - 1);
        }
    }

    fn power_cut(&mut self, mut seed: u64) {
        let mut pick = |from: usize, len: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            from + usize::try_from(seed >> 33).unwrap() % (len - from)
        };
        for (block, states) in &mut self.blocks {
            let kept = states[pick(self.file_synced[block], states.len())];
            *states = vec![kept];
        }
        let mut content = self.maps[self.map_synced].clone();
        for (page, bytes) in content.chunks_mut(PAGE).enumerate() {
            let from = &self.maps[pick(self.map_synced, self.maps.len())];
            bytes.copy_from_slice(&from[page * PAGE..(page + 1) * PAGE]);
        }
        self.maps = vec![content.clone()];
        self.map_synced = 0;
        self.file_synced = USED.iter().map(|b| (*b, 0)).collect();
        self.reload(&content);
        for block in USED {
            let read = self.read(block);
            let allowed: BTreeSet<Value> =
                self.values[&block][self.flushed[&block]..].iter().copied().collect();
            assert!(allowed.contains(&read), "power cut: block {block} reads {read:?}, may be {allowed:?}");
            self.values.insert(block, vec![read]);
        }
        self.flushed = USED.iter().map(|b| (*b, 0)).collect();
        self.answered = self.flushed.clone();
    }

    /// What is read now is what was written last.
    fn check(&self) {
        for block in USED {
            assert_eq!(self.read(block), *self.values[&block].last().unwrap(), "block {block}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn nothing_flushed_is_lost_and_nothing_older_returns(ops in prop::collection::vec(op(), 1..80)) {
        let mut world = World::new();
        for op in &ops {
            world.step(op);
            world.check();
        }
        world.step(&Op::Kill);
        world.step(&Op::Power(1));
    }
}

/// Marks become armed, and from then on a write over them need not wait.
#[test]
fn a_mark_is_armed_by_two_flushes() {
    let mut world = World::new();
    let flush = [Op::BeginFlush, Op::DataSynced, Op::EndFlush];
    world.write(0);
    world.zero(&[0]);
    assert!(
        world.map.wants_flush() && world.map.take_punch(9).is_none(),
        "no hole before its mark is durable"
    );
    flush.iter().for_each(|op| world.step(op));
    world.step(&Op::Punch(9));
    assert!(world.map.wants_flush());
    world.write(0);
    assert_eq!(world.waiting.len(), 1, "a write over a mark that is not armed waits");
    world.zero(&[1]);
    for _ in 0..2 {
        flush.iter().for_each(|op| world.step(op));
        world.step(&Op::Punch(9));
    }
    flush.iter().for_each(|op| world.step(op));
    assert!(!world.map.wants_flush());
    world.write(1);
    assert!(world.waiting.is_empty(), "a write over an armed mark is answered at once");
    flush.iter().for_each(|op| world.step(op));
    assert!(!world.map.has_marks());
    world.check();
}

/// A flush has put the page without the mark into the page cache, and the process was killed before the map was synced. The next
/// one finds no mark, and answers a write of the block at once: its first flush has to make that durable, too.
#[test]
fn what_a_killed_flush_has_left_in_the_page_cache_is_made_durable_by_the_next() {
    let flush = [Op::BeginFlush, Op::DataSynced, Op::EndFlush];
    for power in 0..16 {
        let mut world = World::new();
        world.zero(&[0]);
        flush.iter().for_each(|op| world.step(op));
        world.write(0);
        flush[..2].iter().for_each(|op| world.step(op));
        world.kill();
        assert!(!world.map.has_marks());
        world.write(0);
        assert!(world.waiting.is_empty(), "there is no mark");
        flush.iter().for_each(|op| world.step(op));
        world.step(&Op::Power(power));
    }
}

#[test]
fn a_rotten_page_is_an_error() {
    use super::super::error::Damage;
    use super::super::zero::LoadError;
    let mut world = World::new();
    world.zero(&[2032]);
    world.file.write_all_at(&[0xff], 2 * PAGE as u64 + 5).unwrap();
    let (id, file) = (world.id, Arc::clone(&world.file));
    let load = || ZeroMap::load(id, Arc::clone(&file), BLOCKS).map(drop).unwrap_err();
    assert!(matches!(load(), LoadError::Damaged(Damage::ZeroPage { page: 2, .. })));
    // A page in the wrong place.
    let mut page = [0; PAGE];
    world.zero(&[0]);
    world.file.read_exact_at(&mut page, PAGE as u64).unwrap();
    world.file.write_all_at(&page, 2 * PAGE as u64).unwrap();
    assert!(matches!(load(), LoadError::Damaged(Damage::ZeroPage { page: 2, .. })));
    world.file.write_all_at(&[0xff], 5).unwrap();
    assert!(matches!(load(), LoadError::Damaged(Damage::ZeroHeader(_))));
}
