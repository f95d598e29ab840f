//! What an orchestrator wants to do with a volume, and how large it should be.

use lh_cluster::api::VOLUME_PIECE;

use crate::Refused;
use crate::proto::csi::volume_capability::access_mode::Mode;
use crate::proto::csi::volume_capability::{AccessType, MountVolume};
use crate::proto::csi::{CapacityRange, VolumeCapability};

/// Smallest volume, in bytes.
const SMALLEST: u64 = 10 << 20;

/// Smallest volume with XFS on it, in bytes: mkfs.xfs makes none below.
const SMALLEST_XFS: u64 = 300 << 20;

/// How a volume is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// As a device.
    Block,
    /// With a file system.
    Mount {
        /// The file system; empty for what the StorageClass says.
        fs_type: String,
        /// Options of mount(8).
        flags: Vec<String>,
    },
}

/// A capability that this driver has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    /// As what.
    pub(crate) access: Access,
    /// Nothing is written.
    pub(crate) read_only: bool,
    /// One pod only.
    pub(crate) one_pod: bool,
    /// On two nodes while it moves from one to the other.
    pub(crate) moves: bool,
}

/// File systems that can be made.
pub(crate) const FILE_SYSTEMS: &[&str] = &["ext4", "xfs"];

impl Use {
    /// Reads a capability.
    pub(crate) fn of(capability: Option<&VolumeCapability>) -> Result<Self, Refused> {
        let argument = |text: &str| Err(Refused::Argument(text.to_owned()));
        let Some(capability) = capability else { return argument("the volume capability is missing") };
        let access = match &capability.access_type {
            Some(AccessType::Block(_)) => Access::Block,
            Some(AccessType::Mount(mount)) => mounted(mount)?,
            None => return argument("the volume capability says neither block nor mount"),
        };
        let mode = capability.access_mode.as_ref().map_or(Mode::Unknown, |m| m.mode());
        let (read_only, one_pod, moves) = match mode {
            Mode::SingleNodeWriter | Mode::SingleNodeMultiWriter => (false, false, false),
            Mode::SingleNodeSingleWriter => (false, true, false),
            Mode::SingleNodeReaderOnly => (true, false, false),
            Mode::MultiNodeMultiWriter if access == Access::Block => (false, false, true),
            Mode::MultiNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter => {
                return argument(
                    "a volume is used on one node at a time: choose ReadWriteOnce or ReadWriteOncePod, or ReadWriteMany with volumeMode Block and migratable \"true\" for what migrates (shared volumes are not built yet)",
                );
            }
            Mode::Unknown => return argument("the volume capability has no access mode"),
        };
        Ok(Self { access, read_only, one_pod, moves })
    }

    /// Reads several, of which there must be one at least.
    pub(crate) fn of_all(capabilities: &[VolumeCapability]) -> Result<Vec<Self>, Refused> {
        if capabilities.is_empty() {
            return Err(Refused::Argument("no volume capability is given".to_owned()));
        }
        capabilities.iter().map(|c| Self::of(Some(c))).collect()
    }
}

fn mounted(mount: &MountVolume) -> Result<Access, Refused> {
    check_file_system(&mount.fs_type)?;
    Ok(Access::Mount { fs_type: mount.fs_type.clone(), flags: mount.mount_flags.clone() })
}

/// Refuses a file system that this driver does not make. Empty is none in particular.
pub(crate) fn check_file_system(fs_type: &str) -> Result<(), Refused> {
    if fs_type.is_empty() || FILE_SYSTEMS.contains(&fs_type) {
        return Ok(());
    }
    Err(Refused::Argument(format!("file system {fs_type:?} is not made here: {}", FILE_SYSTEMS.join(", "))))
}

const fn least(xfs: bool) -> u64 {
    if xfs { SMALLEST_XFS } else { SMALLEST }
}

/// The largest volume that so many bytes are room for, of those that can be asked for ([`size`]); 0: none.
pub(crate) const fn largest(room: u64, xfs: bool) -> u64 {
    let whole = room - room % VOLUME_PIECE;
    if whole < least(xfs) { 0 } else { whole }
}

