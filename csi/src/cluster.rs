//! Longhorn's resources at the API server, as the driver uses them: read one, make one, wait until it is so.
//!
//! A request waits for what it asked for; the managers do the work. While it waits it reads the one object that it waits
//! for, a few times a second in the beginning and ever more seldom. At rest nothing is asked.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Node as KubeNode, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, Resource};
use lh_cluster::api::{
    AttachmentTicket, Conditions, Engine, Node, Replica, Setting, Snapshot, TicketType, Volume,
    VolumeAttachment,
};
use lh_cluster::kubernetes::{attached_to, may_be_a_label, may_be_a_name};
use lh_cluster::plan::volume::pair;
use lh_cluster::plan::{VOLUME_LABEL, engine_name};
use lh_cluster::settings::Settings;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::names::ticket_id;
use crate::{DRIVER, Refused};

/// Between two looks at what is waited for: for the first seconds, within which most is done, and at most.
const LOOK: Duration = Duration::from_millis(250);
const SELDOM: Duration = Duration::from_secs(5);

/// Between two looks at what has been waited for so long: a little of that, so that nobody who waits long waits much longer,
/// and many who wait ask little.
fn pause(waited: Duration) -> Duration {
    (waited / 8).clamp(LOOK, SELDOM)
}

/// How long a request is waited for: less than the sidecars' own patience, so that they hear why.
const PATIENCE: Duration = Duration::from_secs(100);

/// The condition of a volume that is not as large as it should be, and its reason where that failed.
const GROWTH: &str = "Expansion";
const GROWTH_FAILED: &str = "Failed";

/// The setting that names labels of nodes that are told as topology, beside the node itself.
const TOPOLOGY_KEYS: &str = "csi-allowed-topology-keys";

/// Which pods are of the driver's controller (`deploy/csi.yaml`).
const CONTROLLERS: &str = "app.kubernetes.io/component=csi-controller";

/// What every kind of Longhorn's is.
pub(crate) trait Kind:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + serde::Serialize
    + serde::de::DeserializeOwned
{
}

impl<K> Kind for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + serde::Serialize
        + serde::de::DeserializeOwned
{
}

/// The API server, one namespace of it.
#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
    namespace: String,
    patience: Duration,
}

fn is_missing(e: &kube::Error) -> bool {
    matches!(e, kube::Error::Api(status) if status.code == 404)
}

fn is_conflict(e: &kube::Error) -> bool {
    matches!(e, kube::Error::Api(status) if status.code == 409)
}

impl Cluster {
    pub(crate) fn new(client: Client, namespace: &str) -> Self {
        Self { client, namespace: namespace.to_owned(), patience: PATIENCE }
    }

    pub(crate) fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    fn api<K: Kind>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// One object; `None`: there is none of that name.
    pub(crate) async fn find<K: Kind>(&self, name: &str) -> Result<Option<K>, Refused> {
        // A name that cannot be one is of nothing.
        if may_be_a_name(name) { Ok(self.api::<K>().get_opt(name).await?) } else { Ok(None) }
    }

    /// All objects, those with a label or all.
    pub(crate) async fn all<K: Kind>(&self, label: Option<&str>) -> Result<Vec<K>, Refused> {
        let params = label.map_or_else(ListParams::default, |l| ListParams::default().labels(l));
        Ok(self.api::<K>().list(&params).await?.items)
    }

