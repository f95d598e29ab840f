//! `longhorn manager`: the control plane of a Kubernetes node.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use lh_cluster::agent::Reach;
use lh_cluster::api::NAMESPACE;
use lh_cluster::plan::instance_manager::RunBy;
use lh_cluster::run::{Clock, Options, authority_socket, run_here};
use lh_cluster::settings::Given;

use super::csi::endpoint;
use crate::arguments::{DEFAULT_ROOT, ROOT_VARIABLE, root_path};

/// Arguments of a manager.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(super) struct ClusterArgs {
    /// Where volumes, logs and sockets of this node lie; also its default disk
    #[arg(long, env = ROOT_VARIABLE, default_value = DEFAULT_ROOT, value_parser = root_path(), value_name = "DIR")]
    root: PathBuf,
    /// The node's name in Kubernetes
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node: String,
    /// The namespace of Longhorn's resources
    #[arg(long, env = "POD_NAMESPACE", default_value = NAMESPACE, value_name = "NAME")]
    namespace: String,
    /// The image of these programs, as engines and replicas name it
    #[arg(long, default_value = concat!("longhorn:", env!("CARGO_PKG_VERSION")), value_name = "IMAGE")]
    image: String,
    /// Answer the API server's questions about what users ask for on this TCP port (deploy/webhooks.yaml)
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..), value_name = "PORT")]
    webhook_port: Option<u16>,
    /// Who runs the instance manager of this node: somebody else (process), or a pod that this manager makes from the
    /// PodTemplate longhorn-instance-manager
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    instance_manager: InstanceManagerBy,
    /// This node's address, on which its replicas listen for engines of other nodes; without it all nodes are one machine
    #[arg(long, env = "DATA_ADDRESS", value_name = "ADDRESS")]
    data_address: Option<IpAddr>,
    /// The socket of this node's CSI driver, which trims mounted file systems; without it nobody does
    #[arg(long, env = "CSI_ENDPOINT", value_parser = endpoint, value_name = "unix:PATH")]
    csi_endpoint: Option<PathBuf>,
    /// A directory with a file for each setting that has another default than Longhorn's, as a ConfigMap is mounted
    #[arg(long, value_name = "DIR")]
    default_settings: Option<PathBuf>,
    /// Let volumes' bytes travel between nodes without encryption
    #[arg(long)]
    insecure: bool,
}

/// Who runs the instance manager.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum InstanceManagerBy {
    #[default]
    Process,
    Pod,
}

const HELP: &str = "\
It finds the API server by KUBECONFIG, or by its pod's service account, and
needs the instance manager of the same root. Its end changes nothing for
running volumes.";

pub(super) fn run(args: ClusterArgs) -> Result<()> {
    let authority = authority_socket(&args.root).with_context(|| args.root.display().to_string())?;
    let ClusterArgs { root, node, namespace, image, data_address, insecure, csi_endpoint, .. } = args;
    let instance_manager = match args.instance_manager {
        InstanceManagerBy::Process => RunBy::Others,
        InstanceManagerBy::Pod => RunBy::Pod,
    };
    let webhook = args.webhook_port;
    let reach = match data_address {
        None => Reach::ThisMachine,
        Some(address) if insecure => Reach::Network(address),
        Some(address) => bail!(
            "replicas on {address} are not encrypted: whoever is on the network between sees and may change the volumes' \
             bytes; give --insecure if that network is your own"
        ),
    };
    let settings = Arc::new(args.default_settings.map(|from| given(&from)).transpose()?.unwrap_or_default());
    let clock = Clock::default();
    let options =
        Options { node, namespace, root, image, instance_manager, authority, webhook, settings, clock };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = super::asked_to_end()?;
        Ok(run_here(options, reach, csi_endpoint, stop).await?)
    })
}

/// The defaults in a directory: a file's name is the setting's, its text the value. What no setting takes is told and left out.
///
/// # Errors
/// Something there cannot be read.
fn given(directory: &Path) -> Result<Given> {
    let mut given = Given::default();
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    for entry in entries {
        let entry = entry.with_context(|| directory.display().to_string())?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // A mounted ConfigMap has its versions in `..` and a date, and links to the one that counts.
        if name.starts_with('.') {
            continue;
        }
        let value = fs::read_to_string(entry.path()).with_context(|| entry.path().display().to_string())?;
        if let Err(why) = given.give(&name, value.trim()) {
            tracing::warn!(why, "a default setting is left out");
        }
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_read_as_a_config_map_is_mounted() {
        let mounted = tempfile::tempdir().unwrap();
        let version = mounted.path().join("..2026_01_01");
        fs::create_dir(&version).unwrap();
        for (name, value) in [("default-replica-count", "2\n"), ("no-setting", "2"), ("log-level", "loud")] {
            fs::write(version.join(name), value).unwrap();
            std::os::unix::fs::symlink(version.join(name), mounted.path().join(name)).unwrap();
        }
        let given = given(mounted.path()).unwrap();
        assert_eq!(given.all().collect::<Vec<_>>(), [("default-replica-count", "2")]);
    }
}
