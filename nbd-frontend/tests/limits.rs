//! Everything a client can take is bounded, and who takes it does not keep the others from being served.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use lh_block::Extent;
use lh_ring::{Answers, Frontend};
use nbd_frontend::proto::{command, error, reply};
use nbd_frontend::{Ending, Framing, Limits, Server};
use support::client::{Client, greeted};
use support::{Running, Setup};

fn pool_bytes(server: &Running) -> usize {
    server.inside(|inside| inside.pool.used_bytes())
}

/// So often the server turns before it is believed that it takes nothing more.
const IN_VAIN: u32 = 60;

/// Sends without waiting until nothing more is taken; bytes sent.
fn flood(server: &Running, client: &mut Client, kind: u16, length: u64, limit: usize) -> usize {
    client.stream.set_nonblocking(true).unwrap();
    let (mut sent, mut in_vain) = (0, 0);
    while sent < limit && in_vain < IN_VAIN {
        let (request, _) = client.encode(kind, 0, 0, length);
        let mut rest = &request[..];
        while !rest.is_empty() && in_vain < IN_VAIN {
            match client.stream.write(rest) {
                Ok(n) => {
                    rest = &rest[n..];
                    sent += n;
                    in_vain = 0;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    server.turns(1);
                    in_vain += 1;
                }
                Err(e) => panic!("{e}"),
            }
        }
    }
    client.stream.set_nonblocking(false).unwrap();
    sent
}

#[test]
fn a_client_that_never_reads_costs_little_and_keeps_nobody_waiting() {
    let server = Running::start();
    // Reads: their data waits, counted.
    let mut greedy = Client::connect(&server, Framing::Structured);
    let sent = flood(&server, &mut greedy, command::READ, 1 << 20, 64 << 20);
    assert!(sent < 8 << 20, "{sent} bytes of requests were taken");
    let load = server.load();
    let limits = server.inside(|inside| Limits::of_pool(inside.pool));
    assert!(load.payload_bytes > 0 && load.payload_bytes <= limits.connection_bytes, "{load:?}");
    // Requests that are refused: their answers wait, and then nothing more is read.
    let mut wrong = Client::connect(&server, Framing::Structured);
    let sent = flood(&server, &mut wrong, 77, 512, 64 << 20);
    assert!(sent < 8 << 20, "{sent} bytes of wrong requests were taken");
    let used = pool_bytes(&server);
    assert!(used < 16 << 20, "{used} bytes of the pool");
    // The others do not notice.
    let mut other = Client::connect(&server, Framing::Simple);
    for i in 0..100 {
        assert_eq!(other.write(i * 4096, &[5; 4096]).error, 0);
        assert_eq!(other.read(i * 4096, 4096).data, [5; 4096]);
    }
    // Who begins to read after all gets everything in order.
    for _ in 0..20 {
        assert_eq!(greedy.reply().unwrap().data.len(), 1 << 20);
        assert_eq!(wrong.reply().unwrap().error, error::EINVAL);
    }
    drop((greedy, wrong, other));
    server.until("all gone", |load| load.connections == 0 && load.payload_bytes == 0);
}

/// Nobody is closed because this host is busy: time passes where a test says so.
fn patient() -> Running {
    Setup { limits: |limits| limits.patience_s = 1000, ..Setup::default() }.start()
}

#[test]
fn who_takes_no_answer_or_never_finishes_is_closed() {
    let server = patient();
    let mut deaf = Client::connect(&server, Framing::Simple);
    for _ in 0..16 {
        deaf.header(command::READ, 0, 0, 1 << 20);
    }
    let mut half = Client::connect(&server, Framing::Simple);
    half.header(command::WRITE, 0, 0, 1 << 20);
    half.stream.write_all(&[1; 1000]).unwrap();
    let mut part = Client::connect(&server, Framing::Simple);
    part.stream.write_all(&[0x25]).unwrap();
    let shaking = greeted(&server);
    // Idle is no fault.
    let mut idle = Client::connect(&server, Framing::Simple);
    server.pass(500);
    assert_eq!(server.load().connections, 5, "too early");
    server.pass(600);
    server.until("closed", |load| load.connections == 1 && load.payload_bytes == 0);
    assert!(half.is_closed() && part.is_closed());
    assert_eq!(idle.read(0, 512).error, 0);
    drop((deaf, shaking));
}

