//! What of a volume goes with it: its replicas' files, logs and sockets, and its record.

use std::fs::{self, DirEntry, File};
use std::io::{self, Read as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use control::host::{ReplicaRecord, Root, VolumeRecord, engine_name, sync_dir};

use super::erase::{Alone, Erasure, in_order};
use super::start::is_below;
use crate::daemon::failed_disk;

/// Deletes replica directories, logs, sockets and the record, in an order that can be begun again at any point. The
/// caller holds the volume's lock, and no process of the volume is left.
///
/// # Errors
/// Somebody else uses a directory, or something cannot be deleted.
pub(super) fn everything(root: &Root, record: &VolumeRecord) -> Result<()> {
    let _alone = Alone::within(record.replicas.iter().map(|replica| replica.directory.as_path()))?;
    erase_all(root, record)
}

/// The same by whose directories these are: this process itself may still hold them, or others out of them.
pub(super) fn erase_all(root: &Root, record: &VolumeRecord) -> Result<()> {
    let mut erasure = Erasure::of(record.replicas.iter().map(|replica| replica.directory.as_path()));
    for replica in &record.replicas {
        erase(root, replica, &mut erasure)?;
    }
    drop(erasure);
    leftovers(root, &engine_name(&record.name));
    Ok(record.remove(root)?)
}

/// Deletes a replica's files, its log and its sockets. Its process is gone.
pub(super) fn replica(root: &Root, replica: &ReplicaRecord) -> Result<()> {
    let _alone = Alone::within([replica.directory.as_path()])?;
    erase(root, replica, &mut Erasure::of([replica.directory.as_path()]))
}

fn erase(root: &Root, replica: &ReplicaRecord, erasure: &mut Erasure) -> Result<()> {
    let directory = &replica.directory;
    // A place that somebody has given may hold something else by now, as a new disk where the old one was mounted.
    let removed = if replica.imported || !is_below(root, replica) {
        remove_replica_files(directory, erasure)
    } else {
        remove_tree(directory, erasure)
    };
    removed.with_context(|| format!("{} cannot be deleted", directory.display()))?;
    leftovers(root, &replica.name);
    Ok(())
}

/// Deletes a process's log and sockets, and what it noted of its disk. What is left of these is no data and stands in nobody's way.
pub(super) fn leftovers(root: &Root, name: &str) {
    let log = root.log(name);
    let mut older = log.clone().into_os_string();
    older.push(".1");
    for path in [log, older.into()] {
        let _ = fs::remove_file(path);
    }
    root.remove_sockets(name);
    let _ = fs::remove_file(failed_disk::note(name));
}

/// Deletes a directory of ours. A place where a disk is mounted stays, and is empty then.
fn remove_tree(directory: &Path, erasure: &mut Erasure) -> io::Result<()> {
    match erasure.tree(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy && fs::read_dir(directory)?.next().is_none() => {
            sync_dir(directory)
        }
        Err(e) => Err(e),
        Ok(()) => directory.parent().map_or(Ok(()), sync_dir),
    }
}

/// True if there is anything of the replica to delete: its disk is mounted, or its directory says itself why it cannot be looked at.
pub(super) fn is_there(replica: &ReplicaRecord) -> bool {
    match in_order(&replica.directory) {
        Ok(entries) => entries.iter().any(is_replicas),
        Err(e) => e.kind() != io::ErrorKind::NotFound,
    }
}

/// Deletes the replica's files in a directory that somebody else made, or has given; whatever else lies there stays, and so does the
/// directory then.
fn remove_replica_files(directory: &Path, erasure: &mut Erasure) -> io::Result<()> {
    let entries = match in_order(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut left = false;
    for entry in entries {
        match is_replicas(&entry) {
            true if entry.file_type()?.is_dir() => erasure.tree(&entry.path())?,
            true => erasure.file(&entry.path())?,
            false => left = true,
        }
    }
    sync_dir(directory)?;
    if left { Ok(()) } else { remove_tree(directory, erasure) }
}

/// True of what a replica makes in its directory.
fn is_replicas(entry: &DirEntry) -> bool {
    let (name, is_dir) = (entry.file_name(), entry.file_type().is_ok_and(|kind| kind.is_dir()));
    if is_dir {
        name == ENGINE && holds_records(&entry.path())
    } else {
        is_replica_file(&name.to_string_lossy())
    }
}

/// The folder of a replica's records (`docs/formats/replica-directory.md`).
const ENGINE: &str = "engine";

/// True of a folder with a replica's records, each of which begins with its own name, and of one with nothing: many a folder may be
/// called so on a disk that lies where the replica's was.
fn holds_records(folder: &Path) -> bool {
    let Ok(entries) = in_order(folder) else { return false };
    entries.is_empty() || entries.iter().any(is_record)
}

fn is_record(entry: &DirEntry) -> bool {
    let begins = format!("longhorn {} ", entry.file_name().to_string_lossy());
    let mut read = vec![0; begins.len()];
    // Whatever else has the name may keep whoever opens it waiting.
    let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
    is_file
        && File::open(entry.path()).and_then(|mut file| file.read_exact(&mut read)).is_ok()
        && read == begins.as_bytes()
}

/// Longhorn's files: volume.meta, layers, what belongs to them, and what an interrupted change left.
fn is_replica_file(name: &str) -> bool {
    let layer = ["volume-head-", "volume-snap-", "volume-delta-"].iter().any(|kind| name.starts_with(kind));
    let meta = name.strip_prefix("volume.meta");
    layer && name.contains(".img") || matches!(meta, Some("" | ".new" | ".tmp")) || name == "revision.counter"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tell::tell;

    #[test]
    fn a_place_where_a_disk_is_mounted_is_emptied_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let run = |program: &str, words: &[&str]| {
            let mut command = std::process::Command::new(program);
            command.args(words).arg(dir.path()).stderr(std::process::Stdio::null()).status()
        };
        if !run("mount", &["-t", "tmpfs", "none"]).is_ok_and(|status| status.success()) {
            tell!("SKIP a_place_where_a_disk_is_mounted: nothing can be mounted");
            return;
        }
        fs::create_dir(dir.path().join("engine")).unwrap();
        fs::write(dir.path().join("volume.meta"), "x").unwrap();
        let removed = remove_tree(dir.path(), &mut Erasure::of([dir.path()]));
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert!(run("umount", &[]).unwrap().success());
        removed.unwrap();
        assert_eq!(left, 0);
    }

    /// As on a disk that was mounted where the replica's had been.
    #[test]
    fn a_folder_that_only_has_the_name_of_a_replicas_own_stays() {
        let dir = tempfile::tempdir().unwrap();
        let engine = dir.path().join(ENGINE);
        let remove = || remove_replica_files(dir.path(), &mut Erasure::of([dir.path()])).unwrap();
        let replica = ReplicaRecord {
            name: "demo-r-0a1b2c3d".into(),
            directory: dir.path().to_owned(),
            imported: false,
            learner: false,
        };
        fs::create_dir(&engine).unwrap();
        for (name, text) in [("main.c", "int main;"), ("fence", "of wood"), ("layers", "")] {
            fs::write(engine.join(name), text).unwrap();
        }
        assert!(!is_there(&replica), "nothing of it is");
        remove();
        assert_eq!(fs::read_dir(&engine).unwrap().count(), 3);
        fs::write(engine.join("fence"), "longhorn fence 1 0a1b2c3d\n{}\n").unwrap();
        assert!(is_there(&replica));
        remove();
        assert!(!engine.exists());
    }

    #[test]
    fn of_an_imported_directory_only_the_replica_goes() {
        let dir = tempfile::tempdir().unwrap();
        let names = [
            "revision.counter",
            "volume.meta",
            "volume.meta.tmp",
            "volume.meta.new",
            "volume-head-000.img",
            "volume-head-000.img.meta",
            "volume-snap-a.img.checksum",
            "volume-snap-a.img.meta.tmp",
            "volume-delta-a.img",
        ];
        let others = ["photos.tar", "volume-of-poems.txt", "volume.meta.yaml"];
        let fill = |directory: &Path| {
            fs::create_dir_all(directory.join("engine")).unwrap();
            for name in names {
                fs::write(directory.join(name), "x").unwrap();
            }
        };
        let (alone, shared) = (dir.path().join("alone"), dir.path().join("shared"));
        fill(&alone);
        fill(&shared);
        for name in others {
            fs::write(shared.join(name), "x").unwrap();
        }
        let mut erasure = Erasure::of([alone.as_path(), shared.as_path()]);
        remove_replica_files(&alone, &mut erasure).unwrap();
        remove_replica_files(&shared, &mut erasure).unwrap();
        assert!(!alone.exists());
        let mut left: Vec<_> = fs::read_dir(&shared).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, others);
        remove_replica_files(&alone, &mut erasure).unwrap();
    }
}
