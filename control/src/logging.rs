//! How much a process logs, and how that changes while it runs.
//!
//! What filters lines belongs to the program, which hands a switch over once ([`switch`]). Whoever is asked to log more or
//! less turns it ([`set`]): by gRPC ([`service`]), or because the cluster's setting says so. There is one log in a process,
//! and so one switch.

use std::sync::OnceLock;

use tonic::{Request, Response, Status};
pub use tracing::Level;

use crate::proto::process::LogLevel;
use crate::proto::process::logging_server::{Logging, LoggingServer};

/// The variable in the environment of a process that says at which level it begins to log. What its user says counts before
/// that.
pub const BEGINS_AT: &str = "LONGHORN_LOG_LEVEL";

type Turn = Box<dyn Fn(Level) + Send + Sync>;

static SWITCH: OnceLock<Turn> = OnceLock::new();

/// Has `turn` called with each level that is asked for. Only the first one in a process is. Without any the level stays as it
/// is: whoever started the process has said what it logs.
pub fn switch(turn: impl Fn(Level) + Send + Sync + 'static) {
    let _ = SWITCH.set(Box::new(turn));
}

/// Logs at this level from now on, if that is not settled.
pub fn set(level: Level) {
    if let Some(turn) = SWITCH.get() {
        turn(level);
    }
}

/// The level that a word names, in any case: Longhorn's are Panic, Fatal, Error, Warn, Info, Debug and Trace. What goes
/// before an error here ends the process, so that the first two are the third.
pub fn parse(word: &str) -> Option<Level> {
    let levels = [
        (&["panic", "fatal", "error"][..], Level::ERROR),
        (&["warn", "warning"], Level::WARN),
        (&["info"], Level::INFO),
        (&["debug"], Level::DEBUG),
        (&["trace"], Level::TRACE),
    ];
    let names = |words: &[&str]| words.iter().any(|known| known.eq_ignore_ascii_case(word));
    levels.into_iter().find(|(words, _)| names(words)).map(|(_, level)| level)
}

/// The word for a level, as it is told and as [`parse`] reads it.
pub fn word(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

/// The level of a request.
///
/// # Errors
/// `INVALID_ARGUMENT`: the word is none.
pub(crate) fn asked_for(asked: &str) -> Result<Level, Status> {
    parse(asked).ok_or_else(|| {
        Status::invalid_argument(format!("{asked:?} is no level: error, warn, info, debug or trace"))
    })
}

/// What turns this process's switch for whoever may call it.
pub fn service() -> LoggingServer<impl Logging> {
    LoggingServer::new(Service)
}

struct Service;

#[tonic::async_trait]
impl Logging for Service {
    async fn level_set(&self, request: Request<LogLevel>) -> Result<Response<()>, Status> {
        set(asked_for(&request.into_inner().level)?);
        Ok(Response::new(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longhorns_words_are_levels_in_any_case() {
        let cases = [
            ("Panic", Some(Level::ERROR)),
            ("Fatal", Some(Level::ERROR)),
            ("Error", Some(Level::ERROR)),
            ("Warn", Some(Level::WARN)),
            ("INFO", Some(Level::INFO)),
            ("debug", Some(Level::DEBUG)),
            ("Trace", Some(Level::TRACE)),
            ("", None),
            ("off", None),
            ("5", None),
        ];
        for (text, level) in cases {
            assert_eq!(parse(text), level, "{text:?}");
        }
        for level in [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE] {
            assert_eq!(parse(word(level)), Some(level));
        }
    }
}
