//! Who is right about a block, given what every member says of its own copy and which copies are equal.

use lh_block::{BLOCK, Extent};
use lh_wire::Verified;

use crate::message::{MemberId, MemberSet};

/// Why a block cannot be repaired, or whom it is repaired from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Its copy fits its checksum, or is the same on more than half of all members whose disks give theirs.
    From(MemberId),
    /// Nobody's copy is sound.
    Nobody,
    /// The copies that are not rotten are too few to be believed without checksums.
    Unsure,
    /// Copies differ, and each fits its own checksum.
    Conflict,
}

/// What is wrong with some neighbouring blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Judgement {
    pub(super) range: Extent,
    /// Whose copy does not fit its checksum or cannot be read.
    pub(super) rotten: MemberSet,
    /// Whose copy is another than the right one, as far as a right one is known; with `Conflict` and `Unsure`: all.
    pub(super) differs: MemberSet,
    pub(super) source: Source,
}

impl Judgement {
    pub(super) const fn bad(&self) -> MemberSet {
        self.rotten.or(self.differs)
    }
}

/// What all members say of a range of at most [`lh_wire::VERIFY_MAX`] bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Evidence {
    /// What each says of its own copy. A block that cannot be read counts as rotten.
    pub(super) own: Vec<(MemberId, Verified)>,
    /// Whose disks do not give the block: nothing is said by them against the copies of others.
    pub(super) unreadable: MemberSet,
    /// A bit per block in which two members' copies differ; means nothing where one of them is rotten.
    pub(super) differ: Vec<(MemberId, MemberId, u32)>,
}

impl Evidence {
    /// Everything that is wrong in the range, joined. `None`: copies changed while they were compared.
    pub(super) fn judge(&self, range: Extent) -> Option<Vec<Judgement>> {
        let mut found: Vec<Judgement> = Vec::new();
        for n in 0..range.len / BLOCK {
            let block = Extent::new(range.offset + n * BLOCK, BLOCK);
            let Some(judgement) = self.block(u32::try_from(n).ok()?, block)? else { continue };
            match found.last_mut() {
                Some(last)
                    if last.range.end() == block.offset
                        && (last.rotten, last.differs, last.source)
                            == (judgement.rotten, judgement.differs, judgement.source) =>
                {
                    last.range.len += BLOCK;
                }
                _ => found.push(judgement),
            }
        }
        Some(found)
    }

    fn block(&self, n: u32, range: Extent) -> Option<Option<Judgement>> {
        let with = |bits: fn(&Verified) -> u16| -> MemberSet {
            self.own.iter().filter(|(_, v)| u32::from(bits(v)) >> n & 1 == 1).map(|(m, _)| *m).collect()
        };
        let all: MemberSet = self.own.iter().map(|(m, _)| *m).collect();
        let rotten = with(|v| v.rotten);
        let left = all.minus(rotten);
        let known = with(|v| v.known).minus(rotten);
        let classes = self.classes(n, left)?;
        if rotten.is_empty() && classes.len() <= 1 {
            return Some(None);
        }
        let sure: Vec<MemberSet> = classes.iter().copied().filter(|c| !c.and(known).is_empty()).collect();
        let told = all.minus(self.unreadable).len();
        let majority = classes.iter().copied().find(|class| class.len() * 2 > told);
        let (right, source) = match (sure.as_slice(), majority) {
            ([class], _) => (*class, source_in(class.and(known))),
            ([], Some(class)) => (class, source_in(class)),
            ([], None) if left.is_empty() => (MemberSet::EMPTY, Source::Nobody),
            ([], None) => (MemberSet::EMPTY, Source::Unsure),
            (_, _) => (MemberSet::EMPTY, Source::Conflict),
        };
        let alone = classes.len() == 1 && source == Source::Unsure;
        // One copy that nobody contradicts is not called different for being alone.
        let differs = if alone { MemberSet::EMPTY } else { left.minus(right) };
        Some(Some(Judgement { range, rotten, differs, source }))
    }

    /// Members whose copies are equal. `None`: equality is not transitive, so something changed meanwhile.
    fn classes(&self, n: u32, of: MemberSet) -> Option<Vec<MemberSet>> {
        let differ = |a: MemberId, b: MemberId| {
            let pair = |(x, y, _): &&(MemberId, MemberId, u32)| (*x, *y) == (a, b) || (*x, *y) == (b, a);
            self.differ.iter().find(pair).is_some_and(|(_, _, bits)| bits >> n & 1 == 1)
        };
        let mut classes: Vec<MemberSet> = Vec::new();
        for member in of.iter() {
            let equal: Vec<usize> = (0..classes.len())
                .filter(|at| classes[*at].iter().any(|other| !differ(member, other)))
                .collect();
            match equal.as_slice() {
                [] => classes.push(MemberSet::EMPTY.with(member)),
                [at] if classes[*at].iter().all(|other| !differ(member, other)) => {
                    classes[*at] = classes[*at].with(member);
                }
                _ => return None,
            }
        }
        Some(classes)
    }
}

