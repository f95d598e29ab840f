//! A volume whose record cannot be read, and what can be done with it: it is stopped, forgotten, or imported anew.
//!
//! Its name is that of its record's directory, and its processes and the replica directories below the root are named after
//! it. Where others lie, and which of them count, only the record knew: nothing here deletes one.

use std::fs;
use std::io;
use std::path::PathBuf;

use anyhow::{Result, bail};
use control::host::{RecordError, ReplicaRecord, Root, VolumeRecord, engine_name, replica_name};
use control::manager::ProcessRecord;

use super::delete::leftovers;
use super::observe::has_processes;

/// True if the record of the volume is there and cannot be read.
pub(super) fn is_damaged<T>(read: &Result<T, RecordError>) -> bool {
    matches!(read, Err(RecordError::Damaged { .. }))
}

/// Refuses while the volume has processes. The caller holds the volume's lock.
///
/// # Errors
/// It has.
pub(super) fn check_stopped(root: &Root, volume: &str) -> Result<()> {
    if has_processes(root, &by_processes(root, volume)?)? {
        bail!("volume {volume} is up: stop it first with `longhornctl down {volume}`");
    }
    Ok(())
}

/// Makes the volume not exist any more, and leaves its replicas. The caller holds the volume's lock.
///
/// # Errors
/// A file cannot be removed.
pub(super) fn forget(root: &Root, volume: &str) -> Result<()> {
    let replicas = by_directories(root, volume)?;
    VolumeRecord::remove_unread(root, volume)?;
    leftovers(root, &engine_name(volume));
    replicas.iter().for_each(|replica| leftovers(root, &replica.name));
    Ok(())
}

/// The directories below the root that have the volume's name.
///
/// # Errors
/// They cannot be listed.
pub(super) fn directories(root: &Root, volume: &str) -> io::Result<Vec<PathBuf>> {
    Ok(by_directories(root, volume)?.into_iter().map(|replica| replica.directory).collect())
}

/// The replicas whose directories below the root have the volume's name, by name.
fn by_directories(root: &Root, volume: &str) -> io::Result<Vec<ReplicaRecord>> {
    let entries = match fs::read_dir(root.replicas()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut replicas = Vec::new();
    for entry in entries {
        let entry = entry?;
        let file = entry.file_name();
        let own = file.to_str().and_then(|name| name.strip_prefix(volume)?.strip_prefix('-'));
        if let Some(suffix) = own.filter(|suffix| is_suffix(suffix)) {
            let name = replica_name(volume, suffix);
            replicas.push(ReplicaRecord { name, directory: entry.path(), imported: false, learner: false });
        }
    }
    replicas.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(replicas)
}

/// A record of the volume with what the instance manager remembers of its processes.
pub(super) fn by_processes(root: &Root, volume: &str) -> Result<VolumeRecord> {
    let mut record = VolumeRecord::new(volume, 0);
    if !root.processes().is_dir() {
        return Ok(record);
    }
    // One that cannot be read is forgotten by its manager, too.
    for process in ProcessRecord::load_all(root)?.into_iter().flatten() {
        let own = process.name.strip_prefix(volume).and_then(|rest| rest.strip_prefix("-r-"));
        if own.is_some_and(is_suffix) {
            let directory = process.args.last().map(PathBuf::from).unwrap_or_default();
            record.replicas.push(ReplicaRecord {
                name: process.name,
                directory,
                imported: true,
                learner: false,
            });
        }
    }
    Ok(record)
}

/// True of what [`control::host::new_replica_suffix`] gives.
fn is_suffix(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_volume_whose_record_is_damaged_the_replicas_stay_and_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let mut record = VolumeRecord::new("dam", 1 << 20);
        record.add_replica(&root).unwrap();
        record.create(&root).unwrap();
        let (replica, own) = (record.replicas[0].name.clone(), record.replicas[0].directory.clone());
        let others = ["dam-r-0a1b2c3d-0a1b2c3d", "dam-2-0a1b2c3d", "dam-0a1b2c3", ".dam-0a1b2c3d.copy"];
        for directory in others.map(|name| root.replicas().join(name)).iter().chain([&own]) {
            fs::create_dir(directory).unwrap();
        }
        fs::write(root.volume("dam").join("volume.json"), "{").unwrap();
        fs::write(root.log(&replica), "x").unwrap();
        assert!(is_damaged(&VolumeRecord::load(&root, "dam")));

        // Another volume's process, and then one of its own.
        let process = |name: &str| {
            let text = serde_json::json!({"format": 1, "name": name, "binary": "", "args": [], "uuid": "1", "state": "running"});
            fs::write(root.process(name), text.to_string()).unwrap();
        };
        process(&format!("{replica}-e-0"));
        check_stopped(&root, "dam").unwrap();
        process(&replica);
        let refused = check_stopped(&root, "dam").unwrap_err().to_string();
        assert!(refused.contains("`longhornctl down dam`"), "{refused}");
        fs::remove_file(root.process(&replica)).unwrap();

        assert_eq!(directories(&root, "dam").unwrap(), std::slice::from_ref(&own));
        forget(&root, "dam").unwrap();
        assert!(own.is_dir() && !root.volume("dam").exists() && !root.log(&replica).exists());
        assert!(matches!(VolumeRecord::load(&root, "dam"), Err(RecordError::Missing { .. })));
    }
}
