//! What a power cut can leave of directory entries that were changed and not synced: any of the changes, in any order.
//!
//! The journal remembers which names a directory had when it was synced last, and each change since; the files themselves are
//! kept by links elsewhere. [`Journal::states`] makes every directory that a disk may then hold.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use lh_ring::sys;

use super::super::fs::Step;
use super::super::id::{LAYER_ATTRIBUTE, VOLUME_ATTRIBUTE};

/// Changes of which every subset is tried: four, and with `LH_FULL=1` six. Of more than these, all the others together are
/// done or undone.
fn all_subsets() -> usize {
    if std::env::var("LH_FULL").is_ok_and(|v| v == "1") { 6 } else { 4 }
}

/// Names and the files behind them.
type Names = BTreeMap<PathBuf, u64>;

#[derive(Clone, Debug)]
enum Change {
    Create(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Remove(PathBuf),
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Journal {
    root: PathBuf,
    /// Links to every file that there was.
    attic: PathBuf,
    durable: Names,
    changes: Vec<Change>,
}

impl Journal {
    /// Everything in `root` and its `engine/` counts as durable. `attic` is a directory of the same file system.
    pub(crate) fn new(root: &Path, attic: &Path) -> Self {
        let mut journal = Self {
            root: root.to_owned(),
            attic: attic.to_owned(),
            durable: Names::new(),
            changes: Vec::new(),
        };
        for directory in [root.to_owned(), root.join("engine")] {
            journal.durable.extend(journal.scan(&directory));
        }
        journal
    }

    /// The files of a directory, each linked into the attic.
    fn scan(&self, directory: &Path) -> Names {
        let mut names = Names::new();
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                names.insert(path.clone(), self.keep(&path));
            }
        }
        names
    }

    fn keep(&self, path: &Path) -> u64 {
        let inode = path.symlink_metadata().unwrap().ino();
        // It may be there already.
        let _ = fs::hard_link(path, self.attic.join(inode.to_string()));
        inode
    }

    /// What is about to be done.
    pub(crate) fn note(&mut self, step: Step<'_>) {
        let own = |path: &&Path| path.starts_with(&self.root);
        match step {
            Step::Create(path) if own(&path) => self.changes.push(Change::Create(path.to_owned())),
            Step::Rename(from, to) if own(&to) => {
                self.keep(from);
                self.changes.push(Change::Rename(from.to_owned(), to.to_owned()));
            }
            Step::Link(from, to) if own(&to) => {
                self.changes.push(Change::Link(from.to_owned(), to.to_owned()));
            }
            Step::Remove(path) if own(&path) => self.changes.push(Change::Remove(path.to_owned())),
            Step::SyncDirectory(directory) if own(&directory) => self.synced(directory),
            _ => {}
        }
    }

    fn synced(&mut self, directory: &Path) {
        let (durable, pending) = self.changes.drain(..).partition::<Vec<_>, _>(|change| {
            let (Change::Create(name)
            | Change::Rename(_, name)
            | Change::Link(_, name)
            | Change::Remove(name)) = change;
            name.parent() == Some(directory)
        });
        self.changes = pending;
        for change in durable {
            // A rename is one change: with the new name the old one is settled, too.
            if let Change::Rename(from, _) = change {
                self.durable.remove(&from);
            }
        }
        self.durable.retain(|name, _| name.parent() != Some(directory));
        let now = self.scan(directory);
        self.durable.extend(now);
    }

    /// Makes each directory that may be left, at `place`, and shows it.
    pub(crate) fn states(&self, place: &Path, mut show: impl FnMut(&str)) {
        let now: Names = [self.root.clone(), self.root.join("engine")]
            .iter()
            .flat_map(|directory| self.scan(directory))
            .collect();
        let count = self.changes.len();
        let all = (1_u64 << count) - 1;
        let some = (1_u64 << count.min(all_subsets())) - 1;
        let mut subsets: Vec<u64> = (0..=some).flat_map(|subset| [subset, subset | (all - some)]).collect();
        subsets.sort_unstable();
        subsets.dedup();
        // With all of them done it is the directory as it is, which is looked at anyway.
        for subset in subsets.into_iter().filter(|subset| *subset != all) {
            let mut names = self.durable.clone();
            for (n, change) in self.changes.iter().enumerate() {
                if subset >> n & 1 == 1 {
                    self.apply(change, &mut names, &now);
                }
            }
            // A copy has other inodes than a clean close has recorded.
            if names.contains_key(&self.root.join("engine/closed")) {
                continue;
            }
            self.make(&names, place);
            show(&format!("changes {subset:b} of {:?}", self.changes));
            fs::remove_dir_all(place).unwrap();
        }
    }

    fn apply(&self, change: &Change, names: &mut Names, now: &Names) {
        match change {
            Change::Create(path) => {
                // A file that was removed or renamed since is found by its later name; its own was never durable.
                if let Some(inode) = now.get(path) {
                    names.insert(path.clone(), *inode);
                }
            }
            Change::Rename(from, to) => {
                let inode = names.remove(from).or_else(|| now.get(to).copied());
                names.extend(inode.map(|inode| (to.clone(), inode)));
            }
            Change::Link(from, to) => {
                let inode = names.get(from).or_else(|| now.get(to)).copied();
                names.extend(inode.map(|inode| (to.clone(), inode)));
            }
            Change::Remove(path) => drop(names.remove(path)),
        }
    }

    /// Copies the files, holes, attributes and shared names as they are.
    fn make(&self, names: &Names, place: &Path) {
        fs::create_dir_all(place.join("engine")).unwrap();
        let mut made: BTreeMap<u64, PathBuf> = BTreeMap::new();
        for (name, inode) in names {
            let to = place.join(name.strip_prefix(&self.root).unwrap());
            match made.get(inode) {
                Some(first) => fs::hard_link(first, &to).unwrap(),
                None => {
                    copy(&self.attic.join(inode.to_string()), &to);
                    made.insert(*inode, to);
                }
            }
        }
    }
}

fn copy(from: &Path, to: &Path) {
    let (source, target) = (File::open(from).unwrap(), File::create_new(to).unwrap());
    let length = source.metadata().unwrap().len();
    target.set_len(length).unwrap();
    let mut at = 0;
    while let Some(start) = sys::seek_data(&source, at).unwrap().filter(|start| *start < length) {
        at = sys::seek_hole(&source, start).unwrap();
        let mut bytes = vec![0; usize::try_from(at - start).unwrap()];
        source.read_exact_at(&mut bytes, start).unwrap();
        target.write_all_at(&bytes, start).unwrap();
    }
    for name in [VOLUME_ATTRIBUTE, LAYER_ATTRIBUTE] {
        if let Some(value) = sys::get_xattr(&source, name).unwrap() {
            sys::set_xattr(&target, name, &value).unwrap();
        }
    }
}
