//! Having a volume start from replicas that were decided on: what there is, and how they are made to count.
//!
//! Each durable before the next: a chosen replica records an epoch that has the chosen ones alone and is younger than all; the
//! authority stores that epoch. A crash between the two leaves a replica that has recorded an epoch which does not count: it is
//! done once more.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::{AuthorityError, ReplicaRecord, Root, VolumeRecord};
use datapath::salvage::{Authority, Candidate, Choice, Decision, Held, Verdict, decide};
use lh_block::{Epoch, Generation, Instance, Quorum};
use replica::store::{Directory, OpenOptions, Survey, survey};

use crate::tell::tell;

/// How long the locks of processes that are just ending are waited for.
const PASSING: Duration = Duration::from_secs(60);

/// What there is.
pub(super) struct Found {
    pub(super) surveys: Vec<Result<Survey, String>>,
    candidates: Vec<Candidate>,
    pub(super) authority: Authority,
    pub(super) decision: Decision,
}

/// What is done about it.
#[derive(Debug)]
pub(super) struct Chosen {
    /// Empty: whoever is there, with the quorum `unsafe`.
    pub(super) names: Vec<String>,
    /// Every acknowledged flush is on them.
    pub(super) sure: bool,
}

impl Found {
    /// What replicas and authority say. Changes nothing.
    ///
    /// # Errors
    /// The authority cannot be read; one that is damaged is told of, and not asked.
    pub(super) fn of(record: &VolumeRecord, root: &Root) -> Result<Self> {
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
                learner: record.learns(r),
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
        let decision = decide(record.quorum, &authority, &candidates);
        Ok(Self { surveys, candidates, authority, decision })
    }

    pub(super) fn verdict(&self, name: &str) -> Option<&Verdict> {
        self.decision.of(self.candidates.iter().position(|c| c.name == name)?)
    }

    /// With the quorum `majority`: replicas that have recorded nothing of the volume, or cannot be asked, where those that are left
    /// are no majority with them. An engine would wait for them for ever.
    pub(super) fn lost(&self, record: &VolumeRecord, chosen: &Chosen) -> Vec<ReplicaRecord> {
        if record.quorum != Quorum::Majority {
            return Vec::new();
        }
        let tells = |name: &String| {
            let place = self.candidates.iter().position(|c| c.name == *name);
            let survey = place.and_then(|place| self.surveys[place].as_ref().ok());
            chosen.names.contains(name) || survey.is_some_and(|s| s.epoch.is_some())
        };
        let (told, lost): (Vec<_>, Vec<_>) = record.replicas.iter().cloned().partition(|r| tells(&r.name));
        if told.len() > record.replicas.len() / 2 { Vec::new() } else { lost }
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

/// Makes the chosen replicas the only members of an epoch younger than all, unless an engine finds them by itself. The caller holds
/// the volume's lock, and no process of the volume runs.
///
/// # Errors
/// A directory cannot be opened or written, or the authority cannot.
pub(super) fn carry_out(root: &Root, record: &VolumeRecord, found: &Found, chosen: &Chosen) -> Result<()> {
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
    let epoch = Epoch { generation, counter: 1, members, id, after: None, round: None };
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

/// Has a volume that never ran begin with this replica alone; the others are rebuilt from it. The caller holds the volume's lock, and
/// no process of the volume runs.
///
/// # Errors
/// A directory cannot be read or written, or the authority cannot.
pub(super) fn start_from(root: &Root, record: &VolumeRecord, replica: &str) -> Result<()> {
    let chosen = Chosen { names: vec![replica.to_owned()], sure: false };
    carry_out(root, record, &Found::of(record, root)?, &chosen)
}
