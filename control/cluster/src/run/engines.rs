//! The engines of this node: their processes, and what is said of them (`crate::plan::engine`).

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use kube::ResourceExt;
use kube::api::ListParams;
use lh_block::Generation;
use tokio::time::Instant;

use super::cache::instance_manager;
use super::desk::{Desk, Done, ReconcileError};
use super::key::lay_key;
use super::processes::{SOON, engines_of, resource_of, tell_failure};
use super::queue::Outcome;
use super::{Context, authority, programs};
use crate::agent::{AgentError, EngineStart, EngineView, Part, RebuildLimits};
use crate::api::{DesireState, Engine, EngineSpec, Quorum, Replica, Volume};
use crate::plan::served::may_begin_with;
use crate::plan::upgrade::{Images, target};
use crate::plan::{Event, engine, volume_of_engine, written};

/// How often something that others have to finish first is looked at.
const LATER: Duration = Duration::from_secs(10);

/// A layer that has not grown for so long rests: its size is told to the byte then.
const RESTS: Duration = Duration::from_secs(60);

/// How large the layers of this node's engines were when they were asked last, and since when, by the engine's name.
#[derive(Debug, Default)]
pub(super) struct Sizes(BTreeMap<String, (Vec<u64>, Instant)>);

impl Sizes {
    /// True if the layers of an engine have not changed for a while.
    fn rest(&mut self, engine: &str, view: Option<&EngineView>, now: Instant) -> bool {
        let Some(chain) = view.and_then(|view| view.chain.as_ref()) else {
            self.0.remove(engine);
            return false;
        };
        let sizes: Vec<u64> = chain.iter().map(|layer| layer.allocated).collect();
        let known = self.0.entry(engine.to_owned()).or_insert_with(|| (sizes.clone(), now));
        if known.0 != sizes {
            *known = (sizes, now);
        }
        now.saturating_duration_since(known.1) >= RESTS
    }
}

fn sizes_rest(context: &Context, engine: &str, view: Option<&EngineView>) -> bool {
    context.sizes.lock().unwrap_or_else(PoisonError::into_inner).rest(engine, view, Instant::now())
}

/// Looks at an engine.
pub(super) async fn look(context: &Context, name: &str) -> Done<Outcome> {
    match look_at_engine(context, name).await {
        // This node was cut off while its engine was replaced, and has not heard of that yet.
        Err(e) if e.is_of_nothing() && context.desk.api::<Engine>().get_opt(name).await?.is_none() => {
            end_what_was_left(context, name).await
        }
        looked => looked,
    }
}

async fn look_at_engine(context: &Context, name: &str) -> Done<Outcome> {
    let (cache, here) = (&context.cache, context.options.node.as_str());
    let Some(resource) = resource_of(context, &cache.engines, name).await? else {
        sizes_rest(context, name, None);
        return end_what_was_left(context, name).await;
    };
    let process = context.agent.process(name).await?;
    let process = process.as_ref();
    let view = match process {
        Some(_) => context.agent.engine(name).await,
        None => None,
    };
    let known = resource.status.clone().unwrap_or_default();
    let images =
        Images { wanted: &resource.spec.image, current: &known.current_image, failed: &known.failed_image };
    let spec = EngineSpec { image: target(images).to_owned(), ..resource.spec.clone() };
    let actions = engine::plan(&engine::Observed {
        engine: &resource,
        node: here,
        instance_manager: &instance_manager(here),
        process,
        programs: programs::of_process(context, images, process).await,
        view: view.as_ref(),
        rebuild_limits: rebuild_limits(context, &resource.spec.volume_name),
        rests: sizes_rest(context, name, view.as_ref()),
        relay_address: &process.map(|p| context.agent.relay_address(name, p)).unwrap_or_default(),
        now: context.desk.now(),
    });
    let mut outcome = Outcome::Done;
    let mut version = resource.resource_version();
    let (mut refusal, mut failure) = (None, None);
    let mut stay = known.stay;
    for action in actions {
        tracing::debug!(engine = name, ?action, "engine");
        match action {
            engine::Action::Start => failure = start_engine(context, name, &spec, &stay).await.err(),
            engine::Action::TakeOver => failure = take_over(context, name, &spec, &stay).await.err(),
            engine::Action::Exchange(image) => exchange(context, name, &spec, image, &stay).await?,
            engine::Action::Stop => context.agent.stop(name).await?,
            engine::Action::AddReplica { name: replica, address } => {
                refusal = context.agent.add_replica(name, &replica, &address).await.err().or(refusal);
            }
            engine::Action::RemoveReplica { name: replica, .. } => {
                refusal = remove_replica(context, &resource, &replica).await.err().or(refusal);
            }
            engine::Action::Expand(size) => {
                if let Err(e) = context.agent.expand(name, size).await {
                    version = say_not_expanded(context, &resource, version, &e).await?;
                }
            }
            engine::Action::LimitSnapshots(limits) => {
                refusal = context.agent.limit_snapshots(name, limits).await.err().or(refusal);
            }
            engine::Action::LimitRebuilds(limits) => {
                refusal = context.agent.limit_rebuilds(name, limits).await.err().or(refusal);
            }
            engine::Action::SetStatus(status) => {
                let old = resource.status.clone().unwrap_or_default();
                let done =
                    context.desk.set_status::<Engine, _>(name, version.as_deref(), &old, &*status).await;
                done?;
                // What follows is written on top of it, or not at all.
                version = None;
                stay = status.stay;
            }
            engine::Action::Tell(event) => context.desk.tell(resource.as_ref(), &event).await,
            engine::Action::LookAgain(after) => outcome = Outcome::Again(after),
        }
    }
    if let Some(e) = failure {
        tell_failure(context, resource.as_ref(), &e).await;
        return Err(e);
    }
    if let Some(e) = refusal {
        tracing::warn!(engine = name, error = %e, "the engine has not yet the replicas or the limits that it should have");
    }
    let wanted = process.is_some() || resource.spec.desire_state == DesireState::Running;
    let on_its_way = resource.spec.node_id == here && view.as_ref().map_or(wanted, |v| !v.up);
    Ok(if on_its_way && outcome == Outcome::Done { Outcome::Again(SOON) } else { outcome })
}

