//! Works with volumes.

use std::process::ExitCode;

fn main() -> ExitCode {
    longhorn::ctl::main()
}
