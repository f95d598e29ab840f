//! The change of heads, step by step (`docs/invariants.md`, 9). A snapshot, an expansion and a revert differ in little:
//!
//! ```text
//! link    volume-head-OLD.img            -> volume-snap-NAME.img        (not for a revert)
//! rename  engine/next-snapshot           -> volume-snap-NAME.img.meta   (not for a revert)
//! rename  engine/next-head               -> volume-head-NEW.img
//! rename  engine/next-head-info          -> volume-head-NEW.img.meta
//! rename  engine/next-volume             -> volume.meta               (the switch)
//! sync    the directory
//! remove  engine/zero-OLD                                             (a revert: the old head goes with its zero map)
//! remove  volume-head-OLD.img.meta, volume-head-OLD.img
//! ```
//!
//! The steps up to the switch only link and rename, and are taken when the operation is prepared: a step may wait for the file
//! system's journal, and while the switch is made requests are held. Nothing is removed before the switch is durable, so that no
//! order in which a disk may write the directory leaves it without a head.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use lh_wire::ChainOp;

use super::ENGINE;
use super::disk;
use super::fs::{Fs, found_at};
use super::id::LAYER_ATTRIBUTE;
use super::meta::{LayerMeta, META_MAX, VOLUME_META, VolumeMeta, meta_name, snapshot_file};
use super::record::{ChainRecord, Prepared, Switch};
use super::zero;

pub(super) const NEXT_SNAPSHOT: &str = "next-snapshot";
pub(super) const NEXT_HEAD: &str = "next-head";
pub(super) const NEXT_HEAD_INFO: &str = "next-head-info";
pub(super) const NEXT_VOLUME: &str = "next-volume";

/// What an operation does to the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// The snapshot that the old head becomes. `None`: it is dropped.
    pub(super) keep: Option<String>,
    /// The snapshot that the new head stands on.
    pub(super) base: String,
    /// Length of the new head, and size of the volume.
    pub(super) size: u64,
    /// Time of creation of the new head.
    pub(super) created: String,
}

impl Turn {
    /// `None`: the operation leaves the head alone. `size` is the volume's.
    pub(super) fn of(op: &ChainOp, size: u64) -> Option<Self> {
        let (base, size, created) = match op {
            ChainOp::Snapshot { name, created, .. } => (name.clone(), size, created),
            ChainOp::Expand { size, created, .. } => (op.snapshot()?, *size, created),
            ChainOp::Revert { name, created } => (name.clone(), size, created),
            ChainOp::MarkRemoved { .. } => return None,
        };
        Some(Self { keep: op.snapshot(), base, size, created: created.clone() })
    }
}

/// Removes what a prepared operation made.
pub(super) fn remove_next(fs: &Fs, directory: &Path, prepared: Option<&Prepared>) -> io::Result<()> {
    let engine = directory.join(ENGINE);
    for name in [NEXT_VOLUME, NEXT_HEAD_INFO, NEXT_SNAPSHOT, NEXT_HEAD] {
        fs.remove(&engine.join(name))?;
    }
    if let Some(switch) = prepared.and_then(|p| p.switch.as_ref()) {
        fs.remove(&engine.join(zero::file_name(switch.layer)))?;
    }
    fs.sync_directory(&engine)
}

/// The steps before the switch. What is done already is passed over.
pub(super) fn place_names(fs: &Fs, directory: &Path, switch: &Switch, keep: Option<&str>) -> io::Result<()> {
    if let Some(snapshot) = keep.map(snapshot_file) {
        if found_at(&directory.join(&snapshot))?.is_none() {
            fs.link(&directory.join(&switch.old_head), &directory.join(&snapshot))?;
        }
        move_out(fs, directory, NEXT_SNAPSHOT, &meta_name(&snapshot))?;
    }
    move_out(fs, directory, NEXT_HEAD, &switch.new_head)?;
    move_out(fs, directory, NEXT_HEAD_INFO, &meta_name(&switch.new_head))
}

/// All steps up to the switch, and this.
pub(super) fn switch_heads(fs: &Fs, directory: &Path, switch: &Switch, keep: Option<&str>) -> io::Result<()> {
    place_names(fs, directory, switch, keep)?;
    move_out(fs, directory, NEXT_VOLUME, VOLUME_META)
}

