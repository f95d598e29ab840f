//! What `import` refuses of directories that Longhorn has written, and what it takes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::{Flock, FlockArg};

/// A replica that Longhorn has written, on a raw backing file beside it.
fn unpack(place: &Path, name: &str) -> PathBuf {
    unpack_of("replica-backing-raw", place, name)
}

fn unpack_of(fixture: &str, place: &Path, name: &str) -> PathBuf {
    let fixture = format!("tests/fixtures/{fixture}/{fixture}.tar.xz");
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(fixture);
    let to = place.join(name);
    fs::create_dir(&to).unwrap();
    let done = Command::new("tar").arg("-xJf").arg(archive).arg("-C").arg(&to).status().unwrap();
    assert!(done.success(), "tar unpacks {name}");
    to
}

struct Said {
    ok: bool,
    text: String,
}

/// `import` of the directories, below one root; one that waits is ended, and fails the test.
fn import(place: &Path, volume: &str, directories: &[&Path]) -> Said {
    let log = place.join("said");
    let mut command = Command::new(env!("CARGO_BIN_EXE_longhornctl"));
    command.arg("--root").arg(place.join("root")).args(["import", volume]).args(directories);
    let mut child = command.stderr(File::create(&log).unwrap()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("import {volume} waits");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    Said { ok: status.success(), text: fs::read_to_string(log).unwrap() }
}

#[test]
fn replicas_on_different_backing_files_are_no_volume() {
    let place = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| unpack(place.path(), name));
    let [first, second] = [one.join("replica"), two.join("replica")];
    let [backing_of_one, backing_of_two] = [one.join("backing.raw"), two.join("backing.raw")];
    let refused = |volume: &str| {
        let said = import(place.path(), volume, &[&first, &second]);
        let names = [&backing_of_one, &backing_of_two].map(|file| said.text.contains(file.to_str().unwrap()));
        assert!(!said.ok && names == [true; 2] && said.text.contains("differ"), "{}", said.text);
        assert!(!place.path().join("root/volumes").join(volume).exists());
    };
    let good = fs::read(&backing_of_two).unwrap();
    let file = File::options().write(true).open(&backing_of_two).unwrap();
    file.write_all_at(&[!good[9 << 12]], 9 << 12).unwrap();
    refused("changed");
    file.write_all_at(&good, 0).unwrap();
    file.set_len(1 << 20).unwrap();
    refused("shorter");
    fs::write(&backing_of_two, good).unwrap();
    let said = import(place.path(), "equal", &[&first, &second]);
    assert!(said.ok, "{}", said.text);
}

#[test]
fn a_fifo_in_a_files_place_is_refused_by_its_name() {
    let place = tempfile::tempdir().unwrap();
    let one = unpack(place.path(), "one");
    let head_meta = fs::read_dir(one.join("replica")).unwrap().map(|entry| entry.unwrap().path());
    let mut metas = head_meta.filter(|file| file.extension().is_some_and(|e| e == "meta"));
    for file in [one.join("replica/volume.meta"), metas.next().unwrap(), one.join("backing.raw")] {
        let (kept, name) = (fs::read(&file).unwrap(), file.file_name().unwrap().to_str().unwrap());
        fs::remove_file(&file).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let said = import(place.path(), "fifo", &[&one.join("replica")]);
        let told = said.text.contains(name) && said.text.contains("is not a plain file");
        assert!(!said.ok && told, "{}", said.text);
        fs::remove_file(&file).unwrap();
        fs::write(&file, kept).unwrap();
    }
    let said = import(place.path(), "fifo", &[&one.join("replica")]);
    assert!(said.ok, "{}", said.text);
}

/// Longhorn has counted what each has seen, and itself starts from the one that has seen most.
#[test]
fn a_replica_that_longhorn_knows_to_be_older_is_not_the_first() {
    let place = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| {
        unpack_of("replica-revision", place.path(), name).join("replica").canonicalize().unwrap()
    });
    let count = |directory: &Path, number: &str| {
        let block = [number.as_bytes(), &[0; 4096][number.len()..]].concat();
        fs::write(directory.join("revision.counter"), block).unwrap();
    };
    let listing = |directory: &Path| {
        let mut names: Vec<_> = fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    // Of 43 writes the last one is missing in it. The other has one digit more by then.
    for (older, newer) in [("42", "43"), ("99", "100")] {
        count(&one, older);
        count(&two, newer);
        let before = listing(&one);
        let said = import(place.path(), "older", &[&one, &two]);
        let names = [&one, &two].map(|directory| said.text.contains(directory.to_str().unwrap()));
        assert!(!said.ok && names == [true; 2] && said.text.contains("revision.counter"), "{}", said.text);
        assert!(said.text.contains(older) && said.text.contains(newer), "{}", said.text);
        assert!(!place.path().join("root/volumes/older").exists());
        assert_eq!(listing(&one), before);
    }
    let said = import(place.path(), "newer", &[&two, &one]);
    assert!(said.ok && !said.text.contains("written last"), "{}", said.text);
}

