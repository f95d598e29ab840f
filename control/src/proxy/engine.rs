//! Engines of this root by their names, each with a channel that is kept and connects again by itself.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lh_block::check_process_name;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::host::Root;
use crate::proto::imrpc::{BackendStoreDriver, DataEngine, ProxyEngineRequest};
use crate::proto::ptypes;
use crate::proto::ptypes::controller_service_client::ControllerServiceClient;
use crate::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use crate::proto::volume::volume_operations_client::VolumeOperationsClient;
use crate::transport::connect_lazily;

/// How long an engine may take for an ordinary answer: Longhorn's limit.
const USUAL: Duration = Duration::from_secs(3 * 60);

/// How long it may take for what moves data: Longhorn's limit.
pub(super) const LONG: Duration = Duration::from_secs(24 * 60 * 60);

/// Channels that are kept. A node runs some hundred processes; beyond that the channels of those that are gone are in
/// the way, and all are dropped together and made again when they are wanted.
const CHANNELS_MAX: usize = 2048;

/// Tells the process to which the root's manager has given a port.
pub(super) struct AtPort(pub(super) Box<dyn Fn(u16) -> Option<String> + Send + Sync>);

impl std::fmt::Debug for AtPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AtPort")
    }
}

/// The engines of a root, and their replicas.
#[derive(Debug)]
pub(super) struct Engines {
    root: Root,
    at_port: AtPort,
    channels: Mutex<BTreeMap<PathBuf, Channel>>,
}

impl Engines {
    pub(super) fn new(root: Root, at_port: AtPort) -> Self {
        Self { root, at_port, channels: Mutex::default() }
    }

    /// The engine that a request names: by its name, or, where it has none, by the path of its control socket, or by the port that it was
    /// given: Longhorn's clients ask for an engine's version by its address alone.
    pub(super) fn find(&self, request: &ProxyEngineRequest) -> Result<Engine, Status> {
        let v1 = request.backend_store_driver == i32::from(BackendStoreDriver::V1)
            && request.data_engine == i32::from(DataEngine::V1);
        if !v1 {
            return Err(Status::unimplemented(
                "unsupported data engine DATA_ENGINE_V2: this instance manager runs version 1 only",
            ));
        }
        let socket = if request.engine_name.is_empty() {
            self.by_address(&request.address)?
        } else {
            self.by_name("engine", &request.engine_name)?
        };
        Ok(Engine {
            channel: self.channel(&socket),
            volume: request.volume_name.clone(),
            instance: request.engine_name.clone(),
            socket,
            limit: USUAL,
        })
    }

    /// A call of the service for the files of a replica of this node.
    pub(super) async fn files<T, R, F>(
        &self,
        engine: &Engine,
        replica: &ptypes::ReplicaAddress,
        message: T,
        call: impl FnOnce(SyncAgentServiceClient<Channel>, Request<T>) -> F,
    ) -> Result<R, Status>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let name = &replica.instance_name;
        let socket = self.by_name("replica", name)?;
        let request = request(message, &engine.volume, name, USUAL)?;
        let answer = call(SyncAgentServiceClient::new(self.channel(&socket)), request).await;
        answer.map(Response::into_inner).map_err(|e| reached(e, "replica", &socket))
    }

    fn by_name(&self, what: &'static str, name: &str) -> Result<PathBuf, Status> {
        check_process_name(what, name).map_err(|e| Status::invalid_argument(e.to_string()))?;
        Ok(self.root.control_socket(name))
    }

    fn by_address(&self, address: &str) -> Result<PathBuf, Status> {
        let path = address.strip_prefix("unix://").or_else(|| address.strip_prefix("unix:")).map(Path::new);
        let ours = self.root.manager_socket();
        let found = match path {
            Some(path) if path.parent() == ours.parent() && path.file_name().is_some() => {
                Some(path.to_owned())
            }
            Some(_) => None,
            None => self.by_port(address).map(|name| self.root.control_socket(&name)),
        };
        found.ok_or_else(|| {
            Status::invalid_argument(format!(
                "{address:?} is no control socket of this node's engines, and has no port of theirs: name the engine by engine_name"
            ))
        })
    }

    /// Nothing is opened at the address: whose port that is answers at its socket.
    fn by_port(&self, address: &str) -> Option<String> {
        let (_, port) = address.rsplit_once(':')?;
        (self.at_port.0)(port.parse().ok()?)
    }

    fn channel(&self, socket: &Path) -> Channel {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if channels.len() >= CHANNELS_MAX && !channels.contains_key(socket) {
            channels.clear();
        }
        channels.entry(socket.to_owned()).or_insert_with(|| connect_lazily(socket)).clone()
    }
}

