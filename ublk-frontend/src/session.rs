//! What each request of the kernel asks of the device, and what the kernel is told: the life of every tag.
//!
//! ```text
//! Fetching -> Waiting -> CopyingIn  -> AtDevice -> CopyingOut -> Fetching
//!                 \----- (no bytes) ----^     \--- (no bytes) ---^
//! AtDevice -> Withheld          any -> Gone
//! ```
//!
//! No I/O happens here. Invariants:
//!
//! - Every request that was fetched is answered exactly once, or withheld.
//! - A read is answered with success only after all its bytes have been copied to the kernel.
//! - A request that the engine gives up because it is stopping is not answered at all: the kernel keeps it for the next
//!   engine (`docs/invariants.md`, 6).

use lh_block::{Extent, Geometry, IoError, Op, SECTOR};

use crate::abi::{Descriptor, request_flag, request_op};

/// Errno values that only this protocol needs; those of the device come from [`IoError::errno`].
mod errno {
    pub(super) const EIO: i32 = 5;
    pub(super) const EOPNOTSUPP: i32 = 95;
}

/// A request: which of all tags, in the order queue by queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// What the device is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// What.
    pub op: Op,
    /// Where.
    pub range: Extent,
}

impl Work {
    /// Bytes that are copied in or out; never more than the kernel was told to ask for.
    pub fn bytes(&self) -> u32 {
        match self.op {
            Op::Read | Op::Write { .. } => u32::try_from(self.range.len).unwrap_or(u32::MAX),
            Op::WriteZeroes { .. } | Op::Unmap | Op::Flush | Op::Allocation => 0,
        }
    }

    const fn is_write(&self) -> bool {
        matches!(self.op, Op::Write { .. })
    }
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// At the kernel: its command completes when there is a request.
    Fetching,
    /// For room at the device and memory.
    Waiting(Work),
    /// Its bytes come from the kernel.
    CopyingIn(Work),
    /// The device has it.
    AtDevice(Work),
    /// Its bytes go to the kernel.
    CopyingOut(Work),
    /// Given up unanswered: the next server gets it.
    Withheld,
    /// The device is going away: no request comes here any more.
    Gone,
}

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait for room and memory, then call [`Session::admit`].
    Wait,
    /// Copy so many bytes from the kernel, then call [`Session::copied_in`].
    CopyIn(u32),
    /// Hand this to the device, then call [`Session::done`] with its answer.
    Submit(Work),
    /// Copy so many bytes to the kernel, then call [`Session::copied_out`].
    CopyOut(u32),
    /// Tell the kernel this result.
    Commit(i32),
    /// Nothing.
    Nothing,
}

/// All tags that a thread serves.
#[derive(Debug)]
pub struct Session {
    slots: Vec<State>,
    /// Slots that are not gone.
    alive: usize,
}

impl Session {
    /// A session whose `slots` requests are all about to be fetched.
    pub fn new(slots: usize) -> Self {
        Self { slots: vec![State::Fetching; slots], alive: slots }
    }

    /// True once no request can come any more.
    pub const fn is_gone(&self) -> bool {
        self.alive == 0
    }

    fn at(&mut self, slot: Slot) -> &mut State {
        &mut self.slots[slot.0 as usize]
    }

    /// The kernel has handed out a request.
    ///
    /// # Panics
    /// If the slot has one already.
    pub fn fetched(&mut self, slot: Slot, descriptor: &Descriptor, geometry: &Geometry) -> Step {
        let state = self.at(slot);
        assert_eq!(*state, State::Fetching, "{slot:?}");
        match work(descriptor, geometry) {
            Ok(work) => {
                *state = State::Waiting(work);
                Step::Wait
            }
            Err(errno) => Step::Commit(-errno),
        }
    }

    /// What a request that waits will need.
    ///
    /// # Panics
    /// If it does not wait.
    pub fn waiting(&self, slot: Slot) -> Work {
        match self.slots[slot.0 as usize] {
            State::Waiting(work) => work,
            other => panic!("{slot:?} is {other:?}"),
        }
    }

    /// Bytes that a request moves, wherever it is; 0 for a tag without one.
    pub fn bytes(&self, slot: Slot) -> u32 {
        match self.slots[slot.0 as usize] {
            State::Waiting(work)
            | State::CopyingIn(work)
            | State::AtDevice(work)
            | State::CopyingOut(work) => work.bytes(),
            State::Fetching | State::Withheld | State::Gone => 0,
        }
    }

