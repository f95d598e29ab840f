//! `release`: a volume's directories become Longhorn's.
//!
//! Which replicas hold everything is decided once and written into the record before the first directory changes. From
//! then on the volume does not start any more, and the command, given again after whatever interrupted it, goes on. At the
//! end the volume is forgotten; its directories stay.

mod directories;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use control::host::{LiveDirs, Quorum, ReplicaRecord, Root, VolumeRecord, VolumeState, engine_name};
use lh_block::{Epoch, format_size};
use replica::store::{Release, survey};
use serde::Serialize;

use super::args::{Output, ReleaseArgs};
use super::observe::has_processes;
use super::output::{print, print_json};
use super::{Context, adopt, delete, interrupt, lock};
use crate::tell::tell;

/// What became of the directories, as `release -o json` prints it.
#[derive(Debug, Default, Serialize)]
struct ReleaseView {
    volume: String,
    /// Longhorn's now.
    released: Vec<PathBuf>,
    /// Left as they are.
    left: Vec<LeftView>,
}

/// A directory that does not hold everything.
#[derive(Debug, Serialize)]
struct LeftView {
    path: PathBuf,
    /// One sentence.
    reason: String,
}

pub(super) fn run(context: &Context, args: &ReleaseArgs) -> Result<()> {
    match &args.volume {
        Some(volume) => release(context, volume),
        None => directories::run(context, &args.directories),
    }
}

fn release(context: &Context, volume: &str) -> Result<()> {
    let root = &context.root;
    let (_lock, mut record) = lock::volume(root, volume)?;
    if record.state != VolumeState::Releasing {
        record.check_ready()?;
    }
    if has_processes(root, &record)? {
        bail!("volume {volume} is up: stop it first with `longhornctl down {volume}`");
    }
    LiveDirs::default().check_free(volume, root)?;
    if record.state == VolumeState::Ready
        && let Some(view) = untouched(root, &record)?
    {
        forget(root, &record)?;
        return show(context, &view);
    }
    if record.state == VolumeState::Ready {
        record.releasing = members(root, &record)?;
        let prepared = prepare(releasing(&record))?;
        // From here on there is only the way forward. One that was refused before is to be up with the host, if it was.
        record.note_down(root)?;
        record.state = VolumeState::Releasing;
        record.store(root)?;
        carry_out(prepared)?;
    } else {
        carry_out(prepare(releasing(&record))?)?;
    }
    let view = view(&record);
    forget(root, &record)?;
    show(context, &view)
}

/// The end of it: there is no such volume any more.
fn forget(root: &Root, record: &VolumeRecord) -> Result<()> {
    let held = interrupt::hold();
    record.note_down(root)?;
    record.remove(root)?;
    delete::leftovers(root, &engine_name(&record.name));
    record.replicas.iter().for_each(|replica| delete::leftovers(root, &replica.name));
    interrupt::leaves(format!("{} is released", record.name));
    held.let_go();
    Ok(())
}

/// What becomes of the directories if every one was imported and the volume never started: nothing in them is this volume's. What
/// another one of ours has left stays as that one has left it.
fn untouched(root: &Root, record: &VolumeRecord) -> Result<Option<ReleaseView>> {
    if record.replicas.is_empty() || record.authority(root).epoch()?.is_some() {
        return Ok(None);
    }
    let mut view = ReleaseView { volume: record.name.clone(), ..ReleaseView::default() };
    for replica in &record.replicas {
        let held = survey(&replica.directory)?;
        let path = replica.directory.clone();
        if held.imported {
            view.released.push(path);
        } else if replica.imported && adopt::is_another_volumes(record, &held) {
            let reason =
                "it is as the volume has left it that wrote it last, and this one never started".to_owned();
            view.left.push(LeftView { path, reason });
        } else {
            return Ok(None);
        }
    }
    Ok(Some(view))
}

