//! What all queues and the conductor read and write without messages. Each part says who writes it, and what its readers may conclude.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use lh_block::Extent;

use crate::loss::Loss;
use crate::message::{MemberId, MemberSet};

/// What all queues and the conductor read and write without messages: counters of flushes, and per chunk of the
/// intent bitmap what keeps its mark needed, and whether the members may still differ in it.
#[derive(Debug)]
pub struct Shared {
    /// Number of the last flush that was started on any queue.
    flush_started: AtomicU64,
    /// Highest number such that this flush was answered by every member.
    flush_everywhere: AtomicU64,
    /// Bytes in a chunk of the intent bitmap.
    chunk: u64,
    /// Per chunk: 0 = no mark needed; n = a write into it completed after flush n - 1 was started.
    stamps: Growing,
    /// How many bits are set in `doubt`, so that the ordinary read costs one load.
    doubts: AtomicU64,
    /// A bit per chunk: the members may differ in it. Set by the conductor while no member can be read from.
    doubt: Growing,
    /// How often a bit was set in `doubt`.
    doubted: AtomicU64,
    loss: Loss,
    /// Requests wait, however long no member can be read from.
    patient: AtomicBool,
    /// How many members have to be left when one is put out.
    members_min: AtomicU32,
    /// Members that are read from only if no other is left.
    far: AtomicU32,
    /// Moves on while clients send requests, at most once a millisecond on each queue.
    activity: AtomicU64,
}

/// A list of numbers that grows and never moves: parts of which each is as long as all before it.
#[derive(Debug)]
struct Growing {
    len: AtomicU64,
    parts: [OnceLock<Box<[AtomicU64]>>; 48],
}

impl Growing {
    /// Numbers in the first part.
    const FIRST: u64 = 64;

    fn new(len: u64) -> Self {
        let growing = Self { len: AtomicU64::new(0), parts: [const { OnceLock::new() }; 48] };
        growing.grow(len);
        growing
    }

    /// At least so many, the new ones 0.
    fn grow(&self, len: u64) {
        let (mut from, mut size) = (0, Self::FIRST);
        for part in &self.parts {
            if from >= len {
                break;
            }
            part.get_or_init(|| (0..size).map(|_| AtomicU64::new(0)).collect());
            from += size;
            size = from;
        }
        self.len.fetch_max(len, Ordering::AcqRel);
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn get(&self, n: u64) -> Option<&AtomicU64> {
        let part = if n < Self::FIRST { 0 } else { (n / Self::FIRST).ilog2() + 1 };
        let from = if part == 0 { 0 } else { Self::FIRST << (part - 1) };
        let part = self.parts.get(usize::try_from(part).ok()?)?.get()?;
        part.get(usize::try_from(n - from).ok()?)
    }

    fn iter(&self) -> impl Iterator<Item = &AtomicU64> {
        self.parts.iter().map_while(|part| part.get()).flatten()
    }
}

impl Shared {
    /// For a volume of `size` bytes whose intent bitmap has chunks of `chunk` bytes.
    pub fn new(size: u64, chunk: u64) -> Self {
        let chunks = size.div_ceil(chunk);
        Self {
            flush_started: AtomicU64::new(0),
            flush_everywhere: AtomicU64::new(0),
            chunk,
            stamps: Growing::new(chunks),
            doubts: AtomicU64::new(0),
            doubt: Growing::new(chunks.div_ceil(64)),
            doubted: AtomicU64::new(0),
            loss: Loss::default(),
            patient: AtomicBool::new(false),
            members_min: AtomicU32::new(1),
            far: AtomicU32::new(0),
            activity: AtomicU64::new(0),
        }
    }

    /// The volume has grown to this many bytes. Before anything is written there.
    pub fn grow(&self, size: u64) {
        let chunks = size.div_ceil(self.chunk);
        self.stamps.grow(chunks);
        self.doubt.grow(chunks.div_ceil(64));
    }

    /// A client has sent a request.
    pub fn note_activity(&self) {
        self.activity.fetch_add(1, Ordering::Relaxed);
    }

    /// Another number than before if clients have sent requests since.
    pub fn activity(&self) -> u64 {
        self.activity.load(Ordering::Relaxed)
    }

    /// Bytes in a chunk.
    pub const fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Numbers of the chunks that a range touches: of those that there are, however long a range a replica tells.
    pub fn chunks_of(&self, range: Extent) -> std::ops::Range<u64> {
        range.offset / self.chunk..range.end().div_ceil(self.chunk).min(self.chunks())
    }

