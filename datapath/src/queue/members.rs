//! The members as one queue sees them: links, roles, faults, and who was heard when.
//!
//! A fault is a report to the conductor, never a decision: writes go on waiting for the member until the conductor
//! has it forgotten, because only then an epoch without it is durable (`docs/invariants.md`, 1).

use lh_wire::{OpCode, Status};

use super::full::Space;
use super::latency::{Class, Latencies};
use super::slot::Stage;
use super::{Data, Output, Queue, Reply, Tag, Transmit};
use crate::message::{ControlId, Fault, FromQueue, MEMBERS_MAX, MemberId, MemberSet};

/// Control requests in flight on one link. The conductor sends a handful; the list keeps what it grew to.
const CONTROLS: usize = 8;

/// The connection of this queue to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// There is none; nothing is sent.
    Down,
    /// Carries control requests and jobs only.
    Up,
    /// Carries everything: everything that waited for the member was sent again after it came up.
    Live,
}

/// What the member is to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Nothing waits for it.
    Out,
    /// Brought in sync: written, and no client waits for it.
    Filling,
    /// Brought in sync, and waited for; no member before an epoch with it counts.
    Awaited,
    /// Written (WO), and waited for.
    WriteOnly,
    /// Written and read (RW).
    ReadWrite,
    /// About to be put out: written, not read.
    Leaving,
}

/// A ping that is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ping {
    pub number: u32,
    pub sent_at: u64,
}

/// One member.
#[derive(Debug)]
pub(super) struct Member {
    pub link: Link,
    pub role: Role,
    /// The worst that was reported since it was attached.
    pub fault: Option<Fault>,
    /// When that was, ns.
    pub fault_at: u64,
    /// When the newest request was sent that it has answered: it was no stranger then. (Not when the answer was
    /// read: that may have lain in a buffer while this process was stopped.)
    pub heard: Option<u64>,
    /// When it last answered anything.
    pub last_reply: u64,
    /// When there last was no memory to receive its answers: until then it may have answered.
    pub starved_at: Option<u64>,
    pub ping: Option<Ping>,
    pub space: Space,
    /// Reads in flight.
    pub reading: u32,
    /// Running mean of its read latency, ns. Falls while it is not read from, so that it is tried again.
    pub read_mean: u64,
    /// Control requests in flight, and when they were sent.
    pub controls: Vec<(ControlId, u64)>,
    pub latencies: Latencies,
}

impl Member {
    fn new() -> Self {
        Self {
            link: Link::Down,
            role: Role::Out,
            fault: None,
            fault_at: 0,
            heard: None,
            last_reply: 0,
            starved_at: None,
            ping: None,
            space: Space::default(),
            reading: 0,
            read_mean: 0,
            controls: Vec::with_capacity(CONTROLS),
            latencies: Latencies::default(),
        }
    }
}

/// All members, by number.
#[derive(Debug)]
pub(super) struct Members {
    all: Vec<Member>,
    attached: MemberSet,
    filling: MemberSet,
    joining: MemberSet,
    readable: MemberSet,
    live: MemberSet,
}

impl Members {
    pub(super) fn new() -> Self {
        Self {
            all: (0..MEMBERS_MAX).map(|_| Member::new()).collect(),
            attached: MemberSet::EMPTY,
            filling: MemberSet::EMPTY,
            joining: MemberSet::EMPTY,
            readable: MemberSet::EMPTY,
            live: MemberSet::EMPTY,
        }
    }

    pub(super) fn ids() -> impl Iterator<Item = MemberId> {
        (0_u8..).take(MEMBERS_MAX).map(MemberId)
    }

    /// Members that every write goes to.
    pub(super) const fn attached(&self) -> MemberSet {
        self.attached
    }

    /// Those of them that no client waits for: they are not members of the epoch.
    pub(super) const fn filling(&self) -> MemberSet {
        self.filling
    }

    /// Those of them that are not members of the epoch, whether clients wait for them or not.
    pub(super) const fn joining(&self) -> MemberSet {
        self.joining
    }

    /// Members that reads may be sent to.
    pub(super) const fn readable(&self) -> MemberSet {
        self.readable
    }

    /// Those whose link has not broken since they were attached.
    pub(super) const fn live(&self) -> MemberSet {
        self.live
    }

