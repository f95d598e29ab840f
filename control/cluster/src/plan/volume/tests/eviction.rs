//! Volumes that rest and have a replica on a node that is to be empty: attached for the time of its move, if it has a place.

use super::offline::Resting;
use super::*;
use crate::api::AttachmentTicket;
use crate::plan::rebuild::reserved;

/// It rests, with replicas on n1, n2 and n3, and n4 takes none.
fn without_a_place() -> Resting {
    let mut resting = Resting::new();
    resting.0.settings = Settings::default();
    resting.close(&["n4"]);
    resting.settle();
    resting
}

fn empty(resting: &mut Resting, node: &str) {
    resting.0.cluster.nodes.get_mut(node).unwrap().emptying = Emptying::All;
    resting.settle();
}

fn open(resting: &mut Resting, node: &str) {
    resting.0.cluster.nodes.get_mut(node).unwrap().schedulable = true;
}

fn ticket(resting: &Resting) -> Option<&AttachmentTicket> {
    let tickets = resting.0.attachment.as_ref()?.spec.attachment_tickets.values();
    tickets.into_iter().find(|t| t.kind == TicketType::VolumeEviction)
}

fn condition(resting: &Resting) -> Option<(bool, String)> {
    let status = resting.0.status();
    let condition = status.conditions.get_condition(EVICTION)?;
    Some((condition.is_true(), condition.reason.clone()))
}

#[track_caller]
fn waits_for(resting: &Resting, reason: &str) {
    assert_eq!(condition(resting), Some((false, reason.to_owned())));
    assert_eq!((ticket(resting), resting.0.status().state), (None, VolumeState::Detached));
}

#[track_caller]
fn is_attached_for_it(resting: &Resting) {
    assert_eq!(condition(resting), Some((true, String::new())));
    assert!(ticket(resting).is_some());
}

#[test]
fn a_volume_whose_replica_has_no_place_to_go_to_rests_and_says_so() {
    let mut resting = without_a_place();
    empty(&mut resting, "n2");
    waits_for(&resting, "NoPlace");
    let status = resting.0.status();
    let said = &status.conditions.get_condition(EVICTION).unwrap().message;
    assert!(said.contains("no disk can take a replica"), "{said}");
    resting.pass(3600);
    waits_for(&resting, "NoPlace");
    assert_eq!(resting.0.starts, 1, "no engine starts for it");

    resting.0.rebuilds_end = false;
    open(&mut resting, "n4");
    resting.pass(60);
    is_attached_for_it(&resting);
    let asked = ticket(&resting).unwrap();
    assert!(asked.node_id != "n2" && asked.parameters[FILLS_ON] == "n4", "{asked:?}");
    assert_eq!(reserved(resting.0.attachment.as_ref()).values().collect::<Vec<_>>(), [&"n4"]);
    resting.pass(7200);
    is_attached_for_it(&resting);
    assert_eq!(resting.0.nodes(), ["n1", "n2", "n3", "n4"], "it is being filled, however long that takes");
    resting.0.rebuilds_end = true;
    resting.pass(1);
    assert_eq!(resting.0.nodes(), ["n1", "n3", "n4"]);
    assert_eq!((condition(&resting), ticket(&resting)), (None, None));
    assert_eq!(resting.0.status().state, VolumeState::Detached);
}

#[test]
fn whoever_takes_the_place_or_the_turn_meanwhile_has_the_volume_let_go_or_never_attached() {
    let mut resting = without_a_place();
    open(&mut resting, "n4");
    resting.0.filling = [("n4".into(), 5)].into();
    empty(&mut resting, "n2");
    waits_for(&resting, "Turn");
    resting.0.settings = Settings::of([("concurrent-replica-rebuild-per-node-limit", "0")]);
    resting.settle();
    waits_for(&resting, "NotAllowed");

    // Asked for, and before it is attached its place is gone.
    let mut late = without_a_place();
    open(&mut late, "n4");
    late.0.cluster.nodes.get_mut("n2").unwrap().emptying = Emptying::All;
    for action in late.0.plan() {
        late.0.carry_out(action);
    }
    is_attached_for_it(&late);
    late.close(&["n4"]);
    late.settle();
    is_attached_for_it(&late);
    assert_eq!(late.0.status().state, VolumeState::Attached);
    late.pass(59);
    is_attached_for_it(&late);
    late.pass(1);
    waits_for(&late, "GaveUp");
    assert!(late.0.told.contains(&"EvictionFailed"), "{:?}", late.0.told);
    late.pass(599);
    waits_for(&late, "GaveUp");
    late.pass(1);
    waits_for(&late, "NoPlace");
    open(&mut late, "n4");
    late.pass(60);
    assert_eq!((late.0.nodes(), condition(&late)), (vec!["n1", "n3", "n4"], None));
}

/// It rests, n1 is emptied, and n4, the only place for what takes over, was lost while it was being filled.
fn interrupted() -> Resting {
    let mut resting = without_a_place();
    open(&mut resting, "n4");
    resting.0.rebuilds_end = false;
    empty(&mut resting, "n1");
    is_attached_for_it(&resting);
    assert_eq!(resting.0.nodes(), ["n1", "n2", "n3", "n4"]);
    resting.0.up.remove("n4");
    resting.settle();
    resting.pass(60);
    waits_for(&resting, "GaveUp");
    let half = &resting.0.replicas[&resting.0.replica_on("n4")].spec;
    assert!(!half.failed_at.is_empty() && half.healthy_at.is_empty(), "{half:?}");
    resting
}

