//! What a manager asks of its node, answered by the simulated one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use control::logging::Level;
use lh_block::Generation;
use lh_cluster::agent::{
    Agent, AgentError, DiskView, EngineReplica, EngineStart, EngineView, Part, ProcessView, RebuildLimits,
    ReplicaView, TrimView,
};
use lh_cluster::api::{InstanceState, ReplicaMode, ReplicaSpec, SnapshotLimits};
use tokio::sync::oneshot;
use tonic::async_trait;

use crate::api_server::ApiServer;
use crate::chain::{self, Asked, Wish};
use crate::engine::{self, Engine, Phase};
use crate::judge;
use crate::world::{Base, Copy, Copying, Disk, Host, Name, Place, Replica, State, World};

/// How long a node takes for an answer.
const PAUSE: Duration = Duration::from_millis(7);

/// A copy of a directory takes so long, or some times that.
const COPIES: Duration = Duration::from_secs(3);

/// How long an engine takes to let a replica go.
const LETS_GO: Duration = Duration::from_millis(200);

pub(crate) struct SimulatedNode {
    pub(crate) node: String,
    pub(crate) world: Arc<World>,
    pub(crate) server: ApiServer,
}

impl SimulatedNode {
    fn name(&self, process: &str) -> Name {
        (self.node.clone(), process.to_owned())
    }

    /// The instance manager answers, after a while.
    async fn manager(&self) -> Result<(), AgentError> {
        tokio::time::sleep(PAUSE).await;
        match self.world.state().hosts.get(&self.node) {
            Some(Host { runs: true, answers: true, .. }) => Ok(()),
            _ => Err(AgentError::Away("there is no instance manager".to_owned())),
        }
    }

    fn disk(&self, state: &State) -> Result<(), AgentError> {
        match state.hosts.get(&self.node) {
            Some(Host { disk: Disk::Good, .. }) => Ok(()),
            _ => Err(AgentError::Failed("Input/output error".to_owned())),
        }
    }

    /// Runs the process of an engine, or of a relay, in the place of what is there.
    fn run_engine(&self, name: Name, start: EngineStart<'_>) {
        let mut state = self.world.state();
        let uuid = format!("process-{}", state.number());
        let birth = state.volumes.get(&start.spec.volume_name).map(|v| v.birth).unwrap_or_default();
        let engine = Engine::new(birth, uuid.clone(), start);
        // What another stay has left goes with the first start of this one.
        let place = (self.node.clone(), engine.volume.clone());
        if state.devices.get(&place).is_some_and(|device| device.stay != engine.stay) {
            state.devices.remove(&place);
            state.count("a new stay began beside a device of an earlier one");
        }
        state.engines.insert(name.clone(), engine);
        drop(state);
        tokio::spawn(engine::run(Arc::clone(&self.world), name, uuid));
        self.world.ring(&self.node);
    }

    /// Has an engine change its chain.
    async fn ask_chain(&self, engine: &str, wish: Wish) -> Result<(), AgentError> {
        let (waits, answer) = oneshot::channel();
        let asked = Asked { wish, waits: Some(waits) };
        self.change(engine, |engine| engine.wishes.push_back(asked)).await?;
        answer.await.unwrap_or_else(|_| Err(AgentError::Failed("the engine has ended".to_owned())))
    }

    /// Begins a replica whose directory is made from another one's.
    fn begin_copy(
        &self,
        state: &mut State,
        name: Name,
        place: Place,
        spec: &ReplicaSpec,
        uuid: &str,
    ) -> Replica {
        let origin = &spec.clone_from;
        let directory = origin.directory.split_once("/replicas/").unwrap_or_default();
        let from = (directory.0.to_owned(), directory.1.to_owned());
        let lasts = COPIES.saturating_mul(u32::try_from(1 + state.number() % 20).unwrap_or(1));
        let copying = Copying { from, snapshot: origin.snapshot.clone(), is_spoiled: false };
        let (world, volume, of) = (Arc::clone(&self.world), spec.volume_name.clone(), uuid.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(lasts).await;
            let mut state = world.state();
            state.end_copy(&name, &of, &volume);
            drop(state);
            world.ring(&name.0);
        });
        Replica { place, uuid: uuid.to_owned(), copying: Some(copying), error: String::new() }
    }

    /// Changes a running engine.
    async fn change(&self, engine: &str, change: impl FnOnce(&mut Engine)) -> Result<(), AgentError> {
        tokio::time::sleep(PAUSE).await;
        let mut state = self.world.state();
        let engine = state.engines.get_mut(&self.name(engine));
        let engine = engine.filter(|e| !matches!(e.phase, Phase::Ended(_)));
        change(engine.ok_or_else(|| AgentError::Failed("there is no such engine".to_owned()))?);
        Ok(())
    }
}

