//! `resize`: a larger volume.

use anyhow::{Context as _, Result, bail};
use control::proto::ptypes;
use lh_block::format_size;

use super::Context;
use super::args::Output;
use super::engine::with_engine;
use super::observe::{connect_engine, observe};
use super::output::print_json;

pub(super) async fn run(context: &Context, volume: &str, size: u64) -> Result<()> {
    let root = &context.root;
    let view = with_engine(context, volume, async |record, progress| {
        if size < record.size {
            bail!(
                "volume {volume} has {} and never shrinks: make a smaller volume and copy what it is to hold",
                format_size(record.size)
            );
        }
        let Some(mut engine) = connect_engine(root, volume).await else {
            bail!("the engine of volume {volume} does not answer: see `longhornctl status {volume}`");
        };
        let now = engine.volume_get(()).await?.into_inner().size;
        let wanted = i64::try_from(size)?;
        if now != wanted {
            progress.say("growing every replica");
            let asked = engine.volume_expand(ptypes::VolumeExpandRequest { size: wanted }).await;
            asked.with_context(|| format!("volume {volume} stays as large as it is"))?;
        }
        // After the replicas: a record that is behind is believed less than they are.
        record.size = size;
        record.store(root)?;
        observe(root, record).await
    });
    let view = view.await?;
    if context.output == Output::Json {
        return print_json(&view);
    }
    eprintln!("{volume} has {}", format_size(size));
    if let Some(device) = &view.device {
        eprintln!(
            "\nA file system on it grows with:   resize2fs {device}   (ext4), or xfs_growfs MOUNTPOINT (XFS)"
        );
    }
    Ok(())
}