/// The size of a volume for a range: the least that is required, rounded up.
pub(crate) fn size(range: Option<CapacityRange>, xfs: bool) -> Result<u64, Refused> {
    let range = range.unwrap_or_default();
    let bytes = |what: &str, n: i64| {
        u64::try_from(n).map_err(|_| Refused::Argument(format!("{what} of {n} bytes is below zero")))
    };
    let required = bytes("a required size", range.required_bytes)?;
    let limit = bytes("a size limit", range.limit_bytes)?;
    if limit > 0 && limit < required {
        return Err(Refused::Argument(format!(
            "the size limit {limit} is below the required size {required}"
        )));
    }
    let least = least(xfs);
    let size = required.max(least).checked_next_multiple_of(VOLUME_PIECE);
    let size = size.filter(|size| i64::try_from(*size).is_ok());
    let Some(size) = size else { return Err(Refused::Range(format!("{required} bytes are too many"))) };
    if limit > 0 && size > limit {
        return Err(Refused::Range(format!(
            "a volume has whole pieces of {VOLUME_PIECE} bytes and at least {least}: the limit {limit} leaves none of {required} bytes"
        )));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::csi::volume_capability::{AccessMode, BlockVolume};

    fn capability(mode: Mode, access: Option<AccessType>) -> VolumeCapability {
        VolumeCapability { access_type: access, access_mode: Some(AccessMode { mode: mode.into() }) }
    }

    fn mount(fs_type: &str) -> Option<AccessType> {
        Some(AccessType::Mount(MountVolume { fs_type: fs_type.into(), ..MountVolume::default() }))
    }

    #[test]
    fn one_node_uses_a_volume_in_every_way_and_several_do_not() {
        let block = || Some(AccessType::Block(BlockVolume {}));
        for (mode, expected) in [
            (Mode::SingleNodeWriter, (false, false, false)),
            (Mode::SingleNodeMultiWriter, (false, false, false)),
            (Mode::SingleNodeSingleWriter, (false, true, false)),
            (Mode::SingleNodeReaderOnly, (true, false, false)),
            (Mode::MultiNodeMultiWriter, (false, false, true)),
        ] {
            let used = Use::of(Some(&capability(mode, block()))).unwrap();
            assert_eq!((used.read_only, used.one_pod, used.moves), expected);
            assert_eq!(used.access, Access::Block);
        }
        let wrong = [
            None,
            Some(VolumeCapability { access_type: block(), access_mode: None }),
            Some(capability(Mode::SingleNodeWriter, None)),
            Some(capability(Mode::Unknown, block())),
            Some(capability(Mode::MultiNodeReaderOnly, block())),
            Some(capability(Mode::MultiNodeSingleWriter, block())),
            Some(capability(Mode::MultiNodeMultiWriter, mount("ext4"))),
            Some(capability(Mode::SingleNodeWriter, mount("btrfs"))),
        ];
        for wrong in wrong {
            assert!(matches!(Use::of(wrong.as_ref()), Err(Refused::Argument(_))), "{wrong:?}");
        }
        assert!(Use::of_all(&[]).is_err());
        assert_eq!(Use::of_all(&[capability(Mode::SingleNodeWriter, mount("xfs"))]).unwrap().len(), 1);
    }

    #[test]
    fn a_size_is_rounded_up_and_stays_below_its_limit() {
        let range = |required, limit| Some(CapacityRange { required_bytes: required, limit_bytes: limit });
        let mib = 1_i64 << 20;
        for (range, xfs, expected) in [
            (None, false, 10),
            (None, true, 300),
            (range(1, 0), false, 10),
            (range(11 * mib, 0), false, 12),
            (range(11 * mib, 12 * mib), false, 12),
            (range(1 << 30, 0), false, 1024),
            (range(301 * mib, 0), true, 302),
        ] {
            assert_eq!(size(range, xfs), Ok(expected << 20), "{range:?}");
        }
        assert!(matches!(size(range(11 * mib, 11 * mib), false), Err(Refused::Range(_))));
        assert!(matches!(size(range(0, mib), false), Err(Refused::Range(_))));
        assert!(matches!(size(range(0, 100 * mib), true), Err(Refused::Range(_))));
        assert!(matches!(size(range(i64::MAX, 0), false), Err(Refused::Range(_))));
        assert!(matches!(size(range(2, 1), false), Err(Refused::Argument(_))));
        assert!(matches!(size(range(-1, 0), false), Err(Refused::Argument(_))));
    }
}
