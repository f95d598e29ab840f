//! Where a fold is.

use lh_block::Extent;

use super::Direction;

/// What is done while all writes wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Begin,
    Move,
    Flush,
    Swap,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Survey,
    Choose(Direction),
    /// Looks for the next runs, or ends.
    Look,
    /// Moves what was found.
    Move,
    /// Holds a claim on the head; `true`: the copy is done.
    Claimed(Extent, bool),
    Release,
    Flush {
        end: bool,
    },
    Note,
    Switch,
    /// These are of a head that goes into the parent, see [`super::drain`].
    Ready,
    /// All writes are to wait, for this: as a fold into the head begins, too.
    Hold(Held),
    Held(Held),
    LetGo {
        swapped: bool,
    },
    Finish,
    /// Layer images go first, see [`super::aside`].
    Aside,
    Ended,
}

impl Stage {
    /// Where a fold that does not go on gets from here, on its way to that end: a claim is given back first, a change of names
    /// finished.
    pub(super) const fn broken_off(self, end: Self) -> Self {
        match self {
            Self::Claimed(..) | Self::Release | Self::LetGo { .. } | Self::Finish | Self::Ended => self,
            Self::Held(_) => Self::LetGo { swapped: false },
            _ => end,
        }
    }
}
