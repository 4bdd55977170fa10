//! The methods of `Management` that write: commands of operators for nodes and the cluster.

use std::sync::Arc;

use hearth_api::identity::{NodeId, PublicKey, Ticket};
use hearth_api::proofs::AfterRemoval;
use hearth_api::v1::{
    ApproveNodeRequest, ApproveNodeResponse, ConfigureClusterRequest, ConfigureClusterResponse,
    DecommissionNodeRequest, DecommissionNodeResponse, DeleteNodeRequest, DeleteNodeResponse,
    GetRegisterTicketRequest, GetRegisterTicketResponse, NodeSelector, ReplaceOwnerRequest,
    ReplaceOwnerResponse, UpdateNodeLabelsRequest, UpdateNodeLabelsResponse,
    UpdateNodeRolesRequest, UpdateNodeRolesResponse, UpdateNodeSettingsRequest,
    UpdateNodeSettingsResponse, node_selector,
};
use hearth_cluster::decisions::labelling::Changes;
use hearth_cluster::decisions::node_settings::SettingChanges;
use hearth_cluster::decisions::removal::{self, Bypass, Removal};
use hearth_cluster::decisions::roles::{self, RoleChange, RoleDecision};
use hearth_cluster::decisions::{FoundNode, Rejection, configuration, ownership, transitions};
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write};
use tonic::Status;

use super::request::parse_node_id;
use crate::core::Core;
use crate::membership::{self, Departure};

pub(super) struct NodeCommands {
    core: Arc<Core>,
}

/// A parsed node selector.
enum Wanted {
    Id(NodeId),
    Key(PublicKey),
}

impl Wanted {
    /// The ID of the selected node, whether or not it exists.
    fn id(&self) -> NodeId {
        match self {
            Self::Id(id) => *id,
            Self::Key(key) => NodeId::from_public_key(key),
        }
    }
}

impl NodeCommands {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    pub(super) async fn register_ticket(
        &self,
        request: GetRegisterTicketRequest,
    ) -> Result<GetRegisterTicketResponse, Status> {
        let decide = || async {
            self.core.reads.linearizable().await?;
            let known = self.core.cache.ticket();
            let key = state::REGISTER_TICKET;
            let condition = match known {
                Some(known) if !request.rotate => return Ok((known.content, None)),
                Some(known) => Condition::Unchanged(key.into(), known.revision),
                None => Condition::Absent(key.into()),
            };
            let ticket = Ticket::generate();
            let write = Write::when(condition).put(key, state::encode_ticket(&ticket).to_vec());
            Ok((ticket, Some(write)))
        };
        let (ticket, revision) = self.core.write_with_retry(decide).await?;
        if revision.is_some() {
            tracing::info!("created a new register ticket");
        }
        Ok(GetRegisterTicketResponse {
            register_ticket: ticket.expose().to_vec(),
        })
    }

    pub(super) async fn approve(
        &self,
        request: ApproveNodeRequest,
    ) -> Result<ApproveNodeResponse, Status> {
        let wanted = wanted(request.node)?;
        let decide = || async {
            let found = self.find(&wanted).await?;
            Ok((found.id(), transitions::approve(&found)?))
        };
        let (id, revision) = self.core.write_with_retry(decide).await?;
        if revision.is_some() {
            tracing::info!(node = %id, "node approved");
        }
        let node = Some(self.core.shown(id, revision).await?);
        Ok(ApproveNodeResponse { node })
    }

    pub(super) async fn update_roles(
        &self,
        request: UpdateNodeRolesRequest,
    ) -> Result<UpdateNodeRolesResponse, Status> {
        let wish = RoleChange {
            consensus_member: request.consensus_member,
            kubernetes_controller: request.kubernetes_controller,
            kubernetes_worker: request.kubernetes_worker,
        };
        let decide = |found: &FoundNode| roles::update(wish, found);
        let (id, pending, revision) = self.change(request.node, decide).await?;
        if revision.is_some() {
            tracing::info!(node = %id, ?wish, "role change requested");
        }
        let node = Some(self.core.shown(id, revision).await?);
        Ok(UpdateNodeRolesResponse { node, pending })
    }

