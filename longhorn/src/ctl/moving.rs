//! `check move`: what of a cluster of Longhorn's cannot be used here, by the resources that kubectl prints.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use lh_cluster::api::{AccessMode, DiskType, Node, Volume, VolumeSpec, VolumeStatus};
use lh_cluster::plan::volume::{CLONED, unbuilt};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Context;
use super::args::Output;
use super::host_path::{disk_path, is_in};
use super::output::{counted, print, print_json, print_table, table_with_prose};
use crate::arguments::DEFAULT_ROOT;

/// How the resources are asked for.
const ASK: &str = "kubectl get volumes.longhorn.io,nodes.longhorn.io -n longhorn-system -o json";

/// What kubectl prints of several resources.
#[derive(Deserialize)]
struct List {
    items: Vec<Value>,
}

/// A volume that is not to be moved.
#[derive(Debug, PartialEq, Serialize)]
struct Hindered {
    volume: String,
    /// One sentence.
    reason: String,
}

/// A directory that pods have to be given.
#[derive(Debug, PartialEq, Serialize)]
struct Disk {
    path: String,
    /// The nodes that have a disk there.
    nodes: Vec<String>,
    /// The others, on which pods do not start before there is such a directory.
    without: Vec<String>,
    /// Why no pod can be given it.
    #[serde(skip_serializing_if = "Option::is_none")]
    trouble: Option<String>,
}

/// What was found.
#[derive(Debug, Serialize)]
struct Found {
    volumes: Vec<Hindered>,
    disks: Vec<Disk>,
    /// How many volumes there are.
    all: usize,
}

/// Prints what cannot be moved.
///
/// # Errors
/// Something cannot be.
pub(super) fn check(context: &Context, resources: &Path) -> Result<()> {
    let text = read(resources).with_context(|| resources.display().to_string())?;
    let found = found(&text)?;
    match context.output {
        Output::Json => print_json(&found)?,
        Output::Table => show(&found)?,
    }
    let broken = found.disks.iter().filter(|disk| disk.trouble.is_some()).count();
    match (found.volumes.len(), broken) {
        (0, 0) => Ok(()),
        (0, disks) => bail!("{} cannot be given to pods", counted(disks, "disk")),
        (hindered, _) => bail!(
            "{hindered} of {} cannot be used here: move none before what they hold is elsewhere (docs/install.md)",
            counted(found.all, "volume")
        ),
    }
}

fn read(resources: &Path) -> io::Result<String> {
    let mut text = String::new();
    match resources.to_str() {
        Some("-") => io::stdin().read_to_string(&mut text)?,
        _ => File::open(resources)?.read_to_string(&mut text)?,
    };
    Ok(text)
}

fn found(text: &str) -> Result<Found> {
    let list: List = serde_json::from_str(text).with_context(|| format!("it is not what `{ASK}` prints"))?;
    let (mut volumes, mut all) = (Vec::new(), 0);
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut nodes = BTreeSet::new();
    for item in list.items {
        let word = |pointer| item.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, name) = (word("/kind"), word("/metadata/name"));
        // Kubernetes has Nodes of its own.
        if !word("/apiVersion").starts_with("longhorn.io/") {
            continue;
        }
        if kind == "Volume" {
            all += 1;
            let reason = match serde_json::from_value::<Volume>(item) {
                Ok(volume) => hindrance(&volume.spec, &volume.status.unwrap_or_default()),
                Err(e) => Some(format!("its resource cannot be read: {e}")),
            };
            volumes.extend(reason.map(|reason| Hindered { volume: name, reason }));
        } else if kind == "Node" {
            let node: Node =
                serde_json::from_value(item).with_context(|| format!("Node {name} cannot be read"))?;
            for disk in node.spec.disks.into_values().filter(|disk| disk.disk_type != DiskType::Block) {
                places.entry(trimmed(&disk.path)).or_default().insert(name.clone());
            }
            nodes.insert(name);
        }
    }
    if nodes.is_empty() {
        bail!("there is no Node of longhorn.io in it: ask with `{ASK}`");
    }
    let disks = places.into_iter().filter(|(path, _)| !is_in(path, DEFAULT_ROOT));
    let disks = disks.map(|(path, at)| Disk {
        trouble: disk_path(&path).err(),
        without: nodes.difference(&at).cloned().collect(),
        nodes: at.into_iter().collect(),
        path,
    });
    Ok(Found { volumes, disks: disks.collect(), all })
}

/// Longhorn writes some paths with a slash at the end.
fn trimmed(path: &str) -> String {
    match path.trim_end_matches('/') {
        "" => path.to_owned(),
        trimmed => trimmed.to_owned(),
    }
}

/// Why a volume cannot be used here; `None`: it can.
fn hindrance(spec: &VolumeSpec, status: &VolumeStatus) -> Option<String> {
    if !spec.data_source.is_empty() && status.clone_status.state != CLONED {
        return Some(format!(
            "it is a clone that Longhorn has not finished ({}): wait until it has, or delete it",
            spec.data_source
        ));
    }
    let is_restored = status.restore_initiated && !status.restore_required;
    if !spec.from_backup.is_empty() && !spec.standby && !is_restored {
        let why = "Longhorn has not restored it from its backup to the end: wait until it has, or delete it";
        return Some(why.to_owned());
    }
    // One that was restored names its backup for ever, and a standby follows it.
    let spec = VolumeSpec { from_backup: String::new(), ..spec.clone() };
    if let Some(what) = unbuilt(&spec) {
        return Some(format!("not built yet: {what}"));
    }
    let is_shared = spec.access_mode == AccessMode::ReadWriteMany && !spec.migratable;
    is_shared
        .then(|| "not built yet: file systems that pods on several nodes share (accessMode rwx)".to_owned())
}

fn show(found: &Found) -> Result<()> {
    if !found.volumes.is_empty() {
        let mut rows = table_with_prose(&["VOLUME", "WHY IT CANNOT BE USED"], &[1]);
        for Hindered { volume, reason } in &found.volumes {
            rows.add_row([volume, reason]);
        }
        print_table(&rows)?;
    } else {
        print(&format!("nothing speaks against {}\n", counted(found.all, "volume")))?;
    }
    if found.disks.is_empty() {
        return print(&format!("\nall disks lie in {DEFAULT_ROOT}, which the pods have\n"));
    }
    let mut rows = table_with_prose(&["DISK", "ON NODES", "MISSING ON"], &[1, 2]);
    for disk in &found.disks {
        let then = disk.trouble.clone().unwrap_or_else(|| disk.without.join(", "));
        rows.add_row([&disk.path, &disk.nodes.join(", "), &then]);
    }
    print("\n")?;
    print_table(&rows)?;
    if found.disks.iter().any(|disk| !disk.without.is_empty()) {
        print("\nmake an empty directory where one is missing: pods start on no node without\n")?;
    }
    let given = found.disks.iter().filter(|disk| disk.trouble.is_none());
    let options: String = given.map(|disk| format!(" --disk {}", quoted(&disk.path))).collect();
    print(&format!("\nlonghornctl install manifests --image IMAGE{options}\n"))
}

/// As a shell takes it in one piece.
fn quoted(path: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    match path.chars().all(is_plain) {
        true => path.to_owned(),
        false => format!("'{}'", path.replace('\'', r"'\''")),
    }
}
