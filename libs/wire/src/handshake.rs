//! The handshake: both sides prove the volume's key, the replica learns who comes, and answers once the engines
//! before are fenced off.
//!
//! ```text
//! replica                                        engine
//!   Challenge { versions, nonce }          ->
//!                                          <-    Hello { who, generation, session, queue, nonce, proof }
//!   (checks; fences durably; drains)
//!   Welcome { verdict, generation, proof } ->
//! ```
//!
//! A proof is HMAC-SHA-256 over a label and all bytes exchanged so far, so neither side's proof can be used again, nor
//! the other side's be sent back. The first message byte follows directly behind `Welcome` / `Hello`.

mod asked;

use hmac::{Hmac, KeyInit, Mac};
use lh_block::{Generation, Instance};
use sha2::Sha256;
use thiserror::Error;
use zerocopy::byteorder::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use asked::{Asked, NotLetIn};

use crate::header::VERSION;

/// Flags of a hello: payloads carry checksums; it is of a reader; it is of a relay, which no replica lets in; memory is lent; it
/// is of an engine that wants to be granted the layers' files.
const CHECKSUMS: u8 = 1;
const READER: u8 = 2;
const RELAY: u8 = 4;
const LENDS: u8 = 8;
const GRANTEE: u8 = 16;

/// In a challenge: whoever asks may lend its memory; may be granted the layers' files; may ask which blocks hold data. Those who do
/// not know these bits sent 0 here, and did not look.
const BORROWS: u16 = 1;
const GRANTS: u16 = 2;
const TELLS: u16 = 4;

/// First bytes of each handshake message: "LHhs".
const MAGIC: u32 = u32::from_le_bytes(*b"LHhs");

/// A volume's secret: 32 bytes.
pub type Key = [u8; 32];

/// Longest name on the wire: a replica's.
const NAME: usize = lh_block::PROCESS_NAME_MAX;

/// The replica's first message.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawChallenge {
    magic: U32,
    version_min: u8,
    version_max: u8,
    accepts: U16,
    nonce: [u8; 32],
}

/// The engine's answer.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHello {
    magic: U32,
    version: u8,
    flags: u8,
    queue: U16,
    queues: U16,
    reserved: U16,
    generation: U64,
    instance: U128,
    session: U128,
    volume: [u8; NAME],
    replica: [u8; NAME],
    nonce: [u8; 32],
    proof: [u8; 32],
}

/// The replica's verdict.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawWelcome {
    magic: U32,
    verdict: U32,
    generation: U64,
    proof: [u8; 32],
}

/// Bytes of the replica's first message.
pub const CHALLENGE_LEN: usize = size_of::<RawChallenge>();
/// Bytes of the engine's message.
pub const HELLO_LEN: usize = size_of::<RawHello>();
/// Bytes of the replica's last message.
pub const WELCOME_LEN: usize = size_of::<RawWelcome>();

const _: () = assert!(CHALLENGE_LEN == 40 && HELLO_LEN == 276 && WELCOME_LEN == 48);

/// Who connects, and to what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Name of the volume.
    pub volume: String,
    /// Name of the replica that the engine believes to reach.
    pub replica: String,
    /// The engine's generation.
    pub generation: Generation,
    /// The engine process. Equal generations from another instance are refused.
    pub instance: Instance,
    /// All connections of one session carry the same number; a new number ends the session before.
    pub session: Instance,
    /// Number of this connection's queue, from 0.
    pub queue: u16,
    /// Queues, hence connections, of the session.
    pub queues: u16,
    /// Payloads carry checksums (on for TCP).
    pub checksums: bool,
    /// A descriptor of the engine's memory comes with the hello, and writes may say where in it their bytes are. Only in
    /// answer to a challenge that says so ([`Challenge::borrows`]).
    pub lends: bool,
}

/// As what somebody comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A volume's engine, to a replica.
    Engine,
    /// Somebody who only reads snapshots of a replica ([`crate::Ask`]): it joins no session, and the numbers of engine,
    /// session and queue mean nothing.
    Reader,
    /// The engine of the session that the hello names, which has been let in: it wants to be granted the layers' files
    /// ([`crate::Grant`]). Only in answer to a challenge that says so ([`Challenge::grants`]). The connection carries nothing
    /// else, and its end is the grant's.
    Grantee,
    /// A relay, to the volume's engine, which challenges as a replica does. `instance` is the relay's process, `session`
    /// this connection; there is no generation, and `replica` is the volume's name again.
    Relay,
}

