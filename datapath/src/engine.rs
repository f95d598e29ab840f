//! What drives the conductor: the control thread, the connections' handshakes, the authority's calls.
//!
//! - The control thread is not on the way of any request. It sleeps until a queue, a connector, the authority or a
//!   command says something.
//! - A connector is a short-lived thread: it connects and does the handshake of every queue's connection, within
//!   [`HANDSHAKE`].
//! - After [`Event::Stopped`] with [`Why::is_fenced`] the process has to end at once, without an answer to anybody.

mod authority;
mod connector;
mod grantee;
mod loss_note;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, SendError, Sender, bounded, unbounded};
use lh_block::{Generation, Geometry, Instance};
use lh_ring::Mailbox;
use lh_wire::handshake::Key;
use lh_wire::{Control, MAX_DATA, MapPage, ReplicaState, Status as WireStatus};

use crate::conductor::{
    Body, Command, CommandError, CommandId, Conductor, Config, Input, Limits, Output, Quorum, Refusal,
    ReplicaConfig, Status, Why,
};
use crate::link::{Mail, News, Offer, Parts};
use crate::message::{ControlId, FromQueue, MemberId, QUEUES_MAX, QueueId, ToQueue};
use crate::order::Table;
use crate::queue::{self, Queue, Stats};
use crate::shared::Shared;
use loss_note::LossNote;

pub use authority::Authority;
pub use lh_block::Address;

/// How long connecting and the handshake may take. A replica answers only when it has drained what earlier engines
/// left, so a slow disk may need most of it.
pub const HANDSHAKE: Duration = Duration::from_secs(20);

/// A replica of the volume and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaAddress {
    /// Its name.
    pub name: String,
    /// Where its process listens.
    pub address: Address,
    /// As [`ReplicaConfig::learner`]. Of one that is added while the engine runs the engine finds out itself.
    pub learner: bool,
}

/// What an engine is started with.
pub struct Options {
    /// Name of the volume.
    pub volume: String,
    /// Its replicas.
    pub replicas: Vec<ReplicaAddress>,
    /// Its key.
    pub key: Key,
    /// Issued by the authority or the node's manager, durable.
    pub generation: Generation,
    /// Bytes.
    pub size: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Device queues.
    pub queues: u8,
    /// Requests of each queue at one time.
    pub depth: u16,
    /// How long requests wait for a replica; zero for ever.
    pub io_timeout: Duration,
    /// Every read is compared with the checksums on record (`--checksum full`).
    pub checksum_full: bool,
    /// Reads of what replicas on this host hold are done here where they permit it; else all are sent.
    pub local_reads: bool,
    /// When an epoch counts.
    pub quorum: Quorum,
    /// The manager of this node saw the engine before this one die.
    pub known_dead: bool,
    /// Who stores epochs.
    pub authority: Box<dyn Authority>,
    /// A file that is there as long as clients have lost something and have not been told: for the next engine that shows the
    /// same device.
    pub loss_note: Option<PathBuf>,
    /// Times and bounds.
    pub limits: Limits,
}

/// Something that the process has to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The device may be shown; its size in bytes.
    Open {
        /// Bytes.
        size: u64,
    },
    /// The volume has grown; the device is to be told. Its size in bytes.
    Resized {
        /// Bytes.
        size: u64,
    },
    /// Clients have lost something: [`EngineHandle::look_after_loss`] is to be called often as long as
    /// [`EngineHandle::is_loss_open`].
    Lost,
    /// The engine has ended.
    Stopped(Why),
}

/// Something for the control thread.
enum Order {
    Input(Input),
    Connected { member: MemberId, session: u64, name: String, made: connector::Made },
    Command(Command, Done),
    Add(ReplicaAddress, Done),
}

/// Where whoever gave a command hears how it ended. One that is dropped without a word: the engine ended.
pub type Done = Box<dyn FnOnce(Result<(), CommandError>) + Send>;

/// How other threads speak to the engine.
#[derive(Clone)]
pub struct EngineHandle {
    orders: Sender<Order>,
    status: Arc<Mutex<Status>>,
    stats: Arc<[Arc<Stats>]>,
    mailboxes: Arc<[Mailbox<Mail>]>,
    shared: Arc<Shared>,
    loss_note: LossNote,
}

impl EngineHandle {
    /// The volume as it is now.
    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The counters of every queue.
    pub fn stats(&self) -> &[Arc<Stats>] {
        &self.stats
    }

