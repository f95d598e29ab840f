//! The machine of a replica's server: who may come in, what runs, what waits for what. It does no I/O, reads no clock
//! and sees no payload.
//!
//! - Nobody is let in before every request taken from earlier sessions has ended in the store and the fence is
//!   durable; nothing of an older generation is let in at all (`docs/invariants.md`, 2).
//! - The ranges of the last writes of dead connections are kept until an engine calls them resolved; the first write
//!   into a chunk waits for its durable mark (4).
//! - What a replica that is out may lack is kept until it is back (8).
//! - A flush is answered after a sync that began after it was taken; one sync serves all who wait (5).
//! - Control operations run one at a time, in their order; a snapshot switches only while no write is in flight (9).
//! - After a failed sync or a failed record nothing succeeds any more.

mod control;
mod data;
mod doubt;
mod event;
mod intent;
mod missed;
mod record;
#[cfg(feature = "sabotage")]
mod sabotage;
mod session;
mod sync;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use lh_block::{Epoch, Generation, Instance};
use lh_wire::{ChainOp, Control, Header, IN_PART, OpCode, Status, flags};

pub use event::{
    Body, CloseReason, Completed, ConnId, Facts, Failure, Input, Job, Output, PersistId, Record, RequestId,
    SessionHello, Trail,
};
#[cfg(feature = "sabotage")]
pub use sabotage::Sabotage;

use doubt::InDoubt;
use intent::IntentMap;
use missed::Missed;
use session::{Conn, Ending, Session};
use sync::Syncs;

/// Requests in flight that a connection may have. An engine keeps to 256 writes and as many reads; whoever sends more
/// without waiting for answers means harm or has lost count.
pub const IN_FLIGHT_MAX: u32 = 512;

/// What a session hears that has closed the directory.
const CLOSED: &str = "the replica's directory is closed: connect again to open it";

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A control operation behind others.
    Queued,
    /// Waits for the end of a switch of the chain.
    Held,
    /// Waits for its chunks' marks.
    Intent,
    /// In the store, or a control operation that is being carried out.
    Running,
    /// Waits for a sync.
    Syncing,
}

/// A request in flight.
#[derive(Debug)]
struct Request {
    conn: ConnId,
    header: Header,
    control: Option<Box<Control>>,
    job: Option<Job>,
    stage: Stage,
    /// What its answer will say in [`Header::aux`].
    aux: u32,
    /// Its session has ended: the next session waits for it, nobody gets its answer.
    orphan: bool,
}

/// What a record on its way is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Fence(Generation, Instance),
    Intent,
    Begin,
    Missed,
    Whole,
    /// What is kept of others, which this control operation makes void.
    Forget(RequestId),
    Control(RequestId),
}

/// The directory as far as records go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Directory {
    /// Not used yet, or closed cleanly.
    Closed,
    /// [`Record::Begin`] is on its way.
    Opening,
    Open,
    /// [`Record::Close`] is on its way.
    Closing,
}

/// A replica's server. See the module's documentation.
#[derive(Debug)]
pub struct Core {
    size: u64,
    epoch: Option<Epoch>,
    prepared: Option<(Instance, ChainOp)>,
    committed: Option<Instance>,
    /// Closed cleanly before, and not written since.
    clean: bool,
    /// See [`lh_wire::ReplicaState::lived`].
    lived: bool,
    /// See [`lh_wire::ReplicaState::powered`]: it is noted, and the note says so.
    powered: bool,
    /// A note of it is due.
    notes_whole: bool,
    failed: bool,
    /// A rebuild has begun and not ended.
    filling: bool,
    /// What counts once the rebuild has ended, and who is no member of it.
    next_epoch: Option<(Epoch, Vec<String>)>,
    /// It was out: it has not seen every write of the epochs before the next one that it records.
    strange: bool,
    directory: Directory,
    intent: IntentMap,
    missed: Missed,
    /// No trails are saved before this.
    missed_at: Option<u64>,
    doubt: InDoubt,
    /// The highest generation accepted, and whose it is.
    fence: Option<(Generation, Instance)>,
    /// What is durable of it.
    fence_durable: Option<(Generation, Instance)>,
    fence_saving: bool,
    session: Option<Session>,
    /// Numbers of sessions that ended lately: a late connection of one must not begin it anew.
    ended: VecDeque<Instance>,
    conns: Vec<Conn>,
    requests: Vec<Option<Request>>,
    /// Writes that wait for their marks, in order of arrival.
    intent_waiting: Vec<RequestId>,
    /// Requests that wait for the end of a switch, in order of arrival.
    held: Vec<RequestId>,
    /// A control operation that changes the chain or closes the directory is being carried out.
    switching: bool,
    syncs: Syncs,
    persists: Vec<(PersistId, Purpose)>,
    persist_next: u64,
    /// An epoch that nobody is out of is on its way: no trail is to be saved behind it.
    forgetting: Option<PersistId>,
    /// Requests of ended sessions that still run.
    draining: usize,
    /// Requests taken that touch the layers and have not ended in the store, and those among them that write.
    jobs: usize,
    writes: usize,
    /// The store was written since the last sync began.
    written: bool,
    #[cfg(feature = "sabotage")]
    sabotage: Sabotage,
}

