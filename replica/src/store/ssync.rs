//! Copying a sparse file to another process by what it holds: extents only, holes as holes. Where the target held something
//! before, checksums of both are compared first, and only what differs is sent. `docs/formats/ssync.md` has the messages.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use lh_block::{BLOCK, Extent};
use thiserror::Error;

use super::checksum::Crc64;
use super::disk::{self, Kind, Look};
use super::fold::{FoldFilesError, Layer, open_by_hand};

const MAGIC: &[u8; 8] = b"LHssync1";
const WINDOW: u64 = 1 << 20;
const PART: u64 = 64 << 10;
const HOLE: u8 = 1;
const DATA: u8 = 2;
const SUMS: u8 = 3;
const END: u8 = 4;
/// Bytes of the two checksums of a part.
const SUM: usize = 12;

/// Longest file that is taken: what a file system of today holds.
const LENGTH_MAX: u64 = 1 << 60;

/// Why a file was not copied. Begun again, it goes on: what is there already is not sent twice.
#[derive(Debug, Error)]
pub enum SsyncError {
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] FoldFilesError),
    /// The other side, or the disk.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The other side speaks something else.
    #[error("the other side is no `longhorn ssync`: {0}")]
    Protocol(&'static str),
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> SsyncError {
    move |source| SsyncError::Io { what, source }
}

/// What a copy has done, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ssynced {
    /// Looked at: what the file holds.
    pub held: u64,
    /// Sent: what the target lacked.
    pub sent: u64,
}

