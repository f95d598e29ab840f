//! A server that is killed, and what the next one knows.

mod serve_client;

use lh_block::Extent;
use lh_wire::handshake::Verdict;
use lh_wire::{OpCode, Status};
use serve_client::{Killable, MIB, knock, pattern, places, serve_if_child, session, who};

/// Not a test by itself: what [`Killable`] runs.
#[test]
fn child() {
    serve_if_child();
}

#[test]
fn killed_between_writes_it_comes_back_with_all_it_answered() {
    for place in places() {
        let server = Killable::start(place.path(), "child");
        let mut c = session(&server.socket, 3, 1);
        let data = pattern(1, MIB as usize);
        assert_eq!(c.write(0, &data), Status::Ok);
        assert_eq!(c.write(8 << 20, &pattern(2, 4096)), Status::Ok);
        assert_eq!(c.op(OpCode::WriteZeroes, 4096, 8192).status(), Status::Ok);
        // One more is on its way when the process dies.
        let header = c.header(OpCode::Write, 16 << 20, MIB);
        c.send(header, &data);
        server.kill();

        let server = Killable::start(place.path(), "child");
        assert_eq!(knock(&server.socket, &who(2, 1)).err(), Some(Verdict::Stale));
        let mut c = session(&server.socket, 4, 2);
        let state = c.state();
        assert!(!state.lived && !state.clean && state.in_doubt.is_empty());
        for offset in [0, 8 << 20] {
            let marked = state.intent.iter().any(|r| r.contains(Extent::new(offset, 4096)));
            assert!(marked, "{offset} was written and is not marked: {:?}", state.intent);
        }
        let mut expected = data;
        expected[4096..12288].fill(0);
        assert_eq!(c.read(0, MIB), expected);
        assert_eq!(c.read(8 << 20, 4096), pattern(2, 4096));
        server.kill();
    }
}
