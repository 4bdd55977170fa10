//! The service `CuratorLocal`: answers unauthenticated clients.

use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use hearth_api::tls::PeerCertificate;
use hearth_api::v1::curator_local_server::CuratorLocal;
use hearth_api::v1::{
    GetCaCertificateRequest, GetCaCertificateResponse, GetCurrentLeaderRequest,
    GetCurrentLeaderResponse, GetMemberStartsRequest, GetMemberStartsResponse,
};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::request::parse_node_id;
use crate::cache::Leader;
use crate::core::Core;

/// Maximum number of concurrent `GetCurrentLeader` streams.
const MOST_LEADER_FOLLOWERS: usize = 64;

pub(super) struct Service {
    core: Arc<Core>,
    followers: Arc<Semaphore>,
}

impl Service {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            followers: Arc::new(Semaphore::new(MOST_LEADER_FOLLOWERS)),
        }
    }
}

#[tonic::async_trait]
impl CuratorLocal for Service {
    type GetCurrentLeaderStream = BoxStream<'static, Result<GetCurrentLeaderResponse, Status>>;

    async fn get_current_leader(
        &self,
        _request: Request<GetCurrentLeaderRequest>,
    ) -> Result<Response<Self::GetCurrentLeaderStream>, Status> {
        self.core.reads.check()?;
        let place = self.followers.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted("too many GetCurrentLeader streams: use another curator")
        })?;
        let state = (self.core.clone(), place, Sent::Nothing);
        let stream = stream::unfold(state, |(core, place, sent)| async move {
            if matches!(sent, Sent::End) {
                return None;
            }
            // The method is public, so the caller's membership is not checked.
            let anyone = PeerCertificate::None;
            Some(tokio::select! {
                biased;
                status = core.end_of_stream(&anyone) => (Err(status), (core, place, Sent::End)),
                leader = next(&core, &sent) => {
                    let answer = answer(&core, leader.as_ref());
                    (Ok(answer), (core, place, Sent::Leader(leader)))
                }
            })
        });
        Ok(Response::new(stream.boxed()))
    }

    async fn get_member_starts(
        &self,
        request: Request<GetMemberStartsRequest>,
    ) -> Result<Response<GetMemberStartsResponse>, Status> {
        let node = parse_node_id(&request.get_ref().node_id)?;
        // What is known only grows, so what a curator without a quorum knows is true, too.
        let status = self.core.cache.status(node);
        let starts = status.and_then(|status| status.etcd_starts);
        Ok(Response::new(GetMemberStartsResponse { starts }))
    }

    async fn get_ca_certificate(
        &self,
        request: Request<GetCaCertificateRequest>,
    ) -> Result<Response<GetCaCertificateResponse>, Status> {
        let nonce = request.into_inner().nonce;
        let secret = self
            .core
            .loaded_cluster()
            .await?
            .content
            .first_contact_secret;
        let ca = self.core.ca.to_vec();
        let mac = hearth_api::first_contact::prove(&secret, &nonce, &ca)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(GetCaCertificateResponse {
            ca_certificate: ca,
            first_contact_mac: mac.to_vec(),
        }))
    }
}

/// What was last sent on a stream.
enum Sent {
    Nothing,
    Leader(Option<Leader>),
    End,
}

/// Waits until the leader, or its address, differs from what was sent last.
async fn next(core: &Core, sent: &Sent) -> Option<Leader> {
    let mut changes = core.cache.watch();
    loop {
        changes.mark_unchanged();
        let leader = core.cache.leader();
        match sent {
            Sent::Leader(told) if *told == leader => {
                // The sender lives in the cache, which `core` holds.
                let _ = changes.changed().await;
            }
            _ => return leader,
        }
    }
}

fn answer(core: &Core, leader: Option<&Leader>) -> GetCurrentLeaderResponse {
    let mut answer = GetCurrentLeaderResponse {
        this_node_id: core.node_id.to_string(),
        ..Default::default()
    };
    if let Some(leader) = leader {
        answer.leader_node_id = leader.node.to_string();
        answer.leader_host.clone_from(&leader.host);
        answer.leader_port = leader.port;
    }
    answer
}
