//! The words of Longhorn's engine command line, with its short names and defaults. Switches are as Go's flag package takes
//! them: `--name`, `--name=true`, `--name=false`.

use clap::{ArgAction, Subcommand};
use control::proto::ptypes::ReplicaMode;

use super::super::size::size;
use super::elsewhere::Elsewhere;
use crate::arguments::label;

/// Where the engine is, and who it should be.
#[derive(Clone, Debug, clap::Args)]
pub(in crate::daemon) struct Target {
    /// The engine's control socket: unix:PATH, or on TCP ADDRESS:PORT, without encryption [default: localhost:9501]
    #[arg(long, env = "LONGHORN_URL", value_name = "URL")]
    pub(in crate::daemon) url: Option<String>,
    /// Refuse an engine of another volume
    #[arg(long = "volume-name", value_name = "NAME", default_value = "")]
    pub(in crate::daemon) volume: String,
    /// Refuse another engine
    #[arg(long = "engine-instance-name", value_name = "NAME", default_value = "")]
    pub(in crate::daemon) instance: String,
}

/// The commands of Longhorn's engine.
#[derive(Debug, Subcommand)]
pub(in crate::daemon) enum EngineCommand {
    /// Print what the engine says of itself, as JSON
    Info,
    /// List replicas and their chains
    #[command(visible_alias = "ls-replica")]
    Ls,
    /// Add a replica and wait until it is in sync
    #[command(visible_alias = "add-replica")]
    Add(AddArgs),
    /// Take a replica out
    #[command(visible_alias = "rm-replica")]
    Rm {
        /// Its address, as `ls` lists it, or its name
        #[arg(value_name = "ADDRESS")]
        replica: String,
    },
    /// Put a replica out and bring it in sync anew
    #[command(visible_alias = "update-replica")]
    Update {
        /// ERR or WO; RW is the engine's to give
        #[arg(long, value_parser = mode)]
        mode: ReplicaMode,
        /// Its address, as `ls` lists it, or its name
        #[arg(value_name = "ADDRESS")]
        replica: String,
    },
    /// Fail unless a replica is in sync
    #[command(visible_alias = "verify-rebuild")]
    VerifyRebuildReplica {
        /// Refuse another replica at that address
        #[arg(long, default_value = "", value_name = "NAME")]
        replica_instance_name: String,
        /// Its address, as `ls` lists it, or its name
        #[arg(value_name = "ADDRESS")]
        replica: String,
    },
    /// How far rebuilds are, as JSON
    #[command(visible_alias = "rebuild-status")]
    ReplicaRebuildStatus,
    /// Take, list, remove, hash snapshots
    #[command(visible_alias = "snapshots")]
    Snapshot {
        #[command(subcommand)]
        command: Option<SnapshotCommand>,
    },
    /// The same as `snapshot hash`, `hash-cancel`, `hash-status`
    #[command(flatten)]
    Hash(HashCommand),
    /// Show and hide the volume
    Frontend {
        #[command(subcommand)]
        command: FrontendCommand,
    },
    /// Make the volume larger
    Expand {
        /// Bytes, or with a unit
        #[arg(long, value_parser = size)]
        size: u64,
    },
    /// Whether an unmap marks snapshots as removed: never
    #[command(visible_alias = "unmap-mark-snap")]
    UnmapMarkSnapChainRemoved {
        /// Refused: an unmap takes no snapshot with it here
        #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true",
            default_value_t = false, hide_default_value = true, hide_possible_values = true, value_name = "BOOL")]
        enable: bool,
        /// As it is
        #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true",
            default_value_t = false, hide_default_value = true, hide_possible_values = true, value_name = "BOOL")]
        disable: bool,
    },
    /// Print versions, as JSON
    Version {
        /// This program's alone
        #[arg(long)]
        client_only: bool,
    },
    /// What Longhorn has and this has otherwise, or not.
    #[command(flatten)]
    Elsewhere(Elsewhere),
}

/// Arguments of `add`.
#[derive(Debug, clap::Args)]
#[command(after_help = ADD_HELP)]
pub(in crate::daemon) struct AddArgs {
    /// Its name, which its process has as --replica-instance-name [default: that of its socket]
    #[arg(long, value_name = "NAME")]
    pub(super) replica_instance_name: Option<String>,
    /// Where it listens for the engine: unix:PATH or tcp:ADDRESS:PORT
    pub(super) address: String,
    #[arg(long, hide = true)]
    pub(super) size: Option<String>,
    #[arg(long, hide = true)]
    pub(super) current_size: Option<String>,
    #[arg(long, hide = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false)]
    pub(super) restore: bool,
    #[arg(long, hide = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false)]
    pub(super) fast_sync: bool,
    #[arg(long, hide = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false)]
    pub(super) sync_local: bool,
    #[arg(long, hide = true)]
    pub(super) file_sync_http_client_timeout: Option<u32>,
    #[arg(long, hide = true)]
    pub(super) grpc_timeout_seconds: Option<i64>,
}

