//! One queue and members that answer when the test says so.

mod abandoned;
mod allocation;
mod fan_out;
mod full;
mod health;
mod jobs;
mod reads;
mod switches;

use lh_block::SECTOR;

use super::*;
use crate::message::{MemberSet, Switch, SwitchId};

const MS: u64 = 1_000_000;
const SIZE: u64 = 64 << 20;
const WRITE: Op = Op::Write { fua: false };
const ZEROES: Op = Op::WriteZeroes { fua: false, may_unmap: true, fast: false };

const A: MemberId = MemberId(0);
const B: MemberId = MemberId(1);
const C: MemberId = MemberId(2);

/// A queue, what it wants sent and not yet answered, and what else came out.
struct Bench {
    queue: Queue,
    now: u64,
    /// Sent and not answered.
    wire: Vec<Transmit>,
    /// Everything else that came out and was not looked at.
    out: Vec<Output>,
    /// Whoever waits outside is let in when a test says so, as where clients are looked for before.
    looks: bool,
    switches: u64,
    table: Arc<Table>,
    shared: Arc<Shared>,
}

fn config() -> Config {
    Config {
        size: SIZE,
        logical_block: 512,
        max_transfer: 1 << 20,
        depth: 128,
        io_timeout_ns: 30_000 * MS,
        verify: false,
    }
}

fn blocks(first: u64, count: u64) -> Extent {
    Extent::new(first * 4096, count * 4096)
}

impl Bench {
    /// A paused queue without members.
    fn bare(config: Config) -> Self {
        let (table, shared) = (Arc::new(Table::new()), Arc::new(Shared::new(config.size, 4 << 20)));
        let queue = Queue::new(config, QueueId(0), table.clone(), shared.clone());
        let (wire, out) = (Vec::new(), Vec::new());
        Self { queue, now: 1_000_000 * MS, wire, out, looks: false, switches: 0, table, shared }
    }

    /// An open queue with so many members to write to and read from, all heard just now.
    fn new(members: u8) -> Self {
        Self::with(config(), members)
    }

    fn with(config: Config, members: u8) -> Self {
        let mut b = Self::bare(config);
        for m in (0..members).map(MemberId) {
            b.join(m);
        }
        b.switch(Switch::Resume);
        b.hear_all();
        b.out.clear();
        b
    }

    fn apply(&mut self, input: Input) {
        let mut out = Vec::new();
        self.queue.apply(self.now, input, &mut out);
        if self.queue.lets_in() && !self.looks {
            self.queue.apply(self.now, Input::LetIn, &mut out);
        }
        for o in out {
            match o {
                Output::Send(t) => self.wire.push(t),
                Output::Disconnect { member } => {
                    self.wire.retain(|t| t.member != member);
                    self.out.push(o);
                }
                o => self.out.push(o),
            }
        }
    }

    fn switch(&mut self, switch: Switch) -> SwitchId {
        self.switches += 1;
        let id = SwitchId(self.switches);
        self.apply(Input::Message(ToQueue::Switch(id, switch)));
        id
    }

    /// A link, written to, and read from.
    fn join(&mut self, m: MemberId) {
        self.apply(Input::LinkUp { member: m });
        self.switch(Switch::Attach { member: m });
        self.switch(Switch::Promote { member: m });
    }

    /// Every member answers a ping.
    fn hear_all(&mut self) {
        for m in self.queue.members.attached().iter() {
            self.queue.members[m].heard = Some(self.now);
        }
    }

    fn link_down(&mut self, m: MemberId) {
        self.wire.retain(|t| t.member != m);
        self.apply(Input::LinkDown { member: m });
    }

    /// Time passes in ticks of 50 ms; members of the set answer pings.
    fn pass(&mut self, ms: u64, answering: MemberSet) {
        for _ in 0..ms / 50 {
            self.now += 50 * MS;
            self.apply(Input::Tick);
            self.answer_pings(answering);
        }
    }

    fn answer_pings(&mut self, answering: MemberSet) {
        while let Some(t) =
            self.wire.iter().find(|t| t.op == OpCode::Ping && answering.has(t.member)).copied()
        {
            self.reply(t, Status::Ok);
        }
    }

    /// Whoever is asked for blocks says so.
    fn answer_reads(&mut self, status: Status) {
        let reads: Vec<_> = self.wire.iter().filter(|t| t.op == OpCode::Read).copied().collect();
        assert_eq!(reads.len(), 1, "one is asked at a time");
        self.reply(reads[0], status);
    }

    fn request(&mut self, op: Op, range: Extent) -> u16 {
        let slot = (0..self.queue.config.depth).find(|s| !self.queue.used.has(*s)).unwrap();
        self.apply(Input::Request { slot, op, range });
        slot
    }

    fn reply_with(&mut self, t: Transmit, status: Status, aux: u32) {
        let at = self.wire.iter().position(|w| *w == t).expect("not on the wire");
        self.wire.remove(at);
        let payload = match t.op {
            OpCode::Read if status == Status::Ok => u32::try_from(t.range.len).unwrap(),
            OpCode::Allocation if status == Status::Ok => 8,
            _ => 0,
        };
        self.apply(Input::Reply(Reply { member: t.member, tag: t.tag, op: t.op, status, aux, payload }));
    }

    fn reply(&mut self, t: Transmit, status: Status) {
        self.reply_with(t, status, 0);
    }

    /// What is on the wire to a member, apart from pings.
    fn to(&self, m: MemberId) -> Vec<Transmit> {
        self.wire.iter().filter(|t| t.member == m && t.op != OpCode::Ping).copied().collect()
    }

    /// The only request on the wire to a member, apart from pings.
    fn one(&self, m: MemberId) -> Transmit {
        let all = self.to(m);
        assert_eq!(all.len(), 1, "{all:?}");
        all[0]
    }

    /// The member answers what was sent to it, everything.
    fn answer(&mut self, m: MemberId, status: Status) {
        for t in self.to(m) {
            self.reply(t, status);
        }
    }

    /// The answers given since the last call.
    fn answers(&mut self) -> Vec<(u16, Result<(), IoError>)> {
        self.take(|o| match o {
            Output::Complete { slot, result, .. } => Some((slot, result)),
            _ => None,
        })
    }

    fn reports(&mut self) -> Vec<FromQueue> {
        self.take(|o| match o {
            Output::Report(r) => Some(r),
            _ => None,
        })
    }

    fn take<T>(&mut self, pick: impl Fn(Output) -> Option<T>) -> Vec<T> {
        let mut got = Vec::new();
        self.out.retain(|o| match pick(*o) {
            Some(t) => {
                got.push(t);
                false
            }
            None => true,
        });
        got
    }

    fn answered(&mut self, slot: u16) {
        self.apply(Input::Answered { slot });
    }

    /// Nothing is in the queue, claimed or remembered.
    fn assert_idle(&self) {
        assert!(self.queue.used.is_empty(), "{:?}", self.queue.used);
        assert!(self.queue.in_flight.is_empty() && self.queue.held.is_empty());
        assert!(self.queue.parked.is_empty() && self.queue.barriers.is_empty());
        assert!(self.table.is_idle());
        assert!(self.queue.window.has_room(16 << 20), "the window is empty");
    }
}
