//! The resources, under Longhorn's group `longhorn.io/v1beta2`, with its kinds, fields, short names and columns.
//!
//! What Longhorn writes is read here and the other way round; fields of this project's own are added (`quorum`,
//! `ioTimeout`, `generation`, `epoch` of a volume among them), none is renamed. Longhorn's EngineFrontend, Shard and
//! ShardGroup, which only its v2 data engine uses, are not here. `deploy/crds.yaml` is made of these types.

#![allow(clippy::duplicated_attributes, reason = "each column of a kind has its own type_ and json_path")]

mod attachment;
mod backing_image;
mod backup;
mod engine;
mod engine_image;
mod instance_manager;
mod node;
mod orphan;
mod replica;
mod setting;
mod snapshot;
mod system;
mod values;
mod volume;
mod words;

pub use attachment::*;
pub use backing_image::*;
pub use backup::*;
pub use engine::*;
pub use engine_image::*;
pub use instance_manager::*;
pub use node::*;
pub use orphan::*;
pub use replica::*;
pub use setting::*;
pub use snapshot::*;
pub use system::*;
pub use values::{Condition, Conditions, EpochRecord, GenerationText, Int64Text};
pub use volume::*;
pub use words::{
    AccessMode, AutoBalance, DataEngine, DataLocality, DesireState, DiskType, Frontend, InstanceState,
    Quorum, ReplicaMode, Robustness, SnapshotIntegrity, TicketType, Toggle, VolumeState,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// The namespace that everything lives in unless an option says otherwise.
pub const NAMESPACE: &str = "longhorn-system";

/// The name of the CSI driver; Longhorn's.
pub const DRIVER: &str = "driver.longhorn.io";

/// The definitions of all kinds, sorted by name.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    let mut all = vec![
        BackingImage::crd(),
        BackingImageDataSource::crd(),
        BackingImageManager::crd(),
        Backup::crd(),
        BackupBackingImage::crd(),
        BackupTarget::crd(),
        BackupVolume::crd(),
        Engine::crd(),
        EngineImage::crd(),
        InstanceManager::crd(),
        Node::crd(),
        Orphan::crd(),
        RecurringJob::crd(),
        Replica::crd(),
        Setting::crd(),
        ShareManager::crd(),
        Snapshot::crd(),
        SupportBundle::crd(),
        SystemBackup::crd(),
        SystemRestore::crd(),
        Volume::crd(),
        VolumeAttachment::crd(),
    ];
    all.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    all
}
