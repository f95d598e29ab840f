//! The fold that runs beside the requests, what it waits for, and what earlier ones have left.

use lh_block::Extent;

use super::core::{Job, PersistId, RequestId};
use super::fold_thread::FoldThread;
use super::request::Requests;
use crate::store::{Fold, FoldedChecksums, LayerNo};

/// What the fold that runs waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    Nothing,
    /// The thread, the worker, or a sync.
    Report,
    /// Clients' writes of the claimed range.
    Claim,
    /// A punch.
    Punch,
    /// The end of a prepared chain operation.
    Chain,
    /// Layer images, see [`super::fold_aside`].
    Images,
}

/// A fold that runs.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) fold: Fold,
    pub(super) bytes_per_second: Option<u64>,
    /// Not before this: what was copied last has used its share of the bandwidth, or there was an image just now.
    pub(super) not_before: u64,
    /// Bytes copied when that was reckoned.
    pub(super) reckoned: u64,
    pub(super) waits: Waits,
    pub(super) claim: Option<Extent>,
    /// Of both layers, as they were before.
    pub(super) checksums: Option<Box<FoldedChecksums>>,
}

impl Run {
    /// It keeps to its bandwidth, but holds no claim for the sake of it, and puts no end off: that may have been asked for while a
    /// piece was copied, whose share is reckoned only then.
    pub(super) fn is_due(&self, now: u64) -> bool {
        self.claim.is_some() || self.fold.is_broken_off() || now >= self.not_before
    }
}

/// A layer that was folded away and may still be read by requests that had begun.
#[derive(Debug)]
struct Gone {
    layer: LayerNo,
    /// Requests numbered before this.
    before: u64,
}

/// All of these, the first that was folded away first.
#[derive(Debug, Default)]
pub(super) struct GoneLayers(Vec<Gone>);

impl GoneLayers {
    pub(super) fn add(&mut self, layer: LayerNo, requests: &Requests) {
        self.0.push(Gone { layer, before: requests.next_number() });
    }

    /// Takes out one that no request reads any more.
    pub(super) fn take_unread(&mut self, requests: &Requests) -> Option<LayerNo> {
        let first = self.0.first()?;
        let is_unread = first.before <= requests.oldest_job().unwrap_or(u64::MAX);
        is_unread.then(|| self.0.remove(0).layer)
    }
}

/// The fold that runs, and what earlier ones have left.
#[derive(Debug, Default)]
pub(super) struct Folder {
    pub(super) run: Option<Run>,
    pub(super) thread: Option<FoldThread>,
    /// Begins when the worker has looked at it.
    pub(super) beginning: Option<(PersistId, Option<u64>)>,
    /// Writes that wait for the end of a claim, or until a fold stands aside, in order of arrival.
    pub(super) waiting: Vec<RequestId>,
    pub(super) gone: GoneLayers,
    /// Files that the thread is yet to close.
    pub(super) closing: usize,
    /// A rebuild has begun, which is answered when the layers before it have given their space back.
    pub(super) emptied: Option<PersistId>,
    /// The worker is asked to forget what a fold has noted.
    pub(super) forgetting: bool,
    /// It has forgotten it, and no fold has noted anything since.
    pub(super) forgotten: bool,
}

impl Folder {
    pub(super) fn is_idle(&self) -> bool {
        self.run.is_none() && self.beginning.is_none()
    }

    pub(super) fn wake_at(&self) -> Option<u64> {
        let waits = self.run.as_ref().filter(|run| matches!(run.waits, Waits::Nothing | Waits::Images));
        // What it may do at once was done, or waits for something that happens.
        waits.map(|run| run.not_before).filter(|at| *at > 0)
    }

    /// The fold that runs comes to its end soon, done or not.
    pub(super) fn stop(&mut self, why: &str) {
        if let Some(run) = &mut self.run {
            run.fold.stop(why);
        }
    }

    /// A prepared chain operation was carried out or taken back.
    pub(super) fn chain_changed(&mut self) {
        if let Some(run) = self.run.as_mut().filter(|run| run.waits == Waits::Chain) {
            run.waits = Waits::Nothing;
        }
    }

    /// A request that must not begin now.
    pub(super) fn holds_back(&self, job: Job) -> bool {
        let claim = self.run.as_ref().and_then(|run| run.claim);
        job.is_write() && claim.is_some_and(|claim| claim.overlaps(job.range()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use lh_block::Instance;
    use lh_ring::Payload;
    use lh_wire::{ChainOp, Header, OpCode};

    use super::*;
    use crate::serve::core::ConnId;
    use crate::store::{CreateOptions, Directory, OpenOptions};

    /// A fold of a snapshot of an empty volume.
    fn fold_of(place: &Path) -> Fold {
        let options = CreateOptions { size: 1 << 20, backing: None, lock_wait: Duration::ZERO };
        let (mut directory, mut store) = Directory::create(place, &options).unwrap();
        let (name, created, labels) = ("s".to_owned(), "2026-01-01T00:00:00Z".to_owned(), Default::default());
        let snapshot = ChainOp::Snapshot { name: name.clone(), user_created: true, created, labels };
        for (id, op) in [(1, snapshot), (2, ChainOp::MarkRemoved { name })] {
            directory.prepare(Instance(id), &op).unwrap();
            directory.commit(Instance(id)).unwrap();
        }
        directory.close_clean(store.close()).unwrap();
        drop((directory, store));
        let options = OpenOptions { lock_wait: Duration::ZERO };
        let (mut directory, store) = Directory::open(place, &options).unwrap();
        let plan = directory.begin_fold("s").unwrap();
        Fold::new(&store, plan).unwrap()
    }

    /// The piece that was being copied when the end was asked for has its share reckoned all the same.
    #[test]
    fn the_end_of_a_fold_does_not_wait_for_its_bandwidth() {
        let place = tempfile::tempdir().unwrap();
        for (number, break_off) in
            [|fold: &mut Fold| fold.stop("it is to end"), Fold::give_way].iter().enumerate()
        {
            let mut run = Run {
                fold: fold_of(&place.path().join(number.to_string())),
                bytes_per_second: Some(1),
                not_before: 1000,
                reckoned: 0,
                waits: Waits::Nothing,
                claim: None,
                checksums: None,
            };
            assert!(!run.is_due(999) && run.is_due(1000));
            break_off(&mut run.fold);
            assert!(run.is_due(999));
        }
    }

    /// A read that comes back short asks the layer's file again.
    #[test]
    fn a_layer_that_was_folded_away_stays_until_the_newest_request_of_then_has_ended() {
        let (mut gone, mut requests) = (GoneLayers::default(), Requests::default());
        let read = |requests: &mut Requests| {
            let header = Header::request(OpCode::Read, 1, 0, 4096, Default::default());
            let id = requests.add(ConnId(1), header, Payload::default());
            requests.get(id).job = Some(Job::Read(Extent::new(0, 4096)));
            id
        };
        let (older, newest) = (read(&mut requests), read(&mut requests));
        gone.add(LayerNo(3), &requests);
        requests.remove(older);
        assert_eq!(gone.take_unread(&requests), None, "the newest request may still read it");
        requests.remove(newest);
        read(&mut requests);
        assert_eq!(gone.take_unread(&requests), Some(LayerNo(3)), "what began later does not");
        assert_eq!(gone.take_unread(&requests), None);
    }
}
