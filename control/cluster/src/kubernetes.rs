//! What Kubernetes itself has of this driver's volumes: its PersistentVolumes, and the nodes that it has them attached to.
//!
//! A cluster may have tens of thousands of either. One attachment is asked for by its name; where all have to be looked at they come
//! page by page, and no more than a page of them is ever in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;

use crate::api::DRIVER;

/// Objects of a page: as many as kubectl asks for at once.
const PAGE: u32 = 500;

/// Shows every object of a kind, as all of them were when the first page was read.
///
/// # Errors
/// What the API server says. It keeps the old state of objects for minutes only: whoever takes longer begins anew.
pub async fn each<K>(api: &Api<K>, mut see: impl FnMut(K)) -> kube::Result<()>
where
    K: Clone + DeserializeOwned + Debug,
{
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = api.list(&params).await?;
        page.items.into_iter().for_each(&mut see);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(()),
        }
    }
}

/// The volume of one of this driver's PersistentVolumes; `None`: it is another driver's.
pub fn handle_of(volume: &PersistentVolume) -> Option<&str> {
    let csi = volume.spec.as_ref()?.csi.as_ref().filter(|csi| csi.driver == DRIVER)?;
    Some(&csi.volume_handle)
}

/// Every PersistentVolume of a volume: more than one where people made some by hand.
///
/// # Errors
/// What the API server says.
pub async fn persistent_volumes(client: &Client, handle: &str) -> kube::Result<Vec<PersistentVolume>> {
    let mut of_volume = Vec::new();
    let see = |volume: PersistentVolume| {
        if handle_of(&volume) == Some(handle) {
            of_volume.push(volume);
        }
    };
    each(&Api::all(client.clone()), see).await?;
    Ok(of_volume)
}

/// Those of some nodes that Kubernetes has a volume attached to, or is about to; `None`: it has no such volume. Each node comes with
/// the name that Kubernetes' own controller gives the attachment there, which is what the ticket of this driver is called: the one that
/// has it is found by it. Only where there is none of that name all are looked at, for whoever attached the volume under another one.
///
/// # Errors
/// What the API server says.
pub async fn attached_to(
    client: &Client,
    handle: &str,
    nodes: &BTreeMap<&str, &str>,
) -> kube::Result<Option<BTreeSet<String>>> {
    let attachments: Api<VolumeAttachment> = Api::all(client.clone());
    let mut found = BTreeSet::new();
    for (node, name) in nodes {
        let is_it = |a: &VolumeAttachment| a.spec.attacher == DRIVER && a.spec.node_name == *node;
        if attachments.get_opt(name).await?.as_ref().is_some_and(is_it) {
            found.insert((*node).to_owned());
        }
    }
    if found.len() == nodes.len() {
        return Ok(Some(found));
    }
    let volumes = persistent_volumes(client, handle).await?;
    if volumes.is_empty() {
        return Ok(None);
    }
    let names: BTreeSet<String> = volumes.iter().map(ResourceExt::name_any).collect();
    let see = |one: VolumeAttachment| {
        let volume = one.spec.source.persistent_volume_name.as_ref();
        let is_its = one.spec.attacher == DRIVER && volume.is_some_and(|name| names.contains(name));
        if is_its && nodes.contains_key(one.spec.node_name.as_str()) {
            found.insert(one.spec.node_name);
        }
    };
    each(&attachments, see).await?;
    Ok(Some(found))
}

/// True if a resource may have that name (an RFC 1123 subdomain).
pub fn may_be_a_name(name: &str) -> bool {
    let end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_label = |label: &str| {
        label.starts_with(end) && label.ends_with(end) && label.chars().all(|c| end(c) || c == '-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// True if a label may have that value.
pub fn may_be_a_label(value: &str) -> bool {
    let end = |c: char| c.is_ascii_alphanumeric();
    let inner = |c: char| end(c) || matches!(c, '-' | '_' | '.');
    let has_ends = value.is_empty() || value.starts_with(end) && value.ends_with(end);
    value.len() <= 63 && has_ends && value.chars().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_a_label_is_none() {
        for value in ["", "pvc-1", "A_b.c", "0", &"x".repeat(63)] {
            assert!(may_be_a_label(value), "{value:?}");
        }
        for value in ["-a", "a-", "a b", "a=b", "a/b", "ä", &"x".repeat(64)] {
            assert!(!may_be_a_label(value), "{value:?}");
        }
    }

    #[test]
    fn what_could_not_be_a_name_is_never_part_of_a_path() {
        for name in ["pvc-1", "a.b", "0"] {
            assert!(may_be_a_name(name), "{name:?}");
        }
        let long = "a".repeat(254);
        for name in ["", ".", "..", "a..b", "-a", "a-", "a/b", "A", "a b", "ä", "a.", long.as_str()] {
            assert!(!may_be_a_name(name), "{name:?}");
        }
    }
}
