//! An instance manager whose disk is slow: whoever asks for what is not there is answered all the same.

use std::fs::{self, File};
use std::io;
use std::time::{Duration, Instant};

use control::host::Root;
use control::manager::{self, Options};
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::transport::connect;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::sync::oneshot;

#[tokio::test]
async fn a_log_that_cannot_be_moved_aside_now_keeps_nobody_from_the_manager() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    let log = root.log("instance-manager");
    File::create(&log).unwrap().set_len(11 << 20).unwrap();
    // Who opens it to write waits until somebody reads, as for a disk.
    let older = log.with_extension("log.1");
    mkfifo(&older, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let (stop, told) = oneshot::channel::<()>();
    let options =
        Options { root: root.clone(), program: "/bin/false".into(), listen: None, take_over: false };
    let manager = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(manager::run(options, async { drop(told.await) })).unwrap();
    });
    let until = Instant::now() + Duration::from_secs(60);
    let channel = loop {
        match connect(&root.manager_socket()).await {
            Ok(channel) => break channel,
            Err(e) => assert!(Instant::now() < until, "{e}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let mut client = ProcessManagerServiceClient::new(channel);
    let answer = tokio::time::timeout(Duration::from_secs(20), client.version_get(())).await;
    answer.expect("it answers").unwrap();
    // The disk goes on.
    let moved = io::copy(&mut File::open(&older).unwrap(), &mut io::sink()).unwrap();
    assert_eq!(moved, 11 << 20);
    while fs::metadata(&log).unwrap().len() > 0 {
        assert!(Instant::now() < until, "it is not cut");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(stop);
    manager.join().unwrap();
}
