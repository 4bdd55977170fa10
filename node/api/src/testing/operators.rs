//! The test curator's answers to operators.

use futures::{StreamExt as _, stream};
use tonic::{Request, Response, Status};

use super::curator::{Answering, Answers};
use crate::identity::PublicKey;
use crate::ownership::Replacement;
use crate::recovery::RecoveryRecipient;
use crate::settings;
use crate::v1::management_server::Management;
use crate::v1::node_management_server::NodeManagement;
use crate::v1::{
    ApproveNodeRequest, ApproveNodeResponse, ConfigureClusterRequest, ConfigureClusterResponse,
    ConfirmNetworkRequest, ConfirmNetworkResponse, DecommissionNodeRequest,
    DecommissionNodeResponse, DeleteNodeRequest, DeleteNodeResponse, GetClusterInfoRequest,
    GetClusterInfoResponse, GetKubernetesAccessRequest, GetKubernetesAccessResponse,
    GetLogsRequest, GetLogsResponse, GetNetworkRequest, GetNetworkResponse, GetNodesRequest,
    GetNodesResponse, GetPacketFilterRequest, GetPacketFilterResponse, GetRegisterTicketRequest,
    GetRegisterTicketResponse, GetSecretsKeysRequest, GetSecretsKeysResponse,
    GetTrustedImagesRequest, GetTrustedImagesResponse, Node, NodeRoles, NodeSelector, NodeState,
    PowerOffRequest, PowerOffResponse, ProvideSecretsKeysRequest, ProvideSecretsKeysResponse,
    RebootRequest, RebootResponse, ReplaceOwnerRequest, ReplaceOwnerResponse, RevokeImageRequest,
    RevokeImageResponse, TrustImageRequest, TrustImageResponse, TryNetworkRequest,
    TryNetworkResponse, UpdateNodeLabelsRequest, UpdateNodeLabelsResponse, UpdateNodeRolesRequest,
    UpdateNodeRolesResponse, UpdateNodeSettingsRequest, UpdateNodeSettingsResponse, node_roles,
    node_selector,
};

impl Answering {
    /// Changes one node of the script.
    fn change<T>(
        &self,
        selector: Option<NodeSelector>,
        change: impl FnOnce(&mut Node) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let wanted = selector.and_then(|selector| selector.node);
        let mut script = self.script();
        let node = script.nodes.iter_mut().find(|node| match &wanted {
            Some(node_selector::Node::NodeId(id)) => node.id == *id,
            Some(node_selector::Node::PublicKey(key)) => node.public_key == *key,
            None => false,
        });
        change(node.ok_or_else(|| Status::not_found("no such node"))?)
    }
}

#[tonic::async_trait]
impl Management for Answering {
    async fn get_cluster_info(
        &self,
        _: Request<GetClusterInfoRequest>,
    ) -> Result<Response<GetClusterInfoResponse>, Status> {
        self.called("GetClusterInfo");
        let script = self.script();
        Ok(Response::new(GetClusterInfoResponse {
            cluster_id: self.cluster.id.as_bytes().to_vec(),
            ca_certificate: self.cluster.ca().to_vec(),
            configuration: Some(script.configuration.clone()),
            directory: Some(script.directory.clone()),
            version: "1.2.3-test".to_owned(),
            configuration_version: script.configuration_version,
            owner_public_key: PublicKey::to_field(script.owner),
            recovery_recipient: RecoveryRecipient::to_field(script.recovery_recipient),
        }))
    }

    type GetNodesStream = Answers<GetNodesResponse>;

    /// The "node ID" may request a fault: `panic`, `panic-late` (after one answer), `wait` (never
    /// ends after one answer), `silent` (never answers).
    async fn get_nodes(
        &self,
        request: Request<GetNodesRequest>,
    ) -> Result<Response<Self::GetNodesStream>, Status> {
        self.called("GetNodes");
        let nodes = self.script().nodes.clone();
        let answer = stream::iter([Ok(GetNodesResponse { nodes })]);
        let trouble = request.into_inner().node_ids.into_iter().next();
        Ok(Response::new(match trouble.as_deref() {
            Some("panic") => panic!("as asked for"),
            Some("panic-late") => {
                let late = stream::once(async {
                    // So that the previous answer is sent first.
                    tokio::task::yield_now().await;
                    panic!("late, as asked for")
                });
                Box::pin(answer.chain(late))
            }
            Some("wait") => Box::pin(answer.chain(stream::pending())),
            Some("silent") => std::future::pending().await,
            _ => Box::pin(answer),
        }))
    }

