use super::*;
use crate::login::Agreed;
use crate::pdu::{HEADER, IMMEDIATE};

fn session(kind: Kind) -> Session {
    let established = Established {
        initiator: "iqn.a".into(),
        isid: [0; 6],
        tsih: 0,
        cid: 3,
        kind,
        agreed: Agreed::new(),
        cmd_sn: u32::MAX - 1,
        stat_sn: 7,
    };
    Session::new(&established, 4)
}

fn raw(opcode: u8, cmd_sn: u32) -> Raw {
    let mut raw = [0; HEADER];
    (raw[0], raw[1]) = (opcode, 0x80);
    raw[24..28].copy_from_slice(&cmd_sn.to_be_bytes());
    raw
}

const FIRST: u32 = u32::MAX - 1;

fn taken(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Take(_))
}

/// What each operation comes to in each phase and kind of session.
#[test]
fn legal_operations() {
    // Normal and open; discovery; logged out.
    let table = [
        (opcode::NOP_OUT, ["take", "take", "ignore"]),
        // All but text and logouts is rejected where there is nothing but discovery (RFC 7143, 4.3); pings are let be.
        (opcode::SCSI_COMMAND, ["take", "reject", "ignore"]),
        (opcode::TASK_REQUEST, ["take", "reject", "ignore"]),
        (opcode::LOGIN_REQUEST, ["close"; 3]),
        (opcode::TEXT_REQUEST, ["take", "take", "ignore"]),
        (opcode::DATA_OUT, ["take", "reject", "ignore"]),
        (opcode::LOGOUT_REQUEST, ["take", "take", "ignore"]),
        (opcode::SNACK, ["reject", "reject", "ignore"]),
        // Unknown, and the target's own.
        (0x1c, ["reject", "reject", "ignore"]),
        (opcode::NOP_IN, ["close"; 3]),
        (opcode::REJECT, ["close"; 3]),
    ];
    let word = |verdict| match verdict {
        Verdict::Take(_) => "take",
        Verdict::Ignore => "ignore",
        Verdict::Reject(_) => "reject",
        Verdict::Close(_) => "close",
    };
    for (code, expected) in table {
        let mut logged_out = session(Kind::Normal);
        assert!(taken(&logged_out.apply(&raw(opcode::LOGOUT_REQUEST, FIRST))));
        assert_eq!(logged_out.phase(), Phase::LoggedOut);
        let found = [
            word(session(Kind::Normal).apply(&raw(code, FIRST))),
            word(session(Kind::Discovery).apply(&raw(code, FIRST))),
            word(logged_out.apply(&raw(code, FIRST + 1))),
        ];
        assert_eq!(found, expected, "{code:#x}");
    }
}

#[test]
fn commands_are_counted_over_the_end_of_the_numbers() {
    let mut session = session(Kind::Normal);
    for i in 0..4 {
        let sn = FIRST.wrapping_add(i);
        assert!(taken(&session.apply(&raw(opcode::SCSI_COMMAND, sn))), "{i}");
    }
    // The window is full.
    assert_eq!(session.apply(&raw(opcode::SCSI_COMMAND, 2)), Verdict::Ignore);
    assert_eq!(session.numbers(), Numbers { exp_cmd_sn: 2, max_cmd_sn: 1 });
    session.answered(false);
    assert_eq!(session.numbers().max_cmd_sn, 2);
    assert!(taken(&session.apply(&raw(opcode::SCSI_COMMAND, 2))));
}

#[test]
fn outside_of_the_window_nothing_happens_and_a_gap_ends_it() {
    let mut session = session(Kind::Normal);
    for sn in [FIRST - 1, FIRST.wrapping_add(4), FIRST.wrapping_add(1000)] {
        assert_eq!(session.apply(&raw(opcode::SCSI_COMMAND, sn)), Verdict::Ignore);
    }
    assert_eq!(session.numbers().exp_cmd_sn, FIRST);
    let gap = Broken::Gap { expected: FIRST, found: FIRST + 1 };
    assert_eq!(session.apply(&raw(opcode::SCSI_COMMAND, FIRST + 1)), Verdict::Close(gap));
}

#[test]
fn immediate_requests_are_not_counted_but_bounded() {
    let mut session = session(Kind::Normal);
    for _ in 0..IMMEDIATE_MAX {
        assert!(taken(&session.apply(&raw(opcode::NOP_OUT | IMMEDIATE, 5))));
    }
    let more = session.apply(&raw(opcode::SCSI_COMMAND | IMMEDIATE, 5));
    assert_eq!(more, Verdict::Reject(reject::TOO_MANY_IMMEDIATE));
    assert_eq!(session.numbers().exp_cmd_sn, FIRST);
    // The answer to a ping is always taken.
    let mut pong = raw(opcode::NOP_OUT | IMMEDIATE, 5);
    pong[16..20].copy_from_slice(&NO_TAG.to_be_bytes());
    assert!(taken(&session.apply(&pong)));
    session.answered(true);
    assert!(taken(&session.apply(&raw(opcode::NOP_OUT | IMMEDIATE, 5))));
}

