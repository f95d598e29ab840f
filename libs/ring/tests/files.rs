//! Files over a ring: O_DIRECT from and to payloads, sync, allocation; and what a ring does with time, bells,
//! cancellation and its own end.

mod drive;

use std::fs::OpenOptions;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use drive::{completions, pair, pattern, token};
use lh_ring::{Bell, CHUNK, Falloc, Fd, Payload, Pool, Ring, Rx, Tx};

fn direct_file() -> (tempfile::NamedTempFile, Fd) {
    // Beside the build, not on a tmpfs: O_DIRECT is the point.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("file");
    let direct = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(file.path())
        .expect("O_DIRECT");
    (file, Fd::new(direct))
}

fn filled(pool: &Pool, seed: u32, len: usize) -> Payload {
    let mut payload = pool.alloc(u32::try_from(len).expect("small"), 4096).expect("room");
    payload.write_at(0, &pattern(seed, len));
    payload
}

#[test]
fn payloads_go_to_disk_and_back_without_a_copy() {
    let (file, fd) = direct_file();
    let mut ring = Ring::new(4).expect("io_uring");
    let pool = Pool::new(1 << 20, 8 << 20).expect("pool");
    let _shift = pool.alloc(4096, 4096).expect("room");
    let sizes = [4096, 65536, CHUNK, 3 * CHUNK - 4096, 1 << 20];
    let mut offset = 0;
    for (i, len) in (0..).zip(sizes) {
        let payload = filled(&pool, i, len);
        // More operations than the submission queue has places.
        ring.writev(token(1, 0), &fd, offset, &payload);
        offset += len as u64;
    }
    for c in completions(&mut ring, sizes.len()) {
        assert!(sizes.contains(&(c.result.expect("written") as usize)));
    }
    ring.fdatasync(token(2, 0), &fd);
    assert_eq!(*completions(&mut ring, 1)[0].result.as_ref().expect("synced"), 0);
    offset = 0;
    for (i, len) in (0..).zip(sizes) {
        let into = pool.alloc(u32::try_from(len).expect("small"), 4096).expect("room");
        ring.readv(token(3, 0), &fd, offset, into);
        offset += len as u64;
        let mut done = completions(&mut ring, 1);
        let c = done.remove(0);
        assert_eq!(c.result.expect("read") as usize, len);
        let mut payload = c.payload.expect("given back");
        assert!(payload.to_vec() == pattern(i, len));
        payload.write_at(0, b"still exclusive");
    }
    let bytes = std::fs::read(file.path()).expect("read");
    assert!(bytes[4096..4096 + 65536] == pattern(1, 65536));
}

#[test]
fn ranges_are_allocated_zeroed_and_punched() {
    let (file, fd) = direct_file();
    let mut ring = Ring::new(4).expect("io_uring");
    let pool = Pool::new(1 << 20, 8 << 20).expect("pool");
    ring.writev(token(1, 0), &fd, 0, &filled(&pool, 1, 65536));
    completions(&mut ring, 1);
    ring.fallocate(token(2, 0), &fd, Falloc::PunchHole, 4096, 8192);
    ring.fallocate(token(2, 1), &fd, Falloc::ZeroRange, 16384, 4096);
    ring.fallocate(token(2, 2), &fd, Falloc::AllocateKeepSize, 65536, 1 << 20);
    for c in completions(&mut ring, 3) {
        c.result.expect("fallocate");
    }
    let mut expected = pattern(1, 65536);
    expected[4096..12288].fill(0);
    expected[16384..20480].fill(0);
    assert!(std::fs::read(file.path()).expect("read") == expected);
    ring.fallocate(token(2, 3), &fd, Falloc::Allocate, 65536, 4096);
    completions(&mut ring, 1)[0].result.as_ref().expect("fallocate");
    assert_eq!(std::fs::metadata(file.path()).expect("stat").len(), 65536 + 4096);
}

#[test]
#[should_panic(expected = "shared")]
fn the_kernel_does_not_write_what_somebody_can_read() {
    let (_file, fd) = direct_file();
    let mut ring = Ring::new(4).expect("io_uring");
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let payload = filled(&pool, 1, 4096);
    let _reader = payload.clone();
    ring.readv(token(1, 0), &fd, 0, payload);
}

