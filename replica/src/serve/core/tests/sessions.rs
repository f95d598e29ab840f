use super::*;
use crate::serve::core::{CloseReason, IN_FLIGHT_MAX};

#[test]
fn the_first_engine_is_let_in_when_its_fence_is_durable() {
    let mut r = Rig::new(facts());
    let conn = r.knock(hello(1, 1));
    assert!(!r.welcomed(conn));
    assert_eq!(
        r.records(),
        [
            &Record::Begin { generation: generation(1) },
            &Record::Fence { generation: generation(1), instance: Instance(1) }
        ]
    );
    let (begin, _) = r.take_persist().unwrap();
    let (fence, _) = r.take_persist().unwrap();
    r.apply(Input::Persisted { id: fence, result: Ok(()) });
    assert!(!r.welcomed(conn));
    r.apply(Input::Persisted { id: begin, result: Ok(()) });
    assert!(r.welcomed(conn));
}

#[test]
fn older_generations_are_stale_also_after_a_restart() {
    let fence = Some((generation(5), Instance(5)));
    let mut r = Rig::new(Facts { fence, ..facts() });
    let old = r.knock(hello(4, 1));
    assert_eq!(r.verdict(old), Some(Verdict::Stale));
    let equal = r.knock(SessionHello { instance: Instance(99), ..hello(5, 2) });
    assert_eq!(r.verdict(equal), Some(Verdict::Stale));
    // The same engine comes back without a new fence.
    let same = r.knock(hello(5, 3));
    assert_eq!(r.records(), [&Record::Begin { generation: generation(5) }]);
    r.persist_all();
    assert!(r.welcomed(same));
}

#[test]
fn a_message_of_another_generation_is_stale() {
    let mut r = Rig::new(facts());
    let conn = r.open(2, 1);
    let read = r.send(conn, request(OpCode::Read, 0, 4096, 1));
    assert_eq!(r.status(read), Some(Status::Stale));
    assert!(!r.in_store(read));
}

#[test]
fn a_fence_is_a_drain() {
    let mut r = Rig::new(facts());
    let old = r.open(1, 1);
    let running = r.send(old, write(0, 1));
    r.persist_all();
    assert!(r.in_store(running));
    let waiting = r.send(old, write(CHUNK, 1));
    assert!(!r.in_store(waiting), "its chunk is not marked yet");
    let young = r.knock(hello(2, 2));
    assert!(r.is_closed(old) && r.is_dropped(waiting));
    r.persist_all();
    assert!(!r.welcomed(young), "an old write is still in the store");
    let unread = r.send(old, write(8192, 1));
    assert!(r.is_dropped(unread));
    r.done(running);
    assert!(r.is_dropped(running) && r.welcomed(young));
    assert_eq!(r.status(running), None);
}

#[test]
fn a_new_session_of_the_same_engine_drains_too() {
    let mut r = Rig::new(facts());
    let old = r.open(1, 1);
    let read = r.send(old, request(OpCode::Read, 0, 4096, 1));
    let new = r.knock(hello(1, 2));
    assert!(r.is_closed(old) && !r.welcomed(new));
    r.done(read);
    assert!(r.welcomed(new));
}

#[test]
fn a_control_operation_of_an_old_session_is_drained() {
    let mut r = Rig::new(facts());
    let old = r.open(1, 1);
    let epoch = lh_block::Epoch { generation: generation(1), counter: 1, ..Default::default() };
    let set = r.control(old, 1, Control::SetEpoch { epoch: epoch.clone(), out: Vec::new() });
    let (epoch_id, _) = r.take_persist().unwrap();
    let young = r.knock(hello(2, 2));
    r.persist_all();
    assert!(!r.welcomed(young));
    r.apply(Input::Persisted { id: epoch_id, result: Ok(()) });
    assert!(r.is_dropped(set) && r.welcomed(young));
    // The epoch is in force although nobody was told.
    let lower = r.control(
        young,
        2,
        Control::SetEpoch { epoch: lh_block::Epoch { counter: 0, ..epoch }, out: Vec::new() },
    );
    assert_eq!(r.status(lower), Some(Status::Refused));
}

