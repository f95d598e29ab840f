//! How full a volume is, and whether it still answers.

use std::path::Path;

use nix::sys::statvfs::statvfs;

use super::filesystem;
use super::mounts::{Mount, block_numbers, mount_at, mounts};
use crate::Refused;
use crate::guard::Held;
use crate::proto::csi::volume_usage::Unit;
use crate::proto::csi::{NodeGetVolumeStatsResponse, VolumeCondition, VolumeUsage};

/// The figures of a volume that is mounted, or bound as a device, at a path. `held` ends with the last of it that may hang.
pub(super) async fn stats(
    device: &Path,
    path: &Path,
    held: Held,
) -> Result<NodeGetVolumeStatsResponse, Refused> {
    let missing = || Refused::Missing(format!("the volume is not at {}", path.display()));
    let ours = block_numbers(device).ok_or_else(missing)?;
    if block_numbers(path) == Some(ours) {
        let total = i64::try_from(filesystem::size(device)?).unwrap_or(i64::MAX);
        let usage = VolumeUsage { total, unit: Unit::Bytes.into(), ..VolumeUsage::default() };
        return Ok(told(vec![usage], String::new()));
    }
    mount_at(path)?.filter(|m| m.device == ours).ok_or_else(missing)?;
    // Where one only reads, the mount there does not tell a file system that was stopped from one that is for reading only.
    let all: Vec<Mount> = mounts()?.into_iter().filter(|m| m.device == ours).collect();
    // A file system whose volume waits for its replicas may keep whoever asks, and a thread with it.
    let place = path.to_owned();
    let ask = move || {
        let found = (statvfs(&place), all.iter().any(Mount::has_stopped));
        drop(held);
        found
    };
    let asked = tokio::task::spawn_blocking(ask).await;
    let (found, stopped) = asked.map_err(|e| Refused::Failed(e.to_string()))?;
    let found = found.map_err(|e| Refused::Failed(format!("{}: {e}", path.display())))?;
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let piece = found.fragment_size();
    let bytes = |blocks: u64| number(blocks.saturating_mul(piece));
    let space = VolumeUsage {
        available: bytes(found.blocks_available()),
        total: bytes(found.blocks()),
        used: bytes(found.blocks().saturating_sub(found.blocks_free())),
        unit: Unit::Bytes.into(),
    };
    let inodes = VolumeUsage {
        available: number(found.files_free()),
        total: number(found.files()),
        used: number(found.files().saturating_sub(found.files_free())),
        unit: Unit::Inodes.into(),
    };
    let trouble = if stopped { "the file system takes no writes any more: see the kernel's log" } else { "" };
    Ok(told(vec![space, inodes], trouble.to_owned()))
}

fn told(usage: Vec<VolumeUsage>, trouble: String) -> NodeGetVolumeStatsResponse {
    let abnormal = !trouble.is_empty();
    let message = if abnormal { trouble } else { "the volume answers".to_owned() };
    NodeGetVolumeStatsResponse { usage, volume_condition: Some(VolumeCondition { abnormal, message }) }
}
