//! An engine as far as the managers meet it: which replicas it takes, whom it asks, when it answers writes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use control::authority::{Question, Reply};
use lh_block::{Epoch, EpochOrder, Generation, Instance};
use lh_cluster::agent::{EngineStart, RebuildLimits};
use lh_cluster::api::{Quorum, SnapshotLimits};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use crate::chain::Asked;
use crate::world::{Copy, Name, Place, State, World};

/// Turns for which an engine that begins waits for members that it does not reach yet.
const GRACE: u32 = 6;

/// How long an engine waits for an answer of its authority.
const PATIENCE: Duration = Duration::from_secs(15);

/// The process of an engine.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) volume: String,
    /// Which of the volumes of that name it is of, as the key that it was given says.
    pub(crate) birth: u64,
    /// Which stay of the volume on its node it was told.
    pub(crate) stay: String,
    pub(crate) uuid: String,
    pub(crate) generation: Generation,
    /// Who has to agree on its members.
    quorum: Quorum,
    /// Its replicas, by name.
    pub(crate) addresses: BTreeMap<String, String>,
    pub(crate) phase: Phase,
    /// Where the engine is that answers in its place; empty for an engine.
    pub(crate) relay_from: String,
    /// A relay has passed a write on to it that it has yet to answer.
    passed_on: bool,
    /// The epoch that counts, as far as it knows.
    epoch: Option<Epoch>,
    /// Replicas that are being filled, and for how many turns.
    pub(crate) filling: BTreeMap<String, u32>,
    /// Replicas that it is to let go of.
    pub(crate) leaving: BTreeSet<String>,
    /// An epoch that it has asked to store, and of which it does not know yet whether it is.
    asked: Option<Epoch>,
    /// What it has heard and not done yet.
    pub(crate) wishes: VecDeque<Asked>,
    pub(crate) size: u64,
    pub(crate) limits: SnapshotLimits,
    pub(crate) rebuild_limits: RebuildLimits,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It has yet to ask which epoch counts.
    Asks,
    /// It waits for members of the epoch that counts, of which one is enough, or for all its replicas if none does, for so many
    /// turns.
    Waits(u32),
    /// It answers.
    Serves,
    /// It passes on what it is asked, and has found the engine that answers, or not yet.
    Relays(bool),
    /// It has ended, for this reason.
    Ended(String),
}

impl Engine {
    pub(crate) fn new(birth: u64, uuid: String, start: EngineStart<'_>) -> Self {
        let spec = start.spec;
        Self {
            volume: spec.volume_name.clone(),
            birth,
            stay: start.stay.to_owned(),
            uuid,
            generation: start.generation,
            quorum: spec.quorum,
            addresses: spec.replica_address_map.clone(),
            phase: if spec.relays() { Phase::Relays(false) } else { Phase::Asks },
            relay_from: spec.relay_from.clone(),
            passed_on: false,
            epoch: None,
            filling: BTreeMap::new(),
            leaving: BTreeSet::new(),
            asked: None,
            wishes: VecDeque::new(),
            size: spec.volume_size.bytes(),
            limits: spec.snapshot_limits(),
            rebuild_limits: RebuildLimits { bytes_per_second: 0, at_once: 1 },
        }
    }

