//! `longhorn ssync`: a sparse file copied to another place, by hand: one side receives, the other sends.

use std::io::{BufReader, BufWriter, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use lh_block::format_size;
use replica::store::{receive_file, send_file};

use crate::arguments::unix_address;
use crate::progress::Progress;
use crate::tell::tell;

/// Arguments of `ssync`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(super) struct SsyncArgs {
    #[command(subcommand)]
    side: Side,
}

const HELP: &str = "\
Examples:
  longhorn ssync receive copy.img --listen unix:/run/copy.sock
  longhorn ssync send volume-snap-monday.img --to unix:/run/copy.sock

  other$ longhorn ssync receive monday.img --listen 10.0.0.2:9999 --insecure
  here$  longhorn ssync send volume-snap-mon.img --to 10.0.0.2:9999 --insecure

For files that no process uses, whose length is a multiple of 4096. Where the
receiver has the file already, checksums are compared first and only what
differs is sent: begun again, it goes on. One copy is received, then it ends.";

#[derive(Debug, clap::Subcommand)]
enum Side {
    /// Take one file from a sender
    Receive {
        /// The file, which is made or made equal
        file: PathBuf,
        /// Where to listen: unix:PATH, or ADDRESS:PORT with --insecure
        #[arg(long, value_name = "unix:PATH|ADDRESS:PORT", value_parser = place)]
        listen: Place,
        /// Use TCP: whoever reaches the port may write the file, and reads it on its way
        #[arg(long)]
        insecure: bool,
    },
    /// Send a file to a receiver
    Send {
        /// The file, which stays as it is
        file: PathBuf,
        /// Where the receiver listens
        #[arg(long, value_name = "unix:PATH|ADDRESS:PORT", value_parser = place)]
        to: Place,
        /// Use TCP: whoever is on the way reads the file
        #[arg(long)]
        insecure: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

fn place(text: &str) -> Result<Place, String> {
    if text.starts_with("unix:") {
        return unix_address(text).map(Place::Unix);
    }
    // As addresses are written elsewhere.
    let address = text.strip_prefix("tcp:").unwrap_or(text);
    address.parse().map(Place::Tcp).map_err(|_| format!("{text:?} is neither unix:PATH nor ADDRESS:PORT"))
}

/// Both directions of a connection, each with a buffer.
struct Buffered<R: Read, W: Write> {
    read: BufReader<R>,
    write: BufWriter<W>,
}

impl<R: Read, W: Write> Buffered<R, W> {
    fn new(read: R, write: W) -> Self {
        Self {
            read: BufReader::with_capacity(1 << 16, read),
            write: BufWriter::with_capacity(1 << 16, write),
        }
    }
}

impl<R: Read, W: Write> Read for Buffered<R, W> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        self.read.read(buf)
    }
}

impl<R: Read, W: Write> Write for Buffered<R, W> {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.write.write(buf)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.write.flush()
    }
}

pub(super) fn run(args: &SsyncArgs) -> Result<()> {
    let (Side::Receive { listen: place, insecure, .. } | Side::Send { to: place, insecure, .. }) = &args.side;
    if matches!(place, Place::Tcp(_)) && !insecure {
        bail!("TCP is open to everybody on the way: say --insecure if that is meant, or use unix:PATH");
    }
    match (&args.side, place) {
        (Side::Receive { file, .. }, Place::Unix(path)) => {
            // Nobody else gets in, not even before the first look at the socket.
            let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
            let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
            rustix::process::umask(before);
            let _gone = Remove(path.clone());
            let (stream, _) = listener.accept()?;
            receive(file, Buffered::new(stream.try_clone()?, stream))
        }
        (Side::Receive { file, .. }, Place::Tcp(address)) => {
            let listener = TcpListener::bind(address).with_context(|| address.to_string())?;
            tell!("listening on {}", listener.local_addr()?);
            let (stream, _) = listener.accept()?;
            receive(file, Buffered::new(stream.try_clone()?, stream))
        }
        (Side::Send { file, .. }, Place::Unix(path)) => {
            let stream = UnixStream::connect(path).with_context(|| path.display().to_string())?;
            send(file, Buffered::new(stream.try_clone()?, stream))
        }
        (Side::Send { file, .. }, Place::Tcp(address)) => {
            let stream = TcpStream::connect(address).with_context(|| address.to_string())?;
            send(file, Buffered::new(stream.try_clone()?, stream))
        }
    }
}

/// Takes the socket's name away at the end.
struct Remove(PathBuf);

impl Drop for Remove {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn receive(file: &std::path::Path, mut stream: impl Read + Write) -> Result<()> {
    let progress = Progress::of_bytes("receiving");
    let done = receive_file(file, &mut stream, &mut |done, total| progress.at(done, total))?;
    drop(progress);
    tell!("{}: {} received", file.display(), format_size(done.sent));
    Ok(())
}

fn send(file: &std::path::Path, mut stream: impl Read + Write) -> Result<()> {
    let progress = Progress::of_bytes("sending");
    let done = send_file(file, &mut stream, &mut |done, total| progress.at(done, total))?;
    drop(progress);
    tell!("{}: {} of {} sent", file.display(), format_size(done.sent), format_size(done.held));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_as_it_is_written_elsewhere() {
        let address = Place::Tcp(([10, 0, 0, 2], 9999).into());
        assert_eq!(place("10.0.0.2:9999"), Ok(address.clone()));
        assert_eq!(place("tcp:10.0.0.2:9999"), Ok(address));
        assert_eq!(place("unix:/run/copy.sock"), Ok(Place::Unix("/run/copy.sock".into())));
        assert!(place("tcp:unix:/run/copy.sock").is_err() && place("tcp:").is_err());
    }
}
