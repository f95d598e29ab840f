//! The zero map of a layer: blocks that are zero whatever lies below (`docs/invariants.md`, 10).
//!
//! A file beside the layer, bound to it by a random id. It holds a mark per block: none, *zero* (the block is zero,
//! whatever the layer's file holds) or *armed* (the hole below the mark is durable: what the file holds now was
//! written later and counts; a hole is zero). Marks are rewritten in place, a page of 512 bytes at a time, each page
//! with its checksum; there is no journal. What makes that safe:
//!
//! - A mark is set in the page cache before the request that zeroes is answered: it outlives the process. A flush makes
//!   it durable.
//! - A hole is punched only after its mark is durable, and armed only after the hole is durable.
//! - A mark is taken away only after the data that took its place is durable. Over an armed mark a write may be
//!   answered before that: should the process die, the file's data wins. Over one that is not armed it may not.
//! - So after a power cut a block is what it was at the last flush, or what was written or zeroed later.
//!
//! Layout: page 0 is the header (magic, id); page n has the marks of 2032 blocks from (n - 1) * 2032 on, 2 bits each
//! from the low end of each byte, and ends with the crc32c of id, n and the marks. A page of zeroes is one without
//! marks: the file is sparse.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::disk::{self, Look};
use super::error::Damage;
use super::id::Id;
use super::index::Index;
use super::ranges::RangeSet;

/// Bytes in a page: what a disk writes whole or not at all.
const PAGE: usize = 512;
/// Bytes of marks in a page.
const MARKS: usize = PAGE - 4;
/// Blocks in a page.
const PAGE_BLOCKS: u64 = MARKS as u64 * 4;
/// Pages written by one system call at most.
const PAGES_AT_ONCE: u64 = 256;

const MAGIC: &[u8; 8] = b"LHzero1\n";

/// The marks, as they are in the file.
const NONE: u8 = 0;
const ZERO: u8 = 1;
const ARMED: u8 = 3;

/// The file name of a layer's zero map. It has none of the endings that Longhorn reads.
pub(super) fn file_name(id: Id) -> String {
    format!("{FILE_PREFIX}{id}")
}

const FILE_PREFIX: &str = "zero-";

/// The id in the file name of a zero map.
pub(super) fn parse_name(name: &str) -> Option<Id> {
    Id::parse(name.strip_prefix(FILE_PREFIX)?.as_bytes())
}

/// True if a file of that length can hold marks.
pub(super) const fn may_have_marks(length: u64) -> bool {
    length > PAGE as u64
}

/// The content of a new, empty zero map.
pub(super) fn header(id: Id) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    page[..8].copy_from_slice(MAGIC);
    page[8..24].copy_from_slice(&id.bytes());
    seal(&mut page, id, 0);
    page
}

fn check_header(file: &File, length: u64, id: Id) -> Result<(), LoadError> {
    let mut page = [0; PAGE];
    if length.is_multiple_of(PAGE as u64) && length > 0 {
        file.read_exact_at(&mut page, 0)?;
    }
    if page[..] == header(id) { Ok(()) } else { Err(LoadError::Damaged(Damage::ZeroHeader(file_name(id)))) }
}

fn checksum(marks: &[u8], id: Id, page: u64) -> u32 {
    let seed = crc32c::crc32c_append(crc32c::crc32c(&id.bytes()), &page.to_le_bytes());
    crc32c::crc32c_append(seed, marks)
}

fn seal(page: &mut [u8], id: Id, number: u64) {
    let crc = checksum(&page[..MARKS], id, number);
    page[MARKS..PAGE].copy_from_slice(&crc.to_le_bytes());
}

/// The zero map of one layer. Numbers are blocks of the volume.
#[derive(Debug)]
pub(super) struct ZeroMap {
    id: Id,
    file: Arc<File>,
    blocks: u64,
    /// What the file's pages say.
    marks: Index,
    /// Marked, but the layer's file counts again: taken away after the next sync of the data.
    void: RangeSet,
    void_syncing: RangeSet,
    /// Marks that are not known to be durable.
    fresh: RangeSet,
    fresh_syncing: RangeSet,
    /// Durable marks over what may be old data: holes to punch.
    pending: RangeSet,
    punching: RangeSet,
    /// Holes that are not known to be durable.
    punched: RangeSet,
    punched_syncing: RangeSet,
    /// Pages may have been written since the last sync of the file.
    unsynced: bool,
}

