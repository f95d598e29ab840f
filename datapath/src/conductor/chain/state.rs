//! The volume's chain as its members have it, and what is being done to it.
//!
//! - One operation at a time ([`Chain::task`]); the others wait for their turn, in the order in which they were asked for.
//! - Whatever is made of this engine's instance has a name of its own: operations are named from 2^64 up ([`Chain::next_id`]), epochs
//!   count from below ([`mod@crate::conductor::epochs`]). One counter numbers operations and their ballots, so an answer to one ballot counts for no other.
//! - What was decided is carried out by whoever comes back ([`Chain::is_decided`]). The last decision is enough to know: the next operation
//!   begins when nobody is failing, and everybody else has carried out the one before.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use lh_block::Instance;
use lh_wire::{ChainOp, LayerInfo};

use super::Task;
use crate::conductor::CommandId;
use crate::conductor::branch::branch;
use crate::message::{LayerRef, MemberId};

/// Operations that wait for their turn.
pub(in crate::conductor) type Backlog = VecDeque<(CommandId, ChainOp)>;

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::conductor) struct Chain {
    instance: Instance,
    pub(in crate::conductor) volume: Volume,
    pub(super) task: Option<Task>,
    pub(in crate::conductor) backlog: Backlog,
    /// Since when the first of them waits for its turn, or for its end.
    pub(super) since: Option<u64>,
    /// What was told last of what that waits for.
    pub(super) told: Option<String>,
    /// Numbers operations and ballots.
    tasks: u64,
    /// The last chain operation that this engine decided to carry out.
    decided: Option<Instance>,
}

impl Chain {
    /// Of an engine with this instance. `size`: of the volume in bytes, until a member has told its own.
    pub(in crate::conductor) fn new(instance: Instance, size: u64) -> Self {
        Self {
            instance,
            volume: Volume { size, ..Volume::default() },
            task: None,
            backlog: VecDeque::new(),
            since: None,
            told: None,
            tasks: 0,
            decided: None,
        }
    }

    /// Asks for an operation; it waits for its turn.
    pub(in crate::conductor) fn wants(&mut self, command: CommandId, op: ChainOp, now_ns: u64) {
        self.backlog.push_back((command, op));
        self.since.get_or_insert(now_ns);
    }

    /// An operation has ended.
    pub(super) fn next_waits(&mut self, now_ns: u64) {
        self.since = (!self.backlog.is_empty()).then_some(now_ns);
    }

    pub(super) const fn next_number(&mut self) -> u64 {
        self.tasks += 1;
        self.tasks
    }

    /// A name for an operation, and the number of its first ballot.
    pub(super) fn next_id(&mut self) -> (Instance, u64) {
        let number = self.next_number();
        // Unlike every other number made of this engine's instance: epochs count from below.
        (Instance(self.instance.0.wrapping_add(u128::from(number) << 64)), number)
    }

    pub(super) const fn decide(&mut self, id: Instance) {
        self.decided = Some(id);
    }

    /// This engine has decided to carry out that operation.
    pub(in crate::conductor) fn is_decided(&self, id: Instance) -> bool {
        self.decided == Some(id)
    }

    /// The operation that runs, as long as it can still be taken back.
    pub(in crate::conductor) fn undecided(&self) -> Option<Instance> {
        self.task.as_ref().and_then(Task::undecided)
    }

    /// An operation runs, or snapshots are being settled.
    pub(in crate::conductor) const fn is_busy(&self) -> bool {
        self.task.is_some()
    }

    /// The member's session ended: none of its answers counts.
    pub(in crate::conductor) fn lost(&mut self, member: MemberId) {
        if let Some(task) = self.task.as_mut() {
            task.ballot.lost(member);
        }
    }
}

/// The volume's chain as its members have it.
#[derive(Debug, Default)]
pub(in crate::conductor) struct Volume {
    /// Bytes.
    pub(in crate::conductor) size: u64,
    /// Base first, the head last.
    pub(in crate::conductor) chain: Arc<Vec<LayerInfo>>,
    /// Snapshots that are not known to be on stable storage everywhere, base first.
    pub(in crate::conductor) unsettled: Vec<String>,
    /// The layer names that the driver knows, and how many it was ever given.
    names: BTreeMap<String, LayerRef>,
    named: u32,
}

impl Volume {
    /// What a serving member calls unsettled is unsettled.
    pub(in crate::conductor) fn note_unsettled(&mut self, theirs: &[String]) {
        let mut names = self.may_settle();
        names.retain(|name| theirs.contains(name) || self.unsettled.contains(name));
        self.unsettled = names;
    }

    /// Snapshots that can be called settled, base first. Replicas know of one that all is settled up to, and if that were not on the
    /// head's branch, nothing of this would be: what a revert has left, maybe since a member called it unsettled, is none of them, nor
    /// what is removed, which any replica may have folded away.
    pub(super) fn may_settle(&self) -> Vec<String> {
        let chain = &self.chain;
        let branch = branch(chain).into_iter().map(|at| &chain[at]);
        branch.filter(|l| !l.removed && !l.name.is_empty()).map(|l| l.name.clone()).collect()
    }

    /// The number that the driver knows the layer of this name by, and whether that is still to be told to it.
    pub(in crate::conductor) fn number_of(&mut self, name: &str) -> (LayerRef, bool) {
        if let Some(known) = self.names.get(name) {
            return (*known, false);
        }
        let number = LayerRef(self.named);
        self.named += 1;
        self.names.insert(name.to_owned(), number);
        (number, true)
    }

    /// No number stands for any name; true if one did. None is given twice all the same.
    pub(in crate::conductor) fn forget_numbers(&mut self) -> bool {
        !std::mem::take(&mut self.names).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_operation_is_named_as_an_epoch_or_another_operation() {
        let mut chain = Chain::new(Instance(100), 4096);
        let (first, ballot) = chain.next_id();
        let further = chain.next_number();
        let (second, last) = chain.next_id();
        assert_eq!((ballot, further, last), (1, 2, 3));
        assert_ne!(first, second);
        for id in [first, second] {
            assert!(id.0 - 100 > u128::from(u64::MAX), "epochs are named below");
        }
        chain.decide(first);
        assert!(chain.is_decided(first) && !chain.is_decided(second));
    }

    #[test]
    fn no_number_of_a_layer_is_given_twice() {
        let mut volume = Volume::default();
        assert_eq!(volume.number_of("a"), (LayerRef(0), true));
        assert_eq!(volume.number_of("a"), (LayerRef(0), false));
        assert!(volume.forget_numbers() && !volume.forget_numbers());
        assert_eq!(volume.number_of("a"), (LayerRef(1), true));
    }
}
