//! Several nodes on one machine: a real etcd and a real curator on each, connected by a network
//! that can be cut, with the workers that join them to the etcd cluster.

mod faults;
mod history;
mod joining;
mod peers;
mod starts;

use std::any::Any;
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::join_all;
use hearth_agent::{CuratorConnection, LocalControlPlane, heartbeat, rolefetch};
use hearth_api::client::{Channel, Curators, Endpoint, Options};
use hearth_api::identity::{
    NodeCredentials, NodeId, OwnerKey, SigningKey, UserCredentials, UserName,
};
use hearth_api::private::{StoredAuthority, StoredNode};
use hearth_api::testing::Ahead;
use hearth_api::tls::{self, ExpectedServer, OwnCertificate, wall_clock};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterConfiguration, ClusterDirectory, ClusterState, ConfigureClusterRequest,
    DamagedMemberPolicy, GetClusterInfoRequest, GetConsensusStatusRequest,
    GetConsensusStatusResponse, GetCurrentLeaderRequest, GetNodesRequest, Node as WireNode,
    NodeHealth, NodeSelector, NodeState, NodeStatus, UpdateNodeRolesRequest,
    UpdateNodeStatusRequest, cluster_directory, node_selector,
};
use hearth_base::event::{self, Value};
use hearth_base::logtree::{Query, Severity};
use hearth_base::testing::TestSupervisor;
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write};
use hearth_consensus::testing::Site;
use hearth_consensus::testing::peers::Network;
use hearth_consensus::{ConsensusUser, NamespacedClient, QUOTA, member_record};
use hearth_curator::testing::bootstrap_data;
use hearth_curator::{Timing, founding};
use hearth_host::boot_record::boot_id;
use hearth_host::handover::MemberData;
use hearth_host::image::Image;
use hearth_host::pki::{Authority, Holder};
use hearth_host::prover::Prover;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use prost::Message as _;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Status;

use crate::controlplane;

/// Several etcds that start, join and elect on a busy machine.
const BOUND: Duration = Duration::from_secs(90);
/// Poll interval.
const LOOK: Duration = Duration::from_millis(50);
/// For how long certificates are issued here.
const DAY: Duration = Duration::from_secs(24 * 3600);

async fn within_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    match timeout(BOUND, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {BOUND:?}"),
    }
}

/// Shorter times than in a real cluster.
fn quick() -> Timing {
    Timing {
        heartbeat_interval: Duration::from_millis(200),
        heartbeat_bound: Duration::from_secs(3),
        session: Some(Duration::from_secs(3)),
        grace: Duration::from_secs(5),
        ..Timing::default()
    }
}

/// The running workers of one node.
struct Boot {
    control: TestSupervisor,
    fetch: TestSupervisor,
    beat: TestSupervisor,
    _status: JoinSet<()>,
    /// The writers of what the workers read.
    _writers: Box<dyn Any + Send>,
}

struct Node {
    site: Site,
    curator: SocketAddr,
    proxy: SocketAddr,
    /// By which its curator and its clients judge certificates.
    clock: Arc<Ahead>,
    credentials: Option<Arc<NodeCredentials>>,
    boot: Option<Boot>,
    /// Its TPM, if it uses one.
    tpm: Option<Arc<Prover>>,
}

impl Node {
    fn id(&self) -> NodeId {
        self.site.node_id
    }

