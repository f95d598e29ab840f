//! The node that this program runs on, asked over the unix sockets below its root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use control::chain::Layer;
use control::host::{
    DEVICES, LiveDirs, Root, create_dir_durably, replace_file, store_program, unfinished_copy,
};
use control::logging::Level;
use control::manager::{REPLACE_SIGNAL_NAME, STOP_PATIENCE};
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{
    ProcessCreateRequest, ProcessDeleteRequest, ProcessGetRequest, ProcessListRequest, ProcessReplaceRequest,
    ProcessResponse, ProcessSpec,
};
use control::proto::node::TrimRequest;
use control::proto::node::file_systems_client::FileSystemsClient;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use control::proto::ptypes::{
    self, ReplicaRebuildConcurrentSyncLimitSetRequest, VolumeExpandRequest, VolumeSnapshotMaxCountSetRequest,
    VolumeSnapshotMaxSizeSetRequest, VolumeSnapshotRequest,
};
use control::proto::volume::volume_operations_client::VolumeOperationsClient;
use control::proto::volume::{NamedReplica, RebuildRate, ReplicaName, SnapshotName};
use tokio::sync::Notify;
use tonic::transport::Channel;
use tonic::{Code, Status, async_trait};

use super::at_disk::AtDisk;
use super::command::end_stay_command;
use super::device::{device_at, devices};
use super::disk::is_disk;
use super::kept::{forget, kept};
use super::{
    Agent, AgentError, DiskView, EngineReplica, EngineStart, EngineView, Part, ProcessView, Reach,
    RebuildLimits, ReplicaView, TrimView, engine_command, inspect, level, refusal, replica_command,
};
use crate::api::{InstanceState, ReplicaMode, ReplicaSpec, SnapshotLimits};

/// How long a process may take to say how it is. One that is busy with a slow disk answers later, and is asked again.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// How long a process may take to end for another one: the instance manager kills it before.
pub(super) const TAKE_OVER_PATIENCE: Duration = STOP_PATIENCE.saturating_add(Duration::from_secs(10));

/// Between two looks at that.
const TAKE_OVER_LOOK: Duration = Duration::from_millis(20);

/// Between two looks whether a device is taken away.
const END_STAY_LOOK: Duration = Duration::from_millis(100);

/// Between two attempts to hear the instance manager's news.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

/// This node.
#[derive(Debug)]
pub struct LocalAgent {
    root: Root,
    /// Where engines ask for their volume's authority.
    authority: PathBuf,
    reach: Reach,
    /// The socket of this node's CSI driver; `None`: there is none.
    driver: Option<PathBuf>,
    /// What is laid on the node as the program of this manager's image.
    own: PathBuf,
    /// It was laid, or compared with what is there, since this program started.
    laid: AtomicBool,
    /// Woken at every change of a process.
    news: Notify,
    at_disk: AtDisk,
}

impl LocalAgent {
    /// The node with this root. `authority` is the socket that engines get for `--authority`, `own` the program of this
    /// manager's image.
    pub fn new(root: Root, authority: PathBuf, reach: Reach, own: PathBuf) -> Self {
        let (laid, news) = (AtomicBool::new(false), Notify::new());
        Self { root, authority, reach, driver: None, own, laid, news, at_disk: AtDisk::default() }
    }

    /// With the CSI driver that serves at this socket, which trims file systems.
    #[must_use]
    pub fn with_driver(mut self, socket: Option<PathBuf>) -> Self {
        self.driver = socket;
        self
    }

    async fn manager(&self) -> Result<ProcessManagerServiceClient<Channel>, AgentError> {
        let socket = self.root.manager_socket();
        let channel = control::transport::connect(&socket).await;
        let channel = channel.map_err(|e| AgentError::Away(format!("{}: {e}", socket.display())))?;
        Ok(ProcessManagerServiceClient::new(channel))
    }

