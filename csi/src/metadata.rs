//! Where a snapshot holds data, and where two snapshots of a volume differ (CSI 1.12, SnapshotMetadata).
//!
//! The answer is read from a replica of the volume, page by page, as the caller takes it: it is never whole in memory. What
//! differs is always in it; what was written again as it was may be, too, as may zeroes that were written. If a replica
//! goes away, another one goes on from there. A volume that nobody uses is attached for so long, without a device.

mod hold;
mod source;

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use kube::ResourceExt;
use lh_cluster::api::Snapshot;
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, async_trait};

pub use source::{Holder, Page, ReadSnapshots, SnapshotMap, Source};

use crate::Refused;
use crate::cluster::Cluster;
use crate::names::SnapshotHandle;
use crate::proto::csi::snapshot_metadata_server::SnapshotMetadata;
use crate::proto::csi::{
    BlockMetadata, BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
    GetMetadataDeltaRequest, GetMetadataDeltaResponse,
};
use crate::refused::required;

pub(crate) use hold::Tickets;

/// Tuples of a message where the caller leaves it to us: some 20 KiB.
const TUPLES: usize = 1024;

/// Messages that wait for a caller that is slow.
const WAITING: usize = 2;

/// Streams at a time. Each keeps a volume attached and a replica's connection open.
const STREAMS: usize = 16;

/// The service.
#[derive(Clone)]
pub(crate) struct MetadataService {
    pub(crate) cluster: Cluster,
    pub(crate) tickets: Tickets,
    source: Source,
    streams: Arc<Semaphore>,
}

/// Why a stream does not go on from one replica.
enum Stopped {
    /// The replica says no more: another one may.
    Replica(String),
    /// Its reader takes nothing.
    Reader,
}

impl From<String> for Stopped {
    fn from(why: String) -> Self {
        Self::Replica(why)
    }
}

/// A request that makes sense.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wanted {
    volume: String,
    snapshot: String,
    base: Option<String>,
    /// Bytes of the volume when the snapshot was taken.
    size: u64,
    start: u64,
    /// Most tuples of a message.
    most: usize,
}

impl Wanted {
    fn new(target: &Snapshot, base: Option<&Snapshot>, start: i64, most: i32) -> Result<Self, Refused> {
        let most =
            usize::try_from(most).map_err(|_| Refused::Argument(format!("{most} results are below zero")))?;
        let status = target.status.clone().unwrap_or_default();
        let size = u64::try_from(status.restore_size).unwrap_or_default();
        let start = u64::try_from(start).ok().filter(|start| *start <= size).ok_or_else(|| {
            Refused::Range(format!("the starting offset {start} is not within the volume's {size} bytes"))
        })?;
        if let Some(base) = base {
            check_order(base, target)?;
        }
        Ok(Self {
            volume: target.spec.volume.clone(),
            snapshot: target.name_any(),
            base: base.map(ResourceExt::name_any),
            size,
            start,
            most: if most == 0 { TUPLES } else { most.min(TUPLES) },
        })
    }

    /// What of a range is told: nothing behind the snapshot's end, nothing that ends before the start.
    fn tuple(&self, range: &Range<u64>) -> Option<BlockMetadata> {
        let end = range.end.min(self.size);
        let size_bytes = i64::try_from(end.checked_sub(range.start).filter(|n| *n > 0)?).ok()?;
        (end > self.start)
            .then_some(BlockMetadata { byte_offset: i64::try_from(range.start).ok()?, size_bytes })
    }
}

/// Refuses two snapshots that are not of one volume, the base before the target.
fn check_order(base: &Snapshot, target: &Snapshot) -> Result<(), Refused> {
    let (old, new) = (base.name_any(), target.name_any());
    if base.spec.volume != target.spec.volume {
        return Err(Refused::Argument(format!(
            "snapshot {old} is of volume {} and snapshot {new} of volume {}: only snapshots of one volume are compared",
            base.spec.volume, target.spec.volume
        )));
    }
    let taken = |s: &Snapshot| s.status.clone().unwrap_or_default().creation_time;
    // In RFC 3339 and UTC, so that texts compare as times do; within one second nobody knows.
    if old == new || taken(base) > taken(target) {
        return Err(Refused::Argument(format!("snapshot {old}, the base, was not taken before {new}")));
    }
    Ok(())
}

impl MetadataService {
    pub(crate) fn new(cluster: Cluster, tickets: Tickets, source: Source) -> Self {
        Self { cluster, tickets, source, streams: Arc::new(Semaphore::new(STREAMS)) }
    }

