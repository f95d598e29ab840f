use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use lh_block::{BLOCK, Extent};
use proptest::prelude::*;

use super::format::{HEADER_MAX, Qcow2Fault};
use super::image::{Image, ImageError, Place};

const CLUSTER: usize = 4096;
const V3: u32 = 3;
/// The volume over the images.
const LARGEST: u64 = 1 << 30;

/// What a cluster of a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    None,
    Zero,
    Plain,
    Packed,
}

fn put(image: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if image.len() < at + bytes.len() {
        image.resize(at + bytes.len(), 0);
    }
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn content(cluster: usize) -> Vec<u8> {
    (0..CLUSTER).map(|n| u8::try_from((n * 7 + cluster * 31) % 251 + 1).unwrap()).collect()
}

fn deflate(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(2 * bytes.len());
    let mut encoder = flate2::Compress::new(flate2::Compression::best(), false);
    encoder.compress_vec(bytes, &mut packed, flate2::FlushCompress::Finish).unwrap();
    packed
}

/// An image of 4 KiB clusters: header, L1 table, one L2 table, then the data. `size` may end within a cluster.
fn sample(version: u32, size: u64, kinds: &[Kind]) -> Vec<u8> {
    let mut image = Vec::new();
    put(&mut image, 0, b"QFI\xfb");
    put(&mut image, 4, &version.to_be_bytes());
    put(&mut image, 20, &12_u32.to_be_bytes());
    put(&mut image, 24, &size.to_be_bytes());
    put(&mut image, 36, &1_u32.to_be_bytes());
    put(&mut image, 40, &(CLUSTER as u64).to_be_bytes());
    put(&mut image, 100, &104_u32.to_be_bytes());
    put(&mut image, CLUSTER, &((2 * CLUSTER) as u64 | 1 << 63).to_be_bytes());
    put(&mut image, 3 * CLUSTER - 1, &[0]);
    for (n, kind) in kinds.iter().enumerate() {
        let end = image.len();
        let entry = match kind {
            Kind::None => 0,
            Kind::Zero => {
                // With a cluster that is kept for it, and holds what is not to be seen.
                let at = end.next_multiple_of(CLUSTER);
                put(&mut image, at, &content(n));
                at as u64 | 1 << 63 | 1
            }
            Kind::Plain => {
                let at = end.next_multiple_of(CLUSTER);
                put(&mut image, at, &content(n));
                at as u64 | 1 << 63
            }
            Kind::Packed => {
                let packed = deflate(&content(n));
                put(&mut image, end, &packed);
                let sectors = (end % 512 + packed.len()).div_ceil(512) - 1;
                end as u64 | (sectors as u64) << 58 | 1 << 62
            }
        };
        put(&mut image, 2 * CLUSTER + 8 * n, &entry.to_be_bytes());
    }
    image
}

fn open(bytes: &[u8]) -> Result<Image, ImageError> {
    let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    Image::open(std::sync::Arc::new(file), LARGEST)
}

fn fault(bytes: &[u8]) -> Qcow2Fault {
    match open(bytes) {
        Err(ImageError::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

const KINDS: [Kind; 8] =
    [Kind::Plain, Kind::Plain, Kind::Packed, Kind::None, Kind::Zero, Kind::Packed, Kind::Packed, Kind::Plain];

#[test]
fn clusters_of_every_kind() {
    let size = 8 * BLOCK - 512;
    let image = open(&sample(V3, size, &KINDS)).unwrap();
    assert_eq!(image.size(), size);
    assert_eq!(image.data(0..100).collect::<Vec<_>>(), [0..3, 5..8]);
    let mut bytes = vec![0xaa; 10 * CLUSTER];
    image.read_at(0, &mut bytes).unwrap();
    for (n, kind) in KINDS.iter().enumerate() {
        let got = &bytes[n * CLUSTER..(n + 1) * CLUSTER];
        let mut expected =
            if matches!(kind, Kind::Plain | Kind::Packed) { content(n) } else { vec![0; CLUSTER] };
        if n == 7 {
            // The last sector lies behind the end of the disk.
            expected[CLUSTER - 512..].fill(0);
        }
        assert!(got == expected, "cluster {n}");
    }
    assert!(bytes[8 * CLUSTER..].iter().all(|b| *b == 0), "behind the end is zero");
    // Across clusters, at odd places.
    let mut part = vec![0; 2 * CLUSTER + 77];
    image.read_at(CLUSTER as u64 + 123, &mut part).unwrap();
    assert_eq!(part, bytes[CLUSTER + 123..3 * CLUSTER + 200]);
}

#[test]
fn places_are_runs() {
    let image = open(&sample(V3, 8 * BLOCK, &KINDS)).unwrap();
    let mut found = Vec::new();
    image.places(Extent::new(512, 9 * BLOCK), |extent, place| {
        let place = match place {
            Place::At(at) => Place::At(at % BLOCK),
            other => other,
        };
        found.push((extent.offset, extent.end(), place));
    });
    // The first two clusters lie behind each other in the file.
    assert_eq!(
        found,
        [
            (512, 2 * BLOCK, Place::At(512)),
            (2 * BLOCK, 3 * BLOCK, Place::Packed),
            (3 * BLOCK, 5 * BLOCK, Place::Zero),
            (5 * BLOCK, 7 * BLOCK, Place::Packed),
            (7 * BLOCK, 8 * BLOCK, Place::At(0)),
            (8 * BLOCK, 9 * BLOCK + 512, Place::Zero),
        ]
    );
}

#[test]
fn each_fault_has_its_own_words() {
    let good = sample(V3, 8 * BLOCK, &KINDS);
    let with = |at: usize, bytes: &[u8]| {
        let mut image = good.clone();
        put(&mut image, at, bytes);
        fault(&image)
    };
    assert_eq!(with(4, &[0, 0, 0, 1]), Qcow2Fault::Version(1));
    assert_eq!(with(4, &[0, 0, 0, 4]), Qcow2Fault::Version(4));
    assert_eq!(with(8, &[1]), Qcow2Fault::Unsupported("a backing file of its own"));
    assert_eq!(with(20, &[0, 0, 0, 8]), Qcow2Fault::ClusterBits(8));
    assert_eq!(with(20, &[0, 0, 0, 22]), Qcow2Fault::ClusterBits(22));
    assert!(matches!(with(24, &[0xff; 8]), Qcow2Fault::Header(_)));
    assert!(matches!(with(24, &[0, 0, 1]), Qcow2Fault::Header(_)));
    assert_eq!(with(32, &[0, 0, 0, 1]), Qcow2Fault::Unsupported("encryption"));
    assert!(matches!(with(36, &[0; 4]), Qcow2Fault::Header(_)));
    assert!(matches!(with(40, &[0; 8]), Qcow2Fault::Entry { level: 1, .. }), "the L1 table is the header");
    assert!(matches!(with(46, &[0x10, 1]), Qcow2Fault::Header(_)));
    assert_eq!(with(44, &[0x10]), Qcow2Fault::CutOff("L1 table"));
    assert_eq!(with(79, &[2]), Qcow2Fault::Corrupt);
    assert_eq!(with(79, &[4]), Qcow2Fault::Unsupported("an external data file"));
    assert_eq!(with(79, &[16]), Qcow2Fault::Unsupported("extended L2 entries"));
    assert_eq!(with(79, &[32]), Qcow2Fault::UnknownFeatures(32));
    assert_eq!(with(72, &[0x80]), Qcow2Fault::UnknownFeatures(1 << 63));
    assert!(matches!(with(79, &[8]), Qcow2Fault::Header(_)));
    assert_eq!(
        with(79, &[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 112, 1]),
        Qcow2Fault::Unsupported("zstd compression")
    );
    assert!(matches!(with(100, &[0, 0, 0, 8]), Qcow2Fault::Header(_)));
    // Tables that point nowhere.
    assert!(matches!(with(CLUSTER + 7, &[1]), Qcow2Fault::Entry { level: 1, .. }));
    assert_eq!(with(CLUSTER + 4, &[1]), Qcow2Fault::CutOff("L2 tables"));
    assert!(matches!(with(2 * CLUSTER + 6, &[0x12]), Qcow2Fault::Entry { level: 2, .. }));
    assert_eq!(with(2 * CLUSTER + 4, &[1]), Qcow2Fault::CutOff("data"));
    // A zero cluster is of version 3.
    assert!(matches!(fault(&sample(2, 8 * BLOCK, &KINDS)), Qcow2Fault::Entry { level: 2, .. }));
    open(&sample(2, 8 * BLOCK, &KINDS[..4])).unwrap();
    // An image that was cut off anywhere is refused, but for its very last cluster.
    for len in
        [4, 71, 103, CLUSTER, CLUSTER + 7, 2 * CLUSTER, 3 * CLUSTER - 1, 4 * CLUSTER, good.len() - CLUSTER]
    {
        assert!(matches!(fault(&good[..len]), Qcow2Fault::CutOff(_) | Qcow2Fault::Version(0)), "{len} bytes");
    }
    // Reference counts that nobody vouches for are nobody's business here.
    let mut dirty = good.clone();
    put(&mut dirty, 79, &[1]);
    open(&dirty).unwrap();
}

/// What a hostile header could make of a small file: memory for a disk of 2^61 bytes, tables read over and over.
#[test]
fn a_small_file_costs_little() {
    let mut large = sample(V3, LARGEST + 512, &KINDS);
    put(&mut large, 38, &[2, 1]);
    assert!(matches!(open(&large), Err(ImageError::TooLarge(size)) if size == LARGEST + 512));
    put(&mut large, 20, &21_u32.to_be_bytes());
    put(&mut large, 24, &(1_u64 << 60).to_be_bytes());
    put(&mut large, 40, &[0; 8]);
    put(&mut large, 36, &(4_u32 << 20).to_be_bytes());
    assert!(matches!(open(&large), Err(ImageError::TooLarge(_))));
    // Two L1 entries, 2 MiB each, with one table.
    let mut twice = sample(V3, 4 << 20, &KINDS);
    put(&mut twice, 39, &[2]);
    assert_eq!(open(&twice).unwrap().size(), 4 << 20);
    let entry = (2 * CLUSTER) as u64 | 1 << 63;
    put(&mut twice, CLUSTER + 8, &entry.to_be_bytes());
    assert_eq!(fault(&twice), Qcow2Fault::Entry { level: 1, entry: 2 * CLUSTER as u64 });
}

/// The last cluster of an image may end with its file. What a file has had when it was opened is not that.
#[test]
fn what_an_image_has_lost_is_not_read_as_zeroes() {
    let bytes = sample(V3, 4 * CLUSTER as u64, &[Kind::Plain; 4]);
    let length = bytes.len() as u64;
    let file = std::sync::Arc::new(tempfile::tempfile().unwrap());
    file.write_all_at(&bytes, 0).unwrap();
    let image = Image::open(std::sync::Arc::clone(&file), LARGEST).unwrap();
    assert_eq!(image.file_length(), length);
    file.set_len(length - CLUSTER as u64).unwrap();
    let mut read = vec![0; CLUSTER];
    image.read_at(2 * CLUSTER as u64, &mut read).unwrap();
    assert_eq!(read, content(2));
    let lost = image.read_at(3 * CLUSTER as u64, &mut read).unwrap_err();
    assert_eq!(lost.kind(), std::io::ErrorKind::UnexpectedEof, "{lost}");
}

#[test]
fn a_damaged_compressed_cluster_is_an_error_of_its_own_range() {
    let mut bytes = sample(V3, 8 * BLOCK, &KINDS);
    let at = 5 * CLUSTER;
    bytes[at..at + 16].fill(0xff);
    let image = open(&bytes).unwrap();
    let mut part = vec![0; CLUSTER];
    let err = image.read_at(2 * BLOCK, &mut part).unwrap_err();
    assert_eq!(err.kind(), std::io::ErrorKind::InvalidData, "{err}");
    image.read_at(0, &mut part).unwrap();
    assert_eq!(part, content(0));
    image.read_at(5 * BLOCK, &mut part).unwrap();
    assert_eq!(part, content(5));
}

#[test]
fn what_is_kept_is_bounded_and_right() {
    // More packed clusters than are kept.
    let kinds = [Kind::Packed; 200];
    let image = open(&sample(V3, 200 * BLOCK, &kinds)).unwrap();
    let mut part = vec![0; CLUSTER];
    for n in (0..200).chain((0..200).rev()).chain([7, 7, 8, 7, 190]) {
        image.read_at(n as u64 * BLOCK, &mut part).unwrap();
        assert!(part == content(n), "cluster {n}");
    }
}

/// Whatever is in the file: an error or bytes, never a panic, and no memory that the file's own size does not explain.
fn survive(bytes: &[u8]) {
    let Ok(image) = open(bytes) else { return };
    // As the caller does, who knows the volume's size.
    let size = image.size().min(1 << 20);
    let mut part = vec![0; 3 * CLUSTER];
    for offset in (0..size).step_by(CLUSTER) {
        let _ = image.read_at(offset, &mut part);
    }
    let mut covered = 0;
    image.places(Extent::new(0, size), |extent, _| {
        assert_eq!(extent.offset, covered);
        covered = extent.end();
    });
    assert_eq!(covered, size);
    image.data(0..size / BLOCK).for_each(drop);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_headers_and_tables(
        changes in prop::collection::vec((prop_oneof![0_usize..HEADER_MAX, CLUSTER..CLUSTER + 8, 2 * CLUSTER..2 * CLUSTER + 64], any::<u8>()), 1..6),
        cut in prop::option::of(0_usize..12 * CLUSTER),
    ) {
        let mut bytes = sample(V3, 8 * BLOCK, &KINDS);
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        survive(&bytes);
    }

    #[test]
    fn any_bytes_behind_the_magic(mut bytes in prop::collection::vec(any::<u8>(), 4..6000)) {
        bytes[..4].copy_from_slice(b"QFI\xfb");
        survive(&bytes);
    }

    #[test]
    fn random_bytes_as_compressed_data(junk in prop::collection::vec(any::<u8>(), 600)) {
        let mut bytes = sample(V3, 8 * BLOCK, &KINDS);
        let at = 5 * CLUSTER;
        bytes[at..at + 600].copy_from_slice(&junk);
        survive(&bytes);
    }
}

/// Images that qemu-img makes read as the bytes they were made of.
#[test]
fn qemu_images_read_as_their_bytes() {
    let place = tempfile::tempdir().unwrap();
    let (raw, image) = (place.path().join("raw"), place.path().join("image"));
    // Data, zeroes that take space, holes, and an end within a block and a cluster.
    let mut bytes = vec![0; (5 << 20) + 1536];
    for (n, byte) in bytes.iter_mut().enumerate() {
        let wide = (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        if n >> 16 & 3 != 1 {
            *byte = u8::try_from(wide & 0x0f).unwrap();
        }
    }
    std::fs::write(&raw, &bytes).unwrap();
    let convert = |options: &[&str], to: &Path| {
        Command::new("qemu-img")
            .args(["convert", "-f", "raw", "-O", "qcow2"])
            .args(options)
            .arg(&raw)
            .arg(to)
            .status()
    };
    for options in [
        &["-o", "compat=0.10"][..],
        &["-o", "compat=1.1,preallocation=metadata"],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2k,compat=0.10", "-c"],
        &["-o", "cluster_size=2M"],
        &["-o", "cluster_size=2M", "-c"],
        &["-c"],
        &["-S", "0"],
    ] {
        match convert(options, &image) {
            Err(_) => {
                println!("SKIP qemu_images_read_as_their_bytes: there is no qemu-img here");
                return;
            }
            Ok(status) => assert!(status.success(), "{options:?}"),
        }
        let opened = Image::open(std::sync::Arc::new(std::fs::File::open(&image).unwrap()), LARGEST).unwrap();
        assert_eq!(opened.size(), bytes.len() as u64);
        let mut got = vec![0xaa; bytes.len()];
        opened.read_at(0, &mut got).unwrap();
        assert!(got == bytes, "{options:?}");
        // What is not said to hold data is zero.
        let mut held = vec![false; bytes.len().div_ceil(4096)];
        for range in opened.data(0..1 << 20) {
            held[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()].fill(true);
        }
        for (n, block) in bytes.chunks(4096).enumerate() {
            assert!(held[n] || block.iter().all(|b| *b == 0), "{options:?}: block {n}");
        }
    }
    // What is refused, as qemu-img makes it.
    for (options, fault) in [
        (&["-o", "extended_l2=on"][..], "extended L2"),
        (&["-c", "-o", "compression_type=zstd"], "zstd"),
        (&["-o", "data_file=other"], "external data file"),
    ] {
        let done = convert(options, &image).unwrap();
        if !done.success() {
            println!("SKIP qemu_images_read_as_their_bytes: this qemu-img cannot do {options:?}");
            continue;
        }
        let opened = Image::open(std::sync::Arc::new(std::fs::File::open(&image).unwrap()), LARGEST);
        let Err(ImageError::Fault(found)) = opened else { panic!("{options:?} was opened") };
        assert!(found.to_string().contains(fault), "{found}");
    }
    let _ = std::fs::remove_file("other");
}
