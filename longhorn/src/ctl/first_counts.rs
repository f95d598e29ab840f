//! `import` of directories that Longhorn has written: the first one counts, and the others are brought in line with it. Where the first
//! is older than another one, what that one has would be lost.
//!
//! If its volume asks for that, Longhorn counts the writes of each replica, and starts from one that has the most: so does an import.
//! Without, the time of a head's last write is a hint: that of a replica that failed stands still, that of a copy is when it was copied.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use lh_block::rfc3339;
use replica::store::{Survey, survey};

use crate::tell::tell;

/// Seconds that may lie between the last writes of replicas that took the same ones: Longhorn's own, when it salvages a volume.
const TOGETHER: u64 = 5;

/// Refuses a first directory that is older than another one by Longhorn's counters, and says which one is by the times. Of what another
/// volume of ours has left its records tell more (`adopt`).
pub(super) fn check(volume: &str, directories: &[PathBuf]) -> Result<()> {
    let mut held: Vec<(&Path, Survey)> = Vec::new();
    for directory in directories {
        held.push((directory, survey(directory)?));
    }
    if held.iter().all(|(_, survey)| !survey.imported) {
        return Ok(());
    }
    let counted: Vec<(&Path, u64)> =
        held.iter().filter_map(|(directory, survey)| Some((*directory, survey.revision?))).collect();
    match counted.len() == held.len() {
        true => by_counter(&counted),
        false => {
            tell_times(volume, &held);
            Ok(())
        }
    }
}

fn by_counter(counted: &[(&Path, u64)]) -> Result<()> {
    let (first, best) = (counted.first(), counted.iter().max_by_key(|(_, count)| count));
    let (Some((first, own)), Some((best, most))) = (first, best) else { return Ok(()) };
    if own < most {
        bail!(
            "{} has {own} writes by Longhorn's revision.counter, and {} has {most}: the first one that is named counts, so name the latter \
             first, or leave it out",
            first.display(),
            best.display()
        );
    }
    Ok(())
}

fn tell_times(volume: &str, held: &[(&Path, Survey)]) {
    let (first, last) = (held.first(), held.iter().max_by_key(|(_, survey)| survey.written));
    let (Some((first, own)), Some((last, other))) = (first, last) else { return };
    if other.written > own.written + TOGETHER {
        tell!(
            "{} was written last at {}, and {} at {}: the first one that is named counts. If the former is older, `longhornctl release {volume}` \
             before it is up, and import with the latter first",
            first.display(),
            rfc3339(own.written),
            last.display(),
            rfc3339(other.written)
        );
    }
}
