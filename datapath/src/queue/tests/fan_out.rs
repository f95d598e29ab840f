use super::*;

#[test]
fn refuses_what_can_never_be_done() {
    let mut b = Bench::new(1);
    let cases = [
        (Op::Read, Extent::new(SIZE, 4096), IoError::OutOfRange),
        (Op::Read, Extent::new(u64::MAX - 511, 512), IoError::OutOfRange),
        (WRITE, Extent::new(SIZE - 512, 1024), IoError::OutOfRange),
        (WRITE, Extent::new(100, 512), IoError::Invalid),
        (WRITE, Extent::new(0, 100), IoError::Invalid),
        (WRITE, Extent::new(0, (1 << 20) + 512), IoError::Invalid),
        (Op::Unmap, Extent::new(0, 0), IoError::Invalid),
    ];
    for (op, range, error) in cases {
        let slot = b.request(op, range);
        assert_eq!(b.answers(), [(slot, Err(error))], "{op:?} {range}");
        assert_eq!(b.out.pop(), Some(Output::Free { slot }));
    }
    assert!(b.wire.is_empty());
    b.assert_idle();
}

#[test]
fn a_write_is_answered_when_every_member_has_it() {
    let mut b = Bench::new(3);
    let slot = b.request(Op::Write { fua: true }, blocks(5, 2));
    for m in [A, B, C] {
        let t = b.one(m);
        assert_eq!(
            (t.op, t.range, t.fua, t.data),
            (OpCode::Write, blocks(5, 2), true, Data::Client { slot, from: 0 })
        );
    }
    b.answer(B, Status::Ok);
    b.answer(C, Status::Ok);
    assert!(b.answers().is_empty());
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    assert_eq!(b.out, [Output::Free { slot }]);
    b.assert_idle();
}

/// A bench with two members and one that is brought in sync.
fn filling() -> Bench {
    let mut b = Bench::new(2);
    b.apply(Input::LinkUp { member: C });
    b.switch(Switch::Fill { member: C });
    b.out.clear();
    b
}

#[test]
fn nobody_waits_for_who_is_filled_but_its_range_does() {
    let mut b = filling();
    let first = b.request(WRITE, blocks(0, 1));
    let second = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty());
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(first, Ok(()))]);
    b.answered(first);
    assert_eq!(b.wire.len(), 1, "the second waits for what C has not done");
    b.answer(C, Status::Ok);
    assert_eq!(b.one(C).data, Data::Client { slot: second, from: 0 });
}

#[test]
fn no_client_waits_for_a_flush_of_who_is_filled() {
    let mut b = filling();
    let slot = b.request(Op::Flush, Extent::default());
    assert!(b.to(C).is_empty());
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty());
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    assert_eq!(b.shared.flush_everywhere(), 1);
    b.assert_idle();

    // The conductor does, before it is a member.
    b.apply(Input::Message(ToQueue::Job(JobId(1), Job::Flush)));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!((b.reports(), b.shared.flush_everywhere()), (Vec::new(), 1));
    b.answer(C, Status::Ok);
    assert_eq!(b.reports(), [FromQueue::JobDone(JobId(1), crate::message::JobResult::Done { changed: 0 })]);
}

#[test]
fn who_is_filled_alone_answers_for_nobody() {
    let mut b = filling();
    b.request(WRITE, blocks(0, 1));
    b.answer(C, Status::Ok);
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty());
}

#[test]
fn a_failure_of_who_is_filled_concerns_no_client() {
    let mut b = filling();
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.link_down(C);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    b.switch(Switch::Forget { member: C });
    assert!(b.out.contains(&Output::Free { slot }));
    b.assert_idle();
}

#[test]
fn who_becomes_a_member_has_all_that_was_answered() {
    let mut b = filling();
    let given = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(given, Ok(()))]);
    b.answered(given);
    let switch = b.switch(Switch::Await { member: C });
    let waited_for = b.request(WRITE, blocks(1, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert!(b.answers().is_empty(), "from now on it counts");
    assert!(!b.reports().contains(&FromQueue::Switched(switch)));
    b.answer(C, Status::Ok);
    assert!(b.reports().contains(&FromQueue::Switched(switch)));
    b.answer(C, Status::Ok);
    assert_eq!(b.answers(), [(waited_for, Ok(()))]);
}

#[test]
fn the_range_is_held_until_the_answer_has_left() {
    let mut b = Bench::new(2);
    let first = b.request(WRITE, blocks(0, 1));
    let second = b.request(WRITE, blocks(0, 1));
    let read = b.request(Op::Read, blocks(0, 2));
    assert_eq!(b.wire.len(), 2, "only the first is sent");
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(first, Ok(()))]);
    assert!(b.wire.is_empty());
    b.answered(first);
    assert_eq!(b.one(A).data, Data::Client { slot: second, from: 0 });
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.answered(second);
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(second, Ok(())), (read, Ok(()))]);
    b.assert_idle();
}

