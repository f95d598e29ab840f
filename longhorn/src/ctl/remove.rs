//! `rm`: a volume and all its data.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use control::host::{VolumeRecord, VolumeState};
use serde::Serialize;

use super::args::Output;
use super::erase::Alone;
use super::observe::has_processes;
use super::output::print_json;
use super::start::is_below;
use super::{Context, damaged, delete, device, interrupt, lock};
use crate::tell::tell;

/// What is gone, as `rm -o json` prints it.
#[derive(Debug, Serialize)]
struct RemovedView<'a> {
    volume: &'a str,
    /// The replicas' directories; of one that somebody has given, other files stay.
    removed: Vec<&'a PathBuf>,
    /// What stays: directories in which nothing of the replica was, as of a disk that is not mounted; of a volume whose record could not
    /// be read those below the root that have its name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left: Vec<PathBuf>,
}

pub(super) fn run(context: &Context, volume: &str, yes: bool) -> Result<()> {
    let root = &context.root;
    if damaged::is_damaged(&VolumeRecord::load(root, volume)) {
        return without_record(context, volume, yes);
    }
    let (_lock, mut record) = lock::volume(root, volume)?;
    if has_processes(root, &record)? {
        bail!("volume {volume} is up: stop it first with `longhornctl down {volume}`");
    }
    device::release_unused(volume, root)?;
    let directories = record.replicas.iter().map(|r| r.directory.clone()).collect::<Vec<_>>();
    let what = format!("Volume {volume} and all its data will be deleted:");
    if !yes && !confirmed(volume, &what, &directories)? {
        bail!("nothing was deleted");
    }
    // Before anything is changed: a volume that is being deleted cannot be used any more.
    let alone = Alone::within(directories.iter().map(PathBuf::as_path))?;
    interrupt::leaves(format!("some of volume {volume} may be gone: finish with `longhornctl rm {volume}`"));
    record.note_down(root)?;
    record.state = VolumeState::Removing;
    record.store(root)?;
    let (left, removed): (Vec<_>, Vec<_>) =
        record.replicas.iter().partition(|replica| !is_below(root, replica) && !delete::is_there(replica));
    let [left, removed] =
        [left, removed].map(|all| all.into_iter().map(|r| &r.directory).collect::<Vec<_>>());
    delete::erase_all(root, &record)?;
    drop(alone);
    if context.output == Output::Json {
        return print_json(&RemovedView { volume, removed, left: left.into_iter().cloned().collect() });
    }
    tell!("{volume} and its data are deleted");
    for directory in left {
        tell_left(volume, directory);
    }
    Ok(())
}

/// Nobody is to believe that what could not be found is deleted.
pub(super) fn tell_left(name: &str, directory: &Path) {
    tell!(
        "nothing of {name} was in {}: if that is on a disk that is not mounted, what it holds stays until you delete it",
        directory.display()
    );
}

/// Forgets a volume whose record cannot be read. Which directories are its replicas' only the record knew: those that may be stay,
/// and are named.
fn without_record(context: &Context, volume: &str, yes: bool) -> Result<()> {
    let root = &context.root;
    let _lock = lock::name(root, volume)?;
    // The command that held it may have deleted it, or made it anew.
    if !damaged::is_damaged(&VolumeRecord::load(root, volume)) {
        bail!("volume {volume} is another one now: nothing was deleted");
    }
    damaged::check_stopped(root, volume)?;
    let left = damaged::directories(root, volume)?;
    let what = format!("Volume {volume}, whose record cannot be read, will be forgotten. What stays:");
    if !yes && !confirmed(volume, &what, &left)? {
        bail!("nothing was deleted");
    }
    damaged::forget(root, volume)?;
    if context.output == Output::Json {
        return print_json(&RemovedView { volume, removed: Vec::new(), left });
    }
    tell!("{volume} is forgotten; its record could not be read, and no replica directory was deleted");
    for directory in &left {
        tell!("left as it is: {}", directory.display());
    }
    tell!(
        "`longhornctl import {volume} DIR...` would make a volume of its directories, those elsewhere as well"
    );
    Ok(())
}

/// Asks on a terminal; elsewhere nobody can answer.
fn confirmed(volume: &str, what: &str, directories: &[PathBuf]) -> Result<bool> {
    if !io::stdin().is_terminal() {
        bail!("deleting volume {volume} and all its data needs --yes where nobody can be asked");
    }
    tell!("{what}");
    for directory in directories {
        tell!("  {}", directory.display());
    }
    let _ = io::stderr().write_all(b"Type the volume's name to go on: ");
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(answer.trim() == volume)
}
