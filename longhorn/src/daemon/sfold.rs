//! `longhorn sfold`: two layers' files made one, by hand.

use std::path::PathBuf;

use anyhow::Result;
use replica::store::fold_files;

use crate::progress::Progress;

/// Arguments of `sfold`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(super) struct SfoldArgs {
    /// The upper layer's file, which stays as it is
    child: PathBuf,
    /// The lower layer's file, which then holds what both held
    parent: PathBuf,
}

const HELP: &str = "\
Example:
  longhorn sfold volume-snap-monday.img volume-snap-sunday.img

For files that no process uses. Holes stay holes; where the file system shares
extents, nothing is copied. Interrupted, it is begun again. To fold a volume's
removed snapshots use `longhornctl snapshot purge`.";

pub(super) fn run(args: &SfoldArgs) -> Result<()> {
    let progress = Progress::of_bytes("folding");
    fold_files(&args.child, &args.parent, &mut |done, total| progress.at(done, total))?;
    Ok(())
}
