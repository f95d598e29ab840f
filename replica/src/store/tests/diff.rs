//! What a diff does not name is the same; what it calls zero is zero.

use std::path::Path;

use lh_block::{BLOCK, Extent};

use super::super::diff::{Change, ChangeKind};
use super::super::offline::SnapshotView;
use super::volume::{SIZE, Volume, extent, revert_op, temporary};

fn view(path: &Path, snapshot: Option<&str>) -> SnapshotView {
    SnapshotView::open(path, snapshot).unwrap()
}

fn change(at: u64, blocks: u64, kind: ChangeKind) -> Change {
    Change { extent: extent(at, blocks), kind }
}

fn bytes(view: &SnapshotView) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    view.read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn by_who_holds_a_block() {
    use ChangeKind::{Data, Zero};
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.write(extent(2, 8), 1);
    volume.write(extent(20, 1), 2);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(9, 3), 3);
    volume.zero(extent(5, 2));
    volume.snapshot(2, "two").unwrap();
    volume.write(extent(5, 1), 1);
    volume.close();
    let (one, two, head) = (view(&path, Some("one")), view(&path, Some("two")), view(&path, None));
    let diff = |to: &SnapshotView, from| to.diff(from, 0).unwrap().collect::<Vec<_>>();
    assert_eq!(diff(&one, None), [change(2, 8, Data), change(20, 1, Data)]);
    assert_eq!(diff(&two, Some(&one)), [change(5, 2, Zero), change(9, 3, Data)]);
    assert_eq!(diff(&head, Some(&two)), [change(5, 1, Data)]);
    assert_eq!(diff(&head, Some(&one)), [change(5, 1, Data), change(6, 1, Zero), change(9, 3, Data)]);
    // Back in time.
    assert_eq!(diff(&one, Some(&two)), [change(5, 2, Data), change(9, 1, Data), change(10, 2, Zero)]);
    assert_eq!(diff(&two, Some(&two)), []);
    assert_eq!(diff(&head, None), [change(2, 4, Data), change(7, 5, Data), change(20, 1, Data)]);
    // From a place on, also from within a range.
    let rest: Vec<_> = head.diff(Some(&one), 10 * BLOCK + 7).unwrap().collect();
    assert_eq!(rest, [change(10, 2, Data)]);
    assert_eq!(head.diff(None, SIZE).unwrap().count(), 0);
}

/// Two branches have layers of the same height that are not the same.
#[test]
fn between_branches() {
    use ChangeKind::{Data, Zero};
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.write(extent(2, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(9, 3), 3);
    volume.zero(extent(5, 2));
    volume.snapshot(2, "two").unwrap();
    volume.carry_out(3, &revert_op("one")).unwrap();
    volume.write(extent(9, 1), 5);
    volume.snapshot(4, "three").unwrap();
    volume.close();
    let (two, three) = (view(&path, Some("two")), view(&path, Some("three")));
    assert_eq!(
        three.diff(Some(&two), 0).unwrap().collect::<Vec<_>>(),
        [change(5, 2, Data), change(9, 1, Data), change(10, 2, Zero)]
    );
}

#[test]
fn random_volumes() {
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for round in 0..12 {
        let place = temporary();
        let path = place.path().join("replica");
        let mut volume = Volume::create(&path);
        let mut names = vec![None];
        for step in 0..30_u8 {
            let at = random(60);
            let range = extent(at, 1 + random(64 - at));
            match random(6) {
                0 | 1 => volume.write(range, step + 1),
                2 => volume.write(extent(at, 1), step + 1),
                3 => volume.zero(range),
                4 => volume.zero(extent(at, 1)),
                _ => {
                    let name = format!("s{step}");
                    volume.snapshot(u128::from(step) + 1, &name).unwrap();
                    names.push(Some(name));
                }
            }
        }
        volume.close();
        let views: Vec<_> = names.iter().map(|name| view(&path, name.as_deref())).collect();
        for to in &views {
            for from in views.iter().map(Some).chain([None]) {
                let (now, then) = (bytes(to), from.map_or(vec![0; now_len()], bytes));
                let mut named = [None; 64];
                let mut end = 0;
                for change in to.diff(from, 0).unwrap() {
                    assert!(change.extent.offset >= end && !change.extent.is_empty(), "round {round}");
                    end = change.extent.end();
                    for block in change.extent.offset / BLOCK..end / BLOCK {
                        named[usize::try_from(block).unwrap()] = Some(change.kind);
                    }
                }
                for (n, (now, then)) in now.chunks(4096).zip(then.chunks(4096)).enumerate() {
                    match named[n] {
                        None => assert!(now == then, "round {round}: block {n} differs and is not named"),
                        Some(ChangeKind::Zero) => {
                            assert!(now.iter().all(|b| *b == 0), "round {round}: block {n}")
                        }
                        Some(ChangeKind::Data) => {}
                    }
                }
            }
        }
    }
}

fn now_len() -> usize {
    usize::try_from(SIZE).unwrap()
}

/// 10 TiB with a block here and there is no more work than its extents.
#[test]
fn a_large_empty_volume_costs_nothing() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let size = 10 << 40;
    let mut volume = Volume::create_sized(&path, size);
    volume.write(extent(2_000_000_000, 1), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(1 << 30, 2), 2);
    volume.close();
    let (one, head) = (view(&path, Some("one")), view(&path, None));
    let found: Vec<_> = head.diff(Some(&one), 0).unwrap().collect();
    assert_eq!(found, [Change { extent: Extent::new(BLOCK << 30, 2 * BLOCK), kind: ChangeKind::Data }]);
    assert_eq!(head.diff(None, 0).unwrap().count(), 2);
}
