//! What people ask of the membership while something else happens to it.

use datapath::conductor::{Command, CommandError, Mode, Quorum, ReplicaConfig, Robustness};
use lh_block::{Epoch, Generation};

use crate::replica::Replica;
use crate::stories::{opened, opened_by, plan};
use crate::world::{CHUNK, Plan, SIZE, World};

const SECOND: u64 = 1_000_000_000;

fn add(name: &str) -> Command {
    Command::AddReplica(ReplicaConfig { name: name.into(), local: false, learner: false })
}

fn remove(name: &str) -> Command {
    Command::RemoveReplica { name: name.into() }
}

impl World {
    fn asks(&mut self, command: Command) -> Result<(), CommandError> {
        let command = self.command(command);
        self.finish(command)
    }
}

/// With four replicas three had to be left, with three it is two.
#[test]
fn a_replica_that_hangs_is_put_out_also_after_another_one_was_removed() {
    let mut world = World::new(7, Plan { replicas: 4, ..plan(Quorum::Majority) });
    world.run_until("the volume opens", World::is_open);
    world.writes();
    assert_eq!(world.asks(remove("r4")), Ok(()));
    world.replicas[2].stalled_until = u64::MAX;
    let began = world.now;
    world.writes();
    assert!(world.now - began < 5 * SECOND, "the write waits for {} ms", (world.now - began) / 1_000_000);
    assert_eq!(world.mode(3), Mode::Err);
    world.reads();
}

/// With two replicas both were needed, and with four three are.
#[test]
fn two_of_four_that_hang_are_not_put_out_after_two_were_added() {
    let mut world = World::new(7, Plan { replicas: 2, ..plan(Quorum::Majority) });
    world.run_until("the volume opens", World::is_open);
    for (n, name) in [(3, "r3"), (4, "r4")] {
        world.add_replica(name);
        assert_eq!(world.asks(add(name)), Ok(()));
        world.run_until("it is a member", |w| w.mode(n) == Mode::Rw);
    }
    world.writes();
    world.replicas[2].stalled_until = u64::MAX;
    world.writes();
    assert_eq!(world.mode(3), Mode::Err, "three are left");
    let lost = world.losses();
    world.replicas[3].stalled_until = world.now + 5 * SECOND;
    world.writes();
    assert_eq!(world.losses(), lost, "it is waited for");
    assert_eq!(world.mode(4), Mode::Rw);
}

/// The names of replicas are those of volumes, 64 characters at most, and a suffix.
#[test]
fn a_replica_of_a_volume_with_the_longest_name_can_be_added() {
    let mut world = World::new(7, Plan { replicas: 2, ..plan(Quorum::Any) });
    world.run_until("the volume opens", World::is_open);
    let name = format!("{}-r-0a1b2c3d", "v".repeat(64));
    world.add_replica(&name);
    assert_eq!(world.asks(add(&name)), Ok(()));
    let members = |w: &mut World| w.status().epoch.is_some_and(|e| e.members.contains(&name));
    world.run_until("it is a member", members);
    assert!(matches!(world.asks(add(&"v".repeat(81))), Err(CommandError::Name(_))));
    world.settle();
}

/// Two of four would be no majority: nobody could become a member any more, and no engine start.
#[test]
fn a_majority_takes_another_replica_only_as_long_as_it_stays_one() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.writes();
    let refused = CommandError::TooFewInSync { replicas: 4, needed: 3, in_sync: 2 };
    assert_eq!(world.asks(add("r4")), Err(refused));
    assert_eq!(world.status().robustness, Robustness::Degraded);
    // In place of the lost one.
    assert_eq!(world.asks(remove("r3")), Ok(()));
    assert_eq!(world.asks(add("r3")), Ok(()));
    world.returns(3);
    world.run_until("3 is a member", |w| w.mode(3) == Mode::Rw);
    world.settle();
}