impl ZeroMap {
    /// A map without marks. `file` holds a [`header`].
    pub(super) fn empty(id: Id, file: Arc<File>, blocks: u64) -> Self {
        Self {
            id,
            file,
            blocks,
            marks: Index::new(blocks),
            void: RangeSet::default(),
            void_syncing: RangeSet::default(),
            fresh: RangeSet::default(),
            fresh_syncing: RangeSet::default(),
            pending: RangeSet::default(),
            punching: RangeSet::default(),
            punched: RangeSet::default(),
            punched_syncing: RangeSet::default(),
            unsynced: false,
        }
    }

    /// Reads a map. Every mark that is not armed counts as not durable.
    pub(super) fn load(id: Id, file: Arc<File>, blocks: u64) -> Result<Self, LoadError> {
        Self::load_beyond(id, file, blocks, &mut |err, _| Err(err))
    }

    /// The same; `bad` is asked about what cannot be read, and of which blocks it tells, and may let the rest be read. Those blocks have no
    /// mark then.
    pub(super) fn load_beyond(
        id: Id,
        file: Arc<File>,
        blocks: u64,
        bad: &mut dyn FnMut(LoadError, Range<u64>) -> Result<(), LoadError>,
    ) -> Result<Self, LoadError> {
        let length = file.metadata()?.len();
        if let Err(err) = check_header(&file, length, id) {
            bad(err, 0..blocks)?;
        }
        let mut page = [0; PAGE];
        let mut map = Self::empty(id, file, blocks);
        let whole = lh_block::Extent::new(0, length);
        let parts = disk::extents(&map.file.clone(), whole, Look::Seek)
            .map(|e| e.map(|(e, _)| e))
            .collect::<io::Result<Vec<_>>>()?;
        for part in parts {
            let first = (part.offset / PAGE as u64).max(1);
            for number in first..part.end().min(length).div_ceil(PAGE as u64) {
                let read = map.file.read_exact_at(&mut page, number * PAGE as u64).map_err(LoadError::from);
                if let Err(err) = read.and_then(|()| map.load_page(number, &page)) {
                    let first = (number - 1).saturating_mul(PAGE_BLOCKS).min(blocks);
                    let told = first..first.saturating_add(PAGE_BLOCKS).min(blocks);
                    map.marks.set(told.clone(), NONE);
                    map.fresh.remove(told.clone());
                    bad(err, told)?;
                }
            }
        }
        // What a process before this one wrote may be in the page cache alone, a mark as well as its absence: the next flush
        // covers it.
        map.unsynced = may_have_marks(length);
        Ok(map)
    }

    fn load_page(&mut self, number: u64, page: &[u8; PAGE]) -> Result<(), LoadError> {
        if page.iter().all(|b| *b == 0) {
            return Ok(());
        }
        let bad = || LoadError::Damaged(Damage::ZeroPage { file: file_name(self.id), page: number });
        let crc = u32::from_le_bytes([page[MARKS], page[MARKS + 1], page[MARKS + 2], page[MARKS + 3]]);
        if crc != checksum(&page[..MARKS], self.id, number) {
            return Err(bad());
        }
        let first = (number - 1).checked_mul(PAGE_BLOCKS).ok_or_else(bad)?;
        let mark = |block: u64| -> u8 {
            let at = usize::try_from(block).unwrap_or(usize::MAX);
            page.get(at / 4).map_or(NONE, |byte| byte >> (at % 4 * 2) & 3)
        };
        let mut at = 0;
        while at < PAGE_BLOCKS {
            let held = mark(at);
            let mut end = at + 1;
            while end < PAGE_BLOCKS && mark(end) == held {
                end += 1;
            }
            let range = first + at..first + end;
            if held != NONE && (range.end > self.blocks || ![ZERO, ARMED].contains(&held)) {
                return Err(bad());
            }
            self.marks.set(range.clone(), held);
            if held == ZERO {
                self.fresh.insert(range);
            }
            at = end;
        }
        Ok(())
    }

    /// The volume has so many blocks from now on.
    pub(super) fn grow(&mut self, blocks: u64) {
        self.blocks = blocks;
        self.marks.grow(blocks);
    }

