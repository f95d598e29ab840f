//! A replica in memory: a thread that reads requests from a socket and answers them, well or badly.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use lh_ring::Lent;
use lh_wire::{HEADER_LEN, Header, OpCode, Pieces, Status, flags};

/// How it answers from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Behaviour {
    /// As it should.
    Well,
    /// Closes the connection instead.
    HangUp,
    /// With bytes that are no header.
    Garbage,
    /// With a wrong checksum of the payload.
    WrongChecksum,
    /// In the name of another engine.
    OtherGeneration,
    /// With fewer bytes than asked for.
    Short,
    /// Not at all.
    Hang,
    /// As it should, but reads no message before it is told to behave otherwise.
    Stopped,
    /// The same, but it has read the message: its disk is at it.
    AtItsDisk,
}

const ALL: [Behaviour; 9] = [
    Behaviour::Well,
    Behaviour::HangUp,
    Behaviour::Garbage,
    Behaviour::WrongChecksum,
    Behaviour::OtherGeneration,
    Behaviour::Short,
    Behaviour::Hang,
    Behaviour::Stopped,
    Behaviour::AtItsDisk,
];

#[derive(Debug)]
struct Shared {
    blocks: Mutex<Vec<u8>>,
    writes: AtomicU64,
    behaviour: AtomicU8,
    /// The thread of the last connection.
    last: Mutex<Option<JoinHandle<()>>>,
}

/// The test's end of a replica.
#[derive(Debug)]
pub(crate) struct Replica(Arc<Shared>);

impl Replica {
    /// A replica of so many bytes, and the engine's end of its connection. `memory` is lent to it.
    pub(crate) fn start(size: usize, checksums: bool, memory: Option<OwnedFd>) -> (Self, OwnedFd) {
        let shared = Arc::new(Shared {
            blocks: Mutex::new(vec![0; size]),
            writes: AtomicU64::new(0),
            behaviour: AtomicU8::new(Behaviour::Well as u8),
            last: Mutex::new(None),
        });
        let new = Self(shared);
        let near = new.listen(checksums, memory);
        (new, near)
    }

    /// Another connection to it: the engine's end. What came from those before is done first, as replicas do it, so the engine has
    /// closed them.
    pub(crate) fn listen(&self, checksums: bool, memory: Option<OwnedFd>) -> OwnedFd {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        let its = self.0.clone();
        let mut last = self.0.last.lock().expect("no panic");
        let before = last.take();
        *last = Some(std::thread::spawn(move || {
            // One that was told to behave badly may have ended so.
            let _ = before.map(JoinHandle::join);
            serve(far, &its, checksums, memory);
        }));
        drop(last);
        near.into()
    }

    /// What it holds.
    pub(crate) fn blocks(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.blocks.lock().expect("no panic")
    }

    /// Writes that it has done.
    pub(crate) fn writes(&self) -> u64 {
        self.0.writes.load(Ordering::SeqCst)
    }

    /// Changes how it answers.
    pub(crate) fn behave(&self, behaviour: Behaviour) {
        self.0.behaviour.store(behaviour as u8, Ordering::SeqCst);
    }
}

impl Shared {
    fn behaviour(&self) -> Behaviour {
        ALL[usize::from(self.behaviour.load(Ordering::SeqCst))]
    }

