use super::*;
use lh_block::Epoch;
use lh_wire::ChainOp;

fn snapshot() -> ChainOp {
    ChainOp::Snapshot {
        name: "s1".into(),
        user_created: true,
        created: String::new(),
        labels: Default::default(),
    }
}

fn prepared(id: u128) -> Rig {
    Rig::new(Facts { prepared: Some((Instance(id), snapshot())), ..facts() })
}

#[test]
fn they_run_one_at_a_time_in_their_order() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let a = r.control(conn, 1, Control::Settled { snapshot: "a".into() });
    let b = r.control(conn, 1, Control::State);
    assert_eq!(r.records().len(), 1);
    assert!(!r.out.iter().any(|o| matches!(o, Output::Describe { .. })));
    r.persist_all();
    assert_eq!(r.status(a), Some(Status::Ok));
    assert!(r.out.iter().any(|o| matches!(o, Output::Describe { request } if *request == b)));
}

#[test]
fn an_epoch_of_lower_order_is_refused() {
    let epoch = |attachment, counter, id| Epoch {
        generation: generation(attachment),
        counter,
        members: vec!["a".into()],
        id: Instance(id),
        after: None,
        round: None,
    };
    let mut r = Rig::new(Facts { epoch: Some(epoch(3, 2, 1)), ..facts() });
    let conn = r.open(5, 1);
    for (wrong, why) in [
        (epoch(2, 9, 2), "older generation"),
        (epoch(3, 1, 2), "lower counter"),
        (epoch(3, 2, 2), "another of the same order"),
        (epoch(6, 1, 2), "younger than its engine"),
    ] {
        let id = r.control(conn, 5, Control::SetEpoch { epoch: wrong, out: Vec::new() });
        assert_eq!(r.status(id), Some(Status::Refused), "{why}");
    }
    let same = r.control(conn, 5, Control::SetEpoch { epoch: epoch(3, 2, 1), out: Vec::new() });
    assert_eq!(r.status(same), Some(Status::Ok));
    let counts = lh_block::Epoch { after: Some((generation(3), 2)), ..epoch(3, 2, 1) };
    let counted = r.control(conn, 5, Control::SetEpoch { epoch: counts.clone(), out: Vec::new() });
    assert_eq!(r.status(counted), None, "that it counts is news, and not durable yet");
    r.persist_all();
    assert_eq!(r.status(counted), Some(Status::Ok));
    assert_eq!(r.core.epoch.as_ref().and_then(|e| e.after), counts.after);
    let again = r.control(conn, 5, Control::SetEpoch { epoch: epoch(3, 2, 1), out: Vec::new() });
    assert_eq!(r.status(again), Some(Status::Ok), "less is known, and nothing is recorded");
    let round = |n| lh_block::Epoch { round: Some(lh_block::Round(n)), ..counts.clone() };
    let later = r.control(conn, 5, Control::SetEpoch { epoch: round(4), out: Vec::new() });
    assert_eq!(r.status(later), None, "a later round of the same epoch is news, too");
    r.persist_all();
    assert_eq!(r.status(later), Some(Status::Ok));
    assert_eq!(r.core.epoch.as_ref().and_then(|e| e.round), round(4).round);
    let again = r.control(conn, 5, Control::SetEpoch { epoch: round(4), out: Vec::new() });
    assert_eq!(r.status(again), Some(Status::Ok));
    let next = r.control(conn, 5, Control::SetEpoch { epoch: epoch(5, 1, 3), out: Vec::new() });
    assert_eq!(r.status(next), None, "not durable yet");
    r.persist_all();
    assert_eq!(r.status(next), Some(Status::Ok));
}

