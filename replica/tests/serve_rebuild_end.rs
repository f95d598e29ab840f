//! The end of a rebuild over real sockets and files: marks of zeroes are looked at in all layers, which nobody should notice.

mod serve_client;

use std::time::{Duration, Instant};

use lh_block::Instance;
use lh_wire::{ChainOp, Control, MapPage, OpCode, Status};
use serve_client::{MIB, SIZE, Server, session};

/// As many as a volume may have had for a while.
const LAYERS: u32 = 60;

/// Far more than it takes, 0.1 s, and less than the 12 s in which each layer was looked at for each mark, without an answer meanwhile.
const SOON: Duration = Duration::from_secs(4);

#[test]
fn many_marks_and_layers_do_not_hold_up_the_end_of_a_rebuild() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    let ok = |answer: serve_client::Answer| assert_eq!(answer.status(), Status::Ok);
    for n in 1..=LAYERS {
        let (id, name) = (Instance(n.into()), format!("s{n}"));
        let op = ChainOp::Snapshot {
            name: name.clone(),
            user_created: true,
            created: String::new(),
            labels: Default::default(),
        };
        ok(c.control(&Control::Prepare { id, op }));
        ok(c.control(&Control::Commit { id }));
        ok(c.control(&Control::Settled { snapshot: name }));
    }
    let chain = c.state().chain;
    ok(c.control(&Control::RebuildBegin { size: SIZE, chain, keep: None }));
    // Every other block is zeroed, as a file system gives back what it has freed.
    for block in (0..SIZE / 4096).step_by(2) {
        ok(c.op(OpCode::WriteZeroes, block * 4096, 4096));
    }

    let end = c.header(OpCode::Control, 0, 0);
    let began = Instant::now();
    c.send(end, &serde_json::to_vec(&Control::RebuildEnd).unwrap());
    let mut reads = 0;
    let read = loop {
        let read = c.header(OpCode::Read, u64::from(MIB), 4096);
        c.send(read, &[]);
        let answer = c.receive();
        assert_eq!(answer.status(), Status::Ok);
        if answer.header.tag == end.tag {
            break read;
        }
        assert_eq!(answer.header.tag, read.tag);
        reads += 1;
    };
    let took = began.elapsed();
    println!("{reads} reads in {took:?}");
    assert!(took < SOON, "it took {took:?}");
    assert_eq!(c.receive().header.tag, read.tag);
    assert!(!c.state().rebuilding);
    // They hid nothing.
    let map = c.control(&Control::LayerMap { layer: String::new(), from: 0, recorded: false });
    assert_eq!(serde_json::from_slice::<MapPage>(&map.payload).unwrap().ranges, []);
}
