//! A process that serves a block device must not wait for memory that waits for that device.

use lh_ring::sys;

/// Asks the kernel for what keeps such a process going when memory is short. Called first in the process: threads
/// inherit it. What the kernel refuses (containers) is said in the log, and the volume runs.
pub(super) fn prepare() {
    if let Err(e) = sys::set_io_flusher() {
        tracing::warn!(
            "PR_SET_IO_FLUSHER was refused ({e}): under memory pressure this process may wait for itself"
        );
    }
    if let Err(e) = sys::lock_memory_on_fault() {
        tracing::warn!(
            "memory cannot be locked ({e}): under memory pressure this process may wait for itself"
        );
    }
    // Killing it stops a volume; other processes go first (proc_pid_oom_score_adj(5)).
    if let Err(e) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        tracing::warn!("the OOM score cannot be lowered: {e}");
    }
}
