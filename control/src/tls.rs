//! Mutual TLS for gRPC on TCP, by Longhorn's files: `ca.crt`, `tls.crt` and `tls.key` in one directory, as its pods mount the
//! Secret `longhorn-grpc-tls`.
//!
//! Both sides have a certificate of one authority, and the handshake proves it, before a byte of a request is read. Whoever
//! holds a certificate of that authority may do everything, so the authority should sign for nothing else; names in
//! certificates are for clients to check. Files that change are taken up by the next connection, unless they do not
//! fit: then what was there before goes on, until they do. No session is taken up again: its client would be believed by a certificate
//! that may have expired since.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{CertificateError, RootCertStore, ServerConfig};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::transport::{BREATH, Guests};

/// How often files that cannot be used yet are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Where Longhorn's pods have the files.
pub const LONGHORNS_PLACE: &str = "/tls-files";

/// Names of the files, those of a Secret of Kubernetes' type for certificates.
const AUTHORITY: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// The protocol that clients of gRPC ask for (RFC 7301; HTTP/2 is RFC 9113, 3.2).
const HTTP2: &[u8] = b"h2";

/// How long a client may take to prove who it is: a few round trips of a slow network.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// Most handshakes at once: more clients than one cluster's managers. Of those beyond, the oldest ends.
const HANDSHAKES_MAX: usize = 64;

/// Why the files cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// One of them cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// One of them is not what its name says.
    #[error("{} {reason}", path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// The directory of the three files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    directory: PathBuf,
}

