//! A volume's device: who uses it, and how it goes when its engine could not take it away.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control::host::Root;
use fuse_frontend::Holder;
use fuse_frontend::keeper::KeeperError;
use fuse_frontend::{node, users_of, users_of_number};
use iscsi_frontend::initiator;
use nix::sys::stat::{major, makedev, minor};

use super::output::print;
use super::stop::is_elsewhere;
use crate::device_names::{DEVICES, device_of, keeper_socket, nbd_identifier, target_name, ublk_owner};
use crate::living_keeper::living_keeper;

/// Most users that are named in one sentence.
const NAMED: usize = 3;

/// How long a process may have a device open that only looks at it: udev does, whenever something has changed.
const GLANCE: Duration = Duration::from_secs(2);

/// Major number of loop devices (Documentation/admin-guide/devices.txt).
const LOOP_MAJOR: u64 = 7;

/// Between two looks at it.
const AGAIN: Duration = Duration::from_millis(50);

/// What becomes of those who use a device that is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Users {
    /// It is not taken from them.
    Keep,
    /// It fails them, and what they wait for.
    Lose,
}

impl Users {
    /// Refuses what would take the device from those who keep it.
    pub(super) fn check(self, device: &Path) -> Result<()> {
        match self {
            Self::Keep => check_unused(device),
            Self::Lose => Ok(()),
        }
    }

    /// The same of the device with these numbers, whatever has become of its node.
    fn check_number(self, volume: &str, (major, minor): (u64, u64)) -> Result<()> {
        match self {
            Self::Keep => check_unused_by(&device_of(volume), || users_of_number(makedev(major, minor))),
            Self::Lose => Ok(()),
        }
    }
}

/// Refuses a device that somebody uses, naming who.
pub(super) fn check_unused(device: &Path) -> Result<()> {
    check_unused_by(device, || users_of(device))
}

fn check_unused_by(device: &Path, users: impl Fn() -> Vec<Holder>) -> Result<()> {
    let deadline = Instant::now() + GLANCE;
    let users = loop {
        let users = users();
        if users.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline || users.iter().any(|user| user.pid.is_none()) {
            break users;
        }
        std::thread::sleep(AGAIN);
    };
    bail!("{} is in use ({}): unmount or close it first", device.display(), named(&users));
}

/// Who uses the device, in a few words; empty if nobody does.
pub(super) fn users(device: &Path) -> String {
    named(&users_of(device))
}

fn named(users: &[Holder]) -> String {
    let named: Vec<String> = users.iter().take(NAMED).map(ToString::to_string).collect();
    let more = users.len().saturating_sub(NAMED);
    let and = if more > 0 { format!(" and {more} more") } else { String::new() };
    named.join(", ") + &and
}

/// Where `stat` of a block device says how many requests are not answered yet (Documentation/block/stat.rst).
const IN_FLIGHT: usize = 8;

/// True if the device has requests that are not answered yet (`/sys/dev/block/MAJOR:MINOR/stat`). Who has made one can neither
/// close the device nor be killed before it is. `inflight`, beside it, leaves out what waits for a driver that has no server: all that
/// came after the engine's death. So does `stat` before Linux 6.16.
pub(super) fn has_requests(device: &Path) -> bool {
    let Some(rdev) = node::rdev(device) else { return false };
    let stat = format!("/sys/dev/block/{}:{}/stat", major(rdev), minor(rdev));
    fs::read_to_string(stat).is_ok_and(|text| is_any_in_flight(&text))
}

fn is_any_in_flight(stat: &str) -> bool {
    stat.split_whitespace().nth(IN_FLIGHT).is_some_and(|count| count != "0")
}

/// Prints the name of the volume whose node has these numbers, `MAJOR:MINOR`. There need be none, which is an error that nobody
/// is told of: udev asks of every block device.
pub(super) fn print_name(numbers: &str) -> Result<()> {
    let asked = numbers.split_once(':').and_then(|(a, b)| Some(makedev(a.parse().ok()?, b.parse().ok()?)));
    let Some(asked) = asked else { bail!("{numbers:?} is not MAJOR:MINOR") };
    let entries = std::fs::read_dir(DEVICES).into_iter().flatten().filter_map(Result::ok);
    // One that begins with a dot is not in its place yet.
    let mut names = entries.filter_map(|e| e.file_name().into_string().ok()).filter(|n| !n.starts_with('.'));
    match names.find(|name| node::rdev(&device_of(name)) == Some(asked)) {
        Some(name) => print(&format!("{name}\n")),
        None => std::process::exit(1),
    }
}

