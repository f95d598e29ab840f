//! A client over connections that are lost: against the server of this crate, and against peers that break the protocol.

mod support;

use std::io::{Read, Write};
use std::ops::ControlFlow::{self, Break, Continue};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lh_block::{Device, Extent, IoError, Op};
use lh_ring::{Answers, QueueDevice};
use nbd_frontend::Lane;
use nbd_frontend::client::{HandshakeError, Mail, handshake};
use nbd_frontend::proto::{self, SIMPLE_REPLY_MAGIC, SimpleReply, command, error};
use support::queue::Queue;
use support::{GEOMETRY, Running};
use zerocopy::{FromBytes, IntoBytes};

const PATIENCE: Duration = Duration::from_secs(20);
const WRITE: Op = Op::Write { fua: false };
const LANE: Lane = Lane { client: 1, number: 0 };

/// Both ends of a connection of this lane, to a server that has taken it.
fn come(server: &Running, lane: Lane) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    server.inside(move |inside| inside.server.adopt_lane(theirs.into(), lane));
    ours
}

fn greeted(server: &Running, lane: Lane) -> UnixStream {
    let mut ours = come(server, lane);
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    handshake(&mut ours, "demo").unwrap().check(&GEOMETRY).unwrap();
    ours
}

fn is_greeted(stream: &mut UnixStream, within: Duration) -> bool {
    stream.set_read_timeout(Some(within)).unwrap();
    match handshake(stream, "demo") {
        Ok(_) => true,
        Err(HandshakeError::Io(_)) => false,
        Err(e) => panic!("{e}"),
    }
}

fn is_closed(stream: &mut UnixStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    matches!(stream.read(&mut [0]), Ok(0))
}

#[test]
fn a_relayed_device_does_what_a_device_does() {
    let server = Running::start();
    let mut queue = Queue::new(GEOMETRY);
    let range = Extent::new(1 << 20, 1 << 20);
    // Before there is a connection.
    queue.submit(1, Op::Write { fua: true }, range, 7);
    queue.link(greeted(&server, LANE));
    assert_eq!(queue.answer(1).result, Ok(()));
    queue.submit(2, Op::Read, Extent::new((1 << 20) - 512, 1024), 0);
    let read = queue.answer(2).data.unwrap().to_vec();
    assert_eq!((&read[..512], &read[512..]), (&[0; 512][..], &[7; 512][..]));
    let zeroes = Op::WriteZeroes { fua: false, may_unmap: true, fast: false };
    queue.submit(3, zeroes, Extent::new(1 << 20, 4096), 0);
    queue.submit(4, Op::Unmap, Extent::new((1 << 20) + 4096, 4096), 0);
    queue.submit(5, Op::Flush, Extent::default(), 0);
    for tag in 3..=5 {
        assert_eq!(queue.answer(tag).result, Ok(()));
    }
    let bytes = server.store.bytes(Extent::new(1 << 20, 12288));
    assert!(bytes[..8192].iter().all(|b| *b == 0) && bytes[8192..].iter().all(|b| *b == 7));
    for (tag, bad) in [(6, Extent::new(GEOMETRY.size, 512)), (7, Extent::new(1, 512)), (8, Extent::new(0, 0))]
    {
        queue.submit(tag, Op::Read, bad, 0);
        let wanted = if tag == 6 { IoError::OutOfRange } else { IoError::Invalid };
        assert_eq!(queue.answer(tag).result, Err(wanted));
    }
    // At full depth, reads and writes of a megabyte.
    for tag in 0..24 {
        let op = if tag % 2 == 0 { WRITE } else { Op::Read };
        queue.submit(100 + tag, op, Extent::new(tag << 20, 1 << 20), 9);
    }
    for tag in 0..24 {
        assert_eq!(queue.answer(100 + tag).result, Ok(()));
    }
}

