//! The small files in `engine/`: one fact each, replaced whole, with a checksum.
//!
//! A record is a line `longhorn NAME 1 CRC32C` and a line of JSON; the checksum covers name and JSON. A record that does
//! not fit its checksum is an error of the directory, never a missing record: what it would have said is not known.
//! Records that are void when the directory was written by another program name the volume's id (see
//! [`super::owner`]).

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use lh_block::{Epoch, Generation, Instance};
use lh_wire::{ChainOp, Kept, Outsider, PowerSince};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ENGINE;
use super::disk::read_small;
use super::error::{Damage, OpenError};
use super::fs::Fs;
use super::id::Id;

/// A record may carry labels and members; it is still small.
const RECORD_MAX: usize = 128 << 10;

/// A kind of record.
pub(super) trait Record: Serialize + DeserializeOwned {
    /// Its file name in `engine/`.
    const NAME: &'static str;
}

/// Ties our records to volume.meta.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// The id that volume.meta carries as an attribute.
    pub(super) volume: Id,
    /// Taken over from another program, and no epoch stored since.
    pub(super) imported: bool,
}

/// The highest generation ever accepted. Holds whoever wrote the directory since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Fence {
    pub(super) generation: Generation,
    pub(super) instance: Instance,
}

/// The epoch stored last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EpochRecord {
    pub(super) volume: Id,
    pub(super) epoch: Epoch,
    /// Who is out, and was in an epoch that this replica has seen.
    #[serde(default)]
    pub(super) out: Vec<Outsider>,
}

/// Where chain operations stand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ChainRecord {
    pub(super) volume: Id,
    pub(super) prepared: Option<Prepared>,
    /// The last operation carried out.
    pub(super) committed: Option<Instance>,
    /// The layers up to this snapshot are stable on every member.
    pub(super) settled: Option<String>,
}

/// A prepared operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Prepared {
    pub(super) id: Instance,
    pub(super) op: ChainOp,
    /// For a snapshot: what the switch does.
    pub(super) switch: Option<Switch>,
    /// For a removal: the snapshot was marked before.
    #[serde(default)]
    pub(super) was_removed: bool,
}

/// The change of heads that a snapshot makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Switch {
    /// File name of the head that becomes the snapshot.
    pub(super) old_head: String,
    /// File name of the head that comes.
    pub(super) new_head: String,
    /// The new head's zero map.
    pub(super) layer: Id,
}

/// Which of the two files stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// The removed snapshot's file gets the child's blocks, and then its name.
    IntoParent,
    /// The child's file gets the removed snapshot's blocks.
    IntoChild,
}

/// A fold that has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FoldRecord {
    pub(super) volume: Id,
    /// The removed snapshot.
    pub(super) name: String,
    /// Name of the layer above it; empty for the head, `None` if there is none.
    pub(super) child: Option<String>,
    pub(super) direction: Direction,
    /// What lies before this offset is in the parent, on stable storage.
    pub(super) done: u64,
    /// All is copied, and the names are being changed.
    pub(super) switch: Option<FoldSwitch>,
}

/// What the change of names at the end of a fold has to know, whatever of it is done already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FoldSwitch {
    /// File name of the removed snapshot's parent, or empty.
    pub(super) parent: String,
    /// File name of the child.
    pub(super) child_file: Option<String>,
    /// The zero map of the file that goes.
    pub(super) map: Option<Id>,
}

/// The replica is unusable alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rebuild {
    pub(super) volume: Id,
    /// The volume's size.
    pub(super) size: u64,
    /// The layers are being replaced: what lies in the directory is neither the old nor the new form.
    pub(super) emptying: bool,
    /// The layers are those of the record `epoch`, but for what was written since and for this.
    #[serde(default)]
    pub(super) kept: Option<Kept>,
    /// What the record `epoch` is to say once the replica is whole.
    #[serde(default)]
    pub(super) next: Option<EpochRecord>,
    /// It is whole, and `next` counts: what is left of the end is done by whoever opens the directory.
    #[serde(default)]
    pub(super) ended: bool,
}

impl Rebuild {
    /// The layers are about to be changed.
    pub(super) const fn begun(volume: Id, size: u64) -> Self {
        Self { volume, size, emptying: true, kept: None, next: None, ended: false }
    }
}

