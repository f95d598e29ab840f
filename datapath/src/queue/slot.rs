//! A request slot: what one request or job is, and how far it has come.

use lh_block::{ALLOCATION_MAX, BLOCK, Extent, Op};
use lh_wire::MAX_DATA;

use crate::message::{Job, JobId, MemberId, MemberSet};
use crate::order::Claim;

/// Most slots of a queue: client requests and jobs together.
pub(super) const SLOTS_MAX: usize = 512;

/// A set of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotSet([u64; SLOTS_MAX / 64]);

impl SlotSet {
    pub(super) const fn insert(&mut self, slot: u16) {
        self.0[slot as usize / 64] |= 1 << (slot % 64);
    }

    pub(super) const fn remove(&mut self, slot: u16) {
        self.0[slot as usize / 64] &= !(1 << (slot % 64));
    }

    pub(super) const fn has(&self, slot: u16) -> bool {
        self.0[slot as usize / 64] & 1 << (slot % 64) != 0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    /// The slots, ascending, as they are now: the set may change while the iterator is used.
    pub(super) fn iter(&self) -> impl Iterator<Item = u16> + use<> {
        let words = self.0;
        (0_u16..).zip(words).flat_map(|(i, mut word)| {
            std::iter::from_fn(move || {
                (word != 0).then(|| {
                    #[expect(clippy::cast_possible_truncation, reason = "at most 63")]
                    let bit = word.trailing_zeros() as u16;
                    word &= word - 1;
                    i * 64 + bit
                })
            })
        })
    }
}

/// What a slot is used for.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// Nothing.
    None,
    /// A request of the frontend.
    Client {
        /// What it asks for.
        op: Op,
        /// Where.
        range: Extent,
    },
    /// A job of the conductor.
    Job(JobId, Job),
}

impl Work {
    /// True for a client's request that changes data.
    pub(super) const fn is_client_write(&self) -> bool {
        matches!(self, Self::Client { op, .. } if op.is_write())
    }

    pub(super) const fn is_job(&self) -> bool {
        matches!(self, Self::Job(..))
    }
}

/// The part of a request that is done in one step, under one claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    /// Whole blocks: what is claimed and what the replicas see. At most [`MAX_DATA`] bytes, or [`ALLOCATION_MAX`].
    pub whole: Extent,
    /// The part of the request's range that this piece serves; inside `whole`.
    pub part: Extent,
}

impl Piece {
    /// True if a write of this piece has to keep bytes of the block that the client did not send.
    pub(super) fn is_partial(&self) -> bool {
        self.whole != self.part
    }

    /// What of it lies before this place, if anything does.
    pub(super) fn before(self, end: u64) -> Option<Self> {
        let before = Extent::new(0, end);
        Some(Self { whole: self.whole.intersection(before)?, part: self.part.intersection(before)? })
    }

    /// The piece of a request that begins `done` bytes into its range.
    ///
    /// A read takes the blocks around its bytes. What changes data takes as many whole blocks as it can, and a block
    /// that it covers in part as a piece of its own. `single`: one block.
    pub(super) fn next(op: Op, range: Extent, done: u64, single: bool) -> Self {
        let max = match op {
            Op::Allocation => ALLOCATION_MAX,
            _ if single => BLOCK,
            _ => u64::from(MAX_DATA),
        };
        let rest = Extent::new(range.offset + done, range.len - done);
        let mut whole = rest.widen(BLOCK);
        if op.is_write() {
            let inner = rest.narrow(BLOCK);
            whole = if inner.offset != rest.offset || inner.is_empty() {
                Extent::new(whole.offset, BLOCK)
            } else {
                inner
            };
        }
        whole.len = whole.len.min(max);
        let part = rest.intersection(whole).unwrap_or(Extent::new(rest.offset, 0));
        Self { whole, part }
    }
}

/// How many blocks of a write members have done that have no space for the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum First {
    /// Nobody has said it since it was last sent to all.
    #[default]
    Untold,
    /// All that have said it have done as many.
    Alike(u32),
    /// They differ behind what the least of them has done.
    Differ,
}

impl First {
    pub(super) fn told(self, blocks: u32) -> Self {
        match self {
            Self::Untold => Self::Alike(blocks),
            Self::Alike(others) if others == blocks => self,
            Self::Alike(_) | Self::Differ => Self::Differ,
        }
    }
}

