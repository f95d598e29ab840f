//! Who leaves, and who is stopped, in the middle: what is done, what is dropped, and what is answered then.

mod support;

use std::any::Any;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use lh_block::{Extent, Geometry};
use lh_ring::{Answers, Completion, Frontend, Token};
use nbd_frontend::proto::{command, error};
use nbd_frontend::{Ending, Framing, Lane};
use support::client::Client;
use support::{GEOMETRY, Running, Setup};

/// A server that has room for so many requests, which are not answered yet.
fn held(depth: u32) -> Running {
    let server = Setup { geometry: Geometry { depth, ..GEOMETRY }, ..Setup::default() }.start();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    server
}

/// Does something of which the server sees nothing before all of it is done.
fn unseen(server: &Running, f: impl FnOnce()) {
    let ((stopped, stops), (go, goes)) = (channel(), channel::<()>());
    std::thread::scope(|threads| {
        // Goes also if what is done panics.
        let go = go;
        threads.spawn(move || {
            server.inside(move |_| {
                stopped.send(()).unwrap();
                let _ = goes.recv();
            });
        });
        stops.recv().unwrap();
        f();
        go.send(()).unwrap();
    });
}

/// Unmaps of one block each.
fn trims(client: &mut Client, count: u64) -> Vec<u8> {
    (0..count).flat_map(|i| client.encode(command::TRIM, 0, i * 4096, 4096).0).collect()
}

fn gone(server: &Running) {
    server.until("gone", |load| load.connections == 0 && load.payload_bytes == 0);
}

/// Its header came while the client was there, and the last of its bytes with the client's end.
#[test]
fn a_write_whose_client_hangs_up_behind_its_last_byte_is_dropped() {
    let server = held(4);
    let _another = server.connections.add();
    let mut client = Client::connect(&server, Framing::Simple);
    let (head, _) = client.encode(command::WRITE, 0, 0, 4096);
    client.stream.write_all(&head).unwrap();
    server.until("the header", |load| load.payload_bytes == 4096);
    unseen(&server, || {
        client.stream.write_all(&[7; 4096]).unwrap();
        client.stream.shutdown(Shutdown::Both).unwrap();
    });
    gone(&server);
    assert_eq!(server.inside(|inside| inside.disk.submitted()), 0);
}

/// Changes without data are looked after as those with it, also when the client has been seen there before.
#[test]
fn a_trim_whose_client_has_hung_up_is_dropped() {
    let server = held(4);
    let _another = server.connections.add();
    let mut client = Client::connect(&server, Framing::Simple);
    client.header(command::TRIM, 0, 0, 4096);
    server.until("the first", |load| load.requests == 1);
    unseen(&server, || {
        client.header(command::TRIM, 0, 4096, 4096);
        client.header(command::WRITE_ZEROES, 0, 8192, 4096);
        client.stream.shutdown(Shutdown::Both).unwrap();
    });
    gone(&server);
    assert_eq!(server.inside(|inside| inside.disk.submitted()), 1);
}

/// Whether what a client has sent is done that has hung up meanwhile, by a server that has so many others.
fn is_done(server: &Running, client: &mut Client, others: usize) -> bool {
    unseen(server, || {
        client.header(command::TRIM, 0, 0, 4096);
        client.stream.shutdown(Shutdown::Both).unwrap();
    });
    server.until("seen", |load| load.requests > 0 || load.connections == others);
    server.inside(|inside| inside.disk.submitted()) > 0
}

/// Whoever has sent it again has done so on another connection, of this server or another one of the volume.
#[test]
fn what_a_client_left_is_done_while_the_volume_has_no_other_connection() {
    type Other = fn(&Running) -> Box<dyn Any>;
    let others: [(&str, Other); 6] = [
        ("none", |_| Box::new(())),
        ("greeted", |server| {
            let mut stream = server.connect();
            stream.read_exact(&mut [0; 18]).unwrap();
            Box::new(stream)
        }),
        ("served", |server| Box::new(Client::connect(server, Framing::Simple).stream)),
        ("agreed", |server| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            server.inside(move |inside| inside.server.adopt_agreed(theirs.into()));
            Box::new(ours)
        }),
        ("elsewhere", |server| Box::new(server.connections.add())),
        ("not counted", |server| {
            let count = server.connections.beside_uncounted();
            server.inside(move |inside| inside.server.count_with(count));
            Box::new(())
        }),
    ];
    for (name, other) in others {
        let server = held(4);
        let mut client = Client::connect(&server, Framing::Simple);
        let other = other(&server);
        let here = usize::from(!matches!(name, "none" | "elsewhere" | "not counted"));
        assert_eq!(is_done(&server, &mut client, here), name == "none", "{name}");
        drop(other);
    }
}

