use super::*;

fn whole(n: u64) -> Extent {
    Extent::new(n * CHUNK, CHUNK)
}

fn state(r: &mut Rig, conn: ConnId, n: u32) -> Box<ReplicaState> {
    let id = r.control(conn, n, Control::State);
    r.describe(id)
}

#[test]
fn the_first_write_into_a_chunk_waits_for_its_mark() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let a = r.send(conn, write(0, 1));
    let b = r.send(conn, write(4096, 1));
    let c = r.send(conn, write(2 * CHUNK, 1));
    assert!(!r.in_store(a) && !r.in_store(b) && !r.in_store(c));
    assert_eq!(r.records(), [&Record::Intent { mark: vec![0], clear: vec![] }]);
    let (id, _) = r.take_persist().unwrap();
    r.apply(Input::Persisted { id, result: Ok(()) });
    assert!(r.in_store(a) && r.in_store(b) && !r.in_store(c));
    assert_eq!(r.records(), [&Record::Intent { mark: vec![2], clear: vec![] }]);
    r.persist_all();
    assert!(r.in_store(c));
    let again = r.send(conn, write(2 * CHUNK + 4096, 1));
    assert!(r.in_store(again) && r.records().is_empty());
}

#[test]
fn reads_need_no_mark() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let read = r.send(conn, request(OpCode::Read, 0, 4096, 1));
    assert!(r.in_store(read) && r.records().is_empty());
    let result = Ok(Completed { payload: 4096, ..Completed::default() });
    r.apply(Input::Done { request: read, result });
    assert_eq!(r.reply(read), Some((Status::Ok, Body::Data)));
}

#[test]
fn a_full_disk_is_an_answer_and_no_failure() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let marking = r.send(conn, write(0, 1));
    let (id, _) = r.take_persist().unwrap();
    r.apply(Input::Persisted { id, result: Err(Failure::NoSpace) });
    assert_eq!(r.status(marking), Some(Status::NoSpace));
    let (begun, write) = (r.send(conn, write(4096, 1)), r.send(conn, write(0, 1)));
    r.persist_all();
    r.apply(Input::Done { request: write, result: Err(Failure::NoSpace) });
    assert_eq!(r.status(write), Some(Status::NoSpace));
    assert_eq!(r.aux(write), 0, "nothing was changed");
    r.apply(Input::Done { request: begun, result: Err(Failure::FullInPart) });
    assert_eq!((r.status(begun), r.aux(begun)), (Some(Status::NoSpace), lh_wire::IN_PART));
    assert!(!r.core.is_failed());
    let ping = r.send(conn, request(OpCode::Ping, 0, 0, 1));
    assert_eq!(r.status(ping), Some(Status::Ok));
}

#[test]
fn a_clear_spares_the_chunks_that_are_being_written() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let (a, b) = (r.send(conn, write(0, 1)), r.send(conn, write(CHUNK, 1)));
    r.persist_all();
    r.done(a);
    let clear = r.send(conn, request(OpCode::ClearIntent, 0, 2 << 22, 1));
    assert_eq!(r.status(clear), Some(Status::Ok));
    assert_eq!(state(&mut r, conn, 1).intent, [whole(1)]);
    r.now = r.core.wake_at().unwrap();
    r.apply(Input::Tick);
    assert_eq!(r.records(), [&Record::Intent { mark: vec![], clear: vec![0] }]);
    r.done(b);
}

#[test]
fn the_last_chunk_is_cleared_though_the_volume_ends_in_it() {
    let last = Extent::new(CHUNK, 8192);
    let mut r = Rig::new(Facts { size: CHUNK + 8192, intent: vec![last], ..facts() });
    let conn = r.open(1, 1);
    assert_eq!(state(&mut r, conn, 1).intent, [last]);
    let clear = r.send(conn, request(OpCode::ClearIntent, CHUNK, 8192, 1));
    assert_eq!(r.status(clear), Some(Status::Ok));
    assert!(state(&mut r, conn, 1).intent.is_empty());
}

