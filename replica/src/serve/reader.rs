//! Readers: who asks for the bytes of a snapshot, or where two differ, beside the engine and without one.
//!
//! Each has a thread of its own that reads the directory as any other program does ([`SnapshotView::open_beside`]): it
//! touches neither the ring nor what the engine is let in by, and fences nobody. It hears of snapshots alone, and only of
//! those that do not change: a removed one may be folded, and what a replica that was without power lacks of one that is
//! not settled (`docs/invariants.md`, 9) is not known.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lh_wire::handshake::WELCOME_LEN;
use lh_wire::{
    Ask, HEADER_LEN, Header, Looked, MAX_DATA, MAX_PAYLOAD, MapPage, OpCode, Opened, Status as Answer, flags,
};

use super::{Mode, Status};
use crate::store::{NotLasting, SnapshotView, lasting};

/// Readers at once: each holds an index of its snapshot, and of the one that it is compared with.
pub(super) const READERS_MAX: usize = 4;

/// How long a reader that asks for nothing, or takes no answer, is kept.
const PATIENCE: Duration = Duration::from_secs(300);

/// How often a waiting reader's thread looks whether the server ends.
const LOOK: Duration = Duration::from_secs(1);

/// What readers' threads stand on.
#[derive(Debug)]
pub(super) struct Readers {
    directory: PathBuf,
    status: Status,
    count: Arc<AtomicUsize>,
}

/// One reader less when it is dropped.
pub(super) struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Readers {
    pub(super) fn new(directory: PathBuf, status: Status) -> Self {
        Self { directory, status, count: Arc::default() }
    }

    /// Room for one more, as long as it is kept.
    pub(super) fn place(&self) -> Option<Place> {
        let taken = self
            .count
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < READERS_MAX).then_some(n + 1));
        taken.ok().map(|_| Place(Arc::clone(&self.count)))
    }

    /// Gives a connection that has proved a key a thread of its own, which says the last word of the handshake first.
    pub(super) fn start(
        &self,
        place: Place,
        fd: OwnedFd,
        is_unix: bool,
        checksums: bool,
        may_read: bool,
        welcome: [u8; WELCOME_LEN],
    ) -> io::Result<()> {
        let (directory, status) = (self.directory.clone(), self.status.clone());
        let reader = Reader { directory, status, checksums, may_read, open: None };
        let thread = std::thread::Builder::new().name("reader".into()).spawn(move || {
            let _place = place;
            if let Err(e) = reader.converse(fd, is_unix, &welcome) {
                tracing::debug!("a reader is gone: {e}");
            }
        });
        thread.map(drop)
    }
}

/// The snapshot that a reader has chosen.
struct Open {
    snapshot: String,
    /// When it was taken: another one may have got its name since.
    created: String,
    view: SnapshotView,
    base: Option<SnapshotView>,
}

/// One reader's thread.
struct Reader {
    directory: PathBuf,
    status: Status,
    checksums: bool,
    /// It knows the volume's key, not only what lets it ask for maps.
    may_read: bool,
    open: Option<Open>,
}

/// What a request comes to: a payload, or a refusal in one sentence.
type Reply = Result<Vec<u8>, String>;

