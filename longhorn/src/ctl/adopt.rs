//! Directories that another volume of ours has left, imported under this one's name: what their records say of members names that
//! volume's replicas, of which none is here, and no engine would ever start from them. As of all imported directories the first
//! one counts, and the others are brought in line with it.
//!
//! What only the records can tell is heeded: a directory that was left out of its volume, or is half rebuilt, is no source while
//! one beside it has more.

use anyhow::{Result, bail};
use control::host::{Root, VolumeRecord};
use lh_block::Epoch;
use replica::store::{Survey, survey};

use super::decree;
use crate::progress::Progress;

/// True if nothing of the volume has run yet, and the directory is as another volume of ours has left it.
pub(super) fn is_another_volumes(record: &VolumeRecord, held: &Survey) -> bool {
    !held.imported && held.epoch.as_ref().is_some_and(|epoch| !names_any(record, epoch))
}

fn names_any(record: &VolumeRecord, epoch: &Epoch) -> bool {
    record.replicas.iter().any(|replica| epoch.has(&replica.name))
}

/// Before the first start of a volume: has it begin with the directory that was named first, where others are another volume's. The
/// caller holds the volume's lock, and no process of the volume runs.
///
/// # Errors
/// The first one does not have what another one has; or a directory cannot be read or written.
pub(super) fn first(root: &Root, record: &VolumeRecord, progress: &mut Progress) -> Result<()> {
    let all_imported = record.replicas.iter().all(|replica| replica.imported);
    if !all_imported || record.authority(root).epoch()?.is_some() {
        return Ok(());
    }
    let mut held = Vec::new();
    for replica in &record.replicas {
        // One that is missing or damaged says why when its process opens it.
        let Ok(survey) = survey(&replica.directory) else { continue };
        held.push((replica, survey));
    }
    if !held.iter().any(|(_, survey)| is_another_volumes(record, survey)) {
        return Ok(());
    }
    let Some(source) = record.replicas.first() else { return Ok(()) };
    let found = held.iter().find(|(replica, _)| replica.name == source.name);
    let Some((_, first)) = found else {
        // The engine would wait for members that there never are.
        survey(&source.directory)?;
        return Ok(());
    };
    let order = |survey: &Survey| survey.epoch.as_ref().filter(|_| !survey.imported).map(Epoch::order);
    let better = held.iter().filter(|(_, s)| !s.rebuilding).max_by_key(|(_, s)| order(s));
    if let Some((better, survey)) = better
        && (first.rebuilding || !first.imported && order(survey) > order(first))
    {
        bail!(
            "{} was left out of its volume, and lacks what {} has: `longhornctl release {2}`, and then `longhornctl import {2} {1}` with \
             the others behind it",
            source.directory.display(),
            better.directory.display(),
            record.name
        );
    }
    if first.rebuilding {
        bail!(
            "{} is half rebuilt, and nothing else is here to start from: take the bytes that it has with `longhornctl replica export --rescue DIR FILE`",
            source.directory.display()
        );
    }
    progress.say(&format!("{} counts, which was named first", source.directory.display()));
    decree::start_from(root, record, &source.name)
}
