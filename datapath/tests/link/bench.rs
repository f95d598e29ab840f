//! The queue's thread, turn by turn, as `run_queue` does it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use datapath::link::{EngineQueue, Granted, Mail, News, Offer, Parts};
use datapath::message::{ControlId, FromQueue, MemberId, MemberSet, QueueId, Switch, SwitchId, ToQueue};
use datapath::order::Table;
use datapath::queue::{Config, Queue, Stats};
use datapath::shared::Shared;
use lh_block::{Device, Done, Extent, Generation, Geometry, IoError, Op, Request};
use lh_rig::Driven;
use lh_ring::{Changes, Mailbox, Payload, Pool, QueueDevice, Watched};

use crate::replica::Replica;

pub(crate) const SIZE: usize = 8 << 20;
/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Longest turn while something is waited for that happens in another thread, and wakes nobody here.
const STEP: Duration = Duration::from_millis(5);

type Answer = Result<Vec<u8>, IoError>;

pub(crate) struct Bench {
    pub(crate) driven: Driven<EngineQueue>,
    pub(crate) replicas: Vec<Replica>,
    news: Receiver<News>,
    mailbox: Mailbox<Mail>,
    tag: u64,
    switches: u64,
    answers: Vec<(u64, Answer)>,
    /// What members have granted.
    pub(crate) granted: Vec<Changes>,
    /// Held as long as the sessions last.
    session: Arc<()>,
    /// What the queue counts.
    pub(crate) stats: Arc<Stats>,
}

impl Bench {
    /// An open queue with so many members.
    pub(crate) fn new(members: u8, checksums: bool) -> Self {
        Self::with(members, checksums, false, MemberSet::EMPTY)
    }

    /// The same, with members that are lent the bytes of writes.
    pub(crate) fn lending(members: u8, checksums: bool) -> Self {
        Self::with(members, checksums, true, MemberSet::EMPTY)
    }

    /// The same, with members that have granted a file of zeroes each, which they say all blocks are in.
    pub(crate) fn granting(members: u8) -> Self {
        let mut b = Self::new(members, false);
        for member in (0..members).map(MemberId) {
            let file = tempfile::tempfile().expect("a file");
            file.set_len(SIZE as u64).expect("its length");
            let changes = Changes::new(lh_wire::COUNTERS).expect("counters");
            let memory = changes.lend().expect("a descriptor");
            let watched = Watched::open(memory, lh_wire::COUNTERS).expect("it is mapped");
            let granted = Granted {
                number: u32::from(member.0) + 1,
                told_as: 0,
                watched: Arc::new(watched),
                files: vec![file],
                in_memory: false,
                session: Arc::downgrade(&b.session),
                returned: crossbeam_channel::unbounded().0,
            };
            b.mail(Mail::Places(member, Box::new(granted)));
            b.granted.push(changes);
        }
        b
    }

    /// The same; reads go to the first member as long as it is there.
    pub(crate) fn with_near_first(members: u8, checksums: bool) -> Self {
        let others = (1..members).map(MemberId).collect();
        Self::with(members, checksums, false, others)
    }

    fn with(members: u8, checksums: bool, lends: bool, far: MemberSet) -> Self {
        let config = Config {
            size: SIZE as u64,
            logical_block: 512,
            max_transfer: 1 << 20,
            depth: 64,
            io_timeout_ns: 0,
            verify: false,
        };
        let geometry = Geometry {
            size: SIZE as u64,
            logical_block: 512,
            physical_block: 4096,
            max_transfer: 1 << 20,
            depth: 64,
        };
        let shared = Arc::new(Shared::new(SIZE as u64, 4 << 20));
        far.iter().for_each(|m| shared.set_far(m, true));
        let (mailbox, inbox) = Mailbox::new().expect("an eventfd");
        let (sender, news) = crossbeam_channel::unbounded();
        let queue = Queue::new(config, QueueId(0), Arc::new(Table::new()), shared);
        let stats = Arc::clone(queue.stats());
        let parts = Parts {
            queue,
            id: QueueId(0),
            generation: Generation::from(1 << 32),
            geometry,
            inbox,
            peers: vec![mailbox.clone()],
            news: sender,
            offer: Offer::default(),
        };
        let pool = Pool::lendable(4 << 20, 32 << 20).expect("a pool");
        let mut b = Self {
            driven: Driven::new(EngineQueue::new(parts, &pool)),
            replicas: Vec::new(),
            news,
            mailbox,
            tag: 0,
            switches: 0,
            answers: Vec::new(),
            granted: Vec::new(),
            session: Arc::new(()),
            stats,
        };
        for member in (0..members).map(MemberId) {
            let (replica, socket) = Replica::start(SIZE, checksums, lends.then(|| b.memory()));
            b.replicas.push(replica);
            b.mail(Mail::Link { member, socket, checksums, lends, tells: true });
            b.switch(Switch::Attach { member });
            b.switch(Switch::Promote { member });
        }
        b.switch(Switch::Resume);
        b
    }

