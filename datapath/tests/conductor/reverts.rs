//! Branches that reverts leave. A replica that has made its layers one by one tells the last one last; one that was opened since, or
//! filled, tells them as they stand on each other. They hold the same.

use datapath::conductor::{Command, Mode, Quorum, Robustness};

use crate::replica::Replica;
use crate::stories::{opened, opened_by};
use crate::world::World;

const SECOND: u64 = 1_000_000_000;

impl World {
    fn takes(&mut self, name: &str) {
        let command = self.snapshot(name);
        assert_eq!(self.finish(command), Ok(()));
    }

    fn reverts_to(&mut self, name: &str) {
        let command = self.revert(name);
        assert_eq!(self.finish(command), Ok(()));
    }

    /// Snapshots a, b on it, c on that; a revert to a, with something written since, and d on that.
    fn branched(mut self) -> Self {
        for name in ["a", "b", "c"] {
            self.writes();
            self.takes(name);
        }
        self.reverts_to("a");
        self.writes_to(1);
        self.takes("d");
        assert!((1..=3).all(|replica| self.told_by(replica) == MADE));
        self
    }

    fn told_by(&self, replica: usize) -> Vec<&str> {
        self.replicas[replica - 1].layers.iter().map(|l| l.name.as_str()).collect()
    }
}

/// What [`World::branched`] has made, and what is told of it by who was opened since.
const MADE: [&str; 5] = ["a", "b", "c", "d", ""];
const OPENED: [&str; 5] = ["a", "b", "d", "c", ""];

#[test]
fn the_member_that_was_lost_is_known_whatever_the_order_of_its_layers() {
    for quorum in [Quorum::Any, Quorum::Majority] {
        let mut world = opened(quorum).branched();
        (1..=3).for_each(|replica| world.dies(replica));
        world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
        (1..=3).for_each(|replica| world.returns(replica));
        world.run_until("they go on", |w| w.status().robustness == Robustness::Healthy);
        assert!((1..=3).all(|replica| world.told_by(replica) == OPENED));
        assert_eq!(world.status().counters.rebuilds, 0);
        world.reads();
        world.settle();
    }
}

/// Two were opened since, and one not.
#[test]
fn nobody_is_filled_anew_at_a_start_for_the_order_of_its_layers() {
    for lives in 1..=3 {
        let mut world = opened(Quorum::Any).branched();
        (1..=3).filter(|replica| *replica != lives).for_each(|replica| world.replicas[replica - 1].kill());
        world.crash_engine();
        (1..=3).for_each(|replica| world.returns(replica));
        world.run_until("all start", |w| w.is_open() && w.status().robustness == Robustness::Healthy);
        assert!((1..=3).all(|r| world.told_by(r) == if r == lives { MADE } else { OPENED }));
        assert_eq!(world.status().counters.rebuilds, 0);
        world.settle();
    }
}

/// Where members may have folded differently a repair copies what is read through a layer, all of it; nobody has folded here.
#[test]
fn what_is_in_doubt_is_repaired_layer_by_layer_whatever_their_order() {
    let mut world = opened(Quorum::Any).branched();
    (0..4).for_each(|hot| world.writes_to(hot));
    world.replicas.iter_mut().for_each(|r| r.unsettle("d"));
    let held = |w: &World| w.replicas[0].layers.iter().find(|l| l.name == "d").map(|l| l.blocks.clone());
    let before = held(&world);
    world.replicas[2].forget_unflushed();
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    assert!(world.status().chunks_in_doubt > 0);
    world.run_until("nothing is in doubt", |w| w.status().chunks_in_doubt == 0);
    assert_eq!((world.told_by(1), world.told_by(3)), (MADE.to_vec(), OPENED.to_vec()));
    assert_eq!(held(&world), before);
    world.settle();
}

