//! An engine's life: its locks, the engine, its face, the frontend; and the way back.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use control::authority::RemoteAuthority;
use control::engine::EngineError;
use control::host::{self, LiveDirs, LiveError, LiveLock, RecordError, ReplicaRecord, Root, VolumeRecord};
use crossbeam_channel::{Receiver, RecvTimeoutError, after, never, select, tick, unbounded};
use datapath::conductor::{Command, Limits, Why};
use datapath::engine::{self, EngineHandle, Event, ReplicaAddress};
use datapath::link::EngineQueue;
use lh_block::{Address, Generation, Quorum, REPLICAS_MAX};
use lh_ring::{Pool, SILENT_SECONDS};

use super::activity::Looks;
use super::authority::{InCluster, Noting, OnHost, Trouble, replicas_to_begin_with};
use super::clients::Clients;
use super::cloning::{Cloning, Progress, Source, UNFINISHED, is_unfinished};
use super::face::{Errand, Face, FrontendState, Reply};
use super::fill;
use super::queues::{DEPTH, MakePool, Notice, Order, Queues};
use super::relay::{self, Source as Relays};
use super::serve::{ENDED, LAST_ANSWER, Signalled, fronts, serve_face};
use super::show::{self, CARE, HideError, Show, Wish};
use super::waits::{Waits, waited_for};
use super::{ControllerArgs, UNENCRYPTED, stay};
use crate::arguments::{Checksum, Reads};
use crate::daemon::replica::DATA_OPEN;
use crate::daemon::{GivesUp, freeze, memory};
use crate::generation::{self, Served};
use crate::limits;
use crate::reader::ReplicaAt;
use crate::tell::tell;

/// How long the engine before this one may take to end after it was killed.
const PREDECESSOR: Duration = Duration::from_secs(10);

/// Between two questions with which replicas to begin.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The same while flushes tell of a loss, until nobody has the device open.
const CLOSED: Duration = Duration::from_millis(500);

/// Runs an engine.
pub(in crate::daemon) fn run(args: &ControllerArgs) -> Result<()> {
    limits::raise_open_files();
    // Its queues have what they need from the start.
    memory::prepare(args.realtime.unwrap_or_default(), None, |_| ());
    let root = Root::at(&args.root).with_context(|| args.root.display().to_string())?;
    // Whoever has it is the only engine of the volume on this host; whoever had it before has ended.
    let _live = take_name(&args.volume, &root)?;
    if let Some(stay) = &args.stay {
        stay::begin(stay, &args.volume, &root)?;
    }
    let name = args.name();
    if let Some(from) = &args.relay_from {
        return relay::run(args, from, &name, &root);
    }
    let (replicas, limits) = configured(args, &name, &root)?;
    check_open(args, &replicas)?;
    // Before anything that is of use only for a volume that there is.
    authority_directory(args)?;
    let fronts = fronts(args, &name, &root)?;
    let (generation, authority) = authority(args, &replicas)?;
    let trouble = Trouble::default();
    let authority = Box::new(Noting { authority, trouble: trouble.clone() });
    let show = Show::prepare(&Wish::of(args, &name, &root))?;
    let (handle, parts, events) =
        engine::start(options(args, &replicas, limits, generation, authority, &root)?)
            .context("the engine cannot be started")?;
    let listens = args.relay_listen.is_some();
    let make = (EngineQueue::new as fn(_, &_) -> _, Pool::lendable as MakePool);
    let clients = Clients::default();
    let queues = Queues::start(Arc::new(handle.clone()), parts, make, show.memory(), &clients, listens)?;
    let shown = Arc::new(Mutex::new(FrontendState { frontend: show.name(), ..FrontendState::default() }));
    let (sender, errands) = unbounded();
    let progress = Progress::default();
    let key = args.key()?;
    let face = Face {
        volume: args.volume.clone(),
        generation,
        insecure: args.insecure,
        addresses: Mutex::new(replicas.iter().map(|r| (r.name.clone(), r.address.to_string())).collect()),
        engine: handle.clone(),
        clients,
        shown: shown.clone(),
        errands: sender,
        looks: Mutex::new(Looks::new(Instant::now())),
        freezing: Arc::default(),
        key,
        root,
        progress: progress.clone(),
        authority: trouble.clone(),
    };
    let signalled = Signalled::default();
    serve_face(fronts, &name, Arc::new(face), signalled.clone())?;
    let volume = args.volume.clone();
    let relays = args.relay_listen.clone().zip(queues.to_relays());
    let relays = relays.map(|(address, to_relays)| Relays::new(address, &volume, key, to_relays));
    let (cloning, waits) = (None, Waits::default());
    Life {
        volume,
        handle,
        events,
        errands,
        queues,
        show,
        shown,
        relays,
        progress,
        cloning,
        waits,
        signalled,
        open: None,
        is_numbered: args.generation.is_some(),
        authority: trouble,
    }
    .live()
}

