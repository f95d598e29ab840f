//! Commands, from their PDU to their answer.
//!
//! ```text
//!   Unsolicited --> (decided) --> Admission --> Solicited <-.     Ready --> Device <-.
//!        |               |             |            |  `----'  ^     ^        |  `---' next step
//!        |               |             `------------|----------'     |        |
//!        `---------------`--> ended <---------------`----------------`--------'
//! ```
//!
//! Whatever ends a command passes through [`Server::end`] (an answer) or [`Server::drop_task`] (none).

use lh_block::{Device, Done, Request as DeviceRequest};
use lh_ring::Payload;
use tracing::warn;

use super::Server;
use super::functions::{Finish, Scope};
use crate::collect::Collected;
use crate::connection::{Connection, Ending, Text, Why};
use crate::pdu::{DataOut, FINAL, NO_TAG, Raw, ScsiCommand, attribute, flag, opcode, reject, status};
use crate::scsi::sense::{INCORRECT_DATA, INVALID_FIELD, INVALID_INFORMATION_UNIT, UNEXPECTED_DATA};
use crate::scsi::{Claim, Decision, Execution, Step, Work};
use crate::session::{Broken, Request, Verdict};
use crate::task::{Aborted, Claimant, Plan, Stage, Task};

/// What a command has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Memory that others have.
    Memory,
    /// Memory that its own session has.
    Share,
    /// A place in the device.
    Room,
    /// Commands that it must not run beside.
    Others,
}

impl Server {
    /// A PDU has come.
    ///
    /// # Errors
    /// Why the connection must end.
    pub(super) fn handle(
        &mut self,
        device: &mut dyn Device<Payload>,
        slot: u16,
        raw: &Raw,
        data: Payload,
    ) -> Result<(), Why> {
        let Some(connection) = self.places.connection(slot) else { return Ok(()) };
        let request = match connection.session.apply(raw) {
            Verdict::Take(request) => request,
            Verdict::Ignore => return Ok(()),
            Verdict::Reject(reason) => {
                connection.reject(raw, reason);
                return Ok(());
            }
            Verdict::Close(broken) => return Err(broken.into()),
        };
        match request {
            Request::Command(command) => self.command(device, slot, raw, &command, data)?,
            Request::DataOut(header) => self.data_out(device, slot, &header, data)?,
            Request::Nop(nop) if nop.itt.get() == NO_TAG => {
                connection.pinged_at = None;
                if nop.opcode & crate::pdu::IMMEDIATE == 0 {
                    connection.session.answered(false);
                }
            }
            Request::Nop(nop) => {
                let immediate = nop.opcode & crate::pdu::IMMEDIATE != 0;
                let mut echo = data.to_vec();
                echo.truncate(connection.agreed.send_segment as usize);
                connection.text_response(opcode::NOP_IN, nop.itt.get(), immediate, Text::Ends, &echo);
            }
            Request::Text(text) => self.text(slot, raw, &text, &data),
            Request::Task(request) => self.function(slot, &request),
            Request::Logout(logout) => {
                let immediate = logout.opcode & crate::pdu::IMMEDIATE != 0;
                match connection.session.refusal(&logout) {
                    Some(response) => connection.logout_refused(logout.itt.get(), immediate, response),
                    None => self.logout(slot, logout.itt.get(), immediate),
                }
            }
        }
        Ok(())
    }

    fn command(
        &mut self,
        device: &mut dyn Device<Payload>,
        slot: u16,
        raw: &Raw,
        command: &ScsiCommand,
        data: Payload,
    ) -> Result<(), Why> {
        let Some(connection) = self.places.connection(slot) else { return Ok(()) };
        let Some(port) = connection.port else { return Ok(()) };
        let itt = command.itt.get();
        let immediate = command.opcode & crate::pdu::IMMEDIATE != 0;
        if itt == NO_TAG || connection.tasks.iter().any(|(other, _)| *other == itt) {
            connection.session.answered(immediate);
            connection.reject(raw, reject::TASK_IN_PROGRESS);
            return Ok(());
        }
        let task = Task {
            owner: connection.claimant,
            port,
            command: *command,
            serial: 0,
            stage: Stage::Unsolicited,
            plan: Plan::Undecided,
            collected: Collected::default(),
            need: 0,
            asked: 0,
            data_sn: 0,
            r2t_sn: 0,
            budget: 0,
            claim: Claim::Nothing,
            execution: None,
            aborted: Aborted::No,
        };
        let agreed = connection.agreed;
        let most = task.write_expected().min(agreed.first_burst());
        let more = command.flags & FINAL == 0;
        let unsolicited = data.len() > most as usize || (!data.is_empty() && !agreed.immediate_data);
        if unsolicited || (more && (agreed.initial_r2t || command.flags & flag::WRITE == 0)) {
            return Err(Broken::Unsolicited.into());
        }
        let tag = self.tasks.insert(task);
        connection.tasks.push((itt, tag));
        self.ports.began(port);
        let whole = data.len() == most as usize;
        if !self.collect(tag, data) || (more && !whole) {
            return Ok(());
        }
        self.decide(device, tag);
        Ok(())
    }