    /// It is used: whoever has its device open is answered.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Serves | Phase::Relays(true))
    }

    pub(crate) fn members(&self) -> &[String] {
        match (&self.phase, &self.epoch) {
            (Phase::Serves, Some(epoch)) => &epoch.members,
            _ => &[],
        }
    }

    /// Where a majority decides, those in sync have to be one with one replica more, too.
    pub(crate) fn takes_one_more(&self) -> bool {
        let decides = self.quorum == Quorum::Majority && self.phase == Phase::Serves;
        let all = self.addresses.len();
        !decides || all == 1 || self.members().len() > all.div_ceil(2)
    }

    /// Begins to let go of one of its replicas, if those that are left are enough, as the engine's own rule has it (`datapath`,
    /// `conductor/commands.rs`).
    pub(crate) fn begin_to_let_go(&mut self, name: &str) -> Result<(), &'static str> {
        if !self.addresses.contains_key(name) {
            return Ok(());
        }
        if self.phase != Phase::Serves {
            return Err("which replicas hold everything is not known yet");
        }
        let is_other = |m: &&String| *m != name && !self.leaving.contains(*m);
        let left = self.members().iter().filter(is_other).count();
        let is_member = self.members().iter().any(|m| m == name);
        if is_member && left < self.majority() {
            return Err("the others are not enough to go on");
        }
        self.leaving.insert(name.to_owned());
        Ok(())
    }

    /// Of all that it has, also of those that are to go.
    fn majority(&self) -> usize {
        match self.quorum {
            Quorum::Any | Quorum::Unsafe => 1,
            Quorum::Majority => self.addresses.len() / 2 + 1,
        }
    }

    fn order(&self) -> Option<EpochOrder> {
        self.epoch.as_ref().map(Epoch::order)
    }

    /// The next epoch, with these members; what they have recorded at least, but for those that it takes in.
    fn next(&self, members: Vec<String>, recorded: Option<EpochOrder>, id: u64) -> Epoch {
        let own = self.epoch.as_ref().filter(|epoch| epoch.generation == self.generation);
        Epoch {
            generation: self.generation,
            counter: own.map_or(1, |epoch| epoch.counter + 1),
            members,
            id: Instance(id.into()),
            after: recorded,
            round: None,
        }
    }
}

/// Runs an engine for as long as it is there.
pub(crate) async fn run(world: Arc<World>, name: Name, uuid: String) {
    let socket = world.socket(&name.0);
    let mut pace = 300_u64;
    loop {
        pace = (pace * 7 + 131) % 400;
        tokio::time::sleep(Duration::from_millis(300 + pace)).await;
        let question = {
            let mut state = world.state();
            let Some(engine) = state.engines.remove(&name).filter(|e| e.uuid == uuid) else { return };
            let mut turn = Turn { engine, node: &name.0, state: &mut state };
            let question = turn.take(&name.1);
            let engine = turn.engine;
            state.engines.insert(name.clone(), engine);
            question
        };
        let Some(question) = question else { continue };
        let reply = ask(&socket, &question).await;
        let mut state = world.state();
        let Some(engine) = state.engines.remove(&name) else { return };
        let is_same = engine.uuid == uuid;
        let mut turn = Turn { engine, node: &name.0, state: &mut state };
        if is_same {
            turn.hear(reply);
        }
        let engine = turn.engine;
        state.engines.insert(name.clone(), engine);
        if !is_same {
            return;
        }
    }
}

async fn ask(socket: &Path, question: &Question) -> Reply {
    let asked = async {
        let mut stream = UnixStream::connect(socket).await?;
        let mut line = serde_json::to_vec(question)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).await?;
        std::io::Result::Ok(serde_json::from_str(&answer)?)
    };
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(e)) => Reply::Unavailable(e.to_string()),
        Err(_) => Reply::Unavailable("no answer".to_owned()),
    }
}

/// One turn of an engine, which is out of the state meanwhile.
struct Turn<'a> {
    engine: Engine,
    node: &'a str,
    state: &'a mut State,
}

