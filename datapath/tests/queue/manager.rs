//! The least that a conductor has to do for the queues: puts failed members out, brings them back, pauses.

use std::collections::{BTreeMap, BTreeSet};

use datapath::message::{
    Fault, FromQueue, Job, JobId, JobResult, MemberId, MemberSet, Switch, SwitchId, ToQueue,
};
use datapath::queue::Input;
use lh_block::Extent;

use crate::replica::Replica;
use crate::world::{CHUNK, MS, Seen, World};

/// What is done with a member, and what that waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Serves.
    In,
    /// `StopReads` on all queues; then the epoch.
    Stopping,
    /// The epoch becomes durable at this time.
    Recording(u64),
    /// `Forget` on all queues.
    Forgetting,
    /// Comes back not before this time.
    Out(u64),
    /// `Fill` on all queues; then copying.
    Filling,
    /// Jobs run; the next range begins here.
    Copying(u64),
    /// `Await` on all queues; then the epoch.
    Awaiting,
    /// `Promote` on all queues of a member that was out.
    Promoting,
    /// Like `Out` of the last member, which was never forgotten.
    Waiting(u64),
    /// `Attach` on all queues.
    Returning,
    /// Like `Promoting` of it.
    Resuming,
}

#[derive(Debug)]
struct Seat {
    step: Step,
    /// A fault was reported since it was attached.
    failed: Option<Fault>,
    waits: BTreeSet<SwitchId>,
    jobs: BTreeSet<JobId>,
}

pub(crate) struct Manager {
    seats: Vec<Seat>,
    epoch: BTreeSet<usize>,
    queues: usize,
    switches: u64,
    jobs: BTreeMap<JobId, usize>,
    next_job: u64,
    session: u64,
    pause: BTreeSet<(usize, SwitchId)>,
    paused: bool,
    wanted: BTreeSet<u64>,
    /// Another engine has taken over: no epoch is recorded any more.
    outdated: bool,
    opened: bool,
}

fn id(m: usize) -> MemberId {
    MemberId(u8::try_from(m).expect("few"))
}

impl Manager {
    pub(crate) fn new(members: usize, queues: usize) -> Self {
        let seat =
            || Seat { step: Step::Waiting(0), failed: None, waits: BTreeSet::new(), jobs: BTreeSet::new() };
        Self {
            seats: (0..members).map(|_| seat()).collect(),
            epoch: (0..members).collect(),
            queues,
            switches: 0,
            jobs: BTreeMap::new(),
            next_job: 0,
            session: 0,
            pause: BTreeSet::new(),
            paused: true,
            wanted: BTreeSet::new(),
            outdated: false,
            opened: false,
        }
    }

    pub(crate) fn epoch(&self) -> Vec<usize> {
        self.epoch.iter().copied().collect()
    }

    pub(crate) fn lose_authority(&mut self) {
        self.outdated = true;
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.opened && !self.paused && self.seats.iter().all(|s| s.step == Step::In && s.failed.is_none())
    }

    pub(crate) fn describe(&self) -> String {
        let seats: Vec<_> =
            self.seats.iter().map(|s| (s.step, s.failed, s.waits.len(), s.jobs.len())).collect();
        format!("{seats:?}, paused {}, pause {:?}, wanted {:?}", self.paused, self.pause, self.wanted)
    }

    /// A queue says something.
    pub(crate) fn report(w: &mut World, q: usize, report: FromQueue, seen: &mut Seen) -> Result<(), String> {
        let this = &mut w.manager;
        match report {
            FromQueue::Switched(id) => {
                for seat in &mut this.seats {
                    seat.waits.remove(&id);
                }
                if this.pause.remove(&(q, id)) && this.paused && !w.is_drained(q) {
                    return Err(format!("queue {q} says it is paused, and writes are under way"));
                }
            }
            FromQueue::JobDone(job, result) => {
                let m = this.jobs.remove(&job).ok_or("an unknown job")?;
                this.seats[m].jobs.remove(&job);
                if matches!(result, JobResult::Failed { .. })
                    && matches!(this.seats[m].step, Step::Copying(_))
                {
                    this.seats[m].failed.get_or_insert(Fault::Link);
                }
            }
            FromQueue::Failed(m, fault) => {
                match fault {
                    Fault::Hung => seen.hung += 1,
                    Fault::NoSpace => seen.full += 1,
                    Fault::Io => seen.failing += 1,
                    Fault::Link | Fault::Slow | Fault::Ahead => {}
                }
                let seat = &mut this.seats[usize::from(m.0)];
                // A broken link ends the session: that counts more than anything before.
                if seat.failed.is_none() || fault == Fault::Link {
                    seat.failed = Some(fault);
                }
                if fault == Fault::Link {
                    w.break_session(usize::from(m.0));
                }
            }
            FromQueue::ChunkWanted(chunk) => {
                this.wanted.insert(chunk);
            }
            FromQueue::Stale(_) => this.outdated = true,
            FromQueue::Rotten(..) => return Err("nothing is rotten here".into()),
            // Another member has it, and it is written anew some day.
            FromQueue::Unreadable(..) => seen.failing += 1,
            FromQueue::ControlLost(..) => return Err("nobody asked".into()),
        }
        Ok(())
    }

