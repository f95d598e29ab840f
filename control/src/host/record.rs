//! A volume's record: what it is made of. The volume exists if and only if `volume.json` does; the key beside it is
//! written first and is removed last.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lh_block::{BLOCK, NameError, Quorum, REPLICAS_MAX, check_name};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::durable::{create_dir_durably, replace_file, sync_dir};
use super::format::newer_than;
use super::key::KEY_LEN;
use super::{Authority, Root};
use crate::random;

/// The version of the file that this program writes; it reads no other.
const FORMAT: u32 = 1;

/// Whether a volume may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// It may.
    #[default]
    Ready,
    /// Its removal has begun: some of its data may be gone.
    Removing,
    /// Its directories are being made fit for Longhorn; some are not this program's any more.
    Releasing,
    /// Its directories are being filled from another volume; what they hold is not whole.
    Cloning,
}

/// How long requests wait for a replica where nobody says otherwise, in seconds (`docs/devices.md`).
pub const IO_TIMEOUT_SECONDS: u64 = 300;

/// The largest limit for the number of snapshots, and the one where nobody gives another. It is Longhorn's, where the head counts with
/// them; beside the head a chain holds one less ([`lh_block::SNAPSHOTS_MAX`]), whatever the limit.
pub const SNAPSHOT_COUNT: u32 = lh_block::LAYERS_MAX as u32;

const fn snapshot_count() -> u32 {
    SNAPSHOT_COUNT
}

/// One replica of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRecord {
    /// `VOLUME-r-<8 hex>`.
    pub name: String,
    /// Where its files are, absolute.
    pub directory: PathBuf,
    /// The directory was registered where it was, not made by this volume.
    #[serde(default)]
    pub imported: bool,
    /// It was added to a volume of one replica whose quorum is `majority`, and nobody has noted yet that it is in sync
    /// (`docs/decisions/0023-the-second-of-a-majority-learns-first.md`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub learner: bool,
}

/// What a volume is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    format: u32,
    /// The volume's name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Logical block of the device in bytes: 512 or 4096.
    pub block_size: u32,
    /// Who must agree before an epoch counts.
    pub quorum: Quorum,
    /// The frontend as it was asked for.
    pub frontend: String,
    /// TCP address that the frontend serves on, where it serves one; otherwise a unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// How long requests wait for a replica, in seconds; 0 for ever.
    pub io_timeout_seconds: u64,
    /// Most snapshots, removed ones not counted: 1 to 250.
    #[serde(default = "snapshot_count")]
    pub snapshot_max_count: u32,
    /// Most bytes of all snapshots together; 0: any.
    #[serde(default)]
    pub snapshot_max_size: u64,
    /// Every read is compared with checksums (`--checksum full`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub checksum_full: bool,
    /// Whether the volume may be used.
    #[serde(default)]
    pub state: VolumeState,
    /// While it is being released: the replicas that the next program gets, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub releasing: Vec<String>,
    /// In the order in which they were added. Of imported ones that differ, the first is the source.
    pub replicas: Vec<ReplicaRecord>,
}