    /// Sends etcd a signal, if it runs. The node starts an etcd that was killed again.
    fn signal_any_etcd(&self, signal: Signal) {
        for pid in self.site.etcd_pids() {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    async fn stop(&mut self) {
        if let Some(boot) = self.boot.take() {
            boot.control.stop().await;
            boot.fetch.stop().await;
            boot.beat.stop().await;
        }
        assert!(self.site.etcd_pids().is_empty());
    }

    /// Whether nothing of etcd is on its disk.
    fn is_blank(&self) -> bool {
        member_record::find(&self.site.root.data.etcd()).is_ok_and(|found| !found.anything)
    }
}

struct Cluster {
    network: Network,
    nodes: Vec<Node>,
    timing: Timing,
    /// For how long a node that starts asks others how often it has.
    ask_bound: Duration,
    owner: UserCredentials,
}

impl Cluster {
    /// `count` running nodes that are UP; the first has bootstrapped the cluster and is its only
    /// etcd member.
    async fn new(count: usize, timing: Timing) -> Self {
        Self::with_quota(count, timing, QUOTA).await
    }

    /// The same, with a quota in bytes for the database of each etcd.
    async fn with_quota(count: usize, timing: Timing, quota: u64) -> Self {
        let network = Network::default();
        let owner_key = OwnerKey::generate();
        let mut nodes = Vec::new();
        // Held open, so that each node gets a different port.
        let mut listeners = Vec::new();
        for number in 0..count {
            let mut site = Site::blank();
            site.quota_bytes = quota;
            if let Some(first) = nodes.first() {
                let first: &Node = first;
                site.cluster_id = first.site.cluster_id;
            }
            if number == 0 {
                site.found_pki();
            }
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let peers = site.config(false).peer_listen;
            nodes.push(Node {
                proxy: network.attach(site.node_id, peers).await,
                curator: listener.local_addr().unwrap(),
                site,
                clock: Ahead::by(0),
                credentials: None,
                boot: None,
                tpm: None,
            });
            listeners.push(listener);
        }
        drop(listeners);
        // The first node bootstraps the cluster, and stops.
        let first = &mut nodes[0];
        let first_etcd = first.site.start(true).await;
        let data = bootstrap_data(&first.site, &owner_key);
        let etcd = first.site.root.data.etcd();
        let authorities = hearth_host::pki::load(&etcd, data.cluster_id).unwrap();
        let client = first_etcd.client();
        founding::found(&client, &data, &authorities).await.unwrap();
        let own = founding::certify(&data, &authorities, wall_clock()).unwrap();
        let credentials = Arc::new(own.credentials());
        let disk = first.site.root.data.node();
        let assigned = rolefetch::Assigned {
            roles: data.roles,
            settings: Vec::new(),
        };
        rolefetch::save(&disk.roles(), &assigned).unwrap();
        hearth_host::credentials::save(&disk.credentials(), &credentials).unwrap();
        hearth_host::pki::remove_authority_keys(&etcd).unwrap();
        let ca = credentials.ca.clone();
        first.credentials = Some(credentials);
        let authority = authority(&client).await;
        for node in &mut nodes[1..] {
            node.credentials = Some(add(&client, &node.site, &authority).await);
        }
        first_etcd.stop().await;

        let key = SigningKey::from_seed(*owner_key.expose_seed());
        let owner = UserCredentials {
            certificate: authority
                .issue_leaf(
                    &Holder::user(nodes[0].site.cluster_id, UserName::owner(), key.public()),
                    SystemTime::now(),
                    DAY,
                )
                .unwrap(),
            key,
            ca,
        };
        let mut cluster = Self {
            network,
            nodes,
            timing,
            // Nobody answers yet.
            ask_bound: Duration::ZERO,
            owner,
        };
        for number in 0..count {
            cluster.boot(number);
        }
        // From now on others answer, even on a busy machine.
        cluster.ask_bound = Duration::from_secs(10);
        cluster
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        self.nodes.iter().map(|node| node.curator.into()).collect()
    }

    /// Starts the node's workers.
    fn boot(&mut self, number: usize) {
        let endpoints = self.endpoints();
        let timing = self.timing;
        let nodes = self.nodes.iter().map(|node| cluster_directory::Node {
            id: node.id().to_string(),
            ..Default::default()
        });
        let directory = ClusterDirectory {
            nodes: nodes.collect(),
        };
        let node = &mut self.nodes[number];
        let credentials = node.credentials.clone().unwrap();
        let own = OwnCertificate::new(&credentials, node.clock.clone()).unwrap();
        let trust = tls::node_client_config(&own, ExpectedServer::AnyNode).unwrap();
        let curators = Curators::new(endpoints, trust, Options::default());
        let connection = CuratorConnection::new(node.id(), curators);
        let member = MemberData {
            own,
            directory,
            uses_tpm: node.tpm.is_some(),
        };
        let (control_plane_writer, control_plane) = event::value();
        let (roles_writer, local_roles) = event::value();
        let (connection_writer, connections) = event::value();
        let (member_writer, members) = event::value();
        let (bootstrap_writer, bootstrap) = event::value();
        let (disowned_writer, disowned) = event::value();
        let (acknowledged, _) = event::value();
        let refusals = Arc::new(event::value().0);
        connection_writer.set(connection.clone());
        member_writer.set(member);
        let control = Arc::new(controlplane::Worker {
            root: node.site.root.clone(),
            image: Image {
                version: "1.2.3".into(),
                variant: String::new(),
                build_time: UNIX_EPOCH,
            },
            log_tree: node.site.log.clone(),
            bootstrap,
            member: members.clone(),
            founded: event::value().0,
            disowned,
            cluster_state: node.site.state.1.clone(),
            etcd_peers: node.site.config(false).peer_listen,
            curator: node.curator,
            etcd: self.network.etcd(),
            etcd_quota: node.site.quota_bytes,
            etcd_hash_check: Duration::from_secs(1),
            timing,
            peer_proxy: Some(node.proxy),
            local_roles,
            time: event::value().1,
            view: event::value().1,
            connection: connections.clone(),
            ask_bound: self.ask_bound,
            prover: node.tpm.clone(),
            control_plane: control_plane_writer,
            consensus: event::value().0,
        });
        let fetch = Arc::new(rolefetch::Worker {
            silence: hearth_api::names::WATCH_SILENCE,
            roles_file: node.site.root.data.node().roles(),
            member: members,
            connection: connections.clone(),
            local_roles: roles_writer,
            node_settings: event::value().0,
            refusals: refusals.clone(),
        });
        let beat = Arc::new(heartbeat::Worker {
            connection: connections,
            acknowledged,
            refusals,
            unlock_settings: event::value().0,
            curator_time: event::value().0,
        });
        let mut status = JoinSet::new();
        status.spawn(report(
            connection,
            control_plane.clone(),
            node.curator.port(),
        ));
        node.boot = Some(Boot {
            control: TestSupervisor::run_restartable(move |ctx| {
                controlplane::run(ctx, control.clone())
            }),
            fetch: TestSupervisor::run(move |ctx| rolefetch::run(ctx, fetch.clone())),
            beat: TestSupervisor::run(move |ctx| heartbeat::run(ctx, beat.clone())),
            _status: status,
            _writers: Box::new((
                bootstrap_writer,
                disowned_writer,
                connection_writer,
                member_writer,
            )),
        });
    }

    /// Simulates a power cut of a node.
    async fn cut_power(&mut self, number: usize) {
        self.nodes[number].signal_any_etcd(Signal::SIGKILL);
        self.stop(number).await;
    }

    async fn stop(&mut self, number: usize) {
        self.nodes[number].stop().await;
    }

    /// Ends all nodes, at once: one after the other, each would wait for those that are gone.
    async fn end(mut self) {
        let nodes = self.nodes.iter_mut();
        let all = nodes.map(|node| {
            node.signal_any_etcd(Signal::SIGKILL);
            node.stop()
        });
        join_all(all).await;
    }

    fn channel(&self, endpoints: Vec<Endpoint>) -> Channel {
        let any = ExpectedServer::AnyNode;
        let trust = tls::user_client_config(&self.owner, any, wall_clock()).unwrap();
        Curators::new(endpoints, trust, Options::default()).channel()
    }

    /// Adds or removes the role, and retries with other curators until one answers.
    async fn set_member(&self, number: usize, wanted: bool) -> Result<(), Status> {
        within_timeout("an answer about roles", async {
            loop {
                let asked = self.ask_for_member(number, wanted);
                match timeout(Duration::from_secs(5), asked).await {
                    Ok(Ok(())) => return Ok(()),
                    Ok(Err(status)) if !passing(&status) => return Err(status),
                    _ => tokio::time::sleep(LOOK).await,
                }
            }
        })
        .await
    }

    /// The same, one attempt.
    async fn ask_for_member(&self, number: usize, wanted: bool) -> Result<(), Status> {
        let mut client = ManagementClient::new(self.channel(self.endpoints()));
        let request = UpdateNodeRolesRequest {
            node: Some(self.selector(number)),
            consensus_member: Some(wanted),
            ..Default::default()
        };
        client.update_node_roles(request).await.map(drop)
    }

    fn selector(&self, number: usize) -> NodeSelector {
        let id = self.nodes[number].id().to_string();
        NodeSelector {
            node: Some(node_selector::Node::NodeId(id)),
        }
    }

    /// Has the cluster replace damaged members by itself.
    async fn replaces_damaged_members(&self) {
        let mut client = ManagementClient::new(self.channel(self.endpoints()));
        let info = client.get_cluster_info(GetClusterInfoRequest {});
        let info = within_timeout("the settings", info).await.unwrap();
        let request = ConfigureClusterRequest {
            version: info.get_ref().configuration_version,
            configuration: Some(ClusterConfiguration {
                damaged_member_policy: DamagedMemberPolicy::Replace.into(),
                ..ClusterConfiguration::default()
            }),
            field_mask: vec!["damaged_member_policy".into()],
        };
        let changed = client.configure_cluster(request);
        within_timeout("ConfigureCluster", changed).await.unwrap();
    }

    /// The ID of the member on a node.
    async fn member(&self, number: usize) -> Option<u64> {
        let id = self.nodes[number].id().to_string();
        let members = self.status().await.members;
        let member = members.iter().find(|member| member.node_id == id);
        member.map(|member| member.member_id)
    }

    /// Ends the pause after a replacement, which lasts an hour, as the end of its lease would. It must not be over.
    async fn ends_the_pause(&self, number: usize) {
        let etcd = self.etcd(number);
        let pause = etcd.get(state::REPLACED).await.unwrap();
        let pause = pause.expect("a pause");
        let write = Write::when(Condition::Created(pause.key, pause.create_revision));
        etcd.write(write.delete(state::REPLACED)).await.unwrap();
    }

    /// Waits until the curators have such a report of a node.
    async fn reported(&self, number: usize, what: &str, is_it: impl Fn(&NodeStatus) -> bool) {
        let id = self.nodes[number].id().to_string();
        let is_reported =
            |node: &WireNode| node.id == id && node.status.as_ref().is_some_and(&is_it);
        within_timeout(what, async {
            while !self.records().await.iter().any(is_reported) {
                tokio::time::sleep(LOOK).await;
            }
        })
        .await;
    }

    /// Waits until the curators know which member is damaged on a node.
    async fn knows_damage(&self, number: usize) {
        let is_damaged = |status: &NodeStatus| status.damaged_member_id.is_some();
        self.reported(number, "a report of the damage", is_damaged)
            .await;
    }

    /// Waits until the member on a node is another one than this.
    async fn replaces(&self, number: usize, former: u64) {
        let replaced = async {
            while self.member(number).await.is_none_or(|id| id == former) {
                tokio::time::sleep(LOOK).await;
            }
        };
        if timeout(BOUND, replaced).await.is_err() {
            self.print_logs();
            panic!(
                "the member on node {number} is not replaced: {:#?}",
                self.status().await
            );
        }
    }

    /// The members according to any curator.
    async fn status(&self) -> GetConsensusStatusResponse {
        within_timeout("the members", async {
            loop {
                let mut client = CuratorClient::new(self.channel(self.endpoints()));
                let call = client.get_consensus_status(GetConsensusStatusRequest {});
                if let Ok(Ok(status)) = timeout(Duration::from_secs(5), call).await {
                    return status.into_inner();
                }
                tokio::time::sleep(LOOK).await;
            }
        })
        .await
    }

    fn number_of(&self, id: &str) -> usize {
        let mut ids = self.nodes.iter().map(|node| node.id().to_string());
        ids.position(|known| known == id).expect("one of the nodes")
    }

    /// Waits until exactly these are voters and no change is pending. Asserts that there is never
    /// more than one learner.
    async fn becomes(&self, voters: &[usize]) {
        let wanted: BTreeSet<_> = voters.iter().copied().collect();
        let all_vote = async {
            loop {
                let status = self.status().await;
                let learners = status.members.iter().filter(|m| m.learner).count();
                assert!(learners <= 1, "{status:#?}");
                let found: BTreeSet<_> = status
                    .members
                    .iter()
                    .map(|m| self.number_of(&m.node_id))
                    .collect();
                if learners == 0 && status.changes.is_empty() && found == wanted {
                    return;
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        if timeout(BOUND, all_vote).await.is_err() {
            self.print_logs();
            let status = self.status().await;
            panic!("the voters are not {voters:?} within {BOUND:?}: {status:#?}");
        }
        self.roles_follow(&wanted).await;
    }

    fn print_logs(&self) {
        for (number, node) in self.nodes.iter().enumerate() {
            println!("---- node {number}: {}", node.id());
            let mut query = Query::subtree("root");
            query.min_severity = Severity::Warning;
            let etcd = node.site.log.read(query).backlog;
            for entry in etcd.iter().rev().take(30).rev() {
                println!("{}", entry.concise(300));
            }
            if let Some(boot) = &node.boot {
                boot.control.print_log();
                boot.fetch.print_log();
            }
        }
    }

    /// Waits until the roles in the node records match the members.
    async fn roles_follow(&self, voters: &BTreeSet<usize>) {
        within_timeout("roles follow", async {
            loop {
                let with_role: BTreeSet<_> = self
                    .records()
                    .await
                    .iter()
                    .filter(|node| node.roles.is_some_and(|r| r.consensus_member.is_some()))
                    .map(|node| self.number_of(&node.id))
                    .collect();
                if with_role == *voters {
                    return;
                }
                tokio::time::sleep(LOOK).await;
            }
        })
        .await;
    }

    async fn records(&self) -> Vec<WireNode> {
        within_timeout("the nodes", async {
            loop {
                if let Ok(Ok(nodes)) = timeout(Duration::from_secs(5), self.ask_for_nodes()).await {
                    return nodes;
                }
                tokio::time::sleep(LOOK).await;
            }
        })
        .await
    }

    async fn ask_for_nodes(&self) -> Result<Vec<WireNode>, Status> {
        let mut client = ManagementClient::new(self.channel(self.endpoints()));
        let mut answers = client
            .get_nodes(GetNodesRequest::default())
            .await?
            .into_inner();
        let mut nodes = Vec::new();
        while let Some(answer) = answers.message().await? {
            nodes.extend(answer.nodes);
        }
        Ok(nodes)
    }

    /// The leader according to the curator on this node.
    async fn leader_by(&self, number: usize) -> Option<usize> {
        let mut client =
            CuratorLocalClient::new(self.channel(vec![self.nodes[number].curator.into()]));
        let call = async {
            let answers = client.get_current_leader(GetCurrentLeaderRequest {}).await;
            answers.ok()?.into_inner().message().await.ok()?
        };
        let answer = timeout(Duration::from_secs(5), call).await.ok()??;
        (!answer.leader_node_id.is_empty()).then(|| self.number_of(&answer.leader_node_id))
    }

    /// The leader, once one of these nodes reports one of them.
    async fn leader(&self, among: &[usize]) -> usize {
        within_timeout("a leader", async {
            loop {
                for number in among {
                    let leader = self.leader_by(*number).await;
                    if let Some(leader) = leader.filter(|leader| among.contains(leader)) {
                        return leader;
                    }
                }
                tokio::time::sleep(LOOK).await;
            }
        })
        .await
    }

    /// A client of etcd on a voting node that bypasses the curator.
    fn etcd(&self, number: usize) -> NamespacedClient {
        self.nodes[number].site.back_door(ConsensusUser::Curator)
    }
}

/// Whether a call is worth retrying: no curator was reachable, or a concurrent change won.
fn passing(status: &Status) -> bool {
    use tonic::Code::{Aborted, Cancelled, DeadlineExceeded, Unavailable, Unknown};
    matches!(
        status.code(),
        Unavailable | Aborted | Cancelled | DeadlineExceeded | Unknown
    )
}

async fn authority(client: &NamespacedClient) -> Authority {
    let record = client.get(state::CLUSTER_AUTHORITY).await.unwrap().unwrap();
    let stored = StoredAuthority::decode(&record.value[..]).unwrap();
    Authority::from_stored(&stored).unwrap()
}

/// Adds the record of a node that is UP, as if it had registered.
async fn add(
    client: &NamespacedClient,
    site: &Site,
    authority: &Authority,
) -> Arc<NodeCredentials> {
    let stored = StoredNode {
        version: state::VERSION,
        id: site.node_id.to_string(),
        public_key: site.node_key.public().as_bytes().to_vec(),
        join_key: SigningKey::generate().public().as_bytes().to_vec(),
        state: NodeState::Up.into(),
        ..Default::default()
    };
    let key = state::node_key(site.node_id);
    let write = Write::when(Condition::Absent(key.clone())).put(key, stored.encode_to_vec());
    client.write(write).await.unwrap();
    let public = site.node_key.public();
    Arc::new(NodeCredentials {
        certificate: authority
            .issue_leaf(
                &Holder::node(site.cluster_id, site.node_id, public, Vec::new()),
                SystemTime::now(),
                DAY,
            )
            .unwrap(),
        key: site.node_key.clone(),
        ca: authority.certificate().clone(),
    })
}

/// Reports the node's status whenever that of its control plane changes.
async fn report(connection: CuratorConnection, control_plane: Value<LocalControlPlane>, port: u16) {
    let boot_id = boot_id().unwrap();
    let mut changes = control_plane.watch();
    loop {
        let now = control_plane.get().unwrap_or_default();
        let request = UpdateNodeStatusRequest {
            node_id: connection.node_id.to_string(),
            status: Some(NodeStatus {
                external_address: Ipv4Addr::LOCALHOST.to_string(),
                curator_port: now.curator_port.map_or(0, |_| port.into()),
                version: "1.2.3".into(),
                boot_id: boot_id.clone(),
                cluster_state: ClusterState::Home.into(),
                consensus: now.progress,
                damaged_member_id: now.data.and_then(|data| data.damaged_member),
                etcd_starts: now.starts,
                ..Default::default()
            }),
        };
        let mut curator = connection.curator();
        let told = timeout(Duration::from_secs(5), curator.update_node_status(request)).await;
        if matches!(told, Ok(Ok(_))) {
            let _ = timeout(Duration::from_secs(1), changes.next()).await;
        } else {
            tokio::time::sleep(LOOK).await;
        }
    }
}
