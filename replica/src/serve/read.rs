//! Reads: through the chain, and of one layer alone.

use std::collections::BTreeSet;
use std::io;

use lh_block::Extent;
use lh_ring::{Completion, Payload, Token};
use lh_wire::{BlockState, flags};

use super::blocks::runs_of;
use super::core::{Completed, Failure, Job, RequestId};
use super::memory::PAGE;
use super::request::{Digesting, Part, Work, trailer};
use super::server::{AT_ONCE_MAX, Server};
use super::token::{OWNER, kind};
use super::trouble::note;
use crate::store::{LayerNo, Merged, Piece, Source, Store};

impl Server {
    /// Reads the range through the chain.
    pub(super) fn start_read(&mut self, id: RequestId, range: Extent) {
        let mut pieces = std::mem::take(&mut self.pieces);
        self.store.plan_read(range, &mut pieces);
        let parts = pieces.drain(..).map(|piece| (piece.extent, piece.source));
        let enough = self.gather(id, parts, self.reads_max());
        self.pieces = pieces;
        if enough {
            self.requests.get(id).work = Work::Read;
            self.read_parts(id);
        } else {
            self.starve(id);
        }
    }

    /// What one layer holds of the range, or it and all under it: its data, then a trailer.
    pub(super) fn start_read_layer(&mut self, id: RequestId, range: Extent, merged: bool) {
        let name = self.requests.get(id).payload.to_vec();
        let layer = std::str::from_utf8(&name).ok();
        let Some(layer) = layer.and_then(|name| self.store.layer(name)) else {
            return self.end(id, Err(Failure::Refused("this replica has no layer of that name".into())));
        };
        let found = match merged {
            true => self.store.merged_states(layer, range),
            false => self.store.layer_states(layer, range).map(|states| Merged::alone(layer, states)),
        };
        let held = match found {
            Ok(held) => held,
            Err(e) => {
                let failure = note(&self.status, &e);
                return self.end(id, Err(failure));
            }
        };
        let parts = pieces_of(&self.store, &held, range.offset);
        let parts = parts.into_iter().map(|piece| (piece.extent, piece.source));
        if self.gather(id, parts, self.reads_max()) {
            self.requests.get(id).work = Work::ReadLayer { held, merged, name };
            self.read_parts(id);
        } else {
            self.starve(id);
        }
    }

    /// Lists what is to be read, with memory for all of it; false, and nothing listed, if there is not enough now, or
    /// more than `most` bytes are in use.
    pub(super) fn gather(
        &mut self,
        id: RequestId,
        parts: impl Iterator<Item = (Extent, Source)>,
        most: usize,
    ) -> bool {
        let slot = self.requests.get(id);
        let mut enough = self.pool.used_bytes() <= most;
        for (extent, source) in parts {
            if !enough {
                break;
            }
            let len = u32::try_from(extent.len).unwrap_or(u32::MAX);
            let (layer, offset) = match source {
                Source::Zero => {
                    slot.parts.push(Part::Zero(len as usize));
                    continue;
                }
                Source::Layer(layer) => (layer, Some(extent.offset)),
                Source::Cluster(layer, offset) => (layer, Some(offset)),
                Source::Packed(layer) => (layer, None),
            };
            let Some(payload) = self.pool.alloc(len, PAGE) else {
                enough = false;
                break;
            };
            slot.parts.push(match offset {
                Some(offset) => Part::Bytes { offset, len, layer, payload, again: false },
                None => Part::Ready(match decoded(&self.store, layer, extent, payload) {
                    Ok(payload) => payload,
                    Err(e) => {
                        slot.failure = Some(note(&self.status, &e));
                        continue;
                    }
                }),
            });
        }
        if !enough {
            slot.parts.clear();
            // It is decoded again with the next try.
            slot.failure = None;
        }
        enough
    }

    /// Submits the reads that were gathered.
    pub(super) fn read_parts(&mut self, id: RequestId) {
        let parts = self.requests.get(id).parts.len();
        self.requests.get(id).left = 0;
        for index in 0..parts {
            self.read_part(id, index);
        }
        if self.requests.get(id).left == 0 {
            self.parts_read(id);
        }
    }

    fn read_part(&mut self, id: RequestId, index: usize) {
        let slot = self.requests.get(id);
        let Some(Part::Bytes { offset, layer, payload, .. }) = slot.parts.get_mut(index) else { return };
        if self.in_memory && payload.len() <= AT_ONCE_MAX {
            let (read, len) = (payload.read_from(self.store.layer_file(*layer), *offset), payload.len());
            return match read {
                Ok(n) if n == len => {}
                Ok(n) => self.ended_early(id, index, n),
                Err(e) => self.part_failed(id, index, &e),
            };
        }
        slot.left += 1;
        // At most as many parts as blocks in the largest read.
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        let token = Token::new(OWNER, kind::READ, index, id.0);
        self.ring.readv(token, &self.files[usize::from(layer.0)], *offset, std::mem::take(payload));
    }