    async fn get_register_ticket(
        &self,
        request: Request<GetRegisterTicketRequest>,
    ) -> Result<Response<GetRegisterTicketResponse>, Status> {
        self.called("GetRegisterTicket");
        let mut script = self.script();
        if request.into_inner().rotate
            && let Some(first) = script.register_ticket.first_mut()
        {
            *first = first.wrapping_add(1);
        }
        Ok(Response::new(GetRegisterTicketResponse {
            register_ticket: script.register_ticket.clone(),
        }))
    }

    async fn approve_node(
        &self,
        request: Request<ApproveNodeRequest>,
    ) -> Result<Response<ApproveNodeResponse>, Status> {
        self.called("ApproveNode");
        let node = self.change(request.into_inner().node, |node| {
            if node.state() == NodeState::New {
                node.set_state(NodeState::Standby);
            }
            Ok(node.clone())
        })?;
        Ok(Response::new(ApproveNodeResponse { node: Some(node) }))
    }

    /// etcd membership follows only when the test calls `set_nodes`.
    async fn update_node_roles(
        &self,
        request: Request<UpdateNodeRolesRequest>,
    ) -> Result<Response<UpdateNodeRolesResponse>, Status> {
        self.called("UpdateNodeRoles");
        let request = request.into_inner();
        let (node, pending) = self.change(request.node, |node| {
            if node.state() != NodeState::Up {
                return Err(Status::failed_precondition("the node is not UP"));
            }
            let roles = node.roles.get_or_insert_with(NodeRoles::default);
            if let Some(held) = request.kubernetes_controller {
                roles.kubernetes_controller = held.then_some(node_roles::KubernetesController {});
            }
            if let Some(held) = request.kubernetes_worker {
                roles.kubernetes_worker = held.then_some(node_roles::KubernetesWorker {});
            }
            let is = roles.consensus_member.is_some();
            let pending = request.consensus_member.is_some_and(|held| held != is);
            Ok((node.clone(), pending))
        })?;
        Ok(Response::new(UpdateNodeRolesResponse {
            node: Some(node),
            pending,
        }))
    }

    async fn update_node_labels(
        &self,
        request: Request<UpdateNodeLabelsRequest>,
    ) -> Result<Response<UpdateNodeLabelsResponse>, Status> {
        self.called("UpdateNodeLabels");
        let request = request.into_inner();
        let node = self.change(request.node, |node| {
            let gone = |key: &String| {
                request.delete.contains(key) || request.upsert.iter().any(|new| new.key == *key)
            };
            node.labels.retain(|label| !gone(&label.key));
            node.labels.extend(request.upsert.iter().cloned());
            Ok(node.clone())
        })?;
        Ok(Response::new(UpdateNodeLabelsResponse { node: Some(node) }))
    }

    async fn update_node_settings(
        &self,
        request: Request<UpdateNodeSettingsRequest>,
    ) -> Result<Response<UpdateNodeSettingsResponse>, Status> {
        self.called("UpdateNodeSettings");
        let request = request.into_inner();
        let node = self.change(request.node, |node| {
            let gone = |name: &String| {
                request.delete.contains(name) || request.upsert.iter().any(|new| new.name == *name)
            };
            node.settings.retain(|setting| !gone(&setting.name));
            node.settings.extend(request.upsert.iter().cloned());
            Ok(node.clone())
        })?;
        Ok(Response::new(UpdateNodeSettingsResponse {
            node: Some(node),
        }))
    }

    async fn decommission_node(
        &self,
        request: Request<DecommissionNodeRequest>,
    ) -> Result<Response<DecommissionNodeResponse>, Status> {
        self.called("DecommissionNode");
        let (node, pending) = self.change(request.into_inner().node, |node| {
            let member = node
                .roles
                .is_some_and(|roles| roles.consensus_member.is_some());
            if member {
                node.decommissioning = true;
            } else {
                node.set_state(NodeState::Decommissioned);
                node.roles = None;
            }
            Ok((node.clone(), member))
        })?;
        Ok(Response::new(DecommissionNodeResponse {
            node: Some(node),
            pending,
        }))
    }

