//! A small blocking NBD client (protocol document, "Fixed newstyle negotiation" and "Simple replies"): the tests' own, so
//! that the server is not judged by its own code.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const OPT_EXPORT_NAME: u32 = 1;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// NBD_CMD_READ.
pub const READ: u16 = 0;
/// NBD_CMD_WRITE.
pub const WRITE: u16 = 1;
/// NBD_CMD_FLUSH.
pub const FLUSH: u16 = 3;
/// NBD_CMD_TRIM.
pub const TRIM: u16 = 4;
/// NBD_CMD_WRITE_ZEROES.
pub const WRITE_ZEROES: u16 = 6;

/// NBD_CMD_FLAG_FUA.
pub const FUA: u16 = 1;
/// NBD_CMD_FLAG_NO_HOLE, of NBD_CMD_WRITE_ZEROES.
pub const NO_HOLE: u16 = 1 << 1;

/// One connection in the transmission phase.
pub struct Connection {
    stream: UnixStream,
    /// Size of the export in bytes.
    pub size: u64,
}

/// A reply's cookie and error number; the data of a read stays in the stream for [`Connection::read_data`].
pub struct Reply {
    /// As in the request.
    pub cookie: u64,
    /// 0, or an errno.
    pub error: u32,
}

impl Connection {
    /// Connects to an export over a unix socket.
    ///
    /// # Errors
    /// Connecting failed, or the other side is no NBD server with this export.
    pub fn open(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        stream.set_write_timeout(Some(Duration::from_secs(120)))?;
        let mut hello = [0; 18];
        stream.read_exact(&mut hello)?;
        if &hello[..8] != b"NBDMAGIC" || hello[8..16] != IHAVEOPT.to_be_bytes() {
            return Err(io::Error::other("no NBD server"));
        }
        // NBD_FLAG_C_FIXED_NEWSTYLE | NBD_FLAG_C_NO_ZEROES
        stream.write_all(&3_u32.to_be_bytes())?;
        let name = u32::try_from(export.len()).map_err(io::Error::other)?;
        stream.write_all(&IHAVEOPT.to_be_bytes())?;
        stream.write_all(&OPT_EXPORT_NAME.to_be_bytes())?;
        stream.write_all(&name.to_be_bytes())?;
        stream.write_all(export.as_bytes())?;
        let mut info = [0; 10];
        stream.read_exact(&mut info)?;
        let size = u64::from_be_bytes(info[..8].try_into().map_err(io::Error::other)?);
        Ok(Self { stream, size })
    }

    /// What ends the connection from another thread: its `shutdown`.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn handle(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }

    /// Sends a request with these flags; `data` goes with a write.
    ///
    /// # Errors
    /// The connection broke.
    pub fn request(
        &mut self,
        (command, flags): (u16, u16),
        cookie: u64,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> io::Result<()> {
        let mut head = [0; 28];
        head[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        head[4..6].copy_from_slice(&flags.to_be_bytes());
        head[6..8].copy_from_slice(&command.to_be_bytes());
        head[8..16].copy_from_slice(&cookie.to_be_bytes());
        head[16..24].copy_from_slice(&offset.to_be_bytes());
        head[24..].copy_from_slice(&length.to_be_bytes());
        let mut message = Vec::with_capacity(28 + data.len());
        message.extend_from_slice(&head);
        message.extend_from_slice(data);
        self.stream.write_all(&message)
    }

    /// Waits for the next reply's header.
    ///
    /// # Errors
    /// The connection broke, or something else than a simple reply came.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        if head[..4] != SIMPLE_REPLY_MAGIC.to_be_bytes() {
            return Err(io::Error::other("no simple reply"));
        }
        let error = u32::from_be_bytes(head[4..8].try_into().map_err(io::Error::other)?);
        let cookie = u64::from_be_bytes(head[8..].try_into().map_err(io::Error::other)?);
        Ok(Reply { cookie, error })
    }

    /// Takes the data of a successful read behind its reply.
    ///
    /// # Errors
    /// The connection broke.
    pub fn read_data(&mut self, out: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(out)
    }
}
