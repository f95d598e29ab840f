//! Serves a disk in memory over iSCSI on a TCP address:
//!
//! ```text
//! cargo run --release -p iscsi-frontend --example iscsi-memory -- 127.0.0.1:3260 1073741824
//! iscsi-ls -s iscsi://127.0.0.1:3260
//! iscsi-inq iscsi://127.0.0.1:3260/iqn.2019-10.io.longhorn:memory/1
//! ```
//!
//! It ends when it is killed. Its memory is the disk's, and 64 MiB at most for requests. A third argument is a file for
//! reservations; a fourth and a fifth are the user and secret that an initiator has to know.

use std::error::Error;

use iscsi_frontend::{Chap, Credentials, Limits, Listener, Server, Target};
use lh_block::Geometry;
use lh_ring::{Frontend, MemoryDisk, Pool, Ring};

/// Marks the server's operations on the ring.
const OWNER: u8 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let Some(address) = args.next() else {
        return Err("usage: iscsi-memory ADDRESS:PORT [BYTES [RESERVATIONS-FILE [USER SECRET]]]".into());
    };
    let size = args.next().map_or(Ok(1 << 30), |text| text.parse::<u64>())?;
    let mut target = Target::of_volume("memory");
    target.reservations = args.next().map(Into::into);
    if let (Some(name), Some(secret)) = (args.next(), args.next()) {
        let initiator = Credentials { name, secret: secret.into_bytes() };
        target.chap = Some(Chap { initiator, target: None });
    }

    let pool = Pool::new(8 << 20, 64 << 20)?;
    let geometry =
        Geometry { size, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };
    let mut disk = MemoryDisk::new(&pool, geometry);
    let mut ring = Ring::new(256)?;
    let listener = Listener::tcp(address.parse()?)?;
    eprintln!("serving {size} bytes as {} on {}", target.name, listener.address()?);
    let mut server = Server::new(target, Limits::of_pool(&pool), OWNER, &pool)?;
    server.listen(&mut ring, listener);
    loop {
        server.turn(&mut ring, &mut disk);
        ring.turn(None)?;
        while let Some(completion) = ring.next() {
            server.completion(&mut ring, &mut disk, completion);
        }
    }
}
