//! A volume's device: who uses it, and how it goes when its engine could not take it away.

use std::path::Path;

use anyhow::{Context, Result, bail};
use control::host::Root;
use fuse_frontend::keeper::{Keeper, KeeperError};

use crate::daemon::{keeper_socket, ublk_owner};

/// Most users that are named in one sentence.
const NAMED: usize = 3;

/// Refuses a device that somebody uses, naming who.
pub(super) fn check_unused(device: &Path) -> Result<()> {
    let users = fuse_frontend::users_of(device);
    if users.is_empty() {
        return Ok(());
    }
    let named: Vec<String> = users.iter().take(NAMED).map(ToString::to_string).collect();
    let more = users.len().saturating_sub(NAMED);
    let and = if more > 0 { format!(" and {more} more") } else { String::new() };
    bail!("{} is in use by {}{and}: unmount or close it first", device.display(), named.join(", "));
}

/// Takes away the device of a volume whose engine is gone without having done so.
pub(super) fn release(volume: &str, root: &Root) -> Result<()> {
    if ublk_frontend::missing().is_none() {
        ublk_frontend::remove_left_behind(&ublk_owner(root.path()), volume)?;
    }
    let Ok(mut keeper) = Keeper::connect(&keeper_socket(volume)) else { return Ok(()) };
    let info = keeper.info()?;
    if Path::new(&info.owner) != root.path() {
        return Ok(());
    }
    check_unused(&info.node)?;
    match keeper.stop_by_force() {
        // It has ended already.
        Ok(()) | Err(KeeperError::Lost(_)) => Ok(()),
        Err(e) => Err(e).with_context(|| format!("{} cannot be taken away", info.node.display())),
    }
}