async fn remove_replica(context: &Context, engine: &Engine, replica: &str) -> Result<(), AgentError> {
    let removed = context.agent.remove_replica(&engine.name_any(), replica).await;
    if let Err(why) = &removed {
        tell_kept(context, engine, replica, why).await;
    }
    removed
}

/// Tells people why a replica stays that is not needed any more, or was deleted: what the engine has of it is not seen elsewhere.
async fn tell_kept(context: &Context, engine: &Engine, replica: &str, why: &AgentError) {
    let AgentError::Failed(why) = why else { return };
    let decides = engine.spec.quorum == Quorum::Majority;
    let advice = "with the quorum majority more than half of its replicas have to hold everything without it; of two neither \
                  goes while the volume is attached: detach it, and delete the Replica then";
    let message = match decides {
        true => format!("replica {replica} is to go, and the engine keeps it: {why} ({advice})"),
        false => format!("replica {replica} is to go, and the engine keeps it: {why}"),
    };
    context.desk.remind(engine, &Event { warning: true, reason: "ReplicaKept", message }).await;
}

/// How a volume's rebuilds are held back: by its own words, or the settings'. `None` for one that is not to be here.
fn rebuild_limits(context: &Context, volume: &str) -> Option<RebuildLimits> {
    let volume = context.cache.volumes.get(volume)?;
    let settings = context.cache.settings();
    Some(RebuildLimits {
        bytes_per_second: settings.rebuild_rate(volume.spec.replica_rebuilding_bandwidth_limit),
        at_once: settings.rebuild_concurrency(volume.spec.rebuild_concurrent_sync_limit),
    })
}

/// Ends an engine that no resource names, if its volume has another one, or goes: its node was silent when a migration
/// ended, or when the volume was deleted. One that is none of this manager's is left alone.
async fn end_what_was_left(context: &Context, name: &str) -> Done<Outcome> {
    let Some(volume) = volume_of_engine(name).filter(|_| context.is_own_engine(name)) else {
        return Ok(Outcome::Done);
    };
    let has_other = !engines_of(&context.desk, volume).await?.is_empty();
    let found = context.desk.api::<Volume>().get_opt(volume).await?;
    if !has_other && found.is_some_and(|volume| volume.metadata.deletion_timestamp.is_none()) {
        // It is about to be deleted, or to have another engine.
        return Ok(Outcome::Again(LATER));
    }
    tracing::info!(engine = name, has_other, "what was left of the volume here is ended");
    context.agent.stop(name).await?;
    Ok(Outcome::Again(SOON))
}

/// Notes why an expansion did not begin. Gives back the version to go on from.
async fn say_not_expanded(
    context: &Context,
    resource: &Engine,
    version: Option<String>,
    why: &AgentError,
) -> Done<Option<String>> {
    let old = resource.status.clone().unwrap_or_default();
    if old.last_expansion_error == why.to_string() {
        return Ok(version);
    }
    let mut new = old.clone();
    new.last_expansion_error = why.to_string();
    new.last_expansion_failed_at = written(context.desk.now());
    context.desk.set_status::<Engine, _>(&resource.name_any(), None, &old, &new).await?;
    Ok(None)
}