    /// Adds bytes to a command's data; false, and the command has ended, if there is no memory.
    fn collect(&mut self, tag: u64, data: Payload) -> bool {
        let Some(task) = self.tasks.get_mut(tag) else { return false };
        let total = task.write_expected() as usize;
        // Only for what was asked for is there memory beyond the first burst.
        let room = if matches!(task.stage, Stage::Unsolicited) { self.limits.first_burst } else { task.need };
        if task.collected.push(data, total, room as usize, &self.pool).is_ok() {
            return true;
        }
        self.end(tag, Ending::Status(status::BUSY));
        false
    }

    /// Data of a command has come. What belongs to none is dropped: its command may have been aborted meanwhile.
    fn data_out(
        &mut self,
        device: &mut dyn Device<Payload>,
        slot: u16,
        header: &DataOut,
        data: Payload,
    ) -> Result<(), Why> {
        let Some(connection) = self.places.connection(slot) else { return Ok(()) };
        let (owner, first_burst) = (connection.claimant, connection.agreed.first_burst());
        let itt = header.itt.get();
        let tag = match header.ttt.get() {
            NO_TAG => connection.tasks.iter().find(|(other, _)| *other == itt).map(|(_, tag)| *tag),
            ttt => Some(crate::task::Tasks::of_transfer_tag(ttt)),
        };
        let solicited = header.ttt.get() != NO_TAG;
        let Some(tag) = tag else { return Ok(()) };
        let Some(task) = self.tasks.get_mut(tag).filter(|task| task.owner == owner) else { return Ok(()) };
        let end = match task.stage {
            Stage::Solicited { end } if solicited && task.command.itt == header.itt => end,
            Stage::Unsolicited if !solicited => first_burst.min(task.write_expected()),
            _ => return Ok(()),
        };
        let have = u32::try_from(task.collected.len()).unwrap_or(u32::MAX);
        let after = have.saturating_add(u32::try_from(data.len()).unwrap_or(u32::MAX));
        let last = header.flags & FINAL != 0;
        let in_order = header.offset.get() == have && header.data_sn.get() == task.data_sn;
        if in_order && after > end && !solicited {
            self.end(tag, Ending::Check(UNEXPECTED_DATA, 0));
            return Ok(());
        }
        // A sequence that was asked for comes whole; an unsolicited one ends where the initiator likes.
        if !in_order || after > end || (solicited && last != (after == end)) {
            self.end(tag, Ending::Check(INCORRECT_DATA, 0));
            return Ok(());
        }
        task.data_sn += 1;
        connection.paid(data.len(), self.clock.now());
        if !self.collect(tag, data) || !last {
            return Ok(());
        }
        if solicited {
            self.advance(device, tag)
        } else {
            self.decide(device, tag)
        }
        Ok(())
    }