/// A request that was sent to several members.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fan {
    /// Who has to answer before it is done.
    pub need: MemberSet,
    /// Who was sent it on the link that is up now, and has not answered.
    pub sent: MemberSet,
    /// Who has done it.
    pub ok: MemberSet,
    /// Whose link broke before the answer came, or whose disk was full on the way: they may have done it, or part of it.
    pub unsure: MemberSet,
    /// Who answered that its disk is full; nothing was changed there, unless it is unsure, or by `first`.
    pub full: MemberSet,
    /// How many of the first blocks the full ones have done all the same.
    pub first: First,
    /// Who has said that since it was last sent to all.
    pub told: MemberSet,
    /// Who is brought in sync, and is sent it once a member has done it: no member has space.
    pub back: MemberSet,
    /// Who answered with another error. For jobs also whose link is down.
    pub failed: MemberSet,
    /// When it was first sent, ns: whoever answers was there after that.
    pub sent_at: u64,
    /// When it was last sent to anybody, ns: members are judged from then on.
    pub last_sent: u64,
    /// When the first member was full, ns.
    pub full_since: u64,
    /// Its place in the write window.
    pub place: Option<u64>,
}

impl Fan {
    /// Takes a member out of everything.
    pub(super) const fn forget(&mut self, m: MemberId) {
        self.need = self.need.without(m);
        self.sent = self.sent.without(m);
        self.ok = self.ok.without(m);
        self.unsure = self.unsure.without(m);
        self.full = self.full.without(m);
        self.told = self.told.without(m);
        self.back = self.back.without(m);
        self.failed = self.failed.without(m);
    }

    /// Members that have to answer and have not done it.
    pub(super) fn missing(&self) -> MemberSet {
        self.ok.iter().fold(self.need, MemberSet::without)
    }
}

/// Why a request waits outside: it holds no claim and nothing of it is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// The queue is paused.
    Paused,
    /// The members may differ in this chunk.
    Doubt(u64),
    /// No member can serve it.
    NoMember,
    /// Every member is full; tried again at this time, ns.
    Full(u64),
}

/// How far a slot has come.
///
/// ```text
/// Free -> Parked <-> Claiming -> Looking -> Reading -> Held
///                        |          |          |
///                        +----------+-> Queued <- (merge)
///                               |
///                            Writing -> Settled -> Free
/// Free -> Flushing -> Free
/// ```
/// Steps that need not wait are passed over; a request of several pieces goes round.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// Not used.
    Free,
    /// Waits outside.
    Parked(Why),
    /// Waits for its range.
    Claiming,
    /// Changes data and holds its range: goes on once its client has been looked for.
    Looking,
    /// Sent to one member, for a read, a merge or a copy.
    Reading {
        /// Whom.
        member: MemberId,
        /// When, ns.
        sent_at: u64,
    },
    /// A read that has its data and no claim; waits until every member was heard.
    Held,
    /// Holds its range and waits for the write window.
    Queued,
    /// Sent to the members.
    Writing(Fan),
    /// Part of a flush that runs or comes next.
    Flushing,
    /// Done on the members; holds its range until the answer has left.
    Settled,
}

impl Stage {
    /// Whether `next` may follow.
    const fn may_become(&self, next: &Self) -> bool {
        use Stage::{Claiming, Flushing, Free, Held, Looking, Parked, Queued, Reading, Settled, Writing};
        match self {
            Free => !matches!(next, Settled),
            Parked(_) => !matches!(next, Settled | Held),
            Claiming => {
                matches!(next, Looking | Parked(_) | Reading { .. } | Queued | Writing(_) | Settled | Free)
            }
            Looking => matches!(next, Parked(_) | Reading { .. } | Queued | Writing(_) | Settled | Free),
            Reading { .. } | Writing(_) => !matches!(next, Flushing),
            Held => matches!(next, Parked(_) | Claiming | Reading { .. } | Free),
            Queued => matches!(next, Parked(_) | Writing(_) | Settled | Free),
            Flushing => matches!(next, Parked(_) | Free),
            Settled => matches!(next, Free),
        }
    }
}

/// How far a copy between members has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Copy {
    /// A member compares what it holds with its checksums on record.
    Verify,
    /// The source's checksums are asked for.
    Digest,
    /// The targets compare.
    Compare,
    /// A part is read from the source.
    #[default]
    Read,
    /// It is asked for once more, though it does not fit the source's checksums.
    ReadAnyway,
    /// And sent to the targets.
    Put,
}

/// One request or job.
#[derive(Debug)]
pub(super) struct Slot {
    pub work: Work,
    stage: Stage,
    /// When it came, ns.
    pub arrived: u64,
    /// Counts requests of the queue: parked ones go on in this order.
    pub order: u64,
    /// Bytes of the range that earlier pieces have done.
    pub done: u64,
    pub piece: Piece,
    /// The claim that it holds or waits for.
    pub claim: Option<Claim>,
    /// Counts what was sent for this slot, over all requests that used it: an answer to anything but the last is
    /// late, and ignored.
    pub attempt: u32,
    /// Members that failed to read this piece.
    pub tried: MemberSet,
    /// Of a read: up to here, in bytes of its range, it goes block by block. Of larger pieces nobody has all.
    pub singly: u64,
    /// Members whose bytes a read has; of a copy, whom it was read from.
    pub sources: MemberSet,
    /// A trailer's length between the read and the write of a copy; or that of the answer that is held.
    pub aux: u32,
    /// Blocks that a copy has changed.
    pub changed: u64,
    /// The step of a copy.
    pub copy: Copy,
    /// Of a copy that compares: parts that differ and are still to be copied, as in [`lh_wire::differing`].
    pub differ: u32,
    /// Of a copy: members that have said that the part in hand is rotten, or could not read it.
    pub rotten: MemberSet,
    /// Of a copy: it was read all the same.
    pub is_rotten: bool,
    /// The client has its answer (an error), although members have yet to give theirs.
    pub given: bool,
    /// That answer has left the process.
    pub left: bool,
    /// Its client is gone: nothing more of it is begun.
    pub abandoned: bool,
}

