//! What is being waited for: a moving line on a terminal, plain lines elsewhere, always on standard error.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::next_step;
use crate::tell::tell;
use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle, WeakProgressBar};

/// What is drawn on the terminal now, for whoever ends the process from another thread.
static DRAWN: Mutex<Vec<WeakProgressBar>> = Mutex::new(Vec::new());

/// Takes everything off the terminal that is drawn there. True if there was anything.
pub(crate) fn clear() -> bool {
    let drawn = std::mem::take(&mut *DRAWN.lock().unwrap_or_else(PoisonError::into_inner));
    let bars: Vec<ProgressBar> = drawn.iter().filter_map(WeakProgressBar::upgrade).collect();
    bars.iter().for_each(ProgressBar::finish_and_clear);
    !bars.is_empty()
}

/// A bar that [`clear`] knows of, on a terminal that can draw it: a dumb one (`TERM=dumb`) shows lines, and nothing that moves.
fn drawn(bar: impl FnOnce() -> ProgressBar) -> Option<ProgressBar> {
    let bar = std::io::stderr().is_terminal().then(bar).filter(|bar| !bar.is_hidden())?;
    let mut drawn = DRAWN.lock().unwrap_or_else(PoisonError::into_inner);
    drawn.retain(|bar| bar.upgrade().is_some());
    drawn.push(bar.downgrade());
    Some(bar)
}

/// Characters of what is done beside a bar, so that with the largest sizes the line still fits 80 columns.
const BESIDE_A_BAR: usize = 28;

/// What is done, no longer than there is room for.
fn beside_a_bar(what: &str) -> String {
    match what.char_indices().nth(BESIDE_A_BAR) {
        None => what.to_owned(),
        Some(_) => what.chars().take(BESIDE_A_BAR - 3).chain("...".chars()).collect(),
    }
}

/// How long something is being done before it is told how long the rest takes: by its first steps, as the small files of a volume that
/// is deleted, it would be hours.
const TELLING: Duration = Duration::from_secs(2);

/// The time that is left, once it can be told.
fn left(state: &ProgressState, to: &mut dyn std::fmt::Write) {
    if can_be_told(state.elapsed(), state.pos(), state.len()) {
        let _ = write!(to, ", {:#} left", HumanDuration(state.eta()));
    }
}

fn can_be_told(elapsed: Duration, done: u64, of: Option<u64>) -> bool {
    elapsed >= TELLING && done > 0 && of.is_some_and(|all| done < all)
}

/// Tells what is being done until it is dropped.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    /// The bar tells of bytes.
    is_of_bytes: bool,
    last: String,
    /// Whom it is about, where several are told of at once.
    about: Option<String>,
}

impl Progress {
    /// Nothing is said yet.
    pub(crate) fn new() -> Self {
        let bar = drawn(ProgressBar::new_spinner);
        if let Some(bar) = &bar {
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        Self { bar, is_of_bytes: false, last: String::new(), about: None }
    }

    /// One of several that work at the same time: plain lines, each with the name of what it is about.
    pub(crate) fn about(name: &str) -> Self {
        Self { bar: None, is_of_bytes: false, last: String::new(), about: Some(name.to_owned()) }
    }

    /// A bar for work of a known size in bytes.
    pub(crate) fn of_bytes(what: &str) -> Self {
        let bar = drawn(|| {
            let style = ProgressStyle::with_template("{msg} {bar:16} {bytes}/{total_bytes}{left}");
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).with_key("left", left);
            ProgressBar::no_length().with_style(style).with_message(beside_a_bar(what))
        });
        Self { bar, is_of_bytes: true, last: String::new(), about: None }
    }

    /// Says what is being done now.
    pub(crate) fn say(&mut self, what: &str) {
        if self.last == what {
            return;
        }
        what.clone_into(&mut self.last);
        match (&self.bar, &self.about) {
            (Some(bar), _) if self.is_of_bytes => bar.set_message(beside_a_bar(what)),
            (Some(bar), _) => bar.set_message(next_step::complete(what).into_owned()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_steps_say_nothing_of_the_rest() {
        let told = |millis, done| can_be_told(Duration::from_millis(millis), done, Some(10));
        assert!(!told(1900, 1) && told(2000, 1));
        assert!(!told(2000, 0) && !told(2000, 10) && !can_be_told(TELLING, 1, None));
    }

    #[test]
    fn what_is_done_leaves_room_for_the_bar() {
        assert_eq!(beside_a_bar("scrubbing: taking checksums"), "scrubbing: taking checksums");
        let long = beside_a_bar("scrubbing: snapshot 784c3d92-21d5-4579-8d4e-0976cc820516");
        assert_eq!(long, "scrubbing: snapshot 784c3...");
        assert_eq!(long.len(), BESIDE_A_BAR);
        let line = format!("{long} {:16} {}/{}, 59s left", "", "1023.99 GiB", "1023.99 GiB");
        assert!(line.len() <= 80, "{}", line.len());
    }
}
