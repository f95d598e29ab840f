//! The queue threads of an engine or a relay: each has a ring, memory, its part of the volume, and the frontend's part that
//! is shown through it, once there is one. An engine may have one more, which shows the volume to relays alone.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, Sender, unbounded};
use datapath::engine::EngineHandle;
use fuse_frontend::init::Agreement;
use lh_block::Device;
use lh_ring::{
    Completion, Fd, Frontend, OWNER_FRONTEND, Overseer, Payload, Pool, QueueDevice, Ring, run_queue,
};
use nbd_frontend::{Ending, Export, Lane, Limits, Listener};

use super::clients::Clients;
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

/// [`Pool::new`], or [`Pool::lendable`] for queues whose writes go to replicas.
pub(super) type MakePool = fn(usize, usize) -> io::Result<Pool>;

/// Requests of a queue at a time: what a loop device has in flight at most.
pub(super) const DEPTH: u16 = 128;

/// Least depth of a queue of a ublk device. One command has to be left with the driver, by a limit of requests that the kernel
/// lets nobody set below four (`BLKDEV_MIN_RQ`, include/linux/blkdev.h; `Attached::keep_a_command_back`).
pub(super) const UBLK_DEPTH_MIN: u16 = 8;

/// Places in a ring's submission queue: a turn's worth; more are submitted in between.
const ENTRIES: u32 = 256;

/// Memory of a queue that serves clients over sockets: 64 requests of 1 MiB, of which a quiet server keeps 8.
pub(super) const SOCKETS: Memory = Memory { soft: 8 << 20, hard: 64 << 20, resident: false };

/// How the devices of all queue threads are reached.
pub(super) trait Devices: Send + Sync {
    /// Wakes every thread, so that it looks for orders.
    fn wake(&self);

    /// Ends every thread, once its frontend is done.
    fn end(&self);

    /// The clients of an engine before are this one's.
    fn clients_have_stayed(&self);
}

impl Devices for EngineHandle {
    fn wake(&self) {
        self.wake_queues();
    }

    fn end(&self) {
        self.end_queues();
    }

    fn clients_have_stayed(&self) {
        Self::clients_have_stayed(self);
    }
}

/// What a queue thread is told.
pub(super) enum Order {
    /// Show the volume as an NBD export; one queue listens.
    Nbd(Export, Option<Listener>),
    /// Serve a client that another queue has accepted.
    Client(OwnedFd),
    /// Serve the kernel's client on a connection that it was given without a handshake.
    Kernel(OwnedFd),
    /// Serve a relay that has proved the volume's key.
    Relay(OwnedFd, Lane),
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
    devices: Arc<dyn Devices>,
    orders: Vec<Sender<Order>>,
    /// Of an engine that relays may come to: the queue that serves them.
    relays: Option<Sender<Order>>,
    threads: Vec<JoinHandle<()>>,
    pub(super) notices: Receiver<Notice>,
    /// How many have still to say that they show nothing any more.
    leaving: Cell<usize>,
}

/// The way to the queue that serves relays.
pub(super) struct ToRelays {
    orders: Sender<Order>,
    devices: Arc<dyn Devices>,
}

impl ToRelays {
    /// Gives the queue an order; one that has ended reads nothing any more.
    pub(super) fn tell(&self, order: Order) {
        if self.orders.send(order).is_ok() {
            self.devices.wake();
        }
    }
}

#[cfg(test)]
impl ToRelays {
    /// The way to nobody's queue: what it is told comes out at the other end.
    pub(super) fn nobody() -> (Self, Receiver<Order>) {
        struct Nobody;
        impl Devices for Nobody {
            fn wake(&self) {}
            fn end(&self) {}
            fn clients_have_stayed(&self) {}
        }
        let (orders, told) = unbounded();
        (Self { orders, devices: Arc::new(Nobody) }, told)
    }
}

impl Queues {
    /// Starts a thread for each part, from which `make` makes the queue's device, over memory that `pool` makes of its soft and
    /// hard size. Their clients are counted there. The last one serves relays, if `relays`.
    pub(super) fn start<P: Send + 'static, D: QueueDevice + 'static>(
        devices: Arc<dyn Devices>,
        parts: Vec<P>,
        (make, pool): (fn(P, &Pool) -> D, MakePool),
        memory: Memory,
        clients: &Clients,
        relays: bool,
    ) -> Result<Self> {
        let (sender, notices) = unbounded();
        let (mut orders, receivers): (Vec<_>, Vec<_>) = parts.iter().map(|_| unbounded()).unzip();
        let relays = if relays { orders.pop() } else { None };
        let mut threads = Vec::new();
        for (number, (part, taken)) in parts.into_iter().zip(receivers).enumerate() {
            let serves_relays = number == orders.len();
            let conduct = Conduct {
                orders: taken,
                peers: orders.clone(),
                next_peer: number,
                serves_relays,
                clients: clients.clone(),
                notices: sender.clone(),
                devices: Arc::clone(&devices),
            };
            let (name, memory) = match serves_relays {
                true => ("relays".to_owned(), SOCKETS),
                false => (format!("queue-{number}"), memory),
            };
            let notices = sender.clone();
            let run = move || drop(notices.send(Notice::Ended(serve(part, (make, pool), memory, conduct))));
            threads.push(std::thread::Builder::new().name(name).spawn(run).context("a thread for a queue")?);
        }
        Ok(Self { devices, orders, relays, threads, notices, leaving: Cell::new(0) })
    }