    /// A new flush begins: its number.
    pub fn start_flush(&self) -> u64 {
        self.flush_started.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The flush with this number was answered by every member.
    pub fn finish_flush(&self, number: u64) {
        self.flush_everywhere.fetch_max(number, Ordering::AcqRel);
    }

    /// Highest flush complete on every member; goes into every header.
    pub fn flush_everywhere(&self) -> u64 {
        self.flush_everywhere.load(Ordering::Acquire)
    }

    /// A write into the range has its last answer from every member. Call before its claim is released.
    pub fn wrote(&self, range: Extent) {
        let stamp = self.flush_started.load(Ordering::Acquire) + 1;
        for chunk in self.chunks_of(range) {
            if let Some(s) = self.stamps.get(chunk) {
                s.fetch_max(stamp, Ordering::AcqRel);
            }
        }
    }

    /// True if the chunk is marked, as far as this engine has written into it or was told of its mark.
    pub fn is_marked(&self, chunk: u64) -> bool {
        self.stamps.get(chunk).is_some_and(|s| s.load(Ordering::Acquire) != 0)
    }

    /// True if the chunk is marked and everything written into it is covered by this flush, or one before it, and that is complete
    /// everywhere.
    pub fn clearable(&self, chunk: u64, flush: u64) -> bool {
        let stamp = self.stamps.get(chunk).map_or(0, |s| s.load(Ordering::Acquire));
        stamp != 0 && stamp <= flush.min(self.flush_everywhere())
    }

    /// True if everything written into some marked chunk is covered by a flush complete everywhere.
    pub fn anything_clearable(&self) -> bool {
        let covered = 1..=self.flush_everywhere();
        self.stamps.iter().any(|stamp| covered.contains(&stamp.load(Ordering::Acquire)))
    }

    /// True if the chunk is marked and some write into it is not covered by a flush complete everywhere.
    pub fn unflushed(&self, chunk: u64) -> bool {
        let stamp = self.stamps.get(chunk).map_or(0, |s| s.load(Ordering::Acquire));
        stamp > self.flush_everywhere()
    }

    /// True if some write is not covered by a flush complete everywhere.
    pub fn anything_unflushed(&self) -> bool {
        let everywhere = self.flush_everywhere();
        self.stamps.iter().any(|stamp| stamp.load(Ordering::Acquire) > everywhere)
    }

    /// What clients have lost and have to hear of.
    pub const fn loss(&self) -> &Loss {
        &self.loss
    }

    /// How many chunks there are.
    pub fn chunks(&self) -> u64 {
        self.stamps.len()
    }

    /// The members may differ in this chunk: a read of it waits ([`ChunkWanted`](crate::message::FromQueue::ChunkWanted)) until it
    /// is resolved.
    /// Writes of whole blocks need not wait. Only the conductor calls this, while no member can be read from.
    pub fn put_in_doubt(&self, chunk: u64) {
        if let Some(word) = self.doubt_word(chunk)
            && word.fetch_or(1 << (chunk % 64), Ordering::AcqRel) & 1 << (chunk % 64) == 0
        {
            self.doubts.fetch_add(1, Ordering::AcqRel);
            self.doubted.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Some number, as long as no chunk is in doubt and none has been since it was last the same. `None`: one is.
    pub fn sure(&self) -> Option<u64> {
        let doubted = self.doubted.load(Ordering::Acquire);
        (self.doubts.load(Ordering::Acquire) == 0).then_some(doubted)
    }

    /// The chunk is equal on all members. [`ChunkResolved`](crate::message::ToQueue::ChunkResolved) follows, so whoever saw the
    /// doubt is woken.
    pub fn resolve(&self, chunk: u64) {
        if let Some(word) = self.doubt_word(chunk)
            && word.fetch_and(!(1 << (chunk % 64)), Ordering::AcqRel) & 1 << (chunk % 64) != 0
        {
            self.doubts.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The first chunk in doubt that the range touches.
    pub fn in_doubt(&self, range: Extent) -> Option<u64> {
        if self.doubts.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.chunks_of(range).find(|chunk| {
            self.doubt_word(*chunk).is_some_and(|w| w.load(Ordering::Acquire) & 1 << (chunk % 64) != 0)
        })
    }

    /// The first chunk in doubt of all. A client's flush waits until there is none: a member that lacks what was
    /// answered cannot have it on stable storage.
    pub fn first_in_doubt(&self) -> Option<u64> {
        if self.doubts.load(Ordering::Acquire) == 0 {
            return None;
        }
        let words = self.doubt.iter().map(|w| w.load(Ordering::Acquire));
        (0..).step_by(64).zip(words).find(|(_, w)| *w != 0).map(|(n, w)| n + u64::from(w.trailing_zeros()))
    }

    /// While the conductor waits for the authority, or makes members equal that it can reach, requests wait, whatever
    /// `ioTimeout`. Only the conductor calls this.
    pub fn set_patient(&self, patient: bool) {
        self.patient.store(patient, Ordering::Release);
    }

    /// True if requests wait although too few members can be read from for longer than `ioTimeout`.
    pub fn is_patient(&self) -> bool {
        self.patient.load(Ordering::Acquire)
    }

    /// So many members have to be left when one is put out: it changes with the replicas that the volume has. Only the conductor
    /// calls this.
    pub fn set_members_min(&self, members: u32) {
        self.members_min.store(members, Ordering::Relaxed);
    }

    /// Members without which the volume cannot go on, 1 at least.
    pub fn members_min(&self) -> u32 {
        self.members_min.load(Ordering::Relaxed).max(1)
    }

    /// Whether the replica that is the member now is on another host than the engine: it is read from only if no other is left.
    /// Before any queue has a connection to it.
    pub fn set_far(&self, member: MemberId, far: bool) {
        let bit = MemberSet::EMPTY.with(member).0;
        if far {
            self.far.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.far.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Members that are read from only if no other is left.
    pub fn far(&self) -> MemberSet {
        MemberSet(self.far.load(Ordering::Relaxed))
    }

    fn doubt_word(&self, chunk: u64) -> Option<&AtomicU64> {
        self.doubt.get(chunk / 64)
    }

    /// The chunk's mark was taken back on every member. Call under the claim that `clearable` was asked under.
    pub fn cleared(&self, chunk: u64) {
        if let Some(s) = self.stamps.get(chunk) {
            s.store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_clearable_only_after_a_flush_that_began_after_its_last_write() {
        let s = Shared::new(16 << 20, 4 << 20);
        let clearable = |chunk| s.clearable(chunk, u64::MAX);
        assert!(!clearable(0) && !s.anything_clearable());
        let early = s.start_flush();
        s.wrote(Extent::new(0, 4096));
        s.finish_flush(early);
        assert!(!clearable(0) && !s.anything_clearable(), "the flush had begun before the write completed");
        let late = s.start_flush();
        s.finish_flush(late);
        assert!(clearable(0) && s.anything_clearable());
        assert!(s.clearable(0, late) && !s.clearable(0, early), "only what that flush covers");
        assert!(!clearable(1));
        s.cleared(0);
        assert!(!clearable(0) && !s.anything_clearable());
    }

    #[test]
    fn something_is_unflushed_until_a_flush_that_began_after_it() {
        let s = Shared::new(16 << 20, 4 << 20);
        assert!(!s.anything_unflushed());
        s.wrote(Extent::new(8 << 20, 4096));
        assert!(s.anything_unflushed());
        let flush = s.start_flush();
        s.finish_flush(flush);
        assert!(!s.anything_unflushed());
    }

    #[test]
    fn ranges_beyond_the_volume_have_no_chunks() {
        let s = Shared::new(16 << 20, 4 << 20);
        assert_eq!(s.chunks_of(Extent::new(4096, 4 << 20)), 0..2);
        assert_eq!(s.chunks_of(Extent::new(12 << 20, u64::MAX)), 3..4);
        assert_eq!(s.chunks_of(Extent::new(u64::MAX - 4096, 4096)).count(), 0);
        s.wrote(Extent::new(0, u64::MAX));
        assert!((0..4).all(|chunk| s.unflushed(chunk)));
    }

    #[test]
    fn a_list_grows_and_keeps_what_it_has() {
        let list = Growing::new(3);
        list.get(2).unwrap().store(7, Ordering::Relaxed);
        for len in [64, 65, 128, 129, 1000, 100_000] {
            list.grow(len);
            assert_eq!(list.len(), len);
            list.get(len - 1).unwrap().store(len, Ordering::Relaxed);
        }
        assert_eq!(list.get(2).unwrap().load(Ordering::Relaxed), 7);
        for len in [64, 65, 128, 129, 1000, 100_000] {
            assert_eq!(list.get(len - 1).unwrap().load(Ordering::Relaxed), len, "{len}");
        }
        let values: Vec<u64> = list.iter().map(|n| n.load(Ordering::Relaxed)).filter(|n| *n != 0).collect();
        assert_eq!(values, [7, 64, 65, 128, 129, 1000, 100_000]);
        assert!(list.get(1 << 40).is_none());
    }

    #[test]
    fn a_chunk_is_in_doubt_until_it_is_resolved() {
        let s = Shared::new(1 << 30, 4 << 20);
        assert_eq!(s.in_doubt(Extent::new(0, 1 << 30)), None);
        s.put_in_doubt(70);
        s.put_in_doubt(70);
        assert_eq!(s.in_doubt(Extent::new((70 << 22) - 4096, 8192)), Some(70));
        assert_eq!(s.in_doubt(Extent::new(71 << 22, 4096)), None);
        assert_eq!(s.first_in_doubt(), Some(70));
        s.resolve(70);
        assert_eq!(s.in_doubt(Extent::new(0, 1 << 30)), None);
        assert_eq!(s.first_in_doubt(), None);
    }
}