/// Sends a file that no process uses. `progress`: bytes done, and in all.
///
/// # Errors
/// [`SsyncError`].
pub fn send_file(
    path: &Path,
    stream: &mut (impl Read + Write),
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Ssynced, SsyncError> {
    let layer = open_by_hand(path, false)?;
    let io = failed("sending the file");
    let held = held(&layer).map_err(&io)?;
    let total = held.iter().map(|r| r.len).sum();
    stream.write_all(MAGIC).and_then(|()| stream.write_all(&layer.length.to_le_bytes())).map_err(&io)?;
    stream.flush().map_err(&io)?;
    let existed = match read_byte(stream).map_err(&io)? {
        0 => false,
        1 => true,
        _ => return Err(SsyncError::Protocol("it did not say whether it has the file")),
    };
    let (mut done, mut at) = (Ssynced::default(), 0);
    progress(0, total);
    for range in held {
        tell_hole(stream, at, range.offset, existed).map_err(&io)?;
        at = range.end();
        for offset in (range.offset..range.end()).step_by(1 << 20) {
            let window = Extent::new(offset, WINDOW.min(range.end() - offset));
            done.sent += send_window(&layer.file, stream, window, existed).map_err(&io)?;
            done.held += window.len;
            progress(done.held, total);
        }
    }
    tell_hole(stream, at, layer.length, existed).map_err(&io)?;
    send_head(stream, END, Extent::new(0, 0)).and_then(|()| stream.flush()).map_err(&io)?;
    match read_byte(stream).map_err(failed("waiting until the file is on the other side's disk"))? {
        1 => Ok(done),
        _ => Err(SsyncError::Protocol("it did not say that the file is on its disk")),
    }
}

fn held(layer: &Layer) -> io::Result<Vec<Extent>> {
    let counts = |kind| kind == Kind::Written || !layer.ours;
    let found = disk::extents(&layer.file, Extent::new(0, layer.length), Look::Synced);
    found
        .filter_map(|found| match found {
            Ok((range, kind)) => counts(kind).then_some(Ok(range)),
            Err(e) => Some(Err(e)),
        })
        .collect()
}

fn tell_hole(stream: &mut impl Write, from: u64, to: u64, existed: bool) -> io::Result<()> {
    // A new file is all hole.
    if !existed || to <= from { Ok(()) } else { send_head(stream, HOLE, Extent::new(from, to - from)) }
}

fn send_head(stream: &mut impl Write, kind: u8, range: Extent) -> io::Result<()> {
    let mut head = [0; 17];
    head[0] = kind;
    head[1..9].copy_from_slice(&range.offset.to_le_bytes());
    head[9..].copy_from_slice(&range.len.to_le_bytes());
    stream.write_all(&head)
}

fn send_window(
    file: &File,
    stream: &mut (impl Read + Write),
    window: Extent,
    existed: bool,
) -> io::Result<u64> {
    let mut bytes = vec![0; usize::try_from(window.len).unwrap_or(0)];
    file.read_exact_at(&mut bytes, window.offset)?;
    if !existed {
        send_head(stream, DATA, window)?;
        stream.write_all(&bytes)?;
        return Ok(window.len);
    }
    send_head(stream, SUMS, window)?;
    stream.write_all(&sums(&bytes))?;
    stream.flush()?;
    let mut differ = [0; 2];
    stream.read_exact(&mut differ)?;
    let (differ, mut sent, part) = (u16::from_le_bytes(differ), 0, usize::try_from(PART).unwrap_or(0));
    for (n, part) in bytes.chunks(part).enumerate().filter(|(n, _)| differ >> n & 1 == 1) {
        let range = Extent::new(window.offset + n as u64 * PART, part.len() as u64);
        send_head(stream, DATA, range)?;
        stream.write_all(part)?;
        sent += range.len;
    }
    Ok(sent)
}

/// Both checksums of each part: together they miss a difference once in 2^96.
fn sums(bytes: &[u8]) -> Vec<u8> {
    let part = usize::try_from(PART).unwrap_or(1);
    let mut sums = Vec::with_capacity(bytes.len().div_ceil(part) * SUM);
    for part in bytes.chunks(part) {
        let mut crc = Crc64::new();
        crc.update(part);
        sums.extend_from_slice(&crc32c::crc32c(part).to_le_bytes());
        sums.extend_from_slice(&crc.finish().to_le_bytes());
    }
    sums
}

/// Takes a file from a sender. It is made if it is not there. `progress`: bytes of the file that are through, and its length.
///
/// # Errors
/// [`SsyncError`]; the file then holds a part of what was sent.
pub fn receive_file(
    path: &Path,
    stream: &mut (impl Read + Write),
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Ssynced, SsyncError> {
    let io = failed("receiving the file");
    let mut magic = [0; 8];
    stream.read_exact(&mut magic).map_err(&io)?;
    let length = read_u64(stream).map_err(&io)?;
    if magic != *MAGIC || !length.is_multiple_of(BLOCK) || length > LENGTH_MAX {
        return Err(SsyncError::Protocol("it begins otherwise"));
    }
    let existed = path.exists();
    if !existed {
        File::create_new(path).map_err(failed("making the file"))?;
    }
    let layer = open_by_hand(path, true)?;
    layer.file.set_len(length).map_err(failed("giving the file its length"))?;
    stream.write_all(&[u8::from(existed)]).and_then(|()| stream.flush()).map_err(&io)?;
    let (mut done, mut bytes) = (Ssynced::default(), Vec::new());
    loop {
        let kind = read_byte(stream).map_err(&io)?;
        let range = Extent::new(read_u64(stream).map_err(&io)?, read_u64(stream).map_err(&io)?);
        let most = if kind == HOLE { LENGTH_MAX } else { WINDOW };
        let inside = range.offset.checked_add(range.len).is_some_and(|end| end <= length);
        if !inside || range.len > most || !range.is_aligned(BLOCK) {
            return Err(SsyncError::Protocol("a range lies outside of the file"));
        }
        bytes.resize(usize::try_from(range.len).unwrap_or(0).min(1 << 20), 0);
        match kind {
            HOLE => disk::punch(&layer.file, range).map_err(failed("punching a hole"))?,
            DATA => {
                stream.read_exact(&mut bytes).map_err(&io)?;
                layer.file.write_all_at(&bytes, range.offset).map_err(failed("writing the file"))?;
                done.sent += range.len;
            }
            SUMS => {
                layer.file.read_exact_at(&mut bytes, range.offset).map_err(failed("reading the file"))?;
                compare(stream, &bytes, |part| {
                    is_held(&layer.file, Extent::new(range.offset + part.offset, part.len))
                })
                .map_err(&io)?;
            }
            END => break,
            _ => return Err(SsyncError::Protocol("an unknown message")),
        }
        done.held += if kind == HOLE { 0 } else { range.len };
        progress(range.end(), length);
    }
    layer.file.sync_all().map_err(failed("syncing the file"))?;
    sync_directory(path).map_err(failed("syncing the file's directory"))?;
    stream.write_all(&[1]).and_then(|()| stream.flush()).map_err(&io)?;
    Ok(done)
}

/// Says which parts of a window differ, given the own bytes. What the sender has there is data: zeroes that hide what the layers
/// below hold. So a part that reads the same differs all the same unless `is_held` says that it is data here, too.
fn compare(
    stream: &mut (impl Read + Write),
    bytes: &[u8],
    is_held: impl Fn(Extent) -> io::Result<bool>,
) -> io::Result<()> {
    let own = sums(bytes);
    let mut theirs = vec![0; own.len()];
    stream.read_exact(&mut theirs)?;
    let part = usize::try_from(PART).unwrap_or(1);
    let mut differ = 0_u16;
    for (n, (bytes, (own, theirs))) in
        bytes.chunks(part).zip(own.chunks(SUM).zip(theirs.chunks(SUM))).enumerate()
    {
        let place = Extent::new(n as u64 * PART, bytes.len() as u64);
        if own != theirs || (may_have_a_hole(bytes) && !is_held(place)?) {
            differ |= 1 << n;
        }
    }
    stream.write_all(&differ.to_le_bytes())?;
    stream.flush()
}

/// A hole reads as zeroes.
fn may_have_a_hole(bytes: &[u8]) -> bool {
    bytes.chunks(usize::try_from(BLOCK).unwrap_or(1)).any(|block| block.iter().all(|byte| *byte == 0))
}

/// Every block of the range holds data. What was never written is none, though SEEK_DATA calls it so once it was read: its zeroes
/// are in the page cache then.
fn is_held(file: &File, range: Extent) -> io::Result<bool> {
    let mut held = 0;
    for found in disk::extents(file, range, Look::Synced) {
        let (extent, kind) = found?;
        held += if kind == Kind::Written { extent.len } else { 0 };
    }
    Ok(held == range.len)
}

fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn read_byte(stream: &mut impl Read) -> io::Result<u8> {
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn read_u64(stream: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use lh_ring::{Falloc, sys};

    use super::*;

    fn file(path: &Path, blocks: u64, held: &[(u64, u8)]) {
        let file = File::create_new(path).unwrap();
        file.set_len(blocks * BLOCK).unwrap();
        held.iter().for_each(|(at, byte)| file.write_all_at(&[*byte; 4096], at * BLOCK).unwrap());
    }

    fn copy(from: &Path, to: &Path) -> (Result<Ssynced, SsyncError>, Result<Ssynced, SsyncError>) {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let to = to.to_owned();
        let receiver = std::thread::spawn(move || receive_file(&to, &mut there, &mut |_, _| ()));
        let sent = send_file(from, &mut here, &mut |_, _| ());
        drop(here);
        (sent, receiver.join().unwrap())
    }

    #[test]
    fn a_new_file_gets_what_is_held_and_holes_stay_holes() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("a"), place.path().join("b"));
        file(&from, 4096, &[(0, 1), (1, 2), (300, 3), (4095, 4)]);
        let (sent, received) = copy(&from, &to);
        let (sent, received) = (sent.unwrap(), received.unwrap());
        assert_eq!(sent.sent, received.sent);
        assert!(sent.sent >= 4 * BLOCK && sent.sent <= 64 * BLOCK, "{sent:?}");
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20, "it became dense");
    }

    #[test]
    fn only_what_differs_is_sent_and_what_is_too_much_goes() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("a"), place.path().join("b"));
        let held: Vec<(u64, u8)> = (0..600).map(|n| (n, u8::try_from(n % 250).unwrap() + 1)).collect();
        file(&from, 2048, &held);
        file(&to, 4096, &held);
        let other = File::options().write(true).open(&to).unwrap();
        other.write_all_at(&[9; 10], 17 * BLOCK + 5).unwrap();
        other.write_all_at(&[9; 4096], 2000 * BLOCK).unwrap();
        drop(other);
        let (sent, received) = copy(&from, &to);
        received.unwrap();
        assert_eq!(sent.unwrap().sent, PART, "one part differs");
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert_eq!(copy(&from, &to).0.unwrap().sent, 0);
    }

    /// Zeroes of a layer hide what the layers below hold; a hole does not.
    #[test]
    fn zeroes_that_the_sender_holds_become_no_hole() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("a"), place.path().join("b"));
        file(&from, 64, &[(3, 0), (20, 0), (21, 5)]);
        file(&to, 64, &[(21, 5)]);
        copy(&from, &to).1.unwrap();
        let held = |path: &Path| {
            let file = File::open(path).unwrap();
            disk::extents(&file, Extent::new(0, 64 * BLOCK), Look::Synced)
                .map(|found| found.unwrap().0)
                .fold(0, |held, extent| held + extent.len)
        };
        assert!(held(&from) >= 3 * BLOCK);
        assert_eq!(held(&to), held(&from));
        assert_eq!(copy(&from, &to).0.unwrap().sent, 0, "now it has all of it");
    }

    /// What a power cut leaves of a write that was never flushed. Our layers count it as a hole, and a look at its bytes brings it into
    /// the page cache.
    #[test]
    fn what_the_target_never_wrote_is_no_zeroes_of_the_sender() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("a"), place.path().join("b"));
        file(&from, 64, &[(3, 0), (4, 0), (40, 5)]);
        file(&to, 64, &[(40, 5)]);
        let target = File::options().write(true).open(&to).unwrap();
        sys::fallocate(&target, Falloc::Allocate, 3 * BLOCK, 2 * BLOCK).unwrap();
        target.sync_all().unwrap();
        let never_written = |path: &Path| {
            let file = File::open(path).unwrap();
            let found = disk::extents(&file, Extent::new(0, 64 * BLOCK), Look::Synced);
            found.map(|found| found.unwrap()).filter(|(_, kind)| *kind == Kind::Unwritten).count()
        };
        if never_written(&to) == 0 {
            return println!(
                "SKIP what_the_target_never_wrote_is_no_zeroes_of_the_sender: the file system does not tell what was never written"
            );
        }
        copy(&from, &to).1.unwrap();
        assert_eq!(never_written(&to), 0, "what is below the target's layer shows through");
        assert_eq!(copy(&from, &to).0.unwrap().sent, 0, "now it has all of it");
    }

    #[test]
    fn an_empty_file_and_strangers() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("a"), place.path().join("b"));
        file(&from, 0, &[]);
        assert_eq!(copy(&from, &to).0.unwrap(), Ssynced::default());
        assert_eq!(to.metadata().unwrap().len(), 0);
        let (mut here, mut there) = UnixStream::pair().unwrap();
        here.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let refused = receive_file(&to, &mut there, &mut |_, _| ());
        assert!(matches!(refused, Err(SsyncError::Protocol(_))), "{refused:?}");
        // A range outside of the file that was announced.
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&8192_u64.to_le_bytes());
        bytes.push(DATA);
        bytes.extend_from_slice(&8192_u64.to_le_bytes());
        bytes.extend_from_slice(&4096_u64.to_le_bytes());
        here.write_all(&bytes).unwrap();
        let (mut here, mut there) = UnixStream::pair().unwrap();
        here.write_all(&bytes).unwrap();
        let refused = receive_file(&place.path().join("c"), &mut there, &mut |_, _| ());
        assert!(matches!(refused, Err(SsyncError::Protocol(_))), "{refused:?}");
        assert_eq!(place.path().join("c").metadata().unwrap().len(), 8192);
    }
}
