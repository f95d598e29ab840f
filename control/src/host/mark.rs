//! Which volumes are to be up: the empty file `up` beside a volume's record.
//!
//! It is there from just before the volume's processes are first started until the command that stops it has stopped them: a
//! crash and a reboot leave it. To take it away needs no space on the disk, so that a volume can be stopped on a full one.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::durable::sync_dir;
use super::{Root, VolumeRecord};

impl VolumeRecord {
    /// Notes, durably, that the volume is to be up. The caller holds the volume's lock.
    ///
    /// # Errors
    /// The file cannot be made, as on a full disk.
    pub fn note_up(&self, root: &Root) -> io::Result<()> {
        let path = mark(root, &self.name);
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(e),
            Ok(_) => sync_dir(&root.volume(&self.name)),
        }
    }

    /// The opposite, as durable. The caller holds the volume's lock.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn note_down(&self, root: &Root) -> io::Result<()> {
        match fs::remove_file(mark(root, &self.name)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(()) => sync_dir(&root.volume(&self.name)),
        }
    }

    /// True if the volume of that name was noted to be up; its record need not be readable.
    pub fn is_noted_up(root: &Root, volume: &str) -> bool {
        mark(root, volume).exists()
    }
}

fn mark(root: &Root, volume: &str) -> PathBuf {
    root.volume(volume).join("up")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_note_stays_until_it_is_taken_back_and_goes_with_its_volume() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let mut record = VolumeRecord::new("demo", 1 << 30);
        record.add_replica(&root).unwrap();
        assert!(record.note_up(&root).is_err(), "there is no volume yet");
        record.create(&root).unwrap();
        assert!(!VolumeRecord::is_noted_up(&root, "demo"));
        record.note_down(&root).unwrap();
        for _ in 0..2 {
            record.note_up(&root).unwrap();
            assert!(VolumeRecord::is_noted_up(&root, "demo"));
        }
        let mode = fs::metadata(mark(&root, "demo")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        record.note_down(&root).unwrap();
        assert!(!VolumeRecord::is_noted_up(&root, "demo"));
        record.note_up(&root).unwrap();
        record.remove(&root).unwrap();
        record.create(&root).unwrap();
        assert!(!VolumeRecord::is_noted_up(&root, "demo"), "a new volume has nothing of the one before");
    }
}
