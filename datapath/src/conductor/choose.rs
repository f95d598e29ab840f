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
/// the epoch with it before the others do, and fewer than a majority would ever tell one.
fn by_majority(own: Generation, majority: u32, candidates: &[Candidate<'_>]) -> Choice {
    let mut counted: Vec<Candidate<'_>> = candidates.iter().copied().filter(|c| c.counts).collect();
    let Some(epoch) = newest(&counted) else { return first_start(&counted) };
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
/// own. Where the epoch does not say it, the engine that names a replica in an epoch has been let in by it before, and who was let in by
/// whom is as durable as an epoch. A directory of which neither holds is an older one under the same name, as of a disk that was away
/// while the replica was made anew.
fn was_there(own: Generation, epoch: &Epoch, state: &ReplicaState) -> bool {
    let recorded = state.epoch.as_ref().map(Epoch::order);
    let was_about_to = match epoch.after {
        Some(_) => recorded >= epoch.after,
        None => epoch.generation == own || state.previous_generation >= epoch.generation,
    };
    was_about_to || recorded >= Some(epoch.order())
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
mod tests {
    use lh_block::{Generation, Instance};

    use super::*;

    #[test]
    fn a_branch_is_the_same_in_whatever_order_its_layers_are_told() {
        let layer = |name: &str, parent: &str| LayerInfo {
            name: name.to_owned(),
            parent: parent.to_owned(),
            ..LayerInfo::default()
        };
        let told = |chain: &[LayerInfo]| ReplicaState { chain: chain.to_vec(), ..ReplicaState::default() };
        // Reverted from c to a, and then d was taken: one has made it so, the other has been opened since.
        let [a, b, c, d, head] =
            [("a", ""), ("b", "a"), ("c", "b"), ("d", "a"), ("", "d")].map(|(n, p)| layer(n, p));
        let made = told(&[a.clone(), b.clone(), c.clone(), d.clone(), head.clone()]);
        let opened = told(&[a.clone(), b.clone(), d, c.clone(), head.clone()]);
        assert!(same_shape(&made, &opened));
        assert!(!same_shape(&made, &told(&[a, b, c, head])));
    }

    fn epoch(attachment: u32, counter: u64, members: &[&str]) -> Epoch {
        Epoch {
            generation: Generation { attachment, restart: 0 },
            counter,
            members: members.iter().map(|m| (*m).to_owned()).collect(),
            id: Instance(u128::from(counter)),
            after: None,
            round: None,
        }
    }

    /// The engine that comes.
    const OWN: Generation = Generation { attachment: 9, restart: 0 };

    /// As it was left by an engine of the epoch's generation.
    fn knows(epoch: &Epoch) -> Option<ReplicaState> {
        let previous_generation = epoch.generation;
        Some(ReplicaState { epoch: Some(epoch.clone()), previous_generation, ..ReplicaState::default() })
    }

    fn was_let_in_by(attachment: u32, state: Option<ReplicaState>) -> Option<ReplicaState> {
        let previous_generation = Generation { attachment, restart: 0 };
        state.map(|s| ReplicaState { previous_generation, ..s })
    }

    fn fresh() -> Option<ReplicaState> {
        Some(ReplicaState { clean: true, lived: true, ..ReplicaState::default() })
    }

    /// Replicas 1, 2, 3.
    fn among(quorum: Quorum, authority: Option<Option<Epoch>>, states: [Option<ReplicaState>; 3]) -> Choice {
        let candidates: Vec<_> = ["1", "2", "3"]
            .into_iter()
            .zip(&states)
            .enumerate()
            .map(|(i, (name, state))| Candidate {
                id: MemberId(u8::try_from(i).unwrap()),
                name,
                counts: true,
                state: state.as_ref(),
            })
            .collect();
        choose(quorum, OWN, authority.as_ref(), 2, &candidates)
    }

    fn start(choice: Choice) -> Start {
        match choice {
            Choice::Start(start) => start,
            Choice::Wait(why) => panic!("waits: {why}"),
        }
    }

    fn waits(choice: Choice) -> String {
        match choice {
            Choice::Wait(why) => why,
            Choice::Start(start) => panic!("starts: {start:?}"),
        }
    }

    fn ids(members: MemberSet) -> Vec<u8> {
        members.iter().map(|m| m.0 + 1).collect()
    }

    #[test]
    fn the_ones_that_were_left_out_never_start_alone() {
        let (e123, e12, e1) = (epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]), epoch(1, 3, &["1"]));
        let left = [None, knows(&e12), knows(&e123)];
        assert!(waits(among(Quorum::Any, Some(Some(e1.clone())), left.clone())).contains("1 missing"));
        assert!(waits(among(Quorum::Any, Some(None), left.clone())).contains("1 missing"));
        assert!(waits(among(Quorum::Any, None, left)).contains("authority"));
        let back = [knows(&e1), knows(&e12), knows(&e123)];
        assert_eq!(ids(start(among(Quorum::Any, Some(Some(e1)), back)).members), [1]);
    }

    #[test]
    fn without_the_authority_all_members_of_the_newest_epoch_are_enough() {
        let (e123, e12) = (epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]));
        let found = start(among(Quorum::Any, Some(None), [knows(&e12), knows(&e12), knows(&e123)]));
        assert_eq!(ids(found.members), [1, 2]);
        let one_recorded = start(among(Quorum::Any, Some(None), [knows(&e12), knows(&e123), None]));
        assert_eq!(ids(one_recorded.members), [1, 2], "an epoch on its way lost no member's writes");
        assert!(
            waits(among(Quorum::Any, Some(None), [knows(&e12), None, knows(&e123)])).contains("2 missing")
        );
    }

    #[test]
    fn a_first_epoch_that_was_interrupted_is_no_dead_end() {
        let (announced, e) = (epoch(1, 0, &["1", "2", "3"]), epoch(1, 1, &["1", "2", "3"]));
        assert_eq!(ids(start(among(Quorum::Any, Some(None), [fresh(), knows(&e), fresh()])).members), [2]);
        let interrupted = [fresh(), knows(&announced), fresh()];
        let begun_anew = start(among(Quorum::Majority, None, interrupted));
        assert_eq!((ids(begun_anew.members), begun_anew.base), (vec![1, 2, 3], None));
        let other = fresh().map(|s| ReplicaState { size: 4096, ..s });
        assert_eq!(
            ids(start(among(Quorum::Majority, None, [other, knows(&announced), fresh()])).members),
            [2, 3]
        );
        let made_by_one = [knows(&announced), knows(&e), fresh()];
        assert_eq!(ids(start(among(Quorum::Majority, None, made_by_one)).members), [1, 2]);
        let foreign = fresh().map(|s| ReplicaState { imported: true, ..s });
        waits(among(Quorum::Any, Some(None), [foreign.clone(), knows(&e), fresh()]));
        waits(among(Quorum::Majority, None, [foreign, knows(&announced), fresh()]));
    }

    /// 3 was away, was made anew under its name, and is a member again. Then the directory that was away takes its place.
    #[test]
    fn an_older_directory_of_a_member_is_none() {
        let (old, now) = (epoch(1, 1, &["1", "2", "3"]), epoch(2, 2, &["1", "2", "3"]));
        for (quorum, authority) in
            [(Quorum::Majority, None), (Quorum::Unsafe, None), (Quorum::Any, Some(None))]
        {
            let with = |third| start(among(quorum, authority.clone(), [knows(&now), knows(&now), third]));
            assert_eq!(ids(with(knows(&old)).members), [1, 2], "{quorum:?}");
            let on_its_way = was_let_in_by(2, knows(&old));
            assert_eq!(ids(with(on_its_way).members), [1, 2, 3], "{quorum:?}: who was about to record it");
        }
        let emptied = [knows(&now), knows(&now), fresh()];
        assert_eq!(ids(start(among(Quorum::Unsafe, None, emptied)).members), [1, 2]);
    }

    /// An engine that was answered says so on its members; it also shows in the epoch that comes next.
    #[test]
    fn an_authority_that_was_put_back_is_not_believed() {
        let (e123, e12) = (epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]));
        let counts = Epoch { after: Some(e12.order()), ..e12.clone() };
        let next = Epoch { after: Some(e12.order()), ..epoch(2, 1, &["1", "2"]) };
        for known in [counts, next] {
            let authority = || Some(Some(e123.clone()));
            let s = start(among(Quorum::Any, authority(), [knows(&known), knows(&known), knows(&e123)]));
            assert_eq!((ids(s.members), s.base), (vec![1, 2], Some(known.clone())));
            let why = waits(among(Quorum::Any, authority(), [None, knows(&known), knows(&e123)]));
            assert!(why.contains("older epoch than one that counted") && why.contains("1 missing"), "{why}");
        }
        // It was on its way, and whoever it was to leave out has everything.
        let on_its_way = Epoch { after: Some(e123.order()), ..e12 };
        let states = [knows(&on_its_way), knows(&on_its_way), None];
        let s = start(among(Quorum::Any, Some(Some(e123.clone())), states));
        assert_eq!(s.recorded, Some(e123.order()), "the next one does not say that it counted");
        let states = [knows(&on_its_way), knows(&on_its_way), knows(&e123)];
        assert_eq!(ids(start(among(Quorum::Any, Some(Some(e123)), states)).members), [1, 2, 3]);
    }

    /// The same while one engine lives: it has let in both directories.
    #[test]
    fn an_older_directory_of_a_member_is_none_though_the_same_engine_let_it_in() {
        let (old, without) = (epoch(1, 4, &["1", "2", "3"]), epoch(1, 5, &["1", "2"]));
        let now = Epoch { after: Some(without.order()), ..epoch(1, 6, &["1", "2", "3"]) };
        for (quorum, authority) in
            [(Quorum::Majority, None), (Quorum::Unsafe, None), (Quorum::Any, Some(None))]
        {
            let with = |second, third| start(among(quorum, authority.clone(), [knows(&now), second, third]));
            assert_eq!(ids(with(knows(&now), knows(&old)).members), [1, 2], "{quorum:?}");
            let on_its_way = with(knows(&without), knows(&now));
            assert_eq!(ids(on_its_way.members), [1, 2, 3], "{quorum:?}: who was about to record it");
            assert_eq!(on_its_way.recorded, Some(without.order()), "{quorum:?}");
        }
    }

    /// What this engine has named itself and what was not recorded by all is chosen from once more.
    #[test]
    fn who_hears_of_an_engines_first_epoch_is_in_it_when_it_begins_again() {
        let (before, own) = (epoch(8, 1, &["1", "2", "3"]), epoch(9, 1, &["1", "2", "3"]));
        let states = [was_let_in_by(8, knows(&own)), knows(&before), knows(&before)];
        assert_eq!(ids(start(among(Quorum::Majority, None, states)).members), [1, 2, 3]);
    }

    /// This engine's first epoch was on its way when the others were lost. 3 comes back with the disk that was away while it was made anew.
    #[test]
    fn an_older_directory_is_none_though_this_engines_own_epoch_names_it() {
        let (old, before) = (epoch(3, 1, &["1", "2", "3"]), epoch(8, 1, &["1", "2", "3"]));
        let own = Epoch { after: Some(before.order()), ..epoch(9, 1, &["1", "2", "3"]) };
        for (quorum, authority) in
            [(Quorum::Majority, None), (Quorum::Unsafe, None), (Quorum::Any, Some(None))]
        {
            let with = |second, third| start(among(quorum, authority.clone(), [knows(&own), second, third]));
            assert_eq!(ids(with(knows(&before), knows(&before)).members), [1, 2, 3], "{quorum:?}");
            assert_eq!(ids(with(knows(&before), knows(&old)).members), [1, 2], "{quorum:?}");
            assert_eq!(ids(with(fresh(), was_let_in_by(9, knows(&old))).members), [1], "{quorum:?}");
        }
    }

    /// 1 was out when 2 and 3 went on without it. Those were lost, and empty ones have their places.
    #[test]
    fn empty_replicas_are_no_majority_for_the_one_that_was_left_out() {
        let old = epoch(1, 1, &["1", "2", "3"]);
        let why = waits(among(Quorum::Majority, None, [knows(&old), fresh(), fresh()]));
        assert!(why.contains("2 of 3 are needed; without any record of the volume: 2, 3"), "{why}");
    }

    #[test]
    fn an_epoch_that_did_not_count_leaves_its_leaver_in() {
        let (e123, e12) = (epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]));
        let s = start(among(Quorum::Any, Some(Some(e123.clone())), [knows(&e12), knows(&e12), knows(&e123)]));
        assert_eq!(ids(s.members), [1, 2, 3]);
        assert!(s.complete && !s.unfenced);
    }

    #[test]
    fn whoever_is_not_fenced_may_still_be_read_from_by_an_engine_that_knows_of_no_younger_epoch() {
        let (e123, e12) = (epoch(1, 1, &["1", "2", "3"]), epoch(2, 1, &["1", "2"]));
        let s = start(among(Quorum::Any, Some(Some(e12.clone())), [knows(&e12), knows(&e12), None]));
        assert!(s.complete && s.unfenced);
        let s = start(among(Quorum::Any, Some(Some(e12.clone())), [knows(&e12), knows(&e12), knows(&e123)]));
        assert!(!s.unfenced);
    }

    #[test]
    fn a_majority_finds_what_a_majority_recorded() {
        let (e123, e12) = (epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]));
        let found = start(among(Quorum::Majority, None, [None, knows(&e12), knows(&e123)]));
        assert_eq!(ids(found.members), [2]);
        assert!(!found.complete && found.unfenced);
        assert!(waits(among(Quorum::Majority, None, [None, None, knows(&e123)])).contains("2 of 3"));
        assert!(
            waits(among(Quorum::Majority, None, [None, fresh(), knows(&e123)])).contains("2 of 3"),
            "a replica that lost its records tells nothing"
        );
    }

    #[test]
    fn a_replica_without_the_counted_epoch_is_no_member() {
        let (e12, old) = (epoch(2, 1, &["1", "2"]), epoch(1, 9, &["1", "2"]));
        let s = start(among(Quorum::Any, Some(Some(e12.clone())), [knows(&old), knows(&e12), None]));
        assert_eq!(ids(s.members), [2]);
    }

    #[test]
    fn a_rebuilding_or_foreign_replica_is_no_member() {
        let e = epoch(1, 1, &["1", "2", "3"]);
        let rebuilding = knows(&e).map(|s| ReplicaState { rebuilding: true, ..s });
        let foreign = knows(&e).map(|s| ReplicaState { imported: true, ..s });
        let s = start(among(Quorum::Any, Some(Some(e.clone())), [rebuilding.clone(), foreign, knows(&e)]));
        assert_eq!(ids(s.members), [3]);
        waits(among(Quorum::Any, Some(Some(e)), [rebuilding, None, None]));
        let alone = epoch(1, 1, &["1"]);
        let foreign = knows(&alone).map(|s| ReplicaState { imported: true, ..s });
        let why = waits(among(Quorum::Any, Some(Some(alone)), [foreign, None, None]));
        assert!(why.contains("1 was written by another program; where that does not change"), "{why}");
    }

    #[test]
    fn a_first_start_needs_every_replica() {
        assert!(waits(among(Quorum::Any, Some(None), [fresh(), None, fresh()])).contains("2 is not here"));
        let s = start(among(Quorum::Any, Some(None), [fresh(), fresh(), fresh()]));
        assert_eq!((ids(s.members), s.base), (vec![1, 2, 3], None));
        let e = epoch(1, 1, &["3"]);
        assert_eq!(ids(start(among(Quorum::Any, Some(None), [fresh(), fresh(), knows(&e)])).members), [3]);
    }

    #[test]
    fn of_an_import_the_first_is_the_source() {
        let foreign = || fresh().map(|s| ReplicaState { imported: true, ..s });
        let s = start(among(Quorum::Any, Some(None), [foreign(), foreign(), fresh()]));
        assert_eq!(ids(s.members), [1]);
    }

    #[test]
    fn an_unlike_replica_is_not_in_the_first_epoch() {
        let larger = fresh().map(|s| ReplicaState { size: 4096, ..s });
        let written =
            fresh().map(|s| ReplicaState { clean: false, intent: vec![lh_block::Extent::new(0, 4096)], ..s });
        let s = start(among(Quorum::Any, Some(None), [fresh(), larger, written]));
        assert_eq!(ids(s.members), [1]);
    }

    #[test]
    fn unsafe_believes_whoever_is_here() {
        let s = start(among(Quorum::Unsafe, None, [None, fresh(), None]));
        assert_eq!((ids(s.members), s.complete), (vec![2], false));
        let (e123, e12) = (epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]));
        let s = start(among(Quorum::Unsafe, None, [None, None, knows(&e123)]));
        assert_eq!((ids(s.members), s.complete), (vec![3], false), "nobody says that it was left out");
        let unended = knows(&e12).map(|s| ReplicaState { rebuilding: true, ..s });
        assert_eq!(
            ids(start(among(Quorum::Unsafe, None, [unended.clone(), None, knows(&e123)])).members),
            [3]
        );
        assert!(
            waits(among(Quorum::Unsafe, None, [unended, None, None])).contains("a rebuild that did not end")
        );
    }

    #[test]
    fn unsafe_does_not_read_from_who_was_left_out_as_somebody_here_knows() {
        let (e123, e12) = (epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]));
        let s = start(among(Quorum::Unsafe, None, [None, knows(&e12), knows(&e123)]));
        assert_eq!((ids(s.members), s.base), (vec![2], Some(e12.clone())));
        let s = start(among(Quorum::Unsafe, None, [knows(&e123), was_let_in_by(1, fresh()), knows(&e123)]));
        assert_eq!(ids(s.members), [1, 2, 3], "the first epoch was interrupted");
        let foreign = fresh().map(|s| ReplicaState { imported: true, ..s });
        let s = start(among(Quorum::Unsafe, None, [foreign.clone(), knows(&e12), knows(&e123)]));
        assert_eq!(ids(s.members), [2]);
        assert_eq!(ids(start(among(Quorum::Unsafe, None, [foreign, fresh(), None])).members), [1]);
    }
}
