//! Which replica goes when there is one too many, and whether moving one would spread them better.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::fit::obstacle;
use super::{Cluster, Locality, Placement, Resident, Want, place};

/// The replica that a volume misses least: a failed one, one that leaves, one that holds not everything, one that its
/// tags forbid; then one that is where its anti-affinity forbids it, or a move away from there would never end; then the one
/// whose zone, node and disk have the most. The last healthy one is never chosen, nor the one on the node that the volume's
/// locality asks for while another will do. `None`: none may go.
pub fn choose_removal<'a>(cluster: &Cluster, want: &Want, residents: &'a [Resident]) -> Option<&'a Resident> {
    let healthy = residents.iter().filter(|r| r.healthy && !r.failed).count();
    let may_go = |r: &&Resident| !r.healthy || r.failed || healthy > 1;
    residents.iter().filter(may_go).max_by_key(|r| {
        let others = || residents.iter().filter(|o| o.name != r.name && !o.failed);
        let sound = |o: &&Resident| o.healthy && !o.leaving;
        let is_local = match &want.locality {
            Locality::Prefer(node) | Locality::Only(node) => {
                r.node == *node && !others().filter(sound).any(|o| o.node == *node)
            }
            Locality::Anywhere => false,
        };
        let zone = cluster.zone(&r.node);
        let in_zone = others().filter(|o| cluster.zone(&o.node) == zone).count();
        let on_node = others().filter(|o| o.node == r.node).count();
        let on_disk = others().filter(|o| o.node == r.node && o.disk == r.disk).count();
        let unfit = r.failed || r.leaving || !r.healthy;
        let rank = (r.failed, r.leaving, !r.healthy, lacks_tags(cluster, want, r));
        let is_too_near = !want.node_soft && on_node > 0 || !want.zone_soft && in_zone > 0;
        (unfit, rank, !is_local, is_too_near, in_zone, on_node, on_disk, Reverse(r.name.as_str()))
    })
}

/// Where two replicas are in one place that the volume's anti-affinity keeps apart, for people; `None`: no two are.
pub fn broken_anti_affinity(cluster: &Cluster, want: &Want, residents: &[Resident]) -> Option<String> {
    let twice = |place: fn(&Cluster, &Resident) -> String| {
        let mut places: Vec<String> = residents.iter().map(|r| place(cluster, r)).collect();
        places.sort();
        places.windows(2).find(|two| two[0] == two[1]).map(|two| two[0].clone())
    };
    let on_node = || twice(|_, r| r.node.clone()).map(|node| format!("two are on node {node}"));
    let in_zone = || twice(|c, r| c.zone(&r.node).to_owned()).map(|zone| format!("two are in zone {zone}"));
    let nodes = if want.node_soft { None } else { on_node() };
    nodes.or_else(|| if want.zone_soft { None } else { in_zone() })
}

/// True if the replica is where the volume's selectors would not put it.
fn lacks_tags(cluster: &Cluster, want: &Want, r: &Resident) -> bool {
    let Some(node) = cluster.nodes.get(&r.node) else { return true };
    let node_fits = want.node_selector.is_subset(&node.tags);
    let disk_fits = node.disks.get(&r.disk).is_some_and(|d| want.disk_selector.is_subset(&d.tags));
    !node_fits || !disk_fits
}

/// How unevenly replicas lie: replicas beyond the first in a zone, then beyond the first on a node, summed as squares
/// so that 2+2 is better than 3+1.
fn unevenness<'a>(
    cluster: &Cluster,
    places: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> (usize, usize, usize) {
    let mut zones: BTreeMap<&str, usize> = BTreeMap::new();
    let mut nodes: BTreeMap<&str, usize> = BTreeMap::new();
    let mut disks: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (node, disk) in places {
        *zones.entry(cluster.zone(node)).or_default() += 1;
        *nodes.entry(node).or_default() += 1;
        *disks.entry((node, disk)).or_default() += 1;
    }
    let squares = |counts: &mut dyn Iterator<Item = usize>| counts.map(|n| n * n).sum::<usize>();
    (
        squares(&mut zones.values().copied()),
        squares(&mut nodes.values().copied()),
        squares(&mut disks.values().copied()),
    )
}

/// Where a new replica would let another one go and leave the volume's replicas more evenly spread over zones, then
/// nodes, then (where `even` is set) disks; `None`: they lie as evenly as they can, or the volume is not in a state to
/// move anything. Without `even` nothing is moved once two replicas are in different zones and on different nodes.
pub fn balance(cluster: &Cluster, want: &Want, residents: &[Resident], even: bool) -> Option<Placement> {
    if residents.len() < 2 || residents.iter().any(|r| r.failed || r.leaving || !r.healthy) {
        return None;
    }
    let now = unevenness(cluster, residents.iter().map(|r| (r.node.as_str(), r.disk.as_str())));
    if !even && is_spread(cluster, residents) {
        return None;
    }
    let kept_local = |r: &&Resident| match &want.locality {
        Locality::Prefer(node) | Locality::Only(node) => {
            r.node != *node || residents.iter().any(|o| o.name != r.name && o.node == *node)
        }
        Locality::Anywhere => true,
    };
    let moves = residents.iter().filter(kept_local).filter_map(|leaver| {
        let rest: Vec<Resident> = residents.iter().filter(|r| r.name != leaver.name).cloned().collect();
        let to = place(cluster, want, &rest).ok()?;
        // Both are there while the new one is filled: the hard rules must hold with the old one, too, or it must be
        // allowed to leave from there.
        let node = cluster.nodes.get(&to.node)?;
        let disk = node.disks.get(&to.disk)?;
        if obstacle(cluster, want, residents, (&to.node, node), (&to.disk, disk)).is_some() {
            return None;
        }
        let places = rest.iter().map(|r| (r.node.as_str(), r.disk.as_str()));
        let then = unevenness(cluster, places.chain([(to.node.as_str(), to.disk.as_str())]));
        let gains = if even { then < now } else { (then.0, then.1) < (now.0, now.1) };
        gains.then_some((then, to))
    });
    moves.min().map(|(_, to)| to)
}

/// True if replicas are in more than one zone where there is more than one, and on more than one node.
fn is_spread(cluster: &Cluster, residents: &[Resident]) -> bool {
    let count = |keys: &mut dyn Iterator<Item = &str>| keys.collect::<std::collections::BTreeSet<_>>().len();
    let zones = count(&mut residents.iter().map(|r| cluster.zone(&r.node)));
    let nodes = count(&mut residents.iter().map(|r| r.node.as_str()));
    let all_zones = count(&mut cluster.nodes.values().map(|n| n.zone.as_str()));
    nodes > 1 && (zones > 1 || all_zones < 2)
}
