//! The side that asks to be let in: an engine at a replica, a reader there, a relay at an engine.
//!
//! ```text
//! (connected) -- challenge: answer --> Asked -- welcome: heard --> let in
//!      |                                 |
//!      +------- HandshakeError           +------- NotLetIn
//! ```
//!
//! What may come next has one length in each state, and the types ask for just that: nobody who has proved nothing makes this
//! side hold more. A state that has been left is gone, so no answer counts twice.

use lh_block::Generation;
use thiserror::Error;

use super::{
    CHALLENGE_LEN, Challenge, HELLO_LEN, HandshakeError, Hello, Key, Role, Verdict, WELCOME_LEN,
    decode_welcome,
};

/// Why somebody who asked is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotLetIn {
    /// Who answers is not who was asked, or does not hold the key.
    #[error(transparent)]
    Foreign(#[from] HandshakeError),
    /// It is, and refuses. The generation is the highest that it has seen; zero with `BadKey`, which nobody can prove.
    #[error("{0}")]
    Refused(Verdict, Generation),
}

/// Somebody whose hello is made, and who waits for the verdict.
#[derive(Clone)]
pub struct Asked {
    challenge: Challenge,
    hello: [u8; HELLO_LEN],
    key: Key,
}

impl Asked {
    /// Answers the other side's first message. `nonce` must be fresh from the system's random source.
    ///
    /// # Errors
    /// The other side speaks another protocol, or has no version in common with this one. `Malformed`: a name of ours is
    /// longer than 80 bytes.
    pub fn answer(
        challenge: &[u8; CHALLENGE_LEN],
        (hello, role): (&Hello, Role),
        key: &Key,
        nonce: [u8; 32],
    ) -> Result<Self, HandshakeError> {
        let challenge = Challenge::decode(challenge)?;
        let hello = hello.encode(role, &challenge, key, nonce)?;
        Ok(Self { challenge, hello, key: *key })
    }

    /// The bytes to send.
    pub const fn hello(&self) -> &[u8; HELLO_LEN] {
        &self.hello
    }

    /// Hears the other side's last message: the generation that it has seen, ours then, if it lets us in.
    ///
    /// # Errors
    /// [`NotLetIn`].
    pub fn heard(self, welcome: &[u8; WELCOME_LEN]) -> Result<Generation, NotLetIn> {
        match decode_welcome(welcome, &self.challenge, &self.hello, &self.key)? {
            (Verdict::Welcome, generation) => Ok(generation),
            (refusal, generation) => Err(NotLetIn::Refused(refusal, generation)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lh_block::Instance;

    use super::*;
    use crate::handshake::{MAGIC, encode_welcome, is_reader};
    use crate::header::VERSION;

    const KEY: Key = [7; 32];
    const SEEN: Generation = Generation { attachment: 9, restart: 1 };

    fn hello() -> Hello {
        Hello {
            volume: "demo".into(),
            replica: "demo-r-0a1b2c3d".into(),
            generation: SEEN,
            instance: Instance(77),
            session: Instance(78),
            queue: 0,
            queues: 1,
            checksums: false,
            lends: false,
        }
    }

    fn asked(challenge: &Challenge, role: Role) -> Asked {
        Asked::answer(challenge.as_bytes(), (&hello(), role), &KEY, [2; 32]).unwrap()
    }

    #[test]
    fn whoever_asks_is_known_as_what_it_came_as_and_let_in() {
        let challenge = Challenge::new([1; 32]);
        for role in [Role::Engine, Role::Reader, Role::Relay] {
            let asked = asked(&challenge, role);
            let bytes = *asked.hello();
            let decode = if role == Role::Relay { Hello::decode_relay } else { Hello::decode };
            assert_eq!(decode(&bytes, &challenge, &KEY), Ok(hello()));
            assert_eq!(is_reader(&bytes), role == Role::Reader);
            let welcome = encode_welcome(Verdict::Welcome, SEEN, &challenge, &bytes, &KEY);
            assert_eq!(asked.heard(&welcome), Ok(SEEN));
        }
    }

    #[test]
    fn every_refusal_is_one_and_says_what_to_do() {
        let challenge = Challenge::new([1; 32]);
        let mut texts = BTreeSet::new();
        for verdict in Verdict::ALL.into_iter().filter(|v| *v != Verdict::Welcome) {
            let asked = asked(&challenge, Role::Engine);
            let answer = encode_welcome(verdict, SEEN, &challenge, asked.hello(), &KEY);
            let seen = if verdict == Verdict::BadKey { Generation::default() } else { SEEN };
            let refused = asked.heard(&answer).unwrap_err();
            assert_eq!(refused, NotLetIn::Refused(verdict, seen));
            assert_eq!(refused.to_string(), verdict.to_string());
            texts.insert(verdict.to_string());
        }
        assert_eq!(texts.len(), 6, "{texts:?}");
    }

    #[test]
    fn who_cannot_prove_the_key_lets_nobody_in_and_refuses_nobody() {
        let challenge = Challenge::new([1; 32]);
        let foreign = Err(NotLetIn::Foreign(HandshakeError::BadProof));
        for verdict in Verdict::ALL.into_iter().filter(|v| *v != Verdict::BadKey) {
            let ours = asked(&challenge, Role::Relay);
            let forged = encode_welcome(verdict, SEEN, &challenge, ours.hello(), &[8; 32]);
            assert_eq!(ours.clone().heard(&forged), foreign, "another key");
            // Proved, for somebody else's challenge or hello.
            let old = encode_welcome(verdict, SEEN, &Challenge::new([3; 32]), ours.hello(), &KEY);
            assert_eq!(ours.clone().heard(&old), foreign, "another challenge");
            let other = asked(&challenge, Role::Reader);
            let other = encode_welcome(verdict, SEEN, &challenge, other.hello(), &KEY);
            assert_eq!(ours.heard(&other), foreign, "another hello");
        }
    }

    #[test]
    fn a_changed_byte_lets_nobody_in() {
        let challenge = Challenge::new([1; 32]);
        let ours = asked(&challenge, Role::Engine);
        let welcome = encode_welcome(Verdict::Welcome, SEEN, &challenge, ours.hello(), &KEY);
        for at in 0..WELCOME_LEN {
            for bit in 0..8 {
                let mut bad = welcome;
                bad[at] ^= 1 << bit;
                assert!(ours.clone().heard(&bad).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn another_protocol_or_version_is_told_nothing() {
        let answer = |challenge: [u8; CHALLENGE_LEN]| {
            Asked::answer(&challenge, (&hello(), Role::Engine), &KEY, [2; 32]).map(|_| ()).unwrap_err()
        };
        let mut challenge = *Challenge::new([1; 32]).as_bytes();
        assert_eq!(challenge[..4], MAGIC.to_le_bytes());
        (challenge[4], challenge[5]) = (VERSION + 1, VERSION + 3);
        assert_eq!(answer(challenge), HandshakeError::Version(VERSION + 1, VERSION + 3));
        challenge[0] ^= 1;
        assert_eq!(answer(challenge), HandshakeError::NotThisProtocol);
    }
}
