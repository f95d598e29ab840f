use super::*;

impl Bench {
    /// All members but this one are on other hosts.
    fn with_near(near: MemberId, config: Config, members: u8) -> Self {
        let b = Self::with(config, members);
        [A, B, C].into_iter().filter(|m| *m != near).for_each(|m| b.shared.set_far(m, true));
        b
    }
}

#[test]
fn the_local_member_is_read_from() {
    let mut b = Bench::with_near(B, config(), 3);
    for n in 0..5 {
        b.request(Op::Read, blocks(n, 1));
    }
    assert_eq!(b.to(B).len(), 5);
}

/// A place among the members is used again by another replica.
#[test]
fn who_is_near_may_change() {
    let mut b = Bench::with_near(A, config(), 2);
    b.link_down(A);
    b.switch(Switch::Forget { member: A });
    b.shared.set_far(A, true);
    b.shared.set_far(B, false);
    b.join(A);
    b.hear_all();
    for n in 0..5 {
        b.request(Op::Read, blocks(n, 1));
    }
    assert_eq!(b.to(B).len(), 5);
}

#[test]
fn reads_spread_over_equals() {
    let mut b = Bench::new(3);
    for n in 0..6 {
        b.request(Op::Read, blocks(n, 1));
    }
    assert_eq!([A, B, C].map(|m| b.to(m).len()), [2, 2, 2]);
}

#[test]
fn a_slow_answer_moves_reads_elsewhere() {
    let mut b = Bench::new(2);
    b.request(Op::Read, blocks(0, 1));
    b.now += 10 * MS;
    b.answer(A, Status::Ok);
    b.request(Op::Read, blocks(0, 1));
    b.now += MS;
    b.answer(B, Status::Ok);
    for n in 0..4 {
        b.request(Op::Read, blocks(n, 1));
    }
    assert_eq!(b.to(B).len(), 4);
}

#[test]
fn the_client_gets_its_part_of_whole_blocks() {
    let mut b = Bench::new(1);
    let slot = b.request(Op::Read, Extent::new(4096 + SECTOR, 2 * SECTOR));
    assert_eq!(b.one(A).range, blocks(1, 1));
    b.answer(A, Status::Ok);
    let answer = Output::Complete { slot, result: Ok(()), part: Some((512, 1024)), held: false };
    assert_eq!(b.out, [Output::Store { slot, append: false }, answer, Output::Free { slot }]);
}

#[test]
fn the_longest_unaligned_read_comes_in_two() {
    let mut b = Bench::new(1);
    let slot = b.request(Op::Read, Extent::new(SECTOR, 1 << 20));
    assert_eq!(b.one(A).range, blocks(0, 256));
    b.answer(A, Status::Ok);
    assert_eq!(b.one(A).range, blocks(256, 1));
    b.answer(A, Status::Ok);
    let answer = Output::Complete { slot, result: Ok(()), part: Some((512, 1 << 20)), held: false };
    let [first, second] = [false, true].map(|append| Output::Store { slot, append });
    assert_eq!(b.out, [first, second, answer, Output::Free { slot }]);
    b.assert_idle();
}

