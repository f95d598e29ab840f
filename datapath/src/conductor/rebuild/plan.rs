//! What has to be looked at when a replica comes back. Pure: from what the target and its source say of themselves.
//!
//! The target's layers are those of the last epoch that had it, but for what was written since (members keep that), and
//! for what it holds too much or lost itself. That is trusted of a layer only if it stands on the same layer as at the
//! source: a fold moves what one layer holds into the one above it, and so gives that one another parent.
//!
//! A name does not make two layers the same. Once a snapshot is folded away its name is free, and what it held may come
//! back as part of the next snapshot that has the name. The time at which they were taken tells them apart: no two of a volume
//! have the same ([`super::super::chain`]).
//!
//! Who was lost between a revert's preparation and its switch may have the head that the revert took back, and nobody remembers
//! what that held: everything is looked at. Who was lost before it was prepared has nobody who remembers for it (`replica`'s
//! `leavers`), and who was lost after it has switched.
//!
//! A fold the other way that was broken off has left copies of what the upper layer held in the removed snapshot below. They
//! show where the upper layer is to say nothing any more. So a removed snapshot is looked at wherever the layer on it is.

use lh_block::Extent;
use lh_wire::{ChainOp, Keep, LayerInfo, ReplicaState};

use super::super::branch::branch;

/// How much of a layer may differ, from least to most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum How {
    /// It is the same.
    Nothing,
    /// What was written since the target left.
    Marked,
    /// Anything.
    Whole,
}

/// What becomes of the target's layers, and what is to be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Goes with `RebuildBegin`.
    pub(super) keep: Option<Keep>,
    /// For each layer of the source.
    pub(super) how: Vec<How>,
    /// What the target itself may have too much, or have lost.
    pub(super) own: Vec<Extent>,
}

/// Plans. Not `trusting`: everything is compared, whatever is known. Not `settled`: what the source has in doubt may yet be taken back,
/// and if this rebuild is interrupted nobody else remembers it.
pub(super) fn plan(target: &ReplicaState, source: &ReplicaState, trusting: bool, settled: bool) -> Plan {
    let own = if target.lived {
        target.in_doubt.clone()
    } else {
        target.in_doubt.iter().chain(&target.intent).copied().collect()
    };
    let whole = vec![How::Whole; source.chain.len()];
    let Some((target_head, _)) = target.chain.split_last().filter(|_| !target.imported) else {
        return Plan { keep: None, how: whole, own };
    };
    if target.size > source.size || source.chain.is_empty() {
        return Plan { keep: None, how: whole, own };
    }
    let branch = branch(&source.chain);
    let follows = branch.iter().position(|at| source.chain[*at].parent == target_head.parent);
    // The layer that the target's head has become, and its place in the branch.
    let heir = follows.map(|place| &source.chain[branch[place]]).filter(|l| !has(&target.chain, &l.name));
    let head = heir.map(|l| l.name.clone()).unwrap_or_default();
    let younger = |at: usize| {
        heir.is_some() && branch.iter().position(|b| *b == at).is_some_and(|place| Some(place) > follows)
    };
    let reverts = matches!(target.prepared, Some((_, ChainOp::Revert { .. })));
    let known = target.epoch.is_some() && (!target.rebuilding || target.kept.is_some()) && !reverts;
    let was_unsure = |name: &str| target.kept.as_ref().is_some_and(|k| k.unsure.iter().any(|u| u == name));
    // A snapshot that was taken while the head was filled has become what the head was, and nothing taken since is settled there.
    let unsure =
        |name: &str| was_unsure(name) || (was_unsure("") && target.unsettled.iter().any(|u| u == name));
    let is_unsettled = |name: &String| target.unsettled.contains(name) || source.unsettled.contains(name);
    let stand_on_the_same = |held: &LayerInfo, layer: &LayerInfo| {
        held.parent == layer.parent
            && taken(&target.chain, &held.parent) == taken(&source.chain, &layer.parent)
    };
    let marked = if settled { How::Marked } else { How::Whole };
    let how = |(at, layer): (usize, &LayerInfo)| {
        let was_head = layer.name == head && (heir.is_some() || follows.is_none());
        let held = if was_head {
            Some(target_head)
        } else {
            target.chain.iter().find(|l| l.name == layer.name && !l.name.is_empty())
        };
        match held {
            _ if !trusting || !known => How::Whole,
            None if younger(at) => marked,
            None => How::Whole,
            Some(held) if !stand_on_the_same(held, layer) || unsure(&held.name) => How::Whole,
            Some(held) if !was_head && held.created != layer.created => How::Whole,
            // A repair of what is in doubt goes into what any member calls unsettled.
            Some(held) if was_head || is_unsettled(&held.name) => marked,
            Some(_) => How::Nothing,
        }
    };
    let mut how: Vec<How> = source.chain.iter().enumerate().map(how).collect();
    look_below(&mut how, target, source);
    // What is not settled is counted from the head, which the target takes over. A snapshot that a revert left aside would be
    // forgotten there, so an interrupted rebuild has to remember it.
    let unsure = |at: usize| match how[at] {
        How::Nothing => false,
        How::Marked => !branch.contains(&at),
        How::Whole => true,
    };
    let unsure = (0..how.len()).filter(|at| unsure(*at)).map(|at| source.chain[at].name.clone()).collect();
    Plan { keep: Some(Keep { head, unsure }), how, own }
}

