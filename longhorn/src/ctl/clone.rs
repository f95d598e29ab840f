//! `clone`: a new volume with the bytes of another one, or of one of its snapshots.
//!
//! Every replica of the new volume is a copy of one and the same replica directory; where the file system shares extents
//! it takes what it will differ by.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use control::host::{LiveDirs, Root, VolumeRecord, VolumeState};
use control::proto::ptypes;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use lh_block::format_size;
use replica::store::{CloneOptions, Cloned, Pace, SnapshotView, clone_snapshot};

use super::args::{CloneSource, Output};
use super::engine::reach;
use super::observe::{has_processes, observe};
use super::output::{counted, print_json};
use super::snapshot::{check_known, directory_in_sync, opener};
use super::{Context, delete, interrupt, lock, room};
use crate::daemon::keep_from_others;
use crate::progress::Progress;
use crate::tell::tell;

pub(super) async fn run(context: &Context, source: &CloneSource, new: &str) -> Result<()> {
    let root = &context.root;
    let (_original, original) = lock::volume(root, &source.volume)?;
    if source.volume == new {
        bail!("a clone needs a name of its own: volume {new} is there already");
    }
    let _new = lock::name(root, new)?;
    LiveDirs::default().check_free(new, root)?;
    original.check_ready()?;
    match lock::found(root, new)? {
        None => {}
        // Whoever made it is gone: the lock is ours.
        Some(left) if left.state == VolumeState::Cloning => delete::everything(root, &left)?,
        Some(_) => bail!("there is a volume {new} already: choose another name"),
    }
    // Before a snapshot is taken for nothing.
    room::check(root, original.replicas.len())?;
    keep_from_others();
    let (view, snapshot) = look_at(context, &original, source.snapshot.as_deref()).await?;
    let mut record = like(&original, new, view.size());
    for _ in &original.replicas {
        record.add_replica(root)?;
    }
    // There before its data is: what a broken off clone has taken of the disk belongs to a volume that can be removed.
    record.state = VolumeState::Cloning;
    let held = interrupt::hold();
    record.create(root)?;
    let stop = || {
        if held.has_come() {
            take_back(root, &record);
            held.end();
        }
    };
    let taken = match fill(&view, &record, &snapshot, stop) {
        Ok(taken) => taken,
        Err(e) => {
            take_back(root, &record);
            return Err(if is_full(&e) { no_space(&view, &original.name, &record) } else { e });
        }
    };
    record.state = VolumeState::Ready;
    record.store(root)?;
    interrupt::leaves(format!("volume {new} is there, and whole"));
    held.let_go();
    if context.output == Output::Json {
        return print_json(&observe(root, &record).await?);
    }
    tell!(
        "{new} has the bytes of {}, {}: {} shared, {} copied; longhornctl up {new} starts it",
        source.volume,
        format_size(record.size),
        format_size(taken.shared),
        format_size(taken.copied)
    );
    Ok(())
}

/// The record of a volume with the options of that one, but for where its frontend listens, which one volume has. No replicas.
fn like(original: &VolumeRecord, new: &str, size: u64) -> VolumeRecord {
    let mut record = VolumeRecord::new(new, size);
    (record.block_size, record.quorum) = (original.block_size, original.quorum);
    (record.frontend, record.io_timeout_seconds) = (original.frontend.clone(), original.io_timeout_seconds);
    record.snapshot_max_count = original.snapshot_max_count;
    record.snapshot_max_size = original.snapshot_max_size;
    record.checksum_full = original.checksum_full;
    record
}

