//! `release --dir`: directories become Longhorn's where there is no record of their volume, as on the nodes of a cluster, where
//! resources say what a volume is made of.
//!
//! All there is to go by is what each directory says of itself. It is released if its last process closed it cleanly and it was a
//! member of the epoch that it has recorded; whether a younger one counts that it was left out of, only the others know, and whoever
//! compares what is printed. All directories are judged and locked before the first one changes.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use lh_block::Epoch;
use replica::store::{Release, Survey, survey};
use serde::Serialize;

use super::super::args::Output;
use super::super::output::{print_json, print_table, table_with_prose};
use super::super::{Context, place};
use super::prepare;
use crate::progress::Progress;
use crate::tell::tell;

/// What to do where a directory may lack something that its volume has.
const NEXT: &str = "attach its volume and detach it again, then release it";

/// What became of the directories, as `release --dir -o json` prints it.
#[derive(Debug, Default, Serialize)]
struct DirectoriesView {
    directories: Vec<DirectoryView>,
}

#[derive(Debug, Serialize)]
struct DirectoryView {
    path: PathBuf,
    /// Made fit for Longhorn now; otherwise it was Longhorn's already, and at most the rest of what was ours went.
    released: bool,
    /// The last epoch that the replica had recorded; null where there was none.
    epoch: Option<EpochView>,
}

/// As a Volume's `status.epoch` has it, but for the form of the generation, which is the one of `status -o json`.
#[derive(Debug, Serialize)]
struct EpochView {
    generation: u64,
    counter: u64,
    members: Vec<String>,
    id: String,
}

impl From<&Epoch> for EpochView {
    fn from(epoch: &Epoch) -> Self {
        Self {
            generation: epoch.generation.into(),
            counter: epoch.counter,
            members: epoch.members.clone(),
            id: format!("{:032x}", epoch.id.0),
        }
    }
}

pub(super) fn run(context: &Context, directories: &[PathBuf]) -> Result<()> {
    let mut found: Vec<(PathBuf, Survey)> = Vec::new();
    for directory in directories {
        let directory = directory.canonicalize().with_context(|| directory.display().to_string())?;
        // However it is spelt.
        if found.iter().any(|(other, _)| *other == directory) {
            continue;
        }
        place::check_apart(&context.root, &directory, what_to_do)?;
        let held = survey(&directory)?;
        check(&directory, &held)?;
        found.push((directory, held));
    }
    check_epochs(&found)?;
    let prepared = prepare(found.iter().map(|(directory, _)| directory.as_path()))?;
    for (release, (directory, held)) in prepared.iter().zip(&found) {
        if !release.is_as(held) {
            bail!("{} was in use meanwhile: {NEXT}", directory.display());
        }
    }
    let mut view = DirectoriesView::default();
    let done = carry_out(prepared, &found, &mut view);
    // What is done is done, also where the next one failed.
    if done.is_ok() || !view.directories.is_empty() {
        show(context, &view)?;
    }
    done
}

fn what_to_do(owner: &str) -> String {
    format!("`longhornctl release {owner}` releases all of its directories")
}

/// Refuses a directory of which it is not sure that it holds what its volume held when it was in use last.
fn check(directory: &Path, held: &Survey) -> Result<()> {
    let shown = directory.display();
    if held.rebuilding {
        bail!("{shown} is half rebuilt and not the volume: {NEXT} once it is in sync, or leave it out");
    }
    // Another program has written it, or nothing of ours has: what it holds is what that one reads in it.
    if held.imported {
        return Ok(());
    }
    if !held.clean {
        bail!("{shown} was not closed cleanly, and may differ from the volume's other replicas: {NEXT}");
    }
    match &held.epoch {
        None => bail!(
            "{shown} was never in sync with a volume, and has nothing that would count: leave it out, or {NEXT}"
        ),
        // It was announced to this replica and never made.
        Some(epoch) if epoch.counter == 0 => {
            bail!("{shown} was not in use since the start of its volume was begun: {NEXT}")
        }
        Some(_) => Ok(()),
    }
}

/// Of replicas of one volume those count that have recorded the youngest epoch. Refuses others.
fn check_epochs(found: &[(PathBuf, Survey)]) -> Result<()> {
    let told: Vec<(&PathBuf, &Epoch)> =
        found.iter().filter_map(|(path, held)| Some((path, held.epoch.as_ref()?))).collect();
    for (path, epoch) in &told {
        let others = told.iter().filter(|(_, other)| are_of_one_volume(epoch, other));
        let Some((newest, newer)) = others.max_by_key(|(_, other)| other.order()) else { continue };
        if newer != epoch {
            bail!(
                "{} has recorded the epoch {}, and {} the younger one {} of the same volume: the first was left out of the volume and \
                 lacks what was written since, so leave it out here, too",
                path.display(),
                number(epoch),
                newest.display(),
                number(newer)
            );
        }
    }
    Ok(())
}

/// They have a member in common, or members that are called after one volume.
fn are_of_one_volume(one: &Epoch, other: &Epoch) -> bool {
    let volume = |epoch: &Epoch| Some(epoch.members.first()?.rsplit_once("-r-")?.0.to_owned());
    one.members.iter().any(|member| other.has(member))
        || volume(one).is_some_and(|name| volume(other) == Some(name))
}

/// What tells one epoch of a volume from another, for people.
fn number(epoch: &Epoch) -> String {
    format!("{}/{}", epoch.generation, epoch.counter)
}

fn carry_out(prepared: Vec<Release>, found: &[(PathBuf, Survey)], view: &mut DirectoriesView) -> Result<()> {
    let mut progress = Progress::new();
    for (release, (path, held)) in prepared.into_iter().zip(found) {
        progress.say(&format!("releasing {}", path.display()));
        let released = !release.is_longhorns();
        release.carry_out()?;
        let epoch = held.epoch.as_ref().map(EpochView::from);
        view.directories.push(DirectoryView { path: path.clone(), released, epoch });
    }
    Ok(())
}

fn show(context: &Context, view: &DirectoriesView) -> Result<()> {
    if context.output == Output::Json {
        return print_json(view);
    }
    let mut table = table_with_prose(&["DIRECTORY", "IT IS", "EPOCH", "MEMBERS"], &[3]);
    for DirectoryView { path, released, epoch } in &view.directories {
        let became = if *released { "released" } else { "Longhorn's already" };
        let (number, members) = match epoch {
            Some(epoch) => (format!("{}/{}", epoch.generation, epoch.counter), epoch.members.join(", ")),
            None => ("-".to_owned(), "-".to_owned()),
        };
        table.add_row([path.display().to_string(), became.to_owned(), number, members]);
    }
    print_table(&table)?;
    tell!(
        "what is named above is Longhorn's; a replica whose epoch is older than that of another one of its volume lacks what was written \
         since"
    );
    Ok(())
}
