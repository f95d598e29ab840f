//! The Volume resource as the authority over who may write: generations and epochs, each by compare-and-swap
//! (`docs/invariants.md`, 2 and 12).
//!
//! The API server's copy is read and written every time, never the cache: what is decided here holds only against what
//! is stored. A write names the version that was read, so that of two writers one is refused and reads again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use control::authority::{LINE_MAX, Question, Reply};
use control::transport::{BREATH, bind_private};
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use lh_block::{Epoch, Generation};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::desk::{Desk, Done, ReconcileError};
use crate::api::{Engine, EpochRecord, GenerationText, Quorum, Replica, Volume};
use crate::plan::served::tells_epochs;

/// How often a write is tried again after another writer was faster.
const TRIES: usize = 8;

/// Questions that are answered at once. Each node has some hundred engines at most, and each asks one at a time.
const AT_ONCE: usize = 64;

/// How long an engine may take to ask once it is there: one that was stopped keeps its place from the others no longer.
const QUESTION_PATIENCE: Duration = Duration::from_secs(10);

/// What to do with a wish to store an epoch.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// It is stored already: the answer to an earlier wish was lost.
    Already,
    /// Another epoch is stored than the one to be replaced.
    Conflict,
    /// Write it.
    Write,
}

fn judge(stored: Option<&Epoch>, expected: Option<(Generation, u64)>, new: &Epoch) -> Verdict {
    if stored == Some(new) {
        return Verdict::Already;
    }
    let order = stored.map(Epoch::order);
    if order != expected || order.is_some_and(|order| new.order() <= order) {
        return Verdict::Conflict;
    }
    Verdict::Write
}

fn epoch_of(volume: &Volume) -> Result<Option<Epoch>, String> {
    let record = volume.status.as_ref().and_then(|s| s.epoch.as_ref());
    record.map(EpochRecord::to_epoch).transpose()
}

/// The next generation of a volume: above everything issued and above everything that a replica has seen. For nobody but the
/// node that the volume should be on: one given out in vain would shut out the engine that is wanted.
fn next_generation(volume: &Volume, node: &str, seen: Generation) -> Result<Generation, String> {
    let name = volume.name_any();
    if volume.spec.node_id != node {
        return Err(format!("volume {name} is not to be on node {node}"));
    }
    let issued = volume.status.as_ref().and_then(|s| s.generation).map(|g| g.0).unwrap_or_default();
    let highest = issued.max(seen);
    if highest.attachment == u32::MAX {
        return Err(format!("volume {name} has no generation left above {highest}"));
    }
    Ok(highest.next_attachment())
}

/// A new generation, stored before it is given out.
pub(super) async fn issue_generation(
    desk: &Desk,
    volume: &str,
    node: &str,
    seen: Generation,
) -> Done<Generation> {
    let api = desk.api::<Volume>();
    for _ in 0..TRIES {
        let read = api.get(volume).await?;
        let generation = next_generation(&read, node, seen).map_err(ReconcileError::NotYet)?;
        let patch = json!({
            "metadata": { "resourceVersion": read.resource_version() },
            "status": { "generation": GenerationText(generation) },
        });
        match api.patch_status(volume, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => return Ok(generation),
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(e) => return Err(e.into()),
        }
    }
    Err(ReconcileError::Stale)
}

/// The replicas of a volume, as the API server has them now.
async fn replicas_of(desk: &Desk, volume: &str) -> kube::Result<Vec<Replica>> {
    let of_volume = ListParams::default().fields(&format!("spec.volumeName={volume}"));
    Ok(desk.api::<Replica>().list(&of_volume).await?.items)
}

/// What becomes of an epoch's members, worst first. The data of one that is deleted may go because others hold everything; once an epoch
/// counted without those, nothing could begin the volume any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outlook {
    /// The data of none stays.
    Lost,
    /// One is deleted, and its data there still: it goes after the volume tells of it ([`super::replicas`]).
    Kept,
    /// One stays.
    Stays,
}

