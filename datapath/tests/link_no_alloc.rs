//! A steady load allocates nothing on a queue's thread, and takes few system calls.

#[path = "link/bench.rs"]
#[expect(dead_code, reason = "shared with the tests of the link")]
mod bench;
#[path = "link/replica.rs"]
#[expect(dead_code, reason = "shared with the tests of the link")]
mod replica;

use std::time::{Duration, Instant};

use bench::Bench;
use lh_block::{Device, Extent, Op, Request};
use lh_rig::allocations::{self, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a request costs.
#[derive(Debug)]
struct Cost {
    /// Of all requests together.
    allocations: u64,
    /// Turns of the ring, each a system call, for each thousand requests.
    turns: u64,
    /// Of one, at this depth.
    time: Duration,
}

/// Keeps so many requests of `len` bytes in flight until `count` are answered; the cost of the second half.
fn load(b: &mut Bench, len: u32, depth: u64, count: u64, op: impl Fn(u64) -> Op) -> Cost {
    let (mut sent, mut answered) = (0, 0);
    let mut half = None;
    while answered < count {
        if answered >= count / 2 && half.is_none() {
            half = Some((allocations::so_far(), b.driven.ring.turns(), Instant::now(), answered));
        }
        let pool = b.pool().clone();
        b.turn_with(Duration::from_secs(5), |engine| {
            while engine.poll_done().is_some() {
                answered += 1;
            }
            while sent < count.min(answered + depth) {
                let op = op(sent);
                let data = matches!(op, Op::Write { .. }).then(|| pool.alloc(len, 4096).expect("room"));
                engine.submit(Request {
                    tag: sent,
                    op,
                    range: Extent::new(sent * 7 % 2000 * 4096, len.into()),
                    data,
                });
                sent += 1;
            }
        });
    }
    let (allocations, turns, began, from) = half.expect("there is a second half");
    let requests = answered - from;
    Cost {
        allocations: allocations::so_far() - allocations,
        turns: (b.driven.ring.turns() - turns) * 1000 / requests,
        time: began.elapsed() / u32::try_from(requests).expect("few"),
    }
}

#[test]
fn a_steady_load_allocates_nothing() {
    allocations::count_this_thread(true);
    steady(Bench::new(3, false), 4096);
    println!("with lent bytes:");
    steady(Bench::lending(3, false), 16 << 10);
    println!("with granted files:");
    steady(Bench::granting(3), 4096);
}

fn steady(mut b: Bench, len: u32) {
    const WRITE: Op = Op::Write { fua: false };
    for (what, depth, count, op) in [
        ("writes", 32, 40_000, (|_| WRITE) as fn(u64) -> Op),
        ("reads", 32, 40_000, |_| Op::Read),
        ("reads and writes", 32, 40_000, |n| if n % 3 == 0 { WRITE } else { Op::Read }),
        ("zeroes", 32, 20_000, |_| Op::Unmap),
        ("writes one by one", 1, 10_000, |_| WRITE),
        ("reads one by one", 1, 10_000, |_| Op::Read),
        ("writes and flushes", 16, 10_000, |n| if n % 8 == 0 { Op::Flush } else { WRITE }),
    ] {
        let cost = load(&mut b, len, depth, count, op);
        let Cost { allocations, turns, time } = cost;
        println!("{what}: {allocations} allocations, {turns} turns for 1000 requests, {time:?} each");
        assert_eq!(cost.allocations, 0, "{what}: {cost:?}");
        assert!(depth == 1 || cost.turns < 1500, "{what}: {cost:?}");
    }
}
