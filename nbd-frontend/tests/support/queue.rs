//! A client's queue that the test turns.

use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use lh_block::{Device, Extent, Geometry, Op, Request};
use lh_rig::Driven;
use lh_ring::{Mailbox, Pool, QueueDevice};
use nbd_frontend::client::{Client, Mail, Parts};

const PATIENCE: Duration = Duration::from_secs(20);

pub struct Queue {
    driven: Driven<Client>,
    pub mailbox: Mailbox<Mail>,
    wishes: Receiver<()>,
}

impl Deref for Queue {
    type Target = Driven<Client>;

    fn deref(&self) -> &Driven<Client> {
        &self.driven
    }
}

impl DerefMut for Queue {
    fn deref_mut(&mut self) -> &mut Driven<Client> {
        &mut self.driven
    }
}

impl Queue {
    /// Without a connection, for which it has wished.
    pub fn new(geometry: Geometry) -> Self {
        let (parts, mailbox, wishes) = Parts::new(geometry).unwrap();
        let pool = Pool::new(8 << 20, 64 << 20).unwrap();
        let driven = Driven::new(Client::new(parts, &pool));
        wishes.try_recv().expect("it wishes for its first connection");
        Self { driven, mailbox, wishes }
    }

    /// Gives it a connection whose handshake is done.
    pub fn link(&self, socket: UnixStream) {
        socket.set_read_timeout(None).unwrap();
        self.mailbox.put(Mail::Link(socket.into()));
    }

    pub fn submit(&mut self, tag: u64, op: Op, range: Extent, fill: u8) {
        let data = matches!(op, Op::Write { .. }).then(|| {
            let mut data = self.device.pool().alloc(u32::try_from(range.len).unwrap(), 512).unwrap();
            data.write_at(0, &vec![fill; data.len()]);
            data
        });
        self.device.submit(Request { tag, op, range, data });
    }

    /// True if it has wished for a connection once more.
    pub fn has_wished(&self) -> bool {
        self.wishes.try_recv().is_ok()
    }

    /// Turns until it wishes for a connection.
    pub fn wish(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.has_wished() {
            assert!(Instant::now() < deadline, "no wish for a connection");
            self.turn(Duration::from_millis(5));
        }
    }
}
