//! Requests as the kernel's own bytes, answers compared byte for byte.

use super::*;
use crate::proto::UNIQUE_RESEND;

const GEOMETRY: Geometry =
    Geometry { size: 1 << 30, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 4 };

/// A request for the root node, with the number 0x0102 unless told otherwise.
fn request(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(40 + body.len()).unwrap().to_ne_bytes().to_vec();
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend(unique.to_ne_bytes());
    bytes.extend(1_u64.to_ne_bytes());
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

fn read_in(offset: u64, size: u32) -> Vec<u8> {
    [&0_u64.to_ne_bytes()[..], &offset.to_ne_bytes(), &size.to_ne_bytes(), &[0; 20]].concat()
}

fn fallocate_in(offset: u64, length: u64, mode: u32) -> Vec<u8> {
    [&0_u64.to_ne_bytes()[..], &offset.to_ne_bytes(), &length.to_ne_bytes(), &mode.to_ne_bytes(), &[0; 4]]
        .concat()
}

fn answer(error: i32, unique: u64, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(16 + body.len()).unwrap();
    [&len.to_ne_bytes()[..], &error.to_ne_bytes(), &unique.to_ne_bytes(), body].concat()
}

fn take(session: &mut Session, bytes: &[u8]) -> Step {
    session.request(&GEOMETRY, &bytes[..bytes.len().min(80)], bytes.len())
}

/// The answer to a request that the device never sees.
fn at_once(opcode: u32, body: &[u8]) -> Vec<u8> {
    match take(&mut Session::new(1), &request(opcode, 0x0102, body)) {
        Step::Answer(answer) => answer.bytes().to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_read_is_answered_with_its_length_and_data() {
    let mut session = Session::new(4);
    let Step::Submit { tag, op, range } = take(&mut session, &request(15, 6, &read_in(4096, 8192))) else {
        panic!()
    };
    assert_eq!((op, range), (Op::Read, Extent::new(4096, 8192)));
    let Reply::WithData(head) = session.done(tag, Ok(()), 8192) else { panic!() };
    let mut golden = answer(0, 6, &[]);
    golden[..4].copy_from_slice(&(16 + 8192_u32).to_ne_bytes());
    assert_eq!(head.bytes(), golden);
}

/// A length that is not what the header says is no answer to the kernel.
#[test]
fn a_read_whose_device_gives_other_bytes_has_failed() {
    let mut session = Session::new(1);
    for given in [0, 4095, 4097, usize::MAX] {
        let Step::Submit { tag, .. } = take(&mut session, &request(15, 6, &read_in(0, 4096))) else {
            panic!()
        };
        let Reply::Plain(head) = session.done(tag, Ok(()), given) else { panic!("{given} of 4096 bytes") };
        assert_eq!(head.bytes(), answer(-5, 6, &[]));
    }
}

#[test]
fn a_read_over_the_end_is_short_and_behind_it_empty() {
    let mut session = Session::new(4);
    let Step::Submit { range, .. } = take(&mut session, &request(15, 6, &read_in((1 << 30) - 512, 4096)))
    else {
        panic!()
    };
    assert_eq!(range, Extent::new((1 << 30) - 512, 512));
    assert_eq!(at_once(15, &read_in(1 << 30, 4096)), answer(0, 0x0102, &[]));
    assert_eq!(at_once(15, &read_in(u64::MAX, 4096)), answer(0, 0x0102, &[]));
}

#[test]
fn a_write_is_answered_with_what_was_written() {
    let mut session = Session::new(4);
    let body = [read_in(512, 1024), vec![7; 1024]].concat();
    let Step::Submit { tag, op, range } = take(&mut session, &request(16, 8, &body)) else { panic!() };
    assert_eq!((op, range), (Op::Write { fua: false }, Extent::new(512, 1024)));
    let reply = session.done(tag, Ok(()), 0);
    let Reply::Plain(head) = reply else { panic!() };
    assert_eq!(head.bytes(), answer(0, 8, &[0, 4, 0, 0, 0, 0, 0, 0]));
}

#[test]
fn a_write_whose_data_is_cut_off_never_reaches_the_device() {
    assert_eq!(at_once(16, &[read_in(512, 1024), vec![7; 1023]].concat()), answer(-5, 0x0102, &[]));
    assert_eq!(at_once(16, &[0; 12]), answer(-5, 0x0102, &[]));
    assert_eq!(at_once(16, &read_in(512, 0)), answer(0, 0x0102, &[0; 8]));
    // The length in the header and the length that was read differ.
    let mut bytes = request(16, 8, &[read_in(512, 4), vec![7; 4]].concat());
    bytes.push(0);
    assert_eq!(take(&mut Session::new(1), &bytes), Step::Answer(Answer::error(8, 5)));
    for mut bytes in [request(15, 8, &read_in(512, 512)), request(20, 8, &[0; 16])] {
        bytes.push(0);
        assert_eq!(take(&mut Session::new(1), &bytes), Step::Answer(Answer::error(8, 5)));
    }
}

#[test]
fn a_resent_request_is_answered_with_its_whole_number() {
    let mut session = Session::new(4);
    let unique = UNIQUE_RESEND | 10;
    let Step::Submit { tag, .. } = take(&mut session, &request(20, unique, &[0; 16])) else { panic!() };
    let Reply::Plain(head) = session.done(tag, Ok(()), 0) else { panic!() };
    assert_eq!(head.bytes(), answer(0, unique, &[]));
}

#[test]
fn every_fsync_is_a_flush() {
    let mut session = Session::new(1);
    for unique in [2, 4, 6] {
        let Step::Submit { tag, op, range } = take(&mut session, &request(20, unique, &[0; 16])) else {
            panic!()
        };
        assert_eq!(op, Op::Flush);
        assert!(range.is_empty());
        session.done(tag, Ok(()), 0);
    }
}

#[test]
fn holes_and_zeroes() {
    let mut session = Session::new(4);
    let mut op_of = |mode| match take(&mut session, &request(43, 2, &fallocate_in(0, 1 << 30, mode))) {
        Step::Submit { op, range, tag } => {
            assert_eq!(range, Extent::new(0, 1 << 30));
            session.done(tag, Ok(()), 0);
            Ok(op)
        }
        Step::Answer(answer) => Err(answer.bytes().to_vec()),
        Step::Nothing => panic!(),
    };
    assert_eq!(op_of(3), Ok(Op::Unmap));
    assert_eq!(op_of(0x11), Ok(Op::WriteZeroes { fua: false, may_unmap: false, fast: false }));
    for mode in [0, 1, 8, 0x10, 0x20, 0x40] {
        assert_eq!(op_of(mode), Err(answer(-95, 2, &[])), "{mode:#x}");
    }
}

#[test]
fn the_file_is_as_large_as_the_volume_and_nobody_needs_to_ask_again() {
    let attr = at_once(3, &[0; 16]);
    let mut golden = 31_536_000_u64.to_ne_bytes().to_vec(); // attr_valid: a year
    golden.extend([0; 8]);
    golden.extend(1_u64.to_ne_bytes());
    golden.extend((1_u64 << 30).to_ne_bytes());
    golden.extend((1_u64 << 21).to_ne_bytes());
    golden.extend([0; 36]);
    golden.extend(0o100_600_u32.to_ne_bytes());
    golden.extend(1_u32.to_ne_bytes());
    golden.extend([0; 12]);
    golden.extend(4096_u32.to_ne_bytes());
    golden.extend([0; 4]);
    assert_eq!(attr, answer(0, 0x0102, &golden));
}

#[test]
fn open_asks_for_direct_and_parallel_io() {
    assert_eq!(at_once(14, &[0; 8]), answer(0, 0x0102, &[0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0]));
}

#[test]
fn statfs_names_the_discard_granularity() {
    let bytes = at_once(17, &[]);
    assert_eq!(bytes.len(), 96);
    assert_eq!(bytes[16..24], (1_u64 << 18).to_ne_bytes());
    assert_eq!(bytes[56..60], 4096_u32.to_ne_bytes());
}

#[test]
fn everything_else() {
    let ok = answer(0, 0x0102, &[]);
    for opcode in [25, 18, 38] {
        assert_eq!(at_once(opcode, &[0; 24]), ok, "{opcode}");
    }
    assert_eq!(at_once(22, b"\0\0\0\0\0\0\0\0security.capability\0"), answer(-38, 0x0102, &[]));
    for unknown in [4, 21, 39, 46, 52, 4096, u32::MAX] {
        assert_eq!(at_once(unknown, &[0; 24]), answer(-38, 0x0102, &[]), "{unknown}");
    }
    assert_eq!(at_once(1, b"name\0"), answer(-2, 0x0102, &[]));
    assert_eq!(at_once(26, &[0; 64]), answer(-5, 0x0102, &[]));
    for silent in [2, 36, 42] {
        assert_eq!(take(&mut Session::new(1), &request(silent, 2, &[0; 8])), Step::Nothing, "{silent}");
    }
    assert_eq!(take(&mut Session::new(1), &[1, 2, 3]), Step::Nothing);
}

#[test]
fn errors_carry_the_devices_errno_and_a_stopping_engine_says_nothing() {
    let mut session = Session::new(1);
    let mut reply_to = |error| {
        let Step::Submit { tag, .. } = take(&mut session, &request(15, 6, &read_in(0, 512))) else {
            panic!()
        };
        session.done(tag, Err(error), 0)
    };
    let Reply::Plain(head) = reply_to(IoError::NoSpace) else { panic!() };
    assert_eq!(head.bytes(), answer(-28, 6, &[]));
    let Reply::Plain(head) = reply_to(IoError::Io) else { panic!() };
    assert_eq!(head.bytes(), answer(-5, 6, &[]));
    assert_eq!(reply_to(IoError::ShuttingDown), Reply::Withheld);
}

#[test]
fn places_come_back_and_are_never_shared() {
    let mut session = Session::new(3);
    let submit = |session: &mut Session, unique| match take(session, &request(15, unique, &read_in(0, 512))) {
        Step::Submit { tag, .. } => tag,
        other => panic!("{other:?}"),
    };
    let tags = [2, 4, 6].map(|unique| submit(&mut session, unique));
    assert_eq!(session.room(), 0);
    session.done(tags[1], Ok(()), 0);
    assert_eq!(session.room(), 1);
    let again = submit(&mut session, 8);
    assert_eq!(again, tags[1]);
    let Reply::WithData(head) = session.done(again, Ok(()), 512) else { panic!() };
    assert_eq!(head.bytes()[8..16], 8_u64.to_ne_bytes());
}

#[test]
#[should_panic(expected = "not at the device")]
fn an_answer_to_nobody_is_a_bug() {
    let mut session = Session::new(2);
    session.done(1, Ok(()), 0);
}

/// Any bytes at all: an answer, a submission or silence, never a panic; and a submitted write owns all its bytes.
#[test]
fn no_request_breaks_the_session() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut session = Session::new(1);
    for _ in 0..200_000 {
        let len = usize::try_from(next() % 120).unwrap();
        let mut bytes: Vec<u8> = (0..len).map(|_| next().to_ne_bytes()[0]).collect();
        if len >= 8 && next() % 4 != 0 {
            bytes[..4].copy_from_slice(&u32::try_from(len).unwrap().to_ne_bytes());
            bytes[4..8].copy_from_slice(&u32::try_from(next() % 54).unwrap().to_ne_bytes());
        }
        if len >= 60 && next() % 2 == 0 {
            bytes[56..60].copy_from_slice(&u32::try_from(next() % 100).unwrap().to_ne_bytes());
        }
        if let Step::Submit { tag, op, range } = take(&mut session, &bytes) {
            if matches!(op, Op::Write { .. }) {
                assert_eq!(range.len + 80, len as u64);
            }
            session.done(tag, Ok(()), 0);
        }
    }
}
