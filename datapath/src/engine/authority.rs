//! The authority's calls, on a thread of their own: they wait for a disk or a network.

use std::io;
use std::time::Duration;

use crossbeam_channel::{Sender, unbounded};
use lh_block::{Epoch, Generation};

use crate::conductor::{Input, Stored};

/// Between two attempts to load the epoch.
const RETRY: Duration = Duration::from_secs(1);

/// Who stores a volume's epoch (`docs/invariants.md`, 12).
pub trait Authority: Send + 'static {
    /// The epoch that counts; `None` if none was ever stored.
    ///
    /// # Errors
    /// A sentence. It is asked again, for ever.
    fn load(&mut self) -> Result<Option<Epoch>, String>;

    /// Stores the epoch in exchange for the one with the order `expected` (`None`: for none at all). Durable when it
    /// returns [`Stored::Stored`].
    fn store(&mut self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Stored;
}

enum Call {
    Load,
    Store(Option<(Generation, u64)>, Epoch),
}

/// The control thread's end.
pub(super) struct Calls(Sender<Call>);

impl Calls {
    pub(super) fn load(&self) {
        let _ = self.0.send(Call::Load);
    }

    pub(super) fn store(&self, expected: Option<(Generation, u64)>, epoch: Epoch) {
        let _ = self.0.send(Call::Store(expected, epoch));
    }
}

/// Starts the thread; answers go to `answer`.
pub(super) fn serve(
    mut authority: Box<dyn Authority>,
    answer: impl Fn(Input) + Send + 'static,
) -> io::Result<Calls> {
    let (calls, taken) = unbounded();
    let work = move || {
        for call in taken {
            match call {
                Call::Load => loop {
                    match authority.load() {
                        Ok(epoch) => break answer(Input::AuthorityLoaded(epoch)),
                        Err(e) => tracing::warn!("the authority does not answer, asking again: {e}"),
                    }
                    std::thread::sleep(RETRY);
                },
                Call::Store(expected, epoch) => {
                    answer(Input::AuthorityStored(authority.store(expected, &epoch)));
                }
            }
        }
    };
    std::thread::Builder::new().name("authority".into()).spawn(work)?;
    Ok(Calls(calls))
}
