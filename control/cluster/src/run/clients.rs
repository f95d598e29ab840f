//! Connections to the API server that notice when nobody is at their other end.
//!
//! A server that loses its power, or a network that is cut, closes no connection: the kernel goes on sending what was asked for
//! a quarter of an hour, and a client that only waits is blind and mute for as long. So each read of a connection ends: soon
//! where an answer is due, later where a watch may have nothing to tell.

use std::error::Error;
use std::io;
use std::time::Duration;

use kube::{Client, Config};

/// How long an answer may take. An API server asks webhooks for 10 s (`deploy/webhooks.yaml`) before it answers.
const ANSWER: Duration = Duration::from_secs(15);

/// How long a watch may be silent. An API server sends a bookmark roughly every minute where something else than that kind
/// changes and etcd has told it so; else it has nothing to say (apiserver, `storage/cacher`), and the watch is begun again
/// where it was.
const NEWS: Duration = Duration::from_secs(90);

/// The ways to the API server.
#[derive(Clone)]
pub struct Clients {
    /// For what is answered at once.
    pub requests: Client,
    /// For watches, and the lists that they begin with.
    pub watches: Client,
}

impl Clients {
    /// With the API server that `KUBECONFIG` or the pod's service account names.
    ///
    /// # Errors
    /// Neither names one, or what they say of it cannot be used.
    pub async fn of_this_place() -> kube::Result<Self> {
        let config = Config::infer().await.map_err(kube::Error::InferConfig)?;
        Self::with(&config)
    }

    /// With the API server of a configuration.
    ///
    /// # Errors
    /// What it says cannot be used.
    pub fn with(config: &Config) -> kube::Result<Self> {
        Self::patient(config, ANSWER, NEWS)
    }

    fn patient(config: &Config, answer: Duration, news: Duration) -> kube::Result<Self> {
        let client = |patience| {
            let mut config = config.clone();
            config.read_timeout = Some(patience);
            // Counted from the question, not from the answer before it.
            config.reset_reader_on_write = true;
            Client::try_from(config)
        };
        Ok(Self { requests: client(answer)?, watches: client(news)? })
    }
}

/// One way for both, which ends what it waits for itself.
impl From<Client> for Clients {
    fn from(client: Client) -> Self {
        Self { requests: client.clone(), watches: client }
    }
}

/// True if a request ended since nothing came for as long as its client has patience: of a watch that says nothing, only that
/// nothing may have happened.
pub(super) fn was_silent(error: &(dyn Error + 'static)) -> bool {
    let is_timeout = |e: &(dyn Error + 'static)| {
        e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::TimedOut)
    };
    std::iter::successors(Some(error), |&e| e.source()).any(is_timeout)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use futures::StreamExt;
    use k8s_openapi::api::core::v1::Secret;
    use kube::Api;
    use kube::api::WatchParams;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Answers the first request of each connection, and no other one. Closes none.
    async fn mute_after_the_first(listener: TcpListener) {
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await.unwrap();
            let body = r#"{"major":"1","minor":"31","gitVersion":"","gitCommit":"","gitTreeState":"","buildDate":"","goVersion":"","compiler":"","platform":""}"#;
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json";
            let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            stream.write_all(answer.as_bytes()).await.unwrap();
            open.push(stream);
        }
    }

    /// Asks until it is answered, which is over a new connection. A busy machine may take longer than the client has patience.
    async fn answered(client: &Client, limit: Duration) {
        let until = Instant::now() + limit;
        while let Err(e) = client.apiserver_version().await {
            assert!(Instant::now() < until, "nobody answers: {e}");
        }
    }

    #[tokio::test]
    async fn a_connection_that_nobody_is_at_any_more_is_given_up() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(mute_after_the_first(listener));
        let config = Config::new(format!("http://{address}").parse().unwrap());
        let patience = Duration::from_millis(1500);
        let clients = Clients::patient(&config, patience, patience).unwrap();
        let limit = Duration::from_secs(20);
        for client in [clients.requests, clients.watches] {
            answered(&client, limit).await;
            let asked = Instant::now();
            let mute = tokio::time::timeout(limit, client.apiserver_version()).await;
            assert!(mute.expect("it ends by itself").is_err());
            assert!(asked.elapsed() >= patience, "it was the old connection");
            answered(&client, limit).await;
        }
    }

    /// Begins to answer the first request, with this, and says nothing more; each other connection is closed at once.
    async fn begins_to_answer(listener: TcpListener, body: &'static str) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await.unwrap();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked";
        let answer = format!("{head}\r\n\r\n{:x}\r\n{body}\r\n", body.len());
        stream.write_all(answer.as_bytes()).await.unwrap();
        while listener.accept().await.is_ok() {}
    }

    #[tokio::test]
    async fn a_watch_that_is_silent_is_told_from_one_that_broke() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let event = r#"{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"1"}}}"#;
        tokio::spawn(begins_to_answer(listener, event));
        let config = Config::new(format!("http://{address}").parse().unwrap());
        let patience = Duration::from_millis(500);
        let watches = Clients::patient(&config, patience, patience).unwrap().watches;
        let secrets = Api::<Secret>::default_namespaced(watches);
        let mut events = secrets.watch(&WatchParams::default(), "0").await.unwrap().boxed();
        // An event is passed on once it is whole: its line ends with the next one, or with the watch.
        let silent = loop {
            if let Err(e) = events.next().await.expect("it ends by an error") {
                break e;
            }
        };
        assert!(was_silent(&silent), "{silent:?}");
        let broke = secrets.watch(&WatchParams::default(), "0").await.map(|_| ()).unwrap_err();
        assert!(!was_silent(&broke), "{broke:?}");
    }
}
