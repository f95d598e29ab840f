//! `replica add`, `rm` and `rebuild`: who holds a volume's bytes.
//!
//! The record names a replica before the engine hears of it, and until its data is gone after the engine has let it go: an engine that
//! is started anew in between takes the record's replicas, and either outcome is whole.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use control::host::{Quorum, ReplicaRecord, Root, VolumeRecord};
use control::proto::volume::volume_operations_client::VolumeOperationsClient;
use control::proto::volume::{NamedReplica, ReplicaName};
use control::transport::is_gone;
use replica::store::{BackingFile, CreateOptions, Directory};
use tonic::transport::Channel;

use super::Context;
use super::args::Output;
use super::manager::Manager;
use super::observe::{Attachment, Mode, ReplicaView, ask_engine, observe};
use super::output::{counted, print, print_json};
use super::remove::tell_left;
use super::{beneath, delete, engine, interrupt, lock, place, room, start};
use crate::daemon::keep_from_others;
use crate::progress::Progress;
use crate::sentence::sentence;
use crate::tell::tell;

/// How often a rebuild is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// How long a lock of a new directory is waited for: a process that is just being started by another thread shares it for a moment.
const PASSING: Duration = Duration::from_secs(5);

/// How long is waited for a new replica to open its directory, or to say why it cannot.
const OPEN_PATIENCE: Duration = Duration::from_secs(5);

/// How long an engine that was just started may take until it changes its replicas.
const OPENS: Duration = Duration::from_secs(20);

/// How long a replica may take to open its new directory and be heard by the engine.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// The engine's operations, if the volume is up.
pub(super) async fn connect(root: &Root, volume: &str) -> Result<VolumeOperationsClient<Channel>> {
    engine::reach(root, volume).await.map(VolumeOperationsClient::new)
}

pub(super) async fn add(context: &Context, volume: &str, directory: Option<PathBuf>) -> Result<()> {
    let root = &context.root;
    let mut progress = Progress::of_bytes("bringing it in sync");
    let (lock, mut record) = lock::volume(root, volume)?;
    let mut engine = connect(root, volume).await?;
    check_none_is_left(root, &record, None).await?;
    note_who_has_learnt(root, &mut record).await?;
    let is_given = directory.is_some();
    let replica = new_replica(root, &mut record, directory)?;
    beneath::check(root, volume, &replica.directory)?;
    room::check_replica(volume, &replica.directory, is_given)?;
    room::check_root(root).with_context(|| format!("volume {volume} does not take another replica"))?;
    let mut manager = Manager::ensure(root).await?;
    keep_from_others();
    let given = is_given.then_some(replica.directory.as_path());
    let taken = place::take(root, given, another)?;
    // The record has a replica that the engine knows, or has it no more.
    let held = interrupt::hold();
    record.store(root)?;
    drop(taken);
    let not_taken = |e: anyhow::Error| e.context(format!("volume {volume} does not take another replica"));
    if let Err(refused) = make_directory(root, &record, &replica).map_err(not_taken) {
        // What is there somebody else has put there since it was looked at: it stays.
        return Err(left(refused, strike(root, &mut record, &replica)));
    }
    let begun = async {
        manager.create(&replica.name, start::replica_args(root, &record, &replica).command_line()).await?;
        let opening = start::wait_for_new_replica(root, &record, &replica, &mut manager);
        // One that takes longer, or whose command is interrupted, is the engine's to wait for.
        tokio::select! {
            opened = tokio::time::timeout(OPEN_PATIENCE, opening) => opened.unwrap_or(Ok(()))?,
            () = held.wait() => {}
        }
        take_in(root, volume, &mut engine, &replica.name).await
    };
    match begun.await {
        Ok(Taken::Yes) => {}
        // It may be a member by now: without the engine's word its data does not go.
        Ok(Taken::Unknown) => bail!(
            "the engine ended before it answered: `longhornctl status {volume}` says whether volume {volume} has replica {0} now, and \
             `longhornctl replica rm {volume} {0}` deletes it",
            replica.name
        ),
        Err(refused) => return Err(left(not_taken(refused), take_back(root, &mut record, &replica).await)),
    }
    held.let_go();
    drop(lock);
    wait_until_in_sync(context, &record, &replica.name, &mut progress).await?;
    drop(progress);
    if replica.learner {
        let (_lock, mut record) = lock::volume(root, volume)?;
        note_who_has_learnt(root, &mut record).await?;
    }
    told(context, &record, &replica.name, &format!("{volume} has {} replicas", record.replicas.len())).await
}

