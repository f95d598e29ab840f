//! `replica ls` and `replica export`.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use control::host::VolumeRecord;
use lh_block::format_size;
use replica::store::SnapshotView;

use super::Context;
use super::args::{ImageFormat, Output, ReplicaExportArgs};
use super::observe::observe;
use super::output::print_json;
use super::show::print_replicas;
use crate::progress::Progress;

pub(super) async fn list(context: &Context, volume: &str) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let view = observe(&context.root, &record).await?;
    match context.output {
        Output::Json => print_json(&view.replicas),
        Output::Table => print_replicas(&view),
    }
}

pub(super) fn export(args: &ReplicaExportArgs) -> Result<()> {
    let view = SnapshotView::open(&args.directory, args.snapshot.as_deref())?;
    write_out(&view, args.format, &args.file)
}

/// Writes the view's bytes to a file, which is replaced only when everything is in it.
pub(super) fn write_out(view: &SnapshotView, format: ImageFormat, file: &Path) -> Result<()> {
    let (mut out, temporary) = create_beside(file)?;
    let progress = Progress::of_bytes("writing");
    let mut told = |done, of| progress.at(done, of);
    let written = match format {
        ImageFormat::Raw => view.export(&out, &mut told),
        ImageFormat::Qcow2 => view.export_qcow2(&out, &mut told),
    };
    let written = written
        .and_then(|()| out.sync_all())
        .and_then(|()| fs::rename(&temporary, file))
        .with_context(|| format!("{} cannot be written", file.display()));
    drop(progress);
    if written.is_err() {
        // Best effort: the error that counts is the one before.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    eprintln!("{} holds {}", file.display(), format_size(view.size()));
    use std::io::Write;
    out.flush()?;
    Ok(())
}

/// A new file beside the one that it will replace.
fn create_beside(file: &Path) -> Result<(File, PathBuf)> {
    if fs::metadata(file).is_ok_and(|meta| !meta.is_file()) {
        bail!("{} is not a file: name one, and copy from it", file.display());
    }
    let Some(name) = file.file_name() else { bail!("{} is not a file's name", file.display()) };
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = file.with_file_name(temporary);
    let out = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary);
    Ok((out.with_context(|| format!("{} cannot be written", file.display()))?, temporary))
}
