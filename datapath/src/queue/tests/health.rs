use super::*;
use crate::message::Fault;

/// All three answer a write every `gap` ms, each after its own time in ms; for `ms` in total.
fn load(b: &mut Bench, ms: u64, latency: [u64; 3]) {
    let mut due: Vec<(u64, Transmit)> = Vec::new();
    for step in 0..ms {
        b.now += MS;
        if step % 50 == 0 {
            b.apply(Input::Tick);
            b.answer_pings(MemberSet::EMPTY.with(A).with(B).with(C));
        }
        if step % 4 == 0 {
            b.request(WRITE, blocks((step / 4) % 4096, 1));
        }
        for t in b.wire.clone() {
            if t.op == OpCode::Write && !due.iter().any(|(_, d)| d.tag == t.tag && d.member == t.member) {
                due.push((b.now + latency[usize::from(t.member.0)] * MS, t));
            }
        }
        let now = b.now;
        let (ready, rest): (Vec<_>, Vec<_>) = due.into_iter().partition(|(at, _)| *at <= now);
        due = rest;
        for (_, t) in ready {
            if b.wire.contains(&t) {
                b.reply(t, Status::Ok);
            }
        }
        for (slot, _) in b.answers() {
            b.answered(slot);
        }
    }
}

#[test]
fn a_member_that_answers_nothing_is_hung_within_two_seconds() {
    let mut b = Bench::new(3);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.pass(900, MemberSet::EMPTY.with(A).with(B));
    assert!(b.reports().is_empty());
    b.pass(500, MemberSet::EMPTY.with(A).with(B));
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Hung)]);
    b.pass(5000, MemberSet::EMPTY.with(A).with(B));
    assert!(b.reports().is_empty(), "once");
}

/// It may have answered everything: what was read fills the memory that its answers would come to.
#[test]
fn silence_does_not_count_while_there_is_no_memory_to_hear_a_member() {
    let others = MemberSet::EMPTY.with(B).with(C);
    let mut b = Bench::new(3);
    b.request(Op::Read, blocks(0, 1));
    b.request(WRITE, blocks(1, 1));
    b.one(B);
    b.answer(B, Status::Ok);
    b.answer(C, Status::Ok);
    for _ in 0..12_000 / 50 {
        b.queue.starved(b.now, A);
        b.pass(50, others);
    }
    assert_eq!(b.reports(), []);
    b.pass(900, others);
    assert_eq!(b.reports(), []);
    b.pass(500, others);
    assert_eq!(b.reports(), [FromQueue::Failed(A, Fault::Hung)]);
}

/// What comes late, all at once, has waited for this process.
#[test]
fn a_member_that_is_heard_late_for_want_of_memory_is_not_slow() {
    for starved in [false, true] {
        let mut b = Bench::new(3);
        load(&mut b, 2000, [1, 1, 1]);
        for _ in 0..10 {
            if starved {
                b.queue.starved(b.now, C);
            }
            load(&mut b, 500, [1, 1, 50]);
        }
        let slow = [FromQueue::Failed(C, Fault::Slow)];
        assert_eq!(b.reports(), if starved { &[][..] } else { &slow });
    }
}

#[test]
fn reads_of_a_hung_member_go_to_another() {
    let mut b = Bench::new(2);
    b.request(Op::Read, blocks(0, 1));
    b.one(A);
    b.pass(1400, MemberSet::EMPTY.with(B));
    assert_eq!(b.reports(), [FromQueue::Failed(A, Fault::Hung)]);
    assert_eq!(b.one(B).op, OpCode::Read);
}

#[test]
fn if_nobody_answers_nobody_is_hung_before_all_are() {
    for members in [1, 3] {
        let mut b = Bench::new(members);
        b.request(Op::Read, blocks(0, 1));
        b.request(WRITE, blocks(1, 1));
        b.pass(7_900, MemberSet::EMPTY);
        assert!(b.reports().is_empty(), "the machine may be busy");
        b.pass(200, MemberSet::EMPTY);
        let hung = |m| FromQueue::Failed(m, Fault::Hung);
        assert_eq!(b.reports(), [A, B, C].map(hung)[..usize::from(members)], "{members} members");
        b.pass(10_000, MemberSet::EMPTY);
        assert!(b.reports().is_empty(), "once");
    }
}

/// Nobody can be put out, and a host that has lost its power says nothing: TCP alone would try again ever more seldom.
#[test]
fn who_is_needed_and_answers_nothing_loses_its_session_in_the_end() {
    let mut b = Bench::new(2);
    b.shared.set_members_min(2);
    b.request(WRITE, blocks(0, 1));
    b.answer(B, Status::Ok);
    b.pass(7_900, MemberSet::EMPTY.with(B));
    assert!(b.reports().is_empty(), "it may be back soon, and nobody goes on without it");
    b.pass(200, MemberSet::EMPTY.with(B));
    assert_eq!(b.reports(), [FromQueue::Failed(A, Fault::Hung)]);
    b.pass(10_000, MemberSet::EMPTY.with(B));
    assert!(b.reports().is_empty(), "once");
}

