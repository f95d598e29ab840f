//! Longhorn's `InstanceService` over the manager's processes. An instance is a process under the same name; what only
//! version 2 of Longhorn's data engine (SPDK) can do is refused.

use std::sync::Arc;

use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::registry::Registry;
use super::service::{STREAM_DEPTH, Streaming, check_signal, log_lines, version};
use crate::logging::{self, Level};
use crate::proto::imrpc;
use crate::proto::imrpc::disk_service_server::DiskService;
use crate::proto::imrpc::instance_service_server::InstanceService;
use crate::proto::imrpc::{BackendStoreDriver, DataEngine, LogResponse, VersionResponse};
use crate::unbuilt::unbuilt;

/// The service.
#[derive(Debug)]
pub(super) struct Instances {
    registry: Arc<Registry>,
}

impl Instances {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }
}

/// Refuses what is meant for version 2. Older clients name the engine by the driver of its store, newer ones by itself.
fn check_engine(driver: i32, engine: i32) -> Result<(), Status> {
    if driver == i32::from(BackendStoreDriver::V1) && engine == i32::from(DataEngine::V1) {
        return Ok(());
    }
    let name = DataEngine::try_from(engine).unwrap_or(DataEngine::V2).as_str_name();
    Err(Status::unimplemented(format!(
        "unsupported data engine {name}: this instance manager runs version 1 only"
    )))
}

fn process_spec(spec: imrpc::InstanceSpec, call: &str) -> Result<imrpc::ProcessSpec, Status> {
    check_engine(spec.backend_store_driver, spec.data_engine)?;
    let process = spec
        .process_instance_spec
        .ok_or_else(|| Status::invalid_argument(format!("{call} needs a process_instance_spec")))?;
    Ok(imrpc::ProcessSpec {
        name: spec.name,
        binary: process.binary,
        args: process.args,
        port_count: spec.port_count,
        port_args: spec.port_args,
    })
}

/// "engine" or "replica", by the command that the process runs; empty for anything else.
fn type_of(args: &[String]) -> &'static str {
    match args.first().map(String::as_str) {
        Some("controller") => "engine",
        Some("replica") => "replica",
        _ => "",
    }
}

/// A process as an instance.
fn instance(process: imrpc::ProcessResponse) -> imrpc::InstanceResponse {
    let (spec, status) = (process.spec.unwrap_or_default(), process.status.unwrap_or_default());
    imrpc::InstanceResponse {
        spec: Some(imrpc::InstanceSpec {
            name: spec.name,
            r#type: type_of(&spec.args).to_owned(),
            port_count: spec.port_count,
            port_args: spec.port_args,
            process_instance_spec: Some(imrpc::ProcessInstanceSpec { binary: spec.binary, args: spec.args }),
            ..Default::default()
        }),
        status: Some(imrpc::InstanceStatus {
            state: status.state,
            error_msg: status.error_msg,
            port_start: status.port_start,
            port_end: status.port_end,
            conditions: status.conditions,
            uuid: status.uuid,
            ..Default::default()
        }),
        deleted: process.deleted,
    }
}

#[tonic::async_trait]
impl InstanceService for Instances {
    type InstanceLogStream = Streaming<LogResponse>;
    type InstanceWatchStream = Streaming<()>;

    async fn instance_create(
        &self,
        request: Request<imrpc::InstanceCreateRequest>,
    ) -> Result<Response<imrpc::InstanceResponse>, Status> {
        let spec = request.into_inner().spec;
        let spec = spec.ok_or_else(|| Status::invalid_argument("InstanceCreate needs a spec"))?;
        let process = self.registry.create(&process_spec(spec, "InstanceCreate")?)?;
        Ok(Response::new(instance(process)))
    }

    async fn instance_delete(
        &self,
        request: Request<imrpc::InstanceDeleteRequest>,
    ) -> Result<Response<imrpc::InstanceResponse>, Status> {
        let request = request.into_inner();
        check_engine(request.backend_store_driver, request.data_engine)?;
        Ok(Response::new(instance(self.registry.delete(&request.name, &request.uuid)?)))
    }

    async fn instance_get(
        &self,
        request: Request<imrpc::InstanceGetRequest>,
    ) -> Result<Response<imrpc::InstanceResponse>, Status> {
        let request = request.into_inner();
        check_engine(request.backend_store_driver, request.data_engine)?;
        Ok(Response::new(instance(self.registry.get(&request.name)?)))
    }

    async fn instance_list(&self, _: Request<()>) -> Result<Response<imrpc::InstanceListResponse>, Status> {
        let all = self.registry.list().into_iter().map(|(name, process)| (name, instance(process)));
        Ok(Response::new(imrpc::InstanceListResponse { instances: all.collect() }))
    }

    async fn instance_log(
        &self,
        request: Request<imrpc::InstanceLogRequest>,
    ) -> Result<Response<Self::InstanceLogStream>, Status> {
        let request = request.into_inner();
        check_engine(request.backend_store_driver, request.data_engine)?;
        Ok(Response::new(log_lines(&self.registry, &request.name)?))
    }

