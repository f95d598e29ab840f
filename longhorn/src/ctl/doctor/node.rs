//! What a node of Kubernetes needs beside what every host does, and what may get into a volume's way there.

use std::fs;
use std::path::Path;

use super::{Finding, multipath};
use crate::mounts::table_as_text;

/// What the image has beside the programs, each with its Debian package.
const IMAGE: &str = include_str!("../../../../deploy/image.files");

/// Where programs are that only root runs, too.
const PLACES: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The kubelet's directory, below which pods see their volumes.
const KUBELET: &str = "/var/lib/kubelet";

/// Names of Longhorn's own processes, as the kernel cuts them off (TASK_COMM_LEN, 15 characters).
const LONGHORNS: [&str; 2] = ["longhorn-manage", "longhorn-instan"];

pub(super) fn findings() -> [Finding; 4] {
    let processes = processes();
    [
        programs(&|name| PLACES.iter().any(|place| Path::new(place).join(name).exists())),
        multipath::finding(&processes),
        longhorn(&processes),
        propagation(Path::new(KUBELET).is_dir(), &table_as_text()),
    ]
}

/// Names of everything that runs.
fn processes() -> Vec<String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}

/// The tools that the CSI driver and the frontends call.
fn programs(is_here: &dyn Fn(&str) -> bool) -> Finding {
    const CHECK: &str = "programs";
    let listed = IMAGE.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("program")).then(|| (words.next().unwrap_or(""), words.next().unwrap_or("")))
    });
    let missing: Vec<(&str, &str)> = listed.filter(|(name, _)| !is_here(name)).collect();
    if missing.is_empty() {
        return Finding::ok(CHECK, "all that a CSI driver outside of its image calls");
    }
    let names: Vec<&str> = missing.iter().map(|(name, _)| *name).collect();
    let mut packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    packages.sort_unstable();
    packages.dedup();
    Finding::warn(
        CHECK,
        format!("no {}: a CSI driver outside of its image needs them", names.join(", ")),
        format!("apt-get install {}", packages.join(" ")),
    )
}

/// Two engines must never have the same replica directory open.
fn longhorn(processes: &[String]) -> Finding {
    const CHECK: &str = "longhorn";
    match processes.iter().find(|name| LONGHORNS.contains(&name.as_str())) {
        None => Finding::ok(CHECK, "Longhorn's own processes do not run here"),
        Some(name) => Finding::warn(
            CHECK,
            format!("Longhorn's own process {name} runs here: its volumes' directories are not free"),
            "detach its volumes and stop it before its directories or resources are taken over (docs/install.md)",
        ),
    }
}

/// What the driver mounts below the kubelet's directory has to reach the pods.
fn propagation(has_kubelet: bool, mounts: &str) -> Finding {
    const CHECK: &str = "propagation";
    if !has_kubelet {
        return Finding::ok(CHECK, format!("no kubelet here ({KUBELET})"));
    }
    // The innermost mount that the directory is on (proc_pid_mountinfo(5)): field 5 is where, optional fields follow 6.
    let on = mounts.lines().filter_map(|line| {
        let (own, _) = line.split_once(" - ")?;
        let fields: Vec<&str> = own.split(' ').collect();
        let point = *fields.get(4)?;
        let is_above = Path::new(KUBELET).starts_with(point);
        is_above.then(|| (point.len(), fields.iter().skip(6).any(|f| f.starts_with("shared:"))))
    });
    match on.max_by_key(|(length, _)| *length) {
        Some((_, true)) => Finding::ok(CHECK, format!("mounts below {KUBELET} reach the pods")),
        _ => Finding::warn(
            CHECK,
            format!(
                "{KUBELET} is on a mount that is not shared: what the CSI driver mounts does not reach the pods"
            ),
            "mount --make-rshared /",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        assert_eq!(programs(&|_| true).verdict, Verdict::Ok);
        let found = programs(&|name| !["mkfs.xfs", "xfs_growfs", "modprobe"].contains(&name));
        assert_eq!(found.verdict, Verdict::Warn);
        assert!(found.detail.contains("mkfs.xfs, xfs_growfs, modprobe"), "{}", found.detail);
        assert_eq!(found.next, "apt-get install kmod xfsprogs");
    }

    #[test]
    fn longhorns_own_processes_are_told() {
        let running = ["systemd".to_owned(), "kubelet".to_owned(), "longhorn-instan".to_owned()];
        assert_eq!(longhorn(&running).verdict, Verdict::Warn);
        assert_eq!(longhorn(&running[..2]).verdict, Verdict::Ok);
    }

    #[test]
    fn mounts_must_be_shared_where_a_kubelet_is() {
        let root = |flags: &str| format!("22 1 8:1 / / rw{flags} - ext4 /dev/sda1 rw\n");
        assert_eq!(propagation(false, &root("")).verdict, Verdict::Ok);
        assert_eq!(propagation(true, &root(" shared:1")).verdict, Verdict::Ok);
        assert_eq!(propagation(true, &root("")).verdict, Verdict::Warn);
        let own = format!("{}40 22 8:2 / /var/lib/kubelet rw - ext4 /dev/sda2 rw\n", root(" shared:1"));
        assert_eq!(propagation(true, &own).verdict, Verdict::Warn, "the innermost mount counts");
        let other = format!("{}40 22 8:2 / /var/lib/kubelets rw - ext4 /dev/sda2 rw\n", root(" shared:1"));
        assert_eq!(propagation(true, &other).verdict, Verdict::Ok);
    }
}
