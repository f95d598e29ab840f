//! What replicas that are out may lack (`docs/invariants.md`, 8).
//!
//! Of every chunk that the intent bitmap marks the machine knows which units were written since it was marked: all that
//! may not be on stable storage everywhere is among them. While a replica is out these trails are kept beyond the mark,
//! from before it left until it is back.
//!
//! - A trail is on stable storage before the chunk's mark is taken back. So after a crash the trails that were saved,
//!   and all of the chunks that are marked, hold everything.
//! - An outsider's base is the last epoch that had it, as this replica recorded it. A replica that was out itself has
//!   not seen every write: it keeps nothing of epochs before its return.
//! - So the base has the round that this replica was in. One that returns in a round behind that is an older copy of the one that left:
//!   it may lack what no trail tells of.

use std::collections::{BTreeMap, BTreeSet};

use lh_block::{BLOCK, Epoch, Extent};
use lh_wire::{MapPage, Outsider};

use super::event::{Record, Trail};

/// Units in a chunk: 4 KiB each in the smallest chunks.
const UNITS: u64 = Trail::BITS as u64 * 16;

/// Most ranges in a chunk: every other unit.
const RANGES_IN_CHUNK: usize = 512;

/// Chunks of which single units are told apart: 16 MiB of memory. Of further ones all is taken for written, which costs
/// comparisons, nothing else.
const TOLD_APART_MAX: usize = 64 << 10;

/// Trails in one record: 128 KiB.
const SAVED_AT_ONCE: usize = 1024;

/// Which units of a chunk were written.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Written {
    Whole,
    Units(Box<[u64; 16]>),
}

#[derive(Clone, Debug)]
struct Chunk {
    written: Written,
    /// On stable storage as it is here, or on its way there.
    saved: bool,
    /// An engine has taken the chunk's mark back, and nothing was written since; the trail has to be saved first.
    clearing: bool,
}

/// The trails, and whom they are kept for.
#[derive(Debug)]
pub(super) struct Missed {
    chunk: u64,
    unit: u64,
    out: Vec<Outsider>,
    chunks: BTreeMap<u64, Chunk>,
    /// How many of them are [`Written::Units`].
    told_apart: usize,
    /// Chunks that wait to be saved, so that not all have to be looked at for them; and some that do not any more.
    due: BTreeSet<u64>,
    saving: Option<Vec<u64>>,
    /// Everything is to be saved: the directory is about to be closed.
    all: bool,
}

impl Missed {
    /// As the records have it: `marked` are the ranges of the intent bitmap.
    pub(super) fn new(chunk: u64, out: &[Outsider], saved: &[(u64, Trail)], marked: &[Extent]) -> Self {
        let mut missed = Self {
            chunk,
            unit: (chunk / UNITS).max(BLOCK),
            out: out.to_vec(),
            chunks: BTreeMap::new(),
            told_apart: 0,
            due: BTreeSet::new(),
            saving: None,
            all: false,
        };
        for (n, trail) in saved.iter().filter(|_| !out.is_empty()) {
            missed.told_apart += 1;
            let written = Written::Units(Box::new(trail.0));
            missed.chunks.insert(*n, Chunk { written, saved: true, clearing: false });
        }
        for range in marked {
            for n in missed.chunks_of(*range) {
                missed.take_whole(n);
            }
        }
        missed
    }

    fn take_whole(&mut self, n: u64) {
        let whole = Chunk { written: Written::Whole, saved: false, clearing: false };
        if let Some(Chunk { written: Written::Units(_), .. }) = self.chunks.insert(n, whole) {
            self.told_apart -= 1;
        }
    }

    fn chunks_of(&self, range: Extent) -> std::ops::Range<u64> {
        if range.is_empty() { 0..0 } else { range.offset / self.chunk..range.end().div_ceil(self.chunk) }
    }

    /// A write into the range comes.
    pub(super) fn note(&mut self, range: Extent) {
        for n in self.chunks_of(range) {
            let inside = Extent::new(n * self.chunk, self.chunk).intersection(range);
            let Some(inside) = inside else { continue };
            let room = self.told_apart < TOLD_APART_MAX;
            let told_apart = &mut self.told_apart;
            let held = self.chunks.entry(n).or_insert_with(|| {
                *told_apart += usize::from(room);
                let written = if room { Written::Units(Box::default()) } else { Written::Whole };
                Chunk { written, saved: false, clearing: false }
            });
            held.clearing = false;
            let Written::Units(units) = &mut held.written else { continue };
            let from = (inside.offset - n * self.chunk) / self.unit;
            let to = (inside.end() - n * self.chunk).div_ceil(self.unit);
            for unit in from..to {
                let (word, bit) = ((unit / 64) as usize, 1 << (unit % 64));
                if units[word] & bit == 0 {
                    units[word] |= bit;
                    held.saved = false;
                }
            }
        }
    }

