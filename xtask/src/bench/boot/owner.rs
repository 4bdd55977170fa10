//! Whoever founds the cluster of one boot, and asks it what nodes it has.
//!
//! In this process and not by hearthctl: the clock runs until the answer is there, and what it takes to start a program
//! on the host is no part of a boot.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use hearth_api::client::{Curators, Endpoint, Options, within};
use hearth_api::identity::{FirstContactSecret, OwnerKey, UserCredentials};
use hearth_api::tls::{self, ExpectedServer};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{self, GetNodesRequest};
use hearth_api::{escrow, first_contact};
use prost::Message;

/// For each call. A loaded host is slow, and none of them waits for anything.
const CALL: Duration = Duration::from_secs(60);

/// An owner, for one cluster.
pub struct Owner {
    /// Its key.
    pub key: OwnerKey,
    /// By which the cluster proves itself to it.
    pub secret: FirstContactSecret,
}

impl Owner {
    /// One that nobody knows yet.
    pub fn new() -> Owner {
        Owner {
            key: OwnerKey::generate(),
            secret: FirstContactSecret::generate(),
        }
    }

    /// Serialised parameters by which a node founds this owner's cluster. INSECURE, for the bare init encrypts nothing.
    pub fn parameters(&self) -> Vec<u8> {
        let bootstrap = v1::ClusterBootstrap {
            owner_public_key: self.key.public().as_bytes().to_vec(),
            first_contact_secret: self.secret.expose().to_vec(),
            initial_cluster_configuration: Some(v1::ClusterConfiguration {
                storage_security_policy: v1::StorageSecurityPolicy::NeedsInsecure.into(),
                ..v1::ClusterConfiguration::default()
            }),
            ..v1::ClusterBootstrap::default()
        };
        let parameters = v1::NodeParameters {
            cluster: Some(v1::node_parameters::Cluster::ClusterBootstrap(bootstrap)),
            ..v1::NodeParameters::default()
        };
        parameters.encode_to_vec()
    }

    /// First contact, a certificate for the owner key, and with that GetNodes over mutual TLS.
    pub async fn nodes(&self, curator: SocketAddr) -> Result<Vec<v1::Node>> {
        let curator = Endpoint::from(curator);
        let credentials = self.certificate(&curator).await?;
        let server = ExpectedServer::AnyNode;
        let tls = tls::user_client_config(&credentials, server, tls::wall_clock())?;
        let curators = Curators::new(vec![curator], tls, options());
        let mut management = ManagementClient::new(curators.channel());
        let call = async {
            let request = GetNodesRequest::default();
            let mut stream = management.get_nodes(request).await?.into_inner();
            let mut nodes = Vec::new();
            while let Some(response) = stream.message().await? {
                nodes.extend(response.nodes);
            }
            Ok(nodes)
        };
        within(CALL, call).await.context("GetNodes")
    }

    async fn certificate(&self, curator: &Endpoint) -> Result<UserCredentials> {
        let ca = first_contact::fetch_ca(curator, &self.secret, CALL, tls::wall_clock())
            .await
            .context("first contact")?;
        let curators = vec![curator.clone()];
        let (credentials, _) = escrow::exchange(curators, &self.key, &ca, options()).await?;
        Ok(credentials)
    }
}

fn options() -> Options {
    Options {
        connect_timeout: CALL,
        call_timeout: CALL,
        ..Options::default()
    }
}
