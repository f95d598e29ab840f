//! gRPC's own service of health, by which Longhorn's clients look whether somebody answers.
//!
//! Whoever answers serves. What an engine waits for, and why a replica is not in sync, they tell by their own services.

use std::pin::Pin;

use futures::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status};

use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::health::health_server::{Health, HealthServer};
use crate::proto::health::{HealthCheckRequest, HealthCheckResponse};

/// The service, for a server of any others.
pub(crate) fn service() -> HealthServer<impl Health> {
    HealthServer::new(Service)
}

struct Service;

const fn serving() -> HealthCheckResponse {
    HealthCheckResponse { status: ServingStatus::Serving as i32 }
}

#[tonic::async_trait]
impl Health for Service {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, _: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        Ok(Response::new(serving()))
    }

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(stream::iter([Ok(serving())]).chain(stream::pending()))))
    }
}
