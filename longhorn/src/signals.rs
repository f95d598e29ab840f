//! Signals as a program begins.

use nix::sys::signal::SigSet;

/// Lets every signal through. Whoever starts a program hands down what he has blocked, as one that waits for his signals on a thread
/// has all of them: neither SIGTERM nor Ctrl-C would end this program, nor anything that it starts. To be called before there are threads.
pub(crate) fn unblock() {
    // What it can fail of is no mask (pthread_sigmask(3)).
    let _ = SigSet::empty().thread_set_mask();
}
