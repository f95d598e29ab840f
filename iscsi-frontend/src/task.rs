//! The commands that are on their way, of all sessions.
//!
//! A tag names a place and a count of its uses, so that no answer and no Data-Out is ever taken for another command's.
//! Commands outlive their connection while the device has a request of theirs. Places are recycled, last in first out;
//! the table grows to the largest number ever on their way and allocates nothing then.

use crate::collect::Collected;
use crate::pdu::ScsiCommand;
use crate::scsi::{Claim, Execution, Step, Work};

/// A connection: its slot and serial number.
pub(crate) type Claimant = (u16, u32);

/// How far a command has come.
#[derive(Debug)]
pub(crate) enum Stage {
    /// Unsolicited data is still to come.
    Unsolicited,
    /// Decided; waits for memory.
    Admission,
    /// An R2T is out: data up to `end` is to come.
    Solicited {
        /// Behind the last byte that was asked for.
        end: u32,
    },
    /// Its data is there. Waits for a place in the device, or for others to leave its range; the step has been taken out
    /// of the execution already if it is not the first.
    Ready(Option<Step>),
    /// The device has a request.
    Device,
    /// Waits for the commands that it has aborted.
    Settling,
}

/// What a command does once its data is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Nothing has been decided.
    Undecided,
    /// Its data are parameters.
    Parameters,
    /// Something on the medium.
    Work(Work),
}

/// Whether somebody has ended a command before its time. It takes no further step then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aborted {
    No,
    /// Its own initiator: there is no answer.
    BySelf,
    /// Another one: the answer is the status TASK ABORTED (TAS = 1: SPC-4, 7.5.8).
    ByOther,
}

/// A command on its way.
#[derive(Debug)]
pub(crate) struct Task {
    /// Whose it is. The connection may be gone.
    pub(crate) owner: Claimant,
    /// The initiator port, by its place in the server's table.
    pub(crate) port: u16,
    pub(crate) command: ScsiCommand,
    /// Counts commands: which came before which.
    pub(crate) serial: u64,
    pub(crate) stage: Stage,
    pub(crate) plan: Plan,
    pub(crate) collected: Collected,
    /// Bytes of data that are needed before it can go on.
    pub(crate) need: u32,
    /// Bytes of data that its CDB asks for, whatever the initiator sends.
    pub(crate) asked: u32,
    /// Number of the next Data-Out of the sequence.
    pub(crate) data_sn: u32,
    /// R2Ts sent.
    pub(crate) r2t_sn: u32,
    /// Bytes counted in the budget.
    pub(crate) budget: usize,
    pub(crate) claim: Claim,
    pub(crate) execution: Option<Execution>,
    pub(crate) aborted: Aborted,
}

impl Task {
    /// Delivered at once, outside the order of commands.
    pub(crate) fn is_immediate(&self) -> bool {
        self.command.opcode & crate::pdu::IMMEDIATE != 0
    }

    /// Bytes that the initiator has room for.
    pub(crate) fn read_expected(&self) -> u32 {
        if self.command.flags & crate::pdu::flag::READ != 0 { self.command.expected.get() } else { 0 }
    }

    /// Bytes that the initiator has to send.
    pub(crate) fn write_expected(&self) -> u32 {
        if self.command.flags & crate::pdu::flag::WRITE != 0 { self.command.expected.get() } else { 0 }
    }

    /// True if the initiator expects data, and not in this direction. Told GOOD without a residual, it would believe that all of
    /// it was transferred.
    pub(crate) fn lacks(&self, direction: u8) -> bool {
        self.command.expected.get() > 0 && self.command.flags & direction == 0
    }

    /// True once it has begun to touch the medium, and until its last step.
    pub(crate) fn has_begun(&self) -> bool {
        self.execution.is_some()
    }
}

/// The table.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    places: Vec<(u32, Option<Task>)>,
    free: Vec<u32>,
    serial: u64,
    /// Commands whose claim is exclusive: while there is none, nobody has to look.
    exclusive: usize,
}

