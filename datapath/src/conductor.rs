//! The volume as a whole: which replicas are members, and the changes that all queues make together.
//!
//! - Nobody is forgotten before the epoch without it is durable on all who stay, and stored by the authority
//!   (`docs/invariants.md`, 1 and 12). No two epochs of one volume have the same order.
//! - Nothing is answered before chain operations are finished, ranges in doubt are equal, and no older engine can
//!   answer reads (4, 9, 12).
//! - A replica becomes a member only when it holds everything (8).
//! - A chain operation is carried out by all members or by none (9).
//!
//! ```text
//!  Collecting --> Finishing --> Recording --> Attaching --> Repairing --> Running --> Stopped
//!      ^             |             |             |              |            |
//!      +-------------+-------------+-------------+--------------+   (a chosen member fails before the volume opened)
//! ```
//!
//! The machine looks at what it knows and what it waits for, and takes every step that has become possible
//! ([`Conductor::apply`] ends in `advance`). So a step never has to know which event made it possible, and an event
//! that comes twice or late changes nothing.
//!
//! What it knows lies with the rules for it, each part in a type of its own: who the replicas are and who are
//! enough (`replicas`), what the authority has (`authority`), which epoch counts and which is next
//! (`epochs`), what the chain is and what is being done to it (`chain`). What goes out, and what is
//! not answered yet, is on the desk (`desk`).

mod ask;
mod authority;
mod branch;
mod chain;
mod choose;
mod close;
mod commands;
mod desk;
mod epochs;
mod event;
mod fold;
mod intent;
mod links;
mod look;
mod membership;
mod outage;
mod rebuild;
mod repair;
mod replicas;
mod rounds;
mod sabotage;
mod scrub;
mod send;
mod start;
mod status;

use std::sync::Arc;

use lh_block::Generation;

pub use event::{
    Body, CHANGES_MAX, Command, CommandError, CommandId, Config, ConnectError, Input, Limits, NewLimits,
    Output, Quorum, Refusal, ReplicaConfig, Stored, Why,
};
pub use fold::FoldStatus;
pub use sabotage::Sabotage;
pub use scrub::{Finding, Flaw, Mend, ScrubStatus};
pub use status::{Counters, Mode, Progress, ReplicaStatus, Robustness, Status};

use ask::{Attempts, Ballot, ControlFor, JobFor};
use authority::AuthorityView;
use chain::Chain;
use close::Closing;
use desk::Desk;
use epochs::Epochs;
use fold::Folds;
use intent::Clearing;
use links::Link;
use look::Looks;
use membership::Change;
use outage::Outage;
use rebuild::Pace;
use repair::{Doubt, InDoubt};
use replicas::{Replica, Replicas, Role, Seat};
use rounds::Rounds;
use sabotage::sabotaged;
use scrub::Scrubs;

use crate::message::{ControlId, FromQueue, Job, MemberId, MemberSet, QUEUES_MAX, QueueId, SwitchId};
use crate::shared::Shared;

/// Where the engine is between its first connection and its end.
#[derive(Debug)]
enum Phase {
    /// Connecting, reading states, until there is something to start with. `since`: when a start became possible.
    Collecting { since: Option<u64> },
    /// Chain operations of engines before are finished or taken back. `asked`: on these replicas, as of now.
    Finishing { asked: MemberSet },
    /// The first epoch of this engine is on its way.
    Recording,
    /// Every queue gets its links.
    Attaching(Vec<SwitchId>),
    /// Ranges in doubt are made equal.
    Repairing(InDoubt),
    /// All else.
    Running,
    /// The end.
    Stopped,
}

/// Whether clients are served.
#[derive(Debug)]
enum Opening {
    /// Not yet: queues are paused from their start.
    Shut,
    /// The last switches before it.
    Unlocking(Vec<SwitchId>),
    /// Yes, since some time.
    Open,
}

