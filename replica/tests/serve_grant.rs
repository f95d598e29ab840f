//! Files that an engine on the same host is granted: to whom, for how long, and what is said of places.

mod serve_client;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use lh_ring::Watched;
use lh_ring::sys::{lock, receive_with_fds};
use lh_wire::handshake::{Asked, CHALLENGE_LEN, Challenge, NotLetIn, Role, Verdict, WELCOME_LEN};
use lh_wire::{COUNTERS, GRANT_LEN, Grant, OpCode, PIECE_BLOCKS, Place, Places, Status};
use replica::serve::Address;
use serve_client::{
    Client, Killable, MIB, Server, Who, connect, knock, options, pattern, places, serve_if_child, session,
    shake, who,
};

/// Not a test by itself: what [`Killable`] runs.
#[test]
fn child() {
    serve_if_child();
}

/// What was granted.
struct Granted {
    stream: UnixStream,
    number: u32,
    watched: Watched,
    files: Vec<File>,
}

fn ask(socket: &Path, who: &Who) -> Result<Granted, Verdict> {
    let mut stream = connect(socket);
    let mut challenge = [0; CHALLENGE_LEN];
    stream.read_exact(&mut challenge).unwrap();
    assert!(Challenge::decode(&challenge).unwrap().grants());
    let asked = Asked::answer(&challenge, (&who.hello, Role::Grantee), &who.key, [9; 32]).unwrap();
    stream.write_all(asked.hello()).unwrap();
    let mut welcome = [0; WELCOME_LEN];
    stream.read_exact(&mut welcome).unwrap();
    match asked.heard(&welcome) {
        Ok(_) => {}
        Err(NotLetIn::Refused(verdict, _)) => return Err(verdict),
        Err(foreign) => panic!("{foreign}"),
    }
    let mut bytes = [0; GRANT_LEN];
    let (len, mut fds) = receive_with_fds(stream.as_fd(), &mut bytes).unwrap();
    assert_eq!(len, GRANT_LEN);
    let grant = Grant::decode(&bytes).unwrap();
    while fds.len() < 1 + usize::from(grant.files) {
        fds.extend(receive_with_fds(stream.as_fd(), &mut [0]).unwrap().1);
    }
    let mut fds: std::vec::IntoIter<OwnedFd> = fds.into_iter();
    let watched = Watched::open(fds.next().unwrap(), COUNTERS).unwrap();
    Ok(Granted { stream, number: grant.number, watched, files: fds.map(File::from).collect() })
}

impl Granted {
    /// The replica has ended the connection.
    fn is_closed(&mut self) -> bool {
        self.stream.read(&mut [0]).unwrap() == 0
    }
}

/// Where the blocks of the first piece are, and of which grant that is.
fn tell(c: &mut Client<UnixStream>) -> Option<(Places, u32)> {
    let answer = c.op(OpCode::Places, 0, MIB);
    if answer.status() == Status::Refused {
        return None;
    }
    assert_eq!(answer.status(), Status::Ok);
    Some((Places::decode(&answer.payload, PIECE_BLOCKS, 31).unwrap(), answer.header.aux))
}

#[test]
fn blocks_are_where_they_are_said_to_be() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        assert!(tell(&mut c).is_none(), "nothing is granted");
        c.write(8192, &pattern(1, 8192));
        let granted = ask(&server.socket, &who(1, 1)).unwrap();
        let (told, number) = tell(&mut c).unwrap();
        assert_eq!(number, granted.number);
        assert_eq!(told.count, granted.watched.count(0));
        let file = Place::File(0).code();
        assert_eq!(told.blocks()[..6], [0, 0, file, file, 0, 0]);
        // O_DIRECT wants memory that is aligned, which the page cache has.
        let file = File::open(place.path().join("replica/volume-head-000.img")).unwrap();
        let inode = |file: &File| file.metadata().unwrap().ino();
        assert_eq!(granted.files.iter().map(inode).collect::<Vec<_>>(), [inode(&file)]);
        let mut bytes = vec![0; 8192];
        file.read_exact_at(&mut bytes, 8192).unwrap();
        assert_eq!(bytes, pattern(1, 8192));
        // What is written in place stays where it is; what is not, does not.
        c.write(8192, &pattern(2, 4096));
        assert_eq!(granted.watched.count(0), told.count);
        c.write(0, &pattern(3, 4096));
        assert!(granted.watched.count(0) > told.count);
        let (told, _) = tell(&mut c).unwrap();
        assert_eq!(told.count, granted.watched.count(0));
        c.op(OpCode::Unmap, 0, 4096);
        assert!(granted.watched.count(0) > told.count);
        assert!(!granted.watched.is_over());
        // A range of two pieces, of none, or beyond the volume's end.
        for (offset, length) in [(4096, MIB), (0, 2 * MIB), (serve_client::SIZE, 4096), (512, 4096)] {
            assert_eq!(c.op(OpCode::Places, offset, length).status(), Status::Invalid);
        }
    }
}

