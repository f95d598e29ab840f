use super::*;

const SLOT: Slot = Slot(3);

fn geometry() -> Geometry {
    Geometry { size: 1 << 20, logical_block: 512, physical_block: 4096, max_transfer: 256 << 10, depth: 8 }
}

fn descriptor(op_flags: u32, start_sector: u64, nr_sectors: u32) -> Descriptor {
    Descriptor { op_flags, nr_sectors, start_sector, addr: 0 }
}

fn fetched(op_flags: u32, start: u64, sectors: u32) -> (Session, Step) {
    let mut session = Session::new(8);
    let step = session.fetched(SLOT, &descriptor(op_flags, start, sectors), &geometry());
    (session, step)
}

#[test]
fn a_write_is_copied_in_done_and_answered_with_its_length() {
    let (mut session, step) = fetched(request_op::WRITE | request_flag::FUA, 8, 8);
    assert_eq!(step, Step::Wait);
    assert_eq!(session.admit(SLOT), Step::CopyIn(4096));
    let work = Work { op: Op::Write { fua: true }, range: Extent::new(4096, 4096) };
    assert_eq!(session.copied_in(SLOT, Ok(4096)), Step::Submit(work));
    assert_eq!(session.done(SLOT, Ok(()), 0), Step::Commit(4096));
    // The tag is free again.
    assert_eq!(session.fetched(SLOT, &descriptor(request_op::FLUSH, 0, 0), &geometry()), Step::Wait);
}

#[test]
fn a_read_is_answered_only_after_its_bytes() {
    let (mut session, _) = fetched(request_op::READ, 0, 1);
    let work = Work { op: Op::Read, range: Extent::new(0, 512) };
    assert_eq!(session.admit(SLOT), Step::Submit(work));
    assert_eq!(session.done(SLOT, Ok(()), 512), Step::CopyOut(512));
    assert_eq!(session.copied_out(SLOT, Ok(512)), Step::Commit(512));
}

#[test]
fn bytes_that_did_not_all_move_are_an_error() {
    let (mut session, _) = fetched(request_op::WRITE, 0, 8);
    session.admit(SLOT);
    assert_eq!(session.copied_in(SLOT, Ok(512)), Step::Commit(-errno::EIO));
    let (mut session, _) = fetched(request_op::WRITE, 0, 8);
    session.admit(SLOT);
    assert_eq!(session.copied_in(SLOT, Err(14)), Step::Commit(-14));

    let (mut session, _) = fetched(request_op::READ, 0, 8);
    session.admit(SLOT);
    session.done(SLOT, Ok(()), 4096);
    assert_eq!(session.copied_out(SLOT, Ok(0)), Step::Commit(-errno::EIO));
    let (mut session, _) = fetched(request_op::READ, 0, 8);
    session.admit(SLOT);
    assert_eq!(session.done(SLOT, Ok(()), 512), Step::Commit(-errno::EIO), "the device was short");
}

#[test]
fn zeroes_discards_and_flushes_move_no_bytes() {
    let zeroes = |fua, may_unmap| Op::WriteZeroes { fua, may_unmap, fast: false };
    for (op_flags, op) in [
        (request_op::WRITE_ZEROES, zeroes(false, true)),
        (request_op::WRITE_ZEROES | request_flag::NOUNMAP, zeroes(false, false)),
        (request_op::WRITE_ZEROES | request_flag::FUA, zeroes(true, true)),
        (request_op::DISCARD, Op::Unmap),
    ] {
        let (mut session, _) = fetched(op_flags, 0, 2048);
        assert_eq!(session.admit(SLOT), Step::Submit(Work { op, range: Extent::new(0, 1 << 20) }));
        assert_eq!(session.done(SLOT, Ok(()), 0), Step::Commit(0));
    }
    let (mut session, _) = fetched(request_op::FLUSH, 7, 0);
    assert_eq!(session.admit(SLOT), Step::Submit(Work { op: Op::Flush, range: Extent::default() }));
    assert_eq!(session.done(SLOT, Ok(()), 0), Step::Commit(0));
}

#[test]
fn errors_become_errnos_and_the_end_of_the_engine_none() {
    for (error, errno) in [(IoError::Io, 5), (IoError::NoSpace, 28), (IoError::TimedOut, 110)] {
        let (mut session, _) = fetched(request_op::READ, 0, 8);
        session.admit(SLOT);
        assert_eq!(session.done(SLOT, Err(error), 0), Step::Commit(-errno));
    }
    let (mut session, _) = fetched(request_op::READ, 0, 8);
    session.admit(SLOT);
    assert_eq!(session.done(SLOT, Err(IoError::ShuttingDown), 0), Step::Nothing);
}

#[test]
fn what_the_device_cannot_have_asked_for_is_refused() {
    for (op_flags, start, sectors, errno) in [
        (request_op::READ, 2047, 2, 22),
        (request_op::WRITE, u64::MAX, 8, 22),
        (request_op::DISCARD, u64::MAX / 512, u32::MAX, 22),
        (request_op::READ, 0, 0, 22),
        (request_op::READ, 0, 1024, 22),
        (4, 0, 8, errno::EOPNOTSUPP),
        (13, 0, 8, errno::EOPNOTSUPP),
    ] {
        assert_eq!(fetched(op_flags, start, sectors).1, Step::Commit(-errno), "{op_flags} {start} {sectors}");
    }
}

#[test]
fn the_end_is_when_every_tag_has_ended() {
    let mut session = Session::new(2);
    session.gone(Slot(0));
    session.gone(Slot(0));
    assert!(!session.is_gone());
    session.gone(Slot(1));
    assert!(session.is_gone());
}
