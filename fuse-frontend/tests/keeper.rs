//! The keeper among its engines: who is given the connection, and what is left when somebody dies.

mod rig;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fuse_frontend::keeper::{Info, Keeper, KeeperError, LeftBehind, remove_left_behind};
use fuse_frontend::{NodeError, node, proto, users_of};
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use rig::{Rig, run, sequence, skip, wait_until};

const MIB: u64 = 1 << 20;

fn read_all(rig: &Rig) -> Vec<u8> {
    let copy = rig.path("copy");
    run(&["dd", &format!("if={}", rig.node()), &format!("of={copy}"), "bs=1M", "iflag=direct"]);
    fs::read(copy).unwrap()
}

#[test]
fn one_engine_at_a_time_and_only_the_owners() {
    if skip("one_engine_at_a_time_and_only_the_owners", &[]) {
        return;
    }
    let rig = Rig::start("one", 16 * MIB, 512, false);
    let mut other = Keeper::connect(&rig.socket).unwrap();
    assert!(matches!(other.attach("somebody"), Err(KeeperError::Owner(text)) if text.contains("memory")));
    let begin = std::time::Instant::now();
    let error = other.attach("memory").unwrap_err();
    let engine = rig.server.as_ref().unwrap().child.id();
    assert!(matches!(&error, KeeperError::Busy(text) if text.contains(&engine.to_string())), "{error}");
    assert!(begin.elapsed() >= Duration::from_secs(9), "the one before is given time to end");
    // Who is not attached has no say.
    assert!(matches!(other.resize(), Err(KeeperError::Failed(_))));
    assert!(matches!(other.serve(512), Err(KeeperError::Failed(_))));
    assert!(matches!(other.stop(), Err(KeeperError::Busy(_))));
    assert!(matches!(other.stop_by_force(), Err(KeeperError::Busy(_))));
    assert_eq!(other.info().unwrap().engine, i32::try_from(engine).ok());
    // Nobody but root may connect, and the keeper is in a session of its own.
    assert_eq!(fs::metadata(&rig.socket).unwrap().mode() & 0o777, 0o600);
    let keeper = rig.info().pid;
    assert_eq!(nix::unistd::getsid(Some(Pid::from_raw(keeper))).unwrap().as_raw(), keeper);
    rig.stop();
}

#[test]
fn nonsense_on_the_socket_ends_that_connection_alone() {
    if skip("nonsense_on_the_socket_ends_that_connection_alone", &[]) {
        return;
    }
    let rig = Rig::start("nonsense", 16 * MIB, 512, false);
    for bytes in
        [&b"\n\n"[..], b"attach\n\n", b"serve\nblock_size 511\n\n", b"adopt\nowner memory\n\n", b"x y z\n\n"]
    {
        let mut stream = UnixStream::connect(&rig.socket).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = [0; 512];
        let len = stream.read(&mut answer).unwrap();
        assert!(answer[..len].starts_with(b"error\n"), "{:?}", String::from_utf8_lossy(&answer[..len]));
    }
    for bytes in [b"attach\nnospace\n\n".to_vec(), vec![0xff; 100], vec![b'x'; 100_000]] {
        let mut stream = UnixStream::connect(&rig.socket).unwrap();
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer, b"");
    }
    // More connections than it takes at a time; the engine's still works.
    let mut many: Vec<_> = (0..40).map(|_| Keeper::connect(&rig.socket).unwrap()).collect();
    let answered = many.iter_mut().filter_map(|keeper| keeper.info().ok()).count();
    assert!((1..=15).contains(&answered), "{answered} of 40 beside the engine's");
    drop(many);
    wait_until("the keeper answers again", || {
        Keeper::connect(&rig.socket).is_ok_and(|mut keeper| keeper.info().is_ok())
    });
    assert_eq!(read_all(&rig).len(), 16 << 20);
    rig.stop();
}

/// A keeper that was left with another /dev than the host's would be found by every engine that comes later.
#[test]
fn a_keeper_that_cannot_connect_ends_and_the_next_one_can() {
    if skip("a_keeper_that_cannot_connect_ends_and_the_next_one_can", &["unshare"]) {
        return;
    }
    let mut rig = Rig::new("cannot", 16 * MIB, 512, false);
    let mut first = rig.spawn_keeper_without_fuse();
    wait_until("the keeper listens", || Keeper::connect(&rig.socket).is_ok());
    let refused = Keeper::connect(&rig.socket).unwrap().attach("memory").map(drop);
    assert!(matches!(refused, Err(KeeperError::Failed(text)) if text.contains("FUSE")));
    wait_until("it ends", || first.try_wait().unwrap().is_some());
    assert!(!rig.socket.exists() && !rig.socket.with_extension("lock").exists());
    rig.serve();
    rig.stop();
}

