//! Comparing what is read of snapshot layers with their checksums on record. A block in a chunk that the intent bitmap
//! marked when the directory was opened may be what a power cut left of it: there a checksum says nothing until the mark is taken back.

use std::collections::BTreeSet;

use lh_block::{BLOCK, Extent};
use lh_ring::Payload;
use lh_wire::{BlockState, MapPage, Verified, part_bit};

use super::blocks::block_sums;
use super::checksums::Checksums;
use super::core::RequestId;
use super::request::Part;
use super::server::Server;
use crate::store::{BlockSum, LayerNo, Merged, Told, Verdict};

/// Ranges in a page that tells both what a layer holds and what it should hold: twice as many still fit a message.
const RANGES_MAX: usize = 2 * MapPage::RANGES_MAX;

/// Bytes of a layer that one page goes through: their checksums take 1 MiB, which are read while requests wait.
const RECORDED_MAX: u64 = 1 << 30;

impl Server {
    /// There are checksums of the layer as it is now.
    pub(super) fn has_checksums(&mut self, layer: LayerNo) -> bool {
        self.checksums.of(&self.store, layer).is_some()
    }

    /// A bit for each part of the range in which a block does not fit its checksum.
    pub(super) fn rotten_parts(&mut self, layer: LayerNo, range: Extent, own: &[BlockSum]) -> u32 {
        let verdicts = self.checksums.verdicts(&self.store, layer, range.offset, own);
        let rotten = verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Rotten);
        rotten.fold(0, |bits, (n, _)| bits | part_bit(range.len, n * BLOCK))
    }

    /// The blocks of what was read of layers, by their number in the range, that do not fit the checksums of the layer that they are
    /// read from, or that by its own has lost them.
    pub(super) fn rotten_blocks(&mut self, id: RequestId, range: Extent, held: &Merged) -> BTreeSet<usize> {
        let mut rotten = BTreeSet::new();
        for Told { layer, states, covered } in &held.told {
            if !self.store.is_own(*layer) || !self.has_checksums(*layer) {
                continue;
            }
            let data = self.requests.get(id).parts.iter().filter_map(|part| match part {
                Part::Bytes { layer: of, payload, .. } if of == layer => Some(payload),
                _ => None,
            });
            let own = block_sums(states, data);
            let verdicts = self.checksums.verdicts(&self.store, *layer, range.offset, &own);
            let bad = |(n, verdict)| (verdict == Verdict::Rotten).then(|| usize::try_from(n).ok()).flatten();
            rotten.extend(verdicts.into_iter().filter_map(bad).filter(|n| !covered[*n]));
        }
        rotten
    }

    /// What is known of each block of a short range.
    pub(super) fn verified(&mut self, layer: LayerNo, range: Extent, own: &[BlockSum]) -> Verified {
        let verdicts = self.checksums.verdicts(&self.store, layer, range.offset, own);
        verdicts.iter().fold(Verified::default(), |all, (n, verdict)| {
            let bit = u16::try_from(*n).ok().and_then(|n| 1_u16.checked_shl(n.into())).unwrap_or(0);
            match verdict {
                Verdict::Sound => Verified { known: all.known | bit, ..all },
                Verdict::Rotten => Verified { known: all.known | bit, rotten: all.rotten | bit },
                Verdict::Unknown => all,
            }
        })
    }

    /// A read through the chain has its data: false if a block of it does not fit its checksum.
    pub(super) fn read_is_sound(&mut self, id: RequestId) -> bool {
        let block = usize::try_from(BLOCK).unwrap_or(usize::MAX);
        for part in &self.requests.get(id).parts {
            let Part::Bytes { offset, layer, payload, .. } = part else { continue };
            if self.checksums.of(&self.store, *layer).is_none() {
                continue;
            }
            let sums = (0..payload.len() / block).map(|n| payload.slice(n * block, block).crc32c());
            let own: Vec<BlockSum> = sums.map(|sum| (BlockState::Data, Some(sum))).collect();
            let verdicts = self.checksums.verdicts(&self.store, *layer, *offset, &own);
            if let Some((n, _)) = verdicts.iter().find(|(_, verdict)| *verdict == Verdict::Rotten) {
                let at = offset + n * BLOCK;
                let text = format!("a block of a snapshot at {at} does not fit its checksum");
                tracing::error!("{text}: the engine takes it from another replica");
                self.status.set_error(text);
                return false;
            }
        }
        true
    }

    /// Adds to a page where the layer should hold data, and ends it early where that is much.
    pub(super) fn add_recorded(&mut self, layer: LayerNo, from: u64, page: MapPage) -> MapPage {
        let length = self.store.layer_length(layer);
        match self.checksums.of(&self.store, layer) {
            Some(sums) => with_recorded(from, length, page, |range| sums.recorded(range)),
            None => page,
        }
    }

    /// A layer image is about to be put into a layer. True if the layer has checksums and the image is what they say: then
    /// they go on to count ([`Server::keep_checksums`]). Another image makes them void before the first byte changes:
    /// what a rebuild brings is no rot.
    pub(super) fn fits_checksums(
        &mut self,
        layer: LayerNo,
        range: Extent,
        states: &[BlockState],
        data: &Payload,
    ) -> bool {
        let Some(sums) = self.checksums.while_put(&self.store, layer) else { return false };
        let own = block_sums(states, [data]);
        let fits =
            own.iter().zip(range.offset / BLOCK..).all(|(d, n)| sums.verdict(n, *d) != Verdict::Rotten);
        if fits {
            *self.checksums.puts.entry(layer).or_default() += 1;
        } else {
            self.checksums.give_up(&self.store, layer);
        }
        fits
    }

    /// The layer has checksums that count, or had before it got something else elsewhere, and this block of it is what they say.
    pub(super) fn is_sound(&mut self, layer: LayerNo, at: u64, sum: u32) -> bool {
        if self.store.was_found_marked(at) {
            return false;
        }
        match self.checksums.while_put(&self.store, layer) {
            Some(sums) => sums.verdict(at / BLOCK, (BlockState::Data, Some(sum))) == Verdict::Sound,
            None => self.checksums.was_recorded(layer, at / BLOCK, sum),
        }
    }

    /// An image that fits the layer's checksums was put into it, or was not: they are of the file as it is now, unless
    /// another image has made them void meanwhile.
    pub(super) fn keep_checksums(&mut self, layer: LayerNo, put: bool) {
        let Checksums { open, puts, .. } = &mut self.checksums;
        if let Some(left) = puts.get_mut(&layer) {
            *left -= 1;
            if *left == 0 {
                puts.remove(&layer);
            }
        }
        if put
            && let Some(sums) = open.get_mut(&layer)
            && let Err(e) = sums.rebind()
        {
            tracing::warn!("checksums of a layer are of no use any more: {e}");
            open.remove(&layer);
        }
    }
}

