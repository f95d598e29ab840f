//! Images of volumes: which one is started, and how a running volume comes to another one.

use super::super::*;
use super::world::World;
use crate::api::{Conditions, VolumeSpec};
use crate::plan::upgrade::UPGRADED;

const ALL: [&str; 4] = ["n1", "n2", "n3", "n4"];

fn deployed(world: &mut World, image: &str, nodes: &[&str]) {
    for name in nodes {
        world.cluster.nodes.get_mut(*name).unwrap().programs.insert(image.into());
    }
}

fn upgraded_to(world: &mut World, image: &str) {
    world.volume_mut().spec.image = image.into();
    world.settle();
}

/// The images that the engine and the replicas run, each once.
fn running(world: &World) -> (String, BTreeSet<String>) {
    let engine = world.engine().status.clone().unwrap_or_default().current_image;
    (engine, world.replicas.values().map(|r| r.status.clone().unwrap_or_default().current_image).collect())
}

fn reason(world: &World) -> String {
    world.status().conditions.get_condition(UPGRADED).map(|c| c.reason.clone()).unwrap_or_default()
}

fn one(image: &str) -> BTreeSet<String> {
    [image.to_owned()].into()
}

#[test]
fn first_the_engine_and_then_one_replica_after_the_other() {
    let mut world = World::attached_to("n1");
    deployed(&mut world, "longhorn:2", &ALL);
    world.volume_mut().spec.image = "longhorn:2".into();
    let begun = world.plan();
    assert!(
        begun.iter().any(|a| matches!(a, Action::SetEngine(_, spec) if spec.image == "longhorn:2")),
        "{begun:?}"
    );
    assert!(!begun.iter().any(|a| matches!(a, Action::SetReplica(..))), "{begun:?}");
    let of_new = |world: &World| world.replicas.values().filter(|r| r.spec.image == "longhorn:2").count();
    for expected in 1..=3 {
        world.settle();
        assert_eq!(of_new(&world), expected, "the next one waits until the last one has settled");
        assert_eq!(world.status().current_image, "longhorn:1", "not before all are");
        world.now += k8s_openapi::jiff::SignedDuration::from_secs(13);
    }
    world.settle();
    assert_eq!(running(&world), ("longhorn:2".into(), one("longhorn:2")));
    assert_eq!((world.status().current_image.as_str(), reason(&world).as_str()), ("longhorn:2", ""));
    assert!(world.told.contains(&"Upgraded"));
}

#[test]
fn nothing_begins_where_a_program_is_missing_or_a_replica_lacks_something() {
    let mut world = World::attached_to("n1");
    deployed(&mut world, "longhorn:2", &["n1", "n2"]);
    upgraded_to(&mut world, "longhorn:2");
    assert_eq!((running(&world).0, reason(&world)), ("longhorn:1".into(), "NotDeployed".into()));
    let message = world.status().conditions.get_condition(UPGRADED).unwrap().message.clone();
    assert!(message.ends_with("not on these nodes: n3"), "{message}");
    // A further replica goes where the program of what runs is.
    deployed(&mut world, "longhorn:1", &["n1", "n2", "n3"]);
    world.volume_mut().spec.number_of_replicas = 4;
    world.settle();
    assert_eq!((world.replicas.len(), world.status().conditions.holds(SCHEDULED)), (3, false));
    world.volume_mut().spec.number_of_replicas = 3;
    world.up.remove("n3");
    world.settle();
    deployed(&mut world, "longhorn:2", &ALL);
    world.settle();
    assert_eq!((running(&world).0, reason(&world)), ("longhorn:1".into(), "Waiting".into()));
    world.up.insert("n3".into());
    world.settle();
    assert_eq!(running(&world).0, "longhorn:2");
}

