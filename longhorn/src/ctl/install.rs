//! `install manifests`: what is applied to a cluster, from `deploy/`.

use anyhow::Result;

use super::args::ManifestArgs;
use super::output::print;

/// Everything in `deploy/`, in the order in which an API server takes it.
const MANIFESTS: &[&str] = &[
    include_str!("../../../deploy/namespace.yaml"),
    include_str!("../../../deploy/crds.yaml"),
    include_str!("../../../deploy/priorityclass.yaml"),
    include_str!("../../../deploy/rbac.yaml"),
    include_str!("../../../deploy/manager.yaml"),
    include_str!("../../../deploy/csidriver.yaml"),
    include_str!("../../../deploy/csi.yaml"),
    include_str!("../../../deploy/storageclass.yaml"),
    include_str!("../../../deploy/webhooks.yaml"),
    include_str!("../../../deploy/confirmation.yaml"),
];

/// The image of the programs as the manifests name it.
const IMAGE: &str = concat!("longhorn:", env!("CARGO_PKG_VERSION"));

/// How a line begins that names the image of a sidecar of Kubernetes' own.
const SIDECAR: &str = "image: csi-";

/// How a line begins that every specification of a pod has.
const OF_A_POD: &str = "priorityClassName: ";

pub(super) fn manifests(args: &ManifestArgs) -> Result<()> {
    for text in MANIFESTS {
        print("---\n")?;
        print(&with_secrets(&with_images(text, args), &args.image_pull_secret))?;
    }
    Ok(())
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
