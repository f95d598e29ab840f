//! All members are lost while the engine runs, and not everything that comes back in a member's place is that member.

use datapath::conductor::{Mode, Quorum, Robustness};
use lh_block::{BLOCK, Epoch, Extent, Instance, Op};

use crate::replica::Replica;
use crate::stories::{opened, plan};
use crate::world::{Plan, World};

const SECOND: u64 = 1_000_000_000;

impl World {
    /// All that are left die. The first one's directory is another one when its process starts again.
    pub(crate) fn all_die_and_1_returns_as(&mut self, other: Replica) {
        (1..=3).for_each(|r| self.dies(r));
        self.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
        self.replicas[0] = other;
        self.replicas[0].kill();
        self.returns(1);
        self.run_for(20_000);
        assert_eq!(self.status().robustness, Robustness::Faulted, "requests wait for a member");
    }

    /// Another member returns, and the volume goes on from it.
    pub(crate) fn goes_on_when_3_returns(&mut self) {
        self.returns(3);
        self.run_until("3 goes on", |w| w.status().robustness != Robustness::Faulted);
        self.reads();
        self.returns(2);
        self.settle();
    }
}

/// All die after a write, and the first one's host loses its power, under an engine that lives on, or before one that starts.
fn all_died_and_1_lost_power(starts: bool) -> World {
    all_of_these_died_and_1_lost_power(opened(Quorum::Any), starts)
}

fn all_of_these_died_and_1_lost_power(mut world: World, starts: bool) -> World {
    world.writes();
    (1..=3).for_each(|r| world.dies(r));
    world.replicas[0].lose_power();
    if starts {
        world.crash_engine();
    } else {
        world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    }
    world
}

/// Nobody's process lived on, and the nearest replica's host has lost its power besides: the others give what it lacks, to an engine
/// that lived on and to one that starts.
#[test]
fn what_was_not_flushed_is_taken_from_whose_host_kept_its_power() {
    for starts in [false, true] {
        let mut world = all_died_and_1_lost_power(starts);
        (1..=3).for_each(|r| world.returns(r));
        world.run_until("it goes on", |w| w.is_open() && w.status().robustness == Robustness::Healthy);
        world.reads();
        world.settle();
    }
}

/// All have lost their power before, and nothing is resolved when the first one loses it again, and all processes die: what was written
/// in between is taken from the others, by the engine that lives on and by the next one.
#[test]
fn of_those_who_all_lost_something_who_has_its_power_for_longest_is_the_source() {
    for starts in [false, true] {
        let mut world = opened(Quorum::Any);
        world.writes();
        world.replicas.iter_mut().for_each(Replica::forget_unflushed);
        world.oracle.power_lost();
        world.crash_engine();
        world.replicas.iter_mut().for_each(|r| r.resolves = false);
        world.run_until("the volume opens", World::is_open);
        let mut world = all_of_these_died_and_1_lost_power(world, starts);
        (1..=3).for_each(|r| world.returns(r));
        world.replicas.iter_mut().for_each(|r| r.resolves = true);
        world.run_until("it goes on", |w| w.is_open() && w.status().robustness == Robustness::Healthy);
        world.reads();
        world.settle();
    }
}

/// Only who lost its power is back in time. Until an epoch with it alone counts an engine may yet begin with those who have everything,
/// and who had read from it would see what was lost come back.
#[test]
fn who_has_lost_something_is_read_from_once_nobody_can_go_on_from_those_who_have_it() {
    // Others have less time than the lease of reads, which would stand in for what is looked at here.
    let mut world = World::new(7, Plan { grace_ns: SECOND / 4, ..plan(Quorum::Any) });
    world.run_until("the volume opens", World::is_open);
    let mut world = all_of_these_died_and_1_lost_power(world, false);
    world.authority.away_until = u64::MAX;
    let before = world.oracle.answered_reads;
    assert!(world.request(0, 0, Op::Read, Extent::new(World::hot(0) * BLOCK, BLOCK)));
    world.returns(1);
    world.run_until("1 goes on", |w| w.status().robustness != Robustness::Faulted);
    world.run_for(5_000);
    assert_eq!(world.oracle.answered_reads, before, "the authority has an epoch with all three");
    world.authority.away_until = 0;
    world.oracle.power_lost();
    world.run_until("the read is answered", |w| w.oracle.answered_reads > before);
    assert_eq!(world.authority.history.last().map(|e| e.members.clone()), Some(vec!["r1".to_owned()]));
    (2..=3).for_each(|r| world.returns(r));
    world.settle();
}

