//! The layers of a directory, read and checked, nothing changed.
//!
//! What is returned is a tree: parents stand before their children, the head is last, every layer's chain ends. A
//! directory may have branches (Longhorn makes one with each revert); the head's own chain is what a volume reads.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use lh_block::{BLOCK, Extent, LAYERS_MAX};
use lh_ring::sys;

use super::disk::read_small;
use super::error::{Damage, OpenError};
use super::meta::{
    LayerMeta, META_MAX, VOLUME_META, VolumeMeta, is_head, meta_name, snapshot_file, snapshot_name,
};
use super::record::{FoldRecord, Records};
use super::rescue::{Care, EVERYTHING};

/// A layer's file and its meta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerFile {
    /// File name.
    pub(super) file: String,
    /// Snapshot name; empty for the head.
    pub(super) name: String,
    pub(super) meta: LayerMeta,
    /// Length in bytes.
    pub(super) length: u64,
    pub(super) inode: u64,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) volume: VolumeMeta,
    /// volume.meta was missing and is made up from the head.
    pub(super) recovered: bool,
    pub(super) layers: Vec<LayerFile>,
    /// Positions in `layers` of the head's chain, base first, the head last.
    pub(super) chain: Vec<usize>,
    /// Files of which Longhorn left the file or the meta when it was interrupted: other names of a layer, empty heads, a removed
    /// snapshot's meta.
    pub(super) leftovers: Vec<String>,
}

/// Reads the directory's layers.
pub(super) fn load(directory: &Path) -> Result<Tree, OpenError> {
    load_with(directory, &Care::strict())
}

/// The same, with what is passed over.
pub(super) fn load_with(directory: &Path, care: &Care) -> Result<Tree, OpenError> {
    let reader = Reader { directory, care };
    let names = reader.names()?;
    let (volume, recovered) = reader.volume(&names)?;
    let Found { layers: mut found, leftovers } = reader.layers(&names, &volume)?;
    let order = reader.order(&volume, &found)?;
    let mut layers: Vec<LayerFile> = Vec::with_capacity(order.len());
    for file in &order {
        layers.extend(found.remove(file));
    }
    let chain = chain_of(&layers, layers.len() - 1);
    Ok(Tree { volume, recovered, layers, chain, leftovers })
}

/// Positions of a layer's chain, base first.
pub(super) fn chain_of(layers: &[LayerFile], top: usize) -> Vec<usize> {
    let mut chain = vec![top];
    let mut parent = layers[top].meta.parent.as_str();
    while let Some(at) = layers.iter().position(|l| l.file == parent && !parent.is_empty()) {
        chain.push(at);
        parent = &layers[at].meta.parent;
    }
    chain.reverse();
    chain
}

struct Found {
    layers: BTreeMap<String, LayerFile>,
    leftovers: Vec<String>,
}

struct Reader<'a> {
    directory: &'a Path,
    care: &'a Care,
}

