//! What a turn of the loop does for all connections.

use lh_block::Device;
use lh_ring::{Payload, Ring};
use tracing::debug;

use super::clock::Want;
use super::commands::Wait;
use super::{Ending, Server, kind};
use crate::connection::{Incoming, Served, Why};
use crate::session::Phase;
use crate::task::Stage;

/// PDUs taken from one connection before the next one has its turn.
const QUANTUM: usize = 16;

/// Seconds that a stopping server leaves initiators for their logout, and logins for their refusal.
const STOP_PATIENCE: u32 = 2;

/// Seconds that it leaves them for the data that they were asked for, and for taking their answers.
const STOP_DATA: u32 = 5;

impl Server {
    /// Serves every connection in turn until nobody can go on.
    pub(super) fn serve_all(&mut self, device: &mut dyn Device<Payload>) {
        self.collect_answers(device);
        loop {
            let more = self.round(device);
            let answered = self.collect_answers(device);
            if !more && !answered {
                return;
            }
        }
    }

    /// Takes the device's answers and goes on with whom they have made room for; false if there were none.
    fn collect_answers(&mut self, device: &mut dyn Device<Payload>) -> bool {
        let mut any = false;
        while let Some(done) = device.poll_done() {
            any = true;
            self.device_done(device, done);
        }
        if any {
            self.settle();
            self.try_waiting_logins();
        }
        self.run_waiting(device);
        any
    }

    /// Goes on with commands that wait, in the order in which they came. Who waits for memory lets nobody get memory
    /// before him; who waits for others to leave his range holds nobody up.
    fn run_waiting(&mut self, device: &mut dyn Device<Payload>) {
        let mut starved = false;
        for _ in 0..self.waiting.len() {
            let Some(tag) = self.waiting.pop_front() else { return };
            let admission = self.tasks.get(tag).is_some_and(|task| matches!(task.stage, Stage::Admission));
            let wait = if admission && starved { Some(Wait::Memory) } else { self.try_advance(device, tag) };
            if let Some(wait) = wait {
                starved |= wait == Wait::Memory;
                self.waiting.push_back(tag);
            }
        }
    }

    /// Serves every connection once; true if somebody may go on at once.
    fn round(&mut self, device: &mut dyn Device<Payload>) -> bool {
        let count = self.places.served().len();
        let mut more = false;
        for i in 0..count {
            // Serving one may end others.
            let all = self.places.served();
            let Some(&slot) = all.get((self.cursor + i) % count.max(1)) else { continue };
            let wants = self.serve(device, slot);
            more |= wants == Served::More;
            if let Some(connection) = self.places.connection(slot) {
                connection.wants = wants;
            }
        }
        self.cursor = (self.cursor + 1) % count.max(1);
        more
    }

