//! Snapshots: what an engine is asked to do to the chain of its volume, and what the copies hold of it.
//!
//! All members change at once. What an engine has heard it does, one after the other, whether the one who asked waits or not.

use lh_cluster::agent::AgentError;
use lh_cluster::api::Quorum;
use tokio::sync::oneshot;

use control::chain;

use crate::clock;
use crate::world::{Copy, Place, State};

/// Turns after which a removed snapshot is folded away.
const FOLDS_AFTER: u32 = 4;

/// How the names of snapshots begin that are taken for clones: those come again.
pub(crate) const FOR_CLONE: &str = "clone-";

/// A snapshot in a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) name: String,
    pub(crate) created: String,
    /// Writes that it holds.
    pub(crate) holds: u64,
    /// It is marked for removal, and has been for so many turns.
    pub(crate) removed: Option<u32>,
}

/// What an engine is asked.
#[derive(Clone, Debug)]
pub(crate) enum Wish {
    Take(String),
    Remove(String),
}

/// A wish, and who waits for it.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) wish: Wish,
    pub(crate) waits: Option<oneshot::Sender<Result<(), AgentError>>>,
}

/// What people know of a snapshot that they asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub(crate) volume: String,
    /// Which of the volumes of that name.
    pub(crate) birth: u64,
    /// They have taken it beside the resources.
    pub(crate) is_unnamed: bool,
    /// They have deleted it.
    pub(crate) is_deleted: bool,
    /// They have removed it beside its resource.
    pub(crate) is_removed: bool,
    /// How many writes it holds, once it was taken.
    pub(crate) holds: Option<u64>,
}

/// The layers as an engine tells them.
pub(crate) fn told(layers: &[Layer]) -> Vec<chain::Layer> {
    let mut parent = String::new();
    let mut all = Vec::new();
    for layer in layers {
        all.push(chain::Layer {
            name: layer.name.clone(),
            parent: std::mem::replace(&mut parent, layer.name.clone()),
            removed: layer.removed.is_some(),
            user_created: true,
            created: layer.created.clone(),
            ..chain::Layer::default()
        });
    }
    all.push(chain::Layer { parent, ..chain::Layer::default() });
    all
}

impl State {
    /// Carries out a wish on all of these copies, which are the members.
    pub(crate) fn carry_out(&mut self, volume: &str, birth: u64, places: &[Place], asked: Asked) {
        let done = match &asked.wish {
            Wish::Take(name) => self.take(volume, birth, places, name),
            Wish::Remove(name) => {
                let mut is_there = false;
                self.each(places, |copy| {
                    for layer in copy.chain.iter_mut().filter(|layer| layer.name == *name) {
                        is_there = true;
                        layer.removed.get_or_insert(0);
                    }
                });
                // Nobody waits who was asked beside the resources. What has yet to be taken is not removed by it.
                let is_removed = is_there && asked.waits.is_none();
                if let Some(known) = self.snapshots.get_mut(name).filter(|_| is_removed) {
                    known.is_removed = true;
                    self.count("somebody removed a snapshot beside its resource");
                }
                Ok(())
            }
        };
        if let Some(waits) = asked.waits {
            let _ = waits.send(done);
        }
    }

    fn each(&mut self, places: &[Place], mut change: impl FnMut(&mut Copy)) {
        for place in places {
            if let Some(copy) = self.copies.get_mut(place) {
                change(copy);
            }
        }
    }

    fn take(&mut self, volume: &str, birth: u64, places: &[Place], name: &str) -> Result<(), AgentError> {
        let first = places.first().and_then(|place| self.copies.get(place));
        // Marked for removal or not.
        if first.is_some_and(|copy| copy.chain.iter().any(|l| l.name == name)) {
            return Ok(());
        }
        let holds = self.volumes.get(volume).map(|v| v.answered).unwrap_or_default();
        let layer = Layer { name: name.to_owned(), created: clock::written(), holds, removed: None };
        self.each(places, |copy| copy.chain.push(layer.clone()));
        self.count("a snapshot was taken");
        if name.starts_with(FOR_CLONE) {
            self.taken_for_clones.insert((birth, holds));
            return Ok(());
        }
        let Some(known) = self.snapshots.get_mut(name) else {
            self.wrong(format!("{name} of {volume} is taken, and nobody has asked for it"));
            return Ok(());
        };
        let before = known.holds.replace(holds);
        let is_of = known.volume == volume && known.birth == birth;
        let known = known.clone();
        // One that is lost before anybody was told of it is taken again.
        let may_be_lost = self.volumes.get(volume).is_some_and(|v| v.quorum == Quorum::Unsafe);
        if before.is_some() && !may_be_lost || !is_of {
            self.wrong(format!("{name} of {volume}, birth {birth}, is taken: {known:?}, before {before:?}"));
        }
        Ok(())
    }

    /// Folds away what is removed, after a while. Whoever copies from it does not get what it held.
    pub(crate) fn fold(&mut self, places: &[Place]) {
        let mut folded = Vec::new();
        self.each(places, |copy| {
            for layer in &mut copy.chain {
                if let Some(turns) = &mut layer.removed {
                    *turns += 1;
                }
            }
            let is_due = |layer: &Layer| layer.removed.is_some_and(|turns| turns > FOLDS_AFTER);
            folded.extend(copy.chain.iter().filter(|l| is_due(l)).map(|l| l.name.clone()));
            copy.chain.retain(|layer| !is_due(layer));
        });
        for copying in self.replicas.values_mut().filter_map(|replica| replica.copying.as_mut()) {
            copying.is_spoiled |= places.contains(&copying.from) && folded.contains(&copying.snapshot);
        }
        if !folded.is_empty() {
            self.count("a snapshot was folded away");
        }
    }
}
