//! What the queues and the conductor tell each other. What they share without messages is in [`crate::shared`].
//!
//! A change that all queues have to make is a *switch*: the conductor sends it to every queue, each makes it and
//! answers [`FromQueue::Switched`] once the condition named at the switch holds. The conductor takes the next step
//! only after the last answer. Messages between one queue and the conductor keep their order.

use lh_block::Extent;

/// A replica's place in the engine's table. Fixed while the engine runs; at most [`MEMBERS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub u8);

/// Places in the engine's table.
pub const MEMBERS_MAX: usize = lh_block::REPLICAS_MAX as usize;

/// Most queues of an engine, the one that serves relays included: a bit for each in the conductor's masks.
pub const QUEUES_MAX: u8 = 64;

/// A device queue's number, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueId(pub u8);

/// Names one switch; counts up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SwitchId(pub u64);

/// Names one job of the conductor; counts up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// Names one control request; counts up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ControlId(pub u64);

/// A switch: one step of a change on every queue. Where it waits for writes admitted before, and one of them is cut in pieces, that is
/// for the piece under way: the next ones come after the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// The member's link of this queue is up. From now on every write goes to it, too, and waits for it.
    /// Done when every write admitted before has completed on the members that it was sent to.
    ///
    /// If the queue already waits for the member (its link broke, it was not put out), everything that waits for it
    /// is sent to it again over the new link.
    Attach {
        /// The member that joins, still without reads (WO).
        member: MemberId,
    },
    /// The same for a replica that is not a member yet: from now on every write goes to it, too, and keeps its range until
    /// it has answered, but the client is answered without it.
    /// Done when every write admitted before has completed on the members that it was sent to.
    Fill {
        /// The replica that is brought in sync (WO).
        member: MemberId,
    },
    /// From now on no write is answered without this one.
    /// Done when every write admitted before has its last answer, so that none which the client believes done is still on
    /// its way to it.
    Await {
        /// Who is filled, and about to become a member.
        member: MemberId,
    },
    /// The member may be read from (RW). Done at once.
    Promote {
        /// The member that holds everything now.
        member: MemberId,
    },
    /// No read is sent to the member, and no answer of it to a read is used any more: such reads are sent to
    /// another. Writes go on waiting for it, whether its link is up or not, until it is forgotten or attached again.
    /// Done at once.
    StopReads {
        /// The member that is about to be put out.
        member: MemberId,
    },
    /// The epoch without the member is durable: nothing waits for it any more; what waited only for it completes.
    /// Its link is closed, its buffers are freed. Done at once.
    Forget {
        /// The member that is out.
        member: MemberId,
    },
    /// Requests wait at admission (the queue is paused from its start). Done when every write admitted before has
    /// its last answer from every member (not only the client's answer), and every read is answered or parked.
    Pause,
    /// Requests are admitted again. Done at once.
    Resume,
    /// The volume has grown to this many bytes. Done at once.
    Resize {
        /// Bytes.
        size: u64,
    },
    /// The engine ends: every request that waits or comes is answered with an error. Done when none is in flight.
    Stop,
}

/// Work that one queue does for the conductor, under the order of overlapping requests like a client's own. Jobs are
/// done while the queue is paused, too, and every job is answered exactly once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Job {
    /// Makes the range of one layer the same on `targets` as it is on `source`, exactly: data, zeroes and absent
    /// blocks. The range is claimed exclusively from the read to the last write if the layer is the head; other
    /// layers do not change and need no claim. At most [`lh_wire::MAX_DATA`] bytes, whole blocks.
    ///
    /// Ends with [`JobResult::Failed`] as soon as the link to one of its members is down, also while it waits for its
    /// claim: a write that holds the range may be waiting for that very member.
    Equalise {
        /// Index into the conductor's list of layer names, kept by the driver; `None` is the head.
        layer: Option<LayerRef>,
        /// Where.
        range: Extent,
        /// Whose bytes count.
        source: MemberId,
        /// Members whose bytes count as much: what the source says is rotten, or cannot read, is taken from one of them.
        others: MemberSet,
        /// Who is made equal. Whom a part was read from is passed over, unless it takes what is merged for its layer's own.
        targets: MemberSet,
        /// The targets hold something already: what they hold is compared by checksum first, and only what differs is
        /// read and sent.
        compare: bool,
        /// What the source's layers below hold counts as the layer's own: the members may have folded different snapshots.
        merged: bool,
        /// A repair: the range is claimed whatever the layer, and what the source gives has to fit its checksums.
        repair: bool,
    },
    /// Compares a range of one layer on `targets` with what `source` holds, and on all of them with the checksums on
    /// record, by checksum. At most [`lh_wire::MAX_DATA`] bytes, whole blocks; under a shared claim if the layer is the
    /// head. Ends early as [`Job::Equalise`] does.
    Compare {
        /// As in [`Job::Equalise`].
        layer: Option<LayerRef>,
        /// Where.
        range: Extent,
        /// Whose checksums are sent.
        source: MemberId,
        /// Who compares; may be nobody.
        targets: MemberSet,
    },
    /// Compares a range of one layer on one member with its checksums on record. At most [`lh_wire::VERIFY_MAX`] bytes.
    Verify {
        /// A snapshot's layer, or the head.
        layer: Option<LayerRef>,
        /// Where.
        range: Extent,
        /// Whose.
        member: MemberId,
    },
    /// Sends `ClearIntent` for the range (whole chunks) to every member under an exclusive claim, if
    /// [`clearable`](crate::shared::Shared::clearable) still holds for each chunk then.
    ClearIntent {
        /// Whole chunks of the intent bitmap.
        range: Extent,
        /// Of what later flushes cover no mark goes: whoever is put back as it was before that would not be found out.
        flush: u64,
    },
    /// A flush on every member, like a client's.
    Flush,
}