/// Starts an engine, or a relay.
async fn start_engine(context: &Context, name: &str, spec: &EngineSpec, stay: &str) -> Done {
    lay_key(context, &spec.volume_name).await?;
    let generation = number(&context.desk, &context.options.node, spec).await?;
    tracing::info!(engine = name, %generation, relay_from = spec.relay_from, "engine starts");
    Ok(context.agent.start_engine(EngineStart { name, spec, generation, stay }).await?)
}

/// Has an engine's process run another image's program.
async fn exchange(context: &Context, name: &str, spec: &EngineSpec, image: String, stay: &str) -> Done {
    tracing::info!(engine = name, image, "the engine's program is exchanged");
    let spec = EngineSpec { image, ..spec.clone() };
    let start = EngineStart { name, spec: &spec, generation: Generation::default(), stay };
    Ok(context.agent.exchange(name, Part::Engine(start)).await?)
}

/// Has an engine take a relay's place.
async fn take_over(context: &Context, name: &str, spec: &EngineSpec, stay: &str) -> Done {
    let generation = number(&context.desk, &context.options.node, spec).await?;
    tracing::info!(engine = name, %generation, relay_from = spec.relay_from, "engine takes a relay's place");
    Ok(context.agent.take_over(EngineStart { name, spec, generation, stay }).await?)
}

/// A new generation for an engine: above everything that the volume issued and its replicas have seen. A relay needs none.
async fn number(desk: &Desk, here: &str, spec: &EngineSpec) -> Done<Generation> {
    if spec.relays() {
        return Ok(Generation::default());
    }
    let volume = &spec.volume_name;
    let of_volume = ListParams::default().fields(&format!("spec.volumeName={volume}"));
    // With an authority that keeps epochs what was true a moment ago is enough.
    let of_volume = if spec.quorum == Quorum::Any { of_volume.match_any() } else { of_volume };
    let replicas = desk.api::<Replica>().list(&of_volume).await?;
    if !may_begin_with(spec, &replicas.items) {
        return Err(ReconcileError::NotYet(format!(
            "volume {volume} is not begun with replicas none of which was ever in sync, while others were: look at its Replica resources, \
             at those that are being deleted, too"
        )));
    }
    let told = replicas.items.iter().filter_map(|r| r.status.as_ref()?.generation).map(|g| g.0);
    let seen = told.max().unwrap_or(Generation::default());
    authority::issue_generation(desk, volume, here, seen).await
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;
    use crate::api::{ReplicaSpec, VolumeSpec};

    /// An API server that has a volume on this node, and two replicas of which one was in sync and is being deleted.
    fn with_a_kept_replica() -> Desk {
        let replica = |name: &str, healthy_at: &str| {
            let spec = ReplicaSpec { healthy_at: healthy_at.into(), ..ReplicaSpec::default() };
            let mut replica = Replica::new(name, spec);
            let time = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
            replica.metadata.deletion_timestamp = (!healthy_at.is_empty()).then(|| time.into());
            replica
        };
        let replicas = [replica("full", "2026-01-01T00:00:00Z"), replica("empty", "")];
        let volume = Volume::new("demo", VolumeSpec { node_id: "n1".into(), ..VolumeSpec::default() });
        let answers = (json!(volume), json!({ "metadata": {}, "items": replicas }));
        let server = tower::service_fn(move |request: Request<Body>| {
            let is_list = request.uri().path().ends_with("/replicas");
            let answer = if is_list { &answers.1 } else { &answers.0 };
            let body = Body::from(answer.to_string().into_bytes());
            async move { Ok::<_, Infallible>(Response::new(body)) }
        });
        let client = kube::Client::new(server, "longhorn-system");
        Desk::new(client.into(), "longhorn-system", "n1", super::super::Clock::default())
    }

    /// Seen: the last one in sync was deleted, and kept; the engine that did without it died, and another one was started in its place
    /// with what was about to be filled.
    #[tokio::test]
    async fn no_volume_begins_anew_beside_a_replica_that_is_kept() {
        let desk = with_a_kept_replica();
        let told = |quorum, names: &[&str]| EngineSpec {
            volume_name: "demo".into(),
            quorum,
            replica_address_map: names.iter().map(|n| ((*n).to_owned(), format!("tcp:{n}"))).collect(),
            ..EngineSpec::default()
        };
        for quorum in [Quorum::Majority, Quorum::Unsafe] {
            let refused = number(&desk, "n1", &told(quorum, &["empty"])).await;
            assert!(matches!(refused, Err(ReconcileError::NotYet(why)) if why.contains("ever in sync")));
            assert!(number(&desk, "n1", &told(quorum, &["empty", "full"])).await.is_ok());
        }
        assert!(
            number(&desk, "n1", &told(Quorum::Any, &["empty"])).await.is_ok(),
            "the authority has its epoch"
        );
    }
}
