//! What replicas that are out may lack, on disk (`docs/invariants.md`, 8): for each chunk of the intent bitmap which of
//! its units were written since before the first of them left. Who is out stands in the record `epoch`.
//! `docs/formats/replica-directory.md` has the file's layout, and what a damaged one says.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use lh_block::{Epoch, Extent};
use lh_wire::Outsider;

use super::directory::Directory;
use super::disk::{self, Look};
use super::id::Id;
use super::record::{EpochRecord, Rebuild};
use super::room::is_full;

/// File name in `engine/`.
const FILE: &str = "missed";

const SLOT: usize = 256;
const SUM_AT: usize = SLOT - 4;
const MAGIC: &[u8; 8] = b"LHmissd1";

/// The units of one chunk.
pub type Trail = [u64; 16];

/// What is known of replicas that are out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missed {
    /// Who they are.
    pub out: Vec<Outsider>,
    /// Trails that were saved, by number of the chunk.
    pub trails: Vec<(u64, Trail)>,
}

fn seal(id: Id, number: u64, slot: &mut [u8; SLOT]) {
    let sum = checksum(id, number, slot);
    slot[SUM_AT..].copy_from_slice(&sum);
}

fn checksum(id: Id, number: u64, slot: &[u8; SLOT]) -> [u8; 4] {
    let seed = crc32c::crc32c_append(crc32c::crc32c(&id.bytes()), &number.to_le_bytes());
    crc32c::crc32c_append(seed, &slot[..SUM_AT]).to_le_bytes()
}

fn header(id: Id, chunk: u64) -> [u8; SLOT] {
    let mut slot = [0; SLOT];
    slot[..8].copy_from_slice(MAGIC);
    slot[8..24].copy_from_slice(&id.bytes());
    slot[24..32].copy_from_slice(&chunk.to_le_bytes());
    seal(id, 0, &mut slot);
    slot
}

fn encode(id: Id, chunk: u64, trail: &Trail) -> [u8; SLOT] {
    let mut slot = [0; SLOT];
    for (bytes, word) in slot.chunks_exact_mut(8).zip(trail) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    seal(id, chunk + 1, &mut slot);
    slot
}

/// `None`: it says nothing.
fn decode(id: Id, chunk: u64, slot: &[u8; SLOT]) -> Option<Trail> {
    if slot.iter().all(|b| *b == 0) {
        return None;
    }
    let mut trail = [u64::MAX; 16];
    if slot[SUM_AT..] == checksum(id, chunk + 1, slot) {
        for (word, bytes) in trail.iter_mut().zip(slot.chunks_exact(8)) {
            *word = bytes.try_into().map_or(u64::MAX, u64::from_le_bytes);
        }
    }
    Some(trail)
}

/// The file's header is that of this volume.
fn is_sound(id: Id, chunk: u64, file: &File) -> io::Result<bool> {
    let mut slot = [0; SLOT];
    let length = file.metadata()?.len();
    Ok(length >= SLOT as u64 && file.read_exact_at(&mut slot, 0).is_ok() && slot == header(id, chunk))
}

fn load(id: Id, chunk: u64, file: &File) -> io::Result<Option<Vec<(u64, Trail)>>> {
    if !is_sound(id, chunk, file)? {
        return Ok(None);
    }
    let (mut slot, length) = ([0; SLOT], file.metadata()?.len());
    let mut trails = Vec::new();
    let mut next = 1;
    for found in disk::extents(file, Extent::new(0, length), Look::Synced) {
        let (extent, _) = found?;
        let first = (extent.offset / SLOT as u64).max(next);
        next = extent.end().div_ceil(SLOT as u64).min(length / SLOT as u64).max(first);
        for number in first..next {
            let read = file.read_exact_at(&mut slot, number * SLOT as u64);
            // What cannot be read is what does not fit.
            let trail = match read {
                Ok(()) => decode(id, number - 1, &slot),
                Err(_) => Some([u64::MAX; 16]),
            };
            trails.extend(trail.map(|t| (number - 1, t)));
        }
    }
    Ok(Some(trails))
}

impl Directory {
    /// Makes an epoch durable, and who is out of it. `Ok(false)`: a higher epoch is stored.
    ///
    /// # Errors
    /// The disk's.
    pub fn store_epoch_and_outsiders(&mut self, epoch: Epoch, out: Vec<Outsider>) -> io::Result<bool> {
        let next = self.rebuild.as_ref().and_then(|r| r.next.as_ref()).map(|next| &next.epoch);
        if next.or(self.epoch()).is_some_and(|e| e.order() > epoch.order()) {
            return Ok(false);
        }
        let record = EpochRecord { volume: self.identity.volume, epoch, out };
        match self.rebuild.clone() {
            Some(rebuild) => {
                let rebuild = Rebuild { next: Some(record), ..rebuild };
                self.records().store(&self.fs, &rebuild)?;
                self.rebuild = Some(rebuild);
            }
            None => self.record_epoch(record)?,
        }
        Ok(true)
    }