impl Tasks {
    /// Room for `count` commands without allocation.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { places: Vec::with_capacity(count), free: Vec::with_capacity(count), serial: 0, exclusive: 0 }
    }

    /// Number of commands.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// The number that the next command gets.
    pub(crate) fn next_serial(&self) -> u64 {
        self.serial
    }

    /// Takes a command in: its tag.
    pub(crate) fn insert(&mut self, mut task: Task) -> u64 {
        task.serial = self.serial;
        self.serial += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            u32::try_from(self.places.len() - 1).expect("fewer commands than 2^32")
        });
        let place = &mut self.places[index as usize];
        // 15 bits: with the index it makes a target transfer tag, which is never all ones.
        place.0 = (place.0 + 1) & 0x7fff;
        place.1 = Some(task);
        u64::from(place.0) << 32 | u64::from(index)
    }

    fn place(&self, tag: u64) -> Option<usize> {
        let index = usize::try_from(tag & 0xffff_ffff).ok()?;
        let (uses, task) = self.places.get(index)?;
        (u64::from(*uses) == tag >> 32 && task.is_some()).then_some(index)
    }

    /// The command of a tag.
    pub(crate) fn get(&self, tag: u64) -> Option<&Task> {
        self.places[self.place(tag)?].1.as_ref()
    }

    /// The same, to change it.
    pub(crate) fn get_mut(&mut self, tag: u64) -> Option<&mut Task> {
        let index = self.place(tag)?;
        self.places[index].1.as_mut()
    }

    /// Takes a command out.
    pub(crate) fn remove(&mut self, tag: u64) -> Option<Task> {
        let index = self.place(tag)?;
        let task = self.places[index].1.take()?;
        self.free.push(u32::try_from(index).unwrap_or(0));
        self.exclusive -= usize::from(task.claim.is_exclusive());
        Some(task)
    }

    /// Says what a command needs for itself.
    pub(crate) fn claim(&mut self, tag: u64, claim: Claim) {
        if let Some(task) = self.get_mut(tag) {
            let before = std::mem::replace(&mut task.claim, claim);
            self.exclusive += usize::from(claim.is_exclusive());
            self.exclusive -= usize::from(before.is_exclusive());
        }
    }

    /// True if a command may not have memory yet: it is ORDERED and others are older, or an older one is ORDERED. Who waits
    /// for that has no memory, and waits only for older ones: nobody waits for himself.
    pub(crate) fn is_held_back(&self, tag: u64) -> bool {
        if self.exclusive == 0 {
            return false;
        }
        let Some(own) = self.get(tag) else { return false };
        self.places
            .iter()
            .filter_map(|(_, task)| task.as_ref())
            .any(|other| other.serial < own.serial && (own.claim == Claim::All || other.claim == Claim::All))
    }

    /// True if a command has to wait for another that it must not run beside: one that has begun, or one that is ready
    /// and older.
    pub(crate) fn must_wait(&self, tag: u64) -> bool {
        if self.exclusive == 0 {
            return false;
        }
        let Some(own) = self.get(tag) else { return false };
        self.places.iter().filter_map(|(_, task)| task.as_ref()).any(|other| {
            let before =
                other.has_begun() || (matches!(other.stage, Stage::Ready(_)) && other.serial < own.serial);
            other.serial != own.serial && before && own.claim.conflicts(other.claim)
        })
    }

    /// Tags and commands.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Task)> {
        self.places.iter().enumerate().filter_map(|(index, (uses, task))| {
            task.as_ref().map(|task| (u64::from(*uses) << 32 | index as u64, task))
        })
    }

    /// The command of a connection with this initiator task tag.
    pub(crate) fn find(&self, owner: Claimant, itt: u32) -> Option<u64> {
        self.iter().find(|(_, task)| task.owner == owner && task.command.itt.get() == itt).map(|(tag, _)| tag)
    }

    /// The first command for which this holds.
    pub(crate) fn first(&self, wanted: impl Fn(&Task) -> bool) -> Option<u64> {
        self.iter().find(|(_, task)| wanted(task)).map(|(tag, _)| tag)
    }

    /// The target transfer tag of a command.
    pub(crate) fn transfer_tag(tag: u64) -> u32 {
        let index = u32::try_from(tag & 0xffff).unwrap_or(0);
        let uses = u32::try_from(tag >> 32 & 0x7fff).unwrap_or(0);
        uses << 16 | index
    }

    /// The command of a target transfer tag.
    pub(crate) fn of_transfer_tag(ttt: u32) -> u64 {
        u64::from(ttt >> 16) << 32 | u64::from(ttt & 0xffff)
    }
}

