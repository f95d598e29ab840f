use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use lh_block::{Extent, Geometry, Runs};
use lh_ring::{MemoryDisk, Pool};

use super::super::command::{be32, be64};
use super::super::keep::{NoStore, SaveError};
use super::super::sense::{INVALID_FIELD, INVALID_OPCODE};
use super::super::work::{Claim, TRANSFER_MAX};
use super::*;

const GEOMETRY: Geometry =
    Geometry { size: 64 << 20, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 8 };
const DISK: u64 = (DISK_LUN as u64) << 48;
const A: &str = "iqn.a,i,0x400000000001";
const B: &str = "iqn.b,i,0x400000000002";

/// How a save ends.
#[derive(Clone, Copy, Default)]
enum Fails {
    #[default]
    Not,
    /// Before anything has changed.
    Unchanged,
    /// Behind the rename.
    HalfDone,
}

/// Keeps in memory what was saved, and can fail.
#[derive(Clone, Default)]
struct Shared(Rc<RefCell<Saved>>);

#[derive(Default)]
struct Saved {
    bytes: Option<Vec<u8>>,
    /// How the next saves end; those after them end well.
    fails: Vec<Fails>,
}

impl Shared {
    fn fails(&self, how: &[Fails]) {
        self.0.borrow_mut().fails = how.to_vec();
    }

    fn kept(&self) -> Kept {
        Kept::decode(self.0.borrow().bytes.as_ref().unwrap()).unwrap()
    }
}

impl Store for Shared {
    fn outlives(&self) -> bool {
        true
    }

    fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.borrow().bytes.clone())
    }

    fn save(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        let mut saved = self.0.borrow_mut();
        let fails = if saved.fails.is_empty() { Fails::Not } else { saved.fails.remove(0) };
        match fails {
            Fails::Unchanged => return Err(SaveError::Unchanged(io::ErrorKind::StorageFull.into())),
            Fails::Not | Fails::HalfDone => saved.bytes = Some(bytes.to_vec()),
        }
        match fails {
            Fails::HalfDone => Err(SaveError::Unknown(io::Error::other("not synced"))),
            Fails::Not | Fails::Unchanged => Ok(()),
        }
    }
}

struct Bench {
    unit: LogicalUnit,
    disk: MemoryDisk,
    reply: Vec<u8>,
}

impl Bench {
    fn with(store: Box<dyn Store>, read_only: bool) -> Self {
        let pool = Pool::new(0, 4 << 20).unwrap();
        let unit = LogicalUnit::open(Identity::of_volume("vol"), read_only, true, store).unwrap();
        Self { unit, disk: MemoryDisk::new(&pool, GEOMETRY), reply: Vec::new() }
    }

    fn new() -> Self {
        Self::with(Box::new(NoStore), false)
    }

    /// An initiator that has been told of its own coming.
    fn join(&mut self, port: &str) -> NexusId {
        let nexus = self.unit.attach(port);
        assert_eq!(self.ask(nexus, &[0]), Decision::Check(sense::POWER_ON));
        nexus
    }

    fn at(&mut self, nexus: NexusId, lun: u64, cdb: &[u8]) -> Decision {
        self.reply.clear();
        self.unit.decide(nexus, lun, &padded(cdb), &mut self.disk, &mut self.reply)
    }

    fn ask(&mut self, nexus: NexusId, cdb: &[u8]) -> Decision {
        self.at(nexus, DISK, cdb)
    }

    fn give(&mut self, nexus: NexusId, cdb: &[u8], list: &[u8]) -> Decision {
        match self.ask(nexus, cdb) {
            Decision::Parameters(length) => assert_eq!(length as usize, list.len()),
            other => return other,
        }
        self.unit.parameters(nexus, &padded(cdb), list, GEOMETRY.logical_block)
    }

    /// PERSISTENT RESERVE OUT.
    fn reserve_out(&mut self, nexus: NexusId, action: u8, kind: u8, key: u64, new: u64) -> Decision {
        let list = [&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat();
        self.give(nexus, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24], &list)
    }
}

