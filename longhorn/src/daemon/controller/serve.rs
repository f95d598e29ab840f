//! Where an engine, or a relay, answers (gRPC), and how it hears that it is to end.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use control::engine::{EngineControl, EngineError};
use control::front::Front;
use control::host::Root;
use tokio::signal::unix::{SignalKind, signal};

use super::ControllerArgs;
use crate::daemon::{GivesUp, front};

/// How long the answer to the shutdown may take to leave the process.
pub(super) const LAST_ANSWER: Duration = Duration::from_millis(200);

/// Where the engine, or a relay, answers.
pub(super) fn fronts(args: &ControllerArgs, instance: &str) -> Result<Vec<Front>, GivesUp> {
    let usual = Root::at(&args.root).ok().map(|root| root.control_socket(instance));
    front::fronts(&args.listen, usual, args.tls_dir.as_deref(), args.insecure)
}

/// Starts the thread that answers there and hears signals.
pub(super) fn serve_face(fronts: Vec<Front>, instance: &str, face: Arc<dyn EngineControl>) -> Result<()> {
    let instance = instance.to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let work = move || {
        runtime.block_on(async {
            let serve = async {
                // The volume goes on without, and ends when it is told to; who asks for its status hears that nobody answers.
                if let Err(e) = control::engine::serve_at(&fronts, &instance, Arc::clone(&face)).await {
                    tracing::error!("control socket: {e}");
                }
            };
            let hear = async {
                if let Err(e) = hear_signals(&*face).await {
                    tracing::error!("signals cannot be heard: {e}");
                }
            };
            tokio::join!(serve, hear);
        });
    };
    std::thread::Builder::new().name("grpc".into()).spawn(work).context("a thread for the control socket")?;
    Ok(())
}

/// Asks for the end at each signal that asks for it.
async fn hear_signals(face: &dyn EngineControl) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    loop {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        match face.shutdown().await {
            // Whoever ends it by a call has the process end besides.
            Ok(()) | Err(EngineError::Ending) => {}
            Err(refused) => tracing::warn!("not stopped: {refused}"),
        }
    }
}
