//! `resize`: a larger volume.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::VolumeRecord;
use control::proto::ptypes;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;

use super::Context;
use super::args::Output;
use super::engine::{answer, reach, with_engine};
use super::observe::observe;
use super::output::{exact_size, print_json};
use crate::tell::tell;

/// How long the device may take to become as large as its volume: the engine tells the kernel when it has answered.
const DEVICE_GROWTH: Duration = Duration::from_secs(10);

/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(20);

pub(super) async fn run(context: &Context, volume: &str, size: u64) -> Result<()> {
    let root = &context.root;
    // Before an engine is started for nothing; a volume never shrinks meanwhile either.
    let now = VolumeRecord::load(root, volume)?.size;
    if size < now {
        bail!(
            "volume {volume} has {} and never shrinks: make a smaller volume and copy what it is to hold",
            exact_size(now)
        );
    }
    with_engine(context, volume, async |record, progress| {
        let mut engine = ControllerServiceClient::new(reach(root, volume).await?);
        let now = answer(root, volume, progress, engine.volume_get(())).await?.into_inner().size;
        let wanted = i64::try_from(size)?;
        if now != wanted {
            progress.say("growing every replica");
            let asked = engine.volume_expand(ptypes::VolumeExpandRequest { size: wanted }).await;
            // One that was asked for by a command that was interrupted may have come to its end meanwhile.
            if asked.is_err() && engine.volume_get(()).await?.into_inner().size != wanted {
                asked.with_context(|| format!("volume {volume} stays as large as it is"))?;
            }
        }
        // After the replicas: a record that is behind is believed less than they are.
        record.size = size;
        Ok(record.store(root)?)
    })
    .await?;
    // One that was started for this is gone again.
    let view = observe(root, &VolumeRecord::load(root, volume)?).await?;
    if let Some(device) = &view.device {
        wait_for_device(volume, device, size).await?;
    }
    if context.output == Output::Json {
        return print_json(&view);
    }
    tell!("{volume} has {}", exact_size(size));
    if let Some(device) = &view.device {
        tell!(
            "\nA file system on it grows with:   resize2fs {device}   (ext4), or xfs_growfs MOUNTPOINT (XFS)"
        );
    }
    Ok(())
}

/// Whoever is told that the volume has grown may grow the file system on it at once.
async fn wait_for_device(volume: &str, device: &str, size: u64) -> Result<()> {
    let deadline = tokio::time::Instant::now() + DEVICE_GROWTH;
    loop {
        match device_size(device) {
            Some(now) if now < size && tokio::time::Instant::now() > deadline => bail!(
                "volume {volume} has {} now, and {device} still {}: this kernel lets no device of that kind grow while it is \
                 used (ublk needs Linux 6.16). `longhornctl down {volume}` and `longhornctl up {volume}` show all of it",
                exact_size(size),
                exact_size(now)
            ),
            Some(now) if now < size => tokio::time::sleep(LOOK).await,
            _ => return Ok(()),
        }
    }
}

/// Bytes of a block device, as the kernel tells them without opening it. `None` for what is none any more.
fn device_size(device: &str) -> Option<u64> {
    let numbers = std::fs::metadata(device).ok()?.rdev();
    let (major, minor) = (nix::sys::stat::major(numbers), nix::sys::stat::minor(numbers));
    let sectors = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size")).ok()?;
    // Of 512 bytes, whatever the device's blocks are.
    Some(sectors.trim().parse::<u64>().ok()? * 512)
}