fn source_in(members: MemberSet) -> Source {
    members.iter().next().map_or(Source::Nobody, Source::From)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0);
    const B: MemberId = MemberId(1);
    const C: MemberId = MemberId(2);
    const SOUND: Verified = Verified { rotten: 0, known: 1 };
    const ROTTEN: Verified = Verified { rotten: 1, known: 1 };
    const UNKNOWN: Verified = Verified { rotten: 0, known: 0 };

    /// Judges one block; `differ`: AB, AC, BC.
    fn judge(own: &[Verified], differ: [u32; 3]) -> Option<Judgement> {
        let own = [A, B, C].into_iter().zip(own.iter().copied()).collect();
        let differ = vec![(A, B, differ[0]), (A, C, differ[1]), (B, C, differ[2])];
        let evidence = Evidence { own, differ, ..Evidence::default() };
        evidence.judge(Extent::new(0, BLOCK)).expect("transitive").pop()
    }

    fn set(members: &[MemberId]) -> MemberSet {
        members.iter().copied().collect()
    }

    fn verdict(own: &[Verified], differ: [u32; 3]) -> (MemberSet, MemberSet, Source) {
        let judged = judge(own, differ).expect("something is wrong");
        (judged.rotten, judged.differs, judged.source)
    }

    #[test]
    fn equal_and_sound_is_nothing() {
        assert_eq!(judge(&[SOUND, SOUND, SOUND], [0; 3]), None);
        assert_eq!(judge(&[UNKNOWN, UNKNOWN], [0; 3]), None);
        assert_eq!(judge(&[UNKNOWN], [0; 3]), None);
    }

    #[test]
    fn a_checksum_decides_whatever_the_majority() {
        assert_eq!(verdict(&[ROTTEN, SOUND, SOUND], [1, 1, 0]), (set(&[A]), set(&[]), Source::From(B)));
        assert_eq!(verdict(&[ROTTEN, ROTTEN, SOUND], [0, 1, 1]), (set(&[A, B]), set(&[]), Source::From(C)));
        assert_eq!(verdict(&[UNKNOWN, UNKNOWN, SOUND], [0, 1, 1]), (set(&[]), set(&[A, B]), Source::From(C)));
        assert_eq!(verdict(&[ROTTEN, SOUND, UNKNOWN], [1, 1, 0]), (set(&[A]), set(&[]), Source::From(B)));
    }

    #[test]
    fn without_checksums_more_than_half_are_right() {
        assert_eq!(verdict(&[UNKNOWN, UNKNOWN, UNKNOWN], [1, 1, 0]), (set(&[]), set(&[A]), Source::From(B)));
        assert_eq!(verdict(&[ROTTEN, UNKNOWN, UNKNOWN], [1, 1, 0]), (set(&[A]), set(&[]), Source::From(B)));
        assert_eq!(verdict(&[UNKNOWN, UNKNOWN], [1, 0, 0]), (set(&[]), set(&[A, B]), Source::Unsure));
        let three = verdict(&[UNKNOWN, UNKNOWN, UNKNOWN], [1, 1, 1]);
        assert_eq!(three, (set(&[]), set(&[A, B, C]), Source::Unsure));
    }

    #[test]
    fn nobody_is_repaired_from_a_bad_copy() {
        assert_eq!(verdict(&[ROTTEN], [0; 3]), (set(&[A]), set(&[]), Source::Nobody));
        // Equal and rotten: still rotten.
        assert_eq!(verdict(&[ROTTEN, ROTTEN], [0; 3]), (set(&[A, B]), set(&[]), Source::Nobody));
        assert_eq!(verdict(&[ROTTEN, UNKNOWN], [1, 0, 0]), (set(&[A]), set(&[]), Source::Unsure));
        assert_eq!(verdict(&[SOUND, SOUND], [1, 0, 0]), (set(&[]), set(&[A, B]), Source::Conflict));
        // One is rotten and the others contradict each other.
        assert_eq!(
            verdict(&[ROTTEN, UNKNOWN, UNKNOWN], [1, 1, 1]),
            (set(&[A]), set(&[B, C]), Source::Unsure)
        );
    }

    /// A disk that does not give its copy says nothing against the others'.
    #[test]
    fn what_a_disk_does_not_give_is_taken_from_those_that_agree() {
        let judge = |own: &[Verified], differ: [u32; 3]| {
            let own = [A, B, C].into_iter().zip(own.iter().copied()).collect();
            let differ = vec![(A, B, differ[0]), (A, C, differ[1]), (B, C, differ[2])];
            let evidence = Evidence { own, differ, unreadable: set(&[A]) };
            let judged = evidence.judge(Extent::new(0, BLOCK)).expect("transitive").pop().expect("bad");
            (judged.rotten, judged.differs, judged.source)
        };
        assert_eq!(judge(&[ROTTEN, UNKNOWN], [0; 3]), (set(&[A]), set(&[]), Source::From(B)));
        assert_eq!(judge(&[ROTTEN, UNKNOWN, UNKNOWN], [0; 3]), (set(&[A]), set(&[]), Source::From(B)));
        let apart = judge(&[ROTTEN, UNKNOWN, UNKNOWN], [0, 0, 1]);
        assert_eq!(apart, (set(&[A]), set(&[B, C]), Source::Unsure));
        assert_eq!(judge(&[ROTTEN, ROTTEN], [0; 3]), (set(&[A, B]), set(&[]), Source::Nobody));
        assert_eq!(judge(&[ROTTEN], [0; 3]), (set(&[A]), set(&[]), Source::Nobody));
    }

    #[test]
    fn what_changed_meanwhile_is_looked_at_again() {
        let own = vec![(A, UNKNOWN), (B, UNKNOWN), (C, UNKNOWN)];
        let differ = vec![(A, B, 1), (A, C, 0), (B, C, 0)];
        let evidence = Evidence { own, differ, ..Evidence::default() };
        assert_eq!(evidence.judge(Extent::new(0, BLOCK)), None);
    }

    #[test]
    fn neighbours_are_joined() {
        let own =
            vec![(A, Verified { rotten: 0b0110, known: 0xffff }), (B, Verified { rotten: 0, known: 0xffff })];
        let evidence = Evidence { own, differ: vec![(A, B, 0b0110)], ..Evidence::default() };
        let found = evidence.judge(Extent::new(1 << 16, 4 * BLOCK)).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].range, Extent::new((1 << 16) + BLOCK, 2 * BLOCK));
    }
}
