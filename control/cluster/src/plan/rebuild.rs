//! How many replicas are being filled, on each node: all volumes share its disks and its link.
//!
//! A replica counts from when it was decided to make it: other volumes are decided on before the API server tells of it. A volume
//! that is attached for its rebuild alone, or to move its replicas, counts from when that was decided, and for as long as it is:
//! it would have been attached for nothing if others took its place meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::volume::{Action, FILLS_ON, Filling};
use crate::api::{DesireState, Replica, TicketType, VolumeAttachment};

/// How long what was decided counts without having been seen: it was not carried out then, or is carried out late.
const UNSEEN: Duration = Duration::from_secs(10);

/// Those of these: they belong to a volume that is in use, and hold nothing yet where another replica of it did. Of a new
/// volume there is nothing to fill replicas with.
pub fn filling<'a>(replicas: impl IntoIterator<Item = &'a Replica>) -> BTreeMap<&'a str, &'a str> {
    let (mut empty, mut used) = (Vec::new(), BTreeSet::new());
    for replica in replicas.into_iter().filter(|r| r.metadata.deletion_timestamp.is_none()) {
        let spec = &replica.spec;
        if !spec.healthy_at.is_empty() {
            used.insert(spec.volume_name.as_str());
        } else if spec.failed_at.is_empty() && spec.desire_state == DesireState::Running {
            empty.push(replica);
        }
    }
    let filled = empty.into_iter().filter(|r| used.contains(r.spec.volume_name.as_str()));
    filled.map(|r| (r.metadata.name.as_deref().unwrap_or_default(), r.spec.node_id.as_str())).collect()
}

/// True for a ticket of a volume that is attached only to have a replica filled.
const fn is_for_a_replica(kind: TicketType) -> bool {
    matches!(kind, TicketType::VolumeRebuilding | TicketType::VolumeEviction)
}

/// The volumes that are attached to be rebuilt or to move replicas, or are to be, and the node where a replica is to be filled.
pub fn reserved<'a>(
    attachments: impl IntoIterator<Item = &'a VolumeAttachment>,
) -> BTreeMap<&'a str, &'a str> {
    let place = |attachment: &'a VolumeAttachment| {
        let mut tickets = attachment.spec.attachment_tickets.values();
        let fills = tickets.find_map(|t| t.parameters.get(FILLS_ON).filter(|_| is_for_a_replica(t.kind)))?;
        Some((attachment.spec.volume.as_str(), fills.as_str()))
    };
    attachments.into_iter().filter_map(place).collect()
}

/// What takes one of the places that a node has for replicas that are being filled.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The replica of this name.
    Replica(String),
    /// The volume of this name, attached for its rebuild alone, until one of its replicas is being filled.
    Volume(String),
}

/// All places that are taken, and the nodes. A volume that is attached for its rebuild is counted once: by its replica, if
/// there is one.
pub fn taken<'a>(
    replicas: impl IntoIterator<Item = &'a Replica, IntoIter: Clone>,
    attachments: impl IntoIterator<Item = &'a VolumeAttachment>,
) -> BTreeMap<Place, String> {
    let replicas = replicas.into_iter();
    let seen = filling(replicas.clone());
    let is_seen = |r: &&Replica| r.metadata.name.as_deref().is_some_and(|name| seen.contains_key(name));
    let filled: BTreeSet<&str> = replicas.filter(is_seen).map(|r| r.spec.volume_name.as_str()).collect();
    let waiting = reserved(attachments).into_iter().filter(|(volume, _)| !filled.contains(volume));
    let of_volumes = waiting.map(|(volume, node)| (Place::Volume(volume.to_owned()), node.to_owned()));
    let of_replicas =
        seen.iter().map(|(name, node)| (Place::Replica((*name).to_owned()), (*node).to_owned()));
    of_replicas.chain(of_volumes).collect()
}

/// What was decided and not seen yet.
#[derive(Debug, Default)]
pub struct Decided {
    places: BTreeMap<Place, Decision>,
}

#[derive(Debug)]
struct Decision {
    volume: String,
    node: String,
    at: Duration,
}

impl Decided {
    /// How many replicas are being filled as far as a decision about this volume is concerned. `seen`: what is there, of all
    /// volumes ([`taken`]); `known`: whether what takes such a place is there, filled or not. `now`: on any clock that only
    /// goes on.
    pub fn filling(
        &mut self,
        volume: &str,
        seen: &BTreeMap<Place, String>,
        known: impl Fn(&Place) -> bool,
        now: Duration,
    ) -> Filling {
        // Of this volume it is decided anew.
        self.places.retain(|place, decision| {
            decision.volume != volume && now.saturating_sub(decision.at) < UNSEEN && !known(place)
        });
        let own = Place::Volume(volume.to_owned());
        let others = seen.iter().filter(|(place, _)| **place != own).map(|(_, node)| node.as_str());
        let decided = self.places.values().map(|decision| decision.node.as_str());
        let mut filling = Filling::new();
        for node in others.chain(decided) {
            *filling.entry(node.to_owned()).or_default() += 1;
        }
        filling
    }

