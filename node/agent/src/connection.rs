//! This node's tie to its cluster: the connection to the curators, and the
//! cluster state from HOME on.
//!
//! The connection goes to all known curators, the one on this machine first:
//! a node that runs one needs no network to reach the control plane. The others
//! follow in an order of the moment, so that not all nodes ask the same one. The
//! list follows the live directory; what runs over a connection to one that is
//! still on it is not touched.
//!
//! The state follows from one thing, when the curators last acknowledged a
//! heartbeat. Within [`SPLIT_AFTER`] it is HOME, later it is SPLIT. The time is
//! the monotonic one, so that a clock that is set splits nobody. A node that
//! its cluster has removed is DISOWNING from then on and has no connection.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use crate::LocalControlPlane;
use hearth_api::client::{Channel, Curators, Endpoint, Endpoints, Options};
use hearth_api::identity::NodeId;
use hearth_api::tls::{self, ExpectedServer};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{ClusterConfiguration, ClusterDirectory, GetClusterInfoRequest, WatchEvent};
use hearth_base::event::{Closed, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::cluster_state::Connectivity;
use hearth_host::directory;
use hearth_host::handover::{Disowned, MemberData};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

/// Curators that cannot be reached are asked again at least so often: when they
/// are back, nobody should sleep.
pub const ASK_AGAIN_WITHIN: Duration = Duration::from_secs(3);
/// Without an acknowledged heartbeat for so long, a member is SPLIT.
pub const SPLIT_AFTER: Duration = Duration::from_secs(10);

/// A curator that has vanished is left well before [`SPLIT_AFTER`], so that
/// the loss of one splits nobody: it is asked after this, and has half of it to
/// answer.
const KEEP_ALIVE: Duration = Duration::from_secs(4);

/// Keeps the node's connection to its curators, and the cluster state true.
pub struct Worker {
    /// Will be read.
    pub member: Value<MemberData>,
    /// Will be read.
    pub control_plane: Value<LocalControlPlane>,
    /// Will be read: where the curators are now.
    pub directory: Value<ClusterDirectory>,
    /// Will be read: when the last heartbeat that was answered was sent.
    pub acknowledged: Value<Instant>,
    /// Will be read.
    pub disowned: Value<Disowned>,
    /// Will be written.
    pub connectivity: Writer<Connectivity>,
    /// Will be written.
    pub connection: Writer<CuratorConnection>,
}

/// What a curator answered, in one line; tonic's own text repeats itself.
pub fn refused(status: Status) -> Failure {
    Failure::msg(format!("{:?}: {}", status.code(), status.message()))
}

/// The next event of a watch. A curator that hangs says nothing while its
/// connection lives on, so there is a bound: then another one is asked.
pub(super) async fn next_event(
    connection: &CuratorConnection,
    events: &mut Streaming<WatchEvent>,
    silence: Duration,
) -> Result<WatchEvent, Failure> {
    let Ok(event) = timeout(silence, events.message()).await else {
        connection.doubt();
        let why = format!("the curator has said nothing for {silence:?}");
        return Err(Failure::msg(why));
    };
    let event = event.map_err(refused)?;
    event.ok_or_else(|| Failure::msg("the curator ended the watch"))
}

/// Works over the connection there is, and begins anew over each next one. Ends
/// when the work does, which is by an error, or when there will be none.
pub async fn over_each<F>(
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
            // Then there is nobody to ask, and nothing wrong about that.
            () = connection.ended.cancelled() => connection = connections.next().await?,
            outcome = work(connection.clone()) => return outcome,
            next = connections.next() => connection = next?,
        }
    }
}

/// The way to the curators, as this node.
#[derive(Clone)]
pub struct CuratorConnection {
    /// Who we are to them.
    pub node_id: NodeId,
    curators: Curators,
    /// Cancelled when the node has no business with curators any more.
    ended: CancellationToken,
}

