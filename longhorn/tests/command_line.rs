//! What people and scripts see of the programs: help, JSON, refusals, exit statuses.
//!
//! `golden/` holds what is promised. With `UPDATE_GOLDEN=1` the files are written anew, to be looked at in the diff.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use clap::CommandFactory;
use control::host::{Root, VolumeRecord, replica_name};
use lh_block::{Epoch, Generation, Instance};
use replica::store::{CreateOptions, Directory};

const CTL: &str = env!("CARGO_BIN_EXE_longhornctl");
const PROGRAM: &str = env!("CARGO_BIN_EXE_longhorn");

fn golden(name: &str, actual: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, actual).unwrap();
    }
    let promised = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(promised == actual, "{} differs; promised:\n{promised}\nis:\n{actual}", path.display());
}

/// Runs a program as a script would: no terminal anywhere.
fn run(program: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).env_remove("LONGHORN_ROOT").env_remove("COLUMNS");
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A root with one volume that was up once, and is down.
fn root_with_a_volume() -> (tempfile::TempDir, Root) {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    let mut record = VolumeRecord::new("demo", 1 << 30);
    for suffix in ["0a1b2c3d", "4e5f6a7b"] {
        record.replicas.push(control::host::ReplicaRecord {
            name: replica_name("demo", suffix),
            directory: root.replica("demo", suffix),
            imported: false,
            learner: false,
        });
    }
    record.create(&root).unwrap();
    let authority = record.authority(&root);
    let generation = authority.issue_generation(Generation::default()).unwrap();
    let members = vec![replica_name("demo", "4e5f6a7b")];
    authority
        .store_epoch(
            None,
            &Epoch { generation, counter: 1, members, id: Instance(1), after: None, round: None },
        )
        .unwrap();
    (dir, root)
}

fn ctl(root: &Root, args: &[&str]) -> Output {
    let root = root.path().to_str().unwrap();
    run(CTL, &[&["--root", root], args].concat())
}

/// Also where the root is in the environment, as on hosts that keep it elsewhere.
#[test]
fn who_names_no_command_is_shown_the_help() {
    for command in [&[][..], &["snapshot"], &["install"]] {
        let bare = run(CTL, command);
        assert_eq!(bare.status.code(), Some(2), "{command:?}");
        let shown = text(&bare.stderr);
        assert!(shown.contains("\nCommands:\n") && !shown.contains("device-name"), "{shown}");
        let elsewhere =
            Command::new(CTL).args(command).env("LONGHORN_ROOT", "/srv/longhorn").output().unwrap();
        assert_eq!(elsewhere.status.code(), Some(2), "{command:?}");
        assert_eq!(
            text(&elsewhere.stderr).lines().next(),
            shown.lines().next(),
            "{command:?}: {}",
            text(&elsewhere.stderr)
        );
    }
}

/// Every command that help lists, word by word.
fn shown(command: &clap::Command, words: &mut Vec<String>, told: &mut Vec<Vec<String>>) {
    told.push(words.clone());
    for below in command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        words.push(below.get_name().to_owned());
        shown(below, words, told);
        words.pop();
    }
}

#[test]
fn help_is_as_promised() {
    let programs = [
        (CTL, "longhornctl", longhorn::ctl::Program::command()),
        (PROGRAM, "longhorn", longhorn::daemon::Program::command()),
    ];
    for (program, name, command) in programs {
        let mut told = Vec::new();
        shown(&command, &mut Vec::new(), &mut told);
        assert!(told.len() > 30, "{told:?}");
        for words in told {
            let line: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
            let help = run(program, &line);
            assert!(help.status.success() && help.stderr.is_empty(), "{line:?}");
            let parts: Vec<&str> = [name].into_iter().chain(words.iter().map(String::as_str)).collect();
            golden(&format!("help/{}.txt", parts.join("-")), &text(&help.stdout));
            let teaches = text(&help.stdout).contains("\nExample");
            assert!(name != "longhornctl" || teaches, "{words:?} has no example");
        }
    }
}

/// Columns of a line behind a command's options, as of an ordinary terminal: clap would break a longer one, and leave the rest of
/// it on a line of its own.
const HELP_COLUMNS: usize = 80;

fn too_long(command: &clap::Command, found: &mut Vec<String>) {
    let help = [command.get_after_help(), command.get_after_long_help()].into_iter().flatten();
    for line in help.flat_map(|text| text.to_string().lines().map(str::to_owned).collect::<Vec<_>>()) {
        if line.chars().count() > HELP_COLUMNS {
            found.push(format!("{}: {line}", command.get_name()));
        }
    }
    command.get_subcommands().for_each(|command| too_long(command, found));
}

