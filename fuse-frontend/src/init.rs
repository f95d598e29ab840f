//! The INIT exchange: what a connection is agreed to be, once, for all servers that it will have.
//!
//! The keeper answers INIT before any server exists and keeps the answer; each server learns it from the keeper.
//! Only what the kernel offered is asked for, so that older kernels work with what they have.

use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::proto::{InHeader, InitIn, InitOut, MAJOR, MINOR, Opcode, OutHeader, init_flags};

/// Bytes of the largest READ that is asked for: 256 pages, what the engine takes at once.
pub const MAX_READ: u32 = 1 << 20;

/// Bytes of the largest WRITE. Every read from /dev/fuse must bring room for one, so this is memory times the reads in
/// one batch: eight of these cost less than three whole MiB, and the splitting less than a tenth of a large write's CPU.
pub const MAX_WRITE: u32 = 256 << 10;

/// Bytes of the largest request of a kernel that cannot be told otherwise (FUSE_DEFAULT_MAX_PAGES_PER_REQ, 32 pages).
const DEFAULT_TRANSFER: u32 = 32 * PAGE;

/// A page, as `max_pages` counts them.
const PAGE: u32 = 4096;

/// Requests in flight: loop's 128 tags, of which some are cut into several. The kernel's
/// default of 12 holds the device to 12.
const MAX_BACKGROUND: u16 = 512;

/// The oldest protocol whose INIT answer has today's length (Linux 3.15).
const MINOR_OLDEST: u32 = 23;

/// All that is wanted of a kernel.
const WANTED: u64 = init_flags::BIG_WRITES
    | init_flags::ASYNC_DIO
    | init_flags::ABORT_ERROR
    | init_flags::MAX_PAGES
    | init_flags::INIT_EXT
    | init_flags::HAS_RESEND;

/// Why a connection cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InitError {
    /// The first request is not INIT, or it is cut short.
    #[error("the kernel's first request on the FUSE connection is not INIT")]
    NotInit,
    /// A kernel too old, or one that has left version 7.
    #[error("the kernel speaks FUSE {major}.{minor}; 7.{MINOR_OLDEST} or later is needed")]
    Version {
        /// The kernel's.
        major: u32,
        /// The kernel's.
        minor: u32,
    },
}

/// What was agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The minor version that is spoken.
    pub minor: u32,
    /// Flags that both sides have, [`init_flags`].
    pub flags: u64,
    /// Bytes of the largest WRITE.
    pub max_write: u32,
}

impl Agreement {
    /// True if a later server can get the requests that an earlier one left unanswered (Linux >= 6.9).
    pub const fn can_resend(&self) -> bool {
        self.flags & init_flags::HAS_RESEND != 0
    }
}

/// Reads the kernel's INIT request and makes the answer to be written back.
///
/// # Errors
/// [`InitError`]; the connection is then of no use.
pub fn answer_init(request: &[u8]) -> Result<(Vec<u8>, Agreement), InitError> {
    let (header, rest) = InHeader::read_from_prefix(request).map_err(|_| InitError::NotInit)?;
    if Opcode::from_u32(header.opcode) != Some(Opcode::Init) {
        return Err(InitError::NotInit);
    }
    let init = read_init(rest)?;
    if init.major != MAJOR || init.minor < MINOR_OLDEST {
        return Err(InitError::Version { major: init.major, minor: init.minor });
    }
    let offered = u64::from(init.flags)
        | if u64::from(init.flags) & init_flags::INIT_EXT != 0 { u64::from(init.flags2) << 32 } else { 0 };
    let flags = offered & WANTED;
    let max_write = if flags & init_flags::MAX_PAGES != 0 { MAX_WRITE } else { DEFAULT_TRANSFER };
    let agreement = Agreement { minor: init.minor.min(MINOR), flags, max_write };

    let out = InitOut {
        major: MAJOR,
        minor: agreement.minor,
        max_readahead: init.max_readahead,
        flags: low(flags),
        flags2: low(flags >> 32),
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND / 4 * 3,
        max_write,
        time_gran: 1,
        max_pages: pages(MAX_READ),
        ..InitOut::default()
    };
    let len = size_of::<OutHeader>() + size_of::<InitOut>();
    let head = OutHeader { len: u32::try_from(len).unwrap_or(u32::MAX), error: 0, unique: header.unique };
    Ok(([head.as_bytes(), out.as_bytes()].concat(), agreement))
}

