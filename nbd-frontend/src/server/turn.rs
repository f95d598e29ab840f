//! What a turn of the loop does for all connections.

use lh_block::Device;
use lh_ring::{Payload, Ring};
use tracing::warn;

use super::clock::{STOP_ANSWERS, STOP_PATIENCE, TICK};
use super::{Server, kind};
use crate::connection::{Served, Why, Work};

/// What is left after a round over all connections.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    /// Somebody has more requests and may go on at once.
    more: bool,
    /// Somebody waits for what an answer of the device may free.
    blocked: bool,
    /// Somebody has a write, and it is not known whether its client is still there.
    look: bool,
}

impl Server {
    /// Serves every connection in turn until nobody can go on.
    pub(super) fn serve_all(&mut self, device: &mut dyn Device<Payload>) {
        // All that this turn submits has been received by now.
        let census = self.count.census();
        for index in 0..self.places.served().len() {
            let slot = self.places.served()[index];
            self.places.connection(slot).into_iter().for_each(|connection| connection.begin_turn(census));
        }
        self.collect(device);
        loop {
            let left = self.round(device);
            if left.look {
                self.look_at_senders(census);
            }
            let answered = self.collect(device);
            let goes_on = left.more || left.look || (left.blocked && answered);
            if !goes_on {
                return;
            }
        }
    }

    /// Takes the device's answers; false if there were none.
    fn collect(&mut self, device: &mut dyn Device<Payload>) -> bool {
        let mut any = false;
        while let Some(done) = device.poll_done() {
            any = true;
            let Some(request) = self.requests.take(done.tag) else {
                warn!(tag = done.tag, "an answer to no request");
                continue;
            };
            let (slot, serial) = request.owner;
            let current = self.places.is_current(slot, serial);
            match self.places.connection(slot).filter(|_| current) {
                Some(connection) => connection.finish(&request, done, &mut self.budget),
                None => self.budget.give_back(request.bytes),
            }
        }
        any
    }

    /// Serves every connection once. The next round begins with the first that came to a full device: were it only the next
    /// one's turn, rounds in step with the device's answers would leave every place that comes free to the same connection.
    fn round(&mut self, device: &mut dyn Device<Payload>) -> Left {
        let count = self.places.served().len();
        let mut left = Left::default();
        let mut turned_away = None;
        for i in 0..count {
            let at = (self.cursor + i) % count;
            let slot = self.places.served()[at];
            let was_full = device.room() == 0;
            let Some(connection) = self.places.connection(slot) else { continue };
            let mut work = Work {
                device: &mut *device,
                requests: &mut self.requests,
                budget: &mut self.budget,
                share: self.limits.connection_bytes,
            };
            connection.wants = connection.serve(&mut work);
            if was_full && connection.wants == Served::Blocked {
                turned_away.get_or_insert(at);
            }
            left.more |= connection.wants == Served::More;
            left.blocked |= connection.wants == Served::Blocked;
            left.look |= connection.wants == Served::Look;
        }
        self.cursor = turned_away.unwrap_or(self.cursor + 1) % count.max(1);
        left
    }

    /// Starts receives and sends, and closes what is over.
    pub(super) fn arm(&mut self, ring: &mut Ring) {
        let mut index = 0;
        while let Some(&slot) = self.places.served().get(index) {
            match self.is_over(slot) {
                Some(why) => self.close(slot, why),
                None => {
                    self.arm_one(ring, slot);
                    index += 1;
                }
            }
        }
        if self.places.handshakes() > 0 || self.doors.is_waiting() {
            self.clock.want();
        }
        if self.clock.is_to_be_armed() {
            ring.timeout(self.token(kind::TICK, 0, 0), TICK);
        }
    }

    fn is_over(&mut self, slot: u16) -> Option<Why> {
        let ending = self.ending.is_some();
        let connection = self.places.connection(slot)?;
        match connection.wants {
            Served::Close(why) => Some(why),
            Served::More | Served::Look => None,
            Served::Blocked | Served::Bytes(_) => (ending && connection.is_idle()).then_some(Why::Done),
        }
    }

    fn arm_one(&mut self, ring: &mut Ring, slot: u16) {
        let now = self.clock.now();
        let memory = self.pool.free_chunks() > self.limits.spare_chunks;
        let serial = self.places.serial(slot);
        let (recv, send) = (self.token(kind::RECV, slot, serial), self.token(kind::SEND, slot, serial));
        let Some(connection) = self.places.connection(slot) else { return };
        if let Served::Bytes(want) = connection.wants
            && (memory || connection.has_memory())
            && ring.recv(recv, &connection.fd, &mut connection.rx, want)
        {
            connection.listened(now);
        }
        if ring.send(send, &connection.fd, &mut connection.tx) {
            connection.sends(now);
        }
        if !connection.tx.is_empty() || connection.is_mid_request() {
            self.clock.want();
        }
    }

    /// A second has passed.
    pub(super) fn tick(&mut self, ring: &mut Ring) {
        self.clock.tick();
        self.doors.again(ring);
        for slot in self.places.slots() {
            self.check_patience(slot);
        }
    }

    fn check_patience(&mut self, slot: u16) {
        let clock = self.clock;
        let is_stopped = clock.since_ending() >= STOP_ANSWERS;
        let patience = if is_stopped { STOP_ANSWERS } else { u32::MAX }.min(self.limits.patience_s);
        if let Some(handshake) = self.places.handshake(slot) {
            if clock.since(handshake.since) >= patience || clock.since_ending() >= STOP_PATIENCE {
                self.close(slot, Why::Stalled);
            }
        } else if let Some(connection) = self.places.connection(slot) {
            let takes_little = connection.untaken_since().is_some_and(|then| clock.since(then) >= patience);
            let says_nothing = connection.rx.is_outstanding()
                && connection.is_mid_request()
                && clock.since(connection.received_at) >= patience;
            if takes_little && connection.says_goodbye() {
                connection.shut();
            } else if takes_little || says_nothing {
                self.close(slot, Why::Stalled);
            }
        }
    }
}