#[test]
fn a_head_and_a_payload_are_one_write() {
    let (near, far) = pair();
    let mut ring = Ring::new(4).expect("io_uring");
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let mut rx = Rx::new(&pool, 1);
    ring.writev_head(token(1, 0), &near, &[7; 16], &filled(&pool, 1, 4096));
    ring.writev_head(token(1, 1), &near, &[8; 64], &Payload::default());
    assert_eq!(*completions(&mut ring, 2)[0].result.as_ref().expect("written"), 4112);
    assert!(ring.recv(token(2, 0), &far, &mut rx, 8192));
    completions(&mut ring, 1);
    assert_eq!(rx.take(16).to_vec(), [7; 16]);
    assert!(rx.take(4096).to_vec() == pattern(1, 4096));
    assert_eq!(rx.take(64).to_vec(), [8; 64]);
}

/// An inotify descriptor: like /dev/fuse it gives whole messages, and does not wait when it is non-blocking.
fn inotify() -> Fd {
    #[expect(unsafe_code, reason = "neither the library nor std has it")]
    // SAFETY: makes a descriptor, which is ours alone.
    let fd = unsafe {
        let fd = libc::inotify_init1(libc::IN_NONBLOCK);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    };
    Fd::new(fd)
}

#[test]
fn a_device_is_read_message_by_message_and_says_when_it_has_none() {
    let directory = tempfile::tempdir().expect("directory");
    let path = std::ffi::CString::new(directory.path().as_os_str().as_encoded_bytes()).expect("no zero");
    let fd = inotify();
    #[expect(unsafe_code, reason = "as above")]
    // SAFETY: reads the terminated path.
    let watch = unsafe { libc::inotify_add_watch(fd.raw(), path.as_ptr(), libc::IN_CREATE) };
    assert!(watch >= 0);
    let mut ring = Ring::new(4).expect("io_uring");
    let pool = Pool::new(1 << 20, 4 << 20).expect("pool");
    let mut rx = Rx::new(&pool, 4096);
    let none = rx.read_now(&fd, 1 << 20).expect_err("nothing there");
    assert_eq!(none.kind(), std::io::ErrorKind::WouldBlock);
    ring.poll_in(token(2, 0), &fd);
    ring.turn(Some(Duration::ZERO)).expect("turn");
    assert!(ring.next().is_none());
    for name in ["first", "second"] {
        std::fs::write(directory.path().join(name), "").expect("write");
        if name == "first" {
            completions(&mut ring, 1);
        }
        assert!(rx.set_position(4096 - 16));
        let len = rx.read_now(&fd, 1 << 20).expect("a message");
        assert_eq!(rx.available(), len);
        rx.skip(16);
        let rest = rx.take(len - 16);
        assert!(rest.is_aligned(4096, 1) && rest.to_vec().starts_with(name.as_bytes()));
    }
    // A read on the ring waits.
    assert!(ring.read_rx(token(1, 0), &fd, &mut rx, 1 << 20));
    ring.turn(Some(Duration::from_millis(10))).expect("turn");
    assert!(ring.next().is_none() && rx.is_outstanding());
    std::fs::write(directory.path().join("third"), "").expect("write");
    let c = completions(&mut ring, 1).remove(0);
    assert_eq!(c.result.expect("a message") as usize, rx.available());
    rx.skip(16);
    assert_eq!(rx.peek::<5>(), Some(*b"third"));
}

#[test]
fn connections_are_accepted_and_shut_down() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("socket");
    let listener = Fd::new(UnixListener::bind(&path).expect("bind"));
    let mut ring = Ring::new(4).expect("io_uring");
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    ring.accept(token(1, 3), &listener);
    ring.turn(Some(Duration::ZERO)).expect("turn");
    let client = Fd::new(UnixStream::connect(&path).expect("connect"));
    let server = completions(&mut ring, 1).remove(0).accepted.expect("a connection");
    let (mut tx, mut rx) = (Tx::new(&pool), Rx::new(&pool, 1));
    tx.push_header(b"hello");
    ring.send(token(2, 0), &server, &mut tx);
    assert!(ring.recv(token(3, 0), &client, &mut rx, 5));
    completions(&mut ring, 2);
    assert_eq!(rx.peek::<5>(), Some(*b"hello"));
    assert!(ring.recv(token(3, 1), &client, &mut rx, 5));
    ring.shutdown(token(4, 0), &server);
    let done = completions(&mut ring, 2);
    let end = done.iter().find(|c| c.token.kind == 3).expect("the receive ends");
    assert_eq!(*end.result.as_ref().expect("end of stream"), 0);
}

