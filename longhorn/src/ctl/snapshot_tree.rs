//! How snapshots stand on each other, drawn.

use lh_block::format_size;

use super::snapshot_view::SnapshotView;

/// Deepest part of a chain that is drawn indented: beyond it lines would not fit the screen.
const DEPTH_MAX: usize = 20;

/// What stands in a line.
#[derive(Clone, Copy)]
enum Node<'a> {
    Snapshot(&'a SnapshotView),
    /// The volume as it is now.
    Head,
}

/// The snapshots as a tree, oldest first, with the head where it stands, on the snapshot of that name. What stands on a snapshot
/// alone is below it at the same depth: a chain is a column. Several are branches, each from `+-` on.
pub(super) fn drawn(snapshots: &[SnapshotView], head: Option<&str>) -> String {
    let mut text = String::new();
    let above = |name: &str| {
        let found = snapshots.iter().filter(|s| s.parent == name).map(Node::Snapshot);
        found.chain((head == Some(name)).then_some(Node::Head)).collect::<Vec<_>>()
    };
    // The last is the next to be drawn.
    let mut rest: Vec<(Node<'_>, String, usize)> =
        above("").into_iter().rev().map(|node| (node, String::new(), 0)).collect();
    while let Some((node, indent, depth)) = rest.pop() {
        text.push_str(&format!("{indent}{}\n", line(node)));
        let Node::Snapshot(snapshot) = node else { continue };
        let above = above(&snapshot.name);
        let is_branch = above.len() > 1;
        let deeper = if is_branch { (depth + 1).min(DEPTH_MAX) } else { depth };
        let indent = match deeper.checked_sub(1) {
            None => String::new(),
            Some(columns) => "  ".repeat(columns) + if is_branch { "+-" } else { "| " },
        };
        rest.extend(above.into_iter().rev().map(|node| (node, indent.clone(), deeper)));
    }
    text
}

fn line(node: Node<'_>) -> String {
    let Node::Snapshot(snapshot) = node else { return "(the volume now)".to_owned() };
    let removed = if snapshot.removed { "  (removed)" } else { "" };
    let labels: String = snapshot.labels.iter().map(|(key, value)| format!("  {key}={value}")).collect();
    let size = format_size(snapshot.size);
    format!("{}  {}  {size}{removed}{labels}", snapshot.name, snapshot.created)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(name: &str, parent: &str, removed: bool) -> SnapshotView {
        SnapshotView {
            name: name.into(),
            parent: parent.into(),
            children: Vec::new(),
            created: "2026-01-01T00:00:00Z".into(),
            size: 4096,
            removed,
            user_created: true,
            labels: std::collections::BTreeMap::new(),
            below_head: false,
        }
    }

    #[test]
    fn a_chain_is_a_column_and_a_branch_is_indented() {
        let snapshots = [
            snapshot("a", "", false),
            snapshot("b", "a", true),
            snapshot("c", "b", false),
            snapshot("d", "b", false),
            snapshot("e", "d", false),
            snapshot("f", "c", false),
        ];
        let text = drawn(&snapshots, Some("e"));
        let names: Vec<&str> = text.lines().map(|l| l.split("  2026").next().unwrap()).collect();
        assert_eq!(names, ["a", "b", "+-c", "| f", "+-d", "| e", "| (the volume now)"]);
        assert!(text.lines().nth(1).unwrap().ends_with("(removed)"));
    }

    #[test]
    fn the_head_is_a_branch_after_a_revert_and_alone_without_snapshots() {
        let snapshots = [snapshot("a", "", false), snapshot("b", "a", false)];
        let text = drawn(&snapshots, Some("a"));
        let names: Vec<&str> = text.lines().map(|l| l.split("  2026").next().unwrap()).collect();
        assert_eq!(names, ["a", "+-b", "+-(the volume now)"]);
        assert_eq!(drawn(&[], Some("")), "(the volume now)\n");
        assert_eq!(drawn(&[], None), "");
    }
}