#[test]
fn an_engine_or_a_replica_that_the_image_does_not_fit_stays_as_it_was() {
    let mut world = World::attached_to("n1");
    deployed(&mut world, "longhorn:2", &ALL);
    world.unfit.insert(("v-e-0".into(), "longhorn:2".into()));
    upgraded_to(&mut world, "longhorn:2");
    assert_eq!(running(&world), ("longhorn:1".into(), one("longhorn:1")));
    assert_eq!((reason(&world).as_str(), world.status().current_image.as_str()), ("Failed", "longhorn:1"));
    assert_eq!(world.told.iter().filter(|told| **told == "UpgradeFailed").count(), 1);
    world.volume_mut().spec.number_of_replicas = 4;
    world.settle();
    assert!(
        world.replicas.len() == 4 && running(&world).1 == one("longhorn:1"),
        "a new one is of what serves"
    );
    upgraded_to(&mut world, "longhorn:1");
    assert_eq!(reason(&world), "", "it is taken back");

    let mut world = World::attached_to("n1");
    deployed(&mut world, "longhorn:2", &ALL);
    let first = world.replicas.keys().next().unwrap().clone();
    world.unfit.insert((first, "longhorn:2".into()));
    upgraded_to(&mut world, "longhorn:2");
    world.pass(60);
    assert_eq!((running(&world).0.as_str(), reason(&world).as_str()), ("longhorn:2", "Failed"));
    assert_eq!(running(&world).1, one("longhorn:1"), "no further one is tried");
}

#[test]
fn a_volume_that_names_no_image_follows_its_managers_when_it_is_attached_anew() {
    let mut world = World::attached_to("n1");
    assert_eq!(world.status().current_image, "longhorn:1");
    world.engines.get_mut("v-e-0").unwrap().spec.image = "longhorn:0".into();
    world.replicas.values_mut().for_each(|r| r.spec.image = "longhorn:0".into());
    world.settle();
    world.pass(60);
    assert_eq!(running(&world).0, "longhorn:0", "as long as it is attached it stays what it is");
    world.attach("");
    world.attach("n1");
    assert_eq!(running(&world).0, "longhorn:0", "the managers' program is not on its nodes yet");
    world.attach("");
    deployed(&mut world, "longhorn:1", &ALL);
    world.attach("n1");
    assert_eq!(running(&world), ("longhorn:1".into(), one("longhorn:1")));
}

#[test]
fn an_image_that_is_named_counts_from_the_first_start_on() {
    let mut world = World::new(VolumeSpec { image: "longhorn:2".into(), ..VolumeSpec::default() });
    deployed(&mut world, "longhorn:2", &ALL);
    world.settle();
    world.attach("n1");
    assert_eq!(running(&world), ("longhorn:2".into(), one("longhorn:2")));
    assert_eq!(world.status().current_image, "longhorn:2");
}

#[test]
fn a_volume_of_an_image_that_is_nowhere_runs_with_its_managers() {
    let mut world = World::new(VolumeSpec { image: "elsewhere/engine:1".into(), ..VolumeSpec::default() });
    deployed(&mut world, "longhorn:1", &ALL);
    world.settle();
    world.attach("n1");
    assert_eq!(running(&world), ("longhorn:1".into(), one("longhorn:1")));
    assert_eq!((world.status().current_image.as_str(), &*reason(&world)), ("longhorn:1", "NotDeployed"));
    upgraded_to(&mut world, "");
    assert_eq!(reason(&world), "");
}

/// Attached in the moment in which managers begin, or with one node that has none: Longhorn's image is on no node, and was waited with.
#[test]
fn a_volume_of_longhorns_begins_with_what_the_nodes_have() {
    for known_at_once in [true, false] {
        let mut world = World::new(VolumeSpec::default());
        world.settle();
        let longhorns = "longhornio/longhorn-engine:v1.8.1";
        for replica in world.replicas.values_mut() {
            longhorns.clone_into(&mut replica.spec.image);
        }
        for engine in world.engines.values_mut() {
            longhorns.clone_into(&mut engine.spec.image);
        }
        world.volume_mut().spec.image = longhorns.into();
        // What no node has does not run.
        world.absent = world.replicas.keys().cloned().collect();
        if known_at_once {
            deployed(&mut world, "longhorn:1", &["n1", "n2"]);
        }
        world.attach("n1");
        deployed(&mut world, "longhorn:1", &["n1", "n2"]);
        world.settle();
        let asked: BTreeSet<String> = world.replicas.values().map(|r| r.spec.image.clone()).collect();
        assert_eq!(asked, one("longhorn:1"), "{known_at_once}");
        world.absent.clear();
        world.settle();
        assert_eq!(running(&world), ("longhorn:1".into(), one("longhorn:1")), "{known_at_once}");
    }
}
