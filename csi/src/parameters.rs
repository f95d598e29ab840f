//! Parameters of a StorageClass, a VolumeSnapshotClass and a VolumeAttributesClass: Longhorn's, and `quorum` and
//! `ioTimeout` besides. A key that nobody knows is refused: a mistyped one would be a wish that is not met.

use std::collections::{BTreeMap, HashMap};

use control::host::{REPLICAS_MAX, SNAPSHOT_COUNT};
use lh_cluster::api::{
    AccessMode, AutoBalance, DataEngine, DataLocality, Frontend, Int64Text, Toggle, VolumeSpec,
};

use crate::Refused;
use crate::capability::check_file_system;

/// Keys that say something to somebody else, or at another time: they are passed on and not looked at here. Those of the
/// sidecars (`csi.storage.k8s.io/`) never arrive or only name the claim.
const PASSED_ON: &[&str] = &["mkfsParams"];

/// Keys that detail what another key or the claim's access mode asks for. What is detailed is refused there; without it they say
/// nothing, and a class of Longhorn's that has them, which nobody can change, goes on working.
const DETAILS: &[&str] = &[
    // Of a volume that many nodes write at a time, which the access mode asks for.
    "nfsOptions",
    "shareManagerNodeSelector",
    "shareManagerTolerations",
    // Of `backingImage`.
    "backingImageDataSourceType",
    "backingImageChecksum",
    "backingImageDataSourceParameters",
    "backingImageMinNumberOfCopies",
    "backingImageNodeSelector",
    "backingImageDiskSelector",
    // Of a `dataLayout.mode` that is not `raid1`.
    "dataLayout.dataChunks",
    "dataLayout.parityChunks",
    "dataLayout.stripSizeKB",
];

/// The key that keeps volumes where their first pod is.
const STRICT_TOPOLOGY: &str = "strictTopology";

/// The key of a class whose volumes are for one pod each, whatever their claims say.
const EXCLUSIVE: &str = "exclusive";

/// Keys of what is not built, which may be there as long as they ask for nothing.
const UNBUILT: &[&str] = &[
    "recurringJobSelector",
    "share",
    "storageCapacityMode",
    "dataLayout.mode",
    // Of classes of older Longhorns: jobs in the class itself, an image by its older name, and the second data engine.
    "recurringJobs",
    "backingImageName",
    "v2DataEngine",
];

/// What some of them ask for where they ask for what there is: room is told node by node, and data is replicated.
const AS_IT_IS: &[(&str, &str)] = &[("storageCapacityMode", "node"), ("dataLayout.mode", "raid1")];

/// The prefix of the sidecars' own keys.
const SIDECARS: &str = "csi.storage.k8s.io/";

/// What a volume shall be by its StorageClass. The size is not set.
///
/// # Errors
/// [`Refused::Argument`] for a key that is not known, or a value that cannot be, [`Refused::Precondition`] for one that asks for
/// what is not built; each names the key.
pub fn volume(parameters: &HashMap<String, String>) -> Result<VolumeSpec, Refused> {
    let mut spec = VolumeSpec { access_mode: AccessMode::ReadWriteOnce, ..VolumeSpec::default() };
    for (key, value) in sorted(parameters) {
        if key.starts_with(SIDECARS) || PASSED_ON.contains(&key) || DETAILS.contains(&key) {
            continue;
        }
        if UNBUILT.contains(&key) {
            let asks_nothing = boolean(value) == Some(false) || matches!(value, "[]" | "{}");
            if !asks_nothing && !AS_IT_IS.contains(&(key, value)) {
                return Err(not_built(key, value, "nothing"));
            }
            continue;
        }
        if !place(&mut spec, key, value)?
            && !behave(&mut spec, key, value)?
            && !source(&mut spec, key, value)?
        {
            return Err(Refused::Argument(format!(
                "{key:?} is not a parameter of a StorageClass of {}",
                crate::DRIVER
            )));
        }
    }
    Ok(spec)
}

/// True for a class whose volumes are kept where their first pod is.
pub(crate) fn is_strict(parameters: &HashMap<String, String>) -> bool {
    parameters.get(STRICT_TOPOLOGY).and_then(|value| boolean(value)).unwrap_or(false)
}

