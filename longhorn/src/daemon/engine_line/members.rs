//! The words that are about replicas.

use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail};
use control::proto::ptypes;
use control::proto::ptypes::ReplicaMode;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use control::proto::volume::NamedReplica;

use super::words::AddArgs;
use super::{LOOK, Line, as_listed, show};

/// How long a replica that was added may be left out before whoever added it is told: its engine connects within seconds, and
/// begins again by itself after what passes.
const LEFT_OUT: std::time::Duration = std::time::Duration::from_secs(30);

impl Line {
    pub(super) async fn list(&mut self) -> Result<()> {
        let mut rows = Vec::new();
        for replica in self.replicas().await? {
            let mode = replica.mode();
            let address = replica.address.unwrap_or_default().address;
            let chain = match mode {
                ReplicaMode::Err => String::new(),
                _ => self.chain(&address).await.map(|chain| show::go_list(&chain)).unwrap_or_default(),
            };
            rows.push([address, mode.as_str_name().to_owned(), chain]);
        }
        show::print_columns(&["ADDRESS", "MODE", "CHAIN"], &rows)
    }

    /// The chain of a replica, from its own process; file names, the head first.
    async fn chain(&self, address: &str) -> Result<Vec<String>> {
        let mut replica = ReplicaServiceClient::new(self.at_replica(address).await?);
        let answer = replica.replica_get(()).await?.into_inner().replica;
        Ok(answer.context("the replica says nothing of itself")?.chain)
    }

    /// As Longhorn's, returns when the replica is in sync.
    pub(super) async fn add(&mut self, args: AddArgs) -> Result<()> {
        let address = as_listed(&args.address);
        match args.replica_instance_name {
            Some(name) => {
                self.operations.replica_add(NamedReplica { name, address: address.clone() }).await?;
            }
            None => {
                let request = ptypes::ControllerReplicaCreateRequest {
                    address: address.clone(),
                    snapshot_required: true,
                    mode: ReplicaMode::Wo.into(),
                };
                self.engine.controller_replica_create(request).await?;
            }
        }
        let mut left_out = None;
        loop {
            let replicas = self.replicas().await?;
            let found =
                replicas.into_iter().find(|r| r.address.as_ref().is_some_and(|a| a.address == address));
            let Some(replica) = found else { bail!("replica {address} was taken out again") };
            match replica.mode() {
                ReplicaMode::Rw => return Ok(()),
                ReplicaMode::Wo => left_out = None,
                ReplicaMode::Err => {
                    if left_out.get_or_insert_with(Instant::now).elapsed() >= LEFT_OUT {
                        bail!(
                            "replica {address} is added and not in sync yet: {}; its engine goes on trying, and `longhorn \
                             verify-rebuild {address}` says when it is",
                            replica.reason
                        );
                    }
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    pub(super) async fn remove(&mut self, address: String) -> Result<()> {
        let request = ptypes::ReplicaAddress { address: as_listed(&address), ..Default::default() };
        self.engine.replica_delete(request).await?;
        Ok(())
    }

    pub(super) async fn update(&mut self, address: String, mode: ReplicaMode) -> Result<()> {
        let address = ptypes::ReplicaAddress { address: as_listed(&address), ..Default::default() };
        let request =
            ptypes::ControllerReplica { address: Some(address), mode: mode.into(), ..Default::default() };
        self.engine.replica_update(request).await?;
        Ok(())
    }

    pub(super) async fn verify_rebuild(&mut self, address: String, instance_name: String) -> Result<()> {
        let request = ptypes::ReplicaAddress { address: as_listed(&address), instance_name };
        self.check_name(&request).await?;
        self.engine.replica_verify_rebuild(request).await?;
        Ok(())
    }

    /// Refuses another replica than the one that is meant: the engine takes an address or a name, not both.
    async fn check_name(&mut self, meant: &ptypes::ReplicaAddress) -> Result<()> {
        if meant.instance_name.is_empty() {
            return Ok(());
        }
        let replicas = self.replicas().await?;
        let found = replicas.iter().filter_map(|r| r.address.as_ref()).find(|a| a.address == meant.address);
        let found = found.ok_or_else(|| anyhow!("the volume has no replica at {}", meant.address))?;
        if found.instance_name != meant.instance_name {
            bail!("{} is replica {}, not {}", meant.address, found.instance_name, meant.instance_name);
        }
        Ok(())
    }
}
