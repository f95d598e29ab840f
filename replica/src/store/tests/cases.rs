//! Single stories that chance does not find often enough.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use lh_block::{BLOCK, Extent, Instance};
use lh_ring::{Falloc, sys::fallocate};
use lh_wire::{BlockState, LayerInfo, MapPage};

use super::super::chain::Committed;
use super::super::data::{Answer, Source};
use super::super::disk;
use super::super::load::unwritten;
use super::super::offline::SnapshotView;
use super::super::{error::OpenError, fs::Fs, open};
use super::tape::Tape;
use super::volume::{OPTIONS, SIZE, Volume, extent, revert_op, snapshot_op, temporary};

fn meta(volume: &Volume) -> String {
    fs::read_to_string(volume.path().join("volume.meta")).unwrap()
}

#[test]
fn volume_meta_says_what_is_in_force() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    assert!(meta(&volume).contains("\"Dirty\":false"));
    volume.write(extent(0, 4), 1);
    assert!(meta(&volume).contains("\"Dirty\":true,\"Rebuilding\":false"));
    volume.snapshot(1, "one").unwrap();
    // What changes between `prepare` and `commit` is not undone by the switch.
    volume.directory.prepare(Instance(2), &snapshot_op("two")).unwrap();
    volume.zero(extent(0, 1));
    assert!(meta(&volume).contains("\"Rebuilding\":true"));
    volume.commit(2).unwrap();
    assert!(meta(&volume).contains("\"Rebuilding\":true") && meta(&volume).contains("volume-snap-two.img"));
    let path = volume.close();
    let mut volume = Volume::open(&path).unwrap();
    assert!(meta(&volume).contains("\"Dirty\":false,\"Rebuilding\":true"));
    // Once no mark is left, a clean close says so.
    volume.put("two", 0, &[(BlockState::Data, 5)]);
    let path = volume.close();
    let volume = Volume::open(&path).unwrap();
    assert!(meta(&volume).contains("\"Dirty\":false,\"Rebuilding\":false"));
    assert_eq!(volume.blocks()[..4], [5, 1, 1, 1]);
}

/// The judge of the format reads a directory of ours without `engine/` as Longhorn does.
#[test]
fn a_snapshot_is_written_as_longhorn_writes_it() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 1), 1);
    volume.snapshot(1, "one").unwrap();
    let read = |name: &str| fs::read_to_string(volume.path().join(name)).unwrap();
    assert_eq!(
        read("volume-snap-one.img.meta"),
        "{\"Name\":\"volume-head-000.img\",\"Parent\":\"\",\"Removed\":false,\"UserCreated\":true,\
         \"Created\":\"2026-11-20T06:03:39Z\",\"Labels\":{\"note\":\"a \\u0026 b\"}}\n"
    );
    assert_eq!(
        read("volume-head-001.img.meta"),
        "{\"Name\":\"volume-head-001.img\",\"Parent\":\"volume-snap-one.img\",\"Removed\":false,\
         \"UserCreated\":false,\"Created\":\"2026-11-20T06:03:39Z\",\"Labels\":null}\n"
    );
    assert_eq!(
        read("volume.meta"),
        format!(
            "{{\"Size\":{SIZE},\"Head\":\"volume-head-001.img\",\"Dirty\":true,\"Rebuilding\":false,\"Error\":\"\",\
             \"Parent\":\"volume-snap-one.img\",\"SectorSize\":512,\"BackingFilePath\":\"\",\"Encrypted\":false}}\n"
        )
    );
}

/// Marks that wait for their hole go on waiting in a directory that was closed cleanly and not used since: a punch would
/// change the layer, and it would look as if somebody else had been there.
#[test]
fn a_clean_directory_is_not_touched_before_its_use() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 8), 2);
    volume.zero(extent(0, 4));
    let path = volume.close();
    let mut volume = Volume::open(&path).unwrap();
    assert!(!volume.store.wants_flush());
    volume.flush();
    assert!(!volume.punch());
    drop(volume);
    let mut volume = Volume::open(&path).unwrap();
    assert!(!volume.directory.state().imported && volume.directory.state().clean);
    volume.write(extent(9, 1), 3);
    assert!(volume.store.wants_flush());
    volume.flush();
    assert!(volume.punch() && !volume.punch());
    assert_eq!(volume.blocks()[..10], [0, 0, 0, 0, 2, 2, 2, 2, 0, 3]);
    assert_eq!(volume.directory.state().chain[1].allocated, 5 * BLOCK);
}