/// A has it, and its link broke: its power may be gone, and what it had with it.
#[test]
fn a_write_is_not_answered_for_members_who_are_all_gone() {
    let mut b = Bench::new(2);
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.link_down(A);
    b.link_down(B);
    b.switch(Switch::Forget { member: B });
    assert!(b.answers().is_empty(), "nobody is known to have it");
    b.out.clear();
    b.join(A);
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    b.assert_idle();
}

#[test]
fn a_write_that_a_member_missed_waits_until_the_member_is_out() {
    let mut b = Bench::new(3);
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.link_down(C);
    b.answer(B, Status::Ok);
    let later = b.request(WRITE, blocks(1, 1));
    assert!(b.to(C).is_empty(), "nothing is sent where there is no link");
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.pass(1000, MemberSet::EMPTY.with(A).with(B));
    assert!(b.answers().is_empty());
    assert_eq!(b.reports(), [FromQueue::Failed(C, crate::message::Fault::Link)]);
    b.switch(Switch::StopReads { member: C });
    assert!(b.answers().is_empty());
    let id = b.switch(Switch::Forget { member: C });
    assert_eq!(b.answers(), [(slot, Ok(())), (later, Ok(()))]);
    assert!(b.reports().contains(&FromQueue::Switched(id)));
    b.answered(slot);
    b.answered(later);
    b.assert_idle();
}

#[test]
fn what_waits_for_a_member_is_sent_again_when_it_is_attached_again() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, blocks(0, 1));
    let flush = b.request(Op::Flush, Extent::default());
    let read = b.request(Op::Read, blocks(7, 1));
    b.link_down(A);
    let late = b.request(WRITE, blocks(3, 1));
    assert!(b.wire.is_empty() && b.answers().is_empty());
    b.apply(Input::LinkUp { member: A });
    assert!(b.wire.is_empty(), "not before it is attached");
    b.switch(Switch::Attach { member: A });
    let ops: Vec<_> = b.to(A).iter().map(|t| t.op).collect();
    assert_eq!(ops, [OpCode::Write, OpCode::Flush], "reads and new requests wait until it may be read from");
    b.switch(Switch::Promote { member: A });
    assert_eq!(b.to(A).len(), 4);
    b.answer(A, Status::Ok);
    let mut answers = b.answers();
    answers.sort_unstable_by_key(|a| a.0);
    assert_eq!(answers, [(slot, Ok(())), (flush, Ok(())), (read, Ok(())), (late, Ok(()))]);
    b.answered(slot);
    b.answered(late);
    b.assert_idle();
}

#[test]
fn an_error_of_one_member_is_reported_once_and_waited_out() {
    let mut b = Bench::new(2);
    let slot = b.request(WRITE, blocks(0, 1));
    b.request(WRITE, blocks(1, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Io);
    assert!(b.answers().is_empty());
    assert_eq!(b.reports(), [FromQueue::Failed(B, crate::message::Fault::Io)]);
    b.switch(Switch::Forget { member: B });
    assert_eq!(b.answers().len(), 2);
    assert!(b.out.contains(&Output::Disconnect { member: B }));
    assert!(!b.out.contains(&Output::Free { slot }));
}

#[test]
fn an_error_of_the_last_member_is_the_clients() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Io);
    assert_eq!(b.answers(), [(slot, Err(IoError::Io))]);
    assert!(b.reports().is_empty(), "nobody else could serve");
    b.answered(slot);
    b.assert_idle();
}

#[test]
fn a_broken_payload_costs_the_link_and_is_sent_again() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Corrupt);
    assert_eq!(b.reports(), [FromQueue::Failed(A, crate::message::Fault::Link)]);
    assert!(b.out.contains(&Output::Disconnect { member: A }));
    b.join(A);
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn an_answer_with_another_operation_costs_the_link() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    let t = b.one(A);
    b.apply(Input::Reply(Reply {
        member: A,
        tag: t.tag,
        op: OpCode::Unmap,
        status: Status::Ok,
        aux: 0,
        payload: 0,
    }));
    assert_eq!(b.reports(), [FromQueue::Failed(A, crate::message::Fault::Link)]);
}

#[test]
fn part_of_a_block_is_read_merged_and_written_under_one_claim() {
    let mut b = Bench::new(2);
    let slot = b.request(WRITE, Extent::new(4096 + 2 * SECTOR, SECTOR));
    let other = b.request(WRITE, blocks(1, 1));
    let read = b.one(A);
    assert_eq!((read.op, read.range), (OpCode::Read, blocks(1, 1)));
    b.answer(A, Status::Ok);
    let merge = Output::Merge { slot, at: 1024, from: 0, len: 512 };
    assert_eq!(b.out, [Output::Store { slot, append: false }, merge]);
    for m in [A, B] {
        let t = b.one(m);
        assert_eq!((t.op, t.range, t.data), (OpCode::Write, blocks(1, 1), Data::Stored { slot }));
        b.reply(t, Status::Ok);
    }
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    assert_eq!(b.one(A).data, Data::Client { slot: other, from: 0 });
}

