//! A volume kept attached while its replicas are read: by a ticket on its attachment, on the node where it is, or near its
//! replicas. The ticket ranks behind everybody who wants the volume for itself: whoever needs it elsewhere takes it, the
//! stream ends with an error, and the caller goes on from where it was.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

/// The parameter of a ticket that names the host of its driver: of a pod its name. On one node there may be several.
const HOST: &str = "host";

/// How often it is tried to take off what could not be taken off. Whoever drains the node waits for that.
const AGAIN: Duration = Duration::from_secs(30);

/// The tickets of one driver.
#[derive(Clone, Debug)]
pub(crate) struct Tickets {
    /// Its node and its host.
    node: String,
    host: String,
    /// The number of the next one. Each driver begins anywhere: none takes another one's for its own, and lets it go.
    next: Arc<AtomicU64>,
    /// Those that are on attachments, as far as is known.
    held: Arc<Mutex<BTreeMap<String, Placed>>>,
}

/// A ticket on an attachment.
#[derive(Clone, Debug)]
struct Placed {
    volume: String,
    /// Somebody reads what it keeps attached.
    is_needed: bool,
}

impl Tickets {
    /// Those of this process, as the driver of a node.
    pub(crate) fn of(node: &str) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let first = RandomState::new().hash_one(node);
        Self {
            node: node.to_owned(),
            host: host.trim_end().to_owned(),
            next: Arc::new(AtomicU64::new(first)),
            held: Arc::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<String, Placed>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket that nobody has had, for a volume that is to be on a node.
    fn wish(&self, node: String) -> AttachmentTicket {
        let frontend = (DISABLE_FRONTEND.to_owned(), true.to_string());
        AttachmentTicket {
            id: format!("{}{}", prefix(&self.node), self.next.fetch_add(1, Ordering::Relaxed)),
            kind: TicketType::Snapshot,
            node_id: node,
            parameters: [frontend, (HOST.to_owned(), self.host.clone())].into(),
            ..AttachmentTicket::default()
        }
    }

    /// Puts a ticket on a volume's attachment.
    async fn take(&self, cluster: &Cluster, volume: &str, wish: &AttachmentTicket) -> Result<(), Refused> {
        let placed = Placed { volume: volume.to_owned(), is_needed: true };
        self.held().insert(wish.id.clone(), placed);
        let taken = cluster.set_ticket(volume, &wish.id, Some(wish)).await;
        if taken.is_err() {
            // It may be there all the same.
            self.give_back(cluster, volume, &wish.id).await;
        }
        taken
    }

    /// Takes it off, now or later ([`Self::tend`]).
    async fn give_back(&self, cluster: &Cluster, volume: &str, ticket: &str) {
        if let Some(placed) = self.held().get_mut(ticket) {
            placed.is_needed = false;
        }
        match cluster.set_ticket(volume, ticket, None).await {
            Ok(()) => drop(self.held().remove(ticket)),
            Err(e) => tracing::warn!(volume, error = %e, "the volume stays attached: it is let go of later"),
        }
    }

    /// Takes off all that are left, as far as that can be said now: the driver ends, and nobody streams any more.
    pub(crate) async fn let_go(&self, cluster: &Cluster) {
        self.give_back_those(cluster, |_| true).await;
    }

    async fn give_back_those(&self, cluster: &Cluster, which: impl Fn(&Placed) -> bool) {
        let held = self.held().clone();
        for (ticket, placed) in held.into_iter().filter(|(_, placed)| which(placed)) {
            self.give_back(cluster, &placed.volume, &ticket).await;
        }
    }

    /// Takes off what nobody needs and what could not be taken off when that was so, and what drivers that are gone have left, if the API
    /// server could not be asked for that before (`others_wait`): for as long as it is polled.
    pub(crate) async fn tend(&self, cluster: &Cluster, mut others_wait: bool) -> Infallible {
        loop {
            tokio::time::sleep(AGAIN.min(cluster.patience())).await;
            self.give_back_those(cluster, |placed| !placed.is_needed).await;
            if others_wait {
                others_wait = matches!(self.forget_others(cluster).await, Err(Refused::Unavailable(_)));
            }
        }
    }

    /// Takes off what drivers that are gone have left on attachments: those of this node, and those of nodes on which there is none any
    /// more, which may never have one again.
    pub(crate) async fn forget_others(&self, cluster: &Cluster) -> Result<(), Refused> {
        let attachments = cluster.all::<VolumeAttachment>(None).await?;
        let pods = cluster.controllers().await.unwrap_or_else(|e| {
            tracing::debug!(error = %e, "which other drivers there are is not known");
            BTreeMap::new()
        });
        for attachment in attachments {
            let tickets = attachment.spec.attachment_tickets.iter();
            for (ticket, _) in tickets.filter(|(id, ticket)| self.is_left(id, ticket, &pods)) {
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

    /// True for a ticket of a driver that is gone, by the node of each pod that has one.
    fn is_left(&self, id: &str, ticket: &AttachmentTicket, pods: &BTreeMap<String, String>) -> bool {
        if self.held().contains_key(id) {
            return false;
        }
        let has_one = |node: &str| pods.values().any(|there| there == node);
        match driver_of(id) {
            None => false,
            // Of this one's own host that is the process before it.
            Some(node) if node == self.node => {
                let host = ticket.parameters.get(HOST).filter(|host| **host != self.host);
                host.is_none_or(|host| !pods.contains_key(host))
            }
            // Where this one is not among them, they are run in some other way.
            Some(node) => has_one(&self.node) && !has_one(node),
        }
    }
}

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
        let wish = self.tickets.wish(node);
        self.tickets.take(&self.cluster, volume, &wish).await?;
        let mut held = Held { volume: volume.to_owned(), ticket: wish.id, holders: Vec::new() };
        match self.attached(&held).await {
            Ok(holders) => {
                held.holders = holders;
                Ok(held)
            }
            Err(e) => {
                self.release(held).await;
                Err(e)
            }
        }
    }

    /// Lets the volume go. What cannot be said to the API server now is said later, or when the driver ends, or starts again.
    pub(super) async fn release(&self, held: Held) {
        self.tickets.give_back(&self.cluster, &held.volume, &held.ticket).await;
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
    fn two_drivers_of_a_node_have_no_ticket_in_common() {
        let drivers = [(); 2].map(|()| Tickets::of("n"));
        let ids: BTreeSet<String> =
            drivers.iter().flat_map(|driver| (0..10).map(|_| driver.wish("m".to_owned()).id)).collect();
        assert_eq!(ids.len(), 20);
        assert!(ids.iter().all(|id| driver_of(id) == Some("n")), "{ids:?}");
    }

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
