//! The time of day as Longhorn's `.meta` files have it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Now, in UTC, as RFC 3339 with whole seconds.
pub(super) fn now() -> String {
    // A clock before 1970 is as good as one that stands there.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    lh_block::rfc3339(since.as_secs())
}
