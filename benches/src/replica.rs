//! A replica's machine and store, with a disk that is done at once.

use anyhow::Result;
use lh_block::{BLOCK, Extent, Generation, Instance};
use lh_wire::{Header, OpCode, Status};
use replica::serve::core::{
    Completed, ConnId, Core, Facts, Input, Job, Output, Record, RequestId, SessionHello,
};

use crate::Places;
use crate::index::{IndexedStore, SIZE};

const GENERATION: Generation = Generation { attachment: 1, restart: 0 };

/// A replica with one session.
#[derive(Debug)]
pub struct ReplicaRig {
    core: Core,
    index: IndexedStore,
    places: Places,
    now: u64,
    out: Vec<Output>,
    answers: u64,
}

impl ReplicaRig {
    /// A replica whose engine has been let in and whose index has so many scattered blocks.
    ///
    /// # Errors
    /// There is no place that layer files can lie in.
    pub fn new(blocks: u64) -> Result<Self> {
        Self::over(IndexedStore::new(blocks)?)
    }

    /// The same over a head that is written everywhere: no write changes the index.
    ///
    /// # Errors
    /// There is no place that layer files can lie in.
    pub fn overwriting() -> Result<Self> {
        Self::over(IndexedStore::full()?)
    }

    fn over(index: IndexedStore) -> Result<Self> {
        let facts = Facts { size: SIZE, intent_chunk: 4 << 20, clean: true, ..Facts::default() };
        let mut rig = Self {
            core: Core::new(facts),
            index,
            places: Places::new(SIZE),
            now: 0,
            out: Vec::with_capacity(16),
            answers: 0,
        };
        let hello = SessionHello {
            generation: GENERATION,
            instance: Instance(1),
            session: Instance(1),
            queue: 0,
            queues: 1,
        };
        rig.apply(Input::Hello { conn: ConnId(0), hello });
        // Every chunk of the intent bitmap is marked once; after that a write asks for no record.
        for chunk in 0..SIZE / (4 << 20) {
            rig.write_at(chunk * (4 << 20));
        }
        Ok(rig)
    }

    /// A write of 4 KiB somewhere: from the bytes of its header to the bytes of its answer's.
    pub fn write(&mut self) -> u8 {
        let offset = self.places.next_block();
        self.write_at(offset)
    }

    fn write_at(&mut self, offset: u64) -> u8 {
        let block = u32::try_from(BLOCK).unwrap_or(0);
        let request =
            Header { payload: block, ..Header::request(OpCode::Write, 7, offset, block, GENERATION) };
        let header = match Header::decode(&request.encode()) {
            Ok(header) => header,
            Err(e) => panic!("{e}"),
        };
        let before = self.answers;
        self.apply(Input::Message { conn: ConnId(0), request: RequestId(0), header, control: None });
        assert_eq!(self.answers, before + 1, "the write was not answered");
        header.response(Status::Ok).encode()[0]
    }

    fn apply(&mut self, input: Input) {
        self.now += 1000;
        self.core.apply(self.now, input, &mut self.out);
        while let Some(output) = self.out.pop() {
            match output {
                Output::Store { request, job: Job::Write(range) } => self.store(request, range),
                Output::Reply { header, .. } => {
                    assert_eq!(header.status, Status::Ok, "the machine refused a write");
                    self.answers += 1;
                }
                Output::Persist {
                    id,
                    record: Record::Begin { .. } | Record::Fence { .. } | Record::Intent { .. },
                } => {
                    self.core.apply(self.now, Input::Persisted { id, result: Ok(()) }, &mut self.out);
                }
                Output::Welcome { .. } => {}
                other => panic!("not in a healthy replica: {other:?}"),
            }
        }
    }

    /// What the process does around the write to the file.
    fn store(&mut self, request: RequestId, range: Extent) {
        let store = &mut self.index.store;
        let head = store.head();
        assert!(store.begin_write(head, range), "nothing is being punched");
        let _ = store.wrote(range);
        let done = Input::Done { request, result: Ok(Completed::default()) };
        self.core.apply(self.now, done, &mut self.out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_answered() {
        let mut rig = ReplicaRig::new(10).unwrap();
        let before = rig.answers;
        rig.write();
        assert_eq!(rig.answers, before + 1);
    }
}
