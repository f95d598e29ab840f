//! What an engine on this host is given to read blocks itself, and what it is told of where they are
//! (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use lh_block::Extent;
use lh_wire::FILES_MAX;

use super::data::Store;
use super::layer::LayerNo;
use super::load::blocks;

/// What an engine on this host needs to read blocks itself.
#[derive(Debug)]
pub struct Granted {
    /// Memory of [`lh_wire::COUNTERS`] counters, for [`lh_ring::Watched::open`].
    pub memory: OwnedFd,
    /// The files of layers, at most [`FILES_MAX`]: the very descriptors through which this process does its I/O, and which hold its
    /// locks.
    pub files: Vec<Arc<File>>,
}

impl Store {
    /// Grants the files of the head's chain, the newest first if there are many. Not those of a backing file, which has an end and a
    /// format of its own. The grant before is over.
    ///
    /// # Errors
    /// The system's.
    pub fn grant(&mut self) -> io::Result<Granted> {
        let granted = |layer: &LayerNo| self.at(*layer).name.is_some() && self.at(*layer).image.is_none();
        let newest = self.up_to(u8::MAX).rev().map(|(_, layer)| layer);
        let layers: Vec<LayerNo> = newest.filter(granted).take(FILES_MAX).collect();
        let files = layers.iter().map(|layer| Arc::clone(&self.at(*layer).file)).collect();
        Ok(Granted { memory: self.places.grant(layers)?, files })
    }

    /// A grant holds.
    pub const fn is_granted(&self) -> bool {
        self.places.is_granted()
    }

    /// No grant holds any more: whoever was granted something sees it before anything that follows this.
    pub fn end_grant(&mut self) {
        self.places.end_grant();
    }

    /// Where the blocks of a range within a piece are, in the files of the grant that holds. `None`: none does.
    pub fn tell_places(&self, extent: Extent) -> Option<lh_wire::Places> {
        self.places.tell(blocks(extent))
    }
}
