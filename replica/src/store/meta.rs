//! Longhorn's metadata files: `volume.meta` and the `.meta` beside each layer, and the names of layers.
//!
//! What is written here is what Longhorn writes, to the byte. What is read is bounded, may have keys that this program
//! does not know, and is believed only after [`VolumeMeta::check`] and the checks of the layer tree.

use std::collections::BTreeMap;

use lh_block::{BLOCK, rfc3339};
use lh_wire::LayerInfo;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::Damage;
use super::gojson::Object;

/// Longhorn's files have some hundred bytes; labels are the only part that can grow.
pub(super) const META_MAX: usize = 64 << 10;

/// Name of the file that names the head.
pub(super) const VOLUME_META: &str = "volume.meta";

/// Largest volume: 1 PiB. Beyond it the tables that must fit into memory whole would grow too large; the largest file of
/// ext4 is 16 TiB.
pub(super) const SIZE_MAX: u64 = 1 << 50;

/// Content of `volume.meta`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct VolumeMeta {
    #[serde(rename = "Size")]
    pub(super) raw_size: i64,
    /// File name of the head.
    #[serde(rename = "Head")]
    pub(super) head: String,
    /// Open, or not closed cleanly.
    #[serde(rename = "Dirty", default)]
    pub(super) dirty: bool,
    /// The files alone are not the volume.
    #[serde(rename = "Rebuilding", default)]
    pub(super) rebuilding: bool,
    #[serde(rename = "Error", default)]
    pub(super) error: String,
    /// File name of the head's parent, or empty.
    #[serde(rename = "Parent", default)]
    pub(super) parent: String,
    #[serde(rename = "SectorSize", default = "sector_size")]
    pub(super) sector_size: i64,
    /// Relative paths count from the replica directory.
    #[serde(rename = "BackingFilePath", default)]
    pub(super) backing_file: String,
    #[serde(rename = "Encrypted", default)]
    pub(super) encrypted: bool,
}

const fn sector_size() -> i64 {
    512
}

impl VolumeMeta {
    pub(super) fn new(size: u64, head: String, parent: String) -> Self {
        Self {
            raw_size: i64::try_from(size).unwrap_or(i64::MAX),
            head,
            dirty: false,
            rebuilding: false,
            error: String::new(),
            parent,
            sector_size: sector_size(),
            backing_file: String::new(),
            encrypted: false,
        }
    }

    /// Volume size in bytes.
    pub(super) fn size(&self) -> u64 {
        u64::try_from(self.raw_size).unwrap_or(0)
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Damage> {
        let meta = Self::parse_noted(bytes)?;
        if !meta.error.is_empty() {
            return Err(Damage::NotedError(meta.error.chars().take(200).collect()));
        }
        Ok(meta)
    }

    /// The same where the error that Longhorn may have noted is no reason to refuse.
    pub(super) fn parse_noted(bytes: &[u8]) -> Result<Self, Damage> {
        let meta: Self = parse(VOLUME_META, bytes)?;
        meta.check()?;
        Ok(meta)
    }

    fn check(&self) -> Result<(), Damage> {
        if self.raw_size <= 0 {
            return Err(Damage::SizeNotPositive(self.raw_size));
        }
        if self.size() > SIZE_MAX {
            return Err(Damage::SizeTooLarge(self.size()));
        }
        if !self.size().is_multiple_of(BLOCK) {
            return Err(Damage::SizeUnaligned(self.size()));
        }
        if self.sector_size != sector_size() {
            return Err(Damage::SectorSize(self.sector_size));
        }
        if !is_head(&self.head) {
            return Err(Damage::HeadName(self.head.chars().take(200).collect()));
        }
        Ok(())
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        Object::new()
            .number("Size", self.raw_size)
            .string("Head", &self.head)
            .boolean("Dirty", self.dirty)
            .boolean("Rebuilding", self.rebuilding)
            .string("Error", &self.error)
            .string("Parent", &self.parent)
            .number("SectorSize", self.sector_size)
            .string("BackingFilePath", &self.backing_file)
            .boolean("Encrypted", self.encrypted)
            .finish()
    }
}

/// Content of a layer's `.meta`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct LayerMeta {
    /// Mostly the name of the head that the layer once was; readers go by the file's name.
    #[serde(rename = "Name", default)]
    pub(super) name: String,
    /// File name of the parent, or empty.
    #[serde(rename = "Parent")]
    pub(super) parent: String,
    #[serde(rename = "Removed", default)]
    pub(super) removed: bool,
    #[serde(rename = "UserCreated", default)]
    pub(super) user_created: bool,
    /// RFC 3339.
    #[serde(rename = "Created", default)]
    pub(super) created: String,
    #[serde(rename = "Labels", default, deserialize_with = "null_is_empty")]
    pub(super) labels: BTreeMap<String, String>,
}