/// Whoever started it was killed before it asked for anything.
#[test]
fn a_keeper_that_nobody_comes_to_ends() {
    if skip("a_keeper_that_nobody_comes_to_ends", &[]) {
        return;
    }
    let rig = Rig::new("nobody", 16 * MIB, 512, false);
    let mut keeper = rig.spawn_keeper();
    wait_until("the keeper listens", || Keeper::connect(&rig.socket).is_ok());
    // Who only asks does not keep it for ever, and is answered until it ends.
    assert_eq!(rig.info().connection, None);
    wait_until("it ends", || keeper.try_wait().unwrap().is_some());
    assert!(!rig.socket.exists() && !rig.socket.with_extension("lock").exists());
}

fn readable(fuse: &OwnedFd) -> bool {
    let mut watched = [PollFd::new(fuse.as_fd(), PollFlags::POLLIN)];
    poll(&mut watched, 0_u16).unwrap() > 0
}

/// An engine that dies between the descriptor and the device, with the kernel's questions unanswered.
#[test]
fn an_engine_that_dies_while_the_device_is_made_is_replaced() {
    if skip("an_engine_that_dies_while_the_device_is_made_is_replaced", &["dd"]) {
        return;
    }
    let mut rig = Rig::new("dies", 16 * MIB, 512, true);
    let mut starter = rig.spawn_keeper();
    std::thread::spawn(move || starter.wait());
    wait_until("the keeper listens", || Keeper::connect(&rig.socket).is_ok());
    {
        // It takes the descriptor, asks for the device, reads the first of the kernel's questions, and dies.
        let mut engine = UnixStream::connect(&rig.socket).unwrap();
        engine.write_all(b"attach\nowner memory\n\n").unwrap();
        let mut answer = [0; 4096];
        let (len, descriptors) = lh_ring::sys::receive_with_fds(engine.as_fd(), &mut answer).unwrap();
        let text = String::from_utf8_lossy(&answer[..len]);
        assert!(text.contains("\nserved 0\n"), "nobody has read a request before: {text}");
        let fuse = &descriptors[0];
        engine.write_all(b"serve\nblock_size 512\n\n").unwrap();
        wait_until("the kernel asks", || readable(fuse));
        let mut request = vec![0; (1 << 20) + 4096];
        assert!(nix::unistd::read(fuse, &mut request).unwrap() >= 40);
    }
    // A child that another test is just starting may hold a copy of the connection for a moment.
    wait_until("its death is noticed", || rig.info().engine.is_none());
    let info = rig.info();
    assert!(info.served_before && info.loop_number.is_none(), "{info:?}");
    rig.serve();
    assert_eq!(read_all(&rig).len(), 16 << 20);
    rig.stop();
}

#[test]
fn a_dead_keeper_is_replaced_by_its_engine() {
    if skip("a_dead_keeper_is_replaced_by_its_engine", &["dd"]) {
        return;
    }
    let mut rig = Rig::start("adopt", 16 * MIB, 512, true);
    let pattern = rig.path("pattern");
    fs::write(&pattern, vec![0x5a; 16 << 20]).unwrap();
    run(&["dd", &format!("if={pattern}"), &format!("of={}", rig.node()), "bs=1M", "oflag=direct"]);
    let before = rig.info();
    assert_eq!(rig.server().order("keep"), "kept false");
    kill(Pid::from_raw(before.pid), Signal::SIGKILL).unwrap();
    wait_until("it is dead", || Keeper::connect(&rig.socket).is_err());
    assert!(read_all(&rig).iter().all(|b| *b == 0x5a), "the engine serves without it");
    assert_eq!(rig.server().order("keep"), "kept true");
    let after = rig.info();
    assert_ne!(after.pid, before.pid);
    assert_eq!((after.connection, after.loop_number), (before.connection, before.loop_number));
    assert!(after.served_before, "the next engine has to ask for what this one may leave unanswered");
    // The new one carries the connection through an engine's death, as the old one would have.
    rig.server().kill();
    rig.serve();
    assert!(read_all(&rig).iter().all(|b| *b == 0x5a));
    rig.stop();
}

