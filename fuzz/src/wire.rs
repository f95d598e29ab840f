//! One side of a connection of the data protocol: what a replica, or an engine, does with the other's bytes.
//!
//! Input: one byte of circumstances, then the peer's stream: `Hello` or `Challenge` and `Welcome`, then messages.
//!
//! | bits | meaning |
//! |---|---|
//! | 0 | the stream is the replica's, else the engine's |
//! | 1 | checksums and proofs of the input stand as they are, else they are made right, so that what lies behind them is reached |
//! | 2 | there is no handshake in the stream |
//! | 3 | the stream begins with what a replica grants, and has no handshake |

use hmac::{Hmac, KeyInit, Mac};
use lh_block::{Extent, Generation, Instance};
use lh_wire::handshake::{
    Asked, CHALLENGE_LEN, Challenge, HELLO_LEN, Hello, Key, NotLetIn, Role, Verdict, WELCOME_LEN,
    decode_welcome, encode_welcome,
};
use lh_wire::{
    BlockState, Control, FILES_MAX, GRANT_LEN, Grant, HEADER_LEN, Header, LayerDigest, LayerTrailer,
    MAX_PAYLOAD, OpCode, PAYLOAD_ALIGN, PIECE_BLOCKS, Pieces, Place, Places, ReplicaState, Status, differing,
    flags,
};
use sha2::Sha256;

const KEY: Key = [7; 32];

struct Stream<'a> {
    rest: &'a [u8],
    as_sent: bool,
}

impl<'a> Stream<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (now, later) = self.rest.split_first_chunk::<N>()?;
        self.rest = later;
        Some(*now)
    }

    fn skip(&mut self, len: usize) -> Option<&'a [u8]> {
        let (now, later) = self.rest.split_at_checked(len)?;
        self.rest = later;
        Some(now)
    }

    fn prove<const N: usize>(&self, bytes: &mut [u8; N], label: &[u8], before: &[&[u8]]) {
        if self.as_sent {
            return;
        }
        let mut mac = Hmac::<Sha256>::new_from_slice(&KEY).unwrap();
        mac.update(label);
        before.iter().for_each(|part| mac.update(part));
        mac.update(&bytes[..N - 32]);
        bytes[N - 32..].copy_from_slice(&mac.finalize().into_bytes());
    }

    /// What a replica does with an engine's first bytes.
    fn hello(&mut self) -> Option<()> {
        let challenge = Challenge::of_borrower([3; 32]);
        let mut bytes = self.take::<HELLO_LEN>()?;
        self.prove(&mut bytes, b"longhorn engine 1", &[challenge.as_bytes()]);
        let answered = |verdict| {
            let welcome = encode_welcome(verdict, Generation::from(5), &challenge, &bytes, &KEY);
            let heard = decode_welcome(&welcome, &challenge, &bytes, &KEY).expect("our own welcome");
            assert_eq!(heard.0, verdict);
        };
        match Hello::decode(&bytes, &challenge, &KEY) {
            Err(verdict) => {
                assert_ne!(verdict, Verdict::Welcome);
                answered(verdict);
                None
            }
            Ok(hello) => {
                assert!(hello.queue < hello.queues);
                for name in [&hello.volume, &hello.replica] {
                    assert!(lh_block::check_process_name("peer", name).is_ok(), "{name:?}");
                }
                let again = hello.encode(Role::Engine, &challenge, &KEY, [4; 32]).expect("names fit");
                assert_eq!(Hello::decode(&again, &challenge, &KEY).as_ref(), Ok(&hello));
                let elsewhere = Challenge::new([3; 32]);
                let again = hello.encode(Role::Engine, &elsewhere, &KEY, [4; 32]).expect("names fit");
                assert_eq!(Hello::decode(&again, &elsewhere, &KEY).is_ok(), !hello.lends);
                answered(Verdict::Welcome);
                Some(())
            }
        }
    }

    /// What an engine does with a replica's first bytes.
    fn welcome(&mut self) -> Option<()> {
        let hello = Hello {
            volume: "demo".into(),
            replica: "demo-r-0a1b2c3d".into(),
            generation: Generation::from(5),
            instance: Instance(1),
            session: Instance(2),
            queue: 0,
            queues: 1,
            checksums: true,
            lends: false,
        };
        let challenge = self.take::<CHALLENGE_LEN>()?;
        let asked = Asked::answer(&challenge, (&hello, Role::Engine), &KEY, [9; 32]).ok()?;
        let mut bytes = self.take::<WELCOME_LEN>()?;
        self.prove(&mut bytes, b"longhorn replica 1", &[&challenge, asked.hello()]);
        match asked.heard(&bytes) {
            Ok(_) => Some(()),
            Err(NotLetIn::Refused(verdict, generation)) => {
                assert_ne!(verdict, Verdict::Welcome);
                assert!(verdict != Verdict::BadKey || generation == Generation::default());
                None
            }
            Err(NotLetIn::Foreign(_)) => None,
        }
    }

    /// What an engine does with a replica's grant.
    fn grant(&mut self) -> Option<()> {
        let bytes = self.take::<GRANT_LEN>()?;
        let grant = Grant::decode(&bytes).ok()?;
        assert!(usize::from(grant.files) <= FILES_MAX);
        assert_eq!(Grant::decode(&grant.encode()), Ok(grant));
        Some(())
    }

    fn messages(&mut self) -> Option<()> {
        loop {
            let mut bytes = self.take::<HEADER_LEN>()?;
            if !self.as_sent {
                let crc = crc32c::crc32c(&bytes[..HEADER_LEN - 4]);
                bytes[HEADER_LEN - 4..].copy_from_slice(&crc.to_le_bytes());
            }
            let header = Header::decode(&bytes).ok()?;
            assert!(header.payload <= MAX_PAYLOAD && u64::from(header.pad) < PAYLOAD_ALIGN);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
            let answer = header.response(Status::Refused);
            assert!(answer.has(flags::RESPONSE) && answer.tag == header.tag && answer.payload == 0);
            self.skip(usize::from(header.pad))?;
            let payload = self.skip(header.payload as usize)?;
            message(&header, payload);
        }
    }
}

