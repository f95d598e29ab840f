//! What goes wrong, carried out.

use super::{Command, Engine, Event, Fault, MS, Outbox, Packet, SECOND, World};

impl World {
    pub(super) fn kill_engine(&mut self, number: u64, out: &mut Outbox) {
        self.judge_scrub(number);
        let Some(e) = self.engines.remove(&number) else { return };
        if number == self.current {
            self.forget_what_was_asked();
        }
        for read in e.slots.iter().flatten().filter_map(|s| s.read) {
            self.history.read_ends(read);
        }
        let conns: Vec<_> =
            self.conns.iter().filter(|(_, c)| c.engine == number).map(|(id, _)| *id).collect();
        for conn in conns {
            out.close(conn);
        }
        self.handshakes.retain(|(engine, ..), _| *engine != number);
    }

    pub(super) fn kill_node(&mut self, node: usize, out: &mut Outbox) {
        let delay = self.dice.between(20 * MS, 600 * MS);
        self.take_away(node, delay, out);
    }

    /// The node's replica is killed, and started again after a while.
    fn take_away(&mut self, node: usize, delay: u64, out: &mut Outbox) {
        self.note_lived();
        self.nodes[node].kill(&mut self.dice);
        self.judge_loss();
        self.break_conns(node, out);
        out.later(self.now + delay, Event::StartNode(node));
    }

    pub(super) fn break_conns(&mut self, node: usize, out: &mut Outbox) {
        let conns: Vec<_> =
            self.conns.iter().filter(|(_, c)| c.node == node && !c.closed).map(|(id, _)| *id).collect();
        for conn in conns {
            out.engine_gets(conn, Packet::End);
        }
    }

    pub(super) fn thaw(&mut self, number: u64, out: &mut Outbox) {
        let Some(e) = self.engines.get_mut(&number) else { return };
        e.frozen = false;
        for event in std::mem::take(&mut e.waiting) {
            self.happens(event, out);
        }
        // Nobody needs it any more; it has shown whether it harms.
        if number != self.current {
            let delay = self.dice.between(MS, 3 * SECOND);
            out.later(self.now + delay, Event::EndEngine(number));
        }
    }

    pub(super) fn fault(&mut self, fault: Fault, out: &mut Outbox) {
        self.say(|| format!("fault: {fault:?}"));
        self.note(fault.name().into());
        let now = self.now;
        match fault {
            Fault::KillEngine => self.replace_engine(out),
            Fault::FreezeEngine(time) => {
                if let Some(e) = self.engines.get_mut(&self.current) {
                    e.frozen = true;
                    self.frozen_until = self.frozen_until.max(now + time);
                    out.later(now + time, Event::ContinueEngine(self.current));
                    let delay = self.dice.between(10 * MS, 2 * SECOND);
                    out.later(now + delay, Event::StartEngine(false));
                }
            }
            Fault::Isolate(node, time) => {
                if self.engines.contains_key(&self.current) {
                    self.isolated = Some((self.current, node, now + time));
                    let delay = self.dice.between(10 * MS, 500 * MS);
                    out.later(now + delay, Event::StartEngine(false));
                    let delay = self.dice.between(MS, 3 * SECOND);
                    out.later(now + time + delay, Event::EndEngine(self.current));
                }
            }
            Fault::KillReplica(node) => self.kill_node(node, out),
            Fault::Away(node, time) => {
                self.away_until[node] = now + time;
                self.take_away(node, time, out);
            }
            Fault::KillReplicas => (0..self.nodes.len()).for_each(|node| self.kill_node(node, out)),
            Fault::StopReplica(node, time) => {
                self.nodes[node].set_stopped(true);
                out.later(now + time, Event::ContinueNode(node));
            }
            Fault::StopReplicaKillEngine(node) => {
                self.nodes[node].set_stopped(true);
                let after = now + 20 * MS;
                out.later(after, Event::Fault(Fault::KillEngine));
                let delay = self.dice.between(10 * MS, 3 * SECOND);
                out.later(after + delay, Event::ContinueNode(node));
            }
            Fault::Slow(node, time) => {
                self.nodes[node].weather.slow = 50;
                out.later(now + time, Event::Calm(node));
            }
            Fault::Errors(node, time) => {
                self.errors_injected = true;
                self.nodes[node].weather.error = 100;
                out.later(now + time, Event::Calm(node));
            }
            Fault::Records(node, time) => {
                self.errors_injected = true;
                self.nodes[node].weather.records = 300;
                out.later(now + time, Event::Calm(node));
            }
            Fault::Full(node, time) => self.nodes[node].disk.full_until = now + time,
            Fault::FullAll(time) => self.nodes.iter_mut().for_each(|n| n.disk.full_until = now + time),
            Fault::PowerCut(node) => self.power_cut(node, out),
            Fault::PowerCutAll => {
                self.replace_engine(out);
                (0..self.nodes.len()).for_each(|node| self.power_cut(node, out));
            }
            Fault::HostLost(node) => {
                self.replace_engine(out);
                self.power_cut(node, out);
            }
            Fault::PowerCutOthers(spared) => {
                self.replace_engine(out);
                (0..self.nodes.len())
                    .filter(|node| *node != spared)
                    .for_each(|node| self.power_cut(node, out));
            }
            Fault::Cut(node, time) => self.cut_until[node] = now + time,
            Fault::Break(node) => {
                let conns: Vec<_> = self
                    .conns
                    .iter()
                    .filter(|(_, c)| c.node == node && !c.closed)
                    .map(|(id, _)| *id)
                    .collect();
                if let Some(conn) = self.dice.pick(&conns) {
                    out.engine_gets(conn, Packet::End);
                    out.later(now, Event::ToNode(conn, Packet::End));
                }
            }
            Fault::Snapshot | Fault::Remove | Fault::Purge | Fault::Revert | Fault::Expand => {
                self.change_chain(fault, out);
            }
            Fault::Rebuild(node) | Fault::Exchange(node, _) => self.change_members(node, fault, out),
            Fault::Add => self.add_replica(out),
            Fault::Note => self.note_who_has_learnt(),
            Fault::Look => self.look(out),
            Fault::Scrub => self.scrub(out),
            Fault::Rot(node) => self.rot(node),
            Fault::End => self.end_engine(out),
        }
    }

