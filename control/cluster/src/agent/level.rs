//! At which level a node's processes log: told to its instance manager, which tells them, and to its CSI driver.

use std::path::Path;

use control::logging::{Level, word};
use control::proto::imrpc::instance_service_client::InstanceServiceClient;
use control::proto::imrpc::{DataEngine, LogSetLevelRequest};
use control::proto::process::LogLevel;
use control::proto::process::logging_client::LoggingClient;
use control::transport::connect;
use tonic::{Code, Response, Status};

use super::{AgentError, refusal};

/// Tells the instance manager that serves at this socket.
pub(super) async fn tell_manager(socket: &Path, level: Level) -> Result<(), AgentError> {
    let channel = connect(socket).await;
    let channel = channel.map_err(|e| AgentError::Away(format!("{}: {e}", socket.display())))?;
    let request = LogSetLevelRequest { data_engine: DataEngine::V1.into(), level: word(level).to_owned() };
    heard(InstanceServiceClient::new(channel).log_set_level(request).await)
}

/// Tells the CSI driver that serves at this socket.
pub(super) async fn tell_driver(socket: &Path, level: Level) -> Result<(), AgentError> {
    let channel = connect(socket).await;
    let channel = channel.map_err(|e| AgentError::DriverAway(format!("{}: {e}", socket.display())))?;
    heard(LoggingClient::new(channel).level_set(LogLevel { level: word(level).to_owned() }).await)
}

/// An older program knows of no such call, and goes on as it is.
fn heard(answer: Result<Response<()>, Status>) -> Result<(), AgentError> {
    match answer {
        Err(status) if status.code() != Code::Unimplemented => Err(refusal(&status)),
        Ok(_) | Err(_) => Ok(()),
    }
}
