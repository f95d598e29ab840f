//! Whose a directory is: volume.meta carries a random id of ours as an extended attribute, and our records name the same
//! id. Longhorn replaces volume.meta at every open, so that our records become void; so does a layer that differs from
//! what a clean close recorded. A directory without valid records is an import.

use std::io;
use std::path::Path;

use super::disk;
use super::error::{OpenError, failed};
use super::fs::found_at;
use super::id::VOLUME_ATTRIBUTE;
use super::meta::VOLUME_META;
use super::record::{Closed, ClosedFile, Identity, Records};

/// What the records say of whose the directory is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Owner {
    /// The records are valid.
    Ours {
        /// They say so.
        identity: Identity,
        /// Closed cleanly and not touched since.
        clean: bool,
    },
    /// Never ours, or written by another program since.
    Other,
}

/// Compares records and files.
pub(super) fn owner(records: &Records<'_>) -> Result<Owner, OpenError> {
    let path = records.directory;
    let Some(identity) = identified(records)? else { return Ok(Owner::Other) };
    // A rotten record of the clean close only means that the close is not believed.
    let closed = match records.load::<Closed>() {
        Err(OpenError::Damaged { .. }) => None,
        other => other?.filter(|closed| closed.volume == identity.volume),
    };
    let Some(closed) = closed else { return Ok(Owner::Ours { identity, clean: false }) };
    for file in &closed.files {
        if !is_still(path, file)? {
            return Ok(Owner::Other);
        }
    }
    Ok(Owner::Ours { identity, clean: true })
}

/// What the records say that volume.meta bears out.
pub(super) fn identified(records: &Records<'_>) -> Result<Option<Identity>, OpenError> {
    let Some(identity) = records.load::<Identity>()? else { return Ok(None) };
    let volume = records.directory.join(VOLUME_META);
    let found = match disk::open_layer(&volume, false, false) {
        Ok(file) => disk::id(&file, VOLUME_ATTRIBUTE).map_err(failed("reading", &volume))?,
        Err(err) if err.kind() == io::ErrorKind::NotFound => None,
        Err(err) => return Err(failed("opening", &volume)(err)),
    };
    Ok(Some(identity).filter(|identity| found == Some(identity.volume)))
}

/// The file is there, and nobody has written to it since the clean close.
pub(super) fn is_still(directory: &Path, file: &ClosedFile) -> Result<bool, OpenError> {
    let path = directory.join(&file.name);
    let found = found_at(&path).map_err(failed("reading", &path))?;
    Ok(found.is_some_and(|stat| file.is_still(&ClosedFile::of(&file.name, &stat))))
}
