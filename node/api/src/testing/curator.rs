//! A curator with scripted answers, without a cluster.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{Stream, stream};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::TestCluster;
use crate::client::Endpoint;
use crate::first_contact;
use crate::identity::{
    ClusterUnlockKey, FirstContactSecret, Identity, NodeCredentials, NodeId, PublicKey, UserName,
};
use crate::recovery::{RecoveryRecipient, UnlockSettings};
use crate::server::{Admission, Caller, Limits, ServeError, Server, Services, Transport};
use crate::tls::{Clock, OwnCertificate};
use crate::v1::aaa_server::{Aaa, AaaServer};
use crate::v1::curator_local_server::{CuratorLocal, CuratorLocalServer};
use crate::v1::curator_server::CuratorServer;
use crate::v1::management_server::ManagementServer;
use crate::v1::node_management_server::NodeManagementServer;
use crate::v1::{
    ClusterConfiguration, ClusterDirectory, ColdStartPolicy, EscrowRequest, EscrowResponse,
    GetCaCertificateRequest, GetCaCertificateResponse, GetConsensusStatusResponse,
    GetCurrentLeaderRequest, GetCurrentLeaderResponse, GetMemberStartsRequest,
    GetMemberStartsResponse, GetNetworkResponse, GetSecretsKeysResponse, HeartbeatRequest,
    KubernetesConfiguration, LogEntry, Node, NodeStatus, OwnerReplacement, TrustedImage,
    WatchEvent,
};

pub(super) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The answers of a [`TestCurator`].
pub struct Script {
    /// For `GetNodes` and `Watch`, and for all calls that change a node: they change these records
    /// as a curator would, as far as no other node is involved.
    pub nodes: Vec<Node>,
    /// For `GetConsensusStatus`.
    pub consensus: GetConsensusStatusResponse,
    /// For `GetRegisterTicket`; each rotation makes another one.
    pub register_ticket: Vec<u8>,
    /// For `GetLogs`.
    pub logs: Vec<LogEntry>,
    /// For `GetClusterInfo`; `ConfigureCluster` changes it.
    pub configuration: ClusterConfiguration,
    /// The version of the configuration.
    pub configuration_version: u64,
    /// For `GetClusterInfo`.
    pub directory: ClusterDirectory,
    /// For `GetKubernetesAccess`: the API servers, and a placeholder for their CA certificate.
    pub kubernetes: Option<(Vec<String>, Vec<u8>)>,
    /// For `GetSecretsKeys`; `ProvideSecretsKeys` adds to it.
    pub secrets_keys: GetSecretsKeysResponse,
    /// For `GetTrustedImages`; `TrustImage` and `RevokeImage` change it.
    pub images: Vec<TrustedImage>,
    /// For `GetCACertificate`, the proof. `None`: it returns an error.
    pub first_contact_secret: Option<FirstContactSecret>,
    /// For `GetCACertificate`, instead of the true answer: a man in the middle.
    pub relayed_ca: Option<(Vec<u8>, FirstContactSecret)>,
    /// For `Escrow`, `JoinNode`, `Heartbeat` and `GetClusterInfo`. `None`: `Escrow` returns an error.
    pub owner: Option<PublicKey>,
    /// For `Heartbeat`.
    pub heartbeats: Heartbeats,
    /// For `Watch`: the first event does not complete the backlog.
    pub more_to_come: bool,
    /// For `UpdateNodeClusterNetworking`.
    pub pod_range: Result<String, Status>,
    /// For `JoinNode`: callers have to ask again after this time. `None`: they need not.
    pub ask_again: Option<Duration>,
    /// For `JoinNode`, which admits every caller. `None`: it returns an error.
    pub unlock_key: Option<ClusterUnlockKey>,
    /// For `JoinNode`, `Heartbeat` and `GetClusterInfo`.
    pub recovery_recipient: Option<RecoveryRecipient>,
    /// For `JoinNode`; `ReplaceOwner` adds one.
    pub owner_replacements: Vec<OwnerReplacement>,
    /// For `GetNetwork`; `TryNetwork` and `ConfirmNetwork` change it.
    pub network: GetNetworkResponse,
    /// For `TryNetwork`: its answer is lost.
    pub loses_answers: bool,
    /// For `ConfirmNetwork`: how many calls find that the cluster does not hear the node.
    pub unheard: u32,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            consensus: GetConsensusStatusResponse::default(),
            register_ticket: Vec::new(),
            logs: Vec::new(),
            configuration: ClusterConfiguration {
                cold_start_policy: ColdStartPolicy::None.into(),
                ..ClusterConfiguration::default()
            },
            configuration_version: 1,
            directory: ClusterDirectory::default(),
            kubernetes: None,
            secrets_keys: GetSecretsKeysResponse::default(),
            images: Vec::new(),
            first_contact_secret: None,
            relayed_ca: None,
            owner: None,
            heartbeats: Heartbeats::default(),
            more_to_come: false,
            pod_range: Err(Status::failed_precondition("no Kubernetes worker")),
            ask_again: None,
            unlock_key: None,
            recovery_recipient: None,
            owner_replacements: Vec::new(),
            network: GetNetworkResponse::default(),
            loses_answers: false,
            unheard: 0,
        }
    }
}