impl Role {
    const fn flags(self) -> u8 {
        match self {
            Self::Engine => 0,
            Self::Reader => READER,
            Self::Grantee => GRANTEE,
            Self::Relay => RELAY,
        }
    }
}

/// The answer to a hello: a replica's, or an engine's to a relay. In words it is what a person may do about it, on either
/// side: the one that was asked logs it, the one that asked reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[repr(u32)]
pub enum Verdict {
    /// Every earlier session is fenced off and drained; messages may follow.
    #[error("let in")]
    Welcome = 0,
    /// The replica has seen a younger engine.
    #[error("a younger engine of this volume has come, and only the youngest is let in")]
    Stale = 1,
    /// The key's proof is wrong.
    #[error("the key is not this volume's: give both sides the key file of the volume")]
    BadKey = 2,
    /// This is a replica of another volume, or another replica.
    #[error("another volume, or another replica of it, is served here: look up the address")]
    WrongName = 3,
    /// No common version.
    #[error("no common version of the data protocol: upgrade the older one of the two programs")]
    BadVersion = 4,
    /// The numbers in the hello contradict each other or the session.
    #[error("the hello contradicts itself, or what is going on here")]
    Invalid = 5,
    /// The replica could not make the fence durable, its directory is not usable, or it has readers enough.
    #[error("the replica cannot let anybody in for now: its log says why")]
    Unusable = 6,
}

impl Verdict {
    const ALL: [Self; 7] = [
        Self::Welcome,
        Self::Stale,
        Self::BadKey,
        Self::WrongName,
        Self::BadVersion,
        Self::Invalid,
        Self::Unusable,
    ];

    fn from_u32(n: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|v| *v as u32 == n)
    }
}

/// Why the handshake failed on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HandshakeError {
    /// Something else talks on this port.
    #[error("the other side does not speak the data protocol of this program")]
    NotThisProtocol,
    /// No common version.
    #[error("the other side speaks protocol versions {0} to {1}, this one {VERSION}")]
    Version(u8, u8),
    /// The other side does not know the key. It may be an impostor: nothing it says counts.
    #[error("the other side does not hold this volume's key")]
    BadProof,
    /// A field that no correct peer sends.
    #[error("malformed handshake")]
    Malformed,
}

/// A challenge that was sent or received, with its bytes for the proofs.
#[derive(Clone)]
pub struct Challenge([u8; CHALLENGE_LEN]);

impl Challenge {
    /// A new challenge; `nonce` must be fresh from the system's random source.
    pub fn new(nonce: [u8; 32]) -> Self {
        let raw = RawChallenge {
            magic: MAGIC.into(),
            version_min: VERSION,
            version_max: VERSION,
            accepts: 0.into(),
            nonce,
        };
        Self::of(raw)
    }

    /// The same of a replica that an engine reaches over TCP.
    pub fn of_distant(nonce: [u8; 32]) -> Self {
        Self::accepting(nonce, TELLS)
    }

    /// The same; an engine may lend its memory. Only over unix sockets.
    pub fn of_borrower(nonce: [u8; 32]) -> Self {
        Self::accepting(nonce, BORROWS)
    }

    /// The same of a replica that an engine reaches over a unix socket: it may lend its memory, and be granted the layers' files.
    pub fn of_neighbour(nonce: [u8; 32]) -> Self {
        Self::accepting(nonce, BORROWS | GRANTS | TELLS)
    }

    fn accepting(nonce: [u8; 32], what: u16) -> Self {
        let mut raw = Self::new(nonce).raw();
        raw.accepts = what.into();
        Self::of(raw)
    }

    fn of(raw: RawChallenge) -> Self {
        let mut bytes = [0; CHALLENGE_LEN];
        bytes.copy_from_slice(raw.as_bytes());
        Self(bytes)
    }

    fn raw(&self) -> RawChallenge {
        zerocopy::transmute!(self.0)
    }

    /// Whoever answers may lend its memory ([`Hello::lends`]).
    pub fn borrows(&self) -> bool {
        self.raw().accepts.get() & BORROWS != 0
    }

    /// An engine may ask to be granted the layers' files ([`Role::Grantee`]).
    pub fn grants(&self) -> bool {
        self.raw().accepts.get() & GRANTS != 0
    }

    /// An engine may ask which blocks hold data ([`crate::OpCode::Allocation`]).
    pub fn tells(&self) -> bool {
        self.raw().accepts.get() & TELLS != 0
    }