impl CuratorConnection {
    /// The curators as this node reaches them.
    pub fn new(node_id: NodeId, curators: Curators) -> Self {
        Self {
            node_id,
            curators,
            ended: CancellationToken::new(),
        }
    }

    /// A client of the nodes' service.
    pub fn curator(&self) -> CuratorClient<Channel> {
        CuratorClient::new(self.curators.channel())
    }

    /// The curator that calls go to has not answered in time. Its connection may
    /// be fine all the same, so this is the only way to learn of it: the next
    /// calls go to another one, if there is one that works.
    pub(super) fn doubt(&self) {
        self.curators.doubt();
    }

    /// The DNS name under which the cluster's nodes have names.
    pub async fn cluster_domain(&self) -> Result<String, Failure> {
        Ok(self.configuration().await?.cluster_domain)
    }

    /// The configuration of the cluster at this moment.
    pub async fn configuration(&self) -> Result<ClusterConfiguration, Failure> {
        let mut management = ManagementClient::new(self.curators.channel());
        let info = management
            .get_cluster_info(GetClusterInfoRequest {})
            .await
            .map_err(refused)?;
        Ok(info.into_inner().configuration.unwrap_or_default())
    }
}

/// Connects once the node is a member, and until its cluster has removed it.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let trust = tls::node_client_config(
        &member.credentials,
        ExpectedServer::AnyNode,
        tls::wall_clock(),
    )?;
    let options = Options {
        keep_alive: KEEP_ALIVE,
        ..Options::default()
    };
    let curators = Curators::new(Vec::new(), trust, options);
    let connection = CuratorConnection::new(member.node_id, curators);
    ctx.healthy();
    tokio::select! {
        biased;
        () = end(&worker, &connection) => {
            // It stays so, whatever curators still acknowledge.
            ctx.cancelled().await;
            Ok(())
        }
        outcome = follow_acknowledgements(&worker) => outcome,
        outcome = follow_curators(&worker, &member, &connection) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

/// Waits until the cluster has removed this node, and ends what ties it to it.
async fn end(worker: &Worker, connection: &CuratorConnection) {
    if worker.disowned.watch().next().await == Err(Closed) {
        // Nobody is left who could say so.
        return std::future::pending().await;
    }
    connection.ended.cancel();
    connection.curators.set_endpoints(Endpoints::default());
}

/// Keeps the connection going to where the curators are.
async fn follow_curators(
    worker: &Worker,
    member: &MemberData,
    connection: &CuratorConnection,
) -> Outcome {
    let mut control_planes = worker.control_plane.watch();
    let mut directories = worker.directory.watch();
    let mut control_plane = LocalControlPlane::default();
    // Until the live one is there.
    let mut directory = member.directory.clone();
    let mut told = false;
    loop {
        let endpoints = endpoints(&control_plane, member.node_id, &directory);
        // An empty list would only end what may still work.
        if !endpoints.is_empty() && endpoints != connection.curators.endpoints() {
            connection.curators.set_endpoints(endpoints);
            // The same connection, so that nobody has to call anew.
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

/// Where the curators are: this machine's own, if it runs one, before those of
/// the others in the directory.
///
/// The consensus members, and nobody else, may answer there: a node's
/// certificate alone makes nobody a curator.
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

/// Tells whether curators acknowledge this node.
async fn follow_acknowledgements(worker: &Worker) -> Outcome {
    let mut acknowledgements = worker.acknowledged.watch();
    let is_lost = || worker.connectivity.value().get() == Some(Connectivity::Lost);
    // Whatever came before this worker counts as an acknowledgement: enrolment
    // has just come home, or the boot is young.
    let mut last = Instant::now();
    loop {
        tokio::select! {
            // Of both, the acknowledgement: the deadline may have passed while
            // nobody looked.
            biased;
            acknowledged = acknowledgements.next() => {
                let acknowledged = acknowledged?;
                last = last.max(acknowledged);
                // It may be old news: from before this worker started again,
                // or the answer took too long.
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
            // Nine seconds of silence are nothing.
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
