use super::*;
use crate::message::JobResult;

fn equalise(layer: Option<LayerRef>) -> Job {
    Job::Equalise {
        layer,
        range: blocks(0, 16),
        source: A,
        others: MemberSet::EMPTY,
        targets: MemberSet::EMPTY.with(B).with(C),
        compare: false,
        merged: false,
        repair: false,
    }
}

fn job(b: &mut Bench, id: u64, job: Job) {
    b.apply(Input::Message(ToQueue::Job(JobId(id), job)));
}

fn done(id: u64, result: JobResult) -> FromQueue {
    FromQueue::JobDone(JobId(id), result)
}

#[test]
fn a_copy_holds_its_range_from_the_read_to_the_last_write() {
    let mut b = Bench::bare(config());
    for m in [A, B, C] {
        b.apply(Input::LinkUp { member: m });
    }
    job(&mut b, 1, equalise(None));
    let read = b.one(A);
    assert_eq!((read.op, read.range, read.data), (OpCode::ReadLayer, blocks(0, 16), Data::LayerName(None)));
    b.reply_with(read, Status::Ok, 21);
    let store = b.out.iter().find_map(|o| match o {
        Output::Store { slot, append: false } => Some(*slot),
        _ => None,
    });
    let slot = store.expect("the image is kept");
    for m in [A, B, C] {
        b.switch(Switch::Attach { member: m });
        b.switch(Switch::Promote { member: m });
    }
    b.switch(Switch::Resume);
    b.hear_all();
    b.request(WRITE, blocks(3, 1));
    for m in [B, C] {
        let put = b.one(m);
        assert_eq!((put.op, put.data, put.aux), (OpCode::PutLayer, Data::Stored { slot }, 21));
        b.reply_with(put, Status::Ok, 4);
    }
    assert!(b.reports().contains(&done(1, JobResult::Done { changed: 8 })));
    assert_eq!(b.to(B).len(), 1, "the write goes on");
}

#[test]
fn a_copy_of_another_layer_needs_no_claim() {
    let mut b = Bench::new(3);
    b.request(WRITE, blocks(0, 1));
    job(&mut b, 1, equalise(Some(LayerRef(7))));
    let read = b.to(A)[1];
    assert_eq!(read.data, Data::LayerName(Some(LayerRef(7))));
}

#[test]
fn a_copy_ends_with_the_member_that_failed_after_the_last_answer() {
    let mut b = Bench::new(3);
    job(&mut b, 1, equalise(None));
    b.answer(A, Status::Ok);
    b.link_down(B);
    assert!(!b.reports().contains(&done(1, JobResult::Failed { member: B })), "C may still write");
    b.answer(C, Status::Ok);
    assert_eq!(b.reports(), [done(1, JobResult::Failed { member: B })]);
    job(&mut b, 2, equalise(None));
    assert_eq!(b.reports(), [done(2, JobResult::Failed { member: B })]);
    b.assert_idle();
}

#[test]
fn a_copy_whose_source_fails_ends() {
    let mut b = Bench::new(3);
    job(&mut b, 1, equalise(None));
    b.answer(A, Status::Io);
    assert_eq!(b.reports(), [done(1, JobResult::Failed { member: A })]);
    job(&mut b, 2, equalise(None));
    b.link_down(A);
    assert!(b.reports().contains(&done(2, JobResult::Failed { member: A })));
    b.assert_idle();
}

#[test]
fn a_copy_that_waits_behind_a_write_to_a_lost_member_ends_at_once() {
    let mut b = Bench::new(3);
    let slot = b.request(WRITE, blocks(0, 1));
    job(&mut b, 1, equalise(None));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.link_down(C);
    assert!(b.reports().contains(&done(1, JobResult::Failed { member: C })));
    b.switch(Switch::Forget { member: C });
    b.answers();
    b.answered(slot);
    assert!(
        b.wire.is_empty() && !b.reports().iter().any(|r| matches!(r, FromQueue::JobDone(..))),
        "said once"
    );
    b.assert_idle();
}