    /// A snapshot that can be read.
    async fn snapshot(&self, what: &str, id: &str) -> Result<Snapshot, Refused> {
        let id = required(what, id)?;
        let missing = || Refused::Missing(format!("snapshot {id} does not exist"));
        let handle = SnapshotHandle::parse(id).ok_or_else(missing)?;
        let found = self.cluster.snapshot(&handle.name).await?;
        let is_it = |s: &Snapshot| s.spec.volume == handle.volume && s.metadata.deletion_timestamp.is_none();
        let snapshot = found.filter(is_it).ok_or_else(missing)?;
        let status = snapshot.status.clone().unwrap_or_default();
        if status.mark_removed {
            return Err(missing());
        }
        if !status.ready_to_use {
            return Err(Refused::NotYet(format!("snapshot {id} is not ready to use: {}", status.error)));
        }
        Ok(snapshot)
    }

    /// Sends everything, then ends the stream; or sends why not.
    async fn send<T: Message>(
        self,
        wanted: Wanted,
        sender: mpsc::Sender<Result<T, Status>>,
        place: OwnedSemaphorePermit,
    ) {
        let held = match self.hold(&wanted.volume).await {
            Ok(held) => held,
            Err(e) => return drop(sender.send(Err(e.into())).await),
        };
        let sent = self.send_pages(&wanted, held.holders(), &sender).await;
        self.release(held).await;
        drop(place);
        if let Err(e) = sent {
            tracing::info!(volume = wanted.volume, snapshot = wanted.snapshot, error = %e, "no metadata");
            // Nobody listens if the caller has gone, which is no matter.
            let _ = sender.send(Err(e.into())).await;
        }
    }

    async fn send_pages<T: Message>(
        &self,
        wanted: &Wanted,
        holders: &[Holder],
        sender: &mpsc::Sender<Result<T, Status>>,
    ) -> Result<(), Refused> {
        let mut from = wanted.start;
        let mut refusals = Vec::new();
        for holder in holders {
            match self.send_from(wanted, holder, &mut from, sender).await {
                Ok(()) => return Ok(()),
                Err(Stopped::Replica(why)) => refusals.push(format!("{}: {why}", holder.replica)),
                Err(Stopped::Reader) => {
                    return Err(Refused::NotYet(format!(
                        "nobody took what snapshot {} holds for {} s, and volume {} is let go: ask again from byte {from} on",
                        wanted.snapshot,
                        self.cluster.patience().as_secs(),
                        wanted.volume
                    )));
                }
            }
        }
        Err(Refused::Unavailable(format!(
            "no replica of volume {} gives what snapshot {} holds from byte {from} on: {}",
            wanted.volume,
            wanted.snapshot,
            refusals.join("; ")
        )))
    }

    /// Sends what one replica says, from a byte on, which is moved to where it is to go on. A reader who takes nothing for as long as a
    /// request is waited for keeps no volume attached.
    async fn send_from<T: Message>(
        &self,
        wanted: &Wanted,
        holder: &Holder,
        from: &mut u64,
        sender: &mpsc::Sender<Result<T, Status>>,
    ) -> Result<(), Stopped> {
        let (source, at, names) = (self.source.clone(), holder.clone(), wanted.clone());
        let opened =
            tokio::task::spawn_blocking(move || source.open(&at, &names.snapshot, names.base.as_deref()));
        let mut map = opened.await.map_err(|e| e.to_string())??;
        loop {
            let place = *from;
            let asked = tokio::task::spawn_blocking(move || {
                let page = map.page(place);
                (map, page)
            });
            let (asked, page) = asked.await.map_err(|e| e.to_string())?;
            map = asked;
            let Page { ranges, next } = page?;
            let tuples: Vec<BlockMetadata> = ranges.iter().filter_map(|r| wanted.tuple(r)).collect();
            let next = next.filter(|next| *next < wanted.size);
            // One message at least: it tells the capacity.
            let messages = tuples.chunks(wanted.most).map(<[BlockMetadata]>::to_vec);
            let empty = (tuples.is_empty() && next.is_none()).then(Vec::new);
            for tuples in messages.chain(empty) {
                let capacity = i64::try_from(wanted.size).unwrap_or(i64::MAX);
                match sender.send_timeout(Ok(T::of(capacity, tuples)), self.cluster.patience()).await {
                    Ok(()) => {}
                    Err(SendTimeoutError::Closed(_)) => return Ok(()),
                    Err(SendTimeoutError::Timeout(_)) => return Err(Stopped::Reader),
                }
            }
            match next {
                // The next page of a replica lies behind this one, or it would never end.
                Some(next) if next > place => *from = next,
                Some(next) => return Err(format!("after byte {place} it goes on at {next}").into()),
                None => return Ok(()),
            }
        }
    }

