use super::*;

#[test]
fn a_flush_waits_for_a_sync_that_began_after_it() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let first = r.send(conn, request(OpCode::Flush, 0, 0, 1));
    assert_eq!(r.syncs(), 1);
    let late = [r.send(conn, request(OpCode::Flush, 0, 0, 1)), r.send(conn, request(OpCode::Flush, 0, 0, 1))];
    assert_eq!(r.syncs(), 1, "one at a time");
    r.synced();
    assert_eq!(r.status(first), Some(Status::Ok));
    assert!(late.iter().all(|l| r.status(*l).is_none()), "the first sync began before them");
    assert_eq!(r.syncs(), 2, "one for both");
    r.synced();
    assert!(late.iter().all(|l| r.status(*l) == Some(Status::Ok)));
    assert_eq!(r.syncs(), 2);
}

#[test]
fn a_fua_write_is_answered_after_a_sync_that_began_after_it_was_written() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let flush = r.send(conn, request(OpCode::Flush, 0, 0, 1));
    let write = r.send(conn, fua(0, 1));
    r.persist_all();
    r.done(write);
    r.synced();
    assert_eq!(r.status(flush), Some(Status::Ok));
    assert_eq!(r.status(write), None);
    r.synced();
    assert_eq!(r.status(write), Some(Status::Ok));
}

#[test]
fn a_failed_sync_fails_the_replica_for_good() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let running = r.send(conn, write(0, 1));
    r.persist_all();
    let marking = r.send(conn, write(CHUNK, 1));
    let flush = r.send(conn, request(OpCode::Flush, 0, 0, 1));
    let next = r.send(conn, request(OpCode::Flush, 0, 0, 1));
    r.apply(Input::Synced { result: Err(Failure::Io) });
    for id in [marking, flush, next] {
        assert_eq!(r.status(id), Some(Status::Io));
    }
    assert_eq!(r.syncs(), 1, "never tried again");
    r.done(running);
    assert_eq!(r.status(running), Some(Status::Io));
    for op in [OpCode::Read, OpCode::Flush, OpCode::Ping] {
        let id = r.send(conn, request(op, 0, 4096, 1));
        assert_eq!(r.status(id), Some(Status::Io), "{op:?}");
    }
    assert!(r.core.is_failed());
    let next = r.knock(hello(2, 2));
    assert_eq!(r.verdict(next), Some(Verdict::Unusable));
}

#[test]
fn the_sync_of_a_dead_session_serves_nobody_and_is_not_waited_for() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let flush = r.send(conn, request(OpCode::Flush, 0, 0, 1));
    r.apply(Input::Closed { conn });
    assert!(r.is_dropped(flush));
    let next = r.knock(hello(1, 2));
    assert!(r.welcomed(next));
    let flush = r.send(next, request(OpCode::Flush, 0, 0, 1));
    r.synced();
    assert_eq!(r.status(flush), None, "that sync began before the flush");
    r.synced();
    assert_eq!(r.status(flush), Some(Status::Ok));
}

#[test]
fn what_the_store_wants_synced_is_answered_like_fua() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let put = r.send(conn, Header { payload: 4097, aux: 1, ..request(OpCode::PutLayer, 0, 4096, 1) });
    let result = Ok(Completed { aux: 1, sync: true, ..Completed::default() });
    r.apply(Input::Done { request: put, result });
    assert_eq!((r.status(put), r.syncs()), (None, 1));
    r.synced();
    let aux = r.out.iter().find_map(|o| match o {
        Output::Reply { header, .. } => Some(header.aux),
        _ => None,
    });
    assert_eq!(aux, Some(1));
}

#[test]
fn a_broken_store_fails_the_replica_for_good() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    r.apply(Input::Broken);
    let ping = r.send(conn, request(OpCode::Ping, 0, 0, 1));
    assert_eq!(r.status(ping), Some(Status::Io));
}
