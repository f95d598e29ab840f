//! Who may write, and who holds everything that was acknowledged.

use serde::{Deserialize, Serialize};

/// Most replicas of a volume: Longhorn's limit.
pub const REPLICAS_MAX: u8 = 20;

/// A random number that tells one start of one process from every other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Instance(#[serde(with = "hex128")] pub u128);

/// The number that decides between two engines of one volume: the higher one wins, on every replica, for ever.
///
/// Written as one number, attachment x 2^32 + restart, in `status` and `--generation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "u64", into = "u64")]
pub struct Generation {
    /// Issued by the volume's authority at every attachment.
    pub attachment: u32,
    /// Counted by the node's own manager at every restart of the engine within one attachment.
    pub restart: u32,
}

impl From<u64> for Generation {
    #[expect(clippy::cast_possible_truncation, reason = "splits a number into its two halves")]
    fn from(n: u64) -> Self {
        Self { attachment: (n >> 32) as u32, restart: n as u32 }
    }
}

impl From<Generation> for u64 {
    fn from(g: Generation) -> Self {
        u64::from(g.attachment) << 32 | u64::from(g.restart)
    }
}

impl Generation {
    /// The first generation above this one that a new attachment uses.
    pub const fn next_attachment(self) -> Self {
        Self { attachment: self.attachment + 1, restart: 0 }
    }

    /// The next generation within the same attachment.
    pub const fn next_restart(self) -> Self {
        Self { attachment: self.attachment, restart: self.restart + 1 }
    }
}

impl std::fmt::Display for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", u64::from(*self))
    }
}

/// Counts how often the members of a volume have agreed that marks of the intent bitmap may be taken back.
///
/// The next one is asked for only when every member has recorded the last one: so no two are further apart than one
/// (`docs/invariants.md`, 8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Round(pub u64);

impl Round {
    /// The one after it.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// No member is in this one while another is in that.
    const fn is_behind(self, other: Self) -> bool {
        self.next().0 < other.0
    }
}

/// What epochs of one volume are ordered and compared-and-swapped by.
pub type EpochOrder = (Generation, u64);

/// One state of a volume's membership: the replicas that hold every acknowledged write made under it.
///
/// Epochs of one volume are ordered by (generation, counter). A write that some replica missed is acknowledged only
/// after an epoch without that replica is durable (`docs/invariants.md`, 1).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Epoch {
    /// The generation of the engine that made it.
    pub generation: Generation,
    /// Counts the epochs made under one generation, from 1.
    pub counter: u64,
    /// Names of the member replicas, sorted.
    pub members: Vec<String>,
    /// Tells apart two epochs that two engines made under equal numbers, which must never happen.
    pub id: Instance,
    /// What each member had recorded at least when this epoch was made, but for those that it takes in, which record it first: who
    /// has recorded less is an older directory under a member's name (`docs/invariants.md`, 12). `None`: not all had recorded any
    /// epoch, or whoever passed this one on does not know of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<EpochOrder>,
    /// Of a replica's record, the round that it is in; of an epoch that is made, the one that its members are in then. `None`: as for
    /// `after`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<Round>,
}

/// By what every program passes on: [`Epoch::after`] and [`Epoch::round`] are lost with one that does not know them, and do not tell two epochs
/// apart.
impl PartialEq for Epoch {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order() && self.id == other.id && self.members == other.members
    }
}

impl Eq for Epoch {}

impl Epoch {
    /// See [`EpochOrder`].
    pub const fn order(&self) -> EpochOrder {
        (self.generation, self.counter)
    }

    /// True if one has counted that is younger than that: whoever has recorded this epoch knows of it (`docs/invariants.md`, 12).
    pub fn outdates(&self, older: EpochOrder) -> bool {
        self.after > Some(older)
    }

    /// True if whoever has recorded this is an older copy of a replica's directory, since another one has recorded that. Who tells no
    /// round is not known to be.
    pub fn is_behind(&self, other: &Self) -> bool {
        self.round.zip(other.round).is_some_and(|(own, other)| own.is_behind(other))
    }

    /// True if the replica of that name is a member.
    pub fn has(&self, replica: &str) -> bool {
        self.members.iter().any(|m| m == replica)
    }
}

/// 128-bit numbers as 32 hex digits: JSON numbers beyond 2^53 are not portable.
mod hex128 {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(n: &u128, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{n:032x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u128, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        u128::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_the_same_for_programs_that_do_not_know_what_its_members_had_recorded() {
        let generation = Generation { attachment: 2, restart: 0 };
        let older = r#"{"generation":8589934592,"counter":4,"members":["a"],"id":"0000000000000000000000000000000c"}"#;
        let read: Epoch = serde_json::from_str(older).unwrap();
        assert_eq!((read.generation, read.after), (generation, None));
        assert_eq!(serde_json::to_string(&read).unwrap(), older);
        let epoch = Epoch { after: Some((generation, 3)), ..read.clone() };
        let written = serde_json::to_string(&epoch).unwrap();
        assert_eq!(serde_json::from_str::<Epoch>(&written).unwrap().after, epoch.after);
        assert_eq!(epoch, read);
        let later = Epoch { round: Some(Round(7)), ..read.clone() };
        let written = serde_json::to_string(&later).unwrap();
        assert!(written.ends_with(r#","round":7}"#), "{written}");
        assert_eq!(serde_json::from_str::<Epoch>(&written).unwrap().round, later.round);
        assert_eq!(later, read);
        assert_ne!(epoch, Epoch { id: Instance(13), ..epoch.clone() });
        assert_ne!(epoch, Epoch { members: Vec::new(), ..epoch.clone() });
        assert_ne!(epoch, Epoch { counter: 5, ..epoch.clone() });
    }

    #[test]
    fn an_older_copy_is_two_rounds_behind() {
        let at = |round: u64| Epoch { round: Some(Round(round)), ..Epoch::default() };
        for (own, other, behind) in [(3, 3, false), (3, 4, false), (3, 5, true), (5, 3, false), (0, 2, true)]
        {
            assert_eq!(at(own).is_behind(&at(other)), behind, "{own} and {other}");
        }
        assert!(!at(u64::MAX).is_behind(&at(u64::MAX)));
        let unknown = Epoch::default();
        assert!(!unknown.is_behind(&at(9)) && !at(0).is_behind(&unknown));
    }

    #[test]
    fn a_restart_is_younger_and_an_attachment_younger_still() {
        let g = Generation { attachment: 3, restart: 7 };
        assert!(g.next_restart() > g);
        assert!(g.next_attachment() > g.next_restart());
        assert_eq!(Generation::from(u64::from(g)), g);
        assert_eq!(u64::from(g), (3 << 32) + 7);
    }
}