    /// A command whose unsolicited data is there: what does it come to?
    fn decide(&mut self, device: &mut dyn Device<Payload>, tag: u64) {
        let Some(task) = self.tasks.get(tag) else { return };
        let Some((_, nexus)) = self.ports.get(task.port).and_then(|port| port.session) else { return };
        let (flags, lun, cdb) = (task.command.flags, task.command.lun.get(), task.command.cdb);
        if flags & (flag::READ | flag::WRITE) == flag::READ | flag::WRITE {
            return self.end(tag, Ending::Check(INVALID_INFORMATION_UNIT, 0));
        }
        let (cannot_send, cannot_take) = (task.lacks(flag::WRITE), task.lacks(flag::READ));
        let most = task.write_expected();
        let mut reply = std::mem::take(&mut self.reply);
        reply.clear();
        let decision = self.unit.decide(nexus, lun, &cdb, device, &mut reply);
        match decision {
            // What cannot come is not written: nobody is to take that for done.
            Decision::Parameters(1..) if cannot_send => {
                self.end(tag, Ending::Check(INVALID_INFORMATION_UNIT, 0));
            }
            // A list that is cut off may end where another would: what is missing would be taken for done.
            Decision::Parameters(length) if length > most => {
                self.end(tag, Ending::Check(INVALID_INFORMATION_UNIT, length));
            }
            Decision::Work(work) if cannot_send && work.data_out() > 0 => {
                self.end(tag, Ending::Check(INVALID_INFORMATION_UNIT, 0));
            }
            // What nobody takes is no failure: the residual says that none of it went.
            Decision::Good if cannot_take => self.end(tag, Ending::Done(0)),
            Decision::Work(work) if cannot_take && work.data_in() > 0 => self.end(tag, Ending::Done(0)),
            Decision::Good => self.end(tag, Ending::Reply(&reply)),
            Decision::Check(sense) => self.end(tag, Ending::Check(sense, 0)),
            Decision::Conflict => self.end(tag, Ending::Status(status::RESERVATION_CONFLICT)),
            Decision::Parameters(length) => {
                if let Some(task) = self.tasks.get_mut(tag) {
                    task.need = length;
                    task.plan = Plan::Parameters;
                }
                self.admit(device, tag);
            }
            Decision::Work(work) => self.plan(device, tag, work),
        }
        self.reply = reply;
    }

    /// A command on the medium: is its data what it needs?
    fn plan(&mut self, device: &mut dyn Device<Payload>, tag: u64, mut work: Work) {
        let Some(task) = self.tasks.get_mut(tag) else { return };
        let (out, have) = (work.data_out(), task.write_expected());
        let block = device.geometry().logical_block;
        task.need = out.min(have);
        task.asked = out;
        if have > out && work.is_exact() {
            return self.end(tag, Ending::Check(INVALID_FIELD, out));
        }
        if out == 0 && work.is_exact() {
            // A comparison of no blocks.
            return self.end(tag, Ending::Done(0));
        }
        if have < out {
            // The initiator sends less than the CDB says: whole blocks of a write are written, nothing else can be.
            match &mut work {
                Work::Write { .. } | Work::WriteVerify { .. } if have == 0 => {
                    return self.end(tag, Ending::Done(out));
                }
                Work::Write { range, .. } | Work::WriteVerify { range, .. } if have % block == 0 => {
                    range.len = u64::from(have);
                }
                _ => return self.end(tag, Ending::Check(INVALID_INFORMATION_UNIT, out)),
            }
        }
        task.plan = Plan::Work(work);
        if work.data_in() > 0 && task.read_expected() == 0 {
            return self.end(tag, Ending::Done(work.data_in()));
        }
        let claim = if task.command.flags & 0x07 == attribute::ORDERED { Claim::All } else { work.claim() };
        self.tasks.claim(tag, claim);
        self.admit(device, tag);
    }

    fn admit(&mut self, device: &mut dyn Device<Payload>, tag: u64) {
        if let Some(task) = self.tasks.get_mut(tag) {
            task.stage = Stage::Admission;
        }
        if self.waiting.is_empty() { self.advance(device, tag) } else { self.waiting.push_back(tag) }
    }

    /// Goes on with a command, or lets it wait.
    fn advance(&mut self, device: &mut dyn Device<Payload>, tag: u64) {
        if self.try_advance(device, tag).is_some() {
            self.waiting.push_back(tag);
        }
    }

    /// Takes memory for a command; what it has to wait for if there is none.
    fn take_memory(&mut self, tag: u64) -> Option<Wait> {
        if self.tasks.is_held_back(tag) {
            return Some(Wait::Others);
        }
        let share = self.limits.session_bytes;
        let task = self.tasks.get_mut(tag)?;
        let memory = if let Plan::Work(work) = task.plan { work.memory() } else { 0 };
        let have = u32::try_from(task.collected.len()).unwrap_or(u32::MAX);
        let bytes = task.need.saturating_sub(have) as usize + memory as usize;
        if bytes > 0 {
            let (slot, serial) = task.owner;
            let current = self.places.is_current(slot, serial);
            let connection = self.places.connection(slot).filter(|_| current)?;
            if connection.total > 0 && connection.total + bytes > share {
                return Some(Wait::Share);
            }
            if !self.budget.take(bytes) {
                return Some(Wait::Memory);
            }
            connection.total += bytes;
        }
        task.budget = bytes;
        task.stage = Stage::Solicited { end: have };
        None
    }

