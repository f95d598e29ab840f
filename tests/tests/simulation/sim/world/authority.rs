//! The authority: one epoch behind a compare-and-swap.

use std::collections::BTreeSet;

use super::{Conducted, Epoch, Event, Generation, MS, Quorum, Report, Stored, World};

impl World {
    /// The volume goes on with these members. Who joins was filled from those who stay: if all of them died, whoever
    /// lived on is out.
    pub(super) fn stored(&mut self, epoch: Epoch) {
        self.say(|| format!("epoch {}.{} counts", epoch.generation, epoch.counter));
        self.note_lived();
        if epoch.members.len() == 1 && self.epoch.as_ref().is_some_and(|e| e.members.len() > 1) {
            self.note("epoch with one member".into());
        }
        let stay = match self.holders.get(&epoch.order()) {
            Some(holders) => holders.clone(),
            None => self.members().into_iter().filter(|n| has(&epoch, *n)).collect(),
        };
        let order = epoch.order();
        self.epoch = Some(epoch);
        self.note_loss(&stay);
        if self.quorum == Quorum::Majority {
            self.holders.insert(order, self.members());
        }
    }

    /// With a majority nobody stores an epoch: it counts once most replicas have recorded it.
    pub(super) fn look_at_records(&mut self) {
        if self.quorum != Quorum::Majority {
            return;
        }
        self.look_for_records_on_their_way();
        let counts = |e: &&Epoch| self.is_recorded_by_most(e);
        let newest =
            self.nodes.iter().filter_map(|n| n.disk.epoch()).filter(counts).max_by_key(|e| e.order());
        if let Some(epoch) = newest.filter(|e| self.epoch.as_ref().is_none_or(|old| old.order() < e.order()))
        {
            self.stored(epoch.clone());
        }
    }

    /// An epoch that one replica has recorded is started from where the others do not come
    /// (`docs/decisions/0017-majority-starts-from-the-newest-epoch-found.md`), whether it counted or not. What is lost is
    /// judged by who was a member all along until then.
    fn look_for_records_on_their_way(&mut self) {
        for node in 0..self.nodes.len() {
            let before = self.recorded.clone();
            let epoch = self.nodes[node].disk.epoch().cloned();
            self.recorded[node] = epoch.as_ref().map(Epoch::order);
            let Some(epoch) = epoch.filter(|e| !self.holders.contains_key(&e.order())) else { continue };
            let parent = (0..self.nodes.len()).filter(|n| has(&epoch, *n)).filter_map(|n| before[n]).max();
            let all = || (0..self.record.replicas).collect();
            let held = parent.and_then(|p| self.holders.get(&p).cloned()).unwrap_or_else(all);
            let stay: Vec<_> = held.into_iter().filter(|n| has(&epoch, *n)).collect();
            self.note_lived();
            self.note_loss(&stay);
            self.holders.insert(epoch.order(), stay);
        }
    }

    /// Something has gone wrong with a host: what the members of each epoch that the volume may be started from have
    /// kept decides what may be lost.
    pub(super) fn judge_loss(&mut self) {
        self.note_loss(&self.members());
        let counted = self.epoch.as_ref().map(Epoch::order);
        let younger: BTreeSet<_> =
            self.recorded.iter().flatten().copied().filter(|o| Some(*o) > counted).collect();
        for holders in younger.iter().filter_map(|o| self.holders.get(o).cloned()).collect::<Vec<_>>() {
            self.note_loss(&holders);
        }
    }

    /// The authority: a compare-and-swap that may be lost on its way back.
    pub(super) fn store_epoch(&mut self, engine: u64, expected: Option<(Generation, u64)>, epoch: Epoch) {
        let delay = self.dice.between(MS / 5, 20 * MS);
        let apart = self.isolated.is_some_and(|(number, _, until)| number == engine && self.now < until);
        let answer = if apart {
            Stored::Unavailable { reason: "isolated".into() }
        } else if self.dice.chance(20) {
            if self.dice.chance(500) && self.epoch.as_ref().map(Epoch::order) == expected {
                self.stored(epoch);
            }
            self.note("authority did not answer".into());
            Stored::Unavailable { reason: "simulated".into() }
        } else if self.epoch.as_ref().map(Epoch::order) == expected || self.epoch.as_ref() == Some(&epoch) {
            self.stored(epoch);
            Stored::Stored
        } else {
            Stored::Conflict { current: self.epoch.clone() }
        };
        let input = Conducted::AuthorityStored(answer);
        self.at(self.now + delay, Event::Report(engine, Report::Input(input)));
    }
}

pub(super) fn has(epoch: &Epoch, node: usize) -> bool {
    epoch.has(&format!("r{node}"))
}
