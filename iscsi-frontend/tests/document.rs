//! `docs/formats/iscsi.md` says what the code says.

use std::fs;
use std::path::Path;

use iscsi_frontend::login::RECV_SEGMENT_MAX;
use iscsi_frontend::pdu::{login_status, opcode, reject};
use iscsi_frontend::scsi::command::COMMANDS;
use iscsi_frontend::scsi::reservation::REGISTRATIONS_MAX;
use iscsi_frontend::{IQN_PREFIX, Limits};

fn document() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/formats/iscsi.md");
    fs::read_to_string(path).unwrap()
}

#[test]
fn every_command_stands_in_the_table() {
    let text = document();
    let (_, table) = text.split_once("## Commands").unwrap();
    for row in COMMANDS {
        let code = format!("0x{:02X}", row.opcode);
        // Service actions of reservations are told in words.
        let code = match row.action {
            Some(action) if row.opcode >= 0x80 => format!("{code}/{action:02X}"),
            _ => code,
        };
        assert!(table.contains(&code), "no {code}");
    }
}

#[test]
fn operations_and_reasons_are_listed_with_their_numbers() {
    let text = document();
    let operations = [
        ("NOP-Out", opcode::NOP_OUT),
        ("SCSI Command", opcode::SCSI_COMMAND),
        ("Task Management", opcode::TASK_REQUEST),
        ("Text", opcode::TEXT_REQUEST),
        ("Data-Out", opcode::DATA_OUT),
        ("Logout", opcode::LOGOUT_REQUEST),
        ("SNACK", opcode::SNACK),
    ];
    for (name, code) in operations {
        assert!(text.contains(&format!("| {name} | {code:#04x} |")), "{name}");
    }
    for reason in [
        reject::DATA_DIGEST,
        reject::SNACK,
        reject::PROTOCOL_ERROR,
        reject::NOT_SUPPORTED,
        reject::TOO_MANY_IMMEDIATE,
        reject::TASK_IN_PROGRESS,
        reject::INVALID_FIELD,
    ] {
        assert!(text.contains(&format!("Reject {reason:#04x}")), "{reason:#x}");
    }
    let statuses = [
        login_status::INITIATOR_ERROR,
        login_status::AUTHENTICATION_FAILURE,
        login_status::NOT_FOUND,
        login_status::UNSUPPORTED_VERSION,
        login_status::TOO_MANY_CONNECTIONS,
        login_status::MISSING_PARAMETER,
        login_status::SESSION_TYPE,
        login_status::NO_SESSION,
        login_status::INVALID_DURING_LOGIN,
        login_status::UNAVAILABLE,
        login_status::OUT_OF_RESOURCES,
    ];
    for status in statuses {
        assert!(text.contains(&format!("| {status:#06x} |")), "{status:#06x}");
    }
}

#[test]
fn bounds_are_as_written() {
    let text = document();
    let limits = Limits::of_pool(&lh_ring::Pool::new(8 << 20, 64 << 20).unwrap());
    assert_eq!((limits.connections, limits.patience_s, limits.ping_s), (1024, 30, 30));
    assert_eq!((limits.payload_bytes, limits.session_bytes), (24 << 20, 8 << 20));
    for bound in [
        format!("`{IQN_PREFIX}VOLUME`"),
        "- 1,024 connections".into(),
        format!("- {} sessions with a pool of 64 MiB", limits.sessions),
        format!("a window of {}", limits.window),
        format!("| `FirstBurstLength` | at most {} |", limits.first_burst),
        format!("| `MaxRecvDataSegmentLength` | {RECV_SEGMENT_MAX} is declared |"),
        format!("{REGISTRATIONS_MAX} registrations"),
        "three eighths of the pool together, an eighth per session".into(),
        "- 30 s:".into(),
    ] {
        assert!(text.contains(&bound), "{bound:?} is not in the document");
    }
}