fn take_name(volume: &str, root: &Root) -> Result<LiveLock> {
    LiveDirs::default().acquire(volume, root, PREDECESSOR).map_err(|e| match e {
        LiveError::Elsewhere { .. } => GivesUp(e.to_string()).into(),
        LiveError::Running { .. } | LiveError::Io { .. } => e.into(),
    })
}

/// Where the volume's authority is.
fn authority_directory(args: &ControllerArgs) -> Result<&Path, GivesUp> {
    args.authority.as_deref().ok_or_else(|| {
        GivesUp(format!(
            "there is no volume {0} below the root {1}: `longhornctl up {0} --size SIZE` makes one, or name its record's directory with \
             --authority DIR",
            args.volume,
            args.root.display()
        ))
    })
}

/// The engine's generation, and who stores its epochs.
fn authority(
    args: &ControllerArgs,
    replicas: &[ReplicaAddress],
) -> Result<(Generation, Box<dyn engine::Authority>)> {
    let directory = authority_directory(args)?;
    check_count(replicas.len())?;
    if let Some(socket) = manager_of(args) {
        let Some(generation) = args.generation else {
            let text = "an engine whose authority is a manager's socket needs --generation, which that manager issues";
            return Err(GivesUp(text.to_owned()).into());
        };
        let authority = RemoteAuthority::at(socket.into(), &args.volume);
        return Ok((generation.into(), Box::new(InCluster(authority))));
    }
    // What cannot be looked at may be there.
    if directory.try_exists().is_ok_and(|there| !there) {
        bail!("--authority: there is no directory {0}: `mkdir -p {0}` makes it", directory.display());
    }
    let authority = host::Authority::in_directory(directory);
    let generation = match args.generation {
        Some(generation) => generation.into(),
        None => {
            let key = args.key()?;
            let at = |replica: &ReplicaAddress| ReplicaAt {
                volume: args.volume.clone(),
                replica: replica.name.clone(),
                address: replica.address.clone(),
                key,
            };
            let replicas: Vec<ReplicaAt> = replicas.iter().map(at).collect();
            let seen = generation::highest_seen(&replicas).map_err(|Served { replica, highest }| {
                GivesUp(format!(
                    "replica {replica} has an engine that lives: end that one, or fence it off with --generation {}; \
                     that the host of one is gone is noticed after {SILENT_SECONDS} s",
                    u64::from(highest.next_attachment())
                ))
            })?;
            authority.issue_generation(seen)?
        }
    };
    Ok((generation, Box::new(OnHost(authority))))
}

/// The socket of the node's manager, where that passes the authority on.
fn manager_of(args: &ControllerArgs) -> Option<&str> {
    args.authority.as_deref()?.to_str()?.strip_prefix("unix:")
}

