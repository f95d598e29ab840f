//! The oracle of the data path: every block is a register, and its history must be linearizable.
//!
//! A write takes effect at most once, at one moment between its start and its answer; one that was never answered may
//! take effect at any moment after its start, or never. A read returns the value of one moment between its start and
//! its answer; what it returned was the value then, so nothing older may ever be read again. Per block a write is one
//! [`Stamp`]; time is a counter of events, so that the same check serves real clients and simulations.

use std::collections::BTreeSet;
use std::fmt;

/// The content of one block, as a number that no other write of a run has. 0 is the block of zeroes it began with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stamp(pub u64);

/// One write to one block: what [`History::write_begins`] gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriteId(u64);

/// A flush: what [`History::flush_begins`] gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlushBegan(u64);

/// One write to one block that some read may still return.
#[derive(Clone, Copy, Debug)]
struct Write {
    id: WriteId,
    stamp: Stamp,
    /// Whose clients wrote it.
    session: u64,
    began: u64,
    /// When its answer came; `None` while none did.
    acked: Option<u64>,
    /// It took effect before this time, or never will: its engine was dead and fenced off by then.
    gone: Option<u64>,
    /// When the first read that returned it ended.
    seen: Option<u64>,
    /// Since when it certainly is the value no more.
    superseded: Option<u64>,
    /// Covered by a flush that was answered, or answered with FUA.
    durable: bool,
    /// As `superseded`, by a write that survives a power cut.
    superseded_durably: bool,
    /// When its answer came, if it may have gone with the power since and its clients have not been told: a flush may not promise
    /// it then.
    lost: Option<u64>,
}

impl Write {
    const fn new(id: WriteId, stamp: Stamp, session: u64, began: u64) -> Self {
        Self {
            id,
            stamp,
            session,
            began,
            acked: None,
            gone: None,
            seen: None,
            superseded: None,
            durable: false,
            superseded_durably: false,
            lost: None,
        }
    }

    /// True if it took effect before this time, or never will.
    fn was_over(&self, time: u64) -> bool {
        [self.acked, self.gone, self.seen].into_iter().flatten().any(|t| t < time)
    }
}

/// A block broke the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Number of the block.
    pub block: u64,
    /// What was read.
    pub observed: Stamp,
    /// What could have been read.
    pub possible: Vec<Stamp>,
    /// What of the rule was broken.
    pub rule: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "block {}: read {:?}, possible {:?}: {}",
            self.block, self.observed.0, self.possible, self.rule
        )
    }
}

/// A read under way; give it to [`History::read_returned`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReadBegan(u64);

/// What every block may hold.
#[derive(Clone, Debug)]
pub struct History {
    clock: u64,
    blocks: Vec<Vec<Write>>,
    /// Reads under way, oldest first: they may still return what was superseded meanwhile.
    reads: BTreeSet<ReadBegan>,
    /// When the power was lost last.
    lost: u64,
}

