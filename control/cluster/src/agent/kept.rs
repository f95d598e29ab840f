//! What a node keeps of volumes besides their data: `volumes/VOLUME` below the root, with the key, the stay, reservations.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use control::host::{LiveDirs, Root};

/// The record of a volume that belongs to no cluster.
const RECORD: &str = "volume.json";

/// The volumes of a root of which something is kept. None that has a record: it is of no cluster, whatever else is here.
pub(super) fn kept(root: &Root) -> BTreeSet<String> {
    let entries = fs::read_dir(root.volumes()).into_iter().flatten().filter_map(Result::ok);
    let is_ours = |place: &Path| place.is_dir() && !has_record(place);
    entries.filter(|e| is_ours(&e.path())).filter_map(|e| e.file_name().into_string().ok()).collect()
}

fn has_record(place: &Path) -> bool {
    !fs::symlink_metadata(place.join(RECORD)).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

/// Removes what is kept of a volume that is gone, and nothing that nobody knows here. `devices`: where volumes are shown.
///
/// # Errors
/// Its device is still there, something runs under its name, the volume is another root's, or something else lies there; then all of it
/// stays.
pub(super) fn forget(root: &Root, volume: &str, devices: &Path, live: &LiveDirs) -> io::Result<()> {
    let place = root.volume(volume);
    let is_name = place.parent() == Some(&root.volumes()) && place.file_name().is_some();
    if !is_name || has_record(&place) {
        return Err(io::Error::other(format!("{} is no volume's of a cluster", place.display())));
    }
    let device = devices.join(volume);
    if !fs::symlink_metadata(&device).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        return Err(io::Error::other(format!("{} is there", device.display())));
    }
    // An engine that people run has it as long as it runs.
    let name = live.acquire(volume, root, Duration::ZERO).map_err(io::Error::other)?;
    let removed = remove(root, volume, &place);
    drop(name);
    live.forget(volume, root);
    removed
}

fn remove(root: &Root, volume: &str, place: &Path) -> io::Result<()> {
    let files = [Root::reservations(place), root.stay(volume), root.key(volume)];
    let there = match fs::read_dir(place) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        there => there?.collect::<io::Result<Vec<_>>>()?,
    };
    if let Some(other) = there.iter().map(fs::DirEntry::path).find(|path| !files.contains(path)) {
        return Err(io::Error::other(format!("{} is nothing of a cluster's", other.display())));
    }
    there.iter().try_for_each(|file| fs::remove_file(file.path()))?;
    fs::remove_dir(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_of_a_volume_goes_and_nothing_else() {
        let scratch = tempfile::tempdir().unwrap();
        let devices = scratch.path().join("dev");
        fs::create_dir_all(&devices).unwrap();
        let root = Root::at(&scratch.path().join("root")).unwrap();
        for volume in ["never-shown-a", "never-shown-b", "never-shown-c", "never-shown-d"] {
            fs::create_dir_all(root.volume(volume)).unwrap();
            for file in [root.key(volume), root.stay(volume), Root::reservations(&root.volume(volume))] {
                fs::write(file, "x").unwrap();
            }
        }
        fs::write(root.volume("never-shown-b").join(RECORD), "{}").unwrap();
        fs::write(root.volume("never-shown-c").join("somebodys"), "x").unwrap();
        fs::write(devices.join("never-shown-d"), "").unwrap();
        let names = |of: &[&str]| of.iter().map(|of| format!("never-shown-{of}")).collect::<BTreeSet<_>>();
        assert_eq!(kept(&root), names(&["a", "c", "d"]));
        let live = LiveDirs::below(&scratch.path().join("run"));
        let forget = |volume: &str| forget(&root, volume, &devices, &live);
        let runs = live.acquire("never-shown-a", &root, Duration::ZERO).unwrap();
        assert!(forget("never-shown-a").is_err(), "an engine runs that nobody here started");
        assert!(root.key("never-shown-a").exists());
        drop(runs);
        forget("never-shown-a").unwrap();
        forget("never-shown-a").unwrap();
        for volume in ["never-shown-b", "never-shown-c", "never-shown-d", "", "..", "../root"] {
            assert!(forget(volume).is_err(), "{volume}");
        }
        assert_eq!(kept(&root), names(&["c", "d"]));
        assert!(root.key("never-shown-b").exists() && root.key("never-shown-d").exists());
        for file in ["somebodys", "key"] {
            assert!(root.volume("never-shown-c").join(file).exists(), "{file}");
        }
    }
}
