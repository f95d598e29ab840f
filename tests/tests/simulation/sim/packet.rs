//! What travels between engine and replicas: headers as on the wire, payloads as block numbers.

use lh_wire::handshake::Verdict;
use lh_wire::{Control, Header, MapPage, Places, ReplicaState};
use replica::serve::core::SessionHello;

use std::cell::{Cell as Shared, RefCell};
use std::rc::Rc;

use super::disk::Cell;
use super::grant::Grant;
use tests::register::Stamp;

/// What a piece of memory holds that is another request's by now.
const OTHERS: Stamp = Stamp(u64::MAX);

/// The blocks of a write where they lie in an engine's memory: a replica looks at them when it writes them.
#[derive(Clone, Debug)]
pub(crate) struct Lent(Rc<RefCell<Vec<Stamp>>>);

impl Lent {
    /// What is there now.
    ///
    /// # Panics
    /// If it is another request's: then its bytes would get into the replica's file.
    pub(crate) fn blocks(&self) -> Vec<Stamp> {
        let blocks = self.0.borrow().clone();
        assert!(
            !blocks.contains(&OTHERS),
            "a replica writes what was lent to it once, and is another's by now"
        );
        blocks
    }
}

/// The engine's end of it. When it lets go of it, the memory is used again, as long as its process lives.
#[derive(Debug)]
pub(crate) struct Memory {
    blocks: Rc<RefCell<Vec<Stamp>>>,
    process_lives: Rc<Shared<bool>>,
}

impl Memory {
    pub(crate) fn new(blocks: Vec<Stamp>, process_lives: &Rc<Shared<bool>>) -> Self {
        Self { blocks: Rc::new(RefCell::new(blocks)), process_lives: Rc::clone(process_lives) }
    }

    /// What a message says of it.
    pub(crate) fn lend(&self) -> Lent {
        Lent(Rc::clone(&self.blocks))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.process_lives.get() {
            self.blocks.borrow_mut().fill(OTHERS);
        }
    }
}

/// A payload.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// Nothing.
    None,
    /// One stamp per block of the range.
    Blocks(Vec<Stamp>),
    /// The same, lent.
    Lent(Lent),
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
    /// Where blocks are.
    Places(Box<Places>),
    /// Of each block of a range whether it holds data.
    Allocation(Vec<bool>),
}

impl Body {
    /// Bytes on the wire, and those of a layer image's trailer.
    pub(crate) fn lengths(&self) -> (u32, u32) {
        let bytes = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        match self {
            Self::None => (0, 0),
            Self::Blocks(blocks) => (bytes(blocks.len() * 4096), 0),
            Self::Lent(lent) => (bytes(lent.0.borrow().len() * 4096), 0),
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
            | Self::Places(_)
            | Self::Allocation(_)
            | Self::Text(_) => (1, 0),
        }
    }
}

/// What a write brings.
pub(crate) fn written(body: &Body) -> Option<Vec<Stamp>> {
    match body {
        Body::Blocks(stamps) => Some(stamps.clone()),
        Body::Lent(lent) => Some(lent.blocks()),
        _ => None,
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
    /// Engine to replica, over a connection of its own: wants to be granted the files.
    Ask(SessionHello),
    /// Replica to engine, over that connection, whose end is the grant's.
    Grant(Grant),
    /// The other side has closed, or died.
    End,
}
