//! Folds that have to make way: for who comes back, and for a revert.

use datapath::conductor::{Command, Mode, Quorum};

use crate::stories::opened;
use crate::world::World;

impl World {
    /// Replica 2 is away, and the others fold the snapshot a away, which takes them long.
    fn folding_without_2() -> Self {
        let mut world = opened(Quorum::Any);
        for name in ["a", "b"] {
            let command = world.snapshot(name);
            assert_eq!(world.finish(command), Ok(()));
        }
        world.dies(2);
        world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
        world.replicas.iter_mut().for_each(|r| r.slow_folds = true);
        for command in [Command::RemoveSnapshot { name: "a".into() }, Command::Purge] {
            let command = world.command(command, "");
            assert_eq!(world.finish(command), Ok(()));
        }
        world.run_until("both fold", Self::both_fold);
        world
    }

    fn both_fold(&mut self) -> bool {
        [0, 2].into_iter().all(|n| self.replicas[n].is_folding())
    }

    /// Both come to their end.
    fn a_is_folded_away(&mut self) {
        [0, 2].into_iter().for_each(|n| self.replicas[n].end_fold());
        self.run_until("both are through", |w| w.status().folds.iter().all(|fold| !fold.running));
        assert!(self.status().folds.iter().all(|fold| fold.failed.is_empty()), "{:?}", self.status().folds);
    }
}

/// They are stopped one after the other. Whoever has heard of it first does not begin anew before the last one rests, or none of
/// them would ever come to an end, and the replica never be in sync; and that they were stopped says nothing against the snapshot.
#[test]
fn folds_make_way_for_who_comes_back_and_go_on_afterwards() {
    let mut world = World::folding_without_2();
    world.returns(2);
    world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
    world.run_until("both fold again", World::both_fold);
    world.a_is_folded_away();
}

#[test]
fn folds_that_a_revert_has_stopped_go_on_afterwards() {
    let mut world = World::folding_without_2();
    let revert = Command::Revert { name: "b".into(), created: "2026-01-01T00:00:00Z".into() };
    let revert = world.command(revert, "");
    assert_eq!(world.finish(revert), Ok(()));
    world.run_until("both fold again", World::both_fold);
    world.a_is_folded_away();
}
