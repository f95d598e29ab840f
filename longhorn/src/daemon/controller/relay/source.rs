//! An engine's side of relays: where they come in, and what they have to prove first.
//!
//! - Nobody reaches the volume who has not proved its key (`docs/invariants.md`, 11): a thread accepts, each newcomer has a
//!   few seconds for the handshake of the data protocol, and only what has come through it is handed to the queue that serves
//!   relays.
//! - One relay at a time: a new one, or a new connection of the same one, takes the place of what was before
//!   ([`nbd_frontend::Lane`]).
//! - Nothing here can hold the volume up: an address that is taken is tried again until it is free.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use control::host::make_socket_directory;
use lh_block::{Address, Generation};
use lh_ring::sys::{Stream, random};
use lh_wire::handshake::{Challenge, HELLO_LEN, Hello, Key, Verdict, encode_welcome};
use nbd_frontend::{Export, Lane, Listener};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};
use rustix::net::{SocketFlags, accept_with};
use thiserror::Error;

use super::super::queues::{Order, ToRelays};

/// How long a newcomer may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Newcomers in their handshake at a time: a relay has as many connections as queues. When one more comes the oldest has to go: whoever
/// reaches the address can connect as often as he likes and say nothing.
const NEWCOMERS: usize = 32;

/// Threads that hear newcomers out: those of newcomers who had to go end soon.
const THREADS: usize = 2 * NEWCOMERS;

/// Connections of a relay: as many as an engine may have queues.
const LANES: u16 = 64;

/// Between two tries to listen, or to accept after the system refused to.
const AGAIN: Duration = Duration::from_millis(200);

/// Where relays come in, while the volume is shown.
pub(in crate::daemon::controller) struct Source {
    visited: Arc<Visited>,
    /// The queue has been told what it serves.
    begun: bool,
    /// Dropped, it ends the thread that accepts.
    open: Option<UnixStream>,
}

/// What newcomers are asked for, and where they go.
struct Visited {
    address: Address,
    volume: String,
    key: Key,
    to_relays: ToRelays,
    threads: AtomicUsize,
    newcomers: Mutex<Newcomers>,
}

/// Who is in the handshake: the oldest first, each with a number and a copy of its socket.
#[derive(Default)]
struct Newcomers {
    /// The volume is shown.
    welcome: bool,
    count: u64,
    here: VecDeque<(u64, OwnedFd)>,
}

impl Newcomers {
    /// Takes one in, and parts with the oldest if there is no room. Its number.
    fn take(&mut self, socket: OwnedFd) -> u64 {
        if self.here.len() >= NEWCOMERS {
            tracing::warn!("the oldest of {NEWCOMERS} that are in their handshake has to go");
            self.part_with_the_oldest();
        }
        self.count += 1;
        self.here.push_back((self.count, socket));
        self.count
    }

    fn part_with_the_oldest(&mut self) {
        if let Some((_, oldest)) = self.here.pop_front() {
            // Its thread reads the end.
            let _ = shutdown(oldest.as_raw_fd(), Shutdown::Both);
        }
    }

    /// Its handshake is over. False: it had to go meanwhile.
    fn forget(&mut self, number: u64) -> bool {
        let before = self.here.len();
        self.here.retain(|(other, _)| *other != number);
        self.here.len() < before
    }
}

/// Why a newcomer is not let in.
#[derive(Debug, Error)]
enum TurnedAway {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Verdict(Verdict),
}

impl Source {
    /// Nobody comes in before it is opened.
    pub(in crate::daemon::controller) fn new(
        address: Address,
        volume: &str,
        key: Key,
        to_relays: ToRelays,
    ) -> Self {
        let (threads, newcomers) = (AtomicUsize::new(0), Mutex::default());
        let visited = Visited { address, volume: volume.to_owned(), key, to_relays, threads, newcomers };
        Self { visited: Arc::new(visited), begun: false, open: None }
    }

    /// Lets relays in: the volume is shown.
    ///
    /// # Errors
    /// No thread or descriptor to be had.
    pub(in crate::daemon::controller) fn open(&mut self) -> io::Result<()> {
        if self.open.is_some() {
            return Ok(());
        }
        if !self.begun {
            let name = self.visited.volume.clone();
            let description = "Longhorn volume, for relays".to_owned();
            self.visited.to_relays.tell(Order::Nbd(Export { name, description, read_only: false }, None));
            self.begun = true;
        }
        let (ours, end) = UnixStream::pair()?;
        let visited = Arc::clone(&self.visited);
        std::thread::Builder::new().name("relay-door".into()).spawn(move || visited.serve(&end))?;
        self.visited.newcomers().welcome = true;
        self.open = Some(ours);
        Ok(())
    }

