//! The client of a cluster's operators: the owner, and the users to whom the owner gives a
//! certificate.
//!
//! [`hearth_api::first_contact`] and [`hearth_api::escrow`] document how an owner gets a certificate;
//! [`Operator`] performs both in order, and then makes the calls that are needed to form and manage
//! a cluster. Each call is made once, and its whole answer is limited by [`Options::call_timeout`],
//! also that of a stream; which calls are repeated, and when, is up to the caller. This crate also
//! makes the parameters of machines: [`cluster_bootstrap`] and [`Operator::register_parameters`].
//!
//! [`unlock`] is what the owner does for a cluster that is not running. Only host tools use this
//! crate; it is not part of a node.

pub mod unlock;

use hearth_api::certificates::{ClusterCa, Leaf};
use hearth_api::client::{Channel, Curators, Endpoint, Options, within};
use hearth_api::escrow::{self, EscrowError};
use hearth_api::first_contact::{self, FirstContactError};
use hearth_api::identity::{FirstContactSecret, NodeId, OwnerKey, PublicKey, UserCredentials};
use hearth_api::tls::{self, ExpectedServer, TlsError};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::node_management_client::NodeManagementClient;
use hearth_api::v1::{self, node_parameters, node_selector};
use hearth_tpm::Digest;
use hearth_tpm::images::TrustedImage;
use tonic::{Response, Status};

