//! The header and the entries of the tables: read and checked, no I/O. Numbers are big-endian; sections are those of
//! qemu docs/interop/qcow2.rst.

use thiserror::Error;

/// "Header", bytes 0 - 3.
const MAGIC: &[u8; 4] = b"QFI\xfb";

/// "Header": length of the header of version 2, and of version 3 without additional fields.
const HEADER_V2: usize = 72;
const HEADER_V3: usize = 104;
/// "Additional fields (version 3 and higher)": as far as the compression type.
pub(super) const HEADER_MAX: usize = 112;

/// "Header", cluster_bits: at least 9 by the format; QEMU opens up to 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;

/// QEMU's own limit of the L1 table: 32 MiB.
const L1_BYTES_MAX: u64 = 32 << 20;

/// "Header", incompatible_features.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// "L1 table entry": bits 9 - 55 are the offset, bit 63 says that the reference count is one.
const L1_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
/// "L2 table entry": bit 62.
const COMPRESSED: u64 = 1 << 62;
/// "Standard Cluster Descriptor": bit 0, in version 3.
const ALL_ZEROES: u64 = 1;

/// Why a qcow2 image is not read. The text goes on after "the backing file NAME is a qcow2 image that".
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Qcow2Fault {
    /// Something lies behind the end of the file.
    #[error("ends before its {0}, so it was cut off: copy the whole file again")]
    CutOff(&'static str),
    /// Version 1, or one that is to come.
    #[error("has the version {0}, and 2 and 3 are read: convert it with `qemu-img convert -O qcow2`")]
    Version(u32),
    /// Clusters that no image has.
    #[error("has clusters of 2^{0} bytes, and 2^9 to 2^21 are possible: put the right file there")]
    ClusterBits(u32),
    /// A header that contradicts itself.
    #[error("has a damaged header ({0}): put the right file there")]
    Header(&'static str),
    /// Something that is not read.
    #[error("uses {0}, which is not read: convert it with `qemu-img convert -O raw`")]
    Unsupported(&'static str),
    /// Bits that nobody knows.
    #[error(
        "needs features that this program does not know (bits {0:#x}): convert it with `qemu-img convert -O raw`"
    )]
    UnknownFeatures(u64),
    /// A program has found it damaged.
    #[error("is marked as corrupt: repair it with `qemu-img check -r all`, or put the right file there")]
    Corrupt,
    /// An entry of a table that is none.
    #[error("has the impossible entry {entry:#018x} in its L{level} table: put the right file there")]
    Entry {
        /// Which table.
        level: u8,
        /// As it is in the file.
        entry: u64,
    },
}

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    version: u32,
    pub(super) cluster_bits: u32,
    /// Of the virtual disk, in bytes.
    pub(super) size: u64,
    pub(super) l1_offset: u64,
    /// Entries that the size needs; the table may have more.
    pub(super) l1_entries: u64,
}

/// Where a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cluster {
    /// Nowhere: it reads as zero.
    Zero,
    /// At this offset of the file.
    At(u64),
    /// Compressed: at this offset, at most so many bytes.
    Packed { offset: u64, len: usize },
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| b.iter().fold(0, |n, b| n << 8 | u32::from(*b)))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

