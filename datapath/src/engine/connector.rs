//! Connecting to a replica: one connection per queue, each with its handshake.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::Instant;

use lh_block::{Address, Generation, Instance};
use lh_ring::sys::Stream;
use lh_wire::handshake::{
    CHALLENGE_LEN, Challenge, HELLO_LEN, Hello, Key, Verdict, WELCOME_LEN, decode_welcome,
};

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
    waiting.into_iter().map(|g| g.welcomed(&who.key, address)).collect()
}

fn unreachable_because(address: &Address, e: &io::Error) -> ConnectError {
    ConnectError::Unreachable(format!("{address}: {e}"))
}

/// A connection that has said hello.
struct Greeted {
    stream: Stream,
    challenge: Challenge,
    hello: [u8; HELLO_LEN],
    checksums: bool,
}

impl Greeted {
    fn new(address: &Address, hello: &Hello, key: &Key, deadline: Instant) -> Result<Self, ConnectError> {
        let io = |e: io::Error| unreachable_because(address, &e);
        let protocol =
            |e: lh_wire::handshake::HandshakeError| ConnectError::Refused(format!("{address}: {e}"));
        let mut stream = Stream::connect(address, deadline).map_err(io)?;
        let mut bytes = [0; CHALLENGE_LEN];
        stream.read_exact(&mut bytes).map_err(io)?;
        let challenge = Challenge::decode(&bytes).map_err(protocol)?;
        let mut nonce = [0; 32];
        lh_ring::sys::random(&mut nonce).map_err(io)?;
        let sent = hello.encode(&challenge, key, nonce).map_err(protocol)?;
        stream.write_all(&sent).map_err(io)?;
        Ok(Self { stream, challenge, hello: sent, checksums: hello.checksums })
    }

    fn welcomed(mut self, key: &Key, address: &Address) -> Result<Linked, ConnectError> {
        let mut bytes = [0; WELCOME_LEN];
        self.stream.read_exact(&mut bytes).map_err(|e| unreachable_because(address, &e))?;
        let (verdict, generation) = decode_welcome(&bytes, &self.challenge, &self.hello, key)
            .map_err(|e| ConnectError::Refused(format!("{address}: {e}")))?;
        match verdict {
            Verdict::Welcome => {}
            Verdict::Stale => return Err(ConnectError::Stale(generation)),
            refused => return Err(ConnectError::Refused(format!("{address}: {}", reason(refused)))),
        }
        let socket = self.stream.into_socket().map_err(|e| unreachable_because(address, &e))?;
        Ok(Linked { socket, checksums: self.checksums })
    }
}

/// A refusal in words.
const fn reason(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Welcome => "let in",
        Verdict::Stale => "a younger engine has this replica",
        Verdict::BadKey => "the key is not this volume's",
        Verdict::WrongName => "this is a replica of another volume, or another replica",
        Verdict::BadVersion => "no common version of the data protocol",
        Verdict::Invalid => "the replica did not understand the hello",
        Verdict::Unusable => "the replica's directory is not usable: see its log",
    }
}
