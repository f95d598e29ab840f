//! Snapshots that an engine has and no resource names: those that expansions take, and those that people take by gRPC or
//! `longhornctl`. Each gets a resource, so that it is seen, counted and can be deleted; Longhorn does so, too.

use kube::ResourceExt;

use super::{FINALIZER, is_own_name, serves, waits};
use crate::api::{Engine, Snapshot, SnapshotSpec, Volume};
use crate::kubernetes::may_be_a_name;
use crate::plan::VOLUME_LABEL;

/// The annotation of such a resource. It goes with its snapshot, also where that went before anybody had told of it; one that somebody
/// made by hand, and mistyped, stays and says so.
const NAMED: &str = "longhorn.io/named-by-manager";

/// True for a resource that a manager made for a snapshot that was there.
pub(super) fn is_named(snapshot: &Snapshot) -> bool {
    snapshot.annotations().contains_key(NAMED)
}

/// The resources to be made for a volume whose engine runs here. `is_taken`: there is a snapshot of that name already, of
/// whichever volume: names are the cluster's.
pub fn unnamed(volume: &Volume, engine: &Engine, is_taken: impl Fn(&str) -> bool) -> Vec<Snapshot> {
    if volume.metadata.deletion_timestamp.is_some() || !serves(Some(engine)) || waits(Some(engine)) {
        return Vec::new();
    }
    let chain = engine.status.iter().flat_map(|status| &status.snapshots);
    // That of a snapshot may have large letters and `_`, too.
    let lacks = chain.filter(|(name, layer)| {
        !layer.removed && !is_own_name(name) && may_be_a_name(name) && !is_taken(name)
    });
    lacks.map(|(name, _)| naming(volume, name)).collect()
}

/// A resource for a snapshot that is there. No owner is named: a garbage collector that did not find it, since the volume was restored
/// and has another UID, would delete the resource, and the snapshot would go with it.
fn naming(volume: &Volume, name: &str) -> Snapshot {
    let of = volume.name_any();
    let spec = SnapshotSpec { volume: of.clone(), create_snapshot: false, ..SnapshotSpec::default() };
    let mut snapshot = Snapshot::new(name, spec);
    snapshot.labels_mut().insert(VOLUME_LABEL.to_owned(), of);
    snapshot.annotations_mut().insert(NAMED.to_owned(), "true".to_owned());
    snapshot.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    snapshot
}

#[cfg(test)]
mod tests {
    use super::super::tests::{engine, now, volume};
    use super::*;
    use crate::api::InstanceState::{Running, Stopped};

    const CHAIN: [(&str, bool); 6] = [
        ("expand-8192-v", false),
        ("gone", true),
        ("clone-1", false),
        ("My_own", false),
        ("other", false),
        ("mine", false),
    ];

    fn names(volume: &Volume, engine: &Engine) -> Vec<String> {
        let made = unnamed(volume, engine, |name| name == "other");
        made.iter().map(ResourceExt::name_any).collect()
    }

    #[test]
    fn a_snapshot_that_is_there_gets_a_resource_if_its_name_allows() {
        let mut volume = volume();
        volume.metadata.uid = Some("u-1".into());
        assert_eq!(names(&volume, &engine(Running, &CHAIN)), ["expand-8192-v", "mine"]);
        let made = unnamed(&volume, &engine(Running, &CHAIN), |name| name != "mine");
        let spec = SnapshotSpec { volume: "v".into(), ..SnapshotSpec::default() };
        assert_eq!((&made[0].spec, made.len()), (&spec, 1));
        assert_eq!(made[0].labels()["longhornvolume"], "v");
        assert_eq!(made[0].finalizers(), ["longhorn.io"]);
        assert!(is_named(&made[0]));
        assert!(made[0].owner_references().is_empty(), "it does not go with a UID");
    }

    #[test]
    fn nobody_names_those_of_a_volume_that_goes_or_of_an_engine_that_does_not_serve() {
        let mut volume = volume();
        assert_eq!(names(&volume, &engine(Stopped, &CHAIN)).len(), 0);
        let mut waits = engine(Running, &CHAIN);
        waits.status.as_mut().unwrap().waiting_for = "its replicas".into();
        assert_eq!(names(&volume, &waits).len(), 0);
        let mut relay = engine(Running, &CHAIN);
        relay.status.as_mut().unwrap().relaying = true;
        assert_eq!(names(&volume, &relay).len(), 0);
        volume.metadata.deletion_timestamp = Some(now().into());
        assert_eq!(names(&volume, &engine(Running, &CHAIN)).len(), 0);
    }
}
