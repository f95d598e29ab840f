//! What a manager remembers of each process, so that the next manager can go on: `ROOT/run/processes/NAME.json`.
//!
//! The file is written before whatever it announces: arguments and restart count before a start, the process's number
//! before the program runs, the wish to stop before the first signal. It is removed when the process is no more.

use std::fs;
use std::io;

use lh_block::check_process_name;
use serde::{Deserialize, Serialize};

use super::identity::ProcessId;
use super::policy;
use super::ports::{PortRange, with_ports};
use crate::host::format::newer_than;
use crate::host::{Root, remove_with_room, replace_file_in_its_room};
use crate::proto::imrpc;

/// The version of the file that this program writes; it reads no other.
const FORMAT: u32 = 1;

/// Where a process is in its life; Longhorn's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It is about to be started, for the first time or again.
    Starting,
    /// It runs.
    Running,
    /// It was told to end and will be forgotten.
    Stopping,
    /// It ended by itself, successfully.
    Stopped,
    /// It failed in a way that another start would not cure.
    Error,
}

impl State {
    /// As in `ProcessStatus.state`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Error => "error",
        }
    }
}

/// One process of a manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    format: u32,
    /// Longhorn's name of it.
    pub name: String,
    /// The program as it was asked for.
    pub binary: String,
    /// Its arguments as of the last start.
    pub args: Vec<String>,
    /// Another one for every process ever created.
    pub uuid: String,
    /// Where it is in its life.
    pub state: State,
    /// What went wrong last; empty if nothing did.
    #[serde(default)]
    pub error: String,
    /// How often it was started again.
    #[serde(default)]
    pub restarts: u32,
    /// The ports that it was given; its arguments name them.
    #[serde(default)]
    pub ports: Option<PortRange>,
    /// The process, from just before the program runs until it has ended.
    #[serde(default)]
    pub process: Option<ProcessId>,
    /// That process is the one before, which is being ended for what is named here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) replacing: bool,
}

impl ProcessRecord {
    /// A process that is to be started.
    pub(super) fn new(spec: &imrpc::ProcessSpec, ports: Option<PortRange>, uuid: String) -> Self {
        Self {
            format: FORMAT,
            name: spec.name.clone(),
            binary: spec.binary.clone(),
            args: with_ports(&spec.args, &spec.port_args, ports),
            uuid,
            state: State::Starting,
            error: String::new(),
            restarts: 0,
            ports,
            process: None,
            replacing: false,
        }
    }