/// A removed snapshot is looked at as widely as the layer that stands on it.
fn look_below(how: &mut [How], target: &ReplicaState, source: &ReplicaState) {
    let is_removed = |layer: &LayerInfo| {
        layer.removed || target.chain.iter().any(|held| held.removed && held.name == layer.name)
    };
    // From the top down, since a removed snapshot may stand on another.
    for (at, layer) in source.chain.iter().enumerate().rev() {
        let below = source.chain.iter().position(|l| !l.name.is_empty() && l.name == layer.parent);
        if let Some(below) = below.filter(|below| is_removed(&source.chain[*below])) {
            how[below] = how[below].max(how[at]);
        }
    }
}

fn has(chain: &[LayerInfo], name: &str) -> bool {
    !name.is_empty() && chain.iter().any(|l| l.name == name)
}

/// When the snapshot of this name was taken; `None`: there is none.
fn taken<'a>(chain: &'a [LayerInfo], name: &str) -> Option<&'a str> {
    chain.iter().find(|l| !name.is_empty() && l.name == name).map(|l| l.created.as_str())
}

#[cfg(test)]
mod tests {
    use lh_block::{Epoch, Instance};
    use lh_wire::Kept;

    use super::*;

    /// Layers over each other, the head last.
    fn chain(names: &[&str]) -> Vec<LayerInfo> {
        let mut parent = String::new();
        let layer = |name: &&str| LayerInfo {
            name: (*name).into(),
            parent: std::mem::replace(&mut parent, (*name).into()),
            ..LayerInfo::default()
        };
        names.iter().chain(&[""]).map(layer).collect()
    }

    fn state(names: &[&str]) -> ReplicaState {
        let epoch = Some(Epoch { id: Instance(1), ..Epoch::default() });
        ReplicaState { chain: chain(names), epoch, lived: true, ..ReplicaState::default() }
    }

    fn how(target: &ReplicaState, source: &ReplicaState) -> (String, Vec<How>) {
        let plan = plan(target, source, true, true);
        (plan.keep.expect("something stays").head, plan.how)
    }

    use How::{Marked, Nothing, Whole};

    #[test]
    fn with_the_same_chain_only_the_head_and_what_is_not_settled_is_looked_at() {
        assert_eq!(
            how(&state(&["a", "b"]), &state(&["a", "b"])),
            (String::new(), vec![Nothing, Nothing, Marked])
        );
        let unsettled = || ReplicaState { unsettled: vec!["b".into()], ..state(&["a", "b"]) };
        assert_eq!(how(&unsettled(), &state(&["a", "b"])).1, [Nothing, Marked, Marked]);
        assert_eq!(how(&state(&["a", "b"]), &unsettled()).1, [Nothing, Marked, Marked]);
    }

