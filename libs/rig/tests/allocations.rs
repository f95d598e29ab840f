//! The allocator counts what a counted thread asks for, and nothing else.

use std::hint::black_box;

use lh_rig::allocations::{Counting, count_this_thread, during, so_far};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn only_counted_threads_count() {
    drop(black_box(vec![1; 10]));
    assert_eq!(so_far(), 0);
    count_this_thread(true);
    drop(black_box(vec![1; 10]));
    drop(black_box(vec![1; 10]));
    count_this_thread(false);
    drop(black_box(vec![1; 10]));
    assert_eq!(so_far(), 2);
    let (own, ()) = during(|| {
        drop(black_box(vec![1; 10]));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                count_this_thread(true);
                (0..1000).for_each(|_| drop(black_box(vec![1; 10])));
            });
        });
    });
    assert!(so_far() > 1000 && (1..100).contains(&own), "{own}: the other thread's are not among them");
    let before = so_far();
    drop(black_box(vec![1; 10]));
    assert_eq!(so_far(), before, "it does not count any more");
}
