use super::*;

#[test]
fn a_queue_is_paused_from_its_start_and_keeps_the_order_of_arrival() {
    let mut b = Bench::bare(config());
    b.join(A);
    let slots: Vec<_> = (0..5).map(|n| b.request(WRITE, blocks(n, 1))).collect();
    assert!(b.wire.is_empty());
    b.switch(Switch::Resume);
    let order: Vec<_> = b.to(A).iter().map(|t| t.data).collect();
    assert_eq!(order, slots.iter().map(|s| Data::Client { slot: *s, from: 0 }).collect::<Vec<_>>());
}

#[test]
fn a_pause_waits_for_the_last_answer_of_every_member() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    b.request(Op::Read, blocks(9, 1));
    b.request(Op::Flush, Extent::default());
    let id = b.switch(Switch::Pause);
    let late = b.request(WRITE, blocks(1, 1));
    let reads: Vec<_> = b.wire.iter().filter(|t| t.op == OpCode::Read).copied().collect();
    b.reply(reads[0], Status::Ok);
    for (m, done) in [(A, false), (B, true)] {
        let write = b.to(m).into_iter().find(|t| t.op == OpCode::Write).unwrap();
        b.reply(write, Status::Ok);
        assert_eq!(b.reports().contains(&FromQueue::Switched(id)), done, "a flush is not waited for");
    }
    assert!(!b.wire.iter().any(|t| t.data == Data::Client { slot: late, from: 0 }));
    b.switch(Switch::Resume);
    assert!(b.wire.iter().any(|t| t.data == Data::Client { slot: late, from: 0 }));
}

#[test]
fn sub_steps_do_not_wait_for_a_pause() {
    let mut b = Bench::new(1);
    let part = b.request(WRITE, Extent::new((8 << 20) + 512, 512));
    let before = b.request(WRITE, blocks(0, 1));
    let behind = b.request(WRITE, blocks(0, 1));
    let id = b.switch(Switch::Pause);
    let mut answers = Vec::new();
    for _ in 0..2 {
        assert!(!b.reports().contains(&FromQueue::Switched(id)));
        b.answer(A, Status::Ok);
        for (slot, _) in b.answers() {
            b.answered(slot);
            answers.push(slot);
        }
    }
    answers.sort_unstable();
    assert_eq!(answers, [part, before, behind]);
    assert!(b.reports().contains(&FromQueue::Switched(id)));
    b.assert_idle();
}

/// A discard of gigabytes has thousands of pieces, each of which may take milliseconds on a disk.
#[test]
fn a_pause_waits_for_one_piece_of_long_zeroes() {
    for op in [ZEROES, Op::Unmap] {
        let mut b = Bench::new(2);
        let zeroes = b.request(op, Extent::new(0, 5 << 20));
        b.answer(A, Status::Ok);
        b.answer(B, Status::Ok);
        let id = b.switch(Switch::Pause);
        b.answer(A, Status::Ok);
        assert!(b.reports().is_empty(), "the other one has not done it");
        b.answer(B, Status::Ok);
        assert_eq!(b.reports(), [FromQueue::Switched(id)]);
        assert!(b.wire.is_empty() && b.table.is_idle() && b.answers().is_empty());
        b.switch(Switch::Resume);
        let mut pieces = 2;
        while b.answers().is_empty() {
            let t = b.one(A);
            assert_eq!(t.range, Extent::new(pieces << 20, 1 << 20), "it goes on where it was");
            b.answer(A, Status::Ok);
            b.answer(B, Status::Ok);
            pieces += 1;
        }
        assert_eq!(pieces, 5);
        b.answered(zeroes);
        b.assert_idle();
    }
}

#[test]
fn a_pause_waits_for_one_block_of_a_read_that_goes_block_by_block() {
    let mut b = Bench::new(2);
    let read = b.request(Op::Read, blocks(0, 8));
    b.answer_reads(Status::Rotten);
    b.answer_reads(Status::Rotten);
    b.answer_reads(Status::Ok);
    b.reports();
    let id = b.switch(Switch::Pause);
    b.answer_reads(Status::Ok);
    assert_eq!(b.reports(), [FromQueue::Switched(id)]);
    assert!(b.wire.is_empty() && b.table.is_idle());
    b.switch(Switch::Resume);
    (0..6).for_each(|_| b.answer_reads(Status::Ok));
    assert_eq!(b.answers(), [(read, Ok(()))]);
    b.reports();
    b.assert_idle();
}

