//! The time of a message of 64 bytes and its answer over TCP on the loopback interface, in seconds: two threads, blocking
//! sockets, the median of many.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use anyhow::Result;

/// As long as a header of the data protocol.
const MESSAGE: usize = 64;

const TRIPS: usize = 20_000;

fn main() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let echo = std::thread::spawn(move || -> Result<()> {
        let (mut peer, _) = listener.accept()?;
        peer.set_nodelay(true)?;
        let mut bytes = [0; MESSAGE];
        for _ in 0..TRIPS {
            peer.read_exact(&mut bytes)?;
            peer.write_all(&bytes)?;
        }
        Ok(())
    });
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let (mut bytes, mut times) = ([0; MESSAGE], Vec::with_capacity(TRIPS));
    for _ in 0..TRIPS {
        let begin = Instant::now();
        stream.write_all(&bytes)?;
        stream.read_exact(&mut bytes)?;
        times.push(begin.elapsed());
    }
    match echo.join() {
        Ok(ended) => ended?,
        Err(_) => anyhow::bail!("the other side has panicked"),
    }
    times.sort_unstable();
    println!("{:.9}", times[TRIPS / 2].as_secs_f64());
    Ok(())
}
