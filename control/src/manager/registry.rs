//! The processes of a manager by name, each with its supervisor.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lh_block::{NameError, check_process_name};
use thiserror::Error;
use tokio::sync::{broadcast, watch};

use super::deposits::Deposits;
use super::identity::Watched;
use super::levels::Levels;
use super::lock::ManagerLock;
use super::policy::arguments_of_replacement;
use super::ports::{PortError, PortRange, Ports, with_ports};
use super::program::{ProgramError, Programs};
use super::state::{ProcessRecord, State};
use super::supervisor::{Shared, Supervisor};
use super::wish::{Replacement, Wishes};
use crate::host::Root;
use crate::proto::imrpc::{ProcessResponse, ProcessSpec};
use crate::random;

/// Changes that a slow watcher may be behind before it is told everything anew.
const CHANGES_MAX: usize = 1024;

/// Names by which the manager's own log and sockets go.
const RESERVED: [&str; 2] = ["instance-manager", "listeners"];

/// Why a process was not created or found.
#[derive(Debug, Error)]
pub(super) enum RegistryError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(
        "a process cannot be named {0}: the instance manager's own log and sockets are; choose another name"
    )]
    Reserved(String),
    #[error("a process {0} exists already")]
    Exists(String),
    #[error("there is no process {0}")]
    Missing(String),
    /// A newer manager knows of it.
    #[error("process {name} is not started: {source}")]
    Newer { name: String, source: io::Error },
    #[error("process {name} is not run: {source}")]
    Ports { name: String, source: PortError },
    #[error("process {name} keeps its {held} ports when it is replaced: {asked} were asked for")]
    OtherPorts { name: String, held: i32, asked: i32 },
    #[error(
        "process {0} is not replaced by one without arguments: give those of the program that takes its place"
    )]
    NoArguments(String),
    #[error("no random numbers: {0}")]
    Random(io::Error),
}

#[derive(Debug)]
struct Handle {
    uuid: String,
    latest: watch::Receiver<ProcessResponse>,
    wishes: Arc<Wishes>,
    ports: Option<PortRange>,
}

/// All processes of a manager.
#[derive(Debug)]
pub(super) struct Registry {
    shared: Arc<Shared>,
    ports: Ports,
    processes: Mutex<BTreeMap<String, Handle>>,
}

impl Registry {
    /// `lock`: what makes this the root's only manager.
    pub(super) fn new(root: Root, lock: Arc<ManagerLock>, programs: Programs, ports: Ports) -> Self {
        let (changes, _) = broadcast::channel(CHANGES_MAX);
        let shared = Arc::new(Shared {
            root,
            _lock: lock,
            programs,
            changes,
            deposits: Deposits::default(),
            levels: Levels::default(),
        });
        Self { shared, ports, processes: Mutex::default() }
    }