    /// The epoch counts from now on, and those are out.
    pub(super) fn record_epoch(&mut self, record: EpochRecord) -> io::Result<()> {
        let path = self.engine().join(FILE);
        let chunk = super::intent::chunk_of(&self.intent)?;
        let known = self.epoch.as_ref().is_some_and(|e| !e.out.is_empty());
        if !record.out.is_empty() && !known {
            // Before anybody is out the file is empty, so that one that is missing later is known to be lost.
            self.fs.write(&path, &header(self.identity.volume, chunk), None)?;
            self.fs.sync_directory(&self.engine())?;
        }
        self.records().store(&self.fs, &record)?;
        if record.out.is_empty() && known {
            self.fs.remove(&path)?;
        }
        self.epoch = Some(record);
        self.end_import()
    }

    /// Nothing that is known of others counts any more.
    pub(super) fn forget_outsiders(&mut self) -> io::Result<()> {
        match self.epoch.clone().filter(|e| !e.out.is_empty()) {
            Some(known) => self.record_epoch(EpochRecord { out: Vec::new(), ..known }),
            None => Ok(()),
        }
    }

    /// Makes trails durable, by number of the chunk. Those of nobody are passed over: without anybody out there is no file for
    /// them, and whoever leaves next gets a new one.
    ///
    /// # Errors
    /// The disk's.
    pub fn store_missed(&mut self, trails: &[(u64, Trail)]) -> io::Result<()> {
        if self.epoch.as_ref().is_none_or(|e| e.out.is_empty()) {
            return Ok(());
        }
        let path = self.engine().join(FILE);
        let file = disk::open_layer(&path, true, false)?;
        self.fs.overwrites(&path)?;
        for (chunk, trail) in trails {
            file.write_all_at(&encode(self.identity.volume, *chunk, trail), (chunk + 1) * SLOT as u64)?;
        }
        self.fs.sync_file(&file, &path)
    }

    fn open_missed(&self) -> io::Result<Option<File>> {
        match disk::open_layer(&self.engine().join(FILE), false, false) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The directory is opened: without the trails nothing is known of who is out. That is recorded, so that who leaves next gets a
    /// new file. A full disk keeps nobody from opening it.
    pub(super) fn check_missed(&mut self) -> io::Result<()> {
        if self.epoch.as_ref().is_none_or(|e| e.out.is_empty()) {
            return Ok(());
        }
        let chunk = super::intent::chunk_of(&self.intent)?;
        match self.open_missed()? {
            Some(file) if is_sound(self.identity.volume, chunk, &file)? => Ok(()),
            _ => match self.forget_outsiders() {
                Err(e) if is_full(&e) => Ok(()),
                done => done,
            },
        }
    }

    /// Who is out, and the trails that were saved.
    ///
    /// # Errors
    /// The disk's.
    pub fn missed(&self) -> io::Result<Missed> {
        let Some(record) = self.epoch.as_ref().filter(|e| !e.out.is_empty()) else {
            return Ok(Missed::default());
        };
        let chunk = super::intent::chunk_of(&self.intent)?;
        let trails = match self.open_missed()? {
            Some(file) => load(self.identity.volume, chunk, &file)?,
            None => None,
        };
        Ok(trails.map(|trails| Missed { out: record.out.clone(), trails }).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 4 << 20;

    fn file_with(bytes: &[(u64, Vec<u8>)]) -> File {
        let file = tempfile::tempfile().unwrap();
        bytes.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
        file
    }

    #[test]
    fn trails_come_back_and_torn_ones_count_as_all() {
        let id = Id::parse(&[b'1'; 32]).unwrap();
        let mut trail = [0; 16];
        trail[3] = 5;
        let mut torn = encode(id, 9, &trail);
        torn[0] ^= 1;
        let at = |chunk: u64| (chunk + 1) * SLOT as u64;
        let file = file_with(&[
            (0, header(id, CHUNK).to_vec()),
            (at(0), encode(id, 0, &trail).to_vec()),
            (at(9), torn.to_vec()),
            (at(70_000), encode(id, 70_000, &trail).to_vec()),
        ]);
        let found = load(id, CHUNK, &file).unwrap().unwrap();
        assert_eq!(found, [(0, trail), (9, [u64::MAX; 16]), (70_000, trail)]);
        assert_eq!(load(id, 2 * CHUNK, &file).unwrap(), None, "other chunks");
        assert_eq!(load(Id::parse(&[b'2'; 32]).unwrap(), CHUNK, &file).unwrap(), None, "another volume");
        assert_eq!(load(id, CHUNK, &file_with(&[])).unwrap(), None);
    }
}
