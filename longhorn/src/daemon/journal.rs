//! The kernel's thread that writes the journal of a replica's file system.
//!
//! Where that is ext4, the replica's flushes wait for this thread, which takes pages for what it writes. Short of memory it would
//! swap something out first; if that goes to the volume itself, both wait for ever
//! (`docs/decisions/0009-real-time-when-memory-is-short.md`).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::stat::{major, minor};

/// Bytes of a thread's name that kernels before 5.17 tell (TASK_COMM_LEN, without the end).
const NAME_MAX: usize = 15;

/// The number of kthreadd, whose children all threads of the kernel are, and no process is.
const KTHREADD: &str = "2";

/// The thread that writes the journal of the file system that `place` is on, or will be. `None` where that has no such thread
/// (XFS writes its log by workers), or it cannot be seen, as from a container with process numbers of its own.
pub(super) fn thread_of(place: &Path) -> Option<nix::libc::pid_t> {
    let there = place.ancestors().find_map(|p| fs::metadata(p).ok())?;
    let device = format!("/sys/dev/block/{}:{}", major(there.dev()), minor(there.dev()));
    let disk = fs::read_link(device).ok()?;
    // `jbd2/DISK-INODE` (jbd2_journal_init_inode, fs/jbd2/journal.c).
    let name = format!("jbd2/{}-", disk.file_name()?.to_str()?);
    let processes = fs::read_dir("/proc").ok()?;
    let mut numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers.find(|n: &nix::libc::pid_t| {
        fs::read_to_string(format!("/proc/{n}/stat")).is_ok_and(|stat| is_thread(&stat, &name))
    })
}

/// Whether this is what proc_pid_stat(5) says of a thread of the kernel whose name begins so.
fn is_thread(stat: &str, name: &str) -> bool {
    let Some((said, rest)) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(") ")) else {
        return false;
    };
    // State, then the parent: anybody may call a process as he likes.
    let by_the_kernel = rest.split(' ').nth(1) == Some(KTHREADD);
    by_the_kernel && (said.starts_with(name) || (said.len() == NAME_MAX && name.starts_with(said)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_threads_of_the_kernel_are_found_by_their_names() {
        let is = |stat: &str| is_thread(stat, "jbd2/nvme0n1p1-");
        assert!(is("95 (jbd2/nvme0n1p1-8) S 2 0 0 0 -1 2129984"), "as Linux 5.17 tells it");
        assert!(is("95 (jbd2/nvme0n1p1-) S 2 0 0 0 -1 2129984"), "cut short");
        assert!(!is("95 (jbd2/nvme0n1p1-8) S 1 0 0 0 -1 2129984"), "a process that is called so");
        assert!(!is("95 (jbd2/nvme0n1p2-8) S 2 0 0 0 -1 2129984"));
        assert!(!is("95 (jbd2/nvme0n1) S 2 0 0 0 -1 2129984"), "another disk's");
        assert!(!is("95 (a) S 2 (b) S 1 0 0"));
        assert!(!is(""));
    }
}
