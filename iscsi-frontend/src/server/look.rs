//! Are the initiators still there? Asked once in a turn, for all sessions that have commands or bytes to be served, before anything
//! is submitted; and by the device, when changes have their ranges, and before it begins requests that have waited in it without any order.
//!
//! An initiator that has given up a session sends its commands again. On the same port it is let in when the old ones have ended.
//! On another one, over a second path or from another host, nothing keeps it: they are done there, and something newer after them, while
//! the first copy lies in the old session's buffers or waits in the device. So what is left of a session that has ended and was
//! not begun is not done any more, once there is another session, or a connection of whatever else the volume is served by
//! (`docs/invariants.md`, 3).
//!
//! While there has been no other ([`ConnectionCount`](lh_ring::ConnectionCount)) since an initiator was last seen, nothing can
//! have been sent again, and nobody is asked. What such
//! a session leaves in the device is done: the initiator's next login waits for that as long as the volume pauses, where commands
//! that are answered as aborted would be given up after so many tries.

use lh_block::Device;
use lh_ring::Payload;

use super::Server;
use crate::connection::Why;
use crate::session::Phase;
use crate::task::Stage;

impl Server {
    /// Ends the sessions of initiators that are gone, of those that have something to be done; and gives up what was left by those that
    /// have ended, where somebody has come since.
    pub(super) fn end_who_left(&mut self) {
        let census = self.count.census();
        if self.left_alone.is_some_and(|then| census.has_more_than(then)) {
            self.give_up_left();
        }
        let mut left = Vec::new();
        self.places.look(
            |connection| {
                let has_work = connection.rx.available() > 0 || !connection.tasks.is_empty();
                has_work && !connection.is_alone(census)
            },
            |connection, slot, has_shut| {
                if has_shut {
                    left.push(slot);
                } else {
                    connection.seen(census);
                }
            },
        );
        for slot in left {
            let Some(connection) = self.places.connection(slot) else { continue };
            if connection.session.phase() == Phase::LoggedOut {
                // Its commands have been aborted; the answer to that may find nobody.
                self.gone.extend(connection.tasks.iter().map(|(_, tag)| *tag));
            } else {
                self.close(slot, Why::Left);
            }
        }
    }

    /// What sessions that have ended have left in the device is not to be begun any more.
    pub(super) fn give_up_left(&mut self) {
        self.left_alone = None;
        let places = &self.places;
        let left = self.tasks.iter().filter(|(_, task)| {
            let (slot, serial) = task.owner;
            matches!(task.stage, Stage::Device) && !places.is_current(slot, serial)
        });
        self.gone.extend(left.map(|(tag, _)| tag));
    }

    /// Tells the device what is not to be begun any more. It answers that all the same.
    pub(super) fn abandon(&mut self, device: &mut dyn Device<Payload>) {
        self.gone.drain(..).for_each(|tag| device.abandon(tag));
    }
}
