//! A volume that another process serves over NBD, as a device of this one: for a relay.
//!
//! - [`handshake()`] is the client's side of the handshake, on a stream that blocks; [`requests`] decides what is sent and what
//!   a reply means, without I/O; a [`Client`] drives that on a queue thread's ring.
//! - The bytes of a write are the frontend's payload, sent from where they lie; the bytes of a read are pieces of the stream
//!   that they came in.
//! - A client makes no connections. It asks for one when it has none, and never fails a request because it has none: requests
//!   wait, until the volume is served again, or nobody wants its device any more ([`Mail::LetGo`]).

mod link;
mod negotiate;
pub mod requests;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use lh_block::{Device, Done, Extent, Geometry, IoError, Op, Request};
use lh_ring::{Bell, Completion, Inbox, Mailbox, Payload, Pool, QueueDevice, Ring};
use thiserror::Error;

use crate::proto::transmission_flag as flag;

pub use negotiate::{HandshakeError, Served, handshake};

use link::Link;
use requests::Requests;

/// Between two looks for memory to receive with.
const STARVED: Duration = Duration::from_millis(1);

/// What a device needs of its server.
const NEEDED: u16 = flag::HAS_FLAGS
    | flag::SEND_FLUSH
    | flag::SEND_FUA
    | flag::SEND_TRIM
    | flag::SEND_WRITE_ZEROES
    | flag::SEND_FAST_ZERO
    | flag::CAN_MULTI_CONN;

/// Why an export cannot be shown as the device that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unfit {
    /// It has another size.
    #[error("it has {0} bytes, not {1}")]
    Size(u64, u64),
    /// Its blocks are larger than the device's.
    #[error("its blocks have {0} bytes, the device's {1}")]
    Block(u32, u32),
    /// It takes only shorter requests.
    #[error("it takes requests of {0} bytes, the device of {1}")]
    Transfer(u32, u32),
    /// It cannot do something that a device can.
    #[error("it lacks what a device needs: its flags are {0:#x}")]
    Flags(u16),
}

impl Served {
    /// Whether a device of this geometry can be shown of it.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn check(&self, geometry: &Geometry) -> Result<(), Unfit> {
        if self.size != geometry.size {
            Err(Unfit::Size(self.size, geometry.size))
        } else if self.block > geometry.logical_block {
            Err(Unfit::Block(self.block, geometry.logical_block))
        } else if self.longest < geometry.max_transfer {
            Err(Unfit::Transfer(self.longest, geometry.max_transfer))
        } else if self.flags & (NEEDED | flag::READ_ONLY) != NEEDED {
            Err(Unfit::Flags(self.flags))
        } else {
            Ok(())
        }
    }
}

/// Something for a client's thread.
#[derive(Debug)]
pub enum Mail {
    /// A connection, whose handshake is done, to an export that [`Served::check`] has found fit.
    Link(OwnedFd),
    /// The device is to go. From this moment on requests for which there is no connection are failed. `None`: it stays.
    LetGo(Option<Instant>),
    /// The thread ends when its frontend has.
    End,
}

/// What a client is made of; may be sent to its thread.
#[derive(Debug)]
pub struct Parts {
    geometry: Geometry,
    inbox: Inbox<Mail>,
    wanted: Sender<()>,
}

impl Parts {
    /// A client's parts, its mailbox, and where it asks for a connection: one word for each, the first one at once.
    ///
    /// # Errors
    /// No descriptor left for the bell.
    pub fn new(geometry: Geometry) -> std::io::Result<(Self, Mailbox<Mail>, Receiver<()>)> {
        let (mailbox, inbox) = Mailbox::new()?;
        let (wanted, wishes) = channel();
        Ok((Self { geometry, inbox, wanted }, mailbox, wishes))
    }
}

/// One queue of a volume that another process serves.
#[derive(Debug)]
pub struct Client {
    geometry: Geometry,
    inbox: Inbox<Mail>,
    wanted: Sender<()>,
    pool: Pool,
    requests: Requests,
    link: Option<Link>,
    /// Nothing was sent on it yet.
    is_new: bool,
    /// Counts connections: completions of earlier ones are told by it.
    links: u32,
    done: VecDeque<Done<Payload>>,
    let_go: Option<Instant>,
    ending: bool,
}

impl Client {
    /// A client on the calling thread, with data in the pool.
    pub fn new(parts: Parts, pool: &Pool) -> Self {
        let Parts { geometry, inbox, wanted } = parts;
        let client = Self {
            geometry,
            inbox,
            wanted,
            pool: pool.clone(),
            requests: Requests::new(geometry.depth),
            link: None,
            is_new: false,
            links: 0,
            done: VecDeque::with_capacity(geometry.depth as usize),
            let_go: None,
            ending: false,
        };
        client.ask();
        client
    }