/// As the kernel's client is given its connection: before there is a server that could answer. What it has sent meanwhile is done.
#[test]
fn a_client_that_has_agreed_before_is_served_from_its_first_request() {
    let server = Running::start();
    let mut queue = Queue::new(GEOMETRY);
    let (clients, servers) = UnixStream::pair().unwrap();
    queue.link(clients);
    queue.submit(1, WRITE, Extent::new(0, 64 << 10), 3);
    queue.submit(2, Op::Flush, Extent::default(), 0);
    queue.turn_for(Duration::from_millis(50));
    assert!(queue.answers.is_empty());
    server.inside(move |inside| inside.server.adopt_agreed(servers.into()));
    assert_eq!(queue.answer(1).result, Ok(()));
    assert_eq!(queue.answer(2).result, Ok(()));
    assert!(server.store.bytes(Extent::new(0, 64 << 10)).iter().all(|b| *b == 3));
    assert_eq!(server.load().transmissions, 1);
}

/// The first copy of a write is at work in the device while its client comes again: it is not greeted before that has come
/// to its end, so that nothing that it writes then can be undone.
#[test]
fn a_client_that_comes_again_waits_for_what_it_has_left_behind() {
    let server = Running::start();
    let mut queue = Queue::new(GEOMETRY);
    queue.link(greeted(&server, LANE));
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    queue.submit(1, WRITE, Extent::new(0, 4096), 1);
    queue.turn_until("the write at work", |_| server.load().requests == 1);
    let mut again = come(&server, LANE);
    queue.wish();
    assert!(!is_greeted(&mut again, Duration::from_millis(300)), "the first copy is still at work");
    // One that gave up waiting comes once more; what waited before it waits no longer.
    let mut next = come(&server, LANE);
    assert!(is_closed(&mut again) && !is_greeted(&mut next, Duration::from_millis(100)));
    server.inside(|inside| inside.server.close_lanes());
    assert!(is_closed(&mut next));
    let mut again = come(&server, LANE);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    assert!(is_greeted(&mut again, PATIENCE));
    assert!(queue.answers.is_empty(), "nobody has heard of the first copy");
    queue.link(again);
    assert_eq!(queue.answer(1).result, Ok(()));
    assert_eq!(server.inside(|inside| inside.disk.submitted()), 2);
}

#[test]
fn a_lane_takes_the_place_of_itself_and_a_client_that_of_another() {
    let server = Running::start();
    let closed_within = |stream: &mut UnixStream, within| {
        stream.set_read_timeout(Some(within)).unwrap();
        matches!(stream.read(&mut [0]), Ok(0))
    };
    let closed = |stream: &mut UnixStream| closed_within(stream, PATIENCE);
    let open = |stream: &mut UnixStream| !closed_within(stream, Duration::from_millis(200));
    let mut first = greeted(&server, LANE);
    let mut second = greeted(&server, Lane { number: 1, ..LANE });
    assert!(open(&mut first) && open(&mut second));
    let mut third = greeted(&server, LANE);
    assert!(closed(&mut first) && open(&mut second));
    let mut fourth = greeted(&server, Lane { client: 2, number: 5 });
    assert!(closed(&mut second) && closed(&mut third) && open(&mut fourth));
    server.inside(|inside| inside.server.close_lanes());
    assert!(closed(&mut fourth));
    server.until("all gone", |load| load.connections == 0);
}

/// A relay that was left behind on a node tries to come back for as long as it lives.
#[test]
fn of_two_clients_the_one_that_came_last_stays() {
    let server = Running::start();
    let other = Lane { client: 2, ..LANE };
    let first = greeted(&server, LANE);
    let mut last = greeted(&server, other);
    for number in [0, 1] {
        assert!(
            is_closed(&mut come(&server, Lane { number, ..LANE })),
            "it ends the connection of the last one"
        );
    }
    let mut beside = greeted(&server, Lane { number: 1, ..other });
    last = {
        let again = greeted(&server, other);
        assert!(is_closed(&mut last));
        again
    };
    // One whose client is another process by now is none of before.
    let mut newest = greeted(&server, Lane { client: 3, ..LANE });
    assert!(is_closed(&mut beside) && is_closed(&mut last));
    assert!(is_closed(&mut come(&server, other)) && is_closed(&mut come(&server, LANE)));
    newest.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(newest.read(&mut [0]).is_err(), "the newest is served");
    drop((first, newest));
    server.until("nobody is there", |load| load.connections == 0);
    greeted(&server, LANE);
}

