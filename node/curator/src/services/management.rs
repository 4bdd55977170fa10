//! The service `Management`: the control plane, for operators.

use std::collections::HashSet;
use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use hearth_api::identity::NodeId;
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::server::Caller;
use hearth_api::settings;
use hearth_api::v1::management_server::Management;
use hearth_api::v1::{
    ApproveNodeRequest, ApproveNodeResponse, ConfigureClusterRequest, ConfigureClusterResponse,
    DecommissionNodeRequest, DecommissionNodeResponse, DeleteNodeRequest, DeleteNodeResponse,
    GetClusterInfoRequest, GetClusterInfoResponse, GetKubernetesAccessRequest,
    GetKubernetesAccessResponse, GetNodesRequest, GetNodesResponse, GetRegisterTicketRequest,
    GetRegisterTicketResponse, GetSecretsKeysRequest, GetSecretsKeysResponse,
    GetTrustedImagesRequest, GetTrustedImagesResponse, Node, NodeHealth, NodeState,
    ProvideSecretsKeysRequest, ProvideSecretsKeysResponse, ReplaceOwnerRequest,
    ReplaceOwnerResponse, RevokeImageRequest, RevokeImageResponse, TrustImageRequest,
    TrustImageResponse, UpdateNodeLabelsRequest, UpdateNodeLabelsResponse, UpdateNodeRolesRequest,
    UpdateNodeRolesResponse, UpdateNodeSettingsRequest, UpdateNodeSettingsResponse,
};
use hearth_cluster::decisions::configuration;
use tonic::{Request, Response, Status};

use super::node_commands::NodeCommands;
use super::{images, kubernetes, secrets_keys};
use crate::core::Core;
use crate::streams;

/// Maximum number of terms in one field of a filter.
const MOST_FILTER_TERMS: usize = 1024;

pub(super) struct Service {
    administration: NodeCommands,
    core: Arc<Core>,
}

impl Service {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            administration: NodeCommands::new(core.clone()),
            core,
        }
    }

    /// Whether the caller needs the secrets of the configuration: those for registries.
    fn pulls_images(&self, caller: &Caller) -> bool {
        let node = caller.node().ok();
        let record = node.and_then(|id| self.core.cache.node(id));
        record.is_some_and(|(node, _)| node.roles.kubernetes_worker.is_some())
    }
}

#[tonic::async_trait]
impl Management for Service {
    type GetNodesStream = BoxStream<'static, Result<GetNodesResponse, Status>>;

    async fn get_cluster_info(
        &self,
        request: Request<GetClusterInfoRequest>,
    ) -> Result<Response<GetClusterInfoResponse>, Status> {
        self.core.reads.linearizable().await?;
        let cluster = self.core.cluster()?;
        let configuration_version = configuration::version(&cluster);
        let mut cluster = cluster.content;
        if !self.pulls_images(Caller::of(&request)?) {
            cluster.configuration = settings::without_secrets(cluster.configuration);
        }
        Ok(Response::new(GetClusterInfoResponse {
            cluster_id: cluster.id.as_bytes().to_vec(),
            ca_certificate: self.core.ca.to_vec(),
            configuration: Some(cluster.configuration),
            directory: Some(self.core.cache.directory()),
            version: self.core.version.clone(),
            configuration_version,
            owner_public_key: cluster.owner.as_bytes().to_vec(),
            recovery_recipient: RecoveryRecipient::to_field(cluster.recovery_recipient),
        }))
    }

    async fn get_nodes(
        &self,
        request: Request<GetNodesRequest>,
    ) -> Result<Response<Self::GetNodesStream>, Status> {
        let peer = Caller::of(&request)?.peer().clone();
        let request = request.into_inner();
        let allow_stale = request.allow_stale;
        let filter = Filter::new(request)?;
        if !allow_stale {
            self.core.reads.linearizable().await?;
        }
        // One consistent snapshot. Sending it may take as long as the caller needs, unless the
        // caller stops being a member.
        let cache = &self.core.cache;
        let nodes = match filter.ids.is_empty() {
            true => cache.nodes(|node| filter.takes(node)),
            false => cache.nodes_among(&filter.ids, |node| filter.takes(node)),
        };
        let core = self.core.clone();
        let answers = streams::pieces(nodes).into_iter().map(move |nodes| {
            core.recheck_access(&peer)?;
            Ok(GetNodesResponse { nodes })
        });
        Ok(Response::new(stream::iter(answers).boxed()))
    }

