//! Which frontends this host can serve, and which one a volume gets that leaves the choice to us.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use fuse_frontend::keeper::Keeper;
use iscsi_frontend::initiator;
use lh_ring::sys::is_shortage;

use crate::arguments::Frontend;
use crate::device_names::{keeper_socket, nbd_identifier, target_name, ublk_owner};
use crate::search_path::search_path;

/// Frontends that make a device, best first.
pub(crate) const DEVICES: [Frontend; 4] = [Frontend::Ublk, Frontend::Nbd, Frontend::Iscsi, Frontend::Fuse];

/// What this host lacks for a frontend, in words that name it; `None` if nothing.
pub(crate) fn missing(frontend: Frontend) -> Option<String> {
    match frontend {
        Frontend::NbdServer | Frontend::IscsiTarget | Frontend::None => None,
        Frontend::Ublk => ublk_frontend::missing(),
        Frontend::Nbd => nbd_frontend::kernel::missing().map(str::to_owned),
        Frontend::Iscsi => initiator::missing(),
        Frontend::Fuse => fuse_frontend::missing(),
        Frontend::Auto => match first() {
            Some(_) => None,
            None => missing(Frontend::Fuse),
        },
    }
}

/// The best that this host has: one that takes the death of an engine well, if there is one.
pub(crate) fn first() -> Option<Frontend> {
    best(|frontend| missing(frontend).is_none(), is_fragile)
}

fn best(has: impl Fn(Frontend) -> bool, is_fragile: impl Fn(Frontend) -> bool) -> Option<Frontend> {
    let sound = DEVICES.into_iter().find(|frontend| has(*frontend) && !is_fragile(*frontend));
    sound.or_else(|| DEVICES.into_iter().find(|frontend| has(*frontend)))
}

/// True if this host has it in a version that may not outlive a killed engine.
pub(crate) fn is_fragile(frontend: Frontend) -> bool {
    frontend == Frontend::Ublk && ublk_frontend::is_fragile()
}

/// What a volume is shown by that leaves the choice to us: what still holds its device, else the best that this host has.
/// A device in use is never exchanged for another because a module was loaded meanwhile.
///
/// # Errors
/// It cannot be told just now whether there is such a device.
pub(crate) fn choose(volume: &str, root: &Path) -> Result<Frontend> {
    let holds = |frontend| {
        holds(frontend, volume, root)
            .with_context(|| format!("looking for a device of {volume} from before (frontend {frontend})"))
    };
    Ok(first_that(holds)?.or_else(first).unwrap_or(Frontend::Fuse))
}

/// The first that holds the volume's device. One that cannot be asked may be it.
fn first_that(holds: impl Fn(Frontend) -> Result<bool>) -> Result<Option<Frontend>> {
    for frontend in DEVICES {
        if holds(frontend)? {
            return Ok(Some(frontend));
        }
    }
    Ok(None)
}

/// A frontend's part of the kernel, or keeper, holds a device of this volume.
fn holds(frontend: Frontend, volume: &str, root: &Path) -> io::Result<bool> {
    match frontend {
        Frontend::Ublk => ublk_frontend::has_device(&ublk_owner(root), volume),
        Frontend::Nbd => Ok(nbd_frontend::kernel::find(&nbd_identifier(root, volume))?.is_some()),
        Frontend::Iscsi => Ok(initiator::find(&target_name(volume))?.is_some()),
        _ => match Keeper::connect(&keeper_socket(volume)) {
            Err(e) if is_shortage(&e) => Err(e),
            keeper => Ok(keeper.is_ok()),
        },
    }
}

/// Has the kernel load what a frontend needs, where it has it as a module.
pub(crate) fn load(frontend: Frontend) {
    let module = match frontend {
        Frontend::Ublk => "ublk_drv",
        Frontend::Nbd => "nbd",
        Frontend::Auto => return DEVICES.into_iter().for_each(load),
        _ => return,
    };
    if missing(frontend).is_some() {
        // Where there is no modprobe or no module, the frontend stays missing, and that is told.
        let _ = Command::new("modprobe")
            .env("PATH", search_path())
            .args(["-q", module])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status();
    }
}

/// Refuses a frontend that this host lacks something for, naming it and what would work.
pub(crate) fn check(frontend: Frontend) -> Result<()> {
    load(frontend);
    let Some(missing) = missing(frontend) else { return Ok(()) };
    let works = first().unwrap_or(Frontend::NbdServer);
    bail!(
        "frontend {frontend} needs {missing}, which this host does not have: add it, or use --frontend {works}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_may_not_outlive_an_engine_is_taken_only_where_there_is_no_other() {
        let old_driver = |frontend| frontend == Frontend::Ublk;
        assert_eq!(best(|_| true, |_| false), Some(Frontend::Ublk));
        assert_eq!(best(|_| true, old_driver), Some(Frontend::Nbd));
        assert_eq!(best(|f| f != Frontend::Nbd, old_driver), Some(Frontend::Iscsi));
        assert_eq!(best(|f| f == Frontend::Ublk, old_driver), Some(Frontend::Ublk));
        assert_eq!(best(|_| false, old_driver), None);
    }

    /// It would get a second device, and whoever has the first one open would wait for ever.
    #[test]
    fn a_volume_whose_device_may_be_there_gets_no_other() {
        let held_by = |held| move |frontend| Ok(frontend == held);
        for frontend in DEVICES {
            assert_eq!(first_that(held_by(frontend)).unwrap(), Some(frontend));
        }
        assert_eq!(first_that(|_| Ok(false)).unwrap(), None);
        let ublk_is_not_told = |frontend| match frontend {
            Frontend::Ublk => Err(io::Error::from_raw_os_error(nix::errno::Errno::EMFILE as i32).into()),
            frontend => Ok(frontend == Frontend::Fuse),
        };
        assert!(first_that(ublk_is_not_told).is_err());
    }
}
