//! Volumes with the quorum `majority` on a host, with real processes: two of three that are lost for good do not keep the third from
//! being salvaged, and one that has a single replica grows (`docs/decisions/0023-the-second-of-a-majority-learns-first.md`).

mod host;

use std::fs;
use std::path::{Path, PathBuf};

use host::{Host, is_healthy, kill_9, pid, until};
use serde_json::Value;

/// A volume of so many replicas, which is not shown.
fn up(host: &Host, replicas: &str) {
    let what = ["--size", "16MiB", "--replicas", replicas, "--quorum", "majority", "--frontend", "none"];
    host.ok(&[&["up", host.volume.as_str()], what.as_slice()].concat());
    host.wait("healthy", is_healthy);
}

/// Each replica and where it is, as the volume's record has them.
fn replicas(host: &Host) -> Vec<(String, PathBuf)> {
    let of = |replica: &Value| {
        (replica["name"].as_str().unwrap().to_owned(), replica["directory"].as_str().unwrap().into())
    };
    record(host)["replicas"].as_array().unwrap().iter().map(of).collect()
}

fn record(host: &Host) -> Value {
    serde_json::from_slice(&fs::read(record_path(host)).unwrap()).unwrap()
}

fn record_path(host: &Host) -> PathBuf {
    host.path(&format!("volumes/{}/volume.json", host.volume))
}

fn has_snapshot(directory: &Path, name: &str) -> bool {
    directory.join(format!("volume-snap-{name}.img")).exists()
}

/// Something that no replica opens is in the place of one.
fn spoil(directory: &Path) {
    fs::remove_dir_all(directory).unwrap();
    fs::create_dir(directory).unwrap();
    fs::write(directory.join("photo"), "x").unwrap();
}

#[test]
fn one_of_three_is_salvaged_where_the_others_are_lost_for_good_and_gets_others() {
    let Some(host) = Host::new("lost") else { return };
    let volume = host.volume.as_str();
    up(&host, "3");
    host.ok(&["snapshot", "create", volume, "before"]);
    host.ok(&["down", volume]);
    let were = replicas(&host);
    // One is gone, and an empty one has the place of another, as where its disk is not mounted.
    fs::remove_dir_all(&were[1].1).unwrap();
    fs::remove_dir_all(&were[2].1).unwrap();
    fs::create_dir(&were[2].1).unwrap();

    host.refused(&["salvage", volume], "--force");
    let salvaged = ["-o", "json", "salvage", volume, "--replica", &were[0].0, "--force"];
    let salvaged: Value = serde_json::from_str(&host.ok(&salvaged)).unwrap();
    assert_eq!(salvaged["lost"], serde_json::json!([were[1].0, were[2].0]), "{salvaged:#}");
    assert_eq!(salvaged["status"]["state"], "attached", "{salvaged:#}");
    assert_eq!(replicas(&host), were[..1]);
    assert!(were[2].1.is_dir(), "what there is stays");

    host.ok(&["replica", "add", volume]);
    host.ok(&["replica", "add", volume]);
    let now = replicas(&host);
    assert_eq!(now.len(), 3);
    assert!(now.iter().all(|(_, directory)| has_snapshot(directory, "before")), "{now:?}");
    host.wait("healthy", is_healthy);
    // Of three two are enough, whichever.
    host.ok(&["down", volume]);
    fs::remove_dir_all(&now[0].1).unwrap();
    host.ok(&["up", volume]);
    host.wait("healthy", is_healthy);
    assert!(has_snapshot(&now[0].1, "before"));
}

/// The record says that the second one learns, as where `replica add` was broken off, and what it has is no replica.
#[test]
fn who_has_learnt_nothing_keeps_no_volume_from_starting() {
    let Some(host) = Host::new("learner") else { return };
    let volume = host.volume.as_str();
    up(&host, "1");
    host.ok(&["snapshot", "create", volume, "before"]);
    let second = host.ok(&["replica", "add", volume]).trim().to_owned();
    host.ok(&["down", volume]);
    let were = replicas(&host);
    assert!(record(&host)["replicas"][1].get("learner").is_none(), "it is in sync");

    spoil(&were[1].1);
    let mut noted = record(&host);
    noted["replicas"][1]["learner"] = true.into();
    fs::write(record_path(&host), noted.to_string()).unwrap();
    host.ok(&["up", volume]);
    let status = host.wait("the second is out", |s| s["robustness"] == "degraded");
    assert_eq!(status["state"], "attached");
    host.refused(&["replica", "add", volume], &format!("once {second} is in sync"));
    // An engine that is started again by its manager reads the record, too.
    let engine = pid(&status["engine_pid"]);
    kill_9(engine);
    until("it is started again", || {
        let status = host.status();
        status["engine_pid"].as_i64().is_some_and(|now| now != i64::from(engine))
            && status["robustness"] == "degraded"
    });

    // In its place another one.
    host.ok(&["replica", "rm", volume, &second]);
    host.ok(&["replica", "add", volume]);
    host.wait("healthy", is_healthy);
    assert!(replicas(&host).iter().all(|(_, directory)| has_snapshot(directory, "before")));

    // Of two that count both are needed.
    host.ok(&["down", volume]);
    let now = replicas(&host);
    spoil(&now[1].1);
    let mut starting = host.command(&["up", volume]).spawn().unwrap();
    host.wait("it waits for the second", |s| {
        s["remark"].as_str().is_some_and(|remark| remark.contains("2 of 2 are needed"))
    });
    starting.kill().unwrap();
    starting.wait().unwrap();
    // Neither goes meanwhile, and the record does not say that it does.
    let before = record(&host);
    for (name, _) in &now {
        host.refused(&["replica", "rm", volume, name], "the volume is starting");
    }
    assert_eq!(record(&host), before);
}

/// As where `replica rm` was killed when the engine had let a replica go: the record has it still.
#[test]
fn a_removal_that_was_broken_off_is_ended_before_anything_else() {
    let Some(host) = Host::new("broken") else { return };
    let volume = host.volume.as_str();
    up(&host, "3");
    let were = replicas(&host);
    let (first, goes) = (&were[0].0, &were[2].0);
    let before = record(&host);
    host.ok(&["replica", "rm", volume, goes]);
    fs::write(record_path(&host), before.to_string()).unwrap();

    let ends = format!("replica rm {volume} {goes}` ends that first");
    host.refused(&["replica", "add", volume], &ends);
    host.refused(&["replica", "rm", volume, first], &ends);
    host.ok(&["replica", "rm", volume, goes]);
    assert_eq!(replicas(&host).len(), 2);
    host.ok(&["replica", "add", volume]);
    host.wait("healthy", is_healthy);
}

/// The record is late: the second one holds everything, and it is what people want to go on with.
#[test]
fn who_is_salvaged_counts_whatever_the_record_says() {
    let Some(host) = Host::new("late") else { return };
    let volume = host.volume.as_str();
    up(&host, "1");
    let second = host.ok(&["replica", "add", volume]).trim().to_owned();
    host.ok(&["down", volume]);
    let mut noted = record(&host);
    noted["replicas"][1]["learner"] = true.into();
    fs::write(record_path(&host), noted.to_string()).unwrap();
    let log = host.path(&format!("log/{volume}-e-0.log"));
    let before = fs::read_to_string(&log).unwrap().len();
    host.ok(&["salvage", volume, "--replica", &second, "--force"]);
    let said = fs::read_to_string(&log).unwrap().split_off(before);
    assert!(said.contains(&format!("starting with {second}")), "{said}");
    host.wait("healthy", is_healthy);
    assert!(record(&host)["replicas"][1].get("learner").is_none());
}
