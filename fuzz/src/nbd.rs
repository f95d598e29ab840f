//! A client of the NBD server: its whole stream, through the handshake and then the transmission phase.
//!
//! Input: one byte of circumstances, then the client's bytes.
//!
//! | bits | meaning |
//! |---|---|
//! | 0 | the export is read-only |
//! | 1, 2 | a session may begin; 2: there are too many; 3: the server is being stopped |
//! | 3 | logical blocks of 4096 bytes |
//! | 4 | the bytes come one by one during the handshake |

use lh_block::{Extent, Geometry, IoError, Op, Runs};
use nbd_frontend::negotiate::{Admission, Negotiation, OPTION_DATA_MAX, Offer, Progress};
use nbd_frontend::proto::{command, command_flag};
use nbd_frontend::transmit::{Call, DROP_MAX, Decision, FILTER_MAX, Refusal, Session};
use nbd_frontend::{Agreed, Export, Framing};

const SIZE: u64 = 64 << 20;

/// Longest answer to one option, and longest status reply: what `docs/formats/nbd.md` promises.
const ANSWER_MAX: usize = 8192;

struct World {
    export: Export,
    geometry: Geometry,
    admission: Admission,
    one_by_one: bool,
}

impl World {
    fn new(circumstances: u8) -> Self {
        let logical_block = if circumstances & 8 != 0 { 4096 } else { 512 };
        Self {
            export: Export {
                name: "demo".into(),
                description: "a disk".into(),
                read_only: circumstances & 1 != 0,
            },
            geometry: Geometry {
                size: SIZE,
                logical_block,
                physical_block: 4096,
                max_transfer: 1 << 20,
                depth: 128,
            },
            admission: match circumstances >> 1 & 3 {
                2 => Admission::Full,
                3 => Admission::Stopping,
                _ => Admission::Open,
            },
            one_by_one: circumstances & 16 != 0,
        }
    }

    /// The outcome of the handshake and what follows it.
    fn negotiate<'a>(&self, mut rest: &'a [u8]) -> Option<(Agreed, &'a [u8])> {
        let offer = Offer { export: &self.export, geometry: self.geometry, admission: self.admission };
        let mut out = Vec::new();
        let mut machine = Negotiation::new(&mut out);
        while !rest.is_empty() {
            let want = machine.want();
            assert!(want > 0 && want <= OPTION_DATA_MAX, "wants {want} bytes");
            let now = if self.one_by_one { 1 } else { want.min(rest.len()) };
            let (bytes, later) = rest.split_at(now);
            rest = later;
            out.clear();
            let progress = machine.input(bytes, &offer, &mut out);
            assert!(out.len() < ANSWER_MAX, "{} bytes of answer", out.len());
            match progress {
                Progress::More => {}
                Progress::Close(_) => return None,
                Progress::Ready(agreed) => {
                    assert_eq!(self.admission, Admission::Open, "a session began");
                    assert!(!agreed.allocation || agreed.framing != Framing::Simple);
                    return Some((agreed, rest));
                }
            }
        }
        None
    }

    fn transmit(&self, agreed: Agreed, mut rest: &[u8]) {
        let session = Session { agreed, read_only: self.export.read_only };
        while rest.len() >= session.request_len() {
            let (header, later) = rest.split_at(session.request_len());
            let Ok(call) = session.decode(header) else { return };
            assert!(call.payload <= DROP_MAX);
            let payload = usize::try_from(call.payload).unwrap();
            let Some((payload, later)) = later.split_at_checked(payload) else {
                // The client went in the middle of a payload; what was decided before still has to hold.
                self.check(&session, &call, session.decide(&call, &self.geometry));
                return;
            };
            rest = later;
            match session.decide(&call, &self.geometry) {
                Decision::Disconnect => return,
                Decision::Filter => {
                    assert!(call.payload <= FILTER_MAX as u64 && agreed.allocation);
                    let (decision, real) = session.filter(&call, payload, &self.geometry);
                    assert_eq!((real.payload, real.cookie, real.offset), (0, call.cookie, call.offset));
                    assert!(!matches!(decision, Decision::Filter | Decision::Device { .. }));
                    self.check(&session, &real, decision);
                }
                decision => self.check(&session, &call, decision),
            }
        }
    }

    /// Whatever is done is inside the volume and allowed, and the reply fits its request.
    fn check(&self, session: &Session, call: &Call, decision: Decision) {
        match decision {
            Decision::Device { op: Op::Flush, range } => {
                assert!(range.is_empty());
                reply(session, call, session.done(call).as_bytes(), 0);
            }
            Decision::Device { op, range } => self.check_device(session, call, op, range),
            Decision::Status(range) => {
                self.check_range(range);
                assert!(session.agreed.allocation);
                let mut out = Vec::new();
                session.status(call, range, &stripes(range), &mut out);
                assert!(out.len() < ANSWER_MAX);
                reply(session, call, &out, 0);
            }
            Decision::Filter => assert!(call.payload <= FILTER_MAX as u64),
            Decision::Answer(Ok(())) => reply(session, call, session.done(call).as_bytes(), 0),
            Decision::Answer(Err(refusal)) => check_refusal(session, call, &refusal),
            Decision::Disconnect => assert_eq!(call.kind, command::DISC),
        }
    }

    fn check_range(&self, range: Extent) {
        assert!(!range.is_empty());
        assert!(range.offset.checked_add(range.len).is_some_and(|end| end <= SIZE), "{range}");
        assert!(range.is_aligned(u64::from(self.geometry.logical_block)), "{range}");
    }

    fn check_device(&self, session: &Session, call: &Call, op: Op, range: Extent) {
        self.check_range(range);
        assert!(!(session.read_only && op.is_write()), "{op:?} on a read-only export");
        let data = matches!(op, Op::Read | Op::Write { .. });
        assert!(!data || range.len <= session.longest(&self.geometry));
        assert_eq!(call.payload, if matches!(op, Op::Write { .. }) { range.len } else { 0 });
        let fua = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
        assert!(!op.is_write() || fua == (call.flags & command_flag::FUA != 0), "FUA was lost: {op:?}");
        let head = if op == Op::Read { session.data(call) } else { session.done(call) };
        reply(session, call, head.as_bytes(), if op == Op::Read { range.len } else { 0 });
        for reason in [IoError::Io, IoError::NoSpace, IoError::OutOfRange, IoError::ShuttingDown] {
            check_refusal(session, call, &Refusal::of_device(reason, op.is_write()));
        }
    }
}

