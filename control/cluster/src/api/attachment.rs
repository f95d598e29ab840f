//! `VolumeAttachment`: who wants a volume where; the ticket with the highest priority wins.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, is_default, null_is_default};
use super::words::TicketType;

/// Who wants a volume attached, and where.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "VolumeAttachment",
    plural = "volumeattachments",
    shortname = "lhva",
    namespaced,
    status = "VolumeAttachmentStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "Who wants a volume attached, and where.",
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "has(self.volume) && self.volume != ''",
        "message": "spec.volume names the volume"
    },
    {
        "rule": "!has(oldSelf.volume) || self.volume == oldSelf.volume",
        "message": "an attachment belongs to one volume for ever"
    }
]))]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeAttachmentSpec {
    /// Who wants the volume where, by the ticket's id.
    #[serde(skip_serializing_if = "is_default")]
    pub attachment_tickets: BTreeMap<String, AttachmentTicket>,
    /// Name of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume: String,
}

/// One wish to have the volume attached.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct AttachmentTicket {
    /// Counts changes of the ticket.
    #[serde(skip_serializing_if = "is_default")]
    pub generation: i64,
    /// Id of the ticket, the same as its key.
    #[serde(skip_serializing_if = "is_default")]
    pub id: String,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
    /// Further details.
    #[serde(skip_serializing_if = "is_default")]
    pub parameters: BTreeMap<String, String>,
    /// Who asks, which decides the priority.
    #[serde(rename = "type", skip_serializing_if = "is_default")]
    pub kind: TicketType,
}

/// What was observed of a VolumeAttachment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeAttachmentStatus {
    /// How each ticket fares, by its id.
    #[serde(skip_serializing_if = "is_default")]
    pub attachment_ticket_statuses: BTreeMap<String, TicketStatus>,
}

/// How a ticket fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TicketStatus {
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// Counts changes of the ticket.
    #[serde(skip_serializing_if = "is_default")]
    pub generation: i64,
    /// Id of the ticket, the same as its key.
    #[serde(skip_serializing_if = "is_default")]
    pub id: String,
    /// The volume is attached as the ticket asks.
    #[serde(skip_serializing_if = "is_default")]
    pub satisfied: bool,
}
