//! A replica's store whose index is as full of runs as one wants. No data is read or written.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lh_block::{BLOCK, Extent, Instance};
use lh_wire::ChainOp;
use replica::store::{Committed, CreateOptions, Directory, Piece, Store};
use tempfile::TempDir;

use crate::Places;

/// Bytes of the volume.
pub(crate) const SIZE: u64 = 1 << 30;

/// A store in a directory of its own, which goes with it.
#[derive(Debug)]
pub struct IndexedStore {
    pub(crate) store: Store,
    places: Places,
    pieces: Vec<Piece>,
    _place: TempDir,
}

impl IndexedStore {
    /// A volume of 1 GiB under one snapshot, with so many scattered blocks in the head.
    ///
    /// # Errors
    /// There is no place that layer files can lie in.
    pub fn new(blocks: u64) -> Result<Self> {
        let place = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        let mut store = below_a_snapshot(&place.path().join("replica"))?;
        let mut places = Places::new(SIZE);
        for _ in 0..blocks {
            let _ = store.wrote(Extent::new(places.next_block(), BLOCK));
        }
        Ok(Self { store, places, pieces: Vec::with_capacity(16), _place: place })
    }

    /// The same volume, every block of which was written.
    ///
    /// # Errors
    /// There is no place that layer files can lie in.
    pub fn full() -> Result<Self> {
        let mut index = Self::new(0)?;
        let _ = index.store.wrote(Extent::new(0, SIZE));
        Ok(index)
    }

    /// Who holds a block somewhere.
    pub fn look_up(&mut self) -> usize {
        self.pieces.clear();
        self.store.plan_read(Extent::new(self.places.next_block(), BLOCK), &mut self.pieces);
        self.pieces.len()
    }

    /// A block somewhere is written: before the write and after it.
    pub fn update(&mut self) {
        let extent = Extent::new(self.places.next_block(), BLOCK);
        let head = self.store.head();
        assert!(self.store.begin_write(head, extent), "nothing is being punched");
        let _ = self.store.wrote(extent);
    }
}

/// An empty head over an empty snapshot.
fn below_a_snapshot(path: &Path) -> Result<Store> {
    let options = CreateOptions { size: SIZE, backing: None, lock_wait: Duration::from_secs(5) };
    let (mut directory, mut store) = Directory::create(path, &options).context("a replica directory")?;
    let snapshot = ChainOp::Snapshot {
        name: "base".to_owned(),
        user_created: true,
        created: "2026-11-20T06:03:39Z".to_owned(),
        labels: Default::default(),
    };
    directory.prepare(Instance(1), &snapshot)?;
    let Committed::Head(head) = directory.commit(Instance(1))? else { bail!("a snapshot makes a new head") };
    store.switch_head(*head);
    directory.sync_commit()?;
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_written_are_found() {
        let mut index = IndexedStore::new(1000).unwrap();
        assert_eq!(index.look_up(), 1);
        index.update();
        let mut pieces = Vec::new();
        index.store.plan_read(Extent::new(0, SIZE), &mut pieces);
        // Neighbours and blocks that are chosen twice make fewer.
        assert!((1900..2010).contains(&pieces.len()), "{}", pieces.len());
    }
}
