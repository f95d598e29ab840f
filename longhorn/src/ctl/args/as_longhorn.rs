//! Words of Longhorn's own longhornctl for what is here, too. Help does not list them.

use clap::Subcommand;

use super::ReplicaExportArgs;
use super::examples::TRIM_HELP;
use crate::arguments::volume_name;

#[derive(Debug, Subcommand)]
pub(in crate::ctl) enum TrimCommand {
    /// Give back what the file system that is mounted from the volume does not use
    #[command(after_help = TRIM_HELP)]
    Volume {
        /// Name of the volume: up and mounted on this host, or on a node of the cluster that KUBECONFIG names
        #[arg(value_parser = volume_name, required_unless_present = "name")]
        volume: Option<String>,
        /// The same, as Longhorn's longhornctl wants it
        #[arg(long, value_parser = volume_name, conflicts_with = "volume")]
        name: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(in crate::ctl) enum ExportCommand {
    /// The same as `replica export`
    Replica(ReplicaExportArgs),
}