/// Whoever came and went may have done again what this one has left; not before it was last seen there.
#[test]
fn who_has_had_company_is_looked_for_until_it_is_seen_alone() {
    for is_seen in [false, true] {
        let server = held(4);
        let mut client = Client::connect(&server, Framing::Simple);
        drop(Client::connect(&server, Framing::Simple));
        drop(server.connect());
        server.until("alone", |load| load.connections == 1);
        if is_seen {
            client.header(command::TRIM, 0, 4096, 4096);
            server.until("the first", |load| load.requests == 1);
        }
        let before = u64::from(is_seen);
        unseen(&server, || {
            client.header(command::TRIM, 0, 0, 4096);
            client.stream.shutdown(Shutdown::Both).unwrap();
        });
        server.until("gone", |load| load.connections == 0);
        assert_eq!(server.inside(|inside| inside.disk.submitted()), 2 * before, "seen: {is_seen}");
    }
}

/// A device may have requests that it has not begun.
#[test]
fn what_the_device_has_of_who_left_is_abandoned() {
    let server = held(8);
    let mut stays = Client::connect(&server, Framing::Simple);
    let mut leaves = Client::connect(&server, Framing::Simple);
    for client in [&mut stays, &mut leaves] {
        client.header(command::TRIM, 0, 0, 4096);
        client.header(command::READ, 0, 0, 4096);
    }
    server.until("all", |load| load.requests == 4);
    leaves.stream.shutdown(Shutdown::Both).unwrap();
    server.until("one", |load| load.connections == 1);
    assert_eq!(server.inside(|inside| inside.disk.abandoned()), 2);
    // It meant what it had sent before its goodbye, which the server has heard when it has greeted another one.
    stays.header(command::DISC, 0, 0, 0);
    let another = Client::connect(&server, Framing::Simple);
    let stream = stays.stream.try_clone().unwrap();
    server.inside(move |inside| {
        stream.shutdown(Shutdown::Write).unwrap();
        inside.server.look(inside.disk);
        inside.disk.set_answers(Answers::AtOnce);
    });
    drop(another);
    gone(&server);
    assert_eq!(server.inside(|inside| inside.disk.abandoned()), 2);
}

/// Before the device begins what has waited in it, and whatever the server has heard of its clients by then.
#[test]
fn who_left_without_being_noticed_is_found_when_the_device_asks() {
    for others in [0, 1] {
        let server = held(4);
        let mut client = Client::connect(&server, Framing::Simple);
        let _others: Vec<_> = (0..others).map(|_| server.connections.add()).collect();
        client.header(command::TRIM, 0, 0, 4096);
        server.until("it", |load| load.requests == 1);
        let look = |inside: &mut lh_rig::Inside<'_, nbd_frontend::Server>| {
            inside.server.look(inside.disk);
            inside.disk.abandoned()
        };
        assert_eq!(server.inside(look), 0, "it is there");
        let stream = client.stream.try_clone().unwrap();
        let abandoned = server.inside(move |inside| {
            stream.shutdown(Shutdown::Both).unwrap();
            look(inside)
        });
        assert_eq!(abandoned, others, "while it has the only connection it can have sent nothing again");
    }
}

