//! `snapshot create`, `ls` and `export`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use control::chain::{Layer, layers_of};
use control::host::{Root, VolumeRecord, engine_name};
use control::proto::ptypes;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use control::proto::volume::SnapshotName;
use control::proto::volume::volume_operations_client::VolumeOperationsClient;
use lh_block::{Generation, format_size};
use replica::store::{OpenError, survey};

use super::args::{ImageFormat, Output};
use super::engine::{answer, reach, with_engine};
use super::observe::{Mode, ReplicaView, VolumeView, has_processes, observe};
use super::output::{print, print_json, table, table_text};
use super::replica::write_out;
use super::snapshot_view::{SnapshotView, views};
use super::{Context, device, members, snapshot_tree};
use crate::progress::Progress;
use crate::tell::tell;

/// How long an engine or a replica may take to tell its chain.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// A snapshot to take.
pub(super) struct NewSnapshot {
    pub(super) name: Option<String>,
    pub(super) labels: Vec<(String, String)>,
    pub(super) freeze: bool,
}

pub(super) async fn create(context: &Context, volume: &str, new: NewSnapshot) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let mut engine = ControllerServiceClient::new(reach(&context.root, &record.name).await?);
    let request = ptypes::VolumeSnapshotRequest {
        name: new.name.unwrap_or_default(),
        labels: new.labels.into_iter().collect(),
        freeze_filesystem: new.freeze,
    };
    let asked = request.name.clone();
    let asked_for = engine.volume_snapshot(request);
    let name = match answer(&context.root, volume, &mut Progress::new(), asked_for).await {
        Ok(taken) => taken.into_inner().name,
        Err(refused) if refused.code() == tonic::Code::AlreadyExists => {
            return Err(taken_name(context, &record, &asked).await);
        }
        Err(refused) if refused.code() == tonic::Code::ResourceExhausted => bail!(
            "no snapshot of volume {volume} was taken: {}: `longhornctl snapshot rm {volume} NAME` and `longhornctl snapshot purge \
             {volume}`, or `longhornctl up {volume} --snapshot-max-count N` and `--snapshot-max-size SIZE`",
            refused.message()
        ),
        refused => {
            refused.with_context(|| format!("no snapshot of volume {volume} was taken"))?.into_inner().name
        }
    };
    let printed = match context.output {
        Output::Table => print(&format!("{name}\n")),
        Output::Json => print_snapshot(context, &record, &name).await,
    };
    // Nobody else knows a name that was made up.
    printed.with_context(|| format!("snapshot {name} of volume {volume} was taken"))
}

/// The snapshot as JSON, as the volume lists it.
async fn print_snapshot(context: &Context, record: &VolumeRecord, name: &str) -> Result<()> {
    let made = snapshots(context, record).await?.into_iter().find(|s| s.name == name);
    print_json(&made.context("it is gone again")?)
}

/// Why there is no other snapshot of that name, and what to do.
async fn taken_name(context: &Context, record: &VolumeRecord, name: &str) -> anyhow::Error {
    let volume = &record.name;
    let known = snapshots(context, record).await.unwrap_or_default();
    match known.iter().any(|s| s.name == name && s.removed) {
        true => anyhow!(
            "volume {volume} has a snapshot {name}, which is removed and not yet folded away: `longhornctl snapshot purge {volume}` \
             does that, or choose another name"
        ),
        false => anyhow!("volume {volume} has a snapshot {name} already: choose another name"),
    }
}

/// Refuses a name that none of the volume's snapshots has.
pub(super) async fn check_known(context: &Context, record: &VolumeRecord, name: &str) -> Result<()> {
    if !snapshots(context, record).await?.iter().any(|s| s.name == name) {
        bail!(
            "volume {0} has no snapshot {name}: `longhornctl snapshot ls {0}` lists those that it has",
            record.name
        );
    }
    Ok(())
}

pub(super) async fn list(context: &Context, volume: &str) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let snapshots = snapshots(context, &record).await?;
    match context.output {
        Output::Json => print_json(&snapshots),
        Output::Table => print(&listed(&snapshots)),
    }
}