#[test]
fn a_keeper_adopts_no_second_connection_and_no_device_that_has_gone() {
    if skip("a_keeper_adopts_no_second_connection_and_no_device_that_has_gone", &[]) {
        return;
    }
    let mut rig = Rig::start("adopts", 16 * MIB, 512, true);
    rig.server().kill();
    let mut engine = Keeper::connect(&rig.socket).unwrap();
    let (fuse, info) = engine.attach("memory").unwrap();
    let gone = Info { loop_sequence: info.loop_sequence.map(|sequence| sequence + 1000), ..info.clone() };
    drop(engine);
    let mut other = Keeper::connect(&rig.socket).unwrap();
    for (known, why) in [(&gone, "is not this volume's"), (&info, "has a connection already")] {
        let refusal = other.adopt("memory", &fuse, known).unwrap_err();
        assert!(matches!(&refusal, KeeperError::Failed(text) if text.contains(why)), "{refusal:?}");
        // Who was refused is not the engine, and keeps nobody out.
        assert_eq!(rig.info().engine, None);
    }
    drop(fuse);
    rig.serve();
    assert_eq!(rig.info().connection, info.connection);
    rig.stop();
}

/// Without them nobody sees that requests wait for an engine.
#[test]
fn a_number_whose_statistics_somebody_has_left_off_counts_its_requests() {
    if skip("a_number_whose_statistics_somebody_has_left_off_counts_its_requests", &[]) {
        return;
    }
    let bound = |turn: u32| {
        let rig = Rig::start(&format!("counts{turn}"), 16 * MIB, 512, false);
        let setting = format!("/sys/block/loop{}/queue/iostats", rig.info().loop_number.unwrap());
        (rig, setting)
    };
    // Another test may take the number meanwhile.
    for turn in 0..20 {
        let (first, setting) = bound(2 * turn);
        fs::write(&setting, "0").unwrap();
        first.stop();
        let (second, next) = bound(2 * turn + 1);
        let counts = fs::read_to_string(&next).unwrap();
        fs::write(&setting, "1").unwrap();
        second.stop();
        if next == setting {
            assert_eq!(counts.trim(), "1");
            return;
        }
    }
    panic!("no number was had twice");
}

/// Whoever has the device open reckons with its blocks.
#[test]
fn an_engine_with_other_blocks_does_not_take_the_device_over() {
    if skip("an_engine_with_other_blocks_does_not_take_the_device_over", &["dd"]) {
        return;
    }
    let mut rig = Rig::start("blocks", 16 * MIB, 512, true);
    rig.server().kill();
    let mut other = rig.spawn_with(&["--block-size", "4096"]);
    let said = other.answer();
    other.kill();
    assert_eq!(said, "", "it serves");
    let log = fs::read_to_string(rig.path("log")).unwrap();
    assert!(log.contains("has blocks of 512 bytes, the volume has 4096"), "{log}");
    // The right one does.
    rig.serve();
    assert_eq!(read_all(&rig).len(), 16 << 20);
    rig.stop();
}

#[test]
fn after_the_death_of_all_the_volume_comes_back_as_a_new_device() {
    if skip("after_the_death_of_all_the_volume_comes_back_as_a_new_device", &["dd"]) {
        return;
    }
    let mut rig = Rig::start("all", 16 * MIB, 512, true);
    let first = rig.info();
    let held = fs::File::open(&rig.node).unwrap();
    kill(Pid::from_raw(first.pid), Signal::SIGKILL).unwrap();
    rig.server().kill();
    // With both gone, what is open fails at once instead of hanging.
    wait_until("the keeper is dead", || Keeper::connect(&rig.socket).is_err());
    let dd = |node: &str| {
        let line = [&format!("if={node}"), "of=/dev/null", "bs=4k", "count=1", "iflag=direct"];
        Command::new("dd").args(line).stderr(Stdio::null()).status().unwrap().success()
    };
    assert!(!dd(rig.node()));
    rig.serve();
    assert_ne!(rig.info().loop_number, first.loop_number, "the old one is still held open");
    assert!(dd(rig.node()));
    assert_eq!(
        fs::metadata(&rig.node).unwrap().rdev(),
        fs::metadata(rig.info().device().unwrap()).unwrap().rdev()
    );
    // The old one goes when its last user goes.
    drop(held);
    wait_until("the old device is gone", || sequence(&first.device().unwrap()) != first.loop_sequence);
    rig.stop();
}

