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

/// A queue whose clients may give up what they have sent, and what it has for them.
fn watched() -> Bench {
    let mut b = Bench::new(2);
    b.looks = true;
    b.queue.watch(true);
    b
}

/// Looked for before it had its range, the client may have sent it again elsewhere meanwhile, and something newer.
#[test]
fn what_changes_data_is_sent_once_its_client_was_looked_for_after_it_had_its_range() {
    for (op, range) in [(WRITE, blocks(0, 1)), (ZEROES, blocks(0, 1)), (WRITE, Extent::new(512, 512))] {
        let mut b = watched();
        let slot = b.request(op, range);
        assert!(b.queue.looks() && b.to(A).is_empty(), "{op:?}");
        let behind = b.request(WRITE, range);
        b.apply(Input::Looked);
        assert!(!b.queue.looks() && !b.to(A).is_empty(), "{op:?}");
        // It has its range when the one before it has let go of that, and not before.
        b.apply(Input::Abandoned { slot: behind });
        if b.to(A).iter().chain(&b.to(B)).any(|t| t.op == OpCode::Read) {
            b.answer_reads(Status::Ok);
        }
        b.answer(A, Status::Ok);
        b.answer(B, Status::Ok);
        b.answered(slot);
        assert_eq!(b.answers(), [(slot, Ok(())), (behind, Err(IoError::ShuttingDown))], "{op:?}");
        b.answered(behind);
        b.assert_idle();
    }
}

#[test]
fn who_is_found_gone_when_it_has_its_range_is_not_served_and_keeps_nobody() {
    let mut b = watched();
    let gone = b.request(WRITE, blocks(0, 1));
    let again = b.request(WRITE, blocks(0, 1));
    b.apply(Input::Abandoned { slot: gone });
    b.apply(Input::Looked);
    assert_eq!(b.answers(), [(gone, Err(IoError::ShuttingDown))]);
    assert!(b.to(A).is_empty());
    b.answered(gone);
    assert!(b.queue.looks(), "its turn, and its client's");
    b.apply(Input::Looked);
    assert_eq!(b.one(A).range, blocks(0, 1));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(again, Ok(()))]);
}

/// What follows the first piece is claimed later, when the client may have gone.
#[test]
fn every_piece_is_looked_for() {
    let mut b = watched();
    let slot = b.request(ZEROES, Extent::new(0, 2 << 20));
    b.apply(Input::Looked);
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert!(b.queue.looks() && b.to(A).is_empty());
    b.apply(Input::Abandoned { slot });
    b.apply(Input::Looked);
    assert_eq!(b.answers(), [(slot, Err(IoError::ShuttingDown))]);
    assert!(b.to(A).is_empty());
}

#[test]
fn who_has_waited_outside_is_looked_for_again_when_it_has_its_range() {
    let (mut b, slot) = outside("a pause");
    b.queue.watch(true);
    goes_on(&mut b, "a pause");
    b.apply(Input::LetIn);
    assert!(!b.queue.lets_in() && b.queue.looks() && !carries_data(&b));
    b.apply(Input::Looked);
    assert!(carries_data(&b));
    b.answer(A, Status::Ok);
    b.answer(B, Status::Ok);
    assert_eq!(b.answers(), [(slot, Ok(()))]);
}

/// Reads go on at once, and so do the writes of who cannot send anything again elsewhere.
#[test]
fn nobody_is_looked_for_in_vain() {
    let mut b = watched();
    b.request(Op::Read, blocks(0, 1));
    assert!(!b.queue.looks() && carries_data(&b));
    let mut b = Bench::new(2);
    b.request(WRITE, blocks(0, 1));
    assert!(!b.queue.looks() && carries_data(&b));
}

/// The time is over, or the engine ends, between the claim and the look.
#[test]
fn what_is_answered_before_its_client_was_looked_for_is_not_sent() {
    let mut b = watched();
    let slot = b.request(WRITE, blocks(0, 1));
    b.switch(Switch::Stop);
    b.apply(Input::Looked);
    assert_eq!(b.answers(), [(slot, Err(IoError::ShuttingDown))]);
    assert!(b.to(A).is_empty());
    b.answered(slot);
    b.assert_idle();
}
