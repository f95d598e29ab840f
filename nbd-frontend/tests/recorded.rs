//! What clients really send, as the seeds of the fuzz target `nbd`: a tap between client and server keeps the client's
//! bytes. `LH_RECORD=1 cargo test -p nbd-frontend --test recorded` writes them to `fuzz/corpus/nbd`; the usual run
//! checks that those which are there still lead through the whole protocol.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use nbd_frontend::negotiate::{Admission, Negotiation, Offer, Progress};
use nbd_frontend::proto::{EXTENDED_REQUEST_MAGIC, command, command_flag};
use nbd_frontend::transmit::{Decision, Session};
use nbd_frontend::{Export, Framing};
use support::client::Client;
use support::{GEOMETRY, Running};

/// Longest recording that is kept: what `scripts/fuzz` lets an input grow to.
const LENGTH_MAX: usize = 8192;

/// Passes connections on to a server and keeps what each client sent.
struct Tap {
    socket: PathBuf,
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Tap {
    fn new(server: &Running) -> Self {
        let socket = server.dir.path().join("tap.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let heard: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let (target, all) = (server.socket.clone(), heard.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let server = UnixStream::connect(&target).unwrap();
                let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || {
                    // Either side may go first.
                    let _ = std::io::copy(&mut answers, &mut back);
                    let _ = back.shutdown(Shutdown::Both);
                });
                listen_in(client, server, &all);
            }
        });
        Self { socket, heard }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///demo?socket={}", self.socket.display())
    }

    /// The streams since the last call.
    fn take(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.heard.lock().unwrap())
    }
}

fn listen_in(mut client: UnixStream, mut server: UnixStream, all: &Mutex<Vec<Vec<u8>>>) {
    let place = {
        let mut all = all.lock().unwrap();
        all.push(Vec::new());
        all.len() - 1
    };
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n @ 1..) = client.read(&mut buffer) {
        all.lock().unwrap()[place].extend_from_slice(&buffer[..n]);
        if server.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Write);
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/nbd")
}

/// How far a recording leads: requests decided for the device, and refused ones.
fn replay(stream: &[u8]) -> Option<(usize, usize)> {
    let export = Export { name: "demo".into(), description: "disk".into(), read_only: false };
    let offer = Offer { export: &export, geometry: GEOMETRY, admission: Admission::Open };
    let mut machine = Negotiation::new(&mut Vec::new());
    let mut rest = stream;
    let agreed = loop {
        let (now, later) = rest.split_at(machine.want().min(rest.len()));
        if now.is_empty() {
            return None;
        }
        rest = later;
        match machine.input(now, &offer, &mut Vec::new()) {
            Progress::More => {}
            Progress::Ready(agreed) => break agreed,
            Progress::Close(_) => return None,
        }
    };
    let session = Session { agreed, read_only: false };
    let (mut device, mut refused) = (0, 0);
    while rest.len() >= session.request_len() {
        let (header, later) = rest.split_at(session.request_len());
        let call = session.decode(header).ok()?;
        rest = later.get(usize::try_from(call.payload).unwrap()..)?;
        match session.decide(&call, &GEOMETRY) {
            Decision::Device { .. } | Decision::Status(_) => device += 1,
            Decision::Answer(Err(_)) => refused += 1,
            _ => {}
        }
    }
    Some((device, refused))
}

/// A session of our own client: every command, right and wrong.
fn every_command(tap: &Tap, framing: Framing) {
    let stream = UnixStream::connect(&tap.socket).unwrap();
    let mut client = Client::over(stream, framing).unwrap();
    client.write(4096, &[7; 1024]);
    client.read(4096, 512);
    for (kind, flags, offset, length) in [
        (command::TRIM, command_flag::FUA, 8192, 4096),
        (command::WRITE_ZEROES, command_flag::NO_HOLE | command_flag::FAST_ZERO, 8192, 1 << 20),
        (command::CACHE, 0, 0, 4096),
        (command::FLUSH, 0, 0, 0),
        (command::READ, 1 << 9, 0, 512),
        (command::READ, 0, GEOMETRY.size, 512),
        (command::TRIM, 0, 1, 100),
        (99, 0, 0, 512),
    ] {
        client.call(kind, flags, offset, length);
    }
    if framing != Framing::Simple {
        client.call(command::BLOCK_STATUS, command_flag::REQ_ONE, 0, GEOMETRY.size);
        client.call(command::READ, command_flag::DF, 0, 8192);
    }
    if framing == Framing::Extended {
        let payload = [&4096_u64.to_be_bytes()[..], &1_u32.to_be_bytes()].concat();
        let (head, _) = client.encode(command::BLOCK_STATUS, command_flag::PAYLOAD_LEN, 0, 12);
        client.stream.write_all(&[head, payload].concat()).unwrap();
        assert_eq!(client.reply().unwrap().error, 0);
    }
    client.header(command::DISC, 0, 0, 0);
    assert!(client.is_closed());
}

