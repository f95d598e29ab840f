//! A steady load allocates nothing on a queue's thread, and takes few system calls.

#[path = "link/bench.rs"]
#[expect(dead_code, reason = "shared with the tests of the link")]
mod bench;
#[path = "link/replica.rs"]
#[expect(dead_code, reason = "shared with the tests of the link")]
mod replica;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use bench::Bench;
use lh_block::{Device, Extent, Op, Request};

/// Counts what a thread asks of the system's allocator.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[expect(unsafe_code, reason = "an allocator is an unsafe trait")]
// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

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

/// Keeps so many requests of 4 KiB in flight until `count` are answered; the cost of the second half.
fn load(b: &mut Bench, depth: u64, count: u64, op: impl Fn(u64) -> Op) -> Cost {
    let (mut sent, mut answered) = (0, 0);
    let mut half = None;
    while answered < count {
        if answered >= count / 2 && half.is_none() {
            half = Some((ALLOCATIONS.get(), b.ring.turns(), Instant::now(), answered));
        }
        let pool = b.pool.clone();
        b.turn_with(Duration::from_secs(5), |engine| {
            while engine.poll_done().is_some() {
                answered += 1;
            }
            while sent < count.min(answered + depth) {
                let op = op(sent);
                let data = matches!(op, Op::Write { .. }).then(|| pool.alloc(4096, 4096).expect("room"));
                engine.submit(Request {
                    tag: sent,
                    op,
                    range: Extent::new(sent * 7 % 2000 * 4096, 4096),
                    data,
                });
                sent += 1;
            }
        });
    }
    let (allocations, turns, began, from) = half.expect("there is a second half");
    let requests = answered - from;
    Cost {
        allocations: ALLOCATIONS.get() - allocations,
        turns: (b.ring.turns() - turns) * 1000 / requests,
        time: began.elapsed() / u32::try_from(requests).expect("few"),
    }
}

#[test]
fn a_steady_load_allocates_nothing() {
    const WRITE: Op = Op::Write { fua: false };
    let mut b = Bench::new(3, false);
    for (what, depth, count, op) in [
        ("writes", 32, 40_000, (|_| WRITE) as fn(u64) -> Op),
        ("reads", 32, 40_000, |_| Op::Read),
        ("reads and writes", 32, 40_000, |n| if n % 3 == 0 { WRITE } else { Op::Read }),
        ("zeroes", 32, 20_000, |_| Op::Unmap),
        ("writes one by one", 1, 10_000, |_| WRITE),
        ("reads one by one", 1, 10_000, |_| Op::Read),
        ("writes and flushes", 16, 10_000, |n| if n % 8 == 0 { Op::Flush } else { WRITE }),
    ] {
        let cost = load(&mut b, depth, count, op);
        let Cost { allocations, turns, time } = cost;
        println!("{what}: {allocations} allocations, {turns} turns for 1000 requests, {time:?} each");
        assert_eq!(cost.allocations, 0, "{what}: {cost:?}");
        assert!(depth == 1 || cost.turns < 1500, "{what}: {cost:?}");
    }
}
