//! One node, for operators: its log, its power; and for the other nodes, the
//! exchange of addresses.
//!
//! It is served by every node that has credentials, and needs no quorum: it is
//! what an operator has when nothing else answers. So who may call is judged by
//! what this node knows, which is the curators' nodes as it last saw them:
//!
//! | | a node | the owner |
//! |---|---|---|
//! | HOME, and the curators' nodes are known | what its permissions say, if it is one of them and up | everything |
//! | not known since the boot, or SPLIT | may exchange addresses, if it is not known to be gone | everything |
//! | DISOWNING | nothing | everything |
//!
//! A node that is gone from the curators' nodes is refused, and its connections
//! are cut as soon as this node hears of it. There is one user, the owner; a
//! certificate of another one is nobody's.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use hearth_api::identity::{NodeId, Subject, UserName};
use hearth_api::server::{Admission, Caller, Server, Services, Transport};
use hearth_api::tls::{self, PeerCertificate};
use hearth_api::v1::node_local_server::NodeLocalServer;
use hearth_api::v1::node_management_server::{NodeManagement, NodeManagementServer};
use hearth_api::v1::{
    GetLogsRequest, GetLogsResponse, LogEntry, LogSeverity, PowerOffRequest, PowerOffResponse,
    RebootRequest, RebootResponse,
};
use hearth_base::event::Value;
use hearth_base::logtree::{Backlog, Entry, LogTree, Query, Severity};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::handover::MemberData;
use hearth_host::logs::{self, Piece};
use hearth_host::power::Ending;
use hearth_host::power::Power;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::addresses::{Book, Local};
use super::known::View;

/// Readers of the log at a time.
const READERS: usize = 32;
/// Bytes of a runnable's name.
const LONGEST_NAME: usize = 512;
/// The runnable above all others.
const ROOT: &str = "root";

/// Serves operators, and other nodes' addresses, on this node itself.
pub struct Worker {
    /// Where it is served.
    pub listen: SocketAddr,
    /// What operators read.
    pub log_tree: LogTree,
    /// How operators reboot the machine.
    pub power: Power,
    /// Answers the exchange of addresses.
    pub book: Arc<Book>,
    /// Will be read.
    pub member: Value<MemberData>,
    /// Will be read.
    pub view: Value<Arc<View>>,
    /// Will be read.
    pub cluster_state: ClusterState,
}

/// Serves node management once the node is a member.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let (transport, ..) = Transport::of_node(&member.credentials, tls::wall_clock())?;
    let listener = TcpListener::bind(worker.listen).await?;
    let service = Service {
        log_tree: worker.log_tree.clone(),
        power: worker.power.clone(),
        readers: Arc::new(Semaphore::new(READERS)),
    };
    let services = Services::new()
        .with(NodeManagementServer::new(service))
        .with(NodeLocalServer::new(Local(worker.book.clone())));
    let gate = Arc::new(Gate {
        view: worker.view.clone(),
        cluster_state: worker.cluster_state.clone(),
    });
    ctx.healthy();
    Server::new(transport)
        .admission(gate)
        .serve(listener, services, ctx.token())
        .await?;
    match ctx.is_cancelled() {
        true => Ok(()),
        false => Err(Failure::msg("the node management ended")),
    }
}

/// Who may call, beside what the methods ask for.
struct Gate {
    view: Value<Arc<View>>,
    cluster_state: ClusterState,
}

impl Gate {
    /// Judged by the view, however old it is.
    fn is_gone(&self, node: &NodeId) -> bool {
        self.view.get().is_some_and(|view| !view.has(node))
    }

