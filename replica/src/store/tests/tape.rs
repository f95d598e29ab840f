//! A recorder of the operations that change a directory, which can stop after any of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::super::fs::Step;
use super::names::Journal;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What became of names, for tests that want to know.
    journal: Option<Journal>,
    /// Steps left before the stop.
    left: Option<usize>,
    /// It is no stop: the one step fails, and nothing behind it.
    once: bool,
    stopped: bool,
    /// Steps left before the disk is full, and whether names take space, too.
    full: Option<(usize, bool)>,
    /// Something was refused for that.
    refused: bool,
    /// Files that were made or changed and not synced, by their present name, with the length that is on stable storage.
    files: BTreeMap<PathBuf, u64>,
    /// What files hold on stable storage that were overwritten in place, past [`super::super::fs::Fs`], and not synced.
    contents: BTreeMap<PathBuf, Vec<u8>>,
    /// Files whose attributes are not.
    attributes: BTreeSet<PathBuf>,
    /// Names that came or went, and may go or come back.
    names: BTreeSet<PathBuf>,
}

impl Tape {
    pub(crate) fn stop_after(&self, steps: usize) {
        let mut state = self.state.lock().unwrap();
        state.left = Some(steps);
    }

    /// The one operation behind so many fails, and no other.
    pub(crate) fn fail_once_after(&self, steps: usize) {
        let mut state = self.state.lock().unwrap();
        (state.left, state.once) = (Some(steps), true);
    }

    /// Nothing stops any more. Returns how many steps were left.
    pub(crate) fn go_on(&self) -> Option<usize> {
        self.state.lock().unwrap().left.take()
    }

    /// The disk is full after so many operations, until [`Tape::free`]: nothing is made or written any more, nor, with `names`,
    /// linked or renamed.
    pub(crate) fn full_after(&self, steps: usize, names: bool) {
        let mut state = self.state.lock().unwrap();
        (state.full, state.refused) = (Some((steps, names)), false);
    }

    /// There is space again. True if something was refused meanwhile.
    pub(crate) fn free(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        state.full = None;
        std::mem::take(&mut state.refused)
    }

    /// Remembers changes of names from now on.
    pub(crate) fn keep(&self, journal: Journal) {
        self.state.lock().unwrap().journal = Some(journal);
    }

    /// What was remembered.
    pub(crate) fn journal(&self) -> Option<Journal> {
        self.state.lock().unwrap().journal.take()
    }

    /// The stop was met.
    pub(crate) fn stopped(&self) -> bool {
        self.state.lock().unwrap().stopped
    }

    /// A file is about to be overwritten in place by somebody else than [`super::super::fs::Fs`]: until it is synced a power cut
    /// may bring back what it holds now.
    pub(crate) fn overwrites(&self, path: &Path) {
        let held = std::fs::read(path).unwrap();
        self.state.lock().unwrap().contents.entry(path.to_owned()).or_insert(held);
    }

    /// What a power cut may take away: content, attributes and names that were changed and not synced.
    pub(crate) fn unsynced(&self) -> Vec<PathBuf> {
        let state = self.state.lock().unwrap();
        state.files.keys().chain(&state.attributes).chain(&state.names).cloned().collect()
    }

    /// Takes from the files what a power cut may take: all of a new one, of one that was made longer what it gained, and what was
    /// overwritten.
    pub(crate) fn lose_unsynced(&self) {
        let contents = std::mem::take(&mut self.state.lock().unwrap().contents);
        contents.iter().for_each(|(path, content)| put_back(path, content));
        let files = std::mem::take(&mut self.state.lock().unwrap().files);
        for (path, length) in files.iter().filter(|(path, _)| path.is_file()) {
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(*length).unwrap();
        }
    }

    pub(crate) fn step(&self, step: Step<'_>) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if let Some(left) = &mut state.left {
            if *left == 0 {
                state.stopped = true;
                if state.once {
                    state.left = None;
                    return Err(io::Error::from_raw_os_error(libc::EIO));
                }
                return Err(io::Error::other("the power is cut"));
            }
            *left -= 1;
        }
        if let Some((left, names)) = &mut state.full {
            let takes_space = match step {
                Step::Create(_) | Step::Change(_) | Step::Attribute(_) => true,
                Step::Link(..) | Step::Rename(..) => *names,
                Step::Overwrite(_) | Step::SyncFile(_) | Step::Remove(_) | Step::SyncDirectory(_) => false,
            };
            if *left == 0 && takes_space {
                state.refused = true;
                return Err(io::ErrorKind::StorageFull.into());
            }
            *left = left.saturating_sub(1);
        }
        if let Some(journal) = &mut state.journal {
            journal.note(step);
        }
        state.note(step);
        Ok(())
    }
}

/// Blocks of zeroes are holes again: of a layer they are none of its data.
fn put_back(path: &Path, content: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).truncate(true).open(path).unwrap();
    file.set_len(content.len() as u64).unwrap();
    for (block, at) in content.chunks(4096).zip((0..).step_by(4096)) {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, at).unwrap();
        }
    }
}

impl State {
    fn note(&mut self, step: Step<'_>) {
        match step {
            Step::Create(path) => {
                self.files.insert(path.to_owned(), 0);
                self.names.insert(path.to_owned());
            }
            // Comes before the change.
            Step::Change(path) => {
                let length = path.metadata().map_or(0, |meta| meta.len());
                self.files.entry(path.to_owned()).or_insert(length);
            }
            Step::Overwrite(path) => {
                self.contents.entry(path.to_owned()).or_insert_with(|| std::fs::read(path).unwrap());
            }
            Step::Attribute(path) => drop(self.attributes.insert(path.to_owned())),
            Step::SyncFile(path) => {
                self.files.remove(path);
                self.contents.remove(path);
                self.attributes.remove(path);
            }
            Step::Rename(from, to) => {
                self.files.remove(to);
                if let Some(length) = self.files.remove(from) {
                    self.files.insert(to.to_owned(), length);
                }
                if self.attributes.remove(from) {
                    self.attributes.insert(to.to_owned());
                }
                // Both names or one: the rename is one change of the file system.
                self.names.remove(from);
                self.names.insert(to.to_owned());
            }
            Step::Link(from, to) => {
                if let Some(length) = self.files.get(from) {
                    self.files.insert(to.to_owned(), *length);
                }
                self.names.insert(to.to_owned());
            }
            Step::Remove(path) => {
                self.files.remove(path);
                self.attributes.remove(path);
                self.names.insert(path.to_owned());
            }
            Step::SyncDirectory(path) => {
                self.names.retain(|name| name.parent() != Some(path));
                self.files.remove(path);
            }
        }
    }
}
