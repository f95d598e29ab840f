//! An NBD request: its header's bytes in, what to do out.

use std::hint::black_box;

use benches::NbdStream;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use nbd_frontend::Framing;

fn parse(c: &mut Criterion) {
    let mut group = c.benchmark_group("nbd_request");
    for (name, framing) in [("simple", Framing::Simple), ("extended", Framing::Extended)] {
        let stream = NbdStream::new(framing);
        let header = stream.write_header(1 << 30);
        group.bench_function(BenchmarkId::new("parse", name), |b| b.iter(|| stream.take(black_box(&header))));
    }
    group.finish();
}

criterion_group!(benches, parse);
criterion_main!(benches);