/// Gives a file that `prepare` made its name, unless it has it.
fn move_out(fs: &Fs, directory: &Path, from: &str, to: &str) -> io::Result<()> {
    let from = directory.join(ENGINE).join(from);
    if found_at(&from)?.is_some() {
        fs.rename(&from, &directory.join(to))?;
    }
    Ok(())
}

/// The steps behind the switch: makes it durable, then takes the old head's names away. Doing it twice is doing it once.
pub(super) fn drop_old_head(fs: &Fs, directory: &Path, switch: &Switch, kept: bool) -> io::Result<()> {
    fs.sync_directory(directory)?;
    let old = directory.join(&switch.old_head);
    if !kept && found_at(&old)?.is_some() {
        let id = disk::id(&disk::open_layer(&old, false, false)?, LAYER_ATTRIBUTE)?;
        if let Some(id) = id {
            let engine = directory.join(ENGINE);
            fs.remove(&engine.join(zero::file_name(id)))?;
            fs.sync_directory(&engine)?;
        }
    }
    fs.remove(&directory.join(meta_name(&switch.old_head)))?;
    fs.remove(&old)?;
    fs.sync_directory(directory)
}

/// What was found of a prepared operation when the directory was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It was carried out: now it is wholly.
    Committed(ChainRecord),
    /// It was not: it is prepared as before, once its files are made anew.
    Prepared(Prepared),
}

/// Finishes or undoes what a crash interrupted, before the layers are read. `volume` is volume.meta.
pub(super) fn recover(
    fs: &Fs,
    directory: &Path,
    record: &ChainRecord,
    volume: &VolumeMeta,
) -> io::Result<Option<Found>> {
    let Some(prepared) = &record.prepared else {
        // A crash may have left the files of an operation that was taken back.
        remove_next(fs, directory, None)?;
        return Ok(None);
    };
    let committed = || ChainRecord { prepared: None, committed: Some(prepared.id), ..record.clone() };
    let turn = Turn::of(&prepared.op, volume.size());
    match (&prepared.op, &prepared.switch, turn) {
        (_, Some(switch), Some(turn)) if volume.head == switch.new_head => {
            switch_heads(fs, directory, switch, turn.keep.as_deref())?;
            drop_old_head(fs, directory, switch, turn.keep.is_some())?;
            Ok(Some(Found::Committed(committed())))
        }
        (_, Some(switch), Some(turn)) => {
            undo(fs, directory, switch, turn.keep.as_deref())?;
            Ok(Some(Found::Prepared(prepared.clone())))
        }
        (ChainOp::MarkRemoved { name }, ..) => {
            let file = snapshot_file(name);
            let bytes = disk::read_small(&directory.join(meta_name(&file)), META_MAX)?;
            let removed = LayerMeta::parse(&file, &bytes).is_ok_and(|meta| meta.removed);
            let done = removed && !prepared.was_removed;
            Ok(Some(if done { Found::Committed(committed()) } else { Found::Prepared(prepared.clone()) }))
        }
        _ => Ok(None),
    }
}

/// Takes back the steps before the switch. What was written to the new head was lost with its name, and nobody was told that it is on
/// the disk; its zero map may have marks all the same, written in place. The snapshot's name is the old head's file.
pub(super) fn undo(fs: &Fs, directory: &Path, switch: &Switch, keep: Option<&str>) -> io::Result<()> {
    let at = |name: &str| directory.join(name);
    let head = at(&switch.old_head).symlink_metadata()?.ino();
    fs.remove(&at(&meta_name(&switch.new_head)))?;
    fs.remove(&at(&switch.new_head))?;
    if let Some(snapshot) = keep.map(snapshot_file) {
        // The name was free: a meta without its file is one that the disk wrote first.
        if found_at(&at(&snapshot))?.is_none_or(|link| link.ino() == head) {
            fs.remove(&at(&meta_name(&snapshot)))?;
            fs.remove(&at(&snapshot))?;
        }
    }
    fs.sync_directory(directory)?;
    // The next try makes a new one: this one would be that of a layer that is gone.
    let engine = directory.join(ENGINE);
    fs.remove(&engine.join(zero::file_name(switch.layer)))?;
    fs.sync_directory(&engine)
}
