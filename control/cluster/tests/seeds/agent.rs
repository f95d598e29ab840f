//! What a manager asks of its node, answered by the simulated one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lh_block::Generation;
use lh_cluster::agent::{
    Agent, AgentError, DiskView, EngineReplica, EngineStart, EngineView, Part, ProcessView, RebuildLimits,
    ReplicaView,
};
use lh_cluster::api::{InstanceState, ReplicaMode, ReplicaSpec, SnapshotLimits};
use tonic::async_trait;

use crate::api_server::ApiServer;
use crate::engine::{self, Engine, Phase};
use crate::judge;
use crate::world::{Copy, Disk, Host, Name, Replica, State, World};

/// How long a node takes for an answer.
const PAUSE: Duration = Duration::from_millis(7);

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
        let replicas = replicas.map(|((_, name), replica)| (name.clone(), running(&replica.uuid)));
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
            if !state.copies.contains_key(&place) {
                let birth = state.volumes.get(&spec.volume_name).map(|v| v.birth).unwrap_or_default();
                let copy = Copy {
                    volume: spec.volume_name.clone(),
                    birth,
                    holds: 0,
                    seen: Generation::default(),
                    by: String::new(),
                    before: Generation::default(),
                    recorded: None,
                };
                state.copies.insert(place.clone(), copy);
            }
            let uuid = format!("process-{}", state.number());
            state.replicas.insert(self.name(name), Replica { place, uuid });
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
            ..EngineView::default()
        })
    }

    async fn replica(&self, name: &str) -> Option<ReplicaView> {
        tokio::time::sleep(PAUSE).await;
        let state = self.world.state();
        self.disk(&state).ok()?;
        let place = &state.replicas.get(&self.name(name))?.place;
        Some(ReplicaView { generation: state.copies.get(place)?.seen })
    }

    fn replica_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/{}/{name}.sock", self.node)
    }

    /// As a port, another one for every process.
    fn relay_address(&self, name: &str, process: &ProcessView) -> String {
        format!("unix:/{}/{name}.{}", self.node, process.uuid)
    }

    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError> {
        self.change(engine, |engine| {
            engine.leaving.remove(name);
            engine.addresses.insert(name.to_owned(), address.to_owned());
        })
        .await
    }

    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        self.change(engine, |engine| {
            if engine.addresses.contains_key(name) {
                engine.leaving.insert(name.to_owned());
            }
        })
        .await?;
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
        _: &str,
        _: &str,
        _: &BTreeMap<String, String>,
        _: bool,
    ) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("there are no snapshots here".to_owned()))
    }

    async fn remove_snapshot(&self, _: &str, _: &str) -> Result<(), AgentError> {
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
