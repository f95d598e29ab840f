//! What an engine and its keeper say to each other. A message that is taken is written as it was meant, and whoever reads what a
//! peer says takes no more of it than one message.
//!
//! Input: how many of the first bytes have come with the descriptor, then the peer's stream.

use fuse_frontend::keeper::fuzzing::message;

/// Longest message, and the two bytes that end it.
const LONGEST: usize = (8 << 10) + 2;

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((begin, stream)) = input.split_first() else { return };
    let begun = usize::from(*begin).min(stream.len());
    // What has come with the descriptor is one byte at most.
    let (begin, rest) = stream.split_at(begun.min(1));
    let Some((written, left)) = message(begin, rest) else { return };
    let taken = stream.len() - left;
    assert!(taken <= LONGEST && stream[..taken].ends_with(b"\n\n"), "{taken} bytes taken");
    let (again, left) = message(&[], &written).expect("what was written is read");
    assert_eq!(left, 0);
    assert_eq!(String::from_utf8_lossy(&again), String::from_utf8_lossy(&written));
}
