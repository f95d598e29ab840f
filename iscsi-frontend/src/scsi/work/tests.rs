use lh_block::{Device, Geometry, IoError, Request};
use lh_ring::MemoryDisk;

use super::super::sense::{NO_SPACE, PARAMETER_LIST_LENGTH, READ_ERROR, WRITE_ERROR};
use super::*;

const GEOMETRY: Geometry =
    Geometry { size: 16 << 20, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 4 };

struct Bench {
    pool: Pool,
    disk: MemoryDisk,
    /// Operations that the device got.
    seen: Vec<Op>,
}

impl Bench {
    fn new() -> Self {
        let pool = Pool::new(1 << 20, 16 << 20).unwrap();
        let disk = MemoryDisk::new(&pool, GEOMETRY);
        Self { pool, disk, seen: Vec::new() }
    }

    fn payload(&self, bytes: &[u8]) -> Payload {
        let mut payload = self.pool.alloc(u32::try_from(bytes.len()).unwrap(), 512).unwrap();
        payload.write_at(0, bytes);
        payload
    }

    fn run(&mut self, work: Work, data: Option<&[u8]>) -> Result<Option<Vec<u8>>, Sense> {
        let data = data.map(|bytes| self.payload(bytes));
        let (mut execution, mut step) = Execution::start(work, data, &self.pool);
        loop {
            match step {
                Step::Device { op, range, data } => {
                    self.seen.push(op);
                    self.disk.submit(Request { tag: 1, op, range, data });
                    step = execution.answer(self.disk.poll_done().unwrap(), &self.pool);
                }
                Step::Over(result) => return result.map(|data| data.map(|data| data.to_vec())),
                Step::NoMemory => panic!("no memory"),
            }
        }
    }

    fn bytes(&self, offset: u64, len: u64) -> Vec<u8> {
        self.disk.store().bytes(Extent::new(offset, len))
    }
}

fn failed(reason: IoError) -> Done<Payload> {
    Done { tag: 0, result: Err(reason), data: None }
}

fn range(offset: u64, len: u64) -> Extent {
    Extent::new(offset, len)
}

/// An unmap cannot wait for stable storage, zeroes can: without a write cache nobody flushes behind it.
#[test]
fn a_pattern_that_may_be_unmapped_is_durable_where_it_has_to_be() {
    for (fua, expected) in
        [(false, Op::Unmap), (true, Op::WriteZeroes { fua: true, may_unmap: true, fast: false })]
    {
        let mut bench = Bench::new();
        let work = Work::WriteSame { range: range(0, 8192), block: 512, unmap: true, fua };
        assert_eq!(bench.run(work, Some(&[7; 512])), Ok(None));
        let work = Work::Zero { range: range(0, 8192), unmap: true, fua };
        assert_eq!(bench.run(work, None), Ok(None));
        assert_eq!(bench.seen, [expected; 2]);
    }
}

#[test]
fn reads_and_writes_are_one_request() {
    let mut bench = Bench::new();
    let write = Work::Write { range: range(4096, 1024), fua: true };
    assert_eq!(write.data_out(), 1024);
    assert_eq!(bench.run(write, Some(&[7; 1024])), Ok(None));
    let read = Work::Read(range(4096, 1024));
    assert_eq!(bench.run(read, None), Ok(Some(vec![7; 1024])));
    assert_eq!(bench.seen, [Op::Write { fua: true }, Op::Read]);
}

/// The flush comes behind the read, whose bytes may be younger than any before it.
#[test]
fn a_read_of_what_is_stable_ends_with_a_flush() {
    let mut bench = Bench::new();
    bench.run(Work::Write { range: range(4096, 1024), fua: false }, Some(&[7; 1024])).unwrap();
    let read = Work::ReadStable(range(4096, 1024));
    assert_eq!((read.data_in(), read.memory(), read.data_out(), read.is_write()), (1024, 1024, 0, false));
    assert_eq!(bench.run(read, None), Ok(Some(vec![7; 1024])));
    assert_eq!(bench.seen[1..], [Op::Read, Op::Flush]);
    // What does not come to the medium is a write's error, and nothing was read.
    let (mut execution, _) = Execution::start(read, None, &bench.pool);
    let data = Done { tag: 0, result: Ok(()), data: Some(bench.payload(&[1; 1024])) };
    assert!(matches!(execution.answer(data, &bench.pool), Step::Device { op: Op::Flush, .. }));
    assert!(matches!(execution.answer(failed(IoError::Io), &bench.pool), Step::Over(Err(WRITE_ERROR))));
}

#[test]
fn compare_and_write_writes_only_what_compares() {
    let mut bench = Bench::new();
    let work = Work::CompareAndWrite { range: range(512, 512), fua: false };
    assert_eq!(work.data_out(), 1024);
    assert_eq!(bench.run(work, Some(&[vec![0; 512], vec![5; 512]].concat())), Ok(None));
    assert_eq!(bench.bytes(512, 512), [5; 512]);
    let mut wrong = vec![5; 1024];
    wrong[300] = 6;
    assert_eq!(bench.run(work, Some(&wrong)), Err(MISCOMPARED.with_information(300)));
    assert_eq!(bench.bytes(512, 512), [5; 512]);
    assert_eq!(bench.seen, [Op::Read, Op::Write { fua: false }, Op::Read]);
}