/// True for a class whose volumes are for one pod each.
pub(crate) fn is_exclusive(parameters: &HashMap<String, String>) -> bool {
    parameters.get(EXCLUSIVE).and_then(|value| boolean(value)).unwrap_or(false)
}

/// How many replicas, and where. False: the key is not one of these.
fn place(spec: &mut VolumeSpec, key: &str, value: &str) -> Result<bool, Refused> {
    match key {
        // 0, as without the key: as many as the setting says (Longhorn 1.12, csi/util.go).
        "numberOfReplicas" => spec.number_of_replicas = number(key, value, 0, REPLICAS_MAX.into())?,
        "dataLocality" => spec.data_locality = locality(key, value)?,
        "replicaAutoBalance" => spec.replica_auto_balance = balance(key, value)?,
        "diskSelector" => spec.disk_selector = tags(value),
        "nodeSelector" => spec.node_selector = tags(value),
        "replicaSoftAntiAffinity" => spec.replica_soft_anti_affinity = toggle(key, value)?,
        "replicaZoneSoftAntiAffinity" => spec.replica_zone_soft_anti_affinity = toggle(key, value)?,
        "replicaDiskSoftAntiAffinity" => spec.replica_disk_soft_anti_affinity = toggle(key, value)?,
        "staleReplicaTimeout" => spec.stale_replica_timeout = number(key, value, 0, i64::from(i32::MAX))?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// How the volume behaves and is shown. False: the key is not one of these.
fn behave(spec: &mut VolumeSpec, key: &str, value: &str) -> Result<bool, Refused> {
    match key {
        "fsType" => check_file_system(value).map_err(|_| wrong(key, value, "ext4 or xfs"))?,
        "frontend" => {
            // Without a device no pod could have the volume.
            let known = Frontend::parse(value)
                .filter(|f| !matches!(f, Frontend::None | Frontend::Iscsi | Frontend::NbdServer));
            spec.frontend = known.ok_or_else(|| wrong(key, value, "blockdev, ublk, nbd or fuse"))?;
        }
        "quorum" => spec.quorum = value.parse().map_err(|_| wrong(key, value, "any, majority or unsafe"))?,
        "ioTimeout" => spec.io_timeout = Some(value.parse().map_err(|_| wrong(key, value, "seconds"))?),
        "disableRevisionCounter" => spec.revision_counter_disabled = flag(key, value)?,
        "unmapMarkSnapChainRemoved" => spec.unmap_mark_snap_chain_removed = toggle(key, value)?,
        // The second name stands in the StorageClass of Longhorn's documents.
        "freezeFilesystemForSnapshot" | "freezeFSForSnapshot" => {
            spec.freeze_filesystem_for_snapshot = toggle(key, value)?
        }
        "ublkQueueDepth" => spec.ublk_queue_depth = number(key, value, 0, 4096)?,
        "ublkNumberOfQueue" => spec.ublk_number_of_queue = number(key, value, 0, 64)?,
        "migratable" => spec.migratable = flag(key, value)?,
        "encrypted" => spec.encrypted = flag(key, value)?,
        "dataEngine" => {
            spec.data_engine = DataEngine::parse(value).ok_or_else(|| wrong(key, value, "v1"))?;
        }
        "dataLayout.type" => value.clone_into(&mut spec.data_layout.kind),
        EXCLUSIVE if flag(key, value)? => spec.access_mode = AccessMode::ReadWriteOncePod,
        EXCLUSIVE => {}
        // The volume itself is not otherwise.
        STRICT_TOPOLOGY => {
            flag(key, value)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// What the volume is made of. False: the key is not one of these.
fn source(spec: &mut VolumeSpec, key: &str, value: &str) -> Result<bool, Refused> {
    match key {
        "fromBackup" => value.clone_into(&mut spec.from_backup),
        "backupTargetName" => value.clone_into(&mut spec.backup_target_name),
        "backupBlockSize" => {
            let mib = value.trim_end_matches("Mi");
            spec.backup_block_size = match mib {
                "" => Int64Text::default(),
                "2" | "2097152" => Int64Text(2 << 20),
                "16" | "16777216" => Int64Text(16 << 20),
                _ => return Err(wrong(key, value, "2Mi or 16Mi")),
            };
        }
        "dataSource" => value.clone_into(&mut spec.data_source),
        "cloneMode" => {
            match value {
                "" | "full-copy" => {}
                "linked-clone" => return Err(not_built(key, value, "full-copy")),
                _ => return Err(wrong(key, value, "full-copy")),
            }
            value.clone_into(&mut spec.clone_mode);
        }
        "backingImage" => value.clone_into(&mut spec.backing_image),
        _ => return Ok(false),
    }
    Ok(true)
}

/// What a VolumeAttributesClass may change of a volume.
///
/// # Errors
/// [`Refused::Argument`] for any other key, or a value that cannot be.
pub fn change(spec: &mut VolumeSpec, parameters: &HashMap<String, String>) -> Result<(), Refused> {
    for (key, value) in sorted(parameters) {
        match key {
            "numberOfReplicas" => spec.number_of_replicas = number(key, value, 1, REPLICAS_MAX.into())?,
            "dataLocality" => spec.data_locality = locality(key, value)?,
            "replicaAutoBalance" => spec.replica_auto_balance = balance(key, value)?,
            "snapshotMaxCount" => spec.snapshot_max_count = number(key, value, 0, SNAPSHOT_COUNT.into())?,
            _ if key.starts_with(SIDECARS) => {}
            _ => {
                return Err(Refused::Argument(format!(
                    "{key:?} of a volume does not change: numberOfReplicas, dataLocality, replicaAutoBalance and snapshotMaxCount do"
                )));
            }
        }
    }
    if spec.data_locality == DataLocality::StrictLocal && spec.number_of_replicas > 1 {
        return Err(Refused::Argument(
            "strict-local volumes have exactly one replica: set numberOfReplicas to 1 or another dataLocality".to_owned(),
        ));
    }
    Ok(())
}

/// What a VolumeSnapshotClass asks for.
///
/// # Errors
/// [`Refused::Argument`] for what is not known; [`Refused::Precondition`] for a backup, while there is nowhere to put it.
pub fn snapshot(parameters: &HashMap<String, String>) -> Result<(), Refused> {
    for (key, value) in sorted(parameters) {
        match (key, value) {
            ("type", "" | "snap") => {}
            ("type", "bak") => {
                return Err(Refused::Precondition(
                    "there is no backup target, and backups are not built yet: use type snap".to_owned(),
                ));
            }
            ("type", "bi") => {
                return Err(Refused::Precondition(
                    "backing images are not built yet: use type snap".to_owned(),
                ));
            }
            ("type", _) => return Err(wrong(key, value, "snap")),
            ("backupMode" | "exportType" | "diskSelector" | "nodeSelector", _) => {}
            _ if key.starts_with(SIDECARS) => {}
            _ => {
                return Err(Refused::Argument(format!(
                    "{key:?} is not a parameter of a VolumeSnapshotClass of {}",
                    crate::DRIVER
                )));
            }
        }
    }
    Ok(())
}

/// In the order of the keys, so that of several mistakes the same one is told each time.
fn sorted(parameters: &HashMap<String, String>) -> BTreeMap<&str, &str> {
    parameters.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

/// The value is one of Longhorn's, and may be had of a later version.
fn not_built(key: &str, value: &str, expected: &str) -> Refused {
    Refused::Precondition(format!("{key} is {value:?}, and may be {expected}: that is not built yet"))
}

fn wrong(key: &str, value: &str, expected: &str) -> Refused {
    Refused::Argument(format!("{key} is {value:?}, and may be {expected}"))
}

fn number(key: &str, value: &str, least: i64, most: i64) -> Result<i64, Refused> {
    let parsed = value.parse().ok().filter(|n| (least..=most).contains(n));
    parsed.ok_or_else(|| wrong(key, value, &format!("a number from {least} to {most}")))
}

fn flag(key: &str, value: &str) -> Result<bool, Refused> {
    boolean(value).ok_or_else(|| wrong(key, value, "true or false"))
}

/// A switch in the spellings that Longhorn takes (Go's `strconv.ParseBool`); nothing is off.
fn boolean(value: &str) -> Option<bool> {
    match value {
        "1" | "t" | "T" | "true" | "True" | "TRUE" => Some(true),
        "" | "0" | "f" | "F" | "false" | "False" | "FALSE" => Some(false),
        _ => None,
    }
}

fn toggle(key: &str, value: &str) -> Result<Toggle, Refused> {
    Toggle::parse(value).ok_or_else(|| wrong(key, value, "ignored, enabled or disabled"))
}

fn locality(key: &str, value: &str) -> Result<DataLocality, Refused> {
    let known = DataLocality::parse(value).filter(|l| *l != DataLocality::Setting);
    known.ok_or_else(|| wrong(key, value, "disabled, best-effort or strict-local"))
}

fn balance(key: &str, value: &str) -> Result<AutoBalance, Refused> {
    AutoBalance::parse(value)
        .ok_or_else(|| wrong(key, value, "ignored, disabled, least-effort or best-effort"))
}

/// Words between commas.
fn tags(value: &str) -> Vec<String> {
    value.split(',').map(str::trim).filter(|tag| !tag.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use lh_cluster::api::Quorum;

    use super::*;

    fn of(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn longhorns_own_storage_class_is_understood() {
        let spec = volume(&of(&[
            ("numberOfReplicas", "3"),
            ("staleReplicaTimeout", "30"),
            ("fromBackup", ""),
            ("fsType", "ext4"),
            ("dataLocality", "disabled"),
            ("unmapMarkSnapChainRemoved", "ignored"),
            ("disableRevisionCounter", "true"),
            ("dataEngine", "v1"),
            ("backupTargetName", "default"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ]))
        .unwrap();
        assert_eq!((spec.number_of_replicas, spec.stale_replica_timeout), (3, 30));
        assert_eq!((spec.data_locality, spec.revision_counter_disabled), (DataLocality::Disabled, true));
        let spec = volume(&of(&[("diskSelector", "ssd, fast,"), ("quorum", "majority"), ("ioTimeout", "0")]))
            .unwrap();
        assert_eq!(spec.disk_selector, ["ssd", "fast"]);
        assert_eq!((spec.quorum, spec.io_timeout), (Quorum::Majority, Some(0)));
        let bare = volume(&HashMap::new()).unwrap();
        assert_eq!((bare.data_locality, bare.number_of_replicas), (DataLocality::Setting, 0));
        let mut none = volume(&of(&[("numberOfReplicas", "0")])).unwrap();
        assert_eq!(none, bare);
        change(&mut none, &of(&[("dataLocality", "strict-local")])).unwrap();
        assert!(volume(&of(&[("migratable", "true")])).unwrap().migratable);
        let access = |exclusive| volume(&of(&[("exclusive", exclusive)])).unwrap().access_mode;
        assert_eq!(access("true"), AccessMode::ReadWriteOncePod);
        assert_eq!(access("false"), AccessMode::ReadWriteOnce);
    }

    #[test]
    fn what_is_not_known_or_cannot_be_is_refused_by_name() {
        for (key, value) in [
            ("numberOfReplica", "3"),
            ("numberOfReplicas", "-1"),
            ("numberOfReplicas", "21"),
            ("numberOfReplicas", "three"),
            ("dataLocality", "near"),
            ("dataLocality", "\0unset"),
            ("replicaSoftAntiAffinity", "yes"),
            ("fsType", "btrfs"),
            ("frontend", ""),
            ("frontend", "floppy"),
            ("frontend", "iscsi"),
            ("frontend", "nbd-server"),
            ("quorum", "all"),
            ("ioTimeout", "-1"),
            ("migratable", "yes"),
            ("freezeFilesystemForSnapshot", "yes"),
            ("cloneMode", "half-copy"),
            ("backupBlockSize", "3Mi"),
            ("dataEngine", "v3"),
        ] {
            let refused = volume(&of(&[(key, value)])).unwrap_err();
            assert!(
                matches!(&refused, Refused::Argument(text) if text.contains(key)),
                "{key}={value}: {refused:?}"
            );
        }
    }

    #[test]
    fn what_is_not_built_is_refused_as_something_that_may_be_had_later() {
        for (key, value) in [
            ("share", "true"),
            ("recurringJobSelector", "[{\"name\":\"x\"}]"),
            ("cloneMode", "linked-clone"),
            ("storageCapacityMode", "zone"),
            ("dataLayout.mode", "erasureCoding"),
            ("recurringJobs", "[{\"name\":\"x\"}]"),
            ("backingImageName", "debian"),
            ("v2DataEngine", "true"),
        ] {
            let refused = volume(&of(&[(key, value)])).unwrap_err();
            assert!(
                matches!(&refused, Refused::Precondition(text) if text.contains(key)),
                "{key}={value}: {refused:?}"
            );
        }
        for nothing in [
            ("share", "false"),
            ("share", "False"),
            ("recurringJobSelector", "[]"),
            ("cloneMode", ""),
            ("storageCapacityMode", "node"),
            ("dataLayout.type", "replicated"),
            ("dataLayout.mode", "raid1"),
            ("recurringJobs", ""),
            ("backingImageName", ""),
            ("v2DataEngine", "false"),
        ] {
            volume(&of(&[nothing])).unwrap();
        }
    }

    #[test]
    fn details_of_what_a_class_does_not_ask_for_are_taken() {
        let class = of(&[
            ("share", "false"),
            ("nfsOptions", "vers=4.1,noresvport"),
            ("shareManagerNodeSelector", "kubernetes.io/os:linux"),
            ("shareManagerTolerations", "[{\"operator\":\"Exists\"}]"),
            ("backingImage", ""),
            ("backingImageDataSourceType", "download"),
            ("dataLayout.mode", "raid1"),
            ("dataLayout.dataChunks", "2"),
            ("freezeFSForSnapshot", "enabled"),
        ]);
        assert_eq!(volume(&class).unwrap().freeze_filesystem_for_snapshot, Toggle::Enabled);
    }

    #[test]
    fn switches_are_spelt_as_longhorn_takes_them() {
        for on in ["1", "t", "T", "true", "True", "TRUE"] {
            assert!(volume(&of(&[("migratable", on)])).unwrap().migratable, "{on}");
        }
        for off in ["0", "f", "F", "false", "False", "FALSE", ""] {
            assert!(!volume(&of(&[("migratable", off)])).unwrap().migratable, "{off}");
        }
        for neither in ["yes", "tRUE", "2", " true"] {
            assert!(volume(&of(&[("migratable", neither)])).is_err(), "{neither}");
        }
    }

    #[test]
    fn four_things_change_and_nothing_else() {
        let mut spec = VolumeSpec { number_of_replicas: 3, ..VolumeSpec::default() };
        let wishes = [
            ("numberOfReplicas", "2"),
            ("dataLocality", "best-effort"),
            ("replicaAutoBalance", "least-effort"),
            ("snapshotMaxCount", "7"),
        ];
        change(&mut spec, &of(&wishes)).unwrap();
        change(&mut spec, &of(&[("csi.storage.k8s.io/pvc/name", "data")])).unwrap();
        assert_eq!((spec.number_of_replicas, spec.snapshot_max_count), (2, 7));
        assert_eq!(spec.replica_auto_balance, AutoBalance::LeastEffort);
        for wrong in [
            ("fsType", "xfs"),
            ("fakeKey", "x"),
            ("snapshotMaxCount", "251"),
            ("dataLocality", "strict-local"),
        ] {
            assert!(
                matches!(change(&mut spec.clone(), &of(&[wrong])), Err(Refused::Argument(_))),
                "{wrong:?}"
            );
        }
        change(&mut spec, &of(&[("dataLocality", "strict-local"), ("numberOfReplicas", "1")])).unwrap();
    }

    #[test]
    fn a_snapshot_is_one_unless_a_backup_is_asked_for() {
        for fine in [&[][..], &[("type", "snap")], &[("csi.storage.k8s.io/volumesnapshot/name", "x")]] {
            assert_eq!(snapshot(&of(fine)), Ok(()));
        }
        assert!(matches!(snapshot(&of(&[("type", "bak")])), Err(Refused::Precondition(_))));
        assert!(matches!(snapshot(&of(&[("type", "tape")])), Err(Refused::Argument(_))));
        assert!(matches!(snapshot(&of(&[("typo", "snap")])), Err(Refused::Argument(_))));
    }
}