/// One engine, for one request.
#[derive(Debug)]
pub(super) struct Engine {
    channel: Channel,
    volume: String,
    instance: String,
    socket: PathBuf,
    limit: Duration,
}

impl Engine {
    /// Its control socket.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The same engine, which may take so long.
    pub(super) fn waiting(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// A call of Longhorn's service.
    pub(super) async fn ask<T, R, F>(
        &self,
        message: T,
        call: impl FnOnce(ControllerServiceClient<Channel>, Request<T>) -> F,
    ) -> Result<R, Status>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let request = request(message, &self.volume, &self.instance, self.limit)?;
        let answer = call(ControllerServiceClient::new(self.channel.clone()), request).await;
        answer.map(Response::into_inner).map_err(|e| reached(e, "engine", &self.socket))
    }

    /// A call of this project's own service.
    pub(super) async fn operate<T, R, F>(
        &self,
        message: T,
        call: impl FnOnce(VolumeOperationsClient<Channel>, Request<T>) -> F,
    ) -> Result<R, Status>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let request = request(message, &self.volume, &self.instance, self.limit)?;
        let answer = call(VolumeOperationsClient::new(self.channel.clone()), request).await;
        answer.map(Response::into_inner).map_err(|e| reached(e, "engine", &self.socket))
    }
}

/// A request that carries the names of whom it is meant for.
fn request<T>(message: T, volume: &str, instance: &str, limit: Duration) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    for (key, name) in [("volume-name", volume), ("instance-name", instance)] {
        if name.is_empty() {
            continue;
        }
        let value: AsciiMetadataValue =
            name.parse().map_err(|_| Status::invalid_argument(format!("{name:?} is not a name in ASCII")))?;
        request.metadata_mut().insert(key, value);
    }
    request.set_timeout(limit);
    Ok(request)
}

/// An error of the connection in words; what the other side said stays as it is.
fn reached(status: Status, what: impl Display, socket: &Path) -> Status {
    let Some(source) = std::error::Error::source(&status) else { return status };
    if !matches!(status.code(), Code::Unavailable | Code::Unknown) {
        return status;
    }
    // The transport's own words say little; the system's are at the end of the chain.
    let mut cause = source;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    Status::unavailable(format!("the {what} cannot be reached at {}: {cause}", socket.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(request: &ProxyEngineRequest) -> Result<Engine, Status> {
        Engines::new(Root::at(Path::new("/var/lib/longhorn")).unwrap(), AtPort(Box::new(|_| None)))
            .find(request)
    }

    #[tokio::test]
    async fn only_sockets_of_this_root_are_opened() {
        let named = |name: &str| ProxyEngineRequest {
            engine_name: name.into(),
            address: "10.0.0.1:10000".into(),
            ..Default::default()
        };
        let engine = find(&named("demo-e-0")).unwrap();
        assert_eq!(engine.socket, Path::new("/var/lib/longhorn/run/demo-e-0.grpc.sock"));
        for name in ["../../etc/x", "a/b", "."] {
            assert_eq!(find(&named(name)).unwrap_err().code(), Code::InvalidArgument, "{name}");
        }
        let at = |address: &str| ProxyEngineRequest { address: address.into(), ..Default::default() };
        assert!(find(&at("unix:/var/lib/longhorn/run/demo-e-0.grpc.sock")).is_ok());
        for address in [
            "",
            "10.0.0.1:10000",
            "tcp://10.0.0.1:10000",
            "unix:/run/docker.sock",
            "unix:/var/lib/longhorn/run/../../../../run/docker.sock",
            "unix:/var/lib/longhorn/run/..",
            "unix:run/x.sock",
        ] {
            assert_eq!(find(&at(address)).unwrap_err().code(), Code::InvalidArgument, "{address}");
        }
    }

    #[tokio::test]
    async fn a_channel_is_kept_and_their_number_bounded() {
        let engines =
            Engines::new(Root::at(Path::new("/var/lib/longhorn")).unwrap(), AtPort(Box::new(|_| None)));
        for i in 0..CHANNELS_MAX * 2 {
            engines.channel(Path::new(&format!("/x/{i}")));
            engines.channel(Path::new(&format!("/x/{i}")));
        }
        assert_eq!(engines.channels.lock().unwrap().len(), CHANNELS_MAX);
    }
}