#[test]
fn orwrite_sets_bits() {
    let mut bench = Bench::new();
    bench.run(Work::Write { range: range(0, 8192), fua: false }, Some(&[0x0f; 8192])).unwrap();
    bench.run(Work::OrWrite { range: range(0, 8192), fua: false }, Some(&[0x31; 8192])).unwrap();
    assert_eq!(bench.bytes(0, 8192), [0x3f; 8192]);
}

#[test]
fn verify_finds_the_first_difference() {
    let mut bench = Bench::new();
    bench.run(Work::Write { range: range(0, 8192), fua: false }, Some(&[9; 8192])).unwrap();
    let all = Work::Verify { range: range(0, 8192), data: 8192 };
    assert_eq!(bench.run(all, Some(&[9; 8192])), Ok(None));
    let mut wrong = vec![9; 8192];
    wrong[5000] = 1;
    assert_eq!(bench.run(all, Some(&wrong)), Err(MISCOMPARED.with_information(5000)));
    // One block against each, over several reads.
    let long = Work::Verify { range: range(0, 3 << 20), data: 512 };
    assert_eq!(bench.run(long, Some(&[9; 512])), Err(MISCOMPARED.with_information(8192)));
    let zeroes = Work::Verify { range: range(1 << 20, 3 << 20), data: 512 };
    assert_eq!(bench.run(zeroes, Some(&[0; 512])), Ok(None));
}

#[test]
fn write_and_verify_reads_back_only_where_it_compares() {
    let mut bench = Bench::new();
    let compare = Work::WriteVerify { range: range(0, 512), compare: true };
    assert_eq!(bench.run(compare, Some(&[3; 512])), Ok(None));
    let plain = Work::WriteVerify { range: range(0, 512), compare: false };
    assert_eq!(bench.run(plain, Some(&[4; 512])), Ok(None));
    let fua = Op::Write { fua: true };
    assert_eq!(bench.seen, [fua, Op::Read, fua]);
}

#[test]
fn write_same_repeats_a_block_and_makes_zeroes_of_zeroes() {
    let mut bench = Bench::new();
    let same = |range, unmap| Work::WriteSame { range, block: 512, unmap, fua: false };
    assert_eq!(bench.run(same(range(512, 600 << 10), false), Some(&[8; 512])), Ok(None));
    assert_eq!(bench.bytes(0, 513)[511..], [0, 8]);
    assert!(bench.bytes(512, 600 << 10).iter().all(|b| *b == 8));
    assert_eq!(bench.bytes(512 + (600 << 10), 1), [0]);
    assert_eq!(bench.seen.len(), 3);
    bench.seen.clear();
    bench.run(same(range(0, 1 << 20), true), Some(&[0; 512])).unwrap();
    bench.run(same(range(0, 1 << 20), false), Some(&[0; 512])).unwrap();
    let zeroes = Op::WriteZeroes { fua: false, may_unmap: false, fast: false };
    assert_eq!(bench.seen, [Op::Unmap, zeroes]);
    // With UNMAP nobody looks at the data.
    bench.seen.clear();
    bench.run(same(range(0, 512), true), Some(&[1; 512])).unwrap();
    assert_eq!(bench.seen, [Op::Unmap]);
}

fn unmap_list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let descriptors = u16::try_from(16 * ranges.len()).unwrap();
    let mut list = [(descriptors + 6).to_be_bytes(), descriptors.to_be_bytes(), [0; 2], [0; 2]].concat();
    for (first, count) in ranges {
        list.extend_from_slice(&first.to_be_bytes());
        list.extend_from_slice(&count.to_be_bytes());
        list.extend_from_slice(&[0; 4]);
    }
    list
}

#[test]
fn unmap_takes_all_descriptors_or_none() {
    let mut bench = Bench::new();
    bench.run(Work::Write { range: range(0, 8192), fua: false }, Some(&[9; 8192])).unwrap();
    let mut unmap = |list: &[u8]| {
        let data = u32::try_from(list.len()).unwrap();
        let result = bench.run(Work::Unmap { data, block: 512, size: GEOMETRY.size, fua: false }, Some(list));
        (result, bench.bytes(0, 8192).iter().filter(|b| **b == 9).count())
    };
    let beyond = unmap_list(&[(0, 1), (GEOMETRY.size / 512, 1)]);
    assert_eq!(unmap(&beyond), (Err(OUT_OF_RANGE.at_parameter(24)), 8192));
    let wild = unmap_list(&[(u64::MAX, u32::MAX)]);
    assert_eq!(unmap(&wild), (Err(OUT_OF_RANGE.at_parameter(8)), 8192));
    assert_eq!(unmap(&[0; 7]), (Err(PARAMETER_LIST_LENGTH), 8192));
    assert_eq!(unmap(&unmap_list(&[(0, 1), (5, 0), (4, 2)])), (Ok(None), 8192 - 3 * 512));
    // Says more descriptors than have come: those that have.
    let mut cut = unmap_list(&[(8, 1), (9, 1)]);
    cut.truncate(8 + 16 + 5);
    assert_eq!(unmap(&cut), (Ok(None), 8192 - 4 * 512));
    let mut not_whole = unmap_list(&[(10, 1), (11, 1)]);
    not_whole[3] -= 1;
    assert_eq!(unmap(&not_whole), (Ok(None), 8192 - 5 * 512));
}

