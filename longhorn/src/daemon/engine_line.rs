//! Longhorn's engine command line (`longhorn info`, `ls`, `snapshot ...`), with its flags and its output, for scripts that
//! were written for it. People use `longhornctl`.
//!
//! An operation that Longhorn's program carries out replica by replica is one call of the engine here.

mod elsewhere;
mod members;
mod show;
mod snapshots;
mod words;

use std::convert::Infallible;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use control::host::control_socket_beside;
use control::proto::ptypes;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::volume::volume_operations_client::VolumeOperationsClient;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::as_longhorn::wrong;
use crate::arguments::unix_address;
use crate::sentence::sentence;
use crate::tell::tell;
use crate::waiting::tell_waits;
use words::FrontendCommand;
pub(super) use words::{EngineCommand, Target};

/// How often what is waited for is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// How long a command may take before it is told what it waits for, and between two looks at that.
const SILENCE: Duration = Duration::from_secs(5);

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

/// Carries the command out.
pub(super) fn run(target: &Target, command: EngineCommand) -> Result<()> {
    match command {
        EngineCommand::Version { client_only: true } => {
            show::print_json(&show::Versions { client: show::client_version(), server: None })
        }
        EngineCommand::Elsewhere(word) => word.refuse(),
        EngineCommand::UnmapMarkSnapChainRemoved { enable, disable } if enable == disable => {
            wrong("unmap-mark-snap-chain-removed", "give one of --enable and --disable");
        }
        EngineCommand::Add(args) if args.restore => {
            wrong(
                "add",
                "--restore is Longhorn's: backups are not built yet, so that no volume is filled from one",
            );
        }
        command => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let done = runtime.block_on(async {
                let line = Line::connect(target).await?;
                let waits = tell_late_waits(line.engine.clone());
                tokio::select! { done = line.carry_out(command) => done, never = waits => match never {} }
            });
            done.map_err(|e| {
                if is_broken_off(target, &e) { anyhow!("{}; {WANTS_CERTIFICATES}", sentence(&e)) } else { e }
            })
        }
    }
}

/// What a command that takes long waits for, on standard error.
async fn tell_late_waits(mut engine: Engine) -> Infallible {
    tokio::time::sleep(SILENCE).await;
    let look = async || Some(engine.volume_get(()).await.ok()?.into_inner());
    tell_waits(SILENCE, look, |what| tell!("{what}")).await
}

struct Line {
    engine: Engine,
    operations: Operations,
    /// What a replica is told: which volume's it should be.
    volume: String,
}

impl Line {
    async fn connect(target: &Target) -> Result<Self> {
        let meant = Meant { volume: target.volume.clone(), instance: target.instance.clone() };
        let channel = match target.url.as_deref().filter(|url| !url.is_empty()) {
            Some(url) => reach(url).await?,
            // Longhorn's own place, for lines that were written for it.
            None => reach(LONGHORNS_URL).await.context(
                "where is the engine? name its control socket: --url unix:ROOT/run/VOLUME-e-0.grpc.sock",
            )?,
        };
        Ok(Self {
            engine: ControllerServiceClient::with_interceptor(channel.clone(), meant.clone()),
            operations: VolumeOperationsClient::with_interceptor(channel, meant),
            volume: target.volume.clone(),
        })
    }

