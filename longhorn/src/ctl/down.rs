//! `down`: flush and stop.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::{LiveDirs, LiveError, VolumeRecord, engine_name};
use control::manager::ProcessRecord;
use control::transport::is_gone;

use super::args::{DownArgs, Output};
use super::manager::Manager;
use super::observe::{ANSWER_PATIENCE, connect_engine, has_processes, observe};
use super::output::print_json;
use super::{Context, device, lock};
use crate::daemon::device_of;
use crate::progress::Progress;
use crate::tell::tell;

/// How long a flush on every replica and their clean close may take.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(180);

pub(super) async fn run(context: &Context, args: &DownArgs) -> Result<()> {
    let root = &context.root;
    let volume = &args.volume;
    let mut progress = Progress::new();
    let (_lock, record) = lock::volume(root, volume)?;
    stop(context, &record, &mut progress).await?;
    drop(progress);
    match context.output {
        Output::Json => print_json(&observe(root, &record).await?),
        Output::Table => {
            tell!("{volume} is down; its data stays: longhornctl up {volume} starts it again");
            Ok(())
        }
    }
}

/// Stops the volume's processes, cleanly if its engine answers. The caller holds the volume's lock.
pub(super) async fn stop(context: &Context, record: &VolumeRecord, progress: &mut Progress) -> Result<()> {
    let (root, volume) = (&context.root, &record.name);
    if has_processes(root, record)? {
        let mut manager = Manager::ensure(root).await?;
        let engine = engine_name(volume);
        if ProcessRecord::load(root, &engine)?.is_some_and(|p| p.pid().is_some()) {
            shut_down(context, volume, progress).await?;
        }
        progress.say("stopping the processes");
        manager.end(&[engine]).await?;
        let replicas: Vec<String> = record.replicas.iter().map(|r| r.name.clone()).collect();
        manager.end(&replicas).await?;
    }
    // A volume of this name that is up under another root has a device of its own.
    if let Err(LiveError::Elsewhere { .. }) = LiveDirs::default().check_free(volume, root) {
        return Ok(());
    }
    device::release(volume, root)
}

/// Lets the engine end cleanly. One that does not answer is left to its manager, and the next start repairs.
async fn shut_down(context: &Context, volume: &str, progress: &mut Progress) -> Result<()> {
    let Some(mut engine) = connect_engine(&context.root, volume).await else { return Ok(()) };
    let view = match tokio::time::timeout(ANSWER_PATIENCE, engine.volume_get(())).await {
        Ok(Err(status)) if is_gone(&status) => return device::check_unused(&device_of(volume)),
        Ok(view) => view.context("the engine does not answer")?.into_inner(),
        Err(_) => return device::check_unused(&device_of(volume)),
    };
    if !view.device.is_empty() {
        device::check_unused(Path::new(&view.device))?;
    }
    progress.say("flushing");
    match tokio::time::timeout(SHUTDOWN_PATIENCE, engine.volume_shutdown(())).await {
        Ok(Ok(_)) => Ok(()),
        // It ended before its answer was through: what counts is that it is gone.
        Ok(Err(status)) if is_gone(&status) => Ok(()),
        Ok(Err(status)) => Err(status).with_context(|| format!("volume {volume} cannot be stopped")),
        Err(_) => bail!(
            "volume {volume} is not flushed after {} s{}: see `longhornctl status {volume}`",
            SHUTDOWN_PATIENCE.as_secs(),
            if view.waiting_for.is_empty() { String::new() } else { format!(" ({})", view.waiting_for) }
        ),
    }
}
