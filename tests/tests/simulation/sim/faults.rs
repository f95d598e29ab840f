//! What goes wrong in a run, and when: chosen from the seed before the run begins.

mod branches;
mod ends;

use tests::dice::Dice;

pub(crate) use branches::BRANCHES;

/// One second of the simulation's clock, ns.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// A millisecond.
pub(crate) const MS: u64 = 1_000_000;

/// Something that goes wrong, or is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The engine is killed; its manager starts another.
    KillEngine,
    /// The engine is stopped for so long; its node is taken for dead, another engine starts elsewhere.
    FreezeEngine(u64),
    /// A replica's process is killed.
    KillReplica(usize),
    /// All replicas' processes are killed.
    KillReplicas,
    /// A replica's process is stopped for so long.
    StopReplica(usize, u64),
    /// A replica is stopped, and 20 ms later the engine killed.
    StopReplicaKillEngine(usize),
    /// A replica's disk is fifty times slower for so long.
    Slow(usize, u64),
    /// A replica's disk fails requests for so long.
    Errors(usize, u64),
    /// A replica's disk is full for so long.
    Full(usize, u64),
    /// All disks are full for so long.
    FullAll(u64),
    /// A replica's host loses power.
    PowerCut(usize),
    /// All replicas' hosts and the engine's lose power.
    PowerCutAll,
    /// Nothing passes between engine and replica for so long.
    Cut(usize, u64),
    /// The engine reaches only one replica for so long; its node is taken for dead, another engine starts elsewhere.
    Isolate(usize, u64),
    /// One connection breaks.
    Break(usize),
    /// A host with a replica and the engine on it loses power.
    HostLost(usize),
    /// All hosts but one lose power, the engine's too.
    PowerCutOthers(usize),
    /// A replica's process is killed and comes back only after so long.
    Away(usize, u64),
    /// A snapshot is taken.
    Snapshot,
    /// A snapshot is marked as removed.
    Remove,
    /// What is removed is folded away.
    Purge,
    /// The volume is reverted to a snapshot.
    Revert,
    /// The volume grows.
    Expand,
    /// A replica is brought in sync anew, whatever is known of it.
    Rebuild(usize),
    /// A replica is taken out of the volume, and then into it again; `true`: with an empty disk.
    Exchange(usize, bool),
    /// The volume is given one replica more.
    Add,
    /// Whoever gave it the second one notes that that is in sync.
    Note,
    /// Somebody looks at the chain.
    Look,
    /// Replicas are compared, and what is found is repaired: nothing is to be found but rot.
    Scrub,
    /// A snapshot's block on a replica's disk is another one from now on.
    Rot(usize),
    /// The engine is told to end, and started again when it has.
    End,
    /// What a replica records about itself fails for so long, and is there all the same now and then.
    Records(usize, u64),
}