/// The time that others are waited for is over when it is connected, and has not said yet that it holds everything.
#[test]
fn whoever_is_being_looked_at_is_waited_for() {
    for starts in [false, true] {
        let mut world = all_died_and_1_lost_power(starts);
        world.returns(1);
        world.run_for(1_000);
        world.returns(3);
        world.run_until("3 is connected", |w| w.status().replicas[2].connected);
        world.replicas[2].stalled_until = world.now + 5 * SECOND;
        world.run_until("it goes on", |w| w.is_open() && w.status().robustness != Robustness::Faulted);
        world.reads();
        world.settle();
    }
}

/// Alone the first is too few: until another one is filled from it nothing is answered, and the one that holds everything may come.
#[test]
fn who_comes_while_a_start_is_on_its_way_with_too_few_is_asked() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    world.writes();
    (1..=2).for_each(|r| world.dies(r));
    world.replicas[0].lose_power();
    world.crash_engine();
    world.returns(1);
    world.returns(3);
    world.run_until("it starts with 1", |w| w.engine().log.iter().any(|l| l == "starting with r1"));
    let until = world.now + SECOND;
    world.engine().queues.iter_mut().for_each(|q| q.deaf_until = until);
    world.returns(2);
    world.run_until("it goes on", World::is_open);
    world.reads();
    world.settle();
}

#[test]
fn an_older_copy_of_a_directory_is_not_the_member_that_was_lost() {
    let mut world = opened(Quorum::Any);
    let older = world.replicas[0].clone();
    world.dies(2);
    world.writes();
    assert_eq!(world.status().epoch.map(|e| e.members), Some(vec!["r1".into(), "r3".into()]));
    world.all_die_and_1_returns_as(older);
    world.goes_on_when_3_returns();
}

#[test]
fn a_copy_from_before_a_snapshot_is_not_the_member_that_was_lost() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let older = world.replicas[0].clone();
    let snapshot = world.snapshot("a");
    assert_eq!(world.finish(snapshot), Ok(()));
    world.all_die_and_1_returns_as(older);
    world.goes_on_when_3_returns();
}

#[test]
fn a_copy_from_before_a_snapshot_is_no_member_at_a_start() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let older = world.replicas[2].clone();
    let snapshot = world.snapshot("a");
    assert_eq!(world.finish(snapshot), Ok(()));
    (1..=3).for_each(|r| world.dies(r));
    world.replicas[2] = older;
    world.replicas[2].kill();
    world.crash_engine();
    (1..=3).for_each(|r| world.returns(r));
    world.run_until("it starts", World::is_open);
    assert_eq!(world.status().epoch.map(|e| e.members), Some(vec!["r1".into(), "r2".into()]));
    world.reads();
    world.settle();
}

#[test]
fn a_directory_that_was_being_filled_is_not_the_member_that_was_lost() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let mut filled = world.replicas[0].clone();
    filled.rebuilding = true;
    world.all_die_and_1_returns_as(filled);
    world.goes_on_when_3_returns();
}

#[test]
fn a_directory_that_another_program_wrote_is_not_the_member_that_was_lost() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let mut written = world.replicas[0].clone();
    written.imported = true;
    world.all_die_and_1_returns_as(written);
    world.returns(3);
    world.run_until("3 goes on", |w| w.status().robustness != Robustness::Faulted);
    world.reads();
}

/// What every queue has not sent again yet may be on one of them and not on another, and only what they remember of their sessions tells
/// the next engine of it.
#[test]
fn members_that_return_remember_what_was_in_flight_until_all_queues_send_again() {
    let mut world = opened(Quorum::Any);
    let block = usize::try_from(World::hot(6)).expect("small");
    world.replicas[1].stalled_until = u64::MAX;
    let range = Extent::new(World::hot(6) * BLOCK, BLOCK);
    assert!(world.request(0, 1, Op::Write { fua: false }, range));
    world.run_until("1 has it", |w| w.replicas[0].read(block, 0) != 0);
    world.replicas.iter_mut().for_each(Replica::end_session);
    world.replicas[1].stalled_until = 0;
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    world.run_until("all are connected", |w| w.status().replicas.iter().all(|r| r.connected));
    let until = world.now + 5 * SECOND;
    world.engine().queues[1].deaf_until = until;
    world.run_until("they go on", |w| w.status().robustness == Robustness::Healthy);
    world.run_for(1_000);
    assert_eq!(world.replicas[1].read(block, 0), 0, "the queue has not sent it again");
    world.crash_engine();
    world.run_until("the next one serves", World::is_open);
    world.settle();
}

