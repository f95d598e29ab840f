//! The end of a TCP connection on its way to this host's other end of it.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(20);

/// FIN_WAIT2 in `/proc/net/tcp`: the other end has the last byte and the end behind it, whether it has read them or not.
const END_ACKNOWLEDGED: &str = "05";

/// Waits until the other end of a TCP connection could hear that this one was shut down. A unix socket hears it at once; here it
/// takes a moment, and on a busy host a longer one. Panics after 20 s.
pub fn until_end_arrives(socket: &impl AsFd) {
    let number = socket.as_fd().as_raw_fd();
    let inode = fs::metadata(format!("/proc/self/fd/{number}")).expect("it is open").ino().to_string();
    let state = || {
        let table = fs::read_to_string("/proc/self/net/tcp").expect("proc_pid_net(5)");
        let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.find(|row| row.get(9) == Some(&inode.as_str())).map(|row| row[3].to_owned())
    };
    let deadline = Instant::now() + PATIENCE;
    while state().as_deref() != Some(END_ACKNOWLEDGED) {
        assert!(Instant::now() < deadline, "its end has not arrived: {:?}", state());
        std::thread::sleep(Duration::from_millis(1));
    }
}
