//! A blocking NBD client that speaks all framings, and sends whatever it is told.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use nbd_frontend::Framing;
use nbd_frontend::proto::{
    BASE_ALLOCATION, EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, ExtendedReply, ExtendedRequest, Greeting,
    OPTION_MAGIC, OptionHeader, OptionReply, REPLY_FLAG_DONE, REQUEST_MAGIC, Request, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, SimpleReply, StructuredReply, chunk, command, command_flag, info, option, reply,
};
use zerocopy::{FromBytes, IntoBytes};

use super::Running;

/// A reply, its chunks put together.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    /// 0, or the error.
    pub error: u32,
    pub text: String,
    /// Where the error was, if that was told.
    pub at: Option<u64>,
    pub data: Vec<u8>,
    /// Length and flags of extents.
    pub extents: Vec<(u64, u32)>,
}

pub struct Client {
    pub stream: UnixStream,
    pub framing: Framing,
    pub flags: u16,
    pub size: u64,
    next_cookie: u64,
    /// Lengths of reads without a reply: simple replies do not tell.
    reads: Vec<(u64, usize)>,
}

pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(text.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// Greets a server: the stream is at the first option.
pub fn greeted(server: &Running) -> UnixStream {
    greet(server.connect())
}

fn greet(mut stream: UnixStream) -> UnixStream {
    let mut greeting = [0; size_of::<Greeting>()];
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(&3_u32.to_be_bytes()).unwrap();
    stream
}

/// Sends an option.
pub fn send_option(stream: &mut UnixStream, option: u32, data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len()).unwrap();
    let head = OptionHeader { magic: OPTION_MAGIC.into(), option: option.into(), length: length.into() };
    stream.write_all(&[head.as_bytes(), data].concat())
}

/// Reads replies up to the last one.
pub fn option_replies(stream: &mut UnixStream) -> io::Result<Vec<(u32, Vec<u8>)>> {
    let mut replies = Vec::new();
    loop {
        let mut head = [0; size_of::<OptionReply>()];
        stream.read_exact(&mut head)?;
        let head = OptionReply::read_from_bytes(&head).unwrap();
        let mut data = vec![0; head.length.get() as usize];
        stream.read_exact(&mut data)?;
        let kind = head.kind.get();
        replies.push((kind, data));
        if kind == reply::ACK || kind >> 31 == 1 {
            return Ok(replies);
        }
    }
}

impl Client {
    /// Negotiates everything that the framing allows, and goes.
    pub fn connect(server: &Running, framing: Framing) -> Self {
        Self::try_connect(server, framing).expect("admitted")
    }

    /// The same; the kind of the refusal if it is refused.
    pub fn try_connect(server: &Running, framing: Framing) -> Result<Self, u32> {
        Self::over(server.connect(), framing)
    }

    /// The same over TCP.
    pub fn connect_tcp(server: &Running, framing: Framing) -> Self {
        Self::over(server.connect_tcp(), framing).expect("admitted")
    }

    /// The same of a client that does not ask for the block sizes, and is told them all the same.
    pub fn unasked(server: &Running, framing: Framing) -> Self {
        Self::negotiated(server.connect(), framing, &[]).expect("admitted")
    }

    pub fn over(stream: UnixStream, framing: Framing) -> Result<Self, u32> {
        Self::negotiated(stream, framing, &[info::BLOCK_SIZE])
    }

