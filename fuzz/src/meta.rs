//! Longhorn's metadata files. What is accepted is written back as Longhorn writes it, and then reads the same.
//!
//! Input: a byte, then the file: even for `volume.meta`, odd for the `.meta` beside a layer.

use replica::store::fuzzing::{layer_meta, volume_meta};

/// Longest metadata file that is read.
const READ_MAX: usize = 64 << 10;

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let parse = if kind % 2 == 0 { volume_meta } else { layer_meta };
    let Some(written) = parse(bytes) else { return };
    assert_eq!(written.last(), Some(&b'\n'));
    if written.len() <= READ_MAX {
        let again = parse(&written).expect("what was written is read");
        assert_eq!(String::from_utf8_lossy(&again), String::from_utf8_lossy(&written));
    }
}
