//! Answers requests to trim volumes' file systems (`crate::plan::trim`): by the CSI driver of this node, which sees where they
//! are mounted.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use super::Context;
use super::desk::{Done, ReconcileError, is_missing};
use super::lead::Lead;
use super::queue::Outcome;
use super::snapshots::wanted_by_clones;
use crate::agent::AgentError;
use crate::api::{Snapshot, Volume};
use crate::plan::snapshot::FOR_CLONE;
use crate::plan::trim::{Answer, Removed, Step, Told, answer, pending, removable, removes_snapshots, step};
use crate::plan::volume::pair;

/// How often a file system that is being trimmed is asked after.
const LOOK: Duration = Duration::from_secs(2);

/// How often an answer is written again that somebody else's write came before.
const WRITES: usize = 10;

/// Looks at a volume's request, if there is one.
pub(super) async fn look(context: &Context, lead: Option<&Lead>, name: &str) -> Done<Outcome> {
    let (here, own) = (context.options.node.as_str(), context.cache.volumes.get(name));
    let here = own.is_some().then_some(here);
    let Some(volume) = own.or_else(|| lead.and_then(|lead| lead.cache.volumes.get(name))) else {
        return Ok(Outcome::Done);
    };
    let Some(request) = pending(&volume).filter(|_| volume.metadata.deletion_timestamp.is_none()) else {
        return Ok(Outcome::Done);
    };
    let answer = match step(&volume, request, here) {
        Step::Wait => return Ok(Outcome::Done),
        Step::Answer(answer) => answer,
        Step::Ask => {
            let told = match context.agent.trim(name, request).await {
                Ok(state) => Told::State(state),
                Err(
                    AgentError::Unbuilt(why)
                    | AgentError::NoRoom(why)
                    | AgentError::NotFrozen(why)
                    | AgentError::Failed(why),
                ) => Told::Refused(why),
                Err(e @ (AgentError::Away(_) | AgentError::DriverAway(_) | AgentError::Late(..))) => {
                    Told::Away(e.to_string())
                }
            };
            let Some(mut answer) = answer(&told, request, context.desk.now()) else {
                return Ok(Outcome::Again(LOOK));
            };
            if answer.is_done() && removes_snapshots(&volume, &context.cache.settings()) {
                answer.with_removed(&remove_snapshots(context, &volume).await?);
            }
            answer
        }
    };
    write(context, &volume, request, &answer).await?;
    context.desk.tell(volume.as_ref(), &answer.event()).await;
    Ok(Outcome::Done)
}

/// Removes the snapshots that go with what was trimmed.
async fn remove_snapshots(context: &Context, volume: &Volume) -> Done<Removed> {
    let stay = |why: &str| Ok(Removed { names: Vec::new(), trouble: why.to_owned() });
    let name = volume.name_any();
    let engines = context.cache.engines.of(&name);
    let Some(engine) = pair(volume, engines.iter().map(Arc::as_ref)).0.map(ResourceExt::name_any) else {
        return stay("the volume has no engine");
    };
    // As it is now: a revert may have put another snapshot behind the head since the engine's resource was written.
    let Some(layers) = context.agent.engine(&engine).await.and_then(|view| view.chain) else {
        return stay("the engine does not tell what there is");
    };
    let resources = context.cache.snapshots.of(&name);
    let mut in_use = wanted_by_clones(context, &name).await?;
    in_use.extend(resources.iter().filter(|s| s.labels().contains_key(FOR_CLONE)).map(|s| s.name_any()));
    let mut removed = Removed::default();
    for snapshot in removable(&layers, &in_use) {
        // One with a resource goes by it, so that nothing is left that promises what is gone.
        if resources.iter().any(|s| s.name_any() == snapshot) {
            context.desk.delete::<Snapshot>(&snapshot).await?;
        } else if let Err(e) = context.agent.remove_snapshot(&engine, &snapshot).await {
            removed.trouble = format!("{snapshot}: {e}");
            break;
        }
        removed.names.push(snapshot);
    }
    Ok(removed)
}

/// Writes an answer beside whatever else is written: what was done is not done again for a write that came in between.
async fn write(context: &Context, volume: &Volume, request: &str, answer: &Answer) -> Done {
    let (desk, name) = (&context.desk, volume.name_any());
    let mut last = ReconcileError::Stale;
    for _ in 0..WRITES {
        let fresh = match desk.api::<Volume>().get(&name).await {
            Err(e) if is_missing(&e) => return Ok(()),
            other => other?,
        };
        let old = fresh.status.clone().unwrap_or_default();
        let mut new = old.clone();
        answer.write(request, &mut new.conditions, desk.now());
        match desk.set_status::<Volume, _>(&name, fresh.resource_version().as_deref(), &old, &new).await {
            Err(e @ ReconcileError::Stale) => last = e,
            other => return other,
        }
    }
    Err(last)
}