    /// Begins a command; its end comes through the channel. A channel that closes without a word: the engine ended.
    pub fn command(&self, command: Command) -> Receiver<Result<(), CommandError>> {
        let (done, wait) = bounded(1);
        self.begin(command, Box::new(move |result| drop(done.send(result))));
        wait
    }

    /// The same for who does not wait in a thread: some commands wait for replicas, for hours perhaps.
    pub fn begin(&self, command: Command, done: Done) {
        self.order(Order::Command(command, done));
    }

    /// Adds a replica to the configuration, which is then brought in sync. Answered as soon as it is configured.
    pub fn add_replica(&self, replica: ReplicaAddress, done: Done) {
        self.order(Order::Add(replica, done));
    }

    fn order(&self, order: Order) {
        if let Err(SendError(Order::Command(_, done) | Order::Add(_, done))) = self.orders.send(order) {
            done(Err(CommandError::ShuttingDown));
        }
    }

    /// The device that an engine before has left is shown by this one: if what that one answered is lost, flushes say so
    /// (`docs/decisions/0019-a-flush-tells-of-a-loss.md`). Called before any of the device's requests is taken.
    pub fn clients_have_stayed(&self) {
        self.shared.loss().clients_have_stayed();
    }

    /// Clients that have the device open have lost something (`docs/decisions/0019-a-flush-tells-of-a-loss.md`).
    pub fn has_lost(&self) -> bool {
        self.shared.loss().concerns_anybody()
    }

    /// Clients have lost something, and flushes fail for it, or will.
    pub fn is_loss_open(&self) -> bool {
        self.shared.loss().is_untold() || self.shared.loss().is_being_told()
    }

    /// Takes [`Options::loss_note`] away when nobody has to be told any more, and forgets the loss when nobody has the device open,
    /// which is only asked after one. To be called now and then once the volume is shown.
    pub fn look_after_loss(&self, is_open: impl FnOnce() -> bool) {
        let loss = self.shared.loss();
        if loss.concerns_anybody() && !loss.is_untold() && !is_open() {
            loss.all_have_closed();
        }
        self.loss_note.look_after();
    }

    /// Ends the queue threads, once their frontends are done.
    pub fn end_queues(&self) {
        self.mailboxes.iter().for_each(|m| m.put(Mail::End));
    }

    /// Wakes every queue thread, so that its overseer looks for something new.
    pub fn wake_queues(&self) {
        self.mailboxes.iter().for_each(Mailbox::wake);
    }
}

/// Starts the control thread. The parts are for the queue threads, one each ([`crate::link::EngineQueue::new`]).
///
/// # Errors
/// No thread or descriptor to be had.
///
/// # Panics
/// With no queue or more than [`QUEUES_MAX`], or more than [`crate::message::MEMBERS_MAX`] replicas.
pub fn start(options: Options) -> io::Result<(EngineHandle, Vec<Parts>, Receiver<Event>)> {
    let mut random = [0; 16];
    lh_ring::sys::random(&mut random)?;
    let instance = Instance(u128::from_le_bytes(random));
    let shared = Arc::new(Shared::new(options.size, lh_wire::intent_chunk(options.size)));
    let (news_sender, news) = unbounded();
    let (mailboxes, mut queues) = make_queues(&options, &shared, &news_sender)?;
    let (orders_sender, orders) = unbounded();
    let (events_sender, events) = unbounded();
    let conductor = Conductor::new(Config {
        volume: options.volume.clone(),
        generation: options.generation,
        instance,
        quorum: options.quorum,
        replicas: options.replicas.iter().map(ReplicaAddress::config).collect(),
        queues: options.queues,
        size: options.size,
        shared: shared.clone(),
        known_dead: options.known_dead,
        limits: options.limits,
        sabotage: crate::conductor::Sabotage::default(),
    });
    let handle = EngineHandle {
        orders: orders_sender.clone(),
        status: Arc::new(Mutex::new(conductor.status())),
        stats: queues.iter().map(|p| p.queue.stats().clone()).collect(),
        mailboxes: mailboxes.into(),
        loss_note: LossNote::find(options.loss_note, shared.clone()),
        shared: shared.clone(),
    };
    let for_authority = orders_sender.clone();
    let authority = authority::serve(options.authority, move |input| {
        let _ = for_authority.send(Order::Input(input));
    })?;
    let control = ControlThread {
        conductor,
        began: Instant::now(),
        identity: connector::Identity {
            volume: options.volume,
            key: options.key,
            generation: options.generation,
            instance,
            offers: queues.iter().map(|p| p.offer.clone()).collect(),
        },
        addresses: options.replicas.into_iter().map(|r| (r.name, r.address)).collect(),
        mailboxes: handle.mailboxes.clone(),
        status: handle.status.clone(),
        shared,
        loss_note: handle.loss_note.clone(),
        authority,
        orders: orders_sender,
        events: events_sender,
        // A read that is compared with checksums is the replica's anyway.
        local_reads: options.local_reads && !options.checksum_full,
        sessions: BTreeMap::new(),
        grants: grantee::Numbers::default(),
        commands: BTreeMap::new(),
        command_count: 0,
        asked: Vec::new(),
        stopped: false,
    };
    std::thread::Builder::new().name("conductor".into()).spawn(move || control.run(&orders, &news))?;
    queues.sort_by_key(|p| p.id);
    Ok((handle, queues, events))
}

