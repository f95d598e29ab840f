//! CHAP: an initiator proves that it knows a secret, and the target proves it back where that is asked for
//! (RFC 7143, 12.1.3; RFC 1994).

use md5::{Digest, Md5};
use sha2::Sha256;

/// Algorithms by their numbers (IANA, PPP authentication algorithms): MD5, which all initiators have, and SHA-256.
pub(crate) const ALGORITHMS: [(&str, Algorithm); 2] = [("7", Algorithm::Sha256), ("5", Algorithm::Md5)];

/// Longest challenge or response (RFC 7143, 12.1.3).
pub(crate) const BINARY_MAX: usize = 1024;

/// Bytes of a challenge that is made here.
pub(crate) const CHALLENGE: usize = 16;

/// What a response is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Md5,
    Sha256,
}

impl Algorithm {
    /// The response to a challenge (RFC 1994, 4.1).
    pub(crate) fn respond(self, id: u8, secret: &[u8], challenge: &[u8]) -> Vec<u8> {
        match self {
            Self::Md5 => {
                let mut hash = Md5::new();
                [&[id], secret, challenge].iter().for_each(|part| hash.update(part));
                hash.finalize().to_vec()
            }
            Self::Sha256 => {
                let mut hash = Sha256::new();
                [&[id], secret, challenge].iter().for_each(|part| hash.update(part));
                hash.finalize().to_vec()
            }
        }
    }
}

/// A name and its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User name.
    pub name: String,
    /// Secret. RFC 7143 asks for 12 bytes at least where there is no IPsec.
    pub secret: Vec<u8>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Who may log in, and how the target proves itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chap {
    /// What an initiator has to know.
    pub initiator: Credentials,
    /// What the target proves to an initiator that asks for it. Its secret must be another one.
    pub target: Option<Credentials>,
}

/// True if both are the same, in a time that does not depend on where they differ.
pub(crate) fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |sum, (x, y)| sum | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The digests of "abc", from RFC 1321 and FIPS 180-2: identifier `a`, secret `b`, challenge `c`.
    #[test]
    fn golden_responses() {
        let md5 = Algorithm::Md5.respond(b'a', b"b", b"c");
        assert_eq!(crate::text::hex(&md5), "0x900150983cd24fb0d6963f7d28e17f72");
        let sha = Algorithm::Sha256.respond(b'a', b"b", b"c");
        let golden = "0xba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(crate::text::hex(&sha), golden);
    }

    #[test]
    fn equality() {
        assert!(equal(b"abc", b"abc") && !equal(b"abc", b"abd") && !equal(b"ab", b"abc"));
    }

    #[test]
    fn secrets_are_not_printed() {
        let credentials = Credentials { name: "n".into(), secret: b"hidden".to_vec() };
        assert!(!format!("{credentials:?}").contains("hidden"));
    }
}
