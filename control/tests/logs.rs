//! Clients that ask for a log and do not take it: they keep no process from being started. The only test of its program, so that
//! nobody starts a process while its scripts are being written.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use control::host::Root;
use control::manager::{self, Options};
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{LogRequest, ProcessCreateRequest, ProcessGetRequest, ProcessSpec};
use control::transport::connect;
use tonic::transport::Channel;

/// More than tokio has threads for calls that block.
const CLIENTS: usize = 600;

/// Streams that a connection has at once: fewer than a server takes.
const PER_CONNECTION: usize = 100;

type Client = ProcessManagerServiceClient<Channel>;

fn script(path: &Path, text: &str) -> String {
    std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

async fn client(root: &Root) -> Client {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match connect(&root.manager_socket()).await {
            Ok(channel) => return Client::new(channel),
            Err(e) => assert!(Instant::now() < until, "{e}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Begins a process, and waits until it runs.
async fn begin(client: &mut Client, name: &str, binary: &str) {
    let spec = ProcessSpec { name: name.into(), binary: binary.into(), ..Default::default() };
    client.process_create(ProcessCreateRequest { spec: Some(spec) }).await.unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let request = ProcessGetRequest { name: name.into() };
        let status = client.process_get(request).await.unwrap().into_inner().status.unwrap();
        if status.state == "running" {
            return;
        }
        assert!(Instant::now() < until, "{status:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn who_asks_for_a_log_and_does_not_take_it_keeps_nobody_from_being_started() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    // What `manager::run_launched` does: waits for the gate, then becomes the program.
    let launcher = script(&dir.path().join("launcher"), "head -c 1 >/dev/null\nexec \"$@\" </dev/null");
    let program = script(&root.engine_binaries().join("program"), "exec sleep 60");
    let options = Options { root: root.clone(), program: launcher.into(), listen: None, take_over: false };
    tokio::spawn(async move { manager::run(options, std::future::pending()).await.unwrap() });
    let mut manager = client(&root).await;
    begin(&mut manager, "demo-e-0", &program).await;
    let line = format!("{}\n", "x".repeat(999));
    std::fs::write(root.log("demo-e-0"), line.repeat(9000)).unwrap();
    let mut held = Vec::new();
    for _ in 0..CLIENTS / PER_CONNECTION {
        let mut client = client(&root).await;
        for _ in 0..PER_CONNECTION {
            held.push(client.process_log(LogRequest { name: "demo-e-0".into() }).await.unwrap().into_inner());
        }
    }
    begin(&mut manager, "demo-e-1", &program).await;
    // Who takes it after all has all of it.
    drop(held.split_off(1));
    let mut lines = 0;
    while let Some(told) = held[0].message().await.unwrap() {
        assert_eq!(told.line.len(), 999);
        lines += 1;
    }
    assert_eq!(lines, 9000);
    for record in manager::ProcessRecord::load_all(&root).unwrap().into_iter().flatten() {
        let pid = record.pid().and_then(|pid| i32::try_from(pid).ok()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}
