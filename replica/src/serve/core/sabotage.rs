//! Switches that take one mechanism out of the machine each, so that tests can show that they notice. Compiled only
//! with the feature `sabotage`.

/// Which mechanisms are out. All off by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sabotage {
    /// A new session is let in while requests of earlier ones still run (`docs/invariants.md`, 2).
    pub fence_without_drain: bool,
    /// Older generations, and equal ones of another engine, are let in (`docs/invariants.md`, 2).
    pub accept_stale: bool,
    /// The ranges of a connection's last writes are forgotten when it ends (`docs/invariants.md`, 4).
    pub forget_in_doubt: bool,
    /// A flush and a FUA write are answered without a sync that began after them (`docs/invariants.md`, 5).
    pub flush_early: bool,
    /// Writes do not wait for the bits of the intent bitmap (`docs/invariants.md`, 4).
    pub intent_not_durable: bool,
    /// What a leaver may lack is what is written after it left (`docs/invariants.md`, 8).
    pub map_begins_empty: bool,
    /// A replica that was out goes on with what it kept of others (`docs/invariants.md`, 8).
    pub map_with_gap: bool,
    /// Marks are taken back before what they stand for is saved for those who are out (`docs/invariants.md`, 8).
    pub missed_not_saved: bool,
    /// What is kept of others is believed after a revert (`docs/invariants.md`, 8).
    pub map_survives_revert: bool,
    /// Zeroes over nothing leave no mark where a layer below may yet be repaired (`docs/invariants.md`, 10).
    pub zero_over_doubt: bool,
}
