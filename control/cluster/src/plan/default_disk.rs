//! The disks and tags that a node begins with, as its node in Kubernetes asks; Longhorn's label, annotations and words.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::api::DiskSpec;

/// The label of a node in Kubernetes that asks for disks where the setting create-default-disk-labeled-nodes has that decide.
const LABEL: &str = "node.longhorn.io/create-default-disk";

/// The label's value for one disk in the manager's root, or where default-data-path says.
const OWN: &str = "true";

/// The label's value for the disks that the annotation lists.
const LISTED: &str = "config";

/// The annotation that lists disks: a JSON array of objects.
const DISKS: &str = "node.longhorn.io/default-disks-config";

/// The annotation with the node's tags: a JSON array of words.
const TAGS: &str = "node.longhorn.io/default-node-tags";

/// Labels or annotations.
type Words = BTreeMap<String, String>;

/// What a node without disks begins with.
#[derive(Clone, Debug, PartialEq)]
pub enum Disks {
    /// Nothing.
    None,
    /// One, in the place that the settings name.
    Own,
    /// These, each by its name, which may be empty.
    Listed(Vec<(String, DiskSpec)>),
}

#[derive(Deserialize)]
struct Listed {
    #[serde(default)]
    name: String,
    #[serde(flatten)]
    disk: DiskSpec,
}

/// Which disks a node without any is given. `by_label`: those nodes alone have any that ask for it.
///
/// # Errors
/// The annotation cannot be understood: one sentence that says how it is written.
pub fn disks(labels: &Words, annotations: &Words, by_label: bool) -> Result<Disks, String> {
    match labels.get(LABEL).map(String::as_str) {
        _ if !by_label => Ok(Disks::Own),
        Some(OWN) => Ok(Disks::Own),
        Some(LISTED) => {
            let text = annotations.get(DISKS).map_or("", String::as_str);
            listed(text).map(Disks::Listed).map_err(|e| {
                format!(
                    "the annotation {DISKS} is a JSON array such as [{{\"path\":\"/mnt/a\",\"allowScheduling\":true}}]: {e}"
                )
            })
        }
        Some(_) | None => Ok(Disks::None),
    }
}

fn listed(text: &str) -> Result<Vec<(String, DiskSpec)>, String> {
    let all: Vec<Listed> = serde_json::from_str(text).map_err(|e| e.to_string())?;
    match all.iter().find(|one| !one.disk.path.starts_with('/')) {
        Some(one) => Err(format!("{:?} is no absolute path", one.disk.path)),
        None => Ok(all.into_iter().map(|one| (one.name, one.disk)).collect()),
    }
}

/// The tags of a node that has none.
///
/// # Errors
/// The annotation cannot be understood: one sentence that says how it is written.
pub fn tags(annotations: &Words) -> Result<Vec<String>, String> {
    let Some(text) = annotations.get(TAGS) else { return Ok(Vec::new()) };
    serde_json::from_str(text)
        .map_err(|e| format!("the annotation {TAGS} is a JSON array of words, such as [\"fast\"]: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(pairs: &[(&str, &str)]) -> Words {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn a_node_gets_the_disks_that_it_asks_for() {
        let none = words(&[]);
        assert_eq!(disks(&none, &none, false), Ok(Disks::Own));
        assert_eq!(disks(&none, &none, true), Ok(Disks::None));
        assert_eq!(disks(&words(&[(LABEL, "false")]), &none, true), Ok(Disks::None));
        assert_eq!(disks(&words(&[(LABEL, "true")]), &none, true), Ok(Disks::Own));
        // The example of Longhorn's documentation.
        let config = r#"[{"path":"/mnt/disk1","allowScheduling":true},
            {"name":"fast-ssd-disk","path":"/mnt/disk2","allowScheduling":false,"storageReserved":10485760,"tags":["ssd","fast"]}]"#;
        let asked = disks(&words(&[(LABEL, "config")]), &words(&[(DISKS, config)]), true);
        let Ok(Disks::Listed(all)) = asked else { panic!("{asked:?}") };
        let [(bare, first), (name, second)] = &all[..] else { panic!("{all:?}") };
        assert!(bare.is_empty() && first.path == "/mnt/disk1" && first.allow_scheduling);
        assert_eq!((name.as_str(), second.storage_reserved), ("fast-ssd-disk", 10_485_760));
        assert!(!second.allow_scheduling && second.tags == ["ssd", "fast"]);
        for wrong in ["", "{}", r#"[{"path":"mnt"}]"#, r#"[{"allowScheduling":true}]"#] {
            let refused = disks(&words(&[(LABEL, "config")]), &words(&[(DISKS, wrong)]), true).unwrap_err();
            assert!(refused.contains(DISKS) && refused.contains("JSON array"), "{wrong}: {refused}");
        }
    }

    #[test]
    fn a_node_gets_the_tags_that_it_asks_for() {
        assert_eq!(tags(&words(&[])), Ok(vec![]));
        assert_eq!(
            tags(&words(&[(TAGS, r#"["fast","storage"]"#)])),
            Ok(vec!["fast".into(), "storage".into()])
        );
        assert!(tags(&words(&[(TAGS, "fast")])).unwrap_err().contains("JSON array"));
    }
}
