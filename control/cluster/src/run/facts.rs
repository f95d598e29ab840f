//! What has to be known to judge one wish of a user: read for it from the API server, since a manager knows only what is of
//! its own node.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::Api;
use kube::api::ListParams;

use super::Context;
use super::engines::engines_of;
use crate::admission::{About, Facts};
use crate::api::{Node, Replica, Volume};
use crate::plan::node::picture;
use crate::plan::volume::pair;

/// Reads what is needed.
///
/// # Errors
/// The API server does not answer: nobody can judge the wish.
pub(super) async fn gather(context: &Context, about: About) -> kube::Result<Facts> {
    let desk = &context.desk;
    let replicas = async |field: &str, of: &str| {
        let those = ListParams::default().fields(&format!("{field}={of}"));
        desk.api::<Replica>().list(&those).await.map(|found| found.items)
    };
    let mut facts = Facts { settings: context.cache.settings(), ..Facts::default() };
    match about {
        About::ItselfAlone => {}
        About::Volume(name) => {
            facts.volume = desk.api::<Volume>().get_opt(&name).await?;
            let engines = engines_of(desk, &name).await?;
            facts.engine = facts.volume.as_ref().and_then(|v| pair(v, &engines).0).cloned();
            facts.snapshots = context.cache.snapshots.of(&name).len();
        }
        About::ReplicasOf(name) => {
            facts.volume = desk.api::<Volume>().get_opt(&name).await?;
            let engines = engines_of(desk, &name).await?;
            facts.engine = facts.volume.as_ref().and_then(|v| pair(v, &engines).0).cloned();
            facts.replicas = replicas("spec.volumeName", &name).await?;
        }
        About::RoomFor(name) => {
            let nodes = desk.api::<Node>().list(&ListParams::default()).await?.items;
            let all = desk.api::<Replica>().list(&ListParams::default()).await?.items;
            // Only what the disks have counts: whether a node takes new replicas does not.
            let up = nodes.iter().map(kube::ResourceExt::name_any).collect();
            let (drains, programs) = (BTreeMap::new(), BTreeMap::new());
            facts.cluster = picture(&nodes, &all, &up, &drains, &programs, &facts.settings).0;
            facts.replicas = all.into_iter().filter(|r| r.spec.volume_name == name).collect();
        }
        About::Node(name) => {
            let nodes: Api<KubeNode> = Api::all(desk.client.clone());
            facts.kubernetes_has_it = nodes.get_opt(&name).await?.is_some();
            facts.replicas = replicas("spec.nodeID", &name).await?;
        }
    }
    Ok(facts)
}