    /// The bytes to send.
    pub const fn as_bytes(&self) -> &[u8; CHALLENGE_LEN] {
        &self.0
    }

    /// Reads a challenge.
    ///
    /// # Errors
    /// Another protocol, or no common version.
    pub fn decode(bytes: &[u8; CHALLENGE_LEN]) -> Result<Self, HandshakeError> {
        let raw = RawChallenge::read_from_bytes(bytes).map_err(|_| HandshakeError::Malformed)?;
        if raw.magic.get() != MAGIC {
            return Err(HandshakeError::NotThisProtocol);
        }
        if raw.version_min > VERSION || raw.version_max < VERSION {
            return Err(HandshakeError::Version(raw.version_min, raw.version_max));
        }
        Ok(Self(*bytes))
    }
}

/// HMAC-SHA-256 over a label and the transcript.
fn prover(key: &Key, label: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = match Hmac::<Sha256>::new_from_slice(key) {
        Ok(mac) => mac,
        Err(_) => unreachable!("HMAC takes keys of any length"),
    };
    mac.update(label);
    for part in parts {
        mac.update(part);
    }
    mac
}

fn prove(key: &Key, label: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    prover(key, label, parts).finalize().into_bytes().into()
}

/// Bytes of a hello that its proof covers.
const HELLO_PROVEN: usize = HELLO_LEN - 32;
/// Bytes of a welcome that its proof covers.
const WELCOME_PROVEN: usize = WELCOME_LEN - 32;

fn put_name(name: &str) -> Result<[u8; NAME], HandshakeError> {
    let mut field = [0; NAME];
    field.get_mut(..name.len()).ok_or(HandshakeError::Malformed)?.copy_from_slice(name.as_bytes());
    Ok(field)
}

fn get_name(field: &[u8; NAME]) -> Result<String, HandshakeError> {
    let len = field.iter().position(|b| *b == 0).unwrap_or(NAME);
    let name = std::str::from_utf8(&field[..len]).map_err(|_| HandshakeError::Malformed)?;
    lh_block::check_process_name("peer", name).map_err(|_| HandshakeError::Malformed)?;
    Ok(name.to_owned())
}

impl Hello {
    /// The answer to a challenge of somebody of this [`Role`]. `nonce` must be fresh from the system's random source.
    ///
    /// # Errors
    /// `Malformed`: a name longer than 80 bytes.
    pub fn encode(
        &self,
        role: Role,
        challenge: &Challenge,
        key: &Key,
        nonce: [u8; 32],
    ) -> Result<[u8; HELLO_LEN], HandshakeError> {
        let raw = RawHello {
            magic: MAGIC.into(),
            version: VERSION,
            flags: role.flags()
                | if self.checksums { CHECKSUMS } else { 0 }
                | if self.lends { LENDS } else { 0 },
            queue: self.queue.into(),
            queues: self.queues.into(),
            reserved: 0.into(),
            generation: u64::from(self.generation).into(),
            instance: self.instance.0.into(),
            session: self.session.0.into(),
            volume: put_name(&self.volume)?,
            replica: put_name(&self.replica)?,
            nonce,
            proof: [0; 32],
        };
        let mut bytes = [0; HELLO_LEN];
        bytes.copy_from_slice(raw.as_bytes());
        let proof = prove(key, b"longhorn engine 1", &[&challenge.0, &bytes[..HELLO_PROVEN]]);
        bytes[HELLO_PROVEN..].copy_from_slice(&proof);
        Ok(bytes)
    }

    /// Reads a hello and checks its proof. The error tells what to answer.
    ///
    /// # Errors
    /// The verdict to refuse with.
    pub fn decode(bytes: &[u8; HELLO_LEN], challenge: &Challenge, key: &Key) -> Result<Self, Verdict> {
        let (hello, flags) = Self::decode_proved(bytes, challenge, key)?;
        let wrongly_lent = hello.lends && (!challenge.borrows() || flags & READER != 0);
        let wrongly_asked = flags & GRANTEE != 0 && (!challenge.grants() || flags != GRANTEE);
        let known = flags & !(CHECKSUMS | READER | LENDS | GRANTEE) == 0;
        if known && !wrongly_lent && !wrongly_asked { Ok(hello) } else { Err(Verdict::Invalid) }
    }