/// A mark that newer data has overruled, but that is still in the file, does not come back over a mere hole.
#[test]
fn zeroed_written_and_zeroed_again() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 2), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 2), 2);
    volume.zero(extent(0, 2));
    volume.flush();
    while volume.punch() {}
    volume.flush();
    volume.write(extent(0, 2), 3);
    // Nothing lies below any more.
    volume.put("one", 0, &[(BlockState::Absent, 0); 2]);
    volume.zero(extent(0, 1));
    assert_eq!(volume.layer("")[..2], [(BlockState::Zero, 0), (BlockState::Data, 3)]);
    drop(volume);
    let volume = Volume::open(&path).unwrap();
    assert_eq!(volume.layer("")[..2], [(BlockState::Zero, 0), (BlockState::Data, 3)]);
}

/// Marks of an earlier life say nothing once Longhorn has made the replica whole again.
#[test]
fn marks_of_an_earlier_life() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    volume.zero(extent(0, 2));
    volume.flush();
    let fence = (lh_block::Generation::from(77), Instance(7));
    volume.directory.store_fence(fence.0, fence.1).unwrap();
    let text = meta(&volume).replace("\"Rebuilding\":true", "\"Rebuilding\":false");
    drop(volume);
    fs::remove_file(path.join("volume.meta")).unwrap();
    fs::write(path.join("volume.meta"), text).unwrap();
    let volume = Volume::open(&path).unwrap();
    assert!(volume.directory.state().imported && !volume.store.has_zero_marks());
    assert_eq!(volume.blocks()[..4], [1, 1, 1, 1]);
    assert_eq!(volume.directory.fence(), fence, "a fence holds for ever");
}

/// A head that has its name, and what was written to it, count for nothing before the switch, even if its attribute takes a block.
#[test]
fn what_had_its_name_before_the_switch_is_made_anew() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 4), 1);
    volume.directory.prepare(Instance(2), &snapshot_op("two")).unwrap();
    drop(volume);
    let moved = path.join("volume-head-001.img");
    fs::OpenOptions::new().write(true).open(&moved).unwrap().write_all_at(&[1], 0).unwrap();
    let mut volume = Volume::open(&path).unwrap();
    assert!(!moved.exists());
    volume.commit(2).unwrap();
    assert!(moved.exists());
    assert_eq!(volume.blocks()[..4], [1, 1, 1, 1]);
    assert_eq!(volume.layer("")[0], (BlockState::Absent, 0));
}

/// A process that is about to end holds its locks until its last writes have ended: the next one waits.
#[test]
fn opening_waits_for_a_dying_process() {
    let place = temporary();
    let path = place.path().join("r");
    let volume = Volume::create(&path);
    // As if its last write were in flight: one layer's descriptor lives on, everything else is gone.
    let last = std::sync::Arc::clone(volume.store.layer_file(volume.store.head()));
    drop(volume);
    match Volume::open(&path) {
        Err(OpenError::InUse { file, .. }) => assert!(file.ends_with("volume-head-000.img")),
        other => panic!("{other:?}"),
    }
    let waiting = std::thread::spawn(move || {
        let options = super::super::OpenOptions { lock_wait: std::time::Duration::from_secs(20) };
        open::open(&path, &options, Fs::default()).map(drop)
    });
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(!waiting.is_finished());
    drop(last);
    waiting.join().unwrap().unwrap();
    assert!(OPTIONS.lock_wait.as_secs() < 1);
}

