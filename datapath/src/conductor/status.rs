//! What people see of a volume.

use std::sync::Arc;

use lh_block::Epoch;
use lh_wire::LayerInfo;

use super::{Conductor, Limits, Opening, Output, Phase, Role, Seat};
use crate::message::MemberId;

/// How a volume does as a whole; Longhorn's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Robustness {
    /// Every configured replica is a member.
    Healthy,
    /// It serves, with fewer members than replicas.
    Degraded,
    /// Too few members to serve.
    Faulted,
    /// It has not started yet.
    Unknown,
}

/// How a replica does; Longhorn's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Reads and writes.
    Rw,
    /// Is being rebuilt: writes only.
    Wo,
    /// Out.
    Err,
}

/// How far a rebuild is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes looked at.
    pub done: u64,
    /// Bytes to be looked at, as far as is known: what both sides hold nothing of is not counted.
    pub total: u64,
    /// Bytes that differed and were copied.
    pub copied: u64,
}

/// One replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Its place in the queues' counters.
    pub member: MemberId,
    /// Its name.
    pub name: String,
    /// How it does.
    pub mode: Mode,
    /// A session with it is up.
    pub connected: bool,
    /// Its rebuild, if there is one.
    pub rebuild: Option<Progress>,
    /// Why it was lost or not reached last.
    pub last_error: Option<String>,
}

/// What happened since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Blocks that differed between members and were made equal.
    pub repaired_blocks: u64,
    /// Chunks that were in doubt and are not any more.
    pub resolved_chunks: u64,
    /// Epochs made.
    pub epochs: u64,
    /// Rebuilds finished.
    pub rebuilds: u64,
    /// Blocks that rebuilds found different and copied.
    pub rebuilt_blocks: u64,
    /// Snapshots taken.
    pub snapshots: u64,
    /// Blocks that reads found rotten, and that were then found on some replica.
    pub rotten_blocks: u64,
    /// Blocks of these that are sound again.
    pub mended_blocks: u64,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// As a whole.
    pub robustness: Robustness,
    /// The device may be shown.
    pub open: bool,
    /// What a start or a volume without enough members waits for.
    pub waiting_for: Option<String>,
    /// It waits for members: too few are left to go on.
    pub lacks_members: bool,
    /// Its replicas, in the order of the table.
    pub replicas: Vec<ReplicaStatus>,
    /// The epoch that counts.
    pub epoch: Option<Epoch>,
    /// Size in bytes.
    pub size: u64,
    /// Its layers, base first, the head last, as last heard.
    pub chain: Arc<Vec<LayerInfo>>,
    /// Chunks still in doubt.
    pub chunks_in_doubt: u64,
    /// What replicas fold, or have folded.
    pub folds: Vec<super::FoldStatus>,
    /// The scrub that runs, or the last one.
    pub scrub: Option<super::ScrubStatus>,
    /// What happened so far.
    pub counters: Counters,
    /// Its bounds as they are now.
    pub limits: Limits,
}

impl Conductor {
    /// What happened so far.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// The volume as it is now.
    pub fn status(&self) -> Status {
        let waiting = match self.outage {
            Some(_) => Some("too few replicas are left".to_owned()),
            None => self.authority.waiting_for().or_else(|| self.waiting_for.clone()),
        };
        Status {
            robustness: self.robustness(),
            open: self.is_open(),
            waiting_for: waiting,
            lacks_members: self.outage.is_some(),
            replicas: self.replicas.configured().iter().map(|m| self.replica_status(m)).collect(),
            epoch: self.epochs.current().cloned(),
            size: self.chain.volume.size,
            chain: self.chain.volume.chain.clone(),
            chunks_in_doubt: self.doubt.len(),
            folds: self.fold_status(),
            scrub: self.scrub_status(),
            counters: self.counters,
            limits: self.desk.limits,
        }
    }

    fn robustness(&self) -> Robustness {
        let serving = self.replicas.serving().len();
        match (&self.phase, &self.opening) {
            (Phase::Stopped, _) => Robustness::Unknown,
            (_, Opening::Open) if !self.replicas.are_enough(self.replicas.serving()) => Robustness::Faulted,
            (_, Opening::Open) if serving < self.replicas.configured().len() => Robustness::Degraded,
            (_, Opening::Open) => Robustness::Healthy,
            _ => Robustness::Unknown,
        }
    }

    fn replica_status(&self, member: MemberId) -> ReplicaStatus {
        let replica = self.replicas.get(member);
        let (mode, rebuild) = match &replica.role {
            Role::Member(Seat::Serving) => (Mode::Rw, None),
            Role::Joining(rebuild) => {
                let (done, total, copied) = rebuild.progress();
                (Mode::Wo, Some(Progress { done, total, copied }))
            }
            Role::Member(Seat::Failing) | Role::Out | Role::Vacant => (Mode::Err, None),
        };
        ReplicaStatus {
            member,
            name: replica.name.clone(),
            mode,
            connected: replica.link.is_up(),
            rebuild,
            last_error: replica.last_error.clone(),
        }
    }

    /// Says so if the status is another than the one that was said last.
    pub(super) fn report(&mut self) {
        let mut status = self.status();
        for rebuild in status.replicas.iter_mut().filter_map(|r| r.rebuild.as_mut()) {
            // Every copied piece is news, but not worth waking people for: whole percents are.
            rebuild.copied = 0;
            rebuild.done = rebuild.done.saturating_mul(100) / rebuild.total.max(1);
        }
        if let Some(scrub) = &mut status.scrub {
            scrub.done = scrub.done.saturating_mul(100) / scrub.total.max(1);
        }
        if self.reported.as_ref() != Some(&status) {
            self.reported = Some(status);
            self.desk.emit(Output::StatusChanged);
        }
    }
}
