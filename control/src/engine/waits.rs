//! What a volume waits for, as a client of its engine reads it.

use crate::proto::ptypes::Volume;
use crate::proto::volume::Wait;

impl Volume {
    /// What [`Self::waiting_for`] is about; [`Wait::Untold`]: nothing is waited for.
    pub fn waits(&self) -> Wait {
        match self.wait() {
            // A newer engine may wait for what this version does not know, too.
            Wait::Untold => by_sentence(&self.waiting_for),
            told => told,
        }
    }
}

/// Engines that do not have [`Volume::wait`] yet tell it by these words alone. They are theirs, and stay whatever newer ones say.
fn by_sentence(waiting_for: &str) -> Wait {
    const HIDDEN: &str = "it is hidden:";
    const TOO_FEW: &str = "too few replicas are left";
    match waiting_for.strip_prefix(TOO_FEW) {
        // In brackets: why each of them does not come.
        Some(rest) if rest.is_empty() || rest.starts_with(" (") => Wait::Replicas,
        _ if waiting_for.is_empty() => Wait::Untold,
        _ if waiting_for.starts_with(HIDDEN) => Wait::Shown,
        _ => Wait::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_of_another_version_is_understood() {
        let read =
            |wait: i32, what: &str| Volume { wait, waiting_for: what.into(), ..Volume::default() }.waits();
        let older = |what: &str| read(0, what);
        assert_eq!(older(""), Wait::Untold);
        assert_eq!(older("it is hidden: `longhornctl up demo` shows it again"), Wait::Shown);
        assert_eq!(older("too few replicas are left"), Wait::Replicas);
        assert_eq!(older("too few replicas are left (demo-r-1: its key is another)"), Wait::Replicas);
        assert_eq!(older("too few replicas hold the newest data"), Wait::Other);
        assert_eq!(read(99, "what nobody here knows"), Wait::Other);
    }

    #[test]
    fn what_an_engine_tells_counts_whatever_its_words_are() {
        for told in [Wait::Replicas, Wait::Shown, Wait::Other] {
            for what in ["it is hidden: x", "too few replicas are left", "other words"] {
                let volume = Volume { wait: told.into(), waiting_for: what.into(), ..Volume::default() };
                assert_eq!(volume.waits(), told, "{what}");
            }
        }
    }
}
