//! Attached, detached.

use std::time::Duration;

use super::draft::Draft;
use super::health::LEFT_OUT;
use super::{ENDED, READY};
use crate::api::{
    Conditions, DataLocality, DesireState, EngineSpec, InstanceState, Quorum, ReplicaSpec, VolumeState,
};
use crate::plan::{age, age_by_other};

/// How long replicas may take to open their directories before the engine is started without those that have not. The
/// same as without a cluster: a killed predecessor was seen to hold its directory for 3 s.
const REPLICA_PATIENCE: Duration = Duration::from_secs(20);

/// How long a volume waits for its processes to end before it is detached without those that have not. A process that waits
/// for a dying disk may never end; it does no harm, since the next engine's generation shuts it out, and its directory stays
/// locked for as long as it is there (`docs/invariants.md`, 2).
pub(super) const END_PATIENCE: Duration = Duration::from_secs(60);

/// Where a replica is that is reached nowhere, for all that is known: nobody listens there.
const NOWHERE: &str = "unix:/nowhere/";

/// How soon what was made in the place of something that somebody deleted is heard of.
const NEWS: Duration = Duration::from_secs(10);

/// A device of which nobody knows when it was lost is dealt with by what was asked for since then.
const ASKED_LATELY: Duration = Duration::from_secs(3600);

/// Before that it is usual that a replica does not run yet, and which one does not is not worth a write each time that it
/// changes.
const USUAL_START: Duration = Duration::from_secs(5);