/// INIT as it came: without FUSE_INIT_EXT (before Linux 5.17) it is 16 bytes long. Of one that ends between that and the end of today's
/// nothing more is read: half a field offers nothing.
fn read_init(bytes: &[u8]) -> Result<InitIn, InitError> {
    const SHORT: usize = 16;
    if bytes.len() < SHORT {
        return Err(InitError::NotInit);
    }
    let mut whole = [0; size_of::<InitIn>()];
    let have = if bytes.len() < whole.len() { SHORT } else { whole.len() };
    whole[..have].copy_from_slice(&bytes[..have]);
    Ok(zerocopy::transmute!(whole))
}

#[expect(clippy::cast_possible_truncation, reason = "takes the lower half")]
const fn low(n: u64) -> u32 {
    n as u32
}

#[expect(clippy::cast_possible_truncation, reason = "at most MAX_READ / PAGE = 256")]
const fn pages(bytes: u32) -> u16 {
    (bytes / PAGE) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(minor: u32, flags: u64) -> Vec<u8> {
        let header = InHeader { len: 104, opcode: 26, unique: 2, nodeid: 0, ..InHeader::default() };
        let body = InitIn {
            major: 7,
            minor,
            max_readahead: 0x20000,
            flags: low(flags),
            flags2: low(flags >> 32),
            unused: [0; 11],
        };
        [header.as_bytes(), body.as_bytes()].concat()
    }

    #[test]
    fn a_kernel_of_today_gets_all_it_can() {
        let (answer, agreement) = answer_init(&init(45, u64::MAX)).unwrap();
        assert_eq!(agreement, Agreement { minor: 45, flags: WANTED, max_write: 256 << 10 });
        assert!(agreement.can_resend());
        let mut golden = Vec::new();
        golden.extend([80, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]); // len, error, unique
        golden.extend([7, 0, 0, 0, 45, 0, 0, 0, 0, 0, 2, 0]); // major, minor, max_readahead
        golden.extend([0x20, 0x80, 0x60, 0x40]); // flags: 5, 15, 21, 22, 30
        golden.extend([0, 2, 0x80, 1, 0, 0, 4, 0, 1, 0, 0, 0]); // 512, 384, 256 KiB, 1 ns
        golden.extend([0, 1, 0, 0, 0x80, 0, 0, 0]); // 256 pages, map_alignment, flags2: 39
        golden.extend([0; 28]);
        assert_eq!(answer, golden);
    }

    #[test]
    fn only_what_was_offered_is_asked_for() {
        let (_, agreement) = answer_init(&init(31, init_flags::ASYNC_DIO)).unwrap();
        assert_eq!(agreement, Agreement { minor: 31, flags: init_flags::ASYNC_DIO, max_write: 128 << 10 });
        assert!(!agreement.can_resend());
        // The upper half counts only with INIT_EXT.
        let (_, agreement) = answer_init(&init(40, init_flags::HAS_RESEND)).unwrap();
        assert_eq!(agreement.flags, 0);
    }

    #[test]
    fn a_short_init_of_an_old_kernel_is_read() {
        let full = init(31, init_flags::MAX_PAGES);
        assert_eq!(answer_init(&full[..56]).unwrap().1.max_write, 256 << 10);
        assert_eq!(answer_init(&full[..55]), Err(InitError::NotInit));
        let full = init(45, u64::MAX);
        for len in [57, 59, 103] {
            let (_, agreement) = answer_init(&full[..len]).unwrap();
            assert!(!agreement.can_resend(), "{len} bytes: half a field offers nothing");
        }
    }

    #[test]
    fn what_cannot_be_served_is_refused() {
        assert_eq!(answer_init(&init(22, 0)), Err(InitError::Version { major: 7, minor: 22 }));
        let mut other = init(45, 0);
        other[4] = 3;
        assert_eq!(answer_init(&other), Err(InitError::NotInit));
        assert_eq!(answer_init(&[]), Err(InitError::NotInit));
    }
}
