use lh_rig::hex;

use super::*;
use crate::proto::BASE_ALLOCATION_ID;

const SIZE: u64 = 1 << 30;
const GEOMETRY: Geometry =
    Geometry { size: SIZE, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };
const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

fn session(framing: Framing) -> Session {
    let allocation = framing != Framing::Simple;
    Session { agreed: Agreed { framing, allocation, block_sizes: true }, read_only: false }
}

/// A request as a client of this framing sends it.
fn bytes(framing: Framing, kind: u16, flags: u16, offset: u64, length: u64) -> Vec<u8> {
    let cookie = 0x0102_0304_0506_0708.into();
    if framing == Framing::Extended {
        let raw = ExtendedRequest {
            magic: EXTENDED_REQUEST_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie,
            offset: offset.into(),
            length: length.into(),
        };
        raw.as_bytes().to_vec()
    } else {
        let raw = Request {
            magic: REQUEST_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie,
            offset: offset.into(),
            length: u32::try_from(length).unwrap().into(),
        };
        raw.as_bytes().to_vec()
    }
}

fn call(framing: Framing, kind: u16, flags: u16, offset: u64, length: u64) -> Call {
    let payload_flag = framing == Framing::Extended && kind == command::WRITE;
    let flags = if payload_flag { flags | command_flag::PAYLOAD_LEN } else { flags };
    session(framing).decode(&bytes(framing, kind, flags, offset, length)).unwrap()
}

fn decide(framing: Framing, kind: u16, flags: u16, offset: u64, length: u64) -> Decision {
    session(framing).decide(&call(framing, kind, flags, offset, length), &GEOMETRY)
}

