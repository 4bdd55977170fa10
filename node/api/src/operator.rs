//! The client of whoever operates a cluster: its owner, and those to whom the owner gives a certificate.
//!
//! How an owner comes to a certificate stands in [`crate::first_contact`] and [`crate::escrow`]; [`Operator`] does both in
//! their order, and then makes the calls that forming and looking after a cluster take. Each call is made once, and its
//! whole answer is bounded by [`Options::call_timeout`], that of a stream, too; which calls are made again, and when, only
//! their caller knows. Here stand as well the parameters that machines are told: [`cluster_bootstrap`] and
//! [`Operator::register_parameters`].
//!
//! Only the tools of the host use it (feature `operator`). It is no part of a node.

use tonic::{Response, Status};

use crate::certificates::{ClusterCa, Leaf};
use crate::client::{Channel, Curators, Endpoint, Options, within};
use crate::escrow::{self, EscrowError};
use crate::first_contact::{self, FirstContactError};
use crate::identity::{FirstContactSecret, NodeId, OwnerKey, PublicKey, UserCredentials};
use crate::tls::{self, ExpectedServer, TlsError};
use crate::v1::curator_client::CuratorClient;
use crate::v1::curator_local_client::CuratorLocalClient;
use crate::v1::management_client::ManagementClient;
use crate::v1::node_management_client::NodeManagementClient;
use crate::v1::{self, node_parameters, node_selector};

