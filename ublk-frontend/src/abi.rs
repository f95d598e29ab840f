//! The kernel's structures and numbers, once (include/uapi/linux/ublk_cmd.h). `docs/formats/ublk.md` tells how they are
//! used.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// struct ublksrv_ctrl_cmd: a command to `/dev/ublk-control`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControlCommand {
    /// The device.
    pub dev_id: u32,
    /// [`NO_QUEUE`], unless the command is about a queue.
    pub queue_id: u16,
    /// Bytes at `addr`.
    pub len: u16,
    /// What is handed over or filled in.
    pub addr: u64,
    /// A number, for commands that need only one.
    pub data: u64,
    /// Of devices of unprivileged users only.
    pub dev_path_len: u16,
    /// Zero.
    pub pad: u16,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<ControlCommand>() == 32);

/// `queue_id` of a command that is about no queue.
pub const NO_QUEUE: u16 = u16::MAX;

/// `dev_id` of a new device whose number the kernel chooses.
pub const ANY_DEVICE: u32 = u32::MAX;

/// struct ublksrv_ctrl_dev_info.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Queues of the block device.
    pub nr_hw_queues: u16,
    /// Requests of each at a time.
    pub queue_depth: u16,
    /// [`DeviceState`].
    pub state: u16,
    /// Zero.
    pub pad0: u16,
    /// Longest request that moves data.
    pub max_io_buf_bytes: u32,
    /// The number in `/dev/ublkbN`.
    pub dev_id: u32,
    /// The server's process; -1 before the first start.
    pub ublksrv_pid: i32,
    /// Zero.
    pub pad1: u32,
    /// [`feature`].
    pub flags: u64,
    /// The server's own, kept by the kernel: [`crate::identity::mark`].
    pub ublksrv_flags: u64,
    /// Who made it.
    pub owner_uid: u32,
    /// Who made it.
    pub owner_gid: u32,
    /// Zero.
    pub reserved: [u64; 2],
}

const _: () = assert!(size_of::<DeviceInfo>() == 64);

/// What the kernel says of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// Not started yet, or stopped.
    Dead,
    /// Served, or its server is just dying.
    Live,
    /// Without a server: requests wait for the next one.
    Quiesced,
    /// Without a server: requests fail.
    FailIo,
}

impl DeviceState {
    /// From [`DeviceInfo::state`].
    pub const fn of(info: &DeviceInfo) -> Option<Self> {
        match info.state {
            0 => Some(Self::Dead),
            1 => Some(Self::Live),
            2 => Some(Self::Quiesced),
            3 => Some(Self::FailIo),
            _ => None,
        }
    }
}

/// Bits of [`DeviceInfo::flags`], and of what a kernel can do.
pub mod feature {
    /// A device outlives its server (Linux 6.0).
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests that the server had are given to the next one (Linux 6.0).
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are numbered as ioctls are (Linux 6.4).
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// The server reads and writes the bytes of requests at [`super::data_position`] (Linux 6.5).
    pub const USER_COPY: u64 = 1 << 7;
    /// The device may change its size (Linux 6.16).
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// A device that somebody has open is not stopped, if asked so (Linux 7.x).
    pub const SAFE_STOP_DEV: u64 = 1 << 17;
}

/// struct ublk_param_basic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BasicParams {
    /// [`attribute`].
    pub attrs: u32,
    /// Logarithm of the logical block.
    pub logical_bs_shift: u8,
    /// Logarithm of the physical block.
    pub physical_bs_shift: u8,
    /// Logarithm of the size that is best.
    pub io_opt_shift: u8,
    /// Logarithm of the smallest size that is good.
    pub io_min_shift: u8,
    /// Longest request that moves data, in sectors.
    pub max_sectors: u32,
    /// Zero.
    pub chunk_sectors: u32,
    /// The device's size in sectors.
    pub dev_sectors: u64,
    /// Zero.
    pub virt_boundary_mask: u64,
}

/// Bits of [`BasicParams::attrs`].
pub mod attribute {
    /// There is a cache that a flush empties.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// Writes may ask to be durable at once.
    pub const FUA: u32 = 1 << 3;
}

/// struct ublk_param_discard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DiscardParams {
    /// Zero: granules begin at the device's begin.
    pub discard_alignment: u32,
    /// Bytes that are given back together.
    pub discard_granularity: u32,
    /// Longest discard.
    pub max_discard_sectors: u32,
    /// Longest write of zeroes.
    pub max_write_zeroes_sectors: u32,
    /// One: the kernel refuses others.
    pub max_discard_segments: u16,
    /// Zero.
    pub reserved0: u16,
}

/// struct ublk_param_devt: filled in by the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceNumbers {
    /// Of `/dev/ublkcN`.
    pub char_major: u32,
    /// Of `/dev/ublkcN`.
    pub char_minor: u32,
    /// Of `/dev/ublkbN`; zero before the start.
    pub disk_major: u32,
    /// Of `/dev/ublkbN`.
    pub disk_minor: u32,
}

/// struct ublk_params, as far as it is used: the kernel takes any length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Params {
    /// Bytes of this structure.
    pub len: u32,
    /// [`param_type`]: which of the following count.
    pub types: u32,
    /// Always.
    pub basic: BasicParams,
    /// Of devices with discard or zeroes.
    pub discard: DiscardParams,
    /// Read only.
    pub numbers: DeviceNumbers,
    /// The begin of what follows in the kernel's structure; zero.
    pub unused: u32,
}