impl TlsFiles {
    /// Those in this directory, which are not looked at yet.
    pub fn below(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Those where Longhorn's pods have them, if there are any: a pod without the Secret has an empty directory.
    pub fn in_longhorns_place() -> Option<Self> {
        let files = Self::below(Path::new(LONGHORNS_PLACE));
        [AUTHORITY, CERTIFICATE, KEY].iter().any(|name| files.path(name).exists()).then_some(files)
    }

    /// The certificate of whom connections are believed.
    pub fn authority(&self) -> PathBuf {
        self.path(AUTHORITY)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// How a server behaves that has these files.
    fn server(&self) -> Result<ServerConfig, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut authorities = RootCertStore::empty();
        for authority in self.certificates(AUTHORITY)? {
            authorities.add(authority).map_err(|e| self.unfit(AUTHORITY, format!("is no authority: {e}")))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider.clone());
        let verifier =
            verifier.build().map_err(|e| self.unfit(AUTHORITY, format!("is no authority: {e}")))?;
        let own = self.certificates(CERTIFICATE)?;
        self.check(&*verifier, &own)?;
        let path = self.path(KEY);
        let pem = fs::read(&path).map_err(|source| TlsError::Io { path, source })?;
        let key = PrivateKeyDer::from_pem_slice(&pem)
            .map_err(|e| self.unfit(KEY, format!("holds no private key in PEM: {e}")))?;
        let versions = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let versions = versions.map_err(|e| self.unfit(KEY, e.to_string()))?;
        let config = versions.with_client_cert_verifier(verifier).with_single_cert(own, key);
        let mut config =
            config.map_err(|e| self.unfit(KEY, format!("is not the key of {CERTIFICATE} beside it: {e}")))?;
        config.alpn_protocols = vec![HTTP2.to_vec()];
        (config.session_storage, config.send_tls13_tickets) = (Arc::new(NoServerSessionStorage {}), 0);
        Ok(config)
    }

    fn certificates(&self, name: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let path = self.path(name);
        let pem = fs::read(&path).map_err(|source| TlsError::Io { path, source })?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        match certificates {
            Ok(certificates) if !certificates.is_empty() => Ok(certificates),
            Ok(_) => Err(self.unfit(name, "holds no certificate in PEM".to_owned())),
            Err(e) => Err(self.unfit(name, format!("holds no certificate in PEM: {e}"))),
        }
    }

    /// Refuses an own certificate that no client could believe. What it may be used for is its clients' affair.
    fn check(
        &self,
        verifier: &dyn ClientCertVerifier,
        own: &[CertificateDer<'static>],
    ) -> Result<(), TlsError> {
        let Some((certificate, between)) = own.split_first() else { return Ok(()) };
        let Err(e) = verifier.verify_client_cert(certificate, between, UnixTime::now()) else {
            return Ok(());
        };
        use CertificateError::{
            BadEncoding, BadSignature, Expired, ExpiredContext, NotValidYet, NotValidYetContext,
            UnknownIssuer,
        };
        let reason = match &e {
            rustls::Error::InvalidCertificate(Expired | ExpiredContext { .. }) => {
                format!("has expired ({e}): renew it")
            }
            rustls::Error::InvalidCertificate(NotValidYet | NotValidYetContext { .. }) => {
                format!("is not valid yet ({e}): set this host's clock, or make it anew")
            }
            rustls::Error::InvalidCertificate(UnknownIssuer | BadSignature) => {
                format!("was not signed by the authority of {AUTHORITY} beside it ({e})")
            }
            rustls::Error::InvalidCertificate(BadEncoding) => format!("is no certificate ({e})"),
            _ => return Ok(()),
        };
        Err(self.unfit(CERTIFICATE, reason))
    }

    fn unfit(&self, name: &str, reason: String) -> TlsError {
        TlsError::Unfit { path: self.path(name), reason }
    }

    fn version(&self) -> Version {
        let of = |name| {
            let meta = fs::metadata(self.path(name)).ok()?;
            Some((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
        };
        [AUTHORITY, CERTIFICATE, KEY].into_iter().map(of).collect()
    }
}

/// What tells one version of the files from another. Links are followed: Kubernetes changes a mounted Secret by one.
type Version = Vec<Option<(u64, i64, i64, u64)>>;

/// The files in use, and which version of them.
#[derive(Debug)]
struct Loaded {
    config: Arc<ServerConfig>,
    version: Version,
    /// Those that were told not to fit.
    unfit: Option<Version>,
}

/// How connections are let in, by files that may change.
#[derive(Clone, Debug)]
pub(crate) struct Door {
    files: TlsFiles,
    loaded: Arc<Mutex<Loaded>>,
}

impl Door {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub(crate) fn new(files: TlsFiles) -> Result<Self, TlsError> {
        let version = files.version();
        let config = Arc::new(files.server()?);
        Ok(Self { files, loaded: Arc::new(Mutex::new(Loaded { config, version, unfit: None })) })
    }

    /// Reads the files once they can be used. Why they cannot is told once for each version of them.
    pub(crate) async fn opened(files: TlsFiles) -> Self {
        let mut told = None;
        loop {
            let version = files.version();
            match Self::new(files.clone()) {
                Ok(door) => return door,
                Err(e) if told.as_ref() != Some(&version) => {
                    tracing::error!("nobody is let in on TCP until the certificates can be used: {e}");
                    told = Some(version);
                }
                Err(_) => {}
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The certificate of whom connections are believed.
    pub(crate) fn authority(&self) -> PathBuf {
        self.files.authority()
    }

    /// How the next connection is let in. Files that changed and do not fit are told of once, and looked at again each time: what is
    /// not valid yet will be, and a disk may fail for a moment.
    fn config(&self) -> Arc<ServerConfig> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let version = self.files.version();
        if version != loaded.version {
            match self.files.server() {
                Ok(config) => {
                    *loaded = Loaded { config: Arc::new(config), version, unfit: None };
                    tracing::info!(directory = %self.files.directory.display(), "new certificates are in use");
                }
                Err(e) if loaded.unfit.as_ref() != Some(&version) => {
                    loaded.unfit = Some(version);
                    tracing::error!("the certificates before go on being used: {e}");
                }
                Err(_) => {}
            }
        }
        Arc::clone(&loaded.config)
    }

    /// The connections to this listener whose clients have shown a certificate of the authority, until it is dropped.
    pub(crate) fn peers(&self, listener: TcpListener) -> ReceiverStream<io::Result<VerifiedPeer>> {
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(accept(self.clone(), listener, sender));
        ReceiverStream::new(receiver)
    }
}

async fn accept(door: Door, listener: TcpListener, sender: mpsc::Sender<io::Result<VerifiedPeer>>) {
    let mut newcomers = Guests::new(HANDSHAKES_MAX);
    loop {
        let (stream, address) = tokio::select! {
            () = sender.closed() => return,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(e) => {
                    tracing::warn!("a connection cannot be taken: {e}");
                    tokio::time::sleep(BREATH).await;
                    continue;
                }
            },
        };
        let acceptor = TlsAcceptor::from(door.config());
        let proving = newcomers.receive(|_| async move { prove(&acceptor, stream).await });
        let sender = sender.clone();
        tokio::spawn(async move {
            match proving.await {
                // Nobody takes it: the server has ended.
                Ok(Ok(peer)) => drop(sender.send(Ok(peer)).await),
                Ok(Err(e)) => refused(address, &e),
                Err(_) => {
                    tracing::debug!(%address, "connection refused: others came, and it had not proved who it is")
                }
            }
        });
    }
}

async fn prove(acceptor: &TlsAcceptor, stream: TcpStream) -> io::Result<VerifiedPeer> {
    stream.set_nodelay(true)?;
    match tokio::time::timeout(HANDSHAKE_PATIENCE, acceptor.accept(stream)).await {
        Ok(stream) => stream.map(VerifiedPeer),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "it does not prove who it is")),
    }
}

fn refused(address: SocketAddr, e: &io::Error) {
    tracing::warn!(%address, "connection refused: {e}");
}

/// A connection whose client has shown a certificate.
pub(crate) struct VerifiedPeer(TlsStream<TcpStream>);

impl Connected for VerifiedPeer {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.0.get_ref().0.connect_info()
    }
}

impl AsyncRead for VerifiedPeer {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for VerifiedPeer {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