/// By the volume as it is, and its replicas as they were read after it.
fn outlook(epoch: &Epoch, volume: &Volume, replicas: &[Replica]) -> Outlook {
    let removed = volume.status.as_ref().map_or(&[][..], |status| &status.data_removed_of);
    let of = |replica: &Replica| match &replica.metadata.deletion_timestamp {
        None => Outlook::Stays,
        Some(_) if replica.uid().is_some_and(|uid| removed.contains(&uid)) => Outlook::Lost,
        Some(_) => Outlook::Kept,
    };
    let members = replicas.iter().filter(|r| epoch.members.contains(&r.name_any()));
    members.map(of).max().unwrap_or(Outlook::Lost)
}

async fn load(desk: &Desk, volume: &str) -> Reply {
    match desk.api::<Volume>().get(volume).await {
        Ok(read) => epoch_of(&read).map_or_else(Reply::Unavailable, Reply::Counts),
        Err(e) => Reply::Unavailable(e.to_string()),
    }
}

async fn store(desk: &Desk, volume: &str, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Reply {
    let api = desk.api::<Volume>();
    for _ in 0..TRIES {
        let read = match api.get(volume).await {
            Ok(read) => read,
            Err(e) => return Reply::Unavailable(e.to_string()),
        };
        let stored = match epoch_of(&read) {
            Ok(stored) => stored,
            Err(e) => return Reply::Unavailable(e),
        };
        match judge(stored.as_ref(), expected, epoch) {
            Verdict::Already => return Reply::Stored,
            Verdict::Conflict => return Reply::Conflict(stored),
            Verdict::Write => {}
        }
        match replicas_of(desk, volume).await {
            // Asked for again after its time: an engine that was out of reach has not heard what is removed meanwhile.
            Ok(replicas)
                if stored
                    .as_ref()
                    .is_some_and(|s| outlook(epoch, &read, &replicas) < outlook(s, &read, &replicas)) =>
            {
                return Reply::Conflict(stored);
            }
            Ok(_) => {}
            Err(e) => return Reply::Unavailable(e.to_string()),
        }
        let patch = json!({
            "metadata": { "resourceVersion": read.resource_version() },
            "status": { "epoch": EpochRecord::from(epoch) },
        });
        match api.patch_status(volume, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => return Reply::Stored,
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(e) => return Reply::Unavailable(e.to_string()),
        }
    }
    Reply::Unavailable("other writers of the volume were faster; ask again".to_owned())
}

/// The replicas that an engine without epochs begins with: those of its own that hold everything, as their resources say. Where a majority
/// decides, all that may tell epochs: the engine judges by these, and counts whom it is told of. While none of the volume was ever in sync, one
/// is as good as another.
fn to_begin_with(engine: &Engine, replicas: &[Replica]) -> Vec<(String, String)> {
    let is_blank = replicas.iter().all(|r| r.spec.healthy_at.is_empty());
    let decides = engine.spec.quorum == Quorum::Majority;
    let counts = |r: &Replica| {
        let is_in_sync = !r.spec.healthy_at.is_empty() && r.spec.failed_at.is_empty();
        is_blank || is_in_sync || decides && tells_epochs(r)
    };
    let is_to_begin = |name: &&String| replicas.iter().find(|r| r.name_any() == **name).is_some_and(counts);
    let told = engine.spec.replica_address_map.iter().filter(|(name, _)| is_to_begin(name));
    told.map(|(name, address)| (name.clone(), address.clone())).collect()
}

/// What such an engine was told at its first start may be old: replicas have come, gone and failed since.
async fn begin(desk: &Desk, engine: &str) -> Reply {
    let asked = async {
        let engine = desk.api::<Engine>().get(engine).await?;
        let replicas = replicas_of(desk, &engine.spec.volume_name).await?;
        Ok::<_, kube::Error>(to_begin_with(&engine, &replicas))
    };
    match asked.await {
        Ok(found) if found.is_empty() => {
            let why = "none of its replicas holds everything: look at their conditions and failedAt";
            Reply::Unavailable(why.to_owned())
        }
        Ok(found) => Reply::Begin(found),
        Err(e) => Reply::Unavailable(e.to_string()),
    }
}

/// Answers the engines of this node for ever.
///
/// # Errors
/// The socket cannot be bound.
pub(super) async fn serve(desk: Desk, socket: &Path) -> std::io::Result<()> {
    answer_all(desk, bind_private(socket)?, QUESTION_PATIENCE).await;
    Ok(())
}

async fn answer_all(desk: Desk, listener: UnixListener, patience: Duration) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Too many open files, for one, passes.
                tracing::warn!(error = %e, "no question of an engine was taken");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        // Only root opens the socket (0600); the peer is asked all the same, as everywhere.
        let own = rustix::process::geteuid().as_raw();
        let peer = stream.peer_cred().map(|c| c.uid());
        if !peer.is_ok_and(|uid| uid == 0 || uid == own) {
            continue;
        }
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let desk = desk.clone();
        tokio::spawn(async move {
            if let Err(e) = answer(&desk, stream, patience).await {
                tracing::debug!(error = %e, "an engine's question was not answered");
            }
            drop(place);
        });
    }
}

