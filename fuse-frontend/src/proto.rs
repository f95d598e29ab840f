//! The part of the FUSE kernel protocol (include/uapi/linux/fuse.h, version 7.45) that one file needs.
//!
//! Every structure is declared once, here, in the kernel's own layout and byte order: the protocol never leaves the
//! machine, so all numbers are native-endian. What the kernel sends begins with an [`InHeader`]; what goes back
//! begins with an [`OutHeader`] whose `unique` repeats the request's, bit for bit, the mark of a resent request
//! ([`UNIQUE_RESEND`]) included: the kernel finds the request by the whole number.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// FUSE_KERNEL_VERSION.
pub const MAJOR: u32 = 7;

/// The minor version whose structures these are (Linux 6.18). The lower of both sides' is spoken.
pub const MINOR: u32 = 45;

/// FUSE_ROOT_ID: the only node, and it is the file itself.
pub const ROOT: u64 = 1;

/// Bytes of a request before the data of a WRITE: the longest header of a request that is understood here.
pub const REQUEST_HEAD: usize = size_of::<InHeader>() + size_of::<WriteIn>();

/// FUSE_UNIQUE_RESEND: set in `unique` of a request that the kernel hands out a second time.
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// FUSE_NOTIFY_STORE: gives the kernel bytes of a file.
pub const NOTIFY_STORE: i32 = 4;

/// FUSE_NOTIFY_RESEND: asks for everything that was read and not answered (Linux >= 6.9).
pub const NOTIFY_RESEND: i32 = 7;

/// enum fuse_opcode, as far as a mount of one regular file is asked for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Opcode {
    /// A name in a directory; the root is no directory.
    Lookup = 1,
    /// The kernel forgets a node. Never answered.
    Forget = 2,
    /// [`GetattrIn`] -> [`AttrOut`].
    Getattr = 3,
    /// [`OpenIn`] -> [`OpenOut`].
    Open = 14,
    /// [`ReadIn`] -> bytes.
    Read = 15,
    /// [`WriteIn`] and bytes -> [`WriteOut`].
    Write = 16,
    /// -> [`StatfsOut`].
    Statfs = 17,
    /// The last reference to an open file is gone.
    Release = 18,
    /// [`FsyncIn`]; every flush of the block device.
    Fsync = 20,
    /// Asked for `security.capability` before the first change of the file.
    Getxattr = 22,
    /// A descriptor of the file was closed.
    Flush = 25,
    /// [`InitIn`] -> [`InitOut`]; once per connection.
    Init = 26,
    /// A waiter got a signal. Need not be answered.
    Interrupt = 36,
    /// The file system is gone.
    Destroy = 38,
    /// As `Forget`, several at once. Never answered.
    BatchForget = 42,
    /// [`FallocateIn`]; discards and zeroes.
    Fallocate = 43,
}

impl Opcode {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::Lookup,
        Self::Forget,
        Self::Getattr,
        Self::Open,
        Self::Read,
        Self::Write,
        Self::Statfs,
        Self::Release,
        Self::Fsync,
        Self::Getxattr,
        Self::Flush,
        Self::Init,
        Self::Interrupt,
        Self::Destroy,
        Self::BatchForget,
        Self::Fallocate,
    ];

    /// The operation with that number, if it is one of these.
    pub fn from_u32(n: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u32 == n)
    }
}

/// struct fuse_in_header.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct InHeader {
    /// Bytes of the whole request.
    pub len: u32,
    /// [`Opcode`].
    pub opcode: u32,
    /// Names the request.
    pub unique: u64,
    /// The node, [`ROOT`].
    pub nodeid: u64,
    /// Who asks.
    pub uid: u32,
    /// Who asks.
    pub gid: u32,
    /// Who asks.
    pub pid: u32,
    /// Length of extensions in units of 8 bytes.
    pub total_extlen: u16,
    /// Zero.
    pub padding: u16,
}

/// struct fuse_out_header.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OutHeader {
    /// Bytes of the whole answer.
    pub len: u32,
    /// A negative errno, 0, or with `unique` 0 the code of a notification.
    pub error: i32,
    /// The request's own.
    pub unique: u64,
}

