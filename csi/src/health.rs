//! Whether the driver's socket answers, for the kubelet's probes, which speak HTTP.
//!
//! Asked is the socket itself, from outside: a driver whose socket was taken over or removed is as useless as a dead one.
//! The API server does not count: another process would not reach it either.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use axum::serve::Listener;
use control::transport::{bind_everywhere, connect};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::DRIVER;
use crate::proto::csi::GetPluginInfoRequest;
use crate::proto::csi::identity_client::IdentityClient;

/// Where it is asked.
const PATH: &str = "/healthz";

/// A driver that takes longer than this to say its name is not well. The kubelet waits 3 s (`deploy/csi.yaml`).
const PATIENCE: Duration = Duration::from_secs(2);

/// Connections at once. The kubelet makes one for each probe. Whoever else reaches the port may make as many as he likes and say
/// nothing, and would leave the driver no descriptor.
const CONNECTIONS: usize = 64;

/// Answers probes on this port of every address, for as long as it is polled.
///
/// # Errors
/// The port cannot be had.
pub(crate) async fn serve(port: u16, socket: PathBuf) -> io::Result<()> {
    answer(bind_everywhere(port).await?, socket).await
}

async fn answer(listener: TcpListener, socket: PathBuf) -> io::Result<()> {
    let listener = Few { listener, here: VecDeque::new() };
    let socket = Arc::new(socket);
    let probe = get(move || {
        let socket = Arc::clone(&socket);
        async move {
            match tokio::time::timeout(PATIENCE, ask(&socket)).await {
                Ok(Ok(())) => (StatusCode::OK, "ok\n".to_owned()),
                Ok(Err(e)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{}: {e}\n", socket.display())),
                Err(_) => (StatusCode::SERVICE_UNAVAILABLE, format!("{} is silent\n", socket.display())),
            }
        }
    });
    axum::serve(listener, Router::new().route(PATH, probe)).await
}

async fn ask(socket: &Path) -> Result<(), String> {
    let channel = connect(socket).await.map_err(|e| e.to_string())?;
    let answer = IdentityClient::new(channel).get_plugin_info(GetPluginInfoRequest {}).await;
    match answer.map_err(|e| e.message().to_owned())?.into_inner().name {
        name if name == DRIVER => Ok(()),
        other => Err(format!("{other} answers there")),
    }
}

/// Takes connections, of which there are so many at most: the oldest ends for the next one.
struct Few {
    listener: TcpListener,
    /// Each connection ends when its own is dropped.
    here: VecDeque<oneshot::Sender<Infallible>>,
}

impl Listener for Few {
    type Io = Probe;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Probe, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.listener).await;
        self.here.retain(|one| !one.is_closed());
        if self.here.len() >= CONNECTIONS {
            self.here.pop_front();
        }
        let (stays, ended) = oneshot::channel();
        self.here.push_back(stays);
        (Probe { stream, ended }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that ends where there is no room for it any more.
struct Probe {
    stream: TcpStream,
    ended: oneshot::Receiver<Infallible>,
}

impl AsyncRead for Probe {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let probe = self.get_mut();
        if probe.ended.is_terminated() || Pin::new(&mut probe.ended).poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut probe.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Probe {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn who_connects_and_says_nothing_takes_no_room_from_probes() {
        let listener = bind_everywhere(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let nowhere = tempfile::tempdir().unwrap().path().join("csi.sock");
        tokio::spawn(answer(listener, nowhere));
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS * 3 {
            silent.push(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap());
        }
        let mut asks = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        asks.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        asks.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        let ended = tokio::time::timeout(Duration::from_secs(20), silent[0].read(&mut [0])).await;
        assert!(matches!(ended, Ok(Ok(0))), "{ended:?}");
    }
}