    /// Whom trails are kept for.
    pub(super) fn out(&self) -> &[Outsider] {
        &self.out
    }

    /// Who is out once `new` has followed on `old`. With a gap, nothing that is known of others counts.
    pub(super) fn after(
        &self,
        old: Option<&Epoch>,
        new: &Epoch,
        names: &[String],
        gap: bool,
    ) -> Vec<Outsider> {
        let is_out = |replica: &String| names.contains(replica) && !new.has(replica);
        let mut out: Vec<Outsider> =
            self.out.iter().filter(|o| !gap && is_out(&o.replica)).cloned().collect();
        for replica in old.iter().filter(|_| !gap).flat_map(|e| &e.members).filter(|m| is_out(m)) {
            if let Some(base) = old.filter(|_| out.iter().all(|o| o.replica != *replica)) {
                out.push(Outsider { replica: replica.clone(), base: base.clone() });
            }
        }
        out
    }

    /// From now on trails are kept for these. Without any, those of chunks that are not marked go, and with them the record
    /// of those that were saved: the ones that stay are for whoever leaves next, and have to be saved again for it.
    pub(super) fn set_out(&mut self, out: Vec<Outsider>, marked: impl Fn(u64) -> bool) {
        self.out = out;
        if self.out.is_empty() {
            self.chunks.retain(|n, _| marked(*n));
            self.chunks.values_mut().for_each(|c| c.saved = false);
            self.told_apart = self.chunks.values().filter(|c| matches!(c.written, Written::Units(_))).count();
        }
    }

    /// What was written and is not saved counts as if nothing had been written.
    #[cfg(feature = "sabotage")]
    pub(super) fn forget_written(&mut self) {
        self.chunks.clear();
        self.told_apart = 0;
    }

    /// An engine takes the chunk's mark back; false: not yet, its trail has to be saved first.
    pub(super) fn may_clear(&mut self, n: u64) -> bool {
        let held = self.chunks.get_mut(&n).filter(|_| !self.out.is_empty());
        let Some(held) = held.filter(|h| !h.saved || self.saving.as_ref().is_some_and(|s| s.contains(&n)))
        else {
            return true;
        };
        held.clearing = true;
        self.due.insert(n);
        false
    }

    /// The chunk's mark is taken back.
    pub(super) fn cleared(&mut self, n: u64) {
        if self.out.is_empty()
            && let Some(Chunk { written: Written::Units(_), .. }) = self.chunks.remove(&n)
        {
            self.told_apart -= 1;
        }
    }

    /// Everything is saved; if not, it will be.
    pub(super) fn save_all(&mut self) -> bool {
        let done = self.out.is_empty() || (self.saving.is_none() && self.chunks.values().all(|c| c.saved));
        self.all = !done;
        done
    }

    /// Nobody closes the directory now.
    pub(super) fn save_what_is_due(&mut self) {
        self.all = false;
    }

    /// The next trails to be saved, if there are some. At most one record is on its way.
    pub(super) fn next_record(&mut self) -> Option<Record> {
        if self.saving.is_some() || self.out.is_empty() {
            return None;
        }
        let all = self.all;
        if all {
            self.due.extend(self.chunks.iter().filter(|(_, c)| !c.saved).map(|(n, _)| *n));
        }
        let mut trails = Vec::new();
        while trails.len() < SAVED_AT_ONCE
            && let Some(n) = self.due.pop_first()
        {
            let held = self.chunks.get_mut(&n);
            let Some(held) = held.filter(|c| !c.saved && (c.clearing || all)) else { continue };
            held.saved = true;
            let trail = match &held.written {
                Written::Whole => [u64::MAX; 16],
                Written::Units(units) => **units,
            };
            trails.push((n, Trail(trail)));
        }
        if trails.is_empty() {
            return None;
        }
        self.saving = Some(trails.iter().map(|(n, _)| *n).collect());
        Some(Record::Missed { trails })
    }

    /// The record on its way ended: chunks whose marks may go now.
    pub(super) fn saved(&mut self, durable: bool) -> Vec<u64> {
        let mut clear = Vec::new();
        for n in self.saving.take().into_iter().flatten() {
            let Some(held) = self.chunks.get_mut(&n) else { continue };
            held.saved &= durable;
            if !held.saved && held.clearing {
                self.due.insert(n);
            } else if std::mem::take(&mut held.clearing) {
                clear.push(n);
            }
        }
        clear
    }

