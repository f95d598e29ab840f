use lh_block::Instance;

use super::*;

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

fn knows(epoch: &Epoch) -> Result<Held, String> {
    Ok(Held { epoch: Some(epoch.clone()), ..Held::default() })
}

fn lost() -> Result<Held, String> {
    Err("its directory is not there".to_owned())
}

/// Replicas 1, 2, 3.
fn among(quorum: Quorum, authority: &Authority, held: [Result<Held, String>; 3]) -> Decision {
    let names = ["1", "2", "3"].map(str::to_owned);
    let candidates: Vec<_> =
        names.into_iter().zip(held).map(|(name, held)| Candidate { name, held, learner: false }).collect();
    decide(quorum, authority, &candidates)
}

fn says(epoch: &Epoch) -> Authority {
    Authority::Says(Some(epoch.clone()))
}

fn sure(names: &[&str]) -> Choice {
    Choice::Sure(names.iter().map(|n| (*n).to_owned()).collect())
}

fn unsure(decision: &Decision, place: usize) -> &str {
    match decision.of(place) {
        Some(Verdict::Unsure(why)) => why,
        other => panic!("{other:?}"),
    }
}

/// Epochs {1,2,3}, {1,2}, {1}: what was acknowledged under the last one is on 1 alone.
fn shrunk() -> [Epoch; 3] {
    [epoch(1, 1, &["1", "2", "3"]), epoch(1, 2, &["1", "2"]), epoch(1, 3, &["1"])]
}

#[test]
fn the_last_member_is_sure_and_the_ones_that_were_left_out_are_not() {
    let [e123, e12, e1] = shrunk();
    for authority in [says(&e1), Authority::Says(None), Authority::Silent] {
        let all = among(Quorum::Any, &authority, [knows(&e1), knows(&e12), knows(&e123)]);
        assert_eq!(all.choice, sure(&["1"]), "{authority:?}");
        assert!(unsure(&all, 1).contains("left out") && unsure(&all, 2).contains("left out"));
        assert_eq!(all.epoch, Some(e1.clone()));
    }
}

#[test]
fn without_the_last_member_nobody_is_sure_whatever_the_authority_says() {
    let [e123, e12, e1] = shrunk();
    let left = || [lost(), knows(&e12), knows(&e123)];
    let told = among(Quorum::Any, &says(&e1), left());
    assert_eq!(told.choice, Choice::Guess("2".into()));
    assert!(unsure(&told, 1).contains("1.0.3"), "{}", unsure(&told, 1));
    for authority in [Authority::Says(None), Authority::Silent] {
        let silent = among(Quorum::Any, &authority, left());
        assert_eq!(silent.choice, Choice::Guess("2".into()));
        assert!(unsure(&silent, 1).contains("younger"), "1 may have gone on alone");
        assert_eq!(silent.epoch, None);
    }
    // Two and three alone: the epoch that has 1 is the newest found, and 1 may have made a younger one.
    let only_old = among(Quorum::Any, &Authority::Silent, [lost(), knows(&e123), knows(&e123)]);
    assert_eq!(only_old.choice, Choice::Guess("2".into()));
}

#[test]
fn an_epoch_that_did_not_count_leaves_its_leaver_in() {
    let [e123, e12, _] = shrunk();
    // Recorded by 1 and 2, and the engine died before the authority had it: nothing was acknowledged under it.
    let found = among(Quorum::Any, &says(&e123), [knows(&e12), knows(&e12), knows(&e123)]);
    assert_eq!(found.choice, sure(&["1", "2", "3"]));
    // Without the authority it may have counted.
    let silent = among(Quorum::Any, &Authority::Silent, [knows(&e12), knows(&e12), knows(&e123)]);
    assert_eq!(silent.choice, sure(&["1", "2"]));
    // Recorded by 1 alone: 2 holds everything all the same, and has not recorded what counts.
    let half = among(Quorum::Any, &Authority::Silent, [knows(&e12), knows(&e123), knows(&e123)]);
    assert_eq!(half.choice, sure(&["1"]));
}

#[test]
fn a_joiner_that_recorded_itself_is_none_until_the_authority_has_it() {
    let (e12, e123) = (epoch(1, 1, &["1", "2"]), epoch(1, 2, &["1", "2", "3"]));
    let told = among(Quorum::Any, &says(&e12), [knows(&e12), knows(&e12), knows(&e123)]);
    assert_eq!(told.choice, sure(&["1", "2"]));
    // Its rebuild had ended, so it may be a member; alone it proves nothing.
    let alone = among(Quorum::Any, &Authority::Silent, [lost(), lost(), knows(&e123)]);
    assert_eq!(alone.choice, Choice::Guess("3".into()));
}

#[test]
fn a_copy_from_before_is_not_the_member_of_that_name() {
    let [e123, e12, _] = shrunk();
    let restored = among(Quorum::Any, &says(&e12), [knows(&e123), lost(), knows(&e123)]);
    assert!(unsure(&restored, 0).contains("older copy"));
    assert!(matches!(restored.choice, Choice::Guess(_)));
}