    /// Takes up to [`QUANTUM`] PDUs from a connection.
    fn serve(&mut self, device: &mut dyn Device<Payload>, slot: u16) -> Served {
        for _ in 0..QUANTUM {
            let Some(connection) = self.places.connection(slot) else { return Served::Blocked };
            let reads_on = connection.finishing.is_none() && connection.session.phase() != Phase::LoggedOut;
            if !reads_on || connection.is_full() || connection.rx.is_outstanding() {
                return Served::Blocked;
            }
            match connection.next_pdu() {
                Incoming::Need(bytes) => return Served::Bytes(bytes),
                Incoming::Broken(broken) => {
                    // What it is told, if anything, goes out first.
                    connection.finishing = Some(Why::Broken(broken));
                    return Served::Blocked;
                }
                Incoming::Pdu(raw, data) => {
                    if let Err(why) = self.handle(device, slot, &raw, data) {
                        return Served::Close(why);
                    }
                }
            }
        }
        Served::More
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
            self.clock.want(Want::Seconds);
        }
        if self.ending.is_some() && !self.places.is_empty() {
            self.clock.want(Want::Seconds);
        }
        if let Some((number, after)) = self.clock.arm() {
            ring.timeout(self.token(kind::TICK, 0, number), after);
        }
    }

    fn is_over(&mut self, slot: u16) -> Option<Why> {
        let leaves = self.ending == Some(Ending::Leave);
        let connection = self.places.connection(slot)?;
        if let Served::Close(why) = connection.wants {
            return Some(why);
        }
        let why = connection.finishing?;
        // A server that gives way answers what the device has.
        let idle = !leaves || connection.tasks.is_empty();
        (connection.tx.is_empty() && idle).then_some(why)
    }

    fn arm_one(&mut self, ring: &mut Ring, slot: u16) {
        let now = self.clock.now();
        let memory = self.pool.free_chunks() > self.limits.spare_chunks;
        let serial = self.places.serial(slot);
        let (recv, send) = (self.token(kind::RECV, slot, serial), self.token(kind::SEND, slot, serial));
        let Some(connection) = self.places.connection(slot) else { return };
        // Data that was asked for has its room, as has the rest of what nobody needs to ask for: with it comes back what has
        // been taken for its begin.
        let memory = memory
            || connection.tasks.iter().any(|(_, tag)| {
                let stage = self.tasks.get(*tag).map(|task| &task.stage);
                matches!(stage, Some(Stage::Solicited { .. } | Stage::Unsolicited))
            });
        if let Served::Bytes(want) = connection.wants
            && memory
            && ring.recv(recv, &connection.fd, &mut connection.rx, want)
            && connection.is_mid_pdu()
        {
            connection.received_at = now;
        }
        if ring.send(send, &connection.fd, &mut connection.tx) {
            connection.sends(now);
        }
        let waits = !connection.tx.is_empty()
            || connection.is_mid_pdu()
            || !connection.tasks.is_empty()
            || connection.pinged_at.is_some();
        self.clock.want(if waits { Want::Seconds } else { Want::Pings });
    }

    /// A timer has run out.
    pub(super) fn tick(&mut self, ring: &mut Ring, number: u32) {
        if !self.clock.tick(number) {
            return;
        }
        self.doors.again(ring);
        for slot in self.places.slots() {
            self.check_patience(slot);
        }
    }

    fn check_patience(&mut self, slot: u16) {
        let clock = &self.clock;
        let stopped_for = |patience: u32| clock.since_ending().is_some_and(|seconds| seconds >= patience);
        let stopped = stopped_for(STOP_PATIENCE);
        let patience = if stopped_for(STOP_DATA) { STOP_DATA } else { u32::MAX }.min(self.limits.patience_s);
        let ping = self.limits.ping_s;
        if let Some(handshake) = self.places.handshake(slot) {
            // One that waits for old commands waits as long as they do.
            let slow = handshake.finished.is_none() && clock.since(handshake.since) >= patience;
            if slow || stopped {
                debug!(slot, "login took too long");
                self.places.end(slot);
            }
            return;
        }
        let tasks = &self.tasks;
        let Some(connection) = self.places.connection(slot) else { return };
        let silent_for = clock.since(connection.received_at);
        let takes_little = connection.untaken_since().is_some_and(|then| clock.since(then) >= patience);
        let owes_data = connection.tasks.iter().any(|(_, tag)| {
            let stage = tasks.get(*tag).map(|task| &task.stage);
            matches!(stage, Some(Stage::Solicited { .. } | Stage::Unsolicited))
        });
        // Who is not listened to owes nothing.
        let listened_to = connection.rx.is_outstanding() && connection.finishing.is_none();
        let says_nothing = listened_to && (connection.is_mid_pdu() || owes_data) && silent_for >= patience;
        let owing_since = connection.owing_since(listened_to && owes_data, clock.now());
        let says_little = owing_since.is_some_and(|then| clock.since(then) >= patience);
        let unanswered = connection.pinged_at.is_some_and(|then| clock.since(then) >= patience);
        let (now, discovery) = (clock.now(), connection.port.is_none());
        if takes_little || says_nothing || says_little || (discovery && silent_for >= patience) {
            self.close(slot, Why::Stalled);
        } else if unanswered {
            self.close(slot, Why::Silent);
        } else if stopped && connection.tasks.is_empty() && connection.tx.is_empty() {
            // Answers that are still taken are on their way to somebody who cannot ask for them again.
            self.close(slot, Why::Stopped);
        } else if connection.rx.is_outstanding()
            && silent_for >= ping
            && connection.pinged_at.is_none()
            && connection.finishing.is_none()
        {
            connection.pinged_at = Some(now);
            connection.ping();
        }
    }
}
