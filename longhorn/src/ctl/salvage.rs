//! `salvage`: a volume that does not start by itself, from the replica that holds everything, or the best there is.
//!
//! Nothing is changed before the decision is made and, for a guess, `--force` was said. Then, each durable before the
//! next: the chosen replica records an epoch that has it alone and is younger than all; the authority stores that epoch.
//! A crash between the two leaves a replica that has recorded an epoch which does not count: the command is given again.
//!
//! With the quorum `unsafe` no epoch counts, and an engine starts with whatever is there. All that may keep it from that is an authority
//! that cannot be read: it is made anew.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::{AuthorityError, LiveDirs, ReplicaRecord, Root, VolumeLock, VolumeRecord};
use datapath::conductor::Quorum;
use datapath::salvage::{Authority, Candidate, Choice, Decision, Held, Verdict, decide};
use lh_block::{Epoch, Generation, Instance, rfc3339};
use replica::store::{Directory, OpenOptions, Survey, survey};
use serde::Serialize;

use super::args::{Output, SalvageArgs};
use super::observe::{VolumeView, has_processes};
use super::output::{print_json, print_table, table_with_prose};
use super::{Context, interrupt, lock, up};
use crate::progress::Progress;
use crate::tell::tell;

/// How long the locks of processes that are just ending are waited for.
const PASSING: Duration = Duration::from_secs(60);