    /// What the instance manager is told of a process.
    fn process(&self, name: &str, part: Part<'_>) -> ProcessSpec {
        let (image, args, port_argument) = match part {
            Part::Engine(start) => {
                let port = self.reach.port_argument("relay-listen").filter(|_| start.spec.migratable);
                (&start.spec.image, engine_command(&self.root, &self.authority, self.reach, &start), port)
            }
            Part::Replica(spec) => {
                let args = replica_command(&self.root, self.reach, name, spec);
                (&spec.image, args, self.reach.port_argument("data-listen"))
            }
        };
        let binary = match image.as_str() {
            "" => String::new(),
            image => self.root.engine_binary(image).display().to_string(),
        };
        let port_args: Vec<String> = port_argument.into_iter().collect();
        let port_count = i32::from(!port_args.is_empty());
        ProcessSpec { name: name.to_owned(), binary, args, port_count, port_args }
    }

    async fn create(&self, spec: ProcessSpec) -> Result<(), AgentError> {
        let request = ProcessCreateRequest { spec: Some(spec) };
        match self.manager().await?.process_create(request).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::AlreadyExists => Ok(()),
            Err(status) => Err(refusal(&status)),
        }
    }

    async fn replace(&self, spec: ProcessSpec) -> Result<(), AgentError> {
        let request =
            ProcessReplaceRequest { spec: Some(spec), terminate_signal: REPLACE_SIGNAL_NAME.to_owned() };
        self.manager().await?.process_replace(request).await.map(drop).map_err(|e| refusal(&e))
    }

    async fn channel(&self, process: &str) -> Result<Channel, AgentError> {
        let socket = self.root.control_socket(process);
        let channel = control::transport::connect(&socket).await;
        channel.map_err(|e| {
            AgentError::Failed(format!("{process} does not answer at {}: {e}", socket.display()))
        })
    }

    async fn operations(&self, engine: &str) -> Result<VolumeOperationsClient<Channel>, AgentError> {
        Ok(VolumeOperationsClient::new(self.channel(engine).await?))
    }

    /// Hears the instance manager's news until it goes away.
    async fn hear(&self) -> Result<(), AgentError> {
        let mut news = self.manager().await?.process_watch(()).await.map_err(|e| refusal(&e))?.into_inner();
        // Whatever changed before the stream began is news, too.
        self.news.notify_one();
        while let Some(change) = news.message().await.map_err(|e| refusal(&e))? {
            drop(change);
            self.news.notify_one();
        }
        Ok(())
    }
}

fn process_view(process: ProcessResponse) -> ProcessView {
    let (spec, status) = (process.spec.unwrap_or_default(), process.status.unwrap_or_default());
    let state = InstanceState::parse(&status.state).unwrap_or(InstanceState::Unknown);
    let port = u16::try_from(status.port_start).ok().filter(|port| *port > 0);
    let option = |name: &str| value_of(&spec.args, name).unwrap_or_default().to_owned();
    let (relay_from, authority) = (option("--relay-from"), option("--authority"));
    let (error, uuid, binary) = (status.error_msg, status.uuid, spec.binary);
    ProcessView { state, error, uuid, port, binary, relay_from, authority }
}

/// The value of an option of a command line.
fn value_of<'a>(args: &'a [String], option: &str) -> Option<&'a str> {
    let at = args.iter().position(|arg| arg == option)?;
    args.get(at + 1).map(String::as_str)
}

const fn mode(number: i32) -> ReplicaMode {
    match number {
        n if n == ptypes::ReplicaMode::Rw as i32 => ReplicaMode::ReadWrite,
        n if n == ptypes::ReplicaMode::Wo as i32 => ReplicaMode::WriteOnly,
        _ => ReplicaMode::Error,
    }
}

/// Waits for an answer, but not for ever.
async fn soon<T, E>(answer: impl Future<Output = Result<T, E>>) -> Option<T> {
    tokio::time::timeout(ANSWER_PATIENCE, answer).await.ok()?.ok()
}

