//! Layers that are gone give their space back where requests do not wait for it: on a disk that is told of each piece (`discard`), a file
//! of ten thousand pieces takes half a minute. In a file of its own: it looks at the threads of the process.

mod serve_client;

use std::fs;
use std::time::{Duration, Instant};

use lh_block::Instance;
use lh_wire::{ChainOp, Control, LayerInfo, Status};
use serve_client::{SIZE, Server, pattern, places, session};

/// The thread for what takes long is there.
fn has_fold_thread() -> bool {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks
        .flatten()
        .any(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "replica-fold\n"))
}

fn operations(rebuilds: bool) -> Vec<Control> {
    let created = || "2026-01-01T00:00:00Z".to_owned();
    let carry_out = |id: u128, op: ChainOp| {
        let id = Instance(id);
        [Control::Prepare { id, op }, Control::Commit { id }]
    };
    if rebuilds {
        let chain = vec![LayerInfo::default()];
        return vec![Control::RebuildBegin { size: SIZE, chain, keep: None }];
    }
    let name = "one".to_owned();
    let snapshot =
        ChainOp::Snapshot { name, user_created: true, created: created(), labels: Default::default() };
    let revert = ChainOp::Revert { name: "one".into(), created: created() };
    [carry_out(1, snapshot), carry_out(2, revert)].concat()
}

#[test]
fn requests_do_not_wait_until_layers_have_given_their_space_back() {
    for place in places() {
        for rebuilds in [false, true] {
            let place = tempfile::tempdir_in(place.path()).unwrap();
            let server = Server::start(place.path());
            let mut c = session(&server.socket, 1, 1);
            (0..8).for_each(|n| assert_eq!(c.write(n << 20, &pattern(n, 4096)), Status::Ok));
            assert!(!has_fold_thread());
            for control in operations(rebuilds) {
                assert_eq!(c.control(&control).status(), Status::Ok, "{control:?}");
            }
            // A thread gives itself its name.
            let began = Instant::now();
            while !has_fold_thread() {
                assert!(
                    began.elapsed() < Duration::from_secs(5),
                    "the ring's thread has closed what is gone"
                );
                std::thread::sleep(Duration::from_millis(5));
            }
            drop(c);
            server.stop();
        }
    }
}