impl Header {
    /// Reads a header; `bytes` are the first [`HEADER_MAX`] of the file, fewer if there are no more.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Qcow2Fault> {
        if !bytes.starts_with(MAGIC) {
            return Err(Qcow2Fault::Header("it has not the magic number"));
        }
        let version = u32_at(bytes, 4);
        if bytes.len() < HEADER_V2 || (version == 3 && bytes.len() < HEADER_V3) {
            return Err(Qcow2Fault::CutOff("header"));
        }
        if version != 2 && version != 3 {
            return Err(Qcow2Fault::Version(version));
        }
        let cluster_bits = u32_at(bytes, 20);
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(Qcow2Fault::ClusterBits(cluster_bits));
        }
        if version == 3 {
            check_features(bytes)?;
        }
        if u64_at(bytes, 8) != 0 {
            return Err(Qcow2Fault::Unsupported("a backing file of its own"));
        }
        if u32_at(bytes, 32) != 0 {
            return Err(Qcow2Fault::Unsupported("encryption"));
        }
        let (size, l1_offset) = (u64_at(bytes, 24), u64_at(bytes, 40));
        let covered = 1_u64 << (2 * cluster_bits - 3);
        let l1_entries = size.div_ceil(covered);
        if l1_entries * 8 > L1_BYTES_MAX {
            return Err(Qcow2Fault::Header("its L1 table is larger than 32 MiB"));
        }
        if u64::from(u32_at(bytes, 36)) < l1_entries {
            return Err(Qcow2Fault::Header("its L1 table is too short for its size"));
        }
        if !l1_offset.is_multiple_of(1 << cluster_bits) || l1_offset > L1_OFFSET {
            return Err(Qcow2Fault::Header("its L1 table does not begin at a cluster"));
        }
        Ok(Self { version, cluster_bits, size, l1_offset, l1_entries })
    }

    /// Bytes in a cluster.
    pub(super) const fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The offset of an L2 table; `None`: there is none, all its clusters are zero.
    pub(super) fn l1(&self, entry: u64) -> Result<Option<u64>, Qcow2Fault> {
        let offset = entry & L1_OFFSET;
        if entry & !(L1_OFFSET | COPIED) != 0 || !offset.is_multiple_of(self.cluster()) {
            return Err(Qcow2Fault::Entry { level: 1, entry });
        }
        Ok((offset != 0).then_some(offset))
    }

    /// Where a cluster is, by its entry in an L2 table.
    pub(super) fn l2(&self, entry: u64) -> Result<Cluster, Qcow2Fault> {
        let wrong = Qcow2Fault::Entry { level: 2, entry };
        if entry & COMPRESSED != 0 {
            // "Compressed Clusters Descriptor": x = 62 - (cluster_bits - 8); the offset is bits 0 to x-1, above it the
            // number of further sectors of 512 bytes.
            let x = 62 - (self.cluster_bits - 8);
            let offset = entry & ((1 << x) - 1);
            let sectors = (entry & (COMPRESSED - 1)) >> x;
            let len = (sectors + 1) * 512 - offset % 512;
            if entry & COPIED != 0 || offset > L1_OFFSET {
                return Err(wrong);
            }
            return Ok(Cluster::Packed { offset, len: usize::try_from(len).map_err(|_| wrong)? });
        }
        let (zero, offset) = (entry & ALL_ZEROES != 0, entry & L1_OFFSET);
        let strange =
            entry & !(L1_OFFSET | COPIED | ALL_ZEROES) != 0 || !offset.is_multiple_of(self.cluster());
        if strange || (zero && self.version < 3) {
            return Err(wrong);
        }
        Ok(if zero || offset == 0 { Cluster::Zero } else { Cluster::At(offset) })
    }
}

/// Version 3: nothing that would have to be known in order to read the image right.
fn check_features(bytes: &[u8]) -> Result<(), Qcow2Fault> {
    let features = u64_at(bytes, 72);
    // A dirty image has reference counts that cannot be trusted, and nobody looks at them here.
    let unknown = features & !(DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2);
    if unknown != 0 {
        return Err(Qcow2Fault::UnknownFeatures(unknown));
    }
    if features & CORRUPT != 0 {
        return Err(Qcow2Fault::Corrupt);
    }
    if features & EXTERNAL_DATA != 0 {
        return Err(Qcow2Fault::Unsupported("an external data file"));
    }
    if features & EXTENDED_L2 != 0 {
        return Err(Qcow2Fault::Unsupported("extended L2 entries"));
    }
    let length = u32_at(bytes, 100) as usize;
    if length < HEADER_V3 || !length.is_multiple_of(8) {
        return Err(Qcow2Fault::Header("its header has an impossible length"));
    }
    let compression = if length > HEADER_V3 { bytes.get(104).copied().unwrap_or(0) } else { 0 };
    match (compression, features & COMPRESSION_TYPE != 0) {
        (0, false) => Ok(()),
        (1, true) => Err(Qcow2Fault::Unsupported("zstd compression")),
        _ => Err(Qcow2Fault::Header("its compression type is none that there is")),
    }
}