/// The mailboxes of the queues, by number, and their parts.
fn make_queues(
    options: &Options,
    shared: &Arc<Shared>,
    news: &Sender<News>,
) -> io::Result<(Vec<Mailbox<Mail>>, Vec<Parts>)> {
    assert!((1..=QUEUES_MAX).contains(&options.queues), "1 to {QUEUES_MAX} queues");
    let table = Arc::new(Table::new());
    let boxes: Vec<_> = (0..options.queues).map(|_| Mailbox::new()).collect::<io::Result<_>>()?;
    let (peers, inboxes): (Vec<_>, Vec<_>) = boxes.into_iter().unzip();
    let config = queue::Config {
        size: options.size,
        logical_block: options.logical_block,
        max_transfer: MAX_DATA,
        depth: options.depth,
        io_timeout_ns: u64::try_from(options.io_timeout.as_nanos()).unwrap_or(0),
        verify: options.checksum_full,
    };
    let geometry = Geometry {
        size: options.size,
        logical_block: options.logical_block,
        physical_block: 4096,
        max_transfer: MAX_DATA,
        depth: options.depth.into(),
    };
    let parts = (0..options.queues).zip(inboxes).map(|(n, inbox)| Parts {
        queue: Queue::new(config.clone(), QueueId(n), table.clone(), shared.clone()),
        id: QueueId(n),
        generation: options.generation,
        geometry,
        inbox,
        peers: peers.clone(),
        news: news.clone(),
        offer: Offer::default(),
    });
    let parts = parts.collect();
    Ok((peers, parts))
}

impl ReplicaAddress {
    fn config(&self) -> ReplicaConfig {
        ReplicaConfig { name: self.name.clone(), local: self.address.is_local(), learner: self.learner }
    }
}

/// What an answer brings beside a yes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    State,
    Map,
}

/// The thread that runs the conductor.
struct ControlThread {
    conductor: Conductor,
    /// On the clock that stands still while the host is suspended: whoever was asked before is not late afterwards. What an older
    /// engine's reads are waited for (`docs/invariants.md`, 12) only takes longer by it.
    began: Instant,
    identity: connector::Identity,
    addresses: BTreeMap<String, Address>,
    mailboxes: Arc<[Mailbox<Mail>]>,
    status: Arc<Mutex<Status>>,
    shared: Arc<Shared>,
    loss_note: LossNote,
    authority: authority::Calls,
    orders: Sender<Order>,
    events: Sender<Event>,
    local_reads: bool,
    /// Held as long as the member's session lasts.
    sessions: BTreeMap<MemberId, Arc<()>>,
    grants: grantee::Numbers,
    commands: BTreeMap<CommandId, Done>,
    command_count: u64,
    /// Control requests that are answered with more than a yes.
    asked: Vec<(ControlId, Expected)>,
    /// The conductor has said its last word: the thread ends, and whoever still waits for a command hears so.
    stopped: bool,
}

