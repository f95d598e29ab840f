//! Comparing layers without sending them: hashes of what a layer holds, and where another replica's differ, or checksums on
//! record.

use lh_block::Extent;
use lh_ring::Payload;
use lh_wire::{BlockState, LayerDigest, flags};

use super::blocks::{block_digests, block_sums, runs_of};
use super::core::{Completed, Failure, Input, RequestId};
use super::request::{Digesting, Part, Work};
use super::server::Server;
use super::trouble::note;
use crate::store::{LayerNo, Source, Store};

impl Server {
    /// Reads what one layer holds of the range, to tell its hashes or, with `compare`, to compare them with those in
    /// the request.
    pub(super) fn start_digest(&mut self, id: RequestId, range: Extent, to: Digesting) {
        let body = self.requests.get(id).payload.to_vec();
        let len = u32::try_from(range.len).unwrap_or(u32::MAX);
        let name = match to {
            Digesting::Compare => LayerDigest::decode(&body, len).map(|digest| digest.layer),
            Digesting::Tell | Digesting::Verify => std::str::from_utf8(&body).ok(),
        };
        let Some(name) = name else { return self.end(id, Err(Failure::Invalid)) };
        let Some(layer) = self.store.layer(name) else {
            return self.end(id, Err(Failure::Refused("this replica has no layer of that name".into())));
        };
        let checksums = &mut self.checksums;
        let mut recorded = |store: &Store, layer, part| checksums.recorded(store, layer, part);
        let told = self.store.layer_states(layer, range).and_then(|states| {
            let compared = self.store.compared_states(layer, range, &states, &mut recorded)?;
            Ok((states, compared))
        });
        let (states, compared) = match told {
            Ok(told) => told,
            Err(e) => {
                let failure = note(&self.status, &e);
                return self.end(id, Err(failure));
            }
        };
        let parts = runs_of(&states, range.offset).map(|run| (run, Source::Layer(layer)));
        if self.gather(id, parts, self.reads_max()) {
            self.requests.get(id).work = Work::Digest { layer, states, compared, body, to };
            self.read_parts(id);
        } else {
            self.starve(id);
        }
    }

    /// The data is read. Checksums on record are of what the layer itself says, and others compare what counts of that.
    pub(super) fn end_digest(
        &mut self,
        id: RequestId,
        layer: LayerNo,
        (states, compared): (&[BlockState], &[BlockState]),
        body: &[u8],
        to: Digesting,
    ) {
        let slot = self.requests.get(id);
        let parts = std::mem::take(&mut slot.parts);
        let data = || parts.iter().filter_map(Part::data);
        let (len, verify) = (slot.header.length, slot.header.has(flags::VERIFY));
        let range = Extent::new(slot.header.offset, len.into());
        let rotten = if verify { self.rotten_parts(layer, range, &block_sums(states, data())) } else { 0 };
        match to {
            Digesting::Tell => self.tell_digest(id, compared, data(), body, rotten),
            Digesting::Compare => {
                let differ = LayerDigest::decode(body, len)
                    .map(|theirs| theirs.compare(len, &block_digests(theirs.seed, compared, data())));
                let aux = differ.unwrap_or(u32::MAX) | rotten;
                self.end(id, Ok(Completed { aux, ..Completed::default() }));
            }
            Digesting::Verify => {
                let aux = self.verified(layer, range, &block_sums(states, data())).bits();
                self.end(id, Ok(Completed { aux, ..Completed::default() }));
            }
        }
    }

    /// Answers with the digest, and with the parts that are rotten.
    fn tell_digest<'a>(
        &mut self,
        id: RequestId,
        compared: &[BlockState],
        data: impl Iterator<Item = &'a Payload>,
        layer: &[u8],
        rotten: u32,
    ) {
        let mut seed = [0; size_of::<u64>()];
        if let Err(e) = lh_ring::sys::random(&mut seed) {
            let failure = note(&self.status, &e);
            return self.end(id, Err(failure));
        }
        let seed = u64::from_le_bytes(seed);
        let own = block_digests(seed, compared, data);
        let bytes = LayerDigest::encode(seed, &own, std::str::from_utf8(layer).unwrap_or_default());
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let Some(mut payload) = self.pool.alloc(len, 1) else {
            // The pool keeps far more free than reads may take: this is the answer to a broken accounting.
            return self.end(id, Err(Failure::Io));
        };
        payload.write_at(0, &bytes);
        let part = Part::Bytes { offset: 0, len, layer: LayerNo(0), payload, again: false };
        self.requests.get(id).parts.push(part);
        self.end(id, Ok(Completed { payload: len, aux: rotten, ..Completed::default() }));
    }

    /// Where a layer holds something, for a rebuild.
    pub(super) fn map_layer(&mut self, request: RequestId, layer: &str, from: u64, recorded: bool) {
        let result = match self.store.layer(layer) {
            None => Err(Failure::Refused("this replica has no layer of that name".into())),
            Some(layer) => match self.store.layer_map(layer, from) {
                Ok(page) if recorded => Ok(Box::new(self.add_recorded(layer, from, page))),
                Ok(page) => Ok(Box::new(page)),
                Err(e) => Err(note(&self.status, &e)),
            },
        };
        self.inputs.push_back(Input::Mapped { request, result });
    }
}
