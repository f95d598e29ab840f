//! The loop of a queue thread: a device, a frontend that shows it, and one ring for both.

use std::io;
use std::time::Duration;

use lh_block::Device;

use crate::{Bell, Completion, Frontend, Payload, Pool, Ring, Token};

/// [`Token::owner`] of the loop itself.
pub const OWNER_LOOP: u8 = 0;
/// [`Token::owner`] of the device's connections.
pub const OWNER_DEVICE: u8 = 1;
/// [`Token::owner`] that a frontend uses.
pub const OWNER_FRONTEND: u8 = 2;

/// A device whose own operations are on the queue thread's ring.
pub trait QueueDevice: Device<Payload> {
    /// Wakes the thread.
    fn bell(&self) -> &Bell;

    /// Where the payloads of requests have to be from.
    fn pool(&self) -> &Pool;

    /// The thread is to end when its frontend has.
    fn is_ending(&self) -> bool;

    /// Before the ring's turn, first: takes what other threads have sent.
    fn begin_turn(&mut self);

    /// Clients may give requests up, and send them again elsewhere ([`Frontend::looks`]).
    fn watch(&mut self, watched: bool) {
        let _ = watched;
    }

    /// Requests are about to be begun ([`QueueDevice::let_in`]): that have waited outside, in no order with others; or, of clients that
    /// are watched, that have their place in the order now.
    fn lets_in(&self) -> bool {
        false
    }

    /// Begins them. The frontend has looked whether their clients are still there.
    fn let_in(&mut self) {}

    /// Before the ring's turn, last: starts sends and receives. Returns how long the turn may wait.
    fn end_turn(&mut self, ring: &mut Ring) -> Option<Duration>;

    /// After the ring's turn, which may have waited for long, and before any of its completions is handed out, a frontend's included:
    /// requests that those bring begin now.
    fn woke(&mut self) {}

    /// A completion with [`OWNER_DEVICE`].
    fn completion(&mut self, completion: Completion);
}

/// What a frontend's owner decides at every turn of the loop.
pub trait Overseer<D, F> {
    /// Called once per turn with the frontend; false ends the thread.
    fn oversee(&mut self, ring: &mut Ring, device: &mut D, frontend: &mut F) -> bool;
}

/// The loop of a queue thread: ends when `overseer` says so, or with the ring's error.
///
/// # Errors
/// The ring cannot be used any more, or does not hear the bell: other threads could tell it nothing.
pub fn run_queue<D: QueueDevice, F: Frontend>(
    ring: &mut Ring,
    device: &mut D,
    frontend: &mut F,
    overseer: &mut impl Overseer<D, F>,
) -> io::Result<()> {
    ring.wake_on(Token::new(OWNER_LOOP, 0, 0, 0), &device.bell().clone());
    loop {
        device.watch(frontend.looks());
        device.begin_turn();
        let_in(device, frontend);
        frontend.turn(ring, device);
        let_in(device, frontend);
        if !overseer.oversee(ring, device, frontend) {
            return Ok(());
        }
        let timeout = device.end_turn(ring);
        ring.turn(timeout)?;
        device.woke();
        while let Some(completion) = ring.next() {
            match completion.token.owner {
                OWNER_DEVICE => device.completion(completion),
                OWNER_FRONTEND => frontend.completion(ring, device, completion),
                OWNER_LOOP => {
                    let deaf =
                        |e| format!("a queue cannot hear other threads: reading its eventfd fails: {e}");
                    completion.result.map_err(|e| io::Error::new(e.kind(), deaf(e)))?;
                }
                _ => {}
            }
        }
    }
}

/// Lets the device begin what waits for that, after a look at the clients. Twice: what has waited outside has its place in the order
/// only then, and clients are looked for again.
fn let_in<D: QueueDevice, F: Frontend>(device: &mut D, frontend: &mut F) {
    for _ in 0..2 {
        if device.lets_in() {
            frontend.look(device);
            device.let_in();
        }
    }
}

/// The frontend of a volume that shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFrontend;

impl Frontend for NoFrontend {
    fn completion(&mut self, _: &mut Ring, _: &mut dyn Device<Payload>, _: Completion) {}
    fn turn(&mut self, _: &mut Ring, _: &mut dyn Device<Payload>) {}
}
