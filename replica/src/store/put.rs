//! Layer images: making a range of one layer exactly what another replica's layer is.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;

use lh_block::{BLOCK, Extent};
use lh_wire::{BlockState, MapPage};

use super::data::{Answer, Store};
use super::disk::{self, Kind};
use super::layer::LayerNo;
use super::load::{blocks, bytes};
use super::ranges::RangeSet;

/// How a range of one layer becomes what a layer image says. The driver punches and writes, then reports.
#[derive(Clone, Debug)]
pub struct PutPlan {
    /// The layer.
    pub layer: LayerNo,
    /// The range.
    pub extent: Extent,
    /// Holes to punch in the layer's file.
    pub punch: Vec<Extent>,
    /// Ranges to write, ascending; the image's data fills them one after another.
    pub write: Vec<Extent>,
    /// The parts of `write` that hold data already: what turns out equal need not be written.
    pub held: Vec<Extent>,
    /// The parts of `punch` that hold data.
    pub lost: Vec<Extent>,
    /// Ranges that get zero marks with the report.
    pub marks: Vec<Extent>,
    /// What the image says that the layer has not.
    pub absent: Vec<Extent>,
    /// Blocks whose state changes. Blocks of `held` that turn out different count, too; the driver adds them.
    pub changed: u32,
    /// [`super::Directory::mark_zeroes`] and then [`Store::marked`] come before the report.
    pub needs_mark: bool,
    /// [`super::Directory::make_zero_map`], [`Store::attach_zero_map`] and [`Store::reserve_marks`] come before the report; if another
    /// plan has brought the layer its map meanwhile ([`Store::has_zero_map`]), the last of these alone.
    pub needs_map: bool,
}

impl PutPlan {
    /// The blocks at these offsets, which the image says the layer has not, stay.
    pub fn keep(&mut self, stays: &BTreeSet<u64>) {
        let mut punch = RangeSet::default();
        self.punch.iter().for_each(|extent| punch.insert(blocks(*extent)));
        for block in stays.iter().map(|at| at / BLOCK) {
            self.changed -= u32::from(punch.overlaps(block..block + 1));
            punch.remove(block..block + 1);
        }
        self.punch = punch.iter().map(bytes).collect();
    }
}

impl Store {
    /// How the range of a layer becomes what `states` says, a state per block. A full disk may show here, or with the
    /// writes.
    ///
    /// # Errors
    /// `InvalidInput`: the range is not made of as many blocks, or data would lie behind the layer's end. The disk's.
    /// Nothing has changed.
    pub fn plan_put(&self, no: LayerNo, extent: Extent, states: &[BlockState]) -> io::Result<PutPlan> {
        let layer = self.at(no);
        let inside =
            usize::try_from(layer.length.saturating_sub(extent.offset) / BLOCK).unwrap_or(usize::MAX);
        let behind = states.iter().skip(inside).any(|s| *s != BlockState::Absent);
        if behind || !extent.is_aligned(BLOCK) || extent.len / BLOCK != states.len() as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let old = self.layer_states(no, extent)?;
        let first = extent.offset / BLOCK;
        let mut sets: [RangeSet; 6] = Default::default();
        let [punch, lost, write, held, marks, absent] = &mut sets;
        let mut changed = 0;
        for (block, (old, new)) in (first..).zip(old.iter().zip(states)) {
            let range = block..block + 1;
            changed += u32::from(old != new);
            if *new == BlockState::Absent {
                absent.insert(range.clone());
            }
            match (*old, *new) {
                (BlockState::Data, BlockState::Data) => {
                    write.insert(range.clone());
                    held.insert(range);
                }
                (_, BlockState::Data) => write.insert(range),
                (BlockState::Absent, BlockState::Absent) | (BlockState::Zero, BlockState::Zero) => {}
                (BlockState::Data, BlockState::Absent) => {
                    punch.insert(range.clone());
                    lost.insert(range);
                }
                (_, BlockState::Absent) => punch.insert(range),
                (_, BlockState::Zero) => marks.insert(range),
            }
        }
        let needs_mark = !marks.is_empty() && !self.marked;
        let needs_map = !marks.is_empty() && layer.zero.is_none();
        let [punch, lost, write, held, marks, absent] = sets.map(|set| set.iter().map(bytes).collect());
        let layer = no;
        let plan = PutPlan {
            layer,
            extent,
            punch,
            write,
            held,
            lost,
            marks,
            absent,
            changed,
            needs_mark,
            needs_map,
        };
        self.reserve_marks(&plan)?;
        Ok(plan)
    }

