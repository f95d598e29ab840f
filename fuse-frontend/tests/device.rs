//! The whole way: a disk in memory, its server, the keeper, FUSE and loop, and other people's programs on top.

mod rig;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fuse_frontend::users_of;
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rig::{Mounted, Rig, run, skip, wait_until};

const MIB: u64 = 1 << 20;

#[test]
fn the_device_has_the_volumes_sizes_and_leaves_nothing() {
    if skip("the_device_has_the_volumes_sizes_and_leaves_nothing", &["blockdev"]) {
        return;
    }
    for block in [512, 4096] {
        let rig = Rig::start(&format!("sizes{block}"), 64 * MIB, block, false);
        let say = |option| run(&["blockdev", option, rig.node()]).trim().to_owned();
        assert_eq!(say("--getsize64"), (64 * MIB).to_string());
        assert_eq!(say("--getss"), block.to_string());
        let meta = fs::metadata(&rig.node).unwrap();
        assert_eq!(meta.permissions().mode() & 0o777, 0o600);
        assert_eq!(meta.rdev(), fs::metadata(rig.info().device().unwrap()).unwrap().rdev());
        let number = rig.info().loop_number.unwrap();
        let dio = fs::read_to_string(format!("/sys/block/loop{number}/loop/dio")).unwrap();
        assert_eq!(dio.trim(), "1", "loop does direct I/O");
        rig.stop();
    }
}

/// Files with known contents.
fn fill(directory: &Path) {
    for d in 0..20 {
        let sub = directory.join(format!("d{d}"));
        fs::create_dir(&sub).unwrap();
        for f in 0..50 {
            fs::write(sub.join(format!("f{f}")), format!("{d}/{f} ").repeat(100 * (f + 1))).unwrap();
        }
    }
    run(&["sync"]);
}

fn compare(directory: &Path) {
    for d in 0..20 {
        for f in 0..50 {
            let path = directory.join(format!("d{d}/f{f}"));
            assert!(
                fs::read(&path).unwrap() == format!("{d}/{f} ").repeat(100 * (f + 1)).as_bytes(),
                "{path:?}"
            );
        }
    }
}

fn file_system(test: &str, make: &[&str], check: &[&str]) {
    let rig = Rig::start(test, 400 * MIB, 512, false);
    run(&[make, &[rig.node()]].concat());
    {
        let mounted = Mounted::new(rig.node(), rig.directory.path().join("mnt"), "discard");
        fill(&mounted.0);
        fs::remove_dir_all(mounted.0.join("d19")).unwrap();
        run(&["fstrim", "-v", mounted.0.to_str().unwrap()]);
    }
    run(&[check, &[rig.node()]].concat());
    {
        let mounted = Mounted::new(rig.node(), rig.directory.path().join("mnt"), "rw");
        assert!(!mounted.0.join("d19").exists());
        fs::create_dir(mounted.0.join("d19")).unwrap();
        for f in 0..50 {
            fs::write(mounted.0.join(format!("d19/f{f}")), format!("19/{f} ").repeat(100 * (f + 1))).unwrap();
        }
        compare(&mounted.0);
    }
    run(&[check, &[rig.node()]].concat());
    rig.stop();
}

#[test]
fn ext4_lives_on_it() {
    if !skip("ext4_lives_on_it", &["mkfs.ext4", "fsck.ext4", "fstrim"]) {
        file_system("ext4", &["mkfs.ext4", "-q", "-F"], &["fsck.ext4", "-fn"]);
    }
}

#[test]
fn xfs_lives_on_it() {
    if !skip("xfs_lives_on_it", &["mkfs.xfs", "xfs_repair", "fstrim"]) {
        file_system("xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"]);
    }
}

/// fio's own judgement of what it wrote, over and over.
fn fio(node: &str, seconds: u32) -> Command {
    let mut fio = Command::new("fio");
    fio.args([
        "--verify_state_save=0",
        "--name=verify",
        "--direct=1",
        "--ioengine=libaio",
        "--rw=randrw",
        "--bsrange=4k-256k",
    ])
    .args(["--iodepth=32", "--verify=crc32c", "--verify_fatal=1", "--verify_backlog=256"])
    .args(["--time_based", "--norandommap=0", "--group_reporting", "--end_fsync=1", "--fsync=64"])
    .arg(format!("--runtime={seconds}"))
    .arg(format!("--filename={node}"))
    .stdin(Stdio::null());
    fio
}

fn judge(output: &std::process::Output) {
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("err= 0"), "{text}");
}