/// Why a record could not be read or changed.
#[derive(Debug, Error)]
pub enum RecordError {
    /// The name is not allowed.
    #[error(transparent)]
    Name(#[from] NameError),
    /// There is no such volume.
    #[error("there is no volume {volume} under {}: `longhornctl ls` lists what there is", root.display())]
    Missing {
        /// What was asked for.
        volume: String,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// The file is not one that this program wrote.
    #[error("{} is damaged ({reason}): restore it from a copy, or import the replica directories again with `longhornctl import`", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A newer version has written it.
    #[error("{} is of format {format}, which a newer version of this program has written: use that one", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// The format that it says.
        format: u32,
    },
    /// A value that no volume can have.
    #[error("{0}")]
    Invalid(String),
    /// A command that made, deleted or released the volume was broken off.
    #[error("volume {volume} {}", next_step(volume, *state))]
    NotReady {
        /// The volume.
        volume: String,
        /// How far it is.
        state: VolumeState,
    },
    /// There is no key.
    #[error("there is no key {}: copy it from where the volume was made, {KEY_LEN} bytes that its engine and replicas have in common, or name it with --key-file", path.display())]
    NoKey {
        /// Where it should be.
        path: PathBuf,
    },
    /// The key is not a secret any more.
    #[error("{} has mode {mode:03o}, which lets others read the volume's key: chmod 600 it", path.display())]
    OpenKey {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What a volume is in the middle of, and the command that ends it.
fn next_step(volume: &str, state: VolumeState) -> String {
    match state {
        VolumeState::Ready => "may be used".to_owned(),
        VolumeState::Removing => format!("is being deleted: finish with `longhornctl rm {volume}`"),
        VolumeState::Releasing => format!("is being released: finish with `longhornctl release {volume}`"),
        VolumeState::Cloning => format!(
            "is a clone that is not whole: wait for the command that makes it; if that was broken off, clone again, or \
             delete what there is with `longhornctl rm {volume}`"
        ),
    }
}

/// Eight random hex digits, for the name of a new replica.
///
/// # Errors
/// The system has no random numbers.
pub fn new_replica_suffix() -> io::Result<String> {
    Ok(random::hex(&random::bytes::<4>()?))
}

/// Longhorn's name of a volume's replica.
pub fn replica_name(volume: &str, suffix: &str) -> String {
    format!("{volume}-r-{suffix}")
}

/// Longhorn's name of a volume's engine.
pub fn engine_name(volume: &str) -> String {
    format!("{volume}-e-0")
}

impl VolumeRecord {
    /// The record of a volume of `size` bytes without replicas, otherwise as `longhornctl up` makes it by default.
    pub fn new(name: &str, size: u64) -> Self {
        Self {
            format: FORMAT,
            name: name.to_owned(),
            size,
            block_size: 512,
            quorum: Quorum::Any,
            frontend: "auto".to_owned(),
            listen: None,
            io_timeout_seconds: IO_TIMEOUT_SECONDS,
            snapshot_max_count: SNAPSHOT_COUNT,
            snapshot_max_size: 0,
            checksum_full: false,
            state: VolumeState::Ready,
            releasing: Vec::new(),
            replicas: Vec::new(),
        }
    }

    /// Adds a new replica with a directory below the root, which is not made here.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn add_replica(&mut self, root: &Root) -> io::Result<()> {
        loop {
            let suffix = new_replica_suffix()?;
            let directory = root.replica(&self.name, &suffix);
            let name = replica_name(&self.name, &suffix);
            if !directory.exists() && self.replicas.iter().all(|r| r.name != name) {
                self.replicas.push(ReplicaRecord { name, directory, imported: false, learner: false });
                return Ok(());
            }
        }
    }

    /// Makes the volume exist: its key and its record, durable. The caller holds the volume's lock, and there is none of that name.
    ///
    /// What a removal that was broken off has left goes first: by the epoch of the volume before, whose members are of its
    /// name, no replica of this one would be a member, and it would never start.
    ///
    /// # Errors
    /// The record says what no volume can be, or cannot be written; the volume then does not exist.
    pub fn create(&self, root: &Root) -> Result<(), RecordError> {
        self.check()?;
        let dir = root.volume(&self.name);
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_at(dir)(e)),
            _ => {}
        }
        let made = create_dir_durably(&dir).map_err(io_at(dir.clone())).and_then(|()| {
            self.make_key(root)?;
            self.store(root)
        });
        // On a full disk each file may be the first that does not fit.
        made.inspect_err(|_| drop(fs::remove_dir_all(dir)))
    }

