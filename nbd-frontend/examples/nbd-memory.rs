//! Serves a disk in memory over NBD, on a unix socket or a TCP address:
//!
//! ```text
//! cargo run --release -p nbd-frontend --example nbd-memory -- /tmp/nbd.sock 1073741824
//! nbdinfo 'nbd+unix:///memory?socket=/tmp/nbd.sock'
//! ```
//!
//! It ends when it is killed. Its memory is the disk's, and 64 MiB at most for requests.

use std::error::Error;
use std::path::Path;

use lh_block::Geometry;
use lh_ring::{Frontend, MemoryDisk, Pool, Ring};
use nbd_frontend::{Export, Limits, Listener, Server};

/// Marks the server's operations on the ring.
const OWNER: u8 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), size) = (args.next(), args.next()) else {
        return Err("usage: nbd-memory SOCKET|ADDRESS:PORT [BYTES]".into());
    };
    let size = size.map_or(Ok(1 << 30), |text| text.parse::<u64>())?;
    let listener = match address.parse() {
        Ok(address) => Listener::tcp(address)?,
        Err(_) => Listener::unix(Path::new(&address))?,
    };

    let pool = Pool::new(8 << 20, 64 << 20)?;
    let geometry =
        Geometry { size, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };
    let mut disk = MemoryDisk::new(&pool, geometry);
    let mut ring = Ring::new(256)?;
    let export = Export { name: "memory".into(), description: "a disk in memory".into(), read_only: false };
    let mut server = Server::new(export, Limits::of_pool(&pool), OWNER, &pool, geometry.depth);
    server.listen(&mut ring, listener);
    eprintln!("serving {size} bytes on {address}");
    loop {
        server.turn(&mut ring, &mut disk);
        ring.turn(None)?;
        while let Some(completion) = ring.next() {
            server.completion(&mut ring, &mut disk, completion);
        }
    }
}
