//! Which replicas a volume starts with (`docs/invariants.md`, 12). Pure: the same answers give the same choice.
//!
//! - A replica that began a rebuild and did not end it, or that was written by another program, is never chosen while
//!   there is an epoch.
//! - An epoch that is older than one that counted is never started from, whatever the authority says.
//! - A directory that was away while its replica, made anew under the same name, became a member is none.
//! - Nor is one that was put back as it was some time ago, as another one's later round tells.

use std::collections::BTreeSet;

use lh_block::{Epoch, EpochOrder, Generation};
use lh_wire::{LayerInfo, ReplicaState};

use super::event::Quorum;
use super::{Conductor, sabotaged};
use crate::message::{MemberId, MemberSet};

/// A configured replica, and what it said if it is connected.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) id: MemberId,
    pub(super) name: &'a str,
    /// It decides. A learner does not, but is a member of the epoch that those have recorded who do, if that says so.
    pub(super) counts: bool,
    pub(super) state: Option<&'a ReplicaState>,
}

/// What can be done with what is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// Not enough; for people.
    Wait(String),
    /// Start.
    Start(Start),
}

/// What to start with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Start {
    /// The epoch that counts, if there is one.
    pub(super) base: Option<Epoch>,
    /// Members of it that are here. Never empty.
    pub(super) members: MemberSet,
    /// What each of these has recorded at least, and no younger one than `base`.
    pub(super) recorded: Option<EpochOrder>,
    /// Nobody who is missing could still join: no need to wait.
    pub(super) complete: bool,
    /// A configured replica is not fenced: an old engine may still answer reads from it. That holds for who is not in
    /// the epoch, too: the engine that left it out may have died before the old one's time was over.
    pub(super) unfenced: bool,
}