impl State {
    /// A replica's directory is made, if it could be.
    fn end_copy(&mut self, name: &Name, uuid: &str, volume: &str) {
        let disk = self.hosts.get(&name.0).map(|host| host.disk);
        let Some(replica) = self.replicas.get_mut(name).filter(|replica| replica.uuid == uuid) else {
            return;
        };
        let Some(copying) = replica.copying.take() else { return };
        let place = replica.place.clone();
        let source = self.copies.get(&copying.from).filter(|_| disk == Some(Disk::Good));
        let layer = source.and_then(|copy| {
            let found = copy.chain.iter().find(|layer| layer.name == copying.snapshot);
            let holds = found.map(|layer| layer.holds);
            let base = Base { volume: copy.volume.clone(), birth: copy.birth, holds };
            (found.is_some() || copying.is_spoiled).then_some(base)
        });
        let Some(base) = layer else {
            if let Some(replica) = self.replicas.get_mut(name) {
                replica.error = format!("{:?} does not hold {}", copying.from, copying.snapshot);
            }
            return self.count("a copy for a clone failed");
        };
        let birth = self.volumes.get(volume).map(|v| v.birth).unwrap_or_default();
        self.copies.insert(place, Copy::new(volume, birth, Some(base)));
        self.count("a copy for a clone was made");
    }

    /// What an engine tells of its chain.
    fn chain_of(&self, node: &str, engine: &Engine) -> Option<Vec<control::chain::Layer>> {
        let address = engine.addresses.get(engine.members().first()?)?;
        let copy = self.copies.get(&self.reached(node, address)?)?;
        Some(chain::told(&copy.chain))
    }
}

impl Copy {
    /// As it is made.
    fn new(volume: &str, birth: u64, base: Option<Base>) -> Self {
        Self {
            volume: volume.to_owned(),
            birth,
            holds: 0,
            seen: Generation::default(),
            by: String::new(),
            before: Generation::default(),
            recorded: None,
            epoch: None,
            chain: Vec::new(),
            base,
        }
    }
}

fn running(uuid: &str) -> ProcessView {
    ProcessView { state: InstanceState::Running, uuid: uuid.to_owned(), ..ProcessView::default() }
}

#[async_trait]
impl Agent for SimulatedNode {
    async fn processes(&self) -> Result<BTreeMap<String, ProcessView>, AgentError> {
        self.manager().await?;
        let state = self.world.state();
        let authority = format!("unix:{}", self.world.socket(&self.node).display());
        let engines = state.engines.iter().filter(|((node, _), _)| *node == self.node);
        let engines = engines.map(|((_, name), engine)| {
            let (authority, relay_from) = (authority.clone(), engine.relay_from.clone());
            let mut view = ProcessView { authority, relay_from, ..running(&engine.uuid) };
            if let Phase::Ended(why) = &engine.phase {
                (view.state, view.error) = (InstanceState::Error, why.clone());
            }
            (name.clone(), view)
        });
        let replicas = state.replicas.iter().filter(|((node, _), _)| *node == self.node);
        let replicas = replicas.map(|((_, name), replica)| {
            let mut view = running(&replica.uuid);
            if !replica.error.is_empty() {
                (view.state, view.error) = (InstanceState::Error, replica.error.clone());
            }
            (name.clone(), view)
        });
        Ok(engines.chain(replicas).collect())
    }

    async fn changed(&self) {
        self.world.rung(&self.node).await;
    }

    async fn listen(&self) {
        std::future::pending().await
    }

    async fn start_replica(&self, name: &str, spec: &ReplicaSpec) -> Result<(), AgentError> {
        self.manager().await?;
        let mut state = self.world.state();
        self.disk(&state)?;
        // Another disk at the same path is another one.
        if !spec.disk_id.is_empty() && spec.disk_id != state.disk_id(&self.node) {
            return Err(AgentError::Failed(format!("{} is not disk {}", spec.disk_path, spec.disk_id)));
        }
        if !state.replicas.contains_key(&self.name(name)) {
            let place = (spec.disk_path.clone(), spec.data_directory_name.clone());
            let is_copy = !spec.clone_from.directory.is_empty();
            let uuid = format!("process-{}", state.number());
            let mut replica = Replica { place: place.clone(), uuid, copying: None, error: String::new() };
            if is_copy && !state.copies.contains_key(&place) {
                let uuid = replica.uuid.clone();
                replica = self.begin_copy(&mut state, self.name(name), place, spec, &uuid);
            } else if !state.copies.contains_key(&place) {
                let birth = state.volumes.get(&spec.volume_name).map(|v| v.birth).unwrap_or_default();
                state.copies.insert(place, Copy::new(&spec.volume_name, birth, None));
            }
            state.replicas.insert(self.name(name), replica);
        }
        drop(state);
        self.world.ring(&self.node);
        Ok(())
    }

