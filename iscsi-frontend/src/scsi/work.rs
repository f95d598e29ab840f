//! What a command does to the medium, as a machine: requests to the device, one after the other, and their answers.
//!
//! - At most one request of a command is with the device at a time. So a command's later steps see its earlier ones.
//! - COMPARE AND WRITE and ORWRITE read before they write; the caller keeps other writes out of their range
//!   ([`Work::claim`]) from the first step to the last.
//! - Data is passed on as it came. Only what the commands themselves compute (a pattern repeated, an OR) is written here.

use lh_block::{Done, Extent, Op};
use lh_ring::{Payload, Pool};

use super::command::{be32, be64};
use super::lba_status::{ANSWER_MAX, LbaStatus};
use super::sense::{INTERNAL, MISCOMPARED, OUT_OF_RANGE, Sense};

/// Longest read or write of one command in bytes, told as MAXIMUM TRANSFER LENGTH. A payload holds a little more.
pub const TRANSFER_MAX: u32 = 1 << 20;

/// Most bytes that COMPARE AND WRITE compares: its data, twice as many, is one payload.
pub const COMPARE_WRITE_BYTES: u32 = TRANSFER_MAX / 2;

/// Bytes of a repeated pattern that are made at once.
const PATTERN_BYTES: u32 = 256 << 10;

const _: () = assert!(TRANSFER_MAX as usize <= Payload::MAX && PATTERN_BYTES <= TRANSFER_MAX);

/// Most blocks of a WRITE SAME: more would keep a range of the volume busy for long.
pub(crate) const WRITE_SAME_BLOCKS: u32 = 32 << 10;

/// Bytes compared or combined at once.
const PIECE: usize = 4096;

/// A command on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// READ.
    Read(Extent),
    /// READ with FUA: answered only once what it gives is on stable storage.
    ReadStable(Extent),
    /// WRITE.
    Write {
        /// Where.
        range: Extent,
        /// The answer waits for stable storage.
        fua: bool,
    },
    /// WRITE AND VERIFY.
    WriteVerify {
        /// Where.
        range: Extent,
        /// Read it back and compare (BYTCHK).
        compare: bool,
    },
    /// VERIFY with data to compare.
    Verify {
        /// Where.
        range: Extent,
        /// Bytes that come: as many as the range has, or one block that is compared with every block.
        data: u32,
    },
    /// COMPARE AND WRITE.
    CompareAndWrite {
        /// Where.
        range: Extent,
        /// As for `Write`.
        fua: bool,
    },
    /// ORWRITE.
    OrWrite {
        /// Where.
        range: Extent,
        /// As for `Write`.
        fua: bool,
    },
    /// WRITE SAME with a block of data.
    WriteSame {
        /// Where.
        range: Extent,
        /// Bytes of the block.
        block: u32,
        /// The range is unmapped, whatever the block says.
        unmap: bool,
        /// As for `Write`.
        fua: bool,
    },
    /// WRITE SAME without data (NDOB).
    Zero {
        /// Where.
        range: Extent,
        /// May be unmapped.
        unmap: bool,
        /// As for `Write`.
        fua: bool,
    },
    /// UNMAP, whose descriptors come as data.
    Unmap {
        /// Bytes of the parameter list.
        data: u32,
        /// Bytes of a block.
        block: u32,
        /// Bytes of the volume.
        size: u64,
        /// As for `Write`: once for all of them, behind the last.
        fua: bool,
    },
    /// SYNCHRONIZE CACHE.
    Flush,
    /// GET LBA STATUS.
    LbaStatus(LbaStatus),
}

/// What of the medium a command needs for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nothing: it changes nothing, and what it reads may change meanwhile.
    Nothing,
    /// It writes this range: not while somebody has it for himself.
    Write(Extent),
    /// Nobody else may write this range from the first step to the last.
    Own(Extent),
    /// Nobody else does anything: an ORDERED command.
    All,
}

impl Claim {
    /// True if two commands with these claims must not run at the same time.
    pub fn conflicts(self, other: Self) -> bool {
        match (self, other) {
            (Self::All, _) | (_, Self::All) => true,
            (Self::Own(a), Self::Own(b) | Self::Write(b)) | (Self::Write(a), Self::Own(b)) => a.overlaps(b),
            _ => false,
        }
    }

