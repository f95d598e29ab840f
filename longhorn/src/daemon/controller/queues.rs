//! The engine's queue threads: each has a ring, memory, its part of the engine, and the frontend's part that is shown
//! through it, once there is one.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, Sender, unbounded};
use datapath::engine::EngineHandle;
use datapath::link::{EngineQueue, OWNER_FRONTEND, Overseer, Parts, run_queue};
use fuse_frontend::init::Agreement;
use lh_block::Device;
use lh_ring::{Completion, Fd, Frontend, Payload, Pool, Ring};
use nbd_frontend::{Ending, Export, Limits, Listener};

use super::fill::Filler;

/// Memory for the data of a queue's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    /// Bytes that stay.
    pub(super) soft: usize,
    /// Bytes that a burst of large requests may take.
    pub(super) hard: usize,
    /// What stays is made resident at the start: no request ever waits for a page.
    pub(super) resident: bool,
}

/// Requests of a queue at a time: what a loop device has in flight at most.
pub(super) const DEPTH: u16 = 128;

/// Places in a ring's submission queue: a turn's worth; more are submitted in between.
const ENTRIES: u32 = 256;

/// What a queue thread is told.
pub(super) enum Order {
    /// Show the volume as an NBD export; one queue listens.
    Nbd(Export, Option<Listener>),
    /// Serve a client that another queue has accepted.
    Client(OwnedFd),
    /// Show the volume as a FUSE file.
    Fuse(OwnedFd, Agreement),
    /// Serve queues of a ublk device.
    Ublk(Vec<ublk_frontend::Channel>),
    /// Show the volume as an iSCSI target.
    Iscsi(iscsi_frontend::Target, iscsi_frontend::Listener),
    /// Write what a clone is filled with.
    Fill(Filler),
    /// Nothing is shown through this queue.
    Nothing,
    /// End the NBD export or the iSCSI target.
    Hide,
}

/// What a queue thread tells.
pub(super) enum Notice {
    /// Nothing is shown through it any more: the export was ended, or the FUSE connection has gone.
    Hidden,
    /// It has ended.
    Ended(io::Result<()>),
}

/// All queue threads.
pub(super) struct Queues {
    handle: EngineHandle,
    orders: Vec<Sender<Order>>,
    threads: Vec<JoinHandle<()>>,
    pub(super) notices: Receiver<Notice>,
}

impl Queues {
    /// Starts a thread for each part.
    pub(super) fn start(handle: &EngineHandle, parts: Vec<Parts>, memory: Memory) -> Result<Self> {
        let (sender, notices) = unbounded();
        let (orders, receivers): (Vec<_>, Vec<_>) = parts.iter().map(|_| unbounded()).unzip();
        let mut threads = Vec::new();
        for (number, (part, taken)) in parts.into_iter().zip(receivers).enumerate() {
            let conduct = Conduct {
                orders: taken,
                peers: orders.clone(),
                next_peer: number,
                notices: sender.clone(),
                handle: handle.clone(),
            };
            let notices = sender.clone();
            let thread = std::thread::Builder::new().name(format!("queue-{number}"));
            let run = move || drop(notices.send(Notice::Ended(serve(part, memory, conduct))));
            threads.push(thread.spawn(run).context("a thread for a queue")?);
        }
        Ok(Self { handle: handle.clone(), orders, threads, notices })
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.orders.len()
    }

    /// Gives every queue an order; `make` is asked for one after the other.
    pub(super) fn order(&self, mut make: impl FnMut(usize) -> Result<Order>) -> Result<()> {
        for (number, orders) in self.orders.iter().enumerate() {
            orders.send(make(number)?).context("a queue has ended")?;
        }
        self.handle.wake_queues();
        Ok(())
    }

    /// Gives one queue an order.
    pub(super) fn tell(&self, number: usize, order: Order) -> Result<()> {
        let orders = self.orders.get(number).context("there is no such queue")?;
        orders.send(order).context("a queue has ended")?;
        self.handle.wake_queues();
        Ok(())
    }

    /// Ends the threads, which show nothing any more.
    pub(super) fn end(self) {
        self.handle.end_queues();
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a queue thread has panicked");
            }
        }
    }
}

fn serve(part: Parts, memory: Memory, mut conduct: Conduct) -> io::Result<()> {
    let pool = Pool::new(memory.soft, memory.hard)?;
    let populated = if memory.resident { pool.lock().and_then(|()| pool.populate()) } else { pool.lock() };
    if let Err(e) = populated {
        tracing::warn!("buffers are not locked: {e}");
    }
    let mut ring = Ring::new(ENTRIES)?;
    let mut engine = EngineQueue::new(part, &pool);
    run_queue(&mut ring, &mut engine, &mut Shown::Nothing, &mut conduct)
}

/// What is shown through a queue.
enum Shown {
    Nothing,
    Nbd(Box<nbd_frontend::Server>),
    Fuse(Box<fuse_frontend::Server>),
    Ublk(Box<ublk_frontend::Server>),
    Iscsi(Box<iscsi_frontend::Server>),
    /// Shown to nobody: the process itself writes.
    Filling(Box<Filler>, Pool),
}

