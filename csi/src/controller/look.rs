//! What there is: volumes, and how they are.

use std::collections::HashMap;

use kube::ResourceExt;
use lh_cluster::api::{Robustness, TicketType, Volume, VolumeAttachment, VolumeState};

use super::ControllerService;
use super::publish::must_migrate;
use super::volumes::content_source;
use crate::Refused;
use crate::capability::Use;
use crate::parameters;
use crate::proto::csi::validate_volume_capabilities_response::Confirmed;
use crate::proto::csi::{
    ControllerGetVolumeRequest, ControllerGetVolumeResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume as Told, VolumeCondition,
    controller_get_volume_response, list_volumes_response,
};
use crate::refused::required;

impl ControllerService {
    pub(super) async fn list_volumes(
        &self,
        request: ListVolumesRequest,
    ) -> Result<ListVolumesResponse, Refused> {
        let is_there = |v: &Volume| v.metadata.deletion_timestamp.is_none();
        let mut all: Vec<Volume> =
            self.cluster.all::<Volume>(None).await?.into_iter().filter(is_there).collect();
        all.sort_by_key(ResourceExt::name_any);
        let (volumes, next_token) =
            page(all, &request.starting_token, request.max_entries, ResourceExt::name_any)?;
        let attachments = self.cluster.all::<VolumeAttachment>(None).await?;
        // csi-attacher asks each minute for all of them.
        let attachments: HashMap<String, VolumeAttachment> =
            attachments.into_iter().map(|a| (a.name_any(), a)).collect();
        let entry = |volume: &Volume| list_volumes_response::Entry {
            volume: Some(told(volume)),
            status: Some(list_volumes_response::VolumeStatus {
                published_node_ids: published(attachments.get(&volume.name_any())),
                volume_condition: Some(condition(volume)),
            }),
        };
        Ok(ListVolumesResponse { entries: volumes.iter().map(entry).collect(), next_token })
    }

    pub(super) async fn controller_get_volume(
        &self,
        request: ControllerGetVolumeRequest,
    ) -> Result<ControllerGetVolumeResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        let volume = self.cluster.volume(id).await?;
        let attachment = self.cluster.attachment(id).await?;
        Ok(ControllerGetVolumeResponse {
            volume: Some(told(&volume)),
            status: Some(controller_get_volume_response::VolumeStatus {
                published_node_ids: published(attachment.as_ref()),
                volume_condition: Some(condition(&volume)),
            }),
        })
    }

    pub(super) async fn validate_volume_capabilities(
        &self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> Result<ValidateVolumeCapabilitiesResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(Refused::Argument("no volume capability is given".to_owned()));
        }
        let volume = self.cluster.volume(id).await?;
        let checked = Use::of_all(&request.volume_capabilities).and_then(|uses| {
            if uses.iter().any(|u| u.moves) {
                must_migrate(&volume.spec)?;
            }
            parameters::volume(&request.parameters)?;
            // What may change depends on what the volume is.
            parameters::change(&mut volume.spec.clone(), &request.mutable_parameters)
        });
        Ok(match checked {
            Ok(()) => ValidateVolumeCapabilitiesResponse {
                confirmed: Some(Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                }),
                message: String::new(),
            },
            Err(why) => ValidateVolumeCapabilitiesResponse { confirmed: None, message: why.to_string() },
        })
    }
}

fn told(volume: &Volume) -> Told {
    Told {
        capacity_bytes: volume.spec.size.0,
        volume_id: volume.name_any(),
        content_source: content_source(volume),
        ..Told::default()
    }
}

/// The nodes that this driver has the volume on.
fn published(attachment: Option<&VolumeAttachment>) -> Vec<String> {
    let Some(attachment) = attachment else { return Vec::new() };
    let met = attachment.status.as_ref().map(|s| &s.attachment_ticket_statuses);
    let is_met = |id: &String| met.and_then(|all| all.get(id)).is_some_and(|s| s.satisfied);
    let tickets = attachment.spec.attachment_tickets.iter();
    let ours = tickets.filter(|(id, t)| t.kind == TicketType::Csi && is_met(id));
    ours.map(|(_, t)| t.node_id.clone()).collect()
}