/// A page of what a layer of this length holds from `from` on, together with what `recorded` says that it should hold.
fn with_recorded(
    from: u64,
    length: u64,
    page: MapPage,
    recorded: impl FnOnce(Extent) -> Vec<Extent>,
) -> MapPage {
    let mut end = page.next.unwrap_or(length).min(from.saturating_add(RECORDED_MAX));
    let within = Extent::new(from, end.saturating_sub(from));
    let mut all = recorded(within);
    all.extend(page.ranges.iter().filter_map(|range| range.intersection(within)));
    all.sort_unstable();
    let mut ranges: Vec<Extent> = Vec::with_capacity(all.len());
    for range in all {
        match ranges.last_mut() {
            Some(last) if range.offset <= last.end() => last.len = last.end().max(range.end()) - last.offset,
            _ => ranges.push(range),
        }
    }
    if ranges.len() > RANGES_MAX {
        ranges.truncate(RANGES_MAX);
        end = ranges.last().map_or(end, |last| last.end());
    }
    MapPage { ranges, next: (end < length).then_some(end), total: page.total }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn at(offset: u64, len: u64) -> Extent {
        Extent::new(offset, len)
    }

    #[test]
    fn a_page_tells_what_is_and_what_should_be() {
        let page = MapPage { ranges: vec![at(0, 8192), at(4 * MIB, 4096)], next: None, total: None };
        let recorded = vec![at(4096, 8192), at(MIB, 4096)];
        let page = with_recorded(0, 8 * MIB, page, |range| {
            assert_eq!(range, at(0, 8 * MIB));
            recorded
        });
        assert_eq!(page.ranges, [at(0, 12288), at(MIB, 4096), at(4 * MIB, 4096)]);
        assert_eq!(page.next, None);
    }

    /// The checksums of a page are read while requests wait.
    #[test]
    fn a_page_ends_before_too_many_checksums_are_read() {
        let tib = MIB << 20;
        let whole = MapPage { ranges: vec![at(0, tib)], next: None, total: None };
        let page = with_recorded(MIB, tib, whole, |range| {
            assert_eq!(range, at(MIB, RECORDED_MAX));
            vec![range]
        });
        assert_eq!((page.ranges, page.next), (vec![at(MIB, RECORDED_MAX)], Some(MIB + RECORDED_MAX)));
    }

    #[test]
    fn a_page_of_many_ranges_goes_on_behind_the_last() {
        let page = MapPage { ranges: Vec::new(), next: None, total: None };
        let many = |_| (0..=RANGES_MAX as u64).map(|n| at(n * 8192, 4096)).collect();
        let page = with_recorded(0, 1 << 30, page, many);
        assert_eq!(page.ranges.len(), RANGES_MAX);
        assert_eq!(page.next, page.ranges.last().map(|last| last.end()));
    }
}