/// What an engine has done that was not heard to refuse a replica.
enum Taken {
    /// It has it.
    Yes,
    /// It was asked, and ended, or did not come back, before its answer was through.
    Unknown,
}

/// Has the engine take a replica in that the record has. One that is gone before its answer is through is asked once more.
///
/// # Errors
/// It does not have it.
async fn take_in(
    root: &Root,
    volume: &str,
    engine: &mut VolumeOperationsClient<Channel>,
    name: &str,
) -> Result<Taken> {
    let address = format!("unix:{}", root.data_socket(name).display());
    let replica = NamedReplica { name: name.to_owned(), address };
    let mut added = engine.replica_add(replica.clone()).await;
    if added.as_ref().is_err_and(is_gone) {
        let Ok(mut next) = connect(root, volume).await else { return Ok(Taken::Unknown) };
        added = next.replica_add(replica).await;
    }
    match added {
        Ok(_) => Ok(Taken::Yes),
        // An engine that was started anew meanwhile has the record's replicas, this one among them.
        Err(known) if known.code() == tonic::Code::AlreadyExists => Ok(Taken::Yes),
        Err(lost) if is_gone(&lost) => Ok(Taken::Unknown),
        Err(refused) => Err(refused.into()),
    }
}

/// Why a replica was not added, and what is left of it.
fn left(refused: anyhow::Error, taken_back: Result<()>) -> anyhow::Error {
    match taken_back {
        Ok(()) => refused,
        Err(left) => refused.context(format!("(and it could not be taken back: {})", sentence(&left))),
    }
}

/// Makes the directory of a replica whose volume stands on a backing file, as imported ones may, on the same file, since what lies below
/// all layers comes over with no copy; and that of one which is to lie elsewhere, whose process makes none. Any other one is made by its
/// process.
///
/// # Errors
/// It was not made: nothing of it is there.
fn make_directory(root: &Root, record: &VolumeRecord, replica: &ReplicaRecord) -> Result<()> {
    let others =
        record.replicas.iter().filter(|other| other.name != replica.name && other.directory.exists());
    let backing = others.map(|other| BackingFile::of(&other.directory)).find_map(Result::ok).flatten();
    if backing.is_none() && start::is_below(root, replica) {
        return Ok(());
    }
    let path = |file: &BackingFile| {
        let path = file.path().to_str().map(str::to_owned);
        path.with_context(|| file.path().display().to_string())
    };
    let options = CreateOptions {
        size: record.size,
        backing: backing.as_ref().map(path).transpose()?,
        lock_wait: PASSING,
    };
    let directory = &replica.directory;
    fs::create_dir_all(directory.parent().unwrap_or(directory))?;
    let (mut made, mut store) = Directory::create(directory, &options)?;
    let closed = made.close_clean(store.close());
    drop(made);
    if closed.is_err() {
        delete::replica(root, replica)?;
    }
    closed.with_context(|| directory.display().to_string())
}

/// A replica that has come in sync is one like any other: with it a majority is of two, and it may get a third one. Until that is
/// noted an engine that starts begins with the other one alone, which has as much.
///
/// # Errors
/// One is not in sync yet.
async fn note_who_has_learnt(root: &Root, record: &mut VolumeRecord) -> Result<()> {
    if !record.replicas.iter().any(|replica| record.learns(replica)) {
        return Ok(());
    }
    let view = observe(root, record).await?;
    let is_in_sync = |name: &String| view.replicas.iter().any(|r| r.name == *name && r.mode == Mode::Rw);
    if let Some(learner) = record.replicas.iter().find(|r| r.learner && !is_in_sync(&r.name)) {
        bail!(
            "volume {0} takes another replica once {1} is in sync: with the quorum majority the first two come one after the other, see \
             `longhornctl status {0} --watch`",
            record.name,
            learner.name
        );
    }
    record.replicas.iter_mut().for_each(|replica| replica.learner = false);
    Ok(record.store(root)?)
}

