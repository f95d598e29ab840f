//! Which replica holds everything, when a volume does not start by itself (`docs/invariants.md`, 12).
//!
//! A pure decision over what the replicas' directories and the authority say. A replica is *sure* if every write that was
//! acknowledged before a flush that was answered is on it: it is a member of the epoch that counts, has recorded that
//! epoch, and is whole. Which epoch counts is sure, too, only if no younger one can be anywhere else:
//!
//! - the authority's, if it can be read: it stores an epoch before anything is acknowledged under it;
//! - without it, the newest one found, if every member of it is here: a younger epoch would have left itself on one of
//!   them, since who stays has recorded it;
//! - with quorum `majority`, the newest one found among a majority of the configured replicas, unless that only announces that the
//!   volume begins, and another one tells of more.
//!
//! Everything else is a guess, which people make ([`Choice::Guess`]): the volume then is what that replica held when it
//! was left out, and what was acknowledged later may be lost.

use std::cmp::Reverse;

use lh_block::{Epoch, Generation};

use crate::conductor::Quorum;

/// What a replica's directory says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The last epoch that it recorded.
    pub epoch: Option<Epoch>,
    /// Its rebuild began and did not end: it is neither what it was nor what it was to become.
    pub rebuilding: bool,
    /// Another program has written it, or it never was ours: its records say nothing of its bytes.
    pub imported: bool,
    /// When its head was last written, seconds since 1970. Of guesses the youngest comes first.
    pub written: u64,
}

/// A configured replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// What it says, or why it says nothing: one sentence.
    pub held: Result<Held, String>,
    /// No majority has it ([`crate::conductor::ReplicaConfig::learner`]).
    pub learner: bool,
}

/// What the authority says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authority {
    /// This epoch counts; `None`: no engine has stored one.
    Says(Option<Epoch>),
    /// It cannot be read, or there is none for this quorum.
    Silent,
}

/// What a replica is good for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds every acknowledged flush.
    Sure,
    /// It holds what it held once; why that may not be all.
    Unsure(String),
    /// It cannot be started from, whatever anybody says; why.
    Unusable(String),
}

/// What can be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Start from these: each holds everything.
    Sure(Vec<String>),
    /// Nobody is sure; the best guess.
    Guess(String),
    /// Nobody can be started from.
    Nothing,
}

/// The decision, with a verdict for each candidate, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What can be done.
    pub choice: Choice,
    /// The epoch that counts, if that is known.
    pub epoch: Option<Epoch>,
    /// One for each candidate.
    pub verdicts: Vec<Verdict>,
}

impl Decision {
    /// What the candidate at this place is good for.
    pub fn of(&self, place: usize) -> Option<&Verdict> {
        self.verdicts.get(place)
    }
}

/// Decides.
pub fn decide(quorum: Quorum, authority: &Authority, candidates: &[Candidate]) -> Decision {
    let counted = counted(quorum, authority, candidates);
    let verdicts: Vec<Verdict> = candidates.iter().map(|c| verdict(c, &counted, candidates)).collect();
    let sure: Vec<String> = candidates
        .iter()
        .zip(&verdicts)
        .filter(|(_, v)| **v == Verdict::Sure)
        .map(|(c, _)| c.name.clone())
        .collect();
    let choice = match best_guess(candidates, &verdicts) {
        _ if !sure.is_empty() => Choice::Sure(sure),
        Some(name) => Choice::Guess(name),
        None => Choice::Nothing,
    };
    Decision { choice, epoch: counted.ok(), verdicts }
}

/// The epoch that counts, or why that is not known.
fn counted(quorum: Quorum, authority: &Authority, candidates: &[Candidate]) -> Result<Epoch, String> {
    match (quorum, authority) {
        (Quorum::Unsafe, _) => {
            Err("the volume has the quorum unsafe: nothing says who missed a write".to_owned())
        }
        (Quorum::Any, Authority::Says(Some(epoch))) if !is_put_back(epoch, candidates) => Ok(epoch.clone()),
        (Quorum::Any, Authority::Says(Some(_))) => {
            newest_with_all_members(candidates, "the authority names an older epoch than one that counted")
        }
        (Quorum::Any, _) => newest_with_all_members(candidates, "the authority names no epoch"),
        (Quorum::Majority, _) => newest_of_a_majority(candidates),
    }
}

fn newest(candidates: &[Candidate]) -> Option<&Epoch> {
    let epochs = candidates.iter().filter_map(|c| c.held.as_ref().ok()?.epoch.as_ref());
    epochs.max_by_key(|e| e.order())
}

const NEVER_STARTED: &str = "no replica has recorded an epoch: the volume was never started";

/// A younger epoch has counted, as a replica has recorded: the authority's was put back from a copy.
fn is_put_back(epoch: &Epoch, candidates: &[Candidate]) -> bool {
    let recorded = candidates.iter().filter_map(|c| c.held.as_ref().ok()?.epoch.as_ref());
    recorded.into_iter().any(|e| e.outdates(epoch.order()))
}

