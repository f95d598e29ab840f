//! `upgrade`: another program for a volume's engine, under whatever uses the volume.
//!
//! It is the path of a crash: the engine is ended, its manager starts the next one with the next generation, and that one
//! takes the device over. Requests wait meanwhile. A program that does not come up is exchanged for the one before.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use control::host::{Root, VolumeRecord, engine_name, store_program};
use control::manager::ProcessRecord;
use control::proto::imrpc::{ProcessResponse, ProcessSpec};

use super::args::{Output, UpgradeArgs};
use super::interrupt::{self, Held};
use super::manager::Manager;
use super::observe::{VolumeView, observe};
use super::output::print_json;
use super::start::{failure_since, is_shown};
use super::{Context, engine, lock};
use crate::progress::Progress;
use crate::sentence::sentence;
use crate::tell::tell;

/// How long the next engine may take until its endpoint is usable, in-doubt ranges made equal included.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often is asked meanwhile.
const LOOK: Duration = Duration::from_millis(20);

pub(super) async fn run(context: &Context, args: &UpgradeArgs) -> Result<()> {
    let (root, volume) = (&context.root, &args.volume);
    VolumeRecord::load(root, volume)?;
    let binary = args.binary.as_deref().map(|program| install(root, program)).transpose()?;
    let (_lock, record) = lock::volume(root, volume)?;
    let mut progress = Progress::new();
    if engine::is_ending(root, &record).await {
        bail!("volume {volume} is being stopped: `longhornctl down {volume}` waits for that");
    }
    if ProcessRecord::load(root, &engine_name(volume))?.is_none() {
        bail!("volume {volume} is not up: start it first with `longhornctl up {volume}`");
    }
    let mut manager = Manager::ensure(root).await?;
    let before = observe(root, &record).await?;
    // One that does not answer is replaced as well: an upgrade to a program that does not start may have been broken off.
    let running = manager.list().await?.remove(&engine_name(volume)).and_then(|process| process.spec);
    let running = running.with_context(|| format!("volume {volume} has no engine"))?;
    // Nobody else would go back to the program before.
    let held = interrupt::hold();
    interrupt::leaves(format!(
        "volume {volume} may be without an engine that starts: `longhornctl upgrade {volume}` gives it one of the instance \
         manager's own program"
    ));
    progress.say("replacing the engine");
    let path = binary.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
    let next = ProcessSpec { binary: path, ..running.clone() };
    let mut exchange =
        Exchange { root, record: &record, manager: &mut manager, held: &held, progress: &mut progress };
    let view = match exchange.replace(next, before.generation).await {
        Ok(view) => view,
        Err(e) => {
            exchange.progress.say("going back to the program before");
            return Err(match exchange.go_back(running, before.generation).await {
                Ok(_) => anyhow!("{}; the volume runs with the program that it had before", sentence(&e)),
                Err(worse) => {
                    let worse = sentence(&worse);
                    e.context(format!("(and the program before does not start either: {worse})"))
                }
            });
        }
    };
    interrupt::leaves(format!("volume {volume} has a new engine, and is shown again"));
    held.let_go();
    drop(progress);
    if context.output == Output::Json {
        return print_json(&view);
    }
    let pid = view.engine_pid.map_or_else(String::new, |pid| format!(" as process {pid}"));
    tell!("{volume} has a new engine{pid}, generation {}", view.generation);
    Ok(())
}

/// What an exchange of the engine's program needs.
struct Exchange<'a> {
    root: &'a Root,
    record: &'a VolumeRecord,
    manager: &'a mut Manager,
    held: &'a Held,
    progress: &'a mut Progress,
}

impl Exchange<'_> {
    /// The same with the program before; it may be the instance manager that was lost.
    async fn go_back(&mut self, spec: ProcessSpec, before: u64) -> Result<VolumeView> {
        *self.manager = Manager::ensure(self.root).await?;
        self.replace(spec, before).await
    }

    /// Exchanges the engine, and waits until the next one shows the volume.
    async fn replace(&mut self, spec: ProcessSpec, before: u64) -> Result<VolumeView> {
        let Self { root, record, manager, held, progress } = self;
        let engine = spec.name.clone();
        let last = manager.list().await?.remove(&engine).unwrap_or_default();
        let args = |process: &ProcessResponse| process.spec.as_ref().map(|spec| spec.args.clone());
        let args_before = args(&last);
        let starts = last.status.map_or(0, |s| s.restarts);
        manager.replace(spec).await?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let view = observe(root, record).await?;
            if view.generation > before && is_shown(&view) {
                return Ok(view);
            }
            // With the old arguments it is still the old one that is told of.
            let next = manager.list().await?.remove(&engine).filter(|next| args(next) != args_before);
            let failure = next.and_then(|next| failure_since(&next.status?, starts));
            if let Some(failure) = failure {
                bail!("the new engine does not start: {failure}");
            }
            if Instant::now() > deadline {
                bail!("the new engine does not show the volume: {} may say why", root.log(&engine).display());
            }
            if held.has_come() {
                progress.say("waiting until the volume is shown again; another signal ends this at once");
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Copies a program to where the instance manager starts programs from; twice the same is one copy.
fn install(root: &Root, program: &Path) -> Result<PathBuf> {
    let program = program.canonicalize().with_context(|| program.display().to_string())?;
    let said = Command::new(&program).arg("--version").output();
    let said = said.with_context(|| format!("{} cannot be run", program.display()))?;
    let version = String::from_utf8_lossy(&said.stdout);
    let version = version.trim().lines().next().unwrap_or_default();
    let Some(number) = version.strip_prefix("longhorn ").filter(|_| said.status.success()) else {
        bail!("{} is no longhorn program: it says {version:?} when asked for its version", program.display());
    };
    let binaries = root.engine_binaries();
    if binaries.canonicalize().is_ok_and(|below| program.starts_with(below)) {
        return Ok(program);
    }
    let mut bytes = Vec::new();
    fs::File::open(&program)?.read_to_end(&mut bytes).with_context(|| program.display().to_string())?;
    let directory = binaries.join(format!("longhorn-{number}-{:08x}", crc32c::crc32c(&bytes)));
    let place = directory.join("longhorn");
    if place.exists() {
        return Ok(place);
    }
    store_program(&place, &mut bytes.as_slice()).with_context(|| place.display().to_string())?;
    Ok(place)
}
