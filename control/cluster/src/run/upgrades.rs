//! Volumes that change to the managers' image by themselves (`crate::plan::automatic_upgrade`).

use std::sync::Arc;
use std::time::Duration;

use kube::core::object::HasSpec;

use super::Context;
use super::desk::Done;
use super::lead::Lead;
use super::queue::Outcome;
use crate::plan::automatic_upgrade::{Observed, plan};

/// How often it is looked whether another one may change. That costs no request.
const ROUND: Duration = Duration::from_secs(5);

/// Looks at all volumes.
pub(super) async fn look(context: &Context, lead: &Lead) -> Done<Outcome> {
    let (image, limit) = (context.options.image.as_str(), context.cache.settings().upgrades_at_once());
    if limit == 0 {
        return Ok(Outcome::Done);
    }
    let images = context.cache.engine_images.all();
    let is_deployed = |status: &crate::api::EngineImageStatus| status.state == super::programs::DEPLOYED;
    let is_everywhere =
        images.iter().any(|i| i.spec.image == image && i.status.as_ref().is_some_and(is_deployed));
    if is_everywhere {
        let volumes = lead.cache.volumes.all();
        let chosen =
            plan(&Observed { volumes: &volumes.iter().map(Arc::as_ref).collect::<Vec<_>>(), image, limit });
        for volume in chosen.iter().filter_map(|name| lead.cache.volumes.get(name)) {
            let mut spec = volume.spec.clone();
            image.clone_into(&mut spec.image);
            context.desk.set_spec(volume.as_ref(), volume.spec(), &spec).await?;
        }
    }
    Ok(Outcome::Again(ROUND))
}