fn error_of(decision: Decision) -> u32 {
    match decision {
        Decision::Answer(Err(refusal)) => refusal.error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn headers_are_read_as_they_are_written() {
    for framing in FRAMINGS {
        let session = session(framing);
        let raw = bytes(framing, command::READ, command_flag::DF, 0x1234_0000, 0x2000);
        assert_eq!(raw.len(), session.request_len());
        let call = session.decode(&raw).unwrap();
        assert_eq!((call.kind, call.flags, call.offset), (command::READ, command_flag::DF, 0x1234_0000));
        assert_eq!((call.length, call.payload, call.cookie), (0x2000, 0, 0x0102_0304_0506_0708));
        assert_eq!(self::call(framing, command::WRITE, 0, 0, 4096).payload, 4096);
    }
    // With extended headers the flag says whether bytes follow, and a write has some anyhow.
    let raw = bytes(Framing::Extended, command::TRIM, command_flag::PAYLOAD_LEN, 0, 100);
    assert_eq!(session(Framing::Extended).decode(&raw).unwrap().payload, 100);
    for flags in [0, command_flag::PAYLOAD_LEN] {
        let raw = bytes(Framing::Extended, command::WRITE, flags, 0, 100);
        assert_eq!(session(Framing::Extended).decode(&raw).unwrap().payload, 100);
    }
    let raw = bytes(Framing::Extended, command::TRIM, 0, 0, 100);
    assert_eq!(session(Framing::Extended).decode(&raw).unwrap().payload, 0);
}

#[test]
fn bad_magic_ends_the_connection() {
    for framing in FRAMINGS {
        let mut raw = bytes(framing, command::READ, 0, 0, 512);
        raw[3] ^= 1;
        assert!(matches!(session(framing).decode(&raw), Err(Broken::Magic(_))));
    }
    // The other size's magic is as wrong as any.
    let extended = bytes(Framing::Extended, command::READ, 0, 0, 512);
    assert!(session(Framing::Structured).decode(&extended[..28]).is_err());
}

#[test]
fn a_payload_that_nobody_should_read_ends_the_connection() {
    let raw = bytes(Framing::Simple, command::WRITE, 0, 0, DROP_MAX + 1);
    assert_eq!(session(Framing::Simple).decode(&raw), Err(Broken::Payload(DROP_MAX + 1)));
    let raw = bytes(Framing::Extended, command::READ, command_flag::PAYLOAD_LEN, 0, u64::MAX);
    assert_eq!(session(Framing::Extended).decode(&raw), Err(Broken::Payload(u64::MAX)));
    assert!(session(Framing::Simple).decode(&bytes(Framing::Simple, command::WRITE, 0, 0, DROP_MAX)).is_ok());
}

#[test]
fn every_command_reaches_the_device() {
    let range = Extent::new(4096, 8192);
    let fua = command_flag::FUA;
    for framing in FRAMINGS {
        let decide = |kind, flags| self::decide(framing, kind, flags, 4096, 8192);
        let device = |op| Decision::Device { op, range };
        assert_eq!(decide(command::READ, 0), device(Op::Read));
        assert_eq!(decide(command::READ, fua), device(Op::Read));
        assert_eq!(decide(command::WRITE, 0), device(Op::Write { fua: false }));
        assert_eq!(decide(command::WRITE, fua), device(Op::Write { fua: true }));
        assert_eq!(decide(command::TRIM, 0), device(Op::Unmap));
        assert_eq!(
            decide(command::TRIM, fua),
            device(Op::WriteZeroes { fua: true, may_unmap: true, fast: false })
        );
        assert_eq!(
            decide(command::WRITE_ZEROES, 0),
            device(Op::WriteZeroes { fua: false, may_unmap: true, fast: false })
        );
        assert_eq!(
            decide(command::WRITE_ZEROES, fua | command_flag::NO_HOLE | command_flag::FAST_ZERO),
            device(Op::WriteZeroes { fua: true, may_unmap: false, fast: true })
        );
        assert_eq!(decide(command::CACHE, 0), Decision::Answer(Ok(())));
        assert_eq!(decide(command::DISC, 0), Decision::Disconnect);
        let flush = Decision::Device { op: Op::Flush, range: Extent::default() };
        assert_eq!(self::decide(framing, command::FLUSH, fua, 0, 0), flush);
    }
    for framing in [Framing::Structured, Framing::Extended] {
        let status = |flags| self::decide(framing, command::BLOCK_STATUS, flags, 4096, 8192);
        assert_eq!(status(0), Decision::Status(range));
        assert_eq!(status(command_flag::REQ_ONE), Decision::Status(range));
        assert!(matches!(
            self::decide(framing, command::READ, command_flag::DF, 0, 512),
            Decision::Device { .. }
        ));
    }
}

#[test]
fn zeroes_and_trims_have_no_limit_but_the_volume() {
    assert!(matches!(
        decide(Framing::Extended, command::WRITE_ZEROES, 0, 0, SIZE),
        Decision::Device { op: Op::WriteZeroes { .. }, .. }
    ));
    assert!(matches!(decide(Framing::Simple, command::TRIM, 0, 0, SIZE), Decision::Device { .. }));
}

#[test]
fn beyond_the_end() {
    for framing in FRAMINGS {
        for (kind, error) in [
            (command::READ, error::EINVAL),
            (command::WRITE, error::ENOSPC),
            (command::TRIM, error::EINVAL),
            (command::CACHE, error::EINVAL),
            (command::WRITE_ZEROES, error::ENOSPC),
        ] {
            for offset in [SIZE - 512, SIZE, SIZE + 4096, !511] {
                let decision = decide(framing, kind, 0, offset, 1024);
                assert_eq!(error_of(decision), error, "{kind} at {offset}");
            }
        }
    }
    assert_eq!(error_of(decide(Framing::Structured, command::BLOCK_STATUS, 0, SIZE, 512)), error::EINVAL);
    // The place is told if it is inside the request, as the protocol demands.
    let at = |offset| match decide(Framing::Structured, command::READ, 0, offset, 1024) {
        Decision::Answer(Err(refusal)) => refusal.at,
        other => panic!("{other:?}"),
    };
    assert_eq!(at(SIZE - 512), Some(SIZE));
    assert_eq!(at(SIZE), None);
}

#[test]
fn unaligned_requests_are_invalid() {
    for kind in [command::READ, command::WRITE, command::TRIM, command::WRITE_ZEROES, command::CACHE] {
        assert_eq!(error_of(decide(Framing::Simple, kind, 0, 1, 512)), error::EINVAL);
        assert_eq!(error_of(decide(Framing::Simple, kind, 0, 512, 511)), error::EINVAL);
        assert_eq!(error_of(decide(Framing::Simple, kind, 0, 0, 1)), error::EINVAL);
    }
    let four_k = Geometry { logical_block: 4096, ..GEOMETRY };
    let call = call(Framing::Simple, command::READ, 0, 512, 4096);
    assert_eq!(error_of(session(Framing::Simple).decide(&call, &four_k)), error::EINVAL);
}

#[test]
fn oversize_requests_are_invalid() {
    for framing in FRAMINGS {
        for kind in [command::READ, command::WRITE] {
            assert!(matches!(decide(framing, kind, 0, 0, 1 << 20), Decision::Device { .. }));
            assert_eq!(error_of(decide(framing, kind, 0, 0, (1 << 20) + 512)), error::EINVAL);
        }
    }
}

/// "Block size constraints": who was not told may assume that much.
#[test]
fn who_has_not_asked_may_be_longer_but_not_in_one_chunk() {
    for framing in FRAMINGS {
        let session = Session { agreed: Agreed { framing, ..Agreed::default() }, read_only: false };
        let decide = |kind, flags, length| session.decide(&call(framing, kind, flags, 0, length), &GEOMETRY);
        for kind in [command::READ, command::WRITE] {
            let longest = Extent::new(0, LONGEST.into());
            assert!(
                matches!(decide(kind, 0, longest.len), Decision::Device { range, .. } if range == longest)
            );
            assert_eq!(error_of(decide(kind, 0, longest.len + 512)), error::EINVAL);
        }
        if framing != Framing::Simple {
            let in_one = |length| decide(command::READ, command_flag::DF, length);
            assert!(matches!(in_one(1 << 20), Decision::Device { .. }));
            assert_eq!(error_of(in_one((1 << 20) + 512)), error::EOVERFLOW);
        }
    }
}

/// The one chunk that there is of a read is golden elsewhere.
#[test]
fn pieces_of_a_read_say_where_they_belong_and_which_is_the_last() {
    let head = |framing, offset: u64, len| {
        let call = call(framing, command::READ, 0, 4096, 2 << 20);
        let session = Session { agreed: Agreed { framing, ..Agreed::default() }, read_only: false };
        hex(session.piece(&call, Extent::new(offset, len)).as_bytes())
    };
    let (first, last) = ((4096, 1 << 20), (4096 + (1 << 20), 1 << 20));
    let simple = [first, last].map(|(offset, len)| head(Framing::Simple, offset, len));
    assert_eq!(simple, ["67446698000000000102030405060708", ""]);
    assert_eq!(
        head(Framing::Structured, first.0, first.1),
        "668e33ef000000010102030405060708001000080000000000001000"
    );
    assert_eq!(
        head(Framing::Structured, last.0, last.1),
        "668e33ef000100010102030405060708001000080000000000101000"
    );
    assert_eq!(
        head(Framing::Extended, first.0, first.1),
        "6e8a278c000000010102030405060708000000000000100000000000001000080000000000001000"
    );
}

#[test]
fn unknown_commands_and_flags_are_invalid() {
    for framing in FRAMINGS {
        for kind in [8, 9, 100, u16::MAX] {
            assert_eq!(error_of(decide(framing, kind, 0, 0, 512)), error::EINVAL);
        }
        for (kind, flags) in [
            (command::READ, command_flag::NO_HOLE),
            (command::READ, command_flag::REQ_ONE),
            (command::READ, command_flag::PAYLOAD_LEN),
            (command::WRITE, command_flag::DF),
            (command::WRITE, command_flag::FAST_ZERO),
            (command::TRIM, command_flag::NO_HOLE),
            (command::FLUSH, command_flag::DF),
            (command::CACHE, command_flag::REQ_ONE),
            (command::WRITE_ZEROES, command_flag::REQ_ONE),
            (command::BLOCK_STATUS, command_flag::DF),
            (command::WRITE, 1 << 6),
            (command::READ, 1 << 15),
        ] {
            assert_eq!(error_of(decide(framing, kind, flags, 0, 512)), error::EINVAL, "{kind} {flags:#x}");
        }
    }
    // "Don't fragment" means nothing where nothing is fragmented, and was not offered.
    assert_eq!(error_of(decide(Framing::Simple, command::READ, command_flag::DF, 0, 512)), error::EINVAL);
    assert_eq!(
        error_of(decide(Framing::Simple, command::WRITE, command_flag::PAYLOAD_LEN, 0, 512)),
        error::EINVAL
    );
}

#[test]
fn a_flush_covers_everything_or_nothing() {
    assert_eq!(error_of(decide(Framing::Simple, command::FLUSH, 0, 0, 512)), error::EINVAL);
    assert_eq!(error_of(decide(Framing::Simple, command::FLUSH, 0, 512, 0)), error::EINVAL);
}

#[test]
fn nothing_is_done_to_nothing() {
    for framing in FRAMINGS {
        for kind in [command::READ, command::WRITE, command::TRIM, command::WRITE_ZEROES, command::CACHE] {
            assert_eq!(decide(framing, kind, 0, 512, 0), Decision::Answer(Ok(())));
        }
    }
}

#[test]
fn a_read_only_export_refuses_writes() {
    for framing in FRAMINGS {
        let session = Session { read_only: true, ..session(framing) };
        for kind in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(error_of(session.decide(&call(framing, kind, 0, 0, 512), &GEOMETRY)), error::EPERM);
        }
        for (kind, length) in [(command::READ, 512), (command::FLUSH, 0)] {
            let decision = session.decide(&call(framing, kind, 0, 0, length), &GEOMETRY);
            assert!(matches!(decision, Decision::Device { .. }));
        }
    }
}

#[test]
fn block_status_needs_its_context() {
    for framing in FRAMINGS {
        let session = Session { agreed: Agreed { framing, ..Agreed::default() }, read_only: false };
        let call = call(framing, command::BLOCK_STATUS, 0, 0, 512);
        assert_eq!(error_of(session.decide(&call, &GEOMETRY)), error::EINVAL);
    }
}

#[test]
fn an_extended_write_is_taken_without_its_flag() {
    let raw = bytes(Framing::Extended, command::WRITE, 0, 0, 512);
    let session = session(Framing::Extended);
    let call = session.decode(&raw).unwrap();
    let range = Extent::new(0, 512);
    assert_eq!(session.decide(&call, &GEOMETRY), Decision::Device { op: Op::Write { fua: false }, range });
}

#[test]
fn contexts_can_be_chosen_per_request() {
    let session = session(Framing::Extended);
    let filter = |length: u64, ids: &[u32]| {
        let mut payload = length.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend_from_slice(&id.to_be_bytes()));
        let raw = bytes(
            Framing::Extended,
            command::BLOCK_STATUS,
            command_flag::PAYLOAD_LEN | command_flag::REQ_ONE,
            4096,
            payload.len() as u64,
        );
        let call = session.decode(&raw).unwrap();
        assert_eq!(session.decide(&call, &GEOMETRY), Decision::Filter);
        session.filter(&call, &payload, &GEOMETRY)
    };
    let (decision, real) = filter(8192, &[BASE_ALLOCATION_ID]);
    assert_eq!(decision, Decision::Status(Extent::new(4096, 8192)));
    assert_eq!((real.length, real.flags, real.payload), (8192, command_flag::REQ_ONE, 0));
    assert_eq!(filter(8192, &[]).0, Decision::Answer(Ok(())));
    let (decision, real) = filter(8192, &[BASE_ALLOCATION_ID, BASE_ALLOCATION_ID]);
    assert_eq!((error_of(decision), real.payload), (error::EINVAL, 0));
    assert_eq!(error_of(filter(8192, &[77]).0), error::EINVAL);
    assert_eq!(error_of(filter(SIZE, &[BASE_ALLOCATION_ID]).0), error::EINVAL);
    assert_eq!(error_of(filter(100, &[]).0), error::EINVAL);

    let flags = command_flag::PAYLOAD_LEN;
    let raw = bytes(Framing::Extended, command::BLOCK_STATUS, flags, 0, FILTER_MAX as u64 + 4);
    let call = session.decode(&raw).unwrap();
    assert_eq!(error_of(session.decide(&call, &GEOMETRY)), error::EINVAL);
    assert_eq!(error_of(session.filter(&call, &[0; 7], &GEOMETRY).0), error::EINVAL);
    assert_eq!(error_of(session.filter(&call, &[0; 10], &GEOMETRY).0), error::EINVAL);
}