    /// Replaces the record. The caller holds the volume's lock.
    ///
    /// # Errors
    /// As [`VolumeRecord::create`].
    pub fn store(&self, root: &Root) -> Result<(), RecordError> {
        self.check()?;
        let path = record_path(root, &self.name);
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|e| damaged(&path, &e))?;
        bytes.push(b'\n');
        replace_file(&path, &bytes).map_err(io_at(path))
    }

    /// The record of the volume of that name.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn load(root: &Root, volume: &str) -> Result<Self, RecordError> {
        check_name("volume", volume)?;
        let path = record_path(root, volume);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(RecordError::Missing { volume: volume.to_owned(), root: root.path().to_owned() });
            }
            Err(e) => return Err(io_at(path)(e)),
        };
        if let Some(format) = newer_than(FORMAT, &bytes) {
            return Err(RecordError::Newer { path, format });
        }
        let record: Self = serde_json::from_slice(&bytes).map_err(|e| damaged(&path, &e))?;
        if record.format != FORMAT {
            return Err(damaged(&path, &format!("format {} is not {FORMAT}", record.format)));
        }
        if record.name != volume {
            return Err(damaged(&path, &format!("it is the record of volume {:?}", record.name)));
        }
        record.check().map_err(|e| damaged(&path, &e))?;
        Ok(record)
    }

    /// The names of all volumes of a root, sorted. A root that is not there has none.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(root: &Root) -> Result<Vec<String>, RecordError> {
        let entries = match fs::read_dir(root.volumes()) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(io_at(root.volumes())(e)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_at(root.volumes()))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if check_name("volume", &name).is_ok() && record_path(root, &name).exists() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Makes the volume not exist any more: record, authority and key. Its replica directories are the caller's affair,
    /// and gone already. The caller holds the volume's lock.
    ///
    /// # Errors
    /// A file cannot be removed; calling again goes on.
    pub fn remove(&self, root: &Root) -> Result<(), RecordError> {
        Self::remove_unread(root, &self.name)
    }

    /// The same of a volume whose record cannot be read.
    ///
    /// # Errors
    /// As there.
    pub fn remove_unread(root: &Root, volume: &str) -> Result<(), RecordError> {
        let dir = root.volume(volume);
        let path = record_path(root, volume);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_at(path)(e)),
            _ => sync_dir(&dir).map_err(io_at(dir.clone()))?,
        }
        fs::remove_dir_all(&dir).map_err(io_at(dir))?;
        sync_dir(&root.volumes()).map_err(io_at(root.volumes()))
    }

    /// Refuses a volume that is not to be started or changed. Asked with the volume's lock held.
    ///
    /// # Errors
    /// `NotReady`, which says how to go on.
    pub fn check_ready(&self) -> Result<(), RecordError> {
        match self.state {
            VolumeState::Ready => Ok(()),
            state => Err(RecordError::NotReady { volume: self.name.clone(), state }),
        }
    }

    /// The volume's authority.
    pub fn authority(&self, root: &Root) -> Authority {
        Authority::in_directory(&root.volume(&self.name))
    }

    /// The replica of that name.
    pub fn replica(&self, name: &str) -> Option<&ReplicaRecord> {
        self.replicas.iter().find(|r| r.name == name)
    }

    /// True for a replica that no majority has, as an engine that starts takes it
    /// (`docs/decisions/0023-the-second-of-a-majority-learns-first.md`).
    pub fn learns(&self, replica: &ReplicaRecord) -> bool {
        let counted = self.replicas.iter().filter(|r| !r.learner).count();
        let one_learns = self.quorum == Quorum::Majority && (counted, self.replicas.len()) == (1, 2);
        one_learns && replica.learner
    }

    /// The replicas of which a majority is one.
    pub fn counted(&self) -> impl Iterator<Item = &ReplicaRecord> {
        self.replicas.iter().filter(|replica| !self.learns(replica))
    }

    fn check(&self) -> Result<(), RecordError> {
        let invalid = |text: String| Err(RecordError::Invalid(text));
        check_name("volume", &self.name)?;
        if self.size == 0 || !self.size.is_multiple_of(BLOCK) || i64::try_from(self.size).is_err() {
            return invalid(format!("a volume cannot have {} bytes", self.size));
        }
        if ![512, 4096].contains(&self.block_size) {
            return invalid(format!(
                "a logical block of {} bytes is not possible: 512 or 4096 is",
                self.block_size
            ));
        }
        if !(1..=SNAPSHOT_COUNT).contains(&self.snapshot_max_count) {
            return invalid(format!(
                "{} cannot be the limit for snapshots: 1 to {SNAPSHOT_COUNT} can",
                self.snapshot_max_count
            ));
        }
        if self.replicas.is_empty() || self.replicas.len() > usize::from(REPLICAS_MAX) {
            return invalid(format!(
                "a volume has 1 to {REPLICAS_MAX} replicas, not {}",
                self.replicas.len()
            ));
        }
        for (i, replica) in self.replicas.iter().enumerate() {
            lh_block::check_process_name("replica", &replica.name)?;
            if !replica.directory.is_absolute() {
                return invalid(format!("replica directory {} is not absolute", replica.directory.display()));
            }
            let earlier = &self.replicas[..i];
            if earlier.iter().any(|r| r.name == replica.name || r.directory == replica.directory) {
                return invalid(format!("replica {} is there twice", replica.name));
            }
        }
        Ok(())
    }
}

fn record_path(root: &Root, volume: &str) -> PathBuf {
    root.volume(volume).join("volume.json")
}

pub(super) fn io_at(path: PathBuf) -> impl FnOnce(io::Error) -> RecordError {
    move |source| RecordError::Io { path, source }
}