impl Reader<'_> {
    fn damaged(&self, damage: Damage) -> OpenError {
        OpenError::Damaged { dir: self.directory.to_owned(), damage }
    }

    fn io(&self, name: &str, source: io::Error) -> OpenError {
        OpenError::Io { what: format!("reading {}", self.directory.join(name).display()), source }
    }

    /// Names of the directory's entries. Names that are not UTF-8 are none of ours.
    fn names(&self) -> Result<BTreeSet<String>, OpenError> {
        let entries = std::fs::read_dir(self.directory).map_err(|err| match err.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                OpenError::NoDirectory(self.directory.to_owned())
            }
            _ => self.io("", err),
        })?;
        let mut names = BTreeSet::new();
        for entry in entries {
            let entry = entry.map_err(|err| self.io("", err))?;
            names.extend(entry.file_name().into_string());
        }
        Ok(names)
    }

    /// Content of a metadata file; `None` if it is not there.
    fn content(&self, name: &str) -> Result<Option<Vec<u8>>, OpenError> {
        match read_small(&self.directory.join(name), META_MAX) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(err) if err.raw_os_error() == Some(libc::ELOOP) || sys::NotPlain::is(&err) => {
                Err(self.damaged(Damage::NotAFile(name.into())))
            }
            Err(err) => Err(self.io(name, err)),
        }
    }

    /// volume.meta, or what Longhorn makes of a directory without one, as long as there is no choice.
    fn volume(&self, names: &BTreeSet<String>) -> Result<(VolumeMeta, bool), OpenError> {
        let bytes = self.content(VOLUME_META)?.unwrap_or_default();
        if !bytes.is_empty() {
            let refused = match VolumeMeta::parse(&bytes) {
                Ok(meta) => return Ok((meta, false)),
                Err(damage) => self.damaged(damage),
            };
            let Ok(noted) = VolumeMeta::parse_noted(&bytes) else { return Err(refused) };
            return self.care.pass(EVERYTHING, refused, (noted, false));
        }
        let heads: Vec<&str> = names.iter().map(String::as_str).filter(|n| is_head(n)).collect();
        match heads[..] {
            [] => Err(self.damaged(Damage::NothingHere)),
            [head] => {
                let file = self.layer(head)?;
                let volume = VolumeMeta::new(file.length, head.into(), file.meta.parent);
                // The made-up meta is held to the same rules.
                VolumeMeta::parse(&volume.encode()).map(|meta| (meta, true)).map_err(|d| self.damaged(d))
            }
            _ => Err(self.damaged(Damage::ManyHeads(heads.join(", ")))),
        }
    }

    /// A layer's file with its meta.
    fn layer(&self, file: &str) -> Result<LayerFile, OpenError> {
        let stat = self.stat(file)?;
        if !stat.is_file() {
            return Err(self.damaged(Damage::NotAFile(file.into())));
        }
        let Some(bytes) = self.content(&meta_name(file))? else {
            return Err(self.damaged(Damage::MetaMissing(file.into())));
        };
        let meta = LayerMeta::parse(file, &bytes).map_err(|d| self.damaged(d))?;
        let name = snapshot_name(file).unwrap_or_default().to_owned();
        Ok(LayerFile { file: file.into(), name, meta, length: stat.len(), inode: stat.ino() })
    }

    /// The meta of this layer says that it is removed.
    fn removed(&self, file: &str) -> Result<bool, OpenError> {
        let bytes = self.content(&meta_name(file))?.unwrap_or_default();
        LayerMeta::parse(file, &bytes).map(|meta| meta.removed).map_err(|d| self.damaged(d))
    }

    /// The head and all snapshots by file name, and the leftovers: an interrupted snapshot of Longhorn first makes the
    /// new head, then links the old head to the snapshot's name, then switches volume.meta, then unlinks the old head.
    /// So a snapshot that is the head's own file is none yet, and other heads are names of a snapshot's file, or empty.
    fn layers(&self, names: &BTreeSet<String>, volume: &VolumeMeta) -> Result<Found, OpenError> {
        if !names.contains(&volume.head) {
            return Err(self.damaged(Damage::HeadMissing(volume.head.clone())));
        }
        let (mut layers, mut leftovers) = (BTreeMap::new(), Vec::new());
        for image in names.iter().filter_map(|n| n.strip_suffix(".meta")) {
            if snapshot_name(image).is_some() && !names.contains(image) {
                // Longhorn takes a removed snapshot's file away, and then its meta. Whether a layer stands on it is seen later.
                if !self.removed(image)? {
                    return Err(self.damaged(Damage::ImageMissing(image.into())));
                }
                leftovers.push(image.to_owned());
            }
        }
        let head = self.stat(&volume.head)?.ino();
        let folding = self.folding()?;
        for name in names.iter().filter(|n| snapshot_name(n).is_some() || **n == volume.head) {
            if *name != volume.head && self.stat(name)?.ino() == head {
                leftovers.push(name.clone());
                continue;
            }
            let folded = folding.as_ref().is_some_and(|(file, _)| file == name);
            if folded && !names.contains(&meta_name(name)) {
                leftovers.push(name.clone());
                continue;
            }
            let mut layer = self.layer(name)?;
            self.check_layer(&layer, volume, folding.as_ref())?;
            if let Some((folded, below)) = folding.as_ref().filter(|(folded, _)| *folded == layer.meta.parent)
                && *name == volume.head
                && self.stat(folded).is_ok_and(|stat| stat.ino() == head)
            {
                // The head was folded into this snapshot's file, and stands on what that stood on.
                layer.meta.parent.clone_from(below);
            }
            layers.insert(name.clone(), layer);
        }
        for name in names.iter().filter(|n| is_head(n) && **n != volume.head) {
            let stat = self.stat(name)?;
            let linked = layers.values().any(|l| l.inode == stat.ino());
            if stat.is_file() && (linked || stat.blocks() == 0) {
                leftovers.push(name.clone());
            }
        }
        Ok(Found { layers, leftovers })
    }

    /// A snapshot whose names are going at the end of a fold, and its parent: file names.
    fn folding(&self) -> Result<Option<(String, String)>, OpenError> {
        let record = Records { directory: self.directory }.load::<FoldRecord>()?;
        Ok(record.and_then(|r| r.switch.map(|switch| (snapshot_file(&r.name), switch.parent))))
    }

    fn stat(&self, name: &str) -> Result<std::fs::Metadata, OpenError> {
        self.directory.join(name).symlink_metadata().map_err(|err| self.io(name, err))
    }

    fn check_layer(
        &self,
        layer: &LayerFile,
        volume: &VolumeMeta,
        folding: Option<&(String, String)>,
    ) -> Result<(), OpenError> {
        let (file, length, size) = (layer.file.clone(), layer.length, volume.size());
        let parent = &layer.meta.parent;
        // Both are the same volume: the snapshot between them is in the head, too.
        let behind = folding.is_some_and(|(folded, below)| volume.parent == *folded && parent == below);
        let missing = Extent::new(length, size.saturating_sub(length));
        if length % BLOCK != 0 && length < size {
            let file = file.clone();
            self.care.pass(missing, self.damaged(Damage::LayerUnaligned { file, length }), ())?;
        }
        if file == volume.head && length < size {
            let file = file.clone();
            self.care.pass(missing, self.damaged(Damage::HeadShort { file, length, size }), ())?;
        }
        let damage = if length > size {
            Damage::LayerTooLong { file, length, size }
        } else if file == volume.head && layer.meta.removed {
            Damage::HeadRemoved(file)
        } else if file == volume.head && *parent != volume.parent && !behind {
            Damage::HeadParent { head: file, volume: volume.parent.clone(), meta: parent.clone() }
        } else if !parent.is_empty() && snapshot_name(parent).is_none() {
            Damage::ParentName { file, parent: parent.chars().take(200).collect() }
        } else {
            return Ok(());
        };
        Err(self.damaged(damage))
    }

    /// File names, parents before children, the head last.
    fn order(
        &self,
        volume: &VolumeMeta,
        layers: &BTreeMap<String, LayerFile>,
    ) -> Result<Vec<String>, OpenError> {
        if layers.len() > usize::from(LAYERS_MAX) {
            return Err(self.damaged(Damage::TooManyLayers(layers.len())));
        }
        let mut depth = BTreeMap::new();
        for (file, layer) in layers {
            let (mut at, mut steps) = (layer, 0);
            while !at.meta.parent.is_empty() {
                let Some(parent) = layers.get(&at.meta.parent) else {
                    let (file, parent) = (at.file.clone(), at.meta.parent.clone());
                    return Err(self.damaged(Damage::ParentMissing { file, parent }));
                };
                at = parent;
                steps += 1;
                if steps > layers.len() {
                    return Err(self.damaged(Damage::Loop(file.clone())));
                }
            }
            depth.insert(file.clone(), steps);
        }
        let mut order: Vec<String> = layers.keys().cloned().collect();
        order.sort_by_key(|file| (*file == volume.head, depth[file]));
        Ok(order)
    }
}
