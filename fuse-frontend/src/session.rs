//! The FUSE session: what each request of the kernel asks of the device, and what the kernel is told.
//!
//! No I/O happens here and no data passes through: the caller keeps the bytes of a write or a read and only learns
//! where they belong. Invariants:
//!
//! - Every request that expects an answer gets exactly one, with its own `unique`, resent ones included.
//! - FSYNC is always a flush of the device and never refused: after one ENOSYS the kernel would never send another
//!   (`docs/invariants.md`, 5). It is handed on in the turn that it came in, since loop submits nothing, reads
//!   included, while one is unanswered.
//! - A hole that was asked for is never refused as unsupported: one EOPNOTSUPP switches discard off for good.
//! - A read is answered with all its bytes or with an error: the kernel takes no answer that is shorter or longer than its own header
//!   says, and whoever waits for it would wait for ever.
//! - A request that the engine gives up because it is stopping is not answered at all: the kernel keeps it for the
//!   next engine (`docs/invariants.md`, 6).

use lh_block::{Extent, Geometry, IoError, Op, SECTOR};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::proto::{
    Attr, AttrOut, FallocateIn, InHeader, Opcode, OpenOut, OutHeader, ROOT, ReadIn, StatfsOut, WriteIn,
    WriteOut, falloc, open_flags,
};

/// Errno values that only this protocol needs; those of the device come from [`IoError::errno`].
mod errno {
    pub(super) const ENOENT: i32 = 2;
    pub(super) const EIO: i32 = 5;
    pub(super) const ENOSYS: i32 = 38;
    pub(super) const EOPNOTSUPP: i32 = 95;
}

/// S_IFREG with read and write for root alone.
const MODE: u32 = 0o100_600;

/// What STATFS and GETATTR name as the block: what the layers have, so loop rounds discards to it.
const BLOCK: u32 = 4096;

/// Room for the longest answer without data, that of GETATTR.
const ANSWER_MAX: usize = size_of::<OutHeader>() + size_of::<AttrOut>();

/// Seconds that the kernel may keep the file's attributes: a year. Who lists a host's loop devices (LOOP_GET_STATUS64) has the kernel
/// ask for those of each one's file, and `losetup -a` and `mount -o loop` of any file would wait for a volume whose engine is
/// away. A write makes what is kept of size and times stale; before Linux 5.16 all of it (`fuse_direct_write_iter` of fs/fuse/file.c), and
/// who lists waits there still. A new size is told ([`crate::proto::size_notification`]), whatever was kept.
const KEPT: u64 = 365 * 24 * 60 * 60;

/// An answer without the data of a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    bytes: [u8; ANSWER_MAX],
    len: usize,
}

impl Answer {
    /// What is written to the kernel; the data of a READ follows it in the same write.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// An answer whose header counts `data` further bytes that the caller appends.
    fn new<T: IntoBytes + Immutable>(unique: u64, error: i32, body: &T, data: u32) -> Self {
        const HEAD: usize = size_of::<OutHeader>();
        let len = HEAD + size_of::<T>();
        let mut bytes = [0; ANSWER_MAX];
        #[expect(clippy::cast_possible_truncation, reason = "at most ANSWER_MAX")]
        let head = OutHeader { len: len as u32 + data, error, unique };
        bytes[..HEAD].copy_from_slice(head.as_bytes());
        bytes[HEAD..len].copy_from_slice(body.as_bytes());
        Self { bytes, len }
    }

    fn ok<T: IntoBytes + Immutable>(unique: u64, body: &T) -> Self {
        Self::new(unique, 0, body, 0)
    }

    fn error(unique: u64, errno: i32) -> Self {
        Self::new(unique, -errno, &[0_u8; 0], 0)
    }
}

/// What follows from a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// The device does it; [`Session::done`] makes the answer. A write's bytes are the request's last `range.len`.
    Submit {
        /// For the device's request and for `done`.
        tag: u64,
        /// What to do.
        op: Op,
        /// Where.
        range: Extent,
    },
    /// The kernel is told at once.
    Answer(Answer),
    /// The kernel expects nothing.
    Nothing,
}