/// A file that is larger than the index's chunks, with its parts in several layers, and a plan that does not begin at a
/// block.
#[test]
fn plans_follow_the_layers() {
    let place = temporary();
    let mut volume = Volume::create_sized(&place.path().join("r"), 64 << 20);
    volume.write(Extent::new(0, 40 << 20), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(Extent::new((16 << 20) - BLOCK, 2 * BLOCK), 2);
    let mut pieces = Vec::new();
    volume.store.plan_read(Extent::new(512, (64 << 20) - 1024), &mut pieces);
    let told: Vec<_> = pieces.iter().map(|p| (p.extent.offset, p.extent.end(), p.source)).collect();
    let (head, one) = (volume.store.head(), volume.store.layer("one").unwrap());
    assert_eq!(
        told,
        [
            (512, (16 << 20) - BLOCK, Source::Layer(one)),
            ((16 << 20) - BLOCK, (16 << 20) + BLOCK, Source::Layer(head)),
            ((16 << 20) + BLOCK, 40 << 20, Source::Layer(one)),
            (40 << 20, (64 << 20) - 512, Source::Zero),
        ]
    );
    // Where nothing lies below, a hole will do; where there is nothing at all, nothing is done.
    let plan =
        volume.store.plan_zero(Extent::new(39 << 20, 2 << 20), false, &mut |_, _, _| Vec::new()).unwrap();
    assert_eq!((plan.punch.len(), plan.marks), (0, vec![Extent::new(39 << 20, 1 << 20)]));
    assert!(plan.needs_mark);
    volume.write(Extent::new(50 << 20, 1 << 20), 3);
    let plan =
        volume.store.plan_zero(Extent::new(48 << 20, 8 << 20), false, &mut |_, _, _| Vec::new()).unwrap();
    assert_eq!(
        (plan.punch, plan.marks.len(), plan.needs_mark),
        (vec![Extent::new(50 << 20, 1 << 20)], 0, false)
    );
}

/// A write without space goes on below a mark, and its block counts as a hole all the same: what lies behind may have been changed.
#[test]
fn how_far_a_write_without_space_has_come_is_not_known_where_there_are_marks() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 2), 2);
    volume.write(extent(3, 1), 2);
    assert_eq!(volume.store.head_holds_first(extent(0, 4)), Some(extent(0, 2)));
    assert_eq!(volume.store.head_holds_first(extent(0, 2)), Some(extent(0, 2)));
    assert_eq!(volume.store.head_holds_first(extent(2, 2)), Some(extent(2, 0)));
    volume.zero(extent(1, 1));
    assert_eq!(volume.store.head_holds_first(extent(0, 4)), None);
    assert_eq!(volume.store.head_holds_first(extent(2, 2)), Some(extent(2, 0)));
}

/// A punch in flight keeps writes away; a write that has begun keeps punches away.
#[test]
fn punches_and_writes_keep_apart() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 4), 2);
    volume.zero(extent(0, 4));
    volume.flush();
    let head = volume.store.head();
    assert!(volume.store.begin_write(head, extent(0, 1)));
    let (layer, hole) = volume.store.take_punch().unwrap();
    assert_eq!((layer, hole), (head, extent(1, 3)), "the write's block is left alone");
    assert!(!volume.store.begin_write(head, extent(3, 2)));
    assert!(volume.store.begin_write(head, extent(4, 2)));
    volume.store.punched(layer, hole, true);
    assert!(volume.store.begin_write(head, extent(3, 2)));
    // A write over a mark that is not armed is answered after a flush.
    assert_eq!(volume.store.wrote(extent(0, 1)), Answer::AfterFlush);
    volume.flush();
    assert_eq!(volume.store.wrote(extent(0, 1)), Answer::Now);
}

/// The flush that makes a mark durable may have begun before a write over it: its end gives no leave to punch. A write that has failed
/// is out of the way.
#[test]
fn a_mark_that_a_flush_has_under_way_gives_way_to_a_write() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 1), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 1), 2);
    volume.zero(extent(0, 1));
    let flush = volume.store.begin_flush();
    assert_eq!(volume.store.flush_data_done(&flush).unwrap().len(), 1);
    let head = volume.store.head();
    assert!(volume.store.begin_write(head, extent(0, 1)));
    volume.store.end_flush(flush);
    assert!(volume.store.take_punch().is_none());
    volume.store.refresh(head, extent(0, 1)).unwrap();
    volume.flush();
    assert!(volume.punch());
    assert_eq!(volume.blocks()[0], 0);
}

