//! What a volume is like right now: its record, what its instance manager remembers of its processes, and what its
//! engine says. Nothing is changed, and no manager need run.

mod words;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use control::host::{Quorum, ReplicaRecord, Root, VolumeRecord, engine_name};
use control::manager::{ProcessRecord, State};
use control::proto::ptypes;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::volume::Wait;
use lh_block::Epoch;
use replica::store::survey;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use tonic::transport::Channel;

use super::only_replica;
use super::room::more_space;
use crate::arguments::Checksum;
use crate::next_step;
pub(super) use words::{Attachment, Mode, Robustness};

/// How long an engine may take to say how it fares. It answers from memory.
pub(super) const ANSWER_PATIENCE: Duration = Duration::from_secs(3);

/// What is said of a volume whose processes nobody watches.
const NO_MANAGER: &str = "no instance manager runs";

/// What is said of a volume whose replicas' disks are all full.
pub(super) fn no_space(volume: &str) -> String {
    format!(
        "the disks of its replicas are full, and writes wait until there is space again: {}; where the volume has snapshots, `longhornctl snapshot rm {volume} NAME` and `longhornctl snapshot purge {volume}` may free some, too",
        more_space(volume)
    )
}

/// What an engine says that no replica answers, or fewer than the quorum wants, with what becomes of requests.
fn outage(said: &str, io_timeout_seconds: u64) -> String {
    match io_timeout_seconds {
        0 => format!("{said}: requests wait for them, however long it takes"),
        seconds => {
            format!("{said}: requests wait for them, {seconds} s at most (--io-timeout), and fail then")
        }
    }
}

/// What is said of a volume whose clients have lost something, as long as they have it open.
const LOST: &str = "the hosts of all its replicas lost their power, or their disks failed, and what was written and not flushed before \
    may be lost: flushes failed, or will. Unmount and mount a file system on it, or start what uses it anew";

/// A volume, as `status -o json` prints it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VolumeView {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Whether it is there to be used.
    pub state: Attachment,
    /// How many of its replicas it can do without.
    pub robustness: Robustness,
    /// The frontend in use; of a stopped volume, the one asked for.
    pub frontend: String,
    /// The device if there is one, else the URI, else empty.
    pub endpoint: String,
    /// The block device.
    pub device: Option<String>,
    /// The URI of the export.
    pub uri: Option<String>,
    /// The engine's generation; of a stopped volume, the last one issued.
    pub generation: u64,
    /// Every replica of the record.
    pub replicas: Vec<ReplicaView>,
    /// The engine's process.
    pub engine_pid: Option<u32>,
    /// Blocks that differed between members when the engine started, and were made equal.
    pub repaired_blocks: u64,
    /// What obeys, sends data to, or serves the volume to whoever reaches it on the network; each with what it is.
    pub insecure: Vec<String>,
    /// What is wrong or being waited for, one sentence; empty if nothing.
    pub remark: String,
    /// Logical block of the device in bytes.
    pub block_size: u32,
    /// How many replicas have to agree.
    pub quorum: Quorum,
    /// How long requests wait when no replica is left; 0 for ever.
    pub io_timeout_seconds: u64,
    /// Which reads are compared with checksums.
    pub checksum: Checksum,
    /// Most snapshots, removed ones not counted.
    pub snapshot_max_count: u32,
    /// No snapshot once head and snapshots take more bytes; 0 for any.
    pub snapshot_max_size: u64,
    /// Where its processes write their logs: NAME.log, by the names of the engine and of replicas.
    pub log_directory: PathBuf,
}

/// A replica, as `replica ls -o json` prints it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplicaView {
    /// Its name.
    pub name: String,
    /// What it does for the volume; of a stopped volume, the last one known.
    pub mode: Mode,
    /// Where its engine reaches it.
    pub address: String,
    /// Its directory.
    pub path: PathBuf,
    /// Its process.
    pub pid: Option<u32>,
    /// Of a running rebuild, bytes done and bytes in all.
    #[serde(serialize_with = "rebuild")]
    pub rebuild: Option<(u64, u64)>,
    /// Why it is not RW, one sentence; empty if it is.
    pub remark: String,
    /// Its process does not start any more.
    #[serde(skip)]
    pub has_given_up: bool,
}

/// Of a running rebuild, bytes done and bytes in all.
fn rebuild<S: serde::Serializer>(rebuild: &Option<(u64, u64)>, to: S) -> Result<S::Ok, S::Error> {
    rebuild.map(|(done, total)| BTreeMap::from([("done", done), ("total", total)])).serialize(to)
}

