//! The server's end of a connection: what the client sends, and what the server's bytes mean for it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use lh_block::{IoError, Op};

use super::script::FILL;
use super::{Waiting, served::number};

/// A request's head, and a simple reply's.
const CALL: usize = 28;
const REPLY: usize = 16;

/// Longest piece that the client sends at once, in bytes: what is longer goes piece by piece (`docs/formats/nbd.md`).
const PIECE_MAX: u64 = 1 << 30;

/// What the client asks for, as the server sees it.
struct Call {
    tag: u64,
    reads: bool,
    length: u64,
}

/// The end of a request.
pub(super) struct Ended {
    pub(super) tag: u64,
    pub(super) result: Result<(), IoError>,
    pub(super) data: Vec<u8>,
}

pub(super) struct Peer {
    socket: UnixStream,
    /// Bytes of the client that are no whole request yet.
    heard: Vec<u8>,
    /// What is to be answered, by cookie.
    calls: BTreeMap<u64, Call>,
    cookies: BTreeSet<u64>,
    latest: u64,
    shut: bool,
    /// Bytes sent that are no whole reply yet.
    unfinished: Vec<u8>,
}

impl Peer {
    pub(super) fn new(socket: UnixStream) -> Self {
        socket.set_nonblocking(true).expect("a socket");
        Self {
            socket,
            heard: Vec::new(),
            calls: BTreeMap::new(),
            cookies: BTreeSet::new(),
            latest: 0,
            shut: false,
            unfinished: Vec::new(),
        }
    }

    /// True when the client has ended the connection.
    pub(super) const fn is_shut(&self) -> bool {
        self.shut
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("inputs are shorter than a socket's buffer");
    }

    /// Takes what the client has sent, which has to be requests that wait.
    pub(super) fn hear(&mut self, waiting: &BTreeMap<u64, Waiting>) {
        let mut buffer = [0; 8192];
        loop {
            match self.socket.read(&mut buffer) {
                Ok(0) => {
                    self.shut = true;
                    break;
                }
                Ok(n) => self.heard.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
        }
        let mut rest = &self.heard[..];
        while let Some((head, mut later)) = rest.split_at_checked(CALL) {
            assert_eq!(number(&head[..4]), 0x2560_9513, "no request");
            let (flags, kind, cookie) = (number(&head[4..6]), number(&head[6..8]), number(&head[8..16]));
            let (offset, length) = (number(&head[16..24]), number(&head[24..28]));
            let (tag, asked) = waiting
                .iter()
                .find(|(_, w)| (flags, kind) == command(w.op) && offset == first(w))
                .expect("what is sent was asked for, and is not answered");
            assert_eq!(length, (asked.range.len - asked.done).min(PIECE_MAX));
            if kind == 1 {
                let (data, behind) = later.split_at(usize::try_from(length).expect("short"));
                assert!(data.iter().all(|byte| *byte == FILL), "other bytes of write {tag}");
                later = behind;
            }
            assert!(*tag >= self.latest, "request {tag} goes out behind request {}", self.latest);
            assert!(self.cookies.insert(cookie), "cookie {cookie:#x} comes twice");
            assert!(self.calls.values().all(|call| call.tag != *tag), "request {tag} is sent twice");
            self.latest = *tag;
            self.calls.insert(cookie, Call { tag: *tag, reads: kind == 0, length });
            rest = later;
        }
        assert!(rest.is_empty() || self.shut, "a part of a request");
        self.heard.clear();
    }

    /// Bytes of the next reply in these.
    pub(super) fn next_reply(&self, bytes: &[u8]) -> usize {
        let Some(head) = bytes.get(..REPLY) else { return bytes.len() };
        match self.calls.get(&number(&head[8..])) {
            Some(call) if call.reads && number(&head[4..8]) == 0 => {
                REPLY + usize::try_from(call.length).expect("short")
            }
            _ => REPLY,
        }
    }

    /// What these bytes end, behind those before; and whether they break the connection.
    pub(super) fn meaning(
        &mut self,
        bytes: &[u8],
        waiting: &mut BTreeMap<u64, Waiting>,
    ) -> (Vec<Ended>, bool) {
        let all = [&std::mem::take(&mut self.unfinished)[..], bytes].concat();
        let (mut rest, mut ended) = (&all[..], Vec::new());
        while rest.len() >= REPLY {
            let len = self.next_reply(rest);
            let (magic, error) = (number(&rest[..4]), number(&rest[4..8]));
            let cookie = number(&rest[8..16]);
            let Some(call) = self.calls.get(&cookie).filter(|_| magic == 0x6744_6698 && error != 108) else {
                return (ended, true);
            };
            let Some((reply, later)) = rest.split_at_checked(len) else { break };
            rest = later;
            let tag = call.tag;
            let result = match error {
                0 => Ok(()),
                1 => Err(IoError::ReadOnly),
                22 => Err(IoError::Invalid),
                28 => Err(IoError::NoSpace),
                95 => Err(IoError::NotSupported),
                _ => Err(IoError::Io),
            };
            let asked = waiting.get_mut(&tag).expect("it was sent");
            asked.done += call.length;
            let more = result.is_ok() && asked.done < asked.range.len;
            self.calls.remove(&cookie);
            if !more {
                ended.push(Ended { tag, result, data: reply[REPLY..].to_vec() });
            }
        }
        self.unfinished = rest.to_vec();
        (ended, false)
    }

    /// Good answers to everything that was asked.
    pub(super) fn replies(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (cookie, call) in &self.calls {
            bytes.extend_from_slice(&0x6744_6698_0000_0000_u64.to_be_bytes());
            bytes.extend_from_slice(&cookie.to_be_bytes());
            if call.reads {
                let data = (0..call.length).map(|at| u8::try_from((at + call.tag) % 251).expect("small"));
                bytes.extend(data);
            }
        }
        bytes
    }
}

/// Where the next piece of a request begins. A flush has no place.
fn first(waiting: &Waiting) -> u64 {
    waiting.range.offset + waiting.done
}

/// Flags and number of the command.
const fn command(op: Op) -> (u64, u64) {
    const fn bit(set: bool, number: u64) -> u64 {
        if set { 1 << number } else { 0 }
    }
    match op {
        Op::Read => (0, 0),
        Op::Write { fua } => (bit(fua, 0), 1),
        Op::Flush => (0, 3),
        // The client answers it without the server: a call of it would be an unknown one.
        Op::Allocation => (0, 7),
        Op::Unmap => (0, 4),
        Op::WriteZeroes { fua, may_unmap, fast } => (bit(fua, 0) | bit(!may_unmap, 1) | bit(fast, 4), 6),
    }
}