    /// The way to the queue that serves relays, if there is one.
    pub(super) fn to_relays(&self) -> Option<ToRelays> {
        let orders = self.relays.clone()?;
        Some(ToRelays { orders, devices: Arc::clone(&self.devices) })
    }

    /// How many the frontend has.
    pub(super) fn len(&self) -> usize {
        self.orders.len()
    }

    /// Gives every queue of the frontend an order; `make` is asked for one after the other.
    pub(super) fn order(&self, mut make: impl FnMut(usize) -> Result<Order>) -> Result<()> {
        for (number, orders) in self.orders.iter().enumerate() {
            orders.send(make(number)?).context("a queue has ended")?;
        }
        self.devices.wake();
        Ok(())
    }

    /// Gives one queue of the frontend an order.
    pub(super) fn tell(&self, number: usize, order: Order) -> Result<()> {
        let orders = self.orders.get(number).context("there is no such queue")?;
        orders.send(order).context("a queue has ended")?;
        self.devices.wake();
        Ok(())
    }

    /// What is shown now is what an engine before has left, and whoever had it open has it still. Said before any of its requests
    /// is taken.
    pub(super) fn clients_have_stayed(&self) {
        self.devices.clients_have_stayed();
    }

    /// So many queues of the frontend end what they show, by an order or because its device goes: each will say so.
    pub(super) fn leave(&self, count: usize) {
        self.leaving.set(self.leaving.get() + count);
    }

    /// So many of those show what they showed, since it does not go after all.
    pub(super) fn stay(&self, count: usize) {
        self.leaving.set(self.leaving.get().saturating_sub(count));
    }

    /// How many of those have not said it yet.
    pub(super) fn leaving(&self) -> usize {
        self.leaving.get()
    }

    /// A queue has said that it shows nothing any more. False: none was to.
    pub(super) fn has_left(&self) -> bool {
        let left = self.leaving.get().checked_sub(1);
        self.leaving.set(left.unwrap_or(0));
        left.is_some()
    }

    /// Ends the threads, which show nothing any more.
    pub(super) fn end(self) {
        self.devices.end();
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a queue thread has panicked");
            }
        }
    }
}

fn serve<P, D: QueueDevice>(
    part: P,
    (make, pool): (fn(P, &Pool) -> D, MakePool),
    memory: Memory,
    mut conduct: Conduct,
) -> io::Result<()> {
    let pool = pool(memory.soft, memory.hard)?;
    let populated = if memory.resident { pool.lock().and_then(|()| pool.populate()) } else { pool.lock() };
    if let Err(e) = populated {
        tracing::warn!("buffers are not locked: {e}");
    }
    let mut ring = Ring::new(ENTRIES)?;
    run_queue(&mut ring, &mut make(part, &pool), &mut QueueFrontend::Nothing, &mut conduct)
}

/// What is shown through a queue.
enum QueueFrontend {
    Nothing,
    Nbd(Box<nbd_frontend::Server>),
    Fuse(Box<fuse_frontend::Server>),
    Ublk(Box<ublk_frontend::Server>),
    Iscsi(Box<iscsi_frontend::Server>),
    /// Shown to nobody: the process itself writes.
    Filling(Box<Filler>, Pool),
}

impl QueueFrontend {
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

impl Frontend for QueueFrontend {
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

    fn looks(&self) -> bool {
        match self {
            // The kernel's own drivers send nothing again while there is an engine that has it.
            Self::Nothing | Self::Filling(..) | Self::Fuse(_) | Self::Ublk(_) => false,
            Self::Nbd(server) => server.looks(),
            Self::Iscsi(server) => server.looks(),
        }
    }

