//! While the machine is short of memory a server begins no more than what is resident suffices for, and goes on.

mod serve_client;

use std::io::Write;
use std::time::Duration;

use lh_wire::{OpCode, Status};
use serve_client::{MIB, Server, knock, who};

/// Half of what each of these connections writes is more than is received while memory is short. All messages have come
/// in part then, and nothing is in flight that would give memory back.
#[test]
fn messages_that_have_come_in_part_come_whole() {
    const QUEUES: u16 = 8;
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    server.status.set_memory_short(true);
    let mut clients: Vec<_> = (0..QUEUES)
        .map(|queue| {
            let mut who = who(1, 1);
            (who.hello.queue, who.hello.queues) = (queue, QUEUES);
            let client = knock(&server.socket, &who).unwrap();
            client.stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
            client
        })
        .collect();
    let bytes = vec![0x5a; MIB as usize];
    let mut rests = Vec::new();
    for (n, c) in (0..).zip(&mut clients) {
        let header = c.header(OpCode::Write, n * u64::from(MIB), MIB);
        let mut message = c.encode(header, &bytes);
        let rest = message.split_off(message.len() / 2);
        c.stream.write_all(&message).unwrap();
        rests.push(rest);
    }
    // The halves are taken in as far as they are.
    std::thread::sleep(Duration::from_millis(100));
    for (c, rest) in clients.iter_mut().zip(rests) {
        c.stream.write_all(&rest).unwrap();
    }
    for c in &mut clients {
        assert_eq!(c.receive().status(), Status::Ok);
    }
    for (n, c) in (0..).zip(&mut clients) {
        assert_eq!(c.read(n * u64::from(MIB), MIB), bytes);
    }
}