    pub(super) fn set_role(&mut self, m: MemberId, role: Role) {
        self[m].role = role;
        self.refresh(m);
    }

    pub(super) fn set_link(&mut self, m: MemberId, link: Link) {
        self[m].link = link;
        self.refresh(m);
    }

    fn refresh(&mut self, m: MemberId) {
        let put = |set: MemberSet, inside| if inside { set.with(m) } else { set.without(m) };
        self.attached = put(self.attached, self[m].role != Role::Out);
        self.filling = put(self.filling, self[m].role == Role::Filling);
        self.joining = put(self.joining, matches!(self[m].role, Role::Filling | Role::Awaited));
        self.live = put(self.live, self[m].link == Link::Live);
        self.readable = put(self.readable, self[m].role == Role::ReadWrite && self[m].link == Link::Live);
    }
}

impl std::ops::Index<MemberId> for Members {
    type Output = Member;
    fn index(&self, m: MemberId) -> &Member {
        &self.all[usize::from(m.0)]
    }
}

impl std::ops::IndexMut<MemberId> for Members {
    fn index_mut(&mut self, m: MemberId) -> &mut Member {
        &mut self.all[usize::from(m.0)]
    }
}

impl Queue {
    /// A new connection is there. Controls and jobs may use it; the rest follows with the switch `Attach`.
    pub(super) fn link_up(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        if self.members[m].link != Link::Down {
            // The driver replaces a connection that it never reported as broken.
            self.link_down(now, m, out);
        }
        self.members.set_link(m, Link::Up);
        let member = &mut self.members[m];
        member.fault = None;
        member.last_reply = now;
        member.latencies = Latencies::default();
    }

    /// The connection is gone: nothing sent on it will be answered any more.
    pub(super) fn link_down(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        if self.members[m].link == Link::Down {
            return;
        }
        self.members.set_link(m, Link::Down);
        let member = &mut self.members[m];
        member.ping = None;
        for (id, _) in member.controls.drain(..) {
            out.push(Output::Report(FromQueue::ControlLost(id, m)));
        }
        self.note_serving(now);
        self.report(now, m, Fault::Link, out);
        self.flush_lost(now, m, out);
        self.jobs_lost(m, out);
        for s in self.used.iter() {
            if let Some(fan) = self.slot_mut(s).fan()
                && fan.sent.has(m)
            {
                fan.sent = fan.sent.without(m);
                fan.unsure = fan.unsure.with(m);
                self.fan_lost(now, s, m, out);
            }
        }
    }

    /// The other side broke the protocol: the connection is of no use any more.
    pub(super) fn break_link(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        out.push(Output::Disconnect { member: m });
        self.link_down(now, m, out);
    }

    /// Tells the conductor, once, and reads from others what was asked of this member. It is told again if it is worse
    /// than what it knows: it need not have acted on that.
    pub(super) fn report(&mut self, now: u64, m: MemberId, fault: Fault, out: &mut Vec<Output>) {
        let member = &mut self.members[m];
        if member.fault.is_none_or(|known| severity(fault) > severity(known)) {
            member.fault = Some(fault);
            member.fault_at = now;
            out.push(Output::Report(FromQueue::Failed(m, fault)));
        }
        self.abandon_reads(now, m, out);
    }

    /// Everything that was asked of this member for reading is asked of another.
    pub(super) fn abandon_reads(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        for s in self.used.iter() {
            if matches!(self.slot(s).stage(), Stage::Reading { member, .. } if *member == m) {
                self.read_lost(now, s, m, out);
            }
        }
    }

    /// Keeps `dark_since`: since when too few can be read from to answer anybody. With a majority one of three may be there, and what
    /// it reads or writes waits for another one.
    pub(super) fn note_serving(&mut self, now: u64) {
        let too_few = self.members.readable().len() < self.shared.members_min();
        self.dark_since = if too_few { self.dark_since.or(Some(now)) } else { None };
    }

    /// Asks a member whether it is there, unless it was asked already.
    pub(super) fn ping(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        let member = &mut self.members[m];
        if member.ping.is_some() || member.link == Link::Down {
            return;
        }
        self.pings = self.pings.wrapping_add(1);
        let number = self.pings;
        member.ping = Some(Ping { number, sent_at: now });
        out.push(self.transmit(m, Tag::Ping(number), OpCode::Ping, Data::None));
    }

