//! The words that are about replicas.

use anyhow::{Context as _, Result, anyhow, bail};
use control::joining::{NotInSync, until_in_sync};
use control::proto::ptypes;
use control::proto::ptypes::ReplicaMode;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use control::proto::volume::NamedReplica;

use super::words::AddArgs;
use super::{Line, as_listed, show};

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
        let name = args.replica_instance_name;
        match name.clone() {
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
        let wanted = name.clone().unwrap_or_default();
        let engine = &self.engine;
        let list = || {
            let mut engine = engine.clone();
            async move { Ok::<_, anyhow::Error>(engine.replica_list(()).await?.into_inner().replicas) }
        };
        until_in_sync(&address, &wanted, list).await.map_err(|e| match e {
            NotInSync::Unheard(e) => e,
            left @ NotInSync::LeftOut { .. } => {
                let name = name.as_ref().unwrap_or(&address);
                anyhow!("{left}, and `longhorn verify-rebuild {name}` says when it is")
            }
            taken @ NotInSync::TakenOut(_) => anyhow!("{taken}"),
        })
    }

    pub(super) async fn remove(&mut self, replica: &str) -> Result<()> {
        self.engine.replica_delete(meant(replica)).await?;
        Ok(())
    }

    pub(super) async fn update(&mut self, replica: &str, mode: ReplicaMode) -> Result<()> {
        let address = Some(meant(replica));
        let request = ptypes::ControllerReplica { address, mode: mode.into(), ..Default::default() };
        self.engine.replica_update(request).await?;
        Ok(())
    }

    pub(super) async fn verify_rebuild(&mut self, replica: &str, instance_name: String) -> Result<()> {
        let mut request = meant(replica);
        if !instance_name.is_empty() {
            request.instance_name = instance_name;
        }
        self.check_name(&request).await?;
        self.engine.replica_verify_rebuild(request).await?;
        Ok(())
    }

    /// Refuses another replica than the one that is meant, and says whose the address is.
    async fn check_name(&mut self, meant: &ptypes::ReplicaAddress) -> Result<()> {
        if meant.instance_name.is_empty() || meant.address.is_empty() {
            return Ok(());
        }
        let replicas = self.replicas().await?;
        let at = || replicas.iter().filter_map(|r| r.address.as_ref()).filter(|a| a.address == meant.address);
        let found = at().find(|a| a.instance_name == meant.instance_name).or_else(|| at().next());
        let found = found.ok_or_else(|| anyhow!("the volume has no replica at {}", meant.address))?;
        if found.instance_name != meant.instance_name {
            bail!("{} is replica {}, not {}", meant.address, found.instance_name, meant.instance_name);
        }
        Ok(())
    }
}

/// The replica of that address or of that name, which has no colon in it.
fn meant(replica: &str) -> ptypes::ReplicaAddress {
    match replica.contains(':') {
        true => ptypes::ReplicaAddress { address: as_listed(replica), ..Default::default() },
        false => ptypes::ReplicaAddress { instance_name: replica.to_owned(), ..Default::default() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_is_meant_by_its_address_or_by_its_name() {
        let said = |replica| {
            let ptypes::ReplicaAddress { address, instance_name } = meant(replica);
            (address, instance_name)
        };
        assert_eq!(said("tcp://10.0.0.1:10000"), ("tcp:10.0.0.1:10000".into(), String::new()));
        assert_eq!(said("unix:/r/1.sock"), ("unix:/r/1.sock".into(), String::new()));
        assert_eq!(said("demo-r-0a1b2c3d"), (String::new(), "demo-r-0a1b2c3d".into()));
    }
}
