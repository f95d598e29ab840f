//! What Longhorn's engine command line prints: JSON indented by tabs, and columns as Go's tabwriter aligns them.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use anyhow::Result;
use control::chain::{HEAD, Layer};
use control::proto::{ptypes, volume};
use serde::Serialize;

use crate::sentence::sentence;

/// `info`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Info {
    name: String,
    size: i64,
    replica_count: i32,
    endpoint: String,
    frontend: String,
    frontend_state: String,
    is_expanding: bool,
    last_expansion_error: String,
    last_expansion_failed_at: String,
    unmap_mark_snap_chain_removed: bool,
    snapshot_max_count: i32,
    // Longhorn's spelling.
    #[serde(rename = "SnapshotMaxSize")]
    snapshot_max_size: i64,
    /// Ours: what it waits for, while it does.
    #[serde(skip_serializing_if = "String::is_empty")]
    waiting_for: String,
}

impl From<ptypes::Volume> for Info {
    fn from(v: ptypes::Volume) -> Self {
        Self {
            name: v.name,
            size: v.size,
            replica_count: v.replica_count,
            endpoint: v.endpoint,
            frontend: v.frontend,
            frontend_state: v.frontend_state,
            is_expanding: v.is_expanding,
            last_expansion_error: v.last_expansion_error,
            last_expansion_failed_at: v.last_expansion_failed_at,
            unmap_mark_snap_chain_removed: v.unmap_mark_snap_chain_removed,
            snapshot_max_count: v.snapshot_max_count,
            snapshot_max_size: v.snapshot_max_size,
            waiting_for: v.waiting_for,
        }
    }
}

/// One entry of `snapshot info`. Longhorn calls the head `volume-head`, and takes prefix and suffix off the others.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Snapshot {
    pub(super) name: String,
    parent: String,
    children: BTreeMap<String, bool>,
    removed: bool,
    usercreated: bool,
    created: String,
    size: String,
    labels: BTreeMap<String, String>,
}

/// Longhorn's name of a layer: the head's is empty here.
fn shown(name: &str) -> String {
    if name.is_empty() { HEAD.to_owned() } else { name.to_owned() }
}

/// All snapshots and the head, by name.
pub(super) fn snapshots(layers: &[Layer]) -> BTreeMap<String, Snapshot> {
    let children = |of: &Layer| {
        let stand_on = layers.iter().filter(|l| !of.name.is_empty() && l.parent == of.name);
        stand_on.map(|l| (shown(&l.name), true)).collect()
    };
    let snapshot = |layer: &Layer| Snapshot {
        name: shown(&layer.name),
        parent: layer.parent.clone(),
        children: children(layer),
        removed: layer.removed,
        usercreated: layer.user_created,
        created: layer.created.clone(),
        size: layer.allocated.to_string(),
        labels: layer.labels.clone(),
    };
    layers.iter().map(|layer| (shown(&layer.name), snapshot(layer))).collect()
}

/// What `snapshot ls` lists: the snapshots below the head, the newest first. Removed ones and those of other branches are
/// left out.
pub(super) fn listed(layers: &[Layer]) -> Vec<String> {
    let mut names = Vec::new();
    let mut at = layers.last();
    for _ in layers {
        let Some(layer) = at else { break };
        if !layer.name.is_empty() && !layer.removed {
            names.push(layer.name.clone());
        }
        at = layers.iter().find(|l| !l.name.is_empty() && l.name == layer.parent);
    }
    names
}

/// `snapshot purge-status`, by address.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Purge {
    error: String,
    is_purging: bool,
    progress: u64,
    state: &'static str,
}

/// By address, of every replica that takes writes. One that has nothing to fold is through.
pub(super) fn purges(
    replicas: &[ptypes::ControllerReplica],
    status: &volume::PurgeStatus,
) -> BTreeMap<String, Purge> {
    let nothing = volume::ReplicaPurge::default();
    let purge = |r: &volume::ReplicaPurge| Purge {
        error: r.error.clone(),
        is_purging: r.running,
        progress: r.done.saturating_mul(100).checked_div(r.total).unwrap_or(100).min(100),
        state: match (r.running, r.error.is_empty()) {
            (true, _) => "in_progress",
            (false, true) => "complete",
            (false, false) => "error",
        },
    };
    let members = replicas.iter().filter(|r| r.mode() != ptypes::ReplicaMode::Err);
    let addresses = members.filter_map(|r| r.address.clone());
    addresses
        .map(|a| {
            let own = status.replicas.iter().find(|r| r.replica == a.instance_name);
            (a.address, purge(own.unwrap_or(&nothing)))
        })
        .collect()
}