#[test]
fn fio_finds_what_it_wrote() {
    if skip("fio_finds_what_it_wrote", &["fio"]) {
        return;
    }
    let rig = Rig::start("fio", 256 * MIB, 512, false);
    judge(&fio(rig.node(), 10).output().unwrap());
    rig.stop();
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zero() {
    if skip("discarded_and_zeroed_ranges_read_as_zero", &["blkdiscard", "dd"]) {
        return;
    }
    let rig = Rig::start("discard", 64 * MIB, 512, false);
    let file = rig.path("pattern");
    fs::write(&file, vec![0xa5; 64 << 20]).unwrap();
    let written = |rig: &Rig| {
        run(&["dd", &format!("if={file}"), &format!("of={}", rig.node()), "bs=1M", "oflag=direct"])
    };
    let read = |rig: &Rig| {
        let copy = rig.path("copy");
        run(&["dd", &format!("if={}", rig.node()), &format!("of={copy}"), "bs=1M", "iflag=direct"]);
        fs::read(copy).unwrap()
    };
    for options in [&[][..], &["-z"]] {
        written(&rig);
        assert!(read(&rig).iter().all(|b| *b == 0xa5));
        run(&[&["blkdiscard", "-f"], options, &["-o", "1048576", "-l", "8388608", rig.node()]].concat());
        let bytes = read(&rig);
        let (zero, rest) = (&bytes[1 << 20..9 << 20], [&bytes[..1 << 20], &bytes[9 << 20..]].concat());
        assert!(zero.iter().all(|b| *b == 0), "{options:?}");
        assert!(rest.iter().all(|b| *b == 0xa5), "{options:?}");
    }
    run(&["blkdiscard", "-f", rig.node()]);
    assert!(read(&rig).iter().all(|b| *b == 0));
    rig.stop();
}

#[test]
fn the_device_grows_under_its_user() {
    if skip("the_device_grows_under_its_user", &["blockdev", "mkfs.xfs", "xfs_growfs", "xfs_repair"]) {
        return;
    }
    let mut rig = Rig::start("grow", 320 * MIB, 512, true);
    run(&["mkfs.xfs", "-q", "-f", rig.node()]);
    {
        let mounted = Mounted::new(rig.node(), rig.directory.path().join("mnt"), "rw");
        assert_eq!(rig.server().order(&format!("resize {}", 480 * MIB)), "resized");
        assert_eq!(run(&["blockdev", "--getsize64", rig.node()]).trim(), (480 * MIB).to_string());
        run(&["xfs_growfs", mounted.0.to_str().unwrap()]);
        fs::write(mounted.0.join("large"), vec![7; 350 << 20]).unwrap();
        run(&["sync"]);
    }
    run(&["xfs_repair", "-n", rig.node()]);
    rig.stop();
}

/// Memory that begins a sector, for O_DIRECT: the first so many bytes of it are to be used.
fn aligned(bytes: &mut Vec<u8>, len: usize) -> &mut [u8] {
    *bytes = vec![9; len + 4096];
    let start = bytes.as_ptr().align_offset(4096);
    &mut bytes[start..start + len]
}

/// Writes to the device's first block, over and over.
fn write_until(node: &Path, ended: &AtomicBool) {
    let device = File::options().write(true).custom_flags(OFlag::O_DIRECT.bits()).open(node).unwrap();
    let mut bytes = Vec::new();
    let block = aligned(&mut bytes, 4096);
    while !ended.load(Ordering::Relaxed) {
        device.write_all_at(block, 0).unwrap();
    }
}

/// The device grows a hundred times while others write, and each time its last sector is read at once.
fn is_read_as_it_grows(rig: &mut Rig) {
    let ended = AtomicBool::new(false);
    let node = rig.node.clone();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| write_until(&node, &ended));
        }
        let device = File::options().read(true).custom_flags(OFlag::O_DIRECT.bits()).open(&node).unwrap();
        let mut failed = 0;
        let before =
            run(&["blockdev", "--getsize64", node.to_str().unwrap()]).trim().parse::<u64>().unwrap() / MIB;
        for mib in before + 1..=before + 100 {
            assert_eq!(rig.server().order(&format!("resize {}", mib * MIB)), "resized");
            let mut bytes = Vec::new();
            failed += u32::from(device.read_exact_at(aligned(&mut bytes, 512), mib * MIB - 512).is_err());
        }
        ended.store(true, Ordering::Relaxed);
        assert_eq!(failed, 0, "of 100 last sectors");
    });
}