#[test]
fn what_a_keeper_and_its_engine_have_left_can_be_taken_away_and_nothing_that_lives() {
    if skip("what_a_keeper_and_its_engine_have_left_can_be_taken_away_and_nothing_that_lives", &["dd"]) {
        return;
    }
    let mut rig = Rig::start("left", 16 * MIB, 512, true);
    let (socket, node) = (rig.socket.clone(), rig.node.clone());
    let remove = || remove_left_behind(&socket, &node).unwrap();
    assert_eq!(remove(), LeftBehind::Alive);
    let first = rig.info();
    kill(Pid::from_raw(first.pid), Signal::SIGKILL).unwrap();
    rig.server().kill();
    wait_until("the keeper is dead", || Keeper::connect(&rig.socket).is_err());
    // The lock is held until the last of its threads has ended.
    wait_until("it is taken away", || remove() == LeftBehind::Removed);
    assert_eq!([&rig.node, &rig.socket, &rig.socket.with_extension("lock")].map(|p| p.exists()), [false; 3]);
    wait_until("the device is gone", || sequence(&first.device().unwrap()) != first.loop_sequence);
    assert_eq!(remove(), LeftBehind::Nothing);
    assert!(!rig.socket.with_extension("lock").exists(), "a lock was made");
    rig.serve();
    assert_eq!(read_all(&rig).len(), 16 << 20);
    rig.stop();
}

#[test]
fn a_node_whose_device_is_anothers_by_now_is_replaced() {
    if skip("a_node_whose_device_is_anothers_by_now_is_replaced", &["losetup"]) {
        return;
    }
    let mut rig = Rig::start("reused", 16 * MIB, 512, true);
    let first = rig.info();
    let device = first.device().unwrap().to_str().unwrap().to_owned();
    kill(Pid::from_raw(first.pid), Signal::SIGKILL).unwrap();
    rig.server().kill();
    wait_until("the keeper is dead", || Keeper::connect(&rig.socket).is_err());
    run(&["losetup", "-d", &device]);
    wait_until("the old device is gone", || sequence(Path::new(&device)) != first.loop_sequence);
    // Somebody else gets the number, unless a third one was faster.
    let file = rig.path("another");
    fs::File::create(&file).unwrap().set_len(MIB).unwrap();
    let bound = Command::new("losetup").args([&device, &file]).status().unwrap().success();
    rig.serve();
    let now = fs::metadata(&rig.node).unwrap().rdev();
    assert_eq!(now, fs::metadata(rig.info().device().unwrap()).unwrap().rdev());
    let number = rig.info().loop_number;
    rig.stop();
    if bound {
        // It is still theirs.
        assert_ne!(number, first.loop_number);
        let backing = run(&["losetup", "--noheadings", "--output", "BACK-FILE", &device]);
        assert!(backing.contains("another"), "{backing}");
        run(&["losetup", "-d", &device]);
    }
}

/// `losetup -D` does that to every device that nobody has open.
#[test]
fn a_device_that_somebody_else_has_unbound_is_bound_again_and_its_number_left_to_whoever_has_it() {
    let test = "a_device_that_somebody_else_has_unbound_is_bound_again_and_its_number_left_to_whoever_has_it";
    if skip(test, &["losetup", "dd"]) {
        return;
    }
    for is_taken in [false, true] {
        let mut rig = Rig::start(&format!("unbound{is_taken}"), 16 * MIB, 512, true);
        assert_eq!(rig.server().order("look"), "bound false");
        let before = read_all(&rig);
        let first = rig.info();
        let device = first.device().unwrap().to_str().unwrap().to_owned();
        run(&["losetup", "-d", &device]);
        wait_until("the device is gone", || sequence(Path::new(&device)) != first.loop_sequence);
        let file = rig.path("another");
        fs::File::create(&file).unwrap().set_len(MIB).unwrap();
        // Unless a third one was faster.
        let bound = is_taken && Command::new("losetup").args([&device, &file]).status().unwrap().success();
        assert_eq!(rig.server().order("look"), "bound true");
        assert_eq!(rig.server().order("look"), "bound false");
        let node = fs::metadata(&rig.node).unwrap().rdev();
        assert_eq!(node, fs::metadata(rig.info().device().unwrap()).unwrap().rdev());
        assert!(read_all(&rig) == before);
        let number = rig.info().loop_number;
        rig.stop();
        if bound {
            // It is still theirs.
            assert_ne!(number, first.loop_number);
            let backing = run(&["losetup", "--noheadings", "--output", "BACK-FILE", &device]);
            assert!(backing.contains("another"), "{backing}");
            run(&["losetup", "-d", &device]);
        }
    }
}

