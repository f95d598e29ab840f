//! What is asked of the chain of layers, and what has to come of it: a snapshot shows the same for ever, a revert is a
//! write of all blocks, and what an expansion adds can be written.

use super::{
    BLOCK, BLOCKS, BTreeMap, CHUNK, Command, CommandId, Conducted, Disk, Event, Fault, GROWS_BY, GROWTH,
    Outbox, Quorum, ReplicaConfig, Report, SECOND, SIZE, Seen, Stamp, World,
};
use crate::sim::parts::{Register, registers_of};
use tests::register::{ReadBegan, WriteId};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Chain {
    pub(super) commands: u64,
    asked: BTreeMap<u64, Asked>,
    /// What every snapshot showed when it was taken, until somebody asks for its removal.
    taken: BTreeMap<String, Seen>,
    /// Names that are free again once what had them is folded away.
    freed: Vec<String>,
    /// Bytes of the volume that clients know of.
    known: u64,
    /// Bytes that were asked for last.
    grown: u64,
}

/// What was asked for and is not answered.
pub(super) enum Asked {
    /// Its name, and the oracle's mark: to clients it is a read of all blocks at one moment.
    Snapshot(String, ReadBegan),
    Revert(Vec<(u64, WriteId)>),
    Expand(u64),
    /// The replica is out: with an empty disk or its own it is taken in again.
    Exchange(usize, bool),
    /// One replica more.
    Add,
    Other,
}

impl World {
    pub(super) fn change_chain(&mut self, fault: Fault, out: &mut Outbox) {
        let known: Vec<String> = self.chain.taken.keys().cloned().collect();
        let number = self.dice.below(known.len().max(1) as u64);
        let picked = usize::try_from(number).ok().and_then(|n| known.get(n)).cloned();
        // Opening an engine ends what those before had been asked: a revert is a write, which only an open one takes.
        let takes = |e: &super::Engine| !e.frozen && (e.open || fault != Fault::Revert);
        if !self.engines.get(&self.current).is_some_and(takes) {
            return;
        }
        self.chain.commands += 1;
        let id = self.chain.commands;
        let (asked, command) = match (fault, picked) {
            (Fault::Snapshot, _) => {
                let (name, labels) = (self.free_name(id), BTreeMap::new());
                let command =
                    Command::Snapshot { name: name.clone(), user_created: true, created: created(), labels };
                (Asked::Snapshot(name, self.history.read_begins()), command)
            }
            (Fault::Expand, _) if self.chain.grown < GROWTH => {
                self.chain.grown += GROWS_BY;
                let size = SIZE + self.chain.grown;
                (Asked::Expand(size), Command::Expand { size, created: created() })
            }
            (Fault::Remove, Some(name)) => {
                self.chain.taken.remove(&name);
                self.chain.freed.push(name.clone());
                // Removing it is half of the matter.
                for _ in 0..2 {
                    let soon = self.now + self.dice.below(SECOND);
                    self.at(soon, Event::Fault(Fault::Purge));
                }
                (Asked::Other, Command::RemoveSnapshot { name })
            }
            (Fault::Revert, Some(name)) => {
                (Asked::Revert(self.write_snapshot(&name)), Command::Revert { name, created: created() })
            }
            (Fault::Purge, _) => (Asked::Other, Command::Purge),
            _ => return,
        };
        self.ask(id, asked, command, out);
    }

    /// Asks for something of which nothing has to be known afterwards.
    pub(super) fn ask_other(&mut self, command: Command, out: &mut Outbox) {
        self.chain.commands += 1;
        self.ask(self.chain.commands, Asked::Other, command, out);
    }

    /// Somebody wants to know what snapshots there are.
    pub(super) fn look(&mut self, out: &mut Outbox) {
        if self.engines.get(&self.current).is_some_and(|e| !e.frozen) {
            self.ask_other(Command::LookAtChain, out);
        }
    }

    pub(super) fn ask(&mut self, id: u64, asked: Asked, command: Command, out: &mut Outbox) {
        self.chain.asked.insert(id, asked);
        let (now, input) = (self.now, Conducted::Command(CommandId(id), command));
        if let Some(e) = self.engines.get_mut(&self.current) {
            e.conduct(now, Report::Input(input), out);
        }
    }

    /// A name for a snapshot: one of its own, or one that another had before, which may still be there on who is away.
    fn free_name(&mut self, id: u64) -> String {
        let known = self.chain.freed.len() as u64;
        let at = usize::try_from(self.dice.below(known.max(1))).unwrap_or(0);
        match self.chain.freed.get(at).cloned().filter(|_| self.dice.chance(500)) {
            Some(name) => name,
            None => format!("s{id}"),
        }
    }

    /// What is asked of the membership, of an engine that is starting, too: who is taken out comes back empty.
    pub(super) fn change_members(&mut self, node: usize, fault: Fault, out: &mut Outbox) {
        if self.engines.get(&self.current).is_none_or(|e| e.frozen) || self.quorum == Quorum::Unsafe {
            return;
        }
        self.chain.commands += 1;
        let (id, name) = (self.chain.commands, format!("r{node}"));
        match fault {
            Fault::Rebuild(_) => self.ask(id, Asked::Other, Command::Rebuild { name }, out),
            Fault::Exchange(_, empty) => {
                self.ask(id, Asked::Exchange(node, empty), Command::RemoveReplica { name }, out);
            }
            _ => {}
        }
    }

