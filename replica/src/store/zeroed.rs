//! How a range of the head becomes zero: by a hole where nothing below shows through it, else by a mark.

use std::io;
use std::ops::Range;

use lh_block::Extent;

use super::data::Store;
use super::layer::LayerNo;
use super::load::{blocks, bytes};
use super::ranges::RangeSet;
use super::room;

/// The ranges inside a range in which a layer should hold data by its checksums on record.
pub type Recorded<'a> = &'a mut dyn FnMut(&Store, LayerNo, Extent) -> Vec<Extent>;

/// How a range of the head becomes zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZeroPlan {
    /// The range.
    pub extent: Extent,
    /// Holes to punch in the head's file, before the report.
    pub punch: Vec<Extent>,
    /// Ranges that get zero marks with the report.
    pub marks: Vec<Extent>,
    /// [`super::Directory::mark_zeroes`] and then [`Store::marked`] come before the report.
    pub needs_mark: bool,
}

impl Store {
    /// How the range (whole blocks) of the head becomes zero. A full disk shows here, before anything is changed. Where layers below may
    /// get data yet, it is marked over nothing, too: by a rebuild, because what they hold is in doubt (`in_doubt`), or because a layer has
    /// lost it, and gets it back from a scrub. `recorded`: the ranges in which a layer should hold data by its checksums on record.
    ///
    /// # Errors
    /// The disk's.
    pub fn plan_zero(&self, extent: Extent, in_doubt: bool, recorded: Recorded<'_>) -> io::Result<ZeroPlan> {
        let (head, base) = (self.at(self.head()), self.is_base(self.head()));
        // Each layer's checksums are asked once: the runs may be thousands.
        let expected = match base || self.rebuilding || in_doubt {
            true => RangeSet::default(),
            false => self.expected_below(blocks(extent), head.rank, recorded),
        };
        let (mut punch, mut marks) = (RangeSet::default(), RangeSet::default());
        for (range, held) in self.places.runs(blocks(extent)) {
            if base {
                if held != 0 {
                    punch.insert(range);
                }
            } else if self.rebuilding
                || in_doubt
                || (held != 0 && (self.undrained.is_some() || self.holder(held) != Some(self.head())))
            {
                marks.insert(range);
            } else {
                let mut below = RangeSet::default();
                expected.within(range.clone()).for_each(|part| below.insert(part));
                if held != 0 {
                    below.append(&self.held_below(range.clone(), head.rank)?);
                    punch.insert(range.clone());
                    punch.subtract(&below);
                } else if let Some(zero) = &head.zero {
                    below.subtract(&zero.zeroes(range));
                }
                marks.append(&below);
            }
        }
        if let Some(zero) = &head.zero {
            // Where there is a mark already, even one that later data overruled, the hole alone would not do.
            let marked: Vec<_> = punch.iter().flat_map(|range| zero.touched(range)).collect();
            for range in marked {
                punch.remove(range.clone());
                marks.insert(range);
            }
            for range in marks.iter() {
                room::with_half(&self.engine, || zero.reserve(range.clone()))?;
            }
        }
        let needs_mark = !marks.is_empty() && !self.marked;
        Ok(ZeroPlan {
            extent,
            punch: punch.iter().map(bytes).collect(),
            marks: marks.iter().map(bytes).collect(),
            needs_mark,
        })
    }

    /// The plan's holes are punched: the range is zero. Writes marks into the page cache, so that they outlive this
    /// process; a flush makes them durable.
    ///
    /// # Errors
    /// The disk's, or a plan whose mark was not made.
    pub fn zeroed(&mut self, plan: &ZeroPlan) -> io::Result<()> {
        self.touched = true;
        self.check_marked(!plan.marks.is_empty())?;
        let head = self.head();
        let layer = self.at_mut(head);
        layer.dirty |= !plan.punch.is_empty();
        if let Some(zero) = &mut layer.zero {
            for extent in &plan.marks {
                zero.set(blocks(*extent))?;
            }
        }
        for extent in plan.punch.iter().chain(&plan.marks) {
            self.places.set(blocks(*extent), 0);
            self.changed_head(*extent);
        }
        Ok(())
    }

    /// volume.meta says that there are zero marks.
    pub fn marked(&mut self) {
        self.marked = true;
    }

    pub(super) fn check_marked(&self, needed: bool) -> io::Result<()> {
        if needed && !self.marked {
            return Err(io::Error::other("zero marks before volume.meta was marked"));
        }
        Ok(())
    }

    /// A rotten image of the layer was put into it, which has nothing here: whom it is from may have lost that, and another one may have
    /// it. Remembered as long as the store knows these layers.
    pub fn note_lost(&mut self, layer: LayerNo, range: Extent) {
        self.at_mut(layer).lost.insert(blocks(range));
    }

    /// What [`Store::recorded_below`] gives, and what layers there have not got from whoever had lost it.
    pub(super) fn expected_below(&self, range: Range<u64>, rank: u8, recorded: Recorded<'_>) -> RangeSet {
        self.recorded_below(range, rank, &mut |store, layer, part| {
            let mut expected = recorded(store, layer, part);
            expected.extend(store.at(layer).lost.within(blocks(part)).map(bytes));
            expected
        })
    }

    /// The blocks of the range that a layer below a rank has on record, and that no mark above it hides. What it has lost of them
    /// it may get back.
    pub(super) fn recorded_below(&self, range: Range<u64>, rank: u8, recorded: Recorded<'_>) -> RangeSet {
        let (mut rest, mut found) = (RangeSet::default(), RangeSet::default());
        rest.insert(range);
        for (_, layer) in self.up_to(rank - 1).rev() {
            for part in rest.clone().iter() {
                recorded(self, layer, bytes(part.clone()))
                    .into_iter()
                    .for_each(|held| found.insert(blocks(held)));
                if self.folding != Some(layer)
                    && let Some(zero) = &self.at(layer).zero
                {
                    rest.subtract(&zero.zeroes(part));
                }
            }
            if rest.is_empty() {
                break;
            }
        }
        found
    }
}
