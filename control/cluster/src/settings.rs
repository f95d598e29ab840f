//! The global settings: names, defaults, what a value may be, and which of them do something.
//!
//! A setting is a `Setting` resource with the name below and its value as text. One that is not there has its default.
//! A value that cannot be understood has no effect: the default stays in force and the resource says so in
//! `status.applied`. Whoever installs may give defaults of their own ([`Given`]).

mod policy;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use control::host::SNAPSHOT_COUNT;
use control::logging::{self, Level};
use lh_block::REPLICAS_MAX;
use serde_json::Value;

use crate::api::{AutoBalance, DataLocality, Toggle};
use crate::schedule::Limits;
pub use policy::{AutoDeletion, DrainPolicy, NodeDown, Remount};

/// What a setting's value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `true` or `false`.
    Bool,
    /// A whole number within these bounds, both included.
    Number(u64, u64),
    /// One of these words.
    Word(&'static [&'static str]),
    /// One of these words, in any case.
    AnyCase(&'static [&'static str]),
    /// Some of these words, with semicolons between them, or none.
    Words(&'static [&'static str]),
    /// Anything.
    Text,
}

/// What is known of a setting.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// Its name.
    pub name: &'static str,
    /// Its value where none is given.
    pub default: &'static str,
    /// What its value may be.
    pub form: Form,
    /// Why nothing here acts on it: it is stored, and says so. `None`: something does.
    pub idle: Option<&'static str>,
}

const fn acts(name: &'static str, default: &'static str, form: Form) -> Definition {
    Definition { name, default, form, idle: None }
}

const fn stored(name: &'static str, default: &'static str, form: Form, idle: &'static str) -> Definition {
    Definition { name, default, form, idle: Some(idle) }
}

const NO_BACKUPS: &str = "backups are not built yet";
/// Also what there is to say of a volume's own word.
pub(crate) const NO_CHECKSUMS: &str = "checksums of snapshots are taken by rebuilds, scrubs and whoever asks for them (SnapshotHash), and not by a schedule";

const LOCALITY: Form = Form::Word(&["disabled", "best-effort", "strict-local"]);
const BALANCE: Form = Form::Word(&["disabled", "least-effort", "best-effort"]);
const INTEGRITY: Form = Form::Word(&["disabled", "enabled", "fast-check"]);
const DRAIN: Form = Form::Word(&[
    "block-for-eviction",
    "block-for-eviction-if-contains-last-replica",
    "block-if-contains-last-replica",
    "allow-if-replica-is-stopped",
    "always-allow",
]);
const NODE_DOWN: Form = Form::Word(&[
    "do-nothing",
    "delete-statefulset-pod",
    "delete-deployment-pod",
    "delete-both-statefulset-and-deployment-pod",
]);
/// Longhorn's words: directories of replicas; processes.
const ORPHAN_DATA: &str = "replica-data";
const ORPHAN_INSTANCE: &str = "instance";
const ORPHANS: Form = Form::Words(&[ORPHAN_DATA, ORPHAN_INSTANCE]);
const COMPRESSION: Form = Form::Word(&["none", "lz4", "gzip"]);