    fn negotiated(stream: UnixStream, framing: Framing, asked: &[u16]) -> Result<Self, u32> {
        let mut stream = greet(stream);
        let opt = match framing {
            Framing::Simple => None,
            Framing::Structured => Some(option::STRUCTURED_REPLY),
            Framing::Extended => Some(option::EXTENDED_HEADERS),
        };
        if let Some(opt) = opt {
            send_option(&mut stream, opt, b"").unwrap();
            assert_eq!(option_replies(&mut stream).unwrap(), [(reply::ACK, vec![])]);
            let query = [string("demo"), vec![0, 0, 0, 1], string(BASE_ALLOCATION)].concat();
            send_option(&mut stream, option::SET_META_CONTEXT, &query).unwrap();
            assert_eq!(option_replies(&mut stream).unwrap().len(), 2);
        }
        let mut data = [string("demo"), vec![0, u8::try_from(asked.len()).unwrap()]].concat();
        asked.iter().for_each(|kind| data.extend(kind.to_be_bytes()));
        send_option(&mut stream, option::GO, &data).unwrap();
        let replies = option_replies(&mut stream).unwrap();
        let (last, _) = replies.last().unwrap();
        if *last != reply::ACK {
            return Err(*last);
        }
        let info = &replies[0].1;
        let size = u64::from_be_bytes(info[2..10].try_into().unwrap());
        let flags = u16::from_be_bytes(info[10..12].try_into().unwrap());
        Ok(Self { stream, framing, flags, size, next_cookie: 1, reads: Vec::new() })
    }

    /// As a client that has agreed before, as the kernel's does: from the first request on.
    pub fn agreed(stream: UnixStream) -> Self {
        Self { stream, framing: Framing::Simple, flags: 0, size: 0, next_cookie: 1, reads: Vec::new() }
    }

    /// Sends a request's header; its cookie.
    pub fn header(&mut self, kind: u16, flags: u16, offset: u64, length: u64) -> u64 {
        let (bytes, cookie) = self.encode(kind, flags, offset, length);
        self.stream.write_all(&bytes).unwrap();
        cookie
    }

    /// A request's header.
    pub fn encode(&mut self, kind: u16, flags: u16, offset: u64, length: u64) -> (Vec<u8>, u64) {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        if kind == command::READ {
            self.reads.push((cookie, usize::try_from(length).unwrap()));
        }
        let bytes = if self.framing == Framing::Extended {
            let raw = ExtendedRequest {
                magic: EXTENDED_REQUEST_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: cookie.into(),
                offset: offset.into(),
                length: length.into(),
            };
            raw.as_bytes().to_vec()
        } else {
            let raw = Request {
                magic: REQUEST_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: cookie.into(),
                offset: offset.into(),
                length: u32::try_from(length).unwrap().into(),
            };
            raw.as_bytes().to_vec()
        };
        (bytes, cookie)
    }

    /// Sends a write; its cookie.
    pub fn send_write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u64 {
        let payload = if self.framing == Framing::Extended { command_flag::PAYLOAD_LEN } else { 0 };
        let (head, cookie) = self.encode(command::WRITE, flags | payload, offset, data.len() as u64);
        self.stream.write_all(&[&head, data].concat()).unwrap();
        cookie
    }

    /// Sends a request without data and reads its reply.
    pub fn call(&mut self, kind: u16, flags: u16, offset: u64, length: u64) -> Reply {
        let cookie = self.header(kind, flags, offset, length);
        let reply = self.reply().unwrap();
        assert_eq!(reply.cookie, cookie);
        reply
    }

    pub fn read(&mut self, offset: u64, length: u64) -> Reply {
        self.call(command::READ, 0, offset, length)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Reply {
        let cookie = self.send_write(0, offset, data);
        let reply = self.reply().unwrap();
        assert_eq!(reply.cookie, cookie);
        reply
    }

    /// Reads the next reply, which has one chunk.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let (reply, is_done) = self.next_chunk()?;
        assert!(is_done, "there is more");
        Ok(reply)
    }

    /// Reads the next reply, whose chunks nothing comes between: how many they are, and what they say together.
    pub fn reply_in_pieces(&mut self) -> io::Result<(u32, Reply)> {
        let (mut whole, mut is_done) = self.next_chunk()?;
        let mut chunks = 1;
        while !is_done {
            let next;
            (next, is_done) = self.next_chunk()?;
            assert_eq!(next.cookie, whole.cookie);
            whole.data.extend(next.data);
            (whole.error, whole.text, whole.at) = (next.error, next.text, next.at);
            chunks += 1;
        }
        Ok((chunks, whole))
    }

