//! The header of the data protocol: to bytes, and back with its checksum.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use lh_block::Generation;
use lh_wire::{Header, OpCode};

fn header(c: &mut Criterion) {
    let generation = Generation { attachment: 1, restart: 0 };
    let request = Header { payload: 4096, ..Header::request(OpCode::Write, 7, 1 << 30, 4096, generation) };
    let bytes = request.encode();
    let mut group = c.benchmark_group("wire_header");
    group.bench_function("encode", |b| b.iter(|| black_box(&request).encode()));
    group.bench_function("decode", |b| b.iter(|| Header::decode(black_box(&bytes))));
    group.finish();
}

criterion_group!(benches, header);
criterion_main!(benches);