#[test]
fn a_failed_read_goes_to_another_member_and_a_late_answer_is_ignored() {
    let mut b = Bench::with_near(A, config(), 2);
    let slot = b.request(Op::Read, blocks(0, 1));
    b.answer(A, Status::Io);
    assert!(b.reports().is_empty(), "perhaps nobody can read it");
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    assert_eq!(b.reports(), [FromQueue::Unreadable(A, blocks(0, 1))]);
    b.switch(Switch::Forget { member: A });
    b.out.clear();

    b.join(C);
    b.hear_all();
    b.switch(Switch::StopReads { member: B });
    b.out.clear();
    let slot = b.request(Op::Read, blocks(0, 1));
    let late = b.one(C);
    b.switch(Switch::Promote { member: B });
    b.switch(Switch::StopReads { member: C });
    let later = b.one(B);
    b.switch(Switch::Promote { member: C });
    b.switch(Switch::StopReads { member: B });
    assert_eq!(b.to(C).len(), 2, "asked anew");
    b.out.clear();
    for old in [late, later] {
        b.reply(old, Status::Ok);
        assert!(b.out.is_empty(), "not even its data is taken");
    }
    b.answer(C, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.assert_idle();
}

#[test]
fn a_medium_error_on_every_member_is_the_clients() {
    let mut b = Bench::new(2);
    let slot = b.request(Op::Read, blocks(0, 1));
    b.answer(A, Status::Io);
    b.answer(B, Status::Io);
    assert_eq!(b.answers(), [(slot, Err(IoError::Io))]);
    assert!(b.reports().is_empty(), "nobody is better than another one");
    b.assert_idle();
}

#[test]
fn who_is_asked_after_others_tells_of_those_whose_disks_failed_alone() {
    let mut b = Bench::with_near(A, Config { verify: true, ..config() }, 3);
    // The slot's first use: nobody can read it.
    let slot = b.request(Op::Read, blocks(0, 1));
    while b.answers().is_empty() {
        b.wire.iter().map(|t| t.member).collect::<MemberSet>().iter().for_each(|m| b.answer(m, Status::Io));
    }
    b.out.clear();
    // Its second one: what A has is rotten, and is to be repaired where it is.
    assert_eq!(b.request(Op::Read, blocks(0, 1)), slot);
    b.answer(A, Status::Rotten);
    assert_eq!(b.reports(), [FromQueue::Rotten(A, blocks(0, 1))]);
    let first = b.wire.iter().find(|t| t.op == OpCode::Read).expect("another one is asked").member;
    b.answer(first, Status::Io);
    b.answer(if first == B { C } else { B }, Status::Ok);
    assert_eq!(b.reports(), [FromQueue::Unreadable(first, blocks(0, 1))]);
}

#[test]
fn who_cannot_read_a_block_is_read_from_as_before() {
    let mut b = Bench::with_near(A, config(), 2);
    b.shared.set_members_min(2);
    for _ in 0..3 {
        let slot = b.request(Op::Read, blocks(0, 1));
        b.answer(A, Status::Io);
        b.answer(B, Status::Ok);
        assert_eq!(b.answers(), [(slot, Ok(()))]);
        assert_eq!(b.reports(), [FromQueue::Unreadable(A, blocks(0, 1))]);
    }
}

#[test]
fn a_read_waits_without_its_claim_while_nobody_can_serve_it() {
    let mut b = Bench::new(2);
    let slot = b.request(Op::Read, blocks(0, 1));
    b.link_down(A);
    b.link_down(B);
    assert!(b.wire.is_empty() && b.answers().is_empty() && b.table.is_idle());
    b.pass(20_000, MemberSet::EMPTY);
    assert!(b.answers().is_empty());
    b.join(B);
    b.hear_all();
    b.switch(Switch::Forget { member: A });
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn after_the_timeout_without_any_member_everything_is_answered() {
    let mut b = Bench::new(1);
    let write = b.request(WRITE, blocks(0, 1));
    let behind = b.request(WRITE, blocks(0, 1));
    let read = b.request(Op::Read, blocks(1, 1));
    let flush = b.request(Op::Flush, Extent::default());
    b.link_down(A);
    let parked = b.request(WRITE, blocks(7, 1));
    b.shared.set_patient(true);
    b.pass(40_000, MemberSet::EMPTY);
    assert!(b.answers().is_empty(), "the conductor has a reason to wait");
    b.shared.set_patient(false);
    b.pass(50, MemberSet::EMPTY);
    let mut answers = b.answers();
    answers.sort_unstable_by_key(|a| a.0);
    assert_eq!(answers, [write, behind, read, flush, parked].map(|s| (s, Err(IoError::TimedOut))));
    let late = b.request(Op::Read, blocks(1, 1));
    assert_eq!(b.answers(), [(late, Err(IoError::TimedOut))]);
    for slot in [write, behind] {
        b.answered(slot);
    }
    assert!(!b.table.is_idle(), "what was sent may still be done");

    // What was sent is brought to its end, so that no member has what another lacks; nobody is answered twice.
    b.join(A);
    assert_eq!(b.to(A)[0].range, blocks(0, 1));
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty());
    b.assert_idle();
}

/// One of three is there, and answers; nothing can be answered by it.
#[test]
fn after_the_timeout_with_too_few_members_everything_is_answered() {
    let mut b = Bench::new(3);
    b.shared.set_members_min(2);
    for m in [B, C] {
        b.link_down(m);
        b.switch(Switch::StopReads { member: m });
    }
    let write = b.request(WRITE, blocks(0, 1));
    let alone = MemberSet::EMPTY.with(A);
    b.pass(2_500, alone);
    let (read, flush) = (b.request(Op::Read, blocks(1, 1)), b.request(Op::Flush, Extent::default()));
    b.answer(A, Status::Ok);
    b.pass(26_500, alone);
    assert!(b.answers().is_empty(), "others may come");
    b.pass(1_100, alone);
    let mut answers = b.answers();
    answers.sort_unstable_by_key(|a| a.0);
    assert_eq!(answers, [write, read, flush].map(|s| (s, Err(IoError::TimedOut))));

    b.join(B);
    b.switch(Switch::Forget { member: C });
    b.hear_all();
    b.answer(B, Status::Ok);
    let late = b.request(Op::Read, blocks(1, 1));
    b.answer_reads(Status::Ok);
    assert_eq!(b.answers(), [(late, Ok(()))]);
}

/// Seen in the simulation (`many`, seed 3,000,299): one of a majority came back, was written to and was lost before it was read from, and
/// what came right behind its answers was refused for the time before.
#[test]
fn the_time_without_members_begins_anew_when_a_write_is_answered() {
    let mut b = Bench::new(3);
    b.shared.set_members_min(2);
    for m in [B, C] {
        b.link_down(m);
        b.switch(Switch::StopReads { member: m });
        b.switch(Switch::Forget { member: m });
    }
    let alone = MemberSet::EMPTY.with(A);
    b.pass(29_800, alone);
    b.apply(Input::LinkUp { member: B });
    b.switch(Switch::Attach { member: B });
    let write = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(write, Ok(()))]);
    b.link_down(B);
    b.switch(Switch::Forget { member: B });
    b.pass(1_000, alone);
    let parked = b.request(WRITE, blocks(7, 1));
    b.pass(28_000, alone);
    assert!(b.answers().is_empty(), "somebody was served less than 30 s ago");
    b.pass(2_000, alone);
    assert_eq!(b.answers(), [(parked, Err(IoError::TimedOut))]);
}

