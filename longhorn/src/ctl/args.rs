//! The command line of `longhornctl`, with help that teaches.

mod as_longhorn;
mod examples;

use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use control::host::SNAPSHOT_COUNT;
use lh_block::{NameError, Quorum, REPLICAS_MAX};
use serde::Serialize;

use super::host_path::{data_path, disk_path};
use crate::arguments::{
    Checksum, DEFAULT_ROOT, Frontend, Listen, ROOT_VARIABLE, block_size, image_name, known_snapshot, label,
    listen_address, process_name, quorum, root_path, seconds, secret_name, size_or_none, snapshot_name,
    volume_name,
};
pub(super) use as_longhorn::{ExportCommand, TrimCommand};

use examples::{
    AFTER_HELP, CHECK_HELP, CLONE_HELP, COMPLETION_HELP, DOCTOR_HELP, DOWN_HELP, IMPORT_HELP, INSTALL_HELP,
    LS_HELP, MANIFESTS_HELP, MOVE_HELP, RELEASE_HELP, REPLICA_ADD_HELP, REPLICA_EXPORT_HELP, REPLICA_HELP,
    REPLICA_LS_HELP, REPLICA_REBUILD_HELP, REPLICA_RM_HELP, RESIZE_HELP, RM_HELP, SALVAGE_HELP, SCRUB_HELP,
    SNAPSHOT_CREATE_HELP, SNAPSHOT_DIFF_HELP, SNAPSHOT_EXPORT_HELP, SNAPSHOT_HELP, SNAPSHOT_LS_HELP,
    SNAPSHOT_PURGE_HELP, SNAPSHOT_REVERT_HELP, SNAPSHOT_RM_HELP, SNAPSHOT_TREE_HELP, STATUS_HELP,
    SYSTEMD_HELP, UP_HELP, UPGRADE_HELP,
};

