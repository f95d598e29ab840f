//! Devices that an engine before has left behind: who finds them, and how one goes that nobody is to take over.

use std::io;
use std::time::Instant;

use lh_ring::sys::is_shortage;

use crate::abi::{DeviceInfo, DeviceState, control_op};
use crate::driver::{LOOK, PATIENCE, PREDECESSOR, delete, info, read_params};
use crate::error::{AttachError, refused, unreachable};
use crate::identity::mark;
use crate::kernel::Control;
use crate::nodes;

/// True if the kernel has a device of this volume, served or not.
///
/// # Errors
/// The system's: it could not be looked, which does not say that there is none.
pub fn has_device(owner: &str, volume: &str) -> io::Result<bool> {
    let Some(control) = if_reached(Control::open())? else { return Ok(false) };
    let mark = mark(owner, volume);
    for device in nodes::devices()? {
        if if_there(info(&control, device))?.is_some_and(|info| info.ublksrv_flags == mark) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Without a driver, or with one that is out of reach, no device here is ours.
fn if_reached<T>(opened: io::Result<T>) -> io::Result<Option<T>> {
    match opened {
        Err(e) if is_shortage(&e) => Err(e),
        opened => Ok(opened.ok()),
    }
}

/// A device that goes away meanwhile (ENODEV) is none; nor is one that an unprivileged user has made (EINVAL), of which only the path of
/// its node would tell more.
fn if_there(info: io::Result<DeviceInfo>) -> io::Result<Option<DeviceInfo>> {
    match info {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::EINVAL)) => Ok(None),
        info => info.map(Some),
    }
}

/// Major and minor number of the device that an engine of this volume left behind; `None`: there is none.
///
/// # Errors
/// [`AttachError`]: also of one that is served.
pub fn left_behind(owner: &str, volume: &str) -> Result<Option<(u32, u32)>, AttachError> {
    let control = Control::open().map_err(unreachable)?;
    let Some(info) = find(&control, mark(owner, volume))? else { return Ok(None) };
    let params = read_params(&control, info.dev_id);
    let params = params.map_err(refused(format!("ublk device {} cannot be looked at", info.dev_id)))?;
    Ok(Some((params.numbers.disk_major, params.numbers.disk_minor)))
}

/// Takes a device away that an engine left behind: what waits for it fails, whoever uses it. Its major and minor number, for its
/// nodes of other names; `None`: there was no such device.
///
/// # Errors
/// [`AttachError`].
pub fn remove_left_behind(owner: &str, volume: &str) -> Result<Option<(u32, u32)>, AttachError> {
    let control = Control::open().map_err(unreachable)?;
    let Some(info) = find(&control, mark(owner, volume))? else { return Ok(None) };
    let removed = read_params(&control, info.dev_id).and_then(|params| {
        control.order(control_op::STOP_DEV, info.dev_id, 0, PATIENCE)?;
        delete(&control, info.dev_id)?;
        Ok((params.numbers.disk_major, params.numbers.disk_minor))
    });
    removed.map(Some).map_err(refused(format!("ublk device {} cannot be removed", info.dev_id)))
}

/// The device with this mark, if it has no server or just loses it.
pub(crate) fn find(control: &Control, mark: u64) -> Result<Option<DeviceInfo>, AttachError> {
    let deadline = Instant::now() + PREDECESSOR;
    for device in nodes::devices().map_err(refused("ublk devices cannot be listed"))? {
        let found = look_at(mark, deadline, || info(control, device));
        match found.map_err(refused(format!("ublk device {device} cannot be looked at")))? {
            Found::Other => {}
            Found::LeftBehind(info) => return Ok(Some(info)),
            Found::Leftover => {
                delete(control, device).map_err(refused(format!("ublk device {device}, a leftover")))?;
            }
            Found::Served(pid) => return Err(AttachError::Served { device, pid }),
        }
    }
    Ok(None)
}

