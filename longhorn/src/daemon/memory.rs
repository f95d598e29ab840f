//! A process that serves a block device must not wait for memory that waits for that device.

use std::io;
use std::time::Duration;

use lh_ring::sys::{self, Class, PressureTrigger};

use crate::arguments::Realtime;

/// Without pressure for so long, it is over.
const CALM: Duration = Duration::from_secs(10);

/// Asks the kernel for what keeps such a process going when memory is short. Called first in the process: threads
/// inherit it. What the kernel refuses (containers) is said in the log, and the volume runs. `short` is told when memory
/// becomes short, and when it no longer is, by a thread that lives as long as the process. `journal` is a thread of the
/// kernel's that this process waits for, and is given what its own threads are.
pub(super) fn prepare(
    realtime: Realtime,
    journal: Option<nix::libc::pid_t>,
    short: impl Fn(bool) + Send + 'static,
) {
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
    let done = match realtime {
        Realtime::Never => Ok(()),
        // Threads inherit it.
        Realtime::Always => sys::set_class(0, Class::Realtime).and_then(|()| {
            put(journal, Class::Realtime);
            look_out(short)
        }),
        Realtime::Pressure => look_out(move |now_short| {
            let class = if now_short { Class::Realtime } else { Class::Usual };
            put_all(class);
            put(journal, class);
            short(now_short);
        }),
    };
    if let Err(e) = done {
        tracing::warn!(
            "what gives this process memory when it is short was refused ({e}): it may wait for itself then"
        );
    }
}

/// Starts a thread that tells `short` what the kernel says of memory.
fn look_out(short: impl Fn(bool) + Send + 'static) -> io::Result<()> {
    let trigger = PressureTrigger::new()?;
    // Refused here, it is said.
    let before = sys::class();
    sys::set_class(0, Class::Realtime)?;
    sys::set_class(0, before)?;
    let care = move || {
        // The one that helps the others may not wait itself; it hardly ever runs.
        let _ = sys::set_class(0, Class::Realtime);
        let ended = care(&trigger, &short);
        short(false);
        tracing::warn!("memory pressure is not seen any more: {ended}");
    };
    std::thread::Builder::new().name("memory".into()).spawn(care)?;
    Ok(())
}

/// Goes on for ever, but for an error.
fn care(trigger: &PressureTrigger, short: &impl Fn(bool)) -> io::Error {
    loop {
        if let Err(e) = trigger.wait(None) {
            return e;
        }
        tracing::info!("memory is short");
        loop {
            // Every time: threads may be new.
            short(true);
            match trigger.wait(Some(CALM)) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return e,
            }
        }
        short(false);
        tracing::info!("memory is no longer short");
    }
}

/// Several replicas of a file system do so by turns: what the last one says stays, and they all see the same shortage.
fn put(journal: Option<nix::libc::pid_t>, class: Class) {
    if let Some(Err(e)) = journal.map(|thread| sys::set_class(thread, class)) {
        tracing::debug!("the journal's thread keeps its class: {e}");
    }
}

/// Those of io_uring, too; not the calling one. A thread that cannot be changed has ended, or the next time tells.
fn put_all(class: Class) {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return };
    let own = nix::unistd::gettid().as_raw();
    let numbers = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    for thread in numbers.filter(|n| *n != own) {
        let _ = sys::set_class(thread, class);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_but_the_calling_one_change_their_class() {
        let (ask, asked) = crossbeam_channel::bounded::<()>(0);
        let (tell, told) = crossbeam_channel::bounded(0);
        let other = std::thread::spawn(move || asked.iter().for_each(|()| tell.send(sys::class()).unwrap()));
        let class_of_other = || {
            ask.send(()).unwrap();
            told.recv().unwrap()
        };
        let allowed = std::thread::spawn(|| sys::set_class(0, Class::Realtime)).join().unwrap().is_ok();
        put_all(Class::Realtime);
        let during = (class_of_other(), sys::class());
        put_all(Class::Usual);
        assert_eq!(during, (if allowed { Class::Realtime } else { Class::Usual }, Class::Usual));
        assert_eq!(class_of_other(), Class::Usual);
        drop(ask);
        other.join().unwrap();
    }
}