    async fn carry_out(mut self, command: EngineCommand) -> Result<()> {
        match command {
            EngineCommand::Info => {
                let volume = self.engine.volume_get(()).await?.into_inner();
                show::print_json(&show::Info::from(volume))
            }
            EngineCommand::Ls => self.list().await,
            EngineCommand::Add(args) => self.add(args).await,
            EngineCommand::Rm { replica } => self.remove(&replica).await,
            EngineCommand::Update { mode, replica } => self.update(&replica, mode).await,
            EngineCommand::VerifyRebuildReplica { replica_instance_name, replica } => {
                self.verify_rebuild(&replica, replica_instance_name).await
            }
            EngineCommand::ReplicaRebuildStatus => show::print_json(&show::rebuilds(&self.replicas().await?)),
            EngineCommand::Snapshot { command } => self.snapshot(command).await,
            EngineCommand::Hash(command) => self.hash(command).await,
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
            EngineCommand::UnmapMarkSnapChainRemoved { enable: enabled, .. } => {
                let request = ptypes::VolumeUnmapMarkSnapChainRemovedSetRequest { enabled };
                self.engine.volume_unmap_mark_snap_chain_removed_set(request).await?;
                Ok(())
            }
            EngineCommand::Version { .. } => {
                let version = self.engine.version_detail_get(()).await?.into_inner().version;
                let server = version.as_ref().map(show::Version::from);
                show::print_json(&show::Versions { client: show::client_version(), server })
            }
            EngineCommand::Elsewhere(word) => word.refuse(),
        }
    }

    async fn replicas(&mut self) -> Result<Vec<ptypes::ControllerReplica>> {
        Ok(self.engine.replica_list(()).await?.into_inner().replicas)
    }

    /// What is asked of a replica itself, at its own control socket; `address` is that of its data.
    async fn at_replica(&self, address: &str) -> Result<InterceptedService<Channel, Meant>> {
        let Ok(data) = unix_address(address) else {
            bail!("it may be on another host: a replica is asked itself where it is a unix socket");
        };
        let meant = Meant { volume: self.volume.clone(), instance: String::new() };
        Ok(InterceptedService::new(control::transport::connect(&control_socket_beside(&data)).await?, meant))
    }
}

/// Where Longhorn's engines listen, and its command line looks.
const LONGHORNS_URL: &str = "http://localhost:9501";

/// What an address that ends a connection without a word, or says nothing, may be.
const WANTS_CERTIFICATES: &str = "or it is an engine that wants certificates, or one whose host is gone: ask it at its control socket, on \
    its own host: --url unix:PATH";

/// True of an address on TCP that hears nobody.
fn is_broken_off(target: &Target, e: &anyhow::Error) -> bool {
    let is_on_tcp = target.url.as_deref().is_none_or(|url| !url.starts_with("unix:"));
    let mut causes = e.chain().filter_map(|cause| cause.downcast_ref::<Status>());
    is_on_tcp && causes.any(control::transport::is_gone)
}

/// The engine at a unix socket, or on TCP without encryption, as Longhorn's command line has it.
async fn reach(url: &str) -> Result<Channel> {
    let nobody = || format!("no engine at {url}");
    if url.starts_with("unix:") {
        let path = unix_address(url).map_err(|e| anyhow!(e))?;
        return control::transport::connect(&path).await.with_context(nobody);
    }
    if url.starts_with("https:") {
        bail!(
            "certificates are not shown here: ask the engine at its control socket, on its own host: --url unix:PATH"
        );
    }
    let address =
        ["http://", "tcp://", "tcp:"].iter().find_map(|scheme| url.strip_prefix(scheme)).unwrap_or(url);
    if !address.contains(':') {
        bail!("{url:?} is neither unix:PATH nor ADDRESS:PORT");
    }
    control::transport::connect_in_the_open(address).await.with_context(nobody)
}

/// An address as the engine has it: Longhorn writes `tcp://ADDRESS:PORT`.
fn as_listed(address: &str) -> String {
    address.strip_prefix("tcp://").map_or_else(|| address.to_owned(), |rest| format!("tcp:{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::label;

    #[test]
    fn an_address_may_be_spelt_as_longhorn_does() {
        assert_eq!(as_listed("tcp://10.0.0.1:10000"), "tcp:10.0.0.1:10000");
        assert_eq!(as_listed("unix:/r/1.sock"), "unix:/r/1.sock");
    }

    #[test]
    fn labels_have_a_key() {
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(label("=b").is_err() && label("ab").is_err());
    }
}
