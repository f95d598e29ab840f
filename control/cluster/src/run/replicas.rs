//! The replicas of this node: their processes, their data, and what is said of them (`crate::plan::replica`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

use super::cache::{OwnPod, instance_manager};
use super::desk::{Desk, Done, ReconcileError, is_missing};
use super::key::lay_key;
use super::processes::{SOON, resource_of, tell_failure};
use super::queue::Outcome;
use super::{Context, programs};
use crate::agent::{AgentError, Part, ProcessView};
use crate::api::{Conditions, DesireState, Node, Replica, ReplicaSpec, Snapshot, Volume};
use crate::plan::replica::Fate;
use crate::plan::upgrade::{Images, target};
use crate::plan::{self, FINALIZER, node, replica};

/// How often it is looked whether the volume of a deleted replica can do without it by now.
const KEPT: Duration = Duration::from_secs(10);

/// How long a replica that was deleted stays where its volume is not there. Whoever restores resources makes them one after the
/// other, and a volume that comes and finds a replica with data, deleted or not, does not begin anew (`crate::plan::volume`).
const VOLUME_PATIENCE: Duration = Duration::from_secs(600);

/// The process of a replica. Where there is no pod of this node's instance manager it ended with that: the data of a replica that
/// is deleted would stay for as long as a drained node is cordoned.
async fn process(context: &Context, resource: &Replica) -> Result<Option<ProcessView>, AgentError> {
    let goes = resource.metadata.deletion_timestamp.is_some();
    let no_pod = |own: &OwnPod| own.pods.get(&instance_manager(&context.options.node)).is_none();
    match context.agent.process(&resource.name_any()).await {
        Err(AgentError::Away(_)) if goes && context.cache.pod.as_ref().is_some_and(no_pod) => Ok(None),
        known => known,
    }
}

/// What a replica is asked for maps with, from the key that was laid below this root before it was started. Each process has read the one of
/// then: another one may have been laid since.
fn map_key(root: &Path, replica: &Replica, process: Option<&ProcessView>) -> String {
    let told = replica.status.as_ref();
    let known = told.map(|s| s.map_key.clone()).unwrap_or_default();
    let is_of_process = told.is_some_and(|s| process.is_none_or(|p| p.uuid == s.uuid));
    if is_of_process && !known.is_empty() {
        return known;
    }
    // Without it nobody is told where snapshots hold data, and all else goes on.
    let Ok(root) = control::host::Root::at(root) else { return known };
    let laid = control::host::read_key(&root.key(&replica.spec.volume_name));
    laid.map_or(known, |key| control::host::MapKey::of(&key).to_string())
}

