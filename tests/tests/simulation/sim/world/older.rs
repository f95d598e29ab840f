//! What is older than it should be: a directory that was away, as one of a disk that is not mounted, while another one was made in its
//! place and filled; the authority's epoch, put back from a copy.

use super::{CHUNK, Disk, Event, HEAL, MS, Outbox, Quorum, SECOND, SIZE, World};

impl World {
    /// Once all is well: something older is put back.
    pub(super) fn put_something_older_back(&mut self) {
        if self.quorum == Quorum::Any && self.dice.chance(500) {
            self.put_an_older_epoch_back();
        } else {
            self.put_an_older_directory_back();
        }
    }

    /// A directory goes, and comes back when its replica is in sync without it.
    fn put_an_older_directory_back(&mut self) {
        let node = self.some_node();
        let mut out = Outbox::default();
        let old = self.exchange_disk(node, Disk::new(SIZE, CHUNK), &mut out);
        // Else the engine that lets in the new one is the one that let in the old one.
        if self.dice.chance(300) {
            self.replace_engine(&mut out);
        }
        self.carry(out);
        if !self.goes_on(Self::is_healthy) {
            return;
        }
        let mut out = Outbox::default();
        self.replace_engine(&mut out);
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            self.kill_node(other, &mut out);
        }
        self.exchange_disk(node, old, &mut out);
        if self.quorum == Quorum::Any {
            self.note("authority lost its epoch".into());
            self.epoch = None;
        }
        self.carry(out);
        self.note("older directory put back".into());
        self.goes_on(Self::is_healthy);
    }

    /// The volume goes on without a replica, and the authority has the epoch of before: the change was the only one since.
    fn put_an_older_epoch_back(&mut self) {
        let node = self.some_node();
        let before = self.epoch.clone();
        let mut out = Outbox::default();
        self.away_until[node] = self.now + 2 * HEAL;
        self.kill_node(node, &mut out);
        self.carry(out);
        let is_without = |w: &Self| w.epoch.as_ref().is_some_and(|e| !super::authority::has(e, node));
        if !self.goes_on(is_without) {
            return;
        }
        // What is told behind an epoch is not awaited.
        let told = self.now + SECOND;
        self.play(told, |w| w.now >= told);
        let mut out = Outbox::default();
        self.replace_engine(&mut out);
        (0..self.nodes.len()).for_each(|node| self.kill_node(node, &mut out));
        self.away_until[node] = 0;
        // Who has recorded it has to be heard.
        self.grace = 3 * SECOND;
        self.epoch = before;
        self.carry(out);
        self.note("older epoch put back".into());
        self.goes_on(Self::is_healthy);
    }

    pub(super) fn some_node(&mut self) -> usize {
        usize::try_from(self.dice.below(self.nodes.len() as u64)).unwrap_or(0)
    }

    /// Another disk in the node's place. The one that was there.
    pub(super) fn exchange_disk(&mut self, node: usize, disk: Disk, out: &mut Outbox) -> Disk {
        self.note_lived();
        self.break_conns(node, out);
        let delay = self.dice.between(20 * MS, 600 * MS);
        out.later(self.now + delay, Event::StartNode(node));
        self.nodes[node].exchange_disk(disk)
    }

    /// Load, until this has come. False: it does not come.
    pub(super) fn goes_on(&mut self, enough: impl Fn(&Self) -> bool) -> bool {
        self.budget = self.dice.between(30, 200);
        self.at(self.now + MS, Event::Clients(true));
        let well = self.play(self.now + HEAL + SECOND, |w| w.budget == 0 && w.quiet() && enough(w));
        if !well {
            self.fail_unless_broken("the volume does not go on with what it has");
        }
        well
    }
}
