//! Folding removed snapshots away. Each replica folds on its own; this says when, to each, and collects how far it is.
//!
//! Nothing is folded while a replica is brought in sync: a fold moves blocks from one layer into the next, and a copy
//! that goes through them meanwhile would find a block in neither. Nor while chunks are in doubt: what a repair puts into
//! a layer would be gone with the file that the fold takes away.
//!
//! A purge is for every replica of the volume: whoever is away meanwhile takes part in it when it is a member again.

use std::collections::{BTreeMap, BTreeSet};

use lh_wire::{Control, FoldState, LayerInfo, ReplicaState};

use super::{Conductor, ControlFor, Phase, sabotaged};
use crate::message::MemberId;

/// Between two looks at a fold that runs, ns: soon at first, since most folds are short and the next one waits for this
/// one, then twice as long each time, up to the longest.
const LOOK_FIRST: u64 = 10_000_000;
const LOOK_LAST: u64 = 1_000_000_000;

/// How often a replica may be lost while it folds a snapshot. Then that is left alone there until the next purge: if it is the fold
/// that is too much for it, folds of others, which rest while it comes back, would never end either.
const LOSSES_MAX: u32 = 3;

/// What a replica folds. See the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoldStatus {
    /// Which replica.
    pub replica: String,
    /// Something is yet to be folded, or to be looked for.
    pub running: bool,
    /// The fold that runs or is about to; `None`: it is through.
    pub fold: Option<FoldState>,
    /// Snapshots that it could not fold, and why.
    pub failed: Vec<(String, String)>,
    /// Removed snapshots that stay as long as several layers stand on them, and how many do.
    pub kept: Vec<(String, usize)>,
}

/// Where one replica is.
#[derive(Debug, Default)]
struct Folder {
    step: Step,
    /// The last fold was stopped from here, and none has begun since: that it did not end says nothing of it.
    stopped: bool,
    /// What it has been told to fold, or was at when it was last asked.
    begun: Option<String>,
    failed: Vec<(String, String)>,
    kept: Vec<(String, usize)>,
    state: Option<FoldState>,
}

#[derive(Debug, Default)]
enum Step {
    /// Its state is asked for, or lies there to be looked at.
    #[default]
    Looking,
    /// `wait`: how long the next look is put off if the fold still runs.
    Asked {
        wait: u64,
    },
    Beginning(String),
    Running {
        look_at: u64,
        wait: u64,
    },
    Stopping,
    /// Nothing is left to fold.
    Through,
}

impl Folder {
    fn look_again(&mut self) {
        if matches!(self.step, Step::Through) {
            self.step = Step::Looking;
        }
    }
}

/// Folds on their way.
#[derive(Debug, Default)]
pub(super) struct Folds {
    folders: BTreeMap<MemberId, Folder>,
    /// This engine was asked for a purge.
    purged: bool,
    /// Snapshots that were marked as removed after the last purge had ended.
    unpurged: BTreeSet<String>,
    /// How often a replica, by name, was lost while it folded this snapshot.
    losses: BTreeMap<(String, String), u32>,
}

impl Conductor {
    /// Everything that is marked as removed is to be folded away, on every member.
    pub(super) fn purge(&mut self) {
        self.folds.purged = true;
        self.folds.unpurged.clear();
        self.folds.losses.clear();
        for member in self.replicas.serving().iter() {
            let folder = self.folds.folders.entry(member).or_default();
            folder.failed.clear();
            folder.look_again();
        }
    }

    /// A snapshot is marked as removed. A purge that runs takes it in, on every member; else it waits for the next.
    pub(super) fn expect_removed(&mut self, name: &str) {
        if self.folds_want() {
            self.folds.folders.values_mut().for_each(Folder::look_again);
        } else {
            self.folds.unpurged.insert(name.to_owned());
        }
    }

    /// A replica serves that was away, or is new: it may have missed a purge, or the end of one.
    pub(super) fn fold_what_was_missed(&mut self, member: MemberId) {
        if !self.folds.purged {
            return;
        }
        let name = self.replicas.name(member).to_owned();
        let given_up =
            self.folds.losses.iter().filter(|((replica, _), n)| *replica == name && **n >= LOSSES_MAX);
        let why = |n: u32| {
            format!("the replica was lost {n} times while it folded this; the next purge tries again")
        };
        let failed = given_up.map(|((_, snapshot), n)| (snapshot.clone(), why(*n))).collect();
        self.folds.folders.insert(member, Folder { failed, ..Folder::default() });
    }

