//! What a queue thread's loop asks of a frontend.

use lh_block::Device;

use crate::{Completion, Payload, Ring};

/// A frontend on a queue thread. The loop routes completions to it by [`crate::Token::owner`].
pub trait Frontend {
    /// One of the frontend's own operations has come to an end, or a step further.
    fn completion(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>, completion: Completion);

    /// Called after every batch of completions: collects `device.poll_done()` and starts receives and sends.
    fn turn(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>);

    /// True for who serves clients that may give a request up and send it again elsewhere.
    fn looks(&self) -> bool {
        false
    }

    /// Requests that the device has are about to be begun: whoever serves clients that may have given up and sent the same again
    /// elsewhere looks for them now, and abandons what is theirs ([`Device::abandon`]).
    fn look(&mut self, device: &mut dyn Device<Payload>) {
        let _ = device;
    }
}
