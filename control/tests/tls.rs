//! Who is let in on TCP: whoever shows a certificate of the right authority, and nobody else; and what is said of files that
//! cannot be used.

mod stand_in;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, SystemTime};

use control::front::{Front, Trust};
use control::host::Root;
use control::manager::{ManagerError, Options, run};
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::tls::TlsFiles;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, HandshakeKind, RootCertStore, SupportedProtocolVersion};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};

use stand_in::Replica;

/// The name in Longhorn's certificates that its clients insist on.
const NAME: &str = "longhorn-backend.longhorn-system";

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Far more than anything here takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its key, in PEM.
struct Pair {
    certificate: String,
    key: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn sign(&self, from: SystemTime, to: SystemTime) -> Pair {
        let mut params = CertificateParams::new([NAME.to_owned()]).unwrap();
        (params.not_before, params.not_after) = (from.into(), to.into());
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Pair { certificate, key: key.serialize_pem() }
    }

    fn pair(&self) -> Pair {
        self.sign(SystemTime::now() - DAY, SystemTime::now() + DAY)
    }

    fn expired(&self) -> Pair {
        self.sign(SystemTime::now() - 2 * DAY, SystemTime::now() - DAY)
    }
}

/// As a Secret is mounted: each file is replaced as a whole.
fn write(directory: &Path, authority: &str, pair: &Pair) {
    for (name, text) in [("ca.crt", authority), ("tls.crt", &pair.certificate), ("tls.key", &pair.key)] {
        let temporary = directory.join("new");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, directory.join(name)).unwrap();
    }
}

/// What the server is asked with.
enum Client<'a> {
    Shows(&'a Pair),
    ShowsNothing,
    SpeaksPlainly,
}

/// The version that the server at the address tells.
async fn ask(address: SocketAddr, authority: &Authority, client: Client<'_>) -> Result<String, String> {
    let channel = match client {
        Client::SpeaksPlainly => Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await,
        Client::Shows(_) | Client::ShowsNothing => {
            let config = Arc::new(client_config(authority, client));
            let connector = tower::service_fn(move |_: Uri| {
                let config = Arc::clone(&config);
                async move { connect(address, &config).await.map(TokioIo::new) }
            });
            Endpoint::from_static("http://localhost").connect_with_connector(connector).await
        }
    };
    let mut client = ProcessManagerServiceClient::<Channel>::new(channel.map_err(|e| e.to_string())?);
    let answer = tokio::time::timeout(PATIENCE, client.version_get(())).await.map_err(|e| e.to_string())?;
    answer.map(|answer| answer.into_inner().version).map_err(|e| e.to_string())
}

async fn connect(address: SocketAddr, config: &Arc<ClientConfig>) -> io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::clone(config)).connect(ServerName::try_from(NAME).unwrap(), stream).await
}

fn client_config(authority: &Authority, client: Client<'_>) -> ClientConfig {
    client_config_of(rustls::DEFAULT_VERSIONS, authority, client)
}