impl Slot {
    pub(super) const fn new() -> Self {
        Self {
            work: Work::None,
            stage: Stage::Free,
            arrived: 0,
            order: 0,
            done: 0,
            piece: Piece { whole: Extent { offset: 0, len: 0 }, part: Extent { offset: 0, len: 0 } },
            claim: None,
            attempt: 0,
            tried: MemberSet::EMPTY,
            singly: 0,
            sources: MemberSet::EMPTY,
            aux: 0,
            changed: 0,
            copy: Copy::Read,
            differ: 0,
            rotten: MemberSet::EMPTY,
            is_rotten: false,
            given: false,
            left: false,
            abandoned: false,
        }
    }

    /// Begins new work in a free slot.
    pub(super) fn begin(&mut self, work: Work, now: u64, order: u64) {
        *self = Self { work, arrived: now, order, attempt: self.attempt, ..Self::new() };
    }

    pub(super) const fn stage(&self) -> &Stage {
        &self.stage
    }

    /// The fan-out that is under way.
    pub(super) const fn fan(&mut self) -> Option<&mut Fan> {
        match &mut self.stage {
            Stage::Writing(fan) => Some(fan),
            _ => None,
        }
    }

    /// The one place where the stage changes.
    pub(super) fn enter(&mut self, next: Stage) {
        assert!(self.stage.may_become(&next), "a request cannot go from {:?} to {next:?}", self.stage);
        self.stage = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lh_block::SECTOR;

    fn pieces(op: Op, offset: u64, len: u64) -> Vec<(u64, u64, bool)> {
        let range = Extent::new(offset, len);
        let mut done = 0;
        let mut got = Vec::new();
        while done < len {
            let p = Piece::next(op, range, done, false);
            assert!(p.whole.contains(p.part) && p.whole.is_aligned(BLOCK) && !p.part.is_empty());
            got.push((p.whole.offset / BLOCK, p.whole.len / BLOCK, p.is_partial()));
            done += p.part.len;
        }
        assert_eq!(done, len);
        got
    }

    #[test]
    fn a_write_is_cut_at_blocks_that_it_covers_in_part() {
        let w = Op::Write { fua: false };
        assert_eq!(pieces(w, 4096, 8192), [(1, 2, false)]);
        assert_eq!(pieces(w, SECTOR, SECTOR), [(0, 1, true)]);
        assert_eq!(pieces(w, 4096, SECTOR), [(1, 1, true)]);
        assert_eq!(pieces(w, SECTOR, 8192), [(0, 1, true), (1, 1, false), (2, 1, true)]);
        assert_eq!(pieces(w, SECTOR, 4096), [(0, 1, true), (1, 1, true)]);
    }

    #[test]
    fn long_zeroes_come_in_pieces_of_a_mebibyte() {
        let got = pieces(Op::Unmap, SECTOR, 3 << 20);
        assert_eq!(
            got,
            [(0, 1, true), (1, 256, false), (257, 256, false), (513, 255, false), (768, 1, true)]
        );
    }

    #[test]
    fn a_read_takes_the_blocks_around_it() {
        assert_eq!(pieces(Op::Read, SECTOR, SECTOR), [(0, 1, true)]);
        assert_eq!(pieces(Op::Read, SECTOR, 1 << 20), [(0, 256, true), (256, 1, true)]);
        assert_eq!(pieces(Op::Read, 0, 1 << 20), [(0, 256, false)]);
    }

    #[test]
    fn sets_of_slots() {
        let mut s = SlotSet::default();
        for n in [0, 63, 64, 511] {
            s.insert(n);
        }
        s.remove(63);
        assert_eq!(s.iter().collect::<Vec<_>>(), [0, 64, 511]);
        assert!(s.has(64) && !s.has(63) && !s.is_empty());
    }

    #[test]
    #[should_panic(expected = "cannot go from")]
    fn an_answered_request_does_not_go_back() {
        let mut s = Slot::new();
        s.enter(Stage::Writing(Fan::default()));
        s.enter(Stage::Settled);
        s.enter(Stage::Claiming);
    }
}