/// How a volume is, in words. Why one has no place names every disk of the cluster: the Volume itself says all of that.
fn condition(volume: &Volume) -> VolumeCondition {
    let status = volume.status.clone().unwrap_or_default();
    let trouble: Vec<String> = status
        .conditions
        .iter()
        .filter(|c| !c.is_true() && !c.message.is_empty())
        .map(|c| c.message.clone())
        .collect();
    let abnormal = match status.robustness {
        Robustness::Degraded | Robustness::Faulted => true,
        // Of one that rests nothing else is known.
        Robustness::Unknown => status.state == VolumeState::Attached,
        Robustness::Healthy => false,
    };
    let mut message = format!("{}, {}", status.state, status.robustness);
    for trouble in trouble {
        message.push_str("; ");
        message.push_str(&trouble);
    }
    VolumeCondition { abnormal, message: message.chars().take(WORDS).collect() }
}

/// Most entries of an answer, and characters that an entry says of a volume. Receivers take 4 MiB unless they are told otherwise, and
/// csi-attacher asks for all volumes at once; it goes on with the token.
const ENTRIES: usize = 1000;
const WORDS: usize = 500;

/// Tokens begin so: what somebody made up is told from what was handed out.
const AFTER: &str = "after:";

/// One page of what is sorted by name, from the token on, and the token of the next one. A token names the last object
/// of its page, which may be gone since.
pub(super) fn page<T>(
    all: Vec<T>,
    token: &str,
    most: i32,
    name: impl Fn(&T) -> String,
) -> Result<(Vec<T>, String), Refused> {
    let after = match token.strip_prefix(AFTER) {
        _ if token.is_empty() => None,
        Some(after) => Some(after),
        None => {
            return Err(Refused::NotYet(format!("token {token:?} is none of ours: begin anew without one")));
        }
    };
    let most =
        usize::try_from(most).map_err(|_| Refused::Argument(format!("{most} entries are below zero")))?;
    let most = if most == 0 { ENTRIES } else { most.min(ENTRIES) };
    let mut rest = all.into_iter().filter(|one| after.is_none_or(|after| name(one).as_str() > after));
    let page: Vec<T> = rest.by_ref().take(most).collect();
    let next = match (page.last(), rest.next()) {
        (Some(last), Some(_)) => format!("{AFTER}{}", name(last)),
        _ => String::new(),
    };
    Ok((page, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    #[test]
    fn a_volume_is_abnormal_where_it_is_degraded_or_nobody_knows_how_it_is_in_use() {
        use lh_cluster::api::{VolumeSpec, VolumeStatus};
        for (state, robustness, expected) in [
            (VolumeState::Attached, Robustness::Healthy, false),
            (VolumeState::Attached, Robustness::Degraded, true),
            (VolumeState::Attached, Robustness::Unknown, true),
            (VolumeState::Attaching, Robustness::Unknown, false),
            (VolumeState::Detached, Robustness::Unknown, false),
            (VolumeState::Detached, Robustness::Faulted, true),
        ] {
            let mut volume = Volume::new("v", VolumeSpec::default());
            volume.status = Some(VolumeStatus { state, robustness, ..VolumeStatus::default() });
            assert_eq!(condition(&volume).abnormal, expected, "{state} {robustness}");
        }
    }

    #[test]
    fn pages_follow_each_other_whatever_is_removed_and_made_between() {
        let (first, token) = page(names(&["a", "b", "c", "d"]), "", 2, String::clone).unwrap();
        assert_eq!((first, token.as_str()), (names(&["a", "b"]), "after:b"));
        let (rest, end) = page(names(&["a", "c", "d", "e"]), &token, 0, String::clone).unwrap();
        assert_eq!((rest, end.as_str()), (names(&["c", "d", "e"]), ""));
        let (all, end) = page(names(&["a"]), "", 1, String::clone).unwrap();
        assert_eq!((all.len(), end.as_str()), (1, ""));
        assert!(matches!(page(names(&["a"]), "invalid-token", 0, String::clone), Err(Refused::NotYet(_))));
        assert!(matches!(page(names(&["a"]), "", -1, String::clone), Err(Refused::Argument(_))));
    }
}