    /// Asks for a connection. Whoever makes them is gone only with the process.
    fn ask(&self) {
        let _ = self.wanted.send(());
    }

    fn take(&mut self, mail: Mail) {
        match mail {
            Mail::Link(socket) => {
                self.part();
                self.links = self.links.wrapping_add(1);
                self.link = Some(Link::new(socket, self.links, &self.pool));
                self.is_new = true;
            }
            Mail::LetGo(at) => self.let_go = at,
            Mail::End => self.ending = true,
        }
    }

    fn part(&mut self) {
        if let Some(link) = self.link.take() {
            link.close();
        }
        self.requests.lost();
        self.end_abandoned();
    }

    /// Ends what was given up and is nowhere else.
    fn end_abandoned(&mut self) {
        while let Some(done) = self.requests.abandoned() {
            self.done.push_back(done);
        }
    }

    fn lose(&mut self) {
        self.part();
        self.ask();
    }

    fn check(&self, op: Op, range: Extent) -> Result<(), IoError> {
        if op == Op::Flush {
            return Ok(());
        }
        if range.offset.checked_add(range.len).is_none_or(|end| end > self.geometry.size) {
            return Err(IoError::OutOfRange);
        }
        let too_long =
            matches!(op, Op::Read | Op::Write { .. }) && range.len > u64::from(self.geometry.max_transfer);
        if range.is_empty() || !range.is_aligned(u64::from(self.geometry.logical_block)) || too_long {
            return Err(IoError::Invalid);
        }
        Ok(())
    }

    /// Takes what was received to its end.
    fn receive(&mut self) {
        while let Some(link) = &mut self.link {
            match link.next_done(&mut self.requests) {
                Ok(Some(done)) => self.done.push_back(done),
                Ok(None) => return,
                Err(broken) => {
                    tracing::warn!("the connection to the volume's engine is given up: {broken}");
                    self.lose();
                }
            }
        }
    }
}

impl QueueDevice for Client {
    fn bell(&self) -> &Bell {
        self.inbox.bell()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn is_ending(&self) -> bool {
        self.ending
    }

    fn begin_turn(&mut self) {
        while let Some(mail) = self.inbox.take() {
            self.take(mail);
        }
        if self.link.is_none() && self.let_go.is_some_and(|at| at <= Instant::now()) {
            while let Some(done) = self.requests.give_up(IoError::ShuttingDown) {
                self.done.push_back(done);
            }
        }
    }

    /// What has waited for this connection, or comes again on it: its clients may have left since.
    fn lets_in(&self) -> bool {
        self.is_new && !self.requests.is_empty()
    }

    fn let_in(&mut self) {
        self.is_new = false;
    }

    fn end_turn(&mut self, ring: &mut Ring) -> Option<Duration> {
        match &mut self.link {
            Some(link) => (!link.start(ring, &mut self.requests)).then_some(STARVED),
            None if self.requests.is_empty() => None,
            None => self.let_go.map(|at| at.saturating_duration_since(Instant::now())),
        }
    }

    fn completion(&mut self, completion: Completion) {
        if self.link.as_ref().is_none_or(|link| link.number() != completion.token.data) {
            return;
        }
        if Link::completed(&completion) { self.receive() } else { self.lose() }
    }
}

impl Device<Payload> for Client {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn room(&self) -> u32 {
        // What is refused is answered without a place.
        u32::try_from(self.requests.room()).unwrap_or(u32::MAX)
    }

    fn submit(&mut self, request: Request<Payload>) {
        match self.check(request.op, request.range) {
            // The server is not asked: a relay is there for moments, and all being data is right.
            Ok(()) if request.op == Op::Allocation => {
                self.done.push_back(Done { tag: request.tag, result: Ok(()), data: None });
            }
            Ok(()) => self.requests.submit(request),
            Err(reason) => self.done.push_back(Done { tag: request.tag, result: Err(reason), data: None }),
        }
    }

    /// What the server has been sent is called back with the connection, which it lets go of what it has not begun: all else is sent
    /// again on the next one, behind what had been begun.
    fn abandon(&mut self, tag: u64) {
        if self.requests.abandon(tag) && self.link.is_some() {
            self.lose();
        }
        self.end_abandoned();
    }

    fn poll_done(&mut self) -> Option<Done<Payload>> {
        self.done.pop_front()
    }
}
