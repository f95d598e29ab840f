//! `release --dir`: directories of which no record says whose they are, as on the nodes of a cluster, become Longhorn's.

mod host;
mod nbd;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use host::{Host, is_healthy};
use lh_block::{Epoch, Generation, Instance};
use nbd::Client;
use replica::store::{CreateOptions, Directory, survey};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// What the judge says of a directory that has to be closed and fit for Longhorn: the hashes of its head and snapshots.
fn judged(directory: &Path) -> Option<String> {
    let judge = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("tests/judge/judge.py");
    let done =
        Command::new("python3").arg(judge).args(["--clean", "--print-sha"]).arg(directory).output().ok()?;
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{}: {said}", directory.display());
    Some(said)
}

fn sha256(place: &Path, bytes: &[u8]) -> String {
    fs::write(place, bytes).unwrap();
    let done = Command::new("sha256sum").arg(place).output().unwrap();
    String::from_utf8(done.stdout).unwrap().split_whitespace().next().unwrap().to_owned()
}

fn meta(directory: &Path) -> Value {
    serde_json::from_slice(&fs::read(directory.join("volume.meta")).unwrap()).unwrap()
}

#[test]
fn replicas_without_a_record_are_longhorns_and_can_be_taken_back() {
    let Some(host) = Host::new("nodes") else { return };
    let volume = host.volume.as_str();
    host.up("nbd-server", &["--replicas", "2"]);
    let status = host.wait("healthy", is_healthy);
    let paths: Vec<PathBuf> =
        status["replicas"].as_array().unwrap().iter().map(|r| r["path"].as_str().unwrap().into()).collect();
    let mut client = Client::of(volume);
    client.write(0, &[1; MIB]);
    client.flush();
    host.ok(&["snapshot", "create", volume, "one"]);
    client.write(MIB as u64 / 2, &[2; MIB]);
    // Zeroes over the snapshot, which are marks here.
    client.zero(0, MIB / 4);
    client.flush();
    let head = client.read(0, 16 * MIB);
    assert_eq!((head[0], head[MIB / 4], head[MIB]), (0, 1, 2));
    let mut one = vec![0; 16 * MIB];
    one[..MIB].fill(1);
    drop(client);

    let words = ["-o", "json", "release", "--dir", paths[0].to_str().unwrap(), paths[1].to_str().unwrap()];
    host.refused(&words, &format!("`longhornctl --root {} release {volume}`", host.dir.path().display()));
    // A node of a cluster has the key alone.
    let record = host.path(&format!("volumes/{volume}/volume.json"));
    let kept = fs::read(&record).unwrap();
    fs::remove_file(&record).unwrap();
    host.refused(&words, "is in use by process");
    fs::write(&record, kept).unwrap();
    host.ok(&["down", volume]);
    fs::remove_file(&record).unwrap();
    host.refused(&["release", volume], "there is no volume");
    assert!(
        paths.iter().all(|path| meta(path)["Rebuilding"] == true),
        "no zero marks: the test shows nothing"
    );

    let done: Value = serde_json::from_str(&host.ok(&words)).unwrap();
    let directories = done["directories"].as_array().unwrap();
    assert_eq!(directories.len(), 2, "{done:#}");
    for (directory, path) in directories.iter().zip(&paths) {
        assert_eq!((directory["path"].as_str(), &directory["released"]), (path.to_str(), &Value::from(true)));
        let members = directory["epoch"]["members"].as_array().unwrap();
        assert!(members.len() == 2 && members[0].as_str().unwrap().starts_with(volume), "{done:#}");
        assert_eq!(directory["epoch"], directories[0]["epoch"], "{done:#}");
        assert_eq!(meta(path)["Rebuilding"], false);
    }
    let place = host.path("bytes");
    let (head, one) = (sha256(&place, &head), sha256(&place, &one));
    for path in &paths {
        match judged(path) {
            Some(said) => assert_eq!(said, format!("head {head}\none {one}\n"), "{}", path.display()),
            None => eprintln!("SKIP replicas_without_a_record: no python3 for the judge"),
        }
    }
    // Given again, also twice over, it says what they are.
    let again: Value = serde_json::from_str(&host.ok(&[&words[..], &words[4..]].concat())).unwrap();
    let directories = again["directories"].as_array().unwrap();
    assert!(directories.len() == 2 && directories.iter().all(|d| d["released"] == false), "{again:#}");
    let shown = host.ok(&["release", "--dir", words[4]]);
    assert!(shown.contains(words[4]) && shown.contains("Longhorn's already"), "{shown}");

    // And the volume's name is free.
    let back = format!("{volume}-b");
    host.ok(&["import", &back, words[4], words[5]]);
    host.ok(&["release", &back]);
}