/// What was decided, as `salvage -o json` prints it.
#[derive(Debug, Serialize)]
struct SalvageView {
    volume: String,
    /// Replicas that it is started from; empty: it is not, or from whichever are there (quorum `unsafe`).
    chosen: Vec<String>,
    /// Every acknowledged flush is on them.
    sure: bool,
    replicas: Vec<ReplicaVerdict>,
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
    let (lock, record) = lock::volume(root, volume)?;
    record.check_ready()?;
    if has_processes(root, &record)? {
        bail!(
            "volume {volume} is up, or trying: see `longhornctl status {volume}`; to salvage it, stop it first with \
             `longhornctl down {volume}`"
        );
    }
    LiveDirs::default().check_free(volume, root)?;
    let found = Found::of(&record, root)?;
    let chosen = match record.quorum {
        control::host::Quorum::Unsafe => found.choose_nobody(&args),
        _ => found.choose(&args),
    };
    let mut view = SalvageView::of(&record, &found, chosen.as_ref().ok());
    if context.output == Output::Table {
        view.show()?;
    }
    let started = match chosen {
        Ok(chosen) => start(context, &record, &found, &chosen, lock).await,
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

/// Carries out what was chosen and brings the volume up.
async fn start(
    context: &Context,
    record: &VolumeRecord,
    found: &Found,
    chosen: &Chosen,
    lock: VolumeLock,
) -> Result<VolumeView> {
    let volume = &record.name;
    interrupt::leaves(format!("`longhornctl salvage {volume}` goes on with it"));
    carry_out(&context.root, record, found, chosen)?;
    drop(lock);
    interrupt::leaves(format!(
        "it is decided what volume {volume} starts from: `longhornctl up {volume}` starts it"
    ));
    up::again(context, &record.name, &mut Progress::new()).await
}

/// Has a volume that never ran begin with this replica alone; the others are rebuilt from it. The caller holds the volume's lock, and
/// no process of the volume runs.
///
/// # Errors
/// A directory cannot be read or written, or the authority cannot.
pub(super) fn start_from(root: &Root, record: &VolumeRecord, replica: &str) -> Result<()> {
    let chosen = Chosen { names: vec![replica.to_owned()], sure: false };
    carry_out(root, record, &Found::of(record, root)?, &chosen)
}

/// What there is.
struct Found {
    surveys: Vec<Result<Survey, String>>,
    candidates: Vec<Candidate>,
    authority: Authority,
    decision: Decision,
}

/// What is done about it.
#[derive(Debug)]
struct Chosen {
    /// Empty: whoever is there, with the quorum `unsafe`.
    names: Vec<String>,
    sure: bool,
}

impl Found {
    fn of(record: &VolumeRecord, root: &Root) -> Result<Self> {
        let surveys: Vec<Result<Survey, String>> =
            record.replicas.iter().map(|r| survey(&r.directory).map_err(|e| e.to_string())).collect();
        let held = |survey: &Survey| Held {
            epoch: survey.epoch.clone(),
            rebuilding: survey.rebuilding,
            imported: survey.imported,
            written: survey.written,
        };
        let candidates: Vec<Candidate> = record
            .replicas
            .iter()
            .zip(&surveys)
            .map(|(r, s)| Candidate {
                name: r.name.clone(),
                held: s.as_ref().map(held).map_err(Clone::clone),
            })
            .collect();
        let authority = match record.authority(root).epoch() {
            Ok(epoch) => Authority::Says(epoch),
            Err(AuthorityError::Damaged { path, reason }) => {
                tell!("{} is damaged ({reason}): the replicas alone are asked", path.display());
                Authority::Silent
            }
            Err(e) => return Err(e.into()),
        };
        let decision = decide(quorum(record), &authority, &candidates);
        Ok(Self { surveys, candidates, authority, decision })
    }

    fn verdict(&self, name: &str) -> Option<&Verdict> {
        self.decision.of(self.candidates.iter().position(|c| c.name == name)?)
    }

    fn choose(&self, args: &SalvageArgs) -> Result<Chosen> {
        let volume = &args.volume;
        if let Some(name) = &args.replica {
            return match self.verdict(name) {
                None => bail!(
                    "volume {volume} has no replica {name}: `longhornctl replica ls {volume}` lists them"
                ),
                Some(Verdict::Unusable(why)) => bail!("replica {name} cannot be started from: {why}"),
                Some(Verdict::Unsure(why)) if !args.force => {
                    bail!(
                        "replica {name} may lack acknowledged writes: {why}; to start from it all the same, add --force"
                    )
                }
                Some(verdict) => Ok(Chosen { names: vec![name.clone()], sure: *verdict == Verdict::Sure }),
            };
        }
        match &self.decision.choice {
            Choice::Sure(names) => Ok(Chosen { names: names.clone(), sure: true }),
            Choice::Guess(name) if args.force => Ok(Chosen { names: vec![name.clone()], sure: false }),
            Choice::Guess(name) => bail!(
                "no replica of volume {volume} is sure to hold every acknowledged write: bring back those that are \
                 missing, or give up what was written last with `longhornctl salvage {volume} --replica {name} --force`"
            ),
            Choice::Nothing => {
                bail!(
                    "no replica of volume {volume} can be started from: mend what is said of each above, or take the bytes \
                     that a directory still has with `longhornctl replica export DIR FILE`"
                )
            }
        }
    }

    /// With the quorum `unsafe` the engine takes whoever is there.
    fn choose_nobody(&self, args: &SalvageArgs) -> Result<Chosen> {
        let volume = &args.volume;
        let by_itself = format!(
            "volume {volume} has the quorum unsafe: `longhornctl up {volume}` starts it with whatever replicas are \
             there, and nothing says which of them missed a write"
        );
        match (&self.authority, &args.replica) {
            (Authority::Says(_), _) => bail!("{by_itself}"),
            (Authority::Silent, Some(_)) => bail!(
                "volume {volume} has the quorum unsafe, and starts with whatever replicas are there: leave --replica out"
            ),
            (Authority::Silent, None) => Ok(Chosen { names: Vec::new(), sure: false }),
        }
    }

    fn highest_generation(&self) -> Generation {
        let seen = self
            .surveys
            .iter()
            .flatten()
            .flat_map(|s| [s.generation, s.epoch.as_ref().map(|e| e.generation).unwrap_or_default()]);
        seen.max().unwrap_or_default()
    }

    /// An engine finds by itself what is to be done: the authority's epoch, and all members that are chosen.
    fn starts_by_itself(&self, chosen: &Chosen) -> bool {
        let all_sure = matches!(&self.decision.choice, Choice::Sure(names) if *names == chosen.names);
        chosen.sure && all_sure && matches!(&self.authority, Authority::Says(Some(_)))
    }
}

fn quorum(record: &VolumeRecord) -> Quorum {
    match record.quorum {
        control::host::Quorum::Any => Quorum::Any,
        control::host::Quorum::Majority => Quorum::Majority,
        control::host::Quorum::Unsafe => Quorum::Unsafe,
    }
}

/// Makes the chosen replicas the only members of an epoch younger than all.
fn carry_out(root: &Root, record: &VolumeRecord, found: &Found, chosen: &Chosen) -> Result<()> {
    if found.starts_by_itself(chosen) {
        return Ok(());
    }
    let authority = record.authority(root);
    let highest = found.highest_generation();
    if chosen.names.is_empty() {
        return Ok(authority.begin_anew(highest)?);
    }
    let mut members = chosen.names.clone();
    members.sort();
    let mut id = [0; 16];
    lh_ring::sys::random(&mut id).context("no random numbers")?;
    let id = Instance(u128::from_le_bytes(id));
    // Issued, not yet stored: what a replica records is above everything seen, and the authority's is above that.
    let generation = match authority.issue_generation(highest) {
        Ok(generation) => generation,
        Err(AuthorityError::Damaged { .. }) => highest.next_attachment(),
        Err(e) => return Err(e.into()),
    };
    let epoch = Epoch { generation, counter: 1, members, id };
    for replica in record.replicas.iter().filter(|r| chosen.names.contains(&r.name)) {
        let (mut directory, store) =
            Directory::open(&replica.directory, &OpenOptions { lock_wait: PASSING })?;
        drop(store);
        // Nothing that it knows of others counts: they are compared as a whole.
        let stored =
            directory.store_epoch(epoch.clone()).with_context(|| replica.directory.display().to_string())?;
        if !stored {
            bail!("replica {} has recorded a younger epoch meanwhile: try again", replica.name);
        }
    }
    authority.decree(epoch)?;
    Ok(())
}

impl SalvageView {
    fn of(record: &VolumeRecord, found: &Found, chosen: Option<&Chosen>) -> Self {
        let verdict = |(place, replica): (usize, &ReplicaRecord)| {
            let (verdict, reason) = match found.decision.of(place) {
                Some(Verdict::Sure) => ("sure", String::new()),
                Some(Verdict::Unsure(why)) => ("unsure", why.clone()),
                Some(Verdict::Unusable(why)) => ("unusable", why.clone()),
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
            let others = match self.replicas.len() > self.chosen.len() {
                true => "; the others are rebuilt",
                false => "",
            };
            tell!("starting from {}, which {how}{others}", self.chosen.join(", "));
        }
        Ok(())
    }
}