/// It meant what it has sent, and does not stay to hear of it.
#[test]
fn what_was_sent_before_a_goodbye_is_done_though_the_client_takes_no_answer() {
    let server = patient();
    let mut deaf = Client::connect(&server, Framing::Simple);
    // More than one client's share of memory: what comes behind waits until these have been taken.
    for _ in 0..16 {
        deaf.header(command::READ, 0, 0, 1 << 20);
    }
    deaf.send_write(0, 4096, &[7; 4096]);
    deaf.header(command::DISC, 0, 0, 0);
    server.pass(500);
    assert_eq!(server.store.bytes(Extent::new(4096, 4096)), [0; 4096]);
    server.pass(600);
    server.until("closed", |load| load.connections == 0 && load.payload_bytes == 0);
    assert_eq!(server.store.bytes(Extent::new(4096, 4096)), [7; 4096]);
}

/// The memory for a write's bytes is taken before they come. Who sends one now and then would have it for ever.
#[test]
fn who_sends_a_write_byte_by_byte_is_closed() {
    let server = patient();
    let mut dribbling = Client::connect(&server, Framing::Simple);
    dribbling.header(command::WRITE, 0, 0, 1 << 20);
    for _ in 0..5 {
        // It may have been closed in between.
        let _ = dribbling.stream.write_all(&[1; 100]);
        server.pass(300);
    }
    server.until("closed", |load| load.connections == 0 && load.payload_bytes == 0);
    // Of a request that is refused no memory is taken, and it may take its time.
    let mut slow = Client::connect(&server, Framing::Simple);
    slow.header(command::WRITE, 0, support::SIZE, 4096);
    for _ in 0..8 {
        slow.stream.write_all(&[1; 512]).unwrap();
        server.pass(300);
    }
    assert_eq!(slow.reply().unwrap().error, error::ENOSPC);
}

/// The volume is to go, and nobody waits half a minute for who takes nothing.
#[test]
fn who_takes_no_answer_is_not_waited_for_by_a_server_that_stops() {
    let server = Running::start();
    let mut deaf = Client::connect(&server, Framing::Simple);
    for _ in 0..16 {
        deaf.header(command::READ, 0, 0, 1 << 20);
    }
    server.until("answers wait", |load| load.requests == 0 && load.payload_bytes > 0);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Refuse));
    assert!(!server.inside(|inside| inside.server.is_done()));
    server.until("closed", |load| load.connections == 0);
    assert!(server.inside(|inside| inside.server.is_done()));
    drop(deaf);
}

#[test]
fn who_takes_its_answers_slowly_is_not_closed() {
    let server = patient();
    let mut slow = Client::connect(&server, Framing::Simple);
    for i in 0..8 {
        slow.header(command::READ, 0, i << 20, 1 << 20);
    }
    server.until("all is ready", |load| load.requests == 0);
    let mut left = server.load().payload_bytes;
    let mut piece = vec![0; 2 * ((1 << 20) + 16)];
    for _ in 0..4 {
        slow.stream.read_exact(&mut piece).expect("closed as if it took nothing");
        // More than one send has ended by that.
        server.until("it has taken some", |load| load.payload_bytes < left || left == 0);
        left = server.load().payload_bytes;
        server.pass(400);
    }
    assert_eq!(slow.read(0, 512).error, 0);
}

/// However short the answers are, and a send with them.
#[test]
fn who_takes_short_answers_crumb_by_crumb_is_closed() {
    let server = patient();
    let mut slow = Client::connect(&server, Framing::Simple);
    for _ in 0..4000 {
        slow.header(command::READ, 0, 0, 512);
    }
    server.until("all is ready", |load| load.requests == 0 && load.payload_bytes > 1 << 20);
    // Less than a MiB in all.
    let mut piece = vec![0; 500 * (512 + 16)];
    for _ in 0..3 {
        let left = server.load().payload_bytes;
        slow.stream.read_exact(&mut piece).unwrap();
        server.until("it has taken some", |load| load.payload_bytes < left);
        server.pass(400);
    }
    server.until("closed", |load| load.connections == 0 && load.payload_bytes == 0);
}

