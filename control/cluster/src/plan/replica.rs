//! One replica on its node: the process that should be there, and what to say of it.
//!
//! Decided by the manager of the replica's node alone, which also removes the data of a replica that is deleted.

use std::cmp::Reverse;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::engine::trouble;
use super::served::{may_have_served, tells_epochs};
use super::upgrade::{self, Programs, UPGRADED};
use super::{FINALIZER, age, renew_conditions, written};
use crate::agent::{ProcessView, ReplicaView};
use crate::api::{
    CloneOrigin, Conditions, DesireState, GenerationText, InstanceState, Replica, ReplicaStatus, Volume,
};

/// The condition that says why a replica does not serve.
pub const SERVES: &str = "Serves";

/// How long a process that ended for good is left alone before it is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// A replica and what its node knows of it.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The replica.
    pub replica: &'a Replica,
    /// This node.
    pub node: &'a str,
    /// This node's instance manager.
    pub instance_manager: &'a str,
    /// Why its disk cannot be used; `None` if it can.
    pub disk_trouble: Option<&'a str>,
    /// Where an engine would reach it.
    pub address: &'a str,
    /// What proves to it that one may ask where its snapshots hold data.
    pub map_key: &'a str,
    /// The process of that name on this node.
    pub process: Option<&'a ProcessView>,
    /// What that process runs.
    pub programs: Programs,
    /// What the replica says; `None`: it does not answer.
    pub view: Option<&'a ReplicaView>,
    /// The time.
    pub now: Timestamp,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Keep the resource until the data is gone.
    AddFinalizer,
    /// Start the process.
    Start,
    /// Have the process run the program of this image.
    Exchange(String),
    /// End the process.
    Stop,
    /// Remove the data, then let the resource go.
    RemoveData,
    /// Write the replica's status.
    SetStatus(Box<ReplicaStatus>),
    /// Look again after this time.
    LookAgain(Duration),
}

/// True if the replica holds every acknowledged write, as far as resources tell: it is healthy, stays, and is a member of the
/// epoch that counts where there is one.
pub fn holds_everything(replica: &Replica, volume: Option<&Volume>) -> bool {
    let (spec, meta) = (&replica.spec, &replica.metadata);
    let is_healthy = !spec.healthy_at.is_empty() && spec.failed_at.is_empty();
    is_healthy && is_member(replica, volume).unwrap_or(true) && meta.deletion_timestamp.is_none()
}

/// True for a member of the epoch that counts; `None`: there is none.
fn is_member(replica: &Replica, volume: Option<&Volume>) -> Option<bool> {
    let epoch = volume.and_then(|v| v.status.as_ref()?.epoch.as_ref())?;
    Some(epoch.members.iter().any(|m| Some(m) == replica.metadata.name.as_ref()))
}

/// What becomes of the data of a deleted replica.
#[derive(Clone, Debug)]
pub enum Fate<'a> {
    /// It goes, whatever others hold: its volume goes, too, or it holds nothing that counts.
    Goes,
    /// It goes once one of these, which hold everything, can be read. Without any it stays.
    After(Vec<&'a Replica>),
    /// It stays: a volume that is deleted is there until the last of its replicas is gone, and so nobody who has a say asked for it.
    Unasked,
    /// It is another replica's as well, and stays with that.
    Anothers,
    /// It is decided once the others whose it was as well, which were deleted before, are gone.
    AfterTwins,
}

/// True if both have one directory. Longhorn makes a second Replica of it, which is not `active`, for the engine of a live upgrade or a
/// migration, and removes either afterwards: where its managers went before that, both are there.
fn share_directory(a: &Replica, b: &Replica) -> bool {
    let (one, other) = (&a.spec, &b.spec);
    a.metadata.name != b.metadata.name
        && !one.data_directory_name.is_empty()
        && one.data_directory_name == other.data_directory_name
        && one.disk_id == other.disk_id
        && one.node_id == other.node_id
}

