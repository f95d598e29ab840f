//! What a host remembers of its volumes, damaged or broken off, with real processes: the volume is shown all the same, and what is said
//! of it leads on.

mod host;

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use host::{Host, is_healthy};
use serde_json::Value;

/// A volume of so many replicas, which is not shown. Gives back the names of its processes, the engine's first.
fn up(host: &Host, replicas: &str, quorum: &str) -> Vec<String> {
    let what = ["--size", "16MiB", "--replicas", replicas, "--quorum", quorum, "--frontend", "none"];
    host.ok(&[&["up", host.volume.as_str()], what.as_slice()].concat());
    let status = host.wait("healthy", is_healthy);
    let replicas = status["replicas"].as_array().unwrap().iter();
    let names = replicas.map(|r| r["name"].as_str().unwrap().to_owned());
    [format!("{}-e-0", host.volume)].into_iter().chain(names).collect()
}

fn remembered(host: &Host, process: &str) -> PathBuf {
    host.path(&format!("run/processes/{process}.json"))
}

/// True if the sentence names the file, and the command that helps.
fn names_both(sentence: &Value, file: &Path, command: &str) -> bool {
    let text = sentence.as_str().unwrap();
    text.contains(file.to_str().unwrap()) && text.contains("longhornctl --root") && text.contains(command)
}

#[test]
fn a_volume_whose_processes_are_remembered_by_damaged_files_is_shown_and_stopped() {
    let Some(host) = Host::new("damaged") else { return };
    let names = up(&host, "2", "any");
    let down = format!("down {}", host.volume);
    let files: Vec<PathBuf> = names[..2].iter().map(|name| remembered(&host, name)).collect();
    let damage = || files.iter().for_each(|file| fs::write(file, "{").unwrap());
    damage();
    let status = host.status();
    assert_eq!((&status["state"], &status["robustness"]), (&"attached".into(), &"healthy".into()));
    assert!(names_both(&status["remark"], &files[0], &down), "{status:#}");
    assert!(names_both(&status["replicas"][0]["remark"], &files[1], &down), "{status:#}");
    assert_eq!(status["replicas"][1]["remark"], "");
    host.ok(&["ls"]);
    host.ok(&["down", &host.volume]);
    assert!(files.iter().all(|file| !file.exists()));

    // Of processes that are gone with their manager, as after a power cut.
    up(&host, "2", "any");
    host.kill_everything();
    damage();
    assert!(names_both(&host.status()["remark"], &files[0], &down));
    host.ok(&["up", &host.volume]);
    assert_eq!(host.wait("healthy", is_healthy)["remark"], "");
    host.ok(&["down", "--all"]);

    // Of processes that the manager does not know.
    damage();
    assert_eq!(host.status()["state"], "detached");
    host.ok(&["down", &host.volume]);
    assert!(files.iter().all(|file| !file.exists()));
    assert_eq!(host.status()["remark"], "");
}

/// The only replica that is left, which `up` does not start: its bytes are taken out of it, with a word for what is not sure of them.
#[test]
fn what_a_damaged_replica_still_has_is_taken_out_of_it() {
    let Some(host) = Host::new("rescue") else { return };
    up(&host, "1", "any");
    host.ok(&["down", &host.volume]);
    let directory = host.status()["replicas"][0]["path"].as_str().unwrap().to_owned();
    let meta = Path::new(&directory).join("volume.meta");
    let text = fs::read_to_string(&meta).unwrap();
    fs::write(&meta, text.replacen("\"Error\":\"\"", "\"Error\":\"lost\"", 1)).unwrap();
    host.refused(&["up", &host.volume], "lost");
    host.ok(&["down", &host.volume]);

    let image = host.path("out.img");
    let image = image.to_str().unwrap();
    host.refused(&["salvage", &host.volume], "replica export --rescue");
    host.refused(&["replica", "export", &directory, image], "--rescue");
    assert!(!Path::new(image).exists());
    host.ok(&["replica", "export", "--rescue", &directory, image]);
    assert_eq!(fs::metadata(image).unwrap().len(), 16 << 20);
    let told = host.ok(&["-o", "json", "replica", "export", "--rescue", &directory, image]);
    let told: Value = serde_json::from_str(&told).unwrap();
    let doubt = &told["doubts"][0];
    assert_eq!((&doubt["offset"], &doubt["length"]), (&0.into(), &(16 << 20).into()), "{told}");
    assert!(doubt["why"].as_str().unwrap().contains("lost"), "{told}");
}

#[test]
fn with_the_quorum_unsafe_a_damaged_authority_is_made_anew() {
    let Some(host) = Host::new("authority") else { return };
    let volume = host.volume.as_str();
    up(&host, "2", "unsafe");
    let before = host.status()["generation"].as_u64().unwrap();
    host.ok(&["down", volume]);
    host.refused(&["salvage", volume], &format!("up {volume}"));
    fs::write(host.path(&format!("volumes/{volume}/authority.json")), "{").unwrap();
    let salvage = format!("salvage {volume}");
    // What had been started before that was found is stopped.
    for command in ["status", "up", "down"] {
        host.refused(&[command, volume], &salvage);
    }
    let salvaged: Value = serde_json::from_str(&host.ok(&["-o", "json", "salvage", volume])).unwrap();
    assert_eq!(salvaged["status"]["state"], "attached", "{salvaged:#}");
    let after = host.wait("healthy", is_healthy)["generation"].as_u64().unwrap();
    assert!(after > before, "{after:#x} is not above {before:#x}");
    host.ok(&["down", volume]);
    host.ok(&["up", volume]);
    host.ok(&["down", volume]);
}