/// The snapshots as a table that fits 80 columns with the names that are made up: what stands on what is drawn by `tree`,
/// and labels have lines of their own.
fn listed(snapshots: &[SnapshotView]) -> String {
    let mut rows = table(&["NAME", "CREATED", "SIZE", "KIND"]);
    for s in snapshots {
        let kind = match s {
            _ if s.removed => "removed",
            _ if s.user_created => "user",
            _ => "system",
        };
        rows.add_row([&s.name, &s.created, &format_size(s.size), kind]);
    }
    let text = table_text(&rows);
    let mut lines = text.lines();
    let mut listed = lines.next().map(|head| format!("{head}\n")).unwrap_or_default();
    for (line, s) in lines.zip(snapshots) {
        let labels: String = s.labels.iter().map(|(key, value)| format!("  {key}={value}\n")).collect();
        listed += &format!("{line}\n{labels}");
    }
    listed
}

pub(super) async fn tree(context: &Context, volume: &str) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let layers = layers(context, &record).await?;
    let snapshots = views(&layers);
    match context.output {
        Output::Json => print_json(&snapshots),
        Output::Table => {
            let head = layers.iter().find(|layer| layer.name.is_empty());
            print(&snapshot_tree::drawn(&snapshots, head.map(|head| head.parent.as_str())))
        }
    }
}

pub(super) async fn remove(context: &Context, volume: &str, name: &str) -> Result<()> {
    let root = &context.root;
    let removed = with_engine(context, volume, async |record, _| {
        check_known(context, record, name).await?;
        let mut engine = members::connect(root, &record.name).await?;
        let asked = engine.snapshot_remove(SnapshotName { name: name.to_owned() }).await;
        asked.with_context(|| format!("snapshot {name} of volume {volume} stays"))?;
        Ok(snapshots(context, record).await?.into_iter().find(|s| s.name == name))
    });
    let removed = removed.await?;
    if context.output == Output::Json {
        return print_json(&removed);
    }
    tell!("{name} is marked as removed: `longhornctl snapshot purge {volume}` gives its space back");
    Ok(())
}

pub(super) async fn revert(context: &Context, volume: &str, name: &str) -> Result<()> {
    let root = &context.root;
    let done = with_engine(context, volume, async |record, progress| {
        check_known(context, record, name).await?;
        let view = observe(root, record).await?;
        if let Some(device) = &view.device {
            device::check_unused(Path::new(device))?;
        }
        let kept = last_before_head(&snapshots(context, record).await?, name);
        let mut engine = ControllerServiceClient::new(reach(root, volume).await?);
        progress.say("reverting every replica");
        let asked = engine.volume_revert(ptypes::VolumeRevertRequest { name: name.to_owned() }).await;
        asked.with_context(|| format!("volume {volume} is as it was"))?;
        Ok((snapshots(context, record).await?, kept))
    });
    let (snapshots, kept) = done.await?;
    match context.output {
        Output::Json => print_json(&snapshots),
        Output::Table => {
            match kept {
                None => tell!("{volume} has the bytes of {name}; what it had since is gone"),
                Some(last) => tell!(
                    "{volume} has the bytes of {name}; what it had since then up to {last} is kept in its snapshots, and what came after {last} \
                     is gone"
                ),
            }
            Ok(())
        }
    }
}

/// The snapshot that has most of what the volume holds now, if that is a later one than `name`. What is marked as removed may go.
fn last_before_head(snapshots: &[SnapshotView], name: &str) -> Option<String> {
    let find = |name: &str| snapshots.iter().find(|s| s.name == name);
    let mut last = snapshots.iter().find(|s| s.below_head)?;
    while last.removed && last.name != name {
        last = find(&last.parent)?;
    }
    (last.name != name).then(|| last.name.clone())
}

pub(super) async fn export(
    context: &Context,
    volume: &str,
    name: &str,
    format: ImageFormat,
    file: &Path,
) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    check_known(context, &record, name).await?;
    let view = observe(&context.root, &record).await?;
    let directory = directory_in_sync(&context.root, &record, &view)?;
    let open = opener(&context.root, &record, &directory)?;
    write_out(context, &open(name)?, format, file)
}

/// Opens snapshots in the directory of a volume's replica: beside its process, or alone, so that none begins meanwhile.
pub(super) fn opener<'a>(
    root: &Root,
    record: &VolumeRecord,
    directory: &'a Path,
) -> Result<impl Fn(&str) -> Result<replica::store::SnapshotView, OpenError> + use<'a>> {
    use replica::store::SnapshotView;
    let is_up = has_processes(root, record)?;
    Ok(move |name: &str| {
        if !is_up {
            return SnapshotView::open(directory, Some(name));
        }
        let view = SnapshotView::open_beside(directory, name)?;
        // It is asked again when all was read: this saves who would hear it then a long wait.
        view.check_lasting()?;
        Ok(view)
    })
}