#[test]
fn what_dead_engines_had_in_flight_is_reported_until_it_is_resolved() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let zero = r.send(conn, request(OpCode::WriteZeroes, CHUNK, 8192, 1));
    r.send(conn, write(0, 1));
    r.persist_all();
    r.done(zero);
    r.apply(Input::Closed { conn });
    r.apply(Input::Done { request: RequestId(1), result: Ok(Completed::default()) });
    let conn = r.open(2, 2);
    r.send(conn, request(OpCode::Unmap, 2 * CHUNK, 4096, 2));
    r.apply(Input::Closed { conn });
    let conn = r.open(3, 3);
    let reported = state(&mut r, conn, 3);
    let left = [Extent::new(0, 4096), Extent::new(CHUNK, 8192), Extent::new(2 * CHUNK, 4096)];
    assert_eq!(reported.in_doubt, left);
    assert!(reported.lived);
    assert_eq!(reported.previous_generation, generation(2));
    // Its own writes are in nobody's doubt.
    r.send(conn, write(8 * CHUNK, 3));
    let resolved = r.control(conn, 3, Control::Resolved);
    assert_eq!(r.status(resolved), Some(Status::Ok));
    assert!(state(&mut r, conn, 3).in_doubt.is_empty());
    r.apply(Input::Closed { conn });
    let conn = r.open(4, 4);
    assert_eq!(state(&mut r, conn, 4).in_doubt, [Extent::new(8 * CHUNK, 4096)]);
}

#[test]
fn a_process_that_opened_a_dirty_directory_has_not_lived_until_all_is_resolved() {
    let mut r = Rig::new(Facts { clean: false, intent: vec![whole(3)], ..facts() });
    let conn = r.open(1, 1);
    let found = state(&mut r, conn, 1);
    assert!(!found.lived && !found.clean);
    assert_eq!(found.intent, [whole(3)]);
    assert_eq!(found.intent_chunk, CHUNK);
    r.control(conn, 1, Control::Resolved);
    r.apply(Input::Closed { conn });
    let conn = r.open(2, 2);
    assert!(state(&mut r, conn, 2).lived);
}

/// Whose host lost its power does not hold everything before the engine says that all are equal, and what it says later counts once
/// that is noted.
#[test]
fn who_lost_its_power_holds_everything_again_once_all_is_resolved() {
    for powered in [false, true] {
        let mut r = Rig::new(Facts { clean: false, powered, intent: vec![whole(3)], ..facts() });
        let conn = r.open(1, 1);
        let found = state(&mut r, conn, 1);
        assert_eq!((found.lived, found.powered), (false, powered));
        r.control(conn, 1, Control::Resolved);
        r.control(conn, 1, Control::Resolved);
        let notes = r.records().iter().filter(|record| ***record == Record::Whole).count();
        assert_eq!(notes, usize::from(!powered));
        r.persist_all();
        assert!(r.core.powered && state(&mut r, conn, 1).powered);
    }
}

#[test]
fn clean_until_the_first_write() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    assert!(state(&mut r, conn, 1).clean);
    r.send(conn, write(0, 1));
    assert!(!state(&mut r, conn, 1).clean);
}

#[test]
fn headers_that_make_no_sense_are_invalid_and_reach_nothing() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let write = write(0, 1);
    let wrong = [
        Header { offset: 512, ..write },
        Header { length: 0, payload: 0, ..write },
        Header { payload: 8192, ..write },
        Header { offset: SIZE, ..write },
        Header { offset: u64::MAX - 4095, ..write },
        Header { length: (1 << 20) + 4096, payload: (1 << 20) + 4096, ..write },
        Header { flags: flags::RESPONSE, ..write },
        Header { payload: 4096, ..request(OpCode::Read, 0, 4096, 1) },
        Header { payload: 4096, ..request(OpCode::WriteZeroes, 0, 4096, 1) },
        Header { aux: 1, ..request(OpCode::PutLayer, 0, 4096, 1) },
        request(OpCode::Control, 0, 0, 1),
    ];
    for header in wrong {
        let id = r.send(conn, header);
        assert_eq!(r.status(id), Some(Status::Invalid), "{header:?}");
        assert!(!r.in_store(id));
    }
    assert!(r.records().is_empty());
    let zeroes = r.send(conn, request(OpCode::Unmap, 0, 32 << 20, 1));
    r.persist_all();
    assert!(r.in_store(zeroes), "zeroes may be longer than any payload");
}

