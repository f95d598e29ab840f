//! A small NBD client ("NBD_OPT_EXPORT_NAME", simple replies).

#![allow(dead_code, reason = "each test uses its part")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const WRITE_ZEROES: u16 = 6;

pub(crate) struct Client {
    stream: File,
    cookie: u64,
}

impl Client {
    /// The volume's export on this host.
    pub(crate) fn of(volume: &str) -> Self {
        Self::over(UnixStream::connect(socket(volume)).unwrap(), volume)
    }

    /// The same on a connection of any kind.
    pub(crate) fn over(stream: impl Into<OwnedFd>, volume: &str) -> Self {
        let mut stream = File::from(stream.into());
        let mut hello = [0; 18];
        stream.read_exact(&mut hello).unwrap();
        // Fixed newstyle, no zeroes.
        stream.write_all(&3_u32.to_be_bytes()).unwrap();
        let name_len = u32::try_from(volume.len()).unwrap();
        let option = [&b"IHAVEOPT"[..], &1_u32.to_be_bytes(), &name_len.to_be_bytes(), volume.as_bytes()];
        stream.write_all(&option.concat()).unwrap();
        stream.read_exact(&mut [0; 10]).unwrap();
        Self { stream, cookie: 0 }
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.request(WRITE, offset, bytes.len(), bytes);
    }

    /// A write whose answer is not waited for yet.
    pub(crate) fn begin_write(&mut self, offset: u64, bytes: &[u8]) {
        self.send(WRITE, offset, bytes.len(), bytes);
    }

    pub(crate) fn zero(&mut self, offset: u64, length: usize) {
        self.request(WRITE_ZEROES, offset, length, &[]);
    }

    pub(crate) fn flush(&mut self) {
        self.request(FLUSH, 0, 0, &[]);
    }

    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        self.request(READ, offset, length, &[]);
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn request(&mut self, kind: u16, offset: u64, length: usize, data: &[u8]) {
        self.send(kind, offset, length, data);
        self.end();
    }

    fn send(&mut self, kind: u16, offset: u64, length: usize, data: &[u8]) {
        self.cookie += 1;
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
        request.extend(kind.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(u32::try_from(length).unwrap().to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request).unwrap();
    }

    /// What was begun has ended well.
    pub(crate) fn end(&mut self) {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4], "an error of the volume");
    }
}

/// Somebody greets those who come. A listening socket outlives its engine, and says nothing of that.
pub(crate) fn is_served(volume: &str) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket(volume)) else { return false };
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    stream.read_exact(&mut [0; 18]).is_ok()
}

fn socket(volume: &str) -> impl AsRef<Path> {
    format!("/run/longhorn/{volume}.nbd.sock")
}