    /// An empty message for each change: the client lists the instances then.
    async fn instance_watch(&self, _: Request<()>) -> Result<Response<Self::InstanceWatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(STREAM_DEPTH);
        let mut changes = self.registry.watch();
        tokio::spawn(async move {
            loop {
                let change = tokio::select! {
                    change = changes.recv() => change,
                    () = sender.closed() => return,
                };
                // Whoever fell behind hears of one change instead of many.
                let gone = matches!(change, Err(broadcast::error::RecvError::Closed));
                if gone || sender.send(Ok(())).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn instance_replace(
        &self,
        request: Request<imrpc::InstanceReplaceRequest>,
    ) -> Result<Response<imrpc::InstanceResponse>, Status> {
        let imrpc::InstanceReplaceRequest { spec, terminate_signal } = request.into_inner();
        let spec = spec.ok_or_else(|| Status::invalid_argument("InstanceReplace needs a spec"))?;
        let spec = process_spec(spec, "InstanceReplace")?;
        check_signal(&terminate_signal)?;
        Ok(Response::new(instance(self.registry.replace(&spec)?)))
    }

    /// Of the manager and of its root's processes, those that start later too, until the manager ends.
    async fn log_set_level(
        &self,
        request: Request<imrpc::LogSetLevelRequest>,
    ) -> Result<Response<()>, Status> {
        let request = request.into_inner();
        check_engine(BackendStoreDriver::V1.into(), request.data_engine)?;
        self.registry.levels().set(logging::asked_for(&request.level)?);
        Ok(Response::new(()))
    }

    async fn log_get_level(
        &self,
        request: Request<imrpc::LogGetLevelRequest>,
    ) -> Result<Response<imrpc::LogGetLevelResponse>, Status> {
        check_engine(BackendStoreDriver::V1.into(), request.into_inner().data_engine)?;
        let level = self.registry.levels().said().unwrap_or(Level::INFO);
        Ok(Response::new(imrpc::LogGetLevelResponse { level: logging::word(level).to_owned() }))
    }

    async fn version_get(&self, _: Request<()>) -> Result<Response<VersionResponse>, Status> {
        Ok(Response::new(version()))
    }

    unbuilt! {
        instance_suspend(imrpc::InstanceSuspendRequest) -> (),
            "InstanceSuspend is of version 2 of the data engine: this instance manager runs version 1 only";
        instance_resume(imrpc::InstanceResumeRequest) -> (),
            "InstanceResume is of version 2 of the data engine: this instance manager runs version 1 only";
        instance_switch_over_target(imrpc::InstanceSwitchOverTargetRequest) -> (),
            "InstanceSwitchOverTarget is of version 2 of the data engine: this instance manager runs version 1 only";
        instance_delete_target(imrpc::InstanceDeleteTargetRequest) -> (),
            "InstanceDeleteTarget is of version 2 of the data engine: this instance manager runs version 1 only";
        log_set_flags(imrpc::LogSetFlagsRequest) -> (),
            "LogSetFlags is of version 2 of the data engine: this instance manager runs version 1 only";
        log_get_flags(imrpc::LogGetFlagsRequest) -> imrpc::LogGetFlagsResponse,
            "LogGetFlags is of version 2 of the data engine: this instance manager runs version 1 only";
    }
}

/// Longhorn's service of block disks, all of which belong to version 2 of its data engine.
#[derive(Debug)]
pub(super) struct Disks;

#[tonic::async_trait]
impl DiskService for Disks {
    unbuilt! {
        disk_create(imrpc::DiskCreateRequest) -> imrpc::Disk,
            "DiskCreate is of version 2 of the data engine: version 1 keeps replicas in directories";
        disk_delete(imrpc::DiskDeleteRequest) -> (),
            "DiskDelete is of version 2 of the data engine: version 1 keeps replicas in directories";
        disk_get(imrpc::DiskGetRequest) -> imrpc::Disk,
            "DiskGet is of version 2 of the data engine: version 1 keeps replicas in directories";
        disk_health_get(imrpc::DiskHealthGetRequest) -> imrpc::DiskHealthGetResponse,
            "DiskHealthGet is of version 2 of the data engine: version 1 keeps replicas in directories";
        disk_replica_instance_list(imrpc::DiskReplicaInstanceListRequest) -> imrpc::DiskReplicaInstanceListResponse,
            "DiskReplicaInstanceList is of version 2 of the data engine: version 1 keeps replicas in directories";
        disk_replica_instance_delete(imrpc::DiskReplicaInstanceDeleteRequest) -> (),
            "DiskReplicaInstanceDelete is of version 2 of the data engine: version 1 keeps replicas in directories";
        metrics_get(imrpc::DiskGetRequest) -> imrpc::DiskMetricsGetReply,
            "MetricsGet of a disk is of version 2 of the data engine: version 1 keeps replicas in directories";
        version_get(()) -> imrpc::DiskVersionResponse,
            "VersionGet of disks is of version 2 of the data engine: version 1 keeps replicas in directories";
    }
}