impl Script {
    pub(super) fn replace_owner(&mut self, replacement: OwnerReplacement) {
        let recipient = RecoveryRecipient::from_field(&replacement.recovery_recipient);
        self.recovery_recipient = recipient.expect("a recipient");
        self.owner = PublicKey::try_from(&replacement.owner_public_key[..]).ok();
        self.owner_replacements.push(replacement);
    }

    /// What `JoinNode` returns.
    pub fn unlock_settings(&self) -> UnlockSettings {
        UnlockSettings {
            cold_start_policy: self.configuration.cold_start_policy(),
            recovery_recipient: self.recovery_recipient,
            owner: self.owner,
        }
    }
}

/// How a test curator answers heartbeats.
#[derive(Clone, Copy, Debug)]
pub enum Heartbeats {
    /// Acknowledges them.
    Answer {
        /// The interval that it requests, in milliseconds.
        interval_ms: u32,
        /// The time after which it marks the node as lost, in milliseconds.
        bound_ms: u32,
        /// Delay of each answer.
        after: Duration,
    },
    /// Does not answer.
    Ignore,
    /// Ends the stream.
    End,
    /// Rejects the node.
    Refuse,
}

impl Default for Heartbeats {
    fn default() -> Self {
        Self::Answer {
            interval_ms: 1000,
            bound_ms: 5000,
            after: Duration::ZERO,
        }
    }
}

/// What a [`TestCurator`] has received.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The methods, in order.
    pub calls: Vec<&'static str>,
    /// The status reports of nodes, in order.
    pub statuses: Vec<NodeStatus>,
    /// Heartbeats and when they arrived, in order.
    pub heartbeats: Vec<(tokio::time::Instant, HeartbeatRequest)>,
    /// Mesh keys that nodes have published, in order.
    pub mesh_keys: Vec<Vec<u8>>,
}

/// A running test curator; it stops when it is dropped.
pub struct TestCurator {
    /// The address it listens on.
    pub address: SocketAddr,
    /// Its node ID.
    pub node_id: NodeId,
    /// Allows its certificate to be replaced.
    pub own: Arc<OwnCertificate>,
    cancel: CancellationToken,
    task: JoinHandle<Result<(), ServeError>>,
    answers: Arc<Answering>,
    health: HealthReporter,
    stale: Arc<Stale>,
}

/// Answers `Unavailable` to everything but health checks, like a curator that has lost contact with
/// the others.
#[derive(Default)]
struct Stale(AtomicBool);

impl Admission for Stale {
    fn admit(&self, _: &Caller, path: &str) -> Result<(), Status> {
        if self.0.load(Ordering::SeqCst) && !path.starts_with("/grpc.health.v1.Health/") {
            return Err(Status::unavailable("a stale curator: ask another one"));
        }
        Ok(())
    }
}

impl TestCurator {
    /// Starts it on a free local port, as a new node of the cluster.
    pub async fn start(cluster: &Arc<TestCluster>, script: Script, clock: Clock) -> Self {
        let node = cluster.node();
        Self::start_as(cluster, &node, script, clock, Limits::default()).await
    }

