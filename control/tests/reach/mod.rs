//! The way to a server that was just started.

use std::path::Path;
use std::time::Duration;

use control::transport::connect;
use tonic::transport::Channel;

/// Waits for a server that was just started.
pub(crate) async fn reach(socket: &Path) -> Channel {
    for _ in 0..2000 {
        if let Ok(channel) = connect(socket).await {
            return channel;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("nobody listens on {}", socket.display())
}
