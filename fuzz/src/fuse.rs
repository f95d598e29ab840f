//! The kernel's FUSE requests to a server of a volume, and its INIT. Every request that expects an answer gets one, with its own
//! number, and only what the device has is answered by the device.
//!
//! Input: one byte of circumstances (bit 0: a device of few bytes), then steps: a byte of which the lowest two bits say what comes.
//!
//! | bits | step |
//! |---|---|
//! | 0, 1 | a request: two bytes of length (little-endian), and its bytes |
//! | 2 | INIT: the same |
//! | 3 | the device answers what it has had for longest; with bit 2 it fails, with bit 3 a read has another length |

use std::collections::VecDeque;

use fuse_frontend::init::answer_init;
use fuse_frontend::proto::{Opcode, REQUEST_HEAD};
use fuse_frontend::session::{Answer, Reply, Session, Step};
use lh_block::{Geometry, IoError, Op};

/// Requests that the device takes.
const DEPTH: u32 = 4;

/// Bytes of an answer's header: length, error, number.
const ANSWER_HEAD: usize = 16;

/// A request that the device has.
struct Asked {
    tag: u64,
    unique: u64,
    /// Bytes that its answer is to have behind the header; `None`: that of a write, which says how many were written.
    data: Option<usize>,
}

struct World {
    geometry: Geometry,
    session: Session,
    asked: VecDeque<Asked>,
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((circumstances, mut rest)) = input.split_first() else { return };
    let size = if circumstances & 1 == 0 { 64 << 20 } else { 4096 };
    let geometry =
        Geometry { size, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: DEPTH };
    let mut world = World { geometry, session: Session::new(DEPTH), asked: VecDeque::new() };
    while let Some((step, behind)) = rest.split_first() {
        rest = behind;
        if step & 3 == 3 {
            world.answer(step & 4 != 0, step & 8 != 0);
            continue;
        }
        let Some((len, behind)) = rest.split_first_chunk::<2>() else { return };
        let len = usize::from(u16::from_le_bytes(*len)).min(behind.len());
        let (request, behind) = behind.split_at(len);
        rest = behind;
        if step & 3 == 2 { init(request) } else { world.request(request) }
    }
}

/// What is agreed was offered, and fits into an answer.
fn init(request: &[u8]) {
    let Ok((answer, agreement)) = answer_init(request) else { return };
    let told = Told::read(&answer);
    assert_eq!((told.len, told.error), (answer.len(), 0));
    assert_eq!(Some(told.unique), number(request, 8));
    assert!(agreement.max_write > 0 && agreement.max_write <= 1 << 20);
    // Before Linux 5.17 INIT ends behind the first of these.
    let offered = |at: usize| {
        let bytes = request.get(at..).and_then(<[u8]>::first_chunk::<4>);
        bytes.map_or(0, |bytes| u64::from(u32::from_ne_bytes(*bytes)))
    };
    let (flags, more) = (offered(40 + 12), offered(40 + 16));
    assert_eq!(agreement.flags & !(flags | more << 32), 0, "nobody has offered that");
}

impl World {
    fn request(&mut self, request: &[u8]) {
        if self.session.room() == 0 {
            self.answer(false, false);
        }
        let room = self.session.room();
        let head = &request[..request.len().min(REQUEST_HEAD)];
        let step = self.session.request(&self.geometry, head, request.len());
        let (opcode, unique) = (number(request, 4).unwrap_or(0) & 0xffff_ffff, number(request, 8));
        let opcode = u32::try_from(opcode).ok().and_then(Opcode::from_u32);
        let is_whole = number(request, 0).is_some_and(|n| n & 0xffff_ffff == request.len() as u64);
        match step {
            Step::Nothing => {
                let unanswered =
                    matches!(opcode, Some(Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt));
                assert!(request.len() < 40 || unanswered, "{opcode:?} waits for ever");
            }
            Step::Answer(answer) => {
                let told = Told::read(answer.bytes());
                assert_eq!((told.len, Some(told.unique)), (answer.bytes().len(), unique));
                assert!(told.error <= 0 && told.error > -4096);
                assert!(!is_whole || opcode != Some(Opcode::Fsync), "a flush is never refused");
            }
            Step::Submit { tag, op, range } => {
                assert!(is_whole && room == self.session.room() + 1);
                let data = match op {
                    Op::Read => {
                        assert!(opcode == Some(Opcode::Read) && range.len > 0);
                        assert!(range.offset + range.len <= self.geometry.size, "beyond the end");
                        Some(usize::try_from(range.len).unwrap())
                    }
                    Op::Write { .. } => {
                        assert_eq!(opcode, Some(Opcode::Write));
                        assert_eq!(range.len, (request.len() - REQUEST_HEAD) as u64, "another's bytes");
                        None
                    }
                    Op::Flush => {
                        assert_eq!(opcode, Some(Opcode::Fsync));
                        Some(0)
                    }
                    _ => {
                        assert_eq!(opcode, Some(Opcode::Fallocate));
                        Some(0)
                    }
                };
                self.asked.push_back(Asked { tag, unique: unique.unwrap(), data });
            }
        }
    }

    fn answer(&mut self, fails: bool, is_longer: bool) {
        let Some(asked) = self.asked.pop_front() else { return };
        let data = asked.data.unwrap_or(0) + usize::from(is_longer);
        let result = if fails { Err(IoError::Io) } else { Ok(()) };
        let (answer, follows): (Answer, usize) = match self.session.done(asked.tag, result, data) {
            Reply::Plain(answer) => (answer, 0),
            Reply::WithData(answer) => {
                assert!(!fails && !is_longer);
                (answer, data)
            }
            Reply::Withheld => panic!("nobody is stopping"),
        };
        let told = Told::read(answer.bytes());
        assert_eq!((told.len, told.unique), (answer.bytes().len() + follows, asked.unique));
        let body = told.len - ANSWER_HEAD;
        match (told.error, asked.data) {
            (0, Some(expected)) => assert_eq!(body, expected),
            (0, None) => assert_eq!(body, 8),
            (error, _) => assert!(error < 0 && body == 0 && (fails || is_longer)),
        }
    }
}

/// The header of an answer.
struct Told {
    len: usize,
    error: i32,
    unique: u64,
}

impl Told {
    fn read(answer: &[u8]) -> Self {
        let first = number(answer, 0).expect("an answer has a header");
        Self {
            len: (first & 0xffff_ffff) as usize,
            error: (first >> 32) as i32,
            unique: number(answer, 8).expect("an answer has a header"),
        }
    }
}

/// Eight bytes from there on, if there are so many.
fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}
