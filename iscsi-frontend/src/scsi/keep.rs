//! What outlives the process: reservations and modes, in a small file.
//!
//! - A change is durable before it is acknowledged: written beside the old file, synced, renamed over it, the directory
//!   synced. A crash at any point leaves the old state or the new one.
//! - A change that fails once the name has changed may be there or not ([`SaveError::Unknown`]): who asked for it writes down
//!   again what holds, before anybody is told of it.
//! - What is found at the start is made durable before anybody is told of it: the process before may have died between the
//!   rename and the sync.
//! - A file whose checksum is wrong is not believed, nor overwritten: who starts the target has to decide.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::mode::Modes;
use super::reservation::{Kind, PORT_MAX, REGISTRATIONS_MAX, Registration, Reservations};

/// First line: name and version.
const HEADER: &str = "longhorn-scsi 1";

/// Longest file: all registrations with the longest names, and some.
const FILE_MAX: u64 = (REGISTRATIONS_MAX * (PORT_MAX + 64) + 4096) as u64;

/// Where the state of a logical unit is kept.
pub trait Store {
    /// True if what is saved is there after the process, as "persist through power loss" promises (SPC-4, 5.13.5).
    fn outlives(&self) -> bool;

    /// What was saved last; `None` if nothing ever was.
    ///
    /// # Errors
    /// The system's.
    fn load(&mut self) -> io::Result<Option<Vec<u8>>>;

    /// Makes it durable, all or nothing.
    ///
    /// # Errors
    /// [`SaveError`]: whether the old state is there, or nobody knows which of the two.
    fn save(&mut self, bytes: &[u8]) -> Result<(), SaveError>;
}

/// Why a state was not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// What was saved before is there, as if nobody had asked.
    #[error("{0}")]
    Unchanged(io::Error),
    /// What was saved before is there, or this: the next start may find either.
    #[error("half done: {0}")]
    Unknown(io::Error),
}

/// Mode of the file: who holds reservations by which keys is nobody else's affair.
const PRIVATE: u32 = 0o600;

/// A file. The queue's thread waits for its syncs: reservations change when a cluster does, not per request.
#[derive(Debug)]
pub struct FileStore(PathBuf);

impl FileStore {
    /// The file of this path, in a directory that exists.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// The directory that has its name.
    fn directory(&self) -> io::Result<File> {
        File::open(self.0.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new(".")))
    }

    /// Writes a new file beside it: its name.
    fn write_beside(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let new = self.0.with_extension("new");
        let mut options = File::options();
        let mut file = options.write(true).create(true).truncate(true).mode(PRIVATE).open(&new)?;
        // One that a crash has left may have another mode.
        file.set_permissions(fs::Permissions::from_mode(PRIVATE))?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(new)
    }
}

impl Store for FileStore {
    fn outlives(&self) -> bool {
        true
    }

    fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
        let found = match fs::metadata(&self.0) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        if found.len() > FILE_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "longer than such a file can be"));
        }
        self.directory()?.sync_all()?;
        fs::read(&self.0).map(Some)
    }

    fn save(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        // Whatever can be missing is missed before the name changes.
        let directory = self.directory().map_err(SaveError::Unchanged)?;
        let new = self.write_beside(bytes).map_err(SaveError::Unchanged)?;
        fs::rename(&new, &self.0).and_then(|()| directory.sync_all()).map_err(SaveError::Unknown)
    }
}

/// Keeps nothing: for units whose state may end with the process.
#[derive(Debug, Default)]
pub struct NoStore;

impl Store for NoStore {
    fn outlives(&self) -> bool {
        false
    }

    fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn save(&mut self, _bytes: &[u8]) -> Result<(), SaveError> {
        Ok(())
    }
}

/// Why what was saved cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// Not such a file, or cut off, or changed by somebody else.
    #[error("the checksum is wrong")]
    Checksum,
    /// Of a later version.
    #[error("not of version 1")]
    Version,
    /// The checksum is right, the contents are not.
    #[error("line {0} is not understood")]
    Line(usize),
}

/// Everything that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Mode switches.
    pub modes: Modes,
    /// Persistent reservations.
    pub reservations: Reservations,
}