/// Nobody is read from before the volume is open. What is made equal until then would be waited for, for ever.
#[test]
fn if_nobody_answers_a_repair_before_the_volume_is_open_all_are_hung() {
    let mut b = Bench::bare(config());
    for m in [A, B] {
        b.apply(Input::LinkUp { member: m });
        b.switch(Switch::Attach { member: m });
    }
    let (source, targets) = (A, MemberSet::EMPTY.with(B));
    let others = MemberSet::EMPTY;
    let range = blocks(0, 16);
    let (compare, merged, repair) = (false, false, false);
    let copy = Job::Equalise { layer: None, range, source, others, targets, compare, merged, repair };
    b.apply(Input::Message(ToQueue::Job(JobId(1), copy)));
    b.reports();
    b.pass(7_900, MemberSet::EMPTY);
    assert!(b.reports().is_empty(), "the machine may be busy");
    b.pass(500, MemberSet::EMPTY);
    let hung = |m| FromQueue::Failed(m, Fault::Hung);
    let ended = FromQueue::JobDone(JobId(1), crate::message::JobResult::Failed { member: A });
    assert_eq!(b.reports(), [hung(A), ended, hung(B)]);
}

#[test]
fn a_last_word_begins_the_silence_anew() {
    let mut b = Bench::new(1);
    b.request(WRITE, blocks(0, 1));
    b.pass(6000, MemberSet::EMPTY);
    b.pass(50, MemberSet::EMPTY.with(A));
    b.pass(6000, MemberSet::EMPTY);
    assert!(b.reports().is_empty());
}

#[test]
fn a_member_that_answers_pings_is_not_hung() {
    let mut b = Bench::new(3);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.pass(4000, MemberSet::EMPTY.with(A).with(B).with(C));
    assert!(b.reports().is_empty());
}

#[test]
fn a_disk_that_stands_still_under_a_single_write_is_found() {
    let mut b = Bench::new(3);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.pass(6000, MemberSet::EMPTY.with(A).with(B).with(C));
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Slow)]);
}

#[test]
fn a_flush_that_only_one_member_does_not_end_is_found() {
    let mut b = Bench::new(3);
    b.request(Op::Flush, Extent::default());
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    let all = MemberSet::EMPTY.with(A).with(B).with(C);
    b.pass(19_000, all);
    assert!(b.reports().is_empty(), "a flush may take long");
    b.pass(2000, all);
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Slow)]);
}

/// It answers pings, and clients wait until the chunk is equal.
#[test]
fn a_disk_that_stands_still_under_a_copy_is_found() {
    let all = MemberSet::EMPTY.with(A).with(B).with(C);
    for is_source in [true, false] {
        let mut b = Bench::new(3);
        let (source, targets, others) = (A, all.without(A), MemberSet::EMPTY);
        let (range, compare, merged, repair) = (blocks(0, 16), false, false, false);
        let copy = Job::Equalise { layer: None, range, source, others, targets, compare, merged, repair };
        b.apply(Input::Message(ToQueue::Job(JobId(1), copy)));
        if !is_source {
            b.answer(A, Status::Ok);
            b.answer(B, Status::Ok);
        }
        b.pass(19_000, all);
        assert!(b.reports().is_empty(), "a fold may be in its way");
        b.pass(2000, all);
        let ended = FromQueue::JobDone(JobId(1), crate::message::JobResult::Failed { member: A });
        let found = FromQueue::Failed(if is_source { A } else { C }, Fault::Slow);
        assert_eq!(b.reports(), [vec![found], vec![ended; usize::from(is_source)]].concat());
    }
}

#[test]
fn a_slow_member_that_stays_and_then_hangs_is_reported_again() {
    let mut b = Bench::new(3);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.pass(5500, MemberSet::EMPTY.with(A).with(B).with(C));
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Slow)]);
    b.pass(2000, MemberSet::EMPTY.with(A).with(B));
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Hung)]);
    b.link_down(C);
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Link)]);
}

#[test]
fn a_slow_member_that_stays_is_judged_anew() {
    let mut b = Bench::new(3);
    load(&mut b, 2000, [1, 1, 1]);
    load(&mut b, 5000, [1, 1, 50]);
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Slow)]);
    load(&mut b, 10_000, [1, 1, 50]);
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Slow)]);
}