    fn answer<T: Message>(&self, wanted: Wanted) -> Result<Response<Messages<T>>, Refused> {
        let Ok(place) = Arc::clone(&self.streams).try_acquire_owned() else {
            return Err(Refused::NotYet(format!("{STREAMS} snapshots are being read here: ask again later")));
        };
        let (sender, receiver) = mpsc::channel(WAITING);
        // A task of its own: the volume is let go also if the caller has gone.
        tokio::spawn(self.clone().send(wanted, sender, place));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// One of the two kinds of messages, which hold the same.
trait Message: Send + 'static {
    fn of(volume_capacity_bytes: i64, block_metadata: Vec<BlockMetadata>) -> Self;
}

impl Message for GetMetadataAllocatedResponse {
    fn of(volume_capacity_bytes: i64, block_metadata: Vec<BlockMetadata>) -> Self {
        let block_metadata_type = BlockMetadataType::VariableLength.into();
        Self { block_metadata_type, volume_capacity_bytes, block_metadata }
    }
}

impl Message for GetMetadataDeltaResponse {
    fn of(volume_capacity_bytes: i64, block_metadata: Vec<BlockMetadata>) -> Self {
        let block_metadata_type = BlockMetadataType::VariableLength.into();
        Self { block_metadata_type, volume_capacity_bytes, block_metadata }
    }
}

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[async_trait]
impl SnapshotMetadata for MetadataService {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let request = request.into_inner();
        let target = self.snapshot("the snapshot's id", &request.snapshot_id).await?;
        Ok(self.answer(Wanted::new(&target, None, request.starting_offset, request.max_results)?)?)
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let request = request.into_inner();
        let (base, target) = (&request.base_snapshot_id, &request.target_snapshot_id);
        required("the target snapshot's id", target)?;
        let base = self.snapshot("the base snapshot's id", base).await?;
        let target = self.snapshot("the target snapshot's id", target).await?;
        Ok(self.answer(Wanted::new(&target, Some(&base), request.starting_offset, request.max_results)?)?)
    }
}

#[cfg(test)]
mod tests {
    use lh_cluster::api::{SnapshotSpec, SnapshotStatus};

    use super::*;

    fn snapshot(name: &str, volume: &str, taken: &str) -> Snapshot {
        let spec = SnapshotSpec { volume: volume.into(), ..SnapshotSpec::default() };
        let mut snapshot = Snapshot::new(name, spec);
        snapshot.status = Some(SnapshotStatus {
            creation_time: taken.into(),
            restore_size: 1 << 20,
            ready_to_use: true,
            ..SnapshotStatus::default()
        });
        snapshot
    }

    #[test]
    fn a_request_has_two_snapshots_of_one_volume_in_their_order_and_a_start_within() {
        let (one, two) =
            (snapshot("one", "v", "2026-01-01T00:00:00Z"), snapshot("two", "v", "2026-01-01T00:00:01Z"));
        let other = snapshot("other", "w", "2026-01-01T00:00:00Z");
        let good = Wanted::new(&two, Some(&one), 1 << 20, 0).unwrap();
        assert_eq!((good.size, good.start, good.most), (1 << 20, 1 << 20, TUPLES));
        assert_eq!(Wanted::new(&two, None, 0, 7).unwrap().most, 7);
        assert_eq!(Wanted::new(&two, None, 0, i32::MAX).unwrap().most, TUPLES);
        for (target, base, start, most, is_range) in [
            (&one, Some(&two), 0, 0, false),
            (&one, Some(&one), 0, 0, false),
            (&two, Some(&other), 0, 0, false),
            (&two, None, 0, -1, false),
            (&two, None, -1, 0, true),
            (&two, None, (1 << 20) + 1, 0, true),
        ] {
            let refused = Wanted::new(target, base, start, most).unwrap_err();
            assert_eq!(matches!(refused, Refused::Range(_)), is_range, "{refused}");
            assert!(is_range || matches!(refused, Refused::Argument(_)), "{refused}");
        }
    }

    #[test]
    fn what_ends_before_the_start_or_begins_behind_the_end_is_not_told() {
        let wanted = Wanted {
            volume: "v".into(),
            snapshot: "s".into(),
            base: None,
            size: 10_000,
            start: 4096,
            most: 1,
        };
        let tuple = |range| wanted.tuple(&range).map(|t| (t.byte_offset, t.size_bytes));
        assert_eq!(tuple(0..4096), None);
        assert_eq!(tuple(0..4097), Some((0, 4097)));
        assert_eq!(tuple(8192..12288), Some((8192, 1808)));
        assert_eq!(tuple(12288..16384), None);
    }
}
