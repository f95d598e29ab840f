//! A replica directory: whatever lies there, opening it for reading ends in words or in a chain that reads as its
//! files say.
//!
//! Input: files, separated by 0xff. A file is its name, 0xfe, its content. Of a name that ends in `.img` the content
//! is described: two bytes, little-endian, are the length in units of 2 KiB, and every further byte is a block that holds data.
//! Content that begins with 0xfd is a symbolic link's target.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use replica::store::{OpenError, SnapshotView};

const BLOCK: u64 = 4096;

/// Files of one directory: more is only slower.
const FILES_MAX: usize = 24;

/// In memory where there is such a place: a directory per input on a disk would be slow.
static PLACE: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let shm = Path::new("/dev/shm");
    let place = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("lh-fuzz-").tempdir_in(place).expect("a directory for the inputs")
});

/// An image's blocks that hold data, by file name.
type Images = BTreeMap<String, BTreeSet<u8>>;

/// Lays the files out; `None` if that is not possible.
fn lay_out(directory: &Path, input: &[u8]) -> Option<Images> {
    let mut images = Images::new();
    for file in input.split(|byte| *byte == 0xff).take(FILES_MAX) {
        let Some(at) = file.iter().position(|byte| *byte == 0xfe) else { continue };
        let (name, content) = (std::str::from_utf8(&file[..at]).ok()?, &file[at + 1..]);
        let plain = name.strip_prefix("engine/").unwrap_or(name);
        if plain.is_empty() || plain.len() > 200 || plain.contains(['/', '\0']) || plain.starts_with('.') {
            continue;
        }
        let path = directory.join(name);
        if name.starts_with("engine/") {
            std::fs::create_dir_all(directory.join("engine")).ok()?;
        }
        match (content.split_first(), name.ends_with(".img")) {
            (Some((0xfd, target)), _) => {
                let target = std::str::from_utf8(target).ok()?;
                // Links leave the directory only in ways that are refused.
                std::os::unix::fs::symlink(target, &path).ok()?;
            }
            (_, true) => {
                images.insert(name.to_owned(), image(&path, name, content)?);
            }
            (_, false) => std::fs::write(&path, content).ok()?,
        }
    }
    Some(images)
}

fn image(path: &Path, name: &str, content: &[u8]) -> Option<BTreeSet<u8>> {
    let file = File::create(path).ok()?;
    let (length, blocks) = content.split_first_chunk::<2>()?;
    let length = u64::from(u16::from_le_bytes(*length)) * 2048;
    file.set_len(length).ok()?;
    let held: BTreeSet<u8> =
        blocks.iter().copied().filter(|block| (u64::from(*block) + 1) * BLOCK <= length).collect();
    for block in &held {
        file.write_all_at(&pattern(name, *block), u64::from(*block) * BLOCK).ok()?;
    }
    Some(held)
}

/// What lies in a block of an image: never zeroes.
fn pattern(name: &str, block: u8) -> Vec<u8> {
    let mark = name.bytes().fold(block, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte)) | 1;
    vec![mark; 4096]
}

/// Opens the head, then every snapshot that it tells of.
fn check(directory: &Path, images: &Images) {
    let head = match SnapshotView::open(directory, None) {
        Err(refused) => {
            assert!(!refused.to_string().is_empty());
            return;
        }
        Ok(view) => view,
    };
    assert!(head.size() > 0 && head.size() % BLOCK == 0);
    let layers: Vec<_> = head.layers().to_vec();
    let (last, snapshots) = layers.split_last().expect("a head at least");
    assert_eq!(last.name, "");
    for (at, layer) in layers.iter().enumerate() {
        let below = layers[..at].iter().any(|l| !l.name.is_empty() && l.name == layer.parent);
        assert!(layer.parent.is_empty() || below, "{} stands on nothing", layer.name);
        assert!(layer.length <= head.size() && layer.length % BLOCK == 0);
    }
    let volume: serde_json::Value = std::fs::read(directory.join("volume.meta"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let backed = volume["BackingFilePath"].as_str().is_some_and(|path| !path.is_empty());
    let plain = !backed && !directory.join("engine").exists();
    let head_file = volume["Head"].as_str().map(str::to_owned);
    let chain_of = |name: &str| {
        let mut chain = Vec::new();
        let mut at = layers.iter().find(|layer| layer.name == name);
        while let Some(layer) = at {
            chain.push(match layer.name.as_str() {
                "" => head_file.clone().unwrap_or_default(),
                snapshot => format!("volume-snap-{snapshot}.img"),
            });
            at = layers.iter().find(|below| !layer.parent.is_empty() && below.name == layer.parent);
        }
        chain
    };
    if plain && head_file.is_some() {
        read_all(&head, &chain_of(""), images);
    }
    drop(head);
    for layer in snapshots {
        let opened = SnapshotView::open(directory, Some(&layer.name));
        if layer.removed {
            assert!(matches!(opened, Err(OpenError::NotLasting { .. })), "a removed snapshot was read");
            continue;
        }
        let view = opened.expect("a snapshot that was told of");
        if plain && head_file.is_some() {
            read_all(&view, &chain_of(&layer.name), images);
        }
    }
}

/// Every block that any image holds, and their neighbours: the topmost file of the chain that holds it, or zeroes.
fn read_all(view: &SnapshotView, chain: &[String], images: &Images) {
    for block in 0..=u8::MAX {
        let at = u64::from(block) * BLOCK;
        if at + BLOCK > view.size() {
            break;
        }
        let holder = chain.iter().find(|file| images.get(*file).is_some_and(|held| held.contains(&block)));
        let expected = holder.map_or_else(|| vec![0; 4096], |file| pattern(file, block));
        let mut bytes = vec![0xaa; 4096];
        view.read_at(at, &mut bytes).expect("inside the volume");
        assert!(bytes == expected, "block {block} is not what {holder:?} holds");
    }
    assert!(view.read_at(view.size(), &mut [0]).is_err(), "a read beyond the end");
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let directory: PathBuf = PLACE.path().join("replica");
    std::fs::create_dir(&directory).expect("an empty place");
    if let Some(images) = lay_out(&directory, input) {
        check(&directory, &images);
    }
    std::fs::remove_dir_all(&directory).expect("the place is emptied");
}
