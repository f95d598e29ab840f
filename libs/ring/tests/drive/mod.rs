//! What the tests of this crate share: sockets, patterns, and a loop that waits for completions.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lh_ring::{Completion, Fd, Ring, Token};

/// A token of a test: what and which.
pub(crate) fn token(kind: u8, slot: u16) -> Token {
    Token::new(9, kind, slot, 0)
}

/// Two ends of a stream.
pub(crate) fn pair() -> (Fd, Fd) {
    let (a, b) = UnixStream::pair().expect("socketpair");
    (Fd::new(a), Fd::new(b))
}

/// Turns the ring until that many completions have come.
pub(crate) fn completions(ring: &mut Ring, count: usize) -> Vec<Completion> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut done = Vec::new();
    while done.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} completions came", done.len());
        ring.turn(Some(Duration::from_secs(1))).expect("turn");
        done.extend(std::iter::from_fn(|| ring.next()));
    }
    assert_eq!(done.len(), count, "more completions than expected: {done:?}");
    done
}

/// Bytes that differ with seed and place.
pub(crate) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    let mut random = Random(u64::from(seed) + 1);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Numbers that look random and are the same in every run (xorshift64*).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() >> 33).expect("31 bits") % n.max(1)
    }
}