/// Without the authority, for that reason. An epoch that is found on a replica alone may be replaced by one that this replica was left
/// out of.
fn newest_with_all_members(candidates: &[Candidate], why: &str) -> Result<Epoch, String> {
    let epoch = newest(candidates).ok_or(NEVER_STARTED)?;
    let speaks = |name: &&String| {
        candidates.iter().any(|c| c.name == **name && c.held.as_ref().is_ok_and(|h| !h.imported))
    };
    let silent: Vec<&str> = epoch.members.iter().filter(|m| !speaks(m)).map(String::as_str).collect();
    if silent.is_empty() {
        return Ok(epoch.clone());
    }
    Err(format!(
        "{why}, and {} of the newest epoch found is not heard: a younger one may have left out everybody who is here",
        silent.join(", ")
    ))
}

/// Number 0 announces that a volume begins, and never counts: where another replica tells of more it was away then.
fn newest_of_a_majority(candidates: &[Candidate]) -> Result<Epoch, String> {
    let epoch = newest(candidates).ok_or(NEVER_STARTED)?;
    let tells_of_data =
        |c: &Candidate| c.held.as_ref().is_ok_and(|h| h.epoch.as_ref().is_some_and(|e| e.counter > 0));
    if epoch.counter == 0 && candidates.iter().any(tells_of_data) {
        return Err(format!(
            "epoch {} says that the volume was about to begin anew, and not every replica is one without a record of it",
            number(epoch)
        ));
    }
    let counted = || candidates.iter().filter(|c| !c.learner);
    let told = counted().filter(|c| c.held.as_ref().is_ok_and(|h| h.epoch.is_some() && !h.imported)).count();
    let all = counted().count();
    let need = Quorum::Majority.members_min(all);
    if told >= need {
        return Ok(epoch.clone());
    }
    Err(format!("{told} of {all} replicas tell their epoch, {need} are needed"))
}

fn verdict(candidate: &Candidate, counted: &Result<Epoch, String>, all: &[Candidate]) -> Verdict {
    let held = match &candidate.held {
        Ok(held) => held,
        Err(why) => return Verdict::Unusable(why.clone()),
    };
    if held.rebuilding {
        return Verdict::Unusable("its rebuild began and did not end".to_owned());
    }
    let unsure = |text: &str| Verdict::Unsure(text.to_owned());
    if held.imported {
        return unsure(
            "another program has written it, or its records are lost: nothing says what it missed",
        );
    }
    let Some(own) = &held.epoch else { return unsure("it has recorded no epoch: it may be empty") };
    let counted = match counted {
        Ok(counted) => counted,
        Err(why) => return Verdict::Unsure(why.clone()),
    };
    if !counted.has(&candidate.name) {
        return Verdict::Unsure(format!(
            "it was left out: the epoch that counts ({}) has {}",
            number(counted),
            counted.members.join(", ")
        ));
    }
    if own.order() < counted.order() {
        return Verdict::Unsure(format!(
            "it has recorded epoch {} and not {}, which counts: it is an older copy",
            number(own),
            number(counted)
        ));
    }
    let others = all.iter().filter_map(|c| c.held.as_ref().ok().filter(|h| !h.imported)?.epoch.as_ref());
    if others.filter(|e| e.order() >= counted.order()).any(|e| own.is_behind(e)) {
        return Verdict::Unsure(format!(
            "it is an older copy: another replica has taken part in more of epoch {}",
            number(counted)
        ));
    }
    if !own.has(&candidate.name) {
        return Verdict::Unsure(format!("it was about to be left out by epoch {}", number(own)));
    }
    Verdict::Sure
}

/// Attachment, restart and counter, as people can compare them.
fn number(epoch: &Epoch) -> String {
    let Generation { attachment, restart } = epoch.generation;
    format!("{attachment}.{restart}.{}", epoch.counter)
}

/// Of those that can be used, the one with the youngest epoch that has it, of those that may have counted; then the one written last; then the first.
fn best_guess(candidates: &[Candidate], verdicts: &[Verdict]) -> Option<String> {
    let usable = candidates.iter().zip(verdicts).filter(|(_, v)| !matches!(v, Verdict::Unusable(_)));
    let key = |c: &Candidate| {
        let held = c.held.as_ref().ok();
        let epoch = held.filter(|h| !h.imported).and_then(|h| h.epoch.as_ref()).filter(|e| e.counter > 0);
        (epoch.map(|e| (e.order(), e.has(&c.name))), held.map(|h| h.written))
    };
    let mut usable: Vec<&Candidate> = usable.map(|(c, _)| c).collect();
    usable.sort_by_key(|c| Reverse(key(c)));
    usable.first().map(|c| c.name.clone())
}

#[cfg(test)]
mod tests;