async fn ask_engine(channel: Channel) -> Result<EngineView, Status> {
    let mut client = ControllerServiceClient::new(channel);
    let volume = client.volume_get(()).await?.into_inner();
    let replicas = client.replica_list(()).await?.into_inner().replicas;
    let replica = |r: ptypes::ControllerReplica| {
        let address = r.address.unwrap_or_default();
        EngineReplica {
            name: address.instance_name,
            address: address.address,
            mode: mode(r.mode),
            reason: r.reason,
            rebuild_progress: r.rebuild_progress,
        }
    };
    Ok(EngineView {
        up: volume.frontend_state == "up",
        size: u64::try_from(volume.size).unwrap_or_default(),
        endpoint: volume.endpoint,
        generation: volume.generation.into(),
        waiting_for: volume.waiting_for,
        has_lost: volume.has_lost,
        expanding: volume.is_expanding,
        snapshot_limits: SnapshotLimits {
            count: u32::try_from(volume.snapshot_max_count).unwrap_or_default(),
            bytes: u64::try_from(volume.snapshot_max_size).unwrap_or_default(),
        },
        replicas: replicas.into_iter().map(replica).collect(),
        rebuild_limits: RebuildLimits {
            bytes_per_second: volume.rebuild_rate,
            at_once: volume.rebuild_concurrency,
        },
        device: None,
        chain: None,
        relay_from: volume.relay_from,
    })
}

/// The chain as a member has it, whichever node that is on.
async fn ask_chain(channel: Channel) -> Result<Vec<Layer>, Status> {
    let chain = VolumeOperationsClient::new(channel).snapshot_list(()).await?.into_inner();
    Ok(chain.layers.into_iter().map(Layer::from).collect())
}

async fn ask_replica(channel: Channel) -> Result<Option<ReplicaView>, Status> {
    let answer = ReplicaServiceClient::new(channel).replica_get(()).await?.into_inner();
    Ok(answer.replica.map(|replica| ReplicaView {
        generation: replica.generation.into(),
        epoch_recorded: replica.epoch_recorded,
    }))
}

#[async_trait]
impl Agent for LocalAgent {
    async fn processes(&self) -> Result<BTreeMap<String, ProcessView>, AgentError> {
        let answer = self.manager().await?.process_list(ProcessListRequest {}).await;
        let processes = answer.map_err(|e| refusal(&e))?.into_inner().processes;
        Ok(processes.into_iter().map(|(name, process)| (name, process_view(process))).collect())
    }

    async fn process(&self, name: &str) -> Result<Option<ProcessView>, AgentError> {
        let request = ProcessGetRequest { name: name.to_owned() };
        match self.manager().await?.process_get(request).await {
            Ok(process) => Ok(Some(process_view(process.into_inner()))),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(refusal(&status)),
        }
    }

    async fn changed(&self) {
        self.news.notified().await;
    }

    async fn listen(&self) {
        loop {
            if let Err(e) = self.hear().await {
                tracing::debug!(error = %e, "no news of processes");
            }
            self.news.notify_one();
            tokio::time::sleep(WATCH_AGAIN).await;
        }
    }

    async fn start_replica(&self, name: &str, spec: &ReplicaSpec) -> Result<(), AgentError> {
        let (disk, expected) = (PathBuf::from(&spec.disk_path), spec.disk_id.clone());
        let place = disk.join("replicas").join(&spec.data_directory_name);
        let is_it = move |_: &Path| if expected.is_empty() { Ok(()) } else { is_disk(&disk, &expected) };
        self.at_disk.run(place, is_it).await.and_then(|is_it| is_it).map_err(AgentError::Failed)?;
        self.create(self.process(name, Part::Replica(spec))).await
    }

    async fn start_engine(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        self.create(self.process(start.name, Part::Engine(start))).await
    }

    async fn exchange(&self, name: &str, part: Part<'_>) -> Result<(), AgentError> {
        // The instance manager raises a number that is below the next one of the process that it ends.
        self.replace(self.process(name, part)).await
    }

    async fn take_over(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        self.replace(self.process(start.name, Part::Engine(start))).await?;
        // Until the process before has ended its arguments are told, and whoever looks would ask for the same again.
        let deadline = Instant::now() + TAKE_OVER_PATIENCE;
        while Instant::now() < deadline {
            let is_other = |p: &ProcessView| p.relay_from != start.spec.relay_from;
            if !self.processes().await?.get(start.name).is_some_and(is_other) {
                break;
            }
            tokio::time::sleep(TAKE_OVER_LOOK).await;
        }
        Ok(())
    }

