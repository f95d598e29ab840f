//! The authority of a volume on a bare host: a file that issues attachment numbers and stores the epoch that counts.
//!
//! A number is issued once, for ever: it is durable before the caller learns it. An epoch replaces exactly the one that
//! its maker knew (compare-and-swap on generation and counter), so that of two engines only one can go on
//! (`docs/invariants.md`, 2 and 12). Both hold between processes by a lock file, which is never replaced.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use lh_block::{Epoch, Generation};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::durable::replace_file_in_its_room;
use super::format::newer_than;

/// The version of the file that this program writes; it reads no other.
const FORMAT: u32 = 1;

/// Why the authority did not do what it was asked.
#[derive(Debug, Error)]
pub enum AuthorityError {
    /// Another engine has stored an epoch since the caller read it: the caller is no longer the one.
    #[error("the epoch was replaced by another engine's ({0:?})")]
    Replaced(Option<(Generation, u64)>),
    /// The epoch does not come after the one it replaces. Nothing was stored.
    #[error("epoch {0:?} does not come after {1:?}")]
    NotNewer((Generation, u64), (Generation, u64)),
    /// No attachment number is left.
    #[error("no generation is left above {0}")]
    Exhausted(Generation),
    /// The file is not one that this program wrote.
    #[error(
        "{} is damaged ({reason}): restore it from a copy, or stop the volume and have `longhornctl salvage {}` replace it by what the \
         replicas hold", path.display(), volume_of(path)
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A newer version has written it. Nobody replaces it: the epoch that counts is in it.
    #[error("{} is of format {format}, which a newer version of this program has written: use that one", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// The format that it says.
        format: u32,
    },
    /// The file could not be read or written; nothing is known to be stored.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The volume whose record's directory the file is in.