    /// Something has just changed: now and then something goes wrong at just that moment.
    pub(super) fn moment(&mut self) {
        if self.budget > 0 && self.dice.chance(300) {
            let soon = self.dice.below(2 * MS);
            self.at(self.now + soon, Event::Clients(false));
        }
        if self.aftershocks > 0 && self.dice.chance(150) {
            self.aftershocks -= 1;
            let (after, fault) = self.mix.aftershock(&mut self.dice, self.nodes.len());
            self.at(self.now + after, Event::Fault(fault));
        }
    }

    /// The engine is told to end. When it has, another one is started.
    pub(super) fn end_engine(&mut self, out: &mut Outbox) {
        if let Some(e) = self.engines.get_mut(&self.current).filter(|e| !e.frozen) {
            e.ends = true;
            self.ask_other(Command::Shutdown, out);
        }
    }

    /// The engine is killed, and a manager that saw it starts a new one. One that was taken for dead before lives on.
    pub(super) fn replace_engine(&mut self, out: &mut Outbox) {
        self.kill_engine(self.current, out);
        let known_dead = self.engines.is_empty();
        let delay = self.dice.between(20 * MS, 300 * MS);
        out.later(self.now + delay, Event::StartEngine(known_dead));
    }

    pub(super) fn power_cut(&mut self, node: usize, out: &mut Outbox) {
        self.note_lived();
        self.nodes[node].power_cut(&mut self.dice);
        self.powered[node] = false;
        self.judge_loss();
        self.break_conns(node, out);
        let delay = self.dice.between(50 * MS, 3 * SECOND);
        out.later(self.now + delay, Event::StartNode(node));
    }

    /// Something that clients were answered may be lost, as far as an engine can know: one that goes on with a replica that has not
    /// kept its power, or could not note on its full disk that it has, while others that have everything are away.
    pub(super) fn look_for_lost_power(&mut self) {
        let is_unsure = |n: &super::Node| n.is_up() && !n.has_lived() && !n.disk.has_kept_power();
        if self.nodes.iter().any(is_unsure) {
            self.flushes_may_fail();
        }
    }

    fn flushes_may_fail(&mut self) {
        self.may_have_lost.extend(self.engines.values().map(Engine::session));
        // Its clients wait for the next one.
        self.may_have_lost.insert(self.generation.attachment.into());
    }

    /// Whose process lived on holds everything, whatever happened to its host before. Where all have lost something, it is lost, and
    /// who has its power for longest since then holds everything that there still is.
    pub(super) fn note_lived(&mut self) {
        for (node, powered) in self.nodes.iter().zip(&mut self.powered) {
            *powered |= node.has_lived();
        }
        let members = self.members();
        if members.iter().all(|m| !self.powered[*m]) {
            let since = |m: &usize| self.nodes[*m].disk.power_since();
            let longest = members.iter().filter_map(since).min();
            let best: Vec<usize> =
                members.iter().copied().filter(|m| longest.is_some() && since(m) == longest).collect();
            best.into_iter().for_each(|m| self.powered[m] = true);
        }
    }

    /// As long as one member's process lived on, or its host kept its power, nothing that was answered may be lost.
    pub(super) fn note_loss(&mut self, members: &[usize]) {
        let lived = members.iter().any(|m| self.nodes[*m].has_lived());
        if !lived && members.iter().all(|m| !self.powered[*m]) {
            self.note("no member kept what was not flushed".into());
            self.history.power_lost();
            self.flushes_may_fail();
            // What was answered before is on its way for a while.
            let cut = self.cut_until.iter().copied().max().unwrap_or(0);
            let apart = self.isolated.map_or(0, |(.., until)| until);
            self.loss_heard = self.now.max(cut).max(apart).max(self.frozen_until) + 100 * MS;
        }
    }
}