fn padded(cdb: &[u8]) -> Cdb {
    let mut padded = [0; 16];
    padded[..cdb.len()].copy_from_slice(cdb);
    padded
}

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

fn write(fua: bool) -> Decision {
    Decision::Work(Work::Write { range: Extent::new(0, 512), fua })
}

#[test]
fn attentions_are_told_once_and_not_to_inquiries() {
    let mut bench = Bench::new();
    let a = bench.unit.attach(A);
    assert_eq!(bench.ask(a, &[0x12, 0, 0, 0, 36]), Decision::Good);
    assert_eq!(bench.ask(a, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255]), Decision::Good);
    assert_eq!(bench.ask(a, &READ), Decision::Check(sense::POWER_ON));
    assert_eq!(bench.ask(a, &READ), Decision::Work(Work::Read(Extent::new(0, 512))));
    // REQUEST SENSE takes one, too.
    bench.unit.reset(Reset::Unit);
    assert_eq!(bench.ask(a, &[0x03, 0, 0, 0, 252]), Decision::Good);
    assert_eq!((bench.reply[2], bench.reply[12], bench.reply[13]), (6, 0x29, 3));
    assert_eq!(bench.ask(a, &[0]), Decision::Good);
    for _ in 0..2 * ATTENTIONS_MAX {
        bench.unit.reset(Reset::Target);
    }
    assert_eq!(bench.ask(a, &[0]), Decision::Check(sense::TARGET_RESET));
    assert_eq!(bench.ask(a, &[0]), Decision::Good);
}

#[test]
fn a_volume_that_grows_is_told_to_all() {
    let mut bench = Bench::new();
    bench.unit.watch_size(64 << 20);
    let (a, b) = (bench.join(A), bench.join(B));
    bench.unit.watch_size(64 << 20);
    assert_eq!(bench.ask(a, &[0]), Decision::Good);
    bench.unit.watch_size(128 << 20);
    for nexus in [a, b] {
        assert_eq!(bench.ask(nexus, &[0]), Decision::Check(sense::CAPACITY_CHANGED));
        assert_eq!(bench.ask(nexus, &[0]), Decision::Good);
    }
}