/// The replicas and limits of the volume's record, if the authority is the root's own: a restart has the command line of
/// the first start, and they may have changed since: a majority of those is none of the ones that there are now. In a cluster with `any` the
/// epoch says which of the replicas hold everything, and of others the engine is told; with the other quorums the manager is asked.
/// Otherwise those of the command line.
fn configured(args: &ControllerArgs, engine: &str, root: &Root) -> Result<(Vec<ReplicaAddress>, Limits)> {
    let limits = |snapshots, snapshot_bytes| Limits { snapshots, snapshot_bytes, ..Limits::default() };
    let at = |(name, address): (String, Address)| ReplicaAddress { name, address, learner: false };
    let told_limits = || limits(args.snapshot_max_count, args.snapshot_max_size);
    let told = || (args.replicas.iter().cloned().map(at).collect(), told_limits());
    if let Some(socket) = manager_of(args)
        && args.quorum != Quorum::Any
    {
        let authority = RemoteAuthority::at(socket.into(), &args.volume);
        let replicas = replicas_to_begin_with(&authority, engine, ASK_AGAIN)?;
        return Ok((replicas.into_iter().map(at).collect(), told_limits()));
    }
    if args.authority.as_deref() != Some(root.volume(&args.volume).as_path()) {
        return Ok(told());
    }
    match VolumeRecord::load(root, &args.volume) {
        Ok(record) => {
            let of = |r: &ReplicaRecord| ReplicaAddress {
                name: r.name.clone(),
                address: root.data_socket(&r.name).into(),
                learner: r.learner,
            };
            Ok((
                record.replicas.iter().map(of).collect(),
                limits(record.snapshot_max_count, record.snapshot_max_size),
            ))
        }
        Err(RecordError::Missing { .. }) => Ok(told()),
        Err(e) => Err(e.into()),
    }
}

fn options(
    args: &ControllerArgs,
    replicas: &[ReplicaAddress],
    limits: Limits,
    generation: Generation,
    authority: Box<dyn engine::Authority>,
    root: &Root,
) -> Result<engine::Options> {
    let Some(size) = args.size else {
        return Err(GivesUp("an engine needs --size: the volume's size in bytes".to_owned()).into());
    };
    let local = replicas.iter().all(|replica| replica.address.is_local());
    Ok(engine::Options {
        volume: args.volume.clone(),
        replicas: replicas.to_vec(),
        key: args.key()?,
        generation,
        size,
        logical_block: args.block_size,
        // One more for relays.
        queues: args.queue_count() + u8::from(args.relay_listen.is_some()),
        depth: DEPTH,
        io_timeout: Duration::from_secs(args.io_timeout),
        checksum_full: args.checksum == Checksum::Full,
        local_reads: args.reads.unwrap_or_default() == Reads::Here,
        quorum: args.quorum,
        // Replicas that are reached by unix sockets had no engine but on this host, and the name's lock says that it has
        // ended. Over TCP another host may have one that has not heard of this one yet.
        known_dead: local,
        authority,
        loss_note: Some(root.loss_note(&args.volume)),
        limits,
    })
}

/// Refuses what would let the volume's bytes travel unencrypted unasked.
fn check_open(args: &ControllerArgs, replicas: &[ReplicaAddress]) -> Result<(), GivesUp> {
    let refusal = if !replicas.iter().all(|replica| replica.address.is_local()) {
        UNENCRYPTED
    } else if args.relay_listen.as_ref().is_some_and(|address| !address.is_local()) {
        relay::UNENCRYPTED
    } else {
        return Ok(());
    };
    if !args.insecure {
        return Err(GivesUp(refusal.to_owned()));
    }
    tracing::warn!("{DATA_OPEN}");
    Ok(())
}

/// What no engine starts with, however often it is tried.
pub(super) fn check_count(replicas: usize) -> Result<(), GivesUp> {
    match replicas {
        0 => Err(GivesUp("an engine needs at least one --replica NAME=unix:PATH".to_owned())),
        n if n > REPLICAS_MAX.into() => {
            Err(GivesUp(format!("{n} times --replica: a volume has at most {REPLICAS_MAX} replicas")))
        }
        _ => Ok(()),
    }
}

