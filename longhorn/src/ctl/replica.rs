//! `replica ls` and `replica export`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use control::host::{LiveDirs, Root, VolumeRecord, sync_dir};
use lh_block::format_size;
use replica::store::{Doubt, ExportError, OpenError, SnapshotView};
use rustix::fs::{AtFlags, CWD, OFlags, linkat};
use serde::Serialize;

use super::args::{ImageFormat, Output, ReplicaExportArgs};
use super::observe::observe;
use super::output::print_json;
use super::place::volume_of;
use super::show::print_replicas;
use super::{Context, interrupt};
use crate::progress::Progress;
use crate::tell::tell;

pub(super) async fn list(context: &Context, volume: &str) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let view = observe(&context.root, &record).await?;
    match context.output {
        Output::Json => print_json(&view.replicas),
        Output::Table => print_replicas(&view),
    }
}

/// The file that makes a directory a replica's, Longhorn's or ours.
const VOLUME_META: &str = "volume.meta";

/// What lies in every directory of a volume's records, by its name.
const VOLUME_RECORD: &str = "volume.json";

/// A file that was written, as `replica export` and `snapshot export` print it with `-o json`.
#[derive(Debug, Serialize)]
struct ExportView<'a> {
    file: &'a Path,
    /// "raw" or "qcow2".
    format: ImageFormat,
    /// Bytes of the volume in it.
    size: u64,
    /// What is not sure of them, with `--rescue`.
    #[serde(skip_serializing_if = "Option::is_none")]
    doubts: Option<Vec<DoubtView>>,
}

/// Bytes that are not sure to be the volume's.
#[derive(Debug, Serialize)]
struct DoubtView {
    /// In bytes, as `length`.
    offset: u64,
    length: u64,
    why: String,
}

pub(super) fn export(context: &Context, args: &ReplicaExportArgs) -> Result<()> {
    let snapshot = args.snapshot.as_deref();
    let format = ImageFormat::of_file(args.format, &args.file);
    if args.rescue {
        let view = SnapshotView::rescue(&args.directory, snapshot)?;
        return write_out(context, &view, format, &args.file);
    }
    let view = SnapshotView::open(&args.directory, snapshot).map_err(|err| match err {
        OpenError::Damaged { .. } => anyhow!("{err}; with --rescue what can be read all the same is taken"),
        // Whoever ended that process would see another one take its place.
        OpenError::InUse { .. } => match volume_of(&context.root, &args.directory) {
            Some(volume) => anyhow!(
                "{} is a replica of volume {volume}, which is up: `longhornctl snapshot export {volume} SNAPSHOT FILE` exports a snapshot \
                 as it is, or stop the volume first with `longhornctl down {volume}`",
                args.directory.display()
            ),
            None => err.into(),
        },
        err => err.into(),
    })?;
    write_out(context, &view, format, &args.file)
}

/// Writes the view's bytes to a file, which is replaced only when everything is in it.
pub(super) fn write_out(
    context: &Context,
    view: &SnapshotView,
    format: ImageFormat,
    file: &Path,
) -> Result<()> {
    let cannot = || format!("{} cannot be written", file.display());
    let held = interrupt::hold();
    let new = NewFile::beside(file)?;
    let progress = Progress::of_bytes("writing");
    let mut told = |done, of| {
        if held.has_come() {
            new.forget();
            held.end();
        }
        progress.at(done, of);
    };
    let written = match format {
        ImageFormat::Raw => view.export(&new.file, &mut told),
        ImageFormat::Qcow2 => view.export_qcow2(&new.file, &mut told),
    };
    drop(progress);
    match written {
        Ok(()) => new.take_place().with_context(cannot)?,
        Err(ExportError::Io(e)) => return Err(e).with_context(cannot),
        Err(ExportError::Snapshot(gone)) => {
            return Err(gone).with_context(|| format!("{} is not written", file.display()));
        }
    }
    interrupt::leaves(format!("{} is written", file.display()));
    held.let_go();
    let (doubts, size) = (view.doubts(), view.size());
    if context.output == Output::Json {
        let doubts = doubts.map(|doubts| doubts.iter().map(doubt_view).collect());
        return print_json(&ExportView { file, format, size, doubts });
    }
    let kind = if format == ImageFormat::Qcow2 { ", as qcow2" } else { "" };
    tell!("{} holds {}{kind}", file.display(), format_size(size));
    if let Some(doubts) = doubts {
        print_doubts(&doubts, size);
    }
    Ok(())
}

fn doubt_view(doubt: &Doubt) -> DoubtView {
    DoubtView { offset: doubt.range.offset, length: doubt.range.len, why: doubt.why.to_string() }
}

/// As many as a screen has room for.
const DOUBTS_SHOWN: usize = 15;

fn print_doubts(doubts: &[Doubt], size: u64) {
    if doubts.is_empty() {
        tell!("nothing of it is in doubt");
    }
    for Doubt { range, why } in doubts.iter().take(DOUBTS_SHOWN) {
        let which = match range.len == size {
            true => "all of it".to_owned(),
            false => format!("{} from byte {} on", format_size(range.len), range.offset),
        };
        tell!("not sure, {which}: {why}");
    }
    if doubts.len() > DOUBTS_SHOWN {
        tell!("and {} more, which -o json lists", doubts.len() - DOUBTS_SHOWN);
    }
}