#[test]
fn connections_beyond_the_limits_are_refused_and_those_that_are_there_feel_nothing() {
    let limits = |limits: &mut Limits| (limits.connections, limits.transmissions) = (4, 2);
    let server = Setup { limits, ..Setup::default() }.start();
    let mut served = [(); 2].map(|()| Client::connect(&server, Framing::Simple));
    assert_eq!(Client::try_connect(&server, Framing::Simple).err(), Some(reply::ERR_POLICY));
    server.until("it has gone", |load| load.connections == 2);
    let mut shaking = [(); 2].map(|()| greeted(&server));
    // Who says nothing keeps nobody out.
    let _fifth = greeted(&server);
    assert_eq!(shaking[0].read(&mut [0]).unwrap(), 0, "the first of them made room");
    assert_eq!(server.load().connections, 4);
    for client in &mut served {
        assert_eq!(client.read(0, 512).error, 0);
    }
    served[0].header(command::DISC, 0, 0, 0);
    assert!(served[0].is_closed());
    server.until("a place", |load| load.transmissions == 1);
    let mut next = Client::connect(&server, Framing::Simple);
    assert_eq!(next.read(0, 512).error, 0);
    let limits = |limits: &mut Limits| (limits.connections, limits.transmissions) = (2, 4);
    let server = Setup { limits, ..Setup::default() }.start();
    let mut served = [(); 2].map(|()| Client::connect(&server, Framing::Simple));
    let mut third = server.connect();
    assert_eq!(third.read(&mut [0]).unwrap(), 0, "closed without a greeting");
    for client in &mut served {
        assert_eq!(client.read(0, 512).error, 0);
    }
}

/// Time that has passed for another client while this one was idle does not count.
#[test]
fn who_was_idle_has_all_its_time_to_take_its_answers() {
    let server = patient();
    let mut idle = Client::connect(&server, Framing::Simple);
    assert_eq!(idle.read(0, 512).error, 0);
    let mut other = Client::connect(&server, Framing::Simple);
    let (write, _) = other.encode(command::WRITE, 0, 0, 4096);
    for byte in &write[..5] {
        other.stream.write_all(&[*byte]).unwrap();
        server.pass(400);
    }
    for i in 0..2 {
        idle.header(command::READ, 0, i << 20, 1 << 20);
    }
    server.until("its answers wait", |load| load.requests == 0 && load.payload_bytes > 0);
    server.pass(500);
    for _ in 0..2 {
        assert_eq!(idle.reply().expect("closed as if it had been asked before").data.len(), 1 << 20);
    }
}

/// While the device is full nothing is read. The time for the rest of a request begins when it is asked for.
#[test]
fn what_is_asked_for_late_may_come_late() {
    let geometry = lh_block::Geometry { depth: 1, ..support::GEOMETRY };
    let limits = |limits: &mut Limits| limits.patience_s = 1000;
    let server = Setup { geometry, limits, ..Setup::default() }.start();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut client = Client::connect(&server, Framing::Simple);
    let (read, first) = client.encode(command::READ, 0, 0, 512);
    let (write, second) = client.encode(command::WRITE, 0, 0, 1 << 20);
    client.stream.write_all(&[read, write, vec![1; 1000]].concat()).unwrap();
    server.until("full", |load| load.requests == 1);
    server.pass(1500);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    assert_eq!(client.reply().unwrap().cookie, first);
    server.pass(500);
    client.stream.write_all(&vec![1; (1 << 20) - 1000]).unwrap();
    assert_eq!(client.reply().expect("closed as if it had been asked before").cookie, second);
}

