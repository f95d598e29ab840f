//! Export to a qcow2 image (qemu docs/interop/qcow2.rst): version 3, clusters of 64 KiB, not compressed, without a backing
//! file. Clusters of zeroes take no space.
//!
//! The file is written from front to back, the header last: what was broken off is no image. Order in the file: header,
//! L1 table, then each L2 table before its clusters, then reference counts.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use lh_block::Extent;

use super::load::bytes;
use super::offline::{ExportError, SnapshotView};

const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// "L2 table": entries of 8 bytes that fill one cluster.
const PER_TABLE: u64 = CLUSTER / 8;
/// "Refcount block": counts of 16 bits (refcount_order 4) that fill one cluster.
const PER_REFCOUNTS: u64 = CLUSTER / 2;
/// "Header": refcount_order.
const REFCOUNT_ORDER: u32 = 4;
/// "Header": length of a header of version 3 without additional fields.
const HEADER: u32 = 104;
/// "L1 table entry" and "L2 table entry": the cluster has one user.
const COPIED: u64 = 1 << 63;
/// Bytes copied at a time.
const STEP: u64 = 1 << 20;
const _: () = assert!(STEP.is_multiple_of(CLUSTER));

impl SnapshotView {
    /// Writes all bytes to `out` (empty before) as a qcow2 image. `progress`: bytes done and bytes in all.
    ///
    /// # Errors
    /// [`ExportError`].
    pub fn export_qcow2(&self, out: &File, progress: &mut dyn FnMut(u64, u64)) -> Result<(), ExportError> {
        let size = self.size();
        let mut image = Writer::new(out, size);
        let mut buffer = vec![0; usize::try_from(STEP).unwrap_or(0)];
        let mut done = 0;
        for (range, _) in self.held(Extent::new(0, size)) {
            // Whole clusters: neighbours that share one are read with the first of them.
            let held = bytes(range).widen(CLUSTER);
            let mut at = held.offset.max(done);
            while at < held.end() {
                let len = (held.end() - at).min(STEP);
                let part = &mut buffer[..usize::try_from(len).unwrap_or(0)];
                let inside = usize::try_from(len.min(size - at)).unwrap_or(0);
                part[inside..].fill(0);
                self.read_at(at, &mut part[..inside])?;
                image.write(at / CLUSTER, part)?;
                at += len;
                progress(at.min(size), size);
            }
            done = at;
        }
        self.check_lasting()?;
        image.finish()?;
        progress(size, size);
        Ok(())
    }
}

/// An L2 table that is being filled.
struct Table {
    /// Its place in the L1 table.
    number: usize,
    offset: u64,
    entries: Vec<u64>,
}

struct Writer<'a> {
    out: &'a File,
    size: u64,
    l1: Vec<u64>,
    table: Option<Table>,
    /// The first cluster of the file that is free.
    free: u64,
}

const L1_AT: u64 = CLUSTER;

impl<'a> Writer<'a> {
    fn new(out: &'a File, size: u64) -> Self {
        let l1 = vec![0; usize::try_from(size.div_ceil(CLUSTER * PER_TABLE)).unwrap_or(usize::MAX)];
        let free = 1 + (l1.len() as u64 * 8).div_ceil(CLUSTER);
        Self { out, size, l1, table: None, free }
    }

    fn take(&mut self, clusters: u64) -> u64 {
        let at = self.free * CLUSTER;
        self.free += clusters;
        at
    }

    /// Writes whole clusters from `first` on; those before were written already.
    fn write(&mut self, first: u64, content: &[u8]) -> io::Result<()> {
        let step = usize::try_from(CLUSTER).unwrap_or(0);
        for (cluster, content) in (first..).zip(content.chunks(step)) {
            if content.iter().all(|byte| *byte == 0) {
                continue;
            }
            let number = usize::try_from(cluster / PER_TABLE).unwrap_or(usize::MAX);
            if self.table.as_ref().is_none_or(|table| table.number != number) {
                self.end_table()?;
                let offset = self.take(1);
                self.l1[number] = offset | COPIED;
                let entries = vec![0; usize::try_from(PER_TABLE).unwrap_or(0)];
                self.table = Some(Table { number, offset, entries });
            }
            let at = self.take(1);
            self.out.write_all_at(content, at)?;
            if let Some(table) = &mut self.table {
                table.entries[usize::try_from(cluster % PER_TABLE).unwrap_or(0)] = at | COPIED;
            }
        }
        Ok(())
    }

