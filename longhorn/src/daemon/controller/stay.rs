//! A volume's stay on this host, and what an earlier one left behind.
//!
//! A device outlives its engine, and what waits on it is carried out by the next one. That is right while nobody else had the
//! volume in between. A host that was cut off keeps a device whose engine was shut out, with writes of then waiting on it, and
//! a file system of then mounted: carried out when the volume comes back to this host, they would destroy what was written
//! elsewhere since. So whoever starts engines tells them which stay this is (`--stay`), and the first start of another one
//! takes away what is there: all that waits on it fails, whoever uses it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use control::host::{Root, create_dir_durably, replace_file};
use fuse_frontend::keeper::{Keeper, KeeperError};
use fuse_frontend::node;
use iscsi_frontend::initiator;
use nix::sys::stat::makedev;

use crate::device_names::{device_of, keeper_socket, nbd_identifier, target_name, ublk_owner};

/// Begins or goes on with a stay. The caller holds the volume's name on this host.
///
/// # Errors
/// A device of another stay that does not go: the volume is not shown then.
pub(super) fn begin(stay: &str, volume: &str, root: &Root) -> Result<()> {
    let file = record(root, volume);
    let last = match fs::read_to_string(&file) {
        Ok(last) => Some(last),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e).with_context(|| file.display().to_string()),
    };
    if last.as_deref() == Some(stay) {
        return Ok(());
    }
    // Without a record it was a program that knew of no stays, and its device may be in use rightly.
    if last.is_some() {
        abandon(volume, root).with_context(|| {
            format!(
                "{} is left from before the volume was elsewhere, and does not go: end what uses it",
                device_of(volume).display()
            )
        })?;
    }
    create_dir_durably(&root.volume(volume))?;
    replace_file(&file, stay.as_bytes()).with_context(|| file.display().to_string())
}

/// Which stay the devices of this host are of.
fn record(root: &Root, volume: &str) -> PathBuf {
    root.volume(volume).join("stay")
}

/// Takes every device of the volume away, also from those who use it.
fn abandon(volume: &str, root: &Root) -> Result<()> {
    let device = device_of(volume);
    if ublk_frontend::missing().is_none()
        && let Some((major, minor)) = ublk_frontend::remove_left_behind(&ublk_owner(root.path()), volume)?
    {
        tracing::warn!("a ublk device that the volume had here before was taken away");
        node::remove(&device, makedev(major.into(), minor.into()))
            .with_context(|| device.display().to_string())?;
    }
    let rdev = node::rdev(&device);
    let client = nbd_frontend::kernel::find(&nbd_identifier(root.path(), volume));
    let session = initiator::find(&target_name(volume));
    let has_kernels = client.is_some() || session.is_some();
    if let Some(client) = client {
        tracing::warn!("the NBD device that the volume had here before is taken away");
        client.disconnect()?;
    }
    if let Some(session) = session {
        tracing::warn!("the iSCSI session that the volume had here before is given up");
        session.abandon()?;
    }
    if let Some(rdev) = rdev.filter(|_| has_kernels) {
        node::remove(&device, rdev).with_context(|| device.display().to_string())?;
    }
    abandon_keeper(&keeper_socket(volume), root.path())
}

fn abandon_keeper(socket: &Path, root: &Path) -> Result<()> {
    let Ok(mut keeper) = Keeper::connect(socket) else { return Ok(()) };
    if Path::new(&keeper.info()?.owner) != root {
        return Ok(());
    }
    tracing::warn!("the FUSE device that the volume had here before is taken away");
    match keeper.abandon() {
        // It has ended already.
        Ok(()) | Err(KeeperError::Lost(_)) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stay_is_written_down_and_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        for stay in ["1", "1", "2"] {
            begin(stay, "never-shown", &root).unwrap();
            assert_eq!(fs::read_to_string(record(&root, "never-shown")).unwrap(), stay);
        }
    }
}
