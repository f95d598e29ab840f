//! Blocks that change by themselves, and the checksums that tell.

use lh_block::{BLOCK, Extent};
use lh_wire::Verified;

use super::disk::{Cell, Disk, Layer, blocks};
use tests::dice::Dice;
use tests::register::Stamp;

/// What rot leaves: a value that no client has written, each time another one.
const ROT: u64 = u64::MAX / 2;

impl Disk {
    /// Takes checksums of the snapshots of these names, unless there are some.
    pub(super) fn hash(&mut self, snapshots: &[String]) {
        let head = self.layers.len() - 1;
        for layer in self.layers[..head].iter_mut().filter(|l| snapshots.contains(&l.info.name)) {
            let held = || layer.slots.iter().map(|(block, slot)| (*block, slot.current())).collect();
            layer.sums = layer.sums.take().or_else(|| Some(held()));
        }
    }

    /// What the checksums of a layer say of a block of it: it fits, or it does not. In a chunk that is in doubt they say nothing.
    fn fits(&self, layer: &Layer, block: u64) -> Option<bool> {
        let marked = self.was_found_marked(block);
        layer.recorded(block).filter(|_| !marked).map(|recorded| recorded == layer.current(block))
    }

    /// A snapshot's block that may rot: it has a checksum, which it fits, and is safe on the disk.
    pub(crate) fn may_rot(&self, dice: &mut Dice) -> Option<(String, u64)> {
        let head = self.layers.len() - 1;
        let mut found = Vec::new();
        for layer in &self.layers[..head] {
            let sound = layer.slots.iter().filter(|(_, slot)| slot.is_settled_data());
            found.extend(
                sound.map(|(block, _)| (layer, *block)).filter(|(l, b)| self.fits(l, *b) == Some(true)),
            );
        }
        let picked = usize::try_from(dice.below(found.len().max(1) as u64)).ok()?;
        found.get(picked).map(|(layer, block)| (layer.info.name.clone(), *block))
    }

    /// This snapshot's block is sound, by its checksum.
    pub(crate) fn is_sound(&self, snapshot: &str, block: u64) -> bool {
        self.layer_at(snapshot).is_some_and(|at| self.fits(&self.layers[at], block) == Some(true))
    }

    /// The block is another one from now on, and nobody was told.
    pub(crate) fn rot(&mut self, snapshot: &str, block: u64, number: u64) {
        if let Some(at) = self.layer_at(snapshot) {
            self.layers[at].slots.entry(block).or_default().rot(Cell::Data(Stamp(ROT + number)));
        }
    }

    /// Blocks that do not fit their checksums.
    pub(crate) fn rotten(&self) -> usize {
        let of = |layer: &Layer| layer.slots.keys().filter(|b| self.fits(layer, **b) == Some(false)).count();
        self.layers.iter().map(of).sum()
    }

    /// A block of the range does not fit the checksum of the layer that it is read from.
    pub(crate) fn reads_rot(&self, range: Extent) -> bool {
        let read = |block: u64| self.path(self.layers.len() - 1).find(|l| l.current(block) != Cell::Absent);
        blocks(range).any(|block| read(block).is_some_and(|layer| self.fits(layer, block) == Some(false)))
    }

    /// What a layer's checksums say of each block of the range, from the first on.
    fn verdicts(&self, layer: &str, range: Extent) -> impl Iterator<Item = Option<bool>> {
        let layer = self.layer_named(layer).map(|at| &self.layers[at]);
        blocks(range).map(move |block| layer.and_then(|layer| self.fits(layer, block)))
    }

    /// All that the range of the layer holds fits its checksums, and has some.
    pub(crate) fn is_sure(&self, layer: &str, range: Extent) -> bool {
        self.verdicts(layer, range).all(|fits| fits == Some(true))
    }

    /// Parts of the range, as a comparison tells them apart, that are rotten.
    pub(crate) fn rotten_parts(&self, layer: &str, range: Extent) -> u32 {
        let rotten = self.verdicts(layer, range).enumerate().filter(|(_, fits)| *fits == Some(false));
        rotten.fold(0, |all, (n, _)| all | lh_wire::part_bit(range.len, n as u64 * BLOCK))
    }

    /// The answer to a request to verify.
    pub(crate) fn verified(&self, layer: &str, range: Extent) -> Verified {
        let told = self.verdicts(layer, range).enumerate().filter_map(|(n, fits)| Some((1 << n, fits?)));
        told.fold(Verified::default(), |all, (bit, fits)| Verified {
            known: all.known | bit,
            rotten: all.rotten | if fits { 0 } else { bit },
        })
    }

    /// What was put into a layer was rotten: its checksums count no more.
    pub(crate) fn void_sums(&mut self, layer: &str) {
        if let Some(at) = self.layer_named(layer) {
            self.layers[at].sums = None;
        }
    }
}
