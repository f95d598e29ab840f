//! How Longhorn's services say how far something is that takes time.

/// It goes on.
pub(crate) const IN_PROGRESS: &str = "in_progress";
/// It has ended well.
pub(crate) const COMPLETE: &str = "complete";
/// It has ended otherwise.
pub(crate) const ERROR: &str = "error";

/// Whole percents, 100 at most.
pub(crate) fn percent(done: u64, total: u64) -> i32 {
    let percent = done.saturating_mul(100).checked_div(total).unwrap_or(0).min(100);
    i32::try_from(percent).unwrap_or(100)
}