async fn answer(desk: &Desk, stream: UnixStream, patience: Duration) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut read = BufReader::new(read.take(LINE_MAX));
    tokio::time::timeout(patience, read.read_line(&mut line)).await??;
    let reply = match serde_json::from_str(&line)? {
        Question::Load { volume } => load(desk, &volume).await,
        Question::Store { volume, expected, epoch } => store(desk, &volume, expected, &epoch).await,
        Question::Begin { engine } => begin(desk, &engine).await,
    };
    let mut bytes = serde_json::to_vec(&reply)?;
    bytes.push(b'\n');
    write.write_all(&bytes).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{EngineSpec, ReplicaSpec, ReplicaStatus, VolumeSpec, VolumeStatus};

    /// Says that there is no such volume, of whatever it is asked.
    fn empty() -> Desk {
        let nothing = tower::service_fn(|_| async {
            let text = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "code": 404, "reason": "NotFound", "message": "not found" });
            let body = kube::client::Body::from(text.to_string().into_bytes());
            Ok::<_, std::convert::Infallible>(http::Response::builder().status(404).body(body).unwrap())
        });
        let client = kube::Client::new(nothing, "longhorn-system");
        Desk::new(client.into(), "longhorn-system", "n1", super::super::Clock::default())
    }

    #[tokio::test]
    async fn engines_that_stop_before_they_ask_do_not_keep_the_others_out() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("authority.sock");
        let listener = bind_private(&socket).unwrap();
        tokio::spawn(answer_all(empty(), listener, Duration::from_secs(1)));
        let mut stopped = Vec::new();
        for _ in 0..AT_ONCE {
            let mut stream = UnixStream::connect(&socket).await.unwrap();
            stream.write_all(b"{").await.unwrap();
            stopped.push(stream);
        }
        let mut asks = UnixStream::connect(&socket).await.unwrap();
        let question = serde_json::to_string(&Question::Load { volume: "demo".into() }).unwrap();
        asks.write_all(format!("{question}\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        let heard = asks.read_to_string(&mut answer);
        tokio::time::timeout(Duration::from_secs(60), heard).await.expect("it is heard").unwrap();
        assert!(answer.contains("not found"), "{answer}");
    }

    fn epoch(attachment: u32, counter: u64) -> Epoch {
        let generation = Generation { attachment, restart: 0 };
        Epoch { generation, counter, members: vec!["a".into()], ..Epoch::default() }
    }

    #[test]
    fn a_generation_is_above_all_others_and_only_for_the_node_of_the_volume() {
        let of = |attachment, restart| Generation { attachment, restart };
        let volume = |issued: Option<Generation>| {
            let spec = VolumeSpec { node_id: "n1".into(), ..VolumeSpec::default() };
            let status = VolumeStatus { generation: issued.map(GenerationText), ..VolumeStatus::default() };
            Volume { status: Some(status), ..Volume::new("demo", spec) }
        };
        let cases = [
            (None, of(0, 0), Ok(of(1, 0))),
            (Some(of(3, 0)), of(0, 0), Ok(of(4, 0))),
            (Some(of(3, 0)), of(7, 2), Ok(of(8, 0))),
            (Some(of(u32::MAX, 0)), of(0, 0), Err("no generation left")),
        ];
        for (issued, seen, expected) in cases {
            let got = next_generation(&volume(issued), "n1", seen);
            match expected {
                Ok(generation) => assert_eq!(got, Ok(generation)),
                Err(why) => assert!(got.unwrap_err().contains(why)),
            }
        }
        let refused = next_generation(&volume(None), "n2", of(0, 0)).unwrap_err();
        assert!(refused.contains("not to be on node n2"), "{refused}");
    }

    #[test]
    fn an_epoch_replaces_exactly_the_one_that_its_maker_knew() {
        let (first, old, new) = (epoch(1, 1), epoch(1, 2), epoch(2, 1));
        let cases = [
            ("the first of all", None, None, &first, Verdict::Write),
            ("the first, but one is there", Some(&first), None, &new, Verdict::Conflict),
            ("the next", Some(&first), Some(first.order()), &old, Verdict::Write),
            ("a newer engine's", Some(&first), Some(first.order()), &new, Verdict::Write),
            ("an older engine's, too late", Some(&new), Some(first.order()), &old, Verdict::Conflict),
            ("said again", Some(&new), Some(first.order()), &new, Verdict::Already),
            ("backwards", Some(&new), Some(new.order()), &old, Verdict::Conflict),
            ("lost at the authority", None, Some(first.order()), &old, Verdict::Conflict),
        ];
        for (what, stored, expected, epoch, verdict) in cases {
            assert_eq!(judge(stored, expected, epoch), verdict, "{what}");
        }
    }

    /// An API server that has these, and notes what is written.
    fn with(
        volume: &Volume,
        replicas: &[Replica],
        written: &Arc<std::sync::Mutex<Vec<serde_json::Value>>>,
    ) -> Desk {
        let answers = (json!(volume), json!({ "metadata": {}, "items": replicas }));
        let written = Arc::clone(written);
        let server = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (answers, written) = (answers.clone(), Arc::clone(&written));
            async move {
                let is_list = request.uri().path().ends_with("/replicas");
                if request.method() == http::Method::PATCH {
                    let bytes = request.into_body().collect_bytes().await.unwrap();
                    written.lock().unwrap().push(serde_json::from_slice(&bytes).unwrap());
                }
                let text = if is_list { answers.1 } else { answers.0 }.to_string();
                Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(
                    text.into_bytes(),
                )))
            }
        });
        let client = kube::Client::new(server, "longhorn-system");
        Desk::new(client.into(), "longhorn-system", "n1", super::super::Clock::default())
    }

    /// Seen: an engine that lost a member while its manager was away asked for an epoch without that one, and was heard minutes later,
    /// when the last one it had left was deleted and about to be removed, since the first one was a member.
    #[tokio::test]
    async fn an_epoch_whose_members_are_all_deleted_does_not_count() {
        let old = Epoch { members: vec!["a".into(), "b".into()], ..epoch(1, 1) };
        let new = Epoch { members: vec!["b".into()], ..epoch(1, 2) };
        let volume = |removed: &str| {
            let data_removed_of = removed.split_terminator(", ").map(str::to_owned).collect();
            let epoch = Some(EpochRecord::from(&old));
            let status = VolumeStatus { epoch, data_removed_of, ..VolumeStatus::default() };
            Volume { status: Some(status), ..Volume::new("demo", VolumeSpec::default()) }
        };
        let replica = |name: &str, is_deleted: bool| {
            let mut replica = Replica::new(name, ReplicaSpec::default());
            replica.metadata.uid = Some(format!("of {name}"));
            let time = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
            replica.metadata.deletion_timestamp = is_deleted.then(|| time.into());
            replica
        };
        let cases = [
            ("b stays", "", vec![replica("a", true), replica("b", false)], true),
            ("b is deleted", "", vec![replica("a", false), replica("b", true)], false),
            ("b is gone", "of b", vec![replica("a", false)], false),
            ("both are deleted", "", vec![replica("a", true), replica("b", true)], true),
            ("a's data goes", "of a", vec![replica("a", true), replica("b", true)], true),
            (
                "b's data goes, and a was deleted since",
                "of b",
                vec![replica("a", true), replica("b", true)],
                false,
            ),
            (
                "b's data goes, and another's",
                "of b, of c",
                vec![replica("a", true), replica("b", true)],
                false,
            ),
            ("b is gone, and a was deleted since", "of b", vec![replica("a", true)], false),
            ("both are gone", "of b", vec![], true),
        ];
        for (what, removed, replicas, counts) in cases {
            let written = Arc::default();
            let desk = with(&volume(removed), &replicas, &written);
            let reply = store(&desk, "demo", Some(old.order()), &new).await;
            let expected = if counts { Reply::Stored } else { Reply::Conflict(Some(old.clone())) };
            assert_eq!(reply, expected, "{what}");
            assert_eq!(written.lock().unwrap().len(), usize::from(counts), "{what}");
        }
    }

    #[test]
    fn an_engine_without_epochs_begins_with_what_holds_everything_now() {
        let mut engine =
            Engine::new("demo-e-0", EngineSpec { volume_name: "demo".into(), ..EngineSpec::default() });
        for name in ["a", "b", "c", "d", "gone"] {
            engine.spec.replica_address_map.insert(name.into(), format!("tcp:{name}"));
        }
        let replica = |name: &str, healthy: &str, failed: &str| {
            let (healthy_at, failed_at) = (healthy.to_owned(), failed.to_owned());
            Replica::new(name, ReplicaSpec { healthy_at, failed_at, ..ReplicaSpec::default() })
        };
        let named = |replicas: &[Replica]| {
            to_begin_with(&engine, replicas).into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(" ")
        };
        let (then, later) = ("2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z");
        let mut replicas = [
            replica("a", then, ""),
            replica("b", then, later),
            replica("c", "", ""),
            replica("untold", then, ""),
        ];
        assert_eq!(
            named(&replicas),
            "a",
            "b has failed, c was never filled, and where the last is nobody knows"
        );
        replicas[1].spec.failed_at.clear();
        assert_eq!(named(&replicas), "a b");
        assert_eq!(to_begin_with(&engine, &replicas)[0], ("a".to_owned(), "tcp:a".to_owned()));
        replicas.iter_mut().for_each(|r| r.spec.healthy_at.clear());
        assert_eq!(named(&replicas), "a b c", "the volume was never served");
    }

    /// It has been told at its first start of those that there were then. Seen on paper: a volume of one replica that grew to three began
    /// with the first alone, which had been left out.
    #[test]
    fn an_engine_whose_majority_decides_begins_with_all_that_tell_epochs() {
        let spec = EngineSpec { quorum: Quorum::Majority, ..EngineSpec::default() };
        let mut engine = Engine::new("demo-e-0", spec);
        let replica = |name: &str, healthy: &str, failed: &str, epoch_recorded: bool| {
            let (healthy_at, failed_at) = (healthy.to_owned(), failed.to_owned());
            let status = ReplicaStatus { epoch_recorded, ..ReplicaStatus::default() };
            let spec = ReplicaSpec { healthy_at, failed_at, ..ReplicaSpec::default() };
            Replica { status: Some(status), ..Replica::new(name, spec) }
        };
        let (then, later) = ("2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z");
        let replicas = [
            replica("a", then, "", true),
            replica("b", then, later, true),
            replica("c", "", "", true),
            replica("filled", "", "", false),
            replica("longhorns", then, later, false),
        ];
        for name in ["a", "b", "c", "filled", "gone", "longhorns"] {
            engine.spec.replica_address_map.insert(name.into(), format!("tcp:{name}"));
        }
        let named: Vec<String> =
            to_begin_with(&engine, &replicas).into_iter().map(|(name, _)| name).collect();
        assert_eq!(named, ["a", "b", "c"]);
    }
}
