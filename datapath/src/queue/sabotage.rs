//! Switches that take one protecting mechanism out, so that tests can show that it is needed. Only a build with the
//! feature `sabotage`, which no program has, can turn one on.

/// A mechanism to leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A write is answered when a member failed, without waiting until it was durably put out.
    AckBeforeEpoch,
    /// Overlapping requests are not ordered.
    NoOrder,
    /// Reads hold no claim.
    UnclaimedReads,
    /// A write's claim is given back at the first member's answer.
    ReleaseEarly,
    /// A flush is answered at the first member's answer.
    FlushEarly,
    /// A younger engine's fence is taken for a replica's failure.
    StaleIsFailure,
    /// Writes run any distance beyond the oldest incomplete one.
    NoWindow,
    /// Clients are answered without a replica that is filled, even when it is about to become a member.
    NotAwaited,
    /// Reads are answered whether or not every member was heard.
    NoLease,
    /// A write that every member refused for want of space waits outside, though some have done part of it.
    FullIsUntouched,
    /// The rest of a write for which there was no space waits outside, though members have not done as many blocks of it.
    PartsAreAlike,
    /// And without waiting for whoever is brought in sync to do what members have done of it.
    FillersLackParts,
    /// What waits outside is done, whether or not its client is still there.
    NotAbandoned,
    /// What changes data is sent as soon as it has its range, without a look whether its client is still there.
    NotLooked,
}

impl super::Queue {
    /// Leaves one mechanism out from now on.
    #[cfg(feature = "sabotage")]
    pub const fn sabotage(&mut self, which: Option<Sabotage>) {
        self.sabotage = which;
    }

    /// True if this mechanism is left out.
    #[cfg(feature = "sabotage")]
    pub(super) fn lacks(&self, which: Sabotage) -> bool {
        self.sabotage == Some(which)
    }

    /// True if this mechanism is left out: never.
    #[cfg(not(feature = "sabotage"))]
    #[expect(clippy::unused_self, reason = "the same call as with the feature")]
    pub(super) const fn lacks(&self, _which: Sabotage) -> bool {
        false
    }
}
