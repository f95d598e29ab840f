//! A volume made of another one: one replica is copied beside a replica of the source, from a snapshot, and the others are
//! filled from it when the volume is attached, as any new replica is.
//!
//! The copy is the replica process' own work, done before it serves for the first time: it runs while the volume is
//! `creating`, and ends when it answers. A source without a snapshot is given one for that time.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::draft::Draft;
use super::{Action, READY};
use crate::api::{
    CloneOrigin, Conditions, DesireState, InstanceState, Replica, Snapshot, SnapshotSpec, Volume, VolumeState,
};
use crate::plan::replica::holds_everything;
use crate::plan::served::tells_epochs;
use crate::plan::snapshot::FOR_CLONE;
use crate::schedule::{Locality, Want, place};

/// What `status.cloneStatus.state` says while it is copied; Longhorn's word.
const INITIATED: &str = "initiated";

/// What `status.cloneStatus.state` says once the volume holds everything; Longhorn's word.
pub const CLONED: &str = "completed";

/// The condition that says what a clone waits for.
pub const CLONING: &str = "Cloned";

/// The condition's reason where what it is to be copied from is not there.
pub const SOURCE_MISSING: &str = "SourceMissing";

/// The condition's reason where the source has grown beyond the clone before anything was copied. A copy is as large as the source by
/// then, whenever the snapshot was taken: its tail would be no volume's, and missing in backups.
pub const SOURCE_LARGER: &str = "SourceLarger";

/// The condition's reason where Longhorn began to copy and did not end it.
pub const CLONE_UNFINISHED: &str = "CloneUnfinished";

/// What `status.cloneStatus.state` says between Longhorn's attempts; nobody else writes it.
const FAILED: &str = "failed";

/// How often a clone is looked at: nobody tells of the source's replicas and snapshots.
const LOOK: Duration = Duration::from_millis(500);

/// How long a copy that failed is left alone; longer every time.
const RETRY: Duration = Duration::from_secs(5);

/// Longest time between two attempts.
const LONGEST_RETRY: Duration = Duration::from_secs(300);

/// What a volume is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source<'a> {
    /// The volume.
    pub volume: &'a str,
    /// Its snapshot; `None`: as it is now.
    pub snapshot: Option<&'a str>,
}

impl<'a> Source<'a> {
    /// Reads `vol://VOLUME` or `snap://VOLUME/SNAPSHOT`.
    pub fn parse(text: &'a str) -> Option<Self> {
        let plain = |part: &&str| !part.is_empty() && !part.contains('/');
        if let Some(volume) = text.strip_prefix("vol://").filter(plain) {
            return Some(Self { volume, snapshot: None });
        }
        let (volume, snapshot) = text.strip_prefix("snap://")?.split_once('/')?;
        (plain(&volume) && plain(&snapshot)).then_some(Self { volume, snapshot: Some(snapshot) })
    }

    /// The snapshot that the volume `clone` is copied from.
    pub fn snapshot_name(&self, clone: &str) -> String {
        self.snapshot.map_or_else(|| format!("clone-{clone}"), str::to_owned)
    }
}

/// What a volume is cloned from, as it is now.
#[derive(Clone, Debug)]
pub struct CloneSource<'a> {
    /// The volume; `None`: there is none.
    pub volume: Option<&'a Volume>,
    /// The snapshot; `None`: there is none.
    pub snapshot: Option<&'a Snapshot>,
    /// The volume's replicas.
    pub replicas: Vec<&'a Replica>,
}

