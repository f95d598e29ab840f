//! The engine's way to the volume's authority: the record directory's file on a bare host, the node's manager in a cluster.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use control::authority::{RemoteAuthority, Reply};
use control::host::{self, AuthorityError};
use datapath::conductor::Stored;
use datapath::engine;
use lh_block::{Address, Epoch, Generation};

use crate::daemon::GivesUp;

/// Why the authority does not say which epoch counts, as far as is known now.
#[derive(Clone, Debug, Default)]
pub(super) struct Trouble(Arc<Mutex<Option<String>>>);

impl Trouble {
    #[cfg(test)]
    pub(super) fn of(why: &str) -> Self {
        Self(Arc::new(Mutex::new(Some(why.to_owned()))))
    }

    /// `None`: it has said so, or was not asked.
    pub(super) fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// An authority that notes why it does not answer: whoever looks at the engine hears only that it is waited for.
pub(super) struct Noting {
    pub(super) authority: Box<dyn engine::Authority>,
    pub(super) trouble: Trouble,
}

impl engine::Authority for Noting {
    fn load(&mut self) -> Result<Option<Epoch>, String> {
        let loaded = self.authority.load();
        *self.trouble.0.lock().unwrap_or_else(PoisonError::into_inner) = loaded.as_ref().err().cloned();
        loaded
    }

    fn store(&mut self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Stored {
        self.authority.store(expected, epoch)
    }
}

/// The authority of a bare host, as the engine asks it.
pub(super) struct OnHost(pub(super) host::Authority);

impl engine::Authority for OnHost {
    fn load(&mut self) -> Result<Option<Epoch>, String> {
        self.0.settled_epoch().map_err(|e| e.to_string())
    }

    fn store(&mut self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Stored {
        match self.0.store_epoch(expected, epoch) {
            Ok(()) => Stored::Stored,
            Err(e @ (AuthorityError::Replaced(_) | AuthorityError::NotNewer(..))) => match self.0.epoch() {
                Ok(current) => Stored::Conflict { current },
                Err(_) => Stored::Unavailable { reason: e.to_string() },
            },
            Err(e) => Stored::Unavailable { reason: e.to_string() },
        }
    }
}

/// The authority of a cluster, as the engine asks it.
pub(super) struct InCluster(pub(super) RemoteAuthority);

/// The replicas that an engine of a cluster begins with where no epoch says who holds everything, for the quorum `unsafe`. Its command
/// line is that of its first start: it may name one that was left out since, and not the one that everything is on now. As with
/// other quorums a manager that cannot say is waited for.
pub(super) fn replicas_to_begin_with(
    authority: &RemoteAuthority,
    engine: &str,
    pause: Duration,
) -> Result<Vec<(String, Address)>, GivesUp> {
    let mut told = String::new();
    loop {
        let why = match authority.begin(engine) {
            Reply::Begin(found) => {
                let parsed = found.into_iter().map(|(name, address)| Ok((name, address.parse()?)));
                return parsed.collect::<Result<_, String>>().map_err(GivesUp);
            }
            Reply::Unavailable(why) => why,
            other => confused(&other),
        };
        if why != told {
            tracing::warn!("which replicas to begin with is not known yet: {why}");
            told = why;
        }
        std::thread::sleep(pause);
    }
}

/// For a reply that answers another question.
fn confused(reply: &Reply) -> String {
    format!("the manager of this node answered {reply:?}, which was not asked")
}

impl engine::Authority for InCluster {
    fn load(&mut self) -> Result<Option<Epoch>, String> {
        match self.0.load() {
            Reply::Counts(epoch) => Ok(epoch),
            Reply::Unavailable(reason) => Err(reason),
            other @ (Reply::Stored | Reply::Conflict(_) | Reply::Begin(_)) => Err(confused(&other)),
        }
    }

    fn store(&mut self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Stored {
        match self.0.store(expected, epoch) {
            Reply::Stored => Stored::Stored,
            Reply::Conflict(current) => Stored::Conflict { current },
            Reply::Unavailable(reason) => Stored::Unavailable { reason },
            other @ (Reply::Counts(_) | Reply::Begin(_)) => Stored::Unavailable { reason: confused(&other) },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use control::authority::Question;
    use datapath::engine::Authority;
    use lh_block::Instance;

    use super::*;

    #[test]
    fn a_conflict_tells_what_is_stored() {
        let dir = tempfile::tempdir().unwrap();
        let mut authority = OnHost(host::Authority::in_directory(dir.path()));
        assert_eq!(authority.load(), Ok(None));
        let epoch = |counter| Epoch { counter, id: Instance(counter.into()), ..Epoch::default() };
        assert_eq!(authority.store(None, &epoch(1)), Stored::Stored);
        assert_eq!(authority.store(None, &epoch(2)), Stored::Conflict { current: Some(epoch(1)) });
        assert_eq!(authority.store(Some(epoch(1).order()), &epoch(2)), Stored::Stored);
        assert_eq!(authority.load(), Ok(Some(epoch(2))));
        std::fs::write(dir.path().join("authority.json"), "{").unwrap();
        assert!(authority.load().is_err());
        assert!(matches!(authority.store(None, &epoch(3)), Stored::Unavailable { .. }));
    }

    #[test]
    fn why_an_authority_does_not_answer_is_known_until_it_does() {
        let dir = tempfile::tempdir().unwrap();
        let trouble = Trouble::default();
        let authority = Box::new(OnHost(host::Authority::in_directory(dir.path())));
        let mut noting = Noting { authority, trouble: trouble.clone() };
        let file = dir.path().join("authority.json");
        std::fs::write(&file, "{").unwrap();
        let refused = noting.load().unwrap_err();
        assert!(refused.contains("authority.json"), "{refused}");
        assert_eq!(trouble.get(), Some(refused));
        std::fs::remove_file(&file).unwrap();
        assert_eq!((noting.load(), trouble.get()), (Ok(None), None));
    }

    #[test]
    fn an_engine_without_epochs_begins_with_what_its_manager_names_and_waits_for_its_word() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let replies = [
            Reply::Unavailable("no API server".to_owned()),
            Reply::Begin(vec![("r-4".to_owned(), "unix:/r/4.sock".to_owned())]),
        ];
        let server = std::thread::spawn(move || {
            for reply in replies {
                let (stream, _) = listener.accept().unwrap();
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line).unwrap();
                let asked: Question = serde_json::from_str(&line).unwrap();
                assert_eq!(asked, Question::Begin { engine: "demo-e-0".to_owned() });
                writeln!(&stream, "{}", serde_json::to_string(&reply).unwrap()).unwrap();
            }
        });
        let authority = RemoteAuthority::at(socket, "demo");
        let found = replicas_to_begin_with(&authority, "demo-e-0", Duration::ZERO).unwrap();
        server.join().unwrap();
        assert_eq!(found, [("r-4".to_owned(), "unix:/r/4.sock".parse().unwrap())]);
    }
}