/// What an engine's main thread has in its hands.
struct Life {
    volume: String,
    handle: EngineHandle,
    events: Receiver<Event>,
    errands: Receiver<Errand>,
    queues: Queues,
    show: Show,
    shown: Arc<Mutex<FrontendState>>,
    /// Where relays come in.
    relays: Option<Relays>,
    progress: Progress,
    /// A clone that is being filled, or was.
    cloning: Option<Cloning>,
    waits: Waits,
    signalled: Signalled,
    /// Bytes, once the volume is open.
    open: Option<u64>,
    /// Its generation was given to it: it did not ask its replicas for theirs.
    is_numbered: bool,
    authority: Trouble,
}

impl Life {
    /// Until the engine ends, by whatever.
    fn live(mut self) -> Result<()> {
        let care = tick(CARE);
        loop {
            // Whoever has unmounted a file system that heard of a loss mounts it again soon.
            let closed = if self.handle.is_loss_open() { after(CLOSED) } else { never() };
            select! {
                recv(self.events) -> event => match event.context("the engine's control thread has ended")? {
                    Event::Open { size } => {
                        tracing::info!(size, "open");
                        if let Err(e) = self.open(size) {
                            // As if it had been killed: what the kernel keeps for the next server must not be answered with an error.
                            if !self.show.keeps_requests()
                                && let Err(left) = self.close_replicas()
                            {
                                tracing::error!("{left}");
                            }
                            return Err(e);
                        }
                    }
                    Event::Resized { size } => {
                        tracing::info!(size, "grown");
                        self.open = Some(size);
                        if let Err(e) = self.show.resize(size) {
                            tracing::error!("the device has its old size until it is shown anew: {e:#}");
                        }
                    }
                    // From now on it is looked after more often.
                    Event::Lost => {}
                    Event::Stopped(why) => {
                        return Err(ended_by_itself(&why, !self.is_numbered && self.open.is_none()));
                    }
                },
                recv(self.queues.notices) -> notice => match notice.context("all queue threads have ended")? {
                    // It was asked to, and has taken longer than whoever asked would wait.
                    Notice::Hidden if self.queues.has_left() => {
                        if self.hide_the_rest() && self.is_ending() {
                            return self.shut_down(None);
                        }
                    }
                    Notice::Hidden => return Err(self.show.taken_away()),
                    Notice::Ended(result) => {
                        result.context("a queue's thread has failed")?;
                        return Err(self.show.taken_away());
                    }
                },
                recv(self.errands) -> errand => {
                    match errand.context("the control socket's thread has ended")? {
                        Errand::End(reply) => match self.hide_for_good() {
                            Ok(()) => return self.shut_down(Some(reply)),
                            // Whoever asked may be gone.
                            Err(refused) => drop(reply.send(Err(refused).inspect_err(log_not_hidden))),
                        },
                        Errand::Hide(reply) => drop(reply.send(self.hide().inspect_err(log_not_hidden))),
                        Errand::Show(reply) => drop(reply.send(self.show_again())),
                        Errand::Clone(source, reply) => self.fill(*source, reply),
                    }
                }
                recv(care) -> _ => {
                    self.show.look_after(&self.queues);
                    self.look_after_loss();
                    self.waits.look(waited_for(&self.handle.status(), &self.authority));
                }
                recv(closed) -> _ => self.look_after_loss(),
            }
        }
    }

    fn open(&mut self, size: u64) -> Result<()> {
        self.open = Some(size);
        if is_unfinished(&self.handle.status().chain) {
            tracing::warn!("not shown: {UNFINISHED}");
            return Ok(());
        }
        let endpoint = self.show.show(&self.queues, size)?;
        tracing::info!(?endpoint, "shown");
        if endpoint.device.is_some() {
            freeze::thaw_left_over(&self.volume);
        }
        {
            let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
            (shown.endpoint, shown.hidden) = (Some(endpoint), false);
        }
        // Relays show what is shown here, and nothing before that.
        let visible = self.is_visible();
        if let Some(relays) = self.relays.as_mut().filter(|_| visible) {
            relays.open().context("relays cannot be let in")?;
        }
        Ok(())
    }