/// All settings that are kept, sorted by name. Longhorn's others concern what is not here.
pub const DEFINITIONS: &[Definition] = &[
    acts("allow-empty-disk-selector-volume", "true", Form::Bool),
    acts("allow-empty-node-selector-volume", "true", Form::Bool),
    acts("allow-volume-creation-with-degraded-availability", "true", Form::Bool),
    stored(
        "auto-cleanup-system-generated-snapshot",
        "true",
        Form::Bool,
        "snapshots that a rebuild or an expansion took stay until somebody deletes them",
    ),
    acts("auto-delete-pod-when-volume-detached-unexpectedly", "true", Form::Bool),
    acts("auto-salvage", "true", Form::Bool),
    stored("backup-compression-method", "lz4", COMPRESSION, NO_BACKUPS),
    stored("backup-concurrent-limit", "2", Form::Number(1, 64), NO_BACKUPS),
    acts("blacklist-for-auto-delete-pod-when-volume-detached-unexpectedly", "", Form::Text),
    acts("concurrent-automatic-engine-upgrade-per-node-limit", "0", Form::Number(0, 1000)),
    acts("concurrent-replica-rebuild-per-node-limit", "5", Form::Number(0, 1000)),
    acts("create-default-disk-labeled-nodes", "false", Form::Bool),
    acts("csi-allowed-topology-keys", "", Form::Text),
    acts("csi-storage-capacity-tracking", "false", Form::Bool),
    stored("default-backup-block-size", "2", Form::Number(2, 16), NO_BACKUPS),
    acts("default-data-locality", "disabled", LOCALITY),
    acts("default-data-path", "/var/lib/longhorn/", Form::Text),
    acts("default-replica-count", "3", Form::Number(1, REPLICAS_MAX as u64)),
    // The API server acts on it: deploy/confirmation.yaml.
    acts("deleting-confirmation-flag", "false", Form::Bool),
    acts("disable-scheduling-on-cordoned-node", "true", Form::Bool),
    stored(
        "engine-replica-timeout",
        "8",
        Form::Number(8, 30),
        "an engine puts out a replica that is far slower than the others, not one that takes so many seconds",
    ),
    stored(
        "fast-replica-rebuild-enabled",
        "true",
        Form::Bool,
        "a rebuild always compares by checksums and copies what differs",
    ),
    acts("freeze-filesystem-for-snapshot", "false", Form::Bool),
    acts("log-level", "Info", Form::AnyCase(&["Panic", "Fatal", "Error", "Warn", "Info", "Debug", "Trace"])),
    stored("node-disk-health-monitoring", "true", Form::Bool, "what disks tell of their health is not read"),
    acts("node-down-pod-deletion-policy", "do-nothing", NODE_DOWN),
    acts("node-drain-policy", "block-if-contains-last-replica", DRAIN),
    acts("offline-replica-rebuilding", "false", Form::Bool),
    acts("orphan-resource-auto-deletion", "", ORPHANS),
    acts("orphan-resource-auto-deletion-grace-period", "300", Form::Number(0, 10_000_000)),
    acts("remove-snapshots-during-filesystem-trim", "false", Form::Bool),
    acts("replica-auto-balance", "disabled", BALANCE),
    acts("replica-disk-soft-anti-affinity", "true", Form::Bool),
    acts("replica-rebuild-concurrent-sync-limit", "1", Form::Number(1, 5)),
    acts("replica-rebuilding-bandwidth-limit", "0", Form::Number(0, 1_000_000)),
    acts("replica-replenishment-wait-interval", "600", Form::Number(0, 1_000_000)),
    acts("replica-soft-anti-affinity", "false", Form::Bool),
    acts("replica-zone-soft-anti-affinity", "true", Form::Bool),
    stored("restore-concurrent-limit", "2", Form::Number(1, 64), NO_BACKUPS),
    stored("rwx-volume-fast-failover", "false", Form::Bool, "shared file systems (RWX) are not built yet"),
    stored("snapshot-data-integrity", "fast-check", INTEGRITY, NO_CHECKSUMS),
    stored("snapshot-data-integrity-cronjob", "0 0 */7 * *", Form::Text, NO_CHECKSUMS),
    acts("snapshot-max-count", "250", Form::Number(2, SNAPSHOT_COUNT as u64)),
    acts("storage-minimal-available-percentage", "25", Form::Number(0, 100)),
    acts("storage-over-provisioning-percentage", "100", Form::Number(0, 1_000_000)),
    acts("storage-reserved-percentage-for-default-disk", "30", Form::Number(0, 100)),
];

/// Bytes of a megabyte as the rate of rebuilds counts them; `ReplicaRebuildingQosSet` does so, too.
const MEGABYTE: u64 = 1 << 20;

/// Longhorn's default of default-data-path.
const OWN_ROOT: &str = "/var/lib/longhorn";

impl Definition {
    /// Why the value cannot be used; `Ok` if it can.
    ///
    /// # Errors
    /// One sentence that says what the setting takes.
    pub fn check(&self, value: &str) -> Result<(), String> {
        of_v1(value).map_or(Ok(()), |value| self.check_one(&value))
    }