/// Asking for a size may wait for another volume's engine, and what somebody has bound keeps the size that they have given it.
#[test]
fn a_number_that_is_anothers_by_now_does_not_grow() {
    if skip("a_number_that_is_anothers_by_now_does_not_grow", &["losetup"]) {
        return;
    }
    let mut rig = Rig::start("anothers", 16 * MIB, 512, true);
    let first = rig.info();
    let device = first.device().unwrap().to_str().unwrap().to_owned();
    run(&["losetup", "-d", &device]);
    wait_until("the device is gone", || sequence(Path::new(&device)) != first.loop_sequence);
    let path = rig.path("another");
    let file = fs::File::create(&path).unwrap();
    file.set_len(MIB).unwrap();
    // Unless a third one was faster.
    let bound = Command::new("losetup").args([&device, &path]).status().unwrap().success();
    file.set_len(2 * MIB).unwrap();
    let sectors = |device: &Path| {
        let name = device.file_name().unwrap().to_str().unwrap();
        fs::read_to_string(format!("/sys/block/{name}/size")).unwrap().trim().parse::<u64>().unwrap()
    };
    assert_eq!(rig.server().order(&format!("resize {}", 32 * MIB)), "resized");
    let theirs = sectors(Path::new(&device));
    assert_eq!(rig.server().order("look"), "bound true");
    assert_eq!(sectors(&rig.info().device().unwrap()), 32 * MIB / 512, "the next one has the size");
    rig.stop();
    if bound {
        run(&["losetup", "-d", &device]);
        assert_eq!(theirs, MIB / 512);
    }
}

/// Ends a connection that nobody else could end any more, if its test has not been through in time.
struct Rescue(Option<u64>);

impl Drop for Rescue {
    fn drop(&mut self) {
        if let Some(connection) = self.0 {
            let _ = lh_ring::sys::mounts::abort_fuse(connection);
        }
    }
}

/// Takes what the kernel asks.
fn take_requests(fuse: &OwnedFd) {
    let mut room = vec![0; 1 << 20];
    while readable(fuse) {
        nix::unistd::read(fuse, &mut room).unwrap();
    }
}

/// Waits until a program has the device open, and a moment longer, in which it asks for what it is to ask for. One that comes
/// to a device that has gone makes a file in its place.
fn uses(rig: &Rig, program: &Child) {
    let pid = i32::try_from(program.id()).ok();
    wait_until("it has the device open", || users_of(&rig.node).iter().any(|user| user.pid == pid));
    std::thread::sleep(Duration::from_millis(200));
}

