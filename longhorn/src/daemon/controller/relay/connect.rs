//! A relay's side: connections to the volume's engine, made again for ever.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use lh_block::{Address, Generation, Geometry, Instance};
use lh_ring::Mailbox;
use lh_ring::sys::{Stream, random};
use lh_wire::handshake::{
    Asked, CHALLENGE_LEN, HandshakeError, Hello, Key, NotLetIn, Role, Verdict, WELCOME_LEN,
};
use nbd_frontend::client::{self, Mail, Unfit, handshake};
use thiserror::Error;

/// How long a connection may take to be made. A host that is away does not answer at all.
const CONNECT: Duration = Duration::from_secs(2);

/// How long the handshakes may take. The engine greets only when it has brought to its end what it was sent on connections
/// that have ended, which a slow replica may hold up.
const HANDSHAKE: Duration = Duration::from_secs(20);

/// Between two tries: doubled from the one to the other.
const SOON: Duration = Duration::from_millis(20);
const LATE: Duration = Duration::from_secs(1);

/// Why the volume's engine does not serve this relay, now.
#[derive(Debug, Error)]
pub(super) enum Obstacle {
    /// Nobody answers, or not any more.
    #[error("the volume's engine at {0} does not answer: {1}")]
    Unreachable(Address, io::Error),
    /// Something else answers, or without the key.
    #[error("at {0} there is no engine of this volume: {1}")]
    Foreign(Address, HandshakeError),
    /// It does not let this relay in.
    #[error("the engine at {0} turns this relay away: {1}")]
    TurnedAway(Address, Verdict),
    /// It speaks no NBD, or not for this volume.
    #[error("the volume's engine at {0} does not serve it: {1}")]
    Nbd(Address, client::HandshakeError),
    /// It cannot be shown as the device that was asked for.
    #[error("the volume at {0} is not the one that is to be shown here: {1}")]
    Unfit(Address, Unfit),
}

/// The volume's engine, and who asks it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) address: Address,
    pub(super) volume: String,
    pub(super) key: Key,
    /// This process.
    pub(super) instance: Instance,
    pub(super) queues: u16,
    /// What the device looks like.
    pub(super) geometry: Geometry,
}

impl Target {
    fn connect(&self, queue: u16) -> Result<OwnedFd, Obstacle> {
        let unreachable = |e| Obstacle::Unreachable(self.address.clone(), e);
        let now = Instant::now();
        let mut stream = Stream::connect(&self.address, now + CONNECT).map_err(unreachable)?;
        stream.set_deadline(now + HANDSHAKE);
        self.prove(&mut stream, queue)?;
        let served = handshake(&mut stream, &self.volume).map_err(|e| match e {
            client::HandshakeError::Io(e) => unreachable(e),
            e => Obstacle::Nbd(self.address.clone(), e),
        })?;
        served.check(&self.geometry).map_err(|unfit| Obstacle::Unfit(self.address.clone(), unfit))?;
        stream.into_socket().map_err(unreachable)
    }

    /// Both sides prove the volume's key, with the handshake of the data protocol.
    pub(super) fn prove(&self, stream: &mut Stream, queue: u16) -> Result<(), Obstacle> {
        let unreachable = |e| Obstacle::Unreachable(self.address.clone(), e);
        let not_let_in = |why| match why {
            NotLetIn::Foreign(e) => Obstacle::Foreign(self.address.clone(), e),
            NotLetIn::Refused(verdict, _) => Obstacle::TurnedAway(self.address.clone(), verdict),
        };
        let mut challenge = [0; CHALLENGE_LEN];
        stream.read_exact(&mut challenge).map_err(unreachable)?;
        let (mut nonce, mut session) = ([0; 32], [0; 16]);
        random(&mut nonce).and_then(|()| random(&mut session)).map_err(unreachable)?;
        let hello = Hello {
            volume: self.volume.clone(),
            replica: self.volume.clone(),
            generation: Generation::default(),
            instance: self.instance,
            session: Instance(u128::from_le_bytes(session)),
            queue,
            queues: self.queues,
            checksums: false,
            lends: false,
        };
        let asked = Asked::answer(&challenge, (&hello, Role::Relay), &self.key, nonce)
            .map_err(|e| not_let_in(e.into()))?;
        stream.write_all(asked.hello()).map_err(unreachable)?;
        let mut welcome = [0; WELCOME_LEN];
        stream.read_exact(&mut welcome).map_err(unreachable)?;
        asked.heard(&welcome).map(|_| ()).map_err(not_let_in)
    }
}

/// What a relay's main thread hears of its connections.
pub(super) enum News {
    /// A queue has a connection.
    Linked,
    /// It has none, because the volume does not fit the device.
    Unfit(String),
}

/// Why queues wait, each by its number; `None` for one that has a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Obstacles(Arc<Mutex<Vec<Option<String>>>>);

impl Obstacles {
    /// So many queues, each of which is about to wish for its first connection.
    pub(super) fn of(queues: u16) -> Self {
        Self(Arc::new(Mutex::new(vec![None; queues.into()])))
    }

    fn note(&self, queue: u16, obstacle: Option<String>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(usize::from(queue)) {
            *known = obstacle;
        }
    }

    /// What some queue waits for.
    pub(super) fn first(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().next().cloned()
    }
}

/// Makes a connection for a queue each time that it wishes for one, however long that takes.
pub(super) fn keep_connected(
    target: &Target,
    queue: u16,
    mailbox: &Mailbox<Mail>,
    wishes: &mpsc::Receiver<()>,
    (obstacles, news): (&Obstacles, &Sender<News>),
) {
    while wishes.recv().is_ok() {
        obstacles.note(
            queue,
            Some(format!("a connection to the volume's engine at {} is being made", target.address)),
        );
        let mut pause = SOON;
        loop {
            let told = match target.connect(queue) {
                Ok(socket) => {
                    obstacles.note(queue, None);
                    mailbox.put(Mail::Link(socket));
                    tracing::info!(queue, "connected to the volume's engine at {}", target.address);
                    // The main thread is gone only with the process.
                    let _ = news.send(News::Linked);
                    break;
                }
                Err(obstacle) => {
                    let text = obstacle.to_string();
                    if let Obstacle::Unfit(..) = obstacle {
                        let _ = news.send(News::Unfit(text.clone()));
                    }
                    text
                }
            };
            if pause == SOON {
                tracing::warn!(queue, "requests wait: {told}");
            }
            obstacles.note(queue, Some(told));
            std::thread::sleep(pause);
            pause = (2 * pause).min(LATE);
        }
    }
}
