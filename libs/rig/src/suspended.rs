//! A host that has been suspended, as far as its clocks tell (time_namespaces(7)).

use std::process::Command;
use std::thread;
use std::time::Duration;

/// How much more has passed there by CLOCK_BOOTTIME alone.
pub const SUSPENDED: Duration = Duration::from_secs(1_000_000);

const INSIDE: &str = "INSIDE_A_TIME_NAMESPACE";

/// Runs `test`, which is all that the calling test does, in a process of its own on a host that has been suspended for
/// [`SUSPENDED`]. It is left out, with a word, where no such thing may be made. A test that fails there is a panic here.
pub fn on_a_host_that_was_suspended(test: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return test();
    }
    let there = |what: &str| {
        let mut command = Command::new("unshare");
        command.args(["--time", "--boottime", &SUSPENDED.as_secs().to_string(), what]);
        command
    };
    let name = thread::current().name().expect("the thread has the test's name").to_owned();
    if !there("true").output().is_ok_and(|o| o.status.success()) {
        return println!("SKIP {name}: there is no time namespace to be had");
    }
    let program = std::env::current_exe().expect("the test's program");
    let mut again = there(program.to_str().expect("a path in UTF-8"));
    let ended = again.args(["--exact", &name]).env(INSIDE, "yes").output().expect("it is run again");
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && said.contains("1 passed"), "{said}");
}