/// Of two a majority is both, and the second one holds nothing when it is added.
#[test]
fn the_second_of_a_majority_learns_before_it_counts() {
    let mut world = World::new(7, Plan { replicas: 1, ..plan(Quorum::Majority) });
    world.run_until("the volume opens", World::is_open);
    world.writes();
    world.add_replica("r2");
    world.learners.push("r2".into());
    world.dies(2);
    assert_eq!(world.asks(add("r2")), Ok(()));
    world.writes();
    assert_eq!(world.status().robustness, Robustness::Degraded);
    world.add_replica("r3");
    let refused = CommandError::TooFewInSync { replicas: 3, needed: 2, in_sync: 1 };
    assert_eq!(world.asks(add("r3")), Err(refused), "one after the other");
    world.replicas.pop();

    world.crash_engine();
    world.run_until("the next engine opens with the first alone", World::is_open);
    world.writes();
    world.returns(2);
    world.run_until("2 is a member", |w| w.mode(2) == Mode::Rw);
    world.writes();
    // Now it counts: neither goes on alone.
    world.dies(2);
    world.run_until("too few are left", |w| w.status().robustness == Robustness::Faulted);
    world.returns(2);
    world.run_until("both are back", |w| w.status().robustness == Robustness::Healthy);
    world.writes();
    world.dies(1);
    world.run_until("too few are left", |w| w.status().robustness == Robustness::Faulted);
    world.returns(1);
    world.settle();
    assert_eq!(world.status().replicas.len(), 2);
}

/// A volume of one replica that was just given a second one.
fn given_a_learner(seed: u64) -> World {
    let mut world = World::new(seed, Plan { replicas: 1, ..plan(Quorum::Majority) });
    world.run_until("the volume opens", World::is_open);
    world.add_replica("r2");
    world.learners.push("r2".into());
    assert_eq!(world.asks(add("r2")), Ok(()));
    world
}

/// It is lost as the epoch with it is being recorded: the volume goes on as it was.
#[test]
fn one_that_dies_as_it_has_learnt_holds_nobody_up() {
    for seed in 0..40 {
        let mut world = given_a_learner(seed);
        let has_recorded = |w: &mut World| w.replicas[1].epoch.is_some();
        world.run_until("2 has recorded an epoch", has_recorded);
        for _ in 0..seed {
            world.step();
        }
        let counted = world.replicas[0].epoch == world.replicas[1].epoch;
        world.dies(2);
        if !counted {
            world.writes();
            assert_eq!(world.status().robustness, Robustness::Degraded, "seed {seed}");
        }
        world.crash_engine();
        world.run_until("the next engine opens with the first alone", World::is_open);
        world.writes();
        world.returns(2);
        world.run_until("2 is a member", |w| w.mode(2) == Mode::Rw);
        world.settle();
    }
}

/// Its process and that of the one that it has learnt from are gone, and it was noted nowhere that it has learnt.
fn both_die_when_the_second_comes_in_sync(seed: u64) -> World {
    let mut world = given_a_learner(seed);
    world.run_until("2 has recorded an epoch", |w| w.replicas[1].epoch.is_some());
    for _ in 0..seed {
        world.step();
    }
    world.dies(1);
    world.dies(2);
    world.run_for(100);
    world
}

/// It is lost together with the one that it has learnt from, and both come back before it was noted anywhere that it has learnt.
#[test]
fn one_that_is_back_as_a_member_counts() {
    for seed in 0..40 {
        let mut world = both_die_when_the_second_comes_in_sync(seed);
        world.returns(1);
        world.returns(2);
        world.run_until("both are members", |w| w.members() == ["r1", "r2"] && w.mode(2) == Mode::Rw);
        world.writes();
        world.add_replica("r3");
        assert_eq!(world.asks(add("r3")), Ok(()), "seed {seed}");
        world.run_until("3 is a member", |w| w.mode(3) == Mode::Rw);
        world.dies(1);
        world.writes();
        assert_eq!(world.status().robustness, Robustness::Degraded, "seed {seed}: 2 does not count");
        world.returns(1);
        world.settle();
    }
}

/// The same, and the other one comes back later: one that has learnt is not enough, and the other one is still wanted.
#[test]
fn one_that_is_back_waits_for_the_one_that_it_has_learnt_from() {
    for seed in 0..40 {
        let mut world = both_die_when_the_second_comes_in_sync(seed);
        world.returns(2);
        world.run_for(10_000);
        assert_ne!(world.members(), ["r2"], "seed {seed}");
        world.returns(1);
        world.run_until("both are members", |w| w.members() == ["r1", "r2"] && w.mode(2) == Mode::Rw);
        world.writes();
        world.settle();
    }
}