    /// True if it has to be looked whether others conflict.
    pub fn is_exclusive(self) -> bool {
        matches!(self, Self::Own(_) | Self::All)
    }
}

impl Work {
    /// Bytes that the initiator sends.
    pub fn data_out(&self) -> u32 {
        match *self {
            Self::Write { range, .. } | Self::WriteVerify { range, .. } | Self::OrWrite { range, .. } => {
                bytes_of(range)
            }
            Self::CompareAndWrite { range, .. } => 2 * bytes_of(range),
            Self::Verify { data, .. } | Self::Unmap { data, .. } => data,
            Self::WriteSame { block, .. } => block,
            Self::Read(_) | Self::ReadStable(_) | Self::Zero { .. } | Self::Flush | Self::LbaStatus(_) => 0,
        }
    }

    /// True if the initiator must send exactly [`Work::data_out`] bytes: what it compares or repeats, and where, would
    /// be a guess otherwise.
    pub fn is_exact(&self) -> bool {
        matches!(self, Self::CompareAndWrite { .. } | Self::WriteSame { .. })
    }

    /// Bytes that the initiator gets.
    pub fn data_in(&self) -> u32 {
        match self {
            Self::Read(range) | Self::ReadStable(range) => bytes_of(*range),
            Self::LbaStatus(status) => status.bytes(),
            _ => 0,
        }
    }

    /// Bytes of memory that it takes at most, besides the data that comes.
    pub fn memory(&self) -> u32 {
        match *self {
            Self::Read(range)
            | Self::ReadStable(range)
            | Self::OrWrite { range, .. }
            | Self::CompareAndWrite { range, .. } => bytes_of(range),
            Self::WriteVerify { range, compare: true } => bytes_of(range),
            Self::Verify { range, .. } => bytes_of(range).min(TRANSFER_MAX),
            Self::WriteSame { .. } => PATTERN_BYTES,
            Self::LbaStatus(_) => ANSWER_MAX,
            _ => 0,
        }
    }

    /// True if it changes the medium.
    pub fn is_write(&self) -> bool {
        let reads = matches!(self, Self::Read(_) | Self::ReadStable(_) | Self::Verify { .. });
        !reads && !matches!(self, Self::Flush | Self::LbaStatus(_))
    }

    /// The same, answered only once it is on stable storage.
    #[must_use]
    pub fn durable(mut self) -> Self {
        match &mut self {
            Self::Write { fua, .. }
            | Self::CompareAndWrite { fua, .. }
            | Self::OrWrite { fua, .. }
            | Self::WriteSame { fua, .. }
            | Self::Zero { fua, .. }
            | Self::Unmap { fua, .. } => *fua = true,
            // Always is; or has nothing to be.
            Self::WriteVerify { .. }
            | Self::Read(_)
            | Self::ReadStable(_)
            | Self::Verify { .. }
            | Self::Flush
            | Self::LbaStatus(_) => {}
        }
        self
    }

    /// See [`Claim`].
    pub fn claim(&self) -> Claim {
        match *self {
            Self::Read(_) | Self::ReadStable(_) | Self::Verify { .. } | Self::Flush | Self::LbaStatus(_) => {
                Claim::Nothing
            }
            Self::CompareAndWrite { range, .. } | Self::OrWrite { range, .. } => Claim::Own(range),
            Self::Write { range, .. }
            | Self::WriteVerify { range, .. }
            | Self::WriteSame { range, .. }
            | Self::Zero { range, .. } => Claim::Write(range),
            // Its ranges come with the data.
            Self::Unmap { size, .. } => Claim::Write(Extent::new(0, size)),
        }
    }
}

/// The next step of a command.
#[derive(Debug)]
pub enum Step {
    /// A request to the device; its answer goes to [`Execution::answer`].
    Device {
        /// What.
        op: Op,
        /// Where.
        range: Extent,
        /// The bytes of a write.
        data: Option<Payload>,
    },
    /// It is over. The bytes are a read's.
    Over(Result<Option<Payload>, Sense>),
    /// There is no memory now: status BUSY, and the initiator tries again.
    NoMemory,
}

