//! `up --all` and `down --all`: what a host does with its volumes when it starts and before it stops.
//!
//! Each volume has a thread of its own, so that none waits for another: one whose replicas are lost takes minutes to say so.

use anyhow::{Result, anyhow, bail};
use control::host::{Root, VolumeRecord, engine_name};
use control::manager::ProcessRecord;
use serde::Serialize;

use super::args::Output;
use super::down::{self, How};
use super::manager::Manager;
use super::observe::{VolumeView, has_processes};
use super::output::{print_json, print_table, table_with_prose};
use super::{Context, damaged, engine, up};
use crate::progress::Progress;
use crate::sentence::sentence;
use crate::tell::tell;

/// What became of one volume, as `-o json` prints it.
#[derive(Debug, Serialize)]
struct Outcome {
    volume: String,
    /// It is as it was to be.
    done: bool,
    /// Why it is not, one sentence; empty if it is.
    error: String,
    /// The volume as it is then, if it was done.
    status: Option<VolumeView>,
}

/// Starts every volume that is to be up.
pub(super) async fn up(context: &Context) -> Result<()> {
    let root = &context.root;
    let names = to_be_up(root)?;
    if names.is_empty() {
        tell!("no volume is to be up: `longhornctl up VOLUME` starts one");
        return show(context, &[], "up");
    }
    // What the volumes' devices need is there before a manager starts again the processes of before.
    names.iter().filter_map(|name| VolumeRecord::load(root, name).ok()).for_each(|r| up::load_modules(&r));
    Manager::ensure(root).await?;
    let outcomes = each(&names, async |name, progress| up::again(context, name, progress).await);
    show(context, &outcomes, "up")
}

/// Stops every volume that is up.
pub(super) async fn down(context: &Context, how: How) -> Result<()> {
    let root = &context.root;
    let mut names = Vec::new();
    for name in VolumeRecord::list(root)? {
        let is_up = match VolumeRecord::load(root, &name) {
            Ok(record) => has_processes(root, &record).unwrap_or(true),
            Err(_) => damaged::check_stopped(root, &name).is_err(),
        };
        if is_up || !how.for_now && VolumeRecord::is_noted_up(root, &name) {
            names.push(name);
        }
    }
    if names.is_empty() {
        tell!("no volume is up");
        return show(context, &[], "down");
    }
    let outcomes = each(&names, async |name, progress| down::one(context, name, how, progress).await);
    show(context, &outcomes, "down")
}

/// The volumes that were noted to be up, and those that a program that did not note it has started.
fn to_be_up(root: &Root) -> Result<Vec<String>> {
    let mut names = VolumeRecord::list(root)?;
    names.retain(|name| VolumeRecord::is_noted_up(root, name) || is_remembered(root, name));
    Ok(names)
}

/// True if the instance manager remembers an engine that shows the volume.
fn is_remembered(root: &Root, volume: &str) -> bool {
    let Ok(record) = VolumeRecord::load(root, volume) else { return false };
    let remembered = ProcessRecord::load(root, &engine_name(volume));
    remembered.is_ok_and(|p| p.is_some()) && engine::is_left_over(root, &record).is_ok_and(|left| !left)
}

/// Does the same with each volume, all at once.
fn each(
    names: &[String],
    work: impl AsyncFn(&str, &mut Progress) -> Result<VolumeView> + Sync,
) -> Vec<Outcome> {
    let one = |name: &String| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(work(name, &mut Progress::about(name)))
    };
    let one = &one;
    std::thread::scope(|scope| {
        let threads: Vec<_> = names.iter().map(|name| (name, scope.spawn(move || one(name)))).collect();
        let outcome = |(name, thread): (&String, std::thread::ScopedJoinHandle<'_, Result<VolumeView>>)| {
            let done = thread.join().unwrap_or_else(|_| Err(anyhow!("this command failed within itself")));
            let error = done.as_ref().err().map(sentence).unwrap_or_default();
            Outcome { volume: name.clone(), done: done.is_ok(), error, status: done.ok() }
        };
        threads.into_iter().map(outcome).collect()
    })
}

/// Tells what became of them; an error if one is not what it was to be.
fn show(context: &Context, outcomes: &[Outcome], wanted: &str) -> Result<()> {
    match context.output {
        Output::Json => print_json(&outcomes)?,
        Output::Table if outcomes.is_empty() => {}
        Output::Table => {
            let mut rows = table_with_prose(&["VOLUME", "STATE", "ENDPOINT", ""], &[3]);
            for o in outcomes {
                let endpoint = o.status.as_ref().map_or("", |view| view.endpoint.as_str());
                rows.add_row([o.volume.as_str(), if o.done { wanted } else { "failed" }, endpoint, &o.error]);
            }
            print_table(&rows)?;
        }
    }
    match outcomes.iter().filter(|o| !o.done).count() {
        0 => Ok(()),
        n => bail!("{n} of {} volumes are not {wanted}", outcomes.len()),
    }
}
