//! Layer images: making a range of one layer what another member's layer is.

use std::collections::BTreeSet;

use lh_block::{BLOCK, Extent};
use lh_ring::{Completion, Falloc, Payload, Token};
use lh_wire::{BlockState, LayerTrailer, flags};

use super::core::{Completed, Failure, RequestId};
use super::memory::{IMAGES_MAX, PAGE};
use super::request::{Part, Put, Work};
use super::server::Server;
use super::task::Task;
use super::token::{OWNER, kind};
use super::trouble::note;
use super::write::aligned_copy;
use crate::store::{Answer, LayerNo, NewZeroMap, Source};

impl Server {
    /// Makes the range of a layer what the request's image says: what may be equal is compared first.
    pub(super) fn start_put(&mut self, id: RequestId, range: Extent, trailer: u32) {
        if !matches!(self.requests.get(id).work, Work::Put(_))
            && let Err(failure) = self.plan_put(id, range, trailer)
        {
            return self.end(id, Err(failure));
        }
        let Work::Put(put) = &self.requests.get(id).work else { return };
        let (layer, mut read) = (put.plan.layer, put.plan.held.clone());
        if put.rotten && layer != self.store.head() {
            read.extend(&put.plan.lost);
        }
        if put.singly {
            read =
                read.iter().flat_map(|extent| blocks_of(*extent)).map(|at| Extent::new(at, BLOCK)).collect();
        }
        if !self.store.begin_write(layer, range) {
            self.parked.push(id);
        } else if self.gather(id, read.into_iter().map(|extent| (extent, Source::Layer(layer))), IMAGES_MAX) {
            self.read_parts(id);
        } else {
            self.starve(id);
        }
    }

    /// Where an image's data ends, and the trailer behind it.
    fn split_image(&mut self, id: RequestId, trailer: u32) -> (usize, Vec<u8>) {
        let image = &self.requests.get(id).payload;
        let split = image.len() - trailer as usize;
        let mut bytes = vec![0; trailer as usize];
        image.read_at(split, &mut bytes);
        (split, bytes)
    }

    /// The layer that an image is of, if there is one.
    pub(super) fn layer_of_image(&mut self, id: RequestId, range: Extent, trailer: u32) -> Option<LayerNo> {
        let (split, bytes) = self.split_image(id, trailer);
        let trailer = decode(&bytes, range, split).ok()?;
        self.store.layer(trailer.layer)
    }

    fn plan_put(&mut self, id: RequestId, range: Extent, trailer: u32) -> Result<(), Failure> {
        let (split, bytes) = self.split_image(id, trailer);
        let trailer = decode(&bytes, range, split)?;
        let layer = self.store.layer(trailer.layer);
        let layer = layer.ok_or_else(|| Failure::Refused("this replica has no layer of that name".into()))?;
        let states: Vec<BlockState> = trailer.states().collect();
        let plan = self.store.plan_put(layer, range, &states).map_err(|e| match e.kind() {
            std::io::ErrorKind::InvalidInput => Failure::Invalid,
            _ => note(&self.status, &e),
        })?;
        let data = self.requests.get(id).payload.slice(0, split);
        let data = match self.store.direct() {
            // What is put is mostly not there yet.
            Some(wanted) if !data.is_aligned(wanted.filling, wanted.offset) => {
                aligned_copy(&self.pool, &data).ok_or(Failure::NoSpace)?
            }
            _ => data,
        };
        let changed = plan.changed;
        let name = trailer.layer.to_owned();
        self.hasher.forget_folded(&name);
        let rotten = self.requests.get(id).header.has(flags::VERIFY);
        let fits = !rotten && self.fits_checksums(layer, range, &states, &data);
        let put = Put { name, plan, data, runs: Vec::new(), changed, fits, rotten, singly: false };
        self.requests.get(id).work = Work::Put(Box::new(put));
        Ok(())
    }