    /// A page of what a replica may lack that was last in `base`; `None`: this replica cannot tell.
    pub(super) fn page(&self, replica: &str, base: &Epoch, from: u64, size: u64) -> Option<MapPage> {
        self.out.iter().find(|o| o.replica == replica && o.base == *base && !base.is_behind(&o.base))?;
        let volume = Extent::new(0, size);
        // To count them takes a look at all: once is enough.
        let mut page = MapPage { total: (from == 0).then(|| self.bytes()), ..MapPage::default() };
        for (n, held) in self.chunks.range(from / self.chunk..) {
            if page.ranges.len() + RANGES_IN_CHUNK > MapPage::RANGES_MAX {
                page.next = Some(n * self.chunk);
                break;
            }
            for range in self.ranges(*n, &held.written).filter_map(|r| r.intersection(volume)) {
                match page.ranges.last_mut() {
                    Some(last) if last.end() == range.offset => last.len += range.len,
                    _ => page.ranges.push(range),
                }
            }
        }
        Some(page)
    }

    fn ranges<'a>(&'a self, n: u64, written: &'a Written) -> impl Iterator<Item = Extent> + 'a {
        let units = (self.chunk / self.unit).min(UNITS);
        let has = move |unit: &u64| match written {
            Written::Whole => true,
            Written::Units(units) => units[(unit / 64) as usize] & 1 << (unit % 64) != 0,
        };
        (0..units).filter(has).map(move |u| Extent::new(n * self.chunk + u * self.unit, self.unit))
    }

