//! Which volumes change to their managers' image without being asked: the setting
//! concurrent-automatic-engine-upgrade-per-node-limit.

use std::collections::BTreeMap;

use crate::api::{Conditions, Robustness, Volume, VolumeState};
use crate::plan::upgrade::{NOT_DEPLOYED, UPGRADED};

/// The volumes, and what they are to be of.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// All volumes.
    pub volumes: &'a [&'a Volume],
    /// The managers' image, which is on every node.
    pub image: &'a str,
    /// How many volumes of a node change at once; 0: none does.
    pub limit: usize,
}

/// The volumes whose spec is to name the managers' image now, in the order of their names. One that rests only has to be told;
/// of those that are attached only healthy ones change. One that failed to keeps its place among those that change: an image
/// that does not serve is not tried on all volumes.
pub fn plan(o: &Observed<'_>) -> Vec<String> {
    if o.limit == 0 {
        return Vec::new();
    }
    let mut busy: BTreeMap<&str, usize> = BTreeMap::new();
    let mut waiting = Vec::new();
    for volume in o.volumes {
        let Some(status) = &volume.status else { continue };
        let (asked, name) = (volume.spec.image.as_str(), volume.metadata.name.as_deref().unwrap_or_default());
        let runs = if asked.is_empty() { status.current_image.as_str() } else { asked };
        let node = status.current_node_id.as_str();
        let is_there = status.conditions.get_condition(UPGRADED).is_none_or(|c| c.reason != NOT_DEPLOYED);
        match status.state {
            VolumeState::Attached if !asked.is_empty() && asked != status.current_image && is_there => {
                *busy.entry(node).or_default() += 1;
            }
            VolumeState::Attached if runs == o.image || status.robustness != Robustness::Healthy => {}
            // What moves does so as it is.
            VolumeState::Attached if !volume.spec.migration_node_id.is_empty() => {}
            VolumeState::Attached => waiting.push((name, Some(node))),
            // One that names none follows by itself when it is attached.
            VolumeState::Detached if !asked.is_empty() && asked != o.image => waiting.push((name, None)),
            _ => {}
        }
    }
    waiting.sort_unstable();
    let chosen = waiting.into_iter().filter(|(_, node)| {
        let Some(node) = node else { return true };
        let count = busy.entry(node).or_default();
        *count += 1;
        *count <= o.limit
    });
    chosen.map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{VolumeSpec, VolumeStatus};

    /// `"a@n1 b@n2=old/new c@n1! d=old"`: volumes on nodes, running `old` unless told otherwise; `=`: what the spec names, and
    /// what runs; `!`: degraded; `?`: what it names is on no node; without a node: detached.
    fn volumes(text: &str) -> Vec<Volume> {
        let one = |word: &str| {
            let plain = word.trim_end_matches(['!', '?']);
            let (place, images) = plain.split_once('=').unwrap_or((plain, ""));
            let (name, node) = place.split_once('@').unwrap_or((place, ""));
            let (asked, runs) = images.split_once('/').unwrap_or((images, "old"));
            let robustness = if word.ends_with('!') { Robustness::Degraded } else { Robustness::Healthy };
            let state = if node.is_empty() { VolumeState::Detached } else { VolumeState::Attached };
            let mut conditions = Vec::new();
            if word.ends_with('?') {
                conditions.set_condition(UPGRADED, false, NOT_DEPLOYED, "", "2026-01-01T00:00:00Z");
            }
            let mut volume = Volume::new(name, VolumeSpec { image: asked.into(), ..VolumeSpec::default() });
            volume.status = Some(VolumeStatus {
                state,
                robustness,
                current_node_id: node.into(),
                current_image: runs.into(),
                conditions,
                ..VolumeStatus::default()
            });
            volume
        };
        text.split_whitespace().map(one).collect()
    }

    #[test]
    fn so_many_of_a_node_change_at_once_and_no_more() {
        let cases: &[(&str, usize, &[&str])] = &[
            ("a@n1 b@n1 c@n2", 0, &[]),
            ("a@n1 b@n1 c@n2", 1, &["a", "c"]),
            ("a@n1 b@n1 c@n1", 2, &["a", "b"]),
            // One that changes, or failed to, counts.
            ("a@n1=new/old b@n1 c@n2", 1, &["c"]),
            ("a@n1=new/new b@n1=/new c@n1=old/old", 1, &["c"]),
            ("a@n1! b@n1", 1, &["b"]),
            // One that names what is nowhere runs with what was there.
            ("a@n1=theirs/new? b@n1", 1, &["a"]),
            // What rests is told at once, if it has to be told.
            ("a=old b= c=old d=new", 1, &["a", "c"]),
        ];
        for (there, limit, expected) in cases {
            let volumes = volumes(there);
            let volumes: Vec<&Volume> = volumes.iter().collect();
            let chosen = plan(&Observed { volumes: &volumes, image: "new", limit: *limit });
            assert_eq!(chosen, *expected, "{there}, {limit}");
        }
    }
}
