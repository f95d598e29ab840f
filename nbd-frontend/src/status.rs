//! The reply to a block status request.
//!
//! What the device does not know is reported as data (flags 0), which is always a safe answer. An extent never
//! reaches beyond the range that was asked about, and the reply is bounded by [`EXTENTS_MAX`]: it may cover less than
//! was asked, and the client asks again.

use lh_block::{Allocation, Extent};
use zerocopy::IntoBytes;

use crate::export::Framing;
use crate::proto::{
    BASE_ALLOCATION_ID, StatusChunk, StatusChunkExt, StatusExtent, StatusExtentExt, chunk, command_flag,
    state,
};
use crate::transmit::{Call, Session, empty_head};

/// Extents in one reply: 2 KiB of answer to 32 bytes of request, and enough that a client which walks a fragmented
/// volume spends its time on more than round trips.
pub const EXTENTS_MAX: usize = 128;

/// Runs of allocation that are looked at for one reply; neighbours that are alike become one extent.
const LOOKUPS_MAX: usize = 1024;

impl Session {
    /// Appends the reply to a block status request over `range`, which is not empty. `allocation` tells how a range
    /// begins, as [`lh_block::Device::allocation`] does.
    pub fn status(
        &self,
        call: &Call,
        range: Extent,
        mut allocation: impl FnMut(Extent) -> Option<Allocation>,
        out: &mut Vec<u8>,
    ) {
        let limit = if call.flags & command_flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
        let mut extents = [(0_u64, 0_u32); EXTENTS_MAX];
        let mut count = 0;
        let mut at = range.offset;
        for _ in 0..LOOKUPS_MAX {
            let rest = Extent::new(at, range.end() - at);
            if rest.is_empty() {
                break;
            }
            let (len, flags) = describe(rest, allocation(rest));
            if count > 0 && extents[count - 1].1 == flags {
                extents[count - 1].0 += len;
            } else if count == limit {
                break;
            } else {
                extents[count] = (len, flags);
                count += 1;
            }
            at += len;
        }
        self.push_status(call, &extents[..count], out);
    }

    fn push_status(&self, call: &Call, extents: &[(u64, u32)], out: &mut Vec<u8>) {
        let mut head = empty_head();
        let context = BASE_ALLOCATION_ID.into();
        if self.agreed.framing == Framing::Extended {
            let begin = StatusChunkExt { context, count: count_of(extents).into() };
            let length = size_of::<StatusChunkExt>() + extents.len() * size_of::<StatusExtentExt>();
            self.push_chunk(&mut head, call, chunk::BLOCK_STATUS_EXT, length as u64);
            out.extend_from_slice(head.as_bytes());
            out.extend_from_slice(begin.as_bytes());
            for &(length, flags) in extents {
                let extent = StatusExtentExt { length: length.into(), flags: u64::from(flags).into() };
                out.extend_from_slice(extent.as_bytes());
            }
        } else {
            let length = size_of::<StatusChunk>() + extents.len() * size_of::<StatusExtent>();
            self.push_chunk(&mut head, call, chunk::BLOCK_STATUS, length as u64);
            out.extend_from_slice(head.as_bytes());
            out.extend_from_slice(StatusChunk { context }.as_bytes());
            for &(length, flags) in extents {
                let extent = StatusExtent { length: compact_len(length).into(), flags: flags.into() };
                out.extend_from_slice(extent.as_bytes());
            }
        }
    }
}

/// Length and flags of the extent that begins a range. A device that answers out of bounds is held to the range.
fn describe(rest: Extent, known: Option<Allocation>) -> (u64, u32) {
    match known {
        Some(known) if known.len > 0 => {
            let hole = if known.hole { state::HOLE } else { 0 };
            let zero = if known.zero { state::ZERO } else { 0 };
            (known.len.min(rest.len), hole | zero)
        }
        _ => (rest.len, 0),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "at most EXTENTS_MAX")]
const fn count_of(extents: &[(u64, u32)]) -> u32 {
    extents.len() as u32
}

#[expect(clippy::cast_possible_truncation, reason = "inside a range whose length came as 32 bits")]
const fn compact_len(length: u64) -> u32 {
    length as u32
}

#[cfg(test)]
mod tests {
    use lh_rig::hex;

    use super::*;
    use crate::export::Agreed;
    use crate::proto::command;

    fn session(framing: Framing) -> Session {
        Session { agreed: Agreed { framing, allocation: true, block_sizes: true }, read_only: false }
    }

    fn call(flags: u16, length: u64) -> Call {
        let kind = command::BLOCK_STATUS;
        Call { flags, kind, cookie: 0x0102_0304_0506_0708, offset: 4096, length, payload: 0 }
    }

    /// Blocks of 4096 bytes, by turns data and hole.
    fn stripes(range: Extent) -> Option<Allocation> {
        let odd = range.offset / 4096 % 2 == 1;
        Some(Allocation { len: 4096.min(range.len), hole: odd, zero: odd })
    }

    fn reply(framing: Framing, flags: u16, length: u64) -> Vec<u8> {
        let mut out = Vec::new();
        let call = call(flags, length);
        session(framing).status(&call, Extent::new(4096, length), stripes, &mut out);
        out
    }

    #[test]
    fn golden_structured() {
        assert_eq!(
            hex(&reply(Framing::Structured, 0, 8192)),
            "668e33ef0001000501020304050607080000001400000001\
             00001000000000030000100000000000"
        );
    }

    #[test]
    fn golden_extended() {
        assert_eq!(
            hex(&reply(Framing::Extended, 0, 8192)),
            "6e8a278c0001000601020304050607080000000000001000000000000000002800000001\
             00000002000000000000100000000000000000030000000000001000\
             0000000000000000"
        );
    }

    #[test]
    fn one_extent_if_one_was_asked_for() {
        let reply = reply(Framing::Structured, command_flag::REQ_ONE, 1 << 20);
        assert_eq!(hex(&reply[24..]), "0000100000000003");
    }

    #[test]
    fn bounded_and_nothing_beyond_the_range() {
        let reply = reply(Framing::Structured, 0, 4 << 20);
        assert_eq!(reply.len(), 20 + 4 + EXTENTS_MAX * 8);
        let mut out = Vec::new();
        let greedy = |_: Extent| Some(Allocation { len: u64::MAX, hole: true, zero: true });
        session(Framing::Structured).status(&call(0, 8192), Extent::new(4096, 8192), greedy, &mut out);
        assert_eq!(hex(&out[24..]), "0000200000000003");
    }

    #[test]
    fn the_unknown_is_data_and_neighbours_alike_are_one() {
        let mut out = Vec::new();
        session(Framing::Structured).status(&call(0, 8192), Extent::new(4096, 8192), |_| None, &mut out);
        assert_eq!(hex(&out[24..]), "0000200000000000");
        out.clear();
        let blocks = |range: Extent| Some(Allocation { len: 512.min(range.len), hole: true, zero: true });
        session(Framing::Structured).status(&call(0, 8192), Extent::new(4096, 8192), blocks, &mut out);
        assert_eq!(hex(&out[24..]), "0000200000000003");
    }
}
