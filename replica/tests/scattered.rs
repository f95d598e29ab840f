//! The promise of the index: a volume of 10 TiB with 1,000,000 scattered blocks opens in less than 2 s and takes at most
//! 40 MiB. The usual run has a twentieth of the blocks; `LH_FULL=1` has all of them, and as many layers as may be.
//! `LH_SCATTERED=DIR` puts the volume there; else it lies in RAM, where a million blocks are written in seconds.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use lh_block::{BLOCK, Instance};
use lh_wire::ChainOp;
use replica::store::{Committed, CreateOptions, Directory, OpenOptions};

const WAIT: Duration = Duration::from_secs(5);

/// Bytes of memory that the process has touched, its own alone.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Time that processors have spent on this process: the machine may be busy with others.
fn spent() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let ticks = stat.rsplit(") ").next().unwrap().split_whitespace().skip(11).take(2);
    Duration::from_millis(ticks.map(|n| n.parse::<u64>().unwrap() * 10).sum())
}

/// Writes blocks all over the head, in ascending order so that the disk keeps up.
fn scatter(directory: &Path, size: u64, blocks: u64) {
    let mut places: Vec<u64> =
        (1..=blocks).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (size / BLOCK)).collect();
    places.sort_unstable();
    let name = fs::read_dir(directory)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .find(|n| n.starts_with("volume-head-") && n.ends_with(".img"))
        .unwrap();
    let head = fs::OpenOptions::new().write(true).open(directory.join(name)).unwrap();
    for place in places {
        head.write_all_at(&[1; 4096], place * BLOCK).unwrap();
    }
    head.sync_all().unwrap();
}

#[test]
fn ten_tebibytes_open_in_two_seconds() {
    let full = std::env::var("LH_FULL").is_ok_and(|v| v == "1");
    let (blocks, snapshots) = if full { (1_000_000, 249) } else { (50_000, 20) };
    let size = 10_u64 << 40;
    let place = std::env::var("LH_SCATTERED").unwrap_or_else(|_| "/dev/shm".into());
    let place = tempfile::tempdir_in(place).or_else(|_| tempfile::tempdir()).unwrap();
    let path = place.path().join("replica");
    let created = Directory::create(&path, &CreateOptions { size, backing: None, lock_wait: WAIT });
    let (mut directory, mut store) = match created {
        Ok(made) => made,
        Err(err) if err.to_string().contains("file system") => return println!("SKIP scattered: {err}"),
        Err(err) => panic!("{err}"),
    };
    for n in 0..snapshots {
        scatter(&path, size, blocks / (u64::from(n == 0) + snapshots * u64::from(n > 0)) / 2);
        let (name, id) = (format!("s{n}"), Instance(u128::from(n)));
        let created = "2026-11-20T06:03:39Z".to_owned();
        let op = ChainOp::Snapshot { name, user_created: true, created, labels: Default::default() };
        directory.prepare(id, &op).unwrap();
        if let Committed::Head(head) = directory.commit(id).unwrap() {
            store.switch_head(*head);
        }
        directory.sync_commit().unwrap();
    }
    drop((directory, store));
    let before = resident();
    let (begin, spent_before) = (Instant::now(), spent());
    let (directory, store) = Directory::open(&path, &OpenOptions { lock_wait: WAIT }).unwrap();
    let (took, spent) = (begin.elapsed(), spent() - spent_before);
    let bytes = resident().saturating_sub(before);
    println!("{blocks} blocks in {snapshots} snapshots: {spent:?} of {took:?}, {} KiB", bytes >> 10);
    assert!(spent < Duration::from_secs(2), "{spent:?}");
    assert!(bytes <= 40 << 20, "{bytes} bytes");
    assert_eq!(store.size(), directory.size());
}