    /// Goes on with everything that can go on.
    pub(crate) fn step(w: &mut World, seen: &mut Seen) -> Result<(), String> {
        for m in 0..w.manager.seats.len() {
            Self::step_member(w, m, seen)?;
        }
        if !w.manager.opened && w.manager.seats.iter().all(|s| s.step == Step::In) {
            w.manager.opened = true;
            Self::resume(w);
        }
        Self::step_pause(w, seen);
        if w.random.one_in(20)
            && let Some(chunk) = w.manager.wanted.pop_first()
        {
            seen.doubts += 1;
            w.shared.resolve(chunk);
            for q in 0..w.manager.queues {
                w.send(q, Input::Message(ToQueue::ChunkResolved(chunk)));
            }
        }
        Ok(())
    }

    fn step_member(w: &mut World, m: usize, seen: &mut Seen) -> Result<(), String> {
        let seat = &w.manager.seats[m];
        // What waits for a member that failed while it joined waits until it is forgotten, an `Attach` included.
        let joins = matches!(seat.step, Step::Filling | Step::Copying(_) | Step::Awaiting);
        if joins && seat.failed.is_some() {
            w.manager.seats[m].waits.clear();
            Self::all(w, m, Step::Forgetting);
            return Ok(());
        }
        let returns = matches!(seat.step, Step::Returning | Step::Resuming);
        if returns && seat.failed.is_some() {
            // The next session follows once the queues have seen this one end.
            w.break_session(m);
            w.manager.seats[m].waits.clear();
            w.manager.seats[m].step = Step::Waiting(w.now + 100 * MS);
            return Ok(());
        }
        if !seat.waits.is_empty() || (seat.step == Step::Forgetting && !seat.jobs.is_empty()) {
            return Ok(());
        }
        let well = |s: &Seat| s.step == Step::In && s.failed.is_none();
        let others = w.manager.seats.iter().enumerate().any(|(o, s)| o != m && well(s));
        let later = w.now + w.random.below(300 * MS);
        match seat.step {
            Step::In if seat.failed.is_some() && others => Self::all(w, m, Step::Stopping),
            Step::In if seat.failed == Some(Fault::Link) => w.manager.seats[m].step = Step::Waiting(later),
            Step::In if seat.failed.is_some() && w.is_settling() => w.break_session(m),
            Step::In => {}
            Step::Stopping => w.manager.seats[m].step = Step::Recording(later),
            Step::Recording(at) if w.now >= at && !w.manager.outdated => {
                w.manager.epoch.remove(&m);
                Self::all(w, m, Step::Forgetting);
            }
            Step::Recording(_) => {}
            Step::Forgetting => {
                seen.forgotten += 1;
                w.break_session(m);
                w.manager.seats[m].step = Step::Out(later + w.random.below(1000 * MS));
            }
            Step::Out(at) | Step::Waiting(at) if w.now >= at => Self::connect(w, m),
            Step::Out(_) | Step::Waiting(_) => {}
            Step::Filling => w.manager.seats[m].step = Step::Copying(0),
            Step::Copying(at) => Self::copy(w, m, at),
            // Somebody went out meanwhile, and the epoch is not what it should be yet.
            Step::Awaiting if w.manager.outdated => {}
            Step::Awaiting => Self::include(w, m),
            Step::Promoting => {
                seen.rejoined += 1;
                w.manager.seats[m].step = Step::In;
            }
            Step::Returning => {
                if w.manager.opened
                    && w.random.one_in(2)
                    && w.manager.seats.iter().all(|s| s.step != Step::In)
                {
                    w.shared.put_in_doubt(0);
                }
                Self::all(w, m, Step::Resuming);
            }
            Step::Resuming => {
                seen.returned += u64::from(w.manager.opened);
                w.manager.seats[m].step = Step::In;
            }
        }
        Ok(())
    }