#[test]
fn what_has_grown_is_read_at_once_though_others_write() {
    if skip("what_has_grown_is_read_at_once_though_others_write", &["blockdev"]) {
        return;
    }
    let mut rig = Rig::start("growing", 16 * MIB, 512, true);
    is_read_as_it_grows(&mut rig);
    // The mount was that keeper's: the next one has only the connection.
    let keeper = rig.info().pid;
    kill(Pid::from_raw(keeper), Signal::SIGKILL).unwrap();
    wait_until("there is a new keeper", || rig.server().order("keep") == "kept true");
    is_read_as_it_grows(&mut rig);
    rig.stop();
}

#[test]
fn a_volume_that_grew_while_nobody_served_is_larger_afterwards() {
    if skip("a_volume_that_grew_while_nobody_served_is_larger_afterwards", &["blockdev"]) {
        return;
    }
    let mut rig = Rig::start("grown", 16 * MIB, 512, true);
    rig.server().kill();
    rig.add(&["--size", &(32 * MIB).to_string()]);
    rig.serve();
    assert_eq!(run(&["blockdev", "--getsize64", rig.node()]).trim(), (32 * MIB).to_string());
    rig.stop();
}

#[test]
fn a_device_in_use_is_not_stopped_and_its_users_are_named() {
    if skip("a_device_in_use_is_not_stopped_and_its_users_are_named", &["mkfs.ext4", "losetup"]) {
        return;
    }
    let mut rig = Rig::start("users", 64 * MIB, 512, false);
    let node = rig.node.clone();
    run(&["mkfs.ext4", "-q", "-F", rig.node()]);
    // Others may look at a device that was written, as udev does.
    wait_until("nobody uses it yet", || users_of(&node).is_empty());
    {
        let mounted = Mounted::new(rig.node(), rig.directory.path().join("mnt"), "rw");
        let users = users_of(&node);
        assert!(
            users.iter().any(|u| u.name == "mount" && u.what.ends_with(mounted.0.to_str().unwrap())),
            "{users:?}"
        );
        assert!(rig.server().order("stop").starts_with("refused "));
        fs::write(mounted.0.join("still"), "here").unwrap();
        run(&["sync"]);
    }
    {
        let open = fs::File::open(&node).unwrap();
        let mut holder = Command::new("sleep").arg("60").stdin(open).spawn().unwrap();
        let users = users_of(&node);
        let pid = i32::try_from(holder.id()).unwrap();
        assert!(users.iter().any(|u| u.pid == Some(pid) && u.name == "sleep"), "{users:?}");
        let refusal = rig.server().order("stop");
        assert!(refusal.starts_with("refused ") && refusal.contains("in use"), "{refusal}");
        holder.kill().unwrap();
        holder.wait().unwrap();
    }
    {
        let at = rig.directory.path().join("mnt");
        run(&["mount", rig.node(), at.to_str().unwrap()]);
        let still = File::open(at.join("still")).unwrap();
        run(&["umount", "-l", at.to_str().unwrap()]);
        let users = users_of(&node);
        assert!(
            users.iter().any(|u| u.name == "ext4" && u.pid.is_none()),
            "no mount tells of it any more: {users:?}"
        );
        drop(still);
        wait_until("the file system has gone with its last file", || users_of(&node).is_empty());
    }
    {
        let over = run(&["losetup", "-f", "--show", rig.node()]).trim().to_owned();
        let users = users_of(&node);
        assert!(users.iter().any(|u| over.ends_with(&u.name)), "{users:?}");
        run(&["losetup", "-d", &over]);
    }
    wait_until("nobody uses it", || users_of(&node).is_empty());
    // A refused stop has left it as it was: it does not vanish at the last close.
    assert!(fs::read(&node).is_ok_and(|bytes| bytes.len() == 64 << 20));
    rig.stop();
}

