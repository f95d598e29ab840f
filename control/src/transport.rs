//! gRPC over unix sockets: only root is heard, by `SO_PEERCRED`, before a byte of its request is read. And over TCP, for whom the
//! caller trusts.

mod guests;
mod heard;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::StreamExt;
use hyper_util::rt::TokioIo;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_stream::Stream;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Interceptor;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Request, Status};

use crate::host::make_socket_directory;

pub use guests::{Guests, Sign};
pub use heard::Heard;

/// Longest wait for a connection. Whether the server says anything on it is seen by the first call.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// How long a listener rests that could not take a connection: where no descriptor is left the next try would fail at once.
pub const BREATH: Duration = Duration::from_millis(100);

/// After how long of silence a client on TCP is asked whether it is there (RFC 9113, 6.7), and a server that it waits for. One whose host
/// has gone would keep its descriptor here for ever, or whoever waits for it.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// How long it may take to say so.
const KEEPALIVE_PATIENCE: Duration = Duration::from_secs(20);

/// Binds a socket that only its owner may open, in place of one that an earlier process left. The caller holds a lock
/// that keeps every other process from listening there.
///
/// # Errors
/// The path is too long for a socket, something else than a socket has it, or the directory may not be written.
pub fn bind_private(path: &Path) -> io::Result<UnixListener> {
    // Somebody's file is not to go for a path that was mistyped.
    if std::fs::symlink_metadata(path).is_ok_and(|there| !there.file_type().is_socket()) {
        let text = format!("{} is there and is no socket: choose another path", path.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    make_socket_directory(path)?;
    let listener = UnixListener::bind(path)
        .map_err(|e| io::Error::new(e.kind(), format!("unix:{}: {e}", path.display())))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Binds a TCP port of every address, of IPv4 alone where the host has no IPv6.
///
/// # Errors
/// The port is taken, or may not be had.
pub async fn bind_everywhere(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Err(e) if e.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await
        }
        bound => bound,
    }
}

/// The connections of root, or of the user that this process runs as; everybody else's are closed.
pub struct TrustedPeers {
    listener: UnixListener,
}

impl TrustedPeers {
    /// Connections to this listener.
    pub fn new(listener: UnixListener) -> Self {
        Self { listener }
    }

    /// The same, for a server of gRPC.
    pub fn heard(self) -> impl Stream<Item = io::Result<Heard>> {
        unhurried(self).map(|peer| peer.map(Heard::new))
    }
}

/// What a listener takes, with a rest after what it could not take.
fn unhurried<T>(taken: impl Stream<Item = io::Result<T>>) -> impl Stream<Item = io::Result<T>> {
    taken.then(async |taken| {
        if let Err(e) = &taken {
            tracing::warn!("a connection cannot be taken: {e}");
            tokio::time::sleep(BREATH).await;
        }
        taken
    })
}

/// Whoever connects to this port.
pub(crate) fn everybody(listener: TcpListener) -> impl Stream<Item = io::Result<TcpStream>> {
    unhurried(TcpListenerStream::new(listener))
}

/// A gRPC server on TCP.
pub(crate) fn tcp_server() -> Server {
    server_that_asks(KEEPALIVE, KEEPALIVE_PATIENCE)
}

fn server_that_asks(after: Duration, patience: Duration) -> Server {
    Server::builder().http2_keepalive_interval(Some(after)).http2_keepalive_timeout(Some(patience))
}

impl Stream for TrustedPeers {
    type Item = io::Result<UnixStream>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let (stream, _) = ready!(self.listener.poll_accept(cx))?;
            match stream.peer_cred() {
                Ok(peer) if is_trusted(peer.uid(), nix::unistd::geteuid().as_raw()) => {
                    return Poll::Ready(Some(Ok(stream)));
                }
                Ok(peer) => {
                    tracing::warn!(uid = peer.uid(), pid = peer.pid(), "connection refused: not root")
                }
                Err(e) => tracing::warn!(error = %e, "connection refused: its peer is unknown"),
            }
        }
    }
}

const fn is_trusted(peer: u32, own: u32) -> bool {
    peer == 0 || peer == own
}

