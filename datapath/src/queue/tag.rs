//! Tags of requests: what a member's answer belongs to.
//!
//! The low 16 bits name a slot or, from 0xfffc on, one of four other things; the bits above count, so that the
//! answer to an abandoned request is told from the one to what took its place.

use crate::message::ControlId;

/// Low bits of the tags of what the driver asks for by itself; the machine never sees an answer to it.
pub const PLACES: u64 = 0xfffc;

const CONTROL: u64 = 0xfffd;
const FLUSH: u64 = 0xfffe;
const PING: u64 = 0xffff;

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// A slot's read, write or copy.
    Slot { slot: u16, attempt: u32 },
    /// The flush with this number.
    Flush(u64),
    /// A control request. 48 bits of its number.
    Control(ControlId),
    /// A ping.
    Ping(u32),
}

impl Tag {
    pub(super) const fn pack(self) -> u64 {
        match self {
            Self::Slot { slot, attempt } => (attempt as u64) << 16 | slot as u64,
            Self::Flush(number) => number << 16 | FLUSH,
            Self::Control(ControlId(id)) => id << 16 | CONTROL,
            Self::Ping(number) => (number as u64) << 16 | PING,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "takes apart what `pack` put together")]
    pub(super) const fn unpack(tag: u64) -> Self {
        let count = tag >> 16;
        match tag & 0xffff {
            CONTROL => Self::Control(ControlId(count)),
            FLUSH => Self::Flush(count),
            PING => Self::Ping(count as u32),
            slot => Self::Slot { slot: slot as u16, attempt: count as u32 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for tag in [
            Tag::Slot { slot: 511, attempt: u32::MAX },
            Tag::Flush(7),
            Tag::Control(ControlId(9)),
            Tag::Ping(u32::MAX),
        ] {
            assert_eq!(Tag::unpack(tag.pack()), tag);
        }
    }
}
