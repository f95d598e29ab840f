//! Helps pods that are stuck on a node that is down, or whose volume's device was lost (`crate::plan::pods`): what they depend
//! on is read while that is so, and not watched.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node as KubeNode, PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::{Api, ResourceExt};

use super::Context;
use super::desk::{Done, ReconcileError, is_missing};
use super::lead::Lead;
use super::queue::Outcome;
use crate::api::{DRIVER, Volume};
use crate::kubernetes::{each, handle_of, persistent_volumes};
use crate::plan::Event;
use crate::plan::pods::{self, Action, Claim, Fate, Held, PodName, leave, stuck};

/// How often the pods of a node that is down are looked at.
const ROUND: Duration = Duration::from_secs(10);

/// A device that was lost longer ago than this is nobody's reason any more: pods that it had are gone, or are kept on purpose.
const REMOUNT: Duration = Duration::from_secs(600);

/// Seconds that a pod gets to end by itself; Longhorn's.
const GRACE: u32 = 30;

/// Looks at the pods of a node whose manager is silent.
pub(super) async fn of_dead_node(context: &Context, lead: &Lead, node: &str) -> Done<Outcome> {
    let policy = context.cache.settings().node_down();
    if !policy.acts() || context.nodes_up().contains(node) {
        return Ok(Outcome::Done);
    }
    // A silent manager alone is no dead node.
    let nodes: Api<KubeNode> = Api::all(context.desk.client.clone());
    if nodes.get_opt(node).await?.is_some_and(|node| is_ready(&node)) {
        return Ok(Outcome::Again(ROUND));
    }
    let pods: Api<Pod> = Api::all(context.desk.client.clone());
    let there = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods = pods.list(&there).await?.items;
    let stuck: Vec<&Pod> = stuck(&pods, policy, context.desk.now()).collect();
    let mut refused = None;
    if !stuck.is_empty() {
        for action in leave(stuck, &claims(context, node).await?) {
            context.confirm_leads(lead)?;
            hear(&mut refused, carry_out(context, action).await)?;
        }
    }
    refused.map_or(Ok(Outcome::Again(ROUND)), Err)
}

/// Deletes the pods that had the device of a volume before it was lost.
pub(super) async fn after_loss(context: &Context, lead: &Lead, volume: &str) -> Done<Outcome> {
    let (Some(policy), Some(resource)) = (context.cache.settings().remount(), lead.cache.volumes.get(volume))
    else {
        return Ok(Outcome::Done);
    };
    let status = resource.status.clone().unwrap_or_default();
    let now = context.desk.now();
    let lost: Option<Timestamp> = status.remount_requested_at.parse().ok();
    let is_recent = |lost: &Timestamp| now.duration_since(*lost).unsigned_abs() < REMOUNT;
    let Some(lost) = lost.filter(is_recent).filter(|_| !status.current_node_id.is_empty()) else {
        return Ok(Outcome::Done);
    };
    let client = &context.desk.client;
    let claims = claims_of(context, lead, &resource).await?;
    let there = ListParams::default().fields(&format!("spec.nodeName={}", status.current_node_id));
    let (mut outcome, mut refused) = (Outcome::Done, None);
    for namespace in claims.iter().map(|c| c.namespace.clone()).collect::<BTreeSet<_>>() {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        for pod in pods.list(&there).await?.items {
            match pods::after_loss(&pod, &claims, lost, &policy) {
                Fate::Stays => {}
                // Until it is gone: it may be one that a finalizer or a kubelet keeps.
                Fate::Goes => outcome = Outcome::Again(ROUND),
                Fate::Delete(pod) => {
                    context.confirm_leads(lead)?;
                    let deleted = delete(&pods, &pod, GRACE).await;
                    if !hear(&mut refused, deleted)? {
                        continue;
                    }
                    let message = format!(
                        "pod {}/{} is deleted: it had the device that was lost",
                        pod.namespace, pod.name
                    );
                    let event = Event { warning: false, reason: "PodDeleted", message };
                    context.desk.tell(resource.as_ref(), &event).await;
                    outcome = Outcome::Again(ROUND);
                }
            }
        }
    }
    if refused.is_none() && outcome == Outcome::Done {
        remounts(lead).end(volume);
    }
    refused.map_or(Ok(outcome), Err)
}

/// What this leader knows of lost devices: each loss is dealt with once, and of what has to be paged for it is asked once.
#[derive(Default)]
pub(super) struct Remounts(BTreeMap<String, Remount>);

/// The last loss of a volume's device.
struct Remount {
    /// `status.remountRequestedAt` of the volume.
    requested_at: String,
    /// The claims of the volume.
    claims: Vec<Claim>,
    /// The pods that had the device are gone.
    is_over: bool,
}