impl Shown {
    /// True when no request will come any more, and none is unanswered.
    fn is_over(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Nbd(server) => server.is_done(),
            Self::Fuse(server) => server.is_gone(),
            Self::Ublk(server) => server.is_gone(),
            Self::Iscsi(server) => server.is_done(),
            Self::Filling(filler, _) => filler.is_over(),
        }
    }
}

impl Frontend for Shown {
    fn completion(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>, completion: Completion) {
        match self {
            Self::Nothing | Self::Filling(..) => {}
            Self::Nbd(server) => server.completion(ring, device, completion),
            Self::Fuse(server) => server.completion(ring, device, completion),
            Self::Ublk(server) => server.completion(ring, device, completion),
            Self::Iscsi(server) => server.completion(ring, device, completion),
        }
    }

    fn turn(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        match self {
            // Answers to requests of a frontend that has gone.
            Self::Nothing => while device.poll_done().is_some() {},
            Self::Nbd(server) => server.turn(ring, device),
            Self::Fuse(server) => server.turn(ring, device),
            Self::Ublk(server) => server.turn(ring, device),
            Self::Iscsi(server) => server.turn(ring, device),
            Self::Filling(filler, pool) => filler.turn(pool, device),
        }
    }
}

/// Follows a queue's orders, at every turn of its loop.
struct Conduct {
    orders: Receiver<Order>,
    peers: Vec<Sender<Order>>,
    /// Where the next accepted client goes.
    next_peer: usize,
    notices: Sender<Notice>,
    handle: EngineHandle,
}

impl Overseer<Shown> for Conduct {
    fn oversee(&mut self, ring: &mut Ring, engine: &mut EngineQueue, shown: &mut Shown) -> bool {
        while let Ok(order) = self.orders.try_recv() {
            if let Err(e) = self.follow(order, ring, engine, shown) {
                tracing::error!("the frontend cannot be shown: {e}");
                return false;
            }
        }
        if shown.is_over() && !matches!(shown, Shown::Nothing) {
            let was_shown = !matches!(shown, Shown::Filling(..));
            *shown = Shown::Nothing;
            if was_shown {
                let _ = self.notices.send(Notice::Hidden);
            }
        }
        !(engine.is_ending() && shown.is_over())
    }
}

impl Conduct {
    fn follow(
        &mut self,
        order: Order,
        ring: &mut Ring,
        engine: &mut EngineQueue,
        shown: &mut Shown,
    ) -> io::Result<()> {
        let pool = engine.pool().clone();
        match order {
            Order::Nbd(export, listener) => {
                let limits = Limits::of_pool(&pool);
                let mut server =
                    nbd_frontend::Server::new(export, limits, OWNER_FRONTEND, &pool, DEPTH.into());
                if let Some(listener) = listener {
                    server.set_spread(self.spread());
                    server.listen(ring, listener);
                }
                *shown = Shown::Nbd(Box::new(server));
            }
            Order::Client(client) => {
                if let Shown::Nbd(server) = shown {
                    server.adopt(ring, client);
                }
            }
            Order::Fuse(fd, agreement) => {
                let server =
                    fuse_frontend::Server::new(Fd::new(fd), &agreement, OWNER_FRONTEND, &pool, DEPTH.into())?;
                *shown = Shown::Fuse(Box::new(server));
            }
            Order::Ublk(channels) => {
                let server = ublk_frontend::Server::new(channels, OWNER_FRONTEND, &pool)?;
                *shown = Shown::Ublk(Box::new(server));
            }
            Order::Iscsi(target, listener) => {
                let limits = iscsi_frontend::Limits::of_pool(&pool);
                let server = iscsi_frontend::Server::new(target, limits, OWNER_FRONTEND, &pool);
                let mut server = server.map_err(io::Error::other)?;
                server.listen(ring, listener);
                *shown = Shown::Iscsi(Box::new(server));
            }
            Order::Fill(filler) => *shown = Shown::Filling(Box::new(filler), pool),
            Order::Nothing => {}
            Order::Hide => match shown {
                Shown::Nbd(server) => server.stop(ring, Ending::Refuse),
                Shown::Iscsi(server) => server.stop(ring, iscsi_frontend::Ending::Refuse),
                // Whoever hides waits for every queue.
                Shown::Nothing | Shown::Filling(..) => drop(self.notices.send(Notice::Hidden)),
                Shown::Fuse(_) | Shown::Ublk(_) => {}
            },
        }
        shown.turn(ring, engine);
        Ok(())
    }

    /// Gives accepted clients to the queues in turn.
    fn spread(&self) -> nbd_frontend::Spread {
        let (own, peers, handle) = (self.next_peer, self.peers.clone(), self.handle.clone());
        let mut next = own;
        Box::new(move |client| {
            let chosen = next;
            next = (next + 1) % peers.len();
            if chosen == own {
                return Some(client);
            }
            match peers[chosen].send(Order::Client(client)) {
                Ok(()) => {
                    handle.wake_queues();
                    None
                }
                Err(back) => match back.into_inner() {
                    Order::Client(client) => Some(client),
                    _ => None,
                },
            }
        })
    }
}
