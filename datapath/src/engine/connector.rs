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
    pub(super) tells: bool,
}

/// A session that was let in.
pub(super) struct Made {
    /// By queue.
    pub(super) links: Vec<Linked>,
    /// The session's number on the wire.
    pub(super) number: Instance,
    /// The replica may grant its files.
    pub(super) grants: bool,
}

/// Why there is no session.
enum Failed {
    /// Perhaps because the replica cannot take what it is lent.
    Lending(ConnectError),
    Otherwise(ConnectError),
}

/// Makes a session: all its connections, or none. A replica that finds something wrong with one where memory is lent is asked
/// again with nothing lent: what it may map is not for this side to know.
pub(super) fn connect(who: &Identity, replica: &str, address: &Address) -> Result<Made, ConnectError> {
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
) -> Result<Made, Failed> {
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
    let grants = waiting.iter().all(|greeted| greeted.grants);
    let links: Result<_, _> = waiting.into_iter().map(|greeted| greeted.welcomed(address)).collect();
    Ok(Made { links: links?, number: session, grants })
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
    grants: bool,
    tells: bool,
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
        let (borrows, grants, tells) = Challenge::decode(&challenge)
            .map_or((false, false, false), |c| (c.borrows(), c.grants(), c.tells()));
        // Its key is proved by the welcome alone, which comes after the memory.
        hello.lends &= borrows && stream.is_to_own_user();
        let asked = Asked::answer(&challenge, (&hello, Role::Engine), key, nonce)
            .map_err(|e| refused_because(address, e.into()))?;
        match memory.filter(|_| hello.lends) {
            Some(memory) => stream.write_all_with_fd(asked.hello(), memory.as_fd()).map_err(io)?,
            None => stream.write_all(asked.hello()).map_err(io)?,
        }
        Ok(Self { stream, asked, checksums: hello.checksums, lends: hello.lends, grants, tells })
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
        Ok(Linked { socket, checksums: self.checksums, lends: self.lends, tells: self.tells })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::mpsc::{Receiver, channel};

    use lh_ring::Pool;
    use lh_ring::sys::receive_with_fds;
    use lh_wire::handshake::{HELLO_LEN, encode_welcome};

    use super::*;

    const KEY: Key = [7; 32];

    /// A replica that sends this challenge, and this verdict to a hello that lends: of every hello, whether it lends and how many
    /// descriptors came with it.
    fn replica(
        listener: UnixListener,
        challenge: fn([u8; 32]) -> Challenge,
        lent: Verdict,
        connections: usize,
    ) -> Receiver<(bool, usize)> {
        let greet = move |mut stream: UnixStream| {
            let challenge = challenge([1; 32]);
            stream.write_all(challenge.as_bytes()).unwrap();
            let mut bytes = [0; HELLO_LEN];
            let (len, descriptors) = receive_with_fds(stream.as_fd(), &mut bytes).unwrap();
            assert_eq!(len, HELLO_LEN);
            let hello = Hello::decode(&bytes, &challenge, &KEY).unwrap();
            let verdict = if hello.lends { lent } else { Verdict::Welcome };
            let welcome = encode_welcome(verdict, hello.generation, &challenge, &bytes, &KEY);
            // An engine that is refused on one connection waits for no other.
            let _ = stream.write_all(&welcome);
            (hello.lends, descriptors.len())
        };
        let (said, heard) = channel();
        std::thread::spawn(move || {
            (0..connections).for_each(|_| said.send(greet(listener.accept().unwrap().0)).unwrap());
        });
        heard
    }

    /// Which links lend.
    type Made = Result<Vec<bool>, ConnectError>;

    /// Of each hello, whether it lends and how many descriptors came with it.
    type Heard = Vec<(bool, usize)>;

    /// What an engine of two queues, of which one has memory that it can lend, comes to with such a replica.
    fn come(challenge: fn([u8; 32]) -> Challenge, lent: Verdict, connections: usize) -> (Made, Heard) {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let replica = replica(UnixListener::bind(&path).unwrap(), challenge, lent, connections);
        let offers = [Offer::default(), Offer::default()];
        offers[0].make(Pool::lendable(0, 1 << 20).unwrap().lend());
        offers[1].make(None);
        let who = Identity {
            volume: "demo".into(),
            key: KEY,
            generation: Generation { attachment: 1, restart: 1 },
            instance: Instance(1),
            offers: offers.into(),
        };
        let made = connect(&who, "demo-r-1", &Address::Unix(path));
        let made = made.map(|made| made.links.iter().map(|link| link.lends).collect());
        // Of one that was refused nobody waits for the connections that are not made any more.
        let patience = Duration::from_secs(if made.is_ok() { 20 } else { 0 });
        let next = || replica.recv_timeout(patience).ok();
        (made, std::iter::from_fn(next).take(connections).collect())
    }

    #[test]
    fn memory_goes_to_who_borrows_it() {
        let (made, hellos) = come(Challenge::of_borrower, Verdict::Welcome, 2);
        assert_eq!((made, hellos), (Ok(vec![true, false]), vec![(true, 1), (false, 0)]));
    }

    #[test]
    fn a_replica_of_before_is_lent_nothing() {
        let (made, hellos) = come(Challenge::new, Verdict::Welcome, 2);
        assert_eq!((made, hellos), (Ok(vec![false, false]), vec![(false, 0), (false, 0)]));
    }

    #[test]
    fn a_replica_that_cannot_take_it_is_asked_again_with_nothing_lent() {
        let (made, hellos) = come(Challenge::of_borrower, Verdict::Invalid, 4);
        assert_eq!(made, Ok(vec![false, false]));
        assert_eq!(hellos, [(true, 1), (false, 0), (false, 0), (false, 0)]);
        let (made, _) = come(Challenge::of_borrower, Verdict::Unusable, 2);
        assert!(matches!(made, Err(ConnectError::Refused(_))), "that is another matter: {made:?}");
    }

    #[test]
    fn a_queue_that_never_has_memory_is_not_waited_for_long() {
        let began = Instant::now();
        assert!(Offer::default().wait(began + Duration::from_millis(50)).is_none());
        assert!(began.elapsed() >= Duration::from_millis(50));
    }
}
