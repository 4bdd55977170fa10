//! Whoever founds a cluster, and what that person does with it.
//!
//! The owner and the calls are those of [`hearth_lab`]; here stand what tests
//! ask again, for how long, and what they wait for.

use anyhow::{Context, ensure};
use futures::StreamExt;
use hearth_api::{
    client::{Endpoint, within},
    identity::UserCredentials,
    operator::{self, Standing},
    tls::TlsError,
    v1::{self, GetClusterInfoResponse, NodeParameters, StorageSecurityPolicy, WatchRequest},
};
use hearth_lab::{Owner, formation::is_well, owner::with_storage};
use tonic::Status;

use crate::bounds;

/// Parameters for the first node of this owner's cluster, with a domain by
/// which two of them can be told apart later.
pub fn parameters_for_domain(owner: &Owner, domain: &str) -> NodeParameters {
    let configuration = v1::ClusterConfiguration {
        cluster_domain: domain.to_owned(),
        ..with_storage(StorageSecurityPolicy::NeedsInsecure)
    };
    owner.parameters(configuration)
}

/// An owner with a certificate, who asks again while a curator is out of touch.
#[derive(Clone)]
pub struct Operator(operator::Operator);

impl Operator {
    /// First contact, then a certificate for the owner key.
    ///
    /// # Errors
    /// If either is refused.
    pub async fn take_ownership(owner: &Owner, curator: Endpoint) -> anyhow::Result<Self> {
        let taken = owner.take_ownership(vec![curator], bounds::CALL).await;
        Ok(Self(taken.context("take ownership")?))
    }

    /// The same one, at these curators and no others.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn at(&self, curators: Vec<Endpoint>) -> Result<Self, TlsError> {
        Ok(Self(self.0.at(curators)?))
    }

    /// The calls, each made once.
    pub fn once(&self) -> &operator::Operator {
        &self.0
    }

    /// What it proves itself with.
    pub fn credentials(&self) -> &UserCredentials {
        self.0.credentials()
    }

    /// The nodes of the cluster.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn nodes(&self) -> anyhow::Result<Vec<v1::Node>> {
        patiently(|| self.0.nodes()).await.context("GetNodes")
    }

    /// Its nodes and its consensus.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn standing(&self) -> anyhow::Result<Standing> {
        let standing = patiently(|| self.0.standing()).await;
        standing.context("GetConsensusStatus and GetNodes")
    }

    /// The cluster.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn info(&self) -> anyhow::Result<GetClusterInfoResponse> {
        patiently(|| self.0.info()).await.context("GetClusterInfo")
    }

    /// What a machine is told so that it registers with this cluster.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn register_parameters(&self) -> anyhow::Result<NodeParameters> {
        let parameters = patiently(|| self.0.register_parameters()).await;
        parameters.context("GetRegisterTicket and GetClusterInfo")
    }

    /// Watches until the cluster holds a node for healthy and HOME in this
    /// boot, and then lists it: the only one there is.
    ///
    /// # Errors
    /// If it does not come to that, or there are others.
    pub async fn one_healthy_node(&self) -> anyhow::Result<v1::Node> {
        self.one_healthy_node_that(|_| true).await
    }

    /// The same, and this is true of it.
    ///
    /// # Errors
    /// If it does not come to that, or there are others.
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
            "wanted one healthy node that is HOME; the watch ended with {ended:?} on {seen:?}, \
             and listed are {nodes:?}"
        );
        Ok(nodes[0].clone())
    }
}

/// Makes a call again while the curator is out of touch with consensus, as it
/// says to do.
///
/// # Errors
/// What the call says else, or at last.
pub async fn patiently<T, F>(call: impl Fn() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    hearth_lab::patience::patiently(bounds::SETTLED, call).await
}