#[test]
fn while_a_fence_is_on_its_way_a_younger_engine_takes_over() {
    let mut r = Rig::new(facts());
    let first = r.knock(hello(1, 1));
    let (first_id, _) = r.take_record().unwrap();
    let second = r.knock(hello(2, 2));
    assert_eq!(r.verdict(first), Some(Verdict::Stale));
    assert_eq!(r.take_persist(), None, "one fence at a time");
    r.apply(Input::Persisted { id: first_id, result: Ok(()) });
    assert!(!r.welcomed(second));
    r.persist_all();
    assert!(r.welcomed(second));
}

#[test]
fn a_fence_that_cannot_be_made_lets_nobody_in() {
    let mut r = Rig::new(facts());
    let conn = r.knock(hello(1, 1));
    let (id, _) = r.take_record().unwrap();
    r.apply(Input::Persisted { id, result: Err(Failure::NoSpace) });
    assert_eq!(r.verdict(conn), Some(Verdict::Unusable));
    // A full disk is no failure: the next try may succeed.
    r.out.clear();
    r.open(1, 2);
    let conn = r.knock(hello(2, 3));
    let (id, _) = r.take_persist().unwrap();
    r.apply(Input::Persisted { id, result: Err(Failure::Io) });
    assert_eq!(r.verdict(conn), Some(Verdict::Unusable));
    let again = r.knock(hello(3, 4));
    assert_eq!(r.verdict(again), Some(Verdict::Unusable));
    assert!(r.core.is_failed());
}

#[test]
fn a_session_has_one_connection_per_queue_and_ends_as_one() {
    let mut r = Rig::new(facts());
    let two = |queue| SessionHello { queue, queues: 2, ..hello(1, 1) };
    let a = r.knock(two(0));
    r.persist_all();
    let b = r.knock(two(1));
    assert!(r.welcomed(a) && r.welcomed(b));
    let twice = r.knock(two(1));
    assert_eq!(r.verdict(twice), Some(Verdict::Invalid));
    let other_count = r.knock(SessionHello { queue: 2, queues: 3, ..hello(1, 1) });
    assert_eq!(r.verdict(other_count), Some(Verdict::Invalid));
    assert!(!r.is_closed(a) && !r.is_closed(b), "bad numbers harm nobody else");
    r.apply(Input::Closed { conn: a });
    assert!(r.is_closed(b));
    // A late connection of a session that is over does not begin it anew.
    let late = r.knock(two(0));
    assert_eq!(r.verdict(late), Some(Verdict::Invalid));
    r.out.clear();
    r.open(1, 2);
}

#[test]
fn numbers_that_contradict_each_other_are_invalid() {
    let mut r = Rig::new(facts());
    for (queue, queues) in [(0, 0), (1, 1), (0, 257)] {
        let conn = r.knock(SessionHello { queue, queues, ..hello(1, 1) });
        assert_eq!(r.verdict(conn), Some(Verdict::Invalid), "{queue} of {queues}");
    }
    r.open(1, 1);
    let stolen = r.knock(hello(2, 1));
    assert_eq!(r.verdict(stolen), Some(Verdict::Invalid), "another engine under the same session number");
}

#[test]
fn too_many_requests_in_flight_end_the_session() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    for n in 0..IN_FLIGHT_MAX {
        r.send(conn, request(OpCode::Read, u64::from(n) * 4096, 4096, 1));
    }
    assert!(!r.is_closed(conn));
    let over = r.send(conn, request(OpCode::Read, 0, 4096, 1));
    assert!(r.is_dropped(over));
    let closed = r.out.iter().any(|o| matches!(o, Output::Close { reason: CloseReason::TooMany, .. }));
    assert!(closed);
}

#[test]
fn a_message_before_the_welcome_ends_the_session() {
    let mut r = Rig::new(facts());
    let conn = r.knock(hello(1, 1));
    let early = r.send(conn, write(0, 1));
    assert!(r.is_dropped(early) && r.is_closed(conn));
    r.persist_all();
    assert!(!r.welcomed(conn));
}