/// It was filled, and everything in it is to be settled once more; then all are lost before anybody has asked it.
#[test]
fn what_a_new_member_calls_unsettled_is_settled_also_if_all_are_lost_before_it_was_asked() {
    for steps in 0..40 {
        let mut world = opened(Quorum::Any);
        world.writes();
        let snapshot = world.snapshot("a");
        assert_eq!(world.finish(snapshot), Ok(()));
        world.dies(3);
        world.writes();
        world.returns(3);
        world.run_until("3 is a member", |w| w.mode(3) == Mode::Rw);
        (0..steps).for_each(|_| world.step());
        world.replicas.iter_mut().for_each(Replica::end_session);
        world.settle();
    }
}

/// How long others are waited for is counted from when all that went before is over.
#[test]
fn who_is_lost_while_a_start_is_on_its_way_may_come_back_when_the_queues_are_done_with_it() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.crash_engine();
    world.run_until("it starts", |w| w.engine().log.iter().any(|l| l.starts_with("starting with")));
    let until = world.now + 8 * SECOND;
    world.engine().queues[1].deaf_until = until;
    world.replicas[1].end_session();
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.status().epoch.map(|e| e.members.len()), Some(3));
    assert_eq!(world.status().counters.rebuilds, 0);
    world.settle();
}

/// An epoch without 1 had reached only 2 when the engine died. The start goes on with 1 until 2 comes, which is enough: requests would
/// wait for 1, too, which is no member.
#[test]
fn whoever_a_start_began_with_is_let_go_when_it_begins_again_without_it() {
    let mut world = World::new(7, Plan { replicas: 5, ..plan(Quorum::Majority) });
    world.run_until("the volume opens", World::is_open);
    [4, 5].into_iter().for_each(|r| world.dies(r));
    world.writes();
    let last = world.status().epoch.expect("an epoch");
    let members = ["r2", "r3", "r4"].map(str::to_owned).to_vec();
    world.replicas[1].epoch = Some(Epoch { counter: last.counter + 1, members, id: Instance(7), ..last });
    (1..=3).for_each(|r| world.dies(r));
    world.crash_engine();
    // Nothing can be copied to it.
    world.replicas[4].full = true;
    [1, 3, 5].into_iter().for_each(|r| world.returns(r));
    world.run_until("it starts", |w| w.engine().log.iter().any(|l| l == "starting with r1, r3"));
    world.run_for(100);
    world.returns(2);
    world.run_until("it starts again", |w| w.engine().log.iter().any(|l| l == "starting with r2, r3"));
    world.run_for(100);
    assert!(world.engine().log.iter().any(|l| l == "replica r1 is lost: it is not chosen"));
    world.replicas[4].full = false;
    world.run_until("it goes on", World::is_open);
    world.reads();
    world.returns(4);
    world.settle();
}

/// An engine starts from 1 alone, and what that one has of a write it may be told to give up by 2, when 3 has it from there. So 3 is compared
/// wholly, and remembers that; not where 1 and 2 have been made equal.
#[test]
fn who_is_filled_by_too_few_to_go_on_takes_nothing_of_the_head_for_known() {
    for alone in [false, true] {
        let mut world = opened(Quorum::Majority);
        world.writes();
        world.dies(3);
        world.writes_to(2);
        world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
        if alone {
            world.dies(2);
        }
        world.crash_engine();
        world.returns(3);
        world.run_until("3 is being filled", |w| w.replicas[2].rebuilding);
        let kept = world.replicas[2].kept.clone().expect("it keeps what it has");
        assert_eq!(kept.unsure.contains(&String::new()), alone, "{kept:?}");
        world.returns(2);
        world.settle();
    }
}