const ADD_HELP: &str = "\
I/O goes on meanwhile. Interrupting this does not stop the rebuild, which
`longhorn rebuild-status` follows. Longhorn's other flags are accepted: here the
engine knows the size and copies what differs by itself.";

/// The commands below `frontend`.
#[derive(Debug, Subcommand)]
pub(in crate::daemon) enum FrontendCommand {
    /// Show the volume again
    Start {
        /// The one that the engine was started with; tgt-blockdev: any that makes a device, tgt-iscsi: a target
        frontend: String,
    },
    /// Hide the volume, unless its device is in use
    Shutdown,
}

/// The commands below `snapshot`.
#[derive(Debug, Subcommand)]
pub(in crate::daemon) enum SnapshotCommand {
    /// Take a snapshot and print its name
    Create {
        /// A label, KEY=VALUE; may be given again
        #[arg(long = "label", value_parser = label, value_name = "KEY=VALUE")]
        labels: Vec<(String, String)>,
        /// Freeze the file system first
        #[arg(long = "freeze-fs")]
        freeze: bool,
        /// Its name; a new one is made up without it
        name: Option<String>,
    },
    /// Make the volume's bytes those of a snapshot
    Revert {
        /// Its name
        name: String,
    },
    /// List the snapshots that the volume stands on, the newest first
    Ls,
    /// Mark snapshots as removed
    Rm {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Fold removed snapshots away
    Purge {
        /// Accepted as Longhorn's; a purge that runs is not begun twice anyway
        #[arg(long)]
        skip_if_in_progress: bool,
        /// Wait until it is done
        #[arg(long)]
        wait: bool,
    },
    /// How far the purge is, as JSON
    PurgeStatus,
    /// Snapshots with all that is known of them, as JSON
    Info,
    /// Fill this volume, which is empty and not shown, from a snapshot of another one
    Clone {
        /// Name of the snapshot
        #[arg(long, value_name = "NAME")]
        snapshot_name: String,
        /// The control socket of the other volume's engine: unix:PATH
        #[arg(long, value_name = "URL")]
        from_controller_address: String,
        /// Refuse an engine of another volume than this
        #[arg(long, default_value = "", value_name = "NAME")]
        from_volume_name: String,
        /// Refuse another engine than this
        #[arg(long, default_value = "", value_name = "NAME")]
        from_controller_instance_name: String,
        /// Accepted as Longhorn's; what a backing file holds is always copied
        #[arg(long)]
        export_backing_image_if_exist: bool,
        /// Accepted as Longhorn's, without effect
        #[arg(long, default_value_t = 5, value_name = "SECONDS")]
        file_sync_http_client_timeout: u32,
        /// Accepted as Longhorn's, without effect
        #[arg(long, default_value_t = 0, value_name = "SECONDS")]
        grpc_timeout_seconds: u64,
    },
    /// How far a clone is, as JSON
    CloneStatus,
    #[command(flatten)]
    Hash(HashCommand),
}

/// The commands that take and tell checksums of a snapshot: below `snapshot`, and as Longhorn has them, by themselves.
#[derive(Debug, Subcommand)]
pub(in crate::daemon) enum HashCommand {
    /// Begin to take a snapshot's checksum, on every replica
    Hash {
        /// Also if it is on record
        #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true",
            default_value_t = false, hide_default_value = true, hide_possible_values = true, value_name = "BOOL")]
        rehash: bool,
        /// Its name
        name: String,
    },
    /// End the hashing of a snapshot
    HashCancel {
        /// Its name
        name: String,
    },
    /// How far the hashing of a snapshot is, as JSON
    HashStatus {
        /// Its name
        name: String,
    },
}

/// A mode in Longhorn's letters.
fn mode(text: &str) -> Result<ReplicaMode, String> {
    ReplicaMode::from_str_name(text)
        .ok_or_else(|| format!("{text:?} is no mode of a replica: WO, RW and ERR are"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_longhorns() {
        assert_eq!(mode("WO"), Ok(ReplicaMode::Wo));
        assert!(mode("RO").unwrap_err().contains("WO, RW and ERR"));
    }
}
