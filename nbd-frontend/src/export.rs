//! What clients are told of the volume.

use lh_block::Geometry;

use crate::proto::transmission_flag as flag;

/// The one export of a server: a volume under its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The volume's name. The empty name stands for it as well, as the default export.
    pub name: String,
    /// A line for people, or empty.
    pub description: String,
    /// Writes are refused with `NBD_EPERM`.
    pub read_only: bool,
}

impl Export {
    /// True if a client that asks for `name` means this export.
    pub fn answers_to(&self, name: &str) -> bool {
        name.is_empty() || name == self.name
    }
}

/// How replies are framed, as agreed in the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured reply chunks.
    Structured,
    /// Extended requests and reply chunks.
    Extended,
}

/// What a client and this server agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// How replies are framed.
    pub framing: Framing,
    /// `base:allocation` was selected: block status may be asked for.
    pub allocation: bool,
    /// The client has asked for the block sizes, and is held to them.
    pub block_sizes: bool,
}

impl Agreed {
    /// The transmission flags for a client with whom this was agreed.
    pub fn transmission_flags(self, export: &Export) -> u16 {
        // The device's flush covers every answered write of the volume, whichever connection or queue carried it.
        let mut flags = flag::HAS_FLAGS
            | flag::SEND_FLUSH
            | flag::SEND_FUA
            | flag::SEND_TRIM
            | flag::SEND_WRITE_ZEROES
            | flag::CAN_MULTI_CONN
            | flag::SEND_CACHE
            | flag::SEND_FAST_ZERO;
        if export.read_only {
            flags |= flag::READ_ONLY;
        }
        if self.framing != Framing::Simple {
            flags |= flag::SEND_DF;
        }
        if self.framing == Framing::Extended && self.allocation {
            flags |= flag::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }
}

/// The block sizes that a client is told: minimum, preferred, maximum ("Block size constraints").
pub(crate) fn block_sizes(geometry: &Geometry) -> (u32, u32, u32) {
    (geometry.logical_block, geometry.physical_block.max(geometry.logical_block), geometry.max_transfer)
}
