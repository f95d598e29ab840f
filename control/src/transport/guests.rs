//! Connections of which there may be only so many. Whoever reaches a port can connect as often as he likes and say nothing; so where
//! there is no room, the connection ends of which nothing was heard for longest, and never the one that comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::task::{AbortHandle, JoinHandle};

/// The connections of a port, each served by a task of its own.
#[derive(Debug)]
pub struct Guests {
    most: usize,
    /// Counts what is heard.
    heard: Arc<AtomicU64>,
    here: Vec<(Sign, AbortHandle)>,
    /// Some had to go since there was room.
    crowded: bool,
}

/// What a connection's task says by that something was heard.
#[derive(Clone, Debug)]
pub struct Sign {
    heard: Arc<AtomicU64>,
    last: Arc<AtomicU64>,
}

impl Sign {
    /// Something was heard just now.
    pub fn give(&self) {
        self.last.store(self.heard.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Guests {
    /// So many at most.
    pub fn new(most: usize) -> Self {
        Self { most, heard: Arc::default(), here: Vec::new(), crowded: false }
    }

    /// Serves a connection, in place of another one if there are as many as may be. A task that had to go was cancelled.
    pub fn receive<F>(&mut self, serve: impl FnOnce(Sign) -> F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.here.retain(|(_, task)| !task.is_finished());
        self.crowded &= self.here.len() >= self.most;
        while self.here.len() >= self.most {
            self.part_with_the_most_silent();
        }
        let sign = Sign { heard: Arc::clone(&self.heard), last: Arc::default() };
        sign.give();
        let task = tokio::spawn(serve(sign.clone()));
        self.here.push((sign, task.abort_handle()));
        task
    }

    fn part_with_the_most_silent(&mut self) {
        if !std::mem::replace(&mut self.crowded, true) {
            tracing::warn!(
                "more than {} connections at once: those end that have said nothing for longest",
                self.most
            );
        }
        let heard = |(sign, _): &(Sign, AbortHandle)| sign.last.load(Ordering::Relaxed);
        if let Some(at) = (0..self.here.len()).min_by_key(|at| heard(&self.here[*at])) {
            self.here.swap_remove(at).1.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_was_not_heard_for_longest_has_to_go_and_who_has_gone_is_not_counted() {
        let mut guests = Guests::new(3);
        let mut signs = Vec::new();
        let mut come = |guests: &mut Guests| {
            guests.receive(|sign| {
                signs.push(sign);
                std::future::pending::<()>()
            })
        };
        let (first, second, third) = (come(&mut guests), come(&mut guests), come(&mut guests));
        third.abort();
        assert!(third.await.unwrap_err().is_cancelled());
        let fourth = come(&mut guests);
        tokio::task::yield_now().await;
        assert!(!first.is_finished(), "there was room");
        signs[0].give();
        guests.receive(|_| std::future::pending::<()>());
        assert!(second.await.unwrap_err().is_cancelled());
        assert!(!first.is_finished() && !fourth.is_finished());
        guests.receive(|_| std::future::pending::<()>());
        assert!(fourth.await.unwrap_err().is_cancelled());
        assert!(!first.is_finished());
    }
}
