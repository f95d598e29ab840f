//! A volume's life: its engine, its replicas, where it is attached, how well it is.
//!
//! The resources of one volume are read, and what should be different is given back. Only this decision creates and
//! deletes a volume's engine, replicas and attachment, and only it writes the volume's status, but for `generation` and
//! `epoch`, which the manager of the engine's node writes by compare-and-swap (`crate::authority`).
//!
//! What an engine or a replica is doing counts only while its node answers and only if that node wrote it. Of a node
//! that does not answer nothing is waited for: the next engine's generation shuts the old one out
//! (`docs/invariants.md`, 2), so that a volume may be started elsewhere while nobody knows whether the old engine runs.
//! That is also how a volume moves while it is used (`migration`).

mod at_rest;
mod clone;
mod draft;
mod eviction;
mod health;
mod image;
mod leaving;
mod left;
mod life;
mod migration;
mod offline;
mod removal;
mod replicas;
#[cfg(test)]
mod tests;
mod unbuilt;
mod unmounted;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::Event;
use crate::api::{
    Engine, EngineSpec, Orphan, Replica, ReplicaSpec, SnapshotSpec, TicketType, Volume, VolumeAttachment,
    VolumeStatus,
};
use crate::schedule;
use crate::settings::Settings;
pub use clone::{CLONE_UNFINISHED, CLONED, CLONING, CloneSource, SOURCE_LARGER, SOURCE_MISSING, Source};
use draft::Draft;
pub use eviction::EVICTION;
pub use image::exchanges;
pub use left::DATA_LEFT;
pub use migration::pair;
pub use offline::OFFLINE_REBUILDING;
pub use replicas::{is_gone, lost};
pub use unbuilt::{NOT_BUILT, unbuilt};

/// The condition that says whether every replica has a place; Longhorn's.
pub const SCHEDULED: &str = "Scheduled";

/// The condition that says what an attachment waits for.
pub const READY: &str = "ReplicasReady";

/// The condition that says since when a volume that is being detached or deleted waits for its processes, and what for.
pub const ENDED: &str = "ProcessesEnded";

/// The parameter of a ticket for a rebuild that names the node on which a replica is to be filled.
pub const FILLS_ON: &str = "fillsOn";

/// Replicas that are being filled, by node.
pub type Filling = BTreeMap<String, usize>;

/// A volume and what it depends on.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The volume.
    pub volume: &'a Volume,
    /// Its engine ([`pair`]).
    pub engine: Option<&'a Engine>,
    /// A second one: the relay of a migration, or the engine before it.
    pub second: Option<&'a Engine>,
    /// Its replicas.
    pub replicas: Vec<&'a Replica>,
    /// Its attachment.
    pub attachment: Option<&'a VolumeAttachment>,
    /// What it is to be cloned from; `None`: nothing, or it holds that already.
    pub source: Option<CloneSource<'a>>,
    /// Snapshots of it that are still there.
    pub snapshots: usize,
    /// Orphans that stand for data of a volume of its name.
    pub left: Vec<&'a Orphan>,
    /// The nodes and disks.
    pub cluster: &'a schedule::Cluster,
    /// Replicas that are being filled, of all volumes.
    pub filling: &'a Filling,
    /// Replicas whose failure the leader has not known of for long by itself, whatever clock has written when that was.
    pub lately_failed: &'a BTreeSet<String>,
    /// Paths of the disks, by node and UUID.
    pub disk_paths: &'a BTreeMap<(String, String), String>,
    /// Nodes whose manager answers.
    pub nodes_up: &'a BTreeSet<String>,
    /// The settings in force.
    pub settings: &'a Settings,
    /// The image of volumes that name none.
    pub image: &'a str,
    /// The time.
    pub now: Timestamp,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Keep the volume until everything of it is gone.
    AddFinalizer,
    /// Everything of it is gone.
    RemoveFinalizer,
    /// Make the volume's attachment.
    CreateAttachment,
    /// Make the engine, under this name.
    CreateEngine(String, Box<EngineSpec>),
    /// Make a replica, under this name.
    CreateReplica(String, Box<ReplicaSpec>),
    /// Change the engine of this name.
    SetEngine(String, Box<EngineSpec>),
    /// Change a replica.
    SetReplica(String, Box<ReplicaSpec>),
    /// Remove the engine.
    DeleteEngine(String),
    /// Remove a replica and its data.
    DeleteReplica(String),
    /// Remove a replica of a node that is gone for good: nobody is left to remove its data. That it is gone is to be asked of the
    /// API server itself.
    ForgetReplica(String),
    /// Remove the volume's attachment.
    DeleteAttachment,
    /// Remove the volume's snapshots.
    DeleteSnapshots,
    /// Take a snapshot of the volume to clone, under this name, for as long as it is copied.
    CreateSourceSnapshot(String, Box<SnapshotSpec>),
    /// Remove that snapshot.
    DeleteSourceSnapshot(String),
    /// Ask for the volume (`Some`), or not any more, under a ticket of this kind.
    Ticket(TicketType, Option<Wish>),
    /// Write the volume's status.
    SetStatus(Box<VolumeStatus>),
    /// Tell people.
    Tell(Event),
    /// Look again after this time, even if nothing changes.
    LookAgain(Duration),
}

/// A wish to have the volume attached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// The node.
    pub node: String,
    /// Further details, as the ticket has them.
    pub parameters: BTreeMap<String, String>,
}

/// Decides for one volume.
pub fn plan(observed: &Observed<'_>) -> Vec<Action> {
    let mut draft = Draft::new(observed);
    if observed.volume.metadata.deletion_timestamp.is_some() {
        draft.remove();
    } else {
        draft.keep();
        draft.forget_lost();
        if draft.refuse_unbuilt() {
            return draft.finish();
        }
        draft.remove_spare();
        if draft.waits_for_what_is_left() {
            return draft.finish();
        }
        if draft.is_being_cloned() {
            return draft.finish();
        }
        draft.follow_modes();
        draft.salvage();
        // What is in use on two nodes grows afterwards.
        if !draft.migrates() {
            draft.resize();
        }
        draft.fill_up();
        draft.thin_out();
        draft.attach_or_detach();
        if !draft.migrates() {
            draft.follow_image();
        }
        draft.limit_snapshots();
        draft.judge();
        // Whatever is lacking is rebuilt while replicas move, too.
        if !draft.evict_at_rest() {
            draft.rebuild_at_rest();
        }
    }
    draft.finish()
}