/// With `majority` the record and the engine come to differ by one replica at most: any majority of the one has one in common with any of
/// the other then. So what a command has left that was broken off is ended before another one goes on.
///
/// # Errors
/// The record has a replica that its engine does not have, and it is not the one that leaves.
async fn check_none_is_left(root: &Root, record: &VolumeRecord, leaver: Option<&str>) -> Result<()> {
    if record.quorum != Quorum::Majority {
        return Ok(());
    }
    let Some(engine) = ask_engine(root, &record.name).await else {
        bail!("the engine of volume {} does not say which replicas it has: try again", record.name);
    };
    if leaver.is_some_and(|name| !engine.has(name)) {
        return Ok(());
    }
    match record.replicas.iter().find(|replica| !engine.has(&replica.name)) {
        None => Ok(()),
        Some(left) => bail!(
            "replica {1} of volume {0} was added or taken out by a command that was broken off: `longhornctl replica rm {0} {1}` ends \
             that first",
            record.name,
            left.name
        ),
    }
}

/// Adds a replica to the record; what it holds of the disk is still nothing.
fn new_replica(root: &Root, record: &mut VolumeRecord, directory: Option<PathBuf>) -> Result<ReplicaRecord> {
    let directory = directory.map(|directory| empty_directory(&directory)).transpose()?;
    if let Some(directory) = &directory {
        place::check_apart(root, directory, another)?;
    }
    record.add_replica(root)?;
    let learner = record.quorum == Quorum::Majority && record.replicas.len() == 2;
    let Some(replica) = record.replicas.last_mut() else { bail!("the record has no replica") };
    replica.learner = learner;
    if let Some(directory) = directory {
        replica.directory = directory;
    }
    Ok(replica.clone())
}

fn another(_: &str) -> String {
    "choose another one".to_owned()
}

/// A place for a replica: a directory that is empty, or is not there while its parent is.
fn empty_directory(directory: &Path) -> Result<PathBuf> {
    match fs::read_dir(directory) {
        Ok(mut entries) => match entries.next() {
            None => Ok(directory.canonicalize()?),
            Some(_) => bail!("{} is not empty: name an empty or a new directory", directory.display()),
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let absolute = std::path::absolute(directory)?;
            match absolute.parent() {
                Some(parent) if parent.is_dir() => {
                    Ok(parent.canonicalize()?.join(absolute.file_name().unwrap_or_default()))
                }
                _ => bail!("{} cannot be made: the folder above it is not there", directory.display()),
            }
        }
        Err(e) => Err(e).with_context(|| directory.display().to_string()),
    }
}

/// Makes a replica that the engine does not have not exist. Its data goes before its place in the record does: what was broken off
/// in between is to be ended by its name.
async fn take_back(root: &Root, record: &mut VolumeRecord, replica: &ReplicaRecord) -> Result<()> {
    // It may be the instance manager that was lost.
    let mut manager = Manager::ensure(root).await?;
    manager.end(std::slice::from_ref(&replica.name)).await?;
    delete::replica(root, replica)?;
    strike(root, record, replica)
}

fn strike(root: &Root, record: &mut VolumeRecord, replica: &ReplicaRecord) -> Result<()> {
    record.replicas.retain(|r| r.name != replica.name);
    Ok(record.store(root)?)
}