#[test]
fn a_snapshot_switches_only_while_no_write_is_in_flight() {
    let mut r = prepared(9);
    let conn = r.open(1, 1);
    let write1 = r.send(conn, write(0, 1));
    let commit = r.control(conn, 1, Control::Commit { id: Instance(9) });
    assert_eq!(r.status(commit), Some(Status::Refused));
    r.persist_all();
    r.done(write1);
    let commit = r.control(conn, 1, Control::Commit { id: Instance(9) });
    assert_eq!(r.records(), [&Record::Commit { id: Instance(9) }]);
    let during = r.send(conn, write(4096, 1));
    let flush = r.send(conn, request(OpCode::Flush, 0, 0, 1));
    assert!(!r.in_store(during), "which head it would reach is not certain");
    assert_eq!(r.syncs(), 0, "a sync must cover the former head");
    r.persist_all();
    assert!(r.in_store(during), "writes go on before the sync");
    assert_eq!(r.status(commit), None);
    assert_eq!(r.syncs(), 1);
    r.synced();
    assert_eq!(r.status(commit), Some(Status::Ok));
    assert_eq!(r.status(flush), Some(Status::Ok));
    let again = r.control(conn, 1, Control::Commit { id: Instance(9) });
    assert!(r.records().is_empty(), "twice is once");
    r.synced();
    assert_eq!(r.status(again), Some(Status::Ok));
}

#[test]
fn a_switch_is_answered_before_the_sync_that_a_commit_waits_for() {
    let mut r = prepared(9);
    let conn = r.open(1, 1);
    let switch = r.control(conn, 1, Control::Switch { id: Instance(9) });
    assert_eq!(r.status(switch), None);
    r.persist_all();
    assert_eq!((r.status(switch), r.syncs()), (Some(Status::Ok), 0));
    let again = r.control(conn, 1, Control::Switch { id: Instance(9) });
    assert_eq!(r.status(again), Some(Status::Ok), "twice is once");
    let commit = r.control(conn, 1, Control::Commit { id: Instance(9) });
    assert_eq!(r.status(commit), None);
    r.synced();
    assert_eq!(r.status(commit), Some(Status::Ok));
}

#[test]
fn a_commit_whose_engine_died_is_found_done_and_synced_by_the_next() {
    let mut r = prepared(9);
    let conn = r.open(1, 1);
    let commit = r.control(conn, 1, Control::Commit { id: Instance(9) });
    let (id, _) = r.take_persist().unwrap();
    let young = r.knock(hello(2, 2));
    r.persist_all();
    assert!(!r.welcomed(young), "the switch is not done");
    r.apply(Input::Persisted { id, result: Ok(()) });
    assert!(r.is_dropped(commit) && r.welcomed(young));
    let commit = r.control(young, 2, Control::Commit { id: Instance(9) });
    assert_eq!(r.status(commit), None);
    r.synced();
    assert_eq!(r.status(commit), Some(Status::Ok));
}

#[test]
fn prepare_commit_abort() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let unknown = r.control(conn, 1, Control::Commit { id: Instance(1) });
    assert_eq!(r.status(unknown), Some(Status::Refused));
    let prepare = r.control(conn, 1, Control::Prepare { id: Instance(1), op: snapshot() });
    r.persist_all();
    assert_eq!(r.status(prepare), Some(Status::Ok));
    let again = r.control(conn, 1, Control::Prepare { id: Instance(1), op: snapshot() });
    assert_eq!(r.status(again), Some(Status::Ok));
    let other = r.control(conn, 1, Control::Prepare { id: Instance(2), op: snapshot() });
    assert_eq!(r.status(other), Some(Status::Refused));
    let abort = r.control(conn, 1, Control::Abort { id: Instance(1) });
    assert_eq!(r.records(), [&Record::Abort { id: Instance(1) }]);
    r.persist_all();
    assert_eq!(r.status(abort), Some(Status::Ok));
    let twice = r.control(conn, 1, Control::Abort { id: Instance(1) });
    assert_eq!(r.status(twice), Some(Status::Ok));
    r.control(conn, 1, Control::Prepare { id: Instance(3), op: snapshot() });
    r.persist_all();
    r.control(conn, 1, Control::Commit { id: Instance(3) });
    r.persist_all();
    r.synced();
    for late in [Control::Abort { id: Instance(3) }, Control::Prepare { id: Instance(3), op: snapshot() }] {
        let id = r.control(conn, 1, late);
        assert_eq!(r.status(id), Some(Status::Refused));
    }
}

