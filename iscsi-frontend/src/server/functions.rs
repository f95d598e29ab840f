//! Task management, logouts, and what else is answered only when commands have ended (`docs/invariants.md`, 3): an
//! initiator that has the answer may send something newer to the same blocks.

use tracing::info;

use super::Server;
use super::ports::Ports;
use crate::connection::{Ending, Why};
use crate::pdu::{IMMEDIATE, TaskRequest, function, function_response as response};
use crate::scsi::{Place, Reset, place_of};
use crate::task::{Aborted, Claimant, Stage, Task};

/// Commands that are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// One command.
    Task(u64),
    /// Those of a connection.
    Connection(Claimant),
    /// All.
    Everything,
}

/// What is done then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// A Task Management Function Response.
    Function { itt: u32, immediate: bool },
    /// The same, and all sessions end.
    ColdReset { itt: u32, immediate: bool },
    /// A Logout Response.
    Logout { itt: u32, immediate: bool },
    /// Status GOOD for a command.
    Command { tag: u64, asked: u32 },
}

/// Something whose answer waits.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) owner: Claimant,
    scope: Scope,
    /// Commands that came later do not matter.
    before: u64,
    finish: Finish,
}

impl Server {
    /// A task management function (RFC 7143, 11.5).
    pub(super) fn function(&mut self, slot: u16, request: &TaskRequest) {
        let Some(connection) = self.places.connection(slot) else { return };
        let owner = connection.claimant;
        let (itt, immediate) = (request.itt.get(), request.opcode & IMMEDIATE != 0);
        let before = self.tasks.next_serial();
        let unit = place_of(request.lun.get());
        let of_unit = |task: &Task| place_of(task.command.lun.get()) == unit;
        let (scope, cold) = match request.function & 0x7f {
            function::ABORT_TASK => {
                let Some(tag) = self.tasks.find(owner, request.referenced.get()) else {
                    return self.refuse(owner, itt, immediate, response::NO_TASK);
                };
                self.abort(tag, owner);
                (Scope::Task(tag), false)
            }
            function::ABORT_TASK_SET | function::CLEAR_TASK_SET | function::LOGICAL_UNIT_RESET
                if unit == Place::Nowhere =>
            {
                return self.refuse(owner, itt, immediate, response::NO_UNIT);
            }
            function::ABORT_TASK_SET => {
                self.abort_all(owner, |task, _| task.owner == owner && of_unit(task));
                (Scope::Connection(owner), false)
            }
            function::CLEAR_TASK_SET => {
                self.abort_all(owner, |task, _| of_unit(task));
                (Scope::Everything, false)
            }
            function::LOGICAL_UNIT_RESET => {
                info!(slot, ?unit, "reset of the logical unit");
                self.abort_all(owner, |task, _| of_unit(task));
                // The controller has no state.
                if unit == Place::Disk {
                    self.unit.reset(Reset::Unit);
                }
                (Scope::Everything, false)
            }
            reset @ (function::TARGET_WARM_RESET | function::TARGET_COLD_RESET) => {
                info!(slot, "reset of the target");
                self.abort_all(owner, |_, _| true);
                self.unit.reset(Reset::Target);
                (Scope::Everything, reset == function::TARGET_COLD_RESET)
            }
            function::TASK_REASSIGN => return self.refuse(owner, itt, immediate, response::NO_REASSIGN),
            _ => return self.refuse(owner, itt, immediate, response::NOT_SUPPORTED),
        };
        let finish =
            if cold { Finish::ColdReset { itt, immediate } } else { Finish::Function { itt, immediate } };
        self.wait_for(owner, scope, before, finish);
    }

    fn refuse(&mut self, owner: Claimant, itt: u32, immediate: bool, reason: u8) {
        if let Some(connection) = self.connection_of(owner) {
            connection.function_done(itt, immediate, reason);
        }
    }

    /// A logout: the session's commands end first.
    pub(super) fn logout(&mut self, slot: u16, itt: u32, immediate: bool) {
        let Some(connection) = self.places.connection(slot) else { return };
        let owner = connection.claimant;
        let before = self.tasks.next_serial();
        self.abort_all(owner, |task, _| task.owner == owner);
        self.wait_for(owner, Scope::Connection(owner), before, Finish::Logout { itt, immediate });
    }

    /// Aborts every command for which this holds, for `by`.
    pub(super) fn abort_all(&mut self, by: Claimant, wanted: impl Fn(&Task, &Ports) -> bool) {
        loop {
            let ports = &self.ports;
            let found = self
                .tasks
                .first(|task| task.aborted == Aborted::No && !is_settling(task) && wanted(task, ports));
            let Some(tag) = found else { return };
            self.abort(tag, by);
        }
    }

    /// Lets go of commands that have not reached the device: they get no answer here.
    pub(super) fn leave_waiting(&mut self) {
        let waits = |task: &Task| !matches!(task.stage, Stage::Device | Stage::Ready(_) | Stage::Settling);
        while let Some(tag) = self.tasks.first(waits) {
            self.drop_task(tag);
        }
    }

    /// Lets an answer wait for commands that came before.
    pub(super) fn wait_for(&mut self, owner: Claimant, scope: Scope, before: u64, finish: Finish) {
        self.functions.push(Function { owner, scope, before, finish });
        self.settle();
    }

    /// Gives the answers for which nobody has to be waited any more.
    pub(super) fn settle(&mut self) {
        let mut index = 0;
        while let Some(function) = self.functions.get(index) {
            let (scope, before) = (function.scope, function.before);
            let open = match scope {
                Scope::Task(tag) => self.tasks.get(tag).is_some(),
                Scope::Connection(owner) => self
                    .tasks
                    .first(|task| task.aborted != Aborted::No && task.owner == owner && task.serial < before)
                    .is_some(),
                Scope::Everything => {
                    self.tasks.first(|task| task.aborted != Aborted::No && task.serial < before).is_some()
                }
            };
            if open {
                index += 1;
                continue;
            }
            let function = self.functions.swap_remove(index);
            self.finish(function.owner, function.finish);
        }
    }

    fn finish(&mut self, owner: Claimant, finish: Finish) {
        if let Finish::Command { tag, asked } = finish {
            return self.end(tag, Ending::Done(asked));
        }
        let Some(connection) = self.connection_of(owner) else { return };
        match finish {
            Finish::Function { itt, immediate } | Finish::ColdReset { itt, immediate } => {
                connection.function_done(itt, immediate, response::COMPLETE);
            }
            Finish::Logout { itt, immediate } => connection.logged_out(itt, immediate),
            Finish::Command { .. } => {}
        }
        if matches!(finish, Finish::ColdReset { .. }) {
            for index in 0..self.places.served().len() {
                let slot = self.places.served()[index];
                if let Some(connection) = self.places.connection(slot) {
                    connection.finishing = Some(Why::Reset);
                }
            }
        }
    }
}

/// It has been done already; only its answer waits.
fn is_settling(task: &Task) -> bool {
    matches!(task.stage, Stage::Settling)
}
