//! The client's side of the handshake, on a stream that blocks. Afterwards the transmission phase is spoken with simple
//! replies: by a [`super::Client`], or by the kernel ([`crate::kernel`]), which knows no others.

use std::io::{self, Read, Write};

use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::proto::{
    Greeting, InfoBlockSize, InfoExport, MAGIC, OPTION_MAGIC, OptionHeader, OptionReply, REPLY_MAGIC,
    STRING_MAX, client_flag, handshake_flag, info, option, reply,
};

/// Longest answer to an option: a few facts, or an error's words.
const ANSWER_MAX: u32 = 64 << 10;

/// Most facts that a server may tell. There are four kinds; a server that tells no end of them is none.
const FACTS_MAX: u32 = 64;

/// Largest of the smallest blocks that the protocol allows ("Block size constraints").
const BLOCK_MAX: u32 = 64 << 10;

/// What a server takes that does not tell ("Block size constraints").
const LONGEST: u32 = 32 << 20;

/// What a server says of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Size in bytes.
    pub size: u64,
    /// [`crate::proto::transmission_flag`].
    pub flags: u16,
    /// Smallest block that it takes.
    pub block: u32,
    /// Longest read or write that it takes.
    pub longest: u32,
}

/// Why a server is not used.
#[derive(Debug, Error)]
pub enum HandshakeError {
    /// The connection broke.
    #[error("the NBD server: {0}")]
    Io(#[from] io::Error),
    /// What came is no NBD server's.
    #[error("what answers there is no NBD server: {0}")]
    Foreign(&'static str),
    /// The server has no such export, or does not give it out.
    #[error("the NBD server refuses export {export:?} (reply {kind:#x}): {text}")]
    Refused {
        /// The name that was asked for.
        export: String,
        /// The protocol's number.
        kind: u32,
        /// The server's words.
        text: String,
    },
}

/// Negotiates on a fresh connection. Afterwards the stream is at the first request. Holds no more than one answer, of 64 KiB at
/// most; how long it may take is for the stream's timeouts.
///
/// # Errors
/// [`HandshakeError`]: the connection is of no use any more.
pub fn handshake(stream: &mut (impl Read + Write), export: &str) -> Result<Served, HandshakeError> {
    let mut greeting = [0; size_of::<Greeting>()];
    stream.read_exact(&mut greeting)?;
    let greeting = Greeting::read_from_bytes(&greeting).map_err(|_| HandshakeError::Foreign("greeting"))?;
    if greeting.magic.get() != MAGIC || greeting.option_magic.get() != OPTION_MAGIC {
        return Err(HandshakeError::Foreign("its greeting"));
    }
    if greeting.flags.get() & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(HandshakeError::Foreign("it does not speak fixed newstyle"));
    }
    let flags = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;
    stream.write_all(&flags.to_be_bytes())?;
    go(stream, export)?;
    let mut served = Served { size: 0, flags: 0, block: 512, longest: LONGEST };
    let (mut told, mut facts) = (false, 0);
    loop {
        let (kind, data) = answer(stream)?;
        match kind {
            reply::INFO if facts < FACTS_MAX => {
                facts += 1;
                told |= fact(&data, &mut served)?;
            }
            reply::INFO => return Err(HandshakeError::Foreign("no end of facts")),
            reply::ACK if !data.is_empty() => {
                return Err(HandshakeError::Foreign("more than an acknowledgement"));
            }
            reply::ACK if told => return Ok(served),
            reply::ACK => return Err(HandshakeError::Foreign("no size was told")),
            _ if kind >> 31 == 1 => {
                let text = String::from_utf8_lossy(&data).into_owned();
                return Err(HandshakeError::Refused { export: export.to_owned(), kind, text });
            }
            _ => return Err(HandshakeError::Foreign("an unknown answer")),
        }
    }
}

/// Asks for the export and its block sizes ("`NBD_OPT_GO`").
fn go(stream: &mut impl Write, export: &str) -> Result<(), HandshakeError> {
    let name = u32::try_from(export.len()).ok().filter(|len| *len as usize <= STRING_MAX);
    let name = name.ok_or(HandshakeError::Io(io::ErrorKind::InvalidInput.into()))?;
    let mut data = name.to_be_bytes().to_vec();
    data.extend_from_slice(export.as_bytes());
    data.extend_from_slice(&1_u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let head = OptionHeader { magic: OPTION_MAGIC.into(), option: option::GO.into(), length: length.into() };
    stream.write_all(&[head.as_bytes(), &data].concat())?;
    Ok(())
}

fn answer(stream: &mut impl Read) -> Result<(u32, Vec<u8>), HandshakeError> {
    let mut head = [0; size_of::<OptionReply>()];
    stream.read_exact(&mut head)?;
    let head = OptionReply::read_from_bytes(&head).map_err(|_| HandshakeError::Foreign("an answer"))?;
    let is_ours = head.magic.get() == REPLY_MAGIC && head.option.get() == option::GO;
    if !is_ours || head.length.get() > ANSWER_MAX {
        return Err(HandshakeError::Foreign("an answer's head"));
    }
    let mut data = vec![0; head.length.get() as usize];
    stream.read_exact(&mut data)?;
    Ok((head.kind.get(), data))
}

/// Takes a fact; true if it was the export's size and flags. What is of no interest is not looked into.
///
/// # Errors
/// It has another length than its kind, or block sizes that cannot be.
fn fact(data: &[u8], served: &mut Served) -> Result<bool, HandshakeError> {
    let kind = data.first_chunk::<2>().ok_or(HandshakeError::Foreign("a fact without a kind"))?;
    match u16::from_be_bytes(*kind) {
        info::EXPORT => {
            let export = InfoExport::read_from_bytes(data);
            let export = export.map_err(|_| HandshakeError::Foreign("the export's size and flags"))?;
            served.size = export.size.get();
            served.flags = export.flags.get();
            Ok(true)
        }
        info::BLOCK_SIZE => {
            let sizes = InfoBlockSize::read_from_bytes(data);
            let sizes = sizes.map_err(|_| HandshakeError::Foreign("the block sizes"))?;
            let (least, longest) = (sizes.minimum.get(), sizes.maximum.get());
            if !least.is_power_of_two() || least > BLOCK_MAX || longest < least {
                return Err(HandshakeError::Foreign("block sizes that cannot be"));
            }
            served.block = least.max(512);
            served.longest = longest.min(LONGEST);
            Ok(false)
        }
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server whose words are these; what the client says is kept.
    struct Script {
        words: io::Cursor<Vec<u8>>,
        said: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.words.read(bytes)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.said.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn reply_of(kind: u32, data: &[u8]) -> Vec<u8> {
        reply_to(option::GO, kind, data)
    }

    fn reply_to(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let len = u32::try_from(data.len()).unwrap();
        [&REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), data]
            .concat()
    }

    fn talk(answers: &[Vec<u8>]) -> (Result<Served, HandshakeError>, Vec<u8>) {
        talk_after(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES, answers)
    }

    fn talk_after(flags: u16, answers: &[Vec<u8>]) -> (Result<Served, HandshakeError>, Vec<u8>) {
        let greeting = [&MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()].concat();
        let words = [greeting, answers.concat()].concat();
        let mut script = Script { words: io::Cursor::new(words), said: Vec::new() };
        (handshake(&mut script, "vol"), script.said)
    }

    fn export() -> Vec<u8> {
        [&0_u16.to_be_bytes()[..], &(1_u64 << 30).to_be_bytes(), &0x16d_u16.to_be_bytes()].concat()
    }

    fn blocks(least: u32, longest: u32) -> Vec<u8> {
        [&3_u16.to_be_bytes()[..], &least.to_be_bytes(), &[0; 4], &longest.to_be_bytes()].concat()
    }

    #[test]
    fn size_flags_and_block_are_learnt() {
        let answers = [reply_of(3, &export()), reply_of(3, &blocks(4096, 1 << 20)), reply_of(1, &[])];
        let (served, said) = talk(&answers);
        assert_eq!(served.unwrap(), Served { size: 1 << 30, flags: 0x16d, block: 4096, longest: 1 << 20 });
        assert_eq!(&said[..4], [0, 0, 0, 3]);
        assert_eq!(&said[4..20], [&b"IHAVEOPT"[..], &[0, 0, 0, 7, 0, 0, 0, 11]].concat());
        assert_eq!(&said[20..], [&[0, 0, 0, 3][..], b"vol", &[0, 1, 0, 3]].concat());
    }

    #[test]
    fn a_refusal_is_told_in_the_servers_words() {
        let (served, _) = talk(&[reply_of(reply::ERR_UNKNOWN, b"no such export")]);
        let text = served.unwrap_err().to_string();
        assert!(text.contains("vol") && text.contains("no such export"), "{text}");
    }

    #[test]
    fn what_is_no_server_is_not_believed() {
        let long =
            [&REPLY_MAGIC.to_be_bytes()[..], &[0, 0, 0, 7, 0, 0, 0, 3, 0xff, 0xff, 0xff, 0xff]].concat();
        for answers in [vec![long], vec![reply_of(1, &[])], vec![reply_of(77, &[])], vec![vec![0; 20]]] {
            assert!(matches!(talk(&answers).0, Err(HandshakeError::Foreign(_))), "{answers:?}");
        }
        assert!(matches!(talk(&[]).0, Err(HandshakeError::Io(_))));
    }

    /// Whether a server that tells this of itself, and then gives its export out, is taken for one.
    fn believed(fact: &[u8]) -> bool {
        match talk(&[reply_of(3, &export()), reply_of(3, fact), reply_of(1, &[])]).0 {
            Ok(_) => true,
            Err(HandshakeError::Foreign(_)) => false,
            Err(e) => panic!("{e}"),
        }
    }

    #[test]
    fn a_fact_has_the_length_of_its_kind() {
        assert!(believed(&export()) && believed(&blocks(1, u32::MAX)));
        // Names and descriptions have any, and there may be kinds that nobody knows yet.
        assert!(believed(&[0, 1]) && believed(&[0, 2, b'x']) && believed(&[0x7f, 0, 1, 2, 3]));
        for fact in [export(), blocks(512, 1 << 20)] {
            assert!(!believed(&fact[..fact.len() - 1]) && !believed(&[&fact[..], &[0]].concat()));
            assert!(!believed(&fact[..2]));
        }
        assert!(!believed(&[]) && !believed(&[0]));
    }

    #[test]
    fn block_sizes_are_powers_of_two_and_fit_together() {
        for (least, longest) in [(0, 1 << 20), (3072, 1 << 20), (1 << 17, 1 << 20), (4096, 512), (512, 0)] {
            assert!(!believed(&blocks(least, longest)), "{least} to {longest}");
        }
        for (least, longest) in [(1, 1 << 20), (512, 512), (1 << 16, u32::MAX)] {
            assert!(believed(&blocks(least, longest)), "{least} to {longest}");
        }
    }

    #[test]
    fn an_acknowledgement_is_of_our_option_and_has_no_data() {
        let told = reply_of(3, &export());
        for end in [reply_of(1, &[0]), reply_to(option::INFO, 1, &[]), reply_to(0, reply::ERR_UNKNOWN, &[])] {
            let (served, _) = talk(&[told.clone(), end]);
            assert!(matches!(served, Err(HandshakeError::Foreign(_))), "{served:?}");
        }
        assert!(talk(&[told, reply_of(1, &[])]).0.is_ok());
    }

    #[test]
    fn a_server_that_tells_no_end_of_facts_is_left() {
        let facts = |count| {
            let names = vec![reply_of(3, &[0, 1, b'x']); count];
            talk(&[&[reply_of(3, &export())][..], &names, &[reply_of(1, &[])]].concat()).0
        };
        let most = FACTS_MAX as usize;
        assert!(facts(most - 1).is_ok());
        assert!(matches!(facts(most), Err(HandshakeError::Foreign(_))));
    }

    #[test]
    fn an_oldstyle_or_unfixed_server_is_told_nothing() {
        let answers = [reply_of(3, &export()), reply_of(1, &[])];
        for flags in [0, handshake_flag::NO_ZEROES] {
            let (served, said) = talk_after(flags, &answers);
            assert!(matches!(served, Err(HandshakeError::Foreign(_))) && said.is_empty(), "{served:?}");
        }
        assert!(talk_after(handshake_flag::FIXED_NEWSTYLE, &answers).0.is_ok());
    }
}