/// A directory of a volume's replica as it is when its process has ended well.
fn closed(path: &Path, counter: Option<u64>, members: &[&str]) {
    let options = CreateOptions { size: 1 << 20, backing: None, lock_wait: Duration::from_secs(5) };
    let (mut directory, mut store) = Directory::create(path, &options).unwrap();
    directory.begin_use().unwrap();
    if let Some(counter) = counter {
        let members = members.iter().map(|member| (*member).to_owned()).collect();
        let generation = Generation::from(1 << 32);
        // Unlike any other, and alike in the replicas of one epoch.
        let id = Instance(u128::from(counter));
        assert!(
            directory
                .store_epoch(Epoch { generation, counter, members, id, after: None, round: None })
                .unwrap()
        );
    }
    directory.close_clean(store.close()).unwrap();
}

fn opened(path: &Path) -> Directory {
    let options = replica::store::OpenOptions { lock_wait: Duration::from_secs(5) };
    Directory::open(path, &options).unwrap().0
}

#[test]
fn what_may_lack_something_is_refused_by_its_name_and_nothing_is_changed() {
    let Some(host) = Host::new("refused") else { return };
    let path = |name: &str| host.dir.path().canonicalize().unwrap().join(name);
    let (sound, all) = (path("sound"), ["v-r-0a1b2c3d", "v-r-4e5f6a7b"]);
    closed(&sound, Some(2), &all[..1]);
    let refused = |name: &str, says: &str| {
        let given = path(name);
        let done = host.run(&["release", "--dir", sound.to_str().unwrap(), given.to_str().unwrap()]);
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{name}: {said}");
        assert!(
            said.starts_with(&format!("error: {}", given.display())) && said.contains(says),
            "{name}: {said}"
        );
        assert!(done.stdout.is_empty(), "{name}");
        assert!(!survey(&sound).unwrap().imported, "{name}: the other one was released");
    };

    closed(&path("left-out"), Some(1), &all);
    refused("left-out", &format!("{} the younger one", sound.display()));
    closed(&path("unclean"), Some(2), &all[..1]);
    opened(&path("unclean")).begin_use().unwrap();
    refused(
        "unclean",
        "not closed cleanly, and may differ from the volume's other replicas: attach its volume and detach it again",
    );
    closed(&path("half"), Some(2), &all[..1]);
    {
        let mut directory = opened(&path("half"));
        let chain = directory.state().chain;
        drop(directory.begin_rebuild(1 << 20, &chain).unwrap());
    }
    refused("half", "half rebuilt");
    closed(&path("new"), None, &[]);
    refused("new", "never in sync");
    closed(&path("announced"), Some(0), &all);
    refused("announced", "attach its volume");
    {
        closed(&path("used"), Some(2), &all[..1]);
        let _used = opened(&path("used"));
        refused("used", &format!("is in use by process {}", std::process::id()));
    }
    fs::create_dir(path("nothing")).unwrap();
    refused("nothing", "volume.meta");

    // What another volume has counted is nothing to this one.
    closed(&path("other"), Some(1), &["w-r-0a1b2c3d"]);
    let shown = host.ok(&["release", "--dir", sound.to_str().unwrap(), path("other").to_str().unwrap()]);
    assert!(shown.contains(all[0]) && shown.contains(&format!("{}/2", 1_u64 << 32)), "{shown}");
    assert!(survey(&sound).unwrap().imported && survey(&path("other")).unwrap().imported);
}

#[test]
fn a_volume_or_directories_are_named_and_not_both() {
    let Some(host) = Host::new("words") else { return };
    for words in [&["release"][..], &["release", "demo", "--dir", "/nowhere"], &["release", "--dir"]] {
        let refused = host.run(words);
        assert_eq!(refused.status.code(), Some(2), "{words:?}: {}", String::from_utf8_lossy(&refused.stderr));
    }
    host.refused(&["release", "--dir", "/nowhere"], "/nowhere");
}