#[test]
fn reads_of_a_chunk_in_doubt_wait_until_it_is_resolved() {
    let mut b = Bench::new(2);
    b.shared.put_in_doubt(1);
    let read = b.request(Op::Read, Extent::new(4 << 20, 4096));
    let part = b.request(WRITE, Extent::new((4 << 20) + 8192, SECTOR));
    let whole = b.request(WRITE, Extent::new((4 << 20) + 4096, 4096));
    assert_eq!(b.reports(), [FromQueue::ChunkWanted(1)], "once");
    assert_eq!(b.wire.len(), 2, "a write of whole blocks needs no old bytes");
    assert_eq!(b.one(A).data, Data::Client { slot: whole, from: 0 });
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.answered(whole);
    b.answers();
    b.apply(Input::Message(ToQueue::ChunkResolved(0)));
    assert!(b.wire.is_empty() && b.reports().is_empty());
    b.apply(Input::Message(ToQueue::ChunkResolved(1)));
    assert_eq!(b.reports(), [FromQueue::ChunkWanted(1)], "it is in doubt again");
    b.shared.resolve(1);
    b.apply(Input::Message(ToQueue::ChunkResolved(1)));
    assert_eq!(b.wire.iter().filter(|t| t.op == OpCode::Read).count(), 2);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(read, Ok(())), (part, Ok(()))]);
}

/// A member that comes back while the read waits for its range may lack what was answered.
#[test]
fn a_chunk_that_is_put_in_doubt_before_its_read_begins_is_not_read() {
    let mut b = Bench::new(2);
    let write = b.request(WRITE, blocks(0, 1));
    let read = b.request(Op::Read, blocks(0, 1));
    b.shared.put_in_doubt(0);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.answered(write);
    assert_eq!(b.answers(), [(write, Ok(()))]);
    assert_eq!(b.reports(), [FromQueue::ChunkWanted(0)]);
    assert!(b.to(A).is_empty() && b.to(B).is_empty());
    b.shared.resolve(0);
    b.apply(Input::Message(ToQueue::ChunkResolved(0)));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(read, Ok(()))]);
    b.assert_idle();
}

