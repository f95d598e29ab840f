//! What the conductor refuses, as whoever asked hears it (gRPC).

use control::engine::EngineError;
use datapath::conductor::CommandError;

pub(super) fn refusal(e: CommandError) -> EngineError {
    let text = e.to_string();
    match e {
        CommandError::Name(_) | CommandError::BadSize { .. } => EngineError::Invalid(text),
        CommandError::Exists(_) => EngineError::Exists(text),
        CommandError::NotFound(_) => EngineError::NotFound(text),
        CommandError::TooManySnapshots { .. }
        | CommandError::ChainFull(_)
        | CommandError::SnapshotsTooLarge { .. } => EngineError::NoRoom(text),
        // Nothing has failed, and nothing has changed: a size that its file system does not take, a name that it is still folding away.
        CommandError::Refused { .. }
        | CommandError::Removed(_)
        | CommandError::TooManyReplicas(_)
        | CommandError::TooManyWait(_)
        | CommandError::TooFewInSync { .. }
        | CommandError::Needed(_)
        | CommandError::Source(_)
        | CommandError::NotOpen(_)
        | CommandError::RequestsWait
        | CommandError::Scrubbing => EngineError::NotNow(text),
        CommandError::ShuttingDown => EngineError::Ending,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_replica_refuses_is_no_failure() {
        let refused = CommandError::Refused { replica: "v-r-1".into(), reason: "it is too large".into() };
        assert!(matches!(refusal(refused), EngineError::NotNow(text) if text.contains("it is too large")));
    }
}