    /// What may be equal has been read: what is not is written.
    pub(super) fn put_compared(&mut self, id: RequestId) {
        let stays = self.sound_of_own(id);
        let slot = self.requests.get(id);
        let Work::Put(put) = &mut slot.work else { return };
        if slot.parts.is_empty() {
            let unread: u64 = put.plan.held.iter().map(|extent| extent.len / BLOCK).sum();
            put.changed += u32::try_from(unread).unwrap_or(u32::MAX);
        }
        put.changed += put.find_runs(&slot.parts, &stays);
        let layer = put.plan.layer;
        let changes: Vec<Extent> = put.changes().collect();
        if put.rotten && !changes.is_empty() {
            self.checksums.give_up(&self.store, layer);
        }
        self.checksums.note_changed(layer, changes.into_iter());
        let slot = self.requests.get(id);
        let Work::Put(put) = &mut slot.work else { return };
        slot.parts.clear();
        slot.left = u32::try_from(put.plan.punch.len() + put.runs.len()).unwrap_or(u32::MAX);
        let file = &self.files[usize::from(put.plan.layer.0)];
        for hole in &put.plan.punch {
            let token = Token::new(OWNER, kind::PUNCH, 0, id.0);
            self.ring.fallocate(token, file, Falloc::PunchHole, hole.offset, hole.len);
        }
        for (index, (offset, from, len)) in put.runs.iter().enumerate() {
            // As many runs as blocks in an image, at most.
            let token = Token::new(OWNER, kind::WRITE, u16::try_from(index).unwrap_or(u16::MAX), id.0);
            self.ring.writev(token, file, *offset, &put.data.slice(*from, *len));
        }
        if slot.left == 0 {
            self.put_changed(id);
        }
    }

    /// The blocks, by their offsets, that stay as they are since the image is rotten and they are sound. What is taken for want of
    /// another is not what the layer's checksums say: they count no more. The head has none: what is rotten in the layers below it, its
    /// sender has left out of what is read through them all, and nobody knows better.
    fn sound_of_own(&mut self, id: RequestId) -> BTreeSet<u64> {
        let slot = self.requests.get(id);
        let Work::Put(put) = &slot.work else { return BTreeSet::new() };
        if !put.rotten {
            return BTreeSet::new();
        }
        let layer = put.plan.layer;
        if layer == self.store.head() {
            let left_out = put.plan.punch.iter().flat_map(|extent| blocks_of(*extent)).collect();
            return self.keep_of_own(id, left_out);
        }
        let data = put.plan.held.iter().chain(&put.plan.lost);
        let own: Vec<(u64, Option<u32>)> = data
            .flat_map(|extent| blocks_of(*extent))
            .map(|at| {
                let bytes = held_at(&slot.parts, at);
                (at, bytes.map(|(held, from)| held.slice(from, PAGE as usize).crc32c()))
            })
            .collect();
        let sound =
            |(at, sum): &(u64, Option<u32>)| sum.filter(|sum| self.is_sound(layer, *at, *sum)).map(|_| *at);
        let stays: BTreeSet<u64> = own.iter().filter_map(sound).collect();
        if !stays.is_empty() {
            tracing::warn!(
                "{} blocks of a snapshot may be rotten where they were to be copied from, and are sound here: they stay",
                stays.len()
            );
        }
        self.keep_of_own(id, stays)
    }

    fn keep_of_own(&mut self, id: RequestId, stays: BTreeSet<u64>) -> BTreeSet<u64> {
        let Work::Put(put) = &mut self.requests.get(id).work else { return stays };
        let before = put.plan.changed;
        put.plan.keep(&stays);
        put.changed -= before - put.plan.changed;
        stays
    }

    pub(super) fn put_op_done(&mut self, c: &Completion) {
        let id = RequestId(c.token.data);
        let slot = self.requests.get(id);
        let Work::Put(put) = &mut slot.work else { return };
        if let (kind::WRITE, Ok(n)) = (c.token.kind, &c.result)
            && let Some((offset, from, len)) = put.runs.get_mut(usize::from(c.token.slot))
        {
            let n = *n as usize;
            (*offset, *from, *len) = (*offset + n as u64, *from + n, *len - n);
            if *len > 0 && n > 0 {
                let file = &self.files[usize::from(put.plan.layer.0)];
                return self.ring.writev(c.token, file, *offset, &put.data.slice(*from, *len));
            }
            if n == 0 {
                slot.failure = Some(Failure::Io);
            }
        }
        slot.left -= 1;
        if let Err(e) = &c.result {
            slot.failure = Some(note(&self.status, e));
        }
        if slot.left == 0 {
            self.put_changed(id);
        }
    }

    fn put_changed(&mut self, id: RequestId) {
        let slot = self.requests.get(id);
        let Work::Put(put) = &mut slot.work else { return };
        // Another image may have brought the layer its map since this one was planned.
        if put.plan.needs_map && self.store.has_zero_map(put.plan.layer) && slot.failure.is_none() {
            put.plan.needs_map = false;
            slot.failure = self.store.reserve_marks(&put.plan).err().map(|e| note(&self.status, &e));
        }
        if slot.failure.is_some() {
            self.put_report(id);
        } else if put.plan.needs_map {
            self.mapless.push_back(id);
            if self.mapless.len() == 1 {
                self.make_zero_map();
            }
        } else if put.plan.needs_mark {
            self.await_mark(id);
        } else {
            self.put_report(id);
        }
    }

