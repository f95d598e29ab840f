//! The ring thread's state: the machine, the store, and what each part of the server keeps. Its parts do the work.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use lh_block::{Generation, Instance};
use lh_ring::{Fd, Payload, Pool, Ring};
use lh_wire::{Keep, LayerInfo};

use super::checksums::Checksums;
use super::core::{Completed, Core, Failure, Input, Output, PersistId, RequestId};
use super::door::Door;
use super::flusher::Flusher;
use super::folder::Folder;
use super::grants::Grants;
use super::hash::Hasher;
use super::marks::Marks;
use super::memory::{READS_MAX, RECEIVED_MAX, SHORT_MAX};
use super::peer::Peers;
use super::reader::Readers;
use super::request::Requests;
use super::task::Task;
use super::worker::Worker;
use super::{Mode, Status};
use crate::store::{LayerNo, Piece, Store};

/// Largest read or write that is made at once where layers lie in memory: a ring would hand it to a thread of the
/// kernel's, which costs more than copying this much. Larger ones are worth a second processor.
pub(super) const AT_ONCE_MAX: usize = 64 << 10;

/// A record that nothing may be done beside: a punch or a sync that nobody asked for is waited for.
pub(super) enum Held {
    Rebuild(u64, Vec<LayerInfo>, Option<Keep>),
    Revert(Instance),
    Close,
}

/// The ring thread's state.
pub(super) struct Server {
    pub(super) ring: Ring,
    pub(super) pool: Pool,
    pub(super) status: Status,
    pub(super) started: Instant,
    pub(super) core: Core,
    pub(super) inputs: VecDeque<Input>,
    pub(super) outputs: Vec<Output>,
    pub(super) peers: Peers,
    pub(super) requests: Requests,
    /// Before what holds the layers' locks: at the end its socket goes first. Whoever waits for them binds it anew.
    pub(super) door: Door,
    pub(super) store: Store,
    /// The layers' files, by number.
    pub(super) files: Vec<Fd>,
    /// The layers lie in memory: reading and writing them never waits.
    pub(super) in_memory: bool,
    pub(super) worker: Worker,
    pub(super) flusher: Flusher,
    pub(super) marks: Marks,
    pub(super) folder: Folder,
    pub(super) checksums: Checksums,
    pub(super) hasher: Hasher,
    pub(super) readers: Readers,
    pub(super) grants: Grants,
    /// A prepared revert.
    pub(super) reverting: Option<Instance>,
    /// Requests that wait for memory, in order of arrival.
    pub(super) hungry: VecDeque<RequestId>,
    /// Writes that wait for the end of a punch.
    pub(super) parked: Vec<RequestId>,
    /// Requests that wait for the mark of zeroes in volume.meta.
    pub(super) unmarked: Vec<RequestId>,
    /// Layer images that wait for a zero map of their layer; the first one's is being made.
    pub(super) mapless: VecDeque<RequestId>,
    /// A record that waits until nothing is done to the layers that nobody asked for.
    pub(super) held: Option<(PersistId, Held)>,
    /// Room for plans of reads.
    pub(super) pieces: Vec<Piece>,
    pub(super) stopping: bool,
    /// Set when it has failed: when it ends for that.
    pub(super) ends_at: Option<u64>,
    /// What was last published.
    pub(super) mode: (Mode, Generation),
}

impl Server {
    /// Nanoseconds since the start: the machine's clock.
    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Takes the files of layers that have come: after the start and after each change of the chain.
    pub(super) fn open_files(&mut self) -> io::Result<()> {
        let known = u16::try_from(self.files.len()).unwrap_or(u16::MAX);
        for n in known..self.store.layers() {
            let file = self.store.layer_file(LayerNo(n)).try_clone()?;
            self.files.push(Fd::new(file));
        }
        self.marks.open(&self.store)
    }

    /// A worker that is gone is noticed by the loop, which ends then.
    pub(super) fn ask_worker(&mut self, task: Task) {
        self.worker.send(task);
    }

    /// The store is done with a request.
    pub(super) fn end(&mut self, id: RequestId, result: Result<Completed, Failure>) {
        // What came with it is of no more use; an answer's parts stay until they are queued.
        let slot = self.requests.get(id);
        slot.payload = Payload::default();
        slot.job = None;
        self.inputs.push_back(Input::Done { request: id, result });
    }

    /// There is no memory for the request now. Writes come first: they bring memory with them that they hold.
    pub(super) fn starve(&mut self, id: RequestId) {
        match self.requests.get(id).job {
            Some(job) if job.is_write() => self.hungry.push_front(id),
            _ => self.hungry.push_back(id),
        }
    }

    /// Memory in use above which no read begins.
    pub(super) fn reads_max(&self) -> usize {
        if self.status.is_memory_short() { SHORT_MAX } else { READS_MAX }
    }

    /// Memory is left for what is to be received.
    pub(super) fn may_receive(&self) -> bool {
        let most = if self.status.is_memory_short() { SHORT_MAX } else { RECEIVED_MAX };
        // When all requests wait for memory, it is with messages that have come in part: they have to come whole.
        self.pool.used_bytes() < most || self.requests.count() == self.hungry.len()
    }
}
