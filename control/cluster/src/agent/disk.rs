//! A disk as it is found: its identity in `longhorn-disk.cfg`, its file system, its room, the directories on it.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use control::random;
use serde::{Deserialize, Serialize};

use super::DiskView;

/// The file that gives a disk its identity; Longhorn's. A disk that is moved to another path or node keeps it.
pub const DISK_CONFIG: &str = "longhorn-disk.cfg";

/// Its content.
#[derive(Serialize, Deserialize)]
struct DiskConfig {
    #[serde(rename = "diskUUID")]
    disk_uuid: String,
}

/// Looks at a directory. A new disk is given its identity and its `replicas/`; the directory itself must be there: one
/// that is missing may be a disk that is not mounted, and what was put there instead would hide below it.
///
/// # Errors
/// One sentence that says what is wrong with it.
pub fn inspect(path: &Path) -> Result<DiskView, String> {
    let failed = |what: &Path, e: io::Error| format!("{}: {e}", what.display());
    let found = fs::metadata(path).map_err(|e| failed(path, e))?;
    if !found.is_dir() {
        return Err(format!("{} is not a directory", path.display()));
    }
    let system = rustix::fs::statvfs(path).map_err(|e| failed(path, e.into()))?;
    let kind = rustix::fs::statfs(path).map_err(|e| failed(path, e.into()))?;
    let config = path.join(DISK_CONFIG);
    let uuid = identity(&config).map_err(|e| failed(&config, e))?;
    let replicas = path.join("replicas");
    fs::create_dir_all(&replicas).map_err(|e| failed(&replicas, e))?;
    let entries = fs::read_dir(&replicas).map_err(|e| failed(&replicas, e))?;
    let mut directories: Vec<String> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    directories.sort();
    Ok(DiskView {
        uuid,
        filesystem_id: format!("{:x}", std::os::linux::fs::MetadataExt::st_dev(&found)),
        filesystem_type: filesystem_name(kind.f_type),
        maximum: system.f_blocks.saturating_mul(system.f_frsize),
        available: system.f_bavail.saturating_mul(system.f_frsize),
        directories,
    })
}

/// Makes sure that a disk is the one that is expected. What is told of a disk may be older than the node's last start: where
/// it is not mounted yet a replica would begin empty in the directory below, and be filled there.
///
/// # Errors
/// Another one is there, or none: one sentence.
pub(super) fn is_disk(path: &Path, expected: &str) -> Result<(), String> {
    let config = path.join(DISK_CONFIG);
    let found = fs::read(&config).and_then(|bytes| Ok(serde_json::from_slice::<DiskConfig>(&bytes)?));
    match found {
        Ok(found) if found.disk_uuid == expected => Ok(()),
        Ok(found) => {
            let found = found.disk_uuid;
            Err(format!("disk {expected} was expected at {}, and {found} is there", path.display()))
        }
        Err(e) => Err(format!("disk {expected} is not at {}: {}: {e}", path.display(), config.display())),
    }
}

/// Reads the identity, or gives one. A file that cannot be understood is left alone.
fn identity(config: &Path) -> io::Result<String> {
    match fs::read(config) {
        Ok(bytes) => {
            let config: DiskConfig = serde_json::from_slice(&bytes)?;
            if config.disk_uuid.is_empty() {
                return Err(io::Error::other("it names no diskUUID"));
            }
            Ok(config.disk_uuid)
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let uuid = random::uuid()?;
            let bytes = serde_json::to_vec(&DiskConfig { disk_uuid: uuid.clone() })?;
            // Made whole under another name, so that a crash leaves no half of it; and never over one that somebody
            // else has just made.
            let new = config.with_extension(format!("cfg.{}", std::process::id()));
            let mut file = fs::File::create(&new)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            let linked = fs::hard_link(&new, config);
            fs::remove_file(&new)?;
            match linked {
                Ok(()) => {
                    // What is told of the disk from now on goes by it: it must be there after a power cut, too.
                    fs::File::open(config.parent().unwrap_or(Path::new(".")))?.sync_all()?;
                    Ok(uuid)
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => identity(config),
                Err(e) => Err(e),
            }
        }
        Err(e) => Err(e),
    }
}

/// Names of the file systems that replicas are usually on (`statfs(2)`); others are shown by their number.
fn filesystem_name(number: rustix::fs::FsWord) -> String {
    match number {
        0xef53 => "ext4".to_owned(),
        0x5846_5342 => "xfs".to_owned(),
        0x9123_683e => "btrfs".to_owned(),
        0x0102_1994 => "tmpfs".to_owned(),
        0x794c_7630 => "overlay".to_owned(),
        other => format!("{other:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_gets_an_identity_once() {
        let dir = tempfile::tempdir().unwrap();
        let first = inspect(dir.path()).unwrap();
        assert_eq!(first.uuid.len(), 36);
        assert!(first.maximum > 0 && first.available <= first.maximum);
        fs::create_dir(dir.path().join("replicas/demo-0a1b2c3d")).unwrap();
        fs::write(dir.path().join("replicas/file"), "").unwrap();
        let again = inspect(dir.path()).unwrap();
        assert_eq!((again.uuid, again.directories), (first.uuid, vec!["demo-0a1b2c3d".to_owned()]));
        let files: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(files.len(), 2, "{files:?}");
    }

    #[test]
    fn a_replica_begins_on_its_own_disk_alone() {
        let dir = tempfile::tempdir().unwrap();
        let missing = is_disk(dir.path(), "u1").unwrap_err();
        assert!(
            missing.contains("is not at") && fs::read_dir(dir.path()).unwrap().next().is_none(),
            "{missing}"
        );
        let uuid = inspect(dir.path()).unwrap().uuid;
        is_disk(dir.path(), &uuid).unwrap();
        assert!(is_disk(dir.path(), "u1").unwrap_err().contains(&uuid));
    }

    #[test]
    fn longhorns_file_is_read_and_a_damaged_one_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join(DISK_CONFIG);
        fs::write(&config, r#"{"diskUUID":"0b4c8f9a-1111-4222-8333-444455556666","diskName":"x"}"#).unwrap();
        assert_eq!(inspect(dir.path()).unwrap().uuid, "0b4c8f9a-1111-4222-8333-444455556666");
        for damaged in ["", "{", r#"{"diskUUID":""}"#] {
            fs::write(&config, damaged).unwrap();
            assert!(inspect(dir.path()).unwrap_err().contains(DISK_CONFIG));
            assert_eq!(fs::read_to_string(&config).unwrap(), damaged);
        }
    }

    #[test]
    fn a_directory_that_is_missing_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("not-mounted");
        assert!(inspect(&missing).unwrap_err().contains("not-mounted"));
        assert!(!missing.exists());
    }
}