fn null_is_empty<'de, D: serde::Deserializer<'de>>(d: D) -> Result<BTreeMap<String, String>, D::Error> {
    Ok(Option::deserialize(d)?.unwrap_or_default())
}

impl LayerMeta {
    /// The meta of a new head.
    pub(super) fn head(name: &str, parent: &str, created: &str) -> Self {
        Self {
            name: name.to_owned(),
            parent: parent.to_owned(),
            removed: false,
            user_created: false,
            created: created.to_owned(),
            labels: BTreeMap::new(),
        }
    }

    /// `file` is the layer's file name.
    pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Self, Damage> {
        parse(&meta_name(file), bytes)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        Object::new()
            .string("Name", &self.name)
            .string("Parent", &self.parent)
            .boolean("Removed", self.removed)
            .boolean("UserCreated", self.user_created)
            .string("Created", &self.created)
            .map("Labels", &self.labels)
            .finish()
    }

    /// What others are told of the layer.
    pub(super) fn info(&self, name: &str, length: u64, allocated: u64) -> LayerInfo {
        LayerInfo {
            name: name.to_owned(),
            parent: snapshot_name(&self.parent).unwrap_or_default().to_owned(),
            removed: self.removed,
            user_created: self.user_created,
            created: self.created.clone(),
            labels: self.labels.clone(),
            length,
            allocated,
        }
    }
}

fn parse<T: DeserializeOwned>(file: &str, bytes: &[u8]) -> Result<T, Damage> {
    use serde_json::error::Category;
    if bytes.len() > META_MAX {
        return Err(Damage::MetaTooLarge(file.into()));
    }
    serde_json::from_slice(bytes).map_err(|err| match err.classify() {
        Category::Eof => Damage::MetaCutOff(file.into()),
        Category::Data => Damage::MetaFields { file: file.into(), reason: err.to_string() },
        Category::Syntax | Category::Io => Damage::MetaNotJson { file: file.into(), reason: err.to_string() },
    })
}

const HEAD_PREFIX: &str = "volume-head-";
const SNAPSHOT_PREFIX: &str = "volume-snap-";
const IMAGE: &str = ".img";

/// Name of the meta beside a layer's file.
pub(super) fn meta_name(file: &str) -> String {
    format!("{file}.meta")
}

/// File name of a snapshot.
pub(super) fn snapshot_file(name: &str) -> String {
    format!("{SNAPSHOT_PREFIX}{name}{IMAGE}")
}

/// The part of a layer's file name that tells it apart, if it is of that kind and stays in its directory.
fn middle<'a>(file: &'a str, prefix: &str) -> Option<&'a str> {
    let middle = file.strip_prefix(prefix)?.strip_suffix(IMAGE)?;
    let harmless = !middle.is_empty() && file.len() <= 240 && !middle.contains(['/', '\0', '\n']);
    harmless.then_some(middle)
}

/// True for the file name of a head.
pub(super) fn is_head(file: &str) -> bool {
    middle(file, HEAD_PREFIX).is_some()
}

/// The snapshot's name in its file name.
pub(super) fn snapshot_name(file: &str) -> Option<&str> {
    middle(file, SNAPSHOT_PREFIX)
}

/// File names of heads in the order in which they follow `file`: 000 to 999, then from the front again. (Longhorn
/// counts 009, 010, 001; it reads any number.)
pub(super) fn heads_after(file: &str) -> impl Iterator<Item = String> {
    let number = middle(file, HEAD_PREFIX).and_then(|m| m.parse::<u16>().ok()).map_or(999, |n| n % 1000);
    (1..1000).map(move |step| format!("{HEAD_PREFIX}{:03}{IMAGE}", (number + step) % 1000))
}

