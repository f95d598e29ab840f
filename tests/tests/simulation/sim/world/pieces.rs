//! Requests that are carried out in several pieces: of parts of blocks, which are read, merged and written under one claim, and longer than
//! what is sent at once. And how long requests wait that nobody serves.
//!
//! All of it in some runs only: all others are as they were without it.

use super::{Answer, BLOCK, Extent, MS, Op, Quorum, SECOND, World};
use crate::sim::parts::{HALF, HALVED};

impl World {
    pub(super) fn plan_pieces(&mut self) {
        self.in_pieces = self.piece_dice.chance(200);
        if self.piece_dice.chance(150) {
            self.io_timeout = self.piece_dice.between(200 * MS, 3 * SECOND);
            let ms = self.io_timeout / MS;
            self.say(|| format!("requests wait for {ms} ms"));
        }
    }

    /// Where a client asks for this instead: in or between halves of blocks, or over more than one transfer takes.
    pub(super) fn in_pieces(&mut self, op: Op) -> Option<Extent> {
        if !self.in_pieces || op == Op::Flush {
            return None;
        }
        let long = matches!(op, Op::WriteZeroes { .. } | Op::Unmap);
        let range = if long && self.piece_dice.chance(40) {
            let from = self.piece_dice.below(2 * HALVED) * HALF;
            let end = u64::from(lh_wire::MAX_DATA) + self.piece_dice.between(HALVED + 1, 36) * BLOCK;
            Extent::new(from, end - from)
        } else if self.piece_dice.chance(300) {
            let from = self.piece_dice.below(2 * HALVED);
            let count = self.piece_dice.between(1, 2 * HALVED + 1 - from);
            Extent::new(from * HALF, count * HALF)
        } else {
            return None;
        };
        let whole = range.narrow(BLOCK).len;
        if op != Op::Read && (range.len > u64::from(lh_wire::MAX_DATA) || whole > 0 && whole != range.len) {
            self.note("write in several pieces".into());
        }
        Some(range)
    }

    /// Whether a request may end with this answer because nobody serves it: the queue has served nobody for so long. Of a majority one alone
    /// may be read from as long as the others are heard, and changes nothing.
    pub(super) fn may_time_out(&self, answer: &Answer) -> bool {
        let dark_for = if self.quorum == Quorum::Majority { answer.unwritten_for } else { answer.unread_for };
        self.io_timeout > 0 && dark_for >= self.io_timeout
    }
}