/// What follows from the device's answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// These bytes alone.
    Plain(Answer),
    /// These bytes and the data of the read.
    WithData(Answer),
    /// Nothing: the kernel keeps the request for the next engine.
    Withheld,
}

/// How a finished request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// With an empty answer.
    Empty,
    /// With so many bytes of data.
    Data(u32),
    /// With the number of bytes written.
    Written(u32),
}

/// A place for a request that the device has.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// Unused; the next unused one.
    Free(u32),
    /// Taken.
    Taken { unique: u64, shape: Shape },
}

/// The end of the list of free places.
const NONE: u32 = u32::MAX;

/// The requests of one server of a connection.
#[derive(Debug)]
pub struct Session {
    places: Vec<Place>,
    free: u32,
    room: u32,
}

impl Session {
    /// A session that has at most `depth` requests at the device. Nothing is allocated afterwards.
    pub fn new(depth: u32) -> Self {
        let depth = depth.min(NONE - 1);
        let next = |i: u32| if i + 1 == depth { NONE } else { i + 1 };
        Self {
            places: (0..depth).map(|i| Place::Free(next(i))).collect(),
            free: if depth == 0 { NONE } else { 0 },
            room: depth,
        }
    }

    /// How many more requests can be handed to the device.
    pub const fn room(&self) -> u32 {
        self.room
    }

    /// Takes one request of the kernel: `len` bytes, of which `head` are the first (at least
    /// [`crate::proto::REQUEST_HEAD`] of them, if there are so many).
    ///
    /// # Panics
    /// If `room()` is 0.
    pub fn request(&mut self, geometry: &Geometry, head: &[u8], len: usize) -> Step {
        let Ok((header, body)) = InHeader::read_from_prefix(head) else {
            // Without a header there is nobody to answer; the kernel never does that.
            return Step::Nothing;
        };
        let unique = header.unique;
        if usize::try_from(header.len) != Ok(len) {
            return Step::Answer(Answer::error(unique, errno::EIO));
        }
        let Some(opcode) = Opcode::from_u32(header.opcode) else {
            return Step::Answer(Answer::error(unique, errno::ENOSYS));
        };
        let step = match opcode {
            Opcode::Read => self.read(unique, body, geometry),
            Opcode::Write => self.write(unique, body, len - (head.len() - body.len())),
            Opcode::Fsync => Some(self.submit(unique, Shape::Empty, Op::Flush, Extent::default())),
            Opcode::Fallocate => self.fallocate(unique, body),
            Opcode::Getattr if header.nodeid == ROOT => Some(Step::Answer(getattr(unique, geometry))),
            Opcode::Open if header.nodeid == ROOT => Some(Step::Answer(open(unique))),
            Opcode::Getattr | Opcode::Open | Opcode::Lookup => {
                Some(Step::Answer(Answer::error(unique, errno::ENOENT)))
            }
            Opcode::Statfs => Some(Step::Answer(statfs(unique, geometry))),
            Opcode::Flush | Opcode::Release | Opcode::Destroy => {
                Some(Step::Answer(Answer::ok(unique, &[0_u8; 0])))
            }
            // INIT is the keeper's, and once per connection.
            Opcode::Init => None,
            Opcode::Getxattr => Some(Step::Answer(Answer::error(unique, errno::ENOSYS))),
            Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt => Some(Step::Nothing),
        };
        step.unwrap_or_else(|| Step::Answer(Answer::error(unique, errno::EIO)))
    }

    /// Takes the device's answer to a submitted request; with `data` bytes if it was a read.
    ///
    /// # Panics
    /// If the tag is not one of a request at the device: then somebody would get the answer of another.
    pub fn done(&mut self, tag: u64, result: Result<(), IoError>, data: usize) -> Reply {
        let (unique, shape) = self.give_back(tag);
        match (result, shape) {
            (Ok(()), Shape::Empty) => Reply::Plain(Answer::ok(unique, &[0_u8; 0])),
            (Ok(()), Shape::Written(size)) => {
                Reply::Plain(Answer::ok(unique, &WriteOut { size, padding: 0 }))
            }
            (Ok(()), Shape::Data(len)) if usize::try_from(len) == Ok(data) => {
                Reply::WithData(Answer::new(unique, 0, &[0_u8; 0], len))
            }
            // A device that breaks its promise.
            (Ok(()), Shape::Data(_)) => Reply::Plain(Answer::error(unique, errno::EIO)),
            (Err(IoError::ShuttingDown), _) => Reply::Withheld,
            (Err(e), _) => Reply::Plain(Answer::error(unique, e.errno())),
        }
    }

