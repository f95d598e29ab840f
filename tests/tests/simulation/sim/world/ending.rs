//! The end of a run: peace, health, and the comparison.

use super::authority::has;
use super::{
    BLOCK, Command, CommandId, Conducted, Engine, Event, Extent, HEAL, HOT, Image, Op, Outbox, Report,
    SECOND, World, conductor, hot_block,
};

/// How many engines in a row are told to end.
const CLOSES: u32 = 3;

impl World {
    /// No more faults: everything heals, and the volume becomes healthy.
    pub(super) fn peace(&mut self) {
        self.events = std::mem::take(&mut self.events)
            .into_iter()
            .filter(|d| !matches!(d.event, Event::Fault(_)))
            .collect();
        self.budget = 0;
        self.aftershocks = 0;
        self.at_peace = true;
        self.isolated = None;
        for node in 0..self.nodes.len() {
            self.at(self.now, Event::ContinueNode(node));
            self.at(self.now, Event::Calm(node));
            self.nodes[node].disk.full_until = 0;
            self.cut_until[node] = 0;
            self.away_until[node] = 0;
        }
        let healthy = self.play(self.now + HEAL, |w| w.is_healthy() && w.quiet());
        if !healthy && self.broken.is_none() {
            let status = self.engines.get(&self.current).map(Engine::status);
            let nodes: Vec<_> = self.nodes.iter().map(|n| format!("{:?}", n.disk.records())).collect();
            self.say(|| format!("{status:#?} {nodes:#?}"));
            let why = status.map(|s| {
                let replicas: Vec<_> =
                    s.replicas.iter().map(|r| (r.mode, r.connected, r.last_error.clone())).collect();
                (s.robustness, s.waiting_for, replicas, s.chunks_in_doubt)
            });
            self.fail(format!("the volume does not become healthy: {why:?}"));
        }
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.nodes.iter().all(|n| n.is_up() && !n.is_stopped())
            && self.engines.get(&self.current).is_some_and(|e| {
                e.open
                    && !e.ends
                    && e.status().robustness == conductor::Robustness::Healthy
                    && e.status().chunks_in_doubt == 0
            })
            && self.engines.len() == 1
            && self.starting == 0
    }

    /// Every block read several times; a clean end; all disks equal, layer by layer.
    pub(super) fn verify(&mut self) {
        for _ in 0..3 {
            for n in 0..HOT {
                let q = usize::from(self.dice.chance(500));
                let range = Extent::new(hot_block(n) * BLOCK, BLOCK);
                self.issue(q, 0, Op::Read, range);
                if !self.play(self.now + 30 * SECOND, Self::quiet) {
                    self.fail_unless_broken("a read of the end is not answered");
                    return;
                }
            }
        }
        if !self.play(self.now + HEAL, Self::is_healthy) {
            self.fail_unless_broken("the volume does not stay healthy");
            return;
        }
        let is_settled = |w: &Self| w.members().iter().all(|n| w.nodes[*n].disk.is_settled());
        if !self.play(self.now + HEAL, is_settled) {
            self.fail_unless_broken("a snapshot is never called settled");
            return;
        }
        if !self.last_scrub() {
            return;
        }
        self.at_its_end = true;
        // A connection may break just then, and whoever loses one of two cannot close both: the next engine is told, too.
        let closed = (0..CLOSES).any(|_| self.closes() || !self.play(self.now + HEAL, Self::is_healthy));
        if !closed || !self.is_closed() {
            self.fail_unless_broken("the volume does not close cleanly");
            return;
        }
        let members = self.members();
        if members.len() < self.record.replicas {
            self.note("closed without a replica".into());
        }
        let images: Vec<_> = members.iter().map(|n| (*n, self.nodes[*n].disk.image())).collect();
        if let Some(what) = images.windows(2).find_map(|w| differ(&w[0], &w[1])) {
            self.wrong(what);
        }
        self.check_snapshots(&members);
    }

    /// Tells the engine to end; true if it has closed all replicas that it has, false if it has ended without.
    fn closes(&mut self) -> bool {
        let (told, mut out) = (self.current, Outbox::default());
        let now = self.now;
        if let Some(e) = self.engines.get_mut(&told) {
            let input = Conducted::Command(CommandId(u64::MAX), Command::Shutdown);
            e.conduct(now, Report::Input(input), &mut out);
        }
        self.carry(out);
        self.play(self.now + 60 * SECOND, |w| w.engines.get(&told).is_none_or(|e| e.stopped.is_some()));
        self.is_closed()
    }

    fn is_closed(&self) -> bool {
        let engine = self.engines.get(&self.current);
        engine.is_some_and(|e| e.stopped == Some(conductor::Why::Clean))
    }

    /// Who is in the epoch that counts.
    pub(super) fn members(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|n| self.is_member(*n)).collect()
    }

    /// In the epoch that counts.
    pub(super) fn is_member(&self, node: usize) -> bool {
        self.epoch.as_ref().map_or(node < self.record.replicas, |e| has(e, node))
    }

    pub(super) fn fail_unless_broken(&mut self, what: &str) {
        if self.broken.is_none() {
            self.fail(what.into());
        }
    }
}

/// What two replicas, by number, hold in each layer; a sentence if it is not the same.
fn differ(a: &(usize, Image), b: &(usize, Image)) -> Option<String> {
    let (m, n) = (a.0, b.0);
    let names = |image: &Image| image.keys().cloned().collect::<Vec<_>>();
    if names(&a.1) != names(&b.1) {
        return Some(format!("replicas {m} and {n} have the layers {:?} and {:?}", names(&a.1), names(&b.1)));
    }
    a.1.iter().zip(&b.1).find_map(|((name, x), (_, y))| {
        let block = x.keys().chain(y.keys()).find(|block| x.get(block) != y.get(block))?;
        let (x, y) = (x.get(block), y.get(block));
        Some(format!("replicas {m} and {n} differ in layer {name:?}, block {block}: {x:?} and {y:?}"))
    })
}