/// A full device keeps the server from reading it, in what has been received or not.
#[test]
fn a_goodbye_that_was_not_read_is_kept_to_when_the_device_asks() {
    for (is_received, says_it) in [(true, true), (true, false), (false, true), (false, false)] {
        let server = held(1);
        let _another = server.connections.add();
        let mut client = Client::connect(&server, Framing::Simple);
        let mut bytes = trims(&mut client, 2);
        bytes.extend(client.encode(command::WRITE, 0, 4096, 512).0);
        let goodbye = client.encode(command::DISC, 0, 0, 0).0;
        // Data is none.
        bytes.resize(bytes.len() + 512 - goodbye.len(), 7);
        bytes.extend(&goodbye);
        if says_it {
            bytes.extend(&goodbye);
        }
        let now = if is_received { bytes.len() } else { 28 };
        client.stream.write_all(&bytes[..now]).unwrap();
        server.until("the device is full", |load| load.requests == 1);
        let mut stream = client.stream.try_clone().unwrap();
        let abandoned = server.inside(move |inside| {
            stream.write_all(&bytes[now..]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            inside.server.look(inside.disk);
            inside.disk.set_answers(Answers::AtOnce);
            inside.disk.abandoned()
        });
        assert_eq!(abandoned, u64::from(!says_it), "received: {is_received}");
        gone(&server);
        let submitted = server.inside(|inside| inside.disk.submitted());
        assert_eq!(submitted, if says_it { 3 } else { 1 }, "received: {is_received}");
    }
}

/// A goodbye is heard whether its client stays for the answers or not: what was sent before it is done all the same.
#[test]
fn what_was_sent_before_a_goodbye_is_done_though_nobody_takes_the_answers() {
    const COUNT: u64 = 20;
    for (tcp, others) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let server = held(4);
        let _others: Vec<_> = (0..others).map(|_| server.connections.add()).collect();
        let connect = if tcp { Client::connect_tcp } else { Client::connect };
        let mut client = connect(&server, Framing::Structured);
        unseen(&server, || {
            for i in 0..COUNT {
                client.send_write(0, i * 4096, &[3; 4096]);
            }
            client.header(command::READ, 0, 0, 4096);
            client.header(command::BLOCK_STATUS, 0, 0, 4096);
            client.header(77, 0, 0, 0);
            client.header(command::DISC, 0, 0, 0);
            client.stream.shutdown(Shutdown::Both).unwrap();
            if tcp {
                lh_rig::until_end_arrives(&client.stream);
            }
        });
        drop(client);
        server.until("full", |load| load.requests == 4);
        // One answer at a time, each of which nobody takes.
        for _ in 0..2 * COUNT {
            server.inside(|inside| inside.disk.set_answers(Answers::Next(1)));
            server.turn();
        }
        server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
        gone(&server);
        let (submitted, abandoned) =
            server.inside(|inside| (inside.disk.submitted(), inside.disk.abandoned()));
        assert_eq!((submitted, abandoned), (COUNT + 2, 0), "tcp: {tcp}, others: {others}");
        assert!(server.store.bytes(Extent::new(0, COUNT * 4096)).iter().all(|b| *b == 3));
    }
}

/// That nobody takes answers any more may be told before what was received at the same moment: there may be a goodbye in that.
#[test]
fn a_goodbye_that_comes_with_the_end_of_the_answers_is_heard() {
    let server = Running::start();
    let _another = server.connections.add();
    let mut client = Client::connect(&server, Framing::Simple);
    for _ in 0..4 {
        client.header(command::READ, 0, 0, 1 << 20);
    }
    server.until("its answers wait", |load| load.requests == 0 && load.payload_bytes > 1 << 20);
    server.turn();
    let mut last = [client.encode(command::WRITE, 0, 4096, 4096).0, vec![7; 4096]].concat();
    last.extend(client.encode(command::DISC, 0, 0, 0).0);
    let mut stream = client.stream.try_clone().unwrap();
    server.inside(move |inside| {
        stream.write_all(&last).unwrap();
        stream.shutdown(Shutdown::Both).unwrap();
        inside.ring.turn(Some(Duration::ZERO)).unwrap();
        // The ring has received all of it, and gives the end of the send first.
        let result = Err(ErrorKind::BrokenPipe.into());
        let token = Token::new(support::OWNER, support::SEND, 0, 1);
        let sent = Completion { token, result, more: false, payload: None, accepted: None };
        inside.server.completion(inside.ring, inside.disk, sent);
    });
    gone(&server);
    assert_eq!(server.inside(|inside| (inside.disk.submitted(), inside.disk.abandoned())), (5, 0));
    assert_eq!(server.store.bytes(Extent::new(4096, 4096)), [7; 4096]);
}

/// Its goodbye is there, though not read: nothing has to be held until it is, neither more than one client may have nor more than is
/// held of others.
#[test]
fn what_was_sent_before_a_goodbye_is_done_however_much_it_is() {
    let small = |limits: &mut nbd_frontend::Limits| limits.connection_bytes = 8192;
    let server = Setup { limits: small, ..Setup::default() }.start();
    let _another = server.connections.add();
    let mut client = Client::connect(&server, Framing::Simple);
    unseen(&server, || {
        for i in 0..3 {
            client.send_write(0, i * 4096, &[7; 4096]);
        }
        let all = trims(&mut client, 300);
        client.stream.write_all(&all).unwrap();
        client.header(command::DISC, 0, 0, 0);
        client.stream.shutdown(Shutdown::Write).unwrap();
    });
    gone(&server);
    assert_eq!(server.inside(|inside| inside.disk.submitted()), 303);
}

