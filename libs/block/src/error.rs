//! Why a request failed, and the one map from that to an errno.

use thiserror::Error;

/// The reason given to a frontend for a failed request. Each variant is a different decision for the client;
/// everything that only a person needs is in the log of the part that met the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IoError {
    /// The range is not inside the volume.
    #[error("beyond the end of the volume")]
    OutOfRange,
    /// Offset or length is no multiple of the logical block, or a flag is unknown.
    #[error("invalid request")]
    Invalid,
    /// Every replica is out of space.
    #[error("no space left on any replica")]
    NoSpace,
    /// A fast write-zeroes would have had to write (NBD protocol, NBD_CMD_FLAG_FAST_ZERO).
    #[error("cannot be done fast")]
    NotSupported,
    /// The volume is read-only.
    #[error("volume is read-only")]
    ReadOnly,
    /// No replica can serve and none came back within the volume's `ioTimeout`.
    #[error("no replica came back in time")]
    TimedOut,
    /// A medium error on every replica that could have served.
    #[error("input/output error")]
    Io,
    /// The engine is stopping.
    #[error("the volume is being stopped")]
    ShuttingDown,
}

impl IoError {
    /// The Linux errno that says the same (asm-generic/errno-base.h and errno.h).
    pub const fn errno(self) -> i32 {
        match self {
            Self::OutOfRange | Self::Invalid => 22, // EINVAL
            Self::NoSpace => 28,                    // ENOSPC
            Self::NotSupported => 95,               // EOPNOTSUPP
            Self::ReadOnly => 30,                   // EROFS
            Self::TimedOut => 110,                  // ETIMEDOUT
            Self::Io => 5,                          // EIO
            Self::ShuttingDown => 108,              // ESHUTDOWN
        }
    }
}
