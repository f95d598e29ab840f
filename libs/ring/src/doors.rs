//! Where the connections of a server come in.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use crate::{Completion, Fd, Ring, Token};

/// Between two words on those who are turned away: whoever reaches a port can come a thousand times a second.
const WORD: Duration = Duration::from_secs(60);

/// The sockets on which a server accepts, each with one accept on its way. With every one of them `K` is kept for as long as it
/// is open.
///
/// An accept that fails, for want of descriptors or memory, is not made again at once, which would fail as well: the server
/// calls [`Doors::again`] when some time has passed.
#[derive(Debug)]
pub struct Doors<K> {
    owner: u8,
    kind: u8,
    open: Vec<Door<K>>,
    /// Turned away since that was told last.
    untold: u64,
    told: Option<Instant>,
}

#[derive(Debug)]
struct Door<K> {
    socket: Fd,
    accepting: bool,
    _kept: K,
}

impl<K> Doors<K> {
    /// None yet. Their completions have tokens of this owner and kind; the slot says which door.
    pub const fn new(owner: u8, kind: u8) -> Self {
        Self { owner, kind, open: Vec::new(), untold: 0, told: None }
    }

    /// Accepts on this socket, too, which listens already.
    pub fn open(&mut self, ring: &mut Ring, socket: OwnedFd, kept: K) {
        let socket = Fd::from(socket);
        ring.accept(self.token(self.open.len()), &socket);
        self.open.push(Door { socket, accepting: true, _kept: kept });
    }

    /// Accepts nowhere any more. What was on its way still completes, and is nobody's.
    pub fn close(&mut self, ring: &mut Ring) {
        for index in 0..self.open.len() {
            ring.cancel(self.token(index));
        }
        self.open.clear();
    }

    /// An accept has come to its end: takes the connection and makes the next accept. `None`: the door has been closed.
    ///
    /// # Errors
    /// The system's; nobody is accepted at this door before [`Doors::again`].
    pub fn accepted(&mut self, ring: &mut Ring, completion: Completion) -> io::Result<Option<OwnedFd>> {
        let token = completion.token;
        let Some(door) = self.open.get_mut(usize::from(token.slot)) else { return Ok(None) };
        match completion.result {
            Ok(_) => {
                ring.accept(token, &door.socket);
                Ok(completion.accepted.and_then(Fd::into_owned))
            }
            Err(e) => {
                door.accepting = false;
                Err(e)
            }
        }
    }

    /// True if [`Doors::again`] has something to do.
    pub fn is_waiting(&self) -> bool {
        self.open.iter().any(|door| !door.accepting)
    }

    /// Accepts again where it has failed.
    pub fn again(&mut self, ring: &mut Ring) {
        for index in 0..self.open.len() {
            let token = self.token(index);
            let door = &mut self.open[index];
            if !std::mem::replace(&mut door.accepting, true) {
                ring.accept(token, &door.socket);
            }
        }
    }

