//! Hung and slow members (`docs/invariants.md`, 7).
//!
//! A member is judged only against the others in the same time: if all are slow, the machine is busy and nobody is
//! put out. Who answers nothing for long, not even pings, has hung all the same, or the network to it is gone, whatever the others do.
//! If this process itself did not run, or had no memory to receive what a member answers, nothing that it measured meanwhile counts.
//! Nobody is put out if too few would be
//! left.

use super::latency::{CLASSES, Class, Latencies};
use super::members::{Link, Members, Role};
use super::slot::Stage;
use super::{Output, Queue};
use crate::message::{Fault, MEMBERS_MAX, MemberId};

/// Nanoseconds in a millisecond.
const MS: u64 = 1_000_000;

/// After this long without any answer a member is pinged.
const PING_AFTER: u64 = 300 * MS;

/// After this long without any answer, pings included, a member is hung. With the ticks and a new epoch the
/// volume stands still for less than 2 s.
const HUNG_AFTER: u64 = 1000 * MS;

/// After this long it is, whoever else answers and however much it is needed, as after Longhorn's `engine-replica-timeout`. Its session
/// ends: the volume says what it waits for, its `ioTimeout` begins if that is all of them, and it is asked anew every second, where TCP
/// alone would try again ever more seldom.
const SILENT_AFTER: u64 = 8000 * MS;

/// If the ticks come further apart than this, the process was stopped or starved: measuring begins anew.
const TICK_GAP: u64 = 250 * MS;

/// Latencies are compared window by window.
const WINDOW: u64 = 1000 * MS;

/// So many windows in a row a member has to be slow before it is put out.
const SLOW_WINDOWS: u32 = 3;

/// So many times slower than the others.
const SLOW_FACTOR: u64 = 10;

/// And at least this slow.
const SLOW_FLOOR: u64 = 20 * MS;

/// Requests that have to be judged in those windows...
const SLOW_SAMPLES: u32 = 20;

/// ...or so few, if each takes so long that there cannot be more.
const SLOW_SAMPLES_FEW: u32 = 5;
const SLOW_FLOOR_FEW: u64 = 200 * MS;

/// A single read or write that only this member has not answered for so long: its disk stands still.
const STRAGGLER: u64 = 5000 * MS;

/// The same for a flush, which may have much to write.
const STRAGGLER_FLUSH: u64 = 20_000 * MS;

/// The same for a part of a copy or of a comparison, which may wait until a fold stands aside.
const STRAGGLER_JOB: u64 = 20_000 * MS;

/// A member that is reported as slow or full and is still read from after this time is judged anew: it was needed.
const JUDGED_AGAIN: u64 = 5000 * MS;

/// When what was measured began.
#[derive(Debug, Default)]
pub(super) struct Clock {
    last_tick: u64,
    /// Silence before this does not count.
    restarted: u64,
    window: u64,
}

/// What is in flight on one member.
#[derive(Clone, Copy, Debug, Default)]
struct InFlight {
    /// When the oldest request of any kind was sent.
    oldest: Option<u64>,
    /// The same of reads and writes of clients.
    data: Option<u64>,
    /// The same of the conductor's jobs: of chunks in doubt clients wait for these.
    job: Option<u64>,
    /// The same of the flush.
    flush: Option<u64>,
}

/// The earlier of two times.
fn earlier(one: Option<u64>, other: u64) -> Option<u64> {
    Some(one.map_or(other, |one| one.min(other)))
}

impl InFlight {
    fn note(&mut self, sent_at: u64) {
        self.oldest = earlier(self.oldest, sent_at);
    }

    fn note_slot(&mut self, sent_at: u64, is_job: bool) {
        self.note(sent_at);
        let kind = if is_job { &mut self.job } else { &mut self.data };
        *kind = earlier(*kind, sent_at);
    }
}

impl Queue {
    /// Looks after the members; called with every tick.
    pub(super) fn check_health(&mut self, now: u64, out: &mut Vec<Output>) {
        let gap = now.saturating_sub(self.clock.last_tick);
        self.clock.last_tick = now;
        if gap > TICK_GAP {
            self.restart_windows(now);
            return;
        }
        let in_flight = self.in_flight_by_member();
        self.find_hung(now, &in_flight, out);
        self.find_silence(now, &in_flight, out);
        self.find_stragglers(now, in_flight.map(|i| i.data), STRAGGLER, out);
        self.find_stragglers(now, in_flight.map(|i| i.flush), STRAGGLER_FLUSH, out);
        self.find_stragglers(now, in_flight.map(|i| i.job), STRAGGLER_JOB, out);
        if now - self.clock.window >= WINDOW {
            self.clock.window = now;
            self.count_unanswered(now);
            for class in CLASSES {
                self.find_slow(now, class, out);
            }
            self.age_read_means();
            self.forget_mild_faults(now);
        }
    }

