//! Somebody who was granted the files and reads by what it was told of places: whatever has happened since, either it sees that
//! this does not count any more, or it reads what the volume holds.

use std::os::unix::fs::FileExt;

use lh_block::{BLOCK, Extent};
use lh_ring::Watched;
use lh_wire::{COUNTERS, PIECE, Place, Places, counter_of, pieces_of};

use super::super::disk;
use super::super::grant::Granted;
use super::volume::Volume;

/// See the module's documentation.
pub(super) struct Neighbour {
    watched: Watched,
    files: Vec<std::fs::File>,
    told: Vec<Places>,
}

impl Neighbour {
    /// Asks anew for files and for all places.
    pub(super) fn new(volume: &mut Volume) -> Self {
        let Granted { memory, files } = volume.store.grant().unwrap();
        // The locks stay with the descriptors that were granted.
        let files = files.iter().map(|file| disk::reopen(file).unwrap()).collect();
        let mut new = Self { watched: Watched::open(memory, COUNTERS).unwrap(), files, told: Vec::new() };
        new.look(volume);
        new
    }

    pub(super) fn is_over(&self) -> bool {
        self.watched.is_over()
    }

    /// Asks for all places.
    pub(super) fn look(&mut self, volume: &Volume) {
        let whole = Extent::new(0, volume.store.size());
        let parts = pieces_of(whole).filter_map(|n| whole.intersection(Extent::new(n * PIECE, PIECE)));
        self.told = parts.map(|part| volume.store.tell_places(part).expect("it holds")).collect();
    }

    /// Compares what is read with what each block holds; how many blocks were.
    pub(super) fn check(&self, held: &[u8]) -> usize {
        let mut read = 0;
        for (piece, told) in (0..).zip(&self.told) {
            if self.is_over() || self.watched.count(counter_of(piece)) != told.count {
                continue;
            }
            let first = piece * PIECE / BLOCK;
            for (block, code) in (first..).zip(told.blocks()) {
                let mut byte = [0];
                match Place::of_code(*code).unwrap() {
                    Place::Zero => {}
                    Place::File(n) => {
                        self.files[usize::from(n)].read_exact_at(&mut byte, block * BLOCK).unwrap();
                    }
                    Place::Asked => continue,
                }
                assert_eq!(
                    byte[0],
                    held[usize::try_from(block).unwrap()],
                    "block {block}, said to be {code}"
                );
                read += 1;
            }
        }
        read
    }
}

/// Each piece has a counter of its own, as long as they are few.
#[test]
fn a_change_concerns_the_pieces_that_it_touches() {
    use super::volume::{extent, temporary};
    let place = temporary();
    let mut volume = Volume::create_sized(&place.path().join("r"), 8 * PIECE);
    let blocks = PIECE / BLOCK;
    volume.write(extent(0, blocks), 1);
    let neighbour = Neighbour::new(&mut volume);
    let counts = |n: &Neighbour| (0..8).map(|piece| n.watched.count(piece)).collect::<Vec<_>>();
    // What stays where it is changes nothing.
    volume.write(extent(3, 20), 2);
    assert_eq!(counts(&neighbour), [0; 8]);
    volume.write(extent(3 * blocks - 1, 2), 3);
    assert_eq!(counts(&neighbour), [0, 0, 1, 1, 0, 0, 0, 0]);
    volume.zero(extent(5, 1));
    assert_eq!(counts(&neighbour), [1, 0, 1, 1, 0, 0, 0, 0]);
    volume.zero(extent(4 * blocks, 2 * blocks));
    assert_eq!(counts(&neighbour), [1, 0, 1, 1, 0, 0, 0, 0], "it was zero");
    assert!(!neighbour.is_over());
    volume.snapshot(1, "one").unwrap();
    assert!(neighbour.is_over());
}

/// What lies below is asked for: the files of so many layers are not granted.
#[test]
fn the_newest_files_are_granted() {
    use super::volume::{extent, temporary};
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    for n in 0..40_u8 {
        volume.write(extent(n.into(), 1), n + 1);
        volume.snapshot(n.into(), &format!("s{n}")).unwrap();
    }
    let neighbour = Neighbour::new(&mut volume);
    assert_eq!(neighbour.files.len(), lh_wire::FILES_MAX);
    let codes = neighbour.told[0].blocks();
    let asked = codes.iter().filter(|code| **code == Place::Asked.code()).count();
    // The head is one of them, and holds nothing.
    assert_eq!(asked, 40 - (lh_wire::FILES_MAX - 1));
    let held = volume.blocks();
    assert_eq!(neighbour.check(&held), held.len() - asked);
}
