//! Reads that the queue's thread does itself, in files that a replica on this host has granted
//! (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`).
//!
//! Such a read stands for one that was sent: it has the same tag, and either it ends as the member's answer would have, or it is
//! sent after all, because what it was read by does not hold any more, or because the disk has an error, about which the replica
//! decides. It is no sign of life of the member ([`crate::queue::Input::LocalRead`]).

use std::collections::VecDeque;
use std::fs::File;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use crossbeam_channel::Sender;
use lh_block::{BLOCK, Extent};
use lh_ring::{Fd, Payload, Pool, Ring, Watched};
use lh_wire::{PIECE, Place, Places, piece_of};

use super::place_cache::{Found, PlaceCache, Witness};
use crate::message::{MEMBERS_MAX, MemberId};
use crate::queue::Transmit;

/// Largest read that is made at once where files lie in memory, as replicas do.
const AT_ONCE_MAX: u64 = 64 << 10;

/// Requests for places in flight, of all members together.
const ASKED_MAX: usize = 8;

/// Alignment of memory that is read into: a page, which suits every disk.
const PAGE: u32 = 4096;

/// Reads that were given up by the queue and have not ended, beside one for each request.
const GIVEN_UP: u16 = 64;

/// A read that cannot be sent, for want of a number.
const NONE: u16 = u16::MAX;

/// What a replica has granted one queue. Its descriptors are copies: whoever has handed it out closes the last ones, when it hears
/// through `returned` that nobody has this any more.
#[derive(Debug)]
pub struct Granted {
    /// Counts the grants of all members, from 1.
    pub number: u32,
    /// The replica's own number of it.
    pub told_as: u32,
    /// What the replica says of it.
    pub watched: Arc<Watched>,
    /// Files of layers.
    pub files: Vec<File>,
    /// They lie in memory: reading them never waits.
    pub in_memory: bool,
    /// Somebody holds it as long as the session lasts that it was granted to, and not after the next one's links are there.
    pub session: Weak<()>,
    /// Dropped with it.
    pub returned: Sender<std::convert::Infallible>,
}

/// The same on the queue's thread. The files go before the word that they have gone.
#[derive(Debug)]
struct Holding {
    number: u32,
    told_as: u32,
    watched: Arc<Watched>,
    files: Vec<Source>,
    in_memory: bool,
    _returned: Sender<std::convert::Infallible>,
}

/// A file in both forms: for the ring, and for reading at once.
#[derive(Debug)]
enum Source {
    Ring(Fd),
    Memory(File, Fd),
}

impl Source {
    const fn fd(&self) -> &Fd {
        match self {
            Self::Ring(fd) | Self::Memory(_, fd) => fd,
        }
    }
}

/// A read under way.
#[derive(Debug)]
pub(super) struct Reading {
    /// What it stands for.
    pub(super) transmit: Transmit,
    /// Number of the link over which it would have been sent.
    pub(super) link: u32,
    holding: Rc<Holding>,
    place: Place,
    witness: Witness,
    payload: Payload,
}

impl Reading {
    /// What was read is what the member would answer.
    pub(super) fn holds(&self) -> bool {
        self.witness.holds(&*self.holding.watched)
    }
}

/// What becomes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is done here.
    Here,
    /// It is to be sent.
    Sent,
    /// It is to be sent, and where the blocks of this range are is to be asked.
    Asking(Extent),
}

/// The reads of a queue.
#[derive(Debug)]
pub(super) struct LocalReads {
    /// Made with the first grant.
    places: Option<PlaceCache>,
    holding: [Option<Rc<Holding>>; MEMBERS_MAX],
    reads: Vec<Option<Reading>>,
    free: Vec<u16>,
    /// For the ring.
    starting: VecDeque<u16>,
    /// To be done at once.
    ready: VecDeque<u16>,
    asked: Vec<(MemberId, u64)>,
    asked_max: usize,
}

impl LocalReads {
    /// For a queue of this depth.
    pub(super) fn new(depth: u16) -> Self {
        let reads = depth.saturating_add(GIVEN_UP).min(NONE - 1);
        // What a connection may have in flight is bounded by the replica.
        let room = 448_usize.saturating_sub(depth.into());
        Self {
            places: None,
            holding: [const { None }; MEMBERS_MAX],
            reads: (0..reads).map(|_| None).collect(),
            free: (0..reads).rev().collect(),
            starting: VecDeque::with_capacity(reads.into()),
            ready: VecDeque::with_capacity(reads.into()),
            asked: Vec::with_capacity(ASKED_MAX),
            asked_max: ASKED_MAX.min(room),
        }
    }

    /// A member has granted something, in place of what it had granted before. It may come late: the member's number may be
    /// another replica's by then, and the one that granted it be stopped, so that it does not say that it is over.
    pub(super) fn take_grant(&mut self, member: MemberId, granted: Granted) {
        let Granted { number, told_as, watched, files, in_memory, session, returned } = granted;
        let holds = !watched.is_over() && session.strong_count() > 0;
        let Some(place) = self.holding.get_mut(usize::from(member.0)).filter(|_| holds) else { return };
        let files = files.into_iter().map(|file| match in_memory.then(|| file.try_clone()) {
            Some(Ok(again)) => Source::Memory(again, Fd::new(file)),
            _ => Source::Ring(Fd::new(file)),
        });
        let files = files.collect();
        self.places.get_or_insert_default();
        *place = Some(Rc::new(Holding { number, told_as, watched, files, in_memory, _returned: returned }));
    }

