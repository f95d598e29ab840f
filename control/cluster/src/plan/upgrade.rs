//! Another program under a running engine or replica: exchanged in place, and back again if the new one does not serve.
//!
//! ```text
//! runs the wanted one -----------------------------> Rest
//!    ^                                                 | another image is wanted
//!    | serves: Done                                    v
//! runs the new one <------- the node did it ------- Exchange (Missing: its program is not on the node)
//!    | ended, or PATIENCE is over
//!    v
//! GoBack: the one before runs, and the new one is not tried again until another one is wanted
//! ```

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::{age, written};
use crate::api::{Condition, Conditions};

/// The condition that says how an exchange fares.
pub const UPGRADED: &str = "Upgraded";

/// Its reason where a volume names an image whose program is not on its nodes.
pub const NOT_DEPLOYED: &str = "NotDeployed";

/// Its reason while a program is exchanged.
const EXCHANGING: &str = "Exchanging";

/// Its reason after a program was taken back.
pub const FAILED: &str = "Failed";

/// True while a program is exchanged.
pub fn is_on(conditions: &Vec<Condition>) -> bool {
    conditions.get_condition(UPGRADED).is_some_and(|c| c.reason == EXCHANGING)
}

/// How long a new program may take to serve, ranges in doubt made equal included.
const PATIENCE: Duration = Duration::from_secs(60);

/// An exchange that was asked for shows within this time, or is asked for again; longer than a process may take to end.
const SHOWS: Duration = Duration::from_secs(40);

/// How often a process that is exchanged is looked at: nobody is told when it begins to serve.
const GLANCE: Duration = Duration::from_millis(500);

/// What is known of a process and of the images that it has to do with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Programs {
    /// It runs the program of [`target`]'s image.
    pub runs_target: bool,
    /// That program is on this node.
    pub installed: bool,
}

/// The images of an engine or a replica.
#[derive(Clone, Copy, Debug)]
pub struct Images<'a> {
    /// The one that it should be of.
    pub wanted: &'a str,
    /// The one that served last.
    pub current: &'a str,
    /// The one that was tried last and did not serve.
    pub failed: &'a str,
}

/// The image whose program should run.
pub fn target<'a>(images: Images<'a>) -> &'a str {
    let is_failed = images.wanted == images.failed && !images.current.is_empty();
    if is_failed { images.current } else { images.wanted }
}

/// How a process fares.
#[derive(Clone, Copy, Debug)]
struct Observed<'a> {
    /// Its images.
    images: Images<'a>,
    /// Its program.
    programs: Programs,
    /// It answers, and does what it is for.
    serves: bool,
    /// Why it does not run; empty if it does.
    trouble: &'a str,
    /// The condition, if there is one.
    condition: Option<&'a Condition>,
    /// The time.
    now: Timestamp,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Rest,
    /// Nothing, until that time has passed.
    Wait(Duration),
    /// Exchange the program for that of the target.
    Exchange,
    /// The program of the image that is wanted is not on this node.
    Missing,
    /// The target serves.
    Done,
    /// The new program does not serve, and why: go back.
    GoBack(String),
}

/// What an exchange asks for now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advance {
    /// Have the process run the program of this image.
    pub exchange: Option<String>,
    /// Look again after this time.
    pub wait: Option<Duration>,
    /// Why the new program is given up.
    pub failure: Option<String>,
}

/// Decides for one process that should run, and notes in its status what that means: `current` and `failed` are the status's
/// fields of those names.
pub fn advance(
    wanted: &str,
    (programs, serves, trouble): (Programs, bool, &str),
    (current, failed): (&mut String, &mut String),
    conditions: &mut Vec<Condition>,
    now: Timestamp,
) -> Advance {
    let images = Images { wanted, current, failed };
    let condition = conditions.get_condition(UPGRADED);
    let step = step(&Observed { images, programs, serves, trouble, condition, now });
    note(&step, wanted, (current, failed), conditions, now);
    let exchanges = matches!(step, Step::Exchange | Step::GoBack(_));
    Advance {
        exchange: exchanges.then(|| target(Images { wanted, current, failed }).to_owned()),
        wait: if let Step::Wait(left) = &step { Some((*left).min(GLANCE)) } else { None },
        failure: if let Step::GoBack(why) = step { Some(why) } else { None },
    }
}