/// Runs a client of other people, if it is here.
fn other(program: &str, arguments: &[&str]) {
    // Not installed: its recording stays as it is.
    let _ = Command::new(program).args(arguments).output();
}

#[test]
fn sessions_are_recorded() {
    let server = Running::start();
    let tap = Tap::new(&server);
    let uri = tap.uri();
    let mut recordings: Vec<(String, Vec<Vec<u8>>)> = Vec::new();
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        every_command(&tap, framing);
        recordings.push((format!("own-{framing:?}").to_lowercase(), tap.take()));
    }
    for (name, streams) in &recordings {
        let [stream] = &streams[..] else { panic!("{name}: {} connections", streams.len()) };
        let (device, refused) = replay(stream).expect("it goes through");
        assert!(device >= 5 && refused >= 4, "{name}: {device} requests, {refused} refused");
    }
    if std::env::var_os("LH_RECORD").is_none() {
        return;
    }
    other("nbdinfo", &[&uri]);
    recordings.push(("nbdinfo".into(), tap.take()));
    other("nbdinfo", &["--list", &uri]);
    recordings.push(("nbdinfo-list".into(), tap.take()));
    other("nbdinfo", &["--map", &uri]);
    recordings.push(("nbdinfo-map".into(), tap.take()));
    other("qemu-img", &["map", "-f", "raw", &uri]);
    recordings.push(("qemu-img-map".into(), tap.take()));
    let io = ["-f", "raw", &uri, "-c", "write -P 1 0 1k", "-c", "write -z -u 4k 64k", "-c", "read 0 4k"];
    other("qemu-io", &[&io[..], &["-c", "discard 0 1M", "-c", "flush"]].concat());
    recordings.push(("qemu-io".into(), tap.take()));
    fs::create_dir_all(corpus()).unwrap();
    for (name, streams) in recordings {
        for (i, stream) in streams.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
            // The first byte is the target's: nothing unusual.
            let input = [&[0][..], &stream[..stream.len().min(LENGTH_MAX - 1)]].concat();
            fs::write(corpus().join(format!("{name}-{i}")), input).unwrap();
        }
    }
}

/// QEMU speaks extended headers from 8.2 on, and asks for them by itself.
#[test]
fn qemu_with_extended_headers() {
    let version =
        Command::new("qemu-img").arg("--version").output().map(|out| out.stdout).unwrap_or_default();
    let version = String::from_utf8_lossy(&version).into_owned();
    let number = version.split_whitespace().nth(2).unwrap_or("(none)");
    let mut parts = number.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u32>().ok());
    if (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < (8, 2) {
        println!("SKIP qemu_with_extended_headers: qemu-img {number} does not speak them, 8.2 does");
        return;
    }
    let server = Running::start();
    let tap = Tap::new(&server);
    let pattern = [
        "-f",
        "raw",
        &tap.uri(),
        "-c",
        "write -P 7 1M 64k",
        "-c",
        "read -P 7 1M 64k",
        "-c",
        "write -z 32M 32M",
    ];
    let out = Command::new("qemu-io").args(pattern).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success() && !said.contains("failed"), "{said}");
    let map =
        Command::new("qemu-img").args(["map", "-f", "raw", "--output=json", &tap.uri()]).output().unwrap();
    assert!(String::from_utf8_lossy(&map.stdout).contains("\"length\": 65536"), "{map:?}");
    let magic = EXTENDED_REQUEST_MAGIC.to_be_bytes();
    let extended = tap.take().iter().filter(|s| s.windows(4).any(|w| w == magic)).count();
    assert!(extended >= 2, "{extended} sessions with extended headers");
}

#[test]
fn what_was_recorded_still_leads_through_the_protocol() {
    if std::env::var_os("LH_RECORD").is_some() {
        return;
    }
    let mut through = 0;
    for entry in fs::read_dir(corpus()).expect("fuzz/corpus/nbd") {
        let path = entry.unwrap().path();
        let input = fs::read(&path).unwrap();
        assert!(input.len() <= LENGTH_MAX, "{} is too long", path.display());
        through += usize::from(replay(&input[1..]).is_some_and(|(device, _)| device > 0));
    }
    assert!(through >= 3, "only {through} recordings reach the device");
}