#[test]
fn jobs_beyond_the_slots_wait_their_turn() {
    let mut b = Bench::new(3);
    for n in 0..20 {
        job(
            &mut b,
            n,
            Job::Equalise {
                layer: None,
                range: blocks(n, 1),
                source: A,
                others: MemberSet::EMPTY,
                targets: MemberSet::EMPTY.with(B),
                compare: false,
                merged: false,
                repair: false,
            },
        );
    }
    assert_eq!(b.to(A).len(), usize::from(JOB_SLOTS));
    for _ in 0..20 {
        b.answer(A, Status::Ok);
        b.answer(B, Status::Ok);
    }
    assert_eq!(b.reports().len(), 20);
    b.assert_idle();
}

#[test]
fn marks_are_taken_back_only_if_still_clearable_under_the_claim() {
    let mut b = Bench::new(2);
    let chunk = Extent::new(0, 4 << 20);
    let write = |b: &mut Bench| {
        let slot = b.request(WRITE, blocks(0, 1));
        b.answer(A, Status::Ok);
        b.answer(B, Status::Ok);
        b.answered(slot);
        b.out.clear();
    };
    write(&mut b);
    job(&mut b, 1, Job::ClearIntent { range: chunk, flush: u64::MAX });
    assert_eq!(b.reports(), [done(1, JobResult::Skipped)], "not flushed");
    job(&mut b, 2, Job::Flush);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.reports(), [done(2, JobResult::Done { changed: 0 })]);
    let covered = b.shared.flush_everywhere();
    job(&mut b, 4, Job::ClearIntent { range: chunk, flush: covered - 1 });
    assert_eq!(b.reports(), [done(4, JobResult::Skipped)], "the flush that covers it is another one");
    job(&mut b, 3, Job::ClearIntent { range: chunk, flush: covered });
    assert_eq!((b.one(A).op, b.one(B).range), (OpCode::ClearIntent, chunk));
    let other = b.request(WRITE, blocks(512, 1));
    assert_eq!(b.wire.len(), 2, "a write into the chunk waits");
    b.answer(A, Status::Ok);
    assert!(b.shared.clearable(0, covered));
    b.answer(B, Status::Ok);
    assert_eq!(b.reports(), [done(3, JobResult::Done { changed: 0 })]);
    assert!(!b.shared.clearable(0, u64::MAX));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.answered(other);
    assert!(b.shared.unflushed(0));
    b.assert_idle();
}

#[test]
fn no_mark_is_taken_back_of_a_chunk_in_doubt() {
    let mut b = Bench::new(1);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answered(0);
    job(&mut b, 1, Job::Flush);
    b.answer(A, Status::Ok);
    assert!(b.shared.clearable(0, u64::MAX));
    b.shared.put_in_doubt(0);
    b.reports();
    job(&mut b, 2, Job::ClearIntent { range: Extent::new(0, 4 << 20), flush: u64::MAX });
    assert_eq!(b.reports(), [done(2, JobResult::Skipped)]);
}

#[test]
fn a_flush_job_does_not_wait_for_a_member_to_be_put_out() {
    let mut b = Bench::new(2);
    let client = b.request(Op::Flush, Extent::default());
    b.answer(A, Status::Ok);
    job(&mut b, 1, Job::Flush);
    b.link_down(B);
    assert!(!b.reports().contains(&done(1, JobResult::Failed { member: B })), "it is in the next batch");
    b.switch(Switch::Forget { member: B });
    assert_eq!(b.answers(), [(client, Ok(()))]);
    b.reports();
    b.answer(A, Status::Ok);
    assert_eq!(b.reports(), [done(1, JobResult::Done { changed: 0 })]);
    job(&mut b, 2, Job::Flush);
    b.link_down(A);
    assert!(b.reports().contains(&done(2, JobResult::Failed { member: A })));
}