/// A command on its way.
#[derive(Debug)]
pub struct Execution {
    work: Work,
    data: Option<Payload>,
    /// Bytes of the range, or descriptors of the parameter list, that are done.
    done: u64,
    /// The device has something of it that is to reach the medium: a write, zeroes, an unmap, or a flush of those before. If it does
    /// not, that is a write's error.
    writing: bool,
}

impl Execution {
    /// The first step of a command whose data has come: [`Work::data_out`] bytes of it.
    pub fn start(work: Work, data: Option<Payload>, pool: &Pool) -> (Self, Step) {
        let mut execution = Self { work, data, done: 0, writing: false };
        let step = execution.first(pool);
        (execution, step)
    }

    /// What kind of command it is.
    pub fn work(&self) -> &Work {
        &self.work
    }

    fn first(&mut self, pool: &Pool) -> Step {
        match self.work {
            Work::Read(range) | Work::ReadStable(range) => read(range),
            Work::Write { range, fua } => {
                let data = self.data.take();
                self.write(range, fua, data)
            }
            Work::WriteVerify { range, compare } => {
                // Without a comparison, verified is what is on stable storage.
                let data = if compare { self.data.clone() } else { self.data.take() };
                self.write(range, true, data)
            }
            Work::Verify { .. } => self.verify_next(),
            Work::CompareAndWrite { range, .. } | Work::OrWrite { range, .. } => read(range),
            Work::WriteSame { range, unmap, fua, .. } => {
                // Where UNMAP is set other targets (tgtd, LIO) do not look at the block, and initiators rely on that.
                if unmap || self.data.as_ref().is_none_or(Payload::is_zero) {
                    self.data = None;
                    return self.zero(range, unmap, fua);
                }
                self.repeat(range, fua, pool)
            }
            Work::Zero { range, unmap, fua } => self.zero(range, unmap, fua),
            Work::Unmap { .. } => match self.check_descriptors() {
                Ok(()) => self.unmap_next(),
                Err(sense) => Step::Over(Err(sense)),
            },
            Work::Flush => self.flush(),
            Work::LbaStatus(status) => Step::Device { op: Op::Allocation, range: status.range, data: None },
        }
    }

    /// The next step after the device's answer.
    pub fn answer(&mut self, done: Done<Payload>, pool: &Pool) -> Step {
        if let Err(reason) = done.result {
            return Step::Over(Err(Sense::of_device(reason, self.writing)));
        }
        let writing = std::mem::take(&mut self.writing);
        match self.work {
            Work::ReadStable(_) if writing => Step::Over(Ok(self.data.take())),
            Work::Read(_)
            | Work::ReadStable(_)
            | Work::Verify { .. }
            | Work::CompareAndWrite { .. }
            | Work::OrWrite { .. }
                if !writing =>
            {
                match done.data {
                    Some(data) => self.has_read(data, pool),
                    // A device that breaks its promise.
                    None => Step::Over(Err(INTERNAL)),
                }
            }
            Work::WriteVerify { range, compare } => match (writing, compare, done.data) {
                (true, true, _) => read(range),
                (true, false, _) => Step::Over(Ok(None)),
                (false, _, Some(data)) => self.has_read(data, pool),
                (false, _, None) => Step::Over(Err(INTERNAL)),
            },
            Work::WriteSame { range, fua, .. } => self.write_pattern(range, fua),
            Work::Unmap { .. } => self.unmap_next(),
            Work::LbaStatus(status) => {
                let told = done.data.map_or_else(Vec::new, |told| told.to_vec());
                tell(&status.answer(&told), pool)
            }
            _ => Step::Over(Ok(None)),
        }
    }

    fn write(&mut self, range: Extent, fua: bool, data: Option<Payload>) -> Step {
        self.writing = true;
        Step::Device { op: Op::Write { fua }, range, data }
    }