    fn admit_node(&self, node: NodeId, path: &str) -> Result<(), Status> {
        let state = self.cluster_state.get();
        if self.is_gone(&node) {
            return Err(Status::permission_denied(format!(
                "{node} is not a node of this cluster, or not any more"
            )));
        }
        // Worth its signatures, not its caller, and needed most in SPLIT; and
        // how this server is, which clients ask first.
        let is_local = ["/hearth.v1.NodeLocal/", "/grpc.health.v1.Health/"]
            .iter()
            .any(|service| path.starts_with(service));
        match (state, self.view.get()) {
            (State::Disowning, _) => Err(Status::permission_denied(
                "the cluster has removed the node that you ask",
            )),
            (State::Split, _) | (_, None) if !is_local => Err(Status::permission_denied(
                "this node is not in touch with its cluster and admits the owner only",
            )),
            _ => Ok(()),
        }
    }
}

impl Admission for Gate {
    fn admit(&self, caller: &Caller, path: &str) -> Result<(), Status> {
        let Some(identity) = caller.peer().identity() else {
            // Strangers; the methods say which of them is for those.
            return Ok(());
        };
        match &identity.subject {
            Subject::Node(node) => self.admit_node(*node, path),
            Subject::User(name) if *name == UserName::owner() => Ok(()),
            Subject::User(name) => Err(Status::permission_denied(format!(
                "{name}: this cluster has no user but {}",
                UserName::OWNER
            ))),
        }
    }

    fn revoked(self: Arc<Self>, peer: PeerCertificate) -> BoxFuture<'static, ()> {
        let node = peer.identity().and_then(|identity| identity.node_id());
        Box::pin(async move {
            let mut views = self.view.watch();
            if let Some(node) = node
                && views.wait_for(|view| !view.has(&node)).await.is_ok()
            {
                return;
            }
            std::future::pending().await
        })
    }
}

struct Service {
    log_tree: LogTree,
    power: Power,
    readers: Arc<Semaphore>,
}

#[tonic::async_trait]
impl NodeManagement for Service {
    type GetLogsStream = BoxStream<'static, Result<GetLogsResponse, Status>>;

    async fn get_logs(
        &self,
        request: Request<GetLogsRequest>,
    ) -> Result<Response<Self::GetLogsStream>, Status> {
        let query = query(request.into_inner())?;
        let place = self.readers.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{READERS} readers follow this node's log already: end one of them"
            ))
        })?;
        let pieces = logs::read(&self.log_tree, query).map(move |piece| {
            // For as long as the stream is there.
            let _place = &place;
            Ok(response(piece))
        });
        Ok(Response::new(pieces.boxed()))
    }

    async fn reboot(
        &self,
        request: Request<RebootRequest>,
    ) -> Result<Response<RebootResponse>, Status> {
        self.end(&request, Ending::Reboot)?;
        Ok(Response::new(RebootResponse {}))
    }

    async fn power_off(
        &self,
        request: Request<PowerOffRequest>,
    ) -> Result<Response<PowerOffResponse>, Status> {
        self.end(&request, Ending::PowerOff)?;
        Ok(Response::new(PowerOffResponse {}))
    }
}

impl Service {
    /// The way down begins at once, and the answer still goes out: servers
    /// wait a moment for the calls that run.
    fn end<T>(&self, request: &Request<T>, ending: Ending) -> Result<(), Status> {
        let caller = Caller::of(request)?;
        let who = format!("{} at {}", caller.identity()?.subject, caller.remote());
        self.power.ask(ending, &who);
        Ok(())
    }
}

fn query(request: GetLogsRequest) -> Result<Query, Status> {
    let wrong = |field: &str, why: &str| Status::invalid_argument(format!("{field}: {why}"));
    let min_severity = match LogSeverity::try_from(request.min_severity) {
        Ok(LogSeverity::Unspecified) => Severity::Trace,
        Ok(LogSeverity::Debug) => Severity::Debug,
        Ok(LogSeverity::Info) => Severity::Info,
        Ok(LogSeverity::Warning) => Severity::Warning,
        Ok(LogSeverity::Error) => Severity::Error,
        Err(_) => return Err(wrong("min_severity", "wanted one that this node knows")),
    };
    if request.dn.len() > LONGEST_NAME {
        return Err(wrong("dn", "wanted the dotted name of a runnable"));
    }
    let query = match (request.subtree, request.dn.is_empty()) {
        // What is said outside of all runnables, too.
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
