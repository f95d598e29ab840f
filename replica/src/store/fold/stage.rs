//! Where a fold is, and what it asks for next.

use lh_block::Extent;

use super::{Direction, Work};

/// What is to be done next.
#[derive(Debug)]
#[must_use]
pub enum Step {
    /// Run it, where blocking is allowed; then [`super::Fold::worked`].
    Work(Work),
    /// No client's change of the range may be on its way, until [`Step::Release`].
    Claim(Extent),
    /// The claim is given back.
    Release,
    /// A hole is being punched where something is to be written: ask again when that has ended.
    Punching,
    /// [`super::super::Directory::make_zero_map`] for this layer, then [`super::Fold::map_made`].
    MakeMap(String),
    /// [`super::super::Directory::mark_zeroes`], then [`super::super::Store::marked`].
    MarkZeroes,
    /// [`super::super::Directory::choose_fold`], then [`super::Fold::chosen`].
    Choose(Direction),
    /// A whole flush, then [`super::Fold::flushed`].
    Flush,
    /// [`super::super::Directory::save_fold`] with this offset, then [`super::Fold::noted`].
    Note(Direction, u64),
    /// [`super::super::Directory::switch_fold`], then [`super::Fold::switched`]; when it is refused because a chain operation is
    /// prepared, later.
    Switch(Direction),
    /// [`super::super::Directory::ready_fold`], then [`super::Fold::readied`]; refused as [`Step::Switch`] is.
    Ready,
    /// [`super::super::Directory::swap_fold`], then [`super::Fold::switched`] or [`super::Fold::not_swapped`].
    Swap,
    /// [`super::super::Directory::finish_fold`], which must follow the swap at once, then [`super::Fold::finished`]. The driver need
    /// not wait with it for this step.
    Finish,
    /// Layer images go first: [`super::super::Directory::forget_fold`], then the images, then [`super::Fold::begin_anew`].
    GiveWay,
    /// It is over: [`super::Fold::state`] says how.
    Ended,
}

/// What is done while all writes wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Begin,
    Move,
    Flush,
    Swap,
}

/// Where it is.
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