impl History {
    /// All blocks hold zeroes.
    pub fn new(blocks: usize) -> Self {
        let zero = Write { acked: Some(0), durable: true, ..Write::new(WriteId(0), Stamp(0), 0, 0) };
        Self { clock: 0, blocks: vec![vec![zero]; blocks], reads: BTreeSet::new(), lost: 0 }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn writes(&mut self, block: u64) -> &mut Vec<Write> {
        let at = usize::try_from(block).expect("block numbers fit");
        &mut self.blocks[at]
    }

    /// A write of this stamp (0: zeroes) to the block is about to be sent, by a client of this session: of one engine process.
    pub fn write_begins(&mut self, block: u64, stamp: Stamp, session: u64) -> WriteId {
        let began = self.tick();
        self.writes(block).push(Write::new(WriteId(began), stamp, session, began));
        WriteId(began)
    }

    /// The answer to the write has come; `fua`: it promises stable storage.
    pub fn write_acked(&mut self, block: u64, id: WriteId, fua: bool) {
        let now = self.tick();
        let oldest_read = self.reads.first().map_or(now, |r| r.0);
        let writes = self.writes(block);
        let Some(this) = writes.iter_mut().find(|w| w.id == id) else { return };
        this.acked = Some(now);
        this.durable |= fua;
        let began = this.began;
        for w in writes.iter_mut().filter(|w| w.id != id && w.was_over(began)) {
            w.superseded.get_or_insert(now);
            w.superseded_durably |= fua;
        }
        writes.retain(|w| !w.superseded_durably || w.superseded.is_none_or(|at| at >= oldest_read));
    }

    /// The client of a write has given it up and sent another one in its place, which is about to be acknowledged: the first took
    /// effect before that, or never will.
    pub fn write_comes_before(&mut self, block: u64, id: WriteId, other: WriteId) {
        if let Some(this) = self.writes(block).iter_mut().find(|w| w.id == id) {
            this.gone.get_or_insert(other.0 - 1);
        }
    }

    /// As [`History::write_acked`] without `fua`, but the answer may have been decided before the power went, and what
    /// it says be lost since. Or it was sent again after that: it took effect before its answer, or not at all.
    pub fn write_acked_perhaps_lost(&mut self, block: u64, id: WriteId) {
        let (lost, acked) = (self.lost, self.tick());
        let Some(this) = self.writes(block).iter_mut().find(|w| w.id == id) else { return };
        if this.began < lost {
            this.gone.get_or_insert(acked);
            this.lost = Some(acked);
        } else {
            self.write_acked(block, id, false);
        }
    }

    /// A flush is about to be sent.
    pub fn flush_begins(&mut self) -> FlushBegan {
        FlushBegan(self.tick())
    }

    /// The flush was answered: what had been answered before it began survives a power cut, and is there: what of it may have
    /// been lost before was not, unless the clients of this session were told ([`History::flush_failed`]).
    pub fn flush_acked(&mut self, flush: FlushBegan, session: u64) {
        self.was_not_lost(flush, session);
        let oldest_read = self.reads.first().map_or(u64::MAX, |r| r.0);
        for writes in &mut self.blocks {
            for i in 0..writes.len() {
                if writes[i].durable || writes[i].acked.is_none_or(|at| at >= flush.0) {
                    continue;
                }
                writes[i].durable = true;
                let began = writes[i].began;
                for w in writes.iter_mut().filter(|w| w.was_over(began) && w.began != began) {
                    w.superseded_durably = true;
                }
            }
            writes.retain(|w| !w.superseded_durably || w.superseded.is_none_or(|at| at >= oldest_read));
        }
    }

    fn was_not_lost(&mut self, flush: FlushBegan, session: u64) {
        let now = self.tick();
        for writes in &mut self.blocks {
            for i in 0..writes.len() {
                let theirs = writes[i].session == session;
                let Some(acked) = writes[i].lost.take_if(|acked| theirs && *acked < flush.0) else {
                    continue;
                };
                writes[i].acked = Some(acked);
                let (began, id) = (writes[i].began, writes[i].id);
                for w in writes.iter_mut().filter(|w| w.id != id && w.was_over(began)) {
                    w.superseded.get_or_insert(now);
                }
            }
        }
    }

    /// A flush of this session was answered with an error: its clients know that what they wrote before may be lost.
    pub fn flush_failed(&mut self, session: u64) {
        for w in self.blocks.iter_mut().flatten().filter(|w| w.session == session) {
            w.lost = None;
        }
    }

    /// The engine that had these requests is dead, its successor has fenced it off and answers: what was not answered
    /// took effect before now, or never will.
    pub fn engine_replaced(&mut self) {
        let now = self.tick();
        for w in self.blocks.iter_mut().flatten().filter(|w| w.acked.is_none() && w.gone.is_none()) {
            w.gone = Some(now);
        }
    }

    /// Every member lost its power: what no flush covers may be lost, and what it had overwritten be back. Whoever
    /// wrote it has to be told before a flush of theirs may end well.
    pub fn power_lost(&mut self) {
        let now = self.tick();
        self.lost = now;
        for w in self.blocks.iter_mut().flatten().filter(|w| !w.superseded_durably) {
            w.superseded = None;
            w.seen = None;
            if !w.durable
                && let Some(acked) = w.acked.take()
            {
                w.gone = Some(now);
                w.lost = Some(acked);
            }
        }
    }

    /// A read begins.
    pub fn read_begins(&mut self) -> ReadBegan {
        let mark = ReadBegan(self.tick());
        self.reads.insert(mark);
        mark
    }

    /// The read returned `observed` for one of its blocks.
    ///
    /// # Errors
    /// [`Violation`] if the block had this value at no moment of the read.
    pub fn read_returned(&mut self, block: u64, began: ReadBegan, observed: Stamp) -> Result<(), Violation> {
        self.read_returned_perhaps_lost(block, began, observed)?;
        let (now, lost) = (self.tick(), self.lost);
        let writes = self.writes(block);
        let may = |w: &Write| w.superseded.is_none_or(|at| at >= began.0);
        if began.0 < lost {
            // It may have seen what is lost by now: nothing is learnt.
            return Ok(());
        }
        // Zeroes may be several writes: then nothing is learnt about which of them was seen.
        let same = writes.iter().filter(|w| may(w) && w.stamp == observed).count();
        for w in writes.iter_mut() {
            if w.stamp == observed {
                if same == 1 && w.superseded.is_none_or(|at| at >= began.0) {
                    w.seen.get_or_insert(now);
                }
            } else if w.was_over(began.0) {
                // It took effect before the read, and the value is another: it was overwritten by then.
                w.superseded.get_or_insert(now);
            }
        }
        Ok(())
    }

    /// As [`History::read_returned`], of an engine whose successor goes on without what this one sees: nothing is learnt.
    ///
    /// # Errors
    /// [`Violation`], likewise.
    pub fn read_returned_perhaps_lost(
        &mut self,
        block: u64,
        began: ReadBegan,
        observed: Stamp,
    ) -> Result<(), Violation> {
        let writes = self.writes(block);
        let may = |w: &Write| w.superseded.is_none_or(|at| at >= began.0);
        if writes.iter().any(|w| may(w) && w.stamp == observed) {
            return Ok(());
        }
        let possible = writes.iter().filter(|w| may(w)).map(|w| w.stamp).collect();
        Err(Violation { block, observed, possible, rule: "not a value of the read's time" })
    }

    /// All of these values, of a read or a snapshot that began so, were there at one moment: no write is in it that began after
    /// another one was over that is not.
    ///
    /// # Errors
    /// [`Violation`] of the block whose value came last, if another one was overwritten before.
    pub fn at_one_moment(
        &self,
        began: ReadBegan,
        values: impl Iterator<Item = (u64, Stamp)>,
    ) -> Result<(), Violation> {
        // The moment lies behind the start of every write that is seen and before the end of what overwrote any of them. Zeroes
        // may be of several writes: of the first, and overwritten with the last.
        let (mut earliest, mut latest, mut youngest) = (0, u64::MAX, None);
        for (block, stamp) in values {
            let writes = &self.blocks[usize::try_from(block).expect("block numbers fit")];
            let possible =
                writes.iter().filter(|w| w.stamp == stamp && w.superseded.is_none_or(|at| at >= began.0));
            let (mut first, mut last) = (u64::MAX, 0);
            for w in possible {
                first = first.min(w.began);
                last = last.max(w.superseded.unwrap_or(u64::MAX));
            }
            if first != u64::MAX && first >= earliest {
                (earliest, youngest) = (first, Some((block, stamp)));
            }
            latest = latest.min(last);
        }
        match youngest {
            Some((block, observed)) if earliest > latest => Err(Violation {
                block,
                observed,
                possible: Vec::new(),
                rule: "another value was overwritten before",
            }),
            _ => Ok(()),
        }
    }

    /// The read is over, or will never be answered.
    pub fn read_ends(&mut self, began: ReadBegan) {
        self.reads.remove(&began);
    }

    /// A read while nothing else was in flight returned `observed`: it is the value from now on, and whatever was under
    /// way before has either become it or will never be seen.
    ///
    /// # Errors
    /// [`Violation`] if it could not be the value.
    pub fn settled(&mut self, block: u64, observed: Stamp) -> Result<(), Violation> {
        let possible: Vec<_> =
            self.writes(block).iter().filter(|w| w.superseded.is_none()).map(|w| w.stamp).collect();
        if !possible.contains(&observed) {
            return Err(Violation {
                block,
                observed,
                possible,
                rule: "a quiet read went back, or invented a value",
            });
        }
        let now = self.tick();
        for w in self.writes(block).iter_mut() {
            if w.stamp == observed {
                w.gone = w.gone.or(Some(now));
            } else {
                w.superseded.get_or_insert(now);
                w.gone = w.gone.or(Some(now));
            }
        }
        Ok(())
    }
}

/// First bytes of a stamped block.
const MAGIC: u64 = u64::from_le_bytes(*b"register");

/// Fills a block of 4096 bytes with the stamp, its place and a checksum over all of it.
pub fn stamp_block(out: &mut [u8], block: u64, stamp: Stamp) {
    let mut state = stamp.0 ^ block.rotate_left(32);
    for chunk in out.chunks_exact_mut(8) {
        // splitmix64: every block's bytes differ everywhere from every other's.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        chunk.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    out[..8].copy_from_slice(&MAGIC.to_le_bytes());
    out[8..16].copy_from_slice(&block.to_le_bytes());
    out[16..24].copy_from_slice(&stamp.0.to_le_bytes());
    let crc = crc32c::crc32c(&out[..out.len() - 4]);
    let at = out.len() - 4;
    out[at..].copy_from_slice(&crc.to_le_bytes());
}

/// The stamp of a block read back.
///
/// # Errors
/// A sentence, if the bytes are neither zeroes nor one whole stamped block of this place.
pub fn read_stamp(bytes: &[u8], block: u64) -> Result<Stamp, String> {
    if bytes.iter().all(|b| *b == 0) {
        return Ok(Stamp(0));
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let crc = u32::from_le_bytes(bytes[bytes.len() - 4..].try_into().expect("4 bytes"));
    if word(0) != MAGIC || crc != crc32c::crc32c(&bytes[..bytes.len() - 4]) {
        return Err(format!("block {block}: torn or foreign bytes ({:016x}...)", word(0)));
    }
    if word(8) != block {
        return Err(format!("block {block}: holds the bytes of block {}", word(8)));
    }
    Ok(Stamp(word(16)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(h: &mut History, stamp: u64) -> Result<(), Violation> {
        let r = h.read_begins();
        let verdict = h.read_returned(0, r, Stamp(stamp));
        h.read_ends(r);
        verdict
    }

    fn write(h: &mut History, stamp: u64) {
        let w = h.write_begins(0, Stamp(stamp), 1);
        h.write_acked(0, w, false);
    }

    #[test]
    fn an_acknowledged_value_stays() {
        let mut h = History::new(1);
        let w = h.write_begins(0, Stamp(1), 1);
        assert!(read(&mut h, 0).is_ok() && read(&mut h, 1).is_ok());
        h.write_acked(0, w, false);
        assert!(read(&mut h, 1).is_ok());
        assert!(read(&mut h, 0).is_err());
    }

    #[test]
    fn reads_do_not_go_back() {
        let mut h = History::new(1);
        write(&mut h, 1);
        h.write_begins(0, Stamp(2), 1);
        assert!(read(&mut h, 1).is_ok());
        assert!(read(&mut h, 2).is_ok(), "an unanswered write may have landed");
        assert!(read(&mut h, 1).is_err(), "and then its predecessor is gone");
    }

    #[test]
    fn concurrent_writes_leave_either_but_only_one() {
        let mut h = History::new(1);
        let (a, b) = (h.write_begins(0, Stamp(1), 1), h.write_begins(0, Stamp(2), 1));
        h.write_acked(0, a, false);
        h.write_acked(0, b, false);
        assert!(read(&mut h, 1).is_ok());
        assert!(read(&mut h, 2).is_err(), "both were over before the first read");
    }

    #[test]
    fn what_a_dead_engine_left_cannot_land_later() {
        let mut h = History::new(1);
        write(&mut h, 1);
        h.write_begins(0, Stamp(2), 1);
        h.engine_replaced();
        assert!(read(&mut h, 1).is_ok());
        assert!(read(&mut h, 2).is_err());
    }

    #[test]
    fn what_was_given_up_does_not_come_after_what_was_sent_in_its_place() {
        let mut h = History::new(1);
        write(&mut h, 1);
        let first = h.write_begins(0, Stamp(2), 1);
        let second = h.write_begins(0, Stamp(3), 1);
        assert!(read(&mut h.clone(), 2).is_ok());
        h.write_comes_before(0, first, second);
        h.write_acked(0, second, false);
        assert!(read(&mut h, 2).is_err());
        assert!(read(&mut h, 3).is_ok());
    }

    #[test]
    fn what_was_written_after_another_write_was_over_is_not_seen_without_it() {
        let mut h = History::new(2);
        let mark = h.read_begins();
        let first = h.write_begins(0, Stamp(1), 1);
        h.write_acked(0, first, false);
        let second = h.write_begins(1, Stamp(2), 1);
        h.write_acked(1, second, false);
        let seen = |a, b| [(0, Stamp(a)), (1, Stamp(b))].into_iter();
        for (a, b) in [(0, 0), (1, 0), (1, 2)] {
            assert!(h.at_one_moment(mark, seen(a, b)).is_ok(), "{a} {b}");
        }
        assert!(h.at_one_moment(mark, seen(0, 2)).is_err());
    }

    #[test]
    fn a_quiet_read_decides() {
        let mut h = History::new(1);
        write(&mut h, 1);
        h.write_begins(0, Stamp(2), 1);
        h.settled(0, Stamp(1)).unwrap();
        assert!(h.settled(0, Stamp(2)).is_err());
    }

    #[test]
    fn a_power_cut_takes_what_was_not_flushed() {
        let mut h = History::new(1);
        write(&mut h, 1);
        let f = h.flush_begins();
        h.flush_acked(f, 1);
        write(&mut h, 2);
        write(&mut h, 3);
        h.power_lost();
        let mut other = h.clone();
        assert!(read(&mut h, 2).is_ok());
        assert!(read(&mut h, 3).is_err(), "one value, and it stays");
        assert!(read(&mut other, 0).is_err(), "what was flushed over is gone");
        assert!(read(&mut other, 1).is_ok());
    }

    #[test]
    fn a_flush_after_a_loss_promises_all_to_who_was_not_told() {
        let mut h = History::new(1);
        write(&mut h, 1);
        h.power_lost();
        let (mut told, mut others) = (h.clone(), h.clone());
        let f = h.flush_begins();
        h.flush_acked(f, 1);
        assert!(read(&mut h, 0).is_err(), "the flush said that it is there");
        assert!(read(&mut h, 1).is_ok());

        told.flush_failed(1);
        let f = told.flush_begins();
        told.flush_acked(f, 1);
        assert!(read(&mut told, 0).is_ok(), "the client knows");

        let f = others.flush_begins();
        others.flush_acked(f, 2);
        assert!(read(&mut others, 0).is_ok(), "a client that has come since was promised nothing");
    }

    #[test]
    fn what_an_engine_sees_that_is_being_replaced_may_be_lost_all_the_same() {
        let mut h = History::new(1);
        write(&mut h, 1);
        let f = h.flush_begins();
        h.flush_acked(f, 1);
        write(&mut h, 2);
        h.power_lost();
        let r = h.read_begins();
        assert!(
            h.read_returned_perhaps_lost(0, r, Stamp(0)).is_err(),
            "what was flushed over is gone for it, too"
        );
        assert!(h.read_returned_perhaps_lost(0, r, Stamp(2)).is_ok());
        h.read_ends(r);
        assert!(read(&mut h, 1).is_ok());
        assert!(read(&mut h, 2).is_err());
    }

    #[test]
    fn what_is_sent_again_after_a_loss_takes_effect_as_late_as_its_answer() {
        let mut h = History::new(1);
        let first = h.write_begins(0, Stamp(1), 0);
        h.power_lost();
        let second = h.write_begins(0, Stamp(2), 0);
        h.write_acked_perhaps_lost(0, first);
        h.write_acked(0, second, false);
        let r = h.read_begins();
        assert!(h.read_returned_perhaps_lost(0, r, Stamp(1)).is_ok(), "the first one may have come last");
        assert!(h.read_returned_perhaps_lost(0, r, Stamp(2)).is_ok());
        h.read_ends(r);
        write(&mut h, 3);
        assert!(read(&mut h, 1).is_err(), "it does not come after its answer");
    }

    #[test]
    fn a_long_read_may_return_anything_of_its_time() {
        let mut h = History::new(1);
        write(&mut h, 1);
        let r = h.read_begins();
        write(&mut h, 2);
        write(&mut h, 3);
        for value in 1..=3 {
            assert!(h.read_returned(0, r, Stamp(value)).is_ok(), "{value}");
        }
        assert!(h.read_returned(0, r, Stamp(0)).is_err());
        h.read_ends(r);
        write(&mut h, 4);
        assert!(read(&mut h, 3).is_err());
    }

    #[test]
    fn stamped_blocks_are_recognised_and_damage_is_seen() {
        let mut block = vec![0; 4096];
        assert_eq!(read_stamp(&block, 7), Ok(Stamp(0)));
        stamp_block(&mut block, 7, Stamp(99));
        assert_eq!(read_stamp(&block, 7), Ok(Stamp(99)));
        assert!(read_stamp(&block, 8).is_err());
        block[2000] ^= 1;
        assert!(read_stamp(&block, 7).is_err());
    }
}