/// True for a replica whose directory another one of these, which stay, has as well, and is to have alone: as two they would count for
/// two copies. Longhorn may have left none of them `active`.
pub fn is_spare(replica: &Replica, staying: &[&Replica], volume: &Volume) -> bool {
    let rank = |r: &Replica| {
        // An engine here may have had either, and the epoch that counts names one of them.
        let has_served = (is_member(r, Some(volume)) == Some(true), tells_epochs(r));
        let is_healthy = !r.spec.healthy_at.is_empty() && r.spec.failed_at.is_empty();
        (has_served, r.spec.active, is_healthy, Reverse(r.metadata.name.clone()))
    };
    let twins = staying.iter().filter(|r| share_directory(r, replica));
    let mut left_over = twins.filter(|r| !r.spec.active || !replica.spec.active);
    left_over.any(|r| rank(r) > rank(replica))
}

/// What becomes of a directory that others have as well: the last one that is deleted takes it along.
fn fate_among_twins(deleted: &Replica, all: &[Replica]) -> Option<Fate<'static>> {
    let goes_since = |r: &Replica| r.metadata.deletion_timestamp.as_ref().map(|at| at.0);
    let is_kept = |r: &Replica| r.metadata.finalizers.iter().flatten().any(|f| f == FINALIZER);
    let stays_longer = |r: &Replica| match goes_since(r) {
        None => true,
        Some(at) => (Some(at), &r.metadata.name) > (goes_since(deleted), &deleted.metadata.name),
    };
    // Of one that is deleted without the finalizer nobody decides any more.
    let twins = all.iter().filter(|r| share_directory(r, deleted) && (goes_since(r).is_none() || is_kept(r)));
    let twins: Vec<&Replica> = twins.collect();
    match twins.iter().any(|r| stays_longer(r)) {
        true => Some(Fate::Anothers),
        false => (!twins.is_empty()).then_some(Fate::AfterTwins),
    }
}

/// What becomes of the data of a deleted replica, by its volume (`None`: there is none) and all replicas of that. The controllers
/// ask only for what may go; but a garbage collector that does not find a replica's owner (a volume that was restored has another
/// UID; one that is still to be restored is not there) deletes it without asking anybody, and so does whoever is faster than what
/// they ask.
pub fn fate<'a>(deleted: &Replica, volume: Option<&Volume>, all: &'a [Replica]) -> Fate<'a> {
    if let Some(fate) = fate_among_twins(deleted, all) {
        return fate;
    }
    let Some(volume) = volume else { return Fate::Unasked };
    let was_filled = || !deleted.spec.healthy_at.is_empty() || may_have_served(volume);
    let goes = volume.metadata.deletion_timestamp.is_some();
    if goes || !is_member(deleted, Some(volume)).unwrap_or_else(was_filled) {
        return Fate::Goes;
    }
    let others = all.iter().filter(|r| r.metadata.name != deleted.metadata.name);
    Fate::After(others.filter(|r| holds_everything(r, Some(volume))).collect())
}

/// Decides for one replica.
pub fn plan(o: &Observed<'_>) -> Vec<Action> {
    let spec = &o.replica.spec;
    if spec.node_id != o.node {
        return if o.process.is_some() { vec![Action::Stop] } else { Vec::new() };
    }
    let finalizers = o.replica.metadata.finalizers.as_deref().unwrap_or_default();
    let is_kept = finalizers.iter().any(|f| f == FINALIZER);
    if o.replica.metadata.deletion_timestamp.is_some() {
        return match o.process {
            Some(_) => vec![Action::Stop],
            None if is_kept => vec![Action::RemoveData],
            None => Vec::new(),
        };
    }
    let mut actions = if is_kept { Vec::new() } else { vec![Action::AddFinalizer] };
    let mut then = None;
    let mut status = o.replica.status.clone().unwrap_or_default();
    renew_conditions(&mut status.conditions, o.now);
    o.node.clone_into(&mut status.owner_id);
    o.instance_manager.clone_into(&mut status.instance_manager_name);
    match (spec.desire_state, o.process) {
        (DesireState::Stopped, None) => {
            stopped(&mut status);
            status.conditions.retain(|c| c.kind != UPGRADED);
        }
        (DesireState::Stopped, Some(_)) => {
            status.current_state = InstanceState::Stopping;
            actions.push(Action::Stop);
        }
        (DesireState::Running, None) => {
            stopped(&mut status);
            match o.disk_trouble {
                None => {
                    status.current_state = InstanceState::Starting;
                    actions.push(Action::Start);
                }
                Some(trouble) => {
                    status.current_state = InstanceState::Error;
                    status.conditions.set_condition(SERVES, false, "Disk", trouble, &written(o.now));
                    actions.push(Action::LookAgain(RETRY));
                }
            }
        }
        (DesireState::Running, Some(process)) => {
            if status.uuid != process.uuid {
                // It has read the volume's key anew.
                status.map_key.clear();
            }
            process.uuid.clone_into(&mut status.uuid);
            status.started = true;
            match exchange(o, process, &mut status, &mut actions) {
                Some(image) => then = Some(Action::Exchange(image)),
                None => run(o, process, &mut status, &mut actions),
            }
        }
    }
    let before = o.replica.status.as_ref();
    if before != Some(&status) && !only_begins(before, &status) {
        actions.push(Action::SetStatus(Box::new(status)));
    }
    // What goes wrong with it is judged by what the status says of it.
    actions.extend(then);
    actions
}

