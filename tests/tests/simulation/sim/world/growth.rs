//! A volume with the quorum `majority` that begins with one replica and is given others, as by `longhornctl replica add`: the record has
//! each before the engine hears of it, and notes only later that the second one is in sync
//! (`docs/decisions/0023-the-second-of-a-majority-learns-first.md`).

use datapath::conductor::Mode;

use super::chain::Asked;
use super::{Command, Engine, Epoch, Outbox, ReplicaConfig, World};

/// What the volume's record has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// The first so many nodes have its replicas.
    pub(super) replicas: usize,
    /// Nobody has noted that the second one is in sync.
    learns: bool,
}

impl Record {
    /// A volume that does not grow.
    pub(super) const fn of(replicas: usize) -> Self {
        Self { replicas, learns: false }
    }

    pub(super) fn config(self) -> Vec<ReplicaConfig> {
        let of =
            |n| ReplicaConfig { name: format!("r{n}"), local: false, learner: n == 1 && self.is_learning() };
        (0..self.replicas).map(of).collect()
    }

    const fn is_learning(self) -> bool {
        self.learns && self.replicas == 2
    }
}

impl World {
    /// One more, unless the one before it is not in sync yet. Somebody else may have been slow to note that it is.
    pub(super) fn add_replica(&mut self, out: &mut Outbox) {
        let Some(engine) = self.engines.get(&self.current).filter(|e| !e.frozen) else { return };
        if self.record.replicas == self.nodes.len() || self.record.is_learning() && !has_learnt(engine) {
            return;
        }
        let node = self.record.replicas;
        self.record = Record { replicas: node + 1, learns: node == 1 };
        self.chain.commands += 1;
        let replica = ReplicaConfig { name: format!("r{node}"), local: false, learner: false };
        self.ask(self.chain.commands, Asked::Add, Command::AddReplica(replica), out);
    }

    /// Who asked notes that the second one is in sync.
    pub(super) fn note_who_has_learnt(&mut self) {
        if self.record.is_learning() && self.engines.get(&self.current).is_some_and(has_learnt) {
            self.note("second replica noted to be in sync".into());
            self.record.learns = false;
        }
    }

    /// The engine has not taken it.
    pub(super) fn take_back_replica(&mut self) {
        self.note("replica refused".into());
        self.record = Record::of(self.record.replicas - 1);
    }

    /// With a majority: it counts once most of those that count have recorded it; as long as the second one learns, the first.
    pub(super) fn is_recorded_by_most(&self, epoch: &Epoch) -> bool {
        let recorded = |node: usize| self.nodes[node].disk.epoch() == Some(epoch);
        match self.record.is_learning() {
            true => recorded(0),
            false => (0..self.nodes.len()).filter(|n| recorded(*n)).count() > self.record.replicas / 2,
        }
    }
}

fn has_learnt(engine: &Engine) -> bool {
    engine.status().replicas.iter().any(|r| r.name == "r1" && r.mode == Mode::Rw)
}
