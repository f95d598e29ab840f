//! Why a directory is not used, and why an operation on it is refused. Every text is one sentence for people that says
//! what is wrong with which file, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use lh_block::{Instance, LAYERS_MAX, NameError, format_size};
use thiserror::Error;

use super::qcow2::Qcow2Fault;
use super::room::is_full;

/// What to do about a damaged directory: always the same, since the other replicas hold the data.
const REBUILD: &str =
    "take this replica out of the volume and let it be rebuilt, or restore the file from a copy";

/// What is wrong with the files of a directory. Whoever opens it decides nothing by the variant but whether to believe
/// the replica: never. The variants keep apart what a person has to look at.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Damage {
    /// Longer than any metadata file can be.
    #[error("{0} is larger than 64 KiB, which no metadata file is: {REBUILD}")]
    MetaTooLarge(String),
    /// Ends in the middle.
    #[error("{0} is cut off: {REBUILD}")]
    MetaCutOff(String),
    /// No JSON.
    #[error("{file} is not JSON ({reason}): {REBUILD}")]
    MetaNotJson {
        /// The file.
        file: String,
        /// What the parser says.
        reason: String,
    },
    /// JSON of another form.
    #[error("{file} does not have the fields of its kind ({reason}): {REBUILD}")]
    MetaFields {
        /// The file.
        file: String,
        /// What the parser says.
        reason: String,
    },
    /// Zero or negative volume size.
    #[error("volume.meta names the size {0}, which no volume has: {REBUILD}")]
    SizeNotPositive(i64),
    /// Volume size beyond any.
    #[error("volume.meta names the size {0}, and the largest volume has 1 PiB: {REBUILD}")]
    SizeTooLarge(u64),
    /// Volume size that is not made of blocks.
    #[error("volume.meta names the size {0}, which is not a multiple of 4096: {REBUILD}")]
    SizeUnaligned(u64),
    /// Another sector size than Longhorn's.
    #[error("volume.meta names the sector size {0}, Longhorn's is 512: {REBUILD}")]
    SectorSize(i64),
    /// Longhorn has noted an error.
    #[error("volume.meta carries the error {0:?}, so the data is not to be trusted: {REBUILD}")]
    NotedError(String),
    /// The head's name is no head's name, or leaves the directory.
    #[error(
        "volume.meta names the head {0:?}, which is not a volume-head-NNN.img of this directory: {REBUILD}"
    )]
    HeadName(String),
    /// The head's file is not there.
    #[error("the head {0} is not in the directory: {REBUILD}")]
    HeadMissing(String),
    /// The head's file is shorter than the volume.
    #[error("the head {file} is {length} bytes long and the volume {size}: it was cut off; {REBUILD}")]
    HeadShort {
        /// The file.
        file: String,
        /// Its length.
        length: u64,
        /// The volume's size.
        size: u64,
    },
    /// The head is marked as removed.
    #[error("{0}.meta marks the head as removed: {REBUILD}")]
    HeadRemoved(String),
    /// volume.meta and the head's meta disagree.
    #[error("volume.meta names the parent {volume:?} and {head}.meta {meta:?}: {REBUILD}")]
    HeadParent {
        /// The head's file.
        head: String,
        /// Parent by volume.meta.
        volume: String,
        /// Parent by the head's meta.
        meta: String,
    },
    /// No volume.meta and nothing to make it from.
    #[error(
        "volume.meta is missing and there is no volume-head-NNN.img to make it from: this is no replica directory"
    )]
    NothingHere,
    /// No volume.meta and several heads.
    #[error(
        "volume.meta is missing and the directory has several heads ({0}): restore volume.meta, or move away every head but the right one"
    )]
    ManyHeads(String),
    /// No volume.meta, but marks of ours that the files alone are not the volume.
    #[error(
        "volume.meta is missing, and the files alone are not the volume (it has zero marks or an unfinished rebuild): {REBUILD}"
    )]
    MarksWithoutVolume,
    /// A parent's name is no snapshot's file name.
    #[error(
        "{file}.meta names the parent {parent:?}, which is not a volume-snap-NAME.img of this directory: {REBUILD}"
    )]
    ParentName {
        /// The layer.
        file: String,
        /// The parent.
        parent: String,
    },
    /// A parent is not there.
    #[error("{file} stands on {parent}, which is not in the directory: {REBUILD}")]
    ParentMissing {
        /// The layer.
        file: String,
        /// The parent.
        parent: String,
    },
    /// The chain comes back to itself.
    #[error("the chain of {0} is a loop, it comes back to its beginning: {REBUILD}")]
    Loop(String),
    /// A layer without its meta.
    #[error("{0} has no .meta beside it: {REBUILD}")]
    MetaMissing(String),
    /// A snapshot's meta without its file.
    #[error("{0}.meta is there and {0} is not: {REBUILD}")]
    ImageMissing(String),
    /// A layer longer than the volume.
    #[error("{file} is {length} bytes long and the volume {size}: {REBUILD}")]
    LayerTooLong {
        /// The file.
        file: String,
        /// Its length.
        length: u64,
        /// The volume's size.
        size: u64,
    },
    /// A layer shorter than it was when this program had it.
    #[error(
        "{file} is {length} bytes long and was {known}: it was cut off, and what is missing would read as older data; {REBUILD}"
    )]
    LayerShort {
        /// The file.
        file: String,
        /// Its length.
        length: u64,
        /// Its length before.
        known: u64,
    },
    /// Another file than the one that this program made.
    #[error(
        "{0} is not the file that was there: it was replaced while the replica was not running; take this replica out of the volume and let it be rebuilt, or put that file back, with its extended attributes"
    )]
    LayerReplaced(String),
    /// A layer that is not made of blocks.
    #[error("{file} is {length} bytes long, which is not a multiple of 4096: {REBUILD}")]
    LayerUnaligned {
        /// The file.
        file: String,
        /// Its length.
        length: u64,
    },
    /// Not a plain file (a link, a directory, a device).
    #[error("{0} is not a plain file: put the file itself there")]
    NotAFile(String),
    /// More layers than Longhorn can open.
    #[error("the directory has {0} layers, and Longhorn opens at most {LAYERS_MAX}: {REBUILD}")]
    TooManyLayers(usize),
    /// The backing file is not there.
    #[error("the backing file {0} is not there: put it back in its place")]
    BackingMissing(PathBuf),
    /// A backing directory that does not hold exactly one file.
    #[error("the backing directory {0} does not hold exactly one file: leave only the backing file in it")]
    BackingDirectory(PathBuf),
    /// A qcow2 image that is not read.
    #[error("the backing file {file} is a qcow2 image that {fault}")]
    BackingQcow2 {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        fault: Qcow2Fault,
    },
    /// A backing file that cannot be one.
    #[error(
        "the backing file {file} holds {length} bytes, which is not a multiple of 512 that fits the volume of {size}: put the right file there"
    )]
    BackingLength {
        /// The file.
        file: PathBuf,
        /// Its length, or that of the disk in a qcow2 image.
        length: u64,
        /// The volume's size.
        size: u64,
    },
    /// The files alone are not the volume.
    #[error(
        "volume.meta says that this replica is being rebuilt, so it is not usable alone: import another replica of the volume"
    )]
    Rebuilding,
    /// A record of ours is rotten.
    #[error("engine/{0} is damaged: {REBUILD}")]
    Record(String),
    /// A zero map's page is rotten.
    #[error(
        "page {page} of engine/{file} is damaged, so zeroed blocks cannot be told from older data: {REBUILD}"
    )]
    ZeroPage {
        /// The file.
        file: String,
        /// The page, from 1.
        page: u64,
    },
    /// A zero map's header is rotten.
    #[error("engine/{0} is not a zero map of this program: {REBUILD}")]
    ZeroHeader(String),
    /// A layer without the zero map that it was made with.
    #[error(
        "the zero map of {0} is missing in engine/, so zeroed blocks cannot be told from older data: {REBUILD}"
    )]
    ZeroMissing(String),
    /// A zero map of a layer that is not there.
    #[error(
        "engine/{0} belongs to a layer that is not in the directory, so a layer was replaced or lost: {REBUILD}"
    )]
    ZeroOrphan(String),
    /// The directory's creation was not finished.
    #[error("the directory was not completely created: delete it, or create it again")]
    Unfinished,
}

