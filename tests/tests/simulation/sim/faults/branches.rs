//! Runs in which reverts leave branches of snapshots, which are removed, too. Replicas that are opened anew, or filled, tell them in
//! another order than those who have made them; the engine is asked for its chain all the while, and asks one of them.

use super::{Dice, Fault, MS, SECOND};

/// How long such a run lasts, ns.
pub(crate) const BRANCHES: u64 = 8 * SECOND;

pub(super) fn branches(dice: &mut Dice, nodes: usize) -> Vec<(u64, Fault)> {
    let mut plan = Vec::new();
    let mut at = 0;
    for _ in 0..dice.between(2, 5) {
        for _ in 0..dice.between(1, 3) {
            at += dice.between(50 * MS, 300 * MS);
            plan.push((at, Fault::Snapshot));
        }
        at += dice.between(50 * MS, 300 * MS);
        plan.push((at, Fault::Revert));
        for (chance, fault) in [(700, Fault::Snapshot), (400, Fault::Remove), (200, Fault::Scrub)] {
            if dice.chance(chance) {
                at += dice.between(MS, 200 * MS);
                plan.push((at, fault));
            }
        }
        at += dice.below(400 * MS);
        disturb(dice, nodes, at, &mut plan);
        at += dice.between(100 * MS, SECOND);
    }
    for _ in 0..dice.between(5, 40) {
        plan.push((dice.below(BRANCHES), Fault::Look));
    }
    plan.sort_by_key(|(at, _)| *at);
    plan
}

/// Somebody is opened anew, or filled.
fn disturb(dice: &mut Dice, nodes: usize, at: u64, plan: &mut Vec<(u64, Fault)>) {
    let node = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
    let fault = match dice.below(12) {
        0..2 => Fault::KillReplicas,
        2 => Fault::KillReplica(node),
        3 => Fault::KillEngine,
        4 => Fault::HostLost(node),
        5 => Fault::PowerCutOthers(node),
        6 => Fault::Rebuild(node),
        7 => Fault::Exchange(node, dice.chance(500)),
        // Two come back one soon after the other: the first may be a member before the second is filled.
        _ => {
            let time = dice.between(200 * MS, 1500 * MS);
            let later = time + dice.below(300 * MS);
            plan.push((at + dice.below(MS), Fault::Away((node + 1) % nodes, later)));
            Fault::Away(node, time)
        }
    };
    plan.push((at, fault));
}
