//! What a queue knows of where blocks are, in files that replicas on this host have granted
//! (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`).
//!
//! The replica tells the places of a piece of the volume together with where the piece's counter stood before it looked. They hold
//! as long as the grant does and the counter stands there: that is looked at before a block is read by them, and again when the
//! bytes are here, before anybody gets them ([`Witness::holds`]). What lies between the two looks was read where the block was all the
//! time.
//!
//! Memory is taken once, whatever the volume's size. Of two pieces that share an entry the one stays that is asked for again before
//! the other is.

use lh_block::{BLOCK, Extent};
use lh_wire::{PIECE, PIECE_BLOCKS, Place, Places, counter_of, pieces_of};

/// Pieces that are known at one time, of all members together: 4 MiB for 16 GiB of volume.
const ENTRIES: usize = 16 << 10;

/// What a replica says of its grant while others read by it.
pub trait Watch {
    /// It holds no more.
    fn is_over(&self) -> bool;
    /// Where a counter stands.
    fn count(&self, counter: usize) -> u64;
}

impl Watch for lh_ring::Watched {
    fn is_over(&self) -> bool {
        self.is_over()
    }

    fn count(&self, counter: usize) -> u64 {
        self.count(counter)
    }
}

/// What places were read by: the counters of at most two pieces, which no read of a client goes beyond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Witness {
    counts: [(usize, u64); 2],
    pieces: usize,
}

impl Witness {
    /// The places were right all the time since they were looked up.
    pub fn holds(&self, watch: &impl Watch) -> bool {
        let stands = |(counter, count): &(usize, u64)| watch.count(*counter) == *count;
        self.counts[..self.pieces].iter().all(stands) && !watch.is_over()
    }
}

/// Where a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Wholly there, if the witness still holds when it was read: in a file, or it is zeroes.
    Here(Place, Witness),
    /// In several places, or where only the replica reads.
    Elsewhere,
    /// Nothing is known of this piece.
    Unknown(u64),
    /// Nothing is known of this piece, and it is not worth asking: what its entry holds is of more use so far, or blocks move in
    /// it just now.
    Restless,
}

/// Whose places an entry has: the number of a grant, never 0, and the piece.
type Key = (u32, u32);

/// What is known of one piece.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    key: Key,
    /// What was asked for last of all that share the entry and do not have it.
    rival: Key,
    count: u64,
    /// Where the counter stood when it was looked at last: places are asked for again when it has stood still for a while.
    stood: u64,
    blocks: u16,
}

/// Where blocks are. See the module's documentation.
#[derive(Debug)]
pub struct PlaceCache {
    entries: Vec<Entry>,
    codes: Vec<u8>,
}

impl Default for PlaceCache {
    fn default() -> Self {
        Self::of(ENTRIES)
    }
}

impl PlaceCache {
    /// For so many pieces at one time.
    pub fn of(entries: usize) -> Self {
        // Each page is touched here, so that no request waits for memory.
        Self {
            entries: vec![Entry::default(); entries],
            codes: vec![Place::Asked.code(); entries * PIECE_BLOCKS],
        }
    }

    /// The entry of a piece. Grants are numbered one after the other, and neighbours among pieces stay neighbours.
    #[expect(clippy::cast_possible_truncation, reason = "taken modulo the number of entries, which is small")]
    fn place(&self, (grant, piece): Key) -> usize {
        let mixed = u64::from(piece) + u64::from(grant) * 0x9e37;
        (mixed % self.entries.len() as u64) as usize
    }

    fn key(grant: u32, piece: u64) -> Option<Key> {
        Some((grant, u32::try_from(piece).ok()?))
    }

    /// Where a range of whole blocks is, by what this grant has told.
    pub fn find(&mut self, grant: u32, range: Extent, watch: &impl Watch) -> Found {
        let mut witness = Witness::default();
        let mut all = None;
        for piece in pieces_of(range) {
            let Some(key) = Self::key(grant, piece).filter(|_| witness.pieces < witness.counts.len()) else {
                return Found::Elsewhere;
            };
            let (at, counter) = (self.place(key), counter_of(piece));
            let entry = &mut self.entries[at];
            if entry.key != key {
                let again = std::mem::replace(&mut entry.rival, key) == key;
                let free = entry.key == Key::default();
                return if again || free { Found::Unknown(piece) } else { Found::Restless };
            }
            let count = watch.count(counter);
            if count != entry.count {
                let calm = std::mem::replace(&mut entry.stood, count) == count;
                return if calm { Found::Unknown(piece) } else { Found::Restless };
            }
            witness.counts[witness.pieces] = (counter, entry.count);
            witness.pieces += 1;
            let Some(part) = range.intersection(Extent::new(piece * PIECE, PIECE)) else { continue };
            let first = in_piece(part.offset);
            let blocks = first..first + in_transfer(part.len);
            if blocks.end > usize::from(entry.blocks) {
                return Found::Elsewhere;
            }
            for code in &self.codes[at * PIECE_BLOCKS..][blocks] {
                if *all.get_or_insert(*code) != *code {
                    return Found::Elsewhere;
                }
            }
        }
        match all.and_then(Place::of_code) {
            None | Some(Place::Asked) => Found::Elsewhere,
            Some(place) => Found::Here(place, witness),
        }
    }

    /// Keeps what a grant has told of a piece, in place of what its entry had.
    pub fn keep(&mut self, grant: u32, piece: u64, told: &Places) {
        let Some(key) = Self::key(grant, piece) else { return };
        let at = self.place(key);
        let blocks = told.blocks();
        self.codes[at * PIECE_BLOCKS..][..blocks.len()].copy_from_slice(blocks);
        let blocks = u16::try_from(blocks.len()).unwrap_or(0);
        self.entries[at] = Entry { key, rival: Key::default(), count: told.count, stood: told.count, blocks };
    }
}

