//! Bytes of writes that replicas on this host read where they lie (`docs/decisions/0014-writes-on-one-host-are-lent.md`).
//!
//! What is lent stays as it is until the replica has answered. If it never does, because its link ended before, nobody knows
//! whether it still reads: it may be stopped with the request unread in its socket, or its disk be at it. Then the bytes are
//! kept until it has said that it is done with everything of before, which letting in a new session says; or until it is no
//! replica of the volume any more.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::message::{MEMBERS_MAX, MemberId};

/// What a link has lent, in the order in which it was: answers come in much the same.
#[derive(Debug)]
pub struct Loans<P>(VecDeque<(u64, P)>);

impl<P> Default for Loans<P> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<P> Loans<P> {
    /// The request with this tag has its bytes there.
    pub fn lend(&mut self, tag: u64, payload: P) {
        self.0.push_back((tag, payload));
    }

    /// The request with this tag has been answered.
    pub fn end(&mut self, tag: u64) {
        if let Some(at) = self.0.iter().position(|(lent, _)| *lent == tag) {
            self.0.remove(at);
        }
    }

    /// What has not come back.
    pub fn into_payloads(self) -> impl Iterator<Item = P> {
        self.0.into_iter().map(|(_, payload)| payload)
    }
}

/// What links that are gone had lent, by member. Beside the pool's hard size, as far as that goes ([`lh_ring::Kept`]): a replica
/// that hangs takes no memory from the volume. No more for each than its link had in flight, since nothing is sent to it before
/// it lets a session in.
#[derive(Debug)]
pub struct Unreturned<K>([Vec<K>; MEMBERS_MAX]);

impl<K> Default for Unreturned<K> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Vec::new()))
    }
}

impl<K> Unreturned<K> {
    /// The member's link is gone.
    pub fn keep(&mut self, member: MemberId, lent: impl Iterator<Item = K>) {
        if let Some(kept) = self.0.get_mut(usize::from(member.0)) {
            kept.extend(lent);
        }
    }

    /// The member does not look at anything any more that was lent to it before.
    pub fn settle(&mut self, member: MemberId) {
        if let Some(kept) = self.0.get_mut(usize::from(member.0)) {
            *kept = Vec::new();
        }
    }

    /// All of it, for the end of whoever would hear that the members are done.
    pub fn take_all(&mut self) -> impl Iterator<Item = K> {
        self.0.iter_mut().flat_map(std::mem::take)
    }
}

/// A queue's memory, for whoever makes its links: known once the queue is on its thread.
#[derive(Clone, Debug, Default)]
pub struct Offer(Arc<(Mutex<Option<Known>>, Condvar)>);

/// A descriptor that replicas may be passed, unless nothing is lent.
type Known = Option<Arc<OwnedFd>>;

impl Offer {
    pub(crate) fn make(&self, memory: Option<OwnedFd>) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(memory.map(Arc::new));
        self.0.1.notify_all();
    }

    /// The descriptor that a replica is passed with the hello. `None`: nothing is lent, or nobody knows by then.
    pub fn wait(&self, until: Instant) -> Option<Arc<OwnedFd>> {
        let mut known = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while known.is_none() {
            let left = until.checked_duration_since(Instant::now())?;
            known = self.0.1.wait_timeout(known, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        known.clone().flatten()
    }
}
