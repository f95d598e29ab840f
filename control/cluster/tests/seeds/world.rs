//! What the nodes have, beside their managers: disks with copies of volumes, and the processes of engines and replicas.
//!
//! Of a volume's data only this counts: how many writes were answered, and how many each copy holds. An engine answers a write
//! once all members of its epoch hold it, so that a copy holds all up to one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lh_block::{Epoch, EpochOrder, Generation};
use lh_cluster::api::Quorum;
use tokio::sync::Notify;

use crate::chain::{Known, Layer};
use crate::clock;
use crate::engine::Engine;

/// A directory of a replica: the path of its disk, and its name there.
pub(crate) type Place = (String, String);

/// A process: its node and its name.
pub(crate) type Name = (String, String);

/// Everything, with a bell for each node that rings when its processes change.
pub(crate) struct World {
    state: Mutex<State>,
    bells: BTreeMap<String, Arc<Notify>>,
    /// Where the managers' sockets are.
    pub(crate) sockets: PathBuf,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) hosts: BTreeMap<String, Host>,
    pub(crate) copies: BTreeMap<Place, Copy>,
    pub(crate) engines: BTreeMap<Name, Engine>,
    pub(crate) replicas: BTreeMap<Name, Replica>,
    pub(crate) volumes: BTreeMap<String, Volume>,
    /// Those that people have asked for, by name.
    pub(crate) snapshots: BTreeMap<String, Known>,
    /// What is taken for clones: of which volume, and how many writes it holds.
    pub(crate) taken_for_clones: BTreeSet<(u64, u64)>,
    /// By their nodes and volumes.
    pub(crate) devices: BTreeMap<Name, Device>,
    /// What must not have happened, and did.
    pub(crate) wrongs: Vec<String>,
    /// How often what happened.
    pub(crate) counts: BTreeMap<&'static str, u64>,
    numbers: u64,
    /// Replicas take engines of every generation: the fence is taken out.
    pub(crate) fenceless: bool,
}

#[derive(Debug)]
pub(crate) struct Host {
    /// It has power.
    pub(crate) runs: bool,
    /// Its instance manager answers.
    pub(crate) answers: bool,
    /// Nothing of it reaches other hosts, nor the other way.
    pub(crate) alone: bool,
    pub(crate) disk: Disk,
    /// Another disk has another number.
    pub(crate) disks: u32,
    /// It is gone for good.
    pub(crate) gone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disk {
    Good,
    /// Nothing can be read or written.
    Broken,
}

/// A copy of a volume.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) volume: String,
    /// Which of the volumes of that name it was made for.
    pub(crate) birth: u64,
    /// Writes that it holds.
    pub(crate) holds: u64,
    /// The highest generation that it has seen.
    pub(crate) seen: Generation,
    /// The process of the engine of that generation.
    pub(crate) by: String,
    /// The one before that.
    pub(crate) before: Generation,
    /// The last epoch that it has recorded.
    pub(crate) recorded: Option<EpochOrder>,
    /// The last one that counted, as far as it has heard.
    pub(crate) epoch: Option<Epoch>,
    /// Its snapshots, the oldest first.
    pub(crate) chain: Vec<Layer>,
    /// What it is a clone of; `None`: it began empty.
    pub(crate) base: Option<Base>,
}

/// What a clone began with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) volume: String,
    /// Which of the volumes of that name.
    pub(crate) birth: u64,
    /// Writes that the snapshot held; `None`: it was folded away while it was copied.
    pub(crate) holds: Option<u64>,
}

/// What people asked a clone to be made of.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) volume: String,
    /// `None`: as the volume is when it is copied.
    pub(crate) snapshot: Option<String>,
    /// Which of the volumes of that name was there, and how many writes had been answered.
    pub(crate) birth: u64,
    pub(crate) answered: u64,
}

/// The process of a replica.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) place: Place,
    pub(crate) uuid: String,
    /// It makes its directory first, from another one.
    pub(crate) copying: Option<Copying>,
    /// Why it has ended; empty if it has not.
    pub(crate) error: String,
}

/// A copy of another volume's directory that is being made.
#[derive(Debug)]
pub(crate) struct Copying {
    pub(crate) from: Place,
    pub(crate) snapshot: String,
    /// The snapshot was folded away meanwhile.
    pub(crate) is_spoiled: bool,
}

/// What a volume is shown as on a host. It outlives its engine.
#[derive(Debug)]
pub(crate) struct Device {
    /// Of which stay of the volume there.
    pub(crate) stay: String,
    /// Which of the volumes of that name it shows.
    pub(crate) birth: u64,
}

/// What a user knows of a volume.
#[derive(Clone, Debug, Default)]
pub(crate) struct Volume {
    /// Tells it from others of its name.
    pub(crate) birth: u64,
    /// Writes that were answered.
    pub(crate) answered: u64,
    /// The user has deleted it.
    pub(crate) is_deleted: bool,
    /// Who has to agree on its members. Nothing is promised of what a volume holds for which nobody has to.
    pub(crate) quorum: Quorum,
    /// What it is to be a clone of.
    pub(crate) origin: Option<Origin>,
    /// What it was when it was served first.
    pub(crate) base: Option<Base>,
    /// People were told that it holds what it was cloned from.
    pub(crate) is_cloned: bool,
}

impl Volume {
    /// True for what a volume may be that was to be a clone of this.
    pub(crate) fn may_begin_with(&self, base: Option<&Base>, state: &State) -> bool {
        let (Some(origin), Some(base)) = (&self.origin, base) else {
            return self.origin.is_none() && base.is_none();
        };
        // Another volume of that name may have come since.
        let is_of = base.volume == origin.volume && base.birth >= origin.birth;
        let Some(holds) = base.holds.filter(|_| is_of) else { return false };
        match &origin.snapshot {
            Some(name) => {
                state.snapshots.get(name).is_some_and(|s| s.birth == base.birth && s.holds == Some(holds))
            }
            None => {
                let is_late = base.birth > origin.birth || holds >= origin.answered;
                is_late && state.taken_for_clones.contains(&(base.birth, holds))
            }
        }
    }
}

