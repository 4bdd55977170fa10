//! A machine that wants to become a node, one call at a time.

use std::net::Ipv4Addr;
use std::sync::Arc;

use hearth_api::client::{Channel, Endpoint};
use hearth_api::identity::{
    ClusterUnlockKey, JoinKey, NodeCredentials, NodeId, NodeKey, SigningKey, Ticket,
};
use hearth_api::proofs::{self, AfterRemoval};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::join_node_response::Answer;
use hearth_api::v1::{
    ApproveNodeRequest, BootProof, CommitNodeRequest, CommitNodeResponse, DeleteNodeRequest,
    GetRegisterTicketRequest, JoinNodeRequest, JoinNodeResponse, Label, Node, NodeSelector,
    NodeState, RegisterNodeRequest, RegisterNodeResponse, StorageSecurity, TpmUsage, node_selector,
};
use hearth_base::testing::within_timeout;
use hearth_host::prover::Prover;
use tonic::Status;

use super::super::testing::{BOOT_ID, Who, World};

pub(super) struct Machine {
    pub key: NodeKey,
    pub join_key: JoinKey,
    pub unlock_key: ClusterUnlockKey,
    pub storage: StorageSecurity,
    pub tpm: TpmUsage,
    /// The curator that it calls; the world's first one by default.
    pub curator: Option<u16>,
    /// Its TPM.
    pub prover: Option<Arc<Prover>>,
}

impl Machine {
    pub(super) fn new() -> Self {
        Self {
            key: NodeKey::generate(),
            join_key: JoinKey::generate(),
            unlock_key: ClusterUnlockKey::generate(),
            storage: StorageSecurity::Encrypted,
            tpm: TpmUsage::NotPresent,
            curator: None,
            prover: None,
        }
    }

    pub(super) fn id(&self) -> NodeId {
        NodeId::from_public_key(&self.key.public())
    }

    pub(super) fn selector(&self) -> Option<NodeSelector> {
        by_id(&self.id().to_string())
    }

    pub(super) fn client(&self, world: &World, key: &SigningKey) -> CuratorClient<Channel> {
        let endpoint = self.curator.map_or_else(
            || world.endpoint(),
            |port| Endpoint::new(Ipv4Addr::LOCALHOST.into(), port),
        );
        CuratorClient::new(world.channel_to(endpoint, &Who::HolderOf(key)))
    }

    pub(super) fn request(&self, ticket: &Ticket) -> RegisterNodeRequest {
        let public = self.key.public();
        RegisterNodeRequest {
            register_ticket: ticket.expose().to_vec(),
            join_key: self.join_key.public().as_bytes().to_vec(),
            join_key_proof: proofs::prove_join_key(&public, &self.join_key).to_vec(),
            tpm_is_present: self.tpm != TpmUsage::NotPresent,
            labels: vec![Label {
                key: "rack".into(),
                value: "7".into(),
            }],
            proof: None,
        }
    }

    pub(super) async fn send(
        &self,
        world: &World,
        request: RegisterNodeRequest,
    ) -> Result<RegisterNodeResponse, Status> {
        let mut client = self.client(world, &self.key);
        let call = client.register_node(request);
        Ok(within_timeout("RegisterNode", call).await?.into_inner())
    }

    pub(super) async fn register(
        &self,
        world: &World,
        ticket: &Ticket,
    ) -> Result<RegisterNodeResponse, Status> {
        let mut client = self.client(world, &self.key);
        let request = RegisterNodeRequest {
            proof: self.proof(&mut client, &self.key).await?,
            ..self.request(ticket)
        };
        let call = client.register_node(request);
        Ok(within_timeout("RegisterNode", call).await?.into_inner())
    }

    /// The proof for the next call with this key, as a node makes it.
    pub(super) async fn proof(
        &self,
        client: &mut CuratorClient<Channel>,
        key: &SigningKey,
    ) -> Result<Option<BootProof>, Status> {
        let Some(prover) = &self.prover else {
            return Ok(None);
        };
        let challenge = client.get_challenge(prover.keys().await.unwrap()).await?;
        let answer = prover.answer(challenge.into_inner(), key.public()).await;
        answer.map_err(|error| Status::unknown(hearth_api::chain(&error)))
    }