fn volume_of(file: &Path) -> String {
    let directory = file.parent().and_then(Path::file_name);
    directory.map_or_else(|| "VOLUME".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The file's content.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Content {
    format: u32,
    /// The highest generation issued.
    generation: Generation,
    /// The epoch that counts, if an engine ever stored one.
    epoch: Option<Epoch>,
}

/// A volume's authority. Each call takes the file's lock and reads it anew, so that any number of processes may have one.
#[derive(Clone, Debug)]
pub struct Authority {
    file: PathBuf,
    lock: PathBuf,
}

impl Authority {
    /// The authority in a volume's record directory. Nothing is opened yet; a file that is not there counts as one
    /// that has issued and stored nothing.
    pub fn in_directory(volume_dir: &Path) -> Self {
        Self { file: volume_dir.join("authority.json"), lock: volume_dir.join("authority.lock") }
    }

    /// The generation of a new attachment: above everything issued or stored here and above `highest_seen` on any replica.
    /// Durable before it returns.
    ///
    /// # Errors
    /// `Exhausted`, `Damaged`, `Newer`, `Io`. A number may then be lost, which is no harm.
    pub fn issue_generation(&self, highest_seen: Generation) -> Result<Generation, AuthorityError> {
        self.change(|content| {
            // Its engine may have been started with a number that nobody issued.
            let counts = content.epoch.as_ref().map_or_else(Generation::default, |epoch| epoch.generation);
            let highest = content.generation.max(counts).max(highest_seen);
            if highest.attachment == u32::MAX {
                return Err(AuthorityError::Exhausted(highest));
            }
            content.generation = highest.next_attachment();
            Ok(content.generation)
        })
    }

    /// The highest generation issued so far; zero if none was.
    ///
    /// # Errors
    /// `Damaged`, `Newer`, `Io`.
    pub fn generation(&self) -> Result<Generation, AuthorityError> {
        Ok(self.read()?.generation)
    }

    /// The highest generation that an engine is known to have had here: one that was started again, or exchanged, has none that was
    /// issued.
    ///
    /// # Errors
    /// `Damaged`, `Newer`, `Io`.
    pub fn highest_generation(&self) -> Result<Generation, AuthorityError> {
        let content = self.read()?;
        Ok(content.epoch.map_or(content.generation, |epoch| epoch.generation.max(content.generation)))
    }

    /// The epoch that counts; `None` before the first one was stored.
    ///
    /// # Errors
    /// `Damaged`, `Newer`, `Io`.
    pub fn epoch(&self) -> Result<Option<Epoch>, AuthorityError> {
        Ok(self.read()?.epoch)
    }

    /// The same, once nobody is storing one: an engine that is being fenced off may be.
    ///
    /// # Errors
    /// `Damaged`, `Newer`, `Io`.
    pub fn settled_epoch(&self) -> Result<Option<Epoch>, AuthorityError> {
        let _lock = self.locked()?;
        self.epoch()
    }

    /// Stores `epoch` in place of the one numbered `replaces` (`None`: of no epoch at all). Durable before it returns.
    /// Storing the same epoch again is done already, so that a caller that does not know may repeat the call.
    ///
    /// # Errors
    /// `Replaced` if another one is stored, `NotNewer`, `Damaged`, `Newer`, `Io`. After `Io` the epoch may be stored or not.
    pub fn store_epoch(
        &self,
        replaces: Option<(Generation, u64)>,
        epoch: &Epoch,
    ) -> Result<(), AuthorityError> {
        self.change(|content| {
            if content.epoch.as_ref() == Some(epoch) {
                return Ok(());
            }
            let stored = content.epoch.as_ref().map(Epoch::order);
            if stored != replaces {
                return Err(AuthorityError::Replaced(stored));
            }
            if let Some(stored) = stored
                && epoch.order() <= stored
            {
                return Err(AuthorityError::NotNewer(epoch.order(), stored));
            }
            content.epoch = Some(epoch.clone());
            Ok(())
        })
    }

    /// What people decided when the epoch that counts had no usable member: `epoch` counts from now on, whatever was
    /// stored. A file that cannot be read is replaced. Durable before it returns.
    ///
    /// No engine of the volume runs: the caller holds the volume's lock and has seen none.
    ///
    /// # Errors
    /// `NotNewer` than what was stored, `Newer`, `Io`.
    pub fn decree(&self, epoch: Epoch) -> Result<(), AuthorityError> {
        let _lock = self.locked()?;
        let content = match self.read() {
            Err(AuthorityError::Damaged { .. }) => Content::default(),
            other => other?,
        };
        if let Some(stored) =
            content.epoch.as_ref().map(Epoch::order).filter(|stored| epoch.order() <= *stored)
        {
            return Err(AuthorityError::NotNewer(epoch.order(), stored));
        }
        let generation = content.generation.max(epoch.generation);
        self.write(&Content { format: FORMAT, generation, epoch: Some(epoch) })
    }

    /// What a volume of the quorum `unsafe` needs of a file that cannot be read, which is replaced: no epoch counts there, and numbers
    /// are issued above those that replicas have seen. Durable before it returns. The caller is as in [`Authority::decree`].
    ///
    /// # Errors
    /// `Newer`, `Io`.
    pub fn begin_anew(&self, highest_seen: Generation) -> Result<(), AuthorityError> {
        let _lock = self.locked()?;
        if let Err(newer @ AuthorityError::Newer { .. }) = self.read() {
            return Err(newer);
        }
        self.write(&Content { format: FORMAT, generation: highest_seen, epoch: None })
    }

    fn write(&self, content: &Content) -> Result<(), AuthorityError> {
        let bytes = serde_json::to_vec(content).map_err(|e| self.damaged(&e))?;
        replace_file_in_its_room(&self.file, &bytes).map_err(|source| self.io(source))
    }

    /// Reads, lets `change` decide, and writes if it agreed, all under the lock.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Content) -> Result<T, AuthorityError>,
    ) -> Result<T, AuthorityError> {
        let _lock = self.locked()?;
        let mut content = self.read()?;
        let answer = change(&mut content)?;
        content.format = FORMAT;
        self.write(&content)?;
        Ok(answer)
    }

    fn locked(&self) -> Result<Flock<std::fs::File>, AuthorityError> {
        let failed = |source| AuthorityError::Io { path: self.lock.clone(), source };
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.lock);
        let mut file = file.map_err(failed)?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusive) {
                Ok(locked) => return Ok(locked),
                Err((back, nix::errno::Errno::EINTR)) => file = back,
                Err((_, errno)) => return Err(failed(errno.into())),
            }
        }
    }

    fn read(&self) -> Result<Content, AuthorityError> {
        let bytes = match std::fs::read(&self.file) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Content::default()),
            Err(e) => return Err(self.io(e)),
        };
        if let Some(format) = newer_than(FORMAT, &bytes) {
            return Err(AuthorityError::Newer { path: self.file.clone(), format });
        }
        let content: Content = serde_json::from_slice(&bytes).map_err(|e| self.damaged(&e))?;
        if content.format != FORMAT {
            return Err(self.damaged(&format!("format {} is not {FORMAT}", content.format)));
        }
        Ok(content)
    }

    fn io(&self, source: io::Error) -> AuthorityError {
        AuthorityError::Io { path: self.file.clone(), source }
    }

    fn damaged(&self, reason: &dyn std::fmt::Display) -> AuthorityError {
        AuthorityError::Damaged { path: self.file.clone(), reason: reason.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use lh_block::Instance;

    use super::*;

    fn epoch(attachment: u32, counter: u64, members: &[&str]) -> Epoch {
        Epoch {
            generation: Generation { attachment, restart: 0 },
            counter,
            members: members.iter().map(|m| (*m).to_owned()).collect(),
            id: Instance(u128::from(attachment) << 64 | u128::from(counter)),
            after: None,
            round: None,
        }
    }

    #[test]
    fn generations_rise_above_everything_seen_and_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let seen = |attachment, restart| Generation { attachment, restart };
        let issue = |n| Authority::in_directory(dir.path()).issue_generation(n).unwrap();
        assert_eq!(issue(Generation::default()), seen(1, 0));
        assert_eq!(issue(Generation::default()), seen(2, 0));
        assert_eq!(issue(seen(2, 9)), seen(3, 0));
        assert_eq!(issue(seen(70, 1)), seen(71, 0));
        assert_eq!(issue(seen(5, 0)), seen(72, 0));
        assert!(matches!(
            Authority::in_directory(dir.path()).issue_generation(seen(u32::MAX, 0)),
            Err(AuthorityError::Exhausted(_))
        ));
    }

    /// As where people fenced an engine off with a number of their own, which nobody had issued.
    #[test]
    fn generations_rise_above_that_of_the_epoch_that_counts() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::in_directory(dir.path());
        authority.issue_generation(Generation::default()).unwrap();
        authority.store_epoch(None, &epoch(7, 1, &["a"])).unwrap();
        let next = Generation { attachment: 8, restart: 0 };
        assert_eq!(authority.issue_generation(Generation::default()).unwrap(), next);
    }

    #[test]
    fn no_two_callers_get_the_same_generation() {
        let dir = tempfile::tempdir().unwrap();
        let mut all: Vec<Generation> = std::thread::scope(|scope| {
            let callers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let authority = Authority::in_directory(dir.path());
                        (0..10)
                            .map(|_| authority.issue_generation(Generation::default()).unwrap())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            callers.into_iter().flat_map(|c| c.join().unwrap()).collect()
        });
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 40);
    }

    #[test]
    fn of_two_engines_that_read_the_same_epoch_one_stores_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::in_directory(dir.path());
        let first = epoch(1, 1, &["a", "b", "c"]);
        authority.store_epoch(None, &first).unwrap();
        let (old, new) = (epoch(1, 2, &["a"]), epoch(2, 1, &["b", "c"]));
        authority.store_epoch(Some(first.order()), &new).unwrap();
        let refused = authority.store_epoch(Some(first.order()), &old);
        assert!(matches!(refused, Err(AuthorityError::Replaced(Some(stored))) if stored == new.order()));
        assert_eq!(authority.epoch().unwrap(), Some(new.clone()));
        // Said again after an answer that was lost.
        authority.store_epoch(Some(first.order()), &new).unwrap();
        assert!(matches!(authority.store_epoch(None, &old), Err(AuthorityError::Replaced(_))));
        let refused = authority.store_epoch(Some(new.order()), &old);
        assert!(matches!(refused, Err(AuthorityError::NotNewer(..))));
    }

    #[test]
    fn issuing_keeps_the_epoch_and_storing_keeps_the_generation() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::in_directory(dir.path());
        let issued = authority.issue_generation(Generation::default()).unwrap();
        authority.store_epoch(None, &epoch(1, 1, &["a"])).unwrap();
        assert_eq!(authority.generation().unwrap(), issued);
        authority.issue_generation(issued).unwrap();
        assert_eq!(authority.epoch().unwrap(), Some(epoch(1, 1, &["a"])));
    }

    #[test]
    fn a_decree_counts_whatever_was_stored_if_it_is_younger() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::in_directory(dir.path());
        authority.issue_generation(Generation::default()).unwrap();
        authority.store_epoch(None, &epoch(1, 5, &["a"])).unwrap();
        assert!(matches!(authority.decree(epoch(1, 5, &["b"])), Err(AuthorityError::NotNewer(..))));
        let decreed = epoch(8, 1, &["b"]);
        authority.decree(decreed.clone()).unwrap();
        assert_eq!(authority.epoch().unwrap(), Some(decreed));
        assert_eq!(authority.issue_generation(Generation::default()).unwrap().attachment, 9);
        std::fs::write(dir.path().join("authority.json"), "{").unwrap();
        authority.decree(epoch(9, 1, &["b"])).unwrap();
        assert_eq!(authority.generation().unwrap().attachment, 9);
    }

    #[test]
    fn a_damaged_file_is_said_to_be_damaged_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::in_directory(dir.path());
        for content in ["", "{", "[]", r#"{"format":0,"generation":0,"epoch":null}"#] {
            std::fs::write(dir.path().join("authority.json"), content).unwrap();
            let refused = authority.issue_generation(Generation::default());
            assert!(matches!(refused, Err(AuthorityError::Damaged { .. })), "{content:?}");
            assert_eq!(std::fs::read_to_string(dir.path().join("authority.json")).unwrap(), content);
        }
    }

    /// The program was exchanged for an older one. What the newer one has stored counts.
    #[test]
    fn a_file_of_a_newer_version_is_nobodys_to_replace() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::in_directory(dir.path());
        for content in [r#"{"format":2,"generation":0,"epoch":null}"#, r#"{"format":3,"other":[]}"#] {
            std::fs::write(dir.path().join("authority.json"), content).unwrap();
            let refused = [
                authority.issue_generation(Generation::default()).map(drop),
                authority.epoch().map(drop),
                authority.store_epoch(None, &epoch(9, 1, &["a"])),
                authority.decree(epoch(9, 1, &["a"])),
                authority.begin_anew(Generation::default()),
            ];
            for refused in refused {
                assert!(matches!(refused, Err(AuthorityError::Newer { .. })), "{refused:?}");
            }
            assert_eq!(std::fs::read_to_string(dir.path().join("authority.json")).unwrap(), content);
        }
    }
}
