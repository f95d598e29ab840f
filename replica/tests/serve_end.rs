//! The end of a server: who waits for its locks finds its place empty.

mod serve_client;

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lh_ring::sys::lock;
use serve_client::{Server, places};

/// The process that follows binds the socket anew once it has the locks, and whoever then removed a socket would remove that one.
#[test]
fn the_socket_goes_before_the_locks_of_the_layers() {
    for place in places() {
        for _ in 0..20 {
            let server = Server::start(place.path());
            let (socket, head) = (server.socket.clone(), place.path().join("replica/volume-head-000.img"));
            let head = File::open(head).unwrap();
            assert!(!lock(&head, true).unwrap());
            let waits = AtomicBool::new(false);
            let left_behind = std::thread::scope(|scope| {
                let follower = scope.spawn(|| {
                    let began = Instant::now();
                    waits.store(true, Ordering::Release);
                    while !lock(&head, true).unwrap() {
                        assert!(began.elapsed() < Duration::from_secs(60), "the lock is never free");
                    }
                    socket.exists()
                });
                while !waits.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                server.stop();
                follower.join().unwrap()
            });
            assert!(!left_behind, "the socket is there still, and goes when somebody else has bound it");
        }
    }
}
