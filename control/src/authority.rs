//! The authority of a volume in a cluster, as its engine asks it: over a unix socket of the node's manager, which passes
//! the compare-and-swap on to the Volume resource (`docs/invariants.md`, 12).
//!
//! One connection per question, one line of JSON each way. The engine's side blocks: it asks on its control thread, which
//! has nothing else to do until the answer is there. An authority that does not answer is asked again by the engine.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use lh_block::{Epoch, Generation};
use serde::{Deserialize, Serialize};

use crate::transport::connect_within;

/// How long a question may take: the manager asks the API server, and tries again where another writer was faster.
const PATIENCE: Duration = Duration::from_secs(15);

/// Longest line. An epoch of 20 replicas with names of 80 bytes takes 2 KiB.
pub const LINE_MAX: u64 = 64 << 10;

/// What an engine asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Question {
    /// Which epoch counts?
    Load {
        /// The volume.
        volume: String,
    },
    /// Store this epoch in place of the one that was expected.
    Store {
        /// The volume.
        volume: String,
        /// The number of the epoch that it replaces; `None`: of no epoch at all.
        expected: Option<(Generation, u64)>,
        /// The new one.
        epoch: Epoch,
    },
    /// With which replicas does an engine begin that no epoch tells who holds everything?
    Begin {
        /// The engine.
        engine: String,
    },
}

/// What the manager answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    /// This epoch counts.
    Counts(Option<Epoch>),
    /// It is stored, for good.
    Stored,
    /// Another one is stored: whoever asked is not the one any more.
    Conflict(Option<Epoch>),
    /// These replicas hold everything: their names and addresses. Never empty.
    Begin(Vec<(String, String)>),
    /// Nobody can say now, and nothing is known to be stored.
    Unavailable(String),
}

/// A volume's authority behind a socket.
#[derive(Clone, Debug)]
pub struct RemoteAuthority {
    socket: PathBuf,
    volume: String,
    patience: Duration,
}

impl RemoteAuthority {
    /// The authority that the manager of this node passes on.
    pub fn at(socket: PathBuf, volume: &str) -> Self {
        Self { socket, volume: volume.to_owned(), patience: PATIENCE }
    }

    /// Asks which epoch counts.
    pub fn load(&self) -> Reply {
        self.ask(&Question::Load { volume: self.volume.clone() })
    }

    /// Asks to store an epoch. After `Unavailable` it may be stored or not; the same question may be asked again.
    pub fn store(&self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Reply {
        self.ask(&Question::Store { volume: self.volume.clone(), expected, epoch: epoch.clone() })
    }

    /// Asks with which replicas the engine begins.
    pub fn begin(&self, engine: &str) -> Reply {
        self.ask(&Question::Begin { engine: engine.to_owned() })
    }

    fn ask(&self, question: &Question) -> Reply {
        self.try_ask(question).unwrap_or_else(|e| {
            Reply::Unavailable(format!(
                "the manager of this node does not answer at {}: {e}",
                self.socket.display()
            ))
        })
    }

    fn try_ask(&self, question: &Question) -> io::Result<Reply> {
        let mut stream = connect_within(self.patience, &self.socket)?;
        let mut line = serde_json::to_vec(question)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut answer = String::new();
        BufReader::new(stream.take(LINE_MAX)).read_line(&mut answer)?;
        Ok(serde_json::from_str(&answer)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

    use super::*;

    #[test]
    fn questions_and_replies_go_over_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let epoch = Epoch { counter: 3, members: vec!["r".into()], ..Epoch::default() };
        let reply = Reply::Conflict(Some(epoch.clone()));
        let answer = reply.clone();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            writeln!(&stream, "{}", serde_json::to_string(&answer).unwrap()).unwrap();
            serde_json::from_str::<Question>(&line).unwrap()
        });
        let authority = RemoteAuthority::at(socket.clone(), "demo");
        assert_eq!(authority.store(Some((Generation::from(7), 2)), &epoch), reply);
        let expected = Some((Generation::from(7), 2));
        assert_eq!(server.join().unwrap(), Question::Store { volume: "demo".into(), expected, epoch });
        std::fs::remove_file(&socket).unwrap();
        assert!(matches!(authority.load(), Reply::Unavailable(text) if text.contains("a.sock")));
    }

    /// The engine's control thread waits for the answer, and has its replicas to watch.
    fn is_given_up(socket: PathBuf) {
        let patience = Duration::from_millis(200);
        let authority = RemoteAuthority { patience, ..RemoteAuthority::at(socket, "demo") };
        let (told, answer) = std::sync::mpsc::channel();
        std::thread::spawn(move || told.send(authority.load()));
        let answer = answer.recv_timeout(Duration::from_secs(20)).expect("it ends");
        assert!(matches!(answer, Reply::Unavailable(_)), "{answer:?}");
    }

    #[test]
    fn a_manager_that_takes_a_question_and_says_nothing_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a.sock");
        let _mute = UnixListener::bind(&socket).unwrap();
        is_given_up(socket);
    }

    /// It was stopped, or waits for the API server: those that gave it up keep their places.
    #[test]
    fn a_manager_with_no_room_for_another_question_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 0).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        is_given_up(path);
    }
}