    fn program(&self, image: &str) -> PathBuf {
        self.root.engine_binary(image)
    }

    async fn has_program(&self, image: &str) -> bool {
        let place = self.root.engine_binary(image);
        tokio::task::spawn_blocking(move || place.is_file()).await.unwrap_or(false)
    }

    async fn install_program(&self, image: &str) -> Result<(), AgentError> {
        if self.laid.load(Ordering::Relaxed) && self.has_program(image).await {
            return Ok(());
        }
        let (own, place) = (self.own.clone(), self.root.engine_binary(image));
        let task = tokio::task::spawn_blocking(move || install(&own, &place));
        let done = task.await.map_err(|e| AgentError::Failed(e.to_string()))?;
        done.map_err(|e| {
            AgentError::Failed(format!("the program of {image} cannot be laid on this node: {e}"))
        })?;
        self.laid.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn stop(&self, name: &str) -> Result<(), AgentError> {
        let request = ProcessDeleteRequest { name: name.to_owned(), uuid: String::new() };
        match self.manager().await?.process_delete(request).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(refusal(&status)),
        }
    }

    async fn engine(&self, name: &str) -> Option<EngineView> {
        let channel = soon(self.channel(name)).await?;
        let mut view = soon(ask_engine(channel.clone())).await?;
        let endpoint = view.endpoint.clone();
        view.device = tokio::task::spawn_blocking(move || device_at(&endpoint)).await.ok().flatten();
        if view.relay_from.is_empty() {
            view.chain = soon(ask_chain(channel)).await;
        }
        Some(view)
    }

    async fn replica(&self, name: &str) -> Option<ReplicaView> {
        let channel = soon(self.channel(name)).await?;
        soon(ask_replica(channel)).await?
    }

    fn replica_address(&self, name: &str, process: &ProcessView) -> String {
        self.reach.address(process.port, self.root.data_socket(name)).to_string()
    }

