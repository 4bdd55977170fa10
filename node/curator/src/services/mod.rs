//! The curator's gRPC services. Each method checks what it was sent, asks or
//! changes the records, and answers; who may call it was decided before.

mod aaa;
mod administration;
mod bucket;
mod curator;
mod enrolment;
mod kubernetes;
mod local;
mod management;
mod networking;
mod request;
mod watch;

use std::sync::Arc;

use hearth_api::{
    server::Services,
    v1::{
        aaa_server::AaaServer, curator_local_server::CuratorLocalServer,
        curator_server::CuratorServer, management_server::ManagementServer,
    },
};
use tonic::server::NamedService;
use tonic_health::{ServingStatus, server::HealthReporter};

use super::{core::Core, reads::Reads};

/// Bytes of one request. The largest there is, a filter, has far less.
const LARGEST_OPERATOR_REQUEST: usize = 256 << 10;
/// Bytes of one request of what strangers may call: a nonce, or a name. They
/// may leave many of them half sent.
const LARGEST_STRANGER_REQUEST: usize = 1 << 10;
/// Bytes of one request of nodes, and of machines that want to become one: a
/// registration with all the labels it may have has 26 KiB.
const LARGEST_NODE_REQUEST: usize = 32 << 10;

/// The names by which health is asked for; the empty one is the whole server.
const HEALTH_NAMES: [&str; 5] = [
    "",
    <CuratorServer<curator::Service> as NamedService>::NAME,
    <CuratorLocalServer<local::Service> as NamedService>::NAME,
    <AaaServer<aaa::Service> as NamedService>::NAME,
    <ManagementServer<management::Service> as NamedService>::NAME,
];

/// All of them, and the switch of their health.
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
    (HealthSwitch { reporter }, services)
}

/// Says whether this curator serves: when it is in touch with consensus.
pub struct HealthSwitch {
    reporter: HealthReporter,
}

impl HealthSwitch {
    /// Follows the curator, for ever.
    pub async fn follow(&self, reads: &Reads) -> std::convert::Infallible {
        loop {
            self.not_serving().await;
            reads.fresh().await;
            self.set(ServingStatus::Serving).await;
            reads.stale().await;
        }
    }

    /// The curator does not serve yet, or is about to end.
    pub async fn not_serving(&self) {
        self.set(ServingStatus::NotServing).await;
    }

    async fn set(&self, status: ServingStatus) {
        for name in HEALTH_NAMES {
            self.reporter.set_service_status(name, status).await;
        }
    }
}
