//! `docs/formats/nbd.md` says what the code says.

use std::fs;
use std::path::Path;

use nbd_frontend::proto::{command, error, option};
use nbd_frontend::{EXTENTS_MAX, Limits};

fn document() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/formats/nbd.md");
    fs::read_to_string(path).unwrap()
}

#[test]
fn options_commands_and_errors_are_listed_with_their_numbers() {
    let text = document();
    let options = [
        ("EXPORT_NAME", option::EXPORT_NAME),
        ("ABORT", option::ABORT),
        ("LIST", option::LIST),
        ("STARTTLS", option::STARTTLS),
        ("INFO", option::INFO),
        ("GO", option::GO),
        ("STRUCTURED_REPLY", option::STRUCTURED_REPLY),
        ("LIST_META_CONTEXT", option::LIST_META_CONTEXT),
        ("SET_META_CONTEXT", option::SET_META_CONTEXT),
        ("EXTENDED_HEADERS", option::EXTENDED_HEADERS),
    ];
    let commands = [
        ("READ", command::READ),
        ("WRITE", command::WRITE),
        ("DISC", command::DISC),
        ("FLUSH", command::FLUSH),
        ("TRIM", command::TRIM),
        ("CACHE", command::CACHE),
        ("WRITE_ZEROES", command::WRITE_ZEROES),
        ("BLOCK_STATUS", command::BLOCK_STATUS),
    ];
    let errors = [
        ("EPERM", error::EPERM),
        ("EIO", error::EIO),
        ("EINVAL", error::EINVAL),
        ("ENOSPC", error::ENOSPC),
        ("EOVERFLOW", error::EOVERFLOW),
        ("ENOTSUP", error::ENOTSUP),
        ("ESHUTDOWN", error::ESHUTDOWN),
    ];
    let rows = options.iter().map(|(name, code)| format!("| `NBD_OPT_{name}` | {code} |"));
    let rows = rows.chain(commands.iter().map(|(name, code)| format!("| `NBD_CMD_{name}` | {code} |")));
    for row in rows.chain(errors.iter().map(|(name, code)| format!("| `NBD_{name}` ({code}) |"))) {
        assert!(text.contains(&row), "no row {row}");
    }
}

#[test]
fn bounds_are_as_written() {
    let text = document();
    let limits = Limits::of_pool(&lh_ring::Pool::new(8 << 20, 64 << 20).unwrap());
    assert_eq!((limits.connections, limits.transmissions, limits.patience_s), (1024, 64, 30));
    assert_eq!((limits.payload_bytes, limits.connection_bytes), (32 << 20, 8 << 20));
    for bound in [
        "- 1,024 connections".to_owned(),
        "- 64 connections in transmission".into(),
        "half of the pool together, an eighth per connection".into(),
        "- 30 s:".into(),
        format!("At most {EXTENTS_MAX} extents"),
    ] {
        assert!(text.contains(&bound), "{bound:?} is not in the document");
    }
}