/// What an engine says of itself.
#[derive(Clone, Debug)]
pub(super) struct EngineView {
    pub volume: ptypes::Volume,
    pub replicas: Vec<ptypes::ControllerReplica>,
}

impl EngineView {
    /// It has a replica of this name, whatever that is to it.
    pub(super) fn has(&self, replica: &str) -> bool {
        find(&self.replicas, replica).is_some()
    }
}

/// An engine's control connection, if its process listens.
pub(super) async fn connect_engine(root: &Root, volume: &str) -> Option<ControllerServiceClient<Channel>> {
    let socket = root.control_socket(&engine_name(volume));
    control::transport::connect(&socket).await.ok().map(ControllerServiceClient::new)
}

/// What the volume's engine says, if it answers.
pub(super) async fn ask_engine(root: &Root, volume: &str) -> Option<EngineView> {
    let ask = async {
        let mut engine = connect_engine(root, volume).await?;
        let volume = engine.volume_get(()).await.ok()?.into_inner();
        let replicas = engine.replica_list(()).await.ok()?.into_inner().replicas;
        Some(EngineView { volume, replicas })
    };
    tokio::time::timeout(ANSWER_PATIENCE, ask).await.ok().flatten()
}

/// What the instance manager remembers of a process, if its file is not damaged; why nobody knows it, if it is.
///
/// # Errors
/// The file cannot be read.
pub(super) fn remembered(root: &Root, name: &str) -> Result<Result<Option<ProcessRecord>, String>> {
    match ProcessRecord::load(root, name) {
        Err(e) if e.kind() == io::ErrorKind::InvalidData => Ok(Err(e.to_string())),
        read => Ok(Ok(read?)),
    }
}

/// What the instance manager remembers of a volume's processes, by their names.
#[derive(Default)]
struct Processes {
    known: HashMap<String, ProcessRecord>,
    /// Those whose files are damaged, which says nothing of whether they run; and what is wrong.
    damaged: HashMap<String, String>,
}

impl Processes {
    fn of(root: &Root, record: &VolumeRecord) -> Result<Self> {
        let mut all = Self::default();
        let replicas = record.replicas.iter().map(|replica| replica.name.clone());
        for name in replicas.chain([engine_name(&record.name)]) {
            match remembered(root, &name)? {
                Ok(process) => all.known.extend(process.map(|process| (name, process))),
                Err(damage) => all.damaged.extend([(name, damage)]),
            }
        }
        Ok(all)
    }
}

