//! Where a replica's directory may lie: apart from all others, and from what else a root has. Whoever deletes one deletes what is in it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use control::host::{ReplicaRecord, Root, VolumeRecord};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// How long another command may be about to take a place, for which it reads all records and stores one.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(20);

/// Places that no other command of the root takes, as long as this lives.
#[derive(Debug)]
pub(super) struct Taken {
    _lock: Flock<File>,
}

/// Takes places until a record names them. A volume's lock keeps commands of that volume apart; who looks for another one at the same
/// moment finds a place free as well, and one directory would be two volumes'. Refuses as [`check_apart`].
pub(super) fn take<'a>(
    root: &Root,
    directories: impl IntoIterator<Item = &'a Path>,
    same: fn(&str) -> String,
) -> Result<Taken> {
    let path = root.run().join("places.lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut file = file.with_context(|| path.display().to_string())?;
    let deadline = Instant::now() + PATIENCE;
    let lock = loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => break lock,
            Err((back, Errno::EWOULDBLOCK)) if Instant::now() < deadline => file = back,
            Err((_, Errno::EWOULDBLOCK)) => {
                bail!(
                    "another command is taking a directory for a replica: wait until it is done, then try again"
                )
            }
            Err((_, e)) => return Err(e).with_context(|| path.display().to_string()),
        }
        std::thread::sleep(AGAIN);
    };
    directories.into_iter().try_for_each(|directory| check_apart(root, directory, same))?;
    Ok(Taken { _lock: lock })
}

/// Refuses a directory, given without symbolic links, that has a replica's of this root inside, lies inside of one, or in the root beside
/// its replicas. `same`: what to do where it is a replica's itself, whose volume is named.
pub(super) fn check_apart(root: &Root, directory: &Path, same: fn(&str) -> String) -> Result<()> {
    let shown = directory.display();
    for name in VolumeRecord::list(root)? {
        // A record that cannot be read cannot be asked; the replica's locks still keep two volumes apart.
        let Ok(record) = VolumeRecord::load(root, &name) else { continue };
        for own in record.replicas.iter().map(|r| resolved(&r.directory)) {
            let theirs = own.display();
            if own == directory {
                bail!("{shown} belongs to volume {name}: {}", same(&name));
            }
            if directory.starts_with(&own) {
                bail!(
                    "{shown} lies in {theirs}, which belongs to volume {name}: choose a directory apart from it"
                );
            }
            if own.starts_with(directory) {
                bail!(
                    "{shown} has {theirs} in it, which belongs to volume {name}: choose a directory apart from it"
                );
            }
        }
    }
    // What a root has besides: the directories of its volumes are made and removed as a whole.
    let [top, replicas] = [root.path(), &root.replicas()].map(resolved);
    let others = [root.volumes(), root.run(), root.logs(), root.engine_binaries()];
    let is_taken = directory == top
        || directory == replicas
        || others.iter().any(|other| directory.starts_with(resolved(other)));
    if is_taken {
        bail!("{shown} is a place for other things of {}: choose another one", top.display());
    }
    Ok(())
}

/// The volume of this root that a directory is a replica of, if the records say so of one.
pub(super) fn volume_of(root: &Root, directory: &Path) -> Option<String> {
    let directory = resolved(directory);
    let is_its = |name: &String| {
        let record = VolumeRecord::load(root, name);
        record.is_ok_and(|record| record.replicas.iter().any(|r| resolved(&r.directory) == directory))
    };
    VolumeRecord::list(root).ok()?.into_iter().find(is_its)
}

/// The replica that has this directory, or listens at this address, as `replica ls` prints them.
pub(super) fn replica_at<'a>(
    root: &Root,
    record: &'a VolumeRecord,
    place: &str,
) -> Option<&'a ReplicaRecord> {
    let directory = resolved(Path::new(place));
    let is_at = |replica: &&ReplicaRecord| {
        resolved(&replica.directory) == directory
            || place
                .strip_prefix("unix:")
                .is_some_and(|path| Path::new(path) == root.data_socket(&replica.name))
    };
    record.replicas.iter().find(is_at)
}

/// Without symbolic links as far as it is there.
fn resolved(path: &Path) -> PathBuf {
    let mut missing = PathBuf::new();
    let mut there = path;
    loop {
        match (there.canonicalize(), there.parent(), there.file_name()) {
            (Ok(real), ..) if missing.as_os_str().is_empty() => return real,
            (Ok(real), ..) => return real.join(missing),
            (Err(_), Some(above), Some(name)) => {
                missing =
                    if missing.as_os_str().is_empty() { name.into() } else { Path::new(name).join(missing) };
                there = above;
            }
            _ => return path.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_replica_lies_in_another_ones_directory_or_among_what_else_a_root_has() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        let root = Root::at(&top.join("root")).unwrap();
        root.create().unwrap();
        let mut record = VolumeRecord::new("demo", 1 << 20);
        record.add_replica(&root).unwrap();
        let own = record.replicas[0].directory.clone();
        // On a disk that is reached by a symbolic link, and not there just now.
        fs::create_dir(top.join("disk")).unwrap();
        symlink(top.join("disk"), top.join("link")).unwrap();
        let away = ReplicaRecord {
            name: "demo-r-0a1b2c3d".into(),
            directory: top.join("link/a/b"),
            imported: false,
            learner: false,
        };
        record.replicas.push(away);
        record.create(&root).unwrap();

        let says = |place: &Path| match check_apart(&root, place, |name| format!("the same as {name}'s")) {
            Ok(()) => String::new(),
            Err(e) => e.to_string(),
        };
        assert_eq!(says(&root.replicas().join("new")), "");
        assert_eq!(says(&top.join("elsewhere")), "");
        assert_eq!(says(&root.path().join("old")), "");
        assert_eq!(says(&top.join("disk/a/bb")), "");
        assert!(says(&own).contains("the same as demo's"));
        assert!(says(&top.join("disk/a/b")).contains("the same as demo's"));
        assert!(says(&own.join("sub")).contains("lies in"));
        assert!(says(&top.join("disk/a/b/c")).contains("lies in"));
        assert!(says(&top.join("disk/a")).contains("has"));
        for other in ["volumes/x", "run", "log", "replicas", ""] {
            assert!(!says(&root.path().join(other)).is_empty(), "{other}");
        }
        assert!(says(&root.path().join("volumes/x")).contains("other things"));
    }
}