#[test]
fn a_layer_image_waits_for_its_mark_and_leaves_no_range_in_doubt() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let put = Header { payload: 4097, aux: 1, ..request(OpCode::PutLayer, 0, 4096, 1) };
    let put = r.send(conn, put);
    assert!(!r.in_store(put), "the power may go before what was copied is flushed");
    assert_eq!(r.records(), [&Record::Intent { mark: vec![0], clear: vec![] }]);
    r.persist_all();
    assert!(r.in_store(put));
    r.send(conn, request(OpCode::ClearIntent, 0, 4 << 20, 1));
    assert_eq!(r.core.intent.report(SIZE), [whole(0)], "it is being written");
    r.apply(Input::Done { request: put, result: Ok(Completed { aux: 1, ..Completed::default() }) });
    let aux = r.out.iter().find_map(|o| match o {
        Output::Reply { header, .. } if header.op == OpCode::PutLayer => Some(header.aux),
        _ => None,
    });
    assert_eq!(aux, Some(1));
    r.apply(Input::Closed { conn });
    let conn = r.open(2, 2);
    assert!(state(&mut r, conn, 2).in_doubt.is_empty());
}

#[test]
fn what_a_rebuild_copies_needs_no_mark() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    r.control(conn, 1, Control::RebuildBegin { size: SIZE, chain: Vec::new(), keep: None });
    r.persist_all();
    let put = r.send(conn, Header { payload: 4097, aux: 1, ..request(OpCode::PutLayer, 0, 4096, 1) });
    assert!(r.in_store(put));
    let write = r.send(conn, write(CHUNK, 1));
    assert!(!r.in_store(write), "a client's write is marked all the same");
    r.persist_all();
    r.done(put);
    r.done(write);
    r.control(conn, 1, Control::RebuildEnd);
    r.synced();
    r.persist_all();
    let late = r.send(conn, Header { payload: 4097, aux: 1, ..request(OpCode::PutLayer, 0, 4096, 1) });
    assert!(!r.in_store(late));
}

#[test]
fn while_the_chain_is_switched_no_time_is_asked_for() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    let write = r.send(conn, write(0, 1));
    r.persist_all();
    r.done(write);
    r.send(conn, request(OpCode::ClearIntent, 0, 4 << 20, 1));
    let due = r.core.wake_at();
    assert!(due.is_some());
    r.control(conn, 1, Control::RebuildBegin { size: SIZE, chain: Vec::new(), keep: None });
    assert_eq!(r.core.wake_at(), None, "nothing could be done then");
    r.persist_all();
    assert_eq!(r.core.wake_at(), due);
}

/// An epoch of three without those named, by its number.
fn epoch(counter: u64, without: &[&str]) -> lh_block::Epoch {
    let members = ["a", "b", "c"].iter().filter(|m| !without.contains(m));
    lh_block::Epoch {
        generation: generation(1),
        counter,
        members: members.map(|m| (*m).to_owned()).collect(),
        id: Instance(counter.into()),
        after: None,
        round: None,
    }
}

fn set_epoch(r: &mut Rig, conn: ConnId, counter: u64, without: &[&str]) {
    let out = without.iter().map(|m| (*m).to_owned()).collect();
    r.control(conn, 1, Control::SetEpoch { epoch: epoch(counter, without), out });
    r.persist_all();
}