#[test]
fn an_unaligned_write_takes_its_blocks_in_turn() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, Extent::new(4096 - SECTOR, SECTOR + 4096 + SECTOR));
    let mut steps = Vec::new();
    while let [t] = b.to(A)[..] {
        steps.push((t.op, t.range, t.data));
        b.reply(t, Status::Ok);
    }
    let stored = Data::Stored { slot };
    assert_eq!(
        steps,
        [
            (OpCode::Read, blocks(0, 1), Data::None),
            (OpCode::Write, blocks(0, 1), stored),
            (OpCode::Write, blocks(1, 1), Data::Client { slot, from: 512 }),
            (OpCode::Read, blocks(2, 1), Data::None),
            (OpCode::Write, blocks(2, 1), stored),
        ]
    );
    assert!(b.out.contains(&Output::Merge { slot, at: 3584, from: 0, len: 512 }));
    assert!(b.out.contains(&Output::Merge { slot, at: 0, from: 512 + 4096, len: 512 }));
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    b.assert_idle();
}

#[test]
fn long_zeroes_go_in_pieces_and_their_edges_are_merged() {
    let mut b = Bench::new(1);
    let slot = b.request(Op::Unmap, Extent::new(0, (2 << 20) + SECTOR));
    let mut steps = Vec::new();
    while let [t] = b.to(A)[..] {
        steps.push((t.op, t.range.offset, t.range.len));
        b.reply(t, Status::Ok);
    }
    let mib = 1 << 20;
    assert_eq!(
        steps,
        [
            (OpCode::Unmap, 0, mib),
            (OpCode::Unmap, mib, mib),
            (OpCode::Read, 2 * mib, 4096),
            (OpCode::Write, 2 * mib, 4096)
        ]
    );
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn a_piece_of_zeroes_lets_others_in_when_it_is_done() {
    let mut b = Bench::new(1);
    let zeroes = b.request(ZEROES, Extent::new(0, 2 << 20));
    let write = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    assert_eq!(b.to(A).len(), 2, "the second piece, and the write over the first");
    b.answer(A, Status::Ok);
    assert_eq!(b.answers().iter().map(|a| a.0).collect::<Vec<_>>(), [zeroes, write]);
}

#[test]
fn the_window_bounds_writes_beyond_the_oldest_incomplete_one() {
    let mut b = Bench::with(Config { depth: 500, ..config() }, 2);
    let oldest = b.request(WRITE, blocks(0, 1));
    let late = b.one(A);
    b.answer(B, Status::Ok);
    let mut done = 0;
    for n in 1..400 {
        b.request(WRITE, blocks(n, 1));
        for t in b.to(A).into_iter().filter(|t| *t != late).chain(b.to(B)).collect::<Vec<_>>() {
            b.reply(t, Status::Ok);
        }
        for (slot, result) in b.answers() {
            assert_eq!(result, Ok(()));
            b.answered(slot);
            done += 1;
        }
    }
    assert!(done < lh_wire::WRITE_WINDOW && done > lh_wire::WRITE_WINDOW / 2, "{done}");
    b.reply(late, Status::Ok);
    assert_eq!(b.answers(), [(oldest, Ok(()))]);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers().len(), 399 - done, "the others follow at once");
}

#[test]
fn bytes_bound_the_window_too() {
    let mut b = Bench::new(1);
    for n in 0..20 {
        b.request(WRITE, Extent::new(n << 20, 1 << 20));
    }
    assert_eq!(b.to(A).len() << 20, usize::try_from(lh_wire::WRITE_WINDOW_BYTES).unwrap());
    let first = b.to(A)[0];
    b.reply(first, Status::Ok);
    assert_eq!(b.to(A).len(), 16);
}

#[test]
fn flushes_that_come_meanwhile_share_the_next_one() {
    let mut b = Bench::new(2);
    let flush = |b: &mut Bench| b.request(Op::Flush, Extent::default());
    let first = flush(&mut b);
    let number = b.one(A).flush;
    let others: Vec<_> = (0..31).map(|_| flush(&mut b)).collect();
    assert_eq!(b.wire.len(), 2);
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty() && b.shared.flush_everywhere() < number);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(first, Ok(()))], "who came later may rely on later answers");
    assert_eq!(b.shared.flush_everywhere(), number);
    assert_eq!((b.wire.len(), b.one(A).flush), (2, number + 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers().iter().map(|a| a.0).collect::<Vec<_>>(), others);
    b.assert_idle();
}