/// Number of a layer's name; the driver keeps the names, so that the machines copy no strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerRef(pub u32);

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobResult {
    /// Done; `changed` counts blocks that differed on some target.
    Done {
        /// Blocks that differed, summed over the targets.
        changed: u64,
    },
    /// A [`Job::Compare`] was done.
    Compared {
        /// A bit for each part of the range ([`lh_wire::differing`]) that differs somewhere or does not fit its checksums.
        parts: u32,
    },
    /// A [`Job::Verify`] was done.
    Verified(lh_wire::Verified),
    /// A member that the job needs failed; its link is down or its answer was an error.
    Failed {
        /// Which.
        member: MemberId,
    },
    /// Not done, nothing happened: the range was written meanwhile (ClearIntent), or the queue is stopping.
    Skipped,
}

/// Why a queue wants a member out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The connection broke or could not be used (protocol error, checksum).
    Link,
    /// The replica answered a write or a flush with an input/output error.
    Io,
    /// The replica's disk is full while others have space.
    NoSpace,
    /// It is brought in sync, and has done what no member has space for: it would have to be filled there once more.
    Ahead,
    /// No answer at all, pings included, while others answer.
    Hung,
    /// Answers, but far slower than the others in the same window.
    Slow,
}

/// From the conductor to a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToQueue {
    /// Make a switch and answer with its id.
    Switch(SwitchId, Switch),
    /// Do a job and answer with its id.
    Job(JobId, Job),
    /// Send a control request (the driver has its payload) on the member's link, in the order of its stream. Answered
    /// with [`FromQueue::ControlLost`] if there is no link.
    Control(ControlId, MemberId),
    /// The chunk of the intent bitmap with this number is equal on all members: requests that wait for it go on.
    ChunkResolved(u64),
}

/// From a queue to the conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromQueue {
    /// The switch is made and its condition holds.
    Switched(SwitchId),
    /// The job ended.
    JobDone(JobId, JobResult),
    /// The control request will not be answered: the link broke. (An answer goes from the driver to the conductor.)
    ControlLost(ControlId, MemberId),
    /// The member should be put out. Said once per member until it is attached again, and once more if it gets worse:
    /// a full or slow one may fail, then hang, then lose its link. Full and slow are said again every few seconds as
    /// long as they last and the member is read from. Writes go on waiting for it.
    Failed(MemberId, Fault),
    /// The member says that a younger engine exists: stop at once, answer nobody.
    Stale(MemberId),
    /// A request waits for this chunk to be made equal: do it first.
    ChunkWanted(u64),
    /// A read of this range met a block on the member that does not fit its checksum. Another member was asked.
    Rotten(MemberId, Extent),
    /// The member's disk does not give some block of this range, and another member's does.
    Unreadable(MemberId, Extent),
}

/// A set of members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemberSet(pub(crate) u32);

impl MemberSet {
    /// No member.
    pub const EMPTY: Self = Self(0);

    /// With the member.
    #[must_use]
    pub const fn with(self, m: MemberId) -> Self {
        Self(self.0 | 1 << m.0)
    }

    /// Without the member.
    #[must_use]
    pub const fn without(self, m: MemberId) -> Self {
        Self(self.0 & !(1 << m.0))
    }

    /// The members of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The members of either.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The members of this set that are not in the other.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True if it holds the member.
    pub const fn has(self, m: MemberId) -> bool {
        self.0 & 1 << m.0 != 0
    }

    /// True if it holds nobody.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The members, ascending.
    pub fn iter(self) -> impl Iterator<Item = MemberId> {
        let mut bits = self.0;
        std::iter::from_fn(move || {
            (bits != 0).then(|| {
                #[expect(clippy::cast_possible_truncation, reason = "at most 31")]
                let m = MemberId(bits.trailing_zeros() as u8);
                bits &= bits - 1;
                m
            })
        })
    }
}

impl FromIterator<MemberId> for MemberSet {
    fn from_iter<I: IntoIterator<Item = MemberId>>(members: I) -> Self {
        members.into_iter().fold(Self::EMPTY, Self::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let s: MemberSet = [MemberId(0), MemberId(3)].into_iter().collect();
        assert_eq!(s.iter().collect::<Vec<_>>(), [MemberId(0), MemberId(3)]);
        assert!(s.without(MemberId(0)).has(MemberId(3)));
        assert_eq!(s.len(), 2);
    }
}