impl Reader {
    fn converse(self, fd: OwnedFd, is_unix: bool, welcome: &[u8]) -> io::Result<()> {
        if is_unix {
            let stream = UnixStream::from(fd);
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(LOOK))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            self.serve(stream, welcome)
        } else {
            let stream = TcpStream::from(fd);
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(LOOK))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            self.serve(stream, welcome)
        }
    }

    fn serve(mut self, mut stream: impl Read + Write, welcome: &[u8]) -> io::Result<()> {
        stream.write_all(welcome)?;
        loop {
            let mut bytes = [0; HEADER_LEN];
            self.receive(&mut stream, &mut bytes)?;
            let header = Header::decode(&bytes).map_err(io::Error::other)?;
            let mut request = vec![0; usize::from(header.pad) + header.payload as usize];
            self.receive(&mut stream, &mut request)?;
            let ask = serde_json::from_slice::<Ask>(&request[usize::from(header.pad)..]);
            let reply = match (header.op, ask) {
                (OpCode::Control, Ok(ask)) => self.answer(ask),
                (_, Ok(_) | Err(_)) => Err("readers ask for snapshots, and for nothing else".to_owned()),
            };
            let (status, payload) = match reply {
                Ok(payload) => (Answer::Ok, payload),
                Err(why) => (Answer::Refused, why.into_bytes()),
            };
            let mut header = header.response(status);
            header.payload = u32::try_from(payload.len()).unwrap_or(u32::MAX);
            if self.checksums && !payload.is_empty() {
                header.flags |= flags::CRC;
                header.payload_crc = crc32c::crc32c(&payload);
            }
            stream.write_all(&header.encode())?;
            stream.write_all(&payload)?;
        }
    }

    /// Fills the buffer, unless the server ends or the patience does.
    fn receive(&self, stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut done = 0;
        while done < buffer.len() {
            match stream.read(&mut buffer[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    if self.status.is_stopping() {
                        return Err(io::ErrorKind::ConnectionAborted.into());
                    }
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn answer(&mut self, ask: Ask) -> Reply {
        match ask {
            Ask::Open { snapshot, base } => {
                self.open = None;
                let open = self.look(snapshot, base)?;
                let opened = json(&Opened { size: open.view.size() });
                self.open = Some(open);
                opened
            }
            Ask::Map { from } => json(&self.chosen()?.map(from)?),
            Ask::Look => json(&Looked { engine: self.status.snapshot().mode == Mode::Serving }),
            Ask::Read { .. } if !self.may_read => {
                Err("bytes are for those who know the volume's key".to_owned())
            }
            Ask::Read { offset, length } => {
                let open = self.chosen()?;
                if length > MAX_DATA {
                    return Err(format!("{length} bytes are more than a message holds"));
                }
                let mut bytes = vec![0; length as usize];
                let read = open.view.read_at(offset, &mut bytes);
                read.map_err(|e| format!("reading {length} bytes at {offset}: {e}"))?;
                // Whether it could be folded meanwhile is asked after the bytes were read.
                if self.check_lasting(&open.snapshot)? != open.created {
                    return Err(NotLasting::Another(open.snapshot.clone()).to_string());
                }
                Ok(bytes)
            }
        }
    }

    fn chosen(&self) -> Result<&Open, String> {
        self.open.as_ref().ok_or_else(|| "no snapshot was opened".to_owned())
    }

    fn look(&self, snapshot: String, base: Option<String>) -> Result<Open, String> {
        let open = |name: &str| SnapshotView::open_beside(&self.directory, name).map_err(|e| e.to_string());
        // Of what is not settled yet the maps may lack what a repair puts there before it is.
        for name in [Some(&snapshot), base.as_ref()].into_iter().flatten() {
            self.check_lasting(name)?;
        }
        // The base first: what was folded between the two looks then counts as changed.
        let base_view = base.as_deref().map(open).transpose()?;
        let view = open(&snapshot)?;
        let created = self.check_lasting(&snapshot)?;
        if let Some(base) = &base {
            self.check_lasting(base)?;
        }
        Ok(Open { snapshot, created, view, base: base_view })
    }

    /// Refuses a snapshot that may change, or may not be all there. Returns when it was taken.
    fn check_lasting(&self, snapshot: &str) -> Result<String, String> {
        let state = self.status.state().ok_or("the replica is ending")?;
        let layer = lasting(&state, snapshot).map_err(|why| why.to_string())?;
        Ok(layer.created.clone())
    }
}

impl Open {
    /// A page of what differs from the base, whatever it is now.
    fn map(&self, from: u64) -> Result<MapPage, String> {
        let failed = |e: io::Error| format!("the snapshot's layers: {e}");
        let mut changes = self.view.diff(self.base.as_ref(), from).map_err(failed)?.peekable();
        let mut page = MapPage::default();
        while let Some(change) = changes.next() {
            let mut extent = change.extent;
            while let Some(next) = changes.next_if(|next| next.extent.offset == extent.end()) {
                extent.len += next.extent.len;
            }
            extent.len = extent.end().min(self.view.size()).saturating_sub(extent.offset);
            page.ranges.push(extent);
            if page.ranges.len() == MapPage::RANGES_MAX {
                page.next = changes.peek().map(|next| next.extent.offset);
                break;
            }
        }
        Ok(page)
    }
}

fn json<T: serde::Serialize>(answer: &T) -> Reply {
    let bytes = serde_json::to_vec(answer).map_err(|e| e.to_string())?;
    if bytes.len() > MAX_PAYLOAD as usize {
        return Err("the answer does not fit a message".to_owned());
    }
    Ok(bytes)
}
