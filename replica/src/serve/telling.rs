//! What is answered from the index at once, without a look at any layer: where blocks are, and which hold data.

use lh_block::Extent;

use super::core::{Completed, Failure, RequestId};
use super::request::Part;
use super::server::Server;

impl Server {
    /// Tells where the blocks of a range are.
    pub(super) fn tell_places(&mut self, id: RequestId, range: Extent) {
        let told = self.store.tell_places(range).map(|places| places.encode());
        let refused = |why: &str| Err(Failure::Refused(why.into()));
        let Some((bytes, len)) = told else { return self.end(id, refused("nothing is granted")) };
        if !self.answer_with(id, &bytes[..len], self.grants.count) {
            self.end(id, refused("there is no memory for an answer now"));
        }
    }

    /// Tells which blocks of a range hold data; without memory for it, that nothing is known.
    pub(super) fn tell_allocation(&mut self, id: RequestId, range: Extent) {
        let runs = self.store.allocation(range);
        if !self.answer_with(id, runs.as_bytes(), 0) {
            self.end(id, Ok(Completed::default()));
        }
    }

    /// Answers a request with a few bytes; false if there is no memory for them now.
    fn answer_with(&mut self, id: RequestId, bytes: &[u8], aux: u32) -> bool {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let Some(mut payload) = self.pool.alloc(len, 1) else { return false };
        payload.write_at(0, bytes);
        self.requests.get(id).parts.push(Part::Ready(payload));
        self.end(id, Ok(Completed { payload: len, aux, sync: false }));
        true
    }
}