#[test]
fn a_read_that_nobody_can_serve_does_not_hold_up_a_pause() {
    let mut b = Bench::new(2);
    b.request(Op::Read, blocks(0, 1));
    b.request(WRITE, Extent::new(8192, 512));
    let id = b.switch(Switch::Pause);
    b.link_down(A);
    b.link_down(B);
    assert!(b.reports().contains(&FromQueue::Switched(id)));
    assert!(b.table.is_idle());
}

#[test]
fn attaching_waits_for_the_writes_before_it_and_sends_those_after_it() {
    let mut b = Bench::new(1);
    b.request(WRITE, blocks(0, 1));
    b.request(Op::Read, blocks(9, 1));
    b.apply(Input::LinkUp { member: B });
    b.reports();
    let id = b.switch(Switch::Attach { member: B });
    assert!(b.reports().is_empty() && b.to(B).is_empty());
    let after = b.request(WRITE, blocks(1, 1));
    assert_eq!(b.one(B).data, Data::Client { slot: after, from: 0 });
    b.request(Op::Read, blocks(10, 1));
    assert_eq!(b.to(B).len(), 1, "it is not read from");
    b.answer(A, Status::Ok);
    assert_eq!(b.reports(), [FromQueue::Switched(id)]);
    let waits = b.answers().iter().all(|(slot, _)| *slot != after);
    assert!(waits, "a write waits for the joining member, too");
    b.answer(B, Status::Ok);
    assert!(b.answers().iter().any(|(slot, _)| *slot == after));
}

#[test]
fn attaching_over_a_link_that_broke_meanwhile_waits_for_the_next_attempt() {
    let mut b = Bench::new(1);
    b.apply(Input::LinkUp { member: B });
    b.link_down(B);
    let id = b.switch(Switch::Attach { member: B });
    let failed = FromQueue::Failed(B, crate::message::Fault::Link);
    assert_eq!(b.reports(), [failed, FromQueue::Switched(id)], "once");
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty());
    b.switch(Switch::Forget { member: B });
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn a_link_carries_nothing_of_clients_before_it_is_attached() {
    let mut b = Bench::new(2);
    b.link_down(B);
    b.apply(Input::LinkUp { member: B });
    let slot = b.request(WRITE, blocks(0, 1));
    b.request(Op::Flush, Extent::default());
    b.answer(A, Status::Ok);
    assert!(b.to(B).is_empty() && b.answers().is_empty());
    b.switch(Switch::Attach { member: B });
    assert_eq!(b.to(B).len(), 2);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers()[0], (slot, Ok(())));
}

#[test]
fn growing() {
    let mut b = Bench::new(1);
    let slot = b.request(Op::Read, Extent::new(SIZE, 4096));
    assert_eq!(b.answers(), [(slot, Err(IoError::OutOfRange))]);
    b.switch(Switch::Resize { size: 2 * SIZE });
    b.request(Op::Read, Extent::new(SIZE, 4096));
    assert_eq!(b.one(A).range.offset, SIZE);
}

#[test]
fn stopping_answers_what_waits_and_lets_the_rest_end() {
    let mut b = Bench::new(2);
    let sent = b.request(WRITE, blocks(0, 1));
    let behind = b.request(WRITE, blocks(0, 1));
    let flush = b.request(Op::Flush, Extent::default());
    let next = b.request(Op::Flush, Extent::default());
    b.shared.put_in_doubt(2);
    let doubt = b.request(Op::Read, Extent::new(8 << 20, 4096));
    b.reports();
    let id = b.switch(Switch::Stop);
    let late = b.request(Op::Read, blocks(1, 1));
    let down = Err(IoError::ShuttingDown);
    assert_eq!(b.answers(), [(doubt, down), (next, down), (late, down)]);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(sent, Ok(())), (flush, down)], "a member may lack what the flush covers");
    b.answered(sent);
    assert_eq!(b.answers(), [(behind, down)]);
    assert_eq!(b.reports(), [FromQueue::Switched(id)]);
    b.answered(behind);
    b.assert_idle();
}

