//! A volume on a node: a ticket of this driver on the volume's attachment.

use std::collections::{BTreeSet, HashMap};

use kube::ResourceExt;
use lh_cluster::api::{
    AttachmentTicket, Condition, Conditions, DataLocality, Node, Replica, TicketType, Volume,
    VolumeAttachment, VolumeSpec, VolumeState,
};
use lh_cluster::plan::VOLUME_LABEL;
use lh_cluster::plan::served::was_never_served;
use lh_cluster::plan::volume::READY;

use super::ControllerService;
use super::growth::Growth;
use crate::capability::Use;
use crate::names::ticket_id;
use crate::proto::csi::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse,
};
use crate::refused::required;
use crate::{DRIVER, Refused};

/// The parameter of a ticket, and the entry of the publish context: nothing is written on that node.
pub(crate) const READ_ONLY: &str = "readonly";

impl ControllerService {
    pub(super) async fn controller_publish_volume(
        &self,
        request: ControllerPublishVolumeRequest,
    ) -> Result<ControllerPublishVolumeResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        let node = required("the node's id", &request.node_id)?;
        let used = Use::of(request.volume_capability.as_ref())?;
        let _held = self.guard.take(id)?;
        let volume = self.cluster.volume(id).await?;
        if volume.metadata.deletion_timestamp.is_some() {
            return Err(Refused::Missing(format!("volume {id} is being removed")));
        }
        if self.cluster.find::<Node>(node).await?.is_none() {
            return Err(Refused::Missing(format!("node {node} does not exist in nodes.longhorn.io")));
        }
        if used.moves {
            must_migrate(&volume.spec)?;
        }
        self.check_locality(&volume, node).await?;
        let read_only = request.readonly || used.read_only;
        let ticket = ticket_id(id, DRIVER, node);
        self.take_ticket(&volume, node, &ticket, (read_only, used.moves)).await?;
        let waited =
            self.cluster.wait::<VolumeAttachment, ()>(id, "the volume is being attached", |attachment| {
                is_attached(attachment, &ticket)
            });
        if let Err(e) = waited.await {
            return Err(self.with_reason(e, id, &ticket).await);
        }
        // What it has can be used: nobody is kept from it by bytes that it does not get.
        if let Growth::Failed(why) = self.wait_for_size(&volume, volume.spec.size.bytes()).await? {
            tracing::warn!(volume = id, node, error = %why, "published smaller than it should be");
        }
        let context: HashMap<String, String> = [(READ_ONLY.to_owned(), read_only.to_string())].into();
        Ok(ControllerPublishVolumeResponse { publish_context: context })
    }

    /// With what stands in the way of an attachment, as far as that can be read: whoever waits for a pod sees nothing else.
    async fn with_reason(&self, refused: Refused, id: &str, ticket: &str) -> Refused {
        let Refused::NotYet(mut text) = refused else { return refused };
        let mut add = |condition: Option<&Condition>| {
            if let Some(condition) = condition.filter(|c| !c.is_true() && !c.message.is_empty()) {
                text.push_str(": ");
                text.push_str(&condition.message);
            }
        };
        if let Ok(Some(VolumeAttachment { status: Some(status), .. })) = self.cluster.attachment(id).await {
            let of_ticket = status.attachment_ticket_statuses.get(ticket);
            add(of_ticket.and_then(|t| t.conditions.first()));
        }
        if let Ok(Some(Volume { status: Some(status), .. })) = self.cluster.find::<Volume>(id).await {
            add(status.conditions.get_condition(READY));
        }
        Refused::NotYet(text)
    }

    /// Refuses a node without the replica of a volume that is used where that is alone: it would never be attached there.
    async fn check_locality(&self, volume: &Volume, node: &str) -> Result<(), Refused> {
        if volume.spec.data_locality != DataLocality::StrictLocal {
            return Ok(());
        }
        let id = volume.name_any();
        let replicas = self.cluster.all::<Replica>(Some(&format!("{VOLUME_LABEL}={id}"))).await?;
        // One that was never used goes where it is used first, whatever was made for it elsewhere.
        if was_never_served(volume, &replicas) {
            return Ok(());
        }
        let sound = replicas
            .iter()
            .filter(|r| r.metadata.deletion_timestamp.is_none() && r.spec.failed_at.is_empty());
        let nodes: Vec<&str> = sound.map(|r| r.spec.node_id.as_str()).collect();
        match nodes.first() {
            Some(there) if !nodes.contains(&node) => Err(Refused::Precondition(format!(
                "volume {id} is strict-local and its replica is on node {there}: have the pod run there, or change dataLocality while the volume is detached"
            ))),
            _ => Ok(()),
        }
    }

    /// Asks for the volume on the node, unless that was done; on a second one only where it moves there.
    async fn take_ticket(
        &self,
        volume: &Volume,
        node: &str,
        ticket: &str,
        (read_only, moves): (bool, bool),
    ) -> Result<(), Refused> {
        let id = &volume.name_any();
        let made = |attachment: Option<&VolumeAttachment>| Ok(attachment.cloned());
        let attachment = self.cluster.wait(id, "the volume is being made", made).await?;
        let tickets = &attachment.spec.attachment_tickets;
        let ours = |t: &&AttachmentTicket| t.kind == TicketType::Csi;
        if let Some(there) = tickets.get(ticket) {
            let was = there.parameters.get(READ_ONLY).is_some_and(|v| v == "true");
            if was != read_only {
                return Err(Refused::Different(format!(
                    "volume {id} is published on node {node} {}: unpublish it first",
                    if was { "for reading only" } else { "for writing" }
                )));
            }
            return Ok(());
        }
        let nodes: Vec<&str> = tickets.values().filter(ours).map(|t| t.node_id.as_str()).collect();
        if !nodes.is_empty() {
            let concerned = nodes.iter().copied().chain([node]);
            let known = self.cluster.nodes_in_kubernetes(id, concerned).await?.unwrap_or_default();
            // Whoever is no Kubernetes keeps its own account of who has what.
            let left = if known.contains(node) { left(&attachment, &known) } else { BTreeSet::new() };
            if nodes.len() - left.len() > usize::from(moves) {
                return Err(Refused::Precondition(format!(
                    "volume {id} is published on node {}: unpublish it there first",
                    nodes.join(" and on node ")
                )));
            }
            if !left.is_empty() {
                tracing::warn!(
                    volume = id,
                    node,
                    ?left,
                    "what Kubernetes has no attachment for any more is let go"
                );
                self.cluster.drop_tickets(&attachment, &left).await?;
            }
        }
        let _counting = if self.most_volumes > 0 { Some(self.counting.lock().await) } else { None };
        if self.most_volumes > 0 {
            let there = self.cluster.tickets_of(node).await?;
            if i64::try_from(there.len()).unwrap_or(i64::MAX) >= self.most_volumes {
                return Err(Refused::Exhausted(format!(
                    "node {node} has {} volumes, and may have {} (--max-volumes-per-node)",
                    there.len(),
                    self.most_volumes
                )));
            }
        }
        let wish = AttachmentTicket {
            id: ticket.to_owned(),
            kind: TicketType::Csi,
            node_id: node.to_owned(),
            parameters: [(READ_ONLY.to_owned(), read_only.to_string())].into(),
            ..AttachmentTicket::default()
        };
        self.cluster.set_ticket(id, ticket, Some(&wish)).await
    }

    pub(super) async fn controller_unpublish_volume(
        &self,
        request: ControllerUnpublishVolumeRequest,
    ) -> Result<ControllerUnpublishVolumeResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        let _held = self.guard.take(id)?;
        let Some(attachment) = self.cluster.attachment(id).await? else {
            return Ok(ControllerUnpublishVolumeResponse {});
        };
        let node = request.node_id.as_str();
        let concerned =
            |t: &AttachmentTicket| t.kind == TicketType::Csi && (node.is_empty() || t.node_id == node);
        let tickets = attachment.spec.attachment_tickets.iter().filter(|(_, t)| concerned(t));
        for (ticket, _) in tickets {
            self.cluster.set_ticket(id, ticket, None).await?;
        }
        // Somebody else may keep the volume there, a snapshot for instance: without this driver's device users. One that
        // migrates is waited for: it is another node's then, or is shown there no more.
        let others = attachment
            .spec
            .attachment_tickets
            .values()
            .any(|t| !concerned(t) && (node.is_empty() || t.node_id == node));
        if !others {
            self.cluster
                .wait::<Volume, ()>(id, "the volume is being detached", |v| Ok(is_detached(v, node)))
                .await?;
        }
        Ok(ControllerUnpublishVolumeResponse {})
    }
}

