//! `scrub`: are the replicas equal, and what they were?

use std::error::Error as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::VolumeRecord;
use control::proto::volume::volume_operations_client::VolumeOperationsClient;
use control::proto::volume::{ScrubFinding, ScrubRequest, ScrubState};
use lh_block::format_size;
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

use super::args::{Output, ScrubArgs};
use super::output::{print, print_json, print_table, table};
use super::{Context, members};
use crate::next_step;
use crate::progress::Progress;
use crate::tell::tell;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(200);

/// A scrub, as `scrub -o json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ScrubView {
    /// It has not ended.
    running: bool,
    /// What it finds is repaired.
    repair: bool,
    /// Bytes.
    done: u64,
    total: u64,
    /// Blocks of 4096 bytes, each replica's counted.
    bad_blocks: u64,
    repaired_blocks: u64,
    findings: Vec<FindingView>,
    notes: Vec<String>,
    /// Why it ended early; empty if it did not.
    error: String,
}

/// Some neighbouring blocks of one replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct FindingView {
    replica: String,
    /// The snapshot, or null: the head.
    snapshot: Option<String>,
    /// Bytes.
    offset: u64,
    length: u64,
    /// "rotten" or "differs".
    flaw: String,
    /// "reported", "repaired", "no_source", "unsure", "conflict" or "failed".
    done: String,
}

impl From<ScrubFinding> for FindingView {
    fn from(f: ScrubFinding) -> Self {
        let snapshot = Some(f.layer).filter(|layer| !layer.is_empty());
        Self { replica: f.replica, snapshot, offset: f.offset, length: f.length, flaw: f.flaw, done: f.done }
    }
}

impl ScrubView {
    fn of(volume: &str, s: ScrubState) -> Self {
        Self {
            running: s.running,
            repair: s.repair,
            done: s.done,
            total: s.total,
            bad_blocks: s.bad_blocks,
            repaired_blocks: s.repaired_blocks,
            findings: s.findings.into_iter().map(FindingView::from).collect(),
            notes: s.notes.iter().map(|note| with_name(note, volume)).collect(),
            error: s.error,
        }
    }
}

/// An engine names no volume in the commands that it proposes.
fn with_name(said: &str, volume: &str) -> String {
    said.replace(" VOLUME", &format!(" {volume}"))
}

/// What an engine has refused, with the volume's name. Where the connection broke it has said nothing.
fn named(refused: Status, volume: &str) -> Status {
    if refused.source().is_some() {
        return refused;
    }
    Status::new(refused.code(), with_name(refused.message(), volume))
}

pub(super) async fn run(context: &Context, args: &ScrubArgs) -> Result<()> {
    let volume = &args.volume;
    VolumeRecord::load(&context.root, volume)?;
    let mut engine = members::connect(&context.root, volume).await?;
    if args.cancel {
        let before = engine.scrub_status(()).await?.into_inner();
        engine.scrub_cancel(()).await.with_context(|| format!("the scrub of {volume} goes on"))?;
        return match context.output {
            Output::Json => print_json(&ScrubView::of(volume, engine.scrub_status(()).await?.into_inner())),
            Output::Table if before.running => {
                tell!("the scrub of {volume} is cancelled");
                Ok(())
            }
            Output::Table => {
                tell!("no scrub of {volume} runs");
                Ok(())
            }
        };
    }
    if !args.status && !runs_already(&mut engine, args).await? {
        let request = ScrubRequest { repair: args.repair, bytes_per_second: args.limit.unwrap_or(0) };
        let begun = engine.scrub(request).await.map_err(|refused| named(refused, volume));
        begun.with_context(|| format!("volume {volume} is not scrubbed"))?;
    }
    let state =
        if args.wait { wait(&mut engine).await? } else { engine.scrub_status(()).await?.into_inner() };
    match (state.known, args.status) {
        (true, _) => {}
        (false, true) => {
            bail!("volume {volume} was not scrubbed since it is up: `longhornctl scrub {volume}`")
        }
        // It was begun, and nobody knows of it.
        (false, false) => bail!(
            "the scrub of volume {volume} ended with the engine, which was started anew: `longhornctl scrub {volume}`"
        ),
    }
    tell(context, volume, ScrubView::of(volume, state), args.wait || args.status)
}

/// True if what is to be waited for runs already, as after a command that was interrupted.
async fn runs_already(engine: &mut VolumeOperationsClient<Channel>, args: &ScrubArgs) -> Result<bool> {
    let state = engine.scrub_status(()).await?.into_inner();
    let runs = args.wait && state.running && state.repair == args.repair;
    if runs {
        tell!("one runs already, and is waited for");
    }
    Ok(runs)
}

async fn wait(engine: &mut VolumeOperationsClient<Channel>) -> Result<ScrubState> {
    let mut progress = Progress::of_bytes("scrubbing");
    loop {
        let state = engine.scrub_status(()).await?.into_inner();
        if !state.running {
            return Ok(state);
        }
        if !state.doing.is_empty() {
            progress.say(&format!("scrubbing: {}", state.doing));
        }
        progress.at(state.done, state.total);
        tokio::time::sleep(LOOK).await;
    }
}