/// Whoever uses a partition uses the device, under other numbers.
#[test]
fn users_of_a_partition_are_users_of_the_device() {
    if skip("users_of_a_partition_are_users_of_the_device", &["mkfs.ext4", "addpart", "delpart"]) {
        return;
    }
    let mut rig = Rig::start("partition", 64 * MIB, 512, false);
    let whole = rig.info().device().unwrap();
    let whole = whole.to_str().unwrap();
    run(&["addpart", whole, "1", "2048", "65536"]);
    let name = Path::new(whole).file_name().unwrap().to_str().unwrap();
    let numbers = fs::read_to_string(format!("/sys/block/{name}/{name}p1/dev")).unwrap();
    let (major, minor) = numbers.trim().split_once(':').unwrap();
    let partition = rig.path("partition");
    run(&["mknod", &partition, "b", major, minor]);
    run(&["mkfs.ext4", "-q", "-F", &partition]);
    wait_until("nobody uses it yet", || users_of(&rig.node).is_empty());
    {
        let mounted = Mounted::new(&partition, rig.directory.path().join("mnt"), "rw");
        let users = users_of(&rig.node);
        let at = mounted.0.to_str().unwrap();
        assert!(users.iter().any(|u| u.name == "mount" && u.what.ends_with(at)), "{users:?}");
        assert!(rig.server().order("stop").starts_with("refused "));
    }
    {
        let open = fs::File::open(&partition).unwrap();
        let mut holder = Command::new("sleep").arg("60").stdin(open).spawn().unwrap();
        let pid = i32::try_from(holder.id()).ok();
        let users = users_of(&rig.node);
        assert!(users.iter().any(|u| u.pid == pid && u.name == "sleep"), "{users:?}");
        holder.kill().unwrap();
        holder.wait().unwrap();
    }
    {
        let over = run(&["losetup", "-f", "--show", &partition]).trim().to_owned();
        let users = users_of(&rig.node);
        assert!(users.iter().any(|u| over.ends_with(&u.name)), "{users:?}");
        run(&["losetup", "-d", &over]);
    }
    wait_until("nobody uses it", || users_of(&rig.node).is_empty());
    run(&["delpart", whole, "1"]);
    rig.stop();
}

/// Partitions that are left behind would be parts of whatever is bound to the loop device next.
#[test]
fn partitions_that_somebody_adds_go_with_the_device() {
    if skip("partitions_that_somebody_adds_go_with_the_device", &["addpart"]) {
        return;
    }
    let mut rig = Rig::start("partitions", 64 * MIB, 512, false);
    let whole = rig.info().device().unwrap();
    let name = whole.file_name().unwrap().to_str().unwrap();
    for (number, start) in [("1", "2048"), ("2", "8192")] {
        run(&["addpart", whole.to_str().unwrap(), number, start, "4096"]);
    }
    let is_there = |number| Path::new("/sys/block").join(format!("{name}/{name}p{number}")).exists();
    wait_until("nobody uses it", || users_of(&rig.node).is_empty());
    {
        let _open = File::open(&rig.node).unwrap();
        assert!(rig.server().order("stop").starts_with("refused "));
        assert!(is_there(1) && is_there(2), "a refused stop changes nothing");
    }
    let mut server = rig.server.take().unwrap();
    assert_eq!(server.order("stop"), "stopped");
    server.child.wait().unwrap();
    assert!(!is_there(1) && !is_there(2));
}

#[test]
fn a_killed_server_is_a_pause_and_not_an_error() {
    if skip("a_killed_server_is_a_pause_and_not_an_error", &["fio"]) {
        return;
    }
    let mut rig = Rig::start("kill", 256 * MIB, 512, true);
    let fio = fio(rig.node(), 15).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pauses = Vec::new();
    for round in 0..10 {
        std::thread::sleep(Duration::from_millis(700 + 37 * round));
        rig.server().kill();
        let begin = std::time::Instant::now();
        rig.serve();
        pauses.push(begin.elapsed());
    }
    judge(&fio.wait_with_output().unwrap());
    pauses.sort();
    println!(
        "10 kills; from the start of a server to its device: median {:?}, worst {:?}",
        pauses[5], pauses[9]
    );
    rig.stop();
}

#[test]
fn requests_wait_while_nobody_serves() {
    if skip("requests_wait_while_nobody_serves", &["dd"]) {
        return;
    }
    let mut rig = Rig::start("wait", 64 * MIB, 512, true);
    rig.server().kill();
    let mut dd = Command::new("dd")
        .args(["if=/dev/zero", &format!("of={}", rig.node()), "bs=64k", "count=16", "oflag=direct"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(dd.try_wait().unwrap().is_none(), "it neither failed nor ended");
    rig.serve();
    assert!(dd.wait().unwrap().success());
    rig.stop();
}

#[test]
fn several_queues_share_the_connection() {
    if skip("several_queues_share_the_connection", &["fio"]) {
        return;
    }
    let mut rig = Rig::new("queues", 256 * MIB, 4096, true);
    rig.add(&["--queues", "3"]);
    rig.serve();
    judge(&fio(rig.node(), 4).output().unwrap());
    rig.stop();
}
