//! What to do, decided from what is observed, without I/O and without a clock.
//!
//! Each module holds one controller's decision: it takes resources as they are read and gives back what to change. The
//! controllers (`crate::run`) carry that out and come back when anything changes, so that a decision never
//! waits, and one that was carried out half is simply made again.

pub mod attachment;
pub mod automatic_upgrade;
pub mod default_disk;
pub mod drain;
pub mod engine;
pub mod growth;
pub mod instance_manager;
pub mod node;
pub mod orphan;
pub mod pods;
pub mod rebuild;
pub mod replica;
pub mod served;
pub mod snapshot;
pub mod stay;
pub mod trim;
pub mod upgrade;
pub mod volume;

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::api::Condition;

/// The finalizer that keeps a resource until what it stands for is gone; Longhorn's, so that either can finish what the
/// other began.
pub const FINALIZER: &str = "longhorn.io";

/// The label that names the volume of a resource; Longhorn's.
pub const VOLUME_LABEL: &str = "longhornvolume";

/// Something that people should hear of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Something is wrong.
    pub warning: bool,
    /// One word for programs.
    pub reason: &'static str,
    /// One sentence for people.
    pub message: String,
}

/// Longhorn's name of a volume's first engine. A migration makes another one, `VOLUME-e-1`, which stays, and the next one is
/// of this name again.
pub fn engine_name(volume: &str) -> String {
    format!("{volume}-e-0")
}

/// The volume of an engine's name; `None`: it is none. Before Longhorn 1.5 it ended in eight hex digits instead of a number, and
/// engines of then have their names for ever.
pub fn volume_of_engine(name: &str) -> Option<&str> {
    let (volume, end) = name.rsplit_once("-e-")?;
    let is_number = !end.is_empty() && end.bytes().all(|b| b.is_ascii_digit());
    let is_of_before = end.len() == 8 && end.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    ((is_number || is_of_before) && !volume.is_empty()).then_some(volume)
}

/// As the times in resources are written.
pub fn written(time: Timestamp) -> String {
    format!("{}", time.strftime("%Y-%m-%dT%H:%M:%SZ"))
}

/// So far apart clocks are that are kept: what was written with one may lie ahead by that with another.
const SKEW: SignedDuration = SignedDuration::from_mins(5);

/// How long ago a written time is; `None` if nothing is written that can be believed: it is unreadable, or so far ahead that a clock
/// was wrong. What is ahead by less is now.
pub fn age(time: &str, now: Timestamp) -> Option<Duration> {
    let then: Timestamp = time.parse().ok()?;
    let passed = now.duration_since(then);
    (passed >= -SKEW).then(|| passed.max(SignedDuration::ZERO).unsigned_abs())
}

/// [`age`] by the clock of another that nobody here writes anew: the API server's, a node's, an earlier leader's. There this clock may as
/// well be the wrong one, so what is ahead by however much is now: whoever asks waits, or takes it for the latest. `None`: it is unreadable.
pub fn age_by_other(time: &str, now: Timestamp) -> Option<Duration> {
    let then: Timestamp = time.parse().ok()?;
    Some(now.duration_since(then).max(SignedDuration::ZERO).unsigned_abs())
}

/// Writes times anew that lie so far ahead that they were written with a wrong clock: counted from now, whatever waits for them waits once
/// more, and not until that clock is right.
fn renew<'a>(times: impl IntoIterator<Item = &'a mut String>, now: Timestamp) {
    let is_ahead = |time: &str| time.parse().is_ok_and(|then: Timestamp| then.duration_since(now) > SKEW);
    for time in times.into_iter().filter(|time| is_ahead(time)) {
        *time = written(now);
    }
}

/// [`renew`] for when conditions became what they are.
fn renew_conditions(conditions: &mut [Condition], now: Timestamp) {
    renew(conditions.iter_mut().map(|c| &mut c.last_transition_time), now);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_known_by_their_names_those_of_before_longhorn_1_5_too() {
        for (name, volume) in [
            ("v-e-0", Some("v")),
            ("v-e-17", Some("v")),
            ("pvc-1-e-4f2c1d3e", Some("pvc-1")),
            ("a-e-12345678", Some("a")),
            ("v-e-4f2c1d3", None),
            ("v-e-4f2c1d3g", None),
            ("a-e-12345678-r-0abc1234", None),
            ("v-r-0abc1234", None),
            ("-e-0", None),
        ] {
            assert_eq!(volume_of_engine(name), volume, "{name}");
        }
    }

    #[test]
    fn times_are_read_as_they_are_written() {
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        assert_eq!(written(now), "2023-11-14T22:13:20Z");
        assert_eq!(age("2023-11-14T22:13:05Z", now), Some(Duration::from_secs(15)));
        assert_eq!(age("2023-11-14T22:14:00Z", now), Some(Duration::ZERO));
        assert_eq!(age("", now), None);
    }

    #[test]
    fn what_a_wrong_clock_wrote_is_not_believed_and_is_written_anew() {
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        let at = |seconds| written(now + SignedDuration::from_secs(seconds));
        assert_eq!((age(&at(300), now), age(&at(301), now)), (Some(Duration::ZERO), None));
        let mut times = [at(-301), at(300), at(301), String::new()];
        renew(&mut times, now);
        assert_eq!(times, [at(-301), at(300), at(0), String::new()]);
    }
}