fn check_refusal(session: &Session, call: &Call, refusal: &Refusal) {
    assert_ne!(refusal.error, 0);
    let inside = |at| at >= call.offset && at - call.offset < call.length;
    assert!(refusal.at.is_none_or(inside), "an error outside of its request");
    reply(session, call, session.error(call, refusal).as_bytes(), 0);
}

/// What a device tells of a range: blocks that are by turns data and hole, or nothing, or what no device tells.
fn stripes(range: Extent) -> Vec<u8> {
    let mut runs = Runs::default();
    let first = range.offset / 4096;
    (first..range.end().div_ceil(4096)).take_while(|n| runs.push(1, n % 2 == 0)).count();
    match first % 4 {
        0 => Vec::new(),
        1 => runs.as_bytes()[1..].to_vec(),
        _ => runs.as_bytes().to_vec(),
    }
}

/// The bytes are one reply to this call, and `data` bytes that follow belong to it.
fn reply(session: &Session, call: &Call, bytes: &[u8], data: u64) {
    let at = |from: usize, len: usize| {
        bytes[from..from + len].iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let (cookie, body) = match at(0, 4) {
        0x6744_6698 => {
            assert!(session.agreed.framing != Framing::Extended && bytes.len() == 16);
            (at(8, 8), None)
        }
        0x668e_33ef => {
            assert_eq!(session.agreed.framing, Framing::Structured);
            (at(8, 8), Some((at(16, 4), bytes.len() - 20)))
        }
        0x6e8a_278c => {
            assert_eq!(session.agreed.framing, Framing::Extended);
            assert_eq!(at(16, 8), call.offset);
            (at(8, 8), Some((at(24, 8), bytes.len() - 32)))
        }
        other => panic!("{other:#x} begins no reply"),
    };
    assert_eq!(cookie, call.cookie);
    if let Some((told, sent)) = body {
        assert_eq!(told, sent as u64 + data, "the chunk's length");
        assert_eq!(at(4, 2), 1, "the last chunk of its reply");
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((circumstances, stream)) = input.split_first() else { return };
    let world = World::new(*circumstances);
    if let Some((agreed, rest)) = world.negotiate(stream) {
        world.transmit(agreed, rest);
    }
}