/// True where all that is new is that a replica is there, or is on its way to run: nobody acts on that, and what comes of it
/// is told soon. With a thousand volumes it would be six thousand writes.
fn only_begins(before: Option<&ReplicaStatus>, now: &ReplicaStatus) -> bool {
    match now.current_state {
        InstanceState::Starting => before.is_none_or(|s| s.current_state == InstanceState::Stopped),
        InstanceState::Stopped => before.is_none(),
        _ => false,
    }
}

fn run(o: &Observed<'_>, process: &ProcessView, status: &mut ReplicaStatus, actions: &mut Vec<Action>) {
    let now = written(o.now);
    // A copy that ended is not waited for, though it is started again: what it is made of may be gone. Another one is made then.
    let is_copy = o.replica.spec.clone_from != CloneOrigin::default();
    let is_lost = is_copy && o.view.is_none() && !process.error.is_empty();
    match process.state {
        InstanceState::Stopping => status.current_state = InstanceState::Stopping,
        state if is_lost || matches!(state, InstanceState::Error | InstanceState::Stopped) => {
            status.current_state = InstanceState::Error;
            status.address.clear();
            let why = if process.error.is_empty() { "the process ended" } else { &process.error };
            status.conditions.set_condition(SERVES, false, "Ended", why, &now);
            let since =
                status.conditions.get_condition(SERVES).and_then(|c| age(&c.last_transition_time, o.now));
            match RETRY.checked_sub(since.unwrap_or_default()) {
                Some(left) if left > Duration::ZERO => actions.push(Action::LookAgain(left)),
                _ => actions.push(Action::Stop),
            }
        }
        _ => match o.view {
            Some(view) => {
                status.current_state = InstanceState::Running;
                status.starting = false;
                o.address.clone_into(&mut status.address);
                o.map_key.clone_into(&mut status.map_key);
                let seen = status.generation.map_or(view.generation, |old| old.0.max(view.generation));
                status.generation = Some(GenerationText(seen));
                status.epoch_recorded |= view.epoch_recorded;
                status.conditions.set_condition(SERVES, true, "", "", &now);
            }
            None if status.current_state == InstanceState::Running => {}
            None if is_copy && status.current_state == InstanceState::Error => {}
            None => {
                status.current_state = InstanceState::Starting;
                status.starting = true;
            }
        },
    }
}

/// Exchanges the program for that of the image that is given back, or sees how that fares.
fn exchange(
    o: &Observed<'_>,
    process: &ProcessView,
    status: &mut ReplicaStatus,
    actions: &mut Vec<Action>,
) -> Option<String> {
    let serves = process.state == InstanceState::Running && o.view.is_some();
    let images = (&mut status.current_image, &mut status.failed_image);
    let advance = upgrade::advance(
        &o.replica.spec.image,
        (o.programs, serves, trouble(process)),
        images,
        &mut status.conditions,
        o.now,
    );
    actions.extend(advance.wait.map(Action::LookAgain));
    advance.exchange
}

