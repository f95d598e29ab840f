//! What the store asks of a file system, and how it finds out what that can do.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use lh_block::{BLOCK, Extent};
use lh_ring::{Falloc, sys};

use super::error::OpenError;
use super::id::Id;
use super::meta::SIZE_MAX;

/// How extents of files are found. Where FIEMAP is missing (tmpfs) SEEK_DATA and SEEK_HOLE serve; they never tell what
/// was never written, which is a hole to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// FIEMAP: of a file that is written O_DIRECT.
    Direct,
    /// FIEMAP, after what lies in the page cache is written: there, extents are told as unwritten that hold data.
    Synced,
    /// SEEK_DATA and SEEK_HOLE, which know the page cache.
    Seek,
}

/// Whether an extent was ever written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It holds data.
    Written,
    /// It takes space and reads as zero.
    Unwritten,
}

/// The extents of a file within a range of whole blocks, ascending and disjoint, in whole blocks. On file systems with
/// smaller blocks than ours a block counts as written if any part of it is.
pub(super) fn extents(file: &File, range: Extent, look: Look) -> Extents<'_> {
    let found = Vec::new();
    Extents {
        file,
        at: range.offset,
        end: range.end(),
        look,
        found,
        next: 0,
        // An empty range is none that FIEMAP takes.
        last: range.is_empty(),
        told: range.offset,
    }
}

/// See [`extents`].
pub(super) struct Extents<'a> {
    file: &'a File,
    at: u64,
    end: u64,
    look: Look,
    found: Vec<sys::FileExtent>,
    next: usize,
    last: bool,
    /// End of what was told already.
    told: u64,
}

impl Extents<'_> {
    fn fetch(&mut self) -> io::Result<()> {
        self.found.clear();
        self.next = 0;
        if self.look == Look::Seek {
            self.seek()?;
        } else {
            let sync = self.look == Look::Synced;
            match sys::fiemap(self.file, self.at, self.end - self.at, sync, &mut self.found) {
                Ok(last) => self.last = last,
                Err(err) if is_missing(&err) => self.look = Look::Seek,
                Err(err) => return Err(err),
            }
            if let Some(extent) = self.found.last() {
                self.at = (extent.logical + extent.length).max(self.at);
            } else if self.look != Look::Seek {
                self.last = true;
            }
        }
        self.last |= self.at >= self.end;
        Ok(())
    }

    fn seek(&mut self) -> io::Result<()> {
        match sys::seek_data(self.file, self.at)? {
            Some(start) if start < self.end => {
                let end = sys::seek_hole(self.file, start)?;
                self.found.push(sys::FileExtent { logical: start, length: end - start, flags: 0 });
                self.at = end;
            }
            _ => self.last = true,
        }
        Ok(())
    }
}

/// The file system has no FIEMAP.
fn is_missing(err: &io::Error) -> bool {
    [Some(libc::EOPNOTSUPP), Some(libc::ENOTTY)].contains(&err.raw_os_error())
}

impl Iterator for Extents<'_> {
    type Item = io::Result<(Extent, Kind)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            while let Some(found) = self.found.get(self.next) {
                self.next += 1;
                let extent = Extent::new(found.logical, found.length);
                let (whole, kind) = if found.is_unwritten() {
                    (extent.narrow(BLOCK), Kind::Unwritten)
                } else {
                    (extent.widen(BLOCK), Kind::Written)
                };
                let rest = Extent::new(self.told, self.end.saturating_sub(self.told));
                if let Some(part) = whole.intersection(rest) {
                    self.told = part.end();
                    return Some(Ok((part, kind)));
                }
            }
            if self.last {
                return None;
            }
            if let Err(err) = self.fetch() {
                self.last = true;
                self.found.clear();
                return Some(Err(err));
            }
        }
    }
}

/// Opens a layer's file, never through a symbolic link, and nothing but a plain file.
pub(super) fn open_layer(path: &Path, write: bool, direct: bool) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | if direct { libc::O_DIRECT } else { 0 };
    sys::open_plain(path, OpenOptions::new().read(true).write(write), flags)
}