/// Chooses, for an engine of the generation `own`. `authority` is `None` until the authority has answered; it is not asked with other
/// quorums than `Any`. `majority`: more than half of the candidates that count, which is asked for with `Majority` alone.
pub(super) fn choose(
    quorum: Quorum,
    own: Generation,
    authority: Option<&Option<Epoch>>,
    majority: u32,
    candidates: &[Candidate<'_>],
) -> Choice {
    match quorum {
        Quorum::Unsafe => whoever_is_here(own, candidates),
        Quorum::Majority => by_majority(own, majority, candidates),
        Quorum::Any => match authority {
            None => Choice::Wait("the authority has not answered".into()),
            Some(Some(epoch)) if !is_put_back(epoch, candidates) => by_authority(epoch, candidates),
            Some(Some(_)) => {
                by_all_members(own, candidates, "the authority has an older epoch than one that counted")
            }
            Some(None) => by_all_members(own, candidates, "the authority has no epoch"),
        },
    }
}

/// A younger epoch has counted, as some replica has recorded: what the authority has was put back, as from a copy of the host's or the
/// cluster's records, and whoever was left out since is still a member of it.
fn is_put_back(epoch: &Epoch, candidates: &[Candidate<'_>]) -> bool {
    candidates.iter().filter_map(|c| c.state?.epoch.as_ref()).any(|e| e.outdates(epoch.order()))
}

/// The authority's epoch and one of its members. Who is a member has recorded it, or a younger one.
fn by_authority(epoch: &Epoch, candidates: &[Candidate<'_>]) -> Choice {
    let holds = |state: &ReplicaState| state.epoch.as_ref().is_some_and(|e| e.order() >= epoch.order());
    start_from(epoch, candidates, holds)
}

/// Without the authority, for that reason: every member of the newest epoch found has to be here. A younger one would have left
/// itself on one of them. Who has no epoch at all was emptied, or the epoch never counted: it is no member either way.
fn by_all_members(own: Generation, candidates: &[Candidate<'_>], why: &str) -> Choice {
    let Some(epoch) = newest(candidates) else { return first_start(candidates) };
    let tells =
        |name: &String| candidates.iter().any(|c| c.name == name && c.state.is_some_and(|s| !s.imported));
    if !epoch.members.iter().all(tells) {
        return Choice::Wait(format!(
            "{why}; without it every member of the newest epoch found is needed: {}",
            missing(epoch, candidates)
        ));
    }
    start_from(epoch, candidates, |state| state.epoch.is_some() && was_there(own, epoch, state))
}

/// A majority of the configured replicas has to tell its epoch; the newest counts. Who has none tells nothing: it may have been made anew
/// where what it held was lost. Only where the first epoch was announced and not made yet (number 0) they may all be as they were made:
/// then the volume begins once more, with all of them. With those alone that have heard of it the others would be filled, one would record
/// the epoch with it before the others do, and fewer than a majority would ever tell one. Whoever tells of more than number 0 then was away
/// when the volume was announced, whose replicas had been emptied: nobody decides by himself to begin without what it holds, or with it.
fn by_majority(own: Generation, majority: u32, candidates: &[Candidate<'_>]) -> Choice {
    let mut counted: Vec<Candidate<'_>> = candidates.iter().copied().filter(|c| c.counts).collect();
    let Some(epoch) = newest(&counted) else { return first_start(&counted) };
    let known: Vec<&str> = candidates.iter().filter(|c| tells_of_data(c)).map(|c| c.name).collect();
    if epoch.counter == 0 && !known.is_empty() {
        return Choice::Wait(format!(
            "the volume was about to begin anew, since no replica had a record of it any more, and now there is one on {}: \
             `longhornctl salvage` begins with what is there",
            known.join(", ")
        ));
    }
    let told = counted.iter().filter(|c| c.state.is_some_and(|s| s.epoch.is_some())).count();
    let need = usize::try_from(majority).unwrap_or(usize::MAX);
    let is_first = epoch.counter == 0 && counted.iter().all(|c| c.state.is_some_and(|s| !s.imported));
    if told < need && is_first {
        // Who has heard of it was there when the volume was begun.
        counted.sort_by_key(|c| c.state.is_none_or(|s| s.epoch.is_none()));
        return equal_ones(&counted);
    }
    if told < need {
        let empty = |c: &&Candidate<'_>| c.state.is_some_and(|s| s.epoch.is_none());
        let empty: Vec<&str> = counted.iter().filter(empty).map(|c| c.name).collect();
        let why = format!("{told} replicas are here, {need} of {} are needed", counted.len());
        return Choice::Wait(match empty.as_slice() {
            [] => why,
            empty => format!("{why}; without any record of the volume: {}", empty.join(", ")),
        });
    }
    start_from(epoch, candidates, |state| state.epoch.is_some() && was_there(own, epoch, state))
}

/// It has recorded an epoch that may have counted: something may have been answered since, and be on it.
fn tells_of_data(candidate: &Candidate<'_>) -> bool {
    candidate.state.and_then(|s| s.epoch.as_ref()).is_some_and(|e| e.counter > 0)
}

fn start_from(epoch: &Epoch, candidates: &[Candidate<'_>], holds: impl Fn(&ReplicaState) -> bool) -> Choice {
    let in_epoch = |c: &&Candidate<'_>| epoch.has(c.name);
    let members: MemberSet = candidates
        .iter()
        .filter(in_epoch)
        .filter(|c| {
            let is_whole = |s: &ReplicaState| !s.rebuilding && !s.imported;
            let is_member = |s: &ReplicaState| holds(s) && counts_itself(c.name, s);
            c.state.is_some_and(|s| is_whole(s) && is_member(s) && !is_older_copy(s, epoch, candidates))
        })
        .map(|c| c.id)
        .collect();
    if !candidates.iter().any(|c| c.counts && members.has(c.id)) {
        return Choice::Wait(format!("no member of the epoch is here: {}", missing(epoch, candidates)));
    }
    let heard = candidates.iter().filter(in_epoch).filter(|c| c.state.is_some()).count();
    Choice::Start(Start {
        base: Some(epoch.clone()),
        members,
        recorded: recorded_by(members, candidates).min(Some(epoch.order())),
        complete: candidates.iter().filter(in_epoch).all(|c| c.state.is_some()),
        unfenced: heard < epoch.members.len() || candidates.iter().any(|c| c.counts && c.state.is_none()),
    })
}

/// It has recorded this epoch, or was about to: then it had recorded what the epoch says of its members, also if that is the chooser's
/// own, and the engine that names it there had let it in before: who was let in by whom is as durable as an epoch. (The chooser's own
/// engine may have let in this very session alone.) A directory of which one of these does not hold is an older one under the same name,
/// as of a disk that was away while the replica was made anew, or one that was put back as it was before that engine began: closed
/// cleanly, it says that it lacks nothing.
fn was_there(own: Generation, epoch: &Epoch, state: &ReplicaState) -> bool {
    let recorded = state.epoch.as_ref().map(Epoch::order);
    let was_let_in = epoch.generation == own || state.previous_generation >= epoch.generation;
    was_let_in && recorded >= epoch.after || recorded >= Some(epoch.order())
}

/// It is rounds behind another one that has recorded this epoch, or one that was to follow on it.
fn is_older_copy(state: &ReplicaState, epoch: &Epoch, candidates: &[Candidate<'_>]) -> bool {
    let told = candidates.iter().filter_map(|c| c.state.filter(|s| !s.imported)?.epoch.as_ref());
    let mut as_young = told.filter(|e| e.order() >= epoch.order());
    state.epoch.as_ref().is_some_and(|own| as_young.any(|e| own.is_behind(e)))
}

/// The oldest of the epochs that these have recorded last; `None` if one has recorded none.
fn recorded_by(members: MemberSet, candidates: &[Candidate<'_>]) -> Option<EpochOrder> {
    let recorded = |c: &Candidate<'_>| c.state.and_then(|s| s.epoch.as_ref()).map(Epoch::order);
    candidates.iter().filter(|c| members.has(c.id)).map(recorded).min().flatten()
}

/// A member of an epoch was a member of the one before, or has recorded the epoch itself first.
fn counts_itself(name: &str, state: &ReplicaState) -> bool {
    state.epoch.as_ref().is_some_and(|e| e.has(name))
}

/// No epoch anywhere: a new volume, or an import. Every configured replica must say that it has none, or an empty
/// replica could be taken for the volume while the one with the data is away.
fn first_start(candidates: &[Candidate<'_>]) -> Choice {
    if let Some(absent) = candidates.iter().find(|c| c.state.is_none()) {
        return Choice::Wait(format!("a first start needs every replica: {} is not here", absent.name));
    }
    equal_ones(candidates)
}

/// The first replica, and those that are like it and were never written by anybody else.
fn equal_ones(candidates: &[Candidate<'_>]) -> Choice {
    let here = || candidates.iter().filter_map(|c| c.state.map(|s| (c, s)));
    let import = here().any(|(_, s)| s.imported);
    let Some((first, model)) = here().find(|(_, s)| !s.rebuilding) else {
        return Choice::Wait("no replica is usable: each began a rebuild that did not end".into());
    };
    let members = here()
        .filter(|(c, s)| {
            c.id == first.id || (!import && !s.rebuilding && untouched(s) && same_shape(s, model))
        })
        .map(|(c, _)| c.id)
        .collect();
    let complete = candidates.iter().all(|c| c.state.is_some());
    Choice::Start(Start { base: None, members, recorded: None, complete, unfenced: false })
}

/// As Longhorn: whoever is here and not in the middle of a rebuild; nobody else is waited for. But of those that are here the
/// newest epoch says who was left out, and what they have missed is not read. Who has no epoch has not heard of the first yet, or was made
/// anew since.
fn whoever_is_here(own: Generation, candidates: &[Candidate<'_>]) -> Choice {
    if candidates.iter().all(|c| c.state.is_none()) {
        return Choice::Wait("no replica is here".into());
    }
    let usable = |c: &Candidate<'_>| c.state.is_some_and(|s| !s.rebuilding && !s.imported);
    let usable: Vec<Candidate<'_>> = candidates.iter().copied().filter(usable).collect();
    let newest = newest(&usable);
    if newest.is_none() && candidates.iter().any(|c| c.state.is_some_and(|s| s.imported)) {
        return equal_ones(candidates);
    }
    let counts = |c: &&Candidate<'_>| {
        let Some(state) = c.state else { return false };
        newest
            .is_none_or(|e| e.has(c.name) && was_there(own, e, state) && !is_older_copy(state, e, candidates))
            && (state.epoch.is_none() || counts_itself(c.name, state))
    };
    let members: MemberSet = usable.iter().filter(counts).map(|c| c.id).collect();
    if members.is_empty() {
        return Choice::Wait("no replica is usable: each began a rebuild that did not end".into());
    }
    let complete = candidates.iter().all(|c| c.state.is_some());
    let recorded = recorded_by(members, candidates);
    Choice::Start(Start { base: newest.cloned(), members, recorded, complete, unfenced: false })
}

fn untouched(state: &ReplicaState) -> bool {
    state.clean || (state.intent.is_empty() && state.in_doubt.is_empty())
}

fn newest<'a>(candidates: &[Candidate<'a>]) -> Option<&'a Epoch> {
    candidates.iter().filter_map(|c| c.state?.epoch.as_ref()).max_by_key(|e| e.order())
}

fn missing(epoch: &Epoch, candidates: &[Candidate<'_>]) -> String {
    let said = |name: &str| candidates.iter().find(|c| c.name == name).and_then(|c| c.state);
    let (here, away): (Vec<&str>, Vec<&str>) =
        epoch.members.iter().map(String::as_str).partition(|name| said(name).is_some());
    if !away.is_empty() {
        return format!("{} missing", away.join(", "));
    }
    let why = |name: &&str| said(name).map(|state| format!("{name} {}", why_not(state)));
    match here.is_empty() {
        true => "it has no members".into(),
        // Nobody comes who could help.
        false => {
            let all = here.iter().filter_map(why).collect::<Vec<_>>().join(", ");
            format!("{all}; where that does not change, `longhornctl salvage` begins with one of them")
        }
    }
}

/// Why a member that is here is not one to start from.
const fn why_not(state: &ReplicaState) -> &'static str {
    match (state.imported, state.rebuilding) {
        (true, _) => "was written by another program",
        (false, true) => "is not complete, since its rebuild did not end",
        (false, false) => "is an older copy, or was about to be left out",
    }
}

/// Two replicas hold the same snapshots of a volume of the same size. What is marked as removed does not count: each
/// replica folds it when it likes. Nor does the order: where a revert has left a branch, one that was opened since tells its layers in
/// another order than one that has made them one by one, as this engine's own picture has them.
fn same_shape(a: &ReplicaState, b: &ReplicaState) -> bool {
    a.size == b.size && snapshots(&a.chain) == snapshots(&b.chain)
}

/// They tell them in the same order besides: nobody may rely on it.
fn same_order(a: &ReplicaState, b: &ReplicaState) -> bool {
    told(&a.chain).eq(told(&b.chain))
}

fn snapshots(chain: &[LayerInfo]) -> BTreeSet<&str> {
    told(chain).collect()
}

fn told(chain: &[LayerInfo]) -> impl Iterator<Item = &str> {
    chain.iter().filter(|l| !l.removed && !l.name.is_empty()).map(|l| l.name.as_str())
}

impl Conductor {
    /// See [`same_shape`].
    pub(super) fn have_same_shape(&self, a: &ReplicaState, b: &ReplicaState) -> bool {
        same_shape(a, b) && (!sabotaged!(self, order_counts) || same_order(a, b))
    }
}

#[cfg(test)]
mod tests;
