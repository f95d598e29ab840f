//! What a volume does right now: rates and times of its engine, how far rebuilds are and how long they still take.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use control::host::Root;
use control::proto::ptypes;
use serde::Serialize;

use super::observe::{ANSWER_PATIENCE, ReplicaView, connect_engine};

/// A volume's activity, as `status --watch -o json` prints it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct ActivityView {
    /// Seconds over which everything was counted.
    pub(super) seconds: f64,
    /// What clients asked.
    pub(super) reads: RequestsView,
    pub(super) writes: RequestsView,
    pub(super) unmaps: RequestsView,
    pub(super) flushes: RequestsView,
    /// Requests of clients in the queues now, and how many of them wait outside.
    pub(super) in_queue: u64,
    pub(super) parked: u64,
    /// Every configured replica.
    pub(super) replicas: Vec<ReplicaActivityView>,
}

/// What a replica was asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct ReplicaActivityView {
    pub(super) name: String,
    pub(super) reads: RequestsView,
    pub(super) writes: RequestsView,
    /// A running rebuild.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rebuild: Option<RebuildView>,
}

/// Requests of one kind. Times in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct RequestsView {
    /// That ended in the time.
    pub(super) count: u64,
    pub(super) iops: u64,
    pub(super) bytes_per_second: u64,
    pub(super) errors: u64,
    pub(super) mean: u64,
    pub(super) p50: u64,
    pub(super) p90: u64,
    pub(super) p99: u64,
    pub(super) p999: u64,
}

impl RequestsView {
    /// True if none ended. Engines that do not tell how many tell the rate, rounded.
    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0 && self.iops == 0 && self.errors == 0
    }
}

/// How far a rebuild is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct RebuildView {
    /// Bytes done, holes included.
    pub(super) done: u64,
    /// Bytes in all.
    pub(super) total: u64,
    /// Bytes per second lately; `None` until it was seen to advance.
    pub(super) bytes_per_second: Option<u64>,
    /// Seconds left at that rate.
    pub(super) seconds_left: Option<u64>,
}

impl ActivityView {
    /// True if nobody asked for anything, and nothing is being rebuilt.
    pub(super) fn is_idle(&self) -> bool {
        let rates = [self.reads, self.writes, self.unmaps, self.flushes];
        let of_replicas = self.replicas.iter().flat_map(|r| [r.reads, r.writes]);
        self.in_queue == 0
            && rates.into_iter().chain(of_replicas).all(|r| r.is_empty())
            && self.replicas.iter().all(|r| r.rebuild.is_none())
    }
}

impl From<Option<ptypes::Requests>> for RequestsView {
    fn from(requests: Option<ptypes::Requests>) -> Self {
        let r = requests.unwrap_or_default();
        Self {
            count: r.count,
            iops: r.rate,
            bytes_per_second: r.throughput,
            errors: r.errors,
            mean: r.mean,
            p50: r.p50,
            p90: r.p90,
            p99: r.p99,
            p999: r.p999,
        }
    }
}

impl From<ptypes::Activity> for ActivityView {
    fn from(activity: ptypes::Activity) -> Self {
        let replica = |r: ptypes::ReplicaActivity| ReplicaActivityView {
            name: r.name,
            reads: r.reads.into(),
            writes: r.writes.into(),
            rebuild: None,
        };
        Self {
            seconds: Duration::from_nanos(activity.window).as_secs_f64(),
            reads: activity.reads.into(),
            writes: activity.writes.into(),
            unmaps: activity.unmaps.into(),
            flushes: activity.flushes.into(),
            in_queue: activity.in_queue,
            parked: activity.parked,
            replicas: activity.replicas.into_iter().map(replica).collect(),
        }
    }
}

/// What the volume's engine did lately, if it answers.
pub(super) async fn ask_activity(root: &Root, volume: &str) -> Option<ActivityView> {
    let ask = async {
        let mut engine = connect_engine(root, volume).await?;
        Some(engine.metrics_get(()).await.ok()?.into_inner().activity?.into())
    };
    tokio::time::timeout(ANSWER_PATIENCE, ask).await.ok().flatten()
}