/// Looks at a replica.
pub(super) async fn look(context: &Context, name: &str) -> Done<Outcome> {
    let (cache, here) = (&context.cache, context.options.node.as_str());
    let Some(resource) = resource_of(context, &cache.replicas, name).await? else { return Ok(Outcome::Done) };
    let process = process(context, &resource).await?;
    let process = process.as_ref();
    let view = match process {
        Some(_) => context.agent.replica(name).await,
        None => None,
    };
    let trouble = match disk_trouble(context, &resource) {
        None if process.is_none() => source_trouble(context, &resource).await?,
        trouble => trouble,
    };
    let address = process.map(|p| context.agent.replica_address(name, p)).unwrap_or_default();
    let map_key = map_key(&context.options.root, &resource, process);
    let known = resource.status.clone().unwrap_or_default();
    let images =
        Images { wanted: &resource.spec.image, current: &known.current_image, failed: &known.failed_image };
    let spec = ReplicaSpec { image: target(images).to_owned(), ..resource.spec.clone() };
    let actions = replica::plan(&replica::Observed {
        replica: &resource,
        node: here,
        instance_manager: &instance_manager(here),
        disk_trouble: trouble.as_deref(),
        address: &address,
        map_key: &map_key,
        process,
        programs: programs::of_process(context, images, process).await,
        view: view.as_ref(),
        now: context.desk.now(),
    });
    let mut outcome = Outcome::Done;
    let mut version = resource.resource_version();
    let mut failure = None;
    for action in actions {
        tracing::debug!(replica = name, ?action, "replica");
        match action {
            replica::Action::AddFinalizer => {
                version = context.desk.set_finalizer(resource.as_ref(), true).await?
            }
            replica::Action::Start => {
                failure = start_replica(context, name, &spec).await.err();
                outcome = Outcome::Again(SOON);
            }
            replica::Action::Exchange(image) => {
                tracing::info!(replica = name, image, "the replica's program is exchanged");
                let spec = ReplicaSpec { image, ..spec.clone() };
                context.agent.exchange(name, Part::Replica(&spec)).await?;
                outcome = Outcome::Again(SOON);
            }
            replica::Action::Stop => {
                context.agent.stop(name).await?;
                outcome = Outcome::Again(SOON);
            }
            replica::Action::RemoveData => outcome = remove_data(context, &resource).await?,
            replica::Action::SetStatus(status) => {
                let old = resource.status.clone().unwrap_or_default();
                context.desk.set_status::<Replica, _>(name, version.as_deref(), &old, &*status).await?;
            }
            replica::Action::LookAgain(after) => outcome = Outcome::Again(after),
        }
    }
    if let Some(e) = failure {
        tell_failure(context, resource.as_ref(), &e).await;
        return Err(e);
    }
    let on_its_way = process.is_some() && view.is_none();
    Ok(if on_its_way && outcome == Outcome::Done { Outcome::Again(SOON) } else { outcome })
}

/// Removes what a deleted replica has on its disk, and lets it go.
async fn remove_data(context: &Context, resource: &Replica) -> Done<Outcome> {
    let found = data(context, resource).await;
    if let Err(ReconcileError::NotYet(why)) = &found {
        let message = format!("its data, {}, stays: {why}", place(resource));
        tell(context, resource, "DataNotRemoved", message).await;
    }
    match found? {
        Data::Goes => {}
        Data::Stays => {
            tell_kept(context, resource).await;
            return Ok(Outcome::Again(KEPT));
        }
        Data::IsNobodys => {
            let deleted = resource.metadata.deletion_timestamp.as_ref();
            // The API server's clock and this node's: one that is behind has not waited at all.
            let waited =
                deleted.and_then(|at| Duration::try_from(context.desk.now().duration_since(at.0)).ok());
            let is_over = waited.is_some_and(|waited| waited >= VOLUME_PATIENCE);
            tell_unasked(context, resource, is_over).await;
            if !is_over {
                return Ok(Outcome::Again(KEPT));
            }
            context.desk.set_finalizer(resource, false).await?;
            return Ok(Outcome::Done);
        }
        Data::IsAnothers => {
            tracing::info!(
                replica = resource.name_any(),
                "its data, {}, is another replica's",
                place(resource)
            );
            context.desk.set_finalizer(resource, false).await?;
            return Ok(Outcome::Done);
        }
        Data::Waits => return Ok(Outcome::Again(KEPT)),
    }
    let spec = &resource.spec;
    let (disk, directory) = (PathBuf::from(&spec.disk_path), spec.data_directory_name.clone());
    if let Err(e) = context.agent.remove_directory(disk, directory).await {
        // Much data takes its time.
        if !matches!(e, AgentError::Late(..)) {
            tell_not_removed(context, resource, &e).await;
        }
        return Err(e.into());
    }
    context.desk.set_finalizer(resource, false).await?;
    Ok(Outcome::Done)
}

/// What becomes of what a deleted replica has on its disk.
enum Data {
    /// It may go.
    Goes,
    /// Its volume stays and has no other one that holds everything and can be read.
    Stays,
    /// There is no volume.
    IsNobodys,
    /// Another replica has the same directory.
    IsAnothers,
    /// Another one has it that was deleted before.
    Waits,
}