/// The replica held everything that was answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Whole {
    pub(super) volume: Id,
    /// On this boot of the host (`/proc/sys/kernel/random/boot_id`, proc_sys_kernel(5)).
    pub(super) boot: String,
}

/// The replica was opened on this boot of its host, and lacked something by then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Power {
    pub(super) volume: Id,
    /// As in [`Whole`].
    pub(super) boot: String,
    #[serde(flatten)]
    pub(super) since: PowerSince,
}

/// Left by a clean close: nobody else has written as long as this is true.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Closed {
    pub(super) volume: Id,
    pub(super) files: Vec<ClosedFile>,
}

/// A layer's file as the clean close left it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClosedFile {
    pub(super) name: String,
    pub(super) inode: u64,
    pub(super) length: u64,
    pub(super) ctime: i64,
    pub(super) ctime_nsec: i64,
    /// When its bytes were changed last: seconds, nanoseconds. Records of older programs do not have it.
    #[serde(default)]
    pub(super) mtime: Option<(i64, i64)>,
}

impl ClosedFile {
    /// What a clean close records of a file.
    pub(super) fn of(name: &str, stat: &Metadata) -> Self {
        Self {
            name: name.to_owned(),
            inode: stat.ino(),
            length: stat.len(),
            ctime: stat.ctime(),
            ctime_nsec: stat.ctime_nsec(),
            mtime: Some((stat.mtime(), stat.mtime_nsec())),
        }
    }

    /// True if nobody has written to the file, which is `now` as this says. Whoever writes to it or punches it changes both times;
    /// new owners, permissions, labels and attributes change the ctime alone.
    pub(super) fn is_still(&self, now: &Self) -> bool {
        let is_same = (&self.name, self.inode, self.length) == (&now.name, now.inode, now.length);
        let is_unchanged = (self.ctime, self.ctime_nsec) == (now.ctime, now.ctime_nsec);
        is_same && (is_unchanged || (self.mtime.is_some() && self.mtime == now.mtime))
    }
}

/// The directory was closed cleanly, and is being released: its layers' files change, and no bytes that are read of them do. Goes when
/// somebody else is about to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Releasing {
    pub(super) volume: Id,
    /// The highest generation accepted by then. With another one an engine has had it since, by a program that knows nothing of this
    /// record and has left it there. Such records of older programs as do not have it say nothing.
    #[serde(default)]
    pub(super) generation: Option<Generation>,
}

impl Releasing {
    /// That of a directory with this fence.
    pub(super) fn of(volume: Id, fence: Option<&Fence>) -> Self {
        Self { volume, generation: Some(fence.map(|fence| fence.generation).unwrap_or_default()) }
    }
}

/// The directory is being created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Creating {}

impl Record for Identity {
    const NAME: &'static str = "identity";
}
impl Record for Fence {
    const NAME: &'static str = "fence";
}
impl Record for EpochRecord {
    const NAME: &'static str = "epoch";
}
impl Record for ChainRecord {
    const NAME: &'static str = "chain";
}
impl Record for FoldRecord {
    const NAME: &'static str = "fold";
}
impl Record for Rebuild {
    const NAME: &'static str = "rebuilding";
}
impl Record for Whole {
    const NAME: &'static str = "whole";
}
impl Record for Power {
    const NAME: &'static str = "power";
}
impl Record for Closed {
    const NAME: &'static str = "closed";
}
impl Record for Releasing {
    const NAME: &'static str = "releasing";
}
impl Record for Creating {
    const NAME: &'static str = "creating";
}

fn checksum(name: &str, json: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(name.as_bytes()), json)
}

fn encode<R: Record>(record: &R) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(record)?;
    let mut bytes = format!("longhorn {} 1 {:08x}\n", R::NAME, checksum(R::NAME, &json)).into_bytes();
    bytes.extend_from_slice(&json);
    bytes.push(b'\n');
    Ok(bytes)
}

fn decode<R: Record>(bytes: &[u8]) -> Option<R> {
    let bytes = bytes.strip_suffix(b"\n").filter(|b| b.len() < RECORD_MAX)?;
    let line = bytes.iter().position(|b| *b == b'\n')?;
    let (head, json) = (&bytes[..line], &bytes[line + 1..]);
    let right = format!("longhorn {} 1 {:08x}", R::NAME, checksum(R::NAME, json));
    if head != right.as_bytes() {
        return None;
    }
    serde_json::from_slice(json).ok()
}

