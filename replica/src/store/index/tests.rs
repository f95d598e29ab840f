use super::*;
use lh_rig::allocations;
use proptest::prelude::*;

fn first(index: &Index) -> &Chunk {
    &index.leaves[0].as_ref().unwrap()[0]
}

fn all(index: &Index) -> Vec<u8> {
    index.runs(0..index.blocks).flat_map(|(r, v)| r.map(move |_| v)).collect()
}

#[test]
fn every_other_block_becomes_bytes_and_goes_back() {
    let mut index = Index::new(CHUNK_U64);
    index.set_all((0..CHUNK_U64 / 2).map(|n| 2 * n..2 * n + 1), 7);
    assert!(matches!(first(&index), Chunk::Packed(b) if b.len() == CHUNK));
    assert_eq!(all(&index), (0..CHUNK).map(|n| if n % 2 == 0 { 7 } else { 0 }).collect::<Vec<_>>());
    index.set(0..CHUNK_U64 - 10, 7);
    assert!(matches!(first(&index), Chunk::Packed(b) if b.len() < 40));
    index.set(0..CHUNK_U64, 7);
    assert!(matches!(first(&index), Chunk::Uniform(7)));
}

/// Changes wherever they are, at both ends and where one look ends and the next begins.
#[test]
fn every_change_of_a_byte_per_block_counts_once() {
    let with_changes = |places: &[usize]| -> Vec<u8> {
        (0..CHUNK).map(|at| u8::try_from(places.partition_point(|p| *p <= at) % 2).unwrap()).collect()
    };
    for spread in [1, 2, 5, 6] {
        let few: Vec<usize> = (1..RUNS_AGAIN).map(|n| n * spread).collect();
        assert!(is_worth_runs(&with_changes(&few)), "{spread}");
        assert!(!is_worth_runs(&with_changes(&[few, vec![CHUNK - 1]].concat())), "{spread}");
    }
    assert!(is_worth_runs(&[3; CHUNK]));
}

#[test]
fn runs_go_on_across_chunks() {
    let mut index = Index::new(10 * CHUNK_U64);
    index.set(CHUNK_U64 - 1..7 * CHUNK_U64 + 1, 3);
    let runs: Vec<_> = index.runs(0..20 * CHUNK_U64).collect();
    let (a, b) = (CHUNK_U64 - 1, 7 * CHUNK_U64 + 1);
    assert_eq!(runs, [(0..a, 0), (a..b, 3), (b..10 * CHUNK_U64, 0)]);
}

#[test]
fn setting_what_is_there_changes_nothing() {
    let mut index = Index::new(CHUNK_U64);
    index.set(5..9, 1);
    let before = match first(&index) {
        Chunk::Packed(b) => b.as_ptr(),
        Chunk::Uniform(_) => unreachable!("three runs"),
    };
    index.set(6..8, 1);
    // A run that moves keeps its memory, too.
    index.set(9..10, 1);
    assert!(matches!(first(&index), Chunk::Packed(b) if b.as_ptr() == before));
}

/// 10 TiB with a million scattered blocks take at most 40 MiB, and each chunk is changed once, whatever lies in it: an
/// allocation for each, and for each leaf. How long all of it takes is `replica/tests/scattered.rs`'s affair.
#[test]
fn ten_tebibytes_with_a_million_blocks() {
    let blocks = (10_u64 << 40) / 4096;
    let mut places: Vec<u64> =
        (0..1_000_000_u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks).collect();
    places.sort_unstable();
    places.dedup();
    let mut chunks: Vec<u64> = places.iter().map(|b| b / CHUNK_U64).collect();
    chunks.dedup();
    let mut index = Index::new(blocks);
    let (made, ()) = allocations::during(|| index.set_all(places.iter().map(|b| *b..b + 1), 2));
    let most = chunks.len() + index.leaves.len();
    assert!(made <= most as u64, "{made} allocations for {} chunks", chunks.len());
    assert!(index.heap_bytes() <= 40 << 20, "{} bytes", index.heap_bytes());
    let (made, held) = allocations::during(|| -> u64 {
        index.runs(0..blocks).filter(|(_, v)| *v == 2).map(|(r, _)| r.end - r.start).sum()
    });
    assert_eq!((made, held), (0, places.len() as u64));
}

#[test]
fn what_is_empty_takes_next_to_nothing() {
    let blocks = (1_u64 << 50) / 4096;
    let mut index = Index::new(blocks);
    index.set(0..blocks, 0);
    assert!(index.heap_bytes() < 4 << 20 && index.is_zero());
    index.set(blocks - 1..blocks, 1);
    assert!(index.heap_bytes() < 4 << 20 && !index.is_zero());
    assert_eq!(index.runs(0..blocks).collect::<Vec<_>>(), [(0..blocks - 1, 0), (blocks - 1..blocks, 1)]);
}

/// At most 32 MiB per TiB up to 5 million runs, 256 MiB per TiB and a little at worst.
#[test]
fn fragmented_tebibytes() {
    let blocks = (1_u64 << 40) / 4096;
    let mut index = Index::new(blocks);
    index.set_all((0..2_500_000_u64).map(|n| n * 107..n * 107 + 1), 1);
    assert!(index.heap_bytes() <= 32 << 20, "{} bytes", index.heap_bytes());
    let mut small = Index::new(blocks / 64);
    small.set_all((0..blocks / 128).map(|n| 2 * n..2 * n + 1), 1);
    assert!(small.heap_bytes() <= 260 * (1 << 20) / 64, "{} bytes", small.heap_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn like_an_array(
        blocks in 1_u64..3 * CHUNK_U64,
        ops in prop::collection::vec((0_u64..3 * CHUNK_U64, prop_oneof![1_u64..6, 1_u64..5000], 0_u8..4, 1_usize..60, 1_u64..9), 1..60),
    ) {
        let mut index = Index::new(blocks);
        let mut model = vec![0_u8; usize::try_from(blocks).unwrap()];
        for (start, len, value, times, gap) in ops {
            // Either one long range or a comb of short ones.
            let ranges: Vec<Range<u64>> = if times < 20 {
                std::iter::once(start..start + len).collect()
            } else {
                (0..40 * times as u64).map(|n| start + n * (gap + 1)..start + n * (gap + 1) + 1).collect()
            };
            index.set_all(ranges.iter().cloned(), value);
            for n in ranges.into_iter().flatten().filter(|n| *n < blocks) {
                model[usize::try_from(n).unwrap()] = value;
            }
            prop_assert_eq!(&all(&index), &model);
            let part: Vec<u8> =
                index.runs(start..start + len).flat_map(|(r, v)| r.map(move |_| v)).collect();
            let cut = |n: u64| usize::try_from(n.min(blocks)).unwrap();
            prop_assert_eq!(&part[..], &model[cut(start)..cut(start + len)]);
            let values: Vec<u8> = index.runs(0..blocks).map(|(_, v)| v).collect();
            prop_assert!(values.windows(2).all(|w| w[0] != w[1]));
            prop_assert_eq!(index.is_zero(), model.iter().all(|v| *v == 0));
        }
    }
}