/// What a rebuild has begun and not ended is no volume, also when it is closed cleanly.
#[test]
fn a_close_amid_a_rebuild_leaves_the_word_for_it() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    let parts = volume.directory.begin_rebuild(SIZE, &[LayerInfo::default()]).unwrap();
    drop(volume.store.replace(parts));
    let path = volume.close();
    let meta = fs::read_to_string(path.join("volume.meta")).unwrap();
    assert!(meta.contains("\"Dirty\":false,\"Rebuilding\":true"), "{meta}");
}

/// A page that is full says where the next one begins.
#[test]
fn a_map_of_more_than_a_page_tells_all() {
    let place = temporary();
    let ranges = MapPage::RANGES_MAX as u64 + 3;
    let volume = Volume::create_sized(&place.path().join("r"), 2 * ranges * BLOCK);
    let head = volume.store.head();
    let file = disk::reopen(volume.store.layer_file(head)).unwrap();
    (0..ranges).for_each(|n| file.write_all_at(&[1; 4096], 2 * n * BLOCK).unwrap());
    file.sync_data().unwrap();
    let (mut told, mut at) = (Vec::new(), Some(0));
    while let Some(from) = at {
        let page = volume.store.layer_map(head, from).unwrap();
        told.extend(page.ranges);
        at = page.next;
    }
    assert_eq!(told, (0..ranges).map(|n| extent(2 * n, 1)).collect::<Vec<_>>());
}

/// A write that failed in the middle: the index says what the files say.
#[test]
fn a_failed_write_is_looked_at() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    volume.zero(extent(3, 1));
    let head = volume.store.head();
    assert!(volume.store.begin_write(head, extent(0, 4)));
    let file = super::super::disk::reopen(volume.store.layer_file(head)).unwrap();
    file.write_all_at(&vec![2; 4096], 0).unwrap();
    file.write_all_at(&vec![2; 4096], 3 * BLOCK).unwrap();
    file.sync_all().unwrap();
    volume.store.refresh(head, extent(0, 4)).unwrap();
    assert_eq!(volume.blocks()[..5], [2, 1, 1, 0, 0], "the mark is still in force");
}

/// A full disk may take a part of a write over zeroes whose hole is durable. There the file counts: for this process as for the
/// next one, which sees no more of it than what the file holds.
#[test]
fn a_failed_write_over_armed_marks_reads_the_same_when_opened_anew() {
    let place = temporary();
    let path = place.path().join("r");
    for snapshot in [false, true] {
        let _ = fs::remove_dir_all(&path);
        let mut volume = Volume::create(&path);
        volume.write(extent(0, 4), 1);
        volume.snapshot(1, "one").unwrap();
        volume.write(extent(0, 4), 2);
        volume.zero(extent(0, 4));
        volume.flush();
        assert!(volume.punch());
        volume.flush();
        assert!(!volume.store.wants_flush(), "the marks are armed");
        if snapshot {
            volume.snapshot(2, "two").unwrap();
            // Of another branch.
            volume.carry_out(3, &revert_op("one")).unwrap();
        }
        let layer = volume.store.layer(if snapshot { "two" } else { "" }).unwrap();
        assert!(volume.store.begin_write(layer, extent(0, 4)));
        let file = super::super::disk::reopen(volume.store.layer_file(layer)).unwrap();
        file.write_all_at(&vec![3; 4096], 0).unwrap();
        file.sync_all().unwrap();
        volume.store.refresh(layer, extent(0, 4)).unwrap();
        assert_eq!(volume.store.head_holds_any(extent(0, 4)), !snapshot, "a part is done");
        let name = if snapshot { "two" } else { "" };
        let (now, held) = (volume.blocks(), volume.layer(name));
        assert_eq!(held[..2], [(BlockState::Data, 3), (BlockState::Zero, 0)]);
        assert!(volume.store.wants_flush(), "the mark is to go");
        drop(volume);
        let mut volume = Volume::open(&path).unwrap();
        assert_eq!((volume.blocks(), volume.layer(name)), (now.clone(), held.clone()));
        volume.flush();
        drop(volume);
        let volume = Volume::open(&path).unwrap();
        assert_eq!((volume.blocks(), volume.layer(name)), (now, held));
    }
}