/// Whether a mechanism is taken out; always false without the feature.
macro_rules! sabotaged {
    ($core:expr, $switch:ident) => {{
        #[cfg(feature = "sabotage")]
        {
            $core.sabotage.$switch
        }
        #[cfg(not(feature = "sabotage"))]
        {
            false
        }
    }};
}
use sabotaged;

impl Core {
    /// The machine over an opened directory.
    pub fn new(facts: Facts) -> Self {
        Self {
            intent: IntentMap::new(facts.intent_chunk, facts.size, &facts.intent),
            missed: Missed::new(facts.intent_chunk, &facts.out, &facts.missed, &facts.intent),
            size: facts.size,
            epoch: facts.epoch,
            prepared: facts.prepared,
            committed: facts.committed,
            clean: facts.clean,
            lived: facts.clean,
            powered: facts.powered,
            notes_whole: false,
            failed: false,
            filling: false,
            next_epoch: None,
            strange: false,
            directory: Directory::Closed,
            missed_at: None,
            doubt: InDoubt::default(),
            fence: facts.fence,
            fence_durable: facts.fence,
            fence_saving: false,
            session: None,
            ended: VecDeque::new(),
            conns: Vec::new(),
            requests: Vec::new(),
            intent_waiting: Vec::new(),
            held: Vec::new(),
            switching: false,
            syncs: Syncs::default(),
            persists: Vec::new(),
            persist_next: 0,
            forgetting: None,
            draining: 0,
            jobs: 0,
            writes: 0,
            written: false,
            #[cfg(feature = "sabotage")]
            sabotage: Sabotage::default(),
        }
    }

    /// Takes mechanisms out.
    #[cfg(feature = "sabotage")]
    #[must_use]
    pub const fn sabotaged(mut self, sabotage: Sabotage) -> Self {
        self.sabotage = sabotage;
        self
    }

    /// Takes one input in and appends what is to be done about it. `now_ns` never goes back.
    pub fn apply(&mut self, now_ns: u64, input: Input, out: &mut Vec<Output>) {
        match input {
            Input::Hello { conn, hello } => self.hello(conn, hello, out),
            Input::Message { conn, request, header, control } => {
                self.message(now_ns, conn, request, header, control, out);
            }
            Input::Closed { conn } => self.closed(conn, out),
            Input::Done { request, result } => self.store_done(request, result, out),
            Input::Described { request, result } => self.described(request, result, out),
            Input::Mapped { request, result } => self.mapped(request, result, out),
            Input::Synced { result } => self.synced(result, out),
            Input::Broken => self.fail(out),
            Input::Persisted { id, result } => self.persisted(now_ns, id, result, out),
            Input::Tick => {}
        }
        self.start_controls(out);
        self.start_sync(out);
        self.note_whole(out);
        self.save_intent(now_ns, out);
        self.save_missed(now_ns, out);
        self.advance_fence(out);
    }

    /// When [`Input::Tick`] is wanted at the latest, on the clock of [`Core::apply`].
    pub fn wake_at(&self) -> Option<u64> {
        // While the chain is switched no record of the bitmap is put out; the end of the switch is an input.
        let due = self.intent.wake_at().into_iter().chain(self.missed_at).min();
        due.filter(|_| self.is_in_use())
    }

    /// A sync or a record failed: nothing succeeds any more.
    pub const fn is_failed(&self) -> bool {
        self.failed
    }

    /// The directory is as it was found, or closed: no session has begun to use it.
    pub fn is_closed(&self) -> bool {
        self.directory == Directory::Closed
    }

    /// True while nothing stands against work on the layers that nobody asked for.
    pub fn is_in_use(&self) -> bool {
        self.directory == Directory::Open && !self.switching && !self.failed
    }

    /// See [`lh_wire::ReplicaState::lived`].
    pub const fn lived(&self) -> bool {
        self.lived
    }

    /// What its layers hold is in doubt: a repair may yet put data into one below the head, which must not show where the head was
    /// zeroed meanwhile.
    pub fn is_in_doubt(&self) -> bool {
        !self.lived && !sabotaged!(self, zero_over_doubt)
    }

    /// The highest generation accepted.
    pub fn generation(&self) -> Generation {
        self.fence.map_or(Generation::default(), |(generation, _)| generation)
    }