/// `snapshot hash-status`, by address.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Hash {
    state: String,
    checksum: String,
    error: String,
    silently_corrupted: bool,
}

impl From<Result<ptypes::SnapshotHashStatusResponse>> for Hash {
    fn from(answer: Result<ptypes::SnapshotHashStatusResponse>) -> Self {
        match answer {
            Ok(s) => Self {
                state: s.state,
                checksum: s.checksum,
                error: s.error,
                silently_corrupted: s.silently_corrupted,
            },
            Err(e) => Self {
                state: "error".to_owned(),
                checksum: String::new(),
                error: sentence(&e),
                silently_corrupted: false,
            },
        }
    }
}

/// `snapshot clone-status`, by address.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Clone {
    is_cloning: bool,
    error: String,
    progress: i32,
    state: String,
    from_replica_address: String,
    snapshot_name: String,
}

/// By address.
pub(super) fn clones(
    statuses: &HashMap<String, ptypes::SnapshotCloneStatusResponse>,
) -> BTreeMap<&str, Clone> {
    let clone = |s: &ptypes::SnapshotCloneStatusResponse| Clone {
        is_cloning: s.is_cloning,
        error: s.error.clone(),
        progress: s.progress,
        state: s.state.clone(),
        from_replica_address: s.from_replica_address.clone(),
        snapshot_name: s.snapshot_name.clone(),
    };
    statuses.iter().map(|(address, status)| (address.as_str(), clone(status))).collect()
}

/// `replica-rebuild-status`, by address.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Rebuild {
    is_rebuilding: bool,
    error: String,
    progress: i32,
    state: &'static str,
    // What a rebuild copies comes from any of the others.
    from_replica_address: &'static str,
}

/// By address.
pub(super) fn rebuilds(replicas: &[ptypes::ControllerReplica]) -> BTreeMap<String, Rebuild> {
    let rebuild = |r: &ptypes::ControllerReplica| {
        let (is_rebuilding, error, progress, state) = match r.mode() {
            ptypes::ReplicaMode::Rw => (false, String::new(), 100, "complete"),
            ptypes::ReplicaMode::Wo => (true, String::new(), r.rebuild_progress, "in_progress"),
            ptypes::ReplicaMode::Err => (false, r.reason.clone(), 0, "error"),
        };
        Rebuild { is_rebuilding, error, progress, state, from_replica_address: "" }
    };
    replicas.iter().filter_map(|r| Some((r.address.clone()?.address, rebuild(r)))).collect()
}

/// One side of `version`.
#[derive(Serialize)]
pub(super) struct Version {
    version: String,
    #[serde(rename = "gitCommit")]
    git_commit: String,
    #[serde(rename = "buildDate")]
    build_date: String,
    #[serde(rename = "cliAPIVersion")]
    cli_api: i64,
    #[serde(rename = "cliAPIMinVersion")]
    cli_api_min: i64,
    #[serde(rename = "controllerAPIVersion")]
    controller_api: i64,
    #[serde(rename = "controllerAPIMinVersion")]
    controller_api_min: i64,
    #[serde(rename = "dataFormatVersion")]
    data_format: i64,
    #[serde(rename = "dataFormatMinVersion")]
    data_format_min: i64,
}

impl From<&ptypes::VersionOutput> for Version {
    fn from(v: &ptypes::VersionOutput) -> Self {
        Self {
            version: v.version.clone(),
            git_commit: v.git_commit.clone(),
            build_date: v.build_date.clone(),
            cli_api: v.cli_api_version,
            cli_api_min: v.cli_api_min_version,
            controller_api: v.controller_api_version,
            controller_api_min: v.controller_api_min_version,
            data_format: v.data_format_version,
            data_format_min: v.data_format_min_version,
        }
    }
}

/// `version`.
#[derive(Serialize)]
pub(super) struct Versions {
    #[serde(rename = "clientVersion")]
    pub(super) client: Version,
    #[serde(rename = "serverVersion")]
    pub(super) server: Option<Version>,
}

/// This program's own.
pub(super) fn client_version() -> Version {
    Version::from(&control::engine::version())
}

/// A list as Go prints one.
pub(super) fn go_list(items: &[String]) -> String {
    format!("[{}]", items.join(" "))
}

pub(super) fn print_line(text: &str) -> Result<()> {
    written(writeln!(std::io::stdout(), "{text}"))
}