/// The time now, as Longhorn writes it.
pub(super) fn now() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    rfc3339(since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: &str = "{\"Size\":16777216,\"Head\":\"volume-head-003.img\",\"Dirty\":false,\"Rebuilding\":false,\
        \"Error\":\"\",\"Parent\":\"volume-snap-s3.img\",\"SectorSize\":512,\"BackingFilePath\":\"\",\"Encrypted\":false}\n";
    const LAYER: &str = "{\"Name\":\"volume-head-000.img\",\"Parent\":\"\",\"Removed\":false,\"UserCreated\":true,\
        \"Created\":\"2026-11-20T06:03:39Z\",\"Labels\":{\"note\":\"a \\u0026 b \\u003cc\\u003e\",\"purpose\":\"golden\"}}\n";

    #[test]
    fn longhorns_bytes_come_back() {
        assert_eq!(VolumeMeta::parse(VOLUME.as_bytes()).unwrap().encode(), VOLUME.as_bytes());
        let layer = LayerMeta::parse("volume-snap-s1.img", LAYER.as_bytes()).unwrap();
        assert_eq!(layer.labels["note"], "a & b <c>");
        assert_eq!(layer.encode(), LAYER.as_bytes());
        let head = LayerMeta::head("volume-head-001.img", "", "2026-11-20T06:03:39Z");
        assert!(String::from_utf8(head.encode()).unwrap().ends_with("\"Labels\":null}\n"));
    }

    #[test]
    fn unknown_keys_are_passed_over_and_old_files_lack_some() {
        let more = VOLUME.replace("\"Dirty\"", "\"NewKey\":[1],\"Dirty\"");
        assert!(VolumeMeta::parse(more.as_bytes()).is_ok());
        let old = VolumeMeta::parse(b"{\"Size\":4096,\"Head\":\"volume-head-000.img\"}").unwrap();
        assert_eq!((old.size(), old.sector_size, old.encrypted), (4096, 512, false));
    }

    #[test]
    fn each_fault_has_its_own_name() {
        let fault =
            |from: &str, to: &str| VolumeMeta::parse(VOLUME.replace(from, to).as_bytes()).unwrap_err();
        assert_eq!(fault("16777216", "-4096"), Damage::SizeNotPositive(-4096));
        assert_eq!(fault("16777216", "0"), Damage::SizeNotPositive(0));
        assert_eq!(fault("16777216", "5000"), Damage::SizeUnaligned(5000));
        assert_eq!(fault("16777216", "1125899906846976"), Damage::SizeTooLarge((1 << 50) + 4352));
        assert_eq!(fault("512", "4096"), Damage::SectorSize(4096));
        assert_eq!(fault("\"Error\":\"\"", "\"Error\":\"bad\""), Damage::NotedError("bad".into()));
        for name in [
            "../x.img",
            "/etc/passwd",
            "volume-head-0/../../x.img",
            "volume-snap-a.img",
            "",
            "volume-head-.img",
        ] {
            assert_eq!(fault("volume-head-003.img", name), Damage::HeadName(name.into()));
        }
        assert!(matches!(fault("}", ""), Damage::MetaCutOff(_)));
        assert!(matches!(fault("{", "["), Damage::MetaNotJson { .. } | Damage::MetaFields { .. }));
        assert!(matches!(fault("}", "}}"), Damage::MetaNotJson { .. }));
        assert!(matches!(fault("16777216", "\"16777216\""), Damage::MetaFields { .. }));
        assert!(matches!(fault("\"Head\"", "\"Haed\""), Damage::MetaFields { .. }));
        let long = VOLUME.replace("\"Error\":\"\"", &format!("\"Error\":\"{}\"", "x".repeat(META_MAX)));
        assert_eq!(VolumeMeta::parse(long.as_bytes()), Err(Damage::MetaTooLarge(VOLUME_META.into())));
    }

    #[test]
    fn heads_are_counted_round() {
        assert_eq!(heads_after("volume-head-000.img").next().unwrap(), "volume-head-001.img");
        assert_eq!(heads_after("volume-head-999.img").next().unwrap(), "volume-head-000.img");
        assert_eq!(heads_after("volume-head-odd.img").next().unwrap(), "volume-head-000.img");
        assert_eq!(heads_after("volume-head-5.img").count(), 999);
    }

    #[test]
    fn names_stay_in_the_directory() {
        assert_eq!(snapshot_name("volume-snap-a.b-c.img"), Some("a.b-c"));
        for bad in
            ["volume-snap-.img", "volume-snap-a/b.img", "volume-snap-a", "a.img", "volume-snap-a.img.meta"]
        {
            assert_eq!(snapshot_name(bad), None, "{bad}");
        }
    }
}