/// The volume of that record.
pub(super) async fn observe(root: &Root, record: &VolumeRecord) -> Result<VolumeView> {
    let Processes { known, damaged } = Processes::of(root, record)?;
    let process = known.get(&engine_name(&record.name));
    let damage = damaged.get(&engine_name(&record.name));
    let running = damage.is_some() || process.is_some_and(|p| p.pid().is_some());
    let engine = if running { ask_engine(root, &record.name).await } else { None };
    let unwatched = process.is_some() && !has_manager(root);
    let abandoned = unwatched && !running;
    let shown_at = engine.as_ref().and_then(|e| open_address(&e.volume.uri));
    let insecure = insecure(root, known.values(), shown_at);
    let last_modes = LastModes::of(root, record, known.is_empty() && damaged.is_empty())?;
    let replicas = record.replicas.iter().enumerate().map(|(number, replica)| {
        let said = engine.as_ref().and_then(|e| find(&e.replicas, &replica.name));
        let last = last_modes.mode(number, replica);
        replica_view(root, (record, replica), said, known.get(&replica.name), last)
    });
    let mut replicas: Vec<ReplicaView> = replicas.collect();
    name_what_is_left(&record.name, engine.as_ref(), &damaged, &mut replicas);
    if engine.is_some() {
        name_a_way_back(root, &record.name, &mut replicas);
    }
    let replicas_run = replicas.iter().any(|r| r.pid.is_some());
    let state = if abandoned { Attachment::Detached } else { state_of(process, engine.as_ref()) };
    let said = engine.as_ref().map(|e| &e.volume);
    let text = |field: fn(&ptypes::Volume) -> &String| said.map(field).filter(|t| !t.is_empty()).cloned();
    let issued = record.authority(root).highest_generation()?;
    let in_one_sentence = match (record.check_ready(), damage) {
        _ if abandoned => {
            format!("its engine died and {NO_MANAGER}: `longhornctl up {}` starts both", record.name)
        }
        (Err(e), _) => e.to_string(),
        (Ok(()), Some(damage)) => damage.clone(),
        (Ok(()), None) if process.is_none() && replicas_run => format!(
            "its replicas run without an engine, as while it is started or stopped: `longhornctl up {0}` or \
             `longhornctl down {0}` ends that",
            record.name
        ),
        (Ok(()), None) => match remark(process, said, record.io_timeout_seconds) {
            nothing if nothing.is_empty() && unwatched => format!(
                "{NO_MANAGER}, which would start again what dies: `longhornctl up {}` starts one",
                record.name
            ),
            remark if unwatched && said.is_some_and(|v| v.waits() == Wait::Replicas) => format!(
                "{remark}; {NO_MANAGER}, which starts replicas again: `longhornctl up {}` starts one",
                record.name
            ),
            remark => remark,
        },
    };
    Ok(VolumeView {
        name: record.name.clone(),
        // Of a running volume the engine's: whoever makes it larger by Longhorn's calls tells no record.
        size: said.and_then(|v| u64::try_from(v.size).ok()).map_or(record.size, |size| size.max(record.size)),
        state,
        robustness: robustness(state, engine.is_some(), &replicas),
        frontend: text(|v| &v.frontend).unwrap_or_else(|| record.frontend.clone()),
        endpoint: text(|v| &v.endpoint).unwrap_or_default(),
        device: text(|v| &v.device),
        uri: text(|v| &v.uri),
        generation: match said {
            Some(v) => v.generation,
            // One that does not answer has the number that its manager has started it with.
            None => process.and_then(ProcessRecord::generation).unwrap_or(issued.into()),
        },
        replicas,
        engine_pid: process.and_then(ProcessRecord::pid),
        repaired_blocks: said.map_or(0, |v| v.repaired_blocks),
        insecure,
        remark: next_step::complete(&in_one_sentence).into_owned(),
        block_size: record.block_size,
        quorum: record.quorum,
        io_timeout_seconds: record.io_timeout_seconds,
        checksum: if record.checksum_full { Checksum::Full } else { Checksum::Snapshots },
        snapshot_max_count: record.snapshot_max_count,
        snapshot_max_size: record.snapshot_max_size,
        log_directory: root.logs(),
    })
}

/// Of a replica whose process record is damaged that is told; and what ends an addition or removal that was broken off: the record has
/// the replica before the engine does, and longer.
fn name_what_is_left(
    volume: &str,
    engine: Option<&EngineView>,
    damaged: &HashMap<String, String>,
    replicas: &mut [ReplicaView],
) {
    let shown = engine.filter(|engine| engine.volume.frontend_state == "up");
    for replica in replicas {
        let is_unknown = shown.is_some_and(|engine| !engine.has(&replica.name));
        let step = match damaged.get(&replica.name) {
            Some(damage) => damage.clone(),
            None if is_unknown && replica.remark.is_empty() => format!(
                "the engine does not know it, as while it is added or taken out: if that was broken off, \
                 `longhornctl replica rm {volume} {}` deletes it",
                replica.name
            ),
            None => continue,
        };
        replica.remark = next_step::complete(&step).into_owned();
    }
}

/// A replica that has given up, or whose disk is gone, starts from nothing as another one, where others hold what it did. One whose
/// directory below the root is gone is made anew by itself.
fn name_a_way_back(root: &Root, volume: &str, replicas: &mut [ReplicaView]) {
    let own = root.replicas();
    let is_lost = |r: &ReplicaView| {
        r.has_given_up || r.mode != Mode::Rw && !r.path.starts_with(&own) && !r.path.exists()
    };
    if !replicas.iter().any(|r| r.mode == Mode::Rw && !is_lost(r)) {
        return;
    }
    for replica in replicas.iter_mut().filter(|r| is_lost(r)) {
        let why = match replica.path.exists() {
            true => replica.remark.clone(),
            false => format!(
                "{} is not there: mount its disk, and it comes back by itself",
                replica.path.display()
            ),
        };
        let step = format!(
            "{why}. `longhornctl replica rm {volume} {}` and `longhornctl replica add {volume}` put a new one in its place",
            replica.name
        );
        replica.remark = next_step::complete(&step).into_owned();
    }
}

