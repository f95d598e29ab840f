//! `import` of replicas that stand on backing files: each reads what it has not written from its own, which nothing brings in sync.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use replica::store::{BackingDifference, BackingFile};

use super::output::exact_size;
use crate::progress::Progress;

/// What to do where they differ.
const NEXT: &str = "replicas of one volume stand on the same bytes: name those directories alone that do, or put the right file there";

/// Refuses directories that stand on different backing files.
pub(super) fn check(directories: &[PathBuf]) -> Result<()> {
    let Some((first, others)) = directories.split_first() else { return Ok(()) };
    let own = BackingFile::of(first)?;
    for other in others {
        let (one, two) = match (&own, BackingFile::of(other)?) {
            (None, None) => continue,
            (Some(one), Some(two)) => (one, two),
            (Some(one), None) => bail!("{}", lacks(other, first, one)),
            (None, Some(two)) => bail!("{}", lacks(first, other, &two)),
        };
        let progress = Progress::of_bytes("comparing backing files");
        let found = one.difference(&two, &mut |done, of| progress.at(done, of))?;
        drop(progress);
        let (one, two) = (one.path().display(), two.path().display());
        match found {
            None => {}
            Some(BackingDifference::Length(a, b)) => bail!(
                "the backing files {one} ({}) and {two} ({}) differ: {NEXT}",
                exact_size(a),
                exact_size(b)
            ),
            Some(BackingDifference::Byte(at)) => {
                bail!("the backing files {one} and {two} differ from byte {at} on: {NEXT}")
            }
        }
    }
    Ok(())
}

fn lacks(directory: &Path, other: &Path, backing: &BackingFile) -> String {
    format!(
        "{} has no backing file, and {} stands on {}: {NEXT}",
        directory.display(),
        other.display(),
        backing.path().display()
    )
}
