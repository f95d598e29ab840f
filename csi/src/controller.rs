//! Volumes and snapshots as a whole. Every call may be made again: what is there already is the answer.

mod group;
mod growth;
mod look;
mod publish;
mod room;
mod snapshots;
mod volumes;

use std::sync::Arc;

use tokio::sync::Mutex;
use tonic::{Request, Response, Status, async_trait};

use self::room::Rooms;
use crate::cluster::Cluster;
use crate::guard::Guard;
use crate::proto::csi::controller_server::Controller;
use crate::proto::csi::controller_service_capability::rpc::Type as Ability;
use crate::proto::csi::controller_service_capability::{Rpc, Type};
use crate::proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerModifyVolumeRequest, ControllerModifyVolumeResponse, ControllerPublishVolumeRequest,
    ControllerPublishVolumeResponse, ControllerServiceCapability, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateSnapshotRequest, CreateSnapshotResponse, CreateVolumeRequest,
    CreateVolumeResponse, DeleteSnapshotRequest, DeleteSnapshotResponse, DeleteVolumeRequest,
    DeleteVolumeResponse, GetCapacityRequest, GetCapacityResponse, GetSnapshotRequest, GetSnapshotResponse,
    ListSnapshotsRequest, ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse,
};

/// What the controller's part can do. GET_SNAPSHOT is served and not told: csi-sanity 5.4.0 refuses drivers that tell it.
const ABILITIES: &[Ability] = &[
    Ability::CreateDeleteVolume,
    Ability::PublishUnpublishVolume,
    Ability::ListVolumes,
    Ability::GetCapacity,
    Ability::CreateDeleteSnapshot,
    Ability::ListSnapshots,
    Ability::CloneVolume,
    Ability::PublishReadonly,
    Ability::ExpandVolume,
    Ability::ListVolumesPublishedNodes,
    Ability::VolumeCondition,
    Ability::GetVolume,
    Ability::SingleNodeMultiWriter,
    Ability::ModifyVolume,
];

/// The controller's part.
#[derive(Clone)]
pub(crate) struct ControllerService {
    cluster: Cluster,
    guard: Guard,
    /// Most volumes on a node; 0 for no limit.
    most_volumes: i64,
    /// Held from counting a node's volumes until one more is on it.
    counting: Arc<Mutex<()>>,
    rooms: Rooms,
}

impl ControllerService {
    pub(crate) fn new(cluster: Cluster, most_volumes: i64) -> Self {
        Self {
            cluster,
            guard: Guard::default(),
            most_volumes,
            counting: Arc::default(),
            rooms: Rooms::default(),
        }
    }
}

/// A call that is carried out elsewhere: what it refuses becomes a status.
macro_rules! calls {
    ($($call:ident($request:ty) -> $answer:ty;)*) => {$(
        fn $call<'life0, 'async_trait>(
            &'life0 self,
            request: Request<$request>,
        ) -> std::pin::Pin<
            Box<dyn Future<Output = Result<Response<$answer>, Status>> + Send + 'async_trait>,
        >
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(async move {
                let call = stringify!($call);
                let request = request.into_inner();
                let answer = ControllerService::$call(self, request).await;
                if let Err(e) = &answer {
                    tracing::info!(call, error = %e, "refused");
                }
                answer.map(Response::new).map_err(Status::from)
            })
        }
    )*};
}

#[async_trait]
impl Controller for ControllerService {
    calls! {
        create_volume(CreateVolumeRequest) -> CreateVolumeResponse;
        delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse;
        controller_publish_volume(ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse;
        controller_unpublish_volume(ControllerUnpublishVolumeRequest) -> ControllerUnpublishVolumeResponse;
        validate_volume_capabilities(ValidateVolumeCapabilitiesRequest) -> ValidateVolumeCapabilitiesResponse;
        list_volumes(ListVolumesRequest) -> ListVolumesResponse;
        get_capacity(GetCapacityRequest) -> GetCapacityResponse;
        create_snapshot(CreateSnapshotRequest) -> CreateSnapshotResponse;
        delete_snapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse;
        list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse;
        get_snapshot(GetSnapshotRequest) -> GetSnapshotResponse;
        controller_expand_volume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse;
        controller_get_volume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse;
        controller_modify_volume(ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse;
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let tell = |ability: &Ability| ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: (*ability).into() })),
        };
        let capabilities = ABILITIES.iter().map(tell).collect();
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }
}