/// The first one's host loses its power, and the second one has what was not flushed: that nobody has noted that it is a member does not
/// make it less of one.
#[test]
fn what_the_first_has_lost_is_taken_from_a_learner_that_was_a_member() {
    for late in [false, true] {
        let mut world = given_a_learner(7);
        world.run_until("2 is a member", |w| w.mode(2) == Mode::Rw);
        world.writes();
        world.dies(2);
        world.replicas[0].forget_unflushed();
        world.crash_engine();
        if late {
            world.run_for(1_000);
        }
        world.returns(2);
        world.run_until("the volume opens", World::is_open);
        world.reads();
        assert_eq!(world.members(), ["r1", "r2"]);
        world.settle();
    }
}

/// The first one's directory was lost, and the second one holds everything, which nobody has noted.
#[test]
fn a_volume_is_not_begun_anew_beside_a_learner_that_was_a_member() {
    let mut world = given_a_learner(7);
    world.run_until("2 is a member", |w| w.mode(2) == Mode::Rw);
    world.writes();
    world.replicas[0] = Replica::new("r1", SIZE, CHUNK);
    world.dies(2);
    world.crash_engine();
    world.run_for(30_000);
    assert!(!world.is_open(), "it is begun with nothing");
    let waits = |w: &World, what: &str| w.status().waiting_for.is_some_and(|why| why.contains(what));
    assert!(waits(&world, "r2 may have one"));
    world.returns(2);
    world.run_until("it waits for people", |w| waits(w, "salvage demo --replica r2"));
    world.run_for(30_000);
    assert!(!world.is_open(), "it is begun with nothing");
}

/// It holds nothing: no first start waits for it.
#[test]
fn one_that_is_added_before_the_first_start_is_not_waited_for() {
    let mut world = World::new(7, Plan { replicas: 1, ..plan(Quorum::Majority) });
    let first = world.command(add("r2"));
    world.add_replica("r2");
    world.dies(2);
    assert!(!world.is_open());
    assert_eq!(world.finish(first), Ok(()));
    world.run_until("the volume opens", World::is_open);
    world.writes();
    world.returns(2);
    world.settle();
}

/// Nobody has noted that 2 is in sync, and 3 is there besides: of three two are needed, whatever the record says.
#[test]
fn a_learner_that_is_not_one_of_two_counts() {
    let mut world = World::new(7, Plan { replicas: 3, ..plan(Quorum::Majority) });
    world.run_until("the volume opens", World::is_open);
    world.run_until("all are members", |w| w.status().robustness == Robustness::Healthy);
    world.writes();
    world.learners.extend(["r2".to_owned(), "r3".to_owned()]);
    world.dies(2);
    world.dies(3);
    world.crash_engine();
    world.run_for(30_000);
    assert!(!world.is_open(), "one of three is no majority");
    world.returns(3);
    world.run_until("two are", World::is_open);
    world.returns(2);
    world.settle();
}

/// The epoch without 2 is on its way when 3 is told to leave, and 1 is lost before it has.
#[test]
fn who_was_told_to_leave_and_is_needed_leaves_when_it_is_needed_no_more() {
    let mut world = opened(Quorum::Any);
    world.authority.away_until = world.now + 20 * SECOND;
    world.dies(2);
    world.run_until("2 is lost", |w| w.mode(2) == Mode::Err);
    let leaves = world.command(remove("r3"));
    world.dies(1);
    let alone = |w: &mut World| w.status().epoch.is_some_and(|e| e.members == ["r3"]);
    world.run_until("3 is all that is left", alone);
    world.writes();
    assert!(!world.answers.contains_key(&leaves));
    world.returns(1);
    assert_eq!(world.finish(leaves), Ok(()));
    assert_eq!(world.status().replicas.len(), 2);
    world.reads();
}

