//! How much of a pool stays in memory. Alone in its process: neighbouring mappings of other tests would be counted.

mod drive;

use lh_ring::{CHUNK, Payload, Pool};

fn filled(pool: &Pool, seed: u32, len: usize) -> Payload {
    let mut payload = pool.alloc(u32::try_from(len).expect("small"), 4096).expect("room");
    payload.write_at(0, &drive::pattern(seed, len));
    payload
}

fn resident(pool_address: *const u8) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let mut inside = false;
    for line in smaps.lines() {
        if let Some((from, to)) = line.split(' ').next().and_then(|r| r.split_once('-'))
            && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
        {
            inside = (from..to).contains(&(pool_address as usize));
        } else if inside && let Some(rest) = line.strip_prefix("Rss:") {
            let kib: usize = rest.trim().trim_end_matches(" kB").parse().expect("a number");
            return kib << 10;
        }
    }
    panic!("the pool's mapping is not in smaps");
}

#[test]
fn idle_memory_above_the_soft_size_goes_back() {
    let pool = Pool::new(4 * CHUNK, 64 * CHUNK).expect("pool");
    let first = pool.alloc(1, 1).expect("room");
    let address = first.segments().next().expect("a byte").as_ptr();
    let all: Vec<_> = (0..6).map(|i| filled(&pool, i, 8 * CHUNK)).collect();
    assert!(resident(address) >= 48 * CHUNK);
    drop(all);
    drop(first);
    assert!(resident(address) <= 6 * CHUNK, "{} bytes stayed", resident(address));
    // The same holds for locked memory, which plain MADV_DONTNEED would not give back.
    if pool.lock().is_ok() {
        let all: Vec<_> = (0..6).map(|i| filled(&pool, i, 8 * CHUNK)).collect();
        drop(all);
        assert!(resident(address) <= 6 * CHUNK, "{} locked bytes stayed", resident(address));
    }
    drop(pool);
    let other = Pool::new(4 * CHUNK, 64 * CHUNK).expect("pool");
    other.populate().expect("Linux >= 5.14");
    let payload = other.alloc(1, 1).expect("room");
    assert_eq!(resident(payload.segments().next().expect("a byte").as_ptr()), 4 * CHUNK);
}
