//! The service `Curator`: the control plane, for nodes.

use std::net::IpAddr;
use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use hearth_api::identity::{NodeId, PublicKey};
use hearth_api::names::LONGEST_CONDITION;
use hearth_api::ranges::ClusterRanges;
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::server::Caller;
use hearth_api::tls::PeerCertificate;
use hearth_api::v1::curator_server::Curator;
use hearth_api::v1::{
    ClusterState, ColdStartPolicy, CommitNodeRequest, CommitNodeResponse, GetChallengeRequest,
    GetChallengeResponse, GetConsensusStatusRequest, GetConsensusStatusResponse, HeartbeatRequest,
    HeartbeatResponse, IssueCertificateRequest, IssueCertificateResponse, JoinNodeRequest,
    JoinNodeResponse, NodeCondition, NodeStatus, RecordedSettings, RegisterNodeRequest,
    RegisterNodeResponse, RenewCertificatesRequest, RenewCertificatesResponse, StorageSecurity,
    StorageStatus, TimeSource, TimeStatus, UpdateNodeClusterNetworkingRequest,
    UpdateNodeClusterNetworkingResponse, UpdateNodeStatusRequest, UpdateNodeStatusResponse,
    WatchEvent, WatchRequest,
};
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_sys::clock;
use tonic::{Request, Response, Status, Streaming};

use super::enrolment::Enrolment;
use super::networking;
use super::report::{keep_starts, same};
use super::request::{check_boot_id, parse_node_id};
use crate::budget::Slot;
use crate::core::Core;
use crate::membership;
use crate::status::unavailable;

/// The oldest version of the heartbeat protocol that this curator supports.
const HEARTBEAT_PROTOCOL: u32 = 1;
/// Maximum number of characters of an image's version.
const LONGEST_VERSION: usize = 128;
/// Maximum number of conditions of a node.
const MOST_CONDITIONS: usize = 16;
/// Maximum number of servers or nodes that a node has its time from.
const MOST_TIME_SOURCES: usize = 64;
/// Maximum number of bytes of a condition's type or reason.
const LONGEST_CONDITION_NAME: usize = 64;
const CAMEL_CASE: &str = "1 to 64 letters and digits in CamelCase";
/// How often the write of a status is attempted when the node's record changes concurrently.
const WRITE_ATTEMPTS: usize = 4;

pub(super) struct Service {
    enrolment: Enrolment,
    core: Arc<Core>,
}

impl Service {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            enrolment: Enrolment::new(core.clone()),
            core,
        }
    }
}

#[tonic::async_trait]
impl Curator for Service {
    type WatchStream = BoxStream<'static, Result<WatchEvent, Status>>;
    type HeartbeatStream = BoxStream<'static, Result<HeartbeatResponse, Status>>;