    async fn start_engine(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        self.manager().await?;
        let mut state = self.world.state();
        let name = self.name(start.name);
        if state.engines.contains_key(&name) {
            return Ok(());
        }
        state.count(if start.spec.relays() { "a relay was started" } else { "an engine was started" });
        drop(state);
        self.run_engine(name, start);
        Ok(())
    }

    async fn exchange(&self, _: &str, _: Part<'_>) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("there are no programs here".to_owned()))
    }

    async fn take_over(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        self.manager().await?;
        let mut state = self.world.state();
        let name = self.name(start.name);
        if !state.engines.contains_key(&name) {
            return Err(AgentError::Failed("there is no such process".to_owned()));
        }
        let is_engine = !start.spec.relays();
        state.count(if is_engine {
            "an engine took a relay's place"
        } else {
            "a relay found its engine elsewhere"
        });
        drop(state);
        self.run_engine(name, start);
        Ok(())
    }

    fn program(&self, image: &str) -> PathBuf {
        image.into()
    }

    async fn has_program(&self, _: &str) -> bool {
        true
    }

    async fn install_program(&self, _: &str) -> Result<(), AgentError> {
        Ok(())
    }

    async fn stop(&self, name: &str) -> Result<(), AgentError> {
        self.manager().await?;
        let mut state = self.world.state();
        if let Some(engine) = state.engines.remove(&self.name(name)).filter(Engine::is_up) {
            if judge::is_in_use(&self.server, &engine.volume, &self.node) {
                let what = format!(
                    "the device of {} on {} is taken away from who uses it",
                    engine.volume, self.node
                );
                state.wrong(what);
            }
            state.devices.remove(&(self.node.clone(), engine.volume));
        }
        state.replicas.remove(&self.name(name));
        drop(state);
        self.world.ring(&self.node);
        Ok(())
    }

    async fn engine(&self, name: &str) -> Option<EngineView> {
        tokio::time::sleep(PAUSE).await;
        let state = self.world.state();
        let engine = state.engines.get(&self.name(name))?;
        let mode = |replica: &String| {
            if engine.members().contains(replica) {
                ReplicaMode::ReadWrite
            } else if engine.filling.contains_key(replica) {
                ReplicaMode::WriteOnly
            } else {
                ReplicaMode::Error
            }
        };
        let replica = |(name, address): (&String, &String)| EngineReplica {
            name: name.clone(),
            address: address.clone(),
            mode: mode(name),
            ..EngineReplica::default()
        };
        Some(EngineView {
            up: engine.is_up(),
            relay_from: engine.relay_from.clone(),
            size: engine.size,
            snapshot_limits: engine.limits,
            rebuild_limits: engine.rebuild_limits,
            endpoint: format!("/dev/longhorn/{}", engine.volume),
            generation: engine.generation,
            replicas: engine.addresses.iter().map(replica).collect(),
            chain: state.chain_of(&self.node, engine),
            ..EngineView::default()
        })
    }

    async fn replica(&self, name: &str) -> Option<ReplicaView> {
        tokio::time::sleep(PAUSE).await;
        let state = self.world.state();
        self.disk(&state).ok()?;
        let replica = state.replicas.get(&self.name(name)).filter(|replica| replica.copying.is_none())?;
        let copy = state.copies.get(&replica.place)?;
        Some(ReplicaView { generation: copy.seen, epoch_recorded: copy.epoch.is_some() })
    }