    /// A reply, or a chunk of one; true if it is the last.
    fn next_chunk(&mut self) -> io::Result<(Reply, bool)> {
        let mut magic = [0; 4];
        self.stream.read_exact(&mut magic)?;
        match u32::from_be_bytes(magic) {
            SIMPLE_REPLY_MAGIC => {
                assert_ne!(self.framing, Framing::Extended, "a simple reply to an extended request");
                Ok((self.simple(magic)?, true))
            }
            STRUCTURED_REPLY_MAGIC => {
                assert_eq!(self.framing, Framing::Structured);
                let raw = StructuredReply::read_from_bytes(&self.rest::<20>(magic)?).unwrap();
                let reply = self.chunk(raw.cookie.get(), raw.kind.get(), u64::from(raw.length.get()))?;
                Ok((reply, raw.flags.get() == REPLY_FLAG_DONE))
            }
            EXTENDED_REPLY_MAGIC => {
                assert_eq!(self.framing, Framing::Extended);
                let raw = ExtendedReply::read_from_bytes(&self.rest::<32>(magic)?).unwrap();
                let reply = self.chunk(raw.cookie.get(), raw.kind.get(), raw.length.get())?;
                Ok((reply, raw.flags.get() == REPLY_FLAG_DONE))
            }
            other => panic!("no reply: {other:#x}"),
        }
    }

    fn rest<const N: usize>(&mut self, magic: [u8; 4]) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        bytes[..4].copy_from_slice(&magic);
        self.stream.read_exact(&mut bytes[4..])?;
        Ok(bytes)
    }

    fn take_read(&mut self, cookie: u64) -> Option<usize> {
        let index = self.reads.iter().position(|(c, _)| *c == cookie)?;
        Some(self.reads.swap_remove(index).1)
    }

    fn simple(&mut self, magic: [u8; 4]) -> io::Result<Reply> {
        let raw = SimpleReply::read_from_bytes(&self.rest::<16>(magic)?).unwrap();
        let mut reply = Reply { cookie: raw.cookie.get(), error: raw.error.get(), ..Reply::default() };
        if let Some(length) = self.take_read(reply.cookie) {
            assert_eq!(self.framing, Framing::Simple, "a simple reply to a read");
            if reply.error == 0 {
                reply.data = vec![0; length];
                self.stream.read_exact(&mut reply.data)?;
            }
        }
        Ok(reply)
    }

    fn chunk(&mut self, cookie: u64, kind: u16, length: u64) -> io::Result<Reply> {
        let mut body = vec![0; usize::try_from(length).unwrap()];
        self.stream.read_exact(&mut body)?;
        self.take_read(cookie);
        let mut reply = Reply { cookie, ..Reply::default() };
        let u32_at = |at: usize| u32::from_be_bytes(body[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_be_bytes(body[at..at + 8].try_into().unwrap());
        match kind {
            chunk::NONE => assert_eq!(length, 0),
            chunk::OFFSET_DATA => reply.data = body.split_off(8),
            chunk::BLOCK_STATUS => {
                reply.extents =
                    (4..body.len()).step_by(8).map(|i| (u64::from(u32_at(i)), u32_at(i + 4))).collect();
            }
            chunk::BLOCK_STATUS_EXT => {
                assert_eq!(u32_at(4) as usize, (body.len() - 8) / 16);
                reply.extents = (8..body.len()).step_by(16).map(|i| (u64_at(i), u32_at(i + 12))).collect();
            }
            chunk::ERROR | chunk::ERROR_OFFSET => {
                reply.error = u32_at(0);
                assert_ne!(reply.error, 0);
                let end = 6 + usize::from(u16::from_be_bytes([body[4], body[5]]));
                reply.text = String::from_utf8(body[6..end].to_vec()).unwrap();
                reply.at = (kind == chunk::ERROR_OFFSET).then(|| u64_at(end));
            }
            other => panic!("chunk {other}"),
        }
        Ok(reply)
    }

    /// True if the server has closed the connection, now or soon.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0) | Err(_))
    }
}
