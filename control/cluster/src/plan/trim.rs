//! A request to trim a volume's file system: who answers it, what is refused, which snapshots go with it.
//!
//! It is an annotation of the Volume with the time of the request, RFC 3339; the answer is the condition [`TRIMMED`], which
//! names the request that it is of. The manager of the volume's node has the node's CSI driver carry it out; the leader
//! refuses what no node can be asked about.

use std::collections::BTreeSet;
use std::time::Duration;

use control::chain::Layer;
use k8s_openapi::jiff::Timestamp;

use super::{Event, age, written};
use crate::agent::TrimView;
use crate::api::{Condition, Conditions, Toggle, Volume, VolumeState};
use crate::settings::Settings;

/// The annotation that asks.
pub const REQUESTED_AT: &str = "longhorn.io/trim-requested-at";

/// The condition that answers. Its `lastProbeTime` is the request.
pub const TRIMMED: &str = "Trimmed";

/// A driver that starts anew is away for less. Afterwards the request is answered: whoever asked may ask again.
const DRIVER_AWAY: Duration = Duration::from_secs(120);

/// Why a request was not carried out, in one word for programs.
const REFUSED: &str = "Refused";
const FAILED: &str = "Failed";

/// The request that nobody has answered yet.
pub fn pending(volume: &Volume) -> Option<&str> {
    let asked = volume.metadata.annotations.as_ref()?.get(REQUESTED_AT)?;
    let answered = volume.status.as_ref().and_then(|s| s.conditions.get_condition(TRIMMED));
    let is_new = !asked.is_empty() && answered.is_none_or(|c| c.last_probe_time != *asked);
    is_new.then_some(asked.as_str())
}

/// What is to be done about a request that nobody has answered yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing, until the volume changes.
    Wait,
    /// It is answered so.
    Answer(Answer),
    /// The driver of this node is asked.
    Ask,
}

/// What is written and told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    reason: &'static str,
    message: String,
}

/// What becomes of a request. `here`: this manager's node; `None`: it leads, and the volume is on nobody's node.
pub fn step(volume: &Volume, request: &str, here: Option<&str>) -> Step {
    let refuse = |message: &str| Step::Answer(Answer { reason: REFUSED, message: message.to_owned() });
    if request.parse::<Timestamp>().is_err() {
        return refuse(&format!("{request:?} is no time as RFC 3339 has it"));
    }
    let (spec, status) = (&volume.spec, volume.status.clone().unwrap_or_default());
    if spec.encrypted {
        return refuse("the volume is encrypted");
    }
    if spec.node_id.is_empty() {
        return refuse("the volume is not attached: only what is mounted can be trimmed");
    }
    if spec.disable_frontend {
        return refuse("the volume is attached without a device");
    }
    let Some(here) = here.filter(|here| *here == spec.node_id) else { return Step::Wait };
    if status.state != VolumeState::Attached || status.current_node_id != here {
        return Step::Wait;
    }
    Step::Ask
}

/// What the driver of this node says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// How it goes, or went.
    State(TrimView),
    /// It cannot be done as things are.
    Refused(String),
    /// The driver does not answer.
    Away(String),
}

/// What becomes of a request after that; `None`: it is asked again later.
pub fn answer(told: &Told, request: &str, now: Timestamp) -> Option<Answer> {
    let (reason, message) = match told {
        Told::State(view) if view.running => return None,
        Told::State(view) if view.error.is_empty() => {
            (TRIMMED, format!("{} bytes of the volume are in no use any more", view.bytes))
        }
        Told::State(view) => (FAILED, format!("after {} bytes: {}", view.bytes, view.error)),
        Told::Refused(why) => (REFUSED, why.clone()),
        Told::Away(_) if age(request, now).is_some_and(|age| age < DRIVER_AWAY) => return None,
        Told::Away(why) => (FAILED, why.clone()),
    };
    Some(Answer { reason, message })
}

/// What became of the snapshots that were to go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Those that go.
    pub names: Vec<String>,
    /// Why others stay; empty if none does.
    pub trouble: String,
}

impl Answer {
    /// True if the file system was trimmed.
    pub fn is_done(&self) -> bool {
        self.reason == TRIMMED
    }