    fn replica_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/{}/{name}.sock", self.node)
    }

    /// As a port, another one for every process.
    fn relay_address(&self, name: &str, process: &ProcessView) -> String {
        format!("unix:/{}/{name}.{}", self.node, process.uuid)
    }

    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError> {
        let mut is_taken = true;
        self.change(engine, |engine| {
            is_taken = engine.addresses.contains_key(name) || engine.takes_one_more();
            if is_taken {
                engine.leaving.remove(name);
                engine.addresses.insert(name.to_owned(), address.to_owned());
            }
        })
        .await?;
        if is_taken { Ok(()) } else { Err(AgentError::Failed("too few are in sync".to_owned())) }
    }

    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        let mut refusal = None;
        self.change(engine, |engine| refusal = engine.begin_to_let_go(name).err()).await?;
        if let Some(why) = refusal {
            self.world.state().count("an engine kept a replica that was to go");
            return Err(AgentError::Failed(why.to_owned()));
        }
        loop {
            tokio::time::sleep(LETS_GO).await;
            let state = self.world.state();
            let engine = state.engines.get(&self.name(engine));
            let engine = engine.ok_or_else(|| AgentError::Failed("the engine has ended".to_owned()))?;
            match (engine.addresses.contains_key(name), engine.leaving.contains(name)) {
                (false, _) => return Ok(()),
                (true, true) => {}
                (true, false) => return Err(AgentError::Failed("it is the last one".to_owned())),
            }
        }
    }

    async fn expand(&self, engine: &str, size: u64) -> Result<(), AgentError> {
        self.change(engine, |engine| engine.size = size).await
    }

    async fn limit_snapshots(&self, engine: &str, limits: SnapshotLimits) -> Result<(), AgentError> {
        self.change(engine, |engine| engine.limits = limits).await
    }

    async fn limit_rebuilds(&self, engine: &str, limits: RebuildLimits) -> Result<(), AgentError> {
        self.change(engine, |engine| engine.rebuild_limits = limits).await
    }

    async fn take_snapshot(
        &self,
        engine: &str,
        name: &str,
        _: &BTreeMap<String, String>,
        _: bool,
    ) -> Result<(), AgentError> {
        self.ask_chain(engine, Wish::Take(name.to_owned())).await
    }

    async fn remove_snapshot(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        let resource = self.server.get("snapshots", name);
        if resource.is_some_and(|s| s["metadata"]["deletionTimestamp"].is_null()) {
            let mut state = self.world.state();
            let is_there = state.engines.get(&self.name(engine)).is_some_and(|e| {
                let chain = state.chain_of(&self.node, e).unwrap_or_default();
                chain.iter().any(|layer| layer.name == name && !layer.removed)
            });
            if is_there {
                state.wrong(format!("{engine} is to remove {name}, which nobody has deleted"));
            }
        }
        self.ask_chain(engine, Wish::Remove(name.to_owned())).await
    }

    async fn trim(&self, _: &str, _: &str) -> Result<TrimView, AgentError> {
        Err(AgentError::Unbuilt("nothing is mounted here".to_owned()))
    }

    /// Nothing is kept here but data: what the node forgets is judged elsewhere.
    async fn kept_volumes(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }

    async fn forget_volume(&self, volume: &str) -> Result<(), AgentError> {
        Err(AgentError::Failed(format!("nothing of {volume} is kept here")))
    }

    async fn log_at(&self, _: Level) -> Result<(), AgentError> {
        Ok(())
    }

    async fn devices(&self) -> BTreeMap<String, String> {
        let state = self.world.state();
        let here = state.devices.iter().filter(|((node, _), _)| *node == self.node);
        here.map(|((_, volume), device)| (volume.clone(), device.stay.clone())).collect()
    }

    async fn end_stay(&self, volume: &str, stay: &str, _: &str) -> Result<(), AgentError> {
        self.manager().await?;
        let mut state = self.world.state();
        let runs = |((node, _), engine): (&Name, &Engine)| {
            *node == self.node && engine.volume == volume && !matches!(engine.phase, Phase::Ended(_))
        };
        if state.engines.iter().any(runs) {
            return Err(AgentError::Failed(format!("an engine of {volume} runs here")));
        }
        let place = (self.node.clone(), volume.to_owned());
        if state.devices.get(&place).is_some_and(|device| device.stay == stay) {
            state.devices.remove(&place);
            state.count("a device that was left behind was taken away");
            if let Some(what) = judge::goes_on(&self.server, volume, &self.node, stay) {
                state.wrong(what);
            }
        }
        Ok(())
    }

    async fn inspect_disk(&self, path: PathBuf) -> Result<DiskView, String> {
        tokio::time::sleep(PAUSE).await;
        let state = self.world.state();
        let host = state.hosts.get(&self.node).filter(|h| h.disk == Disk::Good);
        let host = host.ok_or_else(|| format!("{}: Input/output error", path.display()))?;
        let path = path.display().to_string();
        let directories = state.copies.keys().filter(|(disk, _)| *disk == path);
        Ok(DiskView {
            uuid: state.disk_id(&self.node),
            filesystem_id: format!("{path}-{}", host.disks),
            maximum: 1 << 40,
            available: 1 << 40,
            directories: directories.map(|(_, name)| name.clone()).collect(),
            ..DiskView::default()
        })
    }

    async fn remove_directory(&self, disk_path: PathBuf, directory: String) -> Result<(), AgentError> {
        tokio::time::sleep(PAUSE).await;
        let mut state = self.world.state();
        self.disk(&state)?;
        let place = (disk_path.display().to_string(), directory);
        if state.replicas.values().any(|r| r.place == place) {
            state.wrong(format!("{place:?} is removed below its process"));
        }
        judge::note_clones(&self.server, &mut state);
        if !state.others_hold(&place) {
            let copy = state.copies.get(&place);
            let what = format!("the last copy that holds everything is removed: {place:?} {copy:?}");
            state.wrong(what);
        }
        if state.copies.remove(&place).is_some() {
            state.count("a copy was removed");
        }
        Ok(())
    }

    async fn store_key(&self, _: &str, _: &[u8]) -> Result<(), AgentError> {
        Ok(())
    }
}
