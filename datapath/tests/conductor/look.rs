//! Looks at the chain, for whoever asks the engine for its snapshots.

use datapath::conductor::{Command, CommandError, Quorum};

use crate::stories::{opened, purging};
use crate::world::World;

impl World {
    fn looks(&mut self) -> u64 {
        self.command(Command::LookAtChain)
    }

    fn snapshots(&self) -> Vec<String> {
        let chain = self.status().chain;
        chain.iter().filter(|l| !l.name.is_empty()).map(|l| l.name.clone()).collect()
    }
}

/// Nobody tells the engine what its replicas have folded: without a look the snapshot is in its picture for good.
#[test]
fn what_was_folded_is_gone_from_the_chain_after_a_look() {
    let mut world = purging();
    world.run_until("a is gone everywhere", |w| w.replicas.iter().all(|r| r.layers.len() == 2));
    assert_eq!(world.snapshots(), ["a", "b"]);
    let command = world.looks();
    assert_eq!(world.finish(command), Ok(()));
    assert_eq!(world.snapshots(), ["b"]);
}

/// What a member told before it carried an operation out is older than what was decided.
#[test]
fn a_look_beside_a_snapshot_does_not_lose_it() {
    let mut world = opened(Quorum::Any);
    for steps in 0..60 {
        let name = format!("s{steps}");
        let snapshot = world.snapshot(&name);
        (0..steps).for_each(|_| world.step());
        let look = world.looks();
        assert_eq!((world.finish(snapshot), world.finish(look)), (Ok(()), Ok(())));
        let names = world.snapshots();
        assert_eq!(names.iter().filter(|known| **known == name).count(), 1, "{steps} steps: {names:?}");
    }
}

#[test]
fn the_next_replica_is_asked_when_the_first_is_gone() {
    let mut world = opened(Quorum::Any);
    let command = world.snapshot("a");
    assert_eq!(world.finish(command), Ok(()));
    let looks = [world.looks(), world.looks()];
    world.dies(1);
    looks.into_iter().for_each(|look| assert_eq!(world.finish(look), Ok(())));
    assert_eq!(world.snapshots(), ["a"]);
}

/// Whoever asks for snapshots does not wait for replicas: what was heard last is told at once.
#[test]
fn without_replicas_the_chain_is_what_was_heard_last() {
    let mut world = opened(Quorum::Any);
    let command = world.snapshot("a");
    assert_eq!(world.finish(command), Ok(()));
    (1..=3).for_each(|replica| world.dies(replica));
    world.run_for(1000);
    let look = world.looks();
    world.run_for(10);
    assert_eq!((world.answers.get(&look), world.snapshots()), (Some(&Ok(())), vec!["a".to_owned()]));
}

#[test]
fn a_look_ends_with_the_engine() {
    let mut world = opened(Quorum::Any);
    let looks = [world.looks(), world.looks()];
    let end = world.command(Command::Shutdown);
    for look in looks {
        let told = world.finish(look);
        assert!(matches!(told, Ok(()) | Err(CommandError::ShuttingDown)), "{told:?}");
    }
    assert_eq!(world.finish(end), Ok(()));
}
