//! The disk of the simulation beside the real store: both do the same, and tell the same afterwards.

mod history;
mod real;

use std::fmt::Debug;
use std::path::Path;

use history::History;

/// Seeds, and operations of each.
const SEEDS: u64 = 300;
const OPERATIONS: u32 = 60;

fn run(place: &Path, seed: u64) {
    let mut history = History::new(place, seed);
    for _ in 0..OPERATIONS {
        history.go_on();
    }
    history.end();
}

/// `LH_SEED=n` runs one seed and prints what is done.
#[test]
fn the_simulated_disk_is_what_the_store_is() {
    let place =
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory");
    if let Some(seed) = std::env::var("LH_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return run(&place.path().join("replica"), seed);
    }
    let seeds = std::env::var("LH_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(SEEDS);
    for seed in 1..=seeds {
        let path = place.path().join(format!("replica-{seed}"));
        run(&path, seed);
        std::fs::remove_dir_all(&path).expect("nobody is there any more");
    }
}

/// What both tell of something.
fn same<T: PartialEq + Debug>(seed: u64, what: impl FnOnce() -> String, model: &T, store: &T) {
    assert!(
        model == store,
        "LH_SEED={seed}: {}: the simulation's disk says\n{model:?}\nand the store\n{store:?}",
        what()
    );
}