    pub(super) fn read_done(&mut self, c: Completion) {
        let (id, index) = (RequestId(c.token.data), usize::from(c.token.slot));
        let slot = self.requests.get(id);
        slot.left -= 1;
        let Some(Part::Bytes { offset, len, layer, payload, again }) = slot.parts.get_mut(index) else {
            return;
        };
        *payload = c.payload.unwrap_or_default();
        match c.result {
            Ok(n) if n == *len => {}
            Ok(n) => {
                let (from, twice) = (*offset + u64::from(n), std::mem::replace(again, true));
                let end = self.store.layer_file(*layer).metadata().map_or(u64::MAX, |m| m.len());
                if from >= end {
                    self.ended_early(id, index, n as usize);
                } else if twice {
                    let error = io::Error::other(format!("a read at {from} ended early, and again"));
                    slot.failure = Some(note(&self.status, &error));
                } else {
                    return self.read_part(id, index);
                }
            }
            Err(e) => self.part_failed(id, index, &e),
        }
        if self.requests.get(id).left == 0 {
            self.parts_read(id);
        }
    }

    /// The disk does not give a part. One of those that are read each by itself is then as if the layer had not that block.
    fn part_failed(&mut self, id: RequestId, index: usize, error: &io::Error) {
        let failure = note(&self.status, error);
        let slot = self.requests.get(id);
        match (&slot.work, slot.parts.get_mut(index)) {
            (Work::Put(put), Some(Part::Bytes { len, payload, .. })) if put.singly => {
                (*len, *payload) = (0, Payload::default());
            }
            _ => slot.failure = Some(failure),
        }
    }

    /// A part ended at the end of its file. Behind that of a backing file are zeroes. A file that has had more was cut off under this
    /// process: nobody knows what was there, and as soon as something is written farther behind, holes would pass for it.
    fn ended_early(&mut self, id: RequestId, index: usize, done: usize) {
        let slot = self.requests.get(id);
        let Some(Part::Bytes { offset, len, layer, payload, .. }) = slot.parts.get_mut(index) else { return };
        let (layer, end, length) = (*layer, *offset + done as u64, self.store.file_length(*layer));
        if end >= length {
            return payload.fill_zero(done..*len as usize);
        }
        let text = format!("the file of a layer ends at {end} and has had {length} bytes: it was cut off");
        let error = io::Error::new(io::ErrorKind::UnexpectedEof, text);
        let own = self.store.is_own(layer);
        let failure = if own { self.break_down(&error) } else { note(&self.status, &error) };
        self.requests.get(id).failure = Some(failure);
    }

    /// Every part of a read is there, or has failed.
    fn parts_read(&mut self, id: RequestId) {
        let slot = self.requests.get(id);
        if let Some(failure) = slot.failure.take() {
            slot.parts.clear();
            if let (Work::Put(put), Some(Job::PutLayer { range, trailer })) = (&mut slot.work, slot.job) {
                if put.rotten && !std::mem::replace(&mut put.singly, true) {
                    return self.start_put(id, range, trailer);
                }
                // What cannot be read is not compared but written: a disk gives a bad sector another place then.
                return self.put_compared(id);
            }
            if matches!(slot.work, Work::Digest { to: Digesting::Compare, .. }) {
                // It may be anything: so it is sent, and written.
                return self.end(id, Ok(Completed { aux: u32::MAX, ..Completed::default() }));
            }
            return self.end(id, Err(failure));
        }
        let (range, verify) =
            (Extent::new(slot.header.offset, slot.header.length.into()), slot.header.has(flags::VERIFY));
        match std::mem::take(&mut slot.work) {
            Work::Read if verify && !self.read_is_sound(id) => {
                self.requests.get(id).parts.clear();
                self.end(id, Err(Failure::Rotten));
            }
            Work::Read => {
                let payload = self.requests.get(id).header.length;
                self.end(id, Ok(Completed { payload, ..Completed::default() }));
            }
            Work::ReadLayer { held, merged, name } => {
                let rotten =
                    if verify || merged { self.rotten_blocks(id, range, &held) } else { BTreeSet::new() };
                if verify && !rotten.is_empty() {
                    self.requests.get(id).parts.clear();
                    return self.end(id, Err(Failure::Rotten));
                }
                let mut states = held.states();
                if !rotten.is_empty() {
                    // Who takes this for the layer's own would hide with it what others have sound further down.
                    let slot = self.requests.get(id);
                    slot.parts = without(std::mem::take(&mut slot.parts), &mut states, &rotten);
                }
                self.end_read_layer(id, &trailer(&states, &name));
            }
            Work::Digest { layer, states, compared, body, to } => {
                self.end_digest(id, layer, (&states, &compared), &body, to);
            }
            work @ Work::Put(_) => {
                self.requests.get(id).work = work;
                self.put_compared(id);
            }
            Work::None | Work::Write { .. } | Work::Zero(_) => {}
        }
    }