#[test]
fn without_a_write_cache_an_unmap_ends_with_a_flush() {
    let mut bench = Bench::new();
    let mut unmap = |list: &[u8], fua| {
        let data = u32::try_from(list.len()).unwrap();
        bench.run(Work::Unmap { data, block: 512, size: GEOMETRY.size, fua }, Some(list)).unwrap();
        std::mem::take(&mut bench.seen)
    };
    let list = unmap_list(&[(0, 1), (5, 0), (4, 2)]);
    assert_eq!(unmap(&list, false), [Op::Unmap, Op::Unmap]);
    assert_eq!(unmap(&list, true), [Op::Unmap, Op::Unmap, Op::Flush]);
    assert_eq!(unmap(&unmap_list(&[]), true), [Op::Flush]);
}

#[test]
fn an_error_of_the_device_ends_the_command() {
    let bench = Bench::new();
    let data = Some(bench.payload(&[1; 1024]));
    let work = Work::CompareAndWrite { range: range(0, 512), fua: false };
    let (mut execution, step) = Execution::start(work, data, &bench.pool);
    assert!(matches!(step, Step::Device { op: Op::Read, .. }));
    let read = Done { tag: 0, result: Ok(()), data: Some(bench.payload(&[1; 512])) };
    assert!(matches!(execution.answer(read, &bench.pool), Step::Device { op: Op::Write { .. }, .. }));
    assert!(matches!(execution.answer(failed(IoError::Io), &bench.pool), Step::Over(Err(WRITE_ERROR))));
    let (mut flush, _) = Execution::start(Work::Flush, None, &bench.pool);
    assert!(matches!(flush.answer(failed(IoError::NoSpace), &bench.pool), Step::Over(Err(NO_SPACE))));
}

/// An initiator that is told of a read error behind its flush looks for a block that cannot be read, and finds none: Linux makes
/// ENODATA of it for whoever syncs, and does not ask again.
#[test]
fn what_does_not_reach_the_medium_is_a_write_error() {
    let bench = Bench::new();
    let (here, fua) = (range(0, 4096), true);
    let list = unmap_list(&[(0, 1)]);
    let unmap = Work::Unmap { data: 24, block: 512, size: GEOMETRY.size, fua };
    let table = [
        (Work::Flush, None, 1),
        (Work::Write { range: here, fua }, Some(vec![1; 4096]), 1),
        (Work::WriteVerify { range: here, compare: true }, Some(vec![1; 4096]), 1),
        (Work::WriteSame { range: here, block: 512, unmap: false, fua }, Some(vec![1; 512]), 1),
        (Work::Zero { range: here, unmap: true, fua: false }, None, 1),
        (unmap, Some(list.clone()), 1),
        // The flush behind it.
        (unmap, Some(list), 2),
    ];
    for (work, data, fails_at) in table {
        let data = data.map(|bytes| bench.payload(&bytes));
        let (mut execution, mut step) = Execution::start(work, data, &bench.pool);
        for _ in 1..fails_at {
            assert!(matches!(step, Step::Device { .. }));
            step = execution.answer(Done { tag: 0, result: Ok(()), data: None }, &bench.pool);
        }
        assert!(matches!(step, Step::Device { .. }), "{work:?}");
        let last = execution.answer(failed(IoError::Io), &bench.pool);
        assert!(matches!(last, Step::Over(Err(WRITE_ERROR))), "{work:?} {last:?}");
    }
    for work in [Work::Read(here), Work::Verify { range: here, data: 4096 }] {
        let data = (work.data_out() > 0).then(|| bench.payload(&[1; 4096]));
        let (mut execution, _) = Execution::start(work, data, &bench.pool);
        let last = execution.answer(failed(IoError::Io), &bench.pool);
        assert!(matches!(last, Step::Over(Err(READ_ERROR))), "{work:?} {last:?}");
    }
}

#[test]
fn who_conflicts_with_whom() {
    let (here, there) = (range(0, 4096), range(4096, 4096));
    let table = [
        (Claim::Write(here), Claim::Write(here), false),
        (Claim::Own(here), Claim::Write(here), true),
        (Claim::Own(here), Claim::Write(there), false),
        (Claim::Own(here), Claim::Own(range(2048, 4096)), true),
        (Claim::Own(here), Claim::Nothing, false),
        (Claim::All, Claim::Nothing, true),
        (Claim::All, Claim::Write(there), true),
    ];
    for (a, b, expected) in table {
        assert_eq!((a.conflicts(b), b.conflicts(a)), (expected, expected), "{a:?} {b:?}");
    }
}
