//! A replica's part of a write of 4 KiB, apart from the disk's: header, session, intent, index, answer.

use benches::ReplicaRig;
use criterion::{Criterion, criterion_group, criterion_main};

fn write(c: &mut Criterion) {
    let mut group = c.benchmark_group("replica_write");
    let mut rig = ReplicaRig::overwriting().expect("a replica directory");
    group.bench_function("overwriting", |b| b.iter(|| rig.write()));
    let mut rig = ReplicaRig::new(0).expect("a replica directory");
    group.bench_function("into_holes", |b| b.iter(|| rig.write()));
    group.finish();
}

criterion_group!(benches, write);
criterion_main!(benches);
