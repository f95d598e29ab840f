//! A queue on a real ring, with replicas behind sockets that keep their blocks in memory.

mod bench;
mod idle;
mod lent;
mod replica;

use std::time::{Duration, Instant};

use bench::{Bench, PATIENCE, SIZE};
use datapath::link::News;
use datapath::message::{Fault, FromQueue, MemberId, Switch, ToQueue};
use lh_block::{Extent, IoError, Op};
use replica::Behaviour;

const WRITE: Op = Op::Write { fua: false };

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let byte = |i: u64| i.wrapping_mul(31) ^ seed.wrapping_mul(0x9e37_79b9) ^ (i >> 9);
    (0..len as u64).map(|i| byte(i).to_le_bytes()[0]).collect()
}

/// Requests of every shape, also across blocks and at the longest: what is read is what was written, here and on
/// every replica.
#[test]
fn data_goes_to_every_replica_and_comes_back() {
    for (checksums, lends) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut b = if lends { Bench::lending(3, checksums) } else { Bench::new(3, checksums) };
        let mut model = vec![0_u8; SIZE];
        let mut random = 1_u64;
        let mut next = |n: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % n
        };
        for round in 0..400_u64 {
            let len = match next(6) {
                0 => 1 << 20,
                1 => 512 * (1 + next(2047)),
                2 => 4096,
                3 => 512,
                4 => 512 * (1 + next(20)),
                _ => 4096 * (1 + next(60)),
            };
            let at = 512 * next((SIZE - len) / 512);
            let range = Extent::new(at as u64, len as u64);
            match next(5) {
                0 | 1 => {
                    let bytes = pattern(round, len);
                    model[at..at + len].copy_from_slice(&bytes);
                    assert_eq!(b.write(range, &bytes), Ok(()));
                }
                2 => {
                    model[at..at + len].fill(0);
                    let op = Op::WriteZeroes { fua: false, may_unmap: true, fast: false };
                    assert_eq!(b.ask(op, range), Ok(Vec::new()));
                }
                3 => {
                    model[at..at + len].fill(0);
                    assert_eq!(b.ask(Op::Unmap, range), Ok(Vec::new()));
                }
                _ => assert!(b.ask(Op::Read, range).unwrap() == model[at..at + len], "{range}"),
            }
        }
        for m in 0..3 {
            assert!(*b.replicas[m].blocks() == model, "replica {m}");
        }
        assert!(b.pool().used_bytes() <= 1 << 20, "{} bytes are still held", b.pool().used_bytes());
    }
}

#[test]
fn a_range_is_held_until_its_answer_was_submitted() {
    let mut b = Bench::new(1, false);
    let range = Extent::new(0, 4096);
    let first = b.submit(WRITE, range, Some(&[1; 4096]));
    let second = b.submit(WRITE, range, Some(&[2; 4096]));
    // The answer is there, and the frontend does not take it.
    b.turn_until("the first is written", false, |b| b.replicas[0].writes() == 1);
    b.spin(Duration::from_millis(100), false);
    assert_eq!(b.replicas[0].writes(), 1);
    assert_eq!(b.answer(), (first, Ok(Vec::new())));
    assert_eq!(b.replicas[0].writes(), 1, "it is not submitted yet");
    assert_eq!(b.wait(second), Ok(Vec::new()));
    assert_eq!(b.replicas[0].writes(), 2);
}

#[test]
fn a_broken_link_is_reported_and_the_others_go_on() {
    let mut b = Bench::new(2, false);
    b.replicas[1].behave(Behaviour::HangUp);
    let tag = b.submit(WRITE, Extent::new(0, 4096), Some(&[7; 4096]));
    let failed = FromQueue::Failed(MemberId(1), Fault::Link);
    b.until(|news| matches!(news, News::Report(_, r) if *r == failed));
    b.switch(Switch::Forget { member: MemberId(1) });
    assert_eq!(b.wait(tag), Ok(Vec::new()));
    assert_eq!(b.ask(Op::Read, Extent::new(0, 512)).unwrap(), [7; 512]);
}