#[test]
fn a_refused_record_is_the_answer() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let prepare = r.control(conn, 1, Control::Prepare { id: Instance(1), op: snapshot() });
    let (id, _) = r.take_persist().unwrap();
    r.apply(Input::Persisted { id, result: Err(Failure::Refused("too many snapshots".into())) });
    assert_eq!(r.reply(prepare), Some((Status::Refused, Body::Text("too many snapshots".into()))));
    let commit = r.control(conn, 1, Control::Commit { id: Instance(1) });
    assert_eq!(r.status(commit), Some(Status::Refused));
}

#[test]
fn a_removal_mark_needs_no_pause() {
    let op = ChainOp::MarkRemoved { name: "s1".into() };
    let mut r = Rig::new(Facts { prepared: Some((Instance(4), op)), ..facts() });
    let conn = r.open(1, 1);
    r.send(conn, write(0, 1));
    r.persist_all();
    r.control(conn, 1, Control::Commit { id: Instance(4) });
    assert_eq!(r.records(), [&Record::Commit { id: Instance(4) }]);
    let read = r.send(conn, request(OpCode::Read, 0, 4096, 1));
    assert!(r.in_store(read));
}

#[test]
fn a_rebuild_begins_when_nothing_is_in_flight_and_ends_with_a_sync() {
    let mut r = Rig::new(Facts { clean: false, ..facts() });
    let conn = r.open(1, 1);
    let begin = || Control::RebuildBegin { size: 2 * SIZE, chain: Vec::new(), keep: None };
    let read = r.send(conn, request(OpCode::Read, 0, 4096, 1));
    let refused = r.control(conn, 1, begin());
    assert_eq!(r.status(refused), Some(Status::Refused));
    r.done(read);
    r.send(conn, request(OpCode::Flush, 0, 0, 1));
    let begun = r.control(conn, 1, begin());
    assert!(r.records().is_empty(), "not beside a sync");
    r.synced();
    assert_eq!(r.records().len(), 1);
    r.persist_all();
    assert_eq!(r.status(begun), Some(Status::Ok));
    assert_eq!(r.core.size(), 2 * SIZE);
    let grown = r.send(conn, write(2 * SIZE - 4096, 1));
    r.persist_all();
    assert!(r.in_store(grown));
    let end = r.control(conn, 1, Control::RebuildEnd);
    assert!(r.records().is_empty(), "synced first");
    r.synced();
    assert_eq!(r.records(), [&Record::RebuildEnd]);
    r.persist_all();
    assert_eq!(r.status(end), Some(Status::Ok));
    let id = r.control(conn, 1, Control::State);
    assert!(r.describe(id).lived);
}

/// Until then the directory keeps nothing for those who are out, and the machine saves nothing.
#[test]
fn an_epoch_counts_from_the_end_of_the_rebuild_on() {
    let mut r = Rig::new(Facts { clean: false, ..facts() });
    let conn = r.open(1, 1);
    let epoch = |counter, members: &[&str]| lh_block::Epoch {
        generation: r.core.generation(),
        counter,
        members: members.iter().map(|m| (*m).to_owned()).collect(),
        id: Instance(counter.into()),
        after: None,
        round: None,
    };
    let (first, with_u, second) = (epoch(1, &["t", "u"]), epoch(2, &["t", "u"]), epoch(3, &["t"]));
    let set = |epoch: &lh_block::Epoch, out: &[&str]| Control::SetEpoch {
        epoch: epoch.clone(),
        out: out.iter().map(|m| (*m).to_owned()).collect(),
    };
    r.control(conn, 1, set(&first, &[]));
    r.persist_all();
    r.control(conn, 1, Control::RebuildBegin { size: SIZE, chain: Vec::new(), keep: None });
    r.synced();
    r.persist_all();
    for (epoch, out) in [(&with_u, &[][..]), (&second, &["u"][..])] {
        let recorded = r.control(conn, 1, set(epoch, out));
        r.persist_all();
        assert_eq!(r.status(recorded), Some(Status::Ok));
    }
    assert_eq!((r.core.epoch.as_ref(), r.core.missed.out().len()), (Some(&first), 0));
    let older = r.control(conn, 1, set(&with_u, &[]));
    assert_eq!(r.status(older), Some(Status::Refused));
    r.control(conn, 1, Control::RebuildEnd);
    r.synced();
    r.persist_all();
    assert_eq!(r.core.epoch, Some(second));
}

