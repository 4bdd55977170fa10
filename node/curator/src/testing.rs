//! A bootstrapped cluster of one node, for the tests of the curator and for its benchmark: a real
//! etcd, a real curator, and clients over mutual TLS.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hearth_api::certificates::ClusterCa;
use hearth_api::client::{Channel, Curators, Endpoint, Options as ClientOptions};
use hearth_api::identity::{
    ClusterUnlockKey, FirstContactSecret, JoinKey, NodeCredentials, NodeId, NodeKey, OwnerKey,
    PublicKey, SigningKey, UserCredentials, UserName,
};
use hearth_api::private::{StoredAuthority, StoredNode};
use hearth_api::recovery::RecoveryKey;
use hearth_api::testing::{self, insecure_client_config};
use hearth_api::tls::{self, CertificateDer, Clock, ExpectedServer, OwnCertificate, wall_clock};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterConfiguration, ColdStartPolicy, GetNodesRequest, HeartbeatRequest, HeartbeatResponse,
    Label, Node, NodeHealth, NodeRoles, NodeState, NodeStatus, StorageSecurity, TpmUsage,
    UpdateNodeStatusRequest, node_roles,
};
use hearth_base::event;
use hearth_base::supervisor::{Backoff, Options, Supervisor, runnable};
use hearth_base::testing::{BOUND, within_timeout};
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write};
use hearth_consensus::testing::{Running, Site};
use hearth_consensus::{ConsensusUser, NamespacedClient, PeerReadiness, RootClient};
use hearth_host::handover::{BootstrapData, ClusterSeed, TimeStatus};
use hearth_host::pki::{self, Authority, Holder};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::budget::{self, Rate};
use super::{Config, Timing, founding, run};

pub const BOOT_ID: &str = "1b4e28ba-2fa1-11d2-883f-0016d3cca427";

/// Shorter times than in a real cluster, but long enough for a busy machine.
pub fn quick() -> Timing {
    Timing {
        heartbeat_interval: Duration::from_millis(100),
        heartbeat_bound: Duration::from_secs(2),
        session: Some(Duration::from_secs(3)),
        grace: Duration::from_secs(2),
        read_interval: Duration::from_millis(200),
        quiet: Duration::from_millis(300),
        mark: Duration::from_secs(1),
        budget: unlimited(),
        ..Default::default()
    }
}

/// For tests and benchmarks of something else.
pub fn unlimited() -> budget::Limits {
    let rate = Rate {
        burst: 1,
        every: Duration::ZERO,
    };
    budget::Limits {
        status: rate,
        liveness: rate,
        mesh_keys: rate,
        joins: rate,
        certificates: rate,
        watches: usize::MAX,
        heartbeats: usize::MAX,
    }
}

pub fn bootstrap_data(site: &Site, owner: &OwnerKey) -> BootstrapData {
    BootstrapData {
        cluster_id: site.cluster_id,
        node_id: site.node_id,
        node_key: site.node_key.clone(),
        cluster_unlock_key: ClusterUnlockKey::generate(),
        join_key: JoinKey::generate().public(),
        storage_security: StorageSecurity::Insecure,
        tpm_usage: TpmUsage::NotPresent,
        roles: NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember::default()),
            ..Default::default()
        },
        seed: ClusterSeed {
            owner: owner.public(),
            first_contact_secret: FirstContactSecret::generate(),
            recovery_recipient: Some(RecoveryKey::from_bytes([7; 32]).recipient()),
            configuration: ClusterConfiguration {
                cluster_domain: "cluster.internal".into(),
                cold_start_policy: ColdStartPolicy::None.into(),
                ..Default::default()
            },
            labels: vec![Label {
                key: "rack".into(),
                value: "1".into(),
            }],
            manifests: Vec::new(),
        },
        booted: None,
    }
}

