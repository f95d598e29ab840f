//! `longhorn csi`: the CSI driver of a Kubernetes node.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use control::host::{DEVICES, MapKey};
use csi::{Holder, Options, Page, ReadSnapshots, SnapshotMap, run_here};
use lh_cluster::api::NAMESPACE;

use crate::arguments::unix_address;
use crate::reader::{ReplicaAt, SnapshotReader};

/// Arguments of a driver.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(super) struct CsiArgs {
    /// Where to serve CSI
    #[arg(long, env = "CSI_ENDPOINT", value_parser = endpoint, value_name = "unix:PATH")]
    endpoint: PathBuf,
    /// The node's name in Kubernetes
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node: String,
    /// The namespace of Longhorn's resources
    #[arg(long, env = "POD_NAMESPACE", default_value = NAMESPACE, value_name = "NAME")]
    namespace: String,
    /// Most volumes on a node at once; 0 for no limit
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..), value_name = "COUNT")]
    max_volumes_per_node: i64,
    /// Where engines put their devices
    #[arg(long, default_value = DEVICES, value_name = "DIR")]
    devices: PathBuf,
    /// The registry of the node's kubelet, usually /var/lib/kubelet/plugins_registry; without it no kubelet is told
    #[arg(long, value_name = "DIR")]
    kubelet_registry: Option<PathBuf>,
    /// The socket as the kubelet sees it, if that is another path
    #[arg(long, value_name = "PATH", requires = "kubelet_registry")]
    kubelet_endpoint: Option<PathBuf>,
    /// Answer health probes, GET /healthz, on this TCP port
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..), value_name = "PORT")]
    health_port: Option<u16>,
}

const HELP: &str = "\
It finds the API server by KUBECONFIG, or by its pod's service account, and
acts through Longhorn's resources there: a manager has to run. Its end changes
nothing for mounted volumes.";

/// `unix:PATH`, or `unix://PATH` as orchestrators write it.
pub(super) fn endpoint(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix://") {
        Some(path) => unix_address(&format!("unix:{path}")),
        None => unix_address(text),
    }
}

pub(super) fn run(args: CsiArgs) -> Result<()> {
    let options = Options {
        endpoint: args.endpoint,
        node: args.node,
        namespace: args.namespace,
        most_volumes: args.max_volumes_per_node,
        devices: args.devices,
        registry: args.kubelet_registry,
        kubelet_endpoint: args.kubelet_endpoint,
        health: args.health_port,
        patience: None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = super::asked_to_end()?;
        Ok(run_here(options, Arc::new(OverTheNetwork), stop).await?)
    })
}

/// Reads snapshots from replicas wherever they are, over the data protocol.
struct OverTheNetwork;

impl ReadSnapshots for OverTheNetwork {
    fn open(&self, at: &Holder, snapshot: &str, base: Option<&str>) -> Result<Box<dyn SnapshotMap>, String> {
        let MapKey(key) = MapKey::parse(&at.key).ok_or("the key for maps is not one")?;
        let at = ReplicaAt {
            volume: at.volume.clone(),
            replica: at.replica.clone(),
            address: at.address.parse()?,
            key,
        };
        let reader = SnapshotReader::open(&at, snapshot, base).map_err(|e| e.to_string())?;
        Ok(Box::new(Map(reader)))
    }
}

struct Map(SnapshotReader);

impl SnapshotMap for Map {
    fn page(&mut self, from: u64) -> Result<Page, String> {
        let page = self.0.map(from).map_err(|e| e.to_string())?;
        let ranges = page.ranges.iter().map(|extent| extent.offset..extent.end()).collect();
        Ok(Page { ranges, next: page.next })
    }
}
