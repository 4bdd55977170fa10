//! Whoever founds a cluster, and what that person does with it.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use futures::StreamExt;
use hearth_api::{
    certificates::ClusterCa,
    client::{Channel, Curators, Endpoint, Options, within},
    escrow,
    first_contact::{self, FirstContactError},
    identity::{FirstContactSecret, OwnerKey, UserCredentials},
    owner::{self, OwnerFileError},
    tls::{self, ExpectedServer},
    v1::{
        self, ClusterBootstrap, ClusterConfiguration, ClusterRegister, ClusterState,
        GetClusterInfoRequest, GetClusterInfoResponse, GetCurrentLeaderRequest, GetNodesRequest,
        GetRegisterTicketRequest, NodeHealth, NodeParameters, StorageSecurityPolicy, WatchRequest,
        curator_client::CuratorClient, curator_local_client::CuratorLocalClient,
        management_client::ManagementClient, node_parameters,
    },
};

use tonic::{Code, Status};

use crate::bounds;

const KEY: &str = "owner-key.pem";
const SECRET: &str = "first-contact-secret";
/// Between two tries of a curator that is out of touch: it answers at once.
const ASK_AGAIN: std::time::Duration = std::time::Duration::from_millis(200);

/// An owner of a cluster to be: its key and the first-contact secret, with
/// the files that hold them.
#[derive(Clone, Debug)]
pub struct Owner {
    key: OwnerKey,
    secret: FirstContactSecret,
    folder: PathBuf,
}

impl Owner {
    /// A new one, whose files are in this folder.
    ///
    /// # Errors
    /// If they cannot be made, or are there.
    pub fn create(folder: &Path) -> Result<Self, OwnerFileError> {
        Ok(Self {
            key: owner::create_key(&folder.join(KEY))?,
            secret: owner::create_first_contact_secret(&folder.join(SECRET))?,
            folder: folder.to_owned(),
        })
    }

    /// Where the owner key is.
    pub fn key_file(&self) -> PathBuf {
        self.folder.join(KEY)
    }

    /// Where the first-contact secret is.
    pub fn secret_file(&self) -> PathBuf {
        self.folder.join(SECRET)
    }

    /// The owner key.
    pub fn key(&self) -> &OwnerKey {
        &self.key
    }

    /// The first-contact secret.
    pub fn secret(&self) -> &FirstContactSecret {
        &self.secret
    }

    /// Parameters for the first node of this owner's cluster.
    pub fn parameters(&self, policy: StorageSecurityPolicy) -> NodeParameters {
        let bootstrap = ClusterBootstrap {
            owner_public_key: self.key.public().as_bytes().to_vec(),
            first_contact_secret: self.secret.expose().to_vec(),
            initial_cluster_configuration: Some(ClusterConfiguration {
                storage_security_policy: policy.into(),
                ..ClusterConfiguration::default()
            }),
            ..ClusterBootstrap::default()
        };
        NodeParameters {
            cluster: Some(node_parameters::Cluster::ClusterBootstrap(bootstrap)),
            ..NodeParameters::default()
        }
    }

    /// The same with another cluster domain, by which two of them can be told
    /// apart later.
    pub fn parameters_for_domain(&self, domain: &str) -> NodeParameters {
        let mut parameters = self.parameters(StorageSecurityPolicy::NeedsInsecure);
        if let Some(node_parameters::Cluster::ClusterBootstrap(bootstrap)) = &mut parameters.cluster
            && let Some(configuration) = &mut bootstrap.initial_cluster_configuration
        {
            configuration.cluster_domain = domain.to_owned();
        }
        parameters
    }

    /// First contact: the CA of whoever answers there, proven.
    ///
    /// # Errors
    /// If nothing is proven.
    pub async fn meet(&self, curator: &Endpoint) -> Result<ClusterCa, FirstContactError> {
        first_contact::fetch_ca(curator, &self.secret, bounds::CALL, tls::wall_clock()).await
    }

    /// First contact, then a certificate for the owner key.
    ///
    /// # Errors
    /// If either is refused.
    pub async fn take_ownership(&self, curator: Endpoint) -> anyhow::Result<Operator> {
        let ca = self.meet(&curator).await.context("first contact")?;
        let curators = vec![curator.clone()];
        let (credentials, _) = escrow::exchange(curators, &self.key, &ca, options()).await?;
        Operator::connect(credentials, curator)
    }
}

/// An owner with a certificate.
#[derive(Clone)]
pub struct Operator {
    /// What it proves itself with.
    pub credentials: UserCredentials,
    channel: Channel,
}

