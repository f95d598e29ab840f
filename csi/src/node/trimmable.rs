//! Where a volume's file system can be trimmed on this node, and one piece of that.

use std::path::{Path, PathBuf};

use super::NodeService;
use super::filesystem::{must, run, said, size, text};
use super::mounts::{Mount, block_numbers, mount_at, mounts};
use super::target::bound;
use crate::Refused;

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trimmable {
    /// Where it is mounted.
    pub(super) point: PathBuf,
    /// Bytes of its device, which the file system may not have yet.
    pub(super) size: u64,
    /// The numbers of its device.
    device: (u64, u64),
}

impl NodeService {
    /// Where the volume's file system is mounted.
    ///
    /// # Errors
    /// [`Refused::Missing`] or [`Refused::Precondition`]: there is none here that could be trimmed, and why.
    pub(super) fn trimmable(&self, volume: &str) -> Result<Trimmable, Refused> {
        let path = self.device(volume)?;
        let (device, mounted) = mounted_from(&path, &mounts()?, volume)?;
        Ok(Trimmable { point: mounted.point, size: size(&path)?, device })
    }
}

/// The mount to trim by, of those of a device.
fn mounted_from(path: &Path, all: &[Mount], volume: &str) -> Result<((u64, u64), Mount), Refused> {
    let missing = || Refused::Missing(format!("the device of volume {volume} is gone"));
    let device = block_numbers(path).ok_or_else(missing)?;
    // The staged one comes first: what pods see was bound from it.
    let Some(mount) = all.iter().find(|m| m.device == device) else {
        return Err(Refused::Precondition(match bound(path)? {
            Some(there) => format!(
                "volume {volume} is used as a device ({}): whoever uses it trims it",
                there.point.display()
            ),
            None => format!("volume {volume} is attached, and no file system of it is mounted"),
        }));
    };
    if mount.super_read_only {
        return Err(Refused::Precondition(format!("volume {volume} is mounted for reading only")));
    }
    Ok((device, mount.clone()))
}

impl Trimmable {
    /// Trims what of the file system lies from that byte of it on, so many bytes. Gives back how many bytes the volume was
    /// told of; `None`: the file system ends before.
    pub(super) async fn trim(&self, from: u64, length: u64) -> Result<Option<u64>, Refused> {
        // Where nothing is mounted any more the node's own file system would be trimmed.
        if mount_at(&self.point)?.is_none_or(|there| there.device != self.device) {
            return Err(Refused::Precondition(format!(
                "the volume is not mounted at {} any more",
                self.point.display()
            )));
        }
        let (from_text, length) = (from.to_string(), length.to_string());
        let args = ["--verbose", "--offset", &from_text, "--length", &length, text(&self.point)?];
        if from == 0 {
            let told = must("fstrim", &args).await?;
            return Ok(Some(bytes_in(&String::from_utf8_lossy(&told.stdout)).unwrap_or_default()));
        }
        let told = run("fstrim", &args).await?;
        match told.status.success() {
            true => Ok(Some(bytes_in(&String::from_utf8_lossy(&told.stdout)).unwrap_or_default())),
            // A file system that was not grown to its device yet.
            false if said(&told).contains("Invalid argument") => Ok(None),
            false => Err(Refused::Failed(format!("fstrim: {}: {}", told.status, said(&told)))),
        }
    }
}

/// Of "/mnt: 1 GiB (1073741824 bytes) trimmed" the number of bytes.
fn bytes_in(said: &str) -> Option<u64> {
    let (number, _) = said.rsplit_once('(')?.1.split_once(' ')?;
    number.parse().ok()
}
