//! Replacing files so that a crash leaves the old or the new content, never a mixture and never nothing.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Rooms are of this many bytes, or of several times as many: of whole blocks of the file system.
const ROOM: usize = 4096;

/// Replaces the file by `content`: durable when it returns, readable by its owner alone.
///
/// The caller holds the lock under which the file is written; two writers at once would use one temporary name.
///
/// # Errors
/// The first system call that failed; the file is then as it was, or already replaced but perhaps not durable.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = temporary_name(path)?;
    let written = || {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    // What a full disk took of it is in nobody's way.
    written().inspect_err(|_| drop(fs::remove_file(&temporary)))?;
    sync_dir(parent(path))
}

/// As [`replace_file`], of what has to be written also where the disk is full, since processes are started again by it: with every file
/// goes another one that keeps its room ([`remove_with_room`] takes both away).
///
/// # Errors
/// As [`replace_file`]; a full disk only where the file has grown beyond its room, or the disk was full when it was written first.
pub fn replace_file_in_its_room(path: &Path, content: &[u8]) -> io::Result<()> {
    let room = room_name(path)?;
    match replace_file(path, content) {
        Err(full) if is_full(&full) => {
            // Its blocks are there: what is written over them needs none.
            let mut file = OpenOptions::new().write(true).open(&room).map_err(|_| full)?;
            file.write_all(content)?;
            file.set_len(content.len() as u64)?;
            file.sync_all()?;
            fs::rename(&room, path)?;
            sync_dir(parent(path))?;
        }
        other => other?,
    }
    if !room.exists() {
        // Of the block that the file had before, if the disk has no other.
        let kept =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&room).and_then(|mut file| {
                file.write_all(&vec![0; content.len().next_multiple_of(ROOM)])?;
                file.sync_all()
            });
        drop(kept.inspect_err(|_| drop(fs::remove_file(&room))));
    }
    Ok(())
}

/// Takes away what [`replace_file_in_its_room`] has written; nothing there is no error.
///
/// # Errors
/// The directory may not be written.
pub fn remove_with_room(path: &Path) -> io::Result<()> {
    for file in [path, &room_name(path)?] {
        match fs::remove_file(file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    sync_dir(parent(path))
}

fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Lays a program that everybody may run and its owner replace: there as a whole, or not at all, and durable. Several processes may
/// lay the same one at once: none of them writes what another one has put in its place, and may be running already.
///
/// # Errors
/// The first system call that failed.
pub fn store_program(path: &Path, content: &mut impl Read) -> io::Result<()> {
    create_durably(parent(path), 0o755)?;
    let mut temporary = temporary_name(path)?.into_os_string();
    temporary.push(format!(".{}", std::process::id()));
    let mut written = || {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o755).open(&temporary)?;
        io::copy(content, &mut file)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&temporary, path)
    };
    written().inspect_err(|_| drop(fs::remove_file(&temporary)))?;
    sync_dir(parent(path))
}

/// Makes a directory's entries durable.
///
/// # Errors
/// The directory cannot be opened or synced.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Makes a directory, 0700, and its missing parents, each entry durable. An existing one is left as it is.
///
/// # Errors
/// A parent is no directory, or may not be written.
pub fn create_dir_durably(path: &Path) -> io::Result<()> {
    create_durably(path, 0o700)
}

fn create_durably(path: &Path, mode: u32) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = parent(path);
    create_durably(above, mode)?;
    match DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(e) => Err(e),
        Ok(()) => sync_dir(above),
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// `.NAME.tmp` beside the file: in no listing of `*.json`.
fn temporary_name(path: &Path) -> io::Result<PathBuf> {
    beside(path, ".tmp")
}

/// `.NAME.room` beside the file.
fn room_name(path: &Path) -> io::Result<PathBuf> {
    beside(path, ".room")
}

fn beside(path: &Path, end: &str) -> io::Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no file name"));
    };
    let mut other = std::ffi::OsString::from(".");
    other.push(name);
    other.push(end);
    Ok(path.with_file_name(other))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_replaced_file_is_whole_private_and_leaves_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/record.json");
        create_dir_durably(path.parent().unwrap()).unwrap();
        // What a crash between writing and renaming leaves behind is no obstacle.
        fs::write(path.with_file_name(".record.json.tmp"), b"half of somethi").unwrap();
        replace_file(&path, b"one, and rather long").unwrap();
        replace_file(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(dir.path().join("a")).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_has_its_room_is_written_on_a_full_disk_as_often_as_one_likes() {
        let dir = tempfile::tempdir().unwrap();
        let run = |program: &str, words: &[&str]| {
            let mut command = std::process::Command::new(program);
            command.args(words).arg(dir.path()).stderr(std::process::Stdio::null()).status()
        };
        if !run("mount", &["-t", "tmpfs", "-o", "size=64k", "none"]).is_ok_and(|status| status.success()) {
            return eprintln!("SKIP what_has_its_room: nothing can be mounted");
        }
        let path = dir.path().join("record.json");
        let outcome = || -> io::Result<()> {
            replace_file_in_its_room(&path, b"one")?;
            let filled = fs::write(dir.path().join("filler"), vec![1; 1 << 20]);
            assert!(filled.is_err_and(|e| is_full(&e)));
            assert!(replace_file(&path, b"two").is_err_and(|e| is_full(&e)));
            for content in ["two, and longer", "three", "four"] {
                replace_file_in_its_room(&path, content.as_bytes())?;
                assert_eq!(fs::read(&path)?, content.as_bytes());
            }
            remove_with_room(&path)?;
            assert_eq!(fs::read_dir(dir.path())?.count(), 1);
            remove_with_room(&path)
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(outcome));
        assert!(run("umount", &["-l"]).unwrap().success());
        outcome.unwrap().unwrap();
    }

    /// A content that has another process lay the same program before it is at its end.
    struct Overtaken<'a>(&'a Path, bool);

    impl Read for Overtaken<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            if std::mem::replace(&mut self.1, true) {
                return Ok(0);
            }
            buf[..3].copy_from_slice(b"one");
            let beside = self.0.with_file_name(".longhorn.tmp");
            assert!(!beside.exists(), "a name that every process would use");
            Ok(3)
        }
    }

    #[test]
    fn a_program_is_laid_by_several_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("longhorn-1-0a1b2c3d/longhorn");
        store_program(&path, &mut Overtaken(&path, false)).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o111, 0o111);
        assert!(store_program(&path.join("below"), &mut &b"two"[..]).is_err());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_cannot_take_its_place_leaves_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        fs::create_dir(&path).unwrap();
        assert!(replace_file(&path, b"new").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_where_a_directory_should_be_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), b"").unwrap();
        assert!(create_dir_durably(&dir.path().join("file")).is_err());
        assert!(create_dir_durably(&dir.path().join("file/below")).is_err());
    }
}