/// The bytes to clone, and the snapshot's name. Of a volume that is up and no snapshot: one is taken now.
async fn look_at(
    context: &Context,
    record: &VolumeRecord,
    snapshot: Option<&str>,
) -> Result<(SnapshotView, String)> {
    let (root, volume) = (&context.root, &record.name);
    let is_up = has_processes(root, record)?;
    let name = match snapshot {
        Some(name) => {
            check_known(context, record, name).await?;
            name.to_owned()
        }
        None if !is_up => {
            let directory = directory_in_sync(root, record, &observe(root, record).await?)?;
            return Ok((SnapshotView::open(&directory, None)?, "clone".to_owned()));
        }
        None => {
            let mut engine = ControllerServiceClient::new(reach(root, volume).await?);
            let taken = engine.volume_snapshot(ptypes::VolumeSnapshotRequest::default()).await;
            let taken =
                taken.with_context(|| format!("no snapshot of volume {volume} was taken"))?.into_inner().name;
            tell!(
                "snapshot {taken} of {volume} is taken for this, and stays: `longhornctl snapshot rm {volume} {taken}` removes it"
            );
            taken
        }
    };
    let directory = directory_in_sync(root, record, &observe(root, record).await?)?;
    let view = opener(root, record, &directory)?(&name)?;
    Ok((view, name))
}

/// Fills the new volume's directories. `between` is called again and again meanwhile.
fn fill(view: &SnapshotView, record: &VolumeRecord, snapshot: &str, between: impl Fn()) -> Result<Cloned> {
    let progress = Progress::of_bytes("cloning");
    let options = CloneOptions { snapshot: snapshot.to_owned(), ..CloneOptions::default() };
    let count = record.replicas.len() as u64;
    let mut sum = Cloned::default();
    for (number, replica) in (0..).zip(&record.replicas) {
        make_parent(&replica.directory)?;
        let taken = clone_snapshot(view, &replica.directory, &options, &Pace::new(0), &mut |done, of| {
            between();
            // All of it are the volume's bytes, which each replica gets.
            progress.at((number * of + done) / count, of);
        })?;
        sum.shared += taken.shared;
        sum.copied += taken.copied;
    }
    Ok(sum)
}

fn make_parent(directory: &Path) -> Result<()> {
    let parent = directory.parent().unwrap_or(directory);
    std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())
}

fn is_full(e: &anyhow::Error) -> bool {
    let mut errors = e.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    errors.any(|cause| cause.kind() == std::io::ErrorKind::StorageFull)
}

/// Why there is no clone on a disk that is full, once its beginning was removed again.
fn no_space(view: &SnapshotView, source: &str, new: &VolumeRecord) -> anyhow::Error {
    let place = new.replicas.first().and_then(|r| r.directory.parent()).unwrap_or(Path::new("/"));
    let each: u64 = view.layers().iter().map(|layer| layer.allocated).sum();
    anyhow!(
        "{} does not fit, and nothing of it is left: {} of up to {} each, and the disk of {} has {} free. Free some space and clone \
         again, or take the bytes to another disk: `longhornctl snapshot export {source} NAME FILE`",
        new.name,
        counted(new.replicas.len(), "replica"),
        format_size(each),
        place.display(),
        room::free(place).map_or_else(|_| "too little".to_owned(), format_size)
    )
}

/// Removes what was made of a volume that does not come to exist. What cannot be removed stays a volume that `rm` takes.
fn take_back(root: &Root, record: &VolumeRecord) {
    if let Err(left) = delete::erase_all(root, record) {
        tell!("{left:#}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_has_the_options_of_its_source_and_listens_nowhere() {
        let mut source = VolumeRecord::new("old", 1 << 30);
        (source.block_size, source.quorum) = (4096, lh_block::Quorum::Majority);
        (source.frontend, source.io_timeout_seconds) = ("nbd-server".to_owned(), 7);
        (source.snapshot_max_count, source.snapshot_max_size) = (5, 3 << 30);
        source.checksum_full = true;
        source.listen = Some(([127, 0, 0, 1], 10809).into());
        // Its source may have grown since the snapshot.
        let made = like(&source, "new", 1 << 20);
        (source.name, source.size, source.listen) = ("new".to_owned(), 1 << 20, None);
        assert_eq!(made, source);
    }
}