#[test]
fn help_behind_options_is_not_broken_anew() {
    let mut found = Vec::new();
    for program in [longhorn::ctl::Program::command(), longhorn::daemon::Program::command()] {
        too_long(&program, &mut found);
    }
    assert!(found.is_empty(), "longer than {HELP_COLUMNS} columns: {found:#?}");
}

/// The directory of the volume's member: two snapshots below the head, without a byte.
fn with_snapshots(root: &Root) {
    let directory = root.replica("demo", "4e5f6a7b");
    fs::create_dir_all(&directory).unwrap();
    let layers = [
        ("volume-snap-one.img", "", r#""Removed":true,"UserCreated":true,"Labels":{"why":"the upgrade"}"#),
        ("volume-snap-two.img", "volume-snap-one.img", r#""Removed":false,"UserCreated":false"#),
        ("volume-head-000.img", "volume-snap-two.img", r#""Removed":false,"UserCreated":false"#),
    ];
    for (second, (name, parent, rest)) in layers.into_iter().enumerate() {
        fs::File::create(directory.join(name)).unwrap().set_len(1 << 30).unwrap();
        let created = format!("2026-01-01T00:00:0{second}Z");
        let meta = format!(r#"{{"Name":"{name}","Parent":"{parent}","Created":"{created}",{rest}}}"#);
        fs::write(directory.join(format!("{name}.meta")), meta).unwrap();
    }
    let volume = r#"{"Size":1073741824,"Head":"volume-head-000.img","Dirty":false,"Rebuilding":false,
        "Parent":"volume-snap-two.img","SectorSize":512}"#;
    fs::write(directory.join("volume.meta"), volume).unwrap();
}

#[test]
fn json_of_a_stopped_volume_is_as_promised() {
    let (_dir, root) = root_with_a_volume();
    with_snapshots(&root);
    for (file, args) in [
        ("status.json", &["-o", "json", "status", "demo"][..]),
        ("ls.json", &["ls", "-o", "json"]),
        ("replica-ls.json", &["replica", "ls", "demo", "--output", "json"]),
        ("snapshot-ls.json", &["snapshot", "ls", "demo", "-o", "json"]),
    ] {
        let done = ctl(&root, args);
        assert!(done.status.success(), "{args:?}: {}", text(&done.stderr));
        golden(file, &text(&done.stdout).replace(root.path().to_str().unwrap(), "ROOT"));
    }
}

#[test]
fn a_stopped_volume_is_read_where_a_member_is_and_one_that_is_away_does_not_mean_no_snapshots() {
    let (_dir, root) = root_with_a_volume();
    let list = || ctl(&root, &["snapshot", "ls", "demo"]);
    let away = list();
    assert_eq!(away.status.code(), Some(1), "{}", text(&away.stdout));
    assert!(text(&away.stderr).contains("demo-4e5f6a7b is not there"), "{}", text(&away.stderr));
    // Both are members by now, and the disk of the first is not mounted.
    let record = VolumeRecord::load(&root, "demo").unwrap();
    let authority = record.authority(&root);
    let before = authority.epoch().unwrap().unwrap();
    let members = record.replicas.iter().map(|replica| replica.name.clone()).collect();
    let epoch = Epoch { counter: 2, members, ..before.clone() };
    authority.store_epoch(Some(before.order()), &epoch).unwrap();
    with_snapshots(&root);
    assert!(text(&list().stdout).contains("two"), "{}", text(&list().stderr));
    // The first is back, and is an older directory.
    let options = CreateOptions { size: 1 << 30, backing: None, lock_wait: Duration::from_secs(5) };
    let (mut older, mut store) = Directory::create(&record.replicas[0].directory, &options).unwrap();
    older.store_epoch(before).unwrap();
    older.close_clean(store.close()).unwrap();
    drop(older);
    assert!(text(&list().stdout).contains("two"), "{}", text(&list().stderr));
    fs::remove_dir_all(&record.replicas[1].directory).unwrap();
    let refused = text(&list().stderr);
    assert!(refused.contains("demo-0a1b2c3d is older than what replica demo-r-0a1b2c3d held"), "{refused}");
}

/// Longhorn takes names that a snapshot is not given here.
#[test]
fn an_imported_snapshot_is_read_by_whatever_name_it_has() {
    let (dir, root) = root_with_a_volume();
    with_snapshots(&root);
    let directory = root.replica("demo", "4e5f6a7b");
    let name = format!("Tuesday's 2nd @ {}", "x".repeat(70));
    for file in fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()) {
        if !file.to_str().unwrap().ends_with(".img") {
            let text = fs::read_to_string(&file).unwrap();
            fs::write(&file, text.replace("volume-snap-two", &format!("volume-snap-{name}"))).unwrap();
        }
        let renamed = file.file_name().unwrap().to_str().unwrap().replace("-two.", &format!("-{name}."));
        fs::rename(&file, directory.join(renamed)).unwrap();
    }
    let out = dir.path().join("out.img");
    let (out, path) = (out.to_str().unwrap(), directory.to_str().unwrap());
    let cloned = format!("demo@{name}");
    for args in [
        &["snapshot", "diff", "demo", &name][..],
        &["snapshot", "export", "demo", &name, out],
        &["replica", "export", "--snapshot", &name, path, out],
        &["clone", &cloned, "other"],
        &["snapshot", "diff", "other", &name],
    ] {
        let done = ctl(&root, args);
        assert!(done.status.success(), "{args:?}: {}", text(&done.stderr));
    }
    let refused = ctl(&root, &["snapshot", "diff", "demo", "no such"]);
    assert!(text(&refused.stderr).contains("has no snapshot no such"), "{}", text(&refused.stderr));
}

#[test]
fn tables_name_everything_that_matters() {
    let (_dir, root) = root_with_a_volume();
    let list = text(&ctl(&root, &["ls"]).stdout);
    assert!(list.starts_with("NAME "), "{list}");
    for word in ["demo", "detached", "unknown", "1 GiB", "1/2"] {
        assert!(list.contains(word), "{word}: {list}");
    }
    let status = text(&ctl(&root, &["status", "demo"]).stdout);
    for word in ["demo: detached", "auto", "attachment 1, restart 0", "demo-r-0a1b2c3d", "ERR", "RW"] {
        assert!(status.contains(word), "{word}: {status}");
    }
}

#[test]
fn a_volume_that_cannot_be_looked_at_hides_no_other_and_says_what_helps() {
    let (_dir, root) = root_with_a_volume();
    let mut other = VolumeRecord::new("other", 1 << 30);
    other.add_replica(&root).unwrap();
    other.create(&root).unwrap();
    fs::write(root.volume("demo").join("authority.json"), "{").unwrap();
    let step = format!("`longhornctl --root {} salvage demo`", root.path().display());
    for args in [&["ls"][..], &["-o", "json", "ls"]] {
        let list = ctl(&root, args);
        let (shown, said) = (text(&list.stdout), text(&list.stderr));
        assert_eq!(list.status.code(), Some(1), "{said}");
        assert!(shown.contains("other") && !shown.contains("demo"), "{shown}");
        assert!(said.contains("error: volume demo: ") && said.contains(&step), "{said}");
        assert!(said.contains("1 of 2 volumes cannot be read"), "{said}");
    }
    let status = ctl(&root, &["status", "demo"]);
    assert!(text(&status.stderr).contains(&step), "{}", text(&status.stderr));
}

#[test]
fn nothing_there_is_no_failure_for_a_list() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(&dir.path().join("never-made")).unwrap();
    let list = ctl(&root, &["-o", "json", "ls"]);
    assert_eq!((list.status.code(), text(&list.stdout).trim()), (Some(0), "[]"));
    assert!(!root.path().exists(), "looking changes nothing");
}

#[test]
fn wrong_command_lines_end_with_2_and_say_what_is_right() {
    let (_dir, root) = root_with_a_volume();
    for (args, says) in [
        (&["up", "x", "--size=10G"][..], "10GiB"),
        (&["up", "x", "--size=5000"], "8192"),
        (&["up", "x", "--size=0"], "4096"),
        (&["up", "x", "--size=-1"], "size"),
        (&["up", "x", "--size", "-1"], "\"-1\" is not a size"),
        (&["resize", "demo", "-1"], "\"-1\" is not a size"),
        (&["up", "x", "--size=1GiB", "--listen", ":65533"], "write 127.0.0.1:65533"),
        (&["up", "x", "--size=1GiB", "--listen", "65533"], "write 127.0.0.1:65533"),
        (&["up", "--size=1GiB", "--", "../x"], "name"),
        (&["up", "--size=1GiB", "--", ""], "name"),
        (&["up"], "--all"),
        (&["up", "--all", "demo"], "--all"),
        (&["up", "--all", "--frontend", "none"], "--all"),
        (&["down"], "--all"),
        (&["down", "--all", "demo"], "--all"),
        (&["down", "demo", "--wait", "soon"], "--wait"),
        (&["up", "x", "--size=1GiB", "--replicas", "21"], "20"),
        (&["up", "x", "--size=1GiB", "--replicas", "0"], "replicas"),
        (&["up", "x", "--size=1GiB", "--frontend", "floppy"], "frontend"),
        (&["up", "x", "--size=1GiB", "--block-size", "1024"], "4096"),
        (&["status", "a/b"], "name"),
        (&["snapshot", "create", "demo", "../one"], "name"),
        (&["frobnicate"], "frobnicate"),
        (&["import", "x"], "DIR"),
        (&["install", "manifests", "--image", "a b"], "image"),
        (&[], "Usage"),
    ] {
        let refused = ctl(&root, args);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.to_lowercase().contains(&says.to_lowercase()), "{args:?} does not say {says}: {said}");
    }
    assert_eq!(VolumeRecord::list(&root).unwrap(), ["demo"]);
}

