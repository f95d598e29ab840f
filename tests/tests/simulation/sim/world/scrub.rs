//! Scrubs, with repair, beside everything that goes wrong. Disks rot in runs that are made for it alone, and in no other: a scrub that
//! finds something there takes for rot what is not, and may have made it so.

use super::{Command, Event, Fault, Mix, Outbox, SECOND, World, conductor};
use crate::sim::faults::scrubs;

impl World {
    pub(super) fn plan_scrubs(&mut self, length: u64) {
        let times = scrubs(&mut self.scrub_dice, length);
        self.scrubs = !times.is_empty() || matches!(self.mix, Mix::Rot | Mix::Branches);
        for at in times {
            self.at(at, Event::Fault(Fault::Scrub));
        }
    }

    pub(super) fn scrub(&mut self, out: &mut Outbox) {
        self.judge_scrub(self.current);
        if !self.engines.get(&self.current).is_some_and(|e| !e.frozen && e.open) {
            return;
        }
        self.ask_other(Command::Scrub { repair: true, bytes_per_second: 0 }, out);
    }

    /// What the engine's last scrub has found, so far.
    pub(super) fn judge_scrub(&mut self, engine: u64) {
        let Some(scrub) = self.scrub_of(engine) else { return };
        if !scrub.running && scrub.error.is_none() {
            self.note("scrub done".into());
        }
        let rots = self.mix == Mix::Rot;
        let wrong: Vec<_> = scrub.findings.iter().filter(|f| !(rots && is_rot(f))).collect();
        // A block that cannot be read for a while is a bad one.
        if !wrong.is_empty() && !self.errors_injected {
            self.wrong(format!("a scrub has found {wrong:?}"));
        }
    }

    /// A block rots that is sound on the others.
    pub(super) fn rot(&mut self, node: usize) {
        let Some((snapshot, block)) = self.nodes[node].disk.may_rot(&mut self.scrub_dice) else { return };
        let sound = |n: &super::Node| n.disk.is_sound(&snapshot, block);
        if self.nodes.iter().all(sound) && self.members().len() == self.nodes.len() {
            self.rots += 1;
            self.nodes[node].disk.rot(&snapshot, block, self.rots);
            self.note("block rotten".into());
            self.say(|| format!("block {block} of {snapshot} rots on r{node}"));
        }
    }

    fn scrub_of(&self, engine: u64) -> Option<conductor::ScrubStatus> {
        self.engines.get(&engine).filter(|_| self.scrubs).and_then(|e| e.status().scrub)
    }

    /// In a run with scrubs: replicas are compared as they are before the end. True if there is nothing wrong.
    pub(super) fn last_scrub(&mut self) -> bool {
        if !self.scrubs {
            return true;
        }
        let ends = |w: &Self| w.scrub_of(w.current).is_none_or(|scrub| !scrub.running);
        let mut ended = true;
        // A replica that is lost meanwhile, since a fault of before has an end, is looked at once it is back.
        for _ in 0..3 {
            ended = ended && self.play(self.now + 60 * SECOND, |w| ends(w) && w.is_healthy());
            let began = self.epoch.clone();
            let mut out = Outbox::default();
            self.scrub(&mut out);
            self.carry(out);
            ended = ended && self.play(self.now + 30 * SECOND, ends);
            if self.epoch == began {
                break;
            }
        }
        let broken_off = |scrub: conductor::ScrubStatus| scrub.error.is_some();
        if !ended || self.scrub_of(self.current).is_none_or(broken_off) {
            let scrub = self.scrub_of(self.current);
            self.fail_unless_broken(&format!("a scrub of the end does not end: {scrub:?}"));
        }
        self.judge_scrub(self.current);
        let rotten: usize = self.nodes.iter().map(|n| n.disk.rotten()).sum();
        if rotten > 0 {
            self.fail_unless_broken(&format!("{rotten} blocks are rotten after the last scrub"));
        }
        self.broken.is_none()
    }
}

/// What a scrub finds of rot: it was repaired, or is to be by the last scrub, when every replica is back that has it sound.
fn is_rot(finding: &conductor::Finding) -> bool {
    finding.flaw == conductor::Flaw::Rotten && finding.mend != conductor::Mend::Conflict
}