/// struct fuse_init_in.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct InitIn {
    /// The kernel's major version.
    pub major: u32,
    /// The kernel's minor version.
    pub minor: u32,
    /// Bytes.
    pub max_readahead: u32,
    /// Low half of [`init_flags`].
    pub flags: u32,
    /// High half, valid with [`init_flags::INIT_EXT`].
    pub flags2: u32,
    /// Zero.
    pub unused: [u32; 11],
}

/// struct fuse_init_out.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct InitOut {
    /// [`MAJOR`].
    pub major: u32,
    /// What is spoken from here on.
    pub minor: u32,
    /// Bytes.
    pub max_readahead: u32,
    /// Low half of the flags.
    pub flags: u32,
    /// Requests without a waiting caller that may be in flight: all of loop's.
    pub max_background: u16,
    /// Above so many the file system counts as congested.
    pub congestion_threshold: u16,
    /// Largest WRITE in bytes.
    pub max_write: u32,
    /// Nanoseconds.
    pub time_gran: u32,
    /// Pages of the largest READ or WRITE, valid with [`init_flags::MAX_PAGES`].
    pub max_pages: u16,
    /// For DAX.
    pub map_alignment: u16,
    /// High half of the flags.
    pub flags2: u32,
    /// For files that stand on others.
    pub max_stack_depth: u32,
    /// Seconds; 0: requests wait for ever.
    pub request_timeout: u16,
    /// Zero.
    pub unused: [u16; 11],
}

/// Bits of INIT's flags, both halves in one number.
pub mod init_flags {
    /// Writes above 4 KiB (all kernels since 4.20 send them anyway).
    pub const BIG_WRITES: u64 = 1 << 5;
    /// Direct I/O is submitted without waiting. Without it loop has one request in flight.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// Reading an aborted connection says ECONNABORTED.
    pub const ABORT_ERROR: u64 = 1 << 21;
    /// `max_pages` counts.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// `flags2` counts.
    pub const INIT_EXT: u64 = 1 << 30;
    /// The kernel knows [`super::NOTIFY_RESEND`].
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Bits of [`OpenOut::open_flags`].
pub mod open_flags {
    /// Never through the page cache.
    pub const DIRECT_IO: u32 = 1;
    /// Direct writes inside the file do not exclude each other (Linux >= 6.2; older kernels ignore it).
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Modes of [`FallocateIn`] (include/uapi/linux/falloc.h).
pub mod falloc {
    /// FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE: discard, and zeroes that may unmap.
    pub const PUNCH: u32 = 0x03;
    /// FALLOC_FL_KEEP_SIZE | FALLOC_FL_ZERO_RANGE: zeroes that stay allocated.
    pub const ZERO: u32 = 0x11;
}

/// struct fuse_attr.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Attr {
    /// Inode number.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    /// Seconds.
    pub atime: u64,
    /// Seconds.
    pub mtime: u64,
    /// Seconds.
    pub ctime: u64,
    /// Nanoseconds.
    pub atimensec: u32,
    /// Nanoseconds.
    pub mtimensec: u32,
    /// Nanoseconds.
    pub ctimensec: u32,
    /// Type and permissions.
    pub mode: u32,
    /// Hard links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Of device nodes.
    pub rdev: u32,
    /// Bytes.
    pub blksize: u32,
    /// Zero.
    pub flags: u32,
}

/// struct fuse_getattr_in.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GetattrIn {
    /// 1: `fh` is valid.
    pub getattr_flags: u32,
    /// Zero.
    pub dummy: u32,
    /// File handle.
    pub fh: u64,
}

/// struct fuse_attr_out.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AttrOut {
    /// Seconds that the kernel may keep the attributes.
    pub attr_valid: u64,
    /// Nanoseconds.
    pub attr_valid_nsec: u32,
    /// Zero.
    pub dummy: u32,
    /// The attributes.
    pub attr: Attr,
}

/// struct fuse_open_in.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OpenIn {
    /// As in open(2).
    pub flags: u32,
    /// FUSE_OPEN_*.
    pub open_flags: u32,
}

/// struct fuse_open_out.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OpenOut {
    /// Comes back in every request on the open file. Always 0 here: nothing is kept per open.
    pub fh: u64,
    /// [`open_flags`].
    pub open_flags: u32,
    /// Backing file of a pass-through; none.
    pub backing_id: i32,
}

/// struct fuse_read_in.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ReadIn {
    /// File handle.
    pub fh: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u32,
    /// FUSE_READ_*.
    pub read_flags: u32,
    /// Of POSIX locks.
    pub lock_owner: u64,
    /// As in open(2).
    pub flags: u32,
    /// Zero.
    pub padding: u32,
}

