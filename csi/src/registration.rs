//! How the kubelet of this node learns of the driver: it finds a socket in its registry, and asks there.

use tonic::{Request, Response, Status, async_trait};

use crate::DRIVER;
use crate::proto::registration::registration_server::Registration;
use crate::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};

/// Answers a kubelet.
pub(crate) struct RegistrationService {
    /// Path of the driver's socket, as the kubelet sees it.
    pub(crate) endpoint: String,
}

#[async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec!["1.0.0".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let told = request.into_inner();
        if told.plugin_registered {
            tracing::info!("the kubelet has registered the driver");
        } else {
            tracing::error!(error = told.error, "the kubelet did not register the driver");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