    /// Ends every relay's connections, without waiting for what is in flight, and lets nobody in, also of those who are in their
    /// handshake.
    pub(in crate::daemon::controller) fn close(&mut self) {
        if self.open.take().is_some() {
            // As long as this is held nobody is let in: the queues hear of all who were before they hear that nobody is.
            let mut newcomers = self.visited.newcomers();
            newcomers.welcome = false;
            while !newcomers.here.is_empty() {
                newcomers.part_with_the_oldest();
            }
            self.visited.to_relays.tell(Order::Hide);
        }
    }
}

impl Visited {
    /// Accepts until the other side of `end` is closed.
    fn serve(self: Arc<Self>, end: &UnixStream) {
        let Some(listener) = self.listen(end) else { return };
        tracing::info!(address = %self.address, "relays may come");
        loop {
            let mut polls = [
                PollFd::new(listener.as_fd(), PollFlags::POLLIN),
                PollFd::new(end.as_fd(), PollFlags::POLLIN),
            ];
            // Of two descriptors, only a signal can keep the answer back.
            let _ = poll(&mut polls, PollTimeout::NONE);
            if polls[1].any() != Some(false) {
                return;
            }
            if polls[0].any() != Some(true) {
                continue;
            }
            match accept_with(&listener, SocketFlags::CLOEXEC) {
                Ok(socket) => self.receive(socket),
                Err(e) => {
                    tracing::warn!("no relay can be accepted: {e}");
                    if has_ended(end, AGAIN) {
                        return;
                    }
                }
            }
        }
    }

    fn listen(&self, end: &UnixStream) -> Option<Listener> {
        let mut told = false;
        loop {
            let made = match &self.address {
                Address::Unix(path) => make_socket_directory(path).and_then(|()| Listener::unix(path)),
                Address::Tcp(address) => Listener::tcp(*address),
            };
            match made {
                Ok(listener) => return Some(listener),
                Err(e) if !told => {
                    tracing::warn!("no relay can come, {} is not to be had: {e}", self.address);
                    told = true;
                }
                Err(_) => {}
            }
            if has_ended(end, AGAIN) {
                return None;
            }
        }
    }

