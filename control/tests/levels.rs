//! The level at which processes log: those that run are told, those that start begin with it. The only test of its program,
//! so that nobody starts a process while its scripts are being written.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use control::host::Root;
use control::manager::{self, Options};
use control::proto::imrpc::instance_service_client::InstanceServiceClient;
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{
    DataEngine, LogGetLevelRequest, LogSetLevelRequest, ProcessCreateRequest, ProcessSpec,
};
use control::proto::process::LogLevel;
use control::proto::process::logging_server::{Logging, LoggingServer};
use control::transport::{TrustedPeers, bind_private, connect};
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};

fn script(path: &Path, text: &str) -> String {
    std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The control socket of a process, which notes what it is told.
#[derive(Clone, Default)]
struct Process(Arc<Mutex<Vec<String>>>);

#[tonic::async_trait]
impl Logging for Process {
    async fn level_set(&self, request: Request<LogLevel>) -> Result<Response<()>, Status> {
        self.0.lock().unwrap().push(request.into_inner().level);
        Ok(Response::new(()))
    }
}

impl Process {
    fn serve(&self, socket: &Path) {
        let peers = TrustedPeers::new(bind_private(socket).unwrap());
        let service = LoggingServer::new(self.clone());
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(peers));
    }

    /// Each level once: whose answer comes late is told again.
    fn heard(&self) -> Vec<String> {
        let mut heard = self.0.lock().unwrap().clone();
        heard.dedup();
        heard
    }
}

async fn wait(what: &str, done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn create(manager: &mut ProcessManagerServiceClient<Channel>, name: &str, binary: &str) {
    let spec = ProcessSpec { name: name.into(), binary: binary.into(), ..Default::default() };
    manager.process_create(ProcessCreateRequest { spec: Some(spec) }).await.unwrap();
}

#[tokio::test]
async fn a_level_reaches_the_processes_that_run_and_those_that_start() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    // What `manager::run_launched` does: waits for the gate, then becomes the program.
    let launcher = script(&dir.path().join("launcher"), "head -c 1 >/dev/null\nexec \"$@\" </dev/null");
    let program = script(
        &root.engine_binaries().join("program"),
        "echo \"begins at <$LONGHORN_LOG_LEVEL>\"\nexec sleep 1000",
    );
    let options = Options { root: root.clone(), program: launcher.into(), listen: None, take_over: false };
    tokio::spawn(async move { manager::run(options, std::future::pending()).await.unwrap() });
    let channel = loop {
        match connect(&root.manager_socket()).await {
            Ok(channel) => break channel,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    let mut processes = ProcessManagerServiceClient::new(channel.clone());
    let mut instances = InstanceServiceClient::new(channel);
    let log = |name: &str| std::fs::read_to_string(root.log(name)).unwrap_or_default();
    let process = |name: &str| {
        let process = Process::default();
        process.serve(&root.control_socket(name));
        process
    };

    let first = process("demo-e-0");
    create(&mut processes, "demo-e-0", &program).await;
    wait("the first one runs", || log("demo-e-0").contains("begins at <>")).await;
    let get = LogGetLevelRequest::default();
    assert_eq!(instances.log_get_level(get).await.unwrap().into_inner().level, "info");
    assert!(first.heard().is_empty(), "nobody has said anything");

    let at = |level: &str, engine: DataEngine| LogSetLevelRequest {
        data_engine: engine.into(),
        level: level.to_owned(),
    };
    instances.log_set_level(at("Debug", DataEngine::V1)).await.unwrap();
    assert_eq!(instances.log_get_level(get).await.unwrap().into_inner().level, "debug");
    wait("the one that runs is told", || first.heard() == ["debug"]).await;
    create(&mut processes, "demo-r-1", &program).await;
    wait("one that starts begins with it", || log("demo-r-1").contains("begins at <debug>")).await;
    // It may have been started for another level: it is told once it answers.
    let second = process("demo-r-1");
    wait("it is told, too", || second.heard() == ["debug"]).await;

    instances.log_set_level(at("FATAL", DataEngine::V1)).await.unwrap();
    wait("both are told", || [&first, &second].iter().all(|p| p.heard() == ["debug", "error"])).await;
    for (level, engine, code) in
        [("loud", DataEngine::V1, Code::InvalidArgument), ("debug", DataEngine::V2, Code::Unimplemented)]
    {
        assert_eq!(instances.log_set_level(at(level, engine)).await.unwrap_err().code(), code);
    }
    assert_eq!(instances.log_get_level(get).await.unwrap().into_inner().level, "error");
    for record in manager::ProcessRecord::load_all(&root).unwrap().into_iter().flatten() {
        let pid = record.pid().and_then(|pid| i32::try_from(pid).ok()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}