fn client_config_of(
    versions: &[&'static SupportedProtocolVersion],
    authority: &Authority,
    client: Client<'_>,
) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions).unwrap();
    let config = config.with_root_certificates(roots);
    let mut config = match client {
        Client::Shows(pair) => {
            let certificate = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
        Client::ShowsNothing | Client::SpeaksPlainly => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

/// The first of five ports in a row, on an address of this machine that no other test has: what is free there stays free.
fn free_ports() -> SocketAddr {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, high, low, COUNT.fetch_add(1, Ordering::Relaxed));
    let is_free = |port| TcpListener::bind((own, port)).is_ok();
    let first = || TcpListener::bind((own, 0)).unwrap().local_addr().unwrap().port();
    let mut all = std::iter::repeat_with(first);
    let port = all.find(|first| (0..5).all(|offset| first.checked_add(offset).is_some_and(is_free)));
    SocketAddr::from((own, port.unwrap()))
}

/// An instance manager with certificates, on ports from this one on.
struct Manager {
    dir: tempfile::TempDir,
    first: SocketAddr,
}

impl Manager {
    async fn start(authority: &Authority) -> Self {
        let manager = Self { dir: tempfile::tempdir().unwrap(), first: free_ports() };
        fs::create_dir(manager.files()).unwrap();
        write(&manager.files(), &authority.pem, &authority.pair());
        let options = manager.options();
        let socket = options.root.manager_socket();
        tokio::spawn(async move { run(options, std::future::pending()).await.unwrap() });
        while control::transport::connect(&socket).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        manager
    }

    fn files(&self) -> PathBuf {
        self.dir.path().join("tls")
    }

    fn options(&self) -> Options {
        let root = Root::at(&self.dir.path().join("root")).unwrap();
        let trust = Trust::Certificates(TlsFiles::below(&self.files()));
        Options { root, program: "/bin/true".into(), listen: Some((self.first, trust)), take_over: false }
    }
}

#[tokio::test]
async fn a_certificate_of_the_authority_is_let_in_and_nothing_else() {
    let (authority, other) = (Authority::new("ours"), Authority::new("another"));
    let manager = Manager::start(&authority).await;
    let (own, foreign, old) = (authority.pair(), other.pair(), authority.expired());
    for offset in 0..5 {
        let one = SocketAddr::new(manager.first.ip(), manager.first.port() + offset);
        assert_eq!(ask(one, &authority, Client::Shows(&own)).await.unwrap(), env!("CARGO_PKG_VERSION"));
        assert!(ask(one, &authority, Client::ShowsNothing).await.is_err());
        assert!(ask(one, &authority, Client::Shows(&foreign)).await.is_err());
        assert!(ask(one, &authority, Client::Shows(&old)).await.is_err());
        assert!(ask(one, &authority, Client::SpeaksPlainly).await.is_err());
    }
    assert!(ask(manager.first, &other, Client::Shows(&own)).await.is_err(), "a client believes any server");
    // Not among what obeys everybody.
    let root = manager.options().root;
    assert_eq!(control::manager::obeys_at(&root), None);
}

#[tokio::test]
async fn who_says_nothing_keeps_nobody_else_out() {
    let authority = Authority::new("ours");
    let manager = Manager::start(&authority).await;
    let mut mute = Vec::new();
    // More than may be in their handshake.
    for _ in 0..200 {
        mute.push(TcpStream::connect(manager.first).await.unwrap());
    }
    let own = authority.pair();
    let asked = ask(manager.first, &authority, Client::Shows(&own));
    // Before the time of the first of them is over.
    tokio::time::timeout(Duration::from_secs(8), asked).await.unwrap().unwrap();
}

#[tokio::test]
async fn new_files_are_taken_up_and_unfit_ones_are_not() {
    let (before, after) = (Authority::new("ours"), Authority::new("the next one"));
    let manager = Manager::start(&before).await;
    let (old, new) = (before.pair(), after.pair());
    ask(manager.first, &before, Client::Shows(&old)).await.unwrap();
    fs::write(manager.files().join("tls.key"), "nothing").unwrap();
    ask(manager.first, &before, Client::Shows(&old)).await.unwrap();
    write(&manager.files(), &after.pem, &after.pair());
    ask(manager.first, &after, Client::Shows(&new)).await.unwrap();
    assert!(ask(manager.first, &after, Client::Shows(&old)).await.is_err());
}

/// The clock of the authority's host may be ahead of this one's.
#[tokio::test]
async fn new_files_that_are_not_valid_yet_are_taken_up_once_they_are() {
    let (before, after) = (Authority::new("ours"), Authority::new("the next one"));
    let manager = Manager::start(&before).await;
    let (old, new) = (before.pair(), after.pair());
    let from = SystemTime::now() + Duration::from_secs(5);
    write(&manager.files(), &after.pem, &after.sign(from, from + DAY));
    let asked = ask(manager.first, &before, Client::Shows(&old)).await;
    assert!(asked.is_ok() || SystemTime::now() >= from, "{asked:?}");
    let until = from + PATIENCE;
    while let Err(e) = ask(manager.first, &after, Client::Shows(&new)).await {
        assert!(SystemTime::now() < until, "{e}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// An engine or a replica goes on without: its data is not to wait for a certificate.
#[tokio::test]
async fn a_process_that_began_with_unfit_files_lets_in_who_comes_once_they_fit() {
    let authority = Authority::new("ours");
    let (dir, address) = (tempfile::tempdir().unwrap(), free_ports());
    write(dir.path(), &authority.pem, &authority.expired());
    let front = Front::Tcp(address, Trust::Certificates(TlsFiles::below(dir.path())));
    let served = tokio::spawn(async move {
        control::replica::serve_at(&[front], "demo", "demo-r-1", Arc::new(Replica(None))).await
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let config = Arc::new(client_config(&authority, Client::Shows(&authority.pair())));
    assert!(connect(address, &config).await.is_err());
    write(dir.path(), &authority.pem, &authority.pair());
    let until = SystemTime::now() + PATIENCE;
    while let Err(e) = connect(address, &config).await {
        assert!(SystemTime::now() < until && !served.is_finished(), "{e}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Taken up again, a session would let its client in as long as the server runs, whatever has become of its certificate.
#[tokio::test]
async fn a_client_shows_its_certificate_each_time() {
    let authority = Authority::new("ours");
    let manager = Manager::start(&authority).await;
    for versions in [&[&rustls::version::TLS13][..], &[&rustls::version::TLS12]] {
        let config = Arc::new(client_config_of(versions, &authority, Client::Shows(&authority.pair())));
        for _ in 0..3 {
            let mut stream = connect(manager.first, &config).await.unwrap();
            assert_eq!(stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full), "{versions:?}");
            // What the server says first comes behind what it may give to come again with.
            assert_ne!(stream.read(&mut [0; 64]).await.unwrap(), 0);
        }
    }
}

#[tokio::test]
async fn what_is_wrong_with_files_is_said() {
    let (authority, other) = (Authority::new("ours"), Authority::new("another"));
    let manager = Manager { dir: tempfile::tempdir().unwrap(), first: free_ports() };
    fs::create_dir(manager.files()).unwrap();
    let refusal = async |spoil: &dyn Fn(&Path)| {
        write(&manager.files(), &authority.pem, &authority.pair());
        spoil(&manager.files());
        let ended = run(manager.options(), std::future::ready(())).await;
        let Err(e @ ManagerError::Tls(_)) = ended else { panic!("{ended:?}") };
        e.to_string()
    };
    let put = |name: &'static str, text: String| move |dir: &Path| fs::write(dir.join(name), &text).unwrap();
    for name in ["ca.crt", "tls.crt", "tls.key"] {
        let said = refusal(&|dir| fs::remove_file(dir.join(name)).unwrap()).await;
        assert!(said.contains(&format!("{name}: No such file")), "{said}");
        let said = refusal(&put(name, "nothing".to_owned())).await;
        assert!(said.contains(name) && said.contains("in PEM"), "{said}");
    }
    let said = refusal(&|dir| write(dir, &authority.pem, &authority.expired())).await;
    assert!(said.contains("tls.crt has expired"), "{said}");
    let later = SystemTime::now() + DAY;
    let said = refusal(&|dir| write(dir, &authority.pem, &authority.sign(later, later + DAY))).await;
    assert!(said.contains("tls.crt is not valid yet"), "{said}");
    let said = refusal(&|dir| write(dir, &authority.pem, &other.pair())).await;
    assert!(said.contains("tls.crt was not signed by the authority of ca.crt"), "{said}");
    let said = refusal(&put("tls.key", authority.pair().key)).await;
    assert!(said.contains("tls.key is not the key of tls.crt"), "{said}");
}
