//! `down`: flush and stop.

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::{LockError, Root, VolumeRecord};

use super::args::{DownArgs, Output};
use super::observe::{Attachment, Mode, Robustness, VolumeView, has_processes, observe};
use super::output::print_json;
use super::stop::{stop, wait_until_unused};
use super::{Context, damaged, engine, interrupt, lock};
use crate::progress::Progress;
use crate::sentence::sentence;
use crate::tell::tell;

/// How a volume is stopped.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// It is still one that is to be up.
    pub(super) for_now: bool,
    /// How long whoever uses its device may go on.
    pub(super) patience: Duration,
}

impl How {
    pub(super) fn of(args: &DownArgs) -> Self {
        Self { for_now: args.for_now, patience: Duration::from_secs(args.wait) }
    }
}

pub(super) async fn run(context: &Context, volume: &str, args: &DownArgs) -> Result<()> {
    let how = How::of(args);
    let mut progress = Progress::new();
    let is_damaged = damaged::is_damaged(&VolumeRecord::load(&context.root, volume));
    let view = if is_damaged {
        without_record(context, volume, &mut progress).await?
    } else {
        interrupt::leaves(format!("volume {volume} stays up as it was"));
        wait_until_unused(&context.root, volume, how.patience, &mut progress).await?;
        end(context, volume, how, &mut progress, || interrupt::leaves(interrupt::left_by_down(args))).await?
    };
    drop(progress);
    match context.output {
        Output::Json => print_json(&view),
        Output::Table if is_damaged => {
            tell!("{volume} is down; {}", view.remark);
            Ok(())
        }
        Output::Table => {
            tell!("{volume} is down; its data stays: longhornctl up {volume} starts it again");
            tell_behind(&view);
            Ok(())
        }
    }
}

/// Whoever breaks off a rebuild by this is told that it is not lost.
fn tell_behind(view: &VolumeView) {
    let (in_sync, behind): (Vec<_>, Vec<_>) =
        view.replicas.iter().partition(|replica| replica.mode == Mode::Rw);
    let names: Vec<&str> = behind.iter().map(|replica| replica.name.as_str()).collect();
    if !in_sync.is_empty() && !names.is_empty() {
        let are = if names.len() == 1 { "is" } else { "are" };
        tell!("{} {are} not in sync, and brought in sync once it is up", names.join(", "));
    }
}

/// Waits for whoever uses the volume's device, and stops it.
pub(super) async fn one(
    context: &Context,
    volume: &str,
    how: How,
    progress: &mut Progress,
) -> Result<VolumeView> {
    if damaged::is_damaged(&VolumeRecord::load(&context.root, volume)) {
        return without_record(context, volume, progress).await;
    }
    wait_until_unused(&context.root, volume, how.patience, progress).await?;
    end(context, volume, how, progress, || ()).await
}

/// Stops the processes of a volume whose record cannot be read.
///
/// # Errors
/// There is none, or as of any volume.
async fn without_record(context: &Context, volume: &str, progress: &mut Progress) -> Result<VolumeView> {
    let root = &context.root;
    let _lock = lock::name(root, volume)?;
    let why = match VolumeRecord::load(root, volume) {
        Err(e) => sentence(&e.into()),
        Ok(_) => bail!("the record of volume {volume} is back: give the command again"),
    };
    let known = damaged::by_processes(root, volume)?;
    if !has_processes(root, &known)? {
        bail!("{why}");
    }
    stop(context, &known, progress, || ()).await?;
    Ok(VolumeView {
        name: volume.to_owned(),
        state: Attachment::Detached,
        robustness: Robustness::Unknown,
        remark: why,
        log_directory: root.logs(),
        ..VolumeView::default()
    })
}

/// Stops a volume, and notes whether it is to be up. `begins` is called before anything of it is told to end.
async fn end(
    context: &Context,
    volume: &str,
    how: How,
    progress: &mut Progress,
    begins: impl Fn(),
) -> Result<VolumeView> {
    let root = &context.root;
    let (_lock, record) = match lock::volume(root, volume) {
        Ok((lock, record)) => (Some(lock), record),
        // Nobody can take the lock of a root that cannot be written, and there is nothing to change.
        Err(e) if is_read_only(&e) && is_down(root, volume)? => (None, VolumeRecord::load(root, volume)?),
        Err(e) => return Err(e),
    };
    let was_up = has_processes(root, &record)? && !engine::is_left_over(root, &record)?;
    let unclean = match stop(context, &record, progress, begins).await {
        Ok(()) => None,
        Err(e) if has_processes(root, &record).unwrap_or(true) => return Err(e),
        // It is down, though not as it should be, and is noted as such.
        Err(e) => Some(e),
    };
    match how.for_now {
        // Of a program that noted nothing; without a note the volume is only not started by itself.
        true if was_up => record.note_up(root),
        true => Ok(()),
        false if !VolumeRecord::is_noted_up(root, volume) => Ok(()),
        false => record.note_down(root),
    }
    .with_context(|| format!("volume {volume} is down, but its note for `up --all` stays as it was"))?;
    if let Some(e) = unclean {
        return Err(e);
    }
    // It may have been behind its engine.
    observe(root, &VolumeRecord::load(root, volume)?).await
}

/// True if the volume has no process, and is noted to have none.
fn is_down(root: &Root, volume: &str) -> Result<bool> {
    let record = VolumeRecord::load(root, volume)?;
    Ok(!has_processes(root, &record)? && !VolumeRecord::is_noted_up(root, volume))
}

fn is_read_only(e: &anyhow::Error) -> bool {
    matches!(e.downcast_ref(), Some(LockError::Io { source, .. }) if source.kind() == ErrorKind::ReadOnlyFilesystem)
}
