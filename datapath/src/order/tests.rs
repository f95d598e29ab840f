use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;

fn claim(queue: u8, ticket: u16, offset: u64, len: u64, kind: Kind) -> Claim {
    Claim { queue: QueueId(queue), ticket: Ticket(ticket), range: Extent::new(offset, len), kind }
}

fn slots_of(range: Extent) -> Vec<u64> {
    std::iter::successors(next_slot(range, None), |s| next_slot(range, Some(*s))).collect()
}

#[test]
fn slots_ascend_also_where_the_stripes_wrap_round() {
    assert_eq!(slots_of(Extent::new(0, 4096)), [0]);
    assert_eq!(slots_of(Extent::new(STRIPE - 1, 2)), [0, 1]);
    assert_eq!(slots_of(Extent::new(254 * STRIPE, 4 * STRIPE)), [0, 1, 254, 255]);
    assert_eq!(slots_of(Extent::new(STRIPE / 2, 1 << 20)).len(), 17);
    assert_eq!(slots_of(Extent::new(5 * STRIPE, 64 << 20)), (0..256).collect::<Vec<_>>());
    assert_eq!(slots_of(Extent::new(5 * STRIPE, 255 * STRIPE)).len(), 255);
    assert_eq!(slots_of(Extent::new(5, 0)), [0_u64; 0]);
    assert_eq!(slots_of(Extent::new(u64::MAX - 10, 100)).len(), 1);
}

