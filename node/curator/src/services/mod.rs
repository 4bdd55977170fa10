//! The curator's gRPC services. Each method validates the request, reads or changes records, and
//! answers. Authorization has taken place before a method is called.

mod aaa;
mod attestation;
mod curator;
mod enrolment;
mod images;
mod kubernetes;
mod local;
mod management;
mod networking;
mod node_commands;
mod report;
mod request;
mod secrets_keys;
mod watch;

use std::sync::Arc;

use hearth_api::server::{Services, with_reflection};
use hearth_api::v1::aaa_server::AaaServer;
use hearth_api::v1::curator_local_server::CuratorLocalServer;
use hearth_api::v1::curator_server::CuratorServer;
use hearth_api::v1::management_server::ManagementServer;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::core::Core;
use super::reads::ReadIndex;

/// Maximum size of an operator's request in bytes. The largest one, a filter, is far smaller.
const LARGEST_OPERATOR_REQUEST: usize = 256 << 10;
/// Maximum size of a request of an unauthenticated client, which is a nonce or a name. It is small,
/// because such a client can leave many requests incomplete.
const LARGEST_STRANGER_REQUEST: usize = 1 << 10;
/// Maximum size of a request of a node, or of a machine that registers: a registration with the
/// maximum number of labels has 26 KiB.
const LARGEST_NODE_REQUEST: usize = 32 << 10;

/// The service names of the health service; the empty one stands for the whole server.
const HEALTH_NAMES: [&str; 5] = [
    "",
    <CuratorServer<curator::Service> as NamedService>::NAME,
    <CuratorLocalServer<local::Service> as NamedService>::NAME,
    <AaaServer<aaa::Service> as NamedService>::NAME,
    <ManagementServer<management::Service> as NamedService>::NAME,
];

/// All services, and the switch of their health.
pub fn all(core: &Arc<Core>) -> (HealthSwitch, Services) {
    let (reporter, health) = tonic_health::server::health_reporter();
    let services = Services::new()
        .with(watch::WithWatch::new(
            core.clone(),
            CuratorServer::new(curator::Service::new(core.clone()))
                .max_decoding_message_size(LARGEST_NODE_REQUEST),
        ))
        .with(
            CuratorLocalServer::new(local::Service::new(core.clone()))
                .max_decoding_message_size(LARGEST_STRANGER_REQUEST),
        )
        .with(
            AaaServer::new(aaa::Service::new(core.clone()))
                .max_decoding_message_size(LARGEST_STRANGER_REQUEST),
        )
        .with(
            ManagementServer::new(management::Service::new(core.clone()))
                .max_decoding_message_size(LARGEST_OPERATOR_REQUEST),
        )
        .with(health.max_decoding_message_size(LARGEST_STRANGER_REQUEST));
    (HealthSwitch { reporter }, with_reflection(services))
}

/// Reports this curator's health: it is serving while it is not stale.
pub struct HealthSwitch {
    reporter: HealthReporter,
}

impl HealthSwitch {
    /// Updates the health from the curator's freshness. Never returns.
    pub async fn follow(&self, reads: &ReadIndex) -> std::convert::Infallible {
        loop {
            self.not_serving().await;
            reads.fresh().await;
            self.set(ServingStatus::Serving).await;
            reads.stale().await;
        }
    }

    /// Sets `NOT_SERVING`: the curator is not ready yet, or shutting down.
    pub async fn not_serving(&self) {
        self.set(ServingStatus::NotServing).await;
    }

    async fn set(&self, status: ServingStatus) {
        for name in HEALTH_NAMES {
            self.reporter.set_service_status(name, status).await;
        }
    }
}
