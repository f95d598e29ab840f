//! Requests in flight, by place: their payloads and what the store is doing for them.

use lh_ring::Payload;
use lh_wire::{BlockState, Header};

use super::core::{ConnId, Failure, Job, RequestId};
use crate::store::{LayerNo, Merged, PutPlan, ZeroPlan};

/// A part of what a read answers.
#[derive(Debug)]
pub(super) enum Part {
    /// So many zero bytes.
    Zero(usize),
    /// Bytes; empty while they are being read.
    Bytes {
        /// Of the layer's file, where they begin: of the volume, too, but for a qcow2 backing file.
        offset: u64,
        len: u32,
        layer: LayerNo,
        payload: Payload,
        /// Once more after a short read.
        again: bool,
    },
    /// Bytes that were decoded.
    Ready(Payload),
}

impl Part {
    /// Number of bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Zero(n) => *n,
            Self::Bytes { len, .. } => *len as usize,
            Self::Ready(payload) => payload.len(),
        }
    }

    /// What was read; `None`: zeroes that nobody read.
    pub(super) const fn data(&self) -> Option<&Payload> {
        match self {
            Self::Bytes { payload, .. } | Self::Ready(payload) => Some(payload),
            Self::Zero(_) => None,
        }
    }
}

/// What the store is doing for a request.
#[derive(Debug, Default)]
pub(super) enum Work {
    #[default]
    None,
    Read,
    /// `done` of the first `until` bytes are written. Those are all, unless there is no space behind them.
    Write {
        done: usize,
        until: usize,
    },
    Zero(Box<ZeroPlan>),
    /// Data runs are read; what the trailer is made of is here.
    ReadLayer {
        held: Merged,
        /// Through all layers under the named one.
        merged: bool,
        name: Vec<u8>,
    },
    /// Data runs are read, to be summed up; `body` is what came with the request, `compared` what another replica is told of the
    /// states.
    Digest {
        layer: LayerNo,
        states: Vec<BlockState>,
        compared: Vec<BlockState>,
        body: Vec<u8>,
        to: Digesting,
    },
    Put(Box<Put>),
}

/// What the checksums of a range are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Digesting {
    /// To be told.
    Tell,
    /// To be compared with those that came.
    Compare,
    /// To be compared with those on record.
    Verify,
}

/// A layer image on its way into a layer.
#[derive(Debug)]
pub(super) struct Put {
    /// Name of the layer.
    pub(super) name: String,
    pub(super) plan: PutPlan,
    /// Its data, without the trailer.
    pub(super) data: Payload,
    /// What is to be written: where in the file, where in `data`, how much.
    pub(super) runs: Vec<(u64, usize, usize)>,
    /// Blocks that turned out different.
    pub(super) changed: u32,
    /// The layer has checksums, and the image is what they say: they are to count afterwards.
    pub(super) fits: bool,
    /// Its sender says that the image is rotten: what is sound here stays.
    pub(super) rotten: bool,
    /// Then one block that cannot be read is no reason not to look at those beside it: each is read by itself.
    pub(super) singly: bool,
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) conn: ConnId,
    pub(super) header: Header,
    /// What came with it; for a write the bytes as they go to the disk.
    pub(super) payload: Payload,
    pub(super) job: Option<Job>,
    pub(super) work: Work,
    /// Of a read, in order.
    pub(super) parts: Vec<Part>,
    /// Operations of the ring that have not ended.
    pub(super) left: u32,
    /// The first thing that went wrong.
    pub(super) failure: Option<Failure>,
    /// Counts the requests.
    number: u64,
    used: bool,
}

/// All requests in flight. A place is used again; its list of parts keeps its memory.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    begun: u64,
}

impl Requests {
    pub(super) fn add(&mut self, conn: ConnId, header: Header, payload: Payload) -> RequestId {
        self.begun += 1;
        let number = self.begun;
        let Some(place) = self.free.pop() else {
            let place = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
            self.slots.push(Slot {
                conn,
                header,
                payload,
                job: None,
                work: Work::None,
                parts: Vec::new(),
                left: 0,
                failure: None,
                number,
                used: true,
            });
            return RequestId(place);
        };
        let slot = &mut self.slots[place as usize];
        slot.conn = conn;
        slot.header = header;
        slot.payload = payload;
        slot.number = number;
        slot.used = true;
        RequestId(place)
    }

    /// Requests that have a job in the store, and the job.
    pub(super) fn jobs(&self) -> impl Iterator<Item = (RequestId, Job)> + '_ {
        (0..).zip(&self.slots).filter(|(_, s)| s.used).filter_map(|(n, s)| Some((RequestId(n), s.job?)))
    }

    /// The layers of the images that have begun and not ended.
    pub(super) fn images(&self) -> impl Iterator<Item = LayerNo> + '_ {
        self.slots.iter().filter(|s| s.used).filter_map(|s| match &s.work {
            Work::Put(put) => Some(put.plan.layer),
            _ => None,
        })
    }

    /// True if some request's operations are under way: they end, and bring memory with them.
    pub(super) fn is_any_in_the_ring(&self) -> bool {
        self.slots.iter().any(|s| s.used && s.left > 0)
    }

    /// How many are in flight.
    pub(super) const fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The number that the next request gets: all that have begun have smaller ones.
    pub(super) const fn next_number(&self) -> u64 {
        self.begun + 1
    }

    /// The number of the oldest request that has a job in the store.
    pub(super) fn oldest_job(&self) -> Option<u64> {
        self.slots.iter().filter(|s| s.used && s.job.is_some()).map(|s| s.number).min()
    }

    /// # Panics
    /// If the place is free: the machine and the ring name only requests in flight.
    pub(super) fn get(&mut self, id: RequestId) -> &mut Slot {
        let slot = &mut self.slots[id.0 as usize];
        assert!(slot.used, "{id:?} is not in flight");
        slot
    }

    pub(super) fn remove(&mut self, id: RequestId) {
        let slot = self.get(id);
        slot.used = false;
        slot.payload = Payload::default();
        slot.job = None;
        slot.work = Work::None;
        slot.parts.clear();
        slot.left = 0;
        slot.failure = None;
        self.free.push(id.0);
    }
}

/// The bytes of a trailer.
pub(super) fn trailer(states: &[BlockState], name: &[u8]) -> Vec<u8> {
    states.iter().map(|s| *s as u8).chain(name.iter().copied()).collect()
}
