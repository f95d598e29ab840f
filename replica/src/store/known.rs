//! What the layers' files are known to be, so that one that was cut off or replaced while no process had the directory is noticed:
//! what is missing of it would read as holes, and what lies below would come back.
//!
//! The record is written behind each change of the layers, and a crash may leave it one change behind. So it counts file by file: a
//! layer's file is found by its id, whatever its name is by now, and is never shorter than it was. A file that has the name of a known one,
//! and an id that none of them has, stands in another one's place: no change gives a name that is there to a new file. Layers that
//! came with an import have no id, and are known by their names.
//!
//! While the layers are being replaced (`rebuilding`) there is no such record.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use lh_block::Extent;
use serde::{Deserialize, Serialize};

use super::disk;
use super::error::{Damage, OpenError, damaged, failed};
use super::id::{Id, LAYER_ATTRIBUTE};
use super::record::{Record, Records};
use super::rescue::{Care, EVERYTHING};
use super::tree::{LayerFile, Tree};

/// The files of all layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    volume: Id,
    files: Vec<KnownFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KnownFile {
    name: String,
    id: Option<Id>,
    length: u64,
}

impl Record for Known {
    const NAME: &'static str = "layers";
}

impl Known {
    /// What the files of these layers, each with its name, are by now.
    pub(super) fn of<'a>(volume: Id, layers: impl Iterator<Item = (&'a str, &'a File)>) -> io::Result<Self> {
        let file = |(name, file): (&str, &File)| {
            let (id, length) = (disk::id(file, LAYER_ATTRIBUTE)?, file.metadata()?.len());
            Ok(KnownFile { name: name.to_owned(), id, length })
        };
        Ok(Self { volume, files: layers.map(file).collect::<io::Result<_>>()? })
    }

    /// Compares with what is there. `open` gives a layer's open file.
    pub(super) fn check(
        directory: &Path,
        volume: Id,
        tree: &Tree,
        open: impl Fn(&LayerFile) -> Result<Arc<File>, OpenError>,
    ) -> Result<(), OpenError> {
        Self::compare(directory, volume, &mut tree.layers.iter(), &Care::strict(), open)
    }

    /// The same of a directory whose layers are not open.
    pub(super) fn check_closed(directory: &Path, volume: Id, tree: &Tree) -> Result<(), OpenError> {
        Self::check_layers(directory, volume, &mut tree.layers.iter(), &Care::strict())
    }

    /// Of a directory that somebody has changed behind a clean close, only whether a file is cut off: Longhorn, which never does that, makes
    /// another volume.meta, and who puts a file back from a copy gives it another id.
    pub(super) fn check_lengths(directory: &Path, volume: Id, tree: &Tree) -> Result<(), OpenError> {
        match Self::check_closed(directory, volume, tree) {
            Err(err @ OpenError::Damaged { damage: Damage::LayerShort { .. }, .. }) => Err(err),
            Err(err @ OpenError::Io { .. }) => Err(err),
            _ => Ok(()),
        }
    }

    /// The same of some of the layers, with what is passed over.
    pub(super) fn check_layers(
        directory: &Path,
        volume: Id,
        layers: &mut dyn Iterator<Item = &LayerFile>,
        care: &Care,
    ) -> Result<(), OpenError> {
        Self::compare(directory, volume, layers, care, |layer| {
            let path = directory.join(&layer.file);
            disk::open_layer(&path, false, false).map(Arc::new).map_err(failed("opening", &path))
        })
    }

    fn compare(
        directory: &Path,
        volume: Id,
        layers: &mut dyn Iterator<Item = &LayerFile>,
        care: &Care,
        open: impl Fn(&LayerFile) -> Result<Arc<File>, OpenError>,
    ) -> Result<(), OpenError> {
        let known = Records { directory }.load::<Self>().or_else(|err| care.pass(EVERYTHING, err, None))?;
        let Some(known) = known.filter(|known| known.is_of(volume)) else { return Ok(()) };
        for layer in layers {
            let id = disk::id(&*open(layer)?, LAYER_ATTRIBUTE).map_err(failed("reading", directory))?;
            if let Err(damage) = known.judge(layer, id) {
                let doubtful = match &damage {
                    Damage::LayerShort { length, known, .. } => Extent::new(*length, known - length),
                    _ => EVERYTHING,
                };
                care.pass(doubtful, damaged(directory, damage), ())?;
            }
        }
        Ok(())
    }

    pub(super) fn is_of(&self, volume: Id) -> bool {
        self.volume == volume
    }

    fn judge(&self, layer: &LayerFile, id: Option<Id>) -> Result<(), Damage> {
        let by_id = id.and_then(|id| self.files.iter().find(|f| f.id == Some(id)));
        let by_name = || self.files.iter().find(|f| f.name == layer.file);
        let Some(known) = by_id.or_else(by_name) else { return Ok(()) };
        if by_id.is_none() && known.id.is_some() {
            return Err(Damage::LayerReplaced(layer.file.clone()));
        }
        if layer.length < known.length {
            let (file, length, known) = (layer.file.clone(), layer.length, known.length);
            return Err(Damage::LayerShort { file, length, known });
        }
        Ok(())
    }
}
