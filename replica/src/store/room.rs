//! Space kept back for a disk that is full.
//!
//! A start makes a fence, an epoch and volume.meta durable, and the removal of a snapshot its meta: each is a small new file
//! that takes the place of another. Without a block for it a volume whose disks are full could neither be started again nor be
//! told to let go of anything. So `engine/room` takes 1 MiB and holds nothing. Who meets a full disk cuts a piece off it and
//! tries again; the file that was replaced gives its space back, and the piece is taken anew.
//!
//! Zeroes over a snapshot take marks before they give anything back. They may have half of the room, which is enough for the
//! marks of 8 GiB at least: what is then given back is the room's again at the next record.
//!
//! Nothing depends on the file: it need not be there, nor be as long as it should be, and it is never synced.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;

use lh_ring::{Falloc, sys};

use super::ENGINE;

/// Its name in `engine/`.
pub(super) const FILE: &str = "room";

/// How long it should be.
const SIZE: u64 = 1 << 20;

/// What is cut off at a time: most of the files that need room take one block.
const PIECE: u64 = 16 << 10;

/// The disk, or the share of it that somebody is allowed, is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Does something that needs a little space for `path`, which lies in the replica directory or in `engine/`; again with every
/// piece of the room if the disk is full. What is done in part must be done anew.
///
/// # Errors
/// Those of `what`.
pub(super) fn with<T>(path: &Path, what: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let parent = path.parent().unwrap_or(path);
    let engine = if parent.ends_with(ENGINE) { parent.to_owned() } else { parent.join(ENGINE) };
    with_room_above(0, &engine, what)
}

/// The same for marks of zeroes, of which there may be many. `engine` is the directory of that name.
///
/// # Errors
/// Those of `what`.
pub(super) fn with_half<T>(engine: &Path, what: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    with_room_above(SIZE / 2, engine, what)
}

fn with_room_above<T>(least: u64, engine: &Path, mut what: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match what() {
            Err(error) if is_full(&error) && give(engine, least) => {}
            done => return done,
        }
    }
}

/// Cuts a piece off. `false`: no more than that is left.
fn give(engine: &Path, least: u64) -> bool {
    let file = sys::open_plain(&engine.join(FILE), OpenOptions::new().write(true), libc::O_NOFOLLOW);
    file.is_ok_and(|file| {
        let length = file.metadata().map_or(0, |stat| stat.len());
        length > least && file.set_len(length.saturating_sub(PIECE)).is_ok()
    })
}

/// Takes what the room lacks, as far as there is space.
pub(super) fn keep(engine: &Path) {
    let path = engine.join(FILE);
    let length = path.symlink_metadata().map_or(0, |stat| stat.len());
    if length >= SIZE {
        return;
    }
    let options = &mut OpenOptions::new();
    let open = sys::open_plain(&path, options.write(true).create(true).truncate(false), libc::O_NOFOLLOW);
    let Ok(file) = open else { return };
    let mut at = length;
    while at < SIZE && sys::fallocate(&file, Falloc::Allocate, at, PIECE.min(SIZE - at)).is_ok() {
        at += PIECE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> io::Error {
        io::ErrorKind::StorageFull.into()
    }

    #[test]
    fn a_full_disk_is_tried_again_until_the_room_is_used_up() {
        let place = tempfile::tempdir().unwrap();
        let engine = place.path().join(ENGINE);
        std::fs::create_dir(&engine).unwrap();
        for path in [place.path().join("volume.meta"), engine.join("fence.new")] {
            keep(&engine);
            let length = || engine.join(FILE).metadata().unwrap().len();
            assert_eq!(length(), SIZE);
            let mut left = 3;
            let done = with(&path, || {
                left -= 1;
                if left > 0 { Err(full()) } else { Ok(length()) }
            });
            assert_eq!(done.unwrap(), SIZE - 2 * PIECE);
            assert_eq!(with(&path, || Err::<(), _>(full())).unwrap_err().kind(), io::ErrorKind::StorageFull);
            assert_eq!(length(), 0);
            assert!(with(&path, || Err::<(), _>(io::ErrorKind::NotFound.into())).is_err());
        }
        // Marks leave half of it to records.
        keep(&engine);
        assert!(with_half(&engine, || Err::<(), _>(full())).is_err());
        assert_eq!(engine.join(FILE).metadata().unwrap().len(), SIZE / 2);
        // Without it there is no other try.
        std::fs::remove_file(engine.join(FILE)).unwrap();
        let mut tries = 0;
        let quota = || -> io::Error { io::ErrorKind::QuotaExceeded.into() };
        assert!(
            with(&engine.join("fence.new"), || {
                tries += 1;
                Err::<(), _>(quota())
            })
            .is_err()
        );
        assert_eq!(tries, 1);
    }
}
