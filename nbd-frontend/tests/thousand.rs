//! As many connections as there may be. Its memory is the process's, so that it is the only test of its program.

mod support;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lh_ring::CHUNK;
use nbd_frontend::Framing;
use nbd_frontend::proto::reply;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use support::client::{Client, greeted};
use support::{Running, Setup};

/// Bytes of this process in memory.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn pool_bytes(server: &Running) -> usize {
    server.inside(|inside| inside.pool.used_bytes())
}

#[test]
fn a_thousand_connections() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(8192), hard).unwrap();
    // Nobody is closed for being slow while the others are let in.
    let server = Setup { limits: |limits| limits.patience_s = 1000, ..Setup::default() }.start();
    let before = resident();
    // Handshakes that go no further hold no memory of the pool.
    let shaking: Vec<UnixStream> = (0..900).map(|_| greeted(&server)).collect();
    server.until("greeted", |load| load.connections == 900);
    assert_eq!(pool_bytes(&server), 0);
    // Transmission for as many as there may be, words for the rest.
    let mut clients: Vec<Client> = Vec::new();
    let mut refused = 0;
    for _ in 0..100 {
        match Client::try_connect(&server, Framing::Structured) {
            Ok(client) => clients.push(client),
            Err(kind) => {
                assert_eq!(kind, reply::ERR_POLICY);
                refused += 1;
            }
        }
    }
    assert_eq!((clients.len(), refused), (64, 36));
    // Beyond the limit whoever has been in the handshake for longest makes room: nobody keeps others out by saying nothing.
    server.until("refused ones gone", |load| load.connections == 964);
    let more: Vec<UnixStream> = (0..60).map(|_| greeted(&server)).collect();
    let beyond: Vec<UnixStream> = (0..3).map(|_| greeted(&server)).collect();
    let is_closed = |mut stream: &UnixStream| {
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        stream.read(&mut [0]).is_ok_and(|bytes| bytes == 0)
    };
    assert!(shaking[..3].iter().all(is_closed), "those that came first are gone");
    assert!(!shaking[3..].iter().step_by(100).chain(&more).chain(&beyond).any(is_closed));
    assert_eq!(server.load().connections, 1024);
    // Who is in is served.
    for client in &mut clients {
        assert_eq!(client.write(0, &[1; 4096]).error, 0);
        assert_eq!(client.read(0, 4096).data, [1; 4096]);
    }
    let used = pool_bytes(&server);
    assert!(used <= 64 * 2 * CHUNK + CHUNK, "{used} bytes of the pool");
    let grown = resident().saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes more in memory");
    drop((shaking, more, beyond, clients));
    server.until("all gone", |load| load.connections == 0);
    assert_eq!(Client::connect(&server, Framing::Simple).read(0, 512).error, 0);
}