/// Why a directory was not opened or created.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The files contradict themselves.
    #[error("{}: {damage}", dir.display())]
    Damaged {
        /// The replica directory.
        dir: PathBuf,
        /// What is wrong.
        damage: Damage,
    },
    /// The directory is not there.
    #[error("{} is not there, or is not a directory: check the path", .0.display())]
    NoDirectory(PathBuf),
    /// Something is there already.
    #[error("{} is not empty: choose another directory, or open it instead of creating it", .0.display())]
    NotEmpty(PathBuf),
    /// Another process holds it, or what one that has ended left in flight does.
    #[error("{} is in use {holder}", file.display())]
    InUse {
        /// The locked file.
        file: PathBuf,
        /// By whom, and what is to be done: "by process N (NAME): stop it first".
        holder: String,
    },
    /// No such snapshot.
    #[error("{}: there is no snapshot {name:?}: it has {known}", dir.display())]
    NoSnapshot {
        /// The replica directory.
        dir: PathBuf,
        /// What was asked for.
        name: String,
        /// Names of those that are there.
        known: String,
    },
    /// The snapshot's bytes are not to be relied on.
    #[error("{}: {why}", dir.display())]
    NotLasting {
        /// The replica directory.
        dir: PathBuf,
        /// Which one, why, and what to do.
        why: NotLasting,
    },
    /// A size that no volume has.
    #[error("a volume of {0} bytes is not possible: the size must be a positive multiple of 4096")]
    BadSize(u64),
    /// Beyond what the file system, or this program, can hold.
    #[error(
        "a volume of {} does not fit: on the file system of {} it can have at most {}",
        format_size(*size), dir.display(), format_size(*limit)
    )]
    TooLarge {
        /// The replica directory.
        dir: PathBuf,
        /// What was asked for.
        size: u64,
        /// The largest file.
        limit: u64,
    },
    /// The file system cannot keep layers.
    #[error("the file system of {} cannot keep replicas, because {reason}: use ext4 or XFS with blocks of 4 KiB", dir.display())]
    FileSystem {
        /// The replica directory.
        dir: PathBuf,
        /// What it lacks.
        reason: &'static str,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with the file's name.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

/// Turns an error of the disk into one with the name of what was tried.
pub(super) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    move |source| OpenError::Io { what: format!("{what} {}", path.display()), source }
}