    fn end_read_layer(&mut self, id: RequestId, trailer: &[u8]) {
        let aux = u32::try_from(trailer.len()).unwrap_or(u32::MAX);
        let Some(mut payload) = self.pool.alloc(aux, 1) else {
            // The pool keeps far more free than reads may take: this is the answer to a broken accounting.
            self.requests.get(id).parts.clear();
            return self.end(id, Err(Failure::Io));
        };
        payload.write_at(0, trailer);
        let slot = self.requests.get(id);
        slot.parts.push(Part::Bytes { offset: 0, len: aux, layer: LayerNo(0), payload, again: false });
        let bytes = slot.parts.iter().map(Part::bytes).sum::<usize>();
        let payload = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.end(id, Ok(Completed { payload, aux, sync: false }));
    }
}

/// The bytes of a part of a qcow2 backing file that no read of the file alone gives. Done at once, on the ring's thread:
/// a cluster takes a fraction of a millisecond, and those read lately are kept.
fn decoded(store: &Store, layer: LayerNo, extent: Extent, mut payload: Payload) -> io::Result<Payload> {
    let mut at = 0;
    store.decode(layer, extent, |bytes| {
        payload.write_at(at, bytes);
        at += bytes.len();
    })?;
    Ok(payload)
}

/// Where to read what layers hold that were found one under the other, in order of offset.
fn pieces_of(store: &Store, held: &Merged, offset: u64) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for told in &held.told {
        runs_of(&told.states, offset).for_each(|run| store.plan_read_of(told.layer, run, &mut pieces));
    }
    pieces.sort_unstable_by_key(|piece| piece.extent.offset);
    pieces
}

/// The data of an image without these blocks, which it has not from now on.
fn without(parts: Vec<Part>, states: &mut [BlockState], left_out: &BTreeSet<usize>) -> Vec<Part> {
    let block = PAGE as usize;
    // Places in the data, where a part may begin within a block.
    let holds_data = |(n, state): (usize, &BlockState)| (*state == BlockState::Data).then_some(n);
    let data: Vec<usize> = states.iter().enumerate().filter_map(holds_data).collect();
    let mut kept = Vec::with_capacity(parts.len());
    let mut at = 0;
    for part in parts {
        let end = at + part.bytes();
        while at < end {
            let until = end.min((at / block + 1) * block);
            if data.get(at / block).is_some_and(|n| !left_out.contains(n)) {
                let (from, len) = (part.bytes() + at - end, until - at);
                kept.push(part.data().map_or(Part::Zero(len), |data| Part::Ready(data.slice(from, len))));
            }
            at = until;
        }
    }
    left_out.iter().for_each(|n| states[*n] = BlockState::Absent);
    kept
}

#[cfg(test)]
mod tests {
    use lh_ring::Pool;

    use super::*;

    #[test]
    fn an_image_without_some_of_its_blocks() {
        use BlockState::{Absent, Data, Zero};
        let pool = Pool::new(1 << 22, 1 << 22).unwrap();
        let ready = |byte: u8, len: u32| {
            let mut payload = pool.alloc(len, 1).unwrap();
            payload.write_at(0, &vec![byte; len as usize]);
            Part::Ready(payload)
        };
        // A cluster of a backing file ends within a block.
        let parts = || vec![ready(1, 4096 + 512), Part::Zero(3584), ready(2, 2 * 4096)];
        let told = [Data, Absent, Data, Zero, Data, Data];
        for (left_out, expected, bytes) in [
            (vec![], told, vec![(1, 4096), (1, 512), (0, 3584), (2, 4096), (2, 4096)]),
            (vec![2], [Data, Absent, Absent, Zero, Data, Data], vec![(1, 4096), (2, 4096), (2, 4096)]),
            (
                vec![0, 1, 3, 5],
                [Absent, Absent, Data, Absent, Data, Absent],
                vec![(1, 512), (0, 3584), (2, 4096)],
            ),
        ] {
            let mut states = told;
            let kept = without(parts(), &mut states, &left_out.iter().copied().collect());
            assert_eq!(states, expected, "{left_out:?}");
            let first = |part: &Part| part.data().map_or(0, |data| data.to_vec()[0]);
            let kept: Vec<_> = kept.iter().map(|part| (first(part), part.bytes())).collect();
            assert_eq!(kept, bytes, "{left_out:?}");
        }
    }
}