/// A flush after a snapshot covers what was written before it, in the former head.
#[test]
fn a_former_head_is_flushed() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.flush();
    volume.write(extent(0, 1), 1);
    volume.directory.prepare(Instance(1), &snapshot_op("one")).unwrap();
    let Committed::Head(head) = volume.directory.commit(Instance(1)).unwrap() else { panic!("no head") };
    volume.store.switch_head(*head);
    let flush = volume.store.begin_flush();
    assert_eq!(flush.data(), [volume.store.layer("one").unwrap()]);
    assert!(volume.store.flush_data_done(&flush).unwrap().is_empty());
    volume.store.end_flush(flush);
    assert!(volume.store.begin_flush().data().is_empty());
}

/// What was written into the head, and the hole that takes its place where nothing lies below: no snapshot follows, which would have the
/// file synced, too.
#[test]
fn a_flush_syncs_the_head_after_a_write_and_after_a_hole() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    let head = [volume.store.head()];
    volume.flush();
    volume.write(extent(0, 2), 1);
    let flush = volume.store.begin_flush();
    assert_eq!(flush.data(), head);
    assert!(volume.store.flush_data_done(&flush).unwrap().is_empty());
    volume.store.end_flush(flush);
    volume.zero(extent(0, 1));
    assert_eq!(volume.store.begin_flush().data(), head);
}

/// A hole is on stable storage before its mark says that what the file holds counts; and so is an image before it is told to be.
#[test]
fn a_flush_syncs_the_file_after_a_punch_and_after_an_image() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 1), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 1), 2);
    volume.zero(extent(0, 1));
    volume.flush();
    assert!(volume.punch());
    let flush = volume.store.begin_flush();
    assert_eq!(flush.data(), [volume.store.head()]);
    assert!(!volume.store.flush_data_done(&flush).unwrap().is_empty(), "the mark is armed");
    volume.store.end_flush(flush);
    volume.put("one", 0, &[(BlockState::Data, 3)]);
    assert_eq!(volume.store.begin_flush().data(), [volume.store.layer("one").unwrap()]);
}

/// What a fold has copied is synced before the names change, in whichever file it is.
#[test]
fn a_flush_syncs_the_file_that_a_fold_has_copied_into() {
    for (below, above, target) in [(2, 8, "two"), (8, 2, "one")] {
        let place = temporary();
        let mut volume = Volume::create(&place.path().join("r"));
        volume.write(extent(0, below), 1);
        volume.snapshot(1, "one").unwrap();
        volume.write(extent(20, above), 2);
        volume.snapshot(2, "two").unwrap();
        volume.remove(3, "one").unwrap();
        volume.flush();
        let (target, mut copied) = (volume.store.layer(target).unwrap(), 0);
        let mut fold = volume.begin_fold("one").unwrap();
        while copied == 0 && volume.fold_step(&mut fold).unwrap() {
            copied = fold.moved().0 + fold.moved().1;
        }
        assert!(copied > 0);
        assert_eq!(volume.store.begin_flush().data(), [target]);
    }
}

/// Into the base zeroes are folded as holes.
#[test]
fn a_flush_syncs_the_file_that_a_fold_has_made_holes_in() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.zero(extent(2, 2));
    volume.snapshot(2, "two").unwrap();
    volume.remove(3, "one").unwrap();
    volume.flush();
    let target = volume.store.layer("one").unwrap();
    let mut fold = volume.begin_fold("one").unwrap();
    while volume.store.layer_states(target, extent(2, 1)).unwrap() == [BlockState::Data] {
        assert!(volume.fold_step(&mut fold).unwrap());
    }
    assert_eq!(volume.store.begin_flush().data(), [target]);
}

