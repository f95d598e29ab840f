//! Which image a volume's engine and replicas are of, and how they come to be of another one while the volume is used: first
//! the engine, then one replica after the other, each only while all hold everything.

use std::time::Duration;

use super::draft::Draft;
use crate::api::{Condition, Conditions, InstanceState, ReplicaSpec, VolumeStatus};
use crate::plan::age_by_other;
use crate::plan::upgrade::{FAILED, NOT_DEPLOYED, UPGRADED};

/// After one replica's program was exchanged the next one waits so long: until what the engine said of the first is news from
/// after that.
const SETTLES: Duration = Duration::from_secs(12);

/// The condition's reasons while programs are exchanged: the engine's, then the replicas'.
const ENGINE: &str = "Engine";
const REPLICAS: &str = "Replicas";

/// True while programs of an attached volume are exchanged, not while that waits or has failed.
pub fn exchanges(status: &VolumeStatus) -> bool {
    let condition = status.conditions.get_condition(UPGRADED);
    condition.is_some_and(|c| matches!(c.reason.as_str(), ENGINE | REPLICAS))
}

/// Where the exchange of one replica stands.
enum Turn {
    /// It is of the image, or stays as it is for now.
    Over,
    /// It goes on, or has just ended; look again after this time.
    Runs(Option<Duration>),
    /// The image does not serve there.
    Failed(String),
}

