//! The node's connection to the curators, and whether it is HOME or SPLIT.
//!
//! The connection has the endpoints of all known curators. The one on this machine is tried first:
//! a node that runs one needs no network to reach the control plane. The others follow in random
//! order, so that not all nodes use the same one. The list follows the live directory; calls on a
//! connection to a curator that stays in the list are not interrupted. Connections are replaced
//! before a certificate on them expires.
//!
//! The cluster state depends on when a curator last acknowledged a heartbeat: HOME within
//! [`SPLIT_AFTER`], SPLIT after that. Time is monotonic, so that a clock adjustment has no effect.
//! A node that its cluster has removed is DISOWNING from then on, and has no connection.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::{Channel, Curators, Endpoint, Endpoints, Options};
use hearth_api::identity::NodeId;
use hearth_api::tls::{self, ExpectedServer};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterConfiguration, ClusterDirectory, GetClusterInfoRequest, GetClusterInfoResponse,
    GetMemberStartsRequest, MemberStarts, WatchEvent,
};
use hearth_base::event::{Closed, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::cluster_state::Connectivity;
use hearth_host::directory;
use hearth_host::handover::{Disowned, MemberData};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use crate::LocalControlPlane;

/// Maximum delay before unreachable curators are retried, so that workers continue soon after
/// curators are back.
pub const MAX_RETRY_DELAY: Duration = Duration::from_secs(3);
/// A member without an acknowledged heartbeat for this long is SPLIT.
pub const SPLIT_AFTER: Duration = Duration::from_secs(10);

/// Keep-alive interval of the connection. A curator that has vanished is replaced well before
/// [`SPLIT_AFTER`], so that the loss of one makes no node SPLIT: it is pinged after this interval,
/// and has half of it to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(4);

/// Maintains the node's connection to its curators, and its connectivity.
pub struct Worker {
    /// Read: this node's identity and credentials.
    pub member: Value<MemberData>,
    /// Read: the port of the local curator.
    pub control_plane: Value<LocalControlPlane>,
    /// Read: the current addresses of the curators.
    pub directory: Value<ClusterDirectory>,
    /// Read: when the last acknowledged heartbeat was sent.
    pub acknowledged: Value<Instant>,
    /// Read: set once the cluster has removed this node.
    pub disowned: Value<Disowned>,
    /// Written: whether curators acknowledge heartbeats.
    pub connectivity: Writer<Connectivity>,
    /// Written: the connection, for the other workers.
    pub connection: Writer<CuratorConnection>,
}

/// A curator's error in one line; tonic's own text is redundant.
pub fn refused(status: Status) -> Failure {
    Failure::msg(format!("{:?}: {}", status.code(), status.message()))
}

/// The next event of a watch. A curator that hangs sends nothing while its connection stays open,
/// so there is a timeout, after which another curator is used.
pub(super) async fn next_event(
    connection: &CuratorConnection,
    events: &mut Streaming<WatchEvent>,
    silence: Duration,
) -> Result<WatchEvent, Failure> {
    let Ok(event) = timeout(silence, events.message()).await else {
        connection.mark_suspect();
        let why = format!("no watch event from the curator for {silence:?}");
        return Err(Failure::msg(why));
    };
    let event = event.map_err(refused)?;
    event.ok_or_else(|| Failure::msg("the curator ended the watch"))
}

/// Runs `work` over the current connection, and again over each new one. Returns when `work` does,
/// which only returns errors, or when the value is closed.
pub async fn for_each_connection<F>(
    connections: &Value<CuratorConnection>,
    work: impl Fn(CuratorConnection) -> F,
) -> Outcome
where
    F: Future<Output = Outcome>,
{
    let mut connections = connections.watch();
    let mut connection = connections.next().await?;
    loop {
        tokio::select! {
            biased;
            // A disowned node has no curators to call; this is not an error.
            () = connection.ended.cancelled() => connection = connections.next().await?,
            outcome = work(connection.clone()) => return outcome,
            next = connections.next() => connection = next?,
        }
    }
}

/// A client of the curators, with this node's credentials.
#[derive(Clone)]
pub struct CuratorConnection {
    /// ID of this node.
    pub node_id: NodeId,
    curators: Curators,
    /// Cancelled when the cluster has removed this node.
    ended: CancellationToken,
}

impl CuratorConnection {
    /// Wraps the client for this node.
    pub fn new(node_id: NodeId, curators: Curators) -> Self {
        Self {
            node_id,
            curators,
            ended: CancellationToken::new(),
        }
    }

    /// A client of the curator service.
    pub fn curator(&self) -> CuratorClient<Channel> {
        CuratorClient::new(self.curators.channel())
    }

    /// How often a curator knows that this node has started etcd.
    pub async fn member_starts(&self) -> Result<Option<MemberStarts>, Failure> {
        let mut curator = CuratorLocalClient::new(self.curators.channel());
        let request = GetMemberStartsRequest {
            node_id: self.node_id.to_string(),
        };
        let known = curator.get_member_starts(request).await;
        Ok(known.map_err(refused)?.into_inner().starts)
    }

    /// Reports that the current curator has not answered in time. The connection may be intact, so
    /// the client cannot detect this itself. Further calls go to another curator, if one works.
    pub(super) fn mark_suspect(&self) {
        self.curators.mark_suspect();
    }

    /// The DNS domain of the nodes' names.
    pub async fn cluster_domain(&self) -> Result<String, Failure> {
        Ok(self.configuration().await?.cluster_domain)
    }

    /// The current cluster configuration.
    pub async fn configuration(&self) -> Result<ClusterConfiguration, Failure> {
        let info = self.cluster_info().await?;
        Ok(info.configuration.unwrap_or_default())
    }

    /// What the curators say of the cluster.
    pub async fn cluster_info(&self) -> Result<GetClusterInfoResponse, Failure> {
        let mut management = ManagementClient::new(self.curators.channel());
        let info = management.get_cluster_info(GetClusterInfoRequest {}).await;
        Ok(info.map_err(refused)?.into_inner())
    }
}

/// Connects once the node is a member, until the cluster has removed it.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let trust = tls::node_client_config(&member.own, ExpectedServer::AnyNode)?;
    let options = Options {
        keep_alive: KEEP_ALIVE,
        presents: Some(member.own.clone()),
        ..Options::default()
    };
    let curators = Curators::new(Vec::new(), trust, options);
    let connection = CuratorConnection::new(member.own.node(), curators);
    ctx.healthy();
    tokio::select! {
        biased;
        () = end(&worker, &connection) => {
            // This is final, even if curators still acknowledge heartbeats.
            ctx.cancelled().await;
            Ok(())
        }
        outcome = follow_acknowledgements(&worker) => outcome,
        outcome = follow_curators(&worker, &member, &connection) => outcome,
        outcome = follow_certificates(&worker, &member, &connection) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

/// Waits until the cluster has removed this node, then closes the connection.
async fn end(worker: &Worker, connection: &CuratorConnection) {
    if worker.disowned.watch().next().await == Err(Closed) {
        // The writer is gone, so this cannot happen any more.
        return std::future::pending().await;
    }
    connection.ended.cancel();
    connection.curators.set_endpoints(Endpoints::default());
}

/// Updates the connection's endpoints when curators move.
async fn follow_curators(
    worker: &Worker,
    member: &MemberData,
    connection: &CuratorConnection,
) -> Outcome {
    let mut control_planes = worker.control_plane.watch();
    let mut directories = worker.directory.watch();
    let mut control_plane = LocalControlPlane::default();
    // Used until the live directory is available.
    let mut directory = member.directory.clone();
    let mut told = false;
    loop {
        let endpoints = endpoints(&control_plane, member.own.node(), &directory);
        // An empty list would only close connections that may still work.
        if !endpoints.is_empty() && endpoints != connection.curators.endpoints() {
            connection.curators.set_endpoints(endpoints);
            // The same connection, so that calls are not interrupted.
            if !std::mem::replace(&mut told, true) {
                worker.connection.set(connection.clone());
            }
        }
        tokio::select! {
            next = control_planes.next() => control_plane = next?,
            next = directories.next() => directory = next?,
        }
    }
}

/// Moves to new connections before the certificates on the old ones expire, this node's or a
/// curator's. The workers are told as if there were another connection, so that their streams move.
async fn follow_certificates(
    worker: &Worker,
    member: &MemberData,
    connection: &CuratorConnection,
) -> Outcome {
    let curators = &connection.curators;
    let (mut own, mut renewals) = (member.own.changes(), curators.renewals());
    loop {
        tokio::select! {
            changed = own.changed() => {
                changed?;
                curators.present_renewed();
            }
            renewed = renewals.changed() => {
                renewed?;
                worker.connection.set(connection.clone());
            }
            never = curators.keep_renewed() => match never {},
        }
    }
}

/// The curators' endpoints: the one on this machine, if there is one, before those of the other
/// nodes in the directory.
///
/// Only consensus members are accepted as servers there: a node certificate alone does not make a
/// node a curator.
fn endpoints(
    control_plane: &LocalControlPlane,
    own: NodeId,
    directory: &ClusterDirectory,
) -> Endpoints {
    let curators = directory::nodes(directory);
    let curators = curators.map(|nodes| nodes.into_iter().chain([own]).collect());
    let own_id = own.to_string();
    let own = control_plane.curator_port;
    let own = own.map(|port| Endpoint::new(Ipv4Addr::LOCALHOST.into(), port));
    let others = directory.nodes.iter().filter(|node| node.id != own_id);
    let others = others
        .flat_map(|node| &node.addresses)
        .filter_map(|address| {
            let host: IpAddr = address.host.parse().ok()?;
            Some(Endpoint::new(host, u16::try_from(address.port).ok()?))
        });
    Endpoints::balanced(own, others.collect()).only(curators)
}

/// Publishes whether curators acknowledge this node's heartbeats.
async fn follow_acknowledgements(worker: &Worker) -> Outcome {
    let mut acknowledgements = worker.acknowledged.watch();
    let is_lost = || worker.connectivity.value().get() == Some(Connectivity::Lost);
    // The start of this worker counts as an acknowledgement: the node has just enrolled, or just
    // booted.
    let mut last = Instant::now();
    loop {
        tokio::select! {
            // If both are ready, the acknowledgement: the deadline may have passed while the task
            // was not scheduled.
            biased;
            acknowledged = acknowledgements.next() => {
                let acknowledged = acknowledged?;
                last = last.max(acknowledged);
                // It may be old: from before a restart of this worker, or the response was slow.
                if acknowledged.elapsed() < SPLIT_AFTER {
                    worker.connectivity.set(Connectivity::InTouch);
                }
            }
            () = sleep_until(last + SPLIT_AFTER), if !is_lost() => {
                tracing::warn!("no curator has acknowledged a heartbeat for {SPLIT_AFTER:?}");
                worker.connectivity.set(Connectivity::Lost);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::cluster_directory::{Address, Node};
    use hearth_base::event;

    use super::*;

    fn node(id: &str, addresses: &[(&str, u32)]) -> Node {
        let address = |(host, port): &(&str, u32)| Address {
            host: (*host).into(),
            port: *port,
        };
        Node {
            id: id.into(),
            addresses: addresses.iter().map(address).collect(),
            roles: None,
        }
    }

    #[test]
    fn this_machines_curator_comes_first_and_once() {
        let own = NodeId::from_bytes([1; 16]);
        let nodes = vec![
            node(&own.to_string(), &[("192.0.2.9", 0)]),
            node("other", &[("192.0.2.1", 0), ("2001:db8::1", 99), ("x", 0)]),
        ];
        let directory = ClusterDirectory { nodes };
        let control_plane = LocalControlPlane {
            curator_port: Some(7),
            ..LocalControlPlane::default()
        };
        let found = endpoints(&control_plane, own, &directory);
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, ["127.0.0.1:7", "192.0.2.1:7835", "[2001:db8::1]:99"]);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_splits_and_an_acknowledgement_mends() {
        let (acknowledged_writer, acknowledged) = event::value();
        let (connectivity_writer, connectivity) = event::value();
        let worker = Worker {
            member: event::value().1,
            control_plane: event::value().1,
            directory: event::value().1,
            acknowledged,
            disowned: event::value().1,
            connectivity: connectivity_writer,
            connection: event::value().0,
        };
        let mut seen = connectivity.watch();
        let scenario = async {
            let begin = Instant::now();
            // Nine seconds without an acknowledgement have no effect.
            tokio::time::sleep(SPLIT_AFTER - Duration::from_secs(1)).await;
            acknowledged_writer.set(Instant::now());
            assert_eq!(seen.next().await.unwrap(), Connectivity::InTouch);
            assert_eq!(seen.next().await.unwrap(), Connectivity::Lost);
            assert_eq!(begin.elapsed(), 2 * SPLIT_AFTER - Duration::from_secs(1));
            acknowledged_writer.set(Instant::now());
            assert_eq!(seen.next().await.unwrap(), Connectivity::InTouch);
        };
        tokio::select! {
            () = scenario => {}
            outcome = follow_acknowledgements(&worker) => panic!("{outcome:?}"),
        }
    }
}
