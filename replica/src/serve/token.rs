//! What the tokens of operations say: whose they are, and what for.

/// Owner of all tokens here: the thread has no other part.
pub(super) const OWNER: u8 = 1;

/// What an operation is for.
pub(super) mod kind {
    pub(in crate::serve) const BELL: u8 = 0;
    pub(in crate::serve) const ACCEPT: u8 = 1;
    pub(in crate::serve) const RECV: u8 = 2;
    pub(in crate::serve) const SEND: u8 = 3;
    pub(in crate::serve) const SHUTDOWN: u8 = 4;
    /// These carry a request's place.
    pub(in crate::serve) const READ: u8 = 5;
    pub(in crate::serve) const WRITE: u8 = 6;
    pub(in crate::serve) const PUNCH: u8 = 7;
    /// These belong to the flusher.
    pub(in crate::serve) const SYNC: u8 = 8;
    pub(in crate::serve) const IDLE_PUNCH: u8 = 9;
    /// These belong to the intent bitmap.
    pub(in crate::serve) const MARK_WRITE: u8 = 10;
    pub(in crate::serve) const MARK_SYNC: u8 = 11;
    /// Something has come from a stranger over a unix socket.
    pub(in crate::serve) const KNOCK: u8 = 12;
}