pub(super) fn damaged(directory: &Path, damage: Damage) -> OpenError {
    OpenError::Damaged { dir: directory.to_owned(), damage }
}

/// Why a snapshot's bytes are not to be relied on.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NotLasting {
    /// It was there, and was folded away.
    #[error("there is no snapshot {0} any more: choose another one, or take a new one")]
    Gone(String),
    /// The name has gone to another one.
    #[error("there is another snapshot {0} by now: begin again, or choose another one")]
    Another(String),
    /// It is marked as removed.
    #[error(
        "snapshot {0} is being removed, and what was written after it may be in it: choose another one, or take a new one"
    )]
    Removed(String),
    /// It may not be all there.
    #[error(
        "snapshot {0} is not known to be on stable storage on every replica yet: try again when the volume is up and its replicas \
         are in sync, or choose an older one"
    )]
    Unsettled(String),
}

/// Why an operation on the chain was refused. Unless it is [`ChainError::Io`], nothing has changed.
#[derive(Debug, Error)]
pub enum ChainError {
    /// Another operation is prepared and neither carried out nor taken back.
    #[error("another operation ({:032x}) is prepared: finish it or take it back first", .0.0)]
    OtherPrepared(Instance),
    /// No such operation is prepared.
    #[error("operation {:032x} was not prepared here", .0.0)]
    NotPrepared(Instance),
    /// It was carried out: there is no way back.
    #[error("operation {:032x} was carried out and cannot be taken back", .0.0)]
    Committed(Instance),
    /// A name that cannot be used.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Labels that do not fit into a metadata file.
    #[error(
        "the labels of snapshot {0:?} are longer than the 64 KiB that its file may have: use fewer or shorter ones"
    )]
    LabelsTooLong(String),
    /// Labels that leave too little room to tell of all snapshots.
    #[error(
        "with the labels of snapshot {snapshot:?} all snapshots take {bytes} bytes where they are told of: use fewer or shorter labels, or \
         remove snapshots that have long ones"
    )]
    ChainTooLong {
        /// The snapshot.
        snapshot: String,
        /// What they would take.
        bytes: usize,
    },
    /// The snapshot's name is taken.
    #[error("a snapshot {0:?} exists already: choose another name")]
    NameTaken(String),
    /// As many snapshots as Longhorn can open.
    #[error("the volume has {0} snapshots, the most that Longhorn can open: remove and purge some first")]
    TooMany(usize),
    /// As many as somebody allows.
    #[error(
        "the volume has {0} snapshots, and this replica takes no more: remove some first, or raise the limit"
    )]
    CountLimit(usize),
    /// Together they take more than somebody allows.
    #[error(
        "with another snapshot they would take {}, and this replica takes {}: remove some first, or raise the limit",
        format_size(*bytes), format_size(*limit)
    )]
    SizeLimit {
        /// What head and snapshots take.
        bytes: u64,
        /// What they may take.
        limit: u64,
    },
    /// No such snapshot.
    #[error("there is no snapshot {0:?}")]
    NoSnapshot(String),
    /// The snapshot is marked as removed: it may be half folded.
    #[error("snapshot {0:?} is marked as removed and may be half folded: choose another one")]
    Removed(String),
    /// Only a removed snapshot is folded away.
    #[error("snapshot {0:?} is not marked as removed: remove it first")]
    NotRemoved(String),
    /// Each of several layers would need what the snapshot holds.
    #[error(
        "{children} layers stand on snapshot {name:?}, and it can be folded into one only: fold them first"
    )]
    ManyChildren {
        /// The snapshot.
        name: String,
        /// Layers that stand on it.
        children: usize,
    },
    /// Not while a rebuild is not complete.
    #[error("this replica is being rebuilt: try again when that is done")]
    Rebuilding,
    /// Volumes never shrink.
    #[error(
        "the volume has {} and cannot become {}: a volume only grows",
        format_size(*now), format_size(*size)
    )]
    NotLarger {
        /// What was asked for.
        size: u64,
        /// What it has.
        now: u64,
    },
    /// A chain that no replica can have.
    #[error("the chain that was sent is not one: {0}")]
    BadChain(&'static str),
    /// The directory cannot hold it.
    #[error(transparent)]
    Directory(Box<OpenError>),
    /// A size that no volume has.
    #[error("a volume of {0} bytes is not possible: the size must be a positive multiple of 4096")]
    BadSize(u64),
    /// The file system is full; what was made is taken away again.
    #[error("no space left for {0}: free some, then try again")]
    NoSpace(String),
    /// A layer more needs files that this process may not open.
    #[error(
        "no more files can be opened for {0}: remove snapshots, or raise the limit of open files (LimitNOFILE= of a service) \
         and start the volume anew"
    )]
    NoDescriptors(String),
    /// The disk failed, or would hold something that nobody knows: the replica is to be put out.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with the file's name.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl From<Box<OpenError>> for ChainError {
    /// That the disk is full says nothing about the directory.
    fn from(error: Box<OpenError>) -> Self {
        match *error {
            OpenError::Io { what, source } if is_full(&source) => Self::NoSpace(what),
            other => Self::Directory(other.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_with_what_to_do_also_where_the_directory_is_tried_out() {
        let tried = |kind: io::ErrorKind| {
            let what = "trying out /r/engine/probe".to_owned();
            ChainError::from(Box::new(OpenError::Io { what, source: kind.into() }))
        };
        let full = "no space left for trying out /r/engine/probe: free some, then try again";
        assert_eq!(tried(io::ErrorKind::StorageFull).to_string(), full);
        assert!(matches!(tried(io::ErrorKind::QuotaExceeded), ChainError::NoSpace(_)));
        assert!(matches!(tried(io::ErrorKind::PermissionDenied), ChainError::Directory(_)));
    }
}