#[test]
fn timers_run_out_and_turns_do_not_wait_longer_than_told() {
    let mut ring = Ring::new(4).expect("io_uring");
    // A turn that waited for it would bring it.
    ring.timeout(token(2, 0), Duration::from_secs(30));
    ring.turn(Some(Duration::ZERO)).expect("turn");
    ring.turn(Some(Duration::from_millis(1))).expect("turn");
    assert!(ring.next().is_none());
    let begin = Instant::now();
    ring.timeout(token(1, 0), Duration::from_millis(600));
    ring.timeout(token(1, 1), Duration::from_millis(20));
    let done = completions(&mut ring, 2);
    assert!(begin.elapsed() >= Duration::from_millis(600));
    assert_eq!(done.iter().map(|c| c.token.slot).collect::<Vec<_>>(), [1, 0]);
    assert!(done.iter().all(|c| matches!(c.result, Ok(0)) && !c.more));
}

#[test]
fn a_cancelled_operation_ends_and_others_go_on() {
    let (_near, far) = pair();
    let mut ring = Ring::new(4).expect("io_uring");
    let pool = Pool::new(1 << 20, 1 << 20).expect("pool");
    let mut rx = Rx::new(&pool, 1);
    assert!(ring.recv(token(1, 0), &far, &mut rx, 5));
    ring.poll_in(token(2, 0), &far);
    ring.timeout(token(3, 0), Duration::from_secs(100));
    ring.timeout(token(4, 0), Duration::from_millis(10));
    ring.turn(Some(Duration::ZERO)).expect("turn");
    for kind in 1..=3 {
        ring.cancel(token(kind, 0));
    }
    for c in completions(&mut ring, 4) {
        match c.token.kind {
            4 => assert_eq!(c.result.expect("ran out"), 0),
            _ => assert_eq!(c.result.expect_err("cancelled").raw_os_error(), Some(libc::ECANCELED)),
        }
    }
    assert!(!rx.is_outstanding() && ring.in_flight() == 0);
}

