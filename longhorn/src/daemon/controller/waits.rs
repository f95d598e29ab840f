//! What an engine waits for, in its log: who starts one by hand has no manager that would ask it.

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
    use super::*;

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
