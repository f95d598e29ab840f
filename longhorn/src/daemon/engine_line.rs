//! Longhorn's engine command line (`longhorn info`, `ls`, `snapshot ...`), with its flags and its output, for scripts that
//! were written for it. People use `longhornctl`.
//!
//! An operation that Longhorn's program carries out replica by replica is one call of the engine here.

mod show;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Subcommand;
use control::cloning::clone_statuses;
use control::proto::ptypes;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use control::proto::volume::volume_operations_client::VolumeOperationsClient;
use control::proto::volume::{CloneSource, SnapshotName};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::arguments::{label, unix_address};

/// How often a purge that is waited for is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// Where the engine is, and who it should be.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Target {
    /// The engine's control socket: unix:PATH
    #[arg(long, env = "LONGHORN_URL", value_name = "URL")]
    url: Option<String>,
    /// Refuse an engine of another volume
    #[arg(long = "volume-name", value_name = "NAME", default_value = "")]
    pub(super) volume: String,
    /// Refuse another engine
    #[arg(long = "engine-instance-name", value_name = "NAME", default_value = "")]
    pub(super) instance: String,
}

/// The commands of Longhorn's engine.
#[derive(Debug, Subcommand)]
pub(super) enum EngineCommand {
    /// Print what the engine says of itself, as JSON
    Info,
    /// List replicas and their chains
    #[command(visible_alias = "ls-replica")]
    Ls,
    /// Add a replica: unix:PATH of its data socket
    #[command(visible_alias = "add-replica")]
    Add {
        /// unix:PATH
        address: String,
    },
    /// Take a replica out
    #[command(visible_alias = "rm-replica")]
    Rm {
        /// unix:PATH
        address: String,
    },
    /// How far rebuilds are, as JSON
    #[command(visible_alias = "rebuild-status")]
    ReplicaRebuildStatus,
    /// Take, list and remove snapshots
    #[command(visible_alias = "snapshots")]
    Snapshot {
        #[command(subcommand)]
        command: SnapshotCommand,
    },
    /// Show and hide the volume
    Frontend {
        #[command(subcommand)]
        command: FrontendCommand,
    },
    /// Make the volume larger
    Expand {
        /// Bytes, or with a unit
        #[arg(long, value_parser = lh_block::parse_size)]
        size: u64,
    },
    /// Print versions, as JSON
    Version {
        /// This program's alone
        #[arg(long)]
        client_only: bool,
    },
}

/// The commands below `frontend`.
#[derive(Debug, Subcommand)]
pub(super) enum FrontendCommand {
    /// Show the volume again
    Start {
        /// The one that the engine was started with; tgt-blockdev: any that makes a device, tgt-iscsi: a target
        frontend: String,
    },
    /// Hide the volume, unless its device is in use
    Shutdown,
}

/// The commands below `snapshot`.
#[derive(Debug, Subcommand)]
pub(super) enum SnapshotCommand {
    /// Take a snapshot and print its name
    Create {
        /// A label, KEY=VALUE; may be given again
        #[arg(long = "label", value_parser = label, value_name = "KEY=VALUE")]
        labels: Vec<(String, String)>,
        /// Freeze the file system first
        #[arg(long = "freeze-fs")]
        freeze: bool,
        /// Its name; a new one is made up without it
        name: Option<String>,
    },
    /// Make the volume's bytes those of a snapshot
    Revert {
        /// Its name
        name: String,
    },
    /// List snapshots
    Ls,
    /// Mark snapshots as removed
    Rm {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Fold removed snapshots away
    Purge {
        /// Accepted as Longhorn's; a purge that runs is not begun twice anyway
        #[arg(long)]
        skip_if_in_progress: bool,
        /// Wait until it is done
        #[arg(long)]
        wait: bool,
    },
    /// How far the purge is, as JSON
    PurgeStatus,
    /// Snapshots with all that is known of them, as JSON
    Info,
    /// Fill this volume, which is empty and not shown, from a snapshot of another one
    Clone {
        /// Name of the snapshot
        #[arg(long, value_name = "NAME")]
        snapshot_name: String,
        /// The control socket of the other volume's engine: unix:PATH
        #[arg(long, value_name = "URL")]
        from_controller_address: String,
        /// Refuse an engine of another volume than this
        #[arg(long, default_value = "", value_name = "NAME")]
        from_volume_name: String,
        /// Refuse another engine than this
        #[arg(long, default_value = "", value_name = "NAME")]
        from_controller_instance_name: String,
        /// Accepted as Longhorn's; what a backing file holds is always copied
        #[arg(long)]
        export_backing_image_if_exist: bool,
        /// Accepted as Longhorn's, without effect
        #[arg(long, default_value_t = 5, value_name = "SECONDS")]
        file_sync_http_client_timeout: u32,
        /// Accepted as Longhorn's, without effect
        #[arg(long, default_value_t = 0, value_name = "SECONDS")]
        grpc_timeout_seconds: u64,
    },
    /// How far a clone is, as JSON
    CloneStatus,
}

/// Says to each call which engine it is meant for, as Longhorn's clients do.
#[derive(Clone)]
struct Meant {
    volume: String,
    instance: String,
}

impl tonic::service::Interceptor for Meant {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        for (key, value) in [("volume-name", &self.volume), ("instance-name", &self.instance)] {
            if !value.is_empty() {
                let value =
                    value.parse().map_err(|_| Status::invalid_argument(format!("{value:?} is no name")))?;
                request.metadata_mut().insert(key, value);
            }
        }
        Ok(request)
    }
}

