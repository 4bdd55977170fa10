//! The node's own API: logs, packet filter, network and power for operators, the exchange of addresses and the time for
//! other nodes.
//!
//! Every node with credentials serves it, without a quorum: an operator can use it when nothing
//! else answers. Authorization therefore uses what this node knows, which is the curators' nodes as
//! it last saw them:
//!
//! | | a node | the owner |
//! |---|---|---|
//! | HOME, and nodes known | what its permissions allow, if it is UP | everything |
//! | SPLIT, or nodes not known yet | address exchange and time, unless known to be deleted | everything |
//! | DISOWNING | nothing | everything |
//!
//! A node that the curators have deleted is rejected, and its connections are closed as soon as
//! this node learns of it. There is one user, the owner; certificates of other users are rejected,
//! and so are those of a former owner, once this node has recorded the present one.

mod network;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use hearth_api::identity::{NodeId, PublicKey, Subject, UserName};
use hearth_api::recovery::UnlockSettings;
use hearth_api::server::{Admission, Caller, Server, Services, Transport, with_reflection};
use hearth_api::tls::PeerCertificate;
use hearth_api::v1::node_local_server::NodeLocalServer;
use hearth_api::v1::node_management_server::{NodeManagement, NodeManagementServer};
use hearth_api::v1::{
    ConfirmNetworkRequest, ConfirmNetworkResponse, GetLogsRequest, GetLogsResponse,
    GetNetworkRequest, GetNetworkResponse, GetPacketFilterRequest, GetPacketFilterResponse,
    LogEntry, LogSeverity, PowerOffRequest, PowerOffResponse, RebootRequest, RebootResponse,
    TryNetworkRequest, TryNetworkResponse,
};
use hearth_base::event::Value;
use hearth_base::logtree::{Backlog, Entry, LogTree, Query, Severity};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::handover::{MemberData, PacketFilter};
use hearth_host::logs::{self, Piece};
use hearth_host::network_control::NetworkControl;
use hearth_host::power::{Power, PowerRequest};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::addresses::{AddressBook, Local};
use super::known::View;

/// Maximum number of concurrent log readers.
const READERS: usize = 32;
/// Maximum number of calls at a time that read the packet filter.
const FILTER_READERS: usize = 2;
/// Maximum length of a part of the packet filter's rules in bytes.
const RULES_PART: usize = 64 << 10;
/// Maximum length of a runnable's name in bytes.
const LONGEST_NAME: usize = 512;
/// Name of the root runnable.
const ROOT: &str = "root";

/// Serves the API for operators and other nodes.
pub struct Worker {
    /// The listening address.
    pub listen: SocketAddr,
    /// The log that operators read.
    pub log_tree: LogTree,
    /// Reboots or powers off the machine.
    pub power: Power,
    /// Shows and changes the node's network.
    pub network_control: NetworkControl,
    /// Answers the exchange of addresses.
    pub book: Arc<AddressBook>,
    /// Read: when the last acknowledged heartbeat was sent.
    pub acknowledged: Value<Instant>,
    /// Read: this node's credentials.
    pub member: Value<MemberData>,
    /// Read: the nodes according to the curators.
    pub view: Value<Arc<View>>,
    /// Read: decides whether nodes are admitted.
    pub cluster_state: ClusterState,
    /// Read: who the owner is.
    pub recorded: Value<UnlockSettings>,
    /// Read: the packet filter; not set on a node that has none.
    pub packet_filter: Value<PacketFilter>,
}

/// Serves the API once the node is a member.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async {
            let member = worker.member.watch().next().await?;
            worker.recorded.watch().next().await?;
            Ok::<_, Failure>(member)
        } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let transport = Transport::of_node(&member.own)?;
    let listener = TcpListener::bind(worker.listen).await?;
    let service = Service {
        log_tree: worker.log_tree.clone(),
        power: worker.power.clone(),
        network: network::Network {
            control: worker.network_control.clone(),
            acknowledged: worker.acknowledged.clone(),
        },
        readers: Arc::new(Semaphore::new(READERS)),
        packet_filter: worker.packet_filter.clone(),
        filter_readers: Semaphore::new(FILTER_READERS),
    };
    let services = Services::new()
        .with(NodeManagementServer::new(service))
        .with(NodeLocalServer::new(Local(worker.book.clone())));
    let gate = Arc::new(Gate {
        view: worker.view.clone(),
        cluster_state: worker.cluster_state.clone(),
        recorded: worker.recorded.clone(),
    });
    ctx.healthy();
    Server::new(transport)
        .admission(gate)
        .serve(listener, with_reflection(services), ctx.token())
        .await?;
    match ctx.is_cancelled() {
        true => Ok(()),
        false => Err(Failure::msg("the node management server exited")),
    }
}