/// The volume's snapshots, oldest first.
pub(super) async fn snapshots(context: &Context, record: &VolumeRecord) -> Result<Vec<SnapshotView>> {
    Ok(views(&layers(context, record).await?))
}

/// The volume's snapshots and its head: from its engine if it runs, else from a replica in sync, by its process if that runs,
/// or from its directory.
async fn layers(context: &Context, record: &VolumeRecord) -> Result<Vec<Layer>> {
    if let Some(chain) = ask_engine(&context.root, &record.name).await {
        return Ok(chain);
    }
    let view = observe(&context.root, record).await?;
    for replica in view.replicas.iter().filter(|r| r.mode == Mode::Rw && r.pid.is_some()) {
        if let Some(chain) = ask_replica(&context.root, &replica.name).await {
            return Ok(chain);
        }
    }
    let directory = directory_in_sync(&context.root, record, &view)?;
    if !directory.exists() && record.authority(&context.root).generation()? == Generation::default() {
        // Created by its first start.
        return Ok(Vec::new());
    }
    let offline = replica::store::SnapshotView::open(&directory, None)?;
    Ok(offline.layers().iter().cloned().map(crate::daemon::layer).collect())
}

/// The directory of a replica that holds everything: one that is there, if any is (a disk may not be mounted), and of a volume that is down
/// none that is older than what its replica held then.
pub(super) fn directory_in_sync(root: &Root, record: &VolumeRecord, view: &VolumeView) -> Result<PathBuf> {
    let counts = record.authority(root).epoch()?;
    let is_older = |replica: &ReplicaView| {
        let own = match replica.pid {
            Some(_) => None,
            None => survey(&replica.path).ok().and_then(|held| held.epoch),
        };
        own.zip(counts.as_ref()).is_some_and(|(own, counts)| own.order() < counts.order())
    };
    let in_sync = || view.replicas.iter().filter(|r| r.mode == Mode::Rw);
    if let Some(replica) = in_sync().find(|r| r.path.exists() && !is_older(r)) {
        return Ok(replica.path.clone());
    }
    match (in_sync().find(|r| r.path.exists()), in_sync().next()) {
        (Some(older), _) => bail!(
            "{} is older than what replica {} held when volume {} stopped, and none of the others that were in sync is here: put the right \
             one there",
            older.path.display(),
            older.name,
            view.name
        ),
        (None, Some(away)) => Ok(away.path.clone()),
        (None, None) => {
            bail!("no replica of volume {} is in sync: see `longhornctl status {}`", view.name, view.name)
        }
    }
}

async fn ask_engine(root: &Root, volume: &str) -> Option<Vec<Layer>> {
    let ask = async {
        let channel = control::transport::connect(&root.control_socket(&engine_name(volume))).await.ok()?;
        let chain = VolumeOperationsClient::new(channel).snapshot_list(()).await.ok()?.into_inner();
        Some(chain.layers.into_iter().map(Layer::from).collect())
    };
    tokio::time::timeout(ANSWER_PATIENCE, ask).await.ok().flatten()
}

async fn ask_replica(root: &Root, name: &str) -> Option<Vec<Layer>> {
    let ask = async {
        let channel = control::transport::connect(&root.control_socket(name)).await.ok()?;
        let answer = ReplicaServiceClient::new(channel).replica_get(()).await.ok()?;
        Some(layers_of(&answer.into_inner().replica?))
    };
    tokio::time::timeout(ANSWER_PATIENCE, ask).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_list_of_snapshots_fits_80_columns_with_names_that_were_made_up() {
        let snapshot = |number: u32, removed| SnapshotView {
            name: format!("ac7238fa-124d-4afa-819a-{number:012}"),
            parent: format!("ac7238fa-124d-4afa-819a-{:012}", number - 1),
            children: Vec::new(),
            created: "2026-11-23T10:50:28Z".into(),
            size: (1 << 30) - (1 << 20),
            removed,
            user_created: true,
            labels: BTreeMap::from([
                ("why".into(), "the weekly upgrade".into()),
                ("who".into(), "me".into()),
            ]),
            below_head: false,
        };
        let text = listed(&[snapshot(1, false), snapshot(2, true)]);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        for word in ["ac7238fa-124d-4afa-819a-000000000002 ", "10:50:28Z", "1023 MiB", "removed"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(text.lines().any(|line| line == "  why=the weekly upgrade"), "{text}");
    }
}
