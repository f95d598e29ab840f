//! Who the driver is, what it can do as a whole, whether it is well.

use tonic::{Request, Response, Status, async_trait};

use crate::DRIVER;
use crate::cluster::Cluster;
use crate::proto::csi::identity_server::Identity;
use crate::proto::csi::plugin_capability::service::Type as Service;
use crate::proto::csi::plugin_capability::volume_expansion::Type as Expansion;
use crate::proto::csi::plugin_capability::{self, Type};
use crate::proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};

pub(crate) struct IdentityService {
    pub(crate) cluster: Cluster,
}

#[async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: DRIVER.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..GetPluginInfoResponse::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let services = [
            Service::ControllerService,
            Service::VolumeAccessibilityConstraints,
            Service::GroupControllerService,
            Service::SnapshotMetadataService,
        ];
        let services = services.map(|kind| Type::Service(plugin_capability::Service { r#type: kind.into() }));
        let expansion =
            Type::VolumeExpansion(plugin_capability::VolumeExpansion { r#type: Expansion::Online.into() });
        let capabilities = services
            .into_iter()
            .chain([expansion])
            .map(|kind| PluginCapability { r#type: Some(kind) })
            .collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(self.cluster.answers().await) }))
    }
}
