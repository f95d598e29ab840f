//! The authority: one epoch behind a compare-and-swap.

use super::{Conducted, Epoch, Event, Generation, MS, Quorum, Report, Stored, World};

impl World {
    /// The volume goes on with these members. Who joins was filled from those who stay: if all of them died, whoever
    /// lived on is out.
    pub(super) fn stored(&mut self, epoch: Epoch) {
        self.note_lived();
        if epoch.members.len() == 1 && self.epoch.as_ref().is_some_and(|e| e.members.len() > 1) {
            self.note("epoch with one member".into());
        }
        let members = self.members();
        self.epoch = Some(epoch);
        let stay: Vec<_> = members.into_iter().filter(|n| self.is_member(*n)).collect();
        self.note_loss(&stay);
    }

    /// With a majority nobody stores an epoch: it counts once most replicas have recorded it.
    pub(super) fn look_at_records(&mut self) {
        if self.quorum != Quorum::Majority {
            return;
        }
        let recorded = |e: &Epoch| self.nodes.iter().filter(|n| n.disk.epoch() == Some(e)).count();
        let counts = |e: &&Epoch| recorded(e) > self.nodes.len() / 2;
        let newest =
            self.nodes.iter().filter_map(|n| n.disk.epoch()).filter(counts).max_by_key(|e| e.order());
        if let Some(epoch) = newest.filter(|e| self.epoch.as_ref().is_none_or(|old| old.order() < e.order()))
        {
            self.stored(epoch.clone());
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