    /// True if a session is let in.
    pub fn is_serving(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.is_open())
    }

    /// True if nothing is on its way: no job, no sync, no record.
    pub fn is_idle(&self) -> bool {
        self.draining == 0
            && self.requests.iter().all(Option::is_none)
            && !self.syncs.is_running()
            && self.persists.is_empty()
    }

    /// Volume size in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    fn message(
        &mut self,
        now_ns: u64,
        conn: ConnId,
        id: RequestId,
        header: Header,
        control: Option<Box<Control>>,
        out: &mut Vec<Output>,
    ) {
        let Some(c) = self.conns.iter_mut().find(|c| c.id == conn) else {
            // Its session ended while the message was on its way here.
            out.push(Output::Drop { request: id });
            return;
        };
        let harm = match (c.welcomed, c.in_flight < IN_FLIGHT_MAX) {
            (false, _) => Some(CloseReason::Protocol),
            (true, false) => Some(CloseReason::TooMany),
            (true, true) => None,
        };
        if let Some(reason) = harm {
            out.push(Output::Drop { request: id });
            self.end_session(Ending::Harm(conn, reason), out);
            return;
        }
        c.in_flight += 1;
        self.enter(
            id,
            Request { conn, header, control, job: None, stage: Stage::Queued, aux: 0, orphan: false },
        );
        match self.gate(&header) {
            None => self.dispatch(now_ns, id, out),
            Some((status, body)) => self.finish(id, status, Completed::default(), body, out),
        }
    }

    /// What holds for every message of a session: how one is answered that goes no further.
    fn gate(&self, header: &Header) -> Option<(Status, Body)> {
        let current = self.session.as_ref().map(Session::generation);
        if self.failed {
            return Some((Status::Io, Body::None));
        }
        if header.has(flags::RESPONSE) {
            return Some((Status::Invalid, Body::None));
        }
        if current != Some(header.generation) && !sabotaged!(self, accept_stale) {
            return Some((Status::Stale, Body::None));
        }
        let closed = self.directory != Directory::Open && header.op != OpCode::Ping;
        closed.then(|| (Status::Refused, Body::Text(CLOSED.into())))
    }

    fn dispatch(&mut self, now_ns: u64, id: RequestId, out: &mut Vec<Output>) {
        let Some(request) = self.request(id) else { return };
        let header = request.header;
        match header.op {
            OpCode::Ping => self.finish(id, Status::Ok, Completed::default(), Body::None, out),
            OpCode::Flush => self.flush(id, out),
            OpCode::ClearIntent => self.clear_intent(now_ns, id, &header, out),
            OpCode::Control => self.queue_control(id, out),
            _ => self.take_data(id, &header, out),
        }
    }

    fn enter(&mut self, id: RequestId, request: Request) {
        let at = id.0 as usize;
        if at >= self.requests.len() {
            self.requests.resize_with(at + 1, || None);
        }
        assert!(self.requests[at].is_none(), "the driver used the place {at} twice");
        self.requests[at] = Some(request);
    }

    fn request(&mut self, id: RequestId) -> Option<&mut Request> {
        self.requests.get_mut(id.0 as usize).and_then(Option::as_mut)
    }

    /// Ends a request with an answer, or without one if its session has ended.
    fn finish(
        &mut self,
        id: RequestId,
        status: Status,
        completed: Completed,
        body: Body,
        out: &mut Vec<Output>,
    ) {
        let Some(request) = self.requests.get_mut(id.0 as usize).and_then(Option::take) else { return };
        if request.orphan {
            self.draining -= 1;
            out.push(Output::Drop { request: id });
            return;
        }
        if let Some(c) = self.conns.iter_mut().find(|c| c.id == request.conn) {
            c.in_flight -= 1;
        }
        if let Some(session) = self.session.as_mut() {
            session.control_ended(id);
        }
        let status = match status {
            // The rest had no space.
            Status::Ok if request.header.op == OpCode::Write && completed.aux & IN_PART != 0 => {
                Status::NoSpace
            }
            status => status,
        };
        let mut header = request.header.response(status);
        header.payload = completed.payload;
        header.aux = completed.aux;
        out.push(Output::Reply { conn: request.conn, request: id, header, body });
    }

    fn fail_request(&mut self, id: RequestId, failure: Failure, out: &mut Vec<Output>) {
        let mut completed = Completed::default();
        let (status, body) = match failure {
            Failure::NoSpace => (Status::NoSpace, Body::None),
            Failure::FullInPart => {
                completed.aux = IN_PART;
                (Status::NoSpace, Body::None)
            }
            Failure::Io => (Status::Io, Body::None),
            Failure::Invalid => (Status::Invalid, Body::None),
            Failure::Rotten => (Status::Rotten, Body::None),
            Failure::Refused(text) => (Status::Refused, Body::Text(text)),
        };
        self.finish(id, status, completed, body, out);
    }
}