impl Fault {
    /// For the count of how often each fired.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::KillEngine => "engine killed",
            Self::FreezeEngine(_) => "engine stopped and replaced",
            Self::KillReplica(_) => "replica killed",
            Self::KillReplicas => "all replicas killed",
            Self::StopReplica(..) => "replica stopped",
            Self::StopReplicaKillEngine(_) => "replica stopped, engine killed",
            Self::Slow(..) => "disk slow",
            Self::Errors(..) => "disk errors",
            Self::Full(..) => "disk full",
            Self::FullAll(_) => "all disks full",
            Self::PowerCut(_) => "power cut of a replica",
            Self::PowerCutAll => "power cut of all",
            Self::Cut(..) => "network cut",
            Self::Isolate(..) => "engine isolated and replaced",
            Self::Break(_) => "connection broken",
            Self::HostLost(_) => "power cut of a host with the engine",
            Self::PowerCutOthers(_) => "power cut of all but one",
            Self::Away(..) => "replica away",
            Self::Snapshot => "snapshot asked for",
            Self::Remove => "removal asked for",
            Self::Purge => "purge asked for",
            Self::Revert => "revert asked for",
            Self::Expand => "expansion asked for",
            Self::Rebuild(_) => "rebuild asked for",
            Self::Exchange(_, false) => "replica taken out and in",
            Self::Exchange(_, true) => "replica exchanged for an empty one",
            Self::Add => "replica added",
            Self::Note => "second replica looked at",
            Self::Look => "chain looked at",
            Self::Scrub => "scrub asked for",
            Self::Rot(_) => "rot asked for",
            Self::End => "engine told to end",
            Self::Records(..) => "records fail",
        }
    }

    /// It is an operation on the chain of layers, which goes wrong only through what else does.
    pub(crate) const fn changes_the_chain(self) -> bool {
        matches!(self, Self::Snapshot | Self::Remove | Self::Purge | Self::Revert | Self::Expand)
    }

    /// One of each kind, for the check that every kind has fired.
    pub(crate) const KINDS: [&'static str; 28] = [
        "engine killed",
        "engine stopped and replaced",
        "replica killed",
        "all replicas killed",
        "replica stopped",
        "replica stopped, engine killed",
        "disk slow",
        "disk errors",
        "disk full",
        "all disks full",
        "power cut of a replica",
        "power cut of all",
        "network cut",
        "connection broken",
        "engine isolated and replaced",
        "power cut of a host with the engine",
        "power cut of all but one",
        "replica away",
        "snapshot asked for",
        "removal asked for",
        "purge asked for",
        "revert asked for",
        "expansion asked for",
        "rebuild asked for",
        "replica taken out and in",
        "replica exchanged for an empty one",
        "scrub asked for",
        "rot asked for",
    ];
}

/// What kinds of faults a run has: with all of them in every run, the rarer states are never reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mix {
    /// All.
    All,
    /// No power cut: nothing that was answered may be lost.
    Powered,
    /// Never the power of two hosts at once.
    OneHost,
    /// Power cuts and dead processes.
    Power,
    /// Engines that come and go, and networks.
    Engines,
    /// Disks that are slow, full or failing, under a longer load.
    Disks,
    /// Replicas that are out for long, and what happens to the others meanwhile.
    Absences,
    /// Snapshots that are folded slowly, while one after the other of the hosts loses its power.
    Folds,
    /// Reverts, which leave branches, and then somebody is opened anew.
    Branches,
    /// Replicas that are taken out and in, beside everything else.
    Members,
    /// Blocks that rot, one by one, under reads that are compared with checksums.
    Rot,
    /// Clients that give up on a connection and send again on another one, beside everything else.
    Clients,
    /// After everything else a directory comes back whose replica was made anew without it, or an epoch that the authority had before.
    Older,
    /// After everything else a replica's directory is put back as it was some seconds before.
    Copies,
    /// A volume that begins with one replica and is given others, beside everything else.
    Grow,
    /// Snapshots that are folded slowly while a replica is filled, and another one is lost meanwhile.
    Fills,
    /// Engines that are told to end, and disks that refuse what replicas record, beside everything else.
    Ends,
    /// Two, four or five replicas.
    Many,
}

impl Mix {
    /// One of them.
    pub(crate) fn of(dice: &mut Dice) -> Self {
        match dice.below(100) {
            0..16 => Self::All,
            16..30 => Self::Powered,
            30..45 => Self::OneHost,
            45..58 => Self::Power,
            58..70 => Self::Engines,
            70..78 => Self::Disks,
            78..91 => Self::Absences,
            91..95 => Self::Folds,
            _ => Self::Members,
        }
    }