#[test]
fn control_requests_are_answered_or_lost() {
    let mut b = Bench::bare(config());
    let lost = FromQueue::ControlLost(ControlId(1), A);
    b.apply(Input::Message(ToQueue::Control(ControlId(1), A)));
    assert_eq!(b.reports(), [lost]);
    b.apply(Input::LinkUp { member: A });
    b.apply(Input::Message(ToQueue::Control(ControlId(2), A)));
    b.answer(A, Status::Refused);
    assert_eq!(b.out, [Output::ControlReply { id: ControlId(2), member: A, status: Status::Refused }]);
    b.apply(Input::Message(ToQueue::Control(ControlId(1), A)));
    b.link_down(A);
    assert!(b.reports().contains(&lost));
}

fn compared() -> Job {
    Job::Equalise {
        layer: None,
        range: blocks(0, 32),
        source: A,
        others: MemberSet::EMPTY,
        targets: MemberSet::EMPTY.with(B).with(C),
        compare: true,
        merged: false,
        repair: false,
    }
}

#[test]
fn a_comparison_that_finds_nothing_sends_nothing() {
    let mut b = Bench::new(3);
    b.apply(Input::Message(ToQueue::Job(JobId(1), compared())));
    let digest = b.one(A);
    assert_eq!(
        (digest.op, digest.range, digest.data),
        (OpCode::DigestLayer, blocks(0, 32), Data::LayerName(None))
    );
    b.reply(digest, Status::Ok);
    for m in [B, C] {
        let compare = b.one(m);
        assert_eq!((compare.op, compare.range), (OpCode::CompareLayer, blocks(0, 32)));
        assert!(matches!(compare.data, Data::Stored { .. }));
        b.reply_with(compare, Status::Ok, 0);
    }
    assert_eq!(b.reports(), [FromQueue::JobDone(JobId(1), JobResult::Done { changed: 0 })]);
    b.assert_idle();
}

#[test]
fn what_differs_on_any_target_is_copied_and_nothing_else_while_the_range_is_held() {
    let mut b = Bench::new(3);
    b.apply(Input::Message(ToQueue::Job(JobId(1), compared())));
    b.answer(A, Status::Ok);
    let write = b.request(WRITE, blocks(31, 1));
    b.reply_with(b.one(B), Status::Ok, 0b110);
    b.reply_with(b.one(C), Status::Ok, 1 << 31);
    for range in [blocks(1, 2), blocks(31, 1)] {
        let read = b.one(A);
        assert_eq!((read.op, read.range), (OpCode::ReadLayer, range));
        b.reply_with(read, Status::Ok, 32);
        for m in [B, C] {
            let put = b.one(m);
            assert_eq!((put.op, put.range, put.aux), (OpCode::PutLayer, range, 32));
            b.reply_with(put, Status::Ok, 1);
        }
    }
    assert_eq!(b.reports(), [FromQueue::JobDone(JobId(1), JobResult::Done { changed: 4 })]);
    for m in [A, B, C] {
        assert_eq!(b.one(m).op, OpCode::Write, "the client's write had to wait");
        b.answer(m, Status::Ok);
    }
    b.answered(write);
    b.assert_idle();
}

#[test]
fn a_comparison_ends_when_a_target_is_lost() {
    let mut b = Bench::new(3);
    b.apply(Input::Message(ToQueue::Job(JobId(1), compared())));
    b.answer(A, Status::Ok);
    b.link_down(B);
    b.reply_with(b.one(C), Status::Ok, u32::MAX);
    let done = FromQueue::JobDone(JobId(1), JobResult::Failed { member: B });
    assert!(b.reports().contains(&done));
    b.assert_idle();
}