/// The records of one directory.
#[derive(Clone, Debug)]
pub(super) struct Records<'a> {
    /// The replica directory.
    pub(super) directory: &'a Path,
}

impl Records<'_> {
    /// Reads a record; `None` if there is none.
    pub(super) fn load<R: Record>(&self) -> Result<Option<R>, OpenError> {
        let path = self.directory.join(ENGINE).join(R::NAME);
        match read_small(&path, RECORD_MAX) {
            Ok(bytes) => decode(&bytes).map(Some).ok_or_else(|| OpenError::Damaged {
                dir: self.directory.to_owned(),
                damage: Damage::Record(R::NAME.into()),
            }),
            Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(OpenError::Io { what: format!("reading {}", path.display()), source }),
        }
    }

    /// Makes a record durable. One that would not be read again is not written: the one before stays.
    pub(super) fn store<R: Record>(&self, fs: &Fs, record: &R) -> io::Result<()> {
        let bytes = encode(record)?;
        if bytes.len() > RECORD_MAX {
            let length = bytes.len();
            return Err(io::Error::other(format!(
                "{} would take {length} bytes, and {RECORD_MAX} are read",
                R::NAME
            )));
        }
        fs.replace(&self.directory.join(ENGINE), R::NAME, &bytes, None)
    }

    /// Removes a record, durably.
    pub(super) fn remove<R: Record>(&self, fs: &Fs) -> io::Result<()> {
        let engine = self.directory.join(ENGINE);
        fs.remove(&engine.join(R::NAME))?;
        fs.sync_directory(&engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_of_a_record_is_noticed() {
        let fence = Fence { generation: Generation::from(7 << 32 | 1), instance: Instance(5) };
        let good = encode(&fence).unwrap();
        assert_eq!(decode::<Fence>(&good), Some(fence));
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode::<Fence>(&bad), None, "bit {bit}");
        }
        for cut in 0..good.len() {
            assert_eq!(decode::<Fence>(&good[..cut]), None, "{cut} bytes");
        }
    }

    #[test]
    fn a_record_under_another_name_is_none() {
        let identity = Identity { volume: Id::parse(&[b'a'; 32]).unwrap(), imported: false };
        assert_eq!(decode::<Fence>(&encode(&identity).unwrap()), None);
    }

    #[test]
    fn a_rotten_record_is_not_a_missing_one() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(ENGINE)).unwrap();
        let records = Records { directory: dir.path() };
        assert!(records.load::<Fence>().unwrap().is_none());
        let fence = Fence { generation: Generation::from(1), instance: Instance(1) };
        records.store(&Fs::default(), &fence).unwrap();
        assert_eq!(records.load::<Fence>().unwrap(), Some(fence));
        std::fs::write(dir.path().join("engine/fence"), b"").unwrap();
        assert!(matches!(
            records.load::<Fence>(),
            Err(OpenError::Damaged { damage: Damage::Record(name), .. }) if name == "fence"
        ));
    }

    #[test]
    fn what_would_not_be_read_again_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(ENGINE)).unwrap();
        let records = Records { directory: dir.path() };
        let volume = Id::parse(&[b'a'; 32]).unwrap();
        let said = |name: String| FoldRecord {
            volume,
            name,
            child: None,
            direction: Direction::IntoChild,
            done: 0,
            switch: None,
        };
        let spare = RECORD_MAX - encode(&said(String::new())).unwrap().len();
        let longest = said("n".repeat(spare));
        records.store(&Fs::default(), &longest).unwrap();
        let refused = records.store(&Fs::default(), &said("n".repeat(spare + 1))).unwrap_err();
        assert_eq!(refused.to_string(), "fold would take 131073 bytes, and 131072 are read");
        assert_eq!(records.load::<FoldRecord>().unwrap(), Some(longest));
    }

    #[test]
    fn names_are_none_that_longhorn_reads() {
        for name in [
            Identity::NAME,
            Fence::NAME,
            EpochRecord::NAME,
            ChainRecord::NAME,
            Rebuild::NAME,
            Whole::NAME,
            Power::NAME,
            Closed::NAME,
            Releasing::NAME,
            super::super::known::Known::NAME,
        ] {
            assert!(![".meta", ".tmp", ".checksum"].iter().any(|end| name.ends_with(end)));
            assert!(!name.contains("volume-"));
        }
    }
}