/// It was restored from a backup, or lost its disk: who was put out since then would be a member again.
#[test]
fn an_authority_that_goes_back_ends_an_engine_that_serves() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let old =
        Epoch { generation: Generation { attachment: 1, restart: 0 }, ..world.status().epoch.expect("one") };
    world.authority.epoch = Some(old);
    world.dies(3);
    world.run_until("the engine has ended", |w| w.happened.contains_key("fenced"));
}

/// A snapshot that was settled before a replica left is not looked at when it comes back, unless somebody asks for that.
#[test]
fn a_rebuild_that_is_asked_for_looks_at_everything_whatever_is_on_its_way() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let snapshot = world.snapshot("s");
    assert_eq!(world.finish(snapshot), Ok(()));
    world.dies(2);
    world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
    world.writes();
    world.returns(2);
    let begun = |w: &mut World| w.engines[0].log.iter().any(|l| l.contains("bytes to look at"));
    world.run_until("2 is being rebuilt", begun);
    let rot = usize::try_from(World::hot(8)).expect("a block");
    world.replicas[1].layers[0].blocks[rot] = Some(77);
    assert_eq!(world.asks(Command::Rebuild { name: "r2".into() }), Ok(()));
    world.run_until("2 is a member", |w| w.mode(2) == Mode::Rw);
    world.settle();
}

/// The flush that is to precede its end fails at once, on somebody else.
#[test]
fn a_replica_is_in_sync_only_after_a_flush_of_what_it_was_given() {
    for steps in 0..120 {
        let mut world = opened(Quorum::Any);
        world.dies(2);
        (0..3).for_each(|hot| world.writes_to(2 * hot));
        world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
        world.returns(2);
        world.run_until("2 is being filled", |w| w.replicas[1].rebuilding);
        (0..steps).for_each(|_| world.step());
        world.dies(3);
        world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
        assert!(!world.replicas[1].ended_unflushed, "after {steps} steps");
    }
}

/// 1 alone has everything, and hangs while the next engine starts: to that it is one of three that are no members, of which it has not
/// heard yet what they hold. Who asks deletes its data when it has left.
#[test]
fn nobody_is_let_go_before_it_is_known_who_has_everything() {
    let mut world = opened(Quorum::Any);
    world.dies(2);
    world.dies(3);
    world.writes();
    assert_eq!(world.members(), ["r1"]);
    world.dies(1);
    world.crash_engine();
    world.returns(2);
    world.returns(3);
    let here = |w: &mut World| w.status().replicas.iter().filter(|r| r.connected).count() == 2;
    world.run_until("2 and 3 are here", here);
    for name in ["r1", "r2"] {
        assert_eq!(world.asks(remove(name)), Err(CommandError::NotOpen(name.into())));
        assert_eq!(
            world.asks(Command::Rebuild { name: name.into() }),
            Err(CommandError::NotOpen(name.into()))
        );
    }
    world.returns(1);
    world.run_until("the volume opens", World::is_open);
    world.reads();
    world.run_until("2 and 3 are filled", |w| w.status().robustness == Robustness::Healthy);
    assert_eq!(world.asks(remove("r2")), Ok(()));
}

/// 1 was left out when 2 and 3 went on. Then they were lost, and what has their places is empty.
#[test]
fn empty_replicas_are_no_majority_with_one_that_was_left_out() {
    let mut world = opened(Quorum::Majority);
    world.dies(1);
    world.writes();
    for n in [2, 3] {
        world.dies(n);
        world.replicas[n - 1] = Replica::new(&format!("r{n}"), SIZE, CHUNK);
    }
    world.crash_engine();
    (1..=3).for_each(|n| world.returns(n));
    let waits = |w: &mut World| {
        w.status().waiting_for.is_some_and(|why| why.contains("any record of the volume: r2, r3"))
    };
    world.run_until("it waits for a majority", waits);
    world.run_for(60_000);
    assert!(!world.is_open());
}

