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

/// The rows of the table with this head, which an empty line ends.
fn rows<'a>(text: &'a str, head: &str) -> Vec<&'a str> {
    let (_, behind) = text.split_once(head).unwrap_or_else(|| panic!("no table {head}"));
    // The rest of the head's line, and the line under it.
    behind.lines().skip(2).take_while(|line| !line.is_empty()).collect()
}

/// The table has these rows, as far as they are given, and no others.
fn is_listed(text: &str, head: &str, wanted: &[String]) {
    let rows = rows(text, head);
    for (row, begins) in rows.iter().zip(wanted) {
        assert!(row.starts_with(begins.as_str()), "{row} should begin with {begins}");
    }
    assert_eq!(rows.len(), wanted.len(), "rows under {head}: {rows:#?}");
}

#[test]
fn operations_and_statuses_of_the_wire_are_listed() {
    let text = document("wire.md");
    let operations = OpCode::ALL.map(|op| format!("| {} | {} |", op as u8, words(&format!("{op:?}"))));
    is_listed(&text, "| code | operation |", &operations);
    let statuses = Status::ALL.map(|status| format!("| {} | ", status as u8));
    is_listed(&text, "| status | meaning |", &statuses);
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
    assert!(text.contains(&format!("comes the grant, {} bytes:", lh_wire::GRANT_LEN)));
    assert!(text.contains(&format!("how many files (2 bytes, at most {})", lh_wire::FILES_MAX)));
    assert!(text.contains(&format!("is n modulo {}.", lh_wire::COUNTERS)));
    assert!(text.contains(&format!("words of four bytes, at most {},", lh_block::RUNS_MAX)));
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