#[test]
fn a_bell_wakes_the_ring_each_time_and_carries_what_came_before() {
    let mut ring = Ring::new(4).expect("io_uring");
    let bell = Bell::new().expect("eventfd");
    let (send, receive) = std::sync::mpsc::channel();
    bell.ring();
    ring.wake_on(token(1, 0), &bell);
    let c = completions(&mut ring, 1).remove(0);
    assert!(c.more && c.result.is_ok());
    const MESSAGES: u32 = 20_000;
    let other = bell.clone();
    let thread = std::thread::spawn(move || {
        for i in 0..MESSAGES {
            send.send(i).expect("send");
            other.ring();
            if i % 64 == 0 {
                std::thread::yield_now();
            }
        }
    });
    let mut next = 0;
    while next < MESSAGES {
        ring.turn(Some(Duration::from_secs(20))).expect("turn");
        let rung = std::iter::from_fn(|| ring.next()).count();
        assert!(rung > 0, "no wake-up for message {next}: a bell was lost");
        while let Ok(i) = receive.try_recv() {
            assert_eq!(i, next);
            next += 1;
        }
    }
    thread.join().expect("thread");
    ring.cancel(token(1, 0));
    let last = std::iter::repeat_with(|| completions(&mut ring, 1).remove(0)).find(|c| !c.more);
    assert!(last.expect("the end").token == token(1, 0));
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn more_completions_than_the_queue_holds_all_arrive_in_order() {
    let mut ring = Ring::new(2).expect("io_uring");
    let (near, far) = pair();
    nix::unistd::write(&near, b"x").expect("write");
    for slot in 0..1000 {
        // Readable: each completes when it is submitted. Nobody takes completions meanwhile.
        ring.poll_in(token(1, slot), &far);
    }
    let done = completions(&mut ring, 1000);
    assert!(done.iter().map(|c| c.token.slot).eq(0..1000));
}

/// True if all that a ring had in flight when it was dropped was given back.
fn is_given_back_by_a_dropped_ring(file: &tempfile::NamedTempFile) -> bool {
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(file.path());
    let fd = Fd::new(direct.expect("O_DIRECT"));
    let (_near, far) = pair();
    let pool = Pool::new(1 << 20, 16 << 20).expect("pool");
    let mut ring = Ring::new(64).expect("io_uring");
    let mut rx = Rx::new(&pool, 1);
    let bell = Bell::new().expect("eventfd");
    assert!(ring.recv(token(1, 0), &far, &mut rx, 100));
    ring.timeout(token(2, 0), Duration::from_secs(1000));
    ring.wake_on(token(3, 0), &bell);
    for i in 0..20_u32 {
        ring.writev(token(4, 0), &fd, u64::from(i) << 16, &filled(&pool, i, 65536));
    }
    ring.turn(Some(Duration::ZERO)).expect("turn");
    drop(rx);
    drop(ring);
    pool.used_bytes() == 0 && far.into_owned().is_some() && fd.into_owned().is_some()
}

#[test]
fn a_dropped_ring_waits_for_what_is_in_flight() {
    let (file, _) = direct_file();
    // It has its space: the disk alone decides how long the writes take, and no journal that others keep busy.
    std::fs::write(file.path(), vec![0xee; 20 << 16]).expect("write");
    file.as_file().sync_all().expect("sync");
    // What the disk does not end within the ring's patience it keeps for good. No disk stands still every time.
    assert!((0..3).any(|_| is_given_back_by_a_dropped_ring(&file)), "something was kept, each time");
}

#[test]
fn memory_of_a_dropped_ring_is_not_written_any_more() {
    let (file, fd) = direct_file();
    const SIZE: u32 = 1 << 20;
    file.as_file().set_len(u64::from(SIZE) * 32).expect("set_len");
    std::fs::write(file.path(), vec![0xee; SIZE as usize * 32]).expect("write");
    file.as_file().sync_all().expect("sync");
    for _ in 0..5 {
        let pool = Pool::new(32 << 20, 32 << 20).expect("pool");
        let mut ring = Ring::new(64).expect("io_uring");
        for i in 0..32_u32 {
            let into = pool.alloc(SIZE, 4096).expect("room");
            ring.readv(token(1, 0), &fd, u64::from(i * SIZE), into);
        }
        ring.turn(Some(Duration::ZERO)).expect("turn");
        drop(ring);
        // Where the disk stood still for longer than the ring is patient, nobody gets what it may still write.
        let kept = pool.used_bytes();
        let mut all: Vec<_> = std::iter::from_fn(|| pool.alloc(SIZE, 4096)).collect();
        assert_eq!(all.len() * SIZE as usize + kept, 32 << 20);
        all.iter_mut().for_each(|p| p.fill_zero(0..p.len()));
        std::thread::sleep(Duration::from_millis(20));
        assert!(all.iter().all(Payload::is_zero), "a read landed in memory that had been given back");
    }
}

#[test]
fn payloads_go_to_a_file_and_back_without_a_ring() {
    let file = tempfile::tempfile().expect("file");
    let pool = Pool::new(1 << 20, 8 << 20).expect("pool");
    let written = filled(&pool, 7, 2 * CHUNK + 4096);
    written.write_to(&file, 8192).expect("write");
    let mut read = pool.alloc(u32::try_from(written.len()).expect("small"), 4096).expect("room");
    assert_eq!(read.read_from(&file, 8192).expect("read"), written.len());
    assert_eq!(read.to_vec(), written.to_vec());
    assert_eq!(
        read.read_from(&file, 8192 + CHUNK as u64).expect("read"),
        CHUNK + 4096,
        "the end of the file"
    );
}
