//! Requests that have the socket's path as their `:authority`: of clients on gRPC's C core (Python, C++, Ruby), and of grpc-go where
//! it is given a path and a dialer of the caller's. Each slash is `%2F`, or a slash (grpc-go until 2023), and grpc-go sends it in
//! HPACK's Huffman code. A host may hold neither, and the HTTP/2 server would end such a request as malformed. Nobody looks at
//! that field on a unix socket, so what it may not hold is replaced before the server reads it, where it stands: lengths stay.

mod huffman;

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// What an HTTP/2 client says first (RFC 9113, 3.4).
const PREFACE: usize = 24;

/// Bytes of a frame's header (RFC 9113, 4.1), and of the largest frame that a server takes by default.
const FRAME_HEADER: usize = 9;
const FRAME_MAX: usize = FRAME_HEADER + (16 << 10);

const HEADERS: u8 = 1;
const PADDED: u8 = 8;
const PRIORITY: u8 = 32;

const AUTHORITY: &[u8] = b":authority";
/// Its number in HPACK's static table (RFC 7541, appendix A).
const AUTHORITY_INDEX: usize = 1;

/// A connection whose requests may name the socket's path as their authority.
#[derive(Debug)]
pub struct Heard<S = UnixStream> {
    stream: S,
    /// Read and not handed on yet.
    held: Vec<u8>,
    /// How much of that may be.
    ready: usize,
    /// How much of what comes next may be as it is: the preface, the rest of a frame that is no request.
    passing: usize,
}

impl<S> Heard<S> {
    pub(super) const fn new(stream: S) -> Self {
        Self { stream, held: Vec::new(), ready: 0, passing: PREFACE }
    }

    /// Finds what may be handed on of what is held.
    fn look(&mut self) {
        loop {
            let left = self.held.len() - self.ready;
            if self.passing > 0 || left == 0 {
                let pass = self.passing.min(left);
                (self.ready, self.passing) = (self.ready + pass, self.passing - pass);
                if pass == left {
                    return;
                }
            }
            let Some(frame) = self.held.get_mut(self.ready..).filter(|f| f.len() >= FRAME_HEADER) else {
                return;
            };
            let whole = FRAME_HEADER
                + (usize::from(frame[0]) << 16 | usize::from(frame[1]) << 8 | usize::from(frame[2]));
            // One that is too large is the server's to refuse.
            if frame[3] != HEADERS || whole > FRAME_MAX {
                self.passing = whole;
                continue;
            }
            let flags = frame[4];
            let Some(payload) = frame.get_mut(FRAME_HEADER..whole) else { return };
            let before = usize::from(flags & PADDED != 0) + if flags & PRIORITY != 0 { 5 } else { 0 };
            let _ = payload.get_mut(before..).and_then(mend);
            self.ready += whole;
        }
    }
}

/// Replaces what no host may hold in the fields `:authority` of a block of header fields (RFC 7541, 6). It ends at what it does not
/// understand, which the server judges.
fn mend(block: &mut [u8]) -> Option<()> {
    let mut at = 0;
    while let Some(first) = block.get(at).copied() {
        let prefix = match first {
            0x80.. => 7,
            0x40.. => 6,
            0x20.. => 5,
            _ => 4,
        };
        let index = integer(block, &mut at, prefix)?;
        if matches!(prefix, 5 | 7) {
            continue;
        }
        let is_authority = if index == 0 {
            let (name, is_plain) = text(block, &mut at)?;
            is_plain && *name == *AUTHORITY
        } else {
            index == AUTHORITY_INDEX
        };
        let (value, is_plain) = text(block, &mut at)?;
        match (is_authority, is_plain) {
            (true, true) => {
                value.iter_mut().filter(|byte| b" %/".contains(byte)).for_each(|byte| *byte = b'-');
            }
            (true, false) => huffman::replace(value),
            (false, _) => {}
        }
    }
    Some(())
}