#[test]
fn a_flush_waits_for_a_member_until_it_is_out() {
    let mut b = Bench::new(2);
    let slot = b.request(Op::Flush, Extent::default());
    b.answer(A, Status::Ok);
    b.answer(B, Status::Io);
    assert!(b.answers().is_empty());
    assert_eq!(b.reports(), [FromQueue::Failed(B, crate::message::Fault::Io)]);
    b.switch(Switch::Forget { member: B });
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    let last = b.request(Op::Flush, Extent::default());
    b.answer(A, Status::Io);
    assert_eq!(b.answers(), [(last, Err(IoError::Io))]);
    b.assert_idle();
}

/// A lost its power and its link, B only its link. A has nothing to sync when the flush is sent to it again, and is given what
/// it lacks before B is through.
#[test]
fn a_flush_beside_which_a_member_was_given_what_it_lacked_is_made_again() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    let slot = b.request(Op::Flush, Extent::default());
    b.answers();
    b.link_down(A);
    b.link_down(B);
    b.shared.put_in_doubt(0);
    b.join(A);
    b.join(B);
    b.answer(A, Status::Ok);
    b.shared.wrote(blocks(0, 1));
    b.shared.resolve(0);
    b.apply(Input::Message(ToQueue::ChunkResolved(0)));
    b.answer(B, Status::Ok);
    assert!(b.answers().is_empty(), "what A was given may be lost with its power");
    assert!(!b.shared.clearable(0, u64::MAX));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    assert!(b.shared.clearable(0, u64::MAX));
}

#[test]
fn headers_name_the_last_flush_complete_everywhere() {
    let mut b = Bench::new(1);
    b.request(Op::Flush, Extent::default());
    b.answer(A, Status::Ok);
    b.request(WRITE, blocks(0, 1));
    assert_eq!(b.one(A).flush, b.shared.flush_everywhere());
    assert!(b.one(A).flush > 0);
}

#[test]
fn a_younger_engine_silences_this_one() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    b.request(Op::Read, blocks(9, 1));
    b.answer(A, Status::Ok);
    b.out.clear();
    let t = b.one(B);
    b.reply(t, Status::Stale);
    assert_eq!(b.out, [Output::Report(FromQueue::Stale(B))]);
    b.wire.clear();
    b.out.clear();
    b.request(WRITE, blocks(3, 1));
    b.switch(Switch::Forget { member: B });
    b.pass(5000, MemberSet::EMPTY);
    assert!(b.out.is_empty() && b.wire.is_empty());
}

#[test]
fn what_a_member_had_done_before_its_link_broke_is_sent_again_as_long_as_it_is_not_done_everywhere() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.link_down(A);
    b.link_down(B);
    b.wire.clear();
    b.join(A);
    assert_eq!(b.one(A).op, OpCode::Write, "it may have lost its power");
    b.join(B);
    b.answer(B, Status::Ok);
    assert!(b.answers().is_empty());
    b.answer(A, Status::NoSpace);
    assert!(!b.table.is_idle(), "it may have been done before: nobody may see the one or the other");
}

/// The one member that has done it may have lost it with its power, and who is filled is none.
#[test]
fn a_write_is_not_answered_for_who_is_gone_because_only_a_filler_has_yet_to_do_it() {
    let mut b = filling();
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.link_down(A);
    b.switch(Switch::StopReads { member: B });
    b.switch(Switch::Forget { member: B });
    assert!(b.answers().is_empty());
    b.join(A);
    assert!(b.answers().is_empty());
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

/// The filler has done it, too. It is none, and may never be one, though it is about to.
#[test]
fn a_write_is_not_answered_for_who_is_gone_because_one_has_it_that_is_no_member_yet() {
    for awaited in [false, true] {
        let mut b = filling();
        if awaited {
            b.switch(Switch::Await { member: C });
        }
        let slot = b.request(WRITE, blocks(0, 1));
        b.answer(A, Status::Ok);
        b.answer(C, Status::Ok);
        b.link_down(A);
        b.switch(Switch::StopReads { member: B });
        b.switch(Switch::Forget { member: B });
        assert!(b.answers().is_empty(), "A may have lost it (awaited: {awaited})");
        b.join(A);
        assert!(b.answers().is_empty());
        b.answer(A, Status::Ok);
        assert_eq!(b.answers(), [(slot, Ok(()))]);
    }
}

#[test]
fn what_one_that_joins_has_done_alone_is_answered_once_it_is_a_member() {
    let mut b = filling();
    b.switch(Switch::Await { member: C });
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.link_down(A);
    b.link_down(B);
    b.answer(C, Status::Ok);
    for member in [A, B] {
        b.switch(Switch::Forget { member });
    }
    assert!(b.answers().is_empty());
    b.switch(Switch::Promote { member: C });
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    b.assert_idle();
}