/// Passes on what goes between commands and a process of the host, and ends a connection in place of what is asked, or answered, once
/// `is_lost` says so: once. True from then on.
fn lose(socket: &Path, asked: bool, is_lost: impl Fn() -> bool + Send + Sync + 'static) -> Arc<AtomicBool> {
    let real = socket.with_extension("real");
    fs::rename(socket, &real).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    let lost = Arc::new(AtomicBool::new(false));
    let was_lost = lost.clone();
    let ends = Arc::new(move || is_lost() && !lost.swap(true, Ordering::SeqCst));
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(process) = UnixStream::connect(&real) else { return };
            let (from, to) = (client.try_clone().unwrap(), process.try_clone().unwrap());
            let (ends_asking, ends_answering) = (ends.clone(), ends.clone());
            std::thread::spawn(move || pass(from, to, || asked && ends_asking()));
            std::thread::spawn(move || pass(process, client, || !asked && ends_answering()));
        }
    });
    was_lost
}

fn pass(mut from: UnixStream, mut to: UnixStream, ends: impl Fn() -> bool) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if ends() || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // Whoever is gone is shut already.
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// What the volume's record says, at any time.
fn record_of(host: &Host) -> impl Fn() -> Value + Clone + Send + Sync + 'static {
    let path = host.path(&format!("volumes/{}/volume.json", host.volume));
    move || serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

fn count(record: &Value) -> usize {
    record["replicas"].as_array().unwrap().len()
}

#[test]
fn a_replica_whose_process_was_never_started_is_not_left_in_the_record() {
    let Some(host) = Host::new("never") else { return };
    let volume = host.volume.as_str();
    up(&host, "1", "any");
    let record = record_of(&host);
    let (before, seen) = (record(), record.clone());
    let lost = lose(&host.path("run/instance-manager.sock"), true, move || count(&seen()) == 2);
    host.refused(&["replica", "add", volume], "does not take another replica");
    assert!(lost.load(Ordering::SeqCst), "the manager was there all the time");
    assert_eq!(record(), before);
    host.ok(&["replica", "add", volume]);
    assert_eq!(count(&host.wait("healthy", is_healthy)), 2);
    host.ok(&["down", volume]);
}

/// It was looked at before, and was empty.
#[test]
fn what_somebody_puts_where_a_replica_is_about_to_be_made_stays() {
    let Some(host) = Host::new("put") else { return };
    let volume = host.volume.as_str();
    up(&host, "1", "any");
    let record = record_of(&host);
    let (before, disk) = (record(), tempfile::tempdir().unwrap());
    let photo = disk.path().join("photo");
    // As its manager is asked for, which comes in between.
    let put = photo.clone();
    lose(&host.path("run/instance-manager.sock"), true, move || {
        fs::write(&put, "precious").unwrap();
        false
    });
    host.refused(&["replica", "add", volume, "--dir", disk.path().to_str().unwrap()], "is not empty");
    assert_eq!(fs::read_to_string(photo).unwrap(), "precious");
    assert_eq!(record(), before);
    host.ok(&["down", volume]);
}

/// It is asked for again then, and may be there already.
#[test]
fn an_engine_whose_answer_is_lost_has_its_new_replica() {
    let Some(host) = Host::new("unheard") else { return };
    let volume = host.volume.as_str();
    let engine = up(&host, "1", "any").remove(0);
    let record = record_of(&host);
    let lost = lose(&host.path(&format!("run/{engine}.grpc.sock")), false, move || count(&record()) == 2);
    host.ok(&["replica", "add", volume]);
    assert!(lost.load(Ordering::SeqCst), "its answer was heard");
    assert_eq!(count(&host.wait("healthy", is_healthy)), 2);
    host.ok(&["down", volume]);
}

#[test]
fn a_volume_goes_back_to_the_program_before_though_the_manager_was_lost() {
    let Some(host) = Host::new("back") else { return };
    let volume = host.volume.as_str();
    let engine = up(&host, "1", "any").remove(0);
    let program = host.path("next");
    fs::write(&program, "#!/bin/sh\n[ \"$1\" = --version ] && echo longhorn 9.9.9\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let process = remembered(&host, &engine);
    let lost = lose(&host.path("run/instance-manager.sock"), true, move || {
        fs::read_to_string(&process).is_ok_and(|record| record.contains("longhorn-9.9.9"))
    });
    let upgrade = ["upgrade", volume, "--binary", program.to_str().unwrap()];
    host.refused(&upgrade, "the volume runs with the program that it had before");
    assert!(lost.load(Ordering::SeqCst), "the manager was there all the time");
    host.wait("healthy", is_healthy);
    host.ok(&["down", volume]);
}

/// Killed between the record and the process, or the engine, or when the engine had let the replica go.
#[test]
fn a_replica_that_only_the_record_knows_is_named_and_deleted() {
    let Some(host) = Host::new("recorded") else { return };
    let volume = host.volume.as_str();
    up(&host, "1", "any");
    let path = host.path(&format!("volumes/{volume}/volume.json"));
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let name = format!("{volume}-r-0a1b2c3d");
    let directory = host.path(&format!("replicas/{volume}-0a1b2c3d"));
    let replica = serde_json::json!({"name": name, "directory": directory, "imported": false});
    record["replicas"].as_array_mut().unwrap().push(replica);
    fs::write(&path, record.to_string()).unwrap();
    let said = host.status()["replicas"][1]["remark"].as_str().unwrap().to_owned();
    assert!(
        said.contains("longhornctl --root") && said.contains(&format!("replica rm {volume} {name}")),
        "{said}"
    );
    host.ok(&["replica", "rm", volume, &name]);
    assert_eq!(host.status()["replicas"].as_array().unwrap().len(), 1);
    host.ok(&["down", volume]);
}
