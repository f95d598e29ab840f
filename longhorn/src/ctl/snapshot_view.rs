//! A snapshot as it is shown.

use std::collections::{BTreeMap, HashMap};

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
    let since = not_before_what_is_below(chain);
    views.sort_by_key(|view| since.get(view.name.as_str()).copied());
    views
}

/// When each snapshot was taken, but not before the one that it stands on: a clock that was wrong may have been set back in between.
/// The chain has parents before children.
fn not_before_what_is_below(chain: &[Layer]) -> HashMap<&str, &str> {
    let mut since = HashMap::new();
    for layer in chain {
        let below = since.get(layer.parent.as_str()).copied().unwrap_or_default();
        since.insert(layer.name.as_str(), layer.created.as_str().max(below));
    }
    since
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
    fn a_clock_that_was_set_back_puts_no_snapshot_before_the_one_that_it_stands_on() {
        let layer = |name: &str, parent: &str, year: u32| Layer {
            name: name.into(),
            parent: parent.into(),
            created: format!("{year}-11-23T10:50:28Z"),
            ..Layer::default()
        };
        let chain =
            [layer("a", "", 2025), layer("b", "a", 2036), layer("c", "b", 2026), layer("", "c", 2026)];
        assert_eq!(views(&chain).iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
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
