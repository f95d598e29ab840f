//! A process that is replaced, for real: the old program hears the signal and ends, the new one runs under its name.
//! The only test of its program, so that nobody starts a process while its scripts are being written.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use control::host::Root;
use control::manager::{self, Options, ProcessRecord};
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{
    ProcessCreateRequest, ProcessDeleteRequest, ProcessGetRequest, ProcessReplaceRequest, ProcessSpec,
    ProcessStatus,
};
use control::transport::connect;
use tonic::transport::Channel;

const NAME: &str = "demo-e-0";

fn script(path: &Path, text: &str) -> String {
    std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn spec(binary: &str, generation: &str) -> ProcessSpec {
    let args = ["--generation", generation, "demo"].map(str::to_owned).to_vec();
    ProcessSpec { name: NAME.into(), binary: binary.into(), args, ..Default::default() }
}

async fn wait(
    client: &mut ProcessManagerServiceClient<Channel>,
    wanted: impl Fn(&ProcessStatus) -> bool,
) -> ProcessStatus {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let request = ProcessGetRequest { name: NAME.into() };
        let status = client.process_get(request).await.unwrap().into_inner().status.unwrap();
        if wanted(&status) {
            return status;
        }
        assert!(Instant::now() < until, "{status:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_process_is_replaced_by_another_program() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    // What `manager::run_launched` does: waits for the gate, then becomes the program.
    let launcher = script(&dir.path().join("launcher"), "head -c 1 >/dev/null\nexec \"$@\" </dev/null");
    let binaries = root.engine_binaries();
    let loops = "while :; do sleep 0.05; done";
    let old =
        script(&binaries.join("old"), &format!("trap 'echo heard HUP; exit 0' HUP\necho old $@\n{loops}"));
    let new = script(&binaries.join("new"), &format!("echo new $@\n{loops}"));
    let options = Options { root: root.clone(), program: launcher.into(), listen: None, take_over: false };
    tokio::spawn(async move { manager::run(options, std::future::pending()).await.unwrap() });
    let mut client = loop {
        match connect(&root.manager_socket()).await {
            Ok(channel) => break ProcessManagerServiceClient::new(channel),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    client.process_create(ProcessCreateRequest { spec: Some(spec(&old, "5")) }).await.unwrap();
    let log = || std::fs::read_to_string(root.log(NAME)).unwrap_or_default();
    let first =
        wait(&mut client, |status| status.pid != 0 && log().contains("old --generation 5 demo")).await;
    let request = ProcessReplaceRequest { spec: Some(spec(&new, "1")), terminate_signal: "SIGHUP".into() };
    client.process_replace(request).await.unwrap();
    let second = wait(&mut client, |status| status.pid != 0 && log().contains("new --generation")).await;
    // Its generation is the next one, whatever was asked for.
    assert!(log().contains("heard HUP") && log().contains("new --generation 6 demo"), "{}", log());
    assert_ne!(second.pid, first.pid);
    assert_eq!((&second.uuid, second.restarts, second.state.as_str()), (&first.uuid, 0, "running"));
    assert!(manager::ProcessId::of(first.pid).unwrap().is_none());
    // What a next manager would start again.
    let record = ProcessRecord::load(&root, NAME).unwrap().unwrap();
    assert!(record.binary.ends_with("/new") && record.args[1] == "6");
    client.process_delete(ProcessDeleteRequest { name: NAME.into(), uuid: second.uuid }).await.unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while manager::ProcessId::of(second.pid).unwrap().is_some() {
        assert!(Instant::now() < until, "it does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
