use std::sync::atomic::Ordering::Relaxed;

use lh_wire::IN_PART;

use super::*;
use crate::message::Fault;

const ALL: MemberSet = MemberSet::EMPTY.with(A).with(B).with(C);

#[test]
fn while_all_are_full_a_write_waits_outside_and_is_tried_every_second() {
    let mut b = Bench::new(2);
    let slot = b.request(WRITE, blocks(0, 1));
    let mut tries = 0;
    for _ in 0..60 {
        tries += b.to(A).len();
        b.answer(A, Status::NoSpace);
        b.answer(B, Status::NoSpace);
        assert!(b.table.is_idle(), "nothing was changed, so nothing is held");
        b.pass(500, ALL);
    }
    assert!((28..=31).contains(&tries), "{tries}");
    assert!(b.reports().is_empty() && b.answers().is_empty());
    assert!(b.queue.stats().starved.load(Relaxed), "somebody has to be told why nothing is answered");
    b.pass(1000, ALL);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    b.assert_idle();
    assert!(!b.queue.stats().starved.load(Relaxed));
}

#[test]
fn a_full_disk_does_not_unmake_what_was_done_before_the_link_broke() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, blocks(0, 1));
    b.link_down(A);
    b.join(A);
    b.answer(A, Status::NoSpace);
    let read = b.request(Op::Read, blocks(0, 1));
    b.pass(3000, MemberSet::EMPTY);
    assert_eq!(b.one(A).op, OpCode::Write, "the range is still held");
    b.answer(A, Status::Ok);
    b.answered(slot);
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(())), (read, Ok(()))]);
}

#[test]
fn one_full_member_is_reported_after_two_seconds() {
    let mut b = Bench::new(3);
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::Ok);
    b.answer(C, Status::Ok);
    for _ in 0..19 {
        b.pass(100, ALL);
        b.answer(A, Status::NoSpace);
    }
    assert!(b.reports().is_empty() && b.answers().is_empty());
    b.pass(300, ALL);
    assert!(!b.queue.stats().starved.load(Relaxed), "the others have space");
    assert_eq!(b.reports(), [FromQueue::Failed(A, Fault::NoSpace)]);
    b.switch(Switch::Forget { member: A });
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

#[test]
fn space_that_comes_back_in_time_costs_nobody_anything() {
    let mut b = Bench::new(2);
    let first = b.request(WRITE, blocks(0, 1));
    let second = b.request(WRITE, blocks(1, 1));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::Ok);
    b.pass(1050, ALL);
    assert_eq!(b.to(A).len(), 1, "one of them finds out");
    b.answer(A, Status::Ok);
    b.pass(50, ALL);
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(first, Ok(())), (second, Ok(()))]);
    assert!(b.reports().is_empty());
}

#[test]
fn members_that_are_full_in_turn_all_stay() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::Ok);
    b.request(WRITE, blocks(1, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::NoSpace);
    for _ in 0..100 {
        b.pass(100, ALL);
        b.answer(A, Status::NoSpace);
        b.answer(B, Status::NoSpace);
    }
    assert!(b.reports().is_empty() && b.answers().is_empty());
    for _ in 0..3 {
        b.pass(1000, ALL);
        b.answer(A, Status::Ok);
        b.answer(B, Status::Ok);
    }
    assert_eq!(b.answers().len(), 2);
}

#[test]
fn repetitions_never_push_a_half_done_write_out_of_the_members_memory() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::Ok);
    b.request(WRITE, blocks(1, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::NoSpace);
    let mut sent = 0;
    for _ in 0..3000 {
        b.pass(200, ALL);
        sent += b.to(A).len();
        b.answer(A, Status::NoSpace);
        b.answer(B, Status::NoSpace);
        if !b.reports().is_empty() {
            assert!(sent > 50 && sent <= lh_wire::WRITE_WINDOW, "{sent}");
            return;
        }
    }
    panic!("waits for ever although the window is used up");
}

