//! Folding: a removed snapshot and the layer above it become one layer (`docs/invariants.md`, 9).
//!
//! What a removed snapshot P holds is seen only through its child C, if it has no other. So either P's blocks that C
//! says nothing of are copied into C ([`Direction::IntoChild`]), or C's into P ([`Direction::IntoParent`]), whichever is
//! less, and then one of the two files goes. Whatever was copied when the work stops, for whatever reason, every layer but
//! P reads as before: what is copied into C is what C read there anyway, and what is copied into P lies below what C has
//! itself. So any step may be the last, a fold begins anew in either direction, and only the change of names at the end
//! ([`names`]) needs a record to be finished by. Zero marks of the layer that goes become marks of the one that stays.
//!
//! - [`names`]: what the worker's half ([`super::Directory`]) does: the record, the change of names, recovery.
//! - [`running`]: the ring's half, a machine ([`Fold`]) that goes through its [`stage`]s.
//! - [`steps`]: how it says what is to be done next ([`Fold::next`]).
//! - [`moves`]: how what was found is moved.
//! - [`aside`]: how it gives way to layer images.
//! - [`drain`]: what is different where a small head goes into the parent.
//! - [`account`]: what comes of it in the store.
//! - [`work`]: what takes long and blocks: looking for extents, copying.
//! - [`files`]: the same by hand, for two files that belong to nobody.
//!
//! Into a snapshot nobody else writes while it is folded: layer images wait until the fold stands aside. Into the head clients do: each piece is claimed first ([`Step::Claim`]), and no
//! client's write of the range is anywhere between plan and report while the claim is held (`docs/invariants.md`, 3). The head
//! itself goes into the parent only if that moves far less (`docs/decisions/0010-which-way-a-fold-goes.md`).

mod account;
mod aside;
mod drain;
mod files;
mod moves;
mod names;
mod running;
mod stage;
mod steps;
mod work;

use super::record::Direction;

pub use files::{FoldFilesError, fold_files};
pub(super) use files::{Layer, open as open_by_hand};
pub use names::{FoldPlan, Folded};
pub(super) use names::{is_left, recover, remove_left};
pub use running::Fold;
pub use stage::Step;
pub use work::Work;