    /// Sends a control request for the conductor.
    pub(super) fn control(&mut self, now: u64, id: ControlId, m: MemberId, out: &mut Vec<Output>) {
        if self.members[m].link == Link::Down {
            out.push(Output::Report(FromQueue::ControlLost(id, m)));
            return;
        }
        self.members[m].controls.push((id, now));
        out.push(self.transmit(m, Tag::Control(id), OpCode::Control, Data::Control(id)));
    }

    /// A request about no range.
    pub(super) fn transmit(&self, member: MemberId, tag: Tag, op: OpCode, data: Data) -> Output {
        Output::Send(Transmit {
            member,
            tag: tag.pack(),
            op,
            range: lh_block::Extent::default(),
            fua: false,
            verify: false,
            flush: self.shared.flush_everywhere(),
            aux: 0,
            data,
        })
    }

    /// An answer of any kind came.
    pub(super) fn reply(&mut self, now: u64, reply: Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        if self.members[m].link == Link::Down {
            return;
        }
        if reply.status == Status::Stale && !self.lacks(super::Sabotage::StaleIsFailure) {
            // A younger engine has the volume. Whatever this one still says could contradict it.
            self.fenced = true;
            out.push(Output::Report(FromQueue::Stale(m)));
            return;
        }
        self.members[m].last_reply = now;
        match Tag::unpack(reply.tag) {
            Tag::Ping(number) => {
                if let Some(ping) = self.members[m].ping.take_if(|p| p.number == number) {
                    self.heard(m, ping.sent_at);
                }
            }
            Tag::Control(id) => self.control_reply(id, &reply, out),
            Tag::Flush(number) => self.flush_reply(now, number, &reply, out),
            Tag::Slot { slot, attempt } => self.slot_reply(now, slot, attempt, &reply, out),
        }
        if !self.held.is_empty() {
            self.recheck_held(now, out);
        }
    }

    /// What was asked of a member was read without it. It was heard no later than before: neither [`Member::heard`] nor
    /// [`Member::last_reply`] changes (`docs/invariants.md`, 12).
    pub(super) fn read_here(&mut self, now: u64, reply: &Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        let Tag::Slot { slot, attempt } = Tag::unpack(reply.tag) else { return };
        if self.members[m].link == Link::Down || self.slot(slot).attempt != attempt {
            return;
        }
        if let Stage::Reading { member, sent_at } = *self.slot(slot).stage()
            && member == m
        {
            self.read_reply(now, slot, sent_at, reply, out);
        }
    }

    fn control_reply(&mut self, id: ControlId, reply: &Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        if let Some(at) = self.members[m].controls.iter().position(|(c, _)| *c == id) {
            let (_, sent_at) = self.members[m].controls.remove(at);
            self.heard(m, sent_at);
            out.push(Output::ControlReply { id, member: m, status: reply.status });
        }
    }

    /// An answer to a read, a write or a job.
    fn slot_reply(&mut self, now: u64, s: u16, attempt: u32, reply: &Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        if usize::from(s) >= self.slots.len() {
            return self.break_link(now, m, out);
        }
        if self.slot(s).attempt != attempt {
            return; // late: of a request that was given to another member
        }
        match *self.slot(s).stage() {
            Stage::Reading { member, sent_at } if member == m => {
                self.heard(m, sent_at);
                self.read_reply(now, s, sent_at, reply, out);
            }
            Stage::Writing(fan) if fan.sent.has(m) => {
                self.heard(m, fan.sent_at);
                self.fan_reply(now, s, reply, out);
            }
            _ => {}
        }
    }

    pub(super) fn heard(&mut self, m: MemberId, sent_at: u64) {
        let member = &mut self.members[m];
        member.heard = member.heard.max(Some(sent_at));
    }

    /// Notes how long a member took.
    pub(super) fn took(&mut self, m: MemberId, class: Class, ns: u64) {
        self.members[m].latencies.add(class, ns);
    }
}

/// How bad a fault is, compared with others of the same member.
const fn severity(fault: Fault) -> u8 {
    match fault {
        Fault::NoSpace | Fault::Ahead | Fault::Slow => 0,
        Fault::Io => 1,
        Fault::Hung => 2,
        Fault::Link => 3,
    }
}