    fn read(&mut self, unique: u64, body: &[u8], geometry: &Geometry) -> Option<Step> {
        let (read, _) = ReadIn::read_from_prefix(body).ok()?;
        // A file's reader is told its end by a short answer.
        let len = u64::from(read.size).min(geometry.size.saturating_sub(read.offset));
        let len = u32::try_from(len).ok()?;
        if len == 0 {
            return Some(Step::Answer(Answer::ok(unique, &[0_u8; 0])));
        }
        Some(self.submit(unique, Shape::Data(len), Op::Read, Extent::new(read.offset, len.into())))
    }

    /// `arguments` is the length of the request behind its header: the structure and the bytes.
    fn write(&mut self, unique: u64, body: &[u8], arguments: usize) -> Option<Step> {
        let (write, _) = WriteIn::read_from_prefix(body).ok()?;
        if arguments.checked_sub(size_of::<WriteIn>()) != usize::try_from(write.size).ok() {
            return None;
        }
        if write.size == 0 {
            return Some(Step::Answer(Answer::ok(unique, &WriteOut::default())));
        }
        let range = Extent::new(write.offset, write.size.into());
        Some(self.submit(unique, Shape::Written(write.size), Op::Write { fua: false }, range))
    }

    fn fallocate(&mut self, unique: u64, body: &[u8]) -> Option<Step> {
        let (request, _) = FallocateIn::read_from_prefix(body).ok()?;
        let op = match request.mode {
            falloc::PUNCH => Op::Unmap,
            falloc::ZERO => Op::WriteZeroes { fua: false, may_unmap: false, fast: false },
            _ => return Some(Step::Answer(Answer::error(unique, errno::EOPNOTSUPP))),
        };
        Some(self.submit(unique, Shape::Empty, op, Extent::new(request.offset, request.length)))
    }

    fn submit(&mut self, unique: u64, shape: Shape, op: Op, range: Extent) -> Step {
        let index = self.free;
        let place = self.places.get_mut(index as usize).expect("the caller reads only while there is room");
        let Place::Free(next) = *place else { unreachable!("the free list holds free places") };
        *place = Place::Taken { unique, shape };
        self.free = next;
        self.room -= 1;
        Step::Submit { tag: index.into(), op, range }
    }

    fn give_back(&mut self, tag: u64) -> (u64, Shape) {
        let index = u32::try_from(tag).expect("tags are places");
        let place = &mut self.places[index as usize];
        let Place::Taken { unique, shape } = *place else {
            panic!("answer to a request that is not at the device")
        };
        *place = Place::Free(self.free);
        self.free = index;
        self.room += 1;
        (unique, shape)
    }
}

fn getattr(unique: u64, geometry: &Geometry) -> Answer {
    let attr = Attr {
        ino: ROOT,
        size: geometry.size,
        blocks: geometry.size / SECTOR,
        mode: MODE,
        nlink: 1,
        blksize: BLOCK,
        ..Attr::default()
    };
    Answer::ok(unique, &AttrOut { attr_valid: KEPT, attr, ..AttrOut::default() })
}

fn open(unique: u64) -> Answer {
    let open_flags = open_flags::DIRECT_IO | open_flags::PARALLEL_DIRECT_WRITES;
    Answer::ok(unique, &OpenOut { fh: 0, open_flags, backing_id: 0 })
}

fn statfs(unique: u64, geometry: &Geometry) -> Answer {
    let blocks = geometry.size / u64::from(BLOCK);
    Answer::ok(
        unique,
        &StatfsOut { blocks, bsize: BLOCK, frsize: BLOCK, namelen: 255, ..StatfsOut::default() },
    )
}

#[cfg(test)]
mod tests;
