//! A snapshot as it is shown.

use std::collections::BTreeMap;

use control::chain::Layer;
use serde::Serialize;

/// A snapshot, as `snapshot ls -o json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SnapshotView {
    /// Its name.
    pub name: String,
    /// The snapshot below; empty for the lowest.
    pub parent: String,
    /// The snapshots above.
    pub children: Vec<String>,
    /// RFC 3339.
    pub created: String,
    /// Bytes that its layer takes on its disk.
    pub size: u64,
    /// Marked for removal.
    pub removed: bool,
    /// Asked for by a user.
    pub user_created: bool,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The volume as it is now stands on it.
    pub below_head: bool,
}

/// The snapshots of a chain, oldest first.
pub(super) fn views(chain: &[Layer]) -> Vec<SnapshotView> {
    let snapshots = chain.iter().filter(|layer| !layer.name.is_empty());
    let above = |name: &str| {
        let children = chain.iter().filter(|layer| layer.parent == name && !layer.name.is_empty());
        children.map(|layer| layer.name.clone()).collect()
    };
    let head = chain.iter().find(|layer| layer.name.is_empty());
    let view = |layer: &Layer| SnapshotView {
        below_head: head.is_some_and(|head| head.parent == layer.name),
        name: layer.name.clone(),
        parent: layer.parent.clone(),
        children: above(&layer.name),
        created: layer.created.clone(),
        size: layer.allocated,
        removed: layer.removed,
        user_created: layer.user_created,
        labels: layer.labels.clone(),
    };
    let mut views: Vec<SnapshotView> = snapshots.map(view).collect();
    // After a revert the chain has those that it stands on first, whenever they were taken.
    views.sort_by(|a, b| a.created.cmp(&b.created));
    views
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_revert_the_oldest_is_still_the_first() {
        let layer = |name: &str, parent: &str, second: u32| Layer {
            name: name.into(),
            parent: parent.into(),
            created: format!("2026-11-23T10:50:{second:02}Z"),
            ..Layer::default()
        };
        let views = views(&[layer("a", "", 1), layer("d", "a", 4), layer("b", "a", 2), layer("c", "b", 2)]);
        assert_eq!(views.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    }

    #[test]
    fn the_head_is_no_snapshot_and_children_are_named() {
        let layer =
            |name: &str, parent: &str| Layer { name: name.into(), parent: parent.into(), ..Layer::default() };
        let views = views(&[layer("a", ""), layer("b", "a"), layer("", "b")]);
        assert_eq!(views.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(views[0].children, ["b"]);
        assert!(views[1].children.is_empty());
        assert_eq!(views.iter().map(|v| v.below_head).collect::<Vec<_>>(), [false, true]);
    }
}
