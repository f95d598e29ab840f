//! `import`: a volume of replica directories where they are.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use control::host::{LiveDirs, ReplicaRecord, VolumeRecord, new_replica_suffix, replica_name};
use lh_block::format_size;
use replica::store::{Damage, OpenError, SnapshotView};

use super::args::Output;
use super::observe::observe;
use super::output::{counted, exact_size, print_json};
use super::{Context, damaged, first_counts, interrupt, lock, place, same_backing};
use crate::tell::tell;

/// `record` is a new volume's, of which the name counts and what is chosen for it.
pub(super) async fn run(context: &Context, mut record: VolumeRecord, directories: &[PathBuf]) -> Result<()> {
    let root = &context.root;
    let volume = &record.name.clone();
    root.create()?;
    let _lock = lock::name(root, volume)?;
    LiveDirs::default().check_free(volume, root)?;
    let found = lock::found(root, volume);
    if damaged::is_damaged(&found) {
        damaged::check_stopped(root, volume)?;
    } else if found?.is_some() {
        bail!("there is a volume {volume} already: choose another name");
    }
    let mut files = BTreeMap::new();
    for directory in directories {
        let directory = directory.canonicalize().with_context(|| directory.display().to_string())?;
        if record.replicas.iter().any(|r| r.directory == directory) {
            bail!(
                "{} is named twice: each replica has a directory of its own, so name it once",
                directory.display()
            );
        }
        place::check_apart(root, &directory, what_to_do)?;
        check_own_files(&mut files, &directory)?;
        // Opening it for reading judges everything that opening it for writing would.
        let size = match SnapshotView::open(&directory, None) {
            // What it lacks nobody knows. The first one counts, and no other one can take its place by itself.
            Err(OpenError::Damaged { damage: Damage::Rebuilding, .. }) if !record.replicas.is_empty() => {
                tell!(
                    "{} is left out, since it was being rebuilt and is not whole: once the volume is up, `longhornctl replica add {volume}` \
                     makes another replica",
                    directory.display()
                );
                continue;
            }
            opened => opened?.size(),
        };
        if record.size != 0 && record.size != size {
            bail!(
                "{} holds {} and {} {}: replicas of one volume have one size",
                record.replicas[0].directory.display(),
                exact_size(record.size),
                directory.display(),
                exact_size(size)
            );
        }
        record.size = size;
        let name = free_name(&record, &directory)?;
        record.replicas.push(ReplicaRecord { name, directory, imported: true, learner: false });
    }
    let named: Vec<PathBuf> = record.replicas.iter().map(|replica| replica.directory.clone()).collect();
    first_counts::check(volume, &named)?;
    same_backing::check(&named)?;
    let taken = place::take(root, named.iter().map(PathBuf::as_path), what_to_do)?;
    let held = interrupt::hold();
    record.create(root)?;
    drop(taken);
    interrupt::leaves(format!("volume {volume} is made: `longhornctl up {volume}` starts it"));
    held.let_go();
    match context.output {
        Output::Json => print_json(&observe(root, &record).await?),
        Output::Table => {
            tell!(
                "{volume} is made of {} of {}: longhornctl up {volume} starts it",
                counted(record.replicas.len(), "replica"),
                format_size(record.size)
            );
            Ok(())
        }
    }
}

fn what_to_do(owner: &str) -> String {
    format!(
        "`longhornctl release {owner}` forgets the volume and keeps its directories (`rm` deletes them), or import a copy"
    )
}

/// Refuses a directory whose files are another one's, as hard links are: what is written to one replica would be in both, and only one
/// of them can be opened.
fn check_own_files(seen: &mut BTreeMap<(u64, u64), PathBuf>, directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        let path = entry.path();
        // Backing files may be shared: nobody writes them.
        if !entry.file_name().as_encoded_bytes().starts_with(b"volume") {
            continue;
        }
        let stat = fs::symlink_metadata(&path).with_context(|| path.display().to_string())?;
        if !stat.is_file() {
            continue;
        }
        if let Some(other) = seen.insert((stat.dev(), stat.ino()), path.clone()) {
            bail!(
                "{} and {} are one file: copy it (`cp --sparse=always`), since each replica has files of its own",
                other.display(),
                path.display()
            );
        }
    }
    Ok(())
}

/// A name with the directory's own suffix, if it has Longhorn's form and is free.
fn free_name(record: &VolumeRecord, directory: &Path) -> Result<String> {
    let own = directory.file_name().and_then(|name| name.to_str()?.rsplit_once('-'));
    let is_suffix = |s: &str| s.len() == 8 && s.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let mut suffix = match own {
        Some((_, suffix)) if is_suffix(suffix) => suffix.to_owned(),
        _ => new_replica_suffix()?,
    };
    loop {
        let name = replica_name(&record.name, &suffix);
        if record.replica(&name).is_none() {
            return Ok(name);
        }
        suffix = new_replica_suffix()?;
    }
}