const _: () = assert!(size_of::<BasicParams>() == 32 && size_of::<DiscardParams>() == 20);
const _: () = assert!(size_of::<Params>() == 80);

/// Bits of [`Params::types`].
pub mod param_type {
    /// [`super::BasicParams`].
    pub const BASIC: u32 = 1;
    /// [`super::DiscardParams`].
    pub const DISCARD: u32 = 1 << 1;
}

/// `_IOR('u', number, struct)` and `_IOWR` (include/uapi/asm-generic/ioctl.h).
const fn encoded(direction: u32, number: u32, size: usize) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "sizes of the two structures, 16 and 32")]
    let size = size as u32;
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number
}

const fn control_read(number: u32) -> u32 {
    encoded(2, number, size_of::<ControlCommand>())
}

const fn control(number: u32) -> u32 {
    encoded(3, number, size_of::<ControlCommand>())
}

/// Commands to `/dev/ublk-control`.
pub mod control_op {
    use super::{control, control_read};

    /// Fills in a [`super::DeviceInfo`].
    pub const GET_DEV_INFO: u32 = control_read(0x02);
    /// Makes `/dev/ublkcN` from a [`super::DeviceInfo`], which is filled in.
    pub const ADD_DEV: u32 = control(0x04);
    /// Makes `/dev/ublkbN`, once all requests can be fetched. `data`: the server's pid.
    pub const START_DEV: u32 = control(0x06);
    /// Takes `/dev/ublkbN` away; requests that wait fail.
    pub const STOP_DEV: u32 = control(0x07);
    /// Takes a [`super::Params`].
    pub const SET_PARAMS: u32 = control(0x08);
    /// Fills in a [`super::Params`].
    pub const GET_PARAMS: u32 = control_read(0x09);
    /// Makes a device without a server ready for the next.
    pub const START_USER_RECOVERY: u32 = control(0x10);
    /// Gives it to the next server, once all requests can be fetched. `data`: its pid.
    pub const END_USER_RECOVERY: u32 = control(0x11);
    /// Fills in 8 bytes: [`super::feature`].
    pub const GET_FEATURES: u32 = control_read(0x13);
    /// Removes `/dev/ublkcN` when nobody has it open any more.
    pub const DEL_DEV_ASYNC: u32 = control_read(0x14);
    /// The same, and waits for it.
    pub const DEL_DEV: u32 = control(0x05);
    /// `data`: the new size in sectors.
    pub const UPDATE_SIZE: u32 = control(0x15);
    /// As `STOP_DEV`, but `EBUSY` while somebody has the device open.
    pub const TRY_STOP_DEV: u32 = control(0x17);
}

/// struct ublksrv_io_cmd: a command to `/dev/ublkcN`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoCommand {
    /// Queue.
    pub q_id: u16,
    /// Request.
    pub tag: u16,
    /// Bytes done, or an errno, negative.
    pub result: i32,
    /// Zero: no memory of ours is named in commands.
    pub addr: u64,
}

const _: () = assert!(size_of::<IoCommand>() == 16);

/// Commands to `/dev/ublkcN`.
pub mod io_op {
    /// Completes when there is a request with this tag.
    pub const FETCH_REQ: u32 = super::encoded(3, 0x20, size_of::<super::IoCommand>());
    /// Answers the request with this tag, and goes on as `FETCH_REQ`.
    pub const COMMIT_AND_FETCH_REQ: u32 = super::encoded(3, 0x21, size_of::<super::IoCommand>());
}

/// struct ublksrv_io_desc: a request, in memory that the kernel writes and we read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Descriptor {
    /// Operation in the lowest byte, [`request_flag`] above.
    pub op_flags: u32,
    /// Length in sectors.
    pub nr_sectors: u32,
    /// Where.
    pub start_sector: u64,
    /// Of no use here.
    pub addr: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 24);

/// Operations of a [`Descriptor`].
pub mod request_op {
    /// Read.
    pub const READ: u32 = 0;
    /// Write.
    pub const WRITE: u32 = 1;
    /// Flush.
    pub const FLUSH: u32 = 2;
    /// Discard.
    pub const DISCARD: u32 = 3;
    /// Write zeroes.
    pub const WRITE_ZEROES: u32 = 5;
}

/// Flags of a [`Descriptor`].
pub mod request_flag {
    /// Durable before the answer.
    pub const FUA: u32 = 1 << 13;
    /// Zeroes are not to be made by giving space back.
    pub const NOUNMAP: u32 = 1 << 15;
}

/// Most requests of a queue. Every queue's descriptors begin where those of one so deep would end before, at a whole page.
pub const DEPTH_MAX: u16 = 4096;

/// Position in `/dev/ublkcN` of the bytes of a request (UBLKSRV_IO_BUF_OFFSET, UBLK_TAG_OFF, UBLK_QID_OFF).
pub const fn data_position(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41 | (tag as u64) << 25)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers as the kernel's header gives them, worked out by a C compiler.
    #[test]
    fn commands_have_the_kernels_numbers() {
        assert_eq!(control_op::ADD_DEV, 0xc020_7504);
        assert_eq!(control_op::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(control_op::UPDATE_SIZE, 0xc020_7515);
        assert_eq!(io_op::FETCH_REQ, 0xc010_7520);
        assert_eq!(io_op::COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn positions_name_queue_and_tag() {
        assert_eq!(data_position(0, 0), 0x8000_0000);
        assert_eq!(data_position(1, 0), 0x200_8000_0000);
        assert_eq!(data_position(0, 3), 0x8600_0000);
    }
}
