//! Filling a volume from a snapshot of another one: what its engine is asked, and how it is told.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::progress::{COMPLETE, ERROR, IN_PROGRESS, percent};
use crate::proto::{ptypes, volume};

/// What a volume is to be filled from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneSource {
    /// The control socket of the other volume's engine.
    pub engine: PathBuf,
    /// Name of the other volume; empty: whatever it is.
    pub volume: String,
    /// Name of its engine; empty: whatever it is.
    pub instance: String,
    /// Name of the snapshot.
    pub snapshot: String,
}

/// How far a clone is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloneProgress {
    /// It has not ended.
    pub running: bool,
    /// Bytes of the volume passed.
    pub done: u64,
    /// Bytes of the volume.
    pub total: u64,
    /// Why it ended before it was through; empty if it did not.
    pub error: String,
    /// Address of the replica that is read.
    pub from_replica: String,
    /// Name of the snapshot.
    pub snapshot: String,
}

impl From<Option<CloneProgress>> for volume::CloneState {
    fn from(progress: Option<CloneProgress>) -> Self {
        let known = progress.is_some();
        let CloneProgress { running, done, total, error, from_replica, snapshot } =
            progress.unwrap_or_default();
        Self { known, running, done, total, error, from_replica, snapshot }
    }
}

/// As Longhorn tells it: by the addresses of the replicas that are filled. One clone fills them all.
pub fn clone_statuses(
    list: &ptypes::ReplicaListReply,
    state: &volume::CloneState,
) -> HashMap<String, ptypes::SnapshotCloneStatusResponse> {
    let word = match (state.known, state.running, state.error.is_empty()) {
        (false, ..) => "",
        (true, true, _) => IN_PROGRESS,
        (true, false, true) => COMPLETE,
        (true, false, false) => ERROR,
    };
    let status = ptypes::SnapshotCloneStatusResponse {
        is_cloning: state.running,
        error: state.error.clone(),
        progress: percent(state.done, state.total),
        state: word.to_owned(),
        from_replica_address: state.from_replica.clone(),
        snapshot_name: state.snapshot.clone(),
    };
    let members = list.replicas.iter().filter(|r| r.mode() == ptypes::ReplicaMode::Rw);
    members.filter_map(|r| Some((r.address.as_ref()?.address.clone(), status.clone()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_clone_is_told_of_every_replica_that_it_fills() {
        let replica = |name: &str, mode: ptypes::ReplicaMode| ptypes::ControllerReplica {
            address: Some(ptypes::ReplicaAddress { address: name.into(), ..Default::default() }),
            mode: mode.into(),
            ..Default::default()
        };
        let replicas = vec![replica("a", ptypes::ReplicaMode::Rw), replica("b", ptypes::ReplicaMode::Err)];
        let list = ptypes::ReplicaListReply { replicas };
        let told = |progress: Option<CloneProgress>| {
            let all = clone_statuses(&list, &progress.into());
            assert_eq!(all.len(), 1);
            let status = all["a"].clone();
            (status.state, status.progress, status.is_cloning)
        };
        assert_eq!(told(None), (String::new(), 0, false));
        let running = CloneProgress { running: true, done: 1, total: 4, ..CloneProgress::default() };
        assert_eq!(told(Some(running.clone())), (IN_PROGRESS.into(), 25, true));
        let failed = CloneProgress { running: false, error: "gone".into(), ..running.clone() };
        assert_eq!(told(Some(failed)), (ERROR.into(), 25, false));
        let done = CloneProgress { running: false, done: 4, ..running };
        assert_eq!(told(Some(done)), (COMPLETE.into(), 100, false));
    }
}
