//! The data of a queue's requests, by slot: what the client sent, what was read for it, and what goes out.

use std::collections::BTreeMap;

use lh_block::Extent;
use lh_ring::{Payload, Pool};

use crate::message::{ControlId, LayerRef};
use crate::queue::{Data, Transmit};

/// What goes behind the header of a request.
pub(super) enum Body<'a> {
    /// Nothing.
    None,
    /// Blocks or a layer's image, and their checksum if it is wanted.
    Payload(Payload, Option<u32>),
    /// A name, or a control request.
    Bytes(&'a [u8]),
}

/// One slot.
#[derive(Debug, Default)]
struct Slot {
    /// The frontend's mark.
    tag: u64,
    range: Extent,
    client: Option<Payload>,
    stored: Option<Payload>,
}

/// All slots of a queue: those of clients, then those of jobs.
#[derive(Debug)]
pub(super) struct Slots {
    depth: u16,
    slots: Vec<Slot>,
    free: Vec<u16>,
    controls: BTreeMap<ControlId, Vec<u8>>,
    layers: BTreeMap<LayerRef, String>,
    /// The last checksum, and the tag of the request: one fan-out needs it for every member.
    checksum: Option<(u64, u32)>,
}

impl Slots {
    pub(super) fn new(depth: u16, jobs: u16) -> Self {
        Self {
            depth,
            slots: (0..depth + jobs).map(|_| Slot::default()).collect(),
            free: (0..depth).rev().collect(),
            controls: BTreeMap::new(),
            layers: BTreeMap::new(),
            checksum: None,
        }
    }

    /// Free client slots.
    pub(super) fn room(&self) -> u32 {
        u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    /// Takes a slot for a client's request.
    ///
    /// # Panics
    /// If there is none: the frontend did not ask [`lh_block::Device::room`].
    pub(super) fn take(&mut self, tag: u64, range: Extent, client: Option<Payload>) -> u16 {
        let slot = self.free.pop().expect("a frontend submits no more than there is room for");
        self.slots[usize::from(slot)] = Slot { tag, range, client, stored: None };
        slot
    }

    pub(super) fn free(&mut self, slot: u16) {
        self.slots[usize::from(slot)] = Slot::default();
        if slot < self.depth {
            self.free.push(slot);
        }
    }

    /// The slot of a client's request.
    pub(super) fn of(&self, tag: u64) -> Option<u16> {
        (0..self.depth).find(|s| self.tag(*s) == tag && !self.free.contains(s))
    }

    pub(super) fn tag(&self, slot: u16) -> u64 {
        self.slots[usize::from(slot)].tag
    }

    /// What was asked for.
    pub(super) fn range(&self, slot: u16) -> Extent {
        self.slots[usize::from(slot)].range
    }

    /// Keeps what came from a replica.
    pub(super) fn store(&mut self, slot: u16, payload: Payload) {
        self.slots[usize::from(slot)].stored = Some(payload);
    }

    /// Keeps the next part of a read behind those before it. One that goes block by block comes in more pieces than a payload has:
    /// then all of it is copied together. Without memory for that nothing is kept, and the read has to begin again.
    pub(super) fn append(&mut self, slot: u16, payload: Payload, pool: &Pool) {
        let stored = &mut self.slots[usize::from(slot)].stored;
        // `None`: there was no memory before.
        let Some(before) = stored else { return };
        if let Err(payload) = before.append(payload) {
            let len = u32::try_from(before.len() + payload.len()).unwrap_or(u32::MAX);
            let together = pool.alloc(len, 1).map(|mut together| {
                together.write_payload(0, before);
                together.write_payload(before.len(), &payload);
                together
            });
            *stored = together;
        }
    }

    /// Overlays the stored block with what the client sent, or with zeroes. In place: the block came out of a stream, and
    /// nobody else names it.
    pub(super) fn merge(&mut self, slot: u16, at: u32, from: u32, len: u32) {
        let Slot { stored: Some(block), client, .. } = &mut self.slots[usize::from(slot)] else { return };
        let (at, from, len) = (at as usize, from as usize, len as usize);
        match client {
            Some(client) => block.write_payload(at, &client.slice(from, len)),
            None => block.fill_zero(at..at + len),
        }
    }

    /// The client's part of what was read; `None` if there was no memory to put its parts together in.
    pub(super) fn part(&self, slot: u16, from: u32, len: u32) -> Option<Payload> {
        let stored = self.slots[usize::from(slot)].stored.as_ref()?;
        Some(stored.slice(from as usize, len as usize))
    }

    /// What goes behind the header of a request.
    pub(super) fn body(&mut self, transmit: &Transmit, checksums: bool) -> Body<'_> {
        match transmit.data {
            Data::None => Body::None,
            Data::Client { slot, from } => {
                let len = usize::try_from(transmit.range.len).unwrap_or(usize::MAX);
                let client = &self.slots[usize::from(slot)].client;
                let payload = client.as_ref().map(|c| c.slice(from as usize, len));
                self.checked(payload, transmit.tag, checksums)
            }
            Data::Stored { slot } => {
                let payload = self.slots[usize::from(slot)].stored.clone();
                self.checked(payload, transmit.tag, checksums)
            }
            Data::LayerName(layer) => {
                let name = layer.and_then(|l| self.layers.get(&l));
                name.map_or(Body::None, |name| Body::Bytes(name.as_bytes()))
            }
            Data::Control(id) => self.controls.get(&id).map_or(Body::None, |json| Body::Bytes(json)),
        }
    }

    fn checked(&mut self, payload: Option<Payload>, tag: u64, checksums: bool) -> Body<'_> {
        let Some(payload) = payload else { return Body::None };
        if !checksums {
            return Body::Payload(payload, None);
        }
        let crc = match self.checksum {
            Some((of, crc)) if of == tag => crc,
            _ => payload.crc32c(),
        };
        self.checksum = Some((tag, crc));
        Body::Payload(payload, Some(crc))
    }

    pub(super) fn keep_control(&mut self, id: ControlId, payload: Vec<u8>) {
        self.controls.insert(id, payload);
    }

    pub(super) fn drop_control(&mut self, id: ControlId) {
        self.controls.remove(&id);
    }

    /// How many control requests have neither been answered nor been lost.
    #[cfg(test)]
    pub(super) fn controls(&self) -> usize {
        self.controls.len()
    }

    pub(super) fn name_layer(&mut self, layer: LayerRef, name: String) {
        self.layers.insert(layer, name);
    }

    pub(super) fn forget_layers(&mut self) {
        self.layers.clear();
    }
}