/// What else a replica's line has.
const REPLICA: &[&str] = &[
    "--replica-instance-name",
    "r",
    "--listen",
    "unix:/never.sock",
    "--data-listen",
    "unix:/never.data.sock",
    "--key-file",
    "/never",
    "/never",
];

/// Scripts that were written for Longhorn's engine are told at the line that does not work, whatever it says besides.
#[test]
fn words_of_longhorns_engine_are_refused_with_what_to_use_instead() {
    for (args, says) in [
        (&["backup", "create", "--dest", "s3://b@r/", "one"][..], "longhornctl snapshot export"),
        (&["--url", "localhost:9501", "backups", "ls", "--volume-only", "s3://b@r/"], "not built yet"),
        (&["system-backup", "list", "s3://b@r/"], "kubectl"),
        (&["start-with-replicas", "--size", "1g", "tcp://10.0.0.1:10000"], "longhorn controller --replica"),
        (&["start", "tcp://10.0.0.1:10000"], "longhornctl up"),
        (&["sync-agent", "--listen", "localhost:9504", "--replica", "localhost:9502"], "needs none"),
        (&["sync-agent-server-reset"], "nothing is left over"),
        (&["journal", "--limit", "5"], "--watch"),
        (&["profiler", "enable", "--port", "30001"], "perf top"),
        (&["export-volume", "--snapshot-name", "one", "--receiver-port", "7"], "snapshot clone"),
        (&["add", "--restore", "--size", "1g", "unix:/r.sock"], "backups are not built"),
        (&["update", "--mode", "RO", "unix:/r.sock"], "WO, RW and ERR"),
        (&["unmap-mark-snap-chain-removed"], "--enable and --disable"),
        (
            &[&["--volume-name", "one", "replica", "--volume-name", "other"], REPLICA].concat(),
            "--volume-name one before `replica` and --volume-name other behind it",
        ),
        (&[&["replica"], REPLICA].concat(), "needs --volume-name"),
    ] {
        let refused = run(PROGRAM, args);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.starts_with("error: ") && said.contains(says), "{args:?} does not say {says}: {said}");
        assert!(refused.stdout.is_empty(), "{args:?}");
    }
}

