//! Sessions with replicas: made, lost, made again.
//!
//! After a session has ended every queue is told to be done with it ([`Switch::StopReads`] for a member,
//! [`Switch::Forget`] for anybody else), and no new session begins before all have answered: so nothing that a queue
//! says of the old session can be taken for something about the new one.

use super::{Ballot, Conductor, ConnectError, Output, Phase, Role, Seat, Why};
use crate::message::{Fault, MemberId, Switch, SwitchId};

/// The session with a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// None.
    Down {
        /// The next attempt, if one is wanted.
        retry_at: u64,
    },
    /// The driver tries.
    Connecting {
        /// The session's number.
        session: u64,
    },
    /// The replica is fenced for this engine.
    Up {
        /// The session's number.
        session: u64,
    },
    /// Over; the queues have not all answered yet.
    Closing(SwitchId),
}

impl Link {
    pub(super) const fn is_up(self) -> bool {
        matches!(self, Self::Up { .. })
    }
}

impl Conductor {
    pub(super) fn advance_links(&mut self) -> bool {
        for member in self.replicas.ids() {
            match self.replicas.get(member).link {
                Link::Closing(switch) if self.desk.switches.done(switch) => {
                    let retry_at = self.desk.now.saturating_add(self.desk.limits.retry_ns);
                    self.replicas.get_mut(member).link = Link::Down { retry_at };
                    return true;
                }
                Link::Up { .. } if self.is_unwanted(member) || self.has_come_back_unwanted(member) => {
                    self.lose(member, "it is taken out of the volume");
                    return true;
                }
                Link::Down { .. } if self.is_unwanted(member) => {
                    self.vacate(member);
                    return true;
                }
                Link::Down { retry_at } if retry_at <= self.desk.now && self.is_missed(member) => {
                    self.connect(member);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    /// A session with the replica is wanted.
    fn is_missed(&self, member: MemberId) -> bool {
        let replica = self.replicas.get(member);
        match replica.role {
            Role::Vacant => false,
            Role::Member(_) => self.wants_back(member),
            Role::Out | Role::Joining(_) => !replica.unwanted && self.closing.is_none(),
        }
    }

    /// To be taken out of the table now.
    fn is_unwanted(&self, member: MemberId) -> bool {
        let replica = self.replicas.get(member);
        replica.unwanted && matches!(replica.role, Role::Out | Role::Joining(_))
    }

    /// It was a member that was needed after it had been told to leave, and is needed no more.
    fn has_come_back_unwanted(&self, member: MemberId) -> bool {
        let replica = self.replicas.get(member);
        let serves = replica.unwanted && matches!(replica.role, Role::Member(Seat::Serving));
        serves && self.is_calm() && self.can_be_spared(member)
    }

    fn connect(&mut self, member: MemberId) {
        let session = self.replicas.begin_session(member);
        let name = self.replicas.name(member).to_owned();
        self.desk.emit(Output::Connect { member, name, session });
    }

    pub(super) fn on_connected(&mut self, member: MemberId, session: u64) {
        if self.replicas.get(member).link != (Link::Connecting { session }) {
            return;
        }
        self.replicas.connected(member, session);
        self.authority.fenced_somebody();
        self.ask_state(member);
        self.desk.log(format!("replica {} is connected", self.replicas.name(member)));
        self.on_late_member(member);
    }

    pub(super) fn on_connect_failed(&mut self, member: MemberId, session: u64, why: ConnectError) {
        if self.replicas.get(member).link != (Link::Connecting { session }) {
            return;
        }
        if let ConnectError::Stale(seen) = why {
            let by = format!("replica {} has seen generation {seen}", self.replicas.name(member));
            return self.stop(Why::Stale { by, seen: Some(seen) });
        }
        let retry_at = self.desk.now.saturating_add(self.desk.limits.retry_ns);
        let why = why.to_string();
        let replica = self.replicas.get_mut(member);
        replica.link = Link::Down { retry_at };
        // It is tried again every second: what has changed is told.
        let before = replica.last_error.replace(why.clone());
        if before.as_ref() != Some(&why) {
            self.desk.log(format!("replica {} cannot be connected to: {why}", self.replicas.name(member)));
        }
    }

    pub(super) fn on_disconnected(&mut self, member: MemberId, session: u64) {
        if self.replicas.get(member).link == (Link::Up { session }) {
            self.lose(member, "the connection broke");
        }
    }

    /// A queue wants the member out.
    pub(super) fn on_failed(&mut self, member: MemberId, fault: Fault) {
        let is_member = matches!(self.replicas.get(member).role, Role::Member(_));
        let needed = is_member && !self.can_be_spared(member);
        if needed && matches!(fault, Fault::Slow | Fault::NoSpace) {
            self.desk.log(format!(
                "replica {} is needed, though {}",
                self.replicas.name(member),
                describe(fault)
            ));
            return;
        }
        self.lose(member, describe(fault));
    }

    /// The session with the replica is over, or is ended here.
    pub(super) fn lose(&mut self, member: MemberId, why: &str) {
        if !self.replicas.get(member).link.is_up() {
            return;
        }
        self.desk.log(format!("replica {} is lost: {why}", self.replicas.name(member)));
        let seat = self.seat_after_loss(member);
        let stays = matches!(seat, Role::Member(_));
        self.desk.emit(Output::Disconnect { member });
        let switch =
            self.desk.switch(if stays { Switch::StopReads { member } } else { Switch::Forget { member } });
        self.close_link(member, switch);
        let replica = self.replicas.get_mut(member);
        replica.last_error = Some(why.to_owned());
        replica.attached &= stays;
        let before = std::mem::replace(&mut replica.role, seat);
        self.forget_answers_of(member);
        match before {
            Role::Member(_) if !stays => {
                self.replicas.get_mut(member).spoilt += 1;
                self.begin_again();
            }
            Role::Joining(_) => self.set_back(member),
            _ => {}
        }
        self.lose_source(member);
    }

    /// The link counts as closed; no new one is made before every queue has answered the switch.
    pub(super) fn close_link(&mut self, member: MemberId, switch: SwitchId) {
        if self.replicas.get(member).link.is_up() {
            self.desk.controls.forget(member);
            self.replicas.get_mut(member).state = None;
            self.replicas.get_mut(member).link = Link::Closing(switch);
        }
    }

    /// What a replica is whose session ends. Whom clients may have written to stays a member until an epoch is
    /// durable without it; so does a joiner for which an epoch counts that includes it.
    fn seat_after_loss(&self, member: MemberId) -> Role {
        match &self.replicas.get(member).role {
            Role::Vacant => Role::Vacant,
            Role::Member(_) if self.serves() => Role::Member(Seat::Failing),
            Role::Joining(rebuild) if rebuild.may_count() && self.serves() => Role::Member(Seat::Failing),
            Role::Out | Role::Joining(_) | Role::Member(_) => Role::Out,
        }
    }

    /// Nothing counts that the member said in its session.
    fn forget_answers_of(&mut self, member: MemberId) {
        self.abandon_change(member);
        self.forget_fold(member);
        self.forget_scrub(member);
        self.doubt.lost(member);
        self.looks.lost(member);
        self.chain.lost(member);
        self.rounds.lost(member);
        if let Some(closing) = self.closing.as_mut() {
            closing.ballot.lost(member);
        }
        if let Some(outage) = self.outage.as_mut() {
            outage.lost(member);
        }
    }

    /// Requests of clients may have been admitted.
    pub(super) const fn serves(&self) -> bool {
        !matches!(self.opening, super::Opening::Shut)
    }

    /// The place in the table is free from now on.
    fn vacate(&mut self, member: MemberId) {
        self.replicas.get_mut(member).role = Role::Vacant;
        self.replicas.get_mut(member).unwanted = false;
        self.desk.emit(Output::Vacated { member });
        // The next epoch tells the members that they need keep nothing for it.
        if self.is_open() {
            self.epochs.loosen();
        }
        for (command, _) in self.leaving.extract_if(.., |(_, m)| *m == member).collect::<Vec<_>>() {
            self.desk.emit(Output::CommandDone(command, Ok(())));
        }
    }

    pub(super) fn next_retry(&self) -> Option<u64> {
        let down = self.replicas.ids().filter(|m| self.is_missed(*m)).filter_map(|m| {
            match self.replicas.get(m).link {
                Link::Down { retry_at } => Some(retry_at),
                _ => None,
            }
        });
        down.min().filter(|_| !matches!(self.phase, Phase::Stopped))
    }

    /// Asks those of the set who were not asked yet and can be; true if somebody was.
    pub(super) fn poll(
        &mut self,
        ballot: &mut Ballot,
        of: crate::message::MemberSet,
        purpose: super::ControlFor,
        control: &lh_wire::Control,
    ) -> bool {
        let unasked = self.replicas.linked(ballot.unasked(of));
        for member in unasked.iter() {
            ballot.asked(member);
            self.desk.ask(member, purpose, control.clone());
        }
        !unasked.is_empty()
    }
}

const fn describe(fault: Fault) -> &'static str {
    match fault {
        Fault::Link => "the connection broke",
        Fault::Io => "its disk failed",
        Fault::NoSpace => "its disk is full",
        Fault::Ahead => "it holds a write for which no member has space: it is brought in sync anew",
        Fault::Hung => "it does not answer",
        Fault::Slow => "it is far slower than the others",
    }
}