#[test]
fn who_is_at_which_number() {
    let mut bench = Bench::new();
    let a = bench.join(A);
    assert_eq!(bench.at(a, 0, &[0x12, 0, 0, 0, 36]), Decision::Good);
    assert_eq!(bench.reply[0], 0x0c);
    assert_eq!(bench.at(a, 0, &READ), Decision::Check(INVALID_OPCODE.at_cdb(0)));
    assert_eq!(bench.at(a, 0x4001 << 48, &[0]), Decision::Good);
    for lun in [2 << 48, DISK | 1, 0x8001 << 48] {
        assert_eq!(bench.at(a, lun, &[0]), Decision::Check(sense::NO_UNIT));
        assert_eq!(bench.at(a, lun, &[0x12, 0, 0, 0, 36]), Decision::Good);
        assert_eq!(bench.reply[0], 0x7f);
        assert_eq!(bench.at(a, lun, &[0x03, 0, 0, 0, 18]), Decision::Good);
        assert_eq!(bench.reply[12], 0x25);
    }
    bench.ask(a, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255]);
    assert_eq!(bench.reply, [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn ranges_and_lengths_are_checked() {
    let mut bench = Bench::new();
    let a = bench.join(A);
    let blocks = u32::try_from(GEOMETRY.size / 512).unwrap().to_be_bytes();
    let [x, y, z, w] = blocks;
    assert_eq!(bench.ask(a, &[0x28, 0, x, y, z, w, 0, 0, 0]), Decision::Check(sense::OUT_OF_RANGE));
    assert_eq!(bench.ask(a, &[0x28, 0, 0, 0, 0, 0, 0, 0, 0]), Decision::Good);
    let far = [0x88, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 2];
    assert_eq!(bench.ask(a, &far), Decision::Check(sense::OUT_OF_RANGE));
    // 2,049 blocks are more than 1 MiB.
    let long = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x08, 0x01];
    assert_eq!(bench.ask(a, &long), Decision::Check(INVALID_FIELD.at_cdb(10)));
    assert_eq!(bench.ask(a, &[0x28, 0x20]), Decision::Check(INVALID_FIELD.at_cdb(1)));
    assert_eq!(bench.ask(a, &[0xc0]), Decision::Check(INVALID_OPCODE.at_cdb(0)));
    // READ (6) of 0 blocks is one of 256.
    assert_eq!(bench.ask(a, &[0x08]), Decision::Work(Work::Read(Extent::new(0, 256 * 512))));
    let same = [0x93, 0x09, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0];
    let zero = Work::Zero { range: Extent::new(0, 16 << 20), unmap: true, fua: false };
    assert_eq!(bench.ask(a, &same), Decision::Work(zero));
    let more = [0x93, 0x09, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 1];
    assert_eq!(bench.ask(a, &more), Decision::Check(INVALID_FIELD.at_cdb(10)));
}

/// What the block limits page says is taken, and no more.
#[test]
fn as_many_blocks_are_compared_as_are_told() {
    for (max_transfer, told) in [(1 << 20, 255), (64 << 10, 64), (4096, 4)] {
        let mut bench = Bench::new();
        let pool = Pool::new(0, 4 << 20).unwrap();
        bench.disk = MemoryDisk::new(&pool, Geometry { max_transfer, ..GEOMETRY });
        let a = bench.join(A);
        assert_eq!(bench.ask(a, &[0x12, 1, 0xb0, 0, 64]), Decision::Good);
        assert_eq!(bench.reply[5], told, "{max_transfer}");
        let compare =
            |bench: &mut Bench, blocks| bench.ask(a, &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, blocks]);
        assert!(matches!(compare(&mut bench, told), Decision::Work(_)), "{max_transfer}");
        if told < u8::MAX {
            assert_eq!(compare(&mut bench, told + 1), Decision::Check(INVALID_FIELD.at_cdb(13)));
        }
    }
}

#[test]
fn fua_and_the_write_cache() {
    let mut bench = Bench::new();
    let (a, b) = (bench.join(A), bench.join(B));
    assert_eq!(bench.ask(a, &WRITE), write(false));
    assert_eq!(bench.ask(a, &[0x2a, 0x18, 0, 0, 0, 0, 0, 0, 1, 0]), write(true));
    // WCE off: every write waits for stable storage, and the others are told.
    let mut list = vec![0; 4 + 20];
    (list[4], list[5]) = (0x08, 18);
    let flush = Decision::Work(Work::Flush);
    assert_eq!(bench.give(a, &[0x15, 0x10, 0, 0, 24], &list), flush, "nobody flushes later");
    assert_eq!(bench.give(a, &[0x15, 0x10, 0, 0, 24], &list), Decision::Good, "it was off");
    let unmap = bench.ask(a, &[0x42, 0, 0, 0, 0, 0, 0, 0, 24]);
    assert!(matches!(unmap, Decision::Work(Work::Unmap { fua: true, .. })), "{unmap:?}");
    assert_eq!(bench.ask(a, &WRITE), write(true));
    assert_eq!(bench.ask(a, &[0x1a, 8, 8, 0, 255]), Decision::Good);
    assert_eq!(bench.reply[6] & 4, 0);
    assert_eq!(bench.ask(b, &[0]), Decision::Check(sense::MODE_CHANGED));
}

