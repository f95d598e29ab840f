//! A process that is replaced, for real: the old program hears the signal and ends, the new one runs under its name, though the
//! manager dies in between. One test at a time, so that nobody starts a process while scripts are being written.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control::host::Root;
use control::manager::{self, Options, ProcessRecord};
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{
    ProcessCreateRequest, ProcessDeleteRequest, ProcessGetRequest, ProcessListRequest, ProcessReplaceRequest,
    ProcessSpec, ProcessStatus,
};
use control::transport::connect;
use tokio::sync::{Mutex, oneshot};
use tonic::transport::Channel;

const NAME: &str = "demo-e-0";

static ALONE: Mutex<()> = Mutex::const_new(());

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

type Client = ProcessManagerServiceClient<Channel>;

/// A root with two programs.
struct Place {
    _dir: tempfile::TempDir,
    root: Root,
    launcher: String,
    old: String,
    new: String,
}

impl Place {
    /// `heard`: what the old program does when it is told to make room.
    fn new(heard: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        // What `manager::run_launched` does: waits for the gate, then becomes the program.
        let launcher = script(&dir.path().join("launcher"), "head -c 1 >/dev/null\nexec \"$@\" </dev/null");
        let binaries = root.engine_binaries();
        let loops = "while :; do sleep 0.05; done";
        let old = script(&binaries.join("old"), &format!("trap '{heard}' HUP\necho old $@\n{loops}"));
        let new = script(&binaries.join("new"), &format!("echo new $@\n{loops}"));
        Self { _dir: dir, root, launcher, old, new }
    }

    /// A manager, which ends when the sender says so or is gone.
    async fn manager(&self) -> (Client, oneshot::Sender<()>, JoinHandle<()>) {
        let (stop, told) = oneshot::channel();
        let options = Options {
            root: self.root.clone(),
            program: self.launcher.clone().into(),
            listen: None,
            take_over: false,
        };
        // With its runtime all that it does ends, as with a process.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(manager::run(options, async { drop(told.await) })).unwrap();
        });
        loop {
            match connect(&self.root.manager_socket()).await {
                Ok(channel) => return (Client::new(channel), stop, thread),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.root.log(NAME)).unwrap_or_default()
    }
}

/// It runs, in the place of this one: what the log has may be of a process that began after the manager was asked.
fn is_another(status: &ProcessStatus, first: &ProcessStatus) -> bool {
    ![0, first.pid].contains(&status.pid) && status.state == "running"
}

/// Has the process end, for good.
async fn delete(client: &mut Client, status: ProcessStatus) {
    client.process_delete(ProcessDeleteRequest { name: NAME.into(), uuid: status.uuid }).await.unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while manager::ProcessId::of(status.pid).unwrap().is_some() {
        assert!(Instant::now() < until, "it does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_process_is_replaced_by_another_program() {
    let _alone = ALONE.lock().await;
    let place = Place::new("echo heard HUP; exit 0");
    let Place { root, old, new, .. } = &place;
    let (mut client, _stop, _) = place.manager().await;
    let log = || place.log();
    client.process_create(ProcessCreateRequest { spec: Some(spec(old, "5")) }).await.unwrap();
    let first =
        wait(&mut client, |status| status.pid != 0 && log().contains("old --generation 5 demo")).await;
    // One without any would only show its help, and end: nothing is ended for it.
    let none = ProcessSpec { args: Vec::new(), ..spec(new, "1") };
    let request = ProcessReplaceRequest { spec: Some(none), terminate_signal: "SIGHUP".into() };
    assert_eq!(client.process_replace(request).await.unwrap_err().code(), tonic::Code::InvalidArgument);
    let request = ProcessReplaceRequest { spec: Some(spec(new, "1")), terminate_signal: "SIGHUP".into() };
    client.process_replace(request).await.unwrap();
    let second =
        wait(&mut client, |status| is_another(status, &first) && log().contains("new --generation")).await;
    // Its generation is the next one, whatever was asked for.
    assert!(log().contains("heard HUP") && log().contains("new --generation 6 demo"), "{}", log());
    assert_ne!(second.pid, first.pid);
    assert_eq!((&second.uuid, second.restarts, second.state.as_str()), (&first.uuid, 0, "running"));
    assert!(manager::ProcessId::of(first.pid).unwrap().is_none());
    // What a next manager would start again.
    let record = ProcessRecord::load(root, NAME).unwrap().unwrap();
    assert!(record.binary.ends_with("/new") && record.args[1] == "6");
    delete(&mut client, second).await;
}

#[tokio::test]
async fn a_replacement_goes_on_when_its_manager_dies_in_the_middle() {
    let _alone = ALONE.lock().await;
    // It does not end before it is told twice.
    let place = Place::new("echo heard HUP; [ -e $0.told ] && exit 0; touch $0.told");
    let (mut client, stop, manager) = place.manager().await;
    let request = ProcessCreateRequest { spec: Some(spec(&place.old, "5")) };
    client.process_create(request).await.unwrap();
    let first =
        wait(&mut client, |status| status.pid != 0 && place.log().contains("old --generation 5 demo"));
    let first = first.await;
    let request =
        ProcessReplaceRequest { spec: Some(spec(&place.new, "1")), terminate_signal: "SIGHUP".into() };
    client.process_replace(request).await.unwrap();
    wait(&mut client, |_| place.log().contains("heard HUP")).await;
    stop.send(()).unwrap();
    manager.join().unwrap();
    assert!(manager::ProcessId::of(first.pid).unwrap().is_some(), "nobody has ended it");

    let (mut client, _stop, _) = place.manager().await;
    let second =
        wait(&mut client, |status| is_another(status, &first) && place.log().contains("new --generation"));
    let second = second.await;
    assert!(place.log().contains("new --generation 6 demo"), "{}", place.log());
    assert_eq!((&second.uuid, second.state.as_str()), (&first.uuid, "running"));
    assert!(manager::ProcessId::of(first.pid).unwrap().is_none());
    delete(&mut client, second).await;
}

/// In a pod the manager is its container's command: everything on the node would end with it.
#[tokio::test]
async fn a_manager_whose_lock_was_removed_goes_on_and_holds_it_again() {
    let _alone = ALONE.lock().await;
    let place = Place::new("exit 0");
    let (mut client, stop, thread) = place.manager().await;
    std::fs::remove_file(place.root.manager_lock()).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !manager::is_there(&place.root) {
        assert!(Instant::now() < until && !thread.is_finished(), "it does not hold its lock again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    client.process_list(ProcessListRequest {}).await.unwrap();
    stop.send(()).unwrap();
    thread.join().unwrap();
    assert!(!manager::is_there(&place.root));
}

/// The program was exchanged for an older one: what the newer one runs under that name is not to be forgotten, nor run a second time.
#[tokio::test]
async fn a_name_that_a_newer_manager_knows_of_is_not_given_away() {
    let _alone = ALONE.lock().await;
    let place = Place::new("exit 0");
    let newer = r#"{"format":2,"other":[]}"#;
    std::fs::write(place.root.process(NAME), newer).unwrap();
    let (mut client, _stop, _) = place.manager().await;
    let request = ProcessCreateRequest { spec: Some(spec(&place.old, "5")) };
    let refused = client.process_create(request).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(NAME) && refused.message().contains("newer"), "{refused}");
    assert_eq!(std::fs::read_to_string(place.root.process(NAME)).unwrap(), newer);
    assert!(client.process_list(ProcessListRequest {}).await.unwrap().into_inner().processes.is_empty());
}
