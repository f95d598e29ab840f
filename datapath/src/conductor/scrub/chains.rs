//! Whether the members hold the same in the same layers.

use std::collections::{BTreeMap, BTreeSet};

use lh_wire::{LayerInfo, ReplicaState};

use crate::message::{MemberId, MemberSet};

/// What the members said of their chains.
#[derive(Debug, Default)]
pub(super) struct Chains {
    asked: MemberSet,
    heard: BTreeMap<MemberId, Vec<LayerInfo>>,
    apart: BTreeSet<String>,
}

impl Chains {
    /// All of the set, and nobody else, have told theirs.
    pub(super) fn are_of(&self, members: MemberSet) -> bool {
        self.heard.keys().copied().collect::<MemberSet>() == members
    }

    /// Who of the set is still to be asked; they are asked now.
    pub(super) fn ask(&mut self, members: MemberSet) -> MemberSet {
        let unasked = members.minus(self.asked);
        self.asked = self.asked.or(unasked);
        self.heard.retain(|member, _| members.has(*member));
        unasked
    }

    pub(super) fn heard(&mut self, member: MemberId, state: &ReplicaState) {
        if self.asked.has(member) {
            self.heard.insert(member, state.chain.clone());
            self.apart = self.find_apart();
        }
    }

    /// Names of the layers in which members may differ, and rightly so: removed snapshots, which may be folded in part, those
    /// that not everybody has, and the layers that stand on them, which blocks are folded into: told next to them or not.
    pub(super) const fn apart(&self) -> &BTreeSet<String> {
        &self.apart
    }

    fn find_apart(&self) -> BTreeSet<String> {
        let everywhere = |name: &str| self.heard.values().all(|chain| chain.iter().any(|l| l.name == name));
        let mut apart = BTreeSet::new();
        for chain in self.heard.values() {
            let moves = |layer: &LayerInfo| layer.removed || !everywhere(&layer.name);
            let below =
                |layer: &LayerInfo| chain.iter().find(|l| !l.name.is_empty() && l.name == layer.parent);
            for layer in chain.iter().filter(|layer| moves(layer) || below(layer).is_some_and(moves)) {
                apart.insert(layer.name.clone());
            }
            // A fold into the layer below is finished by its name: whoever has another parent has folded.
            for layer in chain {
                let parents = self.heard.values().flatten().filter(|l| l.name == layer.name);
                if parents.into_iter().any(|l| l.parent != layer.parent) {
                    apart.insert(layer.name.clone());
                }
            }
        }
        apart
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(names: &[(&str, bool)]) -> ReplicaState {
        let mut parent = String::new();
        let layer = |(name, removed): &(&str, bool)| LayerInfo {
            name: (*name).to_owned(),
            removed: *removed,
            parent: std::mem::replace(&mut parent, (*name).to_owned()),
            ..LayerInfo::default()
        };
        ReplicaState { chain: names.iter().map(layer).collect(), ..ReplicaState::default() }
    }

    fn apart(chains: &[&[(&str, bool)]]) -> Vec<String> {
        let mut all = Chains::default();
        let members: MemberSet = (0_u8..).zip(chains).map(|(n, _)| MemberId(n)).collect();
        assert_eq!(all.ask(members), members);
        for (n, chain) in (0_u8..).zip(chains) {
            assert!(!all.are_of(members));
            all.heard(MemberId(n), &state(chain));
        }
        assert!(all.are_of(members));
        all.apart().iter().cloned().collect()
    }

    #[test]
    fn what_may_be_folded_is_passed_over_with_what_stands_on_it() {
        let sound: &[(&str, bool)] = &[("a", false), ("b", false), ("", false)];
        assert!(apart(&[sound, sound]).is_empty());
        let removed: &[(&str, bool)] = &[("a", true), ("b", false), ("c", false), ("", false)];
        assert_eq!(apart(&[removed, removed]), ["a", "b"]);
        // One has folded b into the head.
        let folded: &[(&str, bool)] = &[("a", false), ("", false)];
        assert_eq!(apart(&[sound, folded, sound]), ["", "b"]);
        assert_eq!(apart(&[folded, folded]), Vec::<String>::new());
    }

    /// b is removed, and d stands on it; c stands beside it, and was taken between them.
    #[test]
    fn what_stands_beside_a_removed_snapshot_is_compared() {
        let mut state = state(&[("a", false), ("b", true), ("c", false), ("d", false), ("", false)]);
        for (at, parent) in [(2, "a"), (3, "b"), (4, "c")] {
            parent.clone_into(&mut state.chain[at].parent);
        }
        let mut all = Chains::default();
        all.ask(MemberSet::EMPTY.with(MemberId(0)));
        all.heard(MemberId(0), &state);
        assert_eq!(all.apart().iter().collect::<Vec<_>>(), ["b", "d"]);
    }
}