    /// Shows the volume after it was hidden.
    fn show_again(&mut self) -> Result<(), EngineError> {
        let Some(size) = self.open else {
            return Err(EngineError::NotNow("the volume is not open yet: it is shown when it is".to_owned()));
        };
        if self.is_shown() {
            return Ok(());
        }
        if self.progress.is_running() || is_unfinished(&self.handle.status().chain) {
            return Err(EngineError::NotNow(UNFINISHED.to_owned()));
        }
        self.open(size).map_err(|e| EngineError::Failed(format!("{e:#}")))
    }

    fn is_shown(&self) -> bool {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).endpoint.is_some()
    }

    fn look_after_loss(&self) {
        if self.is_shown() {
            self.handle.look_after_loss(|| self.is_in_use());
        }
    }

    /// Somebody may have the volume open: a device tells, a server's clients do not.
    fn is_in_use(&self) -> bool {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let device = shown.endpoint.as_ref().and_then(|e| e.device.clone());
        device.is_none_or(|device| show::is_in_use(&device))
    }

    /// Begins to fill the volume with a clone. Who asked hears when it holds everything.
    fn fill(&mut self, source: Source, reply: Reply) {
        let refusal = if self.open.is_none() {
            "the volume is not open yet"
        } else if self.progress.is_running() {
            "the volume is being filled with a clone already"
        } else if self.is_visible() {
            "the volume is shown: hide it before it is filled with a clone (`longhorn frontend shutdown`)"
        } else {
            return self.begin_clone(source, reply);
        };
        drop(reply.send(Err(EngineError::NotNow(refusal.to_owned()))));
    }

    fn begin_clone(&mut self, source: Source, reply: Reply) {
        let (writer, filler) = fill::channel(&self.handle);
        let begun = self.queues.tell(0, Order::Fill(filler)).and_then(|()| {
            let done = |result| drop(reply.send(result));
            Ok(Cloning::start(&self.handle, writer, source, &self.progress, done)?)
        });
        match begun {
            Ok(cloning) => self.cloning = Some(cloning),
            // The reply is gone with it, which says to who asked that nothing was begun.
            Err(e) => tracing::error!("no clone is begun: {e:#}"),
        }
    }

    /// Somebody can reach the volume's bytes.
    fn is_visible(&self) -> bool {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.endpoint.as_ref().is_some_and(|e| e.device.is_some() || e.uri.is_some())
    }

    /// Takes the frontend away.
    fn hide(&mut self) -> Result<(), EngineError> {
        if self.open.is_some() && !self.is_shown() {
            return Ok(());
        }
        self.show.hide(&self.queues).map_err(|e| match e {
            HideError::InUse(text) => EngineError::NotNow(text),
            HideError::Failed(e) => EngineError::Failed(format!("{e:#}")),
        })?;
        {
            let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
            (shown.endpoint, shown.hidden) = (None, true);
        }
        if let Some(relays) = &mut self.relays {
            relays.close();
        }
        Ok(())
    }

    /// A queue has ended what it shows after whoever wanted that was told that it is not over. With the last one it is: true then.
    fn hide_the_rest(&mut self) -> bool {
        if self.queues.leaving() > 0 {
            return false;
        }
        match self.hide() {
            Ok(()) => tracing::info!("hidden: what was in flight is done"),
            Err(e) => {
                tracing::error!("not hidden: {e}");
                self.shown.lock().unwrap_or_else(PoisonError::into_inner).ending = false;
                return false;
            }
        }
        true
    }

    /// The same before the engine ends: whoever looks from now on hears that it does. Where it takes longer than whoever asked
    /// waits, the engine ends once it is through.
    fn hide_for_good(&mut self) -> Result<(), EngineError> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).ending = true;
        let hidden = self.hide();
        let goes_on = self.queues.leaving() > 0;
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).ending = hidden.is_ok() || goes_on;
        hidden
    }

    /// It was told to end, and is to once nothing is shown any more.
    fn is_ending(&self) -> bool {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).ending
    }

    /// Flushes, closes the replicas, ends the queues.
    fn shut_down(mut self, answer: Option<Reply>) -> Result<()> {
        // Not waited for yet: its writes may wait for a replica that stands still.
        let cloning = self.cloning.take();
        cloning.iter().for_each(Cloning::stop);
        let done = self.close_replicas();
        cloning.into_iter().for_each(Cloning::end);
        self.queues.end();
        let _ = answer.map(|answer| answer.send(done.clone()));
        // Who asked for the end once more, perhaps because the first one's command was broken off, hears the same.
        for errand in self.errands.try_iter() {
            if let Errand::End(answer) = errand {
                let _ = answer.send(done.clone());
            }
        }
        // The process's end would cut the answer off.
        std::thread::sleep(LAST_ANSWER);
        match done {
            Ok(()) => Ok(()),
            Err(e) => {
                // The frontend is gone already: another start would only show what somebody wanted to go.
                tracing::error!("{e}");
                Ok(())
            }
        }
    }

    fn close_replicas(&self) -> Result<(), EngineError> {
        let failed = |text: &str| Err(EngineError::Failed(text.to_owned()));
        let late = || {
            failed(&format!(
                "not flushed and closed on every replica after {} s, and the manager waits no longer: the next start repairs",
                ENDED.as_secs()
            ))
        };
        let deadline = self.signalled.deadline();
        match recv_until(&self.handle.command(Command::Shutdown), deadline) {
            Ok(Ok(())) | Err(RecvTimeoutError::Disconnected) => {}
            Ok(Err(e)) => return failed(&e.to_string()),
            Err(RecvTimeoutError::Timeout) => return late(),
        }
        // Its last word says how it went.
        loop {
            let event = match recv_until(&self.events, deadline) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => return late(),
                Err(RecvTimeoutError::Disconnected) => return failed("the engine ended without a word"),
            };
            match event {
                Event::Open { .. } | Event::Resized { .. } | Event::Lost => {}
                Event::Stopped(Why::Clean) => return Ok(()),
                Event::Stopped(why @ Why::Unopened) => {
                    tracing::warn!("{why}: the next start repairs what the engine before it left in doubt");
                    return Ok(());
                }
                Event::Stopped(why) => return failed(&why.to_string()),
            }
        }
    }
}

