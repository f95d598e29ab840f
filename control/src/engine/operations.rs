//! The gRPC face of what a volume can be asked beyond Longhorn's `ControllerService`.

use std::path::PathBuf;
use std::sync::Arc;

use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

use super::{EngineControl, NewLimits, Operation, PurgeProgress, ScrubFinding, ScrubProgress, data_socket};
use crate::cloning::CloneSource;
use crate::proto::volume;
use crate::proto::volume::volume_operations_server::{VolumeOperations, VolumeOperationsServer};
use crate::transport::Identity;

/// The service over an engine.
pub(super) fn service(
    engine: Arc<dyn EngineControl>,
    identity: Identity,
) -> InterceptedService<VolumeOperationsServer<Service>, Identity> {
    VolumeOperationsServer::with_interceptor(Service { engine }, identity)
}

pub(super) struct Service {
    engine: Arc<dyn EngineControl>,
}

impl Service {
    async fn operate(&self, operation: Operation) -> Result<Response<()>, Status> {
        self.engine.operate(operation).await?;
        Ok(Response::new(()))
    }
}

fn finding(of: ScrubFinding) -> volume::ScrubFinding {
    let ScrubFinding { replica, layer, offset, length, flaw, done } = of;
    volume::ScrubFinding { replica, layer, offset, length, flaw: flaw.to_owned(), done: done.to_owned() }
}

fn scrub(scrub: ScrubProgress) -> volume::ScrubState {
    let ScrubProgress {
        running, repair, doing, done, total, bad_blocks, repaired_blocks, notes, error, ..
    } = scrub;
    let findings = scrub.findings.into_iter().map(finding).collect();
    volume::ScrubState {
        known: true,
        running,
        repair,
        doing,
        done,
        total,
        findings,
        bad_blocks,
        repaired_blocks,
        notes,
        error,
    }
}

fn progress(purge: PurgeProgress) -> volume::ReplicaPurge {
    let PurgeProgress { replica, running, snapshot, done, total, error, kept } = purge;
    let kept = kept.into_iter().map(|(snapshot, reason)| volume::KeptSnapshot { snapshot, reason }).collect();
    volume::ReplicaPurge { replica, running, snapshot, done, total, error, kept }
}

#[tonic::async_trait]
impl VolumeOperations for Service {
    async fn snapshot_list(&self, _: Request<()>) -> Result<Response<volume::Chain>, Status> {
        let chain = self.engine.chain().await?;
        if chain.is_empty() {
            let text = "no replica has told the snapshots yet: try again later";
            return Err(Status::unavailable(text));
        }
        Ok(Response::new(volume::Chain { layers: chain.into_iter().map(volume::Layer::from).collect() }))
    }

    async fn snapshot_remove(&self, request: Request<volume::SnapshotName>) -> Result<Response<()>, Status> {
        self.operate(Operation::RemoveSnapshot { name: request.into_inner().name }).await
    }

    async fn snapshot_purge(&self, _: Request<()>) -> Result<Response<()>, Status> {
        self.operate(Operation::Purge).await
    }

    async fn snapshot_purge_status(&self, _: Request<()>) -> Result<Response<volume::PurgeStatus>, Status> {
        let replicas = self.engine.purges().into_iter().map(progress).collect();
        Ok(Response::new(volume::PurgeStatus { replicas }))
    }

    async fn replica_add(&self, request: Request<volume::NamedReplica>) -> Result<Response<()>, Status> {
        let volume::NamedReplica { name, address } = request.into_inner();
        data_socket::check(&address)?;
        self.operate(Operation::AddReplica { name, address }).await
    }

    async fn replica_remove(&self, request: Request<volume::ReplicaName>) -> Result<Response<()>, Status> {
        self.operate(Operation::RemoveReplica { name: request.into_inner().name }).await
    }

    async fn replica_rebuild(&self, request: Request<volume::ReplicaName>) -> Result<Response<()>, Status> {
        self.operate(Operation::RebuildReplica { name: request.into_inner().name }).await
    }

    async fn rebuild_rate_set(&self, request: Request<volume::RebuildRate>) -> Result<Response<()>, Status> {
        let rebuild_rate = Some(request.into_inner().bytes_per_second);
        self.operate(Operation::SetLimits(NewLimits { rebuild_rate, ..NewLimits::default() })).await
    }

    async fn scrub(&self, request: Request<volume::ScrubRequest>) -> Result<Response<()>, Status> {
        let volume::ScrubRequest { repair, bytes_per_second } = request.into_inner();
        self.operate(Operation::Scrub { repair, bytes_per_second }).await
    }

    async fn scrub_status(&self, _: Request<()>) -> Result<Response<volume::ScrubState>, Status> {
        Ok(Response::new(self.engine.scrub().map(scrub).unwrap_or_default()))
    }

    async fn scrub_cancel(&self, _: Request<()>) -> Result<Response<()>, Status> {
        self.operate(Operation::CancelScrub).await
    }

    async fn snapshot_clone(&self, request: Request<volume::CloneSource>) -> Result<Response<()>, Status> {
        let volume::CloneSource { engine, volume, instance, snapshot } = request.into_inner();
        let Some(path) = engine.strip_prefix("unix:").map(PathBuf::from).filter(|path| path.is_absolute())
        else {
            let text =
                format!("{engine:?} is not unix:PATH, the control socket of the other volume's engine");
            return Err(Status::invalid_argument(text));
        };
        if snapshot.is_empty() {
            return Err(Status::invalid_argument("the snapshot's name is missing"));
        }
        self.engine.fill_from(CloneSource { engine: path, volume, instance, snapshot }).await?;
        Ok(Response::new(()))
    }

    async fn snapshot_clone_status(&self, _: Request<()>) -> Result<Response<volume::CloneState>, Status> {
        Ok(Response::new(self.engine.cloning().into()))
    }
}