/// Its disk is made larger after many minutes. What it lacks is among the last writes that each of them remembers all the time: else the
/// next engine would not know of it.
#[test]
fn a_full_member_that_is_needed_is_tried_for_as_long_as_it_takes() {
    let mut b = Bench::new(2);
    b.shared.set_members_min(2);
    let slots: Vec<u16> = (0..40).map(|n| b.request(WRITE, blocks(n, 1))).collect();
    let mut sent: [Vec<Extent>; 2] = Default::default();
    let mut answer = |b: &mut Bench, of_a: Status| {
        for (m, sent) in [A, B].into_iter().zip(&mut sent) {
            sent.extend(b.to(m).iter().map(|t| t.range));
            let last = &sent[sent.len().saturating_sub(lh_wire::WRITE_WINDOW)..];
            assert!((0..40).all(|n| last.contains(&blocks(n, 1))), "{m:?} has forgotten a write");
        }
        let tries = b.to(A).len();
        b.answer(B, Status::Ok);
        b.answer(A, of_a);
        tries
    };
    answer(&mut b, Status::NoSpace);
    for minute in 0..20 {
        let mut tries = 0;
        for _ in 0..60 {
            b.pass(1000, ALL);
            tries += answer(&mut b, Status::NoSpace);
        }
        assert!((50..=70).contains(&tries), "{tries} tries in minute {minute}");
    }
    assert!(b.reports().is_empty() && b.answers().is_empty());
    for _ in 0..25 {
        b.pass(100, ALL);
        answer(&mut b, Status::Ok);
    }
    let mut answered: Vec<u16> = b.answers().into_iter().map(|(slot, _)| slot).collect();
    answered.sort_unstable();
    assert_eq!(answered, slots);
    answered.into_iter().for_each(|slot| b.answered(slot));
    b.assert_idle();
}

/// Both members are full, and the first has done a part: what is read of it may differ.
fn refused_in_part(b: &mut Bench, op: Op) -> u16 {
    let slot = b.request(op, blocks(0, 2));
    b.reply_with(b.one(A), Status::NoSpace, IN_PART);
    b.answer(B, Status::NoSpace);
    slot
}

#[test]
fn a_write_that_was_refused_in_part_keeps_its_range_and_is_tried_for_as_long_as_it_takes() {
    let mut b = Bench::new(2);
    let slot = refused_in_part(&mut b, WRITE);
    let read = b.request(Op::Read, blocks(1, 1));
    let mut tries = 0;
    for _ in 0..1000 {
        b.pass(500, ALL);
        assert_eq!(b.to(A).len(), b.to(B).len(), "both are tried, and nothing is read");
        tries += b.to(A).len();
        b.answer(A, Status::NoSpace);
        b.answer(B, Status::NoSpace);
    }
    assert!((450..=510).contains(&tries), "{tries}");
    assert!(b.reports().is_empty() && b.answers().is_empty());
    b.pass(1000, ALL);
    b.answer(A, Status::Ok);
    assert!(b.answers().is_empty());
    b.answer(B, Status::Ok);
    b.answered(slot);
    let member = b.wire.iter().find(|t| t.op == OpCode::Read).expect("it goes on").member;
    b.answer(member, Status::Ok);
    b.answer_pings(ALL);
    assert_eq!(b.answers(), [(slot, Ok(())), (read, Ok(()))]);
    b.assert_idle();
}

/// Whoever takes the engine's place asks the members for their last writes: it is among them as long as it waits.
#[test]
fn a_write_that_was_refused_in_part_stays_in_the_members_memory() {
    let mut b = Bench::new(2);
    refused_in_part(&mut b, WRITE);
    for _ in 0..5 {
        let mut beyond = 0;
        loop {
            let other = b.request(WRITE, blocks(8, 1));
            b.answer(A, Status::Ok);
            b.answer(B, Status::Ok);
            b.answered(other);
            if b.answers().is_empty() {
                break;
            }
            beyond += 1;
        }
        assert!((200..lh_wire::WRITE_WINDOW).contains(&beyond), "{beyond} writes went beyond it");
        b.pass(1000, ALL);
        let again: Vec<_> = b.to(B).into_iter().filter(|t| t.range == blocks(0, 2)).collect();
        assert_eq!(again.len(), 1);
        for t in b.wire.clone() {
            let refused = t.range == blocks(0, 2);
            b.reply(t, if refused { Status::NoSpace } else { Status::Ok });
        }
        let (waiting, _) = b.answers()[0];
        b.answered(waiting);
    }
    assert!(b.reports().is_empty());
}

/// What is read of it would come back after a later write, when it is tried again.
#[test]
fn a_single_member_holds_the_range_of_what_it_refused_in_part_too() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, blocks(0, 2));
    b.reply_with(b.one(A), Status::NoSpace, IN_PART);
    let later = b.request(WRITE, blocks(0, 1));
    b.pass(1000, ALL);
    assert_eq!(b.one(A).range, blocks(0, 2));
    b.answer(A, Status::Ok);
    b.answered(slot);
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(())), (later, Ok(()))]);
}