#[test]
fn a_comparison_alone_tells_and_changes_nothing() {
    let mut b = Bench::new(3);
    let (range, targets) = (blocks(0, 32), MemberSet::EMPTY.with(B).with(C));
    job(&mut b, 1, Job::Compare { layer: None, range, source: A, targets });
    let digest = b.one(A);
    assert_eq!((digest.op, digest.verify), (OpCode::DigestLayer, true));
    b.reply_with(digest, Status::Ok, 0b1000);
    for (m, bits) in [(B, 0b1), (C, 0)] {
        let compare = b.one(m);
        assert_eq!((compare.op, compare.verify), (OpCode::CompareLayer, true));
        b.reply_with(compare, Status::Ok, bits);
    }
    assert_eq!(b.reports(), [done(1, JobResult::Compared { parts: 0b1001 })]);
}

#[test]
fn a_comparison_of_the_head_meets_no_write() {
    let mut b = Bench::new(2);
    let (range, targets) = (blocks(0, 32), MemberSet::EMPTY.with(B));
    let first = b.request(WRITE, blocks(3, 1));
    job(&mut b, 1, Job::Compare { layer: None, range, source: A, targets });
    assert_eq!(b.one(A).op, OpCode::Write, "what is on its way would look like a difference");
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.answered(first);
    assert_eq!(b.one(A).op, OpCode::DigestLayer);
    b.request(WRITE, blocks(3, 1));
    assert_eq!(b.wire.len(), 1, "and what comes now waits");
}

#[test]
fn a_block_is_verified_on_one_member() {
    let mut b = Bench::new(3);
    job(&mut b, 1, Job::Verify { layer: Some(LayerRef(4)), range: blocks(0, 16), member: C });
    let verify = b.one(C);
    assert_eq!((verify.op, verify.data), (OpCode::VerifyLayer, Data::LayerName(Some(LayerRef(4)))));
    b.reply_with(verify, Status::Ok, 0xffff_0010);
    let verified = lh_wire::Verified { rotten: 0x10, known: 0xffff };
    assert_eq!(b.reports(), [done(1, JobResult::Verified(verified))]);
}

#[test]
fn a_repair_reads_what_is_sound_or_nothing() {
    let mut b = Bench::new(3);
    let layer = Some(LayerRef(4));
    let (range, targets) = (blocks(0, 4), MemberSet::EMPTY.with(B));
    let repair = Job::Equalise {
        layer,
        range,
        source: A,
        others: MemberSet::EMPTY,
        targets,
        compare: false,
        merged: false,
        repair: true,
    };
    job(&mut b, 1, repair);
    assert!(b.one(A).verify);
    let write = b.request(WRITE, blocks(1, 1));
    assert!(b.to(C).is_empty(), "a repair holds its range, in whatever layer");
    b.answer(A, Status::Rotten);
    assert_eq!(b.reports(), [done(1, JobResult::Failed { member: A })]);
    for m in [A, B, C] {
        b.answer(m, Status::Ok);
    }
    b.answered(write);
    b.assert_idle();
}

#[test]
fn a_source_that_is_lost_while_others_compare_ends_the_copy() {
    let mut b = Bench::new(3);
    b.apply(Input::Message(ToQueue::Job(JobId(1), compared())));
    b.reply(b.one(A), Status::Ok);
    let asked = [b.one(B), b.one(C)];
    b.link_down(A);
    assert!(!b.reports().contains(&done(1, JobResult::Failed { member: A })), "others are still asked");
    for compare in asked {
        b.reply_with(compare, Status::Ok, 1);
    }
    assert!(b.reports().contains(&done(1, JobResult::Failed { member: A })));
}

