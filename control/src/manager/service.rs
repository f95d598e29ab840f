//! The manager's gRPC face.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{broadcast, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::log::Lines;
use super::ports::PortError;
use super::program::ProgramError;
use super::registry::{Registry, RegistryError};
use super::supervisor::REPLACE_SIGNAL_NAME;
use crate::proto::imrpc::process_manager_service_server::ProcessManagerService;
use crate::proto::imrpc::{
    LogRequest, LogResponse, ProcessCreateRequest, ProcessDeleteRequest, ProcessGetRequest,
    ProcessListRequest, ProcessListResponse, ProcessReplaceRequest, ProcessResponse, VersionResponse,
};

/// Version of the service that this manager speaks, and the oldest that it understands: Longhorn 1.12's numbers.
const API_VERSION: (i64, i64) = (6, 1);

/// The same of `ProxyEngineService`.
const PROXY_API_VERSION: (i64, i64) = (6, 1);

/// Messages on their way to a client that does not read.
pub(super) const STREAM_DEPTH: usize = 64;

/// The service.
#[derive(Debug)]
pub(super) struct Service {
    registry: Arc<Registry>,
}

impl Service {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }
}

impl From<RegistryError> for Status {
    fn from(e: RegistryError) -> Self {
        let text = e.to_string();
        match e {
            RegistryError::Name(_)
            | RegistryError::Reserved(_)
            | RegistryError::Program(ProgramError::Unusable { .. }) => Self::invalid_argument(text),
            RegistryError::Program(ProgramError::Foreign { .. } | ProgramError::Writable(_)) => {
                Self::permission_denied(text)
            }
            RegistryError::Exists(_) => Self::already_exists(text),
            RegistryError::Missing(_) => Self::not_found(text),
            RegistryError::Ports { source: PortError::Exhausted(_), .. } => Self::resource_exhausted(text),
            RegistryError::Ports { source: PortError::Count(_) | PortError::Arguments { .. }, .. }
            | RegistryError::OtherPorts { .. }
            | RegistryError::NoArguments(_) => Self::invalid_argument(text),
            RegistryError::Newer { .. } => Self::failed_precondition(text),
            RegistryError::Random(_) => Self::internal(text),
        }
    }
}

/// The answer to `VersionGet`.
pub(super) fn version() -> VersionResponse {
    let (current, oldest) = API_VERSION;
    let (proxy_current, proxy_oldest) = PROXY_API_VERSION;
    VersionResponse {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        git_commit: String::new(),
        build_date: String::new(),
        instance_manager_api_version: current,
        instance_manager_api_min_version: oldest,
        instance_manager_proxy_api_version: proxy_current,
        instance_manager_proxy_api_min_version: proxy_oldest,
    }
}

/// A process is replaced by the one signal that Longhorn knows for it.
pub(super) fn check_signal(signal: &str) -> Result<(), Status> {
    if signal == REPLACE_SIGNAL_NAME {
        return Ok(());
    }
    Err(Status::invalid_argument(format!(
        "doesn't support terminate signal {signal}: a process is replaced by {REPLACE_SIGNAL_NAME}"
    )))
}

/// The log of a process, line by line.
pub(super) fn log_lines(registry: &Registry, name: &str) -> Result<Streaming<LogResponse>, Status> {
    registry.get(name)?;
    let path = registry.root().log(name);
    let (sender, receiver) = mpsc::channel(STREAM_DEPTH);
    tokio::spawn(tell_lines(path, sender));
    Ok(Box::pin(ReceiverStream::new(receiver)))
}