    /// One more connection is turned away. How many those are of which nothing has been logged, if something may be now: the first is
    /// told at once, and later ones once a minute.
    pub fn turns_away(&mut self, now: Instant) -> Option<u64> {
        self.untold += 1;
        if self.told.is_some_and(|told| now.duration_since(told) < WORD) {
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }

    fn token(&self, index: usize) -> Token {
        Token::new(self.owner, self.kind, u16::try_from(index).unwrap_or(u16::MAX), 0)
    }
}

/// A peer whose host is gone gives its place back after about as many seconds, with answers on their way to it or without.
pub const SILENT_SECONDS: u32 = KEEP_IDLE + KEEP_COUNT * KEEP_INTERVAL;

/// Seconds of silence before the kernel asks whether the peer is there, seconds between two such questions, and how many remain
/// unanswered before it is gone (tcp(7)).
const KEEP_IDLE: u32 = 60;
const KEEP_INTERVAL: u32 = 10;
const KEEP_COUNT: u32 = 3;

/// Sets what a TCP connection needs that is served, or serves. Unix sockets have none of it and refuse.
pub fn tune_served(connection: impl AsFd) {
    let connection = connection.as_fd();
    // Answers leave at once: they are collected by the server already.
    let _ = setsockopt(&connection, sockopt::TcpNoDelay, &true);
    let _ = setsockopt(&connection, sockopt::TcpUserTimeout, &(SILENT_SECONDS * 1000));
    let _ = setsockopt(&connection, sockopt::TcpKeepIdle, &KEEP_IDLE);
    let _ = setsockopt(&connection, sockopt::TcpKeepInterval, &KEEP_INTERVAL);
    let _ = setsockopt(&connection, sockopt::TcpKeepCount, &KEEP_COUNT);
    let _ = setsockopt(&connection, sockopt::KeepAlive, &true);
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::rc::Rc;

    use nix::errno::Errno;
    use nix::sys::socket::getsockopt;

    use super::*;

    const OWNER: u8 = 2;
    const ACCEPT: u8 = 7;

    fn listener(directory: &Path, name: &str) -> OwnedFd {
        UnixListener::bind(directory.join(name)).unwrap().into()
    }

    /// Completions of one turn of at most `time`.
    fn turn(ring: &mut Ring, time: u64) -> Vec<Completion> {
        ring.turn(Some(Duration::from_millis(time))).unwrap();
        std::iter::from_fn(|| ring.next()).collect()
    }

    /// Who is accepted next, and where.
    fn next(ring: &mut Ring, doors: &mut Doors<Rc<()>>) -> (Token, UnixStream) {
        let completion = turn(ring, 5000).pop().expect("somebody is accepted");
        let token = completion.token;
        let connection = doors.accepted(ring, completion).unwrap().unwrap();
        (token, connection.into())
    }

    fn connect(directory: &Path, name: &str, word: &[u8; 3]) -> UnixStream {
        let mut stream = UnixStream::connect(directory.join(name)).unwrap();
        stream.write_all(word).unwrap();
        stream
    }

    fn word(stream: &mut UnixStream) -> [u8; 3] {
        let mut word = [0; 3];
        stream.read_exact(&mut word).unwrap();
        word
    }

    #[test]
    fn who_is_turned_away_is_told_once_a_minute() {
        let mut doors = Doors::<()>::new(OWNER, ACCEPT);
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        assert_eq!(doors.turns_away(at(0)), Some(1));
        let told: Vec<u64> = (0..999).filter_map(|i| doors.turns_away(at(i / 10))).collect();
        assert_eq!(told, [601]);
    }

    #[test]
    fn one_after_the_other_comes_in_at_every_door() {
        let place = tempfile::tempdir().unwrap();
        let (mut ring, mut doors) = (Ring::new(8).unwrap(), Doors::new(OWNER, ACCEPT));
        for name in ["front", "back"] {
            doors.open(&mut ring, listener(place.path(), name), Rc::new(()));
        }
        for (slot, name, said) in [(0, "front", b"one"), (1, "back", b"two"), (0, "front", b"six")] {
            let _peer = connect(place.path(), name, said);
            let (token, mut connection) = next(&mut ring, &mut doors);
            assert_eq!(token, Token::new(OWNER, ACCEPT, slot, 0));
            assert_eq!(&word(&mut connection), said);
        }
        assert!(!doors.is_waiting());
    }

    #[test]
    fn an_accept_that_fails_is_made_again_when_the_server_says_so() {
        let place = tempfile::tempdir().unwrap();
        let (mut ring, mut doors) = (Ring::new(8).unwrap(), Doors::new(OWNER, ACCEPT));
        doors.open(&mut ring, listener(place.path(), "front"), Rc::new(()));
        let _first = connect(place.path(), "front", b"one");
        let mut completion = turn(&mut ring, 5000).pop().unwrap();
        // As if there had been no descriptor for it.
        (completion.result, completion.accepted) = (Err(Errno::EMFILE.into()), None);
        let error = doors.accepted(&mut ring, completion).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EMFILE as i32));
        assert!(doors.is_waiting());
        let _second = connect(place.path(), "front", b"two");
        assert!(turn(&mut ring, 50).is_empty(), "it accepts without a pause");
        doors.again(&mut ring);
        assert!(!doors.is_waiting());
        assert_eq!(&word(&mut next(&mut ring, &mut doors).1), b"two");
        // Only one accept at a time.
        doors.again(&mut ring);
        assert_eq!(ring.in_flight(), 1);
    }

    #[test]
    fn nobody_comes_in_at_a_door_that_is_closed() {
        let place = tempfile::tempdir().unwrap();
        let (mut ring, mut doors) = (Ring::new(8).unwrap(), Doors::new(OWNER, ACCEPT));
        let kept = Rc::new(());
        doors.open(&mut ring, listener(place.path(), "front"), Rc::clone(&kept));
        doors.open(&mut ring, listener(place.path(), "back"), Rc::clone(&kept));
        let _early = connect(place.path(), "front", b"one");
        let mut early = turn(&mut ring, 5000);
        doors.close(&mut ring);
        assert_eq!(Rc::strong_count(&kept), 1);
        for _ in 0..3 {
            early.extend(turn(&mut ring, 500));
        }
        assert_eq!((early.len(), ring.in_flight()), (2, 0));
        for completion in early {
            assert!(doors.accepted(&mut ring, completion).unwrap().is_none());
        }
        assert!(!doors.is_waiting());
        assert!(UnixStream::connect(place.path().join("back")).is_err());
    }

    #[test]
    fn a_tcp_connection_is_watched_and_a_unix_socket_left_as_it_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tune_served(&stream);
        assert!(stream.nodelay().unwrap() && getsockopt(&stream, sockopt::KeepAlive).unwrap());
        let seconds = (
            getsockopt(&stream, sockopt::TcpKeepIdle).unwrap(),
            getsockopt(&stream, sockopt::TcpKeepInterval).unwrap(),
            getsockopt(&stream, sockopt::TcpKeepCount).unwrap(),
        );
        assert_eq!(seconds, (60, 10, 3));
        assert_eq!(getsockopt(&stream, sockopt::TcpUserTimeout).unwrap(), 90_000);
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        tune_served(&ours);
        ours.write_all(b"abc").unwrap();
        assert_eq!(&word(&mut theirs), b"abc");
    }
}