#[test]
fn a_gap_in_the_own_ticks_proves_nothing() {
    let mut b = Bench::new(3);
    b.request(WRITE, blocks(0, 1));
    b.pass(100, MemberSet::EMPTY);
    b.now += 30_000 * MS;
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.pass(500, MemberSet::EMPTY.with(A).with(B));
    assert!(b.reports().is_empty());
}

#[test]
fn a_member_fifty_times_slower_is_reported_within_five_seconds() {
    let mut b = Bench::new(3);
    load(&mut b, 2000, [1, 1, 1]);
    load(&mut b, 5000, [1, 1, 50]);
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Slow)]);
}

#[test]
fn a_busy_machine_makes_nobody_slow() {
    let mut b = Bench::new(3);
    load(&mut b, 2000, [1, 1, 1]);
    load(&mut b, 8000, [150, 200, 350]);
    assert!(b.reports().is_empty());
}

#[test]
fn five_times_slower_is_not_slow_nor_is_anything_below_the_floor() {
    let mut b = Bench::new(3);
    load(&mut b, 8000, [8, 8, 40]);
    assert!(b.reports().is_empty());
    let mut b = Bench::new(3);
    load(&mut b, 8000, [1, 1, 14]);
    assert!(b.reports().is_empty());
}

#[test]
fn nobody_is_put_out_below_the_quorum() {
    let mut b = Bench::new(2);
    b.shared.set_members_min(2);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.pass(8000, MemberSet::EMPTY.with(A));
    assert!(b.reports().is_empty());
    b.join(C);
    b.switches += 1;
    b.reports();
    b.pass(2500, MemberSet::EMPTY.with(A).with(C));
    assert_eq!(b.reports(), [FromQueue::Failed(B, Fault::Hung)]);
}

/// Of a majority of four, three have to be left; of three, two.
#[test]
fn how_many_have_to_be_left_changes_with_the_replicas_of_the_volume() {
    let mut b = Bench::new(3);
    b.shared.set_members_min(3);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    let others = MemberSet::EMPTY.with(A).with(B);
    b.pass(6000, others);
    assert!(b.reports().is_empty(), "it is needed");
    b.shared.set_members_min(2);
    b.pass(100, others);
    assert_eq!(b.reports(), [FromQueue::Failed(C, Fault::Hung)]);
}

#[test]
fn an_idle_queue_wants_no_ticks() {
    let mut b = Bench::new(3);
    let slot = b.request(WRITE, blocks(0, 1));
    assert!(b.queue.wants_tick(b.now));
    for m in [A, B, C] {
        b.answer(m, Status::Ok);
    }
    b.answered(slot);
    assert!(b.queue.wants_tick(b.now), "the windows go on between two requests");
    assert!(!b.queue.wants_tick(b.now + 1100 * MS));
}

/// A read every 4 ms is answered after so many ms, for `ms` in total, by whoever is asked.
fn reads(b: &mut Bench, ms: u64, latency: u64) {
    let mut due: Vec<(u64, Transmit)> = Vec::new();
    for step in 0..ms {
        b.now += MS;
        if step % 50 == 0 {
            b.apply(Input::Tick);
            b.answer_pings(MemberSet::EMPTY.with(A).with(B));
        }
        if step % 4 == 0 {
            b.request(Op::Read, blocks((step / 4) % 4096, 1));
        }
        for t in b.wire.clone() {
            if t.op == OpCode::Read && !due.iter().any(|(_, d)| *d == t) {
                due.push((b.now + latency * MS, t));
            }
        }
        while let Some(at) = due.iter().position(|(at, _)| *at <= b.now) {
            b.reply(due.remove(at).1, Status::Ok);
        }
        b.answers();
    }
}

/// A is near, and read from. While it was not, B was, of which little was wanted; since then all is read from A, and now more than its
/// disk gives at once.
#[test]
fn reads_are_not_compared_with_those_of_another_time() {
    let mut b = Bench::new(2);
    b.shared.set_far(B, true);
    b.switch(Switch::StopReads { member: A });
    reads(&mut b, 3000, 1);
    b.switch(Switch::Promote { member: A });
    reads(&mut b, 12_000, 1);
    b.reports();
    reads(&mut b, 8000, 40);
    assert_eq!(b.reports(), []);
}

#[test]
fn a_member_that_reads_far_slower_than_the_others_is_found() {
    let mut b = Bench::new(2);
    b.shared.set_far(B, true);
    b.switch(Switch::StopReads { member: A });
    reads(&mut b, 3000, 1);
    b.switch(Switch::Promote { member: A });
    b.reports();
    reads(&mut b, 6000, 40);
    assert_eq!(b.reports(), [FromQueue::Failed(A, Fault::Slow)]);
}
