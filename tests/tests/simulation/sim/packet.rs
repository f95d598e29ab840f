//! What travels between engine and replicas: headers as on the wire, payloads as block numbers.

use lh_wire::handshake::Verdict;
use lh_wire::{Control, Header, MapPage, ReplicaState};
use replica::serve::core::SessionHello;

use super::disk::Cell;
use tests::register::Stamp;

/// A payload.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// Nothing.
    None,
    /// One stamp per block of the range.
    Blocks(Vec<Stamp>),
    /// A layer's name: the payload of a `ReadLayer` request.
    Layer(String),
    /// A layer image.
    Image {
        /// The layer; empty for the head.
        layer: String,
        /// Its cells in the range.
        cells: Vec<Cell>,
    },
    /// What a layer holds of the range, in short.
    Digest {
        /// The layer; empty for the head.
        layer: String,
        /// Its cells in the range.
        cells: Vec<Cell>,
    },
    /// A control request.
    Control(Box<Control>),
    /// The answer to `Control::State`.
    State(Box<ReplicaState>),
    /// A page of a map.
    Map(Box<MapPage>),
    /// A refusal in words.
    Text(String),
}

impl Body {
    /// Bytes on the wire, and those of a layer image's trailer.
    pub(crate) fn lengths(&self) -> (u32, u32) {
        let bytes = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        match self {
            Self::None => (0, 0),
            Self::Blocks(blocks) => (bytes(blocks.len() * 4096), 0),
            Self::Image { layer, cells } => {
                let data = cells.iter().filter(|c| matches!(c, Cell::Data(_))).count() * 4096;
                let trailer = cells.len() + layer.len();
                (bytes(data + trailer), bytes(trailer))
            }
            Self::Layer(_)
            | Self::Digest { .. }
            | Self::Control(_)
            | Self::State(_)
            | Self::Map(_)
            | Self::Text(_) => (1, 0),
        }
    }
}

/// One message, or one step of the handshake.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    /// Engine to replica, first.
    Hello(SessionHello),
    /// Replica to engine: let in, or not.
    Verdict(Verdict),
    /// Either way.
    Message(Header, Body),
    /// The other side has closed, or died.
    End,
}