/// Whoever gives a request up may send it again on another way, and something newer behind it.
#[test]
fn what_a_client_gave_up_is_not_done_later() {
    let server = Running::start();
    let mut queue = Queue::new(GEOMETRY);
    let (one, two) = (Extent::new(0, 4096), Extent::new(4096, 4096));
    queue.submit(1, WRITE, one, 1);
    queue.device.abandon(1);
    assert!(queue.answer(1).result.is_err(), "nothing was sent");
    queue.link(greeted(&server, LANE));
    queue.submit(2, WRITE, two, 2);
    assert_eq!(queue.answer(2).result, Ok(()));
    assert_eq!(server.inside(|inside| inside.disk.submitted()), 1);

    // What the server has it cannot be asked for by name: it is asked by the end of the connection, and all else comes again.
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    queue.submit(3, WRITE, one, 3);
    queue.submit(4, WRITE, two, 4);
    queue.turn_until("the writes at work", |_| server.load().requests == 2);
    queue.device.abandon(3);
    assert!(queue.answer(3).result.is_err());
    queue.wish();
    let again = come(&server, LANE);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    let mut again = again;
    assert!(is_greeted(&mut again, PATIENCE));
    queue.link(again);
    assert_eq!(queue.answer(4).result, Ok(()));
    assert_eq!(server.inside(|inside| inside.disk.submitted()), 4, "two, and the one that nobody gave up");
}

/// A peer that reads whole requests and answers as it is told; with a `Break` it ends the connection behind these bytes.
fn peer(
    mut answer: impl FnMut(usize, &proto::Request) -> ControlFlow<Vec<u8>, Vec<u8>> + Send + 'static,
) -> (UnixStream, JoinHandle<Vec<(u16, u64)>>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut seen = Vec::new();
        let mut head = [0; size_of::<proto::Request>()];
        while theirs.read_exact(&mut head).is_ok() {
            let request = proto::Request::read_from_bytes(&head).unwrap();
            if request.kind.get() == command::WRITE {
                theirs.read_exact(&mut vec![0; request.length.get() as usize]).unwrap();
            }
            seen.push((request.kind.get(), request.offset.get()));
            match answer(seen.len(), &request) {
                Continue(bytes) => theirs.write_all(&bytes).unwrap(),
                Break(bytes) => {
                    theirs.write_all(&bytes).unwrap();
                    break;
                }
            }
        }
        seen
    });
    (ours, thread)
}

fn reply(request: &proto::Request, error: u32) -> Vec<u8> {
    let head = SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: request.cookie };
    head.as_bytes().to_vec()
}

#[test]
fn a_lost_connection_costs_nothing_but_time() {
    let mut queue = Queue::new(GEOMETRY);
    // It answers the second of four and is gone with the fourth.
    let (socket, first) = peer(|count, request| match count {
        2 => Continue(reply(request, 0)),
        4 => Break(Vec::new()),
        _ => Continue(Vec::new()),
    });
    queue.link(socket);
    for tag in 1..=4 {
        queue.submit(tag, WRITE, Extent::new(tag * 4096, 4096), 1);
    }
    assert_eq!(queue.answer(2).result, Ok(()));
    queue.wish();
    queue.submit(5, Op::Flush, Extent::default(), 0);
    queue.turn_for(Duration::from_millis(50));
    assert!(queue.answers.is_empty());
    let (socket, second) = peer(|_, request| Continue(reply(request, 0)));
    queue.link(socket);
    for tag in [1, 3, 4, 5] {
        assert_eq!(queue.answer(tag).result, Ok(()));
    }
    drop(queue);
    assert_eq!(first.join().unwrap().len(), 4);
    let write = |tag: u64| (command::WRITE, tag * 4096);
    assert_eq!(second.join().unwrap(), [write(1), write(3), write(4), (command::FLUSH, 0)]);
}