fn missed(r: &mut Rig, conn: ConnId, base: u64) -> Option<Vec<lh_block::Extent>> {
    let ask = Control::Missed { replica: "c".into(), base: epoch(base, &[]), from: 0 };
    let asked = r.control(conn, 1, ask);
    match r.reply(asked) {
        Some((Status::Ok, Body::Map(page))) => Some(page.ranges),
        Some((Status::Refused, _)) => None,
        other => panic!("no answer but {other:?}"),
    }
}

#[test]
fn what_a_leaver_may_lack_is_told_until_it_is_back() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    set_epoch(&mut r, conn, 1, &[]);
    let before = r.send(conn, write(0, 1));
    r.persist_all();
    r.done(before);
    assert_eq!(missed(&mut r, conn, 1), None, "nobody is out");
    set_epoch(&mut r, conn, 2, &["c"]);
    let after = r.send(conn, write(CHUNK, 1));
    r.persist_all();
    r.done(after);
    let both = vec![Extent::new(0, 4096), Extent::new(CHUNK, 4096)];
    assert_eq!(missed(&mut r, conn, 1), Some(both.clone()));
    set_epoch(&mut r, conn, 3, &["b", "c"]);
    assert_eq!(missed(&mut r, conn, 1), Some(both));
    set_epoch(&mut r, conn, 4, &["b"]);
    assert_eq!(missed(&mut r, conn, 1), None, "it is back");
}

#[test]
fn a_mark_is_taken_back_only_after_what_it_stands_for_is_saved_for_who_is_out() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    set_epoch(&mut r, conn, 1, &[]);
    set_epoch(&mut r, conn, 2, &["c"]);
    let write = r.send(conn, write(0, 1));
    r.persist_all();
    r.done(write);
    r.send(conn, request(OpCode::ClearIntent, 0, 4 << 20, 1));
    let Some((save, Record::Missed { trails })) = r.take_record() else { panic!("{:?}", r.records()) };
    assert_eq!((trails.len(), trails[0].0, trails[0].1.0[0]), (1, 0, 1));
    assert_eq!(r.core.wake_at(), None, "the mark stays");
    r.apply(Input::Persisted { id: save, result: Ok(()) });
    assert!(r.core.wake_at().is_some(), "now it may go");
}

/// One is out, three chunks were written, and the mark of the first is to go: the record that saves its trail is on its way.
fn saving_the_first_of_three_trails() -> (Rig, ConnId, PersistId) {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    set_epoch(&mut r, conn, 1, &[]);
    set_epoch(&mut r, conn, 2, &["c"]);
    for n in 0..3 {
        let write = r.send(conn, write(n * CHUNK, 1));
        r.persist_all();
        r.done(write);
    }
    clear(&mut r, conn, 0);
    let Some((save, Record::Missed { .. })) = r.take_record() else { panic!("{:?}", r.records()) };
    (r, conn, save)
}

fn clear(r: &mut Rig, conn: ConnId, chunk: u64) {
    r.send(conn, request(OpCode::ClearIntent, chunk * CHUNK, 4 << 20, 1));
}

fn saves(r: &Rig) -> bool {
    r.records().iter().any(|record| matches!(record, Record::Missed { .. }))
}

/// A disk that is full stays so for a while: it is not asked all the time.
#[test]
fn trails_that_could_not_be_saved_are_tried_again_later() {
    let (mut r, conn, save) = saving_the_first_of_three_trails();
    r.apply(Input::Persisted { id: save, result: Err(Failure::NoSpace) });
    clear(&mut r, conn, 1);
    assert!(!saves(&r));
    let at = r.core.wake_at().expect("it is tried again");
    r.now = at;
    r.apply(Input::Tick);
    let Some((save, Record::Missed { trails })) = r.take_record() else { panic!("{:?}", r.records()) };
    assert_eq!(trails.len(), 2);
    r.apply(Input::Persisted { id: save, result: Ok(()) });
    assert_eq!(r.core.intent.report(SIZE), [Extent::new(2 * CHUNK, CHUNK)]);
}