    pub(super) async fn decommission(
        &self,
        request: DecommissionNodeRequest,
    ) -> Result<DecommissionNodeResponse, Status> {
        let (id, pending, revision) = self.change(request.node, roles::decommission).await?;
        if revision.is_some() {
            tracing::info!(node = %id, pending, "node decommissioned");
        }
        let node = Some(self.core.shown(id, revision).await?);
        Ok(DecommissionNodeResponse { node, pending })
    }

    /// Decides and writes a change of roles.
    async fn change(
        &self,
        selector: Option<NodeSelector>,
        decide: impl Fn(&FoundNode) -> Result<RoleDecision, Rejection> + Sync,
    ) -> Result<(NodeId, bool, Option<i64>), Status> {
        let wanted = wanted(selector)?;
        let (wanted, decide) = (&wanted, &decide);
        let write_with_retry = move || async move {
            let found = self.find(wanted).await?;
            let mut decision = decide(&found)?;
            if decision.leaves
                && let Some(departure) = self.authorize_departure(&found).await?
            {
                decision = decide(&self.find(wanted).await?)?;
                decision.write = decision.write.map(|write| departure.add_to(write));
            }
            Ok(((found.id(), decision.pending), decision.write))
        };
        let ((id, pending), revision) = self.core.write_with_retry(write_with_retry).await?;
        Ok((id, pending, revision))
    }

    /// Authorizes that a node leaves etcd. If it votes, its records have to be read again after
    /// this, which takes several requests to etcd: a node whose labels are changed all the time
    /// could not leave otherwise. If it does not, they must not, as it may vote by then.
    async fn authorize_departure(&self, found: &FoundNode) -> Result<Option<Departure>, Status> {
        membership::authorize_departure(&self.core, found.id()).await
    }

    pub(super) async fn update_labels(
        &self,
        request: UpdateNodeLabelsRequest,
    ) -> Result<UpdateNodeLabelsResponse, Status> {
        let wanted = wanted(request.node)?;
        let changes = Changes::new(request.upsert, request.delete)?;
        let decide = || async {
            let found = self.find(&wanted).await?;
            Ok((found.id(), changes.decide(&found)?))
        };
        let (id, revision) = self.core.write_with_retry(decide).await?;
        let node = Some(self.core.shown(id, revision).await?);
        Ok(UpdateNodeLabelsResponse { node })
    }

    pub(super) async fn update_settings(
        &self,
        request: UpdateNodeSettingsRequest,
    ) -> Result<UpdateNodeSettingsResponse, Status> {
        let wanted = wanted(request.node)?;
        let changes = SettingChanges::new(request.upsert, request.delete)?;
        let decide = || async {
            let found = self.find(&wanted).await?;
            Ok((found.id(), changes.decide(&found)?))
        };
        let (id, revision) = self.core.write_with_retry(decide).await?;
        if revision.is_some() {
            tracing::info!(node = %id, settings = changes.names(), "node settings changed");
        }
        let node = Some(self.core.shown(id, revision).await?);
        Ok(UpdateNodeSettingsResponse { node })
    }

    pub(super) async fn configure(
        &self,
        request: ConfigureClusterRequest,
    ) -> Result<ConfigureClusterResponse, Status> {
        let change = configuration::Change::new(request)?;
        let decide = || async {
            let found = self.core.full_cluster().await?;
            let mut decision = change.decide(&found)?;
            let write = decision.write.take();
            Ok(((decision, configuration::version(&found)), write))
        };
        let ((decision, read), revision) = self.core.write_with_retry(decide).await?;
        let version = revision.map_or(read, i64::unsigned_abs);
        if revision.is_some() {
            let settings = decision.changed.join(", ");
            tracing::info!(settings, version, "cluster configuration changed");
        }
        Ok(ConfigureClusterResponse {
            configuration: Some(decision.configuration),
            version,
        })
    }

