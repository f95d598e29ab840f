//! The tables of `docs/formats/` say what the code says.

use std::fs;
use std::path::Path;

use lh_wire::{OpCode, Status};

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/formats").join(name);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `WriteZeroes` as the document writes it: "write zeroes".
fn words(debug: &str) -> String {
    let mut out = String::new();
    for c in debug.chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push(' ');
        }
        out.extend(c.to_lowercase());
    }
    out
}

#[test]
fn operations_of_the_wire_are_listed() {
    let text = document("wire.md");
    for op in OpCode::ALL {
        let row = format!("| {} | {} |", op as u8, words(&format!("{op:?}")));
        assert!(text.contains(&row), "no row {row}");
    }
    for n in 0..=6_u8 {
        assert!(text.contains(&format!("\n| {n} | ")), "status {n} is not listed");
    }
    assert_eq!(Status::Refused as u8, 6, "a new status belongs into the table");
}

#[test]
fn sizes_of_the_wire_are_as_written() {
    let text = document("wire.md");
    for (name, bytes) in [
        ("Challenge", lh_wire::handshake::CHALLENGE_LEN),
        ("Hello", lh_wire::handshake::HELLO_LEN),
        ("Welcome", lh_wire::handshake::WELCOME_LEN),
    ] {
        assert!(text.contains(&format!("| {name} | {bytes} |")), "{name} is {bytes} bytes");
    }
    assert!(text.contains(&format!("A header of {} bytes", lh_wire::HEADER_LEN)));
    assert!(text.contains(&format!("multiple of {} in", lh_wire::PAYLOAD_ALIGN)));
    for (flag, meaning) in [
        (lh_wire::flags::FUA, "FUA"),
        (lh_wire::flags::RESPONSE, "response"),
        (lh_wire::flags::CRC, "payload checksum"),
        (lh_wire::flags::VERIFY, "compare with the checksums on record"),
        (lh_wire::flags::LENT, "(in requests to write) the bytes are lent"),
    ] {
        assert!(text.contains(&format!("{flag} {meaning}")), "flag {flag} is {meaning}");
    }
    assert_eq!(lh_wire::Pieces::MAX, 12);
    assert!(text.contains("a list of one to twelve pieces"));
    assert_eq!(lh_ring::Lent::MAX, 1 << 30);
    assert!(text.contains("1 GiB at most"));
    // A payload's pieces fit a message.
    const { assert!(lh_ring::Payload::PIECES_MAX <= lh_wire::Pieces::MAX) };
}

#[test]
fn every_decision_that_code_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let out = std::process::Command::new("git")
        .args(["grep", "-ohE", "docs/(decisions|formats)/[a-z0-9-]+\\.md", "--", "*.rs", "*.md", "*.py"])
        .current_dir(&root)
        .output()
        .expect("git grep runs");
    let names = String::from_utf8(out.stdout).expect("UTF-8");
    assert!(!names.is_empty(), "nothing found: the search is wrong");
    for name in names.lines() {
        assert!(root.join(name).exists(), "{name} is named and does not exist");
    }
}