    async fn get_register_ticket(
        &self,
        request: Request<GetRegisterTicketRequest>,
    ) -> Result<Response<GetRegisterTicketResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .register_ticket(request)
            .await
            .map(Response::new)
    }

    async fn approve_node(
        &self,
        request: Request<ApproveNodeRequest>,
    ) -> Result<Response<ApproveNodeResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .approve(request)
            .await
            .map(Response::new)
    }

    async fn update_node_roles(
        &self,
        request: Request<UpdateNodeRolesRequest>,
    ) -> Result<Response<UpdateNodeRolesResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .update_roles(request)
            .await
            .map(Response::new)
    }

    async fn update_node_labels(
        &self,
        request: Request<UpdateNodeLabelsRequest>,
    ) -> Result<Response<UpdateNodeLabelsResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .update_labels(request)
            .await
            .map(Response::new)
    }

    async fn update_node_settings(
        &self,
        request: Request<UpdateNodeSettingsRequest>,
    ) -> Result<Response<UpdateNodeSettingsResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .update_settings(request)
            .await
            .map(Response::new)
    }

    async fn decommission_node(
        &self,
        request: Request<DecommissionNodeRequest>,
    ) -> Result<Response<DecommissionNodeResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .decommission(request)
            .await
            .map(Response::new)
    }

    async fn delete_node(
        &self,
        request: Request<DeleteNodeRequest>,
    ) -> Result<Response<DeleteNodeResponse>, Status> {
        let request = request.into_inner();
        self.administration.delete(request).await.map(Response::new)
    }

    async fn get_kubernetes_access(
        &self,
        request: Request<GetKubernetesAccessRequest>,
    ) -> Result<Response<GetKubernetesAccessResponse>, Status> {
        let user = Caller::of(&request)?.user()?.clone();
        kubernetes::access(&self.core, &user, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn configure_cluster(
        &self,
        request: Request<ConfigureClusterRequest>,
    ) -> Result<Response<ConfigureClusterResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .configure(request)
            .await
            .map(Response::new)
    }

    async fn trust_image(
        &self,
        request: Request<TrustImageRequest>,
    ) -> Result<Response<TrustImageResponse>, Status> {
        let trusted = images::trust(&self.core, request.into_inner());
        trusted.await.map(Response::new)
    }

    async fn get_trusted_images(
        &self,
        _: Request<GetTrustedImagesRequest>,
    ) -> Result<Response<GetTrustedImagesResponse>, Status> {
        images::list(&self.core).await.map(Response::new)
    }

    async fn revoke_image(
        &self,
        request: Request<RevokeImageRequest>,
    ) -> Result<Response<RevokeImageResponse>, Status> {
        let revoked = images::revoke(&self.core, request.into_inner());
        revoked.await.map(Response::new)
    }

    async fn get_secrets_keys(
        &self,
        _: Request<GetSecretsKeysRequest>,
    ) -> Result<Response<GetSecretsKeysResponse>, Status> {
        secrets_keys::list(&self.core).await.map(Response::new)
    }

    async fn provide_secrets_keys(
        &self,
        request: Request<ProvideSecretsKeysRequest>,
    ) -> Result<Response<ProvideSecretsKeysResponse>, Status> {
        let provided = secrets_keys::provide(&self.core, request.into_inner());
        provided.await.map(Response::new)
    }

    async fn replace_owner(
        &self,
        request: Request<ReplaceOwnerRequest>,
    ) -> Result<Response<ReplaceOwnerResponse>, Status> {
        let request = request.into_inner();
        self.administration
            .replace_owner(request)
            .await
            .map(Response::new)
    }
}

/// A filter of nodes: a node has to match every field that is not empty.
struct Filter {
    /// If not empty, nodes are looked up by these IDs.
    ids: HashSet<NodeId>,
    states: HashSet<i32>,
    health: HashSet<i32>,
    labels: Vec<(String, String)>,
}