/// The device is full when the client's goodbye comes: what waits for room was meant, whoever stops the server.
#[test]
fn what_waits_behind_a_goodbye_is_done_by_a_server_that_is_stopped() {
    for ending in [Ending::Refuse, Ending::Leave] {
        let server = held(2);
        let _another = server.connections.add();
        let mut client = Client::connect(&server, Framing::Simple);
        unseen(&server, || {
            let all = trims(&mut client, 3);
            client.stream.write_all(&all).unwrap();
            client.header(command::DISC, 0, 0, 0);
            client.stream.shutdown(Shutdown::Write).unwrap();
        });
        server.until("full", |load| load.requests == 2);
        server.inside(move |inside| {
            inside.server.stop(inside.ring, ending);
            inside.disk.set_answers(Answers::AtOnce);
        });
        for _ in 0..3 {
            assert_eq!(client.reply().expect("answered").error, 0, "{ending:?}");
        }
        assert!(client.is_closed());
        gone(&server);
    }
}

/// Without a goodbye nobody knows whether it was meant: the client may have sent it elsewhere.
#[test]
fn what_is_held_without_a_goodbye_is_dropped_by_a_server_that_is_stopped() {
    for ending in [Ending::Refuse, Ending::Leave] {
        let server = held(1);
        let _another = server.connections.add();
        let mut client = Client::connect(&server, Framing::Simple);
        unseen(&server, || {
            client.header(command::TRIM, 0, 0, 4096);
            // The device is full with it, and the rest of the stream waits.
            client.header(command::READ, 0, 0, 512);
            client.header(command::READ, 0, 0, 512);
            client.stream.shutdown(Shutdown::Write).unwrap();
        });
        server.until("full", |load| load.requests == 1);
        server.inside(move |inside| {
            inside.server.stop(inside.ring, ending);
            inside.disk.set_answers(Answers::AtOnce);
        });
        gone(&server);
        assert_eq!(server.inside(|inside| inside.disk.submitted()), 1, "{ending:?}");
    }
}

#[test]
fn a_goodbye_to_a_server_that_is_stopped_has_no_answer() {
    let server = held(4);
    let mut client = Client::connect(&server, Framing::Structured);
    let first = client.send_write(0, 0, &[1; 4096]);
    server.until("submitted", |load| load.requests == 1);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Refuse));
    let refused = client.send_write(0, 4096, &[1; 4096]);
    let reply = client.reply().unwrap();
    assert_eq!((reply.cookie, reply.error), (refused, error::ESHUTDOWN));
    client.header(command::DISC, 0, 0, 0);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    assert_eq!(client.reply().unwrap().cookie, first);
    assert!(client.is_closed());
}

#[test]
fn who_shuts_its_side_is_still_answered_by_a_server_that_gives_way() {
    let server = held(4);
    let mut client = Client::connect(&server, Framing::Simple);
    let first = client.send_write(0, 0, &[1; 4096]);
    server.until("submitted", |load| load.requests == 1);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Leave));
    client.stream.shutdown(Shutdown::Write).unwrap();
    // It has seen that.
    server.turn();
    assert_eq!(server.load().connections, 1);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    assert_eq!(client.reply().expect("answered").cookie, first);
}

/// What the device has of a client that is gone may still change the volume: whoever serves it next has to wait for that.
#[test]
fn a_stopped_server_is_not_done_before_the_device_is() {
    let server = held(4);
    let mut client = Client::connect(&server, Framing::Simple);
    client.send_write(0, 0, &[1; 4096]);
    server.until("submitted", |load| load.requests == 1);
    drop(client);
    server.until("gone", |load| load.connections == 0);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Leave));
    assert!(!server.inside(|inside| inside.server.is_done()));
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    server.until("answered", |load| load.requests == 0);
    assert!(server.inside(|inside| inside.server.is_done()));
}