/// Of the [`Config`], what stays as it was: the [`Desk`] has the limits, and the replicas are in their table.
#[derive(Debug)]
struct Fixed {
    volume: String,
    generation: Generation,
    quorum: Quorum,
    size: u64,
    shared: Arc<Shared>,
    known_dead: bool,
    #[cfg(feature = "sabotage")]
    sabotage: Sabotage,
}

impl Fixed {
    fn of(config: Config) -> Self {
        Self {
            volume: config.volume,
            generation: config.generation,
            quorum: config.quorum,
            size: config.size,
            shared: config.shared,
            known_dead: config.known_dead,
            #[cfg(feature = "sabotage")]
            sabotage: config.sabotage,
        }
    }
}

/// The conductor of one volume. See the module's documentation.
#[derive(Debug)]
pub struct Conductor {
    config: Fixed,
    desk: Desk,
    phase: Phase,
    opening: Opening,
    replicas: Replicas,
    authority: AuthorityView,
    epochs: Epochs,
    change: Option<Change>,
    attempts: Attempts,
    chain: Chain,
    /// No first answer before.
    lease_until: u64,
    doubt: Doubt,
    outage: Option<Outage>,
    looks: Looks,
    rounds: Rounds,
    clearing: Clearing,
    pace: Pace,
    folds: Folds,
    scrubs: Scrubs,
    closing: Option<Closing>,
    /// Commands that end when their replica has left.
    leaving: Vec<(CommandId, MemberId)>,
    waiting_for: Option<String>,
    counters: Counters,
    reported: Option<Status>,
}

impl Conductor {
    /// A conductor that has not begun: the first input, for example [`Input::Tick`], makes it connect.
    ///
    /// # Panics
    /// Without queues, or with more than [`QUEUES_MAX`] queues or [`crate::message::MEMBERS_MAX`] replicas.
    pub fn new(config: Config) -> Self {
        assert!((1..=QUEUES_MAX).contains(&config.queues), "1 to {QUEUES_MAX} queues");
        assert!(config.replicas.len() <= crate::message::MEMBERS_MAX, "too many replicas");
        Self {
            phase: Phase::Collecting { since: None },
            opening: Opening::Shut,
            replicas: Replicas::new(&config),
            authority: AuthorityView::new(config.quorum),
            epochs: Epochs::new(&config),
            change: None,
            attempts: Attempts::default(),
            chain: Chain::new(config.instance, config.size),
            lease_until: 0,
            doubt: Doubt::default(),
            outage: None,
            looks: Looks::default(),
            rounds: Rounds::default(),
            clearing: Clearing::default(),
            pace: Pace::default(),
            folds: Folds::default(),
            scrubs: Scrubs::default(),
            closing: None,
            leaving: Vec::new(),
            waiting_for: None,
            counters: Counters::default(),
            reported: None,
            desk: Desk::new(&config),
            config: Fixed::of(config),
        }
    }

    /// Takes one input in and appends what is to be done about it. `now` is in nanoseconds and never goes back.
    pub fn apply(&mut self, now: u64, input: Input, out: &mut Vec<Output>) {
        if matches!(self.phase, Phase::Stopped) {
            return;
        }
        self.desk.now = now;
        self.take(input);
        self.expire();
        while !matches!(self.phase, Phase::Stopped) && self.advance() {}
        self.config.shared.set_patient(self.is_patient());
        self.config.shared.set_members_min(self.replicas.members_min());
        self.tell_what_chain_waits_for();
        self.report();
        self.desk.hand_over(out);
    }