    async fn delete_node(
        &self,
        request: Request<DeleteNodeRequest>,
    ) -> Result<Response<DeleteNodeResponse>, Status> {
        self.called("DeleteNode");
        let request = request.into_inner();
        let id = self.change(request.node, |node| {
            if node.state() == NodeState::Up && !request.bypass_not_decommissioned {
                return Err(Status::failed_precondition(
                    "the node is not decommissioned",
                ));
            }
            if node
                .roles
                .is_some_and(|roles| roles != NodeRoles::default())
                && !request.bypass_has_roles
            {
                return Err(Status::failed_precondition("the node has roles"));
            }
            Ok(node.id.clone())
        })?;
        self.script().nodes.retain(|node| node.id != id);
        Ok(Response::new(DeleteNodeResponse {}))
    }

    async fn get_kubernetes_access(
        &self,
        request: Request<GetKubernetesAccessRequest>,
    ) -> Result<Response<GetKubernetesAccessResponse>, Status> {
        self.called("GetKubernetesAccess");
        let key = PublicKey::try_from(&request.into_inner().public_key[..])
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let Some((servers, ca_certificate)) = self.script().kubernetes.clone() else {
            return Err(Status::failed_precondition("no node is a controller"));
        };
        Ok(Response::new(GetKubernetesAccessResponse {
            certificate: self.cluster.user_certificate("owner", key).to_vec(),
            ca_certificate,
            servers,
        }))
    }

    async fn configure_cluster(
        &self,
        request: Request<ConfigureClusterRequest>,
    ) -> Result<Response<ConfigureClusterResponse>, Status> {
        self.called("ConfigureCluster");
        let request = request.into_inner();
        let values = request.configuration.unwrap_or_default();
        let mut script = self.script();
        if request.version != script.configuration_version {
            return Err(Status::aborted("version: the configuration has changed"));
        }
        for path in &request.field_mask {
            let setting = settings::find("field_mask", path)
                .map_err(|error| Status::invalid_argument(error.to_string()))?;
            if setting.fixed.is_some() {
                return Err(Status::failed_precondition(format!("{path}: it is fixed")));
            }
            setting.copy(&values, &mut script.configuration);
        }
        script.configuration_version += 1;
        Ok(Response::new(ConfigureClusterResponse {
            configuration: Some(script.configuration.clone()),
            version: script.configuration_version,
        }))
    }

    async fn get_secrets_keys(
        &self,
        _: Request<GetSecretsKeysRequest>,
    ) -> Result<Response<GetSecretsKeysResponse>, Status> {
        self.called("GetSecretsKeys");
        Ok(Response::new(self.script().secrets_keys.clone()))
    }

    async fn provide_secrets_keys(
        &self,
        request: Request<ProvideSecretsKeysRequest>,
    ) -> Result<Response<ProvideSecretsKeysResponse>, Status> {
        self.called("ProvideSecretsKeys");
        let mut script = self.script();
        for provided in request.into_inner().keys {
            let mut keys = script.secrets_keys.keys.iter_mut();
            let key = keys.find(|key| key.generation == provided.generation);
            let key = key.ok_or_else(|| Status::invalid_argument("no such generation"))?;
            key.wrapped.extend(provided.wrapped);
        }
        Ok(Response::new(ProvideSecretsKeysResponse {}))
    }

    async fn trust_image(
        &self,
        request: Request<TrustImageRequest>,
    ) -> Result<Response<TrustImageResponse>, Status> {
        self.called("TrustImage");
        let images = &mut self.script().images;
        let image = request.into_inner().image.unwrap_or_default();
        images.retain(|other| other.parts != image.parts);
        images.push(image);
        Ok(Response::new(TrustImageResponse {}))
    }

    async fn get_trusted_images(
        &self,
        _: Request<GetTrustedImagesRequest>,
    ) -> Result<Response<GetTrustedImagesResponse>, Status> {
        self.called("GetTrustedImages");
        let images = self.script().images.clone();
        Ok(Response::new(GetTrustedImagesResponse { images }))
    }

    async fn revoke_image(
        &self,
        request: Request<RevokeImageRequest>,
    ) -> Result<Response<RevokeImageResponse>, Status> {
        self.called("RevokeImage");
        let parts = request.into_inner().parts;
        self.script().images.retain(|image| image.parts != parts);
        Ok(Response::new(RevokeImageResponse {}))
    }