/// What stays known of a replica without a process: the highest generation that it has seen, above all, and whether it was in an epoch.
fn stopped(status: &mut ReplicaStatus) {
    let keep = ReplicaStatus {
        owner_id: std::mem::take(&mut status.owner_id),
        instance_manager_name: std::mem::take(&mut status.instance_manager_name),
        generation: status.generation,
        epoch_recorded: status.epoch_recorded,
        conditions: std::mem::take(&mut status.conditions),
        current_image: std::mem::take(&mut status.current_image),
        failed_image: std::mem::take(&mut status.failed_image),
        ..ReplicaStatus::default()
    };
    *status = keep;
    status.conditions.retain(|c| c.kind != SERVES);
}

#[cfg(test)]
mod tests {
    use lh_block::Generation;

    use super::*;
    use crate::api::{EpochRecord, Quorum, ReplicaSpec, VolumeSpec, VolumeStatus};

    fn now() -> Timestamp {
        Timestamp::from_second(1_700_000_000).unwrap()
    }

    fn replica(node: &str, desire: DesireState) -> Replica {
        let spec = ReplicaSpec { node_id: node.into(), desire_state: desire, ..ReplicaSpec::default() };
        let mut replica = Replica::new("v-r-1", spec);
        replica.metadata.finalizers = Some(vec![FINALIZER.into()]);
        replica
    }

    fn decide(
        replica: &Replica,
        disk_trouble: Option<&str>,
        process: Option<InstanceState>,
        view: Option<u64>,
    ) -> Vec<Action> {
        let process = process.map(|state| ProcessView { state, ..ProcessView::default() });
        decide_on(replica, disk_trouble, process.as_ref(), view)
    }

    fn decide_on(
        replica: &Replica,
        disk_trouble: Option<&str>,
        process: Option<&ProcessView>,
        view: Option<u64>,
    ) -> Vec<Action> {
        // One that has seen but few engines was in no epoch.
        let view = view.map(|g| ReplicaView { generation: Generation::from(g), epoch_recorded: g > 5 });
        plan(&Observed {
            replica,
            node: "n1",
            instance_manager: "im",
            disk_trouble,
            address: "unix:/r",
            map_key: "k",
            process,
            programs: Programs { runs_target: true, installed: true },
            view: view.as_ref(),
            now: now(),
        })
    }

    fn status_in(actions: &[Action]) -> ReplicaStatus {
        let status = actions.iter().find_map(|a| match a {
            Action::SetStatus(status) => Some((**status).clone()),
            _ => None,
        });
        status.expect("a status")
    }

    #[test]
    fn it_runs_and_tells_where_it_is_reached() {
        use InstanceState::Running;
        let mut replica = replica("n1", DesireState::Running);
        assert_eq!(decide(&replica, None, None, None), [Action::Start]);
        assert_eq!(decide(&replica, None, Some(Running), None), [], "it is on its way");
        let status = status_in(&decide(&replica, None, Some(Running), Some(7)));
        assert_eq!((status.current_state, status.address.as_str()), (Running, "unix:/r"));
        assert_eq!(status.map_key, "k");
        replica.status = Some(status);
        assert_eq!(decide(&replica, None, Some(Running), Some(7)), [], "at rest nothing is written");
    }

    #[test]
    fn the_key_that_another_process_has_read_is_forgotten() {
        let mut replica = replica("n1", DesireState::Running);
        let runs = |uuid: &str| ProcessView {
            state: InstanceState::Running,
            uuid: uuid.to_owned(),
            ..ProcessView::default()
        };
        replica.status = Some(status_in(&decide_on(&replica, None, Some(&runs("1")), Some(7))));
        assert_eq!(replica.status.as_ref().unwrap().map_key, "k");
        let status = status_in(&decide_on(&replica, None, Some(&runs("2")), None));
        assert_eq!((status.uuid.as_str(), status.map_key.as_str()), ("2", ""));
    }