    pub(super) async fn commit(&self, world: &World) -> Result<CommitNodeResponse, Status> {
        let request = CommitNodeRequest {
            cluster_unlock_key: self.unlock_key.expose().to_vec(),
            storage_security: self.storage.into(),
        };
        let mut client = self.client(world, &self.key);
        let call = client.commit_node(request);
        Ok(within_timeout("CommitNode", call).await?.into_inner())
    }

    pub(super) async fn join(&self, world: &World) -> Result<JoinNodeResponse, Status> {
        self.join_as(world, BOOT_ID).await
    }

    pub(super) async fn join_as(
        &self,
        world: &World,
        boot_id: &str,
    ) -> Result<JoinNodeResponse, Status> {
        let mut client = self.client(world, &self.join_key);
        let request = JoinNodeRequest {
            tpm_usage: self.tpm.into(),
            boot_id: boot_id.into(),
            proof: self.proof(&mut client, &self.join_key).await?,
        };
        let call = client.join_node(request);
        Ok(within_timeout("JoinNode", call).await?.into_inner())
    }

    /// Joins, and expects an order to wipe its keys that its cluster has signed; returns what it has to do then.
    pub(super) async fn is_disowned(&self, world: &World) -> AfterRemoval {
        let Some(Answer::Disowned(order)) = self.join(world).await.unwrap().answer else {
            panic!("it is admitted");
        };
        let ca = world.ca().public_key();
        let checked = proofs::check_disown(&order, &ca, world.site.cluster_id, self.id());
        checked.unwrap()
    }

    /// Registers, is approved, and commits.
    pub(super) async fn becomes_a_node(&self, world: &World) -> NodeCredentials {
        self.register(world, &ticket(world).await).await.unwrap();
        approve(world, self.selector()).await.unwrap();
        let answer = self.commit(world).await.unwrap();
        NodeCredentials {
            key: self.key.clone(),
            certificate: answer.node_certificate.into(),
            ca: answer.ca_certificate.into(),
        }
    }

    /// The node as the cluster shows it.
    pub(super) async fn shown(&self, world: &World) -> Option<Node> {
        let id = self.id().to_string();
        world.nodes().await.into_iter().find(|node| node.id == id)
    }

    pub(super) async fn state(&self, world: &World) -> Option<NodeState> {
        self.shown(world).await.map(|node| node.state())
    }
}

pub(super) fn by_id(id: &str) -> Option<NodeSelector> {
    let node = Some(node_selector::Node::NodeId(id.into()));
    Some(NodeSelector { node })
}

pub(super) fn by_key(key: &[u8]) -> Option<NodeSelector> {
    let node = Some(node_selector::Node::PublicKey(key.into()));
    Some(NodeSelector { node })
}

pub(super) async fn ticket(world: &World) -> Ticket {
    ask_ticket(world, false).await
}

pub(super) async fn ask_ticket(world: &World, rotate: bool) -> Ticket {
    let request = GetRegisterTicketRequest { rotate };
    let mut management = world.management().await;
    let call = management.get_register_ticket(request);
    let answer = within_timeout("a ticket", call).await.unwrap().into_inner();
    Ticket::try_from(&answer.register_ticket[..]).unwrap()
}

pub(super) async fn approve(world: &World, node: Option<NodeSelector>) -> Result<Node, Status> {
    let mut management = world.management().await;
    let call = management.approve_node(ApproveNodeRequest { node });
    Ok(within_timeout("ApproveNode", call)
        .await?
        .into_inner()
        .node
        .unwrap())
}

/// With every bypass, or none.
pub(super) async fn delete(
    world: &World,
    node: Option<NodeSelector>,
    bypass: bool,
) -> Result<(), Status> {
    let request = DeleteNodeRequest {
        node,
        bypass_not_decommissioned: bypass,
        bypass_has_roles: bypass,
        reset: false,
    };
    let mut management = world.management().await;
    let call = management.delete_node(request);
    within_timeout("DeleteNode", call).await.map(drop)
}

/// The same machine, to be changed.
pub(super) fn copy(machine: &Machine) -> Machine {
    Machine {
        key: machine.key.clone(),
        join_key: machine.join_key.clone(),
        unlock_key: machine.unlock_key.clone(),
        prover: machine.prover.clone(),
        ..*machine
    }
}
