//! The owner of a cluster of our own, as a program: what it takes to form one.
//!
//! Beside hearthctl, which does what users see: forming a cluster asks twice a second how it stands, over one connection
//! that goes on when a curator goes, and from every node's address at once.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use hearth_api::client::{Channel, Curators, Endpoint, Options, within};
use hearth_api::identity::{FirstContactSecret, OwnerKey};
use hearth_api::tls::{self, ExpectedServer};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::node_selector::Node as Selected;
use hearth_api::v1::{self, NodeSelector};
use hearth_api::{escrow, first_contact};

/// For each call: none of them waits for anything, and a host that boots machines is busy.
const CALL: Duration = Duration::from_secs(20);

/// An owner with a certificate.
#[derive(Clone)]
pub struct Operator {
    curators: Curators,
}

/// How a cluster stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Its nodes.
    pub nodes: Vec<v1::Node>,
    /// Its consensus.
    pub consensus: v1::GetConsensusStatusResponse,
}

impl Operator {
    /// First contact with whichever curator answers, then a certificate for the owner key.
    pub async fn take_ownership(
        key: &OwnerKey,
        secret: &FirstContactSecret,
        curators: &[Endpoint],
    ) -> Result<Operator> {
        let mut met = Err(anyhow::anyhow!("no curator is known"));
        for curator in curators {
            met = first_contact::fetch_ca(curator, secret, CALL, tls::wall_clock())
                .await
                .with_context(|| format!("no first contact with {curator}"));
            if met.is_ok() {
                break;
            }
        }
        let (credentials, _) = escrow::exchange(curators.to_vec(), key, &met?, options()).await?;
        let server = ExpectedServer::AnyNode;
        let tls = tls::user_client_config(&credentials, server, tls::wall_clock())?;
        Ok(Operator {
            curators: Curators::new(curators.to_vec(), tls, options()),
        })
    }

    /// Nodes and consensus, at one moment each.
    pub async fn standing(&self) -> Result<Standing> {
        let mut curator = CuratorClient::new(self.curators.channel());
        let status = curator.get_consensus_status(v1::GetConsensusStatusRequest {});
        let consensus = within(CALL, status).await.context("GetConsensusStatus")?;
        Ok(Standing {
            nodes: self.nodes().await?,
            consensus: consensus.into_inner(),
        })
    }

    /// The nodes.
    pub async fn nodes(&self) -> Result<Vec<v1::Node>> {
        let mut management = self.management();
        let call = async {
            let request = v1::GetNodesRequest::default();
            let mut stream = management.get_nodes(request).await?.into_inner();
            let mut nodes = Vec::new();
            while let Some(response) = stream.message().await? {
                nodes.extend(response.nodes);
            }
            Ok(nodes)
        };
        within(CALL, call).await.context("GetNodes")
    }

    /// What a machine must be told so that it registers with this cluster.
    pub async fn register_parameters(&self) -> Result<v1::NodeParameters> {
        let mut management = self.management();
        let request = v1::GetRegisterTicketRequest { rotate: false };
        let ticket = within(CALL, management.get_register_ticket(request)).await;
        let ticket = ticket.context("GetRegisterTicket")?.into_inner();
        let info = management.get_cluster_info(v1::GetClusterInfoRequest {});
        let info = within(CALL, info).await.context("GetClusterInfo")?;
        let info = info.into_inner();
        // A founder is HOME before it has said where it is, and a node that is told of nobody refuses.
        if info
            .directory
            .as_ref()
            .is_none_or(|directory| directory.nodes.is_empty())
        {
            bail!("no curator has said yet where it is");
        }
        let register = v1::ClusterRegister {
            cluster_directory: info.directory,
            register_ticket: ticket.register_ticket,
            ca_certificate: info.ca_certificate,
            labels: Vec::new(),
        };
        Ok(v1::NodeParameters {
            cluster: Some(v1::node_parameters::Cluster::ClusterRegister(register)),
            ..v1::NodeParameters::default()
        })
    }

    /// Lets the node with this key in.
    pub async fn approve(&self, public_key: Vec<u8>) -> Result<()> {
        let request = v1::ApproveNodeRequest {
            node: Some(NodeSelector {
                node: Some(Selected::PublicKey(public_key)),
            }),
        };
        let mut management = self.management();
        let approved = within(CALL, management.approve_node(request)).await;
        approved.map(drop).context("ApproveNode")
    }

    /// Wants this node to be a consensus member.
    pub async fn make_consensus_member(&self, id: &str) -> Result<()> {
        let request = v1::UpdateNodeRolesRequest {
            node: Some(NodeSelector {
                node: Some(Selected::NodeId(id.to_owned())),
            }),
            consensus_member: Some(true),
            ..v1::UpdateNodeRolesRequest::default()
        };
        let mut management = self.management();
        let updated = within(CALL, management.update_node_roles(request)).await;
        updated.map(drop).context("UpdateNodeRoles")
    }

    /// Gives these of Kubernetes' roles to this node; those it has it keeps.
    pub async fn give_kubernetes_roles(
        &self,
        id: &str,
        controller: bool,
        worker: bool,
    ) -> Result<()> {
        let request = v1::UpdateNodeRolesRequest {
            node: Some(NodeSelector {
                node: Some(Selected::NodeId(id.to_owned())),
            }),
            kubernetes_controller: controller.then_some(true),
            kubernetes_worker: worker.then_some(true),
            ..v1::UpdateNodeRolesRequest::default()
        };
        let mut management = self.management();
        let updated = within(CALL, management.update_node_roles(request)).await;
        updated.map(drop).context("UpdateNodeRoles")
    }

    fn management(&self) -> ManagementClient<Channel> {
        ManagementClient::new(self.curators.channel())
    }
}

fn options() -> Options {
    Options {
        connect_timeout: CALL,
        call_timeout: CALL,
        ..Options::default()
    }
}
