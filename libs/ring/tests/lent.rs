//! Payloads that another process reads where they lie: what it may map, what it sees, and how long that stays as it is.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use lh_ring::{CHUNK, Kept, Lent, Payload, Pool};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

fn lendable(chunks: usize) -> (Pool, Lent) {
    let pool = Pool::lendable(2 * CHUNK, chunks * CHUNK).expect("memory");
    let lent = Lent::open(pool.lend().expect("memory with a descriptor")).expect("it is mapped");
    (pool, lent)
}

fn filled(pool: &Pool, len: usize, byte: u8) -> Payload {
    let mut payload = pool.alloc(u32::try_from(len).expect("short"), 512).expect("room");
    payload.write_at(0, &vec![byte; len]);
    payload
}

#[test]
fn what_is_written_is_seen_where_it_lies() {
    let (pool, lent) = lendable(32);
    let mut payload = pool.alloc(1 << 20, 4096).expect("room");
    let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    payload.write_at(0, &bytes);
    assert!(payload.pieces().len() > 1);
    let seen = lent.payload(payload.pieces()).expect("they are inside");
    assert_eq!(seen.len(), 1 << 20);
    assert!(seen.to_vec() == bytes);
    assert_eq!(seen.crc32c(), payload.crc32c());
    assert!(seen.is_aligned(4096, 512) && !seen.is_exclusive());
    // It goes on while something was made of it, the lender's end included.
    let rest = seen.slice(1000, 5000);
    drop((seen, lent, payload, pool));
    assert!(rest.to_vec() == bytes[1000..6000]);
    let file = tempfile::tempfile().expect("a file");
    rest.write_to(&file, 0).expect("it is written");
    let mut back = vec![0; 5000];
    file.read_exact_at(&mut back, 0).expect("it is read");
    assert!(back == bytes[1000..6000]);
}

#[test]
fn pieces_outside_or_too_many_are_refused() {
    let (pool, lent) = lendable(8);
    let memory = File::from(pool.lend().expect("a descriptor")).metadata().expect("its length").size();
    let len = u32::try_from(memory).expect("below 4 GiB");
    assert!(lent.payload([(len - 512, 512)]).is_some());
    assert_eq!(lent.payload([]).expect("nothing").len(), 0);
    for bad in [(len - 512, 513), (len, 1), (u32::MAX, u32::MAX), (u32::MAX, 1), (0, u32::MAX)] {
        assert!(lent.payload([(0, 512), bad]).is_none(), "{bad:?}");
    }
    assert!(lent.payload([(0, 512); Payload::PIECES_MAX]).is_some());
    assert!(lent.payload([(0, 512); Payload::PIECES_MAX + 1]).is_none());
    assert!(lent.payload([(0, 1 << 20), (0, 1 << 20)]).is_none(), "more bytes than a payload has");
}

/// Made by somebody else: with these seals, of this length.
fn made(seals: SealFlag, len: i64) -> OwnedFd {
    let fd = memfd_create(c"foreign", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("a memfd");
    nix::unistd::ftruncate(fd.as_fd(), len).expect("its length");
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).expect("its seals");
    fd
}

#[test]
fn only_memory_that_keeps_its_length_is_mapped() {
    let sealed = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    assert!(Lent::open(made(sealed, 4096)).is_ok());
    let pipe: OwnedFd = std::io::pipe().expect("a pipe").0.into();
    let shm = if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    for (what, fd) in [
        ("it may shrink", made(SealFlag::F_SEAL_GROW, 4096)),
        ("it may grow", made(SealFlag::F_SEAL_SHRINK, 4096)),
        ("it is empty", made(sealed, 0)),
        ("it is too long", made(sealed, i64::try_from(Lent::MAX).expect("1 GiB") + 4096)),
        ("it is a pipe", pipe),
        ("it is a file in memory", tempfile::tempfile_in(shm).expect("a file").into()),
        ("it is a file", tempfile::tempfile().expect("a file").into()),
    ] {
        assert_eq!(Lent::open(fd).expect_err(what).kind(), ErrorKind::InvalidData, "{what}");
    }
    // There may be no huge page left for an access, which would kill the reader.
    let flags = MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_HUGETLB;
    let Ok(huge) = memfd_create(c"huge", flags) else {
        println!("SKIP only_memory_that_keeps_its_length_is_mapped: no huge pages here");
        return;
    };
    nix::unistd::ftruncate(&huge, 16 << 20).expect("its length");
    fcntl(&huge, FcntlArg::F_ADD_SEALS(sealed)).expect("its seals");
    assert_eq!(Lent::open(huge).expect_err("its pages are huge").kind(), ErrorKind::InvalidData);
}

