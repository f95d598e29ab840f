//! A connection that takes no answers is closed after 30 s (`docs/invariants.md`, 3): what it holds is free again.

mod serve_client;

use std::io::Write;
use std::time::{Duration, Instant};

use lh_wire::OpCode;
use replica::serve::Mode;
use serve_client::{MIB, Server, session};

#[test]
fn who_takes_no_answers_is_closed_after_half_a_minute() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    for _ in 0..16 {
        let header = c.header(OpCode::Read, 0, MIB);
        let read = c.encode(header, &[]);
        c.stream.write_all(&read).unwrap();
    }
    let began = Instant::now();
    while server.status.snapshot().mode == Mode::Serving {
        assert!(began.elapsed() < Duration::from_secs(45), "it is still there");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(began.elapsed() > Duration::from_secs(28), "{:?}", began.elapsed());
    session(&server.socket, 1, 2);
}