    fn restart_windows(&mut self, now: u64) {
        self.clock.restarted = now;
        self.clock.window = now;
        for m in Members::ids() {
            self.members[m].latencies = Latencies::default();
        }
    }

    fn in_flight_by_member(&self) -> [InFlight; MEMBERS_MAX] {
        let mut all = [InFlight::default(); MEMBERS_MAX];
        for s in self.used.iter() {
            let slot = self.slot(s);
            let is_job = slot.work.is_job();
            match slot.stage() {
                Stage::Reading { member, sent_at } => {
                    all[usize::from(member.0)].note_slot(*sent_at, is_job);
                }
                Stage::Writing(fan) => {
                    for m in fan.sent.iter() {
                        all[usize::from(m.0)].note_slot(fan.last_sent, is_job);
                    }
                }
                _ => {}
            }
        }
        for m in Members::ids() {
            let member = &self.members[m];
            let mine = &mut all[usize::from(m.0)];
            for (_, sent_at) in &member.controls {
                mine.note(*sent_at);
            }
            if let Some(ping) = member.ping {
                mine.note(ping.sent_at);
            }
            if let Some(sent_at) = self.flush_sent_to(m) {
                mine.note(sent_at);
                mine.flush = Some(sent_at);
            }
        }
        all
    }

    /// There is no memory now to receive what the member answers: until now it may have answered everything.
    pub fn starved(&mut self, now: u64, m: MemberId) {
        self.members[m].starved_at = Some(now);
    }

    /// From when on it counts that the member does not answer.
    fn counts_from(&self, m: MemberId) -> u64 {
        self.members[m].starved_at.unwrap_or(0).max(self.clock.restarted)
    }

    /// Since when the member owes an answer, and gave none.
    fn quiet_since(&self, m: MemberId, in_flight: &[InFlight; MEMBERS_MAX]) -> Option<u64> {
        let oldest = in_flight[usize::from(m.0)].oldest?;
        Some(oldest.max(self.members[m].last_reply).max(self.counts_from(m)))
    }

    fn find_hung(&mut self, now: u64, in_flight: &[InFlight; MEMBERS_MAX], out: &mut Vec<Output>) {
        let mut ping = false;
        for m in Members::ids() {
            let member = &self.members[m];
            let Some(quiet_since) = self.quiet_since(m, in_flight) else { continue };
            if member.link == Link::Down || matches!(member.fault, Some(Fault::Hung | Fault::Link)) {
                continue;
            }
            let quiet = now.saturating_sub(quiet_since);
            ping |= quiet >= PING_AFTER;
            let others_answer = Members::ids().any(|o| {
                o != m && self.members[o].link != Link::Down && self.members[o].last_reply > quiet_since
            });
            if quiet >= HUNG_AFTER && others_answer && self.may_lose(m) {
                self.report(now, m, Fault::Hung, out);
            }
        }
        if ping {
            // All of them: whether the others answer tells a hung member from a busy machine.
            for m in Members::ids() {
                self.ping(now, m, out);
            }
        }
    }

    /// Members that answer nothing, and that nobody was told of: all are silent, or it is needed.
    fn find_silence(&mut self, now: u64, in_flight: &[InFlight; MEMBERS_MAX], out: &mut Vec<Output>) {
        for m in self.members.live().iter() {
            let since = self.quiet_since(m, in_flight);
            if since.is_some_and(|since| now.saturating_sub(since) >= SILENT_AFTER) {
                self.report(now, m, Fault::Hung, out);
            }
        }
    }

    /// A member that answers pings, but not the request that everybody else has answered.
    fn find_stragglers(
        &mut self,
        now: u64,
        oldest: [Option<u64>; MEMBERS_MAX],
        limit: u64,
        out: &mut Vec<Output>,
    ) {
        let mut ages = [0; MEMBERS_MAX];
        for m in Members::ids() {
            let since = oldest[usize::from(m.0)].map(|t| t.max(self.counts_from(m)));
            ages[usize::from(m.0)] = since.map_or(0, |since| now.saturating_sub(since));
        }
        for m in Members::ids() {
            let mine = ages[usize::from(m.0)];
            if mine < limit || self.members[m].link == Link::Down || self.members[m].fault.is_some() {
                continue;
            }
            let alone = Members::ids().all(|o| o == m || ages[usize::from(o.0)] <= mine / SLOW_FACTOR);
            if alone && self.may_lose(m) {
                self.report(now, m, Fault::Slow, out);
            }
        }
    }