/// Ownership was not taken, by the step that failed.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// There is nobody to ask.
    #[error("no curator is known")]
    NoCurator,
    /// Nobody has proven the cluster's CA; why the last one has not.
    #[error("first contact")]
    FirstContact(#[from] FirstContactError),
    /// There is no certificate for the owner key.
    #[error(transparent)]
    Escrow(#[from] EscrowError),
    /// The certificate cannot be used for a connection.
    #[error("use the certificate")]
    Tls(#[from] TlsError),
}

/// How a cluster stands, by its own word.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
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
    /// First contact with whichever of the curators answers, then a certificate for the owner key.
    ///
    /// # Errors
    /// If none of them proves itself, or the cluster issues no certificate.
    pub async fn take_ownership(
        key: &OwnerKey,
        secret: &FirstContactSecret,
        curators: Vec<Endpoint>,
        options: Options,
    ) -> Result<(Operator, Leaf), OwnershipError> {
        let ca = meet(&curators, secret, &options).await?;
        let exchanged = escrow::exchange(curators.clone(), key, &ca, options.clone());
        let (credentials, leaf) = exchanged.await?;
        Ok((Operator::connect(credentials, curators, options)?, leaf))
    }

    /// Whoever has these credentials, at whichever of these curators answers. Connects with the first call.
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

    /// The same one, at these curators and no others.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn at(&self, curators: Vec<Endpoint>) -> Result<Operator, TlsError> {
        Operator::connect(self.credentials.clone(), curators, self.options.clone())
    }

    /// What it proves itself with.
    pub fn credentials(&self) -> &UserCredentials {
        &self.credentials
    }

    /// To the curators, for calls that are not here.
    pub fn channel(&self) -> Channel {
        self.curators.channel()
    }

    /// The calls of operators.
    pub fn management(&self) -> ManagementClient<Channel> {
        ManagementClient::new(self.channel())
    }

    /// The calls of nodes that are also an operator's.
    pub fn curator(&self) -> CuratorClient<Channel> {
        CuratorClient::new(self.channel())
    }

    /// The management of this very node at this address, and of no other that may answer there.
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

    /// The nodes.
    pub async fn nodes(&self) -> Result<Vec<v1::Node>, Status> {
        let request = v1::GetNodesRequest::default();
        self.whole(nodes(self.management(), request)).await
    }

    /// Nodes and consensus, at one moment each.
    pub async fn standing(&self) -> Result<Standing, Status> {
        let mut curator = self.curator();
        let status = curator.get_consensus_status(v1::GetConsensusStatusRequest {});
        Ok(Standing {
            consensus: self.answer(status).await?,
            nodes: self.nodes().await?,
        })
    }

    /// The cluster.
    pub async fn info(&self) -> Result<v1::GetClusterInfoResponse, Status> {
        let mut management = self.management();
        let call = management.get_cluster_info(v1::GetClusterInfoRequest {});
        self.answer(call).await
    }

    /// The ID of the node whose curator leads, as soon as there is one.
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
            Err(Status::unavailable("the curator ended the stream"))
        };
        self.whole(call).await
    }

    /// The ticket by which machines ask to be registered; another one, if the one before is to be worth nothing any more.
    pub async fn register_ticket(&self, rotate: bool) -> Result<Vec<u8>, Status> {
        let mut management = self.management();
        let call = management.get_register_ticket(v1::GetRegisterTicketRequest { rotate });
        Ok(self.answer(call).await?.register_ticket)
    }

    /// What a machine must be told so that it registers with this cluster. `Unavailable` while no curator has said where
    /// it is: a founder is HOME before that, and a node that is told of nobody refuses.
    pub async fn register_parameters(&self) -> Result<v1::NodeParameters, Status> {
        let register_ticket = self.register_ticket(false).await?;
        let info = self.info().await?;
        let directory = info.directory.filter(|known| !known.nodes.is_empty());
        let silent = || Status::unavailable("no curator has said yet where it is");
        Ok(v1::NodeParameters::from(v1::ClusterRegister {
            cluster_directory: Some(directory.ok_or_else(silent)?),
            register_ticket,
            ca_certificate: info.ca_certificate,
            labels: Vec::new(),
        }))
    }

    /// Lets in the node with this key; what it is then.
    pub async fn approve(&self, public_key: Vec<u8>) -> Result<v1::Node, Status> {
        let node = Some(node_selector::Node::PublicKey(public_key));
        let request = v1::ApproveNodeRequest {
            node: Some(v1::NodeSelector { node }),
        };
        let mut management = self.management();
        let answer = self.answer(management.approve_node(request)).await?;
        Ok(answer.node.unwrap_or_default())
    }

    /// Wants a node to hold other roles, or not, as far as the request says.
    pub async fn update_roles(
        &self,
        request: v1::UpdateNodeRolesRequest,
    ) -> Result<v1::UpdateNodeRolesResponse, Status> {
        let mut management = self.management();
        self.answer(management.update_node_roles(request)).await
    }

    /// Wants a node to be a consensus member, or not.
    pub async fn set_consensus_member(&self, id: &str, wanted: bool) -> Result<(), Status> {
        let request = v1::UpdateNodeRolesRequest {
            node: Some(by_id(id)),
            consensus_member: Some(wanted),
            ..v1::UpdateNodeRolesRequest::default()
        };
        self.update_roles(request).await.map(drop)
    }

    /// Gives these of Kubernetes' roles to a node; those that it has it keeps.
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

    /// Takes a node out of service.
    pub async fn decommission(
        &self,
        node: v1::NodeSelector,
    ) -> Result<v1::DecommissionNodeResponse, Status> {
        let request = v1::DecommissionNodeRequest { node: Some(node) };
        let mut management = self.management();
        self.answer(management.decommission_node(request)).await
    }

    /// Makes the cluster forget a node.
    pub async fn delete(&self, request: v1::DeleteNodeRequest) -> Result<(), Status> {
        let mut management = self.management();
        self.answer(management.delete_node(request)).await.map(drop)
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

/// The cluster's CA, proven by whichever of the curators answers first, in their order.
///
/// # Errors
/// What is wrong with the last one, if none proves it.
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

/// All nodes that the request asks for, at one moment.
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

/// The node with this ID, for calls that are about it.
pub fn by_id(id: &str) -> v1::NodeSelector {
    v1::NodeSelector {
        node: Some(node_selector::Node::NodeId(id.to_owned())),
    }
}

/// What founds a cluster with this configuration, whose owner has this key and this secret.
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

/// What the first node is told, so that it founds such a cluster.
pub fn bootstrap_parameters(
    owner: &PublicKey,
    secret: &FirstContactSecret,
    configuration: v1::ClusterConfiguration,
) -> v1::NodeParameters {
    cluster_bootstrap(owner, secret, configuration).into()
}

impl From<v1::ClusterBootstrap> for v1::NodeParameters {
    fn from(bootstrap: v1::ClusterBootstrap) -> v1::NodeParameters {
        v1::NodeParameters {
            cluster: Some(node_parameters::Cluster::ClusterBootstrap(bootstrap)),
            ..v1::NodeParameters::default()
        }
    }
}

impl From<v1::ClusterRegister> for v1::NodeParameters {
    fn from(register: v1::ClusterRegister) -> v1::NodeParameters {
        v1::NodeParameters {
            cluster: Some(node_parameters::Cluster::ClusterRegister(register)),
            ..v1::NodeParameters::default()
        }
    }
}

#[cfg(test)]
mod tests;
