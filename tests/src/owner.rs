//! The owner of a cluster.
//!
//! The owner and the calls are those of [`hearth_lab`]; this module adds the repetition of calls, their bounds, and
//! waits.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use futures::StreamExt;
use hearth_api::client::{self, Endpoint, within};
use hearth_api::identity::UserCredentials;
use hearth_api::tls::TlsError;
use hearth_api::v1::{
    self, GetClusterInfoResponse, NodeParameters, StorageSecurityPolicy, WatchRequest,
};
use hearth_lab::formation::is_well;
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::owner::with_storage;
use hearth_lab::{Owner, tool};
use hearth_operator::ClusterStatus;
use tonic::Status;

use crate::TestCtx;
use crate::bounds::{self, until_ok};

/// The name of the context that [`hearthctl`] makes.
pub const CONTEXT: &str = "test";

/// Parameters for the first node of this owner's cluster, with a domain that distinguishes two of them later.
pub fn parameters_for_domain(owner: &Owner, domain: &str) -> NodeParameters {
    let configuration = v1::ClusterConfiguration {
        cluster_domain: domain.to_owned(),
        ..with_storage(StorageSecurityPolicy::NeedsInsecure)
    };
    owner.parameters(configuration)
}

/// hearthctl with this contexts file, and in it the context [`CONTEXT`] of the cluster of these curators, whose owner's
/// files are in the folder `founder`.
///
/// # Errors
/// If it does not take ownership within the bound.
pub async fn hearthctl(
    test: &TestCtx,
    config: PathBuf,
    founder: &Path,
    curators: &[Endpoint],
) -> anyhow::Result<Hearthctl> {
    let hearthctl = Hearthctl {
        program: test.artifacts().hearthctl.clone(),
        config,
    };
    let take = hearthctl.take_ownership(CONTEXT, founder, curators);
    // A curator that was just elected, or has lost its leader, is unavailable for a moment.
    until_ok("the owner's certificate", bounds::SETTLED, || async {
        Ok(tool::run(&take).await?)
    })
    .await?;
    Ok(hearthctl)
}

/// An owner with a certificate, who repeats calls while a curator has no contact with consensus.
#[derive(Clone)]
pub struct Operator(hearth_operator::Operator);

impl Operator {
    /// First contact, then a certificate for the owner key.
    ///
    /// # Errors
    /// If either fails.
    pub async fn take_ownership(owner: &Owner, curator: Endpoint) -> anyhow::Result<Self> {
        let taken = owner.take_ownership(vec![curator], bounds::CALL).await;
        Ok(Self(taken.context("cannot take ownership")?))
    }

    /// The same owner, connected to these curators only.
    ///
    /// # Errors
    /// If the credentials do not match.
    pub fn at(&self, curators: Vec<Endpoint>) -> Result<Self, TlsError> {
        Ok(Self(self.0.at(curators)?))
    }

    /// The calls without repetition.
    pub fn once(&self) -> &hearth_operator::Operator {
        &self.0
    }

    /// The credentials for mutual TLS.
    pub fn credentials(&self) -> &UserCredentials {
        self.0.credentials()
    }

    /// The nodes of the cluster.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn nodes(&self) -> anyhow::Result<Vec<v1::Node>> {
        retry_unavailable(|| self.0.nodes())
            .await
            .context("GetNodes")
    }

    /// The status of its nodes and its consensus.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn cluster_status(&self) -> anyhow::Result<ClusterStatus> {
        let cluster_status = retry_unavailable(|| self.0.cluster_status()).await;
        cluster_status.context("GetConsensusStatus and GetNodes")
    }

    /// Information about the cluster.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn info(&self) -> anyhow::Result<GetClusterInfoResponse> {
        retry_unavailable(|| self.0.info())
            .await
            .context("GetClusterInfo")
    }

    /// Parameters by which a machine registers with this cluster.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn register_parameters(&self) -> anyhow::Result<NodeParameters> {
        let parameters = retry_unavailable(|| self.0.register_parameters()).await;
        parameters.context("GetRegisterTicket and GetClusterInfo")
    }

    /// Watches the nodes until the only one is healthy and HOME in this boot, and returns its entry in the list.
    ///
    /// # Errors
    /// If that times out, or there are other nodes.
    pub async fn one_healthy_node(&self) -> anyhow::Result<v1::Node> {
        self.one_healthy_node_that(|_| true).await
    }

    /// The same, for a node that also satisfies the predicate.
    ///
    /// # Errors
    /// If that times out, or there are other nodes.
    pub async fn one_healthy_node_that(
        &self,
        wanted: impl Fn(&v1::Node) -> bool,
    ) -> anyhow::Result<v1::Node> {
        let well = |node: &v1::Node| wanted(node) && is_well(node);
        let mut seen = Vec::new();
        let watch = async {
            let request = WatchRequest::default();
            let mut events = self.0.curator().watch(request).await?.into_inner();
            while let Some(event) = events.next().await {
                seen = event?.nodes;
                if seen.iter().any(well) {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        let ended = within(bounds::SOON, watch).await;
        let nodes = self.nodes().await?;
        ensure!(
            nodes.len() == 1 && well(&nodes[0]),
            "expected one healthy node that is HOME; the watch ended with {ended:?} on {seen:?}, \
             and the list has {nodes:?}"
        );
        Ok(nodes[0].clone())
    }
}

/// Repeats a call while the curator answers that it has no contact with consensus.
///
/// # Errors
/// Any other error of the call, or the last one.
pub async fn retry_unavailable<T, F>(call: impl Fn() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    client::retry_unavailable(bounds::SETTLED, call).await
}
