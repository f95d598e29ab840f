//! An engine's side of relays: where they come in, and what they have to prove first.
//!
//! - Nobody reaches the volume who has not proved its key (`docs/invariants.md`, 11): a thread accepts, each newcomer has a
//!   few seconds for the handshake of the data protocol, and only what has come through it is handed to the queue that serves
//!   relays.
//! - One relay at a time: a new one, or a new connection of the same one, takes the place of what was before
//!   ([`nbd_frontend::Lane`]).
//! - Nothing here can hold the volume up: an address that is taken is tried again until it is free.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use control::host::make_socket_directory;
use lh_block::{Address, Generation};
use lh_ring::sys::{Stream, random};
use lh_wire::handshake::{Challenge, HELLO_LEN, Hello, Key, Verdict, encode_welcome};
use nbd_frontend::{Export, Lane, Listener};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::net::{SocketFlags, accept_with};
use thiserror::Error;

use super::super::queues::{Order, ToRelays};

/// How long a newcomer may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Newcomers in their handshake at a time: a relay has as many connections as queues, and comes once more when refused.
const NEWCOMERS: usize = 32;

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
    newcomers: AtomicUsize,
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
        let newcomers = AtomicUsize::new(0);
        let visited = Visited { address, volume: volume.to_owned(), key, to_relays, newcomers };
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
        self.open = Some(ours);
        Ok(())
    }

    /// Ends every relay's connections, without waiting for what is in flight, and lets nobody in.
    pub(in crate::daemon::controller) fn close(&mut self) {
        if self.open.take().is_some() {
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
        if self.newcomers.fetch_add(1, Ordering::AcqRel) >= NEWCOMERS {
            self.newcomers.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("a relay is turned away: {NEWCOMERS} others are in their handshake");
            return;
        }
        let visited = Arc::clone(self);
        let hear = move || {
            match visited.admit(socket) {
                Ok((socket, lane)) => {
                    tracing::info!(queue = lane.number, "a relay is let in");
                    visited.to_relays.tell(Order::Relay(socket, lane));
                }
                Err(why) => tracing::warn!("a relay is turned away: {why}"),
            }
            visited.newcomers.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(e) = std::thread::Builder::new().name("relay".into()).spawn(hear) {
            self.newcomers.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("a relay is turned away: no thread: {e}");
        }
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