/// Number of the block of a byte within its piece.
const fn in_piece(offset: u64) -> usize {
    (offset % PIECE / BLOCK) as usize
}

/// Blocks of so many bytes within a piece.
const fn in_transfer(len: u64) -> usize {
    (len / BLOCK) as usize
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Default)]
    struct Counts {
        over: Cell<bool>,
        raised: RefCell<BTreeMap<usize, u64>>,
    }

    impl Counts {
        fn raise(&self, piece: u64) {
            *self.raised.borrow_mut().entry(counter_of(piece)).or_default() += 1;
        }
    }

    impl Watch for Counts {
        fn is_over(&self) -> bool {
            self.over.get()
        }

        fn count(&self, counter: usize) -> u64 {
            self.raised.borrow().get(&counter).copied().unwrap_or(0)
        }
    }

    fn told(count: u64, parts: &[(usize, Place)]) -> Places {
        let mut places = Places::new(count);
        parts.iter().for_each(|(blocks, place)| places.push(*blocks, *place));
        places
    }

    fn blocks(first: u64, count: u64) -> Extent {
        Extent::new(first * BLOCK, count * BLOCK)
    }

    fn place(found: Found) -> Option<Place> {
        match found {
            Found::Here(place, _) => Some(place),
            _ => None,
        }
    }

    #[test]
    fn what_lies_in_one_place_is_found_and_nothing_else() {
        let (mut known, counts) = (PlaceCache::of(64), Counts::default());
        assert_eq!(known.find(1, blocks(0, 1), &counts), Found::Unknown(0));
        known.keep(1, 0, &told(0, &[(100, Place::Zero), (56, Place::File(3)), (100, Place::Asked)]));
        known.keep(1, 1, &told(0, &[(10, Place::Asked), (90, Place::File(0))]));
        assert_eq!(place(known.find(1, blocks(0, 100), &counts)), Some(Place::Zero));
        assert_eq!(place(known.find(1, blocks(100, 56), &counts)), Some(Place::File(3)));
        for range in [blocks(99, 2), blocks(155, 2), blocks(200, 1), blocks(255, 2), blocks(250, 100)] {
            assert_eq!(known.find(1, range, &counts), Found::Elsewhere, "{range:?}");
        }
        // A volume may end within a piece.
        assert_eq!(place(known.find(1, blocks(266, 90), &counts)), Some(Place::File(0)));
        assert_eq!(known.find(1, blocks(266, 91), &counts), Found::Elsewhere);
        // Another grant has told nothing.
        assert!(matches!(known.find(2, blocks(0, 1), &counts), Found::Unknown(0) | Found::Restless));
    }

    #[test]
    fn across_two_pieces_both_have_to_hold() {
        let (mut known, counts) = (PlaceCache::of(64), Counts::default());
        for piece in 0..2 {
            known.keep(1, piece, &told(0, &[(256, Place::File(1))]));
        }
        let range = blocks(200, 100);
        let Found::Here(Place::File(1), witness) = known.find(1, range, &counts) else {
            panic!("it is there")
        };
        assert!(witness.holds(&counts));
        counts.raise(1);
        assert!(!witness.holds(&counts));
        assert_eq!(known.find(1, range, &counts), Found::Restless);
        counts.raise(1);
        assert_eq!(known.find(1, range, &counts), Found::Restless, "blocks move there");
        assert_eq!(known.find(1, range, &counts), Found::Unknown(1));
        assert_eq!(place(known.find(1, blocks(200, 56), &counts)), Some(Place::File(1)));
        counts.raise(0);
        assert_eq!(known.find(1, range, &counts), Found::Restless);
        assert_eq!(known.find(1, range, &counts), Found::Unknown(0));
        // Three pieces are more than a read has.
        assert_eq!(known.find(1, blocks(255, 258), &Counts::default()), Found::Elsewhere);
    }

    #[test]
    fn nothing_holds_any_more_when_the_grant_is_over() {
        let (mut known, counts) = (PlaceCache::of(64), Counts::default());
        known.keep(1, 0, &told(0, &[(256, Place::Zero)]));
        let Found::Here(_, witness) = known.find(1, blocks(0, 1), &counts) else { panic!("it is there") };
        counts.over.set(true);
        assert!(!witness.holds(&counts));
    }

    /// Places that were told before a change, and come after it.
    #[test]
    fn what_is_old_when_it_comes_is_of_no_use() {
        let (mut known, counts) = (PlaceCache::of(64), Counts::default());
        let before = told(0, &[(256, Place::File(0))]);
        counts.raise(0);
        known.keep(1, 0, &before);
        assert_eq!(known.find(1, blocks(0, 1), &counts), Found::Restless);
        assert_eq!(known.find(1, blocks(0, 1), &counts), Found::Unknown(0));
    }

    #[test]
    fn a_piece_gives_way_to_one_that_is_asked_for_twice() {
        let (mut known, counts) = (PlaceCache::of(64), Counts::default());
        known.keep(1, 0, &told(0, &[(256, Place::Zero)]));
        let (one, other) = (blocks(64 * 256, 1), blocks(128 * 256, 1));
        for _ in 0..4 {
            assert_eq!(known.find(1, one, &counts), Found::Restless);
            assert_eq!(known.find(1, other, &counts), Found::Restless);
        }
        assert_eq!(known.find(1, other, &counts), Found::Unknown(128));
        known.keep(1, 128, &told(0, &[(256, Place::Zero)]));
        assert_eq!(place(known.find(1, other, &counts)), Some(Place::Zero));
        assert_eq!(known.find(1, blocks(0, 1), &counts), Found::Restless);
    }
}