    /// The process's number while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().filter(|id| id.is_alive()).map(|id| id.pid)
    }

    /// The generation that the last start was given, of an engine.
    pub fn generation(&self) -> Option<u64> {
        policy::generation(&self.args)
    }

    /// What a manager of that root remembers of the process of that name, whether the manager runs or not.
    ///
    /// # Errors
    /// The file cannot be read; of the kind `InvalidData` if it is damaged, and `Unsupported` if a newer version has written it.
    pub fn load(root: &Root, name: &str) -> io::Result<Option<Self>> {
        let path = root.process(name);
        let damaged = |reason: String| {
            let text = format!(
                "{} is damaged ({reason}): `longhornctl down {}` ends what it may name, and takes it away",
                path.display(),
                volume_of(name)
            );
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        if let Some(format) = newer_than(FORMAT, &bytes) {
            let text = format!(
                "{} is of format {format}, which a newer version of this program has written: use that one",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let record: Self = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        if record.format != FORMAT || record.name != name {
            return Err(damaged(format!("format {}, name {:?}", record.format, record.name)));
        }
        Ok(Some(record))
    }

    /// Everything a manager of that root remembers; files that are damaged come as errors.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn load_all(root: &Root) -> io::Result<Vec<io::Result<Self>>> {
        let names = Self::names(root)?;
        Ok(names.iter().filter_map(|name| Self::load(root, name).transpose()).collect())
    }

    /// The names of the processes that a manager of that root remembers.
    pub(super) fn names(root: &Root) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(root.processes())? {
            let file = entry?.file_name();
            let Some(name) = file.to_str().and_then(|f| f.strip_suffix(".json")) else { continue };
            if check_process_name("process", name).is_ok() {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Takes the file of a process away that no manager knows of, if it is damaged: it says of nothing any more what becomes of it, and
    /// whoever reads it would take the process for one that may run.
    pub(super) fn forget_damaged(root: &Root, name: &str) {
        match Self::load(root, name) {
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                tracing::error!(error = %e, "a process is forgotten");
                if let Err(e) = remove_with_room(&root.process(name)) {
                    tracing::error!(name, error = %e, "its damaged record stays");
                }
            }
            _ => {}
        }
    }

    pub(super) fn store(&self, root: &Root) -> io::Result<()> {
        let path = root.process(&self.name);
        replace_file_in_its_room(&path, &serde_json::to_vec(self)?)
            .map_err(|e| io::Error::new(e.kind(), format!("{} cannot be written: {e}", path.display())))
    }

    pub(super) fn remove(&self, root: &Root) -> io::Result<()> {
        remove_with_room(&root.process(&self.name))
    }

    /// The record as a client of the manager sees it: the ports are among the arguments.
    pub(super) fn response(&self, deleted: bool) -> imrpc::ProcessResponse {
        let spec = imrpc::ProcessSpec {
            name: self.name.clone(),
            binary: self.binary.clone(),
            args: self.args.clone(),
            port_count: self.ports.map_or(0, |ports| i32::from(ports.end - ports.start) + 1),
            port_args: Vec::new(),
        };
        let status = imrpc::ProcessStatus {
            state: self.state.as_str().to_owned(),
            error_msg: self.error.clone(),
            uuid: self.uuid.clone(),
            pid: self.process.as_ref().map_or(0, |id| id.pid),
            restarts: self.restarts,
            port_start: self.ports.map_or(0, |ports| ports.start.into()),
            port_end: self.ports.map_or(0, |ports| ports.end.into()),
            ..Default::default()
        };
        imrpc::ProcessResponse { spec: Some(spec), status: Some(status), deleted }
    }
}

/// The volume of an engine or a replica, by its name.
fn volume_of(process: &str) -> &str {
    let of_replica = || process.rsplit_once("-r-").map(|(volume, _)| volume);
    process.strip_suffix("-e-0").or_else(of_replica).unwrap_or("VOLUME")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_manager_wrote_the_next_one_reads() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let spec = imrpc::ProcessSpec {
            name: "demo-e-0".into(),
            binary: "/x".into(),
            args: vec!["controller".into()],
            port_count: 2,
            port_args: vec!["--listen,:".into()],
        };
        let ports = PortRange { start: 10_000, end: 10_001 };
        let mut record = ProcessRecord::new(&spec, Some(ports), "1".into());
        assert_eq!(record.args, ["controller", "--listen", ":10000"]);
        let status = record.response(false).status.unwrap();
        assert_eq!((status.port_start, status.port_end), (10_000, 10_001));
        record.process = ProcessId::of(std::process::id()).unwrap();
        record.store(&root).unwrap();
        assert_eq!(ProcessRecord::load(&root, "demo-e-0").unwrap(), Some(record.clone()));
        assert_eq!(record.pid(), Some(std::process::id()));
        assert_eq!(ProcessRecord::load(&root, "other").unwrap(), None);
        fs::write(root.process("broken"), "{").unwrap();
        fs::write(root.processes().join(".demo-e-0.json.tmp"), "{").unwrap();
        let all = ProcessRecord::load_all(&root).unwrap();
        assert_eq!(all.iter().filter(|r| r.is_ok()).count(), 1);
        assert_eq!(all.iter().filter(|r| r.is_err()).count(), 1);
        for name in ["broken", "demo-e-0", "other"] {
            ProcessRecord::forget_damaged(&root, name);
        }
        assert!(!root.process("broken").exists() && root.process("demo-e-0").exists());
        record.remove(&root).unwrap();
        record.remove(&root).unwrap();
        assert_eq!(ProcessRecord::load(&root, "demo-e-0").unwrap(), None);
    }

    /// The program was exchanged for an older one, which is not to forget what runs.
    #[test]
    fn a_record_of_a_newer_version_is_not_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        for content in [r#"{"format":2,"other":[]}"#, r#"{"format":0}"#] {
            fs::write(root.process("demo-e-0"), content).unwrap();
            let is_newer = content.contains('2');
            let kind = if is_newer { io::ErrorKind::Unsupported } else { io::ErrorKind::InvalidData };
            assert_eq!(ProcessRecord::load(&root, "demo-e-0").unwrap_err().kind(), kind);
            ProcessRecord::forget_damaged(&root, "demo-e-0");
            assert_eq!(root.process("demo-e-0").exists(), is_newer);
        }
    }

    #[test]
    fn every_key_stands_in_the_document() {
        let record = ProcessRecord {
            format: FORMAT,
            name: "demo-e-0".into(),
            binary: String::new(),
            args: vec!["controller".into()],
            uuid: "1".into(),
            state: State::Running,
            error: String::new(),
            restarts: 0,
            ports: Some(PortRange { start: 10_000, end: 10_001 }),
            process: ProcessId::of(std::process::id()).unwrap(),
            replacing: true,
        };
        assert_eq!(crate::host::document::unnamed("processes/NAME.json", &record), [""; 0]);
    }

    #[test]
    fn of_a_damaged_record_the_command_is_named_that_takes_it_away() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        for (name, volume) in [("a-r-b-e-0", "a-r-b"), ("a-e-0-r-0a1b2c3d", "a-e-0"), ("something", "VOLUME")]
        {
            fs::write(root.process(name), "{").unwrap();
            let said = ProcessRecord::load(&root, name).unwrap_err().to_string();
            assert!(said.contains(&format!("`longhornctl down {volume}`")), "{said}");
        }
    }
}
