//! What is on the disk, or in the page cache of a host that has kept its power: the records `whole` and `power`
//! (`docs/decisions/0018-who-kept-its-power-is-the-source.md`).

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use lh_block::Generation;
use lh_wire::PowerSince;

use super::directory::Directory;
use super::error::{OpenError, failed};
use super::fs::Fs;
use super::locks::lock_directory;
use super::record::{Power, Records, Whole};
use super::room::is_full;

/// Its disk has failed since: with the journal of its file system what was answered and not flushed may have gone, though the host
/// has kept its power. Takes the notes away that say that it has not; durable when this returns.
///
/// # Errors
/// [`OpenError`]: they may still be there.
pub fn forget_power(directory: &Path, lock_wait: Duration) -> Result<(), OpenError> {
    let _lock = lock_directory(directory, true, Instant::now() + lock_wait)?;
    let (records, fs) = (Records { directory }, Fs::default());
    if records.load::<Whole>()?.is_some() {
        records.remove::<Whole>(&fs).map_err(failed("forgetting that all is in", directory))?;
    }
    if records.load::<Power>()?.is_some() {
        records.remove::<Power>(&fs).map_err(failed("forgetting since when all is in", directory))?;
    }
    Ok(())
}

impl Directory {
    /// The host has kept its power since everything that was answered was here: what was not flushed is in the page cache.
    pub fn is_powered(&self) -> bool {
        self.whole.as_ref().is_some_and(|whole| lh_block::boot().is_ok_and(|boot| boot == whole.boot))
    }

    /// Everything that was answered is here: as long as the host keeps its power, it stays. Cheap when noted already. Where the
    /// kernel does not tell one boot from another nothing is noted.
    ///
    /// # Errors
    /// The disk's.
    pub fn note_whole(&mut self) -> io::Result<()> {
        let Ok(boot) = lh_block::boot() else { return Ok(()) };
        let whole = Whole { volume: self.identity.volume, boot: boot.to_owned() };
        if self.whole.as_ref() != Some(&whole) {
            self.records().store(&self.fs, &whole)?;
            self.whole = Some(whole);
        }
        Ok(())
    }

    /// From when on what was answered is here, as long as the host keeps its power. `None`: all is, or nothing is noted on this boot.
    pub(super) fn power_since(&self) -> Option<PowerSince> {
        let power = self.power.as_ref().filter(|_| !self.is_powered())?;
        lh_block::boot().is_ok_and(|boot| boot == power.boot).then_some(power.since)
    }

    /// The directory is opened for an engine of this generation. If something is missing in it, it is noted from when on nothing is;
    /// cheap when noted already on this boot. A full disk keeps nobody from writing: without the note the replica counts for less than
    /// it is.
    ///
    /// # Errors
    /// The disk's.
    pub fn note_power(&mut self, generation: Generation) -> io::Result<()> {
        let Ok(boot) = lh_block::boot() else { return Ok(()) };
        if self.is_powered() || self.power_since().is_some() {
            return Ok(());
        }
        let late = self.fence.as_ref().is_some_and(|fence| fence.generation == generation);
        let since = PowerSince { generation, late };
        let power = Power { volume: self.identity.volume, boot: boot.to_owned(), since };
        match self.records().store(&self.fs, &power) {
            Err(error) if is_full(&error) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => {
                self.power = Some(power);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::directory::{CreateOptions, OpenOptions};
    use super::super::tests::temporary;
    use super::*;

    const WAIT: Duration = Duration::from_secs(1);

    #[test]
    fn whose_disk_has_failed_claims_neither_all_nor_since_when() {
        let place = temporary();
        let path = place.path().join("r");
        let create = CreateOptions { size: 1 << 20, backing: None, lock_wait: WAIT };
        let (mut directory, store) = Directory::create(&path, &create).unwrap();
        directory.note_whole().unwrap();
        drop((directory, store));
        let open = || Directory::open(&path, &OpenOptions { lock_wait: WAIT }).unwrap();
        assert!(open().0.is_powered());
        forget_power(&path, WAIT).unwrap();
        let (mut directory, store) = open();
        assert!(!directory.is_powered());
        let generation = Generation { attachment: 1, restart: 0 };
        directory.note_power(generation).unwrap();
        drop((directory, store));
        assert!(open().0.power_since().is_some());
        forget_power(&path, WAIT).unwrap();
        assert_eq!(open().0.power_since(), None, "it failed once more");
        assert!(matches!(forget_power(&place.path().join("none"), WAIT), Err(OpenError::NoDirectory(_))));
    }
}
