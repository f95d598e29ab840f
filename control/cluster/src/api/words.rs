//! The words that fields may hold.
//!
//! A closed word is listed in the schema, so that the API server refuses any other. An open one is what a controller
//! writes: Longhorn lists no values for it, and one that this version does not know reads as the default.

use std::borrow::Cow;
use std::fmt;

pub use lh_block::Quorum;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An enumeration whose variants are words. The first one is the default.
macro_rules! words {
    ($(#[$doc:meta])* $kind:ident $name:ident {
        $(#[$first_doc:meta])* $first:ident = $first_word:literal,
        $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $(#[$first_doc])* #[default] $first,
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// Every word.
            pub const ALL: &'static [Self] = &[Self::$first, $(Self::$variant,)*];

            /// As it is written.
            pub const fn as_str(self) -> &'static str {
                match self {
                    Self::$first => $first_word,
                    $(Self::$variant => $word,)*
                }
            }

            /// The variant of a word.
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|v| v.as_str() == text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        // A word that nobody knows must not keep the whole object, and with it a watch, from being read.
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = Option::<Cow<'de, str>>::deserialize(deserializer)?;
                Ok(text.and_then(|text| Self::parse(&text)).unwrap_or_default())
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                words!(@schema $kind $name)
            }
        }
    };
    (@schema closed $name:ident) => {{
        let words: Vec<&str> = $name::ALL.iter().map(|v| v.as_str()).filter(|word| *word != UNSET).collect();
        json_schema!({ "type": "string", "enum": words })
    }};
    (@schema open $name:ident) => { json_schema!({ "type": "string" }) };
}

/// Stands for an absent field where the empty word means something else or nothing. Never written.
const UNSET: &str = "\0unset";

words! {
    /// The data engine.
    closed DataEngine {
        /// The one that there is here.
        V1 = "v1",
        /// Longhorn's SPDK engine, which is not here.
        V2 = "v2",
    }
}

words! {
    /// How a volume is shown on its node.
    closed Frontend {
        /// The first block device that the node's kernel has.
        Blockdev = "blockdev",
        /// A ublk device.
        Ublk = "ublk",
        /// A kernel NBD device.
        Nbd = "nbd",
        /// FUSE and a loop device.
        Fuse = "fuse",
        /// An iSCSI target, without a device.
        Iscsi = "iscsi",
        /// An NBD export, without a device.
        NbdServer = "nbd-server",
        /// Longhorn's NVMe-oF target, which is not here.
        Nvmf = "nvmf",
        /// Nothing is shown.
        None = "",
    }
}

words! {
    /// How many nodes may use a volume at once.
    closed AccessMode {
        /// One node.
        ReadWriteOnce = "rwo",
        /// One pod.
        ReadWriteOncePod = "rwop",
        /// Many nodes.
        ReadWriteMany = "rwx",
    }
}

words! {
    /// Whether a replica should be on the node that a volume is attached to.
    closed DataLocality {
        /// As the setting default-data-locality says.
        Setting = "\0unset",
        /// It does not matter.
        Disabled = "disabled",
        /// If there is room.
        BestEffort = "best-effort",
        /// The only replica is there, or the volume is not attached.
        StrictLocal = "strict-local",
    }
}

words! {
    /// A choice that a volume leaves to the global setting or makes itself.
    closed Toggle {
        /// As the setting says.
        Ignored = "ignored",
        /// Yes.
        Enabled = "enabled",
        /// No.
        Disabled = "disabled",
    }
}

words! {
    /// Whether replicas are moved to spread evenly.
    closed AutoBalance {
        /// As the setting replica-auto-balance says.
        Ignored = "ignored",
        /// Never.
        Disabled = "disabled",
        /// Until two replicas are on different nodes or zones.
        LeastEffort = "least-effort",
        /// Until nodes and zones have as even a share as can be.
        BestEffort = "best-effort",
    }
}

words! {
    /// Whether and how checksums of snapshots are kept.
    closed SnapshotIntegrity {
        /// As the setting snapshot-data-integrity says.
        Ignored = "ignored",
        /// None.
        Disabled = "disabled",
        /// All are read again and again.
        Enabled = "enabled",
        /// Those whose files changed are read again.
        FastCheck = "fast-check",
    }
}

