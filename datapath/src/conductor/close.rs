//! The clean end: paused, flushed, every replica closed. The next start then has nothing to repair.
//!
//! If that cannot be done, because too few members are left or chunks are still in doubt, the engine ends without it:
//! the next start repairs, as after a crash.

use lh_wire::Control;

use super::{
    Ballot, CommandError, CommandId, Conductor, ControlFor, Job, JobFor, Opening, Output, Phase, Why,
    sabotaged,
};
use crate::message::{JobResult, MemberId, Switch, SwitchId};

/// The end, on its way.
#[derive(Debug)]
pub(super) struct Closing {
    commands: Vec<CommandId>,
    stage: Stage,
    pub(super) ballot: Ballot,
    deadline: u64,
}

#[derive(Debug)]
enum Stage {
    /// What runs comes to its end.
    Waiting,
    Pausing(SwitchId),
    Flushing {
        flying: bool,
    },
    /// Whatever is copied from before this is behind: the marks go with the close.
    Agreeing,
    Closing,
    Stopping(SwitchId, Why),
}

impl Closing {
    pub(super) const fn deadline(&self) -> u64 {
        self.deadline
    }
}

impl Conductor {
    pub(super) fn shut_down(&mut self, command: CommandId) {
        for (waiting, _) in std::mem::take(&mut self.chain.backlog) {
            self.desk.emit(Output::CommandDone(waiting, Err(CommandError::ShuttingDown)));
        }
        self.end_all_looks();
        match self.closing.as_mut() {
            Some(closing) => closing.commands.push(command),
            None => {
                let deadline = self.desk.now.saturating_add(self.desk.limits.close_ns);
                let (stage, ballot) = (Stage::Waiting, Ballot::default());
                self.closing = Some(Closing { commands: vec![command], stage, ballot, deadline });
            }
        }
    }

    pub(super) fn advance_closing(&mut self) -> bool {
        let Some(mut closing) = self.closing.take() else { return false };
        if self.desk.now >= closing.deadline {
            match &closing.stage {
                Stage::Stopping(_, why) => self.stop(why.clone()),
                _ => drop(self.end(&mut closing, Why::Unclean("the replicas took too long".into()))),
            }
        }
        let moved = match closing.stage {
            Stage::Waiting => self.begin_close(&mut closing),
            Stage::Pausing(switch) => {
                self.desk.switches.done(switch) && self.is_calm() && {
                    closing.stage = Stage::Flushing { flying: false };
                    true
                }
            }
            Stage::Flushing { flying: false } => {
                self.desk.give(JobFor::CloseFlush, Job::Flush);
                closing.stage = Stage::Flushing { flying: true };
                true
            }
            Stage::Flushing { flying: true } => false,
            Stage::Agreeing => {
                self.rounds.are_settled(self.desk.now) && {
                    closing.stage = Stage::Closing;
                    true
                }
            }
            Stage::Closing => self.close_members(&mut closing),
            Stage::Stopping(switch, ref why) => {
                let (done, why) = (self.desk.switches.done(switch), why.clone());
                if done {
                    for command in closing.commands.drain(..) {
                        self.desk.emit(Output::CommandDone(command, Ok(())));
                    }
                    self.stop(why);
                }
                done
            }
        };
        self.closing = Some(closing);
        moved
    }

    /// Waits for what runs; or sees that a clean end is not to be had.
    fn begin_close(&mut self, closing: &mut Closing) -> bool {
        if matches!(self.opening, Opening::Shut) || !matches!(self.phase, Phase::Running) {
            return self.end(closing, Why::Unopened);
        }
        if self.outage.is_some() {
            return self.end(closing, Why::Unclean("too few replicas are left".into()));
        }
        if !self.is_open() || self.chain.is_busy() || !self.is_calm() {
            return false;
        }
        if !self.replicas.joining().is_empty() {
            self.drop_rebuilds("the volume is being stopped");
            return true;
        }
        closing.stage = Stage::Pausing(self.desk.switch(Switch::Pause));
        true
    }

    pub(super) fn on_close_flushed(&mut self, result: JobResult) {
        let Some(mut closing) = self.closing.take() else { return };
        if matches!(closing.stage, Stage::Flushing { .. }) {
            let blind = sabotaged!(self, close_in_doubt);
            if !self.doubt.is_empty() && !blind {
                self.end(&mut closing, Why::Unclean("chunks are still in doubt".into()));
            } else if matches!(result, JobResult::Done { .. }) || blind {
                if !sabotaged!(self, rounds_unasked) {
                    self.rounds.want_two_more();
                }
                closing.stage = Stage::Agreeing;
            } else {
                closing.stage = Stage::Waiting;
            }
        }
        self.closing = Some(closing);
    }

    fn close_members(&mut self, closing: &mut Closing) -> bool {
        // Who is closed records no epoch, and takes no copy.
        if !self.is_calm() || !self.doubt.is_empty() && !sabotaged!(self, close_in_doubt) {
            return false;
        }
        let members = self.replicas.members();
        self.poll(&mut closing.ballot, members, ControlFor::Close, &Control::Close);
        closing.ballot.complete(members) && self.end(closing, Why::Clean)
    }

    pub(super) fn on_closed(&mut self, member: MemberId) {
        if let Some(closing) = self.closing.as_mut() {
            closing.ballot.says_yes(member);
        }
    }

    /// Whoever still waits hears that the volume stops; then the engine does.
    fn end(&mut self, closing: &mut Closing, why: Why) -> bool {
        let switch = self.desk.switch(Switch::Stop);
        closing.deadline = self.desk.now.saturating_add(self.desk.limits.control_ns);
        closing.stage = Stage::Stopping(switch, why);
        true
    }
}