/// What does not fit the source's checksums is not copied, if another member holds the same.
#[test]
fn rot_of_the_source_is_passed_over() {
    let mut b = Bench::new(4);
    let (layer, range, targets) = (Some(LayerRef(4)), blocks(0, 32), MemberSet::EMPTY.with(MemberId(3)));
    let others = MemberSet::EMPTY.with(B).with(C);
    let (compare, merged, repair) = (true, false, false);
    job(&mut b, 1, Job::Equalise { layer, range, source: A, others, targets, compare, merged, repair });
    b.reply_with(b.one(A), Status::Ok, 0b1000);
    b.reports();
    // Two parts differ, of which the first is rotten on two members.
    b.reply_with(b.one(MemberId(3)), Status::Ok, 0b101000);
    for m in [A, B] {
        let read = b.one(m);
        assert_eq!((read.op, read.verify, read.range), (OpCode::ReadLayer, true, blocks(3, 1)));
        b.reply(read, Status::Rotten);
        assert_eq!(b.reports(), [FromQueue::Rotten(m, blocks(3, 1))]);
    }
    let read = b.one(C);
    assert_eq!((read.op, read.verify, read.range), (OpCode::ReadLayer, true, blocks(3, 1)));
    b.reply_with(read, Status::Ok, 32);
    let put = b.one(MemberId(3));
    assert_eq!((put.op, put.verify), (OpCode::PutLayer, false));
    b.reply_with(put, Status::Ok, 1);
    let read = b.one(A);
    assert_eq!((read.op, read.verify, read.range), (OpCode::ReadLayer, true, blocks(5, 1)));
    b.reply_with(read, Status::Ok, 32);
    b.reply_with(b.one(MemberId(3)), Status::Ok, 1);
    assert_eq!(b.reports(), [done(1, JobResult::Done { changed: 2 })]);
    b.assert_idle();
}

/// What the source's disk does not give another member does that holds the same, be it to be summed up or to be copied.
#[test]
fn what_the_source_cannot_read_is_taken_from_who_holds_the_same() {
    let mut b = Bench::new(3);
    let (layer, range, targets) = (Some(LayerRef(4)), blocks(0, 32), MemberSet::EMPTY.with(C));
    let (others, compare, merged, repair) = (MemberSet::EMPTY.with(B), true, false, false);
    job(&mut b, 1, Job::Equalise { layer, range, source: A, others, targets, compare, merged, repair });
    b.reply(b.one(A), Status::Io);
    assert_eq!(b.reports(), [FromQueue::Unreadable(A, range)]);
    let digest = b.one(B);
    assert_eq!((digest.op, digest.range), (OpCode::DigestLayer, range));
    b.reply_with(digest, Status::Ok, 0);
    b.reply_with(b.one(C), Status::Ok, 0b1000);
    b.reply(b.one(A), Status::Io);
    assert_eq!(b.reports(), [FromQueue::Unreadable(A, blocks(3, 1))]);
    let read = b.one(B);
    assert_eq!((read.op, read.range), (OpCode::ReadLayer, blocks(3, 1)));
    b.reply_with(read, Status::Ok, 32);
    b.reply_with(b.one(C), Status::Ok, 1);
    assert_eq!(b.reports(), [done(1, JobResult::Done { changed: 1 })]);
    b.assert_idle();
    // Without another one it fails.
    let others = MemberSet::EMPTY;
    job(&mut b, 2, Job::Equalise { layer, range, source: A, others, targets, compare, merged, repair });
    b.reply(b.one(A), Status::Io);
    assert_eq!(b.reports(), [done(2, JobResult::Failed { member: A })]);
}

/// Members become equal whatever the source's checksums say: which of them is right is for a scrub.
#[test]
fn a_copy_of_rot_is_made_and_told() {
    let mut b = Bench::new(2);
    let (layer, range, targets) = (Some(LayerRef(4)), blocks(0, 32), MemberSet::EMPTY.with(B));
    let copy = Job::Equalise {
        layer,
        range,
        source: A,
        others: MemberSet::EMPTY,
        targets,
        compare: true,
        merged: false,
        repair: false,
    };
    job(&mut b, 1, copy);
    b.reply_with(b.one(A), Status::Ok, 0b1000);
    assert_eq!(b.reports(), [FromQueue::Rotten(A, blocks(3, 1))]);
    b.reply_with(b.one(B), Status::Ok, 0b1000);
    let read = b.one(A);
    assert_eq!((read.op, read.verify, read.range), (OpCode::ReadLayer, true, blocks(3, 1)));
    b.reply(read, Status::Rotten);
    assert_eq!(b.reports(), [FromQueue::Rotten(A, blocks(3, 1))]);
    let read = b.one(A);
    assert_eq!((read.op, read.verify, read.range), (OpCode::ReadLayer, false, blocks(3, 1)));
    b.reply_with(read, Status::Ok, 32);
    let put = b.one(B);
    assert_eq!((put.op, put.verify), (OpCode::PutLayer, true), "what is sound on the target stays");
    b.reply_with(put, Status::Ok, 1);
    assert_eq!(b.reports(), [done(1, JobResult::Done { changed: 1 })]);
    b.assert_idle();
}

