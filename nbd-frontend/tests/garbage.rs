//! Bytes that no client would send: the machines neither panic nor let anything out of bounds through, and the
//! server goes on. Every failure names its seed.

mod support;

use std::io::Write;

use lh_block::Op;
use nbd_frontend::negotiate::{Admission, Negotiation, OPTION_DATA_MAX, Offer, Progress};
use nbd_frontend::proto::{
    BASE_ALLOCATION, EXTENDED_REQUEST_MAGIC, OPTION_MAGIC, REQUEST_MAGIC, command, option,
};
use nbd_frontend::transmit::{DROP_MAX, Decision, FILTER_MAX, Session};
use nbd_frontend::{Agreed, Export, Framing};
use support::client::{Client, string};
use support::{GEOMETRY, Running};

const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

/// xorshift64*: small, seeded, good enough to shake a parser.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}

/// A whole handshake of a well-behaved client.
fn handshake() -> Vec<u8> {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    let context = [string("demo"), vec![0, 0, 0, 2], string("base:"), string(BASE_ALLOCATION)].concat();
    for (option, data) in [
        (option::LIST, vec![]),
        (option::STARTTLS, vec![]),
        (option::STRUCTURED_REPLY, vec![]),
        (option::EXTENDED_HEADERS, vec![]),
        (option::LIST_META_CONTEXT, context.clone()),
        (option::SET_META_CONTEXT, context),
        (option::INFO, [string("demo"), vec![0, 2, 0, 1, 0, 3]].concat()),
        (option::GO, [string(""), vec![0, 0]].concat()),
    ] {
        bytes.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(data.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(&data);
    }
    bytes
}

/// A few bytes changed, cut out or doubled.
fn damage(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = random.below(bytes.len());
        match random.below(4) {
            0 => bytes[at] = random.byte(),
            1 => bytes[at] ^= 1 << random.below(8),
            2 => {
                bytes.drain(at..(at + random.below(8)).min(bytes.len()));
            }
            _ => {
                let part = bytes[at..(at + random.below(32)).min(bytes.len())].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
}

#[test]
fn a_damaged_handshake_ends_or_goes_on() {
    let export = Export { name: "demo".into(), description: "disk".into(), read_only: false };
    let offer = Offer { export: &export, geometry: GEOMETRY, admission: Admission::Open };
    let (mut ready, mut closed) = (0, 0);
    for seed in 0..50_000 {
        let random = &mut Random::new(seed);
        let mut bytes = handshake();
        damage(random, &mut bytes);
        let mut out = Vec::new();
        let mut machine = Negotiation::new(&mut out);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let want = machine.want();
            assert!(want > 0 && want <= OPTION_DATA_MAX, "seed {seed}");
            let (now, later) = rest.split_at(rest.len().min(1 + random.below(want)));
            out.clear();
            let progress = machine.input(now, &offer, &mut out);
            assert!(out.len() < 8192, "seed {seed}: {} bytes of answer", out.len());
            rest = later;
            match progress {
                Progress::More => {}
                Progress::Ready(_) => ready += 1,
                Progress::Close(_) => closed += 1,
            }
            if progress != Progress::More {
                break;
            }
        }
    }
    assert!(ready > 1000 && closed > 1000, "{ready} ready, {closed} closed: the damage is one-sided");
}

#[test]
fn whatever_reaches_the_device_is_inside_the_volume() {
    let (mut device, mut refused) = (0, 0);
    for seed in 0..300_000_u64 {
        let random = &mut Random::new(seed);
        let framing = FRAMINGS[random.below(3)];
        let allocation = random.below(2) == 0 && framing != Framing::Simple;
        let agreed = Agreed { framing, allocation, block_sizes: random.below(2) == 0 };
        let session = Session { agreed, read_only: random.below(8) == 0 };
        let mut bytes = vec![0; session.request_len()];
        let extended = framing == Framing::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        bytes[..4].copy_from_slice(&magic.to_be_bytes());
        let flags =
            u16::try_from(random.next() & random.next() & random.next() & random.next() & 0x3f).unwrap();
        bytes[4..6].copy_from_slice(&flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&u16::try_from(random.below(9)).unwrap().to_be_bytes());
        // Numbers of all sizes, often aligned, often near the end.
        let mut number = || {
            let n = random.next() >> random.below(64);
            match random.below(4) {
                0 => n,
                1 => n & !511,
                2 => GEOMETRY.size.wrapping_sub(n & !511),
                _ => (n % GEOMETRY.size) & !4095,
            }
        };
        let (offset, length) = (number(), number());
        bytes[16..24].copy_from_slice(&offset.to_be_bytes());
        if extended {
            bytes[24..32].copy_from_slice(&length.to_be_bytes());
        } else {
            bytes[24..28].copy_from_slice(&length.to_be_bytes()[4..]);
        }
        if random.below(20) == 0 {
            let at = random.below(bytes.len());
            bytes[at] ^= random.byte();
        }
        let Ok(call) = session.decode(&bytes) else { continue };
        assert!(call.payload <= DROP_MAX, "seed {seed}");
        match session.decide(&call, &GEOMETRY) {
            Decision::Device { op: Op::Flush, range } => assert!(range.is_empty()),
            Decision::Device { op, range } => {
                device += 1;
                assert!(
                    range.offset.checked_add(range.len).is_some_and(|end| end <= GEOMETRY.size),
                    "seed {seed}"
                );
                assert!(range.is_aligned(512) && !range.is_empty(), "seed {seed}");
                assert!(!(session.read_only && op.is_write()), "seed {seed}");
                let data = matches!(op, Op::Read | Op::Write { .. });
                assert!(!data || range.len <= session.longest(&GEOMETRY), "seed {seed}");
                let payload = if matches!(op, Op::Write { .. }) { range.len } else { 0 };
                assert_eq!(call.payload, payload, "seed {seed}");
            }
            Decision::Status(range) => {
                assert!(range.end() <= GEOMETRY.size && session.agreed.allocation, "seed {seed}");
            }
            Decision::Filter => assert!(call.payload <= FILTER_MAX as u64, "seed {seed}"),
            Decision::Answer(Err(refusal)) => {
                refused += 1;
                let inside = |at| at >= call.offset && at - call.offset < call.length;
                assert!(refusal.at.is_none_or(inside), "seed {seed}");
            }
            Decision::Answer(Ok(())) => {}
            Decision::Disconnect => assert_eq!(call.kind, command::DISC, "seed {seed}"),
        }
    }
    assert!(device > 3_000 && refused > 10_000, "{device} to the device, {refused} refused");
}

#[test]
fn a_server_survives_garbage() {
    let server = Running::start();
    for seed in 0..200 {
        let random = &mut Random::new(seed);
        let mut client = Client::connect(&server, FRAMINGS[random.below(3)]);
        let mut bytes = Vec::new();
        for _ in 0..20 {
            let (kind, flags) = (u16::try_from(random.below(9)).unwrap(), 1 << random.below(7));
            let (offset, length) = (random.next() % 100 * 512, random.next() % 20 * 512);
            bytes.extend_from_slice(&client.encode(kind, flags, offset, length).0);
            if kind == command::WRITE {
                bytes.resize(bytes.len() + usize::try_from(length).unwrap(), 3);
            }
        }
        damage(random, &mut bytes);
        // The server may have hung up already.
        let _ = client.stream.write_all(&bytes);
    }
    server.until("all gone", |load| load.connections == 0 && load.requests == 0 && load.payload_bytes == 0);
    assert_eq!(Client::connect(&server, Framing::Simple).read(0, 512).error, 0);
}
