//! Where somebody has put a FIFO in a file's place, nobody waits for its other end: it is refused, with the file's name.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use super::super::error::{Damage, OpenError};
use super::super::offline::SnapshotView;
use super::super::survey;
use super::volume::{Volume, extent, temporary};

/// Far more than it takes to open a directory, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A directory closed cleanly, with a snapshot, and below all a backing file.
fn closed(path: &Path) {
    let mut volume = Volume::create(path);
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.close();
    let meta = path.join("volume.meta");
    let text = fs::read_to_string(&meta).unwrap();
    let named = text.replacen("\"BackingFilePath\":\"\"", "\"BackingFilePath\":\"../backing\"", 1);
    assert_ne!(text, named);
    // Written into the file that there is: it keeps the attribute by which it is known.
    fs::write(meta, named).unwrap();
    fs::write(path.with_file_name("backing"), [7; 4096]).unwrap();
}

fn files(path: &Path) -> Vec<PathBuf> {
    let of = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let mut files: Vec<_> = [of(path), of(&path.join("engine"))].concat();
    files.retain(|file| file.is_file());
    files.push(path.with_file_name("backing"));
    files.sort();
    files
}

/// `work` in a thread of its own; `None` if it waits.
fn ended<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(work()));
    told.recv_timeout(PATIENCE).ok()
}

#[test]
fn a_fifo_in_any_files_place_holds_nobody_up() {
    let sample = temporary();
    closed(&sample.path().join("replica"));
    let count = files(&sample.path().join("replica")).len();
    assert!(count > 10, "{count} files");
    for number in 0..count {
        let place = temporary();
        let path = place.path().join("replica");
        closed(&path);
        // Some have an id in their name, another one each time.
        let fifo = files(&path)[number].clone();
        fs::remove_file(&fifo).unwrap();
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let look = || {
            let [view, surveyed, opened] = [path.clone(), path.clone(), path.clone()];
            let view = ended(move || SnapshotView::open(&view, None).map(drop));
            let surveyed = ended(move || survey::survey(&surveyed).map(drop));
            let opened = ended(move || Volume::open(&opened).map(drop));
            Some((view?, surveyed?, opened?))
        };
        let Some((view, surveyed, opened)) = look() else { panic!("{} is waited for", fifo.display()) };
        let file = fifo.file_name().unwrap().to_str().unwrap();
        for refused in [&view, &surveyed, &opened].into_iter().filter_map(|r| r.as_ref().err()) {
            let text = refused.to_string();
            assert!(
                text.contains(file) && text.contains("not a plain file: put the file itself there"),
                "{text}"
            );
        }
        let is_ours = fifo.parent() == Some(&path.join("engine"));
        // Of what this program has noted beside them, some is only for speed, and made anew.
        assert!(is_ours || (view.is_err() && opened.is_err()), "{} is done without", fifo.display());
        if file.ends_with(".meta") && file != "volume.meta" {
            let meta = Damage::NotAFile(file.to_owned());
            assert!(
                matches!(view, Err(OpenError::Damaged { damage, .. }) if damage == meta),
                "{}",
                fifo.display()
            );
        }
    }
}
