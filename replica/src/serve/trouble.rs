//! What goes wrong on the disk: it is noted for people, and the machine has a word for it.

use std::io;

use super::Status;
use super::core::Failure;
use super::status::DiskTrouble;
use crate::store::ChainError;

/// Why a record was not made durable.
pub(super) enum Trouble {
    Io(io::Error),
    Chain(ChainError),
    YoungerEpoch,
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<ChainError> for Trouble {
    fn from(error: ChainError) -> Self {
        Self::Chain(error)
    }
}

impl Trouble {
    /// The machine's word for it; what the disk said is noted for people. Where an operation on the chain has begun and not
    /// ended nobody knows what the directory holds, be it for a full disk: the next process looks.
    pub(super) fn into_failure(self, status: &Status) -> Failure {
        match self {
            Self::Io(error) => note(status, &error),
            Self::Chain(ChainError::Io { what, source }) => {
                status.set_error(format!("{what}: {source}"));
                let full = failure_of(&source) == Failure::NoSpace;
                status.set_trouble(if full { DiskTrouble::Full } else { DiskTrouble::Failed });
                tracing::error!("{what}: {source}");
                Failure::Io
            }
            Self::Chain(refusal) => Failure::Refused(refusal.to_string().into()),
            Self::YoungerEpoch => Failure::Refused("this replica has a younger epoch".into()),
        }
    }
}

/// Notes an error of the disk for people, and gives the machine's word for it.
pub(super) fn note(status: &Status, error: &io::Error) -> Failure {
    tracing::error!("{error}");
    status.set_error(error.to_string());
    let failure = failure_of(error);
    if failure == Failure::Io {
        status.set_trouble(DiskTrouble::Failed);
    }
    failure
}

/// A full disk is no failure of the replica; everything else is.
fn failure_of(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::NoSpace,
        _ => Failure::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full disk is a reason to refuse what has not begun, and a failure of what has.
    #[test]
    fn an_operation_that_broke_off_half_way_fails_the_replica() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let status = Status::default();
        assert_eq!(Trouble::Io(full()).into_failure(&status), Failure::NoSpace);
        assert_eq!(
            status.trouble(),
            DiskTrouble::None,
            "a sync for which there was no room has taken away what it was for"
        );
        let begun = ChainError::Io { what: "carrying out a snapshot".into(), source: full() };
        assert_eq!(Trouble::Chain(begun).into_failure(&status), Failure::Io);
        let refused = Trouble::Chain(ChainError::NoSpace("a snapshot".into())).into_failure(&status);
        assert!(matches!(refused, Failure::Refused(_)));
        assert_eq!(status.trouble(), DiskTrouble::Full, "what was answered is there");
        assert_eq!(note(&status, &io::ErrorKind::InvalidData.into()), Failure::Io);
        note(&status, &full());
        assert_eq!(status.trouble(), DiskTrouble::Failed, "whatever came last");
    }
}