/// Connects to a server on TCP, without encryption: `HOST:PORT`. Its answers may take as long as they do, while it says that it is
/// there.
///
/// # Errors
/// Nobody listens there, or it wants a certificate.
pub async fn connect_in_the_open(address: &str) -> io::Result<Channel> {
    client_that_asks(address, KEEPALIVE, KEEPALIVE_PATIENCE).await
}

async fn client_that_asks(address: &str, after: Duration, patience: Duration) -> io::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(io::Error::other)?;
    let endpoint = endpoint.http2_keep_alive_interval(after).keep_alive_timeout(patience);
    endpoint.connect_timeout(CONNECT_PATIENCE).connect().await.map_err(io::Error::other)
}

/// Connects to the server that listens on a unix socket.
///
/// # Errors
/// Nobody listens there (`NotFound`, `ConnectionRefused`), or the caller may not.
pub async fn connect(path: &Path) -> io::Result<Channel> {
    // Tried by hand first: the error of the transport does not tell a missing server from a mute one.
    drop(UnixStream::connect(path).await?);
    let (endpoint, connector) = (endpoint(), connector(path));
    endpoint.connect_with_connector(connector).await.map_err(io::Error::other)
}

/// Connects to the server that listens on a unix socket, for who blocks. Each read and each write takes `patience` at most, and so does
/// this: a server that was stopped takes no connection, and the system keeps only so many for it.
///
/// # Errors
/// Nobody listens there (`NotFound`, `ConnectionRefused`), there is no room (`WouldBlock`), or the caller may not.
pub(crate) fn connect_within(patience: Duration, path: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for waits in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, waits, Some(patience))?;
    }
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// A channel to the server that listens on a unix socket, now or later: it connects when it is used, and again when the
/// connection has broken. For use inside of a tokio runtime.
pub(crate) fn connect_lazily(path: &Path) -> Channel {
    endpoint().connect_with_connector_lazy(connector(path))
}

fn endpoint() -> Endpoint {
    // The URI names nothing: the connector knows where to go.
    Endpoint::from_static("http://localhost").connect_timeout(CONNECT_PATIENCE)
}

type Connecting = Pin<Box<dyn Future<Output = io::Result<TokioIo<UnixStream>>> + Send>>;

fn connector(
    path: &Path,
) -> impl tower::Service<Uri, Response = TokioIo<UnixStream>, Error = io::Error, Future = Connecting>
+ Clone
+ Send
+ 'static {
    let path: PathBuf = path.to_owned();
    tower::service_fn(move |_: Uri| -> Connecting {
        let path = path.clone();
        Box::pin(async move { UnixStream::connect(path).await.map(TokioIo::new) })
    })
}

/// True if the call did not fail by what the server says: there is none, it is about to be gone, or the connection broke.
pub fn is_gone(status: &Status) -> bool {
    // A status that came over the wire has no source.
    status.code() == tonic::Code::Unavailable || std::error::Error::source(status).is_some()
}

/// Refuses calls that were meant for another volume or instance, as Longhorn does: each name is compared only where
/// both sides have one.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// The volume; empty if it is not known.
    pub volume: String,
    /// The process; empty if it is not known.
    pub instance: String,
    /// What the other side should check: "controller" or "replica".
    pub role: &'static str,
}

impl Interceptor for Identity {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        for (key, what, own) in
            [("volume-name", "volume", &self.volume), ("instance-name", "instance", &self.instance)]
        {
            let Some(meant) = request.metadata().get(key) else { continue };
            let meant = meant.to_str().unwrap_or("(not ASCII)");
            if !meant.is_empty() && !own.is_empty() && meant != own {
                let role = self.role;
                return Err(Status::failed_precondition(format!(
                    "incorrect {what} name {meant}; check {role} address"
                )));
            }
        }
        Ok(request)
    }
}