/// The replicas that hold everything: members of the epoch that counts, closed cleanly.
fn members(root: &Root, record: &VolumeRecord) -> Result<Vec<String>> {
    let volume = &record.name;
    let Some(epoch) = epoch_that_counts(root, record)? else {
        bail!(
            "volume {volume} was never started: start it and stop it, `longhornctl up {volume}` and `longhornctl down {volume}`, \
             then release it"
        );
    };
    let mut members = Vec::new();
    for replica in record.replicas.iter().filter(|r| epoch.has(&r.name)) {
        let held = survey(&replica.directory)?;
        if held.rebuilding || held.imported || !held.clean || held.epoch.as_ref() != Some(&epoch) {
            bail!(
                "replica {} was not closed cleanly: start the volume and stop it, `longhornctl up {volume}` and \
                 `longhornctl down {volume}`, then release it",
                replica.name
            );
        }
        members.push(replica.name.clone());
    }
    if members.is_empty() {
        bail!("no replica of volume {volume} holds everything: see `longhornctl salvage {volume}`");
    }
    Ok(members)
}

/// `None`: no epoch was ever made. Without an authority the replicas tell it, and who cannot be asked might hold a younger one: with
/// `majority` unless more than half tell theirs.
fn epoch_that_counts(root: &Root, record: &VolumeRecord) -> Result<Option<Epoch>> {
    if record.quorum == Quorum::Any {
        return Ok(record.authority(root).epoch()?);
    }
    let (mut told, mut silent) = (Vec::new(), None);
    for replica in record.counted() {
        match survey(&replica.directory) {
            // One of number 0 is only announced.
            Ok(held) => told.extend(held.epoch.filter(|e| e.counter > 0)),
            Err(e) => silent = Some(e),
        }
    }
    let is_majority = record.quorum == Quorum::Majority && told.len() > record.counted().count() / 2;
    match silent {
        Some(e) if !is_majority => Err(e.into()),
        _ if record.quorum == Quorum::Majority && !told.is_empty() && !is_majority => bail!(
            "too few replicas of volume {0} tell what it held: see `longhornctl salvage {0}`",
            record.name
        ),
        _ => Ok(told.into_iter().max_by_key(Epoch::order)),
    }
}

/// The directories that the next program gets.
fn releasing(record: &VolumeRecord) -> impl Iterator<Item = &Path> {
    let is_released = |replica: &&ReplicaRecord| record.releasing.contains(&replica.name);
    record.replicas.iter().filter(is_released).map(|replica| replica.directory.as_path())
}

/// Opens every directory that is released, and sees that there is space for all of them.
fn prepare<'a>(directories: impl Iterator<Item = &'a Path>) -> Result<Vec<Release>> {
    let mut prepared = Vec::new();
    let mut needs: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for directory in directories {
        let release = Release::prepare(directory)?;
        let (device, free) = release.free().with_context(|| directory.display().to_string())?;
        let (need, available) = needs.entry(device).or_default();
        (*need, *available) = (*need + release.need(), free);
        if *need > *available {
            bail!(
                "the disk of {} has {} free and {} are needed: free some space, then release again",
                directory.display(),
                format_size(*available),
                format_size(*need)
            );
        }
        prepared.push(release);
    }
    Ok(prepared)
}

fn carry_out(prepared: Vec<Release>) -> Result<()> {
    for release in prepared {
        release.carry_out()?;
    }
    Ok(())
}

fn view(record: &VolumeRecord) -> ReleaseView {
    let is_released = |name: &String| record.releasing.contains(name);
    let (released, left): (Vec<_>, Vec<_>) = record.replicas.iter().partition(|r| is_released(&r.name));
    let reason = || "it was left out of the volume and lacks what was written since".to_owned();
    ReleaseView {
        volume: record.name.clone(),
        released: released.into_iter().map(|r| r.directory.clone()).collect(),
        left: left.into_iter().map(|r| LeftView { path: r.directory.clone(), reason: reason() }).collect(),
    }
}

fn show(context: &Context, view: &ReleaseView) -> Result<()> {
    if context.output == Output::Json {
        return print_json(view);
    }
    let volume = &view.volume;
    for path in &view.released {
        print(&format!("{}\n", path.display()))?;
    }
    match view.released.is_empty() {
        false => tell!("{volume} is released: what is named above is Longhorn's"),
        true => tell!("{volume} is forgotten, and nothing became Longhorn's"),
    }
    for left in &view.left {
        tell!("left as it is: {} ({})", left.path.display(), left.reason);
    }
    tell!("`longhornctl import {volume} DIR...` would take it back");
    Ok(())
}