/// Decides who may call, in addition to the permissions of the methods.
struct Gate {
    view: Value<Arc<View>>,
    cluster_state: ClusterState,
    recorded: Value<UnlockSettings>,
}

impl Gate {
    fn admit_owner(&self, key: Option<PublicKey>) -> Result<(), Status> {
        let settings = self.recorded.get();
        match settings.and_then(|settings| another_owner(&settings, key)) {
            Some(owner) => Err(Status::permission_denied(format!(
                "this node has recorded that the owner's key is {owner}: it does not know yet of \
                 another one, or the caller is a former owner"
            ))),
            None => Ok(()),
        }
    }

    /// According to the view, however old it is.
    fn is_gone(&self, node: &NodeId) -> bool {
        self.view.get().is_some_and(|view| !view.has(node))
    }

    fn admit_node(&self, node: NodeId, path: &str) -> Result<(), Status> {
        let state = self.cluster_state.get();
        if self.is_gone(&node) {
            return Err(Status::permission_denied(format!(
                "{node} is not a node of this cluster, or was deleted"
            )));
        }
        // Address records are signed, so the caller does not matter, and they are most needed in
        // SPLIT. Clients check the server's health before they call.
        let is_local = ["/hearth.v1.NodeLocal/", "/grpc.health.v1.Health/"]
            .iter()
            .any(|service| path.starts_with(service));
        match (state, self.view.get()) {
            (State::Disowning, _) => Err(Status::permission_denied(
                "the called node was removed from its cluster",
            )),
            (State::Split, _) | (_, None) if !is_local => Err(Status::permission_denied(
                "this node has lost contact with its cluster and only admits the owner",
            )),
            _ => Ok(()),
        }
    }
}

impl Admission for Gate {
    fn admit(&self, caller: &Caller, path: &str) -> Result<(), Status> {
        let Some(identity) = caller.peer().identity() else {
            // Unauthenticated; the permissions of the methods decide.
            return Ok(());
        };
        match &identity.subject {
            Subject::Node(node) => self.admit_node(*node, path),
            Subject::User(name) if *name == UserName::owner() => {
                self.admit_owner(caller.peer().public_key())
            }
            Subject::User(name) => Err(Status::permission_denied(format!(
                "{name}: unknown user, the only one is {}",
                UserName::OWNER
            ))),
        }
    }

    fn revoked(self: Arc<Self>, peer: PeerCertificate) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let gone = match peer.identity().map(|identity| &identity.subject) {
                Some(Subject::Node(node)) => {
                    let mut views = self.view.watch();
                    views.wait_for(|view| !view.has(node)).await.is_ok()
                }
                Some(Subject::User(_)) => {
                    let mut recordings = self.recorded.watch();
                    let key = peer.public_key();
                    let other = |settings: &UnlockSettings| another_owner(settings, key).is_some();
                    recordings.wait_for(other).await.is_ok()
                }
                None => false,
            };
            if !gone {
                std::future::pending().await
            }
        })
    }
}

/// The owner that this node has recorded, if it is not the holder of this key. A node that a former
/// release has registered knows none.
fn another_owner(settings: &UnlockSettings, key: Option<PublicKey>) -> Option<PublicKey> {
    settings.owner.filter(|owner| key != Some(*owner))
}

struct Service {
    log_tree: LogTree,
    power: Power,
    network: network::Network,
    readers: Arc<Semaphore>,
    packet_filter: Value<PacketFilter>,
    filter_readers: Semaphore,
}

#[tonic::async_trait]
impl NodeManagement for Service {
    type GetLogsStream = BoxStream<'static, Result<GetLogsResponse, Status>>;
    type GetPacketFilterStream = BoxStream<'static, Result<GetPacketFilterResponse, Status>>;

