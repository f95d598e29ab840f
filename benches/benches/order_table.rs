//! The in-flight table: a range is claimed and given back, while nobody, or others, hold theirs.

use benches::Places;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use datapath::message::QueueId;
use datapath::order::{Claim, Kind, Outcome, Table, Ticket};
use lh_block::Extent;

const SIZE: u64 = 1 << 40;

fn claim(ticket: u16, offset: u64, len: u64) -> Claim {
    Claim {
        queue: QueueId(0),
        ticket: Ticket(ticket),
        range: Extent::new(offset, len),
        kind: Kind::Exclusive,
    }
}

fn order(c: &mut Criterion) {
    let mut group = c.benchmark_group("order_table");
    for (len, name) in [(4 << 10, "4KiB"), (1 << 20, "1MiB")] {
        let (table, mut granted, mut places) = (Table::new(), Vec::with_capacity(8), Places::new(SIZE - len));
        group.bench_function(BenchmarkId::new("claim_release", name), |b| {
            b.iter(|| {
                let claim = claim(0, places.next_block(), len);
                assert_eq!(table.claim(claim), Outcome::Granted);
                table.release(claim, &mut granted);
            });
        });
    }
    // 127 others are in flight, none of them in the way.
    let (table, mut granted, mut places) = (Table::new(), Vec::with_capacity(8), Places::new(SIZE / 2));
    for ticket in 1..128 {
        assert_eq!(table.claim(claim(ticket, SIZE / 2 + (u64::from(ticket) << 20), 4096)), Outcome::Granted);
    }
    group.bench_function("claim_release/beside_127", |b| {
        b.iter(|| {
            let claim = claim(0, places.next_block(), 4096);
            assert_eq!(table.claim(claim), Outcome::Granted);
            table.release(claim, &mut granted);
        });
    });
    // The second waits for the first, whose release lets it through.
    let (table, mut granted) = (Table::new(), Vec::with_capacity(8));
    group.bench_function("conflict", |b| {
        b.iter(|| {
            let (first, second) = (claim(0, 0, 4096), claim(1, 0, 4096));
            assert_eq!((table.claim(first), table.claim(second)), (Outcome::Granted, Outcome::Waits));
            granted.clear();
            table.release(first, &mut granted);
            assert_eq!(granted, [second]);
            table.release(second, &mut granted);
        });
    });
    group.finish();
}

criterion_group!(benches, order);
criterion_main!(benches);