    async fn replace_owner(
        &self,
        request: Request<ReplaceOwnerRequest>,
    ) -> Result<Response<ReplaceOwnerResponse>, Status> {
        self.called("ReplaceOwner");
        let replacement = request.into_inner().replacement.unwrap_or_default();
        Replacement::verify(self.cluster.id, &replacement)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.script().replace_owner(replacement);
        Ok(Response::new(ReplaceOwnerResponse {}))
    }
}

#[tonic::async_trait]
impl NodeManagement for Answering {
    type GetLogsStream = Answers<GetLogsResponse>;
    type GetPacketFilterStream = Answers<GetPacketFilterResponse>;

    async fn get_logs(
        &self,
        request: Request<GetLogsRequest>,
    ) -> Result<Response<Self::GetLogsStream>, Status> {
        self.called("GetLogs");
        let request = request.into_inner();
        let mut entries = self.script().logs.clone();
        let under = format!("{}.", request.dn);
        entries.retain(|entry| {
            entry.severity >= request.min_severity
                && (request.dn.is_empty()
                    || entry.dn == request.dn
                    || request.subtree && entry.dn.starts_with(&under))
        });
        if request.backlog > 0 {
            let backlog = usize::try_from(request.backlog).unwrap_or(usize::MAX);
            entries.drain(..entries.len().saturating_sub(backlog));
        }
        let answer = stream::iter([Ok(GetLogsResponse { entries, missed: 3 })]);
        Ok(Response::new(match request.follow {
            true => Box::pin(answer.chain(stream::pending())),
            false => Box::pin(answer),
        }))
    }

    async fn get_packet_filter(
        &self,
        request: Request<GetPacketFilterRequest>,
    ) -> Result<Response<Self::GetPacketFilterStream>, Status> {
        self.called("GetPacketFilter");
        let parts: &[&str] = match request.into_inner().all_tables {
            true => &["table inet hearth {\n", "}\ntable ip kube-proxy {\n}\n"],
            false => &["table inet hearth {\n", "}\n"],
        };
        let part = |rules: &&str| {
            Ok(GetPacketFilterResponse {
                rules: (*rules).to_owned(),
            })
        };
        let parts: Vec<_> = parts.iter().map(part).collect();
        Ok(Response::new(Box::pin(stream::iter(parts))))
    }

    async fn reboot(&self, _: Request<RebootRequest>) -> Result<Response<RebootResponse>, Status> {
        self.called("Reboot");
        Ok(Response::new(RebootResponse {}))
    }

    async fn power_off(
        &self,
        _: Request<PowerOffRequest>,
    ) -> Result<Response<PowerOffResponse>, Status> {
        self.called("PowerOff");
        Ok(Response::new(PowerOffResponse {}))
    }

    async fn get_network(
        &self,
        _: Request<GetNetworkRequest>,
    ) -> Result<Response<GetNetworkResponse>, Status> {
        self.called("GetNetwork");
        Ok(Response::new(self.script().network.clone()))
    }

    async fn try_network(
        &self,
        request: Request<TryNetworkRequest>,
    ) -> Result<Response<TryNetworkResponse>, Status> {
        self.called("TryNetwork");
        let request = request.into_inner();
        let mut script = self.script();
        script.network = GetNetworkResponse {
            set_by_operator: request.network_config.is_some(),
            network_config: request.network_config,
            trial_id: request.trial_id,
            trial_seconds_left: request.timeout_seconds,
            ..script.network.clone()
        };
        match script.loses_answers {
            true => Err(Status::unavailable("lost")),
            false => Ok(Response::new(TryNetworkResponse {})),
        }
    }

    async fn confirm_network(
        &self,
        request: Request<ConfirmNetworkRequest>,
    ) -> Result<Response<ConfirmNetworkResponse>, Status> {
        self.called("ConfirmNetwork");
        let mut script = self.script();
        if script.network.trial_id != request.into_inner().trial_id {
            return Err(Status::failed_precondition("the node has gone back"));
        }
        if script.unheard > 0 {
            script.unheard -= 1;
            return Err(Status::unavailable("the cluster does not hear the node"));
        }
        script.network.trial_id.clear();
        Ok(Response::new(ConfirmNetworkResponse {}))
    }
}
