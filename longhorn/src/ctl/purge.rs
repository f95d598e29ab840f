//! `snapshot purge`: removed snapshots are folded away.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::VolumeRecord;
use control::proto::volume::ReplicaPurge;
use serde::Serialize;

use super::args::Output;
use super::engine::with_engine;
use super::output::print_json;
use super::{Context, members, room};
use crate::progress::Progress;
use crate::tell::tell;

/// The system's words for a full disk (`ENOSPC`).
const NO_SPACE: &str = "No space left on device";

/// Between two looks.
const LOOK: Duration = Duration::from_millis(200);

/// How a replica fared, as `snapshot purge -o json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct PurgeView {
    /// The replica.
    pub(super) replica: String,
    /// Why something was left, one sentence; empty if nothing was.
    pub(super) error: String,
    /// Removed snapshots that stay for now.
    pub(super) kept: Vec<KeptView>,
}

/// A removed snapshot that stays for now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct KeptView {
    /// Its name.
    pub(super) name: String,
    /// Why, one sentence.
    pub(super) reason: String,
}

impl From<ReplicaPurge> for PurgeView {
    fn from(purge: ReplicaPurge) -> Self {
        let ReplicaPurge { replica, error, kept, .. } = purge;
        let kept = kept.into_iter().map(|k| KeptView { name: k.snapshot, reason: k.reason }).collect();
        Self { replica, error, kept }
    }
}

pub(super) async fn run(context: &Context, volume: &str) -> Result<()> {
    let root = &context.root;
    let ended = with_engine(context, volume, async |record, _| {
        let mut engine = members::connect(root, &record.name).await?;
        let begun = engine.snapshot_purge(()).await;
        begun.with_context(|| format!("nothing of volume {volume} is folded"))?;
        let progress = Progress::of_bytes("folding");
        loop {
            let status = engine.snapshot_purge_status(()).await?.into_inner();
            if status.replicas.iter().all(|r| !r.running) {
                return Ok(status.replicas);
            }
            let sum = |of: fn(&ReplicaPurge) -> u64| status.replicas.iter().map(of).sum();
            progress.at(sum(|r| r.done), sum(|r| r.total));
            tokio::time::sleep(LOOK).await;
        }
    });
    let views: Vec<PurgeView> = ended.await?.into_iter().map(PurgeView::from).collect();
    if context.output == Output::Json {
        print_json(&views)?;
    }
    let left: Vec<String> =
        views.iter().filter(|v| !v.error.is_empty()).map(|v| format!("{}: {}", v.replica, v.error)).collect();
    if !left.is_empty() {
        let next = space_for(&VolumeRecord::load(root, volume)?, &views);
        bail!("not everything of volume {volume} was folded: {}{next}", left.join("; "));
    }
    if context.output == Output::Table {
        show(volume, &views);
    }
    Ok(())
}

/// What can be done where a replica's disk had no room for what is folded: where the file system does not share blocks they are there
/// twice for a moment.
fn space_for(record: &VolumeRecord, views: &[PurgeView]) -> String {
    let is_full = |view: &&PurgeView| view.error.contains(NO_SPACE);
    let full = views.iter().find(is_full).and_then(|view| record.replica(&view.replica));
    full.map_or_else(String::new, |replica| {
        format!(
            ". What is folded is copied before its space comes back, and the disk of {} has no room for that: {}, then `longhornctl \
             snapshot purge {}` again",
            replica.directory.display(),
            room::more_space(&record.name),
            record.name
        )
    })
}

/// Replicas fold each on its own, and keep the same.
fn show(volume: &str, views: &[PurgeView]) {
    let kept: BTreeMap<&str, &str> =
        views.iter().flat_map(|v| &v.kept).map(|k| (k.name.as_str(), k.reason.as_str())).collect();
    if kept.is_empty() {
        tell!("{volume} holds no removed snapshot any more");
    }
    for (name, reason) in kept {
        tell!("{name} is removed and kept: {reason}");
    }
}
