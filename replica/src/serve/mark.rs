//! The intent bitmap's pages on their way to the disk.

use std::io;

use lh_ring::{Completion, Token};

use super::core::{Failure, Input, PersistId};
use super::marks::Run;
use super::memory::PAGE;
use super::server::Server;
use super::token::{OWNER, kind};
use super::trouble::note;

impl Server {
    pub(super) fn save_marks(&mut self, id: PersistId, mark: &[u64], clear: &[u64]) {
        let chunk = self.store.intent_chunk();
        let range = |n: &u64| lh_block::Extent::new(n * chunk, chunk);
        mark.iter().map(range).for_each(|r| self.store.intent_mark(r));
        clear.iter().map(range).for_each(|r| self.store.intent_clear(r));
        match self.store.intent_begin() {
            None => self.inputs.push_back(Input::Persisted { id, result: Ok(()) }),
            Some(write) => {
                let run = Run { id, write, begun: 0, left: 0, syncing: false, failure: None };
                self.marks.run = Some(run);
            }
        }
    }

    /// Submits pages, as far as there is memory; the sync follows the last.
    pub(super) fn pump_marks(&mut self) {
        let (Some(run), Some(file)) = (self.marks.run.as_mut(), self.marks.file.as_ref()) else { return };
        while let Some((offset, bytes)) = run.write.pages().get(run.begun) {
            let Some(mut page) = self.pool.alloc(u32::try_from(bytes.len()).unwrap_or(u32::MAX), PAGE) else {
                return;
            };
            page.write_at(0, bytes);
            let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            self.ring.writev(Token::new(OWNER, kind::MARK_WRITE, 0, length), file, *offset, &page);
            run.begun += 1;
            run.left += 1;
        }
        self.next_mark_step();
    }

    pub(super) fn mark_op_done(&mut self, c: Completion) {
        let failure = whole(c).err().map(|e| note(&self.status, &e));
        if let Some(run) = self.marks.run.as_mut() {
            run.left -= 1;
            run.failure = worse(run.failure.take(), failure);
        }
        self.next_mark_step();
    }

    fn next_mark_step(&mut self) {
        let Some(run) = self.marks.run.take_if(|r| r.left == 0 && r.begun == r.write.pages().len()) else {
            return;
        };
        match (&self.marks.file, run.failure.clone()) {
            (Some(file), None) if !run.syncing => {
                self.ring.fdatasync(Token::new(OWNER, kind::MARK_SYNC, 0, 0), file);
                self.marks.run = Some(Run { syncing: true, left: 1, failure: None, ..run });
            }
            (_, None) => {
                self.store.intent_done(run.write);
                self.inputs.push_back(Input::Persisted { id: run.id, result: Ok(()) });
            }
            // Where a file shares its extents a page that is rewritten needs space. Nothing of what waits for it has begun.
            (_, Some(Failure::NoSpace)) if !run.syncing => {
                self.store.intent_put_off(&run.write);
                self.inputs.push_back(Input::Persisted { id: run.id, result: Err(Failure::NoSpace) });
            }
            // What a sync has lost is not written again.
            (_, Some(_)) => {
                self.inputs.push_back(Input::Persisted { id: run.id, result: Err(Failure::Io) });
            }
        }
    }
}

/// A full disk is the least of what can be wrong.
fn worse(one: Option<Failure>, other: Option<Failure>) -> Option<Failure> {
    match (one, other) {
        (Some(Failure::NoSpace) | None, Some(other)) => Some(other),
        (one, _) => one,
    }
}

/// Whether an operation on the bitmap's file has done all it was to do: its token says how many bytes are to be written.
fn whole(c: Completion) -> io::Result<()> {
    match c.result {
        Ok(done) if done != c.token.data => Err(io::ErrorKind::WriteZero.into()),
        done => done.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(kind: u8, length: u32, result: io::Result<u32>) -> io::Result<()> {
        let token = Token::new(OWNER, kind, 0, length);
        whole(Completion { token, result, more: false, payload: None, accepted: None })
    }

    #[test]
    fn a_full_disk_hides_no_other_failure() {
        use Failure::{Io, NoSpace};
        for (one, other) in [(Io, NoSpace), (NoSpace, Io)] {
            assert_eq!(worse(Some(one), Some(other)), Some(Io));
        }
        assert_eq!(worse(None, Some(NoSpace)), Some(NoSpace));
        assert_eq!(worse(Some(NoSpace), None), Some(NoSpace));
    }

    #[test]
    fn a_page_that_was_written_in_part_is_not_written() {
        assert!(ended(kind::MARK_WRITE, 512, Ok(512)).is_ok());
        for short in [0, 100, 511] {
            let failed = ended(kind::MARK_WRITE, 512, Ok(short)).unwrap_err();
            assert_eq!(failed.kind(), io::ErrorKind::WriteZero, "{short}");
        }
        assert!(ended(kind::MARK_SYNC, 0, Ok(0)).is_ok());
        let full = ended(kind::MARK_WRITE, 512, Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
