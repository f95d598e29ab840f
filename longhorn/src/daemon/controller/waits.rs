//! What an engine waits for, as its status and its log say it: who starts one by hand has no manager that would ask it.

use datapath::conductor::{ReplicaStatus, Status};
use lh_wire::handshake::Verdict;

use super::authority::Trouble;

/// What the engine waits for, and why those that it names do not come though they may be there. A replica that refuses the key is told
/// of whatever is waited for: it is there, and nobody looks for a key. So is an authority that does not answer.
pub(super) fn waited_for(status: &Status, authority: &Trouble) -> Option<String> {
    let what = status.waiting_for.as_ref()?;
    let bad_key = Verdict::BadKey.to_string();
    let why = |replica: &ReplicaStatus| {
        let why = replica.last_error.as_ref().filter(|_| !replica.connected)?;
        let is_named = what.split([' ', ',', ':', ';']).any(|word| word == replica.name);
        let is_told = is_named || why.ends_with(&bad_key);
        is_told.then(|| format!("{}: {why}", replica.name))
    };
    let whys = status.replicas.iter().filter_map(why).chain(authority.get());
    Some(match whys.collect::<Vec<_>>().join("; ") {
        reasons if reasons.is_empty() => what.clone(),
        reasons => format!("{what} ({reasons})"),
    })
}

/// What was told last.
#[derive(Debug, Default)]
pub(super) struct Waits {
    told: Option<String>,
}

impl Waits {
    /// Tells what is waited for now, if that is another thing than before. Called every few seconds, so that what is over at once is
    /// not told.
    pub(super) fn look(&mut self, now: Option<String>) {
        if let Some(line) = self.line(now) {
            tracing::info!("{line}");
        }
    }

    fn line(&mut self, now: Option<String>) -> Option<String> {
        if self.told == now {
            return None;
        }
        self.told = now;
        Some(match &self.told {
            Some(what) => format!("waiting: {what}"),
            None => "nothing is waited for any more".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datapath::conductor::{Counters, Limits, Mode, Robustness};
    use datapath::message::MemberId;

    use super::*;

    fn replica(name: &str, connected: bool, last_error: Option<&str>) -> ReplicaStatus {
        ReplicaStatus {
            member: MemberId(0),
            name: name.to_owned(),
            mode: Mode::Err,
            connected,
            rebuild: None,
            last_error: last_error.map(str::to_owned),
        }
    }

    #[test]
    fn why_those_do_not_come_that_are_waited_for_is_told_with_them_and_a_wrong_key_always() {
        let bad_key = format!("unix:/r/2.sock: {}", Verdict::BadKey);
        let status = |waiting_for: Option<&str>| Status {
            robustness: Robustness::Unknown,
            open: false,
            waiting_for: waiting_for.map(str::to_owned),
            lacks_members: false,
            replicas: vec![
                replica("r-1", false, Some("unix:/r/1.sock: No such file")),
                replica("r-2", false, Some(&bad_key)),
                // It is back: that is over.
                replica("r-3", true, Some("the connection broke")),
                replica("r-4", false, None),
                // Another one is named, whose name begins like its own.
                replica("r", false, Some("it is far away")),
            ],
            epoch: None,
            size: 1 << 30,
            chain: Arc::default(),
            chunks_in_doubt: 0,
            folds: Vec::new(),
            scrub: None,
            counters: Counters::default(),
            limits: Limits::default(),
        };
        let told = |waits: &str| waited_for(&status(Some(waits)), &Trouble::default()).unwrap();
        assert_eq!(waited_for(&status(None), &Trouble::default()), None);
        let missing = "r-1, r-3, r-4 missing";
        assert_eq!(told(missing), format!("{missing} (r-1: unix:/r/1.sock: No such file; r-2: {bad_key})"));
        let few = "too few replicas are left";
        assert_eq!(told(few), format!("{few} (r-2: {bad_key})"));
        let told = waited_for(&status(Some("an answer")), &Trouble::of("no API server"));
        assert_eq!(told.unwrap(), format!("an answer (r-2: {bad_key}; no API server)"));
    }

    #[test]
    fn what_is_waited_for_is_told_once_and_so_is_its_end() {
        let mut waits = Waits::default();
        let mut line = |now: Option<&str>| waits.line(now.map(str::to_owned));
        assert_eq!(line(None), None, "one that waits for nothing says nothing");
        assert_eq!(line(Some("r-1 is not here")).unwrap(), "waiting: r-1 is not here");
        assert_eq!(line(Some("r-1 is not here")), None);
        assert_eq!(line(Some("r-2 is not here")).unwrap(), "waiting: r-2 is not here");
        assert_eq!(line(None).unwrap(), "nothing is waited for any more");
        assert_eq!(line(None), None);
    }
}
