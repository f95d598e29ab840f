//! The file of the intent bitmap (`docs/invariants.md`, 4): a bit per chunk that may differ between members after a
//! power cut.
//!
//! Layout: page 0 (512 bytes) is the header: magic, id of the volume, bytes in a chunk, chunks; page n has 4064 bits from
//! the low end of each byte and ends with the crc32c of id, n and the bits. Pages are rewritten in place. A page that
//! does not fit its checksum counts as all marked, a header that does not as well: too many marks cost time, too few cost
//! data.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use lh_block::Extent;
use lh_wire::{INTENT_CHUNK_MIN, INTENT_CHUNKS_MAX};

use super::id::Id;

/// File name in `engine/`.
pub(super) const FILE: &str = "intent";

const PAGE: usize = 512;
const BITS: usize = PAGE - 4;
const PAGE_CHUNKS: u64 = BITS as u64 * 8;
const MAGIC: &[u8; 8] = b"LHintnt1";

/// Bytes in a chunk, as the file's header says. Expansion does not change it.
pub(super) fn chunk_of(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, 24)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Bytes of the file for a volume of `size` bytes.
pub(super) fn length_for(size: u64, chunk: u64) -> u64 {
    (size.div_ceil(chunk).div_ceil(PAGE_CHUNKS) + 1) * PAGE as u64
}

/// The bitmap as it is in the file, or on its way there.
#[derive(Debug)]
pub(super) struct Intent {
    id: Id,
    file: Arc<File>,
    size: u64,
    chunk: u64,
    /// Bit n % 8 of byte n / 8, cut into pages of [`BITS`] bytes.
    bits: Vec<u8>,
    /// Marks that were found there, likewise, and were not taken back since: what the disk has in their chunks may not be what was
    /// written. What this process marks it knows.
    found: Vec<u8>,
    /// Pages that the file does not have as they are here.
    changed: BTreeSet<usize>,
    writing: bool,
}

/// Pages of the intent bitmap on their way to the disk. At most one at a time.
#[derive(Debug)]
#[must_use]
pub struct IntentWrite {
    pages: Vec<(u64, Vec<u8>)>,
}

impl IntentWrite {
    /// What to write into [`super::Store::intent_file`]: offsets and bytes.
    pub fn pages(&self) -> &[(u64, Vec<u8>)] {
        &self.pages
    }
}

impl Intent {
    /// A bitmap with every chunk marked, or none; [`Self::image`] is what its file holds.
    pub(super) fn new(id: Id, file: Arc<File>, size: u64, chunk: u64, marked: bool) -> Self {
        let pages = size.div_ceil(chunk).div_ceil(PAGE_CHUNKS);
        let bytes = usize::try_from(pages).unwrap_or(0) * BITS;
        let bits = vec![if marked { 0xff } else { 0 }; bytes];
        Self { id, file, size, chunk, found: bits.clone(), bits, changed: BTreeSet::new(), writing: false }
    }

    /// Reads the file. `None`: it is none of this volume's, and [`Self::new`] with every chunk marked takes its place.
    pub(super) fn load(id: Id, file: Arc<File>, size: u64) -> io::Result<Option<Self>> {
        let mut page = [0; PAGE];
        // One that the disk does not give is one that does not fit.
        let whole = file.metadata()?.len() >= PAGE as u64 && file.read_exact_at(&mut page, 0).is_ok();
        let chunk = u64::from_le_bytes([
            page[24], page[25], page[26], page[27], page[28], page[29], page[30], page[31],
        ]);
        if !whole || chunk < INTENT_CHUNK_MIN || !chunk.is_power_of_two() {
            return Ok(None);
        }
        let mut intent = Self::new(id, file, size, chunk, true);
        if page != intent.header() {
            return intent.load_resized(&page);
        }
        intent.load_pages();
        Ok(Some(intent))
    }

