//! A replica in memory: a thread that reads requests from a socket and answers them, well or badly.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use lh_wire::{HEADER_LEN, Header, OpCode, Status, flags};

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
}

const ALL: [Behaviour; 7] = [
    Behaviour::Well,
    Behaviour::HangUp,
    Behaviour::Garbage,
    Behaviour::WrongChecksum,
    Behaviour::OtherGeneration,
    Behaviour::Short,
    Behaviour::Hang,
];

#[derive(Debug)]
struct Shared {
    blocks: Mutex<Vec<u8>>,
    writes: AtomicU64,
    behaviour: AtomicU8,
}

/// The test's end of a replica.
#[derive(Debug)]
pub(crate) struct Replica(Arc<Shared>);

impl Replica {
    /// A replica of so many bytes, and the engine's end of its connection.
    pub(crate) fn start(size: usize, checksums: bool) -> (Self, OwnedFd) {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        let shared = Arc::new(Shared {
            blocks: Mutex::new(vec![0; size]),
            writes: AtomicU64::new(0),
            behaviour: AtomicU8::new(Behaviour::Well as u8),
        });
        let its = shared.clone();
        std::thread::spawn(move || serve(far, &its, checksums));
        (Self(shared), near.into())
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

fn serve(socket: UnixStream, shared: &Shared, checksums: bool) {
    let mut from = std::io::BufReader::with_capacity(1 << 20, socket.try_clone().expect("a descriptor"));
    let mut to = std::io::BufWriter::with_capacity(1 << 20, socket);
    let mut position = 0_u64;
    let mut payload = vec![0; lh_wire::MAX_PAYLOAD as usize];
    loop {
        if from.buffer().is_empty() && to.flush().is_err() {
            return;
        }
        let mut bytes = [0; HEADER_LEN];
        if from.read_exact(&mut bytes).is_err() {
            return;
        }
        let header = Header::decode(&bytes).expect("the engine sends good headers");
        let data = &mut payload[..header.payload as usize];
        let mut pad = [0; 512];
        from.read_exact(&mut pad[..header.pad.into()]).expect("padding");
        position += (HEADER_LEN + usize::from(header.pad)) as u64;
        if !data.is_empty() {
            assert_eq!(position % lh_wire::PAYLOAD_ALIGN, 0, "payloads are aligned in the stream");
        }
        from.read_exact(data).expect("payload");
        position += data.len() as u64;
        if checksums && !data.is_empty() {
            assert!(header.has(flags::CRC) && crc32c::crc32c(data) == header.payload_crc);
        }
        if answer(shared, header, data, &mut to, checksums).is_none() {
            return;
        }
    }
}

/// `None` ends the connection.
fn answer(s: &Shared, header: Header, data: &[u8], to: &mut impl Write, checksums: bool) -> Option<()> {
    let behaviour = ALL[usize::from(s.behaviour.load(Ordering::SeqCst))];
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
        _ => {}
    }
    match behaviour {
        Behaviour::Well | Behaviour::WrongChecksum => {}
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