    /// The layer's file as it was found when the directory was opened: `written` ranges below armed marks count.
    pub(super) fn found(&mut self, written: Range<u64>) {
        let armed: Vec<_> = self.marked(written, ARMED).collect();
        for range in armed {
            self.void.insert(range);
        }
    }

    /// The parts of the range that have this mark, in force or not.
    fn marked(&self, range: Range<u64>, mark: u8) -> impl Iterator<Item = Range<u64>> + '_ {
        self.marks.runs(range).filter(move |(_, held)| *held == mark).map(|(range, _)| range)
    }

    /// Ranges of the marks that win over the file even where it holds data.
    pub(super) fn strong(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.marked(range, ZERO)
    }

    /// Ranges of armed marks.
    pub(super) fn armed(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.marked(range, ARMED)
    }

    /// The parts of the range that have a mark, in force or not.
    pub(super) fn touched(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.marks.runs(range).filter(|(_, held)| *held != NONE).map(|(range, _)| range)
    }

    /// Ranges that are zero by this map: marked, and not written since.
    pub(super) fn zeroes(&self, range: Range<u64>) -> RangeSet {
        let mut zero = RangeSet::default();
        for part in self.touched(range) {
            zero.insert(part);
        }
        zero.subtract(&self.void);
        zero.subtract(&self.void_syncing);
        zero
    }

    /// True if the file holds any mark.
    pub(super) fn has_marks(&self) -> bool {
        !self.marks.is_zero()
    }

    /// A write, or a punch without a mark, is about to begin: nothing in the range is punched any more. `false`: a
    /// punch is in flight there.
    pub(super) fn begin_write(&mut self, range: Range<u64>) -> bool {
        if self.punching.overlaps(range.clone()) {
            return false;
        }
        for set in [&mut self.fresh, &mut self.fresh_syncing, &mut self.pending] {
            set.remove(range.clone());
        }
        true
    }

    /// What began did not end well: marks in the range are in force as they were, and may be punched again.
    pub(super) fn write_failed(&mut self, range: Range<u64>) {
        let again = self.strong_in_force(range);
        self.unsynced |= !again.is_empty();
        self.fresh.append(&again);
    }

    /// The parts of the range whose mark wins over the file.
    fn strong_in_force(&self, range: Range<u64>) -> RangeSet {
        let mut strong = RangeSet::default();
        for part in self.strong(range) {
            strong.insert(part);
        }
        strong.subtract(&self.void);
        strong.subtract(&self.void_syncing);
        strong
    }

    /// The file counts again in the range: its data was written, or its hole is a mere hole. `true`: to be answered
    /// only after a flush that begins now or later.
    pub(super) fn wrote(&mut self, range: Range<u64>) -> bool {
        let marked: Vec<_> = self.marks.runs(range).filter(|(_, held)| *held != NONE).collect();
        let mut wait = false;
        for (part, held) in marked {
            wait |= held == ZERO;
            // What is being synced in favour of an earlier write of the same blocks stays with that sync: the writer
            // may be waiting for it.
            let mut more = RangeSet::default();
            more.insert(part);
            more.subtract(&self.void_syncing);
            self.void.append(&more);
        }
        wait
    }

    /// As [`Self::wrote`] where the file holds a hole: an armed mark would make it zero, so the answer waits, too.
    pub(super) fn cleared(&mut self, range: Range<u64>) -> bool {
        let marked = self.touched(range.clone()).next().is_some();
        self.wrote(range);
        marked
    }

    /// Makes room in the file for the marks of a range, so that [`Self::set`] does not fail on a full disk.
    pub(super) fn reserve(&self, range: Range<u64>) -> io::Result<()> {
        let pages = range.start / PAGE_BLOCKS..range.end.div_ceil(PAGE_BLOCKS);
        let length = (pages.end - pages.start) * PAGE as u64;
        match disk::allocate(&self.file, (pages.start + 1) * PAGE as u64, length) {
            // Some file systems take no space ahead (ext4, if it was made as ext3), but for what is written.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => self.write_as_they_are(pages),
            done => done,
        }
    }

    /// The range is zero from now on: writes the marks into the page cache.
    pub(super) fn set(&mut self, range: Range<u64>) -> io::Result<()> {
        let mut fresh = RangeSet::default();
        for (part, held) in self.marks.runs(range.clone()) {
            if held == NONE {
                fresh.insert(part);
            }
        }
        for set in [&mut self.void, &mut self.void_syncing] {
            for part in set.within(range.clone()) {
                fresh.insert(part);
            }
            set.remove(range.clone());
        }
        for part in fresh.iter() {
            self.marks.set(part.clone(), ZERO);
            // A hole from before the data that is now hidden says nothing any more.
            self.punched.remove(part.clone());
            self.punched_syncing.remove(part);
        }
        self.fresh.append(&fresh);
        self.write_pages(&fresh)
    }

    /// A sync of the layer's data is about to begin.
    pub(super) fn begin_sync(&mut self) {
        self.void_syncing.append(&self.void.take());
        self.punched_syncing.append(&self.punched.take());
    }

    /// That sync has ended: takes marks away, arms others. The file to be synced next, if it needs that.
    pub(super) fn data_synced(&mut self) -> io::Result<Option<Arc<File>>> {
        let mut changed = self.void_syncing.take();
        for part in changed.iter() {
            self.marks.set(part, NONE);
        }
        for hole in self.punched_syncing.take().iter() {
            let arm = self.strong_in_force(hole);
            for part in arm.iter() {
                self.marks.set(part, ARMED);
            }
            changed.append(&arm);
        }
        self.write_pages(&changed)?;
        self.fresh_syncing.append(&self.fresh.take());
        let file = std::mem::take(&mut self.unsynced).then(|| Arc::clone(&self.file));
        Ok(file)
    }

    /// The file is synced.
    pub(super) fn synced(&mut self) {
        for part in self.fresh_syncing.take().iter() {
            let durable = self.strong_in_force(part);
            self.pending.append(&durable);
        }
    }

    /// A hole to punch, at most so many blocks.
    pub(super) fn take_punch(&mut self, max: u64) -> Option<Range<u64>> {
        let hole = self.pending.take_first(max)?;
        self.punching.insert(hole.clone());
        Some(hole)
    }

    /// A hole of [`Self::take_punch`] was punched, or not: then it is left until the directory is opened again.
    pub(super) fn punch_ended(&mut self, hole: Range<u64>, done: bool) {
        self.punching.remove(hole.clone());
        if done {
            self.punched.insert(hole);
        }
    }

    /// A flush would bring something further.
    pub(super) fn wants_flush(&self) -> bool {
        !(self.void.is_empty() && self.fresh.is_empty() && self.punched.is_empty())
    }

    /// Writes the pages of these blocks into the page cache.
    fn write_pages(&mut self, changed: &RangeSet) -> io::Result<()> {
        let mut next = 0;
        for range in changed.iter() {
            let end = (range.end - 1) / PAGE_BLOCKS + 1;
            self.unsynced = true;
            self.write_as_they_are(next.max(range.start / PAGE_BLOCKS)..end)?;
            next = end;
        }
        Ok(())
    }

    /// Writes pages, counted from the first behind the header, into the page cache.
    fn write_as_they_are(&self, pages: Range<u64>) -> io::Result<()> {
        let mut at = pages.start;
        while at < pages.end {
            let end = pages.end.min(at + PAGES_AT_ONCE);
            let bytes: Vec<u8> = (at..end).flat_map(|n| self.encode_page(n + 1)).collect();
            self.file.write_all_at(&bytes, (at + 1) * PAGE as u64)?;
            at = end;
        }
        Ok(())
    }

    fn encode_page(&self, number: u64) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        let first = (number - 1) * PAGE_BLOCKS;
        for (range, held) in self.marks.runs(first..first + PAGE_BLOCKS).filter(|(_, held)| *held != NONE) {
            for block in range {
                let at = usize::try_from(block - first).unwrap_or(usize::MAX);
                page[at / 4] |= held << (at % 4 * 2);
            }
        }
        if page.iter().any(|b| *b != 0) {
            seal(&mut page, self.id, number);
        }
        page
    }
}

/// Why a map was not read.
#[derive(Debug)]
pub(super) enum LoadError {
    /// Not what it should be.
    Damaged(Damage),
    /// Not readable.
    Io(io::Error),
}

impl From<io::Error> for LoadError {
    fn from(err: io::Error) -> Self {
        Self::Io(err)
    }
}