impl Draft<'_> {
    /// Moves towards the node that the volume should be on.
    pub(super) fn attach_or_detach(&mut self) {
        let target = self.o.volume.spec.node_id.clone();
        if self.take_over(&target) {
            return;
        }
        self.show_elsewhere();
        let at = self.engine.as_ref().map(|e| e.node_id.clone()).unwrap_or_default();
        let front = self.o.volume.spec.disable_frontend;
        let turns = self.engine.as_ref().is_some_and(|e| !at.is_empty() && e.disable_frontend != front);
        if target.is_empty() || !at.is_empty() && at != target || turns {
            self.detach();
        } else {
            self.attach(&target);
        }
    }

    fn detach(&mut self) {
        self.status.current_migration_node_id.clear();
        let engine_runs = !matches!(self.engine_state(), InstanceState::Stopped | InstanceState::Unknown);
        if let Some(engine) = &mut self.engine {
            engine.desire_state = DesireState::Stopped;
        }
        if engine_runs && self.waits_for_engine() {
            self.begin_to_detach();
            return;
        }
        for replica in self.replicas.values_mut() {
            replica.desire_state = DesireState::Stopped;
        }
        if let Some(engine) = &mut self.engine {
            engine.node_id.clear();
            engine.replica_address_map.clear();
            engine.relay_from.clear();
        }
        let was_attached = self.status.state != VolumeState::Creating;
        if was_attached && (self.waits_for_second() || self.waits_for_replicas()) {
            self.begin_to_detach();
            return;
        }
        let has_replicas = !self.replicas.is_empty() || self.locality() == DataLocality::StrictLocal;
        if was_attached || has_replicas {
            if matches!(self.status.state, VolumeState::Detaching | VolumeState::Attached) {
                self.tell(false, "Detached", "the volume is detached".to_owned());
            }
            self.status.state = VolumeState::Detached;
        }
        self.status.current_node_id.clear();
        self.status.current_engine_node_id.clear();
        self.status.conditions.retain(|c| c.kind != READY && c.kind != ENDED);
    }

    /// Says so, and since when, in one write.
    fn begin_to_detach(&mut self) {
        self.status.state = VolumeState::Detaching;
        let now = self.now.clone();
        self.status.conditions.set_condition(ENDED, false, "Ending", "its processes end", &now);
    }

    /// True while the engine's process may end soon.
    fn waits_for_engine(&mut self) -> bool {
        if let Some(rest) = self.end_patience() {
            self.look_again(rest);
            return true;
        }
        let node = self.o.engine.map(|e| e.spec.node_id.clone()).unwrap_or_default();
        let message = format!(
            "detached without the end of the engine's process on node {node}: the next engine shuts it out, and its device is taken away when the volume is there again or the node is restarted"
        );
        self.tell(true, "EngineNotEnded", message);
        // The replicas' processes are told to end only now, and have a time of their own.
        self.status.conditions.retain(|c| c.kind != ENDED);
        false
    }

    /// True while a relay, or the engine before it, may end soon. What is left of it is told to end for as long as it is there.
    fn waits_for_second(&mut self) -> bool {
        let Some(node) = self.second.as_ref().map(|second| second.node_id.clone()) else { return false };
        if self.status.state == VolumeState::Detached {
            return false;
        }
        if let Some(rest) = self.end_patience() {
            self.look_again(rest);
            return true;
        }
        let message = format!(
            "detached without the end of a process on node {node} that showed the volume there, too: no engine answers it any more"
        );
        self.tell(true, "EngineNotEnded", message);
        false
    }

    /// What is left of the time in which processes may end; `None`: nothing.
    fn end_patience(&self) -> Option<Duration> {
        self.patience(END_PATIENCE)
    }

    /// What is left of so much time since it was first waited for what should end.
    pub(super) fn patience(&self, whole: Duration) -> Option<Duration> {
        let begun = self.status.conditions.get_condition(ENDED);
        let waited = begun.and_then(|c| age(&c.last_transition_time, self.o.now)).unwrap_or_default();
        whole.checked_sub(waited).filter(|rest| *rest > Duration::ZERO)
    }

    /// True while processes of replicas may end soon. Of one that failed nothing is waited for.
    fn waits_for_replicas(&mut self) -> bool {
        let left = self.unended();
        if left.is_empty() || self.status.state == VolumeState::Detached {
            return false;
        }
        if let Some(rest) = self.end_patience() {
            self.look_again(rest);
            return true;
        }
        let message = format!("detached without the end of these replicas' processes: {}", left.join(", "));
        self.tell(true, "ReplicasNotEnded", message);
        false
    }

    fn attach(&mut self, target: &str) {
        let image = self.image();
        // One that was told to run before anybody knew which programs there are will not by what no node has.
        let waits_in_vain = |name: &String, spec: &ReplicaSpec| {
            let runs = self.replica_state(name) == InstanceState::Running;
            !runs && !self.is_anywhere(&spec.image) && self.is_anywhere(&image)
        };
        let begins = |(name, spec): &(&String, &ReplicaSpec)| {
            spec.desire_state == DesireState::Stopped || waits_in_vain(name, spec)
        };
        let beginning: Vec<String> =
            self.replicas.iter().filter(begins).map(|(name, _)| name.clone()).collect();
        for (name, replica) in &mut self.replicas {
            if beginning.contains(name) {
                replica.image.clone_from(&image);
            }
            replica.desire_state = DesireState::Running;
        }
        let was_here = self.status.state == VolumeState::Attached && self.status.current_node_id == target;
        match self.engine_state() {
            InstanceState::Running => return self.stay_attached(target),
            // What it waits for may have come back at another address, or be one that was away when it started.
            InstanceState::Starting if self.waits_in_vain() => {
                if let Some(engine) = &mut self.engine {
                    engine.desire_state = DesireState::Stopped;
                }
                self.status.state = VolumeState::Attaching;
                return;
            }
            InstanceState::Starting => self.tell_addresses(),
            // The manager of the node is silent; its engine most likely is not. Whoever wants the volume elsewhere says so.
            InstanceState::Unknown if was_here => return,
            _ => {}
        }
        self.status.state = VolumeState::Attaching;
        let is_wanted = self.engine.as_ref().is_some_and(|e| e.desire_state == DesireState::Running);
        if !is_wanted && self.may_start(target) {
            self.start(target);
        }
    }

    fn stay_attached(&mut self, target: &str) {
        if self.status.state != VolumeState::Attached {
            self.tell(false, "Attached", format!("the volume is attached to node {target}"));
        }
        self.status.state = VolumeState::Attached;
        target.clone_into(&mut self.status.current_node_id);
        target.clone_into(&mut self.status.current_engine_node_id);
        if self.status.current_migration_node_id == target {
            self.status.current_migration_node_id.clear();
        }
        self.status.frontend_disabled = self.o.volume.spec.disable_frontend;
        self.ask_for_remount();
        self.status.conditions.retain(|c| c.kind != READY && c.kind != ENDED);
        let addresses = self.addresses();
        if let Some(engine) = &mut self.engine {
            engine.replica_address_map = addresses;
            engine.active = true;
        }
        let name = self.o.engine.and_then(|e| e.metadata.name.clone()).unwrap_or_default();
        self.replicas.values_mut().for_each(|replica| replica.engine_name.clone_from(&name));
    }

    /// Tells the engine that is wanted where replicas are by now. It is never told to do without one before it serves.
    fn tell_addresses(&mut self) {
        let addresses = self.first_addresses();
        if let Some(engine) = self.engine.as_mut().filter(|e| e.desire_state == DesireState::Running) {
            engine.replica_address_map.extend(addresses);
        }
    }

    /// What has the volume open or mounted has to let go of it and begin anew, once there is a device again.
    fn ask_for_remount(&mut self) {
        let lost = self.o.engine.and_then(|e| e.status.as_ref()).map(|s| s.device_lost_at.as_str());
        let Some(lost) = lost.filter(|lost| !lost.is_empty()) else { return };
        let asked = age_by_other(&self.status.remount_requested_at, self.o.now);
        // That it was lost is true whatever its node's clock said, and each request ends pods.
        let lost = age(lost, self.o.now).unwrap_or(ASKED_LATELY);
        if asked.is_none_or(|asked| asked > lost) {
            self.status.remount_requested_at.clone_from(&self.now);
            self.tell(
                true,
                "Remount",
                "the volume's device was lost: its pods have to start anew".to_owned(),
            );
        }
    }

    /// The same where somebody has deleted what keeps the volume attached, its engine or who wants it where: it is begun anew, with
    /// another device, and nobody would know of the one before.
    pub(super) fn ask_for_remount_after_deletion(&mut self) {
        let deleted = match (self.o.engine, self.o.attachment) {
            (None, _) => "Engine",
            (_, None) => "VolumeAttachment",
            _ => return,
        };
        let is_shown = self.status.state == VolumeState::Attached && !self.status.frontend_disabled;
        let asked = age_by_other(&self.status.remount_requested_at, self.o.now);
        if !is_shown || asked.is_some_and(|asked| asked < NEWS) {
            return;
        }
        self.status.remount_requested_at.clone_from(&self.now);
        let message = format!(
            "its {deleted} was deleted while it was attached, and its device goes with that: its pods have to start anew"
        );
        self.tell(true, "Remount", message);
    }

    /// Where each replica is reached. One whose process is away keeps its place: the engine tries again and again. Where a majority
    /// decides, one that may tell epochs has a place though nobody knows where it is: an engine counts those that it is told of, and of
    /// five that it knew three of it would go on with two.
    fn addresses(&self) -> std::collections::BTreeMap<String, String> {
        let known = || [&self.engine, &self.second].into_iter().flatten().map(|e| &e.replica_address_map);
        let address = |name: &String| {
            let now = self.replica(name).and_then(|r| r.status.as_ref()).map(|s| s.address.clone());
            let before = || known().find_map(|map| map.get(name)).cloned();
            let counts = self.o.volume.spec.quorum == Quorum::Majority && self.tells_epochs(name);
            let away = || counts.then(|| format!("{NOWHERE}{name}"));
            now.filter(|a| !a.is_empty()).or_else(before).or_else(away).map(|a| (name.clone(), a))
        };
        self.replicas.keys().filter(|name| !self.dropped.contains(*name)).filter_map(address).collect()
    }

    /// The same of those that an engine may begin with.
    fn first_addresses(&self) -> std::collections::BTreeMap<String, String> {
        let mut addresses = self.addresses();
        addresses.retain(|name, _| self.may_begin(name) && !self.is_no_loss(name));
        addresses
    }

    /// True for a replica that failed, and does not run, of a volume that was never served: it holds nothing, and the very first
    /// start needs all that the engine is told of.
    fn is_no_loss(&self, name: &str) -> bool {
        let is_left = self.replicas.get(name).is_none_or(|spec| !spec.failed_at.is_empty());
        is_left && self.replica_state(name) != InstanceState::Running && self.was_never_served()
    }

    /// True for an engine that waits for a majority among replicas some of which will never tell it anything: they are gone for good, or were
    /// about to be filled when the engine before it ended. Where most of what it was told of can tell, it is left alone: whoever ends
    /// an engine takes its device away.
    fn counts_in_vain(&self, told: &[&String]) -> bool {
        if self.o.volume.spec.quorum != Quorum::Majority {
            return false;
        }
        // One that is being deleted is kept as long as its data is needed (`crate::plan::replica::fate`).
        let may_tell = |name: &&&String| self.replica(name).is_some() && self.may_begin(name);
        let able = told.iter().filter(may_tell);
        let here = able.clone().filter(|name| self.replica_state(name) == InstanceState::Running).count();
        able.count() < told.len() && here <= told.len() / 2
    }

    /// True for an engine that begins the volume with a replica that will not be there: it is to begin without it, under another
    /// number. It may have begun by now; then its epoch is recorded, and the next one begins with that.
    fn waits_in_vain(&self) -> bool {
        let told = self.engine.as_ref().filter(|e| e.desire_state == DesireState::Running);
        let told: Vec<&String> = told.into_iter().flat_map(|e| e.replica_address_map.keys()).collect();
        told.iter().any(|name| self.is_no_loss(name)) || self.counts_in_vain(&told)
    }

    /// True if the replicas that the engine needs are there. The very first start needs all of them: the one that is
    /// away may be the one with the data (`docs/decisions/0004-how-a-volume-starts.md`). Each later one needs a member of the
    /// epoch that counts: the others hold nothing to begin with, and the engine would wait for a member with them. Where a
    /// majority decides what counts, it needs one: the engine knows of no replica but those that it is told of.
    fn may_start(&mut self, target: &str) -> bool {
        let sound: Vec<&String> =
            self.replicas.iter().filter(|(_, r)| r.failed_at.is_empty()).map(|(name, _)| name).collect();
        let runs = |name: &String| self.replica_state(name) == InstanceState::Running;
        let is_open = |name: &&&String| runs(name) && self.is_member(name) && self.may_begin(name);
        let open = sound.iter().filter(is_open).count();
        let missing: Vec<String> = sound
            .iter()
            .filter(|name| self.replica_state(name) != InstanceState::Running)
            .map(|name| (*name).clone())
            .collect();
        let obstacle =
            self.lacks_disks().or_else(|| self.is_kept_from(target)).or_else(|| self.lacks_majority());
        if open > 0 && missing.is_empty() && obstacle.is_none() {
            return true;
        }
        let condition = self.status.conditions.get_condition(READY).filter(|c| !c.is_true());
        let waited = condition.and_then(|c| age(&c.last_transition_time, self.o.now)).unwrap_or_default();
        let is_usual = waited < USUAL_START;
        let message = match &obstacle {
            _ if sound.is_empty() => {
                "no replica can serve the volume: look at the replicas' conditions and failedAt".to_owned()
            }
            Some(obstacle) if missing.is_empty() || !is_usual => obstacle.clone(),
            _ if missing.is_empty() => {
                "none of the replicas that run holds everything: look at the others' conditions and failedAt"
                    .to_owned()
            }
            _ if is_usual => "its replicas start, and then its engine".to_owned(),
            _ => format!("these replicas do not run yet: {}", missing.join(", ")),
        };
        let now = self.now.clone();
        self.status.conditions.set_condition(READY, false, "ReplicasStarting", &message, &now);
        let left = |patience: Duration| patience.checked_sub(waited).filter(|left| *left > Duration::ZERO);
        if let Some(left) = left(USUAL_START) {
            self.look_again(left);
        }
        let patience = if self.is_first_start() { LEFT_OUT } else { REPLICA_PATIENCE };
        if let Some(left) = left(patience) {
            self.look_again(left);
            return false;
        }
        if open == 0 || obstacle.is_some() {
            return false;
        }
        if self.is_first_start() {
            return self.begins_without(&missing);
        }
        true
    }

    /// True before the volume was ever served, for all that is known. With the quorum `any` the authority would have its epoch.
    fn is_first_start(&self) -> bool {
        match self.o.volume.spec.quorum {
            Quorum::Any => self.status.epoch.is_none(),
            Quorum::Majority | Quorum::Unsafe => self.is_new(),
        }
    }

    /// True for a volume that was never used: what does not run holds nothing, and it would never be attached. One whose replicas
    /// may hold something is waited for.
    fn begins_without(&mut self, missing: &[String]) -> bool {
        if self.is_new() {
            let message = format!(
                "the volume is begun without these replicas, which do not run: {}",
                missing.join(", ")
            );
            self.tell(true, "ReplicasLeftOut", message);
        }
        self.is_new()
    }

    /// Why a volume that is used only where its replica is cannot be used there; `None`: it can.
    fn is_kept_from(&self, target: &str) -> Option<String> {
        let nodes: Vec<&str> =
            self.replicas.values().filter(|r| r.failed_at.is_empty()).map(|r| r.node_id.as_str()).collect();
        let is_strict = self.locality() == DataLocality::StrictLocal;
        let node = nodes.first().filter(|_| is_strict && !nodes.contains(&target))?;
        if self.was_never_served() {
            return Some(format!(
                "the volume is strict-local, and its engine may still be on node {node}, where its replica is: it begins here \
                 once that node says that the engine has ended"
            ));
        }
        Some(format!(
            "the volume is strict-local and its replica is on node {node}: it is attached there alone, or with another dataLocality"
        ))
    }

    /// What a volume whose majority decides lacks of that; `None`: nothing. Of those that failed, too, each tells what it has
    /// recorded. One that was never in sync has recorded nothing: with it a majority could be one that knows of no newer epoch.
    fn lacks_majority(&self) -> Option<String> {
        if self.o.volume.spec.quorum != Quorum::Majority {
            return None;
        }
        let is_blank = self.is_blank();
        let asked = || self.replicas.iter().filter(|(_, spec)| is_blank || !spec.healthy_at.is_empty());
        let here = asked().filter(|(name, _)| self.replica_state(name) == InstanceState::Running).count();
        let all = asked().count();
        let needed = all / 2 + 1;
        (here < needed)
            .then(|| format!("{here} of {all} replicas run, and the quorum majority needs {needed}"))
    }

    fn start(&mut self, target: &str) {
        self.engine = self.engine.take().map(|engine| self.equipped(engine, target));
    }

    /// The volume's engine, as it starts there.
    pub(super) fn equipped(&self, engine: EngineSpec, target: &str) -> EngineSpec {
        let volume = &self.o.volume.spec;
        EngineSpec {
            image: self.engine_image(),
            node_id: target.to_owned(),
            desire_state: DesireState::Running,
            replica_address_map: self.first_addresses(),
            frontend: volume.frontend,
            disable_frontend: volume.disable_frontend,
            quorum: volume.quorum,
            io_timeout: volume.io_timeout,
            ublk_number_of_queue: volume.ublk_number_of_queue,
            ublk_queue_depth: volume.ublk_queue_depth,
            migratable: volume.migratable,
            relay_from: String::new(),
            active: true,
            ..engine
        }
    }
}