/// Decides for one process that should run.
fn step(o: &Observed<'_>) -> Step {
    let target = target(o.images);
    let goes_back = target != o.images.wanted;
    let since =
        |reason| o.condition.filter(|c| c.reason == reason).and_then(|c| age(&c.last_transition_time, o.now));
    let exchanging = since(EXCHANGING);
    let left = |since: Duration, limit: Duration| limit.checked_sub(since).filter(|left| !left.is_zero());
    if !o.programs.runs_target {
        let asked = if goes_back { since(FAILED) } else { exchanging };
        return match asked.and_then(|asked| left(asked, SHOWS)) {
            Some(left) => Step::Wait(left),
            None if !o.programs.installed => Step::Missing,
            None if o.serves || goes_back => Step::Exchange,
            None => Step::Rest,
        };
    }
    if target == o.images.current {
        // What failed may be tried again once another image was wanted in between.
        let is_over = exchanging.is_some() || !goes_back && !o.images.failed.is_empty();
        return if is_over && o.serves { Step::Done } else { Step::Rest };
    }
    match exchanging {
        _ if o.serves => Step::Done,
        None => Step::Rest,
        Some(_) if !o.trouble.is_empty() => Step::GoBack(o.trouble.to_owned()),
        Some(since) => match left(since, PATIENCE) {
            Some(left) => Step::Wait(left),
            None => Step::GoBack(format!("it did not serve within {} s", PATIENCE.as_secs())),
        },
    }
}

