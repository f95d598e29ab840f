//! A volume kept attached while its replicas are read: by a ticket on its attachment, on the node where it is, or near its
//! replicas. The ticket ranks behind everybody who wants the volume for itself: whoever needs it elsewhere takes it, the
//! stream ends with an error, and the caller goes on from where it was.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use kube::ResourceExt;
use lh_cluster::api::{
    AttachmentTicket, Conditions, Engine, Node, Replica, ReplicaMode, TicketType, VolumeAttachment,
};
use lh_cluster::plan::VOLUME_LABEL;
use lh_cluster::plan::attachment::DISABLE_FRONTEND;
use lh_cluster::plan::node::READY;

use super::{Holder, MetadataService};
use crate::Refused;
use crate::cluster::Cluster;

/// Tickets of this service begin so.
const TICKET: &str = "snapshot-metadata";

/// Tells the tickets of one process apart.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A volume that stays attached until it is released.
pub(super) struct Held {
    volume: String,
    ticket: String,
    holders: Vec<Holder>,
}

impl Held {
    /// Replicas that hold everything.
    pub(super) fn holders(&self) -> &[Holder] {
        &self.holders
    }

    /// Lets the volume go. What cannot be said to the API server now is said when the driver starts again.
    pub(super) async fn release(self, cluster: &Cluster) {
        if let Err(e) = cluster.set_ticket(&self.volume, &self.ticket, None).await {
            tracing::warn!(volume = self.volume, error = %e, "the volume stays attached");
        }
    }
}

impl MetadataService {
    /// Has the volume attached, and finds the replicas that can be asked.
    pub(super) async fn hold(&self, volume: &str) -> Result<Held, Refused> {
        let found = self.cluster.volume(volume).await?;
        let replicas = self.replicas(volume).await?;
        let node = match found.spec.node_id.as_str() {
            "" => self.near(&replicas).await?,
            node => node.to_owned(),
        };
        let ticket = format!("{}{}", prefix(&self.node), COUNT.fetch_add(1, Ordering::Relaxed));
        let wish = AttachmentTicket {
            id: ticket.clone(),
            kind: TicketType::Snapshot,
            node_id: node,
            parameters: [(DISABLE_FRONTEND.to_owned(), true.to_string())].into(),
            ..AttachmentTicket::default()
        };
        self.cluster.set_ticket(volume, &ticket, Some(&wish)).await?;
        let mut held = Held { volume: volume.to_owned(), ticket, holders: Vec::new() };
        match self.attached(&held).await {
            Ok(holders) => {
                held.holders = holders;
                Ok(held)
            }
            Err(e) => {
                held.release(&self.cluster).await;
                Err(e)
            }
        }
    }

    async fn replicas(&self, volume: &str) -> Result<Vec<Replica>, Refused> {
        self.cluster.all::<Replica>(Some(&format!("{VOLUME_LABEL}={volume}"))).await
    }

    /// A node that is up and has a replica, so that nothing travels to the engine.
    async fn near(&self, replicas: &[Replica]) -> Result<String, Refused> {
        for replica in replicas.iter().filter(|r| r.spec.failed_at.is_empty()) {
            let node = self.cluster.find::<Node>(&replica.spec.node_id).await?;
            if node.is_some_and(|n| n.status.is_some_and(|s| s.conditions.holds(READY))) {
                return Ok(replica.spec.node_id.clone());
            }
        }
        Err(Refused::Unavailable("no node with a replica of the volume is up".to_owned()))
    }

    async fn attached(&self, held: &Held) -> Result<Vec<Holder>, Refused> {
        let volume = &held.volume;
        let what = "the volume is being attached, to read what its snapshot holds";
        self.cluster
            .wait::<VolumeAttachment, ()>(volume, what, |attachment| is_met(attachment, &held.ticket))
            .await?;
        let engine = self.cluster.engine_of(&self.cluster.volume(volume).await?).await?;
        let in_sync = self.cluster.wait::<Engine, BTreeSet<String>>(&engine, what, in_sync).await?;
        let holder = |r: &Replica| {
            let status = r.status.as_ref().filter(|s| !s.address.is_empty() && !s.map_key.is_empty())?;
            let replica = r.name_any();
            in_sync.contains(&replica).then(|| Holder {
                volume: volume.clone(),
                replica,
                address: status.address.clone(),
                key: status.map_key.clone(),
            })
        };
        let holders: Vec<Holder> = self.replicas(volume).await?.iter().filter_map(holder).collect();
        if holders.is_empty() {
            return Err(Refused::Unavailable(format!("no replica of volume {volume} can be read now")));
        }
        Ok(holders)
    }
}

fn prefix(node: &str) -> String {
    format!("{TICKET}-{node}-")
}

/// The node of the driver whose ticket this is; `None`: it is no such ticket. A node's name may begin as another one's.
fn driver_of(ticket: &str) -> Option<&str> {
    let (node, number) = ticket.strip_prefix(TICKET)?.strip_prefix('-')?.rsplit_once('-')?;
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    (is_number && !node.is_empty()).then_some(node)
}

/// Takes off what drivers that are gone have left on attachments: one of this node before this one, and those of nodes on which there
/// is none any more, which may never have one again.
pub(crate) async fn forget_tickets(cluster: &Cluster, node: &str) -> Result<(), Refused> {
    let attachments = cluster.all::<VolumeAttachment>(None).await?;
    let others = cluster.controllers().await.unwrap_or_else(|e| {
        tracing::debug!(error = %e, "which other drivers there are is not known");
        BTreeSet::new()
    });
    // Where this one is not among them, they are run in some other way.
    let is_gone = |of: &str| of == node || others.contains(node) && !others.contains(of);
    for attachment in attachments {
        let tickets = attachment.spec.attachment_tickets.keys();
        for ticket in tickets.filter(|id| driver_of(id).is_some_and(is_gone)) {
            let volume = attachment.name_any();
            match cluster.set_ticket(&volume, ticket, None).await {
                Err(e @ Refused::Unavailable(_)) => return Err(e),
                // One that cannot be changed keeps no other one.
                Err(e) => tracing::warn!(volume, error = %e, "the volume stays attached"),
                Ok(()) => {}
            }
        }
    }
    Ok(())
}

fn is_met(attachment: Option<&VolumeAttachment>, ticket: &str) -> Result<Option<()>, Refused> {
    let Some(attachment) = attachment else {
        return Err(Refused::Missing("the volume is gone".to_owned()));
    };
    let status = attachment.status.as_ref().and_then(|s| s.attachment_ticket_statuses.get(ticket));
    Ok(status.is_some_and(|s| s.satisfied).then_some(()))
}

/// The replicas that are in sync, once one is.
fn in_sync(engine: Option<&Engine>) -> Result<Option<BTreeSet<String>>, Refused> {
    let modes = engine.and_then(|e| e.status.as_ref()).map(|s| &s.replica_mode_map);
    let members: BTreeSet<String> = modes
        .into_iter()
        .flatten()
        .filter(|(_, mode)| **mode == ReplicaMode::ReadWrite)
        .map(|(name, _)| name.clone())
        .collect();
    Ok((!members.is_empty()).then_some(members))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_name_the_node_of_their_driver() {
        let ticket = |node: &str, number: u64| format!("{}{number}", prefix(node));
        for (of, number) in [("n", 0), ("n-1", 20)] {
            assert_eq!(driver_of(&ticket(of, number)), Some(of));
        }
        for other in [prefix("n"), "n-0".to_owned(), "snapshot-metadata-1".to_owned(), "csi-0".to_owned()] {
            assert_eq!(driver_of(&other), None, "{other}");
        }
    }
}
