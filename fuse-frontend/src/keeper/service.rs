//! What a keeper does for those who connect to it.
//!
//! One thread per connection; the state is under one lock, which is held for moments only. The loop device is
//!
//! ```text
//! Absent --serve--> Binding --> Bound --stop--> Absent
//!                      |
//!                      +-- it failed --> Absent
//! ```
//!
//! and whoever finds it `Binding` waits for the thread that began, which goes on as soon as any engine serves.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::apart::apart;
use super::connection::Connection;
use super::lock::Lock;
use super::loop_device::{ClearError, LoopDevice};
use super::message::Message;
use super::refusal::{Refusal, kind, refuse};
use super::socket::{is_allowed, is_closed, pid_of, receive, send, wait_closed};
use super::{Options, STACK};
use crate::init::Agreement;
use crate::node;

/// Version of the messages.
pub(super) const VERSION: u32 = 1;

/// How long an engine waits for the one before to let go. A killed process takes milliseconds, seconds under load.
const HANDOVER: Duration = Duration::from_secs(10);

/// Connections at a time: an engine, the next one, and a few that ask.
const CONNECTIONS: usize = 16;

/// How long one that is no engine may think about its next request.
const IDLE: Duration = Duration::from_secs(30);

/// How long a keeper that has no connection waits for an engine: longer than one waits for its keeper to start, and so much that
/// nobody is still on the way.
const UNUSED: Duration = Duration::from_secs(30);

/// How long a device that is to be stopped may still be open.
const LETTING_GO: Duration = Duration::from_secs(1);

#[derive(Debug)]
enum Loop {
    Absent,
    Binding,
    Bound(LoopDevice),
}

#[derive(Debug)]
struct State {
    connection: Option<Arc<Connection>>,
    /// The engine's connection to this keeper, open as long as it lives.
    engine: Option<Arc<UnixStream>>,
    /// Some engine has had the descriptor before.
    served: bool,
    device: Loop,
    /// Everything has been given up; only the answer is left to be sent.
    ending: bool,
    stopped: bool,
}

/// A keeper's state and duties.
#[derive(Debug)]
pub(super) struct Service {
    options: Options,
    lock_file: Lock,
    state: Mutex<State>,
    changed: Condvar,
    connections: AtomicUsize,
}