    pub(super) fn advance_folds(&mut self) -> bool {
        if self.folds.folders.is_empty() || !matches!(self.phase, Phase::Running) || !self.is_open() {
            return false;
        }
        let serving = self.replicas.serving();
        self.folds.folders.retain(|member, _| serving.has(*member));
        let members: Vec<MemberId> = self.folds.folders.keys().copied().collect();
        members.into_iter().any(|member| self.fold_on(member))
    }

    fn fold_on(&mut self, member: MemberId) -> bool {
        let now = self.desk.now;
        let held = self.closing.is_some()
            || !self.is_calm()
            || self.chain_is_wanted()
            || self.scrub_is_flying()
            || self.copies_layers();
        let Some(folder) = self.folds.folders.get_mut(&member) else { return false };
        let wait = match folder.step {
            Step::Looking if !held => LOOK_FIRST,
            Step::Running { look_at, wait } if look_at <= now => wait.saturating_mul(2).min(LOOK_LAST),
            _ => return false,
        };
        folder.step = Step::Asked { wait };
        self.desk.ask(member, ControlFor::Fold, Control::State);
        true
    }

    /// A replica is being brought in sync, or will be once nobody folds, or chunks are made equal.
    fn copies_layers(&self) -> bool {
        let doubts = !self.doubt.is_empty() && !sabotaged!(self, fold_beside_repair);
        let joins = || !self.replicas.joining().is_empty();
        doubts || joins() || self.replicas.ids().any(|member| self.is_rebuild_due(member))
    }

    /// A replica's state, asked for here.
    pub(super) fn on_fold_state(&mut self, member: MemberId, state: &ReplicaState) {
        let now = self.desk.now;
        let rate = Some(self.desk.limits.fold_rate).filter(|rate| *rate > 0);
        let held = self.copies_layers();
        let Folds { folders, unpurged, .. } = &mut self.folds;
        let Some(folder) = folders.get_mut(&member) else { return };
        let Step::Asked { wait } = folder.step else { return };
        folder.state.clone_from(&state.fold);
        let runs = state.fold.as_ref().filter(|f| f.error.is_none());
        folder.begun = runs.map(|f| f.name.clone());
        if runs.is_some() {
            folder.step = Step::Running { look_at: now.saturating_add(wait), wait };
            return;
        }
        let is_left = |name: &str| state.chain.iter().any(|l| l.name == name);
        if let Some(FoldState { name, error: Some(why), .. }) =
            state.fold.clone().filter(|f| is_left(&f.name))
            && folder.failed.iter().all(|(n, _)| *n != name)
            && !(held || folder.stopped)
        {
            folder.failed.push((name, why));
        }
        folder.kept = kept(&state.chain);
        let passed = |name: &str| {
            folder.failed.iter().any(|(n, _)| n == name) || folder.kept.iter().any(|(n, _)| n == name)
        };
        let next = removed(&state.chain).find(|l| !passed(&l.name) && !unpurged.contains(&l.name));
        match next.map(|l| l.name.clone()) {
            _ if held => folder.step = Step::Looking,
            None => folder.step = Step::Through,
            Some(name) => {
                folder.step = Step::Beginning(name.clone());
                folder.begun = Some(name.clone());
                folder.stopped = false;
                self.desk.ask(member, ControlFor::Fold, Control::Fold { name, bytes_per_second: rate });
            }
        }
    }

    pub(super) fn on_fold_yes(&mut self, member: MemberId) {
        let look_at = self.desk.now.saturating_add(LOOK_FIRST);
        let Some(folder) = self.folds.folders.get_mut(&member) else { return };
        folder.begun = folder.begun.take().filter(|_| !matches!(folder.step, Step::Stopping));
        folder.step = match std::mem::take(&mut folder.step) {
            Step::Beginning(_) => Step::Running { look_at, wait: LOOK_FIRST },
            Step::Stopping => Step::Looking,
            other => other,
        };
    }

    pub(super) fn on_fold_no(&mut self, member: MemberId, text: &str) {
        let Some(folder) = self.folds.folders.get_mut(&member) else { return };
        if let Step::Beginning(name) = &folder.step {
            folder.failed.push((name.clone(), text.to_owned()));
        }
        folder.begun = None;
        folder.step = Step::Looking;
    }

