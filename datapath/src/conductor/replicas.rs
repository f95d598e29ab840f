//! The table of the volume's replicas: what each is to it, and who are enough to go on.
//!
//! - A replica keeps its place, which is its [`MemberId`], for as long as it is in the volume; a place that was vacated is taken
//!   again. So no answer of who had it before may be left when somebody new gets it: it is vacated only once its link is down.
//! - No two sessions have the same number, whoever they are with.
//! - One that learns is none of those who are enough (`docs/decisions/0023-the-second-of-a-majority-learns-first.md`).

use lh_block::Epoch;
use lh_wire::ReplicaState;

use super::links::Link;
use super::rebuild::Rebuild;
use super::sabotage::sabotaged;
use super::{Config, Quorum, ReplicaConfig};
use crate::message::{MEMBERS_MAX, MemberId, MemberSet};

/// What a replica is to the volume.
#[derive(Debug)]
pub(super) enum Role {
    /// Its place in the table is free.
    Vacant,
    /// Holds nothing that counts.
    Out,
    /// Is being brought in sync.
    Joining(Box<Rebuild>),
    /// In the epoch. While the engine starts: chosen to be in it.
    Member(Seat),
}

/// How a member does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seat {
    /// Well.
    Serving,
    /// Its session is over. It is about to be put out; or, if too few are left without it, it is waited for.
    Failing,
}

/// A replica of the table.
#[derive(Debug)]
pub(super) struct Replica {
    pub(super) name: String,
    pub(super) local: bool,
    pub(super) link: Link,
    /// Its session was the so many-th that came to be with anybody: that of a lower number is older.
    pub(super) nth_session: u64,
    pub(super) role: Role,
    /// As it said in this session; taken away whenever it may have changed.
    pub(super) state: Option<Box<ReplicaState>>,
    /// Every queue sends writes to it, or waits for it.
    pub(super) attached: bool,
    /// To be taken out of the table once it is out of the epoch.
    pub(super) unwanted: bool,
    /// Its next rebuild trusts nothing that is known of it.
    pub(super) thorough: bool,
    /// No majority has it: as [`ReplicaConfig::learner`], or since it was added.
    pub(super) learner: bool,
    /// It was told to be a learner when this engine began: it may have come in sync before, which nobody has noted.
    pub(super) noted_learner: bool,
    /// Starts of this engine that began again because it was lost.
    pub(super) spoilt: u32,
    /// No rebuild before this time, and how long the next failure makes it wait.
    pub(super) rebuild_at: u64,
    pub(super) backoff: u64,
    pub(super) last_error: Option<String>,
}

