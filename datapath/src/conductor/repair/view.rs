//! What chunks in doubt are made equal by: the chains of all members as they are now, and nothing that moves blocks in them.
//!
//! A fold moves blocks from one layer into the next, and gives one's file the other's name. What a repair put into either
//! meanwhile would be gone with it. So no fold begins while chunks are in doubt, one that an engine before has begun is
//! stopped, and only then are the members asked for their chains.

use lh_wire::{Control, LayerInfo, ReplicaState};

use super::super::{Conductor, ControlFor, sabotaged};
use crate::message::{MemberId, MemberSet};

/// What the members said since something was last put in doubt.
#[derive(Debug, Default)]
pub(super) struct View {
    /// Answers to what was asked before do not count.
    number: u64,
    asked: MemberSet,
    told: MemberSet,
}

impl View {
    /// Everybody is asked anew.
    pub(super) fn reset(&mut self) {
        *self = Self { number: self.number + 1, ..Self::default() };
    }

    /// The member's session ended.
    pub(super) fn lost(&mut self, member: MemberId) {
        self.asked = self.asked.without(member);
        self.told = self.told.without(member);
    }

    fn is_of(&self, members: MemberSet) -> bool {
        members.minus(self.told).is_empty()
    }
}

impl Conductor {
    /// Asks whoever has not told its chain; true if somebody was asked.
    pub(super) fn look_at_chains(&mut self) -> bool {
        if !sabotaged!(self, fold_beside_repair) && self.stop_folds() {
            return false;
        }
        let unasked = self.replicas.serving().minus(self.doubt.view.asked);
        self.doubt.view.asked = self.doubt.view.asked.or(unasked);
        for member in unasked.iter() {
            self.desk.ask(member, ControlFor::Doubt(self.doubt.view.number), Control::State);
        }
        !unasked.is_empty()
    }

    /// Every member has told its chain, and folds nothing.
    pub(super) fn sees_chains(&self) -> bool {
        self.doubt.view.is_of(self.replicas.serving())
    }

    pub(in super::super) fn on_doubt_state(
        &mut self,
        member: MemberId,
        number: u64,
        state: Box<ReplicaState>,
    ) {
        if self.doubt.view.number != number || !self.doubt.view.asked.has(member) {
            return self.on_state(member, state);
        }
        let folds = state.fold.as_ref().is_some_and(|fold| fold.error.is_none());
        self.on_state(member, state);
        if folds && !sabotaged!(self, fold_beside_repair) {
            self.stop_fold(member);
            self.desk.ask(member, ControlFor::Doubt(number), Control::State);
        } else {
            self.doubt.view.told = self.doubt.view.told.with(member);
        }
    }

    /// Snapshots that may have been written since the last flush and that every member has, base first. Removed ones are not
    /// among them: each member folds them on its own, and what they hold is copied with the layers that show it, which
    /// [`lh_wire::MERGED`] is for.
    pub(super) fn unsettled_layers(&self) -> Vec<String> {
        let states: Vec<&ReplicaState> =
            self.replicas.serving().iter().filter_map(|m| self.replicas.state(m)).collect();
        let is_unsettled = |name: &String| {
            self.chain.volume.unsettled.contains(name) || states.iter().any(|s| s.unsettled.contains(name))
        };
        let is_removed =
            |name: &String| states.iter().any(|s| named(&s.chain, name).is_some_and(|l| l.removed));
        let is_everywhere = |name: &String| states.iter().all(|s| named(&s.chain, name).is_some());
        let Some(chain) = states.first().map(|s| s.chain.iter()) else { return Vec::new() };
        let names = chain.map(|l| l.name.clone()).filter(|name| !name.is_empty());
        names.filter(|n| is_unsettled(n) && !is_removed(n) && is_everywhere(n)).collect()
    }
}

fn named<'a>(chain: &'a [LayerInfo], name: &str) -> Option<&'a LayerInfo> {
    chain.iter().find(|l| l.name == name)
}