/// An engine asks where blocks are for reads of later, and does not pause that: the question may come in one receive with what
/// follows a pause, and be on its way still.
#[test]
fn a_question_for_places_holds_up_no_revert_no_close_and_no_rebuild() {
    let places = || request(OpCode::Places, 0, 4096, 1);
    let revert = ChainOp::Revert { name: "s1".into(), created: String::new() };
    let mut r = Rig::new(Facts { prepared: Some((Instance(7), revert)), ..facts() });
    let conn = r.open(1, 1);
    let asked = r.send(conn, places());
    assert!(r.in_store(asked));
    let reverted = r.control(conn, 1, Control::Commit { id: Instance(7) });
    assert_eq!(r.records(), [&Record::Commit { id: Instance(7) }]);
    let held = r.send(conn, places());
    assert!(!r.in_store(held), "the layers are being changed");
    r.done(asked);
    r.persist_all();
    r.synced();
    assert_eq!(r.status(reverted), Some(Status::Ok));
    assert!(r.in_store(held));

    let close = r.control(conn, 1, Control::Close);
    r.synced();
    assert_eq!(r.records(), [&Record::Close]);
    r.persist_all();
    assert_eq!(r.status(close), Some(Status::Ok));
    r.done(held);

    let mut r = Rig::new(Facts { clean: false, ..facts() });
    let conn = r.open(1, 1);
    r.send(conn, places());
    r.control(conn, 1, Control::RebuildBegin { size: SIZE, chain: Vec::new(), keep: None });
    assert!(matches!(r.records()[..], [Record::RebuildBegin { .. }]));
}

#[test]
fn closed_cleanly_and_opened_again_by_the_next_session() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let busy = r.send(conn, write(0, 1));
    r.persist_all();
    let refused = r.control(conn, 1, Control::Close);
    assert_eq!(r.status(refused), Some(Status::Refused));
    r.done(busy);
    let close = r.control(conn, 1, Control::Close);
    r.synced();
    assert_eq!(r.records(), [&Record::Close]);
    r.persist_all();
    assert_eq!(r.status(close), Some(Status::Ok));
    assert!(r.core.is_closed());
    let late = r.send(conn, write(0, 1));
    assert_eq!(r.status(late), Some(Status::Refused));
    r.apply(Input::Closed { conn });
    let next = r.knock(hello(2, 2));
    assert_eq!(r.records()[0], &Record::Begin { generation: generation(2) });
    r.persist_all();
    assert!(r.welcomed(next));
    let id = r.control(next, 2, Control::State);
    let state = r.describe(id);
    assert!(state.clean && state.lived && state.in_doubt.is_empty() && state.intent.is_empty());
    let marked = r.send(next, write(0, 2));
    assert!(!r.in_store(marked), "closing took all marks back");
}