#[test]
fn protection_in_every_way() {
    let mut bench = Bench::with(Box::new(NoStore), true);
    let a = bench.join(A);
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 24];
    let same = [0x41, 8, 0, 0, 0, 0, 0, 0, 1];
    let compare = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    for cdb in [&WRITE[..], &unmap, &same, &compare, &[0x0a, 0, 0, 0, 1]] {
        assert_eq!(bench.ask(a, cdb), Decision::Check(sense::WRITE_PROTECTED), "{cdb:x?}");
    }
    assert!(matches!(bench.ask(a, &READ), Decision::Work(_)));
    assert_eq!(bench.ask(a, &[0x1a, 8, 0x3f, 0, 255]), Decision::Good);
    assert_eq!(bench.reply[2], 0x90);
}

#[test]
fn the_old_reservation_is_of_one_and_goes_with_him() {
    let mut bench = Bench::new();
    let (a, b) = (bench.join(A), bench.join(B));
    assert_eq!(bench.ask(a, &[0x16]), Decision::Good);
    assert_eq!(bench.ask(a, &[0x16]), Decision::Good);
    for cdb in [&[0x16][..], &READ, &WRITE, &[0x1a, 8, 8, 0, 255], &[0]] {
        assert_eq!(bench.ask(b, cdb), Decision::Conflict, "{cdb:x?}");
    }
    // Released by another it stays.
    assert_eq!(bench.ask(b, &[0x17]), Decision::Good);
    assert_eq!(bench.ask(b, &READ), Decision::Conflict);
    bench.unit.detach(a);
    assert_eq!(bench.ask(b, &[0x16]), Decision::Good);
    bench.unit.reset(Reset::Unit);
    let c = bench.join("iqn.c,i,0x0");
    assert_eq!(bench.ask(c, &[0x16]), Decision::Good);
}

#[test]
fn persistent_reservations_outlive_sessions_and_processes() {
    let store = Shared::default();
    let mut bench = Bench::with(Box::new(store.clone()), false);
    let (a, b) = (bench.join(A), bench.join(B));
    assert_eq!(bench.reserve_out(a, out::REGISTER, 0, 0, 7), Decision::Good);
    assert_eq!(bench.reserve_out(a, out::RESERVE, 1, 7, 0), Decision::Good);
    assert_eq!(bench.ask(b, &WRITE), Decision::Conflict);
    assert!(matches!(bench.ask(b, &READ), Decision::Work(_)));
    assert_eq!(bench.ask(b, &[0x16]), Decision::Conflict);
    bench.unit.detach(a);
    assert_eq!(bench.ask(b, &WRITE), Decision::Conflict);
    let mut bench = Bench::with(Box::new(store), false);
    let (a, b) = (bench.join(A), bench.join(B));
    assert_eq!((bench.ask(a, &WRITE), bench.ask(b, &WRITE)), (write(false), Decision::Conflict));
}

/// SPC-4, 5.13.5: who can keep nothing says so, and takes no registration that is to be kept.
#[test]
fn a_unit_that_keeps_nothing_promises_nothing() {
    let stores: [(Box<dyn Store>, _, _); 2] = [
        (Box::new(Shared::default()), 1, Decision::Good),
        (Box::new(NoStore), 0, Decision::Check(sense::INVALID_PARAMETER.at_parameter(20))),
    ];
    for (store, can, registered) in stores {
        let mut bench = Bench::with(store, false);
        let a = bench.join(A);
        assert_eq!(bench.ask(a, &[0x5e, 2, 0, 0, 0, 0, 0, 0, 255]), Decision::Good);
        assert_eq!(bench.reply[2] & 1, can, "PTPL_C");
        for action in [out::REGISTER, out::REGISTER_AND_IGNORE] {
            let list = [&[0; 8][..], &7u64.to_be_bytes(), &[0, 0, 0, 0, 1, 0, 0, 0]].concat();
            let list =
                if action == out::REGISTER { list } else { [&7u64.to_be_bytes(), &list[8..]].concat() };
            assert_eq!(bench.give(a, &[0x5f, action, 0, 0, 0, 0, 0, 0, 24], &list), registered);
        }
        assert_eq!(keys(&mut bench, a), Ok(usize::from(can)));
    }
}

