//! `salvage`: a volume that does not start by itself, from the replica that holds everything, or the best there is.
//!
//! Nothing is changed before the decision is made and, for a guess, `--force` was said; then as [`super::decree`] has it.
//!
//! With the quorum `unsafe` no epoch counts, and an engine starts with whatever is there. All that may keep it from that is an authority
//! that cannot be read: it is made anew.

use anyhow::{Error, Result, anyhow, bail};
use control::host::{LiveDirs, Quorum, ReplicaRecord, Root, VolumeLock, VolumeRecord};
use datapath::salvage::{Authority, Choice, Verdict};
use lh_block::{Generation, rfc3339};
use serde::Serialize;

use super::args::{Output, SalvageArgs};
use super::decree::{Chosen, Found, carry_out};
use super::observe::{VolumeView, has_processes, have_ended};
use super::output::{print_json, print_table, table_with_prose};
use super::{Context, interrupt, lock, only_replica, stop, up};
use crate::progress::Progress;
use crate::tell::tell;

/// What was decided, as `salvage -o json` prints it.
#[derive(Debug, Serialize)]
struct SalvageView {
    volume: String,
    /// Replicas that it is started from; empty: it is not, or from whichever are there (quorum `unsafe`).
    chosen: Vec<String>,
    /// Every acknowledged flush is on them.
    sure: bool,
    replicas: Vec<ReplicaVerdict>,
    /// Those that are replicas of the volume no more.
    lost: Vec<String>,
    /// The volume once it is up; null if it was not started.
    status: Option<VolumeView>,
}

/// What one replica is good for.
#[derive(Debug, Serialize)]
struct ReplicaVerdict {
    name: String,
    path: String,
    /// "sure", "unsure" or "unusable".
    verdict: &'static str,
    /// Why, if it is not sure.
    reason: String,
    /// Members of the last epoch that it recorded.
    epoch: Vec<String>,
    /// When its head was last written, RFC 3339; empty if that is not known.
    written: String,
}

pub(super) async fn run(context: &Context, args: SalvageArgs) -> Result<()> {
    let root = &context.root;
    let volume = &args.volume;
    let (lock, mut record) = lock::volume(root, volume)?;
    record.check_ready()?;
    if has_processes(root, &record)? && !have_ended(root, &record)? {
        bail!(
            "volume {volume} is up, or trying: see `longhornctl status {volume}`; to salvage it, stop it first with \
             `longhornctl down {volume}`"
        );
    }
    LiveDirs::default().check_free(volume, root)?;
    if has_processes(root, &record)? {
        // What is remembered of an `up` that failed.
        stop::stop(context, &record, &mut Progress::new(), || ()).await?;
    }
    let found = Found::of(&record, root)?;
    let chosen = match record.quorum {
        Quorum::Unsafe => choose_nobody(&found, &args),
        Quorum::Any | Quorum::Majority => {
            choose(&found, &args).map_err(|e| unless_never_started(root, &record, &found, &args, e))
        }
    };
    let lost = chosen.as_ref().map(|chosen| found.lost(&record, chosen)).unwrap_or_default();
    let mut view = SalvageView::of(&record, &found, chosen.as_ref().ok(), &lost);
    if context.output == Output::Table {
        view.show()?;
    }
    let started = match chosen {
        Ok(chosen) => start(context, &mut record, &found, (&chosen, &lost), lock).await,
        Err(e) => Err(e),
    };
    let status = started.as_ref().ok().cloned();
    if context.output == Output::Json {
        view.status = status;
        print_json(&view)?;
    } else if let Some(status) = status {
        up::announce(context, &status, false)?;
    }
    started.map(drop)
}

/// Carries out what was chosen, without those that are lost, and brings the volume up.
async fn start(
    context: &Context,
    record: &mut VolumeRecord,
    found: &Found,
    (chosen, lost): (&Chosen, &[ReplicaRecord]),
    lock: VolumeLock,
) -> Result<VolumeView> {
    let volume = &record.name.clone();
    interrupt::leaves(format!("`longhornctl salvage {volume}` goes on with it"));
    let root = &context.root;
    if record.replicas.iter().any(|replica| replica.learner) {
        // What they have recorded counts from now on.
        record.replicas.iter_mut().for_each(|replica| replica.learner = false);
        record.store(root)?;
    }
    carry_out(root, record, found, chosen)?;
    if !lost.is_empty() {
        record.replicas.retain(|replica| !lost.contains(replica));
        record.store(root)?;
    }
    drop(lock);
    interrupt::leaves(format!(
        "it is decided what volume {volume} starts from: `longhornctl up {volume}` starts it"
    ));
    up::again(context, &record.name, &mut Progress::new()).await
}