/// What a device is to whoever looks for a volume's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// Somebody else's.
    Other,
    /// The volume's, without a server.
    LeftBehind(DeviceInfo),
    /// The volume's, without a disk: its maker died before it was shown, or while it was taken away.
    Leftover,
    /// The volume's, and this process serves it.
    Served(i32),
}

/// What a device is whose `info` the kernel tells. One that is served is looked at until the deadline: its server may be dying.
fn look_at(
    mark: u64,
    deadline: Instant,
    mut info: impl FnMut() -> io::Result<DeviceInfo>,
) -> io::Result<Found> {
    loop {
        let Some(found) = if_there(info())? else { return Ok(Found::Other) };
        if found.ublksrv_flags != mark {
            return Ok(Found::Other);
        }
        match DeviceState::of(&found) {
            Some(DeviceState::Quiesced | DeviceState::FailIo) => return Ok(Found::LeftBehind(found)),
            Some(DeviceState::Dead) => return Ok(Found::Leftover),
            Some(DeviceState::Live) | None if Instant::now() < deadline => std::thread::sleep(LOOK),
            Some(DeviceState::Live) | None => return Ok(Found::Served(found.ublksrv_pid)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MARK: u64 = 7;

    fn told(state: u16, ublksrv_flags: u64) -> DeviceInfo {
        DeviceInfo { state, ublksrv_flags, ublksrv_pid: 9, ..DeviceInfo::default() }
    }

    fn seen(mut answers: Vec<io::Result<DeviceInfo>>) -> io::Result<Found> {
        answers.reverse();
        look_at(MARK, Instant::now() + Duration::from_secs(60), || answers.pop().unwrap())
    }

    #[test]
    fn a_device_is_known_by_its_mark_and_state() {
        assert_eq!(seen(vec![Ok(told(2, MARK))]).unwrap(), Found::LeftBehind(told(2, MARK)));
        assert_eq!(seen(vec![Ok(told(3, MARK))]).unwrap(), Found::LeftBehind(told(3, MARK)));
        assert_eq!(seen(vec![Ok(told(0, MARK))]).unwrap(), Found::Leftover);
        assert_eq!(seen(vec![Ok(told(2, MARK + 1))]).unwrap(), Found::Other);
        let served = look_at(MARK, Instant::now(), || Ok(told(1, MARK)));
        assert_eq!(served.unwrap(), Found::Served(9));
    }

    #[test]
    fn a_server_that_dies_is_waited_for() {
        let found = seen(vec![Ok(told(1, MARK)), Ok(told(1, MARK)), Ok(told(2, MARK))]);
        assert_eq!(found.unwrap(), Found::LeftBehind(told(2, MARK)));
        let gone = seen(vec![Ok(told(1, MARK)), Err(io::Error::from_raw_os_error(libc::ENODEV))]);
        assert_eq!(gone.unwrap(), Found::Other);
    }

    /// A volume that has one already would get a second device, and whoever uses the first would wait for ever.
    #[test]
    fn one_that_cannot_be_looked_at_is_not_passed_over() {
        let failed = |errno| seen(vec![Err(io::Error::from_raw_os_error(errno))]);
        for errno in [libc::ENOMEM, libc::EMFILE, libc::EAGAIN, libc::EPERM] {
            assert_eq!(failed(errno).unwrap_err().raw_os_error(), Some(errno));
        }
        // Gone, or an unprivileged user's.
        for errno in [libc::ENODEV, libc::EINVAL] {
            assert_eq!(failed(errno).unwrap(), Found::Other);
        }
    }

    /// The volume would be shown by another frontend, beside a device that somebody has open.
    #[test]
    fn a_driver_that_cannot_be_opened_just_now_is_not_taken_for_none() {
        let reached = |errno| if_reached(Err::<(), _>(io::Error::from_raw_os_error(errno)));
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            assert_eq!(reached(errno).unwrap_err().raw_os_error(), Some(errno));
        }
        for errno in [libc::ENOENT, libc::EACCES, libc::ENODEV] {
            assert!(reached(errno).unwrap().is_none());
        }
    }
}