/// The identity of a caller.
pub enum Who<'a> {
    Nobody,
    HolderOf(&'a SigningKey),
    Node(&'a NodeCredentials),
    User(&'a UserCredentials),
}

pub struct World {
    pub site: Site,
    pub etcd: Running,
    pub owner_key: OwnerKey,
    pub data: BootstrapData,
    /// The credentials of the first node.
    pub node: Arc<NodeCredentials>,
    timing: Timing,
    curator: Option<Supervisor>,
    pub ready: event::Value<u16>,
    /// The state of the clock of the curators' nodes.
    pub time: event::Writer<TimeStatus>,
}

impl World {
    pub async fn new(timing: Timing) -> Self {
        Self::at(Site::new(), timing).await
    }

    pub async fn at(site: Site, timing: Timing) -> Self {
        let etcd = site.start(true).await;
        let owner_key = OwnerKey::generate();
        let data = bootstrap_data(&site, &owner_key);
        let authorities = pki::load(&site.root.data.etcd(), site.cluster_id).unwrap();
        let own = founding::certify(&data, &authorities, wall_clock()).unwrap();
        let node = Arc::new(own.credentials());
        founding::found(&etcd.client(), &data, &authorities)
            .await
            .unwrap();
        hearth_host::credentials::save(&site.root.data.node().credentials(), &node).unwrap();
        pki::remove_authority_keys(&site.root.data.etcd()).unwrap();
        let (_, ready) = event::value();
        let mut world = Self {
            site,
            etcd,
            owner_key,
            data,
            node,
            timing,
            curator: None,
            ready,
            time: event::value().0,
        };
        world.start_curator().await;
        world
    }

    pub async fn start_curator(&mut self) {
        let (curator, ready) = self.curator_of(&self.node).await;
        self.curator = Some(curator);
        self.ready = ready;
    }

    /// Starts a curator of this node on the cluster's etcd.
    pub async fn curator_of(&self, node: &Arc<NodeCredentials>) -> (Supervisor, event::Value<u16>) {
        self.curator_through(self.etcd.handle().root(), node).await
    }

    /// The same with another client of etcd.
    pub async fn curator_through(
        &self,
        etcd: &RootClient,
        node: &Arc<NodeCredentials>,
    ) -> (Supervisor, event::Value<u16>) {
        let time = self.time.value();
        serve(etcd, node, self.timing, wall_clock(), time).await
    }

    /// The same with another clock.
    pub async fn curator_by(
        &self,
        clock: Clock,
        node: &Arc<NodeCredentials>,
    ) -> (Supervisor, event::Value<u16>) {
        let etcd = self.etcd.handle();
        serve(etcd.root(), node, self.timing, clock, self.time.value()).await
    }

    pub async fn stop_curator(&mut self) {
        let curator = self.curator.take().unwrap();
        within_timeout("the curator stops", curator.shutdown()).await;
    }

    pub async fn stop(mut self) {
        self.stop_curator().await;
        self.etcd.stop().await;
    }

    pub fn client(&self) -> NamespacedClient {
        self.etcd.client()
    }

    pub fn ca(&self) -> ClusterCa {
        ClusterCa::parse(&self.node.ca).unwrap()
    }

    pub fn endpoint(&self) -> Endpoint {
        Endpoint::new(Ipv4Addr::LOCALHOST.into(), self.ready.get().unwrap())
    }

    pub fn channel(&self, who: &Who<'_>) -> Channel {
        self.channel_to(self.endpoint(), who)
    }

    pub fn channel_to(&self, endpoint: Endpoint, who: &Who<'_>) -> Channel {
        let any = ExpectedServer::AnyNode;
        let config = match who {
            Who::Nobody => insecure_client_config(None, &rustls::version::TLS13),
            Who::HolderOf(key) => {
                tls::possession_client_config(key, self.ca(), any, wall_clock()).unwrap()
            }
            Who::Node(credentials) => testing::node_client_config(credentials, wall_clock()),
            Who::User(credentials) => {
                tls::user_client_config(credentials, any, wall_clock()).unwrap()
            }
        };
        let options = ClientOptions::default();
        Curators::new(vec![endpoint], config, options).channel()
    }

    async fn authority(&self) -> Authority {
        let record = self.client().get(state::CLUSTER_AUTHORITY).await.unwrap();
        let stored = StoredAuthority::decode(&record.unwrap().value[..]).unwrap();
        Authority::from_stored(&stored).unwrap()
    }

    pub async fn owner(&self) -> UserCredentials {
        self.owner_with(&self.owner_key).await
    }

    pub async fn owner_with(&self, key: &OwnerKey) -> UserCredentials {
        let key = SigningKey::from_seed(*key.expose_seed());
        let authority = self.authority().await;
        UserCredentials {
            certificate: leaf(
                &authority,
                &Holder::user(self.site.cluster_id, UserName::owner(), key.public()),
            ),
            key,
            ca: self.node.ca.clone(),
        }
    }

    pub async fn management(&self) -> ManagementClient<Channel> {
        ManagementClient::new(self.channel(&Who::User(&self.owner().await)))
    }

    pub fn curator(&self, node: &NodeCredentials) -> CuratorClient<Channel> {
        CuratorClient::new(self.channel(&Who::Node(node)))
    }

    /// Adds the record of another node, as if it had registered.
    pub async fn add_node(&self, node_state: NodeState) -> NodeCredentials {
        let key = NodeKey::generate();
        let id = NodeId::from_public_key(&key.public());
        let (record, stored) = record_of(&key, node_state);
        let write = Write::when(Condition::Absent(record.clone()));
        let write = write.put(record, stored.encode_to_vec());
        self.client().write(write).await.unwrap();
        let authority = self.authority().await;
        NodeCredentials {
            certificate: self.leaf_of_node(&authority, id, key.public()),
            key,
            ca: self.node.ca.clone(),
        }
    }

    fn leaf_of_node(
        &self,
        authority: &Authority,
        id: NodeId,
        key: PublicKey,
    ) -> CertificateDer<'static> {
        let holder = Holder::node(self.site.cluster_id, id, key, Vec::new());
        leaf(authority, &holder)
    }

    /// Adds many nodes that are UP, in as few writes as possible.
    pub async fn add_nodes(&self, count: usize) -> Vec<NodeCredentials> {
        let authority = self.authority().await;
        let nodes: Vec<_> = (0..count)
            .map(|_| {
                let key = NodeKey::generate();
                let id = NodeId::from_public_key(&key.public());
                NodeCredentials {
                    certificate: self.leaf_of_node(&authority, id, key.public()),
                    key,
                    ca: self.node.ca.clone(),
                }
            })
            .collect();
        // etcd permits 128 operations in one transaction.
        for some in nodes.chunks(100) {
            let first = Write::when(Condition::Absent(state::node_key(id_of(&some[0]))));
            let write = some.iter().fold(first, |write, node| {
                let (record, stored) = record_of(&node.key, NodeState::Up);
                write.put(record, stored.encode_to_vec())
            });
            self.client().write(write).await.unwrap();
        }
        nodes
    }

    /// Sets a node's roles, as if a leader had written them.
    pub async fn set_roles(&self, node: &NodeCredentials, roles: NodeRoles) {
        let key = state::node_key(id_of(node));
        let record = self.client().get(&key).await.unwrap().unwrap();
        let mut stored = StoredNode::decode(&record.value[..]).unwrap();
        stored.roles = Some(roles);
        let write = Write::when(Condition::Unchanged(key.clone(), record.mod_revision));
        let write = write.put(key, stored.encode_to_vec());
        self.client().write(write).await.unwrap();
    }

    /// Reports the node's address.
    pub async fn report(&self, node: &NodeCredentials, address: &str) {
        let reported = self.report_as(BOOT_ID, node, address).await;
        reported.unwrap();
    }

    /// The same as this boot of the node.
    pub async fn report_as(
        &self,
        boot_id: &str,
        node: &NodeCredentials,
        address: &str,
    ) -> Result<(), Status> {
        let request = UpdateNodeStatusRequest {
            node_id: id_of(node).to_string(),
            status: Some(NodeStatus {
                external_address: address.into(),
                version: "0.1.0".into(),
                boot_id: boot_id.into(),
                address_counter: 1,
                ..Default::default()
            }),
        };
        let mut curator = self.curator(node);
        let reported = within_timeout("a report", curator.update_node_status(request));
        reported.await.map(drop)
    }

    /// Deletes a node's record.
    pub async fn delete_node(&self, id: NodeId) {
        let key = state::node_key(id);
        let revision = self.client().get(&key).await.unwrap().unwrap().mod_revision;
        let write = Write::when(Condition::Unchanged(key.clone(), revision));
        self.client().write(write.delete(key)).await.unwrap();
    }

    pub async fn nodes(&self) -> Vec<Node> {
        let mut management = self.management().await;
        let request = GetNodesRequest::default();
        let mut answers = management.get_nodes(request).await.unwrap().into_inner();
        let mut nodes = Vec::new();
        while let Some(answer) = within_timeout("nodes", answers.message()).await.unwrap() {
            nodes.extend(answer.nodes);
        }
        nodes
    }

    pub async fn health(&self, id: NodeId) -> NodeHealth {
        let id = id.to_string();
        let nodes = self.nodes().await;
        nodes.iter().find(|node| node.id == id).unwrap().health()
    }

    /// Waits until a node has this health, and returns how long it took.
    pub async fn becomes(&self, id: NodeId, health: NodeHealth) -> Duration {
        let begin = std::time::Instant::now();
        within_timeout(health.as_str_name(), async {
            while self.health(id).await != health {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        begin.elapsed()
    }
}

fn now() -> SystemTime {
    tls::system_time(&wall_clock())
}

/// A leaf that is valid for a day.
fn leaf(authority: &Authority, holder: &Holder) -> CertificateDer<'static> {
    let day = Duration::from_secs(24 * 3600);
    authority.issue_leaf(holder, now(), day).unwrap()
}

/// Starts a curator of this node on this etcd, and waits until it is listening.
pub async fn serve(
    etcd: &RootClient,
    node: &Arc<NodeCredentials>,
    timing: Timing,
    clock: Clock,
    time: event::Value<TimeStatus>,
) -> (Supervisor, event::Value<u16>) {
    let config = Arc::new(Config {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        own: OwnCertificate::new(node, clock).unwrap(),
        time,
        client: etcd.namespaced(ConsensusUser::Curator),
        kubernetes_pki: etcd.namespaced(ConsensusUser::KubernetesPki),
        kubernetes_secrets: etcd.namespaced(ConsensusUser::KubernetesSecrets),
        members: etcd.members(),
        peers: PeerReadiness::default(),
        version: "0.1.0-test".into(),
        timing,
    });
    let (writer, ready) = event::value();
    let writer = Arc::new(writer);
    let curator = Supervisor::start(
        runnable(move |ctx| {
            let (config, writer) = (config.clone(), writer.clone());
            async move {
                ctx.run("curator", move |ctx| {
                    run(ctx, config.clone(), writer.clone())
                })?;
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
        }),
        Options {
            backoff: Backoff {
                initial: Duration::from_millis(20),
                ..Default::default()
            },
            ..Default::default()
        },
    );
    within_timeout("the curator serves", ready.watch().next())
        .await
        .unwrap();
    (curator, ready)
}

fn record_of(key: &NodeKey, node_state: NodeState) -> (String, StoredNode) {
    let id = NodeId::from_public_key(&key.public());
    let stored = StoredNode {
        version: state::VERSION,
        id: id.to_string(),
        public_key: key.public().as_bytes().to_vec(),
        join_key: JoinKey::generate().public().as_bytes().to_vec(),
        state: node_state.into(),
        ..Default::default()
    };
    (state::node_key(id), stored)
}

pub fn id_of(node: &NodeCredentials) -> NodeId {
    NodeId::from_public_key(&node.key.public())
}

/// A node's heartbeat stream, one beat at a time.
pub struct Pulse {
    pub beats: mpsc::Sender<HeartbeatRequest>,
    pub answers: Streaming<HeartbeatResponse>,
}

impl Pulse {
    pub async fn open(world: &World, node: &NodeCredentials) -> Result<Self, Status> {
        Self::open_at(world.endpoint(), world, node).await
    }

    pub async fn open_at(
        endpoint: Endpoint,
        world: &World,
        node: &NodeCredentials,
    ) -> Result<Self, Status> {
        let (beats, requests) = mpsc::channel(4);
        let mut client = CuratorClient::new(world.channel_to(endpoint, &Who::Node(node)));
        let call = client.heartbeat(ReceiverStream::new(requests));
        let answers = within_timeout("a heartbeat stream", call)
            .await?
            .into_inner();
        Ok(Self { beats, answers })
    }

    pub async fn beat_as(&mut self, boot_id: &str) -> Result<HeartbeatResponse, Status> {
        let request = HeartbeatRequest {
            boot_id: boot_id.into(),
            protocol_version: 1,
            ending: false,
        };
        // Fails if the stream has ended; that is reported below.
        let _ = self.beats.send(request).await;
        let answer = tokio::time::timeout(BOUND, self.answers.message()).await;
        answer
            .expect("a heartbeat is answered")?
            .ok_or_else(|| Status::cancelled("the stream has ended"))
    }

    pub async fn beat(&mut self) -> Result<HeartbeatResponse, Status> {
        self.beat_as(BOOT_ID).await
    }

    /// Announces the end of this boot, and waits until the curator has recorded it.
    pub async fn end_boot(mut self) -> Status {
        let request = HeartbeatRequest {
            boot_id: BOOT_ID.into(),
            protocol_version: 1,
            ending: true,
        };
        let _ = self.beats.send(request).await;
        self.end().await
    }

    /// Waits for the end of the stream without sending anything.
    pub async fn end(&mut self) -> Status {
        within_timeout("the end of a stream", async {
            loop {
                match self.answers.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => return Status::ok("without a reason"),
                    Err(status) => return status,
                }
            }
        })
        .await
    }
}