    /// Adds which snapshots went with it, and why others did not.
    pub fn with_removed(&mut self, removed: &Removed) {
        if !removed.names.is_empty() {
            self.message.push_str("; removed with them: ");
            self.message.push_str(&removed.names.join(", "));
        }
        if !removed.trouble.is_empty() {
            self.message.push_str("; snapshots stay: ");
            self.message.push_str(&removed.trouble);
        }
    }

    /// Writes it to the volume's conditions, as of the request.
    pub fn write(&self, request: &str, conditions: &mut Vec<Condition>, now: Timestamp) {
        let reason = if self.is_done() { "" } else { self.reason };
        conditions.set_condition(TRIMMED, self.is_done(), reason, &self.message, &written(now));
        for condition in conditions.iter_mut().filter(|c| c.kind == TRIMMED) {
            request.clone_into(&mut condition.last_probe_time);
        }
    }

    /// As an event.
    pub fn event(&self) -> Event {
        let reason = match self.reason {
            TRIMMED => "Trimmed",
            REFUSED => "TrimRefused",
            _ => "TrimFailed",
        };
        Event { warning: !self.is_done(), reason, message: self.message.clone() }
    }
}

/// True if snapshots go with what is trimmed.
pub fn removes_snapshots(volume: &Volume, settings: &Settings) -> bool {
    match volume.spec.unmap_mark_snap_chain_removed {
        Toggle::Enabled => true,
        Toggle::Disabled => false,
        Toggle::Ignored => settings.trim_removes_snapshots(),
    }
}

/// The snapshots behind the head, from the newest on, that hold what was trimmed for nobody but themselves: as far as each
/// has one layer on top of it, and none is `in_use`. Those that are removed already are passed. `layers`: all that the engine
/// has now, other branches included.
pub fn removable(layers: &[Layer], in_use: &BTreeSet<String>) -> Vec<String> {
    let find = |name: &str| layers.iter().find(|layer| layer.name == name);
    let mut names = Vec::new();
    let mut at = find(HEAD).map(|head| head.parent.as_str()).unwrap_or_default();
    // The head's own name is that of no snapshot: below the lowest there is nothing.
    while let Some(layer) = find(at).filter(|layer| layer.name != HEAD) {
        let on_top = layers.iter().filter(|other| other.parent == layer.name).count();
        if on_top > 1 || in_use.contains(at) {
            break;
        }
        if !layer.removed {
            names.push(at.to_owned());
        }
        at = &layer.parent;
    }
    names
}