/// RFC 7143, 4.2.2.1: whatever else waits, a task management function is taken, and the other way round.
#[test]
fn immediate_task_management_has_its_own_room() {
    let mut session = session(Kind::Normal);
    for (code, other) in
        [(opcode::SCSI_COMMAND, opcode::TASK_REQUEST), (opcode::TASK_REQUEST, opcode::LOGOUT_REQUEST)]
    {
        for _ in 0..IMMEDIATE_MAX {
            assert!(taken(&session.apply(&raw(code | IMMEDIATE, FIRST))));
        }
        let more = session.apply(&raw(code | IMMEDIATE, FIRST));
        assert_eq!(more, Verdict::Reject(reject::TOO_MANY_IMMEDIATE));
        let mut request = raw(other | IMMEDIATE, FIRST);
        // For recovery: the session goes on.
        request[1] = 0x82;
        assert!(taken(&session.apply(&request)), "{other:#x} beside {code:#x}");
        while session.immediate > 0 {
            session.answered(true);
        }
        while session.functions > 0 {
            session.function_answered(true);
        }
    }
}

/// What is rejected has had its number, and its room is free again.
#[test]
fn a_discovery_goes_on_behind_what_is_rejected() {
    let mut session = session(Kind::Discovery);
    for i in 0..20 {
        let code = [opcode::SCSI_COMMAND, opcode::TASK_REQUEST][i as usize % 2];
        let not_supported = Verdict::Reject(reject::NOT_SUPPORTED);
        assert_eq!(session.apply(&raw(code, FIRST.wrapping_add(i))), not_supported);
        assert_eq!(session.apply(&raw(code | IMMEDIATE, 0)), not_supported);
    }
    let numbers = session.numbers();
    assert_eq!(numbers.max_cmd_sn.wrapping_sub(numbers.exp_cmd_sn), 3);
    assert!(taken(&session.apply(&raw(opcode::TEXT_REQUEST, FIRST.wrapping_add(20)))));
}

/// RFC 7143, 11.14 and 11.15.1: reasons, connections, and what a logout comes to.
#[test]
fn a_logout_is_of_the_session_or_of_its_connection() {
    for (reason, cid, refusal) in
        [(0, 3, None), (0, 4, None), (1, 3, None), (1, 4, Some(1)), (2, 3, Some(2)), (2, 4, Some(2))]
    {
        let mut session = session(Kind::Normal);
        let mut raw = raw(opcode::LOGOUT_REQUEST, FIRST);
        (raw[1], raw[21]) = (0x80 | reason, cid);
        let Verdict::Take(Request::Logout(logout)) = session.apply(&raw) else { panic!("not taken") };
        assert_eq!(session.refusal(&logout), refusal, "{reason} {cid}");
        let phase = if refusal.is_none() { Phase::LoggedOut } else { Phase::Open };
        assert_eq!(session.phase(), phase, "{reason} {cid}");
    }
    // There are no others.
    for reason in [3, 0x7f] {
        let mut session = session(Kind::Normal);
        let mut raw = raw(opcode::LOGOUT_REQUEST, FIRST);
        raw[1] = 0x80 | reason;
        assert_eq!(session.apply(&raw), Verdict::Reject(reject::INVALID_FIELD));
        assert_eq!((session.phase(), session.numbers().exp_cmd_sn), (Phase::Open, FIRST.wrapping_add(1)));
    }
}

#[test]
fn what_is_too_long_or_has_extensions_where_none_belong() {
    let mut long = raw(opcode::SCSI_COMMAND, FIRST);
    long[5..8].copy_from_slice(&[4, 0, 1]);
    assert_eq!(session(Kind::Normal).apply(&long), Verdict::Close(Broken::TooLong(0x04_0001)));
    let mut extended = raw(opcode::NOP_OUT, FIRST);
    extended[4] = 1;
    let misplaced = Verdict::Close(Broken::Misplaced(opcode::NOP_OUT));
    assert_eq!(session(Kind::Normal).apply(&extended), misplaced);
    extended[0] = opcode::SCSI_COMMAND;
    assert!(taken(&session(Kind::Normal).apply(&extended)));
}

#[test]
fn a_logout_is_asked_for_once() {
    let mut session = session(Kind::Normal);
    assert!(session.ask_for_logout() && !session.ask_for_logout());
    assert_eq!(session.phase(), Phase::LogoutAsked);
    assert!(taken(&session.apply(&raw(opcode::SCSI_COMMAND, FIRST))));
    let mut recovery = raw(opcode::LOGOUT_REQUEST, FIRST.wrapping_add(1));
    recovery[1] = 0x82;
    assert!(taken(&session.apply(&recovery)));
    assert_eq!(session.phase(), Phase::LogoutAsked);
    assert!(taken(&session.apply(&raw(opcode::LOGOUT_REQUEST, 0))));
    assert!(!session.ask_for_logout());
    assert_eq!(session.phase(), Phase::LoggedOut);
}

#[test]
fn statuses_are_numbered() {
    let mut session = session(Kind::Normal);
    assert_eq!((session.stat_sn(), session.next_stat_sn(), session.next_stat_sn()), (7, 7, 8));
}