    fn look(&mut self, device: &mut dyn Device<Payload>) {
        match self {
            Self::Nothing | Self::Filling(..) | Self::Fuse(_) | Self::Ublk(_) => {}
            Self::Nbd(server) => server.look(device),
            Self::Iscsi(server) => server.look(device),
        }
    }
}

/// Follows a queue's orders, at every turn of its loop.
struct Conduct {
    orders: Receiver<Order>,
    peers: Vec<Sender<Order>>,
    /// Where the next accepted client goes.
    next_peer: usize,
    /// What it shows is no frontend of the volume's: nobody waits for its end.
    serves_relays: bool,
    clients: Clients,
    notices: Sender<Notice>,
    devices: Arc<dyn Devices>,
}

impl<D: QueueDevice> Overseer<D, QueueFrontend> for Conduct {
    fn oversee(&mut self, ring: &mut Ring, device: &mut D, shown: &mut QueueFrontend) -> bool {
        while let Ok(order) = self.orders.try_recv() {
            if let Err(e) = self.follow(order, ring, device, shown) {
                tracing::error!("the frontend cannot be shown: {e}");
                return false;
            }
        }
        match shown {
            QueueFrontend::Iscsi(server) => self.clients.set_initiators(server.load().sessions),
            QueueFrontend::Nbd(server) if self.serves_relays => {
                self.clients.set_relays(server.load().connections)
            }
            _ => {}
        }
        if shown.is_over() && !matches!(shown, QueueFrontend::Nothing) {
            let was_shown = !matches!(shown, QueueFrontend::Filling(..));
            *shown = QueueFrontend::Nothing;
            if was_shown {
                let _ = self.notices.send(Notice::Hidden);
            }
        }
        !(device.is_ending() && (self.serves_relays || shown.is_over()))
    }
}

impl Conduct {
    fn follow(
        &mut self,
        order: Order,
        ring: &mut Ring,
        device: &mut impl QueueDevice,
        shown: &mut QueueFrontend,
    ) -> io::Result<()> {
        let pool = device.pool().clone();
        match order {
            Order::Nbd(export, listener) => {
                let limits = Limits::of_pool(&pool);
                let mut server =
                    nbd_frontend::Server::new(export, limits, OWNER_FRONTEND, &pool, DEPTH.into());
                server.count_with(self.clients.connections(self.serves_relays));
                if let Some(listener) = listener {
                    server.set_spread(self.spread());
                    server.listen(ring, listener);
                }
                *shown = QueueFrontend::Nbd(Box::new(server));
            }
            Order::Client(client) => {
                if let QueueFrontend::Nbd(server) = shown {
                    server.adopt(ring, client);
                }
            }
            Order::Kernel(client) => {
                if let QueueFrontend::Nbd(server) = shown {
                    server.adopt_agreed(client);
                }
            }
            Order::Relay(relay, lane) => {
                if let QueueFrontend::Nbd(server) = shown {
                    server.adopt_lane(relay, lane);
                }
            }
            Order::Fuse(fd, agreement) => {
                let server =
                    fuse_frontend::Server::new(Fd::new(fd), &agreement, OWNER_FRONTEND, &pool, DEPTH.into())?;
                *shown = QueueFrontend::Fuse(Box::new(server));
            }
            Order::Ublk(channels) => {
                let server = ublk_frontend::Server::new(channels, OWNER_FRONTEND, &pool)?;
                *shown = QueueFrontend::Ublk(Box::new(server));
            }
            Order::Iscsi(target, listener) => {
                let limits = iscsi_frontend::Limits::of_pool(&pool);
                let server = iscsi_frontend::Server::new(target, limits, OWNER_FRONTEND, &pool);
                let mut server = server.map_err(io::Error::other)?;
                server.count_with(self.clients.connections(false));
                server.listen(ring, listener);
                *shown = QueueFrontend::Iscsi(Box::new(server));
            }
            Order::Fill(filler) => *shown = QueueFrontend::Filling(Box::new(filler), pool),
            Order::Nothing => {}
            Order::Hide => match shown {
                // What the device has of them runs to its end; nobody waits for it.
                QueueFrontend::Nbd(server) if self.serves_relays => server.close_lanes(),
                QueueFrontend::Nbd(server) => server.stop(ring, Ending::Refuse),
                QueueFrontend::Iscsi(server) => server.stop(ring, iscsi_frontend::Ending::Refuse),
                // Whoever hides waits for every queue.
                QueueFrontend::Nothing | QueueFrontend::Filling(..) => {
                    drop(self.notices.send(Notice::Hidden))
                }
                QueueFrontend::Fuse(_) | QueueFrontend::Ublk(_) => {}
            },
        }
        shown.turn(ring, device);
        Ok(())
    }

    /// Gives accepted clients to the queues in turn.
    fn spread(&self) -> nbd_frontend::Spread {
        let (own, peers, devices) = (self.next_peer, self.peers.clone(), Arc::clone(&self.devices));
        let mut next = own;
        Box::new(move |client| {
            let chosen = next;
            next = (next + 1) % peers.len();
            if chosen == own {
                return Some(client);
            }
            match peers[chosen].send(Order::Client(client)) {
                Ok(()) => {
                    devices.wake();
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