    /// Not reachable: the layer [`super::watch`] in front of this service answers this method.
    async fn watch(
        &self,
        _request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::internal(
            "internal error: Watch reached the generated service",
        ))
    }

    async fn update_node_status(
        &self,
        request: Request<UpdateNodeStatusRequest>,
    ) -> Result<Response<UpdateNodeStatusResponse>, Status> {
        let caller = Caller::of(&request)?;
        let remote = caller.remote().ip();
        let caller = caller.node()?;
        let UpdateNodeStatusRequest { node_id, status } = request.into_inner();
        if parse_node_id(&node_id)? != caller {
            return Err(Status::permission_denied(format!(
                "node_id: expected {caller}: a node may report only its own status"
            )));
        }
        let status = status.ok_or_else(|| Status::invalid_argument("status is required"))?;
        let status = check_status(status, remote, &self.core.reserved()?.ranges)?;
        self.core.hearing.hears(caller, &status.boot_id, remote)?;
        self.store_status(caller, status).await?;
        Ok(Response::new(UpdateNodeStatusResponse {}))
    }

    async fn heartbeat(
        &self,
        request: Request<Streaming<HeartbeatRequest>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let caller = Caller::of(&request)?;
        let node = caller.node()?;
        let beats = Beats {
            node,
            address: caller.remote().ip(),
            slot: self.core.budgets.heartbeat(node),
            peer: caller.peer().clone(),
            stream: self.core.hearing.stream(),
            core: self.core.clone(),
            incoming: request.into_inner(),
            boot_id: None,
            ended: false,
        };
        let stream = stream::unfold(beats, |mut beats| async move {
            if beats.ended {
                return None;
            }
            let answer = match beats.next().await {
                Ok(Some(answer)) => Ok(answer),
                Ok(None) => return None,
                Err(status) => {
                    beats.ended = true;
                    Err(status)
                }
            };
            Some((answer, beats))
        });
        Ok(Response::new(stream.boxed()))
    }

    async fn get_challenge(
        &self,
        request: Request<GetChallengeRequest>,
    ) -> Result<Response<GetChallengeResponse>, Status> {
        self.enrolment.challenge(request).await.map(Response::new)
    }

    async fn register_node(
        &self,
        request: Request<RegisterNodeRequest>,
    ) -> Result<Response<RegisterNodeResponse>, Status> {
        self.enrolment.register(request).await.map(Response::new)
    }

    async fn commit_node(
        &self,
        request: Request<CommitNodeRequest>,
    ) -> Result<Response<CommitNodeResponse>, Status> {
        self.enrolment.commit(request).await.map(Response::new)
    }

    async fn join_node(
        &self,
        request: Request<JoinNodeRequest>,
    ) -> Result<Response<JoinNodeResponse>, Status> {
        self.enrolment.join(request).await.map(Response::new)
    }

    async fn issue_certificate(
        &self,
        request: Request<IssueCertificateRequest>,
    ) -> Result<Response<IssueCertificateResponse>, Status> {
        self.enrolment
            .issue_certificate(request)
            .await
            .map(Response::new)
    }

    async fn renew_certificates(
        &self,
        request: Request<RenewCertificatesRequest>,
    ) -> Result<Response<RenewCertificatesResponse>, Status> {
        self.enrolment
            .renew_certificates(request)
            .await
            .map(Response::new)
    }

    async fn update_node_cluster_networking(
        &self,
        request: Request<UpdateNodeClusterNetworkingRequest>,
    ) -> Result<Response<UpdateNodeClusterNetworkingResponse>, Status> {
        networking::update(&self.core, request)
            .await
            .map(Response::new)
    }

    async fn get_consensus_status(
        &self,
        _request: Request<GetConsensusStatusRequest>,
    ) -> Result<Response<GetConsensusStatusResponse>, Status> {
        membership::status(&self.core).await.map(Response::new)
    }
}

/// One node's heartbeat stream.
struct Beats {
    core: Arc<Core>,
    node: NodeId,
    /// Where the node calls from.
    address: IpAddr,
    peer: PeerCertificate,
    stream: u64,
    slot: Slot,
    incoming: Streaming<HeartbeatRequest>,
    /// The boot ID in the first heartbeat.
    boot_id: Option<String>,
    ended: bool,
}

impl Beats {
    /// Receives the next heartbeat and returns its acknowledgement; `None` at the end of the
    /// stream.
    async fn next(&mut self) -> Result<Option<HeartbeatResponse>, Status> {
        let core = self.core.clone();
        let bound = core.timing.heartbeat_bound;
        let beat = tokio::select! {
            biased;
            status = core.end_of_stream(&self.peer) => return Err(status),
            status = self.slot.replaced() => return Err(status),
            beat = self.incoming.message() => beat?,
            () = tokio::time::sleep(bound) => {
                return Err(Status::deadline_exceeded(format!("no heartbeat for {bound:?}")));
            }
        };
        let Some(beat) = beat else {
            return Ok(None);
        };
        if beat.protocol_version < HEARTBEAT_PROTOCOL {
            return Err(Status::failed_precondition(format!(
                "protocol_version: got {}, expected {HEARTBEAT_PROTOCOL} or newer",
                beat.protocol_version
            )));
        }
        check_boot_id(&beat.boot_id)?;
        let boot_id = self.boot_id.get_or_insert(beat.boot_id.clone());
        if *boot_id != beat.boot_id {
            return Err(Status::invalid_argument(
                "boot_id: changed within a stream: open a new stream after a boot",
            ));
        }
        if beat.ending {
            let hearing = &core.hearing;
            hearing
                .end_boot(self.stream, self.node, &beat.boot_id)
                .await;
            return Ok(None);
        }
        core.hearing
            .heartbeat(self.stream, self.node, &beat.boot_id, self.address)
            .await?;
        Ok(Some(HeartbeatResponse {
            interval_ms: Core::millis(core.timing.heartbeat_interval),
            bound_ms: Core::millis(bound),
            unlock_settings: core.cache.unlock_settings().unwrap_or_default(),
            time_ms: clock::unix_milliseconds(),
            time_is_synchronized: clock::is_synchronised(),
        }))
    }
}

