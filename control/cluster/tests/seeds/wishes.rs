//! What people ask of a volume's snapshots, and of volumes that are made of others.

use serde_json::{Value, json};

use crate::chain::{Asked, FOR_CLONE, Known, Wish};
use crate::cluster::Cluster;
use crate::engine::Phase;
use crate::script::{Script, VOLUMES};
use crate::world::Origin;

impl Script {
    /// Somebody asks for a snapshot, or for one less.
    pub(crate) fn ask_for_snapshots(&mut self, cluster: &mut Cluster, volume: &str) {
        if !cluster.is_there("volumes", volume) {
            return;
        }
        let there: Vec<String> = VOLUMES.iter().flat_map(|v| cluster.snapshots_of(v)).collect();
        match self.dice.below(8) {
            0..=2 => self.take_snapshot(cluster, volume),
            3 | 4 => {
                let Some(name) = self.dice.pick(&there).cloned() else { return };
                cluster.tell(&format!("snapshot {name} is deleted"));
                cluster.world.state().count("somebody deleted a snapshot");
                cluster.know(&name, |known| known.is_deleted = true);
                cluster.server.delete("snapshots", &name);
            }
            5 => {
                // It comes and goes.
                self.take_snapshot(cluster, volume);
                let Some(name) = cluster.snapshots_of(volume).last().cloned() else { return };
                cluster.tell(&format!("snapshot {name} of {volume} is deleted at once"));
                cluster.know(&name, |known| known.is_deleted = true);
                cluster.server.delete("snapshots", &name);
            }
            6 => {
                let volume = self.served(cluster).unwrap_or_else(|| volume.to_owned());
                let volume = volume.as_str();
                let name = cluster.new_snapshot(volume);
                cluster.know(&name, |known| known.is_unnamed = true);
                if has_asked(cluster, volume, Wish::Take(name.clone())) {
                    cluster.tell(&format!("the engine of {volume} is asked for {name} by somebody else"));
                    cluster.world.state().count("somebody took a snapshot beside the resources");
                }
            }
            _ => {
                let served = self.served(cluster).map(|volume| cluster.snapshots_of(&volume));
                let mut free = served.unwrap_or_default();
                free.retain(|name| !cluster.is_copied_from(name));
                let Some(name) = self.dice.pick(&free).cloned() else { return };
                let volume = cluster.world.state().snapshots.get(&name).map(|known| known.volume.clone());
                if has_asked(cluster, &volume.unwrap_or_default(), Wish::Remove(name.clone())) {
                    cluster.tell(&format!("an engine is told to remove {name} by somebody else"));
                }
            }
        }
    }

    /// A volume whose engine answers.
    fn served(&mut self, cluster: &Cluster) -> Option<String> {
        let state = cluster.world.state();
        let serving = state.engines.values().filter(|engine| engine.phase == Phase::Serves);
        let all: Vec<String> = serving.map(|engine| engine.volume.clone()).collect();
        self.dice.pick(&all).cloned()
    }

    fn take_snapshot(&mut self, cluster: &mut Cluster, volume: &str) {
        let name = cluster.new_snapshot(volume);
        cluster.tell(&format!("snapshot {name} of {volume} is asked for"));
        cluster.world.state().count("somebody asked for a snapshot");
        let spec = json!({ "volume": volume, "createSnapshot": true });
        let metadata = json!({ "labels": { "longhornvolume": volume } });
        let kind = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Snapshot", "metadata": metadata, "spec": spec });
        cluster.server.apply("snapshots", &name, &kind);
    }

    /// What a new volume is to be made of, by chance.
    pub(crate) fn source(&mut self, cluster: &Cluster, new: &str) -> Option<Origin> {
        // One that waits for a volume of this name would wait for itself.
        let is_source = |v: &&str| *v != new && cluster.is_there("volumes", v) && !cluster.waits_for(v, new);
        let others: Vec<&str> = VOLUMES.into_iter().filter(is_source).collect();
        let volume = *self.dice.pick(&others).filter(|_| self.dice.percent(60))?;
        let snapshots = cluster.snapshots_of(volume);
        let snapshot = self.dice.pick(&snapshots).filter(|_| self.dice.percent(50)).cloned();
        let known = cluster.world.state().volumes.get(volume).cloned().unwrap_or_default();
        Some(Origin { volume: volume.to_owned(), snapshot, birth: known.birth, answered: known.answered })
    }
}