    /// Goes on with a command as far as it can; what it has to wait for, if it cannot.
    pub(super) fn try_advance(&mut self, device: &mut dyn Device<Payload>, tag: u64) -> Option<Wait> {
        if self.tasks.get(tag).is_some_and(|task| matches!(task.stage, Stage::Admission))
            && let Some(wait) = self.take_memory(tag)
        {
            return Some(wait);
        }
        let task = self.tasks.get_mut(tag)?;
        if let Stage::Solicited { end } = task.stage {
            let have = u32::try_from(task.collected.len()).unwrap_or(u32::MAX);
            if have < end {
                return None;
            }
            if have < task.need {
                self.ask_for_data(tag, have);
                return None;
            }
            task.stage = Stage::Ready(None);
        }
        if !matches!(task.stage, Stage::Ready(_)) {
            return None;
        }
        if task.plan == Plan::Parameters {
            self.take_parameters(tag, device.geometry().logical_block);
        }
        let task = self.tasks.get_mut(tag)?;
        let Stage::Ready(step) = &mut task.stage else { return None };
        if device.room() == 0 {
            return Some(Wait::Room);
        }
        match step.take() {
            Some(step) => self.step(device, tag, step),
            None if self.tasks.must_wait(tag) => return Some(Wait::Others),
            None => self.start(device, tag),
        }
        None
    }

    /// Sends an R2T for what is missing, at most a burst.
    fn ask_for_data(&mut self, tag: u64, have: u32) {
        let Some(task) = self.tasks.get_mut(tag) else { return };
        let (slot, serial) = task.owner;
        if !self.places.is_current(slot, serial) {
            return;
        }
        let Some(connection) = self.places.connection(slot) else { return };
        let length = (task.need - have).min(connection.agreed.max_burst);
        task.stage = Stage::Solicited { end: have + length };
        task.data_sn = 0;
        connection.ready_to_transfer(task, crate::task::Tasks::transfer_tag(tag), have, length);
        // From here on the initiator is waited for, however long the command had to wait.
        connection.received_at = self.clock.now();
        task.r2t_sn += 1;
    }

    /// Ends a command of parameters, or makes it what is to be done to the medium before its answer.
    fn take_parameters(&mut self, tag: u64, block: u32) {
        let Some(task) = self.tasks.get_mut(tag) else { return };
        let list = task.collected.take(task.need as usize).map(|list| list.to_vec()).unwrap_or_default();
        let (cdb, port) = (task.command.cdb, task.port);
        let Some((_, nexus)) = self.ports.get(port).and_then(|port| port.session) else { return };
        match self.unit.parameters(nexus, &cdb, &list, block) {
            Decision::Check(sense) => self.end(tag, Ending::Check(sense, 0)),
            Decision::Conflict => self.end(tag, Ending::Status(status::RESERVATION_CONFLICT)),
            Decision::Work(work) => {
                if let Some(task) = self.tasks.get_mut(tag) {
                    (task.asked, task.need) = (u32::try_from(list.len()).unwrap_or(0), 0);
                    task.plan = Plan::Work(work);
                }
                // Alone: what was begun before ends first, so that the flush has it.
                self.tasks.claim(tag, Claim::All);
            }
            _ => {
                let asked = u32::try_from(list.len()).unwrap_or(0);
                let Some(owner) = self.tasks.get(tag).map(|task| task.owner) else { return };
                let before = self.tasks.next_serial();
                let mut scope = None;
                while let Some(port) = self.unit.next_to_abort() {
                    // The answer waits until the preempted commands have ended (SPC-4, 5.13.11.5).
                    self.abort_all(owner, |task, ports| ports.get(task.port).is_some_and(|p| p.name == port));
                    scope = Some(Scope::Everything);
                }
                match scope {
                    Some(scope) => self.settle_task(tag, scope, before, asked),
                    None => self.end(tag, Ending::Done(asked)),
                }
            }
        }
    }

