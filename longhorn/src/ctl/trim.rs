//! `trim volume`: what the file system on a volume does not use any more is given back. Longhorn's longhornctl has it.

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control::host::{RecordError, VolumeRecord};
use lh_cluster::api::NAMESPACE;
use lh_cluster::run::{RequestError, request_trim};
use serde::Serialize;
use tokio::process::Command;

use super::args::Output as Form;
use super::observe::{Attachment, observe};
use super::output::{print, print_json};
use super::{Context, interrupt};
use crate::mounts::mount_of;
use crate::search_path::search_path;

/// How long a cluster may take: a large file system that was never trimmed takes minutes.
const PATIENCE: Duration = Duration::from_secs(3600);

/// What `trim volume -o json` prints.
#[derive(Debug, Serialize)]
struct TrimView {
    volume: String,
    /// Where it is mounted on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    mount_point: Option<String>,
    /// The node of the cluster that has it mounted.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// Bytes that the file system has told the volume of.
    bytes: Option<u64>,
}

/// A volume of this host, or, where it has none of the name, of the cluster that `KUBECONFIG` names.
pub(super) async fn run(context: &Context, volume: &str) -> Result<()> {
    match VolumeRecord::load(&context.root, volume) {
        Ok(record) => on_this_host(context, &record).await,
        Err(missing @ RecordError::Missing { .. }) => match in_the_cluster(context, volume).await {
            Err(e) if matches!(e.downcast_ref(), Some(RequestError::NoCluster(_))) => {
                bail!("{missing}; a volume of a cluster is found with KUBECONFIG")
            }
            done => done,
        },
        Err(e) => Err(e.into()),
    }
}

async fn on_this_host(context: &Context, record: &VolumeRecord) -> Result<()> {
    let volume = &record.name;
    let view = observe(&context.root, record).await?;
    let Some(device) = view.device else {
        if view.state == Attachment::Detached {
            bail!("volume {volume} is not up: start it first with `longhornctl up {volume}`");
        }
        bail!(
            "volume {volume} has no device here (frontend {}): run fstrim where its file system is mounted",
            view.frontend
        );
    };
    let Some(mount_point) = mount_of(device.as_ref())? else {
        bail!(
            "{device} is not mounted on this host where a path leads to it: mount it, or trim it where it is"
        );
    };
    let trimmed = fstrim(&mount_point).await?;
    if !trimmed.status.success() {
        bail!("{}", String::from_utf8_lossy(&trimmed.stderr).trim());
    }
    let said = String::from_utf8_lossy(&trimmed.stdout);
    match context.output {
        Form::Table => print(&said),
        Form::Json => print_json(&TrimView {
            volume: volume.clone(),
            mount_point: Some(mount_point.display().to_string()),
            node: None,
            bytes: bytes_in(&said),
        }),
    }
}

/// What `fstrim` said. It ends with this command: a terminal sends its Ctrl-C to both, others their signal to one.
async fn fstrim(mount_point: &Path) -> Result<Output> {
    let held = interrupt::hold();
    let child = Command::new("fstrim")
        .env("PATH", search_path())
        .arg("--verbose")
        .arg(mount_point)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("fstrim cannot be run: it comes with util-linux")?;
    let ended = tokio::select! {
        biased;
        () = held.wait() => None,
        ended = child.wait_with_output() => Some(ended),
    };
    held.let_go();
    ended.context("interrupted")?.context("fstrim")
}

async fn in_the_cluster(context: &Context, volume: &str) -> Result<()> {
    let namespace = std::env::var("POD_NAMESPACE").unwrap_or_else(|_| NAMESPACE.to_owned());
    interrupt::leaves("the cluster goes on with what it was asked for");
    let done = request_trim(&namespace, volume, PATIENCE).await?;
    match context.output {
        Form::Table => print(&format!("{}: {}\n", done.node, done.message)),
        Form::Json => print_json(&TrimView {
            volume: volume.to_owned(),
            mount_point: None,
            node: Some(done.node),
            bytes: done.message.split(' ').next().and_then(|number| number.parse().ok()),
        }),
    }
}

/// Of "/mnt: 1 GiB (1073741824 bytes) trimmed" the number of bytes.
fn bytes_in(said: &str) -> Option<u64> {
    let (number, _) = said.rsplit_once('(')?.1.split_once(' ')?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_in_brackets() {
        assert_eq!(
            bytes_in("/mnt/a (b): 46.5 MiB (48709632 bytes) trimmed on /dev/longhorn/v\n"),
            Some(48_709_632)
        );
        assert_eq!(bytes_in("nothing"), None);
    }
}
