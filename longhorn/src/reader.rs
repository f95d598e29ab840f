//! Reads a snapshot from a replica's process, on this host or another: where it differs from another one, and its bytes.
//!
//! It proves a key of the volume's and is proved it, joins no session and fences nobody (`lh_wire::Ask`). Calls block.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use lh_block::{Address, Generation, Instance};
use lh_ring::sys::{Stream, random};
use lh_wire::handshake::{
    Asked, CHALLENGE_LEN, HandshakeError, Hello, Key, NotLetIn, Role, Verdict, WELCOME_LEN,
};
use lh_wire::{Ask, HEADER_LEN, Header, Looked, MAX_PAYLOAD, MapPage, OpCode, Opened, Status, flags};
use serde::de::DeserializeOwned;
use thiserror::Error;

/// How long the connection and the handshake may take together.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long an answer may take: opening a snapshot reads what its layers hold, of terabytes perhaps.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a snapshot that was just taken may not be settled on every replica.
const SETTLING: Duration = Duration::from_secs(5);

/// Between two attempts to open it.
const AGAIN: Duration = Duration::from_millis(200);

/// Why a replica is not read. Another one of the volume may do.
#[derive(Debug, Error)]
pub(crate) enum ReadError {
    /// Nobody answers, or not any more.
    #[error("{0}: {1}")]
    Unreachable(Address, io::Error),
    /// Something else answers, or without the key.
    #[error("{0}: {1}")]
    Handshake(Address, HandshakeError),
    /// It does not let us in.
    #[error("{0} turns readers away: {1}")]
    TurnedAway(Address, Verdict),
    /// It does not give what was asked for; its own words.
    #[error("{0}")]
    Refused(String),
}

/// A volume's replica, and what proves to it that it may be asked.
#[derive(Clone, Debug)]
pub(crate) struct ReplicaAt {
    /// Name of the volume.
    pub(crate) volume: String,
    /// Name of the replica.
    pub(crate) replica: String,
    /// Where its data is served.
    pub(crate) address: Address,
    /// The volume's key, for its bytes too, or its [`control::host::MapKey`], for maps alone.
    pub(crate) key: Key,
}

/// A snapshot that is open for reading. Everything ends when it is dropped.
pub(crate) struct SnapshotReader {
    address: Address,
    stream: Stream,
    tag: u64,
    /// Bytes of the volume, now.
    size: u64,
    /// The highest generation that the replica has seen.
    generation: Generation,
}

/// What a replica says of its engines: the highest generation that it has seen, and whether one is let in now.
///
/// # Errors
/// [`ReadError`]: nobody answers before `deadline`, or nobody who holds the key.
pub(crate) fn look(at: &ReplicaAt, deadline: Instant) -> Result<(Generation, bool), ReadError> {
    let mut reader = SnapshotReader::connect(at, deadline)?;
    let looked = match reader.ask_json::<Looked>(&Ask::Look) {
        // An older program does not know the question.
        Err(ReadError::Refused(_)) => Looked::default(),
        answer => answer?,
    };
    Ok((reader.generation, looked.engine))
}

impl SnapshotReader {
    /// Connects and opens a snapshot; one that was just taken is waited for, until it is settled. `base`: the snapshot
    /// that its map is relative to; `None`: a volume of zeroes.
    ///
    /// # Errors
    /// [`ReadError`].
    pub(crate) fn open(at: &ReplicaAt, snapshot: &str, base: Option<&str>) -> Result<Self, ReadError> {
        let deadline = Instant::now() + SETTLING;
        let mut reader = Self::connect(at, Instant::now() + HANDSHAKE)?;
        let ask = Ask::Open { snapshot: snapshot.to_owned(), base: base.map(str::to_owned) };
        loop {
            match reader.ask_json::<Opened>(&ask) {
                Ok(opened) => {
                    reader.size = opened.size;
                    return Ok(reader);
                }
                Err(ReadError::Refused(_)) if Instant::now() < deadline => std::thread::sleep(AGAIN),
                Err(e) => return Err(e),
            }
        }
    }

    /// Connects and is let in before `deadline`.
    fn connect(at: &ReplicaAt, deadline: Instant) -> Result<Self, ReadError> {
        let unreachable = |e| ReadError::Unreachable(at.address.clone(), e);
        let not_let_in = |why| match why {
            NotLetIn::Foreign(e) => ReadError::Handshake(at.address.clone(), e),
            NotLetIn::Refused(verdict, _) => ReadError::TurnedAway(at.address.clone(), verdict),
        };
        let mut stream = Stream::connect(&at.address, deadline).map_err(unreachable)?;
        let (mut challenge, mut nonce) = ([0; CHALLENGE_LEN], [0; 32]);
        random(&mut nonce).map_err(unreachable)?;
        stream.read_exact(&mut challenge).map_err(unreachable)?;
        let hello = Hello {
            volume: at.volume.clone(),
            replica: at.replica.clone(),
            generation: Generation::default(),
            instance: Instance(0),
            session: Instance(0),
            queue: 0,
            queues: 1,
            checksums: !at.address.is_local(),
            lends: false,
        };
        let asked = Asked::answer(&challenge, (&hello, Role::Reader), &at.key, nonce)
            .map_err(|e| not_let_in(e.into()))?;
        stream.write_all(asked.hello()).map_err(unreachable)?;
        let mut welcome = [0; WELCOME_LEN];
        stream.read_exact(&mut welcome).map_err(unreachable)?;
        let generation = asked.heard(&welcome).map_err(not_let_in)?;
        Ok(Self { address: at.address.clone(), stream, tag: 0, size: 0, generation })
    }