pub(super) fn damaged(path: &Path, reason: &dyn std::fmt::Display) -> RecordError {
    RecordError::Damaged { path: path.to_owned(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::key::read_key;
    use super::*;

    fn volume(dir: &tempfile::TempDir) -> (Root, VolumeRecord) {
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let mut record = VolumeRecord::new("demo", 1 << 30);
        for _ in 0..3 {
            record.add_replica(&root).unwrap();
        }
        (root, record)
    }

    #[test]
    fn every_key_stands_in_the_document() {
        let replica = ReplicaRecord {
            name: "demo-r-0a1b2c3d".into(),
            directory: "/r".into(),
            imported: true,
            learner: true,
        };
        // Nothing is left out of a record that has all of it.
        let record = VolumeRecord {
            format: FORMAT,
            name: "demo".into(),
            size: 1 << 30,
            block_size: 512,
            quorum: Quorum::Majority,
            frontend: "nbd-server".into(),
            listen: Some(([127, 0, 0, 1], 10_809).into()),
            io_timeout_seconds: 300,
            snapshot_max_count: SNAPSHOT_COUNT,
            snapshot_max_size: 1 << 30,
            checksum_full: true,
            state: VolumeState::Releasing,
            releasing: vec![replica.name.clone()],
            replicas: vec![replica],
        };
        assert_eq!(crate::host::document::unnamed("volume.json", &record), [""; 0]);
    }

    #[test]
    fn a_volume_begins_without_what_a_removal_left_that_was_broken_off() {
        let dir = tempfile::tempdir().unwrap();
        let (root, record) = volume(&dir);
        record.create(&root).unwrap();
        let key = fs::read(root.key("demo")).unwrap();
        let left = root.volume("demo").join("authority.json");
        fs::write(&left, "the epoch of before").unwrap();
        // The record goes first.
        fs::remove_file(record_path(&root, "demo")).unwrap();
        record.create(&root).unwrap();
        assert!(!left.exists() && fs::read(root.key("demo")).unwrap() != key);
    }

    #[test]
    fn a_volume_comes_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let (root, mut record) = volume(&dir);
        assert!(matches!(VolumeRecord::load(&root, "demo"), Err(RecordError::Missing { .. })));
        record.create(&root).unwrap();
        assert_eq!(VolumeRecord::load(&root, "demo").unwrap(), record);
        assert_eq!(VolumeRecord::list(&root).unwrap(), ["demo"]);
        let key = read_key(&root.key("demo")).unwrap();
        record.io_timeout_seconds = 0;
        record.store(&root).unwrap();
        assert_eq!(VolumeRecord::load(&root, "demo").unwrap().io_timeout_seconds, 0);
        assert_eq!(read_key(&root.key("demo")).unwrap(), key);
        record.remove(&root).unwrap();
        assert!(VolumeRecord::list(&root).unwrap().is_empty());
        assert!(!root.volume("demo").exists());
    }

    #[test]
    fn every_file_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let (root, record) = volume(&dir);
        record.create(&root).unwrap();
        record.authority(&root).issue_generation(Default::default()).unwrap();
        let mut seen = 0;
        for entry in fs::read_dir(root.volume("demo")).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", entry.path());
            seen += 1;
        }
        assert_eq!(seen, 5, "record, key, authority, its room and its lock");
    }

    #[test]
    fn bad_names_and_values_never_reach_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let (root, good) = volume(&dir);
        for name in ["", "..", "../x", "a/b", ".hidden"] {
            assert!(matches!(VolumeRecord::load(&root, name), Err(RecordError::Name(_))), "{name}");
            assert!(VolumeRecord { name: name.into(), ..good.clone() }.create(&root).is_err(), "{name}");
        }
        for bad in [
            VolumeRecord { size: 4097, ..good.clone() },
            VolumeRecord { size: 0, ..good.clone() },
            VolumeRecord { block_size: 1024, ..good.clone() },
            VolumeRecord { replicas: Vec::new(), ..good.clone() },
            VolumeRecord { replicas: vec![good.replicas[0].clone(); 2], ..good.clone() },
        ] {
            assert!(matches!(bad.create(&root), Err(RecordError::Invalid(_))));
        }
        assert!(fs::read_dir(root.volumes()).unwrap().next().is_none());
    }

    #[test]
    fn damaged_records_are_named_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (root, record) = volume(&dir);
        record.create(&root).unwrap();
        let path = record_path(&root, "demo");
        let good = fs::read_to_string(&path).unwrap();
        let elsewhere = good.replace("\"name\": \"demo\"", "\"name\": \"other\"");
        let never = good.replace("\"format\": 1", "\"format\": 0");
        for content in ["", "null", &good[..good.len() / 2], &elsewhere, &never] {
            fs::write(&path, content).unwrap();
            assert!(
                matches!(VolumeRecord::load(&root, "demo"), Err(RecordError::Damaged { .. })),
                "{content}"
            );
        }
        assert_eq!(VolumeRecord::list(&root).unwrap(), ["demo"]);
        // That one is nobody's to replace.
        for content in
            [good.replace("\"format\": 1", "\"format\": 2"), "{\"format\": 3, \"other\": []}".to_owned()]
        {
            fs::write(&path, &content).unwrap();
            assert!(matches!(VolumeRecord::load(&root, "demo"), Err(RecordError::Newer { .. })), "{content}");
        }
    }
}
