//! How snapshots stand on each other, drawn.

use lh_block::format_size;

use super::snapshot::SnapshotView;

/// Deepest part of a chain that is drawn indented: beyond it lines would not fit the screen.
const DEPTH_MAX: usize = 20;

/// The snapshots as a tree, oldest first. A snapshot with one successor has it below itself at the same depth: a chain is
/// a column, and only branches are indented.
pub(super) fn drawn(snapshots: &[SnapshotView]) -> String {
    let mut text = String::new();
    let mut rest: Vec<(&SnapshotView, usize)> =
        snapshots.iter().filter(|s| s.parent.is_empty()).rev().map(|s| (s, 0)).collect();
    while let Some((snapshot, depth)) = rest.pop() {
        text.push_str(&line(snapshot, depth));
        let above: Vec<&SnapshotView> = snapshots.iter().filter(|s| s.parent == snapshot.name).collect();
        let deeper = if above.len() > 1 { (depth + 1).min(DEPTH_MAX) } else { depth };
        rest.extend(above.into_iter().rev().map(|s| (s, deeper)));
    }
    text
}

fn line(snapshot: &SnapshotView, depth: usize) -> String {
    let branch = if depth == 0 { String::new() } else { "  ".repeat(depth - 1) + "+-" };
    let removed = if snapshot.removed { "  (removed)" } else { "" };
    let labels: String = snapshot.labels.iter().map(|(key, value)| format!("  {key}={value}")).collect();
    let size = format_size(snapshot.size);
    format!("{branch}{}  {}  {size}{removed}{labels}\n", snapshot.name, snapshot.created)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_a_column_and_a_branch_is_indented() {
        let snapshot = |name: &str, parent: &str, removed| SnapshotView {
            name: name.into(),
            parent: parent.into(),
            children: Vec::new(),
            created: "2026-01-01T00:00:00Z".into(),
            size: 4096,
            removed,
            user_created: true,
            labels: std::collections::BTreeMap::new(),
        };
        let snapshots = [
            snapshot("a", "", false),
            snapshot("b", "a", true),
            snapshot("c", "b", false),
            snapshot("d", "b", false),
            snapshot("e", "d", false),
        ];
        let text = drawn(&snapshots);
        let names: Vec<&str> = text.lines().map(|l| l.split("  2026").next().unwrap()).collect();
        assert_eq!(names, ["a", "b", "+-c", "+-d", "+-e"]);
        assert!(text.lines().nth(1).unwrap().ends_with("(removed)"));
    }
}