    /// By its name in lower case.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let all = [
            Self::All,
            Self::Powered,
            Self::OneHost,
            Self::Power,
            Self::Engines,
            Self::Disks,
            Self::Absences,
            Self::Folds,
            Self::Branches,
            Self::Members,
            Self::Rot,
            Self::Clients,
            Self::Older,
            Self::Copies,
            Self::Grow,
            Self::Fills,
            Self::Ends,
            Self::Many,
        ];
        all.into_iter().find(|mix| format!("{mix:?}").eq_ignore_ascii_case(name))
    }

    const fn has(self, fault: Fault) -> bool {
        use Fault::{
            Break, Cut, Errors, FreezeEngine, Full, FullAll, HostLost, Isolate, KillEngine, KillReplica,
            KillReplicas, PowerCut, PowerCutAll, PowerCutOthers, Slow, StopReplica, StopReplicaKillEngine,
        };
        if matches!(self, Self::Rot) {
            // What has no checksums is lost when it rots: what is folded, and what a process has found in doubt.
            return matches!(fault, KillEngine | StopReplica(..) | Cut(..) | Break(_) | Fault::Snapshot);
        }
        if fault.changes_the_chain() {
            return true;
        }
        match self {
            Self::All
            | Self::Absences
            | Self::Folds
            | Self::Branches
            | Self::Members
            | Self::Rot
            | Self::Clients
            | Self::Older
            | Self::Copies
            | Self::Grow
            | Self::Fills
            | Self::Ends
            | Self::Many => true,
            Self::Powered => !matches!(fault, PowerCut(_) | PowerCutAll | PowerCutOthers(_) | HostLost(_)),
            Self::OneHost => !matches!(fault, PowerCutAll | PowerCutOthers(_)),
            Self::Power => matches!(
                fault,
                PowerCut(_)
                    | PowerCutAll
                    | PowerCutOthers(_)
                    | HostLost(_)
                    | KillEngine
                    | KillReplica(_)
                    | KillReplicas
            ),
            Self::Engines => matches!(
                fault,
                KillEngine
                    | FreezeEngine(_)
                    | Isolate(..)
                    | StopReplicaKillEngine(_)
                    | Cut(..)
                    | StopReplica(..)
                    | HostLost(_)
            ),
            Self::Disks => {
                matches!(fault, Slow(..) | Errors(..) | Full(..) | FullAll(_) | StopReplica(..) | KillEngine)
            }
        }
    }

    /// The faults of a run that lasts `length` ns, over `nodes` replicas. Every other one is soon followed by another.
    pub(crate) fn plan(self, dice: &mut Dice, nodes: usize, length: u64) -> Vec<(u64, Fault)> {
        if self == Self::Absences {
            return absences(dice, nodes);
        }
        if self == Self::Folds {
            return folds(dice, nodes);
        }
        if self == Self::Fills {
            return fills(dice, nodes);
        }
        if self == Self::Branches {
            return branches::branches(dice, nodes);
        }
        if self == Self::Rot {
            return self.rots(dice, nodes);
        }
        let mut plan = Vec::new();
        for _ in 0..dice.between(1, 6) {
            let mut at = dice.below(length);
            plan.push((at, self.one(dice, nodes)));
            while dice.chance(500) {
                let soon = if dice.chance(500) { 20 * MS } else { 600 * MS };
                at += dice.below(soon);
                plan.push((at, self.one(dice, nodes)));
            }
        }
        if self == Self::Grow {
            // Noted soon, late, or never before the next one.
            plan.extend((0..dice.between(2, 6)).map(|_| (dice.below(length), Fault::Add)));
            plan.extend((0..dice.below(4)).map(|_| (dice.below(length), Fault::Note)));
        }
        if self == Self::Ends {
            ends::ends(dice, nodes, length, &mut plan);
        }
        plan.sort_by_key(|(at, _)| *at);
        plan
    }

    /// Snapshots are taken and scrubbed, which gives them checksums, then blocks of them rot, and are looked for.
    fn rots(self, dice: &mut Dice, nodes: usize) -> Vec<(u64, Fault)> {
        let mut plan = Vec::new();
        for _ in 0..dice.between(1, 4) {
            plan.push((dice.below(ROTS / 4), Fault::Snapshot));
        }
        plan.push((ROTS / 4 + dice.below(SECOND / 2), Fault::Scrub));
        for _ in 0..dice.between(1, 12) {
            let node = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
            plan.push((ROTS / 2 + dice.below(ROTS / 2), Fault::Rot(node)));
        }
        for _ in 0..dice.below(3) {
            plan.push((ROTS / 2 + dice.below(ROTS / 2), Fault::Scrub));
        }
        for _ in 0..dice.below(4) {
            plan.push((dice.below(ROTS), self.one(dice, nodes)));
        }
        plan.sort_by_key(|(at, _)| *at);
        plan
    }

    /// A fault at a moment when something has just changed: what was only just made safe, or not yet, goes wrong.
    pub(crate) fn aftershock(self, dice: &mut Dice, nodes: usize) -> (u64, Fault) {
        let soon = if dice.chance(500) { 2 * MS } else { 60 * MS };
        let after = dice.below(soon);
        let node = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
        let fault = match dice.below(100) {
            0..15 => Fault::PowerCutAll,
            15..30 => Fault::PowerCut(node),
            30..42 => Fault::HostLost(node),
            42..50 => Fault::PowerCutOthers(node),
            50..65 => Fault::KillEngine,
            65..72 => Fault::KillReplicas,
            _ => self.one(dice, nodes),
        };
        (after, if self.has(fault) { fault } else { self.one(dice, nodes) })
    }

    fn one(self, dice: &mut Dice, nodes: usize) -> Fault {
        if self == Self::Members && dice.chance(400) {
            return membership(dice, nodes);
        }
        loop {
            let fault = any(dice, nodes);
            if self.has(fault) {
                return fault;
            }
        }
    }
}

