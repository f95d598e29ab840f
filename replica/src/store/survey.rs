//! What a directory says of itself, without opening it: for the decision whether a volume can be started from it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use lh_block::{BLOCK, Epoch, Generation};

use super::disk::read_small;
use super::error::{Damage, OpenError, damaged, failed};
use super::known::Known;
use super::locks::lock_directory;
use super::owner::{Owner, identified, owner};
use super::record::{Creating, EpochRecord, Fence, Rebuild, Records};
use super::release;
use super::tree;

/// How long the lock of a process that is just ending is waited for.
const PASSING: Duration = Duration::from_secs(5);

/// Where Longhorn counts the writes of a replica, if its volume asks for that.
const REVISION_COUNTER: &str = "revision.counter";

/// What a directory says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The volume's size in bytes.
    pub size: u64,
    /// The highest generation that ever fenced it.
    pub generation: Generation,
    /// The last epoch that it recorded.
    pub epoch: Option<Epoch>,
    /// A rebuild of it began and did not end, here or in the program that wrote it.
    pub rebuilding: bool,
    /// Another program has written it since its records were made, or it has none.
    pub imported: bool,
    /// Closed cleanly and not written since, but for a release that was broken off and changes no bytes.
    pub clean: bool,
    /// When its head was last written, seconds since 1970.
    pub written: u64,
    /// How many writes Longhorn has counted in it. `None`: it has not, or may have missed some, since an engine of ours had it once.
    pub revision: Option<u64>,
    /// Snapshots that are not marked as removed, parents before children.
    pub snapshots: Vec<String>,
}

/// Looks at a directory that no process uses. Changes nothing.
///
/// # Errors
/// [`OpenError`]: it is not there, in use, or damaged.
pub fn survey(path: &Path) -> Result<Survey, OpenError> {
    let _lock = lock_directory(path, false, Instant::now() + PASSING)?;
    let records = Records { directory: path };
    if records.load::<Creating>()?.is_some() {
        return Err(damaged(path, Damage::Unfinished));
    }
    let owner = owner(&records)?;
    let tree = tree::load(path)?;
    let head = path.join(&tree.volume.head);
    let head = head.symlink_metadata().map_err(failed("reading", &head))?;
    let fence = records.load::<Fence>()?;
    let (imported, epoch, rebuilding, clean) = match owner {
        Owner::Other => {
            if let Some(identity) = identified(&records)? {
                Known::check_lengths(path, identity.volume, &tree)?;
            }
            (true, None, tree.volume.rebuilding, !tree.volume.dirty)
        }
        Owner::Ours { identity, clean } => {
            Known::check_closed(path, identity.volume, &tree)?;
            let epoch = records.load::<EpochRecord>()?.filter(|e| e.volume == identity.volume);
            let rebuild = records.load::<Rebuild>()?.filter(|r| r.volume == identity.volume);
            let (ended, rebuilding): (Option<_>, Option<_>) = match rebuild {
                Some(rebuild) if rebuild.ended => (rebuild.next, None),
                rebuild => (None, rebuild),
            };
            let clean = clean || release::was_begun(&records, identity.volume)?;
            (identity.imported, ended.or(epoch).map(|e| e.epoch), rebuilding.is_some(), clean)
        }
    };
    let live = tree.layers.iter().filter(|l| !l.name.is_empty() && !l.meta.removed);
    Ok(Survey {
        size: tree.volume.size(),
        generation: fence.as_ref().map(|f| f.generation).unwrap_or_default(),
        epoch,
        rebuilding,
        imported,
        clean,
        written: u64::try_from(head.mtime()).unwrap_or(0),
        revision: (imported && fence.is_none()).then(|| revision(path)).flatten(),
        snapshots: live.map(|l| l.name.clone()).collect(),
    })
}

/// Longhorn's file: a number in ASCII, and zeroes up to the end of a block. One that cannot be read says nothing.
fn revision(path: &Path) -> Option<u64> {
    let block = usize::try_from(BLOCK).unwrap_or(0);
    let bytes = read_small(&path.join(REVISION_COUNTER), block).ok().filter(|bytes| bytes.len() <= block)?;
    let digits = bytes.split(|byte| *byte == 0).next()?;
    std::str::from_utf8(digits).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use lh_block::Instance;

    use super::super::release::Release;
    use super::super::tests::{Volume, temporary};
    use super::*;

    #[test]
    fn a_directory_is_looked_at_and_not_touched() {
        let place = temporary();
        let path = place.path().join("replica");
        let mut volume = Volume::create(&path);
        let epoch = Epoch { counter: 3, members: vec!["a".into()], id: Instance(1), ..Epoch::default() };
        volume.directory.store_epoch(epoch.clone()).unwrap();
        volume.snapshot(1, "one").unwrap();
        assert!(matches!(survey(&path), Err(OpenError::InUse { .. })), "a process has it");
        drop(volume);
        let listing = || -> Vec<_> {
            let mut names: Vec<_> =
                std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let before = (listing(), std::fs::metadata(path.join("volume.meta")).unwrap().ctime_nsec());
        let found = survey(&path).unwrap();
        assert_eq!((found.epoch, found.imported, found.rebuilding), (Some(epoch), false, false));
        assert_eq!(found.snapshots, ["one"]);
        assert_eq!(before, (listing(), std::fs::metadata(path.join("volume.meta")).unwrap().ctime_nsec()));
        // Without the attribute of volume.meta the records say nothing.
        let meta = std::fs::read(path.join("volume.meta")).unwrap();
        std::fs::remove_file(path.join("volume.meta")).unwrap();
        std::fs::write(path.join("volume.meta"), meta).unwrap();
        let found = survey(&path).unwrap();
        assert_eq!((found.epoch, found.imported), (None, true));
    }

    #[test]
    fn longhorns_counter_counts_as_long_as_longhorn_wrote_last() {
        let place = temporary();
        let path = place.path().join("replica");
        drop(Volume::create(&path));
        let counter = path.join(REVISION_COUNTER);
        let block = |text: &str| [text.as_bytes(), &[0; 4096][text.len()..]].concat();
        std::fs::write(&counter, block("43")).unwrap();
        assert_eq!(survey(&path).unwrap().revision, None, "it is ours");
        // As Longhorn leaves it, which replaces volume.meta.
        let meta = std::fs::read(path.join("volume.meta")).unwrap();
        std::fs::remove_file(path.join("volume.meta")).unwrap();
        std::fs::write(path.join("volume.meta"), meta).unwrap();
        for (bytes, says) in [
            (block("43"), Some(43)),
            (b"7\n".to_vec(), Some(7)),
            (block("many"), None),
            (Vec::new(), None),
            ([block("1"), block("2")].concat(), None),
        ] {
            std::fs::write(&counter, bytes).unwrap();
            assert_eq!(survey(&path).unwrap().revision, says);
        }
        std::fs::remove_file(&counter).unwrap();
        assert_eq!(survey(&path).unwrap().revision, None);
        // Released, it is Longhorn's again, and lacks what was counted nowhere.
        std::fs::write(&counter, block("43")).unwrap();
        Volume::open(&path).unwrap().directory.store_fence(Generation::from(1), Instance(1)).unwrap();
        Release::prepare(&path).and_then(Release::carry_out).unwrap();
        let found = survey(&path).unwrap();
        assert_eq!((found.imported, found.revision), (true, None));
    }
}