/// Of members that are made equal any that has all that was answered gives the bytes, and whoever could not read them gets them.
#[test]
fn whom_a_part_is_read_from_is_the_only_member_that_does_not_get_it() {
    let mut b = Bench::new(3);
    let (layer, range, all) = (Some(LayerRef(4)), blocks(0, 4), MemberSet::EMPTY.with(A).with(B).with(C));
    let (others, compare, repair) = (MemberSet::EMPTY.with(B), false, false);
    for (id, merged, got_by) in [(1, false, vec![A, C]), (2, true, vec![A, B, C])] {
        job(
            &mut b,
            id,
            Job::Equalise { layer, range, source: A, others, targets: all, compare, merged, repair },
        );
        b.reply(b.one(A), Status::Io);
        assert_eq!(b.reports(), [FromQueue::Unreadable(A, range)]);
        b.reply_with(b.one(B), Status::Ok, 32);
        for m in [A, B, C] {
            assert_eq!(!b.to(m).is_empty(), got_by.contains(&m), "{m:?}, merged: {merged}");
        }
        for m in &got_by {
            assert_eq!(b.one(*m).op, OpCode::PutLayer);
            b.reply_with(b.one(*m), Status::Ok, 1);
        }
        let changed = u64::try_from(got_by.len()).unwrap();
        assert_eq!(b.reports(), [done(id, JobResult::Done { changed })]);
    }
    // Nobody else has what the others have lost with their hosts' power.
    let others = MemberSet::EMPTY;
    let copy =
        Job::Equalise { layer, range, source: A, others, targets: all, compare, merged: false, repair };
    job(&mut b, 3, copy);
    b.reply(b.one(A), Status::Io);
    assert_eq!(b.reports(), [done(3, JobResult::Failed { member: A })]);
    b.assert_idle();
}

/// What is read through several layers is compared with the checksums of each. Without a sound copy anywhere, whoever sends it leaves out
/// what is rotten, and that stays as it is.
#[test]
fn rot_below_the_head_is_not_copied_into_heads() {
    let mut b = Bench::new(3);
    let (layer, range, targets) = (None, blocks(0, 32), MemberSet::EMPTY.with(A).with(B).with(C));
    let (compare, merged, repair) = (false, true, false);
    for (id, others, asked) in [
        (1, MemberSet::EMPTY.with(B), vec![(A, true), (B, true)]),
        (2, MemberSet::EMPTY, vec![(A, true), (A, false)]),
    ] {
        job(&mut b, id, Job::Equalise { layer, range, source: A, others, targets, compare, merged, repair });
        for (n, (member, verify)) in asked.iter().enumerate() {
            let read = b.one(*member);
            assert_eq!((read.op, read.aux, read.verify), (OpCode::ReadLayer, lh_wire::MERGED, *verify));
            if n == 0 {
                b.reply(read, Status::Rotten);
                assert_eq!(b.reports(), [FromQueue::Rotten(A, range)]);
            } else {
                b.reply_with(read, Status::Ok, 32);
            }
        }
        for m in [A, B, C] {
            let put = b.one(m);
            assert_eq!((put.op, put.verify), (OpCode::PutLayer, id == 2));
            b.reply_with(put, Status::Ok, 1);
        }
        assert_eq!(b.reports(), [done(id, JobResult::Done { changed: 3 })]);
    }
    b.assert_idle();
}