/// What a process that was killed had answered and not synced, in whatever layer, the first flush of the next one covers.
#[test]
fn the_first_flush_covers_what_a_killed_process_has_left() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 1), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 1), 2);
    drop(volume);
    let mut volume = Volume::open(&path).unwrap();
    let flush = volume.store.begin_flush();
    assert_eq!(flush.data(), ["one", ""].map(|name| volume.store.layer(name).unwrap()));
}

/// What a power cut leaves of writes that were never flushed goes when the directory is opened, from layers of other branches, too:
/// another program would take it for zeroes.
#[test]
fn space_that_was_never_written_goes_when_the_directory_is_opened() {
    // On a disk: tmpfs tells nothing of it.
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 4), 2);
    volume.snapshot(2, "two").unwrap();
    volume.carry_out(3, &revert_op("one")).unwrap();
    let never = |volume: &Volume| {
        let layers = ["one", "two", ""].map(|name| volume.store.layer(name).unwrap());
        layers.map(|no| unwritten(volume.store.layer_file(no), SIZE).unwrap())
    };
    for name in ["one", "two", ""] {
        let file = volume.store.layer_file(volume.store.layer(name).unwrap());
        fallocate(file, Falloc::AllocateKeepSize, 8 * BLOCK, 4 * BLOCK).unwrap();
    }
    if never(&volume).iter().any(Vec::is_empty) {
        println!("SKIP space_that_was_never_written_goes_when_the_directory_is_opened: none is told here");
        return;
    }
    drop(volume);
    let volume = Volume::open(&path).unwrap();
    assert_eq!(never(&volume), [const { Vec::new() }; 3]);
    assert_eq!(volume.blocks()[..12], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
}

/// A process marks a chunk and is killed before the mark is synced. The next one finds it in the page cache and takes it for
/// durable: no write into the chunk waits for it any more.
#[test]
fn a_mark_that_a_killed_process_has_left_in_the_page_cache_survives_a_power_cut() {
    let place = temporary();
    let path = Volume::create(&place.path().join("r")).close();
    let tape = Arc::new(Tape::default());
    let mut volume = Volume::open_taped(&path, &tape).unwrap();
    volume.directory.begin_use().unwrap();
    tape.overwrites(&path.join("engine/intent"));
    volume.store.intent_mark(extent(0, 1));
    let begun = volume.store.intent_begin().unwrap();
    let file = volume.store.intent_file();
    begun.pages().iter().for_each(|(offset, page)| file.write_all_at(page, *offset).unwrap());
    drop(volume);
    let found = Volume::open_taped(&path, &tape).unwrap().store.intent();
    assert_eq!(found, [extent(0, 64)]);
    tape.lose_unsynced();
    assert_eq!(Volume::open(&path).unwrap().store.intent(), found);
}

/// The file of trails is there only while somebody is out. Who has trails to save all the same has come too late, and no disk
/// has failed.
#[test]
fn trails_of_nobody_are_not_saved() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    let epoch = |counter: u64, members: &[&str]| lh_block::Epoch {
        generation: lh_block::Generation::from(1),
        counter,
        members: members.iter().map(|m| (*m).to_owned()).collect(),
        id: Instance(counter.into()),
        after: None,
        round: None,
    };
    let all = epoch(1, &["1", "2", "3"]);
    let outsider = |name: &str| lh_wire::Outsider { replica: name.into(), base: all.clone() };
    let directory = &mut volume.directory;
    assert!(directory.store_epoch_and_outsiders(epoch(2, &["1", "2"]), vec![outsider("3")]).unwrap());
    directory.store_missed(&[(0, [1; 16])]).unwrap();
    assert!(directory.store_epoch_and_outsiders(epoch(3, &["1", "2", "3"]), Vec::new()).unwrap());
    directory.store_missed(&[(1, [2; 16])]).unwrap();
    assert_eq!(directory.missed().unwrap().trails, []);
    // And they are nobody's who leaves later.
    assert!(directory.store_epoch_and_outsiders(epoch(4, &["1", "3"]), vec![outsider("2")]).unwrap());
    assert_eq!(directory.missed().unwrap().trails, []);
    directory.store_missed(&[(2, [3; 16])]).unwrap();
    assert_eq!(directory.missed().unwrap().trails, [(2, [3; 16])]);
}

