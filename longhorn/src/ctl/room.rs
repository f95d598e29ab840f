//! Space for what is to be made: a disk that is full is named before anything is begun on it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use control::host::{Root, VolumeRecord};
use lh_block::format_size;
use nix::sys::statvfs::statvfs;

use super::output::counted;

/// What a replica takes before anything is written to it: its records, its index of a file system's blocks, and the room that
/// it keeps for itself (`engine/room`, 1 MiB).
const REPLICA: u64 = 2 << 20;

/// What a volume's record and key, what its manager notes, and the first lines of its logs take.
const VOLUME: u64 = 1 << 20;

/// What the record of a volume takes once more while it is replaced, and what its manager notes of one more process.
const NOTES: usize = 64 << 10;

/// Files and directories of a replica, and what a volume has besides.
const FILES: u64 = 32;

/// Refuses a new volume of so many replicas that its disk has no space for.
///
/// # Errors
/// The disk's name, how much it has, and how much is needed.
pub(super) fn check(root: &Root, count: usize) -> Result<()> {
    let need = VOLUME + REPLICA * count as u64;
    check_free(root.path(), need, "choose another place with --root")
        .with_context(|| format!("no volume of {} can be made", counted(count, "replica")))
}

/// Refuses a replica in this directory, which need not be there yet, and which somebody may have chosen.
///
/// # Errors
/// As [`check`].
pub(super) fn check_replica(volume: &str, directory: &Path, is_given: bool) -> Result<()> {
    let otherwise = match is_given {
        true => "choose another place".to_owned(),
        false => format!("put it on another disk: `longhornctl replica add {volume} --dir DIR`"),
    };
    check_free(directory, REPLICA, &otherwise).context("no replica can be made")
}

/// A disk with less is full: a replica keeps as much for itself.
const FULL: u64 = 1 << 20;

/// What can be done where a disk is full that a replica of the volume lies on; `None`: none is.
pub(super) fn way_out(record: &VolumeRecord) -> Option<String> {
    let is_full = |place: &Path| free(place).is_ok_and(|free| free < FULL);
    let full = record.replicas.iter().find(|replica| is_full(&replica.directory))?;
    Some(format!("the disk of {} is full: {}", full.directory.display(), more_space(&record.name)))
}

/// How a volume whose replica's disk is full gets space.
pub(super) fn more_space(volume: &str) -> String {
    format!(
        "free or add some space there, or take another disk with `longhornctl replica add {volume} --dir DIR`"
    )
}

/// Refuses to note anything more below a root whose disk is full. It is tried: root may have blocks that file systems tell nobody of,
/// and some that are told of are nobody's.
///
/// # Errors
/// The disk is full, or cannot be written.
pub(super) fn check_root(root: &Root) -> Result<()> {
    let probe = root.run().join(format!("room.{}", std::process::id()));
    let tried = File::create(&probe).and_then(|mut file| {
        file.write_all(&[0; NOTES])?;
        file.sync_all()
    });
    let _ = fs::remove_file(&probe);
    match tried {
        Err(e) if e.kind() == io::ErrorKind::StorageFull => bail!(
            "the disk of {} is full, and what is noted of a replica lies there, wherever the replica does: free some space there first",
            root.path().display()
        ),
        tried => tried.with_context(|| probe.display().to_string()),
    }
}

/// Bytes that the disk of this place has free.
///
/// # Errors
/// The system's.
pub(super) fn free(place: &Path) -> Result<u64> {
    let stat = statvfs(place).with_context(|| place.display().to_string())?;
    Ok(stat.blocks_available() * stat.fragment_size())
}

/// `otherwise`: what to do if no space can be freed.
fn check_free(place: &Path, need: u64, otherwise: &str) -> Result<()> {
    let existing = place.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let stat = statvfs(existing).with_context(|| existing.display().to_string())?;
    let free = stat.blocks_available() * stat.fragment_size();
    // Some file systems have no size that they could tell.
    if stat.blocks() > 0 && free < need {
        bail!(
            "the disk of {} has {} free, and {} are needed to begin with: free some space, or {otherwise}",
            place.display(),
            format_size(free),
            format_size(need)
        );
    }
    // File systems that make them as they are needed tell of none at all.
    if stat.files() > 0 && stat.files_available() < FILES {
        bail!(
            "the disk of {} has room for {} more files: remove some, or {otherwise}",
            place.display(),
            stat.files_available()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_told_with_its_place_and_both_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("not/yet");
        check_free(&place, 4096, "").unwrap();
        let said = check_free(&place, 1 << 60, "look elsewhere").unwrap_err().to_string();
        assert!(said.contains("not/yet has ") && said.contains("are needed"), "{said}");
        assert!(said.ends_with("free some space, or look elsewhere"), "{said}");
    }
}