impl State {
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// A number that was never given before.
    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn wrong(&mut self, what: String) {
        self.wrongs.push(format!("{:>7.1} s: {what}", clock::elapsed().as_secs_f64()));
    }

    pub(crate) fn disk_path(node: &str) -> String {
        format!("/root-{node}")
    }

    /// What is written on the disk of a node.
    pub(crate) fn disk_id(&self, node: &str) -> String {
        format!("disk-{}-of-{node}", self.hosts.get(node).map_or(1, |host| host.disks))
    }

    /// True for a copy that may be read: its host runs and its disk is good.
    pub(crate) fn is_readable(&self, place: &Place) -> bool {
        let of = |host: &&String| Self::disk_path(host) == place.0;
        let host = self.hosts.keys().find(of).and_then(|name| self.hosts.get(name));
        host.is_some_and(|host| !host.gone && host.disk == Disk::Good)
    }

    /// True if a volume could do without this copy: some other one holds everything and is not lost.
    pub(crate) fn others_hold(&self, place: &Place) -> bool {
        self.others_of(place, |_| true)
    }

    /// The same if only those count that pass.
    pub(crate) fn others_of(&self, place: &Place, counts: impl Fn(&Place) -> bool) -> bool {
        let Some(copy) = self.copies.get(place) else { return true };
        let Some(volume) = self.volumes.get(&copy.volume) else { return true };
        let holds_nothing = volume.answered == 0 && !(volume.is_cloned && copy.base.is_some());
        let is_unsafe = volume.quorum == Quorum::Unsafe;
        if volume.is_deleted
            || is_unsafe
            || copy.birth != volume.birth
            || copy.holds < volume.answered
            || holds_nothing
        {
            return true;
        }
        self.copies.iter().any(|(other, c)| {
            let is_whole = c.volume == copy.volume
                && c.birth == volume.birth
                && c.holds == volume.answered
                && c.base == copy.base;
            other != place && is_whole && self.is_readable(other) && counts(other)
        })
    }

    /// The copy that an engine on `from` reaches at that address, if it serves.
    pub(crate) fn reached(&self, from: &str, address: &str) -> Option<Place> {
        let (node, file) = address.strip_prefix("unix:/")?.split_once('/')?;
        let name = (node.to_owned(), file.strip_suffix(".sock")?.to_owned());
        let (here, there) = (self.hosts.get(from)?, self.hosts.get(node)?);
        let is_apart = from != node && (here.alone || there.alone);
        if is_apart || !there.runs || there.disk == Disk::Broken {
            return None;
        }
        let place = &self.replicas.get(&name)?.place;
        self.copies.contains_key(place).then(|| place.clone())
    }

    /// The process that a relay on `from` reaches at that address.
    pub(crate) fn relayed(&self, from: &str, address: &str) -> Option<Name> {
        let (node, file) = address.strip_prefix("unix:/")?.split_once('/')?;
        let (here, there) = (self.hosts.get(from)?, self.hosts.get(node)?);
        let is_apart = from != node && (here.alone || there.alone);
        let (name, uuid) = file.split_once('.')?;
        let name = (node.to_owned(), name.to_owned());
        let is_it = self.engines.get(&name).is_some_and(|e| e.uuid == uuid);
        (is_it && !is_apart && there.runs).then_some(name)
    }

    /// An engine, or a relay, shows its volume on its node: under the device of its stay, if that is there still.
    pub(crate) fn show(&mut self, node: &str, engine: &Engine) {
        let place = (node.to_owned(), engine.volume.clone());
        let new = Device { stay: engine.stay.clone(), birth: engine.birth };
        let device = self.devices.entry(place).or_insert(new);
        if device.birth != engine.birth || device.stay != engine.stay {
            let what =
                format!("{} is shown on {node} under {device:?}, which another one has left", engine.volume);
            self.wrong(what);
        }
    }

    /// A node has no power: devices go, too.
    pub(crate) fn lose_power(&mut self, node: &str) {
        self.end_processes(node);
        self.devices.retain(|(at, _), _| at != node);
        if let Some(host) = self.hosts.get_mut(node) {
            host.runs = false;
        }
    }

    /// All processes of a node end.
    pub(crate) fn end_processes(&mut self, node: &str) {
        self.engines.retain(|(at, _), _| at != node);
        self.replicas.retain(|(at, _), _| at != node);
    }
}

impl World {
    pub(crate) fn new(nodes: &[&str], sockets: PathBuf) -> Arc<Self> {
        let host = |_: &&str| Host {
            runs: true,
            answers: true,
            alone: false,
            disk: Disk::Good,
            disks: 1,
            gone: false,
        };
        let hosts = nodes.iter().map(|node| ((*node).to_owned(), host(node))).collect();
        let bells = nodes.iter().map(|node| ((*node).to_owned(), Arc::default())).collect();
        Arc::new(Self { state: Mutex::new(State { hosts, ..State::default() }), bells, sockets })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The processes of a node have changed.
    pub(crate) fn ring(&self, node: &str) {
        self.bells[node].notify_one();
    }

    /// Waits until they do.
    pub(crate) async fn rung(&self, node: &str) {
        self.bells[node].notified().await;
    }

    /// Where the manager of a node answers engines.
    pub(crate) fn socket(&self, node: &str) -> PathBuf {
        self.sockets.join(format!("{node}.sock"))
    }
}
