//! A volume's stay on this host, and what an earlier one left behind.
//!
//! A device outlives its engine, and what waits on it is carried out by the next one. That is right while nobody else had the
//! volume in between. A host that was cut off keeps a device whose engine was shut out, with writes of then waiting on it, and
//! a file system of then mounted: carried out when the volume comes back to this host, they would destroy what was written
//! elsewhere since. So whoever starts engines tells them which stay this is (`--stay`), and the first start of another one
//! takes away what is there: all that waits on it fails, whoever uses it. Whoever knows that a stay is over before that has it ended
//! (`longhorn end-stay`): nobody can be rid of a process, or of a mount, that waits on such a device.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use control::host::{LiveDirs, Root, create_dir_durably, replace_file};
use fuse_frontend::keeper::KeeperError;
use fuse_frontend::node;
use iscsi_frontend::initiator;
use nix::sys::stat::makedev;

use crate::arguments::{DEFAULT_ROOT, ROOT_VARIABLE, process_name, root_path, volume_name};
use crate::daemon::GivesUp;
use crate::device_names::{device_of, keeper_socket, nbd_identifier, target_name, ublk_owner};
use crate::living_keeper::living_keeper;
use crate::sentence::sentence;

/// Begins or goes on with a stay. The caller holds the volume's name on this host.
///
/// # Errors
/// A device of another stay that does not go: the volume is not shown then.
pub(super) fn begin(stay: &str, volume: &str, root: &Root) -> Result<()> {
    let last = last(root, volume)?;
    if last.as_deref() == Some(stay) {
        return Ok(());
    }
    // Without a record it was a program that knew of no stays, and its device may be in use rightly.
    if last.is_some() {
        abandon(volume, root)?;
    }
    let (file, directory) = (root.stay(volume), root.volume(volume));
    create_dir_durably(&directory)?;
    forget_reservations(&directory)?;
    replace_file(&file, stay.as_bytes()).with_context(|| file.display().to_string())
}

/// Initiators have had another target in between, and what they have registered there has taken the place of this. The stay, which is
/// written down behind it, says that it is gone.
fn forget_reservations(directory: &Path) -> Result<()> {
    let file = Root::reservations(directory);
    match fs::remove_file(&file) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).with_context(|| file.display().to_string()),
        _ => Ok(()),
    }
}

/// What `longhorn end-stay` is told.
#[derive(Debug, clap::Args)]
pub(in crate::daemon) struct EndStayArgs {
    /// Where volumes, logs and sockets lie
    #[arg(long, env = ROOT_VARIABLE, default_value = DEFAULT_ROOT, value_parser = root_path(), value_name = "DIR")]
    root: PathBuf,
    /// Which stay: nothing is done where another one has begun since
    #[arg(long, value_parser = process_name, value_name = "WORD")]
    stay: String,
    /// The volume
    #[arg(value_parser = volume_name)]
    volume: String,
}

/// Takes away what a stay that is over has left.
///
/// # Errors
/// An engine of the volume runs on this host. A device that does not go.
pub(in crate::daemon) fn run(args: &EndStayArgs) -> Result<()> {
    let root = Root::at(&args.root).with_context(|| args.root.display().to_string())?;
    // Whoever has asked asks again.
    end(&args.stay, &args.volume, &root).map_err(|e| GivesUp(sentence(&e)).into())
}

fn end(stay: &str, volume: &str, root: &Root) -> Result<()> {
    let _live = LiveDirs::default().acquire(volume, root, Duration::ZERO)?;
    match last(root, volume)? {
        Some(last) if last == stay => abandon(volume, root),
        Some(_) | None => Ok(()),
    }
}

/// Which stay the devices of this host are of.
fn last(root: &Root, volume: &str) -> Result<Option<String>> {
    let file = root.stay(volume);
    match fs::read_to_string(&file) {
        Ok(last) => Ok(Some(last)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| file.display().to_string()),
    }
}

fn abandon(volume: &str, root: &Root) -> Result<()> {
    abandon_devices(volume, root).with_context(|| {
        format!(
            "{} is left from before the volume was elsewhere, and does not go: end what uses it",
            device_of(volume).display()
        )
    })
}

/// Takes every device of the volume away, also from those who use it.
fn abandon_devices(volume: &str, root: &Root) -> Result<()> {
    let device = device_of(volume);
    if ublk_frontend::missing().is_none()
        && let Some((major, minor)) = ublk_frontend::remove_left_behind(&ublk_owner(root.path()), volume)?
    {
        tracing::warn!("a ublk device that the volume had here before was taken away");
        node::remove(&device, makedev(major.into(), minor.into()))
            .with_context(|| device.display().to_string())?;
    }
    let rdev = node::rdev(&device);
    let client = nbd_frontend::kernel::find(&nbd_identifier(root.path(), volume)).context("/sys/block")?;
    let session = initiator::find(&target_name(volume)).context("the initiator's sessions")?;
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
    abandon_keeper(&keeper_socket(volume), volume, root.path())?;
    // Of a device that went before its engine had taken the node away.
    node::remove_dead(&device).with_context(|| device.display().to_string())
}

fn abandon_keeper(socket: &Path, volume: &str, root: &Path) -> Result<()> {
    let device = device_of(volume);
    // If it died as well, the device fails whoever uses it.
    let Some(mut keeper) = living_keeper(socket, &device)? else { return Ok(()) };
    if Path::new(&keeper.info()?.owner) != root {
        return Ok(());
    }
    tracing::warn!("the FUSE device that the volume had here before is taken away");
    match keeper.abandon() {
        Ok(()) => Ok(()),
        // It has ended before it was through, perhaps.
        Err(KeeperError::Lost(_)) => living_keeper(socket, &device).map(drop),
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
            assert_eq!(fs::read_to_string(root.stay("never-shown")).unwrap(), stay);
        }
    }

    #[test]
    fn reservations_outlive_an_engine_and_not_a_stay() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        let file = Root::reservations(&root.volume("never-shown"));
        begin("1", "never-shown", &root).unwrap();
        fs::write(&file, "kept").unwrap();
        for (stay, stays) in [("1", true), ("2", false)] {
            begin(stay, "never-shown", &root).unwrap();
            assert_eq!(file.exists(), stays, "stay {stay}");
        }
    }
}