#[test]
fn an_answer_with_fewer_bytes_than_were_asked_for_breaks_the_link() {
    let mut b = Bench::with_near(A, config(), 2);
    let slot = b.request(Op::Read, blocks(0, 2));
    let t = b.one(A);
    b.apply(Input::Reply(Reply {
        member: A,
        tag: t.tag,
        op: t.op,
        status: Status::Ok,
        aux: 0,
        payload: 4096,
    }));
    assert!(b.out.contains(&Output::Disconnect { member: A }) && b.answers().is_empty());
    assert_eq!(b.one(B).range, blocks(0, 2));
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn a_read_is_answered_only_when_every_member_was_heard_lately() {
    let mut b = Bench::with_near(A, config(), 2);
    b.now += 2 * LEASE;
    let slot = b.request(Op::Read, blocks(0, 1));
    assert_eq!(b.wire.iter().filter(|t| t.op == OpCode::Ping).count(), 2, "asked at once");
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty());
    assert!(b.table.is_idle(), "nobody waits for the range meanwhile");
    b.answer_pings(MemberSet::EMPTY.with(A));
    assert!(b.answers().is_empty());
    b.answer_pings(MemberSet::EMPTY.with(B));
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.assert_idle();
}

#[test]
fn an_answer_that_lay_in_a_buffer_says_nothing_about_now() {
    let mut b = Bench::with_near(A, config(), 2);
    let slot = b.request(Op::Read, blocks(0, 1));
    b.request(WRITE, blocks(1, 1));
    // The process is stopped here, for longer than another engine has to wait before its first answer.
    b.now += 3 * LEASE;
    let write = b.to(B)[0];
    b.reply(write, Status::Ok);
    let read = b.to(A)[0];
    b.reply(read, Status::Ok);
    assert!(b.answers().is_empty());
    b.answer_pings(MemberSet::EMPTY.with(A).with(B));
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn a_held_read_is_read_again_if_its_member_is_put_out() {
    let mut b = Bench::with_near(A, config(), 3);
    b.now += 2 * LEASE;
    let slot = b.request(Op::Read, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.switch(Switch::StopReads { member: A });
    let again = b.wire.iter().find(|t| t.op == OpCode::Read).copied().expect("asks another");
    assert_ne!(again.member, A);
    b.switch(Switch::Forget { member: A });
    b.reply(again, Status::Ok);
    b.answer_pings(MemberSet::EMPTY.with(B).with(C));
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.assert_idle();
}

#[test]
fn one_member_proves_itself_by_answering() {
    let mut b = Bench::new(1);
    b.now += 10 * LEASE;
    let slot = b.request(Op::Read, blocks(0, 1));
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn a_rotten_block_is_read_from_another_member_and_nobody_is_put_out() {
    let mut b = Bench::with(Config { verify: true, ..config() }, 3);
    let slot = b.request(Op::Read, blocks(7, 2));
    assert!(b.one(A).verify);
    b.answer(A, Status::Rotten);
    assert_eq!(b.reports(), [FromQueue::Rotten(A, blocks(7, 2))]);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.assert_idle();
}

/// Another block is rotten on each: together they have all.
#[test]
fn what_no_member_has_whole_is_read_block_by_block() {
    for rotten_on_both in [false, true] {
        let mut b = Bench::with(Config { verify: true, ..config() }, 2);
        let slot = b.request(Op::Read, blocks(7, 3));
        b.answer(A, Status::Rotten);
        b.answer(B, Status::Rotten);
        assert_eq!(b.reports().len(), 2);
        for (block, rotten) in [(7, Some(A)), (8, None), (9, Some(B))] {
            let asked = b.wire.iter().map(|t| t.member).next().expect("somebody is asked");
            assert_eq!(b.one(asked).range, blocks(block, 1));
            let other = if asked == A { B } else { A };
            if rotten == Some(asked) || (rotten_on_both && block == 9) {
                b.answer(asked, Status::Rotten);
                b.answer(other, if rotten_on_both && block == 9 { Status::Rotten } else { Status::Ok });
            } else {
                b.answer(asked, Status::Ok);
            }
        }
        let answer = if rotten_on_both { Err(IoError::Io) } else { Ok(()) };
        assert_eq!(b.answers(), [(slot, answer)]);
        b.assert_idle();
    }
}

#[test]
fn a_block_that_is_rotten_everywhere_is_an_error() {
    let mut b = Bench::with(Config { verify: true, ..config() }, 2);
    let slot = b.request(Op::Read, blocks(0, 1));
    b.answer(A, Status::Rotten);
    b.answer(B, Status::Rotten);
    assert_eq!(b.answers(), [(slot, Err(IoError::Io))]);
    b.assert_idle();
}

/// A member's files are there although nobody knows whether it still is one.
#[test]
fn what_is_read_here_is_no_sign_of_life() {
    let here = |b: &mut Bench| {
        let at = b.wire.iter().position(|t| t.op == OpCode::Read && t.member == A).expect("asks A");
        let t = b.wire.remove(at);
        let (member, tag, op) = (t.member, t.tag, t.op);
        b.apply(Input::LocalRead(Reply { member, tag, op, status: Status::Ok, aux: 0, payload: 4096 }));
    };
    let mut b = Bench::with_near(A, config(), 2);
    b.now += 2 * LEASE;
    let slot = b.request(Op::Read, blocks(0, 1));
    here(&mut b);
    b.answer_pings(MemberSet::EMPTY.with(B));
    assert!(b.answers().is_empty(), "nobody has heard of A");
    b.answer_pings(MemberSet::EMPTY.with(A));
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    // One member proves itself: whoever read its files has seen that nobody else was let in.
    let mut b = Bench::new(1);
    b.now += 10 * LEASE;
    let slot = b.request(Op::Read, blocks(0, 1));
    here(&mut b);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.assert_idle();
}

#[test]
fn what_was_read_here_for_nothing_is_late() {
    let mut b = Bench::with_near(A, config(), 2);
    let slot = b.request(Op::Read, blocks(0, 1));
    let first = b.one(A);
    b.switch(Switch::StopReads { member: A });
    let (member, tag, op) = (A, first.tag, OpCode::Read);
    let read = Reply { member, tag, op, status: Status::Ok, aux: 0, payload: 4096 };
    b.apply(Input::LocalRead(read));
    assert!(b.answers().is_empty());
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    // The link is gone, and with it all that was asked over it.
    let slot = b.request(Op::Read, blocks(0, 1));
    let second = b.one(B);
    b.link_down(B);
    b.apply(Input::LocalRead(Reply { member: B, tag: second.tag, ..read }));
    assert!(!b.answers().contains(&(slot, Ok(()))));
}

/// A disk that took its time gives a block that nobody waits for any more. The slot is another request's by then.
#[test]
fn what_was_read_here_for_a_request_of_before_answers_none_of_now() {
    let mut b = Bench::new(2);
    let first = b.request(Op::Read, blocks(0, 1));
    let late = b.one(A);
    b.switch(Switch::StopReads { member: A });
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(first, Ok(()))]);
    b.switch(Switch::Promote { member: A });
    b.wire.clear();
    let second = b.request(Op::Read, blocks(1, 1));
    assert_eq!((second, b.one(A).range), (first, blocks(1, 1)), "in its place, of the same member");
    let Transmit { member, tag, op, .. } = late;
    b.apply(Input::LocalRead(Reply { member, tag, op, status: Status::Ok, aux: 0, payload: 4096 }));
    assert!(b.answers().is_empty());
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(second, Ok(()))]);
}

/// It is filled from who cannot read the block: that takes hours perhaps, and brings nothing.
#[test]
fn nobody_waits_for_who_is_filled_where_no_member_can_read() {
    let mut b = Bench::new(1);
    b.apply(Input::LinkUp { member: B });
    b.switch(Switch::Fill { member: B });
    b.hear_all();
    let read = b.request(Op::Read, blocks(0, 1));
    b.answer(A, Status::Io);
    let part = b.request(WRITE, Extent::new(8192, SECTOR));
    b.answer(A, Status::Io);
    assert_eq!(b.answers(), [(read, Err(IoError::Io)), (part, Err(IoError::Io))]);
    b.answered(part);
    b.assert_idle();
}
