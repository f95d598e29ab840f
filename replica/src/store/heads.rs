//! A new head over the former one, a larger volume, and the ranks of the layers.
//!
//! A layer's rank is its place in the head's chain, from 1, and the value that the index gets for what it holds. A fold
//! makes one layer of two neighbours, which then has both places, the upper one as its rank, so that nothing in the index
//! has to change: [`Store::holder`] says whose a value is. Ranks are counted anew when they run out.

use lh_block::BLOCK;

use super::data::Store;
use super::directory::NewHead;
use super::layer::{Layer, LayerNo};
use super::ranges::RangeSet;

/// Highest rank: a byte of the index. 250 layers and a backing file fit, and a few places that folds have left.
const RANK_MAX: usize = 255;
/// Ranks are counted anew by a fold that leaves more places than this: that goes over the whole index.
pub(super) const RANKS_TIDY: usize = 250;

impl Store {
    /// Puts the head of a commit over the former one; a longer one makes the volume larger. Nothing is in flight on the
    /// head. The former head is synced by the next flush. The number of the new head: a new one, or one of
    /// [`Store::release`].
    pub fn switch_head(&mut self, new: NewHead) -> LayerNo {
        if new.size != self.size {
            self.grow(new.size);
        }
        self.tidy_ranks(RANK_MAX - 1);
        self.undrained = None;
        let head = self.head();
        let former = self.at_mut(head);
        former.name = Some(new.snapshot);
        former.dirty = true;
        let (rank, look) = (former.rank + 1, former.look);
        let layer = Layer {
            name: Some(String::new()),
            file: new.file,
            length: self.size,
            zero: Some(new.zero),
            image: None,
            look,
            rank,
            dirty: false,
            lost: RangeSet::default(),
        };
        let number = match self.free.pop() {
            Some(number) => {
                *self.at_mut(number) = layer;
                number
            }
            None => {
                self.layers.push(layer);
                LayerNo(self.layers() - 1)
            }
        };
        self.places.push(number);
        self.touched = true;
        number
    }

    /// The layers stay as long as they are: what lies behind their ends reads as zero.
    fn grow(&mut self, size: u64) {
        self.size = size;
        self.places.grow(size / BLOCK);
        for zero in self.layers.iter_mut().filter_map(|l| l.zero.as_mut()) {
            zero.grow(size / BLOCK);
        }
        self.intent.resize(size);
    }

    /// Whose a value of the index is; `None` for zeroes.
    pub(super) fn holder(&self, value: u8) -> Option<LayerNo> {
        self.chain().get(usize::from(value).wrapping_sub(1)).copied()
    }

    /// The layers of the head's chain up to a rank, base first, each with its rank.
    pub(super) fn up_to(&self, rank: u8) -> impl DoubleEndedIterator<Item = (u8, LayerNo)> + '_ {
        let places = (1..=rank).zip(self.chain());
        places.map(|(rank, layer)| (rank, *layer)).filter(|(rank, layer)| self.at(*layer).rank == *rank)
    }

    /// The layers of the head's chain above a rank.
    pub(super) fn above(&self, rank: u8) -> impl Iterator<Item = LayerNo> + '_ {
        self.up_to(u8::MAX).filter(move |(other, _)| *other > rank).map(|(_, layer)| layer)
    }

    /// Counts the ranks anew if there are more than `most` places.
    pub(super) fn tidy_ranks(&mut self, most: usize) {
        if self.chain().len() <= most {
            return;
        }
        let chain: Vec<LayerNo> = self.up_to(u8::MAX).map(|(_, layer)| layer).collect();
        let mut ranks = [0; 256];
        for (old, layer) in (1..=u8::MAX).zip(self.chain()) {
            let place = chain.iter().position(|l| l == layer).map_or(0, |place| place + 1);
            ranks[usize::from(old)] = u8::try_from(place).unwrap_or(0);
        }
        for (rank, layer) in (1..=u8::MAX).zip(&chain) {
            self.at_mut(*layer).rank = rank;
        }
        self.places.remap(&ranks, chain);
    }
}
