//! The words that are about snapshots.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow, bail};
use control::chain::Layer;
use control::cloning::clone_statuses;
use control::proto::ptypes;
use control::proto::ptypes::ReplicaMode;
use control::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use control::proto::volume::{CloneSource, SnapshotName};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;

use super::words::{HashCommand, SnapshotCommand};
use super::{LOOK, Line, Meant, show};
use crate::arguments::unix_address;
use crate::sentence::sentence;
use crate::tell::tell;

type Agent = SyncAgentServiceClient<InterceptedService<Channel, Meant>>;

impl Line {
    pub(super) async fn snapshot(&mut self, command: Option<SnapshotCommand>) -> Result<()> {
        match command {
            Some(SnapshotCommand::Create { labels, freeze, name }) => {
                let request = ptypes::VolumeSnapshotRequest {
                    name: name.unwrap_or_default(),
                    labels: labels.into_iter().collect(),
                    freeze_filesystem: freeze,
                };
                let name = self.engine.volume_snapshot(request).await?.into_inner().name;
                show::print_line(&name)
            }
            Some(SnapshotCommand::Revert { name }) => {
                self.engine.volume_revert(ptypes::VolumeRevertRequest { name }).await?;
                Ok(())
            }
            None | Some(SnapshotCommand::Ls) => {
                let names: Vec<_> =
                    show::listed(&self.layers().await?).into_iter().map(|name| [name]).collect();
                show::print_columns(&["ID"], &names)
            }
            Some(SnapshotCommand::Rm { names }) => self.remove_snapshots(names).await,
            Some(SnapshotCommand::Purge { wait, .. }) => {
                self.operations.snapshot_purge(()).await?;
                if wait { self.wait_for_purge().await } else { Ok(()) }
            }
            Some(SnapshotCommand::PurgeStatus) => {
                let status = self.operations.snapshot_purge_status(()).await?.into_inner();
                show::print_json(&show::purges(&self.replicas().await?, &status))
            }
            Some(SnapshotCommand::Info) => show::print_json(&show::snapshots(&self.layers().await?)),
            Some(SnapshotCommand::Clone {
                snapshot_name,
                from_controller_address,
                from_volume_name,
                from_controller_instance_name,
                ..
            }) => {
                let source = unix_address(&from_controller_address).map_err(|e| anyhow!(e))?;
                let clone = CloneSource {
                    engine: format!("unix:{}", source.display()),
                    volume: from_volume_name,
                    instance: from_controller_instance_name,
                    snapshot: snapshot_name,
                };
                self.operations.snapshot_clone(clone).await?;
                Ok(())
            }
            Some(SnapshotCommand::CloneStatus) => {
                let list = self.engine.replica_list(()).await?.into_inner();
                let state = self.operations.snapshot_clone_status(()).await?.into_inner();
                show::print_json(&show::clones(&clone_statuses(&list, &state)))
            }
            Some(SnapshotCommand::Hash(command)) => self.hash(command).await,
        }
    }

    /// All layers as a member has them, whichever host it is on.
    async fn layers(&mut self) -> Result<Vec<Layer>> {
        let chain = self.operations.snapshot_list(()).await?.into_inner();
        Ok(chain.layers.into_iter().map(Layer::from).collect())
    }

    /// As Longhorn's: one that cannot be removed does not keep the next one from it.
    async fn remove_snapshots(&mut self, names: Vec<String>) -> Result<()> {
        let (count, mut failed) = (names.len(), Vec::new());
        for name in names {
            let removed = self.operations.snapshot_remove(SnapshotName { name: name.clone() }).await;
            if let Err(e) = removed {
                failed.push((name, anyhow::Error::from(e)));
            }
        }
        match failed.pop() {
            None => Ok(()),
            Some((_, e)) if count == 1 => Err(e),
            Some(last) => {
                failed.push(last);
                for (name, e) in &failed {
                    tell!("snapshot {name} is not removed: {}", sentence(e));
                }
                bail!("{} of {count} snapshots are not removed", failed.len())
            }
        }
    }

    async fn wait_for_purge(&mut self) -> Result<()> {
        loop {
            let status = self.operations.snapshot_purge_status(()).await?.into_inner();
            if let Some(failed) = status.replicas.iter().find(|r| !r.error.is_empty()) {
                bail!("{}: {}", failed.replica, failed.error);
            }
            if status.replicas.iter().all(|r| !r.running) {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Each replica takes its own checksums, and is asked itself.
    pub(super) async fn hash(&mut self, command: HashCommand) -> Result<()> {
        let replicas = self.replicas().await?;
        let replicas: Vec<(ReplicaMode, String)> =
            replicas.into_iter().map(|r| (r.mode(), r.address.unwrap_or_default().address)).collect();
        if let HashCommand::HashStatus { name } = &command {
            let mut statuses = BTreeMap::new();
            for (mode, address) in replicas {
                let status = self.hash_status(mode, &address, name).await;
                statuses.insert(address, show::Hash::from(status));
            }
            return show::print_json(&statuses);
        }
        let out_of_sync = replicas.iter().find(|(mode, _)| *mode != ReplicaMode::Rw);
        if let (HashCommand::Hash { name, .. }, Some((mode, address))) = (&command, out_of_sync) {
            bail!(
                "snapshot {name} cannot be hashed while replica {address} is in mode {}",
                mode.as_str_name()
            );
        }
        let mut failed = Vec::new();
        for (_, address) in &replicas {
            if let Err(e) = self.ask_to_hash(address, &command).await {
                failed.push(format!("{address}: {}", sentence(&e)));
            }
        }
        if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("; ")) }
    }

    async fn ask_to_hash(&self, address: &str, command: &HashCommand) -> Result<()> {
        let mut agent = self.agent(address).await?;
        match command {
            HashCommand::Hash { name, rehash } => {
                let request = ptypes::SnapshotHashRequest { snapshot_name: name.clone(), rehash: *rehash };
                agent.snapshot_hash(request).await?;
            }
            HashCommand::HashCancel { name } => {
                let request = ptypes::SnapshotHashCancelRequest { snapshot_name: name.clone() };
                agent.snapshot_hash_cancel(request).await?;
            }
            HashCommand::HashStatus { .. } => {}
        }
        Ok(())
    }

    async fn hash_status(
        &self,
        mode: ReplicaMode,
        address: &str,
        name: &str,
    ) -> Result<ptypes::SnapshotHashStatusResponse> {
        if mode != ReplicaMode::Rw {
            bail!("the replica is in mode {}", mode.as_str_name());
        }
        let request = ptypes::SnapshotHashStatusRequest { snapshot_name: name.to_owned() };
        Ok(self.agent(address).await?.snapshot_hash_status(request).await?.into_inner())
    }

    async fn agent(&self, address: &str) -> Result<Agent> {
        Ok(SyncAgentServiceClient::new(self.at_replica(address).await?))
    }
}