#[test]
fn a_pool_that_nobody_would_map_lends_nothing() {
    let pool = Pool::lendable(0, Lent::MAX + CHUNK).expect("memory");
    assert!(pool.lend().is_none());
    assert_eq!(filled(&pool, 512, 7).to_vec(), [7; 512]);
}

#[test]
fn who_reads_cannot_write() {
    let (pool, _lent) = lendable(8);
    let mut memory = File::from(pool.lend().expect("a descriptor"));
    let seals = fcntl(&memory, FcntlArg::F_GET_SEALS).expect("its seals");
    let sealed = SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SEAL);
    assert!(sealed, "nobody seals it against its owner");
    assert_eq!(memory.write(b"x").expect_err("it is for reading").raw_os_error(), Some(9));
    assert!(memory.set_len(0).is_err() && memory.set_len(1 << 30).is_err());
    // A mapping that may be written, which mprotect(2) would make of one that may not.
    let other = File::options().write(true).open(format!("/proc/self/fd/{}", memory.as_raw_fd()));
    assert!(other.is_ok(), "root may; the sizes are sealed all the same");
    assert!(other.expect("root may").set_len(0).is_err());
    assert!(Pool::new(0, 8 * CHUNK).expect("memory").lend().is_none(), "anonymous memory is not lent");
}

#[test]
fn pages_of_an_idle_pool_go_back() {
    let (pool, lent) = lendable(32);
    let memory = File::from(pool.lend().expect("a descriptor"));
    let resident = || memory.metadata().expect("its blocks").blocks() * 512;
    assert_eq!(resident(), 0);
    assert!(pool.lock().is_ok() || !nix::unistd::geteuid().is_root());
    let all: Vec<_> = (0..16).map(|n| filled(&pool, CHUNK, n)).collect();
    let seen = lent.payload(all[15].pieces()).expect("inside");
    assert_eq!(resident(), 16 * CHUNK as u64);
    drop(all);
    assert!(resident() <= 3 * CHUNK as u64, "{} bytes", resident());
    // Which of them went is the pool's affair; a reader that comes too late sees zeroes, and does not die.
    assert!(seen.to_vec().iter().all(|byte| [0, 15].contains(byte)));
    pool.populate().expect("Linux >= 5.14");
}

/// What is kept stays as it is whatever the pool is used for, and takes nothing from it.
#[test]
fn what_is_kept_does_not_change_and_does_not_count() {
    let (pool, lent) = lendable(8);
    let old: Vec<_> = (0..8).map(|n| filled(&pool, CHUNK, 10 + n)).collect();
    let seen: Vec<_> = old.iter().map(|p| lent.payload(p.pieces()).expect("inside")).collect();
    assert_eq!(pool.free_chunks(), 0);
    let kept: Vec<_> = old.iter().map(|p| Kept::new(p.clone())).collect();
    drop(old);
    assert_eq!((pool.free_chunks(), pool.used_bytes()), (8, 8 * CHUNK));
    for round in 0..3 {
        let new: Vec<_> = (0..8).map(|_| filled(&pool, CHUNK, 200 + round)).collect();
        assert!(pool.alloc(1, 1).is_none(), "the hard size holds");
        drop(new);
    }
    for (n, seen) in (10..).zip(&seen) {
        assert!(seen.to_vec().iter().all(|byte| *byte == n), "chunk {n}");
    }
    drop(kept);
    assert_eq!((pool.free_chunks(), pool.used_bytes()), (8, 0));
}

/// The bound of what is kept beside the hard size: above it, it counts.
#[test]
fn what_is_kept_beyond_the_bound_counts() {
    let (pool, _lent) = lendable(500);
    let kept: Vec<_> = (0..450)
        .map(|n| {
            let payload = filled(&pool, CHUNK, 1);
            let twice = (Kept::new(payload.clone()), Kept::new(payload));
            assert_eq!(pool.free_chunks(), 500 - usize::saturating_sub(n + 1, 400));
            twice
        })
        .collect();
    drop(kept);
    assert_eq!((pool.free_chunks(), pool.used_bytes()), (500, 0));
}