    /// Takes over what an earlier manager left: processes that run are watched, those that died are started again, those
    /// that were to end are ended.
    pub(super) fn adopt_all(self: &Arc<Self>) -> io::Result<()> {
        let root = &self.shared.root;
        for name in ProcessRecord::names(root)? {
            match ProcessRecord::load(root, &name) {
                Ok(record) => record.into_iter().for_each(|record| self.adopt(record)),
                // Another one of that name can be created; locks keep both from the same data.
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    ProcessRecord::forget_damaged(root, &name);
                }
                Err(e) => tracing::error!(name, error = %e, "a process is not adopted"),
            }
        }
        Ok(())
    }

    fn adopt(self: &Arc<Self>, mut record: ProcessRecord) {
        let process = match record.process.as_ref().map(Watched::adopt) {
            None | Some(Ok(None)) => None,
            Some(Ok(process)) => process,
            Some(Err(e)) => {
                tracing::error!(name = record.name, error = %e, "process cannot be adopted");
                None
            }
        };
        tracing::info!(name = record.name, pid = process.as_ref().map(|p| p.id().pid), "adopted");
        if let Some(ports) = record.ports {
            self.ports.keep(ports);
        }
        if process.is_none() {
            record.process = None;
            if record.state == State::Running {
                record.state = State::Starting;
            }
        }
        self.supervise(record, process, true);
    }

    /// Begins the life of a new process.
    pub(super) fn create(self: &Arc<Self>, spec: &ProcessSpec) -> Result<ProcessResponse, RegistryError> {
        check_process_name("process", &spec.name)?;
        if RESERVED.contains(&spec.name.as_str()) {
            return Err(RegistryError::Reserved(spec.name.clone()));
        }
        self.shared.programs.resolve(&spec.binary)?;
        if self.processes().contains_key(&spec.name) {
            return Err(RegistryError::Exists(spec.name.clone()));
        }
        if let Err(source) = ProcessRecord::load(&self.shared.root, &spec.name)
            && source.kind() == io::ErrorKind::Unsupported
        {
            return Err(RegistryError::Newer { name: spec.name.clone(), source });
        }
        let uuid = random::uuid().map_err(RegistryError::Random)?;
        let ports = match spec.port_count {
            0 => None,
            count => Some(
                self.ports
                    .take(count, spec.port_args.len())
                    .map_err(|source| RegistryError::Ports { name: spec.name.clone(), source })?,
            ),
        };
        let record = ProcessRecord::new(spec, ports, uuid);
        let response = record.response(false);
        self.supervise(record, None, false);
        Ok(response)
    }

    /// Has a process end and run another program, or the same one with other arguments, under the same name and with
    /// the same ports. If the program cannot be run, the process goes on as it is.
    pub(super) fn replace(&self, spec: &ProcessSpec) -> Result<ProcessResponse, RegistryError> {
        self.shared.programs.resolve(&spec.binary)?;
        let processes = self.processes();
        let handle = processes.get(&spec.name).ok_or_else(|| RegistryError::Missing(spec.name.clone()))?;
        let mut response = handle.latest.borrow().clone();
        let held = response.spec.get_or_insert_default();
        if spec.port_count != held.port_count {
            let (name, held, asked) = (spec.name.clone(), held.port_count, spec.port_count);
            return Err(RegistryError::OtherPorts { name, held, asked });
        }
        let args = with_ports(&spec.args, &spec.port_args, handle.ports);
        // The process would be ended for one that shows its help.
        if args.is_empty() && !held.args.is_empty() {
            return Err(RegistryError::NoArguments(spec.name.clone()));
        }
        held.args = arguments_of_replacement(&held.args, &args);
        held.binary.clone_from(&spec.binary);
        handle.wishes.replace(Replacement { binary: spec.binary.clone(), args });
        Ok(response)
    }

    /// Asks for the end of a process. `uuid`: only that one, unless it is empty. Of one that is not known a damaged record goes.
    pub(super) fn delete(&self, name: &str, uuid: &str) -> Result<ProcessResponse, RegistryError> {
        let processes = self.processes();
        match processes.get(name) {
            Some(handle) if uuid.is_empty() || uuid == handle.uuid => {
                handle.wishes.end();
                let mut response = handle.latest.borrow().clone();
                if let Some(status) = &mut response.status {
                    State::Stopping.as_str().clone_into(&mut status.state);
                }
                Ok(response)
            }
            Some(_) => Err(RegistryError::Missing(name.to_owned())),
            None => {
                if check_process_name("process", name).is_ok() {
                    ProcessRecord::forget_damaged(&self.shared.root, name);
                }
                Err(RegistryError::Missing(name.to_owned()))
            }
        }
    }

    pub(super) fn get(&self, name: &str) -> Result<ProcessResponse, RegistryError> {
        match self.processes().get(name) {
            Some(handle) => Ok(handle.latest.borrow().clone()),
            None => Err(RegistryError::Missing(name.to_owned())),
        }
    }

    pub(super) fn list(&self) -> BTreeMap<String, ProcessResponse> {
        self.processes().iter().map(|(name, handle)| (name.clone(), handle.latest.borrow().clone())).collect()
    }

    /// The process that has this port.
    pub(super) fn at_port(&self, port: u16) -> Option<String> {
        let has = |handle: &Handle| handle.ports.is_some_and(|own| (own.start..=own.end).contains(&port));
        self.processes().iter().find(|(_, handle)| has(handle)).map(|(name, _)| name.clone())
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.processes().keys().cloned().collect()
    }

    /// The numbers of the processes that run.
    pub(super) fn running(&self) -> BTreeMap<String, u32> {
        let pid = |handle: &Handle| handle.latest.borrow().status.as_ref().map_or(0, |status| status.pid);
        let all = self.processes();
        all.iter().map(|(name, handle)| (name.clone(), pid(handle))).filter(|(_, pid)| *pid != 0).collect()
    }

    /// Every change from now on.
    pub(super) fn watch(&self) -> broadcast::Receiver<ProcessResponse> {
        self.shared.changes.subscribe()
    }

    pub(super) fn root(&self) -> &Root {
        &self.shared.root
    }

    /// What processes have left here.
    pub(super) fn deposits(&self) -> &Deposits {
        &self.shared.deposits
    }

    /// At which level processes log.
    pub(super) fn levels(&self) -> &Levels {
        &self.shared.levels
    }

    fn supervise(self: &Arc<Self>, record: ProcessRecord, process: Option<Watched>, again: bool) {
        let (latest, receiver) = watch::channel(record.response(false));
        let wishes = Arc::new(Wishes::default());
        let ports = record.ports;
        let handle =
            Handle { uuid: record.uuid.clone(), latest: receiver.clone(), wishes: wishes.clone(), ports };
        let name = record.name.clone();
        self.processes().insert(name.clone(), handle);
        let supervisor = Supervisor::new(self.shared.clone(), record, latest, wishes, again);
        let registry = self.clone();
        tokio::spawn(async move {
            supervisor.run(process).await;
            // Forgotten before it is announced: who waits for the end may use the name at once.
            // Before the name is free: what the next of that name leaves is not this one's to forget.
            registry.deposits().forget(&name);
            registry.processes().remove(&name);
            if let Some(ports) = ports {
                registry.ports.give_back(ports);
            }
            let mut last = receiver.borrow().clone();
            last.deleted = true;
            if let Some(status) = &mut last.status {
                State::Stopped.as_str().clone_into(&mut status.state);
                status.pid = 0;
            }
            let _ = registry.shared.changes.send(last);
        });
    }

    fn processes(&self) -> MutexGuard<'_, BTreeMap<String, Handle>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