    fn zero(&mut self, range: Extent, unmap: bool, fua: bool) -> Step {
        self.writing = true;
        self.done = range.len;
        let op =
            if unmap && !fua { Op::Unmap } else { Op::WriteZeroes { fua, may_unmap: unmap, fast: false } };
        Step::Device { op, range, data: None }
    }

    fn has_read(&mut self, data: Payload, pool: &Pool) -> Step {
        if let Work::ReadStable(_) = self.work {
            // Behind the read: what it has seen was answered before.
            self.data = Some(data);
            return self.flush();
        }
        let Some(ours) = &self.data else { return Step::Over(Ok(Some(data))) };
        match self.work {
            Work::CompareAndWrite { range, fua } => {
                let half = data.len();
                if let Some(at) = difference(&data, 0, ours, 0, half) {
                    return Step::Over(Err(miscompared(at as u64)));
                }
                let new = ours.slice(half, half);
                self.data = None;
                self.write(range, fua, Some(new))
            }
            Work::OrWrite { range, fua } => {
                let Some(mut new) = own(data, pool) else { return Step::NoMemory };
                or_into(&mut new, ours);
                self.data = None;
                self.write(range, fua, Some(new))
            }
            Work::Verify { range, data: bytes } if u64::from(bytes) < range.len => {
                // One block, compared with each.
                let block = ours.len();
                for at in (0..data.len()).step_by(block) {
                    if let Some(found) = difference(&data, at, ours, 0, block) {
                        return Step::Over(Err(miscompared(self.done + (at + found) as u64)));
                    }
                }
                self.done += data.len() as u64;
                self.verify_next()
            }
            _ => match difference(&data, 0, ours, 0, data.len()) {
                Some(at) => Step::Over(Err(miscompared(at as u64))),
                None => Step::Over(Ok(None)),
            },
        }
    }

    fn verify_next(&mut self) -> Step {
        let Work::Verify { range, .. } = self.work else { return Step::Over(Err(INTERNAL)) };
        let left = range.len - self.done;
        if left == 0 {
            return Step::Over(Ok(None));
        }
        read(Extent::new(range.offset + self.done, left.min(u64::from(TRANSFER_MAX))))
    }

    /// Makes a payload of the pattern and writes it as often as needed.
    fn repeat(&mut self, range: Extent, fua: bool, pool: &Pool) -> Step {
        let Some(block) = self.data.take() else { return Step::Over(Err(INTERNAL)) };
        let len = u32::try_from(range.len).unwrap_or(u32::MAX).min(PATTERN_BYTES);
        let Some(mut pattern) = pool.alloc(len, 512) else { return Step::NoMemory };
        for at in (0..pattern.len()).step_by(block.len()) {
            pattern.write_payload(at, &block);
        }
        self.data = Some(pattern);
        self.write_pattern(range, fua)
    }

    fn write_pattern(&mut self, range: Extent, fua: bool) -> Step {
        let left = range.len - self.done;
        let Some(pattern) = self.data.as_ref().filter(|_| left > 0) else { return Step::Over(Ok(None)) };
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(pattern.len());
        let at = Extent::new(range.offset + self.done, len as u64);
        let data = pattern.slice(0, len);
        self.done += len as u64;
        self.write(at, fua, Some(data))
    }

    /// Checks the parameter list of an UNMAP (SBC-3, 5.28.2) before anything is unmapped.
    fn check_descriptors(&self) -> Result<(), Sense> {
        let Work::Unmap { block, size, .. } = self.work else { return Err(INTERNAL) };
        let Some(list) = self.data.as_ref().filter(|list| !list.is_empty()) else { return Ok(()) };
        if list.len() < 8 {
            return Err(super::sense::PARAMETER_LIST_LENGTH);
        }
        for at in 0..self.descriptors() {
            let range = self.descriptor(at, block);
            if range.end() > size {
                let field = u16::try_from(8 + 16 * at).unwrap_or(0);
                return Err(OUT_OF_RANGE.at_parameter(field));
            }
        }
        Ok(())
    }