/// The file of trails was lost, or what is in it does not fit: nothing is known of who is out, and who leaves next gets a new one.
#[test]
fn trails_that_were_lost_are_begun_anew() {
    type Damage = fn(&std::path::Path);
    let damages: [Damage; 3] = [
        |file| fs::remove_file(file).unwrap(),
        |file| fs::write(file, "").unwrap(),
        |file| fs::write(file, [7; 512]).unwrap(),
    ];
    for damage in damages {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = Volume::create(&path);
        let epoch = |counter: u64, members: &[&str]| lh_block::Epoch {
            generation: lh_block::Generation::from(1),
            counter,
            members: members.iter().map(|m| (*m).to_owned()).collect(),
            id: Instance(counter.into()),
            after: None,
            round: None,
        };
        let out = |name: &str, base: lh_block::Epoch| vec![lh_wire::Outsider { replica: name.into(), base }];
        let first = epoch(2, &["1", "2"]);
        let three = out("3", epoch(1, &["1", "2", "3"]));
        assert!(volume.directory.store_epoch_and_outsiders(first.clone(), three).unwrap());
        volume.directory.store_missed(&[(0, [1; 16])]).unwrap();
        drop(volume);
        damage(&path.join("engine/missed"));
        let mut volume = Volume::open(&path).unwrap();
        assert_eq!(volume.directory.missed().unwrap(), Default::default());
        assert_eq!(volume.directory.epoch(), Some(&first));
        let two = out("2", first);
        assert!(volume.directory.store_epoch_and_outsiders(epoch(3, &["1"]), two.clone()).unwrap());
        volume.directory.store_missed(&[(1, [2; 16])]).unwrap();
        drop(volume);
        let missed = Volume::open(&path).unwrap().directory.missed().unwrap();
        assert_eq!((missed.out, missed.trails), (two, vec![(1, [2; 16])]));
    }
}

/// Whoever replaces the layers gets the last descriptors of those that are gone, to close them where that may take long.
#[test]
fn layers_that_are_replaced_are_closed_by_who_asked() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(2, 2), 2);
    let head = [lh_wire::LayerInfo::default()];
    let parts = volume.directory.begin_rebuild(SIZE, &head).unwrap();
    let before = volume.store.replace(parts);
    assert_eq!(before.len(), 2);
    for file in before {
        assert_eq!((file.metadata().unwrap().nlink(), Arc::strong_count(&file)), (0, 1));
    }
}

/// While layers come, every zero gets a mark; when all have come, those over nothing are taken away.
#[test]
fn a_rebuild_leaves_no_mark_over_nothing() {
    let (place, elsewhere) = (temporary(), temporary());
    let mut source = Volume::create(&elsewhere.path().join("s"));
    source.write(extent(0, 1), 1);
    source.snapshot(1, "one").unwrap();
    let mut target = Volume::create(&place.path().join("r"));
    let parts = target.directory.begin_rebuild(SIZE, &source.directory.state().chain).unwrap();
    target.store.replace(parts);
    target.zero(extent(0, 2));
    assert_eq!(
        target.layer("")[..3],
        [(BlockState::Zero, 0), (BlockState::Zero, 0), (BlockState::Absent, 0)]
    );
    target.put("one", 0, &source.layer("one"));
    target.end_rebuild();
    assert_eq!(
        target.layer("")[..3],
        [(BlockState::Zero, 0), (BlockState::Absent, 0), (BlockState::Absent, 0)]
    );
    assert_eq!(target.blocks()[..3], [0, 0, 0]);
    assert!(meta(&target).contains("\"Rebuilding\":true"), "a mark is left");
}