/// What an engine with certificates does to who shows none.
#[test]
fn an_address_that_breaks_connections_off_is_told_as_one_that_may_want_certificates() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    for url in [address.clone(), format!("http://{address}")] {
        let refused = run(PROGRAM, &["--url", &url, "info"]);
        let said = text(&refused.stderr);
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0), "{said}");
        assert!(said.contains("wants certificates") && said.contains("--url unix:PATH"), "{said}");
        assert!(!said.contains("not known"), "nothing was said that it could be not known of: {said}");
    }
    // Longhorn's own place is where it looks by itself, and nobody is there.
    let nowhere = text(&run(PROGRAM, &["info"]).stderr);
    assert!(nowhere.contains("localhost:9501") && nowhere.contains("--url unix:ROOT/run/"), "{nowhere}");
}

#[test]
fn an_engine_of_no_volume_says_how_to_make_one() {
    let dir = tempfile::tempdir().unwrap();
    let listen = format!("unix:{}", dir.path().join("e.sock").display());
    let root = dir.path().to_str().unwrap();
    // Where nobody has made a root there is no folder for its socket either, which is not what is lacking.
    for listen in [&["--listen", &listen][..], &[]] {
        let words = [&["controller", "--root", root][..], listen, &["no-such-volume-at-all"]].concat();
        let refused = run(PROGRAM, &words);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(3), "{said}");
        assert!(
            said.contains("`longhornctl up no-such-volume-at-all --size SIZE`") && said.contains(root),
            "{said}"
        );
    }
}

