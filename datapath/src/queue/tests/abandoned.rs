//! Requests whose clients are gone: they may have been sent again, done, and something newer after them.

use super::*;

/// A write, put outside for each of the reasons that there are, and what lets it in again.
fn outside(why: &str) -> (Bench, u16) {
    let mut b = Bench::new(2);
    b.looks = true;
    let slot = match why {
        "a pause" => {
            b.switch(Switch::Pause);
            b.request(WRITE, blocks(0, 1))
        }
        "no member" => {
            b.link_down(A);
            b.link_down(B);
            b.switch(Switch::StopReads { member: A });
            b.switch(Switch::StopReads { member: B });
            b.request(WRITE, blocks(0, 1))
        }
        "doubt" => {
            b.shared.put_in_doubt(0);
            b.request(WRITE, Extent::new(512, 512))
        }
        "full disks" => {
            let slot = b.request(WRITE, blocks(0, 1));
            b.answer(A, Status::NoSpace);
            b.answer(B, Status::NoSpace);
            slot
        }
        _ => unreachable!("{why}"),
    };
    assert_eq!(b.queue.parked.iter().collect::<Vec<_>>(), [&slot], "{why}");
    (b, slot)
}

fn goes_on(b: &mut Bench, why: &str) {
    match why {
        "a pause" => drop(b.switch(Switch::Resume)),
        "no member" => [A, B].into_iter().for_each(|m| {
            b.apply(Input::LinkUp { member: m });
            b.switch(Switch::Attach { member: m });
            b.switch(Switch::Promote { member: m });
        }),
        "doubt" => {
            b.shared.resolve(0);
            b.apply(Input::Message(ToQueue::ChunkResolved(0)));
        }
        _ => b.pass(1_100, MemberSet::EMPTY.with(A).with(B)),
    }
}

const REASONS: [&str; 4] = ["a pause", "no member", "doubt", "full disks"];

fn carries_data(b: &Bench) -> bool {
    b.wire.iter().any(|t| matches!(t.op, OpCode::Write | OpCode::Read))
}

#[test]
fn who_waits_outside_is_let_in_only_after_clients_were_looked_for() {
    for why in REASONS {
        let (mut b, _) = outside(why);
        assert!(!b.queue.lets_in(), "{why}: it has to wait");
        goes_on(&mut b, why);
        assert!(b.queue.lets_in() && !carries_data(&b), "{why}");
        b.apply(Input::LetIn);
        assert!(!b.queue.lets_in() && carries_data(&b), "{why}");
    }
}

#[test]
fn what_waits_outside_ends_with_its_client() {
    for why in REASONS {
        let (mut b, slot) = outside(why);
        goes_on(&mut b, why);
        b.apply(Input::Abandoned { slot });
        assert_eq!(b.answers(), [(slot, Err(IoError::ShuttingDown))], "{why}");
        b.apply(Input::LetIn);
        assert!(!carries_data(&b), "{why}");
        b.answer_pings(MemberSet::EMPTY.with(A).with(B));
        b.assert_idle();
    }
}

/// Its order is kept by its range, and whoever sent it again comes behind it: it may be done, but need not.
#[test]
fn what_waits_for_its_range_is_not_sent_without_its_client() {
    let mut b = Bench::new(1);
    let first = b.request(WRITE, blocks(0, 1));
    let second = b.request(WRITE, blocks(0, 1));
    b.apply(Input::Abandoned { slot: second });
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(first, Ok(()))]);
    b.answered(first);
    assert!(b.wire.is_empty());
    assert_eq!(b.answers(), [(second, Err(IoError::ShuttingDown))]);
    b.answered(second);
    b.assert_idle();
}

#[test]
fn what_was_sent_is_done_and_goes_no_further_than_its_piece() {
    let mut b = Bench::new(1);
    let write = b.request(WRITE, blocks(2048, 1));
    let unmap = b.request(Op::Unmap, Extent::new(0, 4 << 20));
    b.apply(Input::Abandoned { slot: write });
    b.apply(Input::Abandoned { slot: unmap });
    assert!(b.answers().is_empty());
    b.answer(A, Status::Ok);
    assert_eq!(b.answers(), [(write, Ok(())), (unmap, Err(IoError::ShuttingDown))]);
    assert!(b.wire.is_empty());
    b.answered(write);
    b.assert_idle();
}

#[test]
fn what_full_disks_refuse_is_not_tried_again_without_its_client() {
    let mut b = Bench::new(2);
    let slot = b.request(WRITE, blocks(0, 1));
    b.apply(Input::Abandoned { slot });
    b.answer(A, Status::NoSpace);
    b.answer(B, Status::NoSpace);
    assert_eq!(b.answers(), [(slot, Err(IoError::ShuttingDown))]);
    b.pass(2_000, MemberSet::EMPTY.with(A).with(B));
    assert!(b.wire.is_empty());
    b.assert_idle();
}

#[test]
fn what_nobody_has_any_more_is_not_done_again_without_its_client() {
    let mut b = Bench::new(1);
    let read = b.request(Op::Read, blocks(0, 1));
    b.apply(Input::Abandoned { slot: read });
    b.link_down(A);
    assert_eq!(b.answers(), [(read, Err(IoError::ShuttingDown))]);
    b.reports();
    b.assert_idle();
}
