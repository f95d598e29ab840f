//! An engine for one operation: the volume's own if it is up, else one that shows nothing and ends afterwards.

use std::convert::Infallible;
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use control::host::{LiveDirs, Root, VolumeRecord, engine_name};
use control::manager::ProcessRecord;
use tonic::transport::Channel;

use super::manager::Manager;
use super::observe::{ask_engine, remembered};
use super::start::{start, wait_until_usable};
use super::stop::stop;
use super::{Context, device, interrupt, lock};
use crate::arguments::Frontend;
use crate::progress::Progress;
use crate::waiting::tell_waits;

/// In which an engine answers that waits for nothing.
const SOON: Duration = Duration::from_secs(3);

/// How long is waited for an engine that is started again, as after it died, or was exchanged by an upgrade.
const COMES_BACK: Duration = Duration::from_secs(15);

/// How often work that takes long looks whether there is a manager.
const WATCH: Duration = Duration::from_secs(5);

/// How often is looked whether it is there.
const LOOK: Duration = Duration::from_millis(50);

/// The frontend of an engine for one operation.
const QUIET: Frontend = Frontend::None;

/// True if the volume has an engine for one operation, though it is to be shown somehow. Asked with the volume's lock held,
/// it tells that the command that started this engine was broken off.
pub(super) fn is_left_over(root: &Root, record: &VolumeRecord) -> Result<bool> {
    let quiet = ["--frontend", QUIET.as_str()];
    let engine = remembered(root, &engine_name(&record.name))?;
    let is_quiet = engine.ok().flatten().is_some_and(|e| e.args.windows(2).any(|words| words == quiet));
    Ok(is_quiet && record.frontend != QUIET.as_str())
}

/// True if the volume's engine was told to end. Asked with the volume's lock held, it tells that the `down` that told it so was
/// broken off.
pub(super) async fn is_ending(root: &Root, record: &VolumeRecord) -> bool {
    ask_engine(root, &record.name).await.is_some_and(|engine| engine.volume.ending)
}

/// The way to the engine of a volume that is up. Where it has died its manager starts it again, if need be one that is started
/// here, and it is waited for: nothing was asked of it yet.
///
/// # Errors
/// The volume is not up, or its engine does not come back within 15 s.
pub(super) async fn reach(root: &Root, volume: &str) -> Result<Channel> {
    let socket = root.control_socket(&engine_name(volume));
    let deadline = Instant::now() + COMES_BACK;
    let mut is_watched = false;
    loop {
        if let Ok(channel) = control::transport::connect(&socket).await {
            return Ok(channel);
        }
        if ProcessRecord::load(root, &engine_name(volume))?.is_none() {
            bail!("volume {volume} is not up: start it first with `longhornctl up {volume}`");
        }
        if !is_watched {
            Manager::ensure(root).await?;
            is_watched = true;
        }
        if Instant::now() > deadline {
            bail!("the engine of volume {volume} does not answer: see `longhornctl status {volume}`");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Awaits what the volume's engine answers. Where that takes long, whoever looks on is told what is being waited for, and a manager
/// that died meanwhile is started again.
pub(super) async fn answer<T>(
    root: &Root,
    volume: &str,
    progress: &mut Progress,
    asked: impl Future<Output = T>,
) -> T {
    let mut asked = pin!(asked);
    if let Ok(answer) = tokio::time::timeout(SOON, asked.as_mut()).await {
        return answer;
    }
    progress.say(&format!("the engine has not answered yet: see `longhornctl status {volume}`"));
    let look = async || Some(ask_engine(root, volume).await?.volume);
    tokio::select! {
        answer = watched(root, asked) => answer,
        never = tell_waits(SOON, look, |what| progress.say(what)) => match never {},
    }
}

/// Does some work that may wait for a process of the volume, with somebody there who starts one that died. Without a manager the
/// engine would wait for the replica, this command, which has the volume's lock, for the engine, and `up` for the lock.
pub(super) fn watched<'a, T: 'a>(
    root: &'a Root,
    work: impl Future<Output = T> + 'a,
) -> impl Future<Output = T> + 'a {
    // What a command does is large, and would be moved in once more.
    let mut work = Box::pin(work);
    async move {
        tokio::select! {
            done = &mut work => done,
            never = watch(root) => match never {},
        }
    }
}

async fn watch(root: &Root) -> Infallible {
    loop {
        tokio::time::sleep(WATCH).await;
        // What is needed and cannot be started is told by whoever waits for it.
        Manager::ensure(root).await.ok();
    }
}

/// Does some work while the volume has an engine. Nobody else starts or stops the volume meanwhile. An engine that a command left
/// that was broken off while it stopped the volume is ended first.
///
/// # Errors
/// There is no such volume, it does not start, or the work's own.
pub(super) async fn with_engine<T>(
    context: &Context,
    volume: &str,
    work: impl AsyncFnOnce(&mut VolumeRecord, &mut Progress) -> Result<T>,
) -> Result<T> {
    let root = &context.root;
    let (_lock, mut record) = lock::volume(root, volume)?;
    record.check_ready()?;
    let mut progress = Progress::new();
    if is_ending(root, &record).await {
        stop(context, &record, &mut progress, || ()).await?;
    }
    let has_engine = ProcessRecord::load(root, &engine_name(volume))?.is_some();
    if has_engine && !is_left_over(root, &record)? {
        return watched(root, work(&mut record, &mut progress)).await;
    }
    // Replicas without an engine, or with one that shows nothing, are what such a command left that was broken off.
    LiveDirs::default().check_free(volume, root)?;
    device::release_unused(volume, root)?;
    let mut manager = Manager::ensure(root).await?;
    let mut quiet = record.clone();
    (quiet.frontend, quiet.listen) = (QUIET.to_string(), None);
    // Whoever interrupts it leaves no engine behind that nobody knows of.
    let held = interrupt::hold();
    let worked = async {
        start(root, &quiet, &mut manager, false, &mut progress).await?;
        wait_until_usable(root, &quiet, &mut manager, &mut progress).await?;
        watched(root, work(&mut record, &mut progress)).await
    };
    let done = tokio::select! {
        done = worked => done,
        () = held.wait() => Err(anyhow!("interrupted")),
    };
    if held.has_come() {
        interrupt::leaves(format!("volume {volume} has an engine: `longhornctl down {volume}` ends it"));
    }
    let stopped = stop(context, &record, &mut progress, || ()).await;
    if stopped.is_ok() {
        interrupt::leaves(format!(
            "volume {volume} is down again, and what its engine had not done is not done"
        ));
        held.let_go();
    }
    let done = done?;
    stopped?;
    Ok(done)
}