/// Hands a log on as its client takes it. A client that does not keeps no thread: there are only so many, and processes are started by
/// them, too.
async fn tell_lines(path: PathBuf, sender: mpsc::Sender<Result<LogResponse, Status>>) {
    let mut log = Lines::of(&path);
    loop {
        let lines = match next_portion(log).await {
            Ok((_, lines)) if lines.is_empty() => return,
            Ok((rest, lines)) => {
                log = rest;
                lines
            }
            Err(e) => {
                // The client may be gone, too.
                let _ = sender.send(Err(unread(&path, &e))).await;
                return;
            }
        };
        for line in lines {
            if sender.send(Ok(LogResponse { line })).await.is_err() {
                return;
            }
        }
    }
}

/// Reads on, off the thread that watches everybody.
async fn next_portion(mut log: Lines) -> io::Result<(Lines, Vec<String>)> {
    let read = tokio::task::spawn_blocking(move || log.portion().map(|lines| (log, lines)));
    read.await.map_err(io::Error::other)?
}

fn unread(path: &Path, e: &io::Error) -> Status {
    Status::internal(format!("{}: {e}", path.display()))
}

/// An answer that goes on.
pub(super) type Streaming<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl ProcessManagerService for Service {
    type ProcessLogStream = Streaming<LogResponse>;
    type ProcessWatchStream = Streaming<ProcessResponse>;

    async fn process_create(
        &self,
        request: Request<ProcessCreateRequest>,
    ) -> Result<Response<ProcessResponse>, Status> {
        let spec = request.into_inner().spec;
        let spec = spec.ok_or_else(|| Status::invalid_argument("ProcessCreate needs a spec"))?;
        Ok(Response::new(self.registry.create(&spec)?))
    }

    async fn process_delete(
        &self,
        request: Request<ProcessDeleteRequest>,
    ) -> Result<Response<ProcessResponse>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.registry.delete(&request.name, &request.uuid)?))
    }

    async fn process_get(
        &self,
        request: Request<ProcessGetRequest>,
    ) -> Result<Response<ProcessResponse>, Status> {
        Ok(Response::new(self.registry.get(&request.into_inner().name)?))
    }

    async fn process_list(
        &self,
        _: Request<ProcessListRequest>,
    ) -> Result<Response<ProcessListResponse>, Status> {
        let processes = self.registry.list().into_iter().collect();
        Ok(Response::new(ProcessListResponse { processes }))
    }

    async fn process_log(
        &self,
        request: Request<LogRequest>,
    ) -> Result<Response<Self::ProcessLogStream>, Status> {
        Ok(Response::new(log_lines(&self.registry, &request.into_inner().name)?))
    }

    async fn process_watch(&self, _: Request<()>) -> Result<Response<Self::ProcessWatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(STREAM_DEPTH);
        let registry = self.registry.clone();
        let changes = registry.watch();
        tokio::spawn(tell_changes(registry, changes, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn process_replace(
        &self,
        request: Request<ProcessReplaceRequest>,
    ) -> Result<Response<ProcessResponse>, Status> {
        let ProcessReplaceRequest { spec, terminate_signal } = request.into_inner();
        let spec = spec.ok_or_else(|| Status::invalid_argument("ProcessReplace needs a spec"))?;
        check_signal(&terminate_signal)?;
        Ok(Response::new(self.registry.replace(&spec)?))
    }

    async fn version_get(&self, _: Request<()>) -> Result<Response<VersionResponse>, Status> {
        Ok(Response::new(version()))
    }
}

/// Hands every change on until the client goes. One that fell too far behind is told how all processes are now.
async fn tell_changes(
    registry: Arc<Registry>,
    mut changes: broadcast::Receiver<ProcessResponse>,
    sender: mpsc::Sender<Result<ProcessResponse, Status>>,
) {
    loop {
        let news = tokio::select! {
            change = changes.recv() => match change {
                Ok(change) => vec![change],
                Err(broadcast::error::RecvError::Lagged(_)) => registry.list().into_values().collect(),
                Err(broadcast::error::RecvError::Closed) => return,
            },
            () = sender.closed() => return,
        };
        for change in news {
            if sender.send(Ok(change)).await.is_err() {
                return;
            }
        }
    }
}
