//! The reply to a block status request.
//!
//! What the device does not know is reported as data (flags 0), which is always a safe answer. An extent never
//! reaches beyond the range that was asked about, and the reply is bounded by [`EXTENTS_MAX`]: it may cover less than
//! was asked, and the client asks again.

use lh_block::{Extent, Run, runs};
use zerocopy::IntoBytes;

use crate::export::Framing;
use crate::proto::{
    BASE_ALLOCATION_ID, StatusChunk, StatusChunkExt, StatusExtent, StatusExtentExt, chunk, command_flag,
    state,
};
use crate::transmit::{Call, Session, empty_head};

/// Extents in one reply: 2 KiB of answer to 32 bytes of request, and as many as the device tells at once.
pub const EXTENTS_MAX: usize = lh_block::RUNS_MAX;

impl Session {
    /// Appends the reply to a block status request over `range`, which is not empty. `told` is the device's answer to
    /// [`lh_block::Op::Allocation`], empty if it had none.
    pub fn status(&self, call: &Call, range: Extent, told: &[u8], out: &mut Vec<u8>) {
        let limit = if call.flags & command_flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
        let mut extents = [(0_u64, 0_u32); EXTENTS_MAX];
        let mut count = 0;
        for (extent, Run { range, data }) in extents.iter_mut().zip(runs(told, range)).take(limit) {
            *extent = (range.len, if data { 0 } else { state::HOLE | state::ZERO });
            count += 1;
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
    use lh_block::Runs;
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

    /// The reply where the device tells this.
    fn told(framing: Framing, flags: u16, length: u64, told: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let call = call(flags, length);
        session(framing).status(&call, Extent::new(4096, length), told, &mut out);
        out
    }

    /// The same for blocks that are by turns data and hole.
    fn reply(framing: Framing, flags: u16, length: u64) -> Vec<u8> {
        let mut runs = Runs::default();
        (0..length / 4096).take_while(|n| runs.push(1, n % 2 == 0)).count();
        told(framing, flags, length, runs.as_bytes())
    }

    #[test]
    fn golden_structured() {
        assert_eq!(
            hex(&reply(Framing::Structured, 0, 8192)),
            "668e33ef0001000501020304050607080000001400000001\
             00001000000000000000100000000003"
        );
    }

    #[test]
    fn golden_extended() {
        assert_eq!(
            hex(&reply(Framing::Extended, 0, 8192)),
            "6e8a278c0001000601020304050607080000000000001000000000000000002800000001\
             00000002000000000000100000000000000000000000000000001000\
             0000000000000003"
        );
    }

    #[test]
    fn one_extent_if_one_was_asked_for() {
        let reply = reply(Framing::Structured, command_flag::REQ_ONE, 1 << 20);
        assert_eq!(hex(&reply[24..]), "0000100000000000");
    }

    #[test]
    fn bounded() {
        let reply = reply(Framing::Structured, 0, 4 << 20);
        assert_eq!(reply.len(), 20 + 4 + EXTENTS_MAX * 8);
    }

    #[test]
    fn the_unknown_is_data() {
        let too_long = vec![0; Runs::LEN_MAX + 4];
        let mut beyond = Runs::default();
        assert!(beyond.push(3, false));
        for bytes in [&[][..], &too_long, beyond.as_bytes()] {
            let reply = told(Framing::Structured, 0, 8192, bytes);
            assert_eq!(hex(&reply[24..]), "0000200000000000", "{bytes:?}");
        }
    }
}
