//! Whether a snapshot's bytes stay what they are: whoever has read some beside the process that holds the directory asks here
//! after the last of them.
//!
//! A snapshot is the same bytes for ever (`docs/invariants.md`, 9) as long as it is one. Once it is marked as removed, a fold may put
//! what was written after it into its own file; and what a replica that was without power lacks of one that is not settled
//! is not known. A fold begins when the mark is durable, so what was read before a look that finds none is the snapshot's.

use std::path::Path;

use lh_wire::{LayerInfo, ReplicaState};

use super::error::{NotLasting, OpenError};
use super::owner::{Owner, owner};
use super::record::{ChainRecord, Rebuild, Records};
use super::tree;

/// The snapshot, if it lasts.
///
/// # Errors
/// [`NotLasting`].
pub fn lasting<'a>(state: &'a ReplicaState, snapshot: &str) -> Result<&'a LayerInfo, NotLasting> {
    let name = || snapshot.to_owned();
    let layer = state.chain.iter().find(|layer| layer.name == snapshot);
    match layer {
        None => Err(NotLasting::Gone(name())),
        Some(layer) if layer.removed => Err(NotLasting::Removed(name())),
        Some(_) if state.rebuilding || state.unsettled.iter().any(|name| name == snapshot) => {
            Err(NotLasting::Unsettled(name()))
        }
        Some(layer) => Ok(layer),
    }
}

/// What [`lasting`] asks for, from the files of a directory whose process goes on meanwhile. Of a directory that was closed cleanly
/// every replica has everything.
pub(super) fn look(path: &Path) -> Result<ReplicaState, OpenError> {
    let records = Records { directory: path };
    let tree = tree::load(path)?;
    let mut state = ReplicaState::default();
    if let Owner::Ours { identity, clean } = owner(&records)? {
        state.rebuilding = records.load::<Rebuild>()?.is_some();
        let chain = records.load::<ChainRecord>()?.filter(|chain| chain.volume == identity.volume);
        let settled = chain.and_then(|chain| chain.settled);
        let layer = |file: &str| {
            let found = tree.layers.iter().find(|layer| layer.file == file);
            found.map(|layer| (layer.name.as_str(), layer.meta.parent.as_str()))
        };
        let top = tree.layers.last().map_or("", |head| head.meta.parent.as_str());
        state.unsettled = if clean { Vec::new() } else { unsettled(top, settled.as_deref(), layer) };
    }
    // What they take on the disk is nobody's question here.
    state.chain = tree.layers.iter().map(|layer| layer.meta.info(&layer.name, layer.length, 0)).collect();
    Ok(state)
}

/// Snapshots above the settled one, base first, from the file `top` down. `layer`: a file's snapshot, and the file that it stands on.
pub(super) fn unsettled<'a>(
    top: &str,
    settled: Option<&str>,
    layer: impl Fn(&str) -> Option<(&'a str, &'a str)>,
) -> Vec<String> {
    let mut names = Vec::new();
    let mut at = layer(top);
    while let Some((name, parent)) = at.filter(|(name, _)| Some(*name) != settled) {
        names.push(name.to_owned());
        at = layer(parent);
    }
    names.reverse();
    names
}