/// Replicated block volumes on this host.
#[derive(Debug, Parser)]
#[command(
    name = "longhornctl",
    version,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = AFTER_HELP
)]
pub struct Program {
    /// Where volumes, replicas, logs and sockets lie
    #[arg(long, global = true, env = ROOT_VARIABLE, default_value = DEFAULT_ROOT, value_parser = root_path(), value_name = "DIR")]
    pub(super) root: PathBuf,
    /// How results are printed
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub(super) output: Output,
    #[command(subcommand)]
    pub(super) command: Command,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// For people
    Table,
    /// For programs
    Json,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    // Other tools' names for the same are taken, too.
    /// Create a volume if it is not there, start it, and wait until it can be used
    #[command(aliases = ["create", "start"])]
    Up(UpCommand),
    /// Flush and stop a volume; its data stays
    #[command(alias = "stop")]
    Down(DownArgs),
    /// List all volumes
    #[command(after_help = LS_HELP, alias = "list")]
    Ls,
    /// Show how a volume and its replicas fare
    #[command(after_help = STATUS_HELP)]
    Status {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Go on: every change, and every second what is being done
        #[arg(short, long)]
        watch: bool,
    },
    /// Make a volume larger, up or down
    #[command(after_help = RESIZE_HELP)]
    Resize {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Its new size: bytes, or with KiB, MiB, GiB, TiB; a multiple of 4096
        #[arg(value_parser = lh_block::parse_size, allow_negative_numbers = true)]
        size: u64,
    },
    /// Replace the engine under whatever uses the volume, by another program or anew
    Upgrade(UpgradeArgs),
    /// Delete a volume and all its data
    #[command(after_help = RM_HELP, aliases = ["delete", "remove"])]
    Rm {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
    /// Make a volume of replica directories, Longhorn's or ours, where they are
    #[command(after_help = IMPORT_HELP)]
    Import {
        /// Name of the new volume
        #[arg(value_parser = volume_name)]
        volume: String,
        /// The replica directories; the first is the source if they differ
        #[arg(required = true, value_name = "DIR")]
        directories: Vec<PathBuf>,
        /// Who must agree before a replica is left out [default: any]
        #[arg(long, value_parser = quorum())]
        quorum: Option<Quorum>,
        /// Logical block of the device: 512 or 4096 bytes [default: 512]
        #[arg(long, value_parser = block_size, value_name = "BYTES", allow_negative_numbers = true)]
        block_size: Option<u32>,
    },
    /// Make a new volume with the bytes of another one, or of a snapshot
    #[command(after_help = CLONE_HELP)]
    Clone {
        /// The volume, or VOLUME@SNAPSHOT
        #[arg(value_parser = clone_source, value_name = "VOLUME[@SNAPSHOT]")]
        source: CloneSource,
        /// Name of the new volume
        #[arg(value_parser = volume_name)]
        new: String,
    },
    /// Start a volume that does not start by itself from the replica that holds everything
    Salvage(SalvageArgs),
    /// Make a volume's directories fit for Longhorn, and forget the volume
    Release(ReleaseArgs),
    /// Take, list, remove, compare, export snapshots, and go back to one
    #[command(after_help = SNAPSHOT_HELP)]
    Snapshot {
        #[command(subcommand)]
        command: SnapshotCommand,
    },
    /// List, add, remove and rebuild replicas, and export from a replica's directory
    #[command(after_help = REPLICA_HELP)]
    Replica {
        #[command(subcommand)]
        command: ReplicaCommand,
    },
    /// Compare a volume's replicas with each other and with their checksums
    #[command(after_help = SCRUB_HELP)]
    Scrub(ScrubArgs),
    /// Look what this host has and lacks for volumes
    #[command(after_help = DOCTOR_HELP)]
    Doctor,
    /// Install into a Kubernetes cluster, or into this host's systemd
    #[command(after_help = INSTALL_HELP)]
    Install {
        #[command(subcommand)]
        command: InstallCommand,
    },
    /// Say what of a Longhorn cluster cannot be moved here
    #[command(after_help = CHECK_HELP)]
    Check {
        #[command(subcommand)]
        command: CheckCommand,
    },
    /// As Longhorn's longhornctl has it
    #[command(hide = true)]
    Trim {
        #[command(subcommand)]
        command: TrimCommand,
    },
    /// As Longhorn's longhornctl has it
    #[command(hide = true)]
    Export {
        #[command(subcommand)]
        command: ExportCommand,
    },
    /// The volume whose device has these numbers, for udev
    #[command(hide = true)]
    DeviceName {
        /// MAJOR:MINOR
        numbers: String,
    },
    /// What may stand where the cursor is, for the scripts of `completion`
    #[command(hide = true)]
    CompleteNames {
        /// The words of the line up to there, which is in the last one
        #[arg(last = true)]
        words: Vec<String>,
    },
    /// Print a completion script for a shell, which completes names of volumes, snapshots and replicas, too
    #[command(after_help = COMPLETION_HELP)]
    Completion {
        /// The shell
        #[arg(value_enum)]
        shell: Shell,
    },
}

/// Arguments of `salvage`.
#[derive(Debug, clap::Args)]
#[command(after_help = SALVAGE_HELP)]
pub(super) struct SalvageArgs {
    /// Name of the volume, which is down
    #[arg(value_parser = volume_name)]
    pub volume: String,
    /// Start from this replica, whatever the others hold
    #[arg(long, value_parser = process_name, value_name = "REPLICA")]
    pub replica: Option<String>,
    /// Give up acknowledged writes that the replica may lack
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `release`.
#[derive(Debug, clap::Args)]
#[command(after_help = RELEASE_HELP, override_usage = "longhornctl release [OPTIONS] <VOLUME|--dir <DIR>...>")]
pub(super) struct ReleaseArgs {
    /// Name of the volume, which is down
    #[arg(value_parser = volume_name, required_unless_present = "directories")]
    pub volume: Option<String>,
    /// Replica directories of this host that no volume here has, as on the nodes of a cluster; their volumes are detached
    #[arg(long = "dir", num_args = 1.., conflicts_with = "volume", value_name = "DIR")]
    pub directories: Vec<PathBuf>,
}

/// Arguments of `up`.
#[derive(Debug, clap::Args)]
#[command(after_help = UP_HELP, override_usage = "longhornctl up [OPTIONS] <VOLUME|--all>")]
pub(super) struct UpCommand {
    /// Name of the volume
    #[arg(value_parser = volume_name, required_unless_present = "all")]
    pub volume: Option<String>,
    /// Start every volume that was up and that nobody has stopped with `down`, each as it was
    #[arg(long, conflicts_with_all = ["volume", "UpArgs"])]
    pub all: bool,
    #[command(flatten)]
    pub options: UpArgs,
}

/// What `up` makes of a volume.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct UpArgs {
    /// Size of a new volume: bytes, or with KiB, MiB, GiB, TiB; a multiple of 4096
    #[arg(long, value_parser = lh_block::parse_size, allow_negative_numbers = true)]
    pub size: Option<u64>,
    /// How many copies a new volume has, 1 to 20 [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=i64::from(REPLICAS_MAX)), allow_negative_numbers = true)]
    pub replicas: Option<u8>,
    /// Who must agree before a replica is left out [default: any]
    #[arg(long, value_parser = quorum())]
    pub quorum: Option<Quorum>,
    /// How the volume is shown [default: auto]
    #[arg(long, value_enum, value_name = "F")]
    pub frontend: Option<Frontend>,
    /// Logical block of the device: 512 or 4096 bytes [default: 512]
    #[arg(long, value_parser = block_size, value_name = "BYTES", allow_negative_numbers = true)]
    pub block_size: Option<u32>,
    /// How long requests wait when no replica is left, then fail; 0 for ever [default: 300]
    #[arg(long, value_parser = seconds, value_name = "SECONDS", allow_negative_numbers = true)]
    pub io_timeout: Option<u64>,
    /// Most snapshots, removed ones not counted, 1 to 250, of which a chain holds 249 beside the head; may change while it is up
    /// [default: 250]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SNAPSHOT_COUNT)), allow_negative_numbers = true)]
    pub snapshot_max_count: Option<u32>,
    /// No snapshot once head and snapshots take more; 0 for any; may change while it is up [default: 0]
    #[arg(long, value_parser = size_or_none, value_name = "SIZE", allow_negative_numbers = true)]
    pub snapshot_max_size: Option<u64>,
    /// Which reads are compared with checksums [default: snapshots]
    #[arg(long, value_enum, value_name = "WHICH")]
    pub checksum: Option<Checksum>,
    /// With --frontend nbd-server or iscsi-target: listen on TCP, for other hosts on an address that they reach; anybody who does
    /// may read and write the volume
    #[arg(long, value_parser = listen_address, value_name = "ADDRESS[:PORT]")]
    pub listen: Option<Listen>,
}

/// Arguments of `upgrade`.
#[derive(Debug, clap::Args)]
#[command(after_help = UPGRADE_HELP)]
pub(super) struct UpgradeArgs {
    /// Name of the volume
    #[arg(value_parser = volume_name)]
    pub volume: String,
    /// The new program, which is copied below ROOT/engine-binaries [default: the instance manager's own]
    #[arg(long, value_name = "FILE")]
    pub binary: Option<PathBuf>,
}

/// Arguments of `scrub`.
#[derive(Debug, clap::Args)]
pub(super) struct ScrubArgs {
    /// Name of the volume, which is up
    #[arg(value_parser = volume_name)]
    pub volume: String,
    /// Copy a sound replica's block over one that is rotten
    #[arg(long)]
    pub repair: bool,
    /// Wait until it is through, and tell what it found
    #[arg(long)]
    pub wait: bool,
    /// Look at no more bytes in a second than this, for example 50MiB [default: no limit]
    #[arg(long, value_parser = lh_block::parse_size, value_name = "SIZE", allow_negative_numbers = true)]
    pub limit: Option<u64>,
    /// Do not begin one: tell how the last one fares
    #[arg(long, conflicts_with_all = ["repair", "limit", "cancel"])]
    pub status: bool,
    /// End the one that runs
    #[arg(long, conflicts_with_all = ["repair", "limit", "wait"])]
    pub cancel: bool,
}

/// Arguments of `down`.
#[derive(Debug, clap::Args)]
#[command(after_help = DOWN_HELP, override_usage = "longhornctl down [OPTIONS] <VOLUME|--all>")]
pub(super) struct DownArgs {
    /// Name of the volume
    #[arg(value_parser = volume_name, required_unless_present = "all")]
    pub volume: Option<String>,
    /// Stop every volume that is up
    #[arg(long, conflicts_with = "volume")]
    pub all: bool,
    /// Have `up --all` start it again, as when the host restarts
    #[arg(long)]
    pub for_now: bool,
    /// How long to wait for whoever uses the device to let go of it
    #[arg(long, value_parser = seconds, value_name = "SECONDS", default_value_t = 0, hide_default_value = true, allow_negative_numbers = true)]
    pub wait: u64,
}

/// What an export makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ImageFormat {
    /// The bytes as they are, holes as holes
    Raw,
    /// QEMU's format, version 3, without compression
    Qcow2,
}

