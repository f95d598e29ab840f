//! `trim volume`: what the file system on a volume does not use any more is given back. Longhorn's longhornctl has it.

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use control::host::VolumeRecord;
use serde::Serialize;

use super::Context;
use super::args::Output;
use super::observe::observe;
use super::output::{print, print_json};
use crate::mounts::mount_of;

/// What `trim volume -o json` prints.
#[derive(Debug, Serialize)]
struct TrimView {
    volume: String,
    mount_point: String,
    /// Bytes that the file system has told the volume of.
    bytes: Option<u64>,
}

pub(super) async fn run(context: &Context, volume: &str) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let Some(device) = observe(&context.root, &record).await?.device else {
        bail!("volume {volume} has no device here: `longhornctl up {volume}` shows it");
    };
    let Some(mount_point) = mount_of(device.as_ref())? else {
        bail!("{device} is not mounted on this host: mount it, or trim it where it is");
    };
    let trimmed = Command::new("fstrim").arg("--verbose").arg(&mount_point).output();
    let trimmed = trimmed.context("fstrim cannot be run: it comes with util-linux")?;
    if !trimmed.status.success() {
        bail!("{}", String::from_utf8_lossy(&trimmed.stderr).trim());
    }
    let said = String::from_utf8_lossy(&trimmed.stdout);
    match context.output {
        Output::Table => print(&said),
        Output::Json => print_json(&TrimView {
            volume: volume.to_owned(),
            mount_point: mount_point.display().to_string(),
            bytes: bytes_in(&said),
        }),
    }
}

/// Of "/mnt: 1 GiB (1073741824 bytes) trimmed" the number of bytes.
fn bytes_in(said: &str) -> Option<u64> {
    let (number, _) = said.rsplit_once('(')?.1.split_once(' ')?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_in_brackets() {
        assert_eq!(
            bytes_in("/mnt/a (b): 46.5 MiB (48709632 bytes) trimmed on /dev/longhorn/v\n"),
            Some(48_709_632)
        );
        assert_eq!(bytes_in("nothing"), None);
    }
}
