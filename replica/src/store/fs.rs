//! The operations that change a directory. Everything that creates, renames, links, removes or syncs goes through
//! [`Fs`], so that tests can stop after any of them, and can see which were not made durable.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use lh_ring::sys;

use super::ENGINE;
use super::room;

/// Ending of the name under which a file is made that then takes its place by rename. Longhorn ignores it in `engine/`;
/// in the replica directory itself it is Longhorn's own ending, which every reader passes over.
pub(super) const NEW: &str = ".new";

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(super) struct Fs {
    #[cfg(test)]
    pub(super) tape: Option<std::sync::Arc<super::tape::Tape>>,
}

/// What is about to be done.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests look at it"))]
pub(super) enum Step<'a> {
    /// A new file, empty.
    Create(&'a Path),
    /// Content or length.
    Change(&'a Path),
    /// What lies in it, past [`Fs`].
    Overwrite(&'a Path),
    /// An extended attribute.
    Attribute(&'a Path),
    /// The file's content is stable.
    SyncFile(&'a Path),
    /// From, to.
    Rename(&'a Path, &'a Path),
    /// From, to.
    Link(&'a Path, &'a Path),
    /// Gone.
    Remove(&'a Path),
    /// The directory's names are stable.
    SyncDirectory(&'a Path),
}

impl Fs {
    #[cfg(not(test))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests use both")]
    fn step(&self, step: Step<'_>) -> io::Result<()> {
        let _ = step;
        Ok(())
    }

    #[cfg(test)]
    fn step(&self, step: Step<'_>) -> io::Result<()> {
        self.tape.as_ref().map_or(Ok(()), |tape| tape.step(step))
    }

    /// Makes a file, open for reading and writing; what had the name is replaced.
    fn create(&self, path: &Path, flags: i32) -> io::Result<File> {
        self.remove(path)?;
        self.step(Step::Create(path))?;
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .custom_flags(libc::O_NOFOLLOW | flags)
            .open(path)
    }

    /// Makes a file with this content and extended attribute, on stable storage but for its name.
    pub(super) fn write(
        &self,
        path: &Path,
        content: &[u8],
        attribute: Option<(&str, &str)>,
    ) -> io::Result<()> {
        room::with(path, || self.write_once(path, content, attribute))
    }

    fn write_once(&self, path: &Path, content: &[u8], attribute: Option<(&str, &str)>) -> io::Result<()> {
        let mut file = self.create(path, 0)?;
        self.step(Step::Change(path))?;
        file.write_all(content)?;
        if let Some((name, value)) = attribute {
            self.step(Step::Attribute(path))?;
            sys::set_xattr(&file, name, value.as_bytes())?;
        }
        self.sync_file(&file, path)
    }

    /// Makes an empty layer of that length, on stable storage but for its name.
    pub(super) fn create_layer(
        &self,
        path: &Path,
        length: u64,
        direct: bool,
        attribute: (&str, &str),
    ) -> io::Result<File> {
        room::with(path, || self.create_layer_once(path, length, direct, attribute))
    }

    fn create_layer_once(
        &self,
        path: &Path,
        length: u64,
        direct: bool,
        attribute: (&str, &str),
    ) -> io::Result<File> {
        let file = self.create(path, if direct { libc::O_DIRECT } else { 0 })?;
        self.step(Step::Change(path))?;
        file.set_len(length)?;
        self.step(Step::Attribute(path))?;
        sys::set_xattr(&file, attribute.0, attribute.1.as_bytes())?;
        self.sync_file(&file, path)?;
        Ok(file)
    }

    /// Somebody else is about to write into a file that is there: [`Fs::sync_file`] makes it stable.
    pub(super) fn overwrites(&self, path: &Path) -> io::Result<()> {
        self.step(Step::Overwrite(path))
    }

    pub(super) fn set_length(&self, file: &File, path: &Path, length: u64) -> io::Result<()> {
        self.step(Step::Change(path))?;
        file.set_len(length)
    }

    pub(super) fn set_attribute(&self, file: &File, path: &Path, name: &str, value: &str) -> io::Result<()> {
        self.step(Step::Attribute(path))?;
        sys::set_xattr(file, name, value.as_bytes())
    }

    pub(super) fn sync_file(&self, file: &File, path: &Path) -> io::Result<()> {
        self.step(Step::SyncFile(path))?;
        file.sync_all()
    }

    /// Puts content under a name: old or new, nothing between, durable when it returns.
    pub(super) fn replace(
        &self,
        directory: &Path,
        name: &str,
        content: &[u8],
        attribute: Option<(&str, &str)>,
    ) -> io::Result<()> {
        let new = directory.join(format!("{name}{NEW}"));
        self.write(&new, content, attribute)?;
        self.rename(&new, &directory.join(name))?;
        self.sync_directory(directory)?;
        if directory.ends_with(ENGINE) {
            room::keep(directory);
        }
        Ok(())
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        room::with(to, || {
            self.step(Step::Rename(from, to))?;
            std::fs::rename(from, to)
        })
    }

    pub(super) fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        room::with(to, || {
            self.step(Step::Link(from, to))?;
            std::fs::hard_link(from, to)
        })
    }

    /// Removes a file; one that is not there is removed already.
    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        if found_at(path)?.is_none() {
            return Ok(());
        }
        self.step(Step::Remove(path))?;
        std::fs::remove_file(path)
    }

    pub(super) fn make_directory(&self, path: &Path) -> io::Result<()> {
        self.step(Step::Create(path))?;
        std::fs::create_dir(path)
    }

    /// Removes an empty directory.
    pub(super) fn remove_directory(&self, path: &Path) -> io::Result<()> {
        self.step(Step::Remove(path))?;
        std::fs::remove_dir(path)
    }

    /// Makes the directory's names stable. What is wrong then is never that the disk is full, whatever the system says: names
    /// have changed.
    pub(super) fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.step(Step::SyncDirectory(path))?;
        let synced = File::open(path)?.sync_all();
        synced.map_err(|e| if room::is_full(&e) { io::Error::other(e) } else { e })
    }
}

/// What has the name; `None` if nothing has it. An error is not that word: where a step is passed over since there is nothing to
/// be done, it would be taken for done.
pub(super) fn found_at(path: &Path) -> io::Result<Option<Metadata>> {
    #[cfg(test)]
    tests_fault::check()?;
    match path.symlink_metadata() {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Names of which the disk does not tell, for tests.
#[cfg(test)]
pub(super) mod tests_fault {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        /// Looks that end well before the one that fails.
        pub(in crate::store) static BLIND_AFTER: Cell<Option<usize>> = const { Cell::new(None) };
    }

    pub(super) fn check() -> io::Result<()> {
        let left = BLIND_AFTER.take();
        BLIND_AFTER.set(left.and_then(|left| left.checked_sub(1)));
        if left == Some(0) { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }
}
