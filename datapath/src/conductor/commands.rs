//! What people ask for.

use lh_wire::{ChainOp, expansion_snapshot};

use super::{
    CHANGES_MAX, Command, CommandError, CommandId, Conductor, NewLimits, Output, Quorum, Replica,
    ReplicaConfig, Role,
};
use crate::message::{MEMBERS_MAX, MemberId};

impl Conductor {
    pub(super) fn on_command(&mut self, id: CommandId, command: Command) {
        if self.closing.is_some() && command != Command::Shutdown {
            return self.desk.emit(Output::CommandDone(id, Err(CommandError::ShuttingDown)));
        }
        let result = match command {
            Command::Snapshot { name, user_created, created, labels } => {
                self.queue_op(id, ChainOp::Snapshot { name, user_created, created, labels })
            }
            Command::RemoveSnapshot { name } => self.queue_op(id, ChainOp::MarkRemoved { name }),
            Command::Revert { name, created } => self.queue_op(id, ChainOp::Revert { name, created }),
            Command::Expand { size, created } => {
                let name = Some(expansion_snapshot(size, &self.config.volume));
                self.queue_op(id, ChainOp::Expand { name, size, created })
            }
            Command::Purge => {
                self.purge();
                self.desk.emit(Output::CommandDone(id, Ok(())));
                Ok(())
            }
            Command::SetLimits(new) => {
                self.set_limits(new);
                self.desk.emit(Output::CommandDone(id, Ok(())));
                Ok(())
            }
            Command::LookAtChain => {
                self.look_at_chain(id);
                Ok(())
            }
            Command::Scrub { .. } | Command::ScrubStop => self.scrub_command(id, &command),
            Command::AddReplica(replica) => self.add_replica(id, &replica),
            Command::RemoveReplica { name } => self.remove_replica(id, &name),
            Command::Rebuild { name } => self.rebuild_replica(id, &name),
            Command::Shutdown => {
                self.shut_down(id);
                Ok(())
            }
        };
        if let Err(why) = result {
            self.desk.emit(Output::CommandDone(id, Err(why)));
        }
    }

    fn set_limits(&mut self, new: NewLimits) {
        let limits = &mut self.desk.limits;
        limits.copies = new.copies.unwrap_or(limits.copies).max(1);
        limits.rebuild_rate = new.rebuild_rate.unwrap_or(limits.rebuild_rate);
        limits.fold_rate = new.fold_rate.unwrap_or(limits.fold_rate);
        limits.snapshots = new.snapshots.unwrap_or(limits.snapshots);
        limits.snapshot_bytes = new.snapshot_bytes.unwrap_or(limits.snapshot_bytes);
    }

    /// Names are looked at at once: nobody should wait for a turn to hear of a misspelling.
    fn queue_op(&mut self, id: CommandId, op: ChainOp) -> Result<(), CommandError> {
        if let ChainOp::Snapshot { name, .. } = &op {
            lh_block::check_name("snapshot", name)?;
        }
        if self.chain.backlog.len() >= CHANGES_MAX {
            return Err(CommandError::TooManyWait(CHANGES_MAX));
        }
        self.chain.wants(id, op, self.desk.now);
        Ok(())
    }

    fn find(&self, name: &str) -> Result<MemberId, CommandError> {
        self.replicas.find(name).ok_or_else(|| CommandError::NotFound(format!("replica {name}")))
    }

    fn add_replica(&mut self, id: CommandId, config: &ReplicaConfig) -> Result<(), CommandError> {
        lh_block::check_process_name("replica", &config.name)?;
        if self.replicas.find(&config.name).is_some() {
            return Err(CommandError::Exists(format!("replica {}", config.name)));
        }
        let replica = Replica { learner: self.learns()?, ..Replica::new(config) };
        if !self.replicas.add(replica) {
            return Err(CommandError::TooManyReplicas(MEMBERS_MAX));
        }
        self.desk.emit(Output::CommandDone(id, Ok(())));
        Ok(())
    }

    fn remove_replica(&mut self, id: CommandId, name: &str) -> Result<(), CommandError> {
        let member = self.find(name)?;
        self.check_spare(member)?;
        self.replicas.get_mut(member).unwanted = true;
        self.leaving.push((id, member));
        if matches!(self.replicas.get(member).role, Role::Member(_)) {
            self.lose(member, "it is taken out of the volume");
        }
        Ok(())
    }

    fn rebuild_replica(&mut self, id: CommandId, name: &str) -> Result<(), CommandError> {
        let member = self.find(name)?;
        self.check_spare(member)?;
        self.replicas.get_mut(member).thorough = true;
        // A rebuild that trusts what is known of it does not look at everything, and would be taken for the one asked for.
        if !matches!(&self.replicas.get(member).role, Role::Joining(rebuild) if rebuild.is_thorough()) {
            self.lose(member, "it is to be brought in sync anew");
        }
        self.desk.emit(Output::CommandDone(id, Ok(())));
        Ok(())
    }

    /// Whether one replica more is a learner: of two a majority is both, and the second one holds nothing yet. Beside others it counts at
    /// once, and the members have to be a majority still: else none could be made a member, nor the next engine start, before a lost
    /// one is back.
    fn learns(&self) -> Result<bool, CommandError> {
        if self.config.quorum != Quorum::Majority {
            return Ok(false);
        }
        let (counted, configured) = (self.replicas.counted().len(), self.replicas.configured().len());
        if (counted, configured) == (1, 1) {
            return Ok(true);
        }
        let replicas = self.replicas.configured().iter().count() + 1;
        let in_sync = self.replicas.serving().and(self.replicas.counted()).iter().count();
        let needed = self.config.quorum.members_min(replicas);
        if (self.serves() || counted < configured) && in_sync < needed {
            return Err(CommandError::TooFewInSync { replicas, needed, in_sync });
        }
        Ok(false)
    }

    /// Enough hold everything without this one. Before the volume is open nobody knows whether they do: one that is no member then
    /// may be made one yet, and be the only one that has everything.
    fn check_spare(&self, member: MemberId) -> Result<(), CommandError> {
        if !self.is_open() {
            return Err(CommandError::NotOpen(self.replicas.name(member).to_owned()));
        }
        let is_member = matches!(self.replicas.get(member).role, Role::Member(_));
        if is_member && !self.replicas.are_enough(self.replicas.serving().without(member)) {
            return Err(CommandError::Needed(self.replicas.name(member).to_owned()));
        }
        if self.is_only_source(member) {
            return Err(CommandError::Source(self.replicas.name(member).to_owned()));
        }
        Ok(())
    }
}