    /// Makes room for the plan's marks, so that the report does not fail on a full disk. For a layer that gets its zero map only now
    /// this is to be asked again, once [`Store::attach_zero_map`] was.
    ///
    /// # Errors
    /// The disk's.
    pub fn reserve_marks(&self, plan: &PutPlan) -> io::Result<()> {
        let Some(zero) = &self.at(plan.layer).zero else { return Ok(()) };
        plan.marks.iter().try_for_each(|extent| zero.reserve(blocks(*extent)))
    }

    /// Where a layer holds data or zeroes of its own, from a byte on: as many ranges as a page has.
    ///
    /// # Errors
    /// The disk's.
    pub fn layer_map(&self, no: LayerNo, from: u64) -> io::Result<MapPage> {
        let layer = self.at(no);
        let rest = Extent::new(from, layer.length.saturating_sub(from)).narrow(BLOCK);
        let (mut held, mut found, mut end) = (RangeSet::default(), 0, rest.end());
        for extent in disk::extents(&layer.file, rest, layer.look) {
            let (extent, kind) = extent?;
            if kind == Kind::Written {
                held.insert(blocks(extent));
                found += 1;
            }
            if found == MapPage::RANGES_MAX {
                end = extent.end();
                break;
            }
        }
        if let Some(zero) = &layer.zero {
            held.append(&zero.zeroes(blocks(Extent::new(from, end.saturating_sub(from)))));
        }
        let mut ranges: Vec<Extent> = held.iter().take(MapPage::RANGES_MAX + 1).map(bytes).collect();
        if ranges.len() > MapPage::RANGES_MAX {
            ranges.pop();
            end = ranges.last().map_or(end, |r| r.end());
        }
        Ok(MapPage { ranges, next: (end < rest.end()).then_some(end), total: None })
    }

    /// The layer has a zero map: all layers have, but for snapshots that came with an import.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn has_zero_map(&self, layer: LayerNo) -> bool {
        self.at(layer).zero.is_some()
    }

    /// Gives a layer that has none yet the zero map that [`super::Directory::make_zero_map`] made.
    pub fn attach_zero_map(&mut self, map: super::NewZeroMap) {
        if let Some(layer) = self.layers.iter_mut().find(|l| l.name.as_deref() == Some(&map.layer)) {
            layer.zero.get_or_insert(map.zero);
        }
    }

    /// The plan is carried out.
    ///
    /// # Errors
    /// The disk's, or a plan whose mark or map was not made.
    pub fn put_done(&mut self, plan: &PutPlan) -> io::Result<Answer> {
        self.touched = true;
        self.check_marked(!plan.marks.is_empty())?;
        let layer = self.at_mut(plan.layer);
        let rank = layer.rank;
        layer.dirty = true;
        let mut wait = false;
        if let Some(zero) = &mut layer.zero {
            for extent in &plan.write {
                wait |= zero.wrote(blocks(*extent));
            }
            for extent in &plan.punch {
                wait |= zero.cleared(blocks(*extent));
            }
            for extent in &plan.marks {
                zero.set(blocks(*extent))?;
            }
        } else if !plan.marks.is_empty() {
            return Err(io::Error::other("zero marks for a layer without a zero map"));
        }
        if rank != 0 {
            self.places.changed(blocks(plan.extent));
            self.index_put(plan, rank)?;
            self.changed_head(plan.extent);
        }
        Ok(if wait { Answer::AfterFlush } else { Answer::Now })
    }

    /// The index after a change of a layer of the chain: only where no higher layer says anything.
    fn index_put(&mut self, plan: &PutPlan, rank: u8) -> io::Result<()> {
        for extent in &plan.write {
            let open = self.open_above(blocks(*extent), rank);
            self.places.set_all(open.iter(), rank);
        }
        for extent in &plan.marks {
            let open = self.open_above(blocks(*extent), rank);
            self.places.set_all(open.iter(), 0);
        }
        for extent in &plan.punch {
            for part in self.open_above(blocks(*extent), rank).iter() {
                self.resolve(part, rank - 1)?;
            }
        }
        Ok(())
    }

    /// The blocks of the range of which no layer above a rank says anything.
    fn open_above(&self, range: Range<u64>, rank: u8) -> RangeSet {
        let mut open = RangeSet::default();
        for (part, held) in self.places.runs(range.clone()) {
            if held <= rank {
                open.insert(part);
            }
        }
        for layer in self.above(rank) {
            if let Some(zero) = &self.at(layer).zero {
                open.subtract(&zero.zeroes(range.clone()));
            }
        }
        open
    }
}