/// The end of a connection comes later than the next connection does.
#[test]
fn the_end_of_a_connection_is_not_that_of_the_next_one() {
    let mut queue = Queue::new(GEOMETRY);
    let (came, comes) = channel();
    let (socket, first) = peer(move |_, _| {
        came.send(()).unwrap();
        Continue(Vec::new())
    });
    queue.link(socket);
    queue.submit(1, WRITE, Extent::new(0, 4096), 1);
    queue.turn_until("the write at the first peer", |_| comes.try_recv().is_ok());
    let (socket, second) = peer(|_, request| Continue(reply(request, 0)));
    queue.link(socket);
    assert_eq!(queue.answer(1).result, Ok(()));
    queue.turn_for(Duration::from_millis(50));
    assert!(!queue.has_wished(), "the second connection is given up with the first");
    drop(queue);
    assert_eq!((first.join().unwrap().len(), second.join().unwrap().len()), (1, 1));
}

#[test]
fn a_peer_that_breaks_the_protocol_loses_its_connection_and_the_request_waits() {
    let mut queue = Queue::new(GEOMETRY);
    queue.submit(1, Op::Read, Extent::new(0, 4096), 0);
    type Lie = fn(&proto::Request) -> Vec<u8>;
    let lies: [Lie; 6] = [
        |_| vec![0xff; 64],
        |request| [&[0; 4], &reply(request, 0)[4..]].concat(),
        |request| reply(&proto::Request { cookie: 77.into(), ..*request }, 0),
        // Too much: the read, and what nobody asked for.
        |request| [reply(request, 5), vec![1; 3000]].concat(),
        |request| reply(request, error::ESHUTDOWN),
        // Too little, and then the end.
        |request| [reply(request, 0), vec![1; 100]].concat(),
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let (socket, thread) = peer(move |count, request| match (count, number) {
            (1, 5) => Break(lie(request)),
            (1, _) => Continue(lie(request)),
            _ => Break(Vec::new()),
        });
        queue.link(socket);
        queue.wish();
        assert_eq!(thread.join().unwrap(), [(command::READ, 0)]);
        if number == 3 {
            // An error is an answer, whatever comes behind it.
            assert_eq!(queue.answer(1).result, Err(IoError::Io));
            queue.submit(1, Op::Read, Extent::new(0, 4096), 0);
        }
        assert!(queue.answers.is_empty());
    }
    let (socket, _thread) = peer(|_, request| Continue([reply(request, 0), vec![3; 4096]].concat()));
    queue.link(socket);
    assert_eq!(queue.answer(1).data.unwrap().to_vec(), vec![3; 4096]);
}

#[test]
fn requests_without_a_connection_wait_until_the_device_is_to_go() {
    let mut queue = Queue::new(GEOMETRY);
    queue.submit(1, WRITE, Extent::new(0, 4096), 1);
    queue.turn_for(Duration::from_millis(50));
    queue.mailbox.put(Mail::LetGo(Some(Instant::now() + Duration::from_secs(3600))));
    queue.mailbox.put(Mail::LetGo(None));
    queue.turn_for(Duration::from_millis(50));
    assert!(queue.answers.is_empty());
    queue.mailbox.put(Mail::LetGo(Some(Instant::now() + Duration::from_millis(20))));
    assert_eq!(queue.answer(1).result, Err(IoError::ShuttingDown));
    // With a connection there is nothing to let go of.
    let server = Running::start();
    queue.link(greeted(&server, LANE));
    queue.submit(2, WRITE, Extent::new(0, 4096), 1);
    assert_eq!(queue.answer(2).result, Ok(()));
    assert!(!queue.device.is_ending());
    queue.mailbox.put(Mail::End);
    queue.turn(Duration::ZERO);
    assert!(queue.device.is_ending());
}

#[test]
fn an_export_that_does_not_fit_is_not_taken() {
    let server = Running::start();
    let mut stream = greeted(&server, LANE);
    drop(std::mem::replace(&mut stream, come(&server, LANE)));
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let served = handshake(&mut stream, "demo").unwrap();
    let unfit = |change: fn(&mut lh_block::Geometry)| {
        let mut geometry = GEOMETRY;
        change(&mut geometry);
        served.check(&geometry).unwrap_err().to_string()
    };
    assert!(unfit(|g| g.size *= 2).contains("67108864 bytes, not 134217728"));
    assert!(unfit(|g| g.max_transfer = 2 << 20).contains("requests"));
    let mut read_only = served;
    read_only.flags |= proto::transmission_flag::READ_ONLY;
    assert!(read_only.check(&GEOMETRY).is_err());
}
