//! Where an engine, or a relay, answers (gRPC), and how it hears that it is to end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use control::engine::{EngineControl, EngineError};
use control::front::Front;
use control::host::Root;
use control::manager::STOP_PATIENCE;
use lh_block::Address;
use tokio::signal::unix::{SignalKind, signal};

use super::ControllerArgs;
use crate::daemon::front;

/// How long the answer to the shutdown may take to leave the process.
pub(super) const LAST_ANSWER: Duration = Duration::from_millis(200);

/// By when a process that a signal ends has said how it ends: a second later its manager kills it.
pub(super) const ENDED: Duration = STOP_PATIENCE.saturating_sub(Duration::from_secs(1));

/// When a signal has asked for the end that is still to come.
#[derive(Clone, Debug, Default)]
pub(super) struct Signalled(Arc<Mutex<Option<Instant>>>);

impl Signalled {
    fn set(&self, at: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// When to have ended. `None`: whoever has asked for the end waits for as long as it takes.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|at| at + ENDED)
    }
}

/// Where the engine, or a relay, answers.
pub(super) fn fronts(args: &ControllerArgs, instance: &str, root: &Root) -> Result<Vec<Front>> {
    let usual = root.control_socket(instance);
    let own = Address::from(usual.clone());
    let listen = args.listen.as_ref().unwrap_or(&own);
    front::fronts(listen, Some(usual), args.tls_dir.as_deref(), args.insecure)
}

/// Starts the thread that answers there and hears signals.
pub(super) fn serve_face(
    fronts: Vec<Front>,
    instance: &str,
    face: Arc<dyn EngineControl>,
    signalled: Signalled,
) -> Result<()> {
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
                if let Err(e) = hear_signals(&*face, &signalled).await {
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
async fn hear_signals(face: &dyn EngineControl, signalled: &Signalled) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    loop {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        signalled.set(Some(Instant::now()));
        match face.shutdown().await {
            // Whoever ends it by a call has the process end besides.
            Ok(()) | Err(EngineError::Ending) => {}
            Err(refused) => {
                signalled.set(None);
                tracing::warn!("not stopped: {refused}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who is killed before says nothing, and nobody hears that the volume is not flushed.
    #[test]
    fn who_is_ended_by_a_signal_has_had_its_say_before_it_is_killed() {
        let signalled = Signalled::default();
        assert_eq!(signalled.deadline(), None, "by a call");
        let now = Instant::now();
        signalled.set(Some(now));
        let left = (now + STOP_PATIENCE).duration_since(signalled.deadline().unwrap());
        assert!(left > LAST_ANSWER && left < Duration::from_secs(2), "{left:?}");
        signalled.set(None);
        assert_eq!(signalled.deadline(), None, "it was refused");
    }
}
