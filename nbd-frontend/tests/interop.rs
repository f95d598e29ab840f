//! Other people's clients against the server. A client that is not installed is skipped, by name.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use lh_block::Extent;
use support::{Running, SIZE, Setup};

/// True if the program can be run; otherwise says that the test is skipped.
fn have(test: &str, program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    let have = found.is_ok_and(|out| out.status.success());
    if !have {
        println!("SKIP {test}: {program} is not installed");
    }
    have
}

/// True if this Python has libnbd.
fn have_nbdsh(test: &str) -> bool {
    let found = Command::new("/usr/bin/python3").args(["-c", "import nbd"]).output();
    let have = found.is_ok_and(|out| out.status.success());
    if !have {
        println!("SKIP {test}: /usr/bin/python3 has no module nbd (python3-libnbd)");
    }
    have
}

fn run(command: &mut Command) -> Output {
    let out = command.output().unwrap();
    assert!(
        out.status.success(),
        "{command:?}\n{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    out
}

fn text(command: &mut Command) -> String {
    String::from_utf8(run(command).stdout).unwrap()
}

/// A sparse image: patterns at some places, holes elsewhere.
fn image(path: &Path) {
    let file = fs::File::create(path).unwrap();
    file.set_len(SIZE).unwrap();
    let pattern: Vec<u8> = (0..300_000_u32).map(|i| u8::try_from(i / 7 % 251).unwrap()).collect();
    for at in [0, 1 << 20, (5 << 20) + 512, SIZE - 300_000] {
        file.write_all_at(&pattern, at).unwrap();
    }
}

fn same(path: &Path, server: &Running) -> bool {
    fs::read(path).unwrap() == server.store.bytes(Extent::new(0, SIZE))
}

#[test]
fn nbdinfo() {
    if !have("nbdinfo", "nbdinfo") {
        return;
    }
    let server = Running::start();
    for uri in [server.uri(), server.uri().replace("/demo", "/"), server.tcp_uri()] {
        let info = text(Command::new("nbdinfo").arg(&uri));
        for wanted in [
            "newstyle-fixed without TLS, using structured packets",
            "export=\"demo\"",
            "description: a disk in memory",
            "export-size: 67108864",
            "base:allocation",
            "can_df: true",
            "can_fast_zero: true",
            "can_multi_conn: true",
            "block_size_minimum: 512",
            "block_size_maximum: 1048576",
        ] {
            assert!(info.contains(wanted), "{wanted:?} is not in\n{info}");
        }
    }
    assert_eq!(text(Command::new("nbdinfo").args(["--size", &server.uri()])).trim(), SIZE.to_string());
    let list = text(Command::new("nbdinfo").args(["--list", &server.uri()]));
    assert!(list.contains("export=\"demo\""), "{list}");
    run(Command::new("nbdinfo").args(["--can", "trim", &server.uri()]));
    let wrong = Command::new("nbdinfo").arg(server.uri().replace("/demo", "/other")).output().unwrap();
    assert!(!wrong.status.success());
    // "this one" is the server's own text.
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("No such file"), "{wrong:?}");
    let map = text(Command::new("nbdinfo").args(["--map", &server.uri()]));
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "67108864", "3", "hole,zero"]);
}

#[test]
fn nbdcopy_both_ways() {
    if !have("nbdcopy_both_ways", "nbdcopy") {
        return;
    }
    let server = Running::start();
    let source = server.dir.path().join("source");
    let copy = server.dir.path().join("copy");
    image(&source);
    for uri in [server.uri(), server.tcp_uri()] {
        run(Command::new("nbdcopy").args(["--connections=4", "--flush"]).arg(&source).arg(&uri));
        assert!(same(&source, &server));
        run(Command::new("nbdcopy").args(["--connections=4"]).arg(&uri).arg(&copy));
        assert!(same(&copy, &server));
        run(Command::new("nbdcopy").args(["--request-size=1048576", "--requests=8"]).arg(&uri).arg(&copy));
        assert!(same(&copy, &server));
        fs::remove_file(&copy).unwrap();
        server.inside(|inside| assert_eq!(inside.server.load().requests, 0));
    }
    // From one server to another.
    let second = Running::start();
    run(Command::new("nbdcopy").arg(server.uri()).arg(second.uri()));
    assert!(same(&source, &second));
}