    /// There is room and memory for a request that waits.
    ///
    /// # Panics
    /// If it does not wait.
    pub fn admit(&mut self, slot: Slot) -> Step {
        let work = self.waiting(slot);
        let state = self.at(slot);
        if work.is_write() {
            *state = State::CopyingIn(work);
            Step::CopyIn(work.bytes())
        } else {
            *state = State::AtDevice(work);
            Step::Submit(work)
        }
    }

    /// So many bytes of a write came from the kernel, or an errno.
    ///
    /// # Panics
    /// If none were asked for.
    pub fn copied_in(&mut self, slot: Slot, result: Result<u32, i32>) -> Step {
        let state = self.at(slot);
        let State::CopyingIn(work) = *state else { panic!("{slot:?} is {state:?}") };
        match whole(result, work.bytes()) {
            Ok(()) => {
                *state = State::AtDevice(work);
                Step::Submit(work)
            }
            Err(errno) => {
                *state = State::Fetching;
                Step::Commit(-errno)
            }
        }
    }

    /// The device has answered; with `data` bytes if it was a read.
    ///
    /// # Panics
    /// If it was not asked.
    pub fn done(&mut self, slot: Slot, result: Result<(), IoError>, data: u32) -> Step {
        let state = self.at(slot);
        let State::AtDevice(work) = *state else { panic!("{slot:?} is {state:?}") };
        match result {
            Ok(()) if work.op == Op::Read && data != work.bytes() => {
                *state = State::Fetching;
                Step::Commit(-errno::EIO)
            }
            Ok(()) if work.op == Op::Read => {
                *state = State::CopyingOut(work);
                Step::CopyOut(data)
            }
            Ok(()) => {
                *state = State::Fetching;
                Step::Commit(result_of(work.bytes()))
            }
            Err(IoError::ShuttingDown) => {
                *state = State::Withheld;
                Step::Nothing
            }
            Err(e) => {
                *state = State::Fetching;
                Step::Commit(-e.errno())
            }
        }
    }

    /// So many bytes of a read have reached the kernel, or an errno.
    ///
    /// # Panics
    /// If none were sent.
    pub fn copied_out(&mut self, slot: Slot, result: Result<u32, i32>) -> Step {
        let state = self.at(slot);
        let State::CopyingOut(work) = *state else { panic!("{slot:?} is {state:?}") };
        *state = State::Fetching;
        match whole(result, work.bytes()) {
            Ok(()) => Step::Commit(result_of(work.bytes())),
            Err(errno) => Step::Commit(-errno),
        }
    }

    /// The slot's command has ended without a request: the device goes away, or the server is being replaced.
    pub fn gone(&mut self, slot: Slot) {
        let state = self.at(slot);
        if *state != State::Gone {
            *state = State::Gone;
            self.alive -= 1;
        }
    }
}

/// All bytes, or an errno: a part of them is of no use to anybody.
fn whole(result: Result<u32, i32>, wanted: u32) -> Result<(), i32> {
    match result {
        Ok(bytes) if bytes == wanted => Ok(()),
        Ok(_) => Err(errno::EIO),
        Err(errno) => Err(errno),
    }
}

fn result_of(bytes: u32) -> i32 {
    i32::try_from(bytes).unwrap_or(i32::MAX)
}

/// What a descriptor asks for.
fn work(descriptor: &Descriptor, geometry: &Geometry) -> Result<Work, i32> {
    let flags = descriptor.op_flags;
    let fua = flags & request_flag::FUA != 0;
    let op = match flags & 0xff {
        request_op::READ => Op::Read,
        request_op::WRITE => Op::Write { fua },
        request_op::FLUSH => return Ok(Work { op: Op::Flush, range: Extent::default() }),
        request_op::DISCARD => Op::Unmap,
        request_op::WRITE_ZEROES => {
            Op::WriteZeroes { fua, may_unmap: flags & request_flag::NOUNMAP == 0, fast: false }
        }
        _ => return Err(errno::EOPNOTSUPP),
    };
    let range = Extent::new(
        descriptor.start_sector.saturating_mul(SECTOR),
        u64::from(descriptor.nr_sectors) * SECTOR,
    );
    if range.is_empty() || range.end() > geometry.size {
        return Err(IoError::OutOfRange.errno());
    }
    let work = Work { op, range };
    if work.bytes() > geometry.max_transfer {
        return Err(IoError::Invalid.errno());
    }
    Ok(work)
}

#[cfg(test)]
mod tests;
