//! A replica's index, which says what layer holds a block: empty, and with runs all over.

use benches::IndexedStore;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

fn index(c: &mut Criterion) {
    let mut group = c.benchmark_group("extent_index");
    for blocks in [0_u64, 100_000] {
        let mut store = IndexedStore::new(blocks).expect("a replica directory");
        group.bench_function(BenchmarkId::new("look_up", blocks), |b| b.iter(|| store.look_up()));
        // Each update adds a run until chunks become a byte per block: the cost is that of a volume that fills.
        group.bench_function(BenchmarkId::new("update", blocks), |b| b.iter(|| store.update()));
    }
    group.finish();
}

criterion_group!(benches, index);
criterion_main!(benches);
