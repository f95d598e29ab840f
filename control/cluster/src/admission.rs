//! What may be asked of the resources: what a wish leaves out is filled in, and one that cannot be met is refused, in one
//! sentence, before it is stored.
//!
//! Every rule is a function of what is asked and what is known, without I/O. What the definitions themselves refuse (their
//! schemas and CEL rules, `crate::api`) is not repeated here. Nothing that protects data relies on this module alone but
//! what no controller could undo: a user's deletion of the last replica that holds everything, and of a disk's or node's
//! entry that replicas stand on. Managers are not asked (`deploy/webhooks.yaml`): a decision of theirs never waits for it.

mod node;
mod replica;
mod review;
mod setting;
mod snapshot;
mod volume;

use std::sync::Arc;

pub use review::{Call, Unreadable, answer};

use crate::api::{Engine, Replica, Volume};
use crate::settings::Settings;

/// What becomes of a wish: `Ok`, with what its author should know, or `Err`, why not, in one sentence.
pub type Verdict = Result<Vec<String>, String>;

/// What is known of everything else.
pub trait World {
    /// The settings in force.
    fn settings(&self) -> Settings;
    /// A volume.
    fn volume(&self, name: &str) -> Option<Arc<Volume>>;
    /// A volume's engine.
    fn engine(&self, volume: &str) -> Option<Arc<Engine>>;
    /// A volume's replicas.
    fn replicas_of(&self, volume: &str) -> Vec<Arc<Replica>>;
    /// Replicas on a node.
    fn replicas_on(&self, node: &str) -> Vec<Arc<Replica>>;
    /// How many snapshots of a volume there are.
    fn snapshots_of(&self, volume: &str) -> usize;
    /// True if Kubernetes has a node of that name.
    fn kubernetes_has(&self, node: &str) -> bool;
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
