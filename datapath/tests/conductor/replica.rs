//! A replica as an engine sees it, without disk and network: what `docs/invariants.md` demands of one, and no more.
//! Blocks hold numbers. What was not flushed may be lost with the power, block by block.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use datapath::conductor::{Body, Refusal};
use lh_block::{BLOCK, Epoch, Extent, Generation, Instance};
use lh_wire::{
    ChainOp, Control, FoldState, HashState, Keep, Kept, LayerInfo, MapPage, OpCode, PowerSince, ReplicaState,
    Status, Verified, WRITE_WINDOW,
};

use crate::rng::Rng;

pub(crate) type Blocks = Vec<Option<u32>>;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layer {
    pub(crate) name: String,
    /// The snapshot that it stands on; empty: none.
    pub(crate) parent: String,
    pub(crate) removed: bool,
    /// When the operation was that made it, or made it a snapshot.
    pub(crate) created: String,
    pub(crate) blocks: Blocks,
    stable: Blocks,
    /// What its checksums say.
    pub(crate) recorded: Option<Blocks>,
}

impl Layer {
    fn empty(name: &str, blocks: usize) -> Self {
        let (blocks, stable) = (vec![None; blocks], vec![None; blocks]);
        let (parent, created) = (String::new(), String::new());
        Self { name: name.into(), parent, removed: false, created, blocks, stable, recorded: None }
    }

    /// The head over this snapshot.
    fn head_over(parent: &str, blocks: usize) -> Self {
        Self { parent: parent.into(), ..Self::empty("", blocks) }
    }
}

impl Layer {
    fn should_hold(&self, block: usize) -> bool {
        self.recorded.as_ref().is_some_and(|recorded| recorded[block].is_some())
    }

    fn is_rotten(&self, block: usize) -> bool {
        self.recorded.as_ref().is_some_and(|recorded| recorded[block] != self.blocks[block])
    }

    fn verified(&self, blocks: std::ops::Range<usize>) -> Verified {
        let all = if self.recorded.is_some() { u16::MAX } else { 0 };
        let rotten = blocks.enumerate().filter(|(_, b)| self.is_rotten(*b));
        Verified { known: all, rotten: rotten.fold(0, |bits, (n, _)| bits | 1 << n) }
    }
}

/// What goes with a message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Payload {
    None,
    /// A number per block of the range.
    Numbers(Vec<u32>),
    /// What a layer holds of the range.
    Image(String, Blocks),
    Layer(String),
    Control(Control),
    Answer(Result<Body, Refusal>),
}

