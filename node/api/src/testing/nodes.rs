//! The test curator's answers to nodes.

use futures::{StreamExt as _, stream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status};

use super::curator::{Answering, Answers, Heartbeats};
use crate::identity::{Identity, NodeId, PublicKey};
use crate::pushback;
use crate::recovery::RecoveryRecipient;
use crate::server::Caller;
use crate::v1::curator_server::Curator;
use crate::v1::{
    ClusterNetworking, CommitNodeRequest, CommitNodeResponse, GetChallengeRequest,
    GetChallengeResponse, GetConsensusStatusRequest, GetConsensusStatusResponse, HeartbeatRequest,
    HeartbeatResponse, IssueCertificateRequest, IssueCertificateResponse, JoinNodeRequest,
    JoinNodeResponse, RegisterNodeRequest, RegisterNodeResponse, RenewCertificatesRequest,
    RenewCertificatesResponse, UpdateNodeClusterNetworkingRequest,
    UpdateNodeClusterNetworkingResponse, UpdateNodeStatusRequest, UpdateNodeStatusResponse,
    WatchEvent, WatchRequest, join_node_response,
};

#[tonic::async_trait]
impl Curator for Answering {
    type WatchStream = Answers<WatchEvent>;

    /// Sends all nodes, also to a caller that watches one.
    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (events, stream) = mpsc::unbounded_channel();
        let mut watches = self.watches();
        let script = self.script();
        let backlog = WatchEvent {
            nodes: script.nodes.clone(),
            backlog_complete: !script.more_to_come,
            ..WatchEvent::default()
        };
        // The receiver is still open.
        let _ = events.send(Ok(backlog));
        watches.push(events);
        self.called("Watch");
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            stream,
        ))))
    }

    async fn update_node_status(
        &self,
        request: Request<UpdateNodeStatusRequest>,
    ) -> Result<Response<UpdateNodeStatusResponse>, Status> {
        let caller = Caller::of(&request)?.node()?;
        let request = request.into_inner();
        if request.node_id != caller.to_string() {
            return Err(Status::permission_denied("not about the caller"));
        }
        self.seen.send_modify(|seen| {
            seen.calls.push("UpdateNodeStatus");
            seen.statuses.extend(request.status);
        });
        Ok(Response::new(UpdateNodeStatusResponse {}))
    }

    type HeartbeatStream = Answers<HeartbeatResponse>;

    /// The response starts after the first heartbeat.
    async fn heartbeat(
        &self,
        request: Request<tonic::Streaming<HeartbeatRequest>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        self.called("Heartbeat");
        let (seen, script) = (self.seen.clone(), self.script.clone());
        let arrivals = request.into_inner().inspect(move |heartbeat| {
            let arrived = Instant::now();
            if let Ok(heartbeat) = heartbeat {
                let beat = (arrived, heartbeat.clone());
                seen.send_modify(|seen| seen.heartbeats.push(beat));
            }
        });
        let mut arrivals = Box::pin(arrivals.peekable());
        arrivals.as_mut().peek().await;
        let answers = stream::unfold(arrivals, move |mut arrivals| {
            let script = script.clone();
            async move {
                loop {
                    let heartbeat = arrivals.next().await?;
                    if heartbeat.as_ref().is_ok_and(|heartbeat| heartbeat.ending) {
                        return None;
                    }
                    let (treatment, unlock) = {
                        let script = script.lock().ok()?;
                        (script.heartbeats, script.unlock_settings())
                    };
                    match treatment {
                        Heartbeats::Answer {
                            interval_ms,
                            bound_ms,
                            after,
                        } => {
                            sleep(after).await;
                            let answer = heartbeat.map(|_| HeartbeatResponse {
                                interval_ms,
                                bound_ms,
                                unlock_settings: unlock.digest(),
                                time_ms: 1_790_000_000_000,
                                time_is_synchronized: true,
                            });
                            return Some((answer, arrivals));
                        }
                        Heartbeats::Ignore => {}
                        Heartbeats::End => return None,
                        Heartbeats::Refuse => {
                            let refused = Status::permission_denied("not a node of this cluster");
                            return Some((Err(refused), arrivals));
                        }
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(answers)))
    }

    /// Renews the certificates of anyone who proves a key.
    async fn renew_certificates(
        &self,
        request: Request<RenewCertificatesRequest>,
    ) -> Result<Response<RenewCertificatesResponse>, Status> {
        self.called("RenewCertificates");
        let key = Caller::of(&request)?.public_key()?;
        let holder = Identity::node(self.cluster.id, NodeId::from_public_key(&key));
        let p256 = &request.get_ref().p256_public_key;
        Ok(Response::new(RenewCertificatesResponse {
            certificate: self.cluster.leaf(&holder, key, |_| {}).to_vec(),
            p256_certificate: self.cluster.p256_leaf_of(&holder, key, p256),
        }))
    }

    async fn register_node(
        &self,
        _: Request<RegisterNodeRequest>,
    ) -> Result<Response<RegisterNodeResponse>, Status> {
        Err(Status::unimplemented("RegisterNode"))
    }

    async fn commit_node(
        &self,
        _: Request<CommitNodeRequest>,
    ) -> Result<Response<CommitNodeResponse>, Status> {
        Err(Status::unimplemented("CommitNode"))
    }

    /// Asks for nothing.
    async fn get_challenge(
        &self,
        _: Request<GetChallengeRequest>,
    ) -> Result<Response<GetChallengeResponse>, Status> {
        Ok(Response::new(GetChallengeResponse::default()))
    }

    async fn join_node(
        &self,
        _: Request<JoinNodeRequest>,
    ) -> Result<Response<JoinNodeResponse>, Status> {
        self.called("JoinNode");
        let script = self.script();
        if let Some(after) = script.ask_again {
            let other = Status::unavailable("the cluster still hears another boot of this node");
            return Err(pushback::ask_again(other, after));
        }
        let key = script.unlock_key.clone();
        let key = key.ok_or_else(|| Status::unavailable("no contact with etcd: retry"))?;
        let settings = script.unlock_settings();
        let admitted = join_node_response::Admitted {
            cluster_unlock_key: key.expose().to_vec(),
            cold_start_policy: settings.cold_start_policy.into(),
            recovery_recipient: RecoveryRecipient::to_field(settings.recovery_recipient),
            owner_public_key: PublicKey::to_field(settings.owner),
            owner_replacements: script.owner_replacements.clone(),
            directory: None,
        };
        Ok(Response::new(JoinNodeResponse {
            answer: Some(join_node_response::Answer::Admitted(admitted)),
        }))
    }

    async fn issue_certificate(
        &self,
        _: Request<IssueCertificateRequest>,
    ) -> Result<Response<IssueCertificateResponse>, Status> {
        Err(Status::unimplemented("IssueCertificate"))
    }

    async fn update_node_cluster_networking(
        &self,
        request: Request<UpdateNodeClusterNetworkingRequest>,
    ) -> Result<Response<UpdateNodeClusterNetworkingResponse>, Status> {
        let caller = Caller::of(&request)?.node()?;
        let request = request.into_inner();
        if request.node_id != caller.to_string() {
            return Err(Status::permission_denied("not about the caller"));
        }
        let key = request.wireguard_public_key;
        self.seen.send_modify(|seen| {
            seen.calls.push("UpdateNodeClusterNetworking");
            seen.mesh_keys.push(key.clone());
        });
        let pod_range = self.script().pod_range.clone()?;
        Ok(Response::new(UpdateNodeClusterNetworkingResponse {
            networking: Some(ClusterNetworking {
                wireguard_public_key: key,
                pod_range,
            }),
        }))
    }

    async fn get_consensus_status(
        &self,
        _: Request<GetConsensusStatusRequest>,
    ) -> Result<Response<GetConsensusStatusResponse>, Status> {
        self.called("GetConsensusStatus");
        Ok(Response::new(self.script().consensus.clone()))
    }
}
