//! What may be asked of the resources: what a wish leaves out is filled in, and one that cannot be met is refused, in one
//! sentence, before it is stored.
//!
//! Every rule is a function of what is asked and what is known ([`Facts`]), without I/O. What the definitions themselves
//! refuse (their schemas and CEL rules, `crate::api`) is not repeated here. Nothing that protects data relies on this module alone but
//! what no controller could undo: a user's deletion of the last replica that holds everything, and of a disk's or node's
//! entry that replicas stand on. Managers are not asked (`deploy/webhooks.yaml`): a decision of theirs never waits for it.

mod node;
mod replica;
mod review;
mod setting;
mod snapshot;
mod volume;

pub use review::{About, Call, Review, Unreadable};

use crate::api::{Engine, Replica, Volume};
use crate::schedule::Cluster;
use crate::settings::Settings;

/// What becomes of a wish: `Ok`, with what its author should know, or `Err`, why not, in one sentence.
pub type Verdict = Result<Vec<String>, String>;

/// What becomes of a wish for recurring jobs.
const NO_JOBS: &str = "recurring jobs are not built yet: no snapshot, backup or trim is made of it";

/// The reason that goes with the refusal of a snapshot that the volume's limits leave no room for.
pub const TOO_MANY_SNAPSHOTS: &str = "TooManySnapshots";

/// Why a wish is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Refusal {
    /// One word for programs, which tells apart what else has to be done.
    reason: &'static str,
    /// One sentence for people.
    text: String,
}

impl From<String> for Refusal {
    /// It breaks a rule, and does so whenever it is asked again.
    fn from(text: String) -> Self {
        Self { reason: "Invalid", text }
    }
}

/// What has to be known of other objects to judge a wish.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The settings in force.
    pub settings: Settings,
    /// The volume in question; `None`: there is none.
    pub volume: Option<Volume>,
    /// Its engine.
    pub engine: Option<Engine>,
    /// The replicas of the volume, or on the node, in question.
    pub replicas: Vec<Replica>,
    /// How many snapshots the volume has.
    pub snapshots: usize,
    /// The nodes and disks; empty where they do not matter.
    pub cluster: Cluster,
    /// Kubernetes has a node of that name.
    pub kubernetes_has_it: bool,
}

/// What is done to an object.
#[derive(Clone, Copy, Debug)]
enum Change<'a, K> {
    Create(&'a K),
    Update { old: &'a K, new: &'a K },
    Delete(&'a K),
}

/// Sorted, without blanks around, without doubles, without empty ones.
fn tidy(tags: &mut Vec<String>) {
    let mut tidied: Vec<String> =
        tags.iter().map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()).collect();
    tidied.sort();
    tidied.dedup();
    *tags = tidied;
}