#[test]
fn golden_replies() {
    let head = |framing, kind| session(framing).done(&call(framing, kind, 0, 4096, 512));
    let simple = "67446698000000000102030405060708";
    assert_eq!(hex(head(Framing::Simple, command::WRITE).as_bytes()), simple);
    assert_eq!(hex(head(Framing::Structured, command::WRITE).as_bytes()), simple);
    assert_eq!(
        hex(head(Framing::Structured, command::READ).as_bytes()),
        "668e33ef00010000010203040506070800000000"
    );
    assert_eq!(
        hex(head(Framing::Extended, command::WRITE).as_bytes()),
        "6e8a278c00010000010203040506070800000000000010000000000000000000"
    );
    let data = |framing| session(framing).data(&call(framing, command::READ, 0, 4096, 512));
    assert_eq!(hex(data(Framing::Simple).as_bytes()), simple);
    assert_eq!(
        hex(data(Framing::Structured).as_bytes()),
        "668e33ef000100010102030405060708000002080000000000001000"
    );
    assert_eq!(
        hex(data(Framing::Extended).as_bytes()),
        "6e8a278c000100010102030405060708000000000000100000000000000002080000000000001000"
    );
}

#[test]
fn golden_errors() {
    let at = Refusal { error: error::EINVAL, text: "end", at: Some(SIZE) };
    let plain = Refusal { error: error::EIO, text: "", at: None };
    let head = |framing, refusal: &Refusal| {
        let session = session(framing);
        hex(session.error(&call(framing, command::READ, 0, 4096, 512), refusal).as_bytes())
    };
    assert_eq!(head(Framing::Simple, &at), "67446698000000160102030405060708");
    assert_eq!(
        head(Framing::Structured, &at),
        "668e33ef00018002010203040506070800000011000000160003656e640000000040000000"
    );
    assert_eq!(head(Framing::Structured, &plain), "668e33ef00018001010203040506070800000006000000050000");
    assert_eq!(
        head(Framing::Extended, &plain),
        "6e8a278c0001800101020304050607080000000000001000\
         0000000000000006000000050000"
    );
    // The longest there is fits.
    let long = Refusal { error: error::EIO, text: "0123456789".repeat(8).leak(), at: Some(1) };
    assert_eq!(long.text.len(), TEXT_MAX);
    assert_eq!(head(Framing::Extended, &long).len(), 2 * (32 + 6 + TEXT_MAX + 8));
}

#[test]
fn device_errors_keep_to_the_protocols_values() {
    let of = |reason, write| Refusal::of_device(reason, write).error;
    assert_eq!(of(IoError::OutOfRange, true), error::ENOSPC);
    assert_eq!(of(IoError::OutOfRange, false), error::EINVAL);
    assert_eq!(of(IoError::Invalid, true), error::EINVAL);
    assert_eq!(of(IoError::NoSpace, true), error::ENOSPC);
    assert_eq!(of(IoError::NotSupported, true), error::ENOTSUP);
    assert_eq!(of(IoError::ReadOnly, true), error::EPERM);
    assert_eq!(of(IoError::TimedOut, false), error::EIO);
    assert_eq!(of(IoError::Io, false), error::EIO);
    assert_eq!(of(IoError::ShuttingDown, false), error::ESHUTDOWN);
}
