//! The processes behind volumes: instance manager, engines, replicas.

use std::process::ExitCode;

fn main() -> ExitCode {
    longhorn::daemon::main()
}