impl ImageFormat {
    /// What was asked for; if nothing was, what the file's name says: who opens it by that would take its first bytes for a header.
    pub(super) fn of_file(asked: Option<Self>, file: &Path) -> Self {
        let is_qcow2 = file.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("qcow2"));
        asked.unwrap_or(if is_qcow2 { Self::Qcow2 } else { Self::Raw })
    }
}

/// A replica's name; or a path or an address, of which it is said then which replica is there.
fn replica_or_its_place(text: &str) -> Result<String, NameError> {
    if text.contains('/') { Ok(text.to_owned()) } else { process_name(text) }
}

/// `VOLUME[@SNAPSHOT]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CloneSource {
    /// The volume.
    pub volume: String,
    /// The snapshot; without one, the volume as it is now.
    pub snapshot: Option<String>,
}

fn clone_source(text: &str) -> Result<CloneSource, String> {
    let (volume, snapshot) = match text.split_once('@') {
        Some((volume, snapshot)) => (volume, Some(known_snapshot(snapshot)?)),
        None => (text, None),
    };
    Ok(CloneSource { volume: volume_name(volume).map_err(|e| e.to_string())?, snapshot })
}

#[derive(Debug, Subcommand)]
pub(super) enum SnapshotCommand {
    /// Keep the volume's bytes as they are now, and print the snapshot's name
    #[command(after_help = SNAPSHOT_CREATE_HELP)]
    Create {
        /// Name of the volume, which is up
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Name of the snapshot; a new one is made up without it
        #[arg(value_parser = snapshot_name)]
        name: Option<String>,
        /// A label, KEY=VALUE; may be given again
        #[arg(long = "label", value_parser = label, value_name = "KEY=VALUE")]
        labels: Vec<(String, String)>,
        /// Bring the file system that is mounted from the device to rest meanwhile
        #[arg(long)]
        freeze: bool,
    },
    /// List a volume's snapshots, oldest first
    #[command(after_help = SNAPSHOT_LS_HELP)]
    Ls {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
    },
    /// Show how a volume's snapshots stand on each other
    #[command(after_help = SNAPSHOT_TREE_HELP)]
    Tree {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
    },
    /// Mark a snapshot as removed, on every replica or on none
    #[command(after_help = SNAPSHOT_RM_HELP)]
    Rm {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Name of the snapshot
        #[arg(value_parser = known_snapshot)]
        name: String,
    },
    /// Fold removed snapshots away, which gives their space back
    #[command(after_help = SNAPSHOT_PURGE_HELP)]
    Purge {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
    },
    /// Make the volume's bytes those of a snapshot
    #[command(after_help = SNAPSHOT_REVERT_HELP)]
    Revert {
        /// Name of the volume, whose device nobody uses
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Name of the snapshot
        #[arg(value_parser = known_snapshot)]
        name: String,
    },
    /// List the ranges in which two snapshots differ, or those that a snapshot holds at all
    #[command(after_help = SNAPSHOT_DIFF_HELP)]
    Diff {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
        /// One name; or two, the older one first
        #[arg(required = true, num_args = 1..=2, value_parser = known_snapshot, value_name = "[FROM] TO")]
        names: Vec<String>,
    },
    /// Write a snapshot's bytes to a file, holes as holes
    #[command(after_help = SNAPSHOT_EXPORT_HELP)]
    Export {
        /// What the file is [default: qcow2 if its name ends so, else raw]
        #[arg(long, value_enum)]
        format: Option<ImageFormat>,
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Name of the snapshot
        #[arg(value_parser = known_snapshot)]
        name: String,
        /// The file, which is replaced
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum ReplicaCommand {
    /// List a volume's replicas
    #[command(after_help = REPLICA_LS_HELP)]
    Ls {
        /// Name of the volume
        #[arg(value_parser = volume_name)]
        volume: String,
    },
    /// Add a replica and bring it in sync; prints its name
    #[command(after_help = REPLICA_ADD_HELP)]
    Add {
        /// Name of the volume, which is up
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Where its files go: a new or an empty directory, best on a disk of its own
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Take a replica out and delete its data
    #[command(after_help = REPLICA_RM_HELP)]
    Rm {
        /// Name of the volume, which is up
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Name of the replica
        #[arg(value_parser = replica_or_its_place)]
        replica: String,
    },
    /// Bring a replica in sync anew
    #[command(after_help = REPLICA_REBUILD_HELP)]
    Rebuild {
        /// Name of the volume, which is up
        #[arg(value_parser = volume_name)]
        volume: String,
        /// Name of the replica
        #[arg(value_parser = replica_or_its_place)]
        replica: String,
    },
    /// Write the bytes of a replica directory, Longhorn's or ours, to a file; no engine is needed
    #[command(after_help = REPLICA_EXPORT_HELP)]
    Export(ReplicaExportArgs),
}

/// Arguments of `replica export`.
#[derive(Debug, clap::Args)]
pub(super) struct ReplicaExportArgs {
    /// The replica's directory, which no process uses
    pub directory: PathBuf,
    /// What the file is [default: qcow2 if its name ends so, else raw]
    #[arg(long, value_enum)]
    pub format: Option<ImageFormat>,
    /// As of this snapshot, not as of the end
    #[arg(long, value_parser = known_snapshot, value_name = "NAME")]
    pub snapshot: Option<String>,
    /// Take what can be read of a damaged directory, and say what is not sure of it
    #[arg(long)]
    pub rescue: bool,
    /// The file, which is replaced
    pub file: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(super) enum InstallCommand {
    /// Print what kubectl applies: definitions, rights, managers, the CSI driver, a StorageClass
    Manifests(ManifestArgs),
    /// Print what makes systemd start this host's volumes and stop them with it: units, and a rule of udev
    Systemd(SystemdArgs),
}

/// Arguments of `install systemd`.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = SYSTEMD_HELP)]
pub(super) struct SystemdArgs {
    /// Write the files to where they belong, instead of printing them
    #[arg(long)]
    pub write: bool,
    /// Write them below this directory, as for a package; implies --write
    #[arg(long, value_name = "DIR")]
    pub into: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(super) enum CheckCommand {
    /// List Longhorn's volumes that cannot be used here, and the disks that pods have to be given
    #[command(after_help = MOVE_HELP)]
    Move {
        /// What `kubectl get -o json` printed of Volumes and Nodes; -: standard input
        #[arg(value_name = "FILE")]
        resources: PathBuf,
    },
    /// The same as `doctor`: a word of Longhorn's own longhornctl
    #[command(hide = true)]
    Preflight,
}

/// Arguments of `install manifests`.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = MANIFESTS_HELP)]
pub(super) struct ManifestArgs {
    /// The image of the programs, which scripts/image makes [default: longhorn:VERSION]
    #[arg(long, value_parser = image_name, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Where the nodes pull the sidecars csi-provisioner, csi-attacher, csi-resizer and csi-snapshotter from
    #[arg(long, value_parser = image_name, value_name = "PREFIX")]
    pub sidecar_registry: Option<String>,
    /// A Secret of namespace longhorn-system with which nodes pull images; may be given several times
    #[arg(long, value_parser = secret_name, value_name = "NAME")]
    pub image_pull_secret: Vec<String>,
    /// A directory of nodes that a Node may name as a disk; may be given several times. Each node has to have it, if need be an empty one
    #[arg(long, value_parser = disk_path, value_name = "PATH")]
    pub disk: Vec<String>,
    /// Where volumes, logs and sockets of a node lie; also its default disk. It stays while there are volumes [default: /var/lib/longhorn]
    #[arg(long, value_parser = data_path, value_name = "PATH")]
    pub data_path: Option<String>,
}
