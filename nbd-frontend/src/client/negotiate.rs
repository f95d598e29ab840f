//! The client's side of the handshake, on a stream that blocks. Afterwards the transmission phase is spoken with simple
//! replies: by a [`super::Client`], or by the kernel ([`crate::kernel`]), which knows no others.

use std::io::{self, Read, Write};

use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::proto::{
    Greeting, MAGIC, OPTION_MAGIC, OptionHeader, OptionReply, REPLY_MAGIC, STRING_MAX, client_flag, info,
    option, reply,
};

/// Longest answer to an option: a few facts, or an error's words.
const ANSWER_MAX: u32 = 64 << 10;

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

/// Negotiates on a fresh connection. Afterwards the stream is at the first request.
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
    let flags = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;
    stream.write_all(&flags.to_be_bytes())?;
    go(stream, export)?;
    let mut served = Served { size: 0, flags: 0, block: 512, longest: LONGEST };
    let mut told = false;
    loop {
        let (kind, data) = answer(stream)?;
        match kind {
            reply::INFO => told |= fact(&data, &mut served),
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
    if head.magic.get() != REPLY_MAGIC || head.length.get() > ANSWER_MAX {
        return Err(HandshakeError::Foreign("an answer's head"));
    }
    let mut data = vec![0; head.length.get() as usize];
    stream.read_exact(&mut data)?;
    Ok((head.kind.get(), data))
}

/// Takes a fact; true if it was the export's size and flags.
fn fact(data: &[u8], served: &mut Served) -> bool {
    let Some((kind, value)) = data.split_first_chunk::<2>() else { return false };
    match u16::from_be_bytes(*kind) {
        info::EXPORT => {
            let Some((size, rest)) = value.split_first_chunk::<8>() else { return false };
            let Some(flags) = rest.first_chunk::<2>() else { return false };
            served.size = u64::from_be_bytes(*size);
            served.flags = u16::from_be_bytes(*flags);
            return true;
        }
        info::BLOCK_SIZE => {
            if let Some((least, rest)) = value.split_first_chunk::<4>()
                && let Some(longest) = rest.get(4..).and_then(|rest| rest.first_chunk::<4>())
            {
                served.block = u32::from_be_bytes(*least).max(512);
                served.longest = u32::from_be_bytes(*longest).min(LONGEST);
            }
        }
        _ => {}
    }
    false
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
        let len = u32::try_from(data.len()).unwrap();
        [
            &REPLY_MAGIC.to_be_bytes()[..],
            &option::GO.to_be_bytes(),
            &kind.to_be_bytes(),
            &len.to_be_bytes(),
            data,
        ]
        .concat()
    }

    fn talk(answers: &[Vec<u8>]) -> (Result<Served, HandshakeError>, Vec<u8>) {
        let greeting = [&MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &[0, 3]].concat();
        let words = [greeting, answers.concat()].concat();
        let mut script = Script { words: io::Cursor::new(words), said: Vec::new() };
        (handshake(&mut script, "vol"), script.said)
    }

    #[test]
    fn size_flags_and_block_are_learnt() {
        let export =
            [&0_u16.to_be_bytes()[..], &(1_u64 << 30).to_be_bytes(), &0x16d_u16.to_be_bytes()].concat();
        let blocks =
            [&3_u16.to_be_bytes()[..], &4096_u32.to_be_bytes(), &[0; 4], &0x10_0000_u32.to_be_bytes()]
                .concat();
        let answers = [reply_of(3, &export), reply_of(3, &blocks), reply_of(1, &[])];
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
}