/// When the volume is scrubbed in a run that lasts `length` ns: in every fourth run, a few times.
///
/// These dice are not those of the run, which is the same with scrubs and without but for what they do.
pub(crate) fn scrubs(dice: &mut Dice, length: u64) -> Vec<u64> {
    if !dice.chance(250) {
        return Vec::new();
    }
    let mut at = dice.below(length);
    (0..dice.between(1, 5)).map(|_| std::mem::replace(&mut at, dice.below(length))).collect()
}

/// How long a run with absences lasts, ns.
pub(crate) const ABSENCES: u64 = 9 * SECOND;

/// How long a run with rot lasts, ns.
pub(crate) const ROTS: u64 = 12 * SECOND;

/// How long a run with slow folds lasts, ns.
pub(crate) const FOLDS: u64 = 6 * SECOND;

/// One replica is out for long; meanwhile something happens to those who keep what it misses.
fn absences(dice: &mut Dice, nodes: usize) -> Vec<(u64, Fault)> {
    let first = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
    let second = (first + 1 + usize::try_from(dice.below(2)).unwrap_or(0)) % nodes;
    let third = 3 - first - second;
    let left = dice.between(100 * MS, SECOND);
    let back = left + dice.between(2 * SECOND, 5 * SECOND);
    let mut plan = Vec::new();
    let gone = Fault::Away(first, back - left);
    if dice.chance(300) {
        plan.push((left.saturating_sub(dice.below(3 * MS)), Fault::PowerCut(first)));
    }
    if dice.chance(200) {
        // Its last writes may be on it alone.
        plan.push((left, Fault::StopReplicaKillEngine(second)));
    }
    plan.push((left, gone));
    let meanwhile = left + dice.between(300 * MS, 1500 * MS);
    match dice.below(6) {
        // Who is out for a short while has a gap, and is alone when the first returns.
        0 | 1 => {
            plan.push((meanwhile, Fault::Away(second, dice.between(50 * MS, 400 * MS))));
            let alone = back.saturating_sub(dice.between(MS, 900 * MS)).max(meanwhile + 1500 * MS);
            plan.push((alone, Fault::Away(third, dice.between(2 * SECOND, 4 * SECOND))));
        }
        // Those who remember it die.
        2 => plan.push((back.saturating_sub(dice.between(MS, SECOND)), Fault::KillReplicas)),
        3 => plan.push((back.saturating_sub(dice.between(MS, SECOND)), Fault::PowerCutOthers(first))),
        4 => plan.push((meanwhile, Fault::KillEngine)),
        _ => {}
    }
    for _ in 0..dice.below(3) {
        plan.push((left + dice.below(back - left), Fault::Snapshot));
    }
    for _ in 0..dice.below(4) {
        plan.push((dice.below(back + SECOND), chain_operation(dice)));
    }
    if dice.chance(300) {
        // It does not get far.
        plan.push((back + dice.between(MS, 2 * SECOND), any(dice, nodes)));
    }
    plan.sort_by_key(|(at, _)| *at);
    plan
}

