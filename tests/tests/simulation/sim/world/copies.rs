//! A replica's directory that is put back as it was at some moment under load, by a copy of its disk: within one epoch, unless something
//! goes wrong beside it.

use super::{Command, CommandId, Conducted, Event, Fault, HEAL, MS, Outbox, Report, SECOND, World};

impl World {
    /// Once all is well: a disk is copied, the volume goes on, and the copy takes the disk's place.
    pub(super) fn put_a_copy_back(&mut self) {
        let node = self.some_node();
        let way = self.dice.below(5);
        let soon = way == 4 || self.dice.chance(500);
        let (before, after) =
            (self.dice.below(3 * SECOND), self.dice.below(if soon { 2 } else { 6 } * SECOND));
        self.budget = self.dice.between(30, 200);
        self.pace = (before + after) / self.budget;
        self.at(self.now + MS, Event::Clients(true));
        if self.dice.chance(300) {
            self.at(self.now + before / 2, Event::Fault(Fault::Snapshot));
        }
        self.wait(before);
        if way == 4 && self.dice.chance(800) {
            // No chunk is marked any more when it is copied.
            self.budget = 0;
            self.wait(8 * SECOND);
            self.budget = self.dice.between(30, 200);
            self.at(self.now + MS, Event::Clients(true));
        }
        let copy = self.nodes[node].disk.copy(&mut self.dice);
        self.note("disk copied".into());
        if self.dice.chance(400) {
            let change = self.dice.pick(&[
                Fault::Snapshot,
                Fault::Revert,
                Fault::Revert,
                Fault::Remove,
                Fault::Expand,
            ]);
            self.at(self.now, Event::Fault(change.unwrap_or(Fault::Snapshot)));
            // The rounds behind a revert are to be made.
            self.wait(2 * SECOND);
        }
        self.wait(after);
        // What is answered by now is flushed, and its marks are taken back, or not yet.
        let rest = if soon { 0 } else { self.dice.below(8 * SECOND) };
        self.wait(rest);
        if way == 4 {
            self.break_all_links();
        }
        if self.broken.is_some() {
            return;
        }
        let own = self.nodes[node].disk.epoch().cloned();
        let (Some(told), Some(own)) = (copy.epoch().cloned(), own) else { return };
        if told == own {
            let apart = own.round.unwrap_or_default().0 - told.round.unwrap_or_default().0;
            self.note("copy put back within its epoch".into());
            self.note(format!(
                "copy put back {}",
                ["in its round", "a round behind", "behind"][apart.min(2) as usize]
            ));
        }
        self.pace = 0;
        // Who is ahead of it has to be heard by a start.
        self.grace = 3 * SECOND;
        let mut out = Outbox::default();
        match way {
            0 => self.note("copy put back while the others go on".into()),
            1 => {
                self.note("copy put back while all are away".into());
                (0..self.nodes.len()).filter(|n| *n != node).for_each(|n| self.kill_node(n, &mut out));
            }
            2 => {
                self.note("copy put back before a start".into());
                self.replace_engine(&mut out);
                (0..self.nodes.len()).filter(|n| *n != node).for_each(|n| self.kill_node(n, &mut out));
            }
            3 => {
                self.note("copy put back behind a clean end".into());
                self.end_cleanly();
            }
            _ => {
                self.note("copy put back beside an engine that dies, while the others live on".into());
                self.replace_engine(&mut out);
            }
        }
        self.exchange_disk(node, copy, &mut out);
        // It is what it was when it was copied, whatever was flushed since.
        self.powered[node] = false;
        self.carry(out);
        self.goes_on(Self::is_healthy);
    }

    /// Everything goes on, and the last writes of the sessions are remembered by nobody any more: the marks alone tell of them.
    fn break_all_links(&mut self) {
        let mut out = Outbox::default();
        (0..self.nodes.len()).for_each(|node| self.break_conns(node, &mut out));
        self.carry(out);
        self.wait(100 * MS);
        self.play(self.now + SECOND, |w| w.is_healthy() && w.quiet());
    }

    /// The engine is told to end, and has.
    fn end_cleanly(&mut self) {
        let (told, mut out) = (self.current, Outbox::default());
        if let Some(e) = self.engines.get_mut(&told) {
            // Clients may still ask for something, and hear that it ends.
            e.ends = true;
            let input = Conducted::Command(CommandId(u64::MAX), Command::Shutdown);
            e.conduct(self.now, Report::Input(input), &mut out);
        }
        self.carry(out);
        self.play(self.now + HEAL, |w| !w.engines.contains_key(&told));
    }

    fn wait(&mut self, time: u64) {
        let until = self.now + time;
        self.play(until, |w| w.now >= until);
    }
}
