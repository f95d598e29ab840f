//! Connecting to a replica: one connection per queue, each with its handshake.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::Instant;

use lh_block::{Address, Generation, Instance};
use lh_ring::sys::Stream;
use lh_wire::handshake::{Asked, CHALLENGE_LEN, Hello, Key, NotLetIn, Role, Verdict, WELCOME_LEN};

use super::HANDSHAKE;
use crate::conductor::ConnectError;

/// Who connects.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) volume: String,
    pub(super) key: Key,
    pub(super) generation: Generation,
    pub(super) instance: Instance,
    pub(super) queues: u16,
}

/// A connection that was let in.
pub(super) struct Linked {
    pub(super) socket: OwnedFd,
    pub(super) checksums: bool,
}

/// Makes a session: all its connections, or none.
pub(super) fn connect(who: &Identity, replica: &str, address: &Address) -> Result<Vec<Linked>, ConnectError> {
    let deadline = Instant::now() + HANDSHAKE;
    let mut random = [0; 16];
    lh_ring::sys::random(&mut random).map_err(|e| unreachable_because(address, &e))?;
    let session = Instance(u128::from_le_bytes(random));
    // A replica lets a session in when it is complete: first every hello, then every welcome.
    let mut waiting = Vec::new();
    for queue in 0..who.queues {
        let hello = Hello {
            volume: who.volume.clone(),
            replica: replica.to_owned(),
            generation: who.generation,
            instance: who.instance,
            session,
            queue,
            queues: who.queues,
            checksums: !address.is_local(),
        };
        waiting.push(Greeted::new(address, &hello, &who.key, deadline)?);
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
}

impl Greeted {
    fn new(address: &Address, hello: &Hello, key: &Key, deadline: Instant) -> Result<Self, ConnectError> {
        let io = |e: io::Error| unreachable_because(address, &e);
        let mut stream = Stream::connect(address, deadline).map_err(io)?;
        let (mut challenge, mut nonce) = ([0; CHALLENGE_LEN], [0; 32]);
        stream.read_exact(&mut challenge).map_err(io)?;
        lh_ring::sys::random(&mut nonce).map_err(io)?;
        let asked = Asked::answer(&challenge, (hello, Role::Engine), key, nonce)
            .map_err(|e| refused_because(address, e.into()))?;
        stream.write_all(asked.hello()).map_err(io)?;
        Ok(Self { stream, asked, checksums: hello.checksums })
    }

    fn welcomed(mut self, address: &Address) -> Result<Linked, ConnectError> {
        let io = |e: io::Error| unreachable_because(address, &e);
        let mut welcome = [0; WELCOME_LEN];
        self.stream.read_exact(&mut welcome).map_err(io)?;
        self.asked.heard(&welcome).map_err(|why| refused_because(address, why))?;
        let socket = self.stream.into_socket().map_err(io)?;
        Ok(Linked { socket, checksums: self.checksums })
    }
}
