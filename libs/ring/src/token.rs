//! Who asked, and what became of it.

use std::io;

use crate::{Fd, Payload};

/// The caller's name for an operation, given back with its completion. The ring never interprets it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token {
    /// Part of the loop that gets the completion: its own timers and bells, the device, the frontend.
    pub owner: u8,
    /// What the owner did: receive, send, read, ...
    pub kind: u8,
    /// Connection, member or file.
    pub slot: u16,
    /// Request, or a count that tells two users of one slot apart.
    pub data: u32,
}

impl Token {
    /// A token of these four.
    pub const fn new(owner: u8, kind: u8, slot: u16, data: u32) -> Self {
        Self { owner, kind, slot, data }
    }
}

impl From<Token> for u64 {
    fn from(t: Token) -> Self {
        Self::from(t.owner) << 56 | Self::from(t.kind) << 48 | Self::from(t.slot) << 32 | Self::from(t.data)
    }
}

impl From<u64> for Token {
    #[expect(clippy::cast_possible_truncation, reason = "splits a number into its parts")]
    fn from(n: u64) -> Self {
        Self { owner: (n >> 56) as u8, kind: (n >> 48) as u8, slot: (n >> 32) as u16, data: n as u32 }
    }
}

/// One finished step of an operation.
#[derive(Debug)]
pub struct Completion {
    /// The operation's token.
    pub token: Token,
    /// Bytes done for reads, writes, receives (0: end of stream) and sends, ready events for a poll, 0 otherwise.
    /// A cancelled operation fails with `ECANCELED`; a timer that ran out is a success.
    pub result: io::Result<u32>,
    /// The operation goes on; more completions follow under the same token.
    pub more: bool,
    /// The memory of a [`crate::Ring::readv`], given back, also when the read failed.
    pub payload: Option<Payload>,
    /// The connection that [`crate::Ring::accept`] took.
    pub accepted: Option<Fd>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_packing() {
        let t = Token::new(0xfe, 0xdc, 0xba98, 0x7654_3210);
        assert_eq!(u64::from(t), 0xfedc_ba98_7654_3210);
        assert_eq!(Token::from(u64::from(t)), t);
    }
}