/// Reads a quorum. A word that nobody knows reads as the default, as with [`words!`].
pub(super) fn quorum<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Quorum, D::Error> {
    let text = Option::<Cow<'de, str>>::deserialize(deserializer)?;
    Ok(text.and_then(|text| text.parse().ok()).unwrap_or_default())
}

/// The schema of a quorum, a closed word.
pub(super) fn quorum_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": Quorum::ALL.map(Quorum::as_str) })
}

words! {
    /// What a disk is.
    closed DiskType {
        /// A directory.
        FileSystem = "filesystem",
        /// A raw device, which only Longhorn's v2 data engine uses.
        Block = "block",
    }
}

words! {
    /// What an engine or a replica should be doing.
    open DesireState {
        /// Nothing: no process.
        Stopped = "stopped",
        /// Serving.
        Running = "running",
    }
}

words! {
    /// What an engine, a replica or an instance manager is doing.
    open InstanceState {
        /// Nothing: there is no process.
        Stopped = "stopped",
        /// It is being started.
        Starting = "starting",
        /// It serves.
        Running = "running",
        /// It is being ended.
        Stopping = "stopping",
        /// It failed and is not started again by itself.
        Error = "error",
        /// Its node does not answer.
        Unknown = "unknown",
        /// It was started and waits.
        Suspended = "suspended",
        /// Its end was asked for and seen.
        Terminated = "terminated",
    }
}

words! {
    /// What a volume is doing.
    open VolumeState {
        /// Its replicas are being placed.
        Creating = "creating",
        /// It can be used.
        Attached = "attached",
        /// It rests.
        Detached = "detached",
        /// Its engine is being started.
        Attaching = "attaching",
        /// Its engine is being ended.
        Detaching = "detaching",
        /// It is being removed.
        Deleting = "deleting",
    }
}

words! {
    /// How well a volume is protected.
    open Robustness {
        /// It is not running, so nobody can say.
        Unknown = "unknown",
        /// It has as many healthy replicas as it should.
        Healthy = "healthy",
        /// It runs with fewer.
        Degraded = "degraded",
        /// No replica can serve it.
        Faulted = "faulted",
    }
}

words! {
    /// What a replica is to its engine.
    open ReplicaMode {
        /// Left out.
        Error = "ERR",
        /// It takes writes and answers no reads: it is being filled.
        WriteOnly = "WO",
        /// It takes writes and answers reads.
        ReadWrite = "RW",
    }
}

words! {
    /// Who asks for an attachment.
    open TicketType {
        /// Nobody that is known.
        Unknown = "unknown",
        /// A user, through the API.
        Api = "longhorn-api",
        /// The CSI driver.
        Csi = "csi-attacher",
        /// A salvage that has to see the data again.
        Salvage = "salvage-controller",
        /// The server of a shared volume.
        ShareManager = "share-manager-controller",
        /// A restore.
        VolumeRestore = "volume-restore-controller",
        /// An expansion of a detached volume.
        VolumeExpansion = "volume-expansion-controller",
        /// A clone.
        VolumeClone = "volume-clone-controller",
        /// A snapshot of a detached volume.
        Snapshot = "snapshot-controller",
        /// A backup of a detached volume.
        Backup = "backup-controller",
        /// A replica that has to leave a disk of a detached volume.
        VolumeEviction = "volume-eviction-controller",
        /// A rebuild of a detached volume.
        VolumeRebuilding = "volume-rebuilding-controller",
        /// An image made of a volume.
        BackingImageDataSource = "bim-ds-controller",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_way_through_json() {
        for word in Frontend::ALL {
            let json = serde_json::to_string(word).unwrap();
            assert_eq!(serde_json::from_str::<Frontend>(&json).unwrap(), *word);
        }
    }

    #[test]
    fn an_unknown_word_reads_as_the_default_and_so_does_null() {
        assert_eq!(serde_json::from_str::<VolumeState>("\"melting\"").unwrap(), VolumeState::Creating);
        assert_eq!(serde_json::from_str::<DataLocality>("null").unwrap(), DataLocality::Setting);
    }

    #[test]
    fn the_word_for_an_absent_field_is_not_in_the_schema() {
        let schema = DataLocality::json_schema(&mut SchemaGenerator::default()).to_value();
        assert_eq!(schema["enum"], serde_json::json!(["disabled", "best-effort", "strict-local"]));
    }
}
