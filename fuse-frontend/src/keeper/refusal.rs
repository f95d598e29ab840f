//! Why a keeper does not do what it is asked for.

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

pub(super) fn refuse(kind: &'static str, text: impl std::fmt::Display) -> Refusal {
    Refusal { kind, text: text.to_string(), ends: false }
}
