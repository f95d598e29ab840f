//! The machine driven by hand, and at random.

mod control;
mod flush;
mod random;
mod sessions;
mod writes;

use lh_block::{Extent, Generation, Instance};
use lh_wire::handshake::Verdict;
use lh_wire::{Control, Header, OpCode, ReplicaState, Status, flags};

use super::{
    Body, Completed, ConnId, Core, Facts, Failure, Input, Output, PersistId, Record, RequestId, SessionHello,
};

const CHUNK: u64 = 4 << 20;
const SIZE: u64 = 64 << 20;

fn generation(n: u32) -> Generation {
    Generation { attachment: n, restart: 0 }
}

fn facts() -> Facts {
    Facts { size: SIZE, intent_chunk: CHUNK, clean: true, ..Facts::default() }
}

/// A machine and what it wants done, in the order in which it wanted it.
struct Rig {
    core: Core,
    now: u64,
    out: Vec<Output>,
    conns: u64,
    requests: u32,
}

impl Rig {
    fn new(facts: Facts) -> Self {
        Self { core: Core::new(facts), now: 0, out: Vec::new(), conns: 0, requests: 0 }
    }

    fn apply(&mut self, input: Input) {
        self.core.apply(self.now, input, &mut self.out);
    }

    /// One connection of a session, not let in yet. The engine instance is the generation's number unless given.
    fn knock(&mut self, hello: SessionHello) -> ConnId {
        let conn = ConnId(self.conns);
        self.conns += 1;
        self.apply(Input::Hello { conn, hello });
        conn
    }

    /// A session of one connection, let in.
    fn open(&mut self, n: u32, session: u128) -> ConnId {
        let conn = self.knock(hello(n, session));
        self.persist_all();
        assert!(self.welcomed(conn), "{:?}", self.out);
        self.out.clear();
        conn
    }

    fn send(&mut self, conn: ConnId, header: Header) -> RequestId {
        self.send_with(conn, header, None)
    }

    fn send_with(&mut self, conn: ConnId, header: Header, control: Option<Control>) -> RequestId {
        let request = RequestId(self.requests);
        self.requests += 1;
        self.apply(Input::Message { conn, request, header, control: control.map(Box::new) });
        request
    }

    fn control(&mut self, conn: ConnId, n: u32, control: Control) -> RequestId {
        self.send_with(conn, request(OpCode::Control, 0, 0, n), Some(control))
    }

    /// Answers every record asked for so far.
    fn persist_all(&mut self) {
        while let Some((id, _)) = self.take_persist() {
            self.apply(Input::Persisted { id, result: Ok(()) });
        }
    }

    fn take_persist(&mut self) -> Option<(PersistId, Record)> {
        let at = self.out.iter().position(|o| matches!(o, Output::Persist { .. }))?;
        match self.out.remove(at) {
            Output::Persist { id, record } => Some((id, record)),
            _ => None,
        }
    }

    fn done(&mut self, request: RequestId) {
        self.apply(Input::Done { request, result: Ok(Completed::default()) });
    }

    /// The next record that is not the beginning of the directory's use.
    fn take_record(&mut self) -> Option<(PersistId, Record)> {
        match self.take_persist()? {
            (id, Record::Begin { .. }) => {
                self.apply(Input::Persisted { id, result: Ok(()) });
                self.take_persist()
            }
            other => Some(other),
        }
    }

    fn synced(&mut self) {
        self.apply(Input::Synced { result: Ok(()) });
    }

    fn describe(&mut self, request: RequestId) -> Box<ReplicaState> {
        self.apply(Input::Described { request, result: Ok(Box::default()) });
        match self.reply(request) {
            Some((Status::Ok, Body::State(state))) => state,
            other => panic!("no state but {other:?}"),
        }
    }

    fn welcomed(&self, conn: ConnId) -> bool {
        self.out.iter().any(|o| matches!(o, Output::Welcome { conn: c, .. } if *c == conn))
    }

    fn verdict(&self, conn: ConnId) -> Option<Verdict> {
        self.out.iter().find_map(|o| match o {
            Output::Refuse { conn: c, verdict, .. } if *c == conn => Some(*verdict),
            _ => None,
        })
    }

    fn is_closed(&self, conn: ConnId) -> bool {
        self.out.iter().any(|o| matches!(o, Output::Close { conn: c, .. } if *c == conn))
    }

    fn is_dropped(&self, request: RequestId) -> bool {
        self.out.iter().any(|o| matches!(o, Output::Drop { request: r } if *r == request))
    }

    fn in_store(&self, request: RequestId) -> bool {
        self.out.iter().any(|o| matches!(o, Output::Store { request: r, .. } if *r == request))
    }

    fn syncs(&self) -> usize {
        self.out.iter().filter(|o| matches!(o, Output::Sync)).count()
    }

    fn reply(&self, request: RequestId) -> Option<(Status, Body)> {
        self.out.iter().find_map(|o| match o {
            Output::Reply { request: r, header, body, .. } if *r == request => {
                Some((header.status, body.clone()))
            }
            _ => None,
        })
    }

    fn status(&self, request: RequestId) -> Option<Status> {
        self.reply(request).map(|(status, _)| status)
    }

    /// What the answer says in its header beside the status.
    fn aux(&self, request: RequestId) -> u32 {
        let aux = self.out.iter().find_map(|o| match o {
            Output::Reply { request: r, header, .. } if *r == request => Some(header.aux),
            _ => None,
        });
        aux.expect("it is answered")
    }

    fn records(&self) -> Vec<&Record> {
        self.out
            .iter()
            .filter_map(|o| match o {
                Output::Persist { record, .. } => Some(record),
                _ => None,
            })
            .collect()
    }
}

fn hello(n: u32, session: u128) -> SessionHello {
    SessionHello {
        generation: generation(n),
        instance: Instance(n.into()),
        session: Instance(session),
        queue: 0,
        queues: 1,
    }
}

fn request(op: OpCode, offset: u64, length: u32, n: u32) -> Header {
    let payload = if op == OpCode::Write { length } else { 0 };
    Header { payload, ..Header::request(op, 7, offset, length, generation(n)) }
}

fn write(offset: u64, n: u32) -> Header {
    request(OpCode::Write, offset, 4096, n)
}

fn fua(offset: u64, n: u32) -> Header {
    Header { flags: flags::FUA, ..write(offset, n) }
}
