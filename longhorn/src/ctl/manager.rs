//! The instance manager as its client sees it, and how one is started.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use control::host::Root;
use control::manager::{REPLACE_SIGNAL_NAME, STOP_PATIENCE, is_there, process_of};
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{
    ProcessCreateRequest, ProcessDeleteRequest, ProcessListRequest, ProcessReplaceRequest, ProcessResponse,
    ProcessSpec,
};
use control::transport::is_gone;
use tonic::Code;
use tonic::transport::Channel;

use super::systemd;
use crate::tell::tell;

/// How long a new manager may take until it answers: it reads a directory and binds a socket.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// How long a manager that listens may take to say which version it is, which it does from memory.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// How often it is asked meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// How long processes may take to end: their own time, and what a disk keeps a killed one for.
const END_PATIENCE: Duration = STOP_PATIENCE.saturating_add(Duration::from_secs(60));

/// A connection to the root's instance manager.
#[derive(Debug)]
pub(super) struct Manager {
    client: ProcessManagerServiceClient<Channel>,
}

impl Manager {
    /// The root's manager, if it runs.
    pub(super) async fn find(root: &Root) -> Result<Option<Self>> {
        match control::transport::connect(&root.manager_socket()).await {
            Ok(channel) => {
                let mut client = ProcessManagerServiceClient::new(channel);
                // One that is stopped or stuck accepts connections, and would be waited for without a word.
                match tokio::time::timeout(ANSWER_PATIENCE, client.version_get(())).await {
                    Err(_) => Err(silent(root)),
                    // It ended just now.
                    Ok(Err(status)) if is_gone(&status) => Ok(None),
                    Ok(Err(status)) => Err(status.into()),
                    Ok(Ok(_)) => Ok(Some(Self { client })),
                }
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                Ok(None)
            }
            // So many have asked before, and wait.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(silent(root)),
            Err(e) => Err(e).with_context(|| root.manager_socket().display().to_string()),
        }
    }

    /// The root's manager, started if it does not run.
    pub(super) async fn ensure(root: &Root) -> Result<Self> {
        if let Some(manager) = Self::find(root).await? {
            return Ok(manager);
        }
        let mut child = start(root)?;
        let deadline = Instant::now() + START_PATIENCE;
        loop {
            tokio::time::sleep(LOOK).await;
            if let Some(manager) = Self::find(root).await? {
                return Ok(manager);
            }
            let ended = child.as_mut().map_or(Ok(None), Child::try_wait)?;
            // One that found another in its place ends, and that other one is as good.
            if ended.is_some()
                && let Some(manager) = Self::find(root).await?
            {
                return Ok(manager);
            }
            let log = root.log(MANAGER_LOG);
            // The other one takes over what runs before it answers.
            match ended.filter(|_| !is_there(root)) {
                Some(status) => bail!("the instance manager ended with {status}: {} says why", log.display()),
                None if Instant::now() > deadline => {
                    bail!("the instance manager does not answer: {} may say why", log.display())
                }
                None => {}
            }
        }
    }

    /// Starts a process of the manager's own program. One that is there already is left as it is.
    pub(super) async fn create(&mut self, name: &str, args: Vec<String>) -> Result<()> {
        let spec = ProcessSpec { name: name.to_owned(), args, ..Default::default() };
        match self.client.process_create(ProcessCreateRequest { spec: Some(spec) }).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::AlreadyExists => Ok(()),
            Err(status) => Err(status).with_context(|| format!("process {name} cannot be started")),
        }
    }

    /// Ends a process and starts another program, or the same one, in its place.
    pub(super) async fn replace(&mut self, spec: ProcessSpec) -> Result<()> {
        let name = spec.name.clone();
        let request =
            ProcessReplaceRequest { spec: Some(spec), terminate_signal: REPLACE_SIGNAL_NAME.to_owned() };
        let replaced = self.client.process_replace(request).await;
        replaced.map(drop).with_context(|| format!("process {name} cannot be replaced"))
    }

    /// Everything the manager runs.
    pub(super) async fn list(&mut self) -> Result<HashMap<String, ProcessResponse>> {
        Ok(self.client.process_list(ProcessListRequest {}).await?.into_inner().processes)
    }

    /// Ends processes and waits until they are gone. Those that are not there are gone.
    pub(super) async fn end(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            let request = ProcessDeleteRequest { name: name.clone(), uuid: String::new() };
            match self.client.process_delete(request).await {
                Err(status) if status.code() != Code::NotFound => return Err(status.into()),
                _ => {}
            }
        }
        let deadline = Instant::now() + END_PATIENCE;
        loop {
            let running = self.list().await?;
            let Some(left) = names.iter().find(|name| running.contains_key(*name)) else { return Ok(()) };
            if Instant::now() > deadline {
                bail!("process {left} does not end: it may wait for a disk; try again later");
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// What can be done about a manager that is there and does not answer.
fn silent(root: &Root) -> anyhow::Error {
    anyhow!(
        "the instance manager of {} does not answer: {} may say why; volumes go on without it, and once its process{} is killed the \
         next command starts another",
        root.path().display(),
        root.log(MANAGER_LOG).display(),
        process_of(root).map_or_else(String::new, |pid| format!(" ({pid})"))
    )
}

/// The log that a manager started here writes.
const MANAGER_LOG: &str = "instance-manager";

/// Starts a manager that outlives this command: by systemd where that runs the host, else as this command's child, which it
/// then is.
fn start(root: &Root) -> Result<Option<Child>> {
    root.create()?;
    let program = std::env::current_exe().context("this program's own path")?.with_file_name("longhorn");
    let log = root.log(MANAGER_LOG);
    let out = OpenOptions::new().append(true).create(true).mode(0o600).open(&log);
    let out = out.with_context(|| log.display().to_string())?;
    if systemd::is_here() && program.exists() {
        match systemd::start_manager(root, &program, &log) {
            Ok(()) => return Ok(None),
            Err(e) => tell!(
                "systemd does not start the instance manager ({e:#}): it begins here, and where this session or service ends, \
                 volumes may end with it"
            ),
        }
    }
    let child = Command::new(&program)
        .arg("instance-manager")
        .arg("--own-session")
        .arg("--root")
        .arg(root.path())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .spawn()
        .with_context(|| match program.exists() {
            true => format!("{} cannot be started", program.display()),
            false => format!(
                "there is no {}: longhorn has to lie beside longhornctl, install both",
                program.display()
            ),
        })?;
    Ok(Some(child))
}
