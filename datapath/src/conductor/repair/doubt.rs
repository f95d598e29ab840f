//! Chunks in doubt: which are begun, which comes next, and what is known of each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use lh_block::Extent;

use super::view::View;
use crate::conductor::Ballot;
use crate::message::{LayerRef, MemberId, MemberSet, SwitchId};

/// Chunks in doubt, and who has to hear that there are none.
#[derive(Debug, Default)]
pub(in crate::conductor) struct Doubt {
    pub(super) chunks: BTreeMap<u64, Chunk>,
    /// Those of them that are begun. There may be half a million chunks, and few are begun: every copy looks through these alone.
    pub(super) begun: BTreeSet<u64>,
    /// Chunks that requests wait for, first come first served.
    pub(super) wanted: VecDeque<u64>,
    /// Since a copy has ended well.
    pub(super) failures: u32,
    pub(super) retry_at: u64,
    /// What of a loss in these chunks has been told: no flush ends before they are equal.
    pub(super) lost: Owed,
    pub(super) view: View,
    /// The members are to be told once nothing is in doubt and these switches are made.
    pub(super) tell: bool,
    pub(super) after: Vec<SwitchId>,
    pub(in crate::conductor) told: Ballot,
}

/// Members whose process has died since all were last equal: none of them knows which writes it has and others have not.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::conductor) struct Dead {
    pub(in crate::conductor) all: MemberSet,
    /// Those of them whose hosts have lost their power since: what was answered and not flushed may be gone.
    pub(super) unpowered: MemberSet,
}

/// Clients that were answered something that no flush covers: should it be lost, they have to hear of it
/// (`docs/decisions/0019-a-flush-tells-of-a-loss.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owed {
    /// There are none.
    #[default]
    Nobody,
    /// Those of an engine before this one, if they have stayed.
    WhoStayed,
    /// Those of this one.
    Everybody,
}

/// One chunk in doubt.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    pub(super) dead: Dead,
    /// Who was answered something in it that no flush covers.
    pub(super) owed: Owed,
    /// What is still to be copied; `None`: not begun.
    pub(super) left: Option<Vec<(Option<LayerRef>, Extent)>>,
    pub(super) flying: u32,
    /// Something failed or changed since it was begun: to be done again from the start.
    pub(super) spoilt: bool,
    /// How often that was for a copy that failed. Copies of its other parts may end well each time.
    pub(super) failures: u32,
}

impl Doubt {
    pub(in crate::conductor) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(in crate::conductor) fn len(&self) -> u64 {
        self.chunks.len() as u64
    }

    pub(in crate::conductor) fn lost(&mut self, member: MemberId) {
        self.told.lost(member);
        self.view.lost(member);
        for chunk in self.chunks.values_mut() {
            chunk.spoilt |= chunk.left.is_some();
        }
    }

    fn of_begun(&self) -> impl Iterator<Item = (u64, &Chunk)> {
        self.begun.iter().filter_map(|n| Some((*n, self.chunks.get(n)?)))
    }

    /// Copies on their way.
    pub(super) fn flying(&self) -> u32 {
        self.of_begun().map(|(_, c)| c.flying).sum()
    }

    /// A chunk of which all is copied.
    pub(super) fn finished(&self) -> Option<u64> {
        let finished = |c: &Chunk| !c.spoilt && c.flying == 0 && c.left.as_ref().is_some_and(Vec::is_empty);
        self.of_begun().find(|(_, c)| finished(c)).map(|(n, _)| n)
    }

    /// The chunk to go on with: a wanted one, else one that is begun, else the first. Those of which copies have failed come last: who
    /// alone has what others lost gives first what it can.
    pub(super) fn next_chunk(&self) -> Option<u64> {
        let open = |c: &Chunk| {
            if c.spoilt { c.flying == 0 } else { c.left.as_ref().is_none_or(|left| !left.is_empty()) }
        };
        let sound = |c: &Chunk| c.failures == 0 && open(c);
        let wanted = self.wanted.iter().find(|n| self.chunks.get(n).is_some_and(open)).copied();
        let begun = |which: &dyn Fn(&Chunk) -> bool| self.of_begun().find(|(_, c)| which(c)).map(|(n, _)| n);
        let first = || self.chunks.iter().find(|(_, c)| sound(c)).map(|(n, _)| *n);
        wanted.or_else(|| begun(&sound)).or_else(first).or_else(|| begun(&open))
    }

    /// It is copied from the start.
    pub(super) fn begin(&mut self, number: u64, left: Vec<(Option<LayerRef>, Extent)>) {
        if let Some(c) = self.chunks.get_mut(&number) {
            *c = Chunk { left: Some(left), flying: 0, spoilt: false, ..*c };
            self.begun.insert(number);
        }
    }

    pub(super) fn remove(&mut self, number: u64) -> Chunk {
        self.begun.remove(&number);
        self.wanted.retain(|w| *w != number);
        self.chunks.remove(&number).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::PIECE;
    use super::*;

    /// As many as a volume of 2 TiB has, after a power cut under writes all over it: flushes wait for the last one. A look through all of
    /// them for every copy would take hours in all.
    #[test]
    fn a_copy_looks_through_few_chunks_however_many_are_in_doubt() {
        let chunks: BTreeMap<u64, Chunk> =
            (0..lh_wire::INTENT_CHUNKS_MAX).map(|n| (n, Chunk::default())).collect();
        let mut doubt = Doubt { chunks, wanted: [400_000, 7].into(), ..Doubt::default() };
        let began = std::time::Instant::now();
        for n in [400_000, 7].into_iter().chain(0..7).chain(8..30_000) {
            assert_eq!((doubt.finished(), doubt.flying(), doubt.next_chunk()), (None, 0, Some(n)));
            doubt.begin(n, vec![(None, Extent::new(0, PIECE))]);
            assert_eq!(doubt.next_chunk(), Some(n), "it goes on with what is begun");
            doubt.begin(n, Vec::new());
            assert_eq!(doubt.finished(), Some(n));
            doubt.remove(n);
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "{:?}", began.elapsed());
    }

    #[test]
    fn a_chunk_that_cannot_be_copied_waits_for_all_others() {
        let chunks: BTreeMap<u64, Chunk> = (0..3).map(|n| (n, Chunk::default())).collect();
        let mut doubt = Doubt { chunks, ..Doubt::default() };
        for n in [0, 1, 2] {
            assert_eq!(doubt.next_chunk(), Some(n));
            doubt.begin(n, vec![(None, Extent::new(0, PIECE))]);
            if n == 0 {
                doubt.chunks.entry(n).and_modify(|c| (c.failures, c.spoilt) = (1, true));
            } else {
                assert_eq!(doubt.next_chunk(), Some(n), "it goes on with what is begun");
                doubt.remove(n);
            }
        }
        assert_eq!(doubt.next_chunk(), Some(0));
        doubt.chunks.insert(1, Chunk::default());
        doubt.wanted.push_back(0);
        assert_eq!(doubt.next_chunk(), Some(0), "somebody waits for it");
    }
}