/// Asks for the keys, and gives the answer's length.
fn keys(bench: &mut Bench, nexus: NexusId) -> Result<usize, Decision> {
    match bench.ask(nexus, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 255]) {
        Decision::Good => Ok((bench.reply.len() - 8) / 8),
        other => Err(other),
    }
}

#[test]
fn what_is_not_durable_has_not_happened() {
    let store = Shared::default();
    store.fails(&[Fails::Unchanged]);
    let mut bench = Bench::with(Box::new(store.clone()), false);
    let a = bench.join(A);
    assert_eq!(bench.reserve_out(a, out::REGISTER, 0, 0, 7), Decision::Check(sense::INTERNAL));
    assert_eq!(keys(&mut bench, a), Ok(0));
    assert_eq!(bench.reserve_out(a, out::REGISTER, 0, 0, 7), Decision::Good);
}

/// The directory's sync has failed behind the rename: the next start would find what was refused.
#[test]
fn what_was_refused_does_not_come_true_with_the_next_start() {
    let store = Shared::default();
    let mut bench = Bench::with(Box::new(store.clone()), false);
    let (a, b) = (bench.join(A), bench.join(B));
    assert_eq!(bench.reserve_out(a, out::REGISTER, 0, 0, 7), Decision::Good);
    assert_eq!(bench.reserve_out(a, out::RESERVE, 1, 7, 0), Decision::Good);
    assert_eq!(bench.reserve_out(b, out::REGISTER, 0, 0, 8), Decision::Good);
    let held = store.kept();
    let refused = || Decision::Check(sense::INTERNAL);
    store.fails(&[Fails::HalfDone]);
    assert_eq!(bench.reserve_out(b, out::PREEMPT, 1, 8, 7), refused());
    assert_eq!((store.kept(), keys(&mut bench, a)), (held.clone(), Ok(2)));
    assert_eq!((bench.ask(a, &WRITE), bench.ask(b, &WRITE)), (write(false), Decision::Conflict));

    // It is not taken back either: nobody is told anything that the next start may not hold.
    store.fails(&[Fails::HalfDone, Fails::Unchanged, Fails::Unchanged, Fails::Unchanged, Fails::Unchanged]);
    assert_eq!(bench.reserve_out(b, out::PREEMPT, 1, 8, 7), refused());
    assert_ne!(store.kept(), held);
    assert_eq!(keys(&mut bench, a), Err(refused()));
    assert_eq!(bench.ask(a, &[0x1a, 8, 8, 0, 255]), refused());
    assert_eq!(bench.reserve_out(b, out::PREEMPT, 1, 8, 7), refused());
    // What holds meanwhile is what held before.
    assert_eq!((bench.ask(a, &WRITE), bench.ask(b, &WRITE)), (write(false), Decision::Conflict));
    assert_eq!((keys(&mut bench, a), store.kept()), (Ok(2), held));
    assert_eq!(bench.ask(a, &[0x1a, 8, 8, 0, 255]), Decision::Good);
    assert_eq!(bench.reserve_out(b, out::PREEMPT, 1, 8, 7), Decision::Good);
}

#[test]
fn a_damaged_store_lets_nobody_in() {
    let store = Shared::default();
    store.0.borrow_mut().bytes = Some(b"longhorn-scsi 1\ncrc32c 00000000\n".to_vec());
    let opened = LogicalUnit::open(Identity::of_volume("vol"), false, true, Box::new(store));
    assert!(matches!(opened, Err(OpenError::Unreadable(Unreadable::Checksum))));
}