/// The disk was full: the marks may be gone all the same, and volume.meta may say that nobody writes.
#[test]
fn what_could_not_be_closed_is_opened_anew() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let before = r.send(conn, write(0, 1));
    r.persist_all();
    r.done(before);
    let close = r.control(conn, 1, Control::Close);
    r.synced();
    let (id, record) = r.take_persist().unwrap();
    assert_eq!(record, Record::Close);
    r.apply(Input::Persisted { id, result: Err(Failure::NoSpace) });
    assert_eq!(r.status(close), Some(Status::NoSpace));
    let late = r.send(conn, write(0, 1));
    assert_eq!(r.status(late), Some(Status::Refused));
    let next = r.knock(hello(2, 2));
    assert_eq!(r.records()[0], &Record::Begin { generation: generation(2) });
    r.persist_all();
    assert!(r.welcomed(next));
    let id = r.control(next, 2, Control::State);
    assert!(!r.describe(id).clean);
    let marked = r.send(next, write(0, 2));
    assert!(!r.in_store(marked), "its mark is not on stable storage");
    r.persist_all();
    assert!(r.in_store(marked));
}

#[test]
fn a_write_behind_the_last_sync_keeps_the_directory_open() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let close = r.control(conn, 1, Control::Close);
    let late = r.send(conn, write(0, 1));
    r.persist_all();
    r.done(late);
    r.synced();
    assert_eq!(r.status(close), Some(Status::Refused));
    assert!(r.records().is_empty());
}

#[test]
fn a_session_that_comes_while_the_directory_is_being_closed_opens_it_again() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    r.control(conn, 1, Control::Close);
    r.synced();
    let (close, _) = r.take_persist().unwrap();
    let next = r.knock(hello(2, 2));
    assert!(r.records().is_empty(), "no fence into a directory that is being closed");
    r.apply(Input::Persisted { id: close, result: Ok(()) });
    let (id, record) = r.take_persist().unwrap();
    assert_eq!(record, Record::Begin { generation: generation(2) });
    r.apply(Input::Persisted { id, result: Err(Failure::NoSpace) });
    assert_eq!(r.verdict(next), Some(Verdict::Unusable));
}

#[test]
fn no_rebuild_begins_and_nothing_is_closed_beside_a_record_of_the_bitmap() {
    for control in [Control::RebuildBegin { size: SIZE, chain: Vec::new(), keep: None }, Control::Close] {
        let mut r = Rig::new(facts());
        let conn = r.open(1, 1);
        let write = r.send(conn, write(0, 1));
        r.persist_all();
        r.done(write);
        r.send(conn, request(OpCode::ClearIntent, 0, 4 << 20, 1));
        r.now = r.core.wake_at().unwrap();
        r.apply(Input::Tick);
        let (clear, _) = r.take_persist().unwrap();
        r.control(conn, 1, control);
        r.synced();
        assert!(r.records().is_empty());
        r.apply(Input::Persisted { id: clear, result: Ok(()) });
        assert_eq!(r.records().len(), 1);
    }
}

/// The directory writes the bitmap anew, and marks that are on their way would be lost.
#[test]
fn nothing_is_expanded_beside_a_write_or_a_record_of_the_bitmap() {
    let (id, size) = (Instance(9), 2 * SIZE);
    let op = ChainOp::Expand { name: None, size, created: String::new() };
    let mut r = Rig::new(Facts { prepared: Some((id, op)), ..facts() });
    let conn = r.open(1, 1);
    let write1 = r.send(conn, write(0, 1));
    let switch = r.control(conn, 1, Control::Switch { id });
    assert_eq!(r.status(switch), Some(Status::Refused));
    r.persist_all();
    r.done(write1);
    r.send(conn, request(OpCode::ClearIntent, 0, 4 << 20, 1));
    r.now = r.core.wake_at().unwrap();
    r.apply(Input::Tick);
    let (clear, _) = r.take_persist().unwrap();
    let switch = r.control(conn, 1, Control::Switch { id });
    assert!(r.records().is_empty());
    r.apply(Input::Persisted { id: clear, result: Ok(()) });
    assert_eq!(r.records(), [&Record::Commit { id }]);
    r.persist_all();
    assert_eq!(r.status(switch), Some(Status::Ok));
    let behind = r.send(conn, write(size - 4096, 1));
    r.persist_all();
    assert!(r.in_store(behind));
}
