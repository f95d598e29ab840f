//! Space for what is to be made: a disk that is full is named before anything is begun on it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use control::host::Root;
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
    check_free(root.path(), need)
        .with_context(|| format!("no volume of {} can be made", counted(count, "replica")))
}

/// Refuses a replica in this directory, which need not be there yet.
///
/// # Errors
/// As [`check`].
pub(super) fn check_replica(directory: &Path) -> Result<()> {
    check_free(directory, REPLICA).context("no replica can be made")
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
            "the disk of {} is full, and what is noted of a replica lies there, wherever the replica does: free some space",
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

fn check_free(place: &Path, need: u64) -> Result<()> {
    let existing = place.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let stat = statvfs(existing).with_context(|| existing.display().to_string())?;
    let free = stat.blocks_available() * stat.fragment_size();
    // Some file systems have no size that they could tell.
    if stat.blocks() > 0 && free < need {
        bail!(
            "the disk of {} has {} free, and {} are needed to begin with: free some space, or choose another place",
            place.display(),
            format_size(free),
            format_size(need)
        );
    }
    // File systems that make them as they are needed tell of none at all.
    if stat.files() > 0 && stat.files_available() < FILES {
        bail!(
            "the disk of {} has room for {} more files: remove some, or choose another place",
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
        check_free(&place, 4096).unwrap();
        let said = check_free(&place, 1 << 60).unwrap_err().to_string();
        assert!(said.contains("not/yet has ") && said.contains("are needed"), "{said}");
    }
}