    fn load_pages(&mut self) {
        let mut page = [0; PAGE];
        for number in 1..=self.bits.len() / BITS {
            // A page that cannot be read is a page that does not fit.
            if self.file.read_exact_at(&mut page, (number * PAGE) as u64).is_ok()
                && page[BITS..] == self.checksum(number, &page[..BITS])
            {
                self.bits[(number - 1) * BITS..number * BITS].copy_from_slice(&page[..BITS]);
            }
        }
        self.found.clone_from(&self.bits);
    }

    /// A crash between the two steps of an expansion leaves the header of another size. No chunk behind the smaller of
    /// the two was ever marked: the first write there comes after both steps. The file is written anew.
    fn load_resized(mut self, page: &[u8; PAGE]) -> io::Result<Option<Self>> {
        let chunks = u64::from_le_bytes([
            page[32], page[33], page[34], page[35], page[36], page[37], page[38], page[39],
        ]);
        let size = self.size;
        let theirs = chunks.checked_mul(self.chunk).filter(|_| chunks <= INTENT_CHUNKS_MAX.saturating_mul(2));
        self = match theirs {
            Some(theirs) => Self::new(self.id, self.file, theirs, self.chunk, true),
            None => return Ok(None),
        };
        if *page != self.header() {
            return Ok(None);
        }
        self.load_pages();
        self.resize(size);
        self.file.write_all_at(&self.image(), 0)?;
        self.file.sync_data()?;
        Ok(Some(self))
    }

    fn header(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        page[..8].copy_from_slice(MAGIC);
        page[8..24].copy_from_slice(&self.id.bytes());
        page[24..32].copy_from_slice(&self.chunk.to_le_bytes());
        page[32..40].copy_from_slice(&self.size.div_ceil(self.chunk).to_le_bytes());
        let crc = self.checksum(0, &page[..BITS]);
        page[BITS..].copy_from_slice(&crc);
        page
    }

    fn checksum(&self, page: usize, bits: &[u8]) -> [u8; 4] {
        let seed = crc32c::crc32c_append(crc32c::crc32c(&self.id.bytes()), &(page as u64).to_le_bytes());
        crc32c::crc32c_append(seed, bits).to_le_bytes()
    }

    /// The whole file.
    pub(super) fn image(&self) -> Vec<u8> {
        let mut image = self.header().to_vec();
        for number in 1..=self.bits.len() / BITS {
            image.extend_from_slice(&self.page(number));
        }
        image
    }

