//! What the client asks of its server: one batch after the other, the next one when all of the last one is answered. So
//! the cookies of a session follow from the order of its answers alone, and a recorded one fits again.

use lh_block::{Extent, Geometry, Op, Request};
use lh_ring::{Payload, Pool};

/// The device. Large enough for zeroes that go in pieces.
pub const GEOMETRY: Geometry =
    Geometry { size: 4 << 30, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 16 };

/// The bytes of every write.
pub const FILL: u8 = 0x5a;

const WRITE: Op = Op::Write { fua: false };
const DURABLE: Op = Op::Write { fua: true };
const ZEROES: Op = Op::WriteZeroes { fua: true, may_unmap: false, fast: false };
const FAST: Op = Op::WriteZeroes { fua: false, may_unmap: true, fast: true };

/// Operations, offsets and lengths. The ranges of a batch do not overlap, and it has one flush at most.
const BATCHES: [&[(Op, u64, u64)]; 3] = [
    &[
        (Op::Read, 0, 2048),
        (WRITE, 8192, 512),
        (Op::Flush, 0, 0),
        (ZEROES, 1 << 20, 1 << 20),
        (Op::Unmap, 2 << 20, 64 << 10),
        (Op::Read, 12288, 512),
    ],
    &[(ZEROES, 1 << 30, (2 << 30) + 4096), (Op::Read, 8192, 512), (Op::Unmap, 0, 4096), (Op::Flush, 0, 0)],
    &[(DURABLE, 0, 1024), (FAST, 1 << 20, 4096), (Op::Read, 1 << 20, 512), (Op::Read, 512, 1024)],
];

/// Requests of all batches.
pub const COUNT: u64 = (BATCHES[0].len() + BATCHES[1].len() + BATCHES[2].len()) as u64;

/// The requests of a batch. Tags count from the first request of the first one; there is nothing after the last.
pub fn batch(number: usize, pool: &Pool) -> Vec<Request<Payload>> {
    let before: usize = BATCHES.iter().take(number).map(|batch| batch.len()).sum();
    let batch = BATCHES.get(number).copied().unwrap_or_default();
    let request = |(tag, &(op, offset, len)): (u64, &(Op, u64, u64))| {
        let data = matches!(op, Op::Write { .. }).then(|| {
            let mut data = pool.alloc(u32::try_from(len).expect("short"), 512).expect("memory");
            data.write_at(0, &vec![FILL; data.len()]);
            data
        });
        Request { tag, op, range: Extent::new(offset, len), data }
    };
    (before as u64..).zip(batch).map(request).collect()
}
