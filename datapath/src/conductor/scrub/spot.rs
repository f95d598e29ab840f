//! Blocks that reads, or copies, have found bad on one replica: they are looked at in every layer, at once, and written anew from a
//! replica whose copy is sound.
//!
//! A disk gives a sector that it cannot read another place when it is written, so what is unreadable is mended as rot is. Who cannot
//! be mended, or has more such blocks than are mended meanwhile, is put out, if it can be spared.

use lh_block::Extent;

use super::judge::Judgement;
use super::{Conductor, Finding};
use crate::message::{MemberId, MemberSet};

/// Places that wait for their repair: one more is found again by the next read of it.
const SPOTS_MAX: usize = 64;

impl Conductor {
    /// A read or a copy met a block that does not fit its checksum.
    pub(in crate::conductor) fn on_rotten_read(&mut self, member: MemberId, range: Extent) {
        self.replicas.doubt_source(member);
        self.note_spot(member, range, "do not fit their checksums");
    }

    /// A read met a block that the member's disk does not give, and another one's has.
    pub(in crate::conductor) fn on_unreadable(&mut self, member: MemberId, range: Extent) {
        if self.scrubs.spots.len() >= SPOTS_MAX && !self.is_noted(range) {
            return self.put_out_unreadable(MemberSet::EMPTY.with(member));
        }
        self.note_spot(member, range, "cannot be read there");
    }

    fn note_spot(&mut self, member: MemberId, range: Extent, what: &str) {
        if self.is_noted(range) || self.scrubs.spots.len() >= SPOTS_MAX {
            return;
        }
        self.desk.log(format!(
            "replica {}: blocks at {} {what} and are to be repaired",
            self.replicas.name(member),
            range.offset
        ));
        self.scrubs.spots.push_back(range);
    }

    /// The place waits for its repair, or is being repaired.
    fn is_noted(&self, range: Extent) -> bool {
        self.scrubs.spots.contains(&range)
            || self.scrubs.spot.as_ref().is_some_and(|s| s.spot == Some(range) && s.status.running)
    }

    /// A repair has failed. Those whose disks do not give the blocks do not take them either; what they hold is compared wholly before
    /// they are members again.
    pub(super) fn give_up_mending(&mut self, attempt: u64, judgement: &Judgement, unreadable: MemberSet) {
        let of_a_read = self.scrubs.spot.as_ref().is_some_and(|spot| spot.attempt == attempt);
        let lost = judgement.bad().and(unreadable).and(self.replicas.serving());
        if of_a_read {
            lost.iter().for_each(|member| self.replicas.get_mut(member).thorough = true);
            self.put_out_unreadable(lost);
        }
    }

    fn put_out_unreadable(&mut self, members: MemberSet) {
        for member in members.and(self.replicas.serving()).iter() {
            let why = "its disk cannot read what another one can";
            if self.can_be_spared(member) {
                self.lose(member, why);
            } else if !self.scrubs.needed.has(member) {
                // Each read of a further bad block comes here.
                self.scrubs.needed = self.scrubs.needed.with(member);
                self.desk.log(format!("replica {} is needed, though {why}", self.replicas.name(member)));
            }
        }
    }

    pub(super) fn end_spot(&mut self) {
        let Some(mut scrub) = self.scrubs.spot.take() else { return };
        scrub.end(None);
        for finding in &scrub.status.findings {
            let Finding { replica, layer, range, mend, .. } = finding;
            let layer = if layer.is_empty() { "the head" } else { layer };
            self.desk.log(format!(
                "replica {replica}, {layer}, {} bytes at {}: {mend:?}",
                range.len, range.offset
            ));
        }
        self.counters.rotten_blocks += scrub.status.bad_blocks;
        self.counters.mended_blocks += scrub.status.repaired_blocks;
    }
}