/// struct fuse_write_in. The bytes follow it.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WriteIn {
    /// File handle.
    pub fh: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u32,
    /// FUSE_WRITE_*.
    pub write_flags: u32,
    /// Of POSIX locks.
    pub lock_owner: u64,
    /// As in open(2).
    pub flags: u32,
    /// Zero.
    pub padding: u32,
}

/// struct fuse_write_out.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WriteOut {
    /// Bytes stored.
    pub size: u32,
    /// Zero.
    pub padding: u32,
}

/// struct fuse_statfs_out (struct fuse_kstatfs).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StatfsOut {
    /// Of the file system, in `frsize`.
    pub blocks: u64,
    /// Free ones.
    pub bfree: u64,
    /// Free ones for everybody.
    pub bavail: u64,
    /// Inodes.
    pub files: u64,
    /// Free inodes.
    pub ffree: u64,
    /// Bytes; becomes the loop device's discard granularity.
    pub bsize: u32,
    /// Longest name.
    pub namelen: u32,
    /// Bytes.
    pub frsize: u32,
    /// Zero.
    pub padding: u32,
    /// Zero.
    pub spare: [u32; 6],
}

/// struct fuse_fsync_in.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FsyncIn {
    /// File handle.
    pub fh: u64,
    /// 1: data only.
    pub fsync_flags: u32,
    /// Zero.
    pub padding: u32,
}

/// struct fuse_fallocate_in.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FallocateIn {
    /// File handle.
    pub fh: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// [`falloc`].
    pub mode: u32,
    /// Zero.
    pub padding: u32,
}

/// struct fuse_notify_store_out. The bytes follow it.
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct NotifyStoreOut {
    nodeid: u64,
    offset: u64,
    size: u32,
    padding: u32,
}

/// A notification of a file's last byte.
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed)]
struct LastByte {
    header: OutHeader,
    out: NotifyStoreOut,
    byte: u8,
}

const _: () = assert!(size_of::<InHeader>() == 40);
const _: () = assert!(size_of::<OutHeader>() == 16);
const _: () = assert!(size_of::<NotifyStoreOut>() == 24);
const _: () = assert!(size_of::<LastByte>() == 41);
const _: () = assert!(size_of::<InitIn>() == 64);
const _: () = assert!(size_of::<InitOut>() == 64);
const _: () = assert!(size_of::<Attr>() == 88);
const _: () = assert!(size_of::<GetattrIn>() == 16);
const _: () = assert!(size_of::<AttrOut>() == 104);
const _: () = assert!(size_of::<OpenIn>() == 8);
const _: () = assert!(size_of::<OpenOut>() == 16);
const _: () = assert!(size_of::<ReadIn>() == 40);
const _: () = assert!(size_of::<WriteIn>() == 40);
const _: () = assert!(size_of::<WriteOut>() == 8);
const _: () = assert!(size_of::<StatfsOut>() == 80);
const _: () = assert!(size_of::<FsyncIn>() == 16);
const _: () = assert!(size_of::<FallocateIn>() == 32);
const _: () = assert!(REQUEST_HEAD == 80);

/// The bytes that ask the kernel for everything that was read and not answered. A server that takes over a
/// connection writes them before its first read.
pub fn resend_notification() -> [u8; size_of::<OutHeader>()] {
    zerocopy::transmute!(OutHeader { len: 16, error: NOTIFY_RESEND, unique: 0 })
}

/// The bytes that have the kernel know that the file has `size` bytes, one at least.
///
/// A size that a GETATTR tells while a write ends is passed over (`attr_version`, `fuse_change_attributes` of fs/fuse/inode.c); a
/// notification of bytes that end behind the inode makes it as large at once (`fuse_notify_store` of fs/fuse/dev.c). It
/// is of the last byte alone: a page that is stored from its middle on does not count as read, so nobody reads it but from the server.
pub fn size_notification(size: u64) -> [u8; size_of::<LastByte>()] {
    let header = OutHeader { len: 41, error: NOTIFY_STORE, unique: 0 };
    let out = NotifyStoreOut { nodeid: ROOT, offset: size.saturating_sub(1), size: 1, padding: 0 };
    zerocopy::transmute!(LastByte { header, out, byte: 0 })
}
