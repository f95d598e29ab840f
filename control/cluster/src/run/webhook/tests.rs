use axum::routing::{get, post};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;

const NAME: &str = "webhook";

/// Less than a stranger may take, and more than a busy machine needs for an answer.
const SOON: Duration = Duration::from_secs(8);

/// A webhook that says `ok`, and whom its clients believe.
struct Webhook {
    address: std::net::SocketAddr,
    client: Arc<ClientConfig>,
}

impl Webhook {
    async fn start() -> Self {
        Self::with(PATIENCE).await
    }

    async fn with(patience: Patience) -> Self {
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new([NAME.to_owned()]).unwrap().self_signed(&key).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
            .unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(own.der().clone()).unwrap();
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let certificate = Certificate::new(Some(Arc::new(server)));
        let router = Router::new()
            .route("/", get(|| async { "ok\n" }))
            .route("/whole", post(|body: Bytes| async move { body }));
        tokio::spawn(async move { answer(&listener, &certificate, router, patience).await });
        Self { address, client: Arc::new(client) }
    }

    async fn silent(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        let connector = TlsConnector::from(Arc::clone(&self.client));
        connector.connect(ServerName::try_from(NAME).unwrap(), self.silent().await).await
    }

    /// The beginning of what is answered to a client that asks now.
    async fn ask(&self) -> io::Result<String> {
        let asked = async { hear(&mut self.connect().await?).await };
        tokio::time::timeout(SOON, asked).await?
    }
}

async fn hear(stream: &mut TlsStream<TcpStream>) -> io::Result<String> {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: webhook\r\n\r\n").await?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Every pod of a cluster reaches the webhook, and needs to prove nothing.
#[tokio::test]
async fn strangers_who_say_nothing_do_not_keep_the_api_server_out() {
    let webhook = Webhook::start().await;
    let mut silent = Vec::new();
    for _ in 0..3 * CONNECTIONS {
        silent.push(webhook.silent().await);
    }
    assert_eq!(webhook.ask().await.unwrap(), "HTTP/1.1 200");
}

#[tokio::test]
async fn strangers_who_stop_in_the_middle_do_not_keep_the_api_server_out() {
    let webhook = Webhook::start().await;
    let mut stuck = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = webhook.connect().await.unwrap();
        stream
            .write_all(b"POST /whole HTTP/1.1\r\nHost: webhook\r\nContent-Length: 9\r\n\r\n1")
            .await
            .unwrap();
        stuck.push(stream);
    }
    assert_eq!(webhook.ask().await.unwrap(), "HTTP/1.1 200");
}

/// For peers whose host lost its power: what they had here goes, though nobody else needs their place.
const SHORT: Duration = Duration::from_secs(1);

async fn ends(mut stream: TcpStream) {
    let ended = async { while stream.read(&mut [0; 4096]).await.is_ok_and(|n| n > 0) {} };
    tokio::time::timeout(2 * SOON, ended).await.expect("it is given up");
}

#[tokio::test]
async fn a_peer_that_never_shakes_hands_is_given_up() {
    let webhook = Webhook::with(Patience { beginning: SHORT, ..PATIENCE }).await;
    ends(webhook.silent().await).await;
}

#[tokio::test]
async fn a_peer_that_never_asks_is_given_up() {
    let webhook = Webhook::with(Patience { beginning: SHORT, ..PATIENCE }).await;
    ends(webhook.connect().await.unwrap().into_inner().0).await;
}

#[tokio::test]
async fn a_peer_that_stops_in_the_middle_of_its_question_is_given_up() {
    let webhook = Webhook::with(Patience { answer: SHORT, ..PATIENCE }).await;
    let mut stream = webhook.connect().await.unwrap();
    stream.write_all(b"POST /whole HTTP/1.1\r\nHost: webhook\r\nContent-Length: 9\r\n\r\n1").await.unwrap();
    ends(stream.into_inner().0).await;
}
