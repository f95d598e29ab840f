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

/// The replica with this number, from 0.
fn candidate(n: u8, state: Option<&ReplicaState>) -> Candidate<'_> {
    let name = ["1", "2", "3", "4", "5"][usize::from(n)];
    Candidate { id: MemberId(n), name, counts: true, state }
}

/// Replicas 1, 2, 3.
fn among(quorum: Quorum, authority: Option<Option<Epoch>>, states: [Option<ReplicaState>; 3]) -> Choice {
    among_all(quorum, authority, &states)
}

fn among_all(quorum: Quorum, authority: Option<Option<Epoch>>, states: &[Option<ReplicaState>]) -> Choice {
    let candidates: Vec<_> = (0..).zip(states).map(|(n, state)| candidate(n, state.as_ref())).collect();
    let majority = u32::try_from(Quorum::Majority.members_min(states.len())).unwrap();
    choose(quorum, OWN, authority.as_ref(), majority, &candidates)
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
    assert!(waits(among(Quorum::Any, Some(None), [knows(&e12), None, knows(&e123)])).contains("2 missing"));
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
    for (quorum, authority) in [(Quorum::Majority, None), (Quorum::Unsafe, None), (Quorum::Any, Some(None))] {
        let with = |third| start(among(quorum, authority.clone(), [knows(&now), knows(&now), third]));
        assert_eq!(ids(with(knows(&old)).members), [1, 2], "{quorum:?}");
        let on_its_way = was_let_in_by(2, knows(&old));
        assert_eq!(ids(with(on_its_way).members), [1, 2, 3], "{quorum:?}: who was about to record it");
    }
    let emptied = [knows(&now), knows(&now), fresh()];
    assert_eq!(ids(start(among(Quorum::Unsafe, None, emptied)).members), [1, 2]);
}

/// It was closed cleanly before the engine began that has made the newest epoch, and by itself it says that it lacks nothing.
#[test]
fn a_directory_from_before_the_engine_that_names_it_is_none() {
    let before = epoch(3, 1, &["1", "2", "3"]);
    let now = Epoch { after: Some(before.order()), ..epoch(4, 1, &["1", "2", "3"]) };
    for (quorum, authority) in [(Quorum::Majority, None), (Quorum::Unsafe, None), (Quorum::Any, Some(None))] {
        let with = |third| start(among(quorum, authority.clone(), [knows(&now), knows(&now), third]));
        assert_eq!(ids(with(knows(&before)).members), [1, 2], "{quorum:?}");
        let on_its_way = was_let_in_by(4, knows(&before));
        assert_eq!(ids(with(on_its_way).members), [1, 2, 3], "{quorum:?}: who was about to record it");
    }
}

/// All were emptied, and the volume was about to begin anew when the engine ended; then the directory of one is back that was away.
#[test]
fn a_volume_does_not_begin_anew_beside_one_that_has_a_record_of_it() {
    let (old, announced) = (epoch(3, 5, &["1", "2", "3"]), epoch(7, 0, &["1", "2", "3"]));
    // Enough tell an epoch, and too few of them all.
    for third in [fresh(), knows(&announced), None] {
        let why = waits(among(Quorum::Majority, None, [knows(&announced), knows(&old), third]));
        assert!(why.contains("there is one on 2: `longhornctl salvage`"), "{why}");
    }
    let five = [knows(&old), knows(&announced), fresh(), fresh(), fresh()];
    let why = waits(among_all(Quorum::Majority, None, &five));
    assert!(why.contains("there is one on 1: "), "{why}");
    // That one learns, as far as the record knows.
    let second = Candidate { counts: false, ..candidate(1, five[0].as_ref()) };
    let why = waits(choose(Quorum::Majority, OWN, None, 1, &[candidate(0, five[1].as_ref()), second]));
    assert!(why.contains("there is one on 2: "), "{why}");
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
    for (quorum, authority) in [(Quorum::Majority, None), (Quorum::Unsafe, None), (Quorum::Any, Some(None))] {
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
    for (quorum, authority) in [(Quorum::Majority, None), (Quorum::Unsafe, None), (Quorum::Any, Some(None))] {
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
    assert_eq!(ids(start(among(Quorum::Unsafe, None, [unended.clone(), None, knows(&e123)])).members), [3]);
    assert!(waits(among(Quorum::Unsafe, None, [unended, None, None])).contains("a rebuild that did not end"));
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
