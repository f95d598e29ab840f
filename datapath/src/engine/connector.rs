//! Connecting to a replica: one connection per queue, each with its handshake.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lh_block::{Address, Generation, Instance};
use lh_ring::sys::Stream;
use lh_wire::handshake::{Asked, CHALLENGE_LEN, Challenge, Hello, Key, NotLetIn, Role, Verdict, WELCOME_LEN};

use super::HANDSHAKE;
use crate::conductor::ConnectError;
use crate::link::Offer;

/// How long a queue's thread may take to have its memory, which is milliseconds after the engine's start. Without it all bytes
/// are sent.
const OFFER_PATIENCE: Duration = Duration::from_secs(2);

/// Who connects.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) volume: String,
    pub(super) key: Key,
    pub(super) generation: Generation,
    pub(super) instance: Instance,
    /// Of each queue, by number.
    pub(super) offers: Arc<[Offer]>,
}

/// A connection that was let in.
pub(super) struct Linked {
    pub(super) socket: OwnedFd,
    pub(super) checksums: bool,
    pub(super) lends: bool,
}

/// Why there is no session.
enum Failed {
    /// Perhaps because the replica cannot take what it is lent.
    Lending(ConnectError),
    Otherwise(ConnectError),
}

/// Makes a session: all its connections, or none. A replica that finds something wrong with one where memory is lent is asked
/// again with nothing lent: what it may map is not for this side to know.
pub(super) fn connect(who: &Identity, replica: &str, address: &Address) -> Result<Vec<Linked>, ConnectError> {
    let deadline = Instant::now() + HANDSHAKE;
    let result = match session(who, replica, address, address.is_local(), deadline) {
        Err(Failed::Lending(why)) => {
            tracing::warn!("{why}; tried again with nothing lent");
            session(who, replica, address, false, deadline)
        }
        result => result,
    };
    result.map_err(|failed| match failed {
        Failed::Lending(why) | Failed::Otherwise(why) => why,
    })
}

fn session(
    who: &Identity,
    replica: &str,
    address: &Address,
    may_lend: bool,
    deadline: Instant,
) -> Result<Vec<Linked>, Failed> {
    let queues = u16::try_from(who.offers.len()).unwrap_or(u16::MAX);
    let mut random = [0; 16];
    let io = |e: io::Error| Failed::Otherwise(unreachable_because(address, &e));
    lh_ring::sys::random(&mut random).map_err(io)?;
    let session = Instance(u128::from_le_bytes(random));
    // A replica lets a session in when it is complete: first every hello, then every welcome.
    let mut waiting = Vec::new();
    for (queue, offer) in (0..).zip(who.offers.iter()) {
        let memory = may_lend.then(|| offer.wait(Instant::now() + OFFER_PATIENCE)).flatten();
        let hello = Hello {
            volume: who.volume.clone(),
            replica: replica.to_owned(),
            generation: who.generation,
            instance: who.instance,
            session,
            queue,
            queues,
            checksums: !address.is_local(),
            lends: memory.is_some(),
        };
        waiting.push(Greeted::new(address, hello, memory, &who.key, deadline).map_err(Failed::Otherwise)?);
    }
    waiting.into_iter().map(|greeted| greeted.welcomed(address)).collect()
}

fn unreachable_because(address: &Address, e: &io::Error) -> ConnectError {
    ConnectError::Unreachable(format!("{address}: {e}"))
}

fn refused_because(address: &Address, why: NotLetIn) -> ConnectError {
    match why {
        NotLetIn::Refused(Verdict::Stale, generation) => ConnectError::Stale(generation),
        why => ConnectError::Refused(format!("{address}: {why}")),
    }
}

/// A connection that has said hello.
struct Greeted {
    stream: Stream,
    asked: Asked,
    checksums: bool,
    lends: bool,
}

impl Greeted {
    /// Says hello, with the memory if the replica borrows.
    fn new(
        address: &Address,
        mut hello: Hello,
        memory: Option<Arc<OwnedFd>>,
        key: &Key,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let io = |e: io::Error| unreachable_because(address, &e);
        let mut stream = Stream::connect(address, deadline).map_err(io)?;
        let (mut challenge, mut nonce) = ([0; CHALLENGE_LEN], [0; 32]);
        stream.read_exact(&mut challenge).map_err(io)?;
        lh_ring::sys::random(&mut nonce).map_err(io)?;
        hello.lends &= Challenge::decode(&challenge).is_ok_and(|c| c.borrows());
        let asked = Asked::answer(&challenge, (&hello, Role::Engine), key, nonce)
            .map_err(|e| refused_because(address, e.into()))?;
        match memory.filter(|_| hello.lends) {
            Some(memory) => stream.write_all_with_fd(asked.hello(), memory.as_fd()).map_err(io)?,
            None => stream.write_all(asked.hello()).map_err(io)?,
        }
        Ok(Self { stream, asked, checksums: hello.checksums, lends: hello.lends })
    }

    fn welcomed(mut self, address: &Address) -> Result<Linked, Failed> {
        let io = |e: io::Error| Failed::Otherwise(unreachable_because(address, &e));
        let mut welcome = [0; WELCOME_LEN];
        self.stream.read_exact(&mut welcome).map_err(io)?;
        self.asked.heard(&welcome).map_err(|why| match why {
            NotLetIn::Refused(Verdict::Invalid, _) if self.lends => {
                Failed::Lending(refused_because(address, why))
            }
            why => Failed::Otherwise(refused_because(address, why)),
        })?;
        let socket = self.stream.into_socket().map_err(io)?;
        Ok(Linked { socket, checksums: self.checksums, lends: self.lends })
    }
}