    /// Notes what was decided about this volume.
    pub fn note(&mut self, volume: &str, actions: &[Action], now: Duration) {
        for action in actions {
            let (place, node) = match action {
                Action::CreateReplica(name, spec) if spec.desire_state == DesireState::Running => {
                    (Place::Replica(name.clone()), &spec.node_id)
                }
                Action::Ticket(kind, Some(wish)) if is_for_a_replica(*kind) => {
                    let Some(node) = wish.parameters.get(FILLS_ON) else { continue };
                    (Place::Volume(volume.to_owned()), node)
                }
                _ => continue,
            };
            self.places.insert(place, Decision { volume: volume.to_owned(), node: node.clone(), at: now });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ReplicaSpec;

    fn replica(name: &str, volume: &str, node: &str, healthy: bool) -> Replica {
        let spec = ReplicaSpec {
            volume_name: volume.into(),
            node_id: node.into(),
            desire_state: DesireState::Running,
            healthy_at: if healthy { "2026-01-01T00:00:00Z".into() } else { String::new() },
            ..ReplicaSpec::default()
        };
        Replica::new(name, spec)
    }

    #[test]
    fn what_is_being_filled_is_empty_wanted_and_has_a_source() {
        let mut all = vec![
            replica("a1", "a", "n1", true),
            replica("a2", "a", "n2", false),
            replica("b1", "b", "n2", false),
            replica("a3", "a", "n3", false),
            replica("a4", "a", "n3", false),
            replica("a5", "a", "n3", false),
        ];
        all[3].spec.failed_at = "2026-01-01T00:00:00Z".into();
        all[4].spec.desire_state = DesireState::Stopped;
        all[5].metadata.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        assert_eq!(filling(&all), [("a2", "n2")].into());
    }

    #[test]
    fn a_volume_that_is_attached_to_be_rebuilt_has_one_place() {
        let attachment = |volume: &str| {
            let ticket = crate::api::AttachmentTicket {
                kind: TicketType::VolumeRebuilding,
                parameters: [(FILLS_ON.to_owned(), "n2".to_owned())].into(),
                ..Default::default()
            };
            let spec = crate::api::VolumeAttachmentSpec {
                volume: volume.into(),
                attachment_tickets: [("rebuild".to_owned(), ticket)].into(),
            };
            VolumeAttachment::new(volume, spec)
        };
        let attachments = [attachment("a"), attachment("b")];
        let replicas = [replica("a1", "a", "n1", true), replica("a2", "a", "n2", false)];
        let seen = taken(&replicas, &attachments);
        let expected = [Place::Replica("a2".into()), Place::Volume("b".into())];
        assert_eq!(seen, expected.map(|place| (place, "n2".to_owned())).into());
        let count = |volume: &str| {
            let filling = Decided::default().filling(volume, &seen, |_| false, Duration::ZERO);
            filling.get("n2").copied().unwrap_or_default()
        };
        assert_eq!((count("c"), count("b")), (2, 1), "its own place is none that others have");
    }

    #[test]
    fn what_was_decided_counts_until_it_is_seen_or_was_not_done() {
        let mut decided = Decided::default();
        let at = Duration::from_secs;
        let made = Action::CreateReplica("a2".into(), Box::new(replica("a2", "a", "n2", false).spec));
        decided.note("a", &[made], at(100));
        let none = BTreeMap::new();
        let count = |decided: &mut Decided, volume: &str, known: bool, now: u64| {
            decided.filling(volume, &none, |_| known, at(now)).get("n2").copied().unwrap_or_default()
        };
        assert_eq!(count(&mut decided, "b", false, 101), 1);
        assert_eq!(count(&mut decided, "b", false, 109), 1);
        let seen = [(Place::Replica("c".into()), "n2".into())].into();
        assert_eq!(decided.filling("b", &seen, |_| false, at(109)), [("n2".to_owned(), 2)].into());
        assert_eq!(count(&mut decided, "b", false, 110), 0, "it was not made");
        let made = Action::CreateReplica("a2".into(), Box::new(replica("a2", "a", "n2", false).spec));
        decided.note("a", std::slice::from_ref(&made), at(200));
        assert_eq!(count(&mut decided, "b", true, 200), 0, "it is among those that are there");
        decided.note("a", &[made], at(200));
        assert_eq!(count(&mut decided, "a", false, 200), 0, "it is decided anew");
    }
}
