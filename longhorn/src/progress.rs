//! What is being waited for: a moving line on a terminal, plain lines elsewhere, always on standard error.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::tell::tell;
use indicatif::{ProgressBar, ProgressStyle, WeakProgressBar};

/// What is drawn on the terminal now, for whoever ends the process from another thread.
static DRAWN: Mutex<Vec<WeakProgressBar>> = Mutex::new(Vec::new());

/// Takes everything off the terminal that is drawn there. True if there was anything.
pub(crate) fn clear() -> bool {
    let drawn = std::mem::take(&mut *DRAWN.lock().unwrap_or_else(PoisonError::into_inner));
    let bars: Vec<ProgressBar> = drawn.iter().filter_map(WeakProgressBar::upgrade).collect();
    bars.iter().for_each(ProgressBar::finish_and_clear);
    !bars.is_empty()
}

/// A bar that [`clear`] knows of.
fn known(bar: ProgressBar) -> ProgressBar {
    let mut drawn = DRAWN.lock().unwrap_or_else(PoisonError::into_inner);
    drawn.retain(|bar| bar.upgrade().is_some());
    drawn.push(bar.downgrade());
    bar
}

/// Tells what is being done until it is dropped.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    last: String,
    /// Whom it is about, where several are told of at once.
    about: Option<String>,
}

impl Progress {
    /// Nothing is said yet.
    pub(crate) fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = known(ProgressBar::new_spinner());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { bar, last: String::new(), about: None }
    }

    /// One of several that work at the same time: plain lines, each with the name of what it is about.
    pub(crate) fn about(name: &str) -> Self {
        Self { bar: None, last: String::new(), about: Some(name.to_owned()) }
    }

    /// A bar for work of a known size in bytes.
    pub(crate) fn of_bytes(what: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes} {eta}");
            let bar = ProgressBar::no_length()
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(what.to_owned());
            known(bar)
        });
        Self { bar, last: String::new(), about: None }
    }

    /// Says what is being done now.
    pub(crate) fn say(&mut self, what: &str) {
        if self.last == what {
            return;
        }
        what.clone_into(&mut self.last);
        match (&self.bar, &self.about) {
            (Some(bar), _) => bar.set_message(what.to_owned()),
            (None, Some(name)) => tell!("{name}: {what}"),
            (None, None) => tell!("{what}"),
        }
    }

    /// Says how far it is.
    pub(crate) fn at(&self, done: u64, of: u64) {
        // Nothing of nothing would be drawn as a full bar.
        if let Some(bar) = self.bar.as_ref().filter(|_| of > 0) {
            bar.set_length(of);
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
