//! Folds that have to make way, for who comes back and for a revert; and members that were away meanwhile.

use datapath::conductor::{Command, FoldStatus, Mode, Quorum, ReplicaConfig};

use crate::stories::{opened, purging_slowly};
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
            let command = world.command(command);
            assert_eq!(world.finish(command), Ok(()));
        }
        world.run_until("both fold", Self::both_fold);
        world
    }

    fn both_fold(&mut self) -> bool {
        [0, 2].into_iter().all(|n| self.replicas[n].is_folding())
    }

    fn all_fold(&mut self) -> bool {
        self.replicas.iter().all(crate::replica::Replica::is_folding)
    }

    fn removes(&mut self, name: &str) {
        let command = self.command(Command::RemoveSnapshot { name: name.into() });
        assert_eq!(self.finish(command), Ok(()));
    }

    fn purges(&mut self) {
        let command = self.command(Command::Purge);
        assert_eq!(self.finish(command), Ok(()));
    }

    fn fold_of(&self, replica: usize) -> FoldStatus {
        let name = format!("r{replica}");
        self.status().folds.into_iter().find(|f| f.replica == name).expect("it folds, or has")
    }

    /// Until it has looked, and there is nothing left to fold.
    fn run_until_folded(&mut self, replica: usize) {
        let name = format!("r{replica}");
        let through = |w: &mut Self| w.status().folds.iter().any(|f| f.replica == name && !f.running);
        self.run_until("it is through", through);
    }

    fn ends_fold(&mut self, replica: usize) {
        self.replicas[replica - 1].end_fold();
        self.run_until_folded(replica);
    }

    fn layers_of(&self, replica: usize) -> Vec<&str> {
        self.replicas[replica - 1].layers.iter().map(|l| l.name.as_str()).collect()
    }

    /// All come to their end.
    fn a_is_folded_away(&mut self) {
        self.replicas.iter_mut().for_each(crate::replica::Replica::end_fold);
        self.run_until("all are through", |w| w.status().folds.iter().all(|fold| !fold.running));
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
    world.run_until("both fold again, and so does 2", World::all_fold);
    world.a_is_folded_away();
}

#[test]
fn folds_that_a_revert_has_stopped_go_on_afterwards() {
    let mut world = World::folding_without_2();
    let revert = Command::Revert { name: "b".into(), created: "2026-01-01T00:00:00Z".into() };
    let revert = world.command(revert);
    assert_eq!(world.finish(revert), Ok(()));
    world.run_until("both fold again", World::both_fold);
    world.a_is_folded_away();
}

/// Its purge is not over because the others' is.
#[test]
fn who_is_lost_while_it_folds_folds_when_it_is_back() {
    let mut world = purging_slowly(Quorum::Any);
    world.run_until("all fold", World::all_fold);
    world.dies(2);
    world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
    world.returns(2);
    world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
    world.run_until("all fold again", World::all_fold);
    (1..=3).for_each(|replica| world.ends_fold(replica));
    (1..=3).for_each(|replica| assert_eq!(world.layers_of(replica), ["b", ""]));
}

/// Nobody was put out, and nothing is copied: they go on as the members that they were.
#[test]
fn members_that_were_waited_for_go_on_folding() {
    let mut world = purging_slowly(Quorum::Majority);
    world.run_until("all fold", World::all_fold);
    [2, 3].into_iter().for_each(|replica| world.dies(replica));
    world.run_until("both are lost", |w| [2, 3].into_iter().all(|n| w.mode(n) == Mode::Err));
    world.ends_fold(1);
    [2, 3].into_iter().for_each(|replica| world.returns(replica));
    world.run_until("both fold again", |w| [1, 2].into_iter().all(|n| w.replicas[n].is_folding()));
    [2, 3].into_iter().for_each(|replica| world.ends_fold(replica));
    assert_eq!(world.status().counters.rebuilds, 0);
}

/// Each time the others' folds rest until it is back. They have to come to an end, too.
#[test]
fn who_is_lost_whenever_it_folds_is_left_alone_until_the_next_purge() {
    let mut world = purging_slowly(Quorum::Any);
    for _ in 0..3 {
        world.run_until("all fold", World::all_fold);
        world.dies(2);
        world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
        world.returns(2);
        world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
    }
    world.run_until("the others fold", World::both_fold);
    world.run_until_folded(2);
    assert!(!world.replicas[1].is_folding());
    let failed = world.fold_of(2).failed;
    assert!(failed.len() == 1 && failed[0].0 == "a" && failed[0].1.contains("lost 3 times"), "{failed:?}");
    [1, 3].into_iter().for_each(|replica| world.ends_fold(replica));
    world.purges();
    world.run_until("2 folds", |w| w.replicas[1].is_folding());
    world.ends_fold(2);
    assert_eq!((world.layers_of(2), world.fold_of(2).failed), (vec!["b", ""], Vec::new()));
}

/// A place that is free again may be another replica's, and what is said of folds is of who is there.
#[test]
fn a_replica_that_is_new_folds_what_it_was_filled_with() {
    let mut world = purging_slowly(Quorum::Any);
    world.run_until("all fold", World::all_fold);
    world.dies(2);
    let command = world.command(Command::RemoveReplica { name: "r2".into() });
    assert_eq!(world.finish(command), Ok(()));
    let new = ReplicaConfig { name: "r2".into(), local: false, learner: false };
    let command = world.command(Command::AddReplica(new));
    assert_eq!(world.finish(command), Ok(()));
    world.returns(2);
    world.run_until("it is in sync", |w| w.mode(2) == Mode::Rw);
    world.run_until("all fold again", World::all_fold);
}

/// A member that comes back takes part in the purge that it missed, and in no other.
#[test]
fn what_is_removed_after_a_purge_waits_for_the_next_also_on_who_comes_back() {
    let mut world = purging_slowly(Quorum::Any);
    world.run_until("all fold", World::all_fold);
    (1..=3).for_each(|replica| world.ends_fold(replica));
    world.removes("b");
    world.dies(2);
    world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
    world.returns(2);
    world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
    world.run_until_folded(2);
    assert_eq!(world.layers_of(2), ["b", ""]);
    world.purges();
    world.run_until("all fold", World::all_fold);
}

#[test]
fn what_is_removed_while_a_purge_runs_is_folded_on_every_member() {
    let mut world = purging_slowly(Quorum::Any);
    world.run_until("all fold", World::all_fold);
    [1, 3].into_iter().for_each(|replica| world.ends_fold(replica));
    world.removes("b");
    world.run_until("the others fold b", World::both_fold);
    world.replicas[1].end_fold();
    world.run_until("2 folds b", World::all_fold);
    (1..=3).for_each(|replica| world.ends_fold(replica));
    (1..=3).for_each(|replica| assert_eq!(world.layers_of(replica), [""]));
}

/// The engine before has begun it. It moves blocks from layer to layer, also of the one from which somebody is filled.
#[test]
fn a_fold_that_this_engine_knows_nothing_of_rests_while_somebody_is_filled_from_there() {
    let mut world = purging_slowly(Quorum::Any);
    world.run_until("all fold", World::all_fold);
    world.dies(2);
    world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
    world.writes();
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    world.replicas[0].goes_on_folding("a");
    world.returns(2);
    world.run_until("2 is being filled", |w| w.replicas[1].rebuilding);
    assert!(!world.replicas[0].is_folding());
    world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
}