type Engine = ControllerServiceClient<InterceptedService<Channel, Meant>>;
type Operations = VolumeOperationsClient<InterceptedService<Channel, Meant>>;

struct Line {
    engine: Engine,
    operations: Operations,
}

/// Carries the command out.
pub(super) fn run(target: &Target, command: EngineCommand) -> Result<()> {
    if let EngineCommand::Version { client_only: true } = command {
        return show::print_json(&show::Versions { client: show::client_version(), server: None });
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { Line::connect(target).await?.carry_out(command).await })
}

impl Line {
    async fn connect(target: &Target) -> Result<Self> {
        let Some(url) = &target.url else {
            bail!("where is the engine? name its control socket: --url unix:ROOT/run/VOLUME-e-0.grpc.sock");
        };
        let path = unix_address(url).map_err(|e| anyhow!(e))?;
        let channel =
            control::transport::connect(&path).await.with_context(|| format!("no engine at {url}"))?;
        let meant = Meant { volume: target.volume.clone(), instance: target.instance.clone() };
        Ok(Self {
            engine: ControllerServiceClient::with_interceptor(channel.clone(), meant.clone()),
            operations: VolumeOperationsClient::with_interceptor(channel, meant),
        })
    }

    async fn carry_out(mut self, command: EngineCommand) -> Result<()> {
        match command {
            EngineCommand::Info => {
                let volume = self.engine.volume_get(()).await?.into_inner();
                show::print_json(&show::Info::from(volume))
            }
            EngineCommand::Ls => self.list().await,
            EngineCommand::Add { address } => {
                let request = ptypes::ControllerReplicaCreateRequest {
                    address,
                    snapshot_required: true,
                    mode: ptypes::ReplicaMode::Wo.into(),
                };
                self.engine.controller_replica_create(request).await?;
                Ok(())
            }
            EngineCommand::Rm { address } => {
                let request = ptypes::ReplicaAddress { address, ..Default::default() };
                self.engine.replica_delete(request).await?;
                Ok(())
            }
            EngineCommand::ReplicaRebuildStatus => show::print_json(&show::rebuilds(&self.replicas().await?)),
            EngineCommand::Snapshot { command } => self.snapshot(command).await,
            EngineCommand::Frontend { command: FrontendCommand::Start { frontend } } => {
                let request = ptypes::VolumeFrontendStartRequest { frontend };
                self.engine.volume_frontend_start(request).await?;
                Ok(())
            }
            EngineCommand::Frontend { command: FrontendCommand::Shutdown } => {
                self.engine.volume_frontend_shutdown(()).await?;
                Ok(())
            }
            EngineCommand::Expand { size } => {
                let size = i64::try_from(size)?;
                self.engine.volume_expand(ptypes::VolumeExpandRequest { size }).await?;
                Ok(())
            }
            EngineCommand::Version { .. } => {
                let version = self.engine.version_detail_get(()).await?.into_inner().version;
                let server = version.as_ref().map(show::Version::from);
                show::print_json(&show::Versions { client: show::client_version(), server })
            }
        }
    }

