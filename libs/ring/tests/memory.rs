//! The pool and its payloads: what is shared does not change, what is exhausted says so, what is dropped comes back.

mod drive;

use lh_ring::{CHUNK, Payload, Pool, Rx, Tx};

#[expect(clippy::cast_possible_truncation, reason = "test sizes")]
fn alloc(pool: &Pool, len: usize, align: u32) -> Option<Payload> {
    pool.alloc(len as u32, align)
}

fn filled(pool: &Pool, seed: u32, len: usize) -> Payload {
    let mut payload = alloc(pool, len, 4096).expect("room");
    payload.write_at(0, &drive::pattern(seed, len));
    payload
}

#[test]
fn segments_keep_the_alignment_across_chunks() {
    let pool = Pool::new(4 << 20, 16 << 20).expect("pool");
    let _shift = alloc(&pool, 5000, 1).expect("room");
    let payload = filled(&pool, 1, Payload::MAX);
    assert!(payload.segments().count() > 8);
    assert!(payload.is_aligned(4096, 4096));
    assert!(!alloc(&pool, 100, 4096).expect("room").is_aligned(4096, 4096));
    assert!(payload.to_vec() == drive::pattern(1, Payload::MAX));
    assert_eq!(payload.crc32c(), crc32c::crc32c(&drive::pattern(1, Payload::MAX)));
    for len in [512, 4096, 16384] {
        assert_eq!(
            alloc(&pool, len, 512).expect("room").segments().count(),
            1,
            "{len} bytes are in one piece"
        );
    }
}