    /// A new session with a member, if its replica is ready for one; then `Attach`.
    fn connect(w: &mut World, m: usize) {
        let gone = (0..w.manager.queues).all(|q| !w.connections[q][m].up);
        if !gone || !w.replicas[m].is_idle() || w.now < w.replicas[m].hangs_until {
            return;
        }
        w.manager.session += 1;
        let session = w.manager.session;
        Replica::begin(&mut w.replicas[m], session);
        w.manager.seats[m].failed = None;
        for q in 0..w.manager.queues {
            let c = &mut w.connections[q][m];
            (c.session, c.up, c.broken) = (session, true, false);
            c.there.clear();
            c.back.clear();
            w.send(q, Input::LinkUp { member: id(m) });
        }
        let step = if w.manager.epoch.contains(&m) { Step::Returning } else { Step::Filling };
        Self::all(w, m, step);
    }

    /// Sends the switch of a step to all queues.
    fn all(w: &mut World, m: usize, step: Step) {
        let member = id(m);
        let switch = match step {
            Step::Stopping => Switch::StopReads { member },
            Step::Forgetting => Switch::Forget { member },
            Step::Filling => Switch::Fill { member },
            Step::Awaiting => Switch::Await { member },
            Step::Returning => Switch::Attach { member },
            _ => Switch::Promote { member },
        };
        w.manager.seats[m].step = step;
        for q in 0..w.manager.queues {
            let id = w.manager.next_switch();
            w.manager.seats[m].waits.insert(id);
            w.send(q, Input::Message(ToQueue::Switch(id, switch)));
        }
    }

    fn next_switch(&mut self) -> SwitchId {
        self.switches += 1;
        SwitchId(self.switches)
    }

    /// Copies the next range from some member that is well; at the end takes the member in.
    fn copy(w: &mut World, m: usize, at: u64) {
        let size = w.shared.chunks() * CHUNK;
        let size = size.min(640 * 4096);
        if at >= size {
            if w.manager.seats[m].jobs.is_empty() {
                Self::all(w, m, Step::Awaiting);
            }
            return;
        }
        if w.manager.seats[m].jobs.len() > 3 {
            return;
        }
        let Some(source) = w.manager.seats.iter().position(|s| s.step == Step::In && s.failed.is_none())
        else {
            return;
        };
        let len = (64 << 10).min(size - at);
        w.manager.next_job += 1;
        let job = JobId(w.manager.next_job);
        w.manager.jobs.insert(job, m);
        w.manager.seats[m].jobs.insert(job);
        w.manager.seats[m].step = Step::Copying(at + len);
        let q = usize::try_from(w.random.below(w.manager.queues as u64)).expect("few");
        let equalise = Job::Equalise {
            layer: None,
            range: Extent::new(at, len),
            source: id(source),
            others: MemberSet::EMPTY,
            targets: MemberSet::EMPTY.with(id(m)),
            compare: false,
            merged: false,
            repair: false,
        };
        w.send(q, Input::Message(ToQueue::Job(job, equalise)));
    }

    /// The epoch includes it.
    fn include(w: &mut World, m: usize) {
        // It has the writes that it was not sent by its copy.
        for other in w.manager.epoch() {
            let theirs = w.replicas[other].done.clone();
            w.replicas[m].done.extend(theirs);
        }
        w.manager.epoch.insert(m);
        Self::all(w, m, Step::Promoting);
    }

    fn step_pause(w: &mut World, seen: &mut Seen) {
        if !w.manager.opened {
            return;
        }
        if w.manager.paused {
            if w.manager.pause.is_empty() && (w.is_settling() || w.random.one_in(30)) {
                seen.pauses += 1;
                Self::resume(w);
            }
        } else if !w.is_settling() && w.random.one_in(600) {
            w.manager.paused = true;
            for q in 0..w.manager.queues {
                let id = w.manager.next_switch();
                w.manager.pause.insert((q, id));
                w.send(q, Input::Message(ToQueue::Switch(id, Switch::Pause)));
            }
        }
    }

    fn resume(w: &mut World) {
        w.manager.paused = false;
        for q in 0..w.manager.queues {
            let id = w.manager.next_switch();
            w.send(q, Input::Message(ToQueue::Switch(id, Switch::Resume)));
        }
    }
}