/// 3 has missed what is in d. When its rebuild is planned, from 2, the nearest replica is being filled itself; that has become a member,
/// and has told its layers, before 3 is ready to be filled.
#[test]
fn a_rebuild_goes_by_the_layers_that_it_was_planned_by() {
    let mut world = opened(Quorum::Any);
    for name in ["a", "b", "c"] {
        world.writes();
        world.takes(name);
    }
    world.reverts_to("a");
    world.dies(1);
    world.dies(3);
    world.run_until("2 is alone", |w| w.members() == ["r2"]);
    world.writes_to(1);
    world.takes("d");
    world.replicas[0].puts_until = u64::MAX;
    world.returns(1);
    world.run_until("1 is being filled", |w| w.replicas[0].rebuilding);
    world.returns(3);
    world.run_until("3 is to be filled", |w| w.mode(3) == Mode::Wo);
    world.replicas[2].stalled_until = world.now + 4 * SECOND;
    world.replicas[0].puts_until = 0;
    world.run_until("1 is in sync", |w| w.mode(1) == Mode::Rw);
    assert!(!world.replicas[2].rebuilding, "it has yet to take the chain over");
    let look = world.command(Command::LookAtChain);
    assert_eq!(world.finish(look), Ok(()));
    assert_eq!((world.told_by(1), world.told_by(2)), (OPENED.to_vec(), MADE.to_vec()));
    world.settle();
}

/// A replica that was filled calls all unsettled until it is told otherwise, also what a revert leaves before that has been heard. All is
/// settled up to the snapshot that was reverted to: not to what was left, and not to what is below.
#[test]
fn what_a_revert_has_left_is_not_called_settled() {
    for seed in 0..120 {
        let mut world = opened_by(seed, Quorum::Any);
        world.takes("a");
        world.takes("b");
        world.reverts_to("a");
        world.takes("c");
        world.dies(2);
        world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
        world.returns(2);
        world.run_until("2 is filled", |w| w.replicas[1].rebuilding);
        world.run_until("2 is whole", |w| !w.replicas[1].rebuilding);
        let to = ["a", "b"][usize::from(seed % 2 == 0)];
        world.reverts_to(to);
        world.run_for(1000);
        for replica in &world.replicas {
            assert!(replica.is_settled(), "seed {seed}: {} {:?}", replica.name, replica.settled);
        }
        // Nor is there no end to it.
        world.settle();
    }
}

/// 2 was filled, and calls all unsettled; 1 has folded the last of it away already, which is no place to tell from.
#[test]
fn what_may_be_folded_away_is_not_called_settled() {
    let mut world = opened(Quorum::Any);
    world.takes("a");
    world.takes("b");
    let remove = world.command(Command::RemoveSnapshot { name: "b".into() });
    assert_eq!(world.finish(remove), Ok(()));
    world.dies(2);
    world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
    world.returns(2);
    world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
    world.replicas[0].goes_on_folding("b");
    world.replicas[0].end_fold();
    world.run_for(1000);
    assert_eq!(world.replicas[1].settled.as_deref(), Some("a"));
    assert!(world.replicas.iter().all(Replica::is_settled));
}

/// A snapshot is folded into the one that stands on it, whatever stands beside that: a fold that broke off on one replica is no rot.
#[test]
fn who_has_folded_in_part_differs_in_what_stands_on_it() {
    let mut world = opened(Quorum::Any);
    for name in ["a", "b"] {
        world.writes();
        world.takes(name);
    }
    for (name, left, hot) in [("a", "d", 1), ("b", "e", 2)] {
        world.reverts_to(name);
        world.writes_to(hot);
        world.takes(left);
    }
    assert_eq!(world.told_by(1), ["a", "b", "d", "e", ""]);
    let remove = world.command(Command::RemoveSnapshot { name: "b".into() });
    assert_eq!(world.finish(remove), Ok(()));
    world.replicas[0].goes_on_folding("b");
    world.replicas[0].fold_in_part();
    let scrub = world.scrub(true);
    assert_eq!((scrub.findings, scrub.error), (Vec::new(), None));
    let is_named = |name: &str| scrub.notes.iter().any(|note| note.starts_with(&format!("{name} was not")));
    assert_eq!(["a", "b", "d", "e"].map(is_named), [false, true, false, true], "{:?}", scrub.notes);
}