/// Each is a sync. They are wanted as long as somebody closes.
#[test]
fn who_has_not_closed_after_all_wants_no_more_trails_saved_than_before() {
    for is_gone in [true, false] {
        let (mut r, mut conn, save) = saving_the_first_of_three_trails();
        let close = r.control(conn, 1, Control::Close);
        r.synced();
        assert_eq!(r.status(close), None, "it waits for what is being saved");
        if is_gone {
            r.apply(Input::Closed { conn });
        } else {
            let late = r.send(conn, write(4096, 1));
            r.done(late);
        }
        r.apply(Input::Persisted { id: save, result: Ok(()) });
        r.persist_all();
        if is_gone {
            conn = r.open(2, 2);
        } else {
            assert_eq!(r.status(close), Some(Status::Refused));
        }
        let n = if is_gone { 2 } else { 1 };
        let write = r.send(conn, write(2 * CHUNK + 4096, n));
        assert!(!saves(&r), "gone: {is_gone}");
        assert!(r.in_store(write));
    }
}

#[test]
fn no_trail_is_saved_behind_the_epoch_that_nobody_is_out_of() {
    let (mut r, conn, save) = saving_the_first_of_three_trails();
    clear(&mut r, conn, 1);
    r.control(conn, 1, Control::SetEpoch { epoch: epoch(3, &[]), out: Vec::new() });
    let Some((back, Record::Epoch { .. })) = r.take_record() else { panic!("{:?}", r.records()) };
    r.apply(Input::Persisted { id: save, result: Ok(()) });
    clear(&mut r, conn, 2);
    assert!(!saves(&r), "the file of trails goes with that epoch");
    r.apply(Input::Persisted { id: back, result: Ok(()) });
    assert!(!saves(&r), "nobody is out");
    // The next leaver may lack all of it: no mark goes before its trail was saved for that one.
    let marked = |r: &Rig| r.core.intent.report(SIZE);
    assert_eq!(marked(&r), [Extent::new(CHUNK, 2 * CHUNK)]);
    r.control(conn, 1, Control::SetEpoch { epoch: epoch(4, &["b"]), out: vec!["b".into()] });
    assert!(!saves(&r), "there is no file of trails yet");
    let Some((out, Record::Epoch { .. })) = r.take_record() else { panic!("{:?}", r.records()) };
    r.apply(Input::Persisted { id: out, result: Ok(()) });
    let Some((save, Record::Missed { trails })) = r.take_record() else { panic!("{:?}", r.records()) };
    assert_eq!(trails.iter().map(|(n, trail)| (*n, trail.0[0])).collect::<Vec<_>>(), [(1, 1), (2, 1)]);
    assert_eq!(marked(&r), [Extent::new(CHUNK, 2 * CHUNK)]);
    r.apply(Input::Persisted { id: save, result: Ok(()) });
    assert_eq!(marked(&r), []);
}

#[test]
fn no_trail_is_saved_while_a_revert_makes_the_trails_forgotten() {
    let (mut r, conn, save) = saving_the_first_of_three_trails();
    let op = lh_wire::ChainOp::Revert { name: "s".into(), created: String::new() };
    r.control(conn, 1, Control::Prepare { id: Instance(9), op });
    let Some((forget, Record::Epoch { .. })) = r.take_record() else { panic!("{:?}", r.records()) };
    clear(&mut r, conn, 1);
    r.apply(Input::Persisted { id: save, result: Ok(()) });
    clear(&mut r, conn, 2);
    assert!(!saves(&r), "the file of trails goes with that epoch");
    r.apply(Input::Persisted { id: forget, result: Ok(()) });
    assert!(!saves(&r), "nobody is told of");
}

/// An epoch that others are still out of takes nothing away: trails go on being saved beside it.
#[test]
fn trails_are_saved_behind_an_epoch_that_somebody_is_out_of() {
    let (mut r, conn, save) = saving_the_first_of_three_trails();
    let out = vec!["b".into(), "c".into()];
    r.control(conn, 1, Control::SetEpoch { epoch: epoch(3, &["b", "c"]), out });
    let Some((_, Record::Epoch { .. })) = r.take_record() else { panic!("{:?}", r.records()) };
    r.apply(Input::Persisted { id: save, result: Ok(()) });
    clear(&mut r, conn, 1);
    assert!(saves(&r));
}

