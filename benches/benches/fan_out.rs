//! A queue machine over three replicas in memory, which copy what they are sent: a request of 4 KiB from its arrival to
//! its answer, alone and 32 at a time.

use benches::{Places, VolumeRig};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lh_block::Op;

const SIZE: u64 = VolumeRig::SIZE;

fn fan_out(c: &mut Criterion) {
    let mut group = c.benchmark_group("fan_out");
    for depth in [1_u64, 32] {
        group.throughput(Throughput::Elements(depth));
        for (name, op) in [("write", Op::Write { fua: false }), ("read", Op::Read)] {
            let mut rig = VolumeRig::new(3, true);
            // A stripe for each request in flight: none waits for another.
            let part = SIZE / depth;
            let mut places = Places::new(part);
            group.bench_function(BenchmarkId::new(name, depth), |b| {
                b.iter(|| rig.do_all(op, (0..depth).map(|n| n * part + places.next_block())));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, fan_out);
criterion_main!(benches);
