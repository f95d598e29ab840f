//! A relay: shows the volume on this host while its engine is on another one, and passes every request on to it.
//!
//! - There is one engine at a time. It orders, replicates and answers what comes through a relay as it does its own
//!   frontend's requests, so both devices show the same bytes.
//! - A relay never fails a request because the engine is away: it waits, and sends again what was not answered.
//! - It holds the volume's name on this host as an engine does. An engine that is started in its place, under its device,
//!   fences the one that it relayed, and answers what waits (`docs/decisions/0012-a-volume-moves-by-relay-then-fence.md`).

mod connect;
mod face;
mod source;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use control::engine::EngineError;
use control::host::Root;
use crossbeam_channel::{Receiver, select, tick, unbounded};
use lh_block::{Address, Geometry, Instance};
use lh_ring::sys::random;
use lh_ring::{Mailbox, Pool};
use lh_wire::MAX_DATA;
use nbd_frontend::client::{Client, Mail, Parts};

pub(super) use source::Source;

use super::ControllerArgs;
use super::clients::Clients;
use super::face::{FrontendState, Reply};
use super::queues::{DEPTH, Devices, Notice, Queues};
use super::serve::{LAST_ANSWER, Signalled, fronts, serve_face};
use super::show::{CARE, HideError, Show, Wish, check_unused};
use crate::daemon::GivesUp;

use connect::{News, Obstacles, Target, keep_connected};
use face::Face;

/// How long requests that wait for an engine that is away may hold up the end of a device that nobody uses. That somebody
/// uses it is known sooner.
const LETTING_GO: Duration = Duration::from_secs(5);

/// Why relays over TCP have to be asked for twice.
pub(super) const UNENCRYPTED: &str = "relays over TCP are served without encryption: whoever is on the network between sees \
    and may change the volume's bytes; give --insecure if that network is your own";

/// The mailboxes of all queues.
struct Mailboxes(Vec<Mailbox<Mail>>);

impl Mailboxes {
    fn put(&self, mail: impl Fn() -> Mail) {
        self.0.iter().for_each(|mailbox| mailbox.put(mail()));
    }
}

impl Devices for Mailboxes {
    fn wake(&self) {
        self.0.iter().for_each(Mailbox::wake);
    }

    fn end(&self) {
        self.put(|| Mail::End);
    }

    /// The engine that it relays to has answered them, and is there.
    fn clients_have_stayed(&self) {}
}

/// Runs a relay; `name` is its own, as a process.
pub(super) fn run(args: &ControllerArgs, from: &Address, name: &str, root: &Root) -> Result<()> {
    if !from.is_local() && !args.insecure {
        return Err(GivesUp(UNENCRYPTED.to_owned()).into());
    }
    let Some(size) = args.size else {
        return Err(GivesUp("a relay needs --size: the volume's size in bytes".to_owned()).into());
    };
    let show = Show::prepare(&Wish::of(args, name, root))?;
    let target = target(args, from, size)?;
    let (news_sender, news) = unbounded();
    let obstacles = Obstacles::of(target.queues);
    let (mut parts, mut mailboxes) = (Vec::new(), Vec::new());
    for queue in 0..target.queues {
        let (part, mailbox, wishes) = Parts::new(target.geometry)?;
        let (target, obstacles, news) = (target.clone(), obstacles.clone(), news_sender.clone());
        let own = mailbox.clone();
        let keep = move || keep_connected(&target, queue, &own, &wishes, (&obstacles, &news));
        std::thread::Builder::new()
            .name("connector".into())
            .spawn(keep)
            .context("a thread to connect with")?;
        parts.push(part);
        mailboxes.push(mailbox);
    }
    let mailboxes = Arc::new(Mailboxes(mailboxes));
    let devices: Arc<dyn Devices> = mailboxes.clone();
    let clients = Clients::of_relay();
    let queues = Queues::start(devices, parts, (Client::new, Pool::new), show.memory(), &clients, false)?;
    let shown = Arc::new(Mutex::new(FrontendState { frontend: show.name(), ..FrontendState::default() }));
    let (ends_sender, ends) = unbounded();
    let face = Face {
        volume: args.volume.clone(),
        size,
        from: from.clone(),
        shown: Arc::clone(&shown),
        obstacles,
        ends: ends_sender,
    };
    serve_face(fronts(args, name, root)?, name, Arc::new(face), Signalled::default())?;
    Life { size, news, ends, mailboxes, queues, show, shown }.live()
}

