//! The API server's questions about what users ask for, answered over TLS by every manager.
//!
//! What is answered is `crate::admission`; here are the port, the certificate and the paths, which are
//! Longhorn's. There is no answer before there is a certificate, and no readiness: a Service sends nobody here until then.

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use control::transport::{BREATH, Guests, Sign};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::{Context, facts};
use crate::admission::{Call, Review};

/// Connections at once. An API server keeps a few open; more come from nobody who means well, and never keep it out: of those
/// beyond, the one ends that has asked for nothing for longest.
const CONNECTIONS: usize = 64;

/// Largest question: an object and the one before, each at most 1.5 MiB (etcd's limit), and what is around them.
const BODY: usize = 4 << 20;

/// How long a peer is waited for.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// Its handshake, and the beginning of a request; an idle connection ends after it, too.
    beginning: Duration,
    /// A question from its beginning to its answer.
    answer: Duration,
}

/// The API server waits for an answer for 30 s at most.
const PATIENCE: Patience = Patience { beginning: Duration::from_secs(90), answer: Duration::from_secs(30) };

/// The certificate in use; `None`: there is none yet.
pub(super) type Certificate = watch::Sender<Option<Arc<ServerConfig>>>;

/// Answers on this port of every address, for as long as it is polled.
pub(super) async fn serve(context: Arc<Context>, port: u16) -> io::Result<()> {
    let listener = control::transport::bind_everywhere(port).await?;
    answer(&listener, &context.certificate, router(Arc::clone(&context)), PATIENCE).await;
    Ok(())
}

/// Answers whoever connects to this listener.
async fn answer(listener: &TcpListener, certificate: &Certificate, router: Router, patience: Patience) {
    let service = TowerToHyperService::new(router);
    let mut guests = Guests::new(CONNECTIONS);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Too many open files, for one, passes.
                tracing::warn!(error = %e, "no connection of the API server was taken");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let Some(config) = certificate.borrow().clone() else { continue };
        let service = service.clone();
        guests.receive(|sign| async move {
            if let Err(e) = converse(stream, config, service, sign, patience).await {
                tracing::debug!(error = %e, "a connection to the webhook ended");
            }
        });
    }
}

async fn converse(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    service: TowerToHyperService<Router>,
    sign: Sign,
    patience: Patience,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let stream = tokio::time::timeout(patience.beginning, TlsAcceptor::from(config).accept(stream)).await??;
    let answered = service_fn(|request| {
        sign.give();
        let answer = tokio::time::timeout(patience.answer, service.call(request));
        async { answer.await.map(|Ok(answer)| answer) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(patience.beginning);
    Ok(http.serve_connection(TokioIo::new(stream), answered).await?)
}

fn router(context: Arc<Context>) -> Router {
    Router::new()
        .route("/v1/webhook/mutation", post(|context, body| review(Call::Mutate, context, body)))
        .route("/v1/webhook/validation", post(|context, body| review(Call::Validate, context, body)))
        .route("/v1/healthz", get(|| async { "ok\n" }))
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(context)
}

async fn review(call: Call, State(context): State<Arc<Context>>, body: Bytes) -> Response {
    let review = match Review::read(&body) {
        Ok(review) => review,
        Err(e) => return (StatusCode::BAD_REQUEST, format!("{e}\n")).into_response(),
    };
    let facts = match facts::gather(&context, review.about(call)).await {
        Ok(facts) => facts,
        Err(e) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")).into_response(),
    };
    match review.answer(call, &facts) {
        Ok(answer) => ([(header::CONTENT_TYPE, "application/json")], answer.to_string()).into_response(),
        Err(e) => (StatusCode::BAD_REQUEST, format!("{e}\n")).into_response(),
    }
}