impl Draft<'_> {
    /// The image of replicas that are started now: the engine's, unless that does not serve with it.
    pub(super) fn image(&self) -> String {
        let image = self.engine_image();
        let engine = self.o.engine.and_then(|e| e.status.as_ref());
        let fallback = engine.filter(|s| s.failed_image == image && !s.current_image.is_empty());
        fallback.map_or(image, |s| s.current_image.clone())
    }

    /// The image that the engine should be of. A volume whose spec names none, or one that is on no node, such as an image of
    /// Longhorn's own engine, follows its managers, from one attachment to the next.
    pub(super) fn engine_image(&self) -> String {
        let asked = &self.o.volume.spec.image;
        let runs = self.o.engine.and_then(|e| e.status.as_ref()).is_some_and(|s| s.current_image == *asked);
        if !asked.is_empty() && (runs || self.is_anywhere(asked)) {
            return asked.clone();
        }
        let before = self.o.engine.map(|e| e.spec.image.as_str()).unwrap_or_default();
        let rests = self.engine_state() == InstanceState::Stopped;
        // What no node has, as an image of Longhorn's, is not waited with until all nodes of the volume have ours.
        let is_lost = || !self.is_anywhere(before) && self.is_anywhere(self.o.image);
        let newest = before.is_empty() || rests && (self.lacking(self.o.image).is_empty() || is_lost());
        if newest { self.o.image.to_owned() } else { before.to_owned() }
    }

    /// True if some node has the program of that image.
    pub(super) fn is_anywhere(&self, image: &str) -> bool {
        self.o.cluster.nodes.values().any(|node| node.programs.contains(image))
    }

    /// The nodes of the volume that do not have the program of that image.
    fn lacking(&self, image: &str) -> Vec<&str> {
        let has = |node: &str| self.o.cluster.nodes.get(node).is_some_and(|n| n.programs.contains(image));
        let nodes = self.replicas.values().map(|r| r.node_id.as_str());
        let mut lacking: Vec<&str> = nodes
            .chain([self.o.volume.spec.node_id.as_str()])
            .filter(|node| !node.is_empty() && !has(node))
            .collect();
        lacking.sort_unstable();
        lacking.dedup();
        lacking
    }

    /// Exchanges the programs of an attached volume for those of the image that its spec names.
    pub(super) fn follow_image(&mut self) {
        if !self.is_attached() || self.o.volume.spec.node_id.is_empty() {
            self.status.conditions.retain(|c| c.kind != UPGRADED);
            return;
        }
        let wanted = self.engine_image();
        let engine = self.o.engine.and_then(|e| e.status.clone()).unwrap_or_default();
        let asked = self.engine.as_ref().map(|e| e.image.clone()).unwrap_or_default();
        if asked != wanted {
            // Back to what runs nothing has to be there or well.
            return if engine.current_image == wanted {
                self.change_engine(&wanted)
            } else {
                self.begin(&wanted)
            };
        }
        if engine.failed_image == wanted && engine.current_image != wanted {
            let why = message_of(&engine.conditions);
            return self.say_upgrade(FAILED, why);
        }
        if engine.current_image != wanted {
            return self.say_upgrade(ENGINE, format!("the engine changes to {wanted}"));
        }
        let turns: Vec<Turn> =
            self.replicas.iter().map(|(name, spec)| self.turn(name, spec, &wanted)).collect();
        for turn in turns {
            match turn {
                Turn::Over => {}
                Turn::Failed(why) => return self.say_upgrade(FAILED, why),
                Turn::Runs(left) => {
                    left.into_iter().for_each(|left| self.look_again(left));
                    return self
                        .say_upgrade(REPLICAS, format!("the replicas change to {wanted}, one by one"));
                }
            }
        }
        let whole = self.all_in_sync();
        let next = self.replicas.values_mut().find(|r| r.image != wanted && r.failed_at.is_empty());
        if let Some(next) = next {
            if whole {
                next.image = wanted.clone();
            }
            return self.say_upgrade(REPLICAS, format!("the replicas change to {wanted}, one by one"));
        }
        self.status.current_image.clone_from(&wanted);
        let named = &self.o.volume.spec.image;
        if !named.is_empty() && *named != wanted {
            let message = format!("the program of {named} is on no node; the volume runs with {wanted}");
            return self.say_upgrade(NOT_DEPLOYED, message);
        }
        let was_on = self.status.conditions.get_condition(UPGRADED).is_some();
        self.status.conditions.retain(|c| c.kind != UPGRADED);
        if was_on {
            self.tell(false, "Upgraded", format!("the volume runs with {wanted}"));
        }
    }

    /// Begins with the engine, if nothing is in the way.
    fn begin(&mut self, wanted: &str) {
        let lacking = self.lacking(wanted).join(", ");
        if !lacking.is_empty() {
            return self.say_upgrade(
                NOT_DEPLOYED,
                format!("the program of {wanted} is not on these nodes: {lacking}"),
            );
        }
        if !self.all_in_sync() {
            return self.say_upgrade(
                "Waiting",
                format!("before it changes to {wanted}, every replica has to hold everything"),
            );
        }
        self.change_engine(wanted);
    }

    fn change_engine(&mut self, wanted: &str) {
        if let Some(engine) = &mut self.engine {
            wanted.clone_into(&mut engine.image);
        }
        self.tell(false, "Upgrading", format!("the engine changes to {wanted}"));
        self.say_upgrade(ENGINE, format!("the engine changes to {wanted}"));
    }

    fn all_in_sync(&self) -> bool {
        self.replicas.iter().all(|(name, spec)| self.is_in_sync(name, spec))
    }

    fn turn(&self, name: &str, spec: &ReplicaSpec, wanted: &str) -> Turn {
        let status = self.replica(name).and_then(|r| r.status.clone()).unwrap_or_default();
        // One that never served is not exchanged: it starts as what it is to be.
        let is_new = status.current_image.is_empty();
        if spec.image != wanted || is_new || !self.o.nodes_up.contains(&spec.node_id) {
            return Turn::Over;
        }
        if status.failed_image == wanted && status.current_image != wanted {
            return Turn::Failed(format!("replica {name}: {}", message_of(&status.conditions)));
        }
        if status.current_image != wanted {
            return Turn::Runs(None);
        }
        let ended = status
            .conditions
            .get_condition(UPGRADED)
            .and_then(|c| age_by_other(&c.last_transition_time, self.o.now));
        match ended.and_then(|ended| SETTLES.checked_sub(ended)) {
            Some(left) if !left.is_zero() => Turn::Runs(Some(left)),
            _ => Turn::Over,
        }
    }

    fn say_upgrade(&mut self, reason: &'static str, message: String) {
        let before = self.status.conditions.get_condition(UPGRADED).map(|c| c.reason.clone());
        if reason == FAILED && before.as_deref() != Some(reason) {
            self.tell(true, "UpgradeFailed", message.clone());
        }
        let now = self.now.clone();
        self.status.conditions.set_condition(UPGRADED, false, reason, &message, &now);
    }
}

/// What is said of the exchange.
fn message_of(conditions: &Vec<Condition>) -> String {
    conditions.get_condition(UPGRADED).map(|c| c.message.clone()).unwrap_or_default()
}
