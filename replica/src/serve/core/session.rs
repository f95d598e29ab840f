//! Who is let in. A session has one connection per queue; when one ends, all end.
//!
//! ```text
//!            Hello, younger or same engine
//!   (none) -------------------------------> Fencing --- drained, fence durable ---> Open
//!      ^                                       |                                      |
//!      +------ a connection ends, a younger session comes, the fence cannot be made --+
//! ```
//!
//! What has ended leaves orphans behind: requests in the store whose end the next session waits for.

use std::collections::VecDeque;

use lh_block::{Generation, Instance};
use lh_wire::handshake::Verdict;

use super::doubt::Window;
use super::{
    CloseReason, ConnId, Core, Directory, Output, Purpose, Record, RequestId, SessionHello, Stage, sabotaged,
};

/// Most queues of a session: far beyond the processors that one volume can use.
const QUEUES_MAX: u16 = 64;

/// Ended sessions whose late connections are recognised. An engine makes a new session at most every few
/// milliseconds, and a connection of a session older than this many has long been given up by its engine.
const ENDED_MAX: usize = 64;

/// Why a session ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ending {
    /// This connection of it broke.
    Gone(ConnId),
    /// This connection of it did harm.
    Harm(ConnId, CloseReason),
    /// A younger engine came.
    Younger,
    /// Its own engine began another.
    SameEngine,
}

/// A connection of the current session.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) id: ConnId,
    queue: u16,
    pub(super) welcomed: bool,
    pub(super) in_flight: u32,
    pub(super) window: Window,
}

/// The current session.
#[derive(Debug)]
pub(super) struct Session {
    id: Instance,
    generation: Generation,
    instance: Instance,
    queues: u16,
    open: bool,
    /// The highest generation before this session.
    pub(super) previous: Generation,
    /// Control operations that wait for their turn.
    pub(super) controls: VecDeque<RequestId>,
    /// The one whose turn it is.
    pub(super) control: Option<RequestId>,
    /// It begins with a sync, which has ended.
    pub(super) synced: bool,
}

impl Session {
    pub(super) const fn generation(&self) -> Generation {
        self.generation
    }

    pub(super) const fn is_open(&self) -> bool {
        self.open
    }

    fn is_engine(&self, hello: &SessionHello) -> bool {
        self.generation == hello.generation && self.instance == hello.instance
    }

    /// A request ended; maybe it was the control operation.
    pub(super) fn control_ended(&mut self, id: RequestId) {
        if self.control == Some(id) {
            self.control = None;
            self.synced = false;
        }
    }
}

impl Core {
    pub(super) fn hello(&mut self, conn: ConnId, hello: SessionHello, out: &mut Vec<Output>) {
        match self.judge(&hello) {
            Err(verdict) => out.push(Output::Refuse { conn, verdict, generation: self.generation() }),
            Ok(()) => self.admit_connection(conn, &hello, out),
        }
    }

    fn judge(&self, hello: &SessionHello) -> Result<(), Verdict> {
        let engine = (hello.generation, hello.instance);
        let stale = self.fence.is_some_and(|fence| {
            hello.generation < fence.0 || (hello.generation == fence.0 && hello.instance != fence.1)
        });
        if stale && !sabotaged!(self, accept_stale) {
            return Err(Verdict::Stale);
        }
        if hello.queues == 0 || hello.queues > QUEUES_MAX || hello.queue >= hello.queues {
            return Err(Verdict::Invalid);
        }
        if self.failed {
            return Err(Verdict::Unusable);
        }
        // A late connection of a session that is over: letting it in would end the session that came after it.
        if self.fence == Some(engine) && self.ended.contains(&hello.session) {
            return Err(Verdict::Invalid);
        }
        match &self.session {
            Some(s) if s.id == hello.session => {
                let taken = self.conns.iter().any(|c| c.queue == hello.queue);
                let joins = s.is_engine(hello) && s.queues == hello.queues && !taken;
                if joins { Ok(()) } else { Err(Verdict::Invalid) }
            }
            _ => Ok(()),
        }
    }

    /// The session of this hello is let in and nothing stands against its reading the layers itself: whoever was granted their
    /// files is not to use them any more when this is no longer so, and is told before anybody else is answered.
    pub fn may_be_granted(&self, hello: &SessionHello) -> bool {
        let is_let_in = |s: &Session| s.open && s.id == hello.session && s.is_engine(hello);
        let serves = self.session.as_ref().is_some_and(is_let_in);
        serves && !self.failed && !self.filling && self.directory == Directory::Open
    }

    fn admit_connection(&mut self, conn: ConnId, hello: &SessionHello, out: &mut Vec<Output>) {
        if self.session.as_ref().is_none_or(|s| s.id != hello.session) {
            self.supersede(hello, out);
        }
        let welcomed = self.session.as_ref().is_some_and(Session::is_open);
        self.conns.push(Conn { id: conn, queue: hello.queue, welcomed, in_flight: 0, window: Window::new() });
        if welcomed {
            out.push(Output::Welcome { conn, generation: self.generation() });
        }
    }

