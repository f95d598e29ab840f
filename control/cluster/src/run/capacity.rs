//! Whether the scheduler heeds how much room a node has: the CSIDriver object says so, as the setting
//! csi-storage-capacity-tracking does. The figures themselves the driver's provisioner publishes in any case.

use std::time::Duration;

use k8s_openapi::api::storage::v1::CSIDriver;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::Context;
use super::desk::Done;
use super::queue::Outcome;
use crate::api::DRIVER;

/// The setting.
pub(super) const SETTING: &str = "csi-storage-capacity-tracking";

/// How often an object that is not there is looked for: what is installed comes in any order.
const LOOK: Duration = Duration::from_secs(60);

/// Has the CSIDriver object say what the setting says. Whoever installs leaves that field alone.
pub(super) async fn look(context: &Context) -> Done<Outcome> {
    let wanted = context.cache.settings().tracks_capacity();
    let api: Api<CSIDriver> = Api::all(context.desk.client.clone());
    let Some(driver) = api.get_opt(DRIVER).await? else {
        // Kubernetes begins without.
        return Ok(if wanted { Outcome::Again(LOOK) } else { Outcome::Done });
    };
    if driver.spec.storage_capacity.unwrap_or_default() != wanted {
        let change = json!({ "spec": { "storageCapacity": wanted } });
        api.patch(DRIVER, &PatchParams::default(), &Patch::Merge(change)).await?;
        tracing::info!(wanted, "whether the scheduler heeds the room that nodes have");
    }
    Ok(Outcome::Done)
}
