//! The beginning: the directory is opened, the machine learns what it says, the door is opened last.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use lh_ring::sys::file_system;
use lh_ring::{Bell, Pool, Ring, Token};
use lh_wire::ChainOp;

use super::checksums::Checksums;
use super::core::{Core, Facts, Trail};
use super::door::Door;
use super::flusher::Flusher;
use super::folder::Folder;
use super::grants::Grants;
use super::hash::Hasher;
use super::marks::Marks;
use super::memory::{POOL_HARD, POOL_SOFT};
use super::peer::Peers;
use super::reader::Readers;
use super::request::Requests;
use super::server::Server;
use super::token::{OWNER, kind};
use super::worker::Worker;
use super::{Mode, Options, ServeError};
use crate::store::{CreateOptions, Damage, Directory, OpenError, OpenOptions, Store};

/// Entries of the submission queue: more than one turn queues at any sensible load.
const ENTRIES: u32 = 256;

/// Opens (or creates) the directory, listens, and serves until [`super::Status::stop`].
///
/// # Errors
/// [`ServeError`]: nothing was begun, or the ring can no longer be used.
pub fn run(options: Options) -> Result<(), ServeError> {
    let status = options.status.clone();
    let result = Server::start(options).and_then(Server::serve);
    status.end();
    result
}

fn open(options: &Options) -> Result<(Directory, Store), ServeError> {
    use OpenError::{Damaged, NoDirectory};
    let opened = Directory::open(&options.directory, &OpenOptions { lock_wait: options.lock_wait });
    let Some(size) = options.size else { return Ok(opened?) };
    // Nothing is there, or what a creation has left that was interrupted: whether that is so is looked at once more.
    let is_new = match &opened {
        Err(NoDirectory(_)) => true,
        Err(Damaged { damage, .. }) => matches!(damage, Damage::NothingHere | Damage::Unfinished),
        _ => false,
    };
    if !is_new {
        return Ok(opened?);
    }
    let create = CreateOptions { size, backing: None, lock_wait: options.lock_wait };
    match Directory::create(&options.directory, &create) {
        Err(OpenError::NotEmpty(_)) => Ok(opened?),
        made => Ok(made?),
    }
}

fn facts(directory: &Directory, store: &Store) -> io::Result<Facts> {
    let state = directory.state();
    let fence = directory.fence();
    let missed = directory.missed()?;
    Ok(Facts {
        size: store.size(),
        fence: (fence != Default::default()).then_some(fence),
        epoch: directory.epoch().cloned(),
        prepared: state.prepared,
        committed: state.committed,
        intent_chunk: store.intent_chunk(),
        intent: store.intent(),
        clean: state.clean,
        powered: directory.is_powered(),
        out: missed.out,
        missed: missed.trails.into_iter().map(|(chunk, trail)| (chunk, Trail(trail))).collect(),
    })
}

impl Server {
    pub(super) fn start(options: Options) -> Result<Self, ServeError> {
        let system = |what| move |source| ServeError::System { what, source };
        let (directory, store) = open(&options)?;
        let reverting = match directory.state().prepared {
            Some((id, ChainOp::Revert { .. })) => Some(id),
            _ => None,
        };
        let core = Core::new(facts(&directory, &store).map_err(system("the record of what others missed"))?);
        let bell = Bell::new().map_err(system("an eventfd"))?;
        let mut ring = Ring::new(ENTRIES).map_err(system("an io_uring"))?;
        ring.wake_on(Token::new(OWNER, kind::BELL, 0, 0), &bell);
        let pool = Pool::new(POOL_SOFT, POOL_HARD).map_err(system("memory for buffers"))?;
        if let Err(e) = pool.lock().and_then(|()| pool.populate()) {
            tracing::warn!(
                "buffers are not resident ({e}): when memory is short this replica may wait for itself"
            );
        }
        let status = options.status.clone();
        let hasher = Hasher::new(options.directory.clone());
        let checksums = Checksums::new(options.directory.clone());
        let readers = Readers::new(options.directory.clone(), status.clone());
        let worker = Worker::start(directory, bell.clone(), status.clone()).map_err(system("a thread"))?;
        let door = Door::open(options)?;
        status.begin(door.address().clone(), bell, worker.tasks(), hasher.clone());
        let mut server = Self {
            ring,
            pool,
            status,
            started: Instant::now(),
            core,
            inputs: VecDeque::new(),
            outputs: Vec::new(),
            peers: Peers::default(),
            requests: Requests::default(),
            store,
            files: Vec::new(),
            in_memory: false,
            worker,
            door,
            flusher: Flusher::default(),
            marks: Marks::default(),
            folder: Folder::default(),
            checksums,
            hasher,
            readers,
            grants: Grants::default(),
            reverting,
            hungry: VecDeque::new(),
            parked: Vec::new(),
            unmarked: Vec::new(),
            mapless: VecDeque::new(),
            held: None,
            pieces: Vec::new(),
            stopping: false,
            ends_at: None,
            mode: (Mode::Down, Default::default()),
        };
        server.open_files().map_err(system("the layers' descriptors"))?;
        let place = file_system(server.store.layer_file(server.store.head()));
        server.in_memory = place.is_ok_and(|fs| fs.is_memory());
        Ok(server)
    }
}