/// True if the instance manager of the root has anything to do with the volume.
pub(super) fn has_processes(root: &Root, record: &VolumeRecord) -> Result<bool> {
    let Processes { known, damaged } = Processes::of(root, record)?;
    Ok(!known.is_empty() || !damaged.is_empty())
}

/// True if no process of the volume runs or is to be started again: what its manager remembers of them has ended.
pub(super) fn have_ended(root: &Root, record: &VolumeRecord) -> Result<bool> {
    let Processes { known, damaged } = Processes::of(root, record)?;
    Ok(damaged.is_empty() && known.values().all(|p| matches!(p.state, State::Stopped | State::Error)))
}

/// Where a URI's server listens on TCP: neither NBD nor iSCSI asks there who comes.
fn open_address(uri: &str) -> Option<String> {
    let (protocol, rest) = uri.split_once("://")?;
    let (address, _) = rest.split_once('/')?;
    match protocol {
        "nbd" => Some(format!("NBD server on {address}")),
        "iscsi" => Some(format!("iSCSI target on {address}")),
        _ => None,
    }
}

/// True if what the URI names is served on an address that only this host reaches.
pub(super) fn is_for_this_host(uri: &str) -> bool {
    let address = uri.split_once("://").and_then(|(_, rest)| rest.split('/').next());
    let address: Option<std::net::SocketAddr> = address.and_then(|text| text.parse().ok());
    address.is_some_and(|address| address.ip().is_loopback())
}

/// What was told to trust the network, by what its command line and its instance manager say, and where the volume is
/// open to the network.
fn insecure<'a>(
    root: &Root,
    processes: impl Iterator<Item = &'a ProcessRecord>,
    shown_at: Option<String>,
) -> Vec<String> {
    let told = processes.filter(|p| p.pid().is_some() && p.args.iter().any(|word| word == "--insecure"));
    let mut named: Vec<String> = told.map(|p| p.name.clone()).collect();
    named.sort();
    named.extend(shown_at);
    named.extend(control::manager::obeys_at(root).map(|address| format!("instance manager on {address}")));
    named
}

/// True if somebody would start the root's processes again: one who hangs, too, with whom the system keeps only so many waiting. Who
/// only looks is no more of them, and goes on.
fn has_manager(root: &Root) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let asked = SocketAddrUnix::new(root.manager_socket())
        .and_then(|at| connect(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?, &at));
    matches!(asked, Ok(()) | Err(Errno::AGAIN))
}

fn state_of(process: Option<&ProcessRecord>, engine: Option<&EngineView>) -> Attachment {
    match (process.map(|p| p.state), engine) {
        (Some(State::Stopped | State::Error), _) | (None, None) => Attachment::Detached,
        (Some(State::Stopping), _) => Attachment::Detaching,
        (_, Some(engine)) if engine.volume.ending => Attachment::Detaching,
        (_, Some(engine)) if engine.volume.frontend_state == "up" => Attachment::Attached,
        (Some(State::Starting | State::Running), _) | (None, Some(_)) => Attachment::Attaching,
    }
}

fn robustness(state: Attachment, engine_answers: bool, replicas: &[ReplicaView]) -> Robustness {
    if state != Attachment::Attached || !engine_answers {
        return Robustness::Unknown;
    }
    match replicas.iter().filter(|r| r.mode == Mode::Rw).count() {
        0 => Robustness::Faulted,
        n if n == replicas.len() => Robustness::Healthy,
        _ => Robustness::Degraded,
    }
}

fn remark(
    process: Option<&ProcessRecord>,
    engine: Option<&ptypes::Volume>,
    io_timeout_seconds: u64,
) -> String {
    match (process, engine) {
        (Some(process), _) if process.state == State::Error => {
            format!("the engine gave up: {}", process.error)
        }
        (_, Some(engine)) if engine.waits() == Wait::Replicas => {
            outage(&engine.waiting_for, io_timeout_seconds)
        }
        (_, Some(engine)) if !engine.waiting_for.is_empty() => engine.waiting_for.clone(),
        (_, Some(engine)) if engine.lacks_space => no_space(&engine.name),
        (_, Some(engine)) if engine.has_lost => LOST.to_owned(),
        (_, Some(_)) => String::new(),
        (Some(process), None) if is_dying(process) => {
            format!("the engine is started again: {}", process.error)
        }
        (Some(process), None) if process.pid().is_some() => "the engine does not answer yet".to_owned(),
        _ => String::new(),
    }
}

