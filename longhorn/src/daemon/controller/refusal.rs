//! What the conductor refuses, as whoever asked hears it (gRPC).

use control::engine::EngineError;
use datapath::conductor::CommandError;

pub(super) fn refusal(e: CommandError) -> EngineError {
    let text = e.to_string();
    match e {
        CommandError::Name(_) | CommandError::BadSize { .. } => EngineError::Invalid(text),
        CommandError::Exists(_) => EngineError::Exists(text),
        CommandError::NotFound(_) => EngineError::NotFound(text),
        CommandError::Refused { .. } => EngineError::Failed(text),
        CommandError::TooManySnapshots { .. }
        | CommandError::ChainFull(_)
        | CommandError::SnapshotsTooLarge { .. } => EngineError::NoRoom(text),
        CommandError::Removed(_)
        | CommandError::TooManyReplicas(_)
        | CommandError::TooManyWait(_)
        | CommandError::TooFewInSync { .. }
        | CommandError::Needed(_)
        | CommandError::NotOpen(_)
        | CommandError::RequestsWait
        | CommandError::Scrubbing => EngineError::NotNow(text),
        CommandError::ShuttingDown => EngineError::Ending,
    }
}