#[test]
fn slices_name_the_right_bytes() {
    let pool = Pool::new(4 << 20, 16 << 20).expect("pool");
    let len = 3 * CHUNK;
    let payload = filled(&pool, 2, len);
    let bytes = drive::pattern(2, len);
    let mut random = drive::Random(5);
    for _ in 0..300 {
        let from = random.below(len);
        let part = random.below(len - from + 1);
        let slice = payload.slice(from, part);
        let again = slice.slice(part / 3, part / 2);
        assert!(again.to_vec() == bytes[from + part / 3..][..part / 2]);
        let mut copy = vec![0; part];
        payload.read_at(from, &mut copy);
        assert!(copy == bytes[from..from + part] && copy == slice.to_vec());
    }
    drop(payload);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn cutting_and_joining_keep_bytes_references_and_exclusiveness() {
    let pool = Pool::new(4 << 20, 16 << 20).expect("pool");
    let mut random = drive::Random(11);
    for round in 0..200 {
        let len = 1 + random.below(4 * CHUNK);
        let mut head = filled(&pool, round, len);
        let mut tail = head.split_off(random.below(len + 1));
        assert!(head.is_exclusive() && tail.is_exclusive());
        if !tail.is_empty() {
            tail.write_at(0, b"x");
        }
        let last = tail.split_off(tail.len() / 2);
        let mut expected = drive::pattern(round, len);
        if head.len() < len {
            expected[head.len()] = b'x';
        }
        let pieces = head.segments().count();
        head.append(tail).expect("fits");
        head.append(last).expect("fits");
        assert!(head.segments().count() <= pieces + 4 && head.is_exclusive());
        assert!(head.to_vec() == expected);
        drop(head);
        assert_eq!(pool.used_bytes(), 0);
    }
    let shared = filled(&pool, 1, 4096);
    let _other = shared.clone();
    let mut exclusive = filled(&pool, 2, 4096);
    exclusive.append(shared).expect("fits");
    assert!(!exclusive.is_exclusive());
    let elsewhere = Pool::new(0, 1 << 20).expect("pool");
    assert!(exclusive.append(filled(&elsewhere, 1, 10)).is_err());
    assert_eq!(exclusive.len(), 8192);
}

#[test]
fn what_is_cut_from_something_shared_is_shared() {
    let pool = Pool::new(0, 1 << 20).expect("pool");
    let mut head = filled(&pool, 1, 8192);
    let _reader = head.clone();
    let tail = head.split_off(4096);
    assert!(!head.is_exclusive() && !tail.is_exclusive());
}

#[test]
fn what_does_not_fit_together_stays_apart() {
    let pool = Pool::new(0, 16 << 20).expect("pool");
    let mut long = filled(&pool, 1, Payload::MAX);
    let rest = long.append(filled(&pool, 2, 1)).expect_err("together they are too long");
    assert_eq!((long.len(), rest.len()), (Payload::MAX, 1));
    // Each in a page of its own, so that none goes on where the one before ends.
    let mut joined = filled(&pool, 0, 512);
    let mut expected = joined.to_vec();
    for seed in 1..12 {
        joined.append(filled(&pool, seed, 512)).expect("it has pieces enough");
        expected.extend(drive::pattern(seed, 512));
    }
    assert_eq!(joined.segments().count(), Payload::PIECES_MAX);
    let rest = joined.append(filled(&pool, 12, 512)).expect_err("one piece too many");
    assert!(joined.to_vec() == expected && rest.to_vec() == drive::pattern(12, 512));
}

#[test]
fn what_is_short_is_in_one_piece_though_a_part_would_fit_elsewhere() {
    let pool = Pool::new(0, 1 << 20).expect("pool");
    let _before = alloc(&pool, CHUNK - 8192, 4096).expect("room");
    assert_eq!(alloc(&pool, 16384, 4096).expect("room").segments().count(), 1);
}

#[test]
fn a_stream_takes_the_last_chunk_when_nobody_holds_it() {
    let pool = Pool::new(0, CHUNK).expect("pool");
    drop(alloc(&pool, 512, 1).expect("room"));
    assert!(Rx::new(&pool, 4096).feed(b"x"));
}

#[test]
fn a_stream_that_would_get_too_little_takes_nothing() {
    let pool = Pool::new(0, 2 * CHUNK).expect("pool");
    let _held = alloc(&pool, CHUNK, 4096).expect("room");
    let mut rx = Rx::new(&pool, 4096);
    assert!(!rx.feed(&vec![1; CHUNK + 1]));
    assert_eq!(pool.free_chunks(), 1);
}

#[test]
#[should_panic(expected = "another pool")]
fn a_payload_of_another_pool_is_not_sent() {
    let pools = [(); 2].map(|()| Pool::new(0, 1 << 20).expect("pool"));
    Tx::new(&pools[0]).push_payload(filled(&pools[1], 1, 512));
}

#[test]
#[should_panic(expected = "shared")]
fn what_somebody_else_can_see_is_not_written() {
    let pool = Pool::new(0, 1 << 20).expect("pool");
    let mut payload = filled(&pool, 1, 4096);
    let _reader = payload.slice(0, 1);
    payload.write_at(4000, b"x");
}

#[test]
fn memory_comes_back_and_one_holder_of_a_few_bytes_keeps_only_its_chunk() {
    let pool = Pool::new(1 << 20, 8 * CHUNK).expect("pool");
    let mut all: Vec<_> = std::iter::from_fn(|| alloc(&pool, 4096, 4096)).collect();
    assert_eq!(all.len(), 8 * CHUNK / 4096);
    assert_eq!(pool.free_chunks(), 0);
    assert!(alloc(&pool, CHUNK + 1, 1).is_none());
    let kept = all.remove(40).slice(5, 1);
    drop(all);
    assert_eq!(pool.free_chunks(), 7);
    assert!(alloc(&pool, 8 * CHUNK, 1).is_none(), "all or nothing");
    assert_eq!(pool.free_chunks(), 7, "a refusal takes nothing");
    let large = alloc(&pool, 7 * CHUNK, 1).expect("what is left");
    drop((kept, large));
    assert_eq!((pool.free_chunks(), pool.used_bytes()), (8, 0));
}

#[test]
fn a_lone_request_uses_the_same_bytes_again() {
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let first = alloc(&pool, 4096, 4096).expect("room").segments().next().expect("bytes").as_ptr();
    for _ in 0..100 {
        let payload = alloc(&pool, 4096, 4096).expect("room");
        assert_eq!(payload.segments().next().expect("bytes").as_ptr(), first);
    }
}