impl Remounts {
    /// True while pods may be left that had the device.
    pub(super) fn is_open(&self, volume: &Volume) -> bool {
        let requested = volume.status.as_ref().map_or("", |s| s.remount_requested_at.as_str());
        !requested.is_empty() && !self.of(volume).is_some_and(|known| known.is_over)
    }

    fn of(&self, volume: &Volume) -> Option<&Remount> {
        let requested = &volume.status.as_ref()?.remount_requested_at;
        self.0.get(&volume.name_any()).filter(|known| known.requested_at == *requested)
    }

    fn begin(&mut self, volume: &Volume, claims: Vec<Claim>) {
        let requested_at = volume.status.as_ref().map(|s| s.remount_requested_at.clone()).unwrap_or_default();
        self.0.insert(volume.name_any(), Remount { requested_at, claims, is_over: false });
    }

    fn end(&mut self, volume: &str) {
        self.0.entry(volume.to_owned()).and_modify(|known| known.is_over = true);
    }

    /// Forgets a volume that is gone.
    pub(super) fn forget(&mut self, volume: &str) {
        self.0.remove(volume);
    }
}

pub(super) fn remounts(lead: &Lead) -> MutexGuard<'_, Remounts> {
    lead.remounts.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The claims of a volume whose device was lost, as they were found when that was first looked at.
async fn claims_of(context: &Context, lead: &Lead, volume: &Volume) -> Done<Vec<Claim>> {
    if let Some(known) = remounts(lead).of(volume) {
        return Ok(known.claims.clone());
    }
    let all = persistent_volumes(&context.desk.client, &volume.name_any()).await?;
    let claims = all.iter().filter_map(claim_of);
    let claims: Vec<Claim> = claims.map(|(namespace, name)| Claim { namespace, name, held: None }).collect();
    remounts(lead).begin(volume, claims.clone());
    Ok(claims)
}

/// What the API server refuses for one pod, as where a webhook forbids it, keeps no other from being dealt with: it
/// is told when all were. False if it was refused.
///
/// # Errors
/// Nobody answers, who would be asked in vain for the others, too.
fn hear(refused: &mut Option<ReconcileError>, done: Done) -> Done<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(ReconcileError::Api(e)) if matches!(*e, kube::Error::Api(_)) => {
            refused.get_or_insert(ReconcileError::Api(e));
            Ok(false)
        }
        Err(e) => Err(e),
    }
}

/// What the kubelet last said of itself; what it said too long ago Kubernetes calls Unknown.
fn is_ready(node: &KubeNode) -> bool {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// The claims of this driver's volumes, and which of them Kubernetes holds attached to a node.
async fn claims(context: &Context, node: &str) -> Done<Vec<Claim>> {
    let client = &context.desk.client;
    let attachments: Api<VolumeAttachment> = Api::all(client.clone());
    let mut held = BTreeMap::new();
    let see = |one: VolumeAttachment| {
        if one.spec.attacher == DRIVER && one.spec.node_name == node {
            let (by, goes) = (one.name_any(), one.metadata.deletion_timestamp.is_some());
            held.insert(one.spec.source.persistent_volume_name.unwrap_or_default(), Held { by, goes });
        }
    };
    each(&attachments, see).await?;
    let mut claims = Vec::new();
    let see = |volume: PersistentVolume| {
        let held = held.remove(&volume.name_any());
        claims.extend(claim_of(&volume).map(|(namespace, name)| Claim { namespace, name, held }));
    };
    each(&Api::all(client.clone()), see).await?;
    Ok(claims)
}

/// Namespace and name of the claim that one of this driver's PersistentVolumes is bound to.
pub(super) fn claim_of(volume: &PersistentVolume) -> Option<(String, String)> {
    handle_of(volume)?;
    let claim = volume.spec.as_ref()?.claim_ref.clone()?;
    claim.namespace.zip(claim.name)
}

async fn carry_out(context: &Context, action: Action) -> Done {
    tracing::info!(?action, "a pod of a node that is down");
    let client = context.desk.client.clone();
    match action {
        Action::Detach(name) => {
            let all: Api<VolumeAttachment> = Api::all(client);
            gone(all.delete(&name, &DeleteParams::default()).await)
        }
        Action::Force(pod) => {
            let pods: Api<Pod> = Api::namespaced(client, &pod.namespace);
            delete(&pods, &pod, 0).await
        }
    }
}

/// Deletes a pod, and no other one of its name.
async fn delete(pods: &Api<Pod>, pod: &PodName, grace_seconds: u32) -> Done {
    let this_one = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
    let how = DeleteParams {
        grace_period_seconds: Some(grace_seconds),
        preconditions: Some(this_one),
        ..DeleteParams::default()
    };
    gone(pods.delete(&pod.name, &how).await)
}

/// What is gone already, or is another one by now, is as good as deleted.
fn gone<T>(deleted: kube::Result<T>) -> Done {
    match deleted {
        Ok(_) => Ok(()),
        Err(e) if is_missing(&e) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(e) => Err(e.into()),
    }
}