/// The engine has begun to start from an epoch when the replicas are lost, and all that comes back in their places is empty.
#[test]
fn an_engine_that_knows_of_data_does_not_begin_an_empty_volume() {
    for seed in 0..20 {
        let mut world = opened_by(seed, Quorum::Majority);
        world.writes();
        let before = (1..=3).map(|n| world.replicas[n - 1].epoch.clone()).next().flatten();
        world.crash_engine();
        world
            .run_until("the start begins", |w| w.engine().log.iter().any(|l| l.starts_with("starting with")));
        for _ in 0..seed {
            world.step();
        }
        assert!(!world.is_open());
        for n in 1..=3 {
            world.dies(n);
            world.replicas[n - 1] = Replica::new(&format!("r{n}"), SIZE, CHUNK);
        }
        (1..=3).for_each(|n| world.returns(n));
        let before = before.map(|e| format!("{}.{}", e.generation, e.counter)).unwrap_or_default();
        let waits = |w: &mut World| {
            w.status().waiting_for.is_some_and(|why| why.contains("emptied") && why.contains(&before))
        };
        world.run_until("it waits for people", waits);
        world.run_for(60_000);
        assert!(!world.is_open(), "seed {seed}: it begins with nothing");
    }
}

/// That the volume begins was only announced when the replicas are lost that know of it: nothing was answered, and empty ones begin it.
#[test]
fn an_engine_that_knows_of_an_announcement_alone_begins_with_empty_replicas() {
    let mut world = World::new(7, plan(Quorum::Majority));
    let announced = |r: &Replica| r.epoch.as_ref().is_some_and(|e| e.counter == 0);
    world.run_until("it is announced", |w| w.replicas.iter().all(announced));
    world.crash_engine();
    world.run_until("the start begins", |w| w.engine().log.iter().any(|l| l.starts_with("starting with")));
    assert!(world.replicas.iter().all(announced));
    for n in 1..=3 {
        world.dies(n);
        world.replicas[n - 1] = Replica::new(&format!("r{n}"), SIZE, CHUNK);
    }
    (1..=3).for_each(|n| world.returns(n));
    world.run_until("the volume opens", World::is_open);
    world.settle();
}

/// 3 is out when the authority's epoch of before is put back, and is the only one that the next start hears. 1 and 2 know better, and
/// come too late: what they hold is nowhere else.
#[test]
fn who_knows_that_the_authority_was_put_back_is_not_overwritten() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let before = world.authority.epoch.clone();
    world.dies(3);
    world.writes();
    let counts =
        |w: &World| (0..2).all(|r| w.replicas[r].epoch.as_ref().is_some_and(|e| e.after == Some(e.order())));
    world.run_until("1 and 2 have recorded that 3 is out", |w| {
        counts(w) && w.status().epoch.is_some_and(|e| !e.has("r3"))
    });
    world.crash_engine();
    [1, 2].into_iter().for_each(|r| world.dies(r));
    world.authority.epoch = before;
    world.returns(3);
    world.run_until("3 is started from", |w| w.engine().log.iter().any(|l| l == "starting with r3"));
    [1, 2].into_iter().for_each(|r| world.returns(r));
    let says = |w: &World, r: usize| {
        let error = w.status().replicas[r].last_error.clone().unwrap_or_default();
        error.contains("kept as it is")
    };
    world.run_until("1 and 2 are left as they are", |w| says(w, 0) && says(w, 1));
    world.run_for(20_000);
    assert!((0..2).all(|r| !world.replicas[r].rebuilding && world.mode(r + 1) == Mode::Err));
}

/// What the authority told before the replicas were fenced is older than what they have recorded since. That is no copy that was put
/// back: asked again, it has what the engine before has stored.
#[test]
fn an_authority_that_was_asked_too_early_is_asked_again() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let early = world.authority.epoch.clone();
    world.dies(3);
    world.writes();
    let counts = |w: &World, r: usize| {
        w.replicas[r].epoch.as_ref().is_some_and(|e| e.after == Some(e.order()) && !e.has("r3"))
    };
    world.run_until("1 and 2 have recorded that 3 is out", |w| counts(w, 0) && counts(w, 1));
    let stored = std::mem::replace(&mut world.authority.epoch, early);
    world.crash_engine();
    let connects = std::mem::take(&mut world.engine().connects);
    world.run_until("the authority has answered", |w| !w.engine().load && w.engine().outside.is_empty());
    world.authority.epoch = stored;
    world.dies(1);
    world.returns(3);
    world.engine().connects = connects;
    world.run_until("2 is enough", World::is_open);
    world.returns(1);
    world.settle();
}