#[test]
fn who_is_preempted_is_told_and_ended() {
    let mut bench = Bench::new();
    let (a, b) = (bench.join(A), bench.join(B));
    bench.reserve_out(a, out::REGISTER, 0, 0, 1);
    bench.reserve_out(b, out::REGISTER, 0, 0, 2);
    bench.reserve_out(a, out::RESERVE, 3, 1, 0);
    assert_eq!(bench.ask(b, &READ), Decision::Conflict);
    assert_eq!(bench.reserve_out(b, out::PREEMPT_AND_ABORT, 3, 2, 1), Decision::Good);
    assert_eq!(bench.unit.next_to_abort().as_deref(), Some(A));
    assert_eq!(bench.unit.next_to_abort(), None);
    assert_eq!(bench.ask(a, &[0]), Decision::Check(sense::REGISTRATION_PREEMPTED));
    assert_eq!(bench.ask(a, &READ), Decision::Conflict);
    assert!(matches!(bench.ask(b, &WRITE), Decision::Work(_)));
}

#[test]
fn allocation_is_told_as_the_device_knows_it() {
    let mut bench = Bench::new();
    let a = bench.join(A);
    let status = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 255];
    let Decision::Work(Work::LbaStatus(asked)) = bench.ask(a, &status) else { panic!("the device is asked") };
    assert_eq!(asked.range, Extent::new(4096, (64 << 20) - 4096));
    assert_eq!(asked.bytes(), 255);
    let mut runs = Runs::default();
    assert!(runs.push(2, true) && runs.push(3, false) && runs.push(1, true));
    let told = runs.as_bytes();
    let answer = asked.answer(told);
    assert_eq!((answer.len(), be32(&answer, 0)), (8 + 3 * 16, 4 + 3 * 16));
    let descriptors: Vec<_> =
        answer[8..].chunks(16).map(|one| (be64(one, 0), be32(one, 8), one[12])).collect();
    assert_eq!(descriptors, [(8, 16, 0), (24, 24, 1), (48, 8, 0)]);

    // Nothing is known: mapped. One descriptor, and where the list is cut off there is no more than was asked for.
    let answer = asked.answer(&[]);
    assert_eq!((answer.len(), be32(&answer, 16), answer[20]), (24, 131_072 - 8, 0));
    let short = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 41];
    let Decision::Work(Work::LbaStatus(asked)) = bench.ask(a, &short) else { panic!("the device is asked") };
    assert_eq!(asked.answer(told).len(), 8 + 2 * 16);
    let small = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 23];
    assert_eq!(bench.ask(a, &small), Decision::Check(sense::INVALID_FIELD.at_cdb(10)));
    let beyond = [0x9e, 0x12, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 255];
    assert_eq!(bench.ask(a, &beyond), Decision::Check(sense::OUT_OF_RANGE.at_cdb(2)));
}

#[test]
fn a_stopping_unit_refuses() {
    let mut bench = Bench::new();
    let a = bench.join(A);
    bench.unit.stop();
    assert_eq!(bench.ask(a, &WRITE), Decision::Check(sense::STOPPING));
    assert_eq!(bench.ask(a, &[0x12, 0, 0, 0, 36]), Decision::Good);
}

/// Every CDB ends in a decision: no panic, no work beyond the volume.
#[test]
fn any_cdb_comes_to_something() {
    let mut bench = Bench::new();
    let a = bench.join(A);
    let mut state = 1_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut works = 0;
    for i in 0..200_000_u32 {
        let mut cdb = [random().to_be_bytes(), random().to_be_bytes()].concat();
        cdb[0] = u8::try_from(i % 256).unwrap();
        if i & 0x100 == 0 {
            // Few bits: more of them mean something.
            cdb[1..].iter_mut().for_each(|byte| *byte &= 0x11);
        }
        let cdb: Cdb = cdb.try_into().unwrap();
        bench.reply.clear();
        if let Decision::Work(work) = bench.unit.decide(a, DISK, &cdb, &mut bench.disk, &mut bench.reply) {
            works += 1;
            assert!(work.data_out() <= 2 << 20 && work.data_in() <= TRANSFER_MAX, "{work:?}");
            if let Claim::Write(range) | Claim::Own(range) = work.claim() {
                assert!(range.end() <= GEOMETRY.size, "{work:?}");
            }
        }
        assert!(bench.reply.len() <= 64 << 10);
    }
    assert!(works > 100, "{works}");
}
