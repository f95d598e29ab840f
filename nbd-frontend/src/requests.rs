//! The requests that the device has, by their tags.
//!
//! A tag names a place and a count of its uses, so that no tag is used twice while a request is in flight, and an answer
//! is never taken for another request's. Requests outlive their connection: the device answers them all the same.

use lh_block::Extent;

use crate::budget::Claimant;
use crate::transmit::Call;

/// What the device has of a client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// A piece of a long write.
    OfWrite,
    /// This piece of a long read.
    OfRead(Extent),
    /// A question which blocks of this range hold data.
    Status(Extent),
}

/// A request that the device has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    /// Whose it is. The connection may be gone.
    pub(crate) owner: Claimant,
    pub(crate) call: Call,
    pub(crate) part: Part,
    /// Changes data.
    pub(crate) write: bool,
    /// Bytes taken from the budget.
    pub(crate) bytes: usize,
}

/// Table of requests in flight. Places are recycled last in, first out; it grows to the largest number ever in flight.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    places: Vec<(u32, Option<InFlight>)>,
    free: Vec<u32>,
}

impl Requests {
    /// Room for `depth` requests without allocation.
    pub(crate) fn with_capacity(depth: u32) -> Self {
        Self { places: Vec::with_capacity(depth as usize), free: Vec::with_capacity(depth as usize) }
    }

    /// Number of requests in flight.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whose they are.
    pub(crate) fn owners(&self) -> impl Iterator<Item = Claimant> {
        self.places.iter().filter_map(|(_, request)| Some(request.as_ref()?.owner))
    }

    /// The tags of one client's requests.
    pub(crate) fn tags_of(&self, owner: Claimant) -> impl Iterator<Item = u64> {
        (0_u64..).zip(&self.places).filter_map(move |(index, (uses, request))| {
            (request.as_ref()?.owner == owner).then_some(u64::from(*uses) << 32 | index)
        })
    }

    /// Remembers a request: its tag.
    pub(crate) fn insert(&mut self, request: InFlight) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            #[expect(
                clippy::cast_possible_truncation,
                reason = "at most the device's depth, a 32-bit number"
            )]
            let last = (self.places.len() - 1) as u32;
            last
        });
        let place = &mut self.places[index as usize];
        place.0 = place.0.wrapping_add(1);
        place.1 = Some(request);
        u64::from(place.0) << 32 | u64::from(index)
    }

    /// The request of this tag, which is not in flight any more. `None` for a tag that was never given out or is
    /// answered twice.
    pub(crate) fn take(&mut self, tag: u64) -> Option<InFlight> {
        #[expect(clippy::cast_possible_truncation, reason = "the lower half is the index")]
        let index = tag as u32;
        let place = self.places.get_mut(index as usize)?;
        if u64::from(place.0) != tag >> 32 {
            return None;
        }
        let request = place.1.take()?;
        self.free.push(index);
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> InFlight {
        let call = Call { flags: 0, kind: 0, cookie: 0, offset: 0, length: 0, payload: 0 };
        InFlight { owner: (0, 0), call, part: Part::Whole, write: false, bytes: 0 }
    }

    #[test]
    fn a_tag_is_answered_once() {
        let mut requests = Requests::with_capacity(2);
        let first = requests.insert(request());
        assert!(requests.take(first).is_some());
        assert!(requests.take(first).is_none());
        let second = requests.insert(request());
        assert_ne!(first, second);
        assert!(requests.take(first).is_none());
        assert_eq!(requests.len(), 1);
        assert!(requests.take(second).is_some());
        assert!(requests.take(u64::MAX).is_none());
        assert_eq!(requests.len(), 0);
    }
}