    #[test]
    fn that_it_runs_no_more_is_told_even_if_it_starts_again() {
        use InstanceState::{Error, Running, Starting, Stopped};
        let mut replica = replica("n1", DesireState::Running);
        replica.status = Some(status_in(&decide(&replica, None, Some(Running), Some(7))));
        let actions = decide(&replica, None, None, None);
        assert_eq!((status_in(&actions).current_state, actions.contains(&Action::Start)), (Starting, true));
        replica.status = Some(status_in(&decide(&replica, None, Some(Error), None)));
        assert_eq!(status_in(&decide(&replica, None, None, None)).current_state, Starting);
        replica.status = Some(status_in(&decide(&replica, None, None, None)));
        replica.spec.desire_state = DesireState::Stopped;
        assert_eq!(status_in(&decide(&replica, None, None, None)).current_state, Stopped);
    }

    #[test]
    fn a_copy_that_ended_once_has_failed_though_its_process_is_started_again_and_again() {
        use InstanceState::{Error, Running, Starting, Stopped};
        let ended =
            ProcessView { state: Starting, error: "no such snapshot".into(), ..ProcessView::default() };
        let mut copy = replica("n1", DesireState::Running);
        assert_eq!(
            decide_on(&copy, None, Some(&ended), None),
            [],
            "one that holds data is served once it can be"
        );
        copy.spec.clone_from = CloneOrigin { directory: "/d/replicas/v-0a".into(), snapshot: "s".into() };
        assert_eq!(decide(&copy, None, Some(Running), None), [], "it is being copied");
        let status = status_in(&decide_on(&copy, None, Some(&ended), None));
        assert_eq!(status.current_state, Error);
        assert_eq!(status.conditions.get_condition(SERVES).unwrap().message, "no such snapshot");
        copy.status = Some(status);
        assert_eq!(
            decide(&copy, None, Some(Running), None),
            [],
            "whoever decides may not have heard of it yet"
        );
        assert_eq!(status_in(&decide(&copy, None, Some(Running), Some(0))).current_state, Running);
        copy.spec.desire_state = DesireState::Stopped;
        assert_eq!(status_in(&decide(&copy, None, None, None)).current_state, Stopped);
    }

    #[test]
    fn the_highest_generation_seen_outlives_the_process() {
        let mut replica = replica("n1", DesireState::Running);
        replica.status = Some(status_in(&decide(&replica, None, Some(InstanceState::Running), Some(7))));
        replica.spec.desire_state = DesireState::Stopped;
        let status = status_in(&decide(&replica, None, None, None));
        assert_eq!((status.current_state, status.address.as_str()), (InstanceState::Stopped, ""));
        assert_eq!((status.generation, status.epoch_recorded), (Some(GenerationText(7.into())), true));
        replica.status = Some(status);
        replica.spec.desire_state = DesireState::Running;
        let emptied = status_in(&decide(&replica, None, Some(InstanceState::Running), Some(3)));
        assert_eq!((emptied.generation, emptied.epoch_recorded), (Some(GenerationText(7.into())), true));
        replica.status = None;
        assert!(!status_in(&decide(&replica, None, Some(InstanceState::Running), Some(3))).epoch_recorded);
    }

    #[test]
    fn it_does_not_start_on_a_disk_that_is_not_well() {
        let replica = replica("n1", DesireState::Running);
        let actions = decide(&replica, Some("the disk is gone"), None, None);
        assert!(!actions.contains(&Action::Start), "{actions:?}");
        let status = status_in(&actions);
        assert_eq!(status.current_state, InstanceState::Error);
        assert_eq!(status.conditions.get_condition(SERVES).unwrap().message, "the disk is gone");
    }

    #[test]
    fn its_data_goes_only_after_its_process_and_only_if_it_is_deleted() {
        let mut replica = replica("n1", DesireState::Stopped);
        assert!(!decide(&replica, None, None, None).contains(&Action::RemoveData));
        replica.metadata.deletion_timestamp = Some(now().into());
        assert_eq!(decide(&replica, None, Some(InstanceState::Running), Some(1)), [Action::Stop]);
        assert_eq!(decide(&replica, None, None, None), [Action::RemoveData]);
        replica.spec.node_id = "n2".into();
        assert_eq!(decide(&replica, None, None, None), []);
        replica.spec.node_id = "n1".into();
        replica.metadata.finalizers = None;
        assert_eq!(decide(&replica, None, None, None), []);
    }

