//! The clients: what they ask for, and what the oracle says of the answers.

use lh_block::IoError;
use tests::register::ReadBegan;

use crate::sim::parts::{registers, registers_of, whole};

use super::{
    Answer, BLOCK, DEPTH, Engine, Event, Extent, HOT, MS, Mix, Op, Outbox, Quorum, SECOND, SIZE, Stamp,
    World, blocks, hot_block,
};

impl World {
    pub(super) fn clients(&mut self, again: bool, out: &mut Outbox) {
        for _ in 0..self.dice.between(1, 6) {
            let Some(number) = self.served_by().filter(|_| self.budget > 0) else { break };
            let q = usize::from(self.dice.chance(500));
            let free = self
                .engines
                .get(&number)
                .and_then(|e| e.slots[q].iter().position(|s| !s.taken).and_then(|s| u16::try_from(s).ok()));
            if let Some(slot) = free.filter(|s| *s < DEPTH) {
                self.budget = self.budget.saturating_sub(1);
                let (mut op, mut range) = self.choose(number == self.current);
                if self.is_isolated(number) && self.dice.chance(900) {
                    // What it cannot answer would soon take all its slots.
                    if self.dice.chance(800) {
                        continue;
                    }
                    (op, range) = (Op::Read, Extent::new(hot_block(self.dice.below(HOT)) * BLOCK, BLOCK));
                }
                let mut range = self.in_pieces(op).unwrap_or(range);
                if op == Op::Read && self.asks_what_holds_data && self.told_dice.chance(150) {
                    op = Op::Allocation;
                    range = if self.told_dice.chance(100) { Extent::new(0, SIZE) } else { range };
                }
                self.issue_into((number, q, slot), op, range, out);
            }
        }
        if self.budget > 0 && again {
            let slowly = if self.mix == Mix::Disks { 300 } else { 100 };
            let delay = if self.dice.chance(slowly) {
                self.dice.between(MS, 60 * MS)
            } else {
                self.dice.between(MS / 50, 3 * MS)
            };
            let slower = self.dice.below(2 * self.pace + 1);
            out.later(self.now + delay + slower, Event::Clients(true));
        }
    }

    /// An engine that clients talk to: the newest, but who was there before may go on with the one before.
    fn served_by(&mut self) -> Option<u64> {
        let open =
            self.engines.values().filter(|e| e.open && !e.frozen).map(|e| e.number).collect::<Vec<_>>();
        if open.contains(&self.current) && (open.len() == 1 || self.dice.chance(600)) {
            return Some(self.current);
        }
        self.dice.pick(&open)
    }

    fn is_isolated(&self, number: u64) -> bool {
        self.isolated.is_some_and(|(engine, _, until)| engine == number && self.now < until)
    }

    /// Of blocks from the range's begin on it was told whether they hold data: to call one zero is to read it.
    fn told(&mut self, (read, range): (ReadBegan, Extent), data: &[bool], leaves: bool) {
        if !data.is_empty() {
            self.note("allocation told".into());
        }
        for (block, data) in blocks(range).zip(data) {
            for r in registers_of(block).filter(|_| !data) {
                let returned = if leaves {
                    self.history.read_returned_perhaps_lost(r.number, read, Stamp(0))
                } else {
                    self.history.read_returned(r.number, read, Stamp(0))
                };
                if let Err(v) = returned {
                    self.wrong(v.to_string());
                }
            }
        }
        self.history.read_ends(read);
    }

    /// There are two engines, and one cannot know of the other: whoever still talks to it must hear nothing old.
    pub(super) fn tempt_the_isolated(&mut self) {
        let tempting = self.isolated.is_some_and(|(engine, _, until)| {
            self.now < until && engine != self.current && self.engines.contains_key(&engine)
        });
        if tempting && !self.at_peace {
            self.note("two engines open".into());
            self.budget += 100;
            for _ in 0..30 {
                let at = self.now + self.dice.below(SECOND);
                self.at(at, Event::Clients(false));
            }
        }
    }

    /// What a client asks for; only of the newest engine what the volume has grown by.
    pub(super) fn choose(&mut self, newest: bool) -> (Op, Extent) {
        let hot = hot_block(self.dice.below(HOT));
        let (first, count) = match self.new_block().filter(|_| newest) {
            Some(new) => (new, 1),
            None => (hot, if self.dice.chance(700) { 1 } else { self.dice.between(1, 9) }),
        };
        let range = Extent::new(first * BLOCK, count * BLOCK);
        let fua = self.dice.chance(100);
        let op = match self.dice.below(100) {
            0..50 => Op::Write { fua },
            50..82 => Op::Read,
            82..86 => Op::WriteZeroes { fua, may_unmap: true, fast: false },
            86..90 => Op::Unmap,
            _ => return (Op::Flush, Extent::new(0, 0)),
        };
        (op, range)
    }

    pub(super) fn issue(&mut self, q: usize, slot: u16, op: Op, range: Extent) {
        let mut out = Outbox::default();
        self.issue_into((self.current, q, slot), op, range, &mut out);
        self.carry(out);
    }