fn choose(found: &Found, args: &SalvageArgs) -> Result<Chosen> {
    let volume = &args.volume;
    if let Some(name) = &args.replica {
        return match found.verdict(name) {
            None => {
                bail!("volume {volume} has no replica {name}: `longhornctl replica ls {volume}` lists them")
            }
            Some(Verdict::Unusable(why)) => bail!("replica {name} cannot be started from: {why}"),
            Some(Verdict::Unsure(why)) if !args.force => {
                bail!(
                    "replica {name} may lack acknowledged writes: {why}; to start from it all the same, add --force"
                )
            }
            Some(verdict) => Ok(Chosen { names: vec![name.clone()], sure: *verdict == Verdict::Sure }),
        };
    }
    match &found.decision.choice {
        Choice::Sure(names) => Ok(Chosen { names: names.clone(), sure: true }),
        Choice::Guess(name) if args.force => Ok(Chosen { names: vec![name.clone()], sure: false }),
        Choice::Guess(name) => bail!(
            "no replica of volume {volume} is sure to hold every acknowledged write: bring back those that are \
             missing, or give up what was written last with `longhornctl salvage {volume} --replica {name} --force`"
        ),
        Choice::Nothing => {
            bail!(
                "no replica of volume {volume} can be started from: mend what is said of each above, or take the bytes \
                 that a directory still has with `longhornctl replica export --rescue DIR FILE`"
            )
        }
    }
}

/// Of a clone or an import no replica is sure before its first start, which needs no decision. `e`: why nothing was chosen.
fn unless_never_started(
    root: &Root,
    record: &VolumeRecord,
    found: &Found,
    args: &SalvageArgs,
    e: Error,
) -> Error {
    let is_new = matches!(found.authority, Authority::Says(None))
        && record.authority(root).highest_generation().is_ok_and(|issued| issued == Generation::default());
    let are_whole = found.surveys.iter().all(|survey| survey.as_ref().is_ok_and(|s| !s.rebuilding));
    if args.replica.is_none() && is_new && are_whole {
        return anyhow!(
            "volume {0} was never started, and there is nothing to salvage: `longhornctl up {0}` starts it",
            record.name
        );
    }
    e
}

/// With the quorum `unsafe` the engine takes whoever is there.
fn choose_nobody(found: &Found, args: &SalvageArgs) -> Result<Chosen> {
    let volume = &args.volume;
    let by_itself = format!(
        "volume {volume} has the quorum unsafe: `longhornctl up {volume}` starts it with whatever replicas are \
         there, and nothing says which of them missed a write"
    );
    match (&found.authority, &args.replica) {
        (Authority::Says(_), _) => bail!("{by_itself}"),
        (Authority::Silent, Some(_)) => bail!(
            "volume {volume} has the quorum unsafe, and starts with whatever replicas are there: leave --replica out"
        ),
        (Authority::Silent, None) => Ok(Chosen { names: Vec::new(), sure: false }),
    }
}

impl SalvageView {
    fn of(record: &VolumeRecord, found: &Found, chosen: Option<&Chosen>, lost: &[ReplicaRecord]) -> Self {
        let verdict = |(place, replica): (usize, &ReplicaRecord)| {
            let (verdict, reason) = match found.decision.of(place) {
                Some(Verdict::Sure) => ("sure", String::new()),
                Some(Verdict::Unsure(why)) => ("unsure", why.clone()),
                Some(Verdict::Unusable(why)) => ("unusable", only_replica::advice(record, why)),
                None => ("unusable", "it was not looked at".to_owned()),
            };
            let survey = found.surveys[place].as_ref().ok();
            ReplicaVerdict {
                name: replica.name.clone(),
                path: replica.directory.display().to_string(),
                verdict,
                reason,
                epoch: survey.and_then(|s| s.epoch.clone()).map(|e| e.members).unwrap_or_default(),
                written: survey.map(|s| rfc3339(s.written)).unwrap_or_default(),
            }
        };
        Self {
            volume: record.name.clone(),
            chosen: chosen.map(|c| c.names.clone()).unwrap_or_default(),
            sure: chosen.is_some_and(|c| c.sure),
            replicas: record.replicas.iter().enumerate().map(verdict).collect(),
            lost: lost.iter().map(|replica| replica.name.clone()).collect(),
            status: None,
        }
    }

    /// For people, before anything is done.
    fn show(&self) -> Result<()> {
        let mut rows = table_with_prose(&["REPLICA", "VERDICT", "LAST WRITTEN", "WHY"], &[3]);
        for r in &self.replicas {
            rows.add_row([&r.name, r.verdict, &r.written, &r.reason]);
        }
        print_table(&rows)?;
        if !self.chosen.is_empty() {
            let how = match (self.sure, self.chosen.len()) {
                (true, 1) => "holds every acknowledged write",
                (true, _) => "hold every acknowledged write",
                (false, _) => "is the guess that you asked for",
            };
            let others = match self.replicas.len() > self.chosen.len() + self.lost.len() {
                true => "; the others are rebuilt",
                false => "",
            };
            tell!("starting from {}, which {how}{others}", self.chosen.join(", "));
            for lost in self.replicas.iter().filter(|replica| self.lost.contains(&replica.name)) {
                tell!(
                    "{} tells nothing of {1}, and is none of its replicas any more: what there is in {2} stays, and `longhornctl \
                     replica add {1}` makes another one",
                    lost.name,
                    self.volume,
                    lost.path
                );
            }
        }
        Ok(())
    }
}
