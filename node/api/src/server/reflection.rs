//! gRPC reflection: a server tells its services and their messages, so that tools such as grpcurl need
//! no proto files.
//!
//! It is for callers with a certificate of the cluster, like everything that is not needed to join
//! one. The descriptors are decoded at the first request, because most servers are never asked.

use std::sync::{Arc, OnceLock};

use http::Request;
use tonic::Status;
use tonic::body::Body;
use tower::util::{BoxCloneSyncService, ServiceExt as _, service_fn};

use super::services::{Handler, Services};

/// The name of the service.
const NAME: &str = "grpc.reflection.v1.ServerReflection";
/// Maximum size of a request in bytes, which is a name.
const LARGEST_REQUEST: usize = 4 << 10;

/// Adds reflection for these services to them.
pub fn with_reflection(mut services: Services) -> Services {
    let reflection = reflection(services.names());
    services.add(NAME, reflection);
    services
}

fn reflection(names: Vec<&'static str>) -> Handler {
    let built = Arc::new(OnceLock::new());
    BoxCloneSyncService::new(service_fn(move |request: Request<Body>| {
        let service = built.get_or_init(|| build(&names)).clone();
        async move {
            match service {
                Some(service) => service.oneshot(request).await,
                None => Ok(Status::internal("the descriptors are invalid").into_http()),
            }
        }
    }))
}

fn build(names: &[&'static str]) -> Option<Handler> {
    let mut builder = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(crate::FILE_DESCRIPTOR_SET)
        .include_reflection_service(false);
    for name in names {
        builder = builder.with_service_name(*name);
    }
    match builder.build_v1() {
        Ok(service) => {
            let service = service.max_decoding_message_size(LARGEST_REQUEST);
            Some(BoxCloneSyncService::new(service))
        }
        Err(error) => {
            tracing::error!("cannot serve reflection: {error}");
            None
        }
    }
}
