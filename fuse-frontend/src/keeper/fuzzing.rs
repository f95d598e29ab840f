//! A door for the fuzz target: what nothing outside of the keeper reads.

use super::message::Message;

/// Reads a message that begins with `begin` and goes on with `rest`: as this program would write it, and how many bytes of the rest are
/// another's. `None`: it is none.
pub fn message(begin: &[u8], mut rest: &[u8]) -> Option<(Vec<u8>, usize)> {
    let message = Message::read(&mut rest, begin).ok()?;
    Some((message.encode().into_bytes(), rest.len()))
}