    async fn get_logs(
        &self,
        request: Request<GetLogsRequest>,
    ) -> Result<Response<Self::GetLogsStream>, Status> {
        let query = query(request.into_inner())?;
        let place = self.readers.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "this node already has {READERS} log readers, the maximum: close one of them"
            ))
        })?;
        let pieces = logs::read(&self.log_tree, query).map(move |piece| {
            // Held as long as the stream exists.
            let _place = &place;
            Ok(response(piece))
        });
        Ok(Response::new(pieces.boxed()))
    }

    async fn get_packet_filter(
        &self,
        request: Request<GetPacketFilterRequest>,
    ) -> Result<Response<Self::GetPacketFilterStream>, Status> {
        let PacketFilter {
            nftables, table, ..
        } = self.packet_filter.get().ok_or_else(|| {
            Status::failed_precondition(
                "this node has no packet filter: it has no pods and forwards nothing, because its \
                 image lacks the extension kubernetes",
            )
        })?;
        let _place = self.filter_readers.try_acquire().map_err(|_| {
            Status::resource_exhausted("the packet filter of this node is being read: try again")
        })?;
        let rules = match request.into_inner().all_tables {
            true => nftables.ruleset().await,
            false => nftables.table_with_counters(table).await,
        };
        let rules = rules.map_err(|error| Status::internal(hearth_api::chain(&error)))?;
        let parts: Vec<_> = parts(&rules).map(Ok).collect();
        Ok(Response::new(futures::stream::iter(parts).boxed()))
    }

    async fn reboot(
        &self,
        request: Request<RebootRequest>,
    ) -> Result<Response<RebootResponse>, Status> {
        self.end(&request, PowerRequest::Reboot)?;
        Ok(Response::new(RebootResponse {}))
    }

    async fn power_off(
        &self,
        request: Request<PowerOffRequest>,
    ) -> Result<Response<PowerOffResponse>, Status> {
        self.end(&request, PowerRequest::PowerOff)?;
        Ok(Response::new(PowerOffResponse {}))
    }

    async fn get_network(
        &self,
        _: Request<GetNetworkRequest>,
    ) -> Result<Response<GetNetworkResponse>, Status> {
        Ok(Response::new(self.network.get().await?))
    }

    async fn try_network(
        &self,
        request: Request<TryNetworkRequest>,
    ) -> Result<Response<TryNetworkResponse>, Status> {
        self.network.begin(request.into_inner()).await?;
        Ok(Response::new(TryNetworkResponse {}))
    }

    async fn confirm_network(
        &self,
        request: Request<ConfirmNetworkRequest>,
    ) -> Result<Response<ConfirmNetworkResponse>, Status> {
        self.network.confirm(request.into_inner()).await?;
        Ok(Response::new(ConfirmNetworkResponse {}))
    }
}

impl Service {
    /// Starts the shutdown at once. The response is still sent: servers wait a moment for pending
    /// calls.
    fn end<T>(&self, request: &Request<T>, ending: PowerRequest) -> Result<(), Status> {
        let caller = Caller::of(request)?;
        let who = format!("{} at {}", caller.identity()?.subject, caller.remote());
        self.power.ask(ending, &who);
        Ok(())
    }
}

/// The rules in parts that fit a message.
fn parts(mut rules: &str) -> impl Iterator<Item = GetPacketFilterResponse> {
    std::iter::from_fn(move || {
        let (part, rest) = rules.split_at(rules.floor_char_boundary(RULES_PART));
        rules = rest;
        let rules = part.to_owned();
        (!part.is_empty()).then_some(GetPacketFilterResponse { rules })
    })
}

fn query(request: GetLogsRequest) -> Result<Query, Status> {
    let wrong = |field: &str, why: &str| Status::invalid_argument(format!("{field}: {why}"));
    let min_severity = match LogSeverity::try_from(request.min_severity) {
        Ok(LogSeverity::Unspecified) => Severity::Trace,
        Ok(LogSeverity::Debug) => Severity::Debug,
        Ok(LogSeverity::Info) => Severity::Info,
        Ok(LogSeverity::Warning) => Severity::Warning,
        Ok(LogSeverity::Error) => Severity::Error,
        Err(_) => return Err(wrong("min_severity", "unknown value")),
    };
    if request.dn.len() > LONGEST_NAME {
        return Err(wrong("dn", "expected the dotted name of a runnable"));
    }
    let query = match (request.subtree, request.dn.is_empty()) {
        // Includes entries from outside of all runnables.
        (true, _) => Query::subtree(request.dn),
        (false, true) => Query::exact(ROOT),
        (false, false) => Query::exact(request.dn),
    };
    Ok(Query {
        min_severity,
        follow: request.follow,
        backlog: match request.backlog {
            0 => Backlog::All,
            count => Backlog::Count(usize::try_from(count).unwrap_or(usize::MAX)),
        },
        ..query
    })
}

fn response(piece: Piece) -> GetLogsResponse {
    GetLogsResponse {
        entries: piece.entries.iter().map(entry).collect(),
        missed: piece.missed,
    }
}

fn entry(entry: &Entry) -> LogEntry {
    let severity = match entry.severity {
        Severity::Trace | Severity::Debug => LogSeverity::Debug,
        Severity::Info => LogSeverity::Info,
        Severity::Warning => LogSeverity::Warning,
        Severity::Error => LogSeverity::Error,
    };
    let since = entry.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    LogEntry {
        dn: entry.dn.to_string(),
        severity: severity.into(),
        message: entry.message.to_string(),
        time_ms: i64::try_from(since.as_millis()).unwrap_or(i64::MAX),
    }
}