    /// A command whose answer waits for those that it has aborted.
    fn settle_task(&mut self, tag: u64, scope: Scope, before: u64, asked: u32) {
        let Some(task) = self.tasks.get_mut(tag) else { return };
        task.stage = Stage::Settling;
        let owner = task.owner;
        self.wait_for(owner, scope, before, Finish::Command { tag, asked });
    }

    /// The first step on the medium.
    fn start(&mut self, device: &mut dyn Device<Payload>, tag: u64) {
        let Some(task) = self.tasks.get_mut(tag) else { return };
        let Plan::Work(work) = task.plan else { return };
        // Since it was decided, the write cache may have been taken away.
        let work = if self.unit.has_write_cache() { work } else { work.durable() };
        let data = task.collected.take(task.need as usize);
        let (execution, step) = Execution::start(work, data, &self.pool);
        task.execution = Some(execution);
        self.step(device, tag, step);
    }

    fn step(&mut self, device: &mut dyn Device<Payload>, tag: u64, step: Step) {
        let Some(task) = self.tasks.get_mut(tag) else { return };
        let asked = task.asked;
        match step {
            Step::Device { op, range, data } if device.room() > 0 => {
                task.stage = Stage::Device;
                device.submit(DeviceRequest { tag, op, range, data });
            }
            step @ Step::Device { .. } => {
                task.stage = Stage::Ready(Some(step));
                self.waiting.push_front(tag);
            }
            Step::Over(Ok(Some(data))) => self.end(tag, Ending::Data(data)),
            Step::Over(Ok(None)) => self.end(tag, Ending::Done(asked)),
            Step::Over(Err(sense)) => self.end(tag, Ending::Check(sense, asked)),
            Step::NoMemory => self.end(tag, Ending::Status(status::BUSY)),
        }
    }

    /// The device has answered a request.
    pub(super) fn device_done(&mut self, device: &mut dyn Device<Payload>, done: Done<Payload>) {
        let tag = done.tag;
        let Some(task) = self.tasks.get_mut(tag) else {
            warn!(tag, "an answer to no request");
            return;
        };
        if task.aborted != Aborted::No {
            return self.end_aborted(tag);
        }
        let Some(execution) = &mut task.execution else { return };
        let step = execution.answer(done, &self.pool);
        self.step(device, tag, step);
    }

    /// Answers a command.
    pub(super) fn end(&mut self, tag: u64, ending: Ending<'_>) {
        let Some(task) = self.remove(tag) else { return };
        let mut back = task.budget;
        if let Some(connection) = self.connection_of(task.owner) {
            let owed = connection.owed;
            connection.forget(tag);
            connection.respond(&task, ending);
            // What waits to be sent is not given back yet.
            let more = connection.owed - owed;
            let counted = more.min(back);
            connection.owed -= more - counted;
            back -= counted;
            connection.total -= back;
        }
        self.budget.give_back(back);
    }

    /// Ends a command without an answer.
    pub(super) fn drop_task(&mut self, tag: u64) {
        let Some(task) = self.remove(tag) else { return };
        self.budget.give_back(task.budget);
        if let Some(connection) = self.connection_of(task.owner) {
            connection.forget(tag);
            connection.total -= task.budget;
            connection.session.answered(task.is_immediate());
        }
    }

    fn remove(&mut self, tag: u64) -> Option<Task> {
        let task = self.tasks.remove(tag)?;
        self.ports.ended(task.port);
        Some(task)
    }

    /// Ends a command that `by` does not want any more: at once, or when the device is done with it.
    pub(super) fn abort(&mut self, tag: u64, by: Claimant) {
        let Some(task) = self.tasks.get_mut(tag) else { return };
        task.aborted = if task.owner == by { Aborted::BySelf } else { Aborted::ByOther };
        if !matches!(task.stage, Stage::Device) {
            self.end_aborted(tag);
        }
    }

    fn end_aborted(&mut self, tag: u64) {
        let Some(task) = self.tasks.get(tag) else { return };
        match task.aborted {
            Aborted::ByOther => self.end(tag, Ending::Status(status::TASK_ABORTED)),
            Aborted::No | Aborted::BySelf => self.drop_task(tag),
        }
    }

    /// The connection of a command, if it is still there.
    pub(super) fn connection_of(&mut self, (slot, serial): Claimant) -> Option<&mut Connection> {
        if self.places.is_current(slot, serial) {
            self.places.connection(slot).map(Box::as_mut)
        } else {
            None
        }
    }
}
