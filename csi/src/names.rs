//! Names: of a volume and a snapshot in the cluster for the names that an orchestrator gives, and the handles that it gets.
//!
//! An orchestrator names with up to 128 characters of any kind; here a volume's name is part of resource names, directories
//! and sockets, and has at most [`NAME_MAX`]. A name that fits is kept; any other is shortened and told apart by a checksum. Whoever
//! makes the resource keeps the full name in [`GIVEN_NAME`], so that two names are never taken for one.

use std::fmt;
use std::fmt::Write as _;

use lh_cluster::api::NAME_MAX;
use lh_cluster::plan::snapshot::is_own_name;
use sha2::{Digest, Sha256};

use crate::Refused;

/// Hex digits that tell shortened names apart.
const DIGITS: usize = 12;

/// The annotation that keeps the name that an orchestrator gave.
pub const GIVEN_NAME: &str = "csi.longhorn.io/name";

/// The name in the cluster for the one that an orchestrator gave.
pub fn resource_name(given: &str) -> String {
    if fits(given) {
        return given.to_owned();
    }
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let mut name: String = given.chars().take(NAME_MAX - DIGITS - 1).map(plain).collect();
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        name.replace_range(..1.min(name.len()), "v");
    }
    name.push('-');
    name.push_str(&checksum([given])[..DIGITS]);
    name
}

/// The same of a snapshot, whose name is none that managers give theirs.
pub fn snapshot_name(given: &str) -> String {
    let name = resource_name(given);
    if is_own_name(&name) { resource_name(&format!("s/{given}")) } else { name }
}

/// True for a DNS label (RFC 1123) that is short enough.
fn fits(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    name.len() <= NAME_MAX && name.chars().all(inner) && name.starts_with(ends) && name.ends_with(ends)
}

/// SHA-256 of words one after the other, as hex digits.
fn checksum<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    words.into_iter().for_each(|word| hash.update(word.as_bytes()));
    hash.finalize().iter().fold(String::new(), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Id of the ticket for a volume on a node: the name that Kubernetes gives its own attachment of them.
pub fn ticket_id(volume: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", checksum([volume, driver, node]))
}

/// The handle of a snapshot, as Longhorn writes it: `snap://VOLUME/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotHandle {
    /// The volume.
    pub volume: String,
    /// The snapshot's name.
    pub name: String,
}

impl SnapshotHandle {
    /// What a handle says, or why a snapshot of that handle is none: it is a backup of Longhorn's, which this version cannot reach, or
    /// none at all.
    ///
    /// # Errors
    /// [`Refused::Precondition`] or [`Refused::Missing`].
    pub(crate) fn named(text: &str) -> Result<Self, Refused> {
        if let Some(what) = unbuilt(text) {
            return Err(Refused::Precondition(format!(
                "{text} is {what} of Longhorn's: this version cannot reach it"
            )));
        }
        Self::parse(text).ok_or_else(|| Refused::Missing(format!("snapshot {text} does not exist")))
    }

    /// What a handle says; `None`: it is none of ours.
    pub fn parse(text: &str) -> Option<Self> {
        let (volume, name) = text.strip_prefix("snap://")?.split_once('/')?;
        let ok = |part: &str| !part.is_empty() && !part.contains('/');
        (ok(volume) && ok(name)).then(|| Self { volume: volume.to_owned(), name: name.to_owned() })
    }
}

impl fmt::Display for SnapshotHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "snap://{}/{}", self.volume, self.name)
    }
}

/// What a handle of Longhorn's names that this version does not have; `None`: it is no such handle.
fn unbuilt(handle: &str) -> Option<&'static str> {
    match handle.split_once("://")?.0 {
        "bak" | "bs" => Some("a backup"),
        "bi" => Some("a backing image"),
        _ => None,
    }
}

/// The handle of a group of snapshots.
pub fn group_handle(name: &str) -> String {
    format!("{GROUP}{name}")
}

/// The name in a group's handle; `None`: it is none of ours.
pub fn group_name(handle: &str) -> Option<&str> {
    handle.strip_prefix(GROUP).filter(|name| fits(name))
}

const GROUP: &str = "group://";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_fits_is_kept_and_any_other_is_shortened_and_told_apart() {
        let kept = "pvc-0b9b3f3c-1f0c-4a53-8d5b-5e1a3c2d4f60";
        assert_eq!(resource_name(kept), kept);
        let long = "x".repeat(128);
        let mut other = long.clone();
        other.replace_range(127.., "y");
        assert_ne!(resource_name(&long), resource_name(&other));
        for given in
            [long.as_str(), "Sanity_Name.1", "-", "é", "a-", "", "A", "..", "snap/shot", "é-ünï-ço-dé"]
        {
            let name = resource_name(given);
            assert!(fits(&name), "{given:?} became {name:?}");
            assert_eq!(resource_name(given), name);
        }
        assert_ne!(resource_name("A"), resource_name("a"));
    }

    #[test]
    fn a_snapshot_has_no_name_of_the_managers_own() {
        assert_eq!(snapshot_name("snapshot-1"), "snapshot-1");
        let long = format!("clone-{}", "x".repeat(100));
        for given in ["volume-head", "clone-unfinished", "clone-pvc-1", long.as_str()] {
            let name = snapshot_name(given);
            assert!(fits(&name) && !is_own_name(&name), "{given:?} became {name:?}");
            assert_eq!(snapshot_name(given), name);
        }
        assert_ne!(snapshot_name("clone-a"), snapshot_name("clone-b"));
    }

    #[test]
    fn tickets_are_named_as_kubernetes_names_its_attachments() {
        // sha256 of the concatenation, from a shell: printf vdn | sha256sum.
        let id = ticket_id("v", "d", "n");
        assert_eq!(id, format!("csi-{}", checksum(["vdn"])));
        assert_eq!(id.len(), 68);
    }

    #[test]
    fn handles_are_read_as_they_are_written() {
        let handle = SnapshotHandle { volume: "v".into(), name: "s".into() };
        assert_eq!(handle.to_string(), "snap://v/s");
        assert_eq!(SnapshotHandle::parse("snap://v/s"), Some(handle));
        for bad in ["", "v/s", "snap://", "snap://v", "snap:///s", "snap://v/", "snap://v/s/t", "bak://v/s"] {
            assert_eq!(SnapshotHandle::parse(bad), None, "{bad:?}");
        }
        assert_eq!(group_name(&group_handle("g")), Some("g"));
        assert_eq!(group_name("fake-vol-id"), None);
    }
}