#[test]
fn who_is_filled_keeps_its_marks_and_is_not_settled_and_knows_nothing_of_others() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    set_epoch(&mut r, conn, 1, &[]);
    set_epoch(&mut r, conn, 2, &["c"]);
    let write = r.send(conn, write(0, 1));
    r.persist_all();
    r.done(write);
    let begin = Control::RebuildBegin { size: SIZE, chain: Vec::new(), keep: Some(lh_wire::Keep::default()) };
    r.control(conn, 1, begin);
    assert!(r.records().is_empty(), "a sync comes first");
    r.synced();
    assert!(matches!(r.records()[..], [Record::RebuildBegin { .. }]));
    r.persist_all();
    assert_eq!(missed(&mut r, conn, 1), None);
    r.send(conn, request(OpCode::ClearIntent, 0, 4 << 20, 1));
    assert_eq!(r.core.wake_at(), None, "the mark may be the only word of what it has too much");
    let settled = r.control(conn, 1, Control::Settled { snapshot: "s".into() });
    assert_eq!((r.status(settled), r.records().len()), (Some(Status::Ok), 0));
    set_epoch(&mut r, conn, 3, &["b", "c"]);
    assert_eq!(missed(&mut r, conn, 2), None, "of b it has seen too little");
}

#[test]
fn a_revert_is_prepared_only_when_nobody_believes_the_trails_any_more() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    set_epoch(&mut r, conn, 1, &[]);
    set_epoch(&mut r, conn, 2, &["c"]);
    let op = lh_wire::ChainOp::Revert { name: "s".into(), created: String::new() };
    r.control(conn, 1, Control::Prepare { id: Instance(9), op });
    let Some((forget, Record::Epoch { epoch, out })) = r.take_record() else { panic!("{:?}", r.records()) };
    assert_eq!((epoch.counter, out.len()), (2, 0));
    assert!(r.records().is_empty());
    r.apply(Input::Persisted { id: forget, result: Ok(()) });
    assert!(matches!(r.records()[..], [Record::Prepare { .. }]));
    r.persist_all();
    assert_eq!(missed(&mut r, conn, 1), None);
}

#[test]
fn no_trail_is_begun_for_who_leaves_while_a_revert_is_prepared() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    set_epoch(&mut r, conn, 1, &[]);
    let op = lh_wire::ChainOp::Revert { name: "s".into(), created: String::new() };
    r.control(conn, 1, Control::Prepare { id: Instance(9), op });
    assert!(matches!(r.records()[..], [Record::Prepare { .. }]), "nobody is out");
    r.persist_all();
    set_epoch(&mut r, conn, 2, &["c"]);
    assert_eq!(missed(&mut r, conn, 1), None, "c will not have the head that the revert makes");
}

#[test]
fn a_revert_whose_engine_dies_while_the_trails_are_forgotten_is_not_prepared() {
    let mut r = Rig::new(facts());
    let conn = r.open(1, 1);
    set_epoch(&mut r, conn, 1, &[]);
    set_epoch(&mut r, conn, 2, &["c"]);
    let op = lh_wire::ChainOp::Revert { name: "s".into(), created: String::new() };
    let prepare = Control::Prepare { id: Instance(9), op };
    r.control(conn, 1, prepare.clone());
    let Some((forget, Record::Epoch { .. })) = r.take_record() else { panic!("{:?}", r.records()) };
    r.apply(Input::Closed { conn });
    r.apply(Input::Persisted { id: forget, result: Ok(()) });
    let conn = r.open(2, 2);
    r.control(conn, 2, prepare);
    let Some((id, Record::Prepare { .. })) = r.take_record() else { panic!("{:?}", r.records()) };
    r.apply(Input::Persisted { id, result: Ok(()) });
}