fn tell(context: &Context, volume: &str, view: ScrubView, judge: bool) -> Result<()> {
    if context.output == Output::Json {
        print_json(&view)?;
    } else if !view.findings.is_empty() {
        let mut rows = table(&["REPLICA", "LAYER", "OFFSET", "LENGTH", "WHAT", "DONE"]);
        for f in &view.findings {
            let layer = f.snapshot.clone().unwrap_or_else(|| "the head".to_owned());
            let (offset, length) = (f.offset.to_string(), f.length.to_string());
            let done = in_words(&f.done).to_owned();
            rows.add_row([f.replica.clone(), layer, offset, length, f.flaw.clone(), done]);
        }
        print_table(&rows)?;
    }
    for note in &view.notes {
        tell!("{note}");
    }
    // Whoever has asked for it is answered; of one that was just begun it is no more than a word on the way.
    let say = |text: String| match context.output {
        Output::Table if judge => print(&format!("{}\n", next_step::complete(&text))),
        Output::Table | Output::Json => {
            tell!("{text}");
            Ok(())
        }
    };
    if view.running {
        let next = match judge {
            true => format!("`longhornctl scrub {volume} --status --wait` waits for the rest"),
            false => format!("`longhornctl scrub {volume} --status` tells more"),
        };
        return say(format!("{} of {} looked at; {next}", format_size(view.done), format_size(view.total)));
    }
    if !view.error.is_empty() {
        bail!("the scrub of volume {volume} is not through: {}", view.error);
    }
    let left = view.bad_blocks.saturating_sub(view.repaired_blocks);
    if judge && left > 0 {
        let next = match view.repair {
            false => format!("`longhornctl scrub {volume} --repair --wait` repairs what has a sound copy"),
            true => after_repair(volume, &view.findings),
        };
        bail!("{left} blocks of volume {volume} are wrong: {next}");
    }
    if context.output == Output::Table {
        return say(format!(
            "{volume}: {} looked at, {} blocks repaired",
            format_size(view.done),
            view.repaired_blocks
        ));
    }
    Ok(())
}

/// What can be done about what a repair has left. A rebuild from the others is an answer only where one of them is known to be right.
fn after_repair(volume: &str, findings: &[FindingView]) -> String {
    let is_any = |words: &[&str]| findings.iter().any(|finding| words.contains(&finding.done.as_str()));
    if is_any(&["unsure", "conflict"]) {
        return format!(
            "nobody knows which replica is right, and a rebuild would make one like the others, be they right or not. With the volume down, \
             `longhornctl replica export DIR FILE` takes what each one holds; once you know, `longhornctl replica rebuild {volume} REPLICA` \
             makes those anew that are wrong"
        );
    }
    if is_any(&["no_source"]) && !is_any(&["failed"]) {
        return "no replica has a sound copy of them, and no rebuild makes one: write what is there anew, from a backup for example".to_owned();
    }
    format!("`longhornctl replica rebuild {volume} REPLICA` makes a replica anew from the others")
}

fn in_words(done: &str) -> &str {
    match done {
        "no_source" => "nothing: no replica has a sound copy",
        "unsure" => "nothing: nobody knows which replica is right",
        "conflict" => "nothing: each replica fits its own checksums",
        "failed" => "the repair failed",
        "reported" => "nothing: no --repair",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_engine_proposes_can_be_given_as_it_stands() {
        let note = "a was not compared: `longhornctl snapshot purge VOLUME` folds it everywhere";
        let view = ScrubView::of("demo", ScrubState { notes: vec![note.into()], ..ScrubState::default() });
        assert_eq!(view.notes, ["a was not compared: `longhornctl snapshot purge demo` folds it everywhere"]);
        let refused = named(Status::failed_precondition("first `longhornctl up VOLUME`"), "demo");
        assert_eq!(refused.message(), "first `longhornctl up demo`");
    }

    #[test]
    fn a_rebuild_is_proposed_where_it_helps() {
        let finding =
            |done: &str| FindingView::from(ScrubFinding { done: done.into(), ..ScrubFinding::default() });
        let next = |done: &[&str]| after_repair("demo", &done.iter().map(|d| finding(d)).collect::<Vec<_>>());
        for left in [&["unsure"][..], &["repaired", "conflict"], &["failed", "unsure"]] {
            let next = next(left);
            assert!(next.contains("nobody knows which") && next.contains("replica export"), "{next}");
        }
        assert!(next(&["no_source", "repaired"]).contains("no rebuild"));
        for left in [&[][..], &["failed"], &["failed", "no_source"]] {
            assert!(next(left).starts_with("`longhornctl replica rebuild demo REPLICA`"), "{}", next(left));
        }
    }

    /// By its source it is known that nobody has refused anything.
    #[test]
    fn of_an_engine_that_ended_nothing_is_said_in_its_place() {
        let broken = Status::from_error(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into());
        assert!(named(broken, "demo").source().is_some());
    }
}
