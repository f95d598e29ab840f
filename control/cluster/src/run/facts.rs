//! What has to be known to judge one wish of a user: read for it from the API server, since a manager knows only what is of
//! its own node.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::Api;
use kube::api::ListParams;

use super::Context;
use super::desk::Desk;
use super::processes::engines_of;
use crate::admission::{About, Facts};
use crate::api::{Node, Replica, Volume};
use crate::plan::node::picture;
use crate::plan::volume::pair;
use crate::schedule::Cluster;
use crate::settings::Settings;

/// The nodes and what their disks have, with these replicas on them. Whether a node takes new ones is not told.
async fn disks(desk: &Desk, replicas: &[Replica], settings: &Settings) -> kube::Result<Cluster> {
    let nodes = desk.api::<Node>().list(&ListParams::default()).await?.items;
    let up = nodes.iter().map(kube::ResourceExt::name_any).collect();
    let (drains, programs) = (BTreeMap::new(), BTreeMap::new());
    Ok(picture(&nodes, replicas, &up, &drains, &programs, settings).0)
}

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
            facts.cluster = disks(desk, &[], &facts.settings).await?;
        }
        About::RoomFor(name) => {
            let all = desk.api::<Replica>().list(&ListParams::default()).await?.items;
            facts.cluster = disks(desk, &all, &facts.settings).await?;
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