/// Takes the file's lock, waiting until the deadline for a process that is about to end: its last writes may still be
/// in flight when it is gone, and hold the lock.
pub(super) fn lock(file: &File, path: &Path, exclusive: bool, deadline: Instant) -> Result<(), OpenError> {
    match sys::lock_until(file, exclusive, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(OpenError::InUse { file: path.to_owned(), holder: holder(file) }),
        Err(source) => Err(OpenError::Io { what: format!("locking {}", path.display()), source }),
    }
}

/// Takes the lock of a file that nobody else knows of.
pub(super) fn lock_new(file: &File) -> io::Result<()> {
    if sys::lock(file, true)? { Ok(()) } else { Err(io::Error::other("a new file is locked")) }
}

/// How often the kernel's list of locks is read. It is given in pieces, and what stands between two of them is missed when
/// somebody leaves a lock meanwhile.
const LOOKS: u32 = 5;

/// Who holds the file's lock, and what is to be done about it. A process that has ended is none that anybody could stop: what it
/// has left in flight keeps the lock until the disk has done it.
fn holder(file: &File) -> String {
    let list = || std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let pids = file.metadata().map_or(Vec::new(), |meta| find_lockers(list, meta.dev(), meta.ino()));
    let alive = pids.iter().find_map(|pid| {
        let process = Path::new("/proc").join(pid.to_string());
        let status = std::fs::read_to_string(process.join("status")).ok()?;
        // A zombie has nothing open any more.
        let has_ended = status.lines().any(|line| line.starts_with("State:\tZ"));
        let name = status.lines().next()?.strip_prefix("Name:\t")?;
        (!has_ended).then(|| format!("by process {pid} ({name}): stop it first"))
    });
    match (alive, pids.first()) {
        (Some(alive), _) => alive,
        (None, Some(pid)) => {
            format!("by what process {pid}, which has ended, left in flight: wait until its disk has done it")
        }
        (None, None) => "by another process: stop it first".to_owned(),
    }
}

/// Those of the first list that knows any.
fn find_lockers(mut list: impl FnMut() -> String, dev: u64, ino: u64) -> Vec<u32> {
    (0..LOOKS).map(|_| lockers(&list(), dev, ino)).find(|pids| !pids.is_empty()).unwrap_or_default()
}

/// The processes that hold locks of a file, from /proc/locks: "7: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF". Some file
/// systems tell another device's number there than of their files: then only the inode's counts.
fn lockers(locks: &str, dev: u64, ino: u64) -> Vec<u32> {
    let held = locks.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK").skip(3);
        let pid = words.next()?.parse().ok()?;
        let (device, inode) = words.next()?.rsplit_once(':')?;
        (inode.parse() == Ok(ino)).then(|| (device.to_owned(), pid))
    });
    let held: Vec<(String, u32)> = held.collect();
    let own = format!("{:02x}:{:02x}", libc::major(dev), libc::minor(dev));
    let has_own = held.iter().any(|(device, _)| *device == own);
    held.into_iter().filter(|(device, _)| !has_own || *device == own).map(|(_, pid)| pid).collect()
}

/// The same file without O_DIRECT, for what has no aligned memory. The first descriptor keeps the lock.
pub(super) fn reopen(file: &File) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// True for a qcow2 image, by its first bytes (qemu docs/interop/qcow2.rst).
pub(super) fn is_qcow2(file: &File) -> io::Result<bool> {
    let mut magic = [0; 4];
    match file.read_exact_at(&mut magic, 0) {
        Ok(()) => Ok(magic == *b"QFI\xfb"),
        Err(err) if err.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(err) => Err(err),
    }
}

/// Reads as much of the buffer as the file has from there on: how many bytes.
pub(super) fn read_up_to(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    Ok(done)
}

/// The same of a file that is known to have `length` bytes.
///
/// # Errors
/// The disk's; `UnexpectedEof` for a file that was cut off since.
pub(super) fn read_whole(file: &File, length: u64, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let done = read_up_to(file, offset, buffer)?;
    let end = offset + done as u64;
    if done < buffer.len() && end < length {
        let text = format!("the file ends at {end} and had {length} bytes: it was cut off");
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
    }
    Ok(done)
}

/// Makes sure that the range has its space; what is new there reads as zero.
pub(super) fn allocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    sys::fallocate(file, Falloc::Allocate, offset, len)
}

/// Makes the range a hole.
pub(super) fn punch(file: &File, extent: Extent) -> io::Result<()> {
    sys::punch_hole(file, extent.offset, extent.len)
}