    fn end_table(&mut self) -> io::Result<()> {
        let Some(table) = self.table.take() else { return Ok(()) };
        self.out.write_all_at(&big_endian(&table.entries), table.offset)
    }

    fn finish(mut self) -> io::Result<()> {
        self.end_table()?;
        self.out.write_all_at(&big_endian(&self.l1), L1_AT)?;
        let (blocks, table) = refcount_clusters(self.free);
        let (blocks_at, table_at) = (self.take(blocks), self.take(table));
        for block in 0..blocks {
            // Every cluster up to the end of the file has one user.
            let used = (self.free - block * PER_REFCOUNTS).min(PER_REFCOUNTS);
            let mut counts = [0, 1].repeat(usize::try_from(used).unwrap_or(0));
            counts.resize(usize::try_from(CLUSTER).unwrap_or(0), 0);
            self.out.write_all_at(&counts, blocks_at + block * CLUSTER)?;
        }
        let entries: Vec<u64> = (0..blocks).map(|block| blocks_at + block * CLUSTER).collect();
        self.out.write_all_at(&big_endian(&entries), table_at)?;
        self.out.set_len(self.free * CLUSTER)?;
        self.out.sync_all()?;
        self.out.write_all_at(&self.header(table_at, table), 0)?;
        self.out.sync_all()
    }

    /// "Header", bytes 0 - 103, and behind it the end of the header extensions, which is zeroes.
    fn header(&self, refcounts_at: u64, refcount_clusters: u64) -> Vec<u8> {
        let short = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(112);
        bytes.extend_from_slice(b"QFI\xfb");
        bytes.extend_from_slice(&3_u32.to_be_bytes());
        // No backing file: offset and length of its name.
        bytes.extend_from_slice(&[0; 12]);
        bytes.extend_from_slice(&CLUSTER_BITS.to_be_bytes());
        bytes.extend_from_slice(&self.size.to_be_bytes());
        // Not encrypted.
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&short(self.l1.len() as u64).to_be_bytes());
        bytes.extend_from_slice(&L1_AT.to_be_bytes());
        bytes.extend_from_slice(&refcounts_at.to_be_bytes());
        bytes.extend_from_slice(&short(refcount_clusters).to_be_bytes());
        // No internal snapshots; no incompatible, compatible or autoclear features.
        bytes.extend_from_slice(&[0; 12 + 24]);
        bytes.extend_from_slice(&REFCOUNT_ORDER.to_be_bytes());
        bytes.extend_from_slice(&HEADER.to_be_bytes());
        debug_assert_eq!(bytes.len(), 104);
        bytes.extend_from_slice(&[0; 8]);
        bytes
    }
}

/// How many clusters the reference counts of a file of `used` clusters need, their own included: blocks, table.
fn refcount_clusters(used: u64) -> (u64, u64) {
    let (mut blocks, mut table) = (1, 1);
    loop {
        let next = (used + blocks + table).div_ceil(PER_REFCOUNTS);
        let next = (next, (next * 8).div_ceil(CLUSTER));
        if next == (blocks, table) {
            return next;
        }
        (blocks, table) = next;
    }
}

fn big_endian(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_counts_count_themselves() {
        for used in
            [1, 2, 100, 32_765, 32_766, 32_767, 32_768, 1 << 20, 8192 * 32_768 - 3, 8192 * 32_768, 1 << 34]
        {
            let (blocks, table) = refcount_clusters(used);
            assert!(blocks * PER_REFCOUNTS >= used + blocks + table, "{used}");
            assert!(table * PER_TABLE >= blocks, "{used}");
        }
        assert_eq!(refcount_clusters(32_766), (1, 1));
        assert_eq!(refcount_clusters(32_767), (2, 1));
    }
}