/// An integer whose first byte has so many bits of it (RFC 7541, 5.1).
fn integer(block: &[u8], at: &mut usize, prefix: u32) -> Option<usize> {
    let mut next = || {
        let byte = usize::from(*block.get(*at)?);
        *at += 1;
        Some(byte)
    };
    let most = (1 << prefix) - 1;
    let mut value = next()? & most;
    if value < most {
        return Some(value);
    }
    // What is longer than a frame is none.
    for shift in [0, 7, 14] {
        let byte = next()?;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// A text, and whether it stands there as it is (RFC 7541, 5.2).
fn text<'a>(block: &'a mut [u8], at: &mut usize) -> Option<(&'a mut [u8], bool)> {
    let is_plain = block.get(*at)? & 0x80 == 0;
    let length = integer(block, at, 7)?;
    let begin = *at;
    *at += length;
    Some((block.get_mut(begin..*at)?, is_plain))
}

impl<S: AsyncRead + Unpin> AsyncRead for Heard<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let heard = self.get_mut();
        while heard.ready == 0 {
            let mut bytes = [0; 4096];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut heard.stream).poll_read(cx, &mut read))?;
            heard.held.extend_from_slice(read.filled());
            if read.filled().is_empty() {
                // The end: what is held is no whole frame, and the server's to judge.
                heard.ready = heard.held.len();
                break;
            }
            heard.look();
        }
        let now = heard.ready.min(into.remaining());
        into.put_slice(&heard.held[..now]);
        heard.held.drain(..now);
        heard.ready -= now;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Heard<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl Connected for Heard {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A frame of this kind.
    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// What grpc-python 1.85 sends for `unix:/tmp/a/s.sock`, and the same by the number of the name.
    fn block(authority: &str, named: bool) -> Vec<u8> {
        let length = u8::try_from(authority.len()).unwrap();
        let name: &[u8] = if named { b"\x40\x0a:authority" } else { b"\x41" };
        let value = [&[length], authority.as_bytes()].concat();
        [b"\x40\x05:path\x03/a%", name, &value, b"\x83\x86\x40\x02te\x08trail%rs"].concat()
    }

    /// What comes out in pieces of so many bytes.
    async fn heard(sent: &[u8], piece: usize) -> Vec<u8> {
        let (mut client, server) = tokio::io::duplex(piece);
        let mut heard = Heard::new(server);
        let mut bytes = Vec::new();
        let write = async {
            client.write_all(sent).await.unwrap();
            drop(client);
        };
        let (_, read) = tokio::join!(write, heard.read_to_end(&mut bytes));
        read.unwrap();
        bytes
    }

    #[tokio::test]
    async fn a_path_in_the_authority_becomes_a_host_and_nothing_else_changes() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let stream = |authority: &str| {
            let padded = [&[2, 0, 0, 0, 0, 9], block(authority, false).as_slice(), b"%%"].concat();
            [
                preface.to_vec(),
                frame(4, 0, b"%setti"),
                frame(HEADERS, 4, &block(authority, true)),
                frame(0, 1, b"\x41\x05%data"),
                frame(HEADERS, 4 | PADDED | PRIORITY, &padded),
            ]
            .concat()
        };
        for piece in [1, 7, 64, 4096] {
            assert_eq!(
                heard(&stream("tmp%2Fa%2Fs.sock"), piece).await,
                stream("tmp-2Fa-2Fs.sock"),
                "{piece}"
            );
        }
    }

    /// What grpc-go 1.85 sends for the target `/tmp/a/s.sock`, and 1.50, which sends slashes; with the `:path` before it, in
    /// Huffman code, too, where slashes stay.
    #[tokio::test]
    async fn a_path_in_huffman_code_becomes_a_host_and_nothing_else_changes() {
        let path: &[u8] = b"\x83\x86\x45\x8a\x61\x34\xd6\xc0\xd8\x42\xe8\x39\x3a\xff";
        for (sent, mended) in [
            (
                b"\x41\x8e\x54\x58\x53\x4d\x6a\x8b\x08\xd5\x16\x14\x2e\x83\x93\xaf".as_slice(),
                b"\x41\x8e\x58\x58\x53\x4d\x6b\x0b\x08\xd6\x16\x14\x2e\x83\x93\xaf".as_slice(),
            ),
            (
                b"\x41\x8a\x61\x34\xd6\xc0\xd8\x42\xe8\x39\x3a\xff",
                b"\x41\x8a\x59\x34\xd6\xb0\xd6\x42\xe8\x39\x3a\xff",
            ),
        ] {
            let stream = |authority: &[u8]| {
                let block = [path, authority, b"\x5f\x02%/"].concat();
                [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(HEADERS, 4, &block)].concat()
            };
            let heard = heard(&stream(sent), 4096).await;
            assert_eq!(heard, stream(mended), "{heard:x?}");
        }
    }

    #[tokio::test]
    async fn what_is_not_understood_is_passed_on_as_it_is() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let cut = frame(HEADERS, 4, b"\x41\x7f%cut");
        let huge = [&[0xff, 0xff, 0xff, HEADERS, 4, 0, 0, 0, 1], b"\x41\x01%".as_slice()].concat();
        for odd in
            [b"GET / HTTP/1.1\r\n\r\n".to_vec(), [preface.clone(), cut].concat(), [preface, huge].concat()]
        {
            assert_eq!(heard(&odd, 16).await, odd);
        }
        assert_eq!(heard(b"", 16).await, b"");
    }
}