#[test]
fn stopping_does_not_wait_for_members_that_are_gone() {
    let mut b = Bench::new(2);
    let write = b.request(WRITE, blocks(0, 1));
    let flush = b.request(Op::Flush, Extent::default());
    b.answer(A, Status::Ok);
    b.link_down(B);
    b.reports();
    let id = b.switch(Switch::Stop);
    let down = Err(IoError::ShuttingDown);
    assert_eq!(b.answers(), [(write, down), (flush, down)], "not Ok: one of the members lacks it");
    assert_eq!(b.reports(), [FromQueue::Switched(id)]);
}

/// They are thousands, and a snapshot waits until a replica that is brought in sync is attached.
#[test]
fn attaching_waits_for_one_piece_of_long_zeroes() {
    for joins in [Switch::Attach { member: B }, Switch::Fill { member: B }] {
        let mut b = Bench::new(1);
        let zeroes = b.request(ZEROES, Extent::new(0, 4 << 20));
        b.apply(Input::LinkUp { member: B });
        let attached = b.switch(joins);
        assert!(b.reports().is_empty() && b.to(B).is_empty(), "the piece under way is not sent to it");
        b.answer(A, Status::Ok);
        assert_eq!(b.reports(), [FromQueue::Switched(attached)]);
        for piece in 1..4 {
            let awaited = b.switch(Switch::Await { member: B });
            for m in [A, B] {
                assert!(b.reports().is_empty());
                assert_eq!(b.one(m).range, Extent::new(piece << 20, 1 << 20));
                b.answer(m, Status::Ok);
            }
            assert_eq!(b.reports(), [FromQueue::Switched(awaited)]);
        }
        assert_eq!(b.answers(), [(zeroes, Ok(()))]);
        b.answered(zeroes);
        b.assert_idle();
    }
}

#[test]
fn stopping_waits_for_the_answer_of_long_zeroes() {
    let mut b = Bench::new(1);
    let zeroes = b.request(ZEROES, Extent::new(0, 2 << 20));
    let piece = b.one(A);
    let write = b.request(WRITE, blocks(256, 1));
    let id = b.switch(Switch::Stop);
    b.reply(piece, Status::Ok);
    assert!(b.reports().is_empty() && b.answers().is_empty(), "the next piece waits for its range");
    b.answer(A, Status::Ok);
    b.answered(write);
    assert_eq!(b.answers(), [(write, Ok(())), (zeroes, Err(IoError::ShuttingDown))]);
    assert_eq!(b.reports(), [FromQueue::Switched(id)]);
    b.answered(zeroes);
    b.assert_idle();
}

/// Once every queue has stopped nobody tells them anything any more.
#[test]
fn what_loses_its_member_while_the_engine_ends_is_answered() {
    let mut b = Bench::new(1);
    let read = b.request(Op::Read, blocks(0, 1));
    let part = b.request(WRITE, Extent::new(8192, SECTOR));
    let id = b.switch(Switch::Stop);
    assert!(b.reports().is_empty() && b.answers().is_empty(), "they are under way");
    b.link_down(A);
    let down = Err(IoError::ShuttingDown);
    assert_eq!(b.answers(), [(read, down), (part, down)]);
    assert!(b.reports().contains(&FromQueue::Switched(id)));
    b.assert_idle();
}

/// The other one is gone, and nobody puts it out any more.
#[test]
fn a_read_that_waits_to_hear_of_a_member_while_the_engine_ends_is_answered() {
    let mut b = Bench::new(2);
    b.now += 2 * LEASE;
    let read = b.request(Op::Read, blocks(0, 1));
    b.switch(Switch::Stop);
    b.link_down(B);
    b.answer_reads(Status::Ok);
    b.answer_pings(MemberSet::EMPTY.with(A));
    assert_eq!(b.answers(), [(read, Err(IoError::ShuttingDown))]);
    b.reports();
    b.assert_idle();
}