impl Payload {
    /// Bytes that it would take on a connection.
    pub(crate) fn bytes(&self) -> u32 {
        let blocks = match self {
            Self::Numbers(numbers) => numbers.len(),
            Self::Image(_, blocks) => blocks.iter().flatten().count(),
            Self::None | Self::Layer(_) | Self::Control(_) | Self::Answer(_) => 0,
        };
        u32::try_from(blocks as u64 * BLOCK).expect("small")
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Replica {
    pub(crate) name: String,
    pub(crate) alive: bool,
    /// Takes no messages before this time.
    pub(crate) stalled_until: u64,
    /// Has prepared nothing before this time: its disk takes long to sync.
    pub(crate) syncs_until: u64,
    /// Has put no image into a layer before this time.
    pub(crate) puts_until: u64,
    /// Its disk fails whatever syncs it.
    pub(crate) syncs_fail: bool,
    /// Closed cleanly: nothing is recorded any more in this session.
    closed: bool,
    /// Its program records rounds; and has space for them.
    pub(crate) knows_rounds: bool,
    pub(crate) epochs_full: bool,
    /// Has no space for layer images.
    pub(crate) full: bool,
    /// Has no space for what clients write.
    pub(crate) head_full: bool,
    /// Blocks that its disk does not give until they are written; and whether it does not take them either.
    pub(crate) unreadable: Vec<usize>,
    pub(crate) unwritable: bool,
    /// Engine and session that are let in.
    pub(crate) session: Option<(u64, u64)>,
    pub(crate) size: u64,
    chunk: u64,
    fence: Option<(Generation, Instance)>,
    previous: Generation,
    pub(crate) epoch: Option<Epoch>,
    /// Parents before those that stand on them, the head last.
    pub(crate) layers: Vec<Layer>,
    pub(crate) prepared: Option<(Instance, ChainOp)>,
    committed: Option<Instance>,
    pub(crate) rebuilding: bool,
    /// What counts once the rebuild has ended.
    next_epoch: Option<Epoch>,
    /// Another program has written it.
    pub(crate) imported: bool,
    pub(crate) backed: Option<bool>,
    pub(crate) kept: Option<Kept>,
    /// Up to where an engine has said last that all is stable.
    pub(crate) settled: Option<String>,
    /// The snapshot that is being folded, by an engine before: it goes on until it is stopped.
    folding: Option<String>,
    /// Folds do not end at once, and how the last one was stopped.
    pub(crate) slow_folds: bool,
    fold_stopped: Option<FoldState>,
    /// How the last hashing went; none since it was opened.
    hashed: Option<HashState>,
    intent: BTreeSet<u64>,
    clean: bool,
    lived: bool,
    powered: bool,
    power: Option<PowerSince>,
    /// It hears that nothing is in doubt.
    pub(crate) resolves: bool,
    /// Last writes of the session, and what sessions before left.
    window: VecDeque<Extent>,
    in_doubt: Vec<Extent>,
    /// Times that it was asked what somebody else has missed.
    pub(crate) asked_for_others: u32,
    /// Images were put into layers that no flush followed; and the end of a rebuild came then.
    images_unflushed: bool,
    pub(crate) ended_unflushed: bool,
}

impl Replica {
    pub(crate) fn new(name: &str, size: u64, chunk: u64) -> Self {
        let blocks = usize::try_from(size / BLOCK).expect("small");
        Self {
            name: name.into(),
            alive: true,
            stalled_until: 0,
            syncs_until: 0,
            puts_until: 0,
            syncs_fail: false,
            closed: false,
            knows_rounds: true,
            epochs_full: false,
            full: false,
            head_full: false,
            unreadable: Vec::new(),
            unwritable: false,
            session: None,
            size,
            chunk,
            fence: None,
            previous: Generation::default(),
            epoch: None,
            layers: vec![Layer::empty("", blocks)],
            prepared: None,
            committed: None,
            rebuilding: false,
            next_epoch: None,
            imported: false,
            backed: None,
            kept: None,
            settled: None,
            folding: None,
            slow_folds: false,
            fold_stopped: None,
            hashed: None,
            intent: BTreeSet::new(),
            clean: true,
            lived: true,
            powered: true,
            power: None,
            resolves: true,
            window: VecDeque::new(),
            in_doubt: Vec::new(),
            asked_for_others: 0,
            images_unflushed: false,
            ended_unflushed: false,
        }
    }

    /// Lets an engine in, or tells which generation shut it out.
    pub(crate) fn admit(
        &mut self,
        generation: Generation,
        instance: Instance,
        session: (u64, u64),
    ) -> Result<(), Generation> {
        if let Some((g, i)) = self.fence
            && (generation < g || (generation == g && instance != i))
        {
            return Err(g);
        }
        self.end_session();
        if !self.powered && self.power.is_none() {
            let late = self.fence.is_some_and(|(fence, _)| fence == generation);
            self.power = Some(PowerSince { generation, late });
        }
        self.previous = self.fence.map(|(g, _)| g).unwrap_or_default();
        self.fence = Some((generation, instance));
        self.session = Some(session);
        Ok(())
    }

    pub(crate) fn end_session(&mut self) {
        self.session = None;
        self.closed = false;
        self.in_doubt.extend(self.window.drain(..));
    }

    /// The process dies; what it wrote stays in the page cache. The next one finds the layers in another order.
    pub(crate) fn kill(&mut self) {
        self.end_session();
        self.alive = false;
        self.sort_layers();
        (self.folding, self.fold_stopped, self.hashed) = (None, None, None);
        self.in_doubt.clear();
        self.lived = self.clean;
    }

    /// The power goes, and with it all that was not synced.
    pub(crate) fn lose_power(&mut self) {
        self.kill();
        self.powered = self.clean;
        self.power = None;
        for layer in &mut self.layers {
            layer.blocks.clone_from(&layer.stable);
        }
    }

    /// The power goes.
    pub(crate) fn cut_power(&mut self, rng: &mut Rng) {
        self.kill();
        self.powered = self.clean;
        self.power = None;
        for layer in &mut self.layers {
            for (block, stable) in layer.blocks.iter_mut().zip(&layer.stable) {
                if block != stable && rng.one_in(2) {
                    *block = *stable;
                }
            }
        }
    }

    /// The power goes, and with it everything that was not flushed; it is back at once.
    pub(crate) fn forget_unflushed(&mut self) {
        self.lose_power();
        self.alive = true;
    }

    pub(crate) const fn has_prepared(&self) -> bool {
        self.prepared.is_some()
    }

    /// An operation that no engine knows of.
    pub(crate) fn prepare_something_else(&mut self) {
        self.prepared = Some((Instance(1), ChainOp::MarkRemoved { name: "other".into() }));
    }

    /// As a directory is read: what stands on fewer layers comes first, then by name. A process that has made layers one by one tells
    /// the last one last, on whatever branch it is.
    fn sort_layers(&mut self) {
        let depths: BTreeMap<String, usize> =
            (0..self.layers.len()).map(|at| (self.layers[at].name.clone(), self.path(at).count())).collect();
        self.layers.sort_by_cached_key(|l| (l.name.is_empty(), depths[&l.name], format!("{}.img", l.name)));
    }

    /// Nothing says that this snapshot, and what stands on it, is stable.
    pub(crate) fn unsettle(&mut self, name: &str) {
        let layer = self.layers.iter().find(|l| l.name == name).expect("it is here");
        self.settled = Some(layer.parent.clone());
    }

    pub(crate) fn goes_on_folding(&mut self, name: &str) {
        self.folding = Some(name.into());
    }

    pub(crate) const fn is_folding(&self) -> bool {
        self.folding.is_some()
    }

    /// What it folds is in the layer that stands on it, if one does, and that is stable.
    pub(crate) fn end_fold(&mut self) {
        let Some(name) = self.folding.take() else { return };
        let at = self.layers.iter().position(|l| l.name == name).expect("it was there");
        let gone = self.layers.remove(at);
        if let Some(above) = self.layers.iter_mut().find(|l| l.parent == name) {
            for (block, below) in above.blocks.iter_mut().zip(gone.blocks) {
                *block = block.or(below);
            }
            above.recorded = None;
            above.parent.clone_from(&gone.parent);
            above.stable.clone_from(&above.blocks);
        }
        if self.settled.as_ref() == Some(&name) {
            self.settled = Some(gone.parent);
        }
    }

    /// A part of what it folds is in the layer that stands on it, when the fold breaks off: the first block.
    pub(crate) fn fold_in_part(&mut self) {
        let Some(name) = self.folding.clone() else { return };
        let folded =
            self.layers.iter().find(|l| l.name == name).map(|l| l.blocks.clone()).expect("it is here");
        let first = folded.iter().position(Option::is_some);
        if let (Some(n), Some(above)) = (first, self.layers.iter_mut().find(|l| l.parent == name)) {
            above.blocks[n] = above.blocks[n].or(folded[n]);
            above.recorded = None;
        }
        self.stop_folding("it broke off");
    }

    /// What it tells of a fold that did not end, until the next one begins.
    fn stop_folding(&mut self, why: &str) {
        if let Some(name) = self.folding.take() {
            let error = Some(why.to_owned());
            self.fold_stopped = Some(FoldState { name, error, ..FoldState::default() });
        }
    }

    /// Snapshots of the head's branch above the settled one, base first.
    pub(crate) fn unsettled(&self) -> Vec<String> {
        let below = self.path(self.layers.len() - 1).skip(1).map(|at| self.layers[at].name.clone());
        let mut names: Vec<String> = below.take_while(|name| self.settled.as_ref() != Some(name)).collect();
        names.reverse();
        names
    }

    /// Those of them that are snapshots still.
    pub(crate) fn is_settled(&self) -> bool {
        let unsettled = self.unsettled();
        self.layers.iter().all(|l| l.removed || !unsettled.contains(&l.name))
    }

    /// Snapshots that nobody has called stable are all the same, as on one that was just filled.
    fn unsettled_are_synced(&self) -> bool {
        let unsettled = self.unsettled();
        self.layers.iter().filter(|l| unsettled.contains(&l.name)).all(|l| l.stable == l.blocks)
    }

    /// Places of the layer and of all that it stands on, the base last.
    fn path(&self, top: usize) -> impl Iterator<Item = usize> + '_ {
        let below = |at: &usize| {
            let parent = &self.layers[*at].parent;
            self.layers.iter().position(|l| !parent.is_empty() && l.name == *parent)
        };
        std::iter::successors(Some(top), below)
    }

    pub(crate) const fn intent(&self) -> &BTreeSet<u64> {
        &self.intent
    }

    /// All that it holds is stable.
    pub(crate) fn is_synced(&self) -> bool {
        self.layers.iter().all(|layer| layer.stable == layer.blocks)
    }

    fn sync(&mut self) {
        for layer in &mut self.layers {
            layer.stable.clone_from(&layer.blocks);
        }
    }

    /// What a block reads as through this layer and all that it stands on.
    pub(crate) fn read(&self, block: usize, top: usize) -> u32 {
        self.path(top).find_map(|at| self.layers[at].blocks[block]).unwrap_or(0)
    }

    /// It is read from a layer by whose checksums it is rotten, or past one that by its own has lost it.
    fn reads_rot(&self, block: usize, top: usize) -> bool {
        let met = self.path(top).find(|at| {
            let layer = &self.layers[*at];
            layer.blocks[block].is_some() || layer.is_rotten(block)
        });
        met.is_some_and(|at| self.layers[at].is_rotten(block))
    }

    fn write(&mut self, range: Extent) {
        self.clean = false;
        self.intent.extend(range.offset / self.chunk..range.end().div_ceil(self.chunk));
        if self.window.len() == WRITE_WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(range);
    }

    /// A request about data, and its answer.
    pub(crate) fn data(
        &mut self,
        op: OpCode,
        range: Extent,
        verify: bool,
        aux: u32,
        payload: &Payload,
    ) -> (Status, u32, Payload) {
        let blocks = span(range);
        if let Some(answer) = self.meets_bad(op, range, payload) {
            return answer;
        }
        match (op, payload) {
            (OpCode::Ping, _) => (Status::Ok, 0, Payload::None),
            (OpCode::Flush, _) if self.syncs_fail => (Status::Io, 0, Payload::None),
            (OpCode::Flush, _) => {
                self.images_unflushed = false;
                self.sync();
                (Status::Ok, 0, Payload::None)
            }
            (OpCode::Read, _) => {
                let top = self.layers.len() - 1;
                (Status::Ok, 0, Payload::Numbers(blocks.map(|b| self.read(b, top)).collect()))
            }
            (OpCode::Write, _) if self.head_full => (Status::NoSpace, 0, Payload::None),
            (OpCode::Write, Payload::Numbers(numbers)) => {
                self.write(range);
                let head = self.layers.last_mut().expect("a head");
                for (block, number) in blocks.zip(numbers) {
                    head.blocks[block] = Some(*number);
                }
                (Status::Ok, 0, Payload::None)
            }
            (OpCode::ReadLayer, Payload::Layer(name)) => match self.layers.iter().find(|l| l.name == *name) {
                Some(_) if aux == lh_wire::MERGED => {
                    let top = self.layers.iter().position(|l| l.name == *name).expect("found");
                    let sound = |b| (!self.reads_rot(b, top)).then(|| self.read(b, top));
                    let image: Blocks = blocks.map(sound).collect();
                    match verify && image.contains(&None) {
                        true => (Status::Rotten, 0, Payload::None),
                        false => (Status::Ok, 0, Payload::Image(name.clone(), image)),
                    }
                }
                Some(layer) if verify && span(range).any(|b| layer.is_rotten(b)) => {
                    (Status::Rotten, 0, Payload::None)
                }
                Some(layer) => (Status::Ok, 0, Payload::Image(name.clone(), layer.blocks[blocks].to_vec())),
                None => (Status::Refused, 0, Payload::None),
            },
            (OpCode::DigestLayer, Payload::Layer(name)) => match self.layers.iter().find(|l| l.name == *name)
            {
                Some(layer) => {
                    let rotten = blocks.clone().enumerate().filter(|(_, b)| verify && layer.is_rotten(*b));
                    let bit = |(n, _): (usize, usize)| lh_wire::part_bit(range.len, n as u64 * BLOCK);
                    let bits = rotten.fold(0, |all, n| all | bit(n));
                    (Status::Ok, bits, Payload::Image(name.clone(), layer.blocks[blocks].to_vec()))
                }
                None => (Status::Refused, 0, Payload::None),
            },
            (OpCode::CompareLayer, Payload::Image(name, theirs)) => {
                match self.layers.iter().find(|l| l.name == *name) {
                    Some(layer) => {
                        let own = &layer.blocks[blocks];
                        let differ = own.iter().zip(theirs).enumerate().filter(|(_, (a, b))| a != b);
                        let bit = |n: usize| lh_wire::part_bit(range.len, n as u64 * BLOCK);
                        let rotten = span(range).enumerate().filter(|(_, b)| verify && layer.is_rotten(*b));
                        let bits = differ.map(|(n, _)| n).chain(rotten.map(|(n, _)| n));
                        (Status::Ok, bits.fold(0, |all, n| all | bit(n)), Payload::None)
                    }
                    None => (Status::Refused, 0, Payload::None),
                }
            }
            (OpCode::VerifyLayer, Payload::Layer(name)) => {
                match self.layers.iter().find(|l| l.name == *name) {
                    Some(layer) => (Status::Ok, layer.verified(blocks).bits(), Payload::None),
                    None => (Status::Refused, 0, Payload::None),
                }
            }
            (OpCode::PutLayer, Payload::Image(name, _)) if verify && self.is_sound(range, name) => {
                (Status::Ok, 0, Payload::None)
            }
            (OpCode::PutLayer, _) if self.full => (Status::NoSpace, 0, Payload::None),
            (OpCode::PutLayer, Payload::Image(name, image)) => {
                // What a rotten image of the head is without stays.
                let keeps = verify && name.is_empty();
                self.put_layer(range, name, image, keeps)
            }
            (OpCode::ClearIntent, _) => {
                for chunk in range.offset / self.chunk..range.end().div_ceil(self.chunk) {
                    self.intent.remove(&chunk);
                }
                (Status::Ok, 0, Payload::None)
            }
            _ => (Status::Invalid, 0, Payload::None),
        }
    }

    /// What becomes of a request that meets a block which the disk does not give; writing makes it good.
    fn meets_bad(&mut self, op: OpCode, range: Extent, payload: &Payload) -> Option<(Status, u32, Payload)> {
        let layer = match payload {
            Payload::Layer(name) | Payload::Image(name, _) => self.layers.iter().find(|l| l.name == *name),
            _ => None,
        };
        let holds = |block: &usize| match op {
            OpCode::Read | OpCode::Write => true,
            _ => layer.is_some_and(|layer| layer.blocks[*block].is_some()),
        };
        let met = |block: &&usize| span(range).contains(block) && holds(block);
        let bad: Vec<usize> = self.unreadable.iter().filter(met).copied().collect();
        match op {
            _ if bad.is_empty() => None,
            // No more is known of it than that it may be another.
            OpCode::CompareLayer => Some((Status::Ok, u32::MAX, Payload::None)),
            OpCode::Write | OpCode::PutLayer if !self.unwritable => {
                self.unreadable.retain(|block| !bad.contains(block));
                None
            }
            _ => Some((Status::Io, 0, Payload::None)),
        }
    }

    /// The layer has data in the range, all of which is what its checksums say.
    fn is_sound(&self, range: Extent, name: &str) -> bool {
        let layer = self.layers.iter().find(|l| l.name == name && l.recorded.is_some());
        layer.is_some_and(|l| span(range).all(|block| l.blocks[block].is_some() && !l.is_rotten(block)))
    }

    fn put_layer(
        &mut self,
        range: Extent,
        name: &str,
        image: &Blocks,
        keeps: bool,
    ) -> (Status, u32, Payload) {
        assert!(name.is_empty() || self.folding.is_none(), "{name} is written beside a fold");
        // A copy needs no mark: what it repairs is marked, and what is rebuilt says so.
        (self.clean, self.images_unflushed) = (false, true);
        let Some(layer) = self.layers.iter_mut().find(|l| l.name == name) else {
            return (Status::Refused, 0, Payload::None);
        };
        let mut changed = 0;
        for (block, new) in span(range).zip(image).filter(|(_, new)| new.is_some() || !keeps) {
            changed += u32::from(layer.blocks[block] != *new);
            layer.blocks[block] = *new;
        }
        if changed > 0 && span(range).any(|block| layer.is_rotten(block)) {
            // Something else was meant to be there from now on.
            layer.recorded = None;
        }
        (Status::Ok, changed, Payload::None)
    }

    /// A control request and its answer.
    pub(crate) fn control(&mut self, control: &Control) -> Result<Body, Refusal> {
        match control {
            _ if self.closed => return Err(Refusal::Said("it is closed".into())),
            Control::State => return Ok(Body::State(Box::new(self.state()))),
            Control::SetEpoch { epoch, .. } => {
                if self.epoch.as_ref().is_some_and(|e| e != epoch && e.order() >= epoch.order()) {
                    return Err(Refusal::Said("a younger epoch is here".into()));
                }
                let is_known = self.epoch.as_ref() == Some(epoch);
                if is_known && !self.knows_rounds {
                    return Ok(Body::Done);
                }
                if is_known && self.epochs_full {
                    return Err(Refusal::NoSpace);
                }
                let epoch = Some(self.as_known(epoch));
                *(if self.rebuilding { &mut self.next_epoch } else { &mut self.epoch }) = epoch;
            }
            Control::Resolved if !self.resolves => return Err(Refusal::Said("not now".into())),
            Control::Resolved => {
                self.in_doubt.clear();
                (self.lived, self.powered) = (true, true);
            }
            Control::Prepare { id, op } => match &self.prepared {
                Some((other, _)) if other != id => return Err(Refusal::Said("another is prepared".into())),
                _ => self.prepared = Some((*id, op.clone())),
            },
            Control::Commit { id } | Control::Switch { id } => return self.commit(*id),
            Control::Abort { id } => {
                if self.committed == Some(*id) {
                    return Err(Refusal::Said("it was carried out".into()));
                }
                self.prepared = self.prepared.take().filter(|(p, _)| p != id);
            }
            // What is settled on the members need not be here yet.
            Control::Settled { .. } if self.rebuilding => {}
            Control::Settled { snapshot } => self.settled = Some(snapshot.clone()),
            // It remembers nothing of others: everything is compared.
            Control::Missed { .. } => {
                self.asked_for_others += 1;
                return Err(Refusal::Said("not known".into()));
            }
            Control::LayerMap { layer, from, recorded } => {
                // It is filled where a member should hold anything, whatever its own checksums say that it held.
                assert!(!*recorded || !self.rebuilding, "who is filled is asked what is on record");
                let Some(layer) = self.layers.iter().find(|l| l.name == *layer) else {
                    return Err(Refusal::Said("no such layer".into()));
                };
                let told = |n: &usize| layer.blocks[*n].is_some() || *recorded && layer.should_hold(*n);
                let held = (0..layer.blocks.len()).filter(told).map(|n| Extent::new(n as u64 * BLOCK, BLOCK));
                let ranges = held.filter(|block| block.offset >= *from).collect();
                return Ok(Body::Map(Box::new(MapPage { ranges, next: None, total: None })));
            }
            Control::RebuildBegin { size, chain, keep } => self.begin_rebuild(*size, chain, keep.as_ref()),
            Control::Fold { name, .. } => {
                if !self.layers.iter().any(|l| l.name == *name && l.removed) {
                    return Err(Refusal::Said("there is no removed snapshot of that name".into()));
                }
                if self.layers.iter().filter(|l| l.parent == *name).count() > 1 {
                    return Err(Refusal::Said("several layers stand on it".into()));
                }
                self.fold_stopped = None;
                self.folding = Some(name.clone());
                if !self.slow_folds {
                    self.end_fold();
                }
            }
            Control::Hash { snapshots, .. } => {
                let is_gone = |name: &&String| !self.layers.iter().any(|l| l.name == **name);
                let failed = snapshots.iter().filter(is_gone).map(|name| (name.clone(), "it is gone".into()));
                self.hashed = Some(HashState { failed: failed.collect(), ..HashState::default() });
                for layer in self.layers.iter_mut().filter(|l| snapshots.contains(&l.name)) {
                    layer.recorded.get_or_insert_with(|| layer.blocks.clone());
                }
            }
            Control::FoldStop => self.stop_folding("it was stopped"),
            Control::HashStop => {}
            Control::RebuildEnd => {
                self.ended_unflushed |= self.images_unflushed;
                self.sync();
                self.rebuilding = false;
                self.kept = None;
                self.epoch = self.next_epoch.take().or_else(|| self.epoch.take());
                (self.lived, self.powered) = (true, true);
            }
            Control::Close if self.syncs_fail => return Err(Refusal::Failed),
            Control::Close => {
                self.sync();
                self.closed = true;
                self.clean = true;
                self.intent.clear();
                self.window.clear();
                self.in_doubt.clear();
            }
        }
        Ok(Body::Done)
    }

    /// It takes over a chain, and what it holds of that.
    fn begin_rebuild(&mut self, size: u64, chain: &[LayerInfo], keep: Option<&Keep>) {
        let blocks = usize::try_from(size / BLOCK).expect("small");
        self.prepared = None;
        self.clean = false;
        self.settled = None;
        let based = keep.is_some() && (!self.rebuilding || self.kept.is_some());
        self.kept = keep.filter(|_| based).map(|keep| Kept { unsure: keep.unsure.clone() });
        self.rebuilding = true;
        self.next_epoch = None;
        let mut old = std::mem::take(&mut self.layers);
        let mut head = old.pop();
        let mut held = |name: &str| match keep {
            Some(keep) if keep.head == name => head.take(),
            Some(_) => old.iter().position(|l| l.name == name && !name.is_empty()).map(|at| old.remove(at)),
            None => None,
        };
        let layer = |l: &LayerInfo| Layer {
            removed: l.removed,
            name: l.name.clone(),
            parent: l.parent.clone(),
            created: l.created.clone(),
            ..held(&l.name).unwrap_or_else(|| Layer::empty(&l.name, blocks))
        };
        self.layers = chain.iter().map(layer).collect();
        // It reads its directory anew.
        self.sort_layers();
    }

    fn commit(&mut self, id: Instance) -> Result<Body, Refusal> {
        if self.committed == Some(id) {
            return Ok(Body::Done);
        }
        match self.prepared.take() {
            Some((prepared, op)) if prepared == id => {
                let kept = op.snapshot().unwrap_or_default();
                match op {
                    ChainOp::Snapshot { name, created, .. } => self.put_head_over(&name, &created),
                    ChainOp::MarkRemoved { name } => {
                        self.layers.iter_mut().filter(|l| l.name == name).for_each(|l| l.removed = true);
                    }
                    ChainOp::Revert { name, created } => {
                        self.stop_folding("the chain is changed");
                        assert!(self.unsettled_are_synced(), "what is left behind is settled by nobody");
                        let blocks = self.layers.pop().expect("a head").blocks.len();
                        self.layers.push(Layer { created, ..Layer::head_over(&name, blocks) });
                    }
                    ChainOp::Expand { size, created, .. } => {
                        self.put_head_over(&kept, &created);
                        let blocks = usize::try_from(size / BLOCK).expect("small");
                        self.size = size;
                        for layer in &mut self.layers {
                            layer.blocks.resize(blocks, None);
                            layer.stable.resize(blocks, None);
                            layer.recorded = None;
                        }
                    }
                }
                self.committed = Some(id);
                Ok(Body::Done)
            }
            other => {
                self.prepared = other;
                Err(Refusal::Said("it was not prepared here".into()))
            }
        }
    }

    /// The head becomes this snapshot, and an empty one is put over it.
    fn put_head_over(&mut self, name: &str, created: &str) {
        let head = self.layers.last_mut().expect("a head");
        (head.name, head.created) = (name.into(), created.into());
        let blocks = head.blocks.len();
        self.layers.push(Layer { created: created.into(), ..Layer::head_over(name, blocks) });
    }

    /// As its program reads and writes it.
    fn as_known(&self, epoch: &Epoch) -> Epoch {
        Epoch { round: epoch.round.filter(|_| self.knows_rounds), ..epoch.clone() }
    }

    fn state(&self) -> ReplicaState {
        let chain = self
            .layers
            .iter()
            .map(|l| LayerInfo {
                name: l.name.clone(),
                parent: l.parent.clone(),
                removed: l.removed,
                created: l.created.clone(),
                length: self.size,
                ..LayerInfo::default()
            })
            .collect();
        ReplicaState {
            size: self.size,
            previous_generation: self.previous,
            epoch: self.epoch.as_ref().map(|epoch| self.as_known(epoch)),
            chain,
            prepared: self.prepared.clone(),
            committed: self.committed,
            in_doubt: self.in_doubt.clone(),
            intent_chunk: self.chunk,
            intent: self.intent.iter().map(|n| Extent::new(n * self.chunk, self.chunk)).collect(),
            lived: self.lived,
            powered: self.powered,
            power_since: self.power.filter(|_| !self.powered),
            rebuilding: self.rebuilding,
            unsettled: self.unsettled(),
            clean: self.clean,
            imported: self.imported,
            backed: self.backed,
            kept: self.kept.clone(),
            fold: (self.folding.clone())
                .map(|name| FoldState { name, ..FoldState::default() })
                .or_else(|| self.fold_stopped.clone()),
            hash: self.hashed.clone(),
        }
    }
}

pub(crate) fn span(range: Extent) -> std::ops::Range<usize> {
    let at = |n: u64| usize::try_from(n / BLOCK).expect("small");
    at(range.offset)..at(range.end())
}