/// Payloads of all clients together are more than the budget, and each of them is received half before the next one
/// begins: whoever has begun can finish.
#[test]
fn half_received_payloads_do_not_wait_for_each_other() {
    let small = Setup { pool_bytes: 8 << 20, ..Setup::default() };
    let server = small.start();
    let threads: Vec<_> = (0..8_u8)
        .map(|i| {
            let mut client = Client::connect(&server, Framing::Simple);
            let (head, _) = client.encode(command::WRITE, 0, u64::from(i) << 20, 1 << 20);
            std::thread::spawn(move || {
                for round in 0..4_u8 {
                    let data = vec![i * 4 + round + 1; 1 << 20];
                    client.stream.write_all(&head).unwrap();
                    client.stream.write_all(&data[..500_000]).unwrap();
                    std::thread::sleep(Duration::from_millis(20));
                    client.stream.write_all(&data[500_000..]).unwrap();
                    assert_eq!(client.reply().unwrap().error, 0);
                }
            })
        })
        .collect();
    let mut most = 0;
    while threads.iter().any(|thread| !thread.is_finished()) {
        most = most.max(server.load().payload_bytes);
        std::thread::sleep(Duration::from_millis(1));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(most > 0 && most <= 4 << 20, "{most}");
    for i in 0..8_u8 {
        let bytes = server.store.bytes(Extent::new(u64::from(i) << 20, 1 << 20));
        assert!(bytes.iter().all(|b| *b == i * 4 + 4));
    }
    server.until("nothing kept", |load| load.payload_bytes == 0);
}

/// Others are answered in between: each lies in a chunk of its own, of which nobody else would get the rest.
#[test]
fn small_answers_that_nobody_takes_do_not_fill_the_memory() {
    const COUNT: u64 = 500;
    let server = Running::start();
    let mut other = Client::connect(&server, Framing::Simple);
    let bytes: Vec<_> = (0..COUNT).flat_map(|i| [i.to_le_bytes()[0]; 512]).collect();
    assert_eq!(other.write(0, &bytes).error, 0);
    let mut stalls = Client::connect(&server, Framing::Simple);
    stalls.header(command::READ, 0, 1 << 20, 1 << 20);
    for i in 0..COUNT {
        stalls.header(command::READ, 0, i * 512, 512);
        assert_eq!(other.read(1 << 20, 128 << 10).error, 0, "after {i}");
    }
    let used = pool_bytes(&server);
    assert!(used < 24 << 20, "{used} bytes of the pool");
    assert_eq!(stalls.reply().unwrap().data.len(), 1 << 20);
    let taken: Vec<_> = (0..COUNT).flat_map(|_| stalls.reply().unwrap().data).collect();
    assert!(taken == bytes);
}

#[test]
fn a_flood_on_one_connection_leaves_the_others_their_turn() {
    let geometry = lh_block::Geometry { depth: 4, ..support::GEOMETRY };
    let server = Setup { geometry, ..Setup::default() }.start();
    let mut flood = Client::connect(&server, Framing::Simple);
    let mut writer = flood.stream.try_clone().unwrap();
    let (stop, stopped) = channel::<()>();
    let mut burst = Vec::new();
    for _ in 0..256 {
        burst.extend_from_slice(&flood.encode(command::TRIM, 0, 0, 4096).0);
    }
    let sender =
        std::thread::spawn(move || while stopped.try_recv().is_err() && writer.write_all(&burst).is_ok() {});
    let answered = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&answered);
    let reader = std::thread::spawn(move || {
        while flood.reply().is_ok() {
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    let mut other = Client::connect(&server, Framing::Simple);
    // Both threads may be late to begin: reads count from when the flood runs, and go on until it was one.
    server.until("the flood", |_| answered.load(Ordering::Relaxed) > 0);
    let begun = Instant::now();
    let mut reads = 0;
    while reads < 200 || answered.load(Ordering::Relaxed) <= 1000 {
        // Without its turn, it would wait for 20 s and then fail.
        assert_eq!(other.read(0, 512).error, 0);
        reads += 1;
        assert!(begun.elapsed() < Duration::from_secs(60), "the flood was none");
    }
    stop.send(()).unwrap();
    sender.join().unwrap();
    drop(server);
    reader.join().unwrap();
}

#[test]
fn an_idle_server_does_nothing() {
    let server = Running::start();
    let mut client = Client::connect(&server, Framing::Simple);
    assert_eq!(client.write(0, &[1; 4096]).error, 0);
    // The timer of the handshake runs out once more, and on a busy host anything may come late. One that is never still is found.
    let is_still = |_| {
        let before = server.inside(|inside| inside.ring.turns());
        std::thread::sleep(Duration::from_millis(1500));
        // Each look from outside is a turn or two.
        server.inside(|inside| inside.ring.turns()) - before <= 3
    };
    assert!((0..10).any(is_still), "it turns and turns");
    assert_eq!(client.read(0, 4096).error, 0);
}

#[test]
fn connections_take_turns() {
    let geometry = lh_block::Geometry { depth: 32, ..support::GEOMETRY };
    let server = Setup { geometry, ..Setup::default() }.start();
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(&server, Framing::Simple)).collect();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut send = |client: usize, count: u64| {
        let requests: Vec<u8> =
            (0..count).flat_map(|i| clients[client].encode(command::READ, 0, i * 512, 512).0).collect();
        clients[client].stream.write_all(&requests).unwrap();
    };
    send(0, 32);
    server.until("full", |load| load.requests == 32);
    send(1, 64);
    send(2, 64);
    // It has taken both. The device takes none.
    server.turn();
    assert_eq!(server.load().requests, 32);
    // The places of the first are shared by the others, to equal parts. All its answers are awaited: until then
    // the server counts 32 requests because nothing has happened yet.
    server.inside(|inside| inside.disk.set_answers(Answers::Next(32)));
    for _ in 0..32 {
        clients[0].reply().unwrap();
    }
    server.until("full again", |load| load.requests == 32);
    server.inside(|inside| inside.disk.set_answers(Answers::Next(32)));
    for client in &mut clients[1..] {
        for _ in 0..16 {
            client.reply().unwrap();
        }
    }
}

/// One turn of the server, and of no other.
fn turn(inside: &mut lh_rig::Inside<'_, Server>) {
    inside.server.turn(inside.ring, inside.disk);
    inside.ring.turn(Some(Duration::ZERO)).unwrap();
    while let Some(completion) = inside.ring.next() {
        if completion.token.owner == support::OWNER {
            inside.server.completion(inside.ring, inside.disk, completion);
        }
    }
}

/// The device takes one request at a time, and who came first has always another one; however many turns of the server lie between
/// one answer of the device and the next.
#[test]
fn a_place_that_comes_free_goes_to_each_in_turn() {
    for turns in 1..6 {
        let geometry = lh_block::Geometry { depth: 1, ..support::GEOMETRY };
        let server = Setup { geometry, ..Setup::default() }.start();
        server.inside(|inside| inside.disk.set_answers(Answers::Held));
        let mut first = Client::connect(&server, Framing::Simple);
        let many: Vec<u8> = (0..256).flat_map(|_| first.encode(command::READ, 0, 0, 512).0).collect();
        first.stream.write_all(&many).unwrap();
        server.until("full", |load| load.requests == 1);
        let mut second = Client::connect(&server, Framing::Simple);
        second.header(command::READ, 0, 0, 512);
        server.until("both wait", |load| load.blocked == 2);
        // The first has asked for more than these let through.
        server.inside(move |inside| {
            for _ in 0..100 {
                inside.disk.set_answers(Answers::Next(1));
                (0..turns).for_each(|_| turn(inside));
            }
        });
        // It would wait for 20 s, and then fail.
        assert_eq!(second.reply().unwrap().error, 0, "{turns} turns");
    }
}

thread_local! {
    /// Memory that somebody else has.
    static HOARD: std::cell::RefCell<Vec<lh_ring::Payload>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[test]
fn the_last_memory_is_left_to_the_device() {
    let server = Setup { pool_bytes: 8 << 20, ..Setup::default() }.start();
    let mut client = Client::connect(&server, Framing::Simple);
    assert_eq!(client.read(0, 512).error, 0);
    server.inside(|inside| {
        let spare = Limits::of_pool(inside.pool).spare_chunks;
        while inside.pool.free_chunks() > spare {
            HOARD.with_borrow_mut(|hoard| hoard.push(inside.pool.alloc(128 << 10, 4096).unwrap()));
        }
    });
    // What was asked for before still comes, then nothing is asked for any more.
    assert_eq!(client.read(0, 512).error, 0);
    client.header(command::READ, 0, 0, 512);
    client.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert_eq!(client.reply().unwrap_err().kind(), ErrorKind::WouldBlock);
    server.inside(|_| HOARD.with_borrow_mut(Vec::clear));
    client.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(client.reply().unwrap().error, 0);
}

#[test]
fn nothing_is_read_while_the_device_is_full() {
    let geometry = lh_block::Geometry { depth: 2, ..support::GEOMETRY };
    let server = Setup { geometry, ..Setup::default() }.start();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut client = Client::connect(&server, Framing::Simple);
    let sent = flood(&server, &mut client, command::READ, 4096, 16 << 20);
    assert!(sent < 2 << 20, "{sent} bytes were taken");
    let load = server.load();
    assert_eq!((load.requests, load.payload_bytes), (2, 8192));
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    for _ in 0..100 {
        assert_eq!(client.reply().unwrap().data.len(), 4096);
    }
}

#[test]
fn connections_can_be_served_by_another_thread() {
    let (first, second) = (Running::start(), Running::start());
    let (away, moved) = channel();
    first.inside(move |inside| {
        let mut count = 0;
        inside.server.set_spread(Box::new(move |connection| {
            count += 1;
            if count % 2 == 0 {
                away.send(connection).unwrap();
                return None;
            }
            Some(connection)
        }));
    });
    let mut here = Client::connect(&first, Framing::Simple);
    let stream = first.connect();
    let connection = moved.recv().unwrap();
    second.inside(move |inside| inside.server.adopt(inside.ring, connection));
    second.until("adopted", |load| load.connections == 1);
    assert_eq!(first.load().connections, 1);
    assert_eq!(here.read(0, 512).error, 0);
    drop(stream);
    second.until("gone", |load| load.connections == 0);
}