#[test]
fn garbage_costs_the_link_not_the_queue() {
    for behaviour in
        [Behaviour::Garbage, Behaviour::WrongChecksum, Behaviour::OtherGeneration, Behaviour::Short]
    {
        let mut b = Bench::with_near_first(2, true);
        b.write(Extent::new(0, 4096), &[9; 4096]).unwrap();
        b.replicas[0].behave(behaviour);
        let tag = b.submit(Op::Read, Extent::new(0, 4096), None);
        let failed = FromQueue::Failed(MemberId(0), Fault::Link);
        b.until(|news| matches!(news, News::Report(_, r) if *r == failed));
        b.switch(Switch::Forget { member: MemberId(0) });
        assert_eq!(b.wait(tag).unwrap(), [9; 4096], "{behaviour:?}");
    }
}

#[test]
fn a_replica_that_hangs_is_reported_although_nothing_comes_from_anywhere() {
    let mut b = Bench::new(2, false);
    b.spin(Duration::from_millis(1500), true);
    b.replicas[1].behave(Behaviour::Hang);
    b.submit(WRITE, Extent::new(0, 4096), Some(&[7; 4096]));
    // How soon, `queue/tests/health.rs` shows, by a clock of its own.
    let failed = FromQueue::Failed(MemberId(1), Fault::Hung);
    b.until(|news| matches!(news, News::Report(_, r) if *r == failed));
}

#[test]
fn an_idle_queue_sleeps() {
    let mut b = Bench::new(2, false);
    b.write(Extent::new(0, 4096), &[1; 4096]).unwrap();
    // Its ticks end a while after the last request, on a busy machine later.
    let turns = |b: &mut Bench| {
        let before = b.driven.ring.turns();
        b.spin(Duration::from_millis(500), true);
        b.driven.ring.turns() - before
    };
    assert!((0..20).any(|_| turns(&mut b) <= 1), "{} turns in half a second, still", turns(&mut b));
}

#[test]
fn control_requests_and_their_answers_pass_through() {
    let mut b = Bench::new(1, true);
    let question = pattern(3, 10_000);
    b.control(5, MemberId(0), question.clone());
    let mut got = None;
    b.until(|news| match news {
        News::Reply { payload, .. } => {
            got = Some(payload.clone());
            true
        }
        News::Report(..) => false,
    });
    assert_eq!(got, Some(question), "the replica echoes");
}

#[test]
fn refused_requests_are_answered() {
    let mut b = Bench::new(1, false);
    assert_eq!(b.ask(Op::Read, Extent::new(SIZE as u64, 4096)), Err(IoError::OutOfRange));
    b.mail(datapath::link::Mail::Message(ToQueue::Switch(datapath::message::SwitchId(99), Switch::Stop)));
    assert_eq!(b.ask(Op::Read, Extent::new(0, 4096)), Err(IoError::ShuttingDown));
}

/// The fake replica holds its blocks in memory, and has granted a file of zeroes: which of the two was read shows.
#[test]
fn what_is_granted_is_read_until_a_block_has_moved() {
    let mut b = Bench::granting(1);
    let (range, piece) = (Extent::new(0, 4096), Extent::new(0, 1 << 20));
    assert_eq!(b.write(piece, &vec![1; 1 << 20]), Ok(()));
    assert_eq!(b.ask(Op::Read, range), Ok(vec![1; 4096]), "nothing is known of places");
    // Its thread may take a moment to say where they are.
    let began = Instant::now();
    while b.ask(Op::Read, range) != Ok(vec![0; 4096]) {
        assert!(began.elapsed() < PATIENCE, "the places do not become known");
    }
    assert_eq!(b.ask(Op::Read, piece), Ok(vec![0; 1 << 20]));
    b.granted[0].raise(0);
    assert_eq!(b.ask(Op::Read, range), Ok(vec![1; 4096]));
    assert_eq!(b.ask(Op::Read, Extent::new(4096, 4096)), Ok(vec![1; 4096]), "of another counter");
}