/// Another thread may have accepted it, or the kernel's client have been given it, in the moment in which the server was stopped.
#[test]
fn nobody_comes_in_to_a_server_that_is_stopped() {
    let server = held(4);
    let mut busy = Client::connect(&server, Framing::Simple);
    busy.send_write(0, 0, &[1; 4096]);
    server.until("submitted", |load| load.requests == 1);
    let [(mut one, a), (mut two, b), (mut three, c)] = std::array::from_fn(|_| UnixStream::pair().unwrap());
    server.inside(move |inside| {
        inside.server.stop(inside.ring, Ending::Leave);
        inside.server.adopt(inside.ring, a.into());
        inside.server.adopt_agreed(b.into());
        inside.server.adopt_lane(c.into(), Lane { client: 1, number: 0 });
        inside.disk.set_answers(Answers::AtOnce);
    });
    for stream in [&mut one, &mut two, &mut three] {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed without a word");
    }
    gone(&server);
}

/// It owes the rest of a request that nobody will read: that is no reason not to wait for the answer to another one.
#[test]
fn an_answer_is_waited_for_whatever_the_client_has_begun_to_send() {
    let server = held(4);
    let mut client = Client::connect(&server, Framing::Simple);
    let first = client.send_write(0, 0, &[1; 4096]);
    client.header(command::WRITE, 0, 4096, 1 << 20);
    client.stream.write_all(&[2; 1000]).unwrap();
    server.until("half of it", |load| load.requests == 1 && load.payload_bytes > 1 << 20);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Leave));
    // Longer than a client's bytes and its taking of answers are waited for.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(7500) {
        assert_eq!(server.load().connections, 1, "closed after {:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(100));
    }
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    assert_eq!(client.reply().expect("answered").cookie, first);
    gone(&server);
}

/// The next connection in a slot is not ended by the end of the one before, which comes later.
#[test]
fn the_end_of_a_connection_is_not_that_of_the_next_one_in_its_place() {
    let server = Running::start();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let lane = Lane { client: 1, number: 0 };
    server.inside(move |inside| inside.server.adopt_lane(theirs.into(), lane));
    ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut old = Client::over(ours, Framing::Simple).unwrap();
    assert_eq!(old.read(0, 512).error, 0);
    // A receive is on its way, and ends with the socket.
    let (ours, theirs) = UnixStream::pair().unwrap();
    server.inside(move |inside| {
        inside.server.close_lanes();
        inside.server.adopt_agreed(theirs.into());
    });
    assert!(old.is_closed());
    ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut new = Client::agreed(ours);
    for _ in 0..3 {
        assert_eq!(new.read(0, 512).data, [0; 512]);
    }
}

/// Who waits first for memory and is ended meanwhile keeps nobody waiting.
#[test]
fn who_is_ended_while_it_waits_for_memory_waits_no_more() {
    let small = |limits: &mut nbd_frontend::Limits| limits.payload_bytes = 8192;
    let server = Setup { limits: small, ..Setup::default() }.start();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut first = Client::connect(&server, Framing::Simple);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let lane = Lane { client: 1, number: 0 };
    server.inside(move |inside| inside.server.adopt_lane(theirs.into(), lane));
    let mut waiting = Client::over(ours, Framing::Simple).unwrap();
    let mut last = Client::connect(&server, Framing::Simple);
    first.header(command::READ, 0, 0, 8192);
    server.until("all memory taken", |load| load.payload_bytes == 8192);
    waiting.header(command::READ, 0, 0, 4096);
    server.turn();
    assert_eq!(server.load().requests, 1);
    last.header(command::READ, 0, 0, 4096);
    server.inside(|inside| {
        inside.server.close_lanes();
        inside.disk.set_answers(Answers::AtOnce);
    });
    assert_eq!(first.reply().unwrap().error, 0);
    assert_eq!(last.reply().expect("its turn").error, 0);
    assert!(waiting.is_closed());
}

/// A device may take more at once than a payload has: clients are told what is served.
#[test]
fn no_request_is_longer_than_a_payload_whatever_the_device_takes() {
    let geometry = Geometry { max_transfer: 8 << 20, ..GEOMETRY };
    let server = Setup { geometry, ..Setup::default() }.start();
    let mut client = Client::connect(&server, Framing::Structured);
    assert_eq!(client.read(0, 1 << 20).data.len(), 1 << 20);
    assert_eq!(client.read(0, (1 << 20) + 512).error, error::EINVAL);
    let refused = client.send_write(0, 0, &vec![7; 2 << 20]);
    let reply = client.reply().unwrap();
    assert_eq!((reply.cookie, reply.error), (refused, error::EINVAL));
    assert!(server.store.bytes(Extent::new(0, 2 << 20)).iter().all(|b| *b == 0));
}
