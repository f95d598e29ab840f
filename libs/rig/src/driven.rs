//! A queue's device that the test's own thread turns.

use std::borrow::BorrowMut;
use std::time::{Duration, Instant};

use lh_block::Done;
use lh_ring::{OWNER_DEVICE, OWNER_LOOP, Payload, QueueDevice, Ring, Token};

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(20);

/// Longest turn while something is waited for that no completion brings.
const STEP: Duration = Duration::from_millis(5);

/// A device and the ring it is on, turn by turn, as [`lh_ring::run_queue`] turns them.
#[derive(Debug)]
pub struct Driven<D, R = Ring> {
    /// What is tested.
    pub device: D,
    /// What it is on.
    pub ring: R,
    /// What it has answered in [`Driven::turn`], the first one first.
    pub answers: Vec<Done<Payload>>,
}

impl<D: QueueDevice> Driven<D> {
    /// A device with a ring of its own, which hears the device's bell. Whatever cannot be had is a panic.
    pub fn new(device: D) -> Self {
        let mut ring = Ring::new(64).expect("io_uring");
        ring.wake_on(Token::new(OWNER_LOOP, 0, 0, 0), device.bell());
        Self::on(ring, device)
    }
}

impl<D: QueueDevice, R: BorrowMut<Ring>> Driven<D, R> {
    /// A device on a ring that has been used before. It does not hear the bell: for turns that do not wait.
    pub const fn on(ring: R, device: D) -> Self {
        Self { device, ring, answers: Vec::new() }
    }

    /// One turn of at most `most`, with `frontend` where a frontend has its turn: how many completions it has brought. Takes no
    /// answers. A ring that cannot be turned is a panic.
    pub fn turn_with(&mut self, most: Duration, frontend: impl FnOnce(&mut D)) -> usize {
        self.device.begin_turn();
        frontend(&mut self.device);
        let ring = self.ring.borrow_mut();
        let timeout = self.device.end_turn(ring).map_or(most, |timeout| timeout.min(most));
        ring.turn(Some(timeout)).expect("the ring turns");
        self.device.woke();
        let mut count = 0;
        while let Some(completion) = ring.next() {
            count += 1;
            if completion.token.owner == OWNER_DEVICE {
                self.device.completion(completion);
            }
        }
        count
    }

    /// The same without a frontend; takes the answers.
    pub fn turn(&mut self, most: Duration) -> usize {
        let count = self.turn_with(most, |_| ());
        self.answers.extend(std::iter::from_fn(|| self.device.poll_done()));
        count
    }

    /// Turns until it is as wanted; panics after 20 s.
    pub fn turn_until(&mut self, what: &str, mut wanted: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !wanted(self) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.answers);
            self.turn(STEP);
        }
    }

    /// Turns for a while.
    pub fn turn_for(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while Instant::now() < deadline {
            self.turn(STEP);
        }
    }

    /// Takes the answer to a request, once it is there; panics after 20 s.
    pub fn answer(&mut self, tag: u64) -> Done<Payload> {
        self.turn_until("an answer", |driven| driven.answers.iter().any(|done| done.tag == tag));
        let at = self.answers.iter().position(|done| done.tag == tag).expect("it is there");
        self.answers.swap_remove(at)
    }
}