/// Asked of the API server itself: there is no way back.
async fn data(context: &Context, resource: &Replica) -> Done<Data> {
    let (desk, name) = (&context.desk, &resource.spec.volume_name);
    let volume = desk.api::<Volume>().get_opt(name).await?;
    let of_volume = ListParams::default().fields(&format!("spec.volumeName={name}"));
    let all = desk.api::<Replica>().list(&of_volume).await?.items;
    // People are told how to take its data back (`tell_kept`): another one of its name may have it by now.
    if !all.iter().any(|r| r.uid() == resource.uid()) {
        return Err(ReconcileError::Stale);
    }
    let goes = match replica::fate(resource, volume.as_ref(), &all) {
        Fate::Goes => true,
        Fate::Unasked => return Ok(Data::IsNobodys),
        Fate::Anothers => return Ok(Data::IsAnothers),
        Fate::AfterTwins => return Ok(Data::Waits),
        Fate::After(others) => is_one_readable(desk, &others).await?,
    };
    // A volume that goes, too, is begun no more.
    if goes && let Some(volume) = volume.filter(|v| v.metadata.deletion_timestamp.is_none()) {
        announce_removal(desk, &volume, resource, &all).await?;
    }
    Ok(if goes { Data::Goes } else { Data::Stays })
}