    /// Starts it as this node, with these limits.
    pub async fn start_as(
        cluster: &Arc<TestCluster>,
        node: &NodeCredentials,
        script: Script,
        clock: Clock,
        limits: Limits,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let own = OwnCertificate::new(node, clock).expect("proper credentials");
        let node_id = own.node();
        let transport = Transport::of_node(&own).expect("a TLS configuration");
        let answers = Arc::new(Answering {
            cluster: Arc::clone(cluster),
            script: Arc::new(Mutex::new(script)),
            seen: Arc::new(watch::Sender::default()),
            watches: Mutex::default(),
        });
        let (health, health_service) = tonic_health::server::health_reporter();
        let services = Services::new()
            .with(health_service)
            .with(ManagementServer::from_arc(Arc::clone(&answers)))
            .with(NodeManagementServer::from_arc(Arc::clone(&answers)))
            .with(CuratorServer::from_arc(Arc::clone(&answers)))
            .with(CuratorLocalServer::from_arc(Arc::clone(&answers)))
            .with(AaaServer::from_arc(Arc::clone(&answers)));
        let cancel = CancellationToken::new();
        let stale = Arc::new(Stale::default());
        let server = Server::new(transport)
            .limits(limits)
            .admission(Arc::clone(&stale) as Arc<dyn Admission>);
        let task = tokio::spawn(server.serve(listener, services, cancel.clone()));
        Self {
            address,
            node_id,
            own,
            cancel,
            task,
            answers,
            health,
            stale,
        }
    }

    /// Makes it answer like one that has lost contact with the others, or stop doing so. The health
    /// service reports it only if that is asked for.
    pub async fn set_stale(&self, stale: bool, says_so: bool) {
        let status = match stale && says_so {
            true => ServingStatus::NotServing,
            false => ServingStatus::Serving,
        };
        self.health.set_service_status("", status).await;
        self.stale.0.store(stale, Ordering::SeqCst);
        if stale {
            for watch in self.answers.watches().drain(..) {
                // The watcher may be gone.
                let _ = watch.send(Err(Status::unavailable("a stale curator")));
            }
        }
    }

    /// The endpoint it listens on.
    pub fn endpoint(&self) -> Endpoint {
        self.address.into()
    }

    /// What `JoinNode` and `Heartbeat` tell from now on.
    pub fn set_unlock_settings(&self, settings: &UnlockSettings) {
        let mut script = self.answers.script();
        let policy = settings.cold_start_policy;
        script.configuration.set_cold_start_policy(policy);
        script.recovery_recipient = settings.recovery_recipient;
        script.owner = settings.owner;
    }

    /// Replaces the settings of Kubernetes.
    pub fn set_kubernetes(&self, settings: KubernetesConfiguration) {
        self.answers.script().configuration.kubernetes = Some(settings);
    }

    /// The keys of Secrets, with what callers have added.
    pub fn secrets_keys(&self) -> GetSecretsKeysResponse {
        self.answers.script().secrets_keys.clone()
    }

    /// Replaces owner and recovery recipient.
    pub fn replace_owner(&self, replacement: OwnerReplacement) {
        self.answers.script().replace_owner(replacement);
    }

    /// When callers of `JoinNode` have to ask again; `None`: they need not.
    pub fn set_ask_again(&self, after: Option<Duration>) {
        self.answers.script().ask_again = after;
    }

    /// Replaces its script.
    pub fn set_nodes(&self, nodes: Vec<Node>) {
        self.answers.script().nodes = nodes;
    }

    /// Replaces its etcd status.
    pub fn set_consensus(&self, consensus: GetConsensusStatusResponse) {
        self.answers.script().consensus = consensus;
    }

    /// The nodes, with the changes that calls have made.
    pub fn nodes(&self) -> Vec<Node> {
        self.answers.script().nodes.clone()
    }

    /// Replaces its answer to `UpdateNodeClusterNetworking`.
    pub fn set_pod_range(&self, pod_range: Result<String, Status>) {
        self.answers.script().pod_range = pod_range;
    }

    /// Changes its answers to heartbeats, also on open streams.
    pub fn set_heartbeats(&self, heartbeats: Heartbeats) {
        self.answers.script().heartbeats = heartbeats;
    }