/// The id in a file's attribute.
pub(super) fn id(file: &File, attribute: &str) -> io::Result<Option<Id>> {
    Ok(sys::get_xattr(file, attribute)?.as_deref().and_then(Id::parse))
}

/// Reads a small file whole, at most `max` bytes and one more.
pub(super) fn read_small(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    let file = sys::open_plain(path, OpenOptions::new().read(true), libc::O_NOFOLLOW)?;
    let mut bytes = Vec::new();
    file.take(max as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

const BLOCK_U32: u32 = 4096;
const _: () = assert!(BLOCK_U32 as u64 == BLOCK);

/// Where in its file the probe writes its block: inside a larger page, so that a file system that rounds up shows it.
const PROBE_AT: u64 = (2 << 20) + BLOCK;

/// Finds out by trying in `directory`, with a file that is gone afterwards, that its file system can keep layers, and
/// files of `size` bytes. `true`: opened O_DIRECT, too.
pub(super) fn probe(directory: &Path, size: u64) -> Result<bool, OpenError> {
    let path = directory.join("probe");
    let result = probe_with(directory, &path, size);
    match std::fs::remove_file(&path) {
        Err(source) if result.is_ok() => {
            Err(OpenError::Io { what: format!("removing {}", path.display()), source })
        }
        _ => result,
    }
}

fn probe_with(directory: &Path, path: &Path, size: u64) -> Result<bool, OpenError> {
    let failed = |source| OpenError::Io { what: format!("trying out {}", path.display()), source };
    let unfit = |reason| OpenError::FileSystem { dir: directory.to_owned(), reason };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(failed)?;
    if size > SIZE_MAX || file.set_len(size).is_err() {
        return Err(OpenError::TooLarge { dir: directory.to_owned(), size, limit: largest(&file, size) });
    }
    file.set_len(4 << 20).map_err(failed)?;
    match sys::set_xattr(&file, "user.longhorn.layer", b"probe") {
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            return Err(unfit("it has no extended attributes named user.* (tmpfs has them since Linux 6.6)"));
        }
        other => other.map_err(failed)?,
    }
    file.write_all_at(&[1; 4096], PROBE_AT).map_err(failed)?;
    file.sync_data().map_err(failed)?;
    let direct = direct_alignment(path).map_err(failed)?;
    let found = extents(&file, Extent::new(0, 4 << 20), Look::Synced)
        .collect::<io::Result<Vec<_>>>()
        .map_err(failed)?;
    if found != [(Extent::new(PROBE_AT, BLOCK), Kind::Written)] {
        return Err(unfit("it does not keep holes of 4 KiB"));
    }
    match sys::punch_hole(&file, PROBE_AT, BLOCK) {
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            return Err(unfit("it cannot punch holes"));
        }
        other => other.map_err(failed)?,
    }
    Ok(direct.is_some())
}

/// The largest size up to `size` that the file takes.
fn largest(file: &File, size: u64) -> u64 {
    if file.set_len(SIZE_MAX).is_ok() {
        return SIZE_MAX;
    }
    let (mut fits, mut fails) = (0, size.min(SIZE_MAX) / BLOCK);
    while fails - fits > 1 {
        let middle = u64::midpoint(fits, fails);
        if file.set_len(middle * BLOCK).is_ok() { fits = middle } else { fails = middle }
    }
    fits * BLOCK
}

/// ext4's magic number (include/uapi/linux/magic.h).
const EXT4: u64 = 0xef53;

/// What O_DIRECT asks for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of memory.
    pub memory: u32,
    /// Of file offsets and lengths.
    pub offset: u32,
    /// Of the memory of a write into a hole. ext4 takes memory into account when it asks whether a direct write is aligned to
    /// its blocks (`ext4_unaligned_io`, fs/ext4/file.c), and of those that are not, it lets one at a time into a hole, after all
    /// others have ended.
    pub filling: u32,
}