#[test]
fn a_move_that_was_interrupted_goes_on_where_it_was_begun() {
    let mut resting = interrupted();
    resting.pass(600);
    waits_for(&resting, "NoPlace");
    resting.0.up.insert("n4".into());
    let broken = |resting: &mut Resting, is: bool| {
        resting.0.cluster.nodes.get_mut("n4").unwrap().disks.get_mut("n4-d").unwrap().broken = is;
    };
    broken(&mut resting, true);
    resting.pass(60);
    waits_for(&resting, "NoPlace");
    broken(&mut resting, false);
    resting.0.filling = [("n4".into(), 5)].into();
    resting.pass(60);
    waits_for(&resting, "Turn");
    resting.0.filling.clear();
    resting.0.rebuilds_end = true;
    resting.pass(15);
    assert_eq!((resting.0.nodes(), condition(&resting)), (vec!["n2", "n3", "n4"], None));
    assert_eq!(resting.0.status().state, VolumeState::Detached);

    let mut soon = interrupted();
    soon.0.up.insert("n4".into());
    soon.0.rebuilds_end = true;
    soon.pass(599);
    waits_for(&soon, "GaveUp");
    soon.pass(1);
    assert_eq!((soon.0.nodes(), condition(&soon)), (vec!["n2", "n3", "n4"], None));
}

/// A disk that takes no replica would have an engine start for it for ever.
#[test]
fn a_volume_whose_successor_is_never_filled_is_attached_later_and_later() {
    let mut resting = without_a_place();
    open(&mut resting, "n4");
    resting.0.rebuilds_end = false;
    empty(&mut resting, "n1");
    is_attached_for_it(&resting);
    let (starts, mut tried) = (resting.0.starts, Vec::new());
    for minute in 0..24 * 60 {
        let there = resting.0.replicas.iter().filter(|(_, r)| r.spec.node_id == "n4");
        resting.0.cut_off = there.map(|(name, _)| name.clone()).collect();
        resting.pass(60);
        tried.resize(resting.0.starts - starts, minute);
    }
    let pauses: Vec<i32> = tried.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.iter().zip(&pauses[1..]).all(|(one, next)| next >= one), "{pauses:?}");
    assert!((7..=12).contains(&tried.len()) && pauses.iter().all(|pause| *pause <= 245), "{tried:?}");
    let status = resting.0.status();
    let condition = status.conditions.get_condition(EVICTION).unwrap();
    assert_eq!(condition.reason, "GaveUp");
    let attempt = format!("(attempt {}; the next one is at 2023-11-15T", tried.len() + 1);
    assert!(condition.message.contains(&attempt), "{}", condition.message);

    // Who asks for it anew has it tried at once.
    resting.0.cluster.nodes.get_mut("n1").unwrap().emptying = Emptying::No;
    resting.settle();
    assert_eq!((self::condition(&resting), resting.0.status().eviction_attempts), (None, 0));
    empty(&mut resting, "n1");
    is_attached_for_it(&resting);
    resting.0.cut_off.clear();
    resting.0.rebuilds_end = true;
    resting.pass(60);
    assert_eq!((resting.0.nodes(), self::condition(&resting)), (vec!["n2", "n3", "n4"], None));
}

#[test]
fn one_that_cannot_be_attached_is_let_go_and_tried_again_later() {
    let mut resting = without_a_place();
    open(&mut resting, "n4");
    resting.0.absent = resting.0.replicas.keys().cloned().collect();
    empty(&mut resting, "n2");
    is_attached_for_it(&resting);
    resting.pass(299);
    is_attached_for_it(&resting);
    resting.pass(1);
    waits_for(&resting, "GaveUp");
    resting.pass(599);
    waits_for(&resting, "GaveUp");
    resting.pass(1);
    is_attached_for_it(&resting);
    // The wish is taken back.
    resting.0.cluster.nodes.get_mut("n2").unwrap().emptying = Emptying::No;
    resting.settle();
    assert_eq!((condition(&resting), ticket(&resting)), (None, None));
}

#[test]
fn a_volume_that_somebody_uses_moves_its_replicas_without_a_ticket_or_beside_it() {
    let mut resting = without_a_place();
    resting.wanted("n1");
    empty(&mut resting, "n2");
    resting.pass(3600);
    assert_eq!((condition(&resting), ticket(&resting)), (None, None));
    resting.wanted("");
    waits_for(&resting, "NoPlace");

    open(&mut resting, "n4");
    resting.0.rebuilds_end = false;
    resting.pass(60);
    is_attached_for_it(&resting);
    resting.wanted("n1");
    assert_eq!(condition(&resting), Some((false, "InUse".to_owned())));
    assert!(ticket(&resting).is_some());
    resting.pass(7200);
    resting.wanted("");
    is_attached_for_it(&resting);
    resting.0.rebuilds_end = true;
    resting.pass(1);
    assert_eq!((resting.0.nodes(), condition(&resting)), (vec!["n1", "n3", "n4"], None));
}

#[test]
fn a_strict_local_volume_is_not_attached_for_what_cannot_be() {
    let mut resting = Resting::new();
    resting.0.settings = Settings::default();
    let spec = &mut resting.0.volume_mut().spec;
    (spec.data_locality, spec.number_of_replicas) = (DataLocality::StrictLocal, 1);
    let others: Vec<String> = ["n2", "n3"].map(|node| resting.0.replica_on(node)).into();
    resting.0.replicas.retain(|name, _| !others.contains(name));
    empty(&mut resting, "n1");
    waits_for(&resting, "StrictLocal");
    resting.0.volume_mut().spec.data_locality = DataLocality::Disabled;
    resting.settle();
    assert!(!resting.0.nodes().contains(&"n1"), "{:?}", resting.0.nodes());
}