impl Replica {
    pub(super) fn new(config: &ReplicaConfig) -> Self {
        Self {
            name: config.name.clone(),
            local: config.local,
            link: Link::Down { retry_at: 0 },
            nth_session: 0,
            role: Role::Out,
            state: None,
            attached: false,
            unwanted: false,
            thorough: false,
            learner: config.learner,
            noted_learner: config.learner,
            spoilt: 0,
            rebuild_at: 0,
            backoff: 0,
            last_error: None,
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Replicas {
    table: Vec<Replica>,
    /// How many sessions were ever begun.
    sessions: u64,
    /// How many of them came to be.
    connected: u64,
    quorum: Quorum,
    /// Half of them are a majority, for a test.
    half_suffices: bool,
}

impl Replicas {
    pub(super) fn new(config: &Config) -> Self {
        let mut table: Vec<Replica> = config.replicas.iter().map(Replica::new).collect();
        let counted = table.iter().filter(|r| !r.learner).count();
        let one_learns = config.quorum == Quorum::Majority && (counted, table.len()) == (1, 2);
        table.iter_mut().for_each(|r| r.learner &= one_learns);
        let half_suffices = sabotaged!(in config, half_suffices);
        Self { table, sessions: 0, connected: 0, quorum: config.quorum, half_suffices }
    }

    pub(super) fn get(&self, member: MemberId) -> &Replica {
        &self.table[usize::from(member.0)]
    }

    pub(super) fn get_mut(&mut self, member: MemberId) -> &mut Replica {
        &mut self.table[usize::from(member.0)]
    }

    pub(super) fn name(&self, member: MemberId) -> &str {
        &self.get(member).name
    }

    /// What the replica has said of itself.
    pub(super) fn state(&self, member: MemberId) -> Option<&ReplicaState> {
        self.get(member).state.as_deref()
    }

    /// All places, also vacant ones.
    pub(super) fn ids(&self) -> impl Iterator<Item = MemberId> + use<> {
        (0..u8::try_from(self.table.len()).unwrap_or(u8::MAX)).map(MemberId)
    }

    pub(super) fn select(&self, which: impl Fn(&Replica) -> bool) -> MemberSet {
        self.ids().filter(|m| which(self.get(*m))).collect()
    }

    /// Replicas of the volume, whatever they are.
    pub(super) fn configured(&self) -> MemberSet {
        self.select(|r| !matches!(r.role, Role::Vacant))
    }

    /// Those of which a majority is one.
    pub(super) fn counted(&self) -> MemberSet {
        self.select(|r| !matches!(r.role, Role::Vacant) && !r.learner)
    }

    /// Members of the epoch; while the engine starts: the chosen.
    pub(super) fn members(&self) -> MemberSet {
        self.select(|r| matches!(r.role, Role::Member(_)))
    }

    pub(super) fn serving(&self) -> MemberSet {
        self.select(|r| matches!(r.role, Role::Member(Seat::Serving)))
    }

    pub(super) fn failing(&self) -> MemberSet {
        self.select(|r| matches!(r.role, Role::Member(Seat::Failing)))
    }

    /// Replicas being rebuilt.
    pub(super) fn joining(&self) -> MemberSet {
        self.select(|r| matches!(r.role, Role::Joining(_)))
    }

    /// Replicas being rebuilt to which every write goes.
    pub(super) fn attached_joiners(&self) -> MemberSet {
        self.select(|r| r.attached && matches!(r.role, Role::Joining(_)))
    }

    /// Those of the set whom a request can be sent to.
    pub(super) fn linked(&self, members: MemberSet) -> MemberSet {
        members.iter().filter(|m| self.get(*m).link.is_up()).collect()
    }

    /// The queues are not done with somebody's last session.
    pub(super) fn is_closing_links(&self) -> bool {
        self.ids().any(|m| matches!(self.get(m).link, Link::Closing(_)))
    }

    /// A member of the epoch is connected and has not said yet what it holds. It may be the one that has everything, and is
    /// lost itself if it takes too long.
    pub(super) fn is_answering(&self, epoch: Option<&Epoch>) -> bool {
        let in_epoch = |m: &MemberId| epoch.is_none_or(|e| e.has(self.name(*m)));
        self.linked(self.configured()).iter().filter(in_epoch).any(|m| self.get(m).state.is_none())
    }

    /// One of the set, a local one if there is one.
    pub(super) fn nearest(&self, of: MemberSet) -> Option<MemberId> {
        of.iter().min_by_key(|m| (!self.get(*m).local, *m))
    }

    /// Names of the set, in the order of epochs.
    pub(super) fn names_of(&self, members: MemberSet) -> Vec<String> {
        let mut names: Vec<String> = members.iter().map(|m| self.name(m).to_owned()).collect();
        names.sort_unstable();
        names
    }

    pub(super) fn find(&self, name: &str) -> Option<MemberId> {
        self.configured().iter().find(|m| self.name(*m) == name)
    }

    /// Fewer members cannot go on.
    pub(super) fn members_min(&self) -> u32 {
        let counted = self.counted().iter().count();
        let min = match self.quorum {
            Quorum::Majority if self.half_suffices => counted.div_ceil(2),
            quorum => quorum.members_min(counted),
        };
        u32::try_from(min).unwrap_or(u32::MAX)
    }

    /// These can go on: one that learns is none of those who are enough.
    pub(super) fn are_enough(&self, members: MemberSet) -> bool {
        members.and(self.counted()).len() >= self.members_min()
    }

    /// Gives the replica a place, that of one that has left if there is such; false if the table is full.
    pub(super) fn add(&mut self, replica: Replica) -> bool {
        let free = self.ids().find(|m| matches!(self.get(*m).role, Role::Vacant));
        match free {
            Some(member) => *self.get_mut(member) = replica,
            None if self.table.len() < MEMBERS_MAX => self.table.push(replica),
            None => return false,
        }
        true
    }

    /// A session with it is begun: its number.
    pub(super) fn begin_session(&mut self, member: MemberId) -> u64 {
        self.sessions += 1;
        let session = self.sessions;
        self.get_mut(member).link = Link::Connecting { session };
        session
    }

    /// The session has come to be.
    pub(super) fn connected(&mut self, member: MemberId, session: u64) {
        self.connected += 1;
        self.get_mut(member).nth_session = self.connected;
        self.get_mut(member).link = Link::Up { session };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::conductor::{Limits, Sabotage};
    use crate::shared::Shared;

    fn replicas(quorum: Quorum, learners: &[bool]) -> Replicas {
        let names = ["b", "a", "c"];
        let replica = |(n, learner): (usize, &bool)| ReplicaConfig {
            name: names[n].into(),
            local: false,
            learner: *learner,
        };
        Replicas::new(&Config {
            volume: "demo".into(),
            generation: lh_block::Generation::default(),
            instance: lh_block::Instance(1),
            quorum,
            replicas: learners.iter().enumerate().map(replica).collect(),
            queues: 1,
            size: 4096,
            shared: Arc::new(Shared::new(4096, 4096)),
            known_dead: false,
            limits: Limits::default(),
            sabotage: Sabotage::default(),
        })
    }

    fn set(members: &[u8]) -> MemberSet {
        members.iter().map(|m| MemberId(*m)).collect()
    }

    #[test]
    fn one_that_learns_is_none_of_those_who_are_enough() {
        let two = replicas(Quorum::Majority, &[false, true]);
        assert!(two.are_enough(set(&[0])) && !two.are_enough(set(&[1])));
        let three = replicas(Quorum::Majority, &[false, false, true]);
        assert!(three.are_enough(set(&[0, 2])) && !three.are_enough(set(&[2])), "of three nobody learns");
        let any = replicas(Quorum::Any, &[false, true]);
        assert!(any.are_enough(set(&[1])) && !any.are_enough(MemberSet::EMPTY));
    }

    #[test]
    fn who_has_left_counts_for_nothing_and_leaves_its_place() {
        let mut three = replicas(Quorum::Majority, &[false; 3]);
        assert_eq!((three.members_min(), three.names_of(three.configured())), (2, names(&["a", "b", "c"])));
        three.get_mut(MemberId(1)).role = Role::Vacant;
        three.get_mut(MemberId(2)).role = Role::Vacant;
        assert_eq!((three.members_min(), three.find("a"), three.find("b")), (1, None, Some(MemberId(0))));
        let new = Replica::new(&ReplicaConfig { name: "d".into(), local: false, learner: false });
        assert!(three.add(new));
        assert_eq!((three.find("d"), three.ids().count()), (Some(MemberId(1)), 3));
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn no_two_sessions_have_one_number() {
        let mut two = replicas(Quorum::Any, &[false; 2]);
        let sessions = [0, 1, 0].map(|m| two.begin_session(MemberId(m)));
        assert_eq!(sessions, [1, 2, 3]);
        assert_eq!(two.get(MemberId(0)).link, Link::Connecting { session: 3 });
    }
}
