//! Flushes, and the holes that follow them. Data first, then the marks that rely on it, then the answer; a hole only
//! after the flush that made its mark durable (`docs/invariants.md`, 5 and 10).

use std::fs::File;
use std::io;
use std::sync::Arc;

use lh_block::Extent;

use super::data::Store;
use super::layer::LayerNo;
use super::load::{blocks, bytes};

/// Blocks that one punch covers at most: 64 MiB, so that a write that meets it does not wait long.
const PUNCH_BLOCKS: u64 = 16 << 10;

/// A flush on its way. At most one at a time.
#[derive(Debug)]
#[must_use]
pub struct Flush {
    data: Vec<LayerNo>,
}

impl Flush {
    /// Layers whose file is to be synced first: those written since the last flush, a former head included.
    pub fn data(&self) -> &[LayerNo] {
        &self.data
    }
}

impl Store {
    /// Begins a flush of everything reported so far. Step 1: the driver syncs (`fdatasync`) the file of each layer in
    /// [`Flush::data`].
    ///
    /// # Panics
    /// If one is on its way.
    pub fn begin_flush(&mut self) -> Flush {
        assert!(!self.flushing, "one flush at a time");
        self.flushing = true;
        let mut data = Vec::new();
        for (number, layer) in (0..).zip(&mut self.layers) {
            if std::mem::take(&mut layer.dirty) && layer.name.is_some() {
                data.push(LayerNo(number));
            }
            if let Some(zero) = &mut layer.zero {
                zero.begin_sync();
            }
        }
        Flush { data }
    }

    /// Step 2: the data is stable; changed marks go into the page cache. Step 3: the driver syncs (`fdatasync`) the
    /// returned files, mostly none.
    ///
    /// # Errors
    /// The disk's.
    pub fn flush_data_done(&mut self, _flush: &Flush) -> io::Result<Vec<Arc<File>>> {
        let mut files = Vec::new();
        for layer in &mut self.layers {
            if let Some(zero) = &mut layer.zero {
                files.extend(zero.data_synced()?);
            }
        }
        Ok(files)
    }

    /// Step 4: the marks are stable, too; the flush may be answered.
    pub fn end_flush(&mut self, _flush: Flush) {
        self.flushing = false;
        for zero in self.layers.iter_mut().filter_map(|l| l.zero.as_mut()) {
            zero.synced();
        }
    }

    /// A whole flush, blocking.
    ///
    /// # Errors
    /// The disk's.
    pub fn flush_now(&mut self) -> io::Result<()> {
        let flush = self.begin_flush();
        for layer in flush.data() {
            self.layer_file(*layer).sync_data()?;
        }
        for file in self.flush_data_done(&flush)? {
            file.sync_data()?;
        }
        self.end_flush(flush);
        Ok(())
    }

    /// There are marks or holes that another flush would bring further: one should follow when there is time. Until
    /// then writes over them are answered late ([`super::Answer::AfterFlush`]). Nothing before the first change: a
    /// directory that was closed cleanly must stay so.
    pub fn wants_flush(&self) -> bool {
        self.touched
            && self.layers.iter().filter_map(|l| l.zero.as_ref()).any(super::zero::ZeroMap::wants_flush)
    }

    /// A hole that may be punched now, since its mark is durable. Ends with [`Store::punched`]. None before the first
    /// change, as for [`Store::wants_flush`].
    pub fn take_punch(&mut self) -> Option<(LayerNo, Extent)> {
        if !self.touched {
            return None;
        }
        (0..).zip(&mut self.layers).find_map(|(number, layer)| {
            let hole = layer.zero.as_mut()?.take_punch(PUNCH_BLOCKS)?;
            Some((LayerNo(number), bytes(hole)))
        })
    }

    /// A hole of [`Store::take_punch`] was punched, or could not be: then it stays until the directory is opened again.
    pub fn punched(&mut self, layer: LayerNo, extent: Extent, done: bool) {
        let layer = self.at_mut(layer);
        layer.dirty = true;
        if let Some(zero) = &mut layer.zero {
            zero.punch_ended(blocks(extent), done);
        }
    }
}