impl Operator {
    /// Takes this curator; connects with the first call.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn connect(credentials: UserCredentials, curator: Endpoint) -> anyhow::Result<Self> {
        Self::connect_all(credentials, vec![curator])
    }

    fn connect_all(credentials: UserCredentials, curators: Vec<Endpoint>) -> anyhow::Result<Self> {
        let server = ExpectedServer::AnyNode;
        let tls = tls::user_client_config(&credentials, server, tls::wall_clock())?;
        let channel = Curators::new(curators, tls, options()).channel();
        Ok(Self {
            credentials,
            channel,
        })
    }

    /// The same one, at another curator.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn at(&self, curator: Endpoint) -> anyhow::Result<Self> {
        Self::connect(self.credentials.clone(), curator)
    }

    /// The same one, at whichever of these curators answers.
    ///
    /// # Errors
    /// If the credentials do not belong together.
    pub fn over(&self, curators: Vec<Endpoint>) -> anyhow::Result<Self> {
        Self::connect_all(self.credentials.clone(), curators)
    }

    /// The calls of operators.
    pub fn management(&self) -> ManagementClient<Channel> {
        ManagementClient::new(self.channel.clone())
    }

    /// The calls of nodes that are also an operator's.
    pub fn curator(&self) -> CuratorClient<Channel> {
        CuratorClient::new(self.channel.clone())
    }

    /// The ID of the node whose curator leads, as soon as there is one.
    ///
    /// # Errors
    /// If the curator does not say.
    pub async fn leader(&self) -> Result<String, Status> {
        let mut local = CuratorLocalClient::new(self.channel.clone());
        let leaders = local.get_current_leader(GetCurrentLeaderRequest {}).await?;
        let mut leaders = leaders.into_inner();
        while let Some(answer) = leaders.message().await? {
            if !answer.leader_node_id.is_empty() {
                return Ok(answer.leader_node_id);
            }
        }
        Err(Status::unavailable("the curator ended the stream"))
    }

    /// The nodes of the cluster.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn nodes(&self) -> anyhow::Result<Vec<v1::Node>> {
        patiently(|| self.list()).await.context("GetNodes")
    }

    /// The same by one call.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn list(&self) -> Result<Vec<v1::Node>, Status> {
        let request = GetNodesRequest::default();
        let mut stream = self.management().get_nodes(request).await?.into_inner();
        let mut nodes = Vec::new();
        while let Some(response) = stream.message().await? {
            nodes.extend(response.nodes);
        }
        Ok(nodes)
    }

    /// The cluster.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn info(&self) -> anyhow::Result<GetClusterInfoResponse> {
        let info = patiently(|| async {
            let request = GetClusterInfoRequest {};
            self.management().get_cluster_info(request).await
        });
        Ok(info.await.context("GetClusterInfo")?.into_inner())
    }

    /// What a machine is told so that it registers with this cluster.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn register_parameters(&self) -> anyhow::Result<NodeParameters> {
        let ticket = patiently(|| async {
            let request = GetRegisterTicketRequest { rotate: false };
            self.management().get_register_ticket(request).await
        });
        let ticket = ticket.await.context("GetRegisterTicket")?.into_inner();
        // A founder is HOME before it has said where it is, and a node that is
        // told of nobody refuses.
        let info = patiently(|| async {
            let request = GetClusterInfoRequest {};
            let info = self.management().get_cluster_info(request).await?;
            let info = info.into_inner();
            match info
                .directory
                .as_ref()
                .is_some_and(|all| !all.nodes.is_empty())
            {
                true => Ok(info),
                false => Err(Status::unavailable("no curator has said yet where it is")),
            }
        });
        let info = info.await.context("GetClusterInfo")?;
        let register = ClusterRegister {
            cluster_directory: info.directory,
            register_ticket: ticket.register_ticket,
            ca_certificate: info.ca_certificate,
            labels: Vec::new(),
        };
        Ok(NodeParameters {
            cluster: Some(node_parameters::Cluster::ClusterRegister(register)),
            ..NodeParameters::default()
        })
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
        let well = |node: &v1::Node| {
            wanted(node)
                && node.health() == NodeHealth::Healthy
                && node
                    .status
                    .as_ref()
                    .is_some_and(|status| status.cluster_state() == ClusterState::Home)
        };
        let mut seen = Vec::new();
        let watch = async {
            let mut curator = CuratorClient::new(self.channel.clone());
            let request = WatchRequest::default();
            let mut events = curator.watch(request).await?.into_inner();
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
/// says to do: a cluster of one node is so for a moment when it first expects
/// another, and any for a while whose machines get too little of the host.
///
/// # Errors
/// What the call says else, or at last.
pub async fn patiently<T, F>(call: impl Fn() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    let mut last = None;
    let answered = async {
        loop {
            match within(bounds::CALL, call()).await {
                Err(status) if status.code() == Code::Unavailable => last = Some(status),
                answer => return answer,
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    };
    match tokio::time::timeout(bounds::SETTLED, answered).await {
        Ok(answer) => answer,
        Err(_) => Err(last.unwrap_or_else(|| Status::deadline_exceeded("no answer"))),
    }
}

fn options() -> Options {
    Options {
        connect_timeout: bounds::CALL,
        call_timeout: bounds::CALL,
        ..Options::default()
    }
}