    fn check_one(&self, value: &str) -> Result<(), String> {
        let name = self.name;
        match self.form {
            Form::Text => Ok(()),
            Form::Bool if ["true", "false"].contains(&value) => Ok(()),
            Form::Bool => Err(format!("{name} is true or false, not {value:?}")),
            Form::Number(low, high) => match value.parse::<u64>() {
                Ok(n) if (low..=high).contains(&n) => Ok(()),
                Ok(_) | Err(_) => Err(format!("{name} is a number from {low} to {high}, not {value:?}")),
            },
            Form::Words(words) if listed(value).all(|word| words.contains(&word)) => Ok(()),
            Form::Words(words) => {
                Err(format!("{name} is a list of {} with semicolons, not {value:?}", words.join(", ")))
            }
            Form::Word(words) if words.contains(&value) => Ok(()),
            Form::AnyCase(words) if words.iter().any(|word| word.eq_ignore_ascii_case(value)) => Ok(()),
            Form::Word(words) | Form::AnyCase(words) => {
                Err(format!("{name} is one of {}, not {value:?}", words.join(", ")))
            }
        }
    }
}

/// What a value says of the data engine that there is here. Longhorn writes some of its settings as `{"v1":"3","v2":"2"}` since 1.10.
/// `None`: it says something of the other one alone.
fn of_v1(value: &str) -> Option<Cow<'_, str>> {
    let Ok(engines) = serde_json::from_str::<BTreeMap<String, Value>>(value) else {
        return Some(value.into());
    };
    let is_engine = |name: &String| matches!(name.as_str(), "v1" | "v2");
    if engines.is_empty() || !engines.keys().all(is_engine) {
        return Some(value.into());
    }
    engines.get("v1").map(|own| own.as_str().map_or_else(|| own.to_string(), str::to_owned).into())
}

/// The words of a list with semicolons.
fn listed(value: &str) -> impl Iterator<Item = &str> {
    value.split(';').map(str::trim).filter(|word| !word.is_empty())
}

/// The definition of a setting.
pub fn definition(name: &str) -> Option<&'static Definition> {
    DEFINITIONS.iter().find(|d| d.name == name)
}

/// Defaults of whoever installed the managers, in place of those above. A resource's value goes before them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given(BTreeMap<String, String>);

impl Given {
    /// Takes a default for a setting.
    ///
    /// # Errors
    /// There is no such setting, or it does not take that value: one sentence. The defaults are as before.
    pub fn give(&mut self, name: &str, value: &str) -> Result<(), String> {
        definition(name).ok_or_else(|| format!("there is no setting {name}"))?.check(value)?;
        self.0.insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    /// The default that was given for a setting.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// All of them by name.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// The values in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    values: BTreeMap<String, String>,
}

impl Settings {
    /// Of these names and values, of which the last one of a name counts; those that cannot be used are left out.
    pub fn of<'a>(all: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let usable = |(name, value): &(&str, &str)| definition(name).is_some_and(|d| d.check(value).is_ok());
        let own = |(name, value): (&str, &'a str)| Some((name.to_owned(), of_v1(value)?.into_owned()));
        Self { values: all.into_iter().filter(usable).filter_map(own).collect() }
    }

    fn text(&self, name: &str) -> &str {
        let default = definition(name).map_or("", |d| d.default);
        self.values.get(name).map_or(default, String::as_str)
    }

    fn flag(&self, name: &str) -> bool {
        self.text(name) == "true"
    }

    fn number(&self, name: &str) -> u64 {
        self.text(name).parse().unwrap_or_default()
    }

    fn number32(&self, name: &str) -> u32 {
        u32::try_from(self.number(name)).unwrap_or(u32::MAX)
    }

    /// The limits of every disk.
    pub fn limits(&self) -> Limits {
        Limits {
            over_provisioning: self.number32("storage-over-provisioning-percentage"),
            minimal_available: self.number32("storage-minimal-available-percentage"),
        }
    }

    /// How many replicas a volume has that does not say.
    pub fn replica_count(&self) -> i64 {
        i64::try_from(self.number("default-replica-count")).unwrap_or(3)
    }

    /// The locality of a volume that does not say. Never `Setting`.
    pub fn data_locality(&self) -> DataLocality {
        DataLocality::parse(self.text("default-data-locality")).unwrap_or(DataLocality::Disabled)
    }

