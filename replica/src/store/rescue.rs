//! What is read of a directory that is damaged, for whoever has no better copy: `longhornctl replica export --rescue`.
//!
//! Damage after which the bytes of some blocks are not sure is passed over and noted as a [`Doubt`]; a layer's meta that is damaged is
//! not, since without it nothing says which layer lies over which. Nothing is changed, and nobody starts a volume from it by itself.

use std::fmt;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lh_block::{BLOCK, Extent};

use super::error::{Damage, OpenError};
use super::load::LayerParts;

/// Any byte of the volume.
pub(super) const EVERYTHING: Extent = Extent::new(0, u64::MAX);

/// Bytes that may not be the volume's last ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// Bytes of the volume.
    pub range: Extent,
    /// What is wrong with them.
    pub why: DoubtKind,
}

/// What is wrong with bytes that were read of a damaged directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DoubtKind {
    /// Which blocks a layer has zeroed is not known: they show what was there before.
    Zeroes(String),
    /// A layer's file was cut off: what is missing shows what lies below.
    CutOff(String),
    /// A layer's file is another one than it was.
    Replaced(String),
    /// A layer's file has been changed since it was closed.
    Changed(String),
    /// A rebuild of this replica had not ended: it lacks what was not copied yet.
    Rebuilding,
    /// volume.meta is missing, and with it what says whether another program has written since.
    VolumeMissing,
    /// Longhorn has noted an error in volume.meta.
    Noted(String),
    /// A record in `engine/` is not readable, and what it said was not heeded.
    Record(String),
    /// A layer's file cannot be read there: zeroes stand for what it holds.
    Unreadable {
        /// The snapshot; empty for the head, `None` for the backing file.
        layer: Option<String>,
        /// The disk's answer.
        error: String,
    },
}

impl DoubtKind {
    /// Of an unreadable part each block may have an error with words of its own.
    fn is_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unreadable { layer: one, .. }, Self::Unreadable { layer: other, .. }) => one == other,
            (one, other) => one == other,
        }
    }
}

impl fmt::Display for DoubtKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeroes(file) => {
                write!(f, "{file} is damaged, and what was zeroed may show what was there before")
            }
            Self::CutOff(file) => write!(f, "{file} was cut off, and what is missing shows older data"),
            Self::Replaced(file) => write!(f, "{file} is not the file that was there"),
            Self::Changed(file) => write!(f, "{file} has been changed since the replica was closed"),
            Self::Rebuilding => {
                f.write_str("a rebuild of this replica has not ended, and it may lack any of them")
            }
            Self::VolumeMissing => f.write_str("volume.meta is missing, and was made up from the head"),
            Self::Noted(error) => write!(f, "volume.meta notes an error: {error}"),
            Self::Record(name) => write!(f, "engine/{name} is damaged, and was not heeded"),
            Self::Unreadable { layer, error } => {
                match layer.as_deref() {
                    None => f.write_str("the backing file")?,
                    Some("") => f.write_str("the head")?,
                    Some(snapshot) => write!(f, "snapshot {snapshot}")?,
                }
                write!(f, " cannot be read there ({error}), and zeroes stand for what it holds")
            }
        }
    }
}

/// What is done about damage: it is an error, or noted and passed over.
#[derive(Debug, Default)]
pub(super) struct Care {
    noted: Option<Mutex<Vec<Doubt>>>,
}

impl Care {
    /// Damage is an error.
    pub(super) fn strict() -> Self {
        Self::default()
    }

    /// Damage is passed over where anything can be read beyond it.
    pub(super) fn rescue() -> Self {
        Self { noted: Some(Mutex::default()) }
    }

    pub(super) const fn is_rescue(&self) -> bool {
        self.noted.is_some()
    }

    /// Which blocks of the range a layer has zeroed is not known, because of this file.
    pub(super) fn note_zeroes(&self, range: Extent, file: String) {
        self.note(range, DoubtKind::Zeroes(file));
    }

    /// A layer's file is not as it was closed. What is known of it better than that is enough.
    pub(super) fn note_changed(&self, file: &str) {
        let is_known = |doubt: &Doubt| matches!(&doubt.why, DoubtKind::CutOff(known) | DoubtKind::Replaced(known) if known == file);
        if !self.lock().is_some_and(|noted| noted.iter().any(is_known)) {
            self.note(EVERYTHING, DoubtKind::Changed(file.to_owned()));
        }
    }

    /// Notes a doubt; one that goes on where the last one ended, for the same reason, is one with it.
    fn note(&self, range: Extent, why: DoubtKind) {
        let Some(mut noted) = self.lock() else { return };
        match noted.last_mut() {
            Some(last) if why.is_as(&last.why) && last.range.end() == range.offset => {
                last.range.len += range.len
            }
            Some(last) if why.is_as(&last.why) && last.range == range => {}
            _ => noted.push(Doubt { range, why }),
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Vec<Doubt>>> {
        Some(self.noted.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Goes on without what is damaged, if that is asked for and leaves something to be read. `range`: the bytes that are not sure then.
    ///
    /// # Errors
    /// The same one.
    pub(super) fn pass<T>(&self, range: Extent, failed: OpenError, instead: T) -> Result<T, OpenError> {
        let why = match &failed {
            OpenError::Damaged { damage, .. } if self.is_rescue() => doubt(damage),
            _ => None,
        };
        match why {
            Some(why) => {
                self.note(range, why);
                Ok(instead)
            }
            None => Err(failed),
        }
    }

    /// Reads a part of a layer. Where the disk does not give it, block by block, zeroes for those that are not to be had.
    ///
    /// # Errors
    /// The disk's, unless it is passed over.
    pub(super) fn read(&self, layer: &LayerParts, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match layer.read_at(offset, buffer) {
            Err(_) if self.is_rescue() => {}
            done => return done,
        }
        let step = usize::try_from(BLOCK).unwrap_or(1);
        for (offset, block) in (offset..).step_by(step).zip(buffer.chunks_mut(step)) {
            if let Err(err) = layer.read_at(offset, block) {
                block.fill(0);
                let why = DoubtKind::Unreadable { layer: layer.name.clone(), error: err.to_string() };
                self.note(Extent::new(offset, block.len() as u64), why);
            }
        }
        Ok(())
    }

    /// What was noted so far, of a volume of so many bytes.
    pub(super) fn doubts(&self, size: u64) -> Option<Vec<Doubt>> {
        let noted = self.lock()?;
        let inside = |doubt: &Doubt| {
            let range = doubt.range.intersection(Extent::new(0, size))?;
            Some(Doubt { range, why: doubt.why.clone() })
        };
        Some(noted.iter().filter_map(inside).collect())
    }
}

/// What damage leaves in doubt. `None`: nothing can be read beyond it.
fn doubt(damage: &Damage) -> Option<DoubtKind> {
    Some(match damage {
        Damage::LayerShort { file, .. }
        | Damage::HeadShort { file, .. }
        | Damage::LayerUnaligned { file, .. } => DoubtKind::CutOff(file.clone()),
        Damage::LayerReplaced(file) => DoubtKind::Replaced(file.clone()),
        Damage::Rebuilding => DoubtKind::Rebuilding,
        Damage::MarksWithoutVolume => DoubtKind::VolumeMissing,
        Damage::NotedError(error) => DoubtKind::Noted(error.clone()),
        Damage::Record(name) => DoubtKind::Record(name.clone()),
        _ => return None,
    })
}
