//! A replica's directory: layer files, chain, extent index, zero maps, and the records beside them.
//!
//! Two handles share the work. [`Store`] belongs to the thread that does the I/O: it knows which layer holds a block and
//! plans reads, zeroes, layer images and flushes; the driver does the reads and writes and reports back. [`Directory`]
//! belongs to a worker thread: everything that creates, renames and syncs files. Both are `Send`; neither locks the
//! other out, since the directory never changes what the store has in memory, and the store writes only into files that
//! it was handed open. `docs/formats/replica-directory.md` describes every file.

mod adopt;
mod backing;
mod catch_up;
mod chain;
mod checksum;
mod clone;
mod create;
mod data;
mod diff;
mod directory;
mod disk;
mod error;
mod export;
mod flush;
mod fold;
mod fs;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gather;
mod gojson;
mod grant;
mod heads;
mod id;
mod index;
mod intent;
mod known;
mod lasting;
mod layer;
mod load;
mod locks;
mod meta;
mod missed;
mod offline;
mod open;
mod owner;
mod pace;
mod places;
mod power;
mod put;
mod qcow2;
mod ranges;
mod rebuild;
mod record;
mod release;
mod rescue;
mod room;
mod scrub;
mod ssync;
mod states;
mod survey;
mod switch;
#[cfg(test)]
mod tests;
mod tree;
mod zero;
mod zeroed;

#[cfg(test)]
use tests::tape;

pub use backing::{BackingDifference, BackingFile};
pub use chain::Committed;
pub use checksum::{BlockSum, FoldedChecksums, LayerChecksums, Verdict};
pub use clone::{CloneError, CloneOptions, Cloned, clone_snapshot};
pub use data::{Answer, Closing, Piece, Source, Store};
pub use diff::{Change, ChangeKind};
pub use directory::{CreateOptions, Directory, NewHead, NewZeroMap, OpenOptions};
pub use disk::Alignment;
pub use error::{ChainError, Damage, NotLasting, OpenError};
pub use flush::Flush;
pub use fold::{Fold, FoldFilesError, FoldPlan, Folded, Step as FoldStep, Work as FoldWork, fold_files};
pub use grant::Granted;
pub use intent::IntentWrite;
pub use lasting::lasting;
pub use layer::LayerNo;
pub use load::Parts;
pub use missed::{Missed, Trail};
pub use offline::{ExportError, SnapshotView};
pub use pace::Pace;
pub use power::forget_power;
pub use put::PutPlan;
pub use qcow2::Qcow2Fault;
pub use record::Direction;
pub use release::{Release, ReleaseError};
pub use rescue::{Doubt, DoubtKind};
pub use scrub::{Hashed, RecordedChecksum, Rot, RotKind, ScrubError, ScrubReport, SnapshotLayer, Stored};
pub use ssync::{SsyncError, Ssynced, receive_file, send_file};
pub use states::{Merged, Told};
pub use survey::{Survey, survey};
pub use zeroed::{Recorded, ZeroPlan};

/// Our subdirectory, which Longhorn ignores.
const ENGINE: &str = "engine";