    /// Bytes of the volume, now: the snapshot may be of a time when it was smaller.
    pub(crate) const fn size(&self) -> u64 {
        self.size
    }

    /// The ranges, in whole blocks, in which the snapshot differs from its base, from the block of a byte on; as many as
    /// a message holds.
    ///
    /// # Errors
    /// [`ReadError`].
    pub(crate) fn map(&mut self, from: u64) -> Result<MapPage, ReadError> {
        self.ask_json(&Ask::Map { from })
    }

    /// Bytes of the snapshot: at most [`lh_wire::MAX_DATA`].
    ///
    /// # Errors
    /// [`ReadError`].
    pub(crate) fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, ReadError> {
        let bytes = self.ask(&Ask::Read { offset, length })?;
        if bytes.len() == length as usize {
            return Ok(bytes);
        }
        Err(self.broken("the answer has another length than was asked for"))
    }

    fn ask_json<T: DeserializeOwned>(&mut self, ask: &Ask) -> Result<T, ReadError> {
        let bytes = self.ask(ask)?;
        serde_json::from_slice(&bytes).map_err(|e| self.broken(e))
    }

    fn ask(&mut self, ask: &Ask) -> Result<Vec<u8>, ReadError> {
        let request = serde_json::to_vec(ask).map_err(|e| self.broken(e))?;
        self.tag += 1;
        let mut header = Header::request(OpCode::Control, self.tag, 0, 0, Generation::default());
        header.payload = u32::try_from(request.len()).unwrap_or(u32::MAX);
        let unreachable = |e| ReadError::Unreachable(self.address.clone(), e);
        self.stream.set_deadline(Instant::now() + PATIENCE);
        self.stream.write_all(&header.encode()).map_err(unreachable)?;
        self.stream.write_all(&request).map_err(unreachable)?;
        let mut bytes = [0; HEADER_LEN];
        self.stream.read_exact(&mut bytes).map_err(unreachable)?;
        let answer = Header::decode(&bytes).map_err(|e| self.broken(e))?;
        if answer.tag != self.tag || !answer.has(flags::RESPONSE) || answer.payload > MAX_PAYLOAD {
            return Err(self.broken("it is no answer to what was asked"));
        }
        let mut payload = vec![0; usize::from(answer.pad) + answer.payload as usize];
        self.stream.read_exact(&mut payload).map_err(unreachable)?;
        payload.drain(..usize::from(answer.pad));
        if answer.has(flags::CRC) && crc32c::crc32c(&payload) != answer.payload_crc {
            return Err(self.broken("bytes changed on the way: their checksum does not fit"));
        }
        match answer.status {
            Status::Ok => Ok(payload),
            Status::Refused => Err(ReadError::Refused(String::from_utf8_lossy(&payload).into_owned())),
            other => Err(ReadError::Refused(format!("{} answers {other:?}", self.address))),
        }
    }

    fn broken(&self, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ReadError {
        ReadError::Unreachable(self.address.clone(), io::Error::other(why))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    use super::*;

    /// How long it takes to give up asking there.
    fn given_up_after(address: Address, within: Duration) -> Duration {
        let at = ReplicaAt { volume: "demo".into(), replica: "demo-r-1".into(), address, key: [7; 32] };
        let (said, heard) = mpsc::channel();
        std::thread::spawn(move || {
            let began = Instant::now();
            let refused = SnapshotReader::connect(&at, began + within).err();
            said.send((began.elapsed(), refused)).unwrap();
        });
        let (took, refused) = heard.recv_timeout(Duration::from_secs(20)).expect("it waits for ever");
        assert!(matches!(refused, Some(ReadError::Unreachable(..))), "{refused:?}");
        took
    }

    #[test]
    fn a_replica_that_says_nothing_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let (tcp, unix) = (TcpListener::bind("127.0.0.1:0").unwrap(), UnixListener::bind(&path).unwrap());
        let tcp_address = tcp.local_addr().unwrap();
        let peers = std::thread::spawn(move || (tcp.accept().unwrap(), unix.accept().unwrap()));
        for address in [Address::Tcp(tcp_address), Address::Unix(path)] {
            let took = given_up_after(address, Duration::from_millis(200));
            assert!(took.as_millis() >= 200, "{took:?}");
        }
        peers.join().unwrap();
    }

    /// Each byte comes in time, and the whole does not.
    #[test]
    fn a_replica_that_speaks_slowly_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            while peer.write_all(&[1]).is_ok() {
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        // Longer than a byte takes, far less than all of them.
        let took = given_up_after(Address::Unix(path), Duration::from_millis(700));
        assert!((700..10_000).contains(&took.as_millis()), "{took:?}");
    }
}
