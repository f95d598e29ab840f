//! The processes of a volume stopped: whoever uses its device is waited for, and what was written is flushed.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use control::host::{LiveDirs, LiveError, Root, VolumeRecord, engine_name};
use control::manager::{ProcessId, State};
use control::transport::is_gone;
use tonic::Code;

use super::device::{self, Users};
use super::grown::note_size;
use super::manager::Manager;
use super::observe::{ANSWER_PATIENCE, connect_engine, has_processes, no_space, remembered};
use super::{Context, room};
use crate::device_names::device_of;
use crate::progress::Progress;
use crate::tell::tell;

/// How long a flush on every replica and their clean close may take.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(180);

/// How long an engine that has said how it ends may take to do so.
const LAST_WORD: Duration = Duration::from_secs(5);

/// How long requests at a device that no engine serves wait for the next one before they fail: an engine is there within seconds of its
/// start, but one may wait for hosts or disks that come back.
const NEXT_ENGINE: Duration = Duration::from_secs(30);

/// How often is asked whether a device is still in use, which looks at every process.
const LOOK: Duration = Duration::from_millis(200);

/// Gives whoever uses the device the time to let go of it. Who does not is named by what follows.
pub(super) async fn wait_until_unused(
    root: &Root,
    volume: &str,
    patience: Duration,
    progress: &mut Progress,
) -> Result<()> {
    if !has_processes(root, &VolumeRecord::load(root, volume)?)? {
        return Ok(());
    }
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline && !fuse_frontend::users_of(&device_of(volume)).is_empty() {
        progress.say("waiting until nobody uses the device");
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

/// Stops the volume's processes, cleanly if its engine answers. The caller holds the volume's lock; `begins` is called before the
/// first of them is told to end.
///
/// # Errors
/// Also of a volume that is down then, but could not be flushed.
pub(super) async fn stop(
    context: &Context,
    record: &VolumeRecord,
    progress: &mut Progress,
    begins: impl Fn(),
) -> Result<()> {
    let (root, volume) = (&context.root, &record.name);
    // That one has a device of its own.
    let is_elsewhere = is_elsewhere(root, volume);
    // Where the manager died, too, the next one brings the engine back, and with it an answer to whoever waits at the device.
    if !is_elsewhere && has_processes(root, record)? {
        Manager::ensure(root).await?;
    }
    let users = match is_elsewhere {
        true => Users::Keep,
        false => without_engine(root, record, progress).await?,
    };
    let mut unclean = None;
    if has_processes(root, record)? {
        let mut manager = Manager::ensure(root).await?;
        let engine = engine_name(volume);
        if remembered(root, &engine)?.map_or(true, |p| p.is_some_and(|p| p.pid().is_some())) {
            unclean = shut_down(context, volume, users, progress, &begins).await?;
        }
        begins();
        progress.say("stopping the processes");
        manager.end(&[engine]).await?;
        let replicas: Vec<String> = record.replicas.iter().map(|r| r.name.clone()).collect();
        manager.end(&replicas).await?;
    }
    if !is_elsewhere {
        let device = device_of(volume);
        let losers = if users == Users::Lose { device::users(&device) } else { String::new() };
        device::release(volume, root, users)?;
        if !losers.is_empty() {
            tell!(
                "no engine came, and requests that waited for one at {} have failed ({losers})",
                device.display()
            );
        }
    }
    LiveDirs::default().forget(volume, root);
    match unclean {
        None => Ok(()),
        Some(why) => bail!(
            "volume {volume} is down, but not flushed ({why}): the next `longhornctl up {volume}` repairs what its replicas may differ by{}",
            room::way_out(record).map_or_else(String::new, |full| format!(". {full}"))
        ),
    }
}

/// True if a volume of this name is up under another root.
pub(super) fn is_elsewhere(root: &Root, volume: &str) -> bool {
    matches!(LiveDirs::default().check_free(volume, root), Err(LiveError::Elsewhere { .. }))
}

/// What becomes of those who use the device while no engine serves it. Who has nothing in flight there can close it, and it stays
/// with him. A request holds whoever has made it until it is answered: where no engine is left that would, it fails.
///
/// # Errors
/// Somebody uses the device who can close it.
async fn without_engine(root: &Root, record: &VolumeRecord, progress: &mut Progress) -> Result<Users> {
    let device = device_of(&record.name);
    let deadline = Instant::now() + NEXT_ENGINE;
    loop {
        let engine = next_engine(root, record).await?;
        if engine == Engine::Serves {
            return Ok(Users::Keep);
        }
        if !device::has_requests(&device) {
            return device::check_unused(&device).map(|()| Users::Keep);
        }
        if engine == Engine::None || Instant::now() > deadline {
            return Ok(Users::Lose);
        }
        progress.say(&format!(
            "requests at {} wait for an engine; if none comes within {} s they fail",
            device.display(),
            NEXT_ENGINE.as_secs()
        ));
        tokio::time::sleep(LOOK).await;
    }
}

/// What can be expected of a volume's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    /// It serves the device, or may: it says so itself whether somebody uses that.
    Serves,
    /// It is being started, again and again perhaps, or waits for its replicas.
    Comes,
    /// There is none, and nobody starts one.
    None,
}

async fn next_engine(root: &Root, record: &VolumeRecord) -> Result<Engine> {
    let process = remembered(root, &engine_name(&record.name))?;
    let (state, runs) = match &process {
        // Whether it runs nobody knows.
        Err(_) => (None, true),
        Ok(process) => {
            (process.as_ref().map(|p| p.state), process.as_ref().is_some_and(|p| p.pid().is_some()))
        }
    };
    match (runs, state) {
        (true, _) => {}
        (false, None | Some(State::Stopped | State::Error)) => return Ok(Engine::None),
        (false, Some(_)) => return Ok(Engine::Comes),
    }
    let Some(mut engine) = connect_engine(root, &record.name).await else { return Ok(Engine::Comes) };
    match tokio::time::timeout(ANSWER_PATIENCE, engine.volume_get(())).await {
        Ok(Ok(view)) if view.get_ref().frontend_state != "up" => Ok(Engine::Comes),
        Ok(Err(status)) if is_gone(&status) => Ok(Engine::Comes),
        // One that does not answer here may answer at its device.
        _ => Ok(Engine::Serves),
    }
}

/// Lets the engine end cleanly. One that does not answer is left to its manager, and the next start repairs. `Some`: it has ended,
/// and could not do so cleanly, which says why.
async fn shut_down(
    context: &Context,
    volume: &str,
    users: Users,
    progress: &mut Progress,
    begins: impl Fn(),
) -> Result<Option<String>> {
    let unasked = || users.check(&device_of(volume)).map(|()| None);
    // It is just beginning, and about to take its device over.
    let Some(mut engine) = connect_engine(&context.root, volume).await else { return unasked() };
    let view = match tokio::time::timeout(ANSWER_PATIENCE, engine.volume_get(())).await {
        Ok(Err(status)) if is_gone(&status) => return unasked(),
        Ok(view) => view.context("the engine does not answer")?.into_inner(),
        Err(_) => return unasked(),
    };
    if !view.device.is_empty() {
        device::check_unused(Path::new(&view.device)).map_err(|used| match view.lacks_space {
            // Whoever has made a request can neither close the device nor be killed before it is answered.
            true => {
                anyhow!("{used}. What waits for a write there ends when that goes on: {}", no_space(volume))
            }
            false => used,
        })?;
    }
    note_size(&context.root, volume, &view)?;
    let process = remembered(&context.root, &engine_name(volume))?.ok().flatten();
    let process = process.and_then(|record| record.process);
    begins();
    progress.say("flushing");
    match tokio::time::timeout(SHUTDOWN_PATIENCE, engine.volume_shutdown(())).await {
        Ok(Ok(_)) => Ok(None),
        // It ended before its answer was through, or it was killed before it had flushed.
        Ok(Err(status)) if is_gone(&status) => Ok((!has_ended_well(&context.root, volume, process).await)
            .then(|| "its engine ended before it could say so".to_owned())),
        Ok(Err(status)) if status.code() == Code::Internal && has_ended(process).await => {
            Ok(Some(status.message().to_owned()))
        }
        Ok(Err(status)) if view.lacks_space => bail!(
            "volume {volume} cannot be stopped: {}. It waits for space: {}",
            status.message(),
            no_space(volume)
        ),
        Ok(Err(status)) => Err(status).with_context(|| format!("volume {volume} cannot be stopped")),
        Err(_) => bail!(
            "volume {volume} is not flushed after {} s{}: see `longhornctl status {volume}`",
            SHUTDOWN_PATIENCE.as_secs(),
            match (view.lacks_space, view.waiting_for.as_str()) {
                (true, _) => format!(" ({})", no_space(volume)),
                (false, "") => String::new(),
                (false, other) => format!(" ({other})"),
            }
        ),
    }
}

/// True if the engine's process has ended by itself, having done what it was told, as its manager has seen; or was deleted by another command,
/// which has told it to end before, and has waited for that.
async fn has_ended_well(root: &Root, volume: &str, process: Option<ProcessId>) -> bool {
    let until = Instant::now() + LAST_WORD;
    loop {
        match remembered(root, &engine_name(volume)) {
            Ok(Ok(None)) => return true,
            Ok(Ok(Some(now))) if now.state == State::Stopped => return true,
            Ok(Ok(Some(now))) if now.process == process && Instant::now() < until => {}
            _ => return false,
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// True if the engine's process is gone, or soon: it has taken the volume away and cannot do more. Its manager may have started
/// another one meanwhile, if that one was not its own child.
async fn has_ended(process: Option<ProcessId>) -> bool {
    let until = Instant::now() + LAST_WORD;
    while process.as_ref().is_some_and(ProcessId::is_alive) {
        if Instant::now() > until {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
    true
}
