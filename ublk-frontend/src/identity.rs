//! Which device is which volume's: a mark that the kernel keeps with the device.
//!
//! The next engine finds the device that the last one left behind by it, and nothing on a disk can be out of date.

/// The upper half of a mark: devices of other programs hardly have it.
const PREFIX: u64 = 0x4c48 << 48;

const HASH_BITS: u64 = (1 << 48) - 1;

/// The mark of a volume under a root. Two volumes of one machine have the same one with a probability of 2^-48, and the
/// second of them is then refused as in use.
pub fn mark(root: &str, volume: &str) -> u64 {
    let hash = lh_block::fnv1a(root.bytes().chain([0]).chain(volume.bytes()));
    PREFIX | (hash ^ hash >> 48) & HASH_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_tell_volumes_and_roots_apart_and_never_change() {
        assert_eq!(mark("/var/lib/longhorn", "db"), mark("/var/lib/longhorn", "db"));
        assert_ne!(mark("/var/lib/longhorn", "db"), mark("/var/lib/longhorn", "db2"));
        assert_ne!(mark("/a", "bc"), mark("/ab", "c"));
        assert_eq!(mark("", ""), PREFIX | (0xaf63_bd4c_8601_b7df_u64 ^ 0xaf63) & HASH_BITS);
    }
}
