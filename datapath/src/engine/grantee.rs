//! What a replica on this host grants an engine: asked for, handed to the queues, given back
//! (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`).
//!
//! A thread for each session does that, by calls that wait. The connection of a grant ends with it: when the layers have changed, when
//! the session is over, when the replica's process is gone, whose locks the descriptors keep. Then the queues let go of their copies,
//! and the last ones are closed here, where giving the space of a removed file back may take its time; and the next grant is asked
//! for as long as the session lasts.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use lh_block::{Address, Instance};
use lh_ring::sys::{Stream, file_system, receive_with_fds};
use lh_ring::{Mailbox, Watched};
use lh_wire::handshake::{Asked, CHALLENGE_LEN, Challenge, Hello, Role, WELCOME_LEN};
use lh_wire::{COUNTERS, GRANT_LEN, Grant};

use super::connector::Identity;
use crate::link::{Granted, Mail};
use crate::message::MemberId;

/// How long a replica may take to grant something, or to refuse.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time between a refusal and the next question; and between two looks whether the session lasts.
const PAUSE: Duration = Duration::from_secs(1);

/// Time between the end of a grant and the next question: layers seldom change twice at once.
const AGAIN: Duration = Duration::from_millis(10);

/// Stack of a thread that does little.
const STACK: usize = 256 << 10;

/// Numbers of grants, over all members of an engine.
pub(super) type Numbers = Arc<AtomicU32>;

/// One session with a replica on this host.
pub(super) struct Grantee {
    pub(super) identity: Identity,
    pub(super) replica: String,
    pub(super) address: Address,
    pub(super) member: MemberId,
    pub(super) session: Instance,
    /// Somebody holds it as long as the session lasts.
    pub(super) lasts: Weak<()>,
    pub(super) mailboxes: Arc<[Mailbox<Mail>]>,
    pub(super) numbers: Numbers,
}

/// A grant, and the connection that ends with it.
#[derive(Debug)]
struct Received {
    socket: UnixStream,
    told_as: u32,
    watched: Arc<Watched>,
    files: Vec<File>,
    in_memory: bool,
}

impl Grantee {
    /// Begins on a thread of its own, which ends some time after the session.
    pub(super) fn start(self) {
        let thread = std::thread::Builder::new().name("grants".into()).stack_size(STACK);
        if let Err(e) = thread.spawn(move || self.run()) {
            tracing::warn!("no thread for what a replica grants, all reads are sent: {e}");
        }
    }

    fn lasts(&self) -> bool {
        self.lasts.strong_count() > 0
    }

    fn run(self) {
        while self.lasts() {
            match self.ask() {
                Ok(received) => {
                    tracing::info!("replica {} grants {} files", self.replica, received.files.len());
                    self.keep(received);
                    std::thread::sleep(AGAIN);
                }
                Err(e) => {
                    tracing::debug!("replica {} grants nothing: {e}", self.replica);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    fn ask(&self) -> io::Result<Received> {
        let mut stream = Stream::connect(&self.address, Instant::now() + PATIENCE)?;
        let (mut challenge, mut nonce) = ([0; CHALLENGE_LEN], [0; 32]);
        stream.read_exact(&mut challenge)?;
        if !Challenge::decode(&challenge).is_ok_and(|c| c.grants()) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        lh_ring::sys::random(&mut nonce)?;
        let who = &self.identity;
        let hello = Hello {
            volume: who.volume.clone(),
            replica: self.replica.clone(),
            generation: who.generation,
            instance: who.instance,
            session: self.session,
            queue: 0,
            queues: u16::try_from(who.offers.len()).unwrap_or(u16::MAX),
            checksums: false,
            lends: false,
        };
        let asked =
            Asked::answer(&challenge, (&hello, Role::Grantee), &who.key, nonce).map_err(io::Error::other)?;
        stream.write_all(asked.hello())?;
        let mut welcome = [0; WELCOME_LEN];
        stream.read_exact(&mut welcome)?;
        // Who has proved the key may say what the volume holds.
        asked.heard(&welcome).map_err(io::Error::other)?;
        receive(stream.into_socket()?)
    }

    /// Hands a grant to the queues, until it ends. The descriptors are gone when this returns.
    fn keep(&self, received: Received) {
        let Received { mut socket, told_as, watched, files, in_memory } = received;
        // Never 0, which stands for none.
        let number = self.numbers.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
        let (returned, all_returned) = unbounded::<Infallible>();
        for mailbox in self.mailboxes.iter() {
            let copies: io::Result<Vec<File>> = files.iter().map(File::try_clone).collect();
            match copies {
                Ok(files) => mailbox.put(Mail::Places(
                    self.member,
                    Box::new(Granted {
                        number,
                        told_as,
                        watched: Arc::clone(&watched),
                        files,
                        in_memory,
                        session: Weak::clone(&self.lasts),
                        returned: returned.clone(),
                    }),
                )),
                Err(e) => tracing::warn!("a queue goes without what replica {} grants: {e}", self.replica),
            }
        }
        drop(returned);
        while self.lasts() {
            match socket.read(&mut [0]) {
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Ok(_) | Err(_) => break,
            }
        }
        self.mailboxes.iter().for_each(|mailbox| mailbox.put(Mail::PlacesOver(self.member, number)));
        // Nothing is ever sent: this is the last copy's end.
        let _ = all_returned.recv();
        drop(files);
    }
}

/// The message of a grant and its descriptors.
fn receive(socket: OwnedFd) -> io::Result<Received> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let socket = UnixStream::from(socket);
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut bytes = [0; GRANT_LEN];
    let (len, mut fds) = receive_with_fds(socket.as_fd(), &mut bytes)?;
    if len != GRANT_LEN {
        return Err(invalid("a grant that is cut"));
    }
    let grant = Grant::decode(&bytes).map_err(io::Error::other)?;
    let all = 1 + usize::from(grant.files);
    while fds.len() < all {
        let (len, more) = receive_with_fds(socket.as_fd(), &mut [0])?;
        if len == 0 || more.is_empty() {
            return Err(invalid("a grant without all its files"));
        }
        fds.extend(more);
    }
    if fds.len() > all {
        return Err(invalid("a grant of more files than it says"));
    }
    let mut fds = fds.into_iter();
    let memory = fds.next().ok_or_else(|| invalid("a grant without memory"))?;
    let watched = Arc::new(Watched::open(memory, COUNTERS)?);
    let files: Vec<File> = fds.map(File::from).collect();
    for file in &files {
        if !file.metadata()?.is_file() {
            return Err(invalid("a grant of something that is no file"));
        }
    }
    let in_memory = match files.first() {
        Some(file) => file_system(file)?.is_memory(),
        None => false,
    };
    socket.set_read_timeout(Some(PAUSE))?;
    Ok(Received { socket, told_as: grant.number, watched, files, in_memory })
}