    pub(super) fn issue_into(&mut self, to: (u64, usize, u16), op: Op, range: Extent, out: &mut Outbox) {
        let now = self.now;
        let (number, q, slot) = to;
        let Some(e) = self.engines.get_mut(&number) else { return };
        let session = e.session();
        let s = &mut e.slots[q][usize::from(slot)];
        s.client.clear();
        s.writes.clear();
        match op {
            Op::Read | Op::Allocation => s.read = Some(self.history.read_begins()),
            Op::Flush => s.flush = Some(self.history.flush_begins()),
            _ => {
                for block in blocks(range) {
                    let stamp = if matches!(op, Op::Write { .. }) {
                        self.stamps += 1;
                        Stamp(self.stamps)
                    } else {
                        Stamp(0)
                    };
                    s.client.push(whole(block, stamp));
                }
                for r in registers(range) {
                    let stamp = r.value_in(range, &s.client).unwrap_or(Stamp(0));
                    s.writes.push((r.number, self.history.write_begins(r.number, stamp, session)));
                }
            }
        }
        if self.tracing {
            let line = format!("e{number} q{q}/{slot} {op:?} {:?} {:?}", blocks(range), s.client);
            self.say(|| line);
        }
        // A thread may be kept from its processor since it looked for the client.
        let stumbles = self.mix == Mix::Clients && !self.at_peace && self.dice.chance(200);
        let late = if stumbles { self.dice.below(30 * MS) } else { 0 };
        if let Some(e) = self.engines.get_mut(&number) {
            e.request(q, slot, op, range);
            if late == 0 {
                e.submit(now, q, slot, out);
            } else {
                out.later(now + late, Event::Submit(number, q, slot));
            }
        }
    }

    pub(super) fn answer(&mut self, number: u64, answer: Answer, out: &mut Outbox) {
        let now = self.now;
        let Some((op, range)) = answer.request else {
            self.fail("an answer to no request".into());
            return;
        };
        let is_late = answer.result == Err(IoError::TimedOut) && self.may_time_out(&answer);
        let (read, flush, writes) = (answer.read, answer.flush, answer.writes);
        let Some(e) = self.engines.get_mut(&number) else { return };
        let (generation, session) = (e.generation, e.session());
        if answer.held {
            e.answered(now, answer.queue, answer.slot, out);
        }
        if self.tracing {
            let line = format!(
                "e{number} q{}/{} answered {:?} {:?}",
                answer.queue, answer.slot, answer.result, answer.blocks
            );
            self.say(|| line);
        }
        if answer.left {
            if let Some(read) = read {
                self.history.read_ends(read);
            }
            return;
        }
        if let Err(error) = answer.result {
            self.note(format!("answered with {error:?}"));
            let wants_no_space = op == Op::Unmap && error == IoError::NoSpace;
            // With the quorum `unsafe` an engine may go on with anybody, and lose what others have.
            let may_have_lost = self.quorum == Quorum::Unsafe || self.may_have_lost.contains(&session);
            let tells_of_loss = op == Op::Flush && error == IoError::Io && may_have_lost;
            // One that has been replaced, and does not know it, has its own members.
            let is_alone = number != self.current && self.engines.get(&number).is_some_and(Engine::is_alone);
            let last = self.members().len() == 1 || is_alone || self.quorum == Quorum::Unsafe;
            let of_the_last_disk = self.errors_injected && last;
            // Nobody is left who has it sound.
            let is_rotten =
                op == Op::Read && last && self.members().iter().all(|m| self.nodes[*m].disk.reads_rot(range));
            let ends = |e: &Engine| e.stopped.is_some() || e.ends && error == IoError::ShuttingDown;
            let has_stopped = self.engines.get(&number).is_some_and(ends);
            if !(of_the_last_disk || is_rotten || wants_no_space || tells_of_loss || has_stopped || is_late) {
                self.fail(format!("{op:?} {range} was answered with {error:?}"));
            }
            if let Some(read) = read {
                self.history.read_ends(read);
            }
            if op == Op::Flush && error == IoError::Io {
                self.history.flush_failed(session);
                if self.engines.get(&number).is_some_and(|e| !e.is_loss_untold()) {
                    self.note("flush told of a loss".into());
                    self.loss_notes.remove(&session);
                }
            }
            return;
        }
        // Another engine has begun to go on without what is lost. This one does not know yet, and answers until its lease ends.
        let leaves = now <= self.loss_heard && self.epoch.as_ref().is_some_and(|e| e.generation > generation);
        if let (Some(read), Op::Allocation) = (read, op) {
            self.told((read, range), &answer.data, leaves);
        } else if let Some(read) = read {
            if answer.blocks.len() != blocks(range).count() {
                self.fail(format!("a read of {range} brought {} blocks", answer.blocks.len()));
            }
            for r in registers(range) {
                let Some(stamp) = r.value_in(range, &answer.blocks) else { break };
                let returned = if leaves {
                    self.history.read_returned_perhaps_lost(r.number, read, stamp)
                } else {
                    self.history.read_returned(r.number, read, stamp)
                };
                if let Err(v) = returned {
                    self.wrong(v.to_string());
                }
            }
            self.history.read_ends(read);
        }
        if let Some(flush) = flush {
            self.history.flush_acked(flush, session);
        }
        let fua = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
        for (block, write) in writes {
            if fua || now > self.loss_heard {
                for (_, before) in answer.instead_of.iter().filter(|(b, _)| *b == block) {
                    self.history.write_comes_before(block, *before, write);
                }
                self.history.write_acked(block, write, fua);
            } else {
                self.history.write_acked_perhaps_lost(block, write);
            }
        }
    }
}