impl Draft<'_> {
    /// Brings a clone forward. False: there is nothing to clone, or it was done.
    pub(super) fn is_being_cloned(&mut self) -> bool {
        let data_source = self.o.volume.spec.data_source.clone();
        let Some(source) = Source::parse(&data_source) else { return false };
        if self.status.clone_status.state == CLONED {
            return false;
        }
        self.status.state = VolumeState::Creating;
        if self.is_left_unfinished() {
            self.refuse_unfinished(&data_source);
            return true;
        }
        let clone = &mut self.status.clone_status;
        INITIATED.clone_into(&mut clone.state);
        source.volume.clone_into(&mut clone.source_volume);
        clone.snapshot = source.snapshot_name(&self.name);
        let waits = match self.replicas.keys().next().cloned() {
            // It was there before; only that was not written yet, or is not any more.
            _ if self.replicas.values().any(|r| !r.healthy_at.is_empty()) => None,
            Some(replica) => self.follow_copy(&replica, source),
            None => self.begin_copy(source),
        };
        let now = self.now.clone();
        match waits {
            None => {
                CLONED.clone_into(&mut self.status.clone_status.state);
                self.status.conditions.retain(|c| c.kind != CLONING);
                self.tell(false, "Cloned", format!("the volume holds what {data_source} held"));
                if source.snapshot.is_none() {
                    self.actions.push(Action::DeleteSourceSnapshot(source.snapshot_name(&self.name)));
                }
                false
            }
            Some((reason, message)) => {
                self.status.conditions.set_condition(CLONING, false, reason, &message, &now);
                self.look_again(LOOK);
                true
            }
        }
    }

    /// True for a clone that Longhorn has begun, as its state says, and not ended: it calls its replicas healthy before it copies anything.
    /// Where nothing tells what a replica holds, that it is called healthy does; here a copy is, and its volume has said that it is made.
    fn is_left_unfinished(&self) -> bool {
        let status = &self.status;
        let was_begun_here =
            status.conditions.get_condition(CLONING).is_some_and(|c| c.reason != CLONE_UNFINISHED);
        let is_longhorns = match status.clone_status.state.as_str() {
            INITIATED => !was_begun_here,
            FAILED => true,
            _ => false,
        };
        let was_served = status.epoch.is_some()
            || status.generation.is_some()
            || self.o.replicas.iter().copied().any(tells_epochs);
        let is_copied_here = || self.replicas.values().any(|r| r.clone_from != CloneOrigin::default());
        is_longhorns && !was_served && !self.replicas.is_empty() && !is_copied_here()
    }

    /// Keeps such a clone from everybody: its state stays, which is all that tells it from a whole one.
    fn refuse_unfinished(&mut self, data_source: &str) {
        for engine in [&mut self.engine, &mut self.second].into_iter().flatten() {
            engine.desire_state = DesireState::Stopped;
        }
        self.replicas.values_mut().for_each(|replica| replica.desire_state = DesireState::Stopped);
        let message = format!(
            "Longhorn began to copy {data_source} into this volume and did not finish: it is not whole, and is not attached; delete it, \
             by its claim where it has one, and clone again"
        );
        let before = self.status.conditions.get_condition(CLONING);
        if before.is_none_or(|c| c.reason != CLONE_UNFINISHED) {
            self.tell(true, CLONE_UNFINISHED, message.clone());
        }
        let now = self.now.clone();
        // Whoever waits to have it attached hears of the second one.
        for kind in [CLONING, READY] {
            self.status.conditions.set_condition(kind, false, CLONE_UNFINISHED, &message, &now);
        }
    }

    /// Lets go of what was taken for a clone that will not be.
    pub(super) fn forget_source(&mut self) {
        let snapshot = self
            .o
            .source
            .as_ref()
            .and_then(|s| s.snapshot)
            .filter(|s| s.metadata.labels.as_ref().is_some_and(|l| l.get(FOR_CLONE) == Some(&self.name)));
        if let Some(name) = snapshot.and_then(|s| s.metadata.name.clone()) {
            self.actions.push(Action::DeleteSourceSnapshot(name));
        }
    }

    /// Makes the first replica beside one that holds the snapshot. Gives back what is waited for.
    fn begin_copy(&mut self, source: Source<'_>) -> Option<(&'static str, String)> {
        let name = source.snapshot_name(&self.name);
        let next = &self.status.clone_status.next_allowed_attempt_at;
        // A wrong clock wrote it, if it is further away than any is.
        let left = next.parse().ok().map(|next: Timestamp| next.duration_since(self.o.now).as_secs());
        if left.is_some_and(|left| (1..=LONGEST_RETRY.as_secs().cast_signed()).contains(&left)) {
            return Some(("Waiting", "the last copy failed; the next attempt is due later".to_owned()));
        }
        let found = self.o.source.as_ref();
        let Some(volume) = found.and_then(|s| s.volume) else {
            return Some((SOURCE_MISSING, format!("volume {} does not exist", source.volume)));
        };
        let (size, needed) = (self.o.volume.spec.size, volume.spec.size);
        if size < needed {
            let message = format!(
                "volume {} has {needed} bytes, and a clone of it has as many at least: this one has {size}",
                source.volume
            );
            return Some((SOURCE_LARGER, message));
        }
        let Some(snapshot) = found.and_then(|s| s.snapshot) else {
            if source.snapshot.is_some() {
                return Some((SOURCE_MISSING, format!("snapshot {name} does not exist")));
            }
            let spec = SnapshotSpec {
                volume: source.volume.to_owned(),
                create_snapshot: true,
                ..SnapshotSpec::default()
            };
            self.actions.push(Action::CreateSourceSnapshot(name, Box::new(spec)));
            return Some(("Snapshot", "a snapshot of the source is taken".to_owned()));
        };
        if snapshot.metadata.deletion_timestamp.is_some() {
            return Some(match source.snapshot {
                Some(_) => (SOURCE_MISSING, format!("snapshot {name} is being deleted")),
                // Taken for a clone of this name that was deleted: it holds what the source was then.
                None => ("Snapshot", format!("snapshot {name}, which was taken before, is being deleted")),
            });
        }
        if snapshot.spec.volume != source.volume {
            return Some((SOURCE_MISSING, format!("snapshot {name} is of volume {}", snapshot.spec.volume)));
        }
        if !snapshot.status.as_ref().is_some_and(|s| s.ready_to_use) {
            let why = snapshot.status.as_ref().map(|s| s.error.as_str()).filter(|why| !why.is_empty());
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            return Some(("Snapshot", format!("snapshot {name} is not ready to use yet{why}")));
        }
        let holds =
            |r: &&&Replica| holds_everything(r, Some(volume)) && self.o.nodes_up.contains(&r.spec.node_id);
        let holders: Vec<&Replica> =
            found.map(|s| s.replicas.iter().filter(holds).copied().collect()).unwrap_or_default();
        if holders.is_empty() {
            return Some(("SourceAway", format!("no replica of volume {} can be read", source.volume)));
        }
        let fill = volume.status.as_ref().and_then(|s| u64::try_from(s.actual_size).ok()).unwrap_or_default();
        for holder in &holders {
            let want = Want { locality: Locality::Only(holder.spec.node_id.clone()), ..self.want(fill) };
            if let Ok(at) = place(self.o.cluster, &want, &[]) {
                let directory =
                    format!("{}/replicas/{}", holder.spec.disk_path, holder.spec.data_directory_name);
                self.add_copy(&at, CloneOrigin { directory, snapshot: name });
                return Some(("Copying", format!("it is copied on node {}", at.node)));
            }
        }
        Some(("NoRoom", self.no_room_beside(&holders, fill)))
    }

    /// Why none of the nodes takes a replica that have one to copy from. What the others have against it does not matter.
    fn no_room_beside(&self, holders: &[&Replica], fill: u64) -> String {
        let nodes: BTreeSet<&str> = holders.iter().map(|holder| holder.spec.node_id.as_str()).collect();
        let mut beside = self.o.cluster.clone();
        beside.nodes.retain(|node, _| nodes.contains(node.as_str()));
        let want = Want { locality: Locality::Anywhere, ..self.want(fill) };
        let why = place(&beside, &want, &[]).err().map(|why| why.to_string()).unwrap_or_default();
        let nodes = nodes.into_iter().collect::<Vec<_>>().join(", ");
        format!(
            "a clone begins on a node where its source has a replica that counts, and only there ({nodes}): {why}"
        )
    }

    /// True for a node that is silent for no longer than a failed replica is waited for.
    fn may_be_back(&self, node: &str) -> bool {
        let wait = self.o.settings.replenishment_wait();
        let since = self.o.cluster.nodes.get(node).and_then(|n| n.silent_since);
        let silent = since.and_then(|since| Duration::try_from(self.o.now.duration_since(since)).ok());
        !self.is_gone(node) && silent.is_none_or(|silent| silent < wait)
    }

    /// Waits for the copy. Gives back what is waited for; `None`: it is there.
    fn follow_copy(&mut self, name: &str, source: Source<'_>) -> Option<(&'static str, String)> {
        let state = self.replica_state(name);
        let now = self.now.clone();
        let is_waited_for = self.replicas.get(name).is_some_and(|spec| self.may_be_back(&spec.node_id));
        let spec = self.replicas.get_mut(name)?;
        if spec.clone_from == CloneOrigin::default() {
            // An API server with definitions that lack the field drops it, and an empty directory would serve as the clone.
            spec.desire_state = DesireState::Stopped;
            let message = format!(
                "the API server did not keep spec.cloneFrom of replica {name}: kubectl apply --server-side -f deploy/crds.yaml, then delete the volume"
            );
            return Some(("OldDefinitions", message));
        }
        // Its process goes on without its node's manager, and what it has copied may be hours of work.
        if state == InstanceState::Unknown && is_waited_for {
            spec.desire_state = DesireState::Running;
            let message =
                format!("it is copied on node {}, which does not answer: it is waited for", spec.node_id);
            return Some(("Copying", message));
        }
        match state {
            InstanceState::Running => {
                spec.clone_from = CloneOrigin::default();
                spec.healthy_at.clone_from(&now);
                spec.last_healthy_at = now;
                None
            }
            InstanceState::Error | InstanceState::Unknown => {
                let why = self.replica(name).and_then(|r| r.status.as_ref());
                let why =
                    why.and_then(|s| s.conditions.iter().find(|c| !c.is_true())).map(|c| c.message.clone());
                let why = why.unwrap_or_else(|| "its node does not answer".to_owned());
                self.replicas.remove(name);
                self.actions.push(Action::DeleteReplica(name.to_owned()));
                let clone = &mut self.status.clone_status;
                clone.attempt_count += 1;
                let attempts = u32::try_from(clone.attempt_count).unwrap_or(u32::MAX);
                let wait = RETRY.saturating_mul(attempts).min(LONGEST_RETRY);
                clone.next_allowed_attempt_at = crate::plan::written(self.o.now + wait);
                let message = format!("copying {} failed: {why}", source.volume);
                self.tell(true, "CloneFailed", message.clone());
                Some(("CopyFailed", message))
            }
            _ => {
                spec.desire_state = DesireState::Running;
                Some(("Copying", format!("it is copied on node {}", spec.node_id)))
            }
        }
    }
}

#[cfg(test)]
mod tests;
