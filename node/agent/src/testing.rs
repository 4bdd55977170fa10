//! A node and a fake curator, for tests of the workers that call curators.

use std::sync::Arc;

use hearth_api::client::{Curators, Options as ClientOptions};
use hearth_api::identity::{NodeCredentials, NodeId};
use hearth_api::server::Limits;
use hearth_api::testing::{self, Script, TestCluster, TestCurator};
use hearth_api::tls::wall_clock;
use hearth_api::v1::node_roles::ConsensusMember;
use hearth_api::v1::{ClusterDirectory, Node, NodeRoles, NodeState, NodeStatus};
use hearth_host::handover::MemberData;

use crate::CuratorConnection;

/// A node, and the curator on it.
pub struct Fake {
    pub cluster: Arc<TestCluster>,
    pub curator: TestCurator,
    pub node: Arc<NodeCredentials>,
    pub node_id: NodeId,
}

impl Fake {
    pub async fn new(script: Script) -> Self {
        let cluster = Arc::new(TestCluster::new());
        let node = cluster.node();
        Self {
            curator: {
                let limits = Limits::default();
                TestCurator::start_as(&cluster, &node, script, wall_clock(), limits).await
            },
            node_id: NodeId::from_public_key(&node.key.public()),
            node: Arc::new(node),
            cluster,
        }
    }

    /// Another curator of the cluster.
    pub async fn another(&self, script: Script) -> TestCurator {
        TestCurator::start(&self.cluster, script, wall_clock()).await
    }

    /// The node's connection to its curator.
    pub fn connection(&self) -> CuratorConnection {
        self.connection_to(&self.curator)
    }

    pub fn connection_to(&self, curator: &TestCurator) -> CuratorConnection {
        self.connection_to_all(&[curator])
    }

    /// The first curator is tried first.
    pub fn connection_to_all(&self, curators: &[&TestCurator]) -> CuratorConnection {
        let trust = testing::node_client_config(&self.node, wall_clock());
        let endpoints: Vec<_> = curators.iter().map(|curator| curator.endpoint()).collect();
        let curators = Curators::new(endpoints, trust, ClientOptions::default());
        CuratorConnection::new(self.node_id, curators)
    }

    pub fn member(&self) -> MemberData {
        MemberData {
            own: testing::own(&self.node),
            directory: ClusterDirectory::default(),
            uses_tpm: false,
        }
    }
}

/// A node record.
pub fn record(id: &str, address: &str, roles: NodeRoles) -> Node {
    Node {
        id: id.to_owned(),
        state: NodeState::Up.into(),
        status: Some(NodeStatus {
            external_address: address.into(),
            ..NodeStatus::default()
        }),
        roles: Some(roles),
        ..Node::default()
    }
}

pub fn consensus_member() -> NodeRoles {
    NodeRoles {
        consensus_member: Some(ConsensusMember::default()),
        ..NodeRoles::default()
    }
}