/// Why ownership could not be taken, by step.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// No endpoint was given.
    #[error("no curator is known")]
    NoCurator,
    /// No curator has proven the cluster's CA; the error of the last one.
    #[error("first contact failed")]
    FirstContact(#[from] FirstContactError),
    /// No certificate for the owner key was obtained.
    #[error(transparent)]
    Escrow(#[from] EscrowError),
    /// The certificate cannot be used for a connection.
    #[error("cannot use the certificate")]
    Tls(#[from] TlsError),
}

/// The status of a cluster, as its curators report it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterStatus {
    /// Its nodes.
    pub nodes: Vec<v1::Node>,
    /// Its consensus.
    pub consensus: v1::GetConsensusStatusResponse,
}

/// An operator with a certificate. Cheap to clone; the clones share their connections.
#[derive(Clone)]
pub struct Operator {
    credentials: UserCredentials,
    curators: Curators,
    options: Options,
}

impl Operator {
    /// First contact with the first curator that answers, then a certificate for the owner key.
    ///
    /// # Errors
    /// If none of them proves the cluster's CA, or the cluster issues no certificate.
    pub async fn take_ownership(
        key: &OwnerKey,
        secret: &FirstContactSecret,
        curators: Vec<Endpoint>,
        options: Options,
    ) -> Result<(Operator, Leaf), OwnershipError> {
        let ca = meet(&curators, secret, &options).await?;
        let exchanged = escrow::exchange(curators.clone(), key, &ca, None, options.clone()).await?;
        let operator = Operator::connect(exchanged.credentials, curators, options)?;
        Ok((operator, exchanged.leaf))
    }

    /// A client with these credentials of any of these curators. Connects at the first call.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn connect(
        credentials: UserCredentials,
        curators: Vec<Endpoint>,
        options: Options,
    ) -> Result<Operator, TlsError> {
        let server = ExpectedServer::AnyNode;
        let tls = tls::user_client_config(&credentials, server, options.clock.clone())?;
        Ok(Operator {
            credentials,
            curators: Curators::new(curators, tls, options.clone()),
            options,
        })
    }

    /// The same client, for these curators only.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn at(&self, curators: Vec<Endpoint>) -> Result<Operator, TlsError> {
        Operator::connect(self.credentials.clone(), curators, self.options.clone())
    }

    /// The credentials of this client.
    pub fn credentials(&self) -> &UserCredentials {
        &self.credentials
    }

    /// A channel to the curators, for calls that have no method here.
    pub fn channel(&self) -> Channel {
        self.curators.channel()
    }

    /// The client of the operators' service.
    pub fn management(&self) -> ManagementClient<Channel> {
        ManagementClient::new(self.channel())
    }

    /// The client of the nodes' service, for its calls that operators may make as well.
    pub fn curator(&self) -> CuratorClient<Channel> {
        CuratorClient::new(self.channel())
    }

    /// The client of node management of exactly this node at this address; another node that
    /// answers there is rejected.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn node_management(
        &self,
        id: NodeId,
        at: Endpoint,
    ) -> Result<NodeManagementClient<Channel>, TlsError> {
        let (server, clock) = (ExpectedServer::Node(id), self.options.clock.clone());
        let tls = tls::user_client_config(&self.credentials, server, clock)?;
        let node = Curators::new(vec![at], tls, self.options.clone());
        Ok(NodeManagementClient::new(node.channel()))
    }

    /// All nodes.
    pub async fn nodes(&self) -> Result<Vec<v1::Node>, Status> {
        let request = v1::GetNodesRequest::default();
        self.whole(nodes(self.management(), request)).await
    }

    /// Nodes and etcd status, each a consistent snapshot.
    pub async fn cluster_status(&self) -> Result<ClusterStatus, Status> {
        let mut curator = self.curator();
        let status = curator.get_consensus_status(v1::GetConsensusStatusRequest {});
        Ok(ClusterStatus {
            consensus: self.answer(status).await?,
            nodes: self.nodes().await?,
        })
    }

    /// The cluster's info.
    pub async fn info(&self) -> Result<v1::GetClusterInfoResponse, Status> {
        let mut management = self.management();
        let call = management.get_cluster_info(v1::GetClusterInfoRequest {});
        self.answer(call).await
    }

    /// The ID of the node whose curator is the leader; waits until there is one.
    pub async fn leader(&self) -> Result<String, Status> {
        let mut local = CuratorLocalClient::new(self.channel());
        let call = async {
            let request = v1::GetCurrentLeaderRequest {};
            let mut leaders = local.get_current_leader(request).await?.into_inner();
            while let Some(answer) = leaders.message().await? {
                if !answer.leader_node_id.is_empty() {
                    return Ok(answer.leader_node_id);
                }
            }
            Err(Status::unavailable("the curator closed the stream"))
        };
        self.whole(call).await
    }

    /// The register ticket; with `rotate` a new one, which invalidates the previous one.
    pub async fn register_ticket(&self, rotate: bool) -> Result<Vec<u8>, Status> {
        let mut management = self.management();
        let call = management.get_register_ticket(v1::GetRegisterTicketRequest { rotate });
        Ok(self.answer(call).await?.register_ticket)
    }

    /// The parameters with which a machine registers with this cluster. `Unavailable` until a
    /// curator has reported its address: the first node is HOME before that, and a machine rejects
    /// parameters without an address.
    pub async fn register_parameters(&self) -> Result<v1::NodeParameters, Status> {
        let register_ticket = self.register_ticket(false).await?;
        let info = self.info().await?;
        let directory = info.directory.filter(|known| !known.nodes.is_empty());
        let silent = || Status::unavailable("no curator has reported its address yet");
        let register = v1::ClusterRegister {
            cluster_directory: Some(directory.ok_or_else(silent)?),
            register_ticket,
            ca_certificate: info.ca_certificate,
            labels: Vec::new(),
        };
        Ok(parameters(node_parameters::Cluster::ClusterRegister(
            register,
        )))
    }

    /// Approves the node with this key; returns the node afterwards.
    pub async fn approve(&self, public_key: Vec<u8>) -> Result<v1::Node, Status> {
        let node = Some(node_selector::Node::PublicKey(public_key));
        let request = v1::ApproveNodeRequest {
            node: Some(v1::NodeSelector { node }),
        };
        let mut management = self.management();
        let answer = self.answer(management.approve_node(request)).await?;
        Ok(answer.node.unwrap_or_default())
    }

    /// Requests the roles of a node that are set in the request to be assigned or removed.
    pub async fn update_roles(
        &self,
        request: v1::UpdateNodeRolesRequest,
    ) -> Result<v1::UpdateNodeRolesResponse, Status> {
        let mut management = self.management();
        self.answer(management.update_node_roles(request)).await
    }

    /// Requests that a node becomes a consensus member, or stops being one.
    pub async fn set_consensus_member(&self, id: &str, wanted: bool) -> Result<(), Status> {
        let request = v1::UpdateNodeRolesRequest {
            node: Some(by_id(id)),
            consensus_member: Some(wanted),
            ..v1::UpdateNodeRolesRequest::default()
        };
        self.update_roles(request).await.map(drop)
    }

    /// Assigns these Kubernetes roles to a node, in addition to those it has.
    pub async fn give_kubernetes_roles(
        &self,
        id: &str,
        controller: bool,
        worker: bool,
    ) -> Result<(), Status> {
        let request = v1::UpdateNodeRolesRequest {
            node: Some(by_id(id)),
            kubernetes_controller: controller.then_some(true),
            kubernetes_worker: worker.then_some(true),
            ..v1::UpdateNodeRolesRequest::default()
        };
        self.update_roles(request).await.map(drop)
    }

    /// Sets and removes labels of a node.
    pub async fn update_labels(
        &self,
        request: v1::UpdateNodeLabelsRequest,
    ) -> Result<v1::UpdateNodeLabelsResponse, Status> {
        let mut management = self.management();
        self.answer(management.update_node_labels(request)).await
    }

    /// Decommissions a node.
    pub async fn decommission(
        &self,
        node: v1::NodeSelector,
    ) -> Result<v1::DecommissionNodeResponse, Status> {
        let request = v1::DecommissionNodeRequest { node: Some(node) };
        let mut management = self.management();
        self.answer(management.decommission_node(request)).await
    }

    /// Deletes a node from the cluster.
    pub async fn delete(&self, request: v1::DeleteNodeRequest) -> Result<(), Status> {
        let mut management = self.management();
        self.answer(management.delete_node(request)).await.map(drop)
    }

    /// Has the cluster trust an image.
    pub async fn trust_image(&self, image: &TrustedImage) -> Result<(), Status> {
        let mut management = self.management();
        let request = v1::TrustImageRequest {
            image: Some(trusted_image(image)),
        };
        self.answer(management.trust_image(request)).await.map(drop)
    }

    /// Replaces the owner and the recovery recipient.
    pub async fn replace_owner(&self, replacement: v1::OwnerReplacement) -> Result<(), Status> {
        let mut management = self.management();
        let request = v1::ReplaceOwnerRequest {
            replacement: Some(replacement),
        };
        self.answer(management.replace_owner(request))
            .await
            .map(drop)
    }

    async fn answer<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Status> {
        self.whole(call).await.map(Response::into_inner)
    }

    async fn whole<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        within(self.options.call_timeout, call).await
    }
}