fn target(args: &ControllerArgs, from: &Address, size: u64) -> Result<Target> {
    let mut instance = [0; 16];
    random(&mut instance)?;
    Ok(Target {
        address: from.clone(),
        volume: args.volume.clone(),
        key: args.key()?,
        instance: Instance(u128::from_le_bytes(instance)),
        queues: args.queue_count().into(),
        geometry: Geometry {
            size,
            logical_block: args.block_size,
            physical_block: 4096,
            max_transfer: MAX_DATA,
            depth: DEPTH.into(),
        },
    })
}

/// What a relay's main thread has in its hands.
struct Life {
    size: u64,
    news: Receiver<News>,
    ends: Receiver<Reply>,
    mailboxes: Arc<Mailboxes>,
    queues: Queues,
    show: Show,
    shown: Arc<Mutex<FrontendState>>,
}

impl Life {
    /// Until somebody ends it, or the device goes by itself.
    fn live(mut self) -> Result<()> {
        let care = tick(CARE);
        loop {
            select! {
                recv(self.news) -> news => match news.context("the threads that connect have ended")? {
                    News::Linked if self.is_shown() => {}
                    News::Linked => self.show()?,
                    // One that grew while it was shown here waits until somebody decides.
                    News::Unfit(_) if self.is_shown() => {}
                    News::Unfit(text) => return Err(GivesUp(text).into()),
                },
                recv(self.queues.notices) -> notice => match notice.context("all queue threads have ended")? {
                    // It was asked to, and has taken longer than whoever asked would wait: to be asked for again.
                    Notice::Hidden if self.queues.has_left() => {}
                    Notice::Hidden => return Err(self.show.taken_away()),
                    Notice::Ended(result) => {
                        result.context("a queue's thread has failed")?;
                        return Err(self.show.taken_away());
                    }
                },
                recv(self.ends) -> reply => {
                    let reply = reply.context("the control socket's thread has ended")?;
                    match self.hide() {
                        Ok(()) => {
                            self.queues.end();
                            let _ = reply.send(Ok(()));
                            // The process's end would cut the answer off.
                            std::thread::sleep(LAST_ANSWER);
                            return Ok(());
                        }
                        // Whoever asked may be gone.
                        Err(refused) => drop(reply.send(Err(refused))),
                    }
                }
                recv(care) -> _ => self.show.look_after(&self.queues),
            }
        }
    }

    fn is_shown(&self) -> bool {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).endpoint.is_some()
    }

    fn show(&mut self) -> Result<()> {
        let endpoint = self.show.show(&self.queues, self.size)?;
        tracing::info!(?endpoint, "shown");
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).endpoint = Some(endpoint);
        Ok(())
    }

    /// Takes the frontend away. What waits for an engine that is away is failed once nobody uses the device: where somebody does, some
    /// frontends would wait for his requests, and others keep what failed for the next server, before they refuse.
    fn hide(&mut self) -> Result<(), EngineError> {
        let device = {
            let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
            shown.endpoint.as_ref().and_then(|endpoint| endpoint.device.clone())
        };
        let device = device.filter(|device| device.exists());
        let unused = device.map_or(Ok(()), |device| check_unused(&device));
        let hidden = unused.and_then(|()| {
            let at = Instant::now() + LETTING_GO;
            self.mailboxes.put(|| Mail::LetGo(Some(at)));
            self.show.hide(&self.queues)
        });
        let hidden = hidden.map_err(|e| match e {
            HideError::InUse(text) => EngineError::NotNow(text),
            HideError::Failed(e) => EngineError::Failed(format!("{e:#}")),
        });
        match hidden {
            Ok(()) => self.shown.lock().unwrap_or_else(PoisonError::into_inner).endpoint = None,
            Err(_) => self.mailboxes.put(|| Mail::LetGo(None)),
        }
        hidden
    }
}