impl Turn<'_> {
    /// Does what can be done now. Gives back what has to be asked before more is done.
    fn take(&mut self, name: &str) -> Option<Question> {
        if let Some(asked) = self.engine.asked.clone() {
            return Some(self.store(asked));
        }
        match self.engine.phase.clone() {
            Phase::Asks => match self.engine.quorum {
                Quorum::Any => Some(Question::Load { volume: self.engine.volume.clone() }),
                // Which epoch counts its replicas tell.
                Quorum::Majority | Quorum::Unsafe => Some(Question::Begin { engine: name.to_owned() }),
            },
            Phase::Waits(turns) => self.begin(turns),
            Phase::Serves => self.serve(),
            Phase::Relays(_) => {
                self.pass_on();
                None
            }
            Phase::Ended(_) => None,
        }
    }

    fn store(&self, epoch: Epoch) -> Question {
        Question::Store { volume: self.engine.volume.clone(), expected: self.engine.order(), epoch }
    }

    fn hear(&mut self, reply: Reply) {
        match (reply, self.engine.phase.clone()) {
            (Reply::Counts(epoch), Phase::Asks) => {
                (self.engine.epoch, self.engine.phase) = (epoch, Phase::Waits(0));
            }
            (Reply::Begin(found), Phase::Asks) => {
                self.engine.addresses = found.into_iter().collect();
                (self.engine.epoch, self.engine.phase) = (None, Phase::Waits(0));
            }
            (Reply::Stored, _) => self.stored(),
            (Reply::Conflict(_), Phase::Waits(..)) => {
                self.state.count("an engine began anew, since another epoch counted");
                (self.engine.asked, self.engine.phase) = (None, Phase::Asks);
            }
            (Reply::Conflict(_), _) => self.end("another engine's epoch counts"),
            (Reply::Unavailable(_), _) => self.state.count("an engine's question was not answered"),
            _ => {}
        }
    }

    /// Passes a write on to the engine, if that is reached and answers. Of another volume, or another relay, it is none.
    fn pass_on(&mut self) {
        let Some(name) = self.state.relayed(self.node, &self.engine.relay_from) else { return };
        let is_it = |e: &&mut Engine| e.phase == Phase::Serves && e.birth == self.engine.birth;
        let Some(engine) = self.state.engines.get_mut(&name).filter(is_it) else { return };
        engine.passed_on = true;
        self.engine.phase = Phase::Relays(true);
        self.state.show(self.node, &self.engine);
    }

    fn end(&mut self, why: &str) {
        self.state.count("an engine was shut out");
        self.engine.asked = None;
        self.engine.phase = Phase::Ended(why.to_owned());
    }

    fn place(&self, replica: &str) -> Option<Place> {
        self.state.reached(self.node, self.engine.addresses.get(replica)?)
    }

    fn copy(&self, replica: &str) -> Option<&Copy> {
        self.state.copies.get(&self.place(replica)?)
    }

    /// Has a replica refuse all engines before this one. False: it refuses this one.
    fn fence(&mut self, replica: &str) -> bool {
        let (generation, fenceless) = (self.engine.generation, self.state.fenceless);
        let Some(place) = self.place(replica) else { return true };
        let Some(copy) = self.state.copies.get_mut(&place) else { return true };
        if copy.seen < generation {
            (copy.before, copy.seen) = (copy.seen, generation);
            copy.by.clone_from(&self.engine.uuid);
        }
        // Of another process with the same number, too.
        fenceless || copy.seen == generation && copy.by == self.engine.uuid
    }

    /// What these have recorded at least.
    fn recorded(&self, replicas: &[String]) -> Option<EpochOrder> {
        replicas.iter().map(|r| self.copy(r).and_then(|c| c.recorded)).min().flatten()
    }

    /// Has an epoch count: where the authority stores it, or as many replicas have recorded it as have to.
    fn propose(&mut self, members: Vec<String>, recorded: Option<EpochOrder>) -> Option<Question> {
        let id = self.state.number();
        let epoch = self.engine.next(members, recorded, id);
        let needed = match self.engine.quorum {
            Quorum::Any => {
                self.engine.asked = Some(epoch.clone());
                return Some(self.store(epoch));
            }
            Quorum::Majority | Quorum::Unsafe => self.engine.majority(),
        };
        let here = self.here();
        if here.len() >= needed && epoch.members.iter().any(|member| here.contains(member)) {
            // Who is left out records that, too.
            for place in here.iter().filter_map(|name| self.place(name)).collect::<Vec<_>>() {
                let copy =
                    self.state.copies.get_mut(&place).filter(|_| self.engine.quorum == Quorum::Majority);
                copy.into_iter().for_each(|copy| copy.epoch = Some(epoch.clone()));
            }
            self.engine.asked = Some(epoch);
            self.stored();
        } else {
            self.state.count("an engine waited for a majority");
        }
        None
    }

    /// Replicas that it reaches, of those that are to stay.
    fn here(&self) -> Vec<String> {
        let is_here = |name: &&String| self.copy(name).is_some() && !self.engine.leaving.contains(*name);
        self.engine.addresses.keys().filter(is_here).cloned().collect()
    }

    /// What the replicas themselves tell of epochs. False: too few do. Before the first epoch all have to be there.
    fn hear_replicas(&mut self) -> bool {
        let here = self.engine.addresses.keys().filter_map(|name| Some(self.copy(name)?.epoch.clone()));
        let epochs: Vec<Epoch> = here.flatten().collect();
        let is_enough = epochs.len() >= self.engine.majority() || self.engine.quorum == Quorum::Unsafe;
        self.engine.epoch = epochs.into_iter().max_by_key(Epoch::order);
        self.engine.epoch.is_none() || is_enough
    }

    /// True for a member of the epoch that counts, as the engine's own rule has it (`datapath`, `conductor/choose.rs`), and not another
    /// directory under its name. Before the first epoch nobody has recorded any.
    fn was_there(&self, copy: &Copy) -> bool {
        let Some(epoch) = &self.engine.epoch else { return copy.recorded.is_none() };
        let seen = if copy.seen == self.engine.generation { copy.before } else { copy.seen };
        let was_about_to = match epoch.after {
            Some(_) => copy.recorded >= epoch.after,
            None => seen >= epoch.generation,
        };
        epoch.generation == self.engine.generation || was_about_to || copy.recorded >= Some(epoch.order())
    }

    /// Begins with those that are there, if they are what they should be.
    fn begin(&mut self, turns: u32) -> Option<Question> {
        if self.engine.quorum != Quorum::Any && !self.hear_replicas() {
            self.state.count("an engine waited for a majority");
            self.engine.phase = Phase::Waits(turns + 1);
            return None;
        }
        let candidates: Vec<String> = match &self.engine.epoch {
            Some(epoch) => epoch.members.clone(),
            None => self.engine.addresses.keys().cloned().collect(),
        };
        let is_member = |name: &&String| self.copy(name).is_some_and(|copy| self.was_there(copy));
        let there: Vec<String> = candidates.iter().filter(is_member).cloned().collect();
        let is_first = self.engine.epoch.is_none();
        let waits = there.len() < candidates.len() && (is_first || turns < GRACE);
        if there.is_empty() || waits {
            self.engine.phase = Phase::Waits(turns + 1);
            return None;
        }
        // Where a majority decides, those that are no members, too.
        let all: Vec<String> = match self.engine.quorum {
            Quorum::Majority => self.engine.addresses.keys().cloned().collect(),
            Quorum::Any | Quorum::Unsafe => there.clone(),
        };
        let fenced: Vec<bool> = all.iter().map(|name| self.fence(name)).collect();
        if fenced.contains(&false) {
            self.end("a replica has seen a newer engine");
            return None;
        }
        if there.len() < candidates.len() {
            self.state.count("an engine began without a member");
        }
        let recorded = self.recorded(&there);
        self.propose(there, recorded)
    }

    /// What was asked is stored: it counts.
    fn stored(&mut self) {
        let Some(epoch) = self.engine.asked.take() else { return };
        let begins = matches!(self.engine.phase, Phase::Waits(..));
        for member in &epoch.members {
            if let Some(copy) = self.place(member).and_then(|place| self.state.copies.get_mut(&place)) {
                copy.recorded = copy.recorded.max(Some(epoch.order()));
                copy.epoch = Some(epoch.clone());
            }
            self.engine.filling.remove(member);
        }
        let members = epoch.members.clone();
        self.engine.epoch = Some(epoch);
        if begins {
            self.engine.phase = Phase::Serves;
            self.state.show(self.node, &self.engine);
            self.state.count("an engine began to serve");
            self.judge(&members);
        }
    }

    /// What it serves from now on has to be all that was answered, of this volume, and what that was cloned from.
    fn judge(&mut self, members: &[String]) {
        let Some(volume) = self.state.volumes.get(&self.engine.volume).cloned() else { return };
        for member in members {
            let Some(copy) = self.copy(member) else { continue };
            let base = copy.base.clone();
            let is_begun = match volume.base {
                Some(_) => base == volume.base,
                None => volume.may_begin_with(base.as_ref(), self.state),
            };
            let is_whole = copy.holds == volume.answered || volume.quorum == Quorum::Unsafe;
            if copy.birth != volume.birth || !is_whole || !is_begun {
                let what = format!(
                    "the engine of {} on {} begins with {member}: {copy:?} for {volume:?}",
                    self.engine.volume, self.node
                );
                self.state.wrong(what);
            }
            if base.is_some() && volume.base.is_none() {
                self.state.count("a clone was served");
            }
            if let Some(volume) = self.state.volumes.get_mut(&self.engine.volume) {
                volume.base = base;
            }
        }
    }

    /// Does one of the things that it was asked to do to its chain, and folds.
    fn change_chain(&mut self, members: &[String]) {
        let places: Vec<Place> = members.iter().filter_map(|m| self.place(m)).collect();
        if let Some(asked) = self.engine.wishes.pop_front() {
            self.state.carry_out(&self.engine.volume, self.engine.birth, &places, asked);
        }
        self.state.fold(&places);
    }

    /// Answers a write, unless the members have to be others first.
    fn serve(&mut self) -> Option<Question> {
        let members = self.engine.members().to_vec();
        // Another directory under a member's name is none.
        let order = self.engine.order();
        let is_there = |m: &&String| self.copy(m).is_some_and(|copy| copy.recorded >= order);
        let there: Vec<String> = members.iter().filter(is_there).cloned().collect();
        if there.iter().any(|name| !self.fence(name)) {
            self.end("a replica has seen a newer engine");
            return None;
        }
        if there.is_empty() {
            self.state.count("an engine lost all its members");
            self.engine.generation = self.engine.generation.next_restart();
            self.engine.filling.clear();
            self.engine.phase = Phase::Asks;
            return None;
        }
        let leaving = &self.engine.leaving;
        let mut wanted: Vec<String> = there.iter().filter(|m| !leaving.contains(*m)).cloned().collect();
        if wanted.is_empty() {
            // Without its last member it would have nothing.
            wanted.clone_from(&there);
            self.engine.leaving.clear();
        }
        self.let_go(&members);
        let filled = self.fill(&members);
        let recorded = self.recorded(&wanted);
        wanted.extend(filled);
        wanted.sort();
        if wanted != members {
            return self.propose(wanted, recorded);
        }
        self.change_chain(&members);
        self.write(&members);
        if std::mem::take(&mut self.engine.passed_on) {
            self.write(&members);
            self.state.count("a write was answered through a relay");
        }
        None
    }

    /// Forgets those that are to go and are no members.
    fn let_go(&mut self, members: &[String]) {
        let gone: Vec<String> =
            self.engine.leaving.iter().filter(|name| !members.contains(name)).cloned().collect();
        for name in gone {
            self.engine.leaving.remove(&name);
            self.engine.filling.remove(&name);
            self.engine.addresses.remove(&name);
        }
    }

    /// Fills what is there and is no member. Gives back one that holds everything by now.
    fn fill(&mut self, members: &[String]) -> Option<String> {
        let others: Vec<String> = self
            .engine
            .addresses
            .keys()
            .filter(|name| !members.contains(name) && !self.engine.leaving.contains(*name))
            .cloned()
            .collect();
        let answered = self.state.volumes.get(&self.engine.volume).map(|v| (v.answered, v.birth));
        for name in others {
            if self.copy(&name).is_none() || !self.fence(&name) {
                self.engine.filling.remove(&name);
                continue;
            }
            let turns = self.engine.filling.entry(name.clone()).or_default();
            *turns += 1;
            if u64::from(*turns) < 4 + name.bytes().map(u64::from).sum::<u64>() % 9 {
                continue;
            }
            let place = self.place(&name)?;
            let (holds, birth) = answered?;
            let next = self.engine.next(Vec::new(), None, 0).order();
            let of_member = self.copy(members.first()?)?;
            let (chain, base) = (of_member.chain.clone(), of_member.base.clone());
            let copy = self.state.copies.get_mut(&place)?;
            (copy.chain, copy.base) = (chain, base);
            // It holds what this engine gives it, whatever it held, and records the epoch that takes it in first.
            (copy.holds, copy.birth, copy.recorded) = (holds, birth, Some(next));
            self.state.count("a replica was filled");
            return Some(name);
        }
        None
    }

    fn write(&mut self, members: &[String]) {
        let places: Vec<Place> = members.iter().filter_map(|m| self.place(m)).collect();
        let Some(volume) = self.state.volumes.get_mut(&self.engine.volume) else { return };
        let (before, birth) = (volume.answered, volume.birth);
        volume.answered += 1;
        let is_unsafe = volume.quorum == Quorum::Unsafe;
        let behind = |c: &Copy| c.holds != before && !is_unsafe || c.birth != birth;
        for place in places {
            let Some(copy) = self.state.copies.get_mut(&place) else { continue };
            if behind(copy) {
                let what = format!(
                    "a write of {} on {} goes to {copy:?}, which lacks some before it",
                    self.engine.volume, self.node
                );
                copy.holds = before + 1;
                self.state.wrong(what);
            } else {
                copy.holds = before + 1;
            }
        }
        self.state.count("a write was answered");
    }
}