#[test]
fn qemu_img() {
    if !have("qemu_img", "qemu-img") {
        return;
    }
    let server = Running::start();
    let source = server.dir.path().join("source");
    let copy = server.dir.path().join("copy");
    image(&source);
    let qemu = || Command::new("qemu-img");
    run(qemu()
        .args(["convert", "-n", "-f", "raw", "-O", "raw", "-m", "16", "-W"])
        .arg(&source)
        .arg(server.uri()));
    assert!(same(&source, &server));
    run(qemu().args(["compare", "-f", "raw", "-F", "raw"]).arg(&source).arg(server.uri()));
    run(qemu().args(["convert", "-f", "raw", "-O", "raw"]).arg(server.tcp_uri()).arg(&copy));
    assert!(same(&copy, &server));
    let map = text(qemu().args(["map", "-f", "raw", "--output=json"]).arg(server.uri()));
    assert!(map.contains("\"zero\": true, \"data\": false"), "{map}");
    assert!(map.contains("\"zero\": false, \"data\": true"), "{map}");
    let info = text(qemu().args(["info", "-f", "raw"]).arg(server.uri()));
    assert!(info.contains("64 MiB"), "{info}");
    server.inside(|inside| inside.disk.set_failure(Some(lh_block::IoError::Io)));
    assert!(
        !qemu()
            .args(["compare", "-f", "raw", "-F", "raw"])
            .arg(&source)
            .arg(server.uri())
            .output()
            .unwrap()
            .status
            .success()
    );
}

#[test]
fn qemu_io() {
    if !have("qemu_io", "qemu-io") {
        return;
    }
    let server = Running::start();
    for uri in [server.uri(), server.tcp_uri()] {
        let io = |commands: &[&str]| {
            let mut command = Command::new("qemu-io");
            command.args(["-f", "raw"]).arg(&uri);
            commands.iter().for_each(|c| {
                command.args(["-c", c]);
            });
            let out = text(&mut command);
            assert!(!out.contains("failed") && !out.contains("error"), "{out}");
        };
        io(&["write -P 0xaa 0 1M", "read -P 0xaa 0 1M", "write -P 0xbb 4096 512", "read -P 0xbb 4096 512"]);
        io(&["write -f -P 0xcc 1M 64k", "read -P 0xcc 1M 64k", "flush"]);
        io(&["write -z 0 64k", "read -P 0 0 64k", "read -P 0xaa 64k 64k"]);
        io(&["write -z -u 64k 64k", "read -P 0 64k 64k", "write -z -n 128k 64k", "discard 0 1M"]);
        io(&["aio_write -P 1 0 64k", "aio_write -P 2 64k 64k", "aio_read -P 1 0 64k", "aio_flush"]);
        // Longer than one request may be: qemu keeps to the maximum.
        io(&["write -P 3 0 16M", "read -P 3 0 16M"]);
        // Smaller than a block: qemu reads, merges and writes.
        io(&["write -P 9 100 50", "read -P 9 100 50", "read -P 3 0 100"]);
    }
}

fn nbdsh(test: &str, script: &str, setup: Setup) {
    if !have_nbdsh(test) {
        return;
    }
    let server = setup.start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nbdsh").join(script);
    for uri in [server.uri(), server.tcp_uri()] {
        let out = text(Command::new("/usr/bin/python3").arg(&script).arg(uri).arg(SIZE.to_string()));
        assert_eq!(out.trim(), "ok");
    }
    server.until("all gone", |load| load.connections == 0 && load.payload_bytes == 0);
}

#[test]
fn libnbd_every_command() {
    nbdsh("libnbd_every_command", "commands.py", Setup::default());
}

#[test]
fn libnbd_every_misuse() {
    nbdsh("libnbd_every_misuse", "misuse.py", Setup::default());
}

/// A client written from the protocol document alone, in another language: extended headers, every misuse, golden
/// bytes. It needs Python and nothing else.
#[test]
fn a_client_of_another_hand() {
    if !have("a_client_of_another_hand", "python3") {
        return;
    }
    let server = Running::start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/e2e/misuse_client.py");
    let mut client = Command::new("python3");
    client.arg("-B").arg(script).arg(&server.socket).args(["demo", &SIZE.to_string()]);
    assert_eq!(text(&mut client).trim(), "ok");
    server.until("all gone", |load| load.connections == 0 && load.payload_bytes == 0);
}

#[test]
fn libnbd_with_little_memory() {
    nbdsh("libnbd_with_little_memory", "commands.py", Setup { pool_bytes: 4 << 20, ..Setup::default() });
}

#[test]
fn fio_verifies() {
    if !have("fio_verifies", "fio") {
        return;
    }
    let engines = Command::new("fio").arg("--enghelp").output().unwrap();
    if !String::from_utf8_lossy(&engines.stdout).lines().any(|line| line.trim() == "nbd") {
        println!("SKIP fio_verifies: this fio has no engine nbd");
        return;
    }
    let server = Running::start();
    for uri in [server.uri(), server.tcp_uri()] {
        let out = text(Command::new("fio").current_dir(server.dir.path()).args([
            "--name=verify",
            "--ioengine=nbd",
            &format!("--uri={uri}"),
            "--rw=randrw",
            "--bsrange=4k-256k",
            "--iodepth=32",
            "--size=64m",
            "--verify=crc32c",
            "--verify_backlog=256",
            "--loops=2",
        ]));
        assert!(out.contains("err= 0"), "{out}");
    }
}