/// Shows a rebuild until the replica is RW. It goes on without this command, too.
async fn wait_until_in_sync(
    context: &Context,
    record: &VolumeRecord,
    name: &str,
    progress: &mut Progress,
) -> Result<()> {
    let mut heard_by = Instant::now() + START_PATIENCE;
    loop {
        let view = observe(&context.root, record).await?;
        let Some(replica) = view.replicas.iter().find(|r| r.name == name) else {
            bail!("replica {name} was taken out by another command");
        };
        match replica.mode {
            Mode::Rw => return Ok(()),
            Mode::Wo => {
                heard_by = Instant::now() + START_PATIENCE;
                if let Some((done, total)) = replica.rebuild {
                    progress.at(done, total);
                }
            }
            _ if view.state != Attachment::Attached => bail!(
                "volume {0} is {1}: the rebuild goes on when it is up, see `longhornctl status {0}`",
                record.name,
                view.state
            ),
            _ if replica.has_given_up => bail!("replica {name} does not start any more: {}", replica.remark),
            _ if Instant::now() > heard_by => bail!(
                "replica {name} is not in sync yet ({}): the engine goes on trying, see `longhornctl status {} --watch`",
                if replica.remark.is_empty() { "no reason is known" } else { &replica.remark },
                record.name
            ),
            _ => {}
        }
        tokio::time::sleep(LOOK).await;
    }
}

pub(super) async fn rebuild(context: &Context, volume: &str, name: &str) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    check_known(&context.root, &record, name, "rebuild")?;
    let mut engine = connect(&context.root, volume).await?;
    let mut progress = Progress::of_bytes("bringing it in sync");
    let asked = engine.replica_rebuild(ReplicaName { name: name.to_owned() }).await;
    asked.with_context(|| format!("replica {name} cannot be rebuilt"))?;
    wait_until_in_sync(context, &record, name, &mut progress).await?;
    drop(progress);
    told(context, &record, name, &format!("{name} is in sync")).await
}

/// The record has the replica no more. An engine that was started while it still did waits for it, and counts it: it is told once more,
/// which it hears once it is open. One that does not let it go does not know it after its next start.
async fn forget(root: &Root, volume: &str, name: &str) {
    let told = async {
        while let Ok(mut engine) = connect(root, volume).await {
            match engine.replica_remove(ReplicaName { name: name.to_owned() }).await {
                Err(status) if status.code() != tonic::Code::NotFound => tokio::time::sleep(LOOK).await,
                _ => return,
            }
        }
    };
    // Nothing is lost if it does not: the volume is as it was asked to be at its next start.
    tokio::time::timeout(OPENS, told).await.ok();
}

pub(super) async fn remove(context: &Context, volume: &str, name: &str) -> Result<()> {
    let root = &context.root;
    let (_lock, mut record) = lock::volume(root, volume)?;
    let replica = check_known(root, &record, name, "rm")?;
    let mut engine = connect(root, volume).await?;
    check_none_is_left(root, &record, Some(name)).await?;
    // Who ends its process is there before the engine lets it go.
    Manager::ensure(root).await?;
    let asked = engine.replica_remove(ReplicaName { name: name.to_owned() }).await;
    match asked {
        // Taken out by a command that did not get further.
        Err(status) if status.code() == tonic::Code::NotFound => {}
        Err(refused) => return Err(refused).with_context(|| format!("replica {name} stays")),
        Ok(_) => {}
    }
    let is_away = !start::is_below(root, &replica) && !delete::is_there(&replica);
    take_back(root, &mut record, &replica).await?;
    forget(root, volume, name).await;
    if is_away {
        tell_left(name, &replica.directory);
    }
    if context.output == Output::Json {
        return print_json(&observe(root, &record).await?.replicas);
    }
    let left = counted(record.replicas.len(), "replica");
    let deleted = if is_away { String::new() } else { format!("; the data of {name} is deleted") };
    tell!("{volume} has {left}{deleted}");
    Ok(())
}

/// `word`: what is to be done with it.
fn check_known(root: &Root, record: &VolumeRecord, name: &str, word: &str) -> Result<ReplicaRecord> {
    let volume = &record.name;
    match (record.replica(name), place::replica_at(root, record, name)) {
        (Some(replica), _) => Ok(replica.clone()),
        (None, Some(there)) => {
            bail!("{name} is where replica {0} is: `longhornctl replica {word} {volume} {0}`", there.name)
        }
        (None, None) => {
            bail!("volume {volume} has no replica {name}: `longhornctl replica ls {volume}` lists them")
        }
    }
}