/// Whoever read the output has seen enough.
fn written(printed: std::io::Result<()>) -> Result<()> {
    match printed {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

pub(super) fn print_json(value: &impl Serialize) -> Result<()> {
    let mut bytes = Vec::new();
    let indented = serde_json::ser::PrettyFormatter::with_indent(b"\t");
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, indented))?;
    bytes.push(b'\n');
    written(std::io::stdout().write_all(&bytes))
}

pub(super) fn print_columns<const N: usize>(names: &[&str; N], rows: &[[String; N]]) -> Result<()> {
    written(std::io::stdout().write_all(columns(names, rows).as_bytes()))
}

/// Columns as wide as their widest cell and a space, the last as it is.
fn columns<const N: usize>(names: &[&str; N], rows: &[[String; N]]) -> String {
    let head = names.map(str::to_owned);
    let all: Vec<&[String; N]> = std::iter::once(&head).chain(rows).collect();
    let width = |column: usize| all.iter().map(|row| row[column].len() + 1).max().unwrap_or(0);
    let mut text = String::new();
    for row in &all {
        for (column, cell) in row.iter().enumerate() {
            let last = column + 1 == N;
            text.push_str(&if last { cell.clone() } else { format!("{cell:0$}", width(column)) });
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_goes_away_is_no_error_and_a_full_disk_is_one() {
        let failed = |kind: std::io::ErrorKind| written(Err(kind.into()));
        assert!(failed(std::io::ErrorKind::BrokenPipe).is_ok());
        assert!(failed(std::io::ErrorKind::StorageFull).is_err());
    }

    #[test]
    fn columns_are_aligned_as_longhorn_prints_them() {
        let rows = [
            ["unix:/r/1.sock".to_owned(), "RW".into(), go_list(&["volume-head-000.img".into(), "x".into()])],
            ["unix:/r/22.sock".to_owned(), "ERR".into(), String::new()],
        ];
        assert_eq!(
            columns(&["ADDRESS", "MODE", "CHAIN"], &rows),
            "ADDRESS         MODE CHAIN\n\
             unix:/r/1.sock  RW   [volume-head-000.img x]\n\
             unix:/r/22.sock ERR  \n"
        );
    }

    fn layer(name: &str, parent: &str, removed: bool) -> Layer {
        Layer { name: name.into(), parent: parent.into(), removed, ..Layer::default() }
    }

    #[test]
    fn the_head_has_longhorns_name_and_is_not_listed() {
        let layers =
            [layer("b", "", false), layer("a", "b", true), layer("c", "a", false), layer("", "c", false)];
        let found = snapshots(&layers);
        assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), ["a", "b", "c", "volume-head"]);
        assert_eq!(found["volume-head"].parent, "c");
        assert_eq!(found["c"].children, BTreeMap::from([("volume-head".to_owned(), true)]));
        assert!(found["volume-head"].children.is_empty());
        assert_eq!(listed(&layers), ["c", "b"]);
    }

    #[test]
    fn snapshots_of_other_branches_are_not_listed() {
        let layers =
            [layer("a", "", false), layer("b", "a", false), layer("c", "a", false), layer("", "c", false)];
        assert_eq!(listed(&layers), ["c", "a"]);
        assert_eq!(snapshots(&layers)["a"].children.len(), 2);
        // What no process ever wrote: a ring.
        assert_eq!(listed(&[layer("a", "a", false), layer("", "a", false)]), ["a"]);
    }

    #[test]
    fn a_purge_is_told_of_each_replica_by_its_address() {
        use ptypes::ReplicaMode::{Err, Rw, Wo};
        let replica = |name: &str, mode: ptypes::ReplicaMode| ptypes::ControllerReplica {
            address: Some(ptypes::ReplicaAddress {
                address: format!("unix:/{name}"),
                instance_name: name.into(),
            }),
            mode: mode.into(),
            ..Default::default()
        };
        let status = volume::PurgeStatus {
            replicas: vec![volume::ReplicaPurge {
                replica: "r1".into(),
                running: true,
                done: 1,
                total: 4,
                ..Default::default()
            }],
        };
        let told = purges(&[replica("r1", Rw), replica("r2", Wo), replica("r3", Err)], &status);
        let told: Vec<_> =
            told.iter().map(|(a, p)| (a.as_str(), p.is_purging, p.progress, p.state)).collect();
        assert_eq!(told, [("unix:/r1", true, 25, "in_progress"), ("unix:/r2", false, 100, "complete")]);
    }
}