    fn relay_address(&self, name: &str, process: &ProcessView) -> String {
        self.reach.address(process.port, self.root.relay_socket(name)).to_string()
    }

    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError> {
        let request = NamedReplica { name: name.to_owned(), address: address.to_owned() };
        let answer = self.operations(engine).await?.replica_add(request).await;
        answer.map(drop).map_err(|e| refusal(&e))
    }

    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        let answer =
            self.operations(engine).await?.replica_remove(ReplicaName { name: name.to_owned() }).await;
        answer.map(drop).map_err(|e| refusal(&e))
    }

    async fn expand(&self, engine: &str, size: u64) -> Result<(), AgentError> {
        let size =
            i64::try_from(size).map_err(|_| AgentError::Failed(format!("{size} bytes are too many")))?;
        let mut client = ControllerServiceClient::new(self.channel(engine).await?);
        client.volume_expand(VolumeExpandRequest { size }).await.map(drop).map_err(|e| refusal(&e))
    }

    async fn limit_snapshots(&self, engine: &str, limits: SnapshotLimits) -> Result<(), AgentError> {
        let mut client = ControllerServiceClient::new(self.channel(engine).await?);
        let count = i32::try_from(limits.count).unwrap_or(i32::MAX);
        let count = client.volume_snapshot_max_count_set(VolumeSnapshotMaxCountSetRequest { count }).await;
        count.map_err(|e| refusal(&e))?;
        let size = i64::try_from(limits.bytes).unwrap_or(i64::MAX);
        let size = client.volume_snapshot_max_size_set(VolumeSnapshotMaxSizeSetRequest { size }).await;
        size.map(drop).map_err(|e| refusal(&e))
    }

    async fn limit_rebuilds(&self, engine: &str, limits: RebuildLimits) -> Result<(), AgentError> {
        let rate = RebuildRate { bytes_per_second: limits.bytes_per_second };
        let rate = self.operations(engine).await?.rebuild_rate_set(rate).await;
        rate.map_err(|e| refusal(&e))?;
        let limit = i32::try_from(limits.at_once).unwrap_or(i32::MAX);
        let mut client = ControllerServiceClient::new(self.channel(engine).await?);
        let request = ReplicaRebuildConcurrentSyncLimitSetRequest { limit };
        let at_once = client.replica_rebuild_concurrent_sync_limit_set(request).await;
        at_once.map(drop).map_err(|e| refusal(&e))
    }

    async fn take_snapshot(
        &self,
        engine: &str,
        name: &str,
        labels: &BTreeMap<String, String>,
        freeze: bool,
    ) -> Result<(), AgentError> {
        let mut client = ControllerServiceClient::new(self.channel(engine).await?);
        let labels = labels.clone().into_iter().collect();
        let request = VolumeSnapshotRequest { name: name.to_owned(), labels, freeze_filesystem: freeze };
        match client.volume_snapshot(request).await {
            Err(status) if status.code() == Code::ResourceExhausted => {
                Err(AgentError::NoRoom(status.message().to_owned()))
            }
            Err(status) if status.code() == Code::Aborted => {
                Err(AgentError::NotFrozen(status.message().to_owned()))
            }
            Err(status) if status.code() != Code::AlreadyExists => Err(refusal(&status)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    async fn remove_snapshot(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        let request = SnapshotName { name: name.to_owned() };
        let mut operations = self.operations(engine).await?;
        match operations.snapshot_remove(request).await {
            // It is gone, or was never taken.
            Err(e) if e.code() == Code::NotFound => return Ok(()),
            removed => drop(removed.map_err(|e| refusal(&e))?),
        }
        // Its space comes back by folding it away. Where that cannot begin now, a rebuild goes on for instance, the next
        // removal begins it.
        if let Err(e) = operations.snapshot_purge(()).await {
            tracing::info!(engine, snapshot = name, error = e.message(), "not folded away yet");
        }
        Ok(())
    }

    async fn trim(&self, volume: &str, request: &str) -> Result<TrimView, AgentError> {
        let Some(socket) = &self.driver else {
            let why = "the manager of this node was told of no CSI driver (--csi-endpoint), which sees what is mounted";
            return Err(AgentError::Unbuilt(why.to_owned()));
        };
        let away = |why: String| AgentError::DriverAway(format!("{}: {why}", socket.display()));
        let channel = control::transport::connect(socket).await.map_err(|e| away(e.to_string()))?;
        let request = TrimRequest { volume: volume.to_owned(), request: request.to_owned() };
        match FileSystemsClient::new(channel).trim(request).await {
            Ok(answer) => {
                let state = answer.into_inner();
                Ok(TrimView { running: state.running, bytes: state.bytes, error: state.error })
            }
            Err(status) if matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal) => {
                Err(away(status.message().to_owned()))
            }
            Err(status) => Err(AgentError::Failed(status.message().to_owned())),
        }
    }

    async fn devices(&self) -> BTreeMap<String, String> {
        let root = self.root.clone();
        self.at_disk.run(root.volumes(), move |_| devices(&root)).await.unwrap_or_default()
    }

    async fn end_stay(&self, volume: &str, stay: &str, image: &str) -> Result<(), AgentError> {
        let name = format!("{volume}-stay");
        // Of a look that was cut short, maybe of another stay.
        if self.processes().await?.contains_key(&name) {
            self.stop(&name).await?;
            return Err(AgentError::Failed(format!(
                "{name}, which was to take the device away before, ends first"
            )));
        }
        let args = end_stay_command(&self.root, volume, stay);
        let binary = match self.has_program(image).await {
            true => self.root.engine_binary(image).display().to_string(),
            false => String::new(),
        };
        self.create(ProcessSpec { name: name.clone(), binary, args, ..ProcessSpec::default() }).await?;
        let ended = loop {
            match self.processes().await?.get(&name) {
                Some(process) if process.state == InstanceState::Error => {
                    break Err(AgentError::Failed(process.error.clone()));
                }
                Some(process) if process.state != InstanceState::Stopped => {
                    tokio::time::sleep(END_STAY_LOOK).await;
                }
                Some(_) | None => break Ok(()),
            }
        };
        self.stop(&name).await?;
        ended
    }

    async fn kept_volumes(&self) -> BTreeSet<String> {
        let root = self.root.clone();
        self.at_disk.run(root.volumes(), move |_| kept(&root)).await.unwrap_or_default()
    }

    async fn forget_volume(&self, volume: &str) -> Result<(), AgentError> {
        let (root, volume) = (self.root.clone(), volume.to_owned());
        let forget = move |_: &Path| forget(&root, &volume, Path::new(DEVICES), &LiveDirs::default());
        let done = self.at_disk.run(self.root.volumes(), forget).await.map_err(AgentError::Failed)?;
        done.map_err(|e| AgentError::Failed(e.to_string()))
    }

    async fn log_at(&self, level: Level) -> Result<(), AgentError> {
        let driver = async {
            match &self.driver {
                Some(socket) => level::tell_driver(socket, level).await,
                None => Ok(()),
            }
        };
        // Neither waits for the other: each may be away.
        let manager = self.root.manager_socket();
        let (manager, driver) = tokio::join!(level::tell_manager(&manager, level), driver);
        manager.and(driver)
    }

    async fn inspect_disk(&self, path: PathBuf) -> Result<DiskView, String> {
        self.at_disk.run(path, inspect).await?
    }

    async fn remove_directory(&self, disk_path: PathBuf, directory: String) -> Result<(), AgentError> {
        let place = disk_path.join("replicas").join(&directory);
        let remove = move |_: &Path| remove_replica_directory(&disk_path, &directory);
        let done = self.at_disk.run(place, remove).await.map_err(AgentError::Failed)?;
        done.map_err(|e| AgentError::Failed(e.to_string()))
    }

    async fn store_key(&self, volume: &str, key: &[u8]) -> Result<(), AgentError> {
        let (directory, file, key) = (self.root.volume(volume), self.root.key(volume), key.to_vec());
        let task = tokio::task::spawn_blocking(move || store_private(&directory, &file, &key));
        let done = task.await.map_err(|e| AgentError::Failed(e.to_string()))?;
        done.map_err(|e| AgentError::Failed(format!("the volume's key cannot be stored: {e}")))
    }
}

/// Removes `replicas/DIRECTORY` of a disk, and nothing else whatever the name says. A disk whose `replicas/` is not there
/// is not mounted: its directory is not known to be gone.
fn remove_replica_directory(disk: &Path, directory: &str) -> io::Result<()> {
    let plain = Path::new(directory).components().count() == 1
        && matches!(Path::new(directory).components().next(), Some(std::path::Component::Normal(_)));
    if !plain {
        return Err(io::Error::other(format!("{directory:?} is not the name of a replica's directory")));
    }
    let replicas = disk.join("replicas");
    if !replicas.is_dir() {
        return Err(io::Error::other(format!("{} is not there: is the disk mounted?", replicas.display())));
    }
    for left in [directory.to_owned(), unfinished_copy(directory)] {
        match std::fs::remove_dir_all(replicas.join(left)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Copies a program, unless it is there already. It is never in memory as a whole: that is as much as all else a manager has.
fn install(program: &Path, place: &Path) -> io::Result<()> {
    let is_there = File::open(place).is_ok_and(|there| is_same(program, there).unwrap_or(false));
    if is_there { Ok(()) } else { store_program(place, &mut File::open(program)?) }
}

fn is_same(program: &Path, there: File) -> io::Result<bool> {
    let program = File::open(program)?;
    if program.metadata()?.len() != there.metadata()?.len() {
        return Ok(false);
    }
    let (mut one, mut other) = (BufReader::new(program), BufReader::new(there));
    loop {
        let (left, right) = (one.fill_buf()?, other.fill_buf()?);
        let length = left.len().min(right.len());
        if left.get(..length) != right.get(..length) {
            return Ok(false);
        }
        if length == 0 {
            return Ok(left.len() == right.len());
        }
        one.consume(length);
        other.consume(length);
    }
}

/// Writes a file that its owner alone may read, unless it holds that already.
fn store_private(directory: &Path, file: &Path, content: &[u8]) -> io::Result<()> {
    if std::fs::read(file).is_ok_and(|old| old == content) {
        return Ok(());
    }
    create_dir_durably(directory)?;
    replace_file(file, content)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use lh_block::Generation;

    use super::*;
    use crate::api::EngineSpec;

    #[test]
    fn only_a_directory_below_replicas_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("replicas/demo-1");
        assert!(remove_replica_directory(dir.path(), "demo-1").is_err(), "the disk is not mounted");
        std::fs::create_dir_all(victim.join("engine")).unwrap();
        std::fs::write(victim.join("volume.meta"), "x").unwrap();
        for name in ["", ".", "..", "../replicas/demo-1", "/etc", "demo-1/engine"] {
            assert!(remove_replica_directory(dir.path(), name).is_err(), "{name:?}");
        }
        assert!(victim.join("engine").exists());
        remove_replica_directory(dir.path(), "demo-1").unwrap();
        assert!(!victim.exists());
        remove_replica_directory(dir.path(), "demo-1").unwrap();
    }

    #[test]
    fn a_program_is_laid_once_and_anew_where_it_is_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let (own, place) = (dir.path().join("own"), dir.path().join("images/longhorn-1/longhorn"));
        let inode = || std::os::unix::fs::MetadataExt::ino(&place.metadata().unwrap());
        std::fs::write(&own, [1; 20_000]).unwrap();
        install(&own, &place).unwrap();
        let first = inode();
        install(&own, &place).unwrap();
        assert_eq!(inode(), first, "what runs from there is not replaced for nothing");
        let mut other = [1; 20_000];
        other[19_999] = 2;
        for content in [&other[..], &other[..19_999]] {
            std::fs::write(&own, content).unwrap();
            install(&own, &place).unwrap();
            assert_eq!(std::fs::read(&place).unwrap(), content);
        }
        assert_eq!(place.metadata().unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn a_relay_and_the_engine_after_it_have_the_same_port_and_others_have_none() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        let on_network = Reach::Network([10, 0, 0, 7].into());
        let agent = LocalAgent::new(root.clone(), "/a.sock".into(), on_network, "/bin/true".into());
        let told = |migratable, relay_from: &str| {
            let relay_from = relay_from.to_owned();
            let spec =
                EngineSpec { volume_name: "demo".into(), migratable, relay_from, ..EngineSpec::default() };
            let start =
                EngineStart { name: "demo-e-1", spec: &spec, generation: Generation::default(), stay: "" };
            let process = agent.process("demo-e-1", Part::Engine(start));
            (
                process.port_count,
                process.port_args,
                value_of(&process.args, "--relay-from").map(str::to_owned),
            )
        };
        let port = vec!["--relay-listen,tcp:10.0.0.7:".to_owned()];
        assert_eq!(told(true, ""), (1, port.clone(), None));
        assert_eq!(told(true, "tcp:10.0.0.1:10003"), (1, port, Some("tcp:10.0.0.1:10003".to_owned())));
        assert_eq!(told(false, ""), (0, Vec::new(), None));
        let at = |port| agent.relay_address("demo-e-1", &ProcessView { port, ..ProcessView::default() });
        assert_eq!(at(Some(10_004)), "tcp:10.0.0.7:10004");
        assert_eq!(at(None), format!("unix:{}", root.relay_socket("demo-e-1").display()));
    }

    #[tokio::test]
    async fn without_an_instance_manager_the_node_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        let agent = LocalAgent::new(
            root.clone(),
            dir.path().join("authority.sock"),
            Reach::ThisMachine,
            "/bin/true".into(),
        );
        assert!(matches!(agent.processes().await, Err(AgentError::Away(_))));
        assert_eq!(agent.engine("demo-e-0").await, None);
        agent.store_key("demo", &[7; 32]).await.unwrap();
        assert_eq!(control::host::read_key(&root.key("demo")).unwrap(), [7; 32]);
    }
}