    /// Makes an object. False: one of that name is there.
    pub(crate) async fn create<K: Kind>(&self, object: &K) -> Result<bool, Refused> {
        match self.api::<K>().create(&PostParams::default(), object).await {
            Ok(_) => Ok(true),
            Err(e) if is_conflict(&e) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// The snapshots of a volume. Those that say so by a label, and those without that label, which somebody made while no webhook
    /// was there to put it: a cluster may have a hundred thousand of other volumes. A name that no label can have is told by none, and is a
    /// wrong request to the API server.
    pub(crate) async fn snapshots_of(&self, volume: &str) -> Result<Vec<Snapshot>, Refused> {
        let mut all = match may_be_a_label(volume) {
            true => self.all::<Snapshot>(Some(&format!("{VOLUME_LABEL}={volume}"))).await?,
            false => Vec::new(),
        };
        all.extend(self.all::<Snapshot>(Some(&format!("!{VOLUME_LABEL}"))).await?);
        all.retain(|snapshot| snapshot.spec.volume == volume);
        Ok(all)
    }

    /// Deletes an object. One that is not there is as good.
    pub(crate) async fn delete<K: Kind>(&self, name: &str) -> Result<(), Refused> {
        match self.api::<K>().delete(name, &DeleteParams::default()).await {
            Err(e) if !is_missing(&e) => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Deletes an object that is still as it was read. One that is not there is as good.
    pub(crate) async fn delete_read<K: Kind>(&self, read: &K) -> Result<(), Refused> {
        let meta = read.meta();
        let seen = Preconditions { uid: meta.uid.clone(), resource_version: meta.resource_version.clone() };
        let name = meta.name.as_deref().unwrap_or_default();
        match self.api::<K>().delete(name, &DeleteParams::default().preconditions(seen)).await {
            Err(e) if !is_missing(&e) => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// How long a request is waited for, at most.
    pub(crate) const fn patience(&self) -> Duration {
        self.patience
    }

    /// Changes an object by a merge patch.
    pub(crate) async fn change<K: Kind>(&self, name: &str, patch: &Value) -> Result<(), Refused> {
        self.api::<K>().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Waits until the object is as it should be: `is_so` says so, or why it never will be.
    pub(crate) async fn wait<K: Kind, T>(
        &self,
        name: &str,
        what: &str,
        is_so: impl Fn(Option<&K>) -> Result<Option<T>, Refused>,
    ) -> Result<T, Refused> {
        let begun = Instant::now();
        loop {
            let object = self.find::<K>(name).await?;
            if let Some(done) = is_so(object.as_ref())? {
                return Ok(done);
            }
            let waited = begun.elapsed();
            if waited >= self.patience {
                return Err(Refused::NotYet(format!("{what}: not yet after {} s", self.patience.as_secs())));
            }
            // One more look is at the end.
            tokio::time::sleep(pause(waited).min(self.patience - waited)).await;
        }
    }

    /// The name of a volume's engine, which is another one after a migration.
    pub(crate) async fn engine_of(&self, volume: &Volume) -> Result<String, Refused> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let engines = self.all::<Engine>(Some(&format!("{VOLUME_LABEL}={name}"))).await?;
        let engine = pair(volume, &engines).0.and_then(|e| e.metadata.name.clone());
        Ok(engine.unwrap_or_else(|| engine_name(name)))
    }

    /// Waits until the object is gone.
    pub(crate) async fn wait_gone<K: Kind>(&self, name: &str, what: &str) -> Result<(), Refused> {
        self.wait::<K, ()>(name, what, |object| Ok(object.is_none().then_some(()))).await
    }

    /// A volume.
    ///
    /// # Errors
    /// [`Refused::Missing`], or what the API server says.
    pub(crate) async fn volume(&self, id: &str) -> Result<Volume, Refused> {
        let volume = self.find::<Volume>(id).await?;
        volume.ok_or_else(|| Refused::Missing(format!("volume {id} does not exist")))
    }

    /// Why a volume is not as large as it should be; `None`: it is, or may still become so.
    pub(crate) async fn growth_failure(&self, id: &str) -> Result<Option<String>, Refused> {
        let conditions = self.volume(id).await?.status.unwrap_or_default().conditions;
        let growth = conditions.get_condition(GROWTH).filter(|c| !c.is_true() && c.reason == GROWTH_FAILED);
        Ok(growth.map(|c| c.message.clone()))
    }

    /// The volume's attachment.
    pub(crate) async fn attachment(&self, volume: &str) -> Result<Option<VolumeAttachment>, Refused> {
        self.find(volume).await
    }

    /// Puts a ticket on a volume's attachment, or takes it off (`None`); from one that is not there it is off.
    pub(crate) async fn set_ticket(
        &self,
        volume: &str,
        id: &str,
        ticket: Option<&AttachmentTicket>,
    ) -> Result<(), Refused> {
        let patch = Patch::Merge(json!({ "spec": { "attachmentTickets": { id: ticket } } }));
        match self.api::<VolumeAttachment>().patch(volume, &PatchParams::default(), &patch).await {
            Err(e) if ticket.is_some() || !is_missing(&e) => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Takes tickets off an attachment that is still as it was read.
    pub(crate) async fn drop_tickets(
        &self,
        read: &VolumeAttachment,
        ids: &BTreeSet<String>,
    ) -> Result<(), Refused> {
        let none: BTreeMap<&String, Value> = ids.iter().map(|id| (id, Value::Null)).collect();
        let patch = json!({
            "metadata": { "resourceVersion": read.metadata.resource_version },
            "spec": { "attachmentTickets": none },
        });
        self.change::<VolumeAttachment>(read.metadata.name.as_deref().unwrap_or_default(), &patch).await
    }

    /// Those of some nodes that Kubernetes itself has the volume attached to, or is about to; `None`: it has no such volume.
    pub(crate) async fn nodes_in_kubernetes<'a>(
        &self,
        id: &str,
        nodes: impl IntoIterator<Item = &'a str>,
    ) -> Result<Option<BTreeSet<String>>, Refused> {
        let named: BTreeMap<&str, String> =
            nodes.into_iter().map(|node| (node, ticket_id(id, DRIVER, node))).collect();
        let named = named.iter().map(|(node, name)| (*node, name.as_str())).collect();
        Ok(attached_to(&self.client, id, &named).await?)
    }

    /// Tickets of this driver for a node, by volume.
    pub(crate) async fn tickets_of(&self, node: &str) -> Result<BTreeMap<String, String>, Refused> {
        let all = self.all::<VolumeAttachment>(None).await?;
        let tickets = all.iter().flat_map(|attachment| {
            let spec = &attachment.spec;
            let ours =
                spec.attachment_tickets.values().filter(|t| t.kind == TicketType::Csi && t.node_id == node);
            ours.map(|t| (spec.volume.clone(), t.id.clone()))
        });
        Ok(tickets.collect())
    }

    /// The settings in force, and everything that placement depends on.
    pub(crate) async fn picture(&self) -> Result<(Settings, lh_cluster::schedule::Cluster), Refused> {
        let (nodes, replicas) = (self.all::<Node>(None).await?, self.all::<Replica>(None).await?);
        let settings = self.all::<Setting>(None).await?;
        let settings = Settings::of(
            settings.iter().filter_map(|s| Some((s.metadata.name.as_deref()?, s.spec.value.as_str()))),
        );
        let up = nodes.iter().filter_map(|n| n.metadata.name.clone()).collect();
        // What a cordoned node takes its own condition says, and a new volume is of the managers' image, which is everywhere.
        let (drains, programs) = (BTreeMap::new(), BTreeMap::new());
        let picture =
            lh_cluster::plan::node::picture(&nodes, &replicas, &up, &drains, &programs, &settings).0;
        Ok((settings, picture))
    }

    /// A setting's value; empty if there is none.
    pub(crate) async fn setting(&self, name: &str) -> Result<String, Refused> {
        Ok(self.find::<Setting>(name).await?.map(|s| s.spec.value).unwrap_or_default())
    }

    /// Which labels of nodes are told as topology, by the setting.
    pub(crate) async fn topology_keys(&self) -> Result<Vec<String>, Refused> {
        let keys = self.setting(TOPOLOGY_KEYS).await?;
        Ok(keys.split(',').map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect())
    }

    /// Labels of a node in Kubernetes.
    pub(crate) async fn node_labels(&self, name: &str) -> Result<BTreeMap<String, String>, Refused> {
        let node = Api::<KubeNode>::all(self.client.clone()).get_opt(name).await?;
        Ok(node.and_then(|n| n.metadata.labels).unwrap_or_default())
    }

    /// The name of the node in Kubernetes that has a label.
    pub(crate) async fn node_with(&self, label: &str, value: &str) -> Result<Option<String>, Refused> {
        let those = ListParams::default().labels(&format!("{label}={value}"));
        let found = Api::<KubeNode>::all(self.client.clone()).list_metadata(&those).await?.items;
        Ok(found.into_iter().find_map(|node| node.metadata.name))
    }

    /// A snapshot.
    pub(crate) async fn snapshot(&self, name: &str) -> Result<Option<Snapshot>, Refused> {
        self.find(name).await
    }

    /// The pods of this driver's controller, as the manifests make them, that stay: the node of each.
    pub(crate) async fn controllers(&self) -> Result<BTreeMap<String, String>, Refused> {
        let those = ListParams::default().labels(CONTROLLERS);
        let pods = Api::<Pod>::namespaced(self.client.clone(), &self.namespace).list(&those).await?;
        let stays = |pod: &Pod| pod.metadata.deletion_timestamp.is_none();
        let place = |pod: Pod| Some((pod.metadata.name?, pod.spec?.node_name?));
        Ok(pods.items.into_iter().filter(stays).filter_map(place).collect())
    }

    /// True if the API server answers.
    pub(crate) async fn answers(&self) -> bool {
        self.api::<Volume>().list(&ListParams::default().limit(1)).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_long_asks_seldom() {
        let mut looks = Vec::new();
        let mut waited = Duration::ZERO;
        while waited < PATIENCE {
            looks.push(waited);
            waited += pause(waited);
        }
        let within = |seconds: u64| looks.iter().filter(|l| **l < Duration::from_secs(seconds)).count();
        assert_eq!(within(2), 8, "what is done soon is seen soon");
        assert!(looks.len() <= 50, "{} looks", looks.len());
    }
}