    fn page(&self, number: usize) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        page[..BITS].copy_from_slice(&self.bits[(number - 1) * BITS..number * BITS]);
        let crc = self.checksum(number, &page[..BITS]);
        page[BITS..].copy_from_slice(&crc);
        page
    }

    pub(super) const fn file(&self) -> &Arc<File> {
        &self.file
    }

    pub(super) const fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Marks the chunks that the range touches.
    pub(super) fn mark(&mut self, range: Extent) {
        if !range.is_empty() {
            self.change(range.offset / self.chunk..range.end().div_ceil(self.chunk), true);
        }
    }

    /// Takes the marks of the chunks wholly inside the range back.
    pub(super) fn clear(&mut self, range: Extent) {
        let end = if range.end() >= self.size { u64::MAX } else { range.end() / self.chunk };
        self.change(range.offset.div_ceil(self.chunk)..end, false);
    }

    fn change(&mut self, chunks: Range<u64>, on: bool) {
        for n in chunks.start..chunks.end.min(self.size.div_ceil(self.chunk)) {
            if self.is_marked(n) != on {
                let place = usize::try_from(n / 8).unwrap_or(usize::MAX);
                self.bits[place] ^= 1 << (n % 8);
                self.found[place] &= self.bits[place];
                self.changed.insert(place / BITS + 1);
            }
        }
    }

    /// The pages that the file lacks. `None`: there are none, or a write is on its way.
    pub(super) fn begin(&mut self) -> Option<IntentWrite> {
        if self.writing || self.changed.is_empty() {
            return None;
        }
        self.writing = true;
        let changed = std::mem::take(&mut self.changed);
        Some(IntentWrite {
            pages: changed.into_iter().map(|n| ((n * PAGE) as u64, self.page(n).to_vec())).collect(),
        })
    }

    /// The write that was begun has ended.
    pub(super) fn done(&mut self, _write: IntentWrite) {
        self.writing = false;
    }

    /// The write that was begun found no space, and nothing of it is needed: its pages go with the next one.
    pub(super) fn put_off(&mut self, write: &IntentWrite) {
        self.writing = false;
        let numbers = write.pages.iter().filter_map(|(offset, _)| usize::try_from(offset / PAGE as u64).ok());
        self.changed.extend(numbers);
    }

    /// Takes every mark back in memory; pages to write.
    pub(super) fn clear_all(&mut self) -> Vec<(u64, Vec<u8>)> {
        self.clear(Extent::new(0, self.size));
        self.changed.clear();
        (1..=self.bits.len() / BITS).map(|n| ((n * PAGE) as u64, self.page(n).to_vec())).collect()
    }

    pub(super) fn is_marked(&self, chunk: u64) -> bool {
        has(&self.bits, chunk)
    }

    /// The chunk was marked when the file was read, and is since.
    pub(super) fn was_found_marked(&self, chunk: u64) -> bool {
        has(&self.found, chunk)
    }

    /// The volume has this size now: chunks and marks stay as they are, and the file is to be written anew.
    pub(super) fn resize(&mut self, size: u64) {
        self.size = size;
        let pages = size.div_ceil(self.chunk).div_ceil(PAGE_CHUNKS);
        self.bits.resize(usize::try_from(pages).unwrap_or(0) * BITS, 0);
        self.found.resize(self.bits.len(), 0);
    }

    /// The marked ranges of the volume, ascending, none touching the next.
    pub(super) fn ranges(&self) -> Vec<Extent> {
        let mut ranges: Vec<Extent> = Vec::new();
        for n in (0..self.size.div_ceil(self.chunk)).filter(|n| self.is_marked(*n)) {
            let start = n * self.chunk;
            let len = self.chunk.min(self.size - start);
            match ranges.last_mut() {
                Some(last) if last.end() == start => last.len += len,
                _ => ranges.push(Extent::new(start, len)),
            }
        }
        ranges
    }
}

fn has(bits: &[u8], chunk: u64) -> bool {
    let byte = usize::try_from(chunk / 8).ok().and_then(|place| bits.get(place));
    byte.is_some_and(|byte| byte & 1 << (chunk % 8) != 0)
}