    /// Whether replicas are moved to spread evenly, for volumes that do not say. Never `Ignored`.
    pub fn auto_balance(&self) -> AutoBalance {
        AutoBalance::parse(self.text("replica-auto-balance")).unwrap_or(AutoBalance::Disabled)
    }

    /// Two replicas may share a node, for volumes that do not say.
    pub fn node_soft(&self) -> bool {
        self.flag("replica-soft-anti-affinity")
    }

    /// Two replicas may share a zone, for volumes that do not say.
    pub fn zone_soft(&self) -> bool {
        self.flag("replica-zone-soft-anti-affinity")
    }

    /// Two replicas may share a disk, for volumes that do not say.
    pub fn disk_soft(&self) -> bool {
        self.flag("replica-disk-soft-anti-affinity")
    }

    /// Nodes with tags serve volumes without a selector, too.
    pub fn tagged_nodes_serve_all(&self) -> bool {
        self.flag("allow-empty-node-selector-volume")
    }

    /// Disks with tags serve volumes without a selector, too.
    pub fn tagged_disks_serve_all(&self) -> bool {
        self.flag("allow-empty-disk-selector-volume")
    }

    /// A volume may be created with fewer replicas than it should have.
    pub fn degraded_creation(&self) -> bool {
        self.flag("allow-volume-creation-with-degraded-availability")
    }

    /// A volume whose replicas all failed is started again with those that can serve it.
    pub fn auto_salvage(&self) -> bool {
        self.flag("auto-salvage")
    }

    /// How long a failed replica is waited for before another one takes its place.
    pub fn replenishment_wait(&self) -> Duration {
        Duration::from_secs(self.number("replica-replenishment-wait-interval"))
    }

    /// A cordoned node takes no new replicas.
    pub fn cordon_stops_scheduling(&self) -> bool {
        self.flag("disable-scheduling-on-cordoned-node")
    }

    /// When a cordoned node may be drained.
    pub fn drain(&self) -> DrainPolicy {
        match self.text("node-drain-policy") {
            "allow-if-replica-is-stopped" => DrainPolicy::AllowStopped,
            "always-allow" => DrainPolicy::Always,
            "block-for-eviction" => DrainPolicy::EvictAll,
            "block-for-eviction-if-contains-last-replica" => DrainPolicy::EvictLast,
            _ => DrainPolicy::BlockLast,
        }
    }

    /// How many volumes of a node change to their managers' image at once without being asked; 0: none.
    pub fn upgrades_at_once(&self) -> usize {
        usize::try_from(self.number("concurrent-automatic-engine-upgrade-per-node-limit")).unwrap_or_default()
    }

    /// How many replicas of one node are filled at once; 0: none is.
    pub fn rebuilds_at_once(&self) -> usize {
        usize::try_from(self.number("concurrent-replica-rebuild-per-node-limit")).unwrap_or(usize::MAX)
    }

    /// Bytes that the rebuilds of a volume may copy in a second, of which itself says so many megabytes, or nothing; 0: as much as
    /// they can.
    pub fn rebuild_rate(&self, own: i64) -> u64 {
        let own = u64::try_from(own).ok().filter(|own| *own > 0);
        own.unwrap_or_else(|| self.number("replica-rebuilding-bandwidth-limit")).saturating_mul(MEGABYTE)
    }

    /// How much a rebuild of a volume copies at once, in Longhorn's count of files, of which itself says so much, or nothing (0).
    pub fn rebuild_concurrency(&self, own: i64) -> u32 {
        let own = u32::try_from(own).ok().filter(|own| *own > 0);
        own.unwrap_or_else(|| self.number32("replica-rebuild-concurrent-sync-limit"))
    }

    /// A volume that rests and lacks replicas is attached to be rebuilt, if it does not say.
    pub fn offline_rebuilding(&self) -> bool {
        self.flag("offline-replica-rebuilding")
    }

    /// Only nodes with the label `node.longhorn.io/create-default-disk` get a default disk.
    pub fn default_disk_by_label(&self) -> bool {
        self.flag("create-default-disk-labeled-nodes")
    }