/// The cluster's CA, proven by the first of the curators that answers; they are tried in order.
///
/// # Errors
/// The error of the last one, if none proves it.
pub async fn meet(
    curators: &[Endpoint],
    secret: &FirstContactSecret,
    options: &Options,
) -> Result<ClusterCa, OwnershipError> {
    let mut last = OwnershipError::NoCurator;
    for curator in curators {
        let clock = options.clock.clone();
        match first_contact::fetch_ca(curator, secret, options.connect_timeout, clock).await {
            Ok(ca) => return Ok(ca),
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

/// All nodes that match the request, as a consistent snapshot.
pub async fn nodes<T>(
    mut management: ManagementClient<T>,
    request: v1::GetNodesRequest,
) -> Result<Vec<v1::Node>, Status>
where
    T: tonic::client::GrpcService<tonic::body::Body>,
    T::Error: Into<tonic::codegen::StdError>,
    T::ResponseBody: tonic::codegen::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as tonic::codegen::Body>::Error: Into<tonic::codegen::StdError> + Send,
{
    let mut answers = management.get_nodes(request).await?.into_inner();
    let mut nodes = Vec::new();
    while let Some(answer) = answers.message().await? {
        nodes.extend(answer.nodes);
    }
    Ok(nodes)
}

/// Selects the node with this ID.
pub fn by_id(id: &str) -> v1::NodeSelector {
    v1::NodeSelector {
        node: Some(node_selector::Node::NodeId(id.to_owned())),
    }
}

/// An image for TrustImage.
pub fn trusted_image(image: &TrustedImage) -> v1::TrustedImage {
    let bytes = |digests: &[Digest]| digests.iter().map(|digest| digest.0.to_vec()).collect();
    v1::TrustedImage {
        parts: image.parts.0.to_vec(),
        programs: bytes(&image.programs),
        command_lines: bytes(&image.command_lines),
        trusted_at: 0,
    }
}

/// The bootstrap section of the parameters for a cluster with this configuration, owner key and
/// secret.
pub fn cluster_bootstrap(
    owner: &PublicKey,
    secret: &FirstContactSecret,
    configuration: v1::ClusterConfiguration,
) -> v1::ClusterBootstrap {
    v1::ClusterBootstrap {
        owner_public_key: owner.as_bytes().to_vec(),
        first_contact_secret: secret.expose().to_vec(),
        initial_cluster_configuration: Some(configuration),
        ..v1::ClusterBootstrap::default()
    }
}

/// Parameters that say only how the machine gets into a cluster.
pub fn parameters(cluster: node_parameters::Cluster) -> v1::NodeParameters {
    v1::NodeParameters {
        cluster: Some(cluster),
        ..v1::NodeParameters::default()
    }
}

#[cfg(test)]
mod tests;