    fn bytes(&self) -> u64 {
        let of = |c: &Chunk| match &c.written {
            Written::Whole => self.chunk,
            Written::Units(units) => units.iter().map(|w| u64::from(w.count_ones())).sum::<u64>() * self.unit,
        };
        self.chunks.values().map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use lh_block::{Generation, Instance, Round};

    use super::*;

    const CHUNK: u64 = 4 << 20;

    fn epoch(counter: u64, members: &[&str]) -> Epoch {
        Epoch {
            generation: Generation { attachment: 1, restart: 0 },
            counter,
            members: members.iter().map(|m| (*m).to_owned()).collect(),
            id: Instance(counter.into()),
            after: None,
            round: None,
        }
    }

    fn block(n: u64) -> Extent {
        Extent::new(n * BLOCK, BLOCK)
    }

    /// `3` left after the first epoch.
    fn degraded() -> Missed {
        let mut m = Missed::new(CHUNK, &[], &[], &[]);
        m.note(block(5));
        let out = m.after(Some(&epoch(1, &["1", "2", "3"])), &epoch(2, &["1", "2"]), &["3".into()], false);
        m.set_out(out, |_| true);
        m
    }

    #[test]
    fn what_was_written_before_it_left_is_in_the_map() {
        let mut m = degraded();
        m.note(block(1024 + 7));
        let page = m.page("3", &epoch(1, &["1", "2", "3"]), 0, u64::MAX).unwrap();
        assert_eq!(page.ranges, [block(5), block(1024 + 7)]);
        assert_eq!((page.next, page.total), (None, Some(2 * BLOCK)));
        assert_eq!(m.page("3", &epoch(2, &["1", "2"]), 0, u64::MAX), None, "another epoch");
        assert_eq!(m.page("2", &epoch(1, &["1", "2", "3"]), 0, u64::MAX), None, "another replica");
    }

    /// Its directory was put back as it was two rounds before it left, or more: marks have gone since of what it lacks.
    #[test]
    fn an_older_copy_of_the_one_that_left_is_told_nothing() {
        let at = |round: Option<u64>| Epoch { round: round.map(Round), ..epoch(1, &["1", "2", "3"]) };
        let mut m = Missed::new(CHUNK, &[], &[], &[]);
        m.note(block(5));
        let out = m.after(Some(&at(Some(7))), &epoch(2, &["1", "2"]), &["3".into()], false);
        m.set_out(out, |_| true);
        let told = |round| m.page("3", &at(round), 0, u64::MAX).map(|page| page.ranges);
        for round in [Some(6), Some(7), Some(8), None] {
            assert_eq!(told(round), Some(vec![block(5)]), "{round:?}");
        }
        assert_eq!((told(Some(5)), told(Some(0))), (None, None));
    }

    #[test]
    fn who_returns_from_outside_knows_nothing_of_others() {
        let m = degraded();
        let later = epoch(9, &["1", "4"]);
        assert_eq!(m.after(Some(&epoch(2, &["1", "2"])), &later, &["2".into(), "3".into()], true), []);
        let known = m.after(Some(&epoch(2, &["1", "2"])), &later, &["2".into(), "3".into()], false);
        assert_eq!(
            known.iter().map(|o| (o.replica.as_str(), o.base.counter)).collect::<Vec<_>>(),
            [("3", 1), ("2", 2)]
        );
        assert_eq!(m.after(None, &later, &[], false), [], "nobody waits for it any more");
    }

    #[test]
    fn a_mark_goes_only_after_its_trail_was_saved() {
        let mut m = degraded();
        assert!(!m.may_clear(0));
        let Some(Record::Missed { trails }) = m.next_record() else { panic!("nothing to save") };
        assert_eq!((trails[0].0, trails[0].1.0[0]), (0, 1 << 5));
        assert!(m.next_record().is_none(), "one at a time");
        assert_eq!(m.saved(true), [0]);
        assert!(m.may_clear(0));
        m.note(block(5));
        assert!(m.may_clear(0), "the trail says so already");
        m.note(block(6));
        assert!(!m.may_clear(0));
    }

    #[test]
    fn a_write_after_the_clear_keeps_the_mark() {
        let mut m = degraded();
        m.may_clear(0);
        m.note(block(5));
        assert!(m.next_record().is_none(), "nobody wants the mark back any more");
        m.may_clear(0);
        m.next_record();
        m.note(block(5));
        assert_eq!(m.saved(true), [] as [u64; 0]);
    }

    #[test]
    fn after_a_crash_marked_chunks_count_as_written() {
        let out = degraded().out().to_vec();
        let mut trail = Trail::default();
        trail.0[0] = 1;
        let m = Missed::new(CHUNK, &out, &[(0, trail), (1, trail)], &[Extent::new(CHUNK, CHUNK)]);
        let page = m.page("3", &epoch(1, &["1", "2", "3"]), 0, u64::MAX).unwrap();
        assert_eq!(page.ranges, [block(0), Extent::new(CHUNK, CHUNK)]);
    }

    #[test]
    fn pages_go_on_where_they_ended() {
        let mut m = degraded();
        (0..40_000).for_each(|n| m.note(block(2 * n)));
        let base = epoch(1, &["1", "2", "3"]);
        let (mut from, mut ranges) = (0, Vec::new());
        loop {
            let page = m.page("3", &base, from, u64::MAX).unwrap();
            assert!(page.ranges.len() <= MapPage::RANGES_MAX);
            ranges.extend(page.ranges);
            match page.next {
                Some(next) => from = next,
                None => break,
            }
        }
        let bytes: u64 = ranges.iter().map(|r| r.len).sum();
        assert_eq!(bytes, 40_001 * BLOCK);
        assert!(ranges.windows(2).all(|w| w[0].end() <= w[1].offset));
    }

    #[test]
    fn what_was_saved_for_one_that_returned_is_saved_again_for_the_next_that_leaves() {
        for on_its_way in [false, true] {
            let mut m = degraded();
            m.may_clear(0);
            assert!(m.next_record().is_some());
            if !on_its_way {
                m.saved(true);
            }
            // A write keeps the mark; then all are in, and the record of saved trails goes.
            m.note(block(5));
            m.set_out(Vec::new(), |_| true);
            if on_its_way {
                m.saved(true);
            }
            m.set_out(vec![Outsider { replica: "2".into(), base: epoch(3, &["1", "2", "3"]) }], |_| true);
            m.note(block(5));
            assert!(!m.may_clear(0), "nothing on stable storage says that the block was written");
            assert!(m.next_record().is_some());
        }
    }

    /// Each input of the machine asks for it, as long as somebody is out.
    #[test]
    fn what_is_to_be_saved_is_found_however_much_was_written() {
        let mut m = degraded();
        (0..50_000).for_each(|n| m.note(block(1024 * n)));
        let began = std::time::Instant::now();
        (0..20_000).for_each(|_| assert!(m.next_record().is_none()));
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "all that was written is looked at");
        assert!(!m.may_clear(49_999) && !m.may_clear(3));
        let Some(Record::Missed { trails }) = m.next_record() else { panic!("nothing to save") };
        assert_eq!(trails.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [3, 49_999]);
        assert_eq!(m.saved(false), [] as [u64; 0]);
        let Some(Record::Missed { trails }) = m.next_record() else { panic!("it is not tried again") };
        assert_eq!(trails.len(), 2);
        assert_eq!(m.saved(true), [3, 49_999]);
        assert!(m.next_record().is_none());
    }

    #[test]
    fn when_nobody_is_out_only_marked_chunks_have_trails() {
        let mut m = degraded();
        m.note(block(1024));
        m.set_out(Vec::new(), |n| n == 1);
        assert!(m.save_all());
        m.cleared(1);
        assert!(m.chunks.is_empty() && m.told_apart == 0);
    }
}
