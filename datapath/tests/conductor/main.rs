//! The conductor over real queues and made-up replicas: stories told step by step, and runs in an order chosen by a
//! seed, with every fault that there is. `LH_SEED=n` repeats one run, `LH_RUNS=n` sets how many there are,
//! `LH_TRACE=1` prints what happens.

/// Prints what happens, if somebody wants to read it.
macro_rules! trace {
    ($($what:tt)*) => {
        if crate::traced() {
            eprintln!($($what)*);
        }
    };
}

mod doubt;
mod engine;
mod folds;
mod late;
mod look;
mod losses;
mod members;
mod oracle;
mod outage;
mod random;
mod replica;
mod reverts;
mod rng;
mod rounds;
mod scrub;
mod stories;
mod unreadable;
mod waits;
mod world;

fn traced() -> bool {
    static TRACED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *TRACED.get_or_init(|| std::env::var_os("LH_TRACE").is_some())
}