    /// What is in flight counts with the age that it has reached: a member must not look fast by not answering.
    fn count_unanswered(&mut self, now: u64) {
        for s in self.used.iter() {
            let slot = self.slot(s);
            if slot.work.is_job() {
                continue;
            }
            match *slot.stage() {
                Stage::Reading { member, sent_at } => self.count_age(member, Class::Read, now, sent_at),
                Stage::Writing(fan) => {
                    for m in fan.sent.iter() {
                        self.count_age(m, Class::Write, now, fan.last_sent);
                    }
                }
                _ => {}
            }
        }
    }

    fn count_age(&mut self, m: MemberId, class: Class, now: u64, sent_at: u64) {
        let age = now.saturating_sub(sent_at.max(self.counts_from(m)));
        if age >= SLOW_FLOOR {
            self.took(m, class, age);
        }
    }

    fn find_slow(&mut self, now: u64, class: Class, out: &mut Vec<Output>) {
        let mut samples = [0; MEMBERS_MAX];
        for m in Members::ids() {
            samples[usize::from(m.0)] = self.members[m].latencies.of(class).close();
        }
        for m in Members::ids() {
            let n = samples[usize::from(m.0)];
            if n == 0 || self.members[m].link != Link::Live || self.members[m].fault.is_some() {
                continue;
            }
            let Some(others) = self.median_of_others(m, class) else { continue };
            let mine = self.members[m].latencies.of(class);
            let median = mine.median.unwrap_or(0);
            // Of what was answered now and sent earlier some of the time may be this process's own.
            let starved = self.members[m].starved_at.is_some_and(|t| now.saturating_sub(t) < 2 * WINDOW);
            let mine = self.members[m].latencies.of(class);
            if starved || median < SLOW_FLOOR || median < others.saturating_mul(SLOW_FACTOR) {
                mine.slow_windows = 0;
                mine.slow_samples = 0;
                continue;
            }
            mine.slow_windows += 1;
            mine.slow_samples += n;
            let enough = mine.slow_samples >= SLOW_SAMPLES
                || (mine.slow_samples >= SLOW_SAMPLES_FEW && median >= SLOW_FLOOR_FEW);
            if mine.slow_windows >= SLOW_WINDOWS && enough && self.may_lose(m) {
                self.report(now, m, Fault::Slow, out);
            }
        }
    }

    /// The median of the other members' medians; of an even number the higher one.
    fn median_of_others(&mut self, m: MemberId, class: Class) -> Option<u64> {
        let mut all = [0; MEMBERS_MAX];
        let mut n = 0;
        for o in Members::ids().filter(|o| *o != m) {
            let other = &mut self.members[o];
            if other.link == Link::Live
                && other.fault.is_none()
                && let Some(median) = other.latencies.of(class).recent_median()
            {
                all[n] = median;
                n += 1;
            }
        }
        all[..n].sort_unstable();
        all[..n].get(n / 2).copied()
    }

    /// True if enough members are left to serve without this one.
    pub(super) fn may_lose(&self, m: MemberId) -> bool {
        let others = self.members.readable().without(m);
        let well = others.iter().filter(|o| self.members[*o].fault.is_none());
        let least = match self.members[m].role {
            Role::ReadWrite => self.shared.members_min(),
            Role::Out | Role::Filling | Role::Awaited | Role::WriteOnly | Role::Leaving => 1,
        };
        well.count() >= usize::try_from(least).unwrap_or(usize::MAX)
    }

    /// Whoever was reported as slow or full and stayed was needed then; that may have changed.
    fn forget_mild_faults(&mut self, now: u64) {
        for m in self.members.readable().iter() {
            let member = &mut self.members[m];
            let mild = matches!(member.fault, Some(Fault::Slow | Fault::NoSpace));
            if mild && now.saturating_sub(member.fault_at) >= JUDGED_AGAIN {
                member.fault = None;
            }
        }
    }

    /// A member that was slow once and is not read from since would otherwise never be tried again.
    fn age_read_means(&mut self) {
        for m in Members::ids() {
            let member = &mut self.members[m];
            if member.reading == 0 {
                member.read_mean -= member.read_mean / 4;
            }
        }
    }
}