    /// A new session takes the place of whatever was before.
    fn supersede(&mut self, hello: &SessionHello, out: &mut Vec<Output>) {
        let previous = self.generation();
        let younger = hello.generation > previous;
        self.fence = Some((hello.generation, hello.instance));
        self.end_session(if younger { Ending::Younger } else { Ending::SameEngine }, out);
        self.session = Some(Session {
            id: hello.session,
            generation: hello.generation,
            instance: hello.instance,
            queues: hello.queues,
            open: false,
            previous,
            controls: VecDeque::new(),
            control: None,
            synced: false,
        });
    }

    pub(super) fn closed(&mut self, conn: ConnId, out: &mut Vec<Output>) {
        if self.conns.iter().any(|c| c.id == conn) {
            self.end_session(Ending::Gone(conn), out);
        }
    }

    /// Ends the session: closes its connections, remembers their last writes, drops what has not reached the store,
    /// and leaves the rest as orphans.
    pub(super) fn end_session(&mut self, ending: Ending, out: &mut Vec<Output>) {
        let Some(session) = self.session.take() else { return };
        if self.ended.len() == ENDED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back(session.id);
        self.missed.save_what_is_due();
        for c in std::mem::take(&mut self.conns) {
            if !sabotaged!(self, forget_in_doubt) {
                self.doubt.keep(&c.window);
            }
            let conn = c.id;
            match ending {
                Ending::Gone(gone) if gone == conn => {}
                Ending::Harm(culprit, reason) if culprit == conn => out.push(Output::Close { conn, reason }),
                // Who was not let in yet learns why; the others learn it when they come back.
                Ending::Younger if !c.welcomed => {
                    let generation = self.generation();
                    out.push(Output::Refuse { conn, verdict: Verdict::Stale, generation });
                }
                Ending::Younger | Ending::SameEngine => {
                    out.push(Output::Close { conn, reason: CloseReason::Superseded });
                }
                Ending::Gone(_) | Ending::Harm(..) => {
                    out.push(Output::Close { conn, reason: CloseReason::SessionEnded });
                }
            }
        }
        for at in 0..self.requests.len() {
            self.abandon(at, out);
        }
        let alive = |id: RequestId| self.requests.get(id.0 as usize).is_some_and(Option::is_some);
        self.intent_waiting.retain(|id| alive(*id));
        self.held.retain(|id| alive(*id));
        self.syncs.retain(alive);
    }

    /// One request of the session that ends. Orphans of earlier ones stay what they are.
    fn abandon(&mut self, at: usize, out: &mut Vec<Output>) {
        let Some(request) = self.requests[at].as_mut() else { return };
        if request.orphan {
            return;
        }
        if request.stage == Stage::Running {
            request.orphan = true;
            self.draining += 1;
            return;
        }
        let waiting_job = request.job.filter(|_| request.stage != Stage::Syncing);
        self.requests[at] = None;
        if let Some(job) = waiting_job {
            self.leave_store(job);
        }
        out.push(Output::Drop { request: RequestId(u32::try_from(at).unwrap_or(u32::MAX)) });
    }

    /// Takes the next step towards letting the session in.
    pub(super) fn advance_fence(&mut self, out: &mut Vec<Output>) {
        if self.failed {
            self.refuse_waiting(out);
        }
        let Some(session) = self.session.as_ref().filter(|s| !s.open) else { return };
        let wanted = (session.generation, session.instance);
        match self.directory {
            // A fence must not get into a directory that is being closed.
            Directory::Closing => return,
            Directory::Closed => {
                self.directory = Directory::Opening;
                self.persist(Purpose::Begin, Record::Begin { generation: wanted.0 }, out);
            }
            Directory::Opening | Directory::Open => {}
        }
        if self.fence_durable != Some(wanted) && !self.fence_saving {
            self.fence_saving = true;
            let (generation, instance) = wanted;
            let record = Record::Fence { generation, instance };
            self.persist(Purpose::Fence(generation, instance), record, out);
        }
        if self.fence_durable != Some(wanted) || self.directory != Directory::Open {
            return;
        }
        if self.draining > 0 && !sabotaged!(self, fence_without_drain) {
            return;
        }
        if let Some(session) = self.session.as_mut() {
            session.open = true;
        }
        for c in self.conns.iter_mut() {
            c.welcomed = true;
            out.push(Output::Welcome { conn: c.id, generation: wanted.0 });
        }
    }

    /// The fence cannot be made: the session that waits for it is sent away.
    pub(super) fn refuse_waiting(&mut self, out: &mut Vec<Output>) {
        if self.session.as_ref().is_some_and(|s| !s.open) {
            self.session = None;
            for c in std::mem::take(&mut self.conns) {
                let (verdict, generation) = (Verdict::Unusable, self.generation());
                out.push(Output::Refuse { conn: c.id, verdict, generation });
            }
        }
    }
}
