//! The server's side of the handshake, read as the protocol's document has it.

use std::io::{self, Read, Write};

use nbd_frontend::client::{HandshakeError, Served, handshake};

use super::script::GEOMETRY;

/// What a client with these needs may not be told to do without: flags, flush, FUA, trim, zeroes, multi-conn, fast zeroes.
const NEEDED: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 11;

/// Longest answer that the client takes, and most facts, as `docs/formats/nbd.md` has them.
const ANSWER_MAX: u64 = 64 << 10;
const FACTS_MAX: u32 = 64;

/// A number as it lies on the wire.
pub(super) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// What a handshake comes to.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Served(Served),
    Refused,
    Foreign,
    /// The stream ends before.
    Short,
}

struct Stream<'a> {
    rest: &'a [u8],
    said: Vec<u8>,
}

impl<'a> Stream<'a> {
    fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (now, later) = self.rest.split_at_checked(usize::try_from(len).ok()?)?;
        self.rest = later;
        Some(now)
    }

    fn verdict(&mut self) -> Option<Verdict> {
        let greeting = self.take(18)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" || number(&greeting[16..]) & 1 == 0 {
            return Some(Verdict::Foreign);
        }
        let mut served = Served { size: 0, flags: 0, block: 512, longest: 32 << 20 };
        let (mut told, mut facts) = (false, 0);
        loop {
            let head = self.take(20)?;
            let (kind, length) = (number(&head[12..16]), number(&head[16..]));
            if number(&head[..8]) != 0x0003_e889_0455_65a9 || number(&head[8..12]) != 7 || length > ANSWER_MAX
            {
                return Some(Verdict::Foreign);
            }
            let data = self.take(length)?;
            match kind {
                1 if told && data.is_empty() => return Some(Verdict::Served(served)),
                3 => {
                    facts += 1;
                    if facts > FACTS_MAX || data.len() < 2 {
                        return Some(Verdict::Foreign);
                    }
                    match (number(&data[..2]), &data[2..]) {
                        (0, fact) if fact.len() == 10 => {
                            told = true;
                            served.size = number(&fact[..8]);
                            served.flags = u16::try_from(number(&fact[8..])).expect("two bytes");
                        }
                        (3, fact) if fact.len() == 12 => {
                            let least = u32::try_from(number(&fact[..4])).expect("four bytes");
                            let most = u32::try_from(number(&fact[8..])).expect("four bytes");
                            if !least.is_power_of_two() || least > 65536 || most < least {
                                return Some(Verdict::Foreign);
                            }
                            served.block = least.max(512);
                            served.longest = most.min(32 << 20);
                        }
                        (0 | 3, _) => return Some(Verdict::Foreign),
                        _ => {}
                    }
                }
                kind if kind >> 31 == 1 => return Some(Verdict::Refused),
                _ => return Some(Verdict::Foreign),
            }
        }
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        assert!(bytes.len() as u64 <= ANSWER_MAX, "wants {} bytes at once", bytes.len());
        self.rest.read(bytes)
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.said.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs the handshake; what follows it, if the client takes the export for its device.
pub(super) fn greet(bytes: &[u8]) -> Option<&[u8]> {
    let mut stream = Stream { rest: bytes, said: Vec::new() };
    let mut own = Stream { rest: bytes, said: Vec::new() };
    let verdict = own.verdict().unwrap_or(Verdict::Short);
    let told = handshake(&mut stream, "demo");
    let same = match &told {
        Ok(served) => verdict == Verdict::Served(*served),
        Err(HandshakeError::Io(e)) => verdict == Verdict::Short && e.kind() == io::ErrorKind::UnexpectedEof,
        Err(HandshakeError::Foreign(_)) => verdict == Verdict::Foreign,
        Err(HandshakeError::Refused { .. }) => verdict == Verdict::Refused,
    };
    assert!(same, "{told:?}, but {verdict:?}");
    let words =
        [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 7, 0, 0, 0, 12, 0, 0, 0, 4], b"demo", &[0, 1, 0, 3]];
    assert!(words.concat().starts_with(&stream.said), "it says {:x?}", stream.said);
    let served = told.ok()?;
    assert_eq!(stream.rest, own.rest, "another beginning of the replies");
    let fits = served.size == GEOMETRY.size
        && served.block <= GEOMETRY.logical_block
        && served.longest >= GEOMETRY.max_transfer
        && served.flags & NEEDED == NEEDED
        && served.flags & 2 == 0;
    assert_eq!(served.check(&GEOMETRY).is_ok(), fits);
    fits.then_some(own.rest)
}