/// Notes in the status what a step means. `current` and `failed` are the status's own fields.
pub fn note(
    step: &Step,
    wanted: &str,
    (current, failed): (&mut String, &mut String),
    conditions: &mut Vec<Condition>,
    now: Timestamp,
) {
    let now = written(now);
    let mut say = |holds: bool, reason: &str, message: String| {
        // Its time is that of this step, whatever was said before.
        conditions.retain(|c| c.kind != UPGRADED);
        conditions.set_condition(UPGRADED, holds, reason, &message, &now);
    };
    match step {
        Step::Rest | Step::Wait(_) | Step::Missing => {}
        Step::Exchange if wanted == failed.as_str() => {
            say(false, FAILED, format!("back to {current}: {wanted} did not serve"));
        }
        Step::Exchange => say(false, EXCHANGING, format!("{current} is exchanged for {wanted}")),
        Step::Done => {
            let is_change = !current.is_empty() && current != wanted;
            wanted.clone_into(current);
            failed.clear();
            if is_change || conditions.get_condition(UPGRADED).is_some() {
                conditions.retain(|c| c.kind != UPGRADED);
                conditions.set_condition(UPGRADED, true, "", "", &now);
            }
        }
        Step::GoBack(why) => {
            wanted.clone_into(failed);
            say(false, FAILED, format!("back to {current}: {wanted} does not serve: {why}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_second(1_700_000_000).unwrap()
    }

    fn said(reason: &str, seconds_ago: u64) -> Condition {
        let mut conditions = Vec::new();
        let time = written(now() - Duration::from_secs(seconds_ago));
        conditions.set_condition(UPGRADED, false, reason, "", &time);
        conditions.remove(0)
    }

    const UPGRADE: Images<'_> = Images { wanted: "new", current: "old", failed: "" };
    const REST: Images<'_> = Images { wanted: "old", current: "old", failed: "" };
    const WENT_BACK: Images<'_> = Images { wanted: "new", current: "old", failed: "new" };
    const FIRST: Images<'_> = Images { wanted: "old", current: "", failed: "" };

    fn decide(images: Images<'_>, runs: bool, serves: bool, trouble: &str, since: Option<u64>) -> Step {
        let condition = since.map(|since| said(EXCHANGING, since));
        let programs = Programs { runs_target: runs, installed: true };
        step(&Observed { images, programs, serves, trouble, condition: condition.as_ref(), now: now() })
    }

    #[test]
    fn a_program_is_exchanged_once_and_goes_back_if_it_does_not_serve() {
        let second = Duration::from_secs;
        let timeout = || Step::GoBack("it did not serve within 60 s".into());
        let cases = [
            ("at rest", REST, true, true, "", None, Step::Rest),
            ("a first start", FIRST, true, false, "", None, Step::Rest),
            ("a first start serves", FIRST, true, true, "", None, Step::Done),
            ("another image is wanted", UPGRADE, false, true, "", None, Step::Exchange),
            ("one that does not serve is left alone", UPGRADE, false, false, "", None, Step::Rest),
            ("it was asked for", UPGRADE, false, true, "", Some(1), Step::Wait(second(39))),
            ("it does not show", UPGRADE, false, true, "", Some(40), Step::Exchange),
            ("the new one starts", UPGRADE, true, false, "", Some(10), Step::Wait(second(50))),
            ("the new one serves", UPGRADE, true, true, "", Some(10), Step::Done),
            ("the new one ended", UPGRADE, true, false, "bad", Some(10), Step::GoBack("bad".into())),
            ("the new one hangs", UPGRADE, true, false, "", Some(60), timeout()),
            ("started anew with another image", UPGRADE, true, false, "bad", None, Step::Rest),
            ("started anew, and serves", UPGRADE, true, true, "", None, Step::Done),
            ("it went back", WENT_BACK, true, true, "", None, Step::Rest),
            ("it is to go back", WENT_BACK, false, false, "bad", None, Step::Exchange),
            ("taken back while it was exchanged", REST, true, true, "", Some(3), Step::Done),
        ];
        for (what, images, runs, serves, trouble, since, expected) in cases {
            assert_eq!(decide(images, runs, serves, trouble, since), expected, "{what}");
        }
        let of = |images, installed, condition: Option<&Condition>| {
            let programs = Programs { runs_target: false, installed };
            step(&Observed { images, programs, serves: true, trouble: "", condition, now: now() })
        };
        assert_eq!(of(UPGRADE, false, None), Step::Missing);
        let failed = said(FAILED, 1);
        assert_eq!(of(WENT_BACK, true, Some(&failed)), Step::Wait(second(39)), "it was asked to go back");
        let other = Images { wanted: "newer", ..WENT_BACK };
        assert_eq!(of(other, true, Some(&failed)), Step::Exchange, "yet another one is tried at once");
    }

    /// A node that does at once what it is told, with programs of which some serve.
    fn play(wanted: &[&str], serving: &[&str]) -> (String, String, Vec<String>) {
        let (mut current, mut failed, mut conditions) = (String::from("old"), String::new(), Vec::new());
        let mut runs = String::from("old");
        let mut ran = Vec::new();
        for wanted in wanted {
            for _ in 0..6 {
                let images = Images { wanted, current: &current, failed: &failed };
                let target = target(images).to_owned();
                let serves = serving.contains(&runs.as_str());
                let programs = Programs { runs_target: runs == target, installed: true };
                let trouble = if serves { "" } else { "bad" };
                // Nothing shows late here.
                let condition = conditions.get_condition(UPGRADED).filter(|_| runs == target);
                let taken = step(&Observed { images, programs, serves, trouble, condition, now: now() });
                note(&taken, wanted, (&mut current, &mut failed), &mut conditions, now());
                if matches!(taken, Step::Exchange) {
                    runs.clone_from(&target);
                    ran.push(target);
                }
            }
        }
        (current, failed, ran)
    }

    #[test]
    fn what_serves_stays_and_what_failed_is_tried_again_only_when_it_is_wanted_anew() {
        let (current, failed, ran) = play(&["new"], &["old", "new"]);
        assert_eq!((&*current, &*failed, ran), ("new", "", vec!["new".to_owned()]));
        let (current, failed, ran) = play(&["new", "new"], &["old"]);
        assert_eq!((&*current, &*failed), ("old", "new"));
        assert_eq!(ran, ["new", "old"], "it goes back, and stays there");
        let (current, _, ran) = play(&["new", "old", "new"], &["old"]);
        assert_eq!((&*current, ran), ("old", vec!["new".into(), "old".into(), "new".into(), "old".into()]));
    }
}