#[test]
fn what_unmaps_is_told_that_there_is_no_space() {
    let mut b = Bench::new(2);
    let slot = b.request(Op::Unmap, blocks(0, 1000));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::NoSpace);
    assert_eq!(b.answers(), [(slot, Err(IoError::NoSpace))]);
    b.answered(slot);
    b.assert_idle();
    // Zeroes are a write as any.
    b.request(ZEROES, blocks(0, 1));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::NoSpace);
    b.pass(20_000, ALL);
    assert!(b.answers().is_empty());
}

#[test]
fn who_unmaps_does_not_wait_for_members_that_are_full_in_turn() {
    let mut b = Bench::new(2);
    let write = b.request(WRITE, blocks(8, 1));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::Ok);
    let slot = b.request(Op::Unmap, blocks(0, 1));
    let unmap = b.to(B).into_iter().find(|t| t.op == OpCode::Unmap).expect("sent");
    b.answer(A, Status::Ok);
    b.reply(unmap, Status::NoSpace);
    let read = b.request(Op::Read, blocks(0, 1));
    for _ in 0..40 {
        b.pass(100, ALL);
        b.answer(A, Status::NoSpace);
        b.answer(B, Status::NoSpace);
    }
    assert_eq!(b.answers(), [(slot, Err(IoError::NoSpace))], "and the read waits until both hold the same");
    assert!(b.reports().is_empty());
    b.answered(slot);
    b.pass(1000, ALL);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    b.pass(50, ALL);
    let member = b.wire.iter().find(|t| t.op == OpCode::Read).expect("it goes on").member;
    b.answer(member, Status::Ok);
    b.answer_pings(ALL);
    assert_eq!(b.answers(), [(write, Ok(())), (read, Ok(()))]);
}

/// Who has done it and has no space for it once more may hold what the other one lacks.
#[test]
fn what_was_done_somewhere_keeps_its_range_whatever_becomes_of_its_repetition() {
    let mut b = Bench::new(2);
    b.shared.set_members_min(2);
    b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::Ok);
    let mut seconds = 0;
    while b.to(B).is_empty() {
        b.pass(1000, ALL);
        b.answer(A, Status::NoSpace);
        seconds += 1;
        assert!(seconds <= lh_wire::WRITE_WINDOW, "the window is used up by then");
    }
    b.answer(B, Status::NoSpace);
    assert!(!b.table.is_idle() && b.answers().is_empty());
    b.pass(1000, ALL);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers().len(), 1);
}

/// Else nothing that is read of the range, nor a replica that is brought in sync on another disk, would go on before there is space.
#[test]
fn what_is_left_of_a_write_waits_outside_once_all_have_done_as_many_blocks() {
    let mut b = Bench::new(2);
    let slot = b.request(WRITE, blocks(0, 8));
    let read = b.request(Op::Read, blocks(1, 1));
    b.reply_with(b.one(A), Status::NoSpace, lh_wire::in_part(3));
    assert!(!b.wire.iter().any(|t| t.op == OpCode::Read), "B may have done another part");
    b.reply_with(b.one(B), Status::NoSpace, lh_wire::in_part(3));
    assert!(b.wire.iter().any(|t| t.op == OpCode::Read), "nobody holds the range");
    for t in b.wire.clone() {
        let is_read = t.op == OpCode::Read;
        assert!(is_read || t.range == blocks(3, 5));
        b.reply(t, if is_read { Status::Ok } else { Status::NoSpace });
    }
    b.answer_pings(ALL);
    assert_eq!(b.answers(), [(read, Ok(()))]);
    b.pass(1000, ALL);
    assert_eq!((b.one(A).range, b.one(B).range), (blocks(3, 5), blocks(3, 5)));
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::NoSpace);
    assert!(b.table.is_idle());
    b.pass(1000, ALL);
    assert_eq!(b.one(A).range, blocks(3, 5));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    b.assert_idle();
}