    /// Where a node's default disk is; `None`: in the manager's own root, which Longhorn's default stands for.
    pub fn default_disk_path(&self) -> Option<&str> {
        let is_own = |path: &str| path.is_empty() || path.trim_end_matches('/') == OWN_ROOT;
        self.values.get("default-data-path").map(String::as_str).filter(|path| !is_own(path))
    }

    /// Per cent of a default disk that is not for replicas.
    pub fn default_disk_reserved(&self) -> u64 {
        self.number("storage-reserved-percentage-for-default-disk")
    }

    /// Which orphans go by themselves.
    pub fn orphan_deletion(&self) -> AutoDeletion {
        let has = |word: &str| listed(self.text("orphan-resource-auto-deletion")).any(|w| w == word);
        AutoDeletion {
            data: has(ORPHAN_DATA),
            instances: has(ORPHAN_INSTANCE),
            grace: Duration::from_secs(self.number("orphan-resource-auto-deletion-grace-period")),
        }
    }

    /// Pods of which owners are deleted by force when their node is down.
    pub fn node_down(&self) -> NodeDown {
        match self.text("node-down-pod-deletion-policy") {
            "delete-statefulset-pod" => NodeDown { stateful_sets: true, deployments: false },
            "delete-deployment-pod" => NodeDown { stateful_sets: false, deployments: true },
            "delete-both-statefulset-and-deployment-pod" => {
                NodeDown { stateful_sets: true, deployments: true }
            }
            _ => NodeDown::default(),
        }
    }

    /// Whose pods are deleted when their volume's device was lost; `None`: nobody's.
    pub fn remount(&self) -> Option<Remount> {
        let spared = listed(self.text("blacklist-for-auto-delete-pod-when-volume-detached-unexpectedly"));
        let spared = spared.map(str::to_owned).collect();
        self.flag("auto-delete-pod-when-volume-detached-unexpectedly").then_some(Remount { spared })
    }

    /// At which level managers, CSI drivers, instance managers and their processes log.
    pub fn log_level(&self) -> Level {
        logging::parse(self.text("log-level")).unwrap_or(Level::INFO)
    }

    /// Snapshots go with what is trimmed, for volumes that do not say.
    pub fn trim_removes_snapshots(&self) -> bool {
        self.flag("remove-snapshots-during-filesystem-trim")
    }

    /// The scheduler places pods where there is room for the volumes that are made for them.
    pub fn tracks_capacity(&self) -> bool {
        self.flag("csi-storage-capacity-tracking")
    }

    /// The file system on a volume that says so, or leaves it to the setting, rests while a snapshot is taken.
    pub fn freezes(&self, own: Toggle) -> bool {
        match own {
            Toggle::Enabled => true,
            Toggle::Disabled => false,
            Toggle::Ignored => self.flag("freeze-filesystem-for-snapshot"),
        }
    }

    /// Most snapshots of a volume that does not say.
    pub fn snapshot_max_count(&self) -> u64 {
        self.number("snapshot-max-count")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_a_value_that_its_setting_takes() {
        for definition in DEFINITIONS {
            definition.check(definition.default).unwrap();
        }
        assert!(DEFINITIONS.windows(2).all(|pair| pair[0].name < pair[1].name));
    }

    /// Code below this folder of the repository, without its tests, each file apart.
    fn code_below(folder: &std::path::Path, code: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with("tests") || path.ends_with("tests.rs") {
                continue;
            }
            if path.is_dir() {
                code_below(&path, code);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                code.push(text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned());
            }
        }
    }

    fn read(place: &str) -> String {
        std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(place)).unwrap()
    }