impl Filter {
    fn new(request: GetNodesRequest) -> Result<Self, Status> {
        let GetNodesRequest {
            node_ids,
            states,
            health,
            labels,
            allow_stale: _,
        } = request;
        let counts = [
            ("node_ids", node_ids.len()),
            ("states", states.len()),
            ("health", health.len()),
            ("labels", labels.len()),
        ];
        for (field, count) in counts {
            if count > MOST_FILTER_TERMS {
                return Err(Status::invalid_argument(format!(
                    "{field}: expected at most {MOST_FILTER_TERMS} terms, got {count}"
                )));
            }
        }
        let ids = node_ids.iter().map(|id| {
            id.parse::<NodeId>()
                .map_err(|error| Status::invalid_argument(format!("node_ids: {error}")))
        });
        let ids = ids.collect::<Result<_, _>>()?;
        let unknown = |field: &str, number: i32| {
            Status::invalid_argument(format!(
                "{field}: expected values that this curator knows, got {number}"
            ))
        };
        for state in &states {
            NodeState::try_from(*state).map_err(|_| unknown("states", *state))?;
        }
        for number in &health {
            NodeHealth::try_from(*number).map_err(|_| unknown("health", *number))?;
        }
        Ok(Self {
            ids,
            states: states.into_iter().collect(),
            health: health.into_iter().collect(),
            labels: labels
                .into_iter()
                .map(|label| (label.key, label.value))
                .collect(),
        })
    }

    fn takes(&self, node: &Node) -> bool {
        let has = |(key, value): &(String, String)| {
            node.labels
                .iter()
                .any(|label| label.key == *key && label.value == *value)
        };
        let named = |id: &str| id.parse().is_ok_and(|id| self.ids.contains(&id));
        (self.ids.is_empty() || named(&node.id))
            && (self.states.is_empty() || self.states.contains(&node.state))
            && (self.health.is_empty() || self.health.contains(&node.health))
            && self.labels.iter().all(has)
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::Label;
    use proptest::prelude::*;

    use super::*;

    fn label(key: &str, value: &str) -> Label {
        Label {
            key: key.into(),
            value: value.into(),
        }
    }

    fn takes(request: GetNodesRequest) -> bool {
        let node = Node {
            id: NodeId::from_bytes([1; 16]).to_string(),
            state: NodeState::Up.into(),
            health: NodeHealth::Healthy.into(),
            labels: vec![label("a", "1"), label("b", "")],
            ..Default::default()
        };
        Filter::new(request).unwrap().takes(&node)
    }

    #[test]
    fn parts_are_joined_by_and_their_terms_by_or() {
        let all = GetNodesRequest::default;
        let id = |byte| NodeId::from_bytes([byte; 16]).to_string();
        assert!(takes(all()));
        assert!(takes(GetNodesRequest {
            node_ids: vec![id(2), id(1)],
            ..all()
        }));
        assert!(!takes(GetNodesRequest {
            node_ids: vec![id(2)],
            ..all()
        }));
        let up = vec![NodeState::New.into(), NodeState::Up.into()];
        assert!(takes(GetNodesRequest {
            states: up.clone(),
            ..all()
        }));
        let timeout = vec![NodeHealth::Timeout.into()];
        assert!(!takes(GetNodesRequest {
            states: up,
            health: timeout,
            ..all()
        }));
    }

    #[test]
    fn all_labels_are_wanted_with_their_values() {
        let with = |labels| {
            takes(GetNodesRequest {
                labels,
                ..Default::default()
            })
        };
        assert!(with(vec![label("a", "1"), label("b", "")]));
        assert!(!with(vec![label("a", "1"), label("b", "2")]));
        assert!(!with(vec![label("c", "")]));
    }

    #[test]
    fn a_filter_has_bounds_and_known_terms() {
        let refused = |request| Filter::new(request).err().unwrap().message().to_owned();
        let node_ids = vec!["x".to_owned()];
        assert!(
            refused(GetNodesRequest {
                node_ids,
                ..Default::default()
            })
            .contains("node_ids")
        );
        let states = vec![77];
        assert!(
            refused(GetNodesRequest {
                states,
                ..Default::default()
            })
            .contains("77")
        );
        let labels = vec![label("", ""); MOST_FILTER_TERMS + 1];
        assert!(
            refused(GetNodesRequest {
                labels,
                ..Default::default()
            })
            .contains("labels")
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn arbitrary_filters_are_judged_without_harm(
            node_ids: Vec<String>, states: Vec<i32>, health: Vec<i32>,
            labels: Vec<(String, String)>,
        ) {
            let labels = labels.into_iter().map(|(key, value)| Label { key, value }).collect();
            if let Ok(filter) = Filter::new(GetNodesRequest { node_ids, states, health, labels, ..Default::default() }) {
                filter.takes(&Node::default());
            }
        }
    }
}
