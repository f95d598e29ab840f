//! A manager by itself, for a development cluster: `manager --root DIR [--webhook-port PORT]`, with `NODE_NAME` and `POD_NAMESPACE` in the
//! environment, and `KUBECONFIG` for the API server.

use std::path::PathBuf;

use lh_cluster::agent::Reach;
use lh_cluster::plan::instance_manager::RunBy;
use lh_cluster::run::{Clock, Options, authority_socket, run_here};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let mut args = std::env::args().skip(1);
    let root = match (args.next().as_deref(), args.next()) {
        (Some("--root"), Some(root)) => PathBuf::from(root),
        _ => return Err("usage: NODE_NAME=... manager --root DIR [--webhook-port PORT]".into()),
    };
    let webhook = match (args.next().as_deref(), args.next()) {
        (Some("--webhook-port"), Some(port)) => Some(port.parse()?),
        _ => None,
    };
    let options = Options {
        node: std::env::var("NODE_NAME")?,
        namespace: std::env::var("POD_NAMESPACE").unwrap_or_else(|_| lh_cluster::api::NAMESPACE.to_owned()),
        authority: authority_socket(&root)?,
        root,
        instance_manager: RunBy::Others,
        image: "longhorn:dev".to_owned(),
        webhook,
        settings: std::sync::Arc::default(),
        clock: Clock::default(),
    };
    let mut terminate = signal(SignalKind::terminate())?;
    run_here(options, Reach::ThisMachine, None, async move {
        terminate.recv().await;
    })
    .await?;
    Ok(())
}
