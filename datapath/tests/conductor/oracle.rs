//! What each block may read as. Every write writes a number that no other has. A revert is a write, too: it has a number of its own
//! for each block, and that reads as what the snapshot shows there.

use std::collections::{BTreeMap, BTreeSet};

/// One block.
#[derive(Clone, Debug)]
struct Block {
    /// What a read may return now.
    possible: BTreeSet<u32>,
    /// Writes without an answer, and of which engine.
    pending: BTreeMap<u32, u64>,
    /// What some read has shown not to be there, since the last answered write.
    excluded: BTreeSet<u32>,
    /// Writes in flight when the power went: they may be acknowledged and lost.
    cut: BTreeSet<u32>,
    /// What may come back although it was read otherwise since: a member that lost its power, and has not flushed
    /// since, may turn out to be the only one left.
    suspect: BTreeSet<u32>,
    /// Values since the last flush, oldest first: what may come back when the power goes.
    since_flush: Vec<u32>,
    /// Reads in flight: all that was possible since they began, and whether the power went meanwhile, or a revert was answered.
    reads: BTreeMap<u64, (BTreeSet<u32>, bool)>,
}

impl Default for Block {
    fn default() -> Self {
        Self {
            possible: BTreeSet::from([0]),
            pending: BTreeMap::new(),
            excluded: BTreeSet::new(),
            cut: BTreeSet::new(),
            suspect: BTreeSet::new(),
            since_flush: vec![0],
            reads: BTreeMap::new(),
        }
    }
}

impl Block {
    fn widen_reads(&mut self) {
        for (seen, _) in self.reads.values_mut() {
            seen.extend(&self.possible);
        }
    }

    /// Writes of this engine and younger ones that may still happen.
    fn may_come(&self, engine: u64) -> impl Iterator<Item = u32> + '_ {
        self.pending.iter().filter(move |(_, e)| **e >= engine).map(|(v, _)| *v)
    }
}

/// What a flush makes certain when it is answered.
#[derive(Debug)]
pub(crate) struct Certain {
    values: BTreeMap<usize, u32>,
    cuts: u64,
}

/// What a revert writes to a block, and what was there when it was asked for: it is no more once the revert is answered.
#[derive(Debug)]
pub(crate) struct Reverted {
    block: usize,
    value: u32,
    before: BTreeSet<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct Oracle {
    blocks: BTreeMap<usize, Block>,
    /// What the numbers of reverts read as.
    shown: BTreeMap<u32, u32>,
    reads: u64,
    /// How often the power went.
    cuts: u64,
    pub(crate) acknowledged: u64,
    pub(crate) answered_reads: u64,
    /// Blocks whose reads were answered with an error.
    pub(crate) failed_reads: u64,
    /// Whether each flush that was answered ended well.
    pub(crate) flushes: Vec<bool>,
}

impl Oracle {
    fn block(&mut self, block: usize) -> &mut Block {
        self.blocks.entry(block).or_default()
    }

    pub(crate) fn write_begins(&mut self, engine: u64, block: usize, value: u32) {
        trace!("   write e{engine} {block} {value} begins");
        let b = self.block(block);
        b.pending.insert(value, engine);
        b.possible.insert(value);
        b.since_flush.push(value);
        b.widen_reads();
    }

    pub(crate) fn write_ends(&mut self, engine: u64, block: usize, value: u32) {
        self.acknowledged += 1;
        trace!("   write e{engine} {block} {value} ends");
        let b = self.block(block);
        b.pending.remove(&value);
        assert!(!b.excluded.contains(&value), "block {block}: {value} is acknowledged, but was not there");
        if b.cut.remove(&value) {
            b.possible.extend(&b.since_flush);
        } else if b.possible.contains(&value) {
            b.possible = b.may_come(engine).chain([value]).collect();
            b.pending.retain(|_, e| *e >= engine);
            b.excluded.clear();
            b.suspect.clear();
        }
        b.widen_reads();
    }

    pub(crate) fn read_begins(&mut self, block: usize) -> u64 {
        self.reads += 1;
        let read = self.reads;
        let b = self.block(block);
        b.reads.insert(read, (b.possible.clone(), false));
        read
    }