/// Why nothing listens at a TCP address, with what to do about it.
pub fn not_listening(e: io::Error) -> io::Error {
    let next = match e.kind() {
        io::ErrorKind::AddrInUse => {
            "somebody else listens there: choose another port, or stop who has it (`ss -tlnp`)"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this host has no such address: `ip address` lists those that it has"
        }
        io::ErrorKind::PermissionDenied => "only root listens on ports below 1024: choose another one",
        _ => return e,
    };
    io::Error::new(e.kind(), format!("{e}: {next}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::ptypes::controller_service_client::ControllerServiceClient;

    #[test]
    fn only_root_and_oneself_are_trusted() {
        assert!(is_trusted(0, 0) && is_trusted(0, 1000) && is_trusted(1000, 1000));
        assert!(!is_trusted(1000, 0) && !is_trusted(65534, 1000));
    }

    #[test]
    fn calls_for_somebody_else_are_refused() {
        let mut identity =
            Identity { volume: "demo".into(), instance: "demo-e-0".into(), role: "controller" };
        let call = |key: &'static str, value: &str| {
            let mut request = Request::new(());
            request.metadata_mut().insert(key, value.parse().unwrap());
            request
        };
        let refused = identity.call(call("volume-name", "other")).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert_eq!(refused.message(), "incorrect volume name other; check controller address");
        let refused = identity.call(call("instance-name", "demo-e-1")).unwrap_err();
        assert_eq!(refused.message(), "incorrect instance name demo-e-1; check controller address");
        identity.call(call("volume-name", "demo")).unwrap();
        identity.call(call("volume-name", "")).unwrap();
        identity.call(Request::new(())).unwrap();
        Identity::default().call(call("volume-name", "demo")).unwrap();
    }

    #[tokio::test]
    async fn a_listener_without_descriptors_does_not_keep_a_processor_busy() {
        let began = tokio::time::Instant::now();
        let failing = futures::stream::repeat_with(|| io::Result::<()>::Err(io::ErrorKind::Other.into()));
        assert_eq!(unhurried(failing).take(3).count().await, 3);
        assert!(began.elapsed() >= BREATH * 3);
        let taken = futures::stream::repeat_with(|| io::Result::Ok(()));
        let until = tokio::time::timeout(Duration::from_secs(60), unhurried(taken).take(1000).count());
        assert_eq!(until.await, Ok(1000));
        assert!(began.elapsed() < BREATH * 1000);
    }

    #[tokio::test]
    async fn a_socket_takes_the_place_of_a_socket_and_of_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("own.sock");
        for _ in 0..2 {
            // What is dropped stays.
            drop(bind_private(&path).unwrap());
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "somebody's").unwrap();
        let refused = bind_private(&path).unwrap_err().to_string();
        assert!(refused.contains("own.sock is there and is no socket"), "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
    }

    #[tokio::test]
    async fn a_client_that_does_not_say_that_it_is_there_is_given_up() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = bind_everywhere(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut server = server_that_asks(Duration::from_millis(200), Duration::from_secs(1));
        let server = server.add_service(crate::logging::service());
        tokio::spawn(server.serve_with_incoming(everybody(listener)));
        // A client's preface and its settings (RFC 9113, 3.4 and 6.5); what it is asked after that it does not answer.
        let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let ended = async { while client.read(&mut [0; 4096]).await.is_ok_and(|n| n > 0) {} };
        tokio::time::timeout(Duration::from_secs(60), ended).await.expect("it is given up");
    }

    #[tokio::test]
    async fn a_server_that_does_not_say_that_it_is_there_is_given_up() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let channel = client_that_asks(&address, Duration::from_millis(200), Duration::from_secs(1));
        let mut client = ControllerServiceClient::new(channel.await.unwrap());
        // The system has taken the connection, and nobody says anything on it.
        let asked = tokio::time::timeout(Duration::from_secs(60), client.volume_get(())).await;
        assert!(is_gone(&asked.expect("it is given up").unwrap_err()));
        drop(listener);
    }

    #[test]
    fn who_cannot_listen_is_told_what_to_do() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let refused = not_listening(std::net::TcpListener::bind(taken.local_addr().unwrap()).unwrap_err());
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        assert!(refused.to_string().contains("another port"), "{refused}");
        let elsewhere = not_listening(std::net::TcpListener::bind("192.0.2.1:7").unwrap_err());
        assert!(elsewhere.to_string().contains("ip address"), "{elsewhere}");
    }

    #[tokio::test]
    async fn a_left_over_socket_is_replaced_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        assert_eq!(connect(&path).await.unwrap_err().kind(), io::ErrorKind::NotFound);
        drop(bind_private(&path).unwrap());
        // A child that another test is starting has a copy of the listener until it is another program.
        let until = tokio::time::Instant::now() + Duration::from_secs(60);
        while connect(&path).await.is_ok() && tokio::time::Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(connect(&path).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let _listener = bind_private(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