/// Writes pages and makes them durable.
pub(super) fn write(file: &File, pages: &[(u64, Vec<u8>)]) -> io::Result<()> {
    for (offset, page) in pages {
        file.write_all_at(page, *offset)?;
    }
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use lh_wire::intent_chunk;

    use super::*;

    fn fixture(size: u64) -> (tempfile::TempDir, Intent) {
        let dir = tempfile::tempdir().unwrap();
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(dir.path().join("f"));
        let id = Id::parse(&[b'1'; 32]).unwrap();
        let intent = Intent::new(id, Arc::new(file.unwrap()), size, intent_chunk(size), false);
        intent.file.write_all_at(&intent.image(), 0).unwrap();
        (dir, intent)
    }

    fn again(intent: &Intent) -> Option<Intent> {
        Intent::load(intent.id, Arc::clone(&intent.file), intent.size).unwrap()
    }

    #[test]
    fn chunks_keep_the_bitmap_small() {
        assert_eq!(intent_chunk(4096), 4 << 20);
        assert_eq!(intent_chunk(2 << 40), 4 << 20);
        assert_eq!(intent_chunk((2 << 40) + 4096), 8 << 20);
        assert_eq!(intent_chunk(64 << 40), 128 << 20);
    }

    #[test]
    fn marks_come_back() {
        let size = (3 << 40) + 4096;
        let (_dir, mut intent) = fixture(size);
        assert!(again(&intent).unwrap().ranges().is_empty());
        let last = size.div_ceil(intent.chunk) - 1;
        let chunk = intent.chunk;
        let of = |n: u64| Extent::new(n * chunk, chunk);
        [3, 4, 5000, last].into_iter().for_each(|n| intent.mark(Extent::new(n * chunk + 5, 1)));
        let begun = intent.begin().unwrap();
        assert_eq!(begun.pages().len(), 3);
        intent.mark(of(9));
        assert!(intent.begin().is_none(), "one write at a time");
        write(&intent.file, begun.pages()).unwrap();
        let expected =
            [Extent::new(3 * chunk, 2 * chunk), of(5000), Extent::new(last * chunk, size - last * chunk)];
        assert_eq!(again(&intent).unwrap().ranges(), expected);
        intent.done(begun);
        // Only whole chunks are taken back.
        intent.clear(Extent::new(3 * chunk, 3 * chunk - 1));
        intent.clear(Extent::new(9 * chunk, chunk));
        let begun = intent.begin().unwrap();
        write(&intent.file, begun.pages()).unwrap();
        intent.done(begun);
        assert_eq!(again(&intent).unwrap().ranges(), expected[1..]);
        assert!(intent.begin().is_none());
        intent.clear(Extent::new(last * chunk, size - last * chunk));
        assert_eq!(intent.ranges(), expected[1..2]);
        let pages = intent.clear_all();
        write(&intent.file, &pages).unwrap();
        assert!(again(&intent).unwrap().ranges().is_empty());
    }

    #[test]
    fn what_was_found_marked_is_until_it_is_taken_back() {
        let (_dir, mut intent) = fixture(1 << 30);
        let chunk = intent.chunk;
        let [three, four] = [3, 4].map(|n| Extent::new(n * chunk, chunk));
        intent.mark(three);
        assert!(intent.is_marked(3) && !intent.was_found_marked(3));
        let begun = intent.begin().unwrap();
        write(&intent.file, begun.pages()).unwrap();
        let mut intent = again(&intent).unwrap();
        intent.mark(three);
        intent.mark(four);
        assert!(intent.was_found_marked(3) && !intent.was_found_marked(4));
        intent.clear(three);
        intent.mark(three);
        assert!(intent.is_marked(3) && !intent.was_found_marked(3));
    }

    #[test]
    fn pages_that_found_no_space_go_with_the_next() {
        let (_dir, mut intent) = fixture(1 << 30);
        let chunk = intent.chunk;
        intent.mark(Extent::new(3 * chunk, 1));
        let refused = intent.begin().unwrap();
        intent.put_off(&refused);
        let begun = intent.begin().unwrap();
        write(&intent.file, begun.pages()).unwrap();
        assert_eq!(again(&intent).unwrap().ranges(), [Extent::new(3 * chunk, chunk)]);
    }

    #[test]
    fn rotten_pages_count_as_marked() {
        let (_dir, intent) = fixture(1 << 30);
        intent.file.write_all_at(&[1], 600).unwrap();
        assert_eq!(again(&intent).unwrap().ranges(), [Extent::new(0, 1 << 30)]);
        intent.file.set_len(700).unwrap();
        assert_eq!(again(&intent).unwrap().ranges(), [Extent::new(0, 1 << 30)]);
        intent.file.write_all_at(&[1], 30).unwrap();
        assert!(again(&intent).is_none());
        intent.file.set_len(0).unwrap();
        assert!(again(&intent).is_none());
    }

    #[test]
    fn a_header_that_cannot_be_read_counts_as_none() {
        let (dir, intent) = fixture(1 << 30);
        // Reading fails on it.
        let unreadable = File::options().write(true).open(dir.path().join("f")).unwrap();
        assert!(Intent::load(intent.id, Arc::new(unreadable), 1 << 30).unwrap().is_none());
    }

    #[test]
    fn another_volumes_bitmap_is_none() {
        let (_dir, intent) = fixture(1 << 30);
        let other = Id::parse(&[b'2'; 32]).unwrap();
        assert!(Intent::load(other, Arc::clone(&intent.file), 1 << 30).unwrap().is_none());
    }
}