    /// How many descriptors there are: as many as came and as the list says. One that is not whole does not count (SBC-3, 5.28.2).
    fn descriptors(&self) -> usize {
        let Some(list) = self.data.as_ref().filter(|list| list.len() >= 8) else { return 0 };
        let head = head_of(list);
        let told = usize::from(u16::from_be_bytes([head[2], head[3]]));
        told.min(list.len() - 8) / 16
    }

    fn descriptor(&self, index: usize, block: u32) -> Extent {
        let mut bytes = [0; 16];
        if let Some(list) = &self.data {
            list.read_at(8 + 16 * index, &mut bytes);
        }
        let (first, count) = (be64(&bytes, 0), u64::from(be32(&bytes, 8)));
        let block = u64::from(block);
        Extent::new(first.saturating_mul(block), count * block)
    }

    fn unmap_next(&mut self) -> Step {
        let Work::Unmap { block, fua, .. } = self.work else { return Step::Over(Err(INTERNAL)) };
        let count = self.descriptors();
        while let Some(index) = usize::try_from(self.done).ok().filter(|index| *index < count) {
            self.done += 1;
            let range = self.descriptor(index, block);
            if !range.is_empty() {
                self.writing = true;
                return Step::Device { op: Op::Unmap, range, data: None };
            }
        }
        if fua && self.done == count as u64 {
            // Without a write cache nobody asks for the flush that would keep the old data from coming back.
            self.done += 1;
            return self.flush();
        }
        Step::Over(Ok(None))
    }

    fn flush(&mut self) -> Step {
        self.writing = true;
        Step::Device { op: Op::Flush, range: Extent::default(), data: None }
    }
}

fn read(range: Extent) -> Step {
    Step::Device { op: Op::Read, range, data: None }
}

fn tell(answer: &[u8], pool: &Pool) -> Step {
    let len = u32::try_from(answer.len()).unwrap_or(u32::MAX);
    let Some(mut payload) = pool.alloc(len, 1) else { return Step::NoMemory };
    payload.write_at(0, answer);
    Step::Over(Ok(Some(payload)))
}

fn head_of(list: &Payload) -> [u8; 8] {
    let mut head = [0; 8];
    list.read_at(0, &mut head);
    head
}

fn miscompared(at: u64) -> Sense {
    u32::try_from(at).map_or(MISCOMPARED, |at| MISCOMPARED.with_information(at))
}

fn bytes_of(range: Extent) -> u32 {
    u32::try_from(range.len).unwrap_or(u32::MAX)
}

/// The first of `len` bytes in which two payloads differ, counted from where the comparison begins.
fn difference(a: &Payload, a_from: usize, b: &Payload, b_from: usize, len: usize) -> Option<usize> {
    let len = len.min(a.len() - a_from).min(b.len().saturating_sub(b_from));
    let (mut left, mut right) = ([0; PIECE], [0; PIECE]);
    for at in (0..len).step_by(PIECE) {
        let n = PIECE.min(len - at);
        a.read_at(a_from + at, &mut left[..n]);
        b.read_at(b_from + at, &mut right[..n]);
        if left[..n] != right[..n] {
            return left[..n].iter().zip(&right[..n]).position(|(l, r)| l != r).map(|found| at + found);
        }
    }
    None
}

/// The payload, if its bytes may be written, or a copy. `None` if there is no memory for that.
fn own(data: Payload, pool: &Pool) -> Option<Payload> {
    if data.is_exclusive() {
        return Some(data);
    }
    let mut copy = pool.alloc(u32::try_from(data.len()).ok()?, 512)?;
    copy.write_payload(0, &data);
    Some(copy)
}

/// Sets the bits of `with` in `data`, which is exclusive.
fn or_into(data: &mut Payload, with: &Payload) {
    let (mut left, mut right) = ([0; PIECE], [0; PIECE]);
    let len = data.len().min(with.len());
    for at in (0..len).step_by(PIECE) {
        let n = PIECE.min(len - at);
        data.read_at(at, &mut left[..n]);
        with.read_at(at, &mut right[..n]);
        left[..n].iter_mut().zip(&right[..n]).for_each(|(l, r)| *l |= r);
        data.write_at(at, &left[..n]);
    }
}

#[cfg(test)]
mod tests;