/// The replica as JSON, or its name and a sentence.
async fn told(context: &Context, record: &VolumeRecord, name: &str, sentence: &str) -> Result<()> {
    if context.output == Output::Json {
        let view = observe(&context.root, record).await?;
        let replica: Option<ReplicaView> = view.replicas.into_iter().find(|r| r.name == name);
        return print_json(&replica);
    }
    tell!("{sentence}");
    // A name that was made up nobody else knows.
    print(&format!("{name}\n"))
        .with_context(|| format!("replica {name} of volume {} is in sync", record.name))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use control::chain::Layer;
    use control::cloning::{CloneProgress, CloneSource};
    use control::engine::{
        Answer, EngineControl, EngineError, EngineStatus, Operation, PurgeProgress, ScrubProgress,
        SnapshotRequest,
    };
    use control::host::engine_name;
    use control::proto::ptypes;

    use super::*;

    /// An engine that is not open before it was asked so often, and that then has the replica, or does not.
    struct Opening {
        refusals: u32,
        has_it: bool,
        asked: AtomicU32,
    }

    impl EngineControl for Opening {
        fn operate(&self, operation: Operation) -> Answer<()> {
            assert!(matches!(&operation, Operation::RemoveReplica { name } if name == "demo-r-1"));
            let answer = match self.asked.fetch_add(1, Ordering::Relaxed) {
                n if n < self.refusals => Err(EngineError::NotNow("the volume is not open yet".to_owned())),
                _ if self.has_it => Ok(()),
                _ => Err(EngineError::NotFound("there is no such replica".to_owned())),
            };
            Box::pin(std::future::ready(answer))
        }

        fn status(&self) -> EngineStatus {
            EngineStatus { volume: "demo".to_owned(), ..EngineStatus::default() }
        }

        fn snapshot(&self, _: SnapshotRequest) -> Answer<()> {
            unreachable!()
        }

        fn chain(&self) -> Answer<Vec<Layer>> {
            unreachable!()
        }

        fn purges(&self) -> Vec<PurgeProgress> {
            unreachable!()
        }

        fn scrub(&self) -> Option<ScrubProgress> {
            unreachable!()
        }

        fn fill_from(&self, _: CloneSource) -> Answer<()> {
            unreachable!()
        }

        fn cloning(&self) -> Option<CloneProgress> {
            unreachable!()
        }

        fn shutdown(&self) -> Answer<()> {
            unreachable!()
        }

        fn activity(&self) -> ptypes::Activity {
            unreachable!()
        }
    }

    /// It was started while the record still had the replica.
    #[tokio::test]
    async fn an_engine_that_is_not_open_yet_is_told_again_to_let_a_replica_go() {
        for (refusals, has_it) in [(0, true), (2, true), (2, false)] {
            let dir = tempfile::tempdir().unwrap();
            let root = Root::at(dir.path()).unwrap();
            root.create().unwrap();
            let engine = Arc::new(Opening { refusals, has_it, asked: AtomicU32::new(0) });
            let (socket, served) = (root.control_socket(&engine_name("demo")), Arc::clone(&engine));
            let server =
                tokio::spawn(async move { control::engine::serve(&socket, "demo-e-0", served).await });
            while connect(&root, "demo").await.is_err() {
                assert!(!server.is_finished());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            forget(&root, "demo", "demo-r-1").await;
            let asked = engine.asked.load(Ordering::Relaxed);
            assert_eq!(asked, refusals + 1, "{refusals} times not open, {has_it}");
            server.abort();
        }
    }

    #[test]
    fn a_new_replica_takes_no_place_that_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("new");
        assert!(empty_directory(&place).unwrap().ends_with("new"));
        fs::create_dir(&place).unwrap();
        assert_eq!(empty_directory(&place).unwrap(), place.canonicalize().unwrap());
        fs::write(place.join("photo"), "x").unwrap();
        assert!(empty_directory(&place).unwrap_err().to_string().contains("not empty"));
        assert!(empty_directory(&dir.path().join("no/where")).unwrap_err().to_string().contains("above"));
    }
}