async fn is_one_readable(desk: &Desk, replicas: &[&Replica]) -> Done<bool> {
    for replica in replicas {
        let node = desk.api::<Node>().get_opt(&replica.spec.node_id).await?;
        if node.is_some_and(|node| node::is_readable(&node, &replica.spec.disk_id)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Changes the volume as it was read for the judgement, or fails. An epoch that is just being stored was perhaps judged by the replicas as
/// they were before this one was deleted, and may count none but this one: whichever of the two writes comes second is refused, and
/// that one's judgement begins anew. `all` are the volume's replicas, read after it.
async fn announce_removal(desk: &Desk, volume: &Volume, replica: &Replica, all: &[Replica]) -> Done {
    let uid = replica.uid().unwrap_or_default();
    let tells = |volume: &Volume| volume.status.as_ref().is_some_and(|s| s.data_removed_of.contains(&uid));
    if tells(volume) {
        return Ok(());
    }
    let patch = json!({
        "metadata": { "resourceVersion": volume.resource_version() },
        "status": { "dataRemovedOf": announced(volume, &uid, all) },
    });
    let name = volume.name_any();
    let api = desk.api::<Volume>();
    match api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(stored) if !tells(&stored) => Err(ReconcileError::NotYet(format!(
            "the API server did not keep status.dataRemovedOf of volume {name}: kubectl apply --server-side -f deploy/crds.yaml"
        ))),
        Err(e) if !is_missing(&e) => Err(e.into()),
        _ => Ok(()),
    }
}

/// Whose removal the volume tells once it tells of this one: others may be on their way, and take their time.
fn announced<'a>(volume: &'a Volume, uid: &'a String, all: &[Replica]) -> Vec<&'a String> {
    let told = volume.status.iter().flat_map(|status| &status.data_removed_of);
    let are_there = told.filter(|told| all.iter().any(|r| r.metadata.uid.as_ref() == Some(told)));
    are_there.chain([uid]).collect()
}

/// Tells people why a deleted replica stays.
async fn tell_kept(context: &Context, replica: &Replica) {
    let (spec, name) = (&replica.spec, replica.name_any());
    let message = format!(
        "its data, {}, is kept: volume {} stays, and no other replica that can be read holds everything. It goes when one does, or with the volume; to use it again take the finalizer {FINALIZER} off {name} and make the same Replica anew",
        place(replica),
        spec.volume_name
    );
    tell(context, replica, "DataKept", message).await;
}

/// Tells people what becomes of a replica that was deleted without its volume.
async fn tell_unasked(context: &Context, replica: &Replica, is_over: bool) {
    let (place, volume) = (place(replica), &replica.spec.volume_name);
    let message = if is_over {
        format!(
            "its data, {place}, is kept: there is no volume {volume} that was deleted with it. It becomes an Orphan: deleting that deletes it; to use it again make the volume and the same Replica anew"
        )
    } else {
        format!(
            "its data, {place}, is kept: there is no volume {volume} that was deleted with it. It waits {} minutes for the volume, which may still be restored, and becomes an Orphan then",
            VOLUME_PATIENCE.as_secs() / 60
        )
    };
    tell(context, replica, "DataKept", message).await;
}

/// Tells people what keeps a deleted replica.
async fn tell_not_removed(context: &Context, replica: &Replica, why: &AgentError) {
    let message = format!(
        "its data, {}, cannot be removed: {why}. If that disk is lost for good, unmount it and make an empty directory {}/replicas",
        place(replica),
        replica.spec.disk_path
    );
    tell(context, replica, "DataNotRemoved", message).await;
}

/// Where a replica's data lies, for people.
fn place(replica: &Replica) -> String {
    let spec = &replica.spec;
    format!("{}/replicas/{} on node {}", spec.disk_path, spec.data_directory_name, spec.node_id)
}

async fn tell(context: &Context, replica: &Replica, reason: &'static str, message: String) {
    tracing::warn!(replica = replica.name_any(), "{message}");
    context.desk.tell(replica, &plan::Event { warning: true, reason, message }).await;
}

async fn start_replica(context: &Context, name: &str, spec: &ReplicaSpec) -> Done {
    lay_key(context, &spec.volume_name).await?;
    Ok(context.agent.start_replica(name, spec).await?)
}

/// Why a copy is not begun; `None` if it can be, or it is none. Asked of the API server itself: a snapshot that is deleted goes once nothing
/// is copied from it, which is looked at after it was deleted (`super::snapshots`), as this is after the replica was made. A replica that
/// was made before the snapshot was deleted is found by every such look, and the snapshot is kept for it: its process may have to be
/// started again. Where clocks of API servers differ the two may be taken for the other way round: the copy fails then, since it asks at
/// its end whether the snapshot was there all the while (`replica/src/store/lasting.rs`).
async fn source_trouble(context: &Context, replica: &Replica) -> Done<Option<String>> {
    let source = &replica.spec.clone_from.snapshot;
    if source.is_empty() || replica.spec.desire_state != DesireState::Running {
        return Ok(None);
    }
    let snapshot = context.desk.api::<Snapshot>().get_opt(source).await?;
    let made = replica.metadata.creation_timestamp.as_ref();
    let is_kept = |s: Snapshot| {
        let deleted = s.metadata.deletion_timestamp;
        deleted.is_none_or(|deleted| made.is_some_and(|made| made.0 < deleted.0))
    };
    Ok((!snapshot.is_some_and(is_kept)).then(|| format!("snapshot {source} is being deleted")))
}

/// Why the disk of a replica cannot be used; `None` if it can.
fn disk_trouble(context: &Context, replica: &Replica) -> Option<String> {
    let node = context.cache.nodes.get(&context.options.node)?;
    let status = node.status.as_ref()?;
    let disk = status.disk_status.values().find(|d| d.disk_uuid == replica.spec.disk_id);
    match disk {
        None => Some(format!("disk {} is not on this node any more", replica.spec.disk_id)),
        Some(disk) => {
            let ready = disk.conditions.get_condition(node::READY)?;
            (!ready.is_true()).then(|| ready.message.clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::os::unix::fs::PermissionsExt;

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;
    use crate::api::{VolumeSpec, VolumeStatus};

    /// An API server at which the volume is at version 8 by now. One with definitions of an older version keeps no field that they lack.
    fn newer(has_old_definitions: bool) -> Desk {
        let server = tower::service_fn(move |request: Request<Body>| async move {
            let bytes = request.into_body().collect_bytes().await.unwrap();
            let patch: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            let version = &patch["metadata"]["resourceVersion"];
            let (code, answer) = match version.is_null() || version == "8" {
                true => {
                    let status = if has_old_definitions { json!({}) } else { patch["status"].clone() };
                    let mut volume = json!(Volume::new("demo", VolumeSpec::default()));
                    volume["status"] = status;
                    (200, volume)
                }
                false => {
                    let refusal = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                        "code": 409, "reason": "Conflict", "message": "the object has been modified" });
                    (409, refusal)
                }
            };
            let body = Body::from(answer.to_string().into_bytes());
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        });
        let client = kube::Client::new(server, "longhorn-system");
        Desk::new(client.into(), "longhorn-system", "n1", super::super::Clock::default())
    }

    fn replica(name: &str) -> Replica {
        let mut replica = Replica::new(name, ReplicaSpec::default());
        replica.metadata.uid = Some(format!("of {name}"));
        replica
    }

    fn volume(version: &str, announced: &[&str]) -> Volume {
        let data_removed_of = announced.iter().map(|uid| (*uid).to_owned()).collect();
        let status = VolumeStatus { data_removed_of, ..VolumeStatus::default() };
        let mut volume = Volume { status: Some(status), ..Volume::new("demo", VolumeSpec::default()) };
        volume.metadata.resource_version = Some(version.to_owned());
        volume
    }

    #[tokio::test]
    async fn a_removal_that_was_judged_by_an_older_volume_is_judged_anew() {
        let all = [replica("a"), replica("b")];
        let cases = [
            ("as it was read", volume("8", &[]), true),
            ("an epoch was stored since", volume("7", &[]), false),
            ("another one's removal was announced", volume("7", &["of b"]), false),
            ("announced by an attempt before", volume("7", &["of a"]), true),
        ];
        for (what, volume, goes) in cases {
            let done = announce_removal(&newer(false), &volume, &all[0], &all).await;
            assert!(matches!((done, goes), (Ok(()), true) | (Err(ReconcileError::Stale), false)), "{what}");
        }
    }

    /// With the field the write would go, and nobody who stores an epoch at the same time would be refused.
    #[tokio::test]
    async fn no_data_goes_where_the_api_server_does_not_keep_its_announcement() {
        let all = [replica("a")];
        let done = announce_removal(&newer(true), &volume("8", &[]), &all[0], &all).await;
        let Err(ReconcileError::NotYet(why)) = done else { panic!("{done:?}") };
        assert!(why.contains("kubectl apply --server-side -f deploy/crds.yaml"), "{why}");
    }

    #[test]
    fn each_process_is_asked_for_maps_with_the_key_that_it_has_read() {
        let place = tempfile::tempdir().unwrap();
        let root = control::host::Root::at(place.path()).unwrap();
        let lay = |byte| {
            std::fs::create_dir_all(root.volume("demo")).unwrap();
            std::fs::write(root.key("demo"), [byte; 32]).unwrap();
            std::fs::set_permissions(root.key("demo"), std::fs::Permissions::from_mode(0o600)).unwrap();
            control::host::MapKey::of(&[byte; 32]).to_string()
        };
        let mut replica = replica("a");
        replica.spec.volume_name = "demo".to_owned();
        let told = |replica: &mut Replica, uuid: &str, map_key: &str| {
            let (uuid, map_key) = (uuid.to_owned(), map_key.to_owned());
            replica.status = Some(crate::api::ReplicaStatus { uuid, map_key, ..Default::default() });
        };
        let process = |uuid: &str| ProcessView { uuid: uuid.to_owned(), ..ProcessView::default() };
        let asked = |replica: &Replica, uuid| map_key(place.path(), replica, Some(&process(uuid)));
        assert_eq!(asked(&replica, "1"), "", "none was laid");
        let first = lay(1);
        assert_eq!(asked(&replica, "1"), first);
        told(&mut replica, "1", &first);
        // The volume's key was lost, and made anew, before the next process began.
        let second = lay(2);
        assert_eq!(asked(&replica, "1"), first);
        assert_eq!(asked(&replica, "2"), second);
        std::fs::remove_file(root.key("demo")).unwrap();
        assert_eq!(asked(&replica, "2"), first, "it is all that is known");
    }

    #[test]
    fn an_announcement_stays_as_long_as_its_replica() {
        let all = [replica("a"), replica("b")];
        let uid = "of a".to_owned();
        assert_eq!(announced(&volume("8", &["of b", "of gone"]), &uid, &all), ["of b", "of a"]);
    }
}