#[cfg(test)]
mod tests {
    use lh_block::Extent;

    use super::*;

    fn task(claim: Claim, stage: Stage) -> Task {
        Task {
            owner: (0, 1),
            port: 0,
            command: ScsiCommand::default(),
            serial: 0,
            stage,
            plan: Plan::Undecided,
            collected: Collected::default(),
            need: 0,
            asked: 0,
            data_sn: 0,
            r2t_sn: 0,
            budget: 0,
            claim,
            execution: None,
            aborted: Aborted::No,
        }
    }

    #[test]
    fn a_tag_is_of_one_command() {
        let mut tasks = Tasks::with_capacity(4);
        let first = tasks.insert(task(Claim::Nothing, Stage::Unsolicited));
        assert!(tasks.remove(first).is_some() && tasks.remove(first).is_none());
        let second = tasks.insert(task(Claim::Nothing, Stage::Unsolicited));
        assert!(first != second && tasks.get(first).is_none() && tasks.get(second).is_some());
        assert_eq!(Tasks::of_transfer_tag(Tasks::transfer_tag(second)), second);
        assert_ne!(Tasks::transfer_tag(0x7fff_0000_ffff), crate::pdu::NO_TAG);
        assert!(tasks.get(u64::MAX).is_none());
    }

    #[test]
    fn an_ordered_command_holds_back_the_younger_and_waits_for_the_older() {
        let mut tasks = Tasks::default();
        let [older, ordered, younger] =
            std::array::from_fn(|_| tasks.insert(task(Claim::Nothing, Stage::Admission)));
        tasks.claim(ordered, Claim::All);
        assert_eq!([older, ordered, younger].map(|tag| tasks.is_held_back(tag)), [false, true, true]);
        tasks.remove(older);
        assert_eq!([ordered, younger].map(|tag| tasks.is_held_back(tag)), [false, true]);
        tasks.remove(ordered);
        assert!(!tasks.is_held_back(younger));
    }

    #[test]
    fn who_has_a_range_for_himself_waits_and_is_waited_for() {
        let mut tasks = Tasks::default();
        let range = Extent::new(0, 512);
        let writer = tasks.insert(task(Claim::Nothing, Stage::Device));
        tasks.claim(writer, Claim::Write(range));
        assert!(!tasks.must_wait(writer));
        let own = tasks.insert(task(Claim::Nothing, Stage::Ready(None)));
        tasks.claim(own, Claim::Own(range));
        // The writer has not begun, and is not ready: it comes later.
        assert!(!tasks.must_wait(own));
        let work = Work::Write { range, fua: false };
        let pool = lh_ring::Pool::new(0, 1 << 20).unwrap();
        tasks.get_mut(writer).unwrap().execution = Some(Execution::start(work, None, &pool).0);
        assert!(tasks.must_wait(own));
        let later = tasks.insert(task(Claim::Nothing, Stage::Ready(None)));
        tasks.claim(later, Claim::Write(range));
        assert!(tasks.must_wait(later));
        tasks.remove(writer);
        assert!(!tasks.must_wait(own) && tasks.must_wait(later));
        tasks.remove(own);
        assert!(!tasks.must_wait(later));
        assert_eq!(tasks.exclusive, 0);
    }
}