    pub(crate) fn read_ends(&mut self, engine: u64, block: usize, read: u64, value: u32) {
        self.answered_reads += 1;
        trace!("   read e{engine} {block} {value}");
        let shown = &self.shown;
        let b = self.blocks.entry(block).or_default();
        let (seen, cut) = b.reads.remove(&read).expect("a read that began");
        let those = |of: &BTreeSet<u32>| -> Vec<u32> {
            of.iter().filter(|n| shown.get(n).unwrap_or(n) == &value).copied().collect()
        };
        let suspects = those(&b.suspect);
        if !suspects.is_empty() {
            b.possible.extend(suspects);
            b.excluded.clear();
            return;
        }
        let found = those(&seen);
        assert!(!found.is_empty(), "block {block} reads {value}, possible: {seen:?}");
        // It may have been there when the read began, and not any more: nobody tells what shows the same from each other, and a revert is
        // answered long after it was done, and after writes over it.
        let is_late = |n: &u32| shown.contains_key(n) && b.pending.contains_key(n);
        if found.iter().all(|n| b.possible.contains(n) && !is_late(n)) && !cut {
            let now: BTreeSet<u32> = b.may_come(engine).chain(found).collect();
            b.excluded.extend(b.possible.difference(&now).copied().collect::<Vec<_>>());
            b.possible = now;
        }
    }

    /// A revert is asked for that makes `block` read as `shows`.
    pub(crate) fn revert_begins(&mut self, engine: u64, block: usize, value: u32, shows: u32) -> Reverted {
        self.shown.insert(value, shows);
        let b = self.block(block);
        let known = b.possible.iter().chain(&b.since_flush).chain(&b.suspect);
        let before = known.filter(|n| !b.pending.contains_key(n)).copied().collect();
        self.write_begins(engine, block, value);
        Reverted { block, value, before }
    }

    /// It is answered, and stable: whatever was not in flight when it was asked for is behind it. What was in flight, or has come since,
    /// may have been done before it, or after.
    pub(crate) fn revert_ends(&mut self, reverted: &Reverted) {
        let Reverted { block, value, before } = reverted;
        trace!("   revert {block} {value} ends");
        let b = self.block(*block);
        b.pending.remove(value);
        b.cut.remove(value);
        assert!(b.possible.iter().any(|n| !before.contains(n)), "block {block}: {value} is not there");
        b.possible.retain(|n| !before.contains(n));
        b.since_flush.retain(|n| !before.contains(n));
        b.suspect.retain(|n| !before.contains(n));
        b.widen_reads();
        b.reads.values_mut().for_each(|(_, cut)| *cut = true);
    }

    /// It was refused, and never happens.
    pub(crate) fn revert_fails(&mut self, reverted: &Reverted) {
        let b = self.block(reverted.block);
        b.pending.remove(&reverted.value);
        b.possible.remove(&reverted.value);
        b.since_flush.retain(|n| *n != reverted.value);
        b.suspect.remove(&reverted.value);
        assert!(!b.possible.is_empty(), "block {}: a refused revert was carried out", reverted.block);
    }

    pub(crate) fn read_fails(&mut self, block: usize, read: u64) {
        self.failed_reads += 1;
        self.block(block).reads.remove(&read);
    }

    /// What a flush that begins now makes certain, by block: the only value that could be read.
    pub(crate) fn flush_begins(&self) -> Certain {
        let only = |b: &Block| b.possible.iter().next().copied().filter(|_| b.possible.len() == 1);
        let values = self.blocks.iter().filter_map(|(n, b)| Some((*n, only(b)?))).collect();
        Certain { values, cuts: self.cuts }
    }

    /// The flush that said this has ended. If the power went meanwhile, it may have had nothing left to save.
    pub(crate) fn flush_ends(&mut self, certain: &Certain) {
        if certain.cuts != self.cuts {
            return;
        }
        for (block, value) in &certain.values {
            let b = self.block(*block);
            if let Some(at) = b.since_flush.iter().position(|v| v == value) {
                b.since_flush.drain(..at);
                b.suspect.clear();
            }
        }
    }

    /// A replica lost what was not flushed.
    pub(crate) fn power_lost(&mut self) {
        self.cuts += 1;
        for b in self.blocks.values_mut() {
            b.possible.extend(&b.since_flush);
            b.suspect.extend(&b.since_flush);
            b.excluded.clear();
            b.cut = b.pending.keys().copied().collect();
            b.widen_reads();
            b.reads.values_mut().for_each(|(_, cut)| *cut = true);
        }
    }
}