/// What O_DIRECT on the file asks for; `None` if there is none that works in blocks of 4 KiB.
pub(super) fn direct_alignment(path: &Path) -> io::Result<Option<Alignment>> {
    let file = match open_layer(path, true, true) {
        Ok(file) => file,
        Err(err) if err.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        Err(err) => return Err(err),
    };
    let ext4 = sys::file_system(&file)?.magic == EXT4;
    Ok(match sys::dio_align(&file) {
        Ok(Some((memory, offset))) if u64::from(offset) <= BLOCK && u64::from(memory) <= BLOCK => {
            Some(Alignment { memory, offset, filling: if ext4 { BLOCK_U32 } else { memory } })
        }
        Ok(Some(_)) => None,
        // Before Linux 6.1 the kernel does not tell; a block is right everywhere.
        Ok(None) => Some(Alignment { memory: BLOCK_U32, offset: BLOCK_U32, filling: BLOCK_U32 }),
        Err(err) if err.kind() == io::ErrorKind::Unsupported => None,
        Err(err) => return Err(err),
    })
}

/// The backing file that a path in volume.meta means: the file itself, or the only file of a directory. Relative paths
/// count from the replica directory.
pub(super) fn backing_path(directory: &Path, named: &str) -> Result<PathBuf, super::error::Damage> {
    use super::error::Damage;
    let path = directory.join(as_host_has_it(Path::new(named)));
    let Ok(meta) = path.metadata() else { return Err(Damage::BackingMissing(path)) };
    if !meta.is_dir() {
        return Ok(path);
    }
    let only = || Damage::BackingDirectory(path.clone());
    let mut files = std::fs::read_dir(&path).map_err(|_| only())?;
    match (files.next(), files.next()) {
        (Some(Ok(file)), None) => Ok(file.path()),
        _ => Err(only()),
    }
}

/// Longhorn's replicas run in a container that has the host's files below `/host`, and note backing files as they are named there. As
/// long as nothing has such a name here, the host's own name is meant.
fn as_host_has_it(named: &Path) -> PathBuf {
    match named.strip_prefix("/host") {
        Ok(below) if named.symlink_metadata().is_err() => Path::new("/").join(below),
        _ => named.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_its_own_files_on_its_own_disk() {
        let locks = "1: POSIX  ADVISORY  WRITE 9 fe:00:77 0 EOF\n2: FLOCK  ADVISORY  WRITE 8 08:01:77 0 EOF\n\
                     3: FLOCK  ADVISORY  READ 7 fe:00:77 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 6 fe:00:78 0 EOF\n";
        assert_eq!(lockers(locks, libc::makedev(0xfe, 0), 77), [7]);
        assert_eq!(lockers(locks, libc::makedev(8, 1), 77), [8]);
        assert_eq!(lockers(locks, libc::makedev(0, 33), 77), [8, 7], "a file system with numbers of its own");
        assert!(lockers(locks, libc::makedev(0xfe, 0), 79).is_empty());
    }

    #[test]
    fn a_lock_that_one_reading_missed_is_looked_for_again() {
        let mut lists = ["", "2: FLOCK  ADVISORY  WRITE 8 08:01:77 0 EOF\n"].into_iter();
        let list = || lists.next().unwrap().to_owned();
        assert_eq!(find_lockers(list, libc::makedev(8, 1), 77), [8]);
        let mut looks = 0;
        let none = || {
            looks += 1;
            String::new()
        };
        assert!(find_lockers(none, libc::makedev(8, 1), 77).is_empty());
        assert_eq!(looks, LOOKS);
    }

    #[test]
    fn nobody_is_told_to_stop_a_process_that_has_ended() {
        let place = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(place.path()).unwrap();
        let said = |file: &File| match lock(file, place.path(), true, Instant::now()) {
            Err(e) => e.to_string(),
            Ok(()) => String::new(),
        };
        let held = open();
        lock(&held, place.path(), true, Instant::now()).unwrap();
        let own = format!("by process {} (", std::process::id());
        assert!(said(&open()).contains(&own), "{}", said(&open()));
        drop(held);
        // Taken by a process that ends, on an open file that outlives it: ours.
        let shared = open();
        let taken = std::process::Command::new("flock")
            .args(["--exclusive", "0"])
            .stdin(shared.try_clone().unwrap())
            .status();
        if !taken.is_ok_and(|status| status.success()) {
            eprintln!("SKIP nobody_is_told_to_stop_a_process_that_has_ended: no flock(1)");
            return;
        }
        let said = said(&open());
        assert!(said.contains("which has ended") && !said.contains("stop it"), "{said}");
    }
}
