//! The managers of four nodes under a seeded course of faults and wishes, in simulated time: managers that end anywhere, nodes
//! without power, cut off from the API server or from one another, disks that fail and are lost, requests that fail and answers
//! that get lost, news that is late. The managers are the real ones, leases, watches and all; what they meet is simulated.
//!
//! No copy is removed that alone holds everything that was answered, no engine serves less than that, no clone other than what it
//! is made of, no snapshot is lost or taken twice, no device goes that is in use, and once nothing is wrong any more every volume comes
//! to what was asked for, its snapshots to what their resources say, and the managers to rest; what devices it has left are gone.
//!
//!     LH_SEED=7 cargo test -p lh-cluster --test seeds        one course, told step by step
//!     LH_SEEDS=1000 cargo test -p lh-cluster --test seeds    so many

mod agent;
#[path = "../api_server/mod.rs"]
mod api_server;
mod chain;
mod clock;
mod cluster;
mod dice;
mod engine;
mod judge;
mod script;
mod wishes;
mod world;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cluster::Cluster;
use script::Script;
use world::World;

/// Steps of a course.
const STEPS: u64 = 64;

/// Seeds of the usual run.
const SEEDS: u64 = 24;

/// Within so many courses it is missed what is taken out.
const SABOTAGED: u64 = 60;

/// What has to happen in the courses of the usual run: what does not tells nothing.
const HAPPENS: [&str; 37] = [
    "a clone was served",
    "a copy for a clone was made",
    "a copy was removed",
    "a device that was left behind was taken away",
    "a disk could not be used",
    "a disk was replaced by an empty one",
    "a manager ended",
    "a migration was confirmed",
    "a migration was confirmed too early",
    "a migration was given up",
    "a node lost its power",
    "a node was cut off from the API server",
    "a node was cut off from the others",
    "a node was lost for good",
    "a relay found its engine elsewhere",
    "a relay was started",
    "a replica was filled",
    "a snapshot was folded away",
    "a snapshot was taken",
    "a volume was deleted",
    "a write was answered",
    "a write was answered through a relay",
    "all processes of a node ended",
    "an engine began without a member",
    "an engine lost all its members",
    "an engine took a relay's place",
    "an engine waited for a majority",
    "an engine was shut out",
    "an instance manager did not answer",
    "requests failed",
    "somebody asked for a snapshot",
    "somebody deleted a replica",
    "somebody deleted a snapshot",
    "somebody removed a snapshot beside its resource",
    "somebody took a deleted replica back",
    "somebody took a snapshot beside the resources",
    "watches told nothing",
];

const NODES: [&str; 4] = ["n1", "n2", "n3", "n4"];

/// One course.
struct Course {
    counts: BTreeMap<&'static str, u64>,
    story: Vec<String>,
    chronicle: Vec<String>,
    wrongs: Vec<String>,
}

fn run_one(seed: u64, fenceless: bool) -> Course {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(course(seed, fenceless))
}

async fn course(seed: u64, fenceless: bool) -> Course {
    clock::begin();
    let sockets = tempfile::tempdir().expect("a directory");
    let world = World::new(&NODES, sockets.path().to_owned());
    let mut cluster = Cluster::new(&NODES, seed, world);
    cluster.world.state().fenceless = fenceless;
    let mut script = Script::new(seed, &NODES);
    pass(&mut cluster, Duration::from_secs(40)).await;
    for _ in 0..STEPS {
        let pause = match script.dice.below(4) {
            0 => Duration::from_millis(script.dice.below(2_000)),
            1 | 2 => Duration::from_secs(1 + script.dice.below(30)),
            _ => Duration::from_secs(30 + script.dice.below(120)),
        };
        pass(&mut cluster, pause).await;
        script.mend(&mut cluster);
        script.step(&mut cluster);
        if !cluster.world.state().wrongs.is_empty() {
            break;
        }
    }
    script.mend_all(&mut cluster);
    script.settle(&mut cluster);
    // Without the fence only what is lost counts.
    if !fenceless && cluster.world.state().wrongs.is_empty() {
        judge::comes_to_rest(&mut cluster).await;
    }
    judge::one_engine_at_a_time(&cluster);
    if !fenceless {
        judge::replicas_are_made_seldom(&cluster);
    }
    let state = cluster.world.state();
    Course {
        counts: state.counts.clone(),
        story: cluster.story.clone(),
        chronicle: cluster.server.chronicle(&["volumes", "engines", "replicas", "snapshots"]),
        wrongs: state.wrongs.clone(),
    }
}

/// Lets time pass, in which Kubernetes does its part.
async fn pass(cluster: &mut Cluster, time: Duration) {
    let mut left = time;
    while !left.is_zero() {
        let part = left.min(Duration::from_secs(2));
        tokio::time::sleep(part).await;
        left -= part;
        cluster.server.collect_garbage();
        cluster.restart_ended();
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs seeds on all processors; without the fence until one is wrong. Gives back what happened, and the first that was wrong.
fn run_many(
    seeds: std::ops::Range<u64>,
    fenceless: bool,
) -> (BTreeMap<&'static str, u64>, Option<(u64, Course)>) {
    let next = AtomicU64::new(seeds.start);
    let all = Mutex::new((BTreeMap::new(), None::<(u64, Course)>));
    let work = || {
        while let seed = next.fetch_add(1, Ordering::Relaxed)
            && seed < seeds.end
        {
            let course = run_one(seed, fenceless);
            let mut all = all.lock().expect("nobody panics with it");
            for (what, count) in &course.counts {
                *all.0.entry(*what).or_insert(0) += count;
            }
            if !course.wrongs.is_empty() {
                println!("seed {seed} is wrong: {:.300}", course.wrongs[0]);
                if fenceless {
                    next.store(seeds.end, Ordering::Relaxed);
                }
                if all.1.as_ref().is_none_or(|(other, _)| seed < *other) {
                    all.1 = Some((seed, course));
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    all.into_inner().expect("nobody panics with it")
}

fn told(seed: u64, course: &Course) -> String {
    let parts = [&course.story, &course.chronicle, &course.wrongs].map(|lines| lines.join("\n"));
    format!("seed {seed}\n{}\nOBJECTS:\n{}\nWRONG:\n{}", parts[0], parts[1], parts[2])
}

#[test]
fn no_course_loses_data_and_every_one_comes_to_rest() {
    if let Some(seed) = number("LH_SEED") {
        let course = run_one(seed, false);
        println!("{}\n{:#?}", told(seed, &course), course.counts);
        assert!(course.wrongs.is_empty());
        return;
    }
    let first = number("LH_FIRST_SEED").unwrap_or(1);
    let (counts, wrong) = run_many(first..first + number("LH_SEEDS").unwrap_or(SEEDS), false);
    println!("{counts:#?}");
    if let Some((seed, course)) = wrong {
        panic!("{}", told(seed, &course));
    }
    for what in HAPPENS {
        assert!(counts.contains_key(what), "in none of the courses {what}");
    }
}

#[test]
fn a_course_is_the_same_every_time() {
    let [one, other] = [7, 7].map(|seed| run_one(seed, false));
    assert_eq!(one.story, other.story);
    assert_eq!(one.chronicle, other.chronicle);
    assert_eq!(one.counts, other.counts);
}

#[test]
fn a_fence_that_is_taken_out_is_missed() {
    let (_, wrong) = run_many(1..SABOTAGED + 1, true);
    let (seed, course) = wrong.expect("nobody misses the fence");
    println!("seed {seed}: {:.200}", course.wrongs[0]);
}