impl Service {
    /// Writes the status, unless it equals the stored one.
    ///
    /// A write is conditional on the revision of the node's record, so the cache need not be recent
    /// for it. But if nothing is written, or the node does not exist, the answer depends on the
    /// cache alone, so it is brought up to date first. Otherwise a status that was stored in
    /// between, here or at another curator, would remain.
    async fn store_status(&self, node: NodeId, mut status: NodeStatus) -> Result<(), Status> {
        let report = self.core.budgets.report(node);
        let mut read = false;
        let mut permitted = false;
        for _ in 0..WRITE_ATTEMPTS {
            let known = self.core.cache.status(node);
            keep_starts(known.and_then(|known| known.etcd_starts), &mut status);
            let known = self.core.cache.reported(node, |known| same(known, &status));
            let write = match known {
                Some((revision, false)) => {
                    Write::when(Condition::Unchanged(state::node_key(node), revision)).put(
                        state::status_key(node),
                        state::encode_status(status.clone()),
                    )
                }
                _ if !read => {
                    self.core.reads.linearizable().await?;
                    read = true;
                    continue;
                }
                Some(_) => return Ok(()),
                None => {
                    return Err(Status::permission_denied(format!(
                        "{node} is no longer a member of this cluster"
                    )));
                }
            };
            if !std::mem::replace(&mut permitted, true) {
                report.may_write().await?;
            }
            match self.core.client.write(write).await {
                Ok(_) => return Ok(()),
                // The node's record has changed: read it again.
                Err(WriteError::Conflict) => {
                    self.core.reads.linearizable().await?;
                    read = true;
                }
                Err(WriteError::Consensus(error)) => return Err(unavailable(&error)),
            }
        }
        Err(Status::unavailable(
            "the node's record keeps changing: send the status again",
        ))
    }
}

/// Whether other nodes may be told to send packets to this address, as one of a node that has called
/// from `remote`.
fn is_reachable(address: IpAddr, remote: IpAddr, ranges: &ClusterRanges) -> bool {
    let special = match address {
        IpAddr::V4(v4) => v4.is_broadcast(),
        // Useless without the name of a link.
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
    };
    // All nodes of a cluster may run on one machine.
    let local = address.is_loopback() && !remote.to_canonical().is_loopback();
    let of_pods = ranges.contains(address);
    !(address.is_unspecified() || address.is_multicast() || special || local || of_pods)
}

/// Validates a status from a node that has called from `remote`, in a cluster with these ranges of pods and
/// services.
fn check_status(
    status: NodeStatus,
    remote: IpAddr,
    ranges: &ClusterRanges,
) -> Result<NodeStatus, Status> {
    let wrong = |field: &str, why: &str| Status::invalid_argument(format!("status.{field}: {why}"));
    // Stored in its canonical form, so that it can be compared.
    let address: IpAddr = status
        .external_address
        .parse()
        .ok()
        .filter(|address| is_reachable(*address, remote, ranges))
        .ok_or_else(|| {
            wrong(
                "external_address",
                "expected the IPv4 or IPv6 address, without a port, at which others reach the node",
            )
        })?;
    let second = second_address(&status.second_address, address)
        .filter(|second| second.is_none_or(|second| is_reachable(second, remote, ranges)))
        .ok_or_else(|| {
            wrong(
                "second_address",
                "expected no text, or an address like external_address of the other family",
            )
        })?;
    if status.curator_port > u32::from(u16::MAX) {
        return Err(wrong("curator_port", "expected a port, or 0"));
    }
    let version = &status.version;
    if version.is_empty()
        || version.chars().count() > LONGEST_VERSION
        || version.chars().any(char::is_control)
    {
        return Err(wrong("version", "expected 1 to 128 printable characters"));
    }
    check_boot_id(&status.boot_id)?;
    if ClusterState::try_from(status.cluster_state).is_err() {
        return Err(wrong(
            "cluster_state",
            "expected a state that this curator knows",
        ));
    }
    check_conditions(&status.conditions)?;
    check_recorded(status.recorded_settings.as_ref())?;
    check_time(status.time.as_ref())?;
    check_storage(status.storage.as_ref())?;
    Ok(NodeStatus {
        external_address: address.to_string(),
        second_address: second.map(|second| second.to_string()).unwrap_or_default(),
        ..status
    })
}

