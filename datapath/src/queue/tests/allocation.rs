use lh_block::ALLOCATION_MAX;

use super::*;

/// What the client of a slot was given of the stored bytes.
fn given(b: &mut Bench) -> Vec<(u16, Option<(u32, u32)>)> {
    b.take(|o| match o {
        Output::Complete { slot, result: Ok(()), part, .. } => Some((slot, part)),
        _ => None,
    })
}

#[test]
fn one_member_is_asked_and_its_answer_passed_on() {
    let mut b = Bench::new(2);
    let slot = b.request(Op::Allocation, Extent::new(512, SIZE - 1024));
    let asked = [b.to(A), b.to(B)].concat();
    let [asked] = asked[..] else { panic!("{asked:?}") };
    assert_eq!((asked.op, asked.range, asked.data), (OpCode::Allocation, Extent::new(0, SIZE), Data::None));
    b.reply(asked, Status::Ok);
    assert_eq!(given(&mut b), [(slot, Some((0, 8)))]);
    let counted = &b.queue.stats;
    let reads = [&counted.reads, counted.member_read(A), counted.member_read(B)];
    let count = |c: &Counters| c.count.load(std::sync::atomic::Ordering::Relaxed);
    assert!(reads.iter().all(|c| count(c) == 0) && count(&counted.allocations) == 1);
    b.assert_idle();
}

#[test]
fn no_more_is_claimed_than_one_answer_covers() {
    let mut b = Bench::with(Config { size: 4 << 30, ..config() }, 1);
    b.request(Op::Allocation, Extent::new(4096, (4 << 30) - 4096));
    assert_eq!(b.one(A).range, Extent::new(4096, ALLOCATION_MAX));
    b.answer(A, Status::Ok);
    assert_eq!(given(&mut b), [(0, Some((0, 8)))]);
    b.assert_idle();
}

#[test]
fn it_waits_for_writes_that_were_there_before_and_those_behind_wait_for_it() {
    let mut b = Bench::new(1);
    let before = b.request(WRITE, blocks(100, 1));
    let asked = b.request(Op::Allocation, Extent::new(0, SIZE));
    let behind = b.request(WRITE, blocks(50, 1));
    assert_eq!(b.one(A).range, blocks(100, 1));
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(before, Ok(()))]);
    assert!(b.to(A).is_empty(), "the write's answer has not left");
    b.answered(before);
    assert_eq!(b.one(A).op, OpCode::Allocation);
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(asked, Ok(()))]);
    assert_eq!(b.one(A).range, blocks(50, 1));
    b.answer(A, Status::Ok);
    b.answered(behind);
    b.assert_idle();
}

#[test]
fn what_is_in_doubt_is_not_told() {
    let mut b = Bench::new(2);
    b.shared.put_in_doubt(2);
    let slot = b.request(Op::Allocation, Extent::new(4096, SIZE - 4096));
    let asked = [b.to(A), b.to(B)].concat();
    assert_eq!(asked.iter().map(|t| t.range).collect::<Vec<_>>(), [Extent::new(4096, (8 << 20) - 4096)]);
    b.reply(asked[0], Status::Ok);
    assert_eq!(given(&mut b), [(slot, Some((0, 8)))]);

    // Where it begins in doubt it waits, as a read does.
    let slot = b.request(Op::Allocation, Extent::new(8 << 20, 4096));
    assert!(b.to(A).is_empty() && b.to(B).is_empty());
    assert_eq!(b.reports(), [FromQueue::ChunkWanted(2)]);
    b.shared.resolve(2);
    b.apply(Input::Message(ToQueue::ChunkResolved(2)));
    let asked = [b.to(A), b.to(B)].concat();
    b.reply(asked[0], Status::Ok);
    assert_eq!(given(&mut b), [(slot, Some((0, 8)))]);
    b.assert_idle();
}

/// A member may have been replaced by a younger engine's: what it says counts once all have been heard.
#[test]
fn it_is_held_until_every_member_was_heard() {
    let mut b = Bench::new(2);
    b.now += LEASE + MS;
    let slot = b.request(Op::Allocation, Extent::new(0, SIZE));
    let asked = b.wire.iter().find(|t| t.op == OpCode::Allocation).copied().expect("one is asked");
    b.reply(asked, Status::Ok);
    assert_eq!(given(&mut b), [], "the other was not heard");
    b.answer_pings([A, B].into_iter().collect());
    assert_eq!(given(&mut b), [(slot, Some((0, 8)))]);
}

#[test]
fn a_member_that_refuses_is_passed_over_and_blamed_for_nothing() {
    let mut b = Bench::new(2);
    let slot = b.request(Op::Allocation, blocks(0, 8));
    let first = [b.to(A), b.to(B)].concat()[0];
    b.reply(first, Status::Io);
    let second = [b.to(A), b.to(B)].concat()[0];
    assert_ne!(first.member, second.member);
    b.reply(second, Status::Ok);
    assert_eq!(given(&mut b), [(slot, Some((0, 8)))]);
    assert_eq!(b.reports(), [], "nothing is to be written anew");
    b.assert_idle();
}

#[test]
fn a_member_that_does_not_know_is_no_answer_of_bytes() {
    let mut b = Bench::new(1);
    let slot = b.request(Op::Allocation, blocks(0, 8));
    let t = b.one(A);
    b.wire.clear();
    let unknown = Reply { member: A, tag: t.tag, op: t.op, status: Status::Ok, aux: 0, payload: 0 };
    b.apply(Input::LocalRead(unknown));
    assert_eq!(given(&mut b), [(slot, None)]);
    b.assert_idle();
}

#[test]
fn an_answer_that_no_correct_member_gives_ends_its_link() {
    for (op, status, payload) in [
        (OpCode::Allocation, Status::Ok, 516),
        (OpCode::Allocation, Status::Rotten, 0),
        (OpCode::Read, Status::Ok, 8),
    ] {
        let mut b = Bench::new(2);
        b.request(Op::Allocation, blocks(0, 8));
        let t = [b.to(A), b.to(B)].concat()[0];
        b.apply(Input::Reply(Reply { member: t.member, tag: t.tag, op, status, aux: 0, payload }));
        assert!(b.out.contains(&Output::Disconnect { member: t.member }), "{op:?} {status:?}");
    }
}

#[test]
fn nonsense_is_refused() {
    let mut b = Bench::new(1);
    for range in [Extent::new(0, 0), Extent::new(100, 512), Extent::new(SIZE - 512, 1024)] {
        b.request(Op::Allocation, range);
    }
    let refused: Vec<_> = b.answers().into_iter().map(|(_, result)| result).collect();
    assert_eq!(refused, [Err(IoError::Invalid), Err(IoError::Invalid), Err(IoError::OutOfRange)]);
    b.assert_idle();
}
