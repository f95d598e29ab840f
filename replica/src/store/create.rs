//! Creating a directory. The record `creating` is its first file and the last to go: a directory that has it was never a
//! replica, and creating it again begins anew.

use std::io;
use std::path::Path;
use std::time::Instant;

use lh_block::BLOCK;

use super::ENGINE;
use super::data::Store;
use super::directory::{CreateOptions, Directory, OpenOptions};
use super::disk;
use super::error::{OpenError, failed};
use super::fs::{Fs, NEW};
use super::gather::{new_intent, open_backing};
use super::id::{Id, LAYER_ATTRIBUTE, VOLUME_ATTRIBUTE};
use super::locks::lock_directory;
use super::meta::{LayerMeta, VOLUME_META, VolumeMeta, heads_after, meta_name, now};
use super::open::open;
use super::record::{ChainRecord, Closed, ClosedFile, Creating, Identity, Record, Records};
use super::zero;

impl Directory {
    /// Creates a directory (missing or empty before) with one empty head. Nothing is left behind on error.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn create(path: &Path, options: &CreateOptions) -> Result<(Self, Store), OpenError> {
        create(path, options, Fs::default())
    }
}

/// See [`Directory::create`].
pub(super) fn create(path: &Path, options: &CreateOptions, fs: Fs) -> Result<(Directory, Store), OpenError> {
    let size = options.size;
    if size == 0 || !size.is_multiple_of(BLOCK) || i64::try_from(size).is_err() {
        return Err(OpenError::BadSize(size));
    }
    let new = match fs.make_directory(path) {
        Ok(()) => true,
        Err(err) if err.kind() == io::ErrorKind::AlreadyExists => false,
        Err(err) => return Err(failed("making", path)(err)),
    };
    let created = lock_directory(path, true, Instant::now() + options.lock_wait).and_then(|_lock| {
        check_empty(path, &fs, true)?;
        fill(path, options, &fs).inspect_err(|_| remove(path, &fs))
    });
    if created.is_err() && new {
        // Nothing is lost if this fails: the directory is empty.
        let _ = fs.remove_directory(path);
    }
    created?;
    // Not at once even here: a process that another thread started meanwhile has the lock's descriptor until it executes
    // its program.
    open(path, &OpenOptions { lock_wait: options.lock_wait }, fs)
}

/// Nothing may be there but what an interrupted creation left, which goes with `clear`.
fn check_empty(path: &Path, fs: &Fs, clear: bool) -> Result<(), OpenError> {
    let engine = path.join(ENGINE);
    let creating = [Creating::NAME.to_owned(), format!("{}{NEW}", Creating::NAME)]
        .iter()
        .any(|n| engine.join(n).exists());
    let bare = |name: &std::ffi::OsStr| name == ENGINE && is_empty(&engine);
    for entry in std::fs::read_dir(path).map_err(failed("reading", path))? {
        let name = entry.map_err(failed("reading", path))?.file_name();
        if !(creating || bare(&name) || name == "lost+found") {
            return Err(OpenError::NotEmpty(path.to_owned()));
        }
    }
    match (creating, clear) {
        (true, true) => {
            remove(path, fs);
            check_empty(path, fs, false)
        }
        // It cannot be taken away.
        (true, false) => Err(OpenError::NotEmpty(path.to_owned())),
        (false, _) => Ok(()),
    }
}

fn is_empty(path: &Path) -> bool {
    std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// Takes away what a creation made: nobody has ever written into it. What cannot be taken away is still called unfinished.
fn remove(path: &Path, fs: &Fs) {
    let _ = try_remove(path, fs);
}

/// The mark goes last, when nothing else is left on the disk.
fn try_remove(path: &Path, fs: &Fs) -> io::Result<()> {
    let head = first_head();
    for name in [VOLUME_META, &meta_name(&head), &head] {
        fs.remove(&path.join(name))?;
    }
    let engine = path.join(ENGINE);
    for entry in std::fs::read_dir(&engine)? {
        let entry = entry?;
        if entry.file_name() != Creating::NAME {
            fs.remove(&entry.path())?;
        }
    }
    fs.sync_directory(path)?;
    fs.sync_directory(&engine)?;
    fs.remove(&engine.join(Creating::NAME))?;
    fs.remove_directory(&engine)
}

fn first_head() -> String {
    heads_after("").next().unwrap_or_default()
}

fn fill(path: &Path, options: &CreateOptions, fs: &Fs) -> Result<(), OpenError> {
    let engine = path.join(ENGINE);
    if !engine.is_dir() {
        fs.make_directory(&engine).map_err(failed("making", &engine))?;
    }
    let records = Records { directory: path };
    records.store(fs, &Creating {}).map_err(failed("writing", &engine))?;
    fs.sync_directory(path).map_err(failed("syncing", path))?;
    let direct = disk::probe(&engine, options.size)?;
    let mut volume = VolumeMeta::new(options.size, first_head(), String::new());
    volume.backing_file = options.backing.clone().unwrap_or_default();
    open_backing(path, &volume, Instant::now())?;
    fill_with(path, &volume, direct, fs).map_err(failed("filling", path))
}

fn fill_with(path: &Path, volume: &VolumeMeta, direct: bool, fs: &Fs) -> io::Result<()> {
    let engine = path.join(ENGINE);
    let records = Records { directory: path };
    let (layer, identity) = (Id::random()?, Identity { volume: Id::random()?, imported: false });
    let id = identity.volume;
    fs.write(&engine.join(zero::file_name(layer)), &zero::header(layer), None)?;
    let head = path.join(&volume.head);
    fs.create_layer(&head, volume.size(), direct, (LAYER_ATTRIBUTE, &layer.to_string()))?;
    let meta = LayerMeta::head(&volume.head, "", &now());
    fs.write(&path.join(meta_name(&volume.head)), &meta.encode(), None)?;
    drop(new_intent(fs, path, id, volume.size(), false)?);
    records.store(fs, &ChainRecord { volume: id, prepared: None, committed: None, settled: None })?;
    records.store(fs, &identity)?;
    fs.write(&path.join(VOLUME_META), &volume.encode(), Some((VOLUME_ATTRIBUTE, &id.to_string())))?;
    fs.sync_directory(path)?;
    // Nobody has written into it: that is what a clean close says.
    let files = vec![ClosedFile::of(&volume.head, &head.metadata()?)];
    records.store(fs, &Closed { volume: id, files })?;
    records.remove::<Creating>(fs)?;
    // The directory's own name.
    path.parent().map_or(Ok(()), |parent| {
        fs.sync_directory(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
    })
}
