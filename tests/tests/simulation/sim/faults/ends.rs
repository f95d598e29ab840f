//! Runs in which the engine is told to end now and then, and is started again when it has: before what is in doubt is equal, while
//! replicas are closed one after the other, and when some of them are. And in which disks refuse what replicas record.

use super::{Dice, Fault, MS, SECOND};

pub(super) fn ends(dice: &mut Dice, nodes: usize, length: u64, plan: &mut Vec<(u64, Fault)>) {
    for _ in 0..dice.between(1, 4) {
        let at = dice.below(length);
        plan.push((at, Fault::End));
        if dice.chance(500) {
            let before = if dice.chance(500) { SECOND } else { 50 * MS };
            plan.push((at.saturating_sub(dice.below(before)), loss(dice, nodes)));
        }
        if dice.chance(500) {
            let within = if dice.chance(700) { 5 * MS } else { 200 * MS };
            plan.push((at + dice.below(within), loss(dice, nodes)));
        }
    }
    for _ in 0..dice.below(4) {
        let (node, time) = (some(dice, nodes), dice.between(5 * MS, 400 * MS));
        plan.push((dice.below(length), Fault::Records(node, time)));
    }
}

/// Somebody is lost, and what it held with it.
fn loss(dice: &mut Dice, nodes: usize) -> Fault {
    let node = some(dice, nodes);
    match dice.below(10) {
        0..2 => Fault::KillEngine,
        2..4 => Fault::KillReplica(node),
        4..6 => Fault::PowerCut(node),
        6 => Fault::HostLost(node),
        7 => Fault::PowerCutOthers(node),
        8 => Fault::KillReplicas,
        _ => Fault::Records(node, dice.between(MS, 100 * MS)),
    }
}

fn some(dice: &mut Dice, nodes: usize) -> usize {
    usize::try_from(dice.below(nodes as u64)).unwrap_or(0)
}
