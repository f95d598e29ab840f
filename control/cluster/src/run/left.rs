//! Frees cordoned nodes of volumes that nobody uses there any more: the CSI driver's tickets are all that keeps them
//! (`crate::plan::drain::held`), and Kubernetes has no attachment that the driver would ever be asked to let go of. Somebody took that
//! away by force, or it was not restored with the rest. Kubernetes is asked only while a node waits to be drained.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use tokio::time::Instant;

use super::Context;
use super::desk::Done;
use super::lead::Lead;
use super::pods::claim_of;
use crate::kubernetes::{attached_to, persistent_volumes};
use crate::plan::Event;
use crate::plan::drain::{Held, NodeView, held};
use crate::plan::pods::{Claim, uses};

/// Looks at what keeps cordoned nodes from being drained.
pub(super) async fn look(context: &Context, lead: &Lead, nodes: &BTreeMap<String, NodeView>) -> Done {
    let (engines, attachments) = (lead.cache.engines.all(), lead.cache.attachments.all());
    let held = held(nodes, engines.iter().map(Arc::as_ref), attachments.iter().map(Arc::as_ref));
    let name = |h: &Held<'_>| (h.attachment.name_any(), h.ticket.to_owned());
    let seen = || lead.left.lock().unwrap_or_else(PoisonError::into_inner);
    seen().keep(&held.iter().map(name).collect());
    for one in held {
        if !seen().is_due(&name(&one), Instant::now()) {
            continue;
        }
        let is_used = is_used(context, &one).await?;
        if seen().note(name(&one), is_used, Instant::now()) {
            let_go(context, lead, &one).await?;
        }
    }
    Ok(())
}

/// True unless Kubernetes has such a volume, has it attached to that node no more, and has no pod there that mounts it.
async fn is_used(context: &Context, held: &Held<'_>) -> Done<bool> {
    let client = &context.desk.client;
    let volume = &held.attachment.spec.volume;
    let pods = ListParams::default().fields(&format!("spec.nodeName={}", held.node));
    // An attachment that is there costs one question, and it is there of nearly all.
    let there = attached_to(client, volume, &[(held.node, held.ticket)].into()).await?;
    if there.is_none_or(|nodes| nodes.contains(held.node)) {
        return Ok(true);
    }
    let volumes: Vec<PersistentVolume> = persistent_volumes(client, volume).await?;
    let claims = volumes.iter().filter_map(claim_of);
    let claims: Vec<Claim> = claims.map(|(namespace, name)| Claim { namespace, name, held: None }).collect();
    let pods = Api::<Pod>::all(client.clone()).list(&pods).await?.items;
    Ok(pods.iter().any(|pod| uses(pod, &claims)))
}

/// Takes the ticket off an attachment that is still as it was read.
async fn let_go(context: &Context, lead: &Lead, held: &Held<'_>) -> Done {
    let (attachment, node, ticket) = (held.attachment, held.node, held.ticket);
    let mut spec = attachment.spec.clone();
    spec.attachment_tickets.remove(ticket);
    context.desk.set_spec(attachment, &attachment.spec, &spec).await?;
    let volume = &attachment.spec.volume;
    tracing::warn!(volume, node, ticket, "what Kubernetes has no attachment for any more is let go");
    if let Some(resource) = lead.cache.volumes.get(volume) {
        let message = format!(
            "no pod uses the volume on node {node}, which is to be drained, and Kubernetes has no attachment there any more: ticket {ticket} is taken off"
        );
        context.desk.tell(resource.as_ref(), &Event { warning: true, reason: "TicketLeft", message }).await;
    }
    Ok(())
}
