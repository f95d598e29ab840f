//! What a lost device leaves behind: mounts from which nothing can be read any more, at paths of a volume that has another
//! device now.
//!
//! The kernel gives a device's numbers to another one only when nobody has it mounted. So a mount with the numbers of the
//! volume's present device is of that device, however often the path in /dev was made anew.

use std::path::Path;

use super::filesystem::{must, text};
use super::mounts::{Mount, block_numbers, is_gone, mount_at};
use crate::Refused;

/// True if there is anything at one of a volume's paths that [`clear`] would unmount. It says that the volume held a file system.
pub(super) fn left_at(path: &Path, device: &Path) -> Result<bool, Refused> {
    let Some(present) = block_numbers(device) else { return Ok(false) };
    Ok(mount_at(path)?.is_some_and(|there| is_left(&there, device, present)))
}

/// Unmounts from one of a volume's paths what is mounted there from an earlier device of that volume, or from one that the
/// kernel has no more. What is of the present device stays, and what is of anything else.
pub(super) async fn clear(path: &Path, device: &Path) -> Result<(), Refused> {
    // Without a present device nothing says which one is an earlier one.
    let Some(present) = block_numbers(device) else { return Ok(()) };
    while let Some(there) = mount_at(path)?.filter(|there| is_left(there, device, present)) {
        let (major, minor) = there.device;
        let point = text(&there.point)?;
        tracing::warn!(
            path = point,
            device = format!("{major}:{minor}"),
            "what a lost device left is unmounted"
        );
        if let Err(e) = must("umount", &[point]).await {
            tracing::info!(path = point, error = %e, "it goes when nobody uses it any more");
            must("umount", &["--lazy", point]).await?;
        }
    }
    Ok(())
}

/// True for a mount that this driver made of the volume when its device was another one, and of a device that is gone.
fn is_left(mount: &Mount, device: &Path, present: (u64, u64)) -> bool {
    let (major, _) = mount.device;
    // File systems without a device have major 0, and are somebody else's.
    mount.device != present && major != 0 && (mount.source == device || is_gone(mount.device))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn what_is_of_the_present_device_or_somebody_elses_stays() {
        let ours = Path::new("/dev/longhorn/v");
        // The last number of all.
        let gone = (4095, (1 << 20) - 1);
        let mount = |device, source: &str| Mount {
            device,
            root: PathBuf::from("/"),
            point: PathBuf::from("/staging"),
            kind: "ext4".to_owned(),
            source: PathBuf::from(source),
            read_only: false,
            super_read_only: false,
        };
        for (there, left) in [
            (mount((7, 1), "/dev/longhorn/v"), false),
            (mount((7, 2), "/dev/longhorn/v"), true),
            (mount(gone, "/dev/sdx"), true),
            (mount((0, 40), "/dev/longhorn/v"), false),
        ] {
            assert_eq!(is_left(&there, ours, (7, 1)), left, "{there:?}");
        }
        let present = mount(gone, "/dev/longhorn/v");
        assert!(!is_left(&present, ours, gone), "however dead it is");
    }
}
