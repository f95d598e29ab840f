//! What is on the disk, or in the page cache of a host that has kept its power: the records `whole` and `power`
//! (`docs/decisions/0018-who-kept-its-power-is-the-source.md`).

use std::io;

use lh_block::Generation;
use lh_wire::PowerSince;

use super::directory::Directory;
use super::record::{Power, Whole};
use super::room::is_full;

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