/// The layer that is written.
const HEAD: &str = "";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{VolumeSpec, VolumeStatus};

    const REQUEST: &str = "2023-11-14T22:13:00Z";

    fn now() -> Timestamp {
        Timestamp::from_second(1_700_000_000).unwrap()
    }

    fn volume(node: &str, state: VolumeState) -> Volume {
        let spec = VolumeSpec { node_id: node.into(), ..VolumeSpec::default() };
        let mut volume = Volume::new("v", spec);
        volume.metadata.annotations = Some([(REQUESTED_AT.to_owned(), REQUEST.to_owned())].into());
        let status = VolumeStatus { state, current_node_id: node.into(), ..VolumeStatus::default() };
        volume.status = Some(status);
        volume
    }

    #[test]
    fn a_request_is_answered_once_and_another_one_again() {
        let mut volume = volume("n1", VolumeState::Attached);
        assert_eq!(pending(&volume), Some(REQUEST));
        let told = Told::State(TrimView { running: false, bytes: 7, error: String::new() });
        let answer = answer(&told, REQUEST, now()).unwrap();
        let conditions = &mut volume.status.as_mut().unwrap().conditions;
        conditions.set_condition("Scheduled", true, "", "", "1");
        answer.write(REQUEST, conditions, now());
        let condition = conditions.get_condition(TRIMMED).unwrap();
        assert!(condition.is_true() && condition.message.starts_with("7 bytes"), "{condition:?}");
        assert_eq!((condition.last_probe_time.as_str(), conditions.len()), (REQUEST, 2));
        assert_eq!(pending(&volume), None);
        volume.metadata.annotations.as_mut().unwrap().insert(REQUESTED_AT.into(), "later".into());
        assert_eq!(pending(&volume), Some("later"));
        volume.metadata.annotations = None;
        assert_eq!(pending(&volume), None);
    }

    #[test]
    fn only_the_node_of_an_attached_volume_asks_its_driver() {
        use VolumeState::{Attached, Attaching, Detached};
        let refused = |step: &Step| matches!(step, Step::Answer(a) if a.reason == REFUSED && !a.is_done());
        for (volume, here, expected) in [
            (volume("n1", Attached), Some("n1"), Some(Step::Ask)),
            (volume("n1", Attaching), Some("n1"), Some(Step::Wait)),
            (volume("n2", Attached), Some("n1"), Some(Step::Wait)),
            (volume("n1", Attached), None, Some(Step::Wait)),
            (volume("", Detached), None, None),
        ] {
            let step = step(&volume, REQUEST, here);
            match expected {
                Some(expected) => assert_eq!(step, expected),
                None => assert!(refused(&step), "{step:?}"),
            }
        }
        let attached = volume("n1", Attached);
        assert!(refused(&step(&attached, "yesterday", Some("n1"))));
        for spec in [
            VolumeSpec { encrypted: true, ..attached.spec.clone() },
            VolumeSpec { disable_frontend: true, ..attached.spec.clone() },
        ] {
            let volume = Volume { spec, ..attached.clone() };
            assert!(refused(&step(&volume, REQUEST, Some("n1"))), "{:?}", volume.spec);
        }
    }

    #[test]
    fn a_driver_is_waited_for_while_it_works_and_a_while_when_it_is_away() {
        let state =
            |running, error: &str| Told::State(TrimView { running, bytes: 3, error: error.to_owned() });
        assert_eq!(answer(&state(true, ""), REQUEST, now()), None);
        let failed = answer(&state(false, "no discard"), REQUEST, now()).unwrap();
        assert!(!failed.is_done() && failed.event().warning);
        assert_eq!(
            (failed.event().reason, failed.message.as_str()),
            ("TrimFailed", "after 3 bytes: no discard")
        );
        let refused = answer(&Told::Refused("a device".into()), REQUEST, now()).unwrap();
        assert_eq!((refused.event().reason, refused.message.as_str()), ("TrimRefused", "a device"));
        let away = Told::Away("away".into());
        assert_eq!(answer(&away, REQUEST, now()), None, "it may be starting");
        let later = now() + k8s_openapi::jiff::SignedDuration::from_secs(120);
        assert_eq!(answer(&away, REQUEST, later).unwrap().reason, FAILED);
    }

    #[test]
    fn the_volume_says_whether_snapshots_go_and_else_the_setting() {
        let setting = |value| Settings::of([("remove-snapshots-during-filesystem-trim", value)]);
        for (own, global, expected) in [
            (Toggle::Ignored, "false", false),
            (Toggle::Ignored, "true", true),
            (Toggle::Disabled, "true", false),
            (Toggle::Enabled, "false", true),
        ] {
            let mut volume = volume("n1", VolumeState::Attached);
            volume.spec.unmap_mark_snap_chain_removed = own;
            assert_eq!(removes_snapshots(&volume, &setting(global)), expected, "{own:?} {global}");
        }
        assert!(!removes_snapshots(&volume("n1", VolumeState::Attached), &Settings::default()));
    }

    /// Layers `NAME<PARENT`, without a name the head; one that is removed ends with a minus.
    fn layers(chain: &[&str]) -> Vec<Layer> {
        let layer = |text: &&str| {
            let (name, parent) = text.trim_end_matches('-').split_once('<').unwrap();
            let (name, parent) = (name.to_owned(), parent.to_owned());
            Layer { name, parent, removed: text.ends_with('-'), ..Layer::default() }
        };
        chain.iter().map(layer).collect()
    }

    #[test]
    fn snapshots_go_as_far_as_nobody_else_stands_on_them() {
        let none = BTreeSet::new();
        let of = |chain: &[&str], in_use: &BTreeSet<String>| removable(&layers(chain), in_use).join(" ");
        assert_eq!(of(&["<c", "c<b", "b<a", "a<"], &none), "c b a");
        assert_eq!(of(&["<c", "c<b-", "b<a", "a<"], &none), "b a", "one is removed already");
        // After a revert to a: b is on it, too.
        assert_eq!(of(&["<c", "c<a", "b<a", "a<"], &none), "c");
        assert_eq!(of(&["<a", "b<a", "a<"], &none), "");
        let used = ["b".to_owned()].into();
        assert_eq!(of(&["<c", "c<b", "b<a", "a<"], &used), "c", "b is being copied");
        assert_eq!(of(&["<"], &none), "");
        assert_eq!(of(&[], &none), "");
    }
}