    /// Asks for the zero map that the first of those who wait needs.
    fn make_zero_map(&mut self) {
        if let Some(id) = self.mapless.front()
            && let Work::Put(put) = &self.requests.get(*id).work
        {
            let task = Task::MakeZeroMap(put.name.clone());
            self.ask_worker(task);
        }
    }

    /// The map serves all who wait for one of the same layer.
    pub(super) fn zero_map_made(&mut self, result: Result<Option<Box<NewZeroMap>>, Failure>) {
        let failure = match result {
            Ok(Some(map)) => {
                self.store.attach_zero_map(*map);
                None
            }
            Ok(None) => Some(Failure::Io),
            Err(failure) => {
                self.worker_failed(&failure);
                Some(failure)
            }
        };
        let mut layer = None;
        for id in std::mem::take(&mut self.mapless) {
            let slot = self.requests.get(id);
            let Work::Put(put) = &slot.work else { continue };
            if *layer.get_or_insert(put.plan.layer) == put.plan.layer {
                let lacks_map = !self.store.has_zero_map(put.plan.layer);
                slot.failure = failure.clone().or_else(|| lacks_map.then_some(Failure::Io));
                self.put_changed(id);
            } else {
                self.mapless.push_back(id);
            }
        }
        self.make_zero_map();
    }

    pub(super) fn put_report(&mut self, id: RequestId) {
        let slot = self.requests.get(id);
        let Work::Put(put) = std::mem::take(&mut slot.work) else { return };
        let failure = slot.failure.take();
        if put.fits {
            self.keep_checksums(put.plan.layer, failure.is_none());
        }
        let result = match failure {
            Some(failure) => {
                self.refresh(put.plan.layer, put.plan.extent);
                Err(failure)
            }
            None => {
                let below = put.plan.layer != self.store.head();
                let absent = put.plan.absent.iter().filter(|_| put.rotten && below);
                absent.for_each(|extent| self.store.note_lost(put.plan.layer, *extent));
                self.store.put_done(&put.plan).map_err(|e| self.break_down(&e))
            }
        };
        let done = |answer| Completed { aux: put.changed, sync: answer == Answer::AfterFlush, payload: 0 };
        self.end(id, result.map(done));
    }
}

const _: () = assert!(PAGE as u64 == BLOCK);

/// The offsets of the blocks of a range.
fn blocks_of(extent: Extent) -> impl Iterator<Item = u64> {
    (extent.offset..extent.end()).step_by(PAGE as usize)
}

/// Reads the trailer of an image of the range with so many bytes of data.
fn decode(trailer: &[u8], range: Extent, data: usize) -> Result<LayerTrailer<'_>, Failure> {
    let (len, data) = (u32::try_from(range.len).unwrap_or(u32::MAX), u32::try_from(data).unwrap_or(u32::MAX));
    LayerTrailer::decode(trailer, len, data).map_err(|_| Failure::Invalid)
}

impl Put {
    /// What of the layer becomes something else.
    fn changes(&self) -> impl Iterator<Item = Extent> + '_ {
        let runs = self.runs.iter().map(|(offset, _, len)| Extent::new(*offset, *len as u64));
        runs.chain(self.plan.punch.iter().chain(&self.plan.marks).copied())
    }

    /// Finds what is to be written: what the layer does not hold, and what it holds otherwise. Returns how many blocks
    /// it holds otherwise. What stays is none of either.
    fn find_runs(&mut self, held: &[Part], stays: &BTreeSet<u64>) -> u32 {
        let block = PAGE as usize;
        let (mut from, mut differ) = (0, 0);
        let (mut image, mut layer) = (vec![0; block], vec![0; block]);
        for range in &self.plan.write {
            let blocks = usize::try_from(range.len / BLOCK).unwrap_or(0);
            for at in 0..blocks {
                let offset = range.offset + at as u64 * BLOCK;
                if stays.contains(&offset) {
                    from += block;
                    continue;
                }
                if let Some((payload, within)) = held_at(held, offset) {
                    self.data.read_at(from, &mut image);
                    payload.read_at(within, &mut layer);
                    if image == layer {
                        from += block;
                        continue;
                    }
                    differ += 1;
                }
                match self.runs.last_mut() {
                    Some((o, f, len)) if *o + *len as u64 == offset && *f + *len == from => *len += block,
                    _ => self.runs.push((offset, from, block)),
                }
                from += block;
            }
        }
        differ
    }
}

/// The bytes that were read of the block at `offset`, and where they begin in the payload.
fn held_at(held: &[Part], offset: u64) -> Option<(&Payload, usize)> {
    held.iter().find_map(|part| match part {
        Part::Bytes { offset: o, len, payload, .. } if *o <= offset && offset < *o + u64::from(*len) => {
            Some((payload, usize::try_from(offset - *o).ok()?))
        }
        _ => None,
    })
}