/// Takes connections, for ever.
pub(super) fn accept(service: &Arc<Service>, listener: &UnixListener) {
    for stream in listener.incoming() {
        let stream = match stream {
            Ok(stream) => stream,
            Err(e) => {
                tracing::warn!("cannot take a connection: {e}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if service.connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS || !is_allowed(&stream) {
            service.connections.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let own = Arc::clone(service);
        let spawned = std::thread::Builder::new().name("client".into()).stack_size(STACK).spawn(move || {
            own.converse(stream);
            own.connections.fetch_sub(1, Ordering::AcqRel);
        });
        if let Err(e) = spawned {
            tracing::warn!("cannot start a thread: {e}");
            service.connections.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Service {
    pub(super) fn new(options: Options, lock_file: Lock) -> Self {
        let state = State {
            connection: None,
            engine: None,
            served: false,
            device: Loop::Absent,
            ending: false,
            stopped: false,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { options, lock_file, state, changed, connections: AtomicUsize::new(0) }
    }

    pub(super) fn lock_file(&self) -> &Lock {
        &self.lock_file
    }

    /// The loop device's name, for people.
    fn device_name(&self) -> String {
        format!("longhorn:{}", self.options.volume)
    }

    /// Returns once `stop` has been carried out and answered, or this keeper is of no use: it has no connection, and nobody comes for
    /// one.
    pub(super) fn wait_for_stop(&self) {
        let mut state = self.lock();
        let mut unused_since = Instant::now();
        while !state.stopped {
            let is_used = state.connection.is_some() || self.connections.load(Ordering::Acquire) > 0;
            if is_used {
                unused_since = Instant::now();
            }
            if unused_since.elapsed() >= UNUSED {
                tracing::info!("no engine has come for a connection: ending");
                state.ending = true;
                return;
            }
            // Whoever makes a connection, or lets go of one, wakes nobody: this looks again by itself while there is none.
            state = match state.connection {
                Some(_) => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                None => self.changed.wait_timeout(state, UNUSED).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers one connection until it closes.
    fn converse(&self, stream: UnixStream) {
        let stream = Arc::new(stream);
        let _ = stream.set_read_timeout(Some(IDLE));
        while let Ok((request, descriptor)) = receive(&stream) {
            let (answer, fuse, stopped) = match self.obey(&stream, &request, descriptor) {
                Ok((answer, fuse)) => (answer, fuse, request.word == "stop"),
                Err(refusal) => {
                    let answer = Message::new("error").with("kind", refusal.kind).with("text", refusal.text);
                    (answer, None, refusal.ends)
                }
            };
            let sent = send(&stream, &answer, fuse.as_ref().map(|c| c.fuse.as_fd()));
            if stopped {
                self.lock().stopped = true;
                self.changed.notify_all();
            }
            if sent.is_err() {
                break;
            }
        }
    }

    fn obey(
        &self,
        stream: &Arc<UnixStream>,
        request: &Message,
        descriptor: Option<OwnedFd>,
    ) -> Result<(Message, Option<Arc<Connection>>), Refusal> {
        match request.word.as_str() {
            "info" => Ok((self.info(&self.lock()), None)),
            "attach" => self.attach(stream, request),
            "adopt" => self.adopt(stream, request, descriptor).map(|answer| (answer, None)),
            "serve" => self.serve(stream, request).map(|answer| (answer, None)),
            "resize" => self.resize(stream).map(|answer| (answer, None)),
            "stop" => self.stop(stream, request).map(|answer| (answer, None)),
            other => Err(refuse(kind::INVALID, format!("unknown request {other:?}"))),
        }
    }

    fn info(&self, state: &State) -> Message {
        let mut message = Message::new("ok")
            .with("version", VERSION)
            .with("volume", &self.options.volume)
            .with("owner", &self.options.owner)
            .with("node", self.options.node.display())
            .with("pid", std::process::id())
            .with("served", u32::from(state.served))
            .with_option("engine", state.engine.as_ref().filter(|e| !is_closed(e)).and_then(|e| pid_of(e)));
        if let Some(connection) = &state.connection {
            message = message
                .with("connection", connection.device)
                .with("minor", connection.agreement.minor)
                .with("flags", connection.agreement.flags)
                .with("max_write", connection.agreement.max_write);
        }
        match state.device {
            Loop::Bound(device) => message.with("loop", device.number).with("sequence", device.sequence),
            Loop::Absent | Loop::Binding => message,
        }
    }

    /// Gives the descriptor to an engine, after the one before has gone.
    fn attach(
        &self,
        stream: &Arc<UnixStream>,
        request: &Message,
    ) -> Result<(Message, Option<Arc<Connection>>), Refusal> {
        self.check_owner(request)?;
        let mut state = self.without_ended(self.become_engine(stream)?);
        let connection = match &state.connection {
            Some(connection) => Arc::clone(connection),
            None => match self.create() {
                Ok(connection) => {
                    state.connection = Some(Arc::clone(&connection));
                    connection
                }
                // What it lacks, the next one may have: this one may have another /dev than those that come later.
                Err(refusal) => {
                    (state.engine, state.ending) = (None, true);
                    return Err(refusal.at_the_end());
                }
            },
        };
        let answer = self.info(&state);
        state.served = true;
        Ok((answer, Some(connection)))
    }

    /// Lets go of a connection that the kernel has ended, so that the next one is made anew: an administrator aborts one so, and a
    /// stop by force that then finds the device in use. Who has that device open keeps one that fails, until it is closed.
    /// Nothing waits for a server of it any more, so that the lock may be held.
    fn without_ended<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        while state.connection.as_ref().is_some_and(|connection| connection.has_ended()) {
            match state.device {
                // Whoever binds hears of it, too.
                Loop::Binding => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Loop::Bound(device) => {
                    tracing::warn!("the connection has ended: unbinding {}", device.path().display());
                    if let Err(e) = device.clear_at_last_close() {
                        tracing::warn!("{} stays: {e}", device.path().display());
                    }
                    self.remove_node(device);
                    state.device = Loop::Absent;
                }
                Loop::Absent => (state.connection, state.served) = (None, false),
            }
        }
        state
    }

    /// A new connection. The lock is held: nothing here waits for an engine.
    fn create(&self) -> Result<Arc<Connection>, Refusal> {
        if let Some(stale) = self.lock_file.left_behind() {
            tracing::info!("unbinding {}, left behind by a keeper that is gone", stale.path().display());
            if let Err(e) = stale.clear_at_last_close() {
                tracing::warn!("{} stays: {e}", stale.path().display());
            }
        }
        node::check(&self.options.node, &self.own_devices(None))?;
        let connection =
            Connection::create(&self.options.volume).map_err(|text| refuse(kind::SYSTEM, text))?;
        Ok(Arc::new(connection))
    }

    /// Takes over from a keeper that died, while its engine lives.
    fn adopt(
        &self,
        stream: &Arc<UnixStream>,
        request: &Message,
        fuse: Option<OwnedFd>,
    ) -> Result<Message, Refusal> {
        let invalid = || refuse(kind::INVALID, "adopt lacks its descriptor or a number");
        self.check_owner(request)?;
        let fuse = fuse.ok_or_else(invalid)?;
        let agreement = Agreement {
            minor: request.number("minor").ok_or_else(invalid)?,
            flags: request.number("flags").ok_or_else(invalid)?,
            max_write: request.number("max_write").ok_or_else(invalid)?,
        };
        let device = request.number("connection").ok_or_else(invalid)?;
        let bound = LoopDevice {
            number: request.number("loop").ok_or_else(invalid)?,
            sequence: request.number("sequence").ok_or_else(invalid)?,
        };
        if !bound.is_bound() {
            return Err(refuse(kind::INVALID, format!("{} is not this volume's", bound.path().display())));
        }
        let mut state = self.become_engine(stream)?;
        if state.connection.is_some() {
            state.engine = None;
            return Err(refuse(kind::INVALID, "this keeper has a connection already"));
        }
        state.connection = Some(Arc::new(Connection::adopted(fuse, device, agreement)));
        state.device = Loop::Bound(bound);
        state.served = true;
        self.record(bound);
        Ok(self.info(&state))
    }

    fn check_owner(&self, request: &Message) -> Result<(), Refusal> {
        if request.get("owner") == Some(&self.options.owner) {
            return Ok(());
        }
        let text = format!("volume {} runs under {}", self.options.volume, self.options.owner);
        Err(refuse(kind::OWNER, text))
    }

    /// Waits for the engine before to be gone, and makes this connection the engine's.
    fn become_engine(&self, stream: &Arc<UnixStream>) -> Result<MutexGuard<'_, State>, Refusal> {
        let deadline = Instant::now() + HANDOVER;
        loop {
            let mut state = self.lock();
            if state.ending {
                return Err(refuse(kind::ENDING, "this keeper has been stopped"));
            }
            let before = match &state.engine {
                Some(engine) if !Arc::ptr_eq(engine, stream) && !is_closed(engine) => Arc::clone(engine),
                _ => {
                    state.engine = Some(Arc::clone(stream));
                    let _ = stream.set_read_timeout(None);
                    return Ok(state);
                }
            };
            drop(state);
            if !wait_closed(&before, deadline) {
                let pid = pid_of(&before).map_or_else(String::new, |pid| format!(" (pid {pid})"));
                return Err(refuse(kind::BUSY, format!("another engine{pid} serves the volume")));
            }
        }
    }

    /// The state, if this connection is the engine's.
    fn as_engine(
        &self,
        stream: &Arc<UnixStream>,
    ) -> Result<(MutexGuard<'_, State>, Arc<Connection>), Refusal> {
        let state = self.lock();
        let is_engine = state.engine.as_ref().is_some_and(|engine| Arc::ptr_eq(engine, stream));
        match state.connection.clone() {
            Some(connection) if is_engine => Ok((state, connection)),
            _ => Err(refuse(kind::INVALID, "only the engine that is attached may ask this")),
        }
    }

    /// The engine serves: binds the loop device if there is none, and makes the node.
    fn serve(&self, stream: &Arc<UnixStream>, request: &Message) -> Result<Message, Refusal> {
        let block_size: u32 = request
            .number("block_size")
            .filter(|size| [512, 4096].contains(size))
            .ok_or_else(|| refuse(kind::INVALID, "serve needs block_size 512 or 4096"))?;
        let (mut state, connection) = self.as_engine(stream)?;
        loop {
            match state.device {
                Loop::Bound(device) if device.is_bound() => {
                    drop(state);
                    self.check_blocks(device, block_size)?;
                    // The volume may have grown while nobody served it.
                    Self::grow(&connection, device)?;
                    self.place_node(device)?;
                    return Ok(self.info(&self.lock()));
                }
                Loop::Binding => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                // Never bound, or somebody else has unbound it.
                Loop::Absent | Loop::Bound(_) => {
                    let before = std::mem::replace(&mut state.device, Loop::Binding);
                    drop(state);
                    if let Loop::Bound(gone) = before {
                        // Its number may be another's by now.
                        self.remove_node(gone);
                    }
                    let bound = self.bind(&connection, block_size);
                    state = self.lock();
                    let result = match bound {
                        Ok(device) => {
                            state.device = Loop::Bound(device);
                            Ok(())
                        }
                        Err(e) => {
                            state.device = Loop::Absent;
                            Err(refuse(kind::SYSTEM, format!("cannot set up the loop device: {e}")))
                        }
                    };
                    self.changed.notify_all();
                    result?;
                }
            }
        }
    }

    /// Who has the device open, or a file system on it, reckons with its blocks.
    fn check_blocks(&self, device: LoopDevice, ours: u32) -> Result<(), Refusal> {
        match device.block_size() {
            Some(theirs) if theirs != ours => {
                let text = format!(
                    "{} has blocks of {theirs} bytes, the volume has {ours}: stop what uses it, and detach the volume first",
                    self.options.node.display()
                );
                Err(refuse(kind::BLOCKS, text))
            }
            _ => Ok(()),
        }
    }

    /// Waits for the server of the file.
    fn bind(&self, connection: &Connection, block_size: u32) -> io::Result<LoopDevice> {
        let device = apart(connection, || {
            let file = connection.open_file()?;
            LoopDevice::bind(&file, block_size, &self.device_name())
        })?;
        self.record(device);
        Ok(device)
    }

    fn record(&self, device: LoopDevice) {
        if let Err(e) = self.lock_file.record(device) {
            tracing::warn!("the next keeper will not know of {}: {e}", device.path().display());
        }
    }

    fn place_node(&self, device: LoopDevice) -> Result<(), Refusal> {
        let rdev = device.rdev().map_err(|e| refuse(kind::SYSTEM, e))?;
        let own = self.own_devices(Some(rdev));
        Ok(node::place(&self.options.node, rdev, &own)?)
    }

    /// Devices whose node may be replaced: this keeper's, and the one that a dead keeper of the volume had bound. Whoever has
    /// that one's number now, the node of this name was made for the volume.
    fn own_devices(&self, current: Option<u64>) -> Vec<u64> {
        let stale = self.lock_file.recorded().and_then(|device| device.rdev().ok());
        stale.into_iter().chain(current).collect()
    }

    fn resize(&self, stream: &Arc<UnixStream>) -> Result<Message, Refusal> {
        let (state, connection) = self.as_engine(stream)?;
        let Loop::Bound(device) = state.device else {
            return Err(refuse(kind::INVALID, "there is no device yet"));
        };
        drop(state);
        Self::grow(&connection, device)?;
        Ok(self.info(&self.lock()))
    }

    fn grow(connection: &Connection, device: LoopDevice) -> Result<(), Refusal> {
        // The kernel has a size for the driver also where nobody can be asked any more.
        let ended = || Err(io::ErrorKind::NotConnected.into());
        let grown = if connection.has_ended() { ended() } else { apart(connection, || device.grow()) };
        grown.map_err(|e| refuse(kind::SYSTEM, format!("cannot grow {}: {e}", device.path().display())))
    }

    /// Ends the device and the connection. With `force` also while no engine serves: what is in flight fails. With `abandon` also
    /// while somebody has the device open, which is unbound when they close it.
    fn stop(&self, stream: &Arc<UnixStream>, request: &Message) -> Result<Message, Refusal> {
        let force = request.get("force") == Some("1");
        let mut state = self.lock();
        let before = state.engine.clone();
        let engine = before.as_ref();
        let is_engine = engine.is_some_and(|engine| Arc::ptr_eq(engine, stream));
        if !is_engine && engine.is_some_and(|engine| !is_closed(engine)) {
            return Err(refuse(kind::BUSY, "an engine serves the volume: stop that"));
        }
        let Some(connection) = state.connection.clone() else {
            state.ending = true;
            return Ok(Message::new("ok"));
        };
        if !is_engine {
            if !force && !matches!(state.device, Loop::Absent) {
                let text =
                    "no engine serves the device, and what waits for it would fail: start one, or use force";
                return Err(refuse(kind::INVALID, text));
            }
            connection
                .abort()
                .map_err(|e| refuse(kind::SYSTEM, format!("cannot abort the FUSE connection: {e}")))?;
        }
        while matches!(state.device, Loop::Binding) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        check_engine(&state, before.as_ref())?;
        if let Loop::Bound(device) = state.device {
            drop(state);
            let gone = match request.get("abandon") == Some("1") {
                true => Self::abandon(&connection, device),
                false => self.unbind(&connection, device),
            };
            state = self.lock();
            check_engine(&state, before.as_ref()).inspect_err(|_| let_go(&state, device))?;
            gone?;
            self.remove_node(device);
            state.device = Loop::Absent;
        }
        state.ending = true;
        connection.unmount();
        Ok(Message::new("ok"))
    }

    /// Unbinds the device, with a little patience for those who are just letting go: a program's own ring closes its
    /// files after the program has ended, and udev looks at every new device.
    fn clear(&self, connection: &Connection, device: LoopDevice) -> Result<(), ClearError> {
        let deadline = Instant::now() + LETTING_GO;
        loop {
            match apart(connection, || Ok(device.clear(&self.device_name()))).map_err(ClearError::Io)? {
                Err(ClearError::InUse) if Instant::now() < deadline => std::thread::sleep(LETTING_GO / 20),
                other => return other,
            }
        }
    }

    fn abandon(connection: &Connection, device: LoopDevice) -> Result<(), Refusal> {
        apart(connection, || device.clear_at_last_close())
            .map_err(|e| refuse(kind::SYSTEM, format!("cannot unbind {}: {e}", device.path().display())))
    }

    fn remove_node(&self, device: LoopDevice) {
        let removed = device.rdev().and_then(|rdev| node::remove(&self.options.node, rdev));
        if let Err(e) = removed {
            tracing::warn!("{} stays: {e}", self.options.node.display());
        }
    }

    fn unbind(&self, connection: &Connection, device: LoopDevice) -> Result<(), Refusal> {
        self.clear(connection, device).map_err(|e| match e {
            ClearError::InUse => refuse(kind::IN_USE, format!("{} is in use", self.options.node.display())),
            ClearError::Io(e) => {
                refuse(kind::SYSTEM, format!("cannot unbind {}: {e}", device.path().display()))
            }
        })
    }
}

/// Nothing ends under an engine that has come since this one was there, or none.
fn check_engine(state: &State, before: Option<&Arc<UnixStream>>) -> Result<(), Refusal> {
    if state.engine.as_ref().map(Arc::as_ptr) == before.map(Arc::as_ptr) {
        return Ok(());
    }
    Err(refuse(kind::BUSY, "another engine has come for the volume meanwhile: stop that"))
}

/// Who has a device open for which an engine that has come has another one keeps it until they close it: trying in vain to unbind it
/// has it stay beyond that.
fn let_go(state: &State, device: LoopDevice) {
    if matches!(state.device, Loop::Bound(now) if now == device) {
        return;
    }
    if let Err(e) = device.clear_at_last_close() {
        tracing::warn!("{} stays: {e}", device.path().display());
    }
}
