//! What a driver that runs tells of a snapshot and of the difference of two, compared with the bytes: no block that differs
//! is missing, and little else is told. Needs root and `CSI_ENDPOINT`, as `scripts/cluster env` prints it.

mod pod;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use csi::proto::csi as proto;
use pod::Pod;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use proto::{BlockMetadata, GetMetadataAllocatedRequest, GetMetadataDeltaRequest};
use tonic::Code;
use tonic::transport::Channel;

const BLOCK: usize = 4096;

/// Writes random blocks with random bytes, and zeroes some, as an image in memory is written; gives back the blocks.
struct Writer {
    state: u64,
    image: Vec<u8>,
}

impl Writer {
    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn write_some(&mut self, device: &Path, count: usize) -> Vec<usize> {
        let file = fs::OpenOptions::new().write(true).open(device).unwrap();
        let blocks = self.image.len() / BLOCK;
        let mut touched = Vec::new();
        for _ in 0..count {
            let at = usize::try_from(self.next()).unwrap() % blocks;
            let run = (1 + usize::try_from(self.next()).unwrap() % 8).min(blocks - at);
            let mut bytes = vec![0; run * BLOCK];
            // Every fifth is zeroes over whatever was there.
            if !self.next().is_multiple_of(5) {
                bytes.chunks_mut(8).for_each(|eight| eight.copy_from_slice(&self.next().to_le_bytes()));
            }
            file.write_all_at(&bytes, (at * BLOCK) as u64).unwrap();
            self.image[at * BLOCK..(at + run) * BLOCK].copy_from_slice(&bytes);
            touched.extend(at..at + run);
        }
        file.sync_all().unwrap();
        touched
    }
}

/// Nothing that differs is missing; nothing is told that was not written. Gives back how many blocks were told.
fn check(told: &[BlockMetadata], old: &[u8], new: &[u8], touched: &[usize]) -> usize {
    let mut is_told = vec![false; new.len() / BLOCK];
    let mut end = 0;
    for tuple in told {
        assert!(tuple.byte_offset >= end && tuple.size_bytes > 0, "{tuple:?} after {end}");
        end = tuple.byte_offset + tuple.size_bytes;
        let (from, to) = (usize::try_from(tuple.byte_offset).unwrap(), usize::try_from(end).unwrap());
        is_told[from / BLOCK..to.div_ceil(BLOCK)].fill(true);
    }
    let mut is_touched = vec![false; is_told.len()];
    touched.iter().for_each(|n| is_touched[*n] = true);
    for (n, (was, is)) in old.chunks(BLOCK).zip(new.chunks(BLOCK)).enumerate() {
        assert!(is_told[n] || was == is, "block {n} differs and is not told");
        assert!(!is_told[n] || is_touched[n], "block {n} is told, and was not written");
    }
    is_told.iter().filter(|told| **told).count()
}

struct Asker(SnapshotMetadataClient<Channel>);

impl Asker {
    async fn allocated(&mut self, id: &str) -> Vec<BlockMetadata> {
        let request = GetMetadataAllocatedRequest { snapshot_id: id.into(), ..Default::default() };
        let mut stream = self.0.get_metadata_allocated(request).await.unwrap().into_inner();
        let mut told = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            told.extend(message.block_metadata);
        }
        told
    }

    /// In calls of a few tuples each, every one going on where the one before was broken off.
    async fn delta(&mut self, base: &str, target: &str) -> Vec<BlockMetadata> {
        let (mut told, mut from) = (Vec::<BlockMetadata>::new(), 0);
        loop {
            let request = GetMetadataDeltaRequest {
                base_snapshot_id: base.into(),
                target_snapshot_id: target.into(),
                starting_offset: from,
                max_results: 7,
                ..Default::default()
            };
            let mut stream = self.0.get_metadata_delta(request).await.unwrap().into_inner();
            // Whoever breaks off after so many messages goes on where they end.
            for _ in 0..10 {
                let Some(message) = stream.message().await.unwrap() else { return told };
                assert!(message.block_metadata.len() <= 7);
                told.extend(message.block_metadata);
            }
            from = told.last().map_or(0, |last| last.byte_offset + last.size_bytes);
        }
    }
}

#[tokio::test]
async fn no_block_that_differs_is_missing() {
    let Some(channel) = pod::driver().await else {
        println!(
            "elsewhere changed_blocks: CSI_ENDPOINT does not name a driver; tests/cluster/sanity has one"
        );
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let mut pod = Pod::new(&channel, place.path(), "block");
    let mut asker = Asker(SnapshotMetadataClient::new(channel.clone()));
    let seed = std::env::var("LH_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x9e37_79b9_7f4a_7c15);
    println!("LH_SEED={seed}");
    let volume = pod.create("changed-blocks", None).await;
    let device = pod.mount(&volume, false).await;
    let mut writer = Writer { state: seed, image: vec![0; 320 << 20] };
    let zeroes = writer.image.clone();

    let first = writer.write_some(&device, 400);
    let one = pod.snapshot(&volume, "changed-blocks-1").await;
    let at_one = writer.image.clone();
    let second = writer.write_some(&device, 200);
    let two = pod.snapshot(&volume, "changed-blocks-2").await;
    let at_two = writer.image.clone();
    let third = writer.write_some(&device, 100);
    let three = pod.snapshot(&volume, "changed-blocks-3").await;
    let at_three = writer.image.clone();
    writer.write_some(&device, 50);

    let both = [second.clone(), third.clone()].concat();
    for way in ["in use", "detached"] {
        let counts = [
            check(&asker.allocated(&one).await, &zeroes, &at_one, &first),
            check(&asker.delta(&one, &two).await, &at_one, &at_two, &second),
            check(&asker.delta(&two, &three).await, &at_two, &at_three, &third),
            check(&asker.delta(&one, &three).await, &at_one, &at_three, &both),
        ];
        println!("SHOWN {way}: {counts:?} blocks told, none missing");
        if way == "in use" {
            pod.unmount(&volume).await;
        }
    }
    // A snapshot between two is removed, and folded: what differs between the others stays told.
    pod.delete_snapshot(&two).await;
    check(&asker.delta(&one, &three).await, &at_one, &at_three, &both);
    let gone = GetMetadataAllocatedRequest { snapshot_id: two, ..Default::default() };
    assert_eq!(asker.0.get_metadata_allocated(gone).await.unwrap_err().code(), Code::NotFound);
    for snapshot in [&one, &three] {
        pod.delete_snapshot(snapshot).await;
    }
    pod.delete(&volume).await;
}