    /// Sends this event to all watchers.
    pub fn send(&self, event: &WatchEvent) {
        self.answers
            .watches()
            .retain(|watch| watch.send(Ok(event.clone())).is_ok());
    }

    /// Ends all watches.
    pub fn end_watches(&self) {
        self.answers.watches().clear();
    }

    /// What handlers have received so far.
    pub fn seen(&self) -> Seen {
        self.answers.seen.borrow().clone()
    }

    /// Waits until the condition holds for what handlers have received.
    pub async fn until(&self, wanted: impl FnMut(&Seen) -> bool) -> Seen {
        let mut seen = self.answers.seen.subscribe();
        let found = seen.wait_for(wanted).await.map(|seen| seen.clone());
        found.expect("the sender is in `answers`")
    }

    /// The methods of the calls that reached a handler, in order.
    pub fn calls(&self) -> Vec<&'static str> {
        self.seen().calls
    }

    /// Stops it in order.
    pub async fn stop(mut self) -> Result<(), ServeError> {
        self.cancel.cancel();
        (&mut self.task).await.expect("the server does not panic")
    }
}

impl Drop for TestCurator {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Watch = mpsc::UnboundedSender<Result<WatchEvent, Status>>;

pub(super) struct Answering {
    pub(super) cluster: Arc<TestCluster>,
    pub(super) script: Arc<Mutex<Script>>,
    pub(super) seen: Arc<watch::Sender<Seen>>,
    watches: Mutex<Vec<Watch>>,
}

impl Answering {
    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn watches(&self) -> MutexGuard<'_, Vec<Watch>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn called(&self, method: &'static str) {
        self.seen.send_modify(|seen| seen.calls.push(method));
    }
}

#[tonic::async_trait]
impl CuratorLocal for Answering {
    type GetCurrentLeaderStream = Answers<GetCurrentLeaderResponse>;

    async fn get_current_leader(
        &self,
        _: Request<GetCurrentLeaderRequest>,
    ) -> Result<Response<Self::GetCurrentLeaderStream>, Status> {
        self.called("GetCurrentLeader");
        let answer = stream::iter([Ok(GetCurrentLeaderResponse::default())]);
        Ok(Response::new(Box::pin(answer)))
    }

    async fn get_member_starts(
        &self,
        _: Request<GetMemberStartsRequest>,
    ) -> Result<Response<GetMemberStartsResponse>, Status> {
        self.called("GetMemberStarts");
        Ok(Response::new(GetMemberStartsResponse::default()))
    }

    async fn get_ca_certificate(
        &self,
        request: Request<GetCaCertificateRequest>,
    ) -> Result<Response<GetCaCertificateResponse>, Status> {
        self.called("GetCACertificate");
        let script = self.script();
        let (ca, secret) = match (&script.relayed_ca, &script.first_contact_secret) {
            (Some((ca, secret)), _) => (ca.clone(), secret),
            (None, Some(secret)) => (self.cluster.ca().to_vec(), secret),
            (None, None) => return Err(Status::unavailable("no CA here")),
        };
        let nonce = request.into_inner().nonce;
        let proof = first_contact::prove(secret, &nonce, &ca)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(GetCaCertificateResponse {
            ca_certificate: ca,
            first_contact_mac: proof.to_vec(),
        }))
    }
}

#[tonic::async_trait]
impl Aaa for Answering {
    async fn escrow(
        &self,
        request: Request<EscrowRequest>,
    ) -> Result<Response<EscrowResponse>, Status> {
        self.called("Escrow");
        let key = Caller::of(&request)?.public_key()?;
        if self.script().owner != Some(key) {
            return Err(Status::permission_denied(format!(
                "the key {key} is not the owner's"
            )));
        }
        let EscrowRequest {
            identity,
            p256_public_key,
        } = request.into_inner();
        let holder = Identity::user(self.cluster.id, UserName::owner());
        Ok(Response::new(EscrowResponse {
            certificate: self.cluster.user_certificate(&identity, key).to_vec(),
            ca_certificate: self.cluster.ca().to_vec(),
            p256_certificate: self.cluster.p256_leaf_of(&holder, key, &p256_public_key),
        }))
    }
}