    #[test]
    fn the_data_of_a_deleted_replica_goes_where_its_volume_goes_or_needs_it_no_more() {
        let volume = |members: Option<&[&str]>, goes: bool| {
            let mut volume = Volume::new("v", VolumeSpec::default());
            let epoch = members.map(|all| EpochRecord {
                members: all.iter().map(|m| (*m).to_owned()).collect(),
                ..EpochRecord::default()
            });
            volume.status = Some(VolumeStatus { epoch, ..VolumeStatus::default() });
            volume.metadata.deletion_timestamp = goes.then(|| now().into());
            volume
        };
        let used_by_majority = || {
            let mut volume = volume(None, false);
            volume.spec.quorum = Quorum::Majority;
            volume.status.as_mut().unwrap().generation = Some(GenerationText(1.into()));
            volume
        };
        // `a+`: it was filled; `a!`: and has failed since; `a-`: and is deleted, too.
        let all = |text: &str| -> Vec<Replica> {
            let one = |word: &str| {
                let mut replica = replica("n1", DesireState::Stopped);
                replica.metadata.name = Some(word[..1].to_owned());
                let at = |set: bool| if set { "2026-01-01T00:00:00Z".to_owned() } else { String::new() };
                replica.spec.healthy_at = at(word.len() > 1);
                replica.spec.failed_at = at(word.ends_with('!'));
                replica.metadata.deletion_timestamp = word.ends_with('-').then(|| now().into());
                replica
            };
            text.split_whitespace().map(one).collect()
        };
        let cases = [
            ("its volume goes", Some(volume(None, true)), "a- b-", "goes"),
            ("its volume is not there", None, "a- b-", "unasked"),
            ("nor is another one any use", None, "a- b+", "unasked"),
            ("it never held anything", Some(volume(None, false)), "a b+", "goes"),
            ("the engine has let go of it", Some(volume(Some(&["b"]), false)), "a- b!", "goes"),
            ("another holds everything", Some(volume(None, false)), "a- b+ c!", "after b"),
            ("the other is no member", Some(volume(Some(&["a"]), false)), "a- b+", "after "),
            ("the others go, too", Some(volume(None, false)), "a- b- c-", "after "),
            ("a member that failed counts for itself", Some(volume(Some(&["a"]), false)), "a! b!", "after "),
            ("nobody would have heard of its use", Some(used_by_majority()), "a b", "after "),
            ("the same, and another holds everything", Some(used_by_majority()), "a b+", "after b"),
        ];
        for (what, volume, text, expected) in cases {
            let replicas = all(text);
            let name = |r: &&Replica| r.metadata.name.clone().unwrap_or_default();
            let decided = match fate(&replicas[0], volume.as_ref(), &replicas) {
                Fate::Goes => "goes".to_owned(),
                Fate::After(all) => format!("after {}", all.iter().map(name).collect::<String>()),
                Fate::Unasked => "unasked".to_owned(),
                other => panic!("{what}: {other:?}"),
            };
            assert_eq!(decided, expected, "{what}");
        }
    }

    /// One of two replicas of a directory, as Longhorn's live upgrade leaves them.
    fn twin(name: &str, active: bool, deleted: Option<i64>) -> Replica {
        let mut twin = replica("n1", DesireState::Stopped);
        twin.metadata.name = Some(name.into());
        twin.metadata.deletion_timestamp = deleted.map(|at| Timestamp::from_second(at).unwrap().into());
        twin.spec.active = active;
        twin.spec.disk_id = "d".into();
        twin.spec.data_directory_name = "v-0a1b2c3d".into();
        twin.spec.healthy_at = "2026-01-01T00:00:00Z".into();
        twin
    }

