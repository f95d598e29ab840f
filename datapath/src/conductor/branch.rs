//! What of a volume's snapshots the head stands on: others are what reverts have left.

use lh_wire::LayerInfo;

/// Places of the layers that the head stands on, base first, the head last.
pub(super) fn branch(chain: &[LayerInfo]) -> Vec<usize> {
    let Some(head) = chain.len().checked_sub(1) else { return Vec::new() };
    let mut places = vec![head];
    // A chain that goes in a circle is none; it ends here after all its layers.
    while places.len() <= chain.len() {
        let parent = &chain[places[places.len() - 1]].parent;
        match chain.iter().position(|l| !parent.is_empty() && l.name == *parent) {
            Some(at) => places.push(at),
            None => break,
        }
    }
    places.reverse();
    places
}