    /// The methods of [`Settings`] that read a setting.
    fn readers<'a>(of: &str, own: &'a str) -> Vec<&'a str> {
        let (_, methods) = own.split_once("impl Settings {").unwrap();
        let methods = methods.split("    pub fn ").skip(1);
        let reads = methods.filter(|method| method.contains(of));
        reads.map(|method| method.split('(').next().unwrap()).collect()
    }

    /// A setting acts if somebody asks for its value, by its name or by a method here; every other one says why it does not,
    /// also in the documentation.
    #[test]
    fn a_setting_acts_where_somebody_asks_for_it() {
        let own = read("src/settings.rs");
        let own = own.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let mut code = Vec::new();
        for folder in ["src", "../../csi/src"] {
            code_below(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut code);
        }
        let by_api_server = include_str!("../../../deploy/confirmation.yaml");
        let elsewhere: Vec<&String> = code.iter().filter(|text| *text != own).collect();
        assert_eq!(elsewhere.len() + 1, code.len(), "this file is one of them");
        let asks = |what: &str| elsewhere.iter().any(|text| text.contains(what));
        let documented = read("../../docs/kubernetes.md");
        let (_, documented) = documented.split_once("\n## Settings\n").unwrap();
        let documented = documented.split("\n## ").next().unwrap();
        for Definition { name, idle, .. } in DEFINITIONS {
            let quoted = format!("\"{name}\"");
            let mut readers = readers(&quoted, own).into_iter();
            let is_asked_for = asks(&quoted)
                || readers.any(|reader| asks(&format!(".{reader}(")))
                || by_api_server.contains(&format!("paramRef: {{name: {name}, "));
            assert_eq!(idle.is_none(), is_asked_for, "{name}");
            let is_told = documented.contains(&format!("| `{name}`"));
            assert_eq!(idle.is_some(), is_told, "{name}: docs/kubernetes.md, Settings");
        }
    }

    #[test]
    fn only_what_a_setting_takes_can_be_given_as_its_default() {
        let mut given = Given::default();
        given.give("default-replica-count", "2").unwrap();
        assert!(given.give("default-replica-count", "0").unwrap_err().contains("from 1 to 20"));
        assert!(given.give("replica-count", "2").unwrap_err().contains("no setting"));
        assert_eq!(given.all().collect::<Vec<_>>(), [("default-replica-count", "2")]);
        let count = |written: &[(&'static str, &'static str)]| {
            Settings::of(given.all().chain(written.iter().copied())).replica_count()
        };
        assert_eq!((count(&[]), count(&[("default-replica-count", "1")])), (2, 1));
        assert_eq!(count(&[("default-replica-count", "none")]), 2, "one that cannot be used");
    }

    #[test]
    fn of_a_value_for_each_data_engine_the_one_for_v1_counts() {
        let count = |value| Settings::of([("default-replica-count", value)]).replica_count();
        for (value, expected) in [
            (r#"{"v1":"2","v2":"4"}"#, 2),
            (r#"{"v1": 2}"#, 2),
            (r#"{"v2":"2"}"#, 3),
            (r#"{"v1":"21"}"#, 3),
            (r#"{"v3":"2"}"#, 3),
            ("{}", 3),
        ] {
            assert_eq!(count(value), expected, "{value}");
        }
        assert!(!Settings::of([("auto-salvage", r#"{"v1":"false"}"#)]).auto_salvage());
        let check = |value| definition("default-replica-count").unwrap().check(value);
        check(r#"{"v2":"2"}"#).unwrap();
        let refused = check(r#"{"v1":"21","v2":"3"}"#).unwrap_err();
        assert!(refused.contains("from 1 to 20"), "{refused}");
        assert!(check(r#"{"v3":"2"}"#).is_err());
    }

    #[test]
    fn a_value_that_cannot_be_used_leaves_the_default() {
        let settings = Settings::of([
            ("default-replica-count", "21"),
            ("replica-soft-anti-affinity", "yes"),
            ("storage-minimal-available-percentage", "10"),
            ("no-such-setting", "1"),
        ]);
        assert_eq!(settings.replica_count(), 3);
        assert!(!settings.node_soft());
        assert_eq!(settings.limits(), Limits { over_provisioning: 100, minimal_available: 10 });
        let orphans = Settings::of([("orphan-resource-auto-deletion", " instance; replica-data ;")]);
        assert!(orphans.orphan_deletion().data && orphans.orphan_deletion().instances);
        assert!(definition("orphan-resource-auto-deletion").unwrap().check("instance;all").is_err());
        let refused = definition("default-replica-count").unwrap().check("0").unwrap_err();
        assert!(refused.contains("from 1 to 20"), "{refused}");
    }
}