fn message(header: &Header, payload: &[u8]) {
    match header.op {
        OpCode::Write if header.has(flags::LENT) => lent(header, payload),
        OpCode::Control if header.has(flags::RESPONSE) => {
            if let Ok(state) = serde_json::from_slice::<ReplicaState>(payload) {
                let text = serde_json::to_vec(&state).expect("it was read");
                assert_eq!(serde_json::from_slice::<ReplicaState>(&text).expect("our own"), state);
            }
        }
        OpCode::Control => {
            if let Ok(control) = serde_json::from_slice::<Control>(payload) {
                let text = serde_json::to_vec(&control).expect("it was read");
                assert_eq!(serde_json::from_slice::<Control>(&text).expect("our own"), control);
            }
        }
        OpCode::ReadLayer | OpCode::PutLayer => image(header, payload),
        OpCode::DigestLayer | OpCode::CompareLayer => digest(header, payload),
        OpCode::Allocation => allocation(header, payload),
        OpCode::Places => (0..=FILES_MAX).for_each(|files| places(header, payload, files)),
        _ => {}
    }
}

/// Which blocks hold data, as a frontend reads it: from the range's begin on, without a gap, and nothing beyond it.
fn allocation(header: &Header, payload: &[u8]) {
    let range = Extent::new(header.offset, header.length.into());
    // No volume reaches to the end of the number space.
    if range.offset.checked_add(range.len).is_none_or(|end| end > u64::MAX - 4096) {
        return;
    }
    let mut at = range.offset;
    for run in lh_block::runs(payload, range) {
        assert!(run.range.offset == at && !run.range.is_empty());
        at = run.range.end();
    }
    assert!(at <= range.end() && (at > range.offset || range.is_empty()));
    assert!(lh_block::are_runs(payload, range) || at == range.end());
}

/// Where blocks are, as an engine is told that was granted so many files.
fn places(header: &Header, payload: &[u8], files: usize) {
    let blocks = (header.length / 4096) as usize;
    let Ok(told) = Places::decode(payload, blocks, files) else { return };
    assert!(blocks <= PIECE_BLOCKS && told.blocks().len() == blocks);
    for code in told.blocks() {
        assert!(
            !matches!(Place::of_code(*code).expect("it was looked at"), Place::File(file) if usize::from(file) >= files)
        );
    }
    let (bytes, len) = told.encode();
    assert_eq!(&bytes[..len], payload);
}

/// Where the bytes of a write are, as a replica is told.
fn lent(header: &Header, list: &[u8]) {
    let Ok(pieces) = Pieces::decode(list, header.length) else { return };
    let sum: u64 = pieces.iter().map(|(_, length)| u64::from(length)).sum();
    assert!(sum == u64::from(header.length) && pieces.iter().all(|(_, length)| length > 0));
    assert!((1..=Pieces::MAX).contains(&pieces.iter().count()));
    let (bytes, len) = pieces.encode();
    assert_eq!(&bytes[..len], list);
    let whole = header.with_bytes_at_hand();
    assert!(!whole.has(flags::LENT) && whole.payload == header.length);
}

/// A layer image, cut as the replica and the engine cut it.
fn image(header: &Header, payload: &[u8]) {
    let Some(data) = payload.len().checked_sub(header.aux as usize) else { return };
    let held = u32::try_from(data).expect("payloads are short");
    if let Ok(trailer) = LayerTrailer::decode(&payload[data..], header.length, held) {
        let states: Vec<_> = trailer.states().collect();
        assert_eq!(states.len() as u64 * 4096, u64::from(header.length));
        let blocks = states.iter().filter(|state| **state == BlockState::Data).count();
        assert_eq!(blocks * 4096, data);
    }
}

/// What a layer holds in short, compared with itself and with one that holds something else everywhere.
fn digest(header: &Header, payload: &[u8]) {
    let Some(digest) = LayerDigest::decode(payload, header.length) else { return };
    let blocks: Vec<_> = digest.blocks().collect();
    assert_eq!(blocks.len() as u64 * 4096, u64::from(header.length));
    assert_eq!(LayerDigest::encode(digest.seed, &blocks, digest.layer), payload);
    assert_eq!(digest.compare(header.length, &blocks), 0);
    let other: Vec<_> = blocks
        .iter()
        .map(|(state, hash)| match state {
            BlockState::Absent => (BlockState::Zero, None),
            BlockState::Zero => (BlockState::Absent, None),
            BlockState::Data => (BlockState::Data, hash.map(|hash| !hash)),
        })
        .collect();
    let range = Extent::new(header.offset.min(1 << 40), header.length.into());
    let found: Vec<_> = differing(range, digest.compare(header.length, &other)).collect();
    assert_eq!(found, if range.is_empty() { vec![] } else { vec![range] });
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((circumstances, rest)) = input.split_first() else { return };
    let mut stream = Stream { rest, as_sent: circumstances & 2 != 0 };
    let begun = match (circumstances & 4 != 0, circumstances & 1 != 0) {
        _ if circumstances & 8 != 0 => stream.grant(),
        (true, _) => Some(()),
        (false, true) => stream.welcome(),
        (false, false) => stream.hello(),
    };
    if begun.is_some() {
        stream.messages();
    }
}