impl Kept {
    /// As a file (`docs/formats/iscsi.md`).
    pub fn encode(&self) -> Vec<u8> {
        let Self { modes, reservations: r } = self;
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{HEADER}");
        let _ = writeln!(text, "write-cache {}", u8::from(modes.write_cache));
        let _ = writeln!(text, "protected {}", u8::from(modes.protected));
        let _ = writeln!(text, "generation {}", r.generation);
        let _ = writeln!(text, "aptpl {}", u8::from(r.aptpl));
        for Registration { port, key } in &r.registrations {
            let _ = writeln!(text, "registration {key:016x} {port}");
        }
        if let Some((kind, port)) = &r.holder {
            let _ = writeln!(text, "reservation {} {port}", *kind as u8);
        }
        let sum = crc32c::crc32c(text.as_bytes());
        let _ = writeln!(text, "crc32c {sum:08x}");
        text.into_bytes()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Unreadable> {
        let text = std::str::from_utf8(bytes).map_err(|_| Unreadable::Checksum)?;
        let (body, sum) = text.trim_end_matches('\n').rsplit_once("\ncrc32c ").ok_or(Unreadable::Checksum)?;
        let body = &text[..=body.len()];
        if u32::from_str_radix(sum, 16) != Ok(crc32c::crc32c(body.as_bytes())) {
            return Err(Unreadable::Checksum);
        }
        let mut lines = body.lines();
        if lines.next() != Some(HEADER) {
            return Err(Unreadable::Version);
        }
        let mut kept = Self {
            modes: Modes { write_cache: true, protected: false },
            reservations: Reservations::default(),
        };
        for (number, line) in lines.enumerate() {
            kept.line(line).ok_or(Unreadable::Line(number + 2))?;
        }
        Ok(kept)
    }

    fn line(&mut self, line: &str) -> Option<()> {
        let r = &mut self.reservations;
        let (name, rest) = line.split_once(' ')?;
        match name {
            "write-cache" => self.modes.write_cache = flag(rest)?,
            "protected" => self.modes.protected = flag(rest)?,
            "generation" => r.generation = rest.parse().ok()?,
            "aptpl" => r.aptpl = flag(rest)?,
            "registration" if r.registrations.len() < REGISTRATIONS_MAX => {
                let (key, port) = rest.split_once(' ')?;
                let key = u64::from_str_radix(key, 16).ok().filter(|key| *key != 0)?;
                r.registrations.push(Registration { port: port.to_owned(), key });
            }
            "reservation" => {
                let (kind, port) = rest.split_once(' ')?;
                r.holder = Some((Kind::of(kind.parse().ok()?)?, port.to_owned()));
            }
            _ => return None,
        }
        Some(())
    }
}

fn flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Kept {
        let port = "iqn.2000-01.a:one,i,0x400000000001".to_owned();
        Kept {
            modes: Modes { write_cache: false, protected: true },
            reservations: Reservations {
                generation: 7,
                registrations: vec![Registration { port: port.clone(), key: 0xabc }],
                holder: Some((Kind::WriteExclusiveRegistrants, port)),
                aptpl: true,
            },
        }
    }

    #[test]
    fn golden_file() {
        let golden = "longhorn-scsi 1\nwrite-cache 0\nprotected 1\ngeneration 7\naptpl 1\n\
            registration 0000000000000abc iqn.2000-01.a:one,i,0x400000000001\n\
            reservation 5 iqn.2000-01.a:one,i,0x400000000001\ncrc32c ";
        let bytes = kept().encode();
        assert!(bytes.starts_with(golden.as_bytes()), "{}", String::from_utf8_lossy(&bytes));
        assert_eq!(Kept::decode(&bytes), Ok(kept()));
    }

    #[test]
    fn a_damaged_file_is_not_believed() {
        let bytes = kept().encode();
        for end in 0..bytes.len() - 1 {
            assert!(Kept::decode(&bytes[..end]).is_err(), "cut at {end}");
        }
        for at in 0..bytes.len() - 1 {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert_eq!(Kept::decode(&wrong), Err(Unreadable::Checksum), "changed at {at}");
        }
    }

    /// Somebody else's file is not read into memory, however long it is.
    #[test]
    fn a_file_that_is_too_long_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scsi");
        for (len, is_read) in [(FILE_MAX, true), (FILE_MAX + 1, false), (1 << 40, false)] {
            File::create(&path).unwrap().set_len(len).unwrap();
            assert_eq!(FileStore::new(path.clone()).load().is_ok(), is_read, "{len}");
        }
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = FileStore::new(dir.path().join("scsi"));
        assert_eq!(store.load().unwrap(), None);
        store.save(&kept().encode()).unwrap();
        let mut other = kept();
        other.reservations.holder = None;
        store.save(&other.encode()).unwrap();
        assert_eq!(Kept::decode(&store.load().unwrap().unwrap()), Ok(other));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let mode = fs::metadata(dir.path().join("scsi")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, PRIVATE);
        let mut nowhere = FileStore::new(dir.path().join("missing/scsi"));
        assert!(matches!(nowhere.save(b""), Err(SaveError::Unchanged(_))));
        // A name that cannot be taken: whether it was is not asked.
        let mut taken = FileStore::new(dir.path().join("directory"));
        fs::create_dir_all(dir.path().join("directory/full")).unwrap();
        assert!(matches!(taken.save(b""), Err(SaveError::Unknown(_))));
    }
}