/// The second address that a text states, which may be none; `None` if it is not of the other family than
/// the first one.
fn second_address(text: &str, first: IpAddr) -> Option<Option<IpAddr>> {
    if text.is_empty() {
        return Some(None);
    }
    let second: IpAddr = text.parse().ok()?;
    (second.is_ipv4() != first.is_ipv4()).then_some(Some(second))
}

/// Validates what a node has recorded, which is shown to operators.
fn check_recorded(recorded: Option<&RecordedSettings>) -> Result<(), Status> {
    let Some(recorded) = recorded else {
        return Ok(());
    };
    let wrong = |field: &str, why: String| {
        Status::invalid_argument(format!("status.recorded_settings.{field}: {why}"))
    };
    if ColdStartPolicy::try_from(recorded.cold_start_policy).is_err() {
        let why = "expected a policy that this curator knows";
        return Err(wrong("cold_start_policy", why.to_owned()));
    }
    PublicKey::from_field(&recorded.owner_public_key)
        .map_err(|error| wrong("owner_public_key", error.to_string()))?;
    RecoveryRecipient::from_field(&recorded.recovery_recipient)
        .map_err(|error| wrong("recovery_recipient", error.to_string()))?;
    Ok(())
}

/// Validates a text of a node that is shown to operators; the error is what was expected.
fn check_text(text: &str) -> Result<(), String> {
    match text.len() > LONGEST_CONDITION || text.chars().any(char::is_control) {
        true => Err(format!(
            "expected at most {LONGEST_CONDITION} bytes without control characters"
        )),
        false => Ok(()),
    }
}

/// Validates what a node says about its data partition, which is shown to operators.
fn check_storage(storage: Option<&StorageStatus>) -> Result<(), Status> {
    let Some(storage) = storage else {
        return Ok(());
    };
    let wrong = |field: &str, why: String| {
        Status::invalid_argument(format!("status.storage.{field}: {why}"))
    };
    if StorageSecurity::try_from(storage.security).is_err() {
        let why = "expected a mode that this curator knows";
        return Err(wrong("security", why.to_owned()));
    }
    check_text(&storage.cipher).map_err(|why| wrong("cipher", why))
}

/// Validates what a node says about its clock, which is shown to operators and stored for every node.
fn check_time(time: Option<&TimeStatus>) -> Result<(), Status> {
    let Some(time) = time else {
        return Ok(());
    };
    let wrong =
        |field: &str, why: String| Status::invalid_argument(format!("status.time.{field}: {why}"));
    if TimeSource::try_from(time.source).is_err() {
        let why = "expected a source that this curator knows";
        return Err(wrong("source", why.to_owned()));
    }
    if time.servers.len() > MOST_TIME_SOURCES {
        let found = time.servers.len();
        let why = format!("expected at most {MOST_TIME_SOURCES}, got {found}");
        return Err(wrong("servers", why));
    }
    let texts = time.servers.iter().map(|server| ("servers", server));
    for (field, text) in texts.chain([("problem", &time.problem)]) {
        check_text(text).map_err(|why| wrong(field, why))?;
    }
    Ok(())
}

/// Validates conditions, which are shown to operators and stored for every node.
fn check_conditions(conditions: &[NodeCondition]) -> Result<(), Status> {
    let wrong = |field: &str, why: String| {
        Err(Status::invalid_argument(format!(
            "status.conditions{field}: {why}"
        )))
    };
    if conditions.len() > MOST_CONDITIONS {
        let found = conditions.len();
        return wrong(
            "",
            format!("expected at most {MOST_CONDITIONS}, got {found}"),
        );
    }
    for (index, condition) in conditions.iter().enumerate() {
        let before = &conditions[..index];
        if !is_camel_case(&condition.r#type)
            || before.iter().any(|other| other.r#type == condition.r#type)
        {
            return wrong(".type", format!("expected each once, {CAMEL_CASE}"));
        }
        if !condition.reason.is_empty() && !is_camel_case(&condition.reason) {
            return wrong(".reason", format!("expected nothing, or {CAMEL_CASE}"));
        }
        if let Err(why) = check_text(&condition.message) {
            return wrong(".message", why);
        }
    }
    Ok(())
}

fn is_camel_case(name: &str) -> bool {
    name.len() <= LONGEST_CONDITION_NAME
        && name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests;
