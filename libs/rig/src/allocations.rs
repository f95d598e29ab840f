//! Counts what a thread asks of the system's allocator.
//!
//! ```text
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
    static OWN: Cell<u64> = const { Cell::new(0) };
}

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, which counts for threads that are counted.
#[derive(Clone, Copy, Debug)]
pub struct Counting;

#[expect(unsafe_code, reason = "an allocator is an unsafe trait")]
// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no mark any more.
        if COUNTED.try_with(Cell::get).unwrap_or(false) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
            OWN.set(OWN.get() + 1);
        }
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Whether the calling thread is counted from now on.
pub fn count_this_thread(counted: bool) {
    COUNTED.set(counted);
}

/// Allocations of all counted threads so far.
pub fn so_far() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Does something, and gives how often the calling thread has allocated for it, and its result. Other threads, counted or not,
/// make no difference: tests that run beside each other do not meet.
pub fn during<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let (counted, before) = (COUNTED.replace(true), OWN.get());
    let done = work();
    COUNTED.set(counted);
    (OWN.get() - before, done)
}
