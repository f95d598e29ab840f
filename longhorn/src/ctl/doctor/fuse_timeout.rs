//! How long the kernel lets a FUSE server take for an answer (sysctl, Linux 6.15: documented with `fs.fuse` of the kernel's
//! `Documentation/admin-guide/sysctl/fs.rst`). After it the connection is aborted, which is the end of a volume's device, where a
//! volume would have waited for its replicas or its next engine.

use std::fs;
use std::path::Path;

use super::Finding;

/// What is wrong with the limits below `/proc/sys/fs/fuse`, if anything is.
pub(super) fn finding(check: &'static str, sysctls: &Path) -> Option<Finding> {
    let seconds = |name: &str| -> u64 {
        let text = fs::read_to_string(sysctls.join(name)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    let (default, max) = (seconds("default_request_timeout"), seconds("max_request_timeout"));
    // 0 is none. Of both the smaller one counts for who asks for none of its own.
    let limit = [default, max].into_iter().filter(|limit| *limit > 0).min()?;
    Some(Finding::warn(
        check,
        format!("a volume that answers nothing for {limit} s loses its device, for good"),
        "sysctl fs.fuse.default_request_timeout=0 fs.fuse.max_request_timeout=0; it counts for devices that are made from then on",
    ))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn the_smaller_limit_is_warned_of_and_none_is_not() {
        let place = tempfile::tempdir().unwrap();
        assert!(finding("fuse", place.path()).is_none(), "a kernel that knows no limits");
        for (default, max, told) in
            [(0, 0, None), (300, 0, Some("300 s")), (0, 60, Some("60 s")), (300, 60, Some("60 s"))]
        {
            fs::write(place.path().join("default_request_timeout"), format!("{default}\n")).unwrap();
            fs::write(place.path().join("max_request_timeout"), format!("{max}\n")).unwrap();
            let found = finding("fuse", place.path());
            assert_eq!(found.is_some(), told.is_some());
            assert!(found.is_none_or(|f| f.verdict == Verdict::Warn && f.detail.contains(told.unwrap())));
        }
    }
}