/// Nobody has given the option that it stands for.
#[test]
fn a_variable_that_is_set_and_empty_is_named() {
    for (program, args, variable) in [
        (CTL, &["ls"][..], "LONGHORN_ROOT"),
        (PROGRAM, &["instance-manager"], "LONGHORN_ROOT"),
        (PROGRAM, &["controller", "--listen", "unix:/never.sock", "demo"], "LONGHORN_QUEUES"),
    ] {
        let refused = Command::new(program).args(args).env(variable, "").output().unwrap();
        let said = text(&refused.stderr);
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0), "{said}");
        assert!(said.starts_with(&format!("error: {variable} is set and empty")), "{said}");
        assert!(said.contains(&format!("unset {variable}")) && !said.contains("--root <DIR>"), "{said}");
    }
    // Whoever gives the option himself is told of it.
    let given = Command::new(CTL).args(["--root", "", "ls"]).env("LONGHORN_ROOT", "/srv").output().unwrap();
    assert!(text(&given.stderr).contains("--root"), "{}", text(&given.stderr));
    // What another command has is nobody's affair here.
    let other =
        Command::new(PROGRAM).args(["version", "--client-only"]).env("NODE_NAME", "").output().unwrap();
    assert!(other.status.success(), "{}", text(&other.stderr));
}

#[test]
fn what_cannot_be_done_ends_with_1_and_one_sentence() {
    let (dir, root) = root_with_a_volume();
    with_snapshots(&root);
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let empty = empty.to_str().unwrap();
    for (args, says) in [
        (&["status", "nosuch"][..], "nosuch"),
        (&["down", "nosuch"], "nosuch"),
        (&["rm", "nosuch", "--yes"], "nosuch"),
        (&["rm", "demo"], "--yes"),
        (&["up", "nosize"], "--size"),
        (&["up", "demo", "--size", "2GiB"], "resize demo 2GiB`"),
        (&["up", "demo", "--size", "512MiB"], "never shrinks"),
        (&["up", "demo", "--replicas", "3"], "replica"),
        (&["up", "demo", "--block-size", "4096"], "512"),
        (&["up", "demo", "--quorum", "majority"], "quorum"),
        (&["up", "demo", "--frontend", "none", "--listen", "127.0.0.1"], "nbd-server"),
        (&["import", "demo", empty], "already"),
        (&["import", "x", "/nonexistent"], "/nonexistent"),
        (&["snapshot", "create", "demo"], "up"),
        (&["resize", "demo", "512MiB"], "never shrinks"),
        (&["snapshot", "export", "demo", "nosuch", "/tmp/never"], "no snapshot nosuch: `longhornctl"),
        (&["snapshot", "diff", "demo", "nosuch"], "no snapshot nosuch: `longhornctl"),
        (&["clone", "demo@nosuch", "other"], "no snapshot nosuch: `longhornctl"),
        (&["trim", "volume", "demo"], "not up"),
    ] {
        let refused = ctl(&root, args);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.to_lowercase().contains(&says.to_lowercase()), "{args:?} does not say {says}: {said}");
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{args:?}: {said}");
        assert!(refused.stdout.is_empty(), "{args:?}");
    }
    assert_eq!(VolumeRecord::list(&root).unwrap(), ["demo"]);
}

/// A little more than a GiB is no GiB where it matters.
#[test]
fn a_size_that_is_refused_is_told_beside_the_one_that_there_is() {
    let (_dir, root) = root_with_a_volume();
    let mut record = VolumeRecord::load(&root, "demo").unwrap();
    record.size = 1028 << 20;
    record.store(&root).unwrap();
    for args in [
        &["resize", "demo", "1GiB"][..],
        &["up", "demo", "--size", "1GiB"],
        &["up", "demo", "--size", "2GiB"],
    ] {
        let refused = ctl(&root, args);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("volume demo has 1028 MiB"), "{args:?}: {said}");
    }
}

/// A file system in memory; gone with its drop.
struct Small(PathBuf);