    /// What members are passed.
    pub(crate) fn memory(&self) -> OwnedFd {
        self.pool().lend().expect("memory with a descriptor")
    }

    /// The member lets a new session in, with what is lent as before.
    pub(crate) fn link_again(&self, member: MemberId) {
        let socket = self.replicas[usize::from(member.0)].listen(false, Some(self.memory()));
        self.mail(Mail::Link { member, socket, checksums: false, lends: true, tells: true });
    }

    pub(crate) fn mail(&self, mail: Mail) {
        self.mailbox.put(mail);
    }

    pub(crate) fn control(&mut self, id: u64, member: MemberId, json: Vec<u8>) {
        self.mail(Mail::Control(ControlId(id), json));
        self.mail(Mail::Message(ToQueue::Control(ControlId(id), member)));
    }

    /// Makes a switch and waits until it is made.
    pub(crate) fn switch(&mut self, switch: Switch) {
        self.switches += 1;
        let id = SwitchId(self.switches);
        self.mail(Mail::Message(ToQueue::Switch(id, switch)));
        self.until(|news| matches!(news, News::Report(_, FromQueue::Switched(i)) if *i == id));
    }

    /// One turn of the loop; the frontend takes answers if `collect`.
    fn turn(&mut self, collect: bool, most: Duration) {
        let mut done = Vec::new();
        self.turn_with(most, |engine| {
            while let Some(d) = collect.then(|| engine.poll_done()).flatten() {
                done.push(d);
            }
        });
        self.keep(done);
    }

    /// One turn with a frontend of the caller's.
    pub(crate) fn turn_with(&mut self, most: Duration, frontend: impl FnOnce(&mut EngineQueue)) {
        self.driven.turn_with(most, frontend);
    }

    pub(crate) fn pool(&self) -> &Pool {
        self.driven.device.pool()
    }

    fn keep(&mut self, done: Vec<Done<Payload>>) {
        for d in done {
            let data = d.data.map(|d| d.to_vec()).unwrap_or_default();
            self.answers.push((d.tag, d.result.map(|()| data)));
        }
    }

    /// Turns for a while, and once at least.
    pub(crate) fn spin(&mut self, time: Duration, collect: bool) {
        let end = Instant::now() + time;
        loop {
            self.turn(collect, end.saturating_duration_since(Instant::now()));
            if Instant::now() >= end {
                return;
            }
        }
    }

    /// Turns until it is as wanted.
    pub(crate) fn turn_until(&mut self, what: &str, collect: bool, wanted: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !wanted(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.replicas);
            self.turn(collect, STEP);
        }
    }

    /// Turns until the queue says something that satisfies `wanted`. Nothing wakes it but what it waits for by itself.
    pub(crate) fn until(&mut self, mut wanted: impl FnMut(&News) -> bool) {
        let end = Instant::now() + PATIENCE;
        loop {
            while let Ok(news) = self.news.try_recv() {
                if wanted(&news) {
                    return;
                }
            }
            assert!(Instant::now() < end, "nothing of the kind is said");
            self.turn(true, PATIENCE);
        }
    }

    /// A request, as a frontend's turn would hand it in.
    pub(crate) fn submit(&mut self, op: Op, range: Extent, data: Option<&[u8]>) -> u64 {
        self.tag += 1;
        let data = data.map(|bytes| {
            let mut payload =
                self.pool().alloc(u32::try_from(bytes.len()).expect("short"), 4096).expect("room");
            payload.write_at(0, bytes);
            payload
        });
        let request = Request { tag: self.tag, op, range, data };
        self.turn_with(Duration::ZERO, |engine| engine.submit(request));
        self.tag
    }

    /// The next answer, taken as soon as it is there; nothing is submitted after that.
    pub(crate) fn answer(&mut self) -> (u64, Answer) {
        let end = Instant::now() + PATIENCE;
        loop {
            let done = std::iter::from_fn(|| self.driven.device.poll_done()).collect();
            self.keep(done);
            if !self.answers.is_empty() {
                return self.answers.remove(0);
            }
            assert!(Instant::now() < end, "no answer");
            self.turn(false, Duration::from_millis(50));
        }
    }

    pub(crate) fn wait(&mut self, tag: u64) -> Answer {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.answers.iter().position(|(t, _)| *t == tag) {
                return self.answers.remove(at).1;
            }
            assert!(Instant::now() < end, "no answer");
            self.turn(true, Duration::from_millis(50));
        }
    }

    pub(crate) fn ask(&mut self, op: Op, range: Extent) -> Answer {
        let tag = self.submit(op, range, None);
        self.wait(tag)
    }

    pub(crate) fn write(&mut self, range: Extent, bytes: &[u8]) -> Result<(), IoError> {
        let tag = self.submit(Op::Write { fua: false }, range, Some(bytes));
        self.wait(tag).map(drop)
    }
}
