//! A replica that does what it is asked, in any order, sector by sector.

use std::collections::{BTreeSet, VecDeque};

use datapath::message::QueueId;
use lh_block::{Extent, SECTOR};
use lh_wire::{IN_PART, OpCode, Status, WRITE_WINDOW};

use crate::history::Value;

/// A request on its way or under way. `write` names the client's write that it is part of.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) queue: QueueId,
    pub(crate) session: u64,
    pub(crate) tag: u64,
    pub(crate) op: OpCode,
    pub(crate) range: Extent,
    pub(crate) fua: bool,
    /// For each sector, or one for all.
    pub(crate) data: Vec<Value>,
    pub(crate) client_write: bool,
}

impl Message {
    pub(crate) fn sectors(range: Extent) -> std::ops::Range<usize> {
        let at = |n: u64| usize::try_from(n / SECTOR).expect("small volume");
        at(range.offset)..at(range.end())
    }
}

/// An answer on its way.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) to: Message,
    pub(crate) status: Status,
    pub(crate) data: Vec<Value>,
    pub(crate) aux: u32,
}

/// A request that is being done: the sectors that are still to be read or written.
#[derive(Debug)]
struct Pending {
    message: Message,
    left: Vec<usize>,
    read: Vec<Value>,
    changed: u32,
    /// Not touched before this time, ns.
    not_before: u64,
}

#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) sectors: Vec<Value>,
    /// Counts changes of each sector; and that count when it was last made stable.
    pub(crate) changes: Vec<u64>,
    pub(crate) stable: Vec<u64>,
    pending: Vec<Pending>,
    /// Per queue the last writes of the present session, as a replica remembers them.
    remembered: Vec<VecDeque<(QueueId, u64)>>,
    /// Writes (by queue and tag) that were done here.
    pub(crate) done: BTreeSet<(QueueId, u64)>,
    pub(crate) session: u64,
    /// Belongs to another engine.
    pub(crate) fenced: bool,
    pub(crate) full: bool,
    pub(crate) failing: bool,
    pub(crate) hangs_until: u64,
}

impl Replica {
    pub(crate) fn new(sectors: usize, queues: usize) -> Self {
        Self {
            sectors: vec![0; sectors],
            changes: vec![0; sectors],
            stable: vec![0; sectors],
            pending: Vec::new(),
            remembered: vec![VecDeque::new(); queues],
            done: BTreeSet::new(),
            session: 0,
            fenced: false,
            full: false,
            failing: false,
            hangs_until: 0,
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    pub(crate) fn has_client_write_of(&self, queue: QueueId, session: u64) -> bool {
        self.pending
            .iter()
            .any(|p| p.message.queue == queue && p.message.session == session && p.message.client_write)
    }

    /// A new session; what came in earlier ones was done or dropped before.
    pub(crate) fn begin(&mut self, session: u64) {
        assert!(self.is_idle());
        self.session = session;
        self.remembered.iter_mut().for_each(VecDeque::clear);
    }

    /// A request comes in. Gives back the write that is remembered no longer.
    pub(crate) fn take(&mut self, message: Message, not_before: u64) -> Option<(QueueId, u64)> {
        let mut forgotten = None;
        if message.client_write {
            let list = &mut self.remembered[usize::from(message.queue.0)];
            list.push_back((message.queue, message.tag));
            if list.len() > WRITE_WINDOW {
                forgotten = list.pop_front();
            }
        }
        let mut left: Vec<usize> = match message.op {
            OpCode::Flush | OpCode::Ping | OpCode::ClearIntent | OpCode::Control => Vec::new(),
            _ => Message::sectors(message.range).collect(),
        };
        left.reverse();
        let read = vec![0; left.len()];
        self.pending.push(Pending { message, left, read, changed: 0, not_before });
        forgotten
    }

    /// Goes on with one request, chosen by `random`; the answer if that ends it.
    pub(crate) fn step(&mut self, now: u64, random: usize) -> Option<Answer> {
        if self.pending.is_empty() || now < self.hangs_until {
            return None;
        }
        let at = random % self.pending.len();
        if now < self.pending[at].not_before && !self.fenced {
            return None;
        }
        if let Some((status, aux)) = self.refusal(at) {
            let p = self.pending.swap_remove(at);
            return Some(Answer { to: p.message, status, data: Vec::new(), aux });
        }
        // A few sectors at a time, so that long requests end.
        for _ in 0..1 + self.pending[at].left.len() / 8 {
            self.touch(at);
        }
        if !self.pending[at].left.is_empty() {
            return None;
        }
        let p = self.pending.swap_remove(at);
        Some(self.finish(p))
    }

    fn refusal(&self, at: usize) -> Option<(Status, u32)> {
        let p = &self.pending[at];
        let untouched = p.left.len() == p.read.len();
        let writes = matches!(p.message.op, OpCode::Write | OpCode::WriteZeroes | OpCode::Unmap);
        match p.message.op {
            _ if self.fenced => Some((Status::Stale, 0)),
            OpCode::Ping => None,
            _ if self.failing => Some((Status::Io, 0)),
            _ if self.full && writes => Some((Status::NoSpace, if untouched { 0 } else { IN_PART })),
            _ => None,
        }
    }

    fn touch(&mut self, at: usize) {
        let p = &mut self.pending[at];
        let Some(sector) = p.left.pop() else { return };
        let first = Message::sectors(p.message.range).start;
        match p.message.op {
            // Of whether blocks hold data the model tells more than there is: what they hold, so that no old answer passes for a new one.
            OpCode::Read | OpCode::ReadLayer | OpCode::Allocation => {
                p.read[sector - first] = self.sectors[sector]
            }
            _ => {
                let data = &p.message.data;
                let value = data.get(sector - first).or(data.first()).copied().expect("a value");
                p.changed += u32::from(self.sectors[sector] != value);
                self.sectors[sector] = value;
                self.changes[sector] += 1;
            }
        }
    }

    fn finish(&mut self, p: Pending) -> Answer {
        let m = p.message;
        match m.op {
            OpCode::Flush => self.stable.clone_from(&self.changes),
            OpCode::Write | OpCode::WriteZeroes | OpCode::Unmap => {
                self.done.insert((m.queue, m.tag));
                if m.fua {
                    let range = Message::sectors(m.range);
                    self.stable[range.clone()].clone_from_slice(&self.changes[range]);
                }
            }
            _ => {}
        }
        Answer { to: m, status: Status::Ok, data: p.read, aux: p.changed }
    }
}