impl Small {
    fn mount(place: &Path, mebibytes: u32) -> Option<Self> {
        fs::create_dir_all(place).unwrap();
        let size = format!("size={mebibytes}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(place).status();
        mounted.is_ok_and(|status| status.success()).then(|| Self(place.to_owned()))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Its disk has room for the record and half of the data.
#[test]
fn a_clone_that_does_not_fit_says_how_much_it_takes_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let Some(small) = Small::mount(&dir.path().join("root"), 8) else {
        return eprintln!("SKIP a_clone_that_does_not_fit: nothing can be mounted here");
    };
    let (root, directory) = (Root::at(&small.0).unwrap(), dir.path().join("demo-4e5f6a7b"));
    root.create().unwrap();
    // As Longhorn leaves one.
    let head = "volume-head-000.img";
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join(head), vec![7; 16 << 20]).unwrap();
    let meta = r#"{"Name":"volume-head-000.img","Parent":"","Removed":false,"UserCreated":false,"Created":"2026-01-01T00:00:00Z"}"#;
    fs::write(directory.join(format!("{head}.meta")), meta).unwrap();
    let volume = r#"{"Size":16777216,"Head":"volume-head-000.img","Dirty":false,"Rebuilding":false,"Parent":"","SectorSize":512}"#;
    fs::write(directory.join("volume.meta"), volume).unwrap();
    let mut record = VolumeRecord::new("demo", 16 << 20);
    let name = replica_name("demo", "4e5f6a7b");
    record.replicas.push(control::host::ReplicaRecord {
        name: name.clone(),
        directory,
        imported: false,
        learner: false,
    });
    record.create(&root).unwrap();
    let authority = record.authority(&root);
    let generation = authority.issue_generation(Generation::default()).unwrap();
    let epoch =
        Epoch { generation, counter: 1, members: vec![name], id: Instance(1), after: None, round: None };
    authority.store_epoch(None, &epoch).unwrap();

    let refused = ctl(&root, &["clone", "demo", "copy"]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("copy does not fit") && said.contains("1 replica of up to 16 MiB each"), "{said}");
    assert!(said.contains("snapshot export demo") && !said.contains("os error"), "{said}");
    assert_eq!(VolumeRecord::list(&root).unwrap(), ["demo"]);
    assert_eq!(fs::read_dir(root.path().join("replicas")).unwrap().count(), 0, "nothing of it is left");
}

#[test]
fn a_stopped_volume_is_down_already_and_can_be_deleted() {
    let (_dir, root) = root_with_a_volume();
    let directory = root.replica("demo", "0a1b2c3d");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("volume.meta"), "x").unwrap();
    assert_eq!(ctl(&root, &["down", "demo"]).status.code(), Some(0));
    let removed = ctl(&root, &["rm", "demo", "--yes"]);
    assert_eq!(removed.status.code(), Some(0), "{}", text(&removed.stderr));
    assert!(!directory.exists() && !root.volume("demo").exists());
    assert_eq!(ctl(&root, &["status", "demo"]).status.code(), Some(1));
    let left: Vec<_> = fs::read_dir(root.processes()).unwrap().collect();
    assert!(left.is_empty(), "no instance manager was needed");
}

#[test]
fn a_directory_that_is_to_be_imported_twice_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (root, twice) = (Root::at(&dir.path().join("root")).unwrap(), dir.path().join("old-0a1b2c3d"));
    let options = replica::store::CreateOptions {
        size: 1 << 20,
        backing: None,
        lock_wait: std::time::Duration::from_secs(5),
    };
    let (directory, store) = replica::store::Directory::create(&twice, &options).unwrap();
    drop((directory, store));
    let twice = twice.to_str().unwrap();
    // However it is spelt.
    let refused = ctl(&root, &["import", "demo", twice, &format!("{twice}/.")]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("{twice} is named twice")), "{said}");
    assert!(VolumeRecord::list(&root).unwrap().is_empty());
}

#[test]
fn nobody_is_told_to_delete_what_is_to_be_imported() {
    let (_dir, root) = root_with_a_volume();
    let directory = root.replica("demo", "0a1b2c3d");
    fs::create_dir_all(&directory).unwrap();
    let refused = ctl(&root, &["import", "other", directory.to_str().unwrap()]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains(" release demo`") && !said.contains(" rm demo"), "{said}");
}

/// Another root than the usual one, with a space in its name: who takes the next step as it is told finds the volume.
#[test]
fn a_next_step_is_told_with_its_root() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(&dir.path().join("my disk")).unwrap();
    root.create().unwrap();
    let mut record = VolumeRecord::new("demo", 1 << 20);
    record.add_replica(&root).unwrap();
    record.create(&root).unwrap();
    let refused = ctl(&root, &["replica", "rm", "demo", "demo-r-0a1b2c3d"]);
    let said = text(&refused.stderr);
    let step = said.split('`').nth(1).unwrap_or_default();
    assert!(step.starts_with(&format!("longhornctl --root '{}' ", root.path().display())), "{said}");
    let done = Command::new("sh").args(["-c", &step.replacen("longhornctl", CTL, 1)]).output().unwrap();
    assert!(
        done.status.success() && text(&done.stdout).contains("demo-r-"),
        "{step}: {}",
        text(&done.stderr)
    );
    // What is found without it is told without it, as `LONGHORN_ROOT` does not say otherwise.
    let missing =
        Command::new(CTL).args(["status", "no-such-volume-at-all"]).env_remove("LONGHORN_ROOT").output();
    assert!(text(&missing.unwrap().stderr).contains("`longhornctl ls`"));
}

