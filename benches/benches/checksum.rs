//! crc32c, as over payloads on TCP: 4 KiB and 1 MiB; and the hash by which replicas' blocks are compared.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn checksum(c: &mut Criterion) {
    let data: Vec<u8> = (0..1_u32 << 20).map(|n| n.to_le_bytes()[1]).collect();
    let mut group = c.benchmark_group("crc32c");
    for (len, name) in [(4 << 10, "4KiB"), (1 << 20, "1MiB")] {
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| crc32c::crc32c(black_box(&data[..len])));
        });
    }
    group.finish();
    let mut group = c.benchmark_group("block_hash");
    group.throughput(Throughput::Bytes(4 << 10));
    group.bench_function("4KiB", |b| {
        b.iter(|| lh_wire::block_hash(1, [black_box(&data[..4 << 10])].into_iter()));
    });
    group.finish();
}

criterion_group!(benches, checksum);
criterion_main!(benches);
