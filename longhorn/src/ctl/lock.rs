//! The lock of a volume, as every command takes it that changes one.

use std::time::Duration;

use control::host::{LockError, RecordError, Root, VolumeLock, VolumeRecord};

use super::manager::Manager;
use crate::progress::Progress;

/// How long another command may hold the volume.
const PATIENCE: Duration = Duration::from_secs(30);

/// A command that takes the lock for a moment is waited for without a word.
const SILENCE: Duration = Duration::from_secs(1);

/// Locks a name, of a volume that there is or is to be made.
///
/// # Errors
/// Another command holds it, or the lock file cannot be made.
pub(super) fn name(root: &Root, volume: &str) -> Result<VolumeLock, LockError> {
    VolumeLock::take(root, volume, PATIENCE)
}

/// How long another command may start the volume: a host that starts has `up --all` and the unit of a mount start it at once, and
/// the one that comes second finds it up.
pub(super) const START_PATIENCE: Duration = Duration::from_secs(120);

/// The same for `up`, which says that it waits. Whoever has the lock may wait for a process that no manager starts: there is one from then
/// on.
///
/// # Errors
/// As [`name`]; or there is no manager, and none can be started.
pub(super) async fn name_to_start(
    root: &Root,
    volume: &str,
    progress: &mut Progress,
) -> anyhow::Result<VolumeLock> {
    match VolumeLock::take(root, volume, SILENCE) {
        Err(LockError::Busy(_)) => {
            progress.say("waiting until another command is done with the volume");
            Manager::ensure(root).await?;
            Ok(VolumeLock::take(root, volume, START_PATIENCE)?)
        }
        taken => Ok(taken?),
    }
}

/// Locks a volume, and reads its record as it is then.
///
/// # Errors
/// There is no such volume, which leaves no lock file; or as [`name`].
pub(super) fn volume(root: &Root, volume: &str) -> anyhow::Result<(VolumeLock, VolumeRecord)> {
    VolumeRecord::load(root, volume)?;
    let lock = name(root, volume)?;
    // The command that held it may have changed or deleted the volume.
    Ok((lock, VolumeRecord::load(root, volume)?))
}

/// The volume of a name that this command has locked, if there is one.
///
/// # Errors
/// Its record cannot be read.
pub(super) fn found(root: &Root, volume: &str) -> Result<Option<VolumeRecord>, RecordError> {
    match VolumeRecord::load(root, volume) {
        Ok(record) => Ok(Some(record)),
        Err(RecordError::Missing { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}