    /// Hears a newcomer out, in a thread of its own.
    fn receive(self: &Arc<Self>, socket: OwnedFd) {
        let copy = match socket.try_clone() {
            Ok(copy) if self.threads.load(Ordering::Acquire) < THREADS => copy,
            Ok(_) => return tracing::warn!("a relay is turned away: {THREADS} others are being heard"),
            Err(e) => return tracing::warn!("a relay is turned away: {e}"),
        };
        self.threads.fetch_add(1, Ordering::AcqRel);
        let number = self.newcomers().take(copy);
        let visited = Arc::clone(self);
        let hear = move || {
            visited.let_in(number, visited.admit(socket));
            visited.threads.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(e) = std::thread::Builder::new().name("relay".into()).spawn(hear) {
            self.newcomers().forget(number);
            self.threads.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("a relay is turned away: no thread: {e}");
        }
    }

    fn let_in(&self, number: u64, admitted: Result<(OwnedFd, Lane), TurnedAway>) {
        let mut newcomers = self.newcomers();
        let is_here = newcomers.forget(number) && newcomers.welcome;
        match admitted {
            Ok((socket, lane)) if is_here => {
                tracing::info!(queue = lane.number, "a relay is let in");
                // Under the lock, for [`Source::close`].
                self.to_relays.tell(Order::Relay(socket, lane));
            }
            Ok(_) => tracing::warn!("a relay is turned away: its handshake took until nobody was let in"),
            Err(why) => tracing::warn!("a relay is turned away: {why}"),
        }
    }

    fn newcomers(&self) -> MutexGuard<'_, Newcomers> {
        self.newcomers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handshake of the data protocol, in which the engine has the replica's part.
    fn admit(&self, socket: OwnedFd) -> Result<(OwnedFd, Lane), TurnedAway> {
        let deadline = Instant::now() + HANDSHAKE;
        let mut stream = match self.address {
            Address::Unix(_) => Stream::of_unix(UnixStream::from(socket), deadline),
            Address::Tcp(_) => Stream::of_tcp(TcpStream::from(socket), deadline)?,
        };
        let mut nonce = [0; 32];
        random(&mut nonce)?;
        let challenge = Challenge::new(nonce);
        stream.write_all(challenge.as_bytes())?;
        let mut bytes = [0; HELLO_LEN];
        stream.read_exact(&mut bytes)?;
        let examined = self.examine(&bytes, &challenge);
        let verdict = examined.as_ref().map_or_else(|verdict| *verdict, |_| Verdict::Welcome);
        let generation = Generation::default();
        stream.write_all(&encode_welcome(verdict, generation, &challenge, &bytes, &self.key))?;
        let hello = examined.map_err(TurnedAway::Verdict)?;
        Ok((stream.into_socket()?, Lane { client: hello.instance.0, number: hello.queue }))
    }

    fn examine(&self, bytes: &[u8; HELLO_LEN], challenge: &Challenge) -> Result<Hello, Verdict> {
        let hello = Hello::decode_relay(bytes, challenge, &self.key)?;
        if hello.volume != self.volume {
            Err(Verdict::WrongName)
        } else if hello.queues > LANES {
            Err(Verdict::Invalid)
        } else {
            Ok(hello)
        }
    }
}

/// True if the other side is closed within this time.
fn has_ended(end: &UnixStream, within: Duration) -> bool {
    let mut polls = [PollFd::new(end.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
    poll(&mut polls, timeout).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use lh_block::{Geometry, Instance};

    use super::super::connect::Target;
    use super::*;

    struct Place {
        _dir: tempfile::TempDir,
        source: Source,
        told: crossbeam_channel::Receiver<Order>,
        relay: Target,
    }

    impl Place {
        /// Opened.
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let address = Address::Unix(dir.path().join("relay.sock"));
            let (to_relays, told) = ToRelays::nobody();
            let mut source = Source::new(address.clone(), "demo", [7; 32], to_relays);
            source.open().unwrap();
            assert!(matches!(told.recv().unwrap(), Order::Nbd(..)));
            let relay = Target {
                address,
                volume: "demo".to_owned(),
                key: [7; 32],
                instance: Instance(1),
                queues: 1,
                geometry: Geometry {
                    size: 1 << 20,
                    logical_block: 512,
                    physical_block: 4096,
                    max_transfer: 1 << 20,
                    depth: 1,
                },
            };
            Self { _dir: dir, source, told, relay }
        }

        fn connect(&self) -> Stream {
            let until = Instant::now() + HANDSHAKE;
            loop {
                match Stream::connect(&self.relay.address, Instant::now() + HANDSHAKE) {
                    Ok(stream) => return stream,
                    Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                    Err(e) => panic!("{e}"),
                }
            }
        }
    }

    /// How long it takes a relay to be let in among strangers who say nothing.
    fn let_in_after() -> Duration {
        let place = Place::new();
        let began = Instant::now();
        let silent: Vec<Stream> = (0..NEWCOMERS + 8).map(|_| place.connect()).collect();
        place.relay.prove(&mut place.connect(), 0).unwrap();
        assert!(matches!(place.told.recv().unwrap(), Order::Relay(_, lane) if lane.client == 1));
        let took = began.elapsed();
        assert!(place.source.visited.newcomers().here.len() < NEWCOMERS, "nobody has to go");
        drop(silent);
        took
    }

    /// Whoever reaches the port can connect as often as he likes, and say nothing.
    #[test]
    fn strangers_who_say_nothing_keep_no_relay_out() {
        // Before the time of the first of them is over. A busy machine may be slow now and then.
        let mut times = (0..4).map(|_| let_in_after());
        assert!(times.any(|took| took < HANDSHAKE - Duration::from_secs(1)), "it waits until they have gone");
    }

    /// What it writes would come between those who have the volume for themselves.
    #[test]
    fn who_is_in_the_handshake_when_the_volume_is_hidden_is_not_let_in() {
        let mut place = Place::new();
        let mut late = place.connect();
        let until = Instant::now() + HANDSHAKE;
        while place.source.visited.newcomers().here.is_empty() {
            assert!(Instant::now() < until, "nobody hears it out");
            std::thread::sleep(Duration::from_millis(1));
        }
        place.source.close();
        assert!(matches!(place.told.recv().unwrap(), Order::Hide));
        assert!(place.relay.prove(&mut late, 0).is_err());
        while place.source.visited.threads.load(Ordering::Acquire) > 0 {
            assert!(Instant::now() < until, "it is heard for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(place.told.try_recv().is_err());
        // Shown again, it lets in who comes.
        place.source.open().unwrap();
        let until = Instant::now() + HANDSHAKE;
        // Who comes to the door before, as it closes, is turned away with it.
        while let Err(e) = place.relay.prove(&mut place.connect(), 0) {
            assert!(Instant::now() < until, "{e}");
        }
        assert!(matches!(place.told.recv().unwrap(), Order::Relay(..)));
    }
}