    /// The replica is out of the volume: it comes in again.
    fn take_in(&mut self, node: usize, empty: bool) {
        self.note("replica out of the volume".into());
        let mut out = Outbox::default();
        if empty {
            self.break_conns(node, &mut out);
            self.nodes[node].exchange_disk(Disk::new(SIZE, CHUNK));
            out.later(self.now + SECOND / 10, Event::StartNode(node));
        }
        self.chain.commands += 1;
        let replica = ReplicaConfig { name: format!("r{node}"), local: false, learner: false };
        self.ask(self.chain.commands, Asked::Other, Command::AddReplica(replica), &mut out);
        self.carry(out);
    }

    /// To clients a revert is a write of what the snapshot shows to every block.
    fn write_snapshot(&mut self, name: &str) -> Vec<(u64, WriteId)> {
        let seen = self.chain.taken.get(name).cloned().unwrap_or_default();
        let stamp = |block| seen.get(&block).copied().unwrap_or(Stamp(0));
        let session = self.generation.attachment.into();
        let registers = (0..BLOCKS).flat_map(registers_of);
        registers
            .map(|r| (r.number, self.history.write_begins(r.number, r.value(stamp(r.block)), session)))
            .collect()
    }

    pub(super) fn command_done(&mut self, command: u64, ok: bool) {
        match self.chain.asked.remove(&command) {
            Some(Asked::Snapshot(name, began)) if ok => {
                let whole = |n: &&super::Node| self.is_member(n.number) && !n.disk.is_rebuilding();
                let sound = |n: &&super::Node| n.disk.rotten() == 0;
                let rots = self.rots > 0 && !self.nodes.iter().filter(whole).any(|n| sound(&n));
                let seen = self.nodes.iter().filter(whole).filter(sound).find_map(|n| n.disk.snapshot(&name));
                match seen {
                    // What it shows is judged once all is repaired, by its being the same on all.
                    None if rots => {}
                    Some(seen) => {
                        self.judge_snapshot(&name, &seen, began);
                        self.chain.taken.insert(name, seen);
                    }
                    None => self.fail(format!("snapshot {name} was taken, and no member has it")),
                }
                self.history.read_ends(began);
            }
            Some(Asked::Snapshot(_, began)) => self.history.read_ends(began),
            Some(Asked::Revert(writes)) if ok => {
                self.note("revert done".into());
                // A flush belongs to it.
                writes.into_iter().for_each(|(block, write)| self.history.write_acked(block, write, true));
            }
            Some(Asked::Expand(size)) if ok => {
                self.note("expansion done".into());
                self.chain.known = self.chain.known.max(size);
            }
            Some(Asked::Exchange(node, empty)) if ok => self.take_in(node, empty),
            Some(Asked::Add) if !ok => self.take_back_replica(),
            _ => {}
        }
    }

    /// What a snapshot shows was there at one moment between the command and its answer.
    fn judge_snapshot(&mut self, name: &str, seen: &Seen, began: ReadBegan) {
        let value = |r: Register| (r.number, r.value(seen.get(&r.block).copied().unwrap_or(Stamp(0))));
        let values = || (0..BLOCKS).flat_map(registers_of).map(value);
        if let Err(v) = self.history.at_one_moment(began, values()) {
            self.wrong(format!("snapshot {name}: {v}"));
        }
        for (register, stamp) in values() {
            if let Err(v) = self.history.read_returned(register, began, stamp) {
                self.wrong(format!("snapshot {name}: {v}"));
            }
        }
    }

    /// Whoever was asked is gone, and answers nothing.
    pub(super) fn forget_what_was_asked(&mut self) {
        for asked in std::mem::take(&mut self.chain.asked).into_values() {
            if let Asked::Snapshot(_, began) = asked {
                self.history.read_ends(began);
            }
        }
    }

    /// A block of what the volume has grown by, if it has. With the quorum `unsafe` an older chain may come back.
    pub(super) fn new_block(&mut self) -> Option<u64> {
        let known = if self.quorum == Quorum::Unsafe { 0 } else { self.chain.known };
        let grown = known.saturating_sub(SIZE) / BLOCK;
        (grown > 0 && self.dice.chance(100)).then(|| SIZE / BLOCK + self.dice.below(grown))
    }

    /// Every snapshot shows what it showed, on every one of these replicas.
    pub(super) fn check_snapshots(&mut self, members: &[usize]) {
        let changed = |(name, seen): (&String, &Seen)| {
            let other = members.iter().find(|n| self.nodes[**n].disk.snapshot(name).as_ref() != Some(seen));
            other.map(|n| format!("snapshot {name} of replica {n} is not what it was"))
        };
        if let Some(what) = self.chain.taken.iter().find_map(changed) {
            self.wrong(what);
        }
    }
}

/// What a clock says that is read in whole seconds: all commands of a run come within one.
fn created() -> String {
    "2026-01-01T00:00:00Z".into()
}