/// True if the process has ended and waits for its next start.
fn is_dying(process: &ProcessRecord) -> bool {
    process.state == State::Starting && !process.error.is_empty()
}

fn find<'a>(replicas: &'a [ptypes::ControllerReplica], name: &str) -> Option<&'a ptypes::ControllerReplica> {
    replicas.iter().find(|r| r.address.as_ref().is_some_and(|a| a.instance_name == name))
}

fn replica_view(
    root: &Root,
    (volume, record): (&VolumeRecord, &ReplicaRecord),
    said: Option<&ptypes::ControllerReplica>,
    process: Option<&ProcessRecord>,
    last: Mode,
) -> ReplicaView {
    let remark = match (said, process) {
        // Why it ended says more than that the engine does not reach it.
        (_, Some(process)) if process.state == State::Error || is_dying(process) => process.error.clone(),
        // It ended as asked, by whoever that was: nobody starts it by himself.
        (Some(said), Some(process))
            if process.state == State::Stopped && said.mode() == ptypes::ReplicaMode::Err =>
        {
            format!("its process was told to end: `longhornctl up {}` starts it again", volume.name)
        }
        (Some(said), _) if said.mode() == ptypes::ReplicaMode::Wo && said.rebuild_progress > 0 => {
            format!("{} % in sync", said.rebuild_progress)
        }
        (Some(said), _) => said.reason.clone(),
        (None, _) => String::new(),
    };
    ReplicaView {
        name: record.name.clone(),
        mode: said.map_or(last, |r| r.mode().into()),
        address: format!("unix:{}", root.data_socket(&record.name).display()),
        path: record.directory.clone(),
        pid: process.and_then(ProcessRecord::pid),
        rebuild: said.filter(|r| r.rebuild_total > 0).map(|r| (r.rebuild_done, r.rebuild_total)),
        remark: next_step::complete(&only_replica::advice(volume, &remark)).into_owned(),
        has_given_up: process.is_some_and(|process| process.state == State::Error),
    }
}

/// What each replica was when the volume stopped: a member of the epoch that counts has everything.
struct LastModes {
    /// `None`: there was no epoch yet.
    members: Option<Vec<String>>,
}

impl LastModes {
    /// `is_stopped`: no process of the volume is there, which would have its directory for itself.
    fn of(root: &Root, record: &VolumeRecord, is_stopped: bool) -> Result<Self> {
        let members = match record.quorum {
            Quorum::Any => record.authority(root).epoch()?.map(|epoch| epoch.members),
            // Epochs are recorded by replicas alone.
            Quorum::Majority | Quorum::Unsafe if is_stopped => members_told(record),
            // Nobody can say but their engine.
            Quorum::Majority | Quorum::Unsafe => Some(Vec::new()),
        };
        Ok(Self { members })
    }

    fn mode(&self, number: usize, replica: &ReplicaRecord) -> Mode {
        let in_sync = match &self.members {
            Some(members) => members.contains(&replica.name),
            // Never started: new ones are all empty, of imported ones the first counts.
            None => !replica.imported || number == 0,
        };
        if in_sync { Mode::Rw } else { Mode::Err }
    }
}

/// The members of the newest epoch that the directories of a stopped volume tell of, as far as they have recorded it. None of them where
/// too few tell, with `majority`; `None` where no directory has any epoch of this volume.
fn members_told(record: &VolumeRecord) -> Option<Vec<String>> {
    // What another volume has left there names none of these; one of number 0 is only announced.
    let is_own =
        |epoch: &Epoch| epoch.counter > 0 && record.replicas.iter().any(|replica| epoch.has(&replica.name));
    let epoch_of = |replica: &ReplicaRecord| survey(&replica.directory).ok()?.epoch.filter(is_own);
    let told: Vec<(&String, Epoch)> =
        record.counted().filter_map(|replica| Some((&replica.name, epoch_of(replica)?))).collect();
    let is_enough = record.quorum == Quorum::Unsafe || told.len() > record.counted().count() / 2;
    let newest = told.iter().map(|(_, epoch)| epoch).max_by_key(|epoch| epoch.order())?;
    // A directory of a member that has recorded an older one may be one that was there before.
    let has_all = |(name, own): &&(&String, Epoch)| is_enough && own == newest && newest.has(name);
    Some(told.iter().filter(has_all).map(|(name, _)| (*name).clone()).collect())
}

#[cfg(test)]
mod tests;