impl ControlThread {
    fn run(mut self, orders: &Receiver<Order>, news: &Receiver<News>) {
        self.authority.load();
        self.conduct(Input::Tick);
        while !self.stopped {
            let wait = self.conductor.wake_at().map(|at| Duration::from_nanos(at.saturating_sub(self.now())));
            let timeout = wait.map_or_else(crossbeam_channel::never, crossbeam_channel::after);
            crossbeam_channel::select! {
                recv(news) -> item => match item {
                    Ok(item) => self.take_news(item),
                    Err(_) => return,
                },
                recv(orders) -> order => match order {
                    Ok(order) => self.take_order(order),
                    Err(_) => return,
                },
                recv(timeout) -> _ => self.conduct(Input::Tick),
            }
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn take_news(&mut self, news: News) {
        match news {
            News::Report(queue, message) => {
                if let FromQueue::ControlLost(id, _) = message {
                    self.asked.retain(|(asked, _)| *asked != id);
                }
                self.conduct(Input::FromQueue(queue, message));
            }
            News::Reply { id, member, status, payload } => {
                let result = self.read_reply(id, status, &payload);
                self.conduct(Input::Reply { id, member, result });
            }
        }
    }

    fn read_reply(&mut self, id: ControlId, status: WireStatus, payload: &[u8]) -> Result<Body, Refusal> {
        let asked = self.asked.iter().position(|(a, _)| *a == id).map(|at| self.asked.swap_remove(at).1);
        let unreadable = |e| Refusal::Said(format!("its answer is unreadable: {e}"));
        match status {
            WireStatus::Ok if asked == Some(Expected::State) => {
                let state = serde_json::from_slice::<ReplicaState>(payload).map_err(unreadable)?;
                Ok(Body::State(Box::new(state)))
            }
            WireStatus::Ok if asked == Some(Expected::Map) => {
                let page = serde_json::from_slice::<MapPage>(payload).map_err(unreadable)?;
                Ok(Body::Map(Box::new(page)))
            }
            WireStatus::Ok => Ok(Body::Done),
            refused => Err(refusal(refused, payload)),
        }
    }

    fn take_order(&mut self, order: Order) {
        match order {
            Order::Input(input) => self.conduct(input),
            Order::Connected { member, session, name, made } => {
                let connector::Made { links, number, grants } = made;
                for (mailbox, link) in self.mailboxes.iter().zip(links) {
                    let connector::Linked { socket, checksums, lends, tells } = link;
                    mailbox.put(Mail::Link { member, socket, checksums, lends, tells });
                }
                if grants && self.local_reads {
                    self.keep_grants(member, name, number);
                }
                self.conduct(Input::Connected { member, session });
            }
            Order::Command(command, done) => self.command(command, done),
            Order::Add(replica, done) => self.add(replica, done),
        }
    }

    /// One that the volume has and does not reach comes back elsewhere: it is looked for there from now on. One that it reaches keeps
    /// its address, and the conductor refuses the name.
    fn add(&mut self, replica: ReplicaAddress, done: Done) {
        let status = self.conductor.status();
        let known = status.replicas.iter().find(|r| r.name == replica.name);
        let elsewhere = self.addresses.get(&replica.name) != Some(&replica.address);
        if known.is_some_and(|r| !r.connected) && elsewhere {
            tracing::info!("replica {} is looked for at {}", replica.name, replica.address);
            self.addresses.insert(replica.name, replica.address);
            return done(Ok(()));
        }
        let config = replica.config();
        if known.is_none() {
            self.addresses.insert(replica.name, replica.address);
        }
        self.command(Command::AddReplica(config), done);
    }

    fn command(&mut self, command: Command, done: Done) {
        self.command_count += 1;
        let id = CommandId(self.command_count);
        self.commands.insert(id, done);
        self.conduct(Input::Command(id, command));
    }

    fn conduct(&mut self, input: Input) {
        let mut outputs = Vec::new();
        self.conductor.apply(self.now(), input, &mut outputs);
        for output in outputs {
            self.carry(output);
        }
    }

    fn put(&self, queue: QueueId, mail: Mail) {
        if let Some(mailbox) = self.mailboxes.get(usize::from(queue.0)) {
            mailbox.put(mail);
        }
    }

    fn carry(&mut self, output: Output) {
        match output {
            Output::ToQueue(queue, message) => self.put(queue, Mail::Message(message)),
            Output::Control { id, member, control } => self.ask(id, member, &control),
            Output::LoadEpoch => self.authority.load(),
            Output::StoreEpoch { expected, epoch } => self.authority.store(expected, epoch),
            Output::Connect { member, name, session } => self.connect(member, name, session),
            Output::Disconnect { member } => {
                self.sessions.remove(&member);
                self.mailboxes.iter().for_each(|m| m.put(Mail::Close(member)));
            }
            Output::Vacated { member } => {
                self.mailboxes.iter().for_each(|m| m.put(Mail::Vacated(member)));
            }
            Output::NameLayer(layer, name) => {
                self.mailboxes.iter().for_each(|m| m.put(Mail::NameLayer(layer, name.clone())));
            }
            Output::ForgetLayers => self.mailboxes.iter().for_each(|m| m.put(Mail::ForgetLayers)),
            Output::CommandDone(id, result) => {
                if let Some(done) = self.commands.remove(&id) {
                    // Whoever asked may look at the status next.
                    self.refresh_status();
                    done(result);
                }
            }
            Output::Open { size } => drop(self.events.send(Event::Open { size })),
            Output::Resized { size } => drop(self.events.send(Event::Resized { size })),
            Output::Stop(why) => {
                self.refresh_status();
                let _ = self.events.send(Event::Stopped(why));
                self.stopped = true;
            }
            Output::StatusChanged => self.refresh_status(),
            Output::Lost => {
                self.loss_note.make();
                let _ = self.events.send(Event::Lost);
            }
            Output::Log(line) => tracing::info!("{line}"),
        }
    }

    fn refresh_status(&self) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = self.conductor.status();
    }

    /// Sends a control request, through the first queue's link.
    fn ask(&mut self, id: ControlId, member: MemberId, control: &Control) {
        match control {
            Control::State => self.asked.push((id, Expected::State)),
            Control::Missed { .. } | Control::LayerMap { .. } => self.asked.push((id, Expected::Map)),
            _ => {}
        }
        match serde_json::to_vec(control) {
            Ok(payload) => {
                self.put(QueueId(0), Mail::Control(id, payload));
                self.put(QueueId(0), Mail::Message(ToQueue::Control(id, member)));
            }
            Err(e) => tracing::error!("a control message cannot be written: {e}"),
        }
    }

    /// Asks for the files of a replica on this host, as long as this session with it lasts.
    fn keep_grants(&mut self, member: MemberId, replica: String, session: Instance) {
        let Some(address) = self.addresses.get(&replica).cloned() else { return };
        let lasts = Arc::new(());
        let grantee = grantee::Grantee {
            identity: self.identity.clone(),
            replica,
            address,
            member,
            session,
            lasts: Arc::downgrade(&lasts),
            mailboxes: Arc::clone(&self.mailboxes),
            numbers: Arc::clone(&self.grants),
        };
        self.sessions.insert(member, lasts);
        grantee.start();
    }

    fn connect(&self, member: MemberId, name: String, session: u64) {
        let Some(address) = self.addresses.get(&name).cloned() else {
            let why = crate::conductor::ConnectError::Unreachable(format!("no address of {name} is known"));
            let _ = self.orders.send(Order::Input(Input::ConnectFailed { member, session, why }));
            return;
        };
        self.shared.set_far(member, !address.is_local());
        let (identity, orders) = (self.identity.clone(), self.orders.clone());
        let work = move || {
            let order = match connector::connect(&identity, &name, &address) {
                Ok(made) => Order::Connected { member, session, name, made },
                Err(why) => Order::Input(Input::ConnectFailed { member, session, why }),
            };
            let _ = orders.send(order);
        };
        if let Err(e) = std::thread::Builder::new().name("connector".into()).spawn(work) {
            let why = crate::conductor::ConnectError::Unreachable(format!("no thread to connect with: {e}"));
            let _ = self.orders.send(Order::Input(Input::ConnectFailed { member, session, why }));
        }
    }
}

/// What a replica means that has not done what a control message asks for.
fn refusal(status: WireStatus, payload: &[u8]) -> Refusal {
    match status {
        WireStatus::Stale => Refusal::Stale,
        WireStatus::NoSpace => Refusal::NoSpace,
        WireStatus::Refused => Refusal::Said(String::from_utf8_lossy(payload).into_owned()),
        // It is well, and keeps what it has.
        WireStatus::Invalid => {
            Refusal::Said("it does not know what it is asked for: its program may be older".to_owned())
        }
        WireStatus::Ok | WireStatus::Io | WireStatus::Rotten | WireStatus::Corrupt => Refusal::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_that_does_not_know_what_it_is_asked_for_has_not_failed() {
        assert!(matches!(refusal(WireStatus::Invalid, b""), Refusal::Said(why) if why.contains("older")));
        assert!(matches!(refusal(WireStatus::Io, b""), Refusal::Failed));
    }
}