/// Snapshots are taken and removed, and just after one was taken, before what it holds is settled, some host loses its
/// power, with the engine. What is removed is folded by whoever comes back ([`super::world::World`] asks for it then).
fn folds(dice: &mut Dice, nodes: usize) -> Vec<(u64, Fault)> {
    let mut plan = Vec::new();
    let mut at = 0;
    for _ in 0..dice.between(1, 4) {
        for _ in 0..dice.between(1, 3) {
            at += dice.between(50 * MS, 400 * MS);
            plan.push((at, Fault::Snapshot));
        }
        at += dice.between(50 * MS, 400 * MS);
        plan.push((at, Fault::Remove));
        at += dice.below(200 * MS);
        plan.push((at, Fault::Snapshot));
        let node = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
        let soon = if dice.chance(700) { 8 * MS } else { 200 * MS };
        at += dice.below(soon);
        plan.push((at, if dice.chance(800) { Fault::HostLost(node) } else { Fault::PowerCutOthers(node) }));
        at += dice.between(200 * MS, 2 * SECOND);
    }
    plan
}

/// Again and again a replica is out for a moment, with snapshots taken and removed, and as it is filled another one is lost, or the engine.
fn fills(dice: &mut Dice, nodes: usize) -> Vec<(u64, Fault)> {
    let mut plan = Vec::new();
    let mut at = 0;
    for _ in 0..3 {
        let first = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
        let second = (first + 1 + usize::try_from(dice.below(2)).unwrap_or(0)) % nodes;
        at += dice.between(100 * MS, 500 * MS);
        plan.push((at, Fault::Snapshot));
        let gone = dice.between(50 * MS, 700 * MS);
        plan.push((at + dice.below(300 * MS), Fault::Away(first, gone)));
        at += dice.between(100 * MS, 600 * MS);
        plan.push((at, Fault::Snapshot));
        plan.push((at + dice.below(300 * MS), Fault::Remove));
        at += gone;
        plan.push((at, Fault::Remove));
        at += dice.below(1200 * MS);
        plan.push((
            at,
            match dice.below(4) {
                0 => Fault::KillEngine,
                1 => Fault::PowerCut(second),
                2 => Fault::KillReplica(second),
                _ => Fault::HostLost(second),
            },
        ));
        at += dice.between(100 * MS, SECOND);
    }
    plan.sort_by_key(|(at, _)| *at);
    plan
}

/// A change of what the volume is configured with.
fn membership(dice: &mut Dice, nodes: usize) -> Fault {
    let node = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
    match dice.below(3) {
        0 => Fault::Rebuild(node),
        1 => Fault::Exchange(node, false),
        _ => Fault::Exchange(node, true),
    }
}

fn any(dice: &mut Dice, nodes: usize) -> Fault {
    let node = usize::try_from(dice.below(nodes as u64)).unwrap_or(0);
    let short = dice.between(5 * MS, 900 * MS);
    let long = dice.between(SECOND, 8 * SECOND);
    let time = if dice.chance(500) { short } else { long };
    match dice.below(112) {
        0..16 => Fault::KillEngine,
        16..21 => Fault::FreezeEngine(time),
        21..24 => Fault::Isolate(node, 4 * SECOND + long),
        24..34 => Fault::KillReplica(node),
        34..38 => Fault::KillReplicas,
        38..46 => Fault::StopReplica(node, time),
        46..53 => Fault::StopReplicaKillEngine(node),
        53..58 => Fault::Slow(node, long),
        58..61 => Fault::Errors(node, short),
        61..65 => Fault::Full(node, time),
        65..67 => Fault::FullAll(short),
        67..73 => Fault::PowerCut(node),
        73..76 => Fault::PowerCutAll,
        76..79 => Fault::HostLost(node),
        79..81 => Fault::PowerCutOthers(node),
        81..86 => Fault::Cut(node, time),
        86..90 => Fault::Break(node),
        90..92 => Fault::Away(node, long / 2),
        _ => chain_operation(dice),
    }
}

fn chain_operation(dice: &mut Dice) -> Fault {
    match dice.below(20) {
        0..9 => Fault::Snapshot,
        9..13 => Fault::Remove,
        13..15 => Fault::Purge,
        15..18 => Fault::Revert,
        _ => Fault::Expand,
    }
}