/// It may have been copied what was there before, and is a member one day.
#[test]
fn who_is_filled_does_what_members_have_done_of_a_write_before_the_rest_waits() {
    for is_kept_back in [true, false] {
        let mut b = Bench::new(1);
        if is_kept_back {
            b.request(WRITE, blocks(20, 1));
            b.answer(A, Status::NoSpace);
        }
        b.apply(Input::LinkUp { member: C });
        b.switch(Switch::Fill { member: C });
        let slot = b.request(WRITE, blocks(0, 8));
        assert_eq!(b.to(C).is_empty(), is_kept_back);
        // Its own disk is full, too.
        b.answer(C, Status::NoSpace);
        b.reply_with(b.one(A), Status::NoSpace, lh_wire::in_part(3));
        assert_eq!(b.one(C).range, blocks(0, 3));
        assert!(b.to(A).is_empty() && !b.table.is_idle());
        b.answer(C, Status::Ok);
        assert_eq!(b.one(A).range, blocks(3, 5), "{is_kept_back}");
        b.answer(A, Status::Ok);
        b.answer(C, Status::Ok);
        assert_eq!(b.answers(), [(slot, Ok(()))]);
    }
}

#[test]
fn members_that_have_done_different_parts_hold_the_range() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 8));
    b.reply_with(b.one(A), Status::NoSpace, lh_wire::in_part(3));
    b.answer(B, Status::NoSpace);
    assert!(!b.table.is_idle());
    // Asked again, they are alike.
    b.pass(1000, ALL);
    b.reply_with(b.one(A), Status::NoSpace, lh_wire::in_part(3));
    assert!(!b.table.is_idle());
    b.reply_with(b.one(B), Status::NoSpace, lh_wire::in_part(3));
    assert_eq!((b.one(A).range, b.one(B).range), (blocks(3, 5), blocks(3, 5)));
}

/// What it said before is nothing that it has done by now.
#[test]
fn who_was_not_asked_again_has_not_done_as_many_blocks() {
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 8));
    b.answer(A, Status::NoSpace);
    b.reply_with(b.one(B), Status::NoSpace, lh_wire::in_part(3));
    b.link_down(B);
    b.pass(1000, ALL.without(B));
    b.reply_with(b.one(A), Status::NoSpace, lh_wire::in_part(1));
    assert!(!b.table.is_idle());
}

/// It cannot be brought in sync as long as the range is held for it.
#[test]
fn while_all_are_full_who_is_filled_is_sent_only_what_a_member_has_done() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::NoSpace);
    b.apply(Input::LinkUp { member: C });
    b.switch(Switch::Fill { member: C });
    for _ in 0..10 {
        b.pass(1000, ALL);
        assert_eq!((b.to(A).len(), b.to(C).len()), (1, 0));
        b.answer(A, Status::NoSpace);
        assert!(b.table.is_idle(), "what is copied to it goes on");
    }
    b.pass(1000, ALL);
    b.answer(A, Status::Ok);
    assert_eq!(b.to(C).len(), 1);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
    b.answered(slot);
    assert!(!b.table.is_idle());
    b.answer(C, Status::Ok);
    b.assert_idle();
}

#[test]
fn who_was_kept_back_is_sent_the_write_when_it_becomes_a_member() {
    let mut b = Bench::new(1);
    let slot = b.request(WRITE, blocks(0, 1));
    b.answer(A, Status::NoSpace);
    b.apply(Input::LinkUp { member: C });
    b.switch(Switch::Fill { member: C });
    b.switch(Switch::Await { member: C });
    b.pass(1000, ALL);
    assert_eq!((b.to(A).len(), b.to(C).len()), (1, 0));
    b.switch(Switch::Promote { member: C });
    assert_eq!(b.to(C).len(), 1);
    b.answer(C, Status::Ok);
    b.answer(A, Status::NoSpace);
    for _ in 0..40 {
        b.pass(100, ALL);
        b.answer(A, Status::NoSpace);
    }
    assert_eq!(b.reports().last(), Some(&FromQueue::Failed(A, Fault::NoSpace)), "the full one is put out");
    b.switch(Switch::Forget { member: A });
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

/// The disks became full while it was filled.
#[test]
fn who_has_done_what_no_member_has_space_for_is_filled_anew() {
    let mut b = Bench::new(1);
    b.apply(Input::LinkUp { member: C });
    b.switch(Switch::Fill { member: C });
    b.request(WRITE, blocks(0, 1));
    b.answer(C, Status::Ok);
    for _ in 0..25 {
        b.answer(A, Status::NoSpace);
        b.pass(100, ALL);
    }
    assert_eq!(b.reports().last(), Some(&FromQueue::Failed(C, Fault::Ahead)));
    assert!(!b.table.is_idle());
    b.switch(Switch::Forget { member: C });
    b.answer(A, Status::NoSpace);
    assert!(b.table.is_idle() && b.answers().is_empty());
}
