//! What time it is, where that is written or compared with what was written.

use k8s_openapi::jiff::Timestamp;

/// Tells the time: the system's, unless somebody gives another one.
#[derive(Clone, Copy, Debug)]
pub struct Clock(fn() -> Timestamp);

impl Default for Clock {
    fn default() -> Self {
        Self(Timestamp::now)
    }
}

impl Clock {
    /// One that says what this says.
    pub const fn new(tells: fn() -> Timestamp) -> Self {
        Self(tells)
    }

    /// What time it is.
    pub fn now(self) -> Timestamp {
        (self.0)()
    }
}