    async fn replicas(&mut self) -> Result<Vec<ptypes::ControllerReplica>> {
        Ok(self.engine.replica_list(()).await?.into_inner().replicas)
    }

    /// The chain of a replica, from its own process; file names, the head first.
    async fn replica(&self, address: &str) -> Result<ptypes::Replica> {
        let data = unix_address(address).map_err(|e| anyhow!(e))?;
        let channel = control::transport::connect(&control_socket(&data)).await?;
        let answer = ReplicaServiceClient::new(channel).replica_get(()).await?.into_inner();
        answer.replica.context("the replica says nothing of itself")
    }

    async fn list(&mut self) -> Result<()> {
        let mut rows = Vec::new();
        for replica in self.replicas().await? {
            let mode = replica.mode();
            let address = replica.address.unwrap_or_default().address;
            let chain = match mode {
                ptypes::ReplicaMode::Err => String::new(),
                _ => self.replica(&address).await.map(|r| show::go_list(&r.chain)).unwrap_or_default(),
            };
            rows.push([address, mode.as_str_name().to_owned(), chain]);
        }
        show::print_columns(&["ADDRESS", "MODE", "CHAIN"], &rows)
    }

    /// What the first replica in sync says.
    async fn any_replica(&mut self) -> Result<ptypes::Replica> {
        let replicas = self.replicas().await?;
        let in_sync = replicas.into_iter().find(|r| r.mode() == ptypes::ReplicaMode::Rw);
        let Some(address) = in_sync.and_then(|r| r.address) else { bail!("no replica is in sync") };
        self.replica(&address.address).await
    }

    async fn snapshot(&mut self, command: SnapshotCommand) -> Result<()> {
        match command {
            SnapshotCommand::Create { labels, freeze, name } => {
                let request = ptypes::VolumeSnapshotRequest {
                    name: name.unwrap_or_default(),
                    labels: labels.into_iter().collect(),
                    freeze_filesystem: freeze,
                };
                let name = self.engine.volume_snapshot(request).await?.into_inner().name;
                show::print_line(&name)
            }
            SnapshotCommand::Revert { name } => {
                self.engine.volume_revert(ptypes::VolumeRevertRequest { name }).await?;
                Ok(())
            }
            SnapshotCommand::Ls => {
                let snapshots = show::snapshots(&self.any_replica().await?);
                let names = snapshots.values().filter(|s| s.is_listed()).map(|s| [s.name.clone()]);
                show::print_columns(&["ID"], &names.collect::<Vec<_>>())
            }
            SnapshotCommand::Rm { names } => {
                for name in names {
                    self.operations.snapshot_remove(SnapshotName { name }).await?;
                }
                Ok(())
            }
            SnapshotCommand::Purge { wait, .. } => {
                self.operations.snapshot_purge(()).await?;
                if wait { self.wait_for_purge().await } else { Ok(()) }
            }
            SnapshotCommand::PurgeStatus => {
                let status = self.operations.snapshot_purge_status(()).await?.into_inner();
                show::print_json(&show::purges(&status))
            }
            SnapshotCommand::Info => show::print_json(&show::snapshots(&self.any_replica().await?)),
            SnapshotCommand::Clone {
                snapshot_name,
                from_controller_address,
                from_volume_name,
                from_controller_instance_name,
                ..
            } => {
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
            SnapshotCommand::CloneStatus => {
                let list = self.engine.replica_list(()).await?.into_inner();
                let state = self.operations.snapshot_clone_status(()).await?.into_inner();
                show::print_json(&show::clones(&clone_statuses(&list, &state)))
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
}

/// The control socket of the replica with this data socket: both are named after it.
fn control_socket(data: &Path) -> PathBuf {
    data.with_extension("grpc.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replicas_control_socket_is_beside_its_data_socket() {
        assert_eq!(control_socket(Path::new("/r/run/v-r-1.sock")), Path::new("/r/run/v-r-1.grpc.sock"));
    }

    #[test]
    fn labels_have_a_key() {
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(label("=b").is_err() && label("ab").is_err());
    }
}