/// A file that is being written and will replace another one. Where the file system can, it has no name meanwhile: nothing
/// is left of it if this process is killed.
struct NewFile {
    file: File,
    target: PathBuf,
    temporary: PathBuf,
    named: bool,
}

impl NewFile {
    fn beside(target: &Path) -> Result<Self> {
        if fs::metadata(target).is_ok_and(|meta| !meta.is_file()) {
            bail!("{} is not a file: name one, and copy from it", target.display());
        }
        let Some(name) = target.file_name() else { bail!("{} is not a file's name", target.display()) };
        if target == Path::new("-") {
            bail!(
                "- is no name for a file here, and nothing is written to a pipe: name a file, and copy from it"
            );
        }
        // What is there by that name would be gone, a layer perhaps.
        if let Some(whose) = taken_by(directory_of(target)) {
            bail!("{} would lie among the files of {whose}: choose another place", target.display());
        }
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = target.with_file_name(temporary);
        let nameless = OFlags::TMPFILE.bits().cast_signed();
        let nameless =
            OpenOptions::new().write(true).custom_flags(nameless).mode(0o600).open(directory_of(target));
        let (file, named) = match nameless {
            Ok(file) => (file, false),
            // NFS and FUSE may not know nameless files (`open(2)`: EOPNOTSUPP, EISDIR).
            Err(_) => {
                let out = create_anew(&temporary);
                (out.with_context(|| format!("{} cannot be written", target.display()))?, true)
            }
        };
        Ok(Self { file, target: target.to_owned(), temporary, named })
    }

    /// Makes what was written durable and puts it where it belongs.
    fn take_place(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        if !self.named {
            // A link replaces nothing; a rename does. A file of that name is one that a killed process left.
            let _ = fs::remove_file(&self.temporary);
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            linkat(CWD, own, CWD, &self.temporary, AtFlags::SYMLINK_FOLLOW)?;
            self.named = true;
        }
        fs::rename(&self.temporary, &self.target)?;
        self.named = false;
        sync_dir(directory_of(&self.target))
    }
}

/// Whose files lie in the directory, if they are of this program.
fn taken_by(directory: &Path) -> Option<&'static str> {
    let of_replica = |place: &Path| place.join(VOLUME_META).exists();
    // What is below a replica's directory is its own as well.
    if of_replica(directory) || of_replica(&directory.join("..")) {
        return Some("a replica");
    }
    if directory.join(VOLUME_RECORD).exists() {
        return Some("a volume");
    }
    // A link may lead there.
    let directory = directory.canonicalize().ok()?;
    if directory.starts_with(LiveDirs::default().path()) {
        return Some("volumes that are up");
    }
    let is_roots = |place: &Path| {
        let part = directory.strip_prefix(place).ok().and_then(|below| below.components().next());
        part.is_some_and(|part| Root::unresolved(place).keeps(Path::new(part.as_os_str())))
    };
    directory
        .ancestors()
        .any(is_roots)
        .then_some("a root, which has its locks, records, logs and programs there")
}

fn directory_of(file: &Path) -> &Path {
    file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// Creates a file of this name. What has it is left by a killed process, or a link that somebody else has put there, in a directory
/// such as /tmp: it leads to what is not to be written to.
fn create_anew(path: &Path) -> io::Result<File> {
    let _ = fs::remove_file(path);
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

impl NewFile {
    /// Takes away what has a name already.
    fn forget(&self) {
        if self.named {
            // Best effort: the error that counts is the one before.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        self.forget();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_is_replaced_by_a_whole_one_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("demo.img");
        let names = || {
            let names =
                fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            names.collect::<Vec<_>>()
        };
        fs::write(&target, "old").unwrap();
        let mut new = NewFile::beside(&target).unwrap();
        new.file.write_all(b"half").unwrap();
        assert!(new.named || names() == ["demo.img"], "killed now it would leave {:?}", names());
        drop(new);
        assert_eq!((names(), fs::read(&target).unwrap()), (vec!["demo.img".to_owned()], b"old".to_vec()));
        let mut new = NewFile::beside(&target).unwrap();
        fs::write(&new.temporary, "of a killed process with this number").unwrap();
        new.file.write_all(b"new").unwrap();
        new.take_place().unwrap();
        assert_eq!((names(), fs::read(&target).unwrap()), (vec!["demo.img".to_owned()], b"new".to_vec()));
    }

    #[test]
    fn no_file_of_a_replica_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        for name in [VOLUME_META, "volume-head-000.img"] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        for name in ["volume-head-000.img", "demo.img"] {
            let refused = NewFile::beside(&dir.path().join(name)).err().unwrap().to_string();
            assert!(refused.contains("among the files of a replica"), "{refused}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_somebody_has_put_in_the_way_is_not_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let (theirs, link) = (dir.path().join("theirs"), dir.path().join(".demo.img.7.tmp"));
        fs::write(&theirs, "x").unwrap();
        std::os::unix::fs::symlink(&theirs, &link).unwrap();
        create_anew(&link).unwrap().write_all(b"new").unwrap();
        assert_eq!((fs::read(&theirs).unwrap(), fs::read(&link).unwrap()), (b"x".to_vec(), b"new".to_vec()));
    }
}