    fn wait_while(&self, behaviour: Behaviour) {
        while self.behaviour() == behaviour {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn serve(socket: UnixStream, shared: &Shared, checksums: bool, memory: Option<OwnedFd>) {
    let lent = memory.map(|memory| Lent::open(memory).expect("it is mapped"));
    let mut from = std::io::BufReader::with_capacity(1 << 20, socket.try_clone().expect("a descriptor"));
    let mut to = std::io::BufWriter::with_capacity(1 << 20, socket);
    let mut position = 0_u64;
    let mut payload = vec![0; lh_wire::MAX_PAYLOAD as usize];
    loop {
        if from.buffer().is_empty() {
            // Who does not want the answers may have sent more before it went.
            let _ = to.flush();
        }
        let mut bytes = [0; HEADER_LEN];
        shared.wait_while(Behaviour::Stopped);
        if from.read_exact(&mut bytes).is_err() {
            return;
        }
        let header = Header::decode(&bytes).expect("the engine sends good headers");
        let data = &mut payload[..header.payload as usize];
        let mut pad = [0; 512];
        from.read_exact(&mut pad[..header.pad.into()]).expect("padding");
        position += (HEADER_LEN + usize::from(header.pad)) as u64;
        if !data.is_empty() && !header.has(flags::LENT) {
            assert_eq!(position % lh_wire::PAYLOAD_ALIGN, 0, "payloads are aligned in the stream");
        }
        from.read_exact(data).expect("payload");
        position += data.len() as u64;
        shared.wait_while(Behaviour::AtItsDisk);
        let borrowed = (header.has(flags::LENT)).then(|| {
            let pieces = Pieces::decode(data, header.length).expect("pieces of the range");
            let lent = lent.as_ref().expect("memory was lent");
            lent.payload(pieces.iter()).expect("they are in the memory").to_vec()
        });
        let long = header.op == OpCode::Write && header.length >= 4 << 10;
        assert_eq!(borrowed.is_some(), long && lent.is_some());
        let data = borrowed.as_deref().unwrap_or(data);
        if checksums && !data.is_empty() {
            assert!(header.has(flags::CRC) && crc32c::crc32c(data) == header.payload_crc);
        }
        if answer(shared, header, data, &mut to, checksums).is_none() {
            return;
        }
    }
}

/// What is said of places: a counter that was never raised, and all blocks in the first file.
const IN_THE_FIRST_FILE: [u8; lh_wire::Places::LEN_MAX] = {
    let mut places = [1; lh_wire::Places::LEN_MAX];
    let mut byte = 0;
    while byte < 8 {
        places[byte] = 0;
        byte += 1;
    }
    places
};

/// `None` ends the connection.
fn answer(s: &Shared, header: Header, data: &[u8], to: &mut impl Write, checksums: bool) -> Option<()> {
    let behaviour = s.behaviour();
    let mut blocks = s.blocks.lock().expect("no panic");
    let first = usize::try_from(header.offset).expect("a small volume");
    let range = first..first + header.length as usize;
    let mut reply = header.response(Status::Ok);
    let mut body: &[u8] = &[];
    match header.op {
        OpCode::Read => body = &blocks[range],
        OpCode::Write => {
            blocks[range].copy_from_slice(data);
            s.writes.fetch_add(1, Ordering::SeqCst);
        }
        OpCode::WriteZeroes | OpCode::Unmap => blocks[range].fill(0),
        OpCode::Control => body = data,
        // A counter that was never raised, and all blocks in the first file.
        OpCode::Places => body = &IN_THE_FIRST_FILE[..8 + header.length as usize / 4096],
        _ => {}
    }
    match behaviour {
        Behaviour::Well | Behaviour::WrongChecksum | Behaviour::Stopped | Behaviour::AtItsDisk => {}
        Behaviour::HangUp => return None,
        Behaviour::Garbage => return to.write_all(&[0x5a; 128]).ok(),
        Behaviour::OtherGeneration => reply.generation = reply.generation.next_attachment(),
        Behaviour::Short => body = &body[..body.len() / 2],
        Behaviour::Hang => return Some(()),
    }
    reply.payload = u32::try_from(body.len()).expect("small");
    if checksums && !body.is_empty() {
        reply.flags |= flags::CRC;
        reply.payload_crc = crc32c::crc32c(body) ^ u32::from(behaviour == Behaviour::WrongChecksum);
    }
    to.write_all(&reply.encode()).ok()?;
    to.write_all(body).ok()
}