#[test]
fn half_a_rebuild_and_a_missing_directory_are_never_started_from() {
    let e = epoch(1, 1, &["1", "2", "3"]);
    let half = || knows(&e).map(|h| Held { rebuilding: true, ..h });
    let none = among(Quorum::Any, &says(&e), [half(), lost(), half()]);
    assert_eq!(none.choice, Choice::Nothing);
    assert!(none.verdicts.iter().all(|v| matches!(v, Verdict::Unusable(_))));
    let one = among(Quorum::Any, &says(&e), [half(), knows(&e), lost()]);
    assert_eq!(one.choice, sure(&["2"]));
}

#[test]
fn what_another_program_wrote_is_a_guess_after_every_other() {
    let e = epoch(1, 1, &["1", "2", "3"]);
    let foreign = || knows(&e).map(|h| Held { imported: true, written: 9, ..h });
    let mixed = among(Quorum::Any, &says(&e), [foreign(), lost(), lost()]);
    assert_eq!(mixed.choice, Choice::Guess("1".into()));
    let older = epoch(1, 1, &["3"]);
    let better = among(Quorum::Any, &says(&epoch(1, 2, &["2"])), [foreign(), lost(), knows(&older)]);
    assert_eq!(better.choice, Choice::Guess("3".into()));
    // A member that was overwritten does not speak for its epoch.
    let silent = among(Quorum::Any, &Authority::Silent, [foreign(), knows(&e), knows(&e)]);
    assert!(matches!(silent.choice, Choice::Guess(_)));
}

#[test]
fn a_majority_finds_what_a_majority_recorded() {
    let [e123, e12, _] = shrunk();
    let two = among(Quorum::Majority, &Authority::Silent, [lost(), knows(&e12), knows(&e123)]);
    assert_eq!(two.choice, sure(&["2"]));
    let one = among(Quorum::Majority, &Authority::Silent, [lost(), lost(), knows(&e123)]);
    assert_eq!(one.choice, Choice::Guess("3".into()));
    assert!(unsure(&one, 2).contains("2 are needed"));
}

#[test]
fn unsafe_is_never_sure_and_takes_what_was_written_last() {
    let written = |written| Ok(Held { written, ..Held::default() });
    let found = among(Quorum::Unsafe, &Authority::Silent, [written(5), written(7), written(6)]);
    assert_eq!(found.choice, Choice::Guess("2".into()));
}

/// The host's records were put back from a copy: 3 was left out since.
#[test]
fn an_authority_that_was_put_back_makes_nobody_sure() {
    let [e123, e12, _] = shrunk();
    let counts = Epoch { after: Some(e12.order()), ..e12 };
    let all = among(Quorum::Any, &says(&e123), [knows(&counts), knows(&counts), knows(&e123)]);
    assert_eq!(all.choice, sure(&["1", "2"]));
    assert!(unsure(&all, 2).contains("left out"));
    let without_one = among(Quorum::Any, &says(&e123), [lost(), knows(&counts), knows(&e123)]);
    assert_eq!(without_one.choice, Choice::Guess("2".into()));
    assert!(unsure(&without_one, 2).contains("older epoch than one that counted"));
}

/// Its directory was put back as it was, within the epoch that counts.
#[test]
fn a_directory_that_is_rounds_behind_another_one_of_its_epoch_is_an_older_copy() {
    let e = epoch(1, 3, &["1", "2", "3"]);
    let at = |round: u64| Epoch { round: Some(lh_block::Round(round)), ..e.clone() };
    for quorum in [Quorum::Any, Quorum::Majority] {
        let all = among(quorum, &says(&e), [knows(&at(9)), knows(&at(7)), knows(&at(8))]);
        assert_eq!(all.choice, sure(&["1", "3"]), "{quorum:?}");
        assert!(unsure(&all, 1).contains("older copy"));
    }
    let foreign = knows(&at(9)).map(|h| Held { imported: true, ..h });
    for nobody in [lost(), foreign] {
        let alone = among(Quorum::Any, &says(&e), [nobody, knows(&at(7)), lost()]);
        assert_eq!(alone.choice, sure(&["2"]), "nobody is ahead of it");
    }
}

/// All were emptied, and the volume was about to begin anew; then the directory of one is back that was away.
#[test]
fn nobody_is_sure_of_a_volume_that_is_about_to_begin_anew_beside_one_that_has_a_record_of_it() {
    let (old, announced) = (epoch(3, 5, &["1", "2", "3"]), epoch(7, 0, &["1", "2", "3"]));
    let found =
        among(Quorum::Majority, &Authority::Silent, [knows(&announced), knows(&old), knows(&announced)]);
    assert_eq!((&found.choice, &found.epoch), (&Choice::Guess("2".into()), &None));
    assert!((0..3).all(|n| unsure(&found, n).contains("begin anew")), "{found:?}");
    // Nothing was ever answered by it alone.
    let new = among(Quorum::Majority, &Authority::Silent, [knows(&announced), knows(&announced), lost()]);
    assert_eq!(new.choice, sure(&["1", "2"]));
}
