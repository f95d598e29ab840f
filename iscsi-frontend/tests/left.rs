//! Sessions that end without a logout: what of their commands is done, and what is not any more.

mod support;

use std::any::Any;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::channel;

use iscsi_frontend::Server;
use lh_block::Extent;
use lh_rig::{Inside, until_end_arrives};
use lh_ring::{Answers, Frontend};
use support::Running;
use support::client::{Client, PLAIN, rw10};

fn ready(server: &Running, isid: u8) -> Client {
    let mut client = Client::login(server, isid, PLAIN);
    client.ready();
    client
}

fn hold(server: &Running) {
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
}

fn write(client: &mut Client) {
    client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
}

/// A session whose write the device has, and is slow with.
fn begin_to_leave(server: &Running) -> Client {
    let mut leaves = ready(server, 1);
    hold(server);
    write(&mut leaves);
    server.until("it is with the device", |load| load.commands == 1);
    leaves
}

/// It ends, and the server knows.
fn leave(server: &Running, leaves: Client) {
    leaves.stream.shutdown(Shutdown::Both).unwrap();
    server.until("it has left", |load| load.sessions == 0);
}

fn submitted(server: &Running) -> u64 {
    server.inside(|inside| inside.disk.submitted())
}

fn abandoned(server: &Running) -> u64 {
    server.inside(|inside| inside.disk.abandoned())
}

/// Ends a connection, and waits until the server could hear of it.
fn end(stream: &TcpStream) {
    stream.shutdown(Shutdown::Both).unwrap();
    until_end_arrives(stream);
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

/// A device may have requests that it has not begun.
#[test]
fn what_the_device_has_of_a_session_that_left_is_abandoned_where_there_is_another() {
    let server = Running::start();
    let (mut stays, mut leaves) = (ready(&server, 1), ready(&server, 2));
    hold(&server);
    write(&mut stays);
    write(&mut leaves);
    write(&mut leaves);
    server.until("all are with the device", |load| load.commands == 3);
    leaves.stream.shutdown(Shutdown::Both).unwrap();
    server.until("one has left", |load| load.sessions == 1);
    assert_eq!(abandoned(&server), 2);
}

/// Its own port is let in again when the device is done with them; another one may bring the same, and newer.
#[test]
fn what_the_only_session_has_left_is_abandoned_when_another_one_begins() {
    let server = Running::start();
    leave(&server, begin_to_leave(&server));
    let text = format!("InitiatorName=iqn.test\0TargetName={}\0", server.name);
    let stream = server.connect();
    let again = std::thread::spawn(move || Client::over(stream, 1, &text).map(drop));
    server.until("its port waits", |load| load.connections == 1);
    assert_eq!(abandoned(&server), 0);
    let _other = Client::login(&server, 2, PLAIN);
    assert_eq!(abandoned(&server), 1);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    assert_eq!(again.join().unwrap(), Ok(()));
}

/// A relay's connection, or another server's of the volume: this one has no other session.
#[test]
fn what_the_device_has_of_a_session_that_left_is_abandoned_where_others_serve_the_volume() {
    type Others = fn(&Running) -> Box<dyn Any>;
    let cases: [(u64, Others); 4] = [
        (0, |_| Box::new(())),
        (1, |server| Box::new(server.connections.add())),
        (1, |server| {
            drop(server.connections.add());
            Box::new(())
        }),
        (1, |server| {
            let count = server.connections.beside_uncounted();
            server.inside(move |inside| inside.server.count_with(count));
            Box::new(())
        }),
    ];
    for (number, (expected, others)) in cases.into_iter().enumerate() {
        let server = Running::start();
        let leaves = begin_to_leave(&server);
        let _others = others(&server);
        leave(&server, leaves);
        assert_eq!(abandoned(&server), expected, "case {number}");
    }
}

/// Its initiator goes on at a relay that comes later, while what it has left here still waits.
#[test]
fn what_the_only_session_has_left_is_abandoned_when_others_begin_to_serve_the_volume() {
    let server = Running::start();
    leave(&server, begin_to_leave(&server));
    let look = |inside: &mut Inside<'_, Server>| {
        inside.server.look(inside.disk);
        inside.disk.abandoned()
    };
    assert_eq!(server.inside(look), 0);
    drop(server.connections.add());
    assert_eq!(server.inside(look), 1);
}

/// Before the device begins what has waited in it, and whatever the server has heard of its initiators by then.
#[test]
fn who_left_without_being_noticed_is_found_when_the_device_asks() {
    for others in [0, 1] {
        let server = Running::start();
        let mut client = ready(&server, 1);
        let _others: Vec<_> = (0..others).map(|_| ready(&server, 2)).collect();
        hold(&server);
        write(&mut client);
        server.until("it is with the device", |load| load.commands == 1);
        let look = |inside: &mut Inside<'_, Server>| {
            inside.server.look(inside.disk);
            inside.disk.abandoned()
        };
        assert_eq!(server.inside(look), 0, "it is there");
        let stream = client.stream.try_clone().unwrap();
        let abandoned = server.inside(move |inside| {
            end(&stream);
            look(inside)
        });
        assert_eq!(abandoned, others, "while it has the only session it can have sent nothing again");
    }
}

#[test]
fn what_a_session_has_left_unread_is_not_done_where_there_is_another() {
    for others in [0, 1] {
        let server = Running::start();
        let mut client = ready(&server, 1);
        let _others: Vec<_> = (0..others).map(|_| ready(&server, 2)).collect();
        unseen(&server, || {
            write(&mut client);
            end(&client.stream);
        });
        server.until("it has left", |load| load.sessions == others);
        assert_eq!(submitted(&server), 1 - others as u64);
        let written = server.store.bytes(Extent::new(0, 512)) == [7; 512];
        assert_eq!(written, others == 0);
    }
}

/// The other is a relay's connection, or another server's.
#[test]
fn what_a_session_has_left_unread_is_not_done_where_others_serve_the_volume() {
    let server = Running::start();
    let mut client = ready(&server, 1);
    let _elsewhere = server.connections.add();
    unseen(&server, || {
        write(&mut client);
        end(&client.stream);
    });
    server.until("it has left", |load| load.sessions == 0);
    assert_eq!(submitted(&server), 0);
}

/// Whoever came and went may have done again what this one has left; not before it was last seen there.
#[test]
fn who_has_had_company_is_looked_for_until_it_is_seen_alone() {
    for is_seen in [false, true] {
        let server = Running::start();
        let mut client = ready(&server, 1);
        drop(ready(&server, 2));
        server.until("alone", |load| load.sessions == 1);
        if is_seen {
            assert_eq!(client.read(0, 1).status, 0);
        }
        let before = submitted(&server);
        unseen(&server, || {
            write(&mut client);
            end(&client.stream);
        });
        server.until("it has left", |load| load.sessions == 0);
        assert_eq!(submitted(&server) - before, u64::from(is_seen));
    }
}