/// What comes until then; without a deadline, whenever it comes.
fn recv_until<T>(from: &Receiver<T>, deadline: Option<Instant>) -> Result<T, RecvTimeoutError> {
    match deadline {
        Some(deadline) => from.recv_deadline(deadline),
        None => Ok(from.recv()?),
    }
}

/// What has failed may have been done by halves, and whoever asked may be gone. What was refused has changed nothing.
fn log_not_hidden(e: &EngineError) {
    if let EngineError::Failed(text) = e {
        tracing::error!("not hidden, which is to be asked for again: {text}");
    }
}

/// The end that nobody here asked for. `asks_again`: it has served nobody, and the next start asks the replicas anew for the number that
/// it takes. One that knows a higher one than this engine's may not have been there when it was asked.
fn ended_by_itself(why: &Why, asks_again: bool) -> anyhow::Error {
    if why.is_fenced() {
        // Not one answer more: neither to clients, nor by taking the device away from them.
        if asks_again {
            tell!("error: {why}, and was not there to be asked before: the next start takes a higher one");
            std::process::exit(1);
        }
        tell!("error: {why}");
        std::process::exit(control::manager::EXIT_GIVES_UP);
    }
    anyhow!("the engine ended: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_come_in_time_is_not_waited_for() {
        let (sender, receiver) = unbounded();
        let soon = || Some(Instant::now() + Duration::from_millis(20));
        assert_eq!(recv_until::<u8>(&receiver, soon()), Err(RecvTimeoutError::Timeout));
        sender.send(7).unwrap();
        assert_eq!(recv_until(&receiver, soon()), Ok(7));
        drop(sender);
        assert_eq!(recv_until(&receiver, None), Err(RecvTimeoutError::Disconnected));
    }
}
