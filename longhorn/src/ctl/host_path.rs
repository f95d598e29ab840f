//! Directories of nodes that pods are given, as the command line names them.

use control::host::RUN;

/// Where the pods' own programs and the kernel's file systems are, and what else is mounted there: a directory of the node in such a place,
/// or above it, would hide that.
const OWN: &[&str] = &[
    "/bin",
    "/csi",
    "/default-settings",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/proc",
    RUN,
    "/sbin",
    "/sys",
    "/tmp",
    "/usr",
    "/var/lib/kubelet",
];

/// The path of a disk as a Node names it, which the pods have at the same place.
///
/// # Errors
/// One sentence that says how it is written.
pub(super) fn disk_path(text: &str) -> Result<String, String> {
    // Kubernetes takes no colon in a mountPath; it stands in double quotes.
    if let Some(c) = text.chars().find(|c| c.is_control() || "\"\\:".contains(*c)) {
        return Err(format!("no pod can be given a directory whose path has {c:?} in it"));
    }
    if !text.starts_with('/') {
        return Err(format!("{text:?} is no absolute path: it begins with /"));
    }
    let parts: Vec<&str> = text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        return Err(format!("{text:?} has \"..\" in it: write where that leads"));
    }
    let plain = format!("/{}", parts.join("/"));
    if let Some(own) = OWN.iter().find(|own| is_in(own, &plain)) {
        return Err(format!("the pods have {own} of their own, which {text:?} would hide"));
    }
    if plain == text { Ok(plain) } else { Err(format!("{text:?} is written {plain}")) }
}

/// The path of the managers' root, which stands without quotes.
///
/// # Errors
/// The same.
pub(super) fn data_path(text: &str) -> Result<String, String> {
    let path = disk_path(text)?;
    match path.chars().find(|c| !c.is_ascii_alphanumeric() && !"/._-+@".contains(*c)) {
        Some(c) => Err(format!("the path of the managers' directory has no {c:?} in it")),
        None => Ok(path),
    }
}

/// True for a directory itself, and for what lies below it.
pub(super) fn is_in(path: &str, directory: &str) -> bool {
    let directory = directory.trim_end_matches('/');
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_an_absolute_and_plain_path_of_its_own() {
        for path in ["/mnt/disk1", "/data", "/var/lib/longhorn-2", "/mnt/two words", "/var/lib", "/srv/.a"] {
            let taken = disk_path(path);
            // What lies above a directory of the pods' own hides it.
            assert_eq!(taken.is_ok(), path != "/var/lib", "{path}: {taken:?}");
        }
        for (path, says) in [
            ("", "absolute"),
            ("mnt/a", "absolute"),
            ("/mnt/../a", "\"..\""),
            ("/mnt/a/", "is written /mnt/a"),
            ("/mnt//a", "is written /mnt/a"),
            ("/mnt/./a", "is written /mnt/a"),
            ("/", "of their own"),
            ("/run", "/run/longhorn"),
            ("/dev", "/dev"),
            ("/mnt/a:b", "':'"),
            ("/mnt/\"a", "in it"),
            ("/mnt/a\nb", "in it"),
        ] {
            let refused = disk_path(path).unwrap_err();
            assert!(refused.contains(says), "{path:?}: {refused}");
        }
        assert!(data_path("/data/longhorn").is_ok() && data_path("/data/{a}").is_err());
        assert!(data_path("/data/two words").is_err() && data_path("data").is_err());
    }

    #[test]
    fn below_a_directory_is_not_beside_it() {
        assert!(is_in("/a/b", "/a") && is_in("/a", "/a") && is_in("/a", "/a/") && is_in("/a", "/"));
        assert!(!is_in("/ab", "/a") && !is_in("/a", "/a/b"));
    }
}
