//! `bare-fan-out DIR SECONDS`: what a replicated write costs without a protocol. A client sends 32 writes of 4 KiB at a
//! time over TCP to each of three processes, which write them into files below DIR and answer with a byte; blocking
//! calls throughout. Prints writes per second.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const BLOCK: usize = 4096;
/// Where the block goes.
const HEADER: usize = 8;
const DEPTH: usize = 32;
const MEMBERS: usize = 3;
const BLOCKS: u64 = 16384;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", path] => serve(Path::new(path)),
        [directory, seconds] => {
            let rate = measure(Path::new(directory), Duration::from_secs_f64(seconds.parse()?))?;
            println!("{rate:.0}");
            Ok(())
        }
        _ => bail!("usage: bare-fan-out DIR SECONDS"),
    }
}

/// A member: its port goes to standard output, then it serves one client to its end.
fn serve(path: &Path) -> Result<()> {
    let file = File::options().create(true).truncate(true).read(true).write(true).open(path)?;
    // Every write of the measurement overwrites.
    for block in 0..BLOCKS {
        file.write_all_at(&[1; BLOCK], block * BLOCK as u64)?;
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?.port());
    let (mut peer, _) = listener.accept()?;
    peer.set_nodelay(true)?;
    let mut message = vec![0; HEADER + BLOCK];
    while peer.read_exact(&mut message).is_ok() {
        let (header, data) = message.split_at(HEADER);
        let block = u64::from_le_bytes(header.try_into()?);
        file.write_all_at(data, block * BLOCK as u64)?;
        peer.write_all(&[1])?;
    }
    Ok(())
}

struct Member {
    process: Child,
    file: PathBuf,
    stream: TcpStream,
}

impl Member {
    fn start(file: PathBuf) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg("serve")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut port = String::new();
        let mut said = std::io::BufReader::new(process.stdout.take().context("its output")?);
        std::io::BufRead::read_line(&mut said, &mut port)?;
        let stream = TcpStream::connect(("127.0.0.1", port.trim().parse()?))?;
        stream.set_nodelay(true)?;
        Ok(Self { process, file, stream })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to kill, and nothing to say.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.file);
    }
}

fn measure(directory: &Path, time: Duration) -> Result<f64> {
    let file = |n| directory.join(format!("bare-fan-out-{}-{n}", std::process::id()));
    let mut members = (0..MEMBERS).map(|n| Member::start(file(n))).collect::<Result<Vec<_>>>()?;
    let (mut done, mut block, begin) = (0_usize, 0_u64, Instant::now());
    let mut batch = Vec::with_capacity(DEPTH * (HEADER + BLOCK));
    while begin.elapsed() < time {
        batch.clear();
        for _ in 0..DEPTH {
            block = block.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            batch.extend(((block >> 32) % BLOCKS).to_le_bytes());
            batch.extend([2; BLOCK]);
        }
        for member in &mut members {
            member.stream.write_all(&batch)?;
        }
        for member in &mut members {
            member.stream.read_exact(&mut [0; DEPTH])?;
        }
        done += DEPTH;
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of some seconds' writes")]
    let writes = done as f64;
    Ok(writes / begin.elapsed().as_secs_f64())
}
