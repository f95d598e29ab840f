//! What clients want of a process: that it ends, or that it runs another program. One place for each, so that nothing
//! queues up: the last replacement counts, and an end counts whatever else is wanted.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// What is wanted now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// That it ends and is forgotten.
    End,
    /// That the process runs this instead.
    Replace(Replacement),
}

/// Another program for a process, or the same one with other arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Replacement {
    pub(super) binary: String,
    pub(super) args: Vec<String>,
}

/// Where clients leave what they want and the process's supervisor finds it.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    /// The end is wanted; the last replacement.
    wanted: Mutex<(bool, Option<Replacement>)>,
    news: Notify,
}

impl Wishes {
    pub(super) fn end(&self) {
        self.wanted().0 = true;
        self.news.notify_one();
    }

    pub(super) fn replace(&self, replacement: Replacement) {
        self.wanted().1 = Some(replacement);
        self.news.notify_one();
    }

    /// Waits for the next wish. Cancelling it loses none.
    pub(super) async fn next(&self) -> Wish {
        loop {
            {
                let mut wanted = self.wanted();
                if wanted.0 {
                    return Wish::End;
                }
                if let Some(replacement) = wanted.1.take() {
                    return Wish::Replace(replacement);
                }
            }
            self.news.notified().await;
        }
    }

    fn wanted(&self) -> MutexGuard<'_, (bool, Option<Replacement>)> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replacement(binary: &str) -> Replacement {
        Replacement { binary: binary.into(), args: Vec::new() }
    }

    #[tokio::test]
    async fn the_last_replacement_counts_and_an_end_counts_for_ever() {
        let wishes = Wishes::default();
        wishes.replace(replacement("a"));
        wishes.replace(replacement("b"));
        assert_eq!(wishes.next().await, Wish::Replace(replacement("b")));
        // Nothing is wanted now.
        assert!(tokio::time::timeout(std::time::Duration::ZERO, wishes.next()).await.is_err());
        wishes.replace(replacement("c"));
        wishes.end();
        assert_eq!(wishes.next().await, Wish::End);
        assert_eq!(wishes.next().await, Wish::End);
    }
}