    #[test]
    fn a_directory_goes_with_the_last_replica_that_has_it() {
        let decided = |twins: [Replica; 2], volume: Option<&Volume>| match fate(&twins[0], volume, &twins) {
            Fate::Anothers => "another's",
            Fate::AfterTwins => "waits",
            Fate::After(others) if others.is_empty() => "stays",
            Fate::After(_) => "after others",
            Fate::Goes => "goes",
            Fate::Unasked => "unasked",
        };
        let staying = Volume::new("v", VolumeSpec::default());
        let mut going = staying.clone();
        going.metadata.deletion_timestamp = Some(now().into());
        for volume in [Some(&staying), Some(&going), None] {
            for active in [false, true] {
                let twins = [twin("a", active, Some(5)), twin("b", !active, None)];
                assert_eq!(decided(twins, volume), "another's", "{active}");
                // One after the other, and at once by the API server's clock: one of them decides, and it alone.
                let (first, last) = (twin("b", active, Some(5)), twin("a", !active, Some(6)));
                assert_eq!(decided([first.clone(), last.clone()], volume), "another's", "{active}");
                assert_eq!(decided([last, first], volume), "waits", "{active}");
                let (first, last) = (twin("a", active, Some(5)), twin("b", !active, Some(5)));
                assert_eq!(decided([first.clone(), last.clone()], volume), "another's", "{active}");
                assert_eq!(decided([last, first], volume), "waits", "{active}");
            }
        }
        // Longhorn's finalizer is off: it goes, and decides nothing.
        let mut undecided = twin("b", true, Some(6));
        undecided.metadata.finalizers = Some(vec!["foregroundDeletion".into()]);
        assert_eq!(decided([twin("a", false, Some(5)), undecided], Some(&going)), "goes");
        type Case = (&'static str, fn(&mut ReplicaSpec));
        let elsewhere: [Case; 3] = [
            ("another node", |spec| spec.node_id = "n2".into()),
            ("another disk", |spec| spec.disk_id = "e".into()),
            ("another directory", |spec| spec.data_directory_name = "v-0a1b2c3e".into()),
        ];
        for (what, change) in elsewhere {
            let mut other = twin("b", true, None);
            change(&mut other.spec);
            assert_eq!(decided([twin("a", false, Some(5)), other], Some(&staying)), "after others", "{what}");
        }
    }

    #[test]
    fn of_two_replicas_of_a_directory_one_is_spare() {
        let spare = |twins: &[Replica], members: Option<&[&str]>| -> Vec<String> {
            let epoch = members.map(|all| EpochRecord {
                members: all.iter().map(|m| (*m).to_owned()).collect(),
                ..EpochRecord::default()
            });
            let mut volume = Volume::new("v", VolumeSpec::default());
            volume.status = Some(VolumeStatus { epoch, ..VolumeStatus::default() });
            let all: Vec<&Replica> = twins.iter().collect();
            let found = twins.iter().filter(|r| is_spare(r, &all, &volume));
            found.map(|r| r.metadata.name.clone().unwrap()).collect()
        };
        let pair = |a, b| [twin("a", a, None), twin("b", b, None)];
        assert_eq!(spare(&pair(false, true), None), ["a"]);
        assert_eq!(spare(&pair(true, false), None), ["b"]);
        assert_eq!(spare(&pair(false, false), None), ["b"], "Longhorn was changing over: one of them stays");
        assert_eq!(spare(&pair(false, true), Some(&["a"])), ["b"], "an engine here has served the other one");
        let mut failed = pair(false, false);
        failed[0].spec.failed_at = "2026-01-02T00:00:00Z".into();
        assert_eq!(spare(&failed, None), ["a"]);
        assert_eq!(spare(&pair(true, true), None), [""; 0], "neither is Longhorn's leftover");
        assert_eq!(spare(&pair(false, true)[..1], None), [""; 0], "it has the directory alone");
        let mut apart = pair(false, true);
        apart[0].spec.data_directory_name = "v-0a1b2c3e".into();
        assert_eq!(spare(&apart, None), [""; 0]);
    }

    #[test]
    fn a_resource_without_the_finalizer_gets_it_before_anything_is_started() {
        let mut replica = replica("n1", DesireState::Running);
        replica.metadata.finalizers = None;
        let actions = decide(&replica, None, None, None);
        assert_eq!(actions[..2], [Action::AddFinalizer, Action::Start]);
    }
}