    pub(super) async fn replace_owner(
        &self,
        request: ReplaceOwnerRequest,
    ) -> Result<ReplaceOwnerResponse, Status> {
        let replacement = request.replacement.ok_or(Rejection::Field {
            field: "replacement",
            wanted: "a signed replacement of the owner",
            found: "none".into(),
        })?;
        let decide = || async {
            let found = self.core.full_cluster().await?;
            Ok(((), ownership::replace(&replacement, &found)?))
        };
        let ((), revision) = self.core.write_with_retry(decide).await?;
        if revision.is_some() {
            tracing::info!(
                owner = hex::encode(&replacement.owner_public_key),
                recovery_recipient = hex::encode(&replacement.recovery_recipient),
                "owner and recovery recipient replaced"
            );
        }
        // Later calls to this curator must not be admitted from the former owner.
        self.core.settle(revision).await;
        Ok(ReplaceOwnerResponse {})
    }

    pub(super) async fn delete(
        &self,
        request: DeleteNodeRequest,
    ) -> Result<DeleteNodeResponse, Status> {
        let wanted = wanted(request.node)?;
        let bypass = Bypass {
            not_decommissioned: request.bypass_not_decommissioned,
            has_roles: request.bypass_has_roles,
        };
        let afterwards = AfterRemoval::of(request.reset);
        let decide = || async {
            let Some(found) = self.find_undeleted(&wanted).await? else {
                return Ok((wanted.id(), None));
            };
            let Removal { mut write, leaves } = removal::decide(bypass, afterwards, &found)?;
            if leaves && let Some(departure) = self.authorize_departure(&found).await? {
                let Some(found) = self.find_undeleted(&wanted).await? else {
                    return Ok((wanted.id(), None));
                };
                write = departure.add_to(removal::decide(bypass, afterwards, &found)?.write);
            }
            Ok((found.id(), Some(write)))
        };
        let (id, revision) = self.core.write_with_retry(decide).await?;
        if revision.is_some() {
            tracing::info!(node = %id, ?bypass, ?afterwards, "node deleted");
        }
        // Later calls to this curator must not see the node.
        self.core.settle(revision).await;
        Ok(DeleteNodeResponse {})
    }

    /// The current records of the selected node.
    async fn find(&self, wanted: &Wanted) -> Result<FoundNode, Status> {
        self.core.reads.linearizable().await?;
        let (field, text, id) = match wanted {
            Wanted::Id(id) => ("node.node_id", id.to_string(), Some(*id)),
            Wanted::Key(key) => {
                let id = self.core.cache.node_with_key(key);
                ("node.public_key", key.to_string(), id)
            }
        };
        let found = match id.filter(|id| self.core.cache.node(*id).is_some()) {
            Some(id) => self.core.find(id).await?,
            None => None,
        };
        found.ok_or_else(|| {
            let wanted = text;
            Rejection::NoSuchNode { field, wanted }.into()
        })
    }

    /// The same; `None` if an earlier attempt of the caller, whose answer was lost, has deleted the
    /// node.
    async fn find_undeleted(&self, wanted: &Wanted) -> Result<Option<FoundNode>, Status> {
        match self.find(wanted).await {
            Ok(found) => Ok(Some(found)),
            Err(_) if self.core.cache.tombstone(wanted.id()).is_some() => Ok(None),
            Err(status) => Err(status),
        }
    }
}

fn wanted(selector: Option<NodeSelector>) -> Result<Wanted, Status> {
    match selector.and_then(|selector| selector.node) {
        Some(node_selector::Node::NodeId(id)) => Ok(Wanted::Id(parse_node_id(&id)?)),
        Some(node_selector::Node::PublicKey(key)) => {
            let key = PublicKey::try_from(&key[..]).map_err(|error| Rejection::Field {
                field: "node.public_key",
                wanted: "an Ed25519 public key of 32 bytes",
                found: error.to_string(),
            })?;
            Ok(Wanted::Key(key))
        }
        None => Err(Rejection::Field {
            field: "node",
            wanted: "node_id or public_key",
            found: "neither".into(),
        }
        .into()),
    }
}
