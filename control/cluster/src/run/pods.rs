//! Frees pods that are stuck on a node that is down (`crate::plan::pods`): what they depend on is read while one is, and not
//! watched.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node as KubeNode, PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::{Api, ResourceExt};

use super::Context;
use super::desk::{Done, is_missing};
use super::queue::Outcome;
use crate::api::DRIVER;
use crate::plan::pods::{Action, Claim, Held, leave, stuck};

/// How often the pods of a node that is down are looked at.
const ROUND: Duration = Duration::from_secs(10);

/// Looks at the pods of a node whose manager is silent.
pub(super) async fn of_dead_node(context: &Context, node: &str) -> Done<Outcome> {
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
    let stuck: Vec<&Pod> = stuck(&pods, policy, Timestamp::now()).collect();
    if !stuck.is_empty() {
        for action in leave(stuck, &claims(context, node).await?) {
            carry_out(context, action).await?;
        }
    }
    Ok(Outcome::Again(ROUND))
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
    for one in attachments.list(&ListParams::default()).await?.items {
        if one.spec.attacher == DRIVER && one.spec.node_name == node {
            let (by, goes) = (one.name_any(), one.metadata.deletion_timestamp.is_some());
            held.insert(one.spec.source.persistent_volume_name.unwrap_or_default(), Held { by, goes });
        }
    }
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let volumes = volumes.list(&ListParams::default()).await?.items;
    let claim = |volume: PersistentVolume| {
        let (namespace, name) = claim_of(&volume)?;
        Some(Claim { namespace, name, held: held.remove(&volume.name_any()) })
    };
    Ok(volumes.into_iter().filter_map(claim).collect())
}

/// Namespace and name of the claim that one of this driver's PersistentVolumes is bound to.
fn claim_of(volume: &PersistentVolume) -> Option<(String, String)> {
    let spec = volume.spec.as_ref().filter(|s| s.csi.as_ref().is_some_and(|csi| csi.driver == DRIVER))?;
    let claim = spec.claim_ref.clone()?;
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
            let this_one = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
            let at_once = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(this_one),
                ..DeleteParams::default()
            };
            gone(pods.delete(&pod.name, &at_once).await)
        }
    }
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