    /// Nothing that the member has granted counts any more, or what has this number.
    pub(super) fn let_go(&mut self, member: MemberId, number: Option<u32>) {
        let Some(place) = self.holding.get_mut(usize::from(member.0)) else { return };
        place.take_if(|holding| number.is_none_or(|number| holding.number == number));
        if number.is_none() {
            self.asked.retain(|(asked, _)| *asked != member);
        }
    }

    /// Takes a read in, if its blocks are where this thread can read them.
    pub(super) fn take(&mut self, transmit: &Transmit, link: u32, size: u64, pool: &Pool) -> Taken {
        let place = &mut self.holding[usize::from(transmit.member.0)];
        let Some(holding) = place.clone().filter(|_| !transmit.verify) else { return Taken::Sent };
        if holding.watched.is_over() {
            *place = None;
            return Taken::Sent;
        }
        let Some(places) = &mut self.places else { return Taken::Sent };
        let (place, witness) = match places.find(holding.number, transmit.range, &*holding.watched) {
            Found::Here(place, witness) => (place, witness),
            Found::Elsewhere | Found::Restless => return Taken::Sent,
            Found::Unknown(piece) => return self.asking(transmit.member, piece, size),
        };
        // Most of the memory is left for what comes from sockets and frontends.
        if pool.used_bytes() > pool.hard_bytes() / 2 {
            return Taken::Sent;
        }
        let Some(n) = self.free.pop() else { return Taken::Sent };
        let len = u32::try_from(transmit.range.len).unwrap_or(u32::MAX);
        let Some(payload) = pool.alloc(len, PAGE) else {
            self.free.push(n);
            return Taken::Sent;
        };
        let at_once = place == Place::Zero || (holding.in_memory && transmit.range.len <= AT_ONCE_MAX);
        if at_once {
            self.ready.push_back(n)
        } else {
            self.starting.push_back(n)
        }
        self.reads[usize::from(n)] =
            Some(Reading { transmit: *transmit, link, holding, place, witness, payload });
        Taken::Here
    }

    fn asking(&mut self, member: MemberId, piece: u64, size: u64) -> Taken {
        let is_asked = self.asked.contains(&(member, piece));
        if is_asked || self.asked.len() >= self.asked_max {
            return Taken::Sent;
        }
        let Some(range) = Extent::new(piece * PIECE, PIECE).intersection(Extent::new(0, size)) else {
            return Taken::Sent;
        };
        self.asked.push((member, piece));
        Taken::Asking(range)
    }

    /// A member has answered where the blocks of a range are; false if it is no answer that a correct replica gives. `payload` is
    /// `None` for a refusal.
    pub(super) fn told(
        &mut self,
        member: MemberId,
        range: Extent,
        told_as: u32,
        payload: Option<&Payload>,
    ) -> bool {
        let piece = piece_of(range.offset);
        let Some(at) = self.asked.iter().position(|asked| *asked == (member, piece)) else { return false };
        self.asked.swap_remove(at);
        let Some(payload) = payload else { return true };
        let mut bytes = [0; Places::LEN_MAX];
        let Some(bytes) = bytes.get_mut(..payload.len()) else { return false };
        payload.copy_to(bytes);
        let Some(holding) = self.holding[usize::from(member.0)].as_ref().filter(|h| h.told_as == told_as)
        else {
            // Of a grant that is over, or has not come yet.
            return true;
        };
        let blocks = usize::try_from(range.len / BLOCK).unwrap_or(usize::MAX);
        match Places::decode(bytes, blocks, holding.files.len()) {
            Ok(told) => {
                if let Some(places) = &mut self.places {
                    places.keep(holding.number, piece, &told);
                }
                true
            }
            Err(e) => {
                tracing::warn!("a replica's answer is unreadable: {e}");
                false
            }
        }
    }

    /// Submits what is for the ring. The kind of the completions' tokens is the caller's, their slot the number of the read.
    pub(super) fn start(&mut self, ring: &mut Ring, token: impl Fn(u16) -> lh_ring::Token) {
        while let Some(n) = self.starting.pop_front() {
            let Some(reading) = &mut self.reads[usize::from(n)] else { continue };
            let Place::File(file) = reading.place else { continue };
            let Some(source) = reading.holding.files.get(usize::from(file)) else { continue };
            let payload = std::mem::take(&mut reading.payload);
            ring.readv(token(n), source.fd(), reading.transmit.range.offset, payload);
        }
    }

    /// Does the next read that is to be done at once: whether its bytes are here, and what it is.
    pub(super) fn next_at_once(&mut self) -> Option<(Reading, Payload, bool)> {
        let n = self.ready.pop_front()?;
        let mut reading = self.end(n)?;
        let mut payload = std::mem::take(&mut reading.payload);
        let source = match reading.place {
            Place::File(file) => reading.holding.files.get(usize::from(file)),
            Place::Zero | Place::Asked => None,
        };
        let done = match (reading.place, source) {
            (Place::Zero, _) => {
                payload.fill_zero(0..payload.len());
                true
            }
            (_, Some(Source::Memory(file, _))) => {
                payload.read_from(file, reading.transmit.range.offset).is_ok_and(|n| n == payload.len())
            }
            _ => false,
        };
        Some((reading, payload, done))
    }

    /// A read has ended.
    pub(super) fn end(&mut self, n: u16) -> Option<Reading> {
        let reading = self.reads.get_mut(usize::from(n))?.take()?;
        self.free.push(n);
        Some(reading)
    }
}