    #[test]
    fn who_has_prepared_a_revert_and_not_carried_it_out_is_compared_wholly() {
        let op = |name: &str| ChainOp::Revert { name: name.into(), created: String::new() };
        let target = ReplicaState { prepared: Some((Instance(2), op("b"))), ..state(&["a", "b"]) };
        assert_eq!(how(&target, &state(&["a", "b"])).1, [Whole, Whole, Whole]);
        let other = ChainOp::MarkRemoved { name: "a".into() };
        let target = ReplicaState { prepared: Some((Instance(2), other)), ..state(&["a", "b"]) };
        assert_eq!(how(&target, &state(&["a", "b"])).1, [Nothing, Nothing, Marked]);
    }

    #[test]
    fn snapshots_taken_meanwhile_take_the_head_over() {
        let (head, how) = how(&state(&["a"]), &state(&["a", "b", "c"]));
        assert_eq!((head.as_str(), how), ("b", vec![Nothing, Marked, Marked, Marked]));
        let (head, how) = super::tests::how(&state(&[]), &state(&["b"]));
        assert_eq!((head.as_str(), how), ("b", vec![Marked, Marked]));
    }

    #[test]
    fn a_layer_over_another_one_is_looked_at_wholly() {
        assert_eq!(how(&state(&["a", "x", "b"]), &state(&["a", "b"])).1, [Nothing, Whole, Marked]);
        assert_eq!(how(&state(&["a", "b"]), &state(&["a", "x", "b"])).1, [Nothing, Whole, Whole, Marked]);
        assert_eq!(how(&state(&["a", "x"]), &state(&["a"])), (String::new(), vec![Nothing, Whole]));
    }

    /// Snapshot `x` was folded into the head after the target had left, and then another one was taken that has its name.
    #[test]
    fn a_snapshot_that_has_anothers_name_is_another() {
        let (target, mut source) = (state(&["a", "x"]), state(&["a", "x"]));
        assert_eq!(how(&target, &source).1, [Nothing, Nothing, Marked]);
        source.chain[1].created = "2026-01-02T00:00:00Z".into();
        assert_eq!(how(&target, &source).1, [Nothing, Whole, Whole]);
        // And one more over it: the head has become that one.
        let mut source = state(&["a", "x", "y"]);
        source.chain[1].created = "2026-01-02T00:00:00Z".into();
        assert_eq!(how(&target, &source), ("y".into(), vec![Nothing, Whole, Whole, Marked]));
    }

    /// The target may have begun to fold what stands on it into it.
    #[test]
    fn a_removed_snapshot_is_looked_at_where_the_layer_on_it_is() {
        let removed = |mut state: ReplicaState, names: &[&str]| {
            state.chain.iter_mut().filter(|l| names.contains(&&*l.name)).for_each(|l| l.removed = true);
            state
        };
        let (one, two) = (|| state(&["a", "b"]), ["a", "b"]);
        assert_eq!(how(&removed(one(), &["b"]), &removed(one(), &["b"])).1, [Nothing, Marked, Marked]);
        assert_eq!(how(&removed(one(), &two), &removed(one(), &two)).1, [Marked, Marked, Marked]);
        // What stands on it is the same.
        assert_eq!(how(&removed(one(), &["a"]), &removed(one(), &["a"])).1, [Nothing, Nothing, Marked]);
        // It was removed while the target was out, or the head has become a snapshot.
        assert_eq!(how(&one(), &removed(one(), &["b"])).1, [Nothing, Marked, Marked]);
        let target = removed(state(&["a"]), &["a"]);
        assert_eq!(how(&target, &removed(one(), &["a"])), ("b".into(), vec![Marked, Marked, Marked]));
        let unsure = ReplicaState {
            rebuilding: true,
            kept: Some(Kept { unsure: vec![String::new()] }),
            ..removed(one(), &["b"])
        };
        assert_eq!(how(&unsure, &removed(one(), &["b"])).1, [Nothing, Whole, Whole]);
    }

