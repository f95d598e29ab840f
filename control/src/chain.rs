//! A replica's chain of layers, and how it goes over the wire: by Longhorn's messages, in which snapshots have file names, and by
//! those of this project.

use std::collections::{BTreeMap, HashMap};

use crate::proto::{ptypes, volume};

/// One layer of a replica's chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layer {
    /// The snapshot's name; empty for the head.
    pub name: String,
    /// The snapshot below; empty for the lowest layer.
    pub parent: String,
    /// Marked for removal.
    pub removed: bool,
    /// Asked for by a user.
    pub user_created: bool,
    /// RFC 3339.
    pub created: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Bytes that the layer takes on its disk.
    pub allocated: u64,
}

/// Longhorn's name of the head among snapshots, and the beginning of its file's name.
pub const HEAD: &str = "volume-head";

/// Longhorn's file name of a snapshot; the head's has a number that is the replica's own affair, and stands for any.
pub(crate) fn file_name(layer: &str) -> String {
    if layer.is_empty() { format!("{HEAD}-000.img") } else { format!("volume-snap-{layer}.img") }
}

/// The snapshot's name in one of Longhorn's file names; `None` for a head.
fn snapshot_name(file: &str) -> Option<&str> {
    file.strip_prefix("volume-snap-")?.strip_suffix(".img")
}

pub(crate) fn disk(layer: &Layer, chain: &[Layer]) -> ptypes::DiskInfo {
    let name = file_name(&layer.name);
    let children = chain.iter().filter(|c| !layer.name.is_empty() && c.parent == layer.name);
    ptypes::DiskInfo {
        parent: if layer.parent.is_empty() { String::new() } else { file_name(&layer.parent) },
        children: children.map(|c| (file_name(&c.name), true)).collect(),
        removed: layer.removed,
        user_created: layer.user_created,
        created: layer.created.clone(),
        size: layer.allocated.to_string(),
        labels: layer.labels.clone().into_iter().collect::<HashMap<_, _>>(),
        name,
    }
}

/// Longhorn's `chain`: file names from the head down to the base. Other branches are in `disks` alone.
pub(crate) fn heads_chain(layers: &[Layer]) -> Vec<String> {
    let mut files = Vec::new();
    let mut at = layers.last();
    while let Some(layer) = at.filter(|_| files.len() < layers.len()) {
        files.push(file_name(&layer.name));
        at = layers.iter().find(|l| !l.name.is_empty() && l.name == layer.parent);
    }
    files
}

/// All layers in an answer to `ReplicaGet`: parents before children, those of one parent by the time they were made, the
/// head last.
pub fn layers_of(replica: &ptypes::Replica) -> Vec<Layer> {
    let mut rest: Vec<&ptypes::DiskInfo> = replica.disks.values().collect();
    rest.sort_by(|a, b| (&a.created, &a.name).cmp(&(&b.created, &b.name)));
    let (heads, mut rest): (Vec<_>, Vec<_>) =
        rest.into_iter().partition(|disk| snapshot_name(&disk.name).is_none());
    let mut order: Vec<&ptypes::DiskInfo> = Vec::new();
    loop {
        let is_next = |disk: &&ptypes::DiskInfo| {
            disk.parent.is_empty() || order.iter().any(|below| below.name == disk.parent)
        };
        let Some(next) = rest.iter().position(is_next) else { break };
        order.push(rest.remove(next));
    }
    order.extend(heads);
    order
        .into_iter()
        .map(|disk| Layer {
            name: snapshot_name(&disk.name).unwrap_or_default().to_owned(),
            parent: snapshot_name(&disk.parent).unwrap_or_default().to_owned(),
            removed: disk.removed,
            user_created: disk.user_created,
            created: disk.created.clone(),
            labels: disk.labels.clone().into_iter().collect(),
            allocated: disk.size.parse().unwrap_or_default(),
        })
        .collect()
}

impl From<Layer> for volume::Layer {
    fn from(of: Layer) -> Self {
        let Layer { name, parent, removed, user_created, created, labels, allocated } = of;
        Self { name, parent, removed, user_created, created, labels: labels.into_iter().collect(), allocated }
    }
}

impl From<volume::Layer> for Layer {
    fn from(of: volume::Layer) -> Self {
        let volume::Layer { name, parent, removed, user_created, created, labels, allocated } = of;
        Self { name, parent, removed, user_created, created, labels: labels.into_iter().collect(), allocated }
    }
}