/// Somebody reads from the device, the engine answers nothing, and the keeper is killed while it waits for that.
fn killed_while_it_waits(test: &str, ask: fn(&mut Keeper) -> Result<(), KeeperError>) {
    if skip(test, &["dd"]) {
        return;
    }
    let mut rig = Rig::start(test, 16 * MIB, 512, true);
    rig.server().kill();
    let mut engine = Keeper::connect(&rig.socket).unwrap();
    let (fuse, info) = engine.attach("memory").unwrap();
    let mut rescue = Rescue(info.connection);
    let mut dd = Command::new("dd")
        .args([&format!("if={}", rig.node()), "of=/dev/null", "bs=4k", "count=1", "iflag=direct"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Requests are taken, since those that were not could be given up, and not answered.
    wait_until("a read waits", || readable(&fuse));
    take_requests(&fuse);
    // A growth goes on with what the kernel has kept of the file, unless it was told of a larger one before, as it always is.
    nix::unistd::write(&fuse, &proto::size_notification(17 * MIB)).unwrap();
    let asking = std::thread::spawn(move || ask(&mut engine).is_err());
    std::thread::sleep(Duration::from_millis(500));
    take_requests(&fuse);
    assert!(!asking.is_finished(), "the keeper does not wait for the device");
    kill(Pid::from_raw(info.pid), Signal::SIGKILL).unwrap();
    // The engine's end is the connection's.
    drop(fuse);
    wait_until("the keeper's end is seen", || asking.is_finished());
    assert!(asking.join().unwrap(), "the keeper has answered");
    wait_until("the read fails", || dd.try_wait().unwrap().is_some());
    assert!(!dd.wait().unwrap().success());
    wait_until("the keeper has ended", || !Path::new(&format!("/proc/{}", info.pid)).exists());
    // The number of a connection that has ended is another one's soon.
    rescue.0 = None;
    // And the volume comes back.
    rig.serve();
    rig.stop();
}

#[test]
fn a_keeper_killed_while_it_unbinds_leaves_nothing_that_waits() {
    killed_while_it_waits("unbinds", Keeper::stop);
}

#[test]
fn a_keeper_killed_while_it_grows_the_device_leaves_nothing_that_waits() {
    killed_while_it_waits("grows", Keeper::resize);
}

/// `losetup` asks each loop device of the host for its file's numbers, and so does `mount -o loop` of any file.
#[test]
fn who_lists_loop_devices_does_not_wait_for_an_engine_that_is_away() {
    if skip("who_lists_loop_devices_does_not_wait_for_an_engine_that_is_away", &["losetup", "dd"]) {
        return;
    }
    let mut rig = Rig::start("lists", 16 * MIB, 512, true);
    let pattern = rig.path("pattern");
    fs::write(&pattern, vec![0x5a; 16 << 20]).unwrap();
    // A write makes some of what is kept of a file stale, and its size with it.
    run(&["dd", &format!("if={pattern}"), &format!("of={}", rig.node()), "bs=1M", "oflag=direct"]);
    rig.server().kill();
    let device = rig.info().device().unwrap();
    let mut list = Command::new("losetup")
        .args(["--noheadings", "--output", "BACK-INO"])
        .arg(device)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the devices are listed", || list.try_wait().unwrap().is_some());
    let mut listed = String::new();
    list.stdout.take().unwrap().read_to_string(&mut listed).unwrap();
    assert_eq!(listed.trim(), proto::ROOT.to_string());
    // What is kept is the file as it was: the next engine's growth is seen.
    rig.serve();
    assert!(read_all(&rig).iter().all(|b| *b == 0x5a));
    assert_eq!(rig.server().order(&format!("resize {}", 32 * MIB)), "resized");
    assert_eq!(read_all(&rig).len(), 32 << 20);
    rig.stop();
}

#[test]
fn without_an_engine_only_force_ends_the_device() {
    if skip("without_an_engine_only_force_ends_the_device", &["dd"]) {
        return;
    }
    let mut rig = Rig::start("force", 16 * MIB, 512, true);
    rig.server().kill();
    let mut dd = Command::new("dd")
        .args([&format!("if={}", rig.node()), "of=/dev/null", "bs=4k", "count=1", "iflag=direct"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    uses(&rig, &dd);
    let mut keeper = Keeper::connect(&rig.socket).unwrap();
    assert!(matches!(keeper.stop(), Err(KeeperError::Failed(text)) if text.contains("force")));
    assert!(dd.try_wait().unwrap().is_none());
    // The connection ends; the device stays until its user, who gets an error, has closed it.
    let first = keeper.stop_by_force();
    assert!(!dd.wait().unwrap().success());
    if first.is_err() {
        wait_until("the device is not in use", || keeper.stop_by_force().is_ok());
    }
    assert!(!rig.node.exists());
}

#[test]
fn the_keeper_does_not_end_under_an_engine_that_comes_while_the_device_is_taken_away() {
    let test = "the_keeper_does_not_end_under_an_engine_that_comes_while_the_device_is_taken_away";
    if skip(test, &[]) {
        return;
    }
    for is_closed_at_once in [true, false] {
        let mut rig = Rig::start(&format!("taken{is_closed_at_once}"), 16 * MIB, 512, true);
        let first = rig.info();
        let held = fs::File::open(&rig.node).unwrap();
        rig.server().kill();
        let mut keeper = Keeper::connect(&rig.socket).unwrap();
        let stop = std::thread::spawn(move || keeper.stop_by_force());
        wait_until("the connection has ended", || fs::read(&rig.node).is_err());
        // A device in use is tried again and again for a second.
        rig.serve();
        let held = (!is_closed_at_once).then_some(held);
        match stop.join().unwrap().unwrap_err() {
            KeeperError::Busy(text) => assert!(text.contains("another engine"), "{text}"),
            KeeperError::InUse(_) => println!("the engine took longer than that"),
            other => panic!("{other:?}"),
        }
        let (second, engine) = (rig.info(), rig.server().child.id());
        assert_eq!((second.pid, second.engine), (first.pid, i32::try_from(engine).ok()));
        assert_eq!(read_all(&rig).len(), 16 << 20);
        drop(held);
        wait_until("the old device is gone", || sequence(&first.device().unwrap()) != first.loop_sequence);
        rig.stop();
    }
}

/// A connection's number is free when it has ended, and given to the next one.
#[test]
fn a_stop_by_force_ends_nobody_elses_connection() {
    if skip("a_stop_by_force_ends_nobody_elses_connection", &["losetup", "dd"]) {
        return;
    }
    let mut rig = Rig::start("number", 16 * MIB, 512, true);
    let first = rig.info();
    kill(Pid::from_raw(first.pid), Signal::SIGKILL).unwrap();
    wait_until("it is dead", || Keeper::connect(&rig.socket).is_err());
    // A keeper that has adopted the connection has no mount: the loop device alone holds it.
    assert_eq!(rig.server().order("keep"), "kept true");
    let device = first.device().unwrap();
    run(&["losetup", "-d", device.to_str().unwrap()]);
    wait_until("the device is gone", || sequence(&device) != first.loop_sequence);
    rig.server().kill();
    let mut others = Vec::new();
    for n in 0..3 {
        others.push(Rig::start(&format!("number{n}"), 16 * MIB, 512, false));
    }
    if others.iter().all(|other| other.info().connection != first.connection) {
        println!("the number {:?} is somebody else's", first.connection);
    }
    Keeper::connect(&rig.socket).unwrap().stop_by_force().unwrap();
    for other in others {
        assert_eq!(read_all(&other).len(), 16 << 20);
        other.stop();
    }
}

/// What waits on a device whose volume was elsewhere since must fail, and never be carried out.
#[test]
fn an_abandoned_device_fails_for_who_has_it_open_and_makes_room_for_another() {
    if skip("an_abandoned_device_fails_for_who_has_it_open_and_makes_room_for_another", &["dd"]) {
        return;
    }
    let mut rig = Rig::start("abandon", 16 * MIB, 512, true);
    let before = read_all(&rig);
    let held = fs::File::open(&rig.node).unwrap();
    rig.server().kill();
    let mut dd = Command::new("dd")
        .args(["if=/dev/urandom", &format!("of={}", rig.node()), "bs=4k", "count=1", "oflag=direct"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    uses(&rig, &dd);
    assert!(dd.try_wait().unwrap().is_none(), "it waits for an engine");
    Keeper::connect(&rig.socket).unwrap().abandon().unwrap();
    assert!(!dd.wait().unwrap().success());
    assert!(!rig.node.exists());
    let first = held.metadata().unwrap().rdev();
    rig.serve();
    assert_ne!(fs::metadata(&rig.node).unwrap().rdev(), first, "another device");
    assert_eq!(read_all(&rig), before, "what waited was not carried out");
    drop(held);
    rig.stop();
}

/// The kernel's word that a connection has ended comes by an administrator (`/sys/fs/fuse/connections/N/abort`), or by a stop that
/// then finds the device in use.
#[test]
fn a_connection_that_has_ended_is_made_anew_for_the_next_engine() {
    if skip("a_connection_that_has_ended_is_made_anew_for_the_next_engine", &["dd"]) {
        return;
    }
    let end: [fn(&mut Rig); 2] = [
        |rig| {
            lh_ring::sys::mounts::abort_fuse(rig.info().connection.unwrap()).unwrap();
            assert_ne!(rig.server().order(&format!("resize {}", 32 * MIB)), "resized", "of a dead device");
            rig.server().kill();
        },
        |rig| {
            rig.server().kill();
            let refusal = Keeper::connect(&rig.socket).unwrap().stop_by_force().unwrap_err();
            assert!(matches!(refusal, KeeperError::InUse(_)), "{refusal:?}");
        },
    ];
    for (n, end) in end.into_iter().enumerate() {
        let mut rig = Rig::start(&format!("ended{n}"), 16 * MIB, 512, true);
        let pattern = rig.path("pattern");
        fs::write(&pattern, vec![0x5a; 16 << 20]).unwrap();
        run(&["dd", &format!("if={pattern}"), &format!("of={}", rig.node()), "bs=1M", "oflag=direct"]);
        let held = fs::File::open(&rig.node).unwrap();
        let first = rig.info();
        end(&mut rig);
        rig.serve();
        let second = rig.info();
        assert_eq!(second.pid, first.pid, "the keeper lives");
        assert_ne!((second.connection, second.loop_number), (first.connection, first.loop_number));
        let node = fs::metadata(&rig.node).unwrap().rdev();
        assert_eq!(node, fs::metadata(second.device().unwrap()).unwrap().rdev());
        assert!(read_all(&rig).iter().all(|b| *b == 0x5a));
        // It outlives an engine as the first one did.
        rig.server().kill();
        rig.serve();
        assert_eq!(rig.info().connection, second.connection);
        drop(held);
        wait_until("the old device is gone", || sequence(&first.device().unwrap()) != first.loop_sequence);
        rig.stop();
    }
}

/// Anybody may read the directory, and so have a lock on it for as long as he likes.
#[test]
fn nobody_holds_up_nodes_by_a_lock_on_their_directory() {
    if skip("nobody_holds_up_nodes_by_a_lock_on_their_directory", &[]) {
        return;
    }
    let directory = tempfile::tempdir_in("/dev").unwrap();
    let path = directory.path().join("vol");
    let _held = Flock::lock(fs::File::open(directory.path()).unwrap(), FlockArg::LockExclusive).unwrap();
    let (done, made) = std::sync::mpsc::channel();
    let (at, number) = (path.clone(), makedev(4094, 76));
    std::thread::spawn(move || {
        node::place(&at, number, &[]).unwrap();
        node::remove(&at, number).unwrap();
        done.send(()).unwrap();
    });
    made.recv_timeout(Duration::from_secs(20)).expect("it is held up");
}

#[test]
fn nodes_of_others_are_left_alone() {
    if skip("nodes_of_others_are_left_alone", &[]) {
        return;
    }
    let directory = tempfile::tempdir_in("/dev").unwrap();
    let path = directory.path().join("new/vol");
    // Numbers that no driver has: a dead node.
    let dead = makedev(4094, 77);
    node::place(&path, dead, &[]).unwrap();
    assert_eq!(node::rdev(&path), Some(dead));
    assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o755);
    // In its place another one; only its own is removed.
    let second = makedev(4094, 78);
    node::place(&path, second, &[]).unwrap();
    node::remove(&path, dead).unwrap();
    assert_eq!(node::rdev(&path), Some(second));
    // A volume whose device has gone without its node; another one gets its numbers.
    let (left, others) = (path.with_file_name("left"), path.with_file_name("others"));
    node::place(&left, dead, &[]).unwrap();
    node::place(&others, makedev(4094, 79), &[]).unwrap();
    node::place(&path, dead, &[second]).unwrap();
    assert_eq!((node::rdev(&path), node::rdev(&left)), (Some(dead), None));
    node::place(&path, second, &[dead]).unwrap();
    node::remove(&others, makedev(4094, 79)).unwrap();
    node::remove(&path, second).unwrap();
    assert!(!path.exists());
    let left = fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap());
    let left: Vec<_> =
        left.map(|entry| (entry.file_name(), entry.metadata().unwrap().mode() & 0o777)).collect();
    assert_eq!(left, [(".~lock".into(), 0o600)], "root alone opens it");

    fs::write(&path, "file").unwrap();
    assert!(matches!(node::place(&path, second, &[]), Err(NodeError::Foreign { .. })));
    node::remove(&path, second).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"file");
    fs::remove_file(&path).unwrap();

    // A device that is in use by its size, whoever's it is: any of this machine's disks that no other test takes away.
    let Some(live) = a_disk() else {
        println!("SKIP nodes_of_others_are_left_alone: no disk here whose device a node could name");
        return;
    };
    mknod(&path, SFlag::S_IFBLK, Mode::from_bits_truncate(0o600), live).unwrap();
    assert!(matches!(node::place(&path, second, &[]), Err(NodeError::Live { .. })));
    assert_eq!(node::rdev(&path), Some(live));
    node::place(&path, second, &[live]).unwrap();
    assert_eq!(node::rdev(&path), Some(second));
}

fn a_disk() -> Option<u64> {
    let is_lasting = |entry: &fs::DirEntry| {
        let place = fs::canonicalize(entry.path()).unwrap_or_default();
        // Loop devices and their like, and iSCSI's.
        !place.iter().any(|part| part == "virtual" || part.as_encoded_bytes().starts_with(b"session"))
    };
    fs::read_dir("/sys/block").ok()?.filter_map(Result::ok).filter(is_lasting).find_map(|entry| {
        let read = |name| fs::read_to_string(entry.path().join(name)).ok();
        let numbers = read("dev")?;
        let (major, minor) = numbers.trim().split_once(':')?;
        let in_use = read("size")?.trim() != "0";
        in_use.then(|| makedev(major.parse().unwrap_or(0), minor.parse().unwrap_or(0)))
    })
}

#[test]
fn a_second_keeper_is_refused() {
    if skip("a_second_keeper_is_refused", &[]) {
        return;
    }
    let rig = Rig::start("second", 16 * MIB, 512, false);
    let mut second = rig.spawn_keeper();
    assert!(!second.wait().unwrap().success());
    let log = fs::read_to_string(rig.path("log")).unwrap();
    assert!(log.contains("another keeper holds"), "{log}");
    assert!(Path::new(&rig.socket).exists());
    assert_eq!(rig.info().volume, rig.name);
    rig.stop();
}
