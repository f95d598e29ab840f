//! Opens a replica's directory as a replica's process does, which finishes what a crash has interrupted, and then writes what
//! each of its layers reads as into files: `replica-look DIRECTORY OUT` makes `OUT/head` and `OUT/snap-NAME`.
//!
//! Prints `marked OFFSET LENGTH` for each range of the intent bitmap, and `snapshot NAME live|removed`, the lowest first.

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use replica::store::{Directory, OpenOptions, SnapshotView};

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [directory, out] = arguments.as_slice() else {
        eprintln!("usage: replica-look DIRECTORY OUT");
        return ExitCode::from(2);
    };
    match look(directory, out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("replica-look: {e}");
            ExitCode::FAILURE
        }
    }
}

fn look(directory: &Path, out: &Path) -> Result<(), Box<dyn Error>> {
    let (opened, store) = Directory::open(directory, &OpenOptions { lock_wait: Duration::from_secs(5) })?;
    for range in store.intent() {
        println!("marked {} {}", range.offset, range.len);
    }
    let snapshots: Vec<_> = opened.state().chain.into_iter().filter(|layer| !layer.name.is_empty()).collect();
    drop((opened, store));
    for layer in &snapshots {
        println!("snapshot {} {}", layer.name, if layer.removed { "removed" } else { "live" });
        // What a fold may have written to is read by nobody.
        if layer.removed {
            continue;
        }
        let view = SnapshotView::open(directory, Some(&layer.name))?;
        view.export(&File::create(out.join(format!("snap-{}", layer.name)))?, &mut |_, _| {})?;
    }
    SnapshotView::open(directory, None)?.export(&File::create(out.join("head"))?, &mut |_, _| {})?;
    Ok(())
}