/// Advances of a rebuild that are kept: the rate is of this many last ones, at most.
const ADVANCES: usize = 10;

/// Follows rebuilds from look to look.
#[derive(Debug, Default)]
pub(super) struct Rebuilds {
    /// When each rebuild was seen to have come how far.
    seen: HashMap<String, VecDeque<(Instant, u64)>>,
}

impl Rebuilds {
    /// Adds to the activity how the rebuilds fare.
    pub(super) fn follow(&mut self, now: Instant, replicas: &[ReplicaView], activity: &mut ActivityView) {
        self.seen.retain(|name, _| replicas.iter().any(|r| r.name == *name && r.rebuild.is_some()));
        for replica in replicas {
            let Some((done, total)) = replica.rebuild else { continue };
            let rebuild = Some(self.look(now, &replica.name, done, total));
            match activity.replicas.iter_mut().find(|r| r.name == replica.name) {
                Some(known) => known.rebuild = rebuild,
                None => activity.replicas.push(ReplicaActivityView {
                    name: replica.name.clone(),
                    rebuild,
                    ..Default::default()
                }),
            }
        }
    }

    fn look(&mut self, now: Instant, name: &str, done: u64, total: u64) -> RebuildView {
        let seen = self.seen.entry(name.to_owned()).or_default();
        if seen.back().is_some_and(|(_, before)| done < *before) {
            // It was begun anew.
            seen.clear();
        }
        // Its engine tells of whole per cents: of a large volume one may take minutes.
        if seen.back().is_none_or(|(_, before)| done > *before) {
            seen.push_back((now, done));
        }
        while seen.len() > ADVANCES {
            seen.pop_front();
        }
        let (Some((first, from)), Some((last, to))) = (seen.front(), seen.back()) else {
            return RebuildView { done, total, bytes_per_second: None, seconds_left: None };
        };
        let took = u64::try_from(last.saturating_duration_since(*first).as_millis()).unwrap_or(u64::MAX);
        let rate = (to - from).saturating_mul(1000).checked_div(took).filter(|rate| *rate > 0);
        let since = now.saturating_duration_since(*last).as_secs();
        RebuildView {
            done,
            total,
            bytes_per_second: rate,
            seconds_left: rate.map(|rate| (total.saturating_sub(done) / rate).saturating_sub(since)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::observe::Mode;
    use super::*;

    fn replica(rebuild: Option<(u64, u64)>) -> ReplicaView {
        ReplicaView {
            name: "demo-r-1".into(),
            mode: Mode::Wo,
            path: "/r".into(),
            rebuild,
            ..ReplicaView::default()
        }
    }

    #[test]
    fn the_time_left_follows_from_the_last_advances() {
        let (start, mut rebuilds) = (Instant::now(), Rebuilds::default());
        let mut at = |second, done| {
            let mut activity = ActivityView::default();
            let now = start + Duration::from_secs(second);
            rebuilds.follow(now, &[replica(Some((done, 1000)))], &mut activity);
            let rebuild = activity.replicas[0].rebuild.unwrap();
            (rebuild.bytes_per_second, rebuild.seconds_left)
        };
        assert_eq!(at(0, 100), (None, None));
        assert_eq!(at(1, 110), (Some(10), Some(89)));
        assert_eq!(at(3, 110), (Some(10), Some(87)), "no news, and two seconds have passed");
        assert_eq!(at(9, 280), (Some(20), Some(36)));
        assert_eq!(at(10, 50), (None, None), "begun anew");
    }

    #[test]
    fn a_rebuild_that_ended_is_forgotten() {
        let (start, mut rebuilds, mut activity) =
            (Instant::now(), Rebuilds::default(), ActivityView::default());
        rebuilds.follow(start, &[replica(Some((1, 2)))], &mut activity);
        assert!(!activity.is_idle());
        let mut activity = ActivityView::default();
        rebuilds.follow(start, &[replica(None)], &mut activity);
        assert!(activity.is_idle() && rebuilds.seen.is_empty());
    }
}
