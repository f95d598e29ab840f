//! What members remember of a replica that was away: what it missed.

use lh_block::Extent;
use lh_wire::MapPage;

use super::copy::{MARKS_MAX, few};
use crate::message::{MemberId, MemberSet};

/// What members remember of the target.
#[derive(Debug)]
pub(super) struct Memory {
    /// Who is still to be asked.
    pub(super) left: MemberSet,
    pub(super) asked: Option<MemberId>,
    /// One of them has seen everything.
    pub(super) known: bool,
    pub(super) marks: Vec<Extent>,
    /// Where the page begins that was asked for.
    pub(super) from: u64,
}

impl Memory {
    /// A page has come: where the next one begins, if there is more. Who tells of more that does not come further would be asked
    /// for ever: it does not know.
    pub(super) fn take(&mut self, page: MapPage) -> Option<u64> {
        self.marks.extend(page.ranges);
        if self.marks.len() > 2 * MARKS_MAX {
            self.marks = few(std::mem::take(&mut self.marks));
        }
        let next = page.next.filter(|next| *next > self.from);
        self.known |= page.next.is_none();
        self.from = next.unwrap_or(0);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A member tells single blocks apart, of a volume of any size.
    #[test]
    fn what_members_remember_is_kept_in_bounded_memory() {
        let (left, asked) = (MemberSet::EMPTY, None);
        let mut memory = Memory { left, asked, known: false, marks: Vec::new(), from: 0 };
        let (pages, ranges) = (3 * MARKS_MAX as u64 / 4096, 4096);
        for page in 0..pages {
            let ranges = (page * ranges..(page + 1) * ranges).map(|n| Extent::new(n * 8192, 4096)).collect();
            memory.take(MapPage { ranges, next: Some((page + 1) * 4096 * 8192), total: None });
            assert!(memory.marks.len() <= 2 * MARKS_MAX);
        }
        let marks = few(memory.marks);
        let covered = |n: u64| marks.iter().any(|m| m.contains(Extent::new(n * 8192, 4096)));
        assert!((0..pages * 4096).step_by(99_991).all(covered), "none is forgotten");
    }

    #[test]
    fn pages_are_asked_for_as_long_as_they_come_further() {
        let page = |at: u64, next| MapPage { ranges: vec![Extent::new(at, 4096)], next, total: None };
        let memory = || {
            let left = MemberSet::EMPTY;
            Memory { left, asked: None, known: false, marks: Vec::new(), from: 0 }
        };
        let mut whole = memory();
        assert_eq!(whole.take(page(0, Some(8192))), Some(8192));
        assert_eq!(whole.take(page(8192, None)), None);
        assert_eq!((whole.known, whole.marks.len()), (true, 2));
        for back in [0, 4096, 8192] {
            let mut round = memory();
            assert_eq!(round.take(page(0, Some(8192))), Some(8192));
            assert_eq!(round.take(page(8192, Some(back))), None);
            assert!(!round.known, "what such a member tells is not all");
        }
    }
}