/// Asks the engine of a volume itself, if one answers.
fn has_asked(cluster: &Cluster, volume: &str, wish: Wish) -> bool {
    let mut state = cluster.world.state();
    let serves = |e: &&mut crate::engine::Engine| e.volume == volume && e.phase == Phase::Serves;
    let Some(engine) = state.engines.values_mut().find(serves) else { return false };
    engine.wishes.push_back(Asked { wish, waits: None });
    true
}

impl Cluster {
    /// It is there, and nobody has deleted it.
    pub(crate) fn is_there(&self, kind: &str, name: &str) -> bool {
        self.server.get(kind, name).is_some_and(|o| o["metadata"]["deletionTimestamp"].is_null())
    }

    fn new_snapshot(&mut self, volume: &str) -> String {
        let mut state = self.world.state();
        let birth = state.volumes.get(volume).map(|v| v.birth).unwrap_or_default();
        let name = format!("s-{:05}", state.number());
        let known = Known { volume: volume.to_owned(), birth, ..Known::default() };
        state.snapshots.insert(name.clone(), known);
        name
    }

    fn know(&self, name: &str, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.world.state().snapshots.get_mut(name) {
            change(known);
        }
    }

    /// Snapshots of a volume that nobody has deleted, and that are not the managers' own.
    fn snapshots_of(&self, volume: &str) -> Vec<String> {
        let is_of =
            |s: &&Value| s["spec"]["volume"] == volume && s["metadata"]["deletionTimestamp"].is_null();
        let all = self.server.all("snapshots");
        let names = all.iter().filter(is_of).filter_map(|s| s["metadata"]["name"].as_str());
        names.filter(|name| !name.starts_with(FOR_CLONE)).map(str::to_owned).collect()
    }

    /// A volume is a clone that is not made yet, of a volume of that name, or of one that is such a clone.
    fn waits_for(&self, volume: &str, name: &str) -> bool {
        let told = self.server.get("volumes", volume).unwrap_or_default();
        let origin = self.world.state().volumes.get(volume).and_then(|v| v.origin.clone());
        let origin = origin.filter(|_| told["status"]["cloneStatus"]["state"] != "completed");
        origin.is_some_and(|o| o.volume == name || self.waits_for(&o.volume, name))
    }

    /// A clone is to be made of it, or is being made.
    fn is_copied_from(&self, snapshot: &str) -> bool {
        let names = |v: &Value| v["spec"]["dataSource"].as_str().is_some_and(|from| from.ends_with(snapshot));
        self.server.all("volumes").iter().any(names)
    }

    /// Nothing more can be copied from it. The resource may be there all the same: its snapshot was removed by somebody else, or it is
    /// being deleted.
    fn is_no_source(&self, snapshot: &str) -> bool {
        self.server.get("snapshots", snapshot).is_none_or(|s| {
            s["status"]["error"] == "the volume has no snapshot of this name"
                || !s["metadata"]["deletionTimestamp"].is_null()
        })
    }

    /// Deletes clones that will never be, since what they were to be made of is gone.
    pub(crate) fn give_up_clones(&mut self) {
        for volume in self.server.all("volumes") {
            let name = volume["metadata"]["name"].as_str().unwrap_or_default();
            let conditions = volume["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let origin = self.world.state().volumes.get(name).and_then(|v| v.origin.clone());
            let lacks_snapshot =
                origin.as_ref().and_then(|o| o.snapshot.as_ref()).is_some_and(|s| self.is_no_source(s));
            let waits = |c: &Value| {
                c["type"] == "Cloned"
                    && (c["reason"] == "SourceMissing" || c["reason"] == "Snapshot" && lacks_snapshot)
            };
            if !conditions.iter().any(waits) || !volume["metadata"]["deletionTimestamp"].is_null() {
                continue;
            }
            if !lacks_snapshot && origin.is_some_and(|o| self.is_there("volumes", &o.volume)) {
                self.world.state().wrong(format!("{name} waits for a source that is there"));
            }
            self.tell(&format!("{name} is given up"));
            self.world.state().count("somebody gave up a clone without a source");
            self.delete_volume(name);
        }
    }
}