/// Takes away what an engine has left that is gone, before the volume's bytes change without its users' knowledge: a mounted file system
/// waits for the next engine, and would go on over them. The volume has no engine that shows it.
///
/// # Errors
/// Somebody uses it.
pub(super) fn release_unused(volume: &str, root: &Root) -> Result<()> {
    // One of another root has a device of its own.
    if is_elsewhere(root, volume) {
        return Ok(());
    }
    release(volume, root, Users::Keep).with_context(|| {
        format!(
            "volume {volume} has no engine, and the device of the last one is still there (`longhornctl up {volume}` serves it again)"
        )
    })
}

/// Takes away the device of a volume whose engine is gone without having done so.
pub(super) fn release(volume: &str, root: &Root, users: Users) -> Result<()> {
    release_ublk(volume, root, users)?;
    release_kernels(volume, root, users)?;
    release_keeper(volume, root, users)?;
    // Of a device that somebody else has stopped, or that went before its engine had taken the node away.
    let device = device_of(volume);
    node::remove_dead(&device).with_context(|| device.display().to_string())
}

/// The same of a FUSE device, which its keeper holds.
fn release_keeper(volume: &str, root: &Root, users: Users) -> Result<()> {
    let (socket, device) = (keeper_socket(volume), device_of(volume));
    let Some(mut keeper) = living_keeper(&socket, &device)? else { return Ok(()) };
    let info = keeper.info()?;
    if Path::new(&info.owner) != root.path() {
        return Ok(());
    }
    // Not by its node, which somebody may have removed.
    match info.loop_number {
        Some(number) => users.check_number(volume, (LOOP_MAJOR, number.into()))?,
        None => users.check(&info.node)?,
    }
    let ended = match users {
        Users::Keep => keeper.stop_by_force(),
        Users::Lose => keeper.abandon(),
    };
    match ended {
        Ok(()) => Ok(()),
        // It has ended before it was through, perhaps.
        Err(KeeperError::Lost(_)) => living_keeper(&socket, &device).map(drop),
        Err(e) => Err(e).with_context(|| format!("{} cannot be taken away", info.node.display())),
    }
}

/// The same of a ublk device, which the kernel would take away from those who use it.
fn release_ublk(volume: &str, root: &Root, users: Users) -> Result<()> {
    let owner = ublk_owner(root.path());
    if ublk_frontend::missing().is_some() {
        return Ok(());
    }
    let Some((major, minor)) = ublk_frontend::left_behind(&owner, volume)? else { return Ok(()) };
    users.check_number(volume, (major.into(), minor.into()))?;
    let device = device_of(volume);
    match ublk_frontend::remove_left_behind(&owner, volume)? {
        Some((major, minor)) => node::remove(&device, makedev(major.into(), minor.into()))
            .with_context(|| device.display().to_string()),
        None => Ok(()),
    }
}

/// The same where the kernel's own client or initiator has the device.
fn release_kernels(volume: &str, root: &Root, users: Users) -> Result<()> {
    let client = nbd_frontend::kernel::find(&nbd_identifier(root.path(), volume)).context("/sys/block")?;
    // Volumes of one name run under one root at a time, so a session is this one's.
    let session = initiator::find(&target_name(volume)).context("the initiator's sessions")?;
    if client.is_none() && session.is_none() {
        return Ok(());
    }
    let device = device_of(volume);
    if let Some(client) = &client {
        users.check_number(volume, client.numbers().with_context(|| client.path().display().to_string())?)?;
    }
    // A login that was broken off has no disk.
    if let Some(numbers) = session.as_ref().and_then(|session| session.numbers().ok()) {
        users.check_number(volume, numbers)?;
    }
    let rdev = node::rdev(&device);
    if let Some(client) = client {
        client.disconnect()?;
    }
    if let Some(session) = session {
        session.abandon()?;
    }
    match rdev {
        Some(rdev) => node::remove(&device, rdev).with_context(|| device.display().to_string()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_device_are_seen_as_the_kernel_counts_them() {
        let stat = |in_flight: &str| {
            format!("61 1 2218 171 90 57 66704 565 {in_flight} 7570 1305 2 0 524296 508 7 59\n")
        };
        assert!(!is_any_in_flight(&stat("       0")) && !is_any_in_flight(""));
        assert!(is_any_in_flight(&stat("       2")) && is_any_in_flight(&stat("12")));
        assert!(!has_requests(Path::new("/proc/self/exe")), "no device");
    }
}