    /// The same of a relay: a hello that was made for a replica is no relay's, though it proves the key.
    ///
    /// # Errors
    /// As for `decode`.
    pub fn decode_relay(bytes: &[u8; HELLO_LEN], challenge: &Challenge, key: &Key) -> Result<Self, Verdict> {
        let (hello, flags) = Self::decode_proved(bytes, challenge, key)?;
        if flags != RELAY { Err(Verdict::Invalid) } else { Ok(hello) }
    }

    /// A hello whose proof is right, and its flags.
    fn decode_proved(
        bytes: &[u8; HELLO_LEN],
        challenge: &Challenge,
        key: &Key,
    ) -> Result<(Self, u8), Verdict> {
        let raw = RawHello::read_from_bytes(bytes).map_err(|_| Verdict::Invalid)?;
        if raw.magic.get() != MAGIC {
            return Err(Verdict::Invalid);
        }
        if raw.version != VERSION {
            return Err(Verdict::BadVersion);
        }
        // Compared in constant time by the hmac crate.
        prover(key, b"longhorn engine 1", &[&challenge.0, &bytes[..HELLO_PROVEN]])
            .verify_slice(&raw.proof)
            .map_err(|_| Verdict::BadKey)?;
        let hello = Self {
            volume: get_name(&raw.volume).map_err(|_| Verdict::Invalid)?,
            replica: get_name(&raw.replica).map_err(|_| Verdict::Invalid)?,
            generation: Generation::from(raw.generation.get()),
            instance: Instance(raw.instance.get()),
            session: Instance(raw.session.get()),
            queue: raw.queue.get(),
            queues: raw.queues.get(),
            checksums: raw.flags & CHECKSUMS != 0,
            lends: raw.flags & LENDS != 0,
        };
        if hello.queue >= hello.queues { Err(Verdict::Invalid) } else { Ok((hello, raw.flags)) }
    }
}

/// True for a hello, which was decoded, of somebody who only reads snapshots.
pub fn is_reader(hello: &[u8; HELLO_LEN]) -> bool {
    RawHello::read_from_bytes(hello).is_ok_and(|raw| raw.flags & READER != 0)
}

/// True for a hello, which was decoded, of an engine that wants to be granted the layers' files.
pub fn is_grantee(hello: &[u8; HELLO_LEN]) -> bool {
    RawHello::read_from_bytes(hello).is_ok_and(|raw| raw.flags & GRANTEE != 0)
}

/// The replica's last message. `generation` is the highest that it has seen.
pub fn encode_welcome(
    verdict: Verdict,
    generation: Generation,
    challenge: &Challenge,
    hello: &[u8; HELLO_LEN],
    key: &Key,
) -> [u8; WELCOME_LEN] {
    let raw = RawWelcome {
        magic: MAGIC.into(),
        verdict: (verdict as u32).into(),
        generation: u64::from(generation).into(),
        proof: [0; 32],
    };
    let mut bytes = [0; WELCOME_LEN];
    bytes.copy_from_slice(raw.as_bytes());
    // A peer that did not prove the key gets no proof to learn from.
    if verdict != Verdict::BadKey {
        let proof = prove(key, b"longhorn replica 1", &[&challenge.0, hello, &bytes[..WELCOME_PROVEN]]);
        bytes[WELCOME_PROVEN..].copy_from_slice(&proof);
    }
    bytes
}