    #[test]
    fn without_an_epoch_or_trust_everything_is() {
        let fresh = ReplicaState { epoch: None, ..state(&[]) };
        assert_eq!(how(&fresh, &state(&["a"])), ("a".into(), vec![Whole, Whole]));
        let keep = plan(&fresh, &state(&["a"]), true, true).keep.unwrap();
        assert_eq!(keep.unsure, ["a", ""]);
        assert_eq!(plan(&state(&["a"]), &state(&["a"]), false, true).how, [Whole, Whole]);
        let lost = ReplicaState { rebuilding: true, ..state(&["a"]) };
        assert_eq!(how(&lost, &state(&["a"])).1, [Whole, Whole]);
        let foreign = ReplicaState { imported: true, ..state(&["a"]) };
        assert_eq!(plan(&foreign, &state(&["a"]), true, true).keep, None);
    }

    /// The source alone may hold writes that nobody else has, and be told to give them up.
    #[test]
    fn what_may_be_taken_back_is_looked_at_wholly_and_stays_unsure() {
        let target = ReplicaState { unsettled: vec!["b".into()], ..state(&["a", "b"]) };
        let plan = plan(&target, &state(&["a", "b"]), true, false);
        assert_eq!(plan.how, [Nothing, Whole, Whole]);
        assert_eq!(plan.keep.expect("something stays").unsure, ["b", ""]);
    }

    #[test]
    fn what_was_unsure_before_stays_so() {
        let kept = Some(Kept { unsure: vec!["a".into(), String::new()] });
        let target = ReplicaState { rebuilding: true, kept, ..state(&["a", "b"]) };
        assert_eq!(how(&target, &state(&["a", "b"])).1, [Whole, Nothing, Whole]);
        let (head, later) = how(&target, &state(&["a", "b", "c"]));
        assert_eq!((head.as_str(), later), ("c", vec![Whole, Nothing, Whole, Marked]));
    }

    /// The rebuild before was interrupted, too, after the head that was to be looked at wholly had become a snapshot.
    #[test]
    fn what_the_head_was_unsure_of_the_snapshot_is_that_it_became() {
        let kept = Some(Kept { unsure: vec![String::new()] });
        let unsettled = vec!["b".to_owned()];
        let target = ReplicaState { rebuilding: true, kept, unsettled, ..state(&["a", "b"]) };
        let plan = plan(&target, &state(&["a", "b", "c"]), true, true);
        assert_eq!(plan.how, [Nothing, Whole, Whole, Marked]);
        assert_eq!(plan.keep.expect("something stays").unsure, ["b", "c"]);
    }

    /// A revert left a snapshot aside that the target had only in part. Once the target has the new head, it does not tell
    /// that the snapshot is not settled.
    #[test]
    fn a_snapshot_beside_the_branch_stays_unsure_when_the_rebuild_is_interrupted() {
        let mut source = state(&["a", "b"]);
        source.chain[2].parent = "a".into();
        let target = ReplicaState {
            rebuilding: true,
            kept: Some(Kept::default()),
            unsettled: vec!["b".into()],
            ..state(&["a", "b"])
        };
        let first = plan(&target, &source, true, true);
        assert_eq!(first.how, [Nothing, Marked, Whole]);
        let kept = first.keep.map(|keep| Kept { unsure: keep.unsure });
        let again = ReplicaState { kept, chain: source.chain.clone(), unsettled: Vec::new(), ..target };
        assert_eq!(how(&again, &source).1, [Nothing, Whole, Whole]);
    }

    #[test]
    fn of_its_own_it_brings_what_is_in_doubt_or_marked() {
        let doubt = vec![Extent::new(0, 4096)];
        let target =
            ReplicaState { in_doubt: doubt.clone(), intent: vec![Extent::new(8192, 4096)], ..state(&[]) };
        assert_eq!(plan(&target, &state(&[]), true, true).own, doubt);
        let died = ReplicaState { lived: false, ..target };
        assert_eq!(plan(&died, &state(&[]), true, true).own.len(), 2);
    }
}