    /// When [`Input::Tick`] is wanted at the latest, on the clock of [`Conductor::apply`].
    pub fn wake_at(&self) -> Option<u64> {
        let times = [
            self.desk.controls.next_deadline(),
            self.next_retry(),
            self.start_deadline(),
            self.outage_deadline(),
            self.authority.retry_at(),
            self.rebuild_deadline(),
            self.clearing_deadline(),
            self.closing.as_ref().map(Closing::deadline),
            self.doubt_deadline(),
            self.chain_deadline(),
            self.fold_deadline(),
            self.scrub_deadline(),
        ];
        times.into_iter().flatten().min().filter(|_| !matches!(self.phase, Phase::Stopped))
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::AuthorityLoaded(epoch) => self.authority.loaded(epoch),
            Input::AuthorityStored(stored) => self.on_stored(stored),
            Input::Connected { member, session } => self.on_connected(member, session),
            Input::ConnectFailed { member, session, why } => self.on_connect_failed(member, session, why),
            Input::Disconnected { member, session } => self.on_disconnected(member, session),
            Input::Reply { id, member, result } => self.on_reply(id, member, result),
            Input::FromQueue(queue, message) => self.on_queue(queue, message),
            Input::Command(id, command) => self.on_command(id, command),
            Input::Tick => {}
        }
    }

    fn on_queue(&mut self, queue: QueueId, message: FromQueue) {
        match message {
            FromQueue::Switched(id) => self.desk.switches.answered(id, queue),
            FromQueue::JobDone(id, result) => {
                if let Some(purpose) = self.desk.jobs.answered(id) {
                    self.on_job(purpose, result);
                }
            }
            FromQueue::ControlLost(id, member) => {
                if self.desk.controls.answered(id).is_some() {
                    self.lose(member, "the connection broke");
                }
            }
            FromQueue::Failed(member, fault) => self.on_failed(member, fault),
            FromQueue::Stale(member) => {
                let by = format!("replica {} has seen a younger engine", self.replicas.name(member));
                self.stop(Why::Stale { by, seen: None });
            }
            FromQueue::ChunkWanted(chunk) => self.on_chunk_wanted(queue, chunk),
            FromQueue::Rotten(member, range) => self.on_rotten_read(member, range),
            FromQueue::Unreadable(member, range) => self.on_unreadable(member, range),
        }
    }

    fn on_job(&mut self, purpose: JobFor, result: crate::message::JobResult) {
        match purpose {
            JobFor::InDoubt(piece) => self.on_in_doubt_copied(piece, result),
            JobFor::Chunk(chunk) => self.on_chunk_copied(chunk, result),
            JobFor::Rebuild(member, attempt, piece) => self.on_piece_copied(member, attempt, piece, result),
            JobFor::RebuildFlush(member, attempt) => self.on_rebuild_flushed(member, attempt, result),
            JobFor::ChainFlush(task) => self.on_chain_flushed(task, result),
            JobFor::Scrub(attempt, step) => self.on_scrubbed(attempt, step, result),
            JobFor::ClearIntent => {}
            JobFor::IntentFlush => self.clearing.flushed(),
            JobFor::CloseFlush => self.on_close_flushed(result),
        }
    }

    fn on_reply(&mut self, id: ControlId, member: MemberId, result: Result<Body, Refusal>) {
        let Some(purpose) = self.desk.answered(id, member) else { return };
        match result {
            Err(Refusal::Stale) => {
                let by = format!("replica {} has seen a younger engine", self.replicas.name(member));
                self.stop(Why::Stale { by, seen: None });
            }
            Err(Refusal::Failed) => self.lose(member, "the replica failed"),
            Ok(Body::State(state)) if purpose == ControlFor::Fold => self.on_fold_state(member, &state),
            Ok(Body::State(state)) => match purpose {
                ControlFor::Hash(attempt) => self.on_hashing(member, attempt, Some(&state)),
                ControlFor::Doubt(look) => self.on_doubt_state(member, look, state),
                ControlFor::Look => self.on_looked(member, *state),
                _ => self.on_state(member, state),
            },
            Ok(Body::Map(page)) => self.on_page(member, purpose, *page),
            Ok(Body::Done) => self.on_yes(member, purpose),
            Err(Refusal::NoSpace) => self.on_no(member, purpose, "no space left on its disk"),
            Err(Refusal::Said(text)) => self.on_no(member, purpose, &text),
        }
    }

    fn on_yes(&mut self, member: MemberId, purpose: ControlFor) {
        match purpose {
            ControlFor::State | ControlFor::Look | ControlFor::Counts => {}
            ControlFor::Epoch(change) => self.on_epoch_recorded(member, change),
            ControlFor::Chain(task) => self.on_chain_yes(member, task),
            ControlFor::Finish => self.ask_state(member),
            ControlFor::Resolved => self.doubt.told.says_yes(member),
            ControlFor::Round(ballot) => self.rounds.says_yes(member, ballot),
            ControlFor::Rebuild(attempt) => self.on_rebuild_yes(member, attempt),
            ControlFor::Fold => self.on_fold_yes(member),
            // These are answered with pages, and with a state.
            ControlFor::Missed(..)
            | ControlFor::Map { .. }
            | ControlFor::Scrub(..)
            | ControlFor::Doubt(_) => {}
            ControlFor::Hash(attempt) => self.on_hashing(member, attempt, None),
            ControlFor::Close => self.on_closed(member),
        }
    }

    fn on_no(&mut self, member: MemberId, purpose: ControlFor, text: &str) {
        match purpose {
            ControlFor::Chain(task) => self.on_chain_no(member, task, text),
            ControlFor::Rebuild(attempt) => self.on_rebuild_no(member, attempt, text),
            ControlFor::Missed(target, attempt) => self.on_missed(target, attempt, member, None),
            ControlFor::Map { target, attempt, .. } => self.on_no_map(target, attempt, text),
            ControlFor::Fold => self.on_fold_no(member, text),
            ControlFor::Scrub(attempt, number) => self.on_no_scrub_map(attempt, number, text),
            ControlFor::Hash(attempt) => self.on_no_hash(member, attempt, text),
            ControlFor::Round(_) => self.on_round_refused(member, text),
            ControlFor::Counts => {}
            ControlFor::State
            | ControlFor::Look
            | ControlFor::Epoch(_)
            | ControlFor::Finish
            | ControlFor::Doubt(_)
            | ControlFor::Resolved
            | ControlFor::Close => self.lose(member, text),
        }
    }

    fn on_page(&mut self, member: MemberId, purpose: ControlFor, page: lh_wire::MapPage) {
        match purpose {
            ControlFor::Missed(target, attempt) => self.on_missed(target, attempt, member, Some(page)),
            ControlFor::Map { target, attempt, side, number } => {
                self.on_map(target, attempt, side, number, page);
            }
            ControlFor::Scrub(attempt, number) => self.on_scrub_map(attempt, number, member, page),
            _ => {}
        }
    }

    /// Takes every step that is possible now; true if one was taken and there may be more.
    fn advance(&mut self) -> bool {
        self.advance_links()
            || self.advance_store()
            || self.advance_change()
            || self.advance_start()
            || self.advance_outage()
            || self.advance_opening()
            || self.advance_doubt()
            || self.advance_chain()
            || self.advance_looks()
            || self.advance_rebuilds()
            || self.advance_folds()
            || self.advance_scrub()
            || self.advance_rounds()
            || self.advance_clearing()
            || self.advance_closing()
    }

    /// What waited too long.
    fn expire(&mut self) {
        for (member, what) in self.desk.overdue() {
            self.lose(member, &format!("no answer to {what}"));
        }
    }

    fn stop(&mut self, why: Why) {
        if !matches!(self.phase, Phase::Stopped) {
            self.phase = Phase::Stopped;
            self.desk.log(format!("engine stops: {why}"));
            self.desk.emit(Output::Stop(why));
        }
    }

    fn is_open(&self) -> bool {
        matches!(self.opening, Opening::Open)
    }

    /// Nothing changes in the membership, and nobody is failing.
    fn is_calm(&self) -> bool {
        self.change.is_none()
            && !self.authority.is_storing()
            && self.outage.is_none()
            && self.replicas.failing().is_empty()
    }
}