/// The engine that has been let in, and nobody else.
#[test]
fn only_the_present_session_is_granted_anything() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    assert_eq!(ask(&server.socket, &who(1, 1)).err(), Some(Verdict::Unusable), "there is no session");
    let _c = session(&server.socket, 2, 7);
    for (n, number) in [(1, 7), (2, 6), (3, 7)] {
        assert_eq!(ask(&server.socket, &who(n, number)).err(), Some(Verdict::Unusable));
    }
    let wrong = Who { key: [9; 32], ..who(2, 7) };
    assert_eq!(ask(&server.socket, &wrong).err(), Some(Verdict::BadKey));
    let map_key = Who { key: serve_client::MAP_KEY, ..who(2, 7) };
    assert_eq!(ask(&server.socket, &map_key).err(), Some(Verdict::BadKey), "it says where, and not what");
    let mut first = ask(&server.socket, &who(2, 7)).unwrap();
    let second = ask(&server.socket, &who(2, 7)).unwrap();
    assert!(first.watched.is_over() && first.is_closed(), "one holds at a time");
    assert!(!second.watched.is_over());
}

#[test]
fn over_tcp_nothing_is_granted() {
    let place = tempfile::tempdir().unwrap();
    let listen = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let server = Server::with(replica::serve::Options { listen, ..options(place.path()) });
    let Some(Address::Tcp(address)) = server.status.address() else { panic!("it listens") };
    let _c = shake(std::net::TcpStream::connect(address).unwrap(), &who(1, 1)).unwrap();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    let mut challenge = [0; CHALLENGE_LEN];
    stream.read_exact(&mut challenge).unwrap();
    assert!(!Challenge::decode(&challenge).unwrap().grants());
}

/// Whoever comes after the grant is answered only when it is over.
#[test]
fn the_grant_is_over_before_another_session_is_let_in() {
    for (n, number) in [(2, 2), (1, 2)] {
        let place = tempfile::tempdir().unwrap();
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let mut granted = ask(&server.socket, &who(1, 1)).unwrap();
        assert!(!granted.watched.is_over());
        let other = knock(&server.socket, &who(n, number));
        assert!(granted.watched.is_over(), "before the welcome has come");
        assert!(other.is_ok() && granted.is_closed() && c.is_closed());
    }
    // And when its session has ended.
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let c = session(&server.socket, 1, 1);
    let mut granted = ask(&server.socket, &who(1, 1)).unwrap();
    drop(c);
    assert!(granted.is_closed() && granted.watched.is_over());
    let _c = session(&server.socket, 1, 2);
    let mut granted = ask(&server.socket, &who(1, 2)).unwrap();
    server.stop();
    assert!(granted.is_closed() && granted.watched.is_over());
}

/// Nobody can end what a process has granted that was killed. Whoever has the descriptors has its locks.
#[test]
fn the_locks_of_a_dead_process_are_held_by_what_it_granted() {
    for place in places() {
        let server = Killable::start(place.path(), "child");
        let mut c = session(&server.socket, 1, 1);
        c.write(0, &pattern(1, 4096));
        let mut granted = ask(&server.socket, &who(1, 1)).unwrap();
        server.kill();
        assert!(granted.is_closed() && !granted.watched.is_over());
        let head = File::open(place.path().join("replica/volume-head-000.img")).unwrap();
        assert!(!lock(&head, false).unwrap(), "somebody has come in");
        let path = place.path().to_owned();
        let next = std::thread::spawn(move || Killable::start(&path, "child"));
        std::thread::sleep(Duration::from_millis(700));
        assert!(!next.is_finished(), "it does not wait for them");
        drop(granted);
        let server = next.join().unwrap();
        assert_eq!(session(&server.socket, 2, 2).read(0, 4096), pattern(1, 4096));
    }
}
