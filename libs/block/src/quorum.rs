//! Who must agree before an epoch counts: said by people, records, resources and command lines, decided by the engine.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How many replicas must hold an epoch before it counts, and what a start needs (`docs/invariants.md`, 12). Written as its
/// word everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quorum {
    /// One member suffices; the authority decides between two histories. Longhorn's availability.
    #[default]
    Any,
    /// A majority of the configured replicas; needs no authority but for generations.
    Majority,
    /// Whoever answers is believed, as in Longhorn: an epoch is recorded by its members, and no start waits for one of them.
    Unsafe,
}

/// A word that is no quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a quorum is any, majority or unsafe")]
pub struct QuorumError;

impl Quorum {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Any, Self::Majority, Self::Unsafe];

    /// Its word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Majority => "majority",
            Self::Unsafe => "unsafe",
        }
    }

    /// Of so many replicas that count, so many at least have to hold everything for the volume to go on.
    pub const fn members_min(self, counted: usize) -> usize {
        match self {
            Self::Any | Self::Unsafe => 1,
            Self::Majority => counted / 2 + 1,
        }
    }
}

impl std::fmt::Display for Quorum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Quorum {
    type Err = QuorumError;

    fn from_str(word: &str) -> Result<Self, QuorumError> {
        Self::ALL.into_iter().find(|quorum| quorum.as_str() == word).ok_or(QuorumError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_read_as_it_is_written_and_no_other_word_is_one() {
        for quorum in Quorum::ALL {
            assert_eq!(quorum.as_str().parse(), Ok(quorum));
            // As records of volumes and resources have it.
            assert_eq!(serde_json::to_value(quorum).unwrap(), quorum.as_str());
            assert_eq!(serde_json::from_value::<Quorum>(quorum.as_str().into()).unwrap(), quorum);
        }
        for other in ["", "Any", "all"] {
            assert_eq!(other.parse::<Quorum>(), Err(QuorumError), "{other}");
        }
    }

    #[test]
    fn only_a_majority_needs_more_than_one() {
        let needed = |quorum: Quorum| [1, 2, 3, 4, 5].map(|counted| quorum.members_min(counted));
        assert_eq!(needed(Quorum::Majority), [1, 2, 2, 3, 3]);
        assert_eq!((needed(Quorum::Any), needed(Quorum::Unsafe)), ([1; 5], [1; 5]));
    }
}
