//! `install manifests`: what is applied to a cluster, from `deploy/`.

use anyhow::Result;
use clap::CommandFactory;
use clap::error::ErrorKind;
use sha2::{Digest, Sha256};

use super::Program;
use super::args::ManifestArgs;
use super::host_path::is_in;
use super::output::print;
use crate::arguments::DEFAULT_ROOT;

/// Everything in `deploy/`, in the order in which an API server takes it.
const MANIFESTS: &[&str] = &[
    include_str!("../../../deploy/namespace.yaml"),
    include_str!("../../../deploy/crds.yaml"),
    include_str!("../../../deploy/priorityclass.yaml"),
    include_str!("../../../deploy/rbac.yaml"),
    MANAGER,
    include_str!("../../../deploy/csidriver.yaml"),
    include_str!("../../../deploy/csi.yaml"),
    include_str!("../../../deploy/storageclass.yaml"),
    include_str!("../../../deploy/webhooks.yaml"),
    include_str!("../../../deploy/confirmation.yaml"),
];

/// The one with managers and instance managers, whose pods have the disks.
const MANAGER: &str = include_str!("../../../deploy/manager.yaml");

/// The mount in their pods that further disks stand behind.
const MOUNT: &str = "        - {name: run, mountPath: /run/longhorn}\n";

/// What is mounted there.
const VOLUME: &str = "        hostPath: {path: /run/longhorn, type: DirectoryOrCreate}\n";

/// The settings that managers begin with.
const SETTINGS: &str = "\ndata: {}\n";

/// The labels of a manager's pod.
const LABELS: &str = "    metadata:
      labels: {app.kubernetes.io/part-of: longhorn, app.kubernetes.io/component: manager}\n";

/// The image of the programs as the manifests name it.
const IMAGE: &str = concat!("longhorn:", env!("CARGO_PKG_VERSION"));

/// How a line begins that names the image of a sidecar of Kubernetes' own.
const SIDECAR: &str = "image: csi-";

/// How a line begins that every specification of a pod has.
const OF_A_POD: &str = "priorityClassName: ";

pub(super) fn manifests(args: &ManifestArgs) -> Result<()> {
    if let Some(why) = contradiction(args) {
        Program::command().error(ErrorKind::ArgumentConflict, why).exit();
    }
    for text in MANIFESTS {
        let with_images = with_images(text, args);
        let whole = if *text == MANAGER { with_directories(&with_images, args) } else { with_images };
        print("---\n")?;
        print(&with_secrets(&whole, &args.image_pull_secret))?;
    }
    Ok(())
}

/// Why the pods cannot be given these directories, all of them.
fn contradiction(args: &ManifestArgs) -> Option<String> {
    let root = args.data_path.as_deref().unwrap_or(DEFAULT_ROOT);
    args.disk.iter().enumerate().find_map(|(at, path)| {
        if args.disk[..at].contains(path) {
            return Some(format!("--disk {path} is given twice"));
        }
        if is_in(path, root) {
            return Some(format!("--disk {path} lies in {root}, which the pods have with all that is mounted below: leave it out"));
        }
        is_in(root, path).then(|| format!("--disk {path} would hide {root}, where the managers' own files lie"))
    })
}

/// The text with the managers' root and further disks, as the chart has them.
fn with_directories(text: &str, args: &ManifestArgs) -> String {
    let text = match args.data_path.as_deref().filter(|path| *path != DEFAULT_ROOT) {
        Some(path) => with_root(text, path),
        None => text.to_owned(),
    };
    let disks = || args.disk.iter().enumerate();
    let mounts: String = disks()
        .map(|(i, path)| {
            format!(
                "        - {{name: disk-{i}, mountPath: \"{path}\", mountPropagation: HostToContainer}}\n"
            )
        })
        .collect();
    let volumes: String = disks()
        .map(|(i, path)| {
            format!("      - name: disk-{i}\n        hostPath: {{path: \"{path}\", type: Directory}}\n")
        })
        .collect();
    text.replace(MOUNT, &format!("{MOUNT}{mounts}")).replace(VOLUME, &format!("{VOLUME}{volumes}"))
}

/// The text with another root, where new nodes have their first disk, too.
fn with_root(text: &str, path: &str) -> String {
    let settings = serde_json::json!({ "default-data-path": path }).to_string();
    let mark: String = Sha256::digest(&settings).iter().map(|byte| format!("{byte:02x}")).collect();
    let annotations = format!(
        "{LABELS}      # Managers read them when they begin.
      annotations: {{longhorn.io/default-settings: {mark}}}\n"
    );
    text.replace(DEFAULT_ROOT, path)
        .replace(SETTINGS, &format!("\ndata: {settings}\n"))
        .replace(LABELS, &annotations)
}

/// The text with secrets for pulling images in every pod.
fn with_secrets(text: &str, names: &[String]) -> String {
    if names.is_empty() {
        return text.to_owned();
    }
    let secrets: Vec<String> = names.iter().map(|name| format!("{{name: \"{name}\"}}")).collect();
    let line = |line: &str| match line.find(OF_A_POD).filter(|at| line[..*at].trim().is_empty()) {
        Some(indent) => format!("{line}{:indent$}imagePullSecrets: [{}]\n", "", secrets.join(", ")),
        None => line.to_owned(),
    };
    text.split_inclusive('\n').map(line).collect()
}

/// The text with the images that were asked for.
fn with_images(text: &str, args: &ManifestArgs) -> String {
    let text = match &args.image {
        Some(image) => text.replace(IMAGE, image),
        None => text.to_owned(),
    };
    match &args.sidecar_registry {
        Some(registry) => text.replace(SIDECAR, &format!("image: {}/csi-", registry.trim_end_matches('/'))),
        None => text,
    }
}