    /// The replica's session ended: what it folds is asked anew when it is back.
    pub(super) fn forget_fold(&mut self, member: MemberId) {
        if let Some(snapshot) = self.folds.folders.remove(&member).and_then(|folder| folder.begun) {
            let name = self.replicas.name(member).to_owned();
            *self.folds.losses.entry((name, snapshot)).or_default() += 1;
        }
    }

    /// A rebuild or a repair is about to begin: true while something is still folded.
    pub(super) fn stop_folds(&mut self) -> bool {
        let mut busy = false;
        for member in self.folds.folders.keys().copied().collect::<Vec<_>>() {
            let Some(folder) = self.folds.folders.get_mut(&member) else { continue };
            match &folder.step {
                Step::Looking | Step::Through => continue,
                Step::Running { .. } => {
                    folder.step = Step::Stopping;
                    self.stop_fold(member);
                }
                Step::Asked { .. } | Step::Beginning(_) | Step::Stopping => {}
            }
            busy = true;
        }
        busy
    }

    /// Whatever this member folds is to rest. What this engine has begun is begun again later.
    pub(super) fn stop_fold(&mut self, member: MemberId) {
        if let Some(folder) = self.folds.folders.get_mut(&member) {
            folder.stopped = true;
        }
        self.desk.ask(member, ControlFor::Fold, Control::FoldStop);
    }

    /// Replicas stop what they fold by themselves, for an operation that changes the chain below it.
    pub(super) fn expect_folds_stopped(&mut self) {
        self.folds.folders.values_mut().for_each(|folder| folder.stopped = true);
    }

    /// Something is folded, or is to be.
    pub(super) fn folds_want(&self) -> bool {
        self.folds.folders.values().any(|folder| !matches!(folder.step, Step::Through))
    }

    pub(super) fn fold_status(&self) -> Vec<FoldStatus> {
        let of = |(member, folder): (&MemberId, &Folder)| FoldStatus {
            replica: self.replicas.name(*member).to_owned(),
            running: !matches!(folder.step, Step::Through),
            fold: folder.state.clone().filter(|s| s.error.is_none()).or_else(|| self.pending(&folder.step)),
            failed: folder.failed.clone(),
            kept: folder.kept.clone(),
        };
        self.folds.folders.iter().map(of).collect()
    }

    /// What a replica is about to fold, before it has told how far it is: it is not through.
    fn pending(&self, step: &Step) -> Option<FoldState> {
        let removed = || {
            self.chain.volume.chain.iter().find(|l| l.removed && !l.name.is_empty()).map(|l| l.name.clone())
        };
        let name = match step {
            Step::Through => None,
            Step::Beginning(name) => Some(name.clone()),
            _ => removed(),
        };
        name.map(|name| FoldState { name, ..FoldState::default() })
    }

    pub(super) fn fold_deadline(&self) -> Option<u64> {
        let due = self.folds.folders.values().filter_map(|f| match f.step {
            Step::Running { look_at, .. } => Some(look_at),
            _ => None,
        });
        due.filter(|at| *at > self.desk.now).min()
    }
}

fn removed(chain: &[LayerInfo]) -> impl Iterator<Item = &LayerInfo> {
    chain.iter().filter(|l| l.removed && !l.name.is_empty())
}

/// Removed snapshots that several layers stand on: each of these reads through it, so it is in none of them alone. A
/// revert makes such branches; it is folded when all but one of them are gone.
fn kept(chain: &[LayerInfo]) -> Vec<(String, usize)> {
    let standing = |on: &LayerInfo| chain.iter().filter(|l| l.parent == on.name).count();
    removed(chain).map(|l| (l.name.clone(), standing(l))).filter(|(_, layers)| *layers > 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_snapshot_that_branches_is_kept_until_one_branch_is_left() {
        let layer = |name: &str, parent: &str, removed| LayerInfo {
            name: name.into(),
            parent: parent.into(),
            removed,
            ..LayerInfo::default()
        };
        // The volume was reverted to b, and b removed afterwards.
        let mut chain =
            vec![layer("a", "", true), layer("b", "a", true), layer("c", "b", false), layer("", "b", false)];
        assert_eq!(kept(&chain), [("b".to_owned(), 2)]);
        chain.remove(2);
        assert_eq!(kept(&chain), []);
        // Roots of two branches, the lowest one folded away: nothing stands on a layer without a name.
        let chain = [layer("c", "", true), layer("d", "", false), layer("", "c", false)];
        assert_eq!(kept(&chain), []);
    }
}