#[test]
fn what_was_done_is_one_document_of_json() {
    let (_dir, root) = root_with_a_volume();
    for (args, key, value) in
        [(&["down", "demo"][..], "name", "demo"), (&["rm", "demo", "--yes"], "volume", "demo")]
    {
        let done = ctl(&root, &[&["-o", "json"], args].concat());
        assert!(done.status.success(), "{args:?}: {}", text(&done.stderr));
        let told: serde_json::Value = serde_json::from_slice(&done.stdout).expect("one document");
        assert_eq!(told[key], value, "{args:?}: {told}");
    }
}

#[test]
fn what_has_no_json_says_so() {
    for args in [&["install", "manifests"][..], &["install", "systemd"], &["completion", "bash"]] {
        let refused = run(CTL, &[&["-o", "json"], args].concat());
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0), "{args:?}");
        assert!(text(&refused.stderr).contains("no JSON"), "{args:?}");
    }
}

/// The exit status of a command whose output nobody reads.
fn unread(root: &Root, args: &[&str]) -> Option<i32> {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(CTL);
    command.arg("--root").arg(root.path()).args(args).stdin(Stdio::null());
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    command.status().unwrap().code()
}

/// `2>&1 | head -1`, and the same with nobody who reads at all.
#[test]
fn nobody_has_to_read_what_is_said() {
    let (_dir, root) = root_with_a_volume();
    for (args, status) in
        [(&["down", "demo"][..], 0), (&["status", "nosuch"], 1), (&["rm", "demo", "--yes"], 0)]
    {
        assert_eq!(unread(&root, args), Some(status), "{args:?}");
    }
    assert!(VolumeRecord::list(&root).unwrap().is_empty(), "its removal went on to its end");
}

/// Help is a result as any other is.
#[test]
fn help_that_nobody_is_given_has_failed() {
    for (program, args) in [
        (CTL, &["--help"][..]),
        (CTL, &["--version"]),
        (CTL, &["up", "-h"]),
        (PROGRAM, &["replica", "--help"]),
    ] {
        let told = |stdout: Stdio| Command::new(program).args(args).stdout(stdout).output().unwrap();
        let full = told(fs::File::options().write(true).open("/dev/full").unwrap().into());
        assert_eq!(full.status.code(), Some(1), "{args:?}");
        assert!(text(&full.stderr).starts_with("error: standard output takes nothing"), "{args:?}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let unread = told(writer.into());
        assert_eq!((unread.status.code(), unread.stderr.len()), (Some(0), 0), "{args:?}");
    }
}

#[test]
fn what_fails_fails_also_where_nobody_reads_what_was_said_before() {
    let (_dir, root) = root_with_a_volume();
    fs::create_dir(root.volume("broken")).unwrap();
    fs::write(root.volume("broken").join("volume.json"), "{").unwrap();
    // Each prints what there is, and then fails for what there is not.
    for args in [&["ls"][..], &["ls", "-o", "json"], &["salvage", "demo"]] {
        let read = ctl(&root, args).status.code();
        assert_eq!((unread(&root, args), read), (Some(1), Some(1)), "{args:?}");
    }
}

#[test]
fn a_volume_whose_removal_began_can_only_be_removed() {
    let (_dir, root) = root_with_a_volume();
    let mut record = VolumeRecord::load(&root, "demo").unwrap();
    record.state = control::host::VolumeState::Removing;
    record.store(&root).unwrap();
    let refused = ctl(&root, &["up", "demo"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains(" rm demo`"));
    assert_eq!(ctl(&root, &["rm", "demo", "--yes"]).status.code(), Some(0));
}

#[test]
fn damaged_records_are_named_by_ls_beside_the_others() {
    let (_dir, root) = root_with_a_volume();
    fs::create_dir(root.volume("broken")).unwrap();
    fs::write(root.volume("broken").join("volume.json"), "{").unwrap();
    let list = ctl(&root, &["ls", "-o", "json"]);
    assert_eq!(list.status.code(), Some(1));
    assert!(text(&list.stdout).contains("\"demo\""));
    assert!(text(&list.stderr).contains("broken/volume.json"));
}

#[test]
fn completion_scripts_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = run(CTL, &["completion", shell]);
        assert!(script.status.success());
        assert!(text(&script.stdout).contains("snapshot"), "{shell}");
    }
}