/// Tickets of this driver for nodes on which Kubernetes has the volume no more: somebody took its attachment away by force, or it
/// was not restored with the rest. Nobody is left to unpublish it there. What still runs there is shut out by the next engine's number.
pub(super) fn left(attachment: &VolumeAttachment, known: &BTreeSet<String>) -> BTreeSet<String> {
    let tickets = attachment.spec.attachment_tickets.iter();
    let left = tickets.filter(|(_, t)| t.kind == TicketType::Csi && !known.contains(&t.node_id));
    left.map(|(id, _)| id.clone()).collect()
}

/// Refuses to have a volume on two nodes that does not migrate.
pub(super) fn must_migrate(spec: &VolumeSpec) -> Result<(), Refused> {
    if spec.migratable {
        return Ok(());
    }
    Err(Refused::Argument(
        "ReadWriteMany is for volumes that migrate: set migratable \"true\" in the StorageClass, or choose ReadWriteOnce (shared volumes are not built yet)"
            .to_owned(),
    ))
}

/// True once the ticket is met. What stands in the way is in its condition.
fn is_attached(attachment: Option<&VolumeAttachment>, ticket: &str) -> Result<Option<()>, Refused> {
    let Some(attachment) = attachment else {
        return Err(Refused::Missing("the volume is gone".to_owned()));
    };
    if !attachment.spec.attachment_tickets.contains_key(ticket) {
        return Err(Refused::NotYet(format!("volume {} was unpublished meanwhile", attachment.name_any())));
    }
    let status = attachment.status.as_ref().and_then(|s| s.attachment_ticket_statuses.get(ticket));
    Ok(status.is_some_and(|s| s.satisfied).then_some(()))
}

fn is_detached(volume: Option<&Volume>, node: &str) -> Option<()> {
    let Some(status) = volume.map(|v| v.status.clone().unwrap_or_default()) else { return Some(()) };
    let is_here = [&status.current_node_id, &status.current_migration_node_id].into_iter().any(|n| n == node);
    let elsewhere = !node.is_empty() && !status.current_node_id.is_empty() && !is_here;
    let rests = matches!(status.state, VolumeState::Detached | VolumeState::Creating | VolumeState::Deleting);
    (elsewhere || rests).then_some(())
}
