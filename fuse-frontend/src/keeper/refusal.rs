//! Why a keeper does not do what it is asked for.

use crate::node::NodeError;

/// A refusal: a word that a program decides by, and a sentence.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) kind: &'static str,
    pub(super) text: String,
    /// The keeper ends when it has been told.
    pub(super) ends: bool,
}

impl Refusal {
    /// The same, as this keeper's last word.
    pub(super) fn at_the_end(self) -> Self {
        Self { ends: true, ..self }
    }
}

/// Kinds of [`Refusal`].
pub(super) mod kind {
    /// The volume is another root's.
    pub(crate) const OWNER: &str = "owner";
    /// Another engine serves.
    pub(crate) const BUSY: &str = "busy";
    /// The device is open somewhere.
    pub(crate) const IN_USE: &str = "in-use";
    /// This keeper is about to end; the next one may be started.
    pub(crate) const ENDING: &str = "ending";
    /// Something stands where the node should.
    pub(crate) const NODE: &str = "node";
    /// The device has other blocks than the engine serves.
    pub(crate) const BLOCKS: &str = "blocks";
    /// The request makes no sense now.
    pub(crate) const INVALID: &str = "invalid";
    /// A system call failed.
    pub(crate) const SYSTEM: &str = "system";
}

/// What stands in a node's way stands there at the next try, too; what the system fails with may pass.
impl From<NodeError> for Refusal {
    fn from(error: NodeError) -> Self {
        let kind = match error {
            NodeError::Live { .. } | NodeError::Foreign { .. } => kind::NODE,
            NodeError::Io { .. } => kind::SYSTEM,
        };
        refuse(kind, error)
    }
}

pub(super) fn refuse(kind: &'static str, text: impl std::fmt::Display) -> Refusal {
    Refusal { kind, text: text.to_string(), ends: false }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_shortage_is_not_what_stands_in_a_nodes_way() {
        let path = PathBuf::from("/dev/longhorn/vol");
        let kind = |error: NodeError| Refusal::from(error).kind;
        assert_eq!(kind(NodeError::Foreign { path: path.clone() }), kind::NODE);
        assert_eq!(kind(NodeError::Live { path: path.clone(), device: "sda".into() }), kind::NODE);
        assert_eq!(kind(NodeError::Io { path, source: io::ErrorKind::OutOfMemory.into() }), kind::SYSTEM);
    }
}
