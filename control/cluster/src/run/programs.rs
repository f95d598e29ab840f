//! The programs of images on this node: this manager's own is laid there, and what is there is told in the EngineImages.
//!
//! They lie on the node and not in a pod: the pods of managers, which lay them, and of instance managers, which run them, both
//! see the node's root, and neither has to be replaced for another program.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;
use serde_json::json;

use super::Context;
use super::cache::Local;
use super::desk::Done;
use super::queue::Outcome;
use crate::agent::ProcessView;
use crate::api::{EngineImage, EngineImageStatus};
use crate::plan::upgrade::{Images, Programs, target};
use crate::plan::written;

/// The state of an image that is on every node whose manager answers; Longhorn's word.
pub(super) const DEPLOYED: &str = "deployed";

/// Lays this manager's program on the node, and tells which images' programs are there. Until that is done engines and
/// replicas of its image do not start here, and say so.
pub(super) async fn look(context: &Context) -> Done<Outcome> {
    let node = &context.options.node;
    context.agent.install_program(&context.options.image).await?;
    for image in context.cache.engine_images.all() {
        let told = image.status.as_ref().and_then(|s| s.node_deployment_map.get(node)).copied();
        let is_there = context.agent.has_program(&image.spec.image).await;
        if told.unwrap_or_default() != is_there {
            // Every manager writes its own entry, and nothing else.
            let patch = json!({ "status": { "nodeDeploymentMap": { node: is_there } } });
            context.desk.patch_status::<EngineImage>(&image.name_any(), patch).await?;
        }
    }
    Ok(Outcome::Done)
}

/// The images whose programs are on a node, by node.
pub(super) fn by_node(cache: &Local) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for image in cache.engine_images.all() {
        let map = image.status.iter().flat_map(|s| &s.node_deployment_map);
        for (node, _) in map.filter(|(_, there)| **there) {
            found.entry(node.clone()).or_default().insert(image.spec.image.clone());
        }
    }
    found
}

/// What a process runs, of an engine or a replica with these images.
pub(super) async fn of_process(
    context: &Context,
    images: Images<'_>,
    process: Option<&ProcessView>,
) -> Programs {
    let target = target(images);
    let runs = process.map(|p| p.binary.as_str()).unwrap_or_default();
    Programs {
        // One that was started without a program of its own is what it was last known to be.
        runs_target: match runs {
            "" => images.current.is_empty() || target == images.current,
            runs => context.agent.program(target).as_os_str() == runs,
        },
        installed: context.agent.has_program(target).await,
    }
}

/// What the leader says of an image: on which of these nodes it is, and how many volumes use it.
pub(super) fn judge(
    image: &EngineImage,
    context: &Context,
    up: &BTreeSet<String>,
    nodes: &BTreeSet<String>,
    uses: usize,
) -> EngineImageStatus {
    let old = image.status.clone().unwrap_or_default();
    let is_known = |(node, _): &(&String, &bool)| nodes.contains(*node);
    let map: BTreeMap<String, bool> =
        old.node_deployment_map.iter().filter(is_known).map(|(node, there)| (node.clone(), *there)).collect();
    let everywhere = up.iter().all(|node| map.get(node).copied().unwrap_or_default());
    EngineImageStatus {
        owner_id: context.options.node.clone(),
        state: if everywhere { DEPLOYED } else { "deploying" }.to_owned(),
        version: if image.spec.image == context.options.image {
            env!("CARGO_PKG_VERSION").to_owned()
        } else {
            old.version.clone()
        },
        ref_count: i64::try_from(uses).unwrap_or(i64::MAX),
        no_ref_since: match (uses, old.no_ref_since.is_empty()) {
            (0, true) => written(context.desk.now()),
            (0, false) => old.no_ref_since.clone(),
            _ => String::new(),
        },
        node_deployment_map: map,
        ..old
    }
}