/// Most volumes of Longhorn's have no counter.
#[test]
fn a_replica_that_was_written_later_than_the_first_is_told_of() {
    let place = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"]
        .map(|name| unpack_of("replica-simple", place.path(), name).join("replica").canonicalize().unwrap());
    let written = |directory: &Path, seconds: u64| {
        let meta: serde_json::Value =
            serde_json::from_slice(&fs::read(directory.join("volume.meta")).unwrap()).unwrap();
        let head = File::options().write(true).open(directory.join(meta["Head"].as_str().unwrap())).unwrap();
        head.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    };
    let (then, later) = (1_767_225_600, 1_767_225_600 + 7 * 86_400);
    written(&one, then);
    for (volume, at, is_told) in
        [("later", later, true), ("together", then + 5, false), ("earlier", then - 60, false)]
    {
        written(&two, at);
        let said = import(place.path(), volume, &[&one, &two]);
        assert!(said.ok, "{}", said.text);
        let line = said.text.lines().find(|line| line.contains("written last"));
        assert_eq!(line.is_some(), is_told, "{volume}: {}", said.text);
        for word in
            [one.to_str().unwrap(), two.to_str().unwrap(), "2026-01-01T00:00:00Z", "2026-01-08T00:00:00Z"]
        {
            assert!(line.is_none_or(|line| line.contains(word)), "{word}: {}", said.text);
        }
        let mut release = Command::new(env!("CARGO_BIN_EXE_longhornctl"));
        release.arg("--root").arg(place.path().join("root")).args(["release", volume]);
        assert!(release.output().unwrap().status.success());
    }
}

/// Each has a lock of its own volume alone, and finds the directory free: whoever removes his volume would delete the other's bytes.
#[test]
fn a_directory_that_several_commands_import_at_once_is_one_volumes() {
    // On a busy machine some find it held for too long.
    let met = (0..5).any(|_| {
        let place = tempfile::tempdir().unwrap();
        let directory = unpack(place.path(), "one").join("replica");
        // All of them have looked whose it is before any of them goes on.
        let held = Flock::lock(File::open(&directory).unwrap(), FlockArg::LockExclusive).unwrap();
        let begin = |volume: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_longhornctl"));
            command.arg("--root").arg(place.path().join("root")).args(["import", volume]).arg(&directory);
            command.stderr(Stdio::piped()).spawn().unwrap()
        };
        let begun = ["a", "b", "c", "d"].map(begin);
        std::thread::sleep(Duration::from_millis(200));
        drop(held);
        let said = begun.map(|child| child.wait_with_output().unwrap());
        let texts: Vec<_> = said.iter().map(|said| String::from_utf8_lossy(&said.stderr)).collect();
        let made = said.iter().filter(|said| said.status.success()).count();
        assert!(made <= 1, "{texts:?}");
        made == 1 && texts.iter().any(|text| text.contains("belongs to volume"))
    });
    assert!(met, "no two have looked at once");
}

/// What it lacks nobody knows; the others are whole without it.
#[test]
fn a_directory_that_is_half_rebuilt_is_left_out_unless_it_is_to_count() {
    let place = tempfile::tempdir().unwrap();
    let [first, second] =
        ["one", "two"].map(|name| unpack_of("replica-simple", place.path(), name).join("replica"));
    let meta = second.join("volume.meta");
    let text = fs::read_to_string(&meta).unwrap();
    let half = text.replace("\"Rebuilding\":false", "\"Rebuilding\":true");
    assert_ne!(half, text);
    fs::write(&meta, &half).unwrap();
    let said = import(place.path(), "wrong", &[&second, &first]);
    assert!(!said.ok && said.text.contains("being rebuilt"), "{}", said.text);
    let said = import(place.path(), "half", &[&first, &second]);
    let told = ["is left out", second.to_str().unwrap(), "replica add half", "made of 1 replica "];
    assert!(said.ok && told.iter().all(|words| said.text.contains(words)), "{}", said.text);
    assert_eq!(fs::read_to_string(&meta).unwrap(), half, "and is as it was");
}