proptest! {
    /// Every stripe of the range has its slot, each slot is named once, in ascending order.
    #[test]
    fn slots_cover_the_range(offset in 0_u64..1 << 26, len in 1_u64..1 << 25) {
        let range = Extent::new(offset, len);
        let got = slots_of(range);
        let want: BTreeSet<u64> = (offset / STRIPE..=(range.end() - 1) / STRIPE).map(|s| s % SLOTS).collect();
        prop_assert_eq!(got, want.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn readers_share_and_a_writer_between_them_keeps_its_place() {
    let t = Table::new();
    let mut out = Vec::new();
    let [a, w, b] = [
        claim(0, 1, 0, 4096, Kind::Shared),
        claim(0, 2, 0, 8192, Kind::Exclusive),
        claim(1, 1, 4096, 4096, Kind::Shared),
    ];
    assert_eq!(t.claim(a), Outcome::Granted);
    assert_eq!(t.claim(w), Outcome::Waits);
    assert_eq!(t.claim(b), Outcome::Waits, "it would overtake the writer, which came first");
    t.release(a, &mut out);
    assert_eq!(out, [w]);
    out.clear();
    t.release(w, &mut out);
    assert_eq!(out, [b]);
    out.clear();
    t.release(b, &mut out);
    assert!(out.is_empty() && t.is_idle());
}

#[test]
fn a_waiter_of_several_slots_is_handed_out_once_it_holds_all() {
    let t = Table::new();
    let mut out = Vec::new();
    let low = claim(0, 1, 0, 4096, Kind::Exclusive);
    let high = claim(0, 2, STRIPE, 4096, Kind::Exclusive);
    let both = claim(1, 1, 0, 2 * STRIPE, Kind::Exclusive);
    assert_eq!(t.claim(low), Outcome::Granted);
    assert_eq!(t.claim(high), Outcome::Granted);
    assert_eq!(t.claim(both), Outcome::Waits);
    t.release(low, &mut out);
    assert!(out.is_empty());
    t.release(high, &mut out);
    assert_eq!(out, [both]);
}

#[test]
fn a_whole_chunk_excludes_everything_in_it() {
    let t = Table::new();
    let chunk = claim(0, 1, 64 << 20, 64 << 20, Kind::Exclusive);
    assert_eq!(t.claim(chunk), Outcome::Granted);
    assert_eq!(t.claim(claim(0, 2, (128 << 20) - 4096, 4096, Kind::Shared)), Outcome::Waits);
    assert_eq!(t.claim(claim(0, 3, 128 << 20, 4096, Kind::Shared)), Outcome::Granted);
}

/// What a table has to do, written as slowly as possible: all claims that are not released, in order of arrival.
#[derive(Default)]
struct Model {
    line: Vec<Claim>,
}

impl Model {
    /// True if an earlier claim conflicts that stands, since it came, in a slot that this one has to pass, too. (A
    /// claim that waits in a low slot does not stand in its higher ones yet: there it is overtaken, once.)
    fn overtakes(&self, c: &Claim) -> bool {
        self.line
            .iter()
            .take_while(|e| !e.is(c))
            .any(|e| e.conflicts(c) && slots_of(c.range).contains(&slots_of(e.range)[0]))
    }

    /// True if nothing at all conflicts.
    fn is_alone(&self, c: &Claim) -> bool {
        self.line.iter().all(|e| e.is(c) || !e.conflicts(c))
    }
}

#[derive(Clone, Debug)]
enum Step {
    Claim { queue: u8, offset: u64, len: u64, exclusive: bool },
    Release(usize),
}

fn step() -> impl Strategy<Value = Step> {
    // Offsets in a few stripes, also such that share a slot (16 MiB apart) and that wrap round.
    let offset =
        prop_oneof![0_u64..256 << 10, (16_u64 << 20)..(16 << 20) + (256 << 10), (15_u64 << 20)..17 << 20];
    let len = prop_oneof![4 => 1_u64..128 << 10, 1 => 1_u64..3 << 20, 1 => (15_u64 << 20)..40 << 20];
    prop_oneof![
        3 => (0_u8..3, offset, len, any::<bool>())
            .prop_map(|(queue, offset, len, exclusive)| Step::Claim { queue, offset, len, exclusive }),
        2 => any::<usize>().prop_map(Step::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Mutual exclusion, first come first served, and nobody is left behind: whatever the order of releases, the
    /// table drains, and each claim is granted exactly once.
    #[test]
    fn excludes_keeps_order_and_drains(steps in proptest::collection::vec(step(), 1..120)) {
        let table = Table::new();
        let mut model = Model::default();
        let mut held: Vec<Claim> = Vec::new();
        let mut waiting: Vec<Claim> = Vec::new();
        let mut out = Vec::new();
        let mut next = 0;
        let mut steps = steps.into_iter();
        loop {
            let step = match steps.next() {
                Some(step) => step,
                None if held.is_empty() => break,
                None => Step::Release(next as usize * 7),
            };
            match step {
                Step::Claim { queue, offset, len, exclusive } => {
                    let kind = if exclusive { Kind::Exclusive } else { Kind::Shared };
                    let c = claim(queue, next, offset, len, kind);
                    next += 1;
                    model.line.push(c);
                    match table.claim(c) {
                        Outcome::Granted => held.push(c),
                        Outcome::Waits => waiting.push(c),
                    }
                }
                Step::Release(_) if held.is_empty() => continue,
                Step::Release(n) => {
                    next += u16::from(steps.len() == 0);
                    let c = held.remove(n % held.len());
                    model.line.retain(|e| !e.is(&c));
                    out.clear();
                    table.release(c, &mut out);
                    for g in &out {
                        let at = waiting.iter().position(|w| w == g);
                        prop_assert!(at.is_some(), "granted twice, or never asked for");
                        held.push(waiting.remove(at.unwrap_or(0)));
                    }
                }
            }
            for (i, a) in held.iter().enumerate() {
                prop_assert!(held[..i].iter().all(|b| !a.conflicts(b)), "two hold what conflicts");
                prop_assert!(!model.overtakes(a), "overtook an earlier claim that conflicts");
            }
            prop_assert!(waiting.iter().all(|w| !model.is_alone(w)), "left behind");
        }
        prop_assert!(waiting.is_empty(), "a wake-up was lost, or two wait for each other");
        prop_assert!(table.is_idle());
    }
}

/// Real threads: each holds at most one claim at a time, waits for its grant as a queue does, and checks that nobody
/// else is inside.
#[test]
fn threads_exclude_each_other_and_all_finish() {
    const THREADS: u8 = 4;
    const ROUNDS: u64 = 4000;
    const BLOCKS: u64 = 64;
    let table = Arc::new(Table::new());
    // Positive: readers inside; -1: a writer.
    let inside: Arc<Vec<AtomicI32>> = Arc::new((0..BLOCKS).map(|_| AtomicI32::new(0)).collect());
    let granted: Arc<Vec<AtomicU64>> = Arc::new((0..THREADS).map(|_| AtomicU64::new(0)).collect());
    let run = |me: u8| {
        let (table, inside, granted) = (table.clone(), inside.clone(), granted.clone());
        move || {
            let mut random = u64::from(me) + 1;
            let mut out = Vec::new();
            for round in 0..ROUNDS {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let first = (random >> 33) % BLOCKS;
                let count = 1 + (random >> 45) % (BLOCKS - first).min(5);
                let kind = if random >> 60 & 3 == 0 { Kind::Shared } else { Kind::Exclusive };
                // One block per stripe, so that a claim takes several slots.
                let c = claim(me, 0, first * STRIPE, count * STRIPE, kind);
                if table.claim(c) == Outcome::Waits {
                    while granted[usize::from(me)].swap(0, Ordering::Acquire) == 0 {
                        std::thread::yield_now();
                    }
                }
                let blocks = usize::try_from(first).unwrap()..usize::try_from(first + count).unwrap();
                for b in &inside[blocks.clone()] {
                    match kind {
                        Kind::Shared => assert!(b.fetch_add(1, Ordering::SeqCst) >= 0),
                        Kind::Exclusive => assert_eq!(b.swap(-1, Ordering::SeqCst), 0, "round {round}"),
                    }
                }
                for b in &inside[blocks] {
                    match kind {
                        Kind::Shared => drop(b.fetch_sub(1, Ordering::SeqCst)),
                        Kind::Exclusive => b.store(0, Ordering::SeqCst),
                    }
                }
                out.clear();
                table.release(c, &mut out);
                for g in &out {
                    granted[usize::from(g.queue.0)].store(1, Ordering::Release);
                }
            }
        }
    };
    let threads: Vec<_> = (0..THREADS).map(|me| std::thread::spawn(run(me))).collect();
    for t in threads {
        t.join().unwrap();
    }
    assert!(table.is_idle());
}