/// The words of a line as readline tells bash of them: it takes words apart at some characters (`COMP_WORDBREAKS`).
fn words_of_readline(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let is_break = |c: char| "=:@".contains(c);
    for word in line.split(' ') {
        let mut last = None;
        for c in word.chars() {
            match words.last_mut().filter(|_| last == Some(is_break(c))) {
                Some(word) => word.push(c),
                None => words.push(c.to_string()),
            }
            last = Some(is_break(c));
        }
        if word.is_empty() {
            words.push(String::new());
        }
    }
    words
}

/// What bash offers for a line with the cursor at its end.
fn bash_completes(root: &Root, line: &str) -> Vec<String> {
    bash_completes_line(&format!("--root {} {line}", root.path().display()))
}

/// The same for all that follows the program's name.
fn bash_completes_line(line: &str) -> Vec<String> {
    let line = format!("{CTL} {line}");
    let words = words_of_readline(&line);
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let script = format!(
        "source <({CTL} completion bash)\nCOMP_WORDBREAKS=$' \\t\\n\"\\'@><=;|&(:'\n\
         COMP_LINE='{line}' COMP_POINT=${{#COMP_LINE}} COMP_WORDS=({}) COMP_CWORD={}\n\
         _longhornctl_with_names {CTL} \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"\n\
         printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        quoted.join(" "),
        words.len() - 1
    );
    let done = run("bash", &["-c", &script]);
    assert!(done.stderr.is_empty(), "{line:?}: {}", text(&done.stderr));
    text(&done.stdout).lines().filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

#[test]
fn completion_knows_names() {
    let (_dir, root) = root_with_a_volume();
    let mut other = VolumeRecord::load(&root, "demo").unwrap();
    (other.name, other.replicas[0].name) = ("other".into(), "other-r-0a1b2c3d".into());
    other.replicas.truncate(1);
    other.create(&root).unwrap();
    assert_eq!(bash_completes(&root, "status de"), ["demo"]);
    assert_eq!(bash_completes(&root, "replica rm demo demo-r-4"), ["demo-r-4e5f6a7b"]);
    assert_eq!(bash_completes(&root, "sta"), ["status"]);
    let after = bash_completes(&root, "status ");
    assert!(after.contains(&"demo".into()) && after.contains(&"other".into()), "{after:?}");
    assert!(!after.iter().any(|word| word.starts_with(['<', '[', '-'])), "{after:?}");
    assert_eq!(bash_completes(&root, "status demo --w"), ["--watch"]);
    // What bash knows itself, files, it offers only where nothing else is.
    assert_eq!(bash_completes(&root, "snapshot export demo one "), Vec::<String>::new());
    // A list of words would end the word behind a directory, and take a name apart at its spaces.
    std::fs::create_dir(root.path().join("my disk")).unwrap();
    for option in ["--dir ", "--dir="] {
        let line = format!("replica add demo {option}{}/my", root.path().display());
        assert_eq!(bash_completes(&root, &line), Vec::<String>::new());
    }
    // Where readline has taken a word apart, it puts what is offered behind the last part.
    let with_root = |line: &str| bash_completes_line(&format!("--root={} {line}", root.path().display()));
    assert_eq!(with_root("status de"), ["demo"]);
    assert_eq!(with_root("salvage demo --replica=demo-r-4"), ["demo-r-4e5f6a7b"]);
    assert_eq!(bash_completes(&root, "salvage demo --replica demo-r-4"), ["demo-r-4e5f6a7b"]);
    assert_eq!(bash_completes(&root, "up demo --frontend=nbd-"), ["nbd-server"]);
    let nowhere = Root::at(&root.path().join("nowhere")).unwrap();
    assert_eq!(bash_completes(&nowhere, "status x"), Vec::<String>::new());
    assert!(!nowhere.path().exists());
}

#[test]
fn doctor_judges_every_part() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    let done = ctl(&root, &["doctor", "-o", "json"]);
    let said = text(&done.stdout);
    for check in [
        "user",
        "io_uring",
        "fuse",
        "loop",
        "nbd",
        "ublk",
        "iscsi",
        "device",
        "memlock",
        "root",
        "disk",
        "discard",
        "swap",
        "programs",
        "multipath",
        "longhorn",
        "propagation",
    ] {
        assert!(said.contains(&format!("\"check\": \"{check}\"")), "{check}: {said}");
    }
    assert_eq!(done.status.code() == Some(1), said.contains("\"FAIL\""));
}