/// Reads the replica's verdict and checks its proof. Who asks goes through [`Asked`].
///
/// # Errors
/// The replica does not hold the key, or speaks nonsense. A refusal is no error here.
pub fn decode_welcome(
    bytes: &[u8; WELCOME_LEN],
    challenge: &Challenge,
    hello: &[u8; HELLO_LEN],
    key: &Key,
) -> Result<(Verdict, Generation), HandshakeError> {
    let raw = RawWelcome::read_from_bytes(bytes).map_err(|_| HandshakeError::Malformed)?;
    if raw.magic.get() != MAGIC {
        return Err(HandshakeError::NotThisProtocol);
    }
    let verdict = Verdict::from_u32(raw.verdict.get()).ok_or(HandshakeError::Malformed)?;
    let generation = Generation::from(raw.generation.get());
    if verdict == Verdict::BadKey {
        // Without proof: a wrong key on either side looks the same, and nothing is believed but the refusal.
        return Ok((verdict, Generation::default()));
    }
    prover(key, b"longhorn replica 1", &[&challenge.0, hello, &bytes[..WELCOME_PROVEN]])
        .verify_slice(&raw.proof)
        .map_err(|_| HandshakeError::BadProof)?;
    Ok((verdict, generation))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            volume: "demo".into(),
            replica: "demo-r-0a1b2c3d".into(),
            generation: Generation { attachment: 5, restart: 2 },
            instance: Instance(77),
            session: Instance(78),
            queue: 1,
            queues: 2,
            checksums: true,
            lends: false,
        }
    }

    #[test]
    fn both_sides_agree() {
        let key = [7; 32];
        let challenge = Challenge::new([1; 32]);
        let bytes = hello().encode(Role::Engine, &challenge, &key, [2; 32]).unwrap();
        assert_eq!(Hello::decode(&bytes, &challenge, &key), Ok(hello()));
        let reader = hello().encode(Role::Reader, &challenge, &key, [2; 32]).unwrap();
        assert_eq!(Hello::decode(&reader, &challenge, &key), Ok(hello()));
        assert!(is_reader(&reader) && !is_reader(&bytes));
        let welcome = encode_welcome(Verdict::Welcome, hello().generation, &challenge, &bytes, &key);
        assert_eq!(
            decode_welcome(&welcome, &challenge, &bytes, &key),
            Ok((Verdict::Welcome, hello().generation))
        );
    }

    #[test]
    fn a_wrong_key_or_a_replayed_hello_is_refused() {
        let challenge = Challenge::new([1; 32]);
        let bytes = hello().encode(Role::Engine, &challenge, &[7; 32], [2; 32]).unwrap();
        assert_eq!(Hello::decode(&bytes, &challenge, &[8; 32]), Err(Verdict::BadKey));
        assert_eq!(Hello::decode(&bytes, &Challenge::new([3; 32]), &[7; 32]), Err(Verdict::BadKey));
    }

    #[test]
    fn who_does_not_prove_the_key_gets_no_proof() {
        let challenge = Challenge::new([1; 32]);
        let bytes = hello().encode(Role::Engine, &challenge, &[7; 32], [2; 32]).unwrap();
        let refusal = encode_welcome(Verdict::BadKey, hello().generation, &challenge, &bytes, &[8; 32]);
        assert_eq!(refusal[WELCOME_PROVEN..], [0; 32]);
        let refusal = encode_welcome(Verdict::Stale, hello().generation, &challenge, &bytes, &[8; 32]);
        assert_ne!(refusal[WELCOME_PROVEN..], [0; 32]);
    }

    #[test]
    fn a_queue_that_there_is_not_and_a_name_that_is_none_are_refused() {
        let (key, challenge) = ([7; 32], Challenge::new([1; 32]));
        let named =
            |volume: &str, replica: &str| Hello { volume: volume.into(), replica: replica.into(), ..hello() };
        for wrong in [
            Hello { queue: 2, ..hello() },
            Hello { queue: 0, queues: 0, ..hello() },
            named("", "demo-r-0a1b2c3d"),
            named("demo", ""),
            named("../demo", "demo-r-0a1b2c3d"),
            named("demo", "demo\nr"),
        ] {
            let bytes = wrong.encode(Role::Engine, &challenge, &key, [2; 32]).unwrap();
            assert_eq!(Hello::decode(&bytes, &challenge, &key), Err(Verdict::Invalid), "{wrong:?}");
        }
        let longest = named(&"v".repeat(NAME), &"r".repeat(NAME));
        let bytes = longest.encode(Role::Engine, &challenge, &key, [2; 32]).unwrap();
        assert_eq!(Hello::decode(&bytes, &challenge, &key), Ok(longest));
    }

    #[test]
    fn a_relay_is_no_engine_and_an_engine_no_relay() {
        let (key, challenge) = ([7; 32], Challenge::new([1; 32]));
        let hello = Hello { checksums: false, ..hello() };
        let relay = hello.encode(Role::Relay, &challenge, &key, [2; 32]).unwrap();
        assert_eq!(Hello::decode_relay(&relay, &challenge, &key), Ok(hello.clone()));
        assert_eq!(Hello::decode_relay(&relay, &challenge, &[8; 32]), Err(Verdict::BadKey));
        assert_eq!(Hello::decode(&relay, &challenge, &key), Err(Verdict::Invalid));
        for other in [Role::Engine, Role::Reader] {
            let other = hello.encode(other, &challenge, &key, [2; 32]).unwrap();
            assert_eq!(Hello::decode_relay(&other, &challenge, &key), Err(Verdict::Invalid));
        }
    }

    #[test]
    fn a_replica_without_the_key_cannot_say_anything() {
        let challenge = Challenge::new([1; 32]);
        let bytes = hello().encode(Role::Engine, &challenge, &[7; 32], [2; 32]).unwrap();
        for verdict in [Verdict::Welcome, Verdict::Stale, Verdict::WrongName] {
            let forged = encode_welcome(verdict, Generation::default(), &challenge, &bytes, &[8; 32]);
            assert_eq!(decode_welcome(&forged, &challenge, &bytes, &[7; 32]), Err(HandshakeError::BadProof));
        }
    }

    #[test]
    fn only_an_engine_lends_and_only_to_who_borrows() {
        let (key, hello) = ([7; 32], Hello { lends: true, checksums: false, ..hello() });
        let (borrower, other) = (Challenge::of_borrower([1; 32]), Challenge::new([1; 32]));
        assert!(borrower.borrows() && !other.borrows());
        assert!(Challenge::decode(borrower.as_bytes()).unwrap().borrows());
        assert_eq!(borrower.as_bytes()[6..8], [1, 0]);
        let read = |role, challenge| {
            let bytes = hello.encode(role, challenge, &key, [2; 32]).unwrap();
            (Hello::decode(&bytes, challenge, &key), Hello::decode_relay(&bytes, challenge, &key))
        };
        let invalid = Err(Verdict::Invalid);
        assert_eq!(read(Role::Engine, &borrower), (Ok(hello.clone()), invalid.clone()));
        assert_eq!(read(Role::Engine, &other), (invalid.clone(), invalid.clone()));
        for role in [Role::Reader, Role::Relay] {
            assert_eq!(read(role, &borrower), (invalid.clone(), invalid.clone()));
        }
        // Somebody on the way makes the one or the other of it.
        let bytes = hello.encode(Role::Engine, &borrower, &key, [2; 32]).unwrap();
        assert_eq!(Hello::decode(&bytes, &other, &key), Err(Verdict::BadKey));
        let quiet = Hello { lends: false, ..hello.clone() };
        let mut bytes = quiet.encode(Role::Engine, &borrower, &key, [2; 32]).unwrap();
        assert_eq!(Hello::decode(&bytes, &borrower, &key), Ok(quiet));
        bytes[5] |= LENDS;
        assert_eq!(Hello::decode(&bytes, &borrower, &key), Err(Verdict::BadKey));
    }

    #[test]
    fn files_are_asked_for_by_an_engine_alone_and_of_who_grants_them() {
        let key = [7; 32];
        let plain = Hello { checksums: false, ..hello() };
        let challenges =
            [Challenge::new([1; 32]), Challenge::of_borrower([1; 32]), Challenge::of_neighbour([1; 32])];
        assert_eq!(challenges.each_ref().map(Challenge::grants), [false, false, true]);
        assert_eq!(challenges[2].as_bytes()[6..8], [7, 0]);
        assert_eq!(challenges.each_ref().map(Challenge::tells), [false, false, true]);
        assert!(Challenge::of_distant([1; 32]).tells() && !Challenge::of_distant([1; 32]).borrows());
        assert!(challenges[2].borrows());
        for challenge in &challenges {
            let bytes = plain.encode(Role::Grantee, challenge, &key, [2; 32]).unwrap();
            let wanted = if challenge.grants() { Ok(plain.clone()) } else { Err(Verdict::Invalid) };
            assert_eq!(Hello::decode(&bytes, challenge, &key), wanted);
            assert_eq!(Hello::decode_relay(&bytes, challenge, &key), Err(Verdict::Invalid));
            assert!(is_grantee(&bytes) && !is_reader(&bytes));
            let engine = plain.encode(Role::Engine, challenge, &key, [2; 32]).unwrap();
            assert!(!is_grantee(&engine));
        }
        for wrong in [Hello { lends: true, ..plain.clone() }, Hello { checksums: true, ..plain }] {
            let bytes = wrong.encode(Role::Grantee, &challenges[2], &key, [2; 32]).unwrap();
            assert_eq!(Hello::decode(&bytes, &challenges[2], &key), Err(Verdict::Invalid));
        }
    }

    #[test]
    fn changed_bytes_are_noticed() {
        let key = [7; 32];
        let challenge = Challenge::new([1; 32]);
        let good = hello().encode(Role::Engine, &challenge, &key, [2; 32]).unwrap();
        for at in 0..HELLO_LEN {
            let mut bad = good;
            bad[at] ^= 1;
            assert!(Hello::decode(&bad, &challenge, &key).is_err(), "byte {at}");
        }
    }
}