/// Somebody waits meanwhile: it goes on where it was, whatever is written in between. Of marks that are looked at together each stays or
/// goes by what is below it.
#[test]
fn the_end_of_a_rebuild_goes_on_where_it_was() {
    let (place, elsewhere) = (temporary(), temporary());
    let mut source = Volume::create(&elsewhere.path().join("s"));
    source.write(extent(1, 1), 1);
    source.write(extent(4, 2), 1);
    source.snapshot(1, "one").unwrap();
    source.zero(extent(4, 1));
    source.snapshot(2, "two").unwrap();
    let mut target = Volume::create(&place.path().join("r"));
    let large = 16 << 20;
    let parts = target.directory.begin_rebuild(large, &source.directory.state().chain).unwrap();
    target.store.replace(parts);
    [0, 1, 3, 4, 5, 1500, 3000, 3002].into_iter().for_each(|at| target.zero(extent(at, 1)));
    ["one", "two"].into_iter().for_each(|layer| target.put(layer, 0, &source.layer(layer)));
    let (mut at, mut stops) = (Some(0), Vec::new());
    while let Some(from) = at {
        at = target.store.end_rebuild(from, &mut |_, _, _| Vec::new(), || true).unwrap();
        stops.extend(at);
        if stops.len() == 1 {
            target.write(extent(1500, 1), 7);
        }
    }
    assert_eq!(stops, [1024], "there is no other mark any more before the last ones");
    target.flush();
    target.directory.end_rebuild().unwrap();
    let states = target.layer("");
    let kept: Vec<_> = (0..states.len()).filter(|block| states[*block].0 != BlockState::Absent).collect();
    assert_eq!(kept, [1, 5, 1500], "what the second snapshot has zeroed is hidden already");
    assert_eq!(states[1500], (BlockState::Data, 7));
}

/// A mark that hides what the layer's own file still holds stays, though nothing lies below.
#[test]
fn a_rebuild_leaves_the_marks_over_old_data() {
    let place = temporary();
    let path = place.path().join("r");
    let mut target = Volume::create(&path);
    target.snapshot(1, "one").unwrap();
    let parts = target.directory.begin_rebuild(SIZE, &target.directory.state().chain).unwrap();
    target.store.replace(parts);
    target.write(extent(0, 1), 1);
    target.zero(extent(0, 1));
    target.end_rebuild();
    assert_eq!(target.blocks()[0], 0);
    drop(target);
    assert_eq!(Volume::open(&path).unwrap().blocks()[0], 0);
}

#[test]
fn export_is_sparse_and_shows_progress() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create_sized(&path, 64 << 20);
    volume.write(Extent::new(8 << 20, 1 << 20), 1);
    volume.write(Extent::new(10 << 20, 1 << 20), 0);
    volume.snapshot(1, "one").unwrap();
    volume.zero(Extent::new(8 << 20, 4096));
    volume.close();
    let view = SnapshotView::open(&path, None).unwrap();
    let out =
        fs::File::options().read(true).write(true).create_new(true).open(place.path().join("out")).unwrap();
    let mut told = Vec::new();
    view.export(&out, &mut |done, all| told.push((done, all))).unwrap();
    assert!(told.windows(2).all(|pair| pair[0].0 <= pair[1].0) && told.last() == Some(&(64 << 20, 64 << 20)));
    let stat = out.metadata().unwrap();
    use std::os::unix::fs::MetadataExt;
    assert_eq!((stat.len(), stat.blocks() * 512), (64 << 20, (1 << 20) - 4096));
    assert!(view.read_at((64 << 20) - 1, &mut [0; 2]).is_err());
}

#[test]
fn halves_can_be_sent_to_other_threads() {
    fn is_send<T: Send>() {}
    is_send::<super::super::Store>();
    is_send::<super::super::Directory>();
    is_send::<super::super::Parts>();
    is_send::<super::super::NewHead>();
    is_send::<super::super::Closing>();
}
