//! Bytes that are lent to replicas stay as they are until those are done, also when nobody waits for them any more.

use std::time::{Duration, Instant};

use datapath::link::Mail;
use datapath::message::{MemberId, Switch};
use lh_block::Extent;
use lh_ring::CHUNK;

use super::bench::PATIENCE;
use super::{Behaviour, Bench, WRITE, pattern};

const A: MemberId = MemberId(0);
const B: MemberId = MemberId(1);
const LEN: usize = 64 << 10;

/// Turns until the replica has done so many writes.
fn until_done(b: &mut Bench, replica: usize, writes: u64) {
    b.turn_until("writes", true, |b| b.replicas[replica].writes() >= writes);
}

/// So many writes that all memory of the pool was used again if it could be.
fn use_all_memory_again(b: &mut Bench) {
    for n in 0..1024_u64 {
        let at = 1 << 20 | (n % 64 * LEN as u64);
        b.write(Extent::new(at, LEN as u64), &pattern(1000 + n, LEN)).expect("one member is well");
    }
}

/// Two members, of which the second holds on with `writes` of the first bytes on their way to it. It is then put out.
fn cut_off(behaviour: Behaviour, writes: u64) -> Bench {
    let mut b = Bench::lending(2, false);
    b.replicas[1].behave(behaviour);
    let tags: Vec<_> = (0..writes)
        .map(|n| b.submit(WRITE, Extent::new(n * LEN as u64, LEN as u64), Some(&pattern(n, LEN))))
        .collect();
    until_done(&mut b, 0, writes);
    b.mail(Mail::Close(B));
    b.switch(Switch::Forget { member: B });
    tags.into_iter().for_each(|tag| assert_eq!(b.wait(tag), Ok(Vec::new())));
    b
}

/// A replica that was stopped, or whose disk hangs, is put out; the volume goes on. What the replica then does with what it
/// was sent, it does with the bytes of that time.
#[test]
fn a_replica_that_is_cut_off_finds_what_it_was_lent() {
    for behaviour in [Behaviour::Stopped, Behaviour::AtItsDisk] {
        let mut b = cut_off(behaviour, 8);
        use_all_memory_again(&mut b);
        b.replicas[1].behave(Behaviour::Well);
        until_done(&mut b, 1, 8);
        let blocks = b.replicas[1].blocks();
        for n in 0..8 {
            assert!(blocks[n * LEN..(n + 1) * LEN] == pattern(n as u64, LEN), "{behaviour:?}, write {n}");
        }
    }
}

/// The same when the process goes on without the queue: its thread has ended.
#[test]
fn what_was_lent_outlives_the_queue() {
    let mut b = cut_off(Behaviour::Stopped, 2);
    let tag = b.submit(WRITE, Extent::new(1 << 20, LEN as u64), Some(&pattern(9, LEN)));
    assert_eq!(b.wait(tag), Ok(Vec::new()));
    // Another write is on its way to the member that is still there.
    b.replicas[0].behave(Behaviour::Stopped);
    b.submit(WRITE, Extent::new(2 << 20, LEN as u64), Some(&pattern(10, LEN)));
    b.spin(Duration::from_millis(20), true);
    let (pool, Bench { driven, replicas, .. }) = (b.pool().clone(), b);
    drop(driven);
    // Whatever takes memory now, gets other memory.
    let rest: Vec<_> = std::iter::from_fn(|| {
        let mut payload = pool.alloc(u32::try_from(CHUNK).expect("short"), 4096)?;
        payload.write_at(0, &[0xee; CHUNK]);
        Some(payload)
    })
    .collect();
    assert!(rest.len() > 200, "{} chunks", rest.len());
    drop(rest);
    replicas.iter().for_each(|r| r.behave(Behaviour::Well));
    let began = Instant::now();
    while replicas[1].writes() < 2 || replicas[0].writes() < 4 {
        assert!(began.elapsed() < PATIENCE, "{replicas:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(replicas[1].blocks()[..LEN] == pattern(0, LEN));
    assert!(replicas[0].blocks()[2 << 20..][..LEN] == pattern(10, LEN));
}

/// What is kept takes nothing of what the volume may use, and goes when the replica lets a new session in, and not before.
#[test]
fn what_is_kept_goes_with_the_next_session() {
    let mut b = cut_off(Behaviour::Stopped, 8);
    let free = b.pool().free_chunks();
    // Its own connection has a chunk to receive into.
    assert!(free + 1 >= b.pool().hard_bytes() / CHUNK, "it counts: {free} chunks are left");
    let kept = b.pool().used_bytes();
    assert!(kept >= 8 * LEN, "{kept} bytes");
    // Its link ends a second time, which says nothing.
    b.mail(Mail::Close(B));
    b.spin(Duration::from_millis(10), true);
    assert_eq!(b.pool().used_bytes(), kept);
    b.replicas[1].behave(Behaviour::Well);
    b.link_again(B);
    b.turn_until("what was kept is given back", true, |b| b.pool().used_bytes() < kept / 2);
    // And the session goes on as any.
    b.switch(Switch::Attach { member: B });
    b.switch(Switch::Promote { member: B });
    b.write(Extent::new(0, LEN as u64), &pattern(77, LEN)).expect("both are well");
    assert!(b.replicas[1].blocks()[..LEN] == pattern(77, LEN));
}

#[test]
fn what_is_kept_goes_with_the_replica() {
    let mut b = cut_off(Behaviour::Stopped, 8);
    let kept = b.pool().used_bytes();
    b.mail(Mail::Vacated(A));
    b.spin(Duration::from_millis(10), true);
    assert_eq!(b.pool().used_bytes(), kept, "another's");
    b.mail(Mail::Vacated(B));
    b.turn_until("what was kept is given back", true, |b| b.pool().used_bytes() < kept / 2);
}
